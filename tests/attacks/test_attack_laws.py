"""Laws that every attack goes through."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import (
    ATTACKS,
    DI,
    LLC,
    MDI,
    NES,
    SINI,
    SPSA,
    VMI,
    VNI,
    AttackResult,
    AutoAttack,
    Status,
    Targeted,
    Untargeted,
    with_normalisation,
)
from mycelia.attacks.base import Attack
from mycelia.attacks.goals import Goal
from mycelia.attacks.norms import norm
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.closed import distances
from tests.attacks.members import MEMBERS
from tests.attacks.worlds import EPS, Member, affine, images, small

ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.fixture(scope="module", params=MEMBERS, ids=lambda member: member.name)
def member(request: pytest.FixtureRequest) -> Member:
    found: Member = request.param
    return found


@pytest.fixture(scope="module")
def usual(member: Member) -> AttackResult:
    """On all images in float64, with the labels of `labels`; no test changes it."""
    x = images()
    return attacked(member, small(), x, Untargeted(labels(x)))


@pytest.fixture(scope="module")
def single(member: Member) -> AttackResult:
    """The same in float32."""
    x = images(dtype=torch.float32)
    return attacked(member, small(torch.float32), x, Untargeted(labels(x)))


def attacked(member: Member, model: Any, x: Any, goal: Goal, **more: Any) -> AttackResult:
    arguments = {"eps": EPS[member.attack.norm], "rng": 5} | more
    return member.attack.run(model, x, goal, **arguments)


def labels(x: Tensor) -> Tensor:
    """What the model says, but for every fifth row, which it has wrong."""
    y = small(x.dtype)(x).argmax(1)
    return torch.where(torch.arange(len(y)) % 5 == 4, (y + 1) % 4, y)


def size(delta: Tensor, p: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Norms by NumPy, in float64."""
    flat = delta.double().flatten(1).cpu().numpy()
    order = {"l0": 0, "l1": 1, "l2": 2, "linf": np.inf}[p]
    return np.array([np.linalg.norm(row, ord=order) for row in flat])


class Watched(nn.Module):
    """Keeps all inputs, and looks at the mode."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = small() if inner is None else inner
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        found: Tensor = self.inner(x)
        return found


def test_every_attack_is_under_these_laws() -> None:
    assert {type(member.attack) for member in MEMBERS} == set(ATTACKS.values())


def test_every_row_has_status(member: Member, usual: AttackResult) -> None:
    """Each says what happened, and is what it says; one that cannot be attacked says why and stops nobody."""
    x = images()
    y = labels(x)
    assert usual.counts.n == len(x) == len(usual.reason)
    assert usual.is_(Status.CLEAN_WRONG).nonzero()[:, 0].tolist() == [4, 9]
    assert usual.counts.failed == usual.counts.already_target == usual.unreproduced == 0
    assert set(usual.reason) == {""}
    reached = small()(usual.x_adv).argmax(1) != y
    broken, wrong = usual.is_(Status.BROKEN), usual.is_(Status.CLEAN_WRONG)
    assert bool(reached[broken].all())
    assert torch.equal(usual.verified, reached)
    if member.attack.kind != "minimum":  # which may have found one further away
        assert not bool(reached[usual.is_(Status.HELD)].any())
    assert bool((usual.best_step[~wrong] >= 0).all())
    assert bool((usual.queries[~wrong] > 1).all())
    changed = (usual.x_adv != x).flatten(1).any(1)
    assert bool(changed[broken].all())

    class Holes(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = small()(v)
            return torch.where(v[:, 0, 0, :1] == 0.123456, torch.nan, found)

    x[3, 0, 0, 0], x[7], x[8, 0, 0, 0] = torch.nan, torch.inf, 0.123456
    result = attacked(member, Holes(), x, Untargeted(y))
    assert result.is_(Status.FAILED).nonzero()[:, 0].tolist() == [3, 7, 8]
    assert [result.reason[row].split(";")[0] for row in (3, 7, 8)] == [  # a suite says it for each attack
        "an input that is not finite", "an input that is not finite", "the model's output is not finite",
    ]  # fmt: skip
    assert torch.equal(result.x_adv[8], x[8])
    assert torch.equal(result.x_adv[3], x[3]) or bool(result.x_adv[3, 0, 0, 0].isnan())
    others = [row for row in range(len(x)) if row not in (3, 7, 8)]
    assert torch.equal(result.status[others], usual.status[others])
    assert {result.reason[row] for row in others} == {""}
    assert torch.allclose(result.x_adv[others], usual.x_adv[others], atol=1e-5)

    class NoSlope(nn.Module):
        """Outputs are finite, and gradients are not."""

        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = small()(v)
            return found + (0 * v[:, 0, 0, :1]).sqrt()

    if member.attack.needs == "gradient" and not isinstance(member.attack, AutoAttack):
        x = images(3)
        result = attacked(member, NoSlope(), x, Untargeted(small()(x).argmax(1)), keep="loss")
        failed = result.is_(Status.FAILED)
        lucky = result.is_(Status.BROKEN)  # by a random start
        assert bool((failed | lucky).all())
        assert torch.equal(result.x_adv[failed], x[failed])
        for row in range(3):
            assert result.reason[row] == ("a gradient that is not finite" if failed[row] else "")


def test_norm_never_exceeds_eps(member: Member, usual: AttackResult, single: AttackResult) -> None:
    """In ball and box, after all rounding, also where the box cuts the ball; distances are what they say."""
    p, eps = member.attack.norm, EPS[member.attack.norm]
    low, high = torch.zeros(1, 6, 6, dtype=torch.float64), torch.ones(1, 6, 6, dtype=torch.float64)
    low[0, 0], high[0, 1] = 0.3, 0.7
    corner = torch.minimum(torch.maximum(images(4).round(), low), high)
    cut = attacked(
        member, small(), corner, Untargeted(small()(corner).argmax(1)), bounds=(low, high), eps=2 * eps,
        keep="closest" if isinstance(member.attack, AutoAttack) else "loss",
    )  # fmt: skip
    runs = ((usual, images(), eps), (single, images(dtype=torch.float32), eps), (cut, corner, 2 * eps))
    for result, x, radius in runs:
        delta = result.x_adv.double() - x.double()
        for each in ("l0", "l1", "l2", "linf"):
            assert np.allclose(result.distance[each], size(delta, each), rtol=1e-12, atol=0)
        kept = torch.ones(len(x), dtype=torch.bool)
        if member.attack.kind == "minimum":
            kept = result.is_(Status.BROKEN)
        assert bool((size(delta, p)[kept] <= radius * (1 + 1e-6)).all())
        least, most = (low, high) if result is cut else (0.0, 1.0)
        assert bool(((result.x_adv >= least) & (result.x_adv <= most)).all())


def test_batch_invariance(member: Member, usual: AttackResult) -> None:
    """Split, permuted, duplicated, alone: a row's result is its own."""
    x = images()
    y = labels(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    rows = torch.cat([order, order[:3]])
    for some, batch in ((rows, 5), (order[:1], 256)):
        other = attacked(member, small(), x[some], Untargeted(y[some]), batch=batch)
        assert torch.equal(other.status, usual.status[some])
        assert torch.allclose(other.x_adv, usual.x_adv[some], atol=1e-5)
        assert torch.equal(other.queries, usual.queries[some])
    empty = attacked(member, small(), x[:0], Untargeted(y[:0]))
    assert (len(empty), empty.success_rate, empty.reason) == (0, None, ())


def test_rng_is_explicit(member: Member, single: AttackResult) -> None:
    """The same bits from the same seed, whatever the global generators say, and these stay as they are."""

    def states() -> list[bytes]:
        words = np.random.get_state()[1].tobytes()  # noqa: NPY002
        return [torch.get_rng_state().numpy().tobytes(), words, repr(random.getstate()).encode()]

    x = images(dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        model, y = small(torch.float32), labels(x)
        before = states()
        again = attacked(member, model, x, Untargeted(y))
        assert states() == before
    assert torch.equal(again.x_adv, single.x_adv)
    for name in ("status", "queries", "gradients", "best_step"):
        assert torch.equal(getattr(again, name), getattr(single, name))


def test_model_untouched(member: Member) -> None:
    """Modes, parameters, buffers, gradients: also when the model raises half way."""

    class Breaks(nn.Module):
        def __init__(self, after: int) -> None:
            super().__init__()
            self.inner, self.left = small().train(), after
            self.inner.layers[3].eval()  # modes are mixed
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("last", torch.zeros(1))
            self.modes: set[bool] = set()

        def forward(self, x: Tensor) -> Tensor:
            self.modes |= {module.training for module in self.modules()}
            self.calls += 1
            self.last = self.last + 1  # another tensor
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("half way")
            found: Tensor = self.inner(x)
            return found

    x = images(3)
    y = labels(x)
    for after in (10**6, 1, 2):
        model = Breaks(after)
        parameters = list(model.parameters())
        parameters[0].grad = gradient = torch.ones_like(parameters[0])
        parameters[1].requires_grad_(False)
        state, buffers = copy.deepcopy(model.state_dict()), list(model.buffers())
        modes = [module.training for module in model.modules()]
        assert set(modes) == {True, False}
        if after < 10**6:
            with pytest.raises(RuntimeError, match="half way"):
                attacked(member, model, x, Untargeted(y))
        else:
            attacked(member, model, x, Untargeted(y))
        assert model.modes == {False}
        assert [module.training for module in model.modules()] == modes
        assert [parameter.requires_grad for parameter in parameters] == [True, False] + [True] * (
            len(parameters) - 2
        )
        assert parameters[0].grad is gradient
        assert torch.equal(gradient, torch.ones_like(gradient))
        assert all(parameter.grad is None for parameter in parameters[1:])
        assert all(mine is old for mine, old in zip(model.buffers(), buffers, strict=True))
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_without_a_radius_nothing_changes(member: Member) -> None:
    x = images(6)
    y = labels(x)
    result = attacked(member, small(), x, Untargeted(y), eps=0.0)
    assert torch.equal(result.is_(Status.HELD), small()(x).argmax(1) == y)
    if member.attack.kind == "fixed":
        assert torch.equal(result.x_adv, x)


def test_goal_is_obeyed_by_every_attack(member: Member) -> None:
    """A targeted call moves towards the target, and nothing else counts as success."""
    x = images(8)
    clean = small()(x).detach()
    y = clean.argmax(1)
    if not member.attack.targeted:
        with pytest.raises(ConfigError, match="untargeted"):
            attacked(member, small(), x, Targeted((y + 1) % 4))
        return
    t = clean.topk(2, 1).indices[:, 1]
    result = attacked(member, small(), x, Targeted(t, y))
    after = small()(result.x_adv).detach()
    near = result.distance[member.attack.norm] <= EPS[member.attack.norm] * (1 + 1e-6)  # others may go beyond
    assert torch.equal(result.is_(Status.BROKEN), (after.argmax(1) == t) & near)
    assert result.counts.clean_wrong == 0
    row = torch.arange(len(x))
    gained = (after - after.logsumexp(1, keepdim=True))[row, t] - (clean - clean.logsumexp(1, keepdim=True))[
        row, t
    ]
    assert float(gained.mean()) > 0
    there = attacked(member, small(), x, Targeted(y))
    assert there.counts.already_target == len(x)
    assert torch.equal(there.x_adv, x)


def test_on_affine_models_it_is_near_the_closed_form(member: Member) -> None:
    """No row is broken that cannot be, and attacks that are exact there break all others."""
    model, p = affine(), member.attack.norm
    if p == "l0":
        pytest.skip("the closed form is that of a dual norm")
    x = 0.5 + 0.1 * torch.randn(30, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x = x.view(30, 1, 2, 5) if member.images else x
    z = model(x).detach()
    y = z.argmax(1)
    distance = distances(model, x, y, p)
    eps = float(distance.median())
    result = member.attack.run(model, x, Untargeted(y), eps=eps, rng=1, bounds=(-50.0, 50.0))
    broken = result.is_(Status.BROKEN)
    assert not bool((broken & (distance > eps * (1 + 1e-6))).any())
    if member.exact:
        two = [distances(model, x, y, p, only=int(k)) for k in range(4)]
        nearest = torch.stack(two, 1).argmin(1)
        runner_up = z.scatter(1, y[:, None], -torch.inf).argmax(1)
        sure = (distance < eps * (1 - 1e-6)) & (nearest == runner_up)  # one step goes to the runner-up
        assert int(sure.sum()) > 5
        assert bool(broken[sure].all())


def test_clean_wrong_is_not_success(member: Member, usual: AttackResult) -> None:
    """A row that is wrong already is not attacked, not changed, and in no numerator or denominator."""
    x = images()
    wrong = usual.is_(Status.CLEAN_WRONG)
    counts = usual.counts
    assert usual.success_rate == counts.broken / (len(x) - 2)
    assert usual.robust_accuracy == counts.held / len(x)
    assert usual.clean_accuracy == (len(x) - 2) / len(x)
    assert torch.equal(usual.x_adv[wrong], x[wrong])
    assert usual.best_step[wrong].tolist() == [-1, -1]
    assert usual.queries[wrong].tolist() == [1, 1]
    assert usual.gradients[wrong].tolist() == [0, 0]
    model = Watched()
    alone = attacked(member, model, x[:4], Untargeted((small()(x[:4]).argmax(1) + 1) % 4))
    assert alone.counts.clean_wrong == 4
    assert (alone.success_rate, alone.robust_accuracy, alone.clean_accuracy) == (None, 0.0, 0.0)
    assert torch.equal(alone.x_adv, x[:4])
    assert all(torch.equal(seen, x[:4]) for seen in model.seen)
    # The look at the clean inputs, and the second look; a suite has one for itself.
    assert len(model.seen) == (3 if isinstance(member.attack, AutoAttack) else 2)


def test_a_constant_model_is_never_broken(member: Member) -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (
                torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=x.dtype).expand(len(x), 4)
                + 0 * x.flatten(1).sum(1)[:, None]
            )

    x = images(2)
    result = attacked(member, Constant(), x, Untargeted(torch.ones(2, dtype=torch.int64)))
    assert result.counts.broken == 0


@pytest.mark.parametrize(
    ("dtype", "inner", "device"),
    [
        pytest.param(torch.float32, torch.float64, "cpu", id="finer"),
        pytest.param(torch.float64, torch.float32, "cpu", id="coarser"),
        pytest.param(torch.float32, torch.float64, "cuda", id="cuda", marks=ON_A_GPU),
    ],
)
def test_dtype_device(member: Member, dtype: torch.dtype, inner: torch.dtype, device: str) -> None:
    """The output's are the input's, whatever those of the model, the labels and the bounds."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small(inner)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x.to(inner))
            return found

    x = images(4).to(device, dtype)
    model = Mixed().eval().to(device)
    y = model(x).argmax(1)
    low = torch.zeros(1, 6, 6, dtype=torch.float64, device=device)
    result = attacked(member, model, x, Untargeted(y.to(torch.int32)), bounds=(low, 1))
    assert (result.x_adv.dtype, result.x_adv.device, result.x_adv.shape) == (dtype, x.device, x.shape)
    assert {getattr(result, name).device for name in ("status", "verified", "loss")} == {x.device}
    assert result.counts.failed == result.counts.clean_wrong == 0
    kept = result.is_(Status.BROKEN) if member.attack.kind == "minimum" else result.status >= 0
    limit = EPS[member.attack.norm] * (1 + 1e-6)
    assert bool((size(result.x_adv.double() - x.double(), member.attack.norm)[kept.cpu()] <= limit).all())
    reached = model(result.x_adv).argmax(1) != y
    assert bool(reached[result.is_(Status.BROKEN)].all())
    assert result.unreproduced == 0
    assert bool((result.x_adv != x).any())


def test_eps_units(member: Member, usual: AttackResult) -> None:
    """Raw units of the input: a normalising layer in front changes nothing."""
    inner = small()
    first = inner.layers[0]
    assert isinstance(first, nn.Conv2d)
    with torch.no_grad():  # to the last bit: some attacks end exactly on a boundary
        first.weight *= 0.25
    model = with_normalisation(inner, [0.0], [0.25]).eval()
    x = images()
    assert torch.equal(model(x), small()(x))
    result = attacked(member, model, x[:6], Untargeted(labels(x)[:6]))
    assert torch.equal(result.status, usual.status[:6])
    assert torch.allclose(result.x_adv, usual.x_adv[:6], atol=1e-9)


def test_bounds_tolerance_and_message(member: Member) -> None:
    """No input of the model lies beyond; rounding of 1e-6 of the width is taken, more is named in numbers."""
    x = images(3)
    x = torch.where((x - 0.5).abs() > 0.3, x.round(), x)  # many values at the ends
    y = small()(x).argmax(1)
    model = Watched()
    usual = attacked(member, model, x, Untargeted(y))
    assert all(len(seen) and 0 <= float(seen.min()) <= float(seen.max()) <= 1 for seen in model.seen)

    places = x == 1
    slightly = torch.where(places, 1 + 0.9e-6, x)
    result = attacked(member, small(), slightly, Untargeted(y))
    assert torch.equal(result.x_adv, usual.x_adv)
    beyond = torch.where(places, 1 + 1.1e-6, x)
    beyond[2] = x[2].clamp(max=0.9)
    with pytest.raises(ValueError, match=r"between 0 and 1, beyond bounds 0 to 1 in 2 rows \(first: 0\)"):
        attacked(member, small(), beyond, Untargeted(y))
    with pytest.raises(
        DataError, match=r"(?s)between -0\.5 and 1\.5, beyond bounds 0 to 1 in 3 rows.*bounds="
    ):
        attacked(member, small(), x * 2 - 0.5, Untargeted(y))


PROBES = (NES, SPSA, DI, MDI, VMI, VNI, SINI)
"""These take gradients from points that are no candidates."""


@pytest.mark.parametrize("keep", ["closest", "loss"])
def test_best_not_last(member: Member, keep: str) -> None:
    """Nothing better was looked at than what comes back: no nearer success, and no higher loss."""
    attack = member.attack
    loss = getattr(attack, "loss", None)
    # That of the least likely class is about another goal.
    comparable = isinstance(loss, str) and attack.kind == "fixed" and not isinstance(attack, (*PROBES, LLC))
    if keep == "loss" and not comparable:
        return
    x, eps, p = images(), EPS[attack.norm], attack.norm
    y = labels(x)
    for row in (0, 2):
        model, goal = Watched(), Untargeted(y[row : row + 1])
        result = attacked(member, model, x[row : row + 1], goal, keep=keep)
        seen = torch.cat(model.seen[1:-1])  # without the clean look and the second look
        z = small()(seen).detach()
        distance = norm(seen - x[row], p)
        inside = distance <= eps * (1 + 1e-6)
        good = (z.argmax(1) != y[row]) & inside
        if keep == "closest" and getattr(attack, "rule", "") != "EN":  # which compares by another measure
            if not isinstance(attack, PROBES):
                assert bool(good.any()) == bool(result.is_(Status.BROKEN)[0])
            if bool(good.any()) and bool(result.is_(Status.BROKEN)[0]):
                assert float(result.distance[p][0]) <= float(distance[good].min()) * (1 + 1e-9)
        if comparable and (keep == "loss" or bool(result.is_(Status.HELD)[0])):
            losses = Untargeted(y[row].expand(int(inside.sum()))).loss(z[inside], loss)  # type: ignore[arg-type]
            assert float(result.loss[0]) >= float(losses.max()) - 1e-9


@pytest.mark.parametrize("kind", ATTACKS.values(), ids=lambda kind: kind.__name__)
def test_unknown_setting_refused(kind: type[Attack]) -> None:
    """There is no setting that an attack does not know, and none of its own that it does not read."""
    members = [each for each in MEMBERS if type(each.attack) is kind]
    x = images(2)
    goal = Untargeted(small()(x).argmax(1))
    with pytest.raises(TypeError, match="no_such_setting"):
        kind(no_such_setting=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no_such_argument"):
        attacked(members[0], small(), x, goal, no_such_argument=1)
    with pytest.raises(ConfigError, match="norm"):
        kind(norm="l7")  # type: ignore[arg-type]
    read: set[str] = set()

    def reading(self: Any, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(self, name)

    spy = type(kind.__name__, (kind,), {"__getattribute__": reading})
    for member in members:
        watched = copy.copy(member.attack)
        object.__setattr__(watched, "__class__", spy)
        watched.run(small(), x, goal, eps=EPS[watched.norm], rng=5)
    assert {each.name for each in dataclasses.fields(kind)} <= read


def test_inputs_that_are_refused(member: Member) -> None:
    x, y = images(), torch.zeros(12, dtype=torch.int64)
    with pytest.raises(DataError, match="floating point"):
        attacked(member, small(), (x * 255).to(torch.uint8), Untargeted(y))
    with pytest.raises(DataError, match="a goal of 3 rows"):
        attacked(member, small(), x, Untargeted(y[:3]))
    for eps in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="eps"):
            attacked(member, small(), x, Untargeted(y), eps=eps)
    if member.attack.needs == "gradient":
        with pytest.raises(ConfigError, match="needs a gradient"):
            attacked(member, lambda v: v.flatten(1)[:, :4], x, Untargeted(y))
