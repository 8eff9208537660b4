"""Canonical bytes of the secure sum, and the one error of all its checks.

What is hashed or signed is always built here. An integer is eight bytes, big-endian; a field is a four-byte
length and its bytes; a list is a four-byte count and its items; a struct is a tag and its fields in order, so
no two lists of fields share an encoding. A reader takes nothing else, and allocates nothing that the size of
what it was given has not paid for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from struct import Struct
from typing import Any, Final, Self

import numpy as np

from mycelia.engine.errors import ProtocolError

__all__ = [
    "HASH_BYTES", "HEAD_BYTES", "INTEGER_BYTES", "MAX_TEXT", "PHASES", "SERVER", "Field", "Reader", "Reason",
    "SecureSumError", "digest", "list_bytes", "struct",
]  # fmt: skip

PHASES: Final = ("advertise", "share", "masked", "agree", "unmask")
SERVER: Final = 0
"""The sender of the server's messages; clients count from 1."""
HASH_BYTES: Final = 32
MAX_TEXT: Final = 256
"""Bytes of any text, in UTF-8."""

_HEAD: Final = Struct(">I")
_INTEGER: Final = Struct(">IQ")
_INTEGERS: Final = np.dtype([("size", ">u4"), ("value", ">u8")])
_MANY: Final = 8
"""Integers from which on an array is faster than one after the other."""
HEAD_BYTES: Final = _HEAD.size
"""What a length or a count takes."""
INTEGER_BYTES: Final = _INTEGER.size
"""What an integer takes, its length included."""

Field = int | bytes | str | Sequence["Field"]


class Reason(StrEnum):
    """Why a message was refused, a client left or a round ended; `FRAME` is bytes that are no message."""

    BAD_SIGNATURE = "BAD_SIGNATURE"
    REPLAY = "REPLAY"
    ALREADY_RELEASED = "ALREADY_RELEASED"
    MODEL_MISMATCH = "MODEL_MISMATCH"
    OVERFLOW = "OVERFLOW"
    WEAK_PARAMETERS = "WEAK_PARAMETERS"
    POLICY = "POLICY"
    BAD_ROLL = "BAD_ROLL"
    SPLIT_VIEW = "SPLIT_VIEW"
    BAD_KEY = "BAD_KEY"
    BAD_SHARE = "BAD_SHARE"
    LATE = "LATE"
    EQUIVOCATION = "EQUIVOCATION"
    INCONSISTENT_SURVIVORS = "INCONSISTENT_SURVIVORS"
    COHORT_TOO_SMALL = "COHORT_TOO_SMALL"
    UNMASK_SHORT = "UNMASK_SHORT"
    SHARE_MISMATCH = "SHARE_MISMATCH"
    SUM_OUT_OF_RANGE = "SUM_OUT_OF_RANGE"
    EMPTY_WEIGHT = "EMPTY_WEIGHT"
    BAD_UPLOAD = "BAD_UPLOAD"
    WRONG_PHASE = "WRONG_PHASE"
    SESSION = "SESSION"
    INVALID_INPUT = "INVALID_INPUT"
    JOURNAL = "JOURNAL"
    BUDGET = "BUDGET"
    CONFIG = "CONFIG"
    FRAME = "FRAME"


class SecureSumError(ProtocolError):
    """A check of the secure sum failed; whoever raises it stops there.

    Args:
        reason: the code that travels and that callers branch on.
        found: what was found, as a sentence.
        rule: the rule it breaks.
        fix: what the reader can do about it.
        who: whom or what it concerns; by default the client, then the owner.
        phase: one of `PHASES`, or "".
        have: how many there were (clients, shares, bits).
        need: how many there had to be.
        owner: the client whose secret or share it is about.
        client: the client who sent, held or complained.
        field: the setting that a policy refuses.
        asked: its value in the round.
        allowed: what the policy allows.

    Attributes:
        reason: as given, like all of the above.
    """

    def __init__(
        self,
        reason: Reason,
        found: str,
        *,
        rule: str = "",
        fix: str = "",
        who: str = "",
        phase: str = "",
        have: int | None = None,
        need: int | None = None,
        owner: int | None = None,
        client: int | None = None,
        field: str = "",
        asked: object = "",
        allowed: object = "",
    ) -> None:
        self.reason, self.phase = reason, phase
        self.have, self.need, self.owner, self.client = have, need, owner, client
        self.field, self.asked, self.allowed = field, str(asked), str(allowed)
        self._numbers: dict[str, Any] = {
            "phase": phase, "have": have, "need": need, "owner": owner, "client": client, "field": field,
            "asked": self.asked, "allowed": self.allowed,
        }  # fmt: skip
        self._sentence = found
        if not who:
            who = next(
                (f"{name} {self._numbers[name]}" for name in ("client", "owner") if self._numbers[name]), ""
            )
        told = (f"{name} {value}" for name, value in self._numbers.items() if value not in (None, ""))
        aside = ", ".join(text for text in told if text != who)
        super().__init__(f"{reason}: {found}{f' ({aside})' if aside else ''}", rule=rule, fix=fix, who=who)

    def without_frames(self) -> Self:
        """The same error, which no longer holds on to the frames it came through, and the secrets in them."""
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild across process boundaries with the same numbers."""
        arguments = {"rule": self.rule, "fix": self.fix, "who": self.who, **self._numbers}
        return (_rebuild, (type(self), self.reason, self._sentence, arguments))


def _rebuild(
    cls: type[SecureSumError], reason: Reason, found: str, arguments: dict[str, Any]
) -> SecureSumError:
    return cls(reason, found, **arguments)


def struct(tag: str, *values: Field) -> bytes:
    """Canonical bytes of a tag and its fields.

    >>> struct("ab", [1], "c").hex(" ", -4)
    '00000002 61620000 00010000 00080000 00000000 00010000 000163'

    Args:
        tag: what the fields are, so that the bytes of one thing are never those of another.
        values: integers in [0, 2**64), bytes, text, or lists and tuples of these.

    Raises:
        ValueError: an integer out of range, or text that UTF-8 cannot hold.
        TypeError: a field of another type.
    """
    return b"".join([_field(tag), *map(_field, values)])


def digest(tag: str, *values: Field) -> bytes:
    """SHA-256 of `struct(tag, *values)`, 32 bytes."""
    return hashlib.sha256(struct(tag, *values)).digest()


def _field(value: Field) -> bytes:
    if isinstance(value, int):
        if not 0 <= value < 2**64:
            raise ValueError(f"{value} is not in [0, 2**64)")
        return _INTEGER.pack(8, value)
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return _HEAD.pack(len(value)) + value
    if isinstance(value, (list, tuple)):  # no other sequence: a bytearray would pass for a list of integers
        return _HEAD.pack(len(value)) + _items(value)
    raise TypeError(f"a field of type {type(value).__name__}")


def _items(values: Sequence[Field]) -> bytes:
    blobs = [value for value in values if isinstance(value, bytes)]
    if blobs and len(blobs) == len(values) and len({*map(len, blobs)}) == 1:  # long lists are of this kind
        head = _HEAD.pack(len(blobs[0]))
        return head + head.join(blobs)
    if len(values) >= _MANY and {*map(type, values)} == {int}:  # and of this kind
        if not 0 <= min(values) <= max(values) < 2**64:  # type: ignore[type-var, operator]
            raise ValueError(f"{min(values)} to {max(values)} are not all in [0, 2**64)")  # type: ignore[type-var]
        items = np.full(len(values), 8, _INTEGERS)
        items["value"] = np.array(values, np.uint64)
        return items.tobytes()
    return b"".join(map(_field, values))


class Reader:
    """Takes canonical bytes apart, in order; what does not fit is a `SecureSumError`.

    Args:
        data: the bytes of one struct.
        tag: the tag it must have.
        limit: the most bytes it may have.
        reason: the code of the errors.

    Raises:
        SecureSumError: too long, or another tag.
    """

    def __init__(self, data: bytes, tag: str, limit: int, reason: Reason = Reason.FRAME) -> None:
        self._data, self._at, self._tag, self._reason = bytes(data), 0, tag, reason
        if len(data) > limit:
            raise self.error(f"{len(data)} bytes", rule=f"at most {limit}")
        if self.blob(limit) != tag.encode():
            raise self.error("another tag")

    def error(self, found: str, *, rule: str = "the canonical bytes of this message") -> SecureSumError:
        """The error to raise about these bytes."""
        return SecureSumError(self._reason, found, rule=rule, who=self._tag)

    def integer(self) -> int:
        """One integer."""
        size, value = _INTEGER.unpack(self._take(_INTEGER.size))
        if size != 8:
            raise self.error("an integer that has not 8 bytes")
        return int(value)

    def blob(self, limit: int, *, exact: bool = False) -> bytes:
        """Bytes, at most `limit` of them, or exactly so many."""
        size = self._head()
        if size > limit or (exact and size != limit):
            raise self.error(f"a field of {size} bytes", rule=f"{'exactly' if exact else 'at most'} {limit}")
        return self._take(size)

    def hash(self) -> bytes:
        """Exactly 32 bytes."""
        return self.blob(HASH_BYTES, exact=True)

    def text(self) -> str:
        """UTF-8 text of at most `MAX_TEXT` bytes."""
        try:
            return self.blob(MAX_TEXT).decode()
        except UnicodeDecodeError as error:
            raise self.error("text that is not UTF-8") from error

    def count(self, limit: int, least: int) -> int:
        """The count of a list whose items take at least `least` bytes each."""
        count = self._head()
        if count > limit:
            raise self.error(f"a list of {count}", rule=f"at most {limit} items")
        if count * least > len(self._data) - self._at:
            raise self.error(f"a list of {count}, and {len(self._data) - self._at} bytes left")
        return count

    def integers(self, limit: int) -> tuple[int, ...]:
        """A list of at most `limit` integers."""
        count = self.count(limit, _INTEGER.size)
        items = np.frombuffer(self._take(count * _INTEGERS.itemsize), _INTEGERS)
        if (items["size"] != 8).any():
            raise self.error("an integer that has not 8 bytes")
        return tuple(items["value"].tolist())

    def blobs(self, size: int, limit: int) -> tuple[bytes, ...]:
        """A list of at most `limit` fields of `size` bytes each."""
        count = self.count(limit, _HEAD.size + size)
        dtype = np.dtype([("size", ">u4"), ("value", f"V{size}")])
        items = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if (items["size"] != size).any():
            raise self.error("a list item of another size", rule=f"{size} bytes each")
        return tuple(items["value"].tolist())

    def end(self) -> None:
        """Refuse what is left."""
        if self._at != len(self._data):
            raise self.error(f"{len(self._data) - self._at} bytes too many")

    def _head(self) -> int:
        size: int
        (size,) = _HEAD.unpack(self._take(_HEAD.size))
        return size

    def _take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if len(part) != size:
            raise self.error("the bytes end early")
        self._at += size
        return part


def list_bytes(count: int, size: int) -> int:
    """What a list of fields of one size takes."""
    return _HEAD.size + count * (_HEAD.size + size)
