"""What variance-tuned attacks do, read off the points at which they ask for gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mycelia.attacks import VMI, VNI, Untargeted
from tests.attacks.worlds import images, small


class Watched(nn.Module):
    """Keeps the points of which a gradient was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.traced = small(), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            self.traced.append(x.detach().clone())
        found: Tensor = self.inner(x)
        return found


def slope(points: Tensor, y: Tensor) -> Tensor:
    leaf = points.clone().requires_grad_()
    loss = functional.cross_entropy(small()(leaf), y, reduction="sum")
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("attack", [VMI, VNI], ids=["vmi", "vni"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-2.0, 3.0)])
def test_vmi_uses_gradient_variance(attack: type[VMI], low: float, high: float) -> None:
    """Algorithm 1 written out on the neighbours that it took: v = mean ∇J(neighbour) − ∇J(point)."""
    x = low + (high - low) * images(20)
    y = small()(x).argmax(1)
    eps, steps, count, beta, decay, size = 0.1, 5, 4, 1.5, 0.8, 0.04
    model = Watched()
    attack(steps=steps, step_size=size, neighbours=count, radius=beta, decay=decay).run(
        model, x, Untargeted(y), eps=eps, keep="loss", bounds=(low, high)
    )
    seen = model.traced
    assert len(seen) == steps + (steps - 1) * count  # the last step needs no variance
    variance, gathered, points = torch.zeros_like(x), torch.zeros_like(x), x
    for step in range(steps):
        first = seen[step * (count + 1)]
        ahead = decay * size * gathered if attack is VNI else 0.0
        assert torch.allclose(first, (points + ahead).clamp(low, high), atol=1e-9)
        grad = slope(first, y)
        whole = grad + variance
        gathered = decay * gathered + whole / whole.abs().mean((1, 2, 3), keepdim=True)
        near = seen[step * (count + 1) + 1 : (step + 1) * (count + 1)]
        if step + 1 < steps:
            assert len(near) == count
            variance = torch.stack([slope(each, y) for each in near]).mean(0) - grad
            assert float(variance.abs().max()) > 0
        for each in near:
            away = (each - points).abs()
            assert float(away.max()) <= beta * eps * (1 + 1e-9)
            assert float(away.max()) > eps  # the whole neighbourhood, not the ball
            assert low <= float(each.min()) <= float(each.max()) <= high
        points = (points + size * gathered.sign()).clamp(x - eps, x + eps).clamp(low, high)
        assert float((points - x).abs().max()) <= eps * (1 + 1e-9)
    drawn = torch.stack([each for step in range(steps - 1) for each in seen[step * 5 + 1 : step * 5 + 5]])
    assert len({tuple(each[0, 0, 0].tolist()) for each in drawn}) == (steps - 1) * count


@pytest.mark.parametrize("attack", [VMI, VNI], ids=["vmi", "vni"])
@pytest.mark.parametrize("p", ["linf", "l2", "l1"])
def test_points_that_are_remembered_stay_in_ball_and_box(attack: type[VMI], p: str) -> None:
    eps = {"linf": 0.3, "l2": 1.0, "l1": 3.0}[p]
    x = images(20)
    y = small()(x).argmax(1)
    model = Watched()
    found = attack(norm=p, steps=4).run(model, x, Untargeted(y), eps=eps, keep="loss")  # type: ignore[arg-type]
    assert float(found.distance[p].max()) <= eps * (1 + 1e-6)
    assert all(0 <= float(each.min()) <= float(each.max()) <= 1 for each in model.traced)
    losses = functional.cross_entropy(small()(found.x_adv), y, reduction="none").detach()
    assert torch.allclose(found.loss, losses)
