"""The configuration of a round: all that a session is about, in whole numbers, and the hash that names it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import Any, ClassVar, Final, Self

from mycelia.privacy.secagg.canonical import (
    HASH_BYTES,
    HEAD_BYTES,
    MAX_TEXT,
    PHASES,
    Field,
    Reader,
    Reason,
    SecureSumError,
    struct,
)

__all__ = [
    "MAX_COHORT", "MAX_CONFIG_BYTES", "MAX_SLOTS", "Graph", "Mechanism", "NoiseBlock", "RoundConfig", "Seal",
    "Threat", "ThresholdRule",
]  # fmt: skip

MAX_COHORT: Final = 2**15
MAX_SLOTS: Final = 64
MAX_CONFIG_BYTES: Final = 2**15
"""More than the longest job, slots and names come to."""


class Graph(IntEnum):
    """Who shares with whom."""

    COMPLETE = 0
    RING = 1


class ThresholdRule(IntEnum):
    """How the threshold follows from the number of neighbours."""

    FIXED = 0
    TWO_THIRDS = 1


class Threat(IntEnum):
    """The server that clients guard against: one that looks, or one that lies."""

    PASSIVE = 0
    ACTIVE = 1


class Mechanism(IntEnum):
    """The noise that clients add."""

    NONE = 0
    SKELLAM = 1
    DISCRETE_GAUSSIAN = 2


class Seal(IntEnum):
    """The cipher that shares are sealed with."""

    AES_GCM = 0
    CHACHA20_POLY1305 = 1


@dataclass(frozen=True)
class NoiseBlock:
    """The noise that the survivors' sum must hold; all zero without noise.

    Attributes:
        mechanism: see `Mechanism`.
        variance: of the noise in the sum, in squared steps.
        corrupt: how many clients are assumed to add none.
        beta_ppb: the bias of conditional rounding, in parts per billion.
    """

    mechanism: int = Mechanism.NONE
    variance: int = 0
    corrupt: int = 0
    beta_ppb: int = 0


_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "version": (1, 1),
    "round": (0, 2**63 - 1),
    "attempt": (0, 2**32 - 1),
    "n_min": (3, MAX_COHORT),
    "n_max": (3, MAX_COHORT),
    "graph": (0, max(Graph)),
    "k": (2, MAX_COHORT - 1),
    "threshold_rule": (0, max(ThresholdRule)),
    "t": (0, MAX_COHORT - 1),
    "threat": (0, max(Threat)),
    "corrupt_ppm": (0, 10**6),
    "dropout_ppm": (0, 10**6),
    "bits": (8, 64),
    "dimension": (1, 2**40),
    "frac_bits": (0, 62),
    "value_bound": (1, 2**62),
    "l2_steps": (0, 2**63 - 1),
    "rotation": (0, 1),
    "seal": (0, max(Seal)),
}
_NOISE_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "mechanism": (0, max(Mechanism)),
    "variance": (0, 2**63 - 1),
    "corrupt": (0, MAX_COHORT),
    "beta_ppb": (0, 10**9 - 1),
}
_SLOT_BOUND = (1, 2**62)
_DEADLINE = (1, 2**32 - 1)
_HASHES: Final = ("nonce", "model_sha256", "schema_sha256", "task_sha256", "roster_sha256")


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """Everything a session is about, in whole numbers; its hash is the session.

    Well formed when made: ranges, 3 ≤ n_min ≤ n_max, 2 ≤ t ≤ k < n_max and 2t > k hold. That the numbers are
    also safe for the assumed corruption, and that the sum cannot wrap, is for whoever joins to prove.

    Attributes:
        version: of the protocol, 1.
        job: the run's name, 1 to 256 bytes.
        round: from 0.
        attempt: of the round, from 0.
        nonce: 32 bytes from the server, fresh for each session.
        model_sha256: of the model's bytes as sent.
        schema_sha256: of its layout.
        task_sha256: of the algorithm and its local settings.
        roster_sha256: see `mycelia.privacy.secagg.roster.Roster.sha256`.
        n_min: the fewest clients whose sum may be opened, at least 3.
        n_max: the most clients.
        graph: see `Graph`.
        k: neighbours of each client: n_max − 1 on a complete graph, even on a ring unless that is n_max − 1.
        threshold_rule: see `ThresholdRule`.
        t: shares that rebuild a secret; under two-thirds ⌊2k/3⌋ + 1 of the k written here.
        threat: see `Threat`.
        corrupt_ppm: assumed share of corrupt clients, parts per million.
        dropout_ppm: assumed share of clients that vanish, parts per million.
        bits: m, the sum is taken mod 2**m, 8 to 64.
        dimension: d, coordinates of the vector after padding, without the slots.
        slots: (name, bound) of each whole number that travels with the vector, the weight first.
        frac_bits: f, a step is 2**−f.
        value_bound: Q, the largest code of one coordinate, in steps.
        l2_steps: bound on a vector's Euclidean norm in steps, 0 for none.
        rotation: 1 if vectors are rotated.
        noise: see `NoiseBlock`.
        deadlines_ms: of the five phases.
        seal: see `Seal`.

    Raises:
        SecureSumError: `CONFIG`, or `WEAK_PARAMETERS` for k and t that are unsafe whatever is assumed.
    """

    version: int = 1
    job: str
    round: int
    attempt: int
    nonce: bytes
    model_sha256: bytes
    schema_sha256: bytes
    task_sha256: bytes
    roster_sha256: bytes
    n_min: int
    n_max: int
    graph: int
    k: int
    threshold_rule: int
    t: int
    threat: int
    corrupt_ppm: int
    dropout_ppm: int
    bits: int
    dimension: int
    slots: tuple[tuple[str, int], ...]
    frac_bits: int
    value_bound: int
    l2_steps: int
    rotation: int
    noise: NoiseBlock
    deadlines_ms: tuple[int, int, int, int, int]
    seal: int

    TAG: ClassVar[str] = "SA1/config"

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            _whole(name, getattr(self, name), low, high)
        if not isinstance(self.noise, NoiseBlock):
            raise _refused("noise", self.noise, "a NoiseBlock")
        for name, (low, high) in _NOISE_RANGES.items():
            _whole(f"noise {name}", getattr(self.noise, name), low, high)
        _text("job", self.job)
        for name in _HASHES:
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != HASH_BYTES:
                raise _refused(name, value, f"{HASH_BYTES} bytes")
        self._check_slots()
        if not isinstance(self.deadlines_ms, tuple) or len(self.deadlines_ms) != len(PHASES):
            raise _refused("deadlines_ms", self.deadlines_ms, f"{len(PHASES)} whole numbers, one a phase")
        for value in self.deadlines_ms:
            _whole("deadlines_ms", value, *_DEADLINE)
        if self.n_min > self.n_max:
            raise _refused("n_min", self.n_min, f"at most n_max, {self.n_max}")
        self._check_noise()
        self._check_neighbours()

    def _check_slots(self) -> None:
        if not isinstance(self.slots, tuple) or len(self.slots) > MAX_SLOTS:
            raise _refused("slots", self.slots, f"a tuple of at most {MAX_SLOTS} pairs")
        for slot in self.slots:
            if not isinstance(slot, tuple) or len(slot) != 2:
                raise _refused("slots", slot, "pairs of a name and a bound")
            _text("slot name", slot[0])
            _whole(f"bound of slot {slot[0]}", slot[1], *_SLOT_BOUND)
        if len({name for name, _ in self.slots}) != len(self.slots):
            raise _refused("slots", [name for name, _ in self.slots], "each name once")

    def _check_noise(self) -> None:
        noise = self.noise
        if noise.mechanism == Mechanism.NONE:
            if noise != NoiseBlock():
                raise _refused("noise", noise, "without noise its other numbers are 0")
        elif noise.variance == 0:
            raise _refused("noise variance", 0, "noise has a variance")
        elif self.n_min <= noise.corrupt:
            raise _refused("n_min", self.n_min, f"above the {noise.corrupt} clients assumed to add no noise")

    def _check_neighbours(self) -> None:
        if self.graph == Graph.COMPLETE and self.k != self.n_max - 1:
            raise _refused("k", self.k, f"on a complete graph n_max - 1, {self.n_max - 1}")
        if self.k > self.n_max - 1 or (self.k % 2 and self.k != self.n_max - 1):
            raise _refused("k", self.k, f"on a ring even and at most n_max - 1, {self.n_max - 1}")
        if self.threshold_rule == ThresholdRule.TWO_THIRDS and self.t != self.threshold(self.n_max):
            raise _refused("t", self.t, f"under two-thirds {self.threshold(self.n_max)} for k = {self.k}")
        if not 2 <= self.t <= self.k < 2 * self.t:
            raise SecureSumError(
                Reason.WEAK_PARAMETERS,
                f"t is {self.t} of k = {self.k} neighbours",
                rule="2 ≤ t ≤ k and 2t > k, or both secrets of a client could be opened",
                who="configuration",
                field="t",
                asked=str(self.t),
                allowed=f"{max(2, self.k // 2 + 1)} to {self.k}",
            )

    def degree(self, n: int) -> int:
        """Neighbours of each client, in a cohort of n."""
        return min(self.k, n - 1)

    def threshold(self, n: int) -> int:
        """Shares that rebuild a secret, in a cohort of n; it may exceed `degree(n)` if n is too small."""
        if self.threshold_rule == ThresholdRule.TWO_THIRDS:
            return 2 * self.degree(n) // 3 + 1
        return self.t

    @property
    def length(self) -> int:
        """Elements of the masked vector: dimension and slots."""
        return self.dimension + len(self.slots)

    @property
    def upload_bytes(self) -> int:
        """Bytes of the packed masked vector."""
        return (self.length * self.bits + 7) // 8

    def encode(self) -> bytes:
        """Canonical bytes, the body of the message `Config`."""
        noise = self.noise
        values: list[Field] = [
            [noise.mechanism, noise.variance, noise.corrupt, noise.beta_ppb]
            if field.name == "noise"
            else getattr(self, field.name)
            for field in fields(self)
        ]
        return struct(self.TAG, *values)

    @cached_property
    def session_id(self) -> bytes:
        """SHA-256 of the canonical bytes; keys, hashes and signatures of the session are bound to it."""
        return hashlib.sha256(self.encode()).digest()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what `encode` wrote.

        Raises:
            SecureSumError: `CONFIG` or `WEAK_PARAMETERS`.
        """
        reader = Reader(data, cls.TAG, MAX_CONFIG_BYTES, Reason.CONFIG)
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = field.name
            if name == "job":
                values[name] = reader.text()
            elif name in _HASHES:
                values[name] = reader.hash()
            elif name == "slots":
                values[name] = tuple(_slot(reader) for _ in range(reader.count(MAX_SLOTS, 2 * HEAD_BYTES)))
            elif name == "noise":
                block = reader.integers(len(_NOISE_RANGES))
                if len(block) != len(_NOISE_RANGES):
                    raise reader.error(f"a noise block of {len(block)}", rule=f"{len(_NOISE_RANGES)} numbers")
                values[name] = NoiseBlock(*block)
            elif name == "deadlines_ms":
                values[name] = reader.integers(len(PHASES))
            else:
                values[name] = reader.integer()
        reader.end()
        return cls(**values)


def _slot(reader: Reader) -> tuple[str, int]:
    if reader.count(2, 0) != 2:
        raise reader.error("a slot without name and bound")
    return reader.text(), reader.integer()


def _refused(name: str, value: object, rule: str) -> SecureSumError:
    found = f"{name} is {value!r}" if len(repr(value)) <= MAX_TEXT else f"{name} is too long"
    return SecureSumError(Reason.CONFIG, found, rule=rule, who="configuration")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refused(name, value, f"a whole number from {low} to {high}")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value.encode()) <= MAX_TEXT:
        raise _refused(name, value, f"printable text of 1 to {MAX_TEXT} bytes")
