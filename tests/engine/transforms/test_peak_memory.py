"""The liveness estimate against a case worked by hand and against what PyTorch allocates."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.program import Program
from mycelia.engine.transforms.peak_memory import peak_memory
from mycelia.engine.transforms.value_and_grad import value_and_grad
from tests.engine.transforms.programs import models, program_of
from tests.engine.zoo import ZOO


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum(1)


def test_a_linear_model_by_hand() -> None:
    """A linear map x W' without bias, loss = sum of outputs, all float32, B examples, m -> n.

    Held throughout: W (n m), x (B m), the targets (B), the seed (8 bytes). The peak is where the gradient of
    W is made: beside it live the outputs (B n) and losses (B), which are returned, and the mean (1). The
    gradient of the outputs is a 0-d number (1 for the mean's, 1 after division by B) broadcast to B x n,
    which takes no memory until the product needs it; that one is made dense by no operator of the graph.
    """
    batch, m, n = 64, 100, 50
    model = nn.Linear(m, n, bias=False)
    program = capture(model, total, (torch.zeros(2, m), torch.zeros(2)))
    held = 4 * (n * m + batch * m + batch) + 8
    returned = 4 * (n * m + batch * n + batch + 1)
    small = 4 * (1 + batch)  # gradients of the mean and of the losses, at most
    found = peak_memory(program, batch)
    assert held + returned <= found <= held + returned + small


def test_a_deeper_model_by_hand() -> None:
    """With L square layers and ReLUs of width w, a large batch makes the activations the peak.

    Saved by the forward pass: the ReLU results (B w each; ReLU saves its result, the linear map its input,
    which is the ReLU result before it). When the backward pass starts, all L of them live, and no value
    before a ReLU does. On the way one gradient and the next one (2 B w) live beside them.
    """
    batch, width, layers = 512, 32, 6
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.ReLU())]
    program = capture(nn.Sequential(*parts), total, (torch.zeros(2, width), torch.zeros(2)))
    one = 4 * batch * width
    weights = 4 * layers * width * width
    found = peak_memory(program, batch)
    low = one * (1 + layers + 1) + weights  # inputs, activations, one gradient
    high = one * (1 + layers + 2) + 2 * weights + 8 * 4 * batch
    assert low <= found <= high


def measured(program: Program, batch: tuple[Tensor, Tensor]) -> int:
    """The highest sum of allocations less frees in PyTorch's profiler, and what was there before."""
    params, buffers = program.init()
    run = value_and_grad(program)
    run(params, buffers, *batch)
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        result = run(params, buffers, *batch)
    del result
    results = seen.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    before = (*params.values(), *buffers.values(), *program.frozen.values(), *batch)
    return peak + sum(tensor.untyped_storage().nbytes() for tensor in before)


# the LSTM kernel of CPUs takes some seven times what it returns as workspace
PLAIN = tuple(name for name, case in ZOO.items() if not case.flow and not name.startswith("lstm"))


@models(PLAIN, quick=("mlp", "lenet", "attention"))
def test_near_what_pytorch_allocates(name: str) -> None:
    """Within a factor of 2, kernels' own scratch memory included.

    In float32: CPU convolutions in float64 unfold the whole batch inside the kernel. Those in float32 pad
    narrow channels to the vector width, which is most of the difference.
    """
    case = dataclasses.replace(ZOO[name], double=False)
    program = capture(case.module(), case.loss, case.batch(2))
    batch = case.batch(64)
    found, seen = peak_memory(program, 64), measured(program, batch)
    assert seen / 2 <= found <= seen * 2, (found, seen)


def test_grows_with_the_batch_in_a_straight_line() -> None:
    program = program_of("lenet")
    sizes = [peak_memory(program, size) for size in (64, 128, 192)]
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=0.02)
    assert sizes[1] > sizes[0]


def test_nothing_large_is_allocated() -> None:
    """A batch of a million images would not fit; only its shapes are used."""
    assert peak_memory(program_of("lenet"), 10**7) > 10**10


def test_bad_requests() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        peak_memory(program_of("mlp"), 0)
    example = (torch.ones(2, 3), torch.ones(2))
    with pytest.raises(CaptureError, match="backend='export'"):
        peak_memory(capture(nn.Linear(3, 2), total, example, backend="eager"), 4)
