"""Output transforms: a model that says less than it knows. That hides gradients and scores, and no weakness.

Robust accuracy behind one of these is quoted only from an attack that needs labels alone.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.goals import predicted
from mycelia.attacks.model import Model, as_model
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["LabelsOnly", "Obfuscated", "OutputNoise", "OutputTransform", "ReverseSigmoid", "Rounded"]


@dataclass(frozen=True)
class OutputTransform(ABC):
    """A change of probabilities: settings and nothing else."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:  # noqa: B027 - some have nothing to refuse
        """Refuse settings that make no sense.

        Raises:
            ConfigError: naming the setting.
        """

    @property
    def random(self) -> bool:
        """Whether two passes differ."""
        return False

    @abstractmethod
    def __call__(self, probabilities: Tensor, draws: Draws) -> Tensor:
        """What is said instead.

        Args:
            probabilities: [n, classes].
            draws: of these rows in this pass.

        Returns:
            numbers at least 0, [n, classes], or labels [n].
        """


@dataclass(frozen=True)
class LabelsOnly(OutputTransform):
    """The predicted class and nothing else."""

    def __call__(self, probabilities: Tensor, draws: Draws) -> Tensor:
        """See `OutputTransform.__call__`."""
        del draws
        return predicted(probabilities)


@dataclass(frozen=True)
class Rounded(OutputTransform):
    """Probabilities with few decimals.

    Attributes:
        decimals: at least 0; with few of them classes tie, and the first of these is predicted.
    """

    decimals: int = 2

    def check(self) -> None:
        """See `OutputTransform.check`."""
        if self.decimals < 0:
            raise ConfigError(f"decimals {self.decimals}", rule="at least 0", who="Rounded")

    def __call__(self, probabilities: Tensor, draws: Draws) -> Tensor:
        """See `OutputTransform.__call__`."""
        del draws
        return probabilities.round(decimals=self.decimals)


@dataclass(frozen=True)
class OutputNoise(OutputTransform):
    """Normal noise on probabilities, which are then brought back above 0 and to a sum of 1.

    Attributes:
        sigma: standard deviation, at least 0.
    """

    sigma: float = 0.05

    def check(self) -> None:
        """See `OutputTransform.check`."""
        if not 0 <= self.sigma < math.inf:
            raise ConfigError(f"sigma {self.sigma}", rule="at least 0 and finite", who="OutputNoise")

    @property
    def random(self) -> bool:
        """The noise is."""
        return True

    def __call__(self, probabilities: Tensor, draws: Draws) -> Tensor:
        """See `OutputTransform.__call__`."""
        noise = draws.normal("noise", probabilities.shape[1:], dtype=probabilities.dtype)
        return _normalised((probabilities + self.sigma * noise).clamp(min=0))


@dataclass(frozen=True)
class ReverseSigmoid(OutputTransform):
    """y − beta · (s(gamma · s⁻¹(y)) − ½), brought to a sum of 1, with the logistic function s.

    Lee, Edwards, Molloy, Su: "Defending against neural network model stealing attacks using deceptive
    perturbations", IEEE Security and Privacy Workshops 2019, eq. 4 and 5.

    Attributes:
        beta: size of the perturbation, in (0, 1]: what is said stays above 0.
        gamma: how soon it is as large as it gets, above 0.
    """

    beta: float = 0.7
    gamma: float = 0.2

    def check(self) -> None:
        """See `OutputTransform.check`."""
        if not 0 < self.beta <= 1 or not 0 < self.gamma < math.inf:
            raise ConfigError(
                f"beta {self.beta}, gamma {self.gamma}", rule="in (0, 1], and above 0", who="ReverseSigmoid"
            )

    def __call__(self, probabilities: Tensor, draws: Draws) -> Tensor:
        """See `OutputTransform.__call__`."""
        del draws
        turned = torch.sigmoid(self.gamma * torch.logit(probabilities.clamp(0, 1)))
        return _normalised((probabilities - self.beta * (turned - 0.5)).clamp(min=0))


class Obfuscated(Model):
    """A model of which only a transform of the probabilities is seen; it never offers a gradient.

    >>> from mycelia.attacks.planted import affine
    >>> model = Obfuscated(affine(3, 2), Rounded(1))
    >>> sorted(model.offers), sorted(model.labels.offers), model.obfuscation
    (['label', 'score'], ['label'], 'Rounded(decimals=1)')

    Attributes:
        obfuscation: what stands before the outputs, for reports.
        quotable: what an attack may need for its robust accuracy to be quoted.

    Args:
        model: see `as_model`.
        transform: of its probabilities.
        seed: of random transforms.
    """

    quotable: Final = frozenset({"label"})

    def __init__(self, model: object, transform: OutputTransform, *, seed: int = 0) -> None:
        self._inner, self._transform, self._seed, self._calls = as_model(model), transform, seed, 0
        self.name = f"{self._inner.name} behind {type(transform).__name__}"
        self.obfuscation = repr(transform)
        labels = isinstance(transform, LabelsOnly)
        self.offers = frozenset({"label"}) if labels else frozenset({"score", "label"})

    @property
    def labels(self) -> Model:
        """The same for attacks that need labels alone: the ones to quote."""
        return self if "score" not in self.offers else Obfuscated(self, LabelsOnly())

    def __call__(self, x: Tensor) -> Tensor:
        """See `Model.__call__`; scores are logarithms of what the transform gives.

        Raises:
            DataError: a model that gives labels, behind a transform of scores.
        """
        outputs = self._inner(x)
        if outputs.dim() == 1:
            if isinstance(self._transform, LabelsOnly):
                return outputs
            raise DataError("a model that gives labels only", rule="scores to transform", who=self.name)
        keys = row_keys(torch.arange(len(x), device=x.device)[:, None])
        found = self._transform(outputs.softmax(1), Draws(self._seed, f"outputs/{self._calls}", keys))
        self._calls += self._transform.random
        return found if found.dim() == 1 else found.clamp(min=torch.finfo(found.dtype).tiny).log()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """See `Model.quiet`."""
        calls = self._calls
        try:
            with self._inner.quiet():
                yield
        finally:
            self._calls = calls


def _normalised(values: Tensor) -> Tensor:
    """With a sum of 1; evenly spread where all are 0."""
    total = values.sum(1, keepdim=True)
    even = torch.full_like(values, 1 / values.shape[1])
    return torch.where(total > 0, values / total.clamp(min=torch.finfo(values.dtype).tiny), even)
