"""Private simulations on the command line: what is printed of ε, by whom it was spent, and the ledgers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.command_line import mycelia

Capture = pytest.CaptureFixture[str]

SMALL = [
    "rounds=2", "cohort=4", "population.clients=10", "backend=inline", "algorithm.weighting=uniform",
    "model={name='mlp',hidden=[8]}", "evaluation.clients=0", "privacy.unit=client", "privacy.epsilon=20",
    "privacy.delta=1e-3", "privacy.clip={name='abadi',bound=0.5}",
]  # fmt: skip


def simulated(capsys: Capture, out: Path, *settings: str) -> tuple[str, str]:
    """Standard output and error of a run."""
    given = [part for setting in (*SMALL, *settings) for part in ("-s", setting)]
    done = mycelia(capsys, "simulate", "quickstart", *given, "--out", out)
    assert done.code == 0, done.err
    return done.out, done.err


def test_epsilon_of_the_server_is_the_run_s(tmp_path: Path, capsys: Capture) -> None:
    out, err = simulated(capsys, tmp_path / "run", "selector=availability")
    assert re.search(r"privacy +epsilon 20, delta 0\.001, per client\n", out)
    assert " ε 20" in err
    done = mycelia(capsys, "privacy", "ledger", tmp_path / "run", "--format", "json")
    found = json.loads(done.out)
    assert (found["budget"]["remaining_steps"], found["events"][0]["sampling"]) == (None, "min-sep")


def test_local_epsilon_is_never_printed_as_another(tmp_path: Path, capsys: Capture) -> None:
    out, err = simulated(capsys, tmp_path / "run", "privacy.model=local")
    line = next(line for line in out.splitlines() if line.startswith("privacy"))
    assert re.search(
        r"local epsilon [\d.]+, delta 0\.001, per client: the largest of 10 clients, median", line
    )
    assert "local ε" in err
    assert not re.search(r"(?<!local )ε ", err)
    done = mycelia(capsys, "privacy", "ledger", tmp_path / "run")
    assert done.code == 0
    assert "noise source: local, each client's own" in done.out
    assert re.search(r"ledger +client \d+, the fullest of \d+ in ", done.out)


def test_the_ledgers_of_clients_are_checked_and_shown(tmp_path: Path, capsys: Capture) -> None:
    out, _ = simulated(capsys, tmp_path / "run", "privacy.unit=example")
    assert re.search(r"privacy +epsilon [\d.]+, delta 0\.001, per example: the largest of 10 clients", out)
    done = mycelia(capsys, "privacy", "ledger", tmp_path / "run", "--format", "json")
    found = json.loads(done.out)
    assert found["chain_ok"]
    assert found["statements"][0]["unit"] == "example"
    path = next((tmp_path / "run" / "ledgers").glob("*.jsonl"))
    done = mycelia(capsys, "privacy", "ledger", path, "--delta", "1e-3")
    assert (done.code, "per example" in done.out) == (0, True)
    path.write_text(path.read_text().replace('"count"', '"Count"'))
    done = mycelia(capsys, "privacy", "ledger", tmp_path / "run")
    assert done.code == 1
    assert path.name in done.err


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("selector=poisson", "privacy.factorisation=blt"), "must not be poisson"),
        (("privacy.model=local", "privacy.unit=example"), 'set unit = "client"'),
        (("privacy.participation.separation=3", "selector=uniform"), "leave it out, or name a factorisation"),
        (("privacy.factorisation={name='blt',buffers=0}",), "buffers"),
    ],
)
def test_contradictions_are_usage_errors(
    tmp_path: Path, capsys: Capture, settings: tuple[str, ...], told: str
) -> None:
    given = [part for setting in (*SMALL, *settings) for part in ("-s", setting)]
    done = mycelia(capsys, "simulate", "quickstart", *given, "--out", tmp_path / "run")
    assert (done.code, done.out) == (2, "")
    assert told in done.err
    assert not (tmp_path / "run").exists()
