"""Adam as attacks use it: upwards, each row by itself, and indifferent to the scale of gradients.

Kingma, Ba: "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1, without its ε: gradients of
inputs may be many orders of magnitude smaller than that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mycelia.attacks.norms import Norm
from mycelia.engine.errors import ConfigError

__all__ = ["Adam", "check_betas"]


class Adam:
    """The moments of some rows.

    Args:
        like: [n, …], what is to be moved.
        beta1: share of the mean gradient that is kept from step to step, in [0, 1).
        beta2: the same of the mean square.
        norm: of which a step has the length 1: "linf", or "l2", where one square, that of the length, stands
            for all coordinates: steps for each coordinate are far from steepest there.
    """

    def __init__(self, like: Tensor, beta1: float = 0.9, beta2: float = 0.999, norm: Norm = "linf") -> None:
        self._betas, self._whole, self._steps = (beta1, beta2), norm != "linf", 0
        if like.element_size() == 2:  # squares of halves are soon no numbers of theirs
            like = like.float()
        self._mean = torch.zeros_like(like)
        self._scale = like.new_zeros(len(like), *[1] * (like.dim() - 1))
        self._square = torch.zeros_like(self._scale if self._whole else like)

    def step(self, grad: Tensor) -> Tensor:
        """A step of length 1 at first, [n, …]; with both betas 0 the steepest one: see `steps.direction`."""
        beta1, beta2 = self._betas
        dtype, grad = grad.dtype, grad.to(self._mean.dtype)
        self._steps += 1
        largest = grad.flatten(1).abs().amax(1).view_as(self._scale)
        # In units of the row's first gradient that is not 0, so that no square is too small a number.
        self._scale = torch.where(self._scale > 0, self._scale, largest)
        grad = grad / torch.where(self._scale > 0, self._scale, torch.ones_like(self._scale))
        self._mean = beta1 * self._mean + (1 - beta1) * grad
        square = grad.square()
        if self._whole:
            square = square.flatten(1).sum(1).view_as(self._scale)
        self._square = beta2 * self._square + (1 - beta2) * square
        mean = self._mean / (1 - beta1**self._steps)
        root = (self._square / (1 - beta2**self._steps)).sqrt()
        found = torch.where(root > 0, mean / torch.where(root > 0, root, torch.ones_like(root)), 0.0)
        return found.to(dtype)

    def keep(self, on: Tensor) -> None:
        """Only some rows go on; a bool per row."""
        self._mean, self._square, self._scale = (each[on] for each in (self._mean, self._square, self._scale))


def check_betas(beta1: float, beta2: float, who: str) -> None:
    """Refuse shares outside [0, 1).

    Raises:
        ConfigError: naming both.
    """
    if not 0 <= beta1 < 1 or not 0 <= beta2 < 1:
        raise ConfigError(f"beta1 {beta1}, beta2 {beta2}", rule="in [0, 1)", who=who)
