"""How strongly the neurons of a model react to an attack."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mycelia.engine.errors import DataError

__all__ = ["neuron_sensitivity"]


def neuron_sensitivity(clean: Mapping[str, Tensor], attacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean change of each neuron between clean rows and the same rows attacked, layer by layer.

    Zhang, Liu, Liu, Xu, Yu, Ma, Li: "Interpreting and improving adversarial robustness of deep neural
    networks with neuron sensitivity", IEEE TIP 2021, equation 3: Σ_i ‖F(x_i) − F(x'_i)‖₁ / (n · dim F).

    Args:
        clean: activations of each layer, [n, neurons, …]; a channel of a convolution is one neuron, of which
            the axes from the third on are the positions. n at least 1.
        attacked: the same of the attacked rows, in the same order.

    Returns:
        for each layer float64 [neurons]; a layer's own sensitivity is the mean of that.

    Raises:
        DataError: other layers or shapes, or no rows.
    """
    if set(clean) != set(attacked):
        raise DataError(
            f"layers {', '.join(sorted(clean))} and {', '.join(sorted(attacked))}",
            rule="the same layers",
            who="neuron_sensitivity",
        )
    found = {}
    for layer, before in clean.items():
        after = attacked[layer]
        if before.shape != after.shape or before.dim() < 2 or not len(before):
            raise DataError(
                f"{list(before.shape)} and {list(after.shape)}",
                rule="two of one shape, [n, neurons, …], n at least 1",
                who=layer,
            )
        change = (after.double() - before.double()).abs()
        found[layer] = change.flatten(2).mean((0, 2)) if before.dim() > 2 else torch.mean(change, 0)
    return found
