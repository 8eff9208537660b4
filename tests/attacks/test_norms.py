"""Ball ∩ box: nearest and best points beside slow searches, closed forms and laws of projections."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycelia.attacks.norms import NORMS, Norm, linear_max, norm, project
from mycelia.engine.errors import ConfigError

INF = torch.tensor(torch.inf, dtype=torch.float64)


def case(seed: int, n: int = 20, d: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Changes, and boxes around 0 of which some sides are 0 and some are infinite."""
    draw = torch.Generator().manual_seed(seed)
    delta = torch.randn(n, d, dtype=torch.float64, generator=draw)
    delta[torch.rand(n, d, generator=draw) < 0.1] = 0
    low, high = (torch.rand(n, d, dtype=torch.float64, generator=draw) for _ in range(2))
    for bound in (low, high):
        bound[torch.rand(n, d, generator=draw) < 0.15] = 0
        bound[torch.rand(n, d, generator=draw) < 0.15] = torch.inf
    return delta, -low, high


def bisected(delta: Tensor, p: Norm, eps: float, low: Tensor, high: Tensor) -> Tensor:
    """The clipped point whose Lagrange multiplier is found by halving."""

    def at(level: Tensor) -> Tensor:
        shrunk = delta / (1 + level) if p == "l2" else delta.sign() * (delta.abs() - level).clamp(min=0)
        return torch.minimum(torch.maximum(shrunk, low), high)

    least, most = (
        torch.zeros(len(delta), 1, dtype=torch.float64),
        torch.full((len(delta), 1), 1e6, dtype=torch.float64),
    )
    for _ in range(200):
        middle = (least + most) / 2
        beyond = norm(at(middle), p)[:, None] > eps
        least, most = torch.where(beyond, middle, least), torch.where(beyond, most, middle)
    return torch.where(norm(at(0 * least), p)[:, None] <= eps, at(0 * least), at(most))


def test_closed_forms() -> None:
    assert project(torch.tensor([[0.8, 0.6]]), "l1", 1.0, -INF, INF) == pytest.approx(
        torch.tensor([[0.6, 0.4]])
    )
    assert project(torch.tensor([[3.0, 4.0]]), "l2", 1.0, -INF, INF) == pytest.approx(
        torch.tensor([[0.6, 0.8]])
    )
    assert project(torch.tensor([[3.0, -4.0]]), "linf", 1.0, -INF, INF).tolist() == [[1.0, -1.0]]
    assert project(torch.tensor([[3.0, -4.0, 1.0]]), "l0", 2, -INF, INF).tolist() == [[3.0, -4.0, 0.0]]


@given(st.integers(0, 10**6), st.sampled_from(["l1", "l2"]), st.floats(0.01, 6.0))
@settings(max_examples=60, deadline=None)
def test_nearest_points_are_those_of_a_slow_search(seed: int, p: Norm, eps: float) -> None:
    delta, low, high = case(seed)
    assert torch.allclose(project(delta, p, eps, low, high), bisected(delta, p, eps, low, high), atol=1e-9)


@given(st.integers(0, 10**6), st.sampled_from(NORMS), st.floats(0.0, 6.0))
@example(seed=0, p="l2", eps=4.2764420805001334e-162)
@settings(max_examples=60, deadline=None)
def test_laws_of_a_projection(seed: int, p: Norm, eps: float) -> None:
    """Inside, unchanged when projected again, and (for convex balls) at an obtuse angle to what is inside."""
    delta, low, high = case(seed)
    found = project(delta, p, eps, low, high)
    assert bool((norm(found, p) <= eps * (1 + 1e-9)).all())
    assert bool(((found >= low) & (found <= high)).all())
    assert torch.allclose(project(found, p, eps, low, high), found, atol=1e-9)
    if p != "l0":
        others = project(case(seed + 1)[0], p, eps, low, high)
        assert bool((((delta - found) * (others - found)).sum(1) <= 1e-9).all())


@given(st.integers(0, 10**6), st.floats(0.0, 4.0))
@settings(max_examples=30, deadline=None)
def test_of_few_coordinates_the_best_are_kept(seed: int, eps: float) -> None:
    delta, low, high = case(seed, n=5, d=5)
    found = project(delta, "l0", eps, low, high)
    clipped = torch.minimum(torch.maximum(delta, low), high)
    for subset in range(2**5):
        chosen = torch.tensor([subset >> k & 1 for k in range(5)], dtype=torch.float64)
        if chosen.sum() <= eps:
            other = clipped * chosen
            assert bool(((delta - found).square().sum(1) <= (delta - other).square().sum(1) + 1e-12).all())


@given(st.integers(0, 10**6), st.sampled_from(["linf", "l2", "l1"]), st.floats(0.0, 6.0))
@settings(max_examples=60, deadline=None)
def test_no_point_is_better_for_a_linear_loss(seed: int, p: Norm, eps: float) -> None:
    grad, low, high = case(seed)
    best = linear_max(grad, p, eps, low, high)
    assert bool((norm(best, p) <= eps * (1 + 1e-9) + 1e-12).all())
    assert bool(((best >= low) & (best <= high)).all())
    value = (grad * best).sum(1)
    for other_seed in range(5):
        for scale in (0.3, 3.0, 100.0):
            other = project(scale * (grad + case(seed + other_seed)[0]), p, eps, low, high)
            assert bool((value >= (grad * other).sum(1) - 1e-9).all())
    far = project(1e9 * grad, p, eps, low, high)  # the projection of a point that is far along the gradient
    if p == "l2":
        assert torch.allclose(value, (grad * far).sum(1), atol=1e-6)


def test_without_a_box_a_linear_loss_rises_by_the_dual_norm() -> None:
    grad, _, _ = case(3)
    for p, dual in (("linf", "l1"), ("l2", "l2"), ("l1", "linf")):
        best = linear_max(grad, p, 0.7, -INF, INF)  # type: ignore[arg-type]
        assert torch.allclose((grad * best).sum(1), 0.7 * norm(grad, dual))  # type: ignore[arg-type]


def test_radii_may_differ_by_row() -> None:
    delta, low, high = case(5)
    eps = torch.linspace(0, 3, len(delta), dtype=torch.float64)
    for p in NORMS:
        together = project(delta, p, eps, low, high)
        for row, radius in enumerate(eps.tolist()):
            one = slice(row, row + 1)
            assert torch.allclose(together[one], project(delta[one], p, radius, low[one], high[one]))


def test_images_and_single_precision() -> None:
    delta = torch.randn(6, 3, 8, 8)
    for p, eps in (("linf", 0.1), ("l2", 1.0), ("l1", 4.0), ("l0", 10)):
        found = project(delta, p, eps, torch.tensor(-0.3), torch.tensor(0.2))  # type: ignore[arg-type]
        assert found.shape == delta.shape
        assert found.dtype is torch.float32
        assert bool((norm(found, p) <= eps * (1 + 1e-5)).all())  # type: ignore[arg-type]


def test_unknown_norms_and_unbounded_l0() -> None:
    delta = torch.ones(1, 2)
    for function in (project, linear_max):
        with pytest.raises(ConfigError, match="l0, l1, l2, linf"):
            function(delta, "l3", 1.0, -INF, INF)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="finite bounds"):
        linear_max(delta, "l0", 1.0, -INF, INF)
