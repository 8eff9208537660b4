"""How accurate a model is on corrupted images: by corruption and severity, and beside clean ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds, inputs_of
from mycelia.attacks.goals import predicted
from mycelia.attacks.intervals import wilson
from mycelia.attacks.model import Model, as_model
from mycelia.attacks.transforms.base import Change
from mycelia.attacks.transforms.cifar_c import corruptions_in, read_corrupted
from mycelia.attacks.transforms.corruptions import CORRUPTIONS, Corruption
from mycelia.attacks.transforms.pixels import GaussianNoise
from mycelia.attacks.windows import Layout
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["CorruptionReport", "Score", "corruption_report", "folder_report", "gaussian_ladder"]

_ALL = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Score:
    """How many rows were right.

    Attributes:
        right: so many.
        n: of so many, at least 1.
    """

    right: int
    n: int

    @property
    def accuracy(self) -> float:
        """The share, in [0, 1]."""
        return self.right / self.n

    def to_json(self, key: str = "accuracy") -> dict[str, Any]:
        """The share with its Wilson 95 % interval."""
        return {key: self.accuracy, f"{key}_ci95": list(wilson(self.right, self.n))}


@dataclass(frozen=True)
class CorruptionReport:
    """Accuracies.

    Attributes:
        scores: by corruption and severity.
        clean: on the images as they were; None: not known.
    """

    scores: Mapping[str, Mapping[int, Score]]
    clean: Score | None = None

    def accuracy(self, corruption: str) -> float:
        """Mean over the severities of one corruption."""
        found = [score.accuracy for score in self.scores[corruption].values()]
        return sum(found) / len(found)

    @property
    def mean(self) -> float:
        """Mean over the corruptions, each of which counts the same."""
        return sum(map(self.accuracy, self.scores)) / len(self.scores)

    @property
    def relative(self) -> float | None:
        """The mean as a share of the clean accuracy; None where that is not known or 0."""
        return None if self.clean is None or not self.clean.right else self.mean / self.clean.accuracy

    def to_json(self) -> dict[str, Any]:
        """The block `broader.corruptions` of a report."""
        why = "clean accuracy was not measured" if self.clean is None else "clean accuracy is 0"
        relative = {"relative": self.relative} | ({"relative_reason": why} if self.relative is None else {})
        clean = (
            {"clean_accuracy": None, "clean_accuracy_reason": why}
            if self.clean is None
            else self.clean.to_json("clean_accuracy")
        )
        each = [
            {"corruption": name, "severity": severity, "n": score.n, **score.to_json()}
            for name, scores in self.scores.items()
            for severity, score in scores.items()
        ]
        return {**clean, "mean_accuracy": self.mean, **relative, "each": each}

    def text(self) -> str:
        """A table: a line for each corruption, then the mean."""
        levels = sorted({severity for scores in self.scores.values() for severity in scores})
        wide = max(len(name) for name in [*self.scores, "corruption"])
        lines = [" ".join(["corruption".ljust(wide), *(f"{level:>6}" for level in levels), "  mean"])]
        for name, scores in self.scores.items():
            cells = [f"{scores[level].accuracy:6.3f}" if level in scores else " " * 6 for level in levels]
            lines.append(" ".join([name.ljust(wide), *cells, f"{self.accuracy(name):6.3f}"]))
        beside = "" if self.relative is None else f", {self.relative:.3f} of the clean accuracy"
        return "\n".join([*lines, f"mean over corruptions {self.mean:.3f}{beside}"]) + "\n"


def corruption_report(
    model: object,
    x: Any,
    y: Tensor,
    *,
    layout: Layout,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = _ALL,
    rng: int = 0,
    bounds: Bounds = (0.0, 1.0),
    batch: int = 256,
) -> CorruptionReport:
    """Accuracy on images that are corrupted here.

    Args:
        model: see `mycelia.attacks.as_model`.
        x: clean images of four axes.
        y: true classes, integers [n], n at least 1.
        layout: of the images.
        corruptions: names of `CORRUPTIONS`.
        severities: of 1 to 5.
        rng: seed.
        bounds: smallest and largest value, finite.
        batch: rows at a time.

    Raises:
        ConfigError: a corruption or severity that does not exist, or none at all.
        DataError: no rows, or labels that are not as many.
    """
    if not corruptions or not severities:
        raise ConfigError("no corruption or severity", rule="at least one each", who="corruption_report")
    target, images = as_model(model), inputs_of(x)
    kinds = {name: [Corruption(name, level) for level in sorted(set(severities))] for name in corruptions}
    with target.quiet():
        clean = _score(target, _parts(images, y, batch))
        scores = {
            name: {
                each.severity: _score(target, _changed(each, images, y, rng, bounds, layout, batch))
                for each in every
            }
            for name, every in kinds.items()
        }
    return CorruptionReport(scores, clean)


def folder_report(
    model: object,
    folder: str | Path,
    *,
    layout: Layout,
    clean: tuple[Any, Tensor] | None = None,
    limit: int | None = None,
    batch: int = 256,
) -> CorruptionReport:
    """Accuracy on a folder in the layout of CIFAR-10-C: all its corruptions at all severities.

    Args:
        model: takes images in [0, 1]; see `mycelia.attacks.as_model`.
        folder: see `read_corrupted`.
        layout: that the model takes.
        clean: images in [0, 1] and labels of the same test set, for its clean accuracy.
        limit: images of each corruption and severity.
        batch: rows at a time.

    Raises:
        ConfigError: the folder has no corruptions.
    """
    names = corruptions_in(folder)
    if not names:
        raise ConfigError(
            f"no corruptions in {folder}", rule="<corruption>.npy and labels.npy", who="folder_report"
        )
    target = as_model(model)
    with target.quiet():
        before = None if clean is None else _score(target, _parts(inputs_of(clean[0]), clean[1], batch))
        scores = {
            name: {
                level: _score(target, _parts(*read_corrupted(folder, name, level, layout, limit), batch))
                for level in _ALL
            }
            for name in names
        }
    return CorruptionReport(scores, before)


def gaussian_ladder(
    model: object,
    x: Any,
    y: Tensor,
    *,
    layout: Layout,
    sigmas: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.5),
    rng: int = 0,
    bounds: Bounds = (0.0, 1.0),
    batch: int = 256,
) -> dict[float, Score]:
    """Accuracy under normal noise of several sizes, clipped to the bounds.

    Args:
        model: see `mycelia.attacks.as_model`.
        x: images of four axes.
        y: true classes, integers [n], n at least 1.
        layout: of the images.
        sigmas: standard deviations, in units of the inputs.
        rng: seed; all sizes share their random numbers.
        bounds: smallest and largest value.
        batch: rows at a time.

    Returns:
        by standard deviation, rising.
    """
    target, images = as_model(model), inputs_of(x)
    with target.quiet():
        return {
            sigma: _score(target, _changed(GaussianNoise(sigma), images, y, rng, bounds, layout, batch))
            for sigma in sorted(set(map(float, sigmas)))
        }


def _parts(x: Tensor, y: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    labels = torch.as_tensor(y).to(x.device)
    if not len(x) or labels.shape != (len(x),):
        raise DataError(
            f"{len(x)} images, labels {list(labels.shape)}", rule="one for each, at least one", who="y"
        )
    return zip(x.split(batch), labels.split(batch), strict=True)


def _changed(
    change: Change, x: Tensor, y: Tensor, rng: int, bounds: Bounds, layout: Layout, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    low, high = (
        bound.split(batch)
        if isinstance(bound, Tensor) and bound.dim() == x.dim() and len(bound) == len(x)
        else None
        for bound in bounds
    )
    for k, (part, labels) in enumerate(_parts(x, y, batch)):
        box = bounds[0] if low is None else low[k], bounds[1] if high is None else high[k]
        yield change.apply(part, rng, box, layout), labels


def _score(model: Model, parts: Iterable[tuple[Tensor, Tensor]]) -> Score:
    right = n = 0
    for x, y in parts:
        right += int((predicted(model(x)) == y).sum())
        n += len(y)
    return Score(right, n)
