"""Selectors: which clients a round asks, drawn from a named stream over sorted ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from inspect import isclass, signature
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
from pydantic import Field

from mycelia.engine.config import Strict, load_config
from mycelia.engine.errors import ConfigError
from mycelia.engine.plugins import chosen, resolve
from mycelia.engine.rng import generator
from mycelia.privacy.sampling import groups_of

__all__ = [
    "SELECTORS",
    "Availability",
    "Available",
    "CyclicPoisson",
    "Ids",
    "Poisson",
    "Selector",
    "Uniform",
    "Weighted",
    "build",
    "checked_ids",
]

Ids = np.ndarray[Any, Any] | range
"""Sorted client ids; a range stands for the ids 0..N-1 of a large population without holding them."""
Available = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
"""For an array of ids, which of them can be reached now."""

_PURPOSE = "select"
_BLOCK = 1 << 16


class Selector(Protocol):
    """Draws a round's clients; frozen, and without state of its own."""

    @property
    def fixed_size(self) -> bool:
        """Whether a round gets the number asked for, so that more can be asked and failures replaced."""
        ...

    def select(
        self,
        ids: Ids,
        k: int,
        *,
        round: int,
        seed: int,
        weights: np.ndarray[Any, Any] | None = None,
        available: Available | None = None,
    ) -> np.ndarray[Any, Any]:
        """Up to `k` distinct ids in the order of the draw; the same for the same (ids, k, round, seed).

        Args:
            ids: [N] sorted and distinct.
            k: how many to draw, 1 or more; fewer come back when there are fewer to choose from, and the round
                then decides by its quorum.
            round: the round's number.
            seed: the root seed.
            weights: [N] non-negative, usually the clients' numbers of examples.
            available: says which clients can be reached; None: all.
        """
        ...


class _Selector(Strict):
    fixed_size: ClassVar[bool] = True


class Uniform(_Selector):
    """Every set of k clients is equally likely; O(k) memory when k is far below N."""

    def select(
        self,
        ids: Ids,
        k: int,
        *,
        round: int,
        seed: int,
        weights: np.ndarray[Any, Any] | None = None,
        available: Available | None = None,
    ) -> np.ndarray[Any, Any]:
        """See `Selector.select`."""
        return _take(
            ids, generator(seed, _PURPOSE, round=round).choice(len(ids), min(k, len(ids)), replace=False)
        )


class Weighted(_Selector):
    """Drawn one after the other without replacement, in proportion to size or to given weights.

    The k smallest of Exp(1)/w (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006). A
    client of weight 0 is never drawn.
    """

    weights: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """One for each client in the order of ids; none: by number of examples."""

    def select(
        self,
        ids: Ids,
        k: int,
        *,
        round: int,
        seed: int,
        weights: np.ndarray[Any, Any] | None = None,
        available: Available | None = None,
    ) -> np.ndarray[Any, Any]:
        """See `Selector.select`."""
        given = np.asarray(self.weights, dtype=np.float64) if self.weights else weights
        if given is None:
            raise ConfigError(
                "no weights are known", rule="weighted draws by size or by `weights`", who="selector"
            )
        if given.shape != (len(ids),):
            raise ConfigError(
                f"{given.size} weights for {len(ids)} clients", rule="one each", who="selector.weights"
            )
        race = generator(seed, _PURPOSE, round=round).standard_exponential(len(ids))
        positive = given > 0
        np.divide(race, given, out=race, where=positive)
        race[~positive] = np.inf
        k = min(k, int(positive.sum()))
        first = np.argpartition(race, k - 1)[:k] if 0 < k < len(ids) else np.arange(len(ids))
        return _take(ids, first[np.argsort(race[first], kind="stable")][:k])


class Poisson(_Selector):
    """Each client tosses its own coin of probability k/N, so that the size varies and may be 0."""

    fixed_size: ClassVar[bool] = False

    def select(
        self,
        ids: Ids,
        k: int,
        *,
        round: int,
        seed: int,
        weights: np.ndarray[Any, Any] | None = None,
        available: Available | None = None,
    ) -> np.ndarray[Any, Any]:
        """See `Selector.select`; k is the expected number, and the draw is in the order of ids."""
        n = len(ids)
        if k > n:
            raise ConfigError(f"{k} expected of {n} clients", rule="the rate is at most 1", who="cohort")
        coins = generator(seed, _PURPOSE, round=round)
        blocks = (
            start + np.flatnonzero(coins.random(min(_BLOCK, n - start)) * n < k) for start in _starts(n)
        )
        return _take(ids, np.concatenate([np.empty(0, dtype=np.int64), *blocks]))


class CyclicPoisson(_Selector):
    """A coin for each client of one group, the groups taking turns; the coin's probability is groups x k/N.

    Clients are in the group that their id hashes to, so a client comes back after `groups` rounds at the
    soonest, which correlated noise of as many bands is made for (Choquette-Choo et al., "(Amplified) banded
    matrix factorization", NeurIPS 2023). `mycelia.privacy.sampling.CyclicPoisson` accounts for it.
    """

    fixed_size: ClassVar[bool] = False

    groups: Annotated[int, Field(ge=1)]

    def select(
        self,
        ids: Ids,
        k: int,
        *,
        round: int,
        seed: int,
        weights: np.ndarray[Any, Any] | None = None,
        available: Available | None = None,
    ) -> np.ndarray[Any, Any]:
        """See `Selector.select`; k is the expected number over all rounds, as groups differ in size."""
        n, k = len(ids), k * self.groups
        if k > n:
            raise ConfigError(
                f"{k // self.groups} expected of {n} clients in {self.groups} groups",
                rule="the rate in a group, cohort times groups over the clients, is at most 1",
                fix="lower selector.groups or the cohort",
                who="cohort",
            )
        coins = generator(seed, _PURPOSE, round=round)
        found = [np.empty(0, dtype=np.int64)]
        for start in _starts(n):
            places = np.arange(start, min(start + _BLOCK, n))
            active = groups_of(_numbered(_take(ids, places)), self.groups) == round % self.groups
            found.append(places[active & (coins.random(len(places)) * n < k)])
        return _take(ids, np.concatenate(found))


class Availability(_Selector):
    """Uniform over the clients that can be reached now."""

    def select(
        self,
        ids: Ids,
        k: int,
        *,
        round: int,
        seed: int,
        weights: np.ndarray[Any, Any] | None = None,
        available: Available | None = None,
    ) -> np.ndarray[Any, Any]:
        """See `Selector.select`."""
        if available is None:
            reachable: Ids = ids
        else:
            blocks = [_take(ids, np.arange(at, min(at + _BLOCK, len(ids)))) for at in _starts(len(ids))]
            reachable = np.concatenate(
                [_take(ids, np.empty(0, dtype=np.int64)), *(b[available(b)] for b in blocks)]
            )
        return Uniform().select(reachable, k, round=round, seed=seed)


SELECTORS: Mapping[str, type[_Selector]] = MappingProxyType(
    {
        "availability": Availability,
        "cyclic-poisson": CyclicPoisson,
        "poisson": Poisson,
        "uniform": Uniform,
        "weighted": Weighted,
    }
)


def build(name: str, **options: Any) -> Selector:
    """The selector of that name, or a user's own by `package.module:name`.

    A user's own is a class that takes the options and has the members of `Selector`, or a function with the
    arguments of `Selector.select` and the options.

    Raises:
        ConfigError: unknown name or option, or a value out of range.
    """
    if ":" in name:
        return _user_made(name, options)
    kind: Any = chosen(SELECTORS, name, kind="selector", who="selector")
    return load_config(kind, options)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Function:
    """A user's function in the place of `select`."""

    function: Callable[..., np.ndarray[Any, Any]]
    options: Mapping[str, Any]
    fixed_size: ClassVar[bool] = True

    def select(self, ids: Ids, k: int, **known: Any) -> np.ndarray[Any, Any]:
        return self.function(ids, k, **known, **self.options)


def _user_made(name: str, options: Mapping[str, Any]) -> Selector:
    found = resolve(name, kind="selector")
    selector: Any
    try:
        if isclass(found):
            selector = found(**options)
        else:
            known = dict.fromkeys(("round", "seed", "weights", "available"))
            signature(found).bind((), 1, **known, **options)
            selector = _Function(found, options)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", rule="see Selector.select for its arguments") from error
    if not callable(getattr(selector, "select", None)) or not hasattr(selector, "fixed_size"):
        raise ConfigError(f"{name} gives {selector!r}", rule="a selector has select and fixed_size")
    return selector  # type: ignore[no-any-return]


def _numbered(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Names as numbers that depend on nothing else."""
    if ids.dtype.kind in "iu":
        return ids
    digests = (blake2b(str(name).encode(), digest_size=8).digest() for name in ids)
    return np.array([int.from_bytes(digest, "little") >> 1 for digest in digests], dtype=np.int64)


def _starts(n: int) -> Iterable[int]:
    return range(0, n, _BLOCK)


def _take(ids: Ids, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if isinstance(ids, range):
        numbers: np.ndarray[Any, Any] = ids.start + ids.step * positions.astype(np.int64, copy=False)
        return numbers
    taken: np.ndarray[Any, Any] = ids[positions]
    return taken


def checked_ids(drawn: Any, clients: int, most: int | None) -> list[int]:
    """A selector's answer as ids.

    Args:
        drawn: what it returned.
        clients: ids are below that.
        most: how many it may draw; None: any number.

    Raises:
        ConfigError: it is something else than distinct ids.
    """
    found = np.asarray(drawn)
    if found.size == 0 and found.ndim == 1:
        return []
    wrong = ""
    if found.ndim != 1 or found.dtype.kind not in "iu":
        wrong = f"an array of {found.dtype} with {found.ndim} axes"
    elif found.min() < 0 or found.max() >= clients:
        wrong = f"the id {int(found.min()) if found.min() < 0 else int(found.max())}"
    elif len(np.unique(found)) < len(found):
        wrong = "an id twice"
    elif most is not None and len(found) > most:
        wrong = f"{len(found)} ids"
    if wrong:
        rule = f"distinct integer ids in [0, {clients})" + (f", at most {most}" if most is not None else "")
        raise ConfigError(f"the selector returned {wrong}", rule=rule, who="selector")
    return [int(client) for client in found]
