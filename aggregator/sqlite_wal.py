"""Whether SQLite's write-ahead log lost transactions in its middle, which SQLite itself does not say.

At its first frame with a wrong checksum SQLite takes the log to end: a crash may have cut it there. But each
transaction was on the disk before the next one began, so behind a cut there is the end of one transaction at
most. Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from struct import Struct, iter_unpack
from typing import Final

__all__ = ["lost_transactions"]

_HEADER: Final = Struct(">8I")
_FRAME: Final = Struct(">6I")
_MAGIC: Final = {0x377F0682: "<II", 0x377F0683: ">II"}
_MASK: Final = 2**32 - 1


def lost_transactions(path: Path) -> bool:
    """Whether transactions that were durable are damaged; the last one cannot be told from one that was cut.

    Args:
        path: of the write-ahead log; no connection has it open.

    Raises:
        OSError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return False
    if len(data) <= _HEADER.size:
        return False
    magic, _, page, _, *salts, first, second = _HEADER.unpack_from(data)
    order = _MAGIC.get(magic, "<II")
    sums = _checksum(order, data[:24], (0, 0))
    if magic not in _MAGIC or sums != (first, second) or not 512 <= page <= 65536:
        return True  # frames are written once the header is on the disk
    sound, ends = True, 0
    for start in range(_HEADER.size, len(data) - page - _FRAME.size + 1, page + _FRAME.size):
        _, size, salt_1, salt_2, first, second = _FRAME.unpack_from(data, start)
        if sound:
            sums = _checksum(order, data[start : start + 8], sums)
            sums = _checksum(order, data[start + _FRAME.size : start + _FRAME.size + page], sums)
            sound = [salt_1, salt_2] == salts and sums == (first, second)
        if not sound:  # frames of an older log have other salts
            ends += size != 0 and (salt_1 == salts[0] or salt_2 == salts[1])
    return ends > 1


def _checksum(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    first, second = sums
    words: Iterator[tuple[int, int]] = iter_unpack(order, data)
    for even, odd in words:
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return first, second
