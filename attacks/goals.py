"""What an attack is to reach. The sign of a loss is folded here, once: a goal's loss is always raised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mycelia.attacks.losses import LOSSES, Loss, ce, dlr_targeted, margin
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator

__all__ = ["Goal", "Targeted", "Untargeted", "random_target"]


class Goal(ABC):
    """What is wanted of each row."""

    targeted: bool

    @property
    @abstractmethod
    def labels(self) -> Tensor:
        """int64 [n]: what the loss is about, true class or target."""

    @abstractmethod
    def of(self, rows: Tensor) -> Goal:
        """The same for some rows."""

    @abstractmethod
    def loss(self, outputs: Tensor, loss: Loss = "ce") -> Tensor:
        """[n], bigger is nearer to the goal.

        Args:
            outputs: logits, [n, classes].
            loss: which; see `LOSSES`.
        """

    @abstractmethod
    def reached(self, outputs: Tensor) -> Tensor:
        """Whether these outputs are what was wanted, bool [n].

        Args:
            outputs: logits [n, classes], or labels [n].
        """

    def __len__(self) -> int:
        return len(self.labels)


def predicted(outputs: Tensor) -> Tensor:
    """Labels, from scores or labels; −1 where an output is not a number."""
    if outputs.dim() == 1:
        return outputs.to(torch.int64)
    return torch.where(outputs.isnan().any(1), -1, outputs.argmax(1))


def _labels(values: Any, name: str) -> Tensor:
    labels = torch.as_tensor(values)
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype is torch.bool:
        raise DataError(
            f"{name} is {labels.dtype} {list(labels.shape)}", rule="one integer per row, [n]", who=name
        )
    if len(labels) and int(labels.min()) < 0:
        raise DataError(f"{name} has {int(labels.min())}", rule="classes count from 0", who=name)
    return labels.to(torch.int64)


def _named(loss: Loss) -> Any:
    if callable(loss):
        return loss
    if loss not in LOSSES:
        raise ConfigError(f"loss {loss!r}", rule=f"one of {', '.join(LOSSES)}, or a function", who="loss")
    return LOSSES[loss]


@dataclass(frozen=True, eq=False)
class Untargeted(Goal):
    """Any class but the true one.

    Attributes:
        y: true classes, integers [n].
    """

    y: Tensor
    targeted = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", _labels(self.y, "y"))

    @property
    def labels(self) -> Tensor:
        """See `Goal.labels`."""
        return self.y

    def of(self, rows: Tensor) -> Untargeted:
        """See `Goal.of`."""
        return Untargeted(self.y[rows])

    def loss(self, outputs: Tensor, loss: Loss = "ce") -> Tensor:
        """See `Goal.loss`."""
        found: Tensor = _named(loss)(outputs, self.y)
        return found

    def reached(self, outputs: Tensor) -> Tensor:
        """See `Goal.reached`."""
        found = predicted(outputs)
        return (found != self.y) & (found >= 0)


@dataclass(frozen=True, eq=False)
class Targeted(Goal):
    """One class of one's choice.

    Attributes:
        t: the classes to reach, integers [n].
        y: true classes, where they are known: used by the targeted difference of logits ratio.

    Raises:
        DataError: a target that is the true class; the message names the rows.
    """

    t: Tensor
    y: Tensor | None = None
    targeted = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "t", _labels(self.t, "t"))
        if self.y is None:
            return
        object.__setattr__(self, "y", _labels(self.y, "y"))
        if len(self.y) != len(self.t):
            raise DataError(
                f"{len(self.t)} targets, {len(self.y)} labels", rule="one of each per row", who="goal"
            )
        same = (self.t == self.y.to(self.t.device)).nonzero()[:, 0].tolist()
        if same:
            raise DataError(
                f"target equals label in rows {', '.join(map(str, same[:10]))}{' …' * (len(same) > 10)}",
                rule="a target is another class than the true one",
                fix="leave these rows out, or choose other targets",
                who="Targeted",
            )

    @property
    def labels(self) -> Tensor:
        """See `Goal.labels`."""
        return self.t

    def of(self, rows: Tensor) -> Targeted:
        """See `Goal.of`."""
        found = object.__new__(Targeted)
        object.__setattr__(found, "t", self.t[rows])
        object.__setattr__(found, "y", None if self.y is None else self.y[rows])
        return found

    def loss(self, outputs: Tensor, loss: Loss = "ce") -> Tensor:
        """See `Goal.loss`."""
        if loss == "dlr" and self.y is not None and outputs.shape[1] >= 4:
            return dlr_targeted(outputs, self.y, self.t)
        if loss == "ce":
            return -ce(outputs, self.t)
        if loss in ("margin", "dlr"):
            return -margin(outputs, self.t)
        found: Tensor = -_named(loss)(outputs, self.t)
        return found

    def reached(self, outputs: Tensor) -> Tensor:
        """See `Goal.reached`."""
        return predicted(outputs) == self.t


def random_target(y: Tensor, classes: int, rng: int) -> Tensor:
    """Another class than the true one for each row, each as likely.

    Args:
        y: true classes, integers [n].
        classes: how many there are, at least 2.
        rng: seed.
    """
    labels = _labels(y, "y")
    if classes < 2:
        raise ConfigError(f"{classes} classes", rule="at least 2", who="random_target")
    steps = generator(rng, "attacks/random-target").integers(1, classes, len(labels))
    return (labels + torch.from_numpy(steps).to(labels.device)) % classes
