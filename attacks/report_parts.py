"""An evaluation as sections of a run's report, from what was stored: nothing is attacked again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mycelia.attacks.facts import share_text
from mycelia.engine.errors import DataError
from mycelia.engine.events import Event
from mycelia.engine.report import plot
from mycelia.engine.report.part import Figure, Part, Section, Table
from mycelia.engine.report.text import duration, title

__all__ = ["EVALUATION", "parts_of", "stored"]

EVALUATION: Final = "evaluation.json"
"""The file of a run folder with what `evaluate` found."""

Facts = Mapping[str, Any]


def stored(folder: Path) -> dict[str, Any] | None:
    """What an evaluation found; None: there is none in this folder.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / EVALUATION
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{EVALUATION} cannot be read ({error})", who=str(folder)) from error
    if not isinstance(found, dict) or "ledger" not in found:
        raise DataError(f"{EVALUATION} is no evaluation", who=str(folder))
    return found


def parts_of(facts: Facts) -> list[Part]:
    """Sections in the order of the report, from the facts of `Report.to_json`."""
    return [_Stored(name, facts, make) for name, make in _SECTIONS]


@dataclass
class _Stored:
    """One section."""

    name: str
    all: Facts
    make: Callable[[Facts], Section | None]

    def add(self, event: Event, seconds: float) -> None:
        """What is stored does not change with events."""

    def facts(self) -> Facts | None:
        """See `Part`."""
        return {
            self.name: self.all.get(self.name),
            f"{self.name}_reason": self.all.get(f"{self.name}_reason"),
        }

    def section(self) -> Section | None:
        """See `Part`."""
        return self.make(self.all)


def _threat(facts: Facts) -> Section:
    threat = facts["threat"]
    rows = [(title(key), _text(value)) for key, value in threat.items() if not key.endswith("_reason")]
    return Section(
        "threat", "Threat model", "What the attacker may do; no number below holds for any other.",
        tables=[Table(("Setting", "Value"), rows)],
    )  # fmt: skip


def _ledger(facts: Facts) -> Section:
    ledger, threat = facts["ledger"], facts["threat"]
    warned = [flag["id"] for flag in facts["flags"] if flag["state"] == "warn"]
    ball = f"{threat['norm']} {threat['eps']:g}"
    lead = f"Robust accuracy at {ball}: {share_text(ledger, 'robust_accuracy')} of all rows. "
    lead += (
        f"Flags {', '.join(warned)} warn: read them before this number."
        if warned
        else "No flag warns. No attack here succeeded on the rows that held: no proof that none would."
    )
    rows = [
        ("Rows", f"{ledger['n']:,}"),
        ("Right before", f"{ledger['clean_correct']:,}"),
        ("Broken by at least one attack", f"{ledger['broken']:,}"),
        ("Held against all", f"{ledger['held']:,}"),
        ("Could not be judged", f"{ledger['failed']:,}"),
        *(
            (title(key), share_text(ledger, key))
            for key in ("clean_accuracy", "robust_accuracy", "success_rate")
        ),
        ("Largest change that counts", _text(ledger["worst_norm"])),
        ("Forward passes of rows", f"{ledger['forward']:,}"),
        ("Backward passes of rows", f"{ledger['backward']:,}"),
        ("Time", duration(ledger["seconds"])),
        ("Seed", str(ledger["seed"])),
    ]
    return Section("ledger", "Ledger", lead, tables=[Table(("", "Value"), rows, numeric=(1,))])


def _curve(facts: Facts) -> Section:
    curve = facts["curve"]
    if not curve:
        return Section("curve", "Curve", f"Not measured: {facts.get('curve_reason', '')}.")
    eps = [point["eps"] for point in curve]
    lines: list[tuple[str, Sequence[float], Sequence[float]]] = []
    for key, label in (("robust_accuracy", "Robust accuracy (nested)"), ("raw_success", "Success, raw")):
        known = [(e, point[key]) for e, point in zip(eps, curve, strict=True) if point[key] is not None]
        if known:
            lines.append((label, [e for e, _ in known], [share for _, share in known]))
    norm, attack = facts["threat"]["norm"], facts.get("curve_attack")
    said = f"Under {attack['name']} alone; the ledger is the worst of all attacks. " if attack else ""
    figure = Figure(
        "robustness-curve",
        plot.line_plot(
            "robustness-curve", lines, xlabel=f"eps ({norm})", ylabel="", share=True, from_zero=True
        ),
        f"{said}Robust accuracy cannot rise with eps; raw success that falls is a sign of a weak attack.",
    )
    rows = [
        (f"{point['eps']:g}", share_text(point, "robust_accuracy"), share_text(point, "raw_success"))
        for point in curve
    ]
    table = Table(("eps", "Robust accuracy", "Success, raw"), rows, numeric=(0, 1, 2))
    return Section("curve", "Robust accuracy against eps", figures=[figure], tables=[table])


def _attacks(facts: Facts) -> Section:
    broken_by = facts["worst_case"]["broken_by"]
    rows = [
        (
            line["name"],
            share_text(line, "robust_accuracy_alone"),
            _text(line["held_after"]),
            _text(broken_by.get(line["name"], 0)),
            _text(line["broken"]),
            _text(line["failed"]),
            _text(line.get("broken_reason") or ""),
        )
        for line in facts["attacks"]
    ]
    head = ("Attack", "Robust accuracy, alone", "Held after it", "First to break", "Broken", "Failed", "")
    return Section(
        "attacks", "Attacks, and who broke a row first",
        "A row holds only if it held against every attack; rows that were broken are not sent on.",
        tables=[Table(head, rows, numeric=(1, 2, 3, 4, 5))],
    )  # fmt: skip


def _flags(facts: Facts) -> Section:
    order = {"warn": 0, "not_run": 1, "pass": 2}
    flags = sorted(facts["flags"], key=lambda flag: order[flag["state"]])
    rows = [
        (
            flag["id"],
            title(flag["key"]),
            flag["state"].replace("_", " "),
            _text(flag["value"]) if flag["value"] is not None else str(flag.get("value_reason", "")),
            _text(flag["limit"]),
            flag["advice"] if flag["state"] == "warn" else "",
        )
        for flag in flags
    ]
    warned = sum(flag["state"] == "warn" for flag in flags)
    lead = f"{warned} of {len(flags)} warn." if warned else f"None of {len(flags)} warns."
    return Section(
        "flags", "Flags", f"Signs that the evaluation is weaker than it looks. {lead}",
        tables=[Table(("", "Flag", "State", "Value", "Limit", "What to do"), rows, numeric=(3, 4))],
    )  # fmt: skip


def _unit_tests(facts: Facts) -> Section:
    lead = "On models whose answer is known: all planted examples should be found, and none elsewhere."
    tests = facts["unit_tests"]
    if not tests:
        return Section(
            "unit_tests", "Attacks on known answers", f"Not run: {facts.get('unit_tests_reason', '')}."
        )
    rows = [
        (test["attack"], f"{test['planted_found']} of {test['planted_total']}", str(test["constant_found"]))
        if test["planted_total"] is not None
        else (test["attack"], f"left out: {test['planted_total_reason']}", "")
        for test in tests
    ]
    head = ("Attack", "Planted examples found", "Found where there is none")
    return Section("unit_tests", "Attacks on known answers", lead, tables=[Table(head, rows, numeric=(1, 2))])


def _adaptive(facts: Facts) -> Section:
    note = facts["adaptive"]
    rows = [(title(key), _text(note[key])) for key in ("note", "loss", "surrogate", "eot") if note.get(key)]
    rows += [
        ("The suite's result", share_text(facts["ledger"], "robust_accuracy")),
        ("Best known, with an attack made for it", share_text(note, "best_known")),
    ]
    return Section("adaptive", "Adaptive attack", tables=[Table(("", "Value"), rows)])


def _broader(facts: Facts) -> Section:
    found = facts["broader"]
    natural, moved, noise = found["corruptions"], found["spatial"], found["gaussian"]
    tables = []
    if natural is not None:
        rows = [
            (title(each["corruption"]), str(each["severity"]), share_text(each, "accuracy"))
            for each in natural["each"]
        ]
        rows.append(("Mean over corruptions", "", f"{100 * natural['mean_accuracy']:.2f} %"))
        tables.append(Table(("Corruption", "Severity", "Accuracy"), rows, numeric=(1, 2)))
    pairs: list[tuple[str, str]] = []
    if moved is not None:
        size = f"Worst rotation to {moved['rotation']:g}° and shift to {moved['shift']:g} pixels"
        pairs.append((size, share_text(moved, "accuracy")))
    pairs += [(f"Normal noise of {at['sigma']:g}", share_text(at, "accuracy")) for at in noise or ()]
    if pairs:
        tables.append(Table(("", "Accuracy"), pairs, numeric=(1,)))
    missing = [f"{key}: {found[f'{key}_reason']}" for key, value in found.items() if value is None]
    lead = f"Not measured: {'; '.join(missing)}." if missing else ""
    return Section("broader", "Beside the ball", lead, tables=tables)


def _detectors(facts: Facts) -> Section | None:
    if not facts["detectors"]:
        return None
    rows = [
        (
            each["name"],
            share_text(each, "false_alarm_rate"),
            share_text(each, "detection_rate"),
            f"{each['roc']['auc']:.3f}",
            share_text(each["adaptive"], "success_rate") if each["adaptive"] else each["adaptive_reason"],
        )
        for each in facts["detectors"]
    ]
    head = ("Detector", "False alarms", "Found", "Area under the curve", "An attack on both succeeds")
    return Section(
        "detectors", "Detectors", "What is found is of attacks that do not know the detector.",
        tables=[Table(head, rows, numeric=(1, 2, 3, 4))],
    )  # fmt: skip


def _certified(facts: Facts) -> Section | None:
    if not facts["certified"]:
        return None
    rows = [
        (
            f"{at['radius']:g}",
            share_text(at, "accuracy"),
            share_text(at, "abstained"),
            _text(at["draws"]),
            f"{at['alpha']:g}",
        )
        for at in facts["certified"]
    ]
    return Section(
        "certified", "Certified accuracy",
        "Rows that are right whatever the change in an l2 ball, but for a chance of alpha each.",
        tables=[Table(("Radius", "Accuracy", "Abstained", "Draws", "Alpha"), rows, numeric=(0, 1, 2, 3, 4))],
    )  # fmt: skip


def _caveats(facts: Facts) -> Section:
    requirements = facts.get("requirements") or []
    tables = []
    if requirements:
        rows = [(each["text"], "met" if each["met"] else "not met") for each in requirements]
        tables.append(Table(("Requirement", ""), rows))
    tables.append(Table(("Caveat",), [(text,) for text in facts["caveats"]]))
    return Section("caveats", "Requirements and caveats", tables=tables)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)


_SECTIONS: Final[tuple[tuple[str, Callable[[Facts], Section | None]], ...]] = (
    ("threat", _threat),
    ("ledger", _ledger),
    ("curve", _curve),
    ("attacks", _attacks),
    ("flags", _flags),
    ("unit_tests", _unit_tests),
    ("adaptive", _adaptive),
    ("broader", _broader),
    ("detectors", _detectors),
    ("certified", _certified),
    ("caveats", _caveats),
)
