"""Named arrays in one memory-mapped file, which processes share by its path."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["Layout", "SharedTensors", "shared_folder"]

_ALIGN = 64


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in the file: offset in bytes, shape and dtype by name."""

    entries: Mapping[str, tuple[int, tuple[int, ...], torch.dtype]]
    size: int

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Layout:
        """Lay tensors of these shapes and dtypes one behind another."""
        entries, offset = {}, 0
        for name, (shape, dtype) in tensors.items():
            entries[name] = (offset, tuple(shape), dtype)
            count = int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=dtype).element_size()
            offset += -(-count // _ALIGN) * _ALIGN
        return cls(entries, max(offset, _ALIGN))


class SharedTensors:
    """Tensors by name over one shared mapping.

    Args:
        path: the file; made and zeroed when `create`.
        layout: what lies in it.
    """

    def __init__(self, path: Path, layout: Layout, *, create: bool = False) -> None:
        if create:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, layout.size) if hasattr(
                    os, "posix_fallocate"
                ) else file.truncate(layout.size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), layout.size)
        self.tensors: dict[str, Tensor] = {}
        for name, (offset, shape, dtype) in layout.entries.items():
            count = int(np.prod(shape, dtype=np.int64))
            if count == 0:
                self.tensors[name] = torch.zeros(shape, dtype=dtype)
            else:
                flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
                self.tensors[name] = flat.view(shape)


def shared_folder(needed: int, fallback: Path) -> Path:
    """A new folder for shared files: in memory where there is room, else below `fallback`.

    Args:
        needed: bytes that will be written.
        fallback: an existing folder on disk.
    """
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * needed:
        return Path(tempfile.mkdtemp(prefix="mycelia-", dir=memory))
    return Path(tempfile.mkdtemp(prefix="shared-", dir=fallback))
