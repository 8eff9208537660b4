"""Private training in an ordinary PyTorch loop: three changed lines, and no wrapper around anything.

    train = attach(model, loss_fn, optimizer, sampler=Poisson(0.01), clip=Abadi(1.0), noise=1.1, ...)
    for batch in train.batches((inputs, targets)):
        train.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

`DPSGD`, `DPAdam`, `DPAdamBC` and `DPAdamW` make the optimiser too: it is `train.optimizer`. Schedules of the
noise and of the clip bound are in `schedules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor, nn

from mycelia.engine.errors import ConfigError
from mycelia.engine.tracing import Loss
from mycelia.engine.types import Tensors
from mycelia.privacy import schedules
from mycelia.privacy.accounting import UNSTATED
from mycelia.privacy.adam_bc import AdamBC
from mycelia.privacy.budget import Budget
from mycelia.privacy.clip import ClipFunction, QuantileClip
from mycelia.privacy.factorisation import Strategy, planned
from mycelia.privacy.groups import Group, Unit
from mycelia.privacy.ledger import Ledger
from mycelia.privacy.noise.base import Mechanism
from mycelia.privacy.noise.discrete_gaussian import DiscreteGaussian
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.parallel import ranks_of
from mycelia.privacy.releases import AnyClip, Releases, ReleaseSettings
from mycelia.privacy.sampling import Sampler
from mycelia.privacy.schedules import NoiseSchedule
from mycelia.privacy.settings import Settings
from mycelia.privacy.training import PrivateBatch, PrivateLoss, PrivateTraining

__all__ = [
    "DPSGD",
    "DPAdam",
    "DPAdamBC",
    "DPAdamW",
    "Options",
    "PrivateBatch",
    "PrivateLoss",
    "PrivateTraining",
    "attach",
    "schedules",
]


class Options(TypedDict, total=False):
    """The arguments of `attach` that `DPSGD` and its like pass on."""

    sampler: Required[Sampler]
    clip: Required[AnyClip]
    noise: Required[float | NoiseSchedule]
    expected_batch: float | None
    clip_schedule: NoiseSchedule | None
    budget: Budget | None
    ledger: Ledger | None
    source: NoiseSource | None
    mechanism: Mechanism | None
    factorisation: Strategy | None
    steps: int | None
    regulariser: Callable[[Tensors], Tensor] | None
    backend: str
    strict: bool
    group: Any
    unit: Unit


def attach(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    *,
    sampler: Sampler,
    clip: AnyClip,
    noise: float | NoiseSchedule,
    expected_batch: float | None = None,
    clip_schedule: NoiseSchedule | None = None,
    budget: Budget | None = None,
    ledger: Ledger | None = None,
    source: NoiseSource | None = None,
    mechanism: Mechanism | None = None,
    factorisation: Strategy | None = None,
    steps: int | None = None,
    regulariser: Callable[[Tensors], Tensor] | None = None,
    backend: str = "auto",
    strict: bool = False,
    group: Any = None,
    unit: Unit = "example",
) -> PrivateTraining:
    """Make an ordinary optimiser private; neither it nor the model is wrapped.

    Under `torch.distributed` the processes of a group train as one: each takes its share of every batch, the
    clipped sums are added, and one noise is added to the whole. All call it, with the same arguments.

    Args:
        model: any module that takes one tensor [B, ...]; its parameters are those of the optimiser.
        loss_fn: `(outputs, targets) -> Tensor[B]`, one loss per example (`reduction="none"`).
        optimizer: any `torch.optim` optimiser; schedulers, state and hooks of its own go on working.
        sampler: draws the batches and accounts for them.
        clip: the clip function.
        noise: z, the noise multiplier relative to the clip bound, or a schedule of it. With a factorisation
            it is that of the independent noise before it is correlated.
        expected_batch: the public number of examples the sum is divided by, usually the sampler's rate times
            a public figure for the number of examples. Samplers with a public population know it.
        clip_schedule: of the clip bound; it starts at the bound of `clip`, and noise follows it.
        budget: asked before every update; None: nothing stops the training.
        ledger: where updates are recorded when there is no budget; a budget has its own.
        source: of draws and noise, and of one training alone; the operating system's by default.
        mechanism: the noise; by default `DiscreteGaussian` with a source of the operating system, `Gaussian`
            with a seeded one. With a factorisation the discrete one has `sampler="rounded"`, see
            `factorisation.CorrelatedNoise`.
        factorisation: DP-FTRL: correlates the noise of the updates. The sampler is `MinSep`, and the run one
            Gaussian release; or `CyclicPoisson` with a `Banded` strategy, and sampling amplifies.
        steps: planned updates of a factorisation, where the sampler does not end by itself.
        regulariser: a term on the parameters alone, `params -> 0-d tensor`, which needs no clipping.
        backend: see `clipped_grad`.
        strict: see `clipped_grad`.
        group: the process group of `torch.distributed`; the default one where that was started.
        unit: "example", or a `Group(k)` to clip the mean gradient of k examples: sampler, population and
            `expected_batch` then count groups, and a budget's relation is "replace-one" or "zero-out".

    Raises:
        ConfigError: settings that contradict each other, or parameters the optimiser does not have.
    """
    if budget is not None and ledger is not None:
        raise ConfigError(
            "a budget and a ledger", rule="a budget has its own ledger", fix="leave ledger out", who="attach"
        )
    _check_kinds(sampler, clip, factorisation)
    grouped = _grouped(unit, budget, backend)
    if factorisation is not None:
        sampler, plan = planned(factorisation, sampler, steps)
        steps = plan.steps
        _check_factorised(factorisation, clip, clip_schedule, noise, optimizer)
    elif steps is not None or getattr(sampler, "sensitivity", None):
        raise ConfigError(
            "planned steps, or a sampler with a sensitivity, and no factorisation",
            rule="noise of its own in every update is accounted update by update",
            fix="pass factorisation=, or leave these out; a Budget ends the training",
            who="attach",
        )
    expected_batch = _public_batch(sampler, expected_batch)
    _check_clip(clip, clip_schedule, noise, expected_batch)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ranks = ranks_of(group, device)
    source = ranks.one_source(source if source is not None else NoiseSource.os())
    if mechanism is None:
        safe = DiscreteGaussian() if factorisation is None else DiscreteGaussian(sampler="rounded")
        mechanism = safe if source.kind == "os" else Gaussian()
    asked = ReleaseSettings(
        sampler, clip, noise, expected_batch, mechanism, clip_schedule, factorisation, steps, grouped
    )
    size = sum(parameter.numel() for parameter in model.parameters())
    releases = Releases(asked, budget, _book(budget, ledger, source), source, size)
    settings = Settings(loss_fn, regulariser, backend, strict, grouped)
    return PrivateTraining(model, optimizer, settings, releases, ranks)


def DPSGD(
    model: nn.Module,
    loss_fn: Loss,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    **options: Unpack[Options],
) -> PrivateTraining:
    """`attach` with a `torch.optim.SGD` (Abadi et al., CCS 2016, algorithm 1); it is `.optimizer`.

    Args:
        model: see `attach`.
        loss_fn: see `attach`.
        lr: rate, at least 0.
        momentum: see `torch.optim.SGD`, as are the next three.
        dampening: of the momentum.
        weight_decay: reads the parameters alone, so it costs no privacy.
        nesterov: Nesterov's momentum.
        options: those of `attach`; `sampler`, `clip` and `noise` are needed.

    Raises:
        ConfigError: see `attach`.

    >>> from torch.nn.functional import mse_loss
    >>> from mycelia.privacy.clip import Abadi
    >>> from mycelia.privacy.sampling import Poisson
    >>> train = DPSGD(
    ...     nn.Linear(2, 1),
    ...     lambda outputs, targets: mse_loss(outputs[:, 0], targets, reduction="none"),
    ...     lr=0.1, sampler=Poisson(0.1), clip=Abadi(1.0), noise=2.0, expected_batch=10,
    ... )
    >>> type(train.optimizer).__name__
    'SGD'
    """
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
        nesterov=nesterov,
    )  # fmt: skip
    return attach(model, loss_fn, optimizer, **options)


def DPAdam(
    model: nn.Module,
    loss_fn: Loss,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    **options: Unpack[Options],
) -> PrivateTraining:
    """`attach` with a `torch.optim.Adam`, whose moments see noised gradients only; it is `.optimizer`.

    The noise inflates the second moment; `DPAdamBC` takes that off.

    Args:
        model: see `attach`.
        loss_fn: see `attach`.
        lr: rate, at least 0.
        betas: see `torch.optim.Adam`, as are the next two.
        eps: added to the root of the second moment.
        weight_decay: added to the noised gradient; reads the parameters alone.
        options: those of `attach`; `sampler`, `clip` and `noise` are needed.

    Raises:
        ConfigError: see `attach`.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return attach(model, loss_fn, optimizer, **options)


def DPAdamBC(
    model: nn.Module,
    loss_fn: Loss,
    *,
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    floor: float = 5e-8,
    **options: Unpack[Options],
) -> PrivateTraining:
    """`attach` with an `AdamBC`, which takes the noise out of Adam's second moment; it is `.optimizer`.

    Args:
        model: see `attach`.
        loss_fn: see `attach`.
        lr: rate, at least 0.
        betas: decay of the two moments, each in [0, 1).
        floor: smallest second moment, above 0.
        options: those of `attach`; `sampler`, `clip` and `noise` are needed.

    Raises:
        ConfigError: a value out of range, a factorisation, or see `attach`.
    """
    return attach(model, loss_fn, AdamBC(model.parameters(), lr, betas, floor), **options)


def DPAdamW(
    model: nn.Module,
    loss_fn: Loss,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    **options: Unpack[Options],
) -> PrivateTraining:
    """`attach` with a `torch.optim.AdamW`; it is `.optimizer`.

    Args:
        model: see `attach`.
        loss_fn: see `attach`.
        lr: rate, at least 0.
        betas: see `torch.optim.AdamW`, as are the next two.
        eps: added to the root of the second moment.
        weight_decay: after the noise and from the parameters alone, so it costs no privacy.
        options: those of `attach`; `sampler`, `clip` and `noise` are needed.

    Raises:
        ConfigError: see `attach`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return attach(model, loss_fn, optimizer, **options)


def _check_kinds(sampler: object, clip: object, factorisation: object) -> None:
    """Refuse a number, a name or a loader where a description is needed."""
    for name, given, fine, fix in (
        ("sampler", sampler, hasattr(sampler, "draw") and hasattr(sampler, "events"),
         "use Poisson(rate) or another of mycelia.privacy.sampling; from_loader reads a DataLoader"),
        ("clip", clip, isinstance(clip, AnyClip), "use Abadi(bound) or another of mycelia.privacy.clip"),
        ("factorisation", factorisation, factorisation is None or isinstance(factorisation, Strategy),
         "use Banded(bands) or another of mycelia.privacy.factorisation"),
    ):  # fmt: skip
        if not fine:
            raise ConfigError(
                f"{name} is a {type(given).__name__}",
                rule="one description both acts and is accounted",
                fix=fix,
                who="attach",
            )


def _grouped(unit: Unit, budget: Budget | None, backend: str) -> Group | None:
    """The group whose mean is clipped; None where each example is clipped by itself."""
    if not isinstance(unit, Group):
        if unit == "example":
            return None
        raise ConfigError(
            f"unit is {unit!r}",
            rule='a training loop clips each example ("example"), or the mean of a Group',
            fix="a budget says whom ε is about: Budget(..., unit=...)",
            who="attach",
        )
    if budget is not None and budget.unit != "example":
        raise ConfigError(
            f"{unit}, and a budget for the unit {budget.unit!r}",
            rule="a group holds examples",
            fix='make the budget with unit="example"',
            who="attach",
        )
    if backend == "opacus":
        raise ConfigError(
            f"{unit} with the backend 'opacus'",
            rule="its hooks know one row for each example",
            fix='use "auto"',
            who="attach",
        )
    return unit


def _public_batch(sampler: Sampler, given: float | None) -> float:
    """The public number that sums are divided by."""
    if given is None:
        size = getattr(sampler, "population", None)
        if size is None:
            raise ConfigError(
                f"no expected_batch for {sampler.name}",
                rule="the sum is divided by a public number, never by what was drawn",
                fix="pass the rate times a public figure for the number of examples",
                who="attach",
            )
        given = sampler.rate * size
    if not 0 < given < math.inf:
        raise ConfigError(f"expected_batch is {given}", rule="positive and finite", who="attach")
    return given


def _check_clip(
    clip: AnyClip, schedule: NoiseSchedule | None, noise: float | NoiseSchedule, expected_batch: float
) -> None:
    """Refuse a clip function that the rest does not fit."""
    if isinstance(clip, QuantileClip):
        clip.gradient_multiplier(noise(0) if callable(noise) else noise, expected_batch)
    if schedule is None:
        return
    if not isinstance(clip, ClipFunction):
        raise ConfigError(
            f"a clip schedule for {clip.name}",
            rule="a schedule is of one bound that nothing else moves",
            fix="use Abadi, AutoS, PSAC or Indicator, or leave clip_schedule out",
            who="clip_schedule",
        )
    if not math.isclose(schedule(0), clip.bound, rel_tol=1e-12):
        raise ConfigError(
            f"it starts at {schedule(0)}, and the clip bound is {clip.bound}",
            rule="a schedule starts at the clip bound",
            fix=f"say clip={type(clip).__name__}({schedule(0)})",
            who="clip_schedule",
        )


def _check_factorised(
    strategy: Strategy, clip: AnyClip, clip_schedule: NoiseSchedule | None, noise: float | NoiseSchedule,
    optimizer: torch.optim.Optimizer,
) -> None:  # fmt: skip
    """Refuse what one release of the whole run cannot have."""
    for found, fix in (
        ("a clip bound that moves" * (isinstance(clip, QuantileClip) or clip_schedule is not None),
         "use a fixed one, such as Abadi(bound)"),
        ("a noise schedule" * callable(noise), "use one noise multiplier"),
        ("AdamBC" * isinstance(optimizer, AdamBC), "use DPAdam: it knows independent noise alone"),
    ):  # fmt: skip
        if found:
            raise ConfigError(
                f"{found} with {strategy.name} noise",
                rule="factorised noise is one Gaussian of one size for the whole run",
                fix=fix,
                who="factorisation",
            )


def _book(budget: Budget | None, ledger: Ledger | None, source: NoiseSource) -> Ledger:
    """The ledger of the run; where nobody has begun one, it names the source."""
    if budget is None:
        return Ledger(source.note) if ledger is None else ledger
    book = budget.ledger
    if book.path is None and not len(book) and book.noise_source == UNSTATED:
        book.name_source(source.note)
    return book
