"""A replica: one process's copy of the model, which trains and tests clients one after another."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mycelia.engine._torch import version
from mycelia.engine.algorithms import Algorithm, Message, ServerState
from mycelia.engine.client_store import ClientStore
from mycelia.engine.data import Examples
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.evaluation import CHUNK, measure
from mycelia.engine.local import ChangeOf, ClientData, LocalTrainer, LocalWork, StepsOf
from mycelia.engine.metrics import Metrics
from mycelia.engine.program import Program
from mycelia.engine.sums import ExactSum, SumFormat, Update
from mycelia.engine.transforms.compile import Adder
from mycelia.privacy.pipeline import Pipeline, Sent
from mycelia.privacy.secure_updates import SLOTS, VECTOR
from mycelia.simulations.backends.base import Failure, Packed, PackedShape
from mycelia.simulations.partition import Partition

__all__ = ["Replica", "Task"]


@dataclass(frozen=True)
class Task:
    """All a process needs to train clients; it travels to a spawned process.

    Attributes:
        program: the Program.
        algorithm: the algorithm.
        work: local work, as the algorithm adjusted it.
        form: the exact sum's format.
        seed: root seed.
        plan: resolved plan.
        folder: `train/`, `test/` and `partition/`, memory-mapped by every process.
        states: folder of the clients' states.
        classes: number of classes, None for regression.
        max_cohort: most clients in one call.
        batch_shape: shape of the inputs of a full batch, None where there is none.
        package: the compiled step of a full batch, None for the other plans.
        adder: the compiled sum of float32 parameters, None for the other plans.
        pipeline: what a client does to its update before it is summed.
        steps_of: makes the local steps where they are not SGD.
        change_of: makes what changes the inputs of local steps, None where they are the client's examples.
        packed: what an update takes that the pipeline packs for a secure sum; None: updates are summed here.
    """

    program: Program
    algorithm: Algorithm
    work: LocalWork
    form: SumFormat
    seed: int
    plan: str
    folder: Path
    states: Path
    classes: int | None
    max_cohort: int
    batch_shape: tuple[int, ...] | None = None
    package: Path | None = None
    adder: Path | None = None
    pipeline: Pipeline = field(default_factory=Pipeline)
    steps_of: StepsOf | None = None
    change_of: ChangeOf | None = None
    packed: PackedShape | None = None


class Replica:
    """Trains and tests with one resident model.

    Args:
        task: what to do.
        accumulator: int64 vector of the running sum; may lie in shared memory.
        program: built by the task when not given.
    """

    def __init__(self, task: Task, accumulator: Tensor | None = None, program: Program | None = None) -> None:
        self.task = task
        # plain views of the maps: each access to NumPy's subclass costs more than copying a client's rows
        mapped = Examples.open(task.folder / "train")
        self.train_set = Examples(np.asarray(mapped.inputs), np.asarray(mapped.targets))
        self.test_set = Examples.open(task.folder / "test")
        self.partition = Partition.open(task.folder / "partition")
        self.program = task.program
        self.sum = ExactSum(task.form, accumulator, Adder(task.adder) if task.adder else None)
        self.store = ClientStore(task.states)
        self.trainer = LocalTrainer(
            self.program,
            task.work,
            adjust=task.algorithm.adjust(self.program),
            extra=task.algorithm.step_extra(self.program),
            seed=task.seed,
            plan=task.plan,
            package=task.package,
            batch_shape=task.batch_shape,
            steps_of=task.steps_of,
            change_of=task.change_of,
        )

    def train(
        self,
        message: Message,
        client: int,
        row: npt.NDArray[np.float64],
        packed: Packed | None = None,
        position: int = 0,
    ) -> Failure | None:
        """Train one client, add its update and fill its row; what went wrong, or None.

        Args:
            message: from the server.
            client: whom to train.
            row: float64 [len(COLUMNS)].
            packed: takes the update instead, in the row of `position`.
            position: see `packed`.
        """
        started = time.perf_counter()
        algorithm = self.task.algorithm
        written, runs = version(message.vector), self.trainer.runs
        try:
            data = self._data(client)
            state = self.store.get(client, message.round) if algorithm.stateful else None
            update, new_state = algorithm.local(self.trainer, message, data, state)
            if not isinstance(update, Update):
                raise ConfigError(
                    f"local returned a {type(update).__name__}",
                    rule="local returns (Update, state)",
                    who=f"algorithm {algorithm.name}",
                )
            if self.task.change_of is not None and self.trainer.runs == runs:
                raise ConfigError(
                    "the client half trained by itself",
                    rule="[defence] changes the batches of LocalTrainer.run",
                    fix="train by it, or take out [defence]",
                    who=f"algorithm {algorithm.name}",
                )
            update = self.task.pipeline.device(update, Sent(client, message.round, message.extra))
        except DataError as error:
            return Failure(-1, True, error.found, error.fix or error.rule)
        except MyceliaError as error:
            return Failure(-1, False, str(error), error.fix)
        except Exception:
            return Failure(-1, False, traceback.format_exc(), "look at the client's own code")
        if version(message.vector) != written:
            raise MyceliaError(
                "the client half wrote into the server's model",
                rule="what the server sends is read only: the next client would start from another model",
                fix="clone message.vector before changing it",
                who=f"algorithm {algorithm.name}, client {client}",
            )
        if packed is not None:
            vector = update.terms[VECTOR]
            packed.vectors[position] = vector.values.numpy()
            packed.whole[position] = [int(vector.weight), *update.terms[SLOTS].values.tolist()]
        else:
            try:
                self.sum.add(update)
            except DataError as error:
                return Failure(-1, True, error.found, error.fix or error.rule)
        if algorithm.stateful and new_state is not None:
            self.store.put(client, message.round, new_state)
        metrics = update.metrics
        row[:] = (
            1.0,
            next(iter(update.terms.values())).weight,
            metrics.get("loss_sum", 0.0),
            metrics.get("examples", 0.0),
            metrics.get("steps", 0.0),
            time.perf_counter() - started,
        )
        return None

    def chunks(self) -> int:
        """How many parts the test set is measured in."""
        return -(-len(self.test_set) // CHUNK)

    def test(self, message: Message, chunk: int) -> Metrics:
        """Metrics of the message's model on one part of the test set."""
        rows = np.arange(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self.test_set)))
        return self._measure(message.vector, message.buffers, self.test_set, rows)

    def spread(self, message: Message, client: int, limit: int) -> dict[str, float]:
        """Metrics of one client's own model on its own test examples."""
        algorithm = self.task.algorithm
        state = self.store.get(client, message.round) if algorithm.stateful else None
        server = ServerState(message.vector, message.buffers, dict(message.extra))
        vector, buffers = algorithm.personal(self.program, server, state)
        rows = self.partition.test_indices(client)
        examples = self.train_set
        if len(rows) == 0:
            examples = self.test_set
            rows = self.partition.matched_test_indices(client, self.test_set.targets, limit)
        own = examples.take(rows)
        if self.partition.transforms:
            own = replace(own, inputs=self.partition.transform(client, own.inputs, test=True))
        metrics = self._measure(vector, buffers, own, np.arange(min(limit, len(own))))
        return metrics.result() | {"examples": float(metrics.count)}

    def _data(self, client: int) -> ClientData:
        rows = self.partition.indices(client)
        examples = self.train_set
        if not self.partition.transforms:
            return ClientData(examples.inputs, examples.targets, rows, client)
        inputs = self.partition.transform(client, examples.inputs[rows])
        return ClientData(inputs, examples.targets[rows], np.arange(len(rows)), client)

    def _measure(
        self, vector: Tensor, buffers: dict[str, Tensor], examples: Examples, rows: npt.NDArray[np.int64]
    ) -> Metrics:
        return measure(self.program, vector, buffers, examples, self.task.classes, rows)
