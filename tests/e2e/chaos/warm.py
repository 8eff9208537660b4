"""Imported by the process that the others come from: the usual model is captured there, once for all of them.

A capture takes seconds on a busy machine, and a device that is killed and started again makes one each time.
A Program is never mutated, so that those who have the same one have what each would have made.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from mycelia.engine.program import Program
from mycelia.engine.recipe import Recipe
from tests.e2e.chaos.federation import Federation, one_thread

_known: Final[dict[str, Program]] = {}
_capture: Final = Recipe.__call__


def _recall(recipe: Recipe) -> Program:
    name = repr(recipe)
    if name not in _known:
        _known[name] = _capture(recipe)
    return _known[name]


one_thread()
Recipe.__call__ = _recall  # type: ignore[method-assign]
with tempfile.TemporaryDirectory() as _folder:
    _ = Federation(Path(_folder), devices=1, rounds=1).undisturbed
