"""What a scenario needs before its first round: data, partition, model, plan, and who trains."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mycelia.aggregator import selectors
from mycelia.aggregator.noise_shares import SharePlan
from mycelia.aggregator.private_plans import ServerPlan, plan_privacy
from mycelia.aggregator.rounds import most_updates
from mycelia.aggregator.secure_plans import SecurePlan, plan_secure_sum
from mycelia.aggregator.selectors import Selector
from mycelia.engine.algorithms import Algorithm
from mycelia.engine.algorithms import build as build_algorithm
from mycelia.engine.data import Dataset, load
from mycelia.engine.errors import ConfigError
from mycelia.engine.local import ChangeOf, LocalWork
from mycelia.engine.plugins import user_code
from mycelia.engine.program import Program
from mycelia.engine.recipe import Recipe
from mycelia.engine.sums import SumFormat, TermSpec
from mycelia.engine.transforms.compile import (
    Plan,
    choose_plan,
    example_batch,
    package_adder,
    package_of,
    tune,
)
from mycelia.privacy.client_plans import ClientPlan
from mycelia.privacy.client_steps import PrivateSteps
from mycelia.privacy.pipeline import Pipeline
from mycelia.privacy.secagg.config import NoiseConfig
from mycelia.simulations.backends import Backend, Inline, Task, Workers
from mycelia.simulations.backends.shared import shared_folder
from mycelia.simulations.behaviour import Behaviour
from mycelia.simulations.dealing import pool
from mycelia.simulations.guard import Guard
from mycelia.simulations.partition import Partition
from mycelia.simulations.scenario import Scenario

__all__ = ["Prepared", "open_backend", "prepare"]

_POISSON_CHUNK = 4096  # most clients in one call of a backend when a round may draw everybody


@dataclass(frozen=True)
class Prepared:
    """A scenario's parts, loaded and checked.

    Attributes:
        scenario: the settings they come from.
        dataset: train and test examples.
        partition: who holds what.
        algorithm: bound to the population.
        work: what a client does, as the algorithm adjusted it.
        program: the model and its loss.
        selector: draws the cohorts.
        cohort: clients a round aims for.
        max_weight: largest weight a client may have.
        plan: how local steps run, and why.
        batch_shape: shape of the inputs of a full batch, None where there is none.
        package: the compiled step of a full batch, None for the other plans.
        form: format of the exact sum.
        privacy: what the `[privacy]` block comes to, None without one.
        secure: what the `[secure_sum]` block comes to, None without one.
        behaviour: how devices behave.
        change_of: what clients do to their batches, by the `[defence]` block; None without one.
    """

    scenario: Scenario
    dataset: Dataset
    partition: Partition
    algorithm: Algorithm
    work: LocalWork
    program: Program
    selector: Selector
    cohort: int
    max_weight: float
    plan: Plan
    batch_shape: tuple[int, ...] | None
    package: Path | None
    form: SumFormat
    privacy: ServerPlan | ClientPlan | SharePlan | None
    secure: SecurePlan | None
    behaviour: Behaviour
    change_of: ChangeOf | None

    def pipeline(self, guard: Guard | None) -> Pipeline:
        """What clients do to their updates, and the server to the sum.

        Args:
            guard: of a private run.
        """
        before = Pipeline() if guard is None else guard.pipeline
        return before if self.secure is None else self.secure.pipeline(before)


def prepare(scenario: Scenario, recorded_plan: str = "") -> Prepared:
    """Load, check and compile what a scenario names.

    Args:
        scenario: the settings.
        recorded_plan: the plan of a run that goes on, which it keeps; empty: the scenario's is resolved.

    Raises:
        ConfigError: settings that are out of range or contradict each other.
        DataError: data that is missing or malformed.
    """
    with user_code(f"data {scenario.data.name}"):
        dataset = load(scenario.data.name, **scenario.data.options)
    with user_code(f"algorithm {scenario.algorithm.name}"):
        algorithm = build_algorithm(scenario.algorithm.name, **scenario.algorithm.options)
    with user_code(f"partition {scenario.partition.name}"):
        partition = scenario.populate(dataset.train).partition
    if algorithm.pooled:
        partition = pool(partition)
    cohort = 1 if algorithm.pooled else scenario.cohort
    loss = scenario.loss_for(dataset.classes)
    recipe = Recipe.of(dataset, scenario.model.name, scenario.model.options, loss, scenario.seed)
    algorithm = algorithm.bind(population=partition.clients)
    local = scenario.local
    work = algorithm.work(LocalWork(local.epochs, local.steps, local.batch_size, local.lr))
    with user_code(f"model {scenario.model.name}"):
        program = recipe()
    sizes = partition.sizes()
    max_weight = _max_weight(scenario, sizes)
    secure_sum = partial(
        plan_secure_sum, scenario, algorithm, cohort=cohort, max_weight=max_weight, largest=int(sizes.max()),
        double=program.flatten(program.init()[0]).dtype == torch.float64,
    )  # fmt: skip

    def noised(clip: float, noise: NoiseConfig) -> SecurePlan | None:
        return secure_sum(_terms(scenario, algorithm, program, None), work, clip=clip, noise=noise)

    privacy = plan_privacy(
        scenario, algorithm, program, work, cohort=cohort, clients=len(sizes), examples=int(sizes.sum()),
        make=noised, sizes=sizes,
    )  # fmt: skip
    if isinstance(privacy, ClientPlan):
        work = privacy.work(work)
    specs = _terms(scenario, algorithm, program, privacy)
    secure = privacy.secure if isinstance(privacy, SharePlan) else secure_sum(specs, work)
    fixed = work.batch_size if 0 < work.batch_size <= int(sizes.max()) else 0
    batch = example_batch(dataset.train.inputs, dataset.train.targets, fixed)
    steps = scenario.rounds * cohort * work.step_count(int(np.median(sizes)))
    if scenario.privacy is not None and scenario.privacy.unit == "example":
        plan, package = _uncompiled(scenario.plan), None
    else:
        plan, package = _plan(recorded_plan, scenario.plan, steps, program, algorithm, work, batch)
    selector = selectors.build(scenario.selector.name, **scenario.selector.options)
    return Prepared(
        scenario=scenario,
        dataset=dataset,
        partition=partition,
        algorithm=algorithm,
        work=work,
        program=program,
        selector=selector,
        cohort=cohort,
        max_weight=max_weight,
        plan=plan,
        batch_shape=None if batch is None else tuple(batch[0].shape),
        package=package,
        form=SumFormat.plan(
            specs, max_weight,
            most_updates(cohort, partition.clients, scenario.round, selector.fixed_size),
        ),
        privacy=privacy,
        secure=secure,
        behaviour=_behaviour(scenario, privacy),
        change_of=_defence(scenario, program, dataset),
    )  # fmt: skip


@contextmanager
def open_backend(prepared: Prepared, run_path: Path, guard: Guard | None = None) -> Iterator[Backend]:
    """The processes that train, and the arrays they share, for as long as the context lasts.

    Args:
        prepared: the scenario's parts.
        run_path: the run folder.
        guard: says what clients do for privacy; None: the run is not private.
    """
    scenario, dataset, partition = prepared.scenario, prepared.dataset, prepared.partition
    program, algorithm = prepared.program, prepared.algorithm
    fixed = prepared.selector.fixed_size
    most = most_updates(prepared.cohort, partition.clients, scenario.round, fixed)
    arrays = (dataset.train.inputs, dataset.train.targets, dataset.test.inputs, dataset.test.targets)
    updates = 0 if prepared.secure is None else most * prepared.secure.shape.nbytes
    folder = shared_folder(sum(array.nbytes for array in arrays) + updates, run_path)
    pipeline = prepared.pipeline(guard)
    try:
        dataset.train.save(folder / "train")
        dataset.test.save(folder / "test")
        partition.save(folder / "partition")
        task = Task(
            program=program,
            algorithm=algorithm,
            work=prepared.work,
            form=prepared.form,
            seed=scenario.seed,
            plan=prepared.plan.name,
            folder=folder,
            states=run_path / "clients",
            classes=dataset.classes,
            max_cohort=min(most, max(_POISSON_CHUNK, prepared.cohort)),
            batch_shape=prepared.batch_shape,
            package=prepared.package,
            adder=_adder(program, algorithm) if prepared.package and prepared.secure is None else None,
            pipeline=pipeline.devices(),
            steps_of=_private_steps(guard, program, folder),
            change_of=prepared.change_of,
            packed=None if prepared.secure is None else prepared.secure.shape,
        )
        if scenario.backend.name == "inline":
            backend: Backend = Inline(task)
        else:
            extra = {**algorithm.message_extra(algorithm.start(program)), **pipeline.begin()}
            backend = Workers(
                task, extra, workers=scenario.backend.workers, deadline_s=scenario.round.budget_s
            )
        # every process holds its maps by now: without names, a killed run leaves nothing behind
        shutil.rmtree(folder, ignore_errors=True)
        with backend:
            yield backend
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _plan(
    recorded: str,
    wanted: str,
    steps: int,
    program: Program,
    algorithm: Algorithm,
    work: LocalWork,
    batch: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[Plan, Path | None]:
    """The recorded plan of a run that goes on, else the rule or measurement; and what is compiled."""
    if recorded:
        plan = Plan(recorded, "recorded")
    elif program.graphs is None and wanted in ("default", "tune"):
        plan = Plan("eager", "the model has no graph")
    else:
        plan = choose_plan(wanted, steps)
    if plan.name in ("eager", "interpreter"):
        return plan, None
    if batch is None:
        return Plan("eager", "no batch has a fixed size"), None
    params, buffers = program.init()
    vector = program.flatten(params).clone()
    extra = {"lr": work.rate(vector.dtype)} | algorithm.step_extra(program)
    example = (program.unflatten(vector), buffers, *batch, extra)
    if plan.name == "tune":
        plan = tune(program, algorithm.adjust(program), example, steps)[0]
    if plan.name == "interpreter":
        return plan, None
    return plan, package_of(program, algorithm.adjust(program), example)


def _terms(
    scenario: Scenario,
    algorithm: Algorithm,
    program: Program,
    privacy: ServerPlan | ClientPlan | SharePlan | None,
) -> dict[str, TermSpec]:
    """The algorithm's terms, with the configured bound on the parameters' deltas, and what clipping adds."""
    with user_code(f"algorithm {algorithm.name}"):
        specs = dict(algorithm.terms(program))
    if "params" in specs:
        specs["params"] = replace(specs["params"], max_abs=scenario.update.max_abs)
    clipping = None if privacy is None else privacy.clipping()
    return specs if clipping is None else specs | dict(clipping.terms())


def _behaviour(scenario: Scenario, privacy: ServerPlan | ClientPlan | SharePlan | None) -> Behaviour:
    """As configured; but where ε is about being in a cohort, none decides over another's dropping out."""
    if isinstance(privacy, ServerPlan) and privacy.sampler.relation == "add-remove":
        return scenario.behaviour.independent()
    return scenario.behaviour


def _defence(scenario: Scenario, program: Program, dataset: Dataset) -> ChangeOf | None:
    """What attacks the batches of clients, tried on two examples."""
    if scenario.defence is None:
        return None
    from mycelia.attacks.defences.local import LocalDefence
    from mycelia.attacks.defences.trial import try_on

    found = LocalDefence(scenario.defence)
    try_on(found.defence(), program, dataset)
    return found


def _private_steps(guard: Guard | None, program: Program, folder: Path) -> PrivateSteps | None:
    """What makes the local steps in every process, where they are private."""
    if guard is None or guard.steps_of is None:
        return None
    if program.graphs is None:
        guard.steps_of(program, None)  # it has no example in another process to be tried with
        return guard.steps_of
    program.save(folder / "program")
    return replace(guard.steps_of, saved=folder / "program")


def _uncompiled(wanted: str) -> Plan:
    """The plan of private steps."""
    if wanted not in ("default", "eager"):
        raise ConfigError(
            f"plan = {wanted!r}",
            rule="a client's private steps run operator by operator",
            fix="leave plan out",
            who="plan",
        )
    return Plan("eager", "the local steps are private")


def _max_weight(scenario: Scenario, sizes: npt.NDArray[Any]) -> float:
    if scenario.privacy is not None:
        return scenario.privacy.weight_max or 1.0
    return scenario.update.max_weight or float(max(1, int(sizes.max())))


def _adder(program: Program, algorithm: Algorithm) -> Path | None:
    """The compiled sum of the parameters' deltas, where they are float32 and the algorithm sends them."""
    float32 = program.flatten(program.init()[0]).dtype == torch.float32
    specs = algorithm.terms(program)
    fits = "params" in specs and specs["params"].size == program.dimension
    return package_adder(program.dimension) if float32 and fits and program.dimension > 1 else None
