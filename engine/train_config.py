"""The settings of `mycelia train`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from mycelia.engine.config import Named, Strict
from mycelia.engine.errors import ConfigError

if TYPE_CHECKING:
    from mycelia.engine.optimizers import Optimizer
    from mycelia.engine.schedules import Schedule

__all__ = ["EvaluationConfig", "Every", "TrainConfig"]

Count = Annotated[int, Field(ge=0)]


class Every(Strict):
    """How often something happens besides the end of training."""

    epochs: Count = 1
    """Epochs between; 0: only at the end."""
    steps: Count = 0
    """More than 0 replaces the epochs."""

    def in_steps(self, steps_per_epoch: int) -> int:
        """Steps between; 0: only at the end."""
        return self.steps or self.epochs * steps_per_epoch


class EvaluationConfig(Every):
    """When and how the model is measured on the test part."""

    batch_size: Annotated[int, Field(ge=1)] = 256
    top_k: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Adds `test_top_K_accuracy` for each K."""


class TrainConfig(Strict):
    """Central training of one model on one data set."""

    unavailable: ClassVar[frozenset[str]] = frozenset({"privacy", "defence"})

    model: Named = Named(name="mlp")
    """A name of `engine/models.py` or package.module:function, with its options."""
    data: Named = Named(name="digits")
    """A built-in name, kind:path or package.module:function, with its options."""
    loss: Annotated[str, Field(min_length=1)] = "cross-entropy"
    """A name of `engine/losses.py` or package.module:function."""
    epochs: Count = 10
    steps: Count = 0
    """More than 0 replaces the epochs."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Examples a step; the last batch of an epoch may be smaller."""
    optimizer: Named = Named.model_validate({"name": "adam", "lr": 0.001})
    """A name of `engine/optimizers`, with its options."""
    schedule: Named = Named(name="constant")
    """How the optimiser's rate changes: a name of `engine/schedules.py`, with its options."""
    clip_norm: Annotated[float, Field(ge=0)] = 0.0
    """Largest norm of a step's gradient over all parameters; 0: not clipped."""
    precision: Literal["fp32", "bf16"] = "fp32"
    plan: Literal["default", "tune", "eager", "interpreter", "inductor"] = "default"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: Every = Every()

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """No work, and options that optimiser or schedule refuse."""
        if self.epochs == 0 and self.steps == 0:
            yield "steps", "epochs and steps are both 0, so that nothing would be trained; set one of them"
        if "lr" in self.schedule.options:
            yield "schedule.lr", "the rate belongs to the optimiser; set optimizer.lr"
            return
        key = "optimizer"
        try:
            self.optimizer_for(self.optimizer.options)
            key = "schedule"
            self.rate(total_steps=1000)
        except ConfigError as error:
            yield key, "; ".join(filter(None, (error.found, error.rule, error.fix)))

    def rate(self, total_steps: int) -> Schedule:
        """The optimiser's rate as a function of the step; a cosine without `steps` ends with the run."""
        from mycelia.engine import schedules
        from mycelia.engine.optimizers import OPTIMIZERS

        default = inspect.signature(OPTIMIZERS[self.optimizer.name]).parameters["lr"].default
        options = {"lr": self.optimizer.options.get("lr", default), **self.schedule.options}
        if self.schedule.name == "cosine" and "steps" not in options:
            warmup = options.get("warmup_steps", 0)
            options["steps"] = max(1, total_steps - (warmup if isinstance(warmup, int) else 0))
        return schedules.build(self.schedule.name, **options)

    def optimizer_for(self, options: Mapping[str, Any]) -> Optimizer:
        """The optimiser of that name with these options instead of its own."""
        from mycelia.engine import optimizers

        return optimizers.build(self.optimizer.name, **options)

    def scheduled_optimizer(self, total_steps: int) -> Optimizer:
        """The optimiser with its rate as scheduled."""
        options = self.optimizer.options
        if self.schedule != Named(name="constant"):  # a plain number is the faster form of a constant
            options["lr"] = self.rate(total_steps)
        return self.optimizer_for(options)
