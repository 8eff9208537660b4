"""The encoding against whole-number arithmetic."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import generator
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.encoding import CLIPPED, WEIGHT, Encoding, no_wrap
from mycelia.privacy.secagg.round_config import Mechanism, NoiseBlock
from tests.privacy.secagg.encodings import add, codes_of, encode, encoding, told

SKELLAM, GAUSSIAN = Mechanism.SKELLAM, Mechanism.DISCRETE_GAUSSIAN


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Encoding, list[tuple[list[float], int, int]]]:
    n = draw(st.integers(3, 9))
    bound, weight = draw(st.integers(1, 2 ** draw(st.integers(0, 34)))), draw(st.integers(1, 300))
    slot = draw(st.integers(1, 2**20))
    needed = 1 + max(n * weight * (bound + 1), n * slot).bit_length()
    bits = draw(st.integers(max(8, needed), 64))
    size = draw(st.integers(1, 12))
    frac = draw(st.integers(0, 40))
    form = encoding(
        size, n, bits=bits, slots=((WEIGHT, weight), ("loss", slot)), frac_bits=frac, value_bound=bound
    )
    top = 2.0 * bound / 2.0**frac
    values = st.lists(st.floats(-top, top), min_size=size, max_size=size)
    clients = st.tuples(values, st.integers(0, weight), st.integers(-slot, slot))
    return form, draw(st.lists(clients, min_size=1, max_size=n))


@given(rounds())
def test_the_sum_decodes_to_the_sum_of_what_each_decodes_to(
    case: tuple[Encoding, list[tuple[list[float], int, int]]],
) -> None:
    form, clients = case
    assume(any(weight for _, weight, _ in clients))
    residues = [
        encode(form, np.array(values), weight, client, loss=loss)
        for client, (values, weight, loss) in enumerate(clients, 1)
    ]
    each = [codes_of(form, one) for one in residues]
    assert all(one.max() < 2**form.config.bits for one in residues)
    found = form.decode(add(form, residues), len(clients))
    assert found.total.tolist() == np.sum([one.astype(object) for one in each], axis=0).tolist()
    parts = [list(map(Fraction, form.values(one))) for one in each]
    if max(abs(int(value)) for value in found.total) < 2**53:  # above, float64 rounds
        assert list(map(Fraction, found.values)) == [sum(column) for column in zip(*parts, strict=True)]
    assert found.weight == sum(weight for _, weight, _ in clients)
    assert found.slots == {"loss": sum(loss for _, _, loss in clients)}


@given(rounds())
def test_the_weighted_mean_is_right_to_a_step(
    case: tuple[Encoding, list[tuple[list[float], int, int]]],
) -> None:
    form, clients = case
    weights = [weight for _, weight, _ in clients]
    assume(any(weights) and form.config.value_bound < 2**30)
    residues = [encode(form, np.array(v), w, i, loss=0) for i, (v, w, _) in enumerate(clients, 1)]
    mean = form.decode(add(form, residues), len(clients)).mean
    limit = Fraction(form.config.value_bound, 2**form.config.frac_bits)
    for index, value in enumerate(mean):
        cut = [min(max(Fraction(values[index]), -limit), limit) for values, _, _ in clients]
        exact = sum(w * x for w, x in zip(weights, cut, strict=True)) / sum(weights)
        # One step, and what the division in float64 rounds.
        assert abs(Fraction(value) - exact) < Fraction(1, 2**form.config.frac_bits) * (1 + Fraction(1, 2**16))


@pytest.mark.parametrize("bits", range(8, 65))
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sum_fits_and_one_step_more_is_refused(bits: int, sign: int) -> None:
    bound = (2 ** (bits - 1) - 1) // 7 - 1
    form = encoding(2, 7, bits=bits, value_bound=bound, slots=((WEIGHT, 1),))
    assert form.proof.needed_bits == bits
    residues = [encode(form, np.full(2, sign * bound), client=i) for i in range(1, 8)]
    assert form.decode(add(form, residues), 7).total.tolist() == [7 * sign * bound] * 2
    with pytest.raises(SecureSumError) as error:
        encoding(2, 7, bits=bits, value_bound=bound + 1)
    assert told(error, Reason.OVERFLOW).need == bits + 1
    assert error.value.have == bits


def test_needed_bits_of_known_cohorts() -> None:
    assert no_wrap(255, 2**15, [1], None, 10).needed_bits == 24
    assert no_wrap(1024, 2**15, [1], None, 10).needed_bits == 27
    assert no_wrap(1024, 2**15, [255], None, 10).needed_bits == 34


def test_a_slot_can_need_the_most_bits() -> None:
    assert no_wrap(4, 1, [1, 2**40], None, 10).needed_bits == 1 + 43
    with pytest.raises(SecureSumError) as error:
        encoding(5, slots=((WEIGHT, 1), ("examples", 2**40)))
    assert told(error, Reason.OVERFLOW).need == 44


@pytest.mark.parametrize("size", [1, 2, 16383, 16384, 16385, 40001])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_block_is_rounded_to_a_neighbour(size: int, dtype: type) -> None:
    vector = np.random.default_rng(size).uniform(-3.9, 3.9, size).astype(dtype)
    form = encoding(size)
    codes = codes_of(form, encode(form, vector))
    assert np.abs(codes - vector.astype(np.float64) * 256).max() < 1
    assert size < 100 or len(np.unique(codes)) > 100
    assert np.array_equal(codes, codes_of(form, encode(form, vector)))  # same stream, same codes


def test_codes_go_through_unchanged() -> None:
    codes = np.array([1000, -1000, 0, 7, -1], np.int16)
    form = encoding(5, slots=((WEIGHT, 9),))
    for dtype in (np.int16, np.int32, np.int64, np.dtype(">i4")):
        residues = encode(form, codes.astype(dtype), 3)
        assert codes_of(form, residues).tolist() == (3 * codes.astype(int)).tolist()
    assert codes_of(form, encode(form, np.array([0, 1, 2, 1000, 5], np.uint64), 0)).tolist() == [0] * 5


def test_codes_keep_to_the_norm_too() -> None:
    form = encoding(2, l2_steps=5)
    assert codes_of(form, encode(form, np.array([3, 4]))).tolist() == [3, 4]
    with pytest.raises(SecureSumError) as error:
        encode(form, np.array([3, 5]))
    told(error, Reason.INVALID_INPUT)


def test_the_share_of_clipped_coordinates_travels_in_its_slot() -> None:
    form = encoding(3000, slots=((WEIGHT, 1), (CLIPPED, 1000), ("loss", 7)))
    assert form.names == ("loss",)
    vector = np.zeros(3000)
    assert form.decode(encode(form, vector, loss=2), 1).slots == {CLIPPED: 0, "loss": 2}
    vector[5] = 4.0
    assert form.decode(encode(form, vector, loss=-2), 1).slots == {CLIPPED: 1, "loss": -2}
    vector[:1500] = -4.0
    assert form.decode(encode(form, vector, loss=-2), 1).slots[CLIPPED] == 500
    with pytest.raises(SecureSumError) as error:
        encode(form, vector, loss=1, clipped=3)
    told(error, Reason.INVALID_INPUT)


@pytest.mark.parametrize(
    "vector",
    [
        np.array([0.0, 1.0, math.nan, 0.0, 0.0]),
        np.array([0.0, 1.0, math.inf, 0.0, 0.0], np.float32),
        np.array([0.0, 1.0, -math.inf, math.nan, 0.0]),
        np.zeros(5, np.float16),
        np.zeros(5, complex),
        np.zeros(5, bool),
        np.zeros(5, object),
        np.zeros(5, ">f8"),
        [0.0] * 5,
        np.zeros(4),
        np.zeros(6),
        np.zeros((1, 5)),
        np.zeros(0),
        np.array([0, 0, 0, 0, 1001]),
        np.array([0, 0, 0, 0, -1001]),
        np.array([0, 0, 0, 0, 2**64 - 1], np.uint64),
        np.array([0, 0, 0, 0, -(2**63)]),
    ],
)
def test_a_vector_that_is_none(vector: Any) -> None:
    with pytest.raises(SecureSumError) as error:
        encode(encoding(5), vector)
    assert told(error, Reason.INVALID_INPUT).phase == "masked"


@pytest.mark.parametrize("weight", [-1, 256, True, 1.0, "1", None, np.float64(1)])
def test_a_weight_that_is_none(weight: Any) -> None:
    with pytest.raises(SecureSumError) as error:
        encode(encoding(5, slots=((WEIGHT, 255),)), np.zeros(5), weight)
    told(error, Reason.INVALID_INPUT)


@pytest.mark.parametrize(
    "slots", [{}, {"loss": 8}, {"loss": -8}, {"loss": 1.0}, {"loss": 1, "other": 1}, {"loss": 1, WEIGHT: 1}]
)
def test_slots_that_do_not_fit(slots: Mapping[str, Any]) -> None:
    form = encoding(5, slots=((WEIGHT, 1), ("loss", 7)))
    with pytest.raises(SecureSumError) as error:
        form.encode(np.zeros(5), 1, slots, client=1, rounding=generator(0, "rounding"))
    told(error, Reason.INVALID_INPUT)


def test_numbers_that_no_code_is_for() -> None:
    with pytest.raises(SecureSumError) as error:
        encode(encoding(5, rotation=1), np.zeros(5, int))
    told(error, Reason.INVALID_INPUT)
    with pytest.raises(SecureSumError) as error:
        encode(encoding(5, bits=64, value_bound=2**53), np.zeros(5))
    told(error, Reason.INVALID_INPUT)
    form = encoding(5, bits=64, value_bound=2**53)
    assert codes_of(form, encode(form, np.full(5, 2**53))).tolist() == [2**53] * 5


def test_random_bits_come_from_a_named_stream() -> None:
    with pytest.raises(ConfigError, match="named stream"):
        encoding(5).encode(np.zeros(5), client=1, rounding=np.random.Generator(np.random.MT19937(0)))


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": ()},
        {"slots": (("examples", 3),)},
        {"slots": (("examples", 3), (WEIGHT, 1))},
        {"slots": ((WEIGHT, 1), (CLIPPED, 999))},
        {"dimension": 6},
        {"dimension": 4},
        {"rotation": 1, "dimension": 5},
        {"rotation": 1, "dimension": 16},
        {"noise": NoiseBlock(SKELLAM, 100, 0, 0), "slots": ((WEIGHT, 2),)},
        {"noise": NoiseBlock(SKELLAM, 100, 0, 0), "slots": ((WEIGHT, 1), ("examples", 2))},
        {"noise": NoiseBlock(GAUSSIAN, 1, 0, 0), "n_min": 5, "n": 5},  # less than a quarter of a step² each
        {"noise": NoiseBlock(SKELLAM, 2**62, 0, 0)},
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any]) -> None:
    with pytest.raises(SecureSumError) as error:
        encoding(5, **changes)
    told(error, Reason.CONFIG)


def test_sums_out_of_range() -> None:
    form = encoding(5, slots=((WEIGHT, 3), ("loss", 7)))
    good = add(form, [encode(form, np.full(5, 4.0), 3, loss=7), encode(form, np.full(5, -4.0), 2, loss=-7)])
    assert form.decode(good, 2).total.tolist() == [1000] * 5
    for place, value in [(0, 7), (0, -1), (1, 15), (1, -15), (2, 5001), (6, -5001), (3, 2**31)]:
        bad = good.copy()
        bad[place] = value % 2**32
        with pytest.raises(SecureSumError) as error:
            form.decode(bad, 2)
        told(error, Reason.SUM_OUT_OF_RANGE)
    with pytest.raises(SecureSumError) as error:
        form.decode(good, 1)  # more than one client can have sent
    told(error, Reason.SUM_OUT_OF_RANGE)


def test_a_sum_of_no_weight() -> None:
    form = encoding(5, slots=((WEIGHT, 3),))
    empty = add(form, [encode(form, np.ones(5), 0), encode(form, np.ones(5), 0)])
    with pytest.raises(SecureSumError) as error:
        form.decode(empty, 2)
    told(error, Reason.EMPTY_WEIGHT)
    empty[1] = 1
    with pytest.raises(SecureSumError) as error:
        form.decode(empty, 2)
    told(error, Reason.SUM_OUT_OF_RANGE)


def test_what_is_no_sum() -> None:
    form = encoding(5)
    for residues, clients in [
        (np.zeros(6, np.uint64), 1), (np.zeros(5, np.uint32), 1), (np.zeros(6, np.uint32), 0),
        (np.zeros(6, np.uint32), 5),
    ]:  # fmt: skip
        with pytest.raises(ConfigError):
            form.decode(residues, clients)
