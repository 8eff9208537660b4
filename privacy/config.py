"""The `[privacy]` block: its presence makes a run private, and nothing in it fails open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mycelia.engine.config import Named, Strict
from mycelia.engine.errors import ConfigError
from mycelia.privacy import clip as clips
from mycelia.privacy import factorisation as factorisations
from mycelia.privacy.clip import ClipFunction, PerLayer, QuantileClip
from mycelia.privacy.factorisation import Strategy
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.discrete_gaussian import DiscreteGaussian
from mycelia.privacy.noise.gaussian import Gaussian

__all__ = ["CommonPrivacy", "ParticipationConfig", "PrivacyConfig"]


class ParticipationConfig(Strict):
    """How often a client takes part, where ε depends on that and not on a secret draw."""

    separation: Annotated[int, Field(ge=0)] = 0
    """Least number of rounds from one of its rounds to the next; 0: chosen for the population."""
    uses: Annotated[int, Field(ge=0)] = 0
    """Most rounds that it takes part in; 0: as many as there are."""


class CommonPrivacy(Strict):
    """A budget, and how it is kept: what training in one place and federations have in common."""

    epsilon: Annotated[float, Field(gt=0)]
    """The most that may be spent."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """δ of the budget, well below one over the number of those protected."""
    clip: Named
    """The clip function and its bound, e.g. { name = "abadi", bound = 1.0 }."""
    noise_multiplier: Annotated[float, Field(gt=0)] | None = None
    """z, relative to the clip bound; left out: the least that the budget allows over all planned updates."""
    factorisation: Named | None = None
    """Noise that is correlated over the updates (DP-FTRL), e.g. { name = "blt", buffers = 4 }."""
    mechanism: Literal["gaussian", "discrete-gaussian", "skellam"] | None = None
    """The noise; left out: gaussian with a seeded source, discrete-gaussian, the safe mode, with the
    system's. Shares of clients are whole numbers: discrete-gaussian, the default there, or skellam."""
    noise_source: Literal["seeded", "os"] = "seeded"
    """Seeded noise is reproducible and not for release."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Names and options that are unknown, and settings that rule each other out."""
        for key, build in (("clip", self.clip_function), ("factorisation", self.strategy)):
            try:
                build()
            except ConfigError as error:
                yield key, "; ".join(filter(None, (error.found, error.rule, error.fix)))
                return
        if self.factorisation is not None and isinstance(self.clip_function(), QuantileClip):
            yield "clip", "correlated noise has one size for the whole run; use a fixed bound such as abadi"

        if self.mechanism == "skellam" and not self.in_shares:
            yield "mechanism", "skellam noise is added in shares of clients; use gaussian"

    @property
    def in_shares(self) -> bool:
        """Whether clients add the noise, each a share of what the sum has to hold."""
        return False

    def clip_function(self) -> ClipFunction | PerLayer | QuantileClip:
        """The clip function.

        Raises:
            ConfigError: it is unknown, or an option is.
        """
        return clips.build(self.clip.name, **self.clip.options)

    def strategy(self) -> Strategy | None:
        """The factorisation, not yet fitted; None without one.

        Raises:
            ConfigError: it is unknown, or an option is.
        """
        if self.factorisation is None:
            return None
        return factorisations.build(self.factorisation.name, **self.factorisation.options)

    def noise(self) -> Mechanism:
        """The mechanism; correlated noise is rounded to the grid, and not drawn on it."""
        chosen = self.mechanism or ("discrete-gaussian" if self.noise_source == "os" else "gaussian")
        if chosen == "gaussian":
            return Gaussian()
        return DiscreteGaussian(sampler="exact" if self.factorisation is None else "rounded")


class PrivacyConfig(CommonPrivacy):
    """The `[privacy]` block of a federation."""

    unavailable: ClassVar[frozenset[str]] = frozenset({"sampler", "schedule", "physical"})

    unit: Literal["example", "client"]
    """Whom ε protects."""
    model: Literal["central", "local", "distributed"] = "central"
    """Who adds the noise that protects a client: the server to the sum, each client to what it sends, or each
    client a share of what the opened sum of a secure sum has to hold."""
    participation: ParticipationConfig = ParticipationConfig()
    """Limits on the rounds of a client, for correlated noise and for budgets that each client has."""
    weight_max: Annotated[float, Field(gt=0)] | None = None
    """Unit "client", with noise of the server: a client counts by its number of examples up to this, and the
    noise is as much larger; left out: every client counts 1."""
    public_sizes: bool = False
    """Whether everybody may know how many examples each client has, which `weight_max` needs."""
    sampling_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """Unit "example" in a federation: share of its examples that a client draws in a step, public and the
    same for all; left out: local.batch_size over the mean number of examples of a client."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Settings that rule each other out."""
        found = list(super().conflicts())
        yield from found
        if found:
            return
        if self.model != "central" and self.unit != "client":
            yield "model", f'{self.model} noise protects clients; set unit = "client"'
        if self.model == "distributed":
            if self.mechanism == "gaussian":
                yield "mechanism", "distributed noise is of whole numbers; use discrete-gaussian or skellam"
            if self.factorisation is not None:
                yield "factorisation", "the server adds correlated noise; leave it out with distributed noise"
            if isinstance(self.clip_function(), QuantileClip):
                yield "clip", "a quantile needs noise of the server; use a fixed bound with distributed noise"
        if self.model == "local" and self.factorisation is not None:
            yield "factorisation", "the server adds correlated noise; leave it out with local noise"
        if self.model == "local" and isinstance(self.clip_function(), QuantileClip):
            yield "clip", "a quantile needs noise of the server; use a fixed bound with local noise"
        if self.weight_max is not None and (self.unit != "client" or self.model != "central"):
            yield "weight_max", "clients count by weights only where they are the unit and the server noises"
        elif self.weight_max is not None and not self.public_sizes:
            yield (
                "weight_max",
                "a weight is a client's number of examples, which is private; say public_sizes = true if "
                "everybody may know it, or leave weight_max out",
            )
        if self.public_sizes and self.weight_max is None:
            yield (
                "public_sizes",
                "numbers of examples are there to weigh clients; set weight_max, or leave it out",
            )
        if self.sampling_rate is not None and self.unit != "example":
            yield "sampling_rate", "a client draws examples only where they are the unit; leave it out"

    @property
    def in_shares(self) -> bool:
        """Whether clients add the noise, each a share of what the sum has to hold."""
        return self.model == "distributed"
