"""Real processes, real TLS, a bad network: the run ends, and its model is that of the devices it names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.chaos.federation import MASKS, Federation
from tests.e2e.chaos.processes import Processes
from tests.e2e.chaos.world import Chaos

pytestmark = pytest.mark.e2e


def test_undisturbed_first(processes: Processes, tmp_path: Path) -> None:
    """The oracle itself: without any chaos it says what the server says."""
    for name, settings in (("plain", {}), ("secure", MASKS)):
        folder = tmp_path / name
        folder.mkdir()
        federation = Federation(folder, devices=4, rounds=2, settings=settings)
        chaos = Chaos(federation, processes, 0, unruly=False, network=False)
        found = asyncio.run(chaos.run(40))
        left = chaos.check(found)
        assert left.survivors == [(1, 2, 3, 4)] * 2
        assert found["model_sha256"] == federation.undisturbed
