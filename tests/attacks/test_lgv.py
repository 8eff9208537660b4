"""LGV: the run of SGD written out, what it leaves alone, and whether its models help a transfer."""

from __future__ import annotations

import copy

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from mycelia.attacks import MIM, Status, Transfer, Untargeted, lgv_models
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.digits import digits_mlp
from tests.attacks.worlds import Small


def rows(n: int = 40) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.rand(n, 1, 6, 6, generator=draw), torch.randint(0, 4, (n,), generator=draw)


def test_copies_are_the_weights_along_a_run_of_sgd() -> None:
    """One batch an epoch, so that the order of rows is of no account: SGD with momentum by hand."""
    x, y = rows()
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 4)).double()
    x = x.double()
    found = lgv_models(
        module, (x, y), epochs=4, per_epoch=1, learning_rate=0.3, momentum=0.8, weight_decay=0.01, batch=40
    )
    weights = [each.detach().clone() for each in module.parameters()]
    speed = [torch.zeros_like(each) for each in weights]
    for model in found:
        leaves = [each.clone().requires_grad_() for each in weights]
        loss = functional.cross_entropy(x.flatten(1) @ leaves[0].T + leaves[1], y)
        slopes = torch.autograd.grad(loss, leaves)
        for w, v, g in zip(weights, speed, slopes, strict=True):
            v.mul_(0.8).add_(g + 0.01 * w)
            w.sub_(0.3 * v)
        for mine, other in zip(model.parameters(), weights, strict=True):
            assert torch.allclose(mine, other, atol=1e-12)
            assert not mine.requires_grad


def test_copies_are_evenly_spread_and_see_every_row_once_in_an_epoch() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(1, 2), list[Tensor]()
            self.register_buffer("batches", torch.zeros(1))

        def forward(self, v: Tensor) -> Tensor:
            self.batches += 1
            self.seen.append(v[:, 0].clone())
            found: Tensor = self.layer(v)
            return found

    x = torch.arange(23.0)[:, None]
    y = torch.zeros(23, dtype=torch.int64)
    found = lgv_models(Counting(), (x, y), epochs=3, per_epoch=2, learning_rate=1e-4, batch=5)
    assert [int(model.get_buffer("batches")) for model in found] == [3, 5, 8, 10, 13, 15]
    seen: list[Tensor] = found[-1].seen  # type: ignore[assignment]
    assert {len(each) for each in seen} == {4, 5}
    orders = [torch.cat(seen[start : start + 5]) for start in (0, 5, 10)]
    for order in orders:
        assert torch.equal(order.sort().values, x[:, 0])
    assert not torch.equal(orders[0], orders[1])


def test_the_module_and_the_global_generator_stay_as_they_are() -> None:
    x, y = rows()
    module = Small(3).eval()
    module.layers[0].train()
    module.layers[0].weight.grad = gradient = torch.ones_like(module.layers[0].weight)  # type: ignore[arg-type]
    state, modes = copy.deepcopy(module.state_dict()), [each.training for each in module.modules()]
    before = torch.get_rng_state()
    first = lgv_models(module, (x, y), epochs=2, per_epoch=2, batch=16, rng=7)
    torch.manual_seed(1)
    again = lgv_models(module, (x, y), epochs=2, per_epoch=2, batch=16, rng=7)
    other = lgv_models(module, (x, y), epochs=2, per_epoch=2, batch=16, rng=8)
    torch.set_rng_state(before)
    assert [each.training for each in module.modules()] == modes
    assert module.layers[0].weight.grad is gradient
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert len(first) == 4
    for a, b, c in zip(first, again, other, strict=True):  # dropout included
        mine = a.state_dict()
        assert all(torch.equal(value, b.state_dict()[name]) for name, value in mine.items())
        assert not torch.equal(mine["layers.5.weight"], c.state_dict()["layers.5.weight"])
        assert not any(each.training for each in a.modules())
    assert not torch.equal(first[0].layers[1].running_mean, first[1].layers[1].running_mean)  # type: ignore[index]
    state_now = torch.get_rng_state()
    lgv_models(module, (x, y), epochs=1, per_epoch=1)
    assert torch.equal(torch.get_rng_state(), state_now)


class Mean(nn.Module):
    """Of logits: one source, so one example."""

    def __init__(self, models: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in self.models]).mean(0)


def test_examples_of_many_weights_transfer_better_than_those_of_one() -> None:
    """A dense surrogate and a convolution as the target, which sees one example of each."""
    data = load_digits()
    inputs, labels = torch.tensor(data.images / 16, dtype=torch.float32)[:, None], torch.tensor(data.target)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        target = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 10)
        )
        optimiser = torch.optim.Adam(target.parameters(), 2e-3)
        for _ in range(15):
            for some in torch.randperm(1400).split(64):
                optimiser.zero_grad()
                functional.cross_entropy(target(inputs[some]), labels[some]).backward()
                optimiser.step()
    surrogate, x, y = digits_mlp()
    surrogate = copy.deepcopy(surrogate).requires_grad_(True)
    models = lgv_models(surrogate, (inputs[:1400], labels[:1400]), epochs=5, batch=64, learning_rate=0.2)
    assert len(models) == 20
    goal = Untargeted(y)
    one = Transfer([surrogate], MIM()).run(target, x, goal, eps=0.15)
    many = Transfer([Mean(models)], MIM()).run(target, x, goal, eps=0.15)
    assert many.counts.broken >= one.counts.broken + 3 > 20
    each = Transfer(models[::5], MIM()).run(target, x, goal, eps=0.15)  # and the mean of them
    assert each.counts.broken > one.counts.broken
    assert int(each.queries.max()) == 1 + 4 + 1
    assert bool((each.is_(Status.BROKEN) | each.is_(Status.HELD) | each.is_(Status.CLEAN_WRONG)).all())


def test_settings_that_make_no_sense() -> None:
    x, y = rows()
    module = Small()
    for settings, what in (
        ({"epochs": 0}, "epochs 0"),
        ({"learning_rate": 0.0}, "learning_rate 0"),
        ({"momentum": 1.0}, "momentum 1.0"),
        ({"weight_decay": -1.0}, "weight_decay -1"),
        ({"batch": 20, "per_epoch": 3}, "(?s)3 copies from an epoch of 2 batches.*per_epoch=2"),
    ):
        with pytest.raises(ConfigError, match=what):
            lgv_models(module, (x, y), **settings)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="40 inputs, 3 labels"):
        lgv_models(module, (x, y[:3]))
    with pytest.raises(ConfigError, match=r"(?s)no parameter wants a gradient.*requires_grad_"):
        lgv_models(Small().requires_grad_(False), (x, y), batch=10)
    with pytest.raises(DataError, match=r"(?s)not finite in epoch.*smaller learning_rate"):
        lgv_models(module, (x * 1e10, y), batch=10, learning_rate=1e30)
