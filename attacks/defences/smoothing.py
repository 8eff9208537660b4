"""Randomized smoothing: the class that a model gives most often under normal noise, and a radius of it.

Cohen, Rosenfeld, Kolter: "Certified adversarial robustness via randomized smoothing", ICML 2019, algorithms
PREDICT and CERTIFY. Noise is not clipped: the theorem is about normal noise. Certificates speak of the l2
norm, and of inputs without bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from scipy import special
from torch import Tensor

from mycelia.attacks.arguments import inputs_of
from mycelia.attacks.defences.certificates import (
    Ints,
    Look,
    certified_radius,
    check_attainable,
    count_until,
    looks,
    max_radius,
    top_two_p,
)
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.goals import predicted
from mycelia.attacks.intervals import clopper_pearson
from mycelia.attacks.model import as_model
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["ABSTAIN", "Certificates", "CertifiedShare", "Smoothed", "certified_radius", "max_radius"]

ABSTAIN: Final = -1
"""In the place of a class: the draws do not say which."""

_BLOCK: Final = 1024  # draws of a row that are made at once, at most
_NUMBERS: Final = 2**18  # of a row that are made at once: the layers of a model then fit a cache
_TOGETHER: Final = 2**18  # of all rows


@dataclass(frozen=True, eq=False)
class Smoothed:
    """A smoothed classifier.

    >>> from mycelia.attacks.planted import affine
    >>> smoothed = Smoothed(affine(2, 3), sigma=0.5)
    >>> found = smoothed.certify(torch.zeros(1, 3, dtype=torch.float64), n0=10, n=100, alpha=0.01, rng=0)
    >>> bool(found.radius[0] <= max_radius(100, 0.5, 0.01))
    True

    Attributes:
        model: see `as_model`; only its labels are read, in evaluation mode.
        sigma: standard deviation of the noise, above 0, in units of the inputs.
        batch: noisy inputs in one pass; results do not depend on it.
    """

    model: object
    sigma: float
    batch: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.sigma < math.inf or self.batch < 1:
            raise ConfigError(
                f"sigma {self.sigma}, batch {self.batch}",
                rule="sigma above 0 and finite, batch at least 1",
                who="Smoothed",
            )

    def predict(self, x: Any, n: int, alpha: float, rng: int) -> Tensor:
        """The class that most draws give, where the two-sided binomial test tells it from the second one.

        Args:
            x: inputs [rows, …], floating point.
            n: draws for each, at least 1.
            alpha: chance of another class than the smoothed one, in (0, 1).
            rng: seed; what a row draws depends on its bytes alone.

        Returns:
            int64 [rows]; `ABSTAIN` where p > alpha.
        """
        inputs = inputs_of(x)
        max_radius(n, self.sigma, alpha)  # refuses what is out of range
        counts = self._counts(inputs, self._draws(inputs, rng), "predict", n)
        top, classes = counts.topk(2, 1)
        p = top_two_p(top[:, 0].cpu().numpy(), top[:, 1].cpu().numpy())
        sure = torch.from_numpy(p <= alpha).to(inputs.device)
        return torch.where(sure, classes[:, 0], ABSTAIN)

    def certify(
        self,
        x: Any,
        n0: int,
        n: int,
        alpha: float,
        rng: int,
        *,
        radius: float | Sequence[float] | None = None,
        adaptive: bool = False,
    ) -> Certificates:
        """A class and an l2 radius in which it stays the smoothed one, each with confidence 1 − alpha.

        Args:
            x: inputs [rows, …], floating point.
            n0: draws that choose the class.
            n: other draws that count it; with `adaptive`, at most.
            alpha: chance of a wrong certificate, in (0, 1).
            rng: seed; what a row draws depends on its bytes alone.
            radius: asked for, one or several.
            adaptive: look at the counts on the way, and stop once it is known which of the radii asked for
                will be certified; alpha is spent over the looks, see `looks`. Radii that were not asked for
                are then certified less often than they could be.

        Returns:
            one certificate for each row.

        Raises:
            ConfigError: a radius that n draws can never certify, with the n that would do; `adaptive` without
                a radius; a number out of range.
        """
        inputs = inputs_of(x)
        asked = () if radius is None else (radius,) if isinstance(radius, float | int) else tuple(radius)
        self._check(n0, n, alpha, asked, adaptive=adaptive)
        schedule = looks(n, alpha, adaptive=adaptive)
        draws = self._draws(inputs, rng)
        label = self._chosen(inputs, draws, n0)

        def draw(rows: Ints, look: Look, size: int) -> Ints:
            some = torch.from_numpy(rows).to(inputs.device)
            found = self._agreeing(inputs[some], draws.of(some), f"count/{look.n}", size, label[some])
            result: Ints = found.cpu().numpy()
            return result

        counted = count_until(draw, len(inputs), schedule, self.sigma, asked if adaptive else ())
        lower = torch.from_numpy(counted.lower).to(inputs.device)
        sure = lower > 0.5
        size = torch.from_numpy(self.sigma * special.ndtri(counted.lower)).to(inputs.device)
        return Certificates(
            label=torch.where(sure, label, ABSTAIN), radius=torch.where(sure, size, 0.0), lower=lower,
            count=torch.from_numpy(counted.agreed).to(inputs.device),
            draws=n0 + torch.from_numpy(counted.n).to(inputs.device),
            sigma=self.sigma, n0=n0, n=n, alpha=alpha, adaptive=adaptive, asked=asked, seed=rng,
        )  # fmt: skip

    # --- draws ------------------------------------------------------------------------------------

    def _check(self, n0: int, n: int, alpha: float, asked: Sequence[float], *, adaptive: bool) -> None:
        max_radius(n, self.sigma, alpha)  # refuses what is out of range
        if n0 < 1:
            raise ConfigError(f"n0 {n0}", rule="at least 1 draw chooses the class", who="Smoothed.certify")
        if adaptive and not asked:
            raise ConfigError(
                "adaptive without a radius", rule="draws end once it is known whether it is certified",
                fix="radius=0.5, or several", who="Smoothed.certify",
            )  # fmt: skip
        last = looks(n, alpha, adaptive=adaptive)[-1]
        for each in asked:
            if not each >= 0:
                raise ConfigError(f"radius {each}", rule="at least 0", who="Smoothed.certify")
            check_attainable(each, last.n, self.sigma, last.alpha)

    def _draws(self, x: Tensor, rng: int) -> Draws:
        return Draws(rng, "Smoothed", row_keys(x))

    def _chosen(self, x: Tensor, draws: Draws, n0: int) -> Tensor:
        return self._counts(x, draws, "choose", n0).argmax(1)

    def _counts(self, x: Tensor, draws: Draws, use: str, n: int) -> Tensor:
        """How many draws give each class, int64 [rows, classes]; those that give none are left out."""
        counts = torch.zeros(len(x), 2, dtype=torch.int64, device=x.device)
        for rows, labels in self._labels(x, draws, use, n):
            if (missing := int(labels.max()) + 1 - counts.shape[1]) > 0:
                counts = torch.nn.functional.pad(counts, (0, missing))
            counts[rows].scatter_add_(1, labels.clamp(min=0), (labels >= 0).to(torch.int64))
        return counts

    def _agreeing(self, x: Tensor, draws: Draws, use: str, n: int, label: Tensor) -> Tensor:
        """How many draws give one class, int64 [rows]."""
        counts = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        for rows, labels in self._labels(x, draws, use, n):
            counts[rows] += (labels == label[rows, None]).sum(1)
        return counts

    def _labels(self, x: Tensor, draws: Draws, use: str, n: int) -> Iterator[tuple[slice, Tensor]]:
        """Some rows, and what the model says of some draws of each, [rows, draws], until all are made.

        A draw is named by its place in the sequence of its row, so it does not depend on what goes together.
        """
        model = as_model(self.model)
        size = max(1, math.prod(x.shape[1:]))
        block = max(1, min(_BLOCK, _NUMBERS // size))
        together = max(1, _TOGETHER // (min(block, n) * size))
        with model.quiet():
            for first in range(0, len(x), together):
                rows = slice(first, first + together)
                mine = Draws(draws.seed, draws.attack, draws.keys[rows])
                for number, begin in enumerate(range(0, n, block)):
                    many = min(block, n - begin)
                    noise = mine.normal(use, (many, *x.shape[1:]), step=number, dtype=x.dtype)
                    points = (x[rows, None] + self.sigma * noise).flatten(0, 1)
                    yield rows, _labels(model, points, self.batch).view(-1, many)


@dataclass(frozen=True)
class CertifiedShare:
    """How many examples are right for sure in a radius.

    Attributes:
        radius: l2, in units of the inputs.
        correct: examples whose certificate has the true class and at least this radius.
        abstained: examples without a certificate, which count as wrong.
        n: examples.
        draws: of all of them.
        alpha: chance that the certificate of an example is wrong.
    """

    radius: float
    correct: int
    abstained: int
    n: int
    draws: int
    alpha: float

    @property
    def accuracy(self) -> float | None:
        """Share of all examples; None without any."""
        return self.correct / self.n if self.n else None

    def to_json(self) -> dict[str, Any]:
        """As the report has it; intervals are Clopper–Pearson's."""
        found: dict[str, Any] = {"radius": self.radius}
        for key, count in (("accuracy", self.correct), ("abstained", self.abstained)):
            found[key] = count / self.n if self.n else None
            found[f"{key}_ci95"] = list(clopper_pearson(count, self.n)) if self.n else None
            if not self.n:
                found[f"{key}_reason"] = "no rows"
        return found | {"n": self.n, "draws": self.draws, "alpha": self.alpha}


@dataclass(frozen=True, eq=False)
class Certificates:
    """One certificate for each row.

    Attributes:
        label: int64 [rows]; `ABSTAIN` where nothing is certified.
        radius: float64 [rows], l2, in units of the inputs; 0 where nothing is certified.
        lower: bound of the class's probability under noise, float64 [rows].
        count: draws that gave the class, int64 [rows].
        draws: made for each row, those that chose the class among them, int64 [rows].
        sigma: of the noise.
        n0: draws that chose the class.
        n: draws at most that counted it.
        alpha: chance of a wrong certificate, for each row.
        adaptive: whether rows stopped early.
        asked: radii asked for.
        seed: of the call.
    """

    label: Tensor
    radius: Tensor
    lower: Tensor
    count: Tensor
    draws: Tensor
    sigma: float
    n0: int
    n: int
    alpha: float
    adaptive: bool
    asked: tuple[float, ...]
    seed: int

    def __len__(self) -> int:
        return len(self.label)

    def accuracy(self, y: Any, radii: Sequence[float] = ()) -> tuple[CertifiedShare, ...]:
        """Certified accuracy at each radius, over all examples.

        Args:
            y: true classes, integers [rows].
            radii: by default those asked for.

        Raises:
            ConfigError: a radius that so many draws can never certify, with the n that would do.
            DataError: not as many labels as rows.
        """
        labels = torch.as_tensor(y).to(self.label.device)
        if labels.shape != self.label.shape:
            raise DataError(
                f"{len(self)} certificates, labels {list(labels.shape)}", rule="one for each", who="accuracy"
            )
        last = looks(self.n, self.alpha, adaptive=self.adaptive)[-1]
        sure = self.label != ABSTAIN
        found = []
        for radius in radii or self.asked:
            check_attainable(radius, last.n, self.sigma, last.alpha)
            right = sure & (self.label == labels) & (self.radius >= radius)
            found.append(
                CertifiedShare(
                    float(radius), int(right.sum()), int((~sure).sum()), len(self), int(self.draws.sum()),
                    self.alpha,
                )
            )  # fmt: skip
        return tuple(found)


def _labels(model: Callable[[Tensor], Tensor], points: Tensor, batch: int) -> Tensor:
    return torch.cat([predicted(model(part)) for part in points.split(batch)])
