"""Accuracy under corruptions on a model whose answers are known, and folders in the layout of CIFAR-10-C."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks.intervals import wilson
from mycelia.attacks.transforms import (
    SEVERITIES,
    CorruptionReport,
    Score,
    corruption_report,
    corruptions_in,
    folder_report,
    gaussian_ladder,
    read_corrupted,
)
from mycelia.engine.errors import ConfigError, DataError


class Bright(nn.Module):
    """Class 1 where the mean is above a half."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.flatten(1).mean(1)
        return torch.stack([torch.full_like(mean, 0.5), mean], 1)


def flat(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None, None].expand(-1, 1, 6, 6).contiguous()


def test_accuracies_are_those_that_brightness_leaves() -> None:
    """0.3 turns bright when more than 0.2 is added, 0.45 when more than 0.05 is, 0.8 never dark."""
    x, y = flat(0.3, 0.45, 0.8, 0.8), torch.tensor([0, 0, 1, 0])  # the last one is wrong from the start
    report = corruption_report(Bright(), x, y, layout="nchw", corruptions=["brightness", "contrast"], batch=3)
    right = [1 + (added <= 0.2) + (added <= 0.05) for added in SEVERITIES["brightness"]]
    assert [score.right for score in report.scores["brightness"].values()] == right
    assert [score.right for score in report.scores["contrast"].values()] == [3] * 5  # even images stay
    assert report.clean == Score(3, 4)
    assert report.accuracy("brightness") == pytest.approx(sum(right) / 20)
    assert report.mean == pytest.approx((sum(right) / 20 + 0.75) / 2)
    assert report.relative == pytest.approx(report.mean / 0.75)
    found = report.to_json()
    assert found["each"][0] == {
        "corruption": "brightness", "severity": 1, "n": 4, "accuracy": right[0] / 4,
        "accuracy_ci95": list(wilson(right[0], 4)),
    }  # fmt: skip
    assert found["mean_accuracy"] == report.mean
    assert "brightness" in report.text()
    assert f"mean over corruptions {report.mean:.3f}" in report.text()


def test_what_is_not_known_is_none_with_a_reason() -> None:
    scores = {"fog": {1: Score(1, 2)}}
    assert CorruptionReport(scores).relative is None
    assert CorruptionReport(scores).to_json()["relative_reason"] == "clean accuracy was not measured"
    assert CorruptionReport(scores).to_json()["clean_accuracy_reason"] == "clean accuracy was not measured"
    assert CorruptionReport(scores, Score(0, 2)).to_json()["relative_reason"] == "clean accuracy is 0"
    assert CorruptionReport({"fog": {1: Score(0, 2)}}, Score(1, 2)).relative == 0.0


def test_batches_and_seed() -> None:
    x = torch.rand(9, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x.mean((1, 2, 3)) > 0.5).long()
    names = ["gaussian_noise", "shot_noise", "fog"]
    first = corruption_report(Bright(), x, y, layout="nchw", corruptions=names, rng=5)
    again = corruption_report(Bright(), x, y, layout="nchw", corruptions=names, rng=5, batch=2)
    assert first == again
    assert first.clean == Score(9, 9)


def test_the_model_is_as_before() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), Bright()).double().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    corruption_report(model, flat(0.3, 0.8), torch.tensor([0, 1]), layout="nchw", corruptions=["fog"])
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_ladder_of_noise() -> None:
    x, y = flat(*[0.45] * 200), torch.zeros(200, dtype=torch.int64)
    x = x + torch.arange(200)[:, None, None, None] * 1e-6  # rows of their own
    found = gaussian_ladder(Bright(), x, y, layout="nchw", sigmas=[0.3, 0.05])
    assert list(found) == [0.05, 0.3]
    assert found[0.05].accuracy == 1.0  # the mean of 36 would have to move by six of its deviations
    # Clipped to [0, 1] the mean of 0.45 + 0.3 z is near 0.462, its deviation 0.26 / 6: P(< 0.5) is 0.81.
    assert found[0.3].accuracy == pytest.approx(0.81, abs=0.1)


def test_nothing_to_measure_is_refused() -> None:
    x, y = flat(0.3), torch.tensor([0])
    with pytest.raises(ConfigError, match="no corruption"):
        corruption_report(Bright(), x, y, layout="nchw", corruptions=[])
    with pytest.raises(DataError, match="0 images"):
        corruption_report(Bright(), x[:0], y[:0], layout="nchw")
    with pytest.raises(DataError, match="1 images"):
        corruption_report(Bright(), x, torch.tensor([0, 1]), layout="nchw")
    with pytest.raises(ConfigError, match="rust"):
        corruption_report(Bright(), x, y, layout="nchw", corruptions=["rust"])


def folder(path: Path, *, labels_once: bool = False) -> Path:
    """Two corruptions of three images: the value of an image is 50 · severity, plus its number."""
    values = np.array(
        [[50 * level + row for row in range(3)] for level in range(1, 6)], dtype=np.uint8
    ).ravel()
    images = np.broadcast_to(values[:, None, None, None], (15, 4, 5, 3)).copy()
    images[..., 2] = 7
    np.save(path / "fog.npy", images)
    np.save(path / "rust.npy", 255 - images)
    np.save(path / "labels.npy", np.array([0, 1, 0] * (1 if labels_once else 5)))
    return path


@pytest.mark.parametrize("once", [True, False])
def test_folders_are_read(tmp_path: Path, once: bool) -> None:
    place = folder(tmp_path, labels_once=once)
    assert corruptions_in(place) == ("fog", "rust")
    x, y = read_corrupted(place, "fog", 3)
    assert (x.shape, x.dtype) == ((3, 3, 4, 5), torch.float32)
    assert torch.allclose(x[:, 0, 0, 0] * 255, torch.tensor([150.0, 151.0, 152.0]))
    assert torch.allclose(x[:, 2, 1, 1] * 255, torch.tensor(7.0))
    assert y.tolist() == [0, 1, 0]
    last, _ = read_corrupted(place, "fog", 3, "nhwc", limit=2)
    assert torch.equal(last, x[:2].movedim(1, -1))


def test_a_folder_gives_a_report(tmp_path: Path) -> None:
    """The mean of an image is (2 v + 7) / 3: above 127.5 from v = 188 on, so at severities 4 and 5."""
    place = folder(tmp_path)
    clean = flat(0.1, 0.9), torch.tensor([0, 1])
    report = folder_report(Bright(), place, layout="nchw", clean=clean)
    assert list(report.scores) == ["fog", "rust"]
    assert [score.right for score in report.scores["fog"].values()] == [2, 2, 2, 1, 1]
    assert report.relative == report.mean
    assert folder_report(Bright(), place, layout="nchw", limit=1).relative is None


def test_folders_that_are_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no corruptions"):
        folder_report(Bright(), tmp_path / "none", layout="nchw")
    place = folder(tmp_path)
    with pytest.raises(ConfigError, match="there are: fog, rust"):
        read_corrupted(place, "snow", 1)
    with pytest.raises(ConfigError, match="layout"):
        read_corrupted(place, "fog", 1, "hwc")  # type: ignore[arg-type]
    for severity in (0, 6):
        with pytest.raises(ConfigError, match="severity"):
            read_corrupted(place, "fog", severity)
    np.save(place / "fog.npy", np.zeros((15, 4, 5, 3)))
    with pytest.raises(DataError, match="uint8"):
        read_corrupted(place, "fog", 1)
    np.save(place / "labels.npy", np.zeros(4, dtype=int))
    with pytest.raises(DataError, match="labels"):
        read_corrupted(place, "rust", 1)
    (place / "labels.npy").unlink()
    with pytest.raises(DataError, match="no such file"):
        read_corrupted(place, "rust", 1)
    (place / "rust.npy").write_bytes(b"not an array")
    with pytest.raises(DataError, match="not an array"):
        read_corrupted(place, "rust", 1)
