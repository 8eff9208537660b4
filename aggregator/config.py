"""The settings that `simulate` and `serve` share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mycelia.aggregator.deadlines import MIN_BUDGET_S
from mycelia.aggregator.wire.settings import LocalConfig, UpdateConfig
from mycelia.engine.config import Named, Strict
from mycelia.engine.errors import ConfigError
from mycelia.privacy.config import ParticipationConfig, PrivacyConfig
from mycelia.privacy.secagg.config import SecureSumConfig

__all__ = [
    "EvaluationConfig",
    "FederationConfig",
    "LocalConfig",
    "RoundConfig",
    "SecureSumBlock",
    "UpdateConfig",
]

Text = Annotated[str, Field(min_length=1)]


class RoundConfig(Strict):
    """The budget of a round and what happens to clients that fail or are slow."""

    budget_s: Annotated[float, Field(ge=MIN_BUDGET_S)] = 600.0
    """Seconds from selection to evaluation; `aggregator/deadlines.py` derives every inner deadline."""
    over_select: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Asks cohort × over_select clients, rounded up, and closes with the first `cohort` updates."""
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the cohort, rounded up, below which the round fails."""
    on_failure: Literal["drop", "retry", "replace", "abort"] = "drop"
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Times a client is asked (retry), or clients asked in turn for one place (replace)."""
    stragglers: Literal["discard", "next_round", "buffered"] = "discard"
    """What becomes of an update that the round did not wait for."""
    max_failed_rounds: Annotated[int, Field(ge=1)] = 3
    """Failed rounds in a row after which the run stops."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """What is planned but not built."""
        if self.stragglers == "buffered":
            yield "stragglers", "'buffered' is not available in this version; use discard or next_round"


class EvaluationConfig(Strict):
    """When and how the global model is measured."""

    every: Annotated[int, Field(ge=0)] = 1
    """Rounds between evaluations; 0: only after the last."""
    clients: Annotated[int, Field(ge=0)] = 200
    """Clients measured one by one, for the spread between them; 0: none."""
    examples_per_client: Annotated[int, Field(ge=1)] = 200
    """Most test examples for one of them."""


class SecureSumBlock(SecureSumConfig):
    """The `[secure_sum]` block: its presence sums updates as whole numbers, under masks.

    How few and how many clients there are follows from the round's quorum and the cohort, and noise from the
    `[privacy]` block.
    """

    weight_max: Annotated[int, Field(ge=0, le=2**62)] = 0
    """The largest weight; 0: `update.max_weight`, or the largest client's number of examples."""
    masks: bool = True
    """Without masks the sum has the same integers, and hides nothing."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """What other settings decide."""
        yield from super().conflicts()
        if self.n_min != "auto":
            yield "n_min", "follows from round.quorum and cohort; leave it out"
        if self.n_max is not None:
            yield "n_max", "follows from cohort and round.over_select; leave it out"
        if self.noise is not None:
            yield "noise", 'comes from [privacy] with model = "distributed"; leave it out'


class FederationConfig(Strict):
    """A federation, apart from who its clients are."""

    unavailable: ClassVar[frozenset[str]] = frozenset({"defence", "adversary"})

    model: Named
    data: Named
    algorithm: Named = Named(name="fedavg")
    selector: Named = Named(name="uniform")
    loss: Text = "auto"
    """A name of `engine/losses.py`; auto: cross-entropy, or mse where there are no classes."""
    rounds: Annotated[int, Field(ge=1)] = 20
    cohort: Annotated[int, Field(ge=1)] = 10
    """Clients per round; the expected number under Poisson."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    plan: Literal["default", "tune", "eager", "interpreter", "inductor"] = "default"
    """How local steps run; see `engine/transforms/compile.py`."""
    local: LocalConfig = LocalConfig()
    round: RoundConfig = RoundConfig()
    update: UpdateConfig = UpdateConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    privacy: PrivacyConfig | None = None
    """Its presence makes the run private."""
    secure_sum: SecureSumBlock | None = None
    """Its presence hides each update in the sum."""

    def loss_for(self, classes: int | None) -> str:
        """The loss by name, `auto` resolved for the data."""
        if self.loss != "auto":
            return self.loss
        return "mse" if classes is None else "cross-entropy"

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Selector options, and settings that a Poisson draw rules out."""
        from mycelia.aggregator import selectors

        try:
            selector = selectors.build(self.selector.name, **self.selector.options)
        except ConfigError as error:
            yield "selector", "; ".join(filter(None, (error.found, error.rule, error.fix)))
            return
        if self.privacy is not None:
            yield from self._private_conflicts()
        if self.secure_sum is not None:
            yield from self._secure_conflicts(self.secure_sum, selector.fixed_size)
        elif self.privacy is not None and self.privacy.model == "distributed":
            yield "privacy.model", "distributed noise is opened in a secure sum alone; add [secure_sum]"
        if not selector.fixed_size:
            if self.round.over_select != 1:
                yield "round.over_select", f"must be 1: the selector {self.selector.name} fixes the rate"
            if self.round.on_failure == "replace":
                yield "round.on_failure", f"the selector {self.selector.name} draws no replacements; use drop"
            if self.round.stragglers == "next_round":
                yield (
                    "round.stragglers",
                    f"the selector {self.selector.name} admits no other clients; use discard",
                )

    @property
    def secret_draw(self) -> bool:
        """Whether ε rests on a secret draw of each cohort: a selector with a bound for the noise it has."""
        privacy = self.privacy
        if privacy is None or privacy.unit != "client" or privacy.model == "local":
            return False
        if self.selector.name == "cyclic-poisson":
            return True
        return privacy.factorisation is None and self.selector.name in {"poisson", "uniform"}

    def _secure_conflicts(self, block: SecureSumBlock, fixed_size: bool) -> Iterable[tuple[str, str]]:
        if not fixed_size:
            yield (
                "selector",
                f"{self.selector.name} draws a cohort of no fixed size, and a secure sum has a fixed least "
                "number of survivors; use uniform",
            )
        if self.round.on_failure in ("retry", "replace"):
            yield "round.on_failure", "a cohort shares its keys before it trains; use drop or abort"
        if self.round.stragglers == "next_round":
            yield "round.stragglers", "a masked update is worth nothing in another round; use discard"
        given = self.update.max_weight
        if block.weight_max and given and block.weight_max != given:
            yield "secure_sum.weight_max", f"contradicts update.max_weight, {given:g}; leave one of them out"
        privacy = self.privacy
        if privacy is None:
            return
        if block.weight_max > 1:
            yield "secure_sum.weight_max", "must be 0 or 1: in a private run every client has weight 1"
        if privacy.unit == "client" and privacy.model != "distributed":
            yield "privacy.model", "under a secure sum each client adds a share of the noise; use distributed"
        if privacy.model == "distributed":
            if privacy.weight_max is not None:
                yield "privacy.weight_max", "must be left out: a share of noise is made for weight 1"
            if block.clip is not None:
                yield "secure_sum.clip", "comes from privacy.clip; leave it out"
            if self.selector.name != "uniform":
                yield (
                    "selector",
                    "must be uniform: the noise in the sum tells how many clients there were, so that their "
                    "number has to be fixed",
                )

    def _private_conflicts(self) -> Iterable[tuple[str, str]]:
        privacy = self.privacy
        if privacy is None:
            return
        if privacy.weight_max is not None and self.update.max_weight not in {0.0, privacy.weight_max}:
            yield "update.max_weight", "contradicts privacy.weight_max; leave it out"
        elif privacy.weight_max is None and self.update.max_weight not in {0.0, 1.0}:
            yield "update.max_weight", "must be 0 or 1: every client has weight 1"
        if self.secret_draw:
            yield from self._drawn_conflicts(privacy)
        elif privacy.unit == "client" and privacy.model == "central":
            yield from self._correlated_conflicts(privacy)
        else:
            if self.selector.name == "weighted":
                yield "selector", "must not be weighted: how many examples a client has is private"
            if privacy.unit == "example" and privacy.factorisation is not None:
                yield "privacy.factorisation", 'correlated noise protects clients; set unit = "client"'
            if privacy.clip.name == "quantile":
                yield "privacy.clip", "a client clips to a fixed bound; use abadi or auto-s"
        if privacy.unit == "client":
            if privacy.clip.name == "per-layer":
                yield "privacy.clip", "a client's update is clipped as a whole; use abadi or auto-s"
            if self.round.stragglers == "next_round":
                yield "round.stragglers", "must be discard: a client has one update a round"

    def _drawn_conflicts(self, privacy: PrivacyConfig) -> Iterable[tuple[str, str]]:
        if self.round.over_select != 1:
            yield "round.over_select", "must be 1: the cohort is the sampler of the privacy bound"
        if self.round.on_failure == "replace":
            yield "round.on_failure", "must not be replace: the cohort is the sampler of the privacy bound"
        if privacy.participation != ParticipationConfig():
            yield (
                "privacy.participation",
                f"the selector {self.selector.name} draws anybody in any round; leave it out, or name a "
                "factorisation",
            )

    def _correlated_conflicts(self, privacy: PrivacyConfig) -> Iterable[tuple[str, str]]:
        if self.selector.name == "poisson":
            yield (
                "selector",
                "must not be poisson with a factorisation; use uniform or availability, or cyclic-poisson "
                "with banded",
            )
        if self.selector.options.get("weights"):
            yield "selector.weights", "cannot follow clients that come and go; leave it out to weigh by size"
        if privacy.factorisation is None:  # what it implies where the selector alone asks for it
            other = f"the selector {self.selector.name} needs correlated noise"
            if privacy.clip.name == "quantile":
                yield "privacy.clip", f"{other}, which has one size for the whole run; use a fixed bound"
