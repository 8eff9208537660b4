"""Detectors under the laws, with parts small enough for a test."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mycelia.attacks import PGD
from mycelia.attacks.detectors import (
    STRIP,
    ActivationClassifier,
    Detector,
    DivergenceBased,
    Ensemble,
    ErrorBased,
    RegionBased,
    Similarity,
    SpatialSmoothing,
    SubsetScanning,
)
from tests.attacks.worlds import small


class Squeezes(nn.Module):
    """Something between autoencoder and blur; dropout and batch norm make its mode matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1), nn.Dropout(0.5))
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=draw) / 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def row_members(dtype: torch.dtype = torch.float64) -> dict[str, Detector]:
    """Detectors that look at one row at a time."""
    encoder, model = Squeezes().to(dtype), small(dtype)
    single = {
        "error": ErrorBased(encoder, 2.0),
        "divergence": DivergenceBased(encoder, model, 2.0),
        "region": RegionBased(model, 0.2, 20),
        "region-searched": RegionBased(model, m=5),
        "smoothing": SpatialSmoothing(model, 3, layout="nchw"),
        "strip": STRIP(model, 20),  # all benign rows of the laws: which ones are drawn does not matter
        "classifier": ActivationClassifier(model, "layers.2", PGD(steps=5), 0.3, hidden=16),
    }
    three = (single["error"], single["divergence"], single["smoothing"])
    return single | {
        "vote": Ensemble(three, "vote"), "all": Ensemble(three, "all"), "any": Ensemble(three, "any")
    }  # fmt: skip


def stepped_members(dtype: torch.dtype = torch.float64) -> dict[str, Detector]:
    """Those that look at one row at a time, and whose gradient is not the slope of their scores."""
    model = small(dtype)
    return {
        "drawn": STRIP(model, 4),
        "scan": SubsetScanning(model, "layers.2"),
        "scan-both": SubsetScanning(model, "layers.0", "higher-criticism", "both"),
    }


def members(dtype: torch.dtype = torch.float64) -> dict[str, Detector]:
    """All kinds."""
    stateful = {"similarity": Similarity(Squeezes().to(dtype), k=2, window=6)}
    return row_members(dtype) | stepped_members(dtype) | stateful


def parts(detector: Detector) -> list[nn.Module]:
    """The modules that it asks."""
    own = [getattr(detector, name, None) for name in ("autoencoder", "model", "encoder")]
    found = [part for part in own if isinstance(part, nn.Module)]
    for each in getattr(detector, "detectors", ()):
        found += parts(each)
    return found
