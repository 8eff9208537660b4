"""Smallest changes: constants, Newton's steps and walks along the boundary, as the common laws take them."""

from mycelia.attacks import (
    BrendelBethge,
    CarliniWagner,
    CarliniWagnerL0,
    CarliniWagnerLinf,
    NewtonFool,
    SparseFool,
)
from tests.attacks.worlds import Member

MEMBERS: tuple[Member, ...] = (
    Member(CarliniWagner(steps=15, searches=3, constant=1.0, learning_rate=0.05, start="boundary")),
    Member(CarliniWagnerLinf(steps=10, rounds=6, learning_rate=0.02)),
    Member(CarliniWagnerL0(steps=15, rounds=12, learning_rate=0.2, constant=1.0)),
    Member(NewtonFool(steps=40, eta=0.03)),
    *(Member(BrendelBethge(norm=p, steps=8, restarts=2)) for p in ("l2", "linf", "l1")),
    *(Member(SparseFool(norm=p, steps=8), exact=p == "l1") for p in ("l1", "l0")),
)
