"""Transforms that move pixels. Each says where in the old image a pixel of the new one is read; bilinear."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.evasion.spatial import Padding
from mycelia.attacks.transforms.base import Images, Transform
from mycelia.attacks.transforms.sampling import middle, sampled
from mycelia.engine.errors import ConfigError

__all__ = ["Curve", "Perspective", "Rotate", "Scale", "Shear", "Translate"]

_STILL: Final = ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
_MOST: Final = 0.45  # of its height and width, that a corner moves
_OUTSIDE: Final = 1e6


@dataclass(frozen=True)
class _Moving(Transform):
    geometric: ClassVar[bool] = True

    padding: Padding = field(default="zeros", kw_only=True)

    def check(self) -> None:
        """See `Transform.check`."""
        if self.padding not in get_args(Padding):
            raise ConfigError(
                f"padding {self.padding!r}",
                rule=f"one of {', '.join(get_args(Padding))}",
                who=type(self).__name__,
            )

    def _changed(self, images: Images) -> Tensor:
        down, right = self._read(*images.size)
        return sampled(images.x, down, right, self.padding)

    @abstractmethod
    def _read(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Where each pixel of the result is read, rows and columns from the middle, each [height, width]."""


@dataclass(frozen=True)
class Translate(_Moving):
    """Shifted.

    Attributes:
        padding: what comes in from outside: "zeros" (clipped to the bounds), "border": the nearest pixel, or
            "reflection": the mirrored image.
        down: as a share of the height.
        right: as a share of the width.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"down": (-1.0, 1.0), "right": (-1.0, 1.0)}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"down": (-0.15, 0.15), "right": (-0.15, 0.15)}
    amounts: ClassVar[tuple[str, ...]] = ("down", "right")

    down: float = 0.0
    right: float = 0.0

    def _read(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        i, j = middle(height, width)
        return i - self.down * height, j - self.right * width


@dataclass(frozen=True)
class Scale(_Moving):
    """Stretched or shrunk about the middle; the canvas keeps its size.

    Attributes:
        padding: see `Translate`.
        height: factor.
        width: factor.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"height": (1e-3, 1e3), "width": (1e-3, 1e3)}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"height": (0.75, 1.3), "width": (0.75, 1.3)}
    amounts: ClassVar[tuple[str, ...]] = ("height", "width")

    height: float = 1.0
    width: float = 1.0

    def _read(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        i, j = middle(height, width)
        return i / self.height, j / self.width


@dataclass(frozen=True)
class Shear(_Moving):
    """Slanted about the middle.

    Attributes:
        padding: see `Translate`.
        down: pixels that a pixel moves down for each pixel that it lies right of the middle.
        right: pixels that it moves right for each pixel that it lies below the middle.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"down": (-0.9, 0.9), "right": (-0.9, 0.9)}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"down": (-0.25, 0.25), "right": (-0.25, 0.25)}
    amounts: ClassVar[tuple[str, ...]] = ("down", "right")

    down: float = 0.0
    right: float = 0.0

    def _read(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        i, j = middle(height, width)
        size = 1 - self.down * self.right
        return (i - self.down * j) / size, (j - self.right * i) / size


@dataclass(frozen=True)
class Rotate(_Moving):
    """Turned about the middle.

    Attributes:
        padding: see `Translate`.
        degrees: anticlockwise.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"degrees": (-360.0, 360.0)}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"degrees": (-30.0, 30.0)}
    amounts: ClassVar[tuple[str, ...]] = ("degrees",)

    degrees: float = 0.0

    def _read(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        i, j = middle(height, width)
        angle = math.radians(self.degrees)
        return math.sin(angle) * j + math.cos(angle) * i, math.cos(angle) * j - math.sin(angle) * i


@dataclass(frozen=True)
class Perspective(_Moving):
    """Seen at a slant: the four corners move, straight lines stay straight.

    Attributes:
        padding: see `Translate`.
        corners: how far each moves down and right, as shares of height and width from −0.45 to 0.45; in the
            order top left, top right, bottom right, bottom left.
    """

    amounts: ClassVar[tuple[str, ...]] = ("corners",)
    reach: ClassVar[float] = 0.15  # of `random`

    corners: tuple[tuple[float, float], ...] = _STILL

    def check(self) -> None:
        """See `Transform.check`."""
        super().check()
        moves = np.asarray(self.corners, dtype=float)
        if moves.shape != (4, 2) or not (np.abs(moves) <= _MOST).all():
            raise ConfigError(
                f"corners {self.corners}",
                rule=f"four pairs (down, right) of shares from −{_MOST} to {_MOST}",
                who="Perspective",
            )
        object.__setattr__(self, "corners", tuple((float(d), float(r)) for d, r in moves))
        places = _corners(1, 1) + moves
        sides = np.roll(places, -1, 0) - places
        after = np.roll(sides, -1, 0)
        if not (sides[:, 1] * after[:, 0] - sides[:, 0] * after[:, 1] > 0).all():
            raise ConfigError(
                f"corners {self.corners}", rule="their quadrilateral is convex", who="Perspective.corners"
            )

    @classmethod
    def _drawn(cls, draws: Any, width: float) -> dict[str, Any]:
        return {"corners": tuple(map(tuple, draws.uniform(-cls.reach, cls.reach, (4, 2)).tolist()))}

    def _read(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        old = _corners(height, width)
        new = old + np.asarray(self.corners) * [height, width]
        # old ~ H new: eight equations in the entries of H, the last of which is 1.
        equations, values = [], []
        for (i, j), (down, right) in zip(new, old, strict=True):
            equations += [
                [i, j, 1, 0, 0, 0, -down * i, -down * j],
                [0, 0, 0, i, j, 1, -right * i, -right * j],
            ]
            values += [down, right]
        h = np.append(np.linalg.solve(np.asarray(equations), np.asarray(values)), 1.0)
        y, x = middle(height, width)
        depth = h[6] * y + h[7] * x + h[8]
        front = depth > 0  # what lies behind the eye is not in the picture
        depth = torch.where(front, depth, 1.0)
        return (
            torch.where(front, (h[0] * y + h[1] * x + h[2]) / depth, _OUTSIDE),
            torch.where(front, (h[3] * y + h[4] * x + h[5]) / depth, _OUTSIDE),
        )


@dataclass(frozen=True)
class Curve(_Moving):
    """Bent into a wave.

    Attributes:
        padding: see `Translate`.
        depth: of the wave, as a share of the width where rows are shifted, of the height where columns are.
        periods: of the wave, over the image.
        axis: "rows": each row is shifted right by depth · sin(2π · periods · its place from 0 to 1);
            "columns": each column is shifted down.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"depth": (-1.0, 1.0), "periods": (0.0, 1e3)}
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"depth": (0.02, 0.1), "periods": (0.5, 2.0)}
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"axis": ("rows", "columns")}
    amounts: ClassVar[tuple[str, ...]] = ("depth",)

    depth: float = 0.0
    periods: float = 1.0
    axis: Literal["rows", "columns"] = "rows"

    def _read(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        i, j = middle(height, width)
        turn = 2 * math.pi * self.periods
        if self.axis == "rows":
            return i, j - self.depth * width * torch.sin(turn * (i / height + 0.5))
        return i - self.depth * height * torch.sin(turn * (j / width + 0.5)), j


def _corners(height: int, width: int) -> Any:
    """Outer corners, (down, right) from the middle, in the order of `Perspective.corners`; float64 [4, 2]."""
    return np.asarray([[-1, -1], [-1, 1], [1, 1], [1, -1]]) * [height / 2, width / 2]
