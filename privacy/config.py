"""The `[privacy]` block: its presence makes a run private, and nothing in it fails open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mycelia.engine.config import Named, Strict
from mycelia.engine.errors import ConfigError
from mycelia.privacy import clip as clips
from mycelia.privacy.clip import ClipFunction
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.discrete_gaussian import DiscreteGaussian
from mycelia.privacy.noise.gaussian import Gaussian

__all__ = ["PrivacyConfig"]


class PrivacyConfig(Strict):
    """A budget, and how it is kept."""

    unavailable: ClassVar[frozenset[str]] = frozenset({"sampler", "schedule", "physical"})

    unit: Literal["example", "client"]
    """Whom ε protects."""
    epsilon: Annotated[float, Field(gt=0)]
    """The most that may be spent."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """δ of the budget, well below one over the number of those protected."""
    clip: Named
    """The clip function and its bound, e.g. { name = "abadi", bound = 1.0 }."""
    noise_multiplier: Annotated[float, Field(gt=0)] | None = None
    """z, relative to the clip bound; left out: the smallest that the budget allows over all rounds."""
    mechanism: Literal["gaussian", "discrete-gaussian"] | None = None
    """The noise; left out: gaussian with a seeded source, discrete-gaussian with the system's."""
    noise_source: Literal["seeded", "os"] = "seeded"
    """Seeded noise is reproducible and not for release."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """A clip function that is unknown, or that this unit cannot have."""
        try:
            self.clip_function()
        except ConfigError as error:
            yield "clip", "; ".join(filter(None, (error.found, error.rule, error.fix)))

    def clip_function(self) -> ClipFunction:
        """The clip function.

        Raises:
            ConfigError: it is unknown, or needs more than a norm.
        """
        found = clips.build(self.clip.name, **self.clip.options)
        if not isinstance(found, ClipFunction):
            raise ConfigError(
                f"the clip function {self.clip.name}",
                rule="a [privacy] block has one fixed bound in this version",
                fix="use abadi, auto-s, psac or indicator",
                who="clip",
            )
        return found

    def noise(self) -> Mechanism:
        """The mechanism."""
        chosen = self.mechanism or ("discrete-gaussian" if self.noise_source == "os" else "gaussian")
        return DiscreteGaussian() if chosen == "discrete-gaussian" else Gaussian()
