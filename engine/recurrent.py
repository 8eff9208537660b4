"""Cells of recurrent layers, as PyTorch defines them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["gru_cell", "gru_step", "lstm_cell", "lstm_step", "relu_cell", "tanh_cell"]


def lstm_cell(
    value: Tensor, state: tuple[Tensor, Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`aten.lstm_cell`: value [B, d] and state (h [B, p], c [B, p]) to the next state."""
    return lstm_step(F.linear(value, w_ih, b_ih), state, w_hh, b_hh)


def lstm_step(
    gates: Tensor, state: tuple[Tensor, Tensor], w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One step from the input's part of the gates [B, 4 p] (Gers et al. 2000).

    Args:
        gates: input, forget, cell and output gate, from the input alone.
        state: (h, c).
        w_hh: [4 p, p], or [4 p, r] with a projection.
        b_hh: [4 p].
        w_hr: projection [r, p] of the output (Sak et al. 2014).
    """
    hidden, cell = state
    enter, forget, new, leave = (gates + F.linear(hidden, w_hh, b_hh)).chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    hidden = leave.sigmoid() * cell.tanh()
    return hidden if w_hr is None else F.linear(hidden, w_hr), cell


def gru_cell(
    value: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`aten.gru_cell`: value [B, d] and h [B, p] to the next h."""
    return gru_step(F.linear(value, w_ih, b_ih), hidden, w_hh, b_hh)


def gru_step(gates: Tensor, hidden: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> Tensor:
    """One step from the input's part of the gates [B, 3 p] (Cho et al. 2014; b_hh inside the product)."""
    reset, update, new = gates.chunk(3, -1)
    own_reset, own_update, own_new = F.linear(hidden, w_hh, b_hh).chunk(3, -1)
    candidate = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return candidate + (update + own_update).sigmoid() * (hidden - candidate)


def tanh_cell(
    value: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`aten.rnn_tanh_cell`."""
    return torch.tanh(F.linear(value, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh))


def relu_cell(
    value: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`aten.rnn_relu_cell`."""
    return torch.relu(F.linear(value, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh))
