"""What holds for every test."""

from __future__ import annotations

import os
import sys

import pytest

if "torch" in sys.modules:
    raise pytest.UsageError("torch is imported before its threads are counted")
os.environ["OMP_NUM_THREADS"] = (
    "1"  # sums of two threads are rounded otherwise than those of the one that devices have
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that differ from process to process: then the workers cannot share the tests."""
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{named[0]} holds an address; give its parameters ids")
