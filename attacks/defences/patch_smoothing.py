"""Smoothing against patches: the vote of what a model sees through a band, with an exact certificate.

Levine, Feizi: "(De)randomized smoothing for certifiable defense against patch attacks", NeurIPS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.arguments import bounds_of, clipped, inputs_of
from mycelia.attacks.defences.inputs import check_bounds
from mycelia.attacks.defences.training import Batch, TrainingDefence
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.intervals import wilson
from mycelia.attacks.model import as_model
from mycelia.engine.data import Examples
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["BandTraining", "Bands", "PatchCertificates", "PatchSmoothed"]

Kind = Literal["column", "row", "block"]
Layout = Literal["nchw", "nhwc"]
Patch = int | tuple[int, int]

_KINDS: Final = ("column", "row", "block")
_LAYOUTS: Final = ("nchw", "nhwc")


@dataclass(frozen=True)
class Bands:
    """Which parts of a picture are looked at, one at a time; at the edge a band goes on at the other side.

    >>> Bands("column", 4).affected(5, 28, 28), Bands("block", 4).affected(5, 28, 28)
    (8, 64)

    Attributes:
        kind: "column" (the paper's best), "row", or "block".
        size: columns or rows of a band, or side of a block, at least 1.
        layout: where the axes of a picture are.
    """

    kind: Kind = "column"
    size: int = 4
    layout: Layout = "nchw"

    def __post_init__(self) -> None:
        """Refuse settings that make no sense.

        Raises:
            ConfigError: naming them.
        """
        if self.kind not in _KINDS or self.layout not in _LAYOUTS or self.size < 1:
            raise ConfigError(
                f"kind {self.kind!r}, size {self.size}, layout {self.layout!r}",
                rule=f"one of {', '.join(_KINDS)}; at least 1; one of {', '.join(_LAYOUTS)}",
                who="Bands",
            )

    def masks(self, height: int, width: int) -> Tensor:
        """What each band keeps of a picture, bool [bands, height, width].

        Raises:
            ConfigError: a band is larger than the picture.
        """
        if self.kind == "column":
            return self._ring(width)[:, None, :].expand(-1, height, -1)
        if self.kind == "row":
            return self._ring(height)[:, :, None].expand(-1, -1, width)
        rows, columns = self._ring(height), self._ring(width)
        return (rows[:, None, :, None] & columns[None, :, None, :]).reshape(-1, height, width)

    def affected(self, patch: Patch, height: int, width: int) -> int:
        """Bands that a patch can touch, Δ of the paper: m + s − 1 of columns, its square of blocks.

        Args:
            patch: side of a square, or height and width.
            height: of pictures.
            width: of pictures.

        Raises:
            ConfigError: no patch, or a band larger than the picture.
        """
        tall, wide = (patch, patch) if isinstance(patch, int) else patch
        if not 1 <= tall <= height or not 1 <= wide <= width:
            raise ConfigError(
                f"a patch of {tall} × {wide}", rule=f"1 × 1 to {height} × {width}, the picture", who="patch"
            )
        self._ring(min(height, width) if self.kind == "block" else height if self.kind == "row" else width)
        down, across = min(height, tall + self.size - 1), min(width, wide + self.size - 1)
        return {"column": across, "row": down, "block": down * across}[self.kind]

    def encode(
        self, x: Tensor, keep: Tensor, low: Tensor | float = 0.0, high: Tensor | float = 1.0
    ) -> Tensor:
        """Pictures of which only a band is left, with twice the channels.

        Kept numbers v stand twice, as (v − low) and (high − v), and what is left out is 0 in both, which no
        kept number is (section 3.1 of the paper).

        Args:
            x: pictures [n, c, h, w] or [n, h, w, c].
            keep: bool [n, h, w].
            low: smallest value.
            high: largest value.
        """
        axis = 1 if self.layout == "nchw" else 3
        return torch.cat([x - low, high - x], axis) * keep.unsqueeze(axis).to(x.dtype)

    def encoded(self, examples: Examples, low: float = 0.0, high: float = 1.0) -> Examples:
        """Whole pictures with twice the channels, see `encode`: what `BandTraining` trains on.

        Args:
            examples: pictures with their labels.
            low: smallest value.
            high: largest value.

        Raises:
            DataError: no pictures.
        """
        x = torch.from_numpy(examples.inputs.copy())
        keep = torch.ones(len(x), *self.sides(x), dtype=torch.bool)
        return Examples(self.encode(x, keep, low, high).numpy(), examples.targets)

    def sides(self, x: Tensor) -> tuple[int, int]:
        """Height and width of pictures.

        Raises:
            DataError: x is no batch of pictures.
        """
        if x.dim() != 4:
            raise DataError(f"x has shape {list(x.shape)}", rule=f"pictures, {self.layout}", who="Bands")
        height, width = x.shape[2:] if self.layout == "nchw" else x.shape[1:3]
        return int(height), int(width)

    def _ring(self, length: int) -> Tensor:
        """Where each band begins, and what it keeps of one axis: bool [length, length]."""
        if self.size > length:
            raise ConfigError(f"a band of {self.size}", rule=f"at most {length}, the picture", who="Bands")
        places = torch.arange(length)
        return (places[None, :] - places[:, None]) % length < self.size


@dataclass(frozen=True)
class BandTraining(TrainingDefence):
    """Trains the model behind `PatchSmoothed`: each row is seen through one band, drawn anew each time.

    Examples are whole pictures as `Bands.encoded` gives them.

    Attributes:
        bands: of the defence.
    """

    bands: Bands = Bands()

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `TrainingDefence.craft`."""
        x = batch.inputs
        masks = self.bands.masks(*self.bands.sides(x)).to(x.device)
        draws = Draws(batch.seed, "bands", row_keys(x, batch.targets))
        keep = masks[draws.integers("band", len(masks))]
        return x * keep.unsqueeze(1 if self.bands.layout == "nchw" else 3).to(x.dtype), batch.targets


@dataclass(frozen=True, eq=False)
class PatchCertificates:
    """What was certified of each row against one patch anywhere.

    Attributes:
        label: int64 [n]: the class with the most votes.
        certified: bool [n]: no contents of such a patch, at any one place, make another class win.
        votes: int64 [n, classes].
        affected: bands that such a patch can touch.
        patch: its height and width.
        bands: how many there are.
    """

    label: Tensor
    certified: Tensor
    votes: Tensor
    affected: int
    patch: tuple[int, int]
    bands: int

    def accuracy(self, y: Tensor) -> tuple[float, tuple[float, float]]:
        """Share of all rows that are classified as y and certified, and its 95 % interval.

        Raises:
            DataError: labels that do not fit, or no rows.
        """
        if y.shape != self.label.shape or not len(y):
            raise DataError(f"labels {list(y.shape)}", rule=f"one of each row, {len(self.label)}", who="y")
        count = int((self.certified & (self.label == y.to(self.label.device))).sum())
        return count / len(y), wilson(count, len(y))


@dataclass(frozen=True, eq=False)
class PatchSmoothed:
    """A classifier that takes the vote of a model over all bands of a picture.

    Each band votes for every class of which the model is sure enough; the class with the most votes wins, the
    first of equal ones. A patch changes the votes of `Bands.affected` bands and of no other, so it takes at
    most so many votes from one class and gives as many to another (theorem 1). Nothing is drawn: the
    certificate is exact as long as the model gives the same for the same rows. So that a row's neighbours
    have no say in that, the bands of one row are a batch of their own.

    Attributes:
        model: as `as_model` takes it; of encoded pictures, twice the channels.
        bands: what it sees.
        threshold: probability from which on a class has the vote of a band, in (0, 1] (paper, CIFAR-10: 0.3);
            None: the most probable class alone has it.
        bounds: smallest and largest value of an input.
    """

    model: Any
    bands: Bands = Bands()
    threshold: float | None = 0.3
    bounds: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        """Refuse settings that make no sense.

        Raises:
            ConfigError: naming them.
        """
        check_bounds(self.bounds, "PatchSmoothed")
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise ConfigError(
                f"threshold {self.threshold}", rule="a probability in (0, 1]", who="PatchSmoothed"
            )

    def votes(self, x: Tensor) -> Tensor:
        """How many bands vote for each class, int64 [n, classes].

        Args:
            x: pictures in the layout of the bands.

        Raises:
            DataError: no pictures, or beyond their bounds.
            ConfigError: a model that gives labels where a threshold asks for scores, or bands too large.
        """
        x = inputs_of(x)
        low, high = bounds_of(self.bounds, x)
        x, sound = clipped(x, low, high)
        if not bool(sound.all()):
            raise DataError("a row that is not finite", rule="finite pictures", who="PatchSmoothed")
        masks = self.bands.masks(*self.bands.sides(x)).to(x.device)
        model = as_model(self.model)
        found = []
        with model.quiet():
            for row in x:
                seen = self.bands.encode(row.expand(len(masks), *row.shape), masks, low, high)
                found.append(self._cast(model(seen)))
        return torch.stack(found) if found else torch.zeros(0, 0, dtype=torch.int64)

    def predict(self, x: Tensor) -> Tensor:
        """The class with the most votes, int64 [n]; the first of equal ones."""
        votes = self.votes(x)
        return _winner(votes) if len(votes) else torch.zeros(0, dtype=torch.int64)

    def certify(self, x: Tensor, patch: Patch) -> PatchCertificates:
        """Which rows no patch of this size turns (theorem 1).

        Args:
            x: pictures in the layout of the bands.
            patch: side of a square, or height and width.

        Raises:
            ConfigError: a patch larger than the picture, or as `votes`.
            DataError: as `votes`.
        """
        height, width = self.bands.sides(x)
        affected = self.bands.affected(patch, height, width)
        votes = self.votes(x)
        tall, wide = (patch, patch) if isinstance(patch, int) else patch
        count = len(self.bands.masks(height, width))
        if not len(votes):
            none = torch.zeros(0, dtype=torch.int64)
            return PatchCertificates(none, none.bool(), votes, affected, (tall, wide), count)
        label = _winner(votes)
        own = votes.gather(1, label[:, None])
        # a class with a smaller number wins a draw, so it needs one vote less
        first = torch.arange(votes.shape[1], device=votes.device)[None, :] < label[:, None]
        rivals = (votes + first.long()).scatter(1, label[:, None], -1).amax(1)
        certified = own[:, 0] >= rivals + 2 * affected
        return PatchCertificates(label, certified, votes, affected, (tall, wide), count)

    def _cast(self, z: Tensor) -> Tensor:
        """Votes for each class, [classes], of the outputs for all bands."""
        if not z.is_floating_point():
            raise ConfigError(
                "a model that gives labels", rule="scores, of which probabilities are made", who="model"
            )
        if self.threshold is None:
            return torch.bincount(_winner(z), minlength=z.shape[1])
        return (z.softmax(1) >= self.threshold).long().sum(0)


def _winner(scores: Tensor) -> Tensor:
    """The first of the largest, [n]; torch.argmax does not say which of equal ones it takes."""
    places = np.argmax(scores.detach().cpu().numpy(), axis=1)
    return torch.from_numpy(places).to(scores.device)
