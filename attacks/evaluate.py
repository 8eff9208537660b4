"""One call that says what attacks did to a model, and whether that can be trusted."""

from __future__ import annotations

import dataclasses
import importlib
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, get_args

import numpy as np
import torch
from torch import Tensor

from mycelia.attacks.arguments import bounds_of, inputs_of, outside
from mycelia.attacks.base import Attack
from mycelia.attacks.broader import Broader, broader, unmeasured
from mycelia.attacks.cells import Cells
from mycelia.attacks.defences.adaptive import adapted, defences_of
from mycelia.attacks.defences.outputs import Obfuscated
from mycelia.attacks.evasion.fgm import FGM
from mycelia.attacks.evasion.pgd import PGD
from mycelia.attacks.evasion.transfer import Transfer
from mycelia.attacks.facts import settings_of
from mycelia.attacks.flags import RANDOM, CurvePoint, Evidence, Ran, cover, raise_flags, randomness
from mycelia.attacks.goals import Goal, Untargeted, predicted
from mycelia.attacks.model import Model, as_model
from mycelia.attacks.norms import wide
from mycelia.attacks.planted import UnitTest, unit_tests
from mycelia.attacks.probes import has_gradient, predictions
from mycelia.attacks.result import AttackResult, Status
from mycelia.attacks.robustness_report import AdaptiveNote, AttackLine, CurveLine, Ledger, Report
from mycelia.attacks.suite import AutoAttack, SuiteResult
from mycelia.attacks.threat import Threat
from mycelia.attacks.transforms.base import Layout
from mycelia.engine.environment import describe
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import derive

if TYPE_CHECKING:  # they are handed on only, and detectors take a second to load
    from mycelia.attacks.defences.smoothing import CertifiedShare
    from mycelia.attacks.detectors.report import DetectorReport

__all__ = ["SUITES", "Adaptive", "evaluate"]

SUITES: Final[Mapping[str, tuple[tuple[str, Mapping[str, Any]], ...]]] = {
    "quick": (("FGM", {}), ("PGD", {"steps": 20}), ("RandomNoise", {"draws": 200})),
    "standard": (("AutoAttack", {}),),
    "full": (
        ("AutoAttack", {}), ("FMN", {}), ("HopSkipJump", {}), ("Transfer", {}),
        ("RandomNoise", {"draws": 10_000}),
    ),
    "blackbox": (("Square", {}), ("HopSkipJump", {}), ("RandomNoise", {"draws": 10_000})),
    "minimum": (("FMN", {}), ("FABT", {})),
    "rand": (("AutoAttack", {"version": "rand"}),),
}  # fmt: skip
"""Names of attack classes with their settings; they are looked up when a suite is run."""

_ALLOWED: Final = {
    "white": ("gradient", "score", "label"), "score": ("score", "label"), "label": ("label",), "transfer": (),
}  # fmt: skip
_VOTES: Final = 11  # passes of the second look at a random model
_RADII: Final = 12  # of a curve, at most
_CAVEATS: Final = (
    "No attack here succeeded on the rows that held; that is no proof that none would.",
    "The flags are neither necessary nor sufficient: an evaluation that raises none may still be weak.",
    "Intervals say how much the share may differ for other examples, not for stronger attacks.",
)


@dataclass(frozen=True)
class Adaptive:
    """What is known of a defence, and an attack made for it.

    Attributes:
        note: free text.
        attack: run on all rows that were right; with the suite it gives the best known result.
        loss: name of a loss made for it.
        surrogate: what stands in for a stage without gradients.
        eot: passes over which the attack averages gradients.
    """

    note: str = ""
    attack: Attack | None = None
    loss: str = ""
    surrogate: str = ""
    eot: int | None = None


def evaluate(
    model: object,
    x: Any,
    y: Any,
    threat: Threat,
    suite: str | Sequence[Attack] = "standard",
    rng: int = 0,
    adaptive: Adaptive | Attack | str | None = None,
    *,
    batch: int = 256,
    sources: Any = None,
    layout: Layout | None = "nchw",
    detectors: Sequence[DetectorReport] = (),
    certified: Sequence[CertifiedShare] = (),
    cells: Cells | None = None,
    steps: int | None = None,
) -> Report:
    """Attack a model in several ways, count the worst case of every row, and look for signs of weak attacks.

    Against stages in front of the model (`Defended`) attacks take the gradient of surrogates, and average it
    over passes where a stage is random. Behind an output transform (`Obfuscated`) only attacks run that need
    labels. Where the model is random, a success is one in most of several passes.

    >>> from mycelia.attacks.planted import affine
    >>> x = torch.full((2, 3), 0.5)
    >>> report = evaluate(affine(4, 3), x, affine(4, 3)(x.double()).argmax(1), Threat("linf", 0.0), "quick")
    >>> report.ledger.held
    2

    Args:
        model: see `as_model`.
        x: inputs [n, …], floating point, in raw units: a normalisation is a layer of the model.
        y: true classes, integers [n].
        threat: what the attacker may do.
        suite: one of `SUITES`, or attacks of the norm of the threat.
        rng: seed.
        adaptive: an attack made for this model, a note, or both.
        batch: rows at a time.
        sources: a model or a list of them, on which the transfer attack of suite "full" makes its examples.
        layout: of inputs of four axes, for attacks and measurements of images; None: they are no images.
        detectors: what was found of detectors, to be part of the report; see `detector_report`.
        certified: certified accuracies, the same; see `Certificates.accuracy`.
        cells: where results of attacks are kept as they come, and those of an earlier call are found.
        steps: of the gradient attacks of a suite that is given by name; None: their own numbers.

    Returns:
        a report. Inputs outside their bounds are attacked by nothing, and flagged.

    Raises:
        ConfigError: an unknown suite or layout, an attack of another norm than the threat's, source models
            for a suite without transfer, steps for given attacks, or a threat whose attacker does not know of
            the defence that the model is seen to have.
        DataError: inputs that are not floating point, or not as many as labels.
    """
    began = time.perf_counter()
    note = _adaptive(adaptive)
    given = as_model(model, numpy=isinstance(x, np.ndarray))
    _check_known(threat, given)
    plan, said = _adapted(_plan(suite, threat, sources, layout, steps), given)
    surrogate = _surrogates(given)
    target, hidden = (given.labels, given.obfuscation) if isinstance(given, Obfuscated) else (given, "")
    case = _case(target, x, y, threat, batch)
    random = randomness(target, case.inputs[case.sound], case.labels[case.sound], batch)
    votes = _VOTES if random is not None and random > RANDOM else None
    call = _Call(target, case, threat, rng, batch, votes, cells)
    runs = _runs(plan, call)
    first, status, x_adv = _worst(runs, case)
    curve, probe, probed, why = _curve(runs, call)
    evidence = Evidence(
        model=target, differentiable=case.differentiable, threat=threat, n=case.n,
        inputs=case.inputs[case.sound], labels=case.labels[case.sound], outputs=case.outputs,
        x=case.x, y=case.y, goal=case.goal, box=case.box,
        outside=case.outside, runs=runs, probe=probe, probed=probed, curve=curve, rng=rng,
        randomness=random, surrogate=surrogate, votes=call.votes, batch=batch,
    )  # fmt: skip
    flags = raise_flags(evidence)
    tests, untested, no_tests = _unit_tests(runs, call)
    held_adaptive = _best_known(note, status, replace(call, model=given))  # it may use all that is there
    beside = _broader(suite, call, layout)
    passes = max((_passes(ran.attack) for ran in runs if ran.attack and ran.result is not None), default=1)
    done = [ran.result for ran in runs if ran.result is not None]
    blocked = case.blocked
    if not done and len(case.x):
        blocked = "no attack of the suite ran: " + "; ".join(f"{ran.name}: {ran.reason}" for ran in runs)
    counts = Counter(status.tolist())
    ledger = Ledger(
        n=case.n, clean_correct=len(case.rows), broken=counts[int(Status.BROKEN)],
        held=counts[int(Status.HELD)], failed=counts[int(Status.FAILED)], attacked=not blocked,
        worst_norm=_worst_norm(runs),
        forward=sum(int(result.queries.sum()) for result in done),
        backward=sum(int(result.gradients.sum()) for result in done),
        seconds=time.perf_counter() - began, seed=rng, why=blocked,
    )  # fmt: skip
    return Report(
        threat=threat,
        suite=suite if isinstance(suite, str) else "given attacks",
        ledger=ledger,
        attacks=_lines(runs, case),
        curve=tuple(CurveLine(point.eps, point.held, point.broken, len(case.x)) for point in curve),
        curve_reason=why,
        curve_attack=probe,
        broken_by=dict(Counter(name for name in first if name is not None)),
        flags=flags,
        unit_tests=tests,
        unit_tests_reason=no_tests,
        untested=untested,
        adaptive=AdaptiveNote(
            note="; ".join(filter(None, (note.note, said))),
            loss=note.loss,
            surrogate=note.surrogate or (surrogate and f"BPDA through {surrogate}"),
            eot=note.eot or (passes if passes > 1 else None),
            held=held_adaptive,
            attack="" if note.attack is None else type(note.attack).__name__,
        ),
        broader=beside,
        detectors=tuple(detectors),
        certified=tuple(certified),
        caveats=_caveats(runs, case, threat, hidden),
        versions=describe()["versions"],
        first=first,
        status=status,
        x_adv=x_adv,
    )


# --- what is attacked -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Case:
    """Inputs, and those of them that are attacked.

    `rows` are right; `x`, `y`, `goal` and `box` belong to those of them that may be attacked: all, or none if
    inputs lie outside their bounds. `limits` are the bounds of the inputs that are `sound`.
    """

    inputs: Tensor
    labels: Tensor
    sound: Tensor
    outputs: Tensor
    unclear: Tensor
    rows: Tensor
    x: Tensor
    y: Tensor
    goal: Goal
    box: tuple[Tensor, Tensor]
    limits: tuple[Tensor, Tensor]
    outside: int
    differentiable: bool
    blocked: str
    narrow: bool

    @property
    def n(self) -> int:
        return len(self.inputs)


def _case(model: Model, x: Any, y: Any, threat: Threat, batch: int) -> _Case:
    inputs = inputs_of(x)
    labels = Untargeted(torch.as_tensor(y)).y.to(inputs.device)
    if len(labels) != len(inputs):
        raise DataError(f"{len(inputs)} inputs, {len(labels)} labels", rule="one for each", who="evaluate")
    low, high = bounds_of(threat.bounds, inputs)
    finite = (
        torch.isfinite(inputs.flatten(1)).all(1) if len(inputs) else inputs.new_zeros(0, dtype=torch.bool)
    )
    beyond = int((outside(inputs, low, high).flatten(1).any(1) & finite).sum())
    seen = inputs[finite]
    blocked = ""
    if beyond:
        blocked = (
            f"{beyond} rows lie outside bounds {float(low.min()):g} to {float(high.max()):g}: "
            f"inputs go from {float(seen.min()):g} to {float(seen.max()):g}; nothing was attacked"
        )
    else:
        clipped = torch.minimum(torch.maximum(inputs, low), high)
        inputs = torch.where(wide(finite, inputs), clipped, inputs)
    outputs = predictions(model, inputs[finite], batch) if len(seen) else inputs.new_zeros(0, 2)
    _check_labels(labels, outputs)
    found = torch.full((len(inputs),), -1, dtype=torch.int64, device=inputs.device)
    found[finite] = predicted(outputs)
    right = finite & (found == labels)
    rows = right.nonzero()[:, 0]
    attacked = rows[:0] if blocked else rows
    every = outputs.new_zeros(len(inputs), *outputs.shape[1:])
    every[finite] = outputs
    gradient = "gradient" in model.offers
    varies = seen.amax() - seen.amin() if seen.numel() else torch.tensor(torch.nan)
    return _Case(
        inputs=inputs, labels=labels, sound=finite, outputs=outputs, unclear=~finite | (found < 0), rows=rows,
        x=inputs[attacked], y=labels[attacked], goal=threat.goal_for(labels[attacked], every[attacked]),
        box=_of_rows(low, high, attacked), limits=_of_rows(low, high, finite), outside=beyond,
        differentiable=gradient and (not len(attacked) or has_gradient(model, inputs[attacked[:1]])),
        blocked=blocked, narrow=bool(varies < 0.02 * (high - low).max()),
    )  # fmt: skip


def _of_rows(low: Tensor, high: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """One row where all have the same bounds."""
    return low if len(low) == 1 else low[rows], high if len(high) == 1 else high[rows]


def _check_labels(labels: Tensor, outputs: Tensor) -> None:
    if outputs.dim() == 2 and len(outputs) and len(labels) and int(labels.max()) >= outputs.shape[1]:
        raise DataError(
            f"a label {int(labels.max())}, {outputs.shape[1]} outputs",
            rule="classes count from 0 to outputs − 1",
            who="evaluate",
        )


# --- with what --------------------------------------------------------------------------------------


def _check_known(threat: Threat, model: Model) -> None:
    if not threat.defence_known and (isinstance(model, Obfuscated) or defences_of(model)):
        raise ConfigError(
            "defence_known is False, and attacks go through the defence",
            rule="an attacker who does not know of it attacks the model without it",
            fix="defence_known=True; or Transfer([model without it]) against the whole as a function",
            who="threat",
        )


def _plan(
    suite: str | Sequence[Attack], threat: Threat, sources: Any, layout: Layout | None, steps: int | None
) -> list[Ran]:
    """Attacks that are to run; one that cannot be made has a reason already."""
    if layout not in (None, *get_args(Layout)):
        raise ConfigError(f"layout {layout!r}", rule='"nchw", "nhwc" or None', who="evaluate")
    if sources is not None and (not isinstance(suite, str) or "Transfer" not in dict(SUITES.get(suite, ()))):
        raise ConfigError(
            f"source models for {f'suite {suite!r}' if isinstance(suite, str) else 'given attacks'}",
            rule="they are for the transfer attack of a suite",
            fix='suite="full", or Transfer(sources) among the attacks',
            who="evaluate",
        )
    if steps is not None and (steps < 1 or not isinstance(suite, str)):
        raise ConfigError(
            f"steps {steps}",
            rule="at least 1, for a suite by name: given attacks have their own",
            who="evaluate",
        )
    if not isinstance(suite, str):
        for attack in suite:
            if not isinstance(attack, Attack):
                raise ConfigError(f"{attack!r} in a suite", rule="a suite's name, or attacks", who="evaluate")
            if attack.norm != threat.norm:
                raise ConfigError(
                    f"{type(attack).__name__} of norm {attack.norm}, a threat of norm {threat.norm}",
                    rule="eps has the same meaning in all attacks",
                    fix=f"{type(attack).__name__}(norm={threat.norm!r})",
                    who="evaluate",
                )
        if not suite:
            raise ConfigError("no attack", rule="at least one", who="evaluate")
        return _distinct([Ran(type(attack).__name__, attack, None) for attack in suite])
    if suite not in SUITES:
        raise ConfigError(
            f"suite {suite!r}", rule=f"one of {', '.join(SUITES)}, or a tuple of attacks", who="evaluate"
        )
    given = {
        "source_models": () if sources is None else sources, "layout": layout, "steps": steps,
    }  # fmt: skip
    return _distinct([_made(name, settings, threat, given) for name, settings in SUITES[suite]])


def _made(name: str, settings: Mapping[str, Any], threat: Threat, given: Mapping[str, Any]) -> Ran:
    if name == "FGM" and threat.norm == "linf":
        name = "FGSM"
    kind = getattr(importlib.import_module("mycelia.attacks"), name)
    known = {field.name for field in dataclasses.fields(kind)}
    more = {key: value for key, value in given.items() if key in known and value is not None}
    if kind.needs != "gradient":
        more.pop("steps", None)
    try:
        return Ran(name, kind(norm=threat.norm, **{**settings, **more}), None)
    except ConfigError as error:  # another norm, no source models
        return Ran(name, None, None, f"{error.found}: {error.rule}")


def _distinct(runs: list[Ran]) -> list[Ran]:
    """Names of their own: a second PGD is PGD#2."""
    seen: Counter[str] = Counter()
    found = []
    for ran in runs:
        seen[ran.name] += 1
        found.append(replace(ran, name=f"{ran.name}#{seen[ran.name]}") if seen[ran.name] > 1 else ran)
    return found


def _adapted(plan: list[Ran], model: Model) -> tuple[list[Ran], str]:
    """The attacks as they should be against this model, and what was done."""
    found, said = [], ""
    for ran in plan:
        attack = ran.attack
        if attack is not None:
            attack, said = adapted(attack, model)
        found.append(replace(ran, attack=attack))
    return found, said


def _surrogates(model: Model) -> str:
    """Names of the stages in front of the model that have a surrogate."""
    return ", ".join(
        type(stage).__name__
        for defended in defences_of(model)
        for stage in defended.stages
        if defended.bpda and not stage.differentiable
    )


def _passes(attack: Attack) -> int:
    """Over which it averages gradients."""
    members = [each for _, each in attack.members] if isinstance(attack, AutoAttack) else [attack]
    return max(getattr(each, "eot", 1) for each in members)


def _adaptive(given: Adaptive | Attack | str | None) -> Adaptive:
    if isinstance(given, Adaptive):
        return given
    if isinstance(given, str):
        return Adaptive(note=given)
    return Adaptive() if given is None else Adaptive(attack=given)


def _refused(attack: Attack, model: Model, case: _Case, threat: Threat) -> str:
    """Why an attack does not run, or ""."""
    if attack.needed not in _ALLOWED[threat.knowledge] and not isinstance(attack, Transfer):
        return f"it needs a {attack.needed}, the threat gives {threat.knowledge} knowledge"
    if attack.needed not in model.offers:
        return f"it needs a {attack.needed}, the model offers {', '.join(sorted(model.offers))}"
    if attack.needed == "gradient" and not case.differentiable:
        return "it needs a gradient, and nothing that can be differentiated leads from inputs to outputs"
    return ""


# --- attacks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Call:
    """How all attacks of an evaluation are called."""

    model: Model
    case: _Case
    threat: Threat
    rng: int
    batch: int
    votes: int | None
    cells: Cells | None

    def run(
        self, attack: Attack, use: str, *, eps: float | None = None, queries: int | None = None
    ) -> AttackResult:
        """On the rows that were right, with draws named by the use."""
        run = attack.run if self.cells is None else partial(self.cells.run, attack)
        return run(
            self.model, self.case.x, self.case.goal, eps=self.threat.eps if eps is None else eps,
            rng=derive(self.rng, f"evaluate/{use}"), bounds=self.case.box, batch=self.batch, queries=queries,
            votes=self.votes,
        )  # fmt: skip


def _runs(plan: list[Ran], call: _Call) -> tuple[Ran, ...]:
    """Each attack on all rows that were right, until none is left standing."""
    case = call.case
    standing = torch.ones(len(case.x), dtype=torch.bool, device=case.x.device)
    found: list[Ran] = []
    for ran in _divided(plan, call.model, case, call.threat):
        if ran.reason or ran.attack is None:
            found.append(ran)
        elif case.blocked or not bool(standing.any()):
            found.append(replace(ran, reason=case.blocked or "no row was left"))
        else:
            done = _one(ran, ran.attack, call)
            found.append(done)
            if done.result is not None:
                standing &= ~done.result.is_(Status.BROKEN)
    return tuple(found)


def _divided(plan: list[Ran], model: Model, case: _Case, threat: Threat) -> list[Ran]:
    """With reasons; of a suite that cannot run as a whole its members, of which some can."""
    found = []
    for ran in plan:
        reason = ran.reason if ran.attack is None else _refused(ran.attack, model, case, threat)
        if reason and isinstance(ran.attack, AutoAttack):
            for name, member in ran.attack.members:
                found.append(Ran(f"{ran.name}/{name}", member, None, _refused(member, model, case, threat)))
        else:
            found.append(replace(ran, reason=reason))
    return found


def _one(ran: Ran, attack: Attack, call: _Call) -> Ran:
    limited = attack.needed != "gradient" or call.threat.knowledge != "white"
    try:
        result = call.run(attack, ran.name, queries=call.threat.queries if limited else None)
    except ConfigError as error:  # it refuses this model or goal; the others go on
        return replace(ran, reason=f"{error.found}: {error.rule}" if error.rule else error.found)
    return replace(ran, result=result)


def _worst(runs: tuple[Ran, ...], case: _Case) -> tuple[tuple[str | None, ...], Tensor, Tensor]:
    """Who broke each row first; statuses of all rows; and the changes that broke them."""
    first: list[str | None] = [None] * case.n
    x_adv = case.inputs.clone()
    attacked = case.rows if len(case.x) else case.rows[:0]
    device = attacked.device
    broken = torch.zeros(len(attacked), dtype=torch.bool, device=device)
    held = torch.ones_like(broken)
    ran = False
    for each in runs:
        if each.result is None:
            continue
        ran = True
        mine = each.result.is_(Status.BROKEN)
        held &= each.result.is_(Status.HELD)
        new = (mine & ~broken).nonzero()[:, 0]
        x_adv[attacked[new]] = each.result.x_adv[new]
        for row in new.tolist():
            first[int(attacked[row])] = each.name + _member(each.result, row)
        broken |= mine
    status = torch.full((case.n,), int(Status.CLEAN_WRONG), dtype=torch.int8, device=device)
    status[case.unclear] = int(Status.FAILED)
    status[case.rows] = int(Status.FAILED)
    if ran:
        status[attacked[held & ~broken]] = int(Status.HELD)
        status[attacked[broken]] = int(Status.BROKEN)
    return tuple(first), status, x_adv


def _member(result: AttackResult, row: int) -> str:
    if not isinstance(result, SuiteResult):
        return ""
    place = int(result.broken_by[row])
    return f"/{result.members[place].name}" if place >= 0 else ""


def _worst_norm(runs: tuple[Ran, ...]) -> float | None:
    """Of what is counted: successes, and all that attacks in a ball return."""
    sizes = []
    for ran in runs:
        if ran.result is not None and ran.attack is not None:
            fixed = ran.attack.kind == "fixed"
            counted = ran.result.is_(Status.BROKEN) | (ran.result.is_(Status.HELD) & fixed)
            sizes += ran.result.distance[ran.result.norm][counted].tolist()
    return max(sizes) if sizes else None


def _lines(runs: tuple[Ran, ...], case: _Case) -> tuple[AttackLine, ...]:
    standing = torch.ones(len(case.x), dtype=torch.bool, device=case.x.device)
    lines = []
    for ran in runs:
        settings = {} if ran.attack is None else settings_of(ran.attack)
        if ran.result is None:
            lines.append(AttackLine(ran.name, settings, None, None, None, None, ran.reason))
            continue
        before = int(standing.sum())
        standing &= ran.result.is_(Status.HELD)
        counts = ran.result.counts
        after = int(standing.sum())
        lines.append(AttackLine(ran.name, settings, counts.held, after, counts.broken, counts.failed))
        if isinstance(ran.result, SuiteResult):
            for place, fact in enumerate(ran.result.members):
                alone = fact.held_after if place == 0 else None
                lines.append(
                    AttackLine(
                        f"{ran.name}/{fact.name}",
                        settings_of(fact.attack),
                        alone,
                        min(before, fact.held_after),
                        fact.broken,
                        fact.failed,
                        "it ran on rows that earlier ones left",
                    )
                )
    return tuple(lines)


# --- beside them ------------------------------------------------------------------------------------


def _curve(
    runs: tuple[Ran, ...], call: _Call
) -> tuple[tuple[CurvePoint, ...], Attack | None, AttackResult | None, str]:
    """The suite's attack of many steps at radii up to the one where all rows are broken.

    Returns:
        points, the attack, its result at the threat's radius, and why there is none.
    """
    case, threat = call.case, call.threat
    probe = _probe(runs, call)
    if probe is None or not len(case.x):
        why = "no row was right" if probe is not None else "no attack of many gradient steps fits"
        return (), probe, None, case.blocked or why
    most = cover(case.box, threat.norm)
    start = threat.eps or (most / 64 if most < math.inf else 0.0)
    radii = sorted({0.0, *(min(most, start * share) for share in (0.25, 0.5, 1.0))})
    points: list[CurvePoint] = []
    broken = torch.zeros(len(case.x), dtype=torch.bool, device=case.x.device)
    probed = None
    while radii and len(points) < _RADII:
        eps = radii.pop(0)
        result = call.run(probe, f"curve/{eps!r}", eps=eps)
        if eps == threat.eps:
            probed = result
        broken |= result.is_(Status.BROKEN)
        held = int((result.is_(Status.HELD) & ~broken).sum())
        raw = result.counts.broken
        points.append(CurvePoint(eps, held, raw))
        if not radii and raw < len(case.x) and 0 < eps < most:
            radii.append(min(most, 2 * eps))
    return tuple(points), probe, probed, ""


def _probe(runs: tuple[Ran, ...], call: _Call) -> Attack | None:
    if not call.case.differentiable:
        return None
    for ran in runs:
        attack = ran.attack
        if (
            ran.result is not None
            and attack is not None
            and (attack.needed, attack.kind) == ("gradient", "fixed")
            and not isinstance(attack, AutoAttack | FGM)
            and hasattr(attack, "steps")
        ):
            return attack
    p = call.threat.norm
    return adapted(PGD(norm=p, steps=20), call.model)[0] if p in PGD.norms else None


def _unit_tests(runs: tuple[Ran, ...], call: _Call) -> tuple[tuple[UnitTest, ...], dict[str, str], str]:
    """What attacks found, those that are left out and why, and why there is nothing at all."""
    case = call.case
    ran = [(each.name, each.attack) for each in runs if each.result is not None and each.attack is not None]
    if case.blocked or not ran or call.threat.eps == 0:
        return (), {}, case.blocked or ("the radius is 0" if ran else "no attack ran")
    attacks = [(name, attack) for name, attack in ran if not isinstance(attack, Transfer)]
    why = "its examples are made on source models, which know nothing of planted ones"
    untested = {name: why for name, attack in ran if isinstance(attack, Transfer)}
    shared = len(case.box[0]) == len(case.box[1]) == 1
    classes = case.outputs.shape[1] if case.outputs.dim() == 2 else int(case.labels.max()) + 1
    box = (case.box[0][:1], case.box[1][:1])
    found = unit_tests(
        [attack for _, attack in attacks], call.model, case.x[: 4 if shared else 1], eps=call.threat.eps,
        bounds=box, rng=derive(call.rng, "evaluate/planted"), classes=classes,
    )  # fmt: skip
    named = tuple(replace(test, attack=name) for test, (name, _) in zip(found, attacks, strict=True))
    return named, untested, ""


def _best_known(note: Adaptive, status: Tensor, call: _Call) -> int | None:
    """Rows that hold against the suite and the adaptive attack."""
    if note.attack is None or call.case.blocked:
        return None
    result = call.run(note.attack, "adaptive")
    return int((result.is_(Status.HELD) & (status[call.case.rows] == int(Status.HELD))).sum())


def _broader(suite: str | Sequence[Attack], call: _Call, layout: Layout | None) -> Broader:
    case = call.case
    if suite != "full" or case.blocked:
        return unmeasured(case.blocked or 'only suite "full" measures it')
    return broader(
        call.model, case.inputs[case.sound], case.labels[case.sound], layout=layout, bounds=case.limits,
        rng=derive(call.rng, "evaluate/broader"), batch=call.batch,
    )  # fmt: skip


def _caveats(runs: tuple[Ran, ...], case: _Case, threat: Threat, hidden: str) -> tuple[str, ...]:
    found = list(_CAVEATS)
    if hidden:
        found.append(
            f"Outputs stand behind {hidden}, which hides gradients and scores and no weakness: robust "
            "accuracy is quoted only from attacks that need labels."
        )
    votes = max((ran.result.votes for ran in runs if ran.result is not None), default=1)
    if votes > 1:
        found.append(
            "Answers are random, or gradients averaged: a success is one in most of up to "
            f"{votes} passes over the same change."
        )
    if case.blocked:
        found.insert(0, f"{case.blocked[0].upper()}{case.blocked[1:]}.")
    needs = {ran.attack.needed for ran in runs if ran.result is not None and ran.attack is not None}
    if needs and "gradient" not in needs:
        found.append("No gradient attack ran: this is weaker evidence than an evaluation with gradients.")
    missing = [ran.name for ran in runs if ran.result is None and ran.reason != "no row was left"]
    if missing and not case.blocked:
        found.append(f"These did not run: {', '.join(missing)}; reasons stand beside them.")
    classes = case.outputs.shape[1] if case.outputs.dim() == 2 else 0
    if classes and case.n and len(case.rows) / case.n <= 1.5 / classes:
        found.append(
            "The model is hardly better than chance on clean inputs: are they in the units that it was "
            "trained on, and do classes have the same order?"
        )
    width = float((case.limits[1] - case.limits[0]).max()) if case.n else math.inf
    if threat.norm == "linf" and threat.eps >= width:
        found.append(
            f"eps {threat.eps:g} covers bounds that are {width:g} wide: is it in the units of the inputs?"
        )
    if case.narrow:
        found.append("Inputs fill less than 2 % of their bounds: is eps in the units of the inputs?")
    if not threat.defence_known:
        found.append("The attacker does not know of the defence: one who does is stronger.")
    return tuple(found)
