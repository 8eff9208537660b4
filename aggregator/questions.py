"""What the server of a secure sum asks of a client in a phase; the same bytes whenever it asks again."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import lru_cache

from mycelia.aggregator.cohort import Cohort
from mycelia.aggregator.unmasking import Dealt
from mycelia.privacy.secagg import messages
from mycelia.privacy.secagg.messages import (
    PHASES,
    Abort,
    Advert,
    Deliver,
    Envelope,
    Open,
    Reason,
    Roll,
    Survivors,
)

__all__ = ["deliver", "farewell", "opening", "roll", "signers", "survivors"]


@lru_cache(maxsize=1)
def _roll_head(ids: tuple[int, ...], nonces: tuple[bytes, ...]) -> bytes:
    return messages.struct(Roll.tag(), ids, nonces)


class _Roll(Roll):
    """A roll; what all of a session have in common is encoded once."""

    def encode(self) -> bytes:
        """Canonical bytes."""
        adverts = messages.struct("", [advert.body + advert.signature for advert in self.adverts])
        return _roll_head(self.ids, self.nonces) + adverts[len(messages.struct("")) :]


def roll(cohort: Cohort, adverts: Mapping[int, tuple[Envelope, Advert]], client: int) -> Roll:
    """The cohort, and the adverts of a client's neighbours."""
    return _Roll(cohort.ids, cohort.nonces, tuple(adverts[other][0] for other in cohort.near[client]))


def deliver(cohort: Cohort, dealt: Mapping[int, Dealt], client: int) -> Deliver:
    """Who shared, and what a client's neighbours among them sealed for it."""
    owners = tuple(owner for owner in cohort.near[client] if owner in cohort.sharers)
    fields = tuple(dealt[owner].fields[cohort.places[owner][client] - 1] for owner in owners)
    return Deliver(cohort.sharer_bits, owners, fields)


def survivors(cohort: Cohort) -> Survivors:
    """The survivors, the same for all."""
    return Survivors(cohort.u0, cohort.u1, cohort.survivor_bits)


def signers(cohort: Cohort, agreed: Container[int], client: int) -> tuple[int, ...]:
    """Neighbours whose signatures a client is shown."""
    return tuple(other for other in cohort.near[client] if other in agreed)[: cohort.t]


def opening(cohort: Cohort, agreed: Mapping[int, Envelope], client: int) -> Open:
    """That enough of a client's neighbours agreed."""
    shown = signers(cohort, agreed, client)
    return Open(shown, tuple(agreed[signer].signature for signer in shown))


def farewell(cohort: Cohort, phase: str, shared: Container[int], client: int) -> Abort:
    """Why a client is left out of what comes: it was late, or too many of its neighbours were.

    Args:
        cohort: of the session.
        phase: that the session is in now.
        shared: who shared, in U1 or not.
        client: who is told.
    """
    if client not in shared:
        return Abort(Reason.LATE, PHASES[PHASES.index(phase) - 1], client=client)
    have = sum(other in cohort.sharers for other in cohort.near[client])
    return Abort(Reason.UNMASK_SHORT, "share", have=have, need=cohort.t, owner=client)
