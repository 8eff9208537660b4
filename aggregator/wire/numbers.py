"""Numbers by name inside canonical bytes: each is the bits of its float64, so it comes back unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import Final

from mycelia.privacy.secagg.canonical import HEAD_BYTES, INTEGER_BYTES, Field, Reader

__all__ = ["named_numbers", "read_numbers"]

_FLOAT: Final = Struct(">d")
_BITS: Final = Struct(">Q")


def named_numbers(values: Mapping[str, float]) -> list[Field]:
    """As `struct` takes them, in the order of the mapping."""
    return [[name, *_BITS.unpack(_FLOAT.pack(value))] for name, value in values.items()]


def read_numbers(reader: Reader, most: int) -> dict[str, float]:
    """What `named_numbers` made, each name once.

    Args:
        reader: stands where they begin.
        most: how many there may be.

    Raises:
        SecureSumError: other bytes.
    """
    count = reader.count(most, 2 * HEAD_BYTES + INTEGER_BYTES)
    numbers: dict[str, float] = {}
    for _ in range(count):
        if reader.count(2, 0) != 2:
            raise reader.error("a number without its name")
        name = reader.text()
        (numbers[name],) = _FLOAT.unpack(_BITS.pack(reader.integer()))
    if len(numbers) != count:
        raise reader.error("a name that stands twice")
    return numbers
