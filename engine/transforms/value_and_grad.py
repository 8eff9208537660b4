"""The mean loss of a Program and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mycelia.engine import structure
from mycelia.engine.errors import CaptureError
from mycelia.engine.program import Forward, Program
from mycelia.engine.types import Tensors

__all__ = ["GradFn", "Gradients", "gradients_of", "value_and_grad"]


class Gradients(NamedTuple):
    """What one forward and backward pass gives; nothing in it has a history.

    Attributes:
        loss: the mean loss, 0-d.
        grads: its gradient by parameter; zeros for a parameter that the loss does not depend on.
        buffers: float buffers and counters after the pass.
        losses: one loss per example, shape [B].
        outputs: what the model returned.
    """

    loss: Tensor
    grads: Tensors
    buffers: Tensors
    losses: Tensor
    outputs: Any


class GradFn(Protocol):
    """A function of parameters, buffers and a batch that gives `Gradients`."""

    def __call__(
        self, params: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor, *, seed: int | Tensor = 0
    ) -> Gradients:
        """One forward and backward pass."""
        ...


def value_and_grad(program: Program) -> GradFn:
    """The function `(params, buffers, inputs, targets, *, seed=0) -> Gradients`.

    Differentiation is PyTorch's. The arguments are not changed. It can be traced by `make_fx` and runs under
    `torch.func.vmap`.

    Raises:
        CaptureError: on a call under a `torch.func` transform, an operator that cannot run there.
    """

    def run(
        params: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor, *, seed: int | Tensor = 0
    ) -> Gradients:
        def total(leaves: Tensors) -> tuple[Tensor, Forward]:
            forward = program.forward(leaves, buffers, inputs, targets, seed=seed)
            return forward.losses.mean(), forward

        return gradients_of(total, params)

    return run


def gradients_of(total: Callable[[Tensors], tuple[Tensor, Forward]], params: Tensors) -> Gradients:
    """Differentiate `total(params) -> (0-d loss, forward pass)`."""
    plain = {name: tensor.detach() for name, tensor in params.items()}
    try:
        leaves = {name: tensor.requires_grad_() for name, tensor in plain.items()}
    except RuntimeError:  # inside a torch.func transform, which wants its own; slower on small models
        return _functional(total, plain)
    with torch.enable_grad():
        loss, forward = total(leaves)
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if leaves and loss.requires_grad:
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    with torch.no_grad():
        grads = {
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), found, strict=True)
        }
    return _detached(loss, grads, forward)


def _functional(total: Callable[[Tensors], tuple[Tensor, Forward]], params: Tensors) -> Gradients:
    try:
        grads, (loss, forward) = torch.func.grad_and_value(total, has_aux=True)(params)
    except (RuntimeError, NotImplementedError, KeyError) as error:
        raise CaptureError(
            f"the Program cannot be differentiated inside a torch.func transform: {error}",
            rule="each operator has a rule for vmap and grad; control flow and custom operators may lack one",
            fix="call value_and_grad outside the transform, or `over_clients` for many clients",
            who="value_and_grad",
        ) from error
    return _detached(loss, grads, forward)


def _detached(loss: Tensor, grads: Tensors, forward: Forward) -> Gradients:
    buffers = {name: tensor.detach() for name, tensor in forward.buffers.items()}
    leaves, spec = structure.flatten(forward.outputs)
    outputs = structure.unflatten(spec, [leaf.detach() for leaf in leaves])
    return Gradients(loss.detach(), grads, buffers, forward.losses.detach(), outputs)
