"""Detectors of backdoors and of odd activations, and filters of poison: closed forms and planted worlds."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.cluster import KMeans
from sklearn.decomposition import FastICA
from sklearn.metrics import silhouette_score
from torch import Tensor, nn

from mycelia.attacks import PGD, Attack, Square, Status, Untargeted
from mycelia.attacks.detectors import (
    STRIP,
    ActivationClassifier,
    SubsetScanning,
    activation_clustering,
    activations,
    roc,
    spectral_signature,
)
from mycelia.attacks.detectors.classifier import ridge_left_out
from mycelia.attacks.detectors.scanning import Statistic, Tail, scan
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks import test_detector_laws as laws
from tests.attacks.detector_members import stepped_members
from tests.attacks.worlds import affine, images, small

STEPPED = pytest.mark.parametrize("name", sorted(stepped_members()))


def uniform(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.rand(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def normal(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- laws of detectors of one row, whose gradient is not the slope of the score -------------------------


@STEPPED
def test_a_score_is_the_rows_own(name: str) -> None:
    laws.test_a_score_is_the_rows_own(name)


@STEPPED
@pytest.mark.parametrize("attack", [PGD(steps=8), Square(steps=20)], ids=["pgd", "square"])
def test_an_attack_on_both_is_wrong_and_unseen(name: str, attack: Attack) -> None:
    laws.test_an_attack_on_both_is_wrong_and_unseen(name, attack)


@STEPPED
def test_a_gradient_leads_to_lower_scores(name: str) -> None:
    """It stands in for a slope that there is not: the value stays, and steps against it help most rows."""
    detector = laws.fitted(name)
    x = images(30, seed=8)
    before = detector.score(x)
    point = x.clone()
    with detector.quiet():
        for _ in range(10):
            leaf = point.clone().requires_grad_()
            traced = detector.traced(leaf)
            assert torch.allclose(traced.detach(), detector.score(point), atol=1e-9)
            (grad,) = torch.autograd.grad(traced.sum(), leaf)
            assert bool(torch.isfinite(grad).all())
            point = (point - 0.02 * grad.sign()).clamp(0, 1)
    assert float((detector.score(point) < before).double().mean()) > 0.9


# --- STRIP ----------------------------------------------------------------------------------------------


class Backdoored(nn.Module):
    """The class is the largest of four coordinates; where the last one is above 0.9 it is class 0."""

    def forward(self, x: Tensor) -> Tensor:
        trigger = 200 * (x[:, 4:] - 0.9).relu()
        return 8 * x[:, :4] + torch.cat([trigger, torch.zeros_like(x[:, :3])], 1)


def triggered(x: Tensor) -> Tensor:
    found = x.clone()
    found[:, 4] = 1.0
    return found


def untriggered(n: int, seed: int = 0) -> Tensor:
    x = uniform(n, 5, seed)
    x[:, 4] *= 0.1
    return x


def test_a_trigger_outlasts_what_is_laid_over_it() -> None:
    detector = STRIP(Backdoored(), 20).fit(untriggered(200), 0.02, rng=1)
    clean = untriggered(200, 1)
    assert bool(detector.flag(triggered(clean)).all())
    assert int(detector.flag(clean).sum()) <= stats.binom.ppf(0.999, 200, 0.05)
    assert roc(detector.score(clean), detector.score(triggered(clean))).auc > 0.999
    # Without a backdoor the same pattern is nothing special.
    harmless = STRIP(lambda x: 8 * x[:, :4], 20).fit(untriggered(200), 0.02, rng=1)
    assert int(harmless.flag(triggered(clean)).sum()) <= stats.binom.ppf(0.999, 200, 0.05)


def test_the_score_is_a_mean_entropy_in_bits() -> None:
    model, pool, x = affine(4, 10), uniform(6, 10), uniform(5, 10, 1)
    detector = STRIP(model, 100, (0.5, 0.7), bounds=(0.1, 0.9)).fit(pool, 0.2)
    for row, score in zip(x, detector.score(x), strict=True):
        with torch.no_grad():
            outputs = model((0.5 * row + 0.7 * pool).clamp(0.1, 0.9)).softmax(1).numpy()
        assert float(score) == pytest.approx(-stats.entropy(outputs, axis=1, base=2).mean(), rel=1e-12)
    flat = STRIP(lambda x: torch.zeros(len(x), 8, dtype=x.dtype), 3).fit(pool, 0.2)
    assert flat.score(x).tolist() == pytest.approx([-3.0] * 5)
    sure = STRIP(lambda x: torch.eye(8, dtype=x.dtype)[[0] * len(x)] * 1e5, 3).fit(pool, 0.2)
    assert sure.score(x).tolist() == [0.0] * 5


def test_a_row_is_not_laid_over_itself() -> None:
    """Calibration leaves each row out: the score of benign row i is that with the others."""
    model, pool = affine(4, 10), uniform(6, 10)
    scores = STRIP(model, 100).fit(pool, 0.2).score(pool)
    for place in range(6):
        others = pool[torch.arange(6) != place]
        alone = STRIP(model, 100).fit(others, 0.2).score(pool[place : place + 1])
        assert float(scores[place]) == pytest.approx(float(alone), rel=1e-12)


def test_draws_are_without_replacement_and_fair() -> None:
    pool = torch.eye(8, dtype=torch.float64)
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    detector = STRIP(model, 3, (1e-9, 1.0)).fit(pool, 0.2, rng=5)
    seen.clear()
    detector.score(uniform(800, 8, 3))
    picked = torch.cat([each.round().view(-1, 3, 8) for each in seen])
    assert picked.shape == (800, 3, 8)
    assert float(picked.sum(1).max()) == 1.0
    counts = picked.sum((0, 1))
    assert float(counts.sum()) == 2400
    assert float((counts - 300).abs().max()) < 4 * math.sqrt(800 * 3 / 8 * 5 / 8)


def test_strip_refuses_what_it_cannot_blend() -> None:
    for settings in ({"m": 0}, {"weights": (0.0, 1.0)}, {"weights": (1.0, math.inf)}):
        with pytest.raises(ConfigError, match="at least 1"):
            STRIP(affine(), **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="laid over inputs"):
        STRIP(affine()).score(uniform(2, 10))
    with pytest.raises(DataError, match="all the same"):
        STRIP(affine()).fit(torch.ones(5, 10), 0.2)


# --- subset scanning ------------------------------------------------------------------------------------


def kl(x: float, y: float) -> float:
    return (x * math.log(x / y) if x else 0.0) + ((1 - x) * math.log((1 - x) / (1 - y)) if x < 1 else 0.0)


def exhaustive(p: list[float], statistic: Statistic, alpha_max: float) -> float:
    """The definition: every subset, every level at which a count changes."""
    best = 0.0
    for size in range(1, len(p) + 1):
        for subset in itertools.combinations(p, size):
            for level in {each for each in p if each <= alpha_max}:
                inside = sum(each <= level for each in subset)
                if inside <= size * level:
                    continue
                if statistic == "berk-jones":
                    value = size * kl(inside / size, level)
                else:
                    value = (inside - size * level) / math.sqrt(size * level * (1 - level))
                best = max(best, value)
    return best


@pytest.mark.parametrize("statistic", ["berk-jones", "higher-criticism"])
@pytest.mark.parametrize("alpha_max", [0.05, 0.3, 0.9])
def test_the_scan_finds_the_best_of_all_subsets(statistic: Statistic, alpha_max: float) -> None:
    draw = random.Random(3)
    for _ in range(10):
        p = [draw.choice([0.01, 0.04, 0.2, draw.uniform(0.001, 1), draw.uniform(0.001, 1)]) for _ in range(7)]
        score, count = scan(torch.tensor([p], dtype=torch.float64), statistic, alpha_max)
        assert float(score) == pytest.approx(exhaustive(p, statistic, alpha_max), rel=1e-12)
        assert (int(count) == 0) == (min(p) > alpha_max)


@pytest.mark.parametrize("tail", ["above", "below", "both"])
def test_p_values_are_shares_of_benign_activations(tail: Tail) -> None:
    """Of one activation the score is −log p, up to p = alpha_max; a benign row does not count itself."""
    benign = normal(39, 1)
    detector = SubsetScanning(nn.Identity(), "", tail=tail, alpha_max=0.999).fit(benign, 0.1)
    x = torch.cat([normal(20, 1, 1), torch.tensor([[9.0], [-9.0]], dtype=torch.float64), benign[:2]])

    def share(value: float, others: list[float]) -> float:
        above = (1 + sum(each >= value for each in others)) / 40
        below = (1 + sum(each <= value for each in others)) / 40
        return {"above": above, "below": below, "both": min(1.0, 2 * min(above, below))}[tail]

    known = benign[:, 0].tolist()
    wanted = [-math.log(share(value, known)) for value in x[:, 0].tolist()]
    assert detector.score(x).tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    left = [-math.log(share(value, known[:i] + known[i + 1 :])) for i, value in enumerate(known)]
    assert detector.benign_scores(benign).tolist() == pytest.approx(left, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("statistic", ["berk-jones", "higher-criticism"])
@pytest.mark.parametrize(("tail", "sign"), [("above", 1), ("below", -1), ("both", -1)])
def test_a_planted_group_of_shifted_activations_is_found(statistic: Statistic, tail: Tail, sign: int) -> None:
    """Twelve of sixty activations moved by two deviations, other ones in each row; none is extreme alone."""
    detector = SubsetScanning(nn.Identity(), "", statistic, tail).fit(normal(300, 60), 0.05)
    clean, moved = normal(200, 60, 1), normal(200, 60, 2)
    chosen = uniform(200, 60, 3).argsort(1)[:, :12]
    moved.scatter_add_(1, chosen, torch.full_like(chosen, 2 * sign, dtype=torch.float64))
    assert int(detector.flag(clean).sum()) <= stats.binom.ppf(0.999, 200, 0.08)
    assert roc(detector.score(clean), detector.score(moved)).auc > 0.9
    against = {"above": "below", "below": "above"}.get(tail)
    if against is not None:  # what is moved the other way is less suspicious than nothing
        blind = SubsetScanning(nn.Identity(), "", statistic, against).fit(normal(300, 60), 0.05)  # type: ignore[arg-type]
        assert roc(blind.score(clean), blind.score(moved)).auc < 0.5


@pytest.mark.parametrize("tail", ["above", "below", "both"])
def test_activations_that_are_always_one_number_say_nothing(tail: Tail) -> None:
    benign, x = (torch.cat([normal(n, 4, n), torch.zeros(n, 100, dtype=torch.float64)], 1) for n in (50, 5))
    whole = SubsetScanning(nn.Identity(), "", tail=tail).fit(benign, 0.1)
    alive = SubsetScanning(nn.Identity(), "", tail=tail).fit(benign[:, :4], 0.1)
    assert torch.equal(whole.score(x), alive.score(x[:, :4]))
    assert whole.threshold == alive.threshold


def test_scanning_refuses() -> None:
    for settings in ({"statistic": "t"}, {"tail": "left"}, {"alpha_max": 0.0}, {"alpha_max": 1.0}):
        with pytest.raises(ConfigError):
            SubsetScanning(small(), "layers", **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'layers"):
        SubsetScanning(small(), "layer.2").fit(images(20), 0.1)
    with pytest.raises(ConfigError, match="no benign activations"):
        SubsetScanning(small(), "layers").score(images(2))
    with pytest.raises(DataError, match="one other row"):
        SubsetScanning(small(), "layers").fit(images(1), 0.1)


# --- classifier -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [1e-6, 0.1, 10.0])
@pytest.mark.parametrize("d", [3, 30])
@pytest.mark.parametrize("pairs", [False, True])
def test_rows_are_left_out_as_if_by_fitting_again(ridge: float, d: int, pairs: bool) -> None:
    z, y = normal(12, d), normal(12, 1, 1)[:, 0]
    weight = uniform(12, 1, 2)[:, 0] + 0.1
    weight = weight / weight.sum()

    def solved(rows: Tensor) -> Tensor:
        design = torch.cat([torch.ones(len(rows), 1, dtype=torch.float64), z[rows]], 1)
        penalty = ridge * torch.eye(d + 1, dtype=torch.float64)
        penalty[0, 0] = 0.0
        scaled = design.T * weight[rows]
        return torch.linalg.solve(scaled @ design + penalty, scaled @ y[rows])

    partner = torch.tensor([4, 1, 2, 3, 0, 11, 6, 8, 7, 9, 10, 5]) if pairs else torch.arange(12)
    intercept, slope, left = ridge_left_out(z, y, weight, ridge, partner if pairs else None)
    whole = solved(torch.arange(12))
    assert torch.allclose(torch.cat([intercept[None], slope]), whole, rtol=1e-6, atol=1e-8)
    for place in range(12):
        others = (torch.arange(12) != place) & (torch.arange(12) != partner[place])
        found = solved(others.nonzero()[:, 0])
        wanted = float(found[0] + z[place] @ found[1:])
        assert float(left[place]) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_the_classifier_learns_what_is_shown_to_it() -> None:
    """Attacked rows lie on a ring around benign ones: random features see that, a plane does not."""

    def ring(n: int, seed: int) -> Tensor:
        angle = 2 * math.pi * uniform(n, 1, seed)
        return 3 * torch.cat([angle.cos(), angle.sin()], 1) + 0.3 * normal(n, 2, seed + 1)

    detector = ActivationClassifier(nn.Identity(), "").fit(normal(200, 2), 0.05, attacked=ring(200, 1))
    plane = ActivationClassifier(nn.Identity(), "", hidden=0).fit(normal(200, 2), 0.05, attacked=ring(200, 1))
    clean, attacked = normal(200, 2, 5), ring(200, 6)
    assert roc(detector.score(clean), detector.score(attacked)).auc > 0.95
    assert roc(plane.score(clean), plane.score(attacked)).auc < 0.65
    assert int(detector.flag(clean).sum()) <= stats.binom.ppf(0.999, 200, 0.08)


def test_calibration_does_not_know_its_own_row() -> None:
    """Where there is nothing to learn, and much to learn by heart, false alarms keep to the rate."""
    detector = ActivationClassifier(nn.Identity(), "").fit(normal(60, 100), 0.2, attacked=normal(60, 100, 1))
    alarms = int(detector.flag(normal(1000, 100, 2)).sum())
    assert alarms <= stats.binom.ppf(0.999, 1000, stats.beta.ppf(0.999, 13, 48))
    by_heart = detector.score(normal(60, 100)), detector.score(normal(60, 100, 1))
    assert roc(detector.score(normal(500, 100, 3)), detector.score(normal(500, 100, 4))).auc < 0.6
    assert roc(*by_heart).auc > 0.6


def test_the_classifier_makes_attacked_rows_itself() -> None:
    model, benign = small(), images(60, seed=3)
    attack = PGD(steps=10)
    detector = ActivationClassifier(model, "layers.5", attack, 0.3).fit(benign, 0.1, rng=4)
    own = Untargeted(model(benign).argmax(1))
    result = attack.run(model, benign, own, eps=0.3, rng=4)
    shown = result.x_adv[result.is_(Status.BROKEN)]
    origin = result.is_(Status.BROKEN).nonzero()[:, 0]
    order = torch.randperm(len(shown), generator=torch.Generator().manual_seed(0))
    given = ActivationClassifier(model, "layers.5").fit(
        benign, 0.1, rng=4, attacked=shown[order].numpy(), origin=origin[order].numpy()
    )
    assert torch.allclose(detector.score(benign), given.score(benign), atol=1e-6)
    assert detector.limit == pytest.approx(given.limit, abs=1e-6)
    fresh = images(60, seed=9)
    found = attack.run(model, fresh, Untargeted(model(fresh).argmax(1)), eps=0.3, rng=5)
    for each in (detector, given):
        assert roc(each.score(fresh), each.score(found.x_adv)).auc > 0.8


def test_near_copies_do_not_spoil_the_rate() -> None:
    """Attacked rows are benign ones, moved: what is left in of a pair would give away the other one."""
    shift = torch.zeros(50, dtype=torch.float64)
    shift[:5] = 0.6
    alarms = []
    for seed in range(4):
        benign = normal(200, 50, 10 * seed)
        detector = ActivationClassifier(nn.Identity(), "").fit(
            benign, 0.1, attacked=benign + shift, origin=torch.arange(200)
        )
        alarms.append(float(detector.flag(normal(1000, 50, 10 * seed + 1)).double().mean()))
    # The mean of four rates, each with the spread of 200 rows for calibration and of 1,000 new ones.
    spread = math.sqrt(0.1 * 0.9 * (1 / 200 + 1 / 1000) / 4)
    assert abs(sum(alarms) / 4 - 0.1) < 4 * spread


def test_the_classifier_refuses() -> None:
    with pytest.raises(ConfigError, match="neither attacked inputs nor an attack"):
        ActivationClassifier(small(), "layers").fit(images(20), 0.1)
    with pytest.raises(DataError, match="no attacked rows"):
        ActivationClassifier(small(), "layers", PGD(steps=2), 0.0).fit(images(20), 0.1)
    for origin in ([0, 0], [0], [0.0, 1.0], [0, 20]):
        with pytest.raises(DataError, match="origin"):
            ActivationClassifier(small(), "layers").fit(images(20), 0.1, attacked=images(2), origin=origin)
    with pytest.raises(ConfigError, match="hidden"):
        ActivationClassifier(small(), "layers", hidden=-1)
    with pytest.raises(ConfigError, match="learnt nothing"):
        ActivationClassifier(small(), "layers").score(images(2))


def test_activations_are_the_layers_output() -> None:
    model, x = small(), images(7)
    model.train()
    found = activations(model, "layers.2", x, batch=3)
    assert model.training
    model.eval()
    assert torch.allclose(found, model.layers[:3](x).flatten(1), atol=1e-12)
    assert torch.allclose(activations(model, "", x), model(x), atol=1e-12)


# --- poison ---------------------------------------------------------------------------------------------


def poisoned(share: float = 0.1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Two classes of 200 rows; in the second one some rows lie elsewhere. Activations, labels, poison."""
    rows = normal(400, 20, seed)
    labels = torch.arange(400) % 2
    rows[labels == 1] += 5
    poison = (labels == 1) & (torch.arange(400) < 400 * share)
    rows[poison, :3] -= 6
    return rows, labels, poison


@pytest.mark.parametrize("reduction", ["pca", "ica"])
def test_clusters_find_planted_poison(reduction: str) -> None:
    rows, labels, poison = poisoned()
    for by in ("silhouette", "size"):
        limits = {"silhouette": 0.05, "share": 0.35} if by == "silhouette" else {"share": 0.2}
        found = activation_clustering(rows, labels, components=3, reduction=reduction, by=by, **limits)  # type: ignore[arg-type]
        assert torch.equal(found.flagged[labels == 1], poison[labels == 1])
        assert [each.poisoned for each in found.classes] == [False, True]
        assert found.classes[1].share == pytest.approx(0.1)
        assert float(found.score[poison].min()) > 0 > float(found.score[(labels == 1) & ~poison].max())


def test_clusters_are_those_of_scikit_learn() -> None:
    rows, labels, _ = poisoned(0.3)
    rows, labels = rows[labels == 1], labels[labels == 1]
    found = activation_clustering(rows, labels, components=4, reduction="pca", by="size", share=0.5)
    centred = rows - rows.mean(0)
    points = (centred @ torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -4:]).numpy()
    peer = KMeans(2, n_init=10, random_state=0).fit_predict(points)
    small_one = peer == (peer.mean() < 0.5)
    assert (found.flagged.numpy() == small_one).all()
    assert found.classes[0].silhouette == pytest.approx(silhouette_score(points, peer), rel=1e-9)


def test_independent_components_have_the_distances_of_white_ones() -> None:
    """FastICA only rotates them, so that the silhouette of the same clusters is the same."""
    rows = normal(150, 6) ** 3
    rows[:40, 0] += 9
    found = activation_clustering(
        rows, torch.zeros(150, dtype=torch.int64), components=3, by="size", share=0.5
    )
    points = FastICA(3, whiten="unit-variance", random_state=0, max_iter=2000).fit_transform(rows.numpy())
    peer = silhouette_score(points, found.flagged.numpy())
    assert found.classes[0].silhouette == pytest.approx(peer, rel=1e-6)


def test_a_class_of_equal_rows_has_no_clusters() -> None:
    rows = torch.ones(9, 3)
    labels = torch.tensor([0] * 8 + [1])
    found = activation_clustering(rows, labels, by="size")
    assert not bool(found.flagged.any())
    assert [(each.label, each.rows, each.share) for each in found.classes] == [(0, 8, 0.0), (1, 1, 0.0)]
    assert not bool(spectral_signature(rows, labels, 0.1).score.any())


def test_filters_take_the_rows_in_any_order() -> None:
    rows, labels, _ = poisoned()
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    for run in (
        lambda a, y: activation_clustering(a, y, components=3, by="size"),
        lambda a, y: spectral_signature(a, y, 0.1),
    ):
        first, second = run(rows, labels), run(rows[order], labels[order])
        assert torch.allclose(second.score, first.score[order], atol=1e-9)
        assert torch.equal(second.flagged, first.flagged[order])
        again = run(rows.numpy() - 3, labels.numpy())
        assert torch.allclose(again.score, first.score, atol=1e-9)


def test_the_signature_is_the_top_singular_direction() -> None:
    rows, labels, poison = poisoned()
    found = spectral_signature(rows, labels, 0.1)
    for label in (0, 1):
        own = (labels == label).numpy()
        vector = np.linalg.eigh(np.cov(rows.numpy()[own].T))[1][:, -1]
        wanted = ((rows.numpy()[own] - rows.numpy()[own].mean(0)) @ vector) ** 2
        assert found.score.numpy()[own] == pytest.approx(wanted, rel=1e-8, abs=1e-10)
        assert int(found.flagged.numpy()[own].sum()) == 30  # 1.5 · 0.1 · 200
        assert float(found.score[own & found.flagged.numpy()].min()) >= float(
            found.score[own & ~found.flagged.numpy()].max()
        )
    assert bool(found.flagged[poison].all())
    # In one dimension the score is the squared distance to the mean.
    line = torch.tensor([[0.0], [1.0], [2.0], [9.0]], dtype=torch.float64)
    single = spectral_signature(line, torch.zeros(4, dtype=torch.int64), 0.25)
    assert single.score.tolist() == pytest.approx([9.0, 4.0, 1.0, 36.0])
    assert single.flagged.tolist() == [False, False, False, True]


def test_filters_refuse() -> None:
    rows, labels, _ = poisoned()
    for settings in (
        {"components": 0},
        {"reduction": "tsne"},
        {"by": "eye"},
        {"share": 0.6},
        {"silhouette": 2.0},
    ):
        with pytest.raises(ConfigError):
            activation_clustering(rows, labels, **settings)  # type: ignore[arg-type]
    for eps, factor in ((0.0, 1.5), (0.5, 1.5), (0.1, 0.5)):
        with pytest.raises(ConfigError):
            spectral_signature(rows, labels, eps, factor=factor)
    bad = rows.clone()
    bad[3, 2] = math.nan
    for given, kinds in ((bad, labels), (rows, labels[:-1]), (rows, labels.double()), (rows[:, 0], labels)):
        with pytest.raises(DataError):
            spectral_signature(given, kinds, 0.1)
