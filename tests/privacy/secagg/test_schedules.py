"""Long schedules: dropouts inside the limits are always exact, and no stop gives a wrong sum."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mycelia.engine.rng import generator
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.messages import PHASES, Reason
from mycelia.simulations.secure_sum_journals import FileJournals
from mycelia.simulations.secure_sums import SecureSumAborted, SecureSumResult
from tests.privacy.secagg.sums import run_sum

N, D = 7, 5
VECTORS = np.random.default_rng(2).integers(-(2**15), 2**15, (N, D))
SETTINGS = SecureSumConfig(n_min=5, corrupt=0.1, dropout=0.2)
SMALL = SecureSumConfig(n_min=4, corrupt=0.1, dropout=0.2)
"""Of five clients, t = 3 of four neighbours: one may be missing."""
PLACES = (*PHASES, "masked:partial", "masked:late")
LOST = ("advertise", "share", "masked", "masked:partial", "masked:late")


def plain(survivors: tuple[int, ...]) -> list[int]:
    total: list[int] = VECTORS[[client - 1 for client in survivors]].sum(axis=0).tolist()
    return total


def schedules(count: int) -> Iterator[tuple[int, dict[int, str], str | int]]:
    """Seed, dropouts and order of answers."""
    for number in range(count):
        rng = generator(number, "schedule")
        drops = {int(rng.integers(1, 6)): str(rng.choice(PLACES))} if rng.random() < 0.9 else {}
        yield number, drops, ("sorted", "reversed", number)[number % 3]


@pytest.mark.parametrize("count", [40, pytest.param(10_000, marks=pytest.mark.slow)])
def test_dropouts_within_the_limits_are_exact(count: int) -> None:
    for _, drops, order in schedules(count):
        found = run_sum(vectors=VECTORS[:5], config=SMALL, drops=drops, order=order)
        assert isinstance(found, SecureSumResult), (drops, order, found)
        assert found.total.tolist() == plain(found.survivors)
        lost = {client for client, phase in drops.items() if phase in LOST}
        assert set(found.survivors) == set(range(1, 6)) - lost


@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_dropouts_are_exact_or_told(count: int) -> None:
    outcomes: dict[str, int] = {}
    for number in range(count):
        rng = generator(number, "any schedule")
        few = rng.choice(np.arange(1, N + 1), int(rng.integers(0, N + 1)), replace=False)
        drops = {int(client): str(rng.choice(PLACES)) for client in few}
        found = run_sum(vectors=VECTORS, config=SETTINGS, drops=drops, order=number, attempts=3)
        if isinstance(found, SecureSumResult):
            assert found.total.tolist() == plain(found.survivors)
            outcomes["exact"] = outcomes.get("exact", 0) + 1
        else:
            assert found.reason in (Reason.COHORT_TOO_SMALL, Reason.UNMASK_SHORT)
            assert found.have is not None
            assert found.need is not None
            assert found.have < found.need
            outcomes[found.reason] = outcomes.get(found.reason, 0) + 1
        assert all(not (b and s) for b, s in found.released.values())
    assert len(outcomes) >= 2


# --- stops ---

RECORDS = 1 + N + 1 + N + 1 + N + 1 + 1 + N + 1 + 1
"""CONFIG, adverts, U0, shares, U1, receipts, SNAPSHOT, U2, agreements, CHARGED, RESULT."""
CLASSES: dict[str, dict[int, str]] = {
    "nobody": {},
    **{phase: {3: phase} for phase in PLACES},
    "two classes": {3: "advertise", 5: "unmask"},
}


def check_stop(folder: Path, place: int, drops: dict[int, str]) -> None:
    journals = FileJournals(folder, range(1, N + 1))
    found = run_sum(journals, VECTORS, SETTINGS, drops=drops, crash={"server": place}, seed=4)
    journals.close()
    assert isinstance(found, SecureSumResult), (place, drops, found)
    assert found.total.tolist() == plain(found.survivors)
    assert len(found.charged) == 1
    straight = run_sum(vectors=VECTORS, config=SETTINGS, drops=drops, seed=4)
    assert isinstance(straight, SecureSumResult)
    assert found.transcript_sha256 == straight.transcript_sha256


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk."""
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("place", range(1, RECORDS + 1, 4))
def test_a_server_that_stops_after_a_record_goes_on(place: int, tmp_path: Path) -> None:
    check_stop(tmp_path, place, CLASSES["masked"])


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", CLASSES)
def test_a_server_may_stop_after_every_record(name: str, tmp_path: Path) -> None:
    for place in range(1, RECORDS + 1):
        folder = tmp_path / str(place)
        folder.mkdir()
        check_stop(folder, place, CLASSES[name])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("when", [None, *(pytest.param(at, marks=pytest.mark.slow) for at in PLACES)])
def test_a_client_that_stops_before_a_message_is_a_dropout(
    phase: str, when: str | None, tmp_path: Path
) -> None:
    drops = {} if when is None else {6: when}
    journals = FileJournals(tmp_path, range(1, N + 1))
    found = run_sum(journals, VECTORS, SETTINGS, drops=drops, crash={2: phase})
    journals.close()
    if isinstance(found, SecureSumResult):
        assert found.total.tolist() == plain(found.survivors)
        assert (2 in found.survivors) == (phase in ("advertise", "agree", "unmask"))
    else:
        assert found.reason in (Reason.COHORT_TOO_SMALL, Reason.UNMASK_SHORT)
        assert when is not None
    assert all(not (b and s) for b, s in found.released.values())


# --- clocks ---


@pytest.mark.parametrize("jump", [1e3, 1e9])
@pytest.mark.parametrize("after", range(8))
def test_a_clock_that_jumps_ends_what_was_open_and_nothing_worse(jump: float, after: int) -> None:
    calls = 0

    def clock() -> float:
        nonlocal calls
        calls += 1
        return float(calls) + (jump if calls > after else 0.0)

    found = run_sum(vectors=VECTORS, config=SETTINGS, clock=clock, drops={4: "masked"})
    if isinstance(found, SecureSumResult):
        assert found.total.tolist() == plain(found.survivors)
    else:
        assert isinstance(found, SecureSumAborted)
        assert found.reason in (Reason.COHORT_TOO_SMALL, Reason.UNMASK_SHORT, Reason.LATE)


def test_a_clock_that_runs_back_holds_nothing_up() -> None:
    times = iter(np.linspace(1e6, 0, 60).tolist())
    found = run_sum(vectors=VECTORS, config=SETTINGS, clock=lambda: next(times), drops={4: "masked"})
    assert isinstance(found, SecureSumResult)
    assert found.total.tolist() == plain(found.survivors)
