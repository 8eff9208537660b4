"""Matrix factorisations for correlated noise (DP-FTRL).

Training releases prefix sums of the gradients: A g with A the lower triangular matrix of ones. With A = B C
the run releases C g + z and gets B (C g + z) = A g + B z, so step t adds row t of C⁻¹ z to its gradient. The
whole run is one Gaussian release of multiplier z / sensitivity(C): an exact epsilon, without any sampling.
Noise that is correlated cancels in the sums, so less of it arrives in the model.

A strategy is a choice of C. `Identity`, `Tree`, `SqrtToeplitz`, `Banded` and `BLT` are frozen values;
`optimise` fits the last two to a plan. `CorrelatedNoise` streams a strategy's noise, and `planned` says how a
sampler's run with it is accounted.
"""

from __future__ import annotations

from mycelia.privacy.factorisation.banded import Banded
from mycelia.privacy.factorisation.base import Error, Plan, Strategy, Workload, error, sensitivity
from mycelia.privacy.factorisation.blt import BLT
from mycelia.privacy.factorisation.identity import Identity
from mycelia.privacy.factorisation.optimise import fitted, optimise
from mycelia.privacy.factorisation.planned import Planned, planned
from mycelia.privacy.factorisation.registry import STRATEGIES, build
from mycelia.privacy.factorisation.stream import CorrelatedNoise, NoiseState
from mycelia.privacy.factorisation.toeplitz import SqrtToeplitz
from mycelia.privacy.factorisation.tree import Tree

__all__ = [
    "BLT",
    "STRATEGIES",
    "Banded",
    "CorrelatedNoise",
    "Error",
    "Identity",
    "NoiseState",
    "Plan",
    "Planned",
    "SqrtToeplitz",
    "Strategy",
    "Tree",
    "Workload",
    "build",
    "error",
    "fitted",
    "optimise",
    "planned",
    "sensitivity",
]
