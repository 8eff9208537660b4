"""Rounding and clipping against rational numbers and the law of coins."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mycelia.privacy.secagg.quantise import LARGEST, Quantiser, squared_norm
from tests.privacy.secagg.encodings import Bits, codes_of, encode, encoding


@pytest.mark.parametrize("place", [-999.75, -3.5, -0.001, 0.0, 0.25, 2.9, 511.0, 999.0625])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_unbiased(place: float, dtype: type) -> None:
    vector = np.full(100_000, place / 256, dtype)
    form = encoding(len(vector))
    codes = codes_of(form, encode(form, vector))
    exact = float(vector[0]) * 256
    low = math.floor(exact)
    assert set(np.unique(codes)) <= {low, low + 1}
    if exact == low:
        assert (codes == low).all()
    else:
        assert stats.binomtest(int((codes != low).sum()), len(codes), exact - low).pvalue > 1e-3
    # Neighbours share a word of random bits and must not share its bits.
    up = (codes != low).astype(float)
    half = len(up) // 16384 * 16384
    pairs = up[:half].reshape(-1, 2, 8192)
    if 0.1 < exact - low < 0.9:
        assert abs(np.corrcoef(pairs[:, 0].ravel(), pairs[:, 1].ravel())[0, 1]) < 4 / math.sqrt(half / 2)


@pytest.mark.parametrize(("bound", "drawn"), [(LARGEST, 9), (2**51, 10)])
def test_all_bits_together_give_the_number_itself(bound: int, drawn: int) -> None:
    """Over all values of the random bits a number is rounded up exactly as often as its fraction says."""
    numbers = np.array([0.5, 0.25, 3.125, -0.75, -7.5, 1 / 128, -1 / 128, 12345.0])
    total = np.zeros(len(numbers), np.int64)
    for value in range(2**drawn):
        word = value << (64 - drawn) | value << (32 - drawn)
        ((_, codes),) = Quantiser(0, bound).round(numbers, 1.0, np.random.Generator(Bits(word)))
        total += codes
    assert (total / 2**drawn).tolist() == numbers.tolist()


def test_both_ends_have_a_code_and_nothing_lies_beyond() -> None:
    top = 1000 / 256
    vector = np.array([top, -top, np.nextafter(top, 9), 1e300, -1e300])
    form = encoding(5)
    codes = codes_of(form, encode(form, vector))
    assert codes.tolist() == [1000, -1000, 1000, 1000, -1000]
    highest = np.random.Generator(Bits(*[2**64 - 1] * 9))
    ((_, codes),) = Quantiser(8, 1000).round(vector, 1.0, highest)
    assert codes.tolist() == [1000, -1000, 1000, 1000, -1000]
    assert encode(form, vector.astype(np.float64)).dtype == np.uint32


def test_towards_zero_keeps_the_clip_bound_itself() -> None:
    numbers = np.random.default_rng(4).normal(0, 3, 5000)
    ((_, codes),) = Quantiser(8, 1000).round(numbers, 1.0, None)
    assert np.array_equal(codes, np.trunc(np.clip(numbers * 256, -1000, 1000)))
    assert squared_norm(codes, 1000) <= (np.clip(numbers * 256, -1000, 1000) ** 2).sum()


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=40))
def test_norms_of_codes_are_exact(codes: list[int]) -> None:
    bound = max(1, *map(abs, codes))
    assert squared_norm(np.array(codes, np.int64), bound) == sum(code * code for code in codes)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=30), st.integers(1, 900))
def test_the_norm_is_clipped(values: list[float], steps: int) -> None:
    vector = np.array(values)
    factor = Quantiser(8, 1000).factor(vector, float(np.abs(vector).max()), steps)
    exact = sum(Fraction(value) ** 2 for value in values)
    bound = Fraction(steps, 256) ** 2
    assert 0 <= factor <= 1
    assert exact * Fraction(factor) ** 2 <= bound
    if exact <= bound * (1 - Fraction(1, 10**10)):
        assert factor == 1
    elif factor > 1e-300:
        assert exact * Fraction(factor) ** 2 >= bound * (1 - Fraction(1, 10**9))


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1.0, 1e200, 1.7e308])
def test_extreme_vectors_keep_their_direction(scale: float) -> None:
    vector = np.array([3.0, -4.0, 0.0, 0.0, 0.0]) / 5 * scale
    form = encoding(5, l2_steps=500)
    codes = codes_of(form, encode(form, vector))
    want = [300, -400, 0, 0, 0] if scale >= 1e200 else (vector * 256).tolist()
    assert np.abs(codes - np.array(want)).max() <= 1


def test_a_vector_of_zeros() -> None:
    form = encoding(5, l2_steps=500, rotation=1)
    assert not codes_of(form, encode(form, np.zeros(5))).any()
