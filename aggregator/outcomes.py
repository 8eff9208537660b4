"""What became of each device that was asked, and the one update of each that counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, get_args

from sqlalchemy import Connection, bindparam, func, select

from mycelia.aggregator.store import Store
from mycelia.aggregator.store_problems import corrupt
from mycelia.aggregator.tables import outcomes
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem, Reason, clipped
from mycelia.engine.errors import DataError

__all__ = ["DeviceOutcome", "Fate", "ask", "claim", "claim_all", "outcomes_of", "settle", "settle_rest"]

Fate = Literal["ACCEPTED", "LATE", "DROPPED", "REJECTED", "DECLINED", "UNKNOWN"]
_FATES: Final = frozenset(get_args(Fate))
_MOST_TEXT: Final = 2000  # bytes; a device's words may be a traceback
_AT_ONCE: Final = 500  # rows of one statement; SQLite has a limit on its parameters

_ROW: Final = (
    (outcomes.c.run == bindparam("at_run"))
    & (outcomes.c.round == bindparam("at_round"))
    & (outcomes.c.attempt == bindparam("at_attempt"))
    & (outcomes.c.client == bindparam("of"))
)
_TAKE: Final = outcomes.update().where(_ROW, outcomes.c.sha256.is_(None)).values(sha256=bindparam("hash"))
_SETTLE: Final = (
    outcomes.update()
    .where(_ROW, outcomes.c.status.is_(None))
    .values(
        {name: bindparam(f"new_{name}") for name in
         ("status", "phase", "cause", "hint", "bytes_up", "bytes_down", "seconds")}
    )
)  # fmt: skip


class DeviceOutcome(NamedTuple):
    """What became of one device that was asked.

    Attributes:
        client: its id.
        attempt: that it was asked in.
        status: see `Fate`; "" while it is not settled.
        phase: of the round.
        cause: why, in the device's words or the server's.
        hint: what to do about it.
        bytes_up: from the device.
        bytes_down: to the device.
        seconds: from the task to the outcome.
        sha256: of the update that counts, 32 bytes; empty if there is none.
    """

    client: int
    attempt: int
    status: Fate | Literal[""]
    phase: str = ""
    cause: str = ""
    hint: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    sha256: bytes = b""


def ask(connection: Connection, at: Position, clients: Sequence[int]) -> None:
    """Note that these clients are about to be asked; from now on each has an outcome to come."""
    rows = [{"run": at.run, "round": at.round, "attempt": at.attempt, "client": client} for client in clients]
    if rows:
        connection.execute(outcomes.insert(), rows)


def claim(connection: Connection, at: Position, client: int, sha256: bytes) -> bool:
    """Take an update as the one of its client that counts. Servers that do not lead use it as well.

    Returns:
        False if the same update was taken before.

    Raises:
        Problem: `EQUIVOCATION`: another one was, and stands; `WRONG_PHASE`: the client was not asked.
    """
    if connection.execute(_TAKE, _row(at, client) | {"hash": sha256}).rowcount == 1:
        return True
    first = connection.execute(select(outcomes.c.sha256).where(_ROW), _row(at, client)).one_or_none()
    who, phase = f"client {client}", "train"
    if first is None:
        raise Problem(
            Reason.WRONG_PHASE,
            f"client {client} was not asked in {at}",
            rule="an update answers a task",
            fix="wait to be asked",
            who=who,
            phase=phase,
        )
    if first.sha256 != sha256:
        raise Problem(
            Reason.EQUIVOCATION,
            f"client {client} sent a second, different update in {at}",
            rule="the first update of a client in an attempt stands",
            who=who,
            phase=phase,
        )
    return False


def claim_all(connection: Connection, claims: Sequence[tuple[Position, int, bytes]]) -> None:
    """As `claim`, of many: position, client and hash of each."""
    rows = [_row(at, client) | {"hash": digest} for at, client, digest in claims]
    if not rows or connection.execute(_TAKE, rows).rowcount == len(rows):
        return
    for at, client, digest in claims:  # one of them at least was taken before
        claim(connection, at, client, digest)


def settle(connection: Connection, run: str, round: int, settled: Iterable[DeviceOutcome]) -> int:
    """Write down outcomes; the first of a device in an attempt stands.

    Returns:
        how many were new.

    Raises:
        DataError: a status that is none, or a device that was not asked.
    """
    given = list(settled)
    for outcome in given:
        if outcome.status not in _FATES:
            raise DataError(
                f"status {outcome.status!r}",
                rule=f"one of {', '.join(sorted(_FATES))}",
                who=f"client {outcome.client}",
            )
    rows = [_row(Position(run, round, outcome.attempt), outcome.client) for outcome in given]
    values = [row | _values(outcome) for row, outcome in zip(rows, given, strict=True)]
    new = connection.execute(_SETTLE, values).rowcount if values else 0
    if new == len(rows):
        return new
    for row, outcome in zip(rows, given, strict=True):
        if connection.scalar(select(func.count()).where(_ROW), row) == 0:
            raise DataError(
                f"an outcome of round {round}, attempt {outcome.attempt}",
                rule="who was asked has an outcome, and nobody else",
                who=f"client {outcome.client}",
            )
    return new


def settle_rest(connection: Connection, run: str, round: int, survivors: Sequence[int] = ()) -> int:
    """The round is over: survivors were accepted, and of others that have no outcome nobody knows.

    Returns:
        how many are UNKNOWN.
    """
    here = (outcomes.c.run == run) & (outcomes.c.round == round) & outcomes.c.status.is_(None)
    for start in range(0, len(survivors), _AT_ONCE):
        some = survivors[start : start + _AT_ONCE]
        mine = here & outcomes.c.client.in_(some) & outcomes.c.sha256.is_not(None)
        connection.execute(outcomes.update().where(mine).values(status="ACCEPTED", phase="train"))
    cause = "the round ended without word of it"
    rest = outcomes.update().where(here).values(status="UNKNOWN", phase="train", cause=cause)
    return connection.execute(rest).rowcount


def outcomes_of(store: Store, run: str, round: int) -> list[DeviceOutcome]:
    """The outcomes of a round, by client and attempt."""
    wanted = select(outcomes).where(outcomes.c.run == run, outcomes.c.round == round)
    with store.read() as connection:
        rows = connection.execute(wanted.order_by(outcomes.c.client, outcomes.c.attempt)).all()
    for row in rows:
        if row.status is not None and row.status not in _FATES:
            raise corrupt(
                f"the outcome of client {row.client} in round {round} is {row.status!r}", store.name
            )
    return [
        DeviceOutcome(
            row.client,
            row.attempt,
            row.status or "",
            row.phase,
            row.cause,
            row.hint,
            row.bytes_up,
            row.bytes_down,
            row.seconds,
            row.sha256 or b"",
        )
        for row in rows
    ]


def _row(at: Position, client: int) -> dict[str, object]:
    return {"at_run": at.run, "at_round": at.round, "at_attempt": at.attempt, "of": client}


def _values(outcome: DeviceOutcome) -> dict[str, object]:
    return {
        "new_status": outcome.status,
        "new_phase": _text(outcome.phase),
        "new_cause": _text(outcome.cause),
        "new_hint": _text(outcome.hint),
        "new_bytes_up": outcome.bytes_up,
        "new_bytes_down": outcome.bytes_down,
        "new_seconds": outcome.seconds,
    }


def _text(text: str) -> str:
    """A device's words as any database takes them: without NUL, whole characters, and not without end."""
    return clipped(text.replace("\x00", "�"), _MOST_TEXT)
