"""Samplers: who takes part in an update, and how that is accounted, in one frozen description.

A sampler draws (`draw`) and writes the ledger's events (`events`) from the same numbers, so the rate that is
accounted is the rate that was drawn. There is no other way to state q. Draws come from named streams of a
noise source and are secret: amplification by sampling holds for as long as nobody knows the draw.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mycelia.engine.errors import ConfigError
from mycelia.privacy.events import Event
from mycelia.privacy.groups import Group, Unit
from mycelia.privacy.schedules import NoiseSchedule

__all__ = [
    "Batch",
    "CyclicPoisson",
    "FixedSize",
    "FullBatch",
    "Ids",
    "MinSep",
    "Participation",
    "Poisson",
    "RandomSource",
    "Sampler",
    "ShuffledEpochs",
    "TruncatedPoisson",
    "Uniform",
    "from_loader",
    "groups_of",
]

Ids = int | Sequence[int] | NDArray[np.int64]
"""The examples (or clients) to draw from: their numbers, or how many there are."""

_ALIGN = 8  # static sizes are a multiple of it, so that small changes of the data keep the shape


class Uniform(Protocol):
    """A random stream; `numpy.random.Generator` is one."""

    def random(self, size: int) -> NDArray[np.float64]:
        """Uniform numbers in [0, 1), float64 [size]."""


class RandomSource(Protocol):
    """Random streams by name; a noise source is one."""

    def generator(self, purpose: str, step: int, tensor: str = "") -> Uniform:
        """The named stream, at its start."""


@dataclass(frozen=True)
class Batch:
    """One physical part of a logical batch, padded to a static size.

    Attributes:
        indices: int64 [size], the examples drawn; 0 where `mask` is false.
        mask: bool [size], true for real examples.
        step: number of the update that the part belongs to.
        part: number of the part within its update, from 0.
        last: whether the update is complete with this part, so that noise is added and the optimiser steps.
    """

    indices: NDArray[np.int64]
    mask: NDArray[np.bool_]
    step: int
    part: int
    last: bool

    def share(self, rank: int, ranks: int) -> Batch:
        """What one of several data-parallel processes takes of the part.

        All processes draw the same batch, so q is the rate of the whole, every process takes as many steps,
        and shares have one static size, whether or not they hold a real example.

        Args:
            rank: this process, in [0, ranks).
            ranks: how many there are, at least 1.

        Raises:
            ConfigError: the rank is out of range.
        """
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank {rank} of {ranks}", rule="a rank is in [0, ranks)", who="sampler")
        padding = -len(self.mask) % ranks
        indices = np.pad(self.indices, (0, padding))[rank::ranks]
        return replace(self, indices=indices, mask=np.pad(self.mask, (0, padding))[rank::ranks])


class Sampler(Protocol):
    """A frozen description that draws and accounts.

    Attributes:
        name: as the ledger calls it.
        relation: the neighbours it is accounted for unless told otherwise.
        relations: all that it can be accounted for.
        rate: probability q that an example takes part in an update.
    """

    name: ClassVar[str]
    relation: ClassVar[str]
    relations: ClassVar[tuple[str, ...]]

    @property
    def rate(self) -> float:
        """Probability q that an example takes part in an update."""

    def draw(self, ids: Ids, source: RandomSource, first_step: int = 0) -> Iterator[Batch]:
        """Batches from `first_step` on."""

    def events(
        self,
        z: float | NoiseSchedule,
        steps: int,
        *,
        first_step: int = 0,
        relation: str | None = None,
        unit: Unit = "example",
        max_examples: int = 1,
        clip: float | None = None,
        mechanism: str = "gaussian",
    ) -> list[Event]:
        """The events of `steps` updates."""


@dataclass(frozen=True)
class _Sampler(ABC):
    """What all samplers share: the event of an update and the parts of a batch."""

    name: ClassVar[str]
    relation: ClassVar[str]
    relations: ClassVar[tuple[str, ...]]

    def events(
        self,
        z: float | NoiseSchedule,
        steps: int,
        *,
        first_step: int = 0,
        relation: str | None = None,
        unit: Unit = "example",
        max_examples: int = 1,
        clip: float | None = None,
        mechanism: str = "gaussian",
    ) -> list[Event]:
        """The events of `steps` updates, equal neighbours as one.

        Args:
            z: noise multiplier, at least 0; or a schedule that gives each step's own.
            steps: updates to release, at least 0.
            first_step: number of the first of them.
            relation: neighbours to tell apart; the sampler's own by default.
            unit: "example", "user" or "client"; or a `Group`, where the sampler draws groups of examples.
            max_examples: most examples a user has, for the unit "user".
            clip: the bound C in force.
            mechanism: the noise, see `events.MECHANISMS`.

        Raises:
            ConfigError: the sampler has no bound for the relation, or a value is out of range.
        """
        if steps < 0:
            raise ConfigError(f"steps is {steps}", rule="at least 0", who="steps")
        if not steps:
            return []
        asked = self._neighbours(relation, unit)
        first = first_step + np.arange(steps)
        values = np.asarray(z(first) if callable(z) else [z], dtype=np.float64)
        starts = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1])
        ends = np.append(starts[1:], steps)
        base = Event(
            sampling=self.name,
            noise_multiplier=float(values[0]),
            relation=asked,
            unit="example" if isinstance(unit, Group) else unit,
            max_examples=max_examples,
            group=unit.size if isinstance(unit, Group) else 1,
            clip=clip,
            mechanism=mechanism,
            **self._numbers(),
        )
        return [
            replace(
                base, noise_multiplier=float(values[i]), step=first_step + int(i), count=int(end) - int(i)
            )
            for i, end in zip(starts, ends, strict=True)
        ]

    def _neighbours(self, relation: str | None, unit: Unit) -> str:
        """The relation that was asked for, or the sampler's own; one that leaves groups as they are."""
        grouped = isinstance(unit, Group)
        known = tuple(each for each in self.relations if not (grouped and each == "add-remove"))
        asked = relation
        if asked is None:
            asked = self.relation if self.relation in known or not known else known[-1]
        if asked not in known:
            raise ConfigError(
                f"{type(self).__name__} with the relation {asked!r}{f' and {unit}' if grouped else ''}",
                rule=f"it has a bound for {' and '.join(known) or 'single examples'}",
                fix="ask for that, or use FullBatch or Poisson, which have one for all three",
                who="relation",
            )
        return asked

    @abstractmethod
    def _numbers(self) -> dict[str, Any]:
        """The event's numbers that the sampler sets."""


@dataclass(frozen=True)
class Poisson(_Sampler):
    """Each example by its own coin, afresh in every update.

    The drawn number varies; batches are padded to a static size, and a larger draw comes in several parts.
    An empty draw is an update like any other: no signal, full noise, one event.

    Attributes:
        rate: q, in [0, 1]; kept exactly as asked.
        physical: examples in a part; None for one that nearly always holds the whole draw.
    """

    name: ClassVar[str] = "poisson"
    relation: ClassVar[str] = "add-remove"
    relations: ClassVar[tuple[str, ...]] = ("add-remove", "zero-out", "replace-one")

    rate: float
    physical: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_physical(self.physical)

    def draw(self, ids: Ids, source: RandomSource, first_step: int = 0) -> Iterator[Batch]:
        """Batches without end.

        Args:
            ids: the examples to draw from.
            source: where the coins come from.
            first_step: number of the first update; the draws of a step do not depend on it.
        """
        among = _numbered(ids)
        size = self.physical or _usual_size(len(among), self.rate)
        for step in count(first_step):
            coins = source.generator("sampling", step).random(len(among)) < self.rate
            yield from _parts(among[coins], size, step)

    def _numbers(self) -> dict[str, Any]:
        return {"sampling_rate": self.rate}


@dataclass(frozen=True)
class TruncatedPoisson(_Sampler):
    """A Poisson draw, cut to a random subset of at most `cap` examples.

    Attributes:
        rate: q, in [0, 1].
        population: number of examples, which becomes public.
        cap: most examples in an update, at least 1.
        physical: examples in a part; None for `cap`.
    """

    name: ClassVar[str] = "truncated-poisson"
    relation: ClassVar[str] = "add-remove"
    relations: ClassVar[tuple[str, ...]] = ("add-remove",)

    rate: float
    population: int
    cap: int
    physical: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_whole("population", self.population)
        _check_whole("cap", self.cap)
        _check_physical(self.physical)

    def draw(self, ids: Ids, source: RandomSource, first_step: int = 0) -> Iterator[Batch]:
        """Batches without end; see `Poisson.draw`.

        Raises:
            ConfigError: `ids` has another length than `population`.
        """
        among = _numbered(ids, self.population)
        for step in count(first_step):
            stream = source.generator("sampling", step)
            drawn = among[stream.random(len(among)) < self.rate]
            if len(drawn) > self.cap:
                drawn = drawn[np.sort(_some(stream, len(drawn), self.cap))]
            yield from _parts(drawn, self.physical or self.cap, step)

    def _numbers(self) -> dict[str, Any]:
        return {"sampling_rate": self.rate, "population": self.population, "size": self.cap}


@dataclass(frozen=True)
class FixedSize(_Sampler):
    """`size` examples, uniform without replacement, afresh in every update.

    Attributes:
        size: examples in an update, at least 1.
        population: number of examples, which becomes public; at least `size`.
        physical: examples in a part; None for `size`.
    """

    name: ClassVar[str] = "fixed"
    relation: ClassVar[str] = "replace-one"
    relations: ClassVar[tuple[str, ...]] = ("replace-one",)

    size: int
    population: int
    physical: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_part_of(self.size, self.population)
        _check_physical(self.physical)

    @property
    def rate(self) -> float:
        """Q = size / population."""
        return self.size / self.population

    def draw(self, ids: Ids, source: RandomSource, first_step: int = 0) -> Iterator[Batch]:
        """Batches without end; see `Poisson.draw`.

        Raises:
            ConfigError: `ids` has another length than `population`.
        """
        among = _numbered(ids, self.population)
        for step in count(first_step):
            chosen = _some(source.generator("sampling", step), len(among), self.size)
            yield from _parts(among[np.sort(chosen)], self.physical or self.size, step)

    def _numbers(self) -> dict[str, Any]:
        return {"sampling_rate": self.rate, "population": self.population, "size": self.size}


@dataclass(frozen=True)
class ShuffledEpochs(_Sampler):
    """A fresh permutation every epoch, cut into batches of `size`; what is left over waits for the next.

    It is not amplified: whoever knows the permutation knows when an example takes part. An example takes part
    at most once in an epoch, so T updates are ⌈T / ⌊population / size⌋⌉ composed releases.

    Attributes:
        size: examples in an update, at least 1.
        population: number of examples, at least `size`.
        physical: examples in a part; None for `size`.
    """

    name: ClassVar[str] = "shuffle"
    relation: ClassVar[str] = "zero-out"
    relations: ClassVar[tuple[str, ...]] = ("zero-out", "replace-one")

    size: int
    population: int
    physical: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_part_of(self.size, self.population)
        _check_physical(self.physical)

    @property
    def rate(self) -> float:
        """Q = size / population."""
        return self.size / self.population

    @property
    def epoch(self) -> int:
        """Updates in an epoch."""
        return self.population // self.size

    def draw(self, ids: Ids, source: RandomSource, first_step: int = 0) -> Iterator[Batch]:
        """Batches without end; see `Poisson.draw`.

        Raises:
            ConfigError: `ids` has another length than `population`.
        """
        among = _numbered(ids, self.population)
        order, at = np.empty(0, dtype=np.int64), -1
        for step in count(first_step):
            epoch, place = divmod(step, self.epoch)
            if epoch != at:
                at = epoch
                order = np.argsort(source.generator("shuffle", epoch).random(len(among)), kind="stable")
            chosen = order[place * self.size : (place + 1) * self.size]
            yield from _parts(among[chosen], self.physical or self.size, step)

    def _numbers(self) -> dict[str, Any]:
        return {
            "sampling_rate": self.rate,
            "population": self.population,
            "size": self.size,
            "period": self.epoch,
        }


@dataclass(frozen=True)
class CyclicPoisson(_Sampler):
    """Examples hashed to b groups; step t draws from group t mod b with probability q·b.

    Fits a banded factorisation with b bands (Choquette-Choo et al., "(Amplified) banded matrix
    factorization", NeurIPS 2023): an example's updates are b steps apart.

    Attributes:
        rate: q over all steps, in [0, 1 / bands].
        bands: b, at least 1.
        sensitivity: of a factorisation to one step of an example, in units of the clip bound; 0 without one.
        physical: examples in a part; None for one that nearly always holds the whole draw.
    """

    name: ClassVar[str] = "cyclic-poisson"
    relation: ClassVar[str] = "add-remove"
    relations: ClassVar[tuple[str, ...]] = ("add-remove", "zero-out")

    rate: float
    bands: int
    sensitivity: float = 0.0
    physical: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_whole("bands", self.bands)
        _check_physical(self.physical)
        if self.rate * self.bands > 1 + 1e-12:
            raise ConfigError(
                f"rate {self.rate} with {self.bands} bands",
                rule="a group is drawn from with probability rate × bands, at most 1",
                fix=f"use at most {int(1 / self.rate)} bands",
                who="CyclicPoisson",
            )

    def draw(self, ids: Ids, source: RandomSource, first_step: int = 0) -> Iterator[Batch]:
        """Batches without end; see `Poisson.draw`."""
        among = _numbered(ids)
        group = groups_of(among, self.bands)
        members = [among[group == index] for index in range(self.bands)]
        rate = min(1.0, self.rate * self.bands)
        size = self.physical or _usual_size(max(len(each) for each in members), rate)
        for step in count(first_step):
            active = members[step % self.bands]
            coins = source.generator("sampling", step).random(len(active)) < rate
            yield from _parts(active[coins], size, step)

    def _numbers(self) -> dict[str, Any]:
        return {"sampling_rate": self.rate, "period": self.bands, "sensitivity": float(self.sensitivity)}


@dataclass(frozen=True)
class MinSep(_Sampler):
    """Any order; each example at most `uses` times, at least `separation` steps apart.

    It is not amplified. With noise of its own in each update, an example is in at most `uses` of them. With a
    factorised noise matrix the whole run is one Gaussian release at `sensitivity`.

    Attributes:
        uses: k, at least 1.
        separation: b, at least 1.
        sensitivity: sens(C; k, b) of the factorisation, in units of the clip bound; 0 without one.
        physical: examples in a part; None for a whole block.
    """

    name: ClassVar[str] = "min-sep"
    relation: ClassVar[str] = "zero-out"
    relations: ClassVar[tuple[str, ...]] = ("zero-out", "replace-one")

    uses: int
    separation: int
    sensitivity: float = 0.0
    physical: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_whole("uses", self.uses)
        _check_whole("separation", self.separation)
        _check_physical(self.physical)

    @property
    def rate(self) -> float:
        """Largest share of the updates that an example can be in, 1 / separation."""
        return 1 / self.separation

    def draw(self, ids: Ids, source: RandomSource, first_step: int = 0) -> Iterator[Batch]:
        """Batches of `separation` blocks in turn, `uses` rounds of them; then it ends.

        Whoever gets examples in another order uses `participation` to keep to the limits.
        """
        among = _numbered(ids)
        order = np.argsort(source.generator("shuffle", 0).random(len(among)), kind="stable")
        blocks = np.array_split(among[order], self.separation)
        size = self.physical or max(1, len(blocks[0]))
        for step in range(first_step, self.uses * self.separation):
            yield from _parts(blocks[step % self.separation], size, step)

    def participation(self) -> Participation:
        """A record of who took part, which refuses whoever comes too often or too soon."""
        return Participation(self)

    def _numbers(self) -> dict[str, Any]:
        return {
            "sampling_rate": self.rate,
            "period": self.separation,
            "uses": self.uses,
            "sensitivity": float(self.sensitivity),
        }


class Participation:
    """Who took part when, under a `MinSep`.

    Its two tables are part of a checkpoint: forgetting them would let examples in too often.

    Attributes:
        sampler: the limits.
        last: the last step of each.
        used: how often each took part.
    """

    def __init__(self, sampler: MinSep) -> None:
        self.sampler = sampler
        self.last: dict[int, int] = {}
        self.used: dict[int, int] = {}

    def admit(self, ids: Sequence[int] | NDArray[np.int64], step: int) -> list[int]:
        """Those that may take part in `step`, each once; they are noted as having done so."""
        admitted = []
        for given in ids:
            who = int(given)
            if not self._bars(who, step):
                self.note(who, step)
                admitted.append(who)
        return admitted

    def barred(self, step: int) -> NDArray[np.int64]:
        """Those that may not take part in `step`, sorted."""
        return np.array(sorted(who for who in self.last if self._bars(who, step)), dtype=np.int64)

    def note(self, who: int, step: int) -> None:
        """Someone takes part in `step`."""
        self.last[who], self.used[who] = step, self.used.get(who, 0) + 1

    def _bars(self, who: int, step: int) -> bool:
        early = who in self.last and step < self.last[who] + self.sampler.separation
        return early or self.used.get(who, 0) >= self.sampler.uses


@dataclass(frozen=True)
class FullBatch(_Sampler):
    """All examples in every update.

    Attributes:
        physical: examples in a part; None for all.
    """

    name: ClassVar[str] = "full"
    relation: ClassVar[str] = "add-remove"
    relations: ClassVar[tuple[str, ...]] = ("add-remove", "zero-out", "replace-one")

    physical: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_physical(self.physical)

    @property
    def rate(self) -> float:
        """1."""
        return 1.0

    def draw(self, ids: Ids, source: RandomSource, first_step: int = 0) -> Iterator[Batch]:
        """Batches without end; nothing is drawn from `source`."""
        among = _numbered(ids)
        for step in count(first_step):
            yield from _parts(among, self.physical or max(1, len(among)), step)

    def _numbers(self) -> dict[str, Any]:
        return {"sampling_rate": self.rate}


def groups_of(ids: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    """The group of each id, int64 [n] in [0, groups), which does not depend on who else is there.

    Args:
        ids: [n], at least 0.
        groups: at least 1.
    """
    # SplitMix64's finaliser
    value = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((value ^ (value >> np.uint64(31))) % np.uint64(groups)).astype(np.int64)


def from_loader(loader: object) -> ShuffledEpochs:
    """The sampler that a `torch.utils.data.DataLoader` is, never a Poisson one.

    Shuffled and sequential loaders pass through the data once an epoch. A subclass counts as what it inherits
    from as long as it draws in the same way.

    Args:
        loader: the loader to read the batch size, the sampler and the number of examples from.

    Raises:
        ConfigError: the loader draws in another way: weighted, with replacement, iterable, distributed or
            unknown; the message names its sampler.

    >>> from torch.utils.data import DataLoader
    >>> from_loader(DataLoader(list(range(100)), batch_size=10, shuffle=True))
    ShuffledEpochs(size=10, population=100, physical=None)
    """
    from torch.utils import data

    if not isinstance(loader, data.DataLoader) or not _draws_as(loader, data.DataLoader):
        raise _unknown(loader, "it is no plain DataLoader")
    if isinstance(loader.dataset, data.IterableDataset):
        raise _unknown(loader.dataset, "its examples come in an order of its own")
    batches = loader.batch_sampler
    if not isinstance(batches, data.BatchSampler) or not _draws_as(batches, data.BatchSampler):
        raise _unknown(batches, "how it makes batches is not known")
    sampler = batches.sampler
    for known in (data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler):
        if isinstance(sampler, known) and _draws_as(sampler, known):
            break
    else:
        raise _unknown(sampler, "how it draws is not known")
    population = len(cast(Sized, loader.dataset))
    if isinstance(sampler, data.RandomSampler):
        if sampler.replacement:
            raise _unknown(sampler, "it draws with replacement, which has no bound here")
        if sampler.num_samples != population:
            raise _unknown(sampler, f"it draws {sampler.num_samples} of {population} examples an epoch")
    if isinstance(sampler, data.SubsetRandomSampler):
        population = len(set(sampler.indices))
        if population != len(sampler.indices):
            raise _unknown(sampler, "an example is in it more than once")
    return ShuffledEpochs(min(batches.batch_size, population), population)


def _draws_as(given: object, known: type) -> bool:
    return getattr(type(given), "__iter__", None) is getattr(known, "__iter__", None)


def _unknown(sampler: object, why: str) -> ConfigError:
    return ConfigError(
        f"{type(sampler).__name__} cannot be accounted: {why}",
        rule="every example is drawn by a rule that has a privacy bound",
        fix="use a shuffled DataLoader, or a sampler of mycelia.privacy.sampling such as Poisson(rate)",
        who="loader",
    )


def _parts(chosen: NDArray[np.int64], size: int, step: int) -> Iterator[Batch]:
    """The drawn examples in parts of `size`, at least one, the last one padded."""
    parts = max(1, -(-len(chosen) // size))
    for part in range(parts):
        real = chosen[part * size : (part + 1) * size]
        indices, mask = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.bool_)
        indices[: len(real)], mask[: len(real)] = real, True
        yield Batch(indices, mask, step, part, part == parts - 1)


def _usual_size(population: int, rate: float) -> int:
    """A static size that a Poisson draw exceeds about once in 30,000 times."""
    mean = population * rate
    size = math.ceil(mean + 4 * math.sqrt(mean * (1 - rate)))
    return max(1, min(population, _ALIGN * -(-size // _ALIGN)))


def _some(stream: Uniform, population: int, size: int) -> NDArray[np.intp]:
    """The places of a uniformly drawn subset."""
    if size >= population:
        return np.arange(population)
    return np.argpartition(stream.random(population), size)[:size]


def _numbered(ids: Ids, population: int | None = None) -> NDArray[np.int64]:
    among = np.arange(ids) if isinstance(ids, int) else np.asarray(ids)
    among = among.astype(np.int64)
    if population is not None and len(among) != population:
        raise ConfigError(
            f"{len(among)} examples for a sampler of {population}",
            rule="the accountant and the draw use the same public number of examples",
            fix="make the sampler with the number there is",
            who="sampler",
        )
    return among


def _check_rate(rate: float) -> None:
    if not 0 <= rate <= 1:
        raise ConfigError(
            f"the sampling rate is {rate}", rule="a probability, in [0, 1]", who="sampling rate"
        )


def _check_whole(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}", rule="at least 1", who=name)


def _check_physical(physical: int | None) -> None:
    if physical is not None:
        _check_whole("physical", physical)


def _check_part_of(size: int, population: int) -> None:
    _check_whole("size", size)
    if population < size:
        raise ConfigError(
            f"{size} of {population} examples",
            rule="a batch is no larger than the data",
            fix=f"use size={population} or less",
            who="size",
        )
