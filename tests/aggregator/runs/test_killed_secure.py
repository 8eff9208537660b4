"""kill -9 beside each record of a secure run, and the same command again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.aggregator.runs.conftest import People
from tests.aggregator.runs.killed_server import Kill
from tests.aggregator.runs.run_world import expected_secure, plan
from tests.aggregator.runs.secure_world import SecureDummy
from tests.aggregator.runs.test_killed_plain import _id, killed

SETTINGS: dict[str, Any] = {
    "secure_sum": {"threat": "passive", "corrupt": 0.0, "dropout": 0.2}, "update": {"max_weight": 1.0},
}  # fmt: skip
KINDS = (
    "OPEN", "ISSUED", "SA1/CONFIG", "SA1/ADVERT", "SA1/U0", "SA1/SHARES", "SA1/U1", "SA1/RECEIPT",
    "SA1/SNAPSHOT", "SA1/U2", "SA1/AGREE", "SA1/CHARGED", "SA1/RESULT", "MERGED", "PUBLISHED",
)  # fmt: skip
FAST = [
    Kill("SA1/CONFIG"), Kill("SA1/SHARES", 4), Kill("SA1/RECEIPT"), Kill("SA1/U2"), Kill("SA1/CHARGED", 2),
    Kill("SA1/RESULT"),
]  # fmt: skip
_MANY = ("SA1/ADVERT", "SA1/SHARES", "SA1/RECEIPT", "SA1/AGREE")
ALL = [
    Kill(kind, nth, before)
    for kind in KINDS
    for nth in ((2, 6) if kind in _MANY else (1, 2))
    for before in (False, True)
]


def check(result: dict[str, Any], found: dict[str, Any], devices: list[SecureDummy]) -> None:
    assert result["model_sha256"] == expected_secure(plan(**SETTINGS), [(1, 2, 3)] * 2)
    assert (result["rounds"], result["accepted"], result["failed_rounds"]) == (2, 6, 0)
    assert found["kinds"]["OPEN"] == found["kinds"]["PUBLISHED"] == 2
    for attempt in range(3):
        for kind in ("CONFIG", "U0", "U1", "U2", "CHARGED", "RESULT"):
            assert found["kinds"][f"SA1/{attempt}/{kind}"] == (0 if attempt else 2)
    assert found["statuses"] == {"ACCEPTED": 6}
    for device in devices:
        assert len(device.sums) <= 2
        assert not device.errors


@pytest.mark.parametrize("kill", FAST, ids=_id)
def test_the_model_is_that_of_an_undisturbed_run(people: People, tmp_path: Path, kill: Kill) -> None:
    check(*killed(people, tmp_path, kill, device=SecureDummy, **SETTINGS))


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill for kill in ALL if kill not in FAST], ids=_id)
def test_any_record(people: People, tmp_path: Path, kill: Kill) -> None:
    check(*killed(people, tmp_path, kill, device=SecureDummy, **SETTINGS))


@pytest.mark.parametrize("kind", ["SA1/SHARES", "SA1/RESULT"])
def test_roster_renewed_while_the_server_is_away(people: People, tmp_path: Path, kind: str) -> None:
    """A session is about the roster it began with: an open one gives way, one that ended counts."""
    result, found, _ = killed(people, tmp_path, Kill(kind), device=SecureDummy, new_roster=True, **SETTINGS)
    assert result["model_sha256"] == expected_secure(plan(**SETTINGS), [(1, 2, 3)] * 2)
    assert (result["rounds"], result["accepted"], result["failed_rounds"]) == (2, 6, 0)
    again = kind == "SA1/SHARES"
    assert found["kinds"]["SA1/1/CONFIG"] == again
    assert found["statuses"] == {"ACCEPTED": 6} | ({"LATE": 3} if again else {})
