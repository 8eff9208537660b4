"""`mycelia train` as a function: from a configuration to a run folder with a trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from mycelia.engine.capture import capture
from mycelia.engine.config import load_config, to_toml
from mycelia.engine.data import Dataset, load
from mycelia.engine.events import Listener
from mycelia.engine.losses import get
from mycelia.engine.metrics import Metrics
from mycelia.engine.models import build
from mycelia.engine.run import CONFIG, Run, check_free
from mycelia.engine.train_config import TrainConfig
from mycelia.engine.training.batches import steps_per_epoch
from mycelia.engine.training.result import FitResult
from mycelia.engine.training.resuming import COMMAND, begun
from mycelia.engine.training.signals import stop_on_signal
from mycelia.engine.training.trainer import Trainer
from mycelia.engine.transforms.precision import precision

__all__ = ["Prepared", "prepare", "resume", "train"]


@dataclass(frozen=True)
class Prepared:
    """All that a configuration names, found, checked and built."""

    trainer: Trainer
    dataset: Dataset

    def fit(self, run: Run, on_signal: Callable[[str], None] | None = None) -> FitResult:
        """Train in a run folder and write the report, unless a signal ends training early; see `train`."""
        from mycelia.engine.report import build_report

        with nullcontext(_never) if on_signal is None else stop_on_signal(on_signal) as should_stop:
            result = self.trainer.fit(self.dataset, run=run, should_stop=should_stop)
        if not result.interrupted:
            build_report(run)
        return result


def _never() -> bool:
    return False


def prepare(config: TrainConfig) -> Prepared:
    """Load the data, build and capture the model, and set up the trainer; nothing is written.

    Raises:
        ConfigError: an unknown name or option.
        DataError: data that is missing or malformed.
        CaptureError: a model that cannot be exported, or a loss that is already reduced.
    """
    dataset = load(config.data.name, **config.data.options)
    shape, classes = dataset.input_shape, dataset.classes
    model = build(config.model.name, shape, classes, seed=config.seed, **config.model.options)
    arrays = (dataset.train.inputs, dataset.train.targets)
    inputs, targets = (torch.from_numpy(array[:2].copy()) for array in arrays)
    program = precision(capture(model, get(config.loss), (inputs, targets)), config.precision)
    per_epoch = steps_per_epoch(len(dataset.train), config.batch_size)
    total = config.steps or config.epochs * per_epoch
    trainer = Trainer(
        program,
        config.scheduled_optimizer(total),
        epochs=config.epochs,
        steps=config.steps,
        batch_size=config.batch_size,
        clip_norm=config.clip_norm,
        metrics=Metrics(classes, top_k=config.evaluation.top_k, keep_scores=classes == 2),
        evaluation=config.evaluation,
        evaluation_batch_size=config.evaluation.batch_size,
        checkpoint=config.checkpoint,
        plan=config.plan,
        rate=config.rate(total),
        seed=config.seed,
    )
    return Prepared(trainer, dataset)


def train(
    config: TrainConfig,
    *,
    out: Path | None = None,
    listeners: Sequence[Listener] = (),
    on_signal: Callable[[str], None] | None = None,
    prepare: Callable[[TrainConfig], Prepared] = prepare,
) -> FitResult:
    """Train in a new run folder.

    Args:
        config: what to train.
        out: the run folder; None: a new one under `runs/`.
        listeners: told every event.
        on_signal: when given, Ctrl-C and SIGTERM save a checkpoint and end training, and it is told so.
        prepare: sets up the trainer.

    Raises:
        MyceliaError: as `prepare`, `Run.create` and `Trainer.fit` do.
    """
    toml = to_toml(config)
    check_free(out)  # before the data is read
    prepared = prepare(config)  # before there is a folder, so that a mistake leaves none
    with Run.create(out, COMMAND, toml, listeners=listeners) as run:
        return prepared.fit(run, on_signal)


def resume(
    path: Path,
    *,
    listeners: Sequence[Listener] = (),
    on_signal: Callable[[str], None] | None = None,
    kind: type[TrainConfig] = TrainConfig,
    prepare: Callable[[TrainConfig], Prepared] = prepare,
) -> FitResult:
    """Go on with a run from its last checkpoint, by the configuration in its folder.

    The result is that of a run that was never stopped; a finished run gives its result again.

    Args:
        path: the run folder.
        listeners: told every event.
        on_signal: see `train`.
        kind: of the configuration.
        prepare: see `train`.

    Raises:
        ConfigError: no run, or one of another command or schema version.
        MyceliaError: another process writes the run; and as `prepare` and `Trainer.fit` do.
    """
    begun(Run.open(path))  # another command's run is refused before its log is opened for writing
    with Run.resume(path, listeners=listeners) as run:
        prepared = prepare(load_config(kind, path / CONFIG))
        if (started := begun(run)) is not None:
            for listener in listeners:
                listener(started)  # what a display needs to know of the run's length
        return prepared.fit(run, on_signal)
