"""Cells against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mycelia.engine.recurrent import gru_cell, lstm_cell, lstm_step, relu_cell, tanh_cell


@pytest.mark.parametrize("bias", [True, False])
def test_cells(bias: bool) -> None:
    torch.manual_seed(0)
    value, hidden, cell = torch.randn(3, 4), torch.randn(3, 2), torch.randn(3, 2)
    lstm = nn.LSTMCell(4, 2, bias)
    torch.testing.assert_close(
        lstm_cell(value, (hidden, cell), *lstm.parameters()), lstm(value, (hidden, cell))
    )
    for layer, mine in (
        (nn.GRUCell(4, 2, bias), gru_cell),
        (nn.RNNCell(4, 2, bias), tanh_cell),
        (nn.RNNCell(4, 2, bias, nonlinearity="relu"), relu_cell),
    ):
        torch.testing.assert_close(mine(value, hidden, *layer.parameters()), layer(value, hidden))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_projected_cell_is_a_layer_of_one_step() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 3, proj_size=2)
    value, hidden, cell = torch.randn(1, 5, 4), torch.randn(1, 5, 2), torch.randn(1, 5, 3)
    w_ih, w_hh, b_ih, b_hh, w_hr = layer.parameters()
    gates = torch.nn.functional.linear(value[0], w_ih, b_ih)
    found = lstm_step(gates, (hidden[0], cell[0]), w_hh, b_hh, w_hr)
    _, (h, c) = layer(value, (hidden, cell))
    torch.testing.assert_close(found, (h[0], c[0]))
