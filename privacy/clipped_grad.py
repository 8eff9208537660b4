"""Clipped gradients: the sum over a batch of each example's gradient, scaled so that none is too long.

One forward pass and one backward pass that ends at the outputs of the operators give the two factors of each
example's gradient (`mycelia.engine.transforms.taps`). The rules of `mycelia.privacy.rules` turn them into
norms, and into the sum of the clipped gradients, without storing the gradient of each example (book-keeping:
Bu et al. 2023, "Differentially private optimization on large model at small cost", algorithm 1).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.program import Program
from mycelia.engine.schema import Role
from mycelia.engine.transforms.compile_taps import compile_taps
from mycelia.engine.transforms.coupling import coupling
from mycelia.engine.transforms.over_clients import batchable
from mycelia.engine.transforms.taps import TappedProgram, taps
from mycelia.engine.types import Tensors
from mycelia.privacy.clip import PerLayer
from mycelia.privacy.opacus import Hooked, hooked
from mycelia.privacy.rules import RULES, Rule, Use
from mycelia.privacy.rules.base import Room, norm2, selected, weighted_sum
from mycelia.privacy.rules.combine import Combined, combine

__all__ = ["BACKENDS", "Clip", "Clipped", "ClippedGrad", "clipped_grad", "explain"]

BACKENDS = ("auto", "taps", "vmap", "opacus")


class Clip(Protocol):
    """A clip function: norms [B] to factors [B], or by group [B, L]; see `mycelia.privacy.clip`."""

    def __call__(self, norms: Tensor) -> Tensor:
        """The factors."""
        ...


class Clipped(NamedTuple):
    """What one batch gives.

    Attributes:
        total: the sum of the clipped gradients by parameter, in the parameters' dtype and at least float32.
        norms: gradient norm of each example [B]; zero where the mask or a non-finite value excludes it.
        factors: what each gradient was multiplied with [B], or each group of parameters [B, L].
        losses: loss of each example [B]; zero where the mask excludes it.
    """

    total: Tensors
    norms: Tensor
    factors: Tensor
    losses: Tensor


@dataclass(frozen=True)
class ClippedGrad:
    """The function that `clipped_grad` returns.

    Attributes:
        program: what is differentiated.
        clip: norms to factors.
        backend: "taps", "vmap", "opacus", or "taps+vmap" where some parameters have no rule.
        reasons: why a parameter goes through `vmap`, or through Opacus, by name.
        physical: examples in memory at a time, None for all.
        workspace: bytes of per-example gradients that may be kept from the norms to the sum.
    """

    program: Program
    clip: Clip
    backend: str
    reasons: Mapping[str, str]
    physical: int | None
    workspace: int
    tapped: TappedProgram | None
    hooks: Hooked | None = None

    def __call__(
        self,
        params: Tensors,
        buffers: Tensors,
        batch: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        *,
        seed: int | Tensor = 0,
    ) -> Clipped:
        """Clip and sum.

        Args:
            params: trainable tensors by name.
            buffers: float buffers and counters by name; not changed.
            batch: inputs [B, ...] and targets [B, ...].
            mask: bool [B], true for real examples; a padded row counts nothing, whatever it holds.
            seed: see `Program.forward`.

        Raises:
            ConfigError: a mask of another shape or dtype.
        """
        inputs, targets = batch
        size = inputs.shape[0]
        if mask is not None and (mask.shape != (size,) or mask.dtype != torch.bool):
            raise ConfigError(
                f"a mask of {mask.dtype} {list(mask.shape)}", rule=f"bool [{size}]", who="clipped_grad"
            )
        step = self.physical or max(size, 1)
        parts = []
        for first in range(0, size, step):
            rows = slice(first, first + step)
            real = None if mask is None else mask[rows]
            parts.append(self._part(params, buffers, inputs[rows], targets[rows], real, seed, first))
        if not parts:
            none = next(iter(params.values())).new_zeros(0) if params else torch.zeros(0)
            return Clipped({n: torch.zeros_like(p) for n, p in params.items()}, none, none, none)
        if len(parts) == 1:
            return parts[0]
        total = dict(parts[0].total)
        for part in parts[1:]:  # in this order, so that results repeat
            total = {name: value + part.total[name] for name, value in total.items()}
        return Clipped(
            total, *(torch.cat(found) for found in zip(*(part[1:] for part in parts), strict=True))
        )

    def planned(
        self, plan: str, params: Tensors, buffers: Tensors, batch: tuple[Tensor, Tensor]
    ) -> ClippedGrad:
        """The same function; batches of this shape, or of `physical` rows of it, run as the plan says.

        Args:
            plan: `eager`, `interpreter` or `inductor`, see `engine.transforms.compile`.
            params: trainable tensors; their values do not matter.
            buffers: float buffers and counters.
            batch: inputs [B, ...] and targets [B, ...]; their values do not matter.

        Raises:
            ConfigError: an unknown plan, or gradients that do not come from taps.
        """
        if self.tapped is None or not self.tapped.taps:
            raise ConfigError(
                f"plan {plan!r} for gradients by {self.backend}", rule="only taps have a graph", who="plan"
            )
        rows = slice(0, self.physical or len(batch[0]))
        return replace(
            self, tapped=compile_taps(self.tapped, plan, (params, buffers, batch[0][rows], batch[1][rows]))
        )

    def _part(
        self, params: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor, mask: Tensor | None,
        seed: int | Tensor, first: int,
    ) -> Clipped:  # fmt: skip
        if mask is not None:  # what a padded row holds must not matter, NaN included
            inputs, targets = selected(inputs, mask), selected(targets, mask)
        uses: list[Combined] = []
        formed: Tensors = {}
        losses: Tensor | None = None
        if self.tapped is not None and self.tapped.taps:
            found = self.tapped(params, buffers, inputs, targets, seed=seed, first=first)
            losses = found.losses
            uses = combine(_uses(self.tapped, params, found.values, found.grads, self.workspace))
            del found  # so that each use can let go of its tensors as soon as it is done with them
        with torch.no_grad():
            if self.reasons:
                batch = params, buffers, inputs, targets, seed, first
                names = tuple(self.reasons)
                formed, slow = self.hooks(*batch) if self.hooks else _per_example(self.program, names, *batch)
                formed = {name: _wide(grad) for name, grad in formed.items()}
                losses = slow if losses is None else losses
            if losses is None:  # nothing is trained
                losses = self.program.forward(params, buffers, inputs, targets, seed=seed, first=first).losses
            squares = {use.parameter: use.norm2() for use in uses}
            squares |= {name: norm2(g) for name, g in formed.items()}
            zero = torch.zeros_like(losses)
            own = self._columns()
            groups = self._grouped(squares, zero, own)
            good = torch.isfinite(losses) & torch.isfinite(groups).all(1)
            if mask is not None:
                good = good & mask
            # inner products may come out a hair below zero
            groups = selected(groups, good).clamp(min=0)
            norms = groups.sum(1).sqrt()
            layered = isinstance(self.clip, PerLayer)
            factors = selected(self.clip(groups.sqrt() if layered else norms), good)
            if not bool((good if mask is None else good | ~mask).all()):
                # a factor of zero does not silence a row that is not finite: 0 * inf is NaN
                for use in uses:
                    use.select(good)
                formed = {name: selected(g, good) for name, g in formed.items()}
            total = {use.parameter: use.total(_column(factors, own[use.parameter])) for use in uses}
            total |= {name: weighted_sum(g, _column(factors, own[name])) for name, g in formed.items()}
            whole = {n: total[n] if n in total else torch.zeros_like(p) for n, p in params.items()}
            return Clipped(whole, norms, factors, torch.where(good, losses, zero))

    def _columns(self) -> dict[str, int]:
        """The clip group of each parameter."""
        names = [entry.name for entry in self.program.schema.of(Role.PARAMETER)]
        columns = self.clip.columns(names) if isinstance(self.clip, PerLayer) else (0,) * len(names)
        return dict(zip(names, columns, strict=True))

    def _grouped(self, squares: Mapping[str, Tensor], zero: Tensor, own: Mapping[str, int]) -> Tensor:
        """Squared norms by clip group [B, L]."""
        count = len(self.clip.groups) if isinstance(self.clip, PerLayer) else 1
        sums = [[square for name, square in squares.items() if own[name] == group] for group in range(count)]
        return torch.stack([torch.stack(part).sum(0) if part else zero for part in sums], 1)


def clipped_grad(
    program: Program,
    clip: Clip,
    *,
    backend: str = "auto",
    strict: bool = False,
    physical: int | None = None,
    workspace_mb: float = 64,
) -> ClippedGrad:
    """The function `(params, buffers, batch, mask=None, *, seed=0) -> Clipped`.

    Args:
        program: its training pass must treat the examples one by one.
        clip: norms [B] to factors [B]; `PerLayer` clips groups of parameters for themselves.
        backend: "taps" and "auto": operators with rules through taps, the parameters of others through
            `vmap(grad)`; "vmap": all parameters so; "opacus": all by the hooks of Opacus. Without a graph,
            "auto" takes `vmap(grad)`; where it fails the hooks, if Opacus is installed and what it finds is
            right; else one example at a time.
        strict: raise where a parameter would go through `vmap` or Opacus without being asked for.
        physical: examples in memory at a time; the result is that of the whole batch.
        workspace_mb: megabytes of per-example gradients that may be kept from the norms to the sum.

    Raises:
        ConfigError: an unknown backend, sizes below 1, clip groups that do not cover the parameters, or
            "opacus" without the package.
        CaptureError: an example's loss depends on another example; with `strict`, an operator without a rule;
            with "opacus", a Program with a graph, or a module that it does not give the right gradients.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r}", rule=f"one of {', '.join(BACKENDS)}", who="clipped_grad")
    if physical is not None and physical < 1:
        raise ConfigError(f"physical = {physical}", rule="at least 1", who="clipped_grad")
    names = [entry.name for entry in program.schema.of(Role.PARAMETER)]
    tapped, hooks, reasons = None, None, dict.fromkeys(names, "asked for")
    if backend not in ("vmap", "opacus"):
        if program.graphs is None:
            reasons = dict.fromkeys(names, "the Program has no graph")
        else:
            tapped = taps(program, {op: rule.reads for op, rule in RULES.items()})
            reasons = dict(tapped.unmatched)
    if tapped is None and (reason := coupling(program, draws=False)) is not None:
        raise CaptureError(
            reason,
            rule="the loss of an example depends on no other example",
            fix="use GroupNorm or LayerNorm in place of BatchNorm",
            who="clipped_grad",
        )
    if strict and reasons and backend not in ("vmap", "opacus"):
        name, reason = next(iter(reasons.items()))
        raise CaptureError(
            f"{name} has no rule: {reason}",
            rule="strict=True takes no slower way",
            fix="leave strict out, or freeze the parameter",
            who="clipped_grad",
        )
    if backend == "opacus":
        hooks = hooked(program)
    elif backend == "auto" and program.graphs is None and names and not _batches(program):
        reason = "the Program has no graph, and vmap cannot batch it"
        try:
            hooks = hooked(program)
        except (ConfigError, CaptureError) as error:
            reason = f"{reason}: one example at a time ({error.found})"
        reasons = dict.fromkeys(names, reason)
    if isinstance(clip, PerLayer):
        clip.columns(names)
    some = tapped is not None and bool(tapped.taps)
    used = "opacus" if hooks else "taps+vmap" if some and reasons else "vmap" if reasons else "taps"
    return ClippedGrad(program, clip, used, reasons, physical, int(workspace_mb * 2**20), tapped, hooks)


def explain(clipped: ClippedGrad) -> str:
    """How each parameter's norms are found, as a table; sizes are those of the captured example."""
    lines = [f"backend {clipped.backend}"]
    program = clipped.program
    if clipped.tapped is not None and clipped.tapped.taps and program.example is not None:
        params, buffers = program.init()
        found = clipped.tapped(params, buffers, *program.example)
        uses = combine(_uses(clipped.tapped, params, found.values, found.grads, clipped.workspace))
        lines += [f"{use.parameter}: {use.describe()}" for use in uses]
        lines += [f"{name}: not used by the loss" for name in clipped.tapped.unused]
    way = "opacus" if clipped.hooks else "vmap"
    return "\n".join(lines + [f"{name}: {way}, {reason}" for name, reason in clipped.reasons.items()])


def _uses(
    tapped: TappedProgram,
    params: Tensors,
    values: Sequence[tuple[Tensor, ...]],
    grads: Sequence[Tensor],
    workspace: int,
) -> list[tuple[Use, Rule, Tensor]]:
    """The uses in order, with their rules and parameters."""
    room = Room(workspace)
    found = []
    for tap, parts, grad in zip(tapped.taps, values, grads, strict=True):
        rules = RULES[tap.target].rules
        for site in (site.bound(params) for site in tap.sites):
            parameter = params[site.parameter].detach()
            shape = tuple(site.view(parameter).shape)
            wide = tuple(_wide(part) for part in parts)
            use = Use(tap, site, wide, _wide(grad), shape, room)
            found.append((use, rules[site.argument], parameter))
    return found


def _column(factors: Tensor, group: int) -> Tensor:
    return factors if factors.dim() == 1 else factors[:, group]


def _wide(tensor: Tensor) -> Tensor:
    """Norms and sums are taken in float32 at least."""
    half = tensor.is_floating_point() and tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if half else tensor


def _per_example(
    program: Program, names: tuple[str, ...], params: Tensors, buffers: Tensors, inputs: Tensor,
    targets: Tensor, seed: int | Tensor, first: int,
) -> tuple[Tensors, Tensor]:  # fmt: skip
    """Gradients [B, ...] of the named parameters and losses [B], by vmap or, where it cannot, one by one."""
    chosen = {name: params[name].detach() for name in names}
    rest = {name: tensor.detach() for name, tensor in params.items() if name not in chosen}
    batch = buffers, inputs, targets, seed, first
    found = _batched(program, chosen, rest, *batch)
    return _one_by_one(program, chosen, rest, *batch) if found is None else found


def _batches(program: Program) -> bool:
    """Whether vmap can batch the module of a Program without a graph, tried on a copy of it."""
    if program.example is None:
        return False
    params, buffers = program.init()
    own = replace(program, training=copy.deepcopy(program.training))
    with torch.no_grad():
        return _batched(own, params, {}, buffers, *program.example, 0, 0) is not None


def _batched(
    program: Program, chosen: Tensors, rest: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor,
    seed: int | Tensor, first: int,
) -> tuple[Tensors, Tensor] | None:  # fmt: skip
    """By vmap, or None where an operator has no batching rule."""
    wide = batchable(program)

    def one(own: Tensors, x: Tensor, y: Tensor, number: Any) -> tuple[Tensor, Tensor]:
        loss = wide.forward(rest | own, buffers, x[None], y[None], seed=seed, first=number).losses[0]
        return loss, loss

    numbers = torch.arange(first, first + len(inputs))
    # a module's randomness cannot be batched at all, so it needs no numbers either
    axis, given = (None, first) if program.graphs is None else (0, numbers)
    gradient: Callable[..., Any] = torch.func.grad(one, has_aux=True)
    try:
        with warnings.catch_warnings():  # `explain` says that this way is slow, and for which parameters
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            grads, losses = torch.func.vmap(gradient, (None, 0, 0, axis))(chosen, inputs, targets, given)
        return grads, losses
    except (RuntimeError, NotImplementedError, KeyError, AttributeError, TypeError, ValueError):
        return None


def _one_by_one(
    program: Program, chosen: Tensors, rest: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor,
    seed: int | Tensor, first: int,
) -> tuple[Tensors, Tensor]:  # fmt: skip
    """By autograd, an example at a time."""
    found: list[tuple[Tensors, Tensor]] = []
    for number, (x, y) in enumerate(zip(inputs, targets, strict=True), first):
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in chosen.items()}
        with torch.enable_grad():
            passed = program.forward(rest | leaves, buffers, x[None], y[None], seed=seed, first=number)
            loss = passed.losses[0]
        loss.backward()  # re-entrant checkpoints take nothing else
        grads = {n: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for n, leaf in leaves.items()}
        found.append((grads, loss.detach()))
    stacked = {name: torch.stack([grads[name] for grads, _ in found]) for name in chosen}
    return stacked, torch.stack([loss for _, loss in found])
