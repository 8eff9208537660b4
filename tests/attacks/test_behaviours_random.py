"""Behaviours of searches by scores that have names of their own."""

from __future__ import annotations

import pytest
import torch

from mycelia.attacks import FAB, FABT, RandomNoise, Spatial, Square, Status, Untargeted
from mycelia.attacks.base import Attack
from mycelia.engine.errors import ConfigError
from tests.attacks.worlds import EPS, affine, images, small


def test_layout_never_guessed() -> None:
    """Image axes are asked for, or read as documented and not from sizes."""
    x = images(4)
    y = small()(x).argmax(1)
    with pytest.raises(ConfigError, match="by layout"):
        Spatial().run(small(), x, Untargeted(y))
    with pytest.raises(ConfigError, match="layout"):
        Square(layout="guess")  # type: ignore[arg-type]
    # Sizes that look like the other layout change nothing: three rows of pixels stay rows.
    thin = torch.rand(4, 5, 4, 3, generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []

    def model(v: torch.Tensor) -> torch.Tensor:
        seen.append(v.clone())
        return torch.tensor([[1.0, 0.0]]).expand(len(v), 2)

    Square(steps=1).run(model, thin, Untargeted(torch.zeros(4, dtype=torch.int64)), eps=0.01, rng=0)
    up = seen[1] > thin
    assert torch.equal(up, up[:, :, :1].expand_as(up))  # stripes run down the third axis


@pytest.mark.parametrize(
    "attack",
    [FAB(norm="l2", steps=6), FABT(norm="l2", steps=4), Square(norm="l2", steps=30),
     RandomNoise(norm="l2", draws=30), Spatial(layout="nchw", rotations=3, shifts=2, norm="l2")],
    ids=lambda attack: type(attack).__name__,
)  # fmt: skip
def test_query_budget_is_exact(attack: Attack) -> None:
    """No row asks more often than it may, and rows that hold use it up where passes go one by one."""
    x = images(12)
    y = small()(x).argmax(1)
    for budget in (1, 2, 9):
        result = attack.run(small(), x, Untargeted(y), eps=EPS["l2"] / 4, rng=0, queries=budget)
        assert bool((result.queries <= 1 + budget).all())
        if attack.kind == "fixed":
            assert bool((result.queries[result.is_(Status.HELD)] == 1 + budget).all())


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_class_count_edge_cases(norm: str) -> None:
    """Two classes, a hundred classes, and more targets than classes."""
    for classes in (2, 100):
        model = affine(classes, 6)
        x = torch.rand(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        y = model(x).argmax(1)
        result = FABT(norm=norm, steps=3, targets=150).run(
            model, x, Untargeted(y), rng=0, bounds=(-50.0, 50.0)
        )  # type: ignore[arg-type]
        assert result.counts.broken == 6
        assert bool((result.gradients == 3 * (classes - 1)).all())
        fab = FAB(norm=norm, steps=3).run(model, x, Untargeted(y), rng=0, bounds=(-50.0, 50.0))  # type: ignore[arg-type]
        assert fab.counts.broken == 6
