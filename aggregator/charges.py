"""The privacy ledger in the store: what each round released, once, in a chain that shows a change."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, select

from mycelia.aggregator.leases import Lease
from mycelia.aggregator.store import Store
from mycelia.aggregator.store_problems import corrupt
from mycelia.aggregator.tables import releases, runs
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.privacy.accounting import UNSTATED
from mycelia.privacy.events import Event
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.secagg.canonical import digest

__all__ = ["Release", "charge", "ledger_of", "releases_of"]


class Release(NamedTuple):
    """A release of a run.

    Attributes:
        round: it belongs to.
        attempt: it belongs to.
        event: what the accountant composes.
        release: what the released numbers depend on besides; see `Ledger.record`.
        stream: of noise and draw; see `Ledger.record`.
        hash: of the entry, 32 bytes; what CHARGED says.
        new: whether it was written now.
    """

    round: int
    attempt: int
    event: Event
    release: str
    stream: str
    hash: bytes
    new: bool = False


def charge(
    lease: Lease, round: int, attempt: int, event: Event, *, release: str = "", stream: str = ""
) -> Release:
    """Write a release down, durably, before it happens; the same one again is the first.

    Args:
        lease: of the run.
        round: its number.
        attempt: its number.
        event: what is about to be released.
        release: see `Ledger.record`.
        stream: see `Ledger.record`.

    Raises:
        DataError: this attempt released something else; it must not release twice.
        Problem: `NOT_LEADER`, `STORE`, `STORE_CORRUPT`: the release must not happen.
    """
    body = _spell(round, attempt, event, release, stream)
    mine = (releases.c.run == lease.run) & (releases.c.round == round) & (releases.c.attempt == attempt)
    with lease.write() as connection:
        count, last = _head(connection, lease.run)
        before = connection.execute(select(releases).where(mine)).one_or_none()
        if before is not None:
            if before.body != body:
                raise DataError(
                    f"round {round}, attempt {attempt} released something else before",
                    rule="an attempt has one release",
                    fix="go on with the settings of before, or with another attempt",
                    who="ledger",
                )
            return Release(round, attempt, event, release, stream, before.hash)
        chained = _chained(lease.run, last, count + 1, body)
        moved = connection.execute(
            runs.update()
            .where(runs.c.run == lease.run, runs.c.release_records == count, runs.c.release_hash == last)
            .values(release_records=count + 1, release_hash=chained)
        )
        if moved.rowcount != 1:
            raise corrupt("its end has moved", f"ledger of {lease.run}")
        row = {"run": lease.run, "number": count + 1, "round": round, "attempt": attempt}
        connection.execute(releases.insert().values(**row, body=body, hash=chained))
    return Release(round, attempt, event, release, stream, chained, new=True)


def releases_of(store: Store, run: str) -> list[Release]:
    """All releases of a run in order, after the chain was checked.

    Raises:
        ConfigError: there is no such run.
        Problem: `STORE_CORRUPT`: an entry was changed or is missing; it is named. `STORE`.
    """
    with store.read() as connection:
        count, expected = _head(connection, run)
        start = connection.scalar(select(runs.c.config).where(runs.c.run == run))
        rows = connection.execute(
            select(releases).where(releases.c.run == run).order_by(releases.c.number)
        ).all()
    head = digest("RL1/start", run, sha256(start or b"").digest())
    found = []
    for number, row in enumerate(rows, 1):
        where = f"ledger of {run}, entry {number}"
        if row.number != number:
            raise corrupt(f"it is missing: the next one is number {row.number}", where)
        if not isinstance(row.body, bytes) or row.hash != _chained(run, head, number, row.body):
            raise corrupt("it does not follow from the one before", where)
        head = row.hash
        found.append(_read(row, where))
    if (len(rows), head) != (count, expected):
        raise corrupt(f"it ends with entry {len(rows)}, and there were {count}", f"ledger of {run}")
    return found


def ledger_of(store: Store, run: str, noise_source: str = UNSTATED) -> Ledger:
    """The ledger that the releases make, in memory: for statements and budgets.

    Raises:
        ConfigError: there is no such run.
        Problem: `STORE_CORRUPT` or `STORE`.
    """
    ledger = Ledger(noise_source)
    for found in releases_of(store, run):
        ledger.record(found.event, found.release, found.stream)
    return ledger


def _head(connection: Connection, run: str) -> tuple[int, bytes]:
    wanted = select(runs.c.release_records, runs.c.release_hash).where(runs.c.run == run)
    row = connection.execute(wanted).one_or_none()
    if row is None:
        raise ConfigError(f"no run {run!r} in the store", rule="a release belongs to a run", who="run.name")
    return row.release_records, row.release_hash


def _chained(run: str, before: bytes, number: int, body: bytes) -> bytes:
    return digest("RL1/release", run, before, number, sha256(body).digest())


def _spell(round: int, attempt: int, event: Event, release: str, stream: str) -> bytes:
    values: dict[str, Any] = {"round": round, "attempt": attempt, "event": event.to_json()}
    values |= {"release": release, "stream": stream}
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode("ascii")


def _read(row: Row[Any], where: str) -> Release:
    try:
        values = json.loads(row.body)
        event = Event.from_json(values["event"])
        found = Release(
            values["round"], values["attempt"], event, values["release"], values["stream"], row.hash
        )
    except (ValueError, KeyError, TypeError, MyceliaError) as error:
        raise corrupt("it is no release", where) from error
    if (found.round, found.attempt) != (row.round, row.attempt):
        raise corrupt(f"it says another round than its row: {row.round}, attempt {row.attempt}", where)
    return found
