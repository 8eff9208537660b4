from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from mycelia.aggregator.charges import charge, ledger_of, releases_of
from mycelia.aggregator.log_records import (
    Charged,
)
from mycelia.aggregator.round_log import RoundLog
from mycelia.aggregator.store import Store
from mycelia.aggregator.tables import releases
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.engine.errors import DataError, ProtocolError
from mycelia.privacy.events import Event
from tests.aggregator.round_histories import (
    EVENT,
    PLAIN,
    SECURE,
    SUM,
    Place,
    flipped,
    lease_of,
    opened,
)

pytest_plugins = ["tests.aggregator.databases"]


@pytest.fixture
def place(store: Store, tmp_path: Path) -> Place:
    return Place(store, tmp_path)


def test_the_log_says_charged_of_what_is_in_the_ledger(place: Place) -> None:
    for history in ((opened(private=True), *PLAIN[1:6], Charged(SUM)), SECURE[:-3]):
        log = RoundLog.create(lease_of(place.store, history[0].KIND + str(len(history))), place.blobs, b"")
        log.append_many(history[:-1])
        with pytest.raises(ProtocolError, match="no such release"):
            log.append(history[-1])
        found = charge(log.lease, 0, 0, EVENT)
        assert log.append(Charged(found.hash) if isinstance(history[-1], Charged) else history[-1])


def test_a_release_is_charged_once(place: Place) -> None:
    lease = place.lease()
    first = charge(lease, 0, 0, EVENT, release="model", stream="noise")
    assert first.new
    again = charge(place.lease(), 0, 0, EVENT, release="model", stream="noise")  # after a crash
    assert again == first._replace(new=False)
    for other in (Event("fixed", 0.1, 2.0, "replace-one", unit="client"), EVENT):
        with pytest.raises(DataError, match="something else"):
            charge(place.lease(), 0, 0, other, release="another", stream="noise")
    with pytest.raises(Problem) as refused:
        charge(lease, 1, 0, EVENT)
    assert refused.value.reason == Reason.NOT_LEADER
    next_event = Event("fixed", 0.1, 1.0, "replace-one", unit="client", step=1)
    second = charge(place.lease(), 1, 2, next_event, release="model", stream="noise")
    assert [found.hash for found in releases_of(place.store, "study")] == [first.hash, second.hash]
    ledger = ledger_of(place.store, "study")
    assert ledger.steps == 2
    assert [event.count for event in ledger] == [2]


def test_a_ledger_that_was_changed_is_found(place: Place) -> None:
    for step in range(3):
        event = Event("fixed", 0.1, 1.0, "replace-one", unit="client", step=step)
        charge(place.lease(), step, 0, event)
    with place.store.read() as connection:
        rows = connection.execute(sa.select(releases).order_by(releases.c.number)).mappings().all()
    for row in rows:
        for column in ("number", "round", "attempt", "body", "hash"):
            wrong = flipped(row[column], 70) if column not in ("number", "round") else row[column] + 10
            with place.store.write() as connection:
                here = releases.c.number == row["number"]
                connection.execute(releases.update().where(here).values({column: wrong}))
            with pytest.raises(Problem, match="ledger of study") as found:
                releases_of(place.store, "study")
            assert found.value.reason == Reason.STORE_CORRUPT
            with place.store.write() as connection:
                there = releases.c.number == (wrong if column == "number" else row["number"])
                connection.execute(releases.update().where(there).values({column: row[column]}))
    assert len(releases_of(place.store, "study")) == 3
    with place.store.write() as connection:
        connection.execute(releases.delete().where(releases.c.number == 3))
    with pytest.raises(Problem, match="there were 3"):
        ledger_of(place.store, "study")
