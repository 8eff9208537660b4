"""Steps of other kinds than the gradient's, as the common laws take them."""

from mycelia.attacks import ACG, SPSA, VAT, AdamPGD
from tests.attacks.worlds import Member

MEMBERS: tuple[Member, ...] = (
    *(Member(AdamPGD(norm=p, steps=6, restarts=2)) for p in ("linf", "l2")),
    *(Member(ACG(norm=p, steps=8, restarts=2)) for p in ("linf", "l2")),
    *(Member(SPSA(norm=p, steps=4, pairs=6)) for p in ("linf", "l2")),
    Member(VAT(iterations=3)),
)
