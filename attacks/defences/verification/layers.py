"""Layers as bounds see them: affine maps, ReLU, max-pools and changes of shape, with tensors by name.

A layer is structure only; every method takes the tensors that its names stand for, so the same chain serves a
model, and each step of a training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.engine.types import Tensors

__all__ = [
    "Affine",
    "Average",
    "Chain",
    "Convolution",
    "Flatten",
    "Layer",
    "Linear",
    "MaxPool",
    "ReLU",
    "Scale",
]

Pair = tuple[int, int]


@dataclass(frozen=True)
class Layer(ABC):
    """One operation on rows [n, …]."""

    @abstractmethod
    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """What the layer gives."""


@dataclass(frozen=True)
class Affine(Layer):
    """x ↦ W x + b."""

    @abstractmethod
    def linear(self, x: Tensor, tensors: Tensors) -> Tensor:
        """W x."""

    @abstractmethod
    def absolute(self, x: Tensor, tensors: Tensors) -> Tensor:
        """|W| x."""

    @abstractmethod
    def constant(self, tensors: Tensors) -> Tensor:
        """A number per output that no constant in the sum of that output exceeds, in size; it broadcasts."""

    @abstractmethod
    def summands(self, x: Tensor, tensors: Tensors) -> int:
        """Numbers that are added up, or multiplied in turn, for one output of x, at most."""


@dataclass(frozen=True)
class Linear(Affine):
    """A dense layer.

    Attributes:
        weight: name of [out, in].
        bias: name of [out], or None.
    """

    weight: str
    bias: str | None = None

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Layer`."""
        return functional.linear(x, tensors[self.weight], _named(tensors, self.bias))

    def linear(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Affine.linear`."""
        return functional.linear(x, tensors[self.weight])

    def absolute(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Affine.absolute`."""
        return functional.linear(x, tensors[self.weight].abs())

    def constant(self, tensors: Tensors) -> Tensor:
        """See `Affine.constant`."""
        bias = _named(tensors, self.bias)
        return tensors[self.weight].new_zeros(1) if bias is None else bias.abs()

    def summands(self, x: Tensor, tensors: Tensors) -> int:
        """See `Affine.summands`."""
        del x
        return int(tensors[self.weight].shape[1]) + 1


@dataclass(frozen=True)
class Convolution(Affine):
    """A convolution of pictures [n, c, h, w] that pads with zeros.

    Attributes:
        weight: name of [out, in / groups, kh, kw].
        bias: name of [out], or None.
        stride: of both axes.
        padding: of both axes.
        dilation: of both axes.
        groups: of channels.
    """

    weight: str
    bias: str | None = None
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Layer`."""
        return self._of(x, tensors[self.weight], _named(tensors, self.bias))

    def linear(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Affine.linear`."""
        return self._of(x, tensors[self.weight], None)

    def absolute(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Affine.absolute`."""
        return self._of(x, tensors[self.weight].abs(), None)

    def constant(self, tensors: Tensors) -> Tensor:
        """See `Affine.constant`."""
        bias = _named(tensors, self.bias)
        return tensors[self.weight].new_zeros(1) if bias is None else bias.abs()[:, None, None]

    def summands(self, x: Tensor, tensors: Tensors) -> int:
        """See `Affine.summands`."""
        del x
        return int(tensors[self.weight][0].numel()) + 1

    def _of(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


@dataclass(frozen=True)
class Average(Affine):
    """The mean over windows of pictures; over each whole channel where there is no window.

    Attributes:
        window: height and width, or None.
        stride: of both axes.
    """

    window: Pair | None = None
    stride: Pair = (1, 1)

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Layer`."""
        del tensors
        if self.window is None:
            return x.mean((2, 3), keepdim=True)
        return functional.avg_pool2d(x, self.window, self.stride)

    def linear(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Affine.linear`."""
        return self(x, tensors)

    def absolute(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Affine.absolute`."""
        return self(x, tensors)

    def constant(self, tensors: Tensors) -> Tensor:
        """See `Affine.constant`."""
        del tensors
        return torch.zeros(())

    def summands(self, x: Tensor, tensors: Tensors) -> int:
        """See `Affine.summands`."""
        del tensors
        height, width = x.shape[2:] if self.window is None else self.window
        return int(height * width) + 1


@dataclass(frozen=True)
class Scale(Affine):
    """(x − mean) / sqrt(variance + eps) · weight + bias for each channel: normalisation with fixed numbers.

    Attributes:
        mean: name of [c].
        variance: name of [c], or None: 1.
        eps: added to the variance.
        weight: name of [c], or None: 1.
        bias: name of [c], or None: 0.
        deviation: name of [c], to divide by instead of the square root, or None.
    """

    mean: str
    variance: str | None = None
    eps: float = 0.0
    weight: str | None = None
    bias: str | None = None
    deviation: str | None = None

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Layer`."""
        bias = _named(tensors, self.bias)
        moved = (x - _channels(tensors[self.mean], x)) * _channels(self._factor(tensors), x)
        return moved if bias is None else moved + _channels(bias, x)

    def linear(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Affine.linear`."""
        return x * _channels(self._factor(tensors), x)

    def absolute(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Affine.absolute`."""
        return x * _channels(self._factor(tensors).abs(), x)

    def constant(self, tensors: Tensors) -> Tensor:
        """See `Affine.constant`."""
        found = (tensors[self.mean] * self._factor(tensors)).abs()
        bias = _named(tensors, self.bias)
        return (found if bias is None else found + bias.abs()).max()

    def summands(self, x: Tensor, tensors: Tensors) -> int:
        """See `Affine.summands`: few, with a root and a quotient."""
        del x, tensors
        return 8

    def _factor(self, tensors: Tensors) -> Tensor:
        mean = tensors[self.mean]
        factor = torch.ones_like(mean)
        if self.variance is not None:
            factor = (tensors[self.variance] + self.eps).rsqrt()
        if self.deviation is not None:
            factor = factor / tensors[self.deviation]
        weight = _named(tensors, self.weight)
        return factor if weight is None else factor * weight


@dataclass(frozen=True)
class ReLU(Layer):
    """x ↦ max(x, 0)."""

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Layer`."""
        del tensors
        return x.clamp(min=0)


@dataclass(frozen=True)
class MaxPool(Layer):
    """The largest number of each window of a picture.

    Attributes:
        window: height and width.
        stride: of both axes.
        padding: of both axes, with what is never the largest.
        dilation: of both axes.
    """

    window: Pair
    stride: Pair
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Layer`."""
        del tensors
        return functional.max_pool2d(x, self.window, self.stride, self.padding, self.dilation)


@dataclass(frozen=True)
class Flatten(Layer):
    """Each row as one vector."""

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """See `Layer`."""
        del tensors
        return x.flatten(1)


@dataclass(frozen=True)
class Chain:
    """A network without branches.

    Attributes:
        layers: in order.
    """

    layers: tuple[Layer, ...]

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        """Logits [n, classes] of rows."""
        for layer in self.layers:
            x = layer(x, tensors)
        return x


def _named(tensors: Tensors, name: str | None) -> Tensor | None:
    return None if name is None else tensors[name]


def _channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))
