"""One perturbation for all inputs.

Moosavi-Dezfooli, Fawzi, Fawzi, Frossard: "Universal adversarial perturbations", CVPR 2017; here made by
Adam's steps on batches with a clipped loss, which finds stronger ones sooner: Shafahi, Najibi, Xu, Dickerson,
Davis, Goldstein: "Universal adversarial training", AAAI 2020.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds, bounds_of, clipped, inputs_of
from mycelia.attacks.evasion.adam import Adam
from mycelia.attacks.goals import Goal, predicted
from mycelia.attacks.model import Model, as_model
from mycelia.attacks.norms import Norm, project
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator

__all__ = ["Universal", "universal"]

_WHO: Final = "universal"
_NORMS: Final[tuple[Norm, ...]] = ("linf", "l2")


@dataclass(frozen=True, eq=False)
class Universal:
    """One perturbation, and what it does.

    Rows that the model had wrong from the start (with a target: that were classified as it) and rows that are
    not finite count nowhere.

    Attributes:
        perturbation: [1, …], of norm eps at most; an input becomes clip(x + perturbation).
        fooled: share of the rows that it was made on for which the goal is reached; None without such rows.
        held_out_fooled: the same of the others: what it is worth on inputs that it has not seen.
        counted: rows that it was made on, and that count.
        held_out_counted: the others that count.
        held_out: bool [n], rows that it was not made on.
        eps: radius.
        norm: of the ball.
        targeted: whether the goal has targets.
        seed: of the call.
        seconds: it took.
    """

    perturbation: Tensor
    fooled: float | None
    held_out_fooled: float | None
    counted: int
    held_out_counted: int
    held_out: Tensor
    eps: float
    norm: Norm
    targeted: bool
    seed: int
    seconds: float

    def applied(self, x: Tensor, bounds: Bounds = (0.0, 1.0)) -> Tensor:
        """These inputs with the perturbation, inside their bounds.

        Args:
            x: [n, …], floating point.
            bounds: see `Attack.run`.
        """
        low, high = bounds_of(bounds, x)
        return _moved(x, self.perturbation.to(x.device), low, high)


def universal(
    model: object,
    x: Any,
    goal: Goal,
    *,
    eps: float,
    norm: Norm = "linf",
    held_out: float = 0.25,
    epochs: int = 20,
    batch: int = 64,
    step_size: float | None = None,
    cap: float = 9.0,
    rng: int = 0,
    bounds: Bounds = (0.0, 1.0),
) -> Universal:
    """The perturbation that fools most inputs, made on some of them and tried on the others.

    Args:
        model: see `as_model`; it gives gradients.
        x: inputs [n, …], floating point, a tensor or an array.
        goal: what is wanted of each row; with targets, the same for all rows or not.
        eps: radius in raw input units, above 0.
        norm: "linf" or "l2".
        held_out: share of the rows on which the perturbation is only tried, in [0, 1).
        epochs: passes over the others, at least 1; what the best of them ends with is returned.
        batch: rows at a time, at least 1.
        step_size: length of a first step, one for each batch; None: eps / 5.
        cap: of a row's cross-entropy, above 0: one that is fooled by so much draws no more (β in the paper).
        rng: seed, of the order of rows and of which are held out.
        bounds: see `Attack.run`.

    Raises:
        ConfigError: a setting that is out of range, or a model without gradients.
        DataError: inputs that are not floating point or beyond their bounds, or not as many as goals.
    """
    began = time.perf_counter()
    target = as_model(model, numpy=isinstance(x, np.ndarray))
    _check(target, eps, norm, held_out, epochs, batch, step_size, cap)
    inputs = inputs_of(x)
    low, high = bounds_of(bounds, inputs)
    if any(len(bound) > 1 for bound in (low, high)):
        raise ConfigError(
            "bounds of each row", rule="one perturbation has one box", fix="bounds=(0, 1)", who=_WHO
        )
    inputs, sound = clipped(inputs, low, high)
    n = len(inputs)
    if len(goal) != n:
        raise DataError(f"{n} inputs, a goal of {len(goal)} rows", rule="one for each", who=_WHO)
    goal = goal.of(torch.arange(n, device=inputs.device))
    order = torch.from_numpy(generator(rng, "attacks/universal/held-out").permutation(n))
    apart = torch.zeros(n, dtype=torch.bool, device=inputs.device)
    apart[order[: round(held_out * n)].to(inputs.device)] = True
    with target.quiet():
        usable = _usable(target, inputs, sound, goal, batch)
        made_on, tried_on = (rows.nonzero()[:, 0] for rows in (usable & ~apart, usable & apart))
        # Of halves it is kept in single precision: their sums would be rounded out of the ball.
        kind = torch.float32 if inputs.element_size() == 2 else inputs.dtype
        delta = inputs.new_zeros(1, *inputs.shape[1:], dtype=kind)
        best, best_score = delta, (-1.0, -math.inf)
        adam = Adam(delta, norm=norm)
        size = step_size or eps / 5
        for epoch in range(epochs if len(made_on) else 0):
            shuffled = generator(rng, "attacks/universal/order", round=epoch).permutation(len(made_on))
            for rows in made_on[torch.from_numpy(shuffled).to(made_on.device)].split(batch):
                grad = _slope(target, inputs[rows], delta, goal.of(rows), (low, high), cap)
                delta = _inside(delta + size * adam.step(grad), norm, eps)
            score = _score(target, inputs, delta, goal, made_on, (low, high), batch, cap)
            if score > best_score:
                best, best_score = delta, score
        shares = [
            _score(target, inputs, best, goal, rows, (low, high), batch, cap)[0] if len(rows) else None
            for rows in (made_on, tried_on)
        ]
    return Universal(
        best, shares[0], shares[1], len(made_on), len(tried_on), apart, eps, norm, goal.targeted, rng,
        time.perf_counter() - began,
    )  # fmt: skip


def _check(
    model: Model, eps: float, norm: Norm, held_out: float, epochs: int, batch: int, step_size: float | None,
    cap: float,
) -> None:  # fmt: skip
    if norm not in _NORMS:
        raise ConfigError(f"norm {norm!r}", rule=f"one of {', '.join(_NORMS)}", who=_WHO)
    lengths = 0 < eps < math.inf and cap > 0 and (step_size is None or step_size > 0)
    if min(epochs, batch) < 1 or not lengths or not 0 <= held_out < 1:
        raise ConfigError(
            f"eps {eps}, held_out {held_out}, epochs {epochs}, batch {batch}, "
            f"step_size {step_size}, cap {cap}",
            rule="lengths and cap above 0, a share in [0, 1), counts of at least 1",
            who=_WHO,
        )
    if "gradient" not in model.offers:
        raise ConfigError(
            f"{model.name} offers {', '.join(sorted(model.offers))}",
            rule="one perturbation for all inputs is made along gradients",
            who=_WHO,
        )


def _usable(model: Model, x: Tensor, sound: Tensor, goal: Goal, batch: int) -> Tensor:
    """Finite rows that are not where they are wanted already, bool [n]."""
    found = torch.zeros_like(sound)
    for rows in sound.nonzero()[:, 0].split(batch):
        outputs = model(x[rows])
        found[rows] = ~goal.of(rows).reached(outputs) & (predicted(outputs) >= 0)
    return found


def _moved(x: Tensor, delta: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x + delta, low), high).to(x.dtype)


def _inside(delta: Tensor, norm: Norm, eps: float) -> Tensor:
    free = torch.full_like(delta, torch.inf)
    return project(delta, norm, eps, -free, free)


def _loss(goal: Goal, outputs: Tensor, cap: float) -> Tensor:
    return goal.loss(outputs, "ce").clamp(max=cap)


def _slope(
    model: Model, x: Tensor, delta: Tensor, goal: Goal, box: tuple[Tensor, Tensor], cap: float
) -> Tensor:
    """The gradient of the mean loss with respect to the perturbation, [1, …]; none comes through the clip."""
    low, high = box
    whole = x + delta
    grad, _, _ = model.gradient(_moved(x, delta, low, high), lambda z: _loss(goal, z, cap))
    free = (whole >= low) & (whole <= high) & torch.isfinite(grad)
    return torch.where(free, grad, 0.0).to(delta.dtype).mean(0, keepdim=True)


def _score(
    model: Model, x: Tensor, delta: Tensor, goal: Goal, rows: Tensor, box: tuple[Tensor, Tensor], batch: int,
    cap: float,
) -> tuple[float, float]:  # fmt: skip
    """The share of rows that is fooled, and the mean loss."""
    hits, total = 0, 0.0
    for some in rows.split(batch):
        mine = goal.of(some)
        outputs = model(_moved(x[some], delta, *box))
        hits += int(mine.reached(outputs).sum())
        total += float(_loss(mine, outputs, cap).double().sum())
    return hits / len(rows), total / len(rows)
