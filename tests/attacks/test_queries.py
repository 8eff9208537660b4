"""Attacks by queries: closed forms, special cases of their papers, and baselines at equal queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor, nn

from mycelia.attacks import (
    NES,
    ZOO,
    Attack,
    Boundary,
    CarliniWagner,
    GeoDA,
    HopSkipJump,
    OnePixel,
    Pixle,
    Pointwise,
    RandomNoise,
    SignOPT,
    SimBA,
    Square,
    Status,
    Targeted,
    Threshold,
    Untargeted,
    as_model,
)
from mycelia.attacks.evasion.evolution import evolve
from mycelia.attacks.evasion.geoda import shares_of_queries
from mycelia.attacks.evasion.grid import Grid, cosines, kept_frequencies
from mycelia.attacks.evasion.halfspace import smallest_step
from mycelia.attacks.norms import Norm
from mycelia.attacks.search import Search
from mycelia.engine.errors import ConfigError
from tests.attacks.closed import distances
from tests.attacks.digits import digits_mlp
from tests.attacks.worlds import Affine, affine, images, small

torch.set_num_threads(1)

LABEL: tuple[Attack, ...] = (SignOPT(), SignOPT(norm="linf"), GeoDA(), GeoDA(norm="l1"), GeoDA(norm="linf"))
SCORE: tuple[Attack, ...] = (
    SimBA(), SimBA(norm="linf", basis="dct"), OnePixel(), Threshold(), ZOO(), ZOO(coordinates=5),
    Pixle(steps=1000),
)  # fmt: skip


def plane(d: int = 10, seed: int = 7) -> Affine:
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(d, dtype=torch.float64, generator=draw)
    return Affine(torch.stack([-w / 2, w / 2]), torch.tensor([-0.1, 0.1], dtype=torch.float64))


def inputs(n: int, d: int = 10, seed: int = 3) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels_only(model: Any) -> Any:
    return as_model(lambda x: model(x).detach().argmax(1), "labels")


def trained(n: int) -> tuple[nn.Module, Tensor, Tensor]:
    model, x, y = digits_mlp()
    return model, x[:n], y[:n]


def name(attack: Attack) -> str:
    return f"{type(attack).__name__}-{attack.norm}"


class Counting:
    """Scores or labels, and all inputs that were given."""

    def __init__(self, *, labels: bool) -> None:
        self.labels = labels
        self.seen: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.append(x.clone())
        found = small()(x).detach()
        return found.argmax(1) if self.labels else found


# --- what all of them do with queries ---------------------------------------------------------------


@pytest.mark.parametrize("attack", [*LABEL, *SCORE], ids=name)
@pytest.mark.parametrize("limit", [1, 2, 7, 150])
def test_query_budget_is_exact(attack: Attack, limit: int) -> None:
    """Never a query more, and what is reported is what the model saw; score attacks use all of them."""
    x = images(6)
    y = small()(x).argmax(1)
    model = Counting(labels=attack in LABEL)
    given = as_model(model, "labels" if model.labels else "logits")
    result = attack.run(given, x, Untargeted(y), eps=0.02, rng=2, queries=limit)
    spent = result.queries - 1  # the first is the look at the clean input
    assert sum(map(len, model.seen)) == int(result.queries.sum()) + len(x)  # and the second look
    assert int(spent.max()) <= limit
    if attack in SCORE:
        assert bool((spent[~result.is_(Status.BROKEN)] == limit).all())
    if isinstance(attack, SignOPT):
        assert bool((spent == limit).all())
    if isinstance(attack, GeoDA) and limit == 150:  # a way to the boundary may be shorter than was planned
        assert int(spent.min()) > 110


@pytest.mark.parametrize("attack", [*LABEL, *SCORE], ids=name)
def test_probes_lie_in_the_box(attack: Attack) -> None:
    low, high = torch.zeros(1, 6, 6, dtype=torch.float64), torch.ones(1, 6, 6, dtype=torch.float64)
    low[0, 0], high[0, 1] = 0.2, 0.7
    x = torch.minimum(torch.maximum(images(5), low), high)
    y = small()(x).argmax(1)
    model = Counting(labels=attack in LABEL)
    given = as_model(model, "labels" if model.labels else "logits")
    attack.run(given, x, Untargeted(y), eps=0.1, rng=2, bounds=(low, high), queries=300)
    for seen in model.seen:
        assert bool(((seen >= low) & (seen <= high)).all())


@pytest.mark.parametrize("attack", [*LABEL, *SCORE], ids=name)
def test_inputs_of_16_bits(attack: Attack) -> None:
    x = images(6, torch.float32).half()
    model = small(torch.float32)
    y = model(x.float()).argmax(1)
    result = attack.run(
        as_model(lambda v: model(v.float()).detach()), x, Untargeted(y), eps=2.0, rng=1, queries=150
    )
    assert result.x_adv.dtype is torch.float16
    assert result.counts.failed == result.counts.clean_wrong == 0
    broken = result.is_(Status.BROKEN)
    assert bool((model(result.x_adv.float()).argmax(1) != y)[broken].all())
    assert bool((result.distance[attack.norm][broken] <= 2 * (1 + 1e-6)).all())


# --- pixels and waves -------------------------------------------------------------------------------


def test_cosines_are_those_of_scipy() -> None:
    for size in (1, 2, 7):
        wanted = scipy.fft.dct(np.eye(size), axis=0, norm="ortho")
        assert np.allclose(cosines(size, torch.zeros(1, dtype=torch.float64)).numpy(), wanted, atol=1e-14)


def test_inputs_as_pixels() -> None:
    x = torch.randn(2, 3, 4, 5)
    first, last = Grid(x, "nchw"), Grid(x.movedim(1, -1), "nhwc")
    assert torch.equal(first.of(x), last.of(x.movedim(1, -1)))
    assert torch.equal(last.back(last.of(x.movedim(1, -1))), x.movedim(1, -1))
    assert Grid(x.flatten(1), "nhwc").of(x.flatten(1)).shape == (2, 1, 1, 60)
    assert Grid(x[:, :, 0], "nchw").of(x[:, :, 0]).shape == (2, 3, 1, 5)
    deep = torch.randn(2, 3, 4, 5, 6)
    assert Grid(deep, "nchw").of(deep).shape == (2, 3, 4, 30)
    assert [kept_frequencies(10, share) for share in (0.01, 0.3, 0.31, 1)] == [1, 3, 4, 10]


# --- SimBA ------------------------------------------------------------------------------------------


def test_simba_takes_every_vector_once() -> None:
    """A linear loss: after d vectors each coordinate has moved by ±ε as its weight says: √d · ε in l2."""
    model, x = plane(), inputs(5)
    y = model(x).argmax(1)
    attack = SimBA(steps=10, step_size=0.25)
    result = attack.run(model, x, Untargeted(y), eps=100.0, rng=1, bounds=(-50.0, 50.0), keep="loss")
    w = model.linear.weight.detach()
    rise = torch.where(y[:, None] == 1, w[0] - w[1], w[1] - w[0])
    assert torch.allclose(result.x_adv - x, 0.25 * rise.sign(), atol=1e-12)
    assert torch.allclose(result.distance["l2"], torch.full((5,), 0.25 * 10**0.5, dtype=torch.float64))
    assert torch.equal(result.queries, 1 + 10 + (rise < 0).sum(1))  # first forwards, then backwards


def test_simba_steps_along_waves_from_low_to_high() -> None:
    """The change has coefficients of ±ε: in the lowest quarter first, then up to half, by SciPy's DCT."""
    draw = torch.Generator().manual_seed(1)
    model = Affine(torch.randn(2, 128, dtype=torch.float64, generator=draw), torch.zeros(2).double())
    x = torch.rand(3, 2, 8, 8, dtype=torch.float64, generator=draw)
    y = model(x).argmax(1)
    for steps, side in ((8, 2), (32, 4), (128, 8)):
        attack = SimBA(steps=steps, step_size=0.1, basis="dct", share=0.25)
        result = attack.run(model, x, Untargeted(y), eps=100.0, rng=1, bounds=(-50.0, 50.0), keep="loss")
        found = scipy.fft.dctn((result.x_adv - x).numpy(), axes=(2, 3), norm="ortho")
        assert np.allclose(np.abs(found[:, :, :side, :side]), 0.1)
        found[:, :, :side, :side] = 0
        assert np.allclose(found, 0)
    nhwc = SimBA(steps=8, step_size=0.1, basis="dct", share=0.25, layout="nhwc")

    class Last(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = model(v.movedim(-1, 1))
            return found

    moved = nhwc.run(
        Last(), x.movedim(1, -1), Untargeted(y), eps=100.0, ids=[1, 2, 3], bounds=(-50.0, 50.0), keep="loss"
    )
    first = SimBA(steps=8, step_size=0.1, basis="dct", share=0.25).run(
        model, x, Untargeted(y), eps=100.0, ids=[1, 2, 3], bounds=(-50.0, 50.0), keep="loss"
    )
    assert torch.allclose(moved.x_adv.movedim(-1, 1), first.x_adv)


@pytest.mark.parametrize("basis", ["pixel", "dct"])
@pytest.mark.parametrize("p", ["l2", "linf"])
def test_simba_breaks_what_lies_a_fifth_within(p: Norm, basis: Any) -> None:
    model, x = plane(), inputs(3)
    y = model(x).argmax(1)
    distance = distances(model, x, y, p)
    for row in range(3):
        for factor, wanted in ((1.2, Status.BROKEN), (0.999, Status.HELD)):
            eps = factor * float(distance[row])
            attack = SimBA(norm=p, basis=basis, steps=150, step_size=eps / 10)
            some, goal = x[row : row + 1], Untargeted(y[row : row + 1])
            assert attack.run(model, some, goal, eps=eps, rng=1, bounds=(-50.0, 50.0)).status[0] == wanted


def test_simba_against_others_at_equal_queries() -> None:
    model, x, y = trained(40)
    for p, eps in (("l2", 0.6), ("linf", 0.15)):
        found = {
            type(attack): attack.run(model, x, Untargeted(y), eps=eps, rng=1, queries=150).counts.broken
            for attack in (SimBA(norm=p), Square(norm=p), NES(norm=p), RandomNoise(norm=p))  # type: ignore[arg-type]
        }
        assert found[SimBA] > found[Square]
        assert found[SimBA] > found[NES] + 10
        assert found[SimBA] > found[RandomNoise] + 10


# --- Sign-OPT and GeoDA -----------------------------------------------------------------------------

NEAR: Any = [
    (SignOPT(), 1.002), (SignOPT(norm="linf"), 1.05),
    (GeoDA(), 1.05), (GeoDA(norm="linf"), 1.05), (GeoDA(norm="l1"), 1.01),
]  # fmt: skip


@pytest.mark.parametrize(("attack", "most"), NEAR, ids=[name(attack) for attack, _ in NEAR])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bounds", [(-20.0, 20.0), (-float("inf"), float("inf"))], ids=["box", "no box"])
def test_near_the_closed_form(
    attack: Attack, most: float, dtype: torch.dtype, bounds: tuple[float, float]
) -> None:
    model = plane().to(dtype)
    x = inputs(15).to(dtype)
    y = model(x).argmax(1)
    result = attack.run(labels_only(model), x, Untargeted(y), rng=1, bounds=bounds, queries=2000)
    assert result.counts.broken == 15
    ratio = result.distance[attack.norm] / distances(model, x, y, attack.norm)
    assert float(ratio.min()) > 1 - 1e-4
    assert float(ratio.max()) < most
    assert float(ratio.median()) < 1.02


@pytest.mark.parametrize("attack", [SignOPT(), GeoDA(), GeoDA(norm="linf")], ids=name)
def test_near_the_smallest_change_in_a_tight_box(attack: Attack) -> None:
    """The box cuts off what the closed form of the whole space would do."""
    model = plane()
    x = 0.5 + 0.4 * inputs(15).clamp(-1, 1)
    y = model(x).argmax(1)
    low, high = (x + each for each in (-0.1, 0.1))
    low[:, ::2], high[:, ::2] = x[:, ::2] - 5, x[:, ::2] + 5
    z, w = model(x).detach(), model.linear.weight.detach()
    slope = torch.where(y[:, None] == 1, w[0] - w[1], w[1] - w[0])
    gap = (z[:, 0] - z[:, 1]).abs()
    _, size = smallest_step(slope, gap, attack.norm, low - x, high - x)
    result = attack.run(labels_only(model), x, Untargeted(y), rng=1, bounds=(low, high), queries=3000)
    assert bool(torch.isfinite(size).all())
    assert bool((size > distances(model, x, y, attack.norm) * 1.02).any())
    ratio = result.distance[attack.norm] / size
    assert float(ratio.min()) > 1 - 1e-6
    assert float(ratio.median()) < 1.02
    assert float(ratio.max()) < (1.04 if isinstance(attack, SignOPT) else 1.08)


@pytest.mark.parametrize("attack", [SignOPT(steps=5), GeoDA(probes=1500)], ids=name)
def test_several_classes_and_targets_by_labels(attack: Attack) -> None:
    model = affine()
    x = inputs(15)
    y, t = model(x).detach().topk(2, 1).indices.T
    goal = Targeted(t, y)
    result = attack.run(labels_only(model), x, goal, rng=1, bounds=(-20.0, 20.0))
    assert result.counts.broken == 15
    assert torch.equal(model(result.x_adv).argmax(1), t)
    result = attack.run(labels_only(model), x, Untargeted(y), rng=1, bounds=(-20.0, 20.0))
    assert float((result.distance["l2"] / distances(model, x, y, "l2")).median()) < 1.05


def test_label_attacks_against_others_at_equal_queries() -> None:
    """On a trained network: mean distances, with the same start points."""
    model, x, y = trained(24)

    def mean(attack: Attack, queries: int = 1000) -> float:
        result = attack.run(labels_only(model), x, Untargeted(y), rng=1, queries=queries)
        assert result.counts.broken == 24
        return float(result.distance[attack.norm].mean())

    walk, jump = mean(Boundary()), mean(HopSkipJump())
    assert mean(SignOPT()) < min(0.9 * jump, 0.8 * walk)
    assert mean(GeoDA()) < min(jump, 0.9 * walk)
    for attack in (GeoDA(norm="linf"), SignOPT(norm="linf")):
        assert mean(attack) < mean(HopSkipJump(norm="linf"))
    # One step of either is already far better than the nearest start point on the boundary.
    for p in ("l2", "linf"):
        begun = HopSkipJump(norm=p, steps=1, probes=1)
        start = float(begun.run(labels_only(model), x, Untargeted(y), rng=1).distance[p].mean())
        assert mean(SignOPT(norm=p)) < 0.7 * start
        assert mean(GeoDA(norm=p)) < 0.7 * start


def test_queries_of_geoda_grow_as_the_paper_has_it() -> None:
    """n_{t+1} / n_t = λ^(−2/3), as many steps as leave the first one its least."""
    grow = 0.6 ** (-2 / 3)
    left = torch.tensor([2**62, 5000, 1000, 100, 3, 1])
    steps, total = shares_of_queries(left, 10_000, 80, grow)
    first = total * (grow - 1) / (grow**steps - 1)
    assert bool((first[:3] >= 80).all())
    more = (
        torch.minimum(left - 24 * (steps + 1), torch.tensor(10_000)) * (grow - 1) / (grow ** (steps + 1) - 1)
    )
    assert bool((more < 80).all())
    assert float(total[0]) == 10_000
    assert bool((total <= left).all())
    assert steps[3:].tolist() == [1, 1, 1]
    counts = [len(seen) for seen in _passes(GeoDA(probes=2000, starts=1, tries=10))]
    big = [count for count in counts if count >= 40]  # 64 probes in a pass, the others are single queries
    assert sum(big) > 1800


def _passes(attack: Attack) -> list[Tensor]:
    model = Counting(labels=True)
    x = images(1)
    attack.run(as_model(model, "labels"), x, Untargeted(small()(x).argmax(1)), rng=1)
    return model.seen


# --- One pixel, threshold ---------------------------------------------------------------------------


class OnePlace(nn.Module):
    """Class 1 where the pixel at (4, 2) is bright in its first channel and dark in its last one."""

    def forward(self, x: Tensor) -> Tensor:
        score = 4 * (x[:, 0, 4, 2] - x[:, -1, 4, 2]) - 2 + 0.05 * (x.flatten(1).mean(1) - 0.5)
        return torch.stack([-score, score], 1)


def test_one_pixel_finds_a_planted_one() -> None:
    draw = torch.Generator().manual_seed(1)
    x = 0.4 + 0.2 * torch.rand(8, 3, 6, 6, dtype=torch.float64, generator=draw)
    y = OnePlace()(x).argmax(1)
    assert bool((y == 0).all())
    result = OnePixel(population=100).run(OnePlace(), x, Untargeted(y), eps=3, rng=1)
    assert result.counts.broken == 8
    changed = (result.x_adv != x).any(1).flatten(1)
    assert torch.equal(changed.sum(1), torch.ones(8, dtype=torch.int64))
    assert bool((result.x_adv != x)[:, :, 4, 2].any(1).all())
    known = Pointwise(norm="l0").run(OnePlace(), x, Untargeted(y), rng=1)
    assert bool((known.x_adv != x)[:, :, 4, 2].any(1).all())
    assert int(known.distance["l0"].max()) <= 2
    # eps counts coordinates: two of them are enough here, and no more are taken; one channel alone is not.
    pair = OnePixel(population=100).run(OnePlace(), x, Untargeted(y), eps=2, rng=1)
    assert pair.counts.broken == 8
    assert int(pair.distance["l0"].max()) <= 2
    noise = RandomNoise(norm="l0", draws=10_000).run(
        OnePlace(), x, Untargeted(y), eps=2, rng=1, queries=int(pair.queries.max())
    )
    assert noise.counts.broken < 8

    class Last(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = OnePlace()(v.movedim(-1, 1))
            return found

    last = OnePixel(population=100, layout="nhwc").run(
        Last(), x.movedim(1, -1), Untargeted(y), eps=3, rng=1, ids=list(range(8))
    )
    first = OnePixel(population=100).run(OnePlace(), x, Untargeted(y), eps=3, rng=1, ids=list(range(8)))
    assert torch.equal(last.x_adv.movedim(-1, 1), first.x_adv)


def test_more_pixels_break_more() -> None:
    """And evolution breaks more than as many draws, in either norm."""
    model, x, y = trained(40)

    def broken(attack: Attack, eps: float) -> int:
        return attack.run(model, x, Untargeted(y), eps=eps, rng=1, queries=1000).counts.broken

    few = [broken(OnePixel(pixels=k, population=60), k) for k in (1, 3, 5)]
    assert few[0] < few[1] < few[2]
    assert few[1] > broken(RandomNoise(norm="l0", draws=1000), 3) + 4
    assert broken(Threshold(population=40), 0.15) > 2 * broken(RandomNoise(draws=1000), 0.15)
    # More pixels than the radius has coordinates are no more than the radius.
    assert broken(OnePixel(pixels=5, population=60), 1) == few[0]


def test_children_come_from_three_other_members() -> None:
    """With no difference a child is another member; and parents stay where a child is not better."""
    x = images(3)
    seen: list[Tensor] = []

    @dataclass(frozen=True)
    class Watched(Attack):
        needs = "score"

        def search(self, search: Search) -> None:
            def start(rows: Tensor) -> Tensor:
                return (torch.arange(4, dtype=x.dtype) / 8).expand(len(rows), 4)[:, :, None]

            def points(genes: Tensor, rows: Tensor) -> Tensor:
                seen.append((genes[:, :, 0] * 8).round().long())
                return search.x[rows][:, None].expand(-1, 4, -1, -1, -1)

            evolve(search, start, points, steps=30, factor=1e-12, base="random", loss="margin")

    Watched().run(small(), x, Untargeted(small()(x).argmax(1)), eps=0.1, rng=1)
    children = torch.cat(seen[1:])
    assert children.shape == (90, 4)
    assert bool((children != torch.arange(4)).all())  # nothing was better: parents are those of the start
    for place in range(4):
        least, *others = sorted(torch.bincount(children[:, place], minlength=4).tolist())
        assert least == 0
        assert min(others) > 15  # of 30 that are expected


def test_threshold_breaks_what_lies_a_fifth_within() -> None:
    model, x = plane(), inputs(4)
    y = model(x).argmax(1)
    distance = distances(model, x, y, "linf")
    for row in range(4):
        for factor, wanted in ((1.2, Status.BROKEN), (0.999, Status.HELD)):
            some, goal = x[row : row + 1], Untargeted(y[row : row + 1])
            result = Threshold(population=40, steps=50).run(
                model, some, goal, eps=factor * float(distance[row]), rng=1, bounds=(-50.0, 50.0)
            )
            assert result.status[0] == wanted


# --- ZOO --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bounds"),
    [(torch.float32, (-20.0, 20.0)), (torch.float64, (-float("inf"), float("inf")))],
    ids=["box", "no box"],
)
def test_zoo_is_near_the_closed_form(dtype: torch.dtype, bounds: tuple[float, float]) -> None:
    model = plane().to(dtype)
    x = inputs(5).to(dtype)
    y = model(x).argmax(1)
    attack = ZOO(steps=120, searches=7, constant=0.3, learning_rate=0.03)
    result = attack.run(model, x, Untargeted(y), rng=1, bounds=bounds)
    ratio = result.distance["l2"] / distances(model, x, y, "l2")
    assert result.counts.broken == 5
    assert float(ratio.min()) > 1 - 1e-4
    assert float(ratio.median()) < 1.02
    assert float(ratio.max()) < 1.05


def test_zoo_with_all_coordinates_is_carlini_wagner() -> None:
    """Differences are then the gradient, and Adam is the same: it goes where that goes."""
    model, x = small(), images(10)
    y = model(x).argmax(1)
    settings: Any = {"steps": 40, "searches": 3, "constant": 1.0, "learning_rate": 0.02, "early_abort": False}
    ours = ZOO(coordinates=36, difference=1e-6, **settings).run(model, x, Untargeted(y), rng=1)
    theirs = CarliniWagner(start="input", **settings).run(model, x, Untargeted(y), rng=1)
    assert bool((ours.queries == 1 + 3 * 40 * (2 * 36 + 1)).all())
    assert bool((theirs.queries == 1 + 3 * 40).all())
    # A probe may be nearer by the difference; one step more is seen at the end of each attempt.
    assert float((ours.distance["l2"] / theirs.distance["l2"] - 1).abs().median()) < 0.01
    part = ZOO(coordinates=4, **settings).run(model, x, Untargeted(y), rng=1)
    assert bool((part.queries == 1 + 3 * 40 * 9).all())


def test_zoo_against_the_boundary_attack_at_equal_queries() -> None:
    model, x, y = trained(12)
    ours = ZOO(constant=0.3, learning_rate=0.05, searches=5, steps=40).run(
        model, x, Untargeted(y), rng=1, queries=2000
    )
    walk = Boundary().run(model, x, Untargeted(y), rng=1, queries=2000)
    assert ours.counts.broken == walk.counts.broken == 12
    assert float(ours.distance["l2"].mean()) < 0.95 * float(walk.distance["l2"].mean())


# --- Pixle ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [4, 12, 36])
def test_pixle_only_moves_pixels(eps: int) -> None:
    """All channels together; as many coordinates as the radius has at most."""

    class Coloured(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = small()(v.mean(1, keepdim=True))
            return found

    x = torch.rand(10, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = Coloured()(x).argmax(1)
    result = Pixle(patch=(1, 4), steps=40).run(Coloured(), x, Untargeted(y), eps=eps, rng=1)
    assert int(result.distance["l0"].max()) <= eps
    assert bool((result.distance["l0"] > 0).all())
    if eps % 3:
        return
    for row in range(10):
        old, new = (each[row].flatten(1).T for each in (x, result.x_adv))
        assert bool((new[:, None] == old[None]).all(2).any(1).all())
    assert result.counts.broken > 0


def test_pixle_against_noise_at_equal_queries() -> None:
    model, x, y = trained(40)
    for eps, queries in ((3, 300), (6, 60)):
        ours = Pixle(patch=(1, 3), steps=1000).run(model, x, Untargeted(y), eps=eps, rng=1, queries=queries)
        noise = RandomNoise(norm="l0", draws=1000).run(
            model, x, Untargeted(y), eps=eps, rng=1, queries=queries
        )
        assert ours.counts.broken > noise.counts.broken


def test_pixle_finds_a_planted_exchange() -> None:
    """The one bright pixel has to come to one place, from where it is."""

    class Place(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            score = v[:, 0, 3, 3] - 0.5
            return torch.stack([-score, score], 1)

    x = torch.zeros(6, 1, 6, 6, dtype=torch.float64)
    x[torch.arange(6), 0, torch.arange(6), 0] = 1.0
    y = torch.zeros(6, dtype=torch.int64)
    result = Pixle(steps=300).run(Place(), x, Untargeted(y), eps=36, rng=1, ids=list(range(6)))
    assert result.counts.broken == 6
    assert bool((result.x_adv[:, 0, 3, 3] == 1).all())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SimBA, {"step_size": 0.0}), (SimBA, {"basis": "wavelet"}), (SimBA, {"share": 1.5}),
        (SimBA, {"layout": "chw"}), (SignOPT, {"smoothing": 1.0}), (SignOPT, {"probes": 0}),
        (GeoDA, {"rate": 1.0}), (GeoDA, {"sigma": 0.0}), (OnePixel, {"population": 3}),
        (OnePixel, {"pixels": 0}), (OnePixel, {"base": "worst"}), (Threshold, {"factor": 0.0}),
        (ZOO, {"difference": 0.0}), (ZOO, {"coordinates": 0}), (Pixle, {"patch": (3, 2)}),
        (Pixle, {"steps": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_are_refused(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        kind(**settings)


def test_a_pixel_needs_bounds() -> None:
    x = images(2)
    with pytest.raises(ConfigError, match="infinite"):
        OnePixel().run(small(), x, Untargeted(small()(x).argmax(1)), eps=1, bounds=(-torch.inf, torch.inf))
