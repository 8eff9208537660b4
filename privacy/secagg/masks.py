"""Mask streams: 256-bit keys expanded to a uniform residue for each element, added in place; and bit packing.

A stream is the key stream of AES-256-CTR (NIST SP 800-38A §6.5) whose counter block is all zero at element 0,
read as little-endian words: 32 bits each for residues of up to 32 bits, else 64, reduced modulo 2**bits.
Every element has its place in the key stream, so any part of a mask can be made alone.

Masks are added by blocks of 256 KiB: one block after the other, over all keys, with one cipher context for
each. The block of the vector, the words and the zeros they are made from stay in the level-2 cache, and
nothing of the vector's size is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.canonical import Reason, SecureSumError

__all__ = [
    "BLOCK_BYTES",
    "Packed",
    "Stream",
    "Words",
    "add_packed",
    "add_streams",
    "pack",
    "packed_size",
    "unpack",
    "word_type",
]

Words: TypeAlias = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
"""A vector of residues."""

Packed: TypeAlias = bytes | bytearray | memoryview
"""Packed residues."""

BLOCK_BYTES: Final = 1 << 18
"""Bytes of a vector that are worked on at a time."""

_KEY_BYTES = 32
_COUNTED = 16  # bytes of key stream for one value of the counter
_CONTEXTS = 4096  # cipher contexts held at a time, 1 KiB each
_PACKED = 1 << 16  # elements packed at a time: a multiple of 8, so that each part ends with a whole byte
_NATIVE: Final = {8: "<u1", 16: "<u2", 32: "<u4", 64: "<u8"}  # widths that numpy has a dtype for
_ZEROS: Final = bytes(BLOCK_BYTES)


def word_type(bits: int) -> np.dtype[Any]:
    """The dtype of residues modulo 2**bits: uint32 for 8 to 32 bits, uint64 for 33 to 64.

    Raises:
        ConfigError: any other number of bits.
    """
    if not 8 <= bits <= 64:
        raise ConfigError(f"residues of {bits} bits", rule="a residue has 8 to 64 bits", who="secure sum")
    return np.dtype(np.uint32 if bits <= 32 else np.uint64)


@dataclass(frozen=True)
class Stream:
    """The mask of one key, readable from any element.

    Attributes:
        key: 32 bytes, used for this stream alone; a secret, so it is not printed.
        bits: of a residue, 8 to 64.

    Raises:
        ConfigError: a key of another length, or another number of bits.
    """

    key: bytes = field(repr=False)
    bits: int

    def __post_init__(self) -> None:
        word_type(self.bits)
        _check_keys([self.key])

    def words(self, start: int, count: int) -> Words:
        """Elements `start` to `start + count - 1`, uniform modulo 2**bits, uint32 or uint64 [count]."""
        out = np.zeros(count, word_type(self.bits))
        add_streams(out, [self.key], [1], self.bits, start)
        return out


def add_streams(total: Words, keys: Sequence[bytes], signs: Sequence[int], bits: int, start: int = 0) -> None:
    """Add masks to a vector in place, modulo 2**bits.

    Args:
        total: one-dimensional and contiguous, uint32 for bits ≤ 32, else uint64: a vector or a part of one.
            What is left there is reduced modulo 2**bits. Unchanged when an error is raised.
        keys: of the masks, 32 bytes each.
        signs: for each key +1 to add the mask, −1 to subtract it.
        bits: of a residue, 8 to 64.
        start: the element of the masks that the first element of `total` gets.

    Raises:
        ConfigError: another dtype or layout, signs that are none or do not match the keys, a start before 0,
            a key of another length.
    """
    _check(total, bits)
    _check_keys(keys)
    if len(keys) != len(signs) or any(sign not in (1, -1) for sign in signs):
        raise ConfigError(
            f"{len(signs)} signs in {sorted(set(signs))} for {len(keys)} keys",
            rule="one sign for each key, +1 or -1",
            who="secure sum",
        )
    if start < 0:
        raise ConfigError(f"element {start}", rule="elements count from 0", who="secure sum")
    size = BLOCK_BYTES // total.itemsize
    words = np.empty(min(size, total.size), total.dtype.newbyteorder("<"))
    raw = words.view(np.uint8).data
    zeros = memoryview(_ZEROS)
    pairs = iter(zip(keys, signs, strict=True))
    while group := list(itertools.islice(pairs, _CONTEXTS)):
        steps = [
            (_context(key, start * total.itemsize).update_into, np.add if sign > 0 else np.subtract)
            for key, sign in group
        ]
        for first in range(0, total.size, size):
            block = total[first : first + size]
            source, target, mask = zeros[: block.nbytes], raw[: block.nbytes], words[: block.size]
            for update_into, accumulate in steps:
                update_into(source, target)
                accumulate(block, mask, out=block)
            _reduce(block, bits)


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` packed residues."""
    return (count * bits + 7) // 8


def pack(values: Words, bits: int) -> bytes:
    """Residues as bytes: element i is bits i*bits to (i+1)*bits − 1, the lowest bit of a byte first.

    The last byte is filled up with zeros. A vector packed in parts, each but the last of a multiple of 8
    elements, gives the same bytes.

    Args:
        values: one-dimensional and contiguous, uint32 for bits ≤ 32, else uint64; taken modulo 2**bits.
        bits: of a residue, 8 to 64.

    Raises:
        ConfigError: another dtype or layout.
    """
    _check(values, bits)
    if bits in _NATIVE:
        return values.astype(_NATIVE[bits], copy=False).tobytes()
    out = np.empty(packed_size(values.size, bits), np.uint8)
    for first in range(0, values.size, _PACKED):
        part = values[first : first + _PACKED]
        place = first // 8 * bits
        (_pack_bytes if bits % 8 == 0 else _pack_bits)(
            part, bits, out[place : place + packed_size(part.size, bits)]
        )
    return out.tobytes()


def unpack(packed: Packed, count: int, bits: int) -> Words:
    """The residues that `pack` wrote, uint32 or uint64 [count], each below 2**bits.

    Raises:
        SecureSumError: `BAD_UPLOAD`: another length, or bits set behind the last element.
        ConfigError: another number of bits.
    """
    out = np.empty(count, word_type(bits))
    for first, values in _unpacked(packed, count, bits):
        out[first : first + values.size] = values
    return out


def add_packed(total: Words, packed: Packed, bits: int) -> None:
    """Add packed residues to a vector in place, modulo 2**bits, without unpacking all of them at once.

    Args:
        total: as in `add_streams`; unchanged when an error is raised.
        packed: as many residues as `total` has, as `pack` writes them.
        bits: of a residue, 8 to 64.

    Raises:
        SecureSumError: `BAD_UPLOAD`: another length, or bits set behind the last element.
        ConfigError: another dtype or layout.
    """
    _check(total, bits)
    for first, values in _unpacked(packed, total.size, bits):
        block = total[first : first + values.size]
        np.add(block, values, out=block)
        _reduce(block, bits)


def _check(vector: Words, bits: int) -> None:
    dtype = word_type(bits)
    if vector.dtype != dtype or vector.ndim != 1 or not vector.flags.c_contiguous:
        raise ConfigError(
            f"{vector.dtype} of shape {vector.shape} for residues of {bits} bits",
            rule=f"a contiguous vector of {dtype}",
            who="secure sum",
        )


def _check_keys(keys: Sequence[bytes]) -> None:
    wrong = {len(key) for key in keys} - {_KEY_BYTES}
    if wrong:
        raise ConfigError(
            f"a key of {min(wrong)} bytes", rule=f"a mask key has {_KEY_BYTES} bytes", who="secure sum"
        )


def _context(key: bytes, place: int) -> CipherContext:
    """The cipher, at one byte of the key stream: from there on it turns zeros into the stream."""
    counter, rest = divmod(place, _COUNTED)
    context = Cipher(algorithms.AES(key), modes.CTR(counter.to_bytes(_COUNTED, "big"))).encryptor()
    if rest:
        context.update(bytes(rest))
    return context


def _reduce(block: Words, bits: int) -> None:
    """Take a block modulo 2**bits in place; words of exactly so many bits wrap by themselves."""
    if bits < 8 * block.itemsize:
        np.bitwise_and(block, block.dtype.type(2**bits - 1), out=block)


def _pack_bytes(values: Words, bits: int, out: npt.NDArray[np.uint8]) -> None:
    """Whole bytes: the lowest ones of every word, column by column."""
    width = bits // 8
    words = values.astype(values.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    for column in range(width):
        out[column::width] = words[column :: values.itemsize]


def _pack_bits(values: Words, bits: int, out: npt.NDArray[np.uint8]) -> None:
    """Eight elements are `bits` whole bytes: written as 64-bit words, of which the last is cut."""
    groups = -(-values.size // 8)
    if values.size < 8 * groups:
        values = np.concatenate([values, np.zeros(8 * groups - values.size, values.dtype)])
    mask = 2**bits - 1
    if bits <= 32:  # two neighbours at a time, moved together in the 64 bits they take
        pairs = values.astype("<u4", copy=False).view("<u8")
        fields = pairs >> np.uint64(32 - bits)
        fields &= np.uint64(mask << bits)
        fields |= pairs & np.uint64(mask)
    else:
        fields = values & np.uint64(mask)
    width, table = _table(fields, groups, bits)
    words = np.zeros((groups, -(-bits // 8)), "<u8")
    for place in range(table.shape[1]):
        word, shift = divmod(place * width, 64)
        words[:, word] |= table[:, place] << np.uint64(shift)
        if shift + width > 64:
            words[:, word + 1] = table[:, place] >> np.uint64(64 - shift)
    columns = words.view(np.uint8)[:, :bits]
    whole = out.size // bits
    out[: whole * bits].reshape(whole, bits)[:] = columns[:whole]
    if whole < groups:
        out[whole * bits :] = columns[whole, : out.size - whole * bits]


def _unpacked(packed: Packed, count: int, bits: int) -> Iterator[tuple[int, Words]]:
    """The parts of a packed vector that is well formed: the first element of each, and its residues."""
    dtype = word_type(bits)
    data = np.frombuffer(packed, np.uint8)
    need = packed_size(count, bits)
    if data.size != need:
        raise SecureSumError(
            Reason.BAD_UPLOAD,
            f"{data.size} bytes",
            rule=f"{count} residues of {bits} bits take {need} bytes",
            who="upload",
            have=data.size,
            need=need,
        )
    unused = 8 * need - count * bits
    if unused and data[-1] >> (8 - unused):
        raise SecureSumError(
            Reason.BAD_UPLOAD,
            f"the last byte is {data[-1]:#04x}",
            rule=f"its upper {unused} bits are padding and zero",
            who="upload",
        )
    for first in range(0, count, _PACKED):
        end = min(first + _PACKED, count)
        part = data[first // 8 * bits : packed_size(end, bits)]
        if bits in _NATIVE:
            values = part.view(_NATIVE[bits])
        elif bits % 8 == 0:
            values = _unpack_bytes(part, bits, dtype)
        else:
            values = _unpack_bits(part, bits, dtype)[: end - first]
        yield first, values


def _unpack_bytes(packed: npt.NDArray[np.uint8], bits: int, dtype: np.dtype[Any]) -> Words:
    width = bits // 8
    words = np.zeros(packed.size // width, dtype.newbyteorder("<"))
    columns = words.view(np.uint8)
    for column in range(width):
        columns[column :: dtype.itemsize] = packed[column::width]
    return words


def _unpack_bits(packed: npt.NDArray[np.uint8], bits: int, dtype: np.dtype[Any]) -> Words:
    groups = -(-packed.size // bits)
    words = np.zeros((groups, -(-bits // 8)), "<u8")
    columns = words.view(np.uint8)
    whole = packed.size // bits
    columns[:whole, :bits] = packed[: whole * bits].reshape(whole, bits)
    if whole < groups:
        columns[whole, : packed.size - whole * bits] = packed[whole * bits :]
    fields = np.empty(groups * (4 if bits <= 32 else 8), np.uint64)
    width, table = _table(fields, groups, bits)
    for place in range(table.shape[1]):
        word, shift = divmod(place * width, 64)
        np.right_shift(words[:, word], np.uint64(shift), out=table[:, place])
        if shift + width > 64:
            table[:, place] |= words[:, word + 1] << np.uint64(64 - shift)
    mask = 2**bits - 1
    if bits > 32:
        fields &= np.uint64(mask)
        return fields
    low = fields & np.uint64(mask)
    fields <<= np.uint64(32 - bits)
    fields &= np.uint64(mask << 32)
    fields |= low
    return fields.astype("<u8", copy=False).view("<u4")


def _table(fields: npt.NDArray[np.uint64], groups: int, bits: int) -> tuple[int, npt.NDArray[np.uint64]]:
    """Bits of one field, and the fields of eight elements by rows: pairs of elements up to 32 bits."""
    return (2 * bits, fields.reshape(groups, 4)) if bits <= 32 else (bits, fields.reshape(groups, 8))
