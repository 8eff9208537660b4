"""Clients that add the noise, each a share, under a secure sum: as much as is accounted, or no sum."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from mycelia.engine.errors import ConfigError, DataError, RoundAborted
from mycelia.engine.events import Event, Outcomes, SecureSum
from mycelia.engine.run import Run
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.events import Event as Release
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.sampling import FixedSize
from mycelia.simulations import SimulationResult, resume, simulate
from tests.simulations.private_runs import WORKERS, Stop

pytestmark = pytest.mark.usefixtures("captured_once")

COHORT, N_MIN, CLIENTS, CORRUPT = 12, 9, 60, 1
CLIP, FRAC_BITS = 0.5, 16
SIZE = 64 * 8 + 8 + 8 * 10 + 10
"""Parameters of the model."""

NORM = math.sqrt((CLIP * 2**FRAC_BITS) ** 2 + SIZE / 4 + (CLIP * 2**FRAC_BITS + math.sqrt(SIZE) / 2))
"""The bound after rounding in steps, with β = exp(-1/2), for which sqrt(2 ln 1/β) is 1."""


def settings(privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Three rounds of twelve of sixty clients on digits, of whom a quarter vanish."""
    block = {
        "unit": "client", "model": "distributed", "epsilon": 50.0, "delta": 1e-3,
        "clip": {"name": "abadi", "bound": CLIP},
    }  # fmt: skip
    return {
        "model": {"name": "mlp", "hidden": [8]},
        "data": "digits",
        "algorithm": {"name": "fedavg", "weighting": "uniform"},
        "rounds": 3,
        "cohort": COHORT,
        "population": {"clients": CLIENTS},
        "partition": "iid",
        "local": {"epochs": 1, "batch_size": 10, "lr": 0.1},
        "round": {"quorum": 0.7},
        "behaviour": {"dropout": 0.25},
        "backend": "inline",
        "evaluation": {"every": 0, "clients": 0},
        "secure_sum": {"dropout": 0.3},
        "privacy": block | (privacy or {}),
    } | changes


def run(path: Path, seen: list[Event] | None = None, **given: Any) -> SimulationResult:
    return simulate(settings(**given), out=path, listeners=[] if seen is None else [seen.append])


def ledger(path: Path) -> list[Release]:
    """One event for each round."""
    events = Ledger.load(path / "privacy.jsonl")
    return [replace(event, step=event.step + n, count=1) for event in events for n in range(event.count)]


def survivors(seen: list[Event]) -> list[int]:
    return [event.survivors for event in seen if isinstance(event, SecureSum)]


@pytest.mark.parametrize("mechanism", ["discrete-gaussian", "skellam"])
def test_masks_change_neither_model_nor_epsilon(tmp_path: Path, mechanism: str) -> None:
    found = [
        run(
            tmp_path / f"{on}",
            privacy={"mechanism": mechanism},
            secure_sum={"dropout": 0.3, "masks": on},
        )
        for on in (True, False)
    ]
    assert found[0].model_sha256 == found[1].model_sha256
    assert found[0].privacy == found[1].privacy
    assert found[0].failed_rounds == 0


@pytest.mark.parametrize("mechanism", ["discrete-gaussian", "skellam"])
@pytest.mark.parametrize("dropout", [{}, {"upload": 0.1}], ids=["none", "some"])
def test_the_sum_holds_the_noise_of_those_who_survived(
    tmp_path: Path, mechanism: str, dropout: dict[str, float]
) -> None:
    """With updates of zero the models' steps are noise alone: a client's share, times the survivors."""
    z, rounds, seen = 2.0, 6, list[Event]()
    models: list[np.ndarray] = []

    def look(event: Event) -> None:
        seen.append(event)
        if event.kind == "checkpoint":
            models.append(Run.open(tmp_path / "run").load_checkpoint().tensors["vector"].double().numpy())

    given = settings(
        privacy={"mechanism": mechanism, "noise_multiplier": z, "epsilon": 1e4},
        local={"epochs": 1, "batch_size": 10, "lr": 1e-12},
        behaviour={"dropout": dropout},
        rounds=rounds,
    )
    simulate(given, out=tmp_path / "run", listeners=[look])
    left = survivors(seen)
    assert all(count >= N_MIN for count in left)
    assert (set(left) == {COHORT}) == (not dropout)
    share = math.ceil(z**2 * math.floor(NORM**2)) / (N_MIN - CORRUPT)
    squares = 0.0
    for count, before, after in zip(left, models[:-1], models[1:], strict=True):
        noise = (after - before) * COHORT * 2**FRAC_BITS  # the sum is divided by the public cohort
        squares += float(noise @ noise) / (share * count)
    freedom = rounds * SIZE
    # models are kept in float32, which is far below a step of the noise
    assert chi2.ppf(1e-5, freedom) < squares < chi2.ppf(1 - 1e-5, freedom)


def test_the_ledger_has_what_survived_relative_to_the_bound_after_rounding(tmp_path: Path) -> None:
    seen: list[Event] = []
    given = {"noise_multiplier": 2.0, "epsilon": 1e4}
    run(tmp_path / "run", seen, privacy=given, behaviour={"dropout": {"upload": 0.1}}, rounds=5)
    left, written = survivors(seen), ledger(tmp_path / "run")
    assert len(set(left)) > 1
    for number, (count, event) in enumerate(zip(left, written, strict=True)):
        honest = (count - CORRUPT) / (N_MIN - CORRUPT)
        assert event.noise_multiplier == pytest.approx(2.0 * math.sqrt(honest), rel=1e-6)
        assert event.noise_multiplier >= 2.0 * (1 - 1e-9)
        assert (event.step, event.relation, event.unit) == (number, "replace-one", "client")
        assert event.clip == pytest.approx(NORM / 2**FRAC_BITS, rel=1e-9)
        # the divergence of Gaussian noise of that size, for replaced updates, before the cohort was drawn
        assert all(
            value <= order / 2 * (2 / event.noise_multiplier) ** 2 * (1 + 1e-3)
            for order, value in zip(event.orders, event.values, strict=True)
        )


@pytest.mark.parametrize("mechanism", ["discrete-gaussian", "skellam"])
def test_epsilon_is_that_of_gaussian_noise_or_a_little_more(tmp_path: Path, mechanism: str) -> None:
    """dp-accounting's figure for Gaussian noise of the same size and cohort, by Rényi divergences."""
    given = {"noise_multiplier": 2.0, "epsilon": 1e4, "mechanism": mechanism}
    found = run(tmp_path / "run", privacy=given, behaviour={"dropout": {}}, round={"quorum": 1.0},
                secure_sum={"dropout": 0.0, "corrupt": 0.0})  # fmt: skip
    expected = epsilon(FixedSize(COHORT, CLIENTS), 2.0, 3, 1e-3, unit="client", accountant="rdp").epsilon
    assert found.epsilon is not None
    assert expected <= found.epsilon < 1.35 * expected
    (statement,) = (found.privacy or {})["statements"]
    assert (statement["relation"], statement["accountant"]) == ("replace-one", "rdp")
    assert statement["epsilon"] == found.epsilon


def test_what_epsilon_depends_on_is_said(tmp_path: Path) -> None:
    found = run(tmp_path / "run", privacy={"mechanism": "skellam"})
    facts = found.privacy or {}
    assert (facts["model"], facts["mechanism"], facts["least_survivors"]) == ("distributed", "skellam", N_MIN)
    assert facts["assumed_corrupt"] == CORRUPT
    assert facts["rounded_bound"] == pytest.approx(NORM / 2**FRAC_BITS, rel=1e-9)
    (statement,) = facts["statements"]
    assert "skellam shares of the clients under a secure sum" in statement["statement"]
    assert any("after rounding" in sentence for sentence in statement["assumptions"])


def test_noise_is_calibrated_to_the_budget(tmp_path: Path) -> None:
    """For the fewest survivors; a cohort that stays whole has spent less."""
    least = run(tmp_path / "least", privacy={"epsilon": 10.0}, behaviour={"dropout": {"upload": 0.0}},
                round={"quorum": 1.0}, secure_sum={"dropout": 0.0})  # fmt: skip
    assert least.epsilon is not None
    assert 9.99 < least.epsilon <= 10.0
    whole = run(tmp_path / "whole", privacy={"epsilon": 10.0}, behaviour={"dropout": {}})
    assert whole.epsilon is not None
    assert whole.epsilon < 9.9


def test_the_budget_stops_the_run(tmp_path: Path) -> None:
    one = run(tmp_path / "one", privacy={"noise_multiplier": 2.0, "epsilon": 1e4}, rounds=1).epsilon
    four = run(tmp_path / "four", privacy={"noise_multiplier": 2.0, "epsilon": 1e4}, rounds=4).epsilon
    assert one is not None
    assert four is not None
    found = run(tmp_path / "run", privacy={"noise_multiplier": 2.0, "epsilon": (one + four) / 2}, rounds=20)
    assert (0 < found.rounds < 4, found.stopped_by) == (True, "budget")
    assert found.epsilon is not None
    assert found.epsilon <= (one + four) / 2


def test_fewer_survivors_open_nothing_and_cost_nothing(tmp_path: Path) -> None:
    given = {"noise_multiplier": 2.0, "epsilon": 1e4}
    with pytest.raises(RoundAborted):
        run(tmp_path / "run", privacy=given, behaviour={"dropout": {"upload": 0.6}}, rounds=1)
    assert not ledger(tmp_path / "run")


def test_what_was_charged_stays_charged_without_a_sum(tmp_path: Path) -> None:
    """Whoever is asked to open may have told its shares, whatever becomes of the round."""
    given = {"noise_multiplier": 2.0, "epsilon": 1e4}
    with pytest.raises(RoundAborted, match="UNMASK_SHORT"):
        run(tmp_path / "run", privacy=given, behaviour={"dropout": {"unmask": 0.9}}, rounds=1)
    assert len(ledger(tmp_path / "run")) == 1


def test_a_stop_changes_neither_model_nor_epsilon(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        simulate(settings(), out=tmp_path / "stopped", listeners=[Stop(2)])
    assert len(ledger(tmp_path / "stopped")) == 2  # the second has no checkpoint
    found = resume(tmp_path / "stopped")
    assert (found.model_sha256, found.privacy) == (whole.model_sha256, whole.privacy)
    assert len(ledger(tmp_path / "stopped")) == 3


def test_a_round_done_again_in_another_session_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(settings(), out=tmp_path / "run", listeners=[Stop(2)])
    for name, old, new in (
        ("config.toml", "lr = 0.1", "lr = 0.2"), ("events.jsonl", '"lr":0.1', '"lr":0.2'),
    ):  # fmt: skip
        path = tmp_path / "run" / name
        path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError, match="released before"):
        resume(tmp_path / "run")


def test_workers_and_the_systems_noise(tmp_path: Path) -> None:
    backends = {"inline": "inline", "workers": WORKERS}
    found = [run(tmp_path / name, backend=each, rounds=2) for name, each in backends.items()]
    assert found[0].model_sha256 == found[1].model_sha256
    secret = [run(tmp_path / f"os{n}", privacy={"noise_source": "os"}, rounds=1) for n in range(2)]
    assert secret[0].model_sha256 != secret[1].model_sha256
    assert secret[0].epsilon == secret[1].epsilon


def test_nothing_of_the_cohort_is_told_without_noise(tmp_path: Path) -> None:
    """Neither losses nor numbers of examples are opened: no noise covers them."""
    seen: list[Event] = []
    run(tmp_path / "run", seen)
    for event in seen:
        if event.kind == "round":
            assert event.metrics == {}  # type: ignore[attr-defined]
            assert event.counts["examples"] == 0  # type: ignore[attr-defined]
        assert not isinstance(event, SecureSum) or event.clipped is None
    assert any(isinstance(event, Outcomes) for event in seen)


def test_examples_of_clients_are_protected_under_masks_too(tmp_path: Path) -> None:
    """Their noise is in the local steps; rounding and masks change nothing about it."""
    privacy = {"unit": "example", "model": "central", "noise_multiplier": 2.0, "epsilon": 1e3}
    found = [
        run(tmp_path / f"{on}", privacy=privacy, secure_sum={"dropout": 0.3, "masks": on})
        for on in (True, False)
    ]
    plain = settings(privacy=privacy)
    del plain["secure_sum"]
    assert found[0].model_sha256 == found[1].model_sha256
    assert found[0].epsilon == simulate(plain, out=tmp_path / "plain").epsilon


@pytest.mark.parametrize(
    ("privacy", "changes", "says"),
    [
        ({"model": "central"}, {}, "each client adds a share of the noise; use distributed"),
        ({"model": "local"}, {}, "each client adds a share of the noise; use distributed"),
        ({"mechanism": "gaussian"}, {}, "of whole numbers"),
        ({"clip": {"name": "quantile", "target": 0.5}}, {}, "fixed bound"),
        ({"factorisation": {"name": "blt"}}, {}, "correlated noise"),
        ({"unit": "example"}, {}, "distributed noise protects clients"),
        ({"weight_max": 5.0}, {}, "weight_max"),
        ({}, {"selector": "poisson"}, "no fixed size"),
        ({}, {"selector": "availability"}, "must be uniform"),
        ({}, {"secure_sum": {"dropout": 0.3, "clip": 1.0}}, "comes from privacy.clip"),
        ({}, {"secure_sum": {"dropout": 0.3, "weight_max": 4}}, "weight 1"),
        ({}, {"algorithm": "fedavg"}, "weighting"),
        ({}, {"algorithm": {"name": "fednova", "weighting": "uniform"}}, "fednova"),
        ({}, {"model": "tests.simulations.plugins:normed"}, "GroupNorm"),
        ({"noise_multiplier": 0.5, "epsilon": 0.1}, {}, "the budget is 0.1"),
        ({}, {"secure_sum": {"dropout": 0.3, "corrupt": 0.8}}, "corrupt"),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, privacy: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run(tmp_path / "run", privacy=privacy, **changes)


def test_shares_without_a_secure_sum_are_refused(tmp_path: Path) -> None:
    given = settings()
    del given["secure_sum"]
    with pytest.raises(ConfigError, match=r"add \[secure_sum\]"):
        simulate(given, out=tmp_path / "run")
    del given["privacy"]["model"]
    given["privacy"]["mechanism"] = "skellam"
    with pytest.raises(ConfigError, match="in shares of clients"):
        simulate(given, out=tmp_path / "run")
