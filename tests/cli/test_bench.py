"""`mycelia bench secagg`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mycelia.simulations import secure_sum_bench
from mycelia.simulations.secure_sum_bench import Kernel, SecureSumBench
from tests.cli.command_line import mycelia

Capture = pytest.CaptureFixture[str]

NAMED = {
    "client_ms", "server_ms", "upload_bytes", "share_bytes", "exact", "clients", "dim", "neighbours",
    "threshold", "peak_bytes", "dropped", "ring_bits", "security", "kernel", "client_over_limit",
    "server_over_limit", "machine",
}  # fmt: skip
SUM = ("--clients", 20, "--dim", 1000, "--neighbours", 10, "--threshold", 6)


def test_json(capsys: Capture) -> None:
    done = mycelia(capsys, "bench", "secagg", *SUM, "--dropout", 0.1, "--repeat", 1, "--format", "json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found.keys() >= NAMED
    assert (found["exact"], found["dropped"], found["ring_bits"]) == (True, 2, 32)
    # a vector of 4 bytes an entry, and a header that does not grow with it
    assert 4 * 1000 < found["upload_bytes"] < 4 * 1000 + 400
    # sealed shares of 88 bytes and two tags of 16 for each of ten neighbours
    assert 10 * 120 < found["share_bytes"] < 10 * 120 + 300
    assert found["security"] == {"passive": True, "active": False}
    assert min(found["client_ms"], found["server_ms"], *found["kernel"].values()) > 0
    assert min(found["client_over_limit"], found["server_over_limit"]) > 0


def test_narrow_elements_and_text(capsys: Capture) -> None:
    done = mycelia(capsys, "bench", "secagg", *SUM, "--bits", 24, "--repeat", 1)
    assert done.code == 0, done.err
    assert "exact" in done.out
    assert "safe against" in done.out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--threshold", 4), "2t > k"),
        (("--bits", 12), "bits"),
        (("--threat", "active"), "too weak"),
        (("--dropout", 1.0), "from 0 to below 1"),
        (("--clients", 2), "at least 3"),
        (("--repeat", 0), "at least 1"),
    ],
)
def test_settings_that_no_sum_can_have(capsys: Capture, changed: tuple[object, ...], message: str) -> None:
    done = mycelia(capsys, "bench", "secagg", *SUM, *changed)
    assert done.code == 2
    assert message in done.err
    assert done.out == ""


def test_a_wrong_sum_is_told(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = secure_sum_bench.measure
    monkeypatch.setattr(secure_sum_bench, "measure", lambda bench: real(bench) | {"exact": False})
    done = mycelia(capsys, "bench", "secagg", *SUM, "--repeat", 1)
    assert done.code == 3
    assert "not the sum" in done.err


def test_a_peer_that_is_not_there(capsys: Capture, tmp_path: Path) -> None:
    peer = (*SUM, "--against", "flwr", "--peer-python")
    done = mycelia(capsys, "bench", "secagg", *peer, tmp_path / "absent")
    assert (done.code, "cannot be run" in done.err) == (2, True)
    bare = tmp_path / "bare"  # an interpreter without packages
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = mycelia(capsys, "bench", "secagg", *peer, bare)
    assert (done.code, "has no Flower" in done.err) == (2, True)


def test_ratios_to_a_peer(capsys: Capture, tmp_path: Path) -> None:
    figures = {
        "client_ms": 1e6,
        "server_ms": 1e7,
        "upload_bytes": 10**6,
        "share_bytes": 10**5,
        "peak_bytes": 10**9,
        "version": "1",
    }
    peer = tmp_path / "peer"
    peer.write_text(f"#!/bin/sh\necho '{json.dumps(figures)}'\n")
    peer.chmod(0o755)
    asked = ("--against", "flwr", "--peer-python", peer, "--repeat", 1, "--format", "json")
    done = mycelia(capsys, "bench", "secagg", *SUM, *asked)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["peer"] == figures
    names = {
        "client": "client_ms",
        "server": "server_ms",
        "upload": "upload_bytes",
        "share": "share_bytes",
        "memory": "peak_bytes",
    }
    for key, name in names.items():
        if key != "memory" or found[name]:  # nothing where the tests before took more
            assert found["ratio"][key] == pytest.approx(figures[name] / found[name])  # type: ignore[operator]


def test_limits_follow_the_formulas() -> None:
    """Rates of one word or call a second leave plain counts."""
    bench = SecureSumBench(clients=100, dim=1000, neighbours=50, threshold=26, dropout=0.1)
    kernel = Kernel(words_per_second=1.0, adds_per_second=1.0, agree_us=1e6, verify_us=1e6, shamir_ms=1e3)
    assert kernel.client_ms(bench) == pytest.approx(1e3 * (51 * 1000 + 2 * 50 + 50 + 26))
    masks = 90 + 10 * 45  # one for each survivor, and those between who vanished and who did not
    assert kernel.server_ms(bench) == pytest.approx(1e3 * ((masks + 90) * 1000 + 10 * 50 + 4 * 100 + 1))


def test_who_vanishes_is_drawn_once() -> None:
    bench = SecureSumBench(clients=50, dim=1, neighbours=10, threshold=6, dropout=0.25, seed=3)
    assert len(set(bench.dropped)) == 12  # round(12.5) to even
    assert min(bench.dropped) >= 1
    assert max(bench.dropped) <= 50
    again = SecureSumBench(clients=50, dim=1, neighbours=10, threshold=6, dropout=0.25, seed=3)
    assert bench.dropped == again.dropped
