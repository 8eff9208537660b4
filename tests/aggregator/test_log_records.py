from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mycelia.aggregator.log_records import (
    Accepted,
    Charged,
    Entry,
    Failed,
    Frozen,
    Machine,
    Merged,
    Open,
    Snapshot,
    decode,
    encode,
)
from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.events import Record
from tests.aggregator.round_histories import (
    MODEL,
    PLAIN,
    STATE,
    SUM,
    histories,
    opened,
)


@given(histories())
def test_a_record_reads_as_it_was_written(history: list[Entry]) -> None:
    for entry in history:
        kind, body = encode(entry)
        assert decode(kind, body) == entry
        assert encode(decode(kind, body)) == (kind, body)


KINDS = [
    "OPEN",
    "ISSUED",
    "ACCEPTED",
    "SNAPSHOT",
    "FROZEN",
    "CHARGED",
    "MERGED",
    "PUBLISHED",
    "FAILED",
    "SA1/0/U2",
    "",
]


@given(st.sampled_from(KINDS) | st.text(max_size=20), st.binary(max_size=60), st.data())
@example("SA1/" + "9" * 5000 + "/U2", b"", None)
@example("SA1/-1/U2", b"", None)
@example("OPEN", b"[" * 5000, None)
@example("ACCEPTED", b'{"attempt":0,"client":1,"sha256":' + b"9" * 5000 + b"}", None)
@example("PUBLISHED", b"{} ", None)
def test_bytes_that_are_no_record_are_refused(kind: str, body: bytes, data: st.DataObject | None) -> None:
    if data is not None and data.draw(st.booleans()):  # nearly a record
        kind, sound = encode(data.draw(st.sampled_from(PLAIN)))
        place = data.draw(st.integers(0, len(sound) - 1))
        body = sound[:place] + data.draw(st.binary(max_size=3)) + sound[place + 1 :]
    try:
        entry = decode(kind, body)
    except DataError:
        return
    assert encode(entry) == (kind, body)


@pytest.mark.slow
def test_a_million_bytes_that_are_no_record_are_refused() -> None:
    draw = random.Random(11)
    sound = [encode(entry) for entry in (*PLAIN, Charged(SUM), Failed("cancelled", "why"))]
    for _ in range(10**6):
        kind, body = draw.choice(sound)
        changed = bytearray(body)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(changed) + 1)
            changed[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        try:
            entry = decode(kind, bytes(changed))
        except DataError:
            continue
        assert encode(entry) == (kind, bytes(changed))


@pytest.mark.parametrize(
    "entry",
    [
        opened(-1),
        opened(clients=(1, 1)),
        opened(clients=(2**63,)),
        opened(carried=((1,),)),
        Open(0, 0, (1,), MODEL, b"short", 0.0, 600.0),
        Open(0, 0, (1,), MODEL, STATE, float("nan"), 600.0),
        Open(0, 0, (1,), MODEL, STATE, 0.0, float("inf")),
        Open(0, 0, (1,), MODEL, STATE, 0.0, 0.0),
        Snapshot((2, 1), SUM),
        Frozen((1, 1), SUM),
        Accepted(0, True, SUM),
        Accepted(0, 1.0, SUM),  # type: ignore[arg-type]
        Merged(MODEL, None),  # type: ignore[arg-type]
        Machine(-1, Record("U2", b"")),
    ],
)
def test_values_out_of_range_are_not_written(entry: Entry) -> None:
    with pytest.raises(DataError):
        encode(entry)
