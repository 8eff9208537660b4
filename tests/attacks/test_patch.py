"""The patch attack: where a patch lies, by hand; a planted weakness; held-out pictures; strength."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mycelia.attacks import Patch, PatchResult, Targeted, Untargeted
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.patch import Layout, Places, Shape, placed
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.digits import digits_mlp

torch.set_num_threads(1)


def place(top: float, left: float, side: float, degrees: float = 0.0) -> Places:
    values = (top, left, side, math.radians(degrees))
    return Places(*(torch.tensor([value], dtype=torch.float64) for value in values))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


class Spot(nn.Module):
    """Class 1 where some window of 3 × 3 is nearly white; nothing else matters."""

    def forward(self, x: Tensor) -> Tensor:
        bright = functional.avg_pool2d(x.mean(1, keepdim=True), 3, 1).flatten(1).amax(1)
        return torch.stack([torch.full_like(bright, 0.85), bright], 1) * 20


# --- where it lies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
def test_a_square_on_the_grid_is_pasted_and_turned(degrees: int) -> None:
    x, patch = noise(1, 3, 8, 10), noise(3, 4, 4, seed=1)
    found = placed(x, patch, place(4, 5, 4, degrees), Patch("square"))
    expected = x.clone()
    expected[0, :, 2:6, 3:7] = torch.rot90(patch, degrees // 90, (1, 2))  # counter-clockwise
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    outside = torch.ones(8, 10, dtype=torch.bool)
    outside[2:6, 3:7] = False
    assert torch.equal(found[0, :, outside], x[0, :, outside])


def test_size_and_shape_of_what_is_covered() -> None:
    """A disc covers π/4 of its square, a square all of it, turned or not."""
    x, patch = torch.zeros(1, 1, 200, 200), torch.ones(1, 7, 7)
    for side in (40, 80):
        for degrees in (0, 30):
            where = place(100, 100, side, degrees)
            disc, square = (float(placed(x, patch, where, Patch(shape)).sum()) for shape in SHAPES)
            assert disc == pytest.approx(math.pi / 4 * side**2, rel=0.02)
            assert square == pytest.approx(side**2, rel=0.02)


SHAPES: tuple[Shape, Shape] = ("disc", "square")


def test_a_patch_is_scaled() -> None:
    """Each pixel of the patch becomes 3 × 3; the middle one of these shows it without its neighbours."""
    x, patch = torch.zeros(1, 1, 12, 12), noise(1, 4, 4)
    found = placed(x, patch, place(6, 6, 12), Patch("square"))
    torch.testing.assert_close(found[0, :, 1::3, 1::3], patch, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_places_are_drawn_inside_the_picture_over_their_whole_range(shape: Shape) -> None:
    settings = Patch(shape, scale=(0.2, 0.4), rotation=45)
    x = torch.zeros(4000, 1, 20, 30)
    draws = Draws(0, "Patch", row_keys(torch.arange(4000)[:, None]))
    found = settings.places(x, draws)
    assert 4 <= float(found.side.min()) < 4.05
    assert 7.95 < float(found.side.max()) <= 8
    assert math.degrees(float(found.angle.abs().max())) == pytest.approx(45, abs=0.2)
    assert abs(math.degrees(float(found.angle.mean()))) < 2
    turned = found.angle.cos().abs() + found.angle.sin().abs() if shape == "square" else 1.0
    reach = found.side / 2 * turned
    assert bool(((found.top >= reach) & (found.top <= 20 - reach)).all())
    assert bool(((found.left >= reach) & (found.left <= 30 - reach)).all())
    share = ((found.left - reach) / (30 - 2 * reach)).sort().values
    assert float((share - torch.linspace(0, 1, 4000)).abs().max()) < 0.03  # uniform
    later = settings.places(x, draws, step=1)
    assert float((later.top - found.top).abs().mean()) > 1
    some = settings.places(x[:2], draws.of(torch.tensor([7, 3])))
    assert torch.equal(some.left, found.left[[7, 3]])  # a row's place is its own
    centre = Patch("square", scale=(1.0, 1.0), rotation=45).places(x, draws)
    assert bool((centre.top == 10).all())  # no room to move


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_reach_the_patch(shape: Shape) -> None:
    x, patch = noise(2, 1, 6, 6).double(), noise(1, 3, 3, seed=1).double().requires_grad_()
    where = Places(*(torch.tensor(values).double() for values in ([3.1, 2.4], [3, 3.3], [4.2, 3], [0.3, -1])))
    assert torch.autograd.gradcheck(lambda given: placed(x, given, where, Patch(shape)), (patch,))


# --- what it does -----------------------------------------------------------------------------------


def test_a_planted_weakness_is_found() -> None:
    """White is what works, and noise and coverage alone do nothing: no window of noise is that bright."""
    x = noise(60, 2, 12, 12) * 0.6
    y = torch.zeros(60, dtype=torch.int64)
    for goal in (Untargeted(y), Targeted(1 - y)):
        found = Patch(scale=(0.4, 0.6), epochs=10, batch=16).run(Spot(), x, goal)
        assert (found.counted, found.held_out_counted) == (45, 15)
        assert found.held_out_fooled == found.fooled == 1
        assert found.held_out_untrained == 0
        assert found.targeted == isinstance(goal, Targeted)
        middle = found.patch[:, 2:-2, 2:-2]
        assert float(middle.mean()) > 0.9
        assert float(found.patch.min()) >= 0
        assert float(found.patch.max()) <= 1
        interval = found.held_out_fooled_ci95
        assert interval is not None
        assert interval[0] < 1 == pytest.approx(interval[1])
        shown = found.applied(x, rng=5)
        assert bool((Spot()(shown).argmax(1) == 1).all())
        assert 0.1 < float((shown != x).double().mean()) < 0.36 * math.pi / 4 + 0.05


def test_a_trained_patch_is_worth_more_than_covering() -> None:
    model, x, y = digits_mlp()
    goal = Untargeted(y)
    found = Patch("square", scale=(0.35, 0.5), epochs=15, batch=25).run(model, x, goal, rng=1)
    assert found.held_out_fooled is not None
    assert found.held_out_untrained is not None
    assert found.held_out_fooled > found.held_out_untrained + 0.1


def test_better_than_as_many_drawn_patches() -> None:
    """30 passes each: ten epochs of forward, backward and score; the best of 30 in black and white."""
    model, x, y = digits_mlp()
    x, y = x[y != 9], y[y != 9]
    settings = Patch("square", scale=(0.6, 0.7), epochs=10, batch=25)
    found = settings.run(model, x, Targeted(torch.full_like(y, 9), y), rng=1)
    assert found.held_out_fooled is not None
    assert found.held_out_untrained is not None
    assert found.held_out_fooled > found.held_out_untrained + 0.4
    draws, shares = Draws(0, "test", row_keys(x)), []
    for seed in range(30):
        patch = (noise(*found.patch.shape, seed=seed) > (seed + 0.5) / 30).float()
        shown = placed(x, patch, settings.places(x, draws), settings)
        shares.append(float((model(shown).argmax(1) == 9).double().mean()))
    assert found.held_out_fooled > max(shares) + 0.1


def run(**changes: object) -> PatchResult:
    model, x, y = digits_mlp()
    settings = Patch(epochs=2, batch=25)
    return settings.run(model, x, Untargeted(y), **changes)  # type: ignore[arg-type]


def test_seeds_decide_and_nothing_else_is_touched() -> None:
    model, x, y = digits_mlp()
    before, kept = torch.get_rng_state(), x.clone()
    state = np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    first = run(rng=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], state)  # type: ignore[index]  # noqa: NPY002
    assert torch.equal(x, kept)
    assert torch.equal(first.patch, run(rng=3).patch)
    assert not torch.equal(first.patch, run(rng=4).patch)
    trained = nn.Sequential(nn.BatchNorm2d(1), model)
    weights = {name: each.clone() for name, each in trained.state_dict().items()}
    Patch(epochs=1).run(trained, x, Untargeted(y))
    assert trained.training
    assert all(torch.equal(each, weights[name]) for name, each in trained.state_dict().items())
    assert all(each.grad is None for each in trained[0].parameters())


def test_held_out_pictures_do_not_shape_the_patch() -> None:
    x = noise(40, 1, 12, 12) * 0.6
    goal = Untargeted(torch.zeros(40, dtype=torch.int64))
    settings = Patch(epochs=2, batch=16)
    first = settings.run(Spot(), x, goal, held_out=0.5)
    assert int(first.held_out.sum()) == 20
    other = x.clone()
    other[first.held_out] = other[first.held_out] * 0.5
    assert torch.equal(settings.run(Spot(), other, goal, held_out=0.5).patch, first.patch)
    other[~first.held_out] *= 0.9
    again = settings.run(Spot(), other, goal, held_out=0.5)
    assert torch.equal(again.held_out, first.held_out)


def test_rows_that_do_not_count() -> None:
    """Wrong from the start, and not finite."""
    x = noise(20, 1, 12, 12) * 0.6
    x[0], x[1, 0, 0, 0] = 1.0, torch.nan  # white: class 1 already
    goal = Untargeted(torch.zeros(20, dtype=torch.int64))
    found = Patch(epochs=1).run(Spot(), x, goal, held_out=0.0)
    assert (found.counted, found.held_out_counted) == (18, 0)
    assert found.held_out_fooled is None
    assert found.held_out_untrained is None
    assert found.held_out_fooled_ci95 is None
    none = Patch(epochs=1).run(Spot(), x[:0], goal.of(torch.arange(0)))
    assert (none.fooled, none.counted) == (None, 0)


def test_layouts_bounds_and_dtypes() -> None:
    x, goal = noise(24, 2, 12, 12) * 0.6, Untargeted(torch.zeros(24, dtype=torch.int64))
    settings = Patch(epochs=2, batch=12)
    first = settings.run(Spot(), x, goal)

    class Last(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            found: Tensor = Spot()(given.permute(0, 3, 1, 2))
            return found

    class Wide(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            found: Tensor = Spot()((given + 1) / 2)
            return found

    layout: Layout = "nhwc"
    last = Patch(epochs=2, batch=12, layout=layout).run(Last(), x.permute(0, 2, 3, 1).contiguous(), goal)
    torch.testing.assert_close(last.patch, first.patch, atol=1e-4, rtol=1e-4)
    assert last.applied(x.permute(0, 2, 3, 1)).shape == (24, 12, 12, 2)
    wide = settings.run(Wide(), 2 * x - 1, goal, bounds=(-1.0, 1.0))
    torch.testing.assert_close(wide.patch, 2 * first.patch - 1, atol=1e-3, rtol=1e-3)
    double = settings.run(Spot(), x.double(), goal)
    assert double.patch.dtype == torch.float64
    array = settings.run(Spot(), x.numpy(), goal)
    assert torch.equal(array.patch, first.patch)


@pytest.mark.parametrize(
    "make",
    [lambda: Patch("circle"), lambda: Patch(layout="chw"), lambda: Patch(scale=(0.5, 0.4)),  # type: ignore[arg-type]
     lambda: Patch(scale=(0.0, 0.4)), lambda: Patch(scale=(0.5, 1.2)), lambda: Patch(rotation=-1),
     lambda: Patch(side=0), lambda: Patch(epochs=0), lambda: Patch(step_size=0.0), lambda: run(held_out=1.0)],
)  # fmt: skip
def test_settings_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_what_cannot_be_attacked_is_refused() -> None:
    x, y = noise(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ConfigError, match="gradients"):
        Patch().run(lambda given: given.flatten(1)[:, :2], x, Untargeted(y))
    with pytest.raises(DataError, match="pictures"):
        Patch().run(Spot(), x.flatten(1), Untargeted(y))
    with pytest.raises(DataError, match="one goal"):
        Patch().run(Spot(), x, Untargeted(y[:3]))
    with pytest.raises(DataError, match="bounds"):
        Patch().run(Spot(), x + 1, Untargeted(y))
