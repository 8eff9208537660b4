"""Drift of a series: windows of it go through a fixed random network, and far-off states are suspicious.

Reservoir features: Jaeger: "The 'echo state' approach to analysing and training recurrent neural networks",
GMD report 148, 2001. The network starts anew in each window, so that a score depends on the window before it
and on nothing else: not on what comes later, nor on where the series began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.detectors.threshold import threshold_at
from mycelia.attacks.drift.ood import Mahalanobis
from mycelia.attacks.drift.two_sample import as_sample
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator

__all__ = ["FittedSeriesDrift", "SeriesDrift"]

_TOGETHER: Final = 4096  # windows at a time


@dataclass(frozen=True)
class SeriesDrift:
    """How a series is looked at.

    Attributes:
        window: steps that a score looks at, at least 2.
        size: neurons of the reservoir, at least 1.
        radius: largest absolute eigenvalue of its recurrent weights, in (0, 1): how long it remembers.
        leak: share of a neuron that each step replaces, in (0, 1].
        ridge: see `Mahalanobis.fit`.
    """

    window: int = 20
    size: int = 20
    radius: float = 0.9
    leak: float = 0.5
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        shares = 0 < self.radius < 1 and 0 < self.leak <= 1 and self.ridge >= 0
        if self.window < 2 or self.size < 1 or not shares:
            raise ConfigError(
                f"window {self.window}, size {self.size}, radius {self.radius}, leak {self.leak}, "
                f"ridge {self.ridge}",
                rule="window at least 2, size at least 1, radius in (0, 1), leak in (0, 1], ridge at least 0",
                who="SeriesDrift",
            )

    def fit(self, benign: Any, fpr: float, rng: int = 0) -> FittedSeriesDrift:
        """Learn what is usual from the first half of a series, and the threshold from the second.

        Args:
            benign: [T], or [T, channels].
            fpr: share of benign windows that may be flagged, in (0, 1).
            rng: seed of the reservoir.

        Raises:
            DataError: fewer than two windows in each half.
        """
        series = as_sample(benign, "SeriesDrift.fit")
        half = len(series) // 2
        if half < self.window + 1:
            raise DataError(
                f"a series of {len(series)} steps",
                rule=f"at least two windows of {self.window} in each half",
                who="SeriesDrift.fit",
            )
        early, late = series[:half], series[half:]
        scale = early.std(0)
        draw = generator(rng, "attacks/drift/reservoir")
        recurrent = draw.standard_normal((self.size, self.size))
        recurrent *= self.radius / np.abs(np.linalg.eigvals(recurrent)).max()
        fitted = FittedSeriesDrift(
            settings=self,
            mean=torch.from_numpy(early.mean(0)),
            scale=torch.from_numpy(np.where(scale > 0, scale, 1.0)),
            into=torch.from_numpy(draw.uniform(-1.0, 1.0, (series.shape[1] + 1, self.size))),
            recurrent=torch.from_numpy(recurrent),
            usual=None,
            threshold=np.inf,
        )
        usual = Mahalanobis.fit(fitted.features(early), ridge=self.ridge)
        line = threshold_at(usual(fitted.features(late)), fpr)
        return FittedSeriesDrift(**{**vars(fitted), "usual": usual, "threshold": line})


@dataclass(frozen=True, eq=False)
class FittedSeriesDrift:
    """What is usual, and how unusual a window has to be.

    Attributes:
        settings: of the windows and the reservoir.
        mean: of each channel, [channels].
        scale: its standard deviation, [channels]; 1 where that is 0.
        into: weights of the inputs and a constant, [channels + 1, size].
        recurrent: weights from state to state, [size, size].
        usual: the score of features.
        threshold: above which a score is flagged.
    """

    settings: SeriesDrift
    mean: Tensor
    scale: Tensor
    into: Tensor
    recurrent: Tensor
    usual: Mahalanobis | None
    threshold: float

    def features(self, series: Any) -> Tensor:
        """The last state and the mean one of each window, float64 [T − window + 1, 2 · size].

        Args:
            series: [T, channels]
        """
        values = torch.from_numpy(as_sample(series, "series"))
        if values.shape[1] != len(self.mean):
            raise DataError(f"{values.shape[1]} channels", rule=f"{len(self.mean)}, as fitted", who="series")
        given = (values - self.mean) / self.scale
        driven = torch.cat([given, torch.ones(len(given), 1, dtype=torch.float64)], 1) @ self.into
        if len(driven) < self.settings.window:
            return driven.new_zeros(0, 2 * self.settings.size)
        windows = driven.unfold(0, self.settings.window, 1)  # [windows, size, window]
        return torch.cat([self._states(some) for some in windows.split(_TOGETHER)])

    def _states(self, windows: Tensor) -> Tensor:
        state = windows.new_zeros(windows.shape[:2])
        total = torch.zeros_like(state)
        for step in windows.unbind(2):
            new = torch.tanh(step + state @ self.recurrent)
            state = (1 - self.settings.leak) * state + self.settings.leak * new
            total += state
        return torch.cat([state, total / windows.shape[2]], 1)

    def score(self, series: Any) -> Tensor:
        """How unusual the window is that ends at each step, [T]; NaN where there is no whole one yet.

        Args:
            series: [T], or [T, channels]; the score at t looks at no later step.
        """
        if self.usual is None:
            raise ConfigError("no benign series yet", rule="fit comes first", who="SeriesDrift.score")
        found = self.usual(self.features(series))
        early = len(as_sample(series, "series")) - len(found)
        return torch.cat([torch.full((early,), torch.nan, dtype=torch.float64), found])

    def flag(self, series: Any) -> Tensor:
        """Where the window that ends there is suspicious, bool [T].

        Args:
            series: [T], or [T, channels].
        """
        return self.score(series) > self.threshold
