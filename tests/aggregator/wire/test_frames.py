"""Frames: what is well formed comes back, everything else is one typed error, and sizes cost nothing."""

import contextlib
import pickle
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import (
    ENDS_STREAM,
    MAX_CHUNK,
    MAX_DEPTH,
    MAX_FRAME,
    MAX_INLINE,
    MAX_LIST,
    STATUS,
    FrameError,
    Problem,
    Reason,
    Sequence,
    decode_client,
    decode_enrol_reply,
    decode_enrol_request,
    decode_server,
    encode,
    encode_client,
    encode_server,
)
from mycelia.aggregator.wire.position import Position
from tests.aggregator.wire import examples
from tests.aggregator.wire.examples import AT, HASH, damage

WIRE = Path(__file__).parents[3] / "aggregator" / "wire"

Decoder = Callable[[bytes], Message]
DECODERS: list[tuple[Decoder, Message]] = [
    *((decode_client, pb.ClientFrames(frames=[frame])) for frame in examples.client_frames()),
    *((decode_server, pb.ServerFrames(frames=[frame])) for frame in examples.server_frames()),
    (decode_enrol_request, examples.ENROL_REQUEST),
    (decode_enrol_reply, examples.ENROL_REPLY),
]


def client(**body: Message) -> bytes:
    return one(pb.ClientFrame(seq=1, **body).SerializeToString())  # type: ignore[arg-type]


def one(frame: bytes) -> bytes:
    """A message of one frame, whatever its bytes are."""
    return b"\x0a" + varint(len(frame)) + frame


def varint(value: int) -> bytes:
    found = b""
    while value >= 0x80:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def refused(data: bytes, match: str, decode: Decoder = decode_client) -> None:
    with pytest.raises(FrameError, match=match) as caught:
        decode(data)
    assert caught.value.reason is Reason.FRAME


# --- what is well formed ---


@pytest.mark.parametrize(("decode", "frame"), DECODERS)
def test_every_message_comes_back(decode: Decoder, frame: Message) -> None:
    assert decode(encode(frame)) == frame  # type: ignore[arg-type]


def test_the_examples_are_all_there_is() -> None:
    for message, known in ((pb.ClientFrame, examples.CLIENT), (pb.ServerFrame, examples.SERVER)):
        assert {field.name for field in message.DESCRIPTOR.oneofs[0].fields} == set(known)


def test_no_message_nests_too_deep() -> None:
    def depth(message: Descriptor) -> int:
        inside = [field.message_type for field in message.fields if field.message_type is not None]
        return 1 + max(map(depth, inside), default=0)

    assert max(map(depth, pb.DESCRIPTOR.message_types_by_name.values())) <= MAX_DEPTH


def test_the_largest_frames_fit() -> None:
    decode_client(client(chunk=pb.Chunk(sha256=HASH, data=bytes(MAX_CHUNK), at=AT.to_wire())))
    offer = examples.offer()
    offer.ClearField("chunk_sha256")
    offer.chunk_sha256.extend([HASH] * 2**14)  # 16 GiB
    offer.header = bytes(2**14)
    decode_client(client(offer=offer))


def test_numbers_of_zero_need_not_be_there() -> None:
    chunk = pb.Chunk(sha256=HASH, data=b"x", at=Position("run", 0, 0).to_wire())
    (frame,) = decode_client(client(chunk=chunk)).frames
    assert (frame.chunk.index, Position.of(frame.chunk.at)) == (0, Position("run", 0, 0))


# --- limits ---


def test_a_frame_that_is_too_large_is_not_looked_at() -> None:
    with pytest.raises(FrameError, match="TOO_LARGE") as caught:
        decode_client(bytes(MAX_FRAME + 1))
    assert caught.value.reason is Reason.TOO_LARGE


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"", "ClientFrame without seq"),
        (b"\x08\x01", "empty ClientFrame"),
        (b"\x08\x01\x4a\x00\x4a\x00", "after another one"),  # two pongs
        (b"\x08\x01\x4a\x00\x52\x00", "after another one"),  # a pong and a renewal
        (b"\x08\x01\x08\x02\x4a\x00", "seq after another one"),
        (b"\x08\x01\x4a\x00\x78\x01", "field 15 of type 0"),
        (b"\x08\x01\x4b\x4c", "field 9 of type 3"),  # a group
        (b"\x08\x01\x4a\x02\x12\x00", "field 2 of type 2 in Pong"),
        (b"\x08\x01\x4a\x05\x08\x01", "are left"),
        (b"\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", "no end"),
        (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "no end"),
        (b"\x08", "no end"),
    ],
)
def test_bytes_that_are_no_frame(body: bytes, match: str) -> None:
    refused(one(body), match)


def test_a_message_holds_frames() -> None:
    refused(b"", "ClientFrames without frames")
    refused(b"\x12\x00", "field 2 of type 2 in ClientFrames")
    pong = pb.ClientFrame(seq=1, pong=pb.Pong(nonce=3))
    assert list(decode_client(encode_client(pong, pong)).frames) == [pong, pong]
    refused(one(pong.SerializeToString()) + one(b""), "ClientFrame without seq")


def test_what_a_message_needs_has_to_be_there() -> None:
    for name, body in examples.CLIENT.items():
        for field, _ in body.ListFields():
            short = type(body)()
            short.CopyFrom(body)
            short.ClearField(field.name)
            try:
                decode_client(client(**{name: short}))
            except FrameError as error:
                assert field.name in str(error)  # noqa: PT017
            else:
                assert f"{name}.{field.name}" in {
                    "offer.schema_sha256", "offer.header", "offer.signature", "offer.at", "offer.data",
                    "want.missing", "want.at", "chunk.index", "chunk.at", "decline.field", "decline.asked",
                    "decline.allowed", "pong.nonce", "bye.reason",
                }  # fmt: skip


def test_sizes_have_limits() -> None:
    at = AT.to_wire()
    refused(client(chunk=pb.Chunk(sha256=HASH, data=bytes(MAX_CHUNK + 1), at=at)), "Chunk.data of 1048577")
    refused(client(chunk=pb.Chunk(sha256=HASH[:31], data=b"x", at=at)), "exactly 32")
    refused(client(ready=pb.Ready(at=pb.Position(run="ä" * 129))), "Position.run of 258 bytes")
    decode_client(client(ready=pb.Ready(at=pb.Position(run="ä" * 128))))
    offer = examples.offer()
    offer.schema_sha256 = HASH[:5]
    refused(client(offer=offer), "exactly 32")
    offer.schema_sha256, offer.data = HASH, bytes(MAX_INLINE + 1)
    refused(client(offer=offer), "Offer.data of 8193")
    want = pb.Want(sha256=HASH, at=at, missing=[pb.Range(count=1)] * MAX_LIST)
    decode_client(client(want=want))
    want.missing.append(pb.Range(count=1))
    refused(client(want=want), "more than 32768")


def test_enums_and_text_mean_something() -> None:
    data = client(offer=examples.offer())
    assert data.count(b"\x28\x03") == 1  # field 5, kind UPDATE
    refused(data.replace(b"\x28\x03", b"\x28\x63"), "Offer.kind is 99")
    refused(data.replace(b"\x28\x03", b"\x28\x00"), "Offer.kind is 0")
    refused(client(bye=pb.Bye(reason="stopped")).replace(b"stopped", b"\xfftopped"), "not UTF-8")


def test_numbers_stay_in_their_range() -> None:
    position = b"\x0a\x03run\x18\xff\xff\xff\xff\x1f"  # attempt 2**33 - 1
    ready = b"\x0a" + bytes([len(position)]) + position
    refused(one(b"\x08\x01\x1a" + bytes([len(ready)]) + ready), "below 4294967296")


def test_what_is_sent_passes_the_same_checks() -> None:
    with pytest.raises(FrameError, match="without at"):
        encode_client(pb.ClientFrame(seq=1, ready=pb.Ready()))
    with pytest.raises(FrameError, match="without seq"):
        encode_client(pb.ClientFrame(pong=pb.Pong()))


def test_announced_sizes_cost_nothing() -> None:
    """A length of five bytes may announce four billion; nothing is allocated for it."""
    for decode, frame in DECODERS:
        whole = encode(frame)  # type: ignore[arg-type]
        tracemalloc.start()
        try:
            for place in range(len(whole)):
                data = whole[:place] + b"\xff\xff\xff\xff\x0f" + whole[place + 1 :]
                before, _ = tracemalloc.get_traced_memory()
                tracemalloc.reset_peak()
                with contextlib.suppress(FrameError):
                    decode(data)
                assert tracemalloc.get_traced_memory()[1] - before < 50_000
        finally:
            tracemalloc.stop()


# --- any bytes ---


def decoded(decode: Decoder, data: bytes) -> None:
    try:
        frame = decode(data)
    except FrameError as error:
        assert error.reason in (Reason.FRAME, Reason.TOO_LARGE)  # noqa: PT017
    else:
        assert decode(encode(frame)) == frame  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([decode_client, decode_server, decode_enrol_request, decode_enrol_reply]), st.binary())
def test_any_bytes(decode: Decoder, data: bytes) -> None:
    decoded(decode, data)
    decoded(decode, one(b"\x08\x01" + data))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DECODERS), st.data())
def test_damaged_frames(case: tuple[Decoder, Message], data: st.DataObject) -> None:
    decode, frame = case
    whole = encode(frame)  # type: ignore[arg-type]
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 8)))
    decoded(decode, whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:])


@pytest.mark.parametrize("rounds", [3_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_damaged_frames(rounds: int) -> None:
    draw = random.Random(5)
    wholes = [(decode, encode(frame)) for decode, frame in DECODERS]  # type: ignore[arg-type]
    for _ in range(rounds):
        decode, whole = draw.choice(wholes)
        decoded(decode, damage(whole, draw))


# --- order, reasons ---


def test_frames_count_up_by_one() -> None:
    out, incoming = Sequence(), Sequence()
    for _ in range(3):
        incoming.check(out.next())
    for wrong in (3, 5, 0):
        with pytest.raises(FrameError, match=f"frame {wrong} after 3"):
            incoming.check(wrong)


def test_every_reason_has_the_status_of_the_table() -> None:
    rows = {
        "UNAUTHENTICATED": "BAD_HELLO* CERT_EXPIRED*",
        "PERMISSION_DENIED": "NOT_ENROLLED* REVOKED* BAD_TOKEN*",
        "FAILED_PRECONDITION": "VERSION* STALE_ROUND STALE_MODEL WRONG_PHASE SCHEMA POLICY",
        "ALREADY_EXISTS": "EQUIVOCATION",
        "INVALID_ARGUMENT": "FRAME* BAD_PAYLOAD NONFINITE WEIGHT",
        "RESOURCE_EXHAUSTED": "RATE* TOO_LARGE SPOOL_FULL BUSY",
        "DEADLINE_EXCEEDED": "LATE STALL* HELLO*",
        "ABORTED": "SUPERSEDED* QUORUM ROUND_ABORTED",
        "UNAVAILABLE": "DRAINING* STORE* NOT_LEADER*",
        "DATA_LOSS": "STORE_CORRUPT*",
        "INTERNAL": "BUG*",
    }
    found = {
        Reason(name.rstrip("*")): (grpc.StatusCode[code].value[0], name.endswith("*"))
        for code, names in rows.items()
        for name in names.split()
    }
    assert found == {reason: (STATUS[reason], reason in ENDS_STREAM) for reason in Reason}


def test_a_problem_travels() -> None:
    problem = Problem(
        Reason.NONFINITE,
        "tensor 'ä' holds NaN",
        rule="finite",
        fix="lower the rate",
        who="client 7",
        phase="train",
    )
    told = Problem.of(problem.outcome(AT))
    assert (told.reason, told.hint, told.phase) == (problem.reason, problem.hint, "train")
    assert not told.ends_stream
    assert str(pickle.loads(pickle.dumps(problem))) == str(problem)  # noqa: S301
    long = Problem(Reason.BUG, "ä" * 500)
    assert 250 < len(long.hint.encode()) <= 256
    assert Problem.of(long.goodbye(5)).ends_stream
    encode_server(pb.ServerFrame(seq=1, outcome=long.outcome(AT)))


def test_a_reason_that_does_not_exist_is_refused() -> None:
    for outcome in (pb.Outcome(code=3, reason="NEW"), pb.Outcome(code=4, reason="FRAME"), pb.Outcome()):
        with pytest.raises(FrameError, match="FRAME"):
            Problem.of(outcome)


# --- generated code ---


def test_the_generated_code_is_that_of_the_definition(tmp_path: Path) -> None:
    folder = tmp_path / "mycelia" / "aggregator" / "wire"
    folder.mkdir(parents=True)
    (folder / "federation.proto").write_bytes((WIRE / "federation.proto").read_bytes())
    command = [
        sys.executable, "-m", "grpc_tools.protoc", "-I", tmp_path, f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}", "mycelia/aggregator/wire/federation.proto",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=60)
    for name in ("federation_pb2.py", "federation_pb2.pyi"):
        assert (folder / name).read_bytes() == (WIRE / name).read_bytes(), "run `make proto`"
