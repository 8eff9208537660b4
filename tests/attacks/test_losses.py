"""Losses and goals: known values, finite differences, runner-ups, and the sign that is folded once."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr, softmax
from torch import Tensor

from mycelia.attacks.goals import Targeted, Untargeted, random_target
from mycelia.attacks.losses import LOSSES, ce, dlr, dlr_targeted, kl, margin
from mycelia.engine.errors import ConfigError, DataError

Z = torch.tensor([[2.0, 5.0, 1.0, 0.0]], dtype=torch.float64)


def label(value: int) -> Tensor:
    return torch.tensor([value])


def test_known_values() -> None:
    assert float(dlr(Z, label(1))) == pytest.approx(-0.75)
    assert float(dlr(Z, label(0))) == pytest.approx(0.75)
    assert float(dlr_targeted(Z, label(1), label(2))) == pytest.approx(-0.888889, abs=1e-6)
    assert float(margin(Z, label(1))) == -3
    assert float(margin(Z, label(3))) == 5  # the runner-up of a wrong row is the top class
    affine = torch.tensor([[0.0, 3.0]], dtype=torch.float64)
    assert float(ce(affine, label(1))) == pytest.approx(0.0485874, abs=1e-7)


@pytest.mark.parametrize("shift", [0.0, -1000.0])
@pytest.mark.parametrize("name", [*LOSSES, "dlr targeted", "kl"])
def test_losses_finite_difference(name: str, shift: float) -> None:
    """Outputs come first and labels second; the runner-up of a wrong row is the top class.

    All-negative logits are logits like any other. Values are those of the formulas, row by row, and slopes
    are finite differences.
    """
    draw = torch.Generator().manual_seed(4)
    z = torch.randn(6, 5, dtype=torch.float64, generator=draw) * 3 + shift
    y, t = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([1, 2, 3, 4, 0, 2])
    reference = torch.randn(6, 5, dtype=torch.float64, generator=draw)

    def loss(values: Tensor) -> Tensor:
        if name == "kl":
            return kl(values, reference)
        return dlr_targeted(values, y, t) if name == "dlr targeted" else LOSSES[name](values, y)

    for row, (found, each) in enumerate(zip(loss(z).tolist(), z.numpy(), strict=True)):
        true, target = int(y[row]), int(t[row])
        down = np.sort(each)[::-1]
        rival = max(value for k, value in enumerate(each) if k != true)
        wanted = {
            "ce": -log_softmax(each)[true],
            "margin": rival - each[true],
            "dlr": -(each[true] - rival) / (down[0] - down[2]),
            "dlr targeted": -(each[true] - each[target]) / (down[0] - (down[2] + down[3]) / 2),
            "kl": rel_entr(softmax(reference[row].numpy()), softmax(each)).sum(),
        }[name]
        assert found == pytest.approx(wanted, rel=1e-9)
    assert {int(each.argmax()) == int(true) for each, true in zip(z, y, strict=True)} == {True, False}
    assert torch.autograd.gradcheck(loss, z.requires_grad_(), atol=1e-5)


def test_a_goal_rises_towards_what_is_wanted() -> None:
    for loss in (*LOSSES, ce):
        for wanted, goal in ((2, Targeted(label(2), label(1))), (None, Untargeted(label(1)))):
            z = Z.clone().requires_grad_()
            value = goal.loss(z, loss)
            (grad,) = torch.autograd.grad(value.sum(), z)
            assert float(grad[0, 1]) <= 0  # the true class falls, or plays no part
            if wanted is not None:
                assert float(grad[0, wanted]) > 0
            nearer = goal.loss(Z + 0.1 * grad / grad.abs().max(), loss)
            assert float(nearer.detach()) > float(value.detach())


def test_margins_are_above_zero_where_goals_are_reached() -> None:
    z = torch.randn(500, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(500) % 6
    for goal in (Untargeted(y), Targeted(y)):
        assert torch.equal(goal.loss(z, "margin") > 0, goal.reached(z))
        assert torch.equal(goal.reached(z), goal.reached(z.argmax(1)))


def test_outputs_that_are_no_numbers_reach_nothing() -> None:
    z = torch.full((2, 3), torch.nan)
    for goal in (Untargeted(torch.tensor([0, 1])), Targeted(torch.tensor([0, 1]))):
        assert goal.reached(z).tolist() == [False, False]


def test_kl_is_zero_at_the_reference_only() -> None:
    z = torch.randn(10, 4, dtype=torch.float64)
    assert torch.allclose(kl(z, z), torch.zeros(10, dtype=torch.float64), atol=1e-12)
    assert bool((kl(z + torch.randn(10, 4), z) > 0).all())
    assert torch.allclose(kl(z + 5, z), torch.zeros(10, dtype=torch.float64), atol=1e-12)


def test_wrong_goals() -> None:
    with pytest.raises(DataError, match="target equals label in rows 1, 2"):
        Targeted(torch.tensor([1, 1, 2]), torch.tensor([0, 1, 2]))
    for bad in (torch.tensor([0.5]), torch.tensor([[1]]), torch.tensor([True])):
        with pytest.raises(DataError, match="one integer per row"):
            Untargeted(bad)
    with pytest.raises(DataError, match="count from 0"):
        Untargeted(torch.tensor([-1]))
    with pytest.raises(ConfigError, match="ce, margin, dlr"):
        Untargeted(label(1)).loss(Z, "cross")
    with pytest.raises(ConfigError, match="dlr with 2 classes"):
        dlr(Z[:, :2], label(1))


def test_random_targets_are_other_classes_and_all_of_them() -> None:
    y = torch.arange(1000) % 4
    t = random_target(y, 4, rng=3)
    assert bool((t != y).all())
    assert sorted({(int(a), int(b)) for a, b in zip(y, t, strict=True)}) == [
        (a, b) for a in range(4) for b in range(4) if a != b
    ]
    assert torch.equal(t, random_target(y, 4, rng=3))
