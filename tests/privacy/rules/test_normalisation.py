"""Layer, RMS, group, instance and fixed batch norm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.privacy.models import NORMALISATION
from tests.privacy.oracle import agrees, compare

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)


@pytest.mark.parametrize("name", NORMALISATION)
def test_equals_one_by_one(name: str) -> None:
    agrees(name)


@settings(max_examples=5, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    st.sampled_from(["layer", "rms", "group", "instance"]), st.integers(1, 3), st.integers(1, 2),
    st.lists(st.integers(2, 3), min_size=1, max_size=3),
)  # fmt: skip
def test_drawn_shapes(kind: str, groups: int, each: int, space: list[int]) -> None:
    channels = groups * each
    layer: nn.Module
    if kind == "layer":
        layer = nn.LayerNorm(space)
    elif kind == "rms":
        layer = nn.RMSNorm(space, eps=1e-3)
    elif kind == "group":
        layer = nn.GroupNorm(groups, channels)
    else:
        layer = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(space) - 1](
            channels, affine=True
        )
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    compare(layer.double(), torch.randn(4, channels, *space).double())
