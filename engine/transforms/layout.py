"""Layout: rewrite convolution and pooling to the forms that run fastest on a CPU.

Three rewrites, each the same function up to the order of additions:

- `relu` then `max_pool2d` becomes `max_pool2d` then `relu`: a quarter of the comparisons, identical values
  and gradients (both pick the first maximum; where the maximum is not positive both gradients vanish);
- a 2x2 max-pool becomes three element-wise maxima, which fuse with their neighbours;
- a convolution with a small kernel volume (input channels x kernel area) becomes one matrix product
  over unfolded columns: vendor libraries pad such channels to the vector width and waste most of it. Where
  such a pool follows and the input needs no gradient, the columns are ordered to suit the pool.

They pay only when the result is fused by Inductor; the interpreter runs the graph as captured.
`pool_in_pairs` is the form of the second that pays without Inductor.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mycelia.engine.program import Program, call_of_graph

__all__ = ["layout", "pool_in_pairs", "relu_after_pool"]

aten = torch.ops.aten

# beyond this many terms per output the vendor's blocked convolution wins (measured, docs/performance.md)
_COLUMN_TERMS = 256


def layout(program: Program) -> Program:
    """A Program with the same losses whose training graph suits a fused CPU plan.

    The evaluation pass is unchanged. A Program without a graph is returned as it is.
    """
    if program.graphs is None:
        return program
    graph = copy.deepcopy(program.graphs[0])
    changed = relu_after_pool(graph.graph) + pool_by_maximum(graph.graph) + convolve_by_columns(graph.graph)
    if not changed:
        return program
    for node in graph.graph.nodes:
        if node.target is aten.view.default:  # the new forms give other strides than the captured ones
            node.target = aten.reshape.default
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return program.with_calls(call_of_graph(graph, program.schema), program.evaluation, "layout")


def relu_after_pool(graph: fx.Graph) -> int:
    """Pass: move a ReLU whose only reader is a max-pool behind it; returns the number moved."""
    moved = 0
    for pool in list(graph.nodes):
        if pool.op != "call_function" or pool.target is not aten.max_pool2d.default:
            continue
        relu = pool.args[0]
        if relu.target is not aten.relu.default or len(relu.users) != 1:
            continue
        pool.replace_input_with(relu, relu.args[0])
        with graph.inserting_after(pool):
            after = graph.call_function(aten.relu.default, (pool,))
        after.meta = dict(relu.meta) | {"val": pool.meta.get("val")}
        pool.replace_all_uses_with(after, delete_user_cb=lambda user, after=after: user is not after)
        graph.erase_node(relu)
        moved += 1
    return moved


def pool_by_maximum(graph: fx.Graph) -> int:
    """Pass: 2x2 max-pools with stride 2 on even sizes, behind a small convolution, become maxima."""
    changed = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.max_pool2d.default:
            continue
        if _halves(node) and _columns(node.args[0]):
            node.target, node.args, node.kwargs = _pool, node.args[:1], {}
            changed += 1
    return changed


def pool_in_pairs(graph: fx.Graph) -> int:
    """Pass: 2x2 max-pools with stride 2 on even sizes become maxima of columns, then of rows.

    Operator by operator this takes a third of the time of PyTorch's pool, which is not vectorised.
    """
    changed = 0
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d.default):
        if _halves(node):
            node.target, node.args, node.kwargs = _pool_pairs, node.args[:1], {}
            changed += 1
    return changed


def _halves(node: fx.Node) -> bool:
    """Whether a max-pool takes 2x2 windows side by side, on even sizes."""
    value, kernel, stride, padding, dilation, ceil = _padded(node.args, ([], 0, 1, False))
    shape = _shape(value)
    plain = _pair(kernel) == (2, 2) and _pair(stride or kernel) == (2, 2) and not ceil
    plain = plain and _pair(padding) == (0, 0) and _pair(dilation) == (1, 1)
    return plain and len(shape) == 4 and shape[2] % 2 == 0 and shape[3] % 2 == 0


def convolve_by_columns(graph: fx.Graph) -> int:
    """Pass: small stride-1 convolutions become a matrix product over unfolded columns."""
    changed = 0
    for node in list(graph.nodes):
        if _columns(node):
            value, weight, bias, padding = _conv_arguments(node)
            node.target, node.args, node.kwargs = _convolve, (value, weight, bias, padding), {}
            changed += 1
    for node in list(graph.nodes):  # a pool that alone reads its convolution joins it
        if node.target is _pool and len(node.args[0].users) == 1:
            convolution = node.args[0]
            node.target, node.args = _convolve_pooled, convolution.args
            graph.erase_node(convolution)
    return changed


def _conv_arguments(node: fx.Node) -> tuple[Any, Any, Any, int]:
    value, weight, bias, _, padding, *_ = _padded(node.args, (None, 1, 0, 1, 1))
    return value, weight, bias, _pair(padding)[0]


def _columns(node: fx.Node) -> bool:
    """Whether a node is a convolution that the column form suits (or already has it)."""
    if node.target is _convolve:
        return True
    if node.op != "call_function" or node.target is not aten.conv2d.default:
        return False
    _, weight, _, stride, padding, dilation, groups = _padded(node.args, (None, 1, 0, 1, 1))
    shape = _shape(weight)
    pad = _pair(padding)
    square = _pair(stride) == (1, 1) and _pair(dilation) == (1, 1) and groups == 1 and pad[0] == pad[1]
    small = len(shape) == 4 and shape[1] * shape[2] * shape[3] <= _COLUMN_TERMS
    return bool(square and small and len(_shape(node)) == 4 and pad[0] < min(shape[2:]))


def _padded(args: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """All arguments of an operator: two that are always given, and the defaults of those left out."""
    return (*args, *defaults[len(args) - 2 :])


def _shape(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    values = tuple(value)
    return (values[0], values[-1]) if values else (0, 0)


def _realised(tensor: Tensor) -> Tensor:
    # a strided view of itself: Inductor writes the tensor out here instead of recomputing it for each reader
    return tensor.as_strided(tensor.shape, tensor.stride())


class _ColumnConvolution(torch.autograd.Function):
    """y[o, b, t] = sum_c w[o, c] * columns[c, b, t] + bias[o], with c over channels and kernel positions."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        batch, channels, height, width = value.shape
        out, _, rows, columns = weight.shape
        high, wide = height + 2 * padding - rows + 1, width + 2 * padding - columns + 1
        padded = F.pad(value, (padding,) * 4) if padding else value
        windows = padded.unfold(2, rows, 1).unfold(3, columns, 1)
        unfolded = windows.permute(1, 4, 5, 0, 2, 3).reshape(channels * rows * columns, batch * high * wide)
        result = weight.reshape(out, -1) @ unfolded
        if bias is not None:
            result = result + bias[:, None]
        ctx.save_for_backward(unfolded, weight)
        ctx.sizes = (batch, channels, rows, columns, high, wide, padding, bias is not None)
        return result.view(out, batch, high, wide).permute(1, 0, 2, 3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        unfolded, weight = ctx.saved_tensors
        batch, channels, rows, columns, high, wide, padding, has_bias = ctx.sizes
        grad = grads[0].permute(1, 0, 2, 3).reshape(weight.shape[0], batch * high * wide)
        grad_weight = (grad @ unfolded.t()).view_as(weight)
        grad_bias = grad.sum(1) if has_bias else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, None
        spread = (weight.reshape(weight.shape[0], -1).t() @ grad).view(
            channels, rows, columns, batch, high, wide
        )
        total: Any = 0
        for row in range(rows):
            for column in range(columns):
                total = total + F.pad(
                    spread[:, row, column], (column, columns - 1 - column, row, rows - 1 - row)
                )
        if padding:
            total = total[..., padding:-padding, padding:-padding]
        return total.permute(1, 0, 2, 3), grad_weight, grad_bias, None


class _PooledColumnConvolution(torch.autograd.Function):
    """A column convolution and the 2x2 max-pool behind it, for inputs that need no gradient.

    The columns are ordered by position in the pool's window first, so that the four values of a window lie in
    four contiguous blocks: nothing is interleaved, forward or backward.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        batch, channels, height, width = value.shape
        out, _, rows, columns = weight.shape
        high, wide = (height + 2 * padding - rows + 1) // 2, (width + 2 * padding - columns + 1) // 2
        padded = F.pad(value, (padding,) * 4) if padding else value
        # every second column, from each start that a kernel column and a window column add up to
        starts = [padded[..., start : start + 2 * wide - 1 : 2] for start in range(columns + 1)]
        halves = _realised(torch.stack(starts))
        per_start, per_example, per_channel, per_row, _ = halves.stride()
        windows = halves.as_strided(
            (channels, rows, columns, 2, 2, batch, high, wide),
            (per_channel, per_row, per_start, per_row, per_start, per_example, 2 * per_row, 1),
        )
        unfolded = _realised(windows.contiguous()).view(channels * rows * columns, 4 * batch * high * wide)
        quarters = (weight.reshape(out, -1) @ unfolded).view(out, 4, -1)
        a, b, c, d = quarters.unbind(1)
        result = _realised(torch.maximum(torch.maximum(a, b), torch.maximum(c, d)))
        first = torch.full_like(result, 3, dtype=torch.int32)
        for number, part in ((2, c), (1, b), (0, a)):
            first = torch.where(part == result, number, first)
        ctx.save_for_backward(unfolded, weight, _realised(first))
        ctx.has_bias = bias is not None
        if bias is not None:
            result = result + bias[:, None]
        return result.view(out, batch, high, wide).permute(1, 0, 2, 3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        unfolded, weight, first = ctx.saved_tensors
        grad = grads[0].permute(1, 0, 2, 3).reshape(first.shape)
        number = torch.arange(4, dtype=torch.int32, device=grad.device)[:, None]
        parts = torch.where(first[:, None] == number, grad[:, None], torch.zeros_like(grad)[:, None])
        parts = parts.flatten(1)
        return None, (parts @ unfolded.t()).view_as(weight), grad.sum(1) if ctx.has_bias else None, None


class _MaximumPool(torch.autograd.Function):
    """2x2 max-pool; the gradient goes to the first maximum in row-major order, as PyTorch's does."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        a, b, c, d = _quarters(value)
        result = _realised(torch.maximum(torch.maximum(a, b), torch.maximum(c, d)))
        ctx.save_for_backward(value, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        value, result = ctx.saved_tensors
        grad = grads[0]
        a, b, c, _ = _quarters(value)
        first = a == result
        second = (b == result) & ~first
        third = (c == result) & ~first & ~second
        fourth = ~(first | second | third)
        zero = torch.zeros_like(grad)
        upper = torch.stack([torch.where(first, grad, zero), torch.where(second, grad, zero)], -1).flatten(-2)
        lower = torch.stack([torch.where(third, grad, zero), torch.where(fourth, grad, zero)], -1).flatten(-2)
        return torch.stack([upper, lower], -2).flatten(-3, -2)


class _PairwisePool(torch.autograd.Function):
    """2x2 max-pool; of equal values the left, then the upper one, which is first in row-major order."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        left, right = value[..., 0::2], value[..., 1::2]
        wide = torch.maximum(left, right)
        upper, lower = wide[..., 0::2, :], wide[..., 1::2, :]
        ctx.save_for_backward(left >= right, upper >= lower)
        return torch.maximum(upper, lower)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        left, upper = ctx.saved_tensors
        grad = grads[0]
        batch, channels, high, wide = grad.shape
        rows = grad.new_empty(batch, channels, high, 2, wide)
        _deal(grad, upper, rows[:, :, :, 0], rows[:, :, :, 1])
        rows = rows.view(batch, channels, 2 * high, wide)
        spread = grad.new_empty(*rows.shape, 2)
        _deal(rows, left, spread[..., 0], spread[..., 1])
        return spread.view(batch, channels, 2 * high, 2 * wide)


def _deal(grad: Tensor, first: Tensor, one: Tensor, other: Tensor) -> None:
    """Write the gradient where `first` says, and zero in the other place; both NaN if it is not finite."""
    # as numbers: a product is vectorised, a selection into every second place is not
    torch.mul(grad, first.view(torch.uint8).to(grad.dtype), out=one)
    torch.sub(grad, one, out=other)


def _quarters(value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    top, bottom = value[..., 0::2, :], value[..., 1::2, :]
    return top[..., 0::2], top[..., 1::2], bottom[..., 0::2], bottom[..., 1::2]


def _convolve(value: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    result: Tensor = _ColumnConvolution.apply(value, weight, bias, padding)  # type: ignore[no-untyped-call]
    return result


def _convolve_pooled(value: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    if value.requires_grad:
        return _pool(_convolve(value, weight, bias, padding))
    result: Tensor = _PooledColumnConvolution.apply(value, weight, bias, padding)  # type: ignore[no-untyped-call]
    return result


def _pool(value: Tensor) -> Tensor:
    result: Tensor = _MaximumPool.apply(value)  # type: ignore[no-untyped-call]
    return result


def _pool_pairs(value: Tensor) -> Tensor:
    result: Tensor = _PairwisePool.apply(value)  # type: ignore[no-untyped-call]
    return result
