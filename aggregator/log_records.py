"""The records of a round log, and how each is written as bytes: JSON in one spelling, hashes in hex.

A round leaves OPEN, ISSUED, ACCEPTED …, SNAPSHOT, FROZEN, CHARGED, MERGED and PUBLISHED, or FAILED. Where the
sum is a secure one, the records of its machine stand in the place of ACCEPTED to CHARGED, as they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final

from mycelia.engine.errors import DataError
from mycelia.privacy.secagg.events import Record

__all__ = [
    "Accepted", "Charged", "Entry", "Failed", "Frozen", "Issued", "Machine", "Merged", "Open", "Published",
    "Snapshot", "decode", "encode", "is_machine",
]  # fmt: skip

_MACHINE: Final = "SA1/"
_HASH_BYTES: Final = 32
_MOST: Final = 2**63
_ATTEMPT: Final = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class Open:
    """A round begins.

    Attributes:
        round: its number, from 0.
        attempt: the first it makes, from 0.
        clients: whom it may ask, in the order of the draw.
        model_sha256: of the model that is sent, 32 bytes.
        config_sha256: of the configuration, 32 bytes.
        opened_at: Unix time when its budget began; attempts that share a budget say the same.
        budget_s: seconds.
        secure: whether a secure sum comes of it.
        private: whether its release is charged before it is merged.
        carried: stragglers of the round before, and the attempt they were asked in.
    """

    KIND: ClassVar[str] = "OPEN"
    round: int
    attempt: int
    clients: tuple[int, ...]
    model_sha256: bytes
    config_sha256: bytes
    opened_at: float
    budget_s: float
    secure: bool = False
    private: bool = False
    carried: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Issued:
    """The task is about to be sent to these clients.

    Attributes:
        attempt: that their updates will name.
        clients: increasing or not, each once.
    """

    KIND: ClassVar[str] = "ISSUED"
    attempt: int
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Accepted:
    """An update was verified, and lies in the spool or the sum.

    Attributes:
        attempt: it names.
        client: it came from.
        sha256: of its payload, 32 bytes.
    """

    KIND: ClassVar[str] = "ACCEPTED"
    attempt: int
    client: int
    sha256: bytes


@dataclass(frozen=True)
class Snapshot:
    """The sum of these clients' updates is a blob.

    Attributes:
        clients: increasing.
        sha256: of the blob, 32 bytes.
    """

    KIND: ClassVar[str] = "SNAPSHOT"
    clients: tuple[int, ...]
    sha256: bytes


@dataclass(frozen=True)
class Frozen:
    """The round is about these clients and no others.

    Attributes:
        clients: increasing; none after an empty draw.
        sha256: of the snapshot with their sum, 32 bytes; None if there are none.
    """

    KIND: ClassVar[str] = "FROZEN"
    clients: tuple[int, ...]
    sha256: bytes | None


@dataclass(frozen=True)
class Charged:
    """The release is in the privacy ledger.

    Attributes:
        release: hash of its entry there, 32 bytes.
    """

    KIND: ClassVar[str] = "CHARGED"
    release: bytes


@dataclass(frozen=True)
class Merged:
    """The new model and the state that goes with it are blobs.

    Attributes:
        model_sha256: of the model, 32 bytes.
        state_sha256: of the state: model, optimiser, selector, accountant, all or nothing; 32 bytes.
    """

    KIND: ClassVar[str] = "MERGED"
    model_sha256: bytes
    state_sha256: bytes


@dataclass(frozen=True)
class Published:
    """The merged model is the run's model."""

    KIND: ClassVar[str] = "PUBLISHED"


@dataclass(frozen=True)
class Failed:
    """The round ended without a new model.

    Attributes:
        reason: code of `effects.AbortReason`.
        cause: for people; of a device, so anything may stand in it.
    """

    KIND: ClassVar[str] = "FAILED"
    reason: str
    cause: str = ""


@dataclass(frozen=True)
class Machine:
    """A record of a secure sum.

    Attributes:
        attempt: of the session.
        record: as the machine gave it.
    """

    attempt: int
    record: Record = field(repr=False)

    @property
    def kind(self) -> str:
        """The machine's own kind, such as U2."""
        return self.record.kind


Entry = Open | Issued | Accepted | Snapshot | Frozen | Charged | Merged | Published | Failed | Machine

_KINDS: Final = {
    kind.KIND: kind for kind in (Open, Issued, Accepted, Snapshot, Frozen, Charged, Merged, Published, Failed)
}


def encode(entry: Entry) -> tuple[str, bytes]:
    """The kind of a record, and its body.

    Raises:
        DataError: a field of another kind or out of range.
    """
    if isinstance(entry, Machine):
        if type(entry.attempt) is not int or not 0 <= entry.attempt < _MOST:
            raise DataError(f"attempt {entry.attempt}", rule="a whole number from 0", who="round log")
        return f"{_MACHINE}{entry.attempt}/{entry.kind}", entry.record.body
    values = {item.name: _to_json(getattr(entry, item.name)) for item in fields(entry)}
    for name, value in values.items():
        if not _fits(entry.KIND, name, value):
            raise DataError(
                f"{name} is {value!r}"[:200],
                rule="numbers from 0, times that are finite, hashes of 32 bytes, clients once each",
                who=f"record {entry.KIND}",
            )
    return entry.KIND, _spell(values)


def decode(kind: str, body: bytes) -> Entry:
    """The record of a kind and a body.

    Raises:
        DataError: they are of no record.
    """
    if kind.startswith(_MACHINE):
        attempt, _, name = kind.removeprefix(_MACHINE).partition("/")
        if not _ATTEMPT.fullmatch(attempt) or not name:
            raise _malformed(kind)
        return Machine(int(attempt), Record(name, body))
    wanted = _KINDS.get(kind)
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _malformed(kind) from error
    if wanted is None or not isinstance(values, dict) or _spell(values) != body:
        raise _malformed(kind)
    if values.keys() != {item.name for item in fields(wanted)}:
        raise _malformed(kind)
    if not all(_fits(kind, name, value) for name, value in values.items()):
        raise _malformed(kind)
    return wanted(**{name: _from_json(name, value) for name, value in values.items()})


def is_machine(kind: str) -> bool:
    """Whether a kind is that of a record of a secure sum."""
    return kind.startswith(_MACHINE)


def _spell(values: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise _malformed("of this") from error


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return [_to_json(item) for item in value] if isinstance(value, tuple) else value


def _from_json(name: str, value: Any) -> Any:
    if isinstance(value, str) and name not in ("reason", "cause"):
        return bytes.fromhex(value)
    return tuple(_from_json(name, item) for item in value) if isinstance(value, list) else value


def _fits(kind: str, name: str, value: Any) -> bool:
    match name:
        case "round" | "attempt" | "client":
            return _is_whole(value)
        case "clients":
            whole = isinstance(value, list) and all(map(_is_whole, value))
            ordered = kind in ("OPEN", "ISSUED") or value == sorted(value)
            return whole and ordered and len(set(value)) == len(value)
        case "carried":
            pairs = isinstance(value, list) and all(
                isinstance(pair, list) and len(pair) == 2 for pair in value
            )
            return pairs and all(_is_whole(number) for pair in value for number in pair)
        case "opened_at":
            return type(value) is float and math.isfinite(value)
        case "budget_s":
            return type(value) is float and math.isfinite(value) and value > 0
        case "secure" | "private":
            return type(value) is bool
        case "reason" | "cause":
            return type(value) is str
        case _:
            return (value is None and kind == "FROZEN") or _is_hash(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_hash(value: Any) -> bool:
    if type(value) is not str or len(value) != 2 * _HASH_BYTES:
        return False
    try:
        return bytes.fromhex(value).hex() == value
    except ValueError:
        return False


def _malformed(kind: str) -> DataError:
    return DataError(f"bytes that are no record {kind[:40]}", rule="what `encode` writes", who="round log")
