"""Nothing that a test starts outlives it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.chaos.processes import Processes, started
from tests.simulations.conftest import captured_once

__all__ = ["captured_once"]

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as both commands do; for the processes that tests start


@pytest.fixture
def processes() -> Iterator[Processes]:
    with started() as found:
        yield found
