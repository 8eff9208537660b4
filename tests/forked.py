"""Processes of tests are forked from one that has imported what they need, which takes seconds.

Python has one such process for all that ask, so that what it imports is said here, once for everybody. Only
tests that are about the start itself, or about the installed commands, begin with nothing.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

__all__ = ["context", "process"]

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "tests.e2e.chaos.warm",
        "tests.e2e.chaos.processes",
        "tests.aggregator.runs.killed_server",
        "tests.simulations.workers",
    ]
)


def context() -> ForkServerContext:
    """Of processes that are forked from the one that is prepared; it is there after this call."""
    before = os.environ.get("PYTHONPATH")
    # `tests` is found from any folder that a test is in, and beside what this process was told
    known = [str(Path(__file__).parents[1]), *([before] if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(known)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return _CONTEXT


def process(target: Callable[..., None], *arguments: object, daemon: bool = True) -> BaseProcess:
    """A process that has been started."""
    made: BaseProcess = context().Process(target=target, args=arguments, daemon=daemon)
    made.start()
    return made
