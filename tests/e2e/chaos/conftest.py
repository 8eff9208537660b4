"""Nothing that a test starts outlives it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.e2e.chaos.processes import Processes, started


@pytest.fixture
def processes() -> Iterator[Processes]:
    with started() as found:
        yield found


def is_free(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0
