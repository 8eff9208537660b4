"""Data-parallel processes that train as one: one secret, one draw, one sum, one noise.

Every process draws the same batch and takes its share of it; the clipped sums are added over the processes,
and each then makes the same noise from the same secret. So all of them hold the same model and the same
ledger, and q, z and the number of updates are those of one process. That they start alike is checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from mycelia.engine.errors import ConfigError
from mycelia.engine.types import Tensors
from mycelia.privacy.noise.source import NoiseSource

__all__ = ["Ranks", "ranks_of"]

_KINDS = ("os", "seeded")


@dataclass(frozen=True)
class Ranks:
    """The processes of a group, and which of them this is.

    Attributes:
        group: of `torch.distributed`; None for the default one, or for no group at all.
        rank: this process, in [0, count).
        count: how many there are, at least 1.
        device: where tensors that travel are.
    """

    group: Any = None
    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def one_source(self, source: NoiseSource) -> NoiseSource:
        """The source of the first process; the secret travels as the group's messages do."""
        if self.count == 1:
            return source
        secret = bytes([_KINDS.index(source.kind)]) + source.key
        sent = torch.tensor(list(secret), dtype=torch.uint8, device=self.device)
        dist.broadcast(sent, self._global(0), group=self.group)
        received = bytes(sent.tolist())
        return NoiseSource("os" if received[0] == 0 else "seeded", received[1:])

    def agree(self, text: str, who: str) -> None:
        """Refuse to go on when the processes were given different things.

        Args:
            text: what has to be the same everywhere.
            who: for messages.

        Raises:
            ConfigError: it is not, on every process alike.
        """
        if self.count == 1:
            return
        mine = torch.tensor(list(sha256(text.encode()).digest()), dtype=torch.uint8, device=self.device)
        all_of_them = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(all_of_them, mine, group=self.group)
        if any(not torch.equal(each, mine) for each in all_of_them):
            raise ConfigError(
                f"the {self.count} processes differ",
                rule="model, settings, budget and ledger are the same in every process",
                fix="build the model after the same torch.manual_seed, and give all the same arguments",
                who=who,
            )

    def total(self, tensors: Tensors, count: float) -> tuple[Tensors, float]:
        """Sums over the processes, in the same order and so to the same bit in each.

        Args:
            tensors: float32 or float64, of the same names and shapes everywhere; left as they are.
            count: another number to add up.
        """
        if self.count == 1:
            return tensors, count
        result: Tensors = {}
        for dtype in (torch.float32, torch.float64):
            names = [name for name, tensor in tensors.items() if tensor.dtype == dtype]
            if not names:
                continue
            flat = torch.cat([tensors[name].flatten() for name in names])
            dist.all_reduce(flat, group=self.group)
            parts = flat.split([tensors[name].numel() for name in names])
            result |= {n: p.view(tensors[n].shape) for n, p in zip(names, parts, strict=True)}
        number: Tensor = torch.tensor([count], dtype=torch.float64, device=self.device)
        dist.all_reduce(number, group=self.group)
        return {name: result[name] for name in tensors}, float(number)

    def wait(self) -> None:
        """Go on when all are here."""
        if self.count > 1:
            dist.barrier(group=self.group)

    def _global(self, rank: int) -> int:
        return rank if self.group is None else int(dist.get_global_rank(self.group, rank))


def ranks_of(group: Any, device: torch.device) -> Ranks:
    """The processes of a group, or of the default one where `torch.distributed` was started.

    Args:
        group: a process group, or None.
        device: of the model.

    Raises:
        ConfigError: this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError(
            "this process is not in the group",
            rule="every process that trains is",
            fix="call attach in the processes of the group alone",
            who="attach",
        )
    return Ranks(group, rank, dist.get_world_size(group), device)
