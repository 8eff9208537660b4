"""One step and many steps along the gradient, as the common laws take them."""

from mycelia.attacks import BIM, FGM, FGSM, PGD, RFGM, RFGSM
from tests.attacks.worlds import Member

MEMBERS: tuple[Member, ...] = (
    *(Member(FGM(norm=p, loss="margin"), exact=True) for p in ("linf", "l2", "l1")),
    Member(FGSM()),
    *(Member(RFGM(norm=p)) for p in ("linf", "l2", "l1")),
    Member(RFGSM()),
    *(Member(BIM(norm=p, steps=5)) for p in ("linf", "l2", "l1")),
    *(Member(PGD(norm=p, steps=6, restarts=2)) for p in ("linf", "l2", "l1")),
)
