"""Whether inputs still look like those that a model was made for."""

from mycelia.attacks.drift.images import FittedImageDrift, ImageDrift
from mycelia.attacks.drift.ood import KNearest, Mahalanobis, OODDetector, calibrated, energy, max_softmax
from mycelia.attacks.drift.series import FittedSeriesDrift, SeriesDrift
from mycelia.attacks.drift.two_sample import TwoSample, ks_test, mmd_squared, mmd_test

__all__ = [
    "FittedImageDrift", "FittedSeriesDrift", "ImageDrift", "KNearest", "Mahalanobis", "OODDetector",
    "SeriesDrift", "TwoSample", "calibrated", "energy", "ks_test", "max_softmax", "mmd_squared", "mmd_test",
]  # fmt: skip
