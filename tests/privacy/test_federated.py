"""Stages of federated privacy: an adaptive bound, correlated noise, noise of clients, and their records."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycelia.engine.errors import BudgetExceeded, ConfigError, DataError
from mycelia.engine.sums import ExactSum, SumFormat, Term, TermSpec, Total, Update
from mycelia.privacy.client_ledgers import ClientLedgers
from mycelia.privacy.clip import Abadi, AutoS, ClipFunction, Indicator, QuantileClip, Sensitivity
from mycelia.privacy.factorisation import BLT, CorrelatedNoise, Identity
from mycelia.privacy.federated import (
    CLIP_BOUND,
    AdaptiveClip,
    ClipUpdate,
    FactorisedNoise,
    LocalNoise,
    RecordRelease,
    ServerNoise,
    own_source,
    rounding_slack,
)
from mycelia.privacy.noise.discrete_gaussian import DiscreteGaussian
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import Pipeline, Sent
from mycelia.privacy.sampling import FullBatch

SOURCE = NoiseSource.seeded(5)
BLT_2 = BLT(2, scales=(0.4, 0.1), decays=(0.7, 0.99))
CLIP = QuantileClip(target=0.5, rate=0.2, sigma_b=3.0, bound=0.5)


def update(norm: float, size: int = 10) -> Update:
    """An update of this norm; the server's model is subtracted from it."""
    old = torch.linspace(-1, 1, size)
    return Update({"params": Term(old + norm / math.sqrt(size), 1.0, old)}, {"steps": 1.0})


def zeros(*names: str, size: int = 20_000) -> Total:
    sums = {name: torch.zeros(size, dtype=torch.float64) for name in names}
    return Total(sums, dict.fromkeys(names, 0.0), 0)


def sent(round: int, bound: float = 0.5, client: int = 7) -> Sent:
    return Sent(client, round, {CLIP_BOUND: torch.tensor(bound, dtype=torch.float64)})


# The adaptive bound


def adaptive(z: float = 1.5, expected: float = 40.0) -> Pipeline:
    noise = ServerNoise(Gaussian(), SOURCE, z, Sensitivity(CLIP.bound), expected, CLIP)
    return Pipeline((AdaptiveClip(CLIP), noise))


def summed(pipeline: Pipeline, norms: list[float], bound: float, round: int) -> Total:
    """The exact sum of clients with updates of these norms."""
    specs = {"params": TermSpec(10, 64.0)} | pipeline.terms()
    running = ExactSum(SumFormat.plan(specs, 1.0, 100))
    for client, norm in enumerate(norms):
        running.add(pipeline.devices().device(update(norm), sent(round, bound, client)))
    return ExactSum.total(running.form, [running.accumulator], running.count)


def test_votes_travel_in_the_same_exact_sum() -> None:
    """Σ (b - ½) over norms 0.1 … 1.0 and a bound of 0.35: three are within it."""
    total = summed(adaptive(), [0.1 * k for k in range(1, 11)], 0.35, 0)
    (votes,) = [sums for name, sums in total.sums.items() if name != "params"]
    assert votes.tolist() == [3 * 0.5 - 7 * 0.5]
    assert total.sums["params"].norm() == pytest.approx(0.1 + 0.2 + 0.3 + 7 * 0.35, rel=1e-6)


def test_the_bound_moves_as_andrew_et_al_say() -> None:
    """C exp(-rate (b̂ - target)) with b̂ = (Σ (b - ½) + N(0, σ_b²)) / B̄ + ½, the noise told by its name."""
    pipeline, bound = adaptive(), 0.35
    total = summed(pipeline, [0.1 * k for k in range(1, 11)], bound, 4)
    after, public = pipeline.server(total, sent(4, bound).public, 4)
    drawn = Gaussian().sample(1, 3.0, SOURCE, "clip count", 4, dtype=torch.float64)
    share = (-2.0 + float(drawn)) / 40.0 + 0.5
    assert float(public[CLIP_BOUND]) == pytest.approx(bound * math.exp(-0.2 * (share - 0.5)), rel=1e-12)
    assert after.sums.keys() == after.weights.keys() == {"params"}


def test_noise_follows_the_bound_in_force_and_both_releases_cost_z() -> None:
    """1/z² = 1/z_Δ² + 1/(2 σ_b)²: the update has sensitivity C, the vote ½."""
    pipeline = adaptive(z=1.5)
    for bound in (0.02, 5.0):
        total = zeros("params")
        votes = next(iter(pipeline.terms()))
        total = Total(total.sums | {votes: torch.zeros(1).double()}, total.weights | {votes: 0.0}, 0)
        noised, _ = pipeline.server(total, sent(0, bound).public, 0)
        multiplier = float(noised.sums["params"].std()) / bound
        assert multiplier**-2 + (2 * 3.0) ** -2 == pytest.approx(1.5**-2, rel=0.03)


def test_a_total_the_count_alone_exceeds_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 sigma_b"):
        adaptive(z=6.0).server(zeros("params"), sent(0).public, 0)


def test_the_bound_settles_at_the_quantile() -> None:
    """With a thousand clients of norms 0.01 … 10 and little noise it goes to the median."""
    norms = torch.linspace(0.01, 10, 1000, dtype=torch.float64)
    clip = QuantileClip(target=0.5, rate=0.3, sigma_b=10.0, bound=0.1)
    noise = ServerNoise(Gaussian(), SOURCE, 1.0, Sensitivity(clip.bound), 1000.0, clip)
    stage, votes = AdaptiveClip(clip), next(iter(AdaptiveClip(clip).terms()))
    public = stage.begin()
    for round in range(120):
        bound = float(public[CLIP_BOUND])
        count = torch.tensor([float((norms <= bound).double().sub(0.5).sum())], dtype=torch.float64)
        total = Total({"params": torch.zeros(1).double(), votes: count}, {"params": 0.0, votes: 0.0}, 0)
        _, public = noise.server(total, public, round)
    assert float(public[CLIP_BOUND]) == pytest.approx(5.0, rel=0.15)


def test_devices_get_no_secret_and_the_vote_is_not_in_the_slack() -> None:
    device = adaptive().devices()
    assert SOURCE.key not in pickle.dumps(device)
    form = SumFormat.plan({"params": TermSpec(10, 8.0)} | device.terms(), 1.0, 1000)
    plain = SumFormat.plan({"params": TermSpec(10, 8.0)}, 1.0, 1000)
    assert rounding_slack(Sensitivity(1.0), form) == rounding_slack(Sensitivity(1.0), plain)


# Public weights


def weighed(norm: float, weight: float) -> Update:
    (term,) = update(norm).terms.values()
    return Update({"params": replace(term, weight=weight)}, {})


@pytest.mark.parametrize("clip", [Abadi(0.5), AutoS(0.5), Indicator(0.5)], ids=lambda each: each.name)
def test_a_client_moves_the_sum_by_at_most_its_capped_weight(clip: ClipFunction) -> None:
    """Sums of min(w, w_max) c Δ: with any client left out they lie w_max C apart at most, rounding added."""
    clients = [(0.1, 1.0), (0.3, 7.0), (4.0, 2.5), (9.0, 50.0), (0.4, 1e6)]
    form = SumFormat.plan({"params": TermSpec(10, 64.0)}, 5.0, 10)
    bound = rounding_slack(clip.sensitivity().weighted(5.0), form).total
    assert bound == pytest.approx(5.0 * 0.5, rel=1e-6)
    stage, sums = ClipUpdate(clip, weight_max=5.0), []
    for missing in range(-1, len(clients)):
        running = ExactSum(form)
        for client, (norm, weight) in enumerate(clients):
            if client != missing:
                running.add(stage.device(weighed(norm, weight), sent(0, client=client)))
        sums.append(ExactSum.total(form, [running.accumulator], running.count).sums["params"])
    factors = [float(clip(torch.tensor([norm], dtype=torch.float64))) for norm, _ in clients]
    expected = sum(min(w, 5.0) * c * n for (n, w), c in zip(clients, factors, strict=True))
    assert float(sums[0].norm()) == pytest.approx(expected, rel=1e-6)
    assert max(float((sums[0] - other).norm()) for other in sums[1:]) <= bound


def test_noise_and_denominator_follow_the_weights() -> None:
    sensitivity = Sensitivity(0.5).weighted(4.0)
    noise = ServerNoise(Gaussian(), SOURCE, 1.5, sensitivity, 30.0, mean_weight=2.5)
    found, _ = noise.server(zeros("params"), {}, 0)
    assert (found.weights, found.count) == ({"params": 30.0 * 2.5}, 30)
    assert float(found.sums["params"].std()) == pytest.approx(1.5 * 4.0 * 0.5, rel=0.03)
    rows = CorrelatedNoise(Identity(), 2, 1.0)
    assert FactorisedNoise(rows, SOURCE, 30.0, 2.5).server(zeros("params"), {}, 0)[0].weights == found.weights


def test_weights_that_are_not_one_number_are_refused() -> None:
    one, other = weighed(0.3, 1.0).terms["params"], weighed(0.3, 2.0).terms["params"]
    with pytest.raises(ConfigError, match="weighting"):
        ClipUpdate(Abadi(0.5)).device(weighed(0.3, 2.0), sent(0))
    with pytest.raises(ConfigError, match="one public weight"):
        ClipUpdate(Abadi(0.5), 5.0).device(Update({"a": one, "b": other}, {}), sent(0))
    for weight in (0.0, -1.0, math.inf):
        with pytest.raises(ConfigError, match="weight_max"):
            Sensitivity(1.0).weighted(weight)


# Correlated noise


def factorised(steps: int = 6, std: float = 2.0) -> FactorisedNoise:
    return FactorisedNoise(CorrelatedNoise(BLT_2, steps, std), SOURCE, 12.0)


def test_rounds_get_the_rows_of_the_factorisation() -> None:
    stage, noise = factorised(), CorrelatedNoise(BLT_2, 6, 2.0)
    state = noise.init({"params": torch.zeros(50)})
    for round in range(6):
        found, public = stage.server(zeros("params", size=50), {}, round)
        assert torch.equal(found.sums["params"], noise.next(state, SOURCE)["params"].double())
        assert (found.weights, found.count, public) == ({"params": 12.0}, 12, {})
    with pytest.raises(BudgetExceeded, match="planned"):
        stage.server(zeros("params", size=50), {}, 6)


def test_a_round_that_fails_leaves_its_row_out_and_a_stop_changes_nothing() -> None:
    whole = [factorised().server(zeros("params", size=50), {}, 3)[0] for _ in range(2)]
    stage = factorised()
    for round in (0, 2, 3):  # round 1 failed
        found, _ = stage.server(zeros("params", size=50), {}, round)
    assert torch.equal(found.sums["params"], whole[0].sums["params"])
    again, _ = stage.server(zeros("params", size=50), {}, 2)  # and even going back gives the same
    assert torch.equal(
        again.sums["params"], factorised().server(zeros("params", size=50), {}, 2)[0].sums["params"]
    )


def test_the_identity_is_independent_noise() -> None:
    stage = FactorisedNoise(CorrelatedNoise(Identity(), 2, 3.0), SOURCE, 1.0)
    first, second = (stage.server(zeros("params"), {}, round)[0].sums["params"] for round in range(2))
    assert float(first.std()) == pytest.approx(3.0, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.03


def test_correlated_noise_needs_clipping() -> None:
    with pytest.raises(ConfigError, match="noise without clip"):
        Pipeline((factorised(),))


# Noise of clients


def local(z: float = 1.5) -> Pipeline:
    return Pipeline((ClipUpdate(Abadi(0.5)), LocalNoise(Gaussian(), SOURCE, z, Sensitivity(0.5))))


def difference(of: Update) -> Tensor:
    term = of.terms["params"]
    return term.weight * (term.values - (0 if term.minus is None else term.minus)).double()


def test_a_client_clips_and_then_noises_what_it_sends() -> None:
    found = local().device(update(40.0, 50_000), Sent(7, 3, {}))
    drawn = Gaussian().sample(
        50_000, 1.5 * 0.5, own_source(SOURCE, 7), "local noise", 3, "params", dtype=torch.float64
    )
    clipped = difference(found) - drawn
    assert clipped.norm() == pytest.approx(0.5, rel=1e-6)
    assert float(drawn.std()) == pytest.approx(0.75, rel=0.02)
    assert found.metrics == {"steps": 1.0}


def test_every_client_and_round_has_noise_of_its_own() -> None:
    draws = [
        difference(local().device(update(0.0, 20_000), Sent(client, round, {})))
        for client, round in ((1, 0), (2, 0), (1, 1), (11, 0))
    ]
    apart = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert float(apart.abs().max()) < 0.03
    again = difference(local().device(update(0.0, 20_000), Sent(1, 0, {})))
    assert torch.equal(again, draws[0])


def test_the_safe_mode_noises_on_a_grid() -> None:
    stage = LocalNoise(DiscreteGaussian(), SOURCE, 1.0, Sensitivity(0.5))
    found = stage.device(update(0.3), Sent(1, 0, {}))
    grid = DiscreteGaussian().grid(0.5)
    assert torch.equal((found.terms["params"].values / grid).round() * grid, found.terms["params"].values)


def test_local_noise_needs_clipping() -> None:
    with pytest.raises(ConfigError, match="device-noise without clip"):
        Pipeline((LocalNoise(Gaussian(), SOURCE, 1.0, Sensitivity(1.0)),))


def test_keys_of_clients_are_their_own() -> None:
    keys = {own_source(SOURCE, client).key for client in (0, 1, "0", "a")}
    assert len(keys) == 3  # a client is named by its text
    assert SOURCE.key not in keys
    assert own_source(SOURCE, 0).kind == "seeded"


# Records of clients

EVENT = FullBatch().events(1.0, 3, unit="client", relation="replace-one")[0]


def test_a_release_is_in_the_ledger_before_it_leaves(tmp_path: Path) -> None:
    ledgers = ClientLedgers(tmp_path / "ledgers", "seeded")
    stage = RecordRelease(ledgers, EVENT, uses=2)
    one = update(0.3)
    assert stage.device(one, Sent(4, 0, {})) is one
    stage.device(update(0.2), Sent(4, 5, {}))
    ledger = ledgers.read(4)
    assert ledger is not None
    assert [(event.step, event.count) for event in ledger] == [(0, 3), (15, 3)]
    assert ledgers.clients() == ["4"]
    assert ledgers.read(5) is None


def test_a_client_killed_at_its_first_release_begins_again(tmp_path: Path) -> None:
    ledgers = ClientLedgers(tmp_path, "seeded")
    (tmp_path / "4.part").write_text("")  # what it left
    RecordRelease(ledgers, EVENT, uses=2).device(update(0.3), Sent(4, 0, {}))
    with ledgers.path(4).open("a") as file:
        file.write('{"count":3,"noise')  # killed while it wrote, before it sent
    assert ledgers.clients() == ["4"]
    RecordRelease(ledgers, EVENT, uses=2).device(update(0.2), Sent(4, 1, {}))
    ledger = ledgers.read(4)
    assert ledger is not None
    assert ledger.steps == 6


def test_the_same_numbers_count_once_and_others_are_refused(tmp_path: Path) -> None:
    ledgers = ClientLedgers(tmp_path, "seeded")
    stage = RecordRelease(ledgers, EVENT, uses=1)
    stage.device(update(0.3), Sent(4, 0, {}))
    stage.device(update(0.3), Sent(4, 0, {}))  # done again after a stop
    ledger = ledgers.read(4)
    assert ledger is not None
    assert ledger.steps == 3
    with pytest.raises(BudgetExceeded, match="paid for 1 rounds"):
        stage.device(update(0.3), Sent(4, 1, {}))
    with pytest.raises(DataError, match="same noise"):
        RecordRelease(ledgers, EVENT, uses=9).device(update(0.31), Sent(4, 0, {}))
    assert len((tmp_path / "4.jsonl").read_text().splitlines()) == 2


def test_ledgers_that_lack_releases_stop_a_resume(tmp_path: Path) -> None:
    ledgers = ClientLedgers(tmp_path, "seeded")
    for round in range(2):
        RecordRelease(ledgers, EVENT, uses=5).device(update(0.1 + round), Sent("a/b", round, {}))
    assert ledgers.clients() == ["a/b"]
    ledgers.check([], EVENT)
    path = ledgers.path("a/b")
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:2]))
    rounds = [("a/b", 2)]
    with pytest.raises(DataError, match="3 releases, and there were 6"):
        ledgers.check(rounds, EVENT)
    path.write_text(whole.replace('"noise_multiplier":1.0', '"noise_multiplier":9.0', 1))
    with pytest.raises(DataError, match="does not follow"):
        ledgers.check(rounds, EVENT)
    path.write_text(whole)
    ledgers.check(rounds, EVENT)
    with pytest.raises(DataError, match="another kind"):
        ledgers.check(rounds, FullBatch().events(2.0, 3, unit="client", relation="replace-one")[0])
    path.unlink()
    with pytest.raises(DataError, match="0 releases"):
        ledgers.check(rounds, EVENT)
