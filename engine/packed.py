"""Packed sequences under export: lengths are data there, so that steps are masked and not left out.

`pack_padded_sequence` sorts a batch by length and gives tensors whose size depends on the lengths: neither
has a graph, and both mix the examples. While a model is traced, a packed sequence keeps all its T steps and
remembers the lengths. The recurrent layers run their cells step by step, and an example whose sequence has
ended, or from behind has not begun, keeps its state.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode

from mycelia.engine.errors import CaptureError
from mycelia.engine.recurrent import gru_step, lstm_step

__all__ = ["packed_sequences"]

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State], State]


@contextlib.contextmanager
def packed_sequences(model: nn.Module) -> Iterator[None]:
    """A context in which the model can be traced though it packs sequences.

    Args:
        model: its recurrent layers do not check the size of a state while the context lasts, a check that
            would fix the size of the batch.

    Raises:
        CaptureError: `pad_packed_sequence` without a `total_length`, or with one below the padded length.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    if not layers:
        yield
        return
    for layer in layers:
        vars(layer)["check_forward_args"] = _unchecked
    try:
        with _Packing():
            yield
    finally:
        for layer in layers:
            del vars(layer)["check_forward_args"]


def _unchecked(*_: Any) -> None:
    pass


class _Packing(TorchFunctionMode):
    """Keeps the order of the batch, and packs without leaving anything out."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.sort and _caller() is pack_padded_sequence.__code__:
            lengths = args[0]
            return lengths, torch.arange(lengths.shape[0], device=lengths.device)
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            return _packed(*args)
        return func(*args, **(kwargs or {}))


def _caller() -> CodeType | None:
    """The function that called an operator, past the modes that see the call first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _packed(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, _Lengths]:
    value = padded if batch_first else padded.transpose(0, 1)
    steps = _Lengths(lengths, value.shape[1])
    # what lies behind the end of a sequence is never looked at, NaN included
    value = torch.where(_like(steps.alive, value), value, torch.zeros_like(value))
    # a copy, as a view would fix the size of the batch
    return value.clone(memory_format=torch.contiguous_format).reshape(-1, *value.shape[2:]), steps


def _like(alive: Tensor, value: Tensor) -> Tensor:
    return alive.reshape(*alive.shape, *[1] * (value.dim() - 2))


@dataclass(frozen=True)
class _Lengths:
    """Stands for the `batch_sizes` of a packed sequence, whose data is [B * steps, ...].

    Attributes:
        lengths: steps of each example [B].
        steps: T, the padded length.
    """

    lengths: Tensor
    steps: int
    device = torch.device("cpu")

    @property
    def alive(self) -> Tensor:
        """Which steps the examples have [B, T]."""
        return torch.arange(self.steps, device=self.lengths.device) < self.lengths[:, None]

    def of_steps(self, data: Tensor) -> Tensor:
        """The data of a packed sequence as [B, T, ...]."""
        return data.reshape(self.lengths.shape[0], self.steps, *data.shape[1:])

    def size(self, axis: int) -> int:
        """The length of the longest sequence is not known: none at all, see `_padded`."""
        return 0

    def __getitem__(self, step: int) -> Any:
        return self.lengths.shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "_pad_packed_sequence":
            return _padded(*args)
        if name in _STEPS:
            return _run(_STEPS[name], *args)
        return NotImplemented


def _padded(
    data: Tensor, lengths: _Lengths, batch_first: bool, filler: float, length: int
) -> tuple[Tensor, Tensor]:
    if length < lengths.steps:
        raise CaptureError(
            f"pad_packed_sequence with total_length={length or None}",
            rule="the longest sequence of a batch decides the length of all: it depends on other examples",
            fix=f"pad_packed_sequence(..., total_length={lengths.steps}), the length before packing, or more",
            who="pad_packed_sequence",
        )
    value = lengths.of_steps(data)
    value = torch.where(_like(lengths.alive, value), value, torch.full_like(value, filler))
    behind = (*[0, 0] * (value.dim() - 2), 0, length - lengths.steps)
    value = F.pad(value, behind, value=filler)
    return value if batch_first else value.transpose(0, 1), lengths.lengths


def _lstm(weights: Sequence[Tensor], bias: bool) -> Step:
    w_hh, b_hh = weights[1], weights[3] if bias else None
    w_hr = weights[-1] if len(weights) in (3, 5) else None
    return lambda gates, state: lstm_step(gates, (state[0], state[1]), w_hh, b_hh, w_hr)


def _gru(weights: Sequence[Tensor], bias: bool) -> Step:
    return lambda gates, state: (gru_step(gates, state[0], weights[1], weights[3] if bias else None),)


def _rnn(bend: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Tensor], bool], Step]:
    def step(weights: Sequence[Tensor], bias: bool) -> Step:
        b_hh = weights[3] if bias else None
        return lambda gates, state: (bend(gates + F.linear(state[0], weights[1], b_hh)),)

    return step


_STEPS: dict[str, Callable[[Sequence[Tensor], bool], Step]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn(torch.tanh),
    "rnn_relu": _rnn(torch.relu),
}


def _run(
    cell: Callable[[Sequence[Tensor], bool], Step],
    data: Tensor,
    lengths: _Lengths,
    states: Tensor | State,
    weights: Sequence[Tensor],
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
) -> tuple[Tensor, ...]:
    """`torch.lstm` and its like on a packed sequence: the outputs, then the last states."""
    first = states if isinstance(states, tuple) else (states,)
    ways = 2 if both_ways else 1
    each = len(weights) // (layers * ways)
    value, alive = lengths.of_steps(data), lengths.alive
    last: list[State] = []
    for layer in range(layers):
        found = []
        for way in range(ways):
            number = layer * ways + way
            own = weights[each * number : each * (number + 1)]
            gates = F.linear(value, own[0], own[2] if bias else None)
            outputs, state = _over_time(
                cell(own, bias), gates, alive, tuple(s[number] for s in first), way == 1
            )
            found.append(outputs)
            last.append(state)
        value = torch.cat(found, -1)
        if dropout and training and layer + 1 < layers:
            value = F.dropout(value, dropout)
    return value.reshape(-1, value.shape[-1]), *(torch.stack(parts) for parts in zip(*last, strict=True))


def _over_time(
    step: Step, gates: Tensor, alive: Tensor, state: State, backwards: bool
) -> tuple[Tensor, State]:
    """Outputs [B, T, p] and the last state; where an example has no step, its state stays."""
    outputs: list[Tensor] = []
    times = range(gates.shape[1])
    for t in reversed(times) if backwards else times:
        new = step(gates[:, t], state)
        state = tuple(torch.where(alive[:, t, None], *pair) for pair in zip(new, state, strict=True))
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), state
