"""Parts of a batch give what the whole gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.transforms.microbatch import microbatch
from mycelia.engine.transforms.value_and_grad import value_and_grad
from tests.engine.transforms.programs import models, program_of, same_gradients
from tests.engine.zoo import ZOO

SEPARATE = tuple(name for name, case in ZOO.items() if not case.coupled)
COUPLED = tuple(name for name, case in ZOO.items() if case.coupled)


@models(SEPARATE)
@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_equals_the_whole_batch(name: str, size: int) -> None:
    case, program = ZOO[name], program_of(name)
    params, buffers = program.init()
    batch = case.batch(7)
    plain = value_and_grad(program)(params, buffers, *batch, seed=11)
    parts = microbatch(program, size)(params, buffers, *batch, seed=11)
    same_gradients(parts, plain, 1e-10 if case.double else 1e-6)


def test_the_same_parts_give_the_same_bits() -> None:
    program, run = program_of("dropout"), microbatch(program_of("dropout"), 2)
    batch = ZOO["dropout"].batch(5)
    same_gradients(run(*program.init(), *batch, seed=1), run(*program.init(), *batch, seed=1), 0.0)


@models(COUPLED)
def test_a_pass_that_mixes_examples_is_refused(name: str) -> None:
    rule = "torch.cond" if name == "cond" else "torch.while_loop" if name == "while" else "BatchNorm"
    with pytest.raises(CaptureError, match=rule):
        microbatch(program_of(name), 2)


class Moving(nn.Module):
    """Keeps a running mean of its input, in a float buffer, or counts examples."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.counts = counts
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64 if counts else torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.shape[0] if self.counts else x.mean())
        return self.linear(x)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean(1)


@pytest.mark.parametrize("backend", ["export", "eager"])
@pytest.mark.parametrize(("counts", "reason"), [(False, "float buffer 'seen'"), (True, "counter 'seen'")])
def test_a_buffer_of_the_batch_is_refused(counts: bool, reason: str, backend: str) -> None:
    program = capture(Moving(counts), squares, (torch.ones(2, 3), torch.ones(2, 2)), backend=backend)
    with pytest.raises(CaptureError, match=reason):
        microbatch(program, 2)


@pytest.mark.parametrize("backend", ["export", "eager"])
def test_a_loss_that_looks_at_the_whole_batch_is_refused(backend: str) -> None:
    program = capture(
        nn.Linear(3, 2),
        lambda outputs, targets: squares(outputs - outputs.mean(0), targets),
        (torch.randn(2, 3), torch.ones(2, 2)),
        backend=backend,
    )
    with pytest.raises(CaptureError, match="depends on the other examples"):
        microbatch(program, 2)


@pytest.mark.parametrize("size", [0, -1])
def test_a_part_needs_an_example(size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        microbatch(program_of("mlp"), size)
