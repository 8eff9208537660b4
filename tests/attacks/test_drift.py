"""Drift: SciPy's test, closed forms of MMD and Mahalanobis distances, and laws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial import distance
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from mycelia.attacks.drift import (
    ImageDrift,
    KNearest,
    Mahalanobis,
    SeriesDrift,
    calibrated,
    energy,
    ks_test,
    max_softmax,
    mmd_squared,
    mmd_test,
)
from mycelia.attacks.drift.images import k_means
from mycelia.engine.errors import ConfigError, DataError


def normal(n: int, d: int, seed: int, shift: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d)) + shift


# --- Kolmogorov and Smirnov -----------------------------------------------------------------------


def test_ks_is_scipys_for_each_feature_with_bonferroni() -> None:
    one, two = normal(40, 5, 0), normal(55, 5, 1) + np.array([0, 0, 2.0, 0, 0])
    found = ks_test(torch.from_numpy(one), two, alpha=0.01)
    each = [stats.ks_2samp(one[:, k], two[:, k]) for k in range(5)]
    assert found.p_values == pytest.approx([one.pvalue for one in each])
    assert found.p == pytest.approx(5 * min(one.pvalue for one in each))
    assert found.drift == (min(one.pvalue for one in each) <= 0.01 / 5)
    assert found.drift
    largest = 0.0
    for a, b in zip(one.T, two.T, strict=True):  # by definition
        for at in (*a, *b):
            largest = max(largest, abs(float((a <= at).mean() - (b <= at).mean())))
    assert found.statistic == pytest.approx(largest)


def test_ks_of_samples_apart_is_the_chance_of_that_order() -> None:
    """All of one before all of the other: two of the binomial(2n, n) orders."""
    for n in (3, 6):
        found = ks_test(np.arange(n), np.arange(n) + 100.0)
        assert found.statistic == 1
        assert found.p == pytest.approx(2 / math.comb(2 * n, n))


def test_ks_keeps_its_level() -> None:
    wrong = sum(ks_test(normal(30, 4, 2 * k), normal(30, 4, 2 * k + 1)).drift for k in range(200))
    assert wrong <= stats.binom.ppf(0.9999, 200, 0.05)


# --- MMD ------------------------------------------------------------------------------------------


def test_mmd_by_hand() -> None:
    """Points 0, 1 beside 3, 5 with σ = 1: kernels written out."""

    def k(a: float, b: float) -> float:
        return math.exp(-((a - b) ** 2) / 2)

    expected = k(0, 1) + k(3, 5) - 2 / 4 * sum(k(a, b) for a in (0, 1) for b in (3, 5))
    assert mmd_squared([[0.0], [1.0]], [[3.0], [5.0]], bandwidth=1.0) == pytest.approx(expected)


def test_mmd_of_normal_laws_is_the_closed_form() -> None:
    """E k(x, x′) for differences N(m, 2) and a Gaussian kernel is √(σ²/(σ²+2)) exp(−m²/2(σ²+2)) per axis."""
    for shift, sigma in ((0.0, 1.0), (1.0, 1.5), (2.0, 0.7)):
        s = sigma**2
        expected = 2 * (s / (s + 2)) * (1 - math.exp(-2 * shift**2 / (2 * (s + 2))))
        found = [
            mmd_squared(normal(400, 2, 2 * k), normal(400, 2, 2 * k + 1, shift), bandwidth=sigma)
            for k in range(10)
        ]
        assert abs(np.mean(found) - expected) < 4 * np.std(found, ddof=1) / 10**0.5
        assert np.std(found) < 0.03


def test_mmd_moves_with_nothing_that_leaves_distances() -> None:
    one, two = normal(20, 3, 0), normal(25, 3, 1, 0.5)
    turn = np.linalg.qr(normal(3, 3, 2))[0]
    first = mmd_squared(one, two, bandwidth=1.3)
    assert mmd_squared(two, one, bandwidth=1.3) == pytest.approx(first)
    assert mmd_squared(one @ turn + 1e3, two @ turn + 1e3, bandwidth=1.3) == pytest.approx(first, abs=1e-9)
    assert mmd_squared(7 * one, 7 * two, bandwidth=7 * 1.3) == pytest.approx(first)


def test_mmd_counts_permutations() -> None:
    """Beside all ways to deal six rows: the share of random ones with as much is near theirs."""
    one, two = normal(3, 2, 0), normal(3, 2, 1, 1.0)
    both = np.concatenate([one, two])
    observed = mmd_squared(one, two, bandwidth=1.0)
    as_much = []
    for chosen in itertools.combinations(range(6), 3):
        others = [k for k in range(6) if k not in chosen]
        as_much.append(mmd_squared(both[list(chosen)], both[others], bandwidth=1.0) >= observed - 1e-12)
    share = np.mean(as_much)
    found = mmd_test(one, two, bandwidth=1.0, permutations=4000)
    assert found.statistic == pytest.approx(observed)
    assert found.p == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5 + 1e-3)


def test_mmd_keeps_its_level_and_sees_a_shift() -> None:
    wrong = sum(
        mmd_test(normal(15, 3, 2 * k), normal(15, 3, 2 * k + 1), permutations=99, rng=k).drift
        for k in range(150)
    )
    assert wrong <= stats.binom.ppf(0.9999, 150, 0.05)
    seen = mmd_test(normal(60, 3, 0), normal(60, 3, 1, 1.0), permutations=199, alpha=0.01)
    assert seen.p == 1 / 200
    assert seen.drift
    # A law with the same mean and the same variance of each feature, which no test of means would see.
    two = normal(200, 2, 5)
    two[:, 1] = np.sign(normal(200, 1, 6)[:, 0]) * np.abs(two[:, 0])
    assert mmd_test(normal(200, 2, 7), two, permutations=199).drift


def test_the_same_seed_gives_the_same_p() -> None:
    one, two = normal(20, 3, 0), normal(20, 3, 1, 0.2)
    first, again, other = (mmd_test(one, two, rng=seed).p for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_constant_samples() -> None:
    same = np.zeros((20, 2))
    assert not ks_test(same, same).drift
    assert not mmd_test(same, same).drift


def test_samples_that_are_refused() -> None:
    with pytest.raises(DataError, match="3 and 4 features"):
        ks_test(normal(5, 3, 0), normal(5, 4, 0))
    with pytest.raises(DataError, match="not finite"):
        ks_test([1.0, math.nan], [1.0])
    with pytest.raises(DataError, match="at least 2"):
        mmd_test([[1.0]], [[1.0], [2.0]])
    with pytest.raises(ConfigError, match="permutations=99"):
        mmd_test(normal(5, 3, 0), normal(5, 3, 0), permutations=98, alpha=0.01)
    with pytest.raises(ConfigError, match="bandwidth"):
        mmd_test(normal(5, 3, 0), normal(5, 3, 0), bandwidth=0.0)
    with pytest.raises(ConfigError, match="level"):
        ks_test(normal(5, 3, 0), normal(5, 3, 0), alpha=1.5)


# --- scores ---------------------------------------------------------------------------------------


def test_scores_of_outputs() -> None:
    z = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(7.0), 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert max_softmax(z).tolist() == pytest.approx([0.75, 0.3])
    assert energy(z).tolist() == pytest.approx([-math.log(4), -math.log(10)])
    assert energy(z, 2.0).tolist() == pytest.approx([-2 * math.log(4), -2 * math.log(3 + 7**0.5)])
    shifted = torch.tensor([[1000.0, 999.0]])
    assert energy(shifted).item() == pytest.approx(-1000 - math.log(1 + math.exp(-1)))
    with pytest.raises(ConfigError, match="temperature"):
        energy(z, 0.0)


def test_mahalanobis_is_scipys_distance_to_the_nearest_mean() -> None:
    rows = normal(60, 3, 0) @ normal(3, 3, 1)
    y = np.arange(60) % 3
    rows += np.array([[0, 0, 0], [9, 0, 0], [0, 9, 9]])[y]
    fitted = Mahalanobis.fit(torch.from_numpy(rows), torch.from_numpy(y) * 5, ridge=0.0)
    means = np.array([rows[y == c].mean(0) for c in range(3)])
    inverse = np.linalg.inv(np.cov((rows - means[y]).T, bias=True))
    at = normal(8, 3, 2, 2.0)
    expected = [min(distance.mahalanobis(row, mean, inverse) ** 2 for mean in means) for row in at]
    assert fitted(torch.from_numpy(at)).tolist() == pytest.approx(expected)
    assert fitted(torch.from_numpy(means)).tolist() == pytest.approx([0, 0, 0], abs=1e-9)
    # The mean over the data of one class is the number of features, as the trace of Σ⁻¹ Σ.
    one = Mahalanobis.fit(torch.from_numpy(rows), ridge=0.0)
    assert float(one(torch.from_numpy(rows)).mean()) == pytest.approx(3)


def test_mahalanobis_does_not_change_with_units() -> None:
    rows, at = (torch.from_numpy(normal(n, 3, n)) for n in (50, 5))
    turn = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 0.0], [0.0, -1.0, 0.5]], dtype=torch.float64)
    one = Mahalanobis.fit(rows, ridge=0.0)(at)
    assert torch.allclose(Mahalanobis.fit(rows @ turn + 4, ridge=0.0)(at @ turn + 4), one)


def test_a_row_that_differs_where_no_benign_one_does_is_far() -> None:
    rows = torch.from_numpy(normal(50, 3, 0))
    rows[:, 2] = 1.0
    usual, odd = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.0, 0.0, 1.5]])
    fitted = Mahalanobis.fit(rows)
    assert float(fitted(odd)) > 1000 * float(fitted(rows).max()) > 1000 * float(fitted(usual))
    with pytest.raises(DataError, match="ridge"):
        Mahalanobis.fit(rows, ridge=0.0)
    with pytest.raises(DataError, match="vary"):
        Mahalanobis.fit(torch.ones(5, 2))


@pytest.mark.parametrize("unit", [True, False])
def test_k_nearest_is_scikit_learns(unit: bool) -> None:
    rows, at = normal(50, 4, 0), normal(9, 4, 1)
    fitted = KNearest.fit(torch.from_numpy(rows), 5, unit=unit)
    if unit:
        rows, at = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (rows, at))
    expected = NearestNeighbors(n_neighbors=5).fit(rows).kneighbors(at)[0][:, 4]
    assert fitted(torch.from_numpy(normal(9, 4, 1))).tolist() == pytest.approx(expected)
    with pytest.raises(ConfigError, match="from 1 to 50"):
        KNearest.fit(torch.from_numpy(rows), 51)


def test_a_score_depends_on_its_row_only() -> None:
    rows, at = (torch.from_numpy(normal(n, 4, n)) for n in (50, 9))
    for score in (max_softmax, energy, Mahalanobis.fit(rows), KNearest.fit(rows, 3)):
        whole = score(at)  # type: ignore[operator]
        for row in range(9):
            assert torch.allclose(score(at[row : row + 1]), whole[row])  # type: ignore[operator]
        assert len(score(at[:0])) == 0  # type: ignore[operator]


def test_thresholds_flag_no_more_than_they_may() -> None:
    rows = torch.from_numpy(normal(100, 4, 0))
    fitted = Mahalanobis.fit(rows[:40])
    for fpr in (0.05, 0.29, 0.999):
        detector = calibrated(fitted, rows[40:], fpr)
        assert int(detector.flag(rows[40:]).sum()) == math.floor(fpr * 60)
        assert bool(detector.flag(rows[:1] + 100))
    with pytest.warns(match=r"0\.0166"):
        detector = calibrated(fitted, rows[40:], 0.01)
    assert not bool(detector.flag(rows[40:]).any())


# --- series ---------------------------------------------------------------------------------------


def wave(steps: int, seed: int, *, period: float = 12.0) -> Tensor:
    noise = torch.from_numpy(np.random.default_rng(seed).normal(0, 0.1, (steps, 2)))
    phase = 2 * math.pi * torch.arange(steps, dtype=torch.float64)[:, None] / period
    return torch.cat([phase.sin(), phase.cos()], 1) + noise


SERIES = SeriesDrift(window=16, size=12)


def test_a_score_uses_no_later_data_and_no_earlier_than_its_window() -> None:
    fitted = SERIES.fit(wave(400, 0), 0.05)
    series = wave(80, 1)
    whole = fitted.score(series)
    assert whole.shape == (80,)
    assert whole.isnan().nonzero()[:, 0].tolist() == list(range(15))
    for t in (15, 40, 79):
        later, earlier = series.clone(), series.clone()
        later[t + 1 :] = 50.0
        assert torch.allclose(fitted.score(later)[t], whole[t])
        assert torch.allclose(fitted.score(series[: t + 1])[t], whole[t])
        earlier[: t - 15] = 50.0
        assert torch.allclose(fitted.score(earlier)[t], whole[t])
        if t > 15:
            earlier[t - 15] += 1.0  # the first step of the window counts
            assert not torch.allclose(fitted.score(earlier)[t], whole[t], rtol=1e-9)


def test_a_changed_rhythm_is_seen_where_it_begins() -> None:
    """Values of each step are as before, only their order in time is another one."""
    fitted = SERIES.fit(wave(800, 0), 0.02)
    series = torch.cat([wave(240, 1), wave(120, 2, period=7.0)])
    flags = fitted.flag(series)
    assert float(flags[:240].double().mean()) < 0.1
    assert float(flags[256:].double().mean()) > 0.9
    assert not bool(flags[:15].any())


def test_series_thresholds_keep_their_rate() -> None:
    series = wave(300, 0)
    for fpr in (0.05, 0.2):
        fitted = SERIES.fit(series, fpr)
        late = fitted.flag(series[150:])
        assert int(late.sum()) == math.floor(fpr * 135)


def test_units_of_channels_do_not_matter() -> None:
    scale, shift = torch.tensor([100.0, 0.01]), torch.tensor([7.0, -3.0])
    one = SERIES.fit(wave(300, 0), 0.05).score(wave(50, 1))
    two = SERIES.fit(wave(300, 0) * scale + shift, 0.05).score(wave(50, 1) * scale + shift)
    assert torch.allclose(one, two, equal_nan=True)


def test_one_channel_short_series_and_seeds() -> None:
    fitted = SERIES.fit(wave(200, 0)[:, 0], 0.1, rng=1)
    assert bool(fitted.score(torch.zeros(5)).isnan().all())
    again, other = (SERIES.fit(wave(200, 0)[:, 0], 0.1, rng=seed) for seed in (1, 2))
    assert again.threshold == fitted.threshold != other.threshold
    radius = np.abs(np.linalg.eigvals(fitted.recurrent.numpy())).max()
    assert radius == pytest.approx(SERIES.radius)
    with pytest.raises(DataError, match="two windows of 16"):
        SERIES.fit(wave(33, 0), 0.1)
    with pytest.raises(DataError, match="1, as fitted"):
        fitted.score(wave(40, 1))
    for bad in ({"window": 1}, {"size": 0}, {"radius": 1.0}, {"leak": 0.0}, {"ridge": -1.0}):
        with pytest.raises(ConfigError, match="window at least 2"):
            SeriesDrift(**bad)  # type: ignore[arg-type]


# --- images ---------------------------------------------------------------------------------------

CORNERS = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]], dtype=torch.float64)


def clouds(n: int, seed: int, spread: float = 0.5) -> Tensor:
    draw = np.random.default_rng(seed)
    return CORNERS[draw.integers(0, 3, n)] + torch.from_numpy(draw.normal(0, spread, (n, 2)))


def test_k_means_finds_clouds_and_is_at_rest() -> None:
    rows = clouds(150, 0)
    for seed in range(5):
        centres = k_means(rows, 3, seed)
        assert float(torch.cdist(CORNERS, centres).amin(1).max()) < 0.3
        nearest = torch.cdist(rows, centres).argmin(1)
        means = torch.stack([rows[nearest == c].mean(0) for c in range(3)])
        assert torch.allclose(means, centres)
    assert torch.allclose(k_means(rows, 1)[0], rows.mean(0))
    few = rows[:4]
    assert torch.equal(k_means(few, 4).sort(0).values, few.sort(0).values)  # a centre for each row
    assert len(k_means(torch.zeros(5, 2), 3)) == 3
    with pytest.raises(ConfigError, match="number of rows"):
        k_means(few, 5)


def test_images_far_from_all_clusters_are_flagged() -> None:
    fitted = ImageDrift(clusters=3).fit(clouds(400, 0).view(400, 1, 1, 2), 0.05)
    assert float(fitted.flag(clouds(300, 1)).double().mean()) < 0.12
    odd = torch.tensor([[5.0, 5.0], [20.0, 0.0]], dtype=torch.float64).view(2, 1, 1, 2)
    assert fitted.flag(odd).tolist() == [True, True]
    expected = torch.cdist(odd.flatten(1), fitted.centres).amin(1)
    assert torch.allclose(fitted.score(odd), expected)
    assert int((fitted.reference.amin(1) > fitted.threshold).sum()) == 10  # 0.05 of the other 200


def test_batches_of_images_are_tested_together() -> None:
    """More of one cloud: no image is odd, all of them together are."""
    fitted = ImageDrift(clusters=3).fit(clouds(400, 0), 0.05)
    same = clouds(150, 1)
    more = torch.cat([clouds(50, 2), CORNERS[1] + 0.5 * torch.from_numpy(normal(100, 2, 3))])
    assert float(fitted.flag(more).double().mean()) < 0.15
    for by in ("ks", "mmd"):
        assert not fitted.test(same, by=by, alpha=0.001).drift  # type: ignore[arg-type]
        assert fitted.test(more, by=by, alpha=0.001).drift  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mmd"):
        fitted.test(same, by="chi")  # type: ignore[arg-type]


def test_modules_give_features_in_evaluation_mode() -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.9)).double()
    fitted = ImageDrift(features=module, clusters=3).fit(clouds(100, 0), 0.1)
    assert torch.allclose(fitted.score(clouds(20, 1)), fitted.score(clouds(20, 1)))
    assert all(each.training for each in module.modules())
    assert int(module[1].num_batches_tracked) == 0
    whole = fitted.score(clouds(20, 1))
    assert torch.allclose(fitted.score(clouds(20, 1)[3:4]), whole[3:4])


def test_features_are_of_the_callers_choice() -> None:
    drift = ImageDrift(features=lambda images: images.flatten(1).mean(1, keepdim=True), clusters=2)
    fitted = drift.fit(torch.rand(60, 3, 4, 4, generator=torch.Generator().manual_seed(0)), 0.1, rng=3)
    assert fitted.centres.shape == (2, 1)
    assert bool(fitted.flag(torch.ones(1, 3, 4, 4)))
    with pytest.raises(DataError, match="at least 20"):
        ImageDrift().fit(clouds(19, 0), 0.1)
    with pytest.raises(DataError, match="1, as fitted"):
        ImageDrift(features=lambda images: images.flatten(1), clusters=2).fit(torch.rand(60, 1), 0.1).score(
            torch.rand(5, 2)
        )
    with pytest.raises(ConfigError, match="0 clusters"):
        ImageDrift(clusters=0)
