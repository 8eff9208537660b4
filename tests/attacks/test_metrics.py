"""Each number against its formula, another library or a slow reference."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from mycelia.attacks import PGD, AttackResult, CarliniWagner, Status, Targeted, Untargeted
from mycelia.attacks.divergence import jensen_shannon
from mycelia.attacks.filters import blurred, jpeg
from mycelia.attacks.intervals import wilson
from mycelia.attacks.metrics import (
    attack_metrics,
    defence_metrics,
    neuron_sensitivity,
    perturbation_sensitivity,
    query_metrics,
)
from mycelia.attacks.norms import NORMS, norm
from mycelia.attacks.ssim import ssim
from mycelia.attacks.windows import around, bordered
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.worlds import images, small

B, H, F, W = Status.BROKEN, Status.HELD, Status.FAILED, Status.CLEAN_WRONG


def result(x: Tensor, x_adv: Tensor, *status: Status, **more: Any) -> AttackResult:
    """What an attack said, by hand."""
    n = len(x)
    delta = x_adv.double() - x.double()
    fields: dict[str, Any] = {
        "x_adv": x_adv, "status": torch.tensor([int(each) for each in status], dtype=torch.int8),
        "reason": ("",) * n, "distance": {p: norm(delta, p) for p in NORMS}, "loss": torch.zeros(n),
        "queries": torch.arange(1, n + 1), "gradients": torch.full((n,), 2), "best_step": torch.zeros(n),
        "verified": torch.ones(n, dtype=torch.bool), "unreproduced": 0, "eps": 0.5, "attack": PGD(),
        "norm": "linf", "seed": 0, "seconds": 3.0,
    }  # fmt: skip
    return AttackResult(**(fields | more))


def probabilities(n: int, classes: int = 4, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(n, classes, dtype=torch.float64, generator=draw)).softmax(1)


# --- images -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("twice", "mode"), [(True, "symmetric"), (False, "reflect")])
def test_borders_are_numpys(twice: bool, mode: str) -> None:
    for h, w in ((5, 4), (2, 3), (1, 1), (1, 4)):
        x = torch.arange(float(h * w)).view(1, 1, h, w)
        wanted = np.pad(x.numpy(), ((0, 0), (0, 0), (3, 2), (3, 2)), mode=mode)  # type: ignore[call-overload]
        assert torch.equal(bordered(x, 3, 2, twice=twice), torch.from_numpy(wanted))
    x = images(2)
    assert around(x, 3, twice=twice).shape == (2, 1, 6, 6, 9)
    assert torch.equal(around(x, 3, twice=twice)[..., 4], x)


def slow_ssim(x: np.ndarray, y: np.ndarray, span: float, window: int) -> float:
    """One channel, pixel by pixel: equation 13 with unbiased moments, mean over windows inside the image."""
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    found = []
    for i in range(x.shape[0] - window + 1):
        for j in range(x.shape[1] - window + 1):
            a, b = (each[i : i + window, j : j + window].ravel() for each in (x, y))
            if window > 1:
                (vx, cov), (_, vy) = np.cov(a, b)
            else:
                vx = vy = cov = 0.0
            top = (2 * a.mean() * b.mean() + c1) * (2 * cov + c2)
            found.append(top / ((a.mean() ** 2 + b.mean() ** 2 + c1) * (vx + vy + c2)))
    return float(np.mean(found))


@pytest.mark.parametrize(
    ("h", "w", "window"), [(9, 11, 7), (7, 7, 7), (6, 9, 5), (2, 5, 1), (1, 1, 1), (4, 4, 3)]
)
def test_ssim_is_the_formula(h: int, w: int, window: int) -> None:
    draw = np.random.default_rng(0)
    x = 0.4 + 0.05 * draw.random((3, 2, h, w))
    y = x + 0.02 * draw.normal(size=x.shape)
    wanted = [
        np.mean([slow_ssim(a, b, 1.0, window) for a, b in zip(*pair, strict=True)])
        for pair in zip(x, y, strict=True)
    ]
    found = ssim(torch.from_numpy(x), torch.from_numpy(y), 1.0, "nchw")
    assert found.tolist() == pytest.approx(wanted, rel=1e-10)
    turned = [torch.from_numpy(each).permute(0, 2, 3, 1) for each in (x, y)]
    assert torch.equal(ssim(turned[0], turned[1], 1.0, "nhwc"), found)


def test_ssim_laws() -> None:
    x, y = images(4), images(4, seed=9)
    assert ssim(x, x, 1.0, "nchw").tolist() == [1.0] * 4
    assert torch.allclose(ssim(x, y, 1.0, "nchw"), ssim(y, x, 1.0, "nchw"))
    assert bool((ssim(x, y, 1.0, "nchw").abs() <= 1).all())
    assert bool((ssim(x, 1 - x, 1.0, "nchw") < 0).all())
    bright, other = 1e6 + x, 1e6 + x + 0.1 * (y - 0.5)  # squares are 10¹³ times the variances
    wanted = [
        slow_ssim(*pair, 1.0, 5) for pair in zip(bright[:, 0].numpy(), other[:, 0].numpy(), strict=True)
    ]
    assert ssim(bright, other, 1.0, "nchw").tolist() == pytest.approx(wanted, rel=1e-6)
    assert ssim(x[:0], x[:0], 1.0, "nchw").shape == (0,)
    for span in (0.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="data range"):
            ssim(x, y, span, "nchw")
    with pytest.raises(DataError, match="one shape"):
        ssim(x, y[:2], 1.0, "nchw")


def test_blur_is_scipys() -> None:
    x = torch.rand(2, 3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for radius in (0.5, 1.3):
        wanted = ndimage.gaussian_filter(x.numpy(), (0, 0, radius, radius), mode="reflect", truncate=4.0)
        assert torch.allclose(blurred(x, radius, "nchw"), torch.from_numpy(wanted), atol=1e-12)
        other = blurred(x.permute(0, 2, 3, 1), radius, "nhwc").permute(0, 3, 1, 2)
        assert torch.equal(other, blurred(x, radius, "nchw"))


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_jpeg_is_pillows(channels: int) -> None:
    x = torch.rand(2, channels, 16, 24, generator=torch.Generator().manual_seed(0))
    found = jpeg(x, 75, "nchw")
    steps = np.rint(255 * x.numpy().astype(float)).astype(np.uint8)
    for row in range(2):
        parts = [steps[row].transpose(1, 2, 0)] if channels == 3 else list(steps[row])
        again = []
        for part in parts:
            file = io.BytesIO()
            Image.fromarray(part).save(file, format="JPEG", quality=75)
            again.append(np.asarray(Image.open(file)))
        wanted = again[0].transpose(2, 0, 1) if channels == 3 else np.stack(again)
        assert torch.allclose(found[row], torch.from_numpy(wanted.copy()).float() / 255)
    flat = torch.full((1, channels, 8, 8), 102 / 255)  # grey survives
    assert torch.allclose(jpeg(flat, 95, "nchw"), flat, atol=1.01 / 255)
    wide = jpeg(4 * x - 2, 75, "nchw", bounds=(-2.0, 2.0))
    assert torch.allclose(wide, 4 * found - 2, atol=1e-5)
    with pytest.raises(ConfigError, match="1 to 100"):
        jpeg(x, 0, "nchw")


def test_perturbation_sensitivity_is_its_sum() -> None:
    x = torch.rand(2, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x + 0.1 * torch.rand(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 0.05
    wide = np.pad(x.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
    wanted = np.zeros(2)
    for n, c, i, j in np.ndindex(*x.shape):
        busy = np.std(wide[n, c, i : i + 3, j : j + 3])
        wanted[n] += abs(float(y[n, c, i, j] - x[n, c, i, j])) * (1 - busy)
    found = perturbation_sensitivity(x, y, "nchw")
    assert found.tolist() == pytest.approx(wanted, rel=1e-9)
    grown = perturbation_sensitivity(255 * x, 255 * y, "nchw", data_range=255.0)
    assert torch.allclose(grown, 255 * found)
    flat = torch.zeros(1, 1, 4, 4)
    assert float(perturbation_sensitivity(flat, flat + 0.25, "nchw")[0]) == 4.0  # nothing hides it


# --- an attack --------------------------------------------------------------------------------------


def test_attack_metrics_by_hand() -> None:
    """Five rows of four coordinates: two broken, one held, one failed, one wrong before."""
    x = torch.tensor(
        [[0.3, 0.4, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5], [0.1] * 4, [0.1] * 4],
        dtype=torch.float64,
    )
    moved = x.clone()
    moved[0] += torch.tensor([0.06, 0.08, 0.0, 0.0])
    moved[1, 2] += 0.2
    moved[2] += 0.5  # held: it is in no mean
    p = torch.tensor(
        [[0.1, 0.7, 0.2], [0.3, 0.2, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]],
        dtype=torch.float64,
    )
    y = torch.tensor([0, 1, 0, 0, 0])
    found = attack_metrics(x, result(x, moved, B, B, H, F, W), p, p, y)
    assert (found.n, found.attacked, found.clean_correct, found.broken) == (5, 3, 4, 2)
    assert (found.mr, found.mr_ci95) == (2 / 3, wilson(2, 3))
    assert (found.success_rate, found.success_rate_ci95) == (2 / 4, wilson(2, 4))
    assert (found.robust_accuracy, found.robust_accuracy_ci95) == (1 / 5, wilson(1, 5))
    assert found.acac == pytest.approx((0.7 + 0.5) / 2)
    assert found.actc == pytest.approx((0.1 + 0.2) / 2)
    assert found.nte == pytest.approx((0.5 + 0.2) / 2)
    assert found.ald_l0 == pytest.approx((0.5 + 0.25) / 2)
    assert found.ald_l2 == pytest.approx((0.1 + 0.2) / 2)
    assert found.ald_linf == pytest.approx((0.08 + 0.2) / 2)
    assert found.ald_l0_rel == pytest.approx(2 / 2)  # the second row has no clean norm
    assert found.ald_l2_rel == pytest.approx(0.1 / 0.5)
    assert found.ald_linf_rel == pytest.approx(0.08 / 0.4)
    assert found.distance is not None
    assert found.distance[0] == "linf"
    assert found.distance[1:] == pytest.approx((0.11, 0.14, 0.17, 0.2))  # between 0.08 and 0.2
    assert (found.seconds, found.queries, found.gradients) == (0.6, 3.0, 2.0)
    assert [found.ass, found.psd, found.rgb, found.ric] == [None] * 4


def test_no_success_is_none_and_never_zero() -> None:
    x = images(3)
    p, y = probabilities(3), torch.zeros(3, dtype=torch.int64)
    found = attack_metrics(x, result(x, x, H, F, W), p, p, y, layout="nchw", model=small(), jpeg_quality=80)
    assert (found.broken, found.mr, found.success_rate) == (0, 0.0, 0.0)
    empty = {name for name, value in found._asdict().items() if value is None}
    assert empty == {
        "acac", "actc", "ald_l0", "ald_l2", "ald_linf", "ald_l0_rel", "ald_l2_rel", "ald_linf_rel", "ass",
        "psd", "nte", "rgb", "rgb_ci95", "ric", "ric_ci95", "distance",
    }  # fmt: skip
    none = attack_metrics(x[:0], result(x[:0], x[:0]), p[:0], p[:0], y[:0], layout="nchw", model=small())
    assert (none.n, none.broken, none.mr, none.robust_accuracy, none.seconds) == (0, 0, None, None, None)


def test_no_share_of_success_without_a_radius() -> None:
    x = images(6)
    model = small()
    y = model(x).argmax(1)
    smallest = CarliniWagner(steps=20).run(model, x, Untargeted(y))
    p, q = (model(each).detach().softmax(1) for each in (x, smallest.x_adv))
    found = attack_metrics(x, smallest, p, q, y)
    assert found.broken > 0
    assert (found.mr, found.success_rate, found.robust_accuracy, found.mr_ci95) == (None,) * 4
    assert found.distance is not None
    own = smallest.distance["l2"][smallest.is_(B)].numpy()
    assert found.distance[1:] == pytest.approx(np.quantile(own, [0.25, 0.5, 0.75, 1.0]))


def test_image_metrics_are_those_of_successes() -> None:
    x = 255 * images(8)
    moved = (x + 20 * (images(8, seed=4) - 0.5)).clamp(0, 255)
    y, p = torch.zeros(8, dtype=torch.int64), probabilities(8)

    def model(v: Tensor) -> Tensor:
        return torch.stack([torch.full_like(v[:, 0, 0, 0], 128.0), v[:, 0, 2, 2]], 1)

    status = [B, H, B, B, F, B, W, B]
    rows = [row for row, each in enumerate(status) if each == B]
    found = attack_metrics(
        x,
        result(x, moved, *status),
        p,
        p,
        y,
        bounds=(0.0, 255.0),
        layout="nchw",
        model=model,
        jpeg_quality=50,
    )
    assert found.ass == pytest.approx(float(ssim(x[rows], moved[rows], 255.0, "nchw").mean()))
    assert found.psd == pytest.approx(
        float(perturbation_sensitivity(x[rows], moved[rows], "nchw", data_range=255.0).mean())
    )
    smooth = ndimage.gaussian_filter(moved[rows].numpy(), (0, 0, 0.5, 0.5), mode="reflect", truncate=4.0)
    stays = int((np.rint(smooth)[:, 0, 2, 2] > 128).sum())
    assert 0 < stays < 5
    assert (found.rgb, found.rgb_ci95) == (stays / 5, wilson(stays, 5))
    packed = jpeg(moved[rows], 50, "nchw", bounds=(0.0, 255.0))
    assert found.ric == int((packed[:, 0, 2, 2] > 128).sum()) / 5
    target = Targeted(torch.ones(8, dtype=torch.int64), y)
    same = attack_metrics(
        x, result(x, moved, *status), p, p, y, bounds=(0.0, 255.0), layout="nchw", model=model, goal=target
    )
    assert (same.rgb, same.ric) == (found.rgb, None)
    turned = attack_metrics(
        x.permute(0, 2, 3, 1), result(x.permute(0, 2, 3, 1), moved.permute(0, 2, 3, 1), *status), p, p, y,
        bounds=(0.0, 255.0), layout="nhwc", model=lambda v: model(v.permute(0, 3, 1, 2)),
    )  # fmt: skip
    assert (turned.ass, turned.rgb) == (pytest.approx(found.ass), found.rgb)


def test_what_does_not_fit_is_refused() -> None:
    x, p, y = images(2), probabilities(2), torch.zeros(2, dtype=torch.int64)
    fine = result(x, x, H, H)
    for bad in (p[:1], p * 2, p.log(), p[:, :1]):
        with pytest.raises(DataError, match="probabilities"):
            attack_metrics(x, fine, p, bad, y)
        with pytest.raises(DataError, match="probabilities"):
            defence_metrics(bad, p, y)
    with pytest.raises(DataError, match="one for each"):
        attack_metrics(x, fine, p, p, y[:1])
    with pytest.raises(ConfigError, match="finite bounds"):
        attack_metrics(x, fine, p, p, y, bounds=(-math.inf, math.inf), layout="nchw")
    with pytest.raises(ConfigError, match="layout"):
        attack_metrics(x, fine, p, p, y, layout="hwc")  # type: ignore[arg-type]


# --- a defence --------------------------------------------------------------------------------------


def test_defence_metrics_by_hand() -> None:
    raw = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.3, 0.7], [0.8, 0.2]], dtype=torch.float64)
    mended = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.9, 0.1], [0.1, 0.9], [0.9, 0.1]], dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 0, 0])  # right: raw 0, 1, 4; mended 0, 2, 4
    found = defence_metrics(raw, mended, y)
    assert (found.n, found.accuracy_raw, found.accuracy_defended, found.cav) == (5, 0.6, 0.6, 0.0)
    assert (found.crr, found.csr, found.both) == (0.2, 0.2, 2)
    assert found.crr_ci95 == found.csr_ci95 == wilson(1, 5)
    assert found.ccv == pytest.approx((0.2 + 0.1) / 2)
    wanted = [jensenshannon(raw[row], mended[row]) ** 2 for row in (0, 4)]
    assert found.cos == pytest.approx(np.mean(wanted))
    none = defence_metrics(raw, 1 - raw, y)
    assert (none.both, none.ccv, none.cos) == (0, None, None)
    assert defence_metrics(raw[:0], raw[:0], y[:0]).cav is None


def test_defence_metrics_add_up() -> None:
    p, q = probabilities(200), probabilities(200, seed=1)
    y = torch.randint(4, (200,), generator=torch.Generator().manual_seed(2))
    found = defence_metrics(p, q, y)
    assert found.crr is not None
    assert found.csr is not None
    assert found.cav == pytest.approx(found.crr - found.csr)
    same = defence_metrics(p, p, y)
    assert (same.cav, same.crr, same.csr, same.ccv) == (0.0, 0.0, 0.0, 0.0)
    assert same.cos == pytest.approx(0.0, abs=1e-15)


def test_divergence_of_certain_predictions() -> None:
    certain = torch.eye(2, dtype=torch.float64)
    apart = jensen_shannon(certain.log(), certain.flip(0).log())
    assert apart.tolist() == pytest.approx([math.log(2)] * 2)
    assert jensen_shannon(certain.log(), certain.log()).tolist() == [0.0, 0.0]


# --- queries ----------------------------------------------------------------------------------------


def test_query_metrics_by_hand() -> None:
    x = torch.zeros(4, 2)
    raw = result(x, x, B, B, H, W, queries=torch.tensor([100, 200, 300, 1]))
    slow = result(x, x, B, H, H, W, queries=torch.tensor([400, 500, 600, 1]))
    flagged = torch.tensor([True, False, False, False])
    found = query_metrics(raw, slow, flagged, most=1000, seconds_raw=0.5, seconds_defended=0.75)
    assert (found.queries_raw, found.queries_defended, found.qcv) == (200.0, 500.0, 0.3)
    assert (found.success_raw, found.success_defended) == (2 / 3, 1 / 3)
    assert found.success_raw_ci95 == wilson(2, 3)
    assert found.asv == pytest.approx(1 / 3)
    assert (found.benign, found.fpr, found.fpr_ci95) == (4, 0.25, wilson(1, 4))
    assert found.qrv == 0.5
    assert query_metrics(raw, slow, flagged, most=100).qcv == 1.0  # no more than all
    assert query_metrics(slow, raw, flagged, most=1000).qcv == -0.3
    assert query_metrics(raw, slow, flagged, most=10).qrv is None
    wrong = replace(raw, status=torch.full((4,), int(W), dtype=torch.int8))
    none = query_metrics(wrong, slow, flagged[:0], most=10)
    assert (none.queries_raw, none.qcv, none.success_raw, none.asv) == (None,) * 4
    assert (none.benign, none.fpr) == (0, None)
    with pytest.raises(ConfigError):
        query_metrics(raw, slow, flagged, most=0)
    with pytest.raises(ConfigError):
        query_metrics(raw, slow, flagged, most=5, seconds_raw=0.0)
    with pytest.raises(DataError, match="bool"):
        query_metrics(raw, slow, torch.zeros(3), most=5)


# --- neurons ----------------------------------------------------------------------------------------


def test_neuron_sensitivity_is_a_mean_change() -> None:
    draw = torch.Generator().manual_seed(0)
    clean = {"conv": torch.rand(5, 3, 2, 4, generator=draw), "fc": torch.rand(5, 6, generator=draw)}
    moved = {name: value + torch.rand(value.shape, generator=draw) - 0.5 for name, value in clean.items()}
    found = neuron_sensitivity(clean, moved)
    for neuron in range(3):
        rows = [np.abs((moved["conv"] - clean["conv"])[row, neuron].numpy()).sum() / 8 for row in range(5)]
        assert float(found["conv"][neuron]) == pytest.approx(np.mean(rows), rel=1e-5)
    assert found["fc"].shape == (6,)
    assert torch.allclose(found["fc"], (moved["fc"] - clean["fc"]).double().abs().mean(0), atol=1e-6)
    assert not bool(neuron_sensitivity(clean, clean)["conv"].any())
    with pytest.raises(DataError, match="the same layers"):
        neuron_sensitivity(clean, {"fc": moved["fc"]})
    with pytest.raises(DataError, match="one shape"):
        neuron_sensitivity({"fc": clean["fc"]}, {"fc": moved["fc"][:2]})
