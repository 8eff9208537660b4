"""What a training run, or a ledger of releases, says about privacy.

Every ε here is an upper bound for what was released, and comes in a `Statement` with its δ, unit, relation,
accountant and sampler; a combination without a bound is refused. `tally` turns events into a composition,
`composition` says what it loses, and the arithmetic is dp-accounting's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.privacy import schedules
from mycelia.privacy.composition import Composition, gaussian_delta, gaussian_epsilon, rdp_delta
from mycelia.privacy.events import Event, choose
from mycelia.privacy.groups import Unit
from mycelia.privacy.sampling import Sampler
from mycelia.privacy.schedules import NoiseSchedule
from mycelia.privacy.tally import Tally

__all__ = ["ACCOUNTANTS", "UNSTATED", "Statement", "compose", "curve", "epsilon", "spent", "state"]

Array = NDArray[np.float64]

ACCOUNTANTS = ("auto", "pld", "rdp")
UNSTATED = "not stated"

_GRID_ERROR = 0.02, 2e-3  # relative and absolute, by which a privacy loss distribution may exceed RDP
_AMPLIFIED = frozenset({"poisson", "truncated-poisson", "fixed", "cyclic-poisson"})
_COVERS = "the released updates"
_LEAVES_OUT = "losses, norms, clip fractions and the choice of hyperparameters"
_NEIGHBOURS = {
    "add-remove": "neighbours differ by one {} added or removed",
    "replace-one": "neighbours differ by one {} replaced by any other",
    "zero-out": "neighbours differ by one {} whose contribution becomes zero; batches stay",
}


@dataclass(frozen=True)
class Statement:
    """A privacy guarantee with all that it depends on; `str` gives it as one line.

    Attributes:
        epsilon: ε, an upper bound, in [0, inf].
        target_delta: the δ it holds with, in (0, 1).
        unit: whom it protects: "example", "example (in groups of k)", "user (≤ k examples)" or "client".
        relation: the neighbours: "add-remove", "replace-one" or "zero-out".
        accountant: "gaussian" (exact), "pld", "rdp", or "exact" where nothing has to be computed.
        epsilon_rdp: ε by Rényi divergences, as a cross-check; None where they do not apply.
        rdp_order: the order that it comes from; None likewise.
        sampling: how examples were drawn; "mixed" where that changed.
        sampling_rate: q; None where it changed.
        noise_multiplier: z; None where it changed.
        steps: released updates.
        participations: most updates that one example can be part of.
        amplified: whether the sampling makes ε smaller.
        noise_source: where noise and draws came from.
        covers: what the guarantee is about.
        leaves_out: what it is not about.
        assumptions: what has to hold, as sentences.
    """

    epsilon: float
    target_delta: float
    unit: str
    relation: str
    accountant: str
    epsilon_rdp: float | None
    rdp_order: float | None
    sampling: str
    sampling_rate: float | None
    noise_multiplier: float | None
    steps: int
    participations: int
    amplified: bool
    noise_source: str = UNSTATED
    covers: str = _COVERS
    leaves_out: str = _LEAVES_OUT
    assumptions: tuple[str, ...] = ()
    _composition: Composition = field(default_factory=lambda: Composition({}), repr=False, compare=False)

    def __str__(self) -> str:
        check = "" if self.epsilon_rdp is None else f", RDP {_up(self.epsilon_rdp)}"
        q = "mixed" if self.sampling_rate is None else f"{self.sampling_rate:.6g}"
        z = "mixed" if self.noise_multiplier is None else f"{self.noise_multiplier:.6g}"
        return (
            f"ε ≤ {_up(self.epsilon)} at δ = {self.target_delta:g} per {self.unit} ({self.relation}); "
            f"accountant {self.accountant}{check}; sampling {self.sampling}, q {q}, "
            f"{'amplified' if self.amplified else 'not amplified'}; z {z}, {self.steps} updates; "
            f"noise source: {self.noise_source}; covers {self.covers}; leaves out {self.leaves_out}"
        )

    def delta(self, epsilon: float) -> float:
        """The δ that the same releases have at another ε, an upper bound.

        Args:
            epsilon: at least 0.
        """
        if not epsilon >= 0:
            raise ConfigError(f"epsilon is {epsilon}", rule="at least 0", who="epsilon")
        return float(self._deltas(np.array([epsilon]))[0])

    def tpr(self, fpr: float) -> float:
        """Largest true-positive rate of any membership test with this false-positive rate.

        From (ε, δ) at every ε: e^ε·fpr + δ, and 1 − e^(−ε)(1 − δ − fpr) (Kairouz et al., "The composition
        theorem for differential privacy", ICML 2015, theorem 2.1).

        Args:
            fpr: in [0, 1].

        Raises:
            ConfigError: the releases are known by Rényi divergences alone.
        """
        if not 0 <= fpr <= 1:
            raise ConfigError(f"fpr is {fpr}", rule="a rate, in [0, 1]", who="fpr")
        if self._composition.without_pld:
            raise ConfigError(
                f"no privacy loss distribution for {', '.join(self._composition.without_pld)}",
                rule="the rates of a test follow from a privacy loss distribution",
                fix="use Poisson sampling",
                who="tpr",
            )
        high = min(max(2 * self.epsilon, 1.0), 700.0)
        grid = np.concatenate([[0.0], np.geomspace(1e-4 * high, high, 400)])
        deltas = self._deltas(grid)
        upper = np.exp(grid) * fpr + deltas
        lower = 1 - np.exp(-grid) * (1 - deltas - fpr)
        return float(np.clip(min(upper.min(), lower.min()), fpr, 1.0))

    def rdp(self, orders: Sequence[float]) -> Array:
        """Rényi divergences at orders above 1, [n] to [n]; inf where no bound is known."""
        if not all(order > 1 for order in orders):
            raise ConfigError(f"orders are {list(orders)}", rule="orders are above 1", who="orders")
        if self._composition.noiseless:
            return np.full(len(orders), math.inf)
        return self._composition.rdp(orders)

    def as_dict(self) -> dict[str, Any]:
        """The statement as the command line prints it in JSON."""
        from importlib.metadata import version

        return {
            "epsilon": self.epsilon,
            "delta": self.target_delta,
            "accountant": self.accountant,
            "epsilon_rdp": self.epsilon_rdp,
            "rdp_order": self.rdp_order,
            "sampling": self.sampling,
            "sampling_rate": self.sampling_rate,
            "noise_multiplier": self.noise_multiplier,
            "steps": self.steps,
            "participations": self.participations,
            "relation": self.relation,
            "unit": self.unit,
            "amplified": self.amplified,
            "bound": "upper",
            "assumptions": list(self.assumptions),
            "version": version("mycelia"),
        }

    def _deltas(self, epsilons: Array) -> Array:
        """δ at each ε, which ascend."""
        composition = self._composition
        if composition.empty:
            return np.zeros(len(epsilons))
        if composition.noiseless:
            return np.ones(len(epsilons))
        if (z := composition.gaussian) is not None:
            return gaussian_delta(z, epsilons)
        known = np.full(len(epsilons), min(1.0, composition.chance))
        if self.accountant != "rdp" and not composition.without_pld:
            level = self.target_delta
            while (loss := composition.loss(level)) is not None:
                found = loss.delta(epsilons)
                if found.min() > level / 10 or level <= 1e-14:  # the tails that were cut are small beside it
                    return _least(found, known)
                level = max(level * 1e-3, 1e-14)
        if composition.without_rdp:
            return known
        orders = [*np.arange(1.1, 11.0, 0.1), *range(11, 65), 128, 256, 512]
        divergences = composition.rdp(orders)
        return _least(np.array([rdp_delta(orders, divergences, float(each)) for each in epsilons]), known)


def epsilon(
    sampler: Sampler,
    noise_multiplier: float,
    steps: int,
    delta: float,
    *,
    unit: Unit = "example",
    max_examples: int = 1,
    accountant: str = "auto",
    schedule: str | NoiseSchedule | None = None,
    relation: str | None = None,
) -> Statement:
    """What `steps` updates with this sampler and noise say about privacy.

    Args:
        sampler: a description from `sampling`.
        noise_multiplier: z = σ/C, at least 0; the first value of a schedule.
        steps: released updates T, at least 0.
        delta: δ, in (0, 1).
        unit: "example", "user" or "client"; or a `Group`, where the mean of so many examples is clipped.
        max_examples: most examples of a user, which the data view enforces.
        accountant: "pld", "rdp", or "auto": exact for Gaussians, else pld, else rdp.
        schedule: how the noise multiplier changes, as an object or as `schedules.parse` reads it.
        relation: the neighbours; the sampler's own by default.

    Raises:
        ConfigError: a value is out of range, or the combination has no bound; the message says what would do.

    >>> from mycelia.privacy.sampling import Poisson
    >>> f"{epsilon(Poisson(0.04), 1.5, 2250, 1e-5).epsilon:.2f}"
    '6.77'
    """
    _check_delta(delta)
    base = sampler.events(noise_multiplier, 1, relation=relation, unit=unit, max_examples=max_examples)[0]
    if steps < 0 or steps != int(steps):
        raise ConfigError(f"steps is {steps}", rule="a whole number, at least 0", who="steps")
    tally = Tally()
    zs = None
    if schedule is not None:
        shape = schedules.parse(schedule, noise_multiplier) if isinstance(schedule, str) else schedule
        if not math.isclose(shape(0), noise_multiplier, rel_tol=1e-12):
            raise ConfigError(
                f"noise_multiplier is {noise_multiplier}, and the schedule starts at {shape(0)}",
                rule="a schedule starts at the noise multiplier",
                fix=f"say noise_multiplier={shape(0)}",
                who="schedule",
            )
        zs = shape(np.arange(int(steps)))
    if steps:
        tally.add(base, zs if zs is not None else int(steps))
    return _stated(tally, delta, accountant, base, UNSTATED)


def state(
    events: Iterable[Event], delta: float, *, accountant: str = "auto", noise_source: str = UNSTATED
) -> Statement:
    """What a sequence of releases says about privacy.

    Args:
        events: in the order of their release; of one relation and one unit.
        delta: δ, in (0, 1).
        accountant: see `epsilon`.
        noise_source: where noise and draws came from.

    Raises:
        ConfigError: relations or units are mixed, δ is out of range, or there is no bound.
    """
    _check_delta(delta)
    tally = Tally()
    base = None
    for event in events:
        tally.add(event, event.count)
        base = base or event
    return _stated(tally, delta, accountant, base, noise_source)


def compose(events: Iterable[Event]) -> Composition:
    """The composed releases.

    Raises:
        ConfigError: relations or units are mixed.
    """
    tally = Tally()
    for event in events:
        tally.add(event, event.count)
    return tally.composition()


def spent(composition: Composition, delta: float, accountant: str = "auto") -> float:
    """ε of composed releases at δ, as a statement would print it."""
    return _bound(composition, delta, accountant)[0]


def curve(events: Iterable[Event], mean: float, shape: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Orders and Rényi divergences of the best of a random number of equal runs.

    Args:
        events: of one run.
        mean: expected number of runs, at least 1.
        shape: of their distribution, see dp-accounting's `RepeatAndSelectDpEvent`.

    Raises:
        ConfigError: a part of the run has no Rényi divergences.
    """
    composition = compose(events)
    _check_supported(composition, "rdp")
    if any(mechanism.kind == "curve" for mechanism in composition.parts):
        raise ConfigError(
            "the run holds a release that is known by a curve alone",
            rule="a selection is over runs of sampled or plain noise",
            fix="select over the training steps, and record the curve beside",
            who="select",
        )
    orders = np.array([*np.arange(1.25, 2, 0.25), *range(2, 65), 128.0, 256.0, 512.0])
    found = np.full(len(orders), math.inf)
    if not composition.noiseless:
        found = composition.selected(orders.tolist(), mean, shape)
    finite = np.isfinite(found)
    if not finite.any():
        raise ConfigError(
            "the run has no finite Rényi divergence",
            rule="what is selected is private",
            fix="raise its noise multiplier",
            who="select",
        )
    return tuple(orders[finite].tolist()), tuple(found[finite].tolist())


def _bound(
    composition: Composition, delta: float, accountant: str
) -> tuple[float, str, float | None, float | None]:
    """ε, the accountant that it comes from, and ε and order by Rényi divergences."""
    choose("accountant", accountant, ACCOUNTANTS)
    _check_supported(composition, accountant)
    if composition.empty:
        return 0.0, "exact", 0.0, None
    if composition.noiseless:
        return math.inf, "exact", None if composition.without_rdp else math.inf, None
    by_rdp: tuple[float, float] | None = None
    if not composition.without_rdp:
        by_rdp = composition.rdp_epsilon(delta)
    beside = (None, None) if by_rdp is None else (by_rdp[0], by_rdp[1] or None)
    if composition.chance <= delta and accountant != "rdp":
        return 0.0, "exact", *beside  # nobody is drawn, but with a probability of δ
    if accountant == "auto" and (z := composition.gaussian) is not None:
        found = gaussian_epsilon(z, delta)
        _check_order(found, by_rdp)
        return found, "gaussian", *beside
    if accountant == "rdp" or (accountant == "auto" and composition.without_pld):
        if by_rdp is None:
            raise MyceliaError("no accountant was left")
        return by_rdp[0], "rdp", *beside
    loss = composition.loss(delta)
    found = math.inf if loss is None else loss.epsilon(delta)
    if loss is not None and not loss.coarse:
        _check_order(found, by_rdp)
    elif accountant == "auto" and by_rdp is not None and by_rdp[0] < found:
        return by_rdp[0], "rdp", *beside  # both are upper bounds, and this one has no grid
    return found, "pld", *beside


def _check_supported(composition: Composition, accountant: str) -> None:
    """Refuse an accountant that lacks one of the parts."""
    missing = {
        "pld": composition.without_pld,
        "rdp": composition.without_rdp,
        "auto": [*composition.without_pld] if composition.without_rdp else [],
    }[accountant]
    if missing and (accountant != "auto" or composition.without_rdp):
        pld, rdp = composition.without_pld, composition.without_rdp
        others = [name for name, lacks in (("pld", pld), ("rdp", rdp)) if not lacks]
        raise ConfigError(
            f"the accountant {accountant!r} has no bound for {', '.join(sorted(set(missing)))}",
            rule="an ε is an upper bound or is not printed",
            fix=f"use the accountant {others[0]!r} or 'auto'" if others else "account the parts apart",
            who="accountant",
        )


def _check_order(found: float, by_rdp: tuple[float, float] | None) -> None:
    """A Rényi bound is never below the tight one."""
    relative, absolute = _GRID_ERROR
    if by_rdp is not None and by_rdp[0] * (1 + relative) + absolute < found:
        raise MyceliaError(
            f"Rényi divergences give ε {by_rdp[0]:.6g}, and the privacy loss distribution {found:.6g}",
            rule="the distribution is the tighter of the two",
            fix="please report the numbers of this run; accountant='rdp' is safe to use",
            who="accountant",
        )


def _stated(tally: Tally, delta: float, accountant: str, base: Event | None, noise_source: str) -> Statement:
    composition = tally.composition()
    found, name, by_rdp, order = _bound(composition, delta, accountant)
    event = tally.first or base
    unit, relation = (event.unit, event.relation) if event else ("example", "add-remove")
    person = unit
    if unit == "user" and event is not None:
        unit = f"user (≤ {event.max_examples} examples)"
    if event is not None and event.group > 1:
        unit = f"example (in groups of {event.group})"
    samplings = tally.samplings or ({base.sampling} if base else {"none"})
    rates = tally.rates or ({base.sampling_rate} if base else set())
    amplified = bool(samplings & _AMPLIFIED) and composition.gaussian is None and not composition.empty
    least, most = tally.least, tally.most
    if tally.first is None and base is not None:
        least = most = base.noise_multiplier
    return Statement(
        epsilon=found,
        target_delta=delta,
        unit=unit,
        relation=relation,
        accountant=name,
        epsilon_rdp=by_rdp,
        rdp_order=order,
        sampling=next(iter(samplings)) if len(samplings) == 1 else "mixed",
        sampling_rate=next(iter(rates)) if len(rates) == 1 else None,
        noise_multiplier=least if least == most else None,
        steps=tally.steps,
        participations=tally.participations(),
        amplified=amplified,
        noise_source=noise_source,
        assumptions=_assumptions(person, relation, samplings, amplified, event),
        _composition=composition,
    )


def _assumptions(
    person: str, relation: str, samplings: set[str], amplified: bool, event: Event | None
) -> tuple[str, ...]:
    noise = "noise of z times the clip bound is added to the sum once per update"
    if event is not None and event.sensitivity:
        noise = (
            "the noise of z times the clip bound is correlated over the updates by a factorisation of "
            f"sensitivity {event.sensitivity:.6g}, and updates end as planned"
        )
    one = "example" if person == "user" else person
    clipped = f"each {one} is clipped by itself, and {noise}"
    if event is not None and event.group > 1:
        clipped = (
            f"the mean gradient of each fixed group of {event.group} examples is clipped, which one of them "
            f"can move by twice the clip bound; {noise}"
        )
    sentences = [_NEIGHBOURS[relation].format(person), clipped]
    if amplified:
        sentences.append("nobody learns who was drawn for an update")
    if samplings & {"fixed", "truncated-poisson"}:
        sentences.append("the number of examples is public")
    if "cyclic-poisson" in samplings:
        sentences.append(f"each {one} stays in the group that its id hashes to")
    if "min-sep" in samplings:
        sentences.append("the limits on how often and how soon an example comes back are enforced")
    if person == "user" and event is not None:
        sentences.append(f"nobody has more than {event.max_examples} examples")
    sentences.append(f"it covers {_COVERS}, not {_LEAVES_OUT}")
    return tuple(sentences)


def _least(left: Array, right: Array) -> Array:
    smaller: Array = np.minimum(left, right)
    return smaller


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(
            f"delta is {delta}", rule="a probability, above 0 and below 1", fix="use 1e-5", who="delta"
        )


def _up(value: float) -> str:
    """The number with at most six digits, rounded upwards."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    scale = 10.0 ** (5 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale - 1e-9) / scale:.6g}"
