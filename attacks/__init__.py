"""What a changed input can still do to a model: attacks, defences, and a report that does not flatter."""

from mycelia.attacks.base import Attack, Curve
from mycelia.attacks.evaluate import SUITES, Adaptive, evaluate
from mycelia.attacks.evasion.acg import ACG
from mycelia.attacks.evasion.adam_pgd import AdamPGD
from mycelia.attacks.evasion.apgd import APGD, APGDT
from mycelia.attacks.evasion.boundary import Boundary
from mycelia.attacks.evasion.brendel_bethge import BrendelBethge
from mycelia.attacks.evasion.carlini_wagner import CarliniWagner
from mycelia.attacks.evasion.carlini_wagner_l0 import CarliniWagnerL0
from mycelia.attacks.evasion.carlini_wagner_linf import CarliniWagnerLinf
from mycelia.attacks.evasion.ddn import DDN
from mycelia.attacks.evasion.deepfool import DeepFool
from mycelia.attacks.evasion.diversity import DI, MDI
from mycelia.attacks.evasion.ead import EAD
from mycelia.attacks.evasion.fab import FAB, FABT
from mycelia.attacks.evasion.features import FeatureAdversary, FeatureResult
from mycelia.attacks.evasion.fgm import FGM, FGSM, RFGM, RFGSM
from mycelia.attacks.evasion.fmn import FMN
from mycelia.attacks.evasion.genetic import Genetic
from mycelia.attacks.evasion.geoda import GeoDA
from mycelia.attacks.evasion.hopskipjump import HopSkipJump
from mycelia.attacks.evasion.jitter import Jitter
from mycelia.attacks.evasion.jsma import JSMA
from mycelia.attacks.evasion.lbfgs import LBFGS
from mycelia.attacks.evasion.lgv import lgv_models
from mycelia.attacks.evasion.llc import LLC, RLLC, least_likely
from mycelia.attacks.evasion.momentum import MIM
from mycelia.attacks.evasion.nes import NES
from mycelia.attacks.evasion.nesterov import NI, SINI
from mycelia.attacks.evasion.newtonfool import NewtonFool
from mycelia.attacks.evasion.noise import RandomNoise
from mycelia.attacks.evasion.one_pixel import OnePixel, Threshold
from mycelia.attacks.evasion.patchwise import PI
from mycelia.attacks.evasion.pgd import BIM, PGD
from mycelia.attacks.evasion.pixle import Pixle
from mycelia.attacks.evasion.pointwise import Pointwise, SaltAndPepper
from mycelia.attacks.evasion.pso import PSO
from mycelia.attacks.evasion.sign_opt import SignOPT
from mycelia.attacks.evasion.simba import SimBA
from mycelia.attacks.evasion.sparsefool import SparseFool
from mycelia.attacks.evasion.spatial import Spatial
from mycelia.attacks.evasion.spsa import SPSA
from mycelia.attacks.evasion.square import Square
from mycelia.attacks.evasion.transfer import Transfer
from mycelia.attacks.evasion.translation import TI
from mycelia.attacks.evasion.variance import VMI, VNI
from mycelia.attacks.evasion.vat import VAT
from mycelia.attacks.evasion.zoo import ZOO
from mycelia.attacks.goals import Goal, Targeted, Untargeted, random_target
from mycelia.attacks.model import Model, as_model, with_normalisation
from mycelia.attacks.model_files import model_of
from mycelia.attacks.patch import Patch, PatchResult
from mycelia.attacks.registry import ATTACKS, attacks_that_need
from mycelia.attacks.result import AttackResult, Counts, Status
from mycelia.attacks.robustness_report import Report
from mycelia.attacks.suite import AutoAttack, MemberFacts, SuiteResult
from mycelia.attacks.threat import Threat
from mycelia.attacks.universal_change import Universal, universal
from mycelia.attacks.wasserstein import Wasserstein, WassersteinResult, project_wasserstein

__all__ = [
    "ACG",
    "APGD",
    "APGDT",
    "ATTACKS",
    "BIM",
    "DDN",
    "DI",
    "EAD",
    "FAB",
    "FABT",
    "FGM",
    "FGSM",
    "FMN",
    "JSMA",
    "LBFGS",
    "LLC",
    "MDI",
    "MIM",
    "NES",
    "NI",
    "PGD",
    "PI",
    "PSO",
    "RFGM",
    "RFGSM",
    "RLLC",
    "SINI",
    "SPSA",
    "SUITES",
    "TI",
    "VAT",
    "VMI",
    "VNI",
    "ZOO",
    "AdamPGD",
    "Adaptive",
    "Attack",
    "AttackResult",
    "AutoAttack",
    "Boundary",
    "BrendelBethge",
    "CarliniWagner",
    "CarliniWagnerL0",
    "CarliniWagnerLinf",
    "Counts",
    "Curve",
    "DeepFool",
    "FeatureAdversary",
    "FeatureResult",
    "Genetic",
    "GeoDA",
    "Goal",
    "HopSkipJump",
    "Jitter",
    "MemberFacts",
    "Model",
    "NewtonFool",
    "OnePixel",
    "Patch",
    "PatchResult",
    "Pixle",
    "Pointwise",
    "RandomNoise",
    "Report",
    "SaltAndPepper",
    "SignOPT",
    "SimBA",
    "SparseFool",
    "Spatial",
    "Square",
    "Status",
    "SuiteResult",
    "Targeted",
    "Threat",
    "Threshold",
    "Transfer",
    "Universal",
    "Untargeted",
    "Wasserstein",
    "WassersteinResult",
    "as_model",
    "attacks_that_need",
    "evaluate",
    "least_likely",
    "lgv_models",
    "model_of",
    "project_wasserstein",
    "random_target",
    "universal",
    "with_normalisation",
]  # fmt: skip
