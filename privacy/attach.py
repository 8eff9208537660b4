"""Private training in an ordinary PyTorch loop: three changed lines, and no wrapper around anything.

    train = attach(model, loss_fn, optimizer, sampler=Poisson(0.01), clip=Abadi(1.0), noise=1.1, ...)
    for batch in train.batches((inputs, targets)):
        train.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

The clipped sum lives in the handle. Noise enters through the optimiser's public step pre-hook, right before
the update: `.grad` is filled there, private already, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import BudgetExceeded, ConfigError, DataError
from mycelia.engine.program import Program
from mycelia.engine.schema import Role
from mycelia.engine.types import Tensors
from mycelia.privacy.budget import Budget
from mycelia.privacy.clip import ClipFunction, ClipState, PerLayer, QuantileClip
from mycelia.privacy.clipped_grad import ClippedGrad, clipped_grad
from mycelia.privacy.events import Event
from mycelia.privacy.ledger import Head, Ledger
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.discrete_gaussian import DiscreteGaussian
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.optimizers import PrivateUpdate
from mycelia.privacy.sampling import Batch, Sampler
from mycelia.privacy.schedules import NoiseSchedule

__all__ = ["PrivateBatch", "PrivateLoss", "PrivateTraining", "attach"]

Loss = Callable[[Any, Tensor], Tensor]
AnyClip = ClipFunction | PerLayer | QuantileClip


@dataclass(frozen=True)
class PrivateBatch:
    """One physical part of a logical batch.

    Attributes:
        inputs: [size, ...]; rows where `mask` is false are padding.
        targets: [size, ...].
        mask: bool [size].
        part: what the sampler drew.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    part: Batch


@dataclass
class PrivateLoss:
    """What `PrivateTraining.loss` returns: `backward()` takes the part's clipped gradients into the sum.

    The value is that of private data and is not covered by any ε: look at it, do not publish it.

    Attributes:
        value: mean loss over the real examples; NaN when there are none.
    """

    value: float
    _take: Callable[[], None] = field(repr=False)

    def backward(self) -> None:
        """Take the clipped gradients into the sum of the logical batch.

        Raises:
            ConfigError: they were taken already.
        """
        self._take()

    def item(self) -> float:
        """The value."""
        return self.value

    def __float__(self) -> float:
        return self.value


def attach(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    *,
    sampler: Sampler,
    clip: AnyClip,
    noise: float | NoiseSchedule,
    expected_batch: float | None = None,
    budget: Budget | None = None,
    ledger: Ledger | None = None,
    source: NoiseSource | None = None,
    mechanism: Mechanism | None = None,
    regulariser: Callable[[Tensors], Tensor] | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> PrivateTraining:
    """Make an ordinary optimiser private; neither it nor the model is wrapped.

    Args:
        model: any module that takes one tensor [B, ...]; its parameters are those of the optimiser.
        loss_fn: `(outputs, targets) -> Tensor[B]`, one loss per example (`reduction="none"`).
        optimizer: any `torch.optim` optimiser; schedulers, state and hooks of its own go on working.
        sampler: draws the batches and accounts for them.
        clip: the clip function.
        noise: z, the noise multiplier relative to the clip bound, or a schedule of it.
        expected_batch: the public number of examples the sum is divided by, usually the sampler's rate times
            a public figure for the number of examples. Samplers with a public population know it.
        budget: asked before every update; None: nothing stops the training.
        ledger: where updates are recorded when there is no budget; a budget has its own.
        source: of draws and noise; the operating system's by default.
        mechanism: the noise; by default `DiscreteGaussian` with a source of the operating system, `Gaussian`
            with a seeded one.
        regulariser: a term on the parameters alone, `params -> 0-d tensor`, which needs no clipping.
        backend: see `clipped_grad`.
        strict: see `clipped_grad`.

    Raises:
        ConfigError: settings that contradict each other, or parameters the optimiser does not have.
    """
    if budget is not None and ledger is not None:
        raise ConfigError(
            "a budget and a ledger", rule="a budget has its own ledger", fix="leave ledger out", who="attach"
        )
    if expected_batch is None:
        size, rate = getattr(sampler, "population", None), sampler.rate
        if size is None:
            raise ConfigError(
                f"no expected_batch for {sampler.name}",
                rule="the sum is divided by a public number, never by what was drawn",
                fix="pass the rate times a public figure for the number of examples",
                who="attach",
            )
        expected_batch = rate * size
    if not 0 < expected_batch < float("inf"):
        raise ConfigError(f"expected_batch is {expected_batch}", rule="positive and finite", who="attach")
    source = source if source is not None else NoiseSource.os()
    if mechanism is None:
        mechanism = DiscreteGaussian() if source.kind == "os" else Gaussian()
    book = budget.ledger if budget is not None else ledger if ledger is not None else Ledger(source.note)
    return PrivateTraining(
        model, loss_fn, optimizer, sampler, clip, noise, expected_batch, budget, book, source, mechanism,
        regulariser, backend, strict,
    )  # fmt: skip


class PrivateTraining:
    """The handle that `attach` returns.

    Attributes:
        steps: updates made.
        stopped_by: "budget" once an update was refused, else "".
        ledger: what was released.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        optimizer: torch.optim.Optimizer,
        sampler: Sampler,
        clip: AnyClip,
        noise: float | NoiseSchedule,
        expected_batch: float,
        budget: Budget | None,
        ledger: Ledger,
        source: NoiseSource,
        mechanism: Mechanism,
        regulariser: Callable[[Tensors], Tensor] | None,
        backend: str,
        strict: bool,
    ) -> None:
        self.model, self.optimizer, self.sampler, self.ledger = model, optimizer, sampler, ledger
        self.steps, self.stopped_by = 0, ""
        self._loss_fn, self._clip, self._noise, self._expected = loss_fn, clip, noise, expected_batch
        self._budget, self._source, self._mechanism = budget, source, mechanism
        self._regulariser, self._backend, self._strict = regulariser, backend, strict
        self._adaptive = clip.init() if isinstance(clip, QuantileClip) else None
        self._program: Program | None = None
        self._shapes: tuple[object, ...] = ()
        self._clipped: ClippedGrad | None = None
        self._total: Tensors = {}
        self._signal = 0.0
        self._seen: list[tuple[int, int]] = []
        self._complete = False
        self._given: dict[str, tuple[Tensor, int]] = {}
        self._event(0)  # settings without a bound are refused now
        self._parameters()
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def batches(self, data: tuple[Any, Any]) -> Iterator[PrivateBatch]:
        """Batches from the next step on, until the budget is spent; without a budget they never end.

        Args:
            data: inputs [n, ...] and targets [n, ...], arrays or tensors.

        Raises:
            DataError: inputs and targets of different length.
            BudgetExceeded: the next update is not affordable, and the budget says "raise".
        """
        inputs, targets = (torch.as_tensor(part) for part in data)
        if len(inputs) != len(targets):
            raise DataError(
                f"{len(inputs)} inputs and {len(targets)} targets", rule="one target an input", who="batches"
            )
        for part in self.sampler.draw(len(inputs), self._source, self.steps):
            if part.part == 0 and not self._affordable(part.step):
                return
            rows = torch.from_numpy(part.indices)
            yield PrivateBatch(inputs[rows], targets[rows], torch.from_numpy(part.mask), part)

    def loss(self, batch: PrivateBatch) -> PrivateLoss:
        """Forward and backward of one part; call `backward()` on the result.

        Raises:
            ConfigError: a part of another step, or one that was seen already.
            CaptureError: the model mixes examples, or cannot be exported.
        """
        place = batch.part.step, batch.part.part
        if batch.part.step != self.steps or batch.part.part != len(self._seen):
            again = place in self._seen
            raise ConfigError(
                f"part {place[1]} of step {place[0]} {'was seen already' if again else 'is not the next'}",
                rule="each part of a logical batch is seen once, in order",
                fix="add several losses on one example into one loss function; call optimizer.step() when a "
                "batch is complete",
                who="loss",
            )
        params = self._parameters()
        clipped = self._clipped_grad(params, batch)
        buffers = dict(self.model.named_buffers())
        kept = clipped.program.schema.of(Role.BUFFER, Role.COUNTER)
        found = clipped(
            {name: tensor.detach() for name, tensor in params.items()},
            {entry.name: buffers[entry.name] for entry in kept},
            (batch.inputs, batch.targets),
            batch.mask,
            seed=int.from_bytes(self._source.bytes("dropout", self.steps, str(place[1]), 8), "little") >> 1,
        )
        count = int(batch.mask.sum())

        def take() -> None:
            if place in self._seen:
                raise ConfigError("backward() was called twice", rule="each part counts once", who="loss")
            self._seen.append(place)
            total = self._total
            self._total = {n: total[n] + t if total else t for n, t in found.total.items()}
            if isinstance(self._clip, QuantileClip) and self._adaptive is not None:
                self._signal += self._clip.signal(self._adaptive, found.norms, batch.mask)
            self._complete = batch.part.last

        return PrivateLoss(float(found.losses.sum()) / count if count else float("nan"), take)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside model and optimiser, as JSON can say it.

        The secret of the noise is not in it: keep `NoiseSource.save`'s file, which only its owner can read.
        """
        head = self.ledger.head
        return {
            "steps": self.steps,
            "clip_bound": self._adaptive.bound if self._adaptive else None,
            "ledger": [head.lines, head.hash],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, with a ledger that passes through its head.

        Raises:
            DataError: the ledger is shorter than the checkpoint says.
        """
        head = Head(*state["ledger"])
        if self.ledger.head.lines < head.lines:
            raise DataError(
                f"the ledger has {self.ledger.head.lines} lines, the checkpoint {head.lines}",
                rule="a ledger is never shortened",
                fix="load the ledger with Ledger.load(path, head, write=True)",
                who="private training",
            )
        self.steps = int(state["steps"])
        if self._adaptive is not None:
            self._adaptive = ClipState(float(state["clip_bound"]))
        self._forget()

    def detach(self) -> None:
        """Take the hook off the optimiser; nothing else was changed."""
        self._hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(part is not None for part in (*args[1:], *kwargs.values())):
            raise ConfigError(
                "step was called with a closure",
                rule="a closure runs the model again, which would be another release",
                fix="use an optimiser that needs no closure",
                who="private step",
            )
        if not self._complete:
            raise ConfigError(
                f"step {self.steps} has {len(self._seen)} parts and is not complete",
                rule="an update follows the last part of its logical batch",
                fix="call train.loss(batch).backward(), and optimizer.step() when batch.part.last",
                who="private step",
            )
        params = self._parameters()
        self._refuse_foreign(params)
        event = self._event(self.steps)
        if self._budget is not None:
            try:
                self._budget.release(event)
            except BudgetExceeded:
                self.stopped_by = "budget"
                raise
        else:
            self.ledger.record(event)
        self._fill(params, event)
        if isinstance(self._clip, QuantileClip) and self._adaptive is not None:
            self._adaptive = self._clip.update(
                self._adaptive, self._signal, self._expected, self._mechanism, self._source, self.steps
            )
        self.steps += 1
        self._forget()

    def _fill(self, params: Mapping[str, nn.Parameter], event: Event) -> None:
        """Write (total + noise) / expected batch, and the regulariser's gradient, into `.grad`."""
        z = event.noise_multiplier
        bound = self._bound()
        if isinstance(self._clip, QuantileClip):
            z = self._clip.gradient_multiplier(z, self._expected)
        size = sum(parameter.numel() for parameter in params.values())
        std = z * (bound + self._mechanism.slack(bound, size))
        means = PrivateUpdate(self._mechanism, std, self._expected, self._source, bound).mean(
            {name: self._total[name] for name in params}, self.steps
        )
        extra: Sequence[Tensor | None] = [None] * len(params)
        if self._regulariser is not None:
            with torch.enable_grad():
                term = self._regulariser(dict(params))
            extra = torch.autograd.grad(term, list(params.values()), allow_unused=True)
        for (name, parameter), more in zip(params.items(), extra, strict=True):
            mean = means[name].to(parameter.dtype)
            parameter.grad = mean if more is None else mean + more
            self._given[name] = (parameter.grad, parameter.grad._version)

    def _forget(self) -> None:
        self._total, self._signal, self._seen, self._complete = {}, 0.0, [], False

    def _refuse_foreign(self, params: Mapping[str, nn.Parameter]) -> None:
        """A gradient that did not come from the clipped sum would get around the clipping."""
        for name, parameter in params.items():
            grad = parameter.grad
            if grad is None:
                continue
            own, version = self._given.get(name, (None, 0))
            if grad is own and grad._version == version:
                continue  # last step's, which nobody cleared: it is overwritten
            if bool(grad.any()):
                raise ConfigError(
                    f"{name}.grad was filled from elsewhere",
                    rule="only clipped and noised gradients reach the optimiser",
                    fix="use train.loss(batch).backward() for data, and regulariser= for terms on parameters",
                    who="private step",
                )

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The model's trainable parameters as they are now, all of which the optimiser must have."""
        found = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in found.items() if id(p) not in known]
        strange = known - {id(p) for p in self.model.parameters()}
        if missing or strange:
            raise ConfigError(
                f"{missing[0]} is not in the optimiser" if missing else "the optimiser has other parameters",
                rule="the optimiser has the model's trainable parameters, and no other",
                fix="make the optimiser after the last change of the model",
                who="attach",
            )
        return found

    def _clipped_grad(self, params: Mapping[str, nn.Parameter], batch: PrivateBatch) -> ClippedGrad:
        """The clipped gradient of the model as it is now; captured again when what is trained changes."""
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in params.items())
        if self._program is None or shapes != self._shapes:
            example = batch.inputs[:2], batch.targets[:2]
            self._program = capture(self.model, self._loss_fn, example)
            self._shapes, self._clipped = shapes, None
        clip: Any = self._clip
        if isinstance(self._clip, QuantileClip) and self._adaptive is not None:
            clip = self._clip.clip(self._adaptive)
        if self._clipped is None:
            self._clipped = clipped_grad(self._program, clip, backend=self._backend, strict=self._strict)
        self._clipped = replace(self._clipped, clip=clip)
        return self._clipped

    def _bound(self) -> float:
        """The clip bound in force."""
        if isinstance(self._clip, QuantileClip):
            return (self._adaptive or self._clip.init()).bound
        return self._clip.sensitivity().bound

    def _event(self, step: int) -> Event:
        """The update `step` as the ledger has it: with the z asked for, whatever it is split into."""
        relation = self._budget.relation if self._budget is not None else None
        unit = self._budget.unit if self._budget is not None else "example"
        return self.sampler.events(
            self._noise, 1, first_step=step, relation=relation, unit=unit, clip=self._bound(),
            mechanism=self._mechanism.name,
        )[0]  # fmt: skip

    def _affordable(self, step: int) -> bool:
        if self._budget is None:
            return True
        try:
            self._budget.allow(self._event(step))
        except BudgetExceeded:
            self.stopped_by = "budget"
            if self._budget.on_exceed == "raise":
                raise
            return False
        return True
