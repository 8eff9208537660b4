"""Recurrent layers as their cells, so that a pass over operators sees each use of each weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mycelia.engine import _torch
from mycelia.engine.graph import Pass, replace_by

__all__ = ["RECURRENT", "cells"]

aten = torch.ops.aten

RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def _unroll(graph: fx.Graph) -> None:
    with _torch.without_onednn():  # whose recurrent layers, in float32, would hide the cells
        for node in list(graph.nodes):
            if node.target in RECURRENT:
                layer: Any = node.target
                replace_by(node, layer.decompose)


cells = Pass("cells", _unroll)
"""LSTM, GRU and RNN layers unrolled over time: one linear map of all inputs, one of the state a step."""
