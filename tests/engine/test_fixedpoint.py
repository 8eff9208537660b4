"""Exact sums against Python's rational numbers."""

import copy
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.engine._torch import compiler
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.fixedpoint import FixedPoint
from mycelia.engine.transforms.compile import Adder, package_adder

SIZES = [0, 1, 8, 9, 1000, 16383, 16384, 16385, 50001]


def rational(value: float, weight: float, exponent: int) -> int:
    """What the docstring says, in exact arithmetic: one float64 product, then half to even."""
    return round(Fraction(value * weight) * Fraction(2) ** exponent)


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int64)


def sample(size: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, size).astype(np.float32))


bounds = st.floats(2.0**-128, 2.0**127, allow_subnormal=False)
cohorts = st.integers(1, 2**21)


@given(bounds, bounds, cohorts)
def test_plan_cannot_overflow_and_is_the_finest(max_abs: float, max_weight: float, cohort: int) -> None:
    fixed = FixedPoint.plan(max_abs, max_weight, cohort, "update")
    product = Fraction(max_abs) * Fraction(max_weight) * cohort
    assert product * Fraction(2) ** fixed.exponent < 2**63
    one = zeros(1)
    fixed.add_(one, torch.tensor([max_abs], dtype=torch.float64), max_weight)
    assert cohort * int(one) < 2**63
    # one exponent more would not do, up to the rounding of the product
    assert product * Fraction(2) ** (fixed.exponent + 1) >= 2**63 * (1 - Fraction(1, 2**50))
    with pytest.raises(ConfigError, match="overflow"):
        FixedPoint(max_abs, max_weight, cohort, fixed.exponent + 2, "update")


@given(
    st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=24),
    st.floats(1e-6, 50, allow_subnormal=False),
    st.integers(1, 100_000),
)
def test_adds_the_rounded_product(values: list[float], weight: float, cohort: int) -> None:
    fixed = FixedPoint.plan(1000.0, 50.0, cohort, "update")
    total = zeros(len(values))
    fixed.add_(total, torch.tensor(values), weight)
    assert total.tolist() == [rational(value, weight, fixed.exponent) for value in values]


@given(st.lists(st.floats(-(2.0**45), 2.0**45), min_size=1, max_size=24), st.floats(0.001, 1.0))
def test_float64_values(values: list[float], weight: float) -> None:
    fixed = FixedPoint(2.0**45, 1.0, 8, 3, "update")
    total = zeros(len(values))
    fixed.add_(total, torch.tensor(values, dtype=torch.float64), weight)
    assert total.tolist() == [rational(value, weight, 3) for value in values]


@pytest.mark.parametrize("copies", [1, 20])  # 6 values and 120: short and long vectors take different paths
@pytest.mark.parametrize("offset", [0.0, 2.0**50, 2.0**51, 2.0**52])  # so do large ones
def test_ties_go_to_even(offset: float, copies: int) -> None:
    fixed = FixedPoint(2.0**56, 1.0, 4, 0, "update")
    values = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5] * copies
    values += [offset, -offset, offset + 0.5, offset + 1.5]
    total = zeros(len(values))
    fixed.add_(total, torch.tensor(values, dtype=torch.float64), 1.0)
    assert total.tolist()[:6] == [0, 2, 2, 0, -2, -2]
    assert total.tolist() == [round(Fraction(value)) for value in values]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_abs", [6.0, 1e4])  # nearly filled, and nearly empty
def test_any_size(size: int, max_abs: float) -> None:
    fixed, values = FixedPoint.plan(max_abs, 100.0, 10, "update"), sample(size)
    total = torch.arange(size)
    fixed.add_(total, values, 37.3)
    rounded = np.rint(values.double().numpy() * 37.3 * 2.0**fixed.exponent).astype(np.int64)
    assert np.array_equal(total.numpy(), rounded + np.arange(size))


@given(st.permutations(range(6)), st.integers(0, 6))
@settings(max_examples=30)
def test_order_and_workers_do_not_matter(order: list[int], split: int) -> None:
    fixed = FixedPoint.plan(10.0, 9.0, 6, "update")
    updates = [(sample(20, seed, 10.0**-seed), 1.1 + seed) for seed in range(6)]
    straight = zeros(20)
    for values, weight in updates:
        fixed.add_(straight, values, weight)
    workers = [zeros(20), zeros(20)]
    for position, client in enumerate(order):
        fixed.add_(workers[position < split], *updates[client])
    assert torch.equal(workers[0] + workers[1], straight)


def test_a_full_cohort_at_the_bounds_is_exact() -> None:
    fixed = FixedPoint.plan(0.7, 0.9, 1000, "update")
    total = zeros(10)
    for _ in range(1000):
        fixed.add_(total, torch.full((10,), -0.7, dtype=torch.float64), 0.9)
    assert total.tolist() == [1000 * rational(-0.7, 0.9, fixed.exponent)] * 10
    assert torch.allclose(fixed.decode(total), torch.full((10,), -630.0, dtype=torch.float64), rtol=1e-15)


def test_decode() -> None:
    fixed = FixedPoint(2.0, 1.0, 1, 3, "update")
    decoded = fixed.decode(torch.tensor([-5, 0, 8]))
    assert decoded.dtype == torch.float64
    assert decoded.tolist() == [-0.625, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 300, 20000])
def test_difference(dtype: torch.dtype, size: int) -> None:
    fixed = FixedPoint.plan(8.0, 5.0, 10, "update")
    new, old = sample(size, 1).to(dtype), sample(size, 2).to(dtype)
    before = new.clone(), old.clone()
    total, expected = zeros(size), zeros(size)
    fixed.add_difference_(total, new, old, 3.7)
    wide = torch.promote_types(dtype, torch.float32)
    fixed.add_(expected, new.to(wide) - old.to(wide), 3.7)
    assert torch.equal(total, expected)
    assert torch.equal(new, before[0])
    assert torch.equal(old, before[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_exactly(dtype: torch.dtype) -> None:
    fixed = FixedPoint.plan(1.0, 1.0, 4096, "update")
    total = zeros(1)
    value = torch.tensor([2.0**-7], dtype=dtype)
    for _ in range(4096):  # in half precision this sum stalls long before 32
        fixed.add_(total, value, 1.0)
    assert fixed.decode(total).tolist() == [32.0]


def test_views_and_tensors_with_gradients() -> None:
    fixed = FixedPoint.plan(8.0, 5.0, 10, "update")
    values = sample(200).requires_grad_()
    total, expected = zeros(300), zeros(100)
    fixed.add_(total[::3], values[::2], 2.0)
    fixed.add_(expected, values.detach()[::2].contiguous(), 2.0)
    assert torch.equal(total[::3], expected)
    assert not total[1::3].any()


def test_threads_do_not_disturb_each_other() -> None:
    fixed, values = FixedPoint.plan(8.0, 5.0, 10, "update"), sample(100_000)
    expected = zeros(100_000)
    fixed.add_(expected, values, 1.5)
    totals = [zeros(100_000) for _ in range(4)]

    def work(total: torch.Tensor) -> None:
        fixed.add_(total, values, 1.5)

    threads = [threading.Thread(target=work, args=(total,)) for total in totals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(total, expected) for total in totals)


def test_copies_are_equal() -> None:
    fixed = FixedPoint.plan(8.0, 5.0, 10, "update")
    assert copy.deepcopy(fixed) == fixed
    assert hash(copy.copy(fixed)) == hash(fixed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1.5, -1.0001])
@pytest.mark.parametrize(("size", "index"), [(1, 0), (8, 7), (9, 0), (16384, 16383), (60000, 40123)])
def test_a_bad_value_is_named_and_nothing_is_added(bad: float, size: int, index: int) -> None:
    fixed = FixedPoint.plan(1.0, 5.0, 10, "update")
    values, total = sample(size, scale=0.1), torch.arange(size) * 1_000_003
    values[index] = bad
    before = total.clone()
    message = rf"update: value {index} is .*(nan|inf|1\.5|1\.0001)"
    with pytest.raises(DataError, match=message) as error:
        fixed.add_(total, values, 2.0)
    assert "max_abs = 1.0" in error.value.rule
    with pytest.raises(DataError, match=message):
        fixed.add_difference_(total, values, torch.zeros(size), 2.0)
    assert torch.equal(total, before)


def test_infinite_difference_is_refused_without_a_warning() -> None:
    fixed = FixedPoint.plan(1.0, 5.0, 10, "update")
    infinite, largest = torch.full((20,), torch.inf), torch.full((20,), torch.finfo(torch.float32).max)
    for new, old in [(infinite, infinite), (largest, -largest)]:
        with pytest.raises(DataError, match="value 0 is"):
            fixed.add_difference_(zeros(20), new, old, 1.0)


@pytest.mark.parametrize("weight", [0.0, -1.0, 5.0001, float("nan"), float("inf")])
def test_bad_weight(weight: float) -> None:
    fixed, total = FixedPoint.plan(1.0, 5.0, 10, "update"), zeros(3)
    with pytest.raises(DataError, match="update: the weight is") as error:
        fixed.add_(total, torch.ones(3), weight)
    assert "max_weight = 5.0" in error.value.rule
    assert not total.any()


@pytest.mark.parametrize(
    ("total", "values", "message"),
    [
        (torch.zeros(3), torch.zeros(3), "accumulator is torch.float32"),
        (zeros(6).view(2, 3), torch.zeros(2, 3), "accumulator is torch.int64"),
        (zeros(3), torch.zeros(4), "values have shape"),
        (zeros(3), torch.zeros(3, 1), "values have shape"),
        (zeros(3), zeros(3), "values are torch.int64"),
    ],
)
def test_tensors_that_do_not_fit(total: torch.Tensor, values: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        FixedPoint.plan(1.0, 5.0, 10, "update").add_(total, values, 1.0)


def test_difference_of_tensors_that_do_not_fit() -> None:
    fixed = FixedPoint.plan(1.0, 5.0, 10, "update")
    for old in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(DataError, match="old is"):
            fixed.add_difference_(zeros(3), torch.zeros(3), old, 1.0)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-39])
def test_bad_bounds(bound: float) -> None:
    with pytest.raises(ConfigError, match="update: max_abs is"):
        FixedPoint.plan(bound, 1.0, 10, "update")
    with pytest.raises(ConfigError, match="update: max_weight is"):
        FixedPoint.plan(1.0, bound, 10, "update")


@pytest.mark.parametrize("cohort", [0, -1, 2**63, 1.5])
def test_bad_cohort(cohort: int) -> None:
    with pytest.raises(ConfigError, match="cohort is"):
        FixedPoint.plan(1.0, 1.0, cohort, "update")


def test_a_cohort_that_leaves_too_little_precision_is_refused() -> None:
    FixedPoint.plan(1.0, 100.0, 4_000_000, "update")
    with pytest.raises(ConfigError, match=r"sum of 100000000 contributions .* leaves 36 bits") as error:
        FixedPoint.plan(1.0, 100.0, 100_000_000, "update")
    assert "at most 4194304" in error.value.fix


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_the_compiled_form_gives_the_same_bits_and_takes_bad_values_back(tmp_path: Path) -> None:
    size = 5000
    fused = Adder(package_adder(size, tmp_path))
    fixed = FixedPoint.plan(max_abs=1024.0, max_weight=50.0, cohort=50, what="update")
    draw = torch.Generator().manual_seed(0)
    plain, quick = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    for magnitude in (1e-6, 1.0, 100.0):
        new, old = (magnitude * torch.randn(size, generator=draw) for _ in range(2))
        for weight in (1.0, 37.0, 0.3):
            fixed.add_difference_(plain, new, old, weight)
            fixed.add_difference_(quick, new, old, weight, fused)
            assert torch.equal(plain, quick)
    for value in (torch.nan, torch.inf, -torch.inf, 1025.0, -3000.0):
        bad = torch.zeros(size)
        bad[4321] = value
        with pytest.raises(DataError, match="4321"):
            fixed.add_difference_(quick, bad, torch.zeros(size), 2.0, fused)
        assert torch.equal(plain, quick)
