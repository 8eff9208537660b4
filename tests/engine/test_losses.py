"""Per-example losses: closed forms, shapes, and what is refused."""

import math

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from mycelia.engine.errors import ConfigError
from mycelia.engine.losses import LOSSES, bce, cross_entropy, get, mae, mse


def test_cross_entropy_is_the_negative_log_softmax() -> None:
    outputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    expected = -log_softmax(outputs.numpy(), axis=1)[np.arange(7), targets.numpy()]
    np.testing.assert_allclose(cross_entropy(outputs, targets), expected, rtol=1e-12)


def test_cross_entropy_of_equal_logits_is_the_log_of_the_classes() -> None:
    assert cross_entropy(torch.zeros(2, 8), torch.tensor([3, 7])).tolist() == pytest.approx([math.log(8)] * 2)


def test_cross_entropy_of_tokens_is_the_mean_over_them() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 6, 9, generator=generator)
    targets = torch.randint(0, 9, (4, 6), generator=generator)
    each = torch.stack([cross_entropy(outputs[:, t], targets[:, t]) for t in range(6)])
    torch.testing.assert_close(cross_entropy(outputs, targets), each.mean(0))


def test_cross_entropy_of_maps_has_classes_second() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 4, 5, 6, generator=generator)
    targets = torch.randint(0, 4, (3, 5, 6), generator=generator)
    each = torch.stack(
        [cross_entropy(outputs[:, :, i, j], targets[:, i, j]) for i in range(5) for j in range(6)]
    )
    torch.testing.assert_close(cross_entropy(outputs, targets), each.mean(0))


def test_squared_and_absolute_error() -> None:
    outputs, targets = torch.tensor([[1.0], [4.0]]), torch.tensor([3.0, 3.5])
    assert mse(outputs, targets).tolist() == [4.0, 0.25]
    assert mae(outputs, targets).tolist() == [2.0, 0.5]
    assert mse(outputs.expand(2, 2), torch.tensor([[1.0, 3.0], [4.0, 2.0]])).tolist() == [2.0, 2.0]


def test_bce_of_logits() -> None:
    outputs, targets = torch.tensor([0.0, 2.0, -2.0]), torch.tensor([1, 1, 0])
    expected = [math.log(2), math.log1p(math.exp(-2)), math.log1p(math.exp(-2))]
    assert bce(outputs, targets).tolist() == pytest.approx(expected)
    assert bce(outputs[:, None], targets).tolist() == pytest.approx(expected)
    assert bce(torch.zeros(2, 3), torch.ones(2, 3)).tolist() == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("batch", [1, 257])
def test_every_loss_gives_one_number_per_example(name: str, batch: int) -> None:
    outputs = torch.zeros(batch, 3 if name == "cross-entropy" else 1)
    losses = get(name)(outputs, torch.zeros(batch, dtype=torch.int64))
    assert losses.shape == (batch,)


@pytest.mark.parametrize("name", ["mse", "mae", "bce"])
@pytest.mark.parametrize("outputs", [(4, 3), (4, 1, 1), (4, 2, 1), ()])
def test_shapes_that_would_broadcast_are_refused(name: str, outputs: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        get(name)(torch.zeros(outputs), torch.zeros(4))


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [(torch.zeros(4), torch.zeros(4, dtype=torch.int64)), (torch.zeros(4, 1), torch.zeros(4))],
)
def test_cross_entropy_refuses_what_is_not_classes(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="mse or mae"):
        cross_entropy(outputs, targets)


def test_an_unknown_loss_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"cross-entropy, mse, mae, bce.*\n.*did you mean 'cross-entropy'"):
        get("cross_entropy")
    assert get("math:hypot") is math.hypot
