"""Data from files and from the user's own functions."""

import contextlib
import io
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import csv, feather, parquet
from torch.utils.data import TensorDataset

from mycelia.engine.data import Dataset, Examples, load
from mycelia.engine.errors import ConfigError, DataError

ROWS = 20
TABLE = pa.table(
    {
        "height": [i + 0.5 for i in range(ROWS)],
        "age": list(range(ROWS)),
        "label": ["cat" if i % 2 else "dog" for i in range(ROWS)],
        "user": [f"u{i % 3}" for i in range(ROWS)],
    }
)


def write(table: pa.Table, kind: str, path: Path) -> str:
    if kind == "csv":
        csv.write_csv(table, path)
    elif kind == "parquet":
        parquet.write_table(table, path)
    elif kind == "arrow":
        feather.write_feather(table, path, compression="uncompressed")
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    return f"{'arrow' if kind == 'stream' else kind}:{path}"


def both(data: Dataset, what: str) -> list[Any]:
    parts = [getattr(part, what) for part in (data.train, data.test)]
    return sorted(np.concatenate(parts).tolist())


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "stream"])
def test_tables(tmp_path: Path, kind: str) -> None:
    data = load(write(TABLE, kind, tmp_path / "file"), client="user")
    assert (len(data.train), len(data.test), data.classes) == (16, 4, 2)
    assert data.class_names == ("cat", "dog")
    assert both(data, "inputs") == [[i + 0.5, float(i)] for i in range(ROWS)]
    for part in (data.train, data.test):
        rows = part.inputs[:, 0].astype(int)
        assert part.targets.tolist() == [0 if i % 2 else 1 for i in rows]
        assert part.clients is not None
        assert part.clients.tolist() == [f"u{i % 3}" for i in rows]


def test_the_same_data_has_one_hash_whatever_the_file(tmp_path: Path) -> None:
    specs = [write(TABLE, kind, tmp_path / kind) for kind in ("csv", "parquet", "arrow", "stream")]
    assert len({load(spec, client="user").sha256 for spec in specs}) == 1


def test_columns_by_name_and_a_test_file(tmp_path: Path) -> None:
    spec = write(TABLE, "csv", tmp_path / "a.csv")
    write(TABLE.slice(0, 3), "csv", tmp_path / "b.csv")
    data = load(spec, target="height", inputs=["age"], test=str(tmp_path / "b.csv"))
    assert (data.classes, len(data.train), len(data.test)) == (None, ROWS, 3)
    assert data.test.inputs.tolist() == [[0], [1], [2]]
    scaled = load(spec, target="height", inputs="age", standardised=True)
    assert scaled.train.inputs.std() == pytest.approx(1, rel=1e-6)


def test_integer_targets_are_classes_unless_told_otherwise(tmp_path: Path) -> None:
    spec = write(pa.table({"x": [1.0] * 10, "target": [25, 346] * 5}), "csv", tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"run from 25 to 346, and none is 0\n.*\n.*classes=347.*classes=0"):
        load(spec)
    assert load(spec, classes=0).train.targets.dtype == np.float32
    assert load(spec, classes=347).classes == 347
    with pytest.raises(DataError, match="row 0 has label 25"):
        load(spec, classes=20)
    with pytest.raises(ConfigError, match="classes is 'ten'"):
        load(spec, classes="ten")


def test_real_labels_that_are_whole_numbers(tmp_path: Path) -> None:
    spec = write(pa.table({"x": [1.0] * 4, "label": [0.0, 1.0, 0.0, 1.0]}), "parquet", tmp_path / "a")
    assert load(spec).classes is None
    assert load(spec, classes=2).train.targets.dtype == np.int64
    spec = write(pa.table({"x": [1.0] * 4, "label": [0.0, 1.0, 0.5, 1.0]}), "parquet", tmp_path / "a")
    with pytest.raises(DataError, match=r"row 2 has label 0\.5"):
        load(spec, classes=2)


def test_a_column_of_arrays(tmp_path: Path) -> None:
    images = np.arange(10 * 2 * 3, dtype=np.uint8).reshape(10, 2, 3)
    columns = {
        "list": pa.array(images.tolist(), pa.list_(pa.list_(pa.uint8()))),
        "fixed": pa.array(images.tolist(), pa.list_(pa.list_(pa.uint8(), 3), 2)),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
    }
    for name, column in columns.items():
        spec = write(pa.table({name: column, "label": [0, 1] * 5}), "arrow", tmp_path / name)
        data = load(spec)
        assert data.input_shape == (1, 2, 3)
        assert both(data, "inputs") == sorted((images[:, None] / np.float32(255)).tolist())


def png(mode: str = "L", size: tuple[int, int] = (4, 3), value: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(buffer, "png")
    return buffer.getvalue()


def test_a_column_of_encoded_images(tmp_path: Path) -> None:
    pictures = [{"bytes": png("RGB", value=51 * (i % 2)), "path": None} for i in range(10)]
    spec = write(pa.table({"image": pictures, "label": [0, 1] * 5}), "parquet", tmp_path / "a.parquet")
    data = load(spec)
    assert data.input_shape == (3, 3, 4)
    np.testing.assert_allclose(data.train.inputs[:, 0, 0, 0], data.train.targets * 0.2)
    np.testing.assert_array_equal(data.train.inputs[:, 2], 1)
    pictures[7] = {"bytes": b"no picture", "path": None}
    write(pa.table({"image": pictures, "label": [0, 1] * 5}), "parquet", tmp_path / "a.parquet")
    with pytest.raises(DataError, match="image 7: is not an image"):
        load(spec)


@pytest.mark.parametrize(
    ("table", "options", "error", "message"),
    [
        ({"x": [1.0, None], "label": [0, 1]}, {}, DataError, "column 'x': row 1 has no value"),
        ({"x": [1.0, 2.0], "label": [0, None]}, {}, DataError, "column 'label': row 1 has no value"),
        ({"x": [1.0, 2.0], "label": [0, 1], "c": ["a", None]}, {"client": "c"}, DataError, "'c': row 1"),
        ({"x": [1.0, float("nan")], "label": [0, 1]}, {"classes": 2}, DataError, "has input nan"),
        ({"x": [1.0, 1e300], "label": [0, 1]}, {"classes": 2}, DataError, "has input inf"),
        ({"x": ["a", "b"], "label": [0, 1]}, {}, DataError, "input column 'x' is text"),
        ({"x": [[1], [1, 2]], "label": [0, 1]}, {}, DataError, "row 1 is a list of 2"),
        (
            {"x": pa.array([[], []], pa.list_(pa.float64())), "label": [0, 1]},
            {"classes": 2},
            DataError,
            "sizes are at least 1",
        ),
        (
            {"x": pa.array([[[]], [[]]], pa.list_(pa.list_(pa.float64()))), "label": [0, 1]},
            {"classes": 2},
            DataError,
            "sizes are at least 1",
        ),
        ({"x": [[1], [2]], "z": [1, 2], "label": [0, 1]}, {}, DataError, "input column 'x' holds arrays"),
        ({"x": [b"a", b"b"], "label": [0, 1]}, {}, DataError, "is of type binary"),
        ({"label": [0, 1]}, {}, DataError, "no input columns"),
        ({"x": [], "label": []}, {}, DataError, "has no rows"),
        ({"x": [1.0], "label": [0]}, {}, DataError, "test: has no examples"),
        ({"x": [1.0], "y": [0]}, {}, ConfigError, "has columns x, y.*\n.*label or target.*\n.*target=COLUMN"),
        ({"x": [1.0], "y": [0]}, {"target": "z"}, ConfigError, "target is 'z'\n.*columns are x, y"),
        ({"x": [1.0], "y": [0]}, {"target": "y", "inputs": ["w"]}, ConfigError, "inputs is 'w'"),
        ({"x": [1.0], "label": [0]}, {"client": "c"}, ConfigError, "client is 'c'"),
        ({"x": [1.0], "label": [0]}, {"taget": "x"}, ConfigError, "did you mean 'target'"),
        ({"x": [1.0, 2.0], "label": ["a", "b"]}, {"classes": 1}, DataError, "labels a, b"),
    ],
)
def test_tables_that_are_wrong(
    tmp_path: Path, table: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    spec = write(pa.table(table), "parquet", tmp_path / "a.parquet")
    with pytest.raises(error, match=message):
        load(spec, **options)


def test_column_names_that_occur_twice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,x,label\n1,2,0\n")
    with pytest.raises(DataError, match="two columns called 'x'"):
        load(f"csv:{tmp_path / 'a.csv'}")


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "npz", "images", "idx"])
def test_a_missing_path(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match=str(tmp_path / "absent")):
        load(f"{kind}:{tmp_path / 'absent'}")
    with pytest.raises(ConfigError, match="has no path"):
        load(f"{kind}:")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["csv", "parquet", "arrow", "npz"]),
    start=st.sampled_from([b"", b"PAR1", b"ARROW1\0\0", b"PK\x03\x04", b"\x93NUMPY", b"x,label\n"]),
    content=st.binary(max_size=80),
)
def test_random_files_never_crash(tmp_path: Path, kind: str, start: bytes, content: bytes) -> None:
    (tmp_path / "file").write_bytes(start + content)
    with contextlib.suppress(DataError, ConfigError):
        load(f"{kind}:{tmp_path / 'file'}")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["parquet", "arrow", "stream", "npz"]))
def test_damaged_files_never_crash(tmp_path: Path, data: st.DataObject, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "npz":
        np.savez_compressed(path.with_suffix(".npz"), x=np.zeros((9, 2)), y=np.arange(9) % 2)
        path = path.with_suffix(".npz")
        spec = f"npz:{path}"
    else:
        spec = write(TABLE, kind, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(DataError, ConfigError):
        load(spec)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("x_train", "y_train"), ("x_test", "y_test")),
        (("train_images", "train_labels"), ("test_images", "test_labels")),
        (("inputs", "targets"), None),
    ],
)
def test_npz(tmp_path: Path, train: tuple[str, str], test: tuple[str, str] | None) -> None:
    x, y = np.arange(40, dtype=np.float64).reshape(20, 2), (np.arange(20) % 2)[:, None]
    arrays = {train[0]: x, train[1]: y, **({test[0]: x[:3], test[1]: y[:3]} if test else {})}
    np.savez(tmp_path / "a.npz", **arrays)
    data = load(f"npz:{tmp_path / 'a.npz'}")
    assert (len(data.train), len(data.test)) == ((20, 3) if test else (16, 4))
    assert data.train.targets.shape == (len(data.train),)
    assert data.train.inputs.dtype == np.float32


def test_npz_with_clients_and_channels_last(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (10, 5, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(10) % 2, clients=np.arange(10))
    data = load(f"npz:{tmp_path / 'a.npz'}")
    assert data.input_shape == (3, 5, 6)
    assert data.train.clients is not None
    expected = images[data.train.clients].transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(data.train.inputs, expected)


def test_npz_of_tokens_and_text(tmp_path: Path) -> None:
    tokens = np.arange(30, dtype=np.int32).reshape(10, 3)
    np.savez(tmp_path / "a.npz", x=tokens, y=np.roll(tokens, 1, axis=1))
    data = load(f"npz:{tmp_path / 'a.npz'}")
    assert (data.train.inputs.dtype, data.classes, data.train.targets.shape[1:]) == (np.int64, 30, (3,))
    np.savez(tmp_path / "a.npz", x=tokens, y=np.array(["b", "a"] * 5))
    assert load(f"npz:{tmp_path / 'a.npz'}").class_names == ("a", "b")


def test_npz_files_that_are_wrong(tmp_path: Path) -> None:
    spec = f"npz:{tmp_path / 'a.npz'}"
    np.savez(tmp_path / "a.npz", features=np.zeros(3))
    with pytest.raises(DataError, match=r"has arrays features\n.*x_train"):
        load(spec)
    np.savez(tmp_path / "a.npz", x=np.array([{}]), y=np.zeros(1))
    with pytest.raises(DataError, match="without pickles"):
        load(spec)
    np.savez(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(DataError, match="3 inputs and 4 targets"):
        load(spec)
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=np.array([0, 1, -2, 0]))
    with pytest.raises(DataError, match="row 2 has label -2"):
        load(spec)
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(DataError, match="is a single array"):
        load(f"npz:{tmp_path / 'b.npy'}")


def write_images(
    root: Path, classes: dict[str, int], mode: str = "L", size: tuple[int, int] = (4, 3)
) -> None:
    for label, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i}.png").write_bytes(png(mode, size, label))


def test_an_image_folder(tmp_path: Path) -> None:
    write_images(tmp_path, {"a": 5, "b": 10})
    (tmp_path / "a" / "notes.txt").touch()
    (tmp_path / "a" / ".hidden.png").touch()
    data = load(f"images:{tmp_path}")
    assert (data.input_shape, data.classes, data.class_names) == ((1, 3, 4), 2, ("a", "b"))
    assert np.bincount(np.concatenate([data.train.targets, data.test.targets])).tolist() == [5, 10]
    np.testing.assert_allclose(data.train.inputs.mean((1, 2, 3)), data.train.targets / 255, rtol=1e-6)
    assert load(f"images:{tmp_path}", channels=3, size=8).input_shape == (3, 8, 8)


def test_an_image_folder_with_parts(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"a": 2, "b": 3}, "RGB")
    write_images(tmp_path / "test", {"b": 4})
    data = load(f"images:{tmp_path}")
    assert (len(data.train), data.test.targets.tolist(), data.input_shape) == (5, [1] * 4, (3, 3, 4))
    write_images(tmp_path / "test", {"c": 1})
    with pytest.raises(DataError, match="has class 'c'"):
        load(f"images:{tmp_path}")


def test_image_folders_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no subfolders"):
        load(f"images:{tmp_path}")
    write_images(tmp_path, {"a": 2, "b": 0})
    with pytest.raises(DataError, match="class 'b' has no images"):
        load(f"images:{tmp_path}")
    bad = tmp_path / "b" / "0.png"
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (3, 4), dtype=np.uint8)).save(buffer, "bmp")
    noise = buffer.getvalue()
    for content, message in [
        (b"text", "is not an image"),
        (noise[:-40], "is a damaged image"),
        (png(size=(5, 3)), r"is 3×5 pixels\n.*3×4\n.*size=N"),
    ]:
        bad.write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            load(f"images:{tmp_path}")
        assert str(bad) in str(caught.value)
    Image.new("I;16", (4, 3)).save(bad)
    with pytest.raises(DataError, match="has pixels of mode I;16"):
        load(f"images:{tmp_path}")
    with pytest.raises(ConfigError, match="channels 2"):
        load(f"images:{tmp_path}", channels=2)


@pytest.mark.parametrize(("kind", "module", "extra"), [("images", "PIL", "image"), ("hf", "datasets", "hf")])
def test_an_absent_library_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str, extra: str
) -> None:
    write_images(tmp_path, {"a": 1})
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"{module}.Image", raising=False)
    with pytest.raises(ConfigError, match=rf"pip install 'mycelia\[{extra}\]'"):
        load(f"{kind}:{tmp_path}")


def test_names_that_are_unknown() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fashion-mnist'"):
        load("fashion_mnist")
    with pytest.raises(ConfigError, match="did you mean 'parquet'"):
        load("parqet:/data/x.parquet")
    with pytest.raises(ConfigError, match="not available in this version"):
        load("record:/data/x")
    with pytest.raises(ConfigError, match="no module named absent_module"):
        load("absent_module:make")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("own_data")
    monkeypatch.setitem(sys.modules, "own_data", module)
    return module


def test_a_function_of_the_user(own: Any) -> None:
    x, y = np.zeros((10, 2)), np.arange(10) % 2
    values = {
        "arrays": (x, y),
        "parts": ((x, y), (torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))),
        "lists": ((x, y), [(np.zeros(2), 1), (np.zeros(2), 0)]),
        "tensors": TensorDataset(torch.zeros(10, 2), torch.tensor(y)),
        "examples": (Examples(x, y), Examples(x, y)),
        "items": [(np.zeros(2), i % 2) for i in range(10)],
    }
    sizes = {"parts": (10, 4), "lists": (10, 2), "examples": (10, 10)}
    for name, value in values.items():
        own.make = lambda value=value: value
        data = load("own_data:make")
        assert (len(data.train), len(data.test)) == sizes.get(name, (8, 2))
        assert (data.classes, data.input_shape, data.train.inputs.dtype) == (2, (2,), np.float32)
    own.make = lambda *, rows: (x[:rows], y[:rows])
    assert len(load("own_data:make", rows=5).train) == 4
    assert load("own_data:make", rows=5, classes=7).classes == 7
    whole = load("own_data:make", rows=5)
    own.make = lambda: whole
    assert load("own_data:make") is whole


def test_a_function_of_the_user_that_gives_no_data(own: Any) -> None:
    for value, message in [(None, "returned nothing"), (3, "a part is a int"), ((1, 2), "a part is a int")]:
        own.make = lambda value=value: value
        with pytest.raises(DataError, match=message):
            load("own_data:make")
    with pytest.raises(ConfigError, match="no option is called 'rows'"):
        load("own_data:make", rows=3)
