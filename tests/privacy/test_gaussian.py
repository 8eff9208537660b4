"""Gaussian noise against the normal law."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from mycelia.engine.errors import ConfigError
from mycelia.privacy.noise import Gaussian, NoiseSource

SOURCE = NoiseSource.seeded(5)
SIZES = [0, 1, 2, 3, 65_535, 65_536, 65_537, 200_001]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_law(dtype: torch.dtype) -> None:
    drawn = Gaussian().sample(400_000, 2.5, SOURCE, "noise", 0, "w", dtype=dtype)
    assert drawn.dtype is dtype
    values = drawn.double().numpy() / 2.5
    assert stats.kstest(values, "norm").pvalue > 1e-3
    # the tails too: numbers beyond 3.5 are binomial
    beyond = int((np.abs(values) > 3.5).sum())
    assert stats.binomtest(beyond, len(values), 2 * stats.norm.sf(3.5)).pvalue > 1e-3


def test_neighbours_and_halves_of_a_block_are_independent() -> None:
    values = Gaussian().sample(262_144, 1.0, SOURCE, "noise", 0).double()
    for lag in (1, 2, 16_384, 32_768, 65_536):  # cosine and sine of one pair lie 32768 apart
        first, second = values[:-lag], values[lag:]
        limit = 4 / math.sqrt(len(first))
        assert abs(float((first * second).mean())) < limit
        assert abs(float(((first**2 - 1) * (second**2 - 1)).mean() / 2)) < limit


@pytest.mark.parametrize("size", SIZES)
def test_sizes_shapes_and_repeats(size: int) -> None:
    gaussian = Gaussian()
    drawn = gaussian.sample(size, 1.0, SOURCE, "noise", 3, "w")
    assert drawn.shape == (size,)
    assert drawn.isfinite().all()
    assert torch.equal(drawn, gaussian.sample((1, size, 1), 1.0, SOURCE, "noise", 3, "w").view(-1))
    if size > 1:
        assert not torch.equal(drawn, gaussian.sample(size, 1.0, SOURCE, "noise", 4, "w"))


def test_does_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    drawn = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            drawn.append(Gaussian().sample(300_001, 1.0, SOURCE, "noise", 0))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_add(dtype: torch.dtype) -> None:
    total = torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4)
    noised = Gaussian().add(total, 0.5, SOURCE, "noise", 0, "w")
    noise = Gaussian().sample((3, 4), 0.5, SOURCE, "noise", 0, "w", dtype=dtype)
    assert noised.dtype is dtype
    assert torch.equal(noised, total + noise)


@pytest.mark.parametrize("std", [-1.0, math.inf, math.nan])
def test_std_out_of_range(std: float) -> None:
    with pytest.raises(ConfigError, match="std is"):
        Gaussian().add(torch.zeros(2), std, SOURCE, "noise", 0)


def test_no_noise() -> None:
    total = torch.tensor([1.0, -2.0])
    assert torch.equal(Gaussian().add(total, 0.0, SOURCE, "noise", 0), total)


def test_low_precision_totals_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"float\(\)"):
        Gaussian().add(torch.zeros(2, dtype=torch.bfloat16), 1.0, SOURCE, "noise", 0)
