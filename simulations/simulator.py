"""`simulate`: a scenario becomes a run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mycelia.aggregator import selectors
from mycelia.aggregator.effects import Abort
from mycelia.aggregator.rounds import asked_for
from mycelia.engine import events
from mycelia.engine.algorithms import Algorithm, Message, ServerState
from mycelia.engine.algorithms import build as build_algorithm
from mycelia.engine.checkpoint import Checkpoint
from mycelia.engine.config import load_config, to_toml
from mycelia.engine.data import Dataset, load
from mycelia.engine.environment import describe, memory
from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.engine.events import Listener
from mycelia.engine.heap import keep_heap
from mycelia.engine.local import LocalWork
from mycelia.engine.plugins import user_code
from mycelia.engine.program import Program
from mycelia.engine.report.spread import worst_decile
from mycelia.engine.run import CHECKPOINTS, Run
from mycelia.engine.schema import model_sha256
from mycelia.engine.sums import SumFormat, TermSpec
from mycelia.engine.transforms.compile import (
    Plan,
    choose_plan,
    example_batch,
    package_adder,
    package_of,
    tune,
)
from mycelia.engine.types import Tensors
from mycelia.simulations.backends import Backend, Inline, Task, Workers
from mycelia.simulations.backends.shared import shared_folder
from mycelia.simulations.client_store import ClientStore
from mycelia.simulations.dealing import pool
from mycelia.simulations.federation import Federation, RoundReport, Straggler
from mycelia.simulations.partition import Partition
from mycelia.simulations.recipe import Recipe
from mycelia.simulations.scenario import Scenario, load_scenario

__all__ = ["SimulationResult", "resume", "simulate"]

_POISSON_CHUNK = 4096


@dataclass(frozen=True)
class SimulationResult:
    """What a simulation found; the keys of `--format json`.

    Attributes:
        rounds: rounds done, failed ones included.
        failed_rounds: rounds that ended without a new model.
        seconds_total: wall-clock seconds over all sittings, start-up included.
        seconds_startup: of the last sitting, from the call to the first round.
        seconds_per_round: mean from select to merge without the first round, evaluation apart.
        sgd_steps_per_second: local steps of the survivors by the time of those rounds.
        simulated_seconds: length of the run on the simulated clock.
        test_accuracy: share of right answers on the test set; None for regression. Where clients have models
            of their own it is the mean over clients, weighted by examples.
        test_loss: mean loss, likewise.
        worst_decile_accuracy: mean accuracy of the worst tenth of the clients.
        bytes_up: sent by clients, over all rounds.
        bytes_down: received by clients, over all rounds.
        epsilon: None: the run was not private.
        delta: None: the run was not private.
        plan: how local steps ran.
        model_sha256: hash of the final parameters and buffers.
        partition_sha256: hash of who holds what.
        run_dir: the run folder.
        backend: its name.
        workers: number of processes that trained.
    """

    rounds: int
    failed_rounds: int
    seconds_total: float
    seconds_startup: float
    seconds_per_round: float
    sgd_steps_per_second: float
    simulated_seconds: float
    test_accuracy: float | None
    test_loss: float
    worst_decile_accuracy: float | None
    bytes_up: int
    bytes_down: int
    epsilon: float | None
    delta: float | None
    plan: str
    model_sha256: str
    partition_sha256: str
    run_dir: str
    backend: str
    workers: int

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON can say them."""
        return asdict(self)


def simulate(
    scenario: Scenario | Mapping[str, Any] | str,
    *,
    out: Path | None = None,
    listeners: Sequence[Listener] = (),
) -> SimulationResult:
    """Run a scenario from its start.

    Args:
        scenario: what to run: a `Scenario`, its settings as a table, or a built-in name or TOML file.
        out: the run folder; None: a new one below `runs/`.
        listeners: called with every event, for progress bars.

    Raises:
        ConfigError: settings that are out of range or contradict each other.
        DataError: data that is missing or malformed.
        RoundAborted: too many rounds failed in a row.

    With `backend.name = "workers"` the calling script needs the usual `if __name__ == "__main__":` guard.
    """
    if isinstance(scenario, str):
        scenario = load_scenario(scenario)
    elif not isinstance(scenario, Scenario):
        scenario = load_config(Scenario, dict(scenario), [])
    existed = out is not None and out.exists()
    with Run.create(out, "simulate", to_toml(scenario), listeners=listeners) as run:
        simulation = _Simulation(scenario, run)
        try:
            return simulation.go(None)
        except (MyceliaError, KeyboardInterrupt):
            if not simulation.started:  # nothing ran: a folder would only be in the way of the next try
                run.close()
                shutil.rmtree(run.path)
                if existed:
                    run.path.mkdir()
            raise


def resume(path: Path, *, listeners: Sequence[Listener] = ()) -> SimulationResult:
    """Go on with a run from its newest intact checkpoint; ends with the model of an uninterrupted run.

    Raises:
        ConfigError: the folder is no simulation's run.
    """
    opened = Run.open(path)
    started = next(opened.events({"run_started"}), None)
    if not isinstance(started, events.RunStarted) or started.command != "simulate":
        found = started.command if isinstance(started, events.RunStarted) else "nothing"
        raise ConfigError(
            f"the folder holds a run of {found!r}",
            rule="simulate --resume goes on with a simulation",
            fix=f"use `mycelia {found} --resume {path}`" if started else "start it anew",
            who=str(path),
        )
    scenario = load_config(Scenario, opened.path / "config.toml", [])
    was, now = dict(started.config), scenario.model_dump(mode="json")
    if changed := sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key)):
        raise ConfigError(
            f"config.toml differs in {', '.join(changed)} from what the run began with",
            rule="a resumed run keeps its settings, so that its record stays true",
            fix="put them back, or start a new run",
            who=str(path),
        )
    with Run.resume(path, listeners=listeners) as run:
        return _Simulation(scenario, run).go(run.load_checkpoint())


class _Simulation:
    """One sitting of a run."""

    def __init__(self, scenario: Scenario, run: Run) -> None:
        self.scenario, self.run = scenario, run
        self.began = time.perf_counter()
        self.before_s = 0.0  # wall-clock seconds of earlier sittings
        self.round_s: list[float] = []
        self.steps = 0.0
        self.failed = self.failed_in_a_row = 0
        self.number = 0
        self.plan_name = ""
        self.cohort = scenario.cohort
        self.bytes_up = self.bytes_down = 0

    @property
    def started(self) -> bool:
        """Whether there is something to go on from."""
        folder = self.run.path / CHECKPOINTS
        return folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir())

    def go(self, checkpoint: Checkpoint | None) -> SimulationResult:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # parallelism is across clients: two threads are slower on small models
        keep_heap()  # vectors of the model's size come and go in every merge
        try:
            return self._go(checkpoint)
        except KeyboardInterrupt:
            if not self.started:
                raise
            self.run.log(events.RunFinished(status="interrupted"))
            raise KeyboardInterrupt(str(self.run.path)) from None
        except MyceliaError as error:
            if self.started:
                self.run.log(events.RunFinished(status="failed", error=str(error)))
            raise
        finally:
            torch.set_num_threads(threads)

    def _go(self, checkpoint: Checkpoint | None) -> SimulationResult:
        scenario = self.scenario
        with user_code(f"data {scenario.data.name}"):
            dataset = load(scenario.data.name, **scenario.data.options)
        with user_code(f"algorithm {scenario.algorithm.name}"):
            algorithm = build_algorithm(scenario.algorithm.name, **scenario.algorithm.options)
        with user_code(f"partition {scenario.partition.name}"):
            partition = scenario.populate(dataset.train).partition
        if algorithm.pooled:
            partition = pool(partition)
        self.cohort = 1 if algorithm.pooled else scenario.cohort
        loss = scenario.loss_for(dataset.classes)
        recipe = Recipe.of(dataset, scenario.model.name, scenario.model.options, loss, scenario.seed)
        algorithm = algorithm.bind(population=partition.clients)
        local = scenario.local
        work = algorithm.work(LocalWork(local.epochs, local.steps, local.batch_size, local.lr))
        with user_code(f"model {scenario.model.name}"):
            program = recipe()
        sizes = partition.sizes()
        meta: Mapping[str, Any] = checkpoint.meta if checkpoint else {}
        fixed = work.batch_size if 0 < work.batch_size <= int(sizes.max()) else 0
        batch = example_batch(dataset.train.inputs, dataset.train.targets, fixed)
        plan, package = self._plan(meta.get("plan"), program, algorithm, work, batch, sizes)
        shape = None if batch is None else tuple(batch[0].shape)
        self.plan_name = plan.name
        selector = selectors.build(scenario.selector.name, **scenario.selector.options)
        with self._backend(
            program, algorithm, work, dataset, partition, plan, shape, package, selector.fixed_size
        ) as backend:
            federation = Federation(
                program=program,
                algorithm=algorithm,
                backend=backend,
                partition=partition,
                selector=selector,
                behaviour=scenario.behaviour,
                config=scenario.round,
                cohort=self.cohort,
                seed=scenario.seed,
                max_weight=self._max_weight(sizes),
                steps=work.step_count,
                progress=self._progress,
            )
            if checkpoint is None:
                self._log_start(dataset, partition, plan)
                self._save(federation)  # so that even the first round can be interrupted
            else:
                self._restore(federation, checkpoint)
            startup = time.perf_counter() - self.began
            while self.number < scenario.rounds:
                self._round(federation, backend)
            return self._finish(federation, backend, partition, plan, startup)

    def _plan(
        self,
        recorded: Any,
        program: Program,
        algorithm: Algorithm,
        work: LocalWork,
        batch: tuple[torch.Tensor, torch.Tensor] | None,
        sizes: np.ndarray[Any, Any],
    ) -> tuple[Plan, Path | None]:
        """The recorded plan of a run that goes on, else the rule or measurement; and what is compiled."""
        steps = self.scenario.rounds * self.cohort * work.step_count(int(np.median(sizes)))
        if recorded:
            plan = Plan(str(recorded), "recorded")
        elif program.graphs is None and self.scenario.plan in ("default", "tune"):
            plan = Plan("eager", "the model has no graph")
        else:
            plan = choose_plan(self.scenario.plan, steps)
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

    @contextmanager
    def _backend(
        self,
        program: Program,
        algorithm: Algorithm,
        work: LocalWork,
        dataset: Dataset,
        partition: Partition,
        plan: Plan,
        batch_shape: tuple[int, ...] | None,
        package: Path | None,
        fixed_size: bool,
    ) -> Iterator[Backend]:
        scenario = self.scenario
        # Under Poisson a round may, however unlikely, draw everybody: the sum is planned for that
        cohort = asked_for(self.cohort, scenario.round) if fixed_size else partition.clients
        carried = cohort if scenario.round.stragglers == "next_round" else 0
        form = SumFormat.plan(
            self._terms(algorithm, program), self._max_weight(partition.sizes()), cohort + carried
        )
        arrays = (dataset.train.inputs, dataset.train.targets, dataset.test.inputs, dataset.test.targets)
        folder = shared_folder(sum(array.nbytes for array in arrays), self.run.path)
        try:
            dataset.train.save(folder / "train")
            dataset.test.save(folder / "test")
            partition.save(folder / "partition")
            task = Task(
                program=program,
                algorithm=algorithm,
                work=work,
                form=form,
                seed=scenario.seed,
                plan=plan.name,
                folder=folder,
                states=self.run.path / "clients",
                classes=dataset.classes,
                max_cohort=min(cohort + carried, max(_POISSON_CHUNK, self.cohort)),
                batch_shape=batch_shape,
                package=package,
                adder=_adder(program, algorithm) if package else None,
            )
            if scenario.backend.name == "inline":
                backend: Backend = Inline(task)
            else:
                extra = algorithm.message_extra(algorithm.start(program))
                backend = Workers(
                    task,
                    dict(extra),
                    workers=scenario.backend.workers,
                    deadline_s=scenario.round.budget_s,
                )
            # every process holds its maps by now: without names, a killed run leaves nothing behind
            shutil.rmtree(folder, ignore_errors=True)
            with backend:
                yield backend
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _terms(self, algorithm: Algorithm, program: Program) -> dict[str, TermSpec]:
        """The algorithm's terms, with the configured bound on the parameters' deltas."""
        with user_code(f"algorithm {algorithm.name}"):
            specs = dict(algorithm.terms(program))
        if "params" in specs:
            specs["params"] = replace(specs["params"], max_abs=self.scenario.update.max_abs)
        return specs

    def _max_weight(self, sizes: np.ndarray[Any, Any]) -> float:
        return self.scenario.update.max_weight or float(max(1, int(sizes.max())))

    def _log_start(self, dataset: Dataset, partition: Partition, plan: Plan) -> None:
        scenario, summary = self.scenario, partition.summary()
        self.run.log(
            events.RunStarted(
                command="simulate",
                config=scenario.model_dump(mode="json"),
                seed=scenario.seed,
                environment=describe(),
                plan=f"{plan.name} ({plan.reason})",
                data_sha256=dataset.sha256,
                partition_sha256=partition.sha256,
                total=scenario.rounds,
            )
        )
        sizes = partition.sizes()
        step = max(1, len(sizes) // 2000)
        matrix = summary.get("labels", [])
        self.run.log(
            events.Partition(
                name=scenario.partition.name,
                clients=partition.clients,
                sizes=[int(size) for size in sizes[::step]],
                labels=[str(label) for label in range(len(matrix))],
                matrix=matrix,
                imbalance={
                    name: summary[name]
                    for name in ("gini", "total_variation", "effective_classes")
                    if name in summary
                },
            )
        )

    def _progress(self, done: int, asked: int) -> None:
        self.run.log(events.CohortProgress(round=self.number + 1, done=done, asked=asked))

    def _round(self, federation: Federation, backend: Backend) -> None:
        every, last = self.scenario.evaluation.every, self.number + 1 == self.scenario.rounds
        due = not last and every > 0 and (self.number + 1) % every == 0
        found: dict[str, float] = {}

        def evaluate() -> None:
            found.update(backend.test(federation.message(self.number + 1)).result())

        report = federation.run_round(self.number, evaluate=evaluate if due else None)
        self.number += 1
        self._record(report, federation)
        if found:
            self.run.log(events.Evaluation(metrics=found, round=self.number))
        used = memory()
        self.run.log(
            events.SystemLoad(
                memory_bytes=used.now,
                peak_memory_bytes=used.peak,
                workers_memory_bytes=backend.memory_bytes(),
                round=self.number,
            )
        )
        if report.aborted is None:
            self.failed_in_a_row = 0
        else:
            ClientStore(self.run.path / "clients").forget_from(self.number - 1)  # what it left at clients
            self._failed(report.aborted)
        self._save(federation)

    def _record(self, report: RoundReport, federation: Federation) -> None:
        up = report.survivors * federation.bytes_up
        down = report.asked * federation.bytes_down
        self.bytes_up, self.bytes_down = self.bytes_up + up, self.bytes_down + down
        self.round_s.append(sum(s for name, s in report.seconds.items() if name != "evaluate"))
        if len(self.round_s) == 2:
            self.steps = 0.0  # the first round counts only where it is the only one
        self.steps += report.sums["steps"]
        counts: dict[str, int] = {"asked": report.asked, "survivors": report.survivors}
        for outcome in report.outcomes:
            counts[outcome.status] = counts.get(outcome.status, 0) + 1
        counts["examples"], counts["sgd_steps"] = int(report.sums["examples"]), int(report.sums["steps"])
        examples = report.sums["examples"]
        self.run.log(
            events.Round(
                round=self.number,
                seconds=dict(report.seconds),
                counts=counts,
                metrics={"loss": report.sums["loss_sum"] / examples} if examples else {},
                bytes_up=up,
                bytes_down=down,
                simulated_seconds=None if federation.behaviour.ideal else report.simulated_s,
            )
        )
        self.run.log(
            events.Outcomes(
                round=self.number,
                clients=[events.Outcome(*outcome) for outcome in report.outcomes],
            )
        )

    def _failed(self, aborted: Abort) -> None:
        self.failed += 1
        self.failed_in_a_row += 1
        error = aborted.error()
        # a run in which no round succeeds has not finished, however few they were
        hopeless = self.failed == self.number == self.scenario.rounds
        if hopeless or self.failed_in_a_row >= self.scenario.round.max_failed_rounds:
            raise error
        self.run.log(events.WarningRaised(message=str(error), who=f"round {self.number}"))

    def _save(self, federation: Federation) -> None:
        state = federation.state
        tensors: Tensors = {"vector": state.vector}
        tensors |= {f"buffer/{name}": tensor for name, tensor in state.buffers.items()}
        tensors |= {f"extra/{name}": tensor for name, tensor in state.extra.items()}
        if federation.previous is not None:
            previous = federation.previous
            tensors["previous/vector"] = previous.vector
            tensors |= {f"previous/buffer/{name}": tensor for name, tensor in previous.buffers.items()}
            tensors |= {f"previous/extra/{name}": tensor for name, tensor in previous.extra.items()}
        self.run.save_checkpoint(
            self.number,
            tensors,
            {
                "plan": self.plan_name,
                "now_s": federation.now_s,
                "carried": [[client, *straggler] for client, straggler in federation.carried.items()],
                "failed": self.failed,
                "failed_in_a_row": self.failed_in_a_row,
                "bytes_up": self.bytes_up,
                "bytes_down": self.bytes_down,
                "steps": self.steps,
                "first_round_s": sum(self.round_s[:1]),
                "later_rounds_s": sum(self.round_s[1:]),
                "seconds": self.before_s + time.perf_counter() - self.began,
                "schema": federation.program.schema.sha256,
            },
        )

    def _restore(self, federation: Federation, checkpoint: Checkpoint) -> None:
        meta, tensors = checkpoint.meta, checkpoint.tensors
        if meta.get("schema") != federation.program.schema.sha256:
            raise ConfigError(
                "the checkpoint is of another model",
                rule="the model's schema hash is that of the checkpoint",
                fix="resume with the model code and the data the run began with",
                who=str(self.run.path),
            )

        def part(prefix: str) -> Tensors:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        federation.state = ServerState(tensors["vector"], part("buffer/"), part("extra/"))
        federation.now_s = meta["now_s"]
        federation.carried = {client: Straggler(*fate) for client, *fate in meta["carried"]}
        self.number = checkpoint.step
        if "previous/vector" in tensors:
            federation.previous = Message(
                tensors["previous/vector"], part("previous/buffer/"), part("previous/extra/"), self.number - 1
            )
        self.failed, self.failed_in_a_row = meta["failed"], meta["failed_in_a_row"]
        self.bytes_up, self.bytes_down = meta["bytes_up"], meta["bytes_down"]
        self.steps, self.before_s = meta["steps"], meta["seconds"]
        later = max(0, self.number - 1)
        self.round_s = [meta["first_round_s"]] if self.number else []
        self.round_s += [meta["later_rounds_s"] / later] * later if later else []
        ClientStore(self.run.path / "clients").forget_from(self.number)

    def _finish(
        self, federation: Federation, backend: Backend, partition: Partition, plan: Plan, startup: float
    ) -> SimulationResult:
        state = federation.state
        message = federation.message(self.number)
        metrics = backend.test(message).result()
        self.run.log(events.Evaluation(metrics=metrics, round=self.number))
        spread = self._spread(federation, backend, partition, message)
        accuracy, loss = metrics.get("accuracy"), metrics["loss"]
        if spread and type(federation.algorithm).personal is not Algorithm.personal:
            weights = np.array([row["examples"] for row in spread.values()])
            loss = float(np.average([row["loss"] for row in spread.values()], weights=weights))
            if accuracy is not None:
                accuracy = float(np.average([row["accuracy"] for row in spread.values()], weights=weights))
        accuracies = [row["accuracy"] for row in spread.values() if "accuracy" in row]
        later = self.round_s[1:] or self.round_s
        result = SimulationResult(
            rounds=self.number,
            failed_rounds=self.failed,
            seconds_total=self.before_s + time.perf_counter() - self.began,
            seconds_startup=startup,
            seconds_per_round=sum(later) / len(later),
            sgd_steps_per_second=self.steps / sum(later) if sum(later) else 0.0,
            simulated_seconds=federation.now_s,
            test_accuracy=accuracy,
            test_loss=loss,
            worst_decile_accuracy=worst_decile(accuracies) if accuracies else None,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            epsilon=None,
            delta=None,
            plan=plan.name,
            model_sha256=model_sha256(federation.program.unflatten(state.vector) | state.buffers),
            partition_sha256=partition.sha256,
            run_dir=str(self.run.path),
            backend=backend.name,
            workers=backend.workers,
        )
        self.run.log(events.RunFinished(result=result.to_json()))
        return result

    def _spread(
        self, federation: Federation, backend: Backend, partition: Partition, message: Message
    ) -> dict[int, dict[str, float]]:
        """Each client's own model on its own test examples, for an even sample of the clients."""
        wanted = min(self.scenario.evaluation.clients, partition.clients)
        if wanted == 0:
            return {}
        clients = [int(c) for c in np.unique(np.linspace(0, partition.clients - 1, wanted).astype(np.int64))]
        spread = backend.spread(message, clients, self.scenario.evaluation.examples_per_client)
        spread = {client: row for client, row in spread.items() if row["examples"] > 0}
        names = sorted({name for row in spread.values() for name in row} - {"examples"})
        self.run.log(
            events.Spread(
                metrics={name: [row[name] for row in spread.values()] for name in names},
                clients=[partition.name(client) for client in spread],
                examples=[int(row["examples"]) for row in spread.values()],
                round=self.number,
            )
        )
        return spread


def _adder(program: Program, algorithm: Algorithm) -> Path | None:
    """The compiled sum of the parameters' deltas, where they are float32 and the algorithm sends them."""
    float32 = program.flatten(program.init()[0]).dtype == torch.float32
    specs = algorithm.terms(program)
    fits = "params" in specs and specs["params"].size == program.dimension
    return package_adder(program.dimension) if float32 and fits and program.dimension > 1 else None
