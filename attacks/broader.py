"""Beside a ball: natural corruptions, the worst rotation and shift, and normal noise of rising size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from torch import Tensor

from mycelia.attacks.arguments import Bounds, bounds_of
from mycelia.attacks.evasion.spatial import Spatial
from mycelia.attacks.goals import Untargeted
from mycelia.attacks.intervals import wilson
from mycelia.attacks.model import Model
from mycelia.attacks.transforms.accuracy import CorruptionReport, Score, corruption_report, gaussian_ladder
from mycelia.attacks.transforms.base import Layout
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["Broader", "SpatialScore", "broader", "unmeasured"]

_KEYS: Final = ("corruptions", "spatial", "gaussian")
_AXES: Final = 4
_SIGMAS: Final = (0.05, 0.1, 0.2, 0.3, 0.5)  # of the width of the bounds

T = TypeVar("T")


@dataclass(frozen=True)
class SpatialScore:
    """Rows that are right wherever they are moved to.

    Attributes:
        score: rows that are right at every point of the grid.
        rotation: largest angle, in degrees, to both sides.
        shift: largest shift, in pixels, to both sides.
        grid: points.
    """

    score: Score
    rotation: float
    shift: float
    grid: int

    def to_json(self) -> dict[str, Any]:
        """The block `broader.spatial` of a report."""
        return {
            "rotation": self.rotation, "shift": self.shift, "grid": self.grid, "n": self.score.n,
            **self.score.to_json(),
        }  # fmt: skip


@dataclass(frozen=True)
class Broader:
    """What was measured; all over all rows that could be asked about.

    Attributes:
        corruptions: accuracy by corruption and severity; None: see `reasons`.
        spatial: the worst of a grid of rotations and shifts; None: see `reasons`.
        gaussian: accuracy by standard deviation of the noise, in units of the inputs; empty: see `reasons`.
        reasons: why something is missing, by its name here.
    """

    corruptions: CorruptionReport | None = None
    spatial: SpatialScore | None = None
    gaussian: Mapping[float, Score] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The block `broader` of a report."""
        ladder = [{"sigma": sigma, "n": at.n, **at.to_json()} for sigma, at in self.gaussian.items()]
        measured = {
            "corruptions": self.corruptions and self.corruptions.to_json(),
            "spatial": self.spatial and self.spatial.to_json(),
            "gaussian": ladder or None,
        }
        missing = {f"{key}_reason": self.reasons[key] for key in _KEYS if measured[key] is None}
        return measured | missing

    def text(self) -> list[str]:
        """Lines, for a terminal."""
        lines = []
        if self.corruptions is not None:
            lines += self.corruptions.text().rstrip("\n").split("\n")
        if self.spatial is not None:
            at = self.spatial
            size = f"rotations to {at.rotation:g}° with shifts to {at.shift:g} pixels"
            lines.append(f"worst of {at.grid} {size}: {_part(at.score)}")
        lines += [f"normal noise of {sigma:g}: {_part(score)}" for sigma, score in self.gaussian.items()]
        why: dict[str, list[str]] = {}
        for key in _KEYS:
            if key in self.reasons:
                why.setdefault(self.reasons[key], []).append(key)
        return [*lines, *(f"{', '.join(keys)}: not measured, {reason}" for reason, keys in why.items())]


def unmeasured(reason: str) -> Broader:
    """Nothing, and why.

    Args:
        reason: for all of it.
    """
    return Broader(reasons=dict.fromkeys(_KEYS, reason))


def broader(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    layout: Layout | None,
    bounds: Bounds = (0.0, 1.0),
    rng: int = 0,
    batch: int = 256,
) -> Broader:
    """Accuracy beside a ball.

    Args:
        model: of the evaluation.
        x: inputs [n, …], finite and within bounds.
        y: true classes [n].
        layout: of images; None: the inputs are none.
        bounds: smallest and largest value; sizes of the noise are shares of their width, or of 1 where it is
            infinite.
        rng: seed.
        batch: rows at a time.
    """
    if layout is None or x.dim() != _AXES:
        shape = ", ".join(map(str, x.shape[1:]))
        return unmeasured(f"inputs of shape [n, {shape}], layout {layout}: this is about images of four axes")
    if not len(x):
        return unmeasured("no finite row within bounds")
    call: dict[str, Any] = {"rng": rng, "bounds": bounds, "batch": batch}
    low, high = bounds_of(bounds, x)
    width = float((high - low).max())
    sigmas = [share * (width if width < math.inf else 1.0) for share in _SIGMAS]
    reasons: dict[str, str] = {}

    def tried(key: str, measure: Callable[[], T]) -> T | None:
        try:
            return measure()
        except (ConfigError, DataError) as error:  # Pillow is missing, bounds are infinite, labels only, …
            reasons[key] = f"{error.found}: {error.rule}" if error.rule else error.found
            return None

    return Broader(
        tried("corruptions", lambda: corruption_report(model, x, y, layout=layout, **call)),
        tried("spatial", lambda: _spatial(model, x, y, layout, call)),
        tried("gaussian", lambda: gaussian_ladder(model, x, y, layout=layout, sigmas=sigmas, **call)) or {},
        reasons,
    )


def _spatial(model: Model, x: Tensor, y: Tensor, layout: Layout, call: dict[str, Any]) -> SpatialScore:
    attack = Spatial(layout=layout)
    held = attack.run(model, x, Untargeted(y), **call).counts.held
    return SpatialScore(Score(held, len(x)), attack.rotation, attack.shift, len(attack.grid()))


def _part(score: Score) -> str:
    low, high = wilson(score.right, score.n)
    return f"{100 * score.accuracy:.2f} % [{100 * low:.2f}, {100 * high:.2f}]"
