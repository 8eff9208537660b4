"""The report's privacy block: what ε depends on, a clip bound that moves, and the clients' own budgets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from mycelia.engine import events as e
from mycelia.engine.report import Report, build_report
from mycelia.engine.report.text import at_most
from mycelia.engine.run import Run
from tests.engine.run_factory import result, started, write_run

STATEMENT: dict[str, Any] = {
    "epsilon": 2.34561, "delta": 1e-5, "unit": "client", "relation": "add-remove", "accountant": "pld",
    "epsilon_rdp": 2.9, "sampling": "poisson", "sampling_rate": 0.1, "amplified": True,
    "noise_multiplier": 1.25, "steps": 20, "participations": 20,
    "assumptions": ["nobody tells who was drawn"],
}  # fmt: skip
FACTS: dict[str, Any] = {
    "unit": "client", "model": "central", "clip": "quantile", "bound": 0.75, "mechanism": "gaussian",
    "noise_source": "seeded", "factorisation": None, "statements": [STATEMENT], "clients": None,
}  # fmt: skip
CLIENTS = {
    "clients": 100, "took_part": 60, "spent": 3, "largest": 4.00001, "median": 1.5, "least": 0.0,
    "distribution": [[0.0, 40], [1.5, 57], [4.00001, 3]],
}  # fmt: skip


def report(
    path: Path,
    level: str = "client",
    facts: Mapping[str, Any] = FACTS,
    clips: tuple[float, ...] = (1.0, 0.75),
) -> Report:
    spent = (1.0, 2.34561)
    log: list[e.Event] = [started()]
    for number, (epsilon, clip) in enumerate(zip(spent, clips, strict=True), 1):
        log.append(e.Privacy(epsilon, 1e-5, level, round=number, values={"clip": clip}))
    log.append(
        e.Privacy(spent[-1], 1e-5, level, round=2, values={"clip": clips[-1]}, statement="said", facts=facts)
    )
    log.append(e.RunFinished(result(2)))
    return build_report(Run.open(write_run(path, log)))


def text(made: Report) -> str:
    html = made.html.read_text(encoding="utf-8")
    section = html[html.index('id="privacy"') :].partition("<section")[0]
    shown = re.sub(r"<svg.*?</svg>", " ", section, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", shown)).split())


def test_what_epsilon_depends_on_is_there(tmp_path: Path) -> None:
    made = report(tmp_path / "run")
    shown = text(made)
    assert "Spent in all: ε = 2.346, δ = 1e−5 at client level. In full: said." in shown
    for row in (
        "ε ≤ 2.346 at δ = 1e−5", "Neighbours add-remove", "Accountant pld", "ε by Rényi divergences 2.9",
        "Sampling poisson", "Sampling rate 0.1", "Amplified by sampling yes", "Noise multiplier 1.25",
        "Updates 20", "Noise added by the server, to the sum", "Clip function quantile", "Clip bound 0.75",
        "Assumes that nobody tells who was drawn",
    ):  # fmt: skip
        assert row in shown
    assert "Factorisation" not in shown
    facts = json.loads(made.json.read_text(encoding="utf-8"))["privacy"]
    assert facts["details"] == FACTS
    assert facts["curve"]["y"] == [1.0, 2.34561, 2.34561]


def test_a_bound_that_moves_is_drawn_and_one_that_stands_is_not(tmp_path: Path) -> None:
    moved = report(tmp_path / "moved")
    assert "The clip bound in force, from 0.75 to 1; it is public." in text(moved)
    assert json.loads(moved.json.read_text(encoding="utf-8"))["privacy"]["clip"]["y"] == [1.0, 0.75, 0.75]
    still = report(tmp_path / "still", clips=(1.0, 1.0))
    assert "clip bound in force" not in text(still)
    assert json.loads(still.json.read_text(encoding="utf-8"))["privacy"]["clip"] is None


@pytest.mark.parametrize(("level", "kind"), [("example", "ε"), ("client, local", "Local ε")])
def test_clients_with_budgets_of_their_own_are_told_apart(tmp_path: Path, level: str, kind: str) -> None:
    facts = FACTS | {"model": "local" if "local" in level else "each client", "clients": CLIENTS}
    shown = text(report(tmp_path / "run", level, facts))
    assert f"{kind} is 4.001 for the client that took part most often, 1.5 for the median" in shown
    assert "60 took part, and 3 can pay for no more rounds." in shown
    assert "0 40 1.5 57 4.001 3" in shown
    assert ("Spent in all: local ε" in shown) == ("local" in level)
    assert f"at {level.partition(',')[0]} level" in shown


def test_a_statement_from_before_the_end_needs_no_facts(tmp_path: Path) -> None:
    made = report(tmp_path / "run", facts={})
    assert "What it depends on" not in text(made)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (2.0, "2"), (1.23401, "1.235"), (1.234, "1.234"), (7.99951, "8"), (123456.0, "123,500"),
     (1.00001e-7, "1.001e−7"), (float("inf"), "∞")],
)  # fmt: skip
def test_bounds_are_rounded_upwards(value: float, shown: str) -> None:
    assert at_most(value) == shown
