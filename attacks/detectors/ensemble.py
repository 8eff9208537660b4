"""Several detectors that give one verdict on each row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from mycelia.attacks.detectors.base import Detector, as_rows
from mycelia.attacks.detectors.threshold import allowed, check_rate, smallest_threshold, threshold_at
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import derive

__all__ = ["Ensemble", "Rule"]

Rule = Literal["vote", "all", "any"]


@dataclass(frozen=True, eq=False)
class Ensemble(Detector):
    """A row is flagged when more than half, all, or any of the members flag it.

    `fit` gives all members one rate, the largest at which the verdicts keep to the rate that is asked for.
    The score of a row is that excess over a member's threshold, in the member's units, which decides: with
    "any" the largest, with "all" the smallest; it is above 0 when the row is flagged.

    Attributes:
        detectors: the members, at least one; no ensembles.
        rule: "vote" (more than half), "all" or "any".
    """

    detectors: tuple[Detector, ...]
    rule: Rule = "vote"

    def __post_init__(self) -> None:
        object.__setattr__(self, "detectors", tuple(self.detectors))
        super().__post_init__()

    def check(self) -> None:
        """See `Detector.check`."""
        if self.rule not in get_args(Rule):
            raise ConfigError(
                f"rule {self.rule!r}", rule=f"one of {', '.join(get_args(Rule))}", who="Ensemble.rule"
            )
        if self.threshold not in (None, 0.0):
            raise ConfigError(
                f"threshold {self.threshold}", rule="0: the members have the thresholds", who="Ensemble"
            )
        if not self.detectors:
            raise ConfigError("no detectors", rule="at least one", who="Ensemble")
        if any(isinstance(each, Ensemble) for each in self.detectors):
            raise ConfigError(
                "an ensemble in an ensemble",
                rule="members have scores of their own",
                fix="put their members into one",
                who="Ensemble",
            )

    @property
    def needed(self) -> int:
        """How many members have to flag a row."""
        count = len(self.detectors)
        return {"any": 1, "all": count, "vote": count // 2 + 1}[self.rule]

    @property
    def parts(self) -> tuple[object, ...]:
        """See `Detector.parts`."""
        return self.detectors

    @property
    def differentiable(self) -> bool:
        """See `Detector.differentiable`."""
        return all(each.differentiable for each in self.detectors)

    def fit(self, benign: Any, fpr: float, rng: int = 0) -> Self:
        """See `Detector.fit`; the members are fitted on the same rows."""
        check_rate(fpr)
        x = as_rows(benign)
        if not len(x):
            raise DataError("no benign rows", rule="at least one", who="benign")
        members = [
            each.prepared(x, derive(rng, f"attacks/detectors/ensemble/{place}"))
            for place, each in enumerate(self.detectors)
        ]
        scores = torch.stack([each.benign_scores(x) for each in members])
        threshold_at(scores.sum(0), fpr)  # for what it refuses and warns of
        n = len(x)
        fewest, most, limit = 0, n - 1, allowed(n, fpr)
        while fewest < most:  # the verdicts are the more, the lower the thresholds
            middle = (fewest + most + 1) // 2
            if int(self._verdict(scores > self._thresholds(scores, middle)).sum()) <= limit:
                fewest = middle
            else:
                most = middle - 1
        fitted = []
        for each, row in zip(members, scores, strict=True):
            threshold = smallest_threshold(row, fewest)
            spread = threshold - float(row.median())
            fitted.append(
                replace(each, threshold=threshold, unit=spread if spread > 0 else 1.0, fpr=fewest / n)
            )
        return replace(self, detectors=tuple(fitted), threshold=0.0, unit=1.0, fpr=fpr, seed=rng)

    def votes(self, x: Any) -> Tensor:
        """Which members flag which rows, bool [members, n].

        Args:
            x: see `score`.

        Raises:
            ConfigError: before `fit`.
        """
        rows = as_rows(x)
        return torch.stack([each.flag(rows) for each in self.detectors])

    def flag(self, x: Any) -> Tensor:
        """See `Detector.flag`."""
        _ = self.limit
        return self._verdict(self.votes(x))

    def score(self, x: Any) -> Tensor:
        """See `Detector.score`."""
        rows = as_rows(x)
        return self._decisive([(each.score(rows) - each.limit) / each.unit for each in self.detectors])

    def traced(self, x: Tensor) -> Tensor:
        """See `Detector.traced`."""
        return self._decisive([(each.traced(x).double() - each.limit) / each.unit for each in self.detectors])

    def _decisive(self, excess: list[Tensor]) -> Tensor:
        """The excess that as many members as are needed have at least."""
        return torch.stack(excess).sort(0, descending=True).values[self.needed - 1]

    def _verdict(self, votes: Tensor) -> Tensor:
        return votes.sum(0) >= self.needed

    @staticmethod
    def _thresholds(scores: Tensor, count: int) -> Tensor:
        return scores.sort(1, descending=True).values[:, count : count + 1]
