"""The report's block about secure sums: what was guarded against, who vanished, and what had no sum."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from mycelia.engine import events as e
from mycelia.engine.report import Report, build_report
from mycelia.engine.run import Run
from tests.engine.run_factory import result, started, write_run

SETTINGS: dict[str, Any] = {
    "threat": "active", "neighbours": 29, "threshold": 20, "n_max": 30, "bits": 28, "dimension": 4810,
    "frac_bits": 16, "value_bound": 32768, "weight_max": 70, "rotate": False, "noise": None,
}  # fmt: skip
OPENED = {
    "attempts": 1, "survivors": 26, "bytes_up": 600_000, "bytes_down": 400_000, "upload_bytes": 17_101,
    "share_bytes": 3_712, "transcript_sha256": "ab" * 32, "clipped": 0.004,
    "dropped": {"share": 1, "masked": 2}, "faults": {"LATE": 1}, "phase_ms": {"share": 200.0},
}  # fmt: skip


def report(path: Path, **changes: Any) -> Report:
    common = {"asked": 30, "n_min": 21, "settings": SETTINGS} | changes
    log: list[e.Event] = [
        started(),
        e.SecureSum(round=1, **common, **OPENED),
        e.SecureSum(round=2, **common, **OPENED | {"attempts": 2}),
        e.SecureSum(round=3, **common, failed="UNMASK_SHORT", attempts=1, dropped={"unmask": 12}),
        e.RunFinished(result(3)),
    ]
    return build_report(Run.open(write_run(path, log)))


def text(made: Report) -> str:
    html = made.html.read_text(encoding="utf-8")
    section = html[html.index('id="secure_sum"') :].partition("<section")[0]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", section)).split())


def test_settings_dropouts_and_faults_are_there(tmp_path: Path) -> None:
    said = text(report(tmp_path / "run"))
    for part in (
        "2 sums were opened; 1 round ended without one", "The server saw the sum of each, and no update",
        "a server that lies", "Bits of an element 28", "Coordinates cut off 0.4 %", "vanished in share 2",
        "vanished in masked 4", "vanished in unmask 12", "refused or left: LATE 2",
        "rounds without a sum: UNMASK_SHORT 1", "share 200 ms", "from the run's seed",
    ):  # fmt: skip
        assert part in said


def test_without_masks_it_says_so(tmp_path: Path) -> None:
    said = text(report(tmp_path / "run", masked=False))
    assert "There were no masks" in said
    assert "seed" not in said


def test_facts(tmp_path: Path) -> None:
    facts = json.loads(report(tmp_path / "run").json.read_text())["secure_sum"]
    assert (facts["opened"], facts["failed"]) == (2, {"UNMASK_SHORT": 1})
    assert (facts["asked"], facts["survivors"], facts["bytes_up"]) == (90, 52, 1_200_000)
    assert facts["attempts"] == {"1": 1, "2": 1}
    assert facts["clipped"] == pytest.approx(0.004)
    assert facts["settings"] == SETTINGS | {"n_min": 21}


def test_other_runs_have_no_block(tmp_path: Path) -> None:
    made = build_report(Run.open(write_run(tmp_path / "run", [started(), e.RunFinished(result(0))])))
    assert 'id="secure_sum"' not in made.html.read_text(encoding="utf-8")
