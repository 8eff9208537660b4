"""`load`: what a configuration's `data` names, as a checked Dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mycelia.engine.config import Named
from mycelia.engine.data.builtin import breast_cancer, diabetes, digits, fashion_mnist, synthetic, wine
from mycelia.engine.data.examples import Dataset
from mycelia.engine.data.huggingface import load_hf
from mycelia.engine.data.idx import load_idx
from mycelia.engine.data.images import load_images
from mycelia.engine.data.npz import load_npz
from mycelia.engine.data.raw import Raw, assemble, standardise
from mycelia.engine.data.tables import load_arrow, load_csv, load_parquet
from mycelia.engine.data.torch_source import is_pair_of_arrays, to_raw
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.plugins import check_options, is_reference, nearest, resolve

__all__ = ["BUILTIN", "KINDS", "beside", "is_path", "load"]

BUILTIN: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "breast-cancer": breast_cancer,
    "wine": wine,
    "diabetes": diabetes,
    "synthetic": synthetic,
}

KINDS: dict[str, Callable[..., tuple[Raw, Raw | None]]] = {
    "npz": load_npz,
    "parquet": load_parquet,
    "csv": load_csv,
    "arrow": load_arrow,
    "images": load_images,
    "idx": load_idx,
    "hf": load_hf,
}


def is_path(spec: str) -> bool:
    """Whether a file or folder of this machine is named.

    >>> is_path("images:ward7/"), is_path("digits"), is_path("hf:mnist")
    (True, False, False)
    """
    kind, colon, path = spec.partition(":")
    return bool(colon and path) and kind in KINDS and kind != "hf"


def beside(data: Named, folder: Path) -> Named:
    """The same data with paths that do not depend on the current folder.

    Args:
        data: as a configuration names it.
        folder: that its paths are relative to.
    """
    kind, _, path = data.name.partition(":")
    name = f"{kind}:{folder / Path(path).expanduser()}" if is_path(data.name) else data.name
    options = dict(data.options)
    if isinstance(options.get("test"), str):
        options["test"] = str(folder / Path(options["test"]).expanduser())
    return Named(name=name, **options)


def load(spec: str, **options: Any) -> Dataset:
    """The data set that `spec` names.

    Args:
        spec: a built-in name (`digits`, `fashion-mnist`, `breast-cancer`, `wine`, `diabetes`, `synthetic`);
            `kind:path` (`npz`, `parquet`, `csv`, `arrow`, `images`, `idx`, `hf`); or
            `package.module:function`, which returns a Dataset, one set, or a pair of sets (train, test),
            each (inputs, targets) arrays, Examples or a PyTorch dataset.
        options: those of the built-in set, the kind's reader or the function. With `kind:path` also
            `test` (path of a test part), `classes` (their number; 0: regression) and `standardised`; with
            a function `classes`.

    Raises:
        ConfigError: unknown name, kind or option, or a missing optional library.
        DataError: data that is missing, malformed or out of range.

    >>> load("digits")
    Dataset('digits', train=Examples(inputs float32[1438, 1, 8, 8], targets int64[1438]), \
test=Examples(inputs float32[359, 1, 8, 8], targets int64[359]), classes=10)
    """
    kind, colon, path = spec.partition(":")
    who = f"data {spec!r}"
    if spec in BUILTIN:
        check_options(BUILTIN[spec], options, who)
        return BUILTIN[spec](**options)
    if colon and kind == "record":
        raise ConfigError(
            "record files are not available in this version", fix="use parquet, arrow or npz", who=who
        )
    if colon and kind in KINDS:
        return _load_files(spec, KINDS[kind], path, who, **options)
    if is_reference(spec):
        function = resolve(spec, kind="data")
        own = "classes" in inspect.signature(function).parameters
        classes = None if own else options.pop("classes", None)
        check_options(function, options, who)
        return _from_value(spec, function(**options), who, classes)
    raise ConfigError(
        f"no data kind is called {kind!r}" if colon else f"no data set is called {spec!r}",
        rule=f"one of {', '.join(BUILTIN)}; or kind:path with kind one of {', '.join(KINDS)}; "
        "or package.module:function",
        fix=nearest(kind, KINDS if colon else BUILTIN),
        who="data",
    )


def _load_files(
    spec: str,
    reader: Callable[..., tuple[Raw, Raw | None]],
    path: str,
    who: str,
    *,
    test: str = "",
    classes: int | None = None,
    standardised: bool = False,
    **options: Any,
) -> Dataset:
    if not path:
        raise ConfigError("has no path", rule="kind:path", who=who)
    check_options(reader, options, who, given=["path"])
    train, own_test = reader(Path(path).expanduser(), **options)
    if test:
        if own_test is not None:
            raise ConfigError("has a test part of its own", fix="leave test out", who=who)
        own_test, more = reader(Path(test).expanduser(), **options)
        if more is not None:
            raise ConfigError("the test path has a train and a test part", fix="name one part", who=who)
    dataset = assemble(spec, train, own_test, classes=classes)
    return standardise(dataset) if standardised else dataset


def _from_value(spec: str, value: Any, who: str, classes: int | None) -> Dataset:
    if isinstance(value, Dataset):
        return value
    if value is None:
        raise DataError("returned nothing", rule="a Dataset, a set or a pair (train, test)", who=who)
    if isinstance(value, tuple) and len(value) == 2 and not is_pair_of_arrays(value):
        return assemble(spec, to_raw(value[0], who), to_raw(value[1], who), classes=classes)
    return assemble(spec, to_raw(value, who), None, classes=classes)
