"""Behaviours of fuzzing that are easy to get wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mycelia.attacks.fuzzing import Fuzzer, KMultisection, Validity, activations
from mycelia.attacks.transforms import UniformNoise
from tests.attacks.worlds import images, small


class Frail(nn.Module):
    """Class 0 for exactly the images that it was made with, and class 1 for everything else."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.register_buffer("known", known.flatten(1))
        self.neurons = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        flat = self.neurons(x.flatten(1))
        near = (flat[:, None] - self.get_buffer("known")).abs().sum(2).amin(1)
        return torch.stack([torch.zeros_like(near), torch.where(near > 0, 1.0, -1.0).to(near)], 1)


def test_fuzzer_all_fooled() -> None:
    """When every mutant fools the model the share of successes is 1.0: a number, and not None."""
    x = images(5)
    coverage = KMultisection(10)
    coverage.fit({"neurons": torch.stack([torch.zeros(36), torch.ones(36)])})
    result = Fuzzer(Frail(x), [UniformNoise(0.05)], coverage).run(
        x, torch.zeros(5, dtype=torch.int64), 0, 40, layout="nchw", layers=["neurons"]
    )
    assert result.clean_wrong == 0
    assert result.mutants == 40
    assert result.success_share == 1.0
    assert result.to_json()["success_share"] == 1.0
    assert result.per_class == {0: {1: 40}}


def test_kmnc_gain() -> None:
    """The gain in multisection coverage is that of seeds and mutants together over that of the seeds."""
    model, x = small(), images(6)
    y = model(x).argmax(1)
    coverage = KMultisection(50)
    coverage.fit(activations(model, images(80, seed=5)))
    # Noise of one size that is keyed by the image: the first round mutates the six seeds, by definition.
    noise = UniformNoise(0.1)
    result = Fuzzer(model, [noise], coverage).run(
        x, y, 0, 6, layout="nchw", batch=6, validity=Validity(share=1.0)
    )
    seeds = coverage.copy()
    seeds.update(activations(model, x))
    assert result.before == seeds.value
    assert result.after > result.before > 0
    assert result.gain == result.after - result.before
    assert 0 < result.entered <= 6
    assert round(result.gain * seeds.units) >= result.entered  # a mutant enters for at least one section
    more = Fuzzer(model, [noise], coverage).run(x, y, 0, 60, layout="nchw", batch=6)
    assert more.after > result.after
