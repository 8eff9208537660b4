"""The releases of a run: what each costs, whether it can be paid for, and how a clipped sum becomes private.

A loop brings sums of clipped gradients and says how far it is. Everything that decides what ε is, the clip
bound in force, the noise, the ledger and the budget, is here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mycelia.engine.errors import BudgetExceeded, ConfigError, DataError
from mycelia.engine.schema import model_sha256
from mycelia.engine.types import Tensors
from mycelia.privacy.accounting import UNSTATED
from mycelia.privacy.budget import Budget
from mycelia.privacy.clip import ClipFunction, ClipState, PerLayer, QuantileClip
from mycelia.privacy.events import Event
from mycelia.privacy.factorisation import CorrelatedNoise, NoiseState, Strategy
from mycelia.privacy.groups import Group
from mycelia.privacy.ledger import Head, Ledger
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.optimizers import PrivateUpdate
from mycelia.privacy.sampling import Sampler
from mycelia.privacy.schedules import NoiseSchedule

__all__ = ["AnyClip", "Mean", "ReleaseSettings", "Releases"]

AnyClip = ClipFunction | PerLayer | QuantileClip

_AHEAD = 1000
"""Updates of a noise schedule that the budget looks ahead, so that it need not solve for every one."""


@dataclass(frozen=True)
class ReleaseSettings:
    """What the releases of a run were asked to be; whoever makes it has checked that it fits together.

    Attributes:
        sampler: draws and accounts; with the sensitivity of the factorisation.
        clip: the clip function.
        noise: z, or a schedule of it.
        expected_batch: the public number that sums are divided by.
        mechanism: the noise.
        clip_schedule: of the clip bound, or None.
        factorisation: of the noise, or None.
        steps: planned updates of a factorisation, else None.
        group: what is clipped, where that is the mean of a group; None: each example by itself.
    """

    sampler: Sampler
    clip: AnyClip
    noise: float | NoiseSchedule
    expected_batch: float
    mechanism: Mechanism
    clip_schedule: NoiseSchedule | None = None
    factorisation: Strategy | None = None
    steps: int | None = None
    group: Group | None = None


@dataclass(frozen=True)
class Mean:
    """What was released.

    Attributes:
        tensors: (sum + noise) / expected batch.
        std: standard deviation of the noise in it; NaN where it is correlated, and no number tells it.
    """

    tensors: Tensors
    std: float


class Releases:
    """See the module.

    Args:
        settings: what the releases are.
        budget: asked before each, and whom and what neighbours it is about; None: nothing stops them.
        ledger: where each is recorded before it happens; the budget's own where there is one.
        source: of draws and noise, and of this run alone.
        size: entries of a total, of all tensors that may be trained together; what rounding them adds to the
            sensitivity is in factorised noise from the start.

    Attributes:
        step: releases made, and the number of the next one.
        stopped_by: "budget" once one was refused, else "".
        adaptive: the state of a quantile clip, else None.
        source: where draws and noise come from.
        stream: public name of that secret, by which the ledger tells its releases from those of others.

    Raises:
        ConfigError: settings without a bound, or a ledger that names another source.
    """

    def __init__(
        self,
        settings: ReleaseSettings,
        budget: Budget | None,
        ledger: Ledger,
        source: NoiseSource,
        size: int,
    ) -> None:
        self.settings, self.budget, self.ledger = settings, budget, ledger
        self.step, self.stopped_by = 0, ""
        self.adaptive = settings.clip.init() if isinstance(settings.clip, QuantileClip) else None
        self._memory: NoiseState | None = None
        self._planned = 0
        self._use(source)
        z, bound = self.event(0).noise_multiplier, self.bound()  # settings without a bound are refused now
        self._size, strategy, mechanism = size, settings.factorisation, settings.mechanism
        self._correlated = None
        if strategy is not None:
            std = z * (bound + mechanism.slack(bound, size))
            self._correlated = CorrelatedNoise(
                strategy, settings.steps or 0, std, mechanism=mechanism, bound=bound
            )

    @property
    def factorised(self) -> bool:
        """Whether noise is correlated over the steps, so that the run is one release with one secret."""
        return self._correlated is not None

    @property
    def memory(self) -> NoiseState | None:
        """What factorised noise remembers, a secret; None where the next step makes it again."""
        return self._memory if self._memory is not None and self._memory.step == self.step else None

    def clip(self, step: int | None = None) -> ClipFunction | PerLayer:
        """The clip function in force, or that of a step of a schedule."""
        clip, schedule = self.settings.clip, self.settings.clip_schedule
        if isinstance(clip, QuantileClip):
            return clip.clip(self.adaptive or clip.init())
        if schedule is not None and isinstance(clip, ClipFunction):
            return replace(clip, bound=schedule(self.step if step is None else step))
        return clip

    def bound(self, step: int | None = None) -> float:
        """How far one example can move a sum, rounding apart."""
        return self.clip(step).sensitivity().bound

    def signal(self, norms: Tensor, mask: Tensor | None) -> float:
        """What a quantile clip counts, of examples with these norms [B]; 0 for other clip functions."""
        clip = self.settings.clip
        if isinstance(clip, QuantileClip) and self.adaptive is not None:
            return clip.signal(self.adaptive, norms, mask)
        return 0.0

    def event(self, step: int) -> Event:
        """A release as the ledger has it: with the z asked for, whatever it is split into."""
        return self.events(step, 1)[0]

    def events(self, step: int, count: int) -> list[Event]:
        """The releases from a step on."""
        relation = self.budget.relation if self.budget is not None else None
        unit = self.settings.group or (self.budget.unit if self.budget is not None else "example")
        return self.settings.sampler.events(
            self.settings.noise, count, first_step=step, relation=relation, unit=unit, clip=self.bound(step),
            mechanism=self.settings.mechanism.name,
        )  # fmt: skip

    def affordable(self, step: int) -> bool:
        """Whether a release can be paid for; one that was made before from the same secret is free.

        Raises:
            BudgetExceeded: it cannot, and the budget says "raise".
        """
        steps = self.settings.steps
        if steps is not None and step >= steps:
            return False
        if self.budget is None or self.ledger.released(self.stream, step):
            return True
        if callable(self.settings.noise) and step >= self._planned:
            self.budget.remaining(self.events(step, _AHEAD))
            self._planned = step + _AHEAD
        try:
            self.budget.allow(self.event(step))
        except BudgetExceeded:
            self.stopped_by = "budget"
            if self.budget.on_exceed == "raise":
                raise
            return False
        return True

    def release(self, total: Tensors, signal: float = 0.0) -> Mean:
        """Write the next release down, then noise the sum; the clip bound follows, and the step moves on.

        Args:
            total: the sum of the clipped gradients by parameter.
            signal: the sum of `signal`.

        Raises:
            BudgetExceeded: it cannot be paid for; nothing was released.
            DataError: the step was released before, with other inputs.
            ConfigError: more is trained than factorised noise was sized for.
        """
        settings, event = self.settings, self.event(self.step)
        size = sum(tensor.numel() for tensor in total.values())
        if self._correlated is not None and size > self._size:
            raise ConfigError(
                f"{size} entries are trained, and there were {self._size}",
                rule="factorised noise has one size for the whole run, sized for what is there at its start",
                fix="add parameters before the training begins",
                who="private step",
            )
        # the same for the same sums, meaningless without the key
        name = self.source.bytes("release", self.step, f"{model_sha256(total)} {signal!r}", 16).hex()
        self._record(event, name)
        if self._correlated is not None:
            mean = self._with_row(self._correlated, total)
        else:
            mean = self._with_noise(event.noise_multiplier, total, size)
        if isinstance(settings.clip, QuantileClip) and self.adaptive is not None:
            self.adaptive = settings.clip.update(
                self.adaptive, signal, settings.expected_batch, settings.mechanism, self.source, self.step
            )
        self.step += 1
        return mean

    def seed(self, name: str) -> int:
        """A secret seed of the model's own randomness, such as dropout, for a part of the next step."""
        return int.from_bytes(self.source.bytes("dropout", self.step, name, 8), "little") >> 1

    def describe(self, step: int) -> dict[str, Any]:
        """What a run that goes on, and every process, has to agree with at a step, as JSON can say it."""
        settings = self.settings
        return {
            "sampler, noise, relation and unit": replace(self.event(step), clip=None).to_json(),
            "clip": repr(settings.clip),
            "clip_schedule": settings.clip_schedule and settings.clip_schedule(step),
            "expected_batch": settings.expected_batch,
            "mechanism": repr(settings.mechanism),
            "factorisation": repr(settings.factorisation),
            "steps": settings.steps,
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, as JSON can say it; the secret of the noise is not in it."""
        head = self.ledger.head
        return {
            "steps": self.step,
            "clip_bound": self.adaptive.bound if self.adaptive else None,
            "ledger": [head.lines, head.hash],
        }

    def restore(
        self, state: Mapping[str, Any], source: NoiseSource | None = None, memory: NoiseState | None = None
    ) -> None:
        """Go on from `state`, with a ledger that passes through its head; all of it or nothing.

        Args:
            state: as it was.
            source: the secret to go on with; the present one by default.
            memory: as it was; None: it is made again.

        Raises:
            DataError: the ledger does not pass through it.
            ConfigError: the ledger names another source.
        """
        head = Head(*state["ledger"])
        if not self.ledger.follows(head):
            raise DataError(
                f"the ledger has {self.ledger.head.lines} lines and does not pass through line {head.lines} "
                "of the checkpoint",
                rule="a run goes on only with the whole ledger that it wrote",
                fix="load the ledger with Ledger.load(path, head, write=True)",
                who="private training",
            )
        self._use(source or self.source)
        self.step = int(state["steps"])
        if self.adaptive is not None:
            self.adaptive = ClipState(float(state["clip_bound"]))
        self._memory, self._planned, self.stopped_by = memory, 0, ""

    def _use(self, source: NoiseSource) -> None:
        """Take this secret, unless the ledger's statements would name another source."""
        if self.ledger.noise_source not in (UNSTATED, source.note):
            raise ConfigError(
                f"the ledger says {self.ledger.noise_source!r}, and the noise is {source.note!r}",
                rule="a statement names the source that the noise came from",
                fix="go on with that source, or make the ledger with Ledger(source.note)",
                who="noise source",
            )
        self.source, self.stream = source, source.bytes("stream name", 0, "", 8).hex()

    def _record(self, event: Event, name: str) -> None:
        """Write the release down before it is made."""
        steps = self.settings.steps
        if steps is not None and event.step >= steps:
            raise BudgetExceeded(
                f"all {steps} planned updates have been made",
                rule="factorised noise is accounted for the planned updates alone",
                fix="plan more from the start, or begin a new run with a budget of its own",
                who="private step",
            )
        if self.budget is None:
            self.ledger.record(event, name, self.stream)
            return
        try:
            self.budget.release(event, name, self.stream)
        except BudgetExceeded:
            self.stopped_by = "budget"
            raise

    def _with_noise(self, z: float, total: Tensors, size: int) -> Mean:
        """The mean with noise of its own, of which a quantile clip takes a part for its count."""
        settings, bound = self.settings, self.bound()
        if isinstance(settings.clip, QuantileClip):
            z = settings.clip.gradient_multiplier(z, settings.expected_batch)
        std = z * (bound + settings.mechanism.slack(bound, size))
        update = PrivateUpdate(settings.mechanism, std, settings.expected_batch, self.source, bound)
        return Mean(update.mean(total, self.step), std / settings.expected_batch)

    def _with_row(self, correlated: CorrelatedNoise, total: Tensors) -> Mean:
        """The mean with factorised noise; its memory is made again where it is of something else."""
        memory = self.memory
        shapes: dict[str, torch.Size] = {name: tensor.shape for name, tensor in total.items()}
        if memory is None or shapes != {name: slots.shape[1:] for name, slots in memory.slots.items()}:
            memory = self._memory = correlated.resume(total, self.step, self.source)
        sums = correlated.add(total, memory, self.source)
        return Mean({name: tensor / self.settings.expected_batch for name, tensor in sums.items()}, math.nan)
