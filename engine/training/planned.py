"""The update step in the form of a plan; see `engine.transforms.compile` for what the plans are."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, fx

from mycelia.engine import _torch
from mycelia.engine.errors import ConfigError
from mycelia.engine.program import Program
from mycelia.engine.step import Step
from mycelia.engine.transforms.compile import Plan, choose_plan, trace_step
from mycelia.engine.transforms.layout import layout
from mycelia.engine.types import Tensors

__all__ = ["Example", "PlannedUpdate", "StepOf", "plan_update"]


class StepOf(Protocol):
    """Makes the step of a Program: a plan chooses the form of the Program, and whether to write in place."""

    def __call__(self, program: Program, *, in_place: bool) -> Step:
        """The step."""


Example = tuple[Tensors, Tensors, Tensor, Tensor]
"""(params, carry, inputs, targets) with the shapes of a full batch."""


class PlannedUpdate:
    """A step that updates parameters and carry in place, in the form a resolved plan gives it.

    Args:
        program: the Program to train.
        step_of: makes its step.
        plan: `eager`, `interpreter` or `inductor`.
        example: the shapes that `inductor` compiles for; batches of another shape are interpreted.

    Raises:
        ConfigError: an unresolved or unknown plan.
    """

    def __init__(self, program: Program, step_of: StepOf, plan: str, example: Example) -> None:
        if plan not in ("eager", "interpreter", "inductor"):
            raise ConfigError(
                f"plan {plan!r} is not resolved", rule="eager, interpreter or inductor", who="plan"
            )
        self.plan = plan
        self._step = step_of(program, in_place=True)
        self._traced: dict[tuple[torch.Size, torch.Size], fx.GraphModule] = {}
        self._compiled: Callable[[list[Tensor]], list[Tensor]] | None = None
        if plan == "inductor":
            self._compiled = _compiled(step_of(layout(program), in_place=False), example)
        self._shapes = (example[2].shape, example[3].shape)

    def __call__(
        self, params: Tensors, carry: Tensors, inputs: Tensor, targets: Tensor, seed: Tensor
    ) -> Tensor:
        """Run one step in place; the batch's mean loss (0-d)."""
        if self.plan == "eager":
            result = self._step(params, carry, inputs, targets, seed, {})
            for own, new in ((params, result.params), (carry, result.buffers)):
                for name, tensor in own.items():
                    tensor.copy_(new[name])
            return result.loss
        shapes = (inputs.shape, targets.shape)
        args = [*params.values(), *carry.values(), inputs, targets, seed]
        if self._compiled is not None and shapes == self._shapes:
            return self._compiled(args)[-1]
        if shapes not in self._traced:
            self._traced[shapes] = trace_step(self._step, params, carry, inputs, targets, seed, {})
        with torch.no_grad():
            loss: Tensor = self._traced[shapes](*args)[-1]
            return loss


def plan_update(
    requested: str, program: Program, step_of: StepOf, example: Example, steps: int
) -> tuple[Plan, PlannedUpdate]:
    """The plan that `requested` stands for, and the step in its form.

    `tune` times the candidates on the example and takes the one that is done first with `steps` steps,
    compiling included.

    Raises:
        ConfigError: an unknown plan, or `inductor` without a C++ compiler.
        CaptureError: a plan that needs a graph, and the program has none.
    """
    plan = choose_plan(requested, steps)
    if program.graphs is None:
        if requested in ("interpreter", "inductor"):
            program.graph(f"plan {requested!r}")  # raises, and says why
        plan = Plan("eager", "the program has no graph")
    if plan.name != "tune":
        return plan, PlannedUpdate(program, step_of, plan.name, example)
    names = ("interpreter", *(["inductor"] if _torch.compiler() else []))
    timed = {name: _time(program, step_of, name, example) for name in names}
    best = min(names, key=lambda name: timed[name].setup + steps * timed[name].step)
    measured = ", ".join(f"{name} {timed[name].step * 1e3:.3f} ms" for name in names)
    return Plan(best, f"tuned for {steps} steps: {measured} a step"), timed[best].update


class _Timed(NamedTuple):
    update: PlannedUpdate
    setup: float
    step: float


def _time(program: Program, step_of: StepOf, name: str, example: Example, repeats: int = 20) -> _Timed:
    params, carry = ({key: tensor.clone() for key, tensor in part.items()} for part in example[:2])
    seed = torch.zeros((), dtype=torch.int64)
    started = time.perf_counter()
    update = PlannedUpdate(program, step_of, name, example)
    update(params, carry, example[2], example[3], seed)
    setup = time.perf_counter() - started
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        update(params, carry, example[2], example[3], seed)
        times.append(time.perf_counter() - started)
    return _Timed(update, setup, sorted(times)[len(times) // 2])


def _compiled(step: Step, example: Example) -> Callable[[list[Tensor]], list[Tensor]]:
    params, carry, inputs, targets = example
    seed = torch.zeros((), dtype=torch.int64)
    graph = trace_step(step, params, carry, inputs, targets, seed, {})
    args = [tensor.clone() for tensor in (*params.values(), *carry.values(), inputs, targets, seed)]
    with tempfile.TemporaryDirectory(prefix="mycelia-plan-") as folder:
        path = Path(folder) / "step.pt2"
        _torch.package(graph, args, path)
        return _torch.load_package(path)
