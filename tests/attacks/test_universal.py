"""Universal perturbations: closed forms, the first paper's algorithm as a baseline, and held-out rows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import Targeted, Universal, Untargeted, universal
from mycelia.attacks.norms import Norm, project
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.digits import digits_mlp
from tests.attacks.worlds import Affine, Small, images, small

SIZES: dict[Norm, float] = {"linf": 0.25, "l2": 1.6}


def two_classes(w: Tensor) -> Affine:
    """Class 1 where w · (x − 1/2) > 0."""
    weight = torch.stack([-w / 2, w / 2])
    return Affine(weight, -weight.sum(1) / 2)


def test_of_one_class_of_an_affine_model_it_is_the_closed_form() -> None:
    """Every margin falls by eps times the dual norm of w, and those that are smaller fall below 0."""
    draw = torch.Generator().manual_seed(4)
    w = torch.randn(8, dtype=torch.float64, generator=draw)
    x = 0.3 + 0.4 * torch.rand(400, 8, dtype=torch.float64, generator=draw)
    model = two_classes(w)
    x = x[model(x).argmax(1) == 1]
    margin = (x - 0.5) @ w
    for p, dual in (("linf", w.abs().sum()), ("l2", w.norm())):
        eps = 1.01 * float(margin.median() / dual)
        ones = torch.ones(len(x), dtype=torch.int64)
        for goal in (Untargeted(ones), Targeted(0 * ones)):
            found = universal(model, x, goal, eps=eps, norm=p, epochs=10, held_out=0.4)  # type: ignore[arg-type]
            best = -eps * (w.sign() if p == "linf" else w / w.norm())
            assert torch.allclose(found.perturbation[0], best, atol=1e-9)
            hit = margin < eps * dual
            assert found.fooled == float(hit[~found.held_out].double().mean())
            assert found.held_out_fooled == float(hit[found.held_out].double().mean())
            assert int(found.held_out.sum()) == found.held_out_counted == round(0.4 * len(x))
            assert found.counted + found.held_out_counted == len(x)


def test_of_two_classes_of_an_affine_model_it_fools_one_side() -> None:
    """No perturbation moves both ways; the class that has more to lose goes."""
    draw = torch.Generator().manual_seed(5)
    w = torch.randn(8, dtype=torch.float64, generator=draw)
    model = two_classes(w)
    x = 0.3 + 0.4 * torch.rand(600, 8, dtype=torch.float64, generator=draw)
    y = model(x).argmax(1)
    x = torch.cat([x[y == 0][:60], x[y == 1][:150]])
    y = model(x).argmax(1)
    margin = ((x - 0.5) @ w).abs()
    eps = 1.01 * float(margin.median() / w.abs().sum())
    found = universal(model, x, Untargeted(y), eps=eps, held_out=0.0)
    fall = margin < eps * w.abs().sum()
    assert found.fooled == float((fall & (y == 1)).double().mean())
    assert (found.held_out_fooled, found.held_out_counted) == (None, 0)


def first_algorithm(model: nn.Module, x: Tensor, y: Tensor, p: Norm, eps: float, passes: int) -> Tensor:
    """Moosavi-Dezfooli et al., algorithm 1: row by row a smallest further change by DeepFool, projected."""
    delta, free = torch.zeros_like(x[:1]), torch.full_like(x[:1], torch.inf)
    for _ in range(passes):
        for row in range(len(x)):
            point = (x[row : row + 1] + delta).clamp(0, 1)
            start = point
            for _ in range(10):
                leaf = point.clone().requires_grad_()
                z = model(leaf)[0]
                if int(z.argmax()) != int(y[row]):
                    break
                slopes = torch.stack([torch.autograd.grad(each, leaf, retain_graph=True)[0] for each in z])
                toward = slopes - slopes[y[row]]
                gap = (z[y[row]] - z).detach()
                size = toward.flatten(1).abs().sum(1) if p == "linf" else toward.flatten(1).norm(dim=1)
                reach = torch.where(size > 0, gap / size.clamp(min=1e-9), torch.inf)
                best = int(reach.argmin())
                unit = toward[best].sign() if p == "linf" else toward[best] / size[best]
                point = point + 1.02 * reach[best] * unit
            delta = project(delta + point - start, p, eps, -free, free)
    return delta


@pytest.mark.parametrize("p", ["linf", "l2"])
def test_it_fools_more_than_the_first_algorithm_and_far_more_than_noise(p: Norm) -> None:
    model, x, y = digits_mlp(353)
    eps = SIZES[p]
    found = universal(model, x, Untargeted(y), eps=eps, norm=p)
    assert isinstance(found, Universal)
    assert found.fooled is not None
    assert found.held_out_fooled is not None
    seen = ~found.held_out
    assert (found.counted, found.held_out_counted) == (int(seen.sum()), int(found.held_out.sum()))
    size = found.perturbation.abs().max() if p == "linf" else found.perturbation.norm()
    assert float(size) <= eps * (1 + 1e-6)

    def fooled(delta: Tensor, rows: Tensor) -> float:
        wrong = model((x[rows] + delta).clamp(0, 1)).argmax(1) != y[rows]
        return int(wrong.sum()) / len(wrong)

    assert found.fooled == fooled(found.perturbation, seen)
    assert found.held_out_fooled == fooled(found.perturbation, found.held_out)
    assert torch.equal(found.applied(x), (x + found.perturbation).clamp(0, 1))
    draw = torch.Generator().manual_seed(0)
    noise = [torch.randn(1, 1, 8, 8, generator=draw) for _ in range(20)]
    noise = [eps * (each.sign() if p == "linf" else each / each.norm()) for each in noise]
    assert found.held_out_fooled > 2 * max(fooled(each, found.held_out) for each in noise)
    assert found.held_out_fooled > 0.6
    first = first_algorithm(model, x[seen][:50], y[seen][:50], p, eps, 1)
    assert found.held_out_fooled >= fooled(first, found.held_out)


def test_a_target() -> None:
    model, x, y = digits_mlp(353)
    found = universal(model, x, Targeted(torch.full_like(y, 8)), eps=0.3)
    assert found.targeted
    assert found.counted + found.held_out_counted == int((y != 8).sum())
    assert found.fooled is not None
    assert found.held_out_fooled is not None
    assert found.held_out_fooled > 0.5
    seen = ~found.held_out & (y != 8)
    hit = model(found.applied(x[seen])).argmax(1) == 8
    assert found.fooled == int(hit.sum()) / len(hit)


def test_a_planted_trigger_is_found_and_rows_that_do_not_count_do_not() -> None:
    """One pixel decides, for all; a row that is wrong already and one that is not finite are left out."""

    class Trigger(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            on = 100 * (v[:, 0, 2, 3] - 0.58) + 0 * v.flatten(1).sum(1)
            return torch.stack([torch.zeros_like(on), on], 1)

    x = 0.5 * images(40)
    x[:, 0, 2, 3] = 0.5
    x[3, 0, 2, 3] = 0.7
    x[5, 0, 0, 0] = torch.nan
    goal = Untargeted(torch.zeros(40, dtype=torch.int64))
    for held_out in (0.0, 0.5):
        found = universal(Trigger(), x, goal, eps=0.1, held_out=held_out)
        assert found.fooled == 1.0
        assert found.counted + found.held_out_counted == 38
        assert float(found.perturbation[0, 0, 2, 3]) == pytest.approx(0.1)
        assert found.held_out_fooled == (1.0 if held_out else None)
    nothing = universal(Trigger(), x[3:4], Untargeted(torch.zeros(1, dtype=torch.int64)), eps=0.1)
    assert (nothing.fooled, nothing.held_out_fooled, nothing.counted) == (None, None, 0)
    assert not bool(nothing.perturbation.any())
    empty = universal(Trigger(), x[:0], Untargeted(torch.zeros(0, dtype=torch.int64)), eps=0.1)
    assert (empty.fooled, len(empty.held_out), empty.perturbation.shape) == (None, 0, (1, 1, 6, 6))


def test_the_same_bits_from_the_same_seed_and_nothing_is_touched() -> None:
    x = images(40)
    y = small()(x).argmax(1)
    model = Small().double().train()
    state, modes = copy.deepcopy(model.state_dict()), [each.training for each in model.modules()]
    before, torch_before = x.clone(), torch.get_rng_state()
    first, again, other = (
        universal(model, x, Untargeted(y), eps=0.1, rng=seed, batch=8, epochs=3) for seed in (1, 1, 2)
    )
    assert torch.equal(first.perturbation, again.perturbation)
    assert torch.equal(first.held_out, again.held_out)
    assert not torch.equal(first.held_out, other.held_out)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert [each.training for each in model.modules()] == modes
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(each.grad is None and each.requires_grad for each in model.parameters())
    half = copy.deepcopy(small()).half()
    found = universal(half, x.half(), Untargeted(half(x.half()).argmax(1)), eps=0.1, norm="l2", epochs=2)
    assert found.perturbation.dtype == torch.float32
    assert float(found.perturbation.norm()) <= 0.1 * (1 + 1e-6)
    assert found.applied(x.half()).dtype == torch.float16
    array = universal(small(), x.numpy(), Untargeted(torch.from_numpy(np.asarray(y))), eps=0.1, epochs=1)
    assert array.perturbation.dtype == torch.float64


def test_arguments_that_make_no_sense() -> None:
    x = images(6)
    goal = Untargeted(small()(x).argmax(1))
    for settings, what in (
        ({"eps": 0.0}, "eps 0"),
        ({"eps": 0.1, "norm": "l1"}, "norm 'l1'"),
        ({"eps": 0.1, "held_out": 1.0}, "held_out 1"),
        ({"eps": 0.1, "epochs": 0}, "epochs 0"),
        ({"eps": 0.1, "cap": 0.0}, "cap 0"),
        ({"eps": 0.1, "bounds": (torch.zeros_like(x), 1.0)}, "bounds of each row"),
    ):
        with pytest.raises(ConfigError, match=what):
            universal(small(), x, goal, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gradients"):
        universal(lambda v: v.flatten(1)[:, :4], x, goal, eps=0.1)
    with pytest.raises(DataError, match="6 inputs, a goal of 2 rows"):
        universal(small(), x, goal.of(torch.arange(2)), eps=0.1)
    with pytest.raises(DataError, match="beyond bounds"):
        universal(small(), 2 * x, goal, eps=0.1)
