"""Programs, data, training and federated algorithms: what runs without a network.

What makes a Program is `mycelia.engine.capture.capture`. Names below are imported when they are first used,
so that `mycelia.engine.errors` costs no import of PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mycelia.engine.graph import Pass, show
    from mycelia.engine.program import Forward, Program
    from mycelia.engine.schema import Entry, Role, Schema, model_sha256
    from mycelia.engine.transforms.microbatch import microbatch
    from mycelia.engine.transforms.over_clients import over_clients
    from mycelia.engine.transforms.peak_memory import peak_memory
    from mycelia.engine.transforms.precision import precision
    from mycelia.engine.transforms.value_and_grad import Gradients, value_and_grad
    from mycelia.engine.types import Tensors

__all__ = [
    "Entry",
    "Forward",
    "Gradients",
    "Pass",
    "Program",
    "Role",
    "Schema",
    "Tensors",
    "microbatch",
    "model_sha256",
    "over_clients",
    "peak_memory",
    "precision",
    "show",
    "value_and_grad",
]

# a name that is also a module here (capture, verify) is left out: it would be one or the other by chance
_HOMES = {
    "Entry": "schema",
    "Forward": "program",
    "Gradients": "transforms.value_and_grad",
    "Pass": "graph",
    "Program": "program",
    "Role": "schema",
    "Schema": "schema",
    "Tensors": "types",
    "microbatch": "transforms.microbatch",
    "model_sha256": "schema",
    "over_clients": "transforms.over_clients",
    "peak_memory": "transforms.peak_memory",
    "precision": "transforms.precision",
    "show": "graph",
    "value_and_grad": "transforms.value_and_grad",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
