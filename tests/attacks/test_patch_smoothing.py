"""Smoothing against patches: counts by enumeration, certificates against all patches, without slack."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks.defences import Bands, BandTraining, PatchSmoothed
from mycelia.attacks.defences.patch_smoothing import Kind, Layout
from mycelia.engine.capture import capture
from mycelia.engine.data import Examples
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.losses import cross_entropy
from mycelia.engine.optimizers import adam
from mycelia.engine.training import Trainer

torch.set_num_threads(1)

KINDS: tuple[Kind, ...] = ("column", "row", "block")


def patches(tall: int, wide: int, height: int, width: int) -> Iterator[Tensor]:
    """Where each patch lies, bool [height, width]."""
    for top, left in itertools.product(range(height - tall + 1), range(width - wide + 1)):
        place = torch.zeros(height, width, dtype=torch.bool)
        place[top : top + tall, left : left + wide] = True
        yield place


@pytest.mark.parametrize("kind", KINDS)
def test_affected_bands_are_counted(kind: Kind) -> None:
    """Against all bands and all places of all patches; the count is reached, never exceeded."""
    height, width = 5, 7
    for size in range(1, 6):
        bands = Bands(kind, size)
        masks = bands.masks(height, width)
        area = {"column": size * height, "row": size * width, "block": size * size}[kind]
        assert len(masks) == {"column": width, "row": height, "block": height * width}[kind]
        assert masks.flatten(1).sum(1).tolist() == [area] * len(masks)
        for tall, wide in ((1, 1), (2, 2), (2, 3), (4, 1), (5, 7)):
            touched = [
                int((masks & place).flatten(1).any(1).sum()) for place in patches(tall, wide, height, width)
            ]
            assert max(touched) == bands.affected((tall, wide), height, width)
    assert Bands("column", 4).affected(5, 32, 32) == 8  # m + s − 1, and its square: section 3
    assert Bands("block", 12).affected(5, 32, 32) == 256


def test_what_is_kept_stands_twice_and_the_rest_is_nothing() -> None:
    x = torch.tensor([[[[0.0, 0.25, 1.0]]]])
    keep = torch.tensor([[[True, True, False]]])
    found = Bands().encode(x, keep)
    assert found.tolist() == [[[[0.0, 0.25, 0.0]], [[1.0, 0.75, 0.0]]]]
    last = Bands(layout="nhwc").encode(x.permute(0, 2, 3, 1), keep)
    assert torch.equal(last.permute(0, 3, 1, 2), found)
    whole = Bands().encoded(Examples(x.numpy(), np.array([1])))
    assert whole.inputs.tolist() == [[[[0.0, 0.25, 1.0]], [[1.0, 0.75, 0.0]]]]
    wide = Bands().encode(2 * x - 1, keep, -1.0, 1.0)
    torch.testing.assert_close(wide, 2 * found)


class Any1(nn.Module):
    """Class `bright` if any kept number is above a half, else the other one."""

    def __init__(self, bright: int) -> None:
        super().__init__()
        self.bright = bright

    def forward(self, seen: Tensor) -> Tensor:
        lit = (seen[:, :1].flatten(1) > 0.5).any(1).float()
        z = torch.stack([1 - lit, lit], 1) * 20
        return z if self.bright == 1 else z.flip(1)


@pytest.mark.parametrize("bright", [0, 1])
@pytest.mark.parametrize("kind", ["column", "block"])
def test_the_certificate_has_no_slack(kind: Kind, bright: int) -> None:
    """A dark picture, and a patch of light: it turns as many votes as are assumed, so the answer is exact."""
    answers = set()
    for width, size, patch in itertools.product((3, 4, 5, 6, 7, 8), (1, 2), (1, 2, 3)):
        x = torch.zeros(1, 1, width, width)
        smoothed = PatchSmoothed(Any1(bright), Bands(kind, size))
        found = smoothed.certify(x, patch)
        assert int(found.label) == 1 - bright
        turned = False
        for place in patches(patch, patch, width, width):
            lit = x.clone()
            lit[0, 0][place] = 1
            turned |= int(smoothed.predict(lit)) == bright
        assert bool(found.certified) == (not turned), (width, size, patch)
        answers.add(turned)
    assert answers == {True, False}


class Hashed(nn.Module):
    """Votes by a rule of the kept numbers that no smoothness helps with: three classes of 2^k patterns."""

    def __init__(self, seed: int, lean: float) -> None:
        super().__init__()
        draw = np.random.default_rng(seed)
        self.weights = torch.from_numpy(draw.integers(1, 2**20, size=64)).double()
        self.lean = lean

    def forward(self, seen: Tensor) -> Tensor:
        flat = seen.flatten(1).double()
        mixed = (flat @ self.weights[: flat.shape[1]] * 0.6180339887) % 1
        which = torch.where(mixed < self.lean, 0, torch.where(mixed < (1 + self.lean) / 2, 1, 2))
        return nn.functional.one_hot(which, 3).float() * 5


@pytest.mark.parametrize("threshold", [0.3, None])
@pytest.mark.parametrize(("kind", "height", "width", "size", "patch"), [
    ("column", 2, 8, 1, (2, 1)), ("column", 1, 11, 2, (1, 2)), ("row", 7, 2, 1, (1, 2)),
    ("block", 4, 4, 1, (1, 2)), ("block", 3, 5, 2, (1, 1)),
])  # fmt: skip
def test_no_patch_turns_a_certified_row(
    kind: Kind, height: int, width: int, size: int, patch: tuple[int, int], threshold: float | None
) -> None:
    """Against all contents of 0 and 1, at all places, of a base classifier without any structure."""
    smoothed = PatchSmoothed(Hashed(3, 0.75), Bands(kind, size), threshold)
    x = torch.from_numpy(np.random.default_rng(1).integers(0, 2, size=(12, 1, height, width))).float()
    found = smoothed.certify(x, patch)
    assert bool(found.certified.any())
    assert torch.equal(found.label, smoothed.predict(x))
    for place in patches(*patch, height, width):
        for contents in itertools.product((0.0, 1.0), repeat=int(place.sum())):
            changed = x[found.certified].clone()
            changed[:, 0, place] = torch.tensor(contents)
            assert torch.equal(smoothed.predict(changed), found.label[found.certified])


def test_votes_and_ties() -> None:
    """Two classes above the threshold have a vote each; of equal counts the first class wins."""

    class Fixed(nn.Module):
        def forward(self, seen: Tensor) -> Tensor:
            return torch.tensor([0.15, 0.45, 0.40]).log().expand(len(seen), -1)

    x = torch.zeros(2, 1, 3, 6)
    found = PatchSmoothed(Fixed(), Bands(size=1)).certify(x, 1)
    assert found.votes.tolist() == [[0, 6, 6]] * 2
    assert found.label.tolist() == [1, 1]
    assert not bool(found.certified.any())
    alone = PatchSmoothed(Fixed(), Bands(size=1), threshold=None).certify(x, 1)
    assert alone.votes.tolist() == [[0, 6, 0]] * 2
    assert bool(alone.certified.all())
    assert (alone.affected, alone.patch, alone.bands) == (1, (1, 1), 6)
    share, (low, high) = alone.accuracy(torch.tensor([1, 2]))
    assert share == 0.5
    assert low < 0.5 < high
    none = PatchSmoothed(Fixed(), Bands(size=1), threshold=0.5).certify(x, 1)
    assert none.votes.tolist() == [[0, 0, 0]] * 2
    assert not bool(none.certified.any())


def test_rows_stand_alone_and_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )
    torch.manual_seed(0)
    x = torch.rand(5, 1, 8, 8)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    smoothed = PatchSmoothed(model, Bands(size=2))
    votes = smoothed.votes(x)
    assert torch.equal(smoothed.votes(x[[3, 1]]), votes[[3, 1]])
    assert model.training
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def stripes(count: int, seed: int) -> Examples:
    """A bright column, for class 1 in each left half of four, else in the right one."""
    draw = np.random.default_rng(seed)
    y = draw.integers(2, size=count)
    x = 0.3 * draw.random((count, 1, 8, 16))
    for row, label in enumerate(y):
        x[row, 0, :, (0 if label else 2) :: 4] += 0.6
    return Examples(x.astype(np.float32), y)


def test_training_on_bands_certifies() -> None:
    data, bands = stripes(300, 0), Bands("column", 4)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(2 * 8 * 16, 32), nn.ReLU(), nn.Linear(32, 2))
    example = torch.zeros(2, 2, 8, 16), torch.zeros(2, dtype=torch.int64)
    seen: list[Tensor] = []

    class Watched(BandTraining):
        def craft(self, batch: Any) -> tuple[Tensor, Tensor]:
            found = super().craft(batch)
            seen.append(found[0])
            return found

    for plan in ("eager", "interpreter"):
        program = capture(module, cross_entropy, example, backend="export")
        trainer = Trainer(
            program, adam(0.01), epochs=8, batch_size=32, plan=plan, updates=Watched(bands), seed=1
        )
        result = trainer.fit(bands.encoded(data))
    kept = torch.cat(seen).sum(1) > 0
    assert bool((kept.any(1).sum(1) == 4).all())
    starts = (kept.any(1) & ~kept.any(1).roll(1, 1)).float().argmax(1)
    assert torch.bincount(starts, minlength=16).min() > 150  # 4,800 draws of 16 places: 300 each
    test = stripes(60, 1)
    x, y = torch.from_numpy(test.inputs), torch.from_numpy(test.targets)

    def model(given: Tensor) -> Tensor:
        return cast(Tensor, program.predict(result.params, result.buffers, given))

    smoothed = PatchSmoothed(model, bands)
    assert smoothed.certify(x, 2).accuracy(y)[0] > 0.9
    assert smoothed.certify(x, 8).accuracy(y)[0] == 0  # 11 of 16 bands: no certificate is possible


@pytest.mark.parametrize(
    "make",
    [lambda: Bands("columns"), lambda: Bands(size=0), lambda: Bands(layout="hwc"),  # type: ignore[arg-type]
     lambda: PatchSmoothed(Any1(1), threshold=0.0), lambda: PatchSmoothed(Any1(1), bounds=(1.0, 0.0)),
     lambda: Bands(size=9).masks(8, 8), lambda: Bands().affected(9, 8, 8), lambda: Bands().affected(0, 8, 8),
     lambda: PatchSmoothed(Any1(1)).certify(torch.zeros(1, 1, 8, 8), (2, 9))],
)  # fmt: skip
def test_settings_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_layout_and_data(layout: Layout) -> None:
    bands = Bands(layout=layout, size=2)
    x = torch.zeros(2, 3, 8, 6) if layout == "nchw" else torch.zeros(2, 8, 6, 3)
    assert bands.sides(x) == (8, 6)
    with pytest.raises(DataError, match="pictures"):
        bands.sides(x[0])
    smoothed = PatchSmoothed(Any1(1), bands)
    with pytest.raises(DataError, match="bounds"):
        smoothed.votes(x - 1)
    with pytest.raises(DataError, match="finite"):
        smoothed.votes(x * torch.nan)
    assert smoothed.certify(x[:0], 2).certified.shape == (0,)
