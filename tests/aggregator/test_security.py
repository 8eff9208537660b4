"""What the server and the device never do, whatever else changes."""

from __future__ import annotations

import ast
import io
import json
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.payload import MAX_HEADER, MAX_TENSORS, check_tensors
from mycelia.engine.schema import Entry, Role, Schema

ROOMS = ("aggregator", "client")
ROOT = Path(__file__).resolve().parents[2]
SCHEMA = Schema((Entry("w", Role.PARAMETER, (2,), torch.float32),))
RUN_WHAT_THEY_READ = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib"}
CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load",
}  # fmt: skip


def sources() -> list[Path]:
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(found) > 50
    return found


def called(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def test_nothing_is_unpickled_or_run() -> None:
    for path in sources():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & RUN_WHAT_THEY_READ, path
        for name, line in called(tree):
            assert name not in CALLS, f"{path}:{line} calls {name}"


def test_nobody_sleeps_for_the_other_side() -> None:
    for path in sources():
        for name, line in called(ast.parse(path.read_text())):
            assert name.rpartition(".")[2] != "sleep", f"{path}:{line} calls {name}"


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("run",))


def test_pickle_payload_refused(capsys: pytest.CaptureFixture[str]) -> None:
    saved = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, saved)
    for data in (pickle.dumps(Bomb()), pickle.dumps({"w": [0.0, 0.0]}), saved.getvalue()):
        with pytest.raises(Problem) as caught:
            check_tensors(data, len(data), SCHEMA, [Role.PARAMETER])
        assert caught.value.reason in (Reason.BAD_PAYLOAD, Reason.SCHEMA)
    assert capsys.readouterr().out == ""


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


DEEP = b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        header(b"{}", 2**63),
        header(b"{}", 2**64 - 1),
        header(b" " * (MAX_HEADER + 1)),
        header(DEEP),
        header(json.dumps({str(n): ROW for n in range(MAX_TENSORS + 1)}).encode()),
        header(json.dumps({"w": ROW | {"shape": [2**62, 2**62]}}).encode()),
        header(json.dumps({"w": ROW | {"data_offsets": [0, 2**62]}}).encode()),
        header(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,' + b"9" * 100_000 + b"]}}"),
    ],
    ids=["length", "largest", "long", "deep", "many", "shape", "offsets", "digits"],
)
def test_header_bomb_refused(data: bytes) -> None:
    with pytest.raises(Problem) as caught:
        check_tensors(data, len(data), SCHEMA, [Role.PARAMETER])
    assert caught.value.reason in (Reason.BAD_PAYLOAD, Reason.SCHEMA)
