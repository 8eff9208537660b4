"""What goes out next: messages in their order, chunks between them, and never too much that waits."""

from random import Random

import pytest

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.channel import check_plaintext, is_loopback, split_address
from mycelia.aggregator.wire.frames import MAX_INLINE, FrameError, Problem, Reason
from mycelia.aggregator.wire.offers import LEAST_CHUNK, Payload
from mycelia.aggregator.wire.outbox import MAX_QUEUED, MAX_QUEUED_BYTES, TOGETHER, Outbox
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.transfer import Outgoing
from mycelia.engine.errors import ConfigError

AT = Position("study", 1, 0)


def ping(nonce: int) -> pb.ServerFrame:
    return pb.ServerFrame(ping=pb.Ping(nonce=nonce))


def outgoing(seed: int, at: Position = AT) -> Outgoing:
    payload = Payload(Random(seed).randbytes(10 * LEAST_CHUNK), chunk_size=LEAST_CHUNK)
    return Outgoing(payload, payload.offer(pb.MODEL, at, schema_sha256=bytes(32)))


def want(transfer: Outgoing, first: int = 0, count: int = 0) -> pb.Want:
    missing = [pb.Range(first=first, count=count)] if count else []
    return pb.Want(sha256=transfer.offer.sha256, at=transfer.offer.at, missing=missing)


def test_messages_keep_their_order_and_pings_go_first() -> None:
    box = Outbox(pb.ServerFrame)
    assert box.next() == []
    for nonce in (1, 2, 3):
        box.put(ping(nonce))
    box.put(ping(9), first=True)
    assert box.next() == [ping(9), ping(1), ping(2), ping(3)]
    assert box.next() == []


def test_messages_go_together_up_to_a_size() -> None:
    def said(size: int) -> pb.ServerFrame:
        return pb.ServerFrame(secagg=pb.SecAgg(at=AT.to_wire(), data=bytes(size)))

    box = Outbox(pb.ServerFrame)
    sizes = [TOGETHER + 1, 10, TOGETHER // 2, TOGETHER // 2, 10]
    for size in sizes:
        box.put(said(size))
    assert box.next() == [said(TOGETHER + 1)]
    assert box.next() == [said(10), said(TOGETHER // 2)]
    assert box.next() == [said(TOGETHER // 2), said(10)]
    assert box.next() == []


def test_a_small_payload_goes_with_its_offer() -> None:
    at = AT
    for size, inside in ((MAX_INLINE, True), (MAX_INLINE + 1, False)):
        payload = Payload(bytes(size))
        sent = Outgoing(payload, payload.offer(pb.MODEL, at, schema_sha256=bytes(32)))
        box = Outbox(pb.ServerFrame)
        box.offer(sent)
        (frame,) = box.next()
        assert frame.offer.data == (bytes(size) if inside else b"")
        assert not sent.offer.data  # it may go to many, and be kept
        box.want(want(sent, 0, 1))  # whoever has not kept it asks
        (chunk,) = box.next()
        assert chunk.chunk.data == bytes(size)


def test_chunks_come_in_turn_when_nothing_else_is_to_be_said() -> None:
    box, one, other = Outbox(pb.ServerFrame), outgoing(1), outgoing(2)
    box.offer(one)
    box.offer(other)
    assert box.next() == [pb.ServerFrame(offer=each.offer) for each in (one, other)]
    assert box.next() == []
    assert box.want(want(one, 0, 3)) is None
    box.want(want(other, 5, 2))
    got = []
    while frames := box.next():
        (frame,) = frames
        got.append((frame.chunk.sha256, frame.chunk.index))
        if len(got) == 2:
            box.put(ping(1))
            assert box.next() == [ping(1)]
    first, second = one.offer.sha256, other.offer.sha256
    assert got == [(first, 0), (second, 5), (first, 1), (second, 6), (first, 2)]
    assert box.want(want(one)) is one
    assert box.want(want(one)) is None  # said twice
    box.withdraw(AT)
    assert box.want(want(other, 0, 1)) is None  # it came too late
    assert box.next() == []


def test_a_want_of_what_was_never_offered() -> None:
    box = Outbox(pb.ServerFrame)
    with pytest.raises(FrameError):
        box.want(want(outgoing(1)))


def test_what_waits_is_bounded() -> None:
    box = Outbox(pb.ServerFrame)
    for nonce in range(MAX_QUEUED):
        box.put(ping(nonce))
    with pytest.raises(Problem) as caught:
        box.put(ping(0))
    assert caught.value.reason is Reason.STALL
    box = Outbox(pb.ServerFrame)
    large = pb.ServerFrame(secagg=pb.SecAgg(at=AT.to_wire(), data=bytes(2**20)))
    for _ in range(MAX_QUEUED_BYTES // 2**20 - 1):
        box.put(large)
    with pytest.raises(Problem):
        box.put(large)
    box.next()
    box.put(large)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("fl.example.org:8443", "fl.example.org", 8443), ("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:1", "::1", 1)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", "host", ":8443", "host:", "host:x", "host:70000", "::1:80", "http://host:80", "a b:1", "[]:1"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        split_address(text)


def test_what_stays_on_this_machine() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.9.1", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.1", "localhost.example.org", "")))
    check_plaintext("127.0.0.1", secure_sum=True)
    check_plaintext("192.0.2.1", secure_sum=False)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        check_plaintext("192.0.2.1", secure_sum=True)
