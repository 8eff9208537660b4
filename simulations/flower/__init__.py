"""Flower beside Mycelia: a scenario as a Flower app, and Flower clients in a scenario.

| what | name |
|---|---|
| a scenario as `ServerApp` and `ClientApp` | `flower_apps` |
| the same in Flower's own simulation, from Python | `run_in_flower` |
| an existing `NumPyClient` as the algorithm of a scenario | `numpy_client` |

All of them need the extra `flower`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mycelia.engine.plugins import import_extra

if TYPE_CHECKING:
    from mycelia.simulations.flower.apps import flower_apps, run_in_flower
    from mycelia.simulations.flower.numpy_clients import NumPyClients, numpy_client

__all__ = ["NumPyClients", "flower_apps", "numpy_client", "run_in_flower"]

_HOMES = {
    "NumPyClients": "numpy_clients",
    "flower_apps": "apps",
    "numpy_client": "numpy_clients",
    "run_in_flower": "apps",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_extra("flwr", "flower", who="Flower")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
