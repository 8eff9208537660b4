"""Who takes part in one session of a secure sum, and who holds whose shares."""

from __future__ import annotations

from collections.abc import Iterable

from mycelia.privacy.secagg import graph as graphs
from mycelia.privacy.secagg import keys
from mycelia.privacy.secagg.round_config import RoundConfig

__all__ = ["Cohort"]


class Cohort:
    """The clients that advertised, U0, and of these the ones that shared, U1, and that survived, U2.

    Args:
        config: of the round.
        ids: of U0, increasing.
        nonces: theirs, in the same order.

    Attributes:
        ids: as given.
        nonces: as given.
        t: the threshold among so many.
        u0: hash of U0.
        near: of each client its neighbours, increasing.
        places: of each owner its neighbours to their index, from 1, among the holders of its shares.
        sharers: U1; empty until it is set.
        sharer_bits: U1 as a bitmap over U0.
        u1: hash of U1.
        survivors: U2; empty until it is set.
        survivor_bits: U2 as a bitmap over U0.
        u2: hash of U2.
    """

    def __init__(self, config: RoundConfig, ids: tuple[int, ...], nonces: tuple[bytes, ...]) -> None:
        self._session_id = config.session_id
        self.ids, self.nonces, self.t = ids, nonces, config.threshold(len(ids))
        self.u0 = keys.u0_hash(config.session_id, ids, nonces)
        graph = graphs.neighbours(ids, nonces, config.session_id, config.k, config.graph)
        table = graph.table().tolist()
        self.near = {
            client: tuple(ids[place] for place in row) for client, row in zip(ids, table, strict=True)
        }
        self.places = {
            client: {other: place for place, other in enumerate(near, 1)}
            for client, near in self.near.items()
        }
        self.sharers: frozenset[int] = frozenset()
        self.survivors: frozenset[int] = frozenset()
        self.sharer_bits = self.survivor_bits = self.u1 = self.u2 = b""

    def strong(self, clients: Iterable[int]) -> set[int]:
        """Those of the clients that keep t neighbours among themselves."""
        chosen = set(clients)
        while weak := {c for c in chosen if sum(other in chosen for other in self.near[c]) < self.t}:
            chosen -= weak
        return chosen

    def set_sharers(self, bits: bytes) -> None:
        """Fix U1, given as a bitmap."""
        self.sharers, self.sharer_bits = frozenset(keys.members(bits, self.ids)), bits
        self.u1 = keys.u1_hash(self._session_id, bits)

    def set_survivors(self, bits: bytes) -> None:
        """Fix U2, given as a bitmap."""
        self.survivors, self.survivor_bits = frozenset(keys.members(bits, self.ids)), bits
        self.u2 = keys.u2_hash(self._session_id, bits)

    def bits(self, clients: Iterable[int]) -> bytes:
        """A set of its clients as a bitmap over U0."""
        return keys.bitmap(clients, self.ids)

    def split(self, client: int) -> tuple[list[int], list[int]]:
        """Whose shares this client is asked for: neighbours that survived, and that shared and did not."""
        alive = [owner for owner in self.near[client] if owner in self.survivors]
        silent = [
            owner for owner in self.near[client] if owner in self.sharers and owner not in self.survivors
        ]
        return alive, silent
