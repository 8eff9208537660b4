"""Recurrent layers as their cells, so that a pass over operators sees each use of each weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mycelia.engine.graph import Pass

__all__ = ["RECURRENT", "cells"]

aten = torch.ops.aten

RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def _unroll(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target not in RECURRENT:
            continue
        body = _traced(node)
        inner = dict(zip(body.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(body, inner)
        for copied in inner.values():
            for key in ("nn_module_stack", "stack_trace"):
                if key in node.meta:
                    copied.meta.setdefault(key, node.meta[key])
        for user in list(node.users):  # each takes one element of (output, state, ...)
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def _traced(node: fx.Node) -> fx.Graph:
    """The layer as one graph, from the values that its arguments have on record."""
    sources = node.all_input_nodes

    def layer(*tensors: Tensor) -> Any:
        known = dict(zip(sources, tensors, strict=True))
        call: Any = fx.map_arg((node.args, node.kwargs), lambda argument: known[argument])
        return node.target.decompose(*call[0], **call[1])  # type: ignore[union-attr]

    with torch.no_grad():
        traced: fx.GraphModule = make_fx(layer, pre_dispatch=True)(*(s.meta["val"] for s in sources))
    return traced.graph


cells = Pass("cells", _unroll)
"""LSTM, GRU and RNN layers unrolled over time: one linear map of all inputs, one of the state a step."""
