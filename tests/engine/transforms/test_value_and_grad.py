"""value_and_grad against autograd on the module itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError
from mycelia.engine.transforms.value_and_grad import value_and_grad
from tests.engine.transforms.programs import close, models, program_of, same_gradients
from tests.engine.zoo import ZOO

CERTAIN = tuple(name for name, case in ZOO.items() if not case.random)
# what PyTorch has no rule for inside torch.func: gradients of control flow and of custom operators
NO_RULE = ("cond", "while", "scan", "custom-operator")


@models(CERTAIN)
def test_equals_autograd_on_the_module(name: str) -> None:
    case, program = ZOO[name], program_of(name)
    module, (inputs, targets) = case.reference(), case.batch(5)
    losses = case.loss(module.train()(inputs.clone()), targets)
    losses.mean().backward()
    found = value_and_grad(program)(*program.init(), inputs, targets)
    expected = {
        n: torch.zeros_like(p) if p.grad is None else p.grad
        for n, p in module.named_parameters()
        if p.requires_grad
    }
    tolerance = 1e-10 if case.double else 1e-5
    close(found.grads, expected, tolerance)
    torch.testing.assert_close(found.losses, losses.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.loss, losses.detach().mean(), rtol=tolerance, atol=tolerance)
    state = dict(module.named_buffers())
    close(found.buffers, {n: state[n] for n in found.buffers}, tolerance)


def test_a_linear_model_has_the_gradient_of_the_book() -> None:
    """Mean of (w.x - y)^2 has the gradient 2/B sum (w.x - y) x."""
    model = nn.Linear(3, 1, bias=False).double()
    inputs, targets = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    program = capture(model, lambda outputs, targets: (outputs[:, 0] - targets) ** 2, (inputs, targets))
    params, buffers = program.init()
    found = value_and_grad(program)(params, buffers, inputs, targets)
    away = inputs @ params["weight"][0] - targets
    torch.testing.assert_close(found.grads["weight"][0], 2 / 4 * away @ inputs)
    torch.testing.assert_close(found.loss, (away**2).mean())


@models()
def test_nothing_given_changes_and_nothing_returned_has_a_history(name: str) -> None:
    case, program = ZOO[name], program_of(name)
    params, buffers = program.init()
    before = {n: t.clone() for n, t in (params | buffers).items()}
    batch = case.batch(4)
    kept = [part.clone() for part in batch]
    found = value_and_grad(program)(params, buffers, *batch, seed=3)
    assert all(torch.equal(t, before[n]) for n, t in (params | buffers).items())
    assert all(torch.equal(part, copy) for part, copy in zip(batch, kept, strict=True))
    tensors = [found.loss, found.losses, *found.grads.values(), *found.buffers.values()]
    assert not any(t.requires_grad for t in (*tensors, *params.values()))
    assert list(found.grads) == list(params)


@models()
def test_the_seed_decides(name: str) -> None:
    case, program = ZOO[name], program_of(name)
    run, batch = value_and_grad(program), case.batch(4)
    one, again, other = (run(*program.init(), *batch, seed=seed) for seed in (1, torch.tensor(1), 2))
    same_gradients(again, one, 0.0)
    assert case.random == any(not torch.equal(one.grads[n], other.grads[n]) for n in one.grads)


# PyTorch traces control flow by export only
@models(name for name, case in ZOO.items() if not case.flow)
def test_can_be_traced(name: str) -> None:
    case, program = ZOO[name], program_of(name)
    run = value_and_grad(program)
    params, buffers = program.init()
    traced = make_fx(lambda *args: run(*args[:-1], seed=args[-1]))(
        params, buffers, *case.batch(4), torch.tensor(5)
    )
    batch, seed = case.batch(4, seed=9), torch.tensor(6)
    same_gradients(
        traced(params, buffers, *batch, seed),
        run(params, buffers, *batch, seed=seed),
        1e-10 if case.double else 1e-5,
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented")
@models()
def test_runs_under_vmap(name: str) -> None:
    case, program = ZOO[name], program_of(name)
    run = value_and_grad(program)
    inits = [program.init(), program.init()]
    stacked = [{n: torch.stack([init[k][n] for init in inits]) for n in inits[0][k]} for k in (0, 1)]
    batches = [case.batch(4, seed=seed) for seed in (1, 2)]
    pair = [torch.stack(parts) for parts in zip(*batches, strict=True)]
    seeds = torch.tensor([3, 4])

    def once(params, buffers, inputs, targets, seed):  # type: ignore[no-untyped-def]
        return run(params, buffers, inputs, targets, seed=seed)[:4]

    if name in NO_RULE:
        with pytest.raises(CaptureError, match=r"inside a torch\.func transform"):
            torch.func.vmap(once)(*stacked, *pair, seeds)
        return
    loss, grads, after, losses = torch.func.vmap(once)(*stacked, *pair, seeds)
    for number, (batch, init) in enumerate(zip(batches, inits, strict=True)):
        alone = run(*init, *batch, seed=seeds[number])
        close({n: t[number] for n, t in grads.items()}, alone.grads, 1e-10 if case.double else 1e-5)
        close({n: t[number] for n, t in after.items()}, alone.buffers, 1e-10 if case.double else 1e-5)
        torch.testing.assert_close(losses[number], alone.losses)
        torch.testing.assert_close(loss[number], alone.loss)
