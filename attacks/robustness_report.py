"""What an evaluation says: threat first, shares with intervals, and reasons for what was not measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.broader import Broader, unmeasured
from mycelia.attacks.facts import known, settings_of, share
from mycelia.attacks.flags import Flag
from mycelia.attacks.intervals import clopper_pearson, wilson
from mycelia.attacks.planted import UnitTest
from mycelia.attacks.threat import Threat

if TYPE_CHECKING:  # as in evaluate
    from mycelia.attacks.defences.smoothing import CertifiedShare
    from mycelia.attacks.detectors.report import DetectorReport

__all__ = ["SCHEMA", "AdaptiveNote", "AttackLine", "CurveLine", "Ledger", "Report"]

SCHEMA: Final = 1
_LATER: Final[Mapping[str, str]] = {
    "privacy": "no privacy attack was run",
    "federated": "no federated evaluation was run",
}


@dataclass(frozen=True)
class Ledger:
    """All rows, and what became of them in the worst case over attacks.

    Attributes:
        n: rows.
        clean_correct: rows that were right and could be attacked.
        broken: by at least one attack.
        held: against every attack.
        failed: rows that could not be evaluated, or that some attack could not go at and none broke.
        attacked: whether any attack ran; without that nothing held.
        worst_norm: the largest change that is counted; None: there is none.
        forward: forward passes of all rows and attacks.
        backward: backward passes.
        seconds: the evaluation took.
        seed: of the evaluation.
        why: no attack ran, "" otherwise.
    """

    n: int
    clean_correct: int
    broken: int
    held: int
    failed: int
    attacked: bool
    worst_norm: float | None
    forward: int
    backward: int
    seconds: float
    seed: int
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the report has it."""
        why = self.why or "no rows"
        k = self.held if self.attacked else None
        norm: dict[str, Any] = {"worst_norm": self.worst_norm}
        if self.worst_norm is None:
            norm["worst_norm_reason"] = self.why or "no attack changed a row"
        return {
            "n": self.n, "clean_correct": self.clean_correct, "broken": self.broken, "held": self.held,
            "failed": self.failed,
            **share("clean_accuracy", self.clean_correct, self.n, "no rows"),
            **share("robust_accuracy", k, self.n, why),
            **share("success_rate", self.broken if self.attacked else None, self.clean_correct,
                    self.why or "no row was right"),
            **norm, "forward": self.forward, "backward": self.backward, "seconds": self.seconds,
            "seed": self.seed,
        }  # fmt: skip


@dataclass(frozen=True)
class AttackLine:
    """An attack of the suite.

    Attributes:
        name: in this report.
        settings: of the attack; empty where it could not be made.
        alone: rows that held against it alone; None: see `reason`.
        held_after: rows that held against it and all before it; None: it did not run.
        broken: rows that it broke; None: it did not run.
        failed: rows that it could not attack; None: it did not run.
        reason: why something is missing, or "".
    """

    name: str
    settings: Mapping[str, Any]
    alone: int | None
    held_after: int | None
    broken: int | None
    failed: int | None
    reason: str = ""

    def to_json(self, n: int) -> dict[str, Any]:
        """As the report has it; n: all rows."""
        found: dict[str, Any] = {
            "name": self.name, "settings": dict(self.settings),
            **share("robust_accuracy_alone", self.alone, n, self.reason),
        }  # fmt: skip
        for key in ("held_after", "broken", "failed"):
            found |= known(key, getattr(self, key), self.reason)
        return found


@dataclass(frozen=True)
class CurveLine:
    """A radius.

    Attributes:
        eps: radius.
        held: rows that held here and at all smaller radii.
        broken: rows broken at this radius, whatever happened at others.
        attacked: rows.
    """

    eps: float
    held: int
    broken: int
    attacked: int

    def to_json(self, n: int) -> dict[str, Any]:
        """As the report has it; n: all rows."""
        return {
            "eps": self.eps, **share("robust_accuracy", self.held, n, "no rows"),
            **share("raw_success", self.broken, self.attacked, "no row was attacked"),
        }  # fmt: skip


@dataclass(frozen=True)
class AdaptiveNote:
    """What was done against this very defence.

    Attributes:
        note: free text.
        loss: name of a loss made for it.
        surrogate: what stood in for a stage without gradients.
        eot: passes over which gradients were averaged.
        held: rows that held against the suite and the adaptive attack.
        attack: its name.
    """

    note: str = ""
    loss: str = ""
    surrogate: str = ""
    eot: int | None = None
    held: int | None = None
    attack: str = ""

    def to_json(self, n: int) -> dict[str, Any]:
        """As the report has it; n: all rows."""
        return {
            **known("note", self.note or None, "nobody wrote one"),
            **known("loss", self.loss or None, "no loss was made for this model"),
            **known("surrogate", self.surrogate or None, "no stage was replaced for gradients"),
            **known("eot", self.eot, "gradients were not averaged over passes"),
            **share("best_known", self.held, n, "no adaptive attack ran"),
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Report:
    """An evaluation.

    Attributes:
        threat: what the attacker may do.
        suite: name of the suite.
        ledger: all rows.
        attacks: of the suite, in order.
        curve: at increasing radii; empty: see `curve_reason`.
        curve_reason: why there is none.
        curve_attack: the one attack that it shows: the ledger is the worst of all.
        broken_by: number of rows that each attack was the first to break.
        flags: signs that the evaluation cannot be trusted.
        unit_tests: what attacks found in models with a known answer; empty: see `unit_tests_reason`.
        unit_tests_reason: why there are none.
        untested: attacks that are left out of them, and why.
        adaptive: what was done against this very defence.
        caveats: what this does not say.
        versions: of Python and libraries.
        first: for each row the name of the attack that broke it first; None: none did.
        status: of each row, int8 [n], see `Status`.
        x_adv: for each broken row the change that broke it first, the input itself otherwise; as the inputs.
        run_dir: of the model; "": it comes from none.
        requirements: texts, and whether they are met.
        broader: what was measured beside the ball.
        detectors: what was found of detectors of attacked inputs.
        certified: share of the rows that are right for sure, by radius.
        extra: blocks of the JSON object that others measured, by key.
    """

    threat: Threat
    suite: str
    ledger: Ledger
    attacks: tuple[AttackLine, ...]
    curve: tuple[CurveLine, ...]
    broken_by: Mapping[str, int]
    flags: tuple[Flag, ...]
    unit_tests: tuple[UnitTest, ...]
    adaptive: AdaptiveNote
    caveats: tuple[str, ...]
    versions: Mapping[str, str]
    first: tuple[str | None, ...]
    status: Tensor
    x_adv: Tensor
    curve_reason: str = ""
    curve_attack: Attack | None = None
    unit_tests_reason: str = ""
    run_dir: str = ""
    requirements: tuple[tuple[str, bool], ...] = ()
    untested: Mapping[str, str] = field(default_factory=dict)
    broader: Broader = field(default_factory=lambda: unmeasured("it was not asked for"))
    detectors: tuple[DetectorReport, ...] = ()
    certified: tuple[CertifiedShare, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def warned(self) -> tuple[Flag, ...]:
        """Flags that warn."""
        return tuple(flag for flag in self.flags if flag.state == "warn")

    def flag(self, name: str) -> Flag:
        """A flag by its letter or key.

        Args:
            name: letter or key.

        Raises:
            KeyError: there is none.
        """
        for flag in self.flags:
            if name in (flag.id, flag.key):
                return flag
        raise KeyError(name)

    def _curve_attack(self) -> dict[str, Any] | None:
        attack = self.curve_attack
        if attack is None or not self.curve:
            return None
        return {"name": type(attack).__name__, "settings": settings_of(attack)}

    def to_json(self) -> dict[str, Any]:
        """Plain values: every share with its interval, everything missing with a reason."""
        n = self.ledger.n
        tests = [
            *(vars(test) for test in self.unit_tests),
            *(_untested(name, why) for name, why in self.untested.items()),
        ]
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "threat": self.threat.to_json(),
            "versions": dict(self.versions),
            **known("run_dir", self.run_dir or None, "the model did not come from a run"),
            "requirements": [{"text": text, "met": met} for text, met in self.requirements],
            "caveats": list(self.caveats),
            "ledger": self.ledger.to_json(),
            "attacks": [line.to_json(n) for line in self.attacks],
            **known("curve", [line.to_json(n) for line in self.curve] or None, self.curve_reason),
            **known("curve_attack", self._curve_attack(), self.curve_reason),
            "worst_case": {"broken_by": dict(self.broken_by)},
            "flags": [_flag_json(flag) for flag in self.flags],
            **known("unit_tests", tests or None, self.unit_tests_reason),
            "adaptive": self.adaptive.to_json(n),
            "broader": self.broader.to_json(),
        }
        for key, blocks, why in (
            ("detectors", self.detectors, "no detector was evaluated"),
            ("certified", self.certified, "no certificate was asked for"),
        ):
            found |= known(key, [block.to_json() for block in blocks] or None, why)
        for key, why in _LATER.items():
            found |= known(key, self.extra.get(key), why)
        return found

    def text(self) -> str:
        """All sections, for a terminal."""
        return "\n".join(_lines(self)) + "\n"


def _untested(name: str, why: str) -> dict[str, Any]:
    found: dict[str, Any] = {"attack": name}
    for key in ("planted_found", "planted_total", "constant_found"):
        found |= known(key, None, why)
    return found


def _flag_json(flag: Flag) -> dict[str, Any]:
    return {
        "id": flag.id, "key": flag.key, "state": flag.state, **known("value", flag.value, flag.reason),
        "limit": flag.limit, "advice": flag.advice,
    }  # fmt: skip


def _percent(k: int | None, n: int) -> str:
    if k is None or n == 0:
        return "not measured"
    low, high = wilson(k, n)
    return f"{100 * k / n:.2f} % [{100 * low:.2f}, {100 * high:.2f}]"


def _lines(report: Report) -> Iterable[str]:
    yield "1. Threat model"
    yield from _inside(report.threat.text().split("\n"))
    yield "2. Ledger (shares with 95 % intervals)"
    yield from _inside(_ledger(report))
    yield "3. Curve of robust accuracy (nested) and raw success"
    yield from _inside(_curve(report))
    yield "4. Attacks, and who broke a row first"
    yield from _inside(_attack(line, report) for line in report.attacks)
    yield "5. Flags"
    order = ("warn", "not_run", "pass")
    for flag in sorted(report.flags, key=lambda each: order.index(each.state)):
        yield from _inside(_flag(flag))
    yield "6. Attacks on models with a known answer"
    yield from _inside(_tests(report))
    yield "7. Adaptive attack"
    yield from _inside(_adaptive(report))
    yield "8. Broader"
    yield from _inside(report.broader.text())
    if report.detectors:
        yield "   Detectors"
        yield from _inside(_inside(line for each in report.detectors for line in each.text().split("\n")))
    if report.certified:
        yield "   Certified: right whatever the change in an l2 ball, but for a chance of alpha each"
        yield from _inside(_inside(map(_certified, report.certified)))
    for place, key in ((9, "privacy"), (10, "federated")):
        if key in report.extra:
            yield f"{place}. {key.capitalize()}: see JSON"
    yield "11. Caveats"
    yield from _inside(f"- {text}" for text in report.caveats)


def _ledger(report: Report) -> Iterable[str]:
    ledger, n = report.ledger, report.ledger.n
    yield (
        f"{n} rows: {ledger.clean_correct} right before, {ledger.broken} broken, {ledger.held} held, "
        f"{ledger.failed} failed"
    )
    yield f"clean accuracy   {_percent(ledger.clean_correct, n)}"
    if ledger.attacked:
        ball = f"{report.threat.norm} eps {report.threat.eps:g}, suite {report.suite}"
        yield f"robust accuracy  {_percent(ledger.held, n)}  ({ball}): no attack here succeeded on these rows"
        yield f"success rate     {_percent(ledger.broken, ledger.clean_correct)}  of the rows that were right"
    else:
        yield f"robust accuracy  not measured: {ledger.why}"
    warned = ", ".join(flag.id for flag in report.warned)
    yield f"flags            {f'{warned} warn: read section 5 before a number' if warned else 'none warns'}"
    largest = "none" if ledger.worst_norm is None else f"{ledger.worst_norm:.6g}"
    yield f"largest change   {largest} ({report.threat.norm})"
    yield (
        f"cost             {ledger.forward:,} forward and {ledger.backward:,} backward passes of rows, "
        f"{ledger.seconds:.1f} s, seed {ledger.seed}"
    )


def _curve(report: Report) -> Iterable[str]:
    if report.curve and report.curve_attack is not None:
        yield f"under {type(report.curve_attack).__name__} alone"
    for point in report.curve:
        held, raw = _percent(point.held, report.ledger.n), _percent(point.broken, point.attacked)
        yield f"eps {point.eps:<10.4g} {held:<28} raw {raw}"
    if not report.curve:
        yield f"not measured: {report.curve_reason}"


def _attack(line: AttackLine, report: Report) -> str:
    if line.broken is None:
        return f"{line.name:<24} did not run: {line.reason}"
    alone = "after others" if line.alone is None else f"alone {_percent(line.alone, report.ledger.n)}"
    first = report.broken_by.get(line.name)
    told = "" if first is None else f"; first on {first}"
    return f"{line.name:<24} {alone}; {line.held_after} held after it{told}; {line.failed} failed"


def _flag(flag: Flag) -> Iterable[str]:
    mark = "!" if flag.state == "warn" else " "
    number = f"not run: {flag.reason}" if flag.value is None else f"{flag.value:.4g} (limit {flag.limit:.4g})"
    yield f"{mark} {flag.id} {flag.key:<24} {number}"
    if flag.state == "warn":
        yield f"    {flag.advice}"


def _tests(report: Report) -> Iterable[str]:
    for test in report.unit_tests:
        found = f"found {test.planted_found} of {test.planted_total} planted"
        yield f"{test.attack:<24} {found}; {test.constant_found} where there is none"
    for name, why in report.untested.items():
        yield f"{name:<24} left out: {why}"
    if not report.unit_tests and not report.untested:
        yield f"not run: {report.unit_tests_reason}"


def _adaptive(report: Report) -> Iterable[str]:
    note, ledger = report.adaptive, report.ledger
    yield note.note or "no note"
    details = (("attack", note.attack), ("loss", note.loss), ("surrogate", note.surrogate), ("eot", note.eot))
    yield from (f"{name}: {value}" for name, value in details if value)
    suite = _percent(ledger.held if ledger.attacked else None, ledger.n)
    yield f"suite {suite}; best known {_percent(note.held, ledger.n)}"


def _certified(at: CertifiedShare) -> str:
    if not at.n:
        return f"radius {at.radius:<8.4g} no rows"
    low, high = clopper_pearson(at.correct, at.n)
    rate = f"{100 * at.correct / at.n:.2f} % [{100 * low:.2f}, {100 * high:.2f}]"
    made = f"{at.abstained} of {at.n} abstained, {at.draws:,} draws, alpha {at.alpha:g}"
    return f"radius {at.radius:<8.4g} {rate}; {made}"


def _inside(lines: Iterable[str]) -> Iterable[str]:
    return (f"   {line}" for line in lines)
