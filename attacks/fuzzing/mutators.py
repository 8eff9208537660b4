"""What a fuzzer does to an input: natural transforms with settings drawn by chance, and attacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.diversity import MDI
from mycelia.attacks.evasion.fgm import FGSM
from mycelia.attacks.evasion.pgd import PGD
from mycelia.attacks.goals import Untargeted
from mycelia.attacks.model import Model
from mycelia.attacks.transforms import TRANSFORMS
from mycelia.attacks.transforms.base import Transform
from mycelia.attacks.windows import Layout
from mycelia.engine.errors import ConfigError

__all__ = ["Adversarial", "Mutator", "Natural", "as_mutators", "standard_mutators"]


@dataclass(frozen=True)
class Mutator(ABC):
    """A way to make mutants."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For trails."""

    @property
    def geometric(self) -> bool:
        """Whether pixels move: at most one such mutator is used on the way from a seed to a mutant."""
        return False

    @property
    def needs_right(self) -> bool:
        """Whether only inputs that the model still has right can be mutated."""
        return False

    @abstractmethod
    def mutate(
        self, model: Model, x: Tensor, y: Tensor, rng: int, bounds: Bounds, layout: Layout | None
    ) -> tuple[Tensor, str]:
        """Mutants, one for each row, and how they were made.

        Args:
            model: that is tested.
            x: inputs [k, …], inside the bounds.
            y: true classes [k].
            rng: seed.
            bounds: smallest and largest value of an input.
            layout: of images.
        """


@dataclass(frozen=True)
class Natural(Mutator):
    """A transform.

    Attributes:
        transform: a class, of which settings are drawn for each batch; or one with its settings.
    """

    transform: Transform | type[Transform]

    @property
    def name(self) -> str:
        """See `Mutator.name`."""
        kind = self.transform if isinstance(self.transform, type) else type(self.transform)
        return kind.__name__

    @property
    def geometric(self) -> bool:
        """See `Mutator.geometric`."""
        return self.transform.geometric

    def mutate(
        self, model: Model, x: Tensor, y: Tensor, rng: int, bounds: Bounds, layout: Layout | None
    ) -> tuple[Tensor, str]:
        """See `Mutator.mutate`."""
        drawn = self.transform.random(rng, bounds) if isinstance(self.transform, type) else self.transform
        return drawn.apply(x, rng, bounds, layout), repr(drawn)


@dataclass(frozen=True)
class Adversarial(Mutator):
    """An attack; a mutant is the point of highest loss that it finds.

    Attributes:
        attack: of kind "fixed".
        eps: radius around the input that is mutated, in units of the inputs.
    """

    attack: Attack
    eps: float

    def __post_init__(self) -> None:
        if self.attack.kind != "fixed" or not self.eps > 0:
            raise ConfigError(
                f'{type(self.attack).__name__} of kind "{self.attack.kind}", eps {self.eps}',
                rule='a mutator is an attack of kind "fixed" with an eps above 0',
                who="Adversarial",
            )

    @property
    def name(self) -> str:
        """See `Mutator.name`."""
        return type(self.attack).__name__

    @property
    def needs_right(self) -> bool:
        """See `Mutator.needs_right`."""
        return True

    def mutate(
        self, model: Model, x: Tensor, y: Tensor, rng: int, bounds: Bounds, layout: Layout | None
    ) -> tuple[Tensor, str]:
        """See `Mutator.mutate`."""
        found = self.attack.run(
            model, x, Untargeted(y), eps=self.eps, rng=rng, bounds=bounds, batch=max(1, len(x)), keep="loss"
        )
        return found.x_adv, f"{self.attack!r} eps={self.eps:g}"


def standard_mutators(layout: Layout, eps: float) -> tuple[Mutator, ...]:
    """All eighteen: the fifteen transforms, FGSM, PGD and MDI.

    Args:
        layout: of the images.
        eps: radius of the three attacks in linf, in units of the inputs.
    """
    attacks = FGSM(), PGD(steps=10), MDI(layout=layout, steps=10)
    return (*map(Natural, TRANSFORMS), *(Adversarial(attack, eps) for attack in attacks))


def as_mutators(given: Sequence[Any]) -> tuple[Mutator, ...]:
    """Mutators, and transforms as such.

    Raises:
        ConfigError: none at all, or something else.
    """
    found: list[Mutator] = []
    for each in given:
        if isinstance(each, Mutator):
            found.append(each)
        elif isinstance(each, Transform) or (isinstance(each, type) and issubclass(each, Transform)):
            found.append(Natural(each))
        else:
            raise ConfigError(
                f"{each!r} is no mutator",
                rule="a Mutator, or a Transform or its class",
                fix="an attack has a radius: Adversarial(FGSM(), eps=8/255)"
                if isinstance(each, Attack)
                else "",
                who="mutators",
            )
    if not found:
        raise ConfigError(
            "no mutators", rule="at least one", fix="standard_mutators(layout, eps)", who="mutators"
        )
    return tuple(found)
