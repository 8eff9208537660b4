"""A Program as a folder: program.json, tensors.safetensors, training.pt2 and evaluation.pt2.

The JSON holds the schema and the SHA-256 of every other file; tensors are plain data. A .pt2 file is a zip
of JSON graphs, but PyTorch's reader unpickles some members of it when they are there, and evaluates size
expressions. So it is looked at before it is read: a file with anything to unpickle, or with an expression
that is not plain arithmetic, is refused, and so is a graph that calls anything but PyTorch operators.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from hashlib import file_digest
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, fx

from mycelia.engine import structure
from mycelia.engine.errors import CaptureError, ConfigError, DataError
from mycelia.engine.exported import TAIL, from_graph, order, quiet, to_graph
from mycelia.engine.schema import Entry, Role, Schema
from mycelia.engine.verify import verify

__all__ = ["VERSION", "check_pt2", "read", "write"]

VERSION: Literal[1] = 1
_MODES = ("training", "evaluation")
_FILES = ("tensors.safetensors", *(f"{mode}.pt2" for mode in _MODES))

Parts = tuple[
    Schema, dict[str, Tensor], fx.GraphModule, fx.GraphModule, tuple[Tensor, Tensor], tuple[str, ...]
]


def write(
    path: Path,
    schema: Schema,
    initial: Mapping[str, Tensor],
    graphs: tuple[fx.GraphModule, fx.GraphModule],
    example: tuple[Tensor, Tensor] | None,
    note: tuple[str, ...],
) -> None:
    """Write a Program's parts; the folder appears whole or not at all."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists", rule="a Program is saved into a new folder", who="save")
    if example is None:
        raise CaptureError("the Program has no example", rule="its shapes are needed to save it", who="save")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        folder = Path(scratch) / path.name
        folder.mkdir()
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in initial.items()}, folder / _FILES[0]
        )
        for mode, graph in zip(_MODES, graphs, strict=True):
            exported = from_graph(graph, schema, initial, example)
            with quiet():
                torch.export.save(exported, folder / f"{mode}.pt2")
        content = _Content(
            format="mycelia-program",
            version=VERSION,
            torch=str(torch.__version__),
            entries=[entry.to_json() for entry in schema],
            schema_sha256=schema.sha256,
            outputs=graphs[0].meta["outputs"],
            note=list(note),
            example=[_Kind.of(part) for part in example],
            sha256={name: _digest(folder / name) for name in _FILES},
        )
        (folder / "program.json").write_text(content.model_dump_json(indent=1), encoding="utf-8")
        if path.exists():
            path.rmdir()
        folder.rename(path)


def read(path: Path) -> Parts:
    """Read the parts of a Program; nothing in the folder is trusted before it is checked."""
    content = _content(path)
    for name in _FILES:
        if not (path / name).is_file():
            raise DataError(f"{path / name} is missing", rule=f"a Program is {', '.join(_FILES)}", who="load")
        if _digest(path / name) != content.sha256[name]:
            raise DataError(
                f"{path / name} is not the file that was saved",
                rule="its SHA-256 stands in program.json",
                fix="copy the whole folder again",
                who="load",
            )
    schema = Schema(tuple(Entry.from_json(row) for row in content.entries))
    if schema.sha256 != content.schema_sha256:
        raise DataError(f"{path}: the schema is not the one that was saved", rule="its SHA-256", who="load")
    # copied out of the file's mapping: how memory is aligned decides the last bits of a sum
    initial = {name: tensor.clone() for name, tensor in load_file(path / _FILES[0]).items()}
    schema.check(initial, *Role, who=str(path / _FILES[0]))
    graphs = []
    for mode in _MODES:
        graph = _graph(path / f"{mode}.pt2", schema, initial, content.torch)
        _check_outputs(path, content.outputs, graph, schema)
        graph.meta["outputs"] = content.outputs
        graphs.append(graph)
    example = content.example[0].zeros(), content.example[1].zeros()
    return schema, initial, graphs[0], graphs[1], example, tuple(content.note)


def _check_outputs(path: Path, template: Any, graph: fx.GraphModule, schema: Schema) -> None:
    results: Any = graph.graph.output_node().args[0]
    tensors = len(results) - 1 - len(schema.of(Role.BUFFER, Role.COUNTER))
    try:
        structure.unflatten(template, range(tensors))
        found = structure.count(template)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}/program.json: outputs cannot be read: {error}", who="load") from error
    if found != tensors:
        raise DataError(
            f"{path}/program.json: outputs of {found} tensors, the graph has {tensors}", who="load"
        )


def _graph(path: Path, schema: Schema, initial: dict[str, Tensor], written_by: str) -> fx.GraphModule:
    check_pt2(path)
    try:
        with quiet():
            exported = torch.export.load(path)
        users = exported.graph_signature.user_inputs
        names = dict(zip(map(str, users), (*order(schema), *TAIL), strict=True))
        graph = to_graph(exported, names, schema, initial, lambda values, _: values)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        verify(graph, schema)
    except Exception as error:
        raise DataError(
            f"{path} cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            rule=f"a graph written by torch {written_by}, read by torch {torch.__version__}",
            fix="import the module that registers the model's custom operators, or capture the model again",
            who="load",
        ) from error
    return graph


class _Kind(BaseModel):
    """Shape and dtype of a tensor."""

    model_config = ConfigDict(extra="forbid", strict=True)
    shape: list[int]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> _Kind:
        return cls(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    def zeros(self) -> Tensor:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise DataError(f"{self.dtype!r} is no dtype", who="load")
        return torch.zeros(self.shape, dtype=dtype)


class _Content(BaseModel):
    """What program.json holds."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: Literal["mycelia-program"]
    version: Literal[1]
    torch: str
    entries: list[list[Any]]
    schema_sha256: str
    outputs: dict[str, Any]
    note: list[str]
    example: list[_Kind] = Field(min_length=2, max_length=2)
    sha256: dict[str, str]


def _content(path: Path) -> _Content:
    try:
        content = _Content.model_validate_json((path / "program.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} holds no readable program.json: {error}", who="load") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"{path}/program.json: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            rule=f"what this release writes, version {VERSION}",
            fix="capture the model again, or read the folder with the release that wrote it",
            who="load",
        ) from error
    if set(content.sha256) != set(_FILES):
        raise DataError(
            f"{path}/program.json: sha256 of {sorted(content.sha256)}",
            rule=f"those of {', '.join(_FILES)}",
            who="load",
        )
    return content


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def check_pt2(path: Path) -> None:
    """Raise DataError when reading the .pt2 file would unpickle something or evaluate code."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                _check_member(path, member, archive)
    except (zipfile.BadZipFile, ValueError, KeyError, RecursionError) as error:
        raise DataError(f"{path} is not a .pt2 file: {error}", who="load") from error


# what PyTorch's writer puts into a file whose weights and constants are plain tensors
_PLAIN = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|\.data/\w+|models/\w+\.json|data/(weights|constants)/\w+\.json"
    r"|data/weights/weight_\d+|data/constants/tensor_\d+|data/sample_inputs/\w+\.pt)"
)


def _check_member(path: Path, member: zipfile.ZipInfo, archive: zipfile.ZipFile) -> None:
    name = member.filename
    if not _PLAIN.fullmatch(name) or ("/sample_inputs/" in name and member.file_size):
        raise _unsafe(path, f"{name} would be unpickled or is unknown")
    if not name.endswith(".json"):
        return
    for key, value in _items(json.loads(archive.read(member))):
        if key == "use_pickle" and value is not False:
            raise _unsafe(path, f"{name} names a pickled tensor")
        if key == "expr_str" and not _is_arithmetic(str(value)):
            raise _unsafe(path, f"{name} holds the expression {str(value)[:80]!r}")


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value at any depth."""
    if isinstance(value, dict):
        yield from value.items()
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _items(part)


_FUNCTIONS = {
    *("Abs", "Add", "And", "CeilDiv", "CleanDiv", "Eq", "Float", "FloatTrueDiv", "FloorDiv", "Ge", "Gt"),
    *("Identity", "IntTrueDiv", "Integer", "Le", "Lt", "Max", "Min", "Mod", "ModularIndexing", "Mul", "Ne"),
    *("Not", "Or", "Pow", "PowByNatural", "PythonMod", "Rational", "Symbol", "TruncToInt", "Where"),
}
_VALUES = {"true", "false", "oo", "int_oo", "zoo", "nan"}
_ARITHMETIC = (
    *(ast.Expression, ast.Call, ast.keyword, ast.Load),
    *(ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop),
)


def _is_arithmetic(text: str) -> bool:
    """Whether a size expression is calls of known functions on numbers and symbols."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, RecursionError):
        return False
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Name):
            if node.id not in (_FUNCTIONS if id(node) in called else _VALUES):
                return False
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and not re.fullmatch(r"[a-z]+\d+", node.value):
                return False
        elif not isinstance(node, _ARITHMETIC):
            return False
    return True


def _unsafe(path: Path, found: str) -> DataError:
    return DataError(
        f"{path}: {found}",
        rule="a graph file is read only when nothing in it runs code on reading",
        fix="save the Program again, and load only files from people whose code you would run",
        who="load",
    )
