"""Attention and recurrent layers, padded, packed and masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError
from mycelia.privacy.clipped_grad import Clipped, clipped_grad, explain
from tests.privacy.memory import peak
from tests.privacy.models import SEQUENCE, Function, batch_of, lengths, loss, module_of
from tests.privacy.oracle import abadi, agrees, clipped_of, close, compare, one_by_one

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)

# a quick one of each layer; the others are as quick, but many
QUICK = ("attention", "attention-masks", "lstm-packed", "gru-cell", "gru-packed-tokens", "rnn")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SEQUENCE]
)
def test_equals_one_by_one(name: str) -> None:
    agrees(name)


def attention(batch_first: bool, masks: str) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        steps = x.shape[1]
        options: dict[str, Any] = {"need_weights": masks == "weights"}
        if masks == "causal":
            triangle = nn.Transformer.generate_square_subsequent_mask(steps, dtype=x.dtype)
            options |= {"attn_mask": triangle, "is_causal": True}
        elif masks == "added":
            options |= {"attn_mask": torch.arange(steps * steps).view(steps, steps).to(x.dtype) / 9}
        elif masks == "keys":
            options |= {"key_padding_mask": torch.arange(steps) >= lengths(x)[:, None]}
        y = x if batch_first else x.transpose(0, 1)
        outputs, weights = self.attention(y, y, y, **options)
        outputs = outputs if batch_first else outputs.transpose(0, 1)
        return outputs if weights is None else torch.cat([outputs.flatten(1), weights.flatten(1)], 1)

    return Function(forward, attention=nn.MultiheadAttention(8, 2, batch_first=batch_first)).double()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "masks",
    ["causal", "keys", *(pytest.param(name, marks=pytest.mark.slow) for name in ("added", "weights"))],
)
def test_mha_native(masks: str, batch_first: bool) -> None:
    """The layer itself, without another in its place."""
    torch.manual_seed(1)
    compare(attention(batch_first, masks), torch.randn(5, 4, 8).double())


def test_one_product_for_queries_keys_and_values() -> None:
    """In self-attention the joint weight is one linear map; with two inputs it is read in disjoint parts."""
    assert "in_proj_weight: alone" in explain(clipped_of("attention"))
    assert "in_proj_weight: disjoint" in explain(clipped_of("attention-cross"))


@pytest.mark.parametrize("layer", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.slow)])
def test_lstm_memory(layer: type[nn.RNNBase]) -> None:
    """Twice the steps take twice the memory at most, and no gradient of an example is kept for each step."""
    size, inputs, width = 8, 16, 32
    used = []
    for steps in (3, 6):
        batch = torch.randn(size, steps, inputs), torch.zeros(size)
        module = Function(lambda s, x: s.r(x)[0], r=layer(inputs, width, batch_first=True))
        program = capture(module, loss, batch)
        clipped, arguments = clipped_grad(program, abadi), program.init()
        used.append(peak(lambda c=clipped, a=arguments, b=batch: c(*a, b)))
    gates = {nn.LSTM: 4, nn.GRU: 3}[layer] * width
    assert used[1] < 2.1 * used[0]
    assert used[1] < 6 * size * gates * width * 4  # T p d values of each example would be this


def test_what_lies_behind_the_end_does_not_matter() -> None:
    module, (inputs, targets) = module_of("lstm-packed"), batch_of("lstm-packed", 6)
    spoilt = inputs.clone()
    for row, length in zip(spoilt, lengths(inputs).tolist(), strict=True):
        row[length:] = float("nan")
    assert bool(spoilt.isnan().any())
    clipped = clipped_of("lstm-packed")
    close(
        clipped(*clipped.program.init(), (spoilt, targets)),
        one_by_one(module, (inputs, targets), abadi),
        1e-10,
    )


def test_padding_rows_of_packed_batches() -> None:
    """A padded row has length zero, which PyTorch itself would not pack."""
    clipped, (inputs, targets) = clipped_of("gru-packed-tokens"), batch_of("gru-packed-tokens", 4)
    padded = torch.cat([inputs, torch.zeros_like(inputs[:2])]), torch.cat([targets, targets[:2]])
    mask = torch.tensor([True] * 4 + [False] * 2)
    found = clipped(*clipped.program.init(), padded, mask)
    expected = one_by_one(module_of("gru-packed-tokens"), (inputs, targets), abadi)
    close(Clipped(found.total, *(part[:4] for part in found[1:])), expected, 1e-10)


def packing(total: int | None, layer: nn.Module) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths(x), batch_first=True, enforce_sorted=False)
        padded: Tensor = pad_packed_sequence(self.r(packed)[0], batch_first=True, total_length=total)[0]
        return padded

    return Function(forward, r=layer).double()


@pytest.mark.parametrize("total", [None, 3])
def test_a_length_that_other_examples_decide_is_refused(total: int | None) -> None:
    batch = torch.ones(3, 4, 2).double() / 9, torch.zeros(3).double()
    with pytest.raises(CaptureError, match="total_length=4"):
        capture(packing(total, nn.GRU(2, 2, batch_first=True)), loss, batch)


def test_a_packed_subclass_with_dropout_between_layers() -> None:
    """What a subclass computes counts, and the masks of dropout are those of the example."""

    class Twice(nn.GRU):
        def forward(self, packed: Any) -> Any:  # type: ignore[override]
            outputs, state = super().forward(packed)
            return outputs, 2 * state

    module = packing(3, Twice(3, 2, 2, batch_first=True, dropout=0.5))
    batch = torch.randn(4, 2, 3).double(), torch.zeros(4).double()
    program = capture(module, loss, batch)
    whole, one = (
        clipped_grad(program, abadi, backend=b)(*program.init(), batch, seed=3) for b in ("taps", "vmap")
    )
    close(whole, one, 1e-10)


def test_packed_without_a_graph() -> None:
    """One example at a time, by PyTorch's own packed layers."""
    module, batch = module_of("lstm-packed"), batch_of("lstm-packed", 4)
    program = capture(module, loss, batch, backend="eager")
    close(clipped_grad(program, abadi)(*program.init(), batch), one_by_one(module, batch, abadi), 1e-10)
