"""What the neurons of a module do: forward hooks, which are removed whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from mycelia.engine.errors import ConfigError, DataError

__all__ = ["Activations", "activations", "tapped"]

Activations = Mapping[str, Tensor]
"""For each layer its neurons' values, [n, neurons]."""

_LAST: Final = (nn.Linear, nn.Bilinear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)  # features are the last axis
_SEQUENCE: Final = 3  # axes


@contextlib.contextmanager
def tapped(module: nn.Module, layers: Sequence[str] | None = None) -> Iterator[dict[str, Tensor]]:
    """The activations of the latest forward pass, as long as the context lasts.

    A neuron is a feature, or a channel of a convolution; its value is the mean over positions. Where an
    activation function gives [n, a, b], which axis has the neurons is taken from the last layer with weights
    before it: features of a linear layer or a normalisation over features are last, channels come first.

    Args:
        module: whose.
        layers: names as `module.named_modules` has them; None: every leaf that has parameters or is an
            activation function. Functions that are no modules cannot be seen.

    Yields:
        {layer: float [n, neurons]}, detached, filled by each pass anew. A layer that is used again within a
        pass appears again, as "name#2".

    Raises:
        ConfigError: a layer that is not there, or nothing to look at.
        DataError: a named layer gives no tensor [n, neurons, …]; raised by the pass.
    """
    everything = dict(module.named_modules())
    names = (
        list(layers) if layers is not None else [name for name, each in everything.items() if _usual(each)]
    )
    missing = [name for name in names if name not in everything]
    if missing or not names:
        raise ConfigError(
            f"no layer {', '.join(missing)}" if missing else "no layer to look at",
            rule=f"layers are: {', '.join(name for name in everything if name) or 'none'}",
            who=f"layers of {type(module).__name__}",
        )
    seen: dict[str, Tensor] = {}
    last = [False]  # whether features are the last axis after the latest layer with weights

    def start(*_: Any) -> None:
        seen.clear()
        last[0] = False

    def keep(name: str, layer: nn.Module, output: Any) -> None:
        if not isinstance(output, Tensor) or output.dim() < 2 or not output.is_floating_point():
            if layers is None:
                return
            what = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise DataError(
                f"the output is {what}", rule="floating point [n, neurons, …]", who=f"layer {name}"
            )
        if next(layer.parameters(recurse=False), None) is not None:
            last[0] = isinstance(layer, _LAST)
        found = output.detach()
        if found.dim() >= _SEQUENCE:
            turned = last[0] and (found.dim() == _SEQUENCE or isinstance(layer, _LAST))
            found = (found.movedim(-1, 1) if turned else found).flatten(2).mean(2)
        key, again = name or type(layer).__name__, 2
        while key in seen:
            key, again = f"{name or type(layer).__name__}#{again}", again + 1
        seen[key] = found

    hooks = []
    try:
        hooks.append(module.register_forward_pre_hook(start))
        for name in names:
            layer = everything[name]
            hooks.append(
                layer.register_forward_hook(lambda each, _, output, name=name: keep(name, each, output))
            )
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def activations(
    module: nn.Module, x: Tensor, layers: Sequence[str] | None = None, batch: int = 256
) -> dict[str, Tensor]:
    """The activations at some inputs, in evaluation mode; the module is left as it was.

    Args:
        module: whose.
        x: inputs [n, …], n at least 1.
        layers: see `tapped`.
        batch: rows at a time.

    Returns:
        {layer: [n, neurons]}.
    """
    if not len(x) or batch < 1:
        raise ConfigError(f"{len(x)} rows, batch {batch}", rule="at least 1 each", who="activations")
    modes = [(each, each.training) for each in module.modules()]
    parts = []
    try:
        module.eval()
        with torch.no_grad(), tapped(module, layers) as seen:
            for some in x.split(batch):
                module(some)
                parts.append(dict(seen))
    finally:
        for each, training in modes:
            each.training = training
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _usual(module: nn.Module) -> bool:
    if next(module.children(), None) is not None:
        return False
    weighty = next(module.parameters(recurse=False), None) is not None
    return weighty or type(module).__module__ == "torch.nn.modules.activation"
