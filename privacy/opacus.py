"""Per-example gradients by the hooks of Opacus, for a module that runs as it is.

Hooks sit on layers. They miss a parameter that is used without calling its layer, and they take the first
axis of whatever a layer is given for the examples. So what they find is checked: on every batch against the
gradient of the summed losses, and once, when they are made, for independence of the other examples.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mycelia.engine._torch import fake_mode
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.program import ModuleCall, Program
from mycelia.engine.types import Tensors

__all__ = ["Hooked", "hooked"]


@dataclass(frozen=True)
class Hooked:
    """Gradients of each example, by hooks on a copy of the module that lives for one pass.

    Attributes:
        call: the training pass.
        frozen: tensors that are neither trained nor sent.
        wrap: `opacus.GradSampleModule`.
    """

    call: ModuleCall
    frozen: Tensors
    wrap: Callable[..., Any]

    def __call__(
        self, params: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor, seed: int | Tensor,
        first: int,
    ) -> tuple[Tensors, Tensor]:  # fmt: skip
        """Gradients [B, ...] by parameter and losses [B].

        Randomness is drawn for the whole batch: other batches, other draws.

        Raises:
            CaptureError: Opacus cannot hook the module, or finds other gradients than autograd.
        """
        seed = seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64)
        module = self._copy(params | buffers | self.frozen)
        own = dict(module.named_parameters())
        try:
            # buffers are no reason to refuse a module: clipped_grad knows that the pass does not change them
            hooks = self.wrap(module, loss_reduction="sum", strict=False)
            try:
                with torch.enable_grad(), warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
                    losses = ModuleCall(hooks, self.call.loss)(
                        {}, {}, {}, inputs, targets, seed, first
                    ).losses
                    if losses.requires_grad:
                        losses.sum().backward()
                grads = {name: _checked(name, own[name], len(inputs)) for name in params}
            finally:
                hooks.to_standard_module()
        except CaptureError:
            raise
        except Exception as error:  # of any kind: from the layers' own code, run under hooks and vmap
            raise _refusal(f"the hooks of Opacus fail: {type(error).__name__}: {error}") from error
        return grads, losses.detach()

    def _copy(self, tensors: Tensors) -> nn.Module:
        """The module with these values; only buffers, which a pass may change, are copies."""
        module = copy.deepcopy(self.call.module)
        for name, parameter in module.named_parameters():
            parameter.data = tensors[name].detach()
        for name, buffer in module.named_buffers():
            buffer.copy_(tensors[name])
        return module


def hooked(program: Program) -> Hooked:
    """The per-example gradients of a Program that runs its module.

    Raises:
        ConfigError: Opacus is not installed.
        CaptureError: the Program runs a graph; the pass reads values of the batch in Python, so that one
            example can decide what is done with another; Opacus cannot hook the module; or what it finds
            for one example changes with another.
    """
    call = program.training
    if not isinstance(call, ModuleCall):
        raise CaptureError(
            "Opacus hooks modules, and this Program runs a graph",
            rule="backend='opacus' is for a Program of the module as it is",
            fix="capture(..., backend='eager'), or leave the backend out: graphs need no hooks",
            who="opacus",
        )
    # a copy of its own: a module may keep tensors of its last pass, which cannot be copied
    found = Hooked(copy.deepcopy(call), program.frozen, _installed())
    if program.example is not None:
        params, buffers = program.init()
        _refuse_branches(copy.deepcopy(call), params | buffers | program.frozen, *program.example)
        _refuse_mixing(found, params, buffers, *program.example)
    return found


def _installed() -> Callable[..., Any]:
    handlers = list(logging.root.handlers)
    try:
        from opacus import GradSampleModule
    except ImportError as error:
        raise ConfigError(
            f"Opacus cannot be imported: {error}",
            rule="backend='opacus' needs the extra of that name",
            fix="pip install 'mycelia[opacus]'",
            who="opacus",
        ) from error
    finally:
        logging.root.handlers[:] = handlers  # its import sets up logging for the whole process
    wrap: Callable[..., Any] = GradSampleModule
    return wrap


def _checked(name: str, parameter: nn.Parameter, size: int) -> Tensor:
    """What the hooks left on a parameter, if it adds up to the gradient that autograd left."""
    rows: Any = getattr(parameter, "grad_sample", None)
    if isinstance(rows, list):  # one for each time that all uses of the parameter had been seen
        rows = torch.stack(rows).sum(0)
    if rows is None:
        rows = parameter.new_zeros((size, *parameter.shape))
    whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if rows.shape != (size, *parameter.shape):
        raise _refusal(
            f"Opacus gives {name} gradients of shape {list(rows.shape)} for {size} examples: the first axis "
            "of what its layer is given is not that of the examples"
        )
    found: Tensor = rows.detach()
    # of parts that cancel, what is left is as inexact as the parts
    scale = float(found.flatten(1).norm(dim=1).sum())
    tolerance = math.sqrt(torch.finfo(whole.dtype).eps)
    # with an example that is not finite there is nothing to compare with
    if math.isfinite(scale) and float((found.sum(0) - whole).norm()) > tolerance * scale:
        raise _refusal(
            f"the gradients that Opacus finds for {name} do not add up to that of the batch: it is used "
            "without a call of its layer, or the layer's rule leaves something out (a second input, padding)"
        )
    return found


def _refuse_branches(call: ModuleCall, tensors: Tensors, inputs: Tensor, targets: Tensor) -> None:
    """What is done with an example may not hang on values of the batch, seen in Python."""
    with torch.random.fork_rng(devices=[]), fake_mode() as mode, torch.no_grad():
        fakes = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
        try:
            outputs = torch.func.functional_call(call.module, fakes, (mode.from_tensor(inputs),))
            call.loss(outputs, mode.from_tensor(targets))
        except Exception as error:  # of any kind: the module's own code meets tensors without values
            reason = str(error).partition("\n")[0]
            raise _refusal(
                f"the pass does not run without the values of the batch: {type(error).__name__}: {reason}"
            ) from error


def _refuse_mixing(found: Hooked, params: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor) -> None:
    """Another example in the first or the last place changes neither losses nor gradients elsewhere."""
    size = len(inputs)
    grads, losses = found(params, buffers, inputs, targets, 0, 0)
    for row in {0, size - 1}:
        chosen = (torch.arange(size) == row).to(inputs.device)
        changed = _replaced(inputs, chosen), _replaced(targets, chosen)
        others, values = found(params, buffers, *changed, 0, 0)
        pairs = [("the loss", losses, values), *((name, grads[name], others[name]) for name in params)]
        for name, before, after in pairs:
            tolerance = 100 * torch.finfo(before.dtype).eps
            scale = float(before.abs().nan_to_num(0, 0, 0).max())
            if not torch.allclose(before[~chosen], after[~chosen], tolerance, tolerance * scale, True):
                raise _refusal(f"{name} of an example, as Opacus finds it, depends on the other examples")


def _replaced(part: Tensor, chosen: Tensor) -> Tensor:
    """Other values in the chosen row, and of a kind that the row could hold."""
    if part.is_floating_point():
        noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(0)).to(part)
        other = part + noise
    else:
        other = torch.zeros_like(part) if bool(part[chosen].any()) else torch.ones_like(part)
    return torch.where(chosen.reshape(-1, *[1] * (part.dim() - 1)), other, part)


def _refusal(found: str) -> CaptureError:
    return CaptureError(
        found,
        rule="hooks see each example by itself",
        fix="leave the backend out: what cannot be hooked is taken one example at a time",
        who="opacus",
    )
