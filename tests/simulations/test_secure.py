"""Federations whose updates are summed under masks: the same model without masks, and none without a sum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mycelia.engine.errors import ConfigError, RoundAborted
from mycelia.engine.events import CheckpointSaved, Event, Outcomes, Round, SecureSum, WarningRaised
from mycelia.engine.run import Run
from mycelia.simulations import SimulationResult, load_scenario, resume, simulate
from tests.simulations.private_runs import WORKERS, Stop

pytestmark = pytest.mark.usefixtures("captured_once")

COHORT, N_MIN = 12, 9
STEP = 2.0**-16
NORMED = "tests.simulations.plugins:normed"
BLOCK: dict[str, Any] = {"dropout": 0.3}


def settings(**changes: Any) -> dict[str, Any]:
    """Two rounds of twelve of 24 clients on digits, in this process, of whom three vanish."""
    return {
        "model": {"name": "mlp", "hidden": [8]},
        "data": "digits",
        "rounds": 2,
        "cohort": COHORT,
        "population": {"clients": 24},
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "local": {"epochs": 1, "batch_size": 10, "lr": 0.1},
        "round": {"quorum": 0.7},
        "behaviour": {"dropout": 0.25},
        "backend": "inline",
        "plan": "eager",  # a trace of the step takes longer than these runs
        "evaluation": {"every": 0, "clients": 0},
        "secure_sum": BLOCK,
    } | changes


def run(path: Path, seen: list[Event] | None = None, **given: Any) -> SimulationResult:
    return simulate(settings(**given), out=path, listeners=[] if seen is None else [seen.append])


def masks(on: bool, **more: Any) -> dict[str, Any]:
    return {"secure_sum": BLOCK | {"masks": on} | more}


def sums(seen: list[Event]) -> list[SecureSum]:
    return [event for event in seen if isinstance(event, SecureSum)]


def vector(path: Path) -> torch.Tensor:
    return Run.open(path).load_checkpoint().tensors["vector"]


ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg, uniform": {"algorithm": {"name": "fedavg", "weighting": "uniform"}},
    "fedavg, batch norm": {"model": NORMED},
    "fedavg, rotated": {"secure_sum": BLOCK | {"rotate": True}},
    "fedsgd": {"algorithm": "fedsgd"},
    "fedadam": {"algorithm": "fedadam"},
    "fedprox": {"algorithm": {"name": "fedprox", "adaptive": True, "weighting": "uniform"}},
    "fednova": {"algorithm": "fednova"},
    "scaffold": {"algorithm": "scaffold"},
    "fedbn": {"algorithm": "fedbn", "model": NORMED},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masks_change_nothing_but_what_is_seen(tmp_path: Path, name: str) -> None:
    given = settings(**ALGORITHMS[name])
    found = []
    for on in (True, False):
        block = given["secure_sum"] | {"masks": on}
        seen: list[Event] = []
        found.append(simulate(given | {"secure_sum": block}, out=tmp_path / str(on), listeners=[seen.append]))
        assert [event.masked for event in sums(seen)] == [on, on]
        assert all(bool(event.transcript_sha256) == on for event in sums(seen))
    assert found[0].model_sha256 == found[1].model_sha256
    assert (found[0].failed_rounds, found[0].test_loss) == (0, found[1].test_loss)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedavg, uniform", "fedavg, rotated", "fedsgd", "fedprox", "fednova"]
)
def test_the_weighted_mean_is_that_of_the_updates_but_for_a_step(tmp_path: Path, name: str) -> None:
    """Against the ordinary sum of the same updates, which knows nothing of steps and slots."""
    given = settings(**ALGORITHMS[name]) | {"rounds": 1, "behaviour": {}}
    wide = given["secure_sum"] | {"masks": False, "value_bound": 2**18}  # nothing is cut off
    simulate(given | {"secure_sum": wide}, out=tmp_path / "secure")
    simulate({k: v for k, v in given.items() if k != "secure_sum"}, out=tmp_path / "plain")
    away = (vector(tmp_path / "secure") - vector(tmp_path / "plain")).abs().max()
    # FedNova's mean is of a step's direction, and is multiplied by the steps: at most 13 with these clients
    assert 0 < away < STEP * (13 if name == "fednova" else 1.001)


def test_the_report_of_the_cohort_is_opened_and_nobodys_own(tmp_path: Path) -> None:
    seen: list[Event] = []
    plain: list[Event] = []
    run(tmp_path / "secure", seen, behaviour={}, rounds=1)
    given = settings(behaviour={}, rounds=1)
    del given["secure_sum"]
    simulate(given, out=tmp_path / "plain", listeners=[plain.append])
    (one,), (other,) = ([e for e in each if isinstance(e, Round)] for each in (seen, plain))
    assert one.counts["examples"] == other.counts["examples"]
    assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=0.01)
    (event,) = sums(seen)
    assert (event.asked, event.survivors, event.n_min, event.attempts) == (COHORT, COHORT, N_MIN, 1)
    assert event.clipped == 0
    assert event.bytes_up > COHORT * event.upload_bytes
    assert one.bytes_up == event.bytes_up


def test_workers_make_the_same_model(tmp_path: Path) -> None:
    whole = run(tmp_path / "inline")
    spread = run(tmp_path / "workers", backend=WORKERS)
    assert spread.model_sha256 == whole.model_sha256
    assert spread.bytes_up == whole.bytes_up


def test_a_run_that_was_stopped_ends_with_the_same_model(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", rounds=4)
    with pytest.raises(KeyboardInterrupt):
        simulate(settings(rounds=4), out=tmp_path / "stopped", listeners=[Stop(2)])
    assert resume(tmp_path / "stopped").model_sha256 == whole.model_sha256


@pytest.mark.parametrize(
    ("phase", "protocol", "counts"),
    [
        ("configure", "advertise", False), ("sharing", "share", False), ("train", "masked", False),
        ("upload", "masked", False), ("agree", "agree", True), ("unmask", "unmask", True),
    ],
)  # fmt: skip
def test_dropouts_in_each_phase(tmp_path: Path, phase: str, protocol: str, counts: bool) -> None:
    """Those who vanish behind their upload are in the sum; all others are not."""
    found = []
    for on in (True, False):
        seen: list[Event] = []
        given = {"behaviour": {"dropout": {phase: 0.12}}, "rounds": 3} | masks(on)
        found.append(run(tmp_path / f"{on}", seen, **given))
        assert any(event.dropped for event in sums(seen))
        for event, outcomes in zip(sums(seen), (e for e in seen if isinstance(e, Outcomes)), strict=True):
            assert set(event.dropped) <= {protocol}
            lost = event.dropped.get(protocol, 0)
            assert event.survivors == COHORT - (0 if counts else lost)
            assert sum(o.status == "accepted" for o in outcomes.clients) == event.survivors
    assert found[0].model_sha256 == found[1].model_sha256


def test_a_share_of_the_cohort_drops_out_in_every_phase(tmp_path: Path) -> None:
    seen: list[Event] = []
    run(tmp_path / "run", seen, rounds=4)
    phases = {phase for event in sums(seen) for phase in event.dropped}
    assert phases == {"advertise", "share", "masked", "agree", "unmask"}
    assert all(sum(event.dropped.values()) == 3 for event in sums(seen))


def test_too_few_survivors_leave_the_model_as_it_was(tmp_path: Path) -> None:
    seen: list[Event] = []
    given = {"behaviour": {"dropout": {"train": 0.25}}, "rounds": 6, "seed": 1} | masks(True)
    found = run(tmp_path / "run", seen, **given)
    assert 0 < found.failed_rounds < 6
    failed = [event for event in sums(seen) if event.failed]
    assert len(failed) == found.failed_rounds
    for event in failed:
        assert (event.failed, event.survivors, event.transcript_sha256) == ("below_quorum", 0, "")
        assert COHORT - event.dropped["masked"] < N_MIN
        assert event.dropped["masked"] < COHORT


def test_a_sum_that_too_few_open_is_a_failed_round(tmp_path: Path) -> None:
    """All uploads come. A secret takes 8 of the 11 others' shares, so that 9 of 12 have to stay."""
    seen: list[Event] = []
    models = []

    def look(event: Event) -> None:
        seen.append(event)
        if isinstance(event, CheckpointSaved):
            models.append(vector(tmp_path / "run"))

    given = settings(behaviour={"dropout": {"unmask": 0.3}}, rounds=6)
    found = simulate(given, out=tmp_path / "run", listeners=[look])
    assert 0 < found.failed_rounds < 6
    for event, before, after in zip(sums(seen), models, models[1:], strict=False):
        short = event.dropped.get("unmask", 0) > 3
        assert event.failed == ("UNMASK_SHORT" if short else "")
        assert event.survivors == (0 if short else COHORT)
        assert torch.equal(before, after) == short
    warned = [event.message for event in seen if isinstance(event, WarningRaised)]
    assert len(warned) == found.failed_rounds
    assert all("secure sum" in message and "UNMASK_SHORT" in message for message in warned)


def test_a_second_attempt_goes_on_without_those_who_vanished(tmp_path: Path) -> None:
    """Six suffice. With four of twelve gone nobody has the 8 holders that t asks for; among 8, 5 will do."""
    found, rounds = [], []
    for on in (True, False):
        seen: list[Event] = []
        given = {"behaviour": {"dropout": {"train": 0.3}}, "round": {"quorum": 0.5}, "rounds": 5}
        found.append(run(tmp_path / f"{on}", seen, **given | masks(on, dropout=0.1)))
        rounds.append(sums(seen))
    for event in rounds[0]:
        assert event.attempts == (0 if event.survivors == 0 else 1 if event.survivors > 8 else 2)
    assert 2 in {event.attempts for event in rounds[0]}
    assert [e.survivors for e in rounds[0]] == [e.survivors for e in rounds[1]]
    assert found[0].model_sha256 == found[1].model_sha256


def test_what_is_written_is_of_the_cohort_alone(tmp_path: Path) -> None:
    """Counts, sizes, times, settings and one hash: nothing that a key, a seed or an update could stand in."""
    run(tmp_path / "run")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    found = [event for event in events if event["kind"] == "secure_sum"]
    assert len(found) == 2
    for event in found:
        texts = {
            value for part in (event, event["settings"]) for value in part.values() if isinstance(value, str)
        }
        assert texts <= {"secure_sum", "active", "", event["transcript_sha256"]}
        for name in ("dropped", "faults", "phase_ms"):
            assert all(isinstance(value, int | float) for value in event[name].values())


@pytest.mark.parametrize("how", ["nan", "raise", "zero weight"])
def test_a_client_that_fails_is_named_and_not_in_the_sum(tmp_path: Path, how: str) -> None:
    found = []
    for on in (True, False):
        seen: list[Event] = []
        odd = {"name": "tests.simulations.plugins:Odd", "how": how, "every": 6}
        found.append(run(tmp_path / f"{on}", seen, algorithm=odd, behaviour={}, rounds=2, **masks(on)))
        outcomes = [event for event in seen if isinstance(event, Outcomes)]
        for event, round in zip(sums(seen), outcomes, strict=True):
            lost = {int(each.client) for each in round.clients if each.status in ("failed", "rejected")}
            assert all(client % 6 == 0 for client in lost)
            assert event.survivors == COHORT - len(lost)
            assert event.dropped == ({"masked": len(lost)} if lost else {})
        assert any(event.dropped for event in sums(seen))
    assert found[0].model_sha256 == found[1].model_sha256


# Settings


def test_a_sum_that_could_overflow_is_refused_with_the_bits_it_needs(tmp_path: Path) -> None:
    needed = 1 + (COHORT * 40 * (2**15 + 1)).bit_length()
    with pytest.raises(ConfigError, match=f"needs {needed} bits and has {needed - 1}"):
        run(tmp_path / "run", secure_sum=BLOCK | {"weight_max": 40, "bits": needed - 1})
    assert not (tmp_path / "run").exists()
    exact = {"weight_max": 200, "bits": 1 + (COHORT * 200 * (2**15 + 1)).bit_length()}
    assert run(tmp_path / "fits", rounds=1, secure_sum=BLOCK | exact).failed_rounds == 0


def test_too_few_neighbours_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="WEAK_PARAMETERS"):
        run(tmp_path / "run", secure_sum=BLOCK | {"neighbours": 4, "threshold": 3})


def test_a_client_above_the_largest_weight_is_named(tmp_path: Path) -> None:
    """By its id and the rule; its weight stays hidden."""
    with pytest.raises(RoundAborted, match=r"a weight out of range; raise secure_sum\.weight_max"):
        run(tmp_path / "run", rounds=1, secure_sum=BLOCK | {"weight_max": 3})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"secure_sum": BLOCK | {"n_min": 5}}, "n_min: follows from round.quorum"),
        ({"secure_sum": BLOCK | {"n_max": 50}}, "n_max: follows from cohort"),
        ({"secure_sum": BLOCK | {"noise": {"mechanism": "skellam", "variance": 9, "corrupt": 0}}}, "privacy"),
        ({"secure_sum": BLOCK | {"mask": False}}, "did you mean 'masks'"),
        ({"secure_sum": BLOCK | {"masks": "no"}}, "masks"),
        ({"secure_sum": BLOCK | {"threat": ""}}, "threat = ''"),
        ({"secure_sum": BLOCK | {"weight_max": 7}, "update": {"max_weight": 9.0}}, "contradicts update"),
        ({"selector": "poisson"}, "selector: poisson draws a cohort of no fixed size"),
        ({"round": {"quorum": 0.15}}, "a sum of fewer than 3 hides nobody"),
        ({"round": {"quorum": 0.7, "on_failure": "retry"}}, "shares its keys before it trains"),
        ({"round": {"quorum": 0.7, "stragglers": "next_round"}}, "worth nothing in another round"),
        ({"algorithm": "centralised"}, "the algorithm centralised"),
        ({"algorithm": "local-only"}, "no model is shared"),
        ({"algorithm": "tests.simulations.plugins:Median"}, "the algorithm median"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_phases_of_a_secure_sum_need_one(tmp_path: Path) -> None:
    given = settings(behaviour={"dropout": {"agree": 0.1}})
    del given["secure_sum"]
    with pytest.raises(ConfigError, match="phases of a secure sum"):
        simulate(given, out=tmp_path / "run")


def test_more_are_asked_than_needed(tmp_path: Path) -> None:
    """Those the round does not wait for are asked, and not in the sum."""
    seen: list[Event] = []
    changes = {"round": {"quorum": 0.7, "over_select": 1.25}, "behaviour": {}, "rounds": 1}
    found = [run(tmp_path / f"{on}", seen, **changes | masks(on)) for on in (True, False)]
    assert found[0].model_sha256 == found[1].model_sha256
    assert {(event.asked, event.survivors) for event in sums(seen)} == {(15, COHORT)}


def test_the_scenario(tmp_path: Path) -> None:
    found = []
    for on in ("true", "false"):
        changes = ["rounds=2", "backend=inline", "evaluation.every=0", f"secure_sum.masks={on}"]
        seen: list[Event] = []
        scenario = load_scenario("secure", changes)
        found.append(simulate(scenario, out=tmp_path / on, listeners=[seen.append]))
        for event in sums(seen):
            assert (event.asked, event.survivors, event.n_min) == (30, 26, 21)
            assert event.dropped == {"advertise": 1, "share": 1, "masked": 2, "agree": 1, "unmask": 1}
    assert found[0].model_sha256 == found[1].model_sha256
