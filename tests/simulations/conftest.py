"""What tests of whole simulations may share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mycelia.engine.program import Program
from mycelia.engine.recipe import Recipe


@pytest.fixture(scope="module")
def captured_once() -> Iterator[None]:
    """Each model is captured once for a file of tests: a Program is never mutated."""
    known: dict[str, Program] = {}
    capture = Recipe.__call__

    def recall(recipe: Recipe) -> Program:
        name = repr(recipe)
        if name not in known:
            known[name] = capture(recipe)
        return known[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "__call__", recall)
        yield
