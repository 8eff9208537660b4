"""Szegedy et al.: "Intriguing properties of neural networks" (ICLR 2014): L-BFGS in a box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.constants import Constants
from mycelia.attacks.losses import Loss
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError

__all__ = ["LBFGS"]

_TIGHT: Final = 1.001  # constants enclosed this closely change no distance that matters


@dataclass(frozen=True)
class LBFGS(Attack):
    """The smallest ‖δ‖² + c · cross-entropy by L-BFGS-B, row by row, with a search over the constant c.

    The cross-entropy is that of the target; untargeted, that of all classes but the true one together, since
    raising that of the true class is not convex even for affine models: its minima jump across the boundary.

    Attributes:
        norm: "l2".
        steps: iterations of each attempt, at least 1.
        searches: constants tried, at least 1.
        constant: the first one, above 0.
    """

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = ("l2",)

    norm: Norm = "l2"
    steps: int = 100
    searches: int = 20
    constant: float = 1e-2

    def check(self) -> None:
        """See `Attack.check`."""
        if self.steps < 1 or self.searches < 1 or not self.constant > 0:
            raise ConfigError(
                f"steps {self.steps}, searches {self.searches}, constant {self.constant}",
                rule="at least 1 each; above 0",
                who=type(self).__name__,
            )

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        constants = Constants(search, self.constant)
        for attempt in range(self.searches):
            rows = search.active
            rows = rows[~constants.tight(rows, _TIGHT)]
            for row in rows[:, None]:
                success = self._attempt(search, row, float(constants.value[row]), attempt)
                constants.judge(row, success)

    def _attempt(self, search: Search, row: Tensor, constant: float, attempt: int) -> Tensor:
        """One row, from its input; bool [1]: whether the point where it ends reaches the goal."""
        x = search.x[row]
        loss: Loss = "ce" if search.goal.targeted else _others
        start = x.double().cpu().numpy().ravel()

        def objective(flat: Any) -> tuple[float, Any]:
            points = torch.from_numpy(flat).to(x).view_as(x)
            points = torch.minimum(torch.maximum(points, search.low[row]), search.high[row])
            if not bool(search.going_on(row).all()):
                raise _Over
            grad, value, _ = search.gradient(points, row, attempt, loss)
            delta = flat - start
            slope = 2 * delta - constant * grad.double().cpu().numpy().ravel()
            return float(delta @ delta) - constant * float(value), slope

        ends = (bound[row].double().cpu().numpy().ravel() for bound in (search.low, search.high))
        limits = [
            tuple(float(end) if np.isfinite(end) else None for end in pair)
            for pair in zip(*ends, strict=True)
        ]
        options = {"maxiter": self.steps, "maxfun": 2 * self.steps}
        try:
            found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=limits, options=options)
            points = torch.from_numpy(found.x).to(x).view_as(x)
            points = torch.minimum(torch.maximum(points, search.low[row]), search.high[row])
            if not bool(search.going_on(row).all()):
                return torch.zeros(1, dtype=torch.bool, device=x.device)
            return search.look(points, row, attempt, loss)[1]
        except _Over:
            return torch.zeros(1, dtype=torch.bool, device=x.device)


def _others(z: Tensor, y: Tensor) -> Tensor:
    """Log of the probability of any class but y, [n]."""
    return z.scatter(1, y[:, None], -torch.inf).logsumexp(1) - z.logsumexp(1)


class _Over(Exception):
    """The row's budget is gone, or its gradient is not finite."""
