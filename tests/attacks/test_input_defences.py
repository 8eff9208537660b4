"""Stages before and after a model: closed forms, scipy and Pillow as oracles, and gradients through them."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage, special
from torch import Tensor, nn

from mycelia.attacks import FGM, PGD, AutoAttack, Square, Untargeted, as_model, with_normalisation
from mycelia.attacks.defences import (
    JPEG,
    BitDepth,
    Defended,
    GaussianNoise,
    LabelsOnly,
    MedianFilter,
    Obfuscated,
    OutputNoise,
    ResizePad,
    ReverseSigmoid,
    Rounded,
    Stage,
    Thermometer,
    TotalVariation,
    adapted,
    defences_of,
    through,
    with_eot,
)
from mycelia.attacks.draws import Draws, row_keys
from mycelia.attacks.probes import has_gradient
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.worlds import affine, images, small

torch.set_num_threads(1)


def draws(n: int, seed: int = 0) -> Draws:
    return Draws(seed, "test", row_keys(torch.arange(n)[:, None]))


def pictures(n: int = 3, channels: int = 3, size: tuple[int, int] = (9, 7)) -> Tensor:
    draw = torch.Generator().manual_seed(4)
    return torch.rand(n, channels, *size, dtype=torch.float64, generator=draw)


IMAGE_STAGES = [
    MedianFilter(3, layout="nchw"),
    JPEG(80, layout="nchw"),
    TotalVariation(steps=20, layout="nchw"),
    ResizePad(0.5, layout="nchw"),
]


def name(value: object) -> str:
    return type(value).__name__


# --- what the stages do -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.floats(-2, 2), st.sampled_from([(0.0, 1.0), (-1.0, 1.0)]))
def test_bit_depth_is_the_nearest_level(bits: int, value: float, bounds: tuple[float, float]) -> None:
    found = float(BitDepth(bits, bounds)(torch.tensor([[value]], dtype=torch.float64), draws(1)))
    levels = np.linspace(*bounds, 2**bits)
    clipped = min(max(value, bounds[0]), bounds[1])
    assert np.abs(levels - found).min() < 1e-12
    assert abs(found - clipped) <= np.abs(levels - clipped).min() + 1e-12


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_median_filter_is_scipys(size: int) -> None:
    x = pictures()
    expected = ndimage.median_filter(x.numpy(), (1, 1, size, size), mode="reflect")
    np.testing.assert_array_equal(MedianFilter(size, layout="nchw")(x, draws(3)).numpy(), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_pillows(channels: int) -> None:
    x = pictures(2, channels, (16, 24))
    found = JPEG(40, layout="nchw")(x, draws(2))
    for row in range(2):
        levels = (x[row].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(levels if channels == 3 else levels[..., 0]).save(buffer, "JPEG", quality=40)
        expected = np.asarray(Image.open(buffer)).reshape(levels.shape) / 255
        np.testing.assert_allclose(found[row].permute(1, 2, 0).numpy(), expected, atol=1e-12)
    with pytest.raises(DataError, match="channels"):
        JPEG(layout="nchw")(pictures(1, 2), draws(1))


def test_jpeg_follows_the_bounds() -> None:
    x = pictures(2, 1, (8, 8))
    narrow = JPEG(90, layout="nchw")(x, draws(2))
    wide = JPEG(90, bounds=(-1.0, 1.0), layout="nchw")(2 * x - 1, draws(2))
    torch.testing.assert_close(wide, 2 * narrow - 1)


@pytest.mark.parametrize(("weight", "left"), [(0.2, 3), (0.6, 5), (5.0, 2)])
def test_total_variation_of_a_step(weight: float, left: int) -> None:
    """Two levels move towards each other by weight / their widths, until they meet at the mean."""
    width = 8
    x = torch.zeros(1, 1, 4, width, dtype=torch.float64)
    x[..., left:] = 1.0
    found = TotalVariation(weight, steps=3000, layout="nchw")(x, draws(1))[0, 0]
    low, high = weight / left, 1 - weight / (width - left)
    if low >= high:
        low = high = (width - left) / width
    expected = torch.tensor([low] * left + [high] * (width - left), dtype=torch.float64).expand(4, width)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)


def test_total_variation_drops_pixels_and_fills_them() -> None:
    """A single odd pixel has no say where it is dropped; the mean of what is kept stays."""
    x = torch.full((40, 1, 5, 5), 0.25, dtype=torch.float64)
    x[:, :, 2, 2] = 1.0
    stage = TotalVariation(0.02, keep=0.5, steps=400, layout="nchw")
    assert stage.random
    assert not TotalVariation(layout="nchw").random
    middle = stage(x, draws(40))[:, 0, 2, 2]
    dropped = middle < 0.3
    assert 8 <= int(dropped.sum()) <= 32  # of 40 with chance 1/2: 1 in 10,000 beyond
    torch.testing.assert_close(middle[dropped], torch.full_like(middle[dropped], 0.25), atol=0.03, rtol=0)
    assert bool((middle[~dropped] > 0.8).all())
    even = torch.full((2, 1, 5, 5), 0.7, dtype=torch.float64)
    torch.testing.assert_close(TotalVariation(layout="nchw")(even, draws(2)), even)


def test_thermometer_code() -> None:
    x = torch.tensor([[[0.55, 0.0], [0.25, 1.0]]], dtype=torch.float64)  # [1, 2 channels, 2]
    found = Thermometer(4)(x, draws(1))
    assert found.shape == (1, 8, 2)
    assert found[0, :4, 0].tolist() == [1, 1, 1, 0]  # levels begin at 0, 0.25, 0.5, 0.75
    assert found[0, :4, 1].tolist() == [0, 0, 0, 0]
    assert found[0, 4:, 0].tolist() == [1, 0, 0, 0]
    assert found[0, 4:, 1].tolist() == [1, 1, 1, 1]
    last = Thermometer(4, axis=2)(x, draws(1))
    assert last[0, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    with pytest.raises(DataError, match="axis"):
        Thermometer(4, axis=3)(x, draws(1))


def test_resize_pad_draws_a_size_and_a_place() -> None:
    """White images become white rectangles of at least the smallest size, of the same shape as the image."""
    x = torch.ones(300, 1, 10, 10, dtype=torch.float64)
    found = ResizePad(0.5, layout="nchw")(x, draws(300))[:, 0]
    sides = []
    for image in found:
        rows, columns = image.amax(1) > 0, image.amax(0) > 0
        torch.testing.assert_close(image, torch.outer(rows.double(), columns.double()))
        assert int(rows.sum()) == int(columns.sum())
        sides.append(int(rows.sum()))
    assert set(sides) == {5, 6, 7, 8, 9}
    assert ResizePad(layout="nchw").random


def test_gaussian_noise_is_not_clipped() -> None:
    x = torch.full((2, 20_000), 0.9, dtype=torch.float64)
    noise = GaussianNoise(0.3)(x, draws(2)) - x
    assert not torch.equal(noise[0], noise[1])
    assert float(noise.mean()) == pytest.approx(0, abs=5 * 0.3 / 200)
    assert float(noise.std()) == pytest.approx(0.3, rel=0.03)
    assert float((x + noise).max()) > 1


@pytest.mark.parametrize("stage", IMAGE_STAGES, ids=name)
def test_layouts_agree_and_rows_stay_apart(stage: Stage) -> None:
    x = pictures()
    found = stage(x, draws(3))
    turned = type(stage)(**{**vars(stage), "layout": "nhwc"})
    torch.testing.assert_close(turned(x.permute(0, 2, 3, 1), draws(3)).permute(0, 3, 1, 2), found)
    alone = stage(x[:1], draws(1))
    torch.testing.assert_close(found[:1], alone)
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    with pytest.raises(ConfigError, match="layout"):
        type(stage)()
    with pytest.raises(DataError, match="four axes"):
        stage(x.flatten(1), draws(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: BitDepth(0), lambda: BitDepth(bounds=(1.0, 0.0)), lambda: MedianFilter(0, layout="nchw"),
        lambda: JPEG(101, layout="nchw"), lambda: TotalVariation(0.0, layout="nchw"), lambda: Thermometer(1),
        lambda: TotalVariation(keep=0.0, layout="nchw"), lambda: ResizePad(1.0, layout="nchw"),
        lambda: GaussianNoise(-1.0), lambda: Rounded(-1), lambda: OutputNoise(-1.0),
        lambda: ReverseSigmoid(beta=2.0), lambda: ReverseSigmoid(gamma=0.0),
        lambda: Defended(affine(), "stage"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


# --- a model behind them ----------------------------------------------------------------------------


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(leaf)[:, 0].sum(), leaf)
    return found


def test_identity_surrogate() -> None:
    """The forward pass is the stage's to the last bit; the gradient is the model's where the stage put x."""
    x = pictures(3, 1, (6, 6))
    model, stage = small(), BitDepth(2)
    defended = Defended(model, stage).eval()
    squeezed = stage(x, draws(3))
    assert torch.equal(defended(x), model(squeezed))
    assert torch.equal(defended(x.clone().requires_grad_()), model(squeezed))
    assert torch.equal(gradient(defended, x), gradient(model, squeezed))


def test_other_surrogates() -> None:
    x = torch.tensor([[0.55, 0.1]], dtype=torch.float64)
    model = affine(3, 8)
    row = model.linear.weight[0].detach()
    # Athalye et al.: the gradient of min(max(x − k/4, 0), 1) is 1 where x is above k/4.
    expected = torch.stack([row[:3].sum(), row[4]])[None]
    torch.testing.assert_close(gradient(Defended(model, Thermometer(4)), x), expected)
    plain = affine(3, 2)
    flat = Defended(plain, BitDepth(1, surrogate=lambda given: 3 * given))
    torch.testing.assert_close(gradient(flat, x), 3 * plain.linear.weight[:1].detach())
    with pytest.raises(ConfigError, match="surrogate"):
        gradient(Defended(model, Thermometer(4, surrogate=lambda given: given)), x)


def test_without_surrogates_there_is_no_gradient() -> None:
    x = images(4)
    model = Defended(small(), BitDepth(3))
    bare = Defended(small(), BitDepth(3), bpda=False)
    assert has_gradient(as_model(model), x)
    assert not has_gradient(as_model(bare), x)
    assert torch.equal(model.eval()(x), bare.eval()(x))
    assert (model.note, bare.note) == ("BPDA through BitDepth", "no gradient through BitDepth")


def test_attacks_go_through_a_staircase() -> None:
    """On an affine model behind fine steps FGM by BPDA breaks what it breaks without them."""
    draw = torch.Generator().manual_seed(0)
    model, x = affine(4, 10), torch.rand(40, 10, dtype=torch.float64, generator=draw)
    defended = Defended(model, BitDepth(12))
    y = model(x).argmax(1)
    plain, found = (
        FGM(loss="margin").run(each, x, Untargeted(y), eps=0.1, rng=0).counts.broken
        for each in (model, defended)
    )
    assert found == pytest.approx(plain, abs=1)
    assert plain > 5


def test_random_stages_under_attack() -> None:
    """Passes differ, an attack gives the same bits each time, and puts the count of passes back."""
    x, y = images(6), torch.zeros(6, dtype=torch.int64)
    stages = GaussianNoise(0.2), ResizePad(0.6, layout="nchw")
    model, again, other = (Defended(small(), *stages, seed=seed).eval() for seed in (3, 3, 4))
    assert (model.differentiable, model.random) == (True, True)
    assert model.note == "EOT over GaussianNoise, ResizePad"
    state = torch.get_rng_state()
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    assert torch.equal(again(x), first)
    assert not torch.equal(other(x), first)
    assert "calls" not in model.state_dict()
    attack = with_eot(PGD(steps=3), 4)
    assert attack == PGD(steps=3, eot=4)
    before = int(model.get_buffer("calls"))
    results = [attack.run(model, x, Untargeted(y), eps=0.1, rng=7) for _ in range(2)]
    assert int(model.get_buffer("calls")) == before
    assert torch.equal(results[0].x_adv, results[1].x_adv)
    assert torch.equal(torch.get_rng_state(), state)


def test_attacks_are_adapted() -> None:
    plain, steps, noisy = small(), Defended(small(), BitDepth(3)), Defended(small(), GaussianNoise(0.1))
    inner = with_normalisation(noisy, [0.5], [0.2])
    attack = PGD(steps=3)
    assert adapted(attack, plain) == (attack, "")
    assert adapted(attack, steps) == (attack, "BPDA through BitDepth")
    for model in (noisy, as_model(noisy), inner, as_model(inner)):
        assert defences_of(model) == (noisy,)
        assert adapted(attack, model, 7) == (PGD(steps=3, eot=7), "EOT over GaussianNoise")
    assert with_eot(PGD(eot=30)) == PGD(eot=30)
    assert with_eot(AutoAttack()) == AutoAttack("rand")
    assert with_eot(Square()) == Square()
    assert "labels" in adapted(attack, Obfuscated(plain, Rounded(2)))[1]
    with pytest.raises(ConfigError):
        with_eot(attack, 0)


def test_eot_averages_gradients() -> None:
    """Behind noise of mean 0 the mean gradient of a quadratic is that at the input, within its error."""
    passes, rows, x = 20, 200, torch.tensor([[0.3, 0.6]], dtype=torch.float64)  # equal rows draw apart

    class Square2(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return torch.stack([z.square().sum(1), torch.zeros(len(z), dtype=z.dtype)], 1)

    model = Defended(Square2(), GaussianNoise(0.5))
    found = torch.cat([gradient(model, x.expand(rows, 2)) for _ in range(passes)])
    error = 2 * 0.5 / (passes * rows) ** 0.5
    torch.testing.assert_close(found.mean(0, keepdim=True), 2 * x, atol=5 * error, rtol=0)


@dataclass(frozen=True)
class Doubled(Stage):
    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        return 2 * x


def test_stages_in_order() -> None:
    x = torch.tensor([[0.3, 0.4]])
    model = affine(2, 2).float()
    there, back = Defended(model, Doubled(), BitDepth(1)), Defended(model, BitDepth(1), Doubled())
    torch.testing.assert_close(there(x), model(torch.ones(1, 2)))
    torch.testing.assert_close(back(x), model(torch.zeros(1, 2)))


def test_through_needs_no_gradient_to_run() -> None:
    x = torch.tensor([0.2, 0.7])
    assert torch.equal(through(torch.round, x), x.round())
    leaf = x.clone().requires_grad_()
    found = through(torch.round, leaf, torch.sin)
    assert torch.equal(found, x.round())
    found.sum().backward()
    assert torch.equal(leaf.grad, x.cos())  # type: ignore[arg-type]


# --- outputs ----------------------------------------------------------------------------------------


def test_labels_only_offers_labels() -> None:
    model, x = affine(4, 10), torch.rand(5, 10, dtype=torch.float64)
    hidden = Obfuscated(model, LabelsOnly())
    assert torch.equal(hidden(x), model(x).argmax(1))
    assert hidden.offers == {"label"}
    assert hidden.quotable == {"label"}
    for attack in (PGD(), Square()):
        with pytest.raises(ConfigError, match="needs a"):
            attack.run(hidden, x, Untargeted(hidden(x)), eps=0.1)


def test_output_transforms_say_less() -> None:
    model, x = affine(4, 10), torch.rand(5, 10, dtype=torch.float64)
    p = model(x).softmax(1).detach()
    rounded = Obfuscated(model, Rounded(1))
    torch.testing.assert_close(rounded(x).exp(), torch.from_numpy(p.numpy().round(1)))
    assert rounded.offers == {"score", "label"}
    assert torch.equal(rounded.labels(x), rounded(x).argmax(1))
    assert rounded.labels.offers == {"label"}
    with pytest.raises(ConfigError, match="needs a gradient"):
        PGD().run(rounded, x, Untargeted(p.argmax(1)), eps=0.1)

    turned = Obfuscated(model, ReverseSigmoid(0.7, 0.2))(x).exp().numpy()
    raw = p.numpy() - 0.7 * (special.expit(0.2 * special.logit(p.numpy())) - 0.5)
    np.testing.assert_allclose(turned, raw / raw.sum(1, keepdims=True), rtol=1e-9)
    sure = ReverseSigmoid(1.0, 5.0)(torch.tensor([[1.0, 0.0, 0.0]]), draws(1))
    torch.testing.assert_close(sure, torch.tensor([[0.5, 0.5, 0.5]]) / 1.5)

    noisy = Obfuscated(model, OutputNoise(0.1), seed=1)
    with noisy.quiet():
        first, second = noisy(x), noisy(x)
    assert not torch.equal(first, second)
    assert torch.equal(noisy(x), first)
    torch.testing.assert_close(first.exp().sum(1), torch.ones(5, dtype=torch.float64))
