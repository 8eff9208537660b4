"""Whether a mutant still shows what its seed shows, as far as pixels can tell."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mycelia.attacks.windows import Layout
from mycelia.engine.errors import ConfigError

__all__ = ["Validity"]


@dataclass(frozen=True)
class Validity:
    """Few pixels changed by anything, or all of them by little.

    The rule of Xie et al.: "DeepHunter", ISSTA 2019. A mutant is compared with its seed; after a
    geometric mutator, which moves every pixel, with what that one gave.

    Attributes:
        share: of the pixels; up to so many may change by any amount. In [0, 1].
        size: of a change of one value, in units of the inputs; where more pixels changed, none by more.
    """

    share: float = 0.02
    size: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not self.size >= 0:
            raise ConfigError(
                f"share {self.share}, size {self.size}",
                rule="a share in [0, 1], a size of at least 0",
                who="Validity",
            )

    def __call__(self, mutants: Tensor, reference: Tensor, layout: Layout | None = None) -> Tensor:
        """Which mutants are valid, bool [n].

        Args:
            mutants: [n, …].
            reference: what each is compared with, [n, …].
            layout: of images: all channels of a pixel count as one. None: each value is a pixel.
        """
        change = (mutants.double() - reference.double()).abs()
        changed = change > 0
        if layout is not None:
            changed = changed.any(1 if layout == "nchw" else -1)
        few = changed.flatten(1).double().mean(1) <= self.share
        return few | (change.flatten(1).amax(1) <= self.size)
