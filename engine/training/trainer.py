"""The training loop: a Program, an optimiser and examples become a trained model and a run that says how."""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from mycelia.engine.data import Dataset, Examples
from mycelia.engine.environment import describe
from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.engine.events import Evaluation, Event, Listener, RunFinished, RunStarted, Scalars, Text
from mycelia.engine.metrics import Metrics
from mycelia.engine.optimizers import Optimizer
from mycelia.engine.program import Program
from mycelia.engine.run import Run
from mycelia.engine.schedules import Schedule
from mycelia.engine.train_config import Every
from mycelia.engine.training.batches import steps_per_epoch
from mycelia.engine.training.checks import check_examples, check_finite_step, parts_of
from mycelia.engine.training.evaluation import evaluate
from mycelia.engine.training.plain import PlainUpdates
from mycelia.engine.training.result import FitResult
from mycelia.engine.training.resuming import COMMAND, begun, last_checkpoint
from mycelia.engine.training.state import TrainState
from mycelia.engine.training.step import GRADIENT_NORM
from mycelia.engine.training.updates import Done, MakeUpdates

__all__ = ["Trainer"]


@dataclass(frozen=True)
class Trainer:
    """Trains a Program; holds settings only, so one trainer fits any number of times.

    >>> from mycelia.engine.capture import capture
    >>> from mycelia.engine.data import load
    >>> from mycelia.engine.losses import cross_entropy
    >>> from mycelia.engine.models import build
    >>> from mycelia.engine.optimizers import adam
    >>> data = load("digits")
    >>> example = (torch.from_numpy(data.train.inputs[:2]), torch.from_numpy(data.train.targets[:2]))
    >>> program = capture(build("mlp", data.input_shape, data.classes), cross_entropy, example)
    >>> result = Trainer(program, adam(lr=0.001), epochs=5, metrics=Metrics(classes=10)).fit(data)
    >>> result.metrics["accuracy"] > 0.9
    True

    Attributes:
        program: what is trained.
        optimizer: makes new parameters of the gradient of a batch's mean loss.
        epochs: passes over the data.
        steps: more than 0 replaces the epochs.
        batch_size: examples a step; the last batch of an epoch may be smaller.
        clip_norm: largest norm of a step's gradient over all parameters; 0 does not clip.
        metrics: what an evaluation measures; an empty sum with classes, top-k, … set.
        evaluation: when; the end of training is always evaluated.
        evaluation_batch_size: examples measured at a time.
        checkpoint: when the run folder gets a checkpoint; the end of training always does.
        log_steps: steps that one point of the loss curve is the mean of.
        plan: `default`, `tune`, `eager`, `interpreter` or `inductor`; a resumed run keeps its first one.
        rate: the optimiser's rate, only to be logged.
        seed: root of the random streams: order of the examples, dropout.
        updates: makes the steps; others than the ordinary ones may read other settings.
    """

    program: Program
    optimizer: Optimizer
    _: KW_ONLY
    epochs: int = 1
    steps: int = 0
    batch_size: int = 32
    clip_norm: float = 0.0
    metrics: Metrics = field(default_factory=Metrics)
    evaluation: Every = field(default_factory=Every)
    evaluation_batch_size: int = 256
    checkpoint: Every = field(default_factory=Every)
    log_steps: int = 10
    plan: str = "default"
    rate: Schedule | None = None
    seed: int = 0
    updates: MakeUpdates = PlainUpdates

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1),
            ("evaluation_batch_size", 1),
            ("log_steps", 1),
            ("clip_norm", 0),
        ):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ConfigError(f"{name} is {value}", rule=f"at least {least}", who="Trainer")
        if self.epochs < 0 or self.steps < 0 or self.epochs + self.steps == 0:
            raise ConfigError(
                f"epochs is {self.epochs}, steps is {self.steps}", rule="one of them above 0", who="Trainer"
            )

    def fit(
        self,
        data: Dataset | Examples,
        eval_data: Examples | None = None,
        callbacks: Sequence[Listener] = (),
        *,
        run: Run | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> FitResult:
        """Train from the captured values or, in a run that has begun, from its last checkpoint.

        A resumed run ends with the same `model_sha256` as one that was never stopped.

        Args:
            data: training examples; a Dataset brings the test part to evaluate on.
            eval_data: examples to evaluate on; None with mere Examples: no evaluation.
            callbacks: told every event, as the listeners of the run are.
            run: records events and checkpoints; made by `Run.create`, or by `Run.resume` to go on.
            should_stop: asked after each step; when true, a checkpoint is saved and training ends.

        Raises:
            DataError: examples that do not fit the program or the metrics, or no intact checkpoint.
            ConfigError: the run is of another command, or went by other settings.
            MyceliaError: a loss that is not finite, with step and example ids; a full disk.
        """
        fit = _Fit(self, data, eval_data, callbacks, run, should_stop)
        with closing(fit.updates):
            return self._fit(fit)

    def _fit(self, fit: _Fit) -> FitResult:
        fit.begin()
        try:
            result = fit.train()
        except (Exception, KeyboardInterrupt) as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            with suppress(MyceliaError):  # when the disk is full, the first error says so
                fit.tell(RunFinished(status=status, error=str(error)))
            raise
        status = "interrupted" if result.interrupted else "finished"
        fit.tell(RunFinished(result=result.summary(), status=status))
        return result

    def total_steps(self, examples: int) -> int:
        """Steps of the whole training."""
        return self.steps or self.epochs * steps_per_epoch(examples, self.batch_size)


class _Fit:
    """One call of `fit`."""

    def __init__(
        self,
        trainer: Trainer,
        data: Dataset | Examples,
        eval_data: Examples | None,
        callbacks: Sequence[Listener],
        run: Run | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self.trainer, self.program = trainer, trainer.program
        self.callbacks, self.run, self.should_stop = tuple(callbacks), run, should_stop
        whole, self.train_data, self.eval_data = parts_of(data, eval_data, trainer.metrics.classes)
        self.data_sha256 = "" if run is None else (whole or self.train_data).sha256
        params, buffers = self.program.init()
        check_examples(self.program, params, buffers, self.train_data, trainer.metrics)
        self.updates = trainer.updates(trainer, self.train_data, params, buffers, run)
        self.state = TrainState(params, self.updates.carry)
        self.per_epoch = steps_per_epoch(len(self.train_data), trainer.batch_size)
        self.total = trainer.total_steps(len(self.train_data))
        self.saved_at = -1
        self.clock = time.perf_counter()

    def tell(self, event: Event) -> None:
        if self.run is not None:
            self.run.log(event)
        for callback in self.callbacks:
            callback(event)

    def begin(self) -> None:
        """Start the run, or take over the last checkpoint of one that has begun."""
        started = begun(self.run) if self.run is not None else None
        self.updates.begin(started.plan if started else self.trainer.plan, self.state.params, self.total)
        self.plan = self.updates.plan
        if started is None:
            self.tell(self.first_event())
        elif self.run is not None and (found := last_checkpoint(self.run)) is not None:
            self.state.restore(found, self.settings())
            self.updates.restore(found.meta.get("updates", {}))
            self.saved_at = self.state.step
            self.clock -= self.state.seconds

    def first_event(self) -> RunStarted:
        trainer, text = self.trainer, self.run.config_toml if self.run is not None else ""
        environment = describe() if self.run is not None else {}
        return RunStarted(
            command=COMMAND,
            config=tomllib.loads(text) if text else self.settings(),
            seed=trainer.seed,
            environment=environment | {"plan": {"reason": self.plan.reason}},
            plan=self.plan.name,
            data_sha256=self.data_sha256,
            total=self.total,
            unit="step",
        )

    def settings(self) -> dict[str, Any]:
        """What decides how training goes on, besides model and optimiser state; kept with each checkpoint."""
        trainer = self.trainer
        return {
            "schema": self.program.schema.sha256,
            "transforms": list(self.program.note),
            "data": self.data_sha256,
            "seed": trainer.seed,
            "plan": self.plan.name,
            **self.updates.settings(),
        }

    def train(self) -> FitResult:
        trainer, state = self.trainer, self.state
        evaluate_each = trainer.evaluation.in_steps(self.per_epoch)
        save_each = trainer.checkpoint.in_steps(self.per_epoch)
        window: list[float] = []
        interrupted = False
        while state.step < self.total and (done := self.updates.step(state)) is not None:
            if state.step % self.per_epoch == 0:
                state.loss_sum, state.loss_examples = 0.0, 0
            state.step += 1
            self.check_step(done)
            if done.examples:
                state.loss_sum += done.loss * done.examples
                state.loss_examples += done.examples
                window.append(done.loss)
            if state.step % trainer.log_steps == 0 or state.step == self.total:
                self.log_window(window)
                window = []
            if evaluate_each and state.step % evaluate_each == 0:
                self.measure()
            if save_each and state.step % save_each == 0:
                self.save()
            if state.step < self.total and self.should_stop():
                interrupted = True
                break
        if not interrupted:
            self.measure()
        self.save()
        return self.result(interrupted)

    def check_step(self, done: Done) -> None:
        if done.rows is None:
            return
        norm = self.state.carry.get(GRADIENT_NORM)
        numbers = {"loss": done.loss} | ({} if norm is None else {"gradient's norm": norm.item()})
        try:
            check_finite_step(self.state.step, numbers, done.rows)
        except MyceliaError:  # the message has the first ids only
            ids = ", ".join(map(str, done.rows))
            self.tell(Text(name="examples of the failed batch", step=self.state.step, text=ids))
            raise

    def log_window(self, window: list[float]) -> None:
        values = {"loss": math.fsum(window) / len(window)} if window else {}
        if self.trainer.rate is not None:
            values["lr"] = self.trainer.rate(torch.tensor(self.state.step - 1)).item()
        if GRADIENT_NORM in self.state.carry:
            values[GRADIENT_NORM] = self.state.carry[GRADIENT_NORM].item()
        self.tell(Scalars(step=self.state.step, values=values))
        for event in self.updates.events(self.state.step):
            self.tell(event)

    def measure(self) -> None:
        state, trainer = self.state, self.trainer
        if self.eval_data is None or state.measured_at == state.step:
            return
        found = evaluate(
            self.program,
            state.params,
            state.buffers,
            self.eval_data,
            trainer.metrics,
            batch_size=trainer.evaluation_batch_size,
        )
        state.measured, state.measured_at = found.result(), state.step
        self.tell(Evaluation(step=state.step, split="test", metrics=state.measured))

    def save(self) -> None:
        """A checkpoint in the run folder; without a run only the check that the model is finite."""
        state = self.state
        state.check_finite()
        state.seconds = time.perf_counter() - self.clock
        if self.run is None or self.saved_at == state.step:
            return
        self.run.save_checkpoint(
            state.step, state.tensors(), state.meta(self.settings(), self.updates.state())
        )
        self.saved_at = state.step

    def result(self, interrupted: bool) -> FitResult:
        state = self.state
        whole, rest = divmod(state.step, self.per_epoch)
        return FitResult(
            params=state.params,
            buffers=state.buffers,
            steps=state.step,
            epochs=state.step / self.per_epoch if rest else whole,
            seconds=state.seconds,
            train_loss=state.train_loss,
            metrics=state.measured,
            plan=self.plan.name,
            run_dir=str(self.run.path) if self.run is not None else "",
            interrupted=interrupted,
            **self.updates.outcome(),
        )
