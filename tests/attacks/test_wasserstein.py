"""Mass moved over short ways: the ball by linear programming, the projection by a general solver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from torch import Tensor, nn

from mycelia.attacks import Untargeted, Wasserstein, project_wasserstein
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.worlds import images, small

SIDE = 3
PLACES = np.array([(i, j) for i in range(SIDE) for j in range(SIDE)], dtype=float)
COST = np.linalg.norm(PLACES[:, None] - PLACES[None], axis=2)


def distance(one: Any, other: Any) -> float:
    """The exact Wasserstein distance of two images of equal mass, by linear programming over plans."""
    n = len(one)
    rows = np.zeros((2 * n, n * n))
    for k in range(n):
        rows[k, k * n : (k + 1) * n] = 1
        rows[n + k, k::n] = 1
    found = linprog(COST.ravel(), A_eq=rows, b_eq=np.concatenate([one, other]), bounds=(0, None))
    assert found.success
    return float(found.fun)


def nearest(x: Any, wanted: Any, eps: float, high: float = np.inf) -> float:
    """Least ‖z − wanted‖² in the ball, by SLSQP over plans."""
    n = len(x)
    made = minimize(
        lambda plan: ((plan.reshape(n, n).sum(0) - wanted) ** 2).sum(),
        np.diag(x).ravel(),
        jac=lambda plan: np.tile(2 * (plan.reshape(n, n).sum(0) - wanted), n),
        bounds=[(0, None)] * (n * n),
        constraints=[
            {"type": "eq", "fun": lambda plan: plan.reshape(n, n).sum(1) - x},
            {"type": "ineq", "fun": lambda plan: eps - plan @ COST.ravel()},
            {"type": "ineq", "fun": lambda plan: min(high, 9.0) - plan.reshape(n, n).sum(0)},
        ],
        method="SLSQP",
        options={"maxiter": 300, "ftol": 1e-12},
    )
    assert made.success
    return float(made.fun)


def pictures(n: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, wanted = (torch.rand(n, 1, SIDE, SIDE, dtype=torch.float64, generator=draw) for _ in range(2))
    return x / x.sum((1, 2, 3), keepdim=True), wanted / 5


@pytest.mark.parametrize("eps", [0.02, 0.15])
def test_the_projection_is_in_the_ball_and_nearly_the_nearest(eps: float) -> None:
    x, wanted = pictures()
    found, cost = project_wasserstein(wanted, x, eps, window=5, iterations=300)
    for row in range(len(x)):
        one, other, aim = (each[row].flatten().numpy() for each in (x, found, wanted))
        assert other.min() >= 0
        assert other.sum() == pytest.approx(one.sum(), rel=1e-9)
        exact = distance(one, other / other.sum())
        assert exact <= float(cost[row]) * (1 + 1e-6) <= eps * (1 + 1e-5)
        best = nearest(one, aim, eps)
        assert best * (1 - 1e-6) <= float(((other - aim) ** 2).sum()) <= best * 1.03


def test_full_pixels_take_no_more_and_do_not_stop_the_others() -> None:
    x, wanted = pictures()
    high = float(x[0].flatten().sort().values[5])
    x = x.clamp(max=high)
    total = x.sum((1, 2, 3))
    found, _ = project_wasserstein(wanted, x, 0.1, high, iterations=1500)
    assert float(found.max()) <= high * (1 + 1e-9)
    assert int((x == high).flatten(1).sum(1)[0]) >= 4
    for row in range(len(x)):
        one, other, aim = ((each[row] / total[row]).flatten().numpy() for each in (x, found, wanted))
        assert other.sum() == pytest.approx(1, abs=1e-5)
        assert distance(one, other / other.sum()) <= 0.1 * (1 + 1e-4)
        best = nearest(one, aim, 0.1, high / float(total[row]))
        assert float(((other - aim) ** 2).sum()) <= best * 1.02


def test_few_iterations_stay_in_the_ball_too() -> None:
    x, wanted = pictures(5)
    for iterations in (1, 3):
        found, cost = project_wasserstein(wanted, x, 0.1, window=3, iterations=iterations)
        assert bool((cost <= 0.1 * (1 + 1e-9)).all())
        for row in range(5):
            one, other = x[row].flatten().numpy(), found[row].flatten().numpy()
            assert distance(one, other / other.sum()) <= 0.1 * (1 + 1e-6)


def test_what_is_in_the_ball_stays_nearly_where_it_is() -> None:
    """Half of one pixel's mass moved by one costs as much as that mass."""
    x, _ = pictures(1)
    wanted = x.clone()
    wanted[0, 0, 0, 0] -= x[0, 0, 0, 0] / 2
    wanted[0, 0, 0, 1] += x[0, 0, 0, 0] / 2
    found, _ = project_wasserstein(wanted, x, 0.9, weight=1e5, iterations=2000)
    assert torch.allclose(found, wanted, atol=2e-3)
    kept, cost = project_wasserstein(wanted, x, 0.0)
    assert torch.allclose(kept, x)
    assert float(cost) == 0


def test_no_pixel_rises_beyond_its_bound_and_mass_stays_in_its_channel() -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(4, 3, 6, 6, generator=draw)
    x[0, 1] = 0
    wanted = x + 0.5 * torch.randn(4, 3, 6, 6, generator=draw)
    found, _ = project_wasserstein(wanted, x, 0.2, 1.0)
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1 + 1e-6
    assert torch.allclose(found.sum((2, 3)), x.sum((2, 3)), rtol=1e-5)
    assert bool((found[0, 1] == 0).all())
    alone, _ = project_wasserstein(wanted[2:3], x[2:3], 0.2, 1.0)
    assert torch.allclose(alone[0], found[2], atol=1e-6)


class Beside(nn.Module):
    """Class 1 where the pixel beside the lit one has more than a quarter of the light."""

    def forward(self, x: Tensor) -> Tensor:
        light = x[:, 0, 2, 3]
        return torch.stack([torch.full_like(light, 0.25), light], 1)


def test_a_planted_move_is_found_where_it_can_be_paid() -> None:
    x = torch.zeros(2, 1, 6, 6, dtype=torch.float64)
    x[:, 0, 2, 2] = 1
    goal = Untargeted(torch.zeros(2, dtype=torch.int64))
    paid = Wasserstein().run(Beside(), x, goal, eps=0.3)
    assert paid.broken.tolist() == [True, True]
    assert 0.25 <= float(paid.x_adv[0, 0, 2, 3]) <= 0.3
    assert float(paid.x_adv[0].sum()) == pytest.approx(1)
    assert bool((paid.cost <= 0.3 * (1 + 1e-6)).all())
    short = Wasserstein().run(Beside(), x, goal, eps=0.24)
    assert short.broken.tolist() == [False, False]
    assert float(short.x_adv[0, 0, 2, 3]) == pytest.approx(0.24, rel=0.02)


def test_images_on_a_network() -> None:
    """More are broken in a larger ball; what is reached already is left alone; the model is, too."""
    x = images(8)
    model = small().train()
    y = small()(x).argmax(1)
    y[0] = (y[0] + 1) % 4
    broken = []
    for eps in (0.0, 0.05, 0.5):
        found = Wasserstein(steps=15).run(model, x, Untargeted(y), eps=eps)
        assert found.reached.tolist() == [True, *[False] * 7]
        assert torch.equal(found.x_adv[0], x[0])
        assert torch.equal(found.broken, (small()(found.x_adv).argmax(1) != y) & ~found.reached)
        assert bool((found.cost <= eps * (1 + 1e-6)).all())
        broken.append(int(found.broken.sum()))
    assert broken[0] == 0
    assert broken[0] < broken[2]
    assert broken[1] <= broken[2]
    again = Wasserstein(steps=15).run(model, x, Untargeted(y), eps=0.5, batch=3)
    assert torch.allclose(again.x_adv, found.x_adv, atol=1e-9)
    assert model.training


def test_what_is_refused() -> None:
    x = images(2)
    goal = Untargeted(torch.zeros(2, dtype=torch.int64))
    for make in (
        lambda: Wasserstein(steps=0),
        lambda: project_wasserstein(x, x, 0.1, window=4),
        lambda: Wasserstein().run(small(), x, goal, eps=0.1, bounds=(-1.0, 1.0)),
    ):
        with pytest.raises(ConfigError):
            make()
    with pytest.raises(DataError, match="with mass"):
        project_wasserstein(x, torch.zeros_like(x), 0.1)
