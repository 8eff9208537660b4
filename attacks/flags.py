"""Signs that an evaluation cannot be trusted: 21 rules, each a number and the limit beyond which it warns.

They follow Carlini et al. ("On evaluating adversarial robustness", 2019), Croce et al. ("Evaluating the
adversarial robustness of adaptive test-time defenses", ICML 2022) and Pintor et al. ("Indicators of attack
failure", NeurIPS 2022). No list of signs is complete: an evaluation that passes them all may still be weak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal, cast

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.evasion.fgm import FGM
from mycelia.attacks.evasion.noise import RandomNoise
from mycelia.attacks.evasion.transfer import Transfer
from mycelia.attacks.goals import Goal
from mycelia.attacks.model import CallableModel, Model
from mycelia.attacks.norms import norm
from mycelia.attacks.probes import (
    differentiates_while_predicting,
    gradient_agreement,
    gradients_at,
    looks_like_probabilities,
    predictions,
    random_points,
    repeated_passes,
)
from mycelia.attacks.result import AttackResult, Status
from mycelia.attacks.search import Keep
from mycelia.attacks.suite import AutoAttack, SuiteResult
from mycelia.attacks.threat import Threat
from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import derive

__all__ = [
    "FLAGS", "RANDOM", "CurvePoint", "Evidence", "Flag", "Ran", "Rule", "cover", "raise_flags", "randomness",
]  # fmt: skip

RANDOM: Final = 1e-4
"""A model is called random where answers differ by more, see `randomness`."""

State = Literal["pass", "warn", "not_run"]
_ROWS: Final = 256  # that repeated passes and gradients are measured on


class _NotRun(Exception):
    """Nothing to measure, and why."""


@dataclass(frozen=True, eq=False)
class Ran:
    """An attack of the suite on all rows that were right.

    Attributes:
        name: in the report.
        attack: with settings.
        result: of rows that were right, in order; None: it did not run.
        reason: why it did not run, or "".
    """

    name: str
    attack: Attack | None
    result: AttackResult | None
    reason: str = ""


@dataclass(frozen=True)
class CurvePoint:
    """The probe at a radius.

    Attributes:
        eps: radius.
        held: rows that held here and at all smaller radii.
        broken: rows broken here.
    """

    eps: float
    held: int
    broken: int


@dataclass(frozen=True, eq=False)
class Evidence:
    """What rules look at.

    Attributes:
        model: of the evaluation.
        differentiable: whether inputs and outputs are joined by what can be differentiated.
        threat: of the evaluation.
        n: all rows.
        inputs: rows that can be asked about: finite, within bounds, [k, …].
        labels: their true classes, [k].
        outputs: the model's outputs of these.
        x: those of them that were right, [c, …].
        y: their true classes, [c].
        goal: of the same.
        box: smallest and largest values, one row for all of x, or one each.
        outside: rows of the inputs that lie outside their bounds.
        runs: attacks of the suite.
        probe: a gradient attack of many steps, the suite's own where it has one; None: none fits.
        probed: it at the radius of the evaluation, on x.
        curve: the probe at increasing radii.
        rng: seed.
        randomness: of the model, see `randomness`; None: there is no row to ask about.
        surrogate: names of stages of which others give the gradient; "": there is none.
        votes: of the second look at successes, see `Attack.run`.
        batch: rows at a time.
    """

    model: Model
    differentiable: bool
    threat: Threat
    n: int
    inputs: Tensor
    labels: Tensor
    outputs: Tensor
    x: Tensor
    y: Tensor
    goal: Goal
    box: tuple[Tensor, Tensor]
    outside: int
    runs: tuple[Ran, ...]
    probe: Attack | None
    probed: AttackResult | None
    curve: tuple[CurvePoint, ...]
    rng: int
    randomness: float | None
    surrogate: str = ""
    votes: int | None = None
    batch: int = 256

    @property
    def done(self) -> list[tuple[Attack, AttackResult]]:
        """Attacks that ran."""
        return [(ran.attack, ran.result) for ran in self.runs if ran.attack and ran.result is not None]

    def attack(
        self,
        attack: Attack,
        rows: Tensor,
        use: str,
        *,
        eps: float | None = None,
        quantise: int | None = None,
        keep: Keep = "closest",
        seed: int | None = None,
    ) -> AttackResult:
        """Another run on some of the rows, with draws of its own unless a seed is given."""
        low, high = (bound if len(bound) == 1 else bound[rows] for bound in self.box)
        return attack.run(
            self.model, self.x[rows], self.goal.of(rows), eps=self.threat.eps if eps is None else eps,
            rng=derive(self.rng, f"flags/{use}") if seed is None else seed, bounds=(low, high),
            batch=self.batch, quantise=quantise, keep=keep, votes=self.votes,
        )  # fmt: skip

    @cached_property
    def standing(self) -> Tensor:
        """Indices of the rows that no attack broke."""
        broken = torch.zeros(len(self.x), dtype=torch.bool, device=self.x.device)
        for _, result in self.done:
            broken |= result.is_(Status.BROKEN)
        return (~broken).nonzero()[:, 0]

    @cached_property
    def iterated(self) -> Attack:
        """The suite's attack of many steps, for the question whether more would do more."""
        found = [
            each
            for attack, _ in reversed(self.done)
            for each in _members(attack)
            if each.needed == "gradient" and isinstance(getattr(each, "steps", None), int)
        ]
        for attack in sorted(found, key=lambda each: each.kind):  # "fixed" before "minimum"
            return attack
        raise _NotRun("no attack of the suite that ran takes gradient steps")

    @cached_property
    def gradients(self) -> Tensor:
        """At random points of the ball."""
        if "gradient" not in self.model.offers:
            raise _NotRun("the model gives no gradients")
        x, goal = self.some
        points = random_points(x, self.threat.norm, self.threat.eps, *self.box_of(len(x)), self.rng)
        return gradients_at(self.model, points, goal, self.batch)

    @property
    def some(self) -> tuple[Tensor, Goal]:
        """The first of the rows that were right."""
        if not len(self.x):
            raise _NotRun("no row to attack: none is classified correctly within bounds")
        count = min(_ROWS, len(self.x))
        return self.x[:count], self.goal.of(torch.arange(count, device=self.x.device))

    def box_of(self, count: int) -> tuple[Tensor, Tensor]:
        """Bounds of the first rows; one row of them where all have the same."""
        return self.box[0][:count], self.box[1][:count]


@dataclass(frozen=True)
class Flag:
    """A rule's verdict.

    Attributes:
        id: a letter.
        key: its name.
        state: "pass", "warn" or "not_run".
        value: the number behind it; None: not measured.
        limit: beyond which it warns.
        advice: what to do about it.
        reason: why it was not measured, or "".
    """

    id: str
    key: str
    state: State
    value: float | None
    limit: float
    advice: str
    reason: str = ""


@dataclass(frozen=True)
class Rule:
    """How a flag is found.

    Attributes:
        id: a letter.
        key: its name.
        measure: the number.
        limit: a number, or a function of the evidence.
        advice: what to do.
        below: it warns below the limit, not above.
    """

    id: str
    key: str
    measure: Callable[[Evidence], float]
    limit: float | Callable[[Evidence], float]
    advice: str
    below: bool = False


def raise_flags(evidence: Evidence) -> tuple[Flag, ...]:
    """All rules in order.

    Args:
        evidence: of an evaluation.
    """
    return tuple(_judged(rule, evidence) for rule in FLAGS)


def _judged(rule: Rule, evidence: Evidence) -> Flag:
    limit = rule.limit(evidence) if callable(rule.limit) else rule.limit
    try:
        value = float(rule.measure(evidence))
    except _NotRun as why:
        return Flag(rule.id, rule.key, "not_run", None, limit, rule.advice, str(why))
    except ConfigError as error:  # an attack refuses this model, or these bounds
        return Flag(rule.id, rule.key, "not_run", None, limit, rule.advice, error.found)
    beyond = value < limit if rule.below else value > limit
    advice = rule.advice
    if rule.key == "gradient_mismatch" and evidence.surrogate:
        advice = (
            f"expected here: a surrogate gives the gradient of {evidence.surrogate}; where it is a poor one, "
            "score and decision attacks do better (black_box_wins)"
        )
    return Flag(rule.id, rule.key, "warn" if beyond else "pass", value, limit, advice)


def cover(box: tuple[Tensor, Tensor], p: str) -> float:
    """The radius at which a ball around any input holds the whole box; infinite for a box without bounds.

    Args:
        box: smallest and largest values, [n, …].
        p: norm of the ball.
    """
    width = (box[1] - box[0]).double()
    if not len(width) or not bool(torch.isfinite(width).all()):
        return math.inf
    return float(norm(width, p).max())  # type: ignore[arg-type]


# --- measures -------------------------------------------------------------------------------------


def _scores(evidence: Evidence) -> Tensor:
    if evidence.outputs.dim() != 2:
        raise _NotRun("the model gives labels only")
    if not len(evidence.outputs):
        raise _NotRun("no finite row within bounds")
    return evidence.outputs


def _held(evidence: Evidence, result: AttackResult) -> float:
    return result.counts.held / evidence.n


def _members(attack: Attack) -> list[Attack]:
    """The attacks of a suite, or the attack itself."""
    return [each for _, each in attack.members] if isinstance(attack, AutoAttack) else [attack]


def _by_gradient(result: AttackResult) -> Tensor:
    """Bool [n]: rows that a gradient attack broke, for a suite without those of its other members."""
    broken = result.is_(Status.BROKEN)
    if not isinstance(result, SuiteResult):
        return broken
    needs = torch.tensor([fact.attack.needed == "gradient" for fact in result.members], device=broken.device)
    return broken & needs[result.broken_by.clamp(min=0)]


def _groups(evidence: Evidence) -> tuple[list[AttackResult], list[AttackResult], list[AttackResult]]:
    """Results of gradient attacks, of score and label attacks, and of noise; transfer has its own flag."""
    gradient, box, noise = [], [], []
    for attack, result in evidence.done:
        if isinstance(attack, RandomNoise):
            noise.append(result)
        elif isinstance(attack, Transfer):
            continue
        elif attack.needed == "gradient":
            gradient.append(result)
        else:
            box.append(result)
    return gradient, box, noise


def _least(evidence: Evidence, results: list[AttackResult], what: str) -> float:
    if not results:
        raise _NotRun(f"no {what} of the suite ran")
    return min(_held(evidence, result) for result in results)


def randomness(model: Model, x: Tensor, y: Tensor, batch: int) -> float | None:
    """How far answers differ over five passes, on the first rows.

    Args:
        model: of the evaluation.
        x: inputs [n, …], finite and within bounds.
        y: labels [n].
        batch: rows at a time.

    Returns:
        the larger of the two numbers of `repeated_passes`; None without rows.
    """
    return float(max(repeated_passes(model, x[:_ROWS], y[:_ROWS], batch))) if len(x) else None


def _randomised(evidence: Evidence) -> float:
    if evidence.randomness is None:
        raise _NotRun("no finite row within bounds")
    return evidence.randomness


def _probabilities(evidence: Evidence) -> float:
    return float(looks_like_probabilities(_scores(evidence)))


def _zero_gradient(evidence: Evidence) -> float:
    grads = evidence.gradients.flatten(1)
    return float((grads == 0).all(1).double().mean())


def _nonfinite_gradient(evidence: Evidence) -> float:
    seen = int((~torch.isfinite(evidence.gradients.flatten(1))).any(1).sum())
    failed = [
        sum(reason == "a gradient that is not finite" for reason in result.reason)
        for _, result in evidence.done
    ]
    return max(seen, *failed) if failed else seen


def _black_box_wins(evidence: Evidence) -> float:
    gradient, others, _ = _groups(evidence)
    if not gradient:
        raise _NotRun("no gradient attack of the suite ran")
    broken = torch.stack([_by_gradient(result) for result in gradient]).any(0)
    # A suite gives its other members what gradients left, so all that they break is what they gain.
    suites = [result for result in gradient if isinstance(result, SuiteResult)]
    mixed = [result for result in suites if any(fact.attack.needed != "gradient" for fact in result.members)]
    gains = [int((result.is_(Status.BROKEN) & ~broken).sum()) / evidence.n for result in mixed]
    if others or not gains:
        held = (len(broken) - int(broken.sum())) / evidence.n
        gains.append(held - _least(evidence, others, "score or decision attack"))
    return max(gains)


def _noise_wins(evidence: Evidence) -> float:
    gradient, _, noise = _groups(evidence)
    least = _least(evidence, noise, "noise")
    _least(evidence, gradient, "gradient attack")
    return max(_held(evidence, result) for result in gradient) - least


def _single_step_wins(evidence: Evidence) -> float:
    single = [result for attack, result in evidence.done if isinstance(attack, FGM)]
    many = [
        result
        for attack, result in evidence.done
        if attack.needed == "gradient" and attack.kind == "fixed" and not isinstance(attack, FGM)
    ]
    return _least(evidence, many, "attack of many steps") - _least(evidence, single, "attack of one step")


def _transfer_wins(evidence: Evidence) -> float:
    transfer = [result for attack, result in evidence.done if isinstance(attack, Transfer)]
    gradient = _groups(evidence)[0]
    return _least(evidence, gradient, "gradient attack") - _least(evidence, transfer, "transfer attack")


def _success_falls(evidence: Evidence) -> float:
    if len(evidence.curve) < 2 or not len(evidence.x):
        raise _NotRun("there is no curve")
    shares = [point.broken / len(evidence.x) for point in evidence.curve]
    return max(before - after for before, after in pairwise(shares))


def _huge_eps_survives(evidence: Evidence) -> float:
    attack = _probe(evidence)
    radius = cover(evidence.box, evidence.threat.norm)
    if radius == math.inf:
        raise _NotRun("bounds are infinite")
    if evidence.curve and evidence.curve[-1].eps >= radius:
        return (len(evidence.x) - evidence.curve[-1].broken) / evidence.n
    rows = torch.arange(len(evidence.x), device=evidence.x.device)
    return _held(evidence, evidence.attack(attack, rows, "huge", eps=radius))


def _chance(evidence: Evidence) -> float:
    if evidence.outputs.dim() == 2:
        return 1 / evidence.outputs.shape[1]
    return 1 / max(2, int(evidence.labels.max()) + 1) if len(evidence.labels) else 0.5


def _not_converged(evidence: Evidence) -> float:
    """From the same starts, so that nothing but the steps differs."""
    attack = evidence.iterated
    longer = replace(attack, steps=2 * cast(int, vars(attack)["steps"]))  # type: ignore[call-arg]
    own = [result for each, result in evidence.done if each is attack]
    if own:
        rows = torch.arange(len(evidence.x), device=evidence.x.device)
        more = evidence.attack(longer, rows, "steps", seed=own[0].seed)
        return abs(more.counts.broken - own[0].counts.broken) / evidence.n
    rows = evidence.standing  # a member of a suite: what would it add
    if not len(rows):
        return 0.0
    broken = [evidence.attack(each, rows, "steps").counts.broken for each in (longer, attack)]
    return abs(broken[0] - broken[1]) / evidence.n


def _restarts_matter(evidence: Evidence) -> float:
    attack = evidence.iterated
    if not isinstance(getattr(attack, "restarts", None), int):
        raise _NotRun("the suite's attack of many steps has no restarts")
    if not getattr(attack, "random_start", True):
        raise _NotRun("the suite's attack of many steps has no random start")
    if not len(evidence.standing):
        return 0.0
    return evidence.attack(attack, evidence.standing, "restarts").counts.broken / evidence.n


def _loss_not_raised(evidence: Evidence) -> float:
    ran, shares = evidence.done, []
    if evidence.probe is not None and evidence.probed is not None:
        ran.append((evidence.probe, evidence.probed))
    for attack, result in ran:
        if attack.needed != "gradient" or attack.kind != "fixed" or isinstance(attack, FGM):
            continue
        loss = getattr(attack, "loss", None)
        held = result.is_(Status.HELD)
        if loss is None or not len(held) or evidence.threat.eps == 0:
            continue
        before = evidence.goal.loss(predictions(evidence.model, evidence.x, evidence.batch), loss).double()
        fallen = result.loss < before - 1e-6 * before.abs().clamp(min=1)
        shares.append(float((held & ((result.best_step == 0) | fallen)).double().mean()))
    if not shares:
        raise _NotRun("no gradient attack of many steps with a loss ran, or the radius is 0")
    return max(shares)


def _path_success_lost(evidence: Evidence) -> float:
    if not evidence.done:
        raise _NotRun("no attack ran")
    return sum(
        int((result.verified & result.is_(Status.HELD)).sum())
        for attack, result in evidence.done
        if attack.kind == "fixed"
    )


def _gradient_mismatch(evidence: Evidence) -> float:
    if "gradient" not in evidence.model.offers:
        raise _NotRun("the model gives no gradients")
    x, goal = evidence.some
    found = gradient_agreement(evidence.model, x, goal, *evidence.box_of(len(x)), evidence.rng)
    if found is None:
        raise _NotRun("the outputs do not change around any of the inputs looked at")
    return found


def _inference_optimisation(evidence: Evidence) -> float:
    if not len(evidence.inputs):
        raise _NotRun("no finite row within bounds")
    seen = differentiates_while_predicting(evidence.model, evidence.inputs[:4])
    if not seen and isinstance(evidence.model, CallableModel):
        raise _NotRun("a function may do what PyTorch does not see")
    return seen


def _few_classes(evidence: Evidence) -> float:
    return _scores(evidence).shape[1]


def _eps_zero_differs(evidence: Evidence) -> float:
    if not evidence.done:
        raise _NotRun("no attack ran")
    attack = min(evidence.done, key=lambda each: each[1].seconds)[0]
    rows = torch.arange(len(evidence.x), device=evidence.x.device)
    return abs(len(rows) - evidence.attack(attack, rows, "zero", eps=0.0).counts.held) / evidence.n


def _verification_mismatch(evidence: Evidence) -> float:
    if not evidence.done:
        raise _NotRun("no attack ran")
    return sum(result.unreproduced for _, result in evidence.done)


def _eight_bit(evidence: Evidence) -> float:
    """The attacker rounds: whichever attack still breaks a row on the grid, also from its highest loss."""
    if not evidence.done:
        raise _NotRun("no attack ran")
    every = torch.arange(len(evidence.x), device=evidence.x.device)
    left = every[~torch.isin(every, evidence.standing)]
    for loss in (False, True):
        tried = [each for attack, _ in evidence.done for each in (_members(attack) if loss else [attack])]
        for attack in tried:
            if len(left) and not (loss and attack.kind == "minimum"):
                result = evidence.attack(
                    attack, left, "eight", quantise=8, keep="loss" if loss else "closest"
                )
                left = left[~result.is_(Status.BROKEN)]
    for attack, result in evidence.done:
        if len(left) and attack.kind == "minimum":
            left = left[~_broken_beyond(evidence, result, left)]
    return len(left) / evidence.n


def _broken_beyond(evidence: Evidence, result: AttackResult, rows: Tensor) -> Tensor:
    """Bool [k]: rows still broken by the smallest change made as long as the ball allows, then rounded."""
    x, p, eps = evidence.x[rows], evidence.threat.norm, evidence.threat.eps
    low, high = (bound if len(bound) == 1 else bound[rows] for bound in evidence.box)
    step = (high - low) / 255
    change = result.x_adv[rows] - x
    room = eps - norm((step / 2).expand_as(x), p)
    factor = (room / norm(change, p).clamp(min=1e-30)).clamp(min=1).view(-1, *[1] * (x.dim() - 1))
    far = torch.minimum(torch.maximum(x + factor * change, low), high)
    points = torch.minimum(torch.maximum(low + ((far - low) / step).round() * step, low), high)
    fits = norm((points - x).double(), p) <= eps * (1 + 1e-6)
    reached = evidence.goal.of(rows).reached(predictions(evidence.model, points, evidence.batch))
    return reached & fits & result.is_(Status.BROKEN)[rows]


def _out_of_bounds(evidence: Evidence) -> float:
    low, high = evidence.box
    beyond = [
        int(((result.x_adv < low) | (result.x_adv > high)).flatten(1).any(1).sum())
        for _, result in evidence.done
        if len(result)
    ]
    return evidence.outside + sum(beyond)


def _probe(evidence: Evidence) -> Attack:
    if not len(evidence.x):
        raise _NotRun("no row to attack: none is classified correctly within bounds")
    if evidence.probe is None:
        raise _NotRun("the model gives no gradients, or there is no attack of many steps for this norm")
    return evidence.probe


FLAGS: Final[tuple[Rule, ...]] = (
    Rule("a", "randomised", _randomised, RANDOM,
         "answers differ from pass to pass or with the rows beside: call eval(), or average gradients (eot)"),
    Rule("b", "probabilities", _probabilities, 0.5,
         "outputs are probabilities: attack the logits, or say outputs=\"probabilities\""),
    Rule("c", "zero_gradient", _zero_gradient, 0.0,
         "gradients vanish: saturated or masked; use a margin loss, a surrogate, score and decision attacks"),
    Rule("d", "nonfinite_gradient", _nonfinite_gradient, 0.0,
         "gradients that are not finite stop gradient attacks: use a higher precision, remove the cause"),
    Rule("e", "black_box_wins", _black_box_wins, 0.002,
         "attacks without gradients do better: gradients are masked, or gradient attacks too weak"),
    Rule("f", "noise_wins", _noise_wins, 0.0, 
         "random noise does better than a gradient attack: that one is broken"),
    Rule("g", "single_step_wins", _single_step_wins, 0.0,
         "one step does better than many: raise steps, lower the step size, look for masked gradients"),
    Rule("h", "transfer_wins", _transfer_wins, 0.0,
         "changes made for other models do better: gradients are masked"),
    Rule("i", "success_falls", _success_falls, 0.0,
         "success falls as eps rises: a larger ball holds the smaller one, so the search is stuck"),
    Rule("j", "huge_eps_survives", _huge_eps_survives, _chance,
         "a ball that holds the whole box leaves rows standing: every one of them can be broken"),
    Rule("k", "not_converged", _not_converged, 0.01,
         "more steps break more rows: raise steps until they do not"),
    Rule("l", "loss_not_raised", _loss_not_raised, 0.01,
         "the loss does not rise: step size, loss or gradients are not right for this model"),
    Rule("m", "path_success_lost", _path_success_lost, 0.0,
         "points that reach the goal are not counted: keep the best point seen"),
    Rule("n", "restarts_matter", _restarts_matter, 0.01, "other starts break more rows: raise restarts"),
    Rule("o", "gradient_mismatch", _gradient_mismatch, 0.9,
         "gradients do not say how outputs change: a stage has no gradient, or its gradient is replaced",
         below=True),
    Rule("p", "inference_optimisation", _inference_optimisation, 0.0,
         "the model optimises while it predicts: attack it adaptively, through or around that"),
    Rule("q", "few_classes", _few_classes, 4.0,
         "targeted DLR needs four classes: the margin loss is used instead", below=True),
    Rule("r", "eps_zero_differs", _eps_zero_differs, 0.0,
         "a radius of 0 changes the answer: the model is random, or evaluated in two ways"),
    Rule("s", "verification_mismatch", _verification_mismatch, 0.0,
         "successes do not come again: the model is random or depends on the batch; the count was lowered"),
    Rule("t", "eight_bit", _eight_bit, 0.01,
         "rounding to 8 bits undoes successes: quote the number for the format that is attacked"),
    Rule("u", "out_of_bounds", _out_of_bounds, 0.0,
         "inputs or results leave the bounds: normalise inside the model, give bounds and eps in raw units"),
)  # fmt: skip
"""All rules by letter."""
