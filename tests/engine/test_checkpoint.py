"""Checkpoints: what is loaded is what was saved, or an older one; never a mixture."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.engine.checkpoint import load_checkpoint, save_checkpoint
from mycelia.engine.errors import DataError, MyceliaError
from mycelia.engine.types import Tensors
from tests.small_disk import fill, small_disk

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def state(step: int) -> Tensors:
    return {"weight": torch.arange(6.0).reshape(2, 3) + step, "counter": torch.tensor(step)}


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(folder, step, state(step), {"step": step, "rng": 2**127 - step})


def assert_is(folder: Path, step: int) -> None:
    """The newest checkpoint is that of `step`, complete."""
    checkpoint = load_checkpoint(folder)
    assert checkpoint.step == step
    assert checkpoint.meta == {"step": step, "rng": 2**127 - step}
    assert checkpoint.tensors.keys() == state(step).keys()
    for name, tensor in state(step).items():
        assert torch.equal(checkpoint.tensors[name], tensor)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (3, 4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensor = raw % 2 == 0 if dtype is torch.bool else raw.view(dtype)  # every bit pattern, NaNs too
    save_checkpoint(tmp_path, 1, {"x": tensor, "scalar": tensor.flatten()[0], "empty": tensor[:0]}, {})
    loaded = load_checkpoint(tmp_path).tensors
    for name, expected in (("x", tensor), ("scalar", tensor.flatten()[0]), ("empty", tensor[:0])):
        assert loaded[name].dtype is dtype
        assert loaded[name].shape == expected.shape
        assert (
            loaded[name]
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(expected.reshape(-1).view(torch.uint8))
        )


def test_views_of_one_vector_are_saved_each_on_its_own(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    save_checkpoint(
        tmp_path, 1, {"a": flat[:6].view(2, 3), "b": flat[4:], "c": flat, "t": flat.view(2, 5).T}, {}
    )
    loaded = load_checkpoint(tmp_path).tensors
    assert loaded["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["b"].tolist() == [4, 5, 6, 7, 8, 9]
    assert loaded["t"].tolist() == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]
    loaded["a"].zero_()
    assert loaded["c"].tolist() == list(range(10))


def test_no_tensors_and_no_meta_are_a_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 0, {}, {})
    assert load_checkpoint(tmp_path).tensors == {}


@given(st.dictionaries(st.text(), st.floats(allow_nan=False) | st.integers() | st.text() | st.none()))
@settings(max_examples=20, deadline=None)
def test_meta_comes_back_exactly(tmp_path_factory: pytest.TempPathFactory, meta: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_checkpoint(folder, 1, {}, meta)
    assert load_checkpoint(folder).meta == meta


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 9, 10, 100)
    assert names(tmp_path) == ["step-00000010", "step-00000100"]
    assert_is(tmp_path, 100)
    assert load_checkpoint(tmp_path, 10).step == 10


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    path = save_checkpoint(tmp_path, 2, state(5), {"again": True})
    assert path.name == "step-00000002.1"
    assert load_checkpoint(tmp_path).meta == {"again": True}
    assert names(tmp_path) == ["step-00000001", "step-00000002.1"]
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000002.1", "step-00000003"]


@pytest.mark.parametrize("name", ["tensors.safetensors", "checkpoint.json"])
def test_any_flipped_bit_is_noticed_and_the_previous_one_used(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / name
    content = path.read_bytes()
    for position in range(len(content)):
        broken = bytearray(content)
        broken[position] ^= 1 << (position % 8)
        path.write_bytes(broken)
        if name.endswith("json") and _same_json(content, bytes(broken)):
            continue  # such as the other case of an escape: it says the same
        with pytest.warns(RuntimeWarning, match="step-00000002 is broken and was skipped"):
            assert_is(tmp_path, 1)


def _same_json(before: bytes, after: bytes) -> bool:
    try:
        return bool(json.loads(before) == json.loads(after))
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["tensors.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "longer"])
def test_a_damaged_file_is_noticed_and_the_previous_one_used(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(
            {"empty": b"", "half": content[: len(content) // 2], "longer": content + b"x"}[damage]
        )
    with pytest.warns(RuntimeWarning, match="step-00000002"):
        assert_is(tmp_path, 1)


def test_when_all_are_broken_each_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    for folder in tmp_path.iterdir():
        (folder / "checkpoint.json").write_text('{"v": 7, "meta": {}, "sha256": ""}')
    with pytest.raises(DataError, match=r"step-00000002 .*version 7.*step-00000001 .*version 7"):
        load_checkpoint(tmp_path)


def test_a_step_that_is_asked_for_is_not_replaced_by_another(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "checkpoint.json").write_text("{}")
    with pytest.raises(DataError, match="no intact checkpoint of step 2"):
        load_checkpoint(tmp_path, 2)


def test_a_folder_renamed_to_another_step_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000009")
    with pytest.raises(DataError, match="SHA-256"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("place", ["gone", "."])
def test_without_a_checkpoint_the_error_says_where_it_looked(tmp_path: Path, place: str) -> None:
    with pytest.raises(DataError, match="no intact checkpoint") as caught:
        load_checkpoint(tmp_path / place)
    assert caught.value.who == str(tmp_path / place)


def test_what_a_killed_save_left_is_ignored_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def killed(self: Path, target: Path) -> Path:
        raise SystemExit  # passes by the handling of errors, as a kill does

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(SystemExit):
            save(tmp_path, 2)
    assert len(names(tmp_path)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_is(tmp_path, 1)
    assert len(names(tmp_path)) == 2  # a reader removes nothing: the writer may be alive
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("call", range(4))
def test_a_disk_that_fails_at_any_flush_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    save(tmp_path, 1)
    calls = 0

    def failing(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(MyceliaError, match=r"step 2 cannot be written: Input/output error\n.*\n.*intact"):
            save(tmp_path, 2)
    newest = 2 if (tmp_path / "step-00000002").exists() else 1
    assert_is(tmp_path, newest)
    assert not list(tmp_path.glob(".saving*"))


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        folder = disk / "checkpoints"
        save(folder, 1)
        ballast = fill(disk, leave=16_384)
        with pytest.raises(
            MyceliaError, match=r"step 2 cannot be written: No space left on device"
        ) as caught:
            save_checkpoint(folder, 2, {"large": torch.zeros(25_000)}, {})
        assert caught.value.exit_code == 1
        assert names(folder) == ["step-00000001"]
        assert_is(folder, 1)
        ballast.unlink()
        save(folder, 2)
        assert_is(folder, 2)


def test_meta_that_json_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"step 3: .*meta data cannot be written as JSON"):
        save_checkpoint(tmp_path, 3, {}, {"generator": object()})
    assert names(tmp_path) == []


def test_a_file_in_place_of_the_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MyceliaError, match="cannot be written"):
        save(tmp_path / "file", 1)
