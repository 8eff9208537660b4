"""What one run asks of this device, built once: model, algorithm, local steps, and what happens to an update.

A simulated client does the same work with the same parts: for the same data, round and seed the numbers that
leave a device are those of a simulation, to the bit. All random streams have the names they have there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from mycelia.aggregator.wire.offers import Buffer
from mycelia.aggregator.wire.payload import check_finite, check_tensors, read_tensors, write_tensors
from mycelia.aggregator.wire.settings import TaskSettings, message_entries, place_of
from mycelia.aggregator.wire.updates_form import (
    MODEL_ROLES,
    UpdateEntries,
    clipping_of,
    term_specs,
    update_entries,
    update_form,
)
from mycelia.client.own_training import OwnTrain, check_own, train_own
from mycelia.engine.algorithms import Algorithm, Message, ServerState
from mycelia.engine.algorithms import build as build_algorithm
from mycelia.engine.client_store import ClientStore
from mycelia.engine.config import Named
from mycelia.engine.data import Dataset, Examples
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.local import ClientData, LocalTrainer, LocalWork, StepsOf
from mycelia.engine.metrics import Metrics
from mycelia.engine.plugins import user_code
from mycelia.engine.program import Program
from mycelia.engine.recipe import Recipe
from mycelia.engine.schema import Entry, Role, Schema
from mycelia.engine.sums import Term, Update
from mycelia.engine.transforms.compile import choose_plan, example_batch, package_of
from mycelia.engine.types import Tensors
from mycelia.privacy.client_plans import ClientPlan, plan_clients
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import ORDER, Pipeline, Sent, Stage
from mycelia.privacy.secure_updates import SLOTS, VECTOR, Quantise

__all__ = ["Job", "Local", "Result", "Workplace"]

_CHUNK: Final = 1000  # test examples a call
_TRACING: Final = threading.Lock()  # PyTorch traces one model at a time in a process, whatever the threads


@dataclass(frozen=True)
class Workplace:
    """What a device works with, whatever it is asked for.

    Attributes:
        dataset: its own examples.
        model: its own model, by name.
        client: its id, from 1.
        train: a user's own function in the place of the local steps.
        check: called between two steps; what it raises ends the training.
    """

    dataset: Dataset
    model: Named
    client: int
    train: OwnTrain | None = None
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Local:
    """What a run has on this device.

    Attributes:
        states: folder of what an algorithm keeps between rounds.
        source: where noise and secret draws come from.
        record: makes, of the plan of noise that this device adds itself, the stage that writes a release
            down before it leaves.
    """

    states: Path
    source: NoiseSource
    record: Callable[[ClientPlan, NoiseSource], Stage]


@dataclass(frozen=True)
class Result:
    """What training came to.

    Attributes:
        update: behind everything that a device does to it.
        new: values of the tensors that are sent, where an update travels as a model.
        rows: examples of the device.
        seconds: that it took.
        state: what the algorithm keeps for the next round, None where it keeps nothing.
    """

    update: Update
    new: Mapping[str, Tensor] = field(repr=False)
    rows: int
    seconds: float
    state: Tensors | None = field(repr=False)

    def number(self, name: str) -> float:
        """A sum for the report."""
        return float(self.update.metrics.get(name, 0.0))

    @property
    def weights(self) -> dict[str, float]:
        """Of each term, in order."""
        return {name: float(term.weight) for name, term in self.update.terms.items()}


@dataclass(frozen=True)
class _Watched(ClientData):
    """Examples that ask before they are read whether to go on."""

    check: Callable[[], None] = lambda: None

    def tensors(
        self, order: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `ClientData`."""
        self.check()
        return super().tensors(order)


class Job:
    """A run's work on this device.

    Args:
        settings: of the task.
        place: what the device works with.
        local: what the run has here.

    Attributes:
        settings: as given.
        program: the model and its loss.
        algorithm: bound to the population.
        work: local work, as algorithm and privacy adjusted it.
        quantise: packs updates for a secure sum; None: they are summed as they are.
        entries: of the payload UPDATE.

    Raises:
        ConfigError: settings that this device's model or data cannot meet.
        CaptureError: the model cannot be captured.
        OutOfReach: no noise reaches the budget.
    """

    def __init__(self, settings: TaskSettings, place: Workplace, local: Local) -> None:
        self.settings, self._place, self._local = settings, place, local
        with _TRACING:
            self._build(settings, place, local)

    def _build(self, settings: TaskSettings, place: Workplace, local: Local) -> None:
        name, options = settings.algorithm.name, settings.algorithm.options
        with user_code(f"algorithm {name}"):
            self.algorithm: Algorithm = build_algorithm(name, **options)
        self.algorithm = self.algorithm.bind(population=settings.population)
        given = settings.local
        work = self.algorithm.work(LocalWork(given.epochs, given.steps, given.batch_size, given.lr))
        dataset, model = place.dataset, place.model
        with user_code(f"model {model.name}"):
            self.program: Program = Recipe.of(
                dataset, model.name, model.options, settings.loss, settings.seed
            )()
        plan = _own_noise(settings, work)
        self.work = work if plan is None else plan.work(work)
        self.quantise = self._quantise()
        self._pipeline = self._stages(plan)
        self.entries: UpdateEntries = update_entries(self.program, self.algorithm, settings)
        extra = self.algorithm.message_extra(self.algorithm.start(self.program))
        self.extra: tuple[Entry, ...] = message_entries({**extra, **self._pipeline.begin()})
        self._store = ClientStore(local.states)
        self.client = place_of(place.client)
        if place.train is not None:
            check_own(self.program, self.algorithm, settings)
        steps_of = None if plan is None else plan.steps(local.source)
        self._trainer = self._make_trainer(steps_of)

    def _quantise(self) -> Quantise | None:
        packing = self.settings.packing
        if packing is None:
            return None
        return Quantise(
            term_specs(self.program, self.algorithm, self.settings), packing.weight_max,
            packing.value_bound, packing.most_examples, packing.private, packing.double,
        )  # fmt: skip

    def _stages(self, plan: ClientPlan | None) -> Pipeline:
        stages: list[Stage] = []
        if plan is not None:
            own = plan.pipeline(self._local.source, plan.ledgers(self._local.states, self._local.source))
            stages += [stage for stage in own.stages if stage.place != "record"]
            stages.append(self._local.record(plan, self._local.source))
        elif (clipping := clipping_of(self.settings.privacy)) is not None:
            stages.append(clipping)
        if self.quantise is not None:
            stages.append(self.quantise)
        return Pipeline(tuple(sorted(stages, key=lambda stage: ORDER.index(stage.place))))

    @property
    def upload_bytes(self) -> int:
        """Of the tensors of an update that no secure sum packs."""
        schema, roles, more = self.entries
        return sum(entry.numel * entry.dtype.itemsize for entry in (*schema.of(*roles), *more))

    def _make_trainer(self, steps_of: StepsOf | None) -> LocalTrainer:
        program, algorithm, work = self.program, self.algorithm, self.work
        train = self._place.dataset.train
        fixed = work.batch_size if 0 < work.batch_size <= len(train) else 0
        batch = example_batch(train.inputs, train.targets, fixed)
        plan, package = "eager", None
        if steps_of is None and program.graphs is not None and batch is not None:
            plan = choose_plan("default", self.settings.rounds * work.step_count(len(train))).name
            if plan == "inductor":
                params, buffers = program.init()
                vector = program.flatten(params).clone()
                extra = {"lr": work.rate(vector.dtype)} | algorithm.step_extra(program)
                example = (program.unflatten(vector), buffers, *batch, extra)
                package = package_of(program, algorithm.adjust(program), example)
        trainer = LocalTrainer(
            program,
            work,
            adjust=algorithm.adjust(program),
            extra=algorithm.step_extra(program),
            seed=self.settings.seed,
            plan=plan,
            batch_shape=None if batch is None else tuple(batch[0].shape),
            package=package,
            steps_of=steps_of,
            before_step=self._place.check,
        )
        if plan == "interpreter" and batch is not None:
            trainer.warm_up(*batch)
        return trainer

    # --- what comes from the server ---------------------------------------------------------------

    def message(self, model: Buffer, extra: Buffer | None, round: int) -> Message:
        """What the server sends, from its payloads.

        Args:
            model: the payload MODEL.
            extra: the payload MESSAGE; None: there is none.
            round: number of the round, from 0.

        Raises:
            Problem: a payload that is not of this model, is malformed, or holds what is no number.
        """
        layout = check_tensors(model, len(model), self.program.schema, MODEL_ROLES)
        check_finite(model, layout)
        tensors = read_tensors(model, layout)
        params = {entry.name: tensors[entry.name] for entry in self.program.schema.of(Role.PARAMETER)}
        buffers = {
            entry.name: tensors[entry.name] for entry in self.program.schema.of(Role.BUFFER, Role.COUNTER)
        }
        more: Tensors = {}
        if extra is not None:
            layout = check_tensors(extra, len(extra), Schema(()), (), self.extra)
            check_finite(extra, layout)
            more = read_tensors(extra, layout)
        return Message(self.program.flatten(params), buffers, more, round)

    # --- work -------------------------------------------------------------------------------------

    def train(self, message: Message) -> Result:
        """One round's work.

        Raises:
            DataError: the examples or the update are not as they have to be.
            ConfigError: settings that contradict each other.
            BudgetExceeded: the budget does not pay for the release.
            Stopped: the device is told to end.
        """
        if missing := [entry.name for entry in self.extra if entry.name not in message.extra]:
            raise ConfigError(
                f"{missing[0]} did not come with the model",
                rule=f"the algorithm {self.algorithm.name} needs it",
                fix="use the same version of Mycelia on both sides",
                who="task",
            )
        began = time.perf_counter()
        algorithm, own = self.algorithm, self._place.train
        state = self._store.get(self.client, message.round) if algorithm.stateful else None
        train = self._place.dataset.train
        if own is not None:
            update, new, state = *train_own(own, self.program, algorithm, self.settings, message, train), None
        else:
            rows = np.arange(len(train))
            data = _Watched(train.inputs, train.targets, rows, self.client, self._place.check)
            with user_code(f"algorithm {algorithm.name}"):
                update, state = algorithm.local(self._trainer, message, data, state)
            new = {}
            if self.quantise is None and update_form(algorithm, self.settings) == "model":
                new = self._new_values(update, message)
        update = self._pipeline.device(update, Sent(self.client, message.round, message.extra))
        _check_numbers(update)
        kept = state if algorithm.stateful else None
        return Result(update, new, len(train), time.perf_counter() - began, kept)

    def payload(self, result: Result) -> Iterator[bytes]:
        """The payload UPDATE, in parts.

        Raises:
            ConfigError: a term of a wider dtype than travels.
        """
        schema, roles, more = self.entries
        tensors = dict(result.new) if roles else {}
        for entry in more:
            term = result.update.terms[entry.name]
            values = term.values if term.minus is None else term.values - term.minus
            if torch.promote_types(values.dtype, entry.dtype) != entry.dtype:
                raise ConfigError(
                    f"the term {entry.name} is {values.dtype}",
                    rule=f"terms as large as the model travel in its precision, {entry.dtype}",
                    fix="make the term in that precision",
                    who=f"algorithm {self.algorithm.name}",
                )
            tensors[entry.name] = values.detach().to(entry.dtype)
        return write_tensors(tensors, schema, roles, more)

    def packed(
        self, result: Result
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], int, dict[str, int]]:
        """An update that is packed for a secure sum: its vector, its weight and its slots."""
        if self.quantise is None:
            raise ConfigError("an update that is not packed", rule="a secure sum says how", who="task")
        terms = result.update.terms
        slots = dict(zip(self.quantise.given, terms[SLOTS].values.tolist(), strict=True))
        return terms[VECTOR].values.numpy(), int(terms[VECTOR].weight), slots

    def remember(self, round: int, result: Result) -> None:
        """Keep what the algorithm needs in the next round; before the update leaves."""
        if result.state is not None:
            self._store.put(self.client, round, result.state)

    def forget(self, round: int) -> None:
        """What this round left here is void: the update did not count."""
        self._store.forget(self.client, round)

    # --- what is measured and used ----------------------------------------------------------------

    def evaluate(self, message: Message) -> tuple[int, dict[str, float]]:
        """How good the model is that this device would use, on its own test examples.

        Returns:
            How many examples, and the means over them.
        """
        vector, buffers = self._personal(message)
        examples = self._place.dataset.test if len(self._place.dataset.test) else self._place.dataset.train
        metrics = self._measure(vector, buffers, examples)
        found = {name: value for name, value in metrics.result().items() if math.isfinite(value)}
        return metrics.count, found

    def personal(self, message: Message) -> Iterator[bytes] | None:
        """The model of this device alone, where it has one, as the payload MODEL would be, in parts."""
        if type(self.algorithm).personal is Algorithm.personal:
            return None
        vector, buffers = self._personal(message)
        tensors = self.program.unflatten(vector) | buffers
        return write_tensors(tensors, self.program.schema, MODEL_ROLES)

    def _personal(self, message: Message) -> tuple[Tensor, Tensors]:
        state = self._store.get(self.client, message.round + 1) if self.algorithm.stateful else None
        server = ServerState(message.vector, message.buffers, dict(message.extra))
        return self.algorithm.personal(self.program, server, state)

    def _measure(self, vector: Tensor, buffers: Tensors, examples: Examples) -> Metrics:
        metrics = Metrics(classes=self._place.dataset.classes)
        params = self.program.unflatten(vector)
        with torch.no_grad():
            for first in range(0, len(examples), _CHUNK):
                self._place.check()
                inputs = torch.from_numpy(np.asarray(examples.inputs[first : first + _CHUNK]))
                targets = torch.from_numpy(np.asarray(examples.targets[first : first + _CHUNK]))
                forward = self.program.forward(params, buffers, inputs, targets, training=False)
                metrics = metrics.update(forward.outputs, forward.losses, targets)
        return metrics

    def _new_values(self, update: Update, message: Message) -> Tensors:
        """The model that the update's terms are the way to, and nothing else."""
        schema = self.entries.schema
        params = update.terms["params"].values
        new, offset = {}, 0
        for entry in schema.of(Role.PARAMETER):
            new[entry.name] = (
                params[offset : offset + entry.numel].view(entry.shape).to(entry.dtype, copy=True)
            )
            offset += entry.numel
        beside = schema.of(Role.BUFFER, Role.COUNTER)
        new |= {entry.name: self._trainer.buffers[entry.name].clone() for entry in beside}
        for term, role in (("buffers", Role.BUFFER), ("counters", Role.COUNTER)):
            if term in update.terms:
                moved = [
                    new[e.name].reshape(-1).double() - message.buffers[e.name].reshape(-1).double()
                    for e in schema.of(role)
                ]
                if not torch.equal(torch.cat(moved), update.terms[term].values):
                    raise ConfigError(
                        f"the term {term} is not what the model moved by",
                        rule="with sends_model a device sends the model that its training ended with",
                        fix="leave sends_model out of the algorithm",
                        who=f"algorithm {self.algorithm.name}",
                    )
        return new


def _own_noise(settings: TaskSettings, work: LocalWork) -> ClientPlan | None:
    """The noise that this device adds itself and pays for itself; None: it adds none, or a share."""
    privacy = settings.privacy
    if privacy is None or (privacy.unit == "client" and privacy.model != "local"):
        return None
    return plan_clients(
        privacy, work, clients=settings.population, examples=settings.examples, rounds=settings.rounds,
        max_abs=settings.update.max_abs,
    )  # fmt: skip


def _check_numbers(update: Update) -> None:
    def finite(term: Term) -> bool:
        return bool(torch.isfinite(term.values).all())

    bad = next((name for name, term in update.terms.items() if not finite(term)), None)
    if bad is not None or not all(math.isfinite(value) for value in update.metrics.values()):
        raise DataError(
            f"training came to NaN or infinity{f' in {bad}' if bad else ''}",
            rule="every number of an update is finite",
            fix="lower local.lr on the server, or look at the data",
            who="update",
        )
