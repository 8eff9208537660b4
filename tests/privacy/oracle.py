"""The definition: each example alone, through the module's own autograd; and how results are compared."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.program import Program
from mycelia.privacy.clipped_grad import Clipped, ClippedGrad, clipped_grad
from tests.privacy.models import CASES, batch_of, loss, module_of

__all__ = ["BOUND", "abadi", "agrees", "clipped_of", "close", "compare", "one_by_one", "program_of", "smooth"]

BOUND = 0.7


def abadi(norms: Tensor) -> Tensor:
    return (BOUND / norms.clamp(min=1e-30)).clamp(max=1)


def smooth(norms: Tensor) -> Tensor:
    return BOUND / (norms + 0.01)


def program_of(name: str, dtype: torch.dtype = torch.float64) -> Program:
    return _program(name, dtype)


def clipped_of(name: str, dtype: torch.dtype = torch.float64, **options: object) -> ClippedGrad:
    return _clipped(name, dtype, tuple(options.items()))


@functools.cache
def _program(name: str, dtype: torch.dtype) -> Program:
    return capture(module_of(name, dtype), loss, batch_of(name, 3, dtype))


@functools.cache
def _clipped(name: str, dtype: torch.dtype, options: tuple[tuple[str, object], ...]) -> ClippedGrad:
    return clipped_grad(_program(name, dtype), abadi, **dict(options))  # type: ignore[arg-type]


def one_by_one(module: nn.Module, batch: tuple[Tensor, Tensor], clip: Callable[[Tensor], Tensor]) -> Clipped:
    """Norms, factors, losses and the clipped sum, an example at a time."""
    params = {n: p for n, p in module.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in params.items()}
    norms, factors, losses = [], [], []
    for x, y in zip(*batch, strict=True):
        value = loss(module(x[None]), y[None])[0]
        grads = torch.autograd.grad(value, list(params.values()), allow_unused=True, materialize_grads=True)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        factor = clip(norm)
        for n, g in zip(params, grads, strict=True):
            total[n] += factor * g
        norms.append(norm.detach())
        factors.append(factor.detach())
        losses.append(value.detach())
    rows = (torch.stack(part) for part in (norms, factors, losses))
    return Clipped({n: t.detach() for n, t in total.items()}, *rows)


def close(found: Clipped, expected: Clipped, tolerance: float) -> None:
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert found.total.keys() == expected.total.keys()
    for name, value in expected.total.items():
        torch.testing.assert_close(
            found.total[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def compare(module: nn.Module, inputs: Tensor, *, fallback: bool = False) -> ClippedGrad:
    """Check a float64 module against the definition; `fallback`: some parameter has no rule."""
    targets = torch.linspace(-1, 1, len(inputs), dtype=torch.float64)
    program = capture(module, loss, (inputs[:3], targets[:3]))
    clipped = clipped_grad(program, abadi)
    assert bool(clipped.reasons) == fallback, clipped.reasons
    found = clipped(*program.init(), (inputs, targets))
    close(found, one_by_one(module, (inputs, targets), abadi), 1e-10)
    return clipped


def agrees(name: str) -> None:
    """Check a model of the table in batches of one and of six, and with some rows that are padding."""
    program, clipped = program_of(name), clipped_of(name)
    assert bool(clipped.reasons) == CASES[name].fallback, clipped.reasons
    for size in (1, 6):
        batch = batch_of(name, size)
        expected = one_by_one(module_of(name), batch, abadi)
        close(clipped(*program.init(), batch), expected, 1e-10)
