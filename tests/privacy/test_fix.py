"""`fix`: what BatchNorm becomes, and that the result has gradients of its examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import ConfigError
from mycelia.privacy.clipped_grad import clipped_grad
from mycelia.privacy.fix import fix
from tests.privacy.models import loss

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def count_values(norm: nn.GroupNorm) -> int:
    return norm.num_channels // norm.num_groups


@pytest.mark.parametrize("channels", [2, 3, 7, 8, 48, 64, 96, 128, 101])
def test_fix_groupnorm(channels: int) -> None:
    """More than one value a group, whatever the number of channels."""
    model = nn.Sequential(nn.Linear(4, channels), nn.BatchNorm1d(channels))
    new = fix(model)[1]  # type: ignore[index]
    assert isinstance(new, nn.GroupNorm)
    assert count_values(new) >= 2
    assert new.num_groups <= 32
    assert "make the optimiser anew" in (fix.__doc__ or "")


def test_the_result_is_private_and_the_original_untouched() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 3, 3), nn.BatchNorm2d(3)),
        nn.InstanceNorm2d(3, track_running_stats=True), nn.Flatten(),
    )  # fmt: skip
    batch = torch.randn(4, 2, 8, 8), torch.zeros(4)
    fixed = fix(model)
    assert isinstance(model[1], nn.BatchNorm2d)
    assert model[4].track_running_stats
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fixed.modules())
    program = capture(fixed, loss, batch)
    found = clipped_grad(program, torch.ones_like)(*program.init(), batch)
    assert bool((found.norms > 0).all())


def test_scale_shift_mode_and_dtype_are_taken_over() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4)).double().eval()
    nn.init.normal_(model[0].weight)
    new = fix(model)[0]  # type: ignore[index]
    assert isinstance(new, nn.GroupNorm)
    assert isinstance(new.weight, Tensor)
    assert torch.equal(new.weight, model[0].weight)
    assert new.weight.dtype == torch.float64
    assert not new.training
    assert isinstance(fix(nn.BatchNorm2d(4)), nn.GroupNorm)


def test_a_model_without_it_is_copied() -> None:
    model = nn.Linear(3, 2)
    fixed = fix(model)
    assert fixed is not model
    assert torch.equal(fixed.weight, model.weight)  # type: ignore[arg-type]


def test_one_channel_without_space_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1: BatchNorm1d|BatchNorm1d with one channel"):
        fix(nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))
    fix(nn.Sequential(nn.Conv2d(3, 1, 2), nn.BatchNorm2d(1)))
