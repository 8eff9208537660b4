"""Captured zoo models, once a session, and what the tests of transforms share."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from mycelia.engine import structure
from mycelia.engine.capture import capture
from mycelia.engine.program import Program
from mycelia.engine.transforms.value_and_grad import Gradients
from tests.engine.zoo import ZOO

torch.set_num_threads(1)

# one of each kind; the others run with the long schedules
QUICK = ("mlp", "lenet", "attention", "dropout", "dictionary", "in-place", "frozen-trunk", "unused")


@functools.cache
def program_of(name: str) -> Program:
    case = ZOO[name]
    return capture(case.module(), case.loss, case.batch(3))


def models(names: Iterable[str] = tuple(ZOO), quick: Iterable[str] = QUICK) -> Any:
    """Parametrise over models: `quick` always, the rest as slow tests."""
    fast = set(quick)
    return pytest.mark.parametrize(
        "name", [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Same names, dtypes and shapes, and values within tolerance x (1 + |expected|)."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def same_gradients(found: Gradients, expected: Gradients, tolerance: float) -> None:
    close(found.grads, expected.grads, tolerance)
    close(found.buffers, expected.buffers, tolerance)
    torch.testing.assert_close(found.loss, expected.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.losses, expected.losses, rtol=tolerance, atol=tolerance)
    one, two = structure.flatten(found.outputs), structure.flatten(expected.outputs)
    assert one[1] == two[1]
    for mine, other in zip(one[0], two[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
