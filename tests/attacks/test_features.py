"""Feature adversaries: closed forms of linear layers, SciPy's L-BFGS-B as the paper has it, and manners."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from mycelia.attacks import APGD, DDN, PGD, SPSA, AdamPGD, FeatureAdversary, Status
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.digits import digits_mlp
from tests.attacks.worlds import Small, images, small


def test_of_a_layer_that_copies_it_is_the_nearest_point_of_the_ball() -> None:
    """And of one that scales each coordinate, too: coordinates do not meet."""
    x, guide = images(10), images(10, seed=2)
    scales = nn.Linear(36, 36, bias=False).double()
    with torch.no_grad():
        scales.weight.copy_(torch.diag(torch.linspace(0.5, 3.0, 36)))
    model = nn.Sequential(nn.Flatten(), scales, nn.Linear(36, 4).double())
    weights = torch.linspace(0.5, 3.0, 36, dtype=torch.float64)
    for layer, weight in (("0", torch.ones_like(weights)), ("1", weights)):
        found = FeatureAdversary(layer).run(model, x, guide, eps=0.2)
        best = torch.minimum(torch.maximum(guide, x - 0.2), x + 0.2)
        assert torch.allclose(found.x_adv, best, atol=1e-3)
        assert torch.allclose(found.before, ((x - guide).flatten(1) * weight).norm(dim=1))
        assert torch.allclose(found.after, ((best - guide).flatten(1) * weight).norm(dim=1), atol=1e-4)
        assert torch.equal(found.ratio, found.after / found.before)
        assert bool(found.run.is_(Status.HELD).all())
        fine = AdamPGD(steps=200, step_size=0.05, random_start=False)
        wide = FeatureAdversary(layer, fine).run(model, x, guide, eps=1.0)
        assert float(wide.after.max()) < 1e-3
    half = FeatureAdversary("0", AdamPGD(norm="l2", steps=200, random_start=False))
    found = half.run(model, x, guide, eps=0.5)
    away = (guide - x).flatten(1).norm(dim=1)
    assert torch.allclose(found.after, away - 0.5, atol=1e-3)


@pytest.mark.parametrize("layer", ["2", "5"])
def test_it_comes_as_near_as_the_papers_optimiser(layer: str) -> None:
    model, x, _ = digits_mlp(12)
    model, x = copy.deepcopy(model).double(), x.double()
    guide, eps = x.roll(5, 0), 0.15
    part = model[: int(layer) + 1]  # type: ignore[index]
    wanted = part(guide)
    found = FeatureAdversary(layer).run(model, x, guide, eps=eps)

    def distance(values: Any, row: int) -> tuple[float, Any]:
        leaf = torch.tensor(values).view(1, 1, 8, 8).requires_grad_()
        loss = (part(leaf) - wanted[row]).square().sum()
        (grad,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), grad.flatten().numpy()

    peer = []
    for row in range(12):
        low, high = ((x[row] + by).clamp(0, 1).flatten().numpy() for by in (-eps, eps))
        peer.append(
            minimize(
                distance, x[row].flatten().numpy(), (row,), "L-BFGS-B", jac=True,
                bounds=list(zip(low, high, strict=True)), options={"maxiter": 250},
            ).fun
        )  # fmt: skip
    ratio = found.after / torch.tensor(np.sqrt(peer))
    assert float(ratio.mean()) < 1.002
    assert float(ratio.max()) < 1.02
    assert float(found.ratio.mean()) < 0.65
    assert torch.allclose(found.after, (part(found.x_adv) - wanted).norm(dim=1))


def test_the_label_follows_the_representation() -> None:
    model, x, y = digits_mlp(40)
    guide, other = x.roll(7, 0), y.roll(7, 0)
    found = FeatureAdversary("4").run(model, x, guide, eps=0.25)
    different = other != y
    assert int(different.sum()) > 20
    assert float((model(found.x_adv).argmax(1) == other)[different].double().mean()) > 0.75
    assert float((found.x_adv - x).abs().max()) <= 0.25 * (1 + 1e-6)
    assert float(found.x_adv.min()) >= 0
    assert float(found.x_adv.max()) <= 1
    again = FeatureAdversary("4", APGD(steps=100)).run(model, x, guide, eps=0.25)
    assert float(again.ratio.mean()) < 1.1 * float(found.ratio.mean())


def test_a_row_is_its_own() -> None:
    x, guide = images(9), images(9, seed=3)
    attack = FeatureAdversary("layers.0", PGD(steps=20))
    whole = attack.run(small(), x, guide, eps=0.1, ids=range(9))
    for rows, batch in ((torch.tensor([4]), 256), (torch.arange(8, -1, -1), 2)):
        part = attack.run(small(), x[rows], guide[rows], eps=0.1, batch=batch, ids=rows)
        assert torch.allclose(part.x_adv, whole.x_adv[rows], atol=1e-9)
    none = attack.run(small(), x[:0], guide[:0], eps=0.1)
    assert (len(none.x_adv), len(none.after)) == (0, 0)
    still = attack.run(small(), x, guide, eps=0.0)
    assert torch.equal(still.x_adv, x)
    assert torch.equal(still.after, still.before)
    same = FeatureAdversary("layers.0").run(small(), x, x, eps=0.1)
    assert torch.equal(same.x_adv, x)
    assert not bool(same.after.any())
    x[2, 0, 0, 0] = torch.nan
    mixed = attack.run(small(), x, guide, eps=0.1, ids=range(9))
    assert mixed.run.is_(Status.FAILED).nonzero()[:, 0].tolist() == [2]
    others = [row for row in range(9) if row != 2]
    assert torch.allclose(mixed.x_adv[others], whole.x_adv[others], atol=1e-9)


def test_the_module_stays_as_it_is_and_layers_that_work_in_place_do_no_harm() -> None:
    x, guide = images(5), images(5, seed=3)
    model = Small().double().train()
    state, modes = copy.deepcopy(model.state_dict()), [each.training for each in model.modules()]
    FeatureAdversary("layers.1", AdamPGD(steps=3)).run(model, x, guide, eps=0.1)
    assert [each.training for each in model.modules()] == modes
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(each.grad is None and each.requires_grad for each in model.parameters())
    assert not any(each._forward_hooks for each in model.modules())
    linear = nn.Linear(36, 8).double()
    loud = nn.Sequential(nn.Flatten(), linear, nn.ReLU(inplace=True))
    found = FeatureAdversary("1", AdamPGD(steps=5)).run(loud, x, guide, eps=0.1)
    assert torch.allclose(found.before, (linear(x.flatten(1)) - linear(guide.flatten(1))).norm(dim=1))

    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Flatten()

        def forward(self, v: Tensor) -> Tensor:
            self.layer(v)
            raise RuntimeError("half way")

    broken = Breaks()
    with pytest.raises(RuntimeError, match="half way"):
        FeatureAdversary("layer").run(broken, x, guide, eps=0.1)
    assert not broken.layer._forward_hooks


def test_arguments_that_make_no_sense() -> None:
    x = images(4)
    with pytest.raises(ConfigError, match=r"(?s)no layer 'layers.9'.*layers.0, layers.1.*did you mean"):
        FeatureAdversary("layers.9").run(small(), x, x, eps=0.1)
    with pytest.raises(DataError, match="one guide for each input"):
        FeatureAdversary("layers.0").run(small(), x, x[:2], eps=0.1)
    with pytest.raises(DataError, match="beyond bounds"):
        FeatureAdversary("layers.0").run(small(), 2 * x, x, eps=0.1)
    for attack in (DDN(norm="l2"), SPSA()):
        with pytest.raises(ConfigError, match="along gradients"):
            FeatureAdversary("layers.0", attack)

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.never, self.pair = nn.Flatten(), nn.LSTM(36, 3, batch_first=True).double()

        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = self.pair(v.flatten(1)[:, None])[0][:, 0]
            return found

    for layer, what in (("never", "gives nothing"), ("pair", "gives tuple")):
        with pytest.raises(DataError, match=what):
            FeatureAdversary(layer).run(Unused(), x, x, eps=0.1)
