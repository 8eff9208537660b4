"""One patch for many pictures, wherever, however large and however turned it lies in them.

Brown, Mané, Roy, Abadi, Gilmer: "Adversarial patch", NIPS workshop on machine learning and computer security,
2017; the mean over random changes is that of Athalye, Engstrom, Ilyas, Kwok: "Synthesizing robust adversarial
examples", ICML 2018.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.arguments import bounds_of, clipped, inputs_of
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.goals import Goal, predicted
from mycelia.attacks.intervals import wilson
from mycelia.attacks.model import Model, as_model
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator

__all__ = ["Patch", "PatchResult", "Places", "placed"]

Shape = Literal["disc", "square"]
Layout = Literal["nchw", "nhwc"]

_RATES: Final = (0.9, 0.999)  # of Adam


class Places(NamedTuple):
    """Where a patch lies in each picture, in pixels; float64 [n] each.

    Attributes:
        top: of its centre, below the upper edge of the picture.
        left: of its centre, from the left edge.
        side: of the square that holds it.
        angle: by which it is turned, counter-clockwise, in radians.
    """

    top: Tensor
    left: Tensor
    side: Tensor
    angle: Tensor


@dataclass(frozen=True, eq=False)
class PatchResult:
    """A patch and what it does, each row with one place, size and angle that it was not trained with.

    Rows that the model had wrong from the start (with a target: that were classified as it) and rows that are
    not finite count nowhere.

    Attributes:
        patch: [channels, side, side].
        fooled: share of the rows that it was made on for which the goal is reached; None without such rows.
        held_out_fooled: the same of the others: what it is worth on pictures that it has not seen.
        held_out_untrained: that of the patch before its training, on the same rows at the same places: what
            covering a part of the picture does by itself.
        counted: rows that it was made on, and that count.
        held_out_counted: the others that count.
        held_out: bool [n], rows that it was not made on.
        targeted: whether the goal has targets.
        settings: of the attack.
        seed: of the call.
        seconds: it took.
    """

    patch: Tensor
    fooled: float | None
    held_out_fooled: float | None
    held_out_untrained: float | None
    counted: int
    held_out_counted: int
    held_out: Tensor
    targeted: bool
    settings: Patch
    seed: int
    seconds: float

    @property
    def held_out_fooled_ci95(self) -> tuple[float, float] | None:
        """The 95 % interval of `held_out_fooled`; None without held-out rows."""
        if self.held_out_fooled is None:
            return None
        return wilson(round(self.held_out_fooled * self.held_out_counted), self.held_out_counted)

    def applied(self, x: Tensor, rng: int = 0) -> Tensor:
        """Pictures with the patch at places that a seed draws, as x.

        Args:
            x: pictures in the layout of the settings.
            rng: seed.
        """
        draws = Draws(rng, "Patch/applied", row_keys(x))
        return placed(x, self.patch.to(x), self.settings.places(x, draws), self.settings)


@dataclass(frozen=True)
class Patch:
    """Makes a patch that reaches a goal in as many pictures as it can.

    The patch replaces what is behind it; it is moved by Adam along the gradient of the mean cross-entropy of
    pictures, each with a place, a size and an angle drawn anew (section 2 of the paper). It lies whole in the
    picture, unless it is turned and too large for that.

    Attributes:
        shape: "disc", as in the paper, or "square".
        scale: smallest and largest side of the patch, as shares of the shorter side of a picture.
        rotation: largest angle to either side, in degrees, 0 to 180.
        side: of the picture of the patch, in pixels; None: as large as it is ever shown.
        epochs: passes over the pictures, at least 1; the patch is the best that one of them ends with.
        step_size: of Adam, as a share of the width of the bounds.
        batch: pictures in a step, at least 1.
        layout: where the axes of a picture are.
    """

    shape: Shape = "disc"
    scale: tuple[float, float] = (0.3, 0.5)
    rotation: float = 22.5
    side: int | None = None
    epochs: int = 30
    step_size: float = 0.05
    batch: int = 32
    layout: Layout = "nchw"

    def __post_init__(self) -> None:
        """Refuse settings that make no sense.

        Raises:
            ConfigError: naming them.
        """
        small, large = self.scale
        sizes = 0 < small <= large <= 1 and 0 <= self.rotation <= 180 and 0 < self.step_size < math.inf
        counts = min(self.epochs, self.batch, 1 if self.side is None else self.side) >= 1
        if self.shape not in ("disc", "square") or self.layout not in ("nchw", "nhwc"):
            raise ConfigError(
                f"shape {self.shape!r}, layout {self.layout!r}",
                rule="disc or square, nchw or nhwc",
                who="Patch",
            )
        if not sizes or not counts:
            raise ConfigError(
                f"scale {self.scale}, rotation {self.rotation}, step_size {self.step_size}, "
                f"side {self.side}, epochs {self.epochs}, batch {self.batch}",
                rule="0 < smallest ≤ largest ≤ 1, 0 to 180 degrees, a step above 0, counts of at least 1",
                who="Patch",
            )

    def run(
        self,
        model: object,
        x: Any,
        goal: Goal,
        *,
        held_out: float = 0.25,
        rng: int = 0,
        bounds: tuple[float, float] = (0.0, 1.0),
    ) -> PatchResult:
        """Make a patch on some pictures and try it on the others.

        Args:
            model: see `as_model`; it gives gradients.
            x: pictures [n, c, h, w], or [n, h, w, c], floating point, a tensor or an array.
            goal: what is wanted of each row; in the paper one target for all.
            held_out: share of the rows on which the patch is only tried, in [0, 1).
            rng: seed, of the first patch, the places, the order of rows, and which are held out.
            bounds: smallest and largest value of an input.

        Raises:
            ConfigError: a setting that is out of range, or a model without gradients.
            DataError: inputs that are no pictures, not floating point or beyond their bounds, or not as many
                as goals.
        """
        began = time.perf_counter()
        target = as_model(model, numpy=isinstance(x, np.ndarray))
        if "gradient" not in target.offers or not 0 <= held_out < 1:
            raise ConfigError(
                f"held_out {held_out}, a model that offers {', '.join(sorted(target.offers))}",
                rule="a share in [0, 1), and gradients",
                who="Patch",
            )
        inputs, sound, n = *clipped(inputs_of(x), *bounds_of(bounds, inputs_of(x))), len(x)
        if len(goal) != n or inputs.dim() != 4:
            raise DataError(
                f"inputs {list(inputs.shape)}, a goal of {len(goal)} rows",
                rule=f"pictures, {self.layout}, with one goal each",
                who="Patch",
            )
        goal = goal.of(torch.arange(n, device=inputs.device))
        order = torch.from_numpy(generator(rng, "attacks/patch/held-out").permutation(n))
        apart = torch.zeros(n, dtype=torch.bool, device=inputs.device)
        apart[order[: round(held_out * n)].to(inputs.device)] = True
        # The same rows may stand twice: their numbers tell them apart.
        draws = Draws(rng, "Patch", row_keys(torch.arange(n, device=inputs.device)[:, None]))
        work = _Work(self, target, inputs, goal, draws, bounds)
        with target.quiet():
            usable = work.usable(sound)
            made_on, tried_on = (rows.nonzero()[:, 0] for rows in (usable & ~apart, usable & apart))
            first = self._first(inputs, rng, bounds)
            best = work.trained(first, made_on, rng)
            shares = [
                work.score(patch, rows)[0]
                for patch, rows in ((best, made_on), (best, tried_on), (first, tried_on))
            ]
        return PatchResult(
            best, shares[0], shares[1], shares[2], len(made_on), len(tried_on), apart, goal.targeted, self,
            rng, time.perf_counter() - began,
        )  # fmt: skip

    def places(self, x: Tensor, draws: Draws, step: int = 0) -> Places:
        """Where the patch lies in each of these pictures.

        Args:
            x: pictures.
            draws: of the rows.
            step: of the training, which has other places at each.
        """
        height, width = _sides(x, self.layout)
        u = draws.uniform("place", (4,), step=step)
        small, large = self.scale
        side = (small + (large - small) * u[:, 2]) * min(height, width)
        angle = (2 * u[:, 3] - 1) * math.radians(self.rotation)
        reach = side / 2
        if self.shape == "square":
            reach = reach * (angle.cos().abs() + angle.sin().abs())
        top, left = (
            torch.where(2 * reach < length, reach + (length - 2 * reach) * share, length / 2)
            for length, share in ((height, u[:, 0]), (width, u[:, 1]))
        )
        return Places(top, left, side, angle)

    def _first(self, x: Tensor, rng: int, bounds: tuple[float, float]) -> Tensor:
        """Noise, uniform between the bounds."""
        channels = x.shape[1] if self.layout == "nchw" else x.shape[3]
        side = self.side or max(1, math.ceil(self.scale[1] * min(_sides(x, self.layout))))
        noise = generator(rng, "attacks/patch/first").random((int(channels), side, side))
        return torch.from_numpy(bounds[0] + (bounds[1] - bounds[0]) * noise).to(x)


def placed(x: Tensor, patch: Tensor, places: Places, settings: Patch) -> Tensor:
    """Pictures with a patch in front of them, as x; a gradient with respect to the patch may be taken.

    Between its pixels the patch is interpolated; a pixel of the picture is replaced where its centre is
    covered.

    Args:
        x: pictures in the layout of the settings.
        patch: [channels, side, side].
        places: one for each picture.
        settings: say the shape and the layout.
    """
    pictures = x if settings.layout == "nchw" else x.permute(0, 3, 1, 2)
    height, width = pictures.shape[2:]
    down, across = (
        torch.arange(length, device=x.device, dtype=torch.float64) + 0.5 for length in (height, width)
    )
    top, left, half, angle = (
        each.to(x.device)[:, None, None] for each in (*places[:2], places.side / 2, places.angle)
    )
    dy, dx = (down[None, :, None] - top) / half, (across[None, None, :] - left) / half
    # Back into the patch, which spans −1 to 1; the vertical axis of a picture points downwards.
    u, v = dx * angle.cos() - dy * angle.sin(), dx * angle.sin() + dy * angle.cos()
    covered = u**2 + v**2 <= 1 if settings.shape == "disc" else torch.maximum(u.abs(), v.abs()) <= 1
    shown = functional.grid_sample(
        patch.expand(len(x), *patch.shape), torch.stack([u, v], 3).to(x.dtype), padding_mode="border",
        align_corners=False,
    )  # fmt: skip
    found = torch.where(covered[:, None], shown, pictures)
    return found if settings.layout == "nchw" else found.permute(0, 2, 3, 1)


@dataclass(frozen=True, eq=False)
class _Work:
    """One call: the model, the pictures and what is wanted of them."""

    settings: Patch
    model: Model
    x: Tensor
    goal: Goal
    draws: Draws
    bounds: tuple[float, float]

    def usable(self, sound: Tensor) -> Tensor:
        """Finite rows that are not where they are wanted already, bool [n]."""
        found = torch.zeros_like(sound)
        for rows in sound.nonzero()[:, 0].split(self.settings.batch):
            outputs = self.model(self.x[rows])
            found[rows] = ~self.goal.of(rows).reached(outputs) & (predicted(outputs) >= 0)
        return found

    def trained(self, first: Tensor, rows: Tensor, rng: int) -> Tensor:
        """The best patch that an epoch on these rows ends with."""
        best, best_score = first, (-1.0, -math.inf)
        patch, moments, step = first, (torch.zeros_like(first), torch.zeros_like(first)), 0
        low, high = self.bounds
        for epoch in range(self.settings.epochs if len(rows) else 0):
            shuffled = generator(rng, "attacks/patch/order", round=epoch).permutation(len(rows))
            for some in rows[torch.from_numpy(shuffled).to(rows.device)].split(self.settings.batch):
                step += 1
                grad = self._slope(patch, some, step)
                moments = tuple(  # type: ignore[assignment]
                    rate * old + (1 - rate) * new
                    for rate, old, new in zip(_RATES, moments, (grad, grad**2), strict=True)
                )
                mean, square = (old / (1 - rate**step) for rate, old in zip(_RATES, moments, strict=True))
                length = self.settings.step_size * (high - low)
                patch = (patch + length * mean / (square.sqrt() + 1e-12)).clamp(low, high)
            share, loss = self.score(patch, rows)
            if ((share or 0.0), loss) > best_score:
                best, best_score = patch, ((share or 0.0), loss)
        return best

    def score(self, patch: Tensor, rows: Tensor) -> tuple[float | None, float]:
        """The share of rows that is fooled, each at the place of step 0, and the mean loss."""
        hits, total = 0, 0.0
        for some in rows.split(self.settings.batch):
            goal = self.goal.of(some)
            outputs = self.model(self._shown(patch, some, 0))
            hits += int(goal.reached(outputs).sum())
            total += float(goal.loss(outputs, "ce").double().sum())
        return (hits / len(rows), total / len(rows)) if len(rows) else (None, 0.0)

    def _shown(self, patch: Tensor, rows: Tensor, step: int) -> Tensor:
        x = self.x[rows]
        places = self.settings.places(x, self.draws.of(rows), step)
        return placed(x, patch, places, self.settings).clamp(*self.bounds)

    def _slope(self, patch: Tensor, rows: Tensor, step: int) -> Tensor:
        """The gradient of the mean loss of these rows with respect to the patch."""
        goal = self.goal.of(rows)
        with torch.enable_grad():
            leaf = patch.detach().requires_grad_()
            shown = self._shown(leaf, rows, step)
            of_pictures, _, _ = self.model.gradient(shown.detach(), lambda z: goal.loss(z, "ce"))
            (found,) = torch.autograd.grad(shown, leaf, torch.nan_to_num(of_pictures, 0.0, 0.0, 0.0))
        return found / len(rows)


def _sides(x: Tensor, layout: Layout) -> tuple[int, int]:
    height, width = x.shape[2:] if layout == "nchw" else x.shape[1:3]
    return int(height), int(width)
