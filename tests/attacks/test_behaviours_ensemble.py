"""Behaviours of APGD, input diversity and the ensemble that have a name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import APGD, APGDT, DI, MDI, AutoAttack, Status, Untargeted
from mycelia.attacks.norms import NORMS
from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import derive
from tests.attacks.worlds import EPS, affine, images, small


class Watched(nn.Module):
    """Keeps what it is shown, and of what a gradient was asked."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen, self.traced = inner, list[Tensor](), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        (self.traced if x.requires_grad else self.seen).append(x.detach().clone())
        found: Tensor = self.inner(x)
        return found


def test_di_transform_fires() -> None:
    """At p = 1 every gradient is taken at another image than the one that is attacked, at p = 0 none is."""
    x = images(30) * 0.8 + 0.1
    y = small()(x).argmax(1)
    for attack in (DI, MDI):
        for p in (0.0, 1.0):
            model = Watched(small())
            attack(layout="nchw", p=p, steps=4).run(model, x, Untargeted(y), eps=0.01, batch=100)
            changed = torch.cat([((points == 0).flatten(1).sum(1) > 0).double() for points in model.traced])
            assert len(changed) > 100
            assert float(changed.mean()) == p


@pytest.mark.parametrize("p", ["linf", "l2", "l1"])
def test_apgd_best_is_best(p: str) -> None:
    x = images(10)
    y = small()(x).argmax(1)
    model = Watched(small())
    found = APGD(norm=p, steps=30).run(model, x, Untargeted(y), eps=EPS[p] / 2, keep="loss")  # type: ignore[arg-type, index]
    goal = Untargeted(y)
    best = torch.full((10,), -torch.inf, dtype=torch.float64)
    for points in (*model.traced, *model.seen[1:-1]):
        size = torch.linalg.vector_norm(
            (points - x).flatten(1), ord={"linf": math.inf, "l2": 2, "l1": 1}[p], dim=1
        )
        losses = goal.loss(small()(points), "ce").detach()
        best = torch.where(size <= EPS[p] / 2 * (1 + 1e-9), torch.maximum(best, losses), best)  # type: ignore[index]
    assert torch.allclose(found.loss, best)
    assert torch.allclose(goal.loss(small()(found.x_adv), "ce").detach(), best)


def test_apgd_any_box_and_rank() -> None:
    """Any shape after the rows; boxes that are narrow, shifted, of one coordinate each, or infinite."""
    model = affine(4, 12)
    draw = torch.Generator().manual_seed(1)
    for shape in ((12,), (3, 4), (1, 3, 4), (2, 1, 3, 2), (1, 1, 2, 3, 2)):
        for low, high in ((0.0, 1.0), (-3.0, 7.0), (0.45, 0.55), (-math.inf, math.inf), (-np.inf, torch.inf)):
            least, most = max(low, -5.0), min(high, 5.0)
            x = least + (most - least) * torch.rand(8, *shape, dtype=torch.float64, generator=draw)
            y = model(x).argmax(1)
            for p in ("linf", "l2", "l1"):
                for attack in (APGD(norm=p, steps=8), APGDT(norm=p, steps=8)):  # type: ignore[arg-type]
                    found = attack.run(model, x, Untargeted(y), eps=0.3, bounds=(low, high))
                    assert found.x_adv.shape == x.shape
                    assert found.counts.failed == 0
                    assert bool(((found.x_adv >= low) & (found.x_adv <= high)).all())
                    assert float(found.distance[p].max()) <= 0.3 * (1 + 1e-6)
                    free = found.is_(Status.HELD) if math.isinf(low) else torch.zeros(8, dtype=torch.bool)
                    assert bool((found.distance[p][free] > 0.2).all())  # it goes to the ball's edge
        bounds = (
            torch.zeros(1, *shape, dtype=torch.float64),
            torch.rand(8, *shape, dtype=torch.float64) + 0.01,
        )
        x = bounds[1] * torch.rand(8, *shape, dtype=torch.float64, generator=draw)
        found = APGD(norm="l2", steps=8).run(model, x, Untargeted(model(x).argmax(1)), eps=5.0, bounds=bounds)
        assert bool((found.x_adv <= bounds[1]).all())
    for spelled in ("Linf", "inf", math.inf, "L2"):
        with pytest.raises(ConfigError, match="linf"):
            APGD(norm=spelled)  # type: ignore[arg-type]
    assert "linf" in NORMS


def test_pointwise_worst_case() -> None:
    """A row holds only if it held against each attack alone, and the first that broke it is named."""
    x = images(40)
    y = small()(x).argmax(1)
    for p in ("linf", "l2", "l1"):
        suite = AutoAttack(norm=p, steps=6, queries=40)  # type: ignore[arg-type]
        eps = 0.5 * EPS[p]  # type: ignore[index]
        found = suite.run(small(), x, Untargeted(y), eps=eps, rng=3)
        alone = [
            attack.run(small(), x, Untargeted(y), eps=eps, rng=derive(3, f"attacks/suite/{place}/{name}"))
            for place, (name, attack) in enumerate(suite.members)
        ]
        broken = torch.stack([result.is_(Status.BROKEN) for result in alone])
        assert torch.equal(found.is_(Status.BROKEN), broken.any(0))
        first = torch.where(broken.any(0), broken.to(torch.uint8).argmax(0), -1)
        assert torch.equal(found.broken_by, first)
        for row, place in enumerate(first.tolist()):
            if place >= 0:
                assert torch.equal(found.x_adv[row], alone[place].x_adv[row])
        assert 0 < found.counts.broken < 40
        assert found.robust_accuracy == 1 - float(broken.any(0).double().mean())


def test_class_count_edge_cases() -> None:
    """Two classes, a hundred, and a batch of which all rows break at once."""
    x = torch.rand(12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for classes in (2, 3, 100):
        model = affine(classes, 10)
        y = model(x).argmax(1)
        for eps in (1e-4, 3.0):
            found = AutoAttack(steps=5, queries=20).run(model, x, Untargeted(y), eps=eps, bounds=(-9.0, 9.0))
            assert found.counts.failed == 0
            assert found.counts.broken == (12 if eps > 1 else 0)
            tried = [facts.attacked for facts in found.members]
            assert tried == ([12, 12, 12, 12] if eps < 1 else [12, 0, 0, 0])
