"""Hugging Face datasets on disk."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mycelia.engine.data import load
from mycelia.engine.errors import DataError

datasets = pytest.importorskip("datasets", reason="extra hf")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


def test_one_dataset_with_a_filter(tmp_path: Path) -> None:
    rows = {"x": [float(i) for i in range(40)], "label": [i % 2 for i in range(40)], "user": ["u"] * 40}
    whole = datasets.Dataset.from_dict(rows).select(range(0, 40, 3))
    whole.save_to_disk(tmp_path)
    data = load(f"hf:{tmp_path}", client="user")
    found = np.concatenate([data.train.inputs, data.test.inputs])[:, 0]
    assert sorted(found.tolist()) == [float(i) for i in range(0, 40, 3)]
    assert data.train.clients is not None
    assert (data.classes, set(data.train.clients.tolist())) == (2, {"u"})


@pytest.mark.parametrize("split", ["test", "validation"])
def test_splits_with_images_and_class_names(tmp_path: Path, split: str) -> None:
    features = datasets.Features(
        {"image": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog", "owl"])}
    )
    rows = {"image": [Image.new("L", (4, 3), 51 * i) for i in range(2)] * 3, "kind": [0, 1] * 3}
    parts = {name: datasets.Dataset.from_dict(rows, features=features) for name in ("train", split)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path)
    data = load(f"hf:{tmp_path}")
    assert (len(data.train), len(data.test), data.input_shape) == (6, 6, (1, 3, 4))
    assert (data.classes, data.class_names) == (3, ("cat", "dog", "owl"))
    np.testing.assert_allclose(data.train.inputs[:, 0, 0, 0], data.train.targets * 0.2)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        load(f"hf:{tmp_path / 'absent'}")
    with pytest.raises(DataError, match="save_to_disk"):
        load(f"hf:{tmp_path}")
    datasets.DatasetDict({"dev": datasets.Dataset.from_dict({"x": [1], "label": [0]})}).save_to_disk(
        tmp_path / "a"
    )
    with pytest.raises(DataError, match="has splits dev"):
        load(f"hf:{tmp_path / 'a'}")
