"""Measurements of a model that tell whether attacks on it can be trusted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.goals import Goal, predicted
from mycelia.attacks.model import Model, ModuleModel
from mycelia.attacks.norms import Norm

__all__ = [
    "differentiates_while_predicting", "gradient_agreement", "gradients_at", "has_gradient",
    "looks_like_probabilities", "predictions", "random_points", "repeated_passes",
]  # fmt: skip

_PASSES = 5
_SAMPLE = 8  # rows of which gradients are compared with differences
_DIRECTIONS = 64


def predictions(model: Model, x: Tensor, batch: int) -> Tensor:
    """Outputs in evaluation mode: logits [n, classes] or labels [n].

    Args:
        model: of the evaluation.
        x: inputs [n, …], finite.
        batch: rows at a time.
    """
    with model.quiet():
        return torch.cat([model(part) for part in x.split(batch)])


def repeated_passes(model: Model, x: Tensor, y: Tensor, batch: int) -> tuple[float, int]:
    """How far answers differ over five passes in the mode that the model is in, with others beside each row.

    Args:
        model: of the evaluation; its buffers are put back.
        x: inputs [n, …].
        y: labels [n].
        batch: rows at a time.

    Returns:
        the largest change of a coordinate of the logits, scaled to length 1 (0 for labels); and the change of
        the number of right answers.
    """
    widest, counts = 0.0, []
    first: Tensor | None = None
    with _as_given(model):
        for number in range(_PASSES):
            order = torch.arange(len(x), device=x.device).roll(number)
            size = batch if number % 2 == 0 or len(x) < 4 else max(2, min(batch, len(x)) // 2)
            parts = [model(x[rows]) for rows in order.split(size) if len(rows)]
            found = torch.cat(parts)[order.argsort()]
            counts.append(int((predicted(found) == y).sum()))
            if found.dim() == 2:
                unit = found.double() / torch.linalg.vector_norm(found.double(), dim=1, keepdim=True).clamp(
                    min=1e-30
                )
                first = unit if first is None else first
                widest = max(widest, float((unit - first).abs().nan_to_num().max()))
    return widest, max(counts) - min(counts)


@contextlib.contextmanager
def _as_given(model: Model) -> Iterator[None]:
    """Its own mode, training or not; afterwards buffers are as they were."""
    if not isinstance(model, ModuleModel):
        yield
        return
    buffers = [(each, each.detach().clone()) for each in model.module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def looks_like_probabilities(outputs: Tensor) -> bool:
    """Whether all rows lie in [0, 1] and sum to 1 within 1e-5.

    Args:
        outputs: [n, classes]
    """
    inside = bool(((outputs >= 0) & (outputs <= 1)).all())
    return inside and bool(((outputs.double().sum(1) - 1).abs() <= 1e-5).all())


def random_points(x: Tensor, p: Norm, eps: float, low: Tensor, high: Tensor, rng: int) -> Tensor:
    """Points drawn uniformly from the ball and brought into the box, as x; x itself for "l0".

    Args:
        x: inputs [n, …].
        p: norm of the ball.
        eps: its radius.
        low: smallest values, broadcast to x.
        high: largest values.
        rng: seed.
    """
    if p == "l0":
        return x
    unit = Draws(rng, "flags", row_keys(x)).in_ball("start", p, x)
    return torch.minimum(torch.maximum(x + eps * unit, low), high)


def has_gradient(model: Model, x: Tensor) -> bool:
    """Whether anything that can be differentiated leads from these inputs to the outputs.

    Args:
        model: of the evaluation.
        x: inputs [n, …], n at least 1.
    """
    if "gradient" not in model.offers:
        return False
    with model.quiet(), torch.enable_grad():
        leaf = x.detach().requires_grad_()
        outputs = model.traced(leaf)
        if not outputs.requires_grad:
            return False
        return torch.autograd.grad(outputs.sum(), leaf, allow_unused=True)[0] is not None


def gradients_at(
    model: Model,
    points: Tensor,
    goal: Goal,
    batch: int,
    loss: str | Callable[[Tensor, Tensor], Tensor] = "ce",
) -> Tensor:
    """Gradients of the goal's loss, as points; 0 where nothing leads from inputs to outputs.

    Args:
        model: offers gradients.
        points: [n, …]
        goal: of these rows.
        batch: rows at a time.
        loss: see `Goal.loss`.
    """
    parts = []
    with model.quiet(), torch.enable_grad():
        for rows in torch.arange(len(points), device=points.device).split(batch):
            leaf = points[rows].detach().requires_grad_()
            value = goal.of(rows).loss(model.traced(leaf), loss).sum()
            found = torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None
            parts.append(torch.zeros_like(leaf) if found is None else found.detach())
    return torch.cat(parts) if parts else torch.zeros_like(points)


def gradient_agreement(
    model: Model, x: Tensor, goal: Goal, low: Tensor, high: Tensor, rng: int
) -> float | None:
    """Mean cosine between gradients and central differences, along random directions, of up to eight rows.

    Args:
        model: offers gradients.
        x: inputs [n, …].
        goal: of these rows.
        low: smallest values, broadcast to x.
        high: largest values.
        rng: seed.

    Returns:
        None where neither says anything: both are 0 in all rows.
    """
    x, goal = x[:_SAMPLE], goal.of(torch.arange(min(len(x), _SAMPLE), device=x.device))
    width = torch.where(torch.isfinite(high - low), high - low, torch.ones_like(x)).expand_as(x)
    step = 0.01 * float(width.mean())
    centre = x + (
        torch.minimum(torch.maximum(x, low + 2 * step), high - 2 * step) - x
    )  # differences stay within bounds
    grads = gradients_at(model, centre, goal, len(x), "margin").flatten(1).double()
    size = grads.shape[1]
    draws = Draws(rng, "flags", row_keys(x))
    cosines = []
    with model.quiet():
        for row in range(len(x)):
            one = torch.tensor([row], device=x.device)
            count = min(_DIRECTIONS, size)
            lines = draws.of(one).normal("direction", (count, size))[0]
            lines = lines / torch.linalg.vector_norm(lines, dim=1, keepdim=True)
            moves = (step * lines).to(x.dtype).view(count, *x.shape[1:])
            rows = one.expand(count)
            ahead, behind = (
                goal.of(rows).loss(model(centre[one] + sign * moves), "margin").double() for sign in (1, -1)
            )
            slope, along = (ahead - behind) / (2 * step), lines @ grads[row]
            lengths = float(torch.linalg.vector_norm(slope) * torch.linalg.vector_norm(along))
            if lengths > 0:
                cosines.append(float(slope @ along) / lengths)
            elif bool((slope != 0).any()) or bool((along != 0).any()):
                cosines.append(0.0)
    return sum(cosines) / len(cosines) if cosines else None


class _Watching(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: int = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            self.seen += 1
        return function(*args, **(kwargs or {}))


def differentiates_while_predicting(model: Model, x: Tensor) -> int:
    """How many backward passes one prediction makes, as far as PyTorch sees.

    Args:
        model: of the evaluation.
        x: inputs [n, …].
    """
    watch = _Watching()
    with model.quiet(), watch:
        model(x)
    return watch.seen
