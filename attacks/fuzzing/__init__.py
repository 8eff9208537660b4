"""Fuzzing of networks: what neurons have shown, and mutants that show more."""

from mycelia.attacks.fuzzing.activations import Activations, activations, tapped
from mycelia.attacks.fuzzing.convergence import SensitivityConvergence, sensitivity
from mycelia.attacks.fuzzing.coverage import (
    BoundaryCoverage,
    Coverage,
    KMultisection,
    NeuronCoverage,
    StrongActivation,
    TopKCoverage,
)
from mycelia.attacks.fuzzing.fuzzer import Fuzzer, SensitivityFuzzer
from mycelia.attacks.fuzzing.mutators import Adversarial, Mutator, Natural, standard_mutators
from mycelia.attacks.fuzzing.result import CAVEAT, Defect, FuzzResult
from mycelia.attacks.fuzzing.validity import Validity

__all__ = [
    "CAVEAT", "Activations", "Adversarial", "BoundaryCoverage", "Coverage", "Defect", "FuzzResult", "Fuzzer",
    "KMultisection", "Mutator", "Natural", "NeuronCoverage", "SensitivityConvergence", "SensitivityFuzzer",
    "StrongActivation", "TopKCoverage", "Validity", "activations", "sensitivity", "standard_mutators",
    "tapped",
]  # fmt: skip
