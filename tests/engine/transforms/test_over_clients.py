"""K clients at once against one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError, DataError
from mycelia.engine.program import Program
from mycelia.engine.step import StepResult, sgd_step
from mycelia.engine.transforms.layout import layout
from mycelia.engine.transforms.over_clients import over_clients, pad_clients, share, stack
from mycelia.engine.types import Tensors
from tests.engine.transforms.programs import close, models, program_of
from tests.engine.zoo import ZOO

pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop because we have not yet implemented"
)

# torch.func.vmap has no batching rule for these
NO_RULE = ("cond", "while", "scan")


def clients_of(program: Program, count: int) -> tuple[list[Tensors], list[Tensors]]:
    """Different parameters a client, the same buffers."""
    draw = torch.Generator().manual_seed(5)
    params, buffers = program.init()
    return [
        {n: t + 0.1 * torch.randn(t.shape, generator=draw, dtype=t.dtype) for n, t in params.items()}
        for _ in range(count)
    ], [{n: t.clone() for n, t in buffers.items()} for _ in range(count)]


def proximal(grads: Tensors, params: Tensors, extra: Tensors) -> Tensors:
    return {n: g + extra["mu"] * (params[n] - extra[f"anchor.{n}"]) for n, g in grads.items()}


def compare(found: StepResult, number: int, alone: StepResult, tolerance: float) -> None:
    close({n: t[number] for n, t in found.params.items()}, alone.params, tolerance)
    close({n: t[number] for n, t in found.buffers.items()}, alone.buffers, tolerance)
    torch.testing.assert_close(found.loss[number], alone.loss, rtol=tolerance, atol=tolerance)


@models(tuple(name for name in ZOO if name not in NO_RULE))
def test_equals_the_clients_one_after_the_other(name: str) -> None:
    case, program = ZOO[name], program_of(name)
    params, buffers = clients_of(program, 3)
    sizes = (4, 4, 4) if case.coupled else (4, 1, 3)
    batches = [case.batch(size, seed=number) for number, size in enumerate(sizes)]
    seeds = torch.tensor([7, 8, 2**40 + 9])
    anchors = {f"anchor.{n}": t for n, t in program.init()[0].items()}
    shared = {"lr": torch.tensor(0.1), **anchors}
    extras = [{**shared, "mu": torch.tensor(mu)} for mu in (0.0, 0.5, 1.0)]
    extra = share(shared, 3) | stack([{"mu": own["mu"]} for own in extras])
    padded = pad_clients(batches)
    found = over_clients(program, proximal)(stack(params), stack(buffers), *padded, seeds, extra)
    alone = sgd_step(program, proximal)
    for number in range(3):
        one = alone(params[number], buffers[number], *batches[number], seeds[number], extras[number])
        compare(found, number, one, 1e-10 if case.double else 1e-5)


def test_no_mask_means_full_batches() -> None:
    case, program = ZOO["mlp"], program_of("mlp")
    params, buffers = clients_of(program, 2)
    padded = pad_clients([case.batch(3, seed=1), case.batch(3, seed=2)])
    extra = share({"lr": torch.tensor(0.1)}, 2)
    seeds = torch.zeros(2, dtype=torch.int64)
    step = over_clients(program)
    one = step(stack(params), stack(buffers), *padded, seeds, extra)
    two = step(stack(params), stack(buffers), padded.inputs, padded.targets, None, seeds, extra)
    close(two.params, one.params, 0.0)


@pytest.mark.parametrize("name", ["mlp", "frozen-trunk"])
def test_a_client_without_examples_stays_as_it_is(name: str) -> None:
    case, program = ZOO[name], program_of(name)
    params, buffers = clients_of(program, 2)
    inputs, targets = case.batch(4)
    padded = pad_clients([(inputs, targets), (inputs[:0], targets[:0])])
    extra = share({"lr": torch.tensor(0.1)}, 2)
    found = over_clients(program)(stack(params), stack(buffers), *padded, torch.tensor([1, 2]), extra)
    compare(found, 1, StepResult(params[1], buffers[1], torch.zeros((), dtype=case.dtype)), 0.0)
    assert any(not torch.equal(found.params[n][0], t) for n, t in params[0].items())


def test_padding_behind_batch_norm_is_refused() -> None:
    case, program = ZOO["frozen-trunk"], program_of("frozen-trunk")
    params, buffers = clients_of(program, 2)
    padded = pad_clients([case.batch(4), case.batch(3)])
    extra = share({"lr": torch.tensor(0.1)}, 2)
    with pytest.raises(CaptureError, match=r"client 1 has a padded batch, and BatchNorm"):
        over_clients(program)(stack(params), stack(buffers), *padded, torch.tensor([1, 2]), extra)


def test_an_operator_that_cannot_be_batched_is_refused() -> None:
    """The rewritten convolution of `layout` has no rule for vmap."""
    case, program = ZOO["lenet"], layout(program_of("lenet"))
    params, buffers = clients_of(program, 2)
    padded = pad_clients([case.batch(2), case.batch(2)])
    extra = share({"lr": torch.tensor(0.1)}, 2)
    with pytest.raises(CaptureError, match="many clients at once"):
        over_clients(program)(stack(params), stack(buffers), *padded, torch.tensor([1, 2]), extra)


def test_a_masked_loss_that_is_not_finite_leaves_no_trace() -> None:
    model, inputs = nn.Linear(2, 1, bias=False), torch.tensor([[[1.0, 1.0], [1.0, 0.0]]])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0] / targets

    program = capture(model, loss, (torch.ones(2, 2), torch.ones(2)))
    params, buffers = program.init()
    mask = torch.tensor([[True, False]])
    found = over_clients(program)(
        stack([params]), buffers, inputs, torch.tensor([[1.0, 0.0]]), mask, torch.tensor([0]),
        {"lr": torch.ones(1)},
    )  # fmt: skip
    assert torch.isfinite(found.loss).all()


def test_padding_keeps_the_examples_and_marks_them() -> None:
    batches = [(torch.arange(2.0), torch.tensor([0, 1])), (torch.arange(3.0), torch.tensor([2, 3, 4]))]
    padded = pad_clients(batches)
    assert padded.mask.tolist() == [[True, True, False], [True, True, True]]
    for number, (inputs, targets) in enumerate(batches):
        assert torch.equal(padded.inputs[number][padded.mask[number]], inputs)
        assert torch.equal(padded.targets[number][padded.mask[number]], targets)


@pytest.mark.parametrize("batches", [[], [(torch.zeros(2), torch.zeros(3))]])
def test_padding_needs_pairs(batches: list[tuple[Tensor, Tensor]]) -> None:
    with pytest.raises(DataError, match="one target an input"):
        pad_clients(batches)
