"""What an optimiser is: two pure functions and an explicit state.

An optimiser here is a rule that turns a gradient into a direction, per tensor; the parameters then move by
-lr * direction. Half-precision parameters are updated in float32 and rounded back, and their state is
float32: in float16 the square of 1e-4 is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mycelia.engine.errors import DataError
from mycelia.engine.schedules import Schedule, check_number
from mycelia.engine.types import Tensors

__all__ = ["Kernel", "Optimizer", "Rule", "State", "flatten_state", "from_rule", "unflatten_state"]

State = dict[str, Tensor | Tensors]
"""`step` (0-d int64, updates made so far) and slots such as `m`, each a tensor per parameter."""

Kernel = Callable[[Tensor, Tensor, Tensors, Tensors], tuple[Tensor, Tensors]]
"""`kernel(grad, param, slots, into) -> (direction, slots)` for one tensor.

`into` is empty, or it is `slots`, whose memory the new slots then take; nothing else may be written.
"""

Rule = Callable[[Tensor], Kernel]
"""`rule(count)` prepares the kernel of update number `count` (0-d float64, 1 for the first update)."""


@dataclass(frozen=True)
class Optimizer:
    """A pair of pure functions, `init` and `update`; neither changes its arguments.

    Nothing branches on a tensor's value, so `update` can be traced, compiled, batched over clients and
    differentiated. Autograd follows tensors that require gradients; detach them if that is not wanted.

    >>> from mycelia.engine.optimizers import sgd
    >>> optimizer = sgd(lr=0.5)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> state = optimizer.init(params)
    >>> params, state = optimizer.update({"w": torch.tensor([1.0, 0.0])}, state, params)
    >>> params["w"].tolist(), int(state["step"])
    ([0.5, 2.0], 1)

    Attributes:
        name: what it is called in a configuration.
        init: `init(params) -> state`.
        update: `update(grads, state, params) -> (params, state)`; gradients have the names and shapes of the
            parameters, and results the shapes and dtypes of what they replace.
        update_: gives the bits of `update`, written over `state` and `params`, which the caller gives up;
            faster on large tensors outside a compiled graph.
    """

    name: str
    init: Callable[[Tensors], State]
    update: Callable[[Tensors, State, Tensors], tuple[Tensors, State]]
    update_: Callable[[Tensors, State, Tensors], tuple[Tensors, State]]


def from_rule(name: str, lr: float | Schedule, slots: Mapping[str, float], rule: Rule) -> Optimizer:
    """The optimiser that applies `rule` to every tensor.

    Args:
        name: what it is called.
        lr: rate, or a schedule that gives it.
        slots: the state kept per parameter, with the value it starts from.
        rule: prepares the kernel of each update.

    Raises:
        ConfigError: `lr` is negative or not finite.
    """
    if not callable(lr):
        check_number(name, "lr", lr)

    def init(params: Tensors) -> State:
        _check_floating(params, name)
        device = next(iter(params.values())).device if params else None
        state: State = {"step": torch.zeros((), dtype=torch.int64, device=device)}
        for slot, value in slots.items():
            state[slot] = {
                key: torch.full_like(param, value, dtype=_wide(param.dtype), requires_grad=False)
                for key, param in params.items()
            }
        return state

    def advance(grads: Tensors, state: State, params: Tensors, own: bool) -> tuple[Tensors, State]:
        _check_update(grads, state, params, slots, name)
        step = cast(Tensor, state["step"])
        rate = lr(step) if callable(lr) else lr
        kernel = rule((step + 1).double())
        moved: Tensors = {}
        kept: dict[str, Tensors] = {slot: {} for slot in slots}
        for key, param in params.items():
            wide = param.to(_wide(param.dtype))
            old = {slot: cast(Tensors, state[slot])[key] for slot in slots}
            direction, new = kernel(grads[key].to(wide.dtype), wide, old, old if own else {})
            out = wide if own else None
            if isinstance(rate, Tensor):
                target = torch.sub(wide, rate * direction, out=out)
            else:
                target = torch.sub(wide, direction, alpha=rate, out=out)
            # 0-d tensors take on the dtype of the float64 scalars they meet
            moved[key] = target.to(param.dtype)
            for slot, value in new.items():
                kept[slot][key] = value.to(old[slot].dtype)
        return moved, {"step": step + 1, **kept}

    def update(grads: Tensors, state: State, params: Tensors) -> tuple[Tensors, State]:
        return advance(grads, state, params, own=False)

    @torch.no_grad()
    def update_(grads: Tensors, state: State, params: Tensors) -> tuple[Tensors, State]:
        return advance(grads, state, params, own=True)

    return Optimizer(name, init, update, update_)


def flatten_state(state: State) -> Tensors:
    """The state as one flat dictionary, e.g. `step`, `m/layer.weight`; the tensors are shared, not copied."""
    flat: Tensors = {}
    for slot, value in state.items():
        if isinstance(value, Tensor):
            flat[slot] = value
        else:
            flat.update({f"{slot}/{key}": tensor for key, tensor in value.items()})
    return flat


def unflatten_state(tensors: Tensors) -> State:
    """The inverse of `flatten_state`.

    Raises:
        DataError: `step` is missing, so these tensors are no optimiser state.
    """
    if "step" not in tensors:
        raise DataError(
            "the tensors hold no 'step'", rule="an optimiser state has one", who="optimizer state"
        )
    state: State = {}
    for name, tensor in tensors.items():
        slot, slash, key = name.partition("/")
        if slash:
            cast(Tensors, state.setdefault(slot, {}))[key] = tensor
        else:
            state[slot] = tensor
    return state


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_floating(params: Tensors, who: str) -> None:
    for key, param in params.items():
        if not param.is_floating_point():
            raise DataError(
                f"parameter {key!r} is {param.dtype}", rule="parameters are floating point", who=who
            )


def _check_update(
    grads: Tensors, state: State, params: Tensors, slots: Mapping[str, float], who: str
) -> None:
    if grads.keys() != params.keys():
        odd = sorted(grads.keys() ^ params.keys())
        raise DataError(
            f"gradients and parameters differ in {', '.join(map(repr, odd[:5]))}",
            rule="every parameter has a gradient, and no other tensor has one",
            fix="give zeros for a parameter the loss does not use",
            who=who,
        )
    for key, param in params.items():
        if grads[key].shape != param.shape:
            raise DataError(
                f"gradient {key!r} has shape {list(grads[key].shape)}, the parameter {list(param.shape)}",
                rule="both have the same shape",
                who=who,
            )
    wanted = {"step", *slots}
    if state.keys() != wanted:
        raise DataError(
            f"the state holds {', '.join(sorted(state))}",
            rule=f"the state of {who} holds {', '.join(sorted(wanted))}",
            fix="use the state that init or the last update of this optimiser gave",
            who=who,
        )
    for slot in slots:
        missing = params.keys() - cast(Tensors, state[slot]).keys()
        if missing:
            raise DataError(f"the state has no {slot!r} for {sorted(missing)[0]!r}", who=who)
