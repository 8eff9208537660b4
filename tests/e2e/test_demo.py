"""The two commands of the demo, as a user runs them: in two terminals, in an empty folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mycelia.simulations import load_scenario, simulate
from tests.cli.command_line import mycelia

pytestmark = pytest.mark.e2e


class Terminals:
    """Commands in one folder; what is left at the end is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start(self, *line: str) -> subprocess.Popen[str]:
        with (self.folder / f"{line[0]}-{len(self.started)}.err").open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "mycelia.cli", *line],
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
            )
        self.started.append(process)
        return process

    def serve(self, *more: str) -> subprocess.Popen[str]:
        return self.start("serve", "--demo", "--port", str(self.port), "--format", "json", *more)

    def client(self, *more: str) -> subprocess.Popen[str]:
        return self.start("client", "--demo", "--format", "json", *more)

    def said(self, process: subprocess.Popen[str]) -> str:
        number = self.started.index(process)
        return next(self.folder.glob(f"*-{number}.err")).read_text()

    def wait_for(self, process: subprocess.Popen[str], text: str, seconds: float = 120.0) -> None:
        until = time.monotonic() + seconds
        while text not in self.said(process):
            assert process.poll() is None, self.said(process)
            assert time.monotonic() < until, self.said(process)
            time.sleep(0.05)

    def result(self, process: subprocess.Popen[str], seconds: float = 240.0) -> Any:
        out, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, self.said(process)
        return json.loads(out)


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    made = Terminals(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> str:
    return simulate(load_scenario("demo"), out=tmp_path_factory.mktemp("simulated") / "run").model_sha256


def test_two_commands_end_by_themselves_with_the_simulated_model(
    terminals: Terminals, simulated: str
) -> None:
    devices = terminals.client("--count", "3")
    server = terminals.serve()
    found, reports = terminals.result(server), terminals.result(devices)
    assert found["rounds"] == 5
    assert found["secure_sum"] is True
    assert found["test_accuracy"] >= 0.90
    assert found["accepted"] == 15
    assert found["bytes_up"] > 0
    assert found["model_sha256"] == simulated
    assert [report["accepted"] for report in reports] == [5, 5, 5]
    folder = terminals.folder / "mycelia-demo"
    assert folder.stat().st_mode & 0o777 == 0o700
    for report in reports:
        assert Path(report["delivered"]["demo"]).is_file()
    shown = subprocess.run(
        [sys.executable, "-m", "mycelia.cli", "report", str(folder / "run")], capture_output=True, check=False
    )
    assert shown.returncode == 0, shown.stderr


def test_a_client_that_is_killed_is_waited_for(terminals: Terminals) -> None:
    others = terminals.client("--count", "2")
    one = terminals.client("--first", "3", "--count", "1")
    server = terminals.serve()
    terminals.wait_for(server, "round 2/5")
    one.kill()
    one.wait()
    back = terminals.client("--first", "3", "--count", "1")
    found = terminals.result(server)
    terminals.result(others)
    terminals.result(back)
    assert found["rounds"] == 5
    assert found["test_accuracy"] >= 0.90


def test_a_server_that_is_stopped_in_any_way_goes_on_to_the_same_model(
    terminals: Terminals, simulated: str
) -> None:
    """Ctrl-C, the signal of a service manager, and a kill, in one run."""
    devices = terminals.client("--count", "3")
    server = terminals.serve()
    terminals.wait_for(server, "round 1/5  3 of 3")
    server.send_signal(signal.SIGINT)
    began = time.monotonic()
    server.communicate(timeout=60)
    assert server.returncode == 130
    assert time.monotonic() - began < 30  # the rule is 10 s; the machine may be busy
    again = terminals.serve()
    terminals.wait_for(again, "round 2/5")
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=60)
    assert again.returncode == 0
    killed = terminals.serve()
    terminals.wait_for(killed, "round 3/5")
    killed.kill()
    killed.wait()
    found = terminals.result(terminals.serve())
    terminals.result(devices)
    assert found["rounds"] == 5
    assert found["model_sha256"] == simulated


def test_beside_a_server_that_waits(terminals: Terminals) -> None:
    """Devices are told what would be refused, and a second server that the port is taken."""
    server = terminals.serve()
    terminals.wait_for(server, "waiting for 3 clients")
    second = terminals.serve()
    fine = terminals.result(terminals.client("--count", "1", "--check"))
    assert fine["refused"] == []
    assert [run["run"] for run in fine["runs"]] == ["demo"]
    strict = terminals.client("--count", "1", "--check", "-s", "policy.min_cohort=5")
    out, _ = strict.communicate(timeout=120)
    assert strict.returncode == 1
    assert "min_cohort: asked 3, allowed at least 5" in json.loads(out)["runs"][0]["refused"]
    second.communicate(timeout=120)
    assert second.returncode == 2
    assert "another" in terminals.said(second) or "cannot be bound" in terminals.said(second)
    assert server.poll() is None


@pytest.mark.parametrize("command", ["serve", "client"])
def test_usage(command: str, terminals: Terminals, capsys: pytest.CaptureFixture[str]) -> None:
    process = terminals.start(command)
    process.communicate(timeout=60)
    assert process.returncode == 2, terminals.said(process)
    assert "Traceback" not in terminals.said(process)
    for more in (["--demo", "--config", "x.toml"], ["--config", "none.toml"]):
        done = mycelia(capsys, command, *more)
        assert done.code == 2, done.err
        assert "Traceback" not in done.err
