"""Boundary steps, squares, noise and moved images, as the common laws take them."""

from mycelia.attacks.evasion.fab import FAB, FABT
from mycelia.attacks.evasion.noise import RandomNoise
from mycelia.attacks.evasion.spatial import Spatial
from mycelia.attacks.evasion.square import Square
from tests.attacks.worlds import Member

MEMBERS: tuple[Member, ...] = (
    *(Member(FAB(norm=p, steps=8, restarts=2), exact=True) for p in ("linf", "l2", "l1")),
    *(Member(FABT(norm=p, steps=6, targets=3), exact=True) for p in ("linf", "l2", "l1")),
    *(Member(Square(norm=p, steps=40, restarts=2)) for p in ("linf", "l2", "l1")),
    *(Member(RandomNoise(norm=p, draws=30)) for p in ("linf", "l2", "l1", "l0")),
    # Moves small enough for some to be inside the laws' radius.
    Member(Spatial(layout="nchw", rotation=4, rotations=5, shift=0.2, shifts=3)),
)
