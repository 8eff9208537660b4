"""Private simulations killed with SIGKILL and resumed end with the model and the ε of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mycelia.simulations import load_scenario, simulate

SETTINGS = [
    "rounds=12", "cohort=10", "algorithm.weighting=uniform", "evaluation.every=0", "evaluation.clients=0",
    "round.quorum=0.3", "behaviour.dropout=0.2",
]  # fmt: skip
PRIVACY = [
    "privacy.unit=client",
    "privacy.epsilon=20",
    "privacy.delta=1e-3",
    "privacy.clip={name='abadi',bound=0.5}",
]
KINDS = {
    "adaptive": ["selector=poisson", "privacy.clip={name='quantile',sigma_b=5.0}"],
    "correlated": ["selector=availability", "privacy.participation.separation=4"],
    "local": ["privacy.model=local", "privacy.participation.uses=5"],
    "example": ["privacy.unit=example", "privacy.participation.uses=5"],
    "shares": ["privacy.model=distributed", "secure_sum.dropout=0.3", "cohort=12", "round.quorum=0.7"],
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mycelia.cli", "simulate", *arguments, "--format", "json"]


def finished(arguments: list[str]) -> tuple[Any, Any]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    return result["model_sha256"], result["privacy"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        *(
            pytest.param(kind, 1, marks=pytest.mark.timeout(900))
            for kind in ("correlated", "example", "shares")
        ),
        *(pytest.param(kind, 10, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]) for kind in KINDS),
    ],
)
def test_sigkill_and_resume(tmp_path: Path, kind: str, kills: int) -> None:
    given = [*SETTINGS, *PRIVACY, *KINDS[kind]]
    whole = simulate(load_scenario("quickstart", [*given, "backend=inline"]), out=tmp_path / "whole")
    expected = whole.model_sha256, json.loads(json.dumps(whole.privacy))
    # workers take as long to start as such a run takes: a few kills are of one process
    backend = "backend=inline" if kills < 5 else "backend={name='workers',workers=2}"
    settings = [part for setting in (*given, backend) for part in ("-s", setting)]
    moments = random.Random(kills)
    for number in range(kills):
        out = tmp_path / f"killed-{number}"
        process = subprocess.Popen(
            command("quickstart", *settings, "--out", str(out)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        folder = out / "checkpoints"
        while process.poll() is None and not (folder / "step-00000002").is_dir():
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.5))
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert finished(["--resume", str(out)]) == expected, f"kill {number}"
