"""Exact sums of updates: order, workers, atomicity, and bad input."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.sums import ExactSum, SumFormat, Term, TermSpec, Total, Update

SPECS = {"params": TermSpec(3, 8.0), "loss": TermSpec(1, 100.0)}
FORM = SumFormat.plan(SPECS, max_weight=50.0, cohort=16)

finite = st.floats(-8, 8, width=32)
weights = st.floats(2.0**-10, 50.0, width=32)
updates = st.builds(
    lambda values, loss, first, second: Update(
        {
            "params": Term(torch.tensor(values, dtype=torch.float32), first),
            "loss": Term(torch.tensor([loss], dtype=torch.float64), second),
        }
    ),
    st.lists(finite, min_size=3, max_size=3),
    st.floats(-100, 100),
    weights,
    weights,
)


def update(params: list[float], weight: float = 1.0, loss: float = 0.0) -> Update:
    return Update({"params": Term(torch.tensor(params), weight), "loss": Term(torch.tensor([loss]), weight)})


def summed(*given_updates: Update) -> ExactSum:
    exact = ExactSum(FORM)
    for one in given_updates:
        exact.add(one)
    return exact


def total(exact: ExactSum) -> Total:
    return ExactSum.total(FORM, [exact.accumulator], exact.count)


@given(st.lists(updates, min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_order_and_workers_do_not_matter(several: list[Update], draw: object, workers: int) -> None:
    shuffled = list(several)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    parts = [ExactSum(FORM) for _ in range(workers)]
    for position, one in enumerate(shuffled):
        parts[position % workers].add(one)
    first = total(summed(*several))
    second = ExactSum.total(FORM, [part.accumulator for part in parts], sum(part.count for part in parts))
    assert all(torch.equal(first.sums[name], second.sums[name]) for name in SPECS)
    assert (first.weights, first.count) == (second.weights, second.count)


@given(st.lists(updates, min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_sums_are_those_of_rational_arithmetic(several: list[Update]) -> None:
    """Within half a unit of the format for each update, plus the float64 product's rounding."""
    found = total(summed(*several))
    for name, spec in SPECS.items():
        unit = 2.0 ** -FORM.formats[name].exponent
        for entry in range(spec.size):
            exact = sum(
                Fraction(one.terms[name].values[entry].item()) * Fraction(one.terms[name].weight)
                for one in several
            )
            slack = len(several) * (unit + 50 * spec.max_abs * 2.0**-53)
            assert abs(Fraction(found.sums[name][entry].item()) - exact) <= slack
        weight = sum(Fraction(one.terms[name].weight) for one in several)
        assert abs(Fraction(found.weights[name]) - weight) <= 6 * 2.0**-40


@given(updates, updates, st.sampled_from(list(SPECS)), st.sampled_from([float("nan"), float("inf"), 1e6]))
@settings(max_examples=30, deadline=None)
def test_a_bad_term_takes_the_whole_update_back(kept: Update, bad: Update, name: str, value: float) -> None:
    exact = summed(kept)
    before = exact.accumulator.clone()
    values = bad.terms[name].values.clone()
    values[-1] = value
    broken = {**bad.terms, name: Term(values, bad.terms[name].weight)}
    for order in permutations(broken):  # whichever is added first
        with pytest.raises(DataError, match=name):
            exact.add(Update({key: broken[key] for key in order}))
        assert torch.equal(exact.accumulator, before)
    assert exact.count == 1


def test_a_bad_second_term_after_a_difference() -> None:
    exact = summed(update([1.0, 2.0, 3.0]))
    before = exact.accumulator.clone()
    difference = Term(torch.tensor([0.1, -0.7, 3.3]), 3.7, torch.tensor([0.3, 0.2, -1e-3]))
    with pytest.raises(DataError, match="loss"):
        exact.add(Update({"params": difference, "loss": Term(torch.tensor([float("nan")]), 1.0)}))
    assert torch.equal(exact.accumulator, before)


def test_an_unexpected_error_takes_it_back_too() -> None:
    exact = summed(update([1.0, 2.0, 3.0]))
    before = exact.accumulator.clone()
    good = update([0.1, 0.2, 0.3], 7.0).terms["params"]
    with pytest.raises(TypeError):
        exact.add(Update({"params": good, "loss": Term(torch.ones(1), "heavy")}))  # type: ignore[arg-type]
    assert torch.equal(exact.accumulator, before)
    assert exact.count == 1


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 50.1])
def test_weights_are_positive_finite_and_capped(weight: float) -> None:
    exact = summed(update([1.0, 2.0, 3.0], 50.0))
    before = exact.accumulator.clone()
    with pytest.raises(DataError, match="weight"):
        exact.add(update([1.0, 1.0, 1.0], weight))
    assert torch.equal(exact.accumulator, before)


ONE, THREE = Term(torch.ones(1), 1.0), Term(torch.ones(3), 1.0)


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"params": THREE},
        {"params": THREE, "loss": ONE, "more": ONE},
        {"params": Term(torch.ones(4), 1.0), "loss": ONE},
        {"params": Term(torch.ones(3, 1), 1.0), "loss": ONE},
        {"params": Term(torch.ones(3, dtype=torch.int64), 1.0), "loss": ONE},
        {"params": Term(torch.ones(3), 1.0, torch.ones(2)), "loss": ONE},
    ],
    ids=["none", "missing", "unknown", "long", "matrix", "integers", "minus"],
)
def test_other_terms_are_refused(terms: dict[str, Term]) -> None:
    exact = ExactSum(FORM)
    with pytest.raises(DataError):
        exact.add(Update(terms))
    assert not exact.accumulator.any()
    assert exact.count == 0


def test_terms_come_in_any_order() -> None:
    one = update([1.0, -2.0, 0.5], 3.0, 7.0)
    other = Update({name: one.terms[name] for name in reversed(list(one.terms))})
    assert torch.equal(summed(one).accumulator, summed(other).accumulator)


def test_means_and_weights_by_term() -> None:
    exact = ExactSum(FORM)
    for params, weight, loss, loss_weight in (
        ([1.0, 2.0, 4.0], 1.0, 10.0, 2.0),
        ([3.0, 0.0, 0.0], 3.0, 40.0, 1.0),
    ):
        terms = {
            "params": Term(torch.tensor(params), weight),
            "loss": Term(torch.tensor([loss]), loss_weight),
        }
        exact.add(Update(terms))
    found = total(exact)
    assert found.mean("params").tolist() == [2.5, 0.5, 1.0]
    assert found.mean("loss").tolist() == [20.0]
    assert found.weights == {"params": 4.0, "loss": 3.0}
    assert found.count == 2


def test_nobody_sent_anything() -> None:
    found = total(ExactSum(FORM))
    assert found.count == 0
    assert found.mean("params").tolist() == [0.0, 0.0, 0.0]


def test_means_are_fresh_tensors() -> None:
    found = total(summed(update([1.0, 2.0, 4.0])))
    found.mean("params").zero_()
    assert found.mean("params").tolist() == [1.0, 2.0, 4.0]


def test_reset_starts_anew() -> None:
    exact = summed(update([1.0, 2.0, 3.0]))
    exact.reset()
    assert exact.count == 0
    assert not exact.accumulator.any()
    exact.add(update([1.0, 2.0, 3.0]))
    assert torch.equal(exact.accumulator, summed(update([1.0, 2.0, 3.0])).accumulator)


def test_a_full_cohort_of_the_largest_updates_fits() -> None:
    exact = ExactSum(FORM)
    for _ in range(16):
        exact.add(update([8.0, -8.0, 8.0], 50.0, 100.0))
    found = total(exact)
    assert found.sums["params"].tolist() == [6400.0, -6400.0, 6400.0]
    assert found.weights["params"] == 800.0


def test_layout_of_the_vector() -> None:
    assert FORM.size == 6
    assert FORM.slices() == {"params": slice(0, 3), "loss": slice(4, 5)}


def test_the_accumulator_may_be_shared_memory() -> None:
    memory = torch.zeros(8, dtype=torch.int64)
    exact = ExactSum(FORM, memory[1:7])
    exact.add(update([1.0, 2.0, 3.0]))
    assert memory[0] == 0 == memory[7]
    assert torch.equal(memory[1:7], summed(update([1.0, 2.0, 3.0])).accumulator)


@pytest.mark.parametrize(
    "memory", [torch.zeros(5, dtype=torch.int64), torch.zeros(6), torch.zeros(6, 1, dtype=torch.int64)]
)
def test_an_accumulator_that_does_not_fit(memory: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="accumulator"):
        ExactSum(FORM, memory)


def test_a_sum_that_could_overflow_is_refused() -> None:
    with pytest.raises(ConfigError, match="params"):
        SumFormat.plan(SPECS, max_weight=1.0, cohort=2**40)
