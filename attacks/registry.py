"""All attacks by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mycelia.attacks.base import Attack
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
from mycelia.attacks.evasion.fgm import FGM, FGSM, RFGM, RFGSM
from mycelia.attacks.evasion.fmn import FMN
from mycelia.attacks.evasion.genetic import Genetic
from mycelia.attacks.evasion.geoda import GeoDA
from mycelia.attacks.evasion.hopskipjump import HopSkipJump
from mycelia.attacks.evasion.jitter import Jitter
from mycelia.attacks.evasion.jsma import JSMA
from mycelia.attacks.evasion.lbfgs import LBFGS
from mycelia.attacks.evasion.llc import LLC, RLLC
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
from mycelia.attacks.suite import AutoAttack

__all__ = ["ATTACKS", "attacks_that_need"]

ATTACKS: Final[Mapping[str, type[Attack]]] = {
    "fgm": FGM, "fgsm": FGSM, "rfgm": RFGM, "rfgsm": RFGSM,
    "bim": BIM, "pgd": PGD,
    "llc": LLC, "rllc": RLLC, "mim": MIM, "di": DI, "mdi": MDI, "apgd": APGD, "apgdt": APGDT,
    "autoattack": AutoAttack,
    "fab": FAB, "fabt": FABT, "noise": RandomNoise, "spatial": Spatial, "square": Square,
    "hopskipjump": HopSkipJump, "boundary": Boundary, "nes": NES, "genetic": Genetic, "pso": PSO,
    "pointwise": Pointwise, "saltandpepper": SaltAndPepper,
    "simba": SimBA, "signopt": SignOPT, "geoda": GeoDA, "onepixel": OnePixel, "threshold": Threshold,
    "zoo": ZOO, "pixle": Pixle,
    "carliniwagner": CarliniWagner, "ddn": DDN, "deepfool": DeepFool, "ead": EAD, "fmn": FMN, "jsma": JSMA,
    "lbfgs": LBFGS,
    "brendelbethge": BrendelBethge, "carliniwagnerl0": CarliniWagnerL0,
    "carliniwagnerlinf": CarliniWagnerLinf, "newtonfool": NewtonFool, "sparsefool": SparseFool,
    "transfer": Transfer, "vmi": VMI, "vni": VNI, "ni": NI, "sini": SINI, "ti": TI, "pi": PI,
    "jitter": Jitter,
    "adampgd": AdamPGD, "acg": ACG, "spsa": SPSA, "vat": VAT,
}  # fmt: skip


def attacks_that_need(offer: str) -> list[str]:
    """Names of the attacks that run on a model that offers this: "gradient", "score" or "label"."""
    return sorted(name for name, attack in ATTACKS.items() if offer in attack.needs.split(" or "))
