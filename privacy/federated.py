"""User-level privacy of a federation: each client's whole update is clipped, and the sum is noised once.

DP-FedAvg (McMahan et al., ICLR 2018, algorithm 1) for every linear algorithm: what one client sends, all its
terms together, has a norm of at most C; the server adds noise of z C to the sum; and what the sum is divided
by is public, so that neither drop-outs nor the size of the draw change noise or denominator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.sums import SumFormat, Term, Total, Update
from mycelia.privacy.clip import ClipFunction, Sensitivity
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import Stage

__all__ = ["ClipUpdate", "ServerNoise", "rounding_slack"]


@dataclass(frozen=True)
class ClipUpdate(Stage):
    """Clips a client's update, all terms together; its factor takes the place of the weight.

    Attributes:
        clip: the clip function.
    """

    place: ClassVar[str] = "clip"

    clip: ClipFunction

    def device(self, update: Update) -> Update:
        """The clipped update.

        Raises:
            ConfigError: a weight other than 1, with which a client could count for more than one.
            DataError: the update is not finite.
        """
        for name, term in update.terms.items():
            if term.weight != 1:
                raise ConfigError(
                    f"the term {name} has weight {term.weight}",
                    rule="with a clip bound per client every client has weight 1",
                    fix='set weighting = "uniform" in the algorithm',
                    who="clip",
                )
        norm = math.sqrt(sum(_square(term) for term in update.terms.values()))
        if not math.isfinite(norm):
            raise DataError("the update holds NaN or infinity", fix="lower local.lr", who="clip")
        factor = float(self.clip(torch.tensor([norm], dtype=torch.float64)))
        if factor > 0:
            terms = {name: replace(term, weight=factor) for name, term in update.terms.items()}
        else:  # left out by the clip function: the client counts, and moves nothing
            terms = {name: Term(torch.zeros_like(term.values), 1.0) for name, term in update.terms.items()}
        return Update(terms, update.metrics)


@dataclass(frozen=True)
class ServerNoise(Stage):
    """Noises the sum of the clipped updates, and fixes what it is divided by.

    Attributes:
        mechanism: the noise.
        source: where it comes from.
        noise_multiplier: z, the noise's standard deviation over the sensitivity.
        sensitivity: how far one client can move the sum, rounding included.
        expected: the public number the sum is divided by: the sampling rate times the number of clients.
    """

    place: ClassVar[str] = "noise"
    needs: ClassVar[tuple[str, ...]] = ("clip",)

    mechanism: Mechanism
    source: NoiseSource
    noise_multiplier: float
    sensitivity: Sensitivity
    expected: float

    def server(self, total: Total, round: int) -> Total:
        """The noised sum with public weights; a sum of nobody is noised like any other."""
        size = sum(tensor.numel() for tensor in total.sums.values())
        bound = self.sensitivity.total
        std = self.noise_multiplier * (bound + self.mechanism.slack(bound, size))
        sums = {
            name: self.mechanism.add(tensor, std, self.source, "noise", round, name, bound=bound)
            for name, tensor in total.sums.items()
        }
        return Total(sums, dict.fromkeys(total.weights, self.expected), total.count)


def rounding_slack(sensitivity: Sensitivity, form: SumFormat) -> Sensitivity:
    """The sensitivity with what the exact sum's rounding adds: half a step an entry.

    Args:
        sensitivity: of the clipped updates.
        form: the sum's format.
    """
    square = sum(
        spec.size * (2.0 ** -(form.formats[name].exponent + 1)) ** 2 for name, spec in form.specs.items()
    )
    return replace(sensitivity, slack=sensitivity.slack + math.sqrt(square))


def _square(term: Term) -> float:
    """Squared L2 norm of a term's vector, in float64."""
    difference: Tensor = term.values if term.minus is None else term.values - term.minus
    return float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
