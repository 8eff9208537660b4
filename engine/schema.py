"""Names, roles, shapes and dtypes of a model's tensors, hashed, and the hash of their values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import sha256

import torch

from mycelia.engine.errors import DataError
from mycelia.engine.types import Tensors

__all__ = ["Entry", "Role", "Schema", "model_sha256"]


class Role(StrEnum):
    """What a tensor is to training; each role has its own merge rule."""

    PARAMETER = "parameter"
    BUFFER = "buffer"  # a float buffer, such as running statistics
    COUNTER = "counter"  # an integer buffer, such as the number of batches seen
    FROZEN = "frozen"  # never trained, never sent


@dataclass(frozen=True)
class Entry:
    """One tensor of a model."""

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return math.prod(self.shape)

    def to_json(self) -> list[object]:
        """The entry as `[name, role, shape, dtype]`."""
        return [self.name, self.role.value, list(self.shape), str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_json(cls, row: list[object]) -> Entry:
        """The inverse of `to_json`; raises DataError for anything else."""
        try:
            name, role, shape, dtype = row
            found = getattr(torch, str(dtype))
            if not isinstance(found, torch.dtype) or not isinstance(shape, list):
                raise TypeError(dtype)
            return cls(str(name), Role(str(role)), tuple(int(size) for size in shape), found)
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{row!r} is not a schema entry", rule="[name, role, shape, dtype]") from error


@dataclass(frozen=True)
class Schema:
    """All tensors of a model in a fixed order."""

    entries: tuple[Entry, ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def of(self, *roles: Role) -> tuple[Entry, ...]:
        """The entries with one of the given roles, in order."""
        return tuple(entry for entry in self.entries if entry.role in roles)

    @cached_property
    def sha256(self) -> str:
        """Hash of names, roles, shapes, dtypes and order."""
        rows = json.dumps([entry.to_json() for entry in self.entries], separators=(",", ":"))
        return sha256(rows.encode()).hexdigest()

    def check(self, tensors: Mapping[str, torch.Tensor], *roles: Role, who: str = "model") -> None:
        """Raise DataError unless `tensors` are exactly the entries of these roles."""
        expected = {entry.name: entry for entry in self.of(*roles)}
        if extra := sorted(set(tensors) - set(expected)):
            raise DataError(f"unknown tensor {extra[0]!r}", rule="names must match the schema", who=who)
        for name, entry in expected.items():
            if name not in tensors:
                raise DataError(f"tensor {name!r} is missing", rule="names must match the schema", who=who)
            found = tensors[name]
            if tuple(found.shape) != entry.shape or found.dtype != entry.dtype:
                raise DataError(
                    f"tensor {name!r} has shape {tuple(found.shape)} and dtype {found.dtype}",
                    rule=f"the schema says {entry.shape} and {entry.dtype}",
                    who=who,
                )


def model_sha256(tensors: Tensors) -> str:
    """Hash of names, dtypes, shapes and values, independent of the order of the mapping."""
    digest = sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
