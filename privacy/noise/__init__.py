"""Random noise that privacy rests on: where it comes from and how it is distributed.

`NoiseSource` gives named streams of secret bits; `Gaussian`, `DiscreteGaussian`, `Laplace` and `Skellam` turn
them into noise. All four are a `Mechanism`.
"""

from __future__ import annotations

from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.discrete_gaussian import DiscreteGaussian
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.laplace import Laplace
from mycelia.privacy.noise.skellam import Skellam
from mycelia.privacy.noise.source import NoiseSource, Stream

__all__ = ["DiscreteGaussian", "Gaussian", "Laplace", "Mechanism", "NoiseSource", "Skellam", "Stream"]
