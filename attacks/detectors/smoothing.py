"""A detector that asks a model about an image and about the image without its finest detail.

Xu, Evans, Qi: "Feature squeezing: detecting adversarial examples in deep neural networks", NDSS 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mycelia.attacks.detectors.base import Detector, logits
from mycelia.attacks.filters import median_filter
from mycelia.attacks.model import as_model
from mycelia.attacks.windows import Layout, check_layout
from mycelia.engine.errors import ConfigError

__all__ = ["SpatialSmoothing"]


@dataclass(frozen=True, eq=False)
class SpatialSmoothing(Detector):
    """The l1 distance between the probabilities of an image and of its median filtered self; at most 2.

    Attributes:
        model: gives scores; see `as_model`.
        k: width of the filter in pixels, at least 1.
        layout: of images, "nchw" or "nhwc"; nothing is guessed.
    """

    model: object
    k: int = 3
    layout: Layout = field(kw_only=True)

    def check(self) -> None:
        """See `Detector.check`."""
        check_layout(self.layout, "SpatialSmoothing.layout")
        if self.k < 1:
            raise ConfigError(f"k is {self.k}", rule="at least 1 pixel", who="SpatialSmoothing.k")

    @property
    def parts(self) -> tuple[object, ...]:
        """See `Detector.parts`."""
        return (as_model(self.model),)

    def traced(self, x: Tensor) -> Tensor:
        """See `Detector.traced`."""
        smooth = median_filter(x, self.k, self.layout)
        seen, again = (logits(self.model, each, "SpatialSmoothing") for each in (x, smooth))
        return (seen.double().softmax(1) - again.double().softmax(1)).abs().sum(1)
