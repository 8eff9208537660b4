"""What the board remembers, and for how long."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from typing import Any

import pytest

from mycelia.aggregator.status import Board
from mycelia.aggregator.status.devices import Devices
from mycelia.aggregator.wire.problems import Problem, Reason
from tests.aggregator.status.boards import DAY, Clock, full, play, run, start


def test_a_snapshot_is_plain_json() -> None:
    board = Board()
    full(board, 0.0)
    board.evaluation("study-12", 13, {"loss": math.nan, "accuracy": math.inf})
    board.privacy("study-12", math.inf, 1e-6, None, "client")
    snapshot = board.snapshot()
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
    study = snapshot["runs"][0]
    assert study["evaluations"][-1]["metrics"] == {"loss": "NaN", "accuracy": "Infinity"}
    assert study["privacy"] == {"epsilon": "Infinity", "delta": 1e-6, "budget": None, "unit": "client"}


def test_a_run_from_its_start_to_its_end() -> None:
    clock = Clock()
    board = clock.board()
    board.connected(7, "ward 7")
    start(board)
    board.phase("study-12", 1, 1, "train", clock.monotonic + 40)
    board.asked("study-12", [7, 8])
    board.outcome("study-12", 1, 7, "ACCEPTED", "train", bytes_up=10, bytes_down=20, seconds=1.5)
    (shown,) = board.snapshot()["runs"]
    assert (shown["round"], shown["phase"], shown["ends_at"]) == (1, "train", clock.wall + 40)
    assert (shown["asked"], shown["under_way"], shown["settled"]) == (2, 1, {"ACCEPTED": 1})
    board.outcome("study-12", 1, 8, "LATE", "train", "LATE", "after the round had closed")
    board.round_ended("study-12", 1, result="published", seconds=9, survivors=1, metrics={"loss": 0.5})
    board.phase("study-12", 2, 1, "select", None)
    board.finished("study-12", "ab" * 32, "runs/study-12")
    (shown,) = board.snapshot()["runs"]
    assert (shown["state"], shown["phase"], shown["model_sha256"]) == ("finished", "done", "ab" * 32)
    assert (shown["asked"], shown["published"], shown["failed"]) == (0, 1, 0)
    (row,) = shown["history"]
    assert (row["round"], row["result"], row["asked"], row["survivors"]) == (1, "published", 2, 1)
    seven, eight = board.snapshot()["devices"]["rows"]
    assert (seven["name"], seven["connected"], seven["status"], seven["error"]) == (
        "ward 7", True, "ACCEPTED", "",
    )  # fmt: skip
    assert (eight["connected"], eight["status"]) == (False, "LATE")
    assert eight["error"] == "LATE: after the round had closed"


def test_another_attempt_asks_anew() -> None:
    board = Board()
    start(board)
    board.phase("study-12", 1, 1, "train", None)
    board.asked("study-12", [1, 2])
    board.outcome("study-12", 1, 1, "DROPPED", "train", "STALL")
    board.phase("study-12", 1, 2, "configure", None)
    board.asked("study-12", [2, 3])
    (shown,) = board.snapshot()["runs"]
    assert (shown["attempt"], shown["asked"], shown["settled"]) == (2, 2, {})


def test_who_evaluates_is_not_asked_for_an_update() -> None:
    board = Board()
    start(board)
    board.phase("study-12", 1, 1, "train", None)
    board.asked("study-12", [1, 2])
    board.outcome("study-12", 1, 1, "ACCEPTED", "train")
    board.outcome("study-12", 1, 2, "DROPPED", "train")
    board.phase("study-12", 1, 1, "evaluate", None)
    board.asked("study-12", [1, 3])
    board.outcome("study-12", 1, 3, "DROPPED", "evaluate", "STALL")
    (shown,) = board.snapshot()["runs"]
    assert (shown["asked"], shown["under_way"]) == (2, 0)
    assert shown["settled"] == {"ACCEPTED": 1, "DROPPED": 1}
    assert board.snapshot()["devices"]["rows"][0]["status"] == "ACCEPTED"
    assert board.counts.outcomes["evaluate", "STALL"] == 1


def test_a_stopped_run_says_why() -> None:
    board = Board()
    start(board)
    board.stopped("study-12", "3 failed rounds in a row")
    (shown,) = board.snapshot()["runs"]
    assert (shown["state"], shown["error"]) == ("stopped", "3 failed rounds in a row")


def test_an_error_stays_after_the_device_is_back() -> None:
    clock = Clock()
    board = clock.board()
    board.connected(3, "c")
    board.disconnected(3, Problem(Reason.STALL, "no sign of life for 45 s", fix="connect again"))
    clock.forward(60)
    board.connected(3, "c")
    board.disconnected(3, None)
    (row,) = board.snapshot()["devices"]["rows"]
    assert row["error"] == "STALL: no sign of life for 45 s; connect again"
    assert (row["error_at"], row["since"], row["connected"]) == (clock.wall - 60, clock.wall, False)


def test_no_value_of_one_device_under_masks() -> None:
    words = "failed: the loss became 17.25 (nan before), weight -3e-4"
    board = Board()
    for name, secure in (("open", False), ("masked", True)):
        start(board, name, secure=secure)
        board.phase(name, 1, 1, "train", None)
        board.asked(name, [1 + secure])
        board.outcome(name, 1, 1 + secure, "DECLINED", "train", words)
    shown, hidden = (row["error"] for row in board.snapshot()["devices"]["rows"])
    assert shown == words
    assert hidden == "failed: the loss became # (# before), weight #"
    board.outcome("masked", 1, 2, "REJECTED", "train", "WEIGHT", "weight 31 is above the cap 10")
    assert board.snapshot()["devices"]["rows"][1]["error"] == "WEIGHT: weight # is above the cap #"
    board.disconnected(2, Problem(Reason.NONFINITE, "element 12 of layer.0 is inf"))
    assert board.snapshot()["devices"]["rows"][1]["error"] == "NONFINITE: element # of layer.# is #"
    # What its policy refuses is a setting.
    board.outcome("masked", 1, 2, "DECLINED", "configure", "POLICY", "min_cohort: asked 3, allowed 20")
    assert board.snapshot()["devices"]["rows"][1]["error"] == "POLICY: min_cohort: asked 3, allowed 20"


def test_devices_come_in_pages_of_a_hundred() -> None:
    board = Board()
    for client in range(250, 0, -1):
        board.connected(client, "")
    pages = [board.snapshot(page)["devices"] for page in (1, 2, 3, 99, 0, -4)]
    assert [(page["page"], len(page["rows"]), page["rows"][0]["client"]) for page in pages] == [
        (1, 100, 1), (2, 100, 101), (3, 50, 201), (3, 50, 201), (1, 100, 1), (1, 100, 1),
    ]  # fmt: skip
    assert {(page["total"], page["connected"], page["pages"]) for page in pages} == {(250, 250, 3)}


def test_connections_are_counted_once() -> None:
    devices = Devices(most=8)
    for client in (1, 1, 2):
        devices.here(client, "", 1.0)
    devices.away(1, 2.0)
    devices.away(1, 3.0)
    devices.away(5, 3.0)
    assert devices.connected == 1


def test_who_is_away_longest_is_forgotten_first() -> None:
    devices = Devices(most=8)
    for client in range(1, 9):
        devices.here(client, "", float(client))
    for client in (5, 3, 7):
        devices.away(client, 10.0 + client)
    devices.here(9, "", 20.0)
    assert sorted(device.client for device in devices) == [1, 2, 4, 5, 6, 7, 8, 9]
    assert devices.connected == 6


def test_memory_has_a_bound() -> None:
    board = Board()

    def load(times: int) -> int:
        for number in range(times):
            name = f"run {number}"
            start(board, name)
            play(board, name, 230, [1, 2, 3])
            for client in range(500):
                board.connected(client, "x" * 5000)
                board.disconnected(client, "y" * 5000)
            board.refused(f"no code {number}")
            board.outcome(name, 230, 1, "DECLINED", f"phase {number}", f"Z{number} words")
            board.stopped(name, "z" * 10_000)
        return len(json.dumps(board.snapshot()))

    size = load(17)
    assert load(17) <= size + 200  # counters have more digits
    snapshot = board.snapshot()
    assert len(snapshot["runs"]) == 16
    assert {len(shown["history"]) for shown in snapshot["runs"]} == {200}
    assert snapshot["runs"][0]["history"][0]["round"] == 31
    assert snapshot["refused"] == {"OTHER": 34}
    assert len(board.counts.outcomes) == 3
    assert sys.getsizeof(board.counts.outcomes) < 2000


def test_runs_in_progress_are_kept() -> None:
    board = Board()
    start(board, "long")
    for number in range(20):
        start(board, f"short {number}")
        board.finished(f"short {number}", "", "")
    names = [shown["name"] for shown in board.snapshot()["runs"]]
    assert names[0] == "short 19"
    assert names[-1] == "long"


def test_a_run_that_nobody_announced_is_shown_all_the_same() -> None:
    board = Board()
    board.phase("r", 4, 1, "nonsense", None)
    board.outcome("r", 4, 9, "LATE")
    board.round_ended("r", 4, result="failed")
    (shown,) = board.snapshot()["runs"]
    assert (shown["name"], shown["phase"], shown["failed"]) == ("r", "other", 1)


def test_what_ends_soon_is_named() -> None:
    clock = Clock()
    board = clock.board()
    days = {"operator": 700, "client 1": 40, "server a": 29, "client 2": 6, "client 3": -1}
    board.expiries([(who, int(clock.wall + left * DAY)) for who, left in days.items()])
    urgent = board.snapshot()["expiries"]
    assert [(end["who"], end["urgency"]) for end in urgent["first"]] == [
        ("client 3", "expired"), ("client 2", "urgent"), ("server a", "soon"),
    ]  # fmt: skip
    assert urgent["count"] == 3
    clock.forward(12 * DAY)
    assert board.snapshot()["expiries"]["count"] == 4
    assert board.seconds_left() == {
        "client": pytest.approx(-13 * DAY), "server": pytest.approx(17 * DAY),
        "operator": pytest.approx(688 * DAY),
    }  # fmt: skip


def test_every_change_wakes_those_who_wait() -> None:
    changes: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("server", ("a", "b", "c", False), {}),
        ("phase", ("r", 1, 1, "train", None), {}),
        ("connected", (1, "n"), {}),
        ("disconnected", (1, None), {}),
        ("asked", ("r", [1]), {}),
        ("outcome", ("r", 1, 1, "ACCEPTED", "train", "", "", 1, 2, 3.0), {}),
        ("evaluation", ("r", 1, {"loss": 1.0}), {}),
        ("round_ended", ("r", 1), {"result": "published"}),
        ("privacy", ("r", 1.0, 1e-5, 2.0, "client"), {}),
        ("traffic", (1, 2), {}),
        ("spool", (1, 0), {}),
        ("refused", ("STALL",), {}),
        ("expiries", ([("operator", 5)],), {}),
        ("finished", ("r", "", ""), {}),
        ("stopped", ("r", "why"), {}),
    ]

    async def wait() -> None:
        board = Board()
        for name, args, named in changes:
            before = board.version
            waiting = [asyncio.create_task(board.changed(before, 60)) for _ in range(3)]
            await asyncio.wait(waiting, timeout=0)
            getattr(board, name)(*args, **named)
            assert await asyncio.gather(*waiting) == [before + 1] * 3, name
            assert await board.changed(before, 60) == before + 1
        version = board.version
        board.traffic(1, 2)
        board.spool(1, 0)
        assert await board.changed(version, 0.001) == version

    run(wait())


def test_a_reader_that_gives_up_leaves_nothing() -> None:
    async def wait() -> None:
        board = Board()
        waiting = asyncio.create_task(board.changed(0, 60))
        await asyncio.wait([waiting], timeout=0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not board._waiters

    run(wait())
