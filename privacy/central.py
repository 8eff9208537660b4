"""Private training in one place: the updates of a `Trainer`, and `mycelia train` with a `[privacy]` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mycelia.engine import training as engine
from mycelia.engine.data import Examples
from mycelia.engine.errors import ConfigError
from mycelia.engine.events import Event, Listener
from mycelia.engine.optimizers import flatten_state, unflatten_state
from mycelia.engine.run import Run
from mycelia.engine.train_config import TrainConfig
from mycelia.engine.training import Done, FitResult, MakeUpdates, Prepared, TrainState, Work
from mycelia.engine.training.step import initial_carry, split_carry
from mycelia.engine.transforms.compile import Plan, choose_plan
from mycelia.engine.types import Tensors
from mycelia.privacy.accounting import epsilon
from mycelia.privacy.budget import Budget
from mycelia.privacy.calibrate import OutOfReach, calibrate
from mycelia.privacy.central_config import CentralPrivacy, PrivateTrainConfig
from mycelia.privacy.clipped_grad import ClippedGrad, clipped_grad
from mycelia.privacy.factorisation import Plan as Horizon
from mycelia.privacy.factorisation import fitted, planned
from mycelia.privacy.ledger import FILE, Ledger
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.optimizers import NoiseAware
from mycelia.privacy.releases import Mean, Releases, ReleaseSettings
from mycelia.privacy.sampling import Batch, MinSep, Sampler

__all__ = [
    "KEY",
    "PrivatePlan",
    "PrivateUpdates",
    "plan_of",
    "plan_training",
    "prepare",
    "private",
    "resume",
    "train",
]

KEY = "noise.key"
"""File of a run folder with the secret of noise and draws; only its owner can read it."""


@dataclass(frozen=True)
class PrivatePlan:
    """What a `[privacy]` block comes to for one training.

    Attributes:
        config: the block.
        settings: what is released in an update.
        noise_multiplier: z of the first update, as given or as the budget allows over all that are planned.
        epsilon: what all planned updates spend; above the budget when they cannot all be made.
    """

    config: CentralPrivacy
    settings: ReleaseSettings
    noise_multiplier: float
    epsilon: float


def plan_training(config: CentralPrivacy, *, batch_size: int, examples: int, steps: int) -> PrivatePlan:
    """Sampler and noise of a private training.

    Args:
        config: the block.
        batch_size: (expected) examples a step.
        examples: training examples, which is public.
        steps: planned steps.

    Raises:
        ConfigError: settings without a bound, or a δ that is not below one over the examples.
        OutOfReach: no noise reaches the budget.
    """
    if config.delta * examples >= 1:
        raise ConfigError(
            f"delta is {config.delta:g} with {examples} training examples",
            rule="δ is below one over the number of those protected: at 1/n whole examples may be published",
            fix=f"set privacy.delta to {0.1 / examples:.0e} or less",
            who="privacy",
        )
    sampler = config.draws(batch_size, examples, steps)
    strategy, horizon = config.strategy(), None
    if strategy is not None:
        if isinstance(sampler, MinSep):
            uses, separation = sampler.uses, sampler.separation
            strategy = fitted(strategy, Horizon(uses * separation, uses, separation))
        sampler, plan = planned(strategy, sampler)
        horizon = plan.steps
    z = config.noise_multiplier
    found = calibrate(
        sampler, delta=config.delta, steps=horizon or steps, schedule=config.shape(), noise_multiplier=z,
        epsilon=config.epsilon if z is None else None,
    )  # fmt: skip
    if z is not None and (first := _first_update(config, sampler, z)) > config.epsilon:
        raise OutOfReach(
            f"the first update spends ε {first:.6g}, and the budget is {config.epsilon:g}",
            rule="a budget pays for one update at least",
            fix="raise privacy.noise_multiplier or privacy.epsilon, or leave the noise out to calibrate it",
            who="privacy",
        )
    z = found.value if z is None else z
    settings = ReleaseSettings(
        sampler=sampler,
        clip=config.clip_function(),
        noise=config.noise_at(z),
        expected_batch=float(batch_size),
        mechanism=config.noise(),
        factorisation=strategy,
        steps=horizon,
    )
    return PrivatePlan(config, settings, z, found.statement.epsilon)


def _first_update(config: CentralPrivacy, sampler: Sampler, z: float) -> float:
    """What one update spends; with correlated noise the run is one release, however many updates it has."""
    return epsilon(sampler, z, 1, config.delta).epsilon


class PrivateUpdates:
    """Updates from noised sums of clipped gradients; see `Updates` for what is public.

    With a run, the ledger and the key of the noise are in its folder, and a run that goes on takes them up.
    """

    plan: Plan
    _clipped: ClippedGrad

    def __init__(
        self,
        plan: PrivatePlan,
        trainer: Work,
        examples: Examples,
        params: Tensors,
        buffers: Tensors,
        run: Run | None,
    ) -> None:
        if trainer.clip_norm:
            raise ConfigError(
                f"clip_norm is {trainer.clip_norm}",
                rule="privacy clips the gradient of each example, before the noise",
                fix="set clip_norm to 0",
                who="Trainer",
            )
        if plan.settings.factorisation is not None and isinstance(trainer.optimizer, NoiseAware):
            raise ConfigError(
                f"{trainer.optimizer.name} with {plan.settings.factorisation.name} noise",
                rule="it knows independent noise alone",
                fix="use adam",
                who="Trainer",
            )
        self._private, self._trainer, self._examples = plan, trainer, examples
        self._buffers = buffers
        self._device = next((tensor.device for tensor in params.values()), torch.device("cpu"))
        self.carry = initial_carry(buffers, trainer.optimizer, params, clip_norm=0)
        config, source = plan.config, _source(plan.config, trainer.seed, run)
        relation = plan.settings.sampler.relation
        self._budget = Budget(config.epsilon, config.delta, "example", relation, ledger=_ledger(source, run))
        size = sum(tensor.numel() for tensor in params.values())
        self._releases = Releases(plan.settings, self._budget, self._budget.ledger, source, size)
        self._parts: Iterator[Batch] | None = None
        self._clipped = clipped_grad(trainer.program, self._releases.clip(), backend="auto")

    def begin(self, plan: str, params: Tensors, total: int) -> None:
        """See `Updates`.

        Raises:
            ConfigError: an unknown plan, or one that private steps do not have.
        """
        del total
        self.plan = _resolved(plan, self._clipped)
        if self.plan.name != "eager":
            part = next(self._draw(0))
            self._clipped = self._clipped.planned(
                self.plan.name, params, self._buffers, self._rows(part.indices)
            )

    def settings(self) -> Mapping[str, Any]:
        """See `Updates`."""
        return {
            "optimizer": self._trainer.optimizer.name,
            "delta": self._budget.delta,
            "epsilon": self._budget.epsilon,
            **self._releases.describe(0),
        }

    def step(self, state: TrainState) -> Done | None:
        """See `Updates`; None as well when the budget cannot pay for the step."""
        releases = self._releases
        if not releases.affordable(state.step):
            return None
        if self._parts is None:
            self._parts = self._draw(state.step)
        self._clipped = replace(self._clipped, clip=releases.clip())
        total: Tensors = {}
        signal, loss, count, last = 0.0, 0.0, 0, False
        while not last:
            part = next(self._parts)
            mask = torch.from_numpy(part.mask).to(self._device)
            found = self._clipped(
                state.params,
                state.buffers,
                self._rows(part.indices),
                mask,
                seed=releases.seed(str(part.part)),
            )
            total = {name: total[name] + value if total else value for name, value in found.total.items()}
            signal += releases.signal(found.norms, mask)
            loss, count, last = loss + float(found.losses.sum()), count + int(mask.sum()), part.last
        self._update(state, releases.release(total, signal))
        return Done(loss / count if count else float("nan"), count, None)

    def state(self) -> Mapping[str, Any]:
        """See `Updates`."""
        self._budget.ledger.sync()
        return self._releases.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Updates`.

        Raises:
            DataError: the ledger is not the one that the run wrote.
        """
        self._releases.restore(state)
        self._parts = None

    def events(self, step: int) -> Sequence[Event]:
        """What is spent, and how many updates are left."""
        said = str(self._budget.ledger.statement(self._budget.delta))
        reading = self._budget.gauge(self._releases.event(step), step)
        return (replace(reading, statement=said),)

    def outcome(self) -> Mapping[str, Any]:
        """ε and δ, and what ended training."""
        return {
            "epsilon": self._budget.spent,
            "delta": self._budget.delta,
            "stopped_by": self._releases.stopped_by,
        }

    def close(self) -> None:
        """Let go of the ledger's file."""
        self._budget.ledger.close()

    def _draw(self, step: int) -> Iterator[Batch]:
        return self._private.settings.sampler.draw(len(self._examples), self._releases.source, step)

    def _rows(self, rows: Any) -> tuple[Tensor, Tensor]:
        arrays = (self._examples.inputs[rows], self._examples.targets[rows])
        inputs, targets = (torch.from_numpy(array).to(self._device) for array in arrays)
        return inputs, targets

    def _update(self, state: TrainState, released: Mean) -> None:
        """The optimiser's step, in place, on gradients that are private already."""
        own, optimizer = split_carry(state.carry)[1], self._trainer.optimizer
        if isinstance(optimizer, NoiseAware):
            optimizer = optimizer.knowing(released.std**2)
        gradients = {name: mean.to(state.params[name].dtype) for name, mean in released.tensors.items()}
        with torch.no_grad():
            moved, after = optimizer.update_(gradients, unflatten_state(own), state.params)
            for now, new in ((state.params, moved), (own, flatten_state(after))):
                for name, tensor in now.items():
                    if tensor is not new[name]:
                        tensor.copy_(new[name])


def private(config: CentralPrivacy, *, batch_size: int, examples: int, steps: int) -> MakeUpdates:
    """What makes a `Trainer` private: `Trainer(..., updates=private(...))`; see `plan_training`."""
    plan = plan_training(config, batch_size=batch_size, examples=examples, steps=steps)
    return partial(PrivateUpdates, plan)


def plan_of(prepared: Prepared) -> PrivatePlan | None:
    """What a private training was planned to be; None for one that is not private."""
    updates = prepared.trainer.updates
    plan = updates.args[0] if isinstance(updates, partial) else None
    return plan if isinstance(plan, PrivatePlan) else None


def prepare(config: TrainConfig) -> Prepared:
    """As `engine.training.prepare`, with private updates where the configuration asks for them."""
    prepared = engine.prepare(config)
    block = config.privacy if isinstance(config, PrivateTrainConfig) else None
    if block is None:
        return prepared
    trainer, examples = prepared.trainer, len(prepared.dataset.train)
    updates = private(
        block, batch_size=trainer.batch_size, examples=examples, steps=trainer.total_steps(examples)
    )
    return replace(prepared, trainer=replace(trainer, updates=updates))


def train(
    config: PrivateTrainConfig,
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
    """As `engine.training.resume`; a run's updates that are made again are no new releases."""
    return engine.resume(
        path, listeners=listeners, on_signal=on_signal, kind=PrivateTrainConfig, prepare=prepare
    )


def _source(config: CentralPrivacy, seed: int, run: Run | None) -> NoiseSource:
    if config.noise_source == "seeded":
        return NoiseSource.seeded(seed)
    if run is None:
        return NoiseSource.os()
    if (run.path / KEY).exists() or (run.path / FILE).exists():
        return NoiseSource.load(run.path / KEY)
    source = NoiseSource.os()
    source.save(run.path / KEY)
    return source


def _ledger(source: NoiseSource, run: Run | None) -> Ledger:
    if run is None:
        return Ledger(source.note)
    path = run.path / FILE
    return Ledger.load(path, write=True) if path.exists() else Ledger.create(path, source.note)


def _resolved(plan: str, clipped: ClippedGrad) -> Plan:
    """The plan of private steps."""
    if plan in ("eager", "interpreter", "inductor"):
        if plan != "eager" and clipped.tapped is None:
            raise ConfigError(
                f"plan {plan!r} with per-example gradients by {clipped.backend}",
                rule="only gradients from taps have a graph to run",
                fix="use plan = 'default'",
                who="plan",
            )
        return choose_plan(plan, 0)
    if plan == "default":
        if clipped.tapped is not None and clipped.tapped.taps:
            return Plan("interpreter", "private steps gain nothing from compiling on most models")
        return Plan("eager", f"per-example gradients by {clipped.backend}")
    if plan == "tune":
        raise ConfigError(
            "plan 'tune' for private steps",
            rule="their plan does not depend on measured times",
            fix="use default, eager, interpreter or inductor",
            who="plan",
        )
    return choose_plan(plan, 0)  # raises: there is no such plan
