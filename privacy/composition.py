"""What composed releases lose: by privacy loss distributions, by Rényi divergences, exactly for Gaussians.

All arithmetic on ε and δ is dp-accounting's. What is chosen here is the grid, the tails and the orders, and
each choice errs upwards: losses are discretised by connect-the-dots (Doroshenko et al., "Connect the dots",
PETS 2022), tails that are cut off count as infinite loss, noise multipliers are only ever rounded down, and
what the Fourier transform may have lost to rounding is taken from δ first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Composition", "Loss", "Mechanism", "gaussian_delta", "gaussian_epsilon", "rdp_delta"]

Array = NDArray[np.float64]

_DISTINCT = 24  # noise multipliers of one mechanism that are composed one by one
_MOST_GROUPS = 150
_EXCESS = 0.006  # by which grouping may raise the variance of the loss; ε grows by about half of it
_UNITS = 2048  # of equal length that the steps of a long schedule are cut into
_LARGEST = 64  # units in a group
_FINEST = 32  # cells in the standard deviation of a typical step, where there are few kinds of step
_FEW = 4
_STAGE = 1024  # equal steps that are composed at once
_LONGEST = 2**21  # points of a composed distribution
_KNOTS = 64
_POINTS = 2**20  # of the grids of all single steps together
_SLOW_POINTS = 2**15  # likewise, where dp-accounting makes the grid
_WIDEST = 0.125  # of a grid's cells, in units of loss
_LARGE = 650.0
_LEAST_Z = 1e-6  # below, ε is beyond 10¹¹ and printed as infinite
_HIGHEST = 4096  # order that dp-accounting's sums, which have as many terms, are asked for
_WHOLE = (*range(2, 7), 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 63, 128, 256, 512, 1024)
_FINE = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)


class Mechanism(NamedTuple):
    """One update, but for its noise multiplier.

    Attributes:
        kind: "gaussian", "poisson", "replace-poisson" (replace-one neighbours), "truncated", "mixture",
            "fixed", "laplace" or "curve".
        rate: sampling rate, in (0, 1].
        size: examples in a fixed batch, cap of a truncated one, or examples of a user in a mixture.
        population: examples there are, for "truncated" and "fixed".
        orders: of a curve.
        values: of a curve.
    """

    kind: str
    rate: float = 1.0
    size: int = 0
    population: int = 0
    orders: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    @property
    def has_pld(self) -> bool:
        """Whether dp-accounting knows its privacy loss distribution."""
        return self.kind in ("gaussian", "poisson", "replace-poisson", "truncated", "mixture", "laplace")

    @property
    def has_rdp(self) -> bool:
        """Whether dp-accounting knows its Rényi divergences."""
        return self.kind in ("gaussian", "poisson", "fixed", "curve") or (
            self.kind == "laplace" and self.rate == 1
        )


GAUSSIAN = Mechanism("gaussian")


@dataclass(frozen=True)
class Loss:
    """A composed privacy loss distribution, rounded upwards.

    Attributes:
        pld: dp-accounting's object.
        slack: probability that rounding of the Fourier transform may have hidden; added to every δ.
        coarse: whether the grid is too wide, or the slack too large, for a tight answer.
    """

    pld: Any
    slack: float
    coarse: bool

    def epsilon(self, delta: float) -> float:
        """The smallest ε that holds with `delta`, or inf."""
        if delta <= self.slack:
            return math.inf
        try:
            with np.errstate(all="ignore"):
                found = float(self.pld.get_epsilon_for_delta(delta - self.slack))
        except OverflowError:  # the search has gone below a loss of -700: no positive ε is needed
            return 0.0
        # Beyond, e^-ε has lost its digits, and the search with it; δ of ε has not.
        return max(0.0, found) if found < _LARGE else self._bisected(delta)

    def _bisected(self, delta: float) -> float:
        """The same by the δ of one ε after the other."""
        low, high = 0.0, _LARGE
        while self.delta(np.array([high]))[0] > delta:
            low, high = high, 2 * high
            if high > 1e13:
                return math.inf
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            if self.delta(np.array([middle]))[0] > delta:
                low = middle
            else:
                high = middle
        return high

    def delta(self, epsilon: Array) -> Array:
        """δ at each ε, which ascend; [n] to [n]."""
        one = len(epsilon) == 1  # for which dp-accounting has a formula that never overflows
        with np.errstate(all="ignore"):
            given = float(epsilon[0]) if one else epsilon
            found = np.atleast_1d(np.asarray(self.pld.get_delta_for_epsilon(given), dtype=np.float64))
        return np.clip(np.nan_to_num(found, nan=1.0) + self.slack, 0.0, 1.0)


class Composition:
    """Releases of the same data, composed.

    Args:
        parts: noise multipliers [n] of each mechanism, and how often each ran [n]. Where the relation is
            replace-one, those of Gaussian and fixed-size parts are halved already; where the unit is a user,
            they are divided by the user's examples.

    Attributes:
        parts: the same with the noise multipliers ascending, each once.
    """

    def __init__(self, parts: Mapping[Mechanism, tuple[Array, Array]]) -> None:
        self.parts: dict[Mechanism, tuple[Array, Array]] = {}
        for mechanism in sorted(parts):
            zs, place = np.unique(parts[mechanism][0], return_inverse=True)
            if len(zs):
                self.parts[mechanism] = (
                    zs,
                    np.bincount(place, weights=parts[mechanism][1]).astype(np.float64),
                )
        self._losses: dict[tuple[int, int], Loss | None] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing was released."""
        return not self.parts

    @property
    def noiseless(self) -> bool:
        """Whether something was released (nearly) as it is."""
        return any(zs[0] < _LEAST_Z for mechanism, (zs, _) in self.parts.items() if mechanism.kind != "curve")

    @property
    def chance(self) -> float:
        """Bound on the probability that an example is ever drawn, which is a δ for ε = 0."""
        return sum(
            float(counts.sum()) * mechanism.rate * (mechanism.size if mechanism.kind == "mixture" else 1)
            for mechanism, (_, counts) in self.parts.items()
        )

    @property
    def gaussian(self) -> float | None:
        """Noise multiplier of the one Gaussian release that equals them; None when others are among them."""
        return _merged(*self.parts[GAUSSIAN]) if set(self.parts) == {GAUSSIAN} else None

    @property
    def without_pld(self) -> list[str]:
        """Kinds that have no privacy loss distribution."""
        return [mechanism.kind for mechanism in self.parts if not mechanism.has_pld]

    @property
    def without_rdp(self) -> list[str]:
        """Kinds that have no Rényi divergences."""
        return [mechanism.kind for mechanism in self.parts if not mechanism.has_rdp]

    def loss(self, delta: float) -> Loss | None:
        """The composed distribution, with tails cut for `delta`; None where the numbers have no grid."""
        tail = _tail(delta, sum(float(counts.sum()) for _, counts in self.parts.values()))
        # The Fourier transform can tell nothing from rounding below 1e-15.
        digits = max(-15, math.floor(math.log10(delta)) if delta > 0 else -15)
        if (key := (tail, digits)) not in self._losses:
            self._losses[key] = _compose(self.parts, 10.0**digits, tail)
        return self._losses[key]

    def rdp(self, orders: Sequence[float]) -> Array:
        """Rényi divergence at orders above 1, [n] to float64 [n]; inf where no bound is known."""
        total = np.zeros(len(orders))
        for mechanism, (zs, counts) in self.parts.items():
            for z, count in zip(*_few(mechanism, zs, counts), strict=True):
                total += count * np.array([_rdp(mechanism, float(z), float(order)) for order in orders])
        return total

    def selected(self, orders: Sequence[float], mean: float, shape: float) -> Array:
        """Rényi divergence of the best of a random number of such runs; [n] to [n], inf where unknown.

        The parts hold no curves, and all of them know their divergences.
        """
        import dp_accounting as dp

        steps = [
            dp.SelfComposedDpEvent(_event(mechanism, float(z)), round(count))
            for mechanism, pairs in self.parts.items()
            for z, count in zip(*pairs, strict=True)
        ]
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
        if any(mechanism.kind == "fixed" for mechanism in self.parts):
            relation = dp.NeighboringRelation.REPLACE_ONE
        best = dp.dp_event.RepeatAndSelectDpEvent(dp.ComposedDpEvent(steps), mean, shape)
        with np.errstate(all="ignore"), _silent("absl"):
            found = dp.rdp.RdpAccountant(orders, relation).compose(best).rdp
        return np.nan_to_num(np.asarray(found, dtype=np.float64), nan=math.inf, posinf=math.inf)

    def rdp_epsilon(self, delta: float) -> tuple[float, float]:
        """The least ε over the orders, and its order; (inf, 0) where there is none."""
        few = {mechanism: _few(mechanism, *each) for mechanism, each in self.parts.items()}

        def at(order: float) -> float:
            divergence = sum(
                count * _rdp(mechanism, float(z), order)
                for mechanism, (zs, counts) in few.items()
                for z, count in zip(zs, counts, strict=True)
            )
            return _converted(order, divergence, delta)

        curves = [mechanism for mechanism in self.parts if mechanism.kind == "curve"]
        if curves:
            known = {
                a
                for each in curves
                for a, value in zip(each.orders, each.values, strict=True)
                if value < math.inf
            }
            found = {order: at(order) for order in sorted(known) if order < math.inf} or {2.0: math.inf}
        else:
            found = _search(at, whole=any(mechanism.kind == "fixed" for mechanism in self.parts))
        order = min(found, key=found.__getitem__)
        return (found[order], order) if math.isfinite(found[order]) else (math.inf, 0.0)


def gaussian_epsilon(z: float, delta: float) -> float:
    """ε of one Gaussian release, exactly (Balle & Wang, ICML 2018, theorem 8).

    Args:
        z: noise multiplier, above 0.
        delta: in (0, 1).
    """
    import dp_accounting

    if z < _LEAST_Z:
        return math.inf
    with np.errstate(all="ignore"):
        found = float(dp_accounting.get_epsilon_gaussian(z, delta))
    # The root is good to 1e-12, on either side.
    return found * (1 + 1e-12) + 1e-12 if found > 0 else found if found == 0 else math.inf


def gaussian_delta(z: float, epsilon: Array) -> Array:
    """δ of one Gaussian release at each ε, [n] to [n]."""
    from dp_accounting.pld import privacy_loss_mechanism

    with np.errstate(all="ignore"):
        loss = privacy_loss_mechanism.GaussianPrivacyLoss(z)
        return np.clip(np.asarray(loss.get_delta_for_epsilon(epsilon)) + 1e-16, 0.0, 1.0)


def rdp_delta(orders: Sequence[float], divergences: Array, epsilon: float) -> float:
    """δ at ε from Rényi divergences [n] at orders [n]; 1 where they say nothing."""
    from dp_accounting.rdp import rdp_privacy_accountant

    known = np.isfinite(divergences)
    if not known.any():
        return 1.0
    given = np.asarray(orders)[known], divergences[known]
    return float(rdp_privacy_accountant.compute_delta(*given, epsilon)[0])


def _merged(zs: Array, counts: Array) -> float:
    """Gaussian releases compose to one: 1/z² adds."""
    with np.errstate(all="ignore"):
        return float(1 / math.sqrt(total)) if (total := float(np.sum(counts / zs**2))) > 0 else math.inf


# Privacy loss distributions.


def _tail(delta: float, steps: float) -> int:
    """Log of the mass that a step may cut off: a ten-thousandth of δ over all of them."""
    wanted = math.log(max(delta, 1e-300)) - math.log(1e4) - math.log(max(steps, 1.0))
    return int(np.clip(2 * math.floor(wanted / 2), -700, -20))  # even, so that steps can be used again


def _compose(parts: Mapping[Mechanism, tuple[Array, Array]], delta: float, tail: int) -> Loss | None:
    """The privacy loss of all parts on one grid."""
    chains = [_chain(mechanism, zs, counts) for mechanism, (zs, counts) in parts.items()]
    steps = [(mechanism, z, times * chain.rounds) for chain in chains for mechanism, z, times in chain.steps]
    total = sum(count for *_, count in steps)
    slack = 1e-14 + 5e-16 * total
    cut = delta * 1e-4 / (4 * len(steps) + 1)
    try:
        with np.errstate(all="ignore"):
            interval, coarse = _grid(steps, tail)
            losses = [loss for chain in chains for loss in chain.losses(interval, tail, cut)]
            composed = _product(losses, cut)
    except (ArithmeticError, ValueError, MemoryError):  # beyond what dp-accounting can put on a grid
        return None
    return Loss(composed, slack, coarse or slack > delta / 20)


class _Chain(NamedTuple):
    """Steps of one mechanism, the whole of them `rounds` times over.

    Attributes:
        steps: mechanism, noise multiplier and times; powers of two where the chain is `even`.
        rounds: at least 1.
        even: whether many noise multipliers were grouped.
    """

    steps: list[tuple[Mechanism, float, int]]
    rounds: int = 1
    even: bool = False

    def losses(self, interval: float, tail: int, cut: float) -> list[Any]:
        """Privacy losses whose composition is that of the chain."""
        if not self.even:
            return [_repeated(_one_step(m, z, interval, tail), times, cut) for m, z, times in self.steps]
        # Squaring what there is before the next, half as frequent steps join takes a few short convolutions
        # where a power for each would take long ones.
        whole, times = None, max(times for *_, times in self.steps)
        while times:
            few = [_one_step(m, z, interval, tail) for m, z, often in self.steps if often == times]
            left = cut / (times * self.rounds)
            if whole is not None:
                few.append(whole.compose(whole, left))
            whole = _product(few, left) if few else None
            times //= 2
        return [_repeated(whole, self.rounds, cut)]


def _product(losses: list[Any], cut: float) -> Any:
    """All composed, in pairs, so that few convolutions are long."""
    while len(losses) > 1:
        pairs = zip(losses[::2], losses[1::2], strict=False)
        losses = [left.compose(right, cut) for left, right in pairs] + losses[len(losses) & ~1 :]
    return losses[0]


def _grid(steps: Sequence[tuple[Mechanism, float, int]], tail: int) -> tuple[float, bool]:
    """The width of the grid, of a fixed ladder, and whether it is coarser than a tight answer needs.

    Connect-the-dots with a width h adds about h²/6 to the variance of a step's loss. A thirty-second
    to an eighth of the typical step's standard deviation therefore moves ε by a few hundredths of a percent
    to a tenth.
    """
    total = sum(count for *_, count in steps)
    variance = sum(count * float(_spread(mechanism, np.array([z]))[0]) ** 2 for mechanism, z, count in steps)
    least: dict[Mechanism, float] = {}
    for mechanism, z, _ in steps:
        least[mechanism] = min(z, least.get(mechanism, math.inf))
    widths = {mechanism: _width(mechanism, z, tail) for mechanism, z in least.items()}  # the widest
    needed = sum(
        widths[mechanism] / (_SLOW_POINTS if mechanism.kind in ("truncated", "laplace") else _POINTS)
        for mechanism, *_ in steps
    )
    typical = math.sqrt(variance / total)
    wanted = max(
        typical / (_FINEST if len(steps) <= _FEW else _FINEST // 2),
        5e-5 / math.sqrt(total),  # adds less to ε than is printed
        needed,
        20 * (math.sqrt(variance) + 2 * max(widths.values())) / _LONGEST,
        math.sqrt(total * max(widths.values()) * 1e-15),  # finer, and differences of δ would be rounding
    )
    interval = 2.0 ** (math.ceil(4 * math.log2(wanted)) / 4)
    return interval, interval > typical / 4


def _spread(mechanism: Mechanism, z: Array) -> Array:
    """About the standard deviation of a step's loss, [n] to [n].

    It is √χ² where losses are small. Where they are not, an example that is drawn, with probability q, has a
    loss of 1/(2z²) + log q or more, with a deviation of 1/z.
    """
    q = mechanism.rate
    if mechanism.kind == "laplace":
        return np.minimum(q * np.expm1(np.minimum(1 / z, 700.0)), 1 / z)
    if mechanism.kind == "mixture":
        k = mechanism.size
        growth = k * np.log1p(q * np.expm1(np.minimum(k / z**2, 700.0)))
        chi = np.expm1(np.minimum(growth, 700.0))
        q, z = -math.expm1(k * math.log1p(-q)), z / k
    else:
        z = z / 2 if mechanism.kind == "replace-poisson" else z
        chi = q**2 * np.expm1(np.minimum(1 / z**2, 700.0))
    drawn = np.maximum(1 / (2 * z**2) + math.log(q), 0.0)
    spread: Array = np.sqrt(np.minimum(chi, q / z**2 + q * (1 - q) * drawn**2))
    return spread


def _width(mechanism: Mechanism, z: float, tail: int) -> float:
    """From the lowest to the highest loss that a step's grid has to hold."""
    if mechanism.kind == "laplace":
        return 2 / z
    if mechanism.kind == "truncated":  # a part of it has twice the sensitivity, towards replaced examples
        mechanism, z = mechanism._replace(kind="replace-poisson"), z / 2
    adjacency = "REPLACE" if mechanism.kind == "replace-poisson" else "REMOVE"
    bounds = _privacy_loss(mechanism, z, tail, adjacency).connect_dots_bounds()
    return float(bounds.epsilon_upper - bounds.epsilon_lower)


def _privacy_loss(mechanism: Mechanism, z: float, tail: int, adjacency: str = "REMOVE") -> Any:
    """dp-accounting's privacy loss of one update towards one kind of neighbour."""
    from dp_accounting.pld import privacy_loss_mechanism as losses

    if mechanism.kind == "mixture":
        drawn, chances = _binomial(mechanism.size, mechanism.rate)
        return losses.MixtureGaussianPrivacyLoss(
            z,
            drawn,
            chances,
            log_mass_truncation_bound=tail,
            adjacency_type=losses.AdjacencyType[adjacency],
        )
    return losses.GaussianPrivacyLoss(
        z,
        sampling_prob=mechanism.rate,
        log_mass_truncation_bound=tail,
        adjacency_type=losses.AdjacencyType[adjacency],
    )


@lru_cache(maxsize=128)
def _one_step(mechanism: Mechanism, z: float, interval: float, tail: int) -> Any:
    """The privacy loss distribution of one update."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    if mechanism.kind == "laplace":
        return pld.from_laplace_mechanism(
            z, value_discretization_interval=interval, sampling_prob=mechanism.rate
        )
    if mechanism.kind == "truncated":
        return pld.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=mechanism.population,
            sampling_probability=mechanism.rate,
            truncated_batch_size=mechanism.size,
            noise_multiplier=z,
            value_discretization_interval=interval,
            log_mass_truncation_bound=tail,
        )
    if mechanism.kind == "replace-poisson":
        return pld.PrivacyLossDistribution(_dots(mechanism, z, interval, tail, "REPLACE"))
    removed = _dots(mechanism, z, interval, tail, "REMOVE")
    symmetric = mechanism == GAUSSIAN
    return pld.PrivacyLossDistribution(
        removed, None if symmetric else _dots(mechanism, z, interval, tail, "ADD")
    )


def _dots(mechanism: Mechanism, z: float, interval: float, tail: int, adjacency: str) -> Any:
    """Connect-the-dots on a grid that widens with the loss, as the few large losses need no fine one."""
    from dp_accounting.pld import pld_pmf

    loss = _privacy_loss(mechanism, z, tail, adjacency)
    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    widest = max(1, int(_WIDEST / interval))
    above, below = _marks(max(high, 1), widest), _marks(max(-low, 1), widest)
    marks = np.array([-mark for mark in reversed(below)] + [0, *above])
    deltas = np.asarray(loss.get_delta_for_epsilon(marks * interval), dtype=np.float64)
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]  # rounding may have broken the order
    return pld_pmf.create_pmf_pessimistic_connect_dots(interval, marks, deltas)


def _marks(last: int, widest: int) -> list[int]:
    """Places from 1 to `last`, one apart at first and then a 32nd of their distance from 0."""
    marks = [1]
    while marks[-1] < last:
        marks.append(min(last, marks[-1] + max(1, min(marks[-1] // 32, widest))))
    return marks


def _binomial(examples: int, rate: float) -> tuple[list[float], list[float]]:
    """How many of a user's examples a Poisson draw holds, and how probable that is."""
    from scipy.stats import binom

    chances = np.asarray(binom.pmf(np.arange(examples + 1), examples, rate))
    kept = np.flatnonzero(chances)
    return [float(number) for number in kept], [float(chance) for chance in chances[kept]]


def _repeated(loss: Any, count: int, cut: float) -> Any:
    """`count` equal updates."""
    if count <= 2 * _STAGE:
        return loss.self_compose(count, cut) if count > 1 else loss
    # dp-accounting bounds the support of a power by moments at orders that suit few steps; in two stages the
    # bound stays close, and memory with it.
    whole, rest = divmod(count, _STAGE)
    stage = loss.self_compose(_STAGE, cut / (2 * whole)).self_compose(whole, cut)
    return stage.compose(loss.self_compose(rest, cut), cut) if rest else stage


def _chain(mechanism: Mechanism, zs: Array, counts: Array) -> _Chain:
    """The steps of a mechanism, many noise multipliers as few."""
    if mechanism == GAUSSIAN:
        return _Chain([(mechanism, _merged(zs, counts), 1)])
    if len(zs) <= _DISTINCT:
        return _Chain([(mechanism, float(z), round(n)) for z, n in zip(zs, counts, strict=True)])
    groups, unit = _grouped(_spread(mechanism, zs) ** 2, counts)
    return _Chain([(mechanism, float(zs[index]), times) for index, times in groups], unit, even=True)


def _grouped(losses: Array, counts: Array) -> tuple[list[tuple[int, int]], int]:
    """Groups for many noise multipliers, each at its smallest.

    A group is a power of two of equal units of steps, as large as a limit on what it adds to the variance of
    the loss allows; the limit is lowered until all groups together add little, or are many.

    Args:
        losses: variance of a step's loss by noise multiplier, descending [n].
        counts: how often each, [n].

    Returns:
        The index of each group's noise multiplier and its number of units; and the steps in a unit.
    """
    ends = np.cumsum(counts)
    steps = round(ends[-1])
    unit = -(-steps // _UNITS)
    units = -(-steps // unit)
    edges = np.arange(units + 1) * unit
    place = np.minimum(np.searchsorted(ends, edges, side="right"), len(counts) - 1)
    passed = np.interp(edges, np.append(0.0, ends), np.append(0.0, np.cumsum(counts * losses)))
    allowed = passed[-1]
    while True:
        groups, added, start = [], 0.0, 0
        while start < units:
            times, excess = 1, _added(losses[place[start]], passed, start, 1, unit)
            while times < _LARGEST and start + 2 * times <= units:
                larger = _added(losses[place[start]], passed, start, 2 * times, unit)
                if larger > allowed:
                    break
                times, excess = 2 * times, larger
            groups.append((int(place[start]), times))
            start, added = start + times, added + excess
        if added <= _EXCESS * passed[-1] or len(groups) > _MOST_GROUPS / 1.5:
            return groups, unit
        allowed /= 2


def _added(loss: float, passed: Array, start: int, times: int, unit: int) -> float:
    """By how much the variance of these units grows when each step has the first one's."""
    return float(loss * times * unit - (passed[start + times] - passed[start]))


# Rényi divergences.


def _few(mechanism: Mechanism, zs: Array, counts: Array) -> tuple[Array, Array]:
    """Few noise multipliers, with fractional counts, whose divergence is never less.

    At integer orders that of a sampled Gaussian is log-sum-exp of lines in 1/z², so convex in it, and each z
    may be replaced by a mixture of the two knots around it.
    """
    if mechanism == GAUSSIAN:
        return np.array([_merged(zs, counts)]), np.ones(1)
    if len(zs) <= _KNOTS:
        return zs, counts
    if mechanism.kind != "poisson":
        groups, unit = _grouped(_spread(mechanism, zs) ** 2, counts)
        index, times = np.array(groups).T
        return zs[index], times * float(unit)
    knots = np.linspace(1 / zs[-1], 1 / zs[0], _KNOTS)[::-1] ** 2  # descending in 1/z²
    knots[0], knots[-1] = 1 / zs[0] ** 2, 1 / zs[-1] ** 2
    place = np.interp(-1 / zs**2, -knots, np.arange(_KNOTS))
    low = np.minimum(place.astype(np.int64), _KNOTS - 2)
    share = (knots[low] - 1 / zs**2) / (knots[low] - knots[low + 1])
    weights = np.zeros(_KNOTS)
    np.add.at(weights, low, counts * (1 - share))
    np.add.at(weights, low + 1, counts * share)
    return 1 / np.sqrt(knots), weights


@lru_cache(maxsize=2**16)
def _rdp(mechanism: Mechanism, z: float, order: float) -> float:
    """Rényi divergence of one update, with what rounding may have taken off added."""
    if mechanism.kind == "curve":
        return _interpolated(mechanism.orders, mechanism.values, order)
    if not mechanism.has_rdp or z < _LEAST_Z or (order > _HIGHEST and mechanism.kind != "gaussian"):
        return math.inf
    import dp_accounting as dp

    event = _event(mechanism, z)
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if mechanism.kind == "fixed":
        relation = dp.NeighboringRelation.REPLACE_ONE
    try:
        with np.errstate(all="ignore"), _silent("absl"):
            found = float(dp.rdp.RdpAccountant([order], relation).compose(event).rdp[0])
    except (ArithmeticError, ValueError):
        return math.inf
    if not math.isfinite(found):  # a series between whole orders that does not converge
        near = {float(math.floor(order)), float(math.ceil(order))} - {1.0, order}
        return _interpolated(sorted(near), [_rdp(mechanism, z, each) for each in sorted(near)], order)
    # Below 1e-15 the sum of its terms is rounding, and may even be negative.
    return max(found, 0.0) + 1e-15


def _event(mechanism: Mechanism, z: float) -> Any:
    """One update as dp-accounting's Rényi accountant knows it."""
    import dp_accounting as dp

    if mechanism.kind == "laplace":
        return dp.LaplaceDpEvent(z)
    if mechanism.kind == "poisson":
        return dp.PoissonSampledDpEvent(mechanism.rate, dp.GaussianDpEvent(z))
    if mechanism.kind == "fixed":
        return dp.SampledWithoutReplacementDpEvent(
            mechanism.population, mechanism.size, dp.GaussianDpEvent(z)
        )
    return dp.GaussianDpEvent(z)


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """What this logger warns of is dealt with here."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _interpolated(orders: Sequence[float], values: Sequence[float], order: float) -> float:
    """A bound at any order: (order − 1) · divergence is convex, so chords lie above it."""
    known = sorted(
        (a, value)
        for a, value in zip(orders, values, strict=True)
        if math.isfinite(a) and math.isfinite(value)
    )
    below = [(a, value) for a, value in known if a <= order]
    above = [(a, value) for a, value in known if a >= order]
    if not above:
        return math.inf
    high, value = above[0]
    if high == order or not below:
        return value  # the divergence grows with the order
    low, least = below[-1]
    share = (order - low) / (high - low)
    return ((1 - share) * (low - 1) * least + share * (high - 1) * value) / (order - 1)


def _converted(order: float, divergence: float, delta: float) -> float:
    from dp_accounting.rdp import compute_epsilon

    if not math.isfinite(divergence):
        return math.inf
    return float(compute_epsilon([order], [divergence], delta)[0])


def _search(at: Callable[[float], float], *, whole: bool) -> dict[float, float]:
    """ε by order: upwards over the coarse orders until it grows again, then between those around the best."""
    found: dict[float, float] = {}
    for order in _WHOLE:
        found[order] = at(order)
        best = min(found.values())
        if math.isfinite(best) and found[order] > 1.2 * best and order >= 6:
            break
    if not math.isfinite(min(found.values())):
        found |= {order: at(order) for order in (1.1, 1.2, 1.5)} if not whole else {}
    centre = min(found, key=found.__getitem__)
    place = sorted(found).index(centre)
    around = sorted(found)[max(place - 1, 0) : place + 2]
    low, high = (1.0 if place == 0 else around[0]), around[-1]
    inside = [a for a in _FINE if low < a < high and not (whole and a != int(a))]
    first, last = 0, len(inside) - 1
    while last - first > 2:  # ε has one valley
        left, right = first + (last - first) // 3, last - (last - first) // 3
        for index in (left, right):
            if inside[index] not in found:
                found[inside[index]] = at(inside[index])
        if found[inside[left]] <= found[inside[right]]:
            last = right - 1
        else:
            first = left + 1
    for a in inside[first : last + 1]:
        if a not in found:
            found[a] = at(a)
    return found
