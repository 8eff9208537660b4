"""A small network trained on the digits of scikit-learn, for comparisons with other libraries."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["digits_mlp"]


@cache
def digits_mlp(count: int = 100) -> tuple[nn.Module, Tensor, Tensor]:
    """A network of two hidden layers, and held-out images [count, 1, 8, 8] in [0, 1] that it has right."""
    data = load_digits()
    x, y = torch.tensor(data.images / 16, dtype=torch.float32)[:, None], torch.tensor(data.target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )
        optimiser = torch.optim.Adam(model.parameters(), 2e-3)
        for _ in range(15):
            for rows in torch.randperm(1400).split(64):
                optimiser.zero_grad()
                functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimiser.step()
    model.eval().requires_grad_(False)
    right = (model(x[1400:]).argmax(1) == y[1400:]).nonzero()[:count, 0] + 1400
    return model, x[right], y[right]
