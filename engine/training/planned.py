"""The update step in the form of a plan; see `engine.transforms.compile` for what the plans are."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mycelia.engine import _torch
from mycelia.engine.program import Program
from mycelia.engine.step import Step
from mycelia.engine.transforms.compile import Plan, PlannedStep, choose_plan, package_step
from mycelia.engine.transforms.layout import layout
from mycelia.engine.types import Tensors

__all__ = ["Example", "StepOf", "plan_update"]


class StepOf(Protocol):
    """Makes the step of a Program: a plan chooses the form of the Program, and whether to write in place."""

    def __call__(self, program: Program, *, in_place: bool) -> Step:
        """The step."""


Example = tuple[Tensors, Tensors, Tensor, Tensor]
"""(params, carry, inputs, targets) with the shapes of a full batch."""


def plan_update(
    requested: str, program: Program, step_of: StepOf, example: Example, steps: int
) -> tuple[Plan, PlannedStep]:
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
        return plan, _planned(program, step_of, plan.name, example)
    names = ("interpreter", *(["inductor"] if _torch.compiler() else []))
    timed = {name: _time(program, step_of, name, example) for name in names}
    best = min(names, key=lambda name: timed[name].setup + steps * timed[name].step)
    measured = ", ".join(f"{name} {timed[name].step * 1e3:.3f} ms" for name in names)
    return Plan(best, f"tuned for {steps} steps: {measured} a step"), timed[best].update


class _Timed(NamedTuple):
    update: PlannedStep
    setup: float
    step: float


def _time(program: Program, step_of: StepOf, name: str, example: Example, repeats: int = 20) -> _Timed:
    params, carry = ({key: tensor.clone() for key, tensor in part.items()} for part in example[:2])
    seed = torch.zeros((), dtype=torch.int64)
    started = time.perf_counter()
    update = _planned(program, step_of, name, example)
    update(params, carry, example[2], example[3], seed, {})
    setup = time.perf_counter() - started
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        update(params, carry, example[2], example[3], seed, {})
        times.append(time.perf_counter() - started)
    return _Timed(update, setup, sorted(times)[len(times) // 2])


def _planned(program: Program, step_of: StepOf, plan: str, example: Example) -> PlannedStep:
    step = step_of(program, in_place=True)
    package = None
    if plan == "inductor":
        package = package_step(step_of(layout(program), in_place=False), (*example, {}))
    return PlannedStep(step, plan, tuple(example[2].shape), package)
