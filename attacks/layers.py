"""What a layer of a model gives for inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mycelia.attacks.input_passes import input_pass
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.plugins import nearest

__all__ = ["layer_output"]


def layer_output(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """The flattened output of a layer, with a gradient where one is being taken.

    Args:
        model: is called as it is, in the mode that it is in.
        layer: name of a submodule, as `named_modules` has it; "": the model itself.
        x: inputs [n, …].

    Returns:
        [n, d]

    Raises:
        ConfigError: no such layer.
        DataError: the layer gives no row of numbers for each input.
    """
    modules = dict(model.named_modules())
    if layer not in modules:
        raise ConfigError(
            f"no layer {layer!r}",
            rule=f"one of {', '.join(filter(None, modules))}",
            fix=nearest(layer, modules),
            who="layer",
        )
    seen: list[Any] = []

    def keep(_: nn.Module, given: Any, output: Any) -> None:
        # What follows may work in place.
        seen.append(output.clone() if isinstance(output, Tensor) else output)

    handle = modules[layer].register_forward_hook(keep)
    try:
        input_pass(model, x)
    finally:
        handle.remove()
    found = seen[-1] if seen else None
    if not isinstance(found, Tensor) or not found.is_floating_point() or len(found) != len(x):
        what = "nothing" if found is None else type(found).__name__
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else what
        raise DataError(
            f"layer {layer!r} gives {what} for {len(x)} rows", rule="floating point [n, …]", who="layer"
        )
    return found.flatten(1)
