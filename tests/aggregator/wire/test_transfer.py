"""Transfers: whatever happens to chunks, the right payload comes out, or a typed error."""

import math
import random
import tracemalloc
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import MAX_CHUNK, FrameError, Problem, Reason
from mycelia.aggregator.wire.offers import Manifest, Payload
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.sinks import FileSink, MemorySink
from mycelia.aggregator.wire.transfer import CREDIT, LEAST_RATE, MAX_REASKS, Incoming, Outgoing, Sink
from mycelia.engine.errors import ConfigError
from tests.aggregator.wire.examples import AT, HASH

STALL = 10.0


def small(offer: pb.Offer, most: int = 2**34) -> Manifest:
    """Of a transfer at a small scale."""
    return Manifest(offer, most, least_chunk=1)


def bytes_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def begin(data: bytes, chunk_size: int, sink: Sink | None = None) -> tuple[Outgoing, Incoming, Sink]:
    payload = Payload(data, chunk_size=chunk_size)
    offer = payload.offer(pb.UPDATE, AT)
    sink = MemorySink(len(data)) if sink is None else sink
    return Outgoing(payload, offer), Incoming(small(offer), sink, stall_s=STALL), sink


def run(outgoing: Outgoing, incoming: Incoming, until: int | None = None) -> int:
    """An undisturbed line, up to so many chunks; how many were sent."""
    sent = 0
    want = incoming.ask(0)
    assert want is not None
    outgoing.want(want)
    while (sent != until) and (chunk := outgoing.next()) is not None:
        sent += 1
        if (want := incoming.chunk(chunk, 0)) is not None:
            outgoing.want(want)
    return sent


# --- an undisturbed line ---


@pytest.mark.parametrize(
    ("size", "chunk_size"),
    [(1, 1), (1, 100), (100, 100), (101, 100), (1700, 100), (5 * 2**20 + 3, MAX_CHUNK)],
)
def test_what_is_sent_arrives(size: int, chunk_size: int) -> None:
    data = bytes_of(size)
    outgoing, incoming, sink = begin(data, chunk_size)
    assert run(outgoing, incoming) == math.ceil(size / chunk_size)
    assert incoming.complete
    assert outgoing.done
    assert bytes(sink.read(0, size)) == data
    assert incoming.deadline == math.inf


def test_hashes_are_those_of_the_bytes() -> None:
    payload = Payload(b"abcde", chunk_size=2)
    assert payload.sha256 == sha256(b"abcde").digest()
    assert payload.chunk_sha256 == tuple(sha256(part).digest() for part in (b"ab", b"cd", b"e"))
    assert Payload(b"abcde", whole=HASH).sha256 == HASH


def test_at_most_eight_chunks_are_on_their_way() -> None:
    outgoing, incoming, _ = begin(bytes_of(4000), 100)
    want = incoming.ask(0)
    assert want is not None
    assert sum(part.count for part in want.missing) == CREDIT
    assert incoming.ask(0) is None
    outgoing.want(want)
    for left in range(CREDIT - 1, -1, -1):
        chunk = outgoing.next()
        assert chunk is not None
        want = incoming.chunk(chunk, 0)
        outstanding = left if want is None else left + sum(part.count for part in want.missing)
        assert outstanding <= CREDIT
        if want is not None:
            break
    assert want is not None


def test_a_file_is_mapped_and_sent(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes_of(5000))
    payload = Payload.open(path, chunk_size=700)
    assert payload.sha256 == sha256(path.read_bytes()).digest()
    assert b"".join(payload.chunk(index) for index in range(8)) == path.read_bytes()
    payload.close()
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="0 bytes"):
        Payload.open(path)


@pytest.mark.parametrize("chunk_size", [0, MAX_CHUNK + 1])
def test_a_chunk_size_out_of_range(chunk_size: int) -> None:
    with pytest.raises(ConfigError, match="chunks of"):
        Payload(b"abc", chunk_size=chunk_size)


def test_more_chunks_than_an_offer_lists() -> None:
    with pytest.raises(ConfigError, match="1 to 32768 chunks"):
        Payload(bytes(2**15 + 1), chunk_size=1)


# --- offers ---


def test_offers_that_do_not_add_up() -> None:
    good = Payload(bytes_of(300), chunk_size=100).offer(pb.UPDATE, AT)
    small(good)

    def changed(**fields: object) -> pb.Offer:
        offer = pb.Offer()
        offer.CopyFrom(good)
        for name, value in fields.items():
            setattr(offer, name, value)
        return offer

    for offer in (changed(size=301), changed(size=200), changed(size=0), changed(chunk_size=0)):
        with pytest.raises(FrameError, match="chunks of"):
            small(offer)
    with pytest.raises(FrameError, match="chunks of"):
        small(changed(chunk_size=MAX_CHUNK + 1, size=3 * MAX_CHUNK))
    with pytest.raises(FrameError, match="65536 to 1048576"):
        Manifest(good)
    Manifest(Payload(b"abc", chunk_size=3).offer(pb.UPDATE, AT))
    with pytest.raises(Problem, match="TOO_LARGE"):
        small(good, most=299)
    for offer in (changed(kind=pb.ROSTER), Payload(b"abc").offer(pb.MODEL, None)):
        with pytest.raises(FrameError, match="belong to work"):
            small(offer)
    small(Payload(b"abc").offer(pb.ROSTER, None))


# --- after a cut ---


def test_only_missing_chunks_travel_after_a_cut() -> None:
    """1 GB at a small scale: cut at 95 %, at most 6 % are sent again."""
    data, chunk_size = bytes_of(1000 * 64), 64
    outgoing, incoming, sink = begin(data, chunk_size)
    assert run(outgoing, incoming, until=950) == 950
    incoming.pause()
    outgoing.restart()
    again = run(outgoing, incoming)
    assert incoming.complete
    assert again <= 60
    assert bytes(sink.read(0, len(data))) == data


def test_a_receiver_that_was_restarted_finds_what_it_has(tmp_path: Path) -> None:
    data, chunk_size = bytes_of(1000 * 64), 64
    outgoing, incoming, sink = begin(data, chunk_size, FileSink(tmp_path / "part", 64_000))
    run(outgoing, incoming, until=950)
    assert isinstance(sink, FileSink)
    sink.close()
    sink = FileSink(tmp_path / "part", 64_000)
    incoming = Incoming(small(outgoing.restart()), sink, stall_s=STALL, recover=True)
    assert [(part.first, part.count) for part in incoming.held] == [(0, 950)]
    assert run(outgoing, incoming) == 50
    assert incoming.complete
    assert (tmp_path / "part").read_bytes() == data
    assert (tmp_path / "part").stat().st_mode & 0o777 == 0o600
    sink.close()


def test_a_payload_that_is_here_is_not_sent_again() -> None:
    outgoing, incoming, _ = begin(bytes_of(500), 100)
    run(outgoing, incoming)
    outgoing.restart()
    assert run(outgoing, incoming) == 0
    assert outgoing.done


def test_the_only_chunk_may_come_with_the_offer() -> None:
    data = bytes_of(100)
    outgoing, incoming, sink = begin(data, 100)
    assert outgoing.small == data
    want = incoming.ask(0, data)
    assert want is not None
    outgoing.want(want)
    assert (incoming.complete, outgoing.done, outgoing.next()) == (True, True, None)
    assert bytes(sink.read(0, 100)) == data
    assert incoming.ask(0, data) == want  # after a reconnect
    assert incoming.received == 100


def test_what_came_damaged_with_the_offer_is_asked_for() -> None:
    outgoing, incoming, _ = begin(bytes_of(100), 100)
    outgoing.restart()
    for _ in range(MAX_REASKS):
        incoming.pause()
        want = incoming.ask(0, b"x" * 100)
        assert want is not None
        assert list(want.missing) == [pb.Range(first=0, count=1)]
    outgoing.want(want)
    chunk = outgoing.next()
    assert chunk is not None
    incoming.chunk(chunk, 0)
    assert incoming.complete
    _, other, _ = begin(bytes_of(200), 100)
    with pytest.raises(FrameError, match="an offer of 2 chunks"):
        other.ask(0, b"x" * 100)


# --- chunks that are wrong ---


def test_a_damaged_chunk_is_asked_for_three_times_more() -> None:
    outgoing, incoming, _ = begin(bytes_of(100), 100)
    want = incoming.ask(0)
    for _ in range(MAX_REASKS):
        assert want is not None
        outgoing.want(want)
        assert outgoing.next() is not None
        want = incoming.chunk(pb.Chunk(sha256=outgoing.offer.sha256, data=b"x" * 100, at=AT.to_wire()), 0)
    assert want is not None
    outgoing.want(want)
    with pytest.raises(Problem, match="damaged 4 times") as caught:
        incoming.chunk(pb.Chunk(sha256=outgoing.offer.sha256, data=b"x" * 99, at=AT.to_wire()), 0)
    assert caught.value.reason is Reason.BAD_PAYLOAD
    with pytest.raises(FrameError, match="fifth"):
        outgoing.want(want)


def test_chunks_that_nobody_asked_for() -> None:
    outgoing, incoming, _ = begin(bytes_of(2000), 100)
    want = incoming.ask(0)
    assert want is not None
    outgoing.want(want)
    chunk = outgoing.next()
    assert chunk is not None
    for change, match in (
        ({"index": 15}, "not asked for"),
        ({"index": 20}, "chunk 20 of 20"),
        ({"sha256": HASH}, "another payload"),
        ({"at": Position(AT.run, AT.round, AT.attempt + 1).to_wire()}, "another payload"),
    ):
        parts: dict[str, object] = {
            "sha256": chunk.sha256,
            "index": 0,
            "data": chunk.data,
            "at": chunk.at,
        } | change
        with pytest.raises(FrameError, match=match):
            incoming.chunk(pb.Chunk(**parts), 0)  # type: ignore[arg-type]
    assert incoming.chunk(chunk, 0) is None
    assert incoming.chunk(chunk, 0) is None  # the same one twice


def test_wants_that_ask_too_much() -> None:
    outgoing, _, _ = begin(bytes_of(2000), 100)
    digest, at = outgoing.offer.sha256, AT.to_wire()
    for want, match in (
        (pb.Want(sha256=HASH, at=at), "another payload"),
        (pb.Want(sha256=digest), "another payload"),
        (pb.Want(sha256=digest, at=at, missing=[pb.Range(first=19, count=2)]), "chunk 20"),
        (pb.Want(sha256=digest, at=at, missing=[pb.Range(first=0, count=9)]), "beyond 8"),
        (pb.Want(sha256=digest, at=at, missing=[pb.Range(first=0, count=2**32 - 1)] * 3), "beyond 8"),
    ):
        with pytest.raises(FrameError, match=match):
            outgoing.want(want)
    outgoing.want(pb.Want(sha256=digest, at=at, missing=[pb.Range(first=0, count=5)]))
    with pytest.raises(FrameError, match="beyond 8"):
        outgoing.want(pb.Want(sha256=digest, at=at, missing=[pb.Range(first=5, count=4)]))


def test_chunks_may_be_right_and_the_whole_wrong() -> None:
    payload = Payload(bytes_of(300), chunk_size=100, whole=HASH)
    offer = payload.offer(pb.UPDATE, AT)
    incoming = Incoming(small(offer), MemorySink(300), stall_s=STALL)
    with pytest.raises(Problem, match="the whole is not") as caught:
        run(Outgoing(payload, offer), incoming)
    assert caught.value.reason is Reason.BAD_PAYLOAD
    assert not incoming.complete


def test_a_full_disk_withholds_credit() -> None:
    class Full(MemorySink):
        full = True

        def write(self, offset: int, data: bytes) -> None:
            if self.full and offset >= 300:
                raise OSError(28, "No space left on device")
            super().write(offset, data)

    data, sink = bytes_of(2000), Full(2000)
    outgoing, incoming, _ = begin(data, 100, sink)
    with pytest.raises(Problem, match="No space left") as caught:
        run(outgoing, incoming)
    assert caught.value.reason is Reason.SPOOL_FULL
    assert not caught.value.ends_stream
    assert incoming.deadline == math.inf
    sink.full = False
    outgoing.restart()
    assert run(outgoing, incoming) == 17
    assert bytes(sink.data) == data


# --- time ---


def test_a_sender_that_stops_has_stalled() -> None:
    outgoing, incoming, _ = begin(bytes_of(2000), 100)
    assert incoming.deadline == math.inf
    incoming.tick(1e9)  # nothing is asked for
    incoming.ask(5)
    assert incoming.deadline == 5 + STALL
    incoming.tick(14.9)
    with pytest.raises(Problem, match="0 bytes in 10 s") as caught:
        incoming.tick(15)
    assert caught.value.reason is Reason.STALL
    assert caught.value.ends_stream
    outgoing.restart()
    assert run(outgoing, incoming) == 20


def test_a_sender_that_drips_has_stalled() -> None:
    """At least 16 KiB a second: two chunks of 4 KiB in ten seconds are too few, though some come in time."""
    outgoing, incoming, _ = begin(bytes_of(4096 * 1000), 4096)
    want = incoming.ask(0)
    assert want is not None
    outgoing.want(want)
    for now in (4, 9):
        chunk = outgoing.next()
        assert chunk is not None
        incoming.chunk(chunk, now)
    with pytest.raises(Problem, match="8192 bytes in 10 s"):
        incoming.tick(10)


def test_a_slow_sender_that_keeps_up_has_not() -> None:
    """64 KiB every 3.9 s is a little more than 16 KiB a second."""
    outgoing, incoming, _ = begin(bytes_of(2**16 * 40), 2**16)
    want = incoming.ask(0)
    assert want is not None
    outgoing.want(want)
    now, tick = 0.0, 1.0
    assert LEAST_RATE < 2**16 / 3.9
    while not incoming.complete:
        now += 3.9
        while tick < now:
            incoming.tick(tick)
            tick += 1
        chunk = outgoing.next()
        assert chunk is not None
        if (want := incoming.chunk(chunk, now)) is not None:
            outgoing.want(want)
    assert incoming.deadline == math.inf


def test_small_chunks_on_a_long_line_have_not() -> None:
    """Eight chunks of 1 KiB a round trip of one second are all the credit there is."""
    outgoing, incoming, _ = begin(bytes_of(2**10 * 200), 2**10)
    want = incoming.ask(0)
    now = 0.0
    while not incoming.complete:
        assert want is not None
        outgoing.want(want)
        now += 1
        incoming.tick(now)
        want = None
        while (chunk := outgoing.next()) is not None:
            if (answer := incoming.chunk(chunk, now)) is not None and answer.missing:
                want = pb.Want(
                    sha256=answer.sha256,
                    at=answer.at,
                    missing=[*(want.missing if want else ()), *answer.missing],
                )
    assert now == pytest.approx(200 / 8, abs=3)


# --- anything may happen ---


class Line:
    """Chunks on their way, each of which may be lost, doubled, changed or overtaken; or the line is cut."""

    def __init__(self, draw: random.Random, rate: float) -> None:
        self.draw, self.rate, self.chunks = draw, rate, list[pb.Chunk]()

    def send(self, chunk: pb.Chunk) -> None:
        if self.draw.random() >= self.rate:
            self.chunks.append(chunk)
            return
        match self.draw.randrange(4):
            case 0:
                return
            case 1:
                self.chunks += [chunk, chunk]
            case 2:
                data = bytearray(chunk.data)
                data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
                if self.draw.random() < 0.3:
                    del data[0]
                self.chunks.append(
                    pb.Chunk(sha256=chunk.sha256, index=chunk.index, data=bytes(data), at=chunk.at)
                )
            case _:
                self.chunks.insert(self.draw.randrange(len(self.chunks) + 1), chunk)


def transfer(draw: random.Random, size: int, chunk_size: int, rate: float) -> bool:
    """A transfer over a bad line, with a reconnect whenever the stream ends; whether it came through."""
    data = bytes_of(size, size)
    outgoing, incoming, sink = begin(data, chunk_size)
    sent, streams, now = Counter[int](), 0, 0.0
    want = incoming.ask(now)
    while not incoming.complete:
        line = Line(draw, rate)
        streams += 1
        try:
            while not incoming.complete:
                if want is not None:
                    outgoing.want(want)
                while (chunk := outgoing.next()) is not None:
                    sent[chunk.index] += 1
                    line.send(chunk)
                want = None
                if not line.chunks:
                    now = incoming.deadline
                    assert now < math.inf, "nobody waits for anything"
                    incoming.tick(now)
                elif draw.random() < rate / 8:
                    break  # the line is cut
                else:
                    now += 0.01
                    want = incoming.chunk(line.chunks.pop(0), now)
        except Problem as problem:
            if problem.reason in (Reason.BAD_PAYLOAD, Reason.FRAME):
                return False
            assert problem.reason is Reason.STALL  # noqa: PT017
        assert streams < 10_000
        incoming.pause()
        outgoing.restart()
        want = incoming.ask(now)
    assert bytes(sink.read(0, size)) == data
    return True


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.sampled_from([7, 64, 100, 3000]),
    st.sampled_from([0.0, 0.02, 0.1, 0.3]),
)
def test_any_disturbance_ends_in_the_payload_or_a_typed_error(
    seed: int, size: int, chunk_size: int, rate: float
) -> None:
    came = transfer(random.Random(seed), size, chunk_size, rate)
    assert came or rate


@pytest.mark.parametrize("rounds", [100, pytest.param(20_000, marks=pytest.mark.slow)])
def test_many_disturbed_transfers(rounds: int) -> None:
    draw = random.Random(3)
    came = sum(transfer(draw, draw.randint(1, 3000), 100, 0.1) for _ in range(rounds))
    assert came > rounds / 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.binary(max_size=12), st.booleans()), max_size=30))
def test_any_chunks_end_in_a_typed_error_or_the_payload(chunks: list[tuple[int, bytes, bool]]) -> None:
    data = bytes_of(100)
    outgoing, incoming, sink = begin(data, 10)
    incoming.ask(0)
    for index, junk, right in chunks:
        content = data[10 * index : 10 * index + 10] if right else junk
        try:
            incoming.chunk(
                pb.Chunk(sha256=outgoing.offer.sha256, index=index, data=content, at=AT.to_wire()), 0
            )
        except Problem as problem:
            assert problem.reason in (Reason.FRAME, Reason.BAD_PAYLOAD)  # noqa: PT017
    if incoming.complete:
        assert bytes(sink.read(0, 100)) == data


# --- memory ---


def test_memory_does_not_depend_on_the_size(tmp_path: Path) -> None:
    peaks = []
    for size in (4 * 2**20, 32 * 2**20):
        source = tmp_path / f"source-{size}"
        with source.open("wb") as file:
            for part in range(size // 2**20):
                file.write(bytes_of(2**20, part))
        tracemalloc.start()
        payload = Payload.open(source)
        sink = FileSink(tmp_path / f"target-{size}", size)
        offer = payload.offer(pb.MODEL, AT)
        outgoing, incoming = Outgoing(payload, offer), Incoming(small(offer), sink, stall_s=STALL)
        run(outgoing, incoming)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert incoming.complete
        sink.close()
        payload.close()
    assert max(peaks) < 6 * 2**20
    assert peaks[1] - peaks[0] < 2**17
