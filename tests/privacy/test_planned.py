"""Clipped gradients under the plans: the same figures, and nothing of a batch is baked into a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mycelia.engine import _torch
from mycelia.engine.capture import capture
from mycelia.engine.errors import ConfigError
from mycelia.engine.losses import cross_entropy
from mycelia.engine.models import build
from mycelia.privacy.clip import Abadi
from mycelia.privacy.clipped_grad import Clipped, ClippedGrad, clipped_grad


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of these tests are theirs; one folder for all, so that none is compiled twice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path(tmp_path_factory.getbasetemp()) / "cache"))


class Recurrent(nn.Module):
    """Pixels as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Dropped(nn.Module):
    """Random in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.drop(self.one(x)))


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), (5,)),
    "dropout": (Dropped, (5,)),
    "lstm": (Recurrent, (4, 4)),
    "lenet": (lambda: build("lenet", (1, 28, 28), 3), (1, 28, 28)),
}
PLANS = [
    pytest.param(name, plan, marks=pytest.mark.slow if plan == "inductor" and name != "dropout" else ())
    for name in CASES
    for plan in ("interpreter", "inductor")
]


def setup(name: str) -> tuple[ClippedGrad, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    make, shape = CASES[name]
    batch = torch.randn(6, *shape), torch.randint(0, 3, (6,))
    program = capture(make(), cross_entropy, (batch[0][:2], batch[1][:2]))
    return clipped_grad(program, Abadi(0.3)), batch


def same(found: Clipped, expected: Clipped) -> None:
    for name, tensor in expected.total.items():
        torch.testing.assert_close(found.total[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_a_plan_changes_no_figure(name: str, plan: str) -> None:
    if plan == "inductor":
        assert _torch.compiler() is not None
    eager, batch = setup(name)
    params, buffers = eager.program.init()
    planned = eager.planned(plan, params, buffers, batch)
    assert planned.tapped is not None
    assert planned.tapped.compiled is not None
    other = batch[0].flip(0) * 1.5, batch[1].flip(0)
    mask = torch.tensor([True, True, False, True, True, True])
    padded = other[0].clone()
    padded[2] = torch.nan
    changed = {key: tensor * 1.1 for key, tensor in params.items()}
    for seed in (1, torch.tensor(2)):
        same(planned(changed, buffers, other, seed=seed), eager(changed, buffers, other, seed=seed))
        same(
            planned(params, buffers, (padded, other[1]), mask, seed=seed),
            eager(params, buffers, (padded, other[1]), mask, seed=seed),
        )
    # a batch of another size goes the eager way
    same(
        planned(params, buffers, (batch[0][:4], batch[1][:4])),
        eager(params, buffers, (batch[0][:4], batch[1][:4])),
    )


@pytest.mark.parametrize("plan", ["interpreter"])
def test_an_example_that_is_not_finite_changes_no_other(plan: str) -> None:
    eager, batch = setup("mlp")
    params, buffers = eager.program.init()
    planned = eager.planned(plan, params, buffers, batch)
    broken = batch[0].clone()
    broken[3] = torch.inf
    found = planned(params, buffers, (broken, batch[1]))
    keep = torch.arange(6) != 3
    without = eager(params, buffers, (batch[0][keep], batch[1][keep]))
    for name, tensor in without.total.items():
        torch.testing.assert_close(found.total[name], tensor, rtol=1e-5, atol=1e-6)
    assert found.factors[3] == 0


def test_parts_of_a_batch_have_their_own_randomness_under_a_plan() -> None:
    eager, batch = setup("dropout")
    params, buffers = eager.program.init()
    split = clipped_grad(eager.program, Abadi(0.3), physical=3)
    planned = split.planned("interpreter", params, buffers, batch)
    assert planned.tapped is not None
    assert planned.tapped.compiled is not None
    assert planned.tapped.compiled.shape == (3, 5)
    same(planned(params, buffers, batch, seed=7), split(params, buffers, batch, seed=7))


def test_gradients_without_taps_have_no_plan() -> None:
    eager, batch = setup("mlp")
    slow = clipped_grad(eager.program, Abadi(0.3), backend="vmap")
    with pytest.raises(ConfigError, match="vmap"):
        slow.planned("interpreter", *eager.program.init(), batch)
    with pytest.raises(ConfigError, match="resolved"):
        eager.planned("default", *eager.program.init(), batch)
