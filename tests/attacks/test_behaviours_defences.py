"""Behaviours of defences that have names of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.defences import (
    NAD,
    PAD,
    PGDAT,
    TRADES,
    AdversarialTraining,
    Smoothed,
    TrainingDefence,
    draws_needed,
    max_radius,
)
from mycelia.attacks.defences.training import Batch
from mycelia.attacks.evasion.pgd import PGD
from mycelia.engine.errors import ConfigError
from mycelia.engine.optimizers import sgd
from mycelia.engine.program import Program
from mycelia.engine.step import Step
from mycelia.engine.training import Trainer, Work
from tests.attacks.training_worlds import examples, normalised
from tests.attacks.worlds import affine

torch.set_num_threads(1)


@dataclass(frozen=True)
class Watched(TrainingDefence):
    """What another defence crafts, written down."""

    inner: TrainingDefence
    seen: list[tuple[Batch, Tensor, Tensor, bool]] = field(default_factory=list, compare=False, repr=False)

    def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
        given = batch.inputs.clone()
        outputs = batch.model(given)
        inputs, targets = self.inner.craft(batch)
        same = torch.equal(batch.model(given), outputs) and torch.equal(batch.inputs, given)
        self.seen.append((batch, inputs, targets, same))
        return inputs, targets

    def step_of(self, trainer: Work, program: Program, *, in_place: bool) -> Step:
        return self.inner.step_of(trainer, program, in_place=in_place)

    def shape(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.shape(inputs, targets)


@pytest.mark.parametrize(
    "defence",
    [NAD, PAD, PGDAT(eps=0.1, steps=2), AdversarialTraining([(PGD(steps=2), 0.1)], replace_ratio=0.3)],
    ids=["nad", "pad", "pgdat", "share"],
)
def test_adversarial_training_is_clean(defence: TrainingDefence) -> None:
    """Each batch is trained once, no row is lost, the attack leaves model and arrays as they are."""
    data = examples(23)
    kept = data.inputs.copy(), data.targets.copy()
    for array in (data.inputs, data.targets):
        array.setflags(write=False)
    watched = Watched(defence)
    program = normalised()
    fitted = Trainer(program, sgd(0.1), epochs=2, batch_size=5, plan="eager", updates=watched).fit(data)
    assert np.array_equal(data.inputs, kept[0])
    assert np.array_equal(data.targets, kept[1])
    assert all(same for *_, same in watched.seen)  # evaluation mode: the same outputs before and after
    rows = [batch.rows for batch, *_ in watched.seen]
    assert [len(each) for each in rows] == [5, 5, 5, 5, 3] * 2
    for epoch in (rows[:5], rows[5:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(23))
    for batch, inputs, targets, _ in watched.seen:
        assert inputs.shape == batch.inputs.shape
        assert torch.equal(targets, batch.targets)
        assert torch.equal(batch.targets, torch.from_numpy(kept[1][batch.rows]))
        assert torch.equal(batch.inputs, torch.from_numpy(kept[0][batch.rows]))
        assert bool(((inputs >= 0) & (inputs <= 1)).all())
        assert not torch.equal(inputs, batch.inputs)
    # Running statistics are those of the training passes: x ↦ 0.9 x + 0.1 mean over what was trained on.
    mean = torch.zeros(4)
    for _, inputs, *_ in watched.seen:
        mean = 0.9 * mean + 0.1 * inputs.mean(0)
    torch.testing.assert_close(fitted.buffers["0.running_mean"], mean)
    assert int(fitted.buffers["0.num_batches_tracked"]) == len(watched.seen) == fitted.steps


def test_adversarial_training_is_clean_with_pairs() -> None:
    """TRADES passes clean and changed rows through the model once, together."""
    data, watched = examples(11), Watched(TRADES(eps=0.1, steps=2))
    fitted = Trainer(normalised(), sgd(0.1), epochs=1, batch_size=4, plan="eager", updates=watched).fit(data)
    assert [len(inputs) for _, inputs, *_ in watched.seen] == [8, 8, 6]
    mean = torch.zeros(4)
    for batch, inputs, targets, same in watched.seen:
        assert same
        assert torch.equal(inputs[: len(batch.rows)], batch.inputs)
        assert torch.equal(targets, torch.cat([batch.targets] * 2))
        mean = 0.9 * mean + 0.1 * inputs.mean(0)
    torch.testing.assert_close(fitted.buffers["0.running_mean"], mean)
    assert int(fitted.buffers["0.num_batches_tracked"]) == fitted.steps == 3


def test_certificate_attainable() -> None:
    """A radius that so many draws can never certify is refused with the n that would do; that n does."""
    smoothed, x = Smoothed(affine(3, 4), 0.25), torch.zeros(1, 4, dtype=torch.float64)
    assert max_radius(100, 0.25, 0.001) < 0.5
    with pytest.raises(ConfigError) as refused:
        smoothed.certify(x, n0=5, n=100, alpha=0.001, rng=0, radius=0.5)
    named = re.search(r"n=(\d+)", str(refused.value))
    assert named is not None
    n = int(named[1])
    assert n == draws_needed(0.5, 0.25, 0.001)
    assert max_radius(n, 0.25, 0.001) >= 0.5 > max_radius(n - 1, 0.25, 0.001)
    found = smoothed.certify(x, n0=5, n=n, alpha=0.001, rng=0, radius=0.5)
    found.accuracy([0], [0.5])
    with pytest.raises(ConfigError, match="n="):
        found.accuracy([0], [0.9])
    with pytest.raises(ConfigError) as refused:  # the last look has less of alpha than all of them
        smoothed.certify(x, n0=5, n=n, alpha=0.001, rng=0, radius=0.5, adaptive=True)
    named = re.search(r"n=(\d+)", str(refused.value))
    assert named is not None
    smoothed.certify(x, n0=5, n=int(named[1]), alpha=0.001, rng=0, radius=0.5, adaptive=True)


def test_presets_are_what_they_say() -> None:
    """NAD: FGSM of 0.1; PAD: PGD of 0.3, five steps of 0.1; half of each batch."""
    said: list[tuple[str, object, float | None]] = []
    for preset in (NAD, PAD):
        assert preset.replace_ratio == 0.5
        ((attack, eps),) = preset.attacks
        assert isinstance(attack, Attack)
        steps = (getattr(attack, "steps", None), getattr(attack, "step_size", None))
        said.append((type(attack).__name__, steps, eps))
    assert said == [("FGSM", (None, None), 0.1), ("PGD", (5, 0.1), 0.3)]
