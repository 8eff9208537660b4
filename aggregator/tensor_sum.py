"""The one sum of a round's plain updates, to which payloads are added block by block.

A payload is looked at from its first block to its last before one of them is added, so an update is in the
sum whole or not at all, and nothing of a model's size is made on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.offers import Buffer
from mycelia.aggregator.wire.payload import BLOCK_BYTES, Layout, Place, block_of, expected
from mycelia.engine.errors import ConfigError
from mycelia.engine.fixedpoint import FixedPoint
from mycelia.engine.schema import Entry, Role, Schema
from mycelia.engine.sums import ExactSum

__all__ = ["Columns", "TensorSum"]

_ONE: Final = torch.ones(1, dtype=torch.float64)
_TERMS: Final[Mapping[Role, str]] = {
    Role.PARAMETER: "params",
    Role.BUFFER: "buffers",
    Role.COUNTER: "counters",
}


class _Part(NamedTuple):
    """How one tensor, or neighbours that lie side by side wherever they are, go into the sum.

    Attributes:
        entries: the tensors.
        tensor: all of them as one, flat.
        number: of the first in the payload.
        term: the term they are part of.
        start: of the first entry in the sum's vector.
        fixed: the term's format.
        dtype: in which differences are taken.
        old: where the old values lie, if the term is a difference.
        normed: whether it counts for the norm.
    """

    entries: tuple[Entry, ...]
    tensor: Entry
    number: int
    term: str
    start: int
    fixed: FixedPoint
    dtype: torch.dtype
    old: Place | None
    normed: bool

    def place(self, layout: Layout) -> Place:
        """Where it lies in a payload, whose tensors have no gaps between them."""
        return Place(
            self.tensor, layout.places[self.number].start, self.tensor.numel * self.tensor.dtype.itemsize
        )

    def with_next(self, other: _Part) -> _Part | None:
        """Both as one, or None if they do not lie side by side or are treated differently."""
        same = (self.term, self.tensor.dtype, self.dtype, self.normed, self.old is None)
        if same != (other.term, other.tensor.dtype, other.dtype, other.normed, other.old is None):
            return None
        size = self.tensor.numel + other.tensor.numel
        tensor = replace(self.tensor, shape=(size,))
        if other.start != self.start + self.tensor.numel:
            return None
        old = None
        if self.old is not None and other.old is not None:
            if other.old.start != self.old.start + self.old.size:
                return None
            old = Place(tensor, self.old.start, self.old.size + other.old.size)
        return self._replace(entries=(*self.entries, *other.entries), tensor=tensor, old=old)

    def named(self, at: int) -> str:
        """The tensor of an entry, for messages."""
        for entry in self.entries:
            if at < entry.numel:
                return entry.name[:64]
            at -= entry.numel
        return self.tensor.name[:64]


class Columns(NamedTuple):
    """A block of columns of every update.

    Attributes:
        term: the term they are of.
        start: the first of them, within the term.
        values: [updates, columns], what each update would add for weight 1.
    """

    term: str
    start: int
    values: Tensor


class TensorSum:
    """One exact sum, to which payloads of tensors are added block by block.

    The bits are those of `ExactSum.add` with the terms that the algorithms make: parameters, buffers and
    counters as differences from the model that was sent, whatever else an algorithm sends as it is.

    Args:
        exact: the sum.
        schema: of the model, without what clients keep to themselves.
        roles: those that are sent.
        more: what the algorithm sends beside the model, each named as its term.
        base: the payload of the model that was sent.
        layout: of `base`.
        max_norm: largest Euclidean norm of the parameters' difference; None for any.

    Raises:
        ConfigError: the tensors are not those of the sum, or the model lacks one.
    """

    def __init__(
        self,
        exact: ExactSum,
        schema: Schema,
        roles: Iterable[Role],
        more: Iterable[Entry] = (),
        *,
        base: Buffer,
        layout: Layout,
        max_norm: float | None = None,
    ) -> None:
        if max_norm is not None and not 0 < max_norm < math.inf:
            raise ConfigError(f"max_norm is {max_norm}", rule="above 0 and finite, or None", who="sum")
        self.exact, self._base, self._max_norm = exact, base, max_norm
        olds = {place.entry.name: place for place in layout.places}
        parameters = [place.entry for place in layout.places if place.entry.role is Role.PARAMETER]
        vector = torch.float32
        for entry in parameters:  # neighbours of several dtypes are one vector of the widest
            vector = torch.promote_types(vector, entry.dtype)
        more = tuple(more)
        beside = {entry.name for entry in more}
        filled = dict.fromkeys(exact.form.specs, 0)
        slices = exact.form.slices()
        self._parts: list[_Part] = []
        for index, entry in enumerate(expected(schema, roles, more)):
            own = entry.name in beside
            term = entry.name if own else _TERMS[entry.role]
            if term not in filled or not (own or entry.name in olds):
                raise ConfigError(
                    f"tensor {entry.name!r}",
                    rule="it has a term in the sum and a place in the model",
                    who="sum",
                )
            normed = not own and entry.role is Role.PARAMETER
            dtype = vector if normed else torch.promote_types(entry.dtype, vector) if own else torch.float64
            fixed, old = exact.form.formats[term], None if own else olds[entry.name]
            start = slices[term].start + filled[term]
            flat = replace(entry, shape=(entry.numel,))
            part = _Part((entry,), flat, index, term, start, fixed, dtype, old, normed)
            both = self._parts[-1].with_next(part) if self._parts else None
            self._parts[-1:] = [both] if both is not None else [*self._parts[-1:], part]
            filled[term] += entry.numel
        for term, spec in exact.form.specs.items():
            if filled[term] != spec.size:
                raise ConfigError(
                    f"{filled[term]} entries for the term {term!r}", rule=f"{spec.size}", who="sum"
                )

    def fold(self, data: Buffer, layout: Layout, weights: Mapping[str, float]) -> Iterator[None]:
        """Add a payload whole, or not at all; exhaust it, and begin no other one before.

        Args:
            data: the payload.
            layout: of it, from `check_tensors`.
            weights: of each term, positive and at most the sum's largest.

        Yields:
            after each block of `BLOCK_BYTES`, first while they are looked at, then while they are added.

        Raises:
            Problem: `WEIGHT`; `NONFINITE` with the tensor; `BAD_PAYLOAD`: a value beyond the bound of its
                term, or a norm beyond the limit. The sum is as it was.
        """
        form = self.exact.form
        if weights.keys() != form.specs.keys():
            raise _refused(Reason.WEIGHT, f"weights of {sorted(weights)}", f"of {sorted(form.specs)}")
        for term, weight in weights.items():
            if not 0 < weight <= form.weights.max_weight:
                rule = f"above 0 and at most {form.weights.max_weight:g}"
                raise _refused(Reason.WEIGHT, f"the weight of {term!r} is {weight}", rule)
        yield from self._look(data, layout)
        for part in self._parts:
            for first, new, old in self._blocks(data, part, layout):
                total = self.exact.accumulator[part.start + first : part.start + first + len(new)]
                if old is None:
                    part.fixed.add_(total, new, weights[part.term])
                else:
                    part.fixed.add_difference_(total, new, old, weights[part.term])
                yield
        for term, entries in form.slices().items():
            form.weights.add_(self.exact.accumulator[entries.stop : entries.stop + 1], _ONE, weights[term])
        self.exact.count += 1

    def columns(self, payloads: Sequence[tuple[Buffer, Layout]]) -> Iterator[Columns]:
        """What every payload would add, column block by column block, for rules that need them all.

        Args:
            payloads: each with its layout; all have passed `check_finite`.
        """
        starts = {term: entries.start for term, entries in self.exact.form.slices().items()}
        for part in self._parts:
            places = [part.place(layout) for _, layout in payloads]
            count = part.tensor.numel if places else 0
            step = max(1, BLOCK_BYTES // (part.dtype.itemsize * max(1, len(payloads))))
            for first in range(0, count, step):
                size = min(step, count - first)
                values = torch.empty(len(payloads), size, dtype=part.dtype)
                old = None if part.old is None else block_of(self._base, part.old, first, size).to(part.dtype)
                for row, (data, _), place in zip(values, payloads, places, strict=True):
                    row.copy_(block_of(data, place, first, size))
                    if old is not None:
                        row.sub_(old)
                yield Columns(part.term, part.start + first - starts[part.term], values)

    def _look(self, data: Buffer, layout: Layout) -> Iterator[None]:
        squares = 0.0
        for part in self._parts:
            for first, new, old in self._blocks(data, part, layout):
                change = new if old is None else new - old
                largest = float(change.abs().max())
                if not largest <= part.fixed.max_abs:  # a NaN fails every comparison
                    wrong = ~(change.abs() <= part.fixed.max_abs)
                    name = part.named(first + int(wrong.to(torch.uint8).argmax()))
                    if not bool(torch.isfinite(new).all()):
                        found = f"tensor {name!r} holds NaN or infinity"
                        raise _refused(Reason.NONFINITE, found, "every value is finite")
                    found = f"tensor {name!r} moved by {largest:g}"
                    raise _refused(Reason.BAD_PAYLOAD, found, f"by at most {part.fixed.max_abs:g}")
                if part.normed and self._max_norm is not None:
                    squares += float(change.double().square_().sum())
                yield
        if self._max_norm is not None and not math.sqrt(squares) <= self._max_norm:
            found = f"an update of norm {math.sqrt(squares):g}"
            raise _refused(Reason.BAD_PAYLOAD, found, f"at most {self._max_norm:g}")

    def _blocks(
        self, data: Buffer, part: _Part, layout: Layout
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        place = part.place(layout)
        step = BLOCK_BYTES // place.entry.dtype.itemsize
        for first in range(0, place.entry.numel, step):
            size = min(step, place.entry.numel - first)
            new = block_of(data, place, first, size).to(part.dtype)
            old = None if part.old is None else block_of(self._base, part.old, first, size).to(part.dtype)
            yield first, new, old


def _refused(reason: Reason, found: str, rule: str) -> Problem:
    fix = "lower the learning rate, or clip the update"
    return Problem(reason, found, rule=rule, fix="" if reason is Reason.WEIGHT else fix, who="update")
