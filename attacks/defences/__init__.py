"""Defences: stages before and after a model, smoothing with certificates, and adversarial training.

`Defended` and `Obfuscated` put a model behind transforms; `Smoothed` certifies; the others are what a
`Trainer` takes as `updates`. None of them is more than what attacks that know of it leave of it.
"""

from mycelia.attacks.defences.adaptive import adapted, defences_of, with_eot
from mycelia.attacks.defences.adversarial_training import (
    NAD,
    PAD,
    PGDAT,
    AdversarialTraining,
    GivenAdversarials,
)
from mycelia.attacks.defences.awp import AWP
from mycelia.attacks.defences.certificates import certified_radius, draws_needed, max_radius
from mycelia.attacks.defences.distillation import Distillation
from mycelia.attacks.defences.fast_at import OVERFITTING, FastAT
from mycelia.attacks.defences.free_at import FreeAT
from mycelia.attacks.defences.ibp import IBP
from mycelia.attacks.defences.inputs import (
    JPEG,
    BitDepth,
    GaussianNoise,
    MedianFilter,
    ResizePad,
    Thermometer,
)
from mycelia.attacks.defences.mart import MART
from mycelia.attacks.defences.outputs import (
    LabelsOnly,
    Obfuscated,
    OutputNoise,
    OutputTransform,
    ReverseSigmoid,
    Rounded,
)
from mycelia.attacks.defences.patch_smoothing import Bands, BandTraining, PatchCertificates, PatchSmoothed
from mycelia.attacks.defences.registry import TRAINING, build
from mycelia.attacks.defences.smoothing import ABSTAIN, Certificates, CertifiedShare, Smoothed
from mycelia.attacks.defences.stages import Defended, Stage, through
from mycelia.attacks.defences.total_variation import TotalVariation
from mycelia.attacks.defences.trades import TRADES
from mycelia.attacks.defences.training import TrainingDefence
from mycelia.attacks.defences.verification import Verified, verify

__all__ = [
    "ABSTAIN",
    "AWP",
    "IBP",
    "JPEG",
    "MART",
    "NAD",
    "OVERFITTING",
    "PAD",
    "PGDAT",
    "TRADES",
    "TRAINING",
    "AdversarialTraining",
    "BandTraining",
    "Bands",
    "BitDepth",
    "Certificates",
    "CertifiedShare",
    "Defended",
    "Distillation",
    "FastAT",
    "FreeAT",
    "GaussianNoise",
    "GivenAdversarials",
    "LabelsOnly",
    "MedianFilter",
    "Obfuscated",
    "OutputNoise",
    "OutputTransform",
    "PatchCertificates",
    "PatchSmoothed",
    "ResizePad",
    "ReverseSigmoid",
    "Rounded",
    "Smoothed",
    "Stage",
    "Thermometer",
    "TotalVariation",
    "TrainingDefence",
    "Verified",
    "adapted",
    "build",
    "certified_radius",
    "defences_of",
    "draws_needed",
    "max_radius",
    "through",
    "verify",
    "with_eot",
]
