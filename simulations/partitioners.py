"""Partitioners: rules that deal the training examples out to clients.

Each is a pure function of (sorted ids, labels, seed): the examples go to clients 0..clients-1, and nothing
but the named streams of the seed decides how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import isclass, signature
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import Field

from mycelia.engine.config import Strict, load_config
from mycelia.engine.data.examples import Examples
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.plugins import chosen, resolve
from mycelia.engine.rng import derive, generator
from mycelia.simulations.draws import Indices, apportion, fill, pools_by_label

__all__ = ["PARTITIONERS", "Dealing", "Natural", "Partitioner", "build", "is_classes", "require"]

Array = np.ndarray[Any, Any]

_PURPOSE = "partition"
_ATTEMPTS = 100


class Dealing(NamedTuple):
    """Who gets what."""

    owners: Array
    """[N] client of each example, -1 where nobody gets it."""
    names: Array | None = None
    """[clients] what the data calls them."""
    noise: Array | None = None
    """[clients] standard deviation of the noise on each client's inputs."""


class Partitioner(Protocol):
    """Deals examples to clients."""

    def deal(self, examples: Examples, clients: int, *, seed: int, per_client: int) -> Dealing | Array:
        """Who gets what: every example goes to at most one client, and no client goes without.

        Args:
            examples: the training set.
            clients: how many there are.
            seed: the root seed.
            per_client: examples that each client will keep; what is dealt beyond them is put aside. 0: all.
        """
        ...


class _Partitioner(Strict):
    draw: ClassVar[str] = ""
    """How a client draws examples of its own (`draws.DRAWS`), where clients may overlap."""


class Iid(_Partitioner):
    """Shuffled and cut into equal parts."""

    draw: ClassVar[str] = "iid"

    def deal(self, examples: Examples, clients: int, *, seed: int, per_client: int) -> Dealing:
        """See `Partitioner.deal`."""
        order = generator(seed, _PURPOSE).permutation(len(examples))
        return Dealing(_cut(order, _even(len(examples), clients)))


class Contiguous(_Partitioner):
    """In file order: client i gets examples i·n to (i+1)·n - 1."""

    def deal(self, examples: Examples, clients: int, *, seed: int, per_client: int) -> Dealing:
        """See `Partitioner.deal`."""
        sizes = np.full(clients, per_client) if per_client else _even(len(examples), clients)
        return Dealing(_cut(np.arange(len(examples)), sizes))


class Dirichlet(_Partitioner):
    """Label skew: each class is divided in proportions drawn from Dir(alpha) over the clients.

    Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML 2019. With a number
    of examples per client, it is each client's class proportions that are drawn, from Dir(alpha) over the
    classes, and classes that run out are made up from the others (Hsu et al., "Measuring the effects of
    non-identical data distribution for federated visual classification", 2019).
    """

    draw: ClassVar[str] = "dirichlet"

    alpha: Annotated[float, Field(gt=0)] = 0.5
    """Small: one class each; large: IID."""
    min_size: Annotated[int, Field(ge=1)] = 1
    """Fewest examples of a client; drawn again until it holds, 100 times at most."""

    def deal(self, examples: Examples, clients: int, *, seed: int, per_client: int) -> Dealing:
        """See `Partitioner.deal`."""
        pools = pools_by_label(_labels(examples, "dirichlet"))
        require(len(examples), clients, max(self.min_size, per_client))
        if per_client:
            return Dealing(self._client_by_client(pools, len(examples), clients, seed, per_client))
        fewest, who = -1, 0
        for attempt in range(_ATTEMPTS):
            rng = generator(seed, _PURPOSE, round=attempt)
            shares = rng.dirichlet(np.full(clients, self.alpha), size=len(pools))
            # Where each class is cut; the rounded cumulative shares deal out every example.
            lengths = np.array([len(pool) for pool in pools])
            cuts = np.rint(np.cumsum(shares, axis=1) * lengths[:, None]).astype(np.int64)
            cuts[:, -1] = lengths
            counts = np.diff(cuts, axis=1, prepend=0)
            sizes = counts.sum(axis=0)
            if sizes.min() >= self.min_size:
                owners = np.empty(len(examples), dtype=np.int64)
                for pool, count in zip(pools, counts, strict=True):
                    owners[rng.permutation(pool)] = np.repeat(np.arange(clients), count)
                return Dealing(owners)
            if sizes.min() > fewest:
                fewest, who = int(sizes.min()), int(sizes.argmin())
        raise DataError(
            f"client {who} has {fewest} examples in the best of {_ATTEMPTS} draws, alpha = {self.alpha:g}",
            rule=f"each of {clients} clients has {self.min_size} or more (min_size)",
            fix="raise alpha, or lower min_size or population.clients",
            who="partition dirichlet",
        )

    def _client_by_client(
        self, pools: list[Indices], n: int, clients: int, seed: int, per_client: int
    ) -> Indices:
        rng = generator(seed, _PURPOSE)
        pools = [rng.permutation(pool) for pool in pools]
        left = np.array([len(pool) for pool in pools], dtype=np.int64)
        present = left > 0
        owners = np.full(n, -1, dtype=np.int64)
        for client in range(clients):
            shares = np.zeros(len(pools))
            shares[present] = rng.dirichlet(np.full(int(present.sum()), self.alpha))
            counts = fill(rng, shares, per_client, left)
            for label in np.flatnonzero(counts):
                owners[pools[label][left[label] - counts[label] : left[label]]] = client
            left -= counts
        return owners


class Shards(_Partitioner):
    """Sorted by label and cut into shards, of which each client gets `per_client` at random.

    McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.
    """

    per_client: Annotated[int, Field(ge=1)] = 2

    def deal(self, examples: Examples, clients: int, *, seed: int, per_client: int) -> Dealing:
        """See `Partitioner.deal`."""
        shards = clients * self.per_client
        require(len(examples), clients, self.per_client, "examples for its shards")
        shard = _cut(np.argsort(_labels(examples, "shards"), kind="stable"), _even(len(examples), shards))
        client = np.empty(shards, dtype=np.int64)
        client[generator(seed, _PURPOSE).permutation(shards)] = np.repeat(np.arange(clients), self.per_client)
        return Dealing(client[shard])


class Quantity(_Partitioner):
    """Sizes are uneven, labels are not: shuffled and cut by a power law or log-normal sizes."""

    law: Literal["power", "lognormal"] = "lognormal"
    exponent: Annotated[float, Field(ge=0)] = 1.0
    """Power: the client of rank r gets r^-exponent, ranks at random."""
    sigma: Annotated[float, Field(ge=0)] = 1.0
    """Log-normal: standard deviation of the natural logarithm of the size."""
    min_size: Annotated[int, Field(ge=1)] = 1

    def deal(self, examples: Examples, clients: int, *, seed: int, per_client: int) -> Dealing:
        """See `Partitioner.deal`; `per_client` does not apply."""
        if per_client:
            raise ConfigError(
                f"examples_per_client is {per_client}", rule="quantity makes sizes uneven: use 0"
            )
        require(len(examples), clients, self.min_size)
        rng = generator(seed, _PURPOSE)
        if self.law == "power":
            weights = (1.0 + rng.permutation(clients)) ** -self.exponent
        else:
            weights = rng.lognormal(0.0, self.sigma, clients)
        sizes = self.min_size + apportion(weights, len(examples) - clients * self.min_size)
        return Dealing(_cut(rng.permutation(len(examples)), sizes))


class Noise(_Partitioner):
    """Feature skew: dealt as IID, but the inputs of client i of n carry Gaussian noise of level·(i+1)/n.

    Li et al., "Federated learning on non-IID data silos: an experimental study", ICDE 2022.
    """

    level: Annotated[float, Field(ge=0)] = 0.1
    """Standard deviation for the last client, in the unit of the inputs."""

    def deal(self, examples: Examples, clients: int, *, seed: int, per_client: int) -> Dealing:
        """See `Partitioner.deal`."""
        if examples.inputs.dtype.kind != "f":
            raise DataError(f"inputs are {examples.inputs.dtype}", rule="noise needs floating-point inputs")
        owners = Iid().deal(examples, clients, seed=seed, per_client=per_client).owners
        return Dealing(owners, noise=self.level * np.arange(1, clients + 1) / clients)


class Natural(_Partitioner):
    """By the client column of the data; with fewer clients than it has, they are drawn at random."""

    def deal(self, examples: Examples, clients: int, *, seed: int, per_client: int) -> Dealing:
        """See `Partitioner.deal`."""
        if examples.clients is None:
            raise DataError("the data has no client column", fix="name one, or choose another partition")
        names, owners = np.unique(examples.clients, return_inverse=True)
        if clients > len(names):
            raise DataError(
                f"the data has {len(names)} clients, not {clients}", fix="lower population.clients"
            )
        kept = np.sort(generator(seed, _PURPOSE).choice(len(names), clients, replace=False))
        number = np.full(len(names), -1, dtype=np.int64)
        number[kept] = np.arange(clients)
        return Dealing(number[owners], names=names[kept])


class Cluster(_Partitioner):
    """Groups of like clients: the examples are clustered, and a client gets some of one cluster."""

    clusters: Annotated[int, Field(ge=1)] = 5
    by: Literal["inputs", "labels"] = "inputs"
    """k-means over the inputs, or groups of consecutive labels."""

    def deal(self, examples: Examples, clients: int, *, seed: int, per_client: int) -> Dealing:
        """See `Partitioner.deal`."""
        if self.clusters > clients:
            raise ConfigError(
                f"{self.clusters} clusters for {clients} clients", rule="one client each or more"
            )
        groups = self._k_means(examples, seed) if self.by == "inputs" else self._labels(examples)
        pools = pools_by_label(groups)
        # A client for every cluster, and the others in proportion to what is left of it.
        sizes = np.array([len(pool) for pool in pools])
        share = 1 + apportion(sizes, clients - self.clusters)
        owners = np.empty(len(examples), dtype=np.int64)
        first = 0
        for number, (pool, count) in enumerate(zip(pools, share, strict=True)):
            require(len(pool), int(count), max(per_client, 1), f"examples of cluster {number}")
            order = generator(seed, _PURPOSE, client=number).permutation(pool)
            owners[order] = first + np.repeat(np.arange(count), _even(len(pool), int(count)))
            first += int(count)
        return Dealing(owners)

    def _labels(self, examples: Examples) -> Indices:
        present, rank = np.unique(_labels(examples, "cluster"), return_inverse=True)
        if self.clusters > len(present):
            raise ConfigError(
                f"{self.clusters} clusters of {len(present)} labels", rule="one label each or more"
            )
        groups: Indices = rank * self.clusters // len(present)
        return groups

    def _k_means(self, examples: Examples, seed: int) -> Indices:
        from sklearn.cluster import KMeans
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        rows = examples.inputs.reshape(len(examples), -1)
        distinct = len(np.unique(rows[:10_000], axis=0))
        if distinct < self.clusters:
            raise DataError(
                f"inputs have {distinct} distinct rows", rule=f"{self.clusters} clusters need as many"
            )
        sample = generator(seed, "cluster").permutation(len(rows))[:10_000]
        means = KMeans(self.clusters, n_init=4, random_state=derive(seed, "cluster") % 2**31)
        with threadpool_limits(limits=1):  # several threads add up in an order of their own
            groups: Indices = means.fit(rows[np.sort(sample)]).predict(rows).astype(np.int64)
        if len(np.unique(groups)) < self.clusters:
            raise DataError("k-means left a cluster empty", fix="ask for fewer clusters")
        return groups


PARTITIONERS: Mapping[str, type[_Partitioner]] = MappingProxyType(
    {
        "cluster": Cluster,
        "contiguous": Contiguous,
        "dirichlet": Dirichlet,
        "iid": Iid,
        "natural": Natural,
        "noise": Noise,
        "quantity": Quantity,
        "shards": Shards,
    }
)


def build(name: str, **options: Any) -> Partitioner:
    """The partitioner of that name, or a user's own by `package.module:name`.

    A user's own is a class that takes the options and has `deal`, or a function with the arguments of
    `Partitioner.deal` and the options.

    Raises:
        ConfigError: unknown name or option, or a value out of range.
    """
    if ":" in name:
        return _user_made(name, options)
    kind: Any = chosen(PARTITIONERS, name, kind="partitioner", who="partition")
    return load_config(kind, options)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Function:
    """A user's function in the place of `deal`."""

    function: Callable[..., Dealing | Array]
    options: Mapping[str, Any]

    def deal(self, examples: Examples, clients: int, *, seed: int, per_client: int) -> Dealing | Array:
        return self.function(examples, clients, seed=seed, per_client=per_client, **self.options)


def _user_made(name: str, options: Mapping[str, Any]) -> Partitioner:
    found = resolve(name, kind="partitioner")
    partitioner: Any
    try:
        if isclass(found):
            partitioner = found(**options)
        else:
            signature(found).bind(None, 1, seed=0, per_client=0, **options)
            partitioner = _Function(found, options)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", rule="see Partitioner.deal for its arguments") from error
    if not callable(getattr(partitioner, "deal", None)):
        raise ConfigError(f"{name} gives {partitioner!r}", rule="a partitioner has a method deal")
    return partitioner  # type: ignore[no-any-return]


def is_classes(targets: Array) -> bool:
    """Whether the targets are one class 0, 1, … for each example."""
    return targets.ndim == 1 and targets.dtype.kind in "iu" and len(targets) > 0 and int(targets.min()) >= 0


def _labels(examples: Examples, who: str) -> Array:
    if not is_classes(examples.targets):
        found = f"targets are {examples.targets.dtype} of shape {examples.targets.shape}"
        raise DataError(found, rule="a class 0, 1, … for each example", who=f"partition {who}")
    return examples.targets


def require(n: int, clients: int, each: int, what: str = "examples", fix: str = "ask for fewer") -> None:
    """Refuses when there are not enough examples to deal out."""
    if clients * each > n:
        found = f"{clients} clients with {each} {what} each need {clients * each}, there are {n}"
        raise ConfigError(found, fix=fix, who="partition")


def _even(n: int, parts: int) -> Indices:
    """[parts] sizes that differ by at most 1, the larger ones first."""
    return n // parts + (np.arange(parts) < n % parts).astype(np.int64)


def _cut(order: Array, sizes: Array) -> Indices:
    """Owners, when `order` is dealt out in runs of `sizes`; what is left over belongs to nobody."""
    owners = np.full(len(order), -1, dtype=np.int64)
    owners[order[: int(sizes.sum())]] = np.repeat(np.arange(len(sizes)), sizes)
    return owners
