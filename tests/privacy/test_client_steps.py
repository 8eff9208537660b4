"""Private local steps: the closed forms of plain gradient descent, the noise, and what is public."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.local import ClientData, LocalResult, LocalTrainer, LocalWork
from mycelia.engine.program import Program
from mycelia.engine.types import Tensors
from mycelia.privacy.client_steps import PrivateSteps
from mycelia.privacy.clip import Abadi
from mycelia.privacy.federated import own_source
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import Poisson
from tests.engine.algorithms.harness import Array, Bowl, net, quadratic

SOURCE = NoiseSource.seeded(3)
BOWL = Bowl(np.array([1.0, 4.0]), np.array([3.0, -1.0]), examples=20)


def steps(z: float = 0.0, rate: float = 1.0, count: int = 5, bound: float = 1e6) -> PrivateSteps:
    expected = rate * 20  # the public number of examples is 20
    return PrivateSteps(Abadi(bound), z, Poisson(rate), count, expected, Gaussian(), SOURCE)


def trained(
    settings: PrivateSteps,
    data: ClientData,
    *,
    program: Program | None = None,
    round: int = 0,
    lr: float = 0.1,
) -> LocalResult:
    program = program or quadratic()
    trainer = LocalTrainer(program, LocalWork(steps=settings.steps, lr=lr), steps_of=settings)
    return trainer.run(trainer.start, {}, data, round)


def mixed(count: int, seed: int = 0) -> ClientData:
    """Examples with targets of their own."""
    draw = np.random.default_rng(seed)
    inputs = np.ones((count, 2))
    return ClientData(inputs, draw.normal(size=(count, 2)), np.arange(count), 7)


def test_without_clipping_and_noise_it_is_gradient_descent() -> None:
    """K steps on a quadratic go the closed form's share of the way to its optimum."""
    found = trained(steps(), BOWL.data(7))
    start = quadratic().init()[0]["weight"].numpy()
    expected = start + BOWL.pull(5, 0.1) * (BOWL.optimum - start)
    np.testing.assert_allclose(found.vector.numpy(), expected, rtol=1e-12)
    assert (found.steps, found.examples) == (5, 100)


def test_a_step_is_the_sum_of_the_draw_over_the_public_number() -> None:
    """Whatever was drawn, the sum of w - t over it is divided by q times the public number of examples."""
    data = mixed(40)  # twice as many as is known in public
    vector: Array = quadratic().init()[0]["weight"].numpy().copy()
    drawn = 0
    for part in islice(Poisson(0.3).draw(40, own_source(SOURCE, 7), 2 * 4), 4):
        rows = part.indices[part.mask]
        drawn += len(rows)
        vector -= 0.1 * (vector - data.targets[rows]).sum(0) / (0.3 * 20)
    found = trained(steps(rate=0.3, count=4), data, round=2)
    np.testing.assert_allclose(found.vector.numpy(), vector, rtol=1e-12)
    assert (found.steps, found.examples) == (4, drawn)


def test_examples_are_clipped_one_by_one() -> None:
    data = mixed(20)
    start: Array = quadratic().init()[0]["weight"].numpy()
    grads = start - data.targets
    norms = np.linalg.norm(grads, axis=1, keepdims=True)
    expected = start - 0.1 * (grads * np.minimum(1, 0.5 / norms)).sum(0) / 20
    found = trained(steps(count=1, bound=0.5), data)
    np.testing.assert_allclose(found.vector.numpy(), expected, rtol=1e-12)


def test_the_noise_is_z_c_over_the_public_number() -> None:
    """Where every gradient is zero, noise is all that moves the model: the client's own, and the step's."""
    program = quadratic(20_000)
    start = program.init()[0]["weight"]

    def moved(client: int, round: int) -> torch.Tensor:
        inputs = np.ones((3, 20_000))
        data = ClientData(inputs, np.tile(start.numpy(), (3, 1)), np.arange(3), client)
        return trained(steps(z=2.0, count=1, bound=0.5), data, program=program, round=round).vector - start

    draws = torch.stack([moved(7, 0), moved(8, 0), moved(7, 1)])
    for draw in draws:
        assert float(draw.std()) == pytest.approx(0.1 * 2.0 * 0.5 / 20, rel=0.03)
    assert float((torch.corrcoef(draws) - torch.eye(3)).abs().max()) < 0.03
    assert torch.equal(moved(7, 0), draws[0])


def test_an_empty_draw_is_a_step_with_full_noise() -> None:
    found = trained(steps(z=1.0, rate=1e-9, count=3, bound=0.5), mixed(20))
    start = quadratic().init()[0]["weight"]
    assert (found.steps, found.examples, found.loss_sum) == (3, 0, 0.0)
    assert not torch.equal(found.vector, start)


def test_what_the_algorithm_adds_is_added_to_the_private_gradient() -> None:
    def adjust(grads: Tensors, params: Tensors, extra: Tensors) -> Tensors:
        del params, extra
        return {name: grad + 1.0 for name, grad in grads.items()}

    trainer = LocalTrainer(quadratic(), LocalWork(steps=1, lr=0.1), adjust=adjust, steps_of=steps(count=1))
    plain = trained(steps(count=1), mixed(20)).vector.clone()
    found = trainer.run(trainer.start, {}, mixed(20), 0).vector
    torch.testing.assert_close(found, plain - 0.1, rtol=1e-12, atol=0)


def test_a_saved_program_gives_the_same_bits(tmp_path: Path) -> None:
    program = quadratic()
    program.save(tmp_path / "program")
    settings = steps(z=1.0, rate=0.5, bound=0.5)
    saved = PrivateSteps(**(vars(settings) | {"saved": tmp_path / "program"}))
    assert torch.equal(trained(saved, mixed(20)).vector, trained(settings, mixed(20)).vector)


def test_a_model_that_mixes_examples_is_refused() -> None:
    with pytest.raises(CaptureError, match="BatchNorm"):
        steps()(net(), None)


@pytest.mark.parametrize("count", [0, -1])
def test_steps_are_counted_from_one(count: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        steps(count=count)


def test_one_more_example_moves_a_noiseless_sum_by_at_most_c() -> None:
    """Add-or-remove: the same coins fall for those that stay."""
    whole, part = mixed(20), mixed(20)
    part = ClientData(part.inputs, part.targets, np.arange(19), 7)
    one, two = (trained(steps(rate=0.5, count=1, bound=0.5), data).vector for data in (whole, part))
    moved = float((one - two).norm()) / 0.1 * (0.5 * 20)
    assert moved <= 0.5 * (1 + 1e-9)
    assert math.isclose(moved, 0.5, rel_tol=1e-9) or moved == 0  # drawn or not
