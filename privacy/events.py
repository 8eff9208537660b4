"""What the ledger records and the accountant composes: one release of noised data, or a run of equal ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mycelia.engine.errors import ConfigError, DataError

__all__ = ["MECHANISMS", "RELATIONS", "SAMPLINGS", "UNITS", "Event", "choose"]

RELATIONS = ("add-remove", "replace-one", "zero-out")
UNITS = ("example", "user", "client")
SAMPLINGS = ("poisson", "truncated-poisson", "fixed", "shuffle", "cyclic-poisson", "min-sep", "full")
MECHANISMS = ("gaussian", "discrete-gaussian", "laplace", "curve")
_PLAIN = ("full", "poisson")  # what Laplace noise may be sampled by


@dataclass(frozen=True, slots=True)
class Event:
    """`count` updates in a row that were released with the same numbers.

    Attributes:
        sampling: how the examples of an update were chosen, one of `SAMPLINGS`.
        sampling_rate: probability q, in [0, 1], that an example takes part in an update.
        noise_multiplier: z = σ/C, the noise's standard deviation (Laplace: its scale) over the clip bound,
            at least 0. It is relative to C whatever the relation.
        relation: which neighbours are told apart, one of `RELATIONS`.
        unit: whom the statement protects, one of `UNITS`.
        max_examples: most examples that one user has; 1 unless the unit is "user".
        group: examples whose mean was clipped as one, see `groups.Group`; 1 where each was clipped by itself.
        count: how many updates, at least 1.
        step: number of the first of them, from 0.
        kind: "update", or "selection" for the best of several runs.
        mechanism: one of `MECHANISMS`; "curve" is known by `orders` and `values` alone.
        clip: the bound C in force; None when it is not known.
        size: examples in an update, where the sampler fixes it or caps it; else 0.
        population: public number of examples, where the sampler needs it; else 0.
        period: steps in which an example takes part at most once ("shuffle", "cyclic-poisson", "min-sep").
        uses: most steps that an example takes part in ("min-sep"); 0 for no limit.
        sensitivity: of a factorisation, in units of C: what one example's steps together move the released
            matrix by ("min-sep"), or one of its steps alone ("cyclic-poisson"); 0 where every step has its
            own noise.
        orders: Rényi orders of a curve, above 1.
        values: Rényi divergence at each order, for one update.
        origin: the ledger that the event was merged from; empty for the ledger's own.
    """

    sampling: str
    sampling_rate: float
    noise_multiplier: float
    relation: str
    unit: str = "example"
    max_examples: int = 1
    group: int = 1
    count: int = 1
    step: int = 0
    kind: str = "update"
    mechanism: str = "gaussian"
    clip: float | None = None
    size: int = 0
    population: int = 0
    period: int = 1
    uses: int = 0
    sensitivity: float = 0.0
    orders: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    origin: str = ""

    def __post_init__(self) -> None:
        choose("sampling", self.sampling, SAMPLINGS)
        choose("relation", self.relation, RELATIONS)
        choose("unit", self.unit, UNITS)
        choose("mechanism", self.mechanism, MECHANISMS)
        choose("kind", self.kind, ("update", "selection"))
        _check("sampling_rate", self.sampling_rate, 0 <= self.sampling_rate <= 1, "in [0, 1]")
        z = self.noise_multiplier
        _check("noise_multiplier", z, 0 <= z < math.inf, "at least 0 and finite")
        whole = (
            *(self.count, self.step, self.max_examples, self.group),
            *(self.period, self.uses, self.size, self.population),
        )
        _check("a count", whole, all(isinstance(value, int) for value in whole), "a whole number")
        _check("count", self.count, self.count >= 1, "at least 1")
        _check("step", self.step, self.step >= 0, "at least 0")
        _check("period", self.period, self.period >= 1, "at least 1")
        _check("sensitivity", self.sensitivity, 0 <= self.sensitivity < math.inf, "at least 0 and finite")
        _check("max_examples", self.max_examples, self.max_examples >= 1, "at least 1")
        if self.unit != "user" and self.max_examples != 1:
            raise ConfigError(
                f"max_examples is {self.max_examples} with the unit {self.unit!r}",
                rule="only a user has several examples",
                fix='say unit="user"',
                who="max_examples",
            )
        _check("group", self.group, self.group >= 1, "at least 1")
        if self.group > 1 and (self.unit != "example" or self.relation == "add-remove"):
            raise ConfigError(
                f"groups of {self.group} with the unit {self.unit!r} and the relation {self.relation!r}",
                rule="a group holds examples, and stays as it is beside the one that is replaced or left out",
                fix='say unit="example", and "replace-one" or "zero-out"',
                who="group",
            )
        if (self.mechanism == "curve") != bool(self.orders) or len(self.orders) != len(self.values):
            raise ConfigError(
                f"{len(self.orders)} orders and {len(self.values)} values for {self.mechanism!r}",
                rule="a curve, and nothing else, has orders and a value for each",
                who="event",
            )
        if self.orders:
            fine = all(order > 1 for order in self.orders) and all(value >= 0 for value in self.values)
            _check("the curve", self.orders, fine, "of orders above 1 and values of at least 0")
        if self.mechanism == "laplace" and self.sampling not in _PLAIN:
            raise ConfigError(
                f"Laplace noise with sampling {self.sampling!r}",
                rule=f"Laplace noise is accounted with {' or '.join(_PLAIN)}",
                who="mechanism",
            )

    @property
    def reach(self) -> float:
        """How far one example can move a sum, in clip bounds.

        2 where it is replaced by another, or where it turns the clipped mean of its group into any other: a
        group's mean does the same in both cases. Else 1.
        """
        return 2.0 if self.relation == "replace-one" or self.group > 1 else 1.0

    @property
    def participations(self) -> int:
        """Most updates that one example can be part of, were it drawn whenever it may."""
        times = -(-self.count // self.period)
        return min(times, self.uses) if self.uses else times

    def continues(self, other: Event) -> bool:
        """Whether this event goes on where `other` ends, with the same numbers."""
        if self.step != other.step + other.count:
            return False
        return all(
            getattr(self, name) == getattr(other, name) for name in _NAMES if name not in ("step", "count")
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON can hold them, without those at their default."""
        return {
            item.name: value
            for item in fields(self)
            if (value := getattr(self, item.name)) != item.default or item.name in _ALWAYS
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Event:
        """The event that `to_json` wrote.

        Raises:
            DataError: a field is unknown, missing or of the wrong kind.
            ConfigError: a value is out of range.
        """
        try:
            given = dict(values)
            for name in ("orders", "values"):
                given[name] = tuple(float(value) for value in given.get(name, ()))
            return cls(**given)
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise DataError(f"a ledger event is malformed ({error})", who="ledger") from error


_NAMES = tuple(item.name for item in fields(Event))
_ALWAYS = frozenset({"sampling", "sampling_rate", "noise_multiplier", "relation", "count", "step"})


def choose(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """The value, when it is one of those allowed.

    Raises:
        ConfigError: it is not; the message lists those that are.
    """
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}", rule=f"one of {', '.join(allowed)}", who=name)
    return value


def _check(name: str, value: object, fine: bool, rule: str) -> None:
    if not fine:
        raise ConfigError(f"{name} is {value}", rule=f"it is {rule}", who=name)
