"""Behaviours of attacks that look for a smallest change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import JSMA, CarliniWagner, DeepFool, Status, Targeted, Untargeted
from mycelia.attacks.norms import Norm
from tests.attacks.closed import distances
from tests.attacks.worlds import Affine, affine, images, small


@pytest.mark.parametrize("p", ["l2", "linf"])
@pytest.mark.parametrize("shape", [(10,), (2, 5), (1, 5, 2), (1, 1, 2, 5)])
@pytest.mark.parametrize("bounds", [(-torch.inf, torch.inf), (-50.0, 50.0), (0.0, 255.0)])
def test_deepfool_affine_exact(p: Norm, shape: tuple[int, ...], bounds: tuple[float, float]) -> None:
    for dtype, close in ((torch.float64, 1e-6), (torch.float32, 1e-4)):
        model = affine().to(dtype)
        draw = torch.Generator().manual_seed(3)
        x = (100 if bounds[1] == 255 else 0.5) + 0.1 * torch.randn(
            40, *shape, dtype=torch.float64, generator=draw
        )
        x = x.to(dtype)
        y = model(x).argmax(1)
        result = DeepFool(norm=p).run(model, x, Untargeted(y), bounds=bounds)
        assert result.counts.broken == 40
        expected = distances(model, x, y, p)
        # at 100 the logits of float32 have errors of 1e-4 themselves
        rel = 0.02 if dtype is torch.float32 and bounds[1] == 255 else close
        assert result.distance[p].tolist() == pytest.approx(expected.tolist(), rel=rel)
        if dtype is torch.float64:
            assert bool((result.best_step == result.best_step.clamp(max=2)).all())
            assert bool((result.queries <= 4).all())  # clean, at the input, after one step


@pytest.mark.parametrize("p", ["l2", "linf"])
def test_deepfool_in_a_box_that_cuts(p: Norm) -> None:
    """The smallest change inside the box, beside a general solver."""
    from scipy.optimize import minimize

    weight = torch.tensor([[0.0, 0.0, 0.0], [3.0, 1.0, -2.0]], dtype=torch.float64)
    model = Affine(weight, torch.tensor([0.0, -2.6], dtype=torch.float64))
    x = torch.tensor([[0.9, 0.2, 0.5]], dtype=torch.float64)
    result = DeepFool(norm=p).run(model, x, Untargeted(torch.tensor([0])))
    # unknowns: the change, and a bound on its norm
    w, b = weight[1].numpy(), -2.6
    found = minimize(
        lambda v: v[3],
        [0.05, 0.5, -0.4, 1.0],
        bounds=[(-0.9, 0.1), (-0.2, 0.8), (-0.5, 0.5), (0, 5)],
        constraints=[{"type": "ineq", "fun": lambda v: w @ (x[0].numpy() + v[:3]) + b}]
        + (
            [{"type": "ineq", "fun": lambda v: v[3] ** 2 - v[:3] @ v[:3]}]
            if p == "l2"
            else [
                {"type": "ineq", "fun": lambda v, k=k, s=s: v[3] - s * v[k]}
                for k in range(3)
                for s in (-1, 1)
            ]
        ),
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert found.success
    assert float(result.distance[p]) == pytest.approx(found.x[3], rel=1e-5)
    assert float(result.x_adv[0, 0]) == pytest.approx(1.0)  # this coordinate has run into its bound


class Recorded(CarliniWagner):
    """Keeps the constants of each attempt."""

    def _attempt(self, search: Any, rows: Tensor, constant: Tensor, first: int, starts: Tensor) -> Tensor:
        SEEN.append((rows.tolist(), constant.tolist()))
        success = super()._attempt(search, rows, constant, first, starts)
        OUTCOMES.append(success.tolist())
        return success


SEEN: list[tuple[list[int], list[float]]] = []
OUTCOMES: list[list[bool]] = []


def test_cw_search_both_ways() -> None:
    """After a success a constant falls, after a failure it rises, also when it had succeeded before."""
    SEEN.clear()
    OUTCOMES.clear()
    x = images(8)
    y = small()(x).argmax(1)
    attack = Recorded(steps=40, searches=8, constant=1.0, learning_rate=0.05)
    result = attack.run(small(), x, Untargeted(y))
    assert result.counts.broken == len(x)
    went: set[tuple[bool, bool, bool]] = set()  # succeeded before, succeeds now, rises
    succeeded = [False] * len(x)
    for (_, now), outcome, (_, following) in zip(SEEN, OUTCOMES, SEEN[1:], strict=False):
        for row, (before, after, success) in enumerate(zip(now, following, outcome, strict=True)):
            assert (after < before) if success else (after > before)
            went.add((succeeded[row], success, after > before))
            succeeded[row] |= success
    assert (True, False, True) in went  # up again after a success: its flag belongs to one constant
    assert (True, True, False) in went
    held = CarliniWagner(steps=3, searches=1, constant=1e-9).run(small(), x, Untargeted(y))
    assert held.counts.held == len(x)
    assert not bool(held.verified.any())


def test_jsma_large_input() -> None:
    """150,000 coordinates: a map of all pairs would take 90 GB in float32."""
    d = 150_000
    weight = torch.zeros(3, d)
    draw = torch.Generator().manual_seed(0)
    weight[:] = 0.01 * torch.randn(3, d, generator=draw)
    best = torch.randperm(d, generator=draw)[:6]
    weight[1, best] = 5.0
    weight[0, best] = -5.0
    weight[2, best] = 0.0

    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ weight.T + torch.tensor([31.0, 0.0, 0.0])

    x = torch.full((2, 3, 500, 100), 0.0)
    for goal in (Untargeted(torch.zeros(2, dtype=torch.int64)), Targeted(torch.ones(2, dtype=torch.int64))):
        result = JSMA(share=1e-3).run(Flat(), x, goal)
        assert result.is_(Status.BROKEN).tolist() == [True, True]
        changed = (result.x_adv[0] != 0).flatten().nonzero()[:, 0].tolist()
        assert set(changed) <= set(best.tolist())
        assert len(changed) == 4  # each is worth 10 of the 31
