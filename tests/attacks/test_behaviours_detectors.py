"""Behaviours of detectors and of what is measured about them that have names of their own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mycelia.attacks.detectors import Ensemble, ErrorBased, RegionBased, SpatialSmoothing, threshold_at
from mycelia.attacks.ssim import ssim
from tests.attacks.worlds import images, small


def test_ensemble_detector_all_rows() -> None:
    """A verdict concerns every row, and is that of all members on it."""

    def coordinate(place: int) -> ErrorBased:
        def others(x: Tensor) -> Tensor:
            return torch.where(torch.arange(3) == place, 0.0, x)

        return ErrorBased(others)

    # Every combination of three members, in an order in which neither the first row nor the first member
    # speaks for the others.
    rows = torch.tensor([[a, b, c] for c in (9.0, 0.0) for a in (0.0, 9.0) for b in (9.0, 0.0)])
    table = rows > 0
    benign = torch.rand(100, 3, generator=torch.Generator().manual_seed(0))
    for rule, wanted in (("any", table.any(1)), ("all", table.all(1)), ("vote", table.sum(1) >= 2)):
        detector = Ensemble((coordinate(0), coordinate(1), coordinate(2)), rule).fit(benign, 0.05)  # type: ignore[arg-type]
        assert torch.equal(detector.votes(rows), table.T)
        assert torch.equal(detector.flag(rows), wanted)
        assert torch.equal(detector.score(rows) > detector.limit, wanted)


def test_threshold_respects_fpr() -> None:
    """The smallest threshold that at most ⌊fpr·n⌋ of the calibration scores exceed, ties included."""
    draw = torch.Generator().manual_seed(0)
    for n in (7, 20, 100):
        for values in (3, 1000):  # few values: many ties
            scores = torch.randint(values, (n,), generator=draw).double()
            for share in range(1, 100):
                if share * n < 100:
                    with pytest.warns(RuntimeWarning, match=f"{1 / n:g}"):
                        found = threshold_at(scores, share / 100)
                else:
                    found = threshold_at(scores, share / 100)
                limit = share * n // 100
                enough = [t for t in scores.tolist() if int((scores > t).sum()) <= limit]
                assert found == min(enough)
                assert int((scores > math.nextafter(found, -math.inf)).sum()) > limit


def test_spatial_smoothing_row_local() -> None:
    """Neighbouring rows and channels leave a row's median, and so its score, alone."""
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return torch.stack([x[:, 0].mean((1, 2)), x[:, 1].mean((1, 2))], 1)

    x = torch.rand(4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    detector = SpatialSmoothing(model, 3, layout="nchw")
    whole = detector.score(x)
    assert torch.equal(torch.cat([detector.score(row[None]) for row in x]), whole)
    seen.clear()
    other = x.clone()
    other[:, 2] = 0.0
    detector.score(x)
    detector.score(other)
    assert torch.equal(seen[1][:, :2], seen[3][:, :2])
    assert not torch.equal(seen[1][:, 2], seen[3][:, 2])
    turned = SpatialSmoothing(lambda v: model(v.permute(0, 3, 1, 2)), 3, layout="nhwc")
    assert torch.equal(turned.score(x.permute(0, 2, 3, 1)), whole)


def test_region_noise_is_a_cube() -> None:
    """A draw of its own for each coordinate, row and point, uniform to both sides, inside the bounds."""
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return torch.tensor([1.0, 0.0]).expand(len(x), 2)

    m, radius = 500, 20.0
    x = torch.tensor([[[100.0, 100.0], [100.0, 250.0]], [[100.0, 100.0], [110.0, 0.0]]])[:, None]
    detector = RegionBased(model, radius, m, bounds=(0.0, 255.0))
    detector.score(x)
    cloud = torch.cat(seen[1:]).view(m, 2, 4)  # the first call is the input's own
    move = cloud - x.view(1, 2, 4)
    assert float(cloud.min()) >= 0
    assert float(cloud.max()) <= 255
    assert float(move.abs().max()) <= radius
    assert float((cloud[:, 0, 3] == 255).double().mean()) == pytest.approx(0.375, abs=0.09)  # 15 of 40 units
    assert float((cloud[:, 1, 3] == 0).double().mean()) == pytest.approx(0.5, abs=0.09)
    free = move[:, :, :3].flatten(1)
    assert torch.allclose(free.mean(0), torch.zeros(6), atol=4 * radius / math.sqrt(3 * m))
    assert torch.allclose(free.std(0), torch.full((6,), radius / math.sqrt(3)), rtol=0.1)
    related = torch.corrcoef(free.T) - torch.eye(6)
    assert float(related.abs().max()) < 4.5 / math.sqrt(m)
    again = RegionBased(small(), 0.2, 10)
    pictures = images(6)
    assert torch.equal(again.score(pictures)[2:], again.score(pictures[2:]))


def test_ssim_range() -> None:
    """The same pictures in other units are as alike; a range that is not theirs gives another number."""
    x = images(3)
    y = (x + 0.1 * images(3, seed=5)).clamp(0, 1)
    here = ssim(x, y, 1.0, "nchw")
    assert torch.allclose(ssim(255 * x, 255 * y, 255.0, "nchw"), here, rtol=1e-9)
    assert torch.allclose(ssim(2 * x, 2 * y, 2.0, "nchw"), here, rtol=1e-9)
    flat = torch.ones(1, 1, 8, 8, dtype=torch.float64)
    dim, dimmer = 0.2 * flat, 0.1 * flat  # (2ab + c) / (a² + b² + c) with c = (range / 100)²
    assert float(ssim(dim, dimmer, 1.0, "nchw")) == pytest.approx(0.0401 / 0.0501, rel=1e-12)
    assert float(ssim(dim, dimmer, 10.0, "nchw")) == pytest.approx(0.05 / 0.06, rel=1e-12)
