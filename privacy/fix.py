"""Make a model fit for per-example gradients: batch statistics go, statistics of the example come."""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from mycelia.engine.errors import ConfigError

__all__ = ["fix"]

_MOST_GROUPS = 32  # as in Wu & He (ECCV 2018)


def fix(model: nn.Module) -> nn.Module:
    """A copy with GroupNorm in the place of BatchNorm, and InstanceNorm without running averages.

    Scales and shifts are taken over. The copy has parameters of its own: **make the optimiser anew from it**,
    since one made before trains the old model.

    Args:
        model: not changed.

    Raises:
        ConfigError: a BatchNorm with one channel and no axes of space, of which a group would have one value
            and its norm would be zero whatever the input.

    >>> norm = fix(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1]
    >>> type(norm).__name__, norm.num_groups, norm.num_channels
    ('GroupNorm', 4, 8)
    """
    fixed = copy.deepcopy(model)
    replaced = _replacement(fixed, "model")
    if replaced is not None:
        return replaced
    for path, module in list(fixed.named_modules()):
        for name, child in list(module.named_children()):
            new = _replacement(child, f"{path}.{name}".lstrip("."))
            if new is not None:
                setattr(module, name, new)
    return fixed


def _replacement(module: nn.Module, where: str) -> nn.Module | None:
    if isinstance(module, _InstanceNorm):
        if not module.track_running_stats:
            return None
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
        return module
    if not isinstance(module, _BatchNorm):
        return None
    channels = module.num_features
    if channels == 1 and isinstance(module, nn.BatchNorm1d):
        raise ConfigError(
            f"{type(module).__name__} with one channel",
            rule="a group needs more than one value",
            fix="leave that norm out, or use LayerNorm over a longer axis",
            who=where,
        )
    new = nn.GroupNorm(_groups(channels), channels, module.eps, module.affine)
    if module.affine:
        new.weight, new.bias = module.weight, module.bias
    return new.train(module.training)


def _groups(channels: int) -> int:
    """The most groups of at least two channels each, up to 32; one group where there is no other way."""
    fits = [n for n in range(1, _MOST_GROUPS + 1) if channels % n == 0 and channels // n >= 2]
    return max(fits, default=1)
