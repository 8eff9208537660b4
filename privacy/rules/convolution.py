"""Convolutions: linear maps of unfolded windows, T output positions an example.

The gradients of several examples are the weight gradient of one convolution with a group for each example and
the examples side by side as channels, which vendor libraries do as fast as that of a batch, and without
unfolding. Inner products over positions need the windows themselves, which are as many times larger than the
input as the kernel has entries. Both are done for a few examples at a time, as many as stay in the
processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mycelia.engine.transforms.taps import Reads
from mycelia.privacy.rules.base import Cost, Operator, Use
from mycelia.privacy.rules.linear import Bias, ghost_pays

__all__ = ["OPERATORS", "Convolution"]

aten = torch.ops.aten

_WINDOWS = 1 << 20  # bytes of unfolded windows at a time: what a second-level cache holds
_FORMED = 1 << 21  # bytes of per-example gradients at a time


class _Form(NamedTuple):
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int


class Convolution:
    """The weight [p, d / groups, *kernel] of a convolution; of a transposed one [d, p / groups, *kernel].

    A transposed convolution is the gradient of a convolution, so its input and the gradient of its result
    change places.
    """

    def __init__(self, axes: int, *, transposed: bool = False) -> None:
        self.axes, self.transposed = axes, transposed

    def norm2(self, use: Use) -> Tensor:
        """Squared gradient norm of each example [B]."""
        if self.cost(use).form == "ghost":
            found = []
            for columns, g in self._tiles(use):
                inner = torch.matmul(columns.transpose(-1, -2), columns)
                found.append((inner * torch.matmul(g.transpose(-1, -2), g)).sum((1, 2, 3)))
            return torch.cat(found)
        if use.batch != len(self._sides(use)[0]):  # rows of one example add up before the norm
            return use.form([self.grad(use)])
        return use.form(self._formed(use))

    def total(self, use: Use, factors: Tensor) -> Tensor:
        """Sum over the examples of factor [B] times gradient."""
        if use.formed is not None:
            return use.weighted_sum(factors)
        value, g, _ = self._sides(use)
        repeats = value.shape[0] // use.batch
        each = factors.repeat_interleave(repeats) if repeats > 1 else factors
        return self._gradient(use, value, g * each.to(g.dtype).reshape(-1, *[1] * (g.dim() - 1)), 1)

    def grad(self, use: Use) -> Tensor:
        """The gradient of each example [B, *shape]."""
        formed = torch.cat(list(self._formed(use)))
        repeats = len(formed) // max(1, use.batch)
        if repeats > 1:
            formed = formed.reshape(use.batch, repeats, *use.shape).sum(1)
        return formed

    def _formed(self, use: Use) -> Iterator[Tensor]:
        """The gradient of each row [n, *shape], a few rows at a time."""
        value, g, _ = self._sides(use)
        each = torch.Size(use.shape).numel() * g.element_size()
        step = max(1, _FORMED // max(1, each))
        for first in range(0, max(1, len(g)), step):
            yield self._gradients(use, value[first : first + step], g[first : first + step])

    def cost(self, use: Use) -> Cost:
        """Ghost inner products where they are cheaper, else formed."""
        value, g, form = self._sides(use)
        positions = g.shape[2:].numel()
        outputs, inputs = g.shape[1] // form.groups, torch.Size(use.shape[1:]).numel()
        one_row = value.shape[0] == use.batch
        pays = one_row and ghost_pays(positions, outputs, inputs)
        return Cost("ghost" if pays else "formed", positions, torch.Size(use.shape).numel())

    def _sides(self, use: Use) -> tuple[Tensor, Tensor, _Form]:
        """(input [n, d, *], gradient of the result [n, p, *]) with the examples' own rows in n."""
        value, g = use.values[0], use.grad
        value = value.reshape(-1, *value.shape[-1 - self.axes :])
        g = g.reshape(-1, *g.shape[-1 - self.axes :])
        form = self._form(use)
        return (g, value, form) if self.transposed else (value, g, form)

    def _form(self, use: Use) -> _Form:
        defaults: tuple[Any, ...] = (1, 0, 0, 1, 1) if self.transposed else (1, 0, 1, 1)
        given = use.tap.args[3:]
        values = (*given, *defaults[len(given) :])
        stride, padding = _each(values[0], self.axes), values[1]
        dilation, groups = (values[4], values[3]) if self.transposed else (values[2], values[3])
        spread = _each(dilation, self.axes)
        kernel = use.shape[2:]
        if padding == "same":
            whole = [gap * (size - 1) for gap, size in zip(spread, kernel, strict=True)]
            return _Form(stride, tuple((pad // 2, pad - pad // 2) for pad in whole), spread, groups)
        sides = (0,) * self.axes if padding == "valid" else _each(padding, self.axes)
        return _Form(stride, tuple((pad, pad) for pad in sides), spread, groups)

    def _tiles(self, use: Use) -> Iterator[tuple[Tensor, Tensor]]:
        """Unfolded windows [n, groups, d k / groups, T] and gradients [n, groups, p / groups, T]."""
        value, g, form = self._sides(use)
        kernel = use.shape[2:]
        count, positions = value.shape[0], g.shape[2:].numel()
        entries = value.shape[1] * torch.Size(kernel).numel() * positions
        step = max(1, _WINDOWS // max(1, entries * value.element_size()))
        for first in range(0, count, step):
            part = value[first : first + step]
            columns = _unfolded(part, kernel, form, g.shape[2:])
            yield columns, g[first : first + step].reshape(len(part), form.groups, -1, positions)

    def _gradients(self, use: Use, value: Tensor, g: Tensor) -> Tensor:
        """The gradient of each row [n, *shape], from [n, d, *] and [n, p, *]."""
        count = len(g)
        if not count:
            return g.new_empty(0, *use.shape)
        value, g = (part.reshape(1, -1, *part.shape[2:]) for part in (value, g))
        return self._gradient(use, value, g, count).reshape(count, *use.shape)

    def _gradient(self, use: Use, value: Tensor, g: Tensor, sets: int) -> Tensor:
        """The sum over rows of the gradient; `sets` of channels have a weight each."""
        form = self._form(use)
        padding = [low for low, _ in form.padding]
        if any(low != high for low, high in form.padding):
            value, padding = F.pad(value, _pad_list(form.padding)), [0] * self.axes
        weight = value.new_empty(sets * use.shape[0], *use.shape[1:])
        result: Tensor = aten.convolution_backward.default(
            g, value, weight, None, form.stride, padding, form.dilation, False, [0] * self.axes,
            sets * form.groups, [False, True, False],
        )[1]  # fmt: skip
        return result


def _unfolded(value: Tensor, kernel: Sequence[int], form: _Form, output: Sequence[int]) -> Tensor:
    padded = F.pad(value, _pad_list(form.padding)) if any(map(sum, form.padding)) else value
    batch, channels = padded.shape[:2]
    strides = padded.stride()
    steps = [step * move for step, move in zip(strides[2:], form.stride, strict=True)]
    inner = [step * gap for step, gap in zip(strides[2:], form.dilation, strict=True)]
    windows = padded.as_strided(
        (batch, channels, *kernel, *output), (*strides[:2], *inner, *steps), padded.storage_offset()
    )
    return windows.reshape(batch, form.groups, -1, torch.Size(output).numel())


def _pad_list(padding: Sequence[tuple[int, int]]) -> list[int]:
    """Padding as `F.pad` takes it: last axis first."""
    return [side for pair in reversed(padding) for side in pair]


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return tuple(int(part) for part in (values * axes if len(values) == 1 else values))


def _operator(axes: int, *, transposed: bool = False) -> Operator:
    return Operator(Reads((1, 2), (0,)), {1: Convolution(axes, transposed=transposed), 2: Bias(-1 - axes)})


OPERATORS = {
    aten.conv1d.default: _operator(1),
    aten.conv1d.padding: _operator(1),
    aten.conv2d.default: _operator(2),
    aten.conv2d.padding: _operator(2),
    aten.conv3d.default: _operator(3),
    aten.conv3d.padding: _operator(3),
    aten.conv_transpose1d.default: _operator(1, transposed=True),
    aten.conv_transpose2d.input: _operator(2, transposed=True),
    aten.conv_transpose3d.input: _operator(3, transposed=True),
}
