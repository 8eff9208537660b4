"""Releases counted by mechanism, and what each mechanism is: the events of a ledger become a composition.

In dp-accounting the privacy loss distribution of a Gaussian takes replace-one neighbours as twice the
sensitivity, its Rényi accountant does not. So this module, and no other, applies the factor of the relation:
Gaussian and fixed-size parts enter with z / 2, and only a Poisson-sampled part keeps z and its own relation.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mycelia.engine.errors import ConfigError
from mycelia.privacy.composition import Composition, Mechanism
from mycelia.privacy.events import Event

__all__ = ["Tally"]

Array = NDArray[np.float64]

_Key = tuple[object, ...]


class Tally:
    """Counts what was released, by mechanism and noise multiplier.

    A sampler with a period uses an example at most once in it. Its steps are cut into blocks of that length,
    each of which counts once, with the smallest noise in it, as long as the steps go on without a gap. Steps
    that are done again begin anew: the example may sit in the rest of both passes.
    """

    def __init__(self) -> None:
        self.first: Event | None = None
        self.steps = 0
        self.rates: set[float] = set()
        self.samplings: set[str] = set()
        self.least, self.most = math.inf, -math.inf
        self._plain: dict[Mechanism, dict[float, float]] = {}
        self._arrays: dict[Mechanism, list[tuple[Array, Array]]] = {}
        self._passes: dict[tuple[_Key, str], _Pass] = {}
        self._mechanisms: dict[_Key, tuple[Mechanism | None, float]] = {}
        self._participations = 0

    def add(self, event: Event, steps: int | Array) -> None:
        """Add `steps` updates like `event`; an array has the noise multiplier of each."""
        if self.first is None:
            self.first = event
        self._check_alike(self.first, event)
        length = steps if isinstance(steps, int) else len(steps)
        self.steps += length
        low, high = (
            (event.noise_multiplier, event.noise_multiplier)
            if isinstance(steps, int)
            else (float(steps.min()), float(steps.max()))
        )
        if not low >= 0:
            raise ConfigError(f"a noise multiplier is {low}", rule="at least 0", who="noise schedule")
        self.least, self.most = min(self.least, low), max(self.most, high)
        self.rates.add(event.sampling_rate)
        self.samplings.add(event.sampling)
        key: _Key = (
            *(event.sampling, event.sampling_rate, event.mechanism, event.size, event.population),
            *(event.period, event.uses, event.sensitivity, event.group, event.orders, event.values),
        )
        if key not in self._mechanisms:
            self._mechanisms[key] = _mechanism(event)
        mechanism, factor = self._mechanisms[key]
        if event.period > 1 or event.uses:
            found = self._passes.get((key, event.origin))
            if found is None or found.end != event.step:
                self._close(key, event.origin)
                found = self._passes[key, event.origin] = _Pass(event, mechanism, factor)
            found.add(event.step, steps, event.noise_multiplier)
            return
        self._participations += length
        if mechanism is None:
            return
        if isinstance(steps, int):
            counts = self._plain.setdefault(mechanism, {})
            z = event.noise_multiplier / factor
            counts[z] = counts.get(z, 0.0) + steps
        else:
            self._arrays.setdefault(mechanism, []).append((steps / factor, np.ones(length)))

    def composition(self) -> Composition:
        """All that was added, composed."""
        return self._finished()[0]

    def participations(self) -> int:
        """Most updates that one example can be part of."""
        return self._finished()[1]

    def _finished(self) -> tuple[Composition, int]:
        for key, origin in list(self._passes):
            self._close(key, origin)
        parts = {mechanism: list(arrays) for mechanism, arrays in self._arrays.items()}
        for mechanism, counts in self._plain.items():
            pair = (np.array(list(counts)), np.array(list(counts.values())))
            parts.setdefault(mechanism, []).append(pair)
        whole = {
            mechanism: (np.concatenate([zs for zs, _ in each]), np.concatenate([n for _, n in each]))
            for mechanism, each in parts.items()
        }
        return Composition(whole), self._participations

    def _close(self, key: _Key, origin: str) -> None:
        done = self._passes.pop((key, origin), None)
        if done is None:
            return
        self._participations += done.participations
        if done.mechanism is not None:
            zs, counts = done.releases()
            self._arrays.setdefault(done.mechanism, []).append((zs / done.factor, counts))

    @staticmethod
    def _check_alike(first: Event, event: Event) -> None:
        for name in ("relation", "unit", "max_examples", "group"):
            if getattr(first, name) != getattr(event, name):
                raise ConfigError(
                    f"{name} is {getattr(first, name)!r} and {getattr(event, name)!r}",
                    rule=f"one figure is about one {name}",
                    fix="make two statements",
                    who="ledger",
                )


class _Pass:
    """Consecutive steps of a sampler with a period."""

    def __init__(self, event: Event, mechanism: Mechanism | None, factor: float) -> None:
        self.mechanism, self.factor = mechanism, factor
        self.end = event.step
        self._event = event
        self._blocks: list[int] = []  # number of the first block of each entry
        self._zs: list[Array] = []
        self._counts: list[Array] = []
        self._open = -1  # the last block

    def add(self, start: int, steps: int | Array, z: float) -> None:
        """Add the steps that follow."""
        period = self._event.period
        length = steps if isinstance(steps, int) else len(steps)
        first, last = start // period, (start + length - 1) // period
        if isinstance(steps, int):
            zs, counts = np.array([z]), np.array([float(last - first + 1)])
        else:
            edges = np.arange(first, last + 1) * period - start
            zs, counts = np.minimum.reduceat(steps, np.maximum(edges, 0)), np.ones(last - first + 1)
        if first == self._open:  # the block goes on: it counts once, with the smaller noise
            self._split_last()
            self._zs[-1][0] = min(self._zs[-1][0], zs[0])
            counts[0] -= 1
            if not counts[0]:
                zs, counts = zs[1:], counts[1:]
        if len(zs):
            self._zs.append(zs)
            self._counts.append(counts)
        self._open, self.end = last, start + length

    def _split_last(self) -> None:
        """Make the last entry the last block alone."""
        zs, counts = self._zs[-1], self._counts[-1]
        if len(zs) == 1 and counts[0] == 1:
            return
        self._counts[-1] = counts.copy()
        self._counts[-1][-1] -= 1
        self._zs.append(zs[-1:].copy())
        self._counts.append(np.ones(1))

    @property
    def participations(self) -> int:
        """Blocks, or the limit of uses."""
        blocks = int(sum(float(each.sum()) for each in self._counts))
        return min(blocks, self._event.uses) if self._event.uses else blocks

    def releases(self) -> tuple[Array, Array]:
        """Noise multipliers and how often each, at worst."""
        zs, counts = np.concatenate(self._zs), np.concatenate(self._counts)
        zs, counts = zs[counts > 0], counts[counts > 0]
        if self._event.sensitivity and self._event.uses:  # one release of the whole matrix
            return np.array([zs.min() / self._event.sensitivity]), np.ones(1)
        if self._event.uses:
            order = np.argsort(zs)
            before = np.concatenate([[0.0], np.cumsum(counts[order])[:-1]])
            left = np.clip(self._event.uses - before, 0.0, counts[order])
            zs, counts = zs[order][left > 0], left[left > 0]
        return zs, counts


def _mechanism(event: Event) -> tuple[Mechanism | None, float]:
    """The mechanism of one update, None for one without anybody in it, and what z is divided by."""
    q, k, reach = event.sampling_rate, event.max_examples, event.reach
    if event.mechanism == "curve":
        _refuse_users(event)
        return Mechanism("curve", orders=event.orders, values=event.values), 1.0
    if event.mechanism == "laplace":
        _refuse_users(event)
        if reach != 1:
            raise _no_bound(event, 'the relation "add-remove" or "zero-out", without groups')
        return (Mechanism("laplace", q) if q else None), 1.0
    match event.sampling:
        case "full" | "shuffle" | "min-sep":
            # A user's examples may all sit in one update, and without a secret draw nothing else is better.
            return Mechanism("gaussian"), reach * k
        case "poisson" | "cyclic-poisson":
            rate, moved = min(1.0, q * event.period), event.sensitivity or 1.0
            if not rate:
                return None, 1.0
            if rate == 1:
                return Mechanism("gaussian"), reach * k * moved
            if k > 1:
                if event.sampling != "poisson" or event.relation == "replace-one":
                    raise _no_bound(event, 'Poisson sampling with the relation "add-remove" or "zero-out"')
                return Mechanism("mixture", rate, size=k), 1.0
            # A group that is drawn has one clipped mean or any other, as an example that was replaced.
            return Mechanism("replace-poisson" if reach == 2 else "poisson", rate), moved
        case "truncated-poisson":
            _refuse_users(event)
            kind = Mechanism("truncated", q, size=event.size, population=event.population)
            return (kind if q else None), 1.0
    _refuse_users(event)
    if event.size == event.population:
        return Mechanism("gaussian"), reach
    rate = event.size / event.population
    return Mechanism("fixed", rate, size=event.size, population=event.population), reach


def _refuse_users(event: Event) -> None:
    if event.max_examples > 1:
        raise _no_bound(event, "Poisson sampling, or a sampler without amplification")


def _no_bound(event: Event, fix: str) -> ConfigError:
    return ConfigError(
        f"no bound for {event.mechanism} noise with sampling {event.sampling!r}, relation {event.relation!r} "
        f"and {event.max_examples} examples per {event.unit}",
        rule="an ε is an upper bound or is not printed",
        fix=f"use {fix}",
        who="accountant",
    )
