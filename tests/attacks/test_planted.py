"""Models with a known answer: their distances, and what attacks find in them."""

import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import APGD, FGM, PGD, Untargeted
from mycelia.attacks.evasion.noise import RandomNoise
from mycelia.attacks.norms import norm
from mycelia.attacks.planted import Affine, ReluNet, affine, constant, planted, relu_net, unit_tests
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.worlds import images, small

OPEN = (-1e3, 1e3)


def test_affine_distances_are_closed_forms() -> None:
    """w = (3, −4), b = 1 at (2, 1): f = 3, and 0.6 in l2, 3/7 in linf, 3/4 in l1."""
    weight = torch.tensor([[3.0, -4.0], [0.0, 0.0]], dtype=torch.float64)
    model = Affine(weight, torch.tensor([1.0, 0.0], dtype=torch.float64))
    x = torch.tensor([[2.0, 1.0]], dtype=torch.float64)
    for p, distance in (("l2", 0.6), ("linf", 3 / 7), ("l1", 3 / 4)):
        assert float(model.distance(x, p)) == pytest.approx(distance, rel=1e-12)  # type: ignore[arg-type]


def test_distances_of_a_polytope_are_closed_forms() -> None:
    """|x| + 2|y| ≤ 1 at (0.2, 0.1): 0.6 is left; the dual norms of (1, 2) are 3, √5 and 2."""
    model = ReluNet(
        torch.tensor([1.0, 2.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64), 1.0, 3
    )
    x = torch.tensor([[0.2, -0.1], [0.9, 0.9]], dtype=torch.float64)
    for p, distance in (("linf", 0.2), ("l2", 0.6 / 5**0.5), ("l1", 0.3)):
        found = model.distance(x, p)  # type: ignore[arg-type]
        assert float(found[0]) == pytest.approx(distance, rel=1e-12)
        assert bool(found[1].isnan())
    assert model(x).argmax(1).tolist() == [0, 1]


@pytest.mark.parametrize("p", ["linf", "l2", "l1"])
def test_attacks_break_what_can_be_broken_and_nothing_else(p: str) -> None:
    draw = torch.Generator().manual_seed(1)
    x = 0.5 + 0.02 * torch.randn(30, 8, dtype=torch.float64, generator=draw)
    net = relu_net(8)
    distance = net.distance(x, p)  # type: ignore[arg-type]
    eps = float(distance.quantile(0.5))  # between two rows
    y = torch.zeros(len(x), dtype=torch.int64)
    result = FGM(norm=p).run(net, x, Untargeted(y), eps=eps, bounds=OPEN)  # type: ignore[arg-type]
    assert torch.equal(result.status == 2, distance < eps)
    plane = affine(2, 8)
    y = plane(x).argmax(1)
    distance = plane.distance(x, p)  # type: ignore[arg-type]
    eps = float(distance.quantile(0.5))  # between two rows
    result = FGM(norm=p).run(plane, x, Untargeted(y), eps=eps, bounds=OPEN)  # type: ignore[arg-type]
    assert torch.equal(result.status == 2, distance < eps)


@pytest.mark.parametrize(("p", "eps"), [("linf", 0.1), ("l2", 0.8), ("l1", 4.0)])
def test_a_planted_point_is_in_the_ball_and_alone(p: str, eps: float) -> None:
    model = small(torch.float64)
    for row in range(3):
        x = images()[row : row + 1]
        case = planted(model, x, p, eps, rng=row)  # type: ignore[arg-type]
        assert case.sound
        point = case.get_buffer("point")
        assert float(norm(point - x, p)) <= eps * (1 + 1e-6)  # type: ignore[arg-type]
        assert float(point.min()) >= 0
        assert float(point.max()) <= 1
        assert case.eval()(torch.cat([x, point])).argmax(1).tolist() == [0, 1]
        draws = torch.rand(
            500, *x.shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(row)
        )
        near = x + (2 * draws - 1) * (0.5 * eps if p == "linf" else 0.5 * eps / x.numel())
        assert bool((case(near.clamp(0, 1)).argmax(1) == 0).all())
        result = APGD(norm=p, steps=50).run(case, x, Untargeted(torch.tensor([0])), eps=eps)  # type: ignore[arg-type]
        assert result.counts.broken == 1


def test_nothing_is_found_in_a_constant() -> None:
    logits = constant(5)(images())
    assert logits.shape == (12, 5)
    assert bool((logits.argmax(1) == 0).all())


class Masked(nn.Module):
    """No gradient comes through: attacks that need one cannot find what is planted behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner((x * 10).round() / 10 + 0 * x)
        return found


def test_unit_tests_tell_attacks_that_see_from_attacks_that_do_not() -> None:
    x = images()[:4]
    attacks = (PGD(steps=20), RandomNoise(draws=20))
    seeing, noise = unit_tests(attacks, small(torch.float64), x, eps=0.1)
    assert (seeing.attack, seeing.planted_found, seeing.planted_total, seeing.constant_found) == (
        "PGD",
        4,
        4,
        0,
    )
    assert noise.planted_found == 0
    (blind,) = unit_tests((PGD(steps=20),), Masked(), x, eps=0.1)
    assert blind.planted_found < blind.planted_total


def test_unit_tests_without_a_module_use_a_polytope() -> None:
    """Also for a score attack, which gets no gradient."""
    attacks = (PGD(steps=10), PGD(norm="l2", steps=10), FGM(norm="l1"))
    for test in unit_tests(attacks, lambda x: x.flatten(1)[:, :4], torch.rand(3, 6), eps=0.05):
        assert (test.planted_found, test.planted_total, test.constant_found) == (3, 3, 0)


def test_what_is_refused() -> None:
    with pytest.raises(DataError, match="one at a time"):
        planted(small(), images(), "linf", 0.1)
    with pytest.raises(ConfigError, match="eps 0"):
        planted(small(), images()[:1], "linf", 0)
    with pytest.raises(ConfigError, match="closed form"):
        affine(3, 4).distance(torch.zeros(1, 4), "l0")
    for call in (lambda: affine(1, 4), lambda: relu_net(0), lambda: constant(1)):
        with pytest.raises(ConfigError, match="at least"):
            call()
