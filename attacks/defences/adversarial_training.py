"""Adversarial training: part of each batch is replaced by adversarial examples of the model as it is."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.base import Attack
from mycelia.attacks.defences.training import Batch, Raised, TrainingDefence
from mycelia.attacks.evasion.fgm import FGSM
from mycelia.attacks.evasion.pgd import PGD
from mycelia.attacks.goals import Untargeted
from mycelia.attacks.norms import Norm
from mycelia.engine.data import Examples
from mycelia.engine.data.examples import Array
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import generator

__all__ = ["NAD", "PAD", "PGDAT", "AdversarialTraining", "GivenAdversarials", "attacked"]


@dataclass(frozen=True)
class AdversarialTraining(TrainingDefence):
    """A share of each batch is attacked, by one attack that is drawn for the batch.

    With several attacks this is an ensemble. Attacks that stay in a ball give its point of highest loss, for
    misclassified rows as well (Madry, Makelov, Schmidt, Tsipras, Vladu: ICLR 2018); those for the smallest
    change give that change.

    >>> AdversarialTraining([(FGSM(), 0.1)]).replace_ratio
    0.5

    Attributes:
        attacks: pairs of an attack and its radius in units of the inputs; None for a smallest change without
            limit.
        replace_ratio: share of a batch that is replaced, in [0, 1]; rounded up to whole rows.
        bounds: smallest and largest value of an input.
    """

    attacks: Sequence[tuple[Attack, float | None]]
    replace_ratio: float = 0.5
    bounds: Bounds = (0.0, 1.0)

    def check(self) -> None:
        """See `TrainingDefence.check`."""
        object.__setattr__(self, "attacks", tuple((attack, eps) for attack, eps in self.attacks))
        if not self.attacks:
            raise ConfigError("no attack", rule="at least one", who=type(self).__name__)
        for attack, eps in self.attacks:
            if not isinstance(attack, Attack) or (eps is None and attack.kind == "fixed"):
                raise ConfigError(
                    f"{attack!r} with eps {eps}",
                    rule="an attack with the radius that it stays in",
                    fix="attacks=[(FGSM(), 0.1)]",
                    who=type(self).__name__,
                )
        check_ratio(self.replace_ratio, type(self).__name__)

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `TrainingDefence.craft`."""
        which = int(generator(batch.seed, "attack").integers(len(self.attacks)))
        attack, eps = self.attacks[which]
        rows = replaced_rows(batch, self.replace_ratio)
        inputs = batch.inputs.clone()
        if len(rows):
            inputs[rows] = attacked(attack, batch, eps, self.bounds, batch.inputs[rows], batch.targets[rows])
        return inputs, batch.targets


@dataclass(frozen=True)
class GivenAdversarials(TrainingDefence):
    """A share of each batch is replaced by adversarial examples that were made beforehand.

    With those of several other models, one drawn for each batch, this is ensemble adversarial training
    (Tramèr, Kurakin, Papernot, Goodfellow, Boneh, McDaniel: ICLR 2018).

    Attributes:
        adversarials: arrays of the shape and dtype of the training inputs, row for row; they are read only.
        replace_ratio: share of a batch that is replaced, in [0, 1]; rounded up to whole rows.
    """

    adversarials: Array | Sequence[Array] = field(repr=False, compare=False)
    replace_ratio: float = 0.5
    sha256: tuple[str, ...] = field(init=False, default=())

    def check(self) -> None:
        """See `TrainingDefence.check`."""
        arrays = self._arrays
        if not arrays or not all(isinstance(array, np.ndarray) for array in arrays):
            raise ConfigError("no arrays", rule="one or several arrays", who="GivenAdversarials")
        digests = tuple(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays)
        object.__setattr__(self, "sha256", digests)
        check_ratio(self.replace_ratio, "GivenAdversarials")

    @property
    def _arrays(self) -> tuple[Array, ...]:
        given = self.adversarials
        return (given,) if isinstance(given, np.ndarray) else tuple(given)

    def check_examples(self, examples: Examples) -> None:
        """See `TrainingDefence.check_examples`."""
        for array in self._arrays:
            if array.shape != examples.inputs.shape or array.dtype != examples.inputs.dtype:
                raise DataError(
                    f"adversarial examples {array.dtype}{list(array.shape)}, "
                    f"inputs {examples.inputs.dtype}{list(examples.inputs.shape)}",
                    rule="one for each training example, row for row",
                    who="GivenAdversarials",
                )

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `TrainingDefence.craft`."""
        array = self._arrays[generator(batch.seed, "attack").integers(len(self._arrays))]
        rows = replaced_rows(batch, self.replace_ratio)
        inputs = batch.inputs.clone()
        inputs[rows] = torch.from_numpy(array[batch.rows[rows.cpu().numpy()]]).to(inputs.device)
        return inputs, batch.targets


@dataclass(frozen=True)
class PGDAT(TrainingDefence):
    """All rows are attacked by PGD (Madry et al., as above).

    Attributes:
        eps: radius in units of the inputs, at least 0.
        norm: of the ball.
        steps: of PGD, at least 1.
        step_size: length of a step; None: see `evasion.steps.step_length`.
        bounds: smallest and largest value of an input.
    """

    eps: float = 8 / 255
    norm: Norm = "linf"
    steps: int = 10
    step_size: float | None = None
    bounds: Bounds = (0.0, 1.0)

    def check(self) -> None:
        """See `TrainingDefence.check`."""
        check_radius(self.eps, "PGDAT")
        self._attack()

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `TrainingDefence.craft`."""
        found = attacked(self._attack(), batch, self.eps, self.bounds, batch.inputs, batch.targets)
        return found, batch.targets

    def _attack(self) -> PGD:
        return PGD(norm=self.norm, steps=self.steps, step_size=self.step_size)


def attacked(
    attack: Attack, batch: Batch, eps: float | None, bounds: Bounds, inputs: Tensor, targets: Tensor
) -> Tensor:
    """What an attack makes of rows of a batch, as training wants it; as inputs.

    Args:
        attack: any.
        batch: gives model and seed.
        eps: radius.
        bounds: of the inputs.
        inputs: [k, …]
        targets: [k]
    """
    # A goal that is never reached keeps misclassified rows in, and an attack in its ball until its last step.
    fixed = attack.kind == "fixed"
    goal = Raised(targets) if fixed else Untargeted(targets)
    result = attack.run(
        batch.model, inputs, goal, eps=eps, rng=batch.seed, bounds=bounds, batch=max(1, len(inputs)),
        keep="loss" if fixed else "closest",
    )  # fmt: skip
    return result.x_adv


def replaced_rows(batch: Batch, ratio: float) -> Tensor:
    """Places of a share of the rows, drawn without replacement, in order."""
    n = len(batch.inputs)
    count = min(n, math.ceil(ratio * n - 1e-9))
    rows = np.sort(generator(batch.seed, "rows").permutation(n)[:count])
    return torch.from_numpy(rows).to(batch.inputs.device)


def check_ratio(ratio: float, who: str) -> None:
    """Refuse what is no share.

    Raises:
        ConfigError: it is outside [0, 1].
    """
    if not 0 <= ratio <= 1:
        raise ConfigError(f"replace_ratio {ratio}", rule="a share in [0, 1]", who=who)


def check_radius(eps: float, who: str) -> None:
    """Refuse what is no radius.

    Raises:
        ConfigError: it is negative or not finite.
    """
    if not 0 <= eps < math.inf:
        raise ConfigError(f"eps {eps}", rule="at least 0 and finite, in units of the inputs", who=who)


NAD: Final = AdversarialTraining(((FGSM(), 0.1),))
"""Naive adversarial training: half of each batch by one step of eps 0.1."""

PAD: Final = AdversarialTraining(((PGD(steps=5, step_size=0.1), 0.3),))
"""Half of each batch by PGD of eps 0.3, five steps of 0.1."""
