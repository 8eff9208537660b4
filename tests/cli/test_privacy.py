"""`mycelia privacy epsilon | calibrate | ledger`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mycelia.privacy.ledger import FILE, Ledger
from mycelia.privacy.sampling import Poisson, ShuffledEpochs
from tests.cli.command_line import mycelia

Capture = pytest.CaptureFixture[str]

STATED = {
    "epsilon", "delta", "accountant", "epsilon_rdp", "rdp_order", "sampling", "sampling_rate",
    "noise_multiplier", "steps", "participations", "relation", "unit", "amplified", "bound", "assumptions",
    "version",
}  # fmt: skip
ROW = ("--sampling-rate", 0.04, "--noise-multiplier", 1.5, "--steps", 2250, "--delta", 1e-5)


def test_epsilon_json(capsys: Capture) -> None:
    done = mycelia(capsys, "privacy", "epsilon", *ROW, "--format", "json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert set(found) == STATED
    assert found["epsilon"] == pytest.approx(6.7688, rel=5e-3)
    assert found["rdp_order"] == pytest.approx(3.9)
    assert (found["bound"], found["relation"], found["unit"]) == ("upper", "add-remove", "example")


def test_epsilon_text_is_a_statement(capsys: Capture) -> None:
    done = mycelia(capsys, "privacy", "epsilon", *ROW)
    assert done.code == 0
    first = done.out.splitlines()[0]
    assert first.startswith("ε ≤ 6.7")
    assert "add-remove" in first


def test_infinite_is_a_string(capsys: Capture) -> None:
    arguments = ("--sampling-rate", 0.04, "--noise-multiplier", 0, "--steps", 10, "--delta", 1e-5)
    done = mycelia(capsys, "privacy", "epsilon", *arguments, "--format", "json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["epsilon"] == "inf"
    assert found["epsilon_rdp"] == "inf"


def test_shuffle_and_fixed(capsys: Capture) -> None:
    arguments = ("--sampling-rate", 0.001, "--noise-multiplier", 1, "--steps", 1000, "--delta", 1e-6)
    done = mycelia(capsys, "privacy", "epsilon", *arguments, "--sampling", "shuffle", "--format", "json")
    found = json.loads(done.out)
    assert found["epsilon"] == pytest.approx(4.88655, abs=1e-4)
    assert (found["participations"], found["amplified"]) == (1, False)
    done = mycelia(capsys, "privacy", "epsilon", *arguments, "--sampling", "fixed", "--format", "json")
    found = json.loads(done.out)
    assert (found["accountant"], found["relation"]) == ("rdp", "replace-one")


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (("--sampling", "fixed", "--accountant", "pld"), "'rdp'"),
        (("--relation", "replace-one", "--accountant", "rdp"), "'pld'"),
        (("--sampling", "shuffle", "--relation", "add-remove"), "zero-out"),
        (("--noise-schedule", "cosine:1"), "time, step, exp"),
        (("--max-examples-per-user", "0"), "max_examples"),
    ],
)
def test_no_bound_is_a_usage_error(capsys: Capture, extra: tuple[str, ...], told: str) -> None:
    done = mycelia(capsys, "privacy", "epsilon", *ROW, *extra)
    assert done.code == 2
    assert done.out == ""
    assert told in done.err


def test_users_and_schedules(capsys: Capture) -> None:
    arguments = ("--sampling-rate", 0.01, "--noise-multiplier", 2, "--steps", 50, "--delta", 1e-5)
    extra = ("--max-examples-per-user", 2, "--format", "json")
    found = json.loads(mycelia(capsys, "privacy", "epsilon", *arguments, *extra).out)
    assert found["unit"] == "user (≤ 2 examples)"
    extra = ("--noise-schedule", "exp:0.01", "--format", "json")
    decayed = json.loads(mycelia(capsys, "privacy", "epsilon", *arguments, *extra).out)
    assert decayed["noise_multiplier"] is None
    plain = json.loads(mycelia(capsys, "privacy", "epsilon", *arguments, "--format", "json").out)
    assert decayed["epsilon"] > plain["epsilon"]


def test_calibrate(capsys: Capture) -> None:
    arguments = ("--epsilon", 8, "--steps", 2250, "--sampling-rate", 0.04, "--delta", 1e-5)
    done = mycelia(capsys, "privacy", "calibrate", *arguments, "--format", "json")
    assert done.code == 0
    found = json.loads(done.out)
    assert set(found) == STATED | {"solved_for", "value", "target_epsilon"}
    assert found["solved_for"] == "noise_multiplier"
    assert 1.345 <= found["value"] <= 1.348
    text = mycelia(capsys, "privacy", "calibrate", *arguments).out
    assert text.startswith("noise_multiplier = 1.34")


def test_calibrate_out_of_reach(capsys: Capture) -> None:
    arguments = ("--epsilon", 0.01, "--noise-multiplier", 1, "--sampling-rate", 1, "--delta", 1e-5)
    done = mycelia(capsys, "privacy", "calibrate", *arguments)
    assert done.code == 3
    assert "one update" in done.err
    done = mycelia(capsys, "privacy", "calibrate", "--epsilon", 1, "--delta", 1e-5)
    assert done.code == 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 30 updates, with a budget in its configuration."""
    ledger = Ledger.create(tmp_path / FILE, "seeded and reproducible: not for release")
    for event in Poisson(0.02).events(1.0, 30, clip=1.5):
        ledger.record(event)
    ledger.close()
    (tmp_path / "config.toml").write_text('[privacy]\nunit = "example"\nepsilon = 2.0\ndelta = 1e-5\n')
    return tmp_path


def test_ledger_json(capsys: Capture, run: Path) -> None:
    done = mycelia(capsys, "privacy", "ledger", run, "--format", "json")
    assert done.code == 0
    found = json.loads(done.out)
    assert set(found) == {
        "run", "statements", "budget", "noise_source", "chain_ok", "heuristics", "events",
    }  # fmt: skip
    (stated,) = found["statements"]
    assert set(stated) == STATED
    assert found["chain_ok"] is True
    assert "not for release" in found["noise_source"]
    assert set(found["budget"]) == {"epsilon", "delta", "spent", "remaining_steps", "stopped_by"}
    assert found["budget"]["spent"] == pytest.approx(stated["epsilon"])
    assert found["budget"]["remaining_steps"] > 0
    assert found["events"] == [
        {
            "index": 0, "step": 0, "kind": "update", "count": 30, "sampling": "poisson",
            "sampling_rate": 0.02, "noise_multiplier": 1.0, "clip": 1.5, "mechanism": "gaussian",
            "relation": "add-remove", "unit": "example",
        }
    ]  # fmt: skip


def test_ledger_text(capsys: Capture, run: Path) -> None:
    done = mycelia(capsys, "privacy", "ledger", run, "--delta", 1e-6)
    assert done.code == 0
    assert "δ = 1e-06" in done.out
    assert "not for release" in done.out


def test_two_relations_are_two_statements(capsys: Capture, run: Path) -> None:
    ledger = Ledger.load(run / FILE, write=True)
    for event in ShuffledEpochs(1, 10).events(1.0, 5):
        ledger.record(event)
    ledger.close()
    found = json.loads(mycelia(capsys, "privacy", "ledger", run, "--format", "json").out)
    assert [each["relation"] for each in found["statements"]] == ["add-remove", "zero-out"]


def test_edited_ledger(capsys: Capture, run: Path) -> None:
    path = run / FILE
    path.write_text(path.read_text().replace('"count":30', '"count":3'))
    done = mycelia(capsys, "privacy", "ledger", run, "--format", "json")
    assert done.code == 1
    assert json.loads(done.out)["chain_ok"] is False
    assert "does not follow" in done.err


def test_ledger_without_delta(capsys: Capture, run: Path) -> None:
    done = mycelia(capsys, "privacy", "ledger", run / FILE)
    assert done.code == 2
    assert "--delta" in done.err
    done = mycelia(capsys, "privacy", "ledger", run / "nowhere", "--delta", 1e-5)
    assert done.code == 1
