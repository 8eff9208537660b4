"""What an attack raises, one number per example: the bigger, the nearer to success.

Outputs `z` are logits (or log-probabilities), [n, classes]; labels are int64 [n].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from mycelia.engine.errors import ConfigError

__all__ = ["LOSSES", "Loss", "ce", "dlr", "dlr_targeted", "kl", "margin", "runner_up"]

Loss = str | Callable[[Tensor, Tensor], Tensor]
"""A name of `LOSSES`, or a function of logits and labels that gives [n]."""


def ce(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy: −log softmax(z)_y."""
    return functional.cross_entropy(z, y, reduction="none")


def runner_up(z: Tensor, y: Tensor) -> Tensor:
    """The best logit of another class than y, [n]: that of the top class where that is not y."""
    others = z.scatter(1, y[:, None], -torch.inf)
    return others.amax(1)


def margin(z: Tensor, y: Tensor) -> Tensor:
    """max_{j≠y} z_j − z_y: above 0 where the row is misclassified.

    >>> margin(torch.tensor([[2.0, 5.0, 1.0]]), torch.tensor([1]))
    tensor([-3.])
    """
    return runner_up(z, y) - z.gather(1, y[:, None])[:, 0]


def dlr(z: Tensor, y: Tensor) -> Tensor:
    """Difference of logits ratio (Croce, Hein: AutoAttack, ICML 2020, eq. 6): invariant to shift and scale.

    −(z_y − max_{j≠y} z_j) / (z_(1) − z_(3)), with z sorted downwards.

    >>> dlr(torch.tensor([[2.0, 5.0, 1.0, 0.0]] * 2), torch.tensor([1, 0]))
    tensor([-0.7500,  0.7500])

    Raises:
        ConfigError: fewer than three classes.
    """
    _classes(z, 3, "dlr")
    top = z.topk(3, 1).values
    return margin(z, y) / (top[:, 0] - top[:, 2]).clamp(min=torch.finfo(z.dtype).tiny)


def dlr_targeted(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """Its targeted form (eq. 7): −(z_y − z_t) / (z_(1) − (z_(3) + z_(4)) / 2).

    >>> dlr_targeted(torch.tensor([[2.0, 5.0, 1.0, 0.0]]), torch.tensor([1]), torch.tensor([2]))
    tensor([-0.8889])

    Raises:
        ConfigError: fewer than four classes.
    """
    _classes(z, 4, "targeted dlr")
    top = z.topk(4, 1).values
    down = (top[:, 0] - (top[:, 2] + top[:, 3]) / 2).clamp(min=torch.finfo(z.dtype).tiny)
    return -(z.gather(1, y[:, None]) - z.gather(1, t[:, None]))[:, 0] / down


def kl(z: Tensor, reference: Tensor) -> Tensor:
    """KL(reference ‖ softmax(z)), natural logarithm.

    Args:
        z: logits.
        reference: logits of the clean input, [n, classes].
    """
    clean = reference.log_softmax(1)
    return (clean.exp() * (clean - z.log_softmax(1))).sum(1)


LOSSES: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {"ce": ce, "margin": margin, "dlr": dlr}


def _classes(z: Tensor, least: int, what: str) -> None:
    if z.shape[1] < least:
        raise ConfigError(
            f"{what} with {z.shape[1]} classes",
            rule=f"at least {least}: it compares with the {least}th best logit",
            fix='use loss="margin"',
            who="loss",
        )
