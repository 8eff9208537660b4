"""What tests of whole simulations may share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mycelia.engine.program import Program
from mycelia.engine.recipe import Recipe
from mycelia.simulations.backends import workers
from tests import forked

_known: dict[str, Program] = {}


@pytest.fixture(scope="module")
def captured_once() -> Iterator[None]:
    """Each model is captured once for all files of tests that say so: a Program is never mutated."""
    capture = Recipe.__call__

    def recall(recipe: Recipe) -> Program:
        name = repr(recipe)
        if name not in _known:
            _known[name] = capture(recipe)
        return _known[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "__call__", recall)
        yield


@pytest.fixture(scope="package", autouse=True)
def _forked_workers() -> Iterator[None]:
    """Workers are forked, not spawned; the tests of the command itself spawn them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "get_context", lambda _: forked.context())
        yield
