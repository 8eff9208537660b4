"""What a model returns, taken apart into tensors and put together again by a plain JSON template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mycelia.engine.errors import CaptureError

__all__ = ["count", "flatten", "unflatten"]


def flatten(value: Any) -> tuple[list[Tensor], Any]:
    """The tensors of nested tuples, lists and mappings, in order, and a JSON template to rebuild them.

    Raises:
        CaptureError: anything else than these, None, numbers and strings.
    """
    leaves: list[Tensor] = []

    def walk(part: Any) -> Any:
        if isinstance(part, Tensor):
            leaves.append(part)
            return {"tensor": len(leaves) - 1}
        if isinstance(part, Mapping) and all(isinstance(key, str) for key in part):
            return {"dict": {key: walk(item) for key, item in part.items()}}
        if isinstance(part, tuple):
            return {"tuple": [walk(item) for item in part]}
        if isinstance(part, list):
            return {"list": [walk(item) for item in part]}
        if part is None or type(part) in (bool, int, float, str):
            return {"value": part}
        raise CaptureError(
            f"the model returns a {type(part).__name__}",
            rule="outputs are tensors in tuples, lists and dictionaries with string keys",
            fix="return the tensors of it",
            who="outputs",
        )

    template = walk(value)
    return leaves, template


def count(template: Any) -> int:
    """How many tensors a template places."""
    ((kind, content),) = template.items()
    if kind in ("dict", "tuple", "list"):
        return sum(count(item) for item in (content.values() if kind == "dict" else content))
    return int(kind == "tensor")


def unflatten(template: Any, leaves: Sequence[Any]) -> Any:
    """The inverse of `flatten`; a mapping comes back as a dictionary, a named tuple as a tuple."""
    ((kind, content),) = template.items()
    if kind == "tensor":
        return leaves[content]
    if kind == "dict":
        return {key: unflatten(item, leaves) for key, item in content.items()}
    if kind == "value":
        return content
    if kind not in ("tuple", "list"):
        raise ValueError(f"{kind!r} is no part of a template")
    parts = [unflatten(item, leaves) for item in content]
    return tuple(parts) if kind == "tuple" else parts
