from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from mycelia.aggregator.leases import LEASE_S, Lease, leader, take
from mycelia.aggregator.notices import MAX_NOTICE, Notice, listen, publish
from mycelia.aggregator.store import STALL_S, Store
from mycelia.aggregator.tables import tokens
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.engine.errors import ConfigError

if TYPE_CHECKING:
    from tests.aggregator.databases import Server

pytest_plugins = ["tests.aggregator.databases"]


def taken(store: Store, holder: str, now: float | None = None, run: str = "study") -> Lease:
    lease = take(store, run, holder, now=now)
    assert lease is not None
    return lease


def write(lease: Lease, name: bytes) -> None:
    with lease.write() as connection:
        connection.execute(tokens.insert().values(sha256=name, expires=1))


def written(store: Store) -> set[bytes]:
    with store.read() as connection:
        return set(connection.scalars(sa.select(tokens.c.sha256)))


@pytest.fixture
def shared(postgres: Server, open_store: Callable[[str], Store]) -> tuple[Store, Store]:
    """One database, as two servers see it."""
    url = postgres.database()
    return open_store(url), open_store(url)


# --- who leads ------------------------------------------------------------------------------------


@pytest.mark.postgres
def test_one_server_leads_until_its_time_is_over(shared: tuple[Store, Store]) -> None:
    first, second = shared
    assert leader(first, "study") is None
    a = taken(first, "a", now=100.0)
    assert leader(second, "study") == "a"
    assert take(second, "study", "b", now=100.0) is None
    assert take(second, "study", "b", now=100.0 + LEASE_S - 0.01) is None
    a.renew(now=103.0)
    assert take(second, "study", "b", now=100.0 + LEASE_S) is None
    b = taken(second, "b", now=103.0 + LEASE_S)
    assert (a.fence, b.fence) == (1, 2)
    assert leader(first, "study") == "b"
    assert taken(first, "a", now=103.0, run="another").fence == 1


@pytest.mark.postgres
def test_a_server_that_comes_back_need_not_wait(shared: tuple[Store, Store]) -> None:
    before = taken(shared[0], "a", now=100.0)
    assert taken(shared[1], "a", now=100.5).fence == 2
    with pytest.raises(Problem):
        before.renew()


@pytest.mark.postgres
def test_a_lease_that_is_given_back_is_free(shared: tuple[Store, Store]) -> None:
    a = taken(shared[0], "a", now=100.0)
    a.release()
    assert a.left == 0
    assert taken(shared[1], "b", now=100.0).fence == 2


@pytest.mark.postgres
def test_a_clock_that_was_set_back_keeps_nobody_out(shared: tuple[Store, Store]) -> None:
    taken(shared[0], "a", now=5000.0)
    assert taken(shared[1], "b", now=100.0).fence == 2


@pytest.mark.postgres
def test_time_is_the_databases_own(shared: tuple[Store, Store]) -> None:
    taken(shared[0], "a")
    assert take(shared[1], "study", "b") is None
    with shared[1].read() as connection:
        assert shared[1].now(connection) == pytest.approx(time.time(), abs=5)


def test_the_one_server_of_a_file_leads_at_once(tmp_path: object, open_store: Callable[[str], Store]) -> None:
    store = open_store(f"sqlite:///{tmp_path}/a.db")
    assert [taken(store, name, now=100.0).fence for name in "abab"] == [1, 2, 3, 4]


def test_what_is_left_runs_on_its_own_clock(store: Store) -> None:
    now = 50.0
    lease = take(store, "study", "a", clock=lambda: now)
    assert lease is not None
    assert lease.left == LEASE_S
    now = 57.0
    assert lease.left == LEASE_S - 7
    lease.renew()
    assert lease.left == LEASE_S
    now = 80.0
    assert lease.left == 0


# --- the fence ------------------------------------------------------------------------------------


def test_stale_leader_cannot_write(store: Store) -> None:
    a = taken(store, "a", now=100.0)
    write(a, b"1")
    b = taken(store, "b", now=100.0 + LEASE_S)
    for act in (lambda: write(a, b"2"), a.renew, a.release):
        with pytest.raises(Problem, match="b leads study, not a") as refused:
            act()
        assert refused.value.reason == Reason.NOT_LEADER
        assert a.left == 0
    write(b, b"3")
    assert written(store) == {b"1", b"3"}


def test_a_lease_that_is_over_and_not_taken_still_writes(store: Store) -> None:
    a = taken(store, "a", now=100.0)
    write(a, b"1")
    a.renew(now=1000.0)
    write(a, b"2")
    assert written(store) == {b"1", b"2"}


@pytest.mark.postgres
def test_nobody_takes_the_lead_in_the_middle_of_a_write(shared: tuple[Store, Store]) -> None:
    first, second = shared
    a = taken(first, "a", now=100.0)
    order: list[str] = []

    def follow() -> None:
        taken(second, "b", now=200.0)
        order.append("taken")

    thread = threading.Thread(target=follow)
    with a.write() as connection:
        connection.execute(tokens.insert().values(sha256=b"1", expires=1))
        thread.start()
        thread.join(0.3)
        order.append("written")
    thread.join()
    assert order == ["written", "taken"]
    assert written(second) == {b"1"}


@pytest.mark.postgres
def test_of_many_that_try_one_leads(shared: tuple[Store, Store]) -> None:
    barrier, found = threading.Barrier(6), list[Lease | None]()

    def attempt(number: int) -> None:
        barrier.wait()
        found.append(take(shared[number % 2], "study", f"server {number}", now=100.0))

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert sum(lease is not None for lease in found) == 1


@pytest.mark.postgres
def test_two_leaders_never_write_in_turns(shared: tuple[Store, Store]) -> None:
    """Two servers that steal the lead from each other: between two writes of one lease nobody else wrote."""
    rows, lock = list[int](), threading.Lock()

    def work(number: int) -> None:
        store, done, tries = shared[number], 0, 0
        while done < 12:
            tries += 1
            lease = taken(store, f"server {number}", now=1000.0 * tries + 500 * number)
            for _ in range(3):
                try:
                    with lease.write() as connection:
                        connection.execute(
                            tokens.insert().values(
                                sha256=f"{lease.fence} {done}".encode(), expires=lease.fence
                            )
                        )
                        with lock:
                            rows.append(lease.fence)
                except Problem as problem:
                    if problem.reason != Reason.NOT_LEADER:
                        raise
                    break
                done += 1

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    taken(shared[0], "server 0", now=0.0)
    failed: list[BaseException] = []
    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert rows == sorted(rows)


@pytest.mark.slow
@pytest.mark.postgres
def test_a_leader_that_stops_in_the_middle_of_a_write_keeps_nobody_out(shared: tuple[Store, Store]) -> None:
    a, began = taken(shared[0], "a", now=100.0), time.monotonic()

    def stop() -> None:
        with a.write() as connection:
            connection.execute(tokens.insert().values(sha256=b"1", expires=1))
            taken(shared[1], "b", now=200.0)
            assert STALL_S - 1 < time.monotonic() - began < LEASE_S
            connection.execute(tokens.insert().values(sha256=b"2", expires=1))

    with pytest.raises(Problem) as stopped:
        stop()
    assert stopped.value.reason == Reason.STORE
    assert written(shared[1]) == set()


# --- notices --------------------------------------------------------------------------------------


async def next_of(heard: AsyncIterator[Notice]) -> Notice:
    return await asyncio.wait_for(anext(heard), timeout=30)


@pytest.mark.postgres
def test_a_notice_comes_once_what_it_is_about_is_durable(shared: tuple[Store, Store]) -> None:
    first, second = shared

    async def follow() -> list[Notice]:
        heard = listen(second, ["rounds", "rosters"])
        found = [await next_of(heard)]
        with suppress(KeyError), first.write() as connection:
            publish(connection, "rounds", "undone")
            raise KeyError
        with first.write() as connection:
            publish(connection, "rounds", "1")
            publish(connection, "others", "nobody listens")
            publish(connection, "rosters", "é" * (MAX_NOTICE // 2))
        found += [await next_of(heard), await next_of(heard)]
        await heard.aclose()
        return found

    assert asyncio.run(follow()) == [
        Notice(""),
        Notice("rounds", "1"),
        Notice("rosters", "é" * (MAX_NOTICE // 2)),
    ]


@pytest.mark.postgres
def test_a_lost_connection_is_made_again_and_said(postgres: Server, shared: tuple[Store, Store]) -> None:
    first, second = shared

    async def follow() -> list[Notice]:
        heard = listen(second, ["rounds"])
        found = [await next_of(heard)]
        postgres.stop()
        waiting = asyncio.ensure_future(next_of(heard))
        await asyncio.wait([waiting], timeout=0.3)
        postgres.start()
        found.append(await waiting)
        with first.write() as connection:
            publish(connection, "rounds", "2")
        found.append(await next_of(heard))
        await heard.aclose()
        return found

    assert asyncio.run(follow()) == [Notice(""), Notice(""), Notice("rounds", "2")]


def test_one_server_has_nobody_to_tell(tmp_path: object, open_store: Callable[[str], Store]) -> None:
    store = open_store(f"sqlite:///{tmp_path}/a.db")
    with store.write() as connection:
        publish(connection, "rounds", "1")
    with pytest.raises(ConfigError, match="SQLite"):
        asyncio.run(next_of(listen(store, ["rounds"])))


def test_notices_that_no_server_takes_are_refused(store: Store) -> None:
    with store.write() as connection:
        for channel, payload in (("Rounds", ""), ("a; DROP TABLE runs", ""), ("a", "x" * 8000), ("a", "\0")):
            with pytest.raises(ConfigError):
                publish(connection, channel, payload)
