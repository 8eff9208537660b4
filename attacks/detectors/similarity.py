"""A detector that remembers: attacks by queries send inputs that are alike.

Chen, Carlini, Wagner: "Stateful detection of black-box adversarial attacks", SPAI 2020.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mycelia.attacks.detectors.base import Detector, Function, as_rows
from mycelia.attacks.norms import wide
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["Similarity"]

_CHUNK = 256  # rows of a matrix of distances at a time


class _Memory:
    """The last queries, and which ones were flagged; of bounded size.

    Attributes:
        queries: how many there were.
        found: how many of them were flagged.
        hits: indices of the last of these.
    """

    def __init__(self) -> None:
        self.queries, self.found = 0, 0
        self.hits: list[int] = []
        self._codes = torch.zeros(0, 0)
        self._count, self._place = 0, 0

    @property
    def codes(self) -> Tensor:
        """Those that are remembered, [count, d], in no order."""
        return self._codes[: self._count]

    def add(self, code: Tensor, window: int) -> None:
        """Remember one more; the oldest one goes when there is no room."""
        if not len(self._codes):
            self._codes = code.new_empty(window, len(code))
        self._codes[self._place] = code
        self._place = (self._place + 1) % window
        self._count = min(self._count + 1, window)

    def flagged(self, window: int) -> None:
        """The query at hand is one."""
        self.found += 1
        self.hits = [*self.hits[1 - window :], self.queries] if window > 1 else [self.queries]

    def clear(self) -> None:
        """Forget the codes; what was flagged stays known."""
        self._count, self._place = 0, 0


@dataclass(frozen=True, eq=False)
class Similarity(Detector):
    """Minus the mean distance of a query to its k nearest among the last queries.

    The rows of a call are queries in their order. `flag` remembers them; on a hit the memory of queries is
    cleared and the index of the query recorded, so that one attack is not counted with every step.
    `score` says what `flag` would see and remembers nothing. A query that is not finite is flagged, and
    neither remembered nor a reason to forget. `fit` measures each benign row against the `window` rows
    before it, in a ring, and never against itself; with fewer than window + 1 rows the memory that it
    imitates is not full.

    Attributes:
        encoder: gives a code for each input, [n, …] to [n, …]; their Euclidean distance says how alike
            inputs are. None: the inputs themselves.
        k: neighbours, at least 1. As long as fewer queries are remembered, nothing is suspicious.
        window: how many queries are remembered, at least k.
    """

    stateful: ClassVar[bool] = True

    encoder: Function | None = None
    k: int = 50
    window: int = 1000
    memory: _Memory = field(default_factory=_Memory, kw_only=True, repr=False)

    def check(self) -> None:
        """See `Detector.check`."""
        if not 1 <= self.k <= self.window:
            raise ConfigError(f"k {self.k}, window {self.window}", rule="1 ≤ k ≤ window", who="Similarity")

    @property
    def parts(self) -> tuple[object, ...]:
        """See `Detector.parts`."""
        return (self.encoder,)

    @property
    def differentiable(self) -> bool:
        """False: a score depends on the queries before it."""
        return False

    @property
    def queries(self) -> int:
        """How many queries `flag` has seen."""
        return self.memory.queries

    @property
    def found(self) -> int:
        """How many queries were flagged."""
        return self.memory.found

    @property
    def hits(self) -> tuple[int, ...]:
        """Indices of the queries that were flagged, counted from 0; the last `window` of them."""
        return tuple(self.memory.hits)

    def traced(self, x: Tensor) -> Tensor:
        """Refused: there is no score without the queries before it."""
        raise ConfigError(
            "a score that depends on earlier queries",
            rule="only detectors that look at one row at a time have a gradient",
            who="Similarity",
        )

    def prepared(self, benign: Tensor, rng: int) -> Self:
        """See `Detector.prepared`; the memory is a new one."""
        if len(benign) <= self.k:
            raise DataError(
                f"{len(benign)} benign rows",
                rule=f"more than k = {self.k}: each has k neighbours",
                who="benign",
            )
        return replace(self, seed=rng, memory=_Memory())

    def benign_scores(self, benign: Tensor) -> Tensor:
        """See `Detector.benign_scores`."""
        codes = self._codes(benign)
        n = len(codes)
        places = torch.arange(n, device=codes.device)
        found = []
        for some in places.split(_CHUNK):
            ago = (some[:, None] - places) % n
            far = torch.cdist(codes[some], codes, compute_mode="donot_use_mm_for_euclid_dist")
            far = torch.where((ago >= 1) & (ago <= self.window), far, torch.inf)
            found.append(-far.topk(self.k, 1, largest=False).values.mean(1))
        return torch.cat(found)

    def score(self, x: Any) -> Tensor:
        """See `Detector.score`; nothing is remembered."""
        return self._seen(as_rows(x), deepcopy(self.memory))[0]

    def flag(self, x: Any) -> Tensor:
        """See `Detector.flag`; the queries are remembered."""
        _ = self.limit
        return self._seen(as_rows(x), self.memory)[1]

    def _seen(self, x: Tensor, memory: _Memory) -> tuple[Tensor, Tensor]:
        """Scores and verdicts of queries, one after the other; before `fit` nothing is flagged."""
        threshold = torch.inf if self.threshold is None else self.threshold
        sound = torch.isfinite(x.flatten(1)).all(1)
        codes = self._codes(torch.where(wide(sound, x), x, torch.zeros_like(x)))
        scores = torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)
        flagged = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        for row, fine in enumerate(sound.tolist()):
            value = torch.inf
            if fine:
                known = memory.codes
                value = -torch.inf
                if len(known) >= self.k:
                    far = torch.linalg.vector_norm(known - codes[row], dim=1)
                    value = -float(far.topk(self.k, largest=False).values.mean())
            scores[row] = value
            if value > threshold:
                flagged[row] = True
                memory.flagged(self.window)
                if fine:  # else whoever sends such queries could make it forget at will
                    memory.clear()
            elif fine:
                memory.add(codes[row], self.window)
            memory.queries += 1
        return scores, flagged

    def _codes(self, x: Tensor) -> Tensor:
        """float64 [n, d]."""
        if self.encoder is None:
            return x.flatten(1).double()
        with self.quiet(), torch.no_grad():
            parts = [self.encoder(some).flatten(1).double() for some in x.split(self.batch)]
        found = torch.cat(parts)
        if len(found) != len(x):
            raise DataError(f"{len(found)} codes of {len(x)} inputs", rule="one for each", who="encoder")
        return found
