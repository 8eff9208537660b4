"""Rotations and shifts against those of whole pixels and right angles, and the grid against plain search."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mycelia.attacks import Spatial, Status, Untargeted
from mycelia.attacks.evasion.spatial import moved
from mycelia.attacks.losses import margin
from mycelia.attacks.norms import norm
from mycelia.engine.errors import ConfigError
from tests.attacks.worlds import images, small

WIDE = Spatial(layout="nchw", rotation=6, rotations=5, shift=0.3, shifts=3)


def test_right_angles_and_whole_pixels_are_exact() -> None:
    x = torch.rand(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for quarter in range(4):
        assert torch.allclose(moved(x, 90.0 * quarter, 0, 0), torch.rot90(x, quarter, (2, 3)), atol=1e-12)
    shifted = torch.zeros_like(x)
    shifted[:, :, 1:, :3] = x[:, :, :-1, 2:]
    assert torch.allclose(moved(x, 0, 1, -2), shifted, atol=1e-12)
    turned = torch.zeros_like(x)
    turned[:, :, 1:] = torch.rot90(x, 1, (2, 3))[:, :, :-1]
    assert torch.allclose(moved(x, 90, 1, 0), turned, atol=1e-12)  # turned first, then shifted
    assert torch.allclose(moved(x, 180, 0, 0)[..., :4], x.flip(2, 3)[..., :4], atol=1e-12)


def test_half_a_pixel_is_the_mean_of_two_and_padding_is_as_named() -> None:
    x = torch.rand(1, 1, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))  # not square
    half = moved(x, 0, 0, 0.5)
    assert torch.allclose(half[..., 1:], (x[..., 1:] + x[..., :-1]) / 2, atol=1e-12)
    assert torch.allclose(half[..., 0], x[..., 0] / 2, atol=1e-12)  # the other half is zero
    assert torch.allclose(moved(x, 0, 0, 0.5, "border")[..., 0], x[..., 0], atol=1e-12)
    assert torch.allclose(moved(x, 0, 0, 1, "reflection")[..., 0], x[..., 0], atol=1e-12)


def test_pixels_are_square_in_images_that_are_not() -> None:
    """A turn by 90° about the middle keeps distances: a dot three to the right of it goes three up."""
    x = torch.zeros(1, 1, 9, 11, dtype=torch.float64)
    x[0, 0, 4, 8] = 1
    found = moved(x, 90, 0, 0)
    assert found[0, 0].argmax() == 1 * 11 + 5
    assert float(found.max()) == pytest.approx(1)


def every(x: Tensor, attack: Spatial) -> Tensor:
    """[moves, n, …], in the order of the grid."""
    return torch.stack([x if not k else moved(x, *move).clamp(0, 1) for k, move in enumerate(attack.grid())])


def test_the_grid_is_searched_completely() -> None:
    """Broken if and only if any move is a success; then the nearest one, otherwise the worst one."""
    model, x = small(), images(40)
    y = model(x).argmax(1)
    result = WIDE.run(model, x, Untargeted(y), rng=0)
    points = every(x, WIDE)
    assert len(points) == 5 * 3 * 3
    outputs = torch.stack([model(point).detach() for point in points])
    success = outputs.argmax(2) != y
    assert torch.equal(result.is_(Status.BROKEN), success.any(0))
    assert 0 < result.counts.broken < 40
    assert bool((result.queries == 1 + 45).all())
    distance = torch.stack([norm(point - x, "l2") for point in points])
    nearest = torch.where(success, distance, torch.inf).argmin(0)
    worst = torch.stack([margin(each, y) for each in outputs]).argmax(0)
    chosen = torch.where(success.any(0), nearest, worst)
    assert torch.equal(result.best_step, chosen)
    assert torch.allclose(result.x_adv, points[chosen, torch.arange(40)])
    loss = WIDE.run(model, x, Untargeted(y), rng=0, keep="loss")
    assert torch.equal(loss.best_step, worst)
    assert torch.equal(loss.status, result.status)


def test_a_radius_confines_the_grid() -> None:
    model, x = small(), images(40)
    y = model(x).argmax(1)
    points = every(x, WIDE)
    distance = torch.stack([norm(point - x, "l2") for point in points])
    eps = float(distance[1:].median())
    result = WIDE.run(model, x, Untargeted(y), eps=eps, rng=0)
    success = torch.stack([model(point).argmax(1) != y for point in points]) & (distance <= eps)
    assert torch.equal(result.is_(Status.BROKEN), success.any(0))
    assert torch.equal(result.queries, 1 + (distance <= eps).sum(0))
    assert bool((result.distance["l2"] <= eps).all())


def test_layouts_agree_and_are_never_guessed() -> None:
    model, x = small(), images(10)
    y = model(x).argmax(1)
    first = WIDE.run(model, x, Untargeted(y), rng=0)
    last = Spatial(layout="nhwc", rotation=6, rotations=5, shift=0.3, shifts=3).run(
        lambda v: model(v.movedim(-1, 1)).detach(), x.movedim(1, -1).contiguous(), Untargeted(y), rng=0
    )
    assert torch.equal(last.status, first.status)
    assert torch.allclose(last.x_adv.movedim(-1, 1), first.x_adv)
    with pytest.raises(ConfigError, match="layout None"):
        Spatial().run(model, x, Untargeted(y))
    with pytest.raises(ConfigError, match=r"shape \[n, 6, 6\]"):
        WIDE.run(lambda v: v.flatten(1)[:, :4], x[:, 0], Untargeted(y))


def test_a_flat_input_is_shifted_along_its_row() -> None:
    """z = (x₂ , 0.5): a shift by one brings x₁ there."""
    x = torch.tensor([[0.1, 0.9, 0.2, 0.3]])
    attack = Spatial(rotations=1, shift=1.0, shifts=3)
    result = attack.run(
        lambda v: torch.stack([v[:, 1], torch.full_like(v[:, 1], 0.5)], 1),
        x,
        Untargeted(torch.tensor([0])),
        keep="loss",
    )
    assert torch.allclose(result.x_adv, torch.tensor([[0.0, 0.1, 0.9, 0.2]]))
    assert int(result.queries[0]) == 1 + 3


def test_settings_that_are_refused() -> None:
    for wrong in (
        {"layout": "hwc"}, {"rotation": -1}, {"rotation": 181}, {"shift": math.inf}, {"rotations": 0},
        {"shifts": 0}, {"padding": "wrap"}, {"norm": "l3"},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            Spatial(**wrong)  # type: ignore[arg-type]
