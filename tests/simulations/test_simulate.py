"""Whole simulations on real data: determinism, failures, resume, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mycelia.engine.errors import CaptureError, ConfigError, DataError, MyceliaError, RoundAborted
from mycelia.engine.events import Event, Outcomes, Round
from mycelia.engine.run import Run
from mycelia.simulations import Scenario, SimulationResult, resume, simulate
from tests.small_disk import fill, small_disk

pytestmark = pytest.mark.usefixtures("captured_once")

PLUGINS = "tests.simulations.plugins"


def scenario(**changes: Any) -> Scenario:
    """Three rounds of five clients on digits, in this process."""
    settings: dict[str, Any] = {
        "model": "mlp",
        "data": "digits",
        "rounds": 3,
        "cohort": 5,
        "population": {"clients": 20},
        "partition": {"name": "dirichlet", "alpha": 0.5, "min_size": 3},
        "local": {"epochs": 1, "batch_size": 10, "lr": 0.1},
        "backend": "inline",
        "plan": "eager",  # a trace of the step takes longer than these runs
    }
    return Scenario.model_validate(settings | changes)


def run(tmp_path: Path, name: str = "run", **changes: Any) -> SimulationResult:
    return simulate(scenario(**changes), out=tmp_path / name)


def outcomes(path: Path) -> list[tuple[int, Any]]:
    found = Run.open(path).events({"outcomes"})
    return [
        (event.round, outcome) for event in found if isinstance(event, Outcomes) for outcome in event.clients
    ]


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedbn", "fednova", "fedadam"])
def test_same_hash_inline_and_with_any_number_of_workers(tmp_path: Path, algorithm: str) -> None:
    model = {"name": f"{PLUGINS}:normed"} if algorithm == "fedbn" else "mlp"
    workers = [1, 2, 4] if algorithm == "fedavg" else [2]
    settings: dict[str, Any] = {"algorithm": algorithm, "model": model}
    settings["plan"] = "interpreter" if algorithm == "scaffold" else "eager"
    reference = run(tmp_path, "inline", **settings)
    for count in workers:
        backend = {"name": "workers", "workers": count}
        found = run(tmp_path, f"workers-{count}", backend=backend, **settings)
        assert found.model_sha256 == reference.model_sha256, count
        assert found.test_accuracy == reference.test_accuracy
        assert found.worst_decile_accuracy == reference.worst_decile_accuracy
        assert found.workers == count


def test_two_runs_in_one_process_do_not_share_state(tmp_path: Path) -> None:
    first = run(tmp_path, "a", model=f"{PLUGINS}:normed")
    between = run(tmp_path, "b", seed=1, model=f"{PLUGINS}:normed")
    again = run(tmp_path, "c", model=f"{PLUGINS}:normed")
    assert first.model_sha256 == again.model_sha256 != between.model_sha256


def test_learns_and_reports(tmp_path: Path) -> None:
    seen: list[Event] = []
    found = simulate(
        scenario(rounds=8, cohort=10, partition="iid", local={"epochs": 5, "lr": 0.1}),
        out=tmp_path / "run",
        listeners=[seen.append],
    )
    assert found.test_accuracy is not None
    assert found.test_accuracy > 0.85
    assert found.worst_decile_accuracy is not None
    assert 0.3 < found.worst_decile_accuracy <= found.test_accuracy + 0.05
    assert found.rounds == 8
    assert {event.kind for event in seen} >= {"run_started", "partition", "round", "evaluation", "spread"}
    rounds = [event for event in seen if isinstance(event, Round)]
    assert all(event.counts["survivors"] == 10 for event in rounds)
    # 85,210 float32 parameters down to ten clients and up again, every round
    parameters = 64 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10
    assert found.bytes_down == found.bytes_up == 8 * 10 * 4 * parameters
    assert json.loads(json.dumps(found.to_json()))["epsilon"] is None


@pytest.mark.parametrize("rounds_before", [1, 2])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", f"{PLUGINS}:Counting", "fedadam"])
def test_resume_ends_with_the_hash_of_the_uninterrupted_run(
    tmp_path: Path, algorithm: str, rounds_before: int
) -> None:
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "plan": "interpreter" if algorithm == "scaffold" else "eager",
        "model": f"{PLUGINS}:normed",
        "cohort": 10,
        "behaviour": {"dropout": 0.2, "speed": {"steps_per_s": 5.0, "sigma": 0.5}},
        "round": {"stragglers": "next_round", "over_select": 1.2, "quorum": 0.3},
    }
    whole = run(tmp_path, "whole", **settings)

    class Stop(Exception):
        pass

    def stop(event: Event) -> None:
        if event.kind == "checkpoint" and getattr(event, "step", 0) == rounds_before:
            raise Stop

    with pytest.raises(Stop):
        simulate(scenario(**settings), out=tmp_path / "part", listeners=[stop])
    found = resume(tmp_path / "part")
    assert found.model_sha256 == whole.model_sha256
    assert found.bytes_up == whole.bytes_up
    assert found.simulated_seconds == whole.simulated_seconds


def test_one_failing_client_does_not_stop_a_tolerant_round(tmp_path: Path) -> None:
    algorithm = {"name": f"{PLUGINS}:Odd", "how": "raise", "every": 7}
    found = run(tmp_path, algorithm=algorithm, cohort=20, round={"quorum": 0.5})
    assert found.failed_rounds == 0
    failed = [outcome for _, outcome in outcomes(tmp_path / "run") if outcome.status == "failed"]
    assert {outcome.client for outcome in failed} == {0, 7, 14}
    assert all(f"no battery left on device {outcome.client}" in outcome.cause for outcome in failed)


@pytest.mark.parametrize("backend", ["inline", "workers"])
def test_all_clients_failing_raises_with_each_traceback(tmp_path: Path, backend: str) -> None:
    algorithm = {"name": f"{PLUGINS}:Odd", "how": "raise"}
    with pytest.raises(RoundAborted) as raised:
        run(tmp_path, algorithm=algorithm, backend=backend)
    text = str(raised.value)
    assert "all failed" in text
    failed = {o.client for number, o in outcomes(tmp_path / "run") if number == 3}
    assert len(failed) == 5
    for client in failed:
        assert f"no battery left on device {client}" in text
    assert "Traceback" in text


@pytest.mark.parametrize("backend", ["inline", "workers"])
def test_nan_from_one_client_is_rejected_and_named(tmp_path: Path, backend: str) -> None:
    algorithm = {"name": f"{PLUGINS}:Odd", "how": "nan", "every": 7}
    run(tmp_path, algorithm=algorithm, cohort=20, round={"quorum": 0.5}, backend=backend)
    rejected = [outcome for _, outcome in outcomes(tmp_path / "run") if outcome.status == "rejected"]
    assert {outcome.client for outcome in rejected} == {0, 7, 14}
    assert all("nan" in outcome.cause for outcome in rejected)


def test_zero_weight_is_rejected(tmp_path: Path) -> None:
    algorithm = {"name": f"{PLUGINS}:Odd", "how": "zero weight"}
    with pytest.raises(RoundAborted):
        run(tmp_path, algorithm=algorithm)
    assert all(outcome.status == "rejected" for _, outcome in outcomes(tmp_path / "run"))


def test_a_failed_round_keeps_the_model_and_the_run_goes_on(tmp_path: Path) -> None:
    # half of a cohort of 5 vanish, three of five are needed in some rounds only
    settings: dict[str, Any] = {"behaviour": {"dropout": {"train": 0.5}}, "round": {"quorum": 0.8}}
    settings["round"]["max_failed_rounds"] = 100
    found = run(tmp_path, rounds=8, **settings)
    assert 0 < found.failed_rounds <= 8


def test_dropout_share_is_exact(tmp_path: Path) -> None:
    run(tmp_path, cohort=10, behaviour={"dropout": 0.3}, round={"quorum": 0.5})
    statuses = [outcome.status for number, outcome in outcomes(tmp_path / "run") if number == 1]
    assert statuses.count("dropped") == 3
    assert statuses.count("accepted") == 7


@pytest.mark.parametrize("backend", ["inline", "workers"])
def test_models_handed_to_clients_are_immutable(tmp_path: Path, backend: str) -> None:
    algorithm = {"name": f"{PLUGINS}:Odd", "how": "write"}
    with pytest.raises(MyceliaError, match="wrote into the server's model"):
        run(tmp_path, algorithm=algorithm, backend=backend)


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    algorithm = {"name": f"{PLUGINS}:Odd", "how": "die", "every": 3}
    with pytest.raises(MyceliaError, match=r"worker \d: the process died with exit code -9"):
        run(tmp_path, algorithm=algorithm, cohort=20, backend={"name": "workers", "workers": 2})


def test_poisson_rounds_may_be_empty(tmp_path: Path) -> None:
    found = run(tmp_path, cohort=1, rounds=12, selector="poisson", population={"clients": 20})
    sizes = [event.counts["survivors"] for event in Run.open(tmp_path / "run").events({"round"})]  # type: ignore[attr-defined]
    assert found.rounds == 12
    assert 0 in sizes


def test_regression_has_no_accuracy(tmp_path: Path) -> None:
    found = run(tmp_path, data="diabetes", partition="iid", local={"epochs": 1, "lr": 0.001})
    assert found.test_accuracy is None
    assert found.test_loss > 0


def test_an_unexportable_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"unexportable|Branching"):
        run(tmp_path, model=f"{PLUGINS}:unexportable")


def test_a_missing_data_set_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match="nowhere"):
        run(tmp_path, data=f"npz:{tmp_path}/nowhere.npz")


def test_a_run_folder_is_not_overwritten(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(ConfigError, match="there is a run already"):
        run(tmp_path)


def test_resume_of_another_schema_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    log = tmp_path / "run" / "events.jsonl"
    log.write_text(log.read_text().replace('{"v":1,', '{"v":99,'))
    with pytest.raises(ConfigError, match="99"):
        resume(tmp_path / "run")


def test_resume_of_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert resume(tmp_path / "run").model_sha256 == first.model_sha256


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": f"{PLUGINS}:normed", "rounds": 4}
    whole = run(tmp_path, "whole", **settings)
    with small_disk(tmp_path / "disk") as disk:
        ballast: list[Path] = []

        def fill_up(event: Event) -> None:
            if event.kind == "checkpoint" and getattr(event, "step", 0) == 2:
                ballast.append(fill(disk))

        with pytest.raises(MyceliaError, match=r"No space left|cannot be written"):
            simulate(scenario(**settings), out=disk / "run", listeners=[fill_up])
        ballast[0].unlink()
        assert resume(disk / "run").model_sha256 == whole.model_sha256


def test_the_central_baseline_trains_on_the_union(tmp_path: Path) -> None:
    found = run(tmp_path, algorithm="centralised", cohort=5, rounds=3)
    sums = [event.counts["examples"] for event in Run.open(tmp_path / "run").events({"round"})]  # type: ignore[attr-defined]
    assert sums == [1438] * 3  # a round is one pass over everything
    assert found.bytes_up == found.bytes_down


def test_batch_norm_and_a_last_batch_of_one(tmp_path: Path) -> None:
    # 26 clients of 55 or 56 examples: batches of 11 leave one over for some
    found = run(
        tmp_path,
        model=f"{PLUGINS}:normed",
        partition="iid",
        population={"clients": 26},
        cohort=26,
        local={"epochs": 1, "batch_size": 11},
    )
    assert found.failed_rounds == 0
    assert {outcome.status for _, outcome in outcomes(tmp_path / "run")} == {"accepted"}


def test_an_aborted_round_leaves_no_state_at_clients(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm": f"{PLUGINS}:Counting", "cohort": 20, "rounds": 2}
    settings["round"] = {"quorum": 0.9, "max_failed_rounds": 100}
    with pytest.raises(RoundAborted):
        run(tmp_path, behaviour={"dropout": 0.5}, **settings)
    assert list((tmp_path / "run" / "clients").glob("*/*.safetensors")) == []


@pytest.mark.parametrize("policy", ["drop", "retry", "replace"])
@pytest.mark.parametrize("stragglers", ["discard", "next_round"])
def test_vanishing_clients_under_every_policy(tmp_path: Path, policy: str, stragglers: str) -> None:
    settings: dict[str, Any] = {
        "rounds": 6,
        "behaviour": {"dropout": 0.2, "speed": {"steps_per_s": 10.0, "sigma": 1.0}, "stragglers": 0.2},
        "round": {"over_select": 2.0, "on_failure": policy, "quorum": 0.3, "stragglers": stragglers},
    }
    found = run(tmp_path, **settings)
    accepted = [o for _, o in outcomes(tmp_path / "run") if o.status == "accepted"]
    rounds = [event for event in Run.open(tmp_path / "run").events({"round"})]
    assert sum(event.counts["survivors"] for event in rounds) == len(accepted)  # type: ignore[attr-defined]
    assert found.failed_rounds < 6
    again = run(tmp_path, "again", backend={"name": "workers", "workers": 2}, **settings)
    assert again.model_sha256 == found.model_sha256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"selector": f"{PLUGINS}:fractions"}, "float64"),
        ({"selector": f"{PLUGINS}:twice"}, "an id twice"),
        ({"selector": f"{PLUGINS}:beyond"}, "the id 24"),
        ({"selector": f"{PLUGINS}:angry"}, "KeyError"),
        ({"algorithm": f"{PLUGINS}:Pair"}, "local returned a int|not enough|all failed"),
        ({"algorithm": f"{PLUGINS}:Nothing"}, "merge returned a NoneType"),
        ({"model": f"{PLUGINS}:few"}, "2 outputs and the data 10 classes"),
        ({"model": f"{PLUGINS}:broken"}, "no such layer"),
        ({"update": {"max_abs": 1e-30}}, "all failed|no_survivors|rejected"),
        ({"behaviour": {"dropout": 1.0}}, "no survivors"),
    ],
)
def test_wrong_code_and_hopeless_settings_are_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(MyceliaError, match=words):
        run(tmp_path, **changes)


def test_a_resumed_run_keeps_its_settings(tmp_path: Path) -> None:
    run(tmp_path)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("\nrounds = 3", "\nrounds = 4"))
    with pytest.raises(ConfigError, match=r"config\.toml differs in rounds from"):
        resume(tmp_path / "run")
