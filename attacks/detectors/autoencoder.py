"""Detectors that look at what an autoencoder of benign data makes of an input.

Meng, Chen: "MagNet: a two-pronged defense against adversarial examples", CCS 2017, section 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mycelia.attacks.arguments import Bounds
from mycelia.attacks.detectors.base import Detector, Function, applied, as_rows, logits
from mycelia.attacks.divergence import jensen_shannon
from mycelia.attacks.model import as_model
from mycelia.engine.errors import ConfigError

__all__ = ["DivergenceBased", "ErrorBased"]


@dataclass(frozen=True, eq=False)
class _Reforming(Detector):
    """What both have: the autoencoder, and the inputs that it gives back."""

    autoencoder: Function
    bounds: Bounds = field(default=(0.0, 1.0), kw_only=True)

    def transform(self, x: Any) -> Tensor:
        """What the autoencoder makes of inputs, clipped to the bounds: what a reformed model is given.

        Args:
            x: inputs [n, …], floating point, a tensor or an array.

        Returns:
            as x.
        """
        rows = as_rows(x)
        low, high = (torch.as_tensor(each, dtype=rows.dtype, device=rows.device) for each in self.bounds)
        found = torch.empty_like(rows)
        with self.quiet(), torch.no_grad():
            for some in torch.arange(len(rows), device=rows.device).split(self.batch) if len(rows) else ():
                made = applied(self.autoencoder, rows[some], "autoencoder")
                found[some] = torch.minimum(torch.maximum(made, low), high)
        return found


@dataclass(frozen=True, eq=False)
class ErrorBased(_Reforming):
    """The error of reconstruction: the mean of |x − AE(x)|^p over the coordinates of a row.

    Attributes:
        autoencoder: of benign data, [n, …] to [n, …].
        p: exponent, above 0.
        bounds: of `transform`; two numbers, or two tensors that broadcast to a row.
    """

    p: float = 1.0

    def check(self) -> None:
        """See `Detector.check`."""
        if not 0 < self.p < math.inf:
            raise ConfigError(f"p is {self.p}", rule="an exponent above 0", who="ErrorBased.p")

    @property
    def parts(self) -> tuple[object, ...]:
        """See `Detector.parts`."""
        return (self.autoencoder,)

    def traced(self, x: Tensor) -> Tensor:
        """See `Detector.traced`."""
        error = (x - applied(self.autoencoder, x, "autoencoder")).flatten(1).double().abs()
        return error.pow(self.p).mean(1)


@dataclass(frozen=True, eq=False)
class DivergenceBased(_Reforming):
    """How differently a model sees an input and its reconstruction.

    The Jensen–Shannon divergence (natural logarithm, at most log 2) between softmax(z(x)/T) and
    softmax(z(AE(x))/T).

    Attributes:
        autoencoder: of benign data, [n, …] to [n, …].
        model: gives scores; see `as_model`.
        temperature: T, above 0.
        bounds: of `transform`; two numbers, or two tensors that broadcast to a row.
    """

    model: object
    temperature: float = 10.0

    def check(self) -> None:
        """See `Detector.check`."""
        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"temperature is {self.temperature}", rule="above 0", who="DivergenceBased.temperature"
            )

    @property
    def parts(self) -> tuple[object, ...]:
        """See `Detector.parts`."""
        return self.autoencoder, as_model(self.model)

    def traced(self, x: Tensor) -> Tensor:
        """See `Detector.traced`."""
        seen = logits(self.model, x, "DivergenceBased")
        again = logits(self.model, applied(self.autoencoder, x, "autoencoder"), "DivergenceBased")
        return jensen_shannon(*((each.double() / self.temperature).log_softmax(1) for each in (seen, again)))
