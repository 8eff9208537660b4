"""Who holds whose shares, and whether so many neighbours are enough.

Neighbours. On a complete graph all are neighbours. On a ring the members of U0 stand in the order of a
Fisher–Yates shuffle (Durstenfeld, CACM 7, 1964) that no one can foresee, since its key comes from the nonces
of all, and everybody's neighbours are the k/2 places on either side.

Safety, after Bell, Bonawitz, Gascón, Lepoint and Raykova (CCS 2020): three events have to be rare. More than
c of a client's neighbours are corrupt; a block of corrupt or silent places cuts the ring; fewer than t of a
client's neighbours are left to rebuild its secrets. Neighbours are a draw without replacement, so the
probabilities are tails of the hypergeometric law: ratios of whole numbers, and compared as such. Nothing is
rounded, and client and server come to the same answer on any machine.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.keys import kdf
from mycelia.privacy.secagg.masks import Stream
from mycelia.privacy.secagg.messages import NONCE_BYTES
from mycelia.privacy.secagg.round_config import MAX_COHORT, Graph, Threat

__all__ = [
    "Calculation",
    "Neighbours",
    "auto",
    "calculate",
    "check",
    "graph_key",
    "neighbours",
    "permutation",
]

_MILLION: Final = 10**6
_RECOVERY_BITS: Final = 20
_SLACK: Final = 1e-3  # more than the error of a logarithm
_NONE_PASS: Final = "assume fewer corrupt or fewer vanishing clients"
_SAFETY_BITS: Final = {Threat.PASSIVE: 41, Threat.ACTIVE: 80}


# --- neighbours ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The graph of one session.

    Attributes:
        ids: the members, in ascending order; a member's position is its place here, from 0.
        k: neighbours of each.
        ring: positions in the order of the ring, int64 [n]; None when all are neighbours.
    """

    ids: tuple[int, ...]
    k: int
    ring: npt.NDArray[np.int64] | None

    @cached_property
    def _position(self) -> dict[int, int]:
        return {client: position for position, client in enumerate(self.ids)}

    def of(self, client: int) -> tuple[int, ...]:
        """The ids of a member's neighbours, in ascending order.

        Raises:
            KeyError: no member.
        """
        position = self._position[client]
        if self.ring is None:
            return self.ids[:position] + self.ids[position + 1 :]
        place = np.flatnonzero(self.ring == position)
        beside = self.ring[(place + self._steps) % len(self.ids)]
        return tuple(self.ids[other] for other in sorted(beside.tolist()))

    def table(self) -> npt.NDArray[np.int32]:
        """The positions of everybody's neighbours, in ascending order, int32 [n, k].

        What stands in column j is holder j + 1 of the shares of that row's member.
        """
        n = len(self.ids)
        if self.ring is None:
            others = np.tile(np.arange(n - 1, dtype=np.int32), (n, 1))
            others += others >= np.arange(n)[:, np.newaxis]
            return others
        places = (np.arange(n)[:, np.newaxis] + self._steps) % n
        table = np.empty((n, self.k), np.int32)
        table[self.ring] = np.sort(self.ring[places], axis=1)
        return table

    def holder(self, owner: int, client: int) -> int:
        """The index, from 1, that `client` has as a holder of `owner`'s shares.

        Raises:
            KeyError: one is no member, or they are no neighbours.
        """
        if self.ring is None and client != owner:
            place = self._position[client]
            return place + (place < self._position[owner])
        try:
            return self.of(owner).index(client) + 1
        except ValueError:
            raise KeyError(client) from None

    @property
    def _steps(self) -> npt.NDArray[np.int64]:
        half = self.k // 2
        return np.concatenate([np.arange(-half, 0), np.arange(1, half + 1)])


def graph_key(ids: Sequence[int], nonces: Sequence[bytes], session_id: bytes) -> bytes:
    """The key of a session's ring, 32 bytes: from every member's id and nonce, in order of the ids."""
    joined = b"".join(client.to_bytes(8, "big") + nonce for client, nonce in zip(ids, nonces, strict=True))
    return kdf(joined, session_id, "sa1/graph", 0, 0)


def permutation(key: bytes, n: int) -> npt.NDArray[np.int64]:
    """A uniform order of 0 … n − 1 from a 32-byte key, int64 [n].

    For i = n − 1 … 1 the entries at i and at a uniform j ≤ i are swapped, j being the next 64-bit word of the
    key's stream modulo i + 1, unless the word is beyond the last whole multiple of i + 1: then it is skipped.
    """
    stream = Stream(key, 64)
    order = list(range(n))
    words: list[int] = []
    start = 0
    for last in range(n - 1, 0, -1):
        span = last + 1
        while True:
            if not words:
                words = stream.words(start, n).tolist()[::-1]
                start += n
            word = words.pop()
            if word < 2**64 // span * span:
                break
        other = word % span
        order[last], order[other] = order[other], order[last]
    return np.array(order, np.int64)


def neighbours(
    ids: Sequence[int], nonces: Sequence[bytes], session_id: bytes, k: int, graph: int
) -> Neighbours:
    """The graph that all members of a session compute alike.

    Args:
        ids: U0, strictly ascending.
        nonces: theirs, 16 bytes each.
        session_id: 32 bytes.
        k: neighbours of each on a ring, even; with n − 1 or more all are neighbours.
        graph: see `round_config.Graph`.

    Raises:
        SecureSumError: `BAD_ROLL`: ids that are not ascending, or nonces that do not go with them.
            `CONFIG`: another graph, or a k that no ring has.
    """
    if any(first >= second for first, second in itertools.pairwise(ids)) or (ids and ids[0] < 1):
        raise SecureSumError(Reason.BAD_ROLL, "ids that do not ascend", rule="from 1, each once", who="roll")
    if len(nonces) != len(ids) or any(len(nonce) != NONCE_BYTES for nonce in nonces):
        raise SecureSumError(
            Reason.BAD_ROLL, f"{len(nonces)} nonces for {len(ids)} ids",
            rule=f"one of {NONCE_BYTES} bytes each", who="roll",
        )  # fmt: skip
    if graph not in set(Graph):
        raise SecureSumError(Reason.CONFIG, f"graph {graph}", rule="complete is 0, ring is 1", who="graph")
    n = len(ids)
    if graph == Graph.COMPLETE or k >= n - 1:
        return Neighbours(tuple(ids), n - 1, None)
    if k < 2 or k % 2:
        raise SecureSumError(
            Reason.CONFIG, f"k is {k} of {n}", rule="on a ring even, at least 2", who="graph"
        )
    return Neighbours(tuple(ids), k, permutation(graph_key(ids, nonces, session_id), n))


# --- how many are enough ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calculation:
    """What k neighbours and a threshold of t come to in a cohort of n.

    Attributes:
        n: clients.
        k: neighbours of each, n − 1 if all are neighbours. Counts are exact then and probabilities 0 or 1.
        t: threshold.
        corrupt: clients assumed corrupt, A.
        dropped: clients assumed to vanish.
        c: the most corrupt neighbours of a client, but for an allowed probability.
        h: the same for the k/2 neighbours on one side; 0 where that does not count.
        corrupt_log2: log₂ of the probability that a client has more than c corrupt neighbours.
        cut_log2: log₂ of the bound on the probability that the ring is cut.
        recovery_log2: log₂ of the probability that a client keeps fewer than t neighbours; NaN if not
            asked for.
        faults: the rules that k and t break, one sentence each; empty if they are safe.
    """

    n: int
    k: int
    t: int
    corrupt: int
    dropped: int
    c: int
    h: int
    corrupt_log2: float
    cut_log2: float
    recovery_log2: float
    faults: tuple[str, ...]

    @property
    def safe(self) -> bool:
        """Whether every rule holds."""
        return not self.faults


def calculate(
    n: int, k: int, t: int, *, threat: int, corrupt_ppm: int, dropout_ppm: int, recovery: bool = True
) -> Calculation:
    """What k neighbours and a threshold of t come to in a cohort of n, safe or not.

    Args:
        n: clients, at least 2.
        k: neighbours of each, at least 1; n − 1 or more is the complete graph.
        t: threshold.
        threat: see `round_config.Threat`.
        corrupt_ppm: share of the clients assumed corrupt, parts per million.
        dropout_ppm: share of the clients assumed to vanish, parts per million.
        recovery: also ask whether enough neighbours are left to rebuild. That is the server's concern:
            clients are as safe without.

    Raises:
        ConfigError: a number out of range, or another threat.
    """
    degree = _Degree.of(n, k, threat, corrupt_ppm, dropout_ppm)
    part, whole = degree.shortage(t) if recovery else (0, 1)
    return Calculation(
        n=n,
        k=degree.k,
        t=t,
        corrupt=degree.corrupt,
        dropped=degree.dropped,
        c=degree.c,
        h=degree.h,
        corrupt_log2=_log2(_tail(n, degree.corrupt, degree.k, degree.c), degree.draws),
        cut_log2=_log2(*degree.cut),
        recovery_log2=_log2(part, whole) if recovery else math.nan,
        faults=(*degree.faults(t), *(degree.faults_of_recovery(t) if recovery else ())),
    )


def check(
    n: int, k: int, t: int, *, threat: int, corrupt_ppm: int, dropout_ppm: int, recovery: bool = True
) -> Calculation:
    """Refuse k and t that are not safe in a cohort of n; arguments as in `calculate`.

    Raises:
        SecureSumError: `WEAK_PARAMETERS`, with the rules they break and the least k and t that keep them.
        ConfigError: a number out of range, or another threat.
    """
    found = calculate(
        n, k, t, threat=threat, corrupt_ppm=corrupt_ppm, dropout_ppm=dropout_ppm, recovery=recovery
    )
    if found.safe:
        return found
    least = _least([n], threat, corrupt_ppm, dropout_ppm)
    raise SecureSumError(
        Reason.WEAK_PARAMETERS,
        f"k = {found.k} and t = {t} are too weak among {n} clients",
        rule="; ".join(found.faults),
        fix=f"the least that pass are k = {least[0]} and t = {least[1]}" if least else _NONE_PASS,
        who="neighbours",
        asked=f"k = {found.k}, t = {t}",
        allowed=f"k = {least[0]}, t = {least[1]}" if least else "",
    )


def auto(sizes: int | Iterable[int], *, threat: int, corrupt_ppm: int, dropout_ppm: int) -> tuple[int, int]:
    """The least k, and for it the least t, that are safe in cohorts of every given size.

    If no ring is, k is the largest size less one, the complete graph, and t follows the rule of two-thirds
    where that is safe for every size.

    Args:
        sizes: numbers of clients, each at least 3: one, or all that may come to share.
        threat: see `round_config.Threat`.
        corrupt_ppm: share of the clients assumed corrupt, parts per million.
        dropout_ppm: share of the clients assumed to vanish, parts per million.

    Raises:
        SecureSumError: `WEAK_PARAMETERS`: no k and t are safe.
        ConfigError: a number out of range, or another threat.
    """
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    least = _least(sizes, threat, corrupt_ppm, dropout_ppm)
    if least is None:
        raise SecureSumError(
            Reason.WEAK_PARAMETERS,
            f"no k and t are safe among {min(sizes)} to {max(sizes)} clients",
            rule=f"assumed corrupt {corrupt_ppm / _MILLION:.2%}, vanishing {dropout_ppm / _MILLION:.2%}",
            fix=_NONE_PASS,
            who="neighbours",
        )
    return least


@dataclass(frozen=True)
class _Degree:
    """What follows from k neighbours in a cohort of n, whatever t is; all of it in whole numbers."""

    n: int
    k: int
    threat: Threat
    corrupt: int
    dropped: int

    @classmethod
    def of(cls, n: int, k: int, threat: int, corrupt_ppm: int, dropout_ppm: int) -> _Degree:
        if not 2 <= n <= MAX_COHORT or k < 1:
            raise ConfigError(
                f"{k} neighbours among {n}",
                rule=f"2 to {MAX_COHORT} clients, at least 1 neighbour",
                who="graph",
            )
        if not (0 <= corrupt_ppm < _MILLION and 0 <= dropout_ppm < _MILLION):
            raise ConfigError(
                f"corrupt {corrupt_ppm} and dropout {dropout_ppm}", rule="parts per million", who="graph"
            )
        if threat not in set(Threat):
            raise ConfigError(f"threat {threat}", rule="passive is 0, active is 1", who="graph")
        return cls(n, min(k, n - 1), Threat(threat), corrupt_ppm * n // _MILLION, dropout_ppm * n // _MILLION)

    @property
    def ring(self) -> bool:
        return self.k < self.n - 1

    @cached_property
    def draws(self) -> int:
        """Ways to draw k of n."""
        return math.comb(self.n, self.k)

    @cached_property
    def c(self) -> int:
        if not self.ring:
            return min(self.corrupt, self.k)
        return _rarely_above(self.n, self.corrupt, self.k, _SAFETY_BITS[self.threat], self.n)

    @cached_property
    def h(self) -> int:
        if not self.ring or self.threat == Threat.PASSIVE:
            return 0
        return _rarely_above(self.n, self.corrupt, self.k // 2, _SAFETY_BITS[self.threat], 2 * self.n)

    @cached_property
    def cut(self) -> tuple[int, int]:
        """The bound on the probability of a cut, as a fraction."""
        bad = min(self.n, self.corrupt + self.dropped)
        return self.n * (self.n - self.k - 1) * math.comb(bad, self.k), 2 * self.draws

    @property
    def cut_is_rare(self) -> bool:
        part, whole = self.cut
        return part << _SAFETY_BITS[self.threat] < whole

    @property
    def faults_of_k(self) -> tuple[str, ...]:
        faults = []
        if self.ring and self.k % 2:
            faults.append("on a ring k is even")
        if self.ring and self.threat == Threat.ACTIVE and 100 * self.k < 3 * self.n:
            faults.append(f"k is at least 3 % of {self.n}")
        if not self.cut_is_rare:
            faults.append(f"the ring is cut with a probability below 2^-{_SAFETY_BITS[self.threat]}")
        return tuple(faults)

    @cached_property
    def floors(self) -> dict[str, int]:
        """The rules that ask for a large t: to each the least t that keeps it."""
        floors = {"t ≥ 2": 2, "2t > k": self.k // 2 + 1, f"t > c = {self.c}": self.c + 1}
        if self.threat == Threat.ACTIVE:
            floors[f"2t > k + c, c = {self.c}"] = (self.k + self.c) // 2 + 1
            if self.ring:
                floors[f"t > k/2 + h, h = {self.h}"] = self.k // 2 + self.h + 1
        return floors

    def faults(self, t: int) -> tuple[str, ...]:
        """The rules of safety that a threshold breaks."""
        low = [rule for rule, least in self.floors.items() if t < least]
        return (*low, *(["t ≤ k"] if t > self.k else []), *self.faults_of_k)

    def shortage(self, t: int) -> tuple[int, int]:
        """The probability that a client keeps fewer than t neighbours, as a fraction."""
        if not self.ring:
            return int(self.k - self.dropped < t), 1
        return _tail(self.n, self.dropped, self.k, self.k - t), self.draws

    def faults_of_recovery(self, t: int) -> tuple[str, ...]:
        """The rule that dropouts leave enough shares."""
        part, whole = self.shortage(t)
        if part * self.n << _RECOVERY_BITS < whole:
            return ()
        if not self.ring:
            return (f"t ≤ k less the {self.dropped} that may vanish",)
        return (f"fewer than t neighbours are left with probability below 2^-{_RECOVERY_BITS}/{self.n}",)

    @property
    def hopeless(self) -> bool:
        """Whether no t will do, told from the largest terms of the tails alone: cheap, and mostly enough."""
        if not self.ring:
            return False
        bits = _SAFETY_BITS[self.threat] + math.log2(self.n)
        c = _term_rare_above(self.n, self.corrupt, self.k, bits)
        t = max(c, self.k // 2) + 1
        if self.threat == Threat.ACTIVE:
            h = _term_rare_above(self.n, self.corrupt, self.k // 2, bits + 1)
            t = max(t, (self.k + c) // 2 + 1, self.k // 2 + h + 1)
        lost = max(self.k - t + 1, _mode(self.n, self.dropped, self.k))
        return _log2_term(self.n, self.dropped, self.k, lost) > _SLACK - _RECOVERY_BITS - math.log2(self.n)

    def accepts(self, t: int) -> bool:
        return not self.faults(t) and not self.faults_of_recovery(t)


def _least(sizes: Sequence[int], threat: int, corrupt_ppm: int, dropout_ppm: int) -> tuple[int, int] | None:
    """What `auto` returns, or None."""

    def degrees(k: int) -> list[_Degree]:
        return [_Degree.of(n, k, threat, corrupt_ppm, dropout_ppm) for n in sizes]

    def least_t(found: Sequence[_Degree]) -> int | None:
        if any(degree.hopeless or degree.faults_of_k for degree in found):
            return None
        t = max(max(degree.floors.values()) for degree in found)
        return t if all(degree.accepts(t) for degree in found) else None

    last = max(sizes) - 1
    # What the complete graph does not hold, no ring holds.
    if any(least_t([degree]) is None for degree in degrees(last)):
        return None
    for k in range(2, last, 2):
        t = least_t(degrees(k))
        if t is not None:
            return k, t
    if all(degree.accepts(2 * degree.k // 3 + 1) for degree in degrees(last)):
        return last, 2 * last // 3 + 1
    t = least_t(degrees(last))
    return None if t is None else (last, t)


def _terms(n: int, marked: int, draws: int) -> Iterator[tuple[int, int]]:
    """Ways to draw `draws` of n with x of the `marked` ones among them, from the largest x down."""
    x, lowest = min(marked, draws), max(0, draws - (n - marked))
    ways = math.comb(marked, x) * math.comb(n - marked, draws - x)
    while True:
        yield x, ways
        if x == lowest:
            return
        ways = ways * (x * (n - marked - draws + x)) // ((marked - x + 1) * (draws - x + 1))
        x -= 1


def _tail(n: int, marked: int, draws: int, above: int) -> int:
    """Ways to draw `draws` of n with more than `above` of the marked ones among them."""
    return sum(
        ways for _, ways in itertools.takewhile(lambda term: term[0] > above, _terms(n, marked, draws))
    )


def _rarely_above(n: int, marked: int, draws: int, bits: int, times: int) -> int:
    """The least x such that more than x marked ones are drawn with probability at most 2^-bits / times."""
    limit = math.comb(n, draws)
    terms = _terms(n, marked, draws)
    x, tail = next(terms)
    while (
        tail * times << bits <= limit
    ):  # ends with the smallest x at the latest: then the tail is everything
        x, ways = next(terms)
        tail += ways
    return x


def _mode(n: int, marked: int, draws: int) -> int:
    """The most likely number of marked ones among those drawn."""
    return (marked + 1) * (draws + 1) // (n + 2)


def _log2_term(n: int, marked: int, draws: int, x: int) -> float:
    """log₂ of the probability that x marked ones are drawn, to a millionth."""
    if not max(0, draws - (n - marked)) <= x <= min(marked, draws):
        return -math.inf
    parts = ((marked, x, 1), (n - marked, draws - x, 1), (n, draws, -1))
    return sum(
        sign * (math.lgamma(whole + 1) - math.lgamma(part + 1) - math.lgamma(whole - part + 1))
        for whole, part, sign in parts
    ) / math.log(2)


def _term_rare_above(n: int, marked: int, draws: int, bits: float) -> int:
    """A number that `_rarely_above` does not come below: where single probabilities fall under 2^-bits."""
    first = _mode(n, marked, draws)
    numbers = range(first, min(marked, draws))
    return first + bisect_left(numbers, bits - _SLACK, key=lambda x: -_log2_term(n, marked, draws, x + 1))


def _log2(part: int, whole: int) -> float:
    return math.log2(part) - math.log2(whole) if part else -math.inf
