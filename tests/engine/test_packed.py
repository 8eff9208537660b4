"""Packed sequences in a Program, against PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1) - targets[:, None]).square().sum(1)


def lengths(x: Tensor) -> Tensor:
    return (x.detach()[:, 0, 0].abs() * 10).long() % x.shape[1] + 1


class Packed(nn.Module):
    """[B, T, d]; outputs and last states of a packed recurrent layer, from given first states if asked."""

    def __init__(self, layer: nn.RNNBase, *, total: int | None = 3, states: bool = False) -> None:
        super().__init__()
        self.layer, self.total, self.states = layer, total, states

    def forward(self, x: Tensor) -> Tensor:
        time_first = not self.layer.batch_first
        packed = pack_padded_sequence(
            x.transpose(0, 1) if time_first else x, lengths(x), not time_first, enforce_sorted=False
        )
        first = x[:, :2, : self.layer.hidden_size].transpose(0, 1).contiguous() if self.states else None
        lstm = isinstance(self.layer, nn.LSTM)
        outputs, last = self.layer(packed, (first, first.sin()) if lstm and first is not None else first)
        padded, found = pad_packed_sequence(outputs, not time_first, -1.0, self.total)
        parts = [padded.transpose(0, 1) if time_first else padded, *(s.transpose(0, 1) for s in last)]
        if not lstm:
            parts = [parts[0], last.transpose(0, 1)]
        return torch.cat([part.flatten(1) for part in parts] + [found[:, None]], 1)


CASES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Packed(nn.LSTM(3, 2, batch_first=True)),
    "lstm-both-ways-time-first": lambda: Packed(nn.LSTM(3, 2, bidirectional=True)),
    "lstm-projected": lambda: Packed(nn.LSTM(3, 3, bias=False, proj_size=2, batch_first=True), total=5),
    "gru-states": lambda: Packed(nn.GRU(3, 2, bidirectional=True, batch_first=True), states=True),
    "lstm-states": lambda: Packed(nn.LSTM(3, 2, 2, batch_first=True), states=True),
    "rnn": lambda: Packed(nn.RNN(3, 2, nonlinearity="relu", batch_first=True)),
}
QUICK = ("lstm-both-ways-time-first", "gru-states")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_outputs_are_those_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    module = CASES[name]().double()
    batch = torch.randn(5, 3, 3).double(), torch.randn(5).double()
    assert len(set(lengths(batch[0]).tolist())) > 1
    program = capture(module, loss, (batch[0][:3], batch[1][:3]))
    params, buffers = program.init()
    found = program.forward(params, buffers, *batch, training=False)
    torch.testing.assert_close(found.outputs, module(batch[0]), rtol=1e-12, atol=1e-12)
    # alone and in a batch of others
    one = program.forward(params, buffers, batch[0][3:4], batch[1][3:4])
    torch.testing.assert_close(one.losses, found.losses[3:4], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("total", [None, 2])
def test_the_length_may_not_come_from_other_examples(total: int | None) -> None:
    batch = torch.ones(3, 3, 3) / 9, torch.zeros(3)
    with pytest.raises(CaptureError, match=r"total_length=3\), the length before packing"):
        capture(Packed(nn.GRU(3, 2, batch_first=True), total=total), loss, batch)


def test_the_module_stays_as_it_was() -> None:
    """Layers check their states again, and sorting outside of packing sorts."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed: Any = Packed(nn.GRU(3, 2, batch_first=True))

        def forward(self, x: Tensor) -> Tensor:
            return self.packed(x) + torch.sort(x.flatten(1), descending=True).values[:, :1]

    torch.manual_seed(0)
    module, batch = Sorted(), (torch.randn(4, 3, 3), torch.zeros(4))
    program = capture(module, loss, batch)
    torch.testing.assert_close(program.forward(*program.init(), *batch).outputs, module(batch[0]))
    assert "check_forward_args" not in vars(module.packed.layer)
