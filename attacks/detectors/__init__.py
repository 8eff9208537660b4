"""Detectors of attacked inputs, and what an attacker who knows them makes of them."""

from mycelia.attacks.detectors.activations import activations
from mycelia.attacks.detectors.adaptive import Guarded, Unnoticed, attack_guarded
from mycelia.attacks.detectors.autoencoder import DivergenceBased, ErrorBased
from mycelia.attacks.detectors.base import Detector
from mycelia.attacks.detectors.classifier import ActivationClassifier
from mycelia.attacks.detectors.ensemble import Ensemble
from mycelia.attacks.detectors.poison import PoisonResult, activation_clustering, spectral_signature
from mycelia.attacks.detectors.region import RegionBased, region_radius
from mycelia.attacks.detectors.report import NOT_ADAPTIVE, DetectorReport, detector_report
from mycelia.attacks.detectors.roc import Roc, area_interval, roc
from mycelia.attacks.detectors.scanning import SubsetScanning
from mycelia.attacks.detectors.similarity import Similarity
from mycelia.attacks.detectors.smoothing import SpatialSmoothing
from mycelia.attacks.detectors.strip import STRIP
from mycelia.attacks.detectors.threshold import threshold_at

__all__ = [
    "NOT_ADAPTIVE", "STRIP", "ActivationClassifier", "Detector", "DetectorReport", "DivergenceBased",
    "Ensemble", "ErrorBased", "Guarded", "PoisonResult", "RegionBased", "Roc", "Similarity",
    "SpatialSmoothing", "SubsetScanning", "Unnoticed", "activation_clustering", "activations",
    "area_interval", "attack_guarded", "detector_report", "region_radius", "roc", "spectral_signature",
    "threshold_at",
]  # fmt: skip
