"""The bytes of payloads: tensors as safetensors in the order of a Schema, masked vectors as packed residues.

A header is looked at before anything is made from it: its length, how deep it nests, and then every name,
shape, dtype and offset against what the Schema says. There is nothing in a payload to run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.offers import Buffer
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.schema import Entry, Role, Schema
from mycelia.engine.types import Tensors
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.masks import Words, add_packed, packed_size
from mycelia.privacy.secagg.round_config import RoundConfig

__all__ = [
    "BLOCK_BYTES", "MAX_HEADER", "MAX_NAME", "MAX_RANK", "MAX_TENSORS", "Layout", "Place", "TensorsCheck",
    "add_masked", "block_of", "check_finite", "check_masked_size", "check_tensors", "check_tensors_size",
    "expected", "non_finite", "read_tensors", "write_tensors",
]  # fmt: skip

MAX_HEADER: Final = 2**20
MAX_TENSORS: Final = 10_000
MAX_NAME: Final = 256
MAX_RANK: Final = 8
BLOCK_BYTES: Final = 2**20
"""Bytes of a payload that are worked on at a time."""

_MAX_DEPTH: Final = 4
_HEAD: Final = Struct("<Q")
_WHO: Final = "payload"

# dtype: its name in safetensors, its bits as NumPy has them, and those that are all set in what is no number
_DTYPES: Final[Mapping[torch.dtype, tuple[str, str, int]]] = {
    torch.float64: ("F64", "<u8", 0x7FF0_0000_0000_0000),
    torch.float32: ("F32", "<u4", 0x7F80_0000),
    torch.float16: ("F16", "<u2", 0x7C00),
    torch.bfloat16: ("BF16", "<u2", 0x7F80),
    torch.int64: ("I64", "<i8", 0),
    torch.int32: ("I32", "<i4", 0),
    torch.int16: ("I16", "<i2", 0),
    torch.int8: ("I8", "<i1", 0),
    torch.uint8: ("U8", "<u1", 0),
    torch.bool: ("BOOL", "<u1", 0),
}
_NATIVE: Final = {
    torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<i2", torch.bool: "?",
}  # fmt: skip
_KEYS: Final = frozenset({"dtype", "shape", "data_offsets"})
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_BRACKET: Final = re.compile(rb"[\[\]{}]")


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Attributes:
        entry: the tensor.
        start: its first byte in the payload.
        size: bytes.
    """

    entry: Entry
    start: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a payload lie.

    Attributes:
        places: of each tensor, in order.
        start: where the header ends and the tensors begin.
        size: bytes of the payload.
    """

    places: tuple[Place, ...]
    start: int
    size: int


def expected(schema: Schema, roles: Iterable[Role], more: Iterable[Entry] = ()) -> tuple[Entry, ...]:
    """The tensors of a payload, in order.

    Args:
        schema: of the model.
        roles: those that are sent.
        more: what an algorithm sends beside the model; comes last.

    Raises:
        ConfigError: more tensors, longer names, higher ranks or other dtypes than travel, or a name twice.
    """
    entries = (*schema.of(*roles), *more)
    names = [entry.name for entry in entries]
    wrong = next(
        (
            entry
            for entry in entries
            if entry.dtype not in _DTYPES
            or len(entry.shape) > MAX_RANK
            or not 0 < len(entry.name.encode()) <= MAX_NAME
            or entry.name == "__metadata__"
        ),
        None,
    )
    if wrong is not None:
        raise ConfigError(
            f"tensor {wrong.name[:MAX_NAME]!r} of {wrong.dtype} {list(wrong.shape)}",
            rule=f"names of 1 to {MAX_NAME} bytes, at most {MAX_RANK} dimensions, one of "
            + ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES),
            who=_WHO,
        )
    if not 0 < len(names) <= MAX_TENSORS or len(set(names)) != len(names):
        raise ConfigError(
            f"{len(names)} tensors, {len(names) - len(set(names))} of them twice",
            rule=f"1 to {MAX_TENSORS} tensors, each name once",
            who=_WHO,
        )
    return entries


def check_tensors_size(size: int, entries: Iterable[Entry]) -> None:
    """Refuse an offer whose size cannot be that of these tensors, before any of it is wanted.

    Raises:
        Problem: `BAD_PAYLOAD`.
    """
    data = sum(map(_bytes_of, entries))
    if not data + _HEAD.size < size <= data + _HEAD.size + MAX_HEADER:
        raise _bad(f"{size} bytes", f"{data} bytes of tensors and a header of at most {MAX_HEADER}")


def check_tensors(
    header: Buffer, size: int, schema: Schema, roles: Iterable[Role], more: Iterable[Entry] = ()
) -> Layout:
    """Where the tensors of a payload lie, after every check that its header allows.

    Args:
        header: the payload, or the beginning of it, header included.
        size: bytes of the payload.
        schema: of the model.
        roles: those that are sent.
        more: what an algorithm sends beside the model; comes last.

    Raises:
        Problem: `BAD_PAYLOAD`: a header that is too long, nested too deep or no JSON, a name that stands
            twice, offsets with gaps or overlaps or out of order; `SCHEMA`: other names, shapes, dtypes or
            order than the Schema has.
        ConfigError: see `expected`.
    """
    entries = expected(schema, roles, more)
    text = _header(header, size)
    rows = _rows(text)
    start = _HEAD.size + len(text)
    places: list[Place] = []
    at = 0
    for index, (name, row) in enumerate(rows):
        if index >= len(entries):
            raise _other(f"{len(rows)} tensors", f"{len(entries)} tensors")
        dtype, shape, begin, end = _row(name, row)
        entry = entries[index]
        if name != entry.name:
            raise _other(f"tensor {_shown(name)} at place {index}", f"{entry.name!r}")
        if dtype != _DTYPES[entry.dtype][0] or shape != entry.shape:
            raise _other(
                f"tensor {_shown(name)} is {dtype} {list(shape)}",
                f"{_DTYPES[entry.dtype][0]} {list(entry.shape)}",
            )
        if begin != at or end != at + _bytes_of(entry):
            raise _bad(
                f"tensor {_shown(name)} lies at {begin} to {end}",
                f"from {at} to {at + _bytes_of(entry)}: in order, without gaps",
            )
        places.append(Place(entry, start + at, end - begin))
        at = end
    if len(rows) < len(entries):
        raise _other(f"no tensor {entries[len(rows)].name!r}", f"{len(entries)} tensors")
    if start + at != size:
        raise _bad(f"tensors end at {start + at} of {size} bytes", "with the payload's end")
    return Layout(tuple(places), start, size)


class TensorsCheck:
    """`check_tensors` for many payloads of the same tensors: a header that was looked at before is known.

    Args:
        schema: of the model.
        roles: those that are sent.
        more: what an algorithm sends beside the model.
    """

    def __init__(self, schema: Schema, roles: Iterable[Role], more: Iterable[Entry] = ()) -> None:
        self._expected = schema, tuple(roles), tuple(more)
        self._header, self._layout = b"", Layout((), 0, 0)

    def __call__(self, data: Buffer, size: int) -> Layout:
        """Where the tensors of a payload lie; see `check_tensors`."""
        known = self._layout
        if size != known.size or bytes(data[: known.start]) != self._header:
            self._layout = known = check_tensors(data, size, *self._expected)
            self._header = bytes(data[: known.start])
        return known


def non_finite(data: Buffer, layout: Layout) -> str:
    """The first tensor with a value that is NaN or infinite, or a bool that is neither; or ""."""
    for place in layout.places:
        name, bits, mask = _DTYPES[place.entry.dtype]
        if not mask and name != "BOOL":
            continue
        for start in range(place.start, place.start + place.size, BLOCK_BYTES):
            size = min(BLOCK_BYTES, place.start + place.size - start)
            block = np.frombuffer(data, bits, size // np.dtype(bits).itemsize, start)
            wrong = (block & block.dtype.type(mask)) == mask if mask else block > 1
            if wrong.any():
                return place.entry.name
    return ""


def check_finite(data: Buffer, layout: Layout) -> None:
    """Refuse a payload with a value that is no number.

    Raises:
        Problem: `NONFINITE`, with the tensor's name.
    """
    if name := non_finite(data, layout):
        raise Problem(
            Reason.NONFINITE,
            f"tensor {_shown(name)} holds NaN or infinity",
            rule="every value is finite",
            fix="lower the learning rate",
            who=_WHO,
        )


def block_of(data: Buffer, place: Place, first: int, count: int) -> Tensor:
    """Elements `first` to `first + count - 1` of a tensor, in memory of their own, flat."""
    item = place.entry.dtype.itemsize
    start = place.start + first * item
    native = _NATIVE.get(place.entry.dtype, _DTYPES[place.entry.dtype][1])
    with memoryview(data) as view, view[start : start + count * item] as part:
        array = np.frombuffer(bytearray(part), native)
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if place.entry.dtype is torch.bfloat16 else tensor


def read_tensors(data: Buffer, layout: Layout) -> Tensors:
    """The tensors of a payload that `check_tensors` has passed, in memory of their own."""
    return {
        place.entry.name: block_of(data, place, 0, place.entry.numel).reshape(place.entry.shape)
        for place in layout.places
    }


def write_tensors(
    tensors: Mapping[str, Tensor], schema: Schema, roles: Iterable[Role], more: Iterable[Entry] = ()
) -> Iterator[bytes]:
    """The payload of tensors, in parts of at most `BLOCK_BYTES`; `check_tensors` takes it.

    Args:
        tensors: exactly those of the Schema for the roles, and those of `more`.
        schema: of the model.
        roles: those that are sent.
        more: what an algorithm sends beside the model; comes last.

    Raises:
        DataError: a tensor is missing, unknown, or of another shape or dtype.
        ConfigError: see `expected`.
    """
    entries = expected(schema, roles, more)
    Schema(entries).check(tensors, *Role, who=_WHO)
    header, at = {}, 0
    for entry in entries:
        end = at + _bytes_of(entry)
        header[entry.name] = {
            "dtype": _DTYPES[entry.dtype][0], "shape": list(entry.shape), "data_offsets": [at, end],
        }  # fmt: skip
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise DataError(f"a header of {len(text)} bytes", rule=f"at most {MAX_HEADER}", who=_WHO)
    return _parts(_HEAD.pack(len(text)) + text, tensors, entries)


def _parts(header: bytes, tensors: Mapping[str, Tensor], entries: tuple[Entry, ...]) -> Iterator[bytes]:
    for start in range(0, len(header), BLOCK_BYTES):
        yield header[start : start + BLOCK_BYTES]
    for entry in entries:
        flat = tensors[entry.name].detach().reshape(-1)
        step = BLOCK_BYTES // entry.dtype.itemsize
        for first in range(0, flat.numel(), step):
            block = flat[first : first + step].cpu().contiguous()
            yield block.view(torch.uint8).numpy().tobytes()


def check_masked_size(size: int, config: RoundConfig) -> None:
    """Refuse an offer of a masked vector of another size than the configuration gives.

    Raises:
        Problem: `BAD_PAYLOAD`.
    """
    if size != config.upload_bytes:
        raise _bad(
            f"{size} bytes", f"{config.length} residues of {config.bits} bits take {config.upload_bytes}"
        )


def add_masked(total: Words, data: Buffer, bits: int) -> Iterator[None]:
    """Add packed residues to a sum block by block, all or nothing; exhaust it.

    Args:
        total: residues modulo 2**bits, uint32 for bits ≤ 32, else uint64.
        data: the payload: as many residues, packed.
        bits: of a residue.

    Yields:
        after each block of about `BLOCK_BYTES`.

    Raises:
        Problem: `BAD_PAYLOAD`: of another length, or bits set behind the last residue; nothing was added.
    """
    if len(data) != packed_size(len(total), bits):
        raise _bad(f"{len(data)} bytes", f"{len(total)} residues of {bits} bits")
    step = BLOCK_BYTES // bits * 8  # whole bytes at the end of each
    firsts = range(0, len(total), step)
    for first in reversed(firsts):  # padding can only be wrong in the last block
        part = total[first : first + step]
        start = first // 8 * bits
        with memoryview(data) as view, view[start : start + packed_size(len(part), bits)] as packed:
            try:
                add_packed(part, packed, bits)
            except SecureSumError as error:
                raise _bad(error.found, error.rule) from error
        yield


def _header(start: Buffer, size: int) -> bytes:
    """The JSON of a header, so far only measured."""
    if size < _HEAD.size or len(start) < _HEAD.size:
        raise _bad(f"{size} bytes", "a header first")
    (length,) = _HEAD.unpack(bytes(start[: _HEAD.size]))
    if not 2 <= length <= MAX_HEADER:
        raise _bad(f"a header of {length} bytes", f"2 to {MAX_HEADER}")
    if _HEAD.size + length > min(size, len(start)):
        raise _bad(f"a header of {length} bytes in {min(size, len(start))}", "inside the payload")
    return bytes(start[_HEAD.size : _HEAD.size + length])


def _rows(text: bytes) -> list[tuple[str, Any]]:
    """Names and rows, in order; whatever is inside them is of bounded depth."""
    depth = 0
    for found in _BRACKET.finditer(_STRING.sub(b"", text)):
        depth += 1 if found[0] in b"[{" else -1
        if depth > _MAX_DEPTH:
            raise _bad("a header that nests deeper", f"at most {_MAX_DEPTH} deep")
    try:
        rows = json.loads(
            text.decode(),
            object_pairs_hook=_Pairs,
            parse_float=_no_number,
            parse_constant=_no_number,
            parse_int=_whole,
        )
    except (ValueError, RecursionError) as error:
        raise _bad("a header that is no JSON of whole numbers", "safetensors") from error
    if not isinstance(rows, _Pairs):
        raise _bad("a header that is no table", "safetensors")
    if len(rows) > MAX_TENSORS:
        raise _bad(f"{len(rows)} tensors", f"at most {MAX_TENSORS}")
    if len({name for name, _ in rows}) != len(rows):
        raise _bad("a name that stands twice", "every name once")
    return rows


class _Pairs(list[tuple[str, Any]]):
    """A JSON table with its rows in order, duplicates included."""


def _no_number(text: str) -> Any:
    raise ValueError("a number that is not whole")


def _whole(text: str) -> int:
    if len(text) > 20:
        raise ValueError("a number of more than 64 bits")
    return int(text)


def _row(name: str, row: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, and where it begins and ends."""
    if len(name.encode(errors="replace")) > MAX_NAME:
        raise _bad(f"a name of {len(name)} letters", f"at most {MAX_NAME} bytes")
    if not isinstance(row, _Pairs) or len(row) != len(_KEYS) or {key for key, _ in row} != _KEYS:
        raise _bad(f"{_shown(name)} is no tensor", "dtype, shape and data_offsets, and nothing else")
    values = dict(row)
    dtype, shape, offsets = values["dtype"], values["shape"], values["data_offsets"]
    if not isinstance(dtype, str) or dtype not in {known for known, _, _ in _DTYPES.values()}:
        raise _bad(f"{_shown(name)} has a dtype that does not travel", "a dtype of the list")
    if not _are_whole(shape) or len(shape) > MAX_RANK:
        raise _bad(f"{_shown(name)} has no shape", f"at most {MAX_RANK} whole numbers")
    if not _are_whole(offsets) or len(offsets) != 2:
        raise _bad(f"{_shown(name)} has no place", "two whole numbers")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_whole(values: Any) -> bool:
    return (
        isinstance(values, list)
        and not isinstance(values, _Pairs)
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


def _bytes_of(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def _shown(name: str) -> str:
    return repr(name[:64] + "…" if len(name) > 64 else name)


def _bad(found: str, rule: str) -> Problem:
    return Problem(Reason.BAD_PAYLOAD, found, rule=rule, who=_WHO)


def _other(found: str, rule: str) -> Problem:
    fix = "device and server name different models; use the same"
    return Problem(Reason.SCHEMA, found, rule=rule, fix=fix, who=_WHO)
