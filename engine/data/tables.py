"""Tables through pyarrow: CSV, Parquet and Arrow IPC files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mycelia.engine.data.examples import Array
from mycelia.engine.data.images import decode_images
from mycelia.engine.data.raw import Raw
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["load_arrow", "load_csv", "load_parquet", "table_to_raw"]

_TARGETS = ("label", "target")


def load_csv(
    path: Path, *, target: str = "", client: str = "", inputs: str | Sequence[str] = ""
) -> tuple[Raw, None]:
    """A CSV file with a header line; options as `table_to_raw`."""
    from pyarrow import csv

    return _load(path, csv.read_csv, target, client, inputs)


def load_parquet(
    path: Path, *, target: str = "", client: str = "", inputs: str | Sequence[str] = ""
) -> tuple[Raw, None]:
    """A Parquet file, or a folder of them; options as `table_to_raw`."""
    from pyarrow import parquet

    return _load(path, parquet.read_table, target, client, inputs)


def load_arrow(
    path: Path, *, target: str = "", client: str = "", inputs: str | Sequence[str] = ""
) -> tuple[Raw, None]:
    """An Arrow IPC file or stream; options as `table_to_raw`."""
    import pyarrow as pa

    def read(file: Path) -> Any:
        with pa.memory_map(str(file)) as source:
            # The file format starts with a magic word, the stream format does not.
            kind = pa.ipc.open_file if source.read(6) == b"ARROW1" else pa.ipc.open_stream
            source.seek(0)
            return kind(source).read_all()

    return _load(path, read, target, client, inputs)


def table_to_raw(
    table: Any,
    who: str,
    *,
    target: str = "",
    client: str = "",
    inputs: str | Sequence[str] = "",
    class_names: tuple[str, ...] = (),
) -> Raw:
    """Columns of an Arrow table as arrays.

    Args:
        table: a `pyarrow.Table`.
        who: the file, for messages.
        target: the target column; default the last one called `label` or `target`.
        client: the column of client ids; default none.
        inputs: the input columns; default all others. Several are features `[N, D]`, float32; a single one
            may hold lists, tensors or encoded images of one shape.
        class_names: names of integer labels.

    Raises:
        ConfigError: no such column.
        DataError: no rows, a missing value, text or lists of several lengths among the inputs; the message
            names column and row.
    """
    columns: list[str] = table.column_names
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise DataError(f"has two columns called {twice!r}", rule="names are unique", who=who)
    if not target:
        target = next((name for name in reversed(columns) if name.lower() in _TARGETS), "")
        if not target:
            raise ConfigError(
                f"has columns {', '.join(columns)}",
                rule="the target is called label or target",
                fix="say target=COLUMN",
                who=who,
            )
    others = [name for name in columns if name not in {target, client}]
    features = [inputs] if isinstance(inputs, str) and inputs else list(inputs) or others
    for option, names in (("target", [target]), ("client", [client] if client else []), ("inputs", features)):
        for name in names:
            if name not in columns:
                raise ConfigError(
                    f"{option} is {name!r}", rule=f"the columns are {', '.join(columns)}", who=who
                )
    if not features:
        raise DataError("has no input columns", rule="at least one beside the target", who=who)
    if table.num_rows == 0:
        raise DataError("has no rows", rule="at least one", who=who)
    return Raw(
        _inputs(table, features, who),
        _column(table, target, who),
        _column(table, client, who) if client else None,
        class_names,
    )


def _load(path: Path, read: Any, target: str, client: str, inputs: str | Sequence[str]) -> tuple[Raw, None]:
    import pyarrow as pa

    try:
        table = read(path)
        table.validate(full=True)
    except FileNotFoundError:
        raise DataError("no such file", fix=f"looked for {path.absolute()}", who=str(path)) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", who=str(path)) from error
    return table_to_raw(table, str(path), target=target, client=client, inputs=inputs), None


def _inputs(table: Any, features: list[str], who: str) -> Array:
    arrays = [_column(table, name, who) for name in features]
    for name, array in zip(features, arrays, strict=True):
        if array.dtype.kind == "U":
            raise DataError(
                f"input column {name!r} is text",
                rule="inputs are numbers, lists of numbers or images",
                fix="encode it, or name the columns to use: inputs=[…]",
                who=who,
            )
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return arrays[0]
    for name, array in zip(features, arrays, strict=True):
        if array.ndim > 1:
            raise DataError(
                f"input column {name!r} holds arrays",
                rule="one column of arrays, or several of numbers",
                fix=f"say inputs={name!r} to use it alone",
                who=who,
            )
    with np.errstate(over="ignore"):  # the set's own check reports what float32 cannot hold
        return np.stack([array.astype(np.float32) for array in arrays], axis=1)


def _column(table: Any, name: str, who: str) -> Array:
    import pyarrow as pa

    try:
        return _values(table[name].combine_chunks(), f"{who}, column {name!r}")
    except pa.ArrowException as error:
        raise DataError(f"column {name!r} cannot be read: {error}", who=who) from error


def _values(column: Any, who: str) -> Array:
    """The values of an Arrow array, nested lists as further axes."""
    import pyarrow as pa
    from pyarrow import compute

    kind = column.type
    if column.null_count:
        row = column.is_null().index(pa.scalar(True)).as_py()
        raise DataError(f"row {row} has no value", rule="no missing values", fix="fill or drop it", who=who)
    if isinstance(kind, pa.FixedShapeTensorType):
        return column.to_numpy_ndarray()  # type: ignore[no-any-return]
    if isinstance(kind, pa.BaseExtensionType):
        return _values(column.storage, who)
    if pa.types.is_dictionary(kind):
        return _values(column.dictionary_decode(), who)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return np.array(column.to_pylist(), dtype=np.str_)
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if len(column) == 0:
            return np.empty((0, 0))
        lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False)
        uneven = np.flatnonzero(lengths != lengths[0])
        if len(uneven):
            raise DataError(
                f"row {uneven[0]} is a list of {lengths[uneven[0]]}",
                rule=f"one length; row 0 has {lengths[0]}",
                who=who,
            )
        inner = _values(column.flatten(), who)
        return inner.reshape(len(column), int(lengths[0]), *inner.shape[1:])
    elif pa.types.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}:
        return decode_images([_image_source(value) for value in column.to_pylist()], who=who)
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(f"is of type {kind}", rule="numbers, text, lists or images", who=who)
    return column.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _image_source(value: dict[str, Any]) -> Path | bytes:
    content = value["bytes"]
    return content if isinstance(content, bytes) else Path(value["path"] or "")
