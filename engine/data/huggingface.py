"""Hugging Face datasets that `save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mycelia.engine.data.raw import Raw
from mycelia.engine.data.tables import table_to_raw
from mycelia.engine.errors import DataError
from mycelia.engine.plugins import import_extra

__all__ = ["load_hf"]


def load_hf(
    path: Path, *, target: str = "", client: str = "", inputs: str | Sequence[str] = ""
) -> tuple[Raw, Raw | None]:
    """A dataset, or its splits `train` and `test` (or `validation`); options as `table_to_raw`.

    Raises:
        ConfigError: the library is not installed (extra `hf`), or no such column.
        DataError: not a saved dataset, or without a `train` split.
    """
    who = str(path)
    if not path.is_dir():
        raise DataError("no such folder", fix=f"looked for {path.absolute()}", who=who)
    datasets = import_extra("datasets", "hf", who=who)
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # damaged files raise from JSON, Arrow or the library itself
        raise DataError(f"cannot be read: {error}", rule="a folder of save_to_disk", who=who) from error
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    if "train" not in splits:
        raise DataError(f"has splits {', '.join(splits)}", rule="one is called train", who=who)
    test = splits.get("test", splits.get("validation"))

    def raw(split: Any) -> Raw:
        # Taken through the library, which knows of filtered and shuffled rows.
        table = split.with_format("arrow")[:]
        names = {
            column: tuple(feature.names)
            for column, feature in split.features.items()
            if isinstance(feature, datasets.ClassLabel)
        }
        chosen = target or (next(reversed(names)) if len(names) == 1 else "")
        return table_to_raw(
            table, who, target=chosen, client=client, inputs=inputs, class_names=names.get(chosen, ())
        )

    return raw(splits["train"]), None if test is None else raw(test)
