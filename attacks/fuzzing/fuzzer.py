"""Fuzzing: mutants of mutants that show something new; those that the model has wrong are defects."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from mycelia.attacks.arguments import Bounds, bounds_of, clipped, inputs_of
from mycelia.attacks.fuzzing.activations import activations, tapped
from mycelia.attacks.fuzzing.coverage import Coverage
from mycelia.attacks.fuzzing.guides import ByCoverage, BySensitivity, Guide
from mycelia.attacks.fuzzing.mutators import Mutator, as_mutators
from mycelia.attacks.fuzzing.queue import Item, Queue
from mycelia.attacks.fuzzing.result import Defect, FuzzResult
from mycelia.attacks.fuzzing.validity import Validity
from mycelia.attacks.goals import predicted
from mycelia.attacks.model import ModuleModel, as_model
from mycelia.attacks.windows import Layout
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import derive, generator

__all__ = ["Fuzzer", "SensitivityFuzzer"]

_USUAL: Final = Validity()


@dataclass(frozen=True, eq=False)
class _Fuzz(ABC):
    model: nn.Module | ModuleModel
    mutators: Sequence[Any]

    @abstractmethod
    def _guide(self) -> Guide:
        """What tells whether a mutant is worth keeping."""

    def run(
        self,
        seeds: Any,
        y: Tensor,
        rng: int = 0,
        max_mutants: int = 1000,
        seconds: float | None = None,
        *,
        layout: Layout | None = None,
        bounds: Bounds = (0.0, 1.0),
        validity: Validity = _USUAL,
        batch: int = 16,
        decay: float = 20.0,
        least: float = 0.05,
        layers: Sequence[str] | None = None,
    ) -> FuzzResult:
        """Make mutants of seeds, and of mutants that the search is after, until a limit is reached.

        Each round draws a mutator and its settings, and different inputs from the queue by their energy.
        A mutant that equals its parent, or that the validity rule refuses, is dropped.

        Args:
            seeds: inputs [n, …], floating point; those that the model has wrong are counted and left out.
            y: true classes, integers [n].
            rng: seed; without `seconds` the same one gives the same result on a CPU.
            max_mutants: to be made, dropped ones included.
            seconds: after which no further round begins; None: no limit.
            layout: of images, "nchw" or "nhwc"; transforms ask for it.
            bounds: smallest and largest value of an input: two numbers, or tensors without a row axis of
                their own.
            validity: which changes leave an input what it is; its size is in units of the inputs.
            batch: mutants in a round, of different parents.
            decay: how fast energy falls, see `Queue`.
            least: energy that is always left, in (0, 1].
            layers: see `tapped`.

        Raises:
            ConfigError: a setting out of range, or no module to look into.
            DataError: labels that are not one for each seed, or seeds outside the bounds.
        """
        began = time.perf_counter()
        who = f"{type(self).__name__}.run"
        if (
            max_mutants < 1
            or batch < 1
            or not decay > 0
            or not 0 < least <= 1
            or (seconds is not None and not seconds > 0)
        ):
            raise ConfigError(
                f"max_mutants {max_mutants}, seconds {seconds}, batch {batch}, decay {decay}, least {least}",
                rule="at least 1, above 0, at least 1, above 0, in (0, 1]",
                who=who,
            )
        target = as_model(self.model)
        if not isinstance(target, ModuleModel):
            raise ConfigError(
                f"{target.name} has no neurons to look at",
                rule="a PyTorch module",
                fix="Fuzzer(module, …)",
                who=who,
            )
        x = inputs_of(seeds)
        labels = torch.as_tensor(y).to(x.device)
        if not len(x) or labels.shape != (len(x),) or labels.is_floating_point():
            raise DataError(
                f"{len(x)} seeds, labels {list(labels.shape)}", rule="one integer per seed", who=who
            )
        low, high = bounds_of(bounds, x)
        if len(low) != 1 or len(high) != 1:
            raise ConfigError("bounds of every seed", rule="the same bounds for all seeds", who=who)
        x, sound = clipped(x, low, high)
        if not bool(sound.all()):
            raise DataError(f"seed {int((~sound).nonzero()[0])} is not finite", rule="finite seeds", who=who)
        box: Bounds = low, high
        run = _Run(
            target, as_mutators(self.mutators), self._guide(), x, labels, rng, box, layout, validity, layers
        )
        with target.quiet():
            stopped = run.until(
                max_mutants, math.inf if seconds is None else began + seconds, batch, decay, least
            )
        return run.result(stopped, time.perf_counter() - began)


@dataclass(frozen=True, eq=False)
class Fuzzer(_Fuzz):
    """After coverage: a mutant enters the queue when it covers at least one unit.

    Attributes:
        model: a PyTorch module that classifies.
        mutators: see `standard_mutators`; transforms, or their classes, may be given as they are.
        coverage: what is to grow; fitted, if it asks for that. A run goes on with a copy of it.
    """

    coverage: Coverage

    def _guide(self) -> Guide:
        return ByCoverage(self.coverage)


@dataclass(frozen=True, eq=False)
class SensitivityFuzzer(_Fuzz):
    """After neuron sensitivity: a mutant enters the queue when neurons answer more to it than to its parent.

    The answer is the mean change of activations from the seed's; the more, the likelier a mutant is mutated
    again. After the fuzzer of Huang et al.: "Themis", arXiv:2405.09314.

    Attributes:
        model: a PyTorch module that classifies.
        mutators: see `standard_mutators`.
    """

    def _guide(self) -> Guide:
        return BySensitivity()


@dataclass(eq=False)
class _Run:
    """A run while it lasts."""

    model: ModuleModel
    mutators: tuple[Mutator, ...]
    guide: Guide
    x: Tensor
    y: Tensor
    rng: int
    bounds: Bounds
    layout: Layout | None
    validity: Validity
    layers: Sequence[str] | None
    clean: dict[str, Tensor] = field(default_factory=dict)
    found: list[tuple[Defect, Tensor]] = field(default_factory=list)
    right: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    tried: int = 0
    valid: int = 0
    entered: int = 0

    def until(self, most: int, end: float, batch: int, decay: float, least: float) -> str:
        """Rounds, until a limit is reached; its name."""
        self.clean = activations(self.model.module, self.x, self.layers)
        outputs = torch.cat([predicted(self.model(part)) for part in self.x.split(256)])
        self.right = outputs == self.y
        self.guide.start(self.clean, self.right.cpu().numpy())
        seeds = self.right.nonzero()[:, 0].tolist()
        queue = Queue((Item(self.x[row], self.x[row], row) for row in seeds), decay, least)
        if not len(queue):
            return "no seed that the model has right"
        step = 0
        while self.tried < most:
            if time.perf_counter() >= end:
                return "seconds"
            self._round(queue, min(batch, most - self.tried), step)
            step += 1
        return "mutants"

    def _round(self, queue: Queue, most: int, step: int) -> None:
        draws = generator(self.rng, "attacks/fuzzing", round=step)
        mutator = self.mutators[int(draws.integers(len(self.mutators)))]
        items = queue.take(draws, most, geometric=mutator.geometric, needs_right=mutator.needs_right)
        if not items:  # the round is gone all the same, so that there is an end
            self.tried += 1
            return
        parents, seeds = (
            torch.stack([each.point for each in items]),
            torch.tensor([each.seed for each in items]),
        )
        chance = derive(self.rng, "attacks/fuzzing/mutate", round=step)
        y = self.y[seeds.to(self.y.device)]
        mutants, made = mutator.mutate(self.model, parents, y, chance, self.bounds, self.layout)
        self.tried += len(items)
        references = mutants if mutator.geometric else torch.stack([each.reference for each in items])
        kept = (mutants != parents).flatten(1).any(1) & self.validity(mutants, references, self._pixels())
        rows = kept.nonzero()[:, 0].tolist()
        if rows:
            items = [replace(items[k], trail=(*items[k].trail, made)) for k in rows]
            self._judge(queue, items, mutants[rows], references[rows], moved=mutator.geometric)

    def _judge(
        self, queue: Queue, items: list[Item], mutants: Tensor, references: Tensor, *, moved: bool
    ) -> None:
        """Ask the model about mutants of these items, whose trails go as far as them."""
        with tapped(self.model.module, self.layers) as seen:
            labels = predicted(self.model(mutants)).tolist()
        seeds = [each.seed for each in items]
        clean = {layer: values[seeds] for layer, values in self.clean.items()}
        enters, scores = self.guide.judge(seen, clean, [each.score for each in items])
        self.valid += len(items)
        for k, (item, true) in enumerate(zip(items, self.y[seeds].tolist(), strict=True)):
            if labels[k] != true:
                self.found.append((Defect(true, labels[k], item.seed, item.trail), mutants[k]))
            if enters[k]:
                self.entered += 1
                queue.items.append(
                    Item(
                        mutants[k], references[k], item.seed, item.trail, moved=item.moved or moved,
                        right=labels[k] == true, score=float(scores[k]),
                    )
                )  # fmt: skip

    def _pixels(self) -> Layout | None:
        return self.layout if self.x.dim() == 4 else None

    def result(self, stopped: str, seconds: float) -> FuzzResult:
        """What was found."""
        found = sorted(self.found, key=lambda each: (each[0].true, each[0].predicted, each[0].seed))
        return FuzzResult(
            defects=tuple(defect for defect, _ in found),
            inputs=torch.stack([point for _, point in found]) if found else self.x[:0].clone(),
            seeds=len(self.x),
            clean_wrong=int((~self.right).sum()),
            tried=self.tried,
            mutants=self.valid,
            entered=self.entered,
            measure=self.guide.name,
            before=self.guide.before,
            after=self.guide.value,
            stopped=stopped,
            rng=self.rng,
            seconds=seconds,
        )
