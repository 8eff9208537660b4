"""A Program that travelled by pickle is the Program that was sent."""

from __future__ import annotations

import pickle

import pytest
import torch

from mycelia.engine import structure
from mycelia.engine.capture import capture
from mycelia.engine.program import Program
from mycelia.engine.schema import Role
from mycelia.engine.transforms.layout import layout
from tests.engine.transforms.programs import models, program_of
from tests.engine.zoo import ZOO


def sent(program: Program) -> Program:
    found: Program = pickle.loads(pickle.dumps(program))  # noqa: S301 - what multiprocessing does
    return found


def same(found: Program, program: Program, name: str) -> None:
    batch = ZOO[name].batch(4)
    assert found.schema.sha256 == program.schema.sha256
    assert (found.backend, found.note) == (program.backend, program.note)
    for one, two in zip(found.init(), program.init(), strict=True):
        assert list(one) == list(two)
        assert all(torch.equal(one[n], two[n]) for n in one)
    for training in (True, False):
        passes = [p.forward(*p.init(), *batch, seed=5, training=training) for p in (found, program)]
        assert torch.equal(passes[0].losses, passes[1].losses)
        leaves = [structure.flatten(one.outputs) for one in passes]
        assert leaves[0][1] == leaves[1][1]
        assert all(torch.equal(one, two) for one, two in zip(leaves[0][0], leaves[1][0], strict=True))
        assert all(torch.equal(t, passes[1].buffers[n]) for n, t in passes[0].buffers.items())
    outputs = [structure.flatten(p.predict(*p.init(), batch[0]))[0] for p in (found, program)]
    assert all(torch.equal(one, two) for one, two in zip(*outputs, strict=True))


@models()
def test_round_trip(name: str) -> None:
    program = program_of(name)
    found = sent(program)
    same(found, program, name)
    assert found.graphs is not None
    assert found.example is None
    same(sent(found), program, name)  # and on to the next


@pytest.mark.parametrize("name", ["lenet", "frozen-trunk"])
def test_a_transformed_program_travels(name: str) -> None:
    program = layout(program_of(name))
    same(sent(program), program, name)


def test_frozen_tensors_travel() -> None:
    found = sent(program_of("lora"))
    names = [entry.name for entry in found.schema.of(Role.FROZEN)]
    assert names
    assert all(torch.equal(found.frozen[n], program_of("lora").frozen[n]) for n in names)


def test_a_later_version_of_the_parameters_is_what_it_runs_on() -> None:
    program = program_of("mlp")
    params, buffers = program.init()
    params = {name: tensor * 2 for name, tensor in params.items()}
    inputs, _ = ZOO["mlp"].batch(3)
    assert torch.equal(
        sent(program).predict(params, buffers, inputs), program.predict(params, buffers, inputs)
    )


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean(1)


def test_the_eager_backend_does_not_travel_silently_wrong() -> None:
    """Its predictor is a closure over the module: pickle refuses it with an error and sends no part."""
    program = capture(torch.nn.Linear(3, 2), squares, (torch.ones(2, 3), torch.ones(2, 2)), backend="eager")
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(program)
