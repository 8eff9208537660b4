"""IDX files: the published format, and what is not it."""

import contextlib
import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mycelia.engine.data import load, parse_idx, read_idx
from mycelia.engine.errors import DataError

# From the format's description: type byte and the NumPy type it stands for.
TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def idx(array: np.ndarray, code: int = 0x08) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(TYPES[code]).tobytes()


IMAGES = np.arange(3 * 4 * 5).reshape(3, 4, 5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_type_and_shape_round_trips(data: st.DataObject) -> None:
    code = data.draw(st.sampled_from(sorted(TYPES)))
    dtype = np.dtype(TYPES[code]).newbyteorder("=")
    array = data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4)))
    content = idx(array, code)
    content = gzip.compress(content) if data.draw(st.booleans()) else content
    parsed = parse_idx(content)
    assert parsed.shape == array.shape
    np.testing.assert_array_equal(parsed, array)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=60),
    st.sampled_from(
        [b"", b"\0\0\x08\x01", b"\0\0\x0d\x02", b"\0\0\x08\xff", b"\x1f\x8b", b"\x1f\x8b\x08\x00"]
    ),
)
def test_random_bytes_are_an_array_or_a_data_error(content: bytes, start: bytes) -> None:
    for candidate in (start + content, gzip.compress(start + content)):
        try:
            array = parse_idx(candidate)
        except DataError:
            continue
        # Only what says its own length exactly is accepted.
        plain = gzip.decompress(candidate) if candidate[:2] == b"\x1f\x8b" else candidate
        assert array.nbytes == len(plain) - 4 - 4 * plain[3]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_or_cut_file_never_crashes(data: st.DataObject) -> None:
    content = bytearray(gzip.compress(idx(IMAGES)) if data.draw(st.booleans()) else idx(IMAGES))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    with contextlib.suppress(DataError):
        parse_idx(bytes(content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with bytes none"),
        (b"PK\x03\x04....", "starts with bytes 50 4b 03 04"),
        (b"\0\0\x07\x01\0\0\0\0", "a type of"),
        (b"\0\0\x08\x00", "starts with bytes 00 00 08 00"),
        (idx(IMAGES)[:9], "ends inside its header of 3 dimensions"),
        (idx(IMAGES)[:-1], r"has 75 bytes\n.*76 \(shape \(3, 4, 5\)\)"),
        (idx(IMAGES) + b"\0", "has 77 bytes"),
        (b"\0\0\x0e\x02" + b"\xff" * 8, "has 12 bytes"),
        (b"\0\0\x08\x03" + b"\xff" * 8 + b"\0" * 4, "has shape"),
        (b"\0\0\x08\x46" + b"\0" * 280, "has shape"),
        (gzip.compress(idx(IMAGES), mtime=0)[:-9], "broken gzip"),
        (gzip.compress(idx(IMAGES), mtime=0)[:20], "broken gzip"),
        (b"\x1f\x8b", "broken gzip"),
    ],
)
def test_what_is_no_idx_file(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_idx(content)


def test_a_flipped_bit_under_gzip_is_found_by_its_checksum() -> None:
    content = bytearray(gzip.compress(idx(IMAGES), compresslevel=0))
    content[60] ^= 1
    with pytest.raises(DataError, match="broken gzip"):
        parse_idx(bytes(content))


def test_a_missing_file_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path / "absent")):
        read_idx(tmp_path / "absent")
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path)


def write_mnist(folder: Path, *, rows: int = 10, test: bool = True, suffix: str = ".gz") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": rows, **({"t10k": 4} if test else {})}
    for part, n in parts.items():
        images = np.arange(n * 6).reshape(n, 2, 3) % 256
        files = {f"{part}-images-idx3-ubyte": idx(images), f"{part}-labels-idx1-ubyte": idx(np.arange(n) % 2)}
        for name, content in files.items():
            (folder / (name + suffix)).write_bytes(gzip.compress(content) if suffix == ".gz" else content)
    return folder


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_a_folder_with_the_names_of_mnist(tmp_path: Path, suffix: str) -> None:
    data = load(f"idx:{write_mnist(tmp_path, suffix=suffix)}")
    assert (len(data.train), len(data.test), data.classes, data.input_shape) == (10, 4, 2, (1, 2, 3))
    assert data.train.inputs.dtype == np.float32
    np.testing.assert_array_equal(
        data.train.inputs[1, 0], np.arange(6, 12).reshape(2, 3).astype(np.float32) / 255
    )


def test_a_folder_without_a_test_part_or_with_both_forms(tmp_path: Path) -> None:
    data = load(f"idx:{write_mnist(tmp_path, test=False)}")
    assert (len(data.train), len(data.test)) == (8, 2)
    write_mnist(tmp_path, test=False, suffix="")
    assert load(f"idx:{tmp_path}").sha256 == data.sha256


def test_folders_that_lack_something(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        load(f"idx:{tmp_path / 'absent'}")
    with pytest.raises(DataError, match="no training images"):
        load(f"idx:{tmp_path}")
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="t10k images but no labels"):
        load(f"idx:{tmp_path}")
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(idx(np.zeros(9)))
    (tmp_path / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(DataError, match="10 inputs and 9 targets"):
        load(f"idx:{tmp_path}")
    (tmp_path / "fashion-train-images-idx3-ubyte").write_bytes(idx(IMAGES))
    with pytest.raises(DataError, match="several train images"):
        load(f"idx:{tmp_path}")
