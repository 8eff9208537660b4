"""Embedding tables and bags."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError
from mycelia.privacy.clipped_grad import clipped_grad
from tests.privacy.memory import peak
from tests.privacy.models import EMBEDDING, Function
from tests.privacy.oracle import abadi, agrees, compare

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)


@pytest.mark.parametrize("name", EMBEDDING)
def test_equals_one_by_one(name: str) -> None:
    agrees(name)


@settings(max_examples=5, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    st.integers(2, 5), st.integers(1, 4), st.integers(1, 5), st.sampled_from(["none", "sum", "mean", "max"]),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_drawn_shapes(rows: int, width: int, ids: int, mode: str, padded: bool, seed: int) -> None:
    padding = 0 if padded else None
    layer: nn.Module = nn.Embedding(rows, width, padding_idx=padding)
    if mode != "none":
        layer = nn.EmbeddingBag(rows, width, mode=mode, padding_idx=padding)
    draw = torch.Generator().manual_seed(seed)
    compare(layer.double(), torch.randint(rows, (4, ids), generator=draw))


def unit(outputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of every output is one."""
    return outputs.flatten(1).sum(1) - targets


@pytest.mark.parametrize(
    ("ids", "squared"),
    [([3, 3, 3, 3], 16), ([0, 1, 2, 3], 4), ([3, 3, 1, 1], 8), ([5, 5, 5, 5], 0), ([5, 3, 5, 3], 4)],
)
@pytest.mark.parametrize("mode", ["lookup", "sum", "mean", "weighted"])
def test_embedding_rows(mode: str, ids: list[int], squared: float) -> None:
    """Repeats of an id add up before they are squared; the row of the padding id has no gradient."""
    padding, real = 5, sum(n != 5 for n in ids)
    table = nn.Parameter(torch.randn(6, 1).double())

    def model(self: Function, x: Tensor) -> Tensor:
        if mode == "lookup":
            return F.embedding(x, self.table, padding_idx=padding)
        weights = torch.full(x.shape, 0.5, dtype=torch.float64) if mode == "weighted" else None
        kind = "mean" if mode == "mean" else "sum"
        return F.embedding_bag(x, self.table, mode=kind, per_sample_weights=weights, padding_idx=padding)

    batch = torch.tensor([ids, [0, 1, 2, 4]]), torch.zeros(2).double()
    program = capture(Function(model, table=table), unit, batch)
    clipped = clipped_grad(program, torch.ones_like, strict=True)
    found = clipped(*program.init(), batch)
    scale = {"mean": 1 / max(real, 1), "weighted": 0.5}.get(mode, 1.0)
    assert float(found.norms[0]) ** 2 == pytest.approx(squared * scale**2)
    assert found.total["table"][padding].abs().max() == 0


def test_a_large_table_has_no_gradient_of_each_example() -> None:
    rows, width, size = 20_000, 8, 16
    batch = torch.randint(rows, (size, 4)), torch.zeros(size)
    for layer in (nn.Embedding(rows, width), nn.EmbeddingBag(rows, width, mode="sum")):
        program = capture(layer, unit, batch)
        clipped, arguments = clipped_grad(program, abadi), program.init()
        table = rows * width * 4
        assert peak(lambda c=clipped, a=arguments: c(*a, batch)) < 3 * table < size * table


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_what_looks_at_other_examples_is_refused(layer: type[nn.Module]) -> None:
    """Scaling by frequency divides by what the batch holds; a largest norm changes rows that it holds."""
    batch = torch.randint(5, (3, 4)), torch.zeros(3)
    scaled = layer(5, 2, scale_grad_by_freq=True, **({"mode": "sum"} if layer is nn.EmbeddingBag else {}))
    program = capture(scaled, unit, batch)
    for backend in ("taps", "vmap"):
        with pytest.raises(CaptureError, match="scale_grad_by_freq"):
            clipped_grad(program, abadi, backend=backend)
    limited = layer(5, 2, max_norm=0.1)
    with pytest.raises(CaptureError, match="changes 'weight'"):
        capture(limited, unit, batch)
    with pytest.raises(CaptureError, match="changes the parameter 'weight'"):
        clipped_grad(capture(limited, unit, batch, backend="eager"), abadi)
