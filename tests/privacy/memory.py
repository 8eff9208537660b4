"""What a call takes of the allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["peak"]


def peak(function: Callable[[], Any]) -> int:
    """The most bytes that were allocated at a time while the function ran, above those before it."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        kept = function()
    del kept
    events: Any = found.profiler
    changes = [(e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        most = max(most, held)
    assert most > 0 or not torch.is_grad_enabled(), "the profiler saw nothing"
    return most
