"""Clipping the mean gradient of a group of examples, instead of that of each example."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from mycelia.engine import structure
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.tracing import Loss

__all__ = ["Group", "Unit"]


@dataclass(frozen=True)
class Group:
    """Fixed groups of k examples, of each of which the mean gradient is clipped.

    Less is cut off, as means are shorter than what they are means of. It is dear: **one example can turn the
    clipped mean of its group into any other**, so it moves a sum by up to 2 C under every relation, where one
    that is clipped by itself moves it by C, and it is accounted so. Samplers, populations and expected
    batches count groups.

    Groups are made from the order of the examples, before anything is drawn: an example that is added or
    removed would move others to another group, so neighbours differ by one that is replaced, or contributes
    nothing.

    As a unit: `attach(..., unit=Group(4))`, `epsilon(..., unit=Group(4))`. A Program takes groups when it is
    captured from `model` and `loss`, and then goes with `clipped_grad` as it is:

    >>> from mycelia.engine.capture import capture
    >>> from mycelia.engine.losses import mse
    >>> from mycelia.privacy.clip import Abadi
    >>> from mycelia.privacy.clipped_grad import clipped_grad
    >>> four, inputs, targets = Group(4), torch.ones(12, 3), torch.zeros(12, 1)
    >>> batch = four.rows(inputs), four.rows(targets)
    >>> program = capture(four.model(nn.Linear(3, 1)), four.loss(mse), (batch[0][:2], batch[1][:2]))
    >>> clipped_grad(program, Abadi(1.0))(*program.init(), batch).norms.shape
    torch.Size([3])

    Attributes:
        size: k, at least 2.

    Raises:
        ConfigError: a group of fewer than 2.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ConfigError(
                f"groups of {self.size}",
                rule="a group has at least 2 examples",
                fix="leave the group out, and examples are clipped one by one",
                who="group",
            )

    def __str__(self) -> str:
        return f"groups of {self.size}"

    def rows(self, examples: Tensor) -> Tensor:
        """The examples [n, ...] by group, in their order: [n / k, k, ...].

        Raises:
            DataError: they do not fill the groups.
        """
        if rest := len(examples) % self.size:
            raise DataError(
                f"{len(examples)} examples in {self}",
                rule="every group is full",
                fix=f"leave the last {rest} out",
                who="group",
            )
        return examples.reshape(-1, self.size, *examples.shape[1:])

    def model(self, model: nn.Module) -> nn.Module:
        """A copy of a module that takes groups [B, k, ...]; its outputs are those of B k examples."""
        found = copy.deepcopy(model)
        found.register_forward_pre_hook(_flatten)
        return found

    def loss(self, loss_fn: Loss) -> Loss:
        """The mean loss of each group [B], from outputs of B k examples and targets [B, k, ...].

        Args:
            loss_fn: `(outputs, targets) -> Tensor[B]`, one loss per example.
        """

        def grouped(outputs: Any, targets: Tensor) -> Tensor:
            leaves, template = structure.flatten(outputs)
            parts = [leaf.reshape(targets.shape[0], self.size, *leaf.shape[1:]) for leaf in leaves]
            losses = (
                loss_fn(structure.unflatten(template, [part[:, place] for part in parts]), targets[:, place])
                for place in range(self.size)
            )
            # added to numbers of a known shape: while it is exported, torch 2.13 takes cross-entropy for 0-d
            return reduce(torch.add, losses, leaves[0].new_zeros(targets.shape[0])) / self.size

        return grouped


Unit = str | Group
"""Whom ε protects and what is clipped: "example", "user" or "client", or an example in a `Group`."""


def _flatten(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The examples of all groups as one batch."""
    del module
    return (args[0].flatten(0, 1), *args[1:])
