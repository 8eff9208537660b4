"""LGV: several weights of one surrogate, from around its optimum, for examples that transfer.

Gubri, Cordy, Papadakis, Le Traon, Sen: "LGV: boosting adversarial example transferability from large
geometric vicinity", ECCV 2022, algorithm 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.rng import derive, generator

__all__ = ["lgv_models"]

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Of outputs and labels of a batch: the loss, a number."""

_WHO: Final = "lgv_models"


def lgv_models(
    module: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    epochs: int = 10,
    per_epoch: int = 4,
    learning_rate: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    batch: int = 256,
    criterion: Criterion = functional.cross_entropy,
    rng: int = 0,
) -> tuple[nn.Module, ...]:
    """Copies of a trained module along a run of SGD at a high, constant learning rate that starts from it.

    They are source models for `Transfer`, and members of the ensemble that it attacks as a whole.

    Args:
        module: trained; it is not touched.
        data: inputs [n, …] and labels [n] that it is trained on further.
        epochs: passes over the data, at least 1.
        per_epoch: copies from each, evenly spread, at least 1; at most one per batch.
        learning_rate: of SGD, above 0.
        momentum: of SGD, in [0, 1).
        weight_decay: of SGD, at least 0.
        batch: rows at a time at most, at least 1; batches are of even size.
        criterion: what is made small.
        rng: seed, of the order of rows and of what is random in the module. No global generator moves.

    Returns:
        epochs · per_epoch modules in evaluation mode without parameter gradients, in order of their making.

    Raises:
        ConfigError: a setting that is out of range, or more copies per epoch than batches.
        DataError: no rows, or not as many labels as inputs; or the run has left the finite numbers.
    """
    x, y = data
    if len(x) != len(y) or not len(x):
        raise DataError(f"{len(x)} inputs, {len(y)} labels", rule="one label per input, some", who=_WHO)
    sound = learning_rate > 0 and 0 <= momentum < 1 and weight_decay >= 0
    if min(epochs, per_epoch, batch) < 1 or not sound:
        raise ConfigError(
            f"epochs {epochs}, per_epoch {per_epoch}, batch {batch}, learning_rate {learning_rate}, "
            f"momentum {momentum}, weight_decay {weight_decay}",
            rule="at least 1 each; learning_rate above 0, momentum in [0, 1), weight_decay at least 0",
            who=_WHO,
        )
    batches = -(-len(x) // batch)
    if per_epoch > batches:
        raise ConfigError(
            f"{per_epoch} copies from an epoch of {batches} batches",
            rule="at most one after each",
            fix=f"per_epoch={batches}, or a smaller batch",
            who=_WHO,
        )
    places = {-(-batches * k // per_epoch) for k in range(1, per_epoch + 1)}
    walker = copy.deepcopy(module).train()
    for parameter in walker.parameters():
        parameter.grad = None
    weights = [each for each in walker.parameters() if each.requires_grad]
    if not weights:
        raise ConfigError(
            "no parameter wants a gradient",
            rule="a module that can be trained",
            fix="module.requires_grad_()",
            who=_WHO,
        )
    optimiser = torch.optim.SGD(weights, learning_rate, momentum, weight_decay=weight_decay)
    devices = {each.device for each in (*weights, x) if each.device.type == "cuda"}
    seed = derive(rng, "attacks/lgv/module")
    found: list[nn.Module] = []
    with torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        for epoch in range(epochs):
            order = torch.from_numpy(generator(rng, "attacks/lgv/order", round=epoch).permutation(len(x)))
            for number, rows in enumerate(order.to(x.device).tensor_split(batches), start=1):
                optimiser.zero_grad()
                criterion(walker(x[rows]), y[rows]).backward()
                optimiser.step()
                if number in places:
                    found.append(_frozen(walker, epoch))
    return tuple(found)


def _frozen(walker: nn.Module, epoch: int) -> nn.Module:
    if not all(bool(torch.isfinite(each).all()) for each in walker.parameters()):
        raise DataError(
            f"weights that are not finite in epoch {epoch + 1}",
            rule="the run stays among finite weights",
            fix="a smaller learning_rate",
            who=_WHO,
        )
    walker.zero_grad()
    return copy.deepcopy(walker).eval().requires_grad_(False)
