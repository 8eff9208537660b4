"""Encodings of small rounds, and clients that use them."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mycelia.engine.rng import generator
from mycelia.privacy.noise import NoiseSource
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.encoding import WEIGHT, Encoding
from mycelia.privacy.secagg.hadamard import padded
from mycelia.privacy.secagg.round_config import NoiseBlock, RoundConfig

SOURCE = NoiseSource.seeded(5)
Array = npt.NDArray[Any]

BASE = RoundConfig(
    job="test", round=3, attempt=0, nonce=bytes(range(32)), model_sha256=bytes(32), schema_sha256=bytes(32),
    task_sha256=bytes(32), roster_sha256=bytes(32), n_min=3, n_max=4, graph=0, k=3, threshold_rule=1, t=3,
    threat=0, corrupt_ppm=0, dropout_ppm=0, bits=32, dimension=5, slots=((WEIGHT, 1),), frac_bits=8,
    value_bound=1000, l2_steps=0, rotation=0, noise=NoiseBlock(), deadlines_ms=(1, 1, 1, 1, 1), seal=0,
)  # fmt: skip


def encoding(size: int, n: int = 4, **changes: Any) -> Encoding:
    cohort = {"n_max": n, "k": n - 1, "t": 2 * (n - 1) // 3 + 1}
    dimension = padded(size) if changes.get("rotation") else size
    return Encoding(replace(BASE, **{**cohort, "dimension": dimension, **changes}), size)


def encode(form: Encoding, vector: Array, weight: int = 1, client: int = 1, **slots: int) -> Any:
    stream = generator(0, "rounding", client=client)
    return form.encode(vector, weight, slots, client=client, rounding=stream, noise=SOURCE)


def add(form: Encoding, residues: list[Any]) -> Any:
    """The sum modulo 2**bits, in Python's whole numbers."""
    totals = np.sum([each.astype(object) for each in residues], axis=0) % 2**form.config.bits
    return totals.astype(residues[0].dtype)


def codes_of(form: Encoding, residues: Any) -> Array:
    return form.integers(residues)[len(form.config.slots) :]


class Bits(np.random.Philox):
    """Words that are given, and after them words of zeros; counts how often it was asked."""

    def __init__(self, *words: int) -> None:
        super().__init__(0)
        self.words, self.asked = list(words), 0

    def random_raw(self, size: int) -> Any:  # type: ignore[override]
        self.asked += 1
        word = self.words.pop(0) if self.words else 0
        return np.full(size, word, np.uint64)


def told(error: pytest.ExceptionInfo[SecureSumError], reason: Reason) -> SecureSumError:
    assert error.value.reason is reason
    return error.value
