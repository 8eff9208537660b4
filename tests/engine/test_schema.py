"""The schema's JSON, its checks, and the hash of a model's values."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mycelia.engine.errors import DataError
from mycelia.engine.schema import Entry, Role, Schema, model_sha256

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
ENTRIES = st.builds(
    Entry,
    name=st.text(min_size=1, max_size=8),
    role=st.sampled_from(Role),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
)


@given(entry=ENTRIES)
def test_entries_survive_json(entry: Entry) -> None:
    assert Entry.from_json(entry.to_json()) == entry
    assert entry.numel == torch.empty(entry.shape).numel()


@pytest.mark.parametrize(
    "row",
    [
        [],
        ["w", "parameter", [2]],
        ["w", "hyperparameter", [2], "float32"],
        ["w", "parameter", "2", "float32"],
        ["w", "parameter", [2], "load"],
        ["w", "parameter", [2], "no_such_thing"],
        ["w", "parameter", [None], "float32"],
    ],
)
def test_other_json_is_refused(row: list[object]) -> None:
    with pytest.raises(DataError, match="not a schema entry"):
        Entry.from_json(row)


@given(entries=st.lists(ENTRIES, min_size=2, max_size=4, unique_by=lambda entry: entry.name))
def test_the_hash_covers_content_and_order(entries: list[Entry]) -> None:
    schema = Schema(tuple(entries))
    assert schema.sha256 == Schema(tuple(Entry.from_json(entry.to_json()) for entry in entries)).sha256
    assert schema.sha256 != Schema(tuple(reversed(entries))).sha256
    assert schema.sha256 != Schema(tuple(entries[:-1])).sha256
    assert [entry for role in Role for entry in schema.of(role)] == sorted(
        entries, key=lambda entry: list(Role).index(entry.role)
    )


SCHEMA = Schema(
    (
        Entry("w", Role.PARAMETER, (2, 3), torch.float32),
        Entry("count", Role.COUNTER, (), torch.int64),
    )
)
GOOD = {"w": torch.zeros(2, 3), "count": torch.tensor(0)}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"w": torch.zeros(2, 3)}, "tensor 'count' is missing"),
        (GOOD | {"v": torch.zeros(1)}, "unknown tensor 'v'"),
        (GOOD | {"w": torch.zeros(3, 2)}, r"shape (3, 2)"),
        (GOOD | {"w": torch.zeros(2, 3, dtype=torch.float64)}, "torch.float64"),
        (GOOD | {"count": torch.tensor(0.0)}, "torch.float32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tensors: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=re.escape(says)) as caught:
        SCHEMA.check(tensors, *Role, who="client 7")
    assert caught.value.who == "client 7"
    SCHEMA.check(GOOD, *Role)
    SCHEMA.check({"w": GOOD["w"]}, Role.PARAMETER)


def test_the_hash_of_values_sees_everything_but_the_order_of_names() -> None:
    one, two = torch.arange(6.0), torch.tensor(True)
    base = model_sha256({"a": one, "b": two})
    assert base == model_sha256({"b": two, "a": one.clone()})
    nudged = one.clone()
    nudged[3] = nudged[3].nextafter(torch.tensor(9.0))
    others = [
        {"a": nudged, "b": two},
        {"a": one.reshape(2, 3), "b": two},
        {"a": one.double(), "b": two},
        {"a": one, "c": two},
        {"a": one, "b": ~two},
        {"a": one},
        {"a": one * torch.tensor([-1.0, 1, 1, 1, 1, 1]), "b": two},  # minus zero
    ]
    assert len({base, *map(model_sha256, others)}) == len(others) + 1


def test_the_hash_of_values_does_not_see_memory() -> None:
    """Strides, views and a gradient history are not values; bfloat16 and empty tensors are."""
    matrix = torch.arange(6.0).reshape(2, 3)
    assert model_sha256({"a": matrix.T}) == model_sha256({"a": matrix.T.contiguous()})
    assert model_sha256({"a": matrix[1:]}) == model_sha256({"a": matrix[1:].clone()})
    assert model_sha256({"a": matrix.requires_grad_()}) == model_sha256({"a": matrix.detach()})
    assert model_sha256({"a": torch.zeros(0)}) != model_sha256({"a": torch.zeros(0, 2)})
    assert model_sha256({"a": torch.zeros(2, dtype=torch.bfloat16)}) != model_sha256({"a": torch.zeros(2)})
