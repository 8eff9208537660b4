"""From a client's numbers to residues, and from the residues of a sum back to numbers.

A vector is clipped to an L2 norm, rotated if asked, clipped by coordinate, rounded at random to whole steps
of 2**-f, and multiplied by its weight, a whole number; then noise is added. The weight and other whole
numbers, the slots, stand in front of it. All travel modulo 2**m in two's complement. Whatever clients of a
round may send, the sum stays below half of 2**m, so the residue nearest to zero is the sum itself: that is
proven for the configuration, in whole numbers, before anything is encoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.hadamard import padded, rotate, unrotate
from mycelia.privacy.secagg.keys import kdf
from mycelia.privacy.secagg.masks import Words, word_type
from mycelia.privacy.secagg.noise import NoiseShare, rounded_norm
from mycelia.privacy.secagg.quantise import BLOCK, LARGEST, Quantiser, squared_norm
from mycelia.privacy.secagg.round_config import RoundConfig

if TYPE_CHECKING:
    from mycelia.privacy.noise import NoiseSource

__all__ = ["CLIPPED", "WEIGHT", "Decoded", "Encoding", "NoWrap", "no_wrap"]

WEIGHT: Final = "weight"
"""The name of slot 0; its bound is the largest weight."""

CLIPPED: Final = "clipped"
"""The name of a slot that the encoding fills: coordinates cut off, per mille of the vector, rounded up."""

_PER_MILLE = 1000

_Floats = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.int64]

_REDRAWS = 64
_HUGE = 2.0**500  # sums of so large numbers, and of their squares, might overflow


@dataclass(frozen=True)
class NoWrap:
    """That no sum of a round can wrap, in whole numbers.

    Attributes:
        needed_bits: the least m for which it holds.
        tail: T, the largest noise of one client that is reckoned with, in steps.
        probability: bound on the probability, for one round, that any noise is beyond T; 0 without noise.
    """

    needed_bits: int
    tail: int
    probability: float

    def check(self, bits: int) -> None:
        """Refuse a ring that is too small.

        Raises:
            SecureSumError: `OVERFLOW`, with the bits there are and the bits it needs.
        """
        if bits < self.needed_bits:
            fits = self.needed_bits <= 64
            raise SecureSumError(
                Reason.OVERFLOW,
                f"the sum needs {self.needed_bits} bits and has {bits}",
                rule="n_max · weight_max · (value_bound + 1 + tail) < 2^(bits-1), n_max · a slot's bound too",
                fix=f"bits = {self.needed_bits}" if fits else "lower value_bound, the weights or the noise",
                who="configuration",
                have=bits,
                need=self.needed_bits,
            )


def no_wrap(
    n_max: int, value_bound: int, bounds: Sequence[int], noise: NoiseShare | None, dimension: int
) -> NoWrap:
    """The bits that the largest sum of a round needs.

    >>> no_wrap(1024, 2**15, [255], None, 10).needed_bits
    34

    Args:
        n_max: clients at most.
        value_bound: Q, the largest code.
        bounds: of the slots, that of the weight first.
        noise: each client's, if any.
        dimension: d, coordinates of the vector.
    """
    tail, probability = (0, 0.0) if noise is None else noise.tail(n_max * dimension)
    largest = n_max * max(bounds[0] * (value_bound + 1 + tail), *bounds)
    return NoWrap(1 + largest.bit_length(), tail, probability)


@dataclass(frozen=True, eq=False)
class Decoded:
    """The sum of a round.

    Attributes:
        total: the sum of weight times code, exactly, int64 [d].
        weight: the sum of the weights, above 0.
        slots: the sums of the other slots, by name.
        values: the sum of weight times vector, float64 [size].
    """

    total: _Integers = field(repr=False)
    weight: int
    slots: Mapping[str, int]
    values: _Floats = field(repr=False)

    @property
    def mean(self) -> _Floats:
        """The weighted mean of the vectors, float64 [size]."""
        return self.values / self.weight


@dataclass(frozen=True)
class Encoding:
    """How the vectors of one round become residues; with or without masks the same.

    Attributes:
        config: of the round.
        size: coordinates of a vector before padding.

    Raises:
        SecureSumError: `OVERFLOW`: the sum could wrap. `CONFIG`: settings that contradict each other.
    """

    config: RoundConfig
    size: int

    def __post_init__(self) -> None:
        config, noise = self.config, self.noise
        expected = padded(self.size) if config.rotation else self.size
        bounds = dict(config.slots)
        if self.size < 1 or config.dimension != expected:
            raise _contradiction(
                f"a dimension of {config.dimension} for vectors of {self.size}",
                "the size of a vector, and under rotation the next power of two",
            )
        if not config.slots or config.slots[0][0] != WEIGHT:
            raise _contradiction(f"slots {list(bounds)}", f"slot 0 is {WEIGHT!r}")
        if bounds.get(CLIPPED, _PER_MILLE) < _PER_MILLE:
            raise _contradiction(
                f"a bound of {bounds[CLIPPED]} for {CLIPPED!r}", f"it is per mille: {_PER_MILLE}"
            )
        if noise is not None:
            if self.weight_max != 1:
                raise _contradiction(
                    f"noise and weights up to {self.weight_max}", "under noise weights are 1"
                )
            if len(bounds) > 1:
                raise _contradiction(
                    f"noise and slots {list(bounds)[1:]}", "slots carry no noise: under noise there are none"
                )
        self.proof.check(config.bits)

    @property
    def weight_max(self) -> int:
        """The largest weight."""
        return self.config.slots[0][1]

    @cached_property
    def noise(self) -> NoiseShare | None:
        """Each client's noise; None without."""
        return NoiseShare.of(self.config)

    @cached_property
    def proof(self) -> NoWrap:
        """That the sum cannot wrap."""
        config = self.config
        bounds = [bound for _, bound in config.slots]
        return no_wrap(config.n_max, config.value_bound, bounds, self.noise, config.dimension)

    @property
    def names(self) -> tuple[str, ...]:
        """The slots that a client gives to `encode`, in order."""
        return tuple(name for name, _ in self.config.slots[1:] if name != CLIPPED)

    @property
    def norm_limit(self) -> int:
        """The square of the largest L2 norm that codes may have, in steps.

        Under noise its root is the sensitivity to account: what rounding may make of the clip bound, and
        without a clip what the bound of each coordinate comes to.
        """
        config = self.config
        box = config.dimension * config.value_bound**2
        if not config.l2_steps:
            return box
        if self.noise is None:
            return min(box, config.l2_steps**2)
        return min(box, rounded_norm(config.l2_steps, config.dimension, config.noise.beta_ppb))

    def rdp(self, orders: Sequence[float], survivors: int) -> tuple[float, ...]:
        """Rényi divergences of the opened sum when one client's vector becomes zero; infinite without noise.

        Args:
            orders: each above 1.
            survivors: clients in the sum, at least `n_min`; the noise of those not corrupt counts.

        Raises:
            ConfigError: fewer survivors, or an order that is not above 1.
        """
        if self.noise is None:
            return (math.inf,) * len(orders)
        norm = math.nextafter(math.sqrt(self.norm_limit), math.inf)
        honest = survivors - self.config.noise.corrupt
        return self.noise.rdp(orders, norm, self.config.dimension, honest)

    # --- the client's half --------------------------------------------------------------------------------

    def encode(
        self,
        vector: npt.NDArray[Any],
        weight: int = 1,
        slots: Mapping[str, int] = MappingProxyType({}),
        *,
        client: int,
        rounding: np.random.Generator,
        noise: NoiseSource | None = None,
    ) -> Words:
        """One client's contribution, before masks.

        Args:
            vector: [size] numbers in float32 or float64, or codes in any integer dtype: whole steps that are
                neither clipped nor rotated, and refused beyond the bounds.
            weight: 0 to `weight_max`; 1 under noise.
            slots: a whole number for each of `names`, at most its bound in size.
            client: the client's id; with the session it names the noise.
            rounding: a stream of `mycelia.engine.rng.generator`, for this client and round.
            noise: the secret of the noise; without noise in the round it is not used.

        Returns:
            uint32 (up to 32 bits) or uint64 [slots + d], each below 2**bits.

        Raises:
            SecureSumError: `INVALID_INPUT`: not finite, another dtype or length, beyond a bound.
            ConfigError: noise without a secret, or random bits of another generator.
        """
        config = self.config
        if self.noise is not None and noise is None:
            raise ConfigError("no source of noise", rule="the round adds noise", who="secure sum")
        if not isinstance(rounding.bit_generator, np.random.Philox):
            raise ConfigError(
                f"rounding by {type(rounding.bit_generator).__name__}",
                rule="a named stream",
                fix="take mycelia.engine.rng.generator",
                who="secure sum",
            )
        head = self._head(vector, weight, slots)
        out = np.empty(config.length, word_type(config.bits))
        body = out[len(head) :]
        if vector.dtype.kind in "iu":
            self._take(vector, weight, body)
        else:
            floats, factor = self._clipped(vector)
            if CLIPPED in head:
                beyond = self._quantiser.cut_off(floats, factor)
                head[CLIPPED] = -(-_PER_MILLE * beyond // len(floats))
            self._round(floats, factor, weight, body, rounding)
        out[: len(head)] = [value % 2**config.bits for value in head.values()]
        if self.noise is not None and noise is not None:
            self.noise.add(body, noise, config.round, f"{config.session_id.hex()} {client}")
        _reduce(out, config.bits)
        return out

    def _head(self, vector: npt.NDArray[Any], weight: int, slots: Mapping[str, int]) -> dict[str, int]:
        """The slots; refuses what can be seen without the numbers of the vector."""
        known = isinstance(vector, np.ndarray) and (
            vector.dtype in (np.float32, np.float64) or vector.dtype.kind in "iu"
        )
        if not known:
            raise _invalid(
                f"a vector of {getattr(vector, 'dtype', type(vector).__name__)}",
                "a NumPy array of float32, float64 or integers",
            )
        if vector.shape != (self.size,):
            raise _invalid(f"a vector of shape {vector.shape}", f"shape ({self.size},)")
        if set(slots) != set(self.names):
            raise _invalid(f"slots {sorted(slots)}", f"exactly {sorted(self.names)}")
        least = 0 if self.noise is None else 1
        head = {}
        for name, bound in self.config.slots:
            value = {WEIGHT: weight, CLIPPED: 0, **slots}[name]
            low = least if name == WEIGHT else -bound
            if (
                isinstance(value, bool)
                or not isinstance(value, int | np.integer)
                or not low <= value <= bound
            ):
                raise _invalid(f"a {name} of {value!r}", f"a whole number from {low} to {bound}")
            head[name] = int(value)
        return head

    def _take(self, vector: npt.NDArray[Any], weight: int, body: Words) -> None:
        """Codes as they are."""
        bound, square = self.config.value_bound, 0
        if self.config.rotation:
            raise _invalid("integers", "numbers that are rotated are floating point")
        if max(int(vector.max()), -int(vector.min())) > bound:
            raise _invalid("a code beyond the bound", f"codes are from -{bound} to {bound}")
        for start in range(0, self.size, BLOCK):
            codes = vector[start : start + BLOCK].astype(np.int64)
            if self.config.l2_steps:
                square += squared_norm(codes, bound)
            codes *= weight
            body[start : start + BLOCK] = codes
        if square > self.norm_limit:
            raise _invalid("codes of too large a norm", f"L2 norms up to the root of {self.norm_limit}")

    def _clipped(self, vector: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], float]:
        """The vector, rotated if asked, and the factor that clips its norm."""
        config = self.config
        if config.value_bound > LARGEST:
            raise _invalid("floating-point numbers", f"codes, since value_bound is above {LARGEST}")
        with np.errstate(invalid="ignore"):
            low, high = float(vector.min()), float(vector.max())
        if not -math.inf < low <= high < math.inf:  # a NaN fails every comparison
            index = int(np.argmin(np.isfinite(vector)))
            raise _invalid(f"coordinate {index} is {vector[index]}", "numbers are finite")
        factor = 1.0
        if config.l2_steps:
            factor = self._quantiser.factor(vector, max(high, -low), config.l2_steps)
        return (self._rotated(vector, factor), 1.0) if config.rotation else (vector, factor)

    def _rotated(self, vector: npt.NDArray[Any], factor: float) -> _Floats:
        turned = np.zeros(self.config.dimension)
        turned[: self.size] = vector
        turned *= factor
        np.clip(turned, -_HUGE, _HUGE, out=turned)
        rotate(turned, self._rotation_key)
        return turned

    @property
    def _rotation_key(self) -> bytes:
        return kdf(self.config.nonce, self.config.session_id, "sa1/rot", 0, 0)

    @property
    def _quantiser(self) -> Quantiser:
        return Quantiser(self.config.frac_bits, self.config.value_bound)

    def _round(
        self,
        floats: npt.NDArray[Any],
        factor: float,
        weight: int,
        body: Words,
        rounding: np.random.Generator,
    ) -> None:
        """Conditional rounding: drawn again while the norm is above the limit, in the end towards zero."""
        conditional = self.noise is not None and self.config.l2_steps > 0
        attempts: list[np.random.Generator | None] = [rounding] * (1 + _REDRAWS) + [None]
        for attempt in attempts:
            square = 0
            for start, codes in self._quantiser.round(floats, factor, attempt):
                if conditional:
                    square += squared_norm(codes, self.config.value_bound)
                if weight != 1:
                    np.multiply(codes, weight, out=codes)
                body[start : start + len(codes)] = codes
            if square <= self.norm_limit:
                return

    # --- the server's half --------------------------------------------------------------------------------

    def integers(self, residues: Words) -> _Integers:
        """The whole numbers that residues stand for, slots first, int64 [slots + d].

        Raises:
            ConfigError: another dtype or length.
        """
        config = self.config
        if residues.dtype != word_type(config.bits) or residues.shape != (config.length,):
            raise ConfigError(
                f"{residues.dtype} of shape {residues.shape}",
                rule=f"{word_type(config.bits)} of shape ({config.length},)",
                who="secure sum",
            )
        whole = residues.astype(np.int64)
        if config.bits < 64:  # the highest bit of a residue becomes the sign
            whole <<= 64 - config.bits
            whole >>= 64 - config.bits
        return whole

    def decode(self, residues: Words, clients: int) -> Decoded:
        """The sum that residues stand for.

        Args:
            residues: the sum of what `encode` gave, modulo 2**bits.
            clients: how many were added, 1 to n_max.

        Raises:
            SecureSumError: `SUM_OUT_OF_RANGE`: no clients that encode as they should have this sum.
                `EMPTY_WEIGHT`: all weights are 0.
            ConfigError: another dtype or length, or another number of clients.
        """
        config = self.config
        if not 1 <= clients <= config.n_max:
            raise ConfigError(f"{clients} clients", rule=f"1 to n_max = {config.n_max}", who="secure sum")
        whole = self.integers(residues)
        count = len(config.slots)
        total = whole[count:]
        slots = {name: int(value) for (name, _), value in zip(config.slots, whole, strict=False)}
        for name, bound in config.slots:
            if not (0 if name == WEIGHT else -clients * bound) <= slots[name] <= clients * bound:
                raise _out_of_range(f"the sum of {name!r} is beyond what {clients} clients may send")
        weight = slots.pop(WEIGHT)
        bound = weight * config.value_bound + clients * self.proof.tail
        if int(total.max()) > bound or int(total.min()) < -bound:
            raise _out_of_range(f"a coordinate is beyond what {clients} clients of weight {weight} may send")
        if weight == 0:
            raise SecureSumError(
                Reason.EMPTY_WEIGHT,
                "all weights are 0",
                rule="a mean needs a weight",
                fix="give at least one client of the cohort a weight above 0",
            )
        return Decoded(total, weight, MappingProxyType(slots), self.values(total))

    def values(self, total: _Integers) -> _Floats:
        """What codes or their sums stand for, int64 [d] to float64 [size]; exact up to 2**53, unrotated."""
        values = total.astype(np.float64)
        values *= 2.0**-self.config.frac_bits
        if not self.config.rotation:
            return values
        unrotate(values, self._rotation_key)
        return values[: self.size].copy()


def _reduce(words: Words, bits: int) -> None:
    if bits < 8 * words.itemsize:
        words &= words.dtype.type(2**bits - 1)


def _contradiction(found: str, rule: str) -> SecureSumError:
    return SecureSumError(Reason.CONFIG, found, rule=rule, who="configuration")


def _invalid(found: str, rule: str) -> SecureSumError:
    return SecureSumError(Reason.INVALID_INPUT, found, rule=rule, who="update", phase="masked")


def _out_of_range(found: str) -> SecureSumError:
    return SecureSumError(
        Reason.SUM_OUT_OF_RANGE,
        found,
        rule="the sum stays inside the proven bound",
        fix="a client broke the encoding; the sum is worthless",
    )
