"""A simulation killed with SIGKILL at random moments and resumed ends with the hash of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mycelia.simulations import load_scenario, simulate

SETTINGS = [
    "model=mlp", "rounds=15", "cohort=10", "algorithm=scaffold", "local.epochs=2",
    'partition={name="dirichlet",alpha=0.5,min_size=3}', "evaluation.every=5",
]  # fmt: skip


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mycelia.cli", "simulate", *arguments, "--format", "json"]


def settings(workers: int) -> list[str]:
    backend = f'backend={{name="workers",workers={workers}}}'
    return ["quickstart", *(part for setting in (*SETTINGS, backend) for part in ("-s", setting))]


def finished(arguments: list[str]) -> str:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["model_sha256"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the undisturbed run, which the number of workers does not change."""
    scenario = load_scenario("quickstart", [*SETTINGS, "backend=inline"])
    return simulate(scenario, out=tmp_path_factory.mktemp("whole") / "run").model_sha256


# tests that run in the background inherit a deaf ear for Ctrl-C, and Python leaves it so
HEARING = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from mycelia.cli.main import main; main()"
)


def left_behind() -> set[str]:
    memory = Path("/dev/shm")
    return {entry.name for entry in memory.glob("mycelia-*")} if memory.is_dir() else set()


def leftover(before: set[str], patience_s: float = 60.0) -> set[str]:
    """What is new and stays; other runs on the machine have such folders while they start."""
    deadline = time.monotonic() + patience_s
    while (found := left_behind() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def checkpointed(run: Path) -> bool:
    folder = run / "checkpoints"
    return folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir())


@pytest.mark.e2e
@pytest.mark.parametrize(
    "kills",
    [  # a limit for the whole function would be the nearer one, and hold for both
        pytest.param(1, marks=pytest.mark.timeout(900)),
        pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_sigkill_and_resume(tmp_path: Path, expected: str, kills: int) -> None:
    moments = random.Random(kills)
    before = left_behind()
    for number in range(kills):
        out = tmp_path / f"killed-{number}"
        process = subprocess.Popen(
            command(*settings(2), "--out", str(out)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while not checkpointed(out) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 1.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not leftover(before), "a killed run leaves shared memory behind"
        assert finished(["--resume", str(out)]) == expected, f"kill {number}"


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_ctrl_c_saves_and_exits_130(tmp_path: Path, expected: str) -> None:
    out = tmp_path / "stopped"
    process = subprocess.Popen(
        [sys.executable, "-c", HEARING, "simulate", *settings(2), "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while not checkpointed(out) and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: the workers get it too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert f"--resume {out}" in errors
    assert finished(["--resume", str(out)]) == expected
