from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mycelia.aggregator import outcomes
from mycelia.aggregator.log_records import (
    Accepted,
    Failed,
    Frozen,
    Issued,
    Snapshot,
)
from mycelia.aggregator.outcomes import DeviceOutcome, outcomes_of
from mycelia.aggregator.store import Store
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.engine.errors import DataError
from tests.aggregator.round_histories import (
    MODEL,
    PLAIN,
    SUM,
    Place,
    update,
)

if TYPE_CHECKING:
    from tests.aggregator.databases import Server

pytest_plugins = ["tests.aggregator.databases"]


@pytest.fixture
def place(store: Store, tmp_path: Path) -> Place:
    return Place(store, tmp_path)


def test_every_device_that_was_asked_has_one_outcome(place: Place) -> None:
    place.log.append_many(PLAIN[:6])
    store, found = place.store, outcomes_of(place.store, "study", 0)
    assert [(outcome.client, outcome.status) for outcome in found] == [(1, ""), (2, ""), (3, "")]
    first = DeviceOutcome(3, 0, "DROPPED", "train", "\0gone\ud800" + "x" * 5000, "look", 1, 2, 3.5)
    with store.write() as connection:
        assert outcomes.settle(connection, "study", 0, [first]) == 1
        assert (
            outcomes.settle(connection, "study", 0, [first._replace(status="LATE")]) == 0
        )  # the first stands
        for stranger in (first._replace(client=4), first._replace(attempt=1)):
            with pytest.raises(DataError, match="who was asked"):
                outcomes.settle(connection, "study", 0, [stranger])
        with pytest.raises(DataError, match="status"):
            outcomes.settle(connection, "study", 0, [first._replace(status="")])
    place.log.append_many(PLAIN[6:])
    one, two, three = outcomes_of(store, "study", 0)
    assert (one.status, two.status, three.status) == ("ACCEPTED", "ACCEPTED", "DROPPED")
    assert two.sha256 == update(2).sha256
    assert three.cause.startswith("�gone?xxx")
    assert len(three.cause.encode()) == 2000
    assert three[5:] == ("look", 1, 2, 3.5, b"")


def test_outcomes_come_with_the_record_that_ends_the_round(place: Place) -> None:
    place.log.append_many(PLAIN[:3])
    late = DeviceOutcome(1, 0, "LATE", "train")
    with pytest.raises(DataError):  # nothing of it is written
        place.log.append(Failed("below_quorum"), settled=[late, late._replace(client=9)])
    place.log.append(Failed("below_quorum"), settled=[late, DeviceOutcome(2, 0, "ACCEPTED", "train")])
    statuses = [outcome.status for outcome in outcomes_of(place.store, "study", 0)]
    assert statuses == ["LATE", "ACCEPTED", "UNKNOWN"]
    assert place.again().head.records == 4


def test_a_retry_has_an_outcome_of_its_own(place: Place) -> None:
    place.log.append_many([*PLAIN[:2], Issued(1, (3,)), update(3, 1), Snapshot((3,), SUM), Frozen((3,), SUM)])
    with place.store.write() as connection:
        outcomes.settle(connection, "study", 0, [DeviceOutcome(3, 0, "DROPPED", "train")])
    place.log.append_many(PLAIN[6:])
    found = [
        (outcome.client, outcome.attempt, outcome.status) for outcome in outcomes_of(place.store, "study", 0)
    ]
    assert found == [(1, 0, "UNKNOWN"), (2, 0, "UNKNOWN"), (3, 0, "DROPPED"), (3, 1, "ACCEPTED")]


def test_a_second_different_update_is_equivocation_on_every_server(place: Place) -> None:
    at = Position("study", 0, 0)
    place.log.append_many(PLAIN[:2])
    with place.store.write() as connection:  # on a server that does not lead
        assert outcomes.claim(connection, at, 1, update(1).sha256)
        assert not outcomes.claim(connection, at, 1, update(1).sha256)
    for act in (
        lambda: place.log.append(Accepted(0, 1, MODEL)),
        lambda: claim_alone(place.store, at, 1, MODEL),
    ):
        with pytest.raises(Problem) as refused:
            act()
        assert refused.value.reason == Reason.EQUIVOCATION
    assert place.log.append(update(1))
    assert not place.log.append(update(1))
    with pytest.raises(Problem) as refused:
        claim_alone(place.store, at._replace(attempt=1), 1, MODEL)
    assert refused.value.reason == Reason.WRONG_PHASE
    assert place.again().order.accepted == {1: update(1).sha256}


def claim_alone(store: Store, at: Position, client: int, digest: bytes) -> bool:
    with store.write() as connection:
        return outcomes.claim(connection, at, client, digest)


@pytest.mark.postgres
def test_of_two_updates_at_once_one_counts(
    postgres: Server, open_store: Callable[[str], Store], tmp_path: Path
) -> None:
    url = postgres.database()
    stores = [open_store(url) for _ in range(2)]
    Place(stores[0], tmp_path).log.append_many(PLAIN[:2])
    barrier, found = threading.Barrier(2), list[object]()

    def send(number: int) -> None:
        barrier.wait()
        try:
            found.append(claim_alone(stores[number], Position("study", 0, 0), 1, bytes([number]) * 32))
        except Problem as problem:
            found.append(problem.reason)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, found)) == ["EQUIVOCATION", "True"]
