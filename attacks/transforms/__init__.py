"""Changes of images that nature makes: fifteen transforms, thirteen corruptions, and accuracy under them."""

from mycelia.attacks.transforms.accuracy import (
    CorruptionReport,
    Score,
    corruption_report,
    folder_report,
    gaussian_ladder,
)
from mycelia.attacks.transforms.base import Change, Transform
from mycelia.attacks.transforms.blurs import GaussianBlur, GradientBlur, MotionBlur
from mycelia.attacks.transforms.cifar_c import corruptions_in, read_corrupted
from mycelia.attacks.transforms.corruptions import CORRUPTIONS, SEVERITIES, Corruption
from mycelia.attacks.transforms.geometry import Curve, Perspective, Rotate, Scale, Shear, Translate
from mycelia.attacks.transforms.pixels import (
    Contrast,
    GaussianNoise,
    GradientLuminance,
    NaturalNoise,
    SaltAndPepper,
    UniformNoise,
)

__all__ = [
    "CORRUPTIONS", "SEVERITIES", "TRANSFORMS", "Change", "Contrast", "Corruption", "CorruptionReport",
    "Curve", "GaussianBlur", "GaussianNoise", "GradientBlur", "GradientLuminance", "MotionBlur",
    "NaturalNoise", "Perspective", "Rotate", "SaltAndPepper", "Scale", "Score", "Shear", "Transform",
    "Translate", "UniformNoise", "corruption_report", "corruptions_in", "folder_report", "gaussian_ladder",
    "read_corrupted",
]  # fmt: skip

TRANSFORMS: tuple[type[Transform], ...] = (
    Contrast, GradientLuminance, GaussianBlur, MotionBlur, GradientBlur, UniformNoise, GaussianNoise,
    SaltAndPepper, NaturalNoise, Translate, Scale, Shear, Rotate, Perspective, Curve,
)  # fmt: skip
"""All fifteen."""
