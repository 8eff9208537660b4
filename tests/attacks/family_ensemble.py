"""APGD, momentum, diversity, least likely classes and the ensemble, as the common laws take them."""

from mycelia.attacks import APGD, APGDT, DI, LLC, MDI, MIM, RLLC, AutoAttack
from tests.attacks.worlds import Member

MEMBERS: tuple[Member, ...] = (
    *(Member(LLC(norm=p)) for p in ("linf", "l2", "l1")),
    *(Member(RLLC(norm=p)) for p in ("linf", "l2", "l1")),
    *(Member(MIM(norm=p, steps=5)) for p in ("linf", "l2", "l1")),
    *(Member(DI(norm=p, steps=5, layout="nchw"), images=True) for p in ("linf", "l2")),
    *(Member(MDI(norm=p, steps=5, layout="nchw", p=0.7), images=True) for p in ("linf", "l2")),
    *(Member(APGD(norm=p, loss="margin", steps=20, restarts=2), exact=True) for p in ("linf", "l2", "l1")),
    *(Member(APGDT(norm=p, steps=20), exact=True) for p in ("linf", "l2", "l1")),
    *(Member(AutoAttack(norm=p, steps=10, queries=20), exact=True) for p in ("linf", "l2", "l1")),
)
