"""Updates packed for a secure sum: what comes out of the sum of packs is the sum of the terms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.sums import Term, TermSpec, Total, Update
from mycelia.privacy.clip import Abadi
from mycelia.privacy.federated import ClipUpdate
from mycelia.privacy.pipeline import Pipeline, Sent
from mycelia.privacy.secagg.encoding import CLIPPED
from mycelia.privacy.secure_updates import SLOTS, VECTOR, Mask, NoiseShares, Quantise

SENT = Sent(3, 0, {})
SPECS = {
    "params": TermSpec(3, 8.0),
    "steps": TermSpec(1, 2.0**24, grain=1.0),
    "buffers": TermSpec(2, 8.0),
    "loss": TermSpec(1, 2.0**20, grain=2.0**-8, own_weight=True),
}


def quantise(**changes: Any) -> Quantise:
    settings: dict[str, Any] = {"weight_max": 50, "value_bound": 2**15, "most_examples": 100}
    return Quantise(**{"specs": SPECS} | settings | changes)


def update(params: list[float], weight: float, steps: float = 7.0, loss: float = 1.5) -> Update:
    def term(values: list[float], weight: float) -> Term:
        return Term(torch.tensor(values), weight)

    terms = {
        "params": term(params, weight), "steps": term([steps], weight), "buffers": term([0.25, -0.5], weight),
        "loss": term([loss], weight / 2),
    }  # fmt: skip
    return Update(terms, {"loss_sum": loss * 10, "examples": 10.0, "steps": steps})


def summed(stage: Quantise, packs: list[Update]) -> Total:
    """The sum as the machines open it, but for the rounding of the vector."""
    values = sum(
        np.asarray(pack.terms[VECTOR].values, dtype=np.float64) * pack.terms[VECTOR].weight for pack in packs
    )
    whole = sum(pack.terms[SLOTS].values.numpy() for pack in packs)
    named = dict(zip(stage.given, np.asarray(whole).tolist(), strict=True)) | {CLIPPED: 4}
    weight = int(sum(pack.terms[VECTOR].weight for pack in packs))
    return stage.opened(np.asarray(values), weight, named, len(packs))


@given(st.lists(st.tuples(st.lists(st.floats(-8, 8, width=16), min_size=3, max_size=3), st.integers(1, 50)),
                min_size=1, max_size=6))  # fmt: skip
def test_the_sum_of_packs_is_the_sum_of_terms(clients: list[tuple[list[float], int]]) -> None:
    stage = quantise()
    packs = [stage.device(update(params, weight), SENT) for params, weight in clients]
    total, public = stage.server(summed(stage, packs), {}, 0)
    weights = [weight for _, weight in clients]
    expected = sum(np.array(params) * weight for params, weight in clients)
    assert public == {}
    assert np.allclose(total.sums["params"], expected, rtol=1e-12)
    assert total.sums["buffers"].tolist() == [0.25 * sum(weights), -0.5 * sum(weights)]
    assert total.sums["steps"].tolist() == [7.0 * sum(weights)]
    assert total.sums["loss"].tolist() == [0.75 * sum(weights)]
    assert total.weights == pytest.approx(
        dict.fromkeys(("params", "steps", "buffers"), sum(weights)) | {"loss": sum(weights) / 2}
    )
    assert total.count == len(clients)


def test_no_slot_is_wider_than_the_vector() -> None:
    """So none costs a bit: n weight_max (Q + 1) is the largest number of the sum."""
    for changes in ({}, {"weight_max": 1, "most_examples": 10**6}, {"value_bound": 5000}):
        stage = quantise(**changes)
        assert max(stage.bounds.values()) <= stage.weight_max * stage.value_bound
        assert set(stage.given) == set(stage.bounds) - {CLIPPED}


@pytest.mark.parametrize("weight_max", [1, 50])
@pytest.mark.parametrize("most", [10, 1000, 10**6])
def test_the_report_is_close_and_cut_off_where_it_is_too_much(weight_max: int, most: int) -> None:
    stage = quantise(weight_max=weight_max, most_examples=most)
    one = Update(
        update([0.0] * 3, 1.0).terms, {"loss_sum": 2.3 * most, "examples": float(most), "steps": 3.0}
    )
    found = stage.report(summed(stage, [stage.device(one, SENT)] * 5))
    room = weight_max * 2**15
    assert found["loss_sum"] == pytest.approx(5 * 2.3 * most, abs=5 * max(16 * most / room, 2.0**-16) * 2)
    assert found["examples"] == pytest.approx(5 * most, abs=5 * max(1, 2 * most / room))
    assert found["clipped"] == 4 / 5000
    for metrics in ({"loss_sum": math.inf}, {"loss_sum": math.nan}, {"loss_sum": 1e30, "steps": 1e30}):
        cut = stage.device(Update(one.terms, metrics), SENT)
        assert int(cut.terms[SLOTS].values.abs().max()) <= room


def test_a_step_of_whole_numbers_is_exact() -> None:
    stage = quantise(
        specs={"steps": TermSpec(1, 2.0**24, grain=1.0), "params": TermSpec(1, 8.0, own_weight=True)}
    )
    given = Update(
        {"steps": Term(torch.tensor([31.0]), 50.0), "params": Term(torch.tensor([0.5]), 50 / 31)}, {}
    )
    total, _ = stage.server(summed(stage, [stage.device(given, SENT)]), {}, 0)
    assert float(total.mean("steps")) == 31.0
    assert float(total.sums["params"]) == pytest.approx(0.5 * 50 / 31, rel=1e-6)
    assert total.weights["params"] == pytest.approx(50 / 31, abs=2.0**-15)


@pytest.mark.parametrize(
    "changed",
    [
        {"params": [math.nan, 0.0, 0.0]}, {"params": [0.0, math.inf, 0.0]}, {"params": [9.0, 0.0, 0.0]},
        {"weight": 51.0}, {"weight": 2.5}, {"weight": 0.0}, {"weight": -1.0}, {"steps": 40000.0},
        {"steps": math.nan}, {"loss": 1e6},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_without_a_number(changed: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="out of range") as error:
        quantise().device(update(**{"params": [0.0, 0.0, 0.0], "weight": 50.0} | changed), SENT)
    assert not any(str(value) in error.value.found for value in changed.values())


def test_terms_of_another_weight_have_to_say_so() -> None:
    given = update([0.0] * 3, 4.0)
    wrong = Update(dict(given.terms) | {"buffers": Term(torch.zeros(2), 5.0)}, {})
    with pytest.raises(ConfigError, match="own_weight"):
        quantise().device(wrong, SENT)
    with pytest.raises(DataError, match="exactly"):
        quantise().device(Update({"params": given.terms["params"]}, {}), SENT)


@pytest.mark.parametrize(
    ("specs", "private", "says"),
    [
        ({"loss": TermSpec(1, 8.0, grain=0.1)}, False, "no model is shared"),
        ({"counters": TermSpec(70, 8.0, grain=1.0), "params": TermSpec(1, 1.0)}, False, "GroupNorm"),
        (SPECS, True, "carries no noise"),
    ],
)
def test_terms_that_do_not_fit_are_refused(specs: dict[str, TermSpec], private: bool, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        quantise(specs=specs, private=private)


def test_under_noise_weights_are_one_and_nothing_is_beside_the_vector() -> None:
    """The clip factor, which is a term's weight, is part of the numbers."""
    stage = quantise(specs={"params": TermSpec(2, 8.0)}, private=True, double=True, weight_max=1)
    pipeline = Pipeline((ClipUpdate(Abadi(bound=1.0)), stage, NoiseShares(10.0), Mask(True)))
    given = Update({"params": Term(torch.tensor([3.0, 4.0]), 1.0)}, {"loss_sum": 3.0})
    packed = pipeline.devices().device(given, SENT)
    assert packed.terms[VECTOR].weight == 1.0
    assert packed.terms[VECTOR].values.tolist() == pytest.approx([0.6, 0.8])
    assert packed.terms[SLOTS].values.tolist() == []
    total, _ = pipeline.server(stage.opened(np.array([6.0, 8.0]), 10, {}, 10), {}, 0)
    assert total.mean("params").tolist() == [0.6, 0.8]
    fewer, _ = pipeline.server(stage.opened(np.array([6.0, 8.0]), 7, {}, 7), {}, 0)
    assert fewer.mean("params").tolist() == [0.6, 0.8]  # the denominator is public
    assert fewer.count == 10
    assert stage.report(stage.opened(np.zeros(2), 7, {}, 7)) == {}


def test_the_order_of_the_stages_is_checked() -> None:
    stage = quantise(specs={"params": TermSpec(2, 8.0)}, private=True)
    for stages in ((NoiseShares(1.0),), (stage, NoiseShares(1.0)), (Mask(True),), (Mask(True), stage)):
        with pytest.raises(ConfigError):
            Pipeline(stages)
