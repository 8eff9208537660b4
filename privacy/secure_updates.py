"""Updates in a secure sum: how a client's terms lie in one vector and its slots, and back.

| what | where it travels |
|---|---|
| a term | in the vector: rounded to steps, times the client's weight |
| a term with a `grain` | in slots, as whole numbers of that |
| the weight of a term that has its own | in a slot |
| numbers for the report | in slots, with bounds of their own |

No slot is wider than the vector already is, so that none costs a bit of the ring. Under noise there are no
slots: they would carry none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.sums import Term, TermSpec, Total, Update
from mycelia.engine.types import Tensors
from mycelia.privacy.pipeline import Sent, Stage
from mycelia.privacy.secagg.encoding import CLIPPED

__all__ = ["SLOTS", "VECTOR", "Mask", "NoiseShares", "PackedShape", "Quantise"]

VECTOR, SLOTS = "vector", "slots"
"""The two terms of an update that is packed for a secure sum."""

_MOST_SLOTS: Final = 64
_PER_MILLE: Final = 1000
_LARGEST_LOSS: Final = 16.0
"""A mean loss in the report is cut off here."""

_METRICS: Final = ("loss_sum", "examples", "steps")


class PackedShape(NamedTuple):
    """What one packed update takes.

    Attributes:
        size: of the vector.
        slots: whole numbers beside the weight.
        double: whether the vector is float64, else float32.
    """

    size: int
    slots: int
    double: bool

    @property
    def nbytes(self) -> int:
        """Bytes of one update."""
        return self.size * (8 if self.double else 4) + 8 * (1 + self.slots)


@dataclass(frozen=True)
class Quantise(Stage):
    """Packs an update into one vector and whole numbers beside it, and unpacks their sum.

    The rounding itself is part of the encoding of a round (`privacy.secagg.encoding`), which knows the round.

    Attributes:
        specs: the terms; the first one's weight is the client's.
        weight_max: the largest weight, a whole number from 1.
        value_bound: Q, the steps to which each coordinate is clipped; bounds the slots as well.
        most_examples: the most examples that a client can train on in a round, repetitions included.
        private: whether the sum is noised: then weights are 1, and there are no slots.
        double: whether the vector is float64, else float32.

    Raises:
        ConfigError: the terms do not fit into a secure sum.
    """

    place: ClassVar[str] = "quantise"

    specs: Mapping[str, TermSpec]
    weight_max: int
    value_bound: int
    most_examples: int
    private: bool = False
    double: bool = False

    def __post_init__(self) -> None:
        if not self.size:
            raise ConfigError(
                f"nothing but {', '.join(self.specs)}",
                rule="a secure sum is of vectors",
                fix="take [secure_sum] out: no model is shared",
                who="secure_sum",
            )
        counted = [name for name, spec in self.specs.items() if spec.grain is not None]
        if self.private and counted:
            raise ConfigError(
                f"the term {counted[0]} travels beside the vector",
                rule="what is beside the vector carries no noise",
                fix="use an algorithm that sends nothing but the model, such as fedavg",
                who="secure_sum",
            )
        if 1 + len(self.bounds) > _MOST_SLOTS:
            raise ConfigError(
                f"{1 + len(self.bounds)} slots",
                rule=f"at most {_MOST_SLOTS}, one for each counter of the model",
                fix="use GroupNorm in the place of BatchNorm (mycelia.privacy.fix), or the algorithm fedbn",
                who="secure_sum",
            )

    # --- where everything lies ----------------------------------------------------------------------------

    @cached_property
    def parts(self) -> Mapping[str, slice]:
        """Where the terms lie in the vector."""
        parts, offset = {}, 0
        for name, spec in self.specs.items():
            if spec.grain is None:
                parts[name] = slice(offset, offset + spec.size)
                offset += spec.size
        return parts

    @cached_property
    def size(self) -> int:
        """Length of the vector."""
        return sum(spec.size for spec in self.specs.values() if spec.grain is None)

    @cached_property
    def bounds(self) -> Mapping[str, int]:
        """The slots and their bounds, in order; without the weight, which is the encoding's."""
        if self.private:
            return {}
        wide = self.weight_max * self.value_bound
        bounds: dict[str, int] = {}
        for name, spec in self.specs.items():
            if spec.grain is not None:
                bounds |= {f"{name}.{entry}": wide for entry in range(spec.size)}
            if spec.own_weight:
                bounds[f"weight.{name}"] = wide
        bounds |= dict.fromkeys((f"report.{name}" for name in _METRICS), wide)
        return bounds | {CLIPPED: _PER_MILLE}

    @cached_property
    def given(self) -> tuple[str, ...]:
        """The slots that a client fills, in order: all but the one that the encoding fills."""
        return tuple(name for name in self.bounds if name != CLIPPED)

    @property
    def _weight_bits(self) -> int:
        """A weight of a term's own is rounded to 2**-bits."""
        return self.value_bound.bit_length() - 1

    @property
    def _loss_bits(self) -> int:
        """The sum of a client's losses is rounded to 2**-bits."""
        room = self.weight_max * self.value_bound / (_LARGEST_LOSS * max(1, self.most_examples))
        return min(16, math.floor(math.log2(room)))

    @property
    def _count_bits(self) -> int:
        """Counts for the report are rounded to 2**-bits; 0 unless they outgrow the slot."""
        room = self.weight_max * self.value_bound / max(1, self.most_examples)
        return min(0, math.floor(math.log2(room)))

    # --- the device's half --------------------------------------------------------------------------------

    def device(self, update: Update, sent: Sent) -> Update:
        """The packed update: the term `VECTOR` with the client's weight, and `SLOTS`, whole numbers.

        Raises:
            DataError: a number is not finite or beyond its bound, or a weight is no whole number in bounds.
        """
        del sent
        if update.terms.keys() != self.specs.keys():
            raise DataError(
                f"terms {sorted(update.terms)}", rule=f"exactly {sorted(self.specs)}", who="update"
            )
        weight = self._weight(next(iter(update.terms.values())).weight)
        vector = torch.empty(self.size, dtype=torch.float64 if self.double else torch.float32)
        slots: dict[str, int] = {}
        for name, term in update.terms.items():
            spec = self.specs[name]
            values = _checked(name, term, spec)
            if not self.private and not spec.own_weight and term.weight != weight:
                raise ConfigError(
                    f"the term {name} has weight {term.weight}, and the client {weight}",
                    rule="terms have the client's weight, or are declared to have one of their own",
                    fix=f"give the TermSpec of {name} own_weight = True",
                    who="secure_sum",
                )
            if spec.own_weight:
                slots[f"weight.{name}"] = self._slot(
                    f"weight.{name}", math.ldexp(term.weight, self._weight_bits)
                )
            if spec.grain is None:
                ratio = term.weight if self.private else term.weight / weight
                part = vector[self.parts[name]]
                part.copy_(values if ratio == 1 else values.double() * ratio)
                continue
            for entry, value in enumerate(values.tolist()):
                slot = f"{name}.{entry}"
                slots[slot] = self._slot(slot, value * term.weight / spec.grain)
        if not self.private:
            slots |= self._report(update.metrics)
        packed = torch.tensor([slots[name] for name in self.given], dtype=torch.int64)
        terms = {VECTOR: Term(vector, float(weight)), SLOTS: Term(packed, 1.0)}
        return Update(terms, update.metrics)

    def _weight(self, given: float) -> int:
        if self.private:
            return 1
        if given != int(given) or not 1 <= given <= self.weight_max:
            raise DataError(  # what is refused stays hidden, too
                "a weight out of range",
                rule=f"a whole number from 1 to {self.weight_max}",
                fix="raise secure_sum.weight_max, or use weighting = 'uniform'",
                who="update",
            )
        return int(given)

    def _slot(self, name: str, value: float) -> int:
        bound = self.bounds[name]
        if not abs(value) <= bound:
            raise DataError(
                f"{name} out of range",
                rule=f"at most {bound} in size",
                fix="raise secure_sum.value_bound",
                who="update",
            )
        return round(value)

    def _report(self, metrics: Mapping[str, float]) -> dict[str, int]:
        """What the report sums; cut off at the bounds, since no model depends on it."""
        slots = {}
        for name in _METRICS:
            bits = self._loss_bits if name == "loss_sum" else self._count_bits
            value, bound = math.ldexp(metrics.get(name, 0.0), bits), self.bounds[f"report.{name}"]
            slots[f"report.{name}"] = (
                round(min(max(value, -bound), bound)) if not math.isnan(value) else bound
            )
        return slots

    # --- the server's half --------------------------------------------------------------------------------

    @staticmethod
    def opened(
        values: npt.NDArray[np.float64], weight: int, slots: Mapping[str, int], survivors: int
    ) -> Total:
        """An opened sum as the total of packed updates.

        Args:
            values: the sum of weight times vector, float64 [size].
            weight: the sum of the weights.
            slots: the sums of the slots, in their order.
            survivors: how many are in it.
        """
        whole = torch.tensor([*slots.values()], dtype=torch.int64)
        sums = {VECTOR: torch.from_numpy(np.ascontiguousarray(values)), SLOTS: whole}
        return Total(sums, {VECTOR: float(weight), SLOTS: float(survivors)}, survivors)

    def server(self, total: Total, public: Mapping[str, Tensor], round: int) -> tuple[Total, Tensors]:
        """The total of the terms, from that of packed updates."""
        del public, round
        vector, slots = total.sums[VECTOR], self._named(total)
        sums, weights = {}, {}
        for name, spec in self.specs.items():
            if spec.grain is None:
                sums[name] = vector[self.parts[name]]
            else:
                whole = [slots[f"{name}.{entry}"] for entry in range(spec.size)]
                sums[name] = torch.tensor(whole, dtype=torch.float64).mul_(spec.grain)
            weights[name] = total.weights[VECTOR]
            if spec.own_weight and not self.private:
                weights[name] = math.ldexp(slots[f"weight.{name}"], -self._weight_bits)
        return Total(sums, weights, total.count), {}

    def report(self, total: Total) -> dict[str, float]:
        """What the report sums, over the survivors; empty under noise.

        Args:
            total: of packed updates.

        Returns:
            loss_sum, examples, steps, and `clipped`: the share of coordinates that were cut off.
        """
        if self.private:
            return {}
        slots = self._named(total)
        found = {
            name: math.ldexp(
                slots[f"report.{name}"], -(self._loss_bits if name == "loss_sum" else self._count_bits)
            )
            for name in _METRICS
        }
        return found | {"clipped": slots[CLIPPED] / (_PER_MILLE * max(1, total.count))}

    def _named(self, total: Total) -> dict[str, int]:
        return dict(zip(self.bounds, total.sums[SLOTS].tolist(), strict=True))


@dataclass(frozen=True)
class NoiseShares(Stage):
    """Each client's share of the noise, which the encoding adds behind the rounding; see `secagg.noise`.

    Attributes:
        expected: the public number the sum is divided by.
    """

    place: ClassVar[str] = "device-noise"
    needs: ClassVar[tuple[str, ...]] = ("clip", "quantise")

    expected: float

    def server(self, total: Total, public: Mapping[str, Tensor], round: int) -> tuple[Total, Tensors]:
        """The sum with public weights: nothing in it tells how many came."""
        del public, round
        weights = dict.fromkeys(total.sums, self.expected)
        return Total(dict(total.sums), weights, max(1, int(self.expected))), {}


@dataclass(frozen=True)
class Mask(Stage):
    """What the two machines of a secure sum do between devices and server; it stands for them in the order.

    Attributes:
        masks: whether there are masks; the integers are the same without.
    """

    place: ClassVar[str] = "mask"
    needs: ClassVar[tuple[str, ...]] = ("quantise",)

    masks: bool


def _checked(name: str, term: Term, spec: TermSpec) -> Tensor:
    """A term's vector without its weight, which is finite and in bounds."""
    values = term.values if term.minus is None else term.values - term.minus
    array: npt.NDArray[Any] = values.numpy(force=True)
    if array.shape != (spec.size,):
        raise DataError(f"{name} has shape {array.shape}", rule=f"({spec.size},)", who=name)
    if array.size and not (array.min() >= -spec.max_abs and array.max() <= spec.max_abs):  # a NaN fails both
        index = int(np.argmin(np.abs(array) <= spec.max_abs))
        raise DataError(
            f"value {index} of {name} is out of range",
            rule=f"values are finite and |value| <= max_abs = {spec.max_abs}",
            fix="clip the update, lower the learning rate, or raise max_abs",
            who=name,
        )
    if not 0 < term.weight < math.inf:
        raise DataError(f"a weight of {name} out of range", rule="above 0 and finite", who=name)
    return values
