"""What all changes of images share: checks, layout, bounds, random numbers, and settings drawn by chance."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds, bounds_of, clipped, inputs_of
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.windows import Layout, as_nchw, from_nchw
from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import generator

__all__ = ["Change", "Images", "Layout", "Transform"]

_HALVES: Final = (torch.float16, torch.bfloat16)  # in which blurs and turns would lose too much


@dataclass(frozen=True, eq=False)
class Images:
    """Images while they are changed.

    Attributes:
        x: [n, channels, height, width], of at least 32 bits.
        low: smallest values, as x; may be infinite.
        high: largest values, as x; may be infinite.
        draws: random numbers of each row, named by its bytes: equal images get equal numbers, in any layout.
    """

    x: Tensor
    low: Tensor
    high: Tensor
    draws: Draws

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.x.shape[2], self.x.shape[3]


@dataclass(frozen=True)
class Change(ABC):
    """A change of images: settings and nothing else. Every row is changed by itself."""

    @property
    def neutral(self) -> bool:
        """Whether these settings leave every image as it is."""
        return False

    @property
    def stream(self) -> str:
        """Names the random numbers."""
        return type(self).__name__

    def apply(
        self, x: Any, rng: int = 0, bounds: Bounds = (0.0, 1.0), layout: Layout | None = None
    ) -> Tensor:
        """Changed images, inside the bounds.

        Args:
            x: images of four axes, floating point, a tensor or an array; never written to.
            rng: seed; the same one gives the same bits on a CPU.
            bounds: smallest and largest value; numbers, or tensors that broadcast to x.
            layout: "nchw" or "nhwc"; to be given, as it cannot be known from a shape.

        Returns:
            of the shape, dtype and device of x.

        Raises:
            ConfigError: no layout, or bounds that make no sense.
            DataError: x has not four axes, is not floating point, or lies outside the bounds.
        """
        inputs = inputs_of(x)
        who = type(self).__name__
        as_nchw(inputs, layout, who)  # refuses what is no image
        low, high = bounds_of(bounds, inputs)
        inputs, _ = clipped(inputs, low, high)
        if self.neutral or not inputs.numel():
            return inputs.clone()
        images = as_nchw(inputs, layout, who).contiguous()
        work = torch.float32 if images.dtype in _HALVES else images.dtype
        lowest, highest = (as_nchw(bound.expand_as(inputs), layout, who).to(work) for bound in (low, high))
        given = Images(images.to(work), lowest, highest, Draws(rng, self.stream, row_keys(images)))
        found = from_nchw(self._changed(given).to(inputs.dtype), layout)
        return torch.minimum(torch.maximum(found, low), high).contiguous()

    @abstractmethod
    def _changed(self, images: Images) -> Tensor:
        """The images after the change, as `images.x`; they need not be inside the bounds."""


@dataclass(frozen=True)
class Transform(Change):
    """A natural change. Without settings it leaves an image as it is.

    A class declares its `limits` (what a setting may be, both ends included), the `ranges` from which
    `random` draws (integers where both ends are), the `choices` of its settings that are words, and its
    `amounts`: the settings that leave images alone when all are at their defaults. `raw` names those in units
    of the inputs, `geometric` says whether pixels move.
    """

    geometric: ClassVar[bool] = False
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    amounts: ClassVar[tuple[str, ...]] = ()
    raw: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, (low, high) in self.limits.items():
            value = getattr(self, name)
            if not (low <= value <= high) or not math.isfinite(value):
                raise ConfigError(
                    f"{name} {value}",
                    rule=f"a finite number from {low:g} to {high:g}",
                    who=type(self).__name__,
                )
        for name, words in self.choices.items():
            if getattr(self, name) not in words:
                raise ConfigError(
                    f"{name} {getattr(self, name)!r}",
                    rule=f"one of {', '.join(words)}",
                    who=type(self).__name__,
                )
        self.check()

    def check(self) -> None:
        """Refuse settings that limits and choices do not describe.

        Raises:
            ConfigError: naming the setting.
        """

    @property
    def neutral(self) -> bool:
        """See `Change.neutral`."""
        usual = {each.name: each.default for each in dataclasses.fields(self)}
        return all(getattr(self, name) == usual[name] for name in self.amounts)

    @classmethod
    def random(cls, rng: int, bounds: Bounds = (0.0, 1.0)) -> Self:
        """Settings drawn uniformly from the declared ranges.

        Args:
            rng: seed.
            bounds: of the inputs: ranges are declared for a width of 1, and settings in units of the inputs
                are drawn from so many times as much. Infinite bounds count as a width of 1.
        """
        draws = generator(rng, f"attacks/transforms/{cls.__name__}")
        return cls(**cls._drawn(draws, _width(bounds)))

    @classmethod
    def _drawn(cls, draws: Any, width: float) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, (low, high) in cls.ranges.items():
            if isinstance(low, int) and isinstance(high, int):
                found[name] = int(draws.integers(low, high + 1))
            else:
                found[name] = float(draws.uniform(low, high)) * (width if name in cls.raw else 1.0)
        for name, words in cls.choices.items():
            found[name] = str(words[int(draws.integers(len(words)))])
        return found


def finite_width(images: Images, who: str) -> Tensor:
    """High − low of every value; for changes that have no meaning without bounds.

    Raises:
        ConfigError: a bound is infinite.
    """
    width = images.high - images.low
    if not bool(torch.isfinite(width).all()):
        raise ConfigError(
            "infinite bounds",
            rule="this change needs a smallest and a largest value",
            fix="bounds=(0, 1)",
            who=who,
        )
    return width


def _width(bounds: Bounds) -> float:
    low, high = (torch.as_tensor(bound, dtype=torch.float64) for bound in bounds)
    width = float((high - low).max())
    return width if math.isfinite(width) else 1.0
