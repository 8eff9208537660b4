"""`mycelia train` with a `[defence]` block, as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mycelia.attacks.defences.train_config import DefendedTrainConfig
from mycelia.attacks.defences.training import TrainingDefence
from mycelia.attacks.defences.trial import try_on
from mycelia.engine import training as engine
from mycelia.engine.events import Listener
from mycelia.engine.train_config import TrainConfig
from mycelia.engine.training import FitResult, Prepared
from mycelia.privacy import central

__all__ = ["defence_of", "prepare", "resume", "train"]


def defence_of(prepared: Prepared) -> TrainingDefence | None:
    """What an adversarial training trains with; None for another one."""
    updates = prepared.trainer.updates
    return updates if isinstance(updates, TrainingDefence) else None


def prepare(config: TrainConfig) -> Prepared:
    """As `privacy.central.prepare`, with adversarial updates where the configuration asks for them.

    Raises:
        ConfigError: as there, or data or a model that cannot be attacked.
        DataError: as there, or inputs beyond the bounds of the defence.
    """
    prepared = central.prepare(config)
    defence = config.training_defence() if isinstance(config, DefendedTrainConfig) else None
    if defence is None:
        return prepared
    try_on(defence, prepared.trainer.program, prepared.dataset)
    return replace(prepared, trainer=replace(prepared.trainer, updates=defence))


def train(
    config: DefendedTrainConfig,
    *,
    out: Path | None = None,
    listeners: Sequence[Listener] = (),
    on_signal: Callable[[str], None] | None = None,
) -> FitResult:
    """As `engine.training.train`."""
    return engine.train(config, out=out, listeners=listeners, on_signal=on_signal, prepare=prepare)


def resume(
    path: Path, *, listeners: Sequence[Listener] = (), on_signal: Callable[[str], None] | None = None
) -> FitResult:
    """As `engine.training.resume`."""
    return engine.resume(
        path, listeners=listeners, on_signal=on_signal, kind=DefendedTrainConfig, prepare=prepare
    )
