"""Adversarial training of the clients of a federation: a batch is attacked before the local step on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from mycelia.attacks.defences.registry import build
from mycelia.attacks.defences.train_config import wrong_with
from mycelia.attacks.defences.training import Batch, TrainingDefence
from mycelia.attacks.model import as_model
from mycelia.engine.config import Named
from mycelia.engine.local import Change
from mycelia.engine.program import Program
from mycelia.engine.types import Tensors

__all__ = ["LOCAL", "LocalDefence", "wrong_with_local"]

LOCAL: Final = ("nad", "pad", "pgdat")
"""Names of the defences that are an ordinary step on changed inputs, whatever the step is."""


@dataclass(frozen=True)
class LocalDefence:
    """Attacks the batches of local steps, for `LocalTrainer(change_of=…)`; it travels to a spawned process.

    Each client attacks its own replica as it is at that step, in evaluation mode (Zizzo, Rawat, Sinn,
    Buesser: "FAT: federated adversarial training", 2020).

    Attributes:
        block: name and options of the defence, one of `LOCAL`.
    """

    block: Named

    def __call__(self, program: Program) -> Change:
        """What changes batches in one process."""
        return _Attacked(self.defence(), program)

    def defence(self) -> TrainingDefence:
        """What the block names."""
        return build(self.block.name, **self.block.options)


def wrong_with_local(block: Named) -> Iterable[tuple[str, str]]:
    """What the `[defence]` block of a federation has wrong, as `Strict.conflicts` says it."""
    found = tuple(wrong_with(block))
    yield from found
    if not found and block.name not in LOCAL:
        yield (
            "defence.name",
            f"{block.name} needs a step of its own, and the step of a client is that of the algorithm; use "
            f"{', '.join(LOCAL[:-1])} or {LOCAL[-1]}",
        )


@dataclass(frozen=True)
class _Attacked:
    defence: TrainingDefence
    program: Program

    def __call__(
        self, params: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor, seed: int
    ) -> Tensor:
        model = as_model(self.program, params=params, buffers=buffers)
        return self.defence.craft(Batch(model, inputs, targets, np.arange(len(inputs)), seed))[0]
