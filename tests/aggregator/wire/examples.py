"""One full message of every kind, and a damager of bytes."""

from __future__ import annotations

import random

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.position import Position

AT = Position("study-12", 3, 1)
HASH = bytes(range(32))
NONCE = bytes(range(32, 64))
SIGNATURE = bytes(64)
RANGES = [pb.Range(first=0, count=2), pb.Range(first=7, count=1)]


def place() -> pb.Position:
    return AT.to_wire()


def offer() -> pb.Offer:
    return pb.Offer(
        sha256=HASH, size=300, chunk_size=100, chunk_sha256=[HASH] * 3, kind=pb.UPDATE, schema_sha256=HASH,
        at=place(), header=b"header", signature=SIGNATURE, data=b"data",
    )  # fmt: skip


WANT = pb.Want(sha256=HASH, missing=RANGES, at=place())
CHUNK = pb.Chunk(sha256=HASH, index=2, data=b"x" * 100, at=place())
SECAGG = pb.SecAgg(at=place(), data=b"envelope")

CLIENT = {
    "hello": pb.Hello(client=7, version_min=1, version_max=2, nonce=NONCE, signature=SIGNATURE),
    "ready": pb.Ready(at=place()),
    "offer": offer(),
    "want": WANT,
    "chunk": CHUNK,
    "secagg": SECAGG,
    "decline": pb.Decline(at=place(), reason="POLICY", field="epsilon", asked="9", allowed="4"),
    "pong": pb.Pong(nonce=5),
    "renew": pb.Renew(request=b"r", identity_key=HASH, signature=SIGNATURE, proof=SIGNATURE),
    "bye": pb.Bye(reason="stopped"),
    "ask": pb.Ask(),
}
SERVER = {
    "challenge": pb.Challenge(nonce=NONCE, server="agg-1", version_min=1, version_max=1),
    "welcome": pb.Welcome(
        version=1, roster_epoch=4, roster_sha256=HASH, roster=b"document", heartbeat_ms=15_000,
        stall_ms=30_000, time_ms=1_700_000_000_000, max_payload=2**34,
        held=[pb.Held(at=place(), phase="train", kind=pb.UPDATE, sha256=HASH, chunks=RANGES, complete=True)],
    ),
    "task": pb.Task(
        at=place(), work=pb.TRAIN, purpose="study-12", algorithm="fedavg", settings=b"{}", schema_sha256=HASH,
        model_sha256=HASH, message_sha256=HASH, secure_sum=b"config", remaining_ms=430_000,
    ),
    "offer": offer(),
    "want": WANT,
    "chunk": CHUNK,
    "secagg": SECAGG,
    "outcome": pb.Outcome(at=place(), code=3, reason="NONFINITE", phase="train", hint="lower the rate"),
    "retry_at": pb.RetryAt(delay_ms=100, reason="BUSY", at=place()),
    "ping": pb.Ping(nonce=5),
    "renewed": pb.Renewed(certificate=b"c", roster_epoch=5, roster_sha256=HASH, roster=b"document"),
    "goodbye": pb.Goodbye(code=14, reason="DRAINING", hint="back soon", delay_ms=1000),
}  # fmt: skip
ENROL_REQUEST = pb.EnrolRequest(token=HASH, request=b"r", identity_key=HASH, proof=SIGNATURE, name="ward 7")
ENROL_REPLY = pb.EnrolReply(
    client=7, certificate=b"c", authority=b"a", roster_epoch=4, roster_sha256=HASH, roster=b"document"
)


def client_frames() -> list[pb.ClientFrame]:
    return [pb.ClientFrame(seq=1, **{name: body}) for name, body in CLIENT.items()]  # type: ignore[arg-type]


def server_frames() -> list[pb.ServerFrame]:
    return [pb.ServerFrame(seq=1, **{name: body}) for name, body in SERVER.items()]  # type: ignore[arg-type]


def damage(whole: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, cut out or put in."""
    data = bytearray(whole)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data) or 1)
        match draw.randrange(4):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[at : at + draw.randint(1, 40)]
            case 2:
                data[at:at] = draw.randbytes(draw.randint(1, 40))
            case _:
                data[at : at + 4] = draw.choice(
                    [bytes(4), b"\xff" * 4, b"\x80\x80\x80\x01", b"\x08\x08\x08\x08"]
                )
    return bytes(data)
