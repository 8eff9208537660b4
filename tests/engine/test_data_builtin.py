"""Built-in data sets: known sizes and contents, and where they are looked for."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from sklearn import datasets

from mycelia.engine.data import BUILTIN, load
from mycelia.engine.errors import ConfigError, DataError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
needs_fashion = pytest.mark.skipif(not DEBIAN.exists(), reason="apt-get install dataset-fashion-mnist")


def test_digits_are_those_of_scikit_learn() -> None:
    data, bunch = load("digits"), datasets.load_digits()
    assert (data.classes, data.input_shape, len(data.train) + len(data.test)) == (10, (1, 8, 8), 1797)
    assert data.train.inputs.dtype == np.float32
    assert (data.train.inputs.min(), data.train.inputs.max()) == (0, 1)
    found = sorted(
        (int(label), (image * 16).tobytes())
        for part in (data.train, data.test)
        for image, label in zip(part.inputs, part.targets, strict=True)
    )
    expected = (image.astype(np.float32).tobytes() for image in bunch.images)
    assert found == sorted(zip(bunch.target.tolist(), expected, strict=True))


def test_digits_without_the_file_come_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load("digits").sha256
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert load("digits").sha256 == expected


def test_the_split_is_a_stratified_fifth() -> None:
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1438, 359)
    train, test = np.bincount(data.train.targets), np.bincount(data.test.targets)
    assert np.abs(test - (train + test) / 5).max() <= 1


@pytest.mark.parametrize(
    ("name", "rows", "features", "classes"),
    [("breast-cancer", 569, 30, 2), ("wine", 178, 13, 3), ("diabetes", 442, 10, None)],
)
def test_tables_of_scikit_learn(name: str, rows: int, features: int, classes: int | None) -> None:
    data = load(name)
    assert (len(data.train) + len(data.test), data.input_shape, data.classes) == (rows, (features,), classes)
    np.testing.assert_allclose(data.train.inputs.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(data.train.inputs.std(0), 1, rtol=1e-5)
    raw = load(name, standardised=False)
    bunch = getattr(datasets, f"load_{name.replace('-', '_')}")()
    together = np.concatenate([raw.train.inputs, raw.test.inputs])
    np.testing.assert_allclose(np.sort(together, axis=0), np.sort(bunch.data, axis=0), rtol=1e-6)


def test_class_names_and_a_standardised_regression_target() -> None:
    assert load("breast-cancer").class_names == ("malignant", "benign")
    assert load("diabetes").train.targets.std() == pytest.approx(1, rel=1e-5)


@needs_fashion
def test_fashion_mnist_is_whole() -> None:
    data = load("fashion-mnist")
    assert (data.train.inputs.shape, data.test.inputs.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert (data.train.inputs.dtype, data.train.targets.dtype) == (np.float32, np.int64)
    assert (np.bincount(data.train.targets) == 6000).all()
    assert (np.bincount(data.test.targets) == 1000).all()
    # Mean and deviation of the training pixels as published with the set.
    assert data.train.inputs.mean(dtype=np.float64) == pytest.approx(0.2860, abs=1e-4)
    assert data.train.inputs.std(dtype=np.float64) == pytest.approx(0.3530, abs=1e-4)


@needs_fashion
@pytest.mark.parametrize("layout", ["", "fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnist_is_looked_for_in_the_folder_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    (tmp_path / layout).mkdir(parents=True, exist_ok=True)
    for file in DEBIAN.iterdir():
        shutil.copy(file, tmp_path / layout)
    broken = tmp_path / layout / "train-labels-idx1-ubyte.gz"
    broken.write_bytes(broken.read_bytes()[:1000])
    monkeypatch.setenv("MYCELIA_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"{broken}: broken gzip"):  # so that is where it was read
        load("fashion-mnist")


def test_a_missing_set_says_where_it_looked_and_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mycelia.engine.data.builtin._DEBIAN", tmp_path / "debian")
    monkeypatch.setenv("MYCELIA_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist") as caught:
        load("fashion-mnist")
    for place in ("own", "own/fashion-mnist", "debian/fashion-mnist", "home/data/FashionMNIST/raw"):
        assert str(tmp_path / place) in str(caught.value)


def test_another_set_under_the_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, labels = b"\0\0\x08\x03" + b"\0\0\0\x02" * 3, b"\0\0\x08\x01\0\0\0\x02\0\x01"
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(header + bytes(8))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    monkeypatch.setenv("MYCELIA_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"has images of shape \(2, 2\)"):
        load("fashion-mnist")


def test_synthetic_has_clients_that_differ() -> None:
    data = load("synthetic", clients=8, examples_per_client=200)
    assert (data.classes, data.input_shape, len(data.train) + len(data.test)) == (10, (60,), 1600)
    assert data.train.clients is not None
    assert data.test.clients is not None
    assert set(data.train.clients.tolist()) | set(data.test.clients.tolist()) == set(range(8))
    assert data.sha256 == load("synthetic", clients=8, examples_per_client=200).sha256
    assert data.sha256 != load("synthetic", clients=8, examples_per_client=200, seed=1).sha256


def test_synthetic_follows_its_definition() -> None:
    # With β = 0 a client's input means are N(0, 1) each; about them the variance of input j is j**-1.2.
    data = load("synthetic", beta=0.0, clients=2, examples_per_client=4000)
    assert data.train.clients is not None
    for client in range(2):
        x = data.train.inputs[data.train.clients == client]
        np.testing.assert_allclose(x.var(0), np.arange(1, 61) ** -1.2, rtol=0.15)
        assert abs(x.mean(0)).max() < 5
    sizes = np.bincount(load("synthetic", clients=200, features=1).train.clients)  # type: ignore[arg-type]
    assert sizes.min() >= 30  # four fifths, about, of at least 50
    assert np.median(sizes) == pytest.approx(0.8 * (50 + np.exp(4)), rel=0.4)


@pytest.mark.parametrize("options", [{"clients": 0}, {"alpha": -1.0}, {"beta": np.inf}, {"classes": 2.5}])
def test_synthetic_refuses_what_makes_no_set(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        load("synthetic", **options)


@pytest.mark.parametrize("name", BUILTIN)
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no option is called 'clases'"):
        load(name, clases=3)
