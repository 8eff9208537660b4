"""Each detector against closed forms and other libraries."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import ndimage, stats
from scipy.spatial.distance import jensenshannon
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor, nn

from mycelia.attacks import APGD, PGD, HopSkipJump, Square, Status, Targeted, Untargeted, as_model
from mycelia.attacks.detectors import (
    NOT_ADAPTIVE,
    DivergenceBased,
    Ensemble,
    ErrorBased,
    Guarded,
    RegionBased,
    Similarity,
    SpatialSmoothing,
    Unnoticed,
    area_interval,
    attack_guarded,
    detector_report,
    region_radius,
    roc,
    threshold_at,
)
from mycelia.attacks.filters import median_filter
from mycelia.attacks.model import CallableModel
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.worlds import affine, images, small


def halves(x: Tensor) -> Tensor:
    return x / 2


# --- thresholds -------------------------------------------------------------------------------------


def test_the_threshold_is_a_score() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert threshold_at(scores, 0.1) == 9.0
    assert threshold_at(scores, 0.3) == 7.0
    assert threshold_at(scores, 0.99) == 1.0
    assert threshold_at(torch.ones(10), 0.3) == 1.0
    for bad in (torch.zeros(0), torch.zeros(2, 2), torch.tensor([0.0, math.nan])):
        with pytest.raises(DataError):
            threshold_at(bad, 0.3)


# --- autoencoders -----------------------------------------------------------------------------------


def test_error_is_a_mean_power_with_all_extremes() -> None:
    x = torch.tensor([[0.2, -0.4, 0.6, 0.0], [0.0, 0.0, 0.0, 0.8]], dtype=torch.float64)
    assert ErrorBased(halves).score(x).tolist() == pytest.approx([0.15, 0.1])
    assert ErrorBased(halves, 2.0).score(x).tolist() == pytest.approx([0.56 / 16, 0.04])
    assert ErrorBased(lambda v: v).score(x).tolist() == [0.0, 0.0]
    assert float(ErrorBased(halves, 2.0).score(torch.tensor([[2e30, 0.0]]))[0]) == pytest.approx(5e59)
    assert ErrorBased(lambda v: 10 * v, bounds=(-1.0, 5.0)).transform(x)[0].tolist() == [2.0, -1.0, 5.0, 0.0]
    with pytest.raises(DataError, match="one shape"):
        ErrorBased(lambda v: v[:, :2]).score(x)
    with pytest.raises(ConfigError, match="exponent"):
        ErrorBased(halves, 0.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 10.0])
def test_divergence_is_scipys(temperature: float) -> None:
    model = affine(4, 10)
    x = torch.rand(5, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = DivergenceBased(halves, model, temperature).score(x)
    for row, score in zip(x[:, None], scores, strict=True):
        p, q = ((model(each) / temperature).softmax(1)[0].detach().numpy() for each in (row, row / 2))
        assert float(score) == pytest.approx(jensenshannon(p, q) ** 2, rel=1e-9)  # SciPy's is a root
    assert DivergenceBased(lambda v: v, model).score(x).tolist() == [0.0] * 5


def test_divergence_is_at_most_log_two() -> None:
    def model(x: Tensor) -> Tensor:
        return 1e5 * torch.cat([x, -x], 1)

    detector = DivergenceBased(lambda v: -v, model, 1.0, bounds=(0.0, 1.0))
    x = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    assert detector.score(x).tolist() == pytest.approx([math.log(2)] * 2)
    assert detector.transform(x).tolist() == [[0.0], [0.0]]
    with pytest.raises(ConfigError, match="compares scores"):
        DivergenceBased(halves, CallableModel(lambda v: v[:, 0].long(), "labels")).score(x)


# --- regions ----------------------------------------------------------------------------------------


def test_region_score_is_the_share_beyond_a_plane() -> None:
    """At distance a of a plane across the first axis, (r − a) / 2r of the cube lie beyond it."""

    def model(x: Tensor) -> Tensor:
        return torch.stack([x[:, 0], torch.full_like(x[:, 0], 0.5)], 1)

    x = torch.tensor([[0.5 + a, 0.3] for a in (0.01, 0.05, 0.09, 0.12)], dtype=torch.float64)
    m = 2000
    scores = RegionBased(model, 0.1, m).score(x)
    for a, score in zip((0.01, 0.05, 0.09, 0.12), scores.tolist(), strict=True):
        share = max(0.0, (0.1 - a) / 0.2)
        assert score == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / m))
    by_labels = RegionBased(CallableModel(lambda v: model(v).argmax(1), "labels"), 0.1, m)
    assert torch.equal(by_labels.score(x), scores)
    assert not by_labels.differentiable
    other = RegionBased(model, 0.1, m, seed=1).score(x)
    assert not torch.equal(other, scores)


def test_radius_grows_as_long_as_votes_stay() -> None:
    """In a slab of half width w the vote of a cube is the centre's own up to a radius of 2w."""

    def model(x: Tensor) -> Tensor:
        return torch.stack([(x[:, 0] - 0.5).abs(), torch.full_like(x[:, 0], 0.105)], 1)

    x = torch.full((3, 2), 0.5, dtype=torch.float64)
    call = {"m": 800, "rng": 1, "bounds": (-9.0, 9.0), "step": 0.06}
    assert region_radius(model, x, **call) == pytest.approx(0.18)  # type: ignore[arg-type]
    assert region_radius(model, x, most=0.13, **call) == pytest.approx(0.12)  # type: ignore[arg-type]
    fitted = RegionBased(model, m=50, bounds=(-9.0, 9.0)).fit(x.repeat(5, 1), 0.2)
    assert fitted.radius is not None
    assert fitted.radius == pytest.approx(0.21, abs=0.06)
    with pytest.raises(ConfigError, match="no radius yet"):
        RegionBased(model).score(x)
    with pytest.raises(ConfigError, match="0 < step"):
        region_radius(model, x, step=2.0)


# --- smoothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 9])
def test_median_filter_is_scipys(k: int) -> None:
    x = torch.rand(3, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    wanted = torch.from_numpy(ndimage.median_filter(x.numpy(), (1, 1, k, k), mode="reflect"))
    assert torch.equal(median_filter(x, k, "nchw"), wanted)
    assert torch.equal(median_filter(x.permute(0, 2, 3, 1), k, "nhwc").permute(0, 3, 1, 2), wanted)


def test_smoothing_score_is_a_distance_of_probabilities() -> None:
    model, x = small(), images(5)
    p = model(x).softmax(1)
    q = model(torch.from_numpy(ndimage.median_filter(x.numpy(), (1, 1, 3, 3), mode="reflect"))).softmax(1)
    detector = SpatialSmoothing(model, 3, layout="nchw")
    assert torch.allclose(detector.score(x), (p - q).abs().sum(1), atol=1e-12)
    assert SpatialSmoothing(model, 1, layout="nchw").score(x).tolist() == [0.0] * 5
    with pytest.raises(ConfigError, match="layout"):
        SpatialSmoothing(model, 3, layout="chw")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="images"):
        detector.score(x[:, 0])


# --- ensembles --------------------------------------------------------------------------------------


def column(place: int) -> ErrorBased:
    """Scores a third of the size of one of three coordinates."""
    return ErrorBased(lambda x: torch.where(torch.arange(3) == place, 0.0, x))


@pytest.mark.parametrize("rule", ["vote", "all", "any"])
def test_an_ensemble_uses_up_its_rate_and_no_more(rule: str) -> None:
    """No larger rate of the members would do: the largest one of a search by hand."""
    benign = torch.rand(60, 3, generator=torch.Generator().manual_seed(1))
    needed = {"any": 1, "vote": 2, "all": 3}[rule]
    detector = Ensemble([column(0), column(1), column(2)], rule).fit(benign, 0.1)  # type: ignore[arg-type]
    ranks = benign.argsort(0, descending=True).argsort(0)  # of each row in each column, 0 the largest
    by_rate = [int(((ranks < k).sum(1) >= needed).sum()) for k in range(60)]
    k = max(k for k in range(60) if by_rate[k] <= 6)
    assert int(detector.flag(benign).sum()) == by_rate[k] <= 6
    assert [each.fpr for each in detector.detectors] == [k / 60] * 3


def test_an_ensemble_of_one_is_its_member() -> None:
    benign, x = images(20, seed=3), images(9, seed=4)
    alone = ErrorBased(halves).fit(benign, 0.2)
    for rule in ("vote", "all", "any"):
        detector = Ensemble((ErrorBased(halves),), rule).fit(benign, 0.2)  # type: ignore[arg-type]
        assert torch.equal(detector.flag(x), alone.flag(x))
        assert torch.allclose(detector.score(x) * alone.unit + alone.limit, alone.score(x))
    for wrong in (dict(detectors=()), dict(detectors=(detector,)), dict(detectors=(alone,), rule="most")):
        with pytest.raises(ConfigError):
            Ensemble(**wrong)  # type: ignore[arg-type]


# --- memory -----------------------------------------------------------------------------------------


def line(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_similarity_is_a_mean_of_near_distances() -> None:
    detector = Similarity(k=2, window=3, threshold=-0.1)
    assert detector.score(line(0.0, 1.0, 4.0, 2.0, 2.0)).tolist() == [
        -math.inf, -math.inf,  # fewer than two before
        -3.5,  # 4 and 3
        -1.5,  # 2, 1 and 2
        -0.5,  # 1, 2 and 0: 0 is no longer remembered
    ]  # fmt: skip
    assert (detector.queries, detector.found) == (0, 0)


def test_similarity_forgets_on_a_hit_and_stays_small() -> None:
    detector = Similarity(k=2, window=4, threshold=-0.1)
    flags = [detector.flag(line(value)).item() for value in (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)]
    assert flags == [False, False, True, False, False, True]  # two are needed each time
    assert (detector.hits, detector.found, detector.queries) == ((2, 5), 2, 6)
    assert len(detector.memory.codes) == 0
    for value in range(10000, 10100):
        detector.flag(line(float(value)))
        assert len(detector.memory.codes) <= 4
    for _ in range(60):
        detector.flag(line(5.0))
    assert (detector.found, len(detector.hits), detector.queries) == (22, 4, 166)
    assert all(before < after for before, after in pairwise(detector.hits))


def test_similarity_in_one_call_and_in_many() -> None:
    x = torch.rand(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, parts = (Similarity(k=3, window=10, threshold=-0.15) for _ in range(2))
    scores = whole.score(x)
    flags = whole.flag(x)
    assert torch.equal(flags, scores > -0.15)
    assert 0 < int(flags.sum()) < 40
    assert torch.equal(torch.cat([parts.flag(some) for some in x.split(7)]), flags)
    assert whole.hits == parts.hits == tuple(flags.nonzero()[:, 0].tolist()[-10:])


def test_similarity_calibration_leaves_out_the_point_itself() -> None:
    benign = line(0.0, 1.0, 3.0, 6.0, 10.0)
    found = Similarity(k=1, window=10).fit(benign, 0.4)
    assert found.threshold == -2.0  # nearest of the others: 1, 1, 2, 3, 4; the two closest may be flagged
    ring = Similarity(k=1, window=1).fit(benign, 0.2)  # the one before, in a ring: 10, 1, 2, 3, 4
    assert ring.threshold == -2.0
    with pytest.raises(DataError, match="each has k neighbours"):
        Similarity(k=5, window=10).fit(benign, 0.2)
    with pytest.raises(ConfigError, match="k ≤ window"):
        Similarity(k=5, window=4)


def test_similarity_sees_an_attack_by_queries() -> None:
    """Benign queries pass, the steps of an attack do not; the memory is what the window holds."""
    draw = torch.Generator().manual_seed(0)
    benign, fresh = (torch.rand(100, 20, dtype=torch.float64, generator=draw) for _ in range(2))
    detector = Similarity(k=5, window=50).fit(benign, 0.05)
    assert int(detector.flag(fresh).sum()) <= 15
    start = torch.rand(1, 20, dtype=torch.float64, generator=draw)
    steps = start + 0.01 * torch.rand(60, 20, dtype=torch.float64, generator=draw)
    assert int(detector.flag(steps).sum()) == 10  # every sixth: five neighbours, then a hit


# --- characteristics --------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [4, 10**6])
def test_roc_is_scikit_learns(values: int) -> None:
    draw = torch.Generator().manual_seed(0)
    benign = torch.randint(values, (50,), generator=draw).double()
    attacked = torch.randint(values, (30,), generator=draw).double() + values / 4
    found = roc(benign, attacked)
    truth = np.r_[np.zeros(50), np.ones(30)]
    scores = torch.cat([benign, attacked]).numpy()
    fpr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert found.fpr == pytest.approx(fpr)
    assert found.tpr == pytest.approx(tpr)
    assert found.auc == pytest.approx(roc_auc_score(truth, scores))
    for threshold, false, true in zip(found.thresholds, found.fpr, found.tpr, strict=True):
        assert float((benign > threshold).double().mean()) == pytest.approx(false)
        assert float((attacked > threshold).double().mean()) == pytest.approx(true)
    for share, (low, high) in zip(found.tpr, found.tpr_interval, strict=True):
        assert low <= share <= high
    points = found.to_json()["points"]
    assert len(points) <= len(found.fpr)
    straight = np.interp(fpr, [each["fpr"] for each in points], [each["tpr"] for each in points])
    assert np.all(straight >= tpr - 1e-12)
    with pytest.raises(DataError):
        roc(benign[:0], attacked)
    with pytest.raises(DataError):
        roc(benign, torch.tensor([math.nan]))


def test_area_interval_solves_its_equation() -> None:
    """Hanley and McNeil's standard error of the ends, where both groups are as large."""
    n, z = 40, stats.norm.ppf(0.975)
    for area in (0.5, 0.8, 0.97, 1.0):
        low, high = area_interval(area, n, n)
        assert 0 <= low < area <= high <= 1
        for end in (low, high):
            if end in (0.0, 1.0):
                continue
            q1, q2 = end / (2 - end), 2 * end**2 / (1 + end)
            spread = end * (1 - end) + (n - 1) * (q1 + q2 - 2 * end**2)
            assert abs(area - end) == pytest.approx(z * math.sqrt(spread) / n, rel=1e-6)
    low, high = area_interval(0.3, 25, 60)
    assert area_interval(0.7, 25, 60) == pytest.approx((1 - high, 1 - low))
    wide, narrow = area_interval(0.9, 10, 10), area_interval(0.9, 1000, 1000)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert area_interval(0.0, 5, 5)[0] == 0.0
    with pytest.raises(ConfigError):
        area_interval(1.5, 5, 5)


def test_area_interval_covers() -> None:
    """Two normal laws one deviation apart: the area is Φ(1/√2)."""
    draw = np.random.default_rng(0)
    truth = stats.norm.cdf(1 / math.sqrt(2))
    inside = 0
    for _ in range(400):
        benign, attacked = draw.normal(0, 1, (25, 1)), draw.normal(1, 1, (1, 30))
        low, high = area_interval(float((attacked > benign).mean()), 25, 30)
        inside += low <= truth <= high
    assert inside >= stats.binom.ppf(0.001, 400, 0.95)


# --- model and detector together --------------------------------------------------------------------


class First(nn.Module):
    """Class 1 where the first coordinate is above 0.5."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([0.5 - x[:, 0], x[:, 0] - 0.5], 1)


class Copies(nn.Module):
    """Expects the second coordinate to be as the first one: the error of a row is half of their gap."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, 0], x[:, 0]], 1)


def pairs(n: int = 40) -> Tensor:
    """Rows of two coordinates that are alike up to 0.02."""
    draw = torch.Generator().manual_seed(0)
    first = torch.rand(n, 1, dtype=torch.float64, generator=draw) * 0.3 + 0.15
    return torch.cat([first, first + 0.02 * torch.rand(n, 1, dtype=torch.float64, generator=draw)], 1)


def test_an_attacker_who_knows_moves_both_coordinates() -> None:
    """Who does not know moves the first one and is found; who does gets through."""
    model, x = First(), pairs()
    y = torch.zeros(len(x), dtype=torch.int64)
    detector = ErrorBased(Copies()).fit(x, 0.05)
    plain = PGD(steps=20, random_start=False).run(model, x, Untargeted(y), eps=0.4)
    assert plain.counts.broken == len(x)
    assert bool(detector.flag(plain.x_adv).all())
    # Square goes to corners of the ball: there the gap is what it was, for two rows above the threshold.
    small_steps = PGD(steps=60, step_size=0.01)
    for attack, wanted in ((Square(steps=300), 38), (APGD(steps=40), 40), (small_steps, 40)):
        knows = attack_guarded(attack, model, detector, x, Untargeted(y), eps=0.4, rng=1)
        assert knows.counts.broken == wanted
        passed = knows.x_adv[knows.is_(Status.BROKEN)]
        assert bool((model(passed).argmax(1) == 1).all())
        assert not bool(detector.flag(passed).any())
    target = attack_guarded(APGD(steps=40), model, detector, x, Targeted(1 - y, y), eps=0.4)
    assert target.counts.broken == len(x)
    labels = CallableModel(lambda v: model(v).argmax(1), "labels")
    blind = attack_guarded(HopSkipJump(norm="l2", steps=2), labels, detector, x[:4], Untargeted(y[:4]), rng=1)
    assert blind.counts.broken > 0
    assert not bool(detector.flag(blind.x_adv[blind.is_(Status.BROKEN)]).any())
    report = detector_report(detector, x, plain.x_adv, knows)
    assert (report.found, report.adaptive_broken, report.adaptive_attacked) == (40, 40, 40)
    assert "40 of 40" in report.text().splitlines()[1]
    assert NOT_ADAPTIVE not in report.text()
    found = report.to_json()
    assert found["adaptive"]["success_rate"] == 1.0
    assert "adaptive_reason" not in found


def test_what_cannot_pass_holds() -> None:
    """Where the detector flags all that the model has wrong, no attack is a success."""

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    x = pairs()
    y = torch.zeros(len(x), dtype=torch.int64)
    detector = ErrorBased(Nothing(), threshold=0.3)  # of (x₁ + x₂) / 2: class 1 needs x₁ > 0.5
    narrow = attack_guarded(PGD(steps=20), First(), detector, x, Untargeted(y), eps=0.05)
    assert narrow.counts.held == len(x)
    assert bool((narrow.queries > 60).all())  # all three weights were tried
    one = attack_guarded(PGD(steps=20), First(), detector, x, Untargeted(y), eps=0.05, weights=(1.0,))
    assert bool((one.queries < narrow.queries).all())


def test_the_flagged_class_wins_exactly_where_the_detector_flags() -> None:
    model, x = small(torch.float32), images(40, torch.float32)
    benign = images(20, torch.float32, seed=7)
    members = (ErrorBased(halves), SpatialSmoothing(model, 3, layout="nchw"))
    for detector in (*members, Ensemble(members, "any")):
        fitted = detector.fit(benign, 0.3)
        scores = torch.cat([fitted.score(x), fitted.score(benign)])
        others = (float(scores[0]), math.nextafter(float(scores[1]), -math.inf))
        for limit in (fitted.limit, *others[: 0 if isinstance(fitted, Ensemble) else 2]):
            fitted = replace(fitted, threshold=limit)
            outputs = Guarded(model, fitted)(x)
            assert outputs.shape == (40, 5)
            assert torch.equal(outputs[:, :4], as_model(model)(x))
            flagged = outputs.argmax(1) == 4
            assert torch.equal(flagged, fitted.flag(x))
            y = torch.zeros(40, dtype=torch.int64)
            wrong = outputs[:, :4].argmax(1) != 0
            goal = Unnoticed(Untargeted(y))
            assert torch.equal(goal.reached(outputs), wrong & ~flagged)
            assert torch.equal(
                goal.loss(outputs, "margin") > 0, wrong & ~flagged & (outputs[:, 4] < outputs[:, :4].amax(1))
            )


def test_the_loss_counts_what_is_missing_and_then_what_is_to_spare() -> None:
    outputs = torch.tensor(
        [[3.0, 1.0, 5.0], [3.0, 1.0, 2.0], [1.0, 3.0, 5.0], [1.0, 3.0, 2.5], [1.0, 3.0, 0.0]]
    )  # the last column is the flag
    goal = Unnoticed(Untargeted(torch.zeros(5, dtype=torch.int64)))
    assert goal.loss(outputs).tolist() == [-4.0, -2.0, -2.0, 0.5, 2.0]
    assert goal.reached(outputs).tolist() == [False, False, False, True, True]
    assert goal.of(torch.tensor([3])).loss(outputs[3:4], "margin").tolist() == [0.5]
    assert not goal.targeted
    assert len(goal) == 5


def test_a_detector_with_a_memory_is_not_one_target() -> None:
    detector = Similarity(k=1, window=5).fit(pairs(), 0.2)
    for each in (detector, Ensemble((Similarity(k=1, window=5),)).fit(pairs(), 0.2)):
        with pytest.raises(ConfigError, match="earlier queries"):
            Guarded(First(), each)
    with pytest.raises(ConfigError, match="earlier queries"):
        detector.traced(pairs())
    with pytest.raises(ConfigError, match="fitted before"):
        Guarded(First(), ErrorBased(Copies()))
    blind = RegionBased(CallableModel(lambda v: v[:, 0].long(), "labels"), 0.1).fit(pairs(), 0.2)
    with pytest.raises(ConfigError, match="needs a gradient"):
        attack_guarded(
            PGD(), First(), blind, pairs(), Untargeted(torch.zeros(40, dtype=torch.int64)), eps=0.1
        )


def test_without_an_attacker_who_knows_the_report_says_so() -> None:
    x = pairs()
    detector = ErrorBased(Copies()).fit(x, 0.05)
    far = x + torch.tensor([0.3, 0.0])
    report = detector_report(detector, x, far)
    assert report.text().splitlines()[1] == "not evaluated against an adaptive attacker"
    found = report.to_json()
    assert found["adaptive"] is None
    assert found["adaptive_reason"] == "not evaluated against an adaptive attacker"
    assert found["roc"]["auc"] == 1.0
    assert found["roc"]["auc_ci95"][0] < 1.0
    assert (found["name"], found["fpr"]) == ("ErrorBased", 0.05)
    assert found["false_alarm_rate"] == 2 / 40
    assert found["detection_rate"] == 1.0
