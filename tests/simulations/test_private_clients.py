"""Noise of the clients: local privacy of updates, privacy of examples, and a budget for each client."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mycelia.engine.errors import DataError, MyceliaError
from mycelia.engine.events import Event
from mycelia.engine.run import Run
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.client_ledgers import ClientLedgers
from mycelia.privacy.local import analytic_gaussian
from mycelia.privacy.sampling import Poisson
from mycelia.simulations import resume, simulate
from tests.simulations.private_runs import (
    TROUBLE,
    accepted,
    check_repeats,
    readings,
    run,
    settings,
    stopped,
)

pytestmark = pytest.mark.usefixtures("captured_once")

LOCAL: dict[str, Any] = {"model": "local", "participation": {"uses": 3}}
EXAMPLE: dict[str, Any] = {"unit": "example", "epsilon": 8.0}
UNIFORM: dict[str, Any] = {"selector": "uniform"}
EXAMPLES = 1438  # of digits that are trained on


def ledgers(path: Path) -> ClientLedgers:
    return ClientLedgers(path / "ledgers")


def releases(path: Path) -> dict[int, int]:
    """What every client's own ledger holds."""
    found = {int(client): ledgers(path).read(client) for client in ledgers(path).clients()}
    return {client: ledger.steps for client, ledger in found.items() if ledger is not None}


# Local privacy


def test_local_noise_is_calibrated_for_the_uses_of_a_client(tmp_path: Path) -> None:
    """T updates, each of which could have been any other: one Gaussian release of sensitivity 2 √T in C."""
    found = run(tmp_path / "run", **UNIFORM, privacy=LOCAL | {"epsilon": 8.0})
    path = tmp_path / "run"
    ledger = ledgers(path).read(ledgers(path).clients()[0])
    assert ledger is not None
    assert ledger.events[0].noise_multiplier == pytest.approx(
        analytic_gaussian(8.0, 1e-3, 2 * math.sqrt(3)), rel=2e-4
    )
    counts = {client: len(rounds) for client, rounds in accepted(path).items()}
    assert releases(path) == counts
    most = max(counts.values())
    assert most <= 3
    assert found.epsilon is not None
    assert analytic_gaussian(found.epsilon, 1e-3, 2 * math.sqrt(most)) == pytest.approx(
        ledger.events[0].noise_multiplier, rel=1e-6
    )


def test_it_is_said_to_be_local_wherever_it_is_said(tmp_path: Path) -> None:
    seen: list[Event] = []
    found = run(tmp_path / "run", seen, **UNIFORM, privacy=LOCAL)
    assert not (tmp_path / "run" / "privacy.jsonl").exists()  # there is no central ε
    for event in readings(seen):
        assert event.level == "client, local"
    assert readings(seen)[-1].statement.startswith("local, ε")
    assert found.privacy is not None
    (statement,) = found.privacy["statements"]
    assert (found.privacy["model"], statement["unit"], statement["relation"]) == (
        "local",
        "client",
        "replace-one",
    )
    assert statement["statement"].startswith("local, ")
    assert "local" in found.privacy["noise_source"]
    assert not any("added to the sum" in sentence for sentence in statement["assumptions"])


def test_local_runs_repeat(tmp_path: Path) -> None:
    check_repeats(tmp_path, **UNIFORM, privacy=LOCAL, **TROUBLE)
    assert releases(tmp_path / "stopped") == releases(tmp_path / "spread") == releases(tmp_path / "whole")


def test_the_sum_has_every_clients_noise(tmp_path: Path) -> None:
    """k clients' independent noise of z C leaves z C / √k in their mean."""
    vectors = []
    for z in (1.0, 3.0):
        privacy = {"model": "local", "noise_multiplier": z, "epsilon": 1e6}
        run(tmp_path / f"{z}", **UNIFORM, privacy=privacy, rounds=1)
        vectors.append(Run.open(tmp_path / f"{z}").load_checkpoint().tensors["vector"].double().numpy())
    moved = vectors[1] - vectors[0]
    assert float(np.std(moved)) == pytest.approx(2.0 * 0.5 / math.sqrt(10), rel=0.1)


# Privacy of examples


def test_examples_are_accounted_by_client(tmp_path: Path) -> None:
    """q is the batch over the mean number of examples, and a local epoch is ⌈1/q⌉ steps."""
    seen: list[Event] = []
    found = run(tmp_path / "run", seen, **UNIFORM, privacy=EXAMPLE, local={"epochs": 2, "batch_size": 5})
    rate = 5 / (EXAMPLES / 50)
    steps = math.ceil(2 / rate)
    counts = {client: len(rounds) for client, rounds in accepted(tmp_path / "run").items()}
    assert releases(tmp_path / "run") == {client: steps * count for client, count in counts.items()}
    ledger = ledgers(tmp_path / "run").read(ledgers(tmp_path / "run").clients()[0])
    assert ledger is not None
    event = ledger.events[0]
    assert (event.unit, event.sampling, event.sampling_rate) == ("example", "poisson", rate)
    most = max(counts.values())
    expected = [
        epsilon(Poisson(rate), event.noise_multiplier, steps * count, 1e-3).epsilon
        for count in range(most + 1)
    ]
    assert found.epsilon == expected[most]
    assert found.epsilon <= 8.0
    assert found.privacy is not None
    table = found.privacy["clients"]
    numbers = [50 - len(counts), *(list(counts.values()).count(count) for count in range(1, most + 1))]
    assert table["distribution"] == [[e, n] for e, n in zip(expected, numbers, strict=True) if n]
    assert (table["largest"], table["least"], table["took_part"]) == (expected[most], 0.0, len(counts))
    assert (found.privacy["model"], found.privacy["statements"][0]["unit"]) == ("each client", "example")
    assert {event.level for event in readings(seen)} == {"example"}
    assert all(a.epsilon <= b.epsilon for a, b in pairwise(readings(seen)))


def test_runs_with_private_examples_repeat(tmp_path: Path) -> None:
    """Also for an algorithm that keeps a state at the clients, and changes their gradients."""
    given: dict[str, Any] = {"algorithm": "scaffold", **UNIFORM, **TROUBLE}
    check_repeats(tmp_path, privacy=EXAMPLE, **given)
    assert releases(tmp_path / "stopped") == releases(tmp_path / "spread") == releases(tmp_path / "whole")


def test_a_stated_rate_is_kept(tmp_path: Path) -> None:
    run(tmp_path / "run", **UNIFORM, privacy=EXAMPLE | {"sampling_rate": 0.25}, rounds=1)
    ledger = ledgers(tmp_path / "run").read(ledgers(tmp_path / "run").clients()[0])
    assert ledger is not None
    assert (ledger.events[0].sampling_rate, ledger.steps) == (0.25, 4)


def test_it_learns_with_little_noise(tmp_path: Path) -> None:
    clip = {"name": "abadi", "bound": 2.0}
    privacy = {"unit": "example", "epsilon": 1e6, "noise_multiplier": 0.05, "clip": clip}
    found = run(
        tmp_path / "run", **UNIFORM, privacy=privacy, rounds=12,
        model={"name": "mlp", "hidden": [32]}, local={"epochs": 4, "lr": 0.2},
    )  # fmt: skip
    assert found.test_accuracy is not None
    assert found.test_accuracy > 0.8


# Budgets


@pytest.mark.parametrize(
    ("block", "budget"),
    [
        ({"model": "local", "noise_multiplier": 2.2}, 8.0),
        # two rounds of twelve steps, and a little more
        (
            {"unit": "example", "noise_multiplier": 0.9},
            1.001 * epsilon(Poisson(10 * 12 / EXAMPLES), 0.9, 24, 1e-3).epsilon,
        ),
    ],
    ids=["local", "example"],
)
def test_a_client_whose_budget_is_spent_takes_no_more_part(
    tmp_path: Path, block: dict[str, Any], budget: float
) -> None:
    """Each stops by itself, exactly; the run ends when too few are left."""
    small = {"population": {"clients": 12}, "cohort": 6, "rounds": 30, "round": {"quorum": 0.5}}
    found = run(tmp_path / "run", **UNIFORM, privacy=block | {"epsilon": budget}, **small)
    assert (found.stopped_by, found.failed_rounds) == ("budget", 0)
    for client in ledgers(tmp_path / "run").clients():
        ledger = ledgers(tmp_path / "run").read(client)
        assert ledger is not None
        assert ledger.statement(1e-3).epsilon <= budget
    most = max(releases(tmp_path / "run").values())
    full = [client for client, steps in releases(tmp_path / "run").items() if steps == most]
    assert len(full) > 12 - 3  # fewer than the quorum can go on
    one = ledgers(tmp_path / "run").read(full[0])
    assert one is not None
    one.record(replace(one.events[0], count=12 if "unit" in block else 1))  # one more round is too much
    assert one.statement(1e-3).epsilon > budget
    assert found.privacy is not None
    assert found.privacy["clients"]["spent"] == len(full)


def test_a_lower_limit_of_uses_stops_the_run_too(tmp_path: Path) -> None:
    privacy = LOCAL | {"participation": {"uses": 1, "separation": 2}}
    found = run(tmp_path / "run", **UNIFORM, privacy=privacy, population={"clients": 22}, rounds=9)
    assert found.stopped_by == "budget"  # noise was chosen for one use
    privacy |= {"noise_multiplier": 4.0}
    found = run(tmp_path / "more", **UNIFORM, privacy=privacy, population={"clients": 22}, rounds=9)
    assert (found.stopped_by, found.rounds) == ("participation", 2)


@pytest.mark.parametrize("damage", ["shorten", "edit", "remove"])
def test_a_ledger_of_a_client_that_does_not_match_stops_the_resume(tmp_path: Path, damage: str) -> None:
    stopped(tmp_path / "run", 3, **UNIFORM, privacy=LOCAL, population={"clients": 10})
    path = ledgers(tmp_path / "run").path(4)
    lines = path.read_text().splitlines(keepends=True)
    if damage == "shorten":
        path.write_text("".join(lines[:1]))
    elif damage == "edit":
        path.write_text(lines[0] + lines[1].replace('"clip":0.5', '"clip":0.4'))
    else:
        path.unlink()
    with pytest.raises(DataError, match=r"4\.jsonl"):
        resume(tmp_path / "run")


def test_the_systems_secret_is_shared_by_processes_and_sittings(tmp_path: Path) -> None:
    os = {"noise_source": "os"}
    stopped(tmp_path / "run", 2, **UNIFORM, privacy=LOCAL | os, rounds=3)
    found = resume(
        tmp_path / "run"
    )  # the round that is done again has the same noise, or it would be refused
    assert found.failed_rounds == 0
    assert found.privacy is not None
    assert (found.privacy["mechanism"], found.rounds) == ("discrete-gaussian", 3)
    assert "not for release" not in found.privacy["noise_source"]
    assert (tmp_path / "run" / "noise.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"privacy": LOCAL | {"unit": "example"}}, 'set unit = "client"'),
        ({"privacy": LOCAL | {"factorisation": "blt"}}, "correlated noise"),
        ({"privacy": LOCAL | {"clip": {"name": "quantile"}}}, "fixed bound"),
        ({"privacy": LOCAL | {"noise_multiplier": 300.0}}, "update.max_abs to 1200"),
        ({"privacy": LOCAL | {"noise_multiplier": 0.1, "epsilon": 1.0}}, "gives the first round"),
        ({"privacy": LOCAL, "selector": "weighted"}, "how many examples a client has is private"),
        ({"privacy": EXAMPLE, "selector": "weighted"}, "how many examples a client has is private"),
        ({"privacy": EXAMPLE | {"factorisation": "blt"}}, "correlated noise protects clients"),
        ({"privacy": EXAMPLE | {"clip": {"name": "quantile"}}}, "fixed bound"),
        ({"privacy": EXAMPLE, "plan": "interpreter"}, "leave plan out"),
        ({"privacy": EXAMPLE, "model": "tests.simulations.plugins:normed"}, "BatchNorm"),
        ({"privacy": EXAMPLE | {"sampling_rate": 0.0}}, "sampling_rate"),
    ],
    ids=str,
)
def test_what_has_no_bound_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MyceliaError, match=message):
        simulate(settings(**UNIFORM | change), out=tmp_path / "run")
