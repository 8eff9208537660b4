"""Many clients' local steps as one batched program, for an accelerator that one client cannot fill.

The forward passes of K clients are one `torch.func.vmap` over parameters, buffers and batches. Clients do
not depend on each other, so the gradient of the sum of their losses holds each client's own gradient, and
PyTorch's ordinary autograd finds all of them at once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from mycelia.engine.errors import CaptureError, DataError
from mycelia.engine.program import Forward, GraphCall, Program, call_of_graph
from mycelia.engine.step import Adjust, StepResult
from mycelia.engine.transforms.cells import RECURRENT
from mycelia.engine.transforms.coupling import coupling
from mycelia.engine.transforms.value_and_grad import gradients_of
from mycelia.engine.types import Tensors

__all__ = ["ClientsStep", "PaddedBatch", "batchable", "over_clients", "pad_clients", "share", "stack"]

aten = torch.ops.aten


class ClientsStep(Protocol):
    """A step of K clients; every tensor has the clients in front, losses come as [K]."""

    def __call__(
        self,
        params: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        targets: Tensor,
        mask: Bool[Tensor, "clients batch"] | None,
        seeds: Int[Tensor, " clients"],
        extra: Tensors,
    ) -> StepResult:
        """One step."""
        ...


class PaddedBatch(NamedTuple):
    """One batch a client: inputs [K, B, ...], targets [K, B, ...], and a mask [K, B] of real examples."""

    inputs: Tensor
    targets: Tensor
    mask: Tensor


def stack(clients: Sequence[Tensors]) -> Tensors:
    """One dictionary with the clients in front of each tensor."""
    return {name: torch.stack([client[name] for client in clients]) for name in clients[0]}


def share(tensors: Tensors, clients: int) -> Tensors:
    """The same tensors for all clients, without a copy: what `extra` holds for everybody."""
    return {name: tensor.expand(clients, *tensor.shape) for name, tensor in tensors.items()}


def pad_clients(batches: Sequence[tuple[Tensor, Tensor]]) -> PaddedBatch:
    """Batches of different sizes as one; padding repeats a client's first example, a client may have none.

    Raises:
        DataError: no client, or inputs and targets of different length.
    """
    if not batches or any(len(inputs) != len(targets) for inputs, targets in batches):
        found = [(len(inputs), len(targets)) for inputs, targets in batches]
        raise DataError(
            f"batches of {found} inputs and targets", rule="one target an input", who="pad_clients"
        )
    size = max(len(inputs) for inputs, _ in batches)
    padded = [torch.stack([_padded(batch[part], size) for batch in batches]) for part in (0, 1)]
    counts = torch.tensor([len(inputs) for inputs, _ in batches])
    mask = torch.arange(size) < counts[:, None]
    return PaddedBatch(padded[0], padded[1], mask.to(padded[0].device))


def _padded(rows: Tensor, size: int) -> Tensor:
    missing = size - len(rows)
    filler = rows[:1] if len(rows) else rows.new_zeros((1, *rows.shape[1:]))
    return torch.cat([rows, filler.expand(missing, *rows.shape[1:])]) if missing else rows


def over_clients(program: Program, adjust: Adjust | None = None) -> ClientsStep:
    """The local SGD step of `engine.step.sgd_step` for K clients at once.

    `step(params, buffers, inputs, targets, mask, seeds, extra)` takes everything stacked: parameters and
    buffers [K, ...], inputs and targets [K, B, ...], seeds [K], and each tensor of `extra` [K, ...]
    (`share` for what is common, the rate `extra["lr"]` too). A client's loss is the mean over its real
    examples, those where `mask` [K, B] is true; None means all. A client without any keeps its parameters
    and buffers, and its loss is 0. Each client gets what the step for it alone gives, up to the order of
    additions.

    Args:
        program: gives the losses.
        adjust: changes one client's gradient, written for unstacked tensors; None leaves it.

    Raises:
        CaptureError: on a call, an operator that `vmap` cannot batch; or a partly masked batch where the
            training pass mixes examples, as BatchNorm does.
    """
    reason = coupling(program)
    batched = batchable(program)

    def one(
        params: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor, mask: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensors]:
        forward = batched.forward(params, buffers, inputs, targets, seed=seed)
        losses = torch.where(mask, forward.losses, 0.0)
        return losses.sum() / mask.sum().clamp(min=1), forward.buffers

    def updated(params: Tensors, grads: Tensors, extra: Tensors) -> Tensors:
        changed = grads if adjust is None else adjust(grads, params, extra)
        return {name: tensor - extra["lr"] * changed[name] for name, tensor in params.items()}

    def step(
        params: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        seeds: Tensor,
        extra: Tensors,
    ) -> StepResult:
        if mask is None:
            mask = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        elif reason is not None:
            _refuse_padding(mask, reason)
        batch = (inputs, targets, mask, seeds)

        def total(leaves: Tensors) -> tuple[Tensor, Forward]:
            losses, after = _vmapped(one, leaves, buffers, *batch)
            return losses.sum(), Forward(losses, (), after)

        found = gradients_of(total, params)
        with torch.no_grad():
            new = _vmapped(updated, params, found.grads, extra)
            some = mask.any(1)
            return StepResult(_kept(some, new, params), _kept(some, found.buffers, buffers), found.losses)

    return step


def _kept(some: Tensor, new: Tensors, old: Tensors) -> Tensors:
    """The new tensors of the clients that have examples, and the old of the others."""
    return {
        name: torch.where(some.reshape(-1, *[1] * (tensor.dim() - 1)), tensor, old[name])
        for name, tensor in new.items()
    }


def _vmapped(function: Any, *args: Any) -> Any:
    try:
        return torch.func.vmap(function)(*args)
    except (RuntimeError, NotImplementedError, KeyError, AttributeError) as error:
        raise CaptureError(
            f"the step of many clients at once fails: {error}",
            rule="torch.func.vmap batches every operator",
            fix="train the clients one after another",
            who="over_clients",
        ) from error


def _refuse_padding(mask: Tensor, reason: str) -> None:
    partly = mask.any(1) & ~mask.all(1)
    if bool(partly.any()):
        raise CaptureError(
            f"client {int(partly.nonzero()[0])} has a padded batch, and {reason}",
            rule="padding may not change what the other examples give",
            fix="give each client full batches, or use GroupNorm in place of BatchNorm",
            who="over_clients",
        )


def batchable(program: Program) -> Program:
    """The Program with the operators that `vmap` would run client by client in a form that it batches."""
    if program.graphs is None or not isinstance(program.training, GraphCall):
        return program
    graph = copy.deepcopy(program.training.graph)
    for node in graph.graph.nodes:
        node.target = _BATCHABLE.get(node.target, node.target) if node.op == "call_function" else node.target
    graph.recompile()
    return program.with_calls(call_of_graph(graph, program.schema), program.evaluation, "over_clients")


def _batch_norm(
    value: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor,
    training: bool, momentum: float, epsilon: float,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Ioffe and Szegedy (2015), algorithm 1, and the running averages as PyTorch takes them."""
    shape = [1, -1, *[1] * (value.dim() - 2)]
    centre, spread = mean, variance
    if training:
        axes = [axis for axis in range(value.dim()) if axis != 1]
        spread, centre = torch.var_mean(value, axes, correction=0)
        count = value.numel() // value.shape[1]
        mean = mean.lerp(centre.detach(), momentum)
        variance = variance.lerp(spread.detach() * (count / max(count - 1, 1)), momentum)
    result = (value - centre.reshape(shape)) * (spread + epsilon).rsqrt().reshape(shape)
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    return result, None, None, mean, variance


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, p: float = 0.0,
    causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention (Vaswani et al. 2017, eq. 1); CPU kernels have no batching rule, those of CUDA have."""
    if query.device.type != "cpu" or enable_gqa or p:
        return F.scaled_dot_product_attention(
            query, key, value, mask, p, causal, scale=scale, enable_gqa=enable_gqa
        )
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else query.shape[-1] ** -0.5)
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


def _select_scatter(value: Tensor, source: Tensor, axis: int, index: int) -> Tensor:
    """`select_scatter`; under vmap, PyTorch 2.13 gives its source a wrong gradient."""
    size = value.shape[axis]
    places = torch.arange(size, device=value.device) == index % size
    places = places.reshape([size if n == axis % value.dim() else 1 for n in range(value.dim())])
    return torch.where(places, source.unsqueeze(axis), value)


def _size(value: Tensor, axis: int) -> int:
    return value.shape[axis]


def _decomposed(target: Any) -> Any:
    def run(*args: Any) -> Any:
        return target.decompose(*args)

    return run


_BATCHABLE: dict[Any, Any] = {
    **{recurrent: _decomposed(recurrent) for recurrent in RECURRENT},  # into cells, which vmap batches
    aten.sym_size.int: _size,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.select_scatter.default: _select_scatter,
    aten.scaled_dot_product_attention.default: _attention,
}
