"""Merging block by block gives the bits of merging at once."""

from __future__ import annotations

import pytest
import torch

from mycelia.aggregator import merging
from mycelia.aggregator.merging import Blocks, MergeFailed, merge
from mycelia.engine.algorithms import ALGORITHMS, ServerState, build
from mycelia.engine.recipe import Recipe
from mycelia.engine.sums import ExactSum, SumFormat, Term, Update
from mycelia.privacy.pipeline import Pipeline

NORM = Recipe(
    "mlp", {"hidden": [5]}, "cross-entropy", (3,), 2, (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
)
BY_COORDINATE = [name for name, kind in ALGORITHMS.items() if kind().merges_by_coordinate()]


def summed(name: str) -> tuple[object, object, ServerState, ExactSum]:
    program, algorithm = NORM(), build(name).bind(population=5)
    state = algorithm.start(program)
    exact = ExactSum(SumFormat.plan(algorithm.terms(program), 4.0, 5))
    draw = torch.Generator().manual_seed(3)
    for weight in (1.0, 2.5):
        exact.add(
            Update(
                {
                    n: Term(torch.randn(s.size, generator=draw).abs() + 0.1, weight)
                    for n, s in algorithm.terms(program).items()
                }
            )
        )
    return program, algorithm, state, exact


def test_most_algorithms_merge_by_coordinate() -> None:
    assert {"fedavg", "fedadam", "fedyogi", "fedadagrad", "fedavgm", "scaffold", "fednova", "fedprox"} <= set(
        BY_COORDINATE
    )


@pytest.mark.parametrize("name", BY_COORDINATE)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_blocks_are_the_whole(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "BLOCK", size)
    program, algorithm, state, exact = summed(name)
    total = ExactSum.total(exact.form, [exact.accumulator], exact.count)
    whole, _ = merge(program, algorithm, state, total, pipeline=Pipeline(), public={}, round=0)
    blocks = Blocks(program, algorithm, state, exact)
    vector = torch.cat(list(blocks))
    assert torch.equal(vector, whole.vector)
    assert blocks.rest.extra.keys() == whole.extra.keys()
    for each, tensor in whole.extra.items():
        assert torch.equal(blocks.rest.extra[each], tensor), each


def test_a_block_that_is_not_finite_stops_the_merge() -> None:
    program, algorithm, state, exact = summed("fedavg")
    state.vector[3] = torch.inf
    with pytest.raises(MergeFailed, match="NaN or infinity"):
        list(Blocks(program, algorithm, state, exact))
