"""Models with a known answer: an attack that does not find what is there cannot say that nothing is there.

`planted` follows the active tests of Zimmermann, Brendel, Tramèr, Carlini ("Increasing confidence in
adversarial robustness evaluations", NeurIPS 2022): a linear readout on the model's own features tells one
point on the surface of the ball from many inside it, so that an adversarial example exists behind whatever
the model does before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.base import Attack
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.goals import Untargeted
from mycelia.attacks.model import CallableModel, Model, ModuleModel, as_model
from mycelia.attacks.norms import Norm, norm, project
from mycelia.engine.errors import ConfigError, DataError

__all__ = [
    "Affine", "Constant", "Planted", "ReluNet", "UnitTest", "affine", "constant", "planted", "relu_net",
    "unit_tests",
]  # fmt: skip

_DUAL: Final[dict[Norm, Norm]] = {"linf": "l1", "l2": "l2", "l1": "linf"}
_RIDGES: Final = (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4)  # in units of the mean variance of a feature
_GAP: Final = 0.05  # between the point and the foremost of the others, as a share of the way from the input
_INNER: Final = 0.9  # share of eps within which the points lie that stay with their class


def _dual(p: Norm) -> Norm:
    if p not in _DUAL:
        raise ConfigError(
            f"norm {p!r}", rule=f"a distance in closed form: {', '.join(_DUAL)}", who="distance"
        )
    return _DUAL[p]


class Affine(nn.Module):
    """z = W x + b, with its distance to the boundary.

    Args:
        weight: [classes, d]
        bias: [classes]
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of inputs [n, …]."""
        weight, bias = self.get_buffer("weight"), self.get_buffer("bias")
        return x.flatten(1) @ weight.to(x.dtype).T + bias.to(x.dtype)

    def distance(self, x: Tensor, p: Norm) -> Tensor:
        """Size of the smallest change of the predicted class, [n], without a box.

        min over j of (z_i − z_j) / ‖w_i − w_j‖_q with 1/p + 1/q = 1.

        Args:
            x: [n, …]
            p: "l1", "l2" or "linf".
        """
        z, weight = self(x), self.get_buffer("weight").to(x.dtype)
        label = z.argmax(1)
        gap = z.gather(1, label[:, None]) - z
        slope = norm((weight[label][:, None] - weight[None]).flatten(0, 1), _dual(p)).view_as(gap)
        return torch.where(slope > 0, gap / slope, torch.inf).amin(1)


def affine(classes: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Affine:
    """A random affine classifier.

    Args:
        classes: at least 2.
        d: coordinates of an input, at least 1.
        seed: of its weights.
        dtype: of its weights.
    """
    if classes < 2 or d < 1:
        raise ConfigError(f"{classes} classes, {d} coordinates", rule="at least 2 and 1", who="affine")
    draws = Draws(seed, "planted/affine", torch.arange(classes))
    return Affine(draws.normal("weight", (d,)).to(dtype), 0.3 * draws.normal("bias").to(dtype))


class ReluNet(nn.Module):
    """Class 0 inside the polytope Σ_k a_k |x_k − c_k| ≤ r, class 1 outside; the other classes never win.

    |u| = relu(u) + relu(−u), so this is a network of one hidden layer.

    Args:
        scale: a, above 0, [d].
        centre: c, [d].
        radius: r.
        classes: at least 2.
    """

    def __init__(self, scale: Tensor, centre: Tensor, radius: float, classes: int) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("centre", centre)
        self.radius, self.classes = radius, classes

    def _margin(self, x: Tensor) -> Tensor:
        u = self.get_buffer("scale").to(x.dtype) * (x.flatten(1) - self.get_buffer("centre").to(x.dtype))
        return self.radius - (u.relu() + (-u).relu()).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of inputs [n, …]."""
        inside = self._margin(x)
        rest = torch.full((len(x), self.classes - 2), -self.radius - 1, dtype=x.dtype, device=x.device)
        return torch.cat([inside[:, None], -inside[:, None], rest], 1)

    def distance(self, x: Tensor, p: Norm) -> Tensor:
        """Size of the smallest change of class of points inside, [n], without a box.

        The complement of a convex polytope is the union of half spaces s·a·(x − c) ≥ r, s ∈ {−1, 1}^d, all of
        whose normals have the same dual norm ‖a‖_q: the nearest is that of s = sign(x − c).

        Args:
            x: [n, …]; NaN is returned for points outside.
            p: "l1", "l2" or "linf".
        """
        inside = self._margin(x)
        slope = norm(self.get_buffer("scale").to(x.dtype)[None], _dual(p))
        return torch.where(inside > 0, inside / slope, torch.nan)


def relu_net(
    d: int, radius: float = 1.0, classes: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64
) -> ReluNet:
    """A polytope around (0.5, …, 0.5) with random weights between 1 and 2.

    Args:
        d: coordinates of an input, at least 1.
        radius: of the polytope, above 0.
        classes: at least 2; those from 2 on never win.
        seed: of its weights.
        dtype: of its weights.
    """
    if d < 1 or classes < 2 or not radius > 0:
        raise ConfigError(
            f"{d} coordinates, {classes} classes, radius {radius}",
            rule="at least 1 and 2, above 0",
            who="relu_net",
        )
    scale = 1 + Draws(seed, "planted/relu_net", torch.arange(d)).uniform("scale").to(dtype)
    return ReluNet(scale, torch.full((d,), 0.5, dtype=dtype), radius, classes)


class Constant(nn.Module):
    """Class 0 whatever the input; its gradient is 0.

    Args:
        classes: at least 2.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of inputs [n, …]."""
        logits = torch.zeros(self.classes, dtype=x.dtype, device=x.device)
        logits[0] = 1
        return logits + 0 * x.flatten(1).sum(1, keepdim=True)


def constant(classes: int) -> Constant:
    """A model that nothing can break.

    Args:
        classes: at least 2.
    """
    if classes < 2:
        raise ConfigError(f"{classes} classes", rule="at least 2", who="constant")
    return Constant(classes)


class Planted(nn.Module):
    """A model with another readout: class 1 at one point of the ball, class 0 at the points around the input.

    Attributes:
        point: where class 1 is, as x, [1, …].
        sound: whether the readout tells that point from all the others; without that it plants nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: nn.Linear | None,
        weight: Tensor,
        bias: float,
        point: Tensor,
        *,
        sound: bool,
    ) -> None:
        super().__init__()
        self.model, self.sound = model, sound
        self._layer = [layer]  # no second submodule: it is one of the model's
        self.register_buffer("weight", weight)
        self.register_buffer("point", point)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, 4] of inputs [n, …]; the last two classes never win."""
        score = _features(self.model, self._layer[0], x) @ self.get_buffer("weight") + self.bias
        rest = torch.full((len(x), 2), -4.0, dtype=score.dtype, device=score.device)
        return torch.cat([-score[:, None], score[:, None], rest], 1)


def planted(
    model: nn.Module,
    x: Tensor,
    p: Norm,
    eps: float,
    *,
    bounds: Bounds = (0.0, 1.0),
    rng: int = 0,
    inner: int = 999,
) -> Planted:
    """The model with a readout by which a point at distance eps is adversarial while points nearer are not.

    Features are what goes into the last linear layer, or the outputs where there is none. The direction
    of the readout is that of Fisher's discriminant with a ridge; its threshold lies half way between the
    point and the foremost of the others.

    Args:
        model: gives [n, classes]; in evaluation mode, or it should be.
        x: one input, [1, …], within bounds; class 0.
        p: norm of the ball: "l1", "l2" or "linf".
        eps: its radius, above 0.
        bounds: see `Attack.run`.
        rng: seed.
        inner: points within 0.9 · eps that belong to class 0; the input itself is one more.

    Raises:
        DataError: not one input.
        ConfigError: a norm without a ball to draw from, no radius, no inner points.
    """
    if len(x) != 1:
        raise DataError(
            f"{len(x)} inputs", rule="one at a time: each has a readout of its own", who="planted"
        )
    if p not in _DUAL or not eps > 0 or inner < 1:
        raise ConfigError(
            f"norm {p!r}, eps {eps}, {inner} inner points",
            rule=f"one of {', '.join(_DUAL)}, above 0, at least 1",
            who="planted",
        )
    low, high = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in bounds)
    draws = Draws(rng, "planted", row_keys(torch.arange(inner, device=x.device)[:, None], row_keys(x)))
    around = draws.in_ball("inner", p, x.expand(inner, *x.shape[1:])) * (_INNER * eps)
    points = [x, torch.minimum(torch.maximum(x + around, low), high)]
    unit = draws.of(torch.zeros(1, dtype=torch.int64, device=x.device)).in_ball("point", p, x)
    far = unit.sign() * eps if p == "linf" else unit * (eps / norm(unit, p).view(-1, *[1] * (x.dim() - 1)))
    room = torch.where(far > 0, high - x, x - low)
    far = torch.where(room < far.abs() / 2, -far, far)  # away from a bound that is near
    point = x + project(far, p, eps * (1 - 1e-6), low - x, high - x)
    layer = _readout(model)
    with torch.no_grad(), ModuleModel(model).quiet():
        seen = _features(model, layer, torch.cat([*points, point]))
    features, target = seen[:-1].double(), seen[-1].double()
    direction, sound = _discriminant(features, target)
    scores, goal = features @ direction, target @ direction
    threshold = (scores.amax() + goal) / 2
    scale = 1 / (threshold - scores[0]).clamp(min=1e-30)  # the input itself scores −1
    return Planted(
        model, layer, (direction * scale).to(seen.dtype), float(-threshold * scale), point, sound=sound
    )


def _discriminant(features: Tensor, target: Tensor) -> tuple[Tensor, bool]:
    """The direction with the most ridge that tells the point from all others, and whether there is one.

    Little ridge follows features that only the point switches on: it would hide behind them, with no gradient
    to lead there.
    """
    mean = features.mean(0)
    spread = (features - mean).T @ (features - mean) / len(features)
    unit = spread.diagonal().mean().clamp(min=1e-30) * torch.eye(len(spread)).to(spread)
    direction = target - mean
    for ridge in _RIDGES:
        direction = torch.linalg.solve(spread + ridge * unit, target - mean)
        scores, goal = features @ direction, target @ direction
        edge, base = scores.amax(), scores[0]
        if bool(goal - edge > _GAP * (goal - base)) and bool(torch.isfinite(direction).all()):
            return direction, True
    return direction, False


@dataclass(frozen=True)
class UnitTest:
    """What an attack found in models with a known answer.

    Attributes:
        attack: its name.
        planted_found: planted examples that it found.
        planted_total: of so many.
        constant_found: successes that it claims against a model that has none: 0, or the attack is broken.
    """

    attack: str
    planted_found: int
    planted_total: int
    constant_found: int


def unit_tests(
    attacks: Sequence[Attack],
    model: object = None,
    x: Tensor | None = None,
    *,
    eps: float = 0.1,
    bounds: Bounds = (0.0, 1.0),
    rng: int = 0,
    count: int = 4,
    classes: int = 4,
    queries: int | None = None,
) -> tuple[UnitTest, ...]:
    """Run attacks on models of which the answer is known.

    Args:
        attacks: to be tested.
        model: a module behind which examples are planted; for all else `relu_net` is used, on points whose
            distance to the boundary is known to be below eps.
        x: inputs around which they are planted, [n, …].
        eps: radius, in the norm of each attack, above 0.
        bounds: see `Attack.run`.
        rng: seed.
        count: how many examples to plant at most.
        classes: of the constant model.
        queries: see `Attack.run`.

    Returns:
        one for each attack.
    """
    where = torch.full((count, 16), 0.5, dtype=torch.float64) if x is None else x[:count]
    call: dict[str, Any] = {"eps": eps, "rng": rng, "queries": queries}
    found = []
    cases: dict[Norm, list[tuple[nn.Module, Tensor, Bounds]]] = {}
    module = model.module if isinstance(model, ModuleModel) else model
    with ModuleModel(module).quiet() if isinstance(module, nn.Module) else nullcontext():
        for attack in attacks:
            if attack.norm not in cases:
                cases[attack.norm] = list(_cases(module, where, attack.norm, eps, bounds, rng))
            hits = 0
            for case, point, limits in cases[attack.norm]:
                y = torch.zeros(1, dtype=torch.int64, device=point.device)
                result = attack.run(_as_offered(case, attack), point, Untargeted(y), bounds=limits, **call)
                hits += result.counts.broken
            y = torch.zeros(len(where), dtype=torch.int64, device=where.device)
            none = attack.run(constant(max(2, classes)), where, Untargeted(y), bounds=bounds, **call)
            found.append(UnitTest(type(attack).__name__, hits, len(cases[attack.norm]), none.counts.broken))
    return tuple(found)


def _as_offered(case: nn.Module, attack: Attack) -> Model:
    """No more than the attack needs: a score attack that asks for a gradient is found out."""
    if attack.needed == "gradient":
        return as_model(case.eval())
    if attack.needed == "score":
        return CallableModel(case.eval(), "logits")
    return CallableModel(case.eval(), "labels")


def _cases(
    module: object, x: Tensor, given: Norm, eps: float, bounds: Bounds, rng: int
) -> Iterator[tuple[nn.Module, Tensor, Bounds]]:
    if isinstance(module, nn.Module) and given in _DUAL:
        for row in range(len(x)):
            case = planted(module, x[row : row + 1], given, eps, bounds=bounds, rng=rng)
            if case.sound:
                yield case, x[row : row + 1], bounds
        return
    size = math.prod(x.shape[1:])
    p: Norm = given if given in _DUAL else "linf"
    for row in range(len(x)):  # points within half of the radius of the boundary of a polytope in open space
        net = relu_net(size, classes=4, seed=rng + row)
        slope = float(norm(net.get_buffer("scale")[None], _dual(p)))
        share = 1 - 0.5 * min(1.0, eps * slope)
        start = 0.5 + share / float(net.get_buffer("scale").sum()) * torch.ones(1, size, dtype=torch.float64)
        yield net, start.view(1, *x.shape[1:]), (-1e3, 1e3)


def _readout(model: nn.Module) -> nn.Linear | None:
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linear[-1] if linear else None


def _features(model: nn.Module, layer: nn.Linear | None, x: Tensor) -> Tensor:
    """What goes into a layer, [n, k]; what comes out at the end without one."""
    if layer is None:
        found: Tensor = model(x)
        return found.flatten(1)
    with _listening(layer) as seen:
        model(x)
    if not seen:
        raise DataError(
            "the last linear layer was not called", rule="it is part of every prediction", who="planted"
        )
    return seen[-1].flatten(1)


@contextmanager
def _listening(layer: nn.Module) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(inputs[0])

    handle = layer.register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()
