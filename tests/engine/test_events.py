"""Events: what goes into the file comes out of it, whatever happens to the process or the disk."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mycelia.engine import events as e
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.event_log import EventLog, decode, encode, latest_history, read_events

NUMBER = st.floats(allow_nan=True, allow_infinity=True)
NATURAL = st.integers(0, 2**62)
NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
METRICS = st.dictionaries(NAME, NUMBER, max_size=3)
CLIENT = NATURAL | NAME
OUTCOME = st.builds(
    e.Outcome, CLIENT, st.integers(1, 9), NAME, NAME, st.text(max_size=9), st.text(max_size=9)
)
JSON = st.recursive(
    st.none() | st.booleans() | NATURAL | NAME,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3),
    max_leaves=5,
)
CONFIG = st.dictionaries(NAME, JSON, max_size=3)
T = st.floats(1.0, 2e9)
WHEN = st.none() | NATURAL

EVENTS: dict[type[e.Event], st.SearchStrategy[e.Event]] = {
    e.RunStarted: st.builds(
        e.RunStarted, NAME, CONFIG, NATURAL, CONFIG, NAME, NAME, NAME, NAME, NATURAL, NAME, t=T
    ),
    e.Resumed: st.builds(e.Resumed, NATURAL, CONFIG, t=T),
    e.Scalars: st.builds(e.Scalars, NATURAL, METRICS, t=T),
    e.Round: st.builds(
        e.Round,
        NATURAL,
        METRICS,
        st.dictionaries(NAME, NATURAL, max_size=3),
        METRICS,
        NATURAL,
        NATURAL,
        WHEN,
        t=T,
    ),
    e.Outcomes: st.builds(e.Outcomes, NATURAL, st.lists(OUTCOME, max_size=4), t=T),
    e.SecureSum: st.builds(
        e.SecureSum,
        NATURAL,
        st.booleans(),
        NAME,
        *([NATURAL] * 4),
        *([st.dictionaries(NAME, NATURAL, max_size=3)] * 2),
        METRICS,
        *([NATURAL] * 4),
        CONFIG,
        NAME,
        st.none() | NUMBER,
        t=T,
    ),
    e.Evaluation: st.builds(e.Evaluation, METRICS, NAME, WHEN, WHEN, t=T),
    e.Partition: st.builds(
        e.Partition,
        NAME,
        NATURAL,
        st.lists(NATURAL),
        st.lists(NAME),
        st.lists(st.lists(NATURAL)),
        METRICS,
        t=T,
    ),
    e.Spread: st.builds(
        e.Spread,
        st.dictionaries(NAME, st.lists(NUMBER)),
        st.lists(CLIENT),
        st.lists(NATURAL),
        WHEN,
        WHEN,
        t=T,
    ),
    e.Histogram: st.builds(e.Histogram, NAME, NATURAL, st.lists(NUMBER), st.lists(NATURAL), t=T),
    e.Image: st.builds(e.Image, NAME, NATURAL, NAME, NAME, t=T),
    e.Text: st.builds(e.Text, NAME, NATURAL, st.text(), t=T),
    e.Privacy: st.builds(e.Privacy, NUMBER, NUMBER, NAME, WHEN, WHEN, METRICS, t=T),
    e.SystemLoad: st.builds(e.SystemLoad, NATURAL, NATURAL, NATURAL, WHEN, WHEN, METRICS, t=T),
    e.CheckpointSaved: st.builds(e.CheckpointSaved, NATURAL, NAME, t=T),
    e.WarningRaised: st.builds(e.WarningRaised, NAME, NAME, t=T),
    e.RunFinished: st.builds(
        e.RunFinished, st.dictionaries(NAME, st.none() | st.booleans() | NATURAL | NUMBER), NAME, NAME, t=T
    ),
}


def strict(line: bytes) -> dict[str, object]:
    """What a reader that knows nothing but the standard makes of the line."""

    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is no JSON")

    parsed = json.loads(line, parse_constant=refuse)
    assert isinstance(parsed, dict)
    return parsed


@pytest.mark.parametrize("kind", e.KINDS.values(), ids=lambda kind: kind.kind)
def test_an_event_is_one_line_of_json_and_comes_back(kind: type[e.Event]) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(EVENTS[kind])
    def check(event: e.Event) -> None:
        line = encode(event, 5.0)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert strict(line)["v"] == e.SCHEMA_VERSION
        assert repr(decode(strict(line))) == repr(event)  # repr, since NaN differs from itself

    check()


def test_arrays_and_tensors_become_plain_numbers() -> None:
    event = e.Spread({"loss": np.array([1.5, np.nan], dtype=np.float32)}, np.arange(2), torch.tensor([3, 4]))  # type: ignore[arg-type]
    values = strict(encode(event, 5.0))
    assert values["metrics"] == {"loss": [1.5, "NaN"]}
    assert values["clients"] == [0, 1]
    assert values["examples"] == [3, 4]
    scalars = e.Scalars(np.int64(7), {"a": np.float64("inf"), "b": torch.tensor(0.25)})  # type: ignore[arg-type, dict-item]
    assert strict(encode(scalars, 5.0))["values"] == {"a": "Infinity", "b": 0.25}


def test_an_outcome_is_written_without_its_trailing_defaults() -> None:
    event = e.Outcomes(1, [e.Outcome(7), e.Outcome("u42", 2, "dropped"), e.Outcome(9, cause="late")])
    assert strict(encode(event, 5.0))["clients"] == [
        [7],
        ["u42", 2, "dropped"],
        [9, 1, "accepted", "train", "late"],
    ]


def test_text_that_reads_like_a_number_stays_text() -> None:
    event: e.Event = e.Text("NaN", 1, "Infinity", t=2.0)
    assert decode(strict(encode(event, 0.0))) == event


def test_a_name_that_is_not_utf8_survives() -> None:
    event = e.Image("x", 1, os.fsdecode(b"caf\xe9.png"), t=2.0)
    assert decode(strict(encode(event, 0.0))) == event


def test_a_later_reader_or_writer_may_know_more() -> None:
    assert decode({"v": 1, "t": 1.0, "kind": "of the future", "x": 1}) is None
    assert decode({"v": 1, "t": 1.0, "kind": "scalars", "step": 1, "values": {}, "new": 2}) == e.Scalars(
        1, {}, t=1.0
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["scalars", "resume", "end"]), st.integers(0, 6)), max_size=30))
def test_what_a_resume_does_again_replaces_what_was_before(script: list[tuple[str, int]]) -> None:
    log: list[e.Event] = []
    expected: list[e.Event] = []
    for number, (what, step) in enumerate(script):
        t = float(number + 1)
        event: e.Event = e.Scalars(step, {}, t=t)
        if what == "end":
            event = e.RunFinished({}, t=t)
        if what == "resume":
            event = e.Resumed(step, t=t)
            # The definition, one resume at a time: everything of a later step goes, and every end.
            expected = [
                old
                for old in expected
                if not isinstance(old, e.RunFinished)
                and isinstance(old, e.Scalars | e.Resumed)
                and old.step <= step
            ]
        log.append(event)
        expected.append(event)
    resumed_at = [event.step for event in log if isinstance(event, e.Resumed)]
    assert list(latest_history(log, resumed_at)) == expected


# The file


LOG: list[e.Event] = [
    e.RunStarted("train", seed=1, t=1.0),
    e.Scalars(1, {"loss": math.pi}, t=2.0),
    e.Text("ünïcode", 1, "two\nlines", t=3.0),
    e.RunFinished({"a": 1}, t=4.0),
]


def written(path: Path, events: list[e.Event] = LOG) -> Path:
    log = EventLog(path)
    for event in events:
        log.append(event)
    log.close()
    return path


def test_an_event_gets_the_time_it_is_logged_at(tmp_path: Path) -> None:
    (event,) = read_events(written(tmp_path / "events", [e.Scalars(1, {})]))
    assert event.t > 1_600_000_000
    assert replace(event, t=0.0) == e.Scalars(1, {})


def test_readers_can_choose_kinds(tmp_path: Path) -> None:
    path = written(tmp_path / "events")
    assert list(read_events(path, {"scalars", "run_finished"})) == [LOG[1], LOG[3]]
    # The mention of a kind inside another event does not count.
    path = written(tmp_path / "more", [e.Text("x", 1, '"kind":"scalars"', t=1.0), LOG[1]])
    assert list(read_events(path, {"scalars"})) == [LOG[1]]


def test_a_crash_at_any_byte_loses_at_most_the_event_being_written(tmp_path: Path) -> None:
    content = written(tmp_path / "whole").read_bytes()
    ends = [index + 1 for index, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(0, len(content), 3):
        path = tmp_path / "cut"
        path.write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends)
        assert list(read_events(path)) == LOG[:whole]
        log = EventLog(path)
        log.append(e.Resumed(3, t=9.0))
        log.close()
        assert list(read_events(path)) == [*LOG[:whole], e.Resumed(3, t=9.0)]


def test_a_long_unfinished_line_is_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path / "events")
    with path.open("ab") as file:
        file.write(b'{"v":1,"text":"' + b"x" * 200_000)
    EventLog(path).close()
    assert list(read_events(path)) == LOG


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"v":1,"t":1.0,"kind":"scal\n', "not JSON"),
        (b"\x00\x00\x00\n", "not JSON"),
        (b"\xff\xfe{}\n", "not JSON"),
        (b"[1, 2]\n", "no event"),
        (b"{}\n", "no event"),
        (b'{"v":1,"t":1.0,"kind":"scalars","step":1}\n', "malformed"),
        (b'{"v":1,"t":1.0,"kind":"outcomes","round":1,"clients":[[]]}\n', "malformed"),
    ],
)
def test_a_corrupt_line_in_the_middle_is_named(tmp_path: Path, line: bytes, found: str) -> None:
    path = written(tmp_path / "events")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(DataError, match=rf"events, line 3: .*{found}") as caught:
        list(read_events(path))
    assert caught.value.fix


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_version_is_refused(tmp_path: Path, version: object) -> None:
    path = tmp_path / "events"
    path.write_text(json.dumps({"v": version, "t": 1.0, "kind": "scalars"}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1: the run has schema version .*\n.*reads schema version 1"):
        list(read_events(path))


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes"])
def test_what_json_cannot_say_is_refused_and_not_written(tmp_path: Path, value: object) -> None:
    log = EventLog(tmp_path / "events")
    with pytest.raises(DataError, match="event 'run_finished'"):
        log.append(e.RunFinished({"x": value}))
    loop: dict[str, object] = {}
    loop["self"] = loop
    with pytest.raises(DataError, match="event 'run_finished'"):
        log.append(e.RunFinished(loop))
    log.append(LOG[1])
    log.close()
    assert list(read_events(tmp_path / "events")) == [LOG[1]]


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events")
    with pytest.raises(MyceliaError, match="another process is writing this run"):
        EventLog(tmp_path / "events")
    log.append(LOG[0])
    log.close()
    EventLog(tmp_path / "events").close()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond `size` fail, as on a full disk: the write before the last is cut short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_whole_lines_and_the_log_goes_on_when_there_is_space(tmp_path: Path) -> None:
    path = tmp_path / "events"
    log = EventLog(path)
    log.append(LOG[0])
    with (
        largest_file(path.stat().st_size + 10),
        pytest.raises(MyceliaError, match="cannot be written") as caught,
    ):
        log.append(LOG[1])
    assert caught.value.exit_code == 1
    assert list(read_events(path)) == LOG[:1]
    assert path.read_bytes().endswith(b"\n")
    log.append(LOG[2])
    log.close()
    assert list(read_events(path)) == [LOG[0], LOG[2]]


def test_a_folder_that_is_gone_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(MyceliaError, match=r"gone.events\.jsonl: the event log cannot be written"):
        EventLog(tmp_path / "gone" / "events.jsonl")


def test_a_killed_process_leaves_a_readable_log(tmp_path: Path) -> None:
    path = tmp_path / "events"
    code = f"""
from pathlib import Path
from mycelia.engine.event_log import EventLog
from mycelia.engine.events import Scalars
log = EventLog(Path({str(path)!r}))
step = 0
while True:
    step += 1
    log.append(Scalars(step, {{"loss": 1.0 / step}}))
    if step == 500:
        print("ready", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    log = EventLog(path)  # the lock went with the process
    log.close()
    steps = [event.step for event in read_events(path) if isinstance(event, e.Scalars)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 500
