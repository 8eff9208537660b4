"""Beside torchattacks at the same budgets: as many rows broken, but for one of fifty.

torchattacks is installed without its dependencies (`pip install --no-deps torchattacks==3.5.1`): it asks for
torchvision and an old requests, of which it uses neither.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchattacks
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from mycelia.attacks import APGD, APGDT, DI, MIM, PGD, Attack, AutoAttack, Untargeted
from mycelia.attacks.norms import Norm

ROWS = 50
EPS: dict[Norm, float] = {"linf": 0.1, "l2": 0.5, "l1": 2.0}
"""Radii at which the better part of the rows breaks, and not all of them."""


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.data / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return x[order], torch.tensor(data.target)[order]


def network(kind: str) -> nn.Module:
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["mlp", "lenet"])
def trained(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, and inputs that it was not trained on."""
    x, y = digits()
    model = network(request.param)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            fan = parameter[0].numel() if parameter.dim() > 1 else 64
            parameter.copy_((2 * torch.rand(parameter.shape, generator=draw) - 1) / fan**0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[:1400]), y[:1400]).backward()
        optimizer.step()
    clean = float((model(x[1400:]).argmax(1) == y[1400:]).double().mean())
    assert clean > 0.9
    return model.eval(), x[1400 : 1400 + ROWS], y[1400 : 1400 + ROWS]


def held(attack: Attack, trained: tuple[nn.Module, Tensor, Tensor], seed: int = 0) -> int:
    model, x, y = trained
    result = attack.run(model, x, Untargeted(y), eps=EPS[attack.norm], rng=seed)
    assert float(result.distance[attack.norm].max()) <= EPS[attack.norm] * (1 + 1e-6)
    return result.counts.held


def right(peer: Any, trained: tuple[nn.Module, Tensor, Tensor]) -> int:
    model, x, y = trained
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = peer(x, y)
    return int((model(found).argmax(1) == y).sum())


@pytest.mark.parametrize(("p", "spelled"), [("linf", "Linf"), ("l2", "L2")])
def test_apgd(p: Norm, spelled: str, trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    for loss in ("ce", "dlr"):  # one start more or less decides a row or two: means over several
        mine, other = [], []
        for seed in range(4):
            peer = torchattacks.APGD(trained[0], norm=spelled, eps=EPS[p], steps=50, loss=loss, seed=seed)
            mine.append(held(APGD(norm=p, steps=50, loss=loss), trained, seed))
            other.append(right(peer, trained))
        assert sum(mine) / 4 <= sum(other) / 4 + 1
    peer = torchattacks.APGDT(trained[0], norm=spelled, eps=EPS[p], steps=30, n_classes=10)
    assert held(APGDT(norm=p, steps=30), trained) <= right(peer, trained) + 1


def test_momentum_and_diversity(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    eps = EPS["linf"]
    peer = torchattacks.MIFGSM(trained[0], eps=eps, alpha=eps / 4, steps=10)
    assert held(MIM(step_size=eps / 4), trained) <= right(peer, trained) + 1
    peer = torchattacks.DIFGSM(trained[0], eps=eps, alpha=eps / 4, steps=10, resize_rate=0.7)
    assert held(DI(layout="nchw", step_size=eps / 4, smallest=0.7), trained) <= right(peer, trained) + 1


def test_l1_is_stronger_than_pgd(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    """The peer has no l1; the claim is the paper's own."""
    assert held(APGD(norm="l1"), trained) <= held(PGD(norm="l1", steps=100), trained)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "spelled"), [("linf", "Linf"), ("l2", "L2")])
def test_autoattack(p: Norm, spelled: str, trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    """With all of its budget."""
    peer = torchattacks.AutoAttack(trained[0], norm=spelled, eps=EPS[p], n_classes=10, seed=0)
    assert held(AutoAttack(norm=p), trained) <= right(peer, trained) + 1
