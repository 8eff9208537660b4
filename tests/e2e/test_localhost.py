"""The example examples/localhost, with its own scripts and real processes, killed and started again.

Server and devices are killed with SIGKILL in turn, each after a round was published, and the run ends all the
same. A round that a device was missing in is tried again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mycelia.engine.data.builtin import fashion_mnist
from mycelia.engine.errors import DataError
from mycelia.privacy.ledger import Ledger

EXAMPLE = Path(__file__).parents[2] / "examples" / "localhost"
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
    "OMP_NUM_THREADS": "1",
}
PATIENCE_S = 600
STEPS = 20  # of a device in a round: one pass over its images, a twentieth a step


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def replaced(file: Path, changes: dict[str, str]) -> None:
    text = file.read_text()
    for old, new in changes.items():
        assert old in text, f"{file.name} has no {old}"
        text = text.replace(old, new)
    file.write_text(text)


def example(folder: Path, examples: int, rounds: int) -> Path:
    """A copy of the example on ports of its own, set up with its own script."""
    try:
        fashion_mnist()
    except DataError as error:
        pytest.skip(str(error))
    here = folder / "localhost"
    shutil.copytree(EXAMPLE, here, ignore=shutil.ignore_patterns("operator", "identity-*", "data", "run"))
    port = f"127.0.0.1:{free_port()}"
    replaced(
        here / "server.toml",
        {
            "127.0.0.1:8443": port,
            "127.0.0.1:8445": f"127.0.0.1:{free_port()}",
            "rounds = 6": f"rounds = {rounds}",
            "max_examples = 20_000": f"max_examples = {examples}",
            "examples = 60_000": f"examples = {3 * examples}",
            "batch_size = 1000": f"batch_size = {examples // 20}",
        },
    )
    for number in (1, 2, 3):
        replaced(here / f"client-{number}.toml", {"127.0.0.1:8443": port})
    done = subprocess.run(
        [here / "setup.sh", "--examples", str(examples)],
        env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return here


class Process:
    """The server or a device, which can be killed and started again."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.folder = folder
        self.command = [sys.executable, "-m", "mycelia.cli", *arguments, "--format", "json"]
        self.log, self.out = folder / f"{name}.log", folder / f"{name}.json"
        self.log.touch()
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log, self.out.open("w") as out:
            self.running = subprocess.Popen(
                self.command, cwd=self.folder, env=ENVIRONMENT, stdout=out, stderr=log
            )

    def kill(self) -> None:
        self.running.send_signal(signal.SIGKILL)
        assert self.running.wait(60) == -signal.SIGKILL, self.log.read_text()

    def published(self, rounds: int) -> None:
        """Wait until the server has published so many."""
        until = time.monotonic() + PATIENCE_S
        while self.log.read_text().count('"event":"round_published"') < rounds:
            assert self.running.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.05)


@contextmanager
def federation(here: Path) -> Iterator[list[Process]]:
    found: list[Process] = []
    try:
        found.append(Process(here, "server", "serve", "--config", "server.toml"))
        for number in (1, 2, 3):
            arguments = ("client", "--config", f"client-{number}.toml", "--once")
            found.append(Process(here, f"device-{number}", *arguments))
        yield found
    finally:
        for process in found:
            process.running.kill()
            process.running.wait(60)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_server_and_devices_are_killed_in_turn(tmp_path: Path) -> None:
    rounds = 5  # one after each of those that are killed, and the first
    here = example(tmp_path, examples=400, rounds=rounds)
    with federation(here) as processes:
        for done, victim in enumerate(processes, 1):
            processes[0].published(done)
            victim.kill()
            victim.start()
        for process in processes:
            assert process.running.wait(PATIENCE_S) == 0, process.log.read_text()
        found = json.loads(processes[0].out.read_text())
    assert found["rounds"] == rounds
    assert found["accepted"] == 3 * rounds
    assert found["secure_sum"]
    states = {number: here / f"identity-{number}" / "state" for number in (1, 2, 3)}
    models = {(state / "model" / "model.safetensors").read_bytes() for state in states.values()}
    assert len(models) == 1, "all devices get the same model"
    for number, state in states.items():
        ledger = Ledger.load(state / "runs" / "clothes" / "ledgers" / f"{number - 1}.jsonl")
        assert ledger.steps == rounds * STEPS, "what was sent twice counts once"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3600)
def test_the_whole_example_reaches_what_its_page_says(tmp_path: Path) -> None:
    here = example(tmp_path, examples=20_000, rounds=6)
    done = subprocess.run(
        [here / "run.sh", "--format", "json"],
        env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["test_accuracy"] >= 0.81
