"""Frames as bytes and back, with every limit checked on the bytes before a message is built from them.

A scan walks the encoding with a table made from the message types: it knows the fields, how long each may be,
which must be there, and how deep they nest. It copies nothing and stops at the first thing that is wrong, so
what protobuf's own parser sees is always small and well formed. What is sent passes the same scan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.problems import (
    ENDS_STREAM,
    MAX_TEXT,
    STATUS,
    FrameError,
    Problem,
    Reason,
)

__all__ = [
    "ENDS_STREAM", "MAX_CHUNK", "MAX_DEPTH", "MAX_FRAME", "MAX_INLINE", "MAX_LIST", "MAX_TEXT", "STATUS",
    "ClientFrame", "FrameError", "Problem", "Reason", "Sequence", "ServerFrame", "decode_client",
    "decode_enrol_reply", "decode_enrol_request", "decode_server", "encode", "encode_client", "encode_server",
]  # fmt: skip

ClientFrame = pb.ClientFrame
ServerFrame = pb.ServerFrame

MAX_CHUNK: Final = 2**20
"""Bytes of a chunk, of a document or of an envelope inside a frame."""
MAX_FRAME: Final = MAX_CHUNK + 2**16
"""Bytes of one gRPC message, which holds one frame or more; its receive limit on both sides."""
MAX_INLINE: Final = 2**13
"""Bytes of a payload that travels with its offer."""
MAX_LIST: Final = 2**15
MAX_DEPTH: Final = 8

_HASH, _NONCE, _KEY, _TOKEN, _SIGNATURE = (32, 32), (32, 32), (32, 32), (32, 32), (64, 64)
_PERHAPS: Final = 0
_DOCUMENT: Final = (_PERHAPS, MAX_CHUNK)
_REQUEST: Final = (1, 2**14)
_CERTIFICATE: Final = (1, 2**16)

# Bytes that each field of type `bytes` may have: least (0: the field may be absent) and most.
_BYTES: Final[Mapping[str, tuple[int, int]]] = {
    "Challenge.nonce": _NONCE,
    "Hello.nonce": _NONCE,
    "Hello.signature": _SIGNATURE,
    "Welcome.roster_sha256": _HASH,
    "Welcome.roster": _DOCUMENT,
    "Held.sha256": (_PERHAPS, 32),
    "Task.settings": (1, 2**16),
    "Task.schema_sha256": _HASH,
    "Task.model_sha256": _HASH,
    "Task.message_sha256": (_PERHAPS, 32),
    "Task.secure_sum": (_PERHAPS, 2**15),
    "SecAgg.data": (1, MAX_CHUNK),
    "Offer.sha256": _HASH,
    "Offer.chunk_sha256": _HASH,
    "Offer.schema_sha256": (_PERHAPS, 32),
    "Offer.header": (_PERHAPS, 2**14),
    "Offer.signature": (_PERHAPS, 64),
    "Offer.data": (_PERHAPS, MAX_INLINE),
    "Want.sha256": _HASH,
    "Chunk.sha256": _HASH,
    "Chunk.data": (1, MAX_CHUNK),
    "Renew.request": _REQUEST,
    "Renew.identity_key": _KEY,
    "Renew.signature": _SIGNATURE,
    "Renew.proof": _SIGNATURE,
    "Renewed.certificate": _CERTIFICATE,
    "Renewed.roster_sha256": _HASH,
    "Renewed.roster": _DOCUMENT,
    "EnrolRequest.token": (_PERHAPS, 32),
    "EnrolRequest.request": _REQUEST,
    "EnrolRequest.identity_key": _KEY,
    "EnrolRequest.proof": _SIGNATURE,
    "EnrolReply.certificate": (_PERHAPS, 2**16),
    "EnrolReply.authority": (_PERHAPS, 2**16),
    "EnrolReply.roster_sha256": (_PERHAPS, 32),
    "EnrolReply.roster": _DOCUMENT,
}
# Sizes that fields of bytes have if they are there at all.
_EXACT: Final = {
    "Held.sha256", "Task.message_sha256", "Offer.schema_sha256", "Offer.signature", "EnrolRequest.token",
    "EnrolReply.roster_sha256",
}  # fmt: skip
# What must be there besides bytes with a least size; zero is not there.
_REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "ClientFrames": ("frames",),
    "ServerFrames": ("frames",),
    "ClientFrame": ("seq",),
    "ServerFrame": ("seq",),
    "Position": ("run",),
    "Challenge": ("server", "version_min", "version_max"),
    "Hello": ("client", "version_min", "version_max"),
    "Welcome": ("version", "roster_epoch", "heartbeat_ms", "stall_ms", "time_ms", "max_payload"),
    "Held": ("at", "phase"),
    "Task": ("at", "work", "purpose", "algorithm"),
    "Ready": ("at",),
    "Decline": ("at", "reason"),
    "Outcome": ("at",),
    "SecAgg": ("at",),
    "Offer": ("size", "chunk_size", "chunk_sha256", "kind"),
    "Range": ("count",),
    "Renewed": ("roster_epoch",),
    "RetryAt": ("reason",),
}

_VARINT, _LENGTH = 0, 2
_U64, _U32 = 2**64, 2**32
_INTEGERS: Final = {FieldDescriptor.TYPE_UINT64: _U64, FieldDescriptor.TYPE_UINT32: _U32}


@dataclass(frozen=True)
class _Field:
    """How one field is encoded; of the four kinds of content one is set.

    Attributes:
        name: for messages.
        bit: its own bit in what has been seen.
        repeated: whether it may come more than once.
        below: integers: what they are less than.
        choices: enums: the numbers it may have; 0 stands for "not there".
        sizes: bytes and text: least and most of them.
        exact: whether the most is also the least.
        text: whether the bytes are UTF-8.
        shape: messages: what is inside.
    """

    name: str
    bit: int
    repeated: bool
    below: int = 0
    choices: frozenset[int] | None = None
    sizes: tuple[int, int] | None = None
    exact: bool = False
    text: bool = False
    shape: _Shape | None = None


@dataclass(frozen=True)
class _Shape:
    """A message type.

    Attributes:
        name: for messages.
        fields: by tag, which is number and wire type.
        required: bits of the fields that must be there.
        body: bits of the oneof, of which exactly one is there; 0: there is no oneof.
        bits: name of each bit.
    """

    name: str
    fields: Mapping[int, _Field]
    required: int
    body: int
    bits: Mapping[int, str] = field(repr=False)


@cache
def _shape(message: str) -> _Shape:
    descriptor = pb.DESCRIPTOR.message_types_by_name[message]
    fields: dict[int, _Field] = {}
    bits: dict[int, str] = {}
    required = body = 0
    for place, item in enumerate(descriptor.fields):
        name, bit = f"{message}.{item.name}", 1 << place
        bits[bit] = item.name
        made = _field(item, name, bit)
        if item.containing_oneof is not None:
            body |= bit
        if item.name in _REQUIRED.get(message, ()) or (made.sizes and made.sizes[0]):
            required |= bit
        fields[item.number << 3 | (_VARINT if made.below or made.choices else _LENGTH)] = made
    return _Shape(message, fields, required, body, bits)


def _field(item: FieldDescriptor, name: str, bit: int) -> _Field:
    repeated = bool(item.is_repeated)
    if repeated and item.type not in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE):
        raise TypeError(f"{name} is a list of a type whose items the scan cannot count")
    if item.type in _INTEGERS:
        return _Field(name, bit, repeated, below=_INTEGERS[item.type])
    if item.type == FieldDescriptor.TYPE_BOOL:
        return _Field(name, bit, repeated, below=2)
    if item.type == FieldDescriptor.TYPE_ENUM and item.enum_type is not None:
        return _Field(name, bit, repeated, choices=frozenset(item.enum_type.values_by_number) - {0})
    if item.type == FieldDescriptor.TYPE_STRING:
        return _Field(name, bit, repeated, sizes=(_PERHAPS, MAX_TEXT), text=True)
    if item.type == FieldDescriptor.TYPE_BYTES:
        return _Field(name, bit, repeated, sizes=_BYTES[name], exact=name in _EXACT)
    if item.type == FieldDescriptor.TYPE_MESSAGE and item.message_type is not None:
        return _Field(name, bit, repeated, shape=_shape(item.message_type.name))
    raise TypeError(f"{name} has a type without limits")


def _refused(found: str, rule: str) -> FrameError:
    return FrameError(Reason.FRAME, found, rule=rule, who="frame")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= _U64:
                break
            return value, at
        shift += 7
    raise _refused("a number that has no end", "at most ten bytes, below 2**64")


def _scan(data: bytes, at: int, end: int, shape: _Shape, depth: int) -> None:  # noqa: PLR0912
    if depth > MAX_DEPTH:
        raise _refused(f"{shape.name} nested {depth} deep", f"at most {MAX_DEPTH}")
    seen = 0
    counts: dict[int, int] = {}
    while at < end:
        tag, at = _varint(data, at, end)
        item = shape.fields.get(tag)
        if item is None:
            raise _refused(
                f"field {tag >> 3} of type {tag & 7} in {shape.name}", "the fields of this version, no others"
            )
        if item.repeated:
            counts[item.bit] = counts.get(item.bit, 0) + 1
            if counts[item.bit] > MAX_LIST:
                raise _refused(f"more than {MAX_LIST} of {item.name}", f"lists of at most {MAX_LIST}")
        elif seen & item.bit or (shape.body & item.bit and seen & shape.body):
            raise _refused(f"{item.name} after another one", "one of a kind")
        number, at = _varint(data, at, end)
        if item.below or item.choices:
            if item.choices is not None and number not in item.choices:
                raise _refused(f"{item.name} is {number}", f"one of {sorted(item.choices)}")
            if item.below and number >= item.below:
                raise _refused(f"{item.name} is {number}", f"below {item.below}")
            seen |= item.bit if number else 0
            continue
        if number > end - at:
            raise _refused(f"{item.name} of {number} bytes, {end - at} are left", "a length that holds")
        if item.sizes is not None:
            low, high = item.sizes
            if not low <= number <= high or (item.exact and 0 < number < high):
                rule = f"exactly {high}" if low == high or item.exact else f"{low} to {high} bytes"
                raise _refused(f"{item.name} of {number} bytes", rule)
            if item.text:
                _check_text(data[at : at + number], item.name)
            seen |= item.bit if number else 0
        elif item.shape is not None:
            _scan(data, at, at + number, item.shape, depth + 1)
            seen |= item.bit
        at += number
    missing = shape.required & ~seen
    if missing:
        names = [name for bit, name in shape.bits.items() if bit & missing]
        raise _refused(f"{shape.name} without {', '.join(names)}", "all of them")
    if shape.body and not seen & shape.body:
        raise _refused(f"an empty {shape.name}", "a frame holds one message")


def _check_text(data: bytes, name: str) -> None:
    try:
        data.decode()
    except UnicodeDecodeError:
        raise _refused(f"{name} is not UTF-8", "text is UTF-8") from None


_Frame = TypeVar("_Frame", bound=Message)


def _decode(data: bytes, message: type[_Frame]) -> _Frame:
    _check(data, message.DESCRIPTOR.name)
    frame = message()
    try:
        frame.ParseFromString(data)
    except DecodeError as error:  # what the scan lets through is well formed
        raise _refused(f"bytes that are no {message.DESCRIPTOR.name}", "protobuf's encoding") from error
    return frame


def _check(data: bytes, message: str) -> None:
    if len(data) > MAX_FRAME:
        raise FrameError(
            Reason.TOO_LARGE, f"a frame of {len(data)} bytes", rule=f"at most {MAX_FRAME}", who="frame"
        )
    _scan(data, 0, len(data), _shape(message), 1)


def decode_client(data: bytes) -> pb.ClientFrames:
    """Frames from a device, at least one.

    Args:
        data: the bytes of one gRPC message.

    Raises:
        FrameError: `TOO_LARGE` above `MAX_FRAME`; `FRAME`: bytes that are no frames, a field that is unknown,
            missing, too long or stands twice, a number out of range, an enum without a meaning.
    """
    return _decode(data, pb.ClientFrames)


def decode_server(data: bytes) -> pb.ServerFrames:
    """Frames from the server; errors as in `decode_client`."""
    return _decode(data, pb.ServerFrames)


def decode_enrol_request(data: bytes) -> pb.EnrolRequest:
    """A request for a certificate; errors as in `decode_client`."""
    return _decode(data, pb.EnrolRequest)


def decode_enrol_reply(data: bytes) -> pb.EnrolReply:
    """The answer to such a request; errors as in `decode_client`."""
    return _decode(data, pb.EnrolReply)


def encode_client(*frames: pb.ClientFrame) -> bytes:
    """The bytes of a device's frames; errors as in `encode`."""
    return encode(pb.ClientFrames(frames=frames))


def encode_server(*frames: pb.ServerFrame) -> bytes:
    """The bytes of a server's frames; errors as in `encode`."""
    return encode(pb.ServerFrames(frames=frames))


def encode(frame: pb.ClientFrames | pb.ServerFrames | pb.EnrolRequest | pb.EnrolReply) -> bytes:
    """The bytes of a message, which the decoder of the other side takes.

    Raises:
        FrameError: it would not: see `decode_client`.
    """
    data: bytes = frame.SerializeToString()
    _check(data, frame.DESCRIPTOR.name)
    return data


class Sequence:
    """The count of frames in one direction of a stream, from 1."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """The number of the next frame to send."""
        self._last += 1
        return self._last

    def check(self, seq: int) -> None:
        """Take the number of a frame that came.

        Raises:
            FrameError: a gap or a repeat.
        """
        if seq != self._last + 1:
            raise _refused(f"frame {seq} after {self._last}", "frames count up by one")
        self._last = seq
