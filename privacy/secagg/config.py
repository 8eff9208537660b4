"""The settings of a secure sum, as people write them, and the round they stand for.

All that can be wrong with settings is refused here, before a round begins: `CONFIG` for what contradicts
itself, `OVERFLOW` for a sum that could wrap, `WEAK_PARAMETERS` for too few neighbours.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypedDict

from pydantic import BeforeValidator, Field, ValidationError

from mycelia.engine.config import Strict, describe
from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.canonical import PHASES, Reason, SecureSumError
from mycelia.privacy.secagg.encoding import WEIGHT, Encoding, no_wrap
from mycelia.privacy.secagg.graph import auto, calculate
from mycelia.privacy.secagg.hadamard import padded
from mycelia.privacy.secagg.noise import NoiseShare
from mycelia.privacy.secagg.round_config import (
    MAX_COHORT,
    Graph,
    Mechanism,
    NoiseBlock,
    RoundConfig,
    Seal,
    Threat,
    ThresholdRule,
)

__all__ = ["DeadlinesConfig", "NoiseConfig", "SecureSumConfig", "SettingsRefused", "check_round"]

_MILLION: Final = 10**6
_COMPLETE: Final = 256
"""Up to so many clients all are neighbours by default."""
_BETA_PPB: Final = 606_530_660
"""exp(-1/2): the first draw of conditional rounding is kept with a probability of 0.39 or more."""

_MECHANISMS: Final = {"skellam": Mechanism.SKELLAM, "discrete-gaussian": Mechanism.DISCRETE_GAUSSIAN}
_THREATS: Final = {"passive": Threat.PASSIVE, "active": Threat.ACTIVE}


class _Rates(TypedDict):
    threat: int
    corrupt_ppm: int
    dropout_ppm: int


class SettingsRefused(SecureSumError, ConfigError):
    """Settings of a secure sum that no round can have; `reason` says of which kind they are."""

    @classmethod
    def of(cls, error: SecureSumError) -> Self:
        """The same refusal, told to whoever made the settings."""
        refused = cls.__new__(cls, *error.args)
        refused.__dict__.update(error.__dict__)
        return refused


def _or_auto(low: int, high: int) -> BeforeValidator:
    def check(value: Any) -> Any:
        if value == "auto" or (type(value) is int and low <= value <= high):
            return value
        raise ValueError(f'must be "auto" or a whole number from {low} to {high}')

    return BeforeValidator(check)


def _variance(value: Any) -> Any:
    if type(value) in (int, float) and 1 <= value < 2**63:
        return value
    raise ValueError("must be a number of at least 1, below 2**63")


class NoiseConfig(Strict):
    """Noise that clients add, each a share, so that the opened sum holds all of it."""

    mechanism: Literal["skellam", "discrete-gaussian"]
    variance: Annotated[int | float, BeforeValidator(_variance)]
    """Of each coordinate of the sum, in squared steps; rounded up to a whole number."""
    corrupt: Annotated[int, Field(ge=0, le=MAX_COHORT)]
    """Clients of a round that are assumed to add none."""


class DeadlinesConfig(Strict):
    """Seconds that each phase may take; the defaults are for a round of 600."""

    advertise: Annotated[float, Field(ge=0.001, le=4e6)] = 30.0
    share: Annotated[float, Field(ge=0.001, le=4e6)] = 30.0
    masked: Annotated[float, Field(ge=0.001, le=4e6)] = 500.0
    """Training and uploads too."""
    agree: Annotated[float, Field(ge=0.001, le=4e6)] = 20.0
    unmask: Annotated[float, Field(ge=0.001, le=4e6)] = 20.0


class SecureSumConfig(Strict):
    """How vectors are summed under masks.

    >>> try:
    ...     SecureSumConfig(threat="none")
    ... except SettingsRefused as error:
    ...     print(error.reason, error.exit_code)
    CONFIG 2

    Raises:
        SettingsRefused: `CONFIG`: unknown keys, values out of range, and settings that contradict each other.
    """

    neighbours: Annotated[int | Literal["auto"], _or_auto(2, MAX_COHORT - 1)] = "auto"
    """Clients that hold shares of one another; auto: all up to 256 clients, else the least that is safe."""
    threshold: Annotated[int | Literal["auto"], _or_auto(2, MAX_COHORT - 1)] = "auto"
    """Shares that rebuild a secret; auto: above two thirds of all others, or the least that is safe."""
    bits: Annotated[int | Literal["auto"], _or_auto(8, 64)] = "auto"
    """Of an element of the sum; auto: as few as cannot overflow."""
    frac_bits: Annotated[int, Field(ge=0, le=62)] = 16
    """A step is 2**-frac_bits."""
    value_bound: Annotated[int, Field(ge=1, le=2**62)] = 2**15
    """Steps to which each coordinate is clipped, in size."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """The L2 norm to which a vector is clipped; left out: not at all."""
    weight_max: Annotated[int, Field(ge=1, le=2**62)] = 1
    """The largest weight."""
    n_min: Annotated[int | Literal["auto"], _or_auto(3, MAX_COHORT)] = "auto"
    """The fewest clients whose sum is opened; auto: those that stay at the assumed dropout, at least 3."""
    n_max: Annotated[int, Field(ge=3, le=MAX_COHORT)] | None = None
    """The most clients; left out: as many as there are."""
    threat: Literal["passive", "active"] = "active"
    """The server that is guarded against: one that looks, or one that lies."""
    corrupt: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the clients assumed to collude with the server."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the clients assumed to vanish."""
    noise: NoiseConfig | None = None
    rotate: bool = False
    """Whether vectors are rotated at random, which evens out their coordinates before each is clipped."""
    deadlines: DeadlinesConfig | None = None

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise SettingsRefused(Reason.CONFIG, describe(type(self), error)) from None

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Settings that rule each other out, whatever the round."""
        if self.clip is not None and not 1 <= self.l2_steps < 2**63:
            yield "clip", f"is {self.l2_steps} steps of 2**-{self.frac_bits}; at least 1, below 2**63"
        if self.noise is not None and self.weight_max != 1:
            yield "weight_max", "must be 1: noise is made for one client, not for its weight"
        if isinstance(self.n_min, int):
            if self.n_max is not None and self.n_min > self.n_max:
                yield "n_min", f"must be at most n_max, {self.n_max}"
            if self.noise is not None and self.n_min <= self.noise.corrupt:
                yield "noise", f"{self.noise.corrupt} corrupt of n_min = {self.n_min} leave nobody to add it"
        if self.threshold != "auto" and self.neighbours != "auto" and self.threshold > self.neighbours:
            yield "threshold", f"must be at most neighbours, {self.neighbours}"

    @property
    def l2_steps(self) -> int:
        """The clip bound in whole steps, rounded down; 0 for none."""
        return 0 if self.clip is None else math.floor(Fraction(self.clip) * 2**self.frac_bits)

    def round_config(
        self,
        *,
        job: str,
        round: int,
        nonce: bytes,
        model_sha256: bytes,
        schema_sha256: bytes,
        task_sha256: bytes,
        roster_sha256: bytes,
        size: int,
        attempt: int = 0,
        clients: int | None = None,
        slots: Mapping[str, int] = MappingProxyType({}),
        seal: int = Seal.AES_GCM,
    ) -> RoundConfig:
        """One round under these settings.

        Args:
            job: the run's name.
            round: its number.
            nonce: 32 fresh bytes.
            model_sha256: of the model as sent.
            schema_sha256: of its layout.
            task_sha256: of the algorithm and its local settings.
            roster_sha256: of the roster.
            size: coordinates of a vector, before padding.
            attempt: of the round.
            clients: how many are asked; n_max when left out.
            slots: bounds of whole numbers beside the weight, by name.
            seal: see `Seal`.

        Raises:
            SettingsRefused: `CONFIG`: settings that contradict each other. `OVERFLOW`: too few bits, and how
                many it needs. `WEAK_PARAMETERS`: neighbours or threshold, and the least that pass.
        """
        try:
            config = self._round_config(
                size,
                clients,
                slots,
                job=job,
                round=round,
                attempt=attempt,
                nonce=nonce,
                model_sha256=model_sha256,
                schema_sha256=schema_sha256,
                task_sha256=task_sha256,
                roster_sha256=roster_sha256,
                seal=seal,
            )
            Encoding(config, size)
        except SecureSumError as error:
            raise SettingsRefused.of(error) from None
        return config

    def _round_config(
        self, size: int, clients: int | None, slots: Mapping[str, int], **named: Any
    ) -> RoundConfig:
        n_min, n_max = self._cohort(clients)
        rates = _Rates(
            threat=_THREATS[self.threat], corrupt_ppm=_ppm(self.corrupt), dropout_ppm=_ppm(self.dropout)
        )
        k, rule, t = self._neighbours(n_min, n_max, rates)
        thresholds = {n: _threshold(rule, min(k, n - 1), t) for n in (n_min, n_max)}
        _check_graph(thresholds, k, rates)
        if WEIGHT in slots or any(type(bound) is not int or bound < 1 for bound in slots.values()):
            raise _refused(
                f"slots {dict(slots)}", f"bounds are whole numbers from 1, and slot 0 is {WEIGHT!r}"
            )
        bounds = ((WEIGHT, self.weight_max), *slots.items())
        dimension = padded(size) if self.rotate and size > 0 else size
        noise, share = NoiseBlock(), None
        if self.noise is not None:
            if n_min <= self.noise.corrupt:
                raise _refused(
                    f"{self.noise.corrupt} corrupt of n_min = {n_min}", "some are left to add noise"
                )
            variance = math.ceil(self.noise.variance)
            noise = NoiseBlock(_MECHANISMS[self.noise.mechanism], variance, self.noise.corrupt, _BETA_PPB)
            share = NoiseShare(_MECHANISMS[self.noise.mechanism], variance, n_min - self.noise.corrupt)
        proof = no_wrap(n_max, self.value_bound, [bound for _, bound in bounds], share, dimension)
        bits = max(8, proof.needed_bits) if self.bits == "auto" else self.bits
        proof.check(min(bits, 64))
        seconds = self.deadlines or DeadlinesConfig()
        return RoundConfig(
            n_min=n_min,
            n_max=n_max,
            graph=Graph.COMPLETE if k == n_max - 1 else Graph.RING,
            k=k,
            threshold_rule=rule,
            t=t,
            bits=bits,
            dimension=dimension,
            slots=bounds,
            frac_bits=self.frac_bits,
            value_bound=self.value_bound,
            l2_steps=self.l2_steps,
            rotation=int(self.rotate),
            noise=noise,
            deadlines_ms=tuple(round(1000 * getattr(seconds, phase)) for phase in PHASES),
            **rates,
            **named,
        )

    def _cohort(self, clients: int | None) -> tuple[int, int]:
        """n_min and n_max."""
        n_max = clients if self.n_max is None else self.n_max
        if n_max is None:
            raise _refused("neither n_max nor clients", "the largest cohort is known")
        asked = n_max if clients is None else clients
        if not 3 <= asked <= n_max <= MAX_COHORT:
            raise _refused(f"{asked} clients", f"from 3 to n_max = {min(n_max, MAX_COHORT)}")
        if isinstance(self.n_min, int):
            n_min = self.n_min
        else:
            n_min = max(3, -((_ppm(self.dropout) - _MILLION) * asked // _MILLION))
        if n_min > asked:
            raise _refused(f"{asked} clients", f"at least n_min = {n_min}")
        return n_min, n_max

    def _neighbours(self, n_min: int, n_max: int, rates: _Rates) -> tuple[int, ThresholdRule, int]:
        """k, the threshold rule and t; what is left to this is safe, or else nothing is."""
        sizes, last = (n_min, n_max), n_max - 1
        if self.neighbours != "auto":
            k = min(self.neighbours, last)
        else:
            k = last if n_max <= _COMPLETE else auto(sizes, **rates)[0]
        if self.threshold != "auto":
            return k, ThresholdRule.FIXED, self.threshold
        rule = ThresholdRule.TWO_THIRDS
        if k == last and all(calculate(n, n - 1, _threshold(rule, n - 1), **rates).safe for n in sizes):
            return k, rule, _threshold(rule, k)
        if self.neighbours == "auto":
            k, t = auto(sizes, **rates)
            return k, ThresholdRule.FIXED, t
        return k, ThresholdRule.FIXED, _least_threshold(k, sizes, rates)


def check_round(config: RoundConfig, size: int, *, corrupt_ppm: int = 0, recovery: bool = True) -> Encoding:
    """Prove again what a round's configuration promises: nothing wraps, and the neighbours are enough.

    Args:
        config: of the round.
        size: coordinates of a vector, before padding.
        corrupt_ppm: share of corrupt clients that must be survived, if more than the round assumes.
        recovery: also ask whether enough neighbours are left to rebuild, which is the server's concern.

    Returns:
        the round's encoding.

    Raises:
        SecureSumError: `CONFIG`, `OVERFLOW` or `WEAK_PARAMETERS`.
    """
    encoding = Encoding(config, size)
    if max(corrupt_ppm, config.corrupt_ppm, config.dropout_ppm) >= _MILLION:
        raise _refused("all clients corrupt, or all of them vanishing", "both rates are below 1")
    _check_graph(
        {n: config.threshold(n) for n in (config.n_min, config.n_max)},
        config.k,
        _Rates(
            threat=config.threat,
            corrupt_ppm=max(corrupt_ppm, config.corrupt_ppm),
            dropout_ppm=config.dropout_ppm,
        ),
        recovery=recovery,
    )
    return encoding


def _check_graph(thresholds: Mapping[int, int], k: int, rates: _Rates, *, recovery: bool = True) -> None:
    """Refuse neighbours that are too few at any of the sizes; thresholds by size."""
    for n, t in thresholds.items():
        found = calculate(n, k, t, recovery=recovery, **rates)
        if not found.safe:
            least_k, least_t = auto(thresholds, **rates)
            raise SecureSumError(
                Reason.WEAK_PARAMETERS,
                f"{found.k} neighbours and a threshold of {t} are too weak among {n} clients",
                rule="; ".join(found.faults),
                fix=f"the least that pass are neighbours = {least_k}, threshold = {least_t}",
                who="configuration",
                asked=f"k = {found.k}, t = {t}",
                allowed=f"k = {least_k}, t = {least_t}",
            )


def _threshold(rule: ThresholdRule, k: int, t: int = 0) -> int:
    return 2 * k // 3 + 1 if rule is ThresholdRule.TWO_THIRDS else t


def _least_threshold(k: int, sizes: tuple[int, ...], rates: _Rates) -> int:
    """The least t that is safe with k neighbours; the largest there is if none is."""

    def safe(t: int) -> bool:
        return all(calculate(n, k, t, recovery=False, **rates).safe for n in sizes)

    candidates = range(2, min(k, *(n - 1 for n in sizes)))
    return 2 + bisect_left(candidates, True, key=safe)


def _ppm(rate: float) -> int:
    """Parts per million, rounded up: 0.1 is what it says, not its binary neighbour."""
    return min(_MILLION - 1, math.ceil(Decimal(repr(rate)) * _MILLION))


def _refused(found: str, rule: str) -> SecureSumError:
    return SecureSumError(Reason.CONFIG, found, rule=rule, who="configuration")
