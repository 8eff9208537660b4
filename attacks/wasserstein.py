"""Pixel mass moved over short ways: a ball of the Wasserstein distance, its projection, and an attack in it.

Wong, Schmidt, Kolter: "Wasserstein adversarial examples via projected Sinkhorn iterations" (ICML 2019). The
ball is no ball of a norm, so this is no `Attack`, and has a result of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds, bounds_of, clipped, inputs_of
from mycelia.attacks.goals import Goal
from mycelia.attacks.model import as_model
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["Wasserstein", "WassersteinResult", "project_wasserstein"]

_LEAST: Final = -700.0  # exponents below are those of no mass
_NEWTON: Final = 6  # steps to Lambert's function
_ROUNDS: Final = 200  # of giving back what full pixels cannot take; each can fill others
_ROUNDED: Final = 1e-6  # of a mean pixel's mass: what is above its bound by less is cut off


def project_wasserstein(
    wanted: Tensor,
    x: Tensor,
    eps: float,
    high: float | Tensor = torch.inf,
    *,
    window: int = 5,
    weight: float = 1000.0,
    iterations: int = 100,
) -> tuple[Tensor, Tensor]:
    """The image of the ball around x that is nearest to another one, up to the entropy of the plan.

    Mass moves inside a channel and a window, and costs the Euclidean way in pixels; the distance is the cost
    per unit of the image's mass. Minimises ½‖z − wanted‖² + (1/λ) Σ Π log Π in units of that mass, by block
    ascent on the dual: α and β in closed form, ψ by Newton's method (Algorithm 2, §4); z is at most `high`,
    which bounds β. Then the plan's rows are made exact, mass that a full pixel cannot take goes back to where
    it came from, and the plan is mixed with the one that moves nothing until it costs no more than eps: what
    is returned is in the ball whatever the number of iterations.

    Args:
        wanted: [n, c, h, w]
        x: at least 0, with some mass in every image, as `wanted`.
        eps: radius, in pixels per unit of mass, at least 0.
        high: largest value of a pixel, at least x; broadcasts to it.
        window: side of the square of pixels that mass may move to; odd.
        weight: λ, above 0: the larger, the nearer to the projection and the slower.
        iterations: at least 1.

    Returns:
        z [n, c, h, w], and what its plan costs, [n], an upper bound of the distance.
    """
    if window < 1 or window % 2 == 0 or not weight > 0 or iterations < 1 or eps < 0:
        raise ConfigError(
            f"window {window}, weight {weight}, iterations {iterations}, eps {eps}",
            rule="an odd window; weight above 0, iterations at least 1, eps at least 0",
            who="project_wasserstein",
        )
    total = x.double().flatten(1).sum(1)
    if x.dim() != 4 or bool((x < 0).any()) or bool((total <= 0).any()):
        raise DataError(
            f"x of shape {list(x.shape)}",
            rule="[n, c, h, w], at least 0, with mass",
            who="project_wasserstein",
        )
    mass, aim = (each.double() / total.view(-1, 1, 1, 1) for each in (x, wanted))
    most = torch.as_tensor(high, dtype=torch.float64, device=x.device) / total.view(-1, 1, 1, 1)
    most = most.expand_as(mass)
    plan = _Plan(mass, aim, most, eps, window, weight)
    for _ in range(iterations):
        plan.ascend()
    moved, cost = plan.made()
    rise = moved - mass
    over = rise > (most - mass).clamp(min=0) + _ROUNDED * mass.mean((1, 2, 3), keepdim=True)
    share = torch.where(over.flatten(1).any(1), 0.0, 1.0).to(cost.dtype)
    share = torch.where(cost > eps, torch.minimum(share, eps / cost.clamp(min=1e-300)), share)
    found = torch.minimum(mass + share.view(-1, 1, 1, 1) * rise, most)
    return (found * total.view(-1, 1, 1, 1)).to(x.dtype), share * cost


class _Plan:
    """Dual variables of the transport; Π_ij = exp(α_i + β_j − ψ C_ij − 1)."""

    def __init__(
        self, mass: Tensor, aim: Tensor, most: Tensor, eps: float, window: int, weight: float
    ) -> None:
        self._aim, self._most, self._eps = aim, most, eps
        self._window, self._weight = window, weight
        places = torch.arange(window, dtype=torch.float64, device=mass.device) - window // 2
        self._cost = (places[:, None].square() + places.square()).sqrt()
        self._mass, self._log = mass, mass.log()
        self._alpha = torch.full_like(mass, torch.nan)
        self._beta = torch.zeros_like(mass)
        self._psi = mass.new_ones(len(mass))

    def ascend(self) -> None:
        """One round over the three blocks."""
        self._rows()
        columns = (self._near(self._alpha) - self._way()).logsumexp((-2, -1))  # of Π without its β
        pull = self._weight * self._aim
        free = pull - _lambert((math.log(self._weight) + pull + columns).clamp(min=_LEAST))
        self._beta = torch.minimum(free, self._most.log() - columns)
        self._rows()
        plan = self._entries()
        excess = (plan * self._cost).flatten(1).sum(1) - self._eps
        steep = (plan * self._cost.square()).flatten(1).sum(1).clamp(min=1e-300)
        # At most doubled or halved, and one more: far from its end Newton's step is much too long.
        step = (excess / steep).clamp(-self._psi / 2, self._psi + 1)
        self._psi = (self._psi + step).clamp(min=0)

    def made(self) -> tuple[Tensor, Tensor]:
        """Where the mass arrives, and what that costs; no pixel sends or gets too much."""
        self._rows()
        arrives = (self._near(self._alpha) - self._way() + self._beta[..., None, None]).exp()
        size, half = self._mass.shape, self._window // 2
        for _ in range(_ROUNDS):
            stays, total = arrives[..., half, half], arrives.sum((-2, -1))
            if not bool((total > self._most).any()):
                break
            room = (self._most - stays).clamp(min=0) / (total - stays).clamp(min=1e-300)
            kept = torch.where(total > self._most, room.clamp(max=1), 1.0)[..., None, None]
            back = arrives * (1 - kept)
            back[..., half, half] = 0
            columns = back.flatten(0, 1).flatten(3).permute(0, 3, 1, 2).flatten(2)
            home = torch.nn.functional.fold(columns, size[2:], self._window, padding=half)
            arrives = arrives - back
            arrives[..., half, half] += home.view(size)
        cost = (arrives * self._cost).flatten(1).sum(1)
        return arrives.sum((-2, -1)), cost

    def _rows(self) -> None:
        leaves = (self._near(self._beta) - self._way()).logsumexp((-2, -1))
        self._alpha = self._log - leaves

    def _entries(self) -> Tensor:
        """By source, [n, c, h, w, window, window]."""
        found: Tensor = (self._alpha[..., None, None] + self._near(self._beta) - self._way()).exp()
        return found

    def _way(self) -> Tensor:
        return self._psi.view(-1, 1, 1, 1, 1, 1) * self._cost + 1

    def _near(self, values: Tensor) -> Tensor:
        """Those of the pixels around each, −∞ beyond the edge."""
        half = self._window // 2
        wide = torch.nn.functional.pad(values, (half,) * 4, value=-torch.inf)
        return wide.unfold(2, self._window, 1).unfold(3, self._window, 1)


def _lambert(y: Tensor) -> Tensor:
    """W(exp(y)): the solution of W + log W = y."""
    found = torch.where(y > 1, y - y.clamp(min=1).log(), y.clamp(max=1).exp())
    for _ in range(_NEWTON):
        found = found * (1 + y - found.log()) / (1 + found)
    return found


@dataclass(frozen=True, eq=False)
class WassersteinResult:
    """What became of every image.

    Attributes:
        x_adv: where the goal was reached: the first success; else the image of highest loss, as x.
        broken: bool [n]: the goal is reached at x_adv, and was not at x.
        cost: of the plan to x_adv, [n]: an upper bound of its distance, at most the radius.
        reached: bool [n]: the goal was reached at x already; such images are left alone.
    """

    x_adv: Tensor
    broken: Tensor
    cost: Tensor
    reached: Tensor


@dataclass(frozen=True)
class Wasserstein:
    """Steps along the signs of the gradient, each projected onto the Wasserstein ball around the image.

    Attributes:
        steps: at least 1.
        step_size: of a step in each pixel, raw input units, above 0.
        window: see `project_wasserstein`.
        weight: see `project_wasserstein`.
        iterations: see `project_wasserstein`.
    """

    steps: int = 40
    step_size: float = 0.1
    window: int = 5
    weight: float = 1000.0
    iterations: int = 40

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.step_size > 0:
            raise ConfigError(
                f"steps {self.steps}, step_size {self.step_size}",
                rule="at least 1, above 0",
                who=type(self).__name__,
            )

    def run(
        self, model: object, x: Any, goal: Goal, *, eps: float, bounds: Bounds = (0.0, 1.0), batch: int = 256
    ) -> WassersteinResult:
        """Attack images.

        Args:
            model: with gradients; see `as_model`.
            x: [n, c, h, w], finite, with some mass in every image.
            goal: what is wanted of each.
            eps: radius, in pixels per unit of an image's mass.
            bounds: of a pixel; the lower one is 0, as mass is.
            batch: images at a time, at least 1.

        Raises:
            ConfigError: a lower bound that is not 0, a model without gradients, or a setting out of range.
            DataError: images that are not finite, have no mass, or are not as many as goals.
        """
        target, inputs = as_model(model), inputs_of(x)
        low, high = bounds_of(bounds, inputs)
        if bool((low != 0).any()) or "gradient" not in target.offers:
            raise ConfigError(
                f"bounds {bounds}, a model that offers {', '.join(sorted(target.offers))}",
                rule="mass from 0 upwards, and gradients",
                who=type(self).__name__,
            )
        inputs, sound = clipped(inputs, low, high)
        if not bool(sound.all()) or len(goal) != len(inputs):
            raise DataError(
                f"{len(inputs)} inputs, {int(sound.sum())} of them finite, a goal of {len(goal)} rows",
                rule="finite, one goal for each",
                who=type(self).__name__,
            )
        high = high.expand_as(inputs)
        with target.quiet():
            parts = [
                self._run(target, inputs[rows], goal.of(rows), eps, high[rows])
                for rows in torch.arange(len(inputs), device=inputs.device).split(batch)
            ]
        names = ("x_adv", "broken", "cost", "reached")
        return WassersteinResult(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def _run(self, model: Any, x: Tensor, goal: Goal, eps: float, high: Tensor) -> WassersteinResult:
        clean = model(x)
        reached = goal.reached(clean)
        best, cost = x.clone(), x.new_zeros(len(x), dtype=torch.float64)
        loss, broken = goal.loss(clean, "ce").double(), torch.zeros_like(reached)
        rows = (~reached).nonzero()[:, 0]
        points = x[rows]
        for _ in range(self.steps):
            if not len(rows):
                break
            mine = goal.of(rows)
            grad = model.gradient(points, lambda z, mine=mine: mine.loss(z, "ce"))[0]
            points, paid = project_wasserstein(
                points + self.step_size * grad.sign(), x[rows], eps, high[rows], window=self.window,
                weight=self.weight, iterations=self.iterations,
            )  # fmt: skip
            points = torch.minimum(points.clamp(min=0), high[rows])
            outputs = model(points)
            hit, now = mine.reached(outputs), mine.loss(outputs, "ce").double()
            better = hit | (now > loss[rows])
            chosen = rows[better]
            best[chosen], cost[chosen], loss[chosen] = points[better], paid[better], now[better]
            broken[rows] = hit
            rows, points = rows[~hit], points[~hit]
        return WassersteinResult(best, broken, cost, reached)
