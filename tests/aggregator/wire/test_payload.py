"""Payloads: what a Schema says comes back; any other header, value or length is refused before it costs."""

import json
import random
import struct
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.payload import (
    BLOCK_BYTES,
    MAX_HEADER,
    Layout,
    add_masked,
    block_of,
    check_finite,
    check_masked_size,
    check_tensors,
    check_tensors_size,
    expected,
    read_tensors,
    write_tensors,
)
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.schema import Entry, Role, Schema
from mycelia.privacy.secagg import masks
from tests.aggregator.wire.examples import damage

SENT = (Role.PARAMETER, Role.BUFFER, Role.COUNTER)
SCHEMA = Schema((
    Entry("layer.weight", Role.PARAMETER, (3, 5), torch.float32),
    Entry("layer.half", Role.PARAMETER, (7,), torch.float16),
    Entry("mask", Role.FROZEN, (4,), torch.float32),
    Entry("norm.mean", Role.BUFFER, (5,), torch.float64),
    Entry("norm.brain", Role.PARAMETER, (2, 1, 3), torch.bfloat16),
    Entry("norm.count", Role.COUNTER, (), torch.int64),
    Entry("empty", Role.BUFFER, (0, 3), torch.float32),
    Entry("flags", Role.BUFFER, (3,), torch.bool),
))  # fmt: skip
MORE = (Entry("control", Role.PARAMETER, (6,), torch.float32),)
ONE = Schema((Entry("w", Role.PARAMETER, (2, 3), torch.float32),))


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    for entry in expected(SCHEMA, SENT, MORE):
        random_values = torch.randn(entry.shape)
        whole = entry.dtype in (torch.int64, torch.bool)
        made[entry.name] = (random_values * 10 > 0 if whole else random_values).to(entry.dtype)
    return made


def payload(seed: int = 0) -> bytes:
    return b"".join(write_tensors(values(seed), SCHEMA, SENT, MORE))


def checked(data: bytes, schema: Schema = SCHEMA, more: tuple[Entry, ...] = MORE) -> Layout:
    return check_tensors(data, len(data), schema, SENT, more)


def with_header(text: bytes | str, data: bytes = bytes(24)) -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text)) + text + data


def row(dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refused(data: bytes, reason: Reason, match: str, schema: Schema = ONE) -> None:
    with pytest.raises(Problem, match=match) as caught:
        check_tensors(data, len(data), schema, SENT)
    assert caught.value.reason is reason


# --- there and back ---


def test_tensors_come_back() -> None:
    data = payload()
    layout = checked(data)
    check_finite(data, layout)
    check_tensors_size(len(data), expected(SCHEMA, SENT, MORE))
    found = read_tensors(data, layout)
    assert list(found) == [entry.name for entry in expected(SCHEMA, SENT, MORE)]
    assert "mask" not in found
    for name, tensor in values().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        found[name].zero_()  # memory of its own


def test_the_library_reads_what_is_written() -> None:
    found = safetensors.torch.load(payload())
    assert found.keys() == values().keys()
    for name, tensor in values().items():
        assert torch.equal(found[name], tensor)


def test_what_the_library_writes_is_read() -> None:
    tensors = {"w": torch.arange(6.0).reshape(2, 3)}
    data = safetensors.torch.save(tensors)
    assert torch.equal(read_tensors(data, check_tensors(data, len(data), ONE, SENT))["w"], tensors["w"])


def test_the_order_is_the_schemas() -> None:
    backwards = dict(reversed(values().items()))
    assert b"".join(write_tensors(backwards, SCHEMA, reversed(SENT), MORE)) == payload()


def test_a_strided_tensor_is_written_as_its_values() -> None:
    strided = {"w": torch.arange(12.0).reshape(3, 4).t()[::2]}
    data = b"".join(write_tensors(strided, ONE, SENT))
    assert torch.equal(read_tensors(data, check_tensors(data, len(data), ONE, SENT))["w"], strided["w"])


def test_blocks_are_parts_of_the_tensor() -> None:
    data = payload()
    place = checked(data).places[0]
    assert torch.equal(block_of(data, place, 4, 7), values()["layer.weight"].reshape(-1)[4:11])


def test_only_what_the_schema_says_is_written() -> None:
    with pytest.raises(DataError, match="missing"):
        write_tensors({}, ONE, SENT)
    with pytest.raises(DataError, match="float64"):
        write_tensors({"w": torch.zeros(2, 3).double()}, ONE, SENT)


@pytest.mark.parametrize(
    "entry",
    [
        Entry("c", Role.PARAMETER, (2,), torch.complex64),
        Entry("n" * 257, Role.PARAMETER, (2,), torch.float32),
        Entry("", Role.PARAMETER, (2,), torch.float32),
        Entry("__metadata__", Role.PARAMETER, (2,), torch.float32),
        Entry("r", Role.PARAMETER, (1,) * 9, torch.float32),
        Entry("w", Role.PARAMETER, (2, 3), torch.float32),
    ],
)
def test_a_model_that_does_not_travel(entry: Entry) -> None:
    with pytest.raises(ConfigError, match="tensor"):
        expected(Schema((*ONE, entry)), SENT)


# --- headers ---


def test_a_size_that_cannot_be_is_refused_before_the_data() -> None:
    entries = expected(ONE, SENT)
    for size in (0, 32, 8 + 24 + MAX_HEADER + 1, 2**40):
        with pytest.raises(Problem, match="BAD_PAYLOAD"):
            check_tensors_size(size, entries)


@pytest.mark.parametrize(
    ("rows", "reason", "match"),
    [
        ({}, Reason.SCHEMA, "no tensor 'w'"),
        ({"v": row()}, Reason.SCHEMA, "tensor 'v' at place 0"),
        ({"w": row(), "v": row(offsets=[24, 48])}, Reason.SCHEMA, "2 tensors"),
        ({"w": row("F16", (2, 3), [0, 12])}, Reason.SCHEMA, "is F16"),
        ({"w": row("F32", (3, 2))}, Reason.SCHEMA, r"is F32 \[3, 2\]"),
        ({"w": row("I32")}, Reason.SCHEMA, "is I32"),
        ({"w": row("C64")}, Reason.BAD_PAYLOAD, "does not travel"),
        ({"w": row(5)}, Reason.BAD_PAYLOAD, "does not travel"),
        ({"w": row(["F32"])}, Reason.BAD_PAYLOAD, "does not travel"),
        ({"w": row(shape=[1] * 9)}, Reason.BAD_PAYLOAD, "no shape"),
        ({"w": row(shape=[2, -3])}, Reason.BAD_PAYLOAD, "no shape"),
        ({"w": row(shape=[2, True])}, Reason.BAD_PAYLOAD, "no shape"),
        ({"w": row(shape=[2, 2**63])}, Reason.BAD_PAYLOAD, "no shape"),
        ({"w": row(shape={"2": 3})}, Reason.BAD_PAYLOAD, "no shape"),
        ({"w": row(shape="23")}, Reason.BAD_PAYLOAD, "no shape"),
        ({"w": row(offsets=[0])}, Reason.BAD_PAYLOAD, "no place"),
        ({"w": row(offsets=[8, 32])}, Reason.BAD_PAYLOAD, "lies at 8 to 32"),
        ({"w": row(offsets=[0, 23])}, Reason.BAD_PAYLOAD, "lies at 0 to 23"),
        ({"w": row(offsets=[0, 2**62])}, Reason.BAD_PAYLOAD, "lies at"),
        ({"w": row() | {"code": "x"}}, Reason.BAD_PAYLOAD, "is no tensor"),
        ({"w": [1]}, Reason.BAD_PAYLOAD, "is no tensor"),
        ({"__metadata__": {"a": "b"}, "w": row()}, Reason.BAD_PAYLOAD, "is no tensor"),
        ({"n" * 300: row()}, Reason.BAD_PAYLOAD, "300 letters"),
        ([row()], Reason.BAD_PAYLOAD, "no table"),
        ({"w": [[[[[]]]]]}, Reason.BAD_PAYLOAD, "deep"),
        ({"w": 1.5}, Reason.BAD_PAYLOAD, "no JSON of whole numbers"),
        ({"w": float("nan")}, Reason.BAD_PAYLOAD, "no JSON of whole numbers"),
        ({"w": 10**30}, Reason.BAD_PAYLOAD, "no JSON of whole numbers"),
    ],
)
def test_headers_that_are_refused(rows: Mapping[str, object], reason: Reason, match: str) -> None:
    refused(with_header(json.dumps(rows)), reason, match)


def test_a_good_header_is_taken() -> None:
    data = with_header(json.dumps({"w": row()}) + "   ")
    assert checked(data, ONE, ()).places[0].size == 24
    refused(data + b"x", Reason.BAD_PAYLOAD, "end at")
    refused(data[:-1], Reason.BAD_PAYLOAD, "end at")


def test_tensors_do_not_overlap_nor_swap() -> None:
    two = Schema(tuple(Entry(name, Role.PARAMETER, (2, 3), torch.float32) for name in "ab"))
    for first, second in (([0, 24], [0, 24]), ([24, 48], [0, 24]), ([0, 24], [25, 49]), ([0, 24], [23, 47])):
        text = json.dumps({"a": row(offsets=first), "b": row(offsets=second)})
        refused(with_header(text, bytes(48)), Reason.BAD_PAYLOAD, "without gaps", two)
    text = json.dumps({"b": row(offsets=[0, 24]), "a": row(offsets=[24, 48])})
    refused(with_header(text, bytes(48)), Reason.SCHEMA, "tensor 'b' at place 0", two)


def test_a_name_that_stands_twice() -> None:
    inner = json.dumps(row())
    refused(with_header('{"w":' + inner + ',"w":' + inner + "}"), Reason.BAD_PAYLOAD, "twice")
    twice = inner.replace("{", '{"dtype":"F16",')
    refused(with_header('{"w":' + twice + "}"), Reason.BAD_PAYLOAD, "is no tensor")


@pytest.mark.parametrize(
    "text",
    [
        b"{", b"{}x", b"\xff\xfe", b"null", b'"', b"[" * 1000, b'{"w":' * 200_000, b"[" * (MAX_HEADER - 1),
        b'{"w":' + b"9" * 100_000 + b"}", b'{"' + b"\\" * 100_001 + b'":1}', b'"' * 100_001, b"[]" * 500_000,
        b'{"\\ud800":{}}',
    ],
)  # fmt: skip
def test_header_bombs(text: bytes) -> None:
    with pytest.raises(Problem) as caught:
        check_tensors(with_header(text), len(text) + 32, ONE, SENT)
    assert caught.value.reason in (Reason.BAD_PAYLOAD, Reason.SCHEMA)
    assert len(str(caught.value)) < 2000


def test_many_tensors_are_too_many() -> None:
    text = "{" + ",".join(f'"{index}":0' for index in range(10_001)) + "}"
    refused(with_header(text), Reason.BAD_PAYLOAD, "10001 tensors")


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER + 1, 2**63, 2**64 - 1])
def test_lengths_of_headers(length: int) -> None:
    refused(struct.pack("<Q", length) + bytes(100), Reason.BAD_PAYLOAD, "a header of")


def test_a_header_that_ends_early() -> None:
    refused(b"", Reason.BAD_PAYLOAD, "a header first")
    refused(b"1234567", Reason.BAD_PAYLOAD, "a header first")
    refused(struct.pack("<Q", 100) + b"{}", Reason.BAD_PAYLOAD, "inside the payload")


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2, 3)}, tmp_path / "pickle")
    refused((tmp_path / "pickle").read_bytes(), Reason.BAD_PAYLOAD, "a header of")


def test_a_large_header_is_cheap() -> None:
    wide = Schema(tuple(Entry(f"layer.{i}.w", Role.PARAMETER, (1,), torch.float32) for i in range(10_000)))
    tensors = {entry.name: torch.ones(1) for entry in wide}
    data = b"".join(write_tensors(tensors, wide, SENT))
    tracemalloc.start()
    layout = check_tensors(data, len(data), wide, SENT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(layout.places) == 10_000
    assert peak < 2**25


# --- values ---


@pytest.mark.parametrize("name", ["layer.weight", "layer.half", "norm.mean", "norm.brain", "control"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_is_named(name: str, value: float) -> None:
    tensors = values()
    tensors[name].reshape(-1)[-1] = value
    data = b"".join(write_tensors(tensors, SCHEMA, SENT, MORE))
    with pytest.raises(Problem, match=f"tensor '{name}' holds NaN or infinity") as caught:
        check_finite(data, checked(data))
    assert caught.value.reason is Reason.NONFINITE


def test_the_largest_numbers_are_finite() -> None:
    tensors = values()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(-torch.finfo(tensor.dtype).max)
    data = b"".join(write_tensors(tensors, SCHEMA, SENT, MORE))
    check_finite(data, checked(data))


def test_the_last_block_is_looked_at() -> None:
    long = Schema((Entry("w", Role.PARAMETER, (BLOCK_BYTES // 2 + 3,), torch.float32),))
    tensors = {"w": torch.zeros(BLOCK_BYTES // 2 + 3)}
    tensors["w"][-1] = float("inf")
    data = b"".join(write_tensors(tensors, long, SENT))
    with pytest.raises(Problem, match="NONFINITE"):
        check_finite(data, check_tensors(data, len(data), long, SENT))


def test_a_bool_is_zero_or_one() -> None:
    data = bytearray(payload())
    flags = next(place for place in checked(bytes(data)).places if place.entry.name == "flags")
    data[flags.start] = 2
    with pytest.raises(Problem, match="'flags'"):
        check_finite(data, checked(bytes(data)))


# --- masked vectors ---


@pytest.mark.parametrize("bits", [8, 13, 20, 32, 33, 51, 64])
@pytest.mark.parametrize("count", [1, 9, 2**18 + 5])
def test_residues_add_up(bits: int, count: int) -> None:
    draw = np.random.default_rng(bits)
    dtype = masks.word_type(bits)
    one, two = (draw.integers(0, 2**bits, count, np.uint64).astype(dtype) if bits < 64
                else draw.integers(0, 2**64, count, np.uint64) for _ in range(2))  # fmt: skip
    total = one.copy()
    blocks = len(list(add_masked(total, masks.pack(two, bits), bits)))
    assert blocks == -(-count // (BLOCK_BYTES // bits * 8))
    wrapped = (one.astype(object) + two.astype(object)) % 2**bits
    assert (total == wrapped.astype(dtype)).all()


def test_residues_of_another_length_change_nothing() -> None:
    total = np.zeros(100, np.uint32)
    good = masks.pack(np.full(100, 5, np.uint32), 13)
    for data in (good[:-1], good + b"\0", b"", good[:-1] + b"\xff"):
        with pytest.raises(Problem, match="BAD_PAYLOAD"):
            list(add_masked(total, data, 13))
        assert not total.any()


def test_wrong_padding_behind_many_blocks_changes_nothing() -> None:
    count = 3 * BLOCK_BYTES // 13 * 8 + 1
    total = np.zeros(count, np.uint32)
    data = bytearray(masks.packed_size(count, 13))
    data[-1] = 0x80
    with pytest.raises(Problem, match="padding"):
        list(add_masked(total, data, 13))
    assert not total.any()


def test_the_configuration_gives_the_size() -> None:
    from tests.privacy.secagg.test_messages import CONFIG

    check_masked_size(CONFIG.upload_bytes, CONFIG)
    with pytest.raises(Problem, match="BAD_PAYLOAD"):
        check_masked_size(CONFIG.upload_bytes, replace(CONFIG, dimension=CONFIG.dimension + 8))


# --- any bytes ---


def decoded(data: bytes) -> None:
    try:
        layout = checked(data)
        check_finite(data, layout)
    except Problem as problem:
        assert problem.reason in (Reason.BAD_PAYLOAD, Reason.SCHEMA, Reason.NONFINITE)  # noqa: PT017
    else:
        assert [place.entry for place in layout.places] == list(expected(SCHEMA, SENT, MORE))
        read_tensors(data, layout)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["w", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.binary(), TREES)
def test_any_header(data: bytes, tree: object) -> None:
    decoded(data)
    decoded(with_header(data))
    decoded(with_header(json.dumps(tree)))


@pytest.mark.parametrize("rounds", [3_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_damaged_payloads(rounds: int) -> None:
    draw, whole = random.Random(7), payload()
    header = 8 + int.from_bytes(whole[:8], "little")
    for index in range(rounds):
        decoded(damage(whole[:header], draw) + whole[header:] if index % 2 else damage(whole, draw))
