"""The handle of a private training loop: draws, clips, accounts, and fills `.grad` when the optimiser steps.

The clipped sum lives in the handle. Noise enters through the optimiser's public step pre-hook, right before
the update: `.grad` is filled there, private already, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.schema import model_sha256
from mycelia.engine.types import Tensors
from mycelia.privacy import saving
from mycelia.privacy.adam_bc import AdamBC
from mycelia.privacy.ledger import FILE, Head
from mycelia.privacy.module_grad import ModuleGrad
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.parallel import Ranks
from mycelia.privacy.releases import Mean, Releases
from mycelia.privacy.sampling import Batch
from mycelia.privacy.settings import Settings

__all__ = ["PrivateBatch", "PrivateLoss", "PrivateTraining"]


@dataclass(frozen=True)
class PrivateBatch:
    """One physical part of a logical batch.

    Attributes:
        inputs: [size, ...]; rows where `mask` is false are padding.
        targets: [size, ...].
        mask: bool [size].
        part: what the sampler drew, or this process's share of it.
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


class PrivateTraining:
    """The handle that `attach` returns.

    Attributes:
        model: the model, as it was given.
        optimizer: the optimiser, as it was given.
        sampler: draws and accounts.
        ledger: what was released.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        releases: Releases,
        ranks: Ranks,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.sampler, self.ledger = releases.settings.sampler, releases.ledger
        self._settings, self._releases, self._ranks = settings, releases, ranks
        self._folder: Path | None = None
        self._gradient = ModuleGrad(model, settings)
        self._given: dict[str, tuple[Tensor, int]] = {}
        self._total: Tensors = {}
        self._signal = 0.0
        self._seen: list[tuple[int, int]] = []
        self._complete = False
        self._parameters()
        self._agree()
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    @property
    def steps(self) -> int:
        """Updates made."""
        return self._releases.step

    @property
    def stopped_by(self) -> str:
        """What ended training: "budget" once an update was refused, else nothing."""
        return self._releases.stopped_by

    def batches(self, data: tuple[Any, Any]) -> Iterator[PrivateBatch]:
        """Batches from the next step on, until the budget or the plan ends; without these they never do.

        Args:
            data: inputs [n, ...] and targets [n, ...], arrays or tensors; in data-parallel runs every process
                has all of them, and gets its share of each batch. With groups of k examples as the unit,
                batches are of groups: inputs [size, k, ...] and targets likewise.

        Raises:
            DataError: inputs and targets of different length, or of one that groups do not divide.
            BudgetExceeded: the next update is not affordable, and the budget says "raise".
        """
        inputs, targets = (torch.as_tensor(part) for part in data)
        if len(inputs) != len(targets):
            raise DataError(
                f"{len(inputs)} inputs and {len(targets)} targets", rule="one target an input", who="batches"
            )
        if (group := self._settings.group) is not None:
            inputs, targets = group.rows(inputs), group.rows(targets)
        for whole in self.sampler.draw(len(inputs), self._releases.source, self.steps):
            if whole.part == 0 and not self._releases.affordable(whole.step):
                return
            part = whole.share(self._ranks.rank, self._ranks.count)
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
        name = str(place[1]) if self._ranks.first else f"{place[1]}/{self._ranks.rank}"
        found = self._gradient(
            self._parameters(),
            (batch.inputs, batch.targets),
            batch.mask,
            self._releases.clip(),
            seed=self._releases.seed(name),
        )
        count = int(batch.mask.sum())

        def take() -> None:
            if place in self._seen:
                raise ConfigError("backward() was called twice", rule="each part counts once", who="loss")
            total = self._total or {name: torch.zeros_like(part) for name, part in found.total.items()}
            self._check_names(total, found.total)
            self._total = {name: total[name] + part for name, part in found.total.items()}
            self._seen.append(place)
            self._signal += self._releases.signal(found.norms, batch.mask)
            self._complete = batch.part.last

        return PrivateLoss(float(found.losses.sum()) / count if count else float("nan"), take)

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint that `load` goes on from, to the bit; the two newest are kept.

        The folder holds `step-…/` with model, optimiser and clip bound (safetensors and JSON), the ledger
        `privacy.jsonl` unless it has a file of its own, and `secret/`, which only its owner may read: the key
        of noise and draws, and the memory of factorised noise. Whoever has `secret/` can take the noise off
        what was released: publish `step-…/`, never the rest.

        Call it between updates: parts of a logical batch that is not complete are drawn again.

        Args:
            folder: made by the first call; one folder for one run.
            extra: what the loop itself has to keep, such as a scheduler's `state_dict()`.

        Raises:
            ConfigError: the folder has another run.
            DataError: the optimiser or `extra` holds something that is no number, string, tensor or
                collection of these.
            MyceliaError: the disk is full or not writable; earlier checkpoints are as they were.
        """
        where, releases = Path(folder).resolve(), self._releases
        if self._ranks.first:
            coming = FILE if self.ledger.path is None else ""
            saving.claim(where, releases.source, own=where == self._folder, coming=coming)
            self._folder = where
            if coming:
                self.ledger.keep(where / FILE)
            self.ledger.sync()
            saving.write(
                where,
                saving.Saved(
                    self.state_dict(), self._describe(self.steps), self.model.state_dict(),
                    self.optimizer.state_dict(), dict(extra or {}), releases.source, releases.memory,
                ),
            )  # fmt: skip
        self._ranks.wait()

    def load(self, folder: str | Path, *, source: NoiseSource | None = None) -> dict[str, Any]:
        """Go on from the newest checkpoint of a folder, with the model and settings that it was made with.

        Updates between the checkpoint and the end of the run before are made again. With the same data they
        are the same releases and count once; the ledger keeps all the others, so that an old checkpoint
        gives no budget back.

        Args:
            folder: where `save` wrote.
            source: a new one, to go on with other data or hyperparameters than the run before: its updates
                are then made with other draws and noise, and count again. By default the run's own.

        Returns:
            `extra` as it was saved.

        Raises:
            DataError: there is no intact checkpoint, the ledger is not that of the run, or the model, the
                optimiser or a setting differs.
            ConfigError: a new source for factorised noise, which is one release with one secret.
        """
        where = Path(folder).resolve()
        saved = saving.read(where)
        if source is not None and self._releases.factorised:
            raise ConfigError(
                "a new source for factorised noise",
                rule="the whole run is one release with one secret",
                fix="leave source out, or begin a new run",
                who="load",
            )
        self._check_same(saved)
        if self.ledger.path is None:
            self.ledger.resume(where / FILE, Head(*saved.state["ledger"]), write=self._ranks.first)
        secret = saved.source if source is None else self._ranks.one_source(source)
        self._releases.restore(saved.state, secret, saved.memory)
        self._forget()
        self.model.load_state_dict(saved.model)
        self.optimizer.load_state_dict(saved.optimizer)
        self._folder = where
        self._agree()
        return saved.extra

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of one's own needs beside model and optimiser, as JSON can say it.

        The secret of the noise is not in it: keep `NoiseSource.save`'s file, which only its owner can read.
        """
        return self._releases.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, with a ledger that passes through its head.

        Raises:
            DataError: it does not.
        """
        self._releases.restore(state)
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
        self._check_names(self._total, params)
        total, signal = self._ranks.total({name: self._total[name] for name in params}, self._signal)
        terms = self._regulariser(params)
        self._fill(params, self._releases.release(total, signal), terms)
        self._forget()

    def _regulariser(self, params: Mapping[str, nn.Parameter]) -> Sequence[Tensor | None]:
        """Its gradient by parameter."""
        if self._settings.regulariser is None:
            return [None] * len(params)
        with torch.enable_grad():
            term = self._settings.regulariser(dict(params))
        return torch.autograd.grad(term, list(params.values()), allow_unused=True)

    def _fill(
        self, params: Mapping[str, nn.Parameter], released: Mean, terms: Sequence[Tensor | None]
    ) -> None:
        """Write what was released, and the regulariser's gradient, into `.grad`."""
        for (name, parameter), term in zip(params.items(), terms, strict=True):
            mean = released.tensors[name].to(parameter.dtype)
            parameter.grad = mean if term is None else mean + term
            self._given[name] = (parameter.grad, parameter.grad._version)
        if isinstance(self.optimizer, AdamBC):
            self.optimizer.expect(released.std**2)

    def _forget(self) -> None:
        self._total, self._signal, self._seen, self._complete = {}, 0.0, [], False

    def _agree(self) -> None:
        """Refuse processes that do not start alike."""
        if self._ranks.count == 1:
            return
        releases, budget = self._releases, self._releases.budget
        limits = (budget.epsilon, budget.delta, budget.unit, budget.relation) if budget else ()
        self._ranks.agree(
            repr((
                releases.stream, self.sampler, self._describe(self.steps), releases.adaptive, self.steps,
                limits, self.ledger.events, model_sha256(dict(self.model.state_dict())),
                self.optimizer.state_dict()["param_groups"],
            )),
            "attach",
        )  # fmt: skip

    def _describe(self, step: int) -> dict[str, Any]:
        """What a checkpoint has to agree with, at one update."""
        return self._releases.describe(step) | {"optimizer": type(self.optimizer).__name__}

    def _check_same(self, saved: saving.Saved) -> None:
        """Refuse a checkpoint of another run."""
        mine = self._describe(int(saved.state["steps"])) | {"model": _shapes(self.model.state_dict())}
        theirs = saved.run | {"model": _shapes(saved.model)}
        for name, own in mine.items():
            if own != theirs.get(name):
                raise DataError(
                    f"{name} is {own}, and {theirs.get(name)} in the checkpoint",
                    rule="a run goes on with the model and settings that it was begun with",
                    fix="attach with those settings, or begin a new run",
                    who="load",
                )

    def _check_names(self, total: Mapping[str, object], trained: Mapping[str, object]) -> None:
        """Refuse a change of what is trained in the middle of a logical batch."""
        if changed := sorted(total.keys() ^ trained.keys()):
            how = "frozen" if changed[0] in total else "unfrozen"
            raise ConfigError(
                f"{changed[0]} was {how} within step {self.steps}",
                rule="all parts of a logical batch train the same parameters",
                fix="freeze and unfreeze right after optimizer.step()",
                who="private step",
            )

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


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[object]]:
    return {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
