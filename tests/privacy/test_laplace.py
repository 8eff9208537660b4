"""Laplace noise; the law of its integers is tested with that of the discrete Gaussian."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from mycelia.engine.errors import ConfigError
from mycelia.privacy.noise import Laplace, NoiseSource

SOURCE = NoiseSource.seeded(13)


def test_law_on_a_fine_grid() -> None:
    drawn = Laplace().sample(200_000, 2.0, SOURCE, "noise", 0, bound=1.0)
    assert stats.kstest(drawn.numpy() / 2.0, "laplace").pvalue > 1e-3


def test_privacy_is_that_of_the_continuous_law() -> None:
    """The coarsest grid allowed: ε is exact, and δ of a smaller ε is the closed form to 1e-6."""
    scale, move = 1000, 1500
    support = np.arange(-40 * scale, 40 * scale + 1)
    log = -np.abs(support) / scale
    moved = -np.abs(support - move) / scale
    assert (moved - log).max() == pytest.approx(Laplace.epsilon(scale, move))
    for epsilon in (0.0, 0.3, 1.0):
        terms = np.maximum(np.exp(moved) - math.exp(epsilon) * np.exp(log), 0)
        found = math.fsum(terms) / math.fsum(np.exp(log))
        assert found == pytest.approx(1 - math.exp((epsilon - move / scale) / 2), rel=2e-6)


def test_add_lies_on_the_grid() -> None:
    laplace = Laplace(step=2.0**-12)
    total = torch.tensor([0.3, -7.7])
    noised = laplace.add(total, 1.0, SOURCE, "noise", 0)
    noise = laplace.sample(2, 1.0, SOURCE, "noise", 0)
    assert torch.equal(noised, (torch.round(total.double() * 4096) / 4096 + noise).float())
    assert laplace.slack(1.0, 2) == 2 * 2.0**-12
    assert torch.equal(laplace.add(total, 0.0, SOURCE, "noise", 0), torch.round(total * 4096) / 4096)


def test_epsilon() -> None:
    assert Laplace.epsilon(4.0, 1.0) == 0.25
    assert Laplace.epsilon(0.0, 1.0) == math.inf
    assert Laplace.epsilon(1.0, 0.0) == 0
    for scale, sensitivity in ((-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf)):
        with pytest.raises(ConfigError, match="finite"):
            Laplace.epsilon(scale, sensitivity)


@pytest.mark.parametrize("scale", [-1.0, math.inf, math.nan, 1e-7, 1e6])
def test_scale_out_of_range(scale: float) -> None:
    with pytest.raises(ConfigError, match="scale is"):
        Laplace().sample(3, scale, SOURCE, "noise", 0)


def test_step_out_of_range() -> None:
    with pytest.raises(ConfigError, match="grid step"):
        Laplace(step=0.0)
