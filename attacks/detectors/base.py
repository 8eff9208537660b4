"""What all detectors share: a score for each row, and a threshold that is set on benign data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mycelia.attacks.detectors.threshold import check_rate, threshold_at
from mycelia.attacks.model import Model, ModuleModel, as_model
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["Detector", "Function", "applied", "logits"]

Function = Callable[[Tensor], Tensor]
"""A module, or a function of tensors: [n, …] to [n, …]."""


@dataclass(frozen=True, eq=False)
class Detector(ABC):
    """Says how suspicious an input is. A value: `fit` returns another one.

    The score of a row depends on that row only, but for detectors that are `stateful`. An input that is not
    finite has a score of infinity.

    Attributes:
        threshold: scores above it are flagged; None before `fit`.
        unit: of scores, above 0: the threshold minus the median benign score, where that is above 0.
        fpr: rate of false alarms that the threshold was set for; None before `fit`.
        seed: of random draws.
        batch: rows at a time.
    """

    stateful: ClassVar[bool] = False

    threshold: float | None = field(default=None, kw_only=True)
    unit: float = field(default=1.0, kw_only=True)
    fpr: float | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    batch: int = field(default=256, kw_only=True)

    def __post_init__(self) -> None:
        if self.batch < 1 or not self.unit > 0:
            raise ConfigError(
                f"batch {self.batch}, unit {self.unit}", rule="at least 1; above 0", who=type(self).__name__
            )
        self.check()

    def check(self) -> None:  # noqa: B027 - some have nothing to refuse
        """Refuse settings that make no sense.

        Raises:
            ConfigError: naming the setting.
        """

    @abstractmethod
    def traced(self, x: Tensor) -> Tensor:
        """Scores of one batch, of which a gradient with respect to x may be taken where there is one.

        Models are expected to be `quiet`.

        Args:
            x: inputs [n, …], finite, n at least 1.

        Returns:
            [n]
        """

    @property
    @abstractmethod
    def parts(self) -> tuple[object, ...]:
        """Models and functions that a score is computed with."""

    @property
    def differentiable(self) -> bool:
        """Whether `traced` has a gradient, or one that stands in for it."""
        return all("gradient" in part.offers for part in self.parts if isinstance(part, Model))

    def fit(self, benign: Any, fpr: float, rng: int = 0) -> Self:
        """The same detector with a threshold.

        It is the smallest value that at most ⌊fpr·n⌋ scores of the benign rows exceed.

        Args:
            benign: inputs [n, …], finite, that no training has seen; a tensor or an array.
            fpr: rate of false alarms, above 0 and below 1. Below 1/n none of these rows is flagged, and a
                warning gives the smallest rate that n rows resolve.
            rng: seed.

        Raises:
            ConfigError: a rate outside (0, 1).
            DataError: no rows, or a score that is not finite.
        """
        check_rate(fpr)
        x = as_rows(benign)
        if not len(x):
            raise DataError("no benign rows", rule="at least one", who="benign")
        found = self.prepared(x, rng)
        return found.calibrated(found.benign_scores(x), fpr)

    def score(self, x: Any) -> Tensor:
        """How suspicious each row is.

        Args:
            x: inputs [n, …], floating point, a tensor or an array.

        Returns:
            float64 [n]; bigger is more suspicious.
        """
        rows = as_rows(x)
        found = torch.full((len(rows),), torch.inf, dtype=torch.float64, device=rows.device)
        sound = torch.isfinite(rows.flatten(1)).all(1).nonzero()[:, 0]
        with self.quiet(), torch.no_grad():
            for some in sound.split(self.batch) if len(sound) else ():
                found[some] = self.traced(rows[some]).double()
        return torch.where(found.isnan(), torch.inf, found)

    def flag(self, x: Any) -> Tensor:
        """Which rows score above the threshold.

        Args:
            x: see `score`.

        Returns:
            bool [n].

        Raises:
            ConfigError: before `fit`.
        """
        limit = self.limit
        return self.score(x) > limit

    # --- for detectors, and for what attacks them -----------------------------------------------------

    @property
    def limit(self) -> float:
        """The threshold.

        Raises:
            ConfigError: before `fit`.
        """
        if self.threshold is None:
            raise ConfigError(
                "no threshold yet",
                rule="a detector is fitted before it flags",
                fix="detector = detector.fit(benign, fpr=0.01)",
                who=type(self).__name__,
            )
        return self.threshold

    def prepared(self, benign: Tensor, rng: int) -> Self:
        """With all that is set before scores are calibrated."""
        return replace(self, seed=rng)

    def benign_scores(self, benign: Tensor) -> Tensor:
        """Those that the threshold is set on, [n]."""
        return self.score(benign)

    def calibrated(self, scores: Tensor, fpr: float) -> Self:
        """With the threshold that these benign scores give, [n]."""
        threshold = threshold_at(scores, fpr)
        spread = threshold - float(scores.median())
        return replace(self, threshold=threshold, unit=spread if spread > 0 else 1.0, fpr=fpr)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """All parts in evaluation mode without parameter gradients; afterwards they are as they were."""
        with ExitStack() as stack:
            for part in self.parts:
                if isinstance(part, Detector | Model):
                    stack.enter_context(part.quiet())
                elif isinstance(part, nn.Module):
                    stack.enter_context(ModuleModel(part).quiet())
            yield


def as_rows(x: Any) -> Tensor:
    """Inputs as a tensor [n, …].

    Raises:
        DataError: not floating point, or without rows.
    """
    found = torch.as_tensor(x).detach()
    if not found.is_floating_point() or found.dim() < 2:
        raise DataError(
            f"x is {found.dtype} {list(found.shape)}", rule="floating point, rows first: [n, …]", who="x"
        )
    return found


def applied(function: Function, x: Tensor, who: str) -> Tensor:
    """What a function from inputs to inputs makes of them.

    Raises:
        DataError: it gives something of another shape.
    """
    found = function(x)
    if found.shape != x.shape:
        raise DataError(
            f"inputs of {list(x.shape)}, outputs of {list(found.shape)}", rule="one shape", who=who
        )
    return found


def logits(model: object, x: Tensor, who: str) -> Tensor:
    """Logits [n, classes] with a gradient where one is being taken and the model has it.

    Raises:
        ConfigError: a model that gives labels only.
    """
    known = as_model(model)
    if "score" not in known.offers:
        raise ConfigError(
            f"{known.name} offers {', '.join(sorted(known.offers))}",
            rule="this detector compares scores",
            fix="RegionBased needs labels only",
            who=who,
        )
    wanted = torch.is_grad_enabled() and "gradient" in known.offers
    return known.traced(x) if wanted else known(x)
