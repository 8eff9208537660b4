"""The settings of `mycelia train` with a `[privacy]` block, which makes training private."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mycelia.engine.config import Named
from mycelia.engine.errors import ConfigError
from mycelia.engine.optimizers import Optimizer
from mycelia.engine.plugins import check_options
from mycelia.engine.schedules import Schedule
from mycelia.engine.train_config import TrainConfig
from mycelia.privacy.clip import PerLayer, QuantileClip
from mycelia.privacy.config import CommonPrivacy
from mycelia.privacy.optimizers import adam_bc
from mycelia.privacy.sampling import FixedSize, MinSep, Poisson, Sampler, ShuffledEpochs
from mycelia.privacy.schedules import NoiseSchedule, parse

__all__ = ["CentralPrivacy", "PrivateTrainConfig"]

_ADAM_BC = "adam-bc"


class CentralPrivacy(CommonPrivacy):
    """The `[privacy]` block of a training in one place. The number of training examples is public."""

    unit: Literal["example"]
    """Whom ε protects."""
    sampler: Literal["poisson", "shuffle", "fixed"] = "poisson"
    """How batches, of an expected batch_size, are drawn. With a factorisation: in fixed blocks."""
    schedule: Annotated[str, Field(min_length=1)] | None = None
    """How the noise multiplier decays: time:R, step:R:EVERY or exp:R; left out: not at all."""
    physical: Annotated[int, Field(ge=1)] | None = None
    """Examples in memory at a time; left out: a whole batch."""
    noise_source: Literal["seeded", "os"] = "os"
    """Seeded noise is reproducible and not for release."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """A schedule that is malformed, and settings that rule each other out."""
        found = list(super().conflicts())
        yield from found
        if self.schedule is not None:
            try:
                self.noise_at(1.0)
            except ConfigError as error:
                yield "schedule", "; ".join(filter(None, (error.found, error.rule)))
        if found or self.factorisation is None:
            return
        if self.schedule is not None:
            yield "schedule", "correlated noise has one size for the whole run; leave the schedule out"
        if "sampler" in self.model_fields_set:
            yield "sampler", "correlated noise draws the examples in fixed blocks; leave the sampler out"

    def noise_at(self, z: float) -> float | NoiseSchedule:
        """The noise multiplier of each step, from its first value."""
        return z if self.schedule is None else parse(self.schedule, z)

    def shape(self) -> NoiseSchedule | None:
        """The shape of the noise multiplier for calibration, None where it is constant."""
        return None if self.schedule is None else parse(self.schedule, 1.0)

    def draws(self, batch_size: int, examples: int, steps: int) -> Sampler:
        """The sampler.

        Args:
            batch_size: (expected) examples a step, at most `examples`.
            examples: training examples, which is public.
            steps: planned steps.

        Raises:
            ConfigError: a batch of more than all examples.
        """
        if batch_size > examples:
            raise ConfigError(
                f"batch_size is {batch_size} and there are {examples} training examples",
                rule="a batch is a part of the examples",
                fix="lower batch_size",
                who="privacy",
            )
        if self.factorisation is not None:
            blocks = -(-examples // batch_size)
            return MinSep(-(-steps // blocks), blocks, physical=self.physical)
        if self.sampler == "fixed":
            return FixedSize(batch_size, examples, physical=self.physical)
        if self.sampler == "shuffle":
            return ShuffledEpochs(batch_size, examples, physical=self.physical)
        return Poisson(batch_size / examples, physical=self.physical)


class PrivateTrainConfig(TrainConfig):
    """Central training of one model on one data set, private where it has a `[privacy]` block.

    Private training also has the optimizer "adam-bc", see `optimizers.adam_bc`.
    """

    unavailable: ClassVar[frozenset[str]] = frozenset({"defence"})

    privacy: CentralPrivacy | None = None
    """Budget, clipping and noise; its presence makes training private."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """What privacy rules out."""
        yield from super().conflicts()
        if self.privacy is None:
            return
        if self.clip_norm:
            yield "clip_norm", "privacy clips the gradient of each example; set privacy.clip, and this to 0"
        if self.plan == "tune":
            yield "plan", "the plan of private steps does not depend on measured times; use default"
        if isinstance(self.privacy.clip_function(), PerLayer | QuantileClip) and self.privacy.schedule:
            yield "privacy.schedule", "only for clip functions with one fixed bound"
        if self.optimizer.name == _ADAM_BC and self.privacy.factorisation is not None:
            yield "optimizer", "adam-bc knows independent noise alone; use adam with a factorisation"

    def optimizer_for(self, options: Mapping[str, Any]) -> Optimizer:
        """See `TrainConfig`.

        Raises:
            ConfigError: an unknown name or option, or "adam-bc" without privacy.
        """
        if self.optimizer.name != _ADAM_BC:
            return super().optimizer_for(options)
        if self.privacy is None:
            raise ConfigError(
                "adam-bc without privacy",
                rule="it takes the noise of private gradients out of Adam's second moment",
                fix="use adam, or add a [privacy] block",
                who="optimizer",
            )
        check_options(adam_bc, options, who=f"optimizer {_ADAM_BC!r}")
        return adam_bc(**options)

    def rate(self, total_steps: int) -> Schedule:
        """See `TrainConfig`; where adam-bc is given none, the rate is that of Adam."""
        if self.optimizer.name != _ADAM_BC:
            return super().rate(total_steps)
        options = {name: value for name, value in self.optimizer.options.items() if name == "lr"}
        adam = Named.model_validate({"name": "adam", **options})
        return self.model_copy(update={"optimizer": adam}).rate(total_steps)
