"""`simulate`: a scenario becomes a run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mycelia.aggregator.effects import Abort
from mycelia.aggregator.rounds import quorum_for
from mycelia.engine import events
from mycelia.engine.algorithms import Algorithm, Message, ServerState
from mycelia.engine.checkpoint import Checkpoint
from mycelia.engine.client_store import ClientStore
from mycelia.engine.config import load_config, to_toml
from mycelia.engine.environment import describe, memory
from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.engine.events import Listener
from mycelia.engine.heap import keep_heap
from mycelia.engine.report.spread import worst_decile
from mycelia.engine.run import CHECKPOINTS, Run
from mycelia.engine.schema import model_sha256
from mycelia.engine.types import Tensors
from mycelia.simulations.backends import Backend
from mycelia.simulations.federation import Federation, RoundReport, Straggler
from mycelia.simulations.guard import Guard, open_guard
from mycelia.simulations.partition import Partition
from mycelia.simulations.preparation import Prepared, open_backend, prepare
from mycelia.simulations.result import SimulationResult
from mycelia.simulations.scenario import Scenario, load_scenario
from mycelia.simulations.secure_rounds import SecureRounds

__all__ = ["resume", "simulate"]


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

    A run that has finished is left as it is, and its result returned.

    Raises:
        ConfigError: the folder is no simulation's run.
    """
    opened = Run.open(path)
    started = finished = None
    for event in opened.events():  # all of them: a damaged line is told before hours of training, not after
        started = started or (event if isinstance(event, events.RunStarted) else None)
        finished = event if isinstance(event, events.RunFinished) else finished
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
    if finished is not None and finished.status == "finished":
        return SimulationResult(**finished.result)  # there is nothing left to do
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
        self.bytes_up = self.bytes_down = 0
        self.guard: Guard | None = None
        self.stopped_by = ""

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
            if self.guard is not None:
                self.guard.close()
            torch.set_num_threads(threads)

    def _go(self, checkpoint: Checkpoint | None) -> SimulationResult:
        scenario = self.scenario
        prepared = prepare(scenario, str(checkpoint.meta.get("plan", "")) if checkpoint else "")
        self.plan_name = prepared.plan.name
        guard = None
        if prepared.privacy is not None:
            guard = open_guard(prepared.privacy, prepared.form, self.run.path, scenario.seed, checkpoint)
            self.guard = guard
        with open_backend(prepared, self.run.path, guard) as backend:
            return self._all_rounds(prepared, backend, guard, checkpoint)

    def _all_rounds(
        self, prepared: Prepared, backend: Backend, guard: Guard | None, checkpoint: Checkpoint | None
    ) -> SimulationResult:
        """From the first round, or where the checkpoint stands, to the end."""
        scenario = self.scenario
        federation = Federation(
            program=prepared.program,
            algorithm=prepared.algorithm,
            backend=backend,
            partition=prepared.partition,
            selector=prepared.selector,
            behaviour=prepared.behaviour,
            config=scenario.round,
            cohort=prepared.cohort,
            seed=scenario.seed,
            max_weight=prepared.max_weight,
            steps=prepared.work.step_count,
            progress=self._progress,
            pipeline=prepared.pipeline(guard),
            participation=None if guard is None else guard.participation,
            selection_seed=None if guard is None else guard.selection_seed,
            release=None if guard is None else guard.release,
            secure=self._secure_rounds(prepared, guard),
        )
        if checkpoint is None:
            self._log_start(prepared)
            self._save(federation)  # so that even the first round can be interrupted
        else:
            self._restore(federation, checkpoint)
        startup = time.perf_counter() - self.began
        while self.number < scenario.rounds:
            if guard is not None:
                needed = quorum_for(prepared.cohort, scenario.round)
                self.stopped_by = guard.stop(self.number, prepared.partition.clients, needed)
            if self.stopped_by:
                break
            self._round(federation, backend)
        return self._finish(federation, backend, prepared.partition, startup)

    def _secure_rounds(self, prepared: Prepared, guard: Guard | None) -> SecureRounds | None:
        """What makes the sums, where they are secure."""
        if prepared.secure is None:
            return None
        return SecureRounds(
            prepared.secure,
            prepared.program,
            seed=self.scenario.seed,
            noise=None if guard is None else guard.source,
            charge=None if guard is None else guard.charge,
        )

    def _log_start(self, prepared: Prepared) -> None:
        scenario, partition, plan = self.scenario, prepared.partition, prepared.plan
        summary = partition.summary()
        self.run.log(
            events.RunStarted(
                command="simulate",
                config=scenario.model_dump(mode="json"),
                seed=scenario.seed,
                environment=describe(),
                plan=f"{plan.name} ({plan.reason})",
                data_sha256=prepared.dataset.sha256,
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
        if self.guard is not None and report.aborted is not None:
            self.guard.failed(self.number)
        self.number += 1
        self._record(report, federation)
        if found:
            self.run.log(events.Evaluation(metrics=found, round=self.number))
        if self.guard is not None:
            self.run.log(self.guard.reading(self.number, federation.public))
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
        if report.secure is not None:
            up, down = report.secure.bytes_up, down + report.secure.bytes_down
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
        if report.secure is not None:
            self.run.log(report.secure)
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
        tensors |= {f"public/{name}": tensor for name, tensor in federation.public.items()}
        if self.guard is not None:
            tensors |= self.guard.tensors()
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
            }
            | ({} if self.guard is None else self.guard.meta()),
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
        federation.public = part("public/")
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
        self, federation: Federation, backend: Backend, partition: Partition, startup: float
    ) -> SimulationResult:
        state = federation.state
        privacy = None
        if self.guard is not None:
            privacy = self.guard.facts(partition.clients, federation.public)
            said = "; ".join(each["statement"] for each in privacy["statements"])
            reading = self.guard.reading(self.number, federation.public)
            self.run.log(replace(reading, statement=said, facts=privacy))
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
            epsilon=None if self.guard is None else self.guard.epsilon,
            delta=None if self.guard is None else self.guard.delta,
            privacy=privacy,
            stopped_by=self.stopped_by,
            plan=self.plan_name,
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
