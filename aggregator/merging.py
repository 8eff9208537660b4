"""From the sum of a round to the next model: what a simulation and a server do alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from mycelia.aggregator.effects import AbortReason
from mycelia.engine.algorithms import Algorithm, ServerState
from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.engine.plugins import user_code
from mycelia.engine.program import Program
from mycelia.engine.sums import ExactSum, Total
from mycelia.engine.types import Tensors
from mycelia.privacy.pipeline import Pipeline

__all__ = ["BLOCK", "Blocks", "MergeFailed", "merge", "not_finite"]

BLOCK: Final = 2**18
"""Coordinates that are merged at a time."""

Release = Callable[[int, Total, Tensors], None]
"""Called with the round's number, its sum and the public tensors, before the sum is noised and published."""


class MergeFailed(MyceliaError):
    """A sum that does not become a model; the old one stands.

    Attributes:
        reason: as the round has it.
    """

    def __init__(self, found: str, reason: AbortReason = "merge_failed") -> None:
        super().__init__(found, rule="a model that is not sound is never published", who="merge")
        self.reason: AbortReason = reason


def merge(
    program: Program,
    algorithm: Algorithm,
    state: ServerState,
    total: Total,
    *,
    pipeline: Pipeline,
    public: Tensors,
    round: int,
    release: Release | None = None,
) -> tuple[ServerState, Tensors]:
    """The server's halves of the pipeline, and then of the algorithm.

    Args:
        program: the model and its loss.
        algorithm: the algorithm.
        state: before the round; not changed.
        total: of the round.
        pipeline: what is done to the sum first.
        public: what its server halves keep from round to round.
        round: number of the round.
        release: see `Release`.

    Returns:
        The new state, and the public tensors of the next round.

    Raises:
        MergeFailed: weights that sum to zero, or a model that is not finite.
        ConfigError: the algorithm gives something else than a state.
    """
    if pipeline.serves:
        if release is not None:
            release(round, total, public)
        total, public = pipeline.server(total, public, round)
    elif total.count == 0:
        return state, public
    if not all(weight > 0 for weight in total.weights.values()):
        raise MergeFailed("the weights sum to zero", "zero_weight")
    with user_code(f"algorithm {algorithm.name}"):
        merged = algorithm.merge(program, state, total)
    if not isinstance(merged, ServerState):
        raise ConfigError(
            f"merge returned a {type(merged).__name__}",
            rule="merge returns a ServerState",
            who=f"algorithm {algorithm.name}",
        )
    if name := not_finite({"the parameters": merged.vector, **merged.buffers, **merged.extra}):
        raise MergeFailed(f"{name} of the merged model holds NaN or infinity; lower the learning rates")
    return merged, public


class Blocks:
    """A merge block by block: of a large model nothing is made as a whole but the new model itself.

    Iterate to the end; then `rest` is there.

    Args:
        program: the model and its loss.
        algorithm: one that `merges_by_coordinate`.
        state: before the round; not changed.
        exact: the sum of the round, of one update at least.

    Attributes:
        rest: the new state but for its vector, which is empty.

    Raises:
        MergeFailed: while iterating, as `merge`.
    """

    def __init__(self, program: Program, algorithm: Algorithm, state: ServerState, exact: ExactSum) -> None:
        self._program, self._algorithm, self._state, self._exact = program, algorithm, state, exact
        self._size = state.vector.numel()
        self.rest: ServerState

    def __iter__(self) -> Iterator[Tensor]:
        """The new vector's blocks, in order."""
        state, long = self._state, {n for n, t in self._state.extra.items() if t.numel() == self._size > 1}
        extra = {name: torch.empty_like(state.extra[name]) for name in long}
        last: ServerState | None = None
        for start in range(0, self._size, BLOCK):
            stop = min(start + BLOCK, self._size)
            ends = stop == self._size
            part = ServerState(
                state.vector[start:stop],
                state.buffers if ends else {},
                {name: t[start:stop] if name in long else t for name, t in state.extra.items()},
            )
            total = self._part(start, stop, buffers=ends)
            last, _ = merge(
                self._program, self._algorithm, part, total, pipeline=Pipeline(), public={}, round=0
            )
            for name in long:
                extra[name][start:stop] = last.extra[name]
            yield last.vector
        if last is None:
            raise MergeFailed("the model has no parameters")
        self.rest = replace(last, vector=torch.empty(0), extra=last.extra | extra)

    def _part(self, start: int, stop: int, *, buffers: bool) -> Total:
        form, accumulator = self._exact.form, self._exact.accumulator
        sums, weights = {}, {}
        for name, place in form.slices().items():
            size = place.stop - place.start
            if name in ("buffers", "counters") and not buffers:
                continue
            long = name == "params" or (size == self._size > 1 and name not in ("buffers", "counters"))
            first, end = (place.start + start, place.start + stop) if long else (place.start, place.stop)
            sums[name] = form.formats[name].decode(accumulator[first:end])
            weights[name] = float(form.weights.decode(accumulator[place.stop : place.stop + 1]))
        return Total(sums, weights, self._exact.count)


def not_finite(tensors: Mapping[str, Tensor]) -> str:
    """The first of these with a value that is NaN or infinite; or ""."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        low, high = torch.aminmax(tensor)  # NaN comes through both; five times faster than asking each entry
        if not math.isfinite(low) or not math.isfinite(high):
            return name
    return ""
