"""What a sampler allows a factorisation to be accounted as: the plan, and its sensitivity in the sampler."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from mycelia.engine.errors import ConfigError
from mycelia.privacy.factorisation.banded import Banded
from mycelia.privacy.factorisation.base import Plan, Strategy
from mycelia.privacy.sampling import CyclicPoisson, MinSep, Sampler

__all__ = ["Planned", "planned"]


class Planned(NamedTuple):
    """A factorised run.

    Attributes:
        sampler: the one that was given, with the sensitivity that its events are accounted with.
        plan: the steps, uses and separation that the sensitivity holds for.
    """

    sampler: MinSep | CyclicPoisson
    plan: Plan


def planned(strategy: Strategy, sampler: Sampler, steps: int | None = None) -> Planned:
    """The plan of a run with correlated noise, and its sampler with the sensitivity.

    With `MinSep(k, b)` the run is one Gaussian release of multiplier z / sens(C; k, b) over k·b steps. With
    `CyclicPoisson` and no more bands than groups an example's steps do not overlap, so sampling amplifies
    (Choquette-Choo et al., NeurIPS 2023, theorem 4): ⌈n / b⌉ draws, each with z over the length of a column.

    Args:
        strategy: C, fitted.
        sampler: `MinSep`, or `CyclicPoisson` for a `Banded` strategy.
        steps: n, for a sampler that does not end by itself.

    Raises:
        ConfigError: no bound is known for the pair, the steps are missing or disagree with the sampler, or
            the sampler has the sensitivity of something else.

    >>> from mycelia.privacy.factorisation import SqrtToeplitz, planned
    >>> run = planned(SqrtToeplitz(), MinSep(uses=1, separation=10))
    >>> run.plan.steps, round(run.sampler.sensitivity, 6)
    (10, 1.338411)
    """
    if isinstance(sampler, MinSep):
        plan = Plan(sampler.uses * sampler.separation, sampler.uses, sampler.separation)
        if steps not in (None, plan.steps):
            raise ConfigError(
                f"{steps} steps with {sampler.uses} uses, {sampler.separation} apart",
                rule=f"the sampler draws {plan.steps} steps",
                fix="leave steps out, or give the sampler other uses",
                who="factorisation",
            )
        moved = strategy.sensitivity(plan)
    elif isinstance(sampler, CyclicPoisson) and isinstance(strategy, Banded):
        if steps is None:
            raise ConfigError(
                "no planned steps",
                rule="correlated noise is made for a number of steps",
                fix="pass steps=",
                who="factorisation",
            )
        if strategy.bands > sampler.bands:
            raise ConfigError(
                f"{strategy.bands} bands for {sampler.bands} groups",
                rule="an example comes back no sooner than its noise is forgotten",
                fix=f"use Banded({sampler.bands}), or a sampler of {strategy.bands} groups",
                who="factorisation",
            )
        # One column: those of an example's other steps share no row with it.
        plan, moved = Plan(steps), strategy.sensitivity(Plan(steps))
    else:
        raise ConfigError(
            f"{strategy.name} with {type(sampler).__name__}",
            rule="correlated noise needs to know how often and how soon an example comes back",
            fix="use MinSep(uses, separation), or CyclicPoisson with Banded",
            who="factorisation",
        )
    if sampler.sensitivity and not math.isclose(sampler.sensitivity, moved, rel_tol=1e-9):
        raise ConfigError(
            f"the sampler has the sensitivity {sampler.sensitivity:g}, the strategy {moved:g}",
            rule="what is accounted is what is added",
            fix="leave the sampler's sensitivity out",
            who="factorisation",
        )
    return Planned(replace(sampler, sensitivity=_rounded(moved)), plan)


def _rounded(moved: float) -> float:
    """A little above, in twelve digits: the events of one run are alike on machines that round otherwise."""
    return float(f"{moved * (1 + 1e-12):.12g}")
