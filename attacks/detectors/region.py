"""A detector that asks a model about the surroundings of an input.

Cao, Gong: "Mitigating evasion attacks to deep neural networks via region-based classification", ACSAC 2017.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.detectors.base import Detector, as_rows
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.goals import predicted
from mycelia.attacks.model import as_model
from mycelia.engine.errors import ConfigError

__all__ = ["RegionBased", "region_radius"]

_TOGETHER: Final = 2**14  # numbers around each row that go through the model in one pass


@dataclass(frozen=True, eq=False)
class RegionBased(Detector):
    """The share of points around an input that a model labels otherwise than the input.

    The points are drawn uniformly from the cube of half width `radius`, independently for each coordinate
    and row, and clipped to the bounds. What a row gets depends on the seed and its bytes.

    Attributes:
        model: gives labels or scores; see `as_model`.
        radius: half the width of the cube, above 0, in units of the inputs; None: `fit` looks for it on
            benign data, see `region_radius`.
        m: points, at least 1.
        bounds: of inputs; two numbers, or two tensors that broadcast to a row.
    """

    model: object
    radius: float | None = None
    m: int = 100
    bounds: Bounds = field(default=(0.0, 1.0), kw_only=True)

    def check(self) -> None:
        """See `Detector.check`."""
        if self.m < 1 or (self.radius is not None and not 0 < self.radius < math.inf):
            raise ConfigError(
                f"radius {self.radius}, m {self.m}", rule="above 0 and finite; at least 1", who="RegionBased"
            )

    @property
    def parts(self) -> tuple[object, ...]:
        """See `Detector.parts`."""
        return (as_model(self.model),)

    def prepared(self, benign: Tensor, rng: int) -> Self:
        """See `Detector.prepared`; the radius is looked for where it is not given."""
        radius = self.radius
        if radius is None:
            radius = region_radius(
                self.model, benign, m=self.m, rng=rng, bounds=self.bounds, batch=self.batch
            )
        return replace(self, seed=rng, radius=radius)

    def traced(self, x: Tensor) -> Tensor:
        """See `Detector.traced`.

        A share of labels has no gradient: that of the mean probability of other labels stands in for it.
        """
        if self.radius is None:
            raise ConfigError(
                "no radius yet",
                rule="it is given, or looked for on benign data",
                fix="detector = detector.fit(benign, fpr=0.01)",
                who="RegionBased",
            )
        model = as_model(self.model)
        wanted = torch.is_grad_enabled() and "gradient" in model.offers
        with torch.no_grad():
            label = predicted(model(x))
        kept = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        sure = torch.zeros_like(kept)
        for points in _clouds(x, self.radius, self.m, self.seed, self.bounds):
            count = len(points) // len(x)
            outputs = model.traced(points) if wanted else model(points)
            same = predicted(outputs.detach()).view(count, -1) == label
            kept = kept + (same & (label >= 0)).sum(0)
            if wanted:
                own = label.clamp(min=0).repeat(count)[:, None]
                sure = sure + outputs.softmax(1).gather(1, own).view(count, -1).double().sum(0)
        score = 1 - kept / self.m
        return score - (sure - sure.detach()) / self.m if wanted else score


def region_radius(
    model: object,
    benign: Any,
    *,
    m: int = 100,
    rng: int = 0,
    bounds: Bounds = (0.0, 1.0),
    step: float = 0.01,
    most: float = 1.0,
    agreement: float = 0.99,
    batch: int = 256,
) -> float:
    """The largest radius at which the vote of a region is what a model says of its centre, on benign data.

    Radii rise by `step` as long as the most frequent label of the points around a row is the row's own label
    for a share of the rows of at least `agreement`.

    Args:
        model: see `as_model`.
        benign: inputs [n, …], n at least 1.
        m: points around each row.
        rng: seed.
        bounds: of inputs.
        step: between radii and the smallest of them, above 0, in units of the inputs.
        most: largest radius.
        agreement: share of rows, in (0, 1].
        batch: rows at a time.

    Returns:
        the radius; `step` where even that changes too many votes.

    Raises:
        ConfigError: a setting that is out of range.
    """
    if not 0 < step <= most or not 0 < agreement <= 1 or m < 1 or batch < 1:
        raise ConfigError(
            f"step {step}, most {most}, agreement {agreement}, m {m}, batch {batch}",
            rule="0 < step ≤ most, a share above 0, at least 1 each",
            who="region_radius",
        )
    rows, known = as_rows(benign), as_model(model)
    found = step
    with known.quiet(), torch.no_grad():
        labels = [predicted(known(some)) for some in rows.split(batch)]
        for place in range(1, math.floor(most / step + 1e-9) + 1):
            same = 0
            for some, own in zip(rows.split(batch), labels, strict=True):
                clouds = _clouds(some, place * step, m, rng, bounds)
                votes = torch.cat([predicted(known(points)).view(-1, len(some)) for points in clouds])
                same += int((votes.mode(0).values == own).sum())
            if same < agreement * len(rows):
                break
            found = place * step
    return found


def _clouds(x: Tensor, radius: float, m: int, seed: int, bounds: Bounds) -> Iterator[Tensor]:
    """Points around each row, some draws at a time: [draws · n, …], one draw of all rows after the other."""
    draws = Draws(seed, "detectors/region", row_keys(x))
    low, high = (torch.as_tensor(each, dtype=x.dtype, device=x.device) for each in bounds)
    shape = x.shape[1:]
    together = max(1, min(m, _TOGETHER // max(1, math.prod(shape))))  # whatever n is: a draw keeps its name
    for block in range(-(-m // together)):
        count = min(together, m - block * together)
        unit = draws.uniform("cube", (together, *shape), step=block)[:, :count].transpose(0, 1)
        points = x + (radius * (2 * unit - 1)).to(x.dtype)
        yield torch.minimum(torch.maximum(points, low), high).flatten(0, 1)
