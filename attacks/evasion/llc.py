"""One step towards the class that the model finds least likely, and these classes as targets for any attack.

Kurakin, Goodfellow, Bengio: "Adversarial machine learning at scale", ICLR 2017, §3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mycelia.attacks.evasion.fgm import FGM
from mycelia.attacks.goals import Targeted
from mycelia.attacks.losses import Loss
from mycelia.attacks.model import as_model
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["LLC", "RLLC", "least_likely"]


def least_likely(model: object, x: Any, *, batch: int = 256) -> Tensor:
    """The class of the lowest score of each row.

    Args:
        model: see `as_model`; one that gives scores.
        x: inputs [n, …], a tensor or an array.
        batch: rows at a time.

    Returns:
        int64 [n], as targets for `Targeted`.

    Raises:
        ConfigError: the model gives labels only.
    """
    inputs = torch.as_tensor(x)
    target = as_model(model, numpy=not isinstance(x, Tensor))
    if "score" not in target.offers:
        raise ConfigError(
            f"{target.name} gives labels only",
            rule="the least likely class is a matter of scores",
            who="least_likely",
        )
    if not len(inputs):
        return torch.zeros(0, dtype=torch.int64, device=inputs.device)
    with target.quiet():
        return torch.cat([target(part).argmin(1) for part in inputs.split(batch)])


@dataclass(frozen=True)
class LLC(FGM):
    """The best point of ball ∩ box for a linear loss towards the least likely class of the clean input.

    What counts as success is the goal's affair: for an untargeted one any other class than the true one. For
    success at the target only, give `Targeted(least_likely(model, x))` to another attack.

    Attributes:
        norm: of the ball.
        loss: what is raised, as for a targeted goal.
        start: share of eps of a random move before the step, which then has the rest of the ball.
        eot: passes over which the gradient is averaged.
    """

    targeted: ClassVar[bool] = False

    def raised(self, search: Search) -> Callable[[Tensor], Loss]:
        """See `FGM.raised`."""
        # Not the true class, which is the lowest where all scores are the same.
        scores = search.clean.scatter(1, search.goal.labels[:, None], torch.inf)
        aim = Targeted(scores.argmin(1))
        return lambda rows: lambda outputs, _: aim.of(rows).loss(outputs, self.loss)


@dataclass(frozen=True)
class RLLC(LLC):
    """With a random move first.

    Attributes:
        start: share of eps.
    """

    start: float = 0.5
