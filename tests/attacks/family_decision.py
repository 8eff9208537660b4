"""Attacks by labels and by scores without gradients, as the common laws take them."""

from mycelia.attacks import NES, PSO, Boundary, Genetic, HopSkipJump, Pointwise, SaltAndPepper
from tests.attacks.worlds import Member

MEMBERS: tuple[Member, ...] = (
    *(Member(HopSkipJump(norm=p, steps=3, probes=20)) for p in ("l2", "linf")),
    Member(Boundary(steps=40)),
    *(Member(NES(norm=p, steps=12, pairs=10)) for p in ("linf", "l2")),
    Member(NES(mode="partial", top=2, steps=12, pairs=10)),
    Member(NES(mode="label", steps=12, pairs=10, copies=3)),
    Member(Genetic(steps=20)),
    Member(PSO(steps=10, particles=10, reduce=5)),
    *(Member(Pointwise(norm=p, starts=2)) for p in ("l0", "l1", "l2")),
    *(Member(SaltAndPepper(norm=p, steps=40, ladder=10)) for p in ("l0", "l1", "l2")),
)
