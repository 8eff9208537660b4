"""Laws of all transforms and corruptions, and each against a closed form or another library."""

from __future__ import annotations

import dataclasses
import io
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scipy import ndimage, stats
from torch import Tensor

from mycelia.attacks.transforms import (
    CORRUPTIONS,
    SEVERITIES,
    TRANSFORMS,
    Change,
    Contrast,
    Corruption,
    Curve,
    GaussianBlur,
    GaussianNoise,
    GradientBlur,
    GradientLuminance,
    MotionBlur,
    NaturalNoise,
    Perspective,
    Rotate,
    SaltAndPepper,
    Scale,
    Shear,
    Transform,
    Translate,
    UniformNoise,
)
from mycelia.attacks.transforms.sampling import disk, line
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.pictures import smooth

SET: list[Transform] = [
    Contrast(1.4), GradientLuminance(0.3, 0.2, 0.7, 0.6), GradientLuminance(-0.3, pattern="rows"),
    GradientLuminance(0.3, pattern="columns"), GaussianBlur(1.1), MotionBlur(3.5, 30),
    GradientBlur(1.5, 0.2, 0.9),
    UniformNoise(0.1), GaussianNoise(0.1), SaltAndPepper(0.1), NaturalNoise(0.03, 2, 3), Translate(0.1, -0.2),
    Scale(0.8, 1.3), Shear(0.2, -0.1), Rotate(20),
    Perspective(((0.1, 0.05), (-0.1, 0.0), (0.0, 0.1), (0.1, -0.1))),
    Curve(0.07, 1.5), Curve(0.07, 1.5, "columns"), Rotate(20, padding="border"),
]  # fmt: skip
MEMBERS: list[Change] = [*SET, *(Corruption(name, level) for name in CORRUPTIONS for level in (1, 5))]
CHANCY = {"UniformNoise", "GaussianNoise", "SaltAndPepper", "NaturalNoise"}
CHANCY_CORRUPTIONS = {
    "gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur", "fog", "elastic_transform",
}  # fmt: skip


def named(change: Change) -> str:
    return f"{change.name}-{change.severity}" if isinstance(change, Corruption) else type(change).__name__


def chancy(change: Change) -> bool:
    return change.name in CHANCY_CORRUPTIONS if isinstance(change, Corruption) else named(change) in CHANCY


every = pytest.mark.parametrize("change", MEMBERS, ids=named)


def apply(change: Change, x: Tensor, rng: int = 3) -> Tensor:
    return change.apply(x, rng, layout="nchw")


def test_there_are_fifteen_and_thirteen() -> None:
    assert len(TRANSFORMS) == len(set(TRANSFORMS)) == 15
    assert len(CORRUPTIONS) == 13
    assert {type(each) for each in SET} == set(TRANSFORMS)
    assert sum(each.geometric for each in TRANSFORMS) == 6


# --- laws -----------------------------------------------------------------------------------------


@every
def test_a_row_does_not_see_the_others(change: Change) -> None:
    """Alone, permuted or twice: the same image."""
    x = smooth(4, size=(12, 10))
    whole = apply(change, x)
    rows = torch.tensor([2, 0, 2])
    assert torch.allclose(apply(change, x[rows]), whole[rows], atol=1e-10)
    alone = torch.cat([apply(change, row[None]) for row in x])
    assert torch.allclose(alone, whole, atol=1e-10)
    spoilt = x.clone()
    spoilt[1] = 0.0
    assert torch.allclose(apply(change, spoilt)[[0, 2, 3]], whole[[0, 2, 3]], atol=1e-10)


@every
def test_chance_comes_from_the_seed_alone(change: Change) -> None:
    x = smooth(2, size=(12, 10))
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 - it must not move
    first = apply(change, x)
    assert torch.equal(apply(change, x), first)
    assert torch.equal(apply(change, x, rng=4), first) == (not chancy(change))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


@every
def test_shape_dtype_and_bounds(change: Change) -> None:
    x = smooth(2, size=(12, 10))
    for dtype in (torch.float16, torch.float32, torch.float64):
        given = x.to(dtype)
        kept = given.clone()
        found = apply(change, given)
        assert (found.shape, found.dtype) == (given.shape, dtype)
        assert float(found.min()) >= 0
        assert float(found.max()) <= 1
        assert torch.equal(given, kept)
        assert not torch.equal(found, given)
    low, high = torch.full((3, 1, 1), -1.0), torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    found = change.apply(low + x * (high - low), 0, (low, high), "nchw")
    assert bool(((found >= low) & (found <= high)).all())
    assert apply(change, x[:0]).shape == x[:0].shape


@every
def test_layouts_agree(change: Change) -> None:
    x = smooth(2, size=(12, 10))
    last = change.apply(x.movedim(1, -1).contiguous(), 3, layout="nhwc")
    assert torch.equal(last.movedim(-1, 1), apply(change, x))


@every
def test_layout_is_never_guessed_and_inputs_are_checked(change: Change) -> None:
    x = smooth(2, size=(12, 10))
    with pytest.raises(ConfigError, match="layout None"):
        change.apply(x)
    with pytest.raises(DataError, match="four axes"):
        change.apply(x[0], layout="nchw")
    with pytest.raises(DataError, match="beyond bounds"):
        change.apply(x + 1, layout="nchw")
    with pytest.raises(DataError, match="floating point"):
        change.apply((x * 255).to(torch.uint8), layout="nchw")


@every
def test_one_pixel_and_one_row(change: Change) -> None:
    for size in ((1, 1), (1, 7), (7, 1)):
        found = apply(change, smooth(2, size=size))
        assert found.shape == (2, 3, *size)
        assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_neutral_settings_are_the_identity(kind: type[Transform]) -> None:
    x = smooth(2, size=(12, 10))
    assert kind().neutral
    assert torch.equal(apply(kind(), x), x)


@pytest.mark.parametrize(
    "change",
    [
        Contrast(1 + 1e-7), GradientLuminance(1e-7), GaussianBlur(0.126), MotionBlur(1e-7),
        GradientBlur(0.126),
        UniformNoise(1e-7), GaussianNoise(1e-7), SaltAndPepper(1e-9), NaturalNoise(1e-9),
        Translate(1e-7, 1e-7),
        Scale(1 + 1e-7, 1 - 1e-7), Shear(1e-7, 1e-7), Rotate(1e-6), Perspective(((1e-7, 0.0),) * 4),
        Curve(1e-7),
    ],
    ids=named,
)  # fmt: skip
def test_next_to_neutral_is_next_to_the_identity(change: Transform) -> None:
    assert not change.neutral
    x = smooth(2, size=(12, 10))
    assert torch.allclose(apply(change, x), x, atol=1e-5)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_random_settings_lie_in_their_ranges(kind: type[Transform]) -> None:
    drawn = [kind.random(rng) for rng in range(30)]
    assert kind.random(7) == drawn[7]
    assert len(set(map(repr, drawn))) == 30
    assert not any(each.neutral for each in drawn)
    for name, (low, high) in kind.ranges.items():
        values = [getattr(each, name) for each in drawn]
        assert min(values) >= low
        assert max(values) <= high
        assert {type(value) for value in values} == {type(low)}
        assert kind.limits[name][0] <= low <= high <= kind.limits[name][1]
    for name, words in kind.choices.items():
        assert {getattr(each, name) for each in drawn} == set(words)
    wide = kind.random(7, (-100.0, 155.0))
    for each in dataclasses.fields(kind):
        factor = 255 if each.name in kind.raw else 1
        value = getattr(drawn[7], each.name)
        assert getattr(wide, each.name) == (value * factor if factor > 1 else value)
    assert kind.random(7, (-math.inf, math.inf)) == drawn[7]


def test_settings_that_are_refused() -> None:
    for kind, wrong in (
        (Contrast, {"factor": -0.1}), (Contrast, {"factor": math.nan}), (GradientLuminance, {"scope": 0.0}),
        (GradientLuminance, {"pattern": "stars"}), (GaussianBlur, {"sigma": -1}),
        (MotionBlur, {"length": math.inf}),
        (UniformNoise, {"size": -1}), (SaltAndPepper, {"share": 1.1}), (NaturalNoise, {"height": 0}),
        (Translate, {"down": 2}), (Scale, {"height": 0}), (Shear, {"right": 1}), (Rotate, {"degrees": 400}),
        (Rotate, {"padding": "wrap"}), (Curve, {"axis": "diagonals"}),
        (Perspective, {"corners": ((0, 0),) * 3}),
        (Perspective, {"corners": ((0.5, 0.0), (0, 0), (0, 0), (0, 0))}), (Corruption, {"name": "rust"}),
        (Corruption, {"name": "fog", "severity": 6}), (Corruption, {"name": "fog", "severity": 0}),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            kind(**wrong)


def test_what_needs_bounds_says_so() -> None:
    x = smooth(1)
    for change in (SaltAndPepper(0.1), NaturalNoise(0.1), Corruption("fog")):
        with pytest.raises(ConfigError, match="infinite bounds"):
            change.apply(x, 0, (-math.inf, math.inf), "nchw")
    assert torch.allclose(
        GaussianNoise(5.0).apply(x, 0, (-math.inf, math.inf), "nchw").std(),
        torch.tensor(5.0).double(),
        rtol=0.1,
    )


# --- values ---------------------------------------------------------------------------------------


def test_contrast_is_that_of_pillow() -> None:
    grey = (smooth(1, 1)[0, 0] * 120 + 60).round()
    grey[0, 0] += (grey.mean().round() - grey.mean()) * grey.numel()  # a whole mean: Pillow rounds it
    assert float(grey[0, 0]) == round(float(grey[0, 0]))
    bounds = (-1e4, 1e4)
    found = Contrast(1.5).apply(grey[None, None], 0, bounds, "nchw")[0, 0]
    mean = round(float(grey.mean()))
    assert torch.allclose(found, mean + 1.5 * (grey - mean), atol=1e-9)
    picture = Image.fromarray(grey.clamp(0, 255).numpy().astype(np.uint8))
    theirs = torch.from_numpy(np.asarray(ImageEnhance.Contrast(picture).enhance(1.5)).astype(float))
    inner = slice(1, None)
    assert float((found.clamp(0, 255) - theirs)[inner, inner].abs().max()) <= 2


def test_light_falls_off_linearly() -> None:
    x = torch.full((1, 1, 5, 9), 0.5, dtype=torch.float64)
    lit = apply(GradientLuminance(0.4, down=0.5, right=0.0, scope=8 / 9, pattern="columns"), x)[0, 0]
    assert torch.allclose(lit, 0.5 + 0.4 * (1 - torch.arange(9).double() / 8).expand(5, 9))
    dark = apply(GradientLuminance(-0.4, down=1.0, scope=0.4, pattern="rows"), x)[0, 0]
    assert torch.allclose(dark[:, 0], torch.tensor([0.5, 0.5, 0.5, 0.3, 0.1]).double())
    diagonal = math.hypot(5, 9)
    circle = apply(GradientLuminance(0.4, down=0.5, right=0.5, scope=10 / diagonal), x)[0, 0]
    assert float(circle[2, 4]) == pytest.approx(0.9)
    assert float(circle[2, 7]) == pytest.approx(0.5 + 0.4 * 0.7)
    assert float(circle[0, 4]) == pytest.approx(0.5 + 0.4 * 0.8)


def test_noise_has_its_distribution() -> None:
    x = torch.full((1, 3, 60, 60), 0.5, dtype=torch.float64)
    uniform = (apply(UniformNoise(0.2), x) - 0.5).flatten()
    assert stats.kstest(uniform.numpy(), stats.uniform(-0.2, 0.4).cdf).pvalue > 1e-3
    normal = (apply(GaussianNoise(0.05), x) - 0.5).flatten()
    assert stats.kstest(normal.numpy(), stats.norm(0, 0.05).cdf).pvalue > 1e-3


def test_salt_and_pepper_takes_whole_pixels() -> None:
    x = torch.full((1, 3, 100, 100), 0.5, dtype=torch.float64)
    found = SaltAndPepper(0.2).apply(x, 0, (-1.0, 2.0), "nchw")[0]
    hit = found != 0.5
    assert torch.equal(hit[0], hit[1])
    assert torch.equal(found[0], found[2])
    assert set(found[hit].tolist()) == {-1.0, 2.0}
    count, salt = int(hit[0].sum()), int((found[0] == 2.0).sum())
    assert stats.binomtest(count, 10_000, 0.2).pvalue > 1e-3
    assert stats.binomtest(salt, count, 0.5).pvalue > 1e-3
    assert torch.equal(
        SaltAndPepper(1.0).apply(x, 0, layout="nchw").unique(), torch.tensor([0.0, 1.0]).double()
    )


def test_spots_are_rectangles_of_one_colour() -> None:
    x = torch.full((1, 2, 120, 120), 0.5, dtype=torch.float64)
    single = apply(NaturalNoise(0.1, 1, 1), x)[0, 0] != 0.5
    assert stats.binomtest(int(single.sum()), 14_400, 0.1).pvalue > 1e-3
    found = apply(NaturalNoise(0.002, 3, 5), x)[0]
    hit = (found != 0.5)[0].numpy()
    inner = np.pad(hit, 6)  # what the edge cuts off is a rectangle, too
    core = ndimage.binary_opening(inner, np.ones((3, 5)))[12:-12, 12:-12]
    assert np.array_equal(core, inner[12:-12, 12:-12])
    assert hit.mean() == pytest.approx(1 - 0.998**15, rel=0.25)
    labels, count = ndimage.label(hit)
    sizes = ndimage.sum(hit, labels, range(1, count + 1))
    alone = [k + 1 for k, size in enumerate(sizes) if size == 15]
    assert len(alone) > 5
    for k in alone:
        for channel in found:
            assert len(channel[torch.from_numpy(labels == k)].unique()) == 1


# --- blurs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.5, 1.3, 4.0])
def test_gaussian_blur_is_that_of_scipy(sigma: float) -> None:
    x = smooth(2, size=(14, 11))
    theirs = ndimage.gaussian_filter(x.numpy(), (0, 0, sigma, sigma), mode="nearest", truncate=4.0)
    assert torch.allclose(apply(GaussianBlur(sigma), x), torch.from_numpy(theirs), atol=1e-12)


def test_motion_blur_is_the_mean_along_a_line() -> None:
    """Of length 3 along a row: the integral of each pixel's hat over [−1.5, 1.5]."""
    x = smooth(2, size=(14, 11))
    weights = np.array([1 / 8, 7 / 8, 1, 7 / 8, 1 / 8]) / 3
    theirs = torch.from_numpy(ndimage.correlate1d(x.numpy(), weights, axis=3, mode="nearest"))
    assert torch.allclose(apply(MotionBlur(3.0), x), theirs, atol=1e-12)
    upright = torch.from_numpy(ndimage.correlate1d(x.numpy(), weights, axis=2, mode="nearest"))
    assert torch.allclose(apply(MotionBlur(3.0, 90.0), x), upright, atol=1e-12)
    kernel = line(6.0, torch.tensor([30.0, 45.0]))
    assert torch.allclose(kernel.sum((1, 2)), torch.ones(2).double())
    assert torch.allclose(kernel, kernel.flip(1, 2))
    place = torch.arange(-3, 4).double()
    falls = (kernel[0] * place[:, None] * place[None, :]).sum()  # anticlockwise: right goes with up
    assert float(falls) == pytest.approx(-3.0 * math.sin(math.radians(60)) / 2, rel=1e-2)  # E t² = 36/12
    assert torch.allclose(kernel[1], kernel[1].T)


def test_gradient_blur_is_sharp_at_its_focus() -> None:
    x = smooth(2, size=(9, 9))
    found = apply(GradientBlur(1.5, 0.0, 0.0), x)
    assert torch.allclose(found[..., 0, 0], x[..., 0, 0], atol=1e-12)
    assert torch.allclose(found[..., 8, 8], apply(GaussianBlur(1.5), x)[..., 8, 8], atol=1e-12)
    half = apply(GaussianBlur(0.75), x)
    assert torch.allclose(found[..., 4, 4], half[..., 4, 4], atol=1e-12)  # half way along the diagonal


# --- geometry -------------------------------------------------------------------------------------


def by_scipy(x: Tensor, matrix: np.ndarray) -> Tensor:
    """Pixel p of the result is read at matrix · p, both counted from the middle."""
    middle = (np.array(x.shape[2:]) - 1) / 2
    found = [
        ndimage.affine_transform(
            channel.numpy(), matrix, middle - matrix @ middle, order=1, mode="grid-constant", cval=0.0
        )
        for channel in x.flatten(0, 1)
    ]
    return torch.from_numpy(np.stack(found)).view_as(x)


def test_moves_are_those_of_scipy() -> None:
    x = smooth(2, size=(14, 11))
    shifted = ndimage.shift(x.numpy(), (0, 0, 0.1 * 14, -0.2 * 11), order=1, mode="grid-constant")
    assert torch.allclose(apply(Translate(0.1, -0.2), x), torch.from_numpy(shifted), atol=1e-12)
    assert torch.allclose(apply(Scale(0.8, 1.3), x), by_scipy(x, np.diag([1 / 0.8, 1 / 1.3])), atol=1e-12)
    forwards = np.array([[1, 0.2], [-0.1, 1]])
    assert torch.allclose(apply(Shear(0.2, -0.1), x), by_scipy(x, np.linalg.inv(forwards)), atol=1e-12)
    turned = ndimage.rotate(x.numpy(), 20, axes=(2, 3), reshape=False, order=1, mode="grid-constant")
    assert torch.allclose(apply(Rotate(20), x), torch.from_numpy(turned), atol=1e-12)
    square = smooth(2, size=(9, 9))
    assert torch.allclose(apply(Rotate(90), square), torch.rot90(square, 1, (2, 3)), atol=1e-12)


def test_padding_is_as_named() -> None:
    x = smooth(1, size=(6, 8))
    for padding, theirs in (("zeros", "grid-constant"), ("border", "nearest"), ("reflection", "reflect")):
        found = apply(Translate(0.0, 0.25, padding=padding), x)  # type: ignore[arg-type]
        expected = ndimage.shift(x.numpy(), (0, 0, 0, 2), order=1, mode=theirs)
        assert torch.allclose(found, torch.from_numpy(expected), atol=1e-12)


def test_waves_are_those_of_scipy() -> None:
    x = smooth(1, 1, size=(14, 11))
    i, j = np.mgrid[:14, :11].astype(float)
    rows = ndimage.map_coordinates(
        x[0, 0].numpy(),
        [i, j - 0.07 * 11 * np.sin(2 * np.pi * 1.5 * (i + 0.5) / 14)],
        order=1,
        mode="grid-constant",
    )
    assert torch.allclose(apply(Curve(0.07, 1.5), x)[0, 0], torch.from_numpy(rows), atol=1e-12)
    columns = ndimage.map_coordinates(
        x[0, 0].numpy(),
        [i - 0.07 * 14 * np.sin(2 * np.pi * 1.5 * (j + 0.5) / 11), j],
        order=1,
        mode="grid-constant",
    )
    assert torch.allclose(apply(Curve(0.07, 1.5, "columns"), x)[0, 0], torch.from_numpy(columns), atol=1e-12)


def test_perspective_is_that_of_pillow() -> None:
    """Its coefficients lead back from the moved corners, counted from the top left, to the old ones."""
    height, width = 40, 30
    moves = np.array([[0.1, 0.05], [-0.1, 0.02], [0.05, 0.1], [0.12, -0.1]])
    old = np.array([[0, 0], [0, width], [height, width], [height, 0]], dtype=float)
    new = old + moves * [height, width]
    rows, values = [], []
    for (y, x), (v, u) in zip(new, old, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    coefficients = np.linalg.solve(np.array(rows), np.array(values))
    image = smooth(1, 1, size=(height, width)).float()
    picture = Image.fromarray(image[0, 0].numpy())
    theirs = torch.from_numpy(
        np.asarray(
            picture.transform((width, height), Image.Transform.PERSPECTIVE, coefficients.tolist(),
                              Image.Resampling.BILINEAR)
        ).copy()
    )  # fmt: skip
    found = apply(Perspective(tuple(map(tuple, moves.tolist()))), image)[0, 0]
    inner = (slice(9, 31), slice(7, 23))
    assert torch.allclose(found[inner], theirs[inner], atol=1e-4)


def test_perspective_of_parallel_moves_is_a_shift_and_of_even_ones_a_scale() -> None:
    x = smooth(2, size=(14, 11))
    assert torch.allclose(
        apply(Perspective(((0.1, -0.2),) * 4), x), apply(Translate(0.1, -0.2), x), atol=1e-9
    )
    inwards = ((0.1, 0.15), (0.1, -0.15), (-0.1, -0.15), (-0.1, 0.15))
    assert torch.allclose(apply(Perspective(inwards), x), apply(Scale(0.8, 0.7), x), atol=1e-9)


# --- corruptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(3, (32, 32)), (1, (28, 28)), (3, (64, 48))], ids=str)
def test_severity_rises_strictly(name: str, shape: tuple[int, tuple[int, int]]) -> None:
    x = smooth(8, *shape)
    distances = [
        float((apply(Corruption(name, level), x) - x).flatten(1).norm(dim=1).mean()) for level in range(1, 6)
    ]
    assert distances[0] > 0
    assert all(before < after for before, after in pairwise(distances)), distances
    assert len(SEVERITIES[name]) == 5


@pytest.mark.parametrize(
    "name",
    [
        "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "elastic_transform", "pixelate", "contrast",
    ],
)  # fmt: skip
def test_blurs_leave_an_even_image_alone(name: str) -> None:
    x = torch.full((1, 3, 16, 16), 0.4, dtype=torch.float64)
    assert torch.allclose(apply(Corruption(name, 5), x), x, atol=1e-12)


def test_a_corruption_scales_with_the_bounds() -> None:
    x = smooth(2)
    for name in set(CORRUPTIONS) - CHANCY_CORRUPTIONS:
        found = Corruption(name, 3).apply(255 * x - 100, 0, (-100.0, 155.0), "nchw")
        assert torch.allclose((found + 100) / 255, apply(Corruption(name, 3), x), atol=1e-9), name


def test_shot_noise_is_poisson() -> None:
    rate = SEVERITIES["shot_noise"][2]
    x = torch.full((1, 1, 80, 80), 0.5, dtype=torch.float64)
    counts = (apply(Corruption("shot_noise", 3), x) * rate).round().flatten().numpy()
    inside = np.arange(int(rate))
    expected = stats.poisson(0.5 * rate).pmf(inside)
    seen = np.array([(counts == k).sum() for k in inside])
    expected, seen = np.append(expected, 1 - expected.sum()), np.append(seen, (counts >= rate).sum())
    assert stats.chisquare(seen, expected * len(counts)).pvalue > 1e-3
    assert not bool(apply(Corruption("shot_noise", 5), torch.zeros_like(x)).any())


def test_noise_corruptions_have_their_size() -> None:
    x = torch.full((1, 3, 60, 60), 0.5, dtype=torch.float64)
    noise = (apply(Corruption("gaussian_noise", 2), x) - 0.5).flatten().numpy()
    assert stats.kstest(noise, stats.norm(0, SEVERITIES["gaussian_noise"][1]).cdf).pvalue > 1e-3
    found = apply(Corruption("impulse_noise", 4), x)
    hit = int((found != 0.5).sum())
    assert stats.binomtest(hit, found.numel(), SEVERITIES["impulse_noise"][3]).pvalue > 1e-3
    assert stats.binomtest(int((found == 1).sum()), hit, 0.5).pvalue > 1e-3


def test_closed_forms() -> None:
    x = smooth(2)
    assert torch.allclose(
        apply(Corruption("brightness", 2), x), (x + SEVERITIES["brightness"][1]).clamp(max=1)
    )
    mean = x.mean((2, 3), keepdim=True)
    assert torch.allclose(apply(Corruption("contrast", 3), x), mean + SEVERITIES["contrast"][2] * (x - mean))
    assert SEVERITIES["pixelate"][4] == 0.25
    blocks = x.unfold(2, 4, 4).unfold(3, 4, 4).mean((4, 5)).repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert torch.allclose(apply(Corruption("pixelate", 5), x), blocks)
    fog = SEVERITIES["fog"][3]
    cloud = apply(Corruption("fog", 4), x) * (1 + fog) - x  # what was mixed in, once more
    assert torch.allclose(cloud.amin((2, 3)), torch.zeros(2, 3).double(), atol=1e-9)
    assert torch.allclose(cloud.amax((2, 3)), torch.full((2, 3), fog).double(), atol=1e-9)


def test_a_disk_has_its_area() -> None:
    for radius in (1.3, 3.5, 12.0):
        kernel = disk(radius)
        assert float(kernel.sum()) == pytest.approx(1)
        assert float(kernel.max()) == pytest.approx(1 / (math.pi * radius**2), rel=0.01)
    place = torch.arange(len(kernel)).double() - len(kernel) // 2
    assert float((kernel * (place[:, None] ** 2 + place[None, :] ** 2)).sum()) == pytest.approx(72, rel=0.01)


def test_jpeg_is_that_of_pillow() -> None:
    x = smooth(1)
    buffer = io.BytesIO()
    Image.fromarray((x[0].movedim(0, -1) * 255).round().to(torch.uint8).numpy()).save(
        buffer, "JPEG", quality=25
    )
    theirs = torch.from_numpy(np.asarray(Image.open(buffer)).copy()).movedim(-1, 0).double() / 255
    assert SEVERITIES["jpeg_compression"][2] == 25
    assert torch.allclose(apply(Corruption("jpeg_compression", 3), x)[0], theirs)
    with pytest.raises(DataError, match="2 channels"):
        apply(Corruption("jpeg_compression"), smooth(1, 2))
