"""Ctrl-C that stops between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stop_on_signal"]


@contextmanager
def stop_on_signal(notice: Callable[[str], None] = lambda text: None) -> Iterator[Callable[[], bool]]:
    """Within the block, Ctrl-C and SIGTERM make the function it gives return true instead of raising.

    A second one raises `KeyboardInterrupt` as usual. Outside the main thread, where Python delivers no
    signals, the function always returns false.

    Args:
        notice: told once what the first signal does.
    """
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        notice("stopping after this step with a checkpoint; press Ctrl-C again to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
