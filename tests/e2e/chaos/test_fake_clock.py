"""Hundreds of rounds on a clock of numbers, in which everything goes wrong with a share of 30 % each."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from mycelia.aggregator.blobs import Blobs
from mycelia.aggregator.store import Store
from tests.e2e.chaos import fake_secure
from tests.e2e.chaos.fake_plain import World


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk."""
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("policy", ["drop", "retry", "replace"])
@pytest.mark.parametrize("rounds", [14, pytest.param(170, marks=pytest.mark.slow)])
def test_rounds_of_plain_sums(rounds: int, policy: str, tmp_path: Path) -> None:
    with closing(Store.open(f"sqlite:///{tmp_path}/a.db")) as store:
        world = World(store, Blobs(tmp_path / "blobs"), rounds, policy)
        found = Counter(world.play() for _ in range(rounds))
    assert found["published"] >= rounds // 4, found
    assert len(found) >= 2, found
    assert len(set(world.seen)) >= min(3, rounds // 20), world.seen


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("rounds", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_rounds_of_secure_sums(rounds: int, tmp_path: Path) -> None:
    with closing(Store.open(f"sqlite:///{tmp_path}/a.db")) as store:
        world = fake_secure.World(store, Blobs(tmp_path / "blobs"), rounds)
        found = Counter(world.play() for _ in range(rounds))
    assert found["published"] >= rounds // 12, found
    assert len(found) >= 2, found
    assert len(set(world.seen)) >= min(3, rounds // 50), world.seen
