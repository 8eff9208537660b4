"""Bounds of what each layer gives, number by number.

Gowal, Dvijotham, Stanforth, Bunel, Qin, Uesato, Arandjelovic, Mann, Kohli: "On the effectiveness of interval
bound propagation for training verifiably robust models", 2018 (ICCV 2019), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mycelia.attacks.defences.verification.layers import Affine, Chain, Layer, Linear
from mycelia.engine.types import Tensors

__all__ = ["Rounding", "bounds_after", "bounds_through", "margins_below"]

_EXACT: Final = 2.0**-53  # unit roundoff of the float64 that bounds are computed in


@dataclass(frozen=True)
class Rounding:
    """What rounding may do, in the model and in these computations themselves.

    A sum of k products, in any order, is off by at most k·u / (1 − k·u) times the sum of their sizes, u being
    the unit roundoff (Higham: "Accuracy and stability of numerical algorithms", 2nd ed. 2002, section 3.1).

    Attributes:
        unit: unit roundoff of the model's arithmetic.
        tiny: what a product may lose below the range of its exponents.
        largest: number; where a sum could exceed it, nothing is known.
    """

    unit: float
    tiny: float
    largest: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Rounding:
        """That of a model in this dtype."""
        facts = torch.finfo(dtype)
        return cls(facts.eps / 2, facts.tiny, facts.max)

    def error(self, layer: Affine, x: Tensor, sizes: Tensor, tensors: Tensors) -> Tensor:
        """How far one output may be off, in the model and here together; as outputs.

        Args:
            layer: what is computed.
            x: an input of it, for its shape.
            sizes: of the numbers that go in, float64, at least those of all inputs.
            tensors: float64.
        """
        k = layer.summands(x, tensors) + 4
        relative = k * self.unit / (1 - k * self.unit) + (4 * k + 32) * _EXACT
        whole = layer.absolute(sizes, tensors) + layer.constant(tensors)
        found = whole * (relative * (1 + 1e-9)) + k * self.tiny
        return torch.where(2 * whole < self.largest, found, torch.full_like(found, torch.inf))


def bounds_after(
    layer: Layer, low: Tensor, high: Tensor, tensors: Tensors, rounding: Rounding | None = None
) -> tuple[Tensor, Tensor]:
    """Bounds of what a layer gives for inputs between two, [n, …] each.

    Args:
        layer: monotone, or affine.
        low: smallest inputs.
        high: largest inputs.
        tensors: of the layer.
        rounding: widens the bounds by what rounding may do; None: they may be off by it.
    """
    if not isinstance(layer, Affine):
        return layer(low, tensors), layer(high, tensors)
    centre, radius = (low + high) / 2, (high - low) / 2
    middle, around = layer(centre, tensors), layer.absolute(radius, tensors)
    if rounding is not None:
        around = around + rounding.error(layer, low, torch.maximum(low.abs(), high.abs()), tensors)
    return middle - around, middle + around


def bounds_through(
    chain: Chain, low: Tensor, high: Tensor, tensors: Tensors, rounding: Rounding | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Bounds of the inputs, and of what each layer gives; see `bounds_after`."""
    found = [(low, high)]
    for layer in chain.layers:
        found.append(bounds_after(layer, *found[-1], tensors, rounding))
    return found


def margins_below(
    chain: Chain,
    bounds: list[tuple[Tensor, Tensor]],
    y: Tensor,
    tensors: Tensors,
    rounding: Rounding | None = None,
) -> Tensor:
    """What z_y − z_j is at least, for each class j, [n, classes]; 0 for y itself.

    A dense layer at the end is taken together with the difference, which is tighter than the bounds of the
    two logits (Gowal et al., section 3, "elision of the last layer").

    Args:
        chain: of a classifier.
        bounds: as `bounds_through` gives them.
        y: labels [n].
        tensors: of the chain.
        rounding: see `bounds_after`.
    """
    last = chain.layers[-1] if chain.layers else None
    (low, high), (below, above) = bounds[-2:] if len(bounds) > 1 else (bounds[0], bounds[0])
    own = y[:, None]
    if not isinstance(last, Linear):
        found = below.gather(1, own) - above
        return found.scatter(1, own, 0.0)
    weight = tensors[last.weight]
    rows = weight[y][:, None] - weight  # [n, classes, in]
    centre, radius = (low + high) / 2, (high - low) / 2
    found = torch.einsum("ncd,nd->nc", rows, centre) - torch.einsum("ncd,nd->nc", rows.abs(), radius)
    if last.bias is not None:
        bias = tensors[last.bias]
        found = found + bias[y][:, None] - bias
    if rounding is not None:
        error = rounding.error(last, low, torch.maximum(low.abs(), high.abs()), tensors)
        found = found - error - error.gather(1, own)
    return found.scatter(1, own, 0.0)
