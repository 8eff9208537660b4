"""What attacks are to get right beyond the laws of all of them, a named test for each."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mycelia.attacks import (
    APGD,
    BIM,
    DDN,
    FGM,
    FMN,
    MIM,
    PGD,
    Attack,
    CarliniWagner,
    DeepFool,
    HopSkipJump,
    RandomNoise,
    Square,
    Status,
    Targeted,
    Untargeted,
    least_likely,
)
from mycelia.attacks.config import AttackConfig, EvaluateConfig, TargetConfig
from mycelia.attacks.from_config import attack, evaluated
from mycelia.attacks.goals import random_target
from mycelia.attacks.norms import NORMS, Norm
from mycelia.attacks.search import Keep, Search
from mycelia.engine.errors import DataError
from mycelia.engine.models import build
from tests.attacks.worlds import Affine, affine, images, small

# --- where a search goes, and what of it comes back --------------------------------------------------


class Hump(nn.Module):
    """Class 1 where the first coordinate of x is between two numbers, most surely in their middle."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        first = x.flatten(1)[:, 0]
        inside = (self.high - self.low) / 2 - (first - (self.high + self.low) / 2).abs()
        return torch.stack([torch.zeros_like(inside), inside], 1)


@dataclass(frozen=True)
class Walk(Attack):
    """Looks at given values of the first coordinate, one after the other, and stops for nobody."""

    kind: ClassVar[str] = "minimum"
    norms: ClassVar[tuple[Norm, ...]] = NORMS

    path: tuple[float, ...] = ()

    def search(self, search: Search) -> None:
        """See `Attack.search`."""
        rows = torch.arange(len(search.x))
        for step, value in enumerate(self.path):
            points = search.x.clone()
            points[:, 0] = value
            if step % 2:
                search.gradient(points, rows, step, "margin")
            else:
                search.look(points, rows, step)


@dataclass(frozen=True)
class Inside(Walk):
    """The same, of an attack that stays in its ball."""

    kind: ClassVar[str] = "fixed"


def test_best_not_last() -> None:
    """Of a path the nearest success comes back, or the highest loss in the ball; never just its end."""
    x = torch.tensor([[0.1, 0.5], [0.1, 0.6]], dtype=torch.float64)
    goal, model = Untargeted(torch.tensor([0, 0])), Hump(0.3, 0.7)
    cases: tuple[tuple[Attack, str, float, float, Status], ...] = (
        # the success at 0.4 is nearer than those before and after, and the end is none
        (Walk("l2", path=(0.6, 0.4, 0.5, 0.9)), "closest", 0.35, 0.4, Status.BROKEN),
        (Walk("l2", path=(0.6, 0.4, 0.5, 0.9)), "closest", 0.25, 0.4, Status.HELD),
        (Inside("l2", path=(0.6, 0.4, 0.5, 0.9)), "closest", 0.35, 0.4, Status.BROKEN),
        # without one, the highest loss: 0.29, and not 0.15 after it
        (Walk("l2", path=(0.2, 0.29, 0.15)), "closest", 0.5, 0.29, Status.HELD),
        (Inside("l2", path=(0.2, 0.29, 0.15)), "closest", 0.5, 0.29, Status.HELD),
        # what lies beyond the ball is no success and no candidate of a fixed attack
        (Inside("l2", path=(0.25, 0.5, 0.2)), "closest", 0.2, 0.25, Status.HELD),
        # for training: the highest loss in the ball, a success or not
        (Inside("linf", path=(0.35, 0.45, 0.65, 0.5, 0.2)), "loss", 0.36, 0.45, Status.BROKEN),
        (Inside("linf", path=(0.2, 0.28, 0.8)), "loss", 0.19, 0.28, Status.HELD),
    )
    for walk, keep, eps, best, status in cases:
        result = walk.run(model, x, goal, eps=eps, keep=keep)  # type: ignore[arg-type]
        assert result.x_adv[:, 0].tolist() == pytest.approx([best, best], abs=1e-12)
        assert torch.equal(result.x_adv[:, 1], x[:, 1])
        assert set(result.status.tolist()) == {int(status)}
        assert result.best_step.tolist() == [walk.path.index(best)] * 2  # type: ignore[attr-defined]

    # Long steps over the hump and back: 0.1, 0.45, 0.8, 0.45, …
    long = BIM(steps=8, step_size=0.35, loss="margin")
    keeps: tuple[Keep, ...] = ("closest", "loss")
    for way in keeps:
        result = long.run(model, x, goal, eps=0.75, keep=way)
        assert result.counts.broken == 2
        assert result.x_adv[:, 0].tolist() == pytest.approx([0.45, 0.45])


def test_pgd_has_random_start() -> None:
    """Every start is another point, uniform in the ball of its norm; BIM starts at the input."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                self.seen.append(x.detach().clone())
            return torch.stack([0 * x[:, 0] + 1, 0 * x[:, 0]], 1)  # never broken, no slope

    n, d, eps = 2000, 4, 0.3
    x = torch.rand(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    goal = Untargeted(torch.zeros(n, dtype=torch.int64))

    def starts(attack: Attack, rng: int = 0) -> list[Tensor]:
        model = First()
        attack.run(model, x, goal, eps=eps, rng=rng, bounds=(-9.0, 9.0), batch=n)
        return [(seen - x) / eps for seen in model.seen]

    norms: tuple[Norm, ...] = ("linf", "l2", "l1")
    for p in norms:
        first, second = starts(PGD(norm=p, steps=1, restarts=2))
        for start in (first, second):
            radius = torch.linalg.vector_norm(start, ord={"linf": torch.inf, "l2": 2, "l1": 1}[p], dim=1)
            assert 0 < float(radius.min()) <= float(radius.max()) <= 1 + 1e-9
            # In a ball of d dimensions the d-th power of the radius is uniform; in a clipped cube it is not.
            assert stats.kstest(radius.numpy() ** d, "uniform").pvalue > 1e-3
            for k in range(d):
                assert stats.ttest_1samp(start[:, k].numpy(), 0).pvalue > 1e-4
        squares = first.square()
        share = (squares / squares.sum(1, keepdim=True)).numpy()
        if p == "l2":  # the direction is uniform, too: a share of the square is Beta(1/2, (d − 1)/2)
            assert stats.kstest(share[:, 0], stats.beta(0.5, (d - 1) / 2).cdf).pvalue > 1e-3
        assert not bool(torch.isclose(first, second).any())
        (other,) = starts(PGD(norm=p, steps=1), rng=1)
        assert not bool(torch.isclose(first, other).any())
        (still,) = starts(BIM(norm=p, steps=1))
        assert torch.equal(still, torch.zeros_like(still))


class AsTarget(Targeted):
    """A target whose draws are those of the untargeted goal: of two classes it is the other one."""

    @property
    def labels(self) -> Tensor:
        return 1 - self.t

    def of(self, rows: Tensor) -> AsTarget:
        return AsTarget(self.t[rows])


def test_sign_folded_once() -> None:
    """Of two classes "not this" and "the other" are one problem: every attack that climbs goes one way.

    That holds for single steps and for rules that look at whether the loss rose; a sign folded twice, or by
    one of the two goals only, sends one of them the other way.
    """
    model = affine(classes=2, d=8, seed=3)
    bend = nn.Sequential(affine(8, 8, seed=4), nn.Tanh(), model).double()
    x = 0.5 + 0.1 * torch.randn(20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    attacks: list[Callable[[Norm], Attack]] = [
        lambda p: FGM(norm=p),
        lambda p: FGM(norm=p, loss="margin"),
        lambda p: BIM(norm=p, steps=6),
        lambda p: PGD(norm=p, steps=6, restarts=2),
        lambda p: MIM(norm=p, steps=6),
        lambda p: APGD(norm=p, steps=25, loss="margin"),
        lambda p: APGD(norm=p, steps=25, loss="dlr"),
    ]
    norms: tuple[Norm, ...] = ("linf", "l2", "l1")
    for make in attacks:
        for p in norms:
            for net in (model, bend):
                y = net(x).argmax(1)
                eps = {"linf": 0.05, "l2": 0.1, "l1": 0.2}[p]
                climbed = []
                for goal in (Untargeted(y), AsTarget(1 - y)):
                    found = make(p).run(
                        net, x, goal, eps=eps, rng=1, keep="loss", bounds=(-9.0, 9.0), ids=torch.arange(20)
                    )
                    climbed.append(found)
                    z = net(torch.cat([x, found.x_adv])).detach()
                    gap = z.gather(1, 1 - y.repeat(2)[:, None]) - z.gather(1, y.repeat(2)[:, None])
                    assert float((gap[20:] - gap[:20]).min()) > 0
                assert torch.equal(climbed[0].status, climbed[1].status)
                assert torch.allclose(climbed[0].x_adv, climbed[1].x_adv, atol=1e-6)


def test_sign_of_minimum_attacks() -> None:
    """The same for attacks that look for the smallest change: they end at one boundary."""
    model = affine(classes=2, d=8, seed=3)
    x = 0.5 + 0.1 * torch.randn(10, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    y = model(x).argmax(1)
    for attack_ in (
        DDN(steps=30),
        CarliniWagner(steps=60, searches=4, constant=1.0, learning_rate=0.05, start="input"),
        DeepFool(),
        FMN(steps=30),
    ):
        both = [
            attack_.run(model, x, goal, rng=1, bounds=(-1.0, 2.0))
            for goal in ((Untargeted(y), AsTarget(1 - y)) if attack_.targeted else (Untargeted(y),))
        ]
        for found in both:
            assert found.counts.broken == 10
            assert torch.allclose(found.distance["l2"], both[0].distance["l2"], rtol=1e-6)


def test_target_equals_label_refused() -> None:
    """Such rows are named; and a target is never taken for a label: rows that have it are not "wrong"."""
    y = torch.tensor([0, 1, 2, 3])
    with pytest.raises(DataError, match="target equals label in rows 1, 3"):
        Targeted(torch.tensor([1, 1, 1, 3]), y)
    with pytest.raises(DataError, match="2 targets, 4 labels"):
        Targeted(y[:2], y)
    drawn = random_target(y.repeat(100), 4, rng=0)
    assert not bool((drawn == y.repeat(100)).any())
    Targeted(drawn, y.repeat(100))

    model, x = small(), images(8)
    predicted = model(x).argmax(1)
    aim = least_likely(model, x)
    assert not bool((aim == predicted).any())
    t = torch.where(torch.arange(8) < 3, predicted, aim)  # three rows are there already
    for attack_ in (BIM(steps=3), FMN(steps=3), Square(steps=5), HopSkipJump(steps=1, probes=4)):
        result = attack_.run(model, x, Targeted(t), eps=0.05, rng=0)
        assert result.is_(Status.ALREADY_TARGET).tolist() == [True] * 3 + [False] * 5
        assert result.counts.clean_wrong == 0
        assert torch.equal(result.x_adv[:3], x[:3])
        assert result.success_rate == result.counts.broken / 5
        reached = model(result.x_adv[3:]).argmax(1) == t[3:]
        assert bool(reached[result.is_(Status.BROKEN)[3:]].all())
    # Labels given beside the targets change nothing about what is reached.
    wrong = (predicted + 1) % 4
    free = torch.where(wrong == aim, (aim + 1) % 4, wrong)
    one, other = (BIM(steps=3).run(model, x, Targeted(aim, y=each), eps=0.05) for each in (None, free))
    assert torch.equal(one.x_adv, other.x_adv)
    assert torch.equal(one.status, other.status)


# --- 8 bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "bounds"),
    [
        *((p, (0.0, 1.0)) for p in NORMS),
        *((p, (-1.0, 3.0)) for p in NORMS),
    ],
)
def test_eight_bit_roundtrip(p: Norm, bounds: tuple[float, float]) -> None:
    """Rounded to the nearest level and not cut off, in the ball again, and looked at again."""
    low, high = bounds
    step = (high - low) / 255
    level = (images(12) * 255).round()
    x = low + level * step  # 8-bit images
    inner = small()

    class Units(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = inner((v - low) / (high - low))
            return found

    y = Units()(x).argmax(1)
    eps = {"linf": 0.08, "l2": 0.4, "l1": 1.2, "l0": 6.0}[p] * (1.0 if p == "l0" else high - low)
    attack_: Attack = FMN(norm=p, steps=20) if p == "l0" else PGD(norm=p, steps=6)
    plain = attack_.run(Units(), x, Untargeted(y), eps=eps, rng=1, bounds=bounds)
    result = attack_.run(Units(), x, Untargeted(y), eps=eps, rng=1, bounds=bounds, quantise=8)
    place = (result.x_adv - low) / step
    assert torch.allclose(place, place.round(), atol=1e-6)
    assert low <= float(result.x_adv.min()) <= float(result.x_adv.max()) <= high
    nearest = ((plain.x_adv - low) / step).round()
    order = {"l0": 0, "l1": 1, "l2": 2, "linf": np.inf}[p]

    def length(delta: Tensor) -> Tensor:
        return torch.linalg.vector_norm(delta.flatten(1), ord=order, dim=1)

    fits = length((nearest - level) * step) <= eps * (1 + 1e-9)
    assert torch.allclose(place[fits], nearest[fits], atol=1e-6)
    beyond = length(result.x_adv - x) > eps * (1 + 1e-6)
    assert not bool((beyond & result.is_(Status.BROKEN)).any())
    if attack_.kind == "fixed":
        assert not bool(beyond.any())
    reached = Units()(result.x_adv).argmax(1) != y
    was = plain.is_(Status.BROKEN)
    assert int(was.sum()) > 0
    assert torch.equal(result.is_(Status.BROKEN), was & reached)
    assert result.survive_8bit == int((was & reached).sum()) / int(was.sum())
    assert plain.survive_8bit is None


@pytest.mark.parametrize("p", ["linf", "l2", "l1"])
def test_eight_bit_roundtrip_of_other_inputs(p: Norm) -> None:
    """Where the input is on no level the grid may have no point in the ball: then there is no success."""
    x = images(12)
    y = small()(x).argmax(1)
    eps = {"linf": 0.08, "l2": 0.4, "l1": 1.2}[p]
    for radius in (eps, eps / 60):
        result = PGD(norm=p, steps=6).run(small(), x, Untargeted(y), eps=radius, rng=1, quantise=8)
        beyond = result.distance[p] > radius * (1 + 1e-6)
        assert not bool((beyond & result.is_(Status.BROKEN)).any())


def test_eight_bit_successes_that_are_lost() -> None:
    """A success between two levels is gone after rounding, and says so; one at a level is not."""

    class Between(nn.Module):
        """Class 1 where 255 · x is within a quarter of this far from a whole number."""

        def __init__(self, offset: float) -> None:
            super().__init__()
            self.offset = offset

        def forward(self, x: Tensor) -> Tensor:
            away = (255 * x[:, 0] - self.offset + 0.5).remainder(1) - 0.5
            return torch.stack([0 * away, 0.25 - away.abs()], 1)

    x = torch.full((5, 2), 100 / 255, dtype=torch.float64)
    goal = Untargeted(torch.zeros(5, dtype=torch.int64))
    lost = RandomNoise(draws=50).run(Between(0.5), x, goal, eps=3 / 255, rng=0, quantise=8)
    assert lost.counts.held == 5
    assert lost.survive_8bit == 0
    assert set(lost.reason) == {"lost by rounding to 8 bits"}

    class Level(nn.Module):
        """Class 1 from 101 and a half levels on, so that 101.6 is rounded to a success, not cut to none."""

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([0 * x[:, 0], 255 * x[:, 0] - 101.55], 1)

    kept = BIM(steps=1, step_size=1.6 / 255).run(Level(), x, goal, eps=2 / 255, quantise=8)
    assert kept.counts.broken == 5
    assert kept.survive_8bit == 1
    assert set(kept.reason) == {""}
    assert torch.allclose(255 * kept.x_adv[:, 0], torch.tensor(102.0, dtype=torch.float64))


@pytest.mark.parametrize("attack_", [FGM(norm="linf"), APGD(norm="l2", steps=10)], ids=["fgm", "apgd"])
def test_dtype_device_of_halves(attack_: Attack) -> None:
    """Inputs of 16 bits are attacked like others: they move, and no further than eps."""
    x = images(6).half()

    class Wide(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = small()(v.double())
            return found

    eps = {"linf": 0.08, "l2": 0.4}[attack_.norm]
    result = attack_.run(Wide(), x, Untargeted(Wide()(x).argmax(1)), eps=eps, rng=5)
    assert result.x_adv.dtype == torch.float16
    assert float(result.distance[attack_.norm].max()) <= eps * (1 + 1e-6)
    assert bool((result.x_adv != x).any())


# --- memory -------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still there, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._held: dict[int, tuple[int, int]] = {}  # by storage: tensors, bytes
        self._places: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by reference

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor):
                self._add(each)
        self.most = max(self.most, self.now)
        return found

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        count, size = self._held.get(place, (0, storage.nbytes()))
        if not count:
            self.now += size
        self._held[place] = count + 1, size
        reference = weakref.ref(tensor, self._drop)
        self._places[id(reference)] = reference, place

    def _drop(self, gone: weakref.ref[Tensor]) -> None:
        _, place = self._places.pop(id(gone))
        count, size = self._held[place]
        if count == 1:
            self.now -= size
            del self._held[place]
        else:
            self._held[place] = count - 1, size


@contextlib.contextmanager
def counted() -> Iterator[Live]:
    with Live() as live:
        yield live


def test_live_bytes_are_counted() -> None:
    """The counter itself: what a graph holds on to is live, what is dropped is not."""
    with counted() as live:
        kept = torch.zeros(1000, dtype=torch.float64)
        assert live.now == 8000
        leaf = kept.clone().requires_grad_()
        whole = (leaf.exp() * 2).sum()  # exp is held by the graph alone
        assert live.now >= 3 * 8000
        del whole, leaf
        assert live.now == 8000
    assert live.most < 6 * 8000


@pytest.mark.parametrize(
    "attack_",
    [
        PGD(steps=3), APGD(steps=4), FMN(steps=4), CarliniWagner(steps=3, searches=2), Square(steps=8),
        HopSkipJump(steps=1, probes=4, tries=4), RandomNoise(draws=4),
    ],
    ids=lambda attack_: type(attack_).__name__,
)  # fmt: skip
def test_memory_flat(attack_: Attack) -> None:
    """Nothing is left by a run, 20 runs need no more than one, and three times the steps no more either."""
    x, model = images(4), small()
    goal = Untargeted(model(x).argmax(1))

    def run(attack: Attack, times: int = 1) -> int:
        """Highest number of live bytes of all runs beyond what was there before."""
        peaks = []
        for _ in range(times):
            with counted() as live:
                attack.run(model, x, goal, eps=0.02, rng=3, batch=2)
                peaks.append(live.most)
                assert live.now == 0
        return max(peaks)

    run(attack_)  # what is made once, for all runs
    one = run(attack_)
    assert run(attack_, times=19) <= 1.01 * one
    if isinstance(attack_, (PGD, APGD, FMN, Square)):
        longer = type(attack_)(norm=attack_.norm, steps=3 * attack_.steps)
        assert run(longer) <= 1.05 * one


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_flat_on_the_device() -> None:
    x, model = images(64, torch.float32).cuda(), small(torch.float32).cuda()
    goal = Untargeted(model(x).argmax(1))
    peaks = []
    for _ in range(21):
        torch.cuda.reset_peak_memory_stats()
        PGD(steps=10).run(model, x, goal, eps=0.02, rng=3)
        peaks.append(torch.cuda.max_memory_allocated())
    assert max(peaks[1:]) <= 1.01 * peaks[1]


# --- units and settings -------------------------------------------------------------------------------


def test_eps_units() -> None:
    """The same problem in other units, with eps in those, has the same answer; distances are in them, too."""
    inner = small()

    class Scaled(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = inner((v + 64) / 256)
            return found

    x = images(10)
    y = inner(x).argmax(1)
    ids = torch.arange(10)
    attacks: tuple[Attack, ...] = (
        *(PGD(norm=p, steps=5) for p in ("linf", "l2", "l1")), MIM(steps=4), APGD(steps=10), FGM(norm="l2"),
        Square(steps=30), RandomNoise(draws=10),
    )  # fmt: skip
    for each in attacks:
        eps = {"linf": 0.08, "l2": 0.4, "l1": 1.2}[each.norm]
        one = each.run(inner, x, Untargeted(y), eps=eps, rng=1, ids=ids)
        other = each.run(
            Scaled(), x * 256 - 64, Untargeted(y), eps=256 * eps, rng=1, ids=ids, bounds=(-64.0, 192.0)
        )
        assert torch.equal(one.status, other.status)
        assert torch.allclose((other.x_adv + 64) / 256, one.x_adv, atol=1e-9)
        assert torch.allclose(other.distance[each.norm], 256 * one.distance[each.norm], rtol=1e-6)
    # One FGSM step in a box that does not cut moves every coordinate by eps itself.
    wide = FGM(norm="linf").run(inner, x, Untargeted(y), eps=0.03, bounds=(-1.0, 2.0), keep="loss")
    assert torch.allclose(wide.distance["linf"], torch.tensor(0.03, dtype=torch.float64), rtol=1e-9)


def test_bounds_tolerance_and_message() -> None:
    """The tolerance is 1e-6 of the width, whatever that is, and bounds may be tensors, or have no end."""
    model = Affine(torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64), torch.zeros(2))
    x = torch.tensor([[100.0, 3.0], [20.0, 3.0]], dtype=torch.float64)
    goal = Untargeted(torch.tensor([0, 0]))
    for over, fits in ((1.9e-4, True), (2.1e-4, False)):
        given = x.clone()
        given[0, 0] += over
        if fits:
            found = BIM(steps=1, loss="margin").run(model, given, goal, eps=1.0, bounds=(-100.0, 100.0))
            assert float(found.x_adv[0, 0]) == 99
        else:
            with pytest.raises(ValueError, match="between 3 and 100, beyond bounds -100 to 100 in 1 rows"):
                BIM().run(model, given, goal, eps=1.0, bounds=(-100.0, 100.0))
    high = torch.tensor([110.0, 2.9], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"beyond bounds -100 to 110 in 2 rows \(first: 0\)"):
        BIM().run(model, x, goal, eps=1.0, bounds=(-100.0, high))
    free = BIM(steps=1, step_size=5.0, loss="margin").run(
        model, x, goal, eps=5.0, bounds=(-torch.inf, torch.inf)
    )
    assert free.x_adv[:, 0].tolist() == [95.0, 15.0]


def test_unknown_setting_refused(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A key of a configuration that nobody knows is refused by name; every one that is known is read."""
    save_file(build("mlp", (1, 8, 8), 10, seed=1).state_dict(), tmp_path / "w.safetensors")
    given = {
        "model": "mlp", "weights": str(tmp_path / "w.safetensors"), "data": "digits", "limit": 4,
        "norm": "linf", "eps": (0.05,),
    }  # fmt: skip
    kinds: tuple[tuple[type[TargetConfig], dict[str, Any], Callable[..., Any]], ...] = (
        (AttackConfig, {"attack": "bim", "steps": 2}, attack),
        (EvaluateConfig, {"suite": "quick"}, evaluated),
    )
    for kind, more, use in kinds:
        with pytest.raises(ValueError, match="no_such_key"):
            kind(**given, **more, no_such_key=1)
        read: set[str] = set()

        class Spy(kind):  # type: ignore[misc,valid-type]
            def __getattribute__(self, name: str) -> Any:
                read.add(name)  # noqa: B023 - of this round
                return super().__getattribute__(name)

        config = Spy(**given, **more)
        read.clear()
        use(config, out=tmp_path / kind.__name__)
        assert set(kind.model_fields) <= read
    with pytest.raises(ValueError, match="quantise"):  # of one attack
        EvaluateConfig(**given, quantise=8)
    assert request.config.getini("filterwarnings")[0] == "error"  # no deprecated alias goes unseen
