"""Zonotopes: bounds that remember how numbers move together.

Singh, Gehr, Mirman, Püschel, Vechev: "Fast and effective robustness certification" (DeepZ), NeurIPS 2018.
Here each layer's intervals cut the zonotope's own bounds, so that none of them is looser than intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks.defences.verification.intervals import Rounding
from mycelia.attacks.defences.verification.layers import Affine, Chain, Flatten, Layer, MaxPool, ReLU
from mycelia.engine.errors import ConfigError
from mycelia.engine.types import Tensors

__all__ = ["Zonotope", "margins_of", "zonotope_of", "zonotope_through"]

_EXACT: Final = 2.0**-53
Bounds = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Zonotope:
    """The points centre + Σ_k e_k · terms_k + d · slack, for e and d in [−1, 1]; one row, float64.

    Attributes:
        centre: [1, …].
        terms: [k, …].
        slack: [1, …], at least 0, each number with a d of its own: rounding, and terms beyond the most.
    """

    centre: Tensor
    terms: Tensor
    slack: Tensor

    def radius(self) -> Tensor:
        """How far each number may be from the centre, [1, …], rounded upwards."""
        more = 1 + (len(self.terms) + 8) * 2 * _EXACT
        return (self.terms.abs().sum(0, keepdim=True) + self.slack) * more

    def bounds(self) -> Bounds:
        """Smallest and largest of each number, rounded outwards."""
        radius = self.radius()
        around = radius + 2 * _EXACT * (self.centre.abs() + radius)
        return self.centre - around, self.centre + around


def zonotope_of(low: Tensor, high: Tensor) -> Zonotope:
    """The box between two, [1, …] each: a term for each number that is not fixed."""
    centre, radius = (low + high) / 2, (high - low) / 2
    slack = 4 * _EXACT * torch.maximum(low.abs(), high.abs())
    terms, rest = _own_terms(radius, int((radius > 0).sum()))
    return Zonotope(centre, terms, slack + rest)


def zonotope_through(
    chain: Chain,
    low: Tensor,
    high: Tensor,
    known: list[Bounds],
    tensors: Tensors,
    rounding: Rounding,
    most: int,
) -> Zonotope:
    """What a chain gives for the box between two.

    Args:
        chain: of a classifier.
        low: smallest inputs, [1, …].
        high: largest inputs.
        known: bounds of the inputs and of what each layer gives, from intervals.
        tensors: of the chain, float64.
        rounding: of the model.
        most: new terms of one layer; of more, the largest become terms and the rest slack.
    """
    now = zonotope_of(low, high)
    for layer, bounds in zip(chain.layers, known, strict=False):
        now = _after(layer, now, bounds, tensors, rounding, most)
    return now


def margins_of(zonotope: Zonotope, label: int) -> Tensor:
    """What z_y − z_j is at least, for each class j, [1, classes]; 0 for y itself."""
    centre = zonotope.centre[:, label : label + 1] - zonotope.centre
    terms = zonotope.terms[:, label : label + 1] - zonotope.terms
    slack = zonotope.slack[:, label : label + 1] + zonotope.slack
    size = zonotope.centre.abs() + zonotope.radius()
    slack = slack + 8 * _EXACT * (size + size[:, label : label + 1])
    found = Zonotope(centre, terms, slack).bounds()[0]
    found[:, label] = 0
    return found


def _after(
    layer: Layer, now: Zonotope, known: Bounds, tensors: Tensors, rounding: Rounding, most: int
) -> Zonotope:
    if isinstance(layer, Affine):
        size = now.centre.abs() + now.radius()
        slack = layer.absolute(now.slack, tensors) + rounding.error(layer, now.centre, size, tensors)
        return Zonotope(layer(now.centre, tensors), layer.linear(now.terms, tensors), slack)
    if isinstance(layer, Flatten):
        return Zonotope(now.centre.flatten(1), now.terms.flatten(1), now.slack.flatten(1))
    low, high = now.bounds()
    low, high = torch.maximum(low, known[0]), torch.minimum(high, known[1])
    if isinstance(layer, ReLU):
        return _relu(now, low, high, most)
    if isinstance(layer, MaxPool):
        return _max_pool(layer, now, low, high, most)
    raise ConfigError(f"no zonotope for {type(layer).__name__}", rule="see `read`", who="verification")


def _relu(now: Zonotope, low: Tensor, high: Tensor, most: int) -> Zonotope:
    """max(x, 0) lies in slope · x + [0, gap], with slope = high / (high − low) where the sign is open.

    Any slope in [0, 1] is sound: max(x, 0) − slope · x is convex, so largest at an end, and 0 at its
    smallest. This slope has the smallest gap (theorem 3.1).
    """
    is_open = (low < 0) & (high > 0)
    slope = torch.where(is_open, high / (high - low), (low >= 0).to(low.dtype)).clamp(0, 1)
    gap = torch.where(is_open, torch.maximum(-slope * low, (1 - slope) * high), torch.zeros_like(low))
    half = gap / 2
    size = now.centre.abs() + now.radius() + gap
    terms, rest = _own_terms(half, most)
    return Zonotope(
        slope * now.centre + half,
        torch.cat([slope * now.terms, terms]),
        slope * now.slack + rest + torch.where(slope > 0, 8 * _EXACT * size, torch.zeros_like(size)),
    )


def _max_pool(layer: MaxPool, now: Zonotope, low: Tensor, high: Tensor, most: int) -> Zonotope:
    """The form of the one that is largest, where one surely is; else a box (section 4, max-pool)."""
    options = (layer.window, layer.stride, layer.padding, layer.dilation)
    least, where = functional.max_pool2d(low, *options, return_indices=True)
    flat = where.flatten(2)
    height, width = low.shape[2:]
    numbers = torch.arange(height * width, device=low.device).to(low).view(1, 1, height, width)
    # of equal lower bounds, the one whose form is taken is the one that is left out here
    is_own = _windows(numbers, layer) == flat[:, :, None]
    others = _windows(high, layer).masked_fill(is_own, -torch.inf).amax(2).view_as(least)
    sure, largest = least >= others, functional.max_pool2d(high, *options)
    half = torch.where(sure, torch.zeros_like(least), (largest - least) / 2)
    terms, rest = _own_terms(half, most)

    def taken(x: Tensor) -> Tensor:
        return x.flatten(2).gather(2, flat.expand(len(x), -1, -1)).view(len(x), *least.shape[1:]) * sure

    box = torch.where(sure, torch.zeros_like(least), (largest + least) / 2)
    rounded = 4 * _EXACT * torch.maximum(least.abs(), largest.abs()) * ~sure
    return Zonotope(
        taken(now.centre) + box,
        torch.cat([taken(now.terms), terms]),
        taken(now.slack) + rest + rounded,
    )


def _windows(x: Tensor, layer: MaxPool) -> Tensor:
    """[1, c, h, w] as [1, c, numbers of a window, windows]; padding is never the largest."""
    (high, wide), channels = layer.padding, x.shape[1]
    padded = functional.pad(x, (wide, wide, high, high), value=-torch.inf)
    found = functional.unfold(padded, layer.window, layer.dilation, 0, layer.stride)
    return found.view(1, channels, -1, found.shape[2])


def _own_terms(sizes: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """A term for each of the largest numbers above 0, at most so many; and what is left, as slack."""
    flat = sizes.flatten()
    count = min(most, int((flat > 0).sum()))
    values, places = flat.topk(count)
    terms = flat.new_zeros(count, len(flat))
    terms[torch.arange(count, device=flat.device), places] = values
    rest = flat.scatter(0, places, 0.0)
    return terms.view(count, *sizes.shape[1:]), rest.view_as(sizes)
