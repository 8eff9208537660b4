"""Passes through a model on a CPU in which only the inputs have a gradient: the same values, sooner.

Two operations take most of the time that an attack spends on a small convolutional network, for no good
reason: PyTorch's max-pool looks at its windows one by one, and the gradient of a convolution with respect to
an input of few channels wastes most of a vector register. Here windows of two by two are compared all at
once, and the gradient of such a convolution is one matrix product, added up shifted. Values of a max-pool,
and which of equal ones has its gradient, are PyTorch's to the bit; gradients of a convolution differ by
rounding. Everything else runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["input_pass"]

aten = torch.ops.aten

_FEW: Final = 4  # input channels up to which this is faster (docs/performance.md)
_TOGETHER: Final = 2**20  # numbers in the products of the rows that are taken at a time
_SMALL: Final = 2**12  # numbers in an input below which choosing costs more than it saves
_Pair = int | tuple[int, ...] | list[int]


def input_pass(model: Callable[[Tensor], Any], x: Tensor) -> Any:
    """What the model gives for x, [n, …], to be differentiated with respect to x alone."""
    if x.device.type != "cpu" or x.numel() < _SMALL or hasattr(model, "_orig_mod"):  # the last is compiled
        return model(x)
    with _InputPass():
        return model(x)


class _InputPass(TorchFunctionMode):
    """While it lasts, pools and convolutions of which no parameter wants a gradient take the fast way."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        kwargs = kwargs or {}
        fast = _FAST.get(func)
        if fast is not None and _plain(args, kwargs):
            return fast(func, args, kwargs)
        return func(*args, **kwargs)


def _plain(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the input is an ordinary batch of images on a CPU, and nothing else has a gradient."""
    if not args:
        return False
    x, others = args[0], (*args[1:], *kwargs.values())
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dim() == 4
        and x.numel() > 0
        and x.dtype in (torch.float32, torch.float64)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not any(isinstance(each, Tensor) and each.requires_grad for each in others)
    )


# --- max-pool -------------------------------------------------------------------------------------------


def _max_pool(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    found = _pairs(*args, **kwargs)
    return func(*args, **kwargs) if found is None else cast("Tensor", _MaxPool.apply(found))  # type: ignore[no-untyped-call]


def _pairs(
    input: Tensor, kernel_size: _Pair, stride: _Pair | None = None, padding: _Pair = 0, dilation: _Pair = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Tensor | None:  # fmt: skip
    """The input cut to whole windows of two by two side by side; None where windows are others."""
    steps = kernel_size if stride is None or stride in ((), []) else stride
    two = (2, 2)
    other = _two(kernel_size) != two or _two(steps) != two or _two(padding) != (0, 0) or return_indices
    height, width = input.shape[2] // 2 * 2, input.shape[3] // 2 * 2
    uneven = (height, width) != tuple(input.shape[2:])
    if other or _two(dilation) != (1, 1) or (uneven and ceil_mode) or not height or not width:
        return None
    if not input.is_contiguous():
        return None
    return input[:, :, :height, :width] if uneven else input


class _MaxPool(torch.autograd.Function):
    """The largest of four, and the gradient to the first of the largest, row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        left, right = x[..., 0::2], x[..., 1::2]
        across = torch.maximum(left, right)
        top, bottom = across[:, :, 0::2], across[:, :, 1::2]
        if ctx.needs_input_grad[0]:
            rightmost, low = right > left, bottom > top
            column = (low & rightmost[:, :, 1::2]) | (~low & rightmost[:, :, 0::2])
            height, width = x.shape[2:]
            corners = torch.arange(0, height, 2)[:, None] * width + torch.arange(0, width, 2)
            ctx.save_for_backward(x, torch.add(corners, low, alpha=width).add_(column))
        return torch.maximum(top, bottom)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = aten.max_pool2d_with_indices_backward
        return back(grad, ctx.saved_tensors[0], [2, 2], [2, 2], [0, 0], [1, 1], False, ctx.saved_tensors[1])


# --- convolution ----------------------------------------------------------------------------------------


def _convolution(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    found = _convolution_arguments(*args, **kwargs) if torch.is_grad_enabled() else None
    if found is None:
        return func(*args, **kwargs)
    return cast("Tensor", _Convolution.apply(*found))  # type: ignore[no-untyped-call]


def _convolution_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: _Pair = 1,
    padding: _Pair | str = 0, dilation: _Pair = 1, groups: int = 1,
) -> tuple[Any, ...] | None:  # fmt: skip
    """What a convolution of few input channels is told; None where it is another one."""
    few = input.shape[1] <= _FEW and groups == 1 and weight.dim() == 4 and not isinstance(padding, str)
    if not few or not input.requires_grad or weight.dtype != input.dtype:
        return None
    return input, weight, bias, _two(stride), _two(cast("_Pair", padding)), _two(dilation)


class _Convolution(torch.autograd.Function):
    """PyTorch's convolution, with the input's gradient from one product, added up shifted."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int],
        padding: tuple[int, int], dilation: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(weight)
        ctx.size, ctx.how = tuple(x.shape[2:]), (dilation, padding, stride)
        return torch.conv2d(x, weight, bias, stride, padding, dilation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        (height, width), (dilation, padding, stride) = ctx.size, ctx.how
        out, channels, rows, columns = weight.shape
        each = weight.permute(2, 3, 1, 0).reshape(-1, out)  # of a place in the kernel and a channel
        tall, wide = grad.shape[2:]
        together = max(1, _TOGETHER // max(1, len(each) * tall * wide))
        found = []
        for some in grad.flatten(2).split(together):
            products = (each @ some).view(len(some), rows, columns, channels, tall, wide)
            whole = grad.new_zeros(len(some), channels, height + 2 * padding[0], width + 2 * padding[1])
            for row in range(rows):
                for column in range(columns):
                    top, left = row * dilation[0], column * dilation[1]
                    whole[
                        :,
                        :,
                        top : top + (tall - 1) * stride[0] + 1 : stride[0],
                        left : left + (wide - 1) * stride[1] + 1 : stride[1],
                    ] += products[:, row, column]
            found.append(whole[:, :, padding[0] : padding[0] + height, padding[1] : padding[1] + width])
        return torch.cat(found), None, None, None, None, None


def _two(value: _Pair) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1])


_FAST: Final[dict[Any, Callable[..., Any]]] = {
    F.max_pool2d: _max_pool,
    torch.max_pool2d: _max_pool,
    aten.max_pool2d.default: _max_pool,
    torch.conv2d: _convolution,
    aten.conv2d.default: _convolution,
}
