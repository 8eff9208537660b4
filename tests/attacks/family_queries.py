"""More attacks by labels and scores alone, as the common laws take them."""

from mycelia.attacks import ZOO, GeoDA, OnePixel, Pixle, SignOPT, SimBA, Threshold
from tests.attacks.worlds import Member

MEMBERS: tuple[Member, ...] = (
    *(Member(SimBA(norm=p, steps=60, step_size=0.1)) for p in ("l2", "linf")),
    Member(SimBA(steps=60, basis="dct", share=0.5)),
    *(Member(SignOPT(norm=p, steps=2, probes=30, directions=5)) for p in ("l2", "linf")),
    *(Member(GeoDA(norm=p, probes=100, least=20)) for p in ("l2", "l1", "linf")),
    Member(GeoDA(probes=100, least=20, share=0.5)),
    Member(OnePixel(pixels=3, population=12, steps=6)),
    Member(Threshold(population=12, steps=6)),
    Member(ZOO(steps=12, searches=3, constant=1.0, learning_rate=0.05)),
    Member(ZOO(steps=12, searches=2, coordinates=8, constant=1.0, learning_rate=0.05)),
    Member(Pixle(steps=6, proposals=5, patch=(1, 3))),
)
