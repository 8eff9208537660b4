"""Log lines: what they hold, and what they never hold."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from mycelia.aggregator.logs import FIELDS, configure, log
from mycelia.aggregator.wire.problems import Problem, Reason
from mycelia.engine.errors import ConfigError

SECRET = "4f1c0de5ec4e7"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, room = logging.getLogger(), logging.getLogger("mycelia")
    level = room.level
    yield
    for handler in [handler for handler in root.handlers if type(handler).__name__ == "_Lines"]:
        root.removeHandler(handler)
    room.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.fixture
def stream() -> io.StringIO:
    stream = io.StringIO()
    configure(stream, "debug")
    return stream


def test_a_line_has_the_fields_of_the_specification(stream: io.StringIO) -> None:
    before = datetime.now(UTC)
    fields: dict[str, Any] = {
        "run": "study-12", "round": 3, "attempt": 1, "phase": "train", "client": 7, "code": 4,
        "reason": "STALL", "hint": "connect again", "bytes": 2**40, "ms": 12.5,
    }  # fmt: skip
    assert tuple(fields) == FIELDS
    log("device dropped", "warning", **fields)
    (line,) = lines(stream)
    time = datetime.fromisoformat(line["time"])
    assert line["time"].endswith("Z")
    assert abs(time - before) < timedelta(minutes=5)
    assert time.utcoffset() == timedelta(0)
    assert list(line) == ["time", "level", "event", *FIELDS]
    assert (line["level"], line["event"]) == ("warning", "device dropped")
    assert {name: line[name] for name in FIELDS} == fields


def test_what_is_not_known_is_left_out(stream: io.StringIO) -> None:
    log("round published", run="r", client=None)
    (line,) = lines(stream)
    assert line.keys() == {"time", "level", "event", "run"}


@pytest.mark.parametrize(
    "value",
    [
        b"key", bytearray(b"key"), memoryview(b"key"), torch.ones(2), torch.tensor(1.0), np.ones(2), [1],
        (1,), {"a": 1}, {1}, object(), Problem(Reason.STALL, "x"), np.int64(3), 1j,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_could_be_data_or_a_key_is_refused(stream: io.StringIO, value: Any) -> None:
    for name in FIELDS:
        with pytest.raises(TypeError, match="holds text and numbers"):
            log("event", **{name: value})
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    "name", ["token", "key", "weights", "loss", "accuracy", "Run", "msg", "name", "args"]
)
def test_another_field_is_refused(stream: io.StringIO, name: str) -> None:
    with pytest.raises(TypeError, match="no field"):
        log("event", **{name: 1})
    assert stream.getvalue() == ""


def test_an_unknown_level_or_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of debug, info"):
        configure(io.StringIO(), "loud")
    with pytest.raises(ConfigError, match="auto, json or text"):
        configure(io.StringIO(), form="xml")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one of debug, info"):
        log("event", "INFO")


def test_less_than_the_level_is_not_written() -> None:
    stream = io.StringIO()
    configure(stream, "warning")
    log("small", "info")
    log("large", "error")
    logging.getLogger("mycelia.client").info("small")
    logging.getLogger("another.package").info("small")
    logging.getLogger("another.package").warning("large, of theirs")
    assert [line["event"] for line in lines(stream)] == ["large", "large, of theirs"]


def test_an_error_is_one_string_without_values_of_variables(stream: io.StringIO) -> None:
    def fail(key: str) -> None:
        padded = key * 3
        try:
            int("x")
        except ValueError as error:
            raise Problem(Reason.BUG, "it did not work", fix="look") from error
        del padded

    try:
        fail(SECRET)
    except Problem as error:
        log("stream ended", "error", error=error, client=3)
        logging.getLogger("mycelia.x").exception("incident %s", "ab12")
    first, second = lines(stream)
    for line in (first, second):
        assert isinstance(line["error"], str)
        assert "BUG: it did not work" in line["error"]
        assert "invalid literal for int()" in line["error"]  # the cause
        assert "in fail" in line["error"]
        assert SECRET not in line["error"]
    assert (first["client"], second["event"]) == (3, "incident ab12")


def test_a_long_error_keeps_its_end(stream: io.StringIO) -> None:
    log("failed", "error", error=ValueError("x" * 100_000 + " the end"))
    (line,) = lines(stream)
    assert line["error"].startswith("…")
    assert line["error"].endswith(" the end")
    assert len(line["error"]) < 20_000


def test_ordinary_records_go_the_same_way(stream: io.StringIO) -> None:
    logging.getLogger("mycelia.aggregator.service").warning("no TLS at %s:%d", "127.0.0.1", 8443)
    logging.getLogger("mycelia.aggregator.service").info("%(one)s of %(two)d", {"one": "a", "two": 2})
    logging.getLogger("mycelia.aggregator.service").info("100 % sure")
    assert [line["event"] for line in lines(stream)] == ["no TLS at 127.0.0.1:8443", "a of 2", "100 % sure"]


def test_ordinary_records_show_no_data(stream: io.StringIO) -> None:
    class At(NamedTuple):
        run: str
        round: int

    class Odd:
        def __repr__(self) -> str:
            return SECRET

    logger = logging.getLogger("mycelia.x")
    logger.info("%s %r", SECRET.encode(), torch.full((2,), 7.25))
    logger.info("%s and %s", Odd(), [SECRET])
    logger.info("%(key)s", {"key": Odd()})
    logger.info("at %s", At("r", 3))
    text = stream.getvalue()
    assert SECRET not in text
    assert "7.25" not in text
    assert [line["event"] for line in lines(stream)] == [
        "<bytes> '<Tensor>'", "<Odd> and <list>", "<Odd>", "at At(run='r', round=3)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "args"), [("%d bytes", (SECRET.encode(),)), ("%s %s", (1,)), ("%(a)s", ({"b": SECRET},))]
)
def test_a_record_that_does_not_fit_its_format_is_written_without_its_values(
    message: str, args: tuple[Any, ...]
) -> None:
    stream = io.StringIO()
    record = logging.LogRecord("mycelia.x", logging.INFO, "", 0, message, args, None)
    configure(stream).handle(record)
    assert [line["event"] for line in lines(stream)] == [message]


def test_extras_of_others_are_not_written(stream: io.StringIO) -> None:
    logging.getLogger("mycelia.x").info("event", extra={"token": SECRET, "run": SECRET})
    assert SECRET not in stream.getvalue()


def test_a_line_is_one_line_whatever_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = 'a\nb\r\x1b[2J\x9b31m\u2028\u202e\x00\ud800 "q" ε'
    for form in ("json", "text"):
        stream = io.StringIO()
        handler = configure(stream, form=form)  # type: ignore[arg-type]
        # the test runner listens too, and cannot report half a character
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        log(hostile, hint=hostile)
        text = stream.getvalue()
        assert len(text.splitlines()) == 1
        assert text.removesuffix("\n").isprintable()
        text.encode()


def test_numbers_that_are_not_finite_are_still_json(stream: io.StringIO) -> None:
    for value in (float("nan"), float("inf"), np.float64("-inf"), np.float64(1.5), True):
        log("event", ms=value)
    assert [line["ms"] for line in lines(stream)] == ["nan", "inf", "-inf", 1.5, True]


def test_long_text_is_cut(stream: io.StringIO) -> None:
    log("e" * 10_000, hint="h" * 10_000)
    (line,) = lines(stream)
    assert (len(line["event"]), len(line["hint"])) == (1998, 1998)
    assert line["hint"].endswith("…")


def test_text_for_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    configure(stream)
    try:
        raise ValueError("no")
    except ValueError as error:
        log("device dropped", "warning", run="r", client=7, hint='say "yes"', error=error)
    first, *rest = stream.getvalue().splitlines()
    assert first[8:] == ' warning  device dropped run=r client=7 hint="say "yes""'
    assert rest[0] == "    Traceback (most recent call last):"
    assert rest[-1] == "    ValueError: no"


def test_a_second_call_takes_the_place_of_the_first() -> None:
    one, two = io.StringIO(), io.StringIO()
    configure(one)
    handler = configure(two, form="json")
    log("event")
    assert (one.getvalue(), len(lines(two))) == ("", 1)
    logging.getLogger().removeHandler(handler)
    log("event", "error")
    assert len(lines(two)) == 1


def test_standard_error_is_where_lines_go(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    log("event", run="r")
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err)["run"] == "r"


def test_a_reader_that_went_away_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    configure(stream)
    stream.close()
    log(SECRET, "error")
    assert capsys.readouterr() == ("", "")
