"""Central training: `Trainer` runs a Program's steps; `train` does it from a configuration.

A step is one pure function (`update_step`) that a plan runs; the order of the examples is a pure function of
seed and step (`batches`). So the state is a few tensors and a step number, and a resumed run ends where an
unbroken one does.
"""

from mycelia.engine.training.batches import batches, steps_per_epoch
from mycelia.engine.training.evaluation import evaluate
from mycelia.engine.training.from_config import Prepared, prepare, resume, train
from mycelia.engine.training.result import FitResult
from mycelia.engine.training.signals import stop_on_signal
from mycelia.engine.training.state import TrainState
from mycelia.engine.training.step import clip_by_global_norm, update_step
from mycelia.engine.training.trainer import Trainer
from mycelia.engine.training.updates import Done, MakeUpdates, Updates, Work

__all__ = [
    "Done",
    "FitResult",
    "MakeUpdates",
    "Prepared",
    "TrainState",
    "Trainer",
    "Updates",
    "Work",
    "batches",
    "clip_by_global_norm",
    "evaluate",
    "prepare",
    "resume",
    "steps_per_epoch",
    "stop_on_signal",
    "train",
    "update_step",
]
