"""The rotation against Hadamard's matrix and the cipher its signs come from."""

import math

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from scipy.linalg import hadamard

from mycelia.privacy.secagg.encoding import WEIGHT
from mycelia.privacy.secagg.hadamard import padded, rotate, unrotate
from tests.privacy.secagg.encodings import Array, add, codes_of, encode, encoding


def described_signs(key: bytes, *places: int) -> Array:
    """From the description and the cipher alone: bit i of the key stream, lowest first, is the sign of i."""
    size = max(places) // 8 + 1
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(size))
    return np.array([1 - 2 * (stream[place // 8] >> place % 8 & 1) for place in places])


@pytest.mark.parametrize("size", [1, 2, 4, 64, 2048])
def test_rotation_is_hadamards_matrix_after_signs(size: int) -> None:
    key = bytes(range(32))
    vector = np.random.default_rng(1).normal(size=size)
    rotated = vector.copy()
    rotate(rotated, key)
    expected = hadamard(size) @ (described_signs(key, *range(size)) * vector) / math.sqrt(size)
    assert rotated == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("size", [2**13, 2**14, 2**17, 2**20])
def test_rotation_of_long_vectors(size: int) -> None:
    key = bytes(32)
    for place in (0, 1, 8191, 8192 % size, size - 1, size // 3):
        vector = np.zeros(size)
        vector[place] = 1
        rotate(vector, key)
        # Column `place` of the matrix: the parity of the bits that row and column have in common.
        common = np.arange(size) & place
        parity = np.bitwise_count(common).astype(int) & 1
        (sign,) = described_signs(key, place)
        assert np.array_equal(np.sign(vector), sign * (1 - 2 * parity))
        assert np.abs(vector) == pytest.approx(size**-0.5)
        unrotate(vector, key)
        assert vector[place] == pytest.approx(1)
        assert np.abs(np.delete(vector, place)).max() < 1e-12


@pytest.mark.parametrize("size", [1, 3, 17, 5000, 20_000])
def test_a_rotated_sum(size: int) -> None:
    form = encoding(size, bits=40, frac_bits=16, value_bound=2**20, rotation=1, slots=((WEIGHT, 5),))
    assert form.config.dimension == padded(size) >= size
    vectors = np.random.default_rng(2).normal(0, 1, (3, size))
    weights = [5, 0, 2]
    residues = [
        encode(form, vector, weight, client)
        for client, (vector, weight) in enumerate(zip(vectors, weights, strict=True), 1)
    ]
    found = form.decode(add(form, residues), 3)
    assert found.values == pytest.approx(sum(form.values(codes_of(form, one)) for one in residues))
    # Each coordinate of the result is off by a root-mean-square of at most half a step a unit of weight.
    off = found.values - (5 * vectors[0] + 2 * vectors[2])
    assert np.abs(off).max() < 7 * 6 / 2**17
    assert found.mean.shape == (size,)


def test_the_signs_come_from_the_session() -> None:
    form = encoding(64, bits=40, frac_bits=16, value_bound=2**20, rotation=1)
    config = form.config
    info = b"sa1/rot" + bytes(17)
    key = HKDF(hashes.SHA256(), 32, config.session_id, info).derive(config.nonce)
    vector = np.random.default_rng(3).normal(size=64)
    expected = hadamard(64) @ (described_signs(key, *range(64)) * vector) / 8
    assert np.abs(codes_of(form, encode(form, vector)) / 2**16 - expected).max() <= 2**-16


def test_rotation_evens_out() -> None:
    vector = np.zeros(4096)
    vector[7] = 60.0  # 15 times the bound
    plain, rotated = encoding(4096), encoding(4096, rotation=1)
    assert plain.decode(encode(plain, vector), 1).values[7] == 1000 / 256
    assert rotated.decode(encode(rotated, vector), 1).values[7] == pytest.approx(60, abs=0.1)


def test_huge_numbers_do_not_become_none() -> None:
    form = encoding(5, rotation=1)
    assert np.isfinite(form.decode(encode(form, np.full(5, 1.7e308)), 1).values).all()
    vector = np.array([1e308, -1e308, 1e308, 0, 0])
    assert np.isfinite(form.decode(encode(form, vector), 1).values).all()
