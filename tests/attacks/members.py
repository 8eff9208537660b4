"""All attacks as the common laws take them: a family joins by its line here."""

from tests.attacks import (
    family_climbs,
    family_decision,
    family_ensemble,
    family_gradient,
    family_minimum,
    family_nearest,
    family_queries,
    family_random,
    family_transfer,
)
from tests.attacks.worlds import Member

__all__ = ["MEMBERS"]

MEMBERS: tuple[Member, ...] = (
    *family_gradient.MEMBERS,
    *family_minimum.MEMBERS,
    *family_nearest.MEMBERS,
    *family_random.MEMBERS,
    *family_decision.MEMBERS,
    *family_queries.MEMBERS,
    *family_ensemble.MEMBERS,
    *family_transfer.MEMBERS,
    *family_climbs.MEMBERS,
)
