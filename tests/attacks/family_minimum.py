"""Smallest changes by gradients, as the common laws take them."""

from mycelia.attacks import DDN, EAD, FMN, JSMA, LBFGS, CarliniWagner, DeepFool
from tests.attacks.worlds import Member

MEMBERS: tuple[Member, ...] = (
    Member(CarliniWagner(steps=20, searches=3, constant=1.0, learning_rate=0.05)),
    *(Member(DeepFool(norm=p), exact=True) for p in ("l2", "linf")),
    *(Member(FMN(norm=p, steps=15)) for p in ("l2", "linf", "l1", "l0")),
    Member(DDN(steps=15, radius=0.5, step_size=0.5)),
    *(Member(EAD(steps=20, searches=4, constant=1.0, step_size=0.05, rule=rule)) for rule in ("EN", "L1")),
    Member(JSMA(share=0.5)),
    Member(LBFGS(steps=10, searches=4, constant=1.0)),
)
