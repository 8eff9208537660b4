"""What went wrong inside PyTorch, said in terms of the user's model: module, source line, operator."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from types import FrameType

from torch import nn

from mycelia.engine.graph import is_library

__all__ = ["place_of", "reason_of"]


def place_of(error: Exception, model: nn.Module) -> tuple[str, str]:
    """The innermost module in which an error was raised, and the last line of user code."""
    paths = {id(module): path for path, module in model.named_modules()}
    where, line = type(model).__name__, ""
    for frame, number in _frames(error):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            where = f"{paths[id(owner)] or 'model'} ({type(owner).__name__})"
        if not is_library(frame.f_code.co_filename):
            text = linecache.getline(frame.f_code.co_filename, number).strip()
            line = f" at {frame.f_code.co_filename}:{number}: {text}"
    return where, line


def reason_of(error: Exception) -> str:
    """What PyTorch said, in one line that names the operator where that can be known."""
    lines = [part.strip() for part in str(error).splitlines() if part.strip()]
    first = lines[0] if lines else type(error).__name__
    if isinstance(error, SyntaxError) and error.text:  # an operator whose overload is a Python keyword
        return f"{first}: {error.text.strip()}"
    if (fixed := re.search(r"to be a constant \((\d+)\)", str(error))) is not None:
        return f"a loop over the batch, or a test of its size, fixes that to {fixed[1]}"
    if first.startswith("Constraints violated") and len(lines) > 1:
        return lines[1].removeprefix("- ")
    if "data-dependent" in first:
        return f"Python needs the value of a tensor (operator aten.item): {first}"
    return first


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames of an error from outside in, those of its causes after its own."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    if error.__cause__ is not None:
        yield from _frames(error.__cause__)
