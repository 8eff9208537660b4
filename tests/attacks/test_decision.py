"""Attacks by labels and scores against closed forms on affine models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mycelia.attacks import (
    NES,
    PSO,
    Attack,
    Boundary,
    Genetic,
    HopSkipJump,
    Pointwise,
    SaltAndPepper,
    Status,
    Targeted,
    Untargeted,
    as_model,
)
from mycelia.attacks.norms import Norm, norm
from tests.attacks.worlds import Affine, affine

torch.set_num_threads(1)

DUAL: Any = {"linf": "l1", "l2": "l2", "l1": "linf"}


def plane(d: int = 10, seed: int = 7) -> Affine:
    """Two classes: the distance to the other one is |f(x)| over the dual norm of w."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(d, dtype=torch.float64, generator=draw)
    return Affine(torch.stack([-w / 2, w / 2]), torch.tensor([-0.1, 0.1], dtype=torch.float64))


def labels_only(model: Any) -> Any:
    return as_model(lambda x: model(x).detach().argmax(1), "labels")


def true_distance(model: Affine, x: Tensor, y: Tensor, p: str) -> Tensor:
    z, w = model(x).detach(), model.linear.weight.detach()
    gap = z.gather(1, y[:, None]) - z
    slope = torch.stack([norm(w[a] - w, DUAL[p]) for a in y.tolist()])
    return torch.where(slope > 0, gap / slope, torch.inf).amin(1)


def inputs(n: int, d: int = 10, seed: int = 3) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_hopskipjump_in_two_dimensions() -> None:
    """w = (3, −4), b = 1, x = (2, 1): f = 3, the nearest change is (−0.36, 0.48)."""
    w = torch.tensor([3.0, -4.0], dtype=torch.float64)
    model = Affine(torch.stack([-w / 2, w / 2]), torch.tensor([-0.5, 0.5], dtype=torch.float64))
    x = torch.tensor([[2.0, 1.0]], dtype=torch.float64)
    goal = Untargeted(torch.tensor([1]))
    result = HopSkipJump(steps=20).run(labels_only(model), x, goal, rng=0, bounds=(-10.0, 10.0))
    assert float(result.distance["l2"]) == pytest.approx(0.6, rel=0.01)
    change = result.x_adv - x
    assert torch.allclose(change, torch.tensor([[-0.36, 0.48]], dtype=torch.float64), atol=0.05)
    result = HopSkipJump(norm="linf", steps=20).run(labels_only(model), x, goal, rng=0, bounds=(-10.0, 10.0))
    assert float(result.distance["linf"]) == pytest.approx(3 / 7, rel=0.02)


@pytest.mark.parametrize("p", ["l2", "linf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bounds", [(-20.0, 20.0), (-float("inf"), float("inf"))], ids=["box", "no box"])
def test_hopskipjump_is_near_the_true_distance(
    p: Norm, dtype: torch.dtype, bounds: tuple[float, float]
) -> None:
    model = plane().to(dtype)
    x = inputs(20).to(dtype)
    y = model(x).argmax(1)
    attack = HopSkipJump(norm=p, steps=25)
    result = attack.run(labels_only(model), x, Untargeted(y), rng=1, bounds=bounds)
    true = true_distance(model, x, y, p).double()
    assert result.counts.broken == 20
    ratio = result.distance[p] / true
    assert float(ratio.min()) > 1 - 1e-4
    assert float(ratio.max()) < 1.05
    assert float(ratio.median()) < 1.02


def test_hopskipjump_with_several_classes_and_targets() -> None:
    model = affine()
    x = inputs(20)
    y = model(x).argmax(1)
    result = HopSkipJump(steps=20).run(labels_only(model), x, Untargeted(y), rng=1, bounds=(-20.0, 20.0))
    ratio = result.distance["l2"] / true_distance(model, x, y, "l2")
    assert float(ratio.min()) > 1 - 1e-9
    assert float(ratio.median()) < 1.05  # a few rows end at the face of another class
    t = model(x).topk(2, 1).indices[:, 1]
    aimed = HopSkipJump(steps=20).run(labels_only(model), x, Targeted(t, y), rng=1, bounds=(-20.0, 20.0))
    assert aimed.counts.broken == 20
    assert torch.equal(model(aimed.x_adv).argmax(1), t)


def test_boundary_is_near_the_true_distance() -> None:
    model = plane()
    x = inputs(10)
    y = model(x).argmax(1)
    result = Boundary(steps=1500).run(labels_only(model), x, Untargeted(y), rng=1, bounds=(-20.0, 20.0))
    ratio = result.distance["l2"] / true_distance(model, x, y, "l2")
    assert float(ratio.min()) > 1 - 1e-9
    assert float(ratio.max()) < 1.05


def test_boundary_steps_are_of_each_row() -> None:
    """A row whose distance is a hundred times another's converges as well beside it as alone."""
    model = plane()
    x = torch.cat([inputs(3), 100 * inputs(3, seed=4)])
    y = model(x).argmax(1)
    attack = Boundary(steps=150)
    bounds = (-1000.0, 1000.0)
    together = attack.run(labels_only(model), x, Untargeted(y), rng=1, bounds=bounds)
    for row in range(6):
        alone = attack.run(
            labels_only(model), x[row : row + 1], Untargeted(y[row : row + 1]), rng=1, bounds=bounds
        )
        assert torch.allclose(alone.x_adv[0], together.x_adv[row], atol=1e-9)
        assert int(alone.queries[0]) == int(together.queries[row])


@pytest.mark.parametrize(
    "attack",
    [
        NES(steps=60), NES(norm="l2", steps=60), NES(mode="partial", steps=60),
        NES(mode="label", steps=150, sigma=0.1, spread=0.1), PSO(steps=60), Genetic(steps=200),
    ],
    ids=lambda attack: f"{type(attack).__name__}-{attack.norm}-{getattr(attack, 'mode', '')}",
)  # fmt: skip
def test_at_a_fifth_more_than_the_distance_rows_break(attack: Attack) -> None:
    """Two classes: at a radius below the distance no row can be broken, a fifth above it each is."""
    model = plane()
    given = labels_only(model) if getattr(attack, "mode", "") == "label" else model
    x = inputs(12)
    y = model(x).argmax(1)
    distance = true_distance(model, x, y, attack.norm)
    broken, out_of_reach = [], []
    for row in range(12 if isinstance(attack, PSO) else 4):
        some, goal = x[row : row + 1], Untargeted(y[row : row + 1])
        for factor, kept in ((1.2, broken), (0.999, out_of_reach)):
            result = attack.run(
                given, some, goal, eps=factor * float(distance[row]), rng=2, bounds=(-20.0, 20.0)
            )
            kept.append(int(result.status[0]))
    assert broken == [Status.BROKEN] * len(broken)
    assert Status.BROKEN not in out_of_reach


def test_nes_gradient_has_the_closed_form() -> None:
    """On a linear loss a pair is exact along its direction: the step climbs as w does, whatever σ is."""
    model = plane(4)
    x = inputs(5, 4)
    y = model(x).argmax(1)
    true = true_distance(model, x, y, "linf")
    for sigma in (1e-4, 1e-1):
        result = NES(pairs=2000, steps=1, step_size=100.0, sigma=sigma, momentum=0.0).run(
            model, x, Untargeted(y), eps=float(true.max()) * 1.001, rng=0, bounds=(-50.0, 50.0)
        )
        assert result.counts.broken == 5  # the signs of all four coordinates are right
        assert bool((result.queries == 1 + 1 + 4000 + 1).all())


def test_nes_partial_information_with_a_target() -> None:
    model = affine()
    x = inputs(10)
    z = model(x).detach()
    y, t = z.topk(2, 1).indices.T
    w = model.linear.weight.detach()
    gap = (z.gather(1, y[:, None]) - z.gather(1, t[:, None]))[:, 0] / norm(w[y] - w[t], "l1")
    attack = NES(mode="partial", top=1, steps=80)
    result = attack.run(model, x, Targeted(t, y), eps=1.5 * float(gap.max()), rng=0, bounds=(-20.0, 20.0))
    assert result.counts.broken >= 9
    assert float(result.distance["linf"].max()) <= 1.5 * float(gap.max()) * (1 + 1e-6)


def test_pointwise_is_minimal() -> None:
    """l0: no single coordinate can be reset any more. One strong coordinate is found to be enough."""
    w = torch.tensor([0.1] * 9 + [5.0], dtype=torch.float64)
    model = Affine(torch.stack([w / 2, -w / 2]), torch.tensor([0.0, 1.0], dtype=torch.float64))
    x = torch.full((4, 10), 0.5, dtype=torch.float64) + 0.02 * inputs(4)
    y = model(x).argmax(1)
    result = Pointwise(norm="l0").run(labels_only(model), x, Untargeted(y), rng=0)
    assert result.distance["l0"].tolist() == [1.0] * 4
    assert bool((result.x_adv != x)[:, 9].all())
    gap = (model(x).detach()[:, 0] - model(x).detach()[:, 1]).abs() / 5
    nearest = Pointwise(norm="l1", halvings=12).run(labels_only(model), x, Untargeted(y), rng=0)
    assert torch.allclose(nearest.distance["l1"], gap, rtol=0.01)  # the dual norm is that coordinate


def test_pointwise_leaves_nothing_to_reset() -> None:
    model = affine()
    x = inputs(8) * 0.2 + 0.5
    x = x.clamp(0, 1)
    y = model(x).argmax(1)
    result = Pointwise(norm="l0", passes=20).run(labels_only(model), x, Untargeted(y), rng=0)
    for row in result.is_(Status.BROKEN).nonzero()[:, 0].tolist():
        for place in (result.x_adv[row] != x[row]).nonzero()[:, 0].tolist():
            trial = result.x_adv[row].clone()
            trial[place] = x[row, place]
            assert int(model(trial[None]).argmax(1)) == int(y[row])


def test_salt_and_pepper_uses_the_bounds() -> None:
    model = affine()
    x = inputs(8).clamp(-1, 1)
    y = model(x).argmax(1)
    result = SaltAndPepper(norm="l0", steps=300).run(
        labels_only(model), x, Untargeted(y), rng=0, bounds=(-2.0, 3.0)
    )
    broken = result.is_(Status.BROKEN)
    assert bool(broken.any())
    values = result.x_adv[broken][result.x_adv[broken] != x[broken]]
    assert set(values.unique().tolist()) <= {-2.0, 3.0}
