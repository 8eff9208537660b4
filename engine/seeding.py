"""Random operators of a captured graph become functions of an explicit seed.

The draw is counter-based: element i of the node with salt s gets a 32-bit hash of (seed, s, i). It is plain
integer arithmetic, so the interpreter, Inductor and `vmap` give the same bits, and a step can be replayed.
The mixer is the two-multiply xorshift hash with constants from the "hash prospector" search
(16 21f0aaad 15 735a2d97 15, bias 0.107); both constants stay below 2**31, so that a product of a 32-bit
value never leaves int64.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mycelia.engine.errors import CaptureError

__all__ = ["drive_by_seed", "seeded_uniform"]

aten = torch.ops.aten
_MASK = 0xFFFFFFFF


def _mix(value: Tensor) -> Tensor:
    value = ((value ^ (value >> 16)) * 0x21F0AAAD) & _MASK
    value = ((value ^ (value >> 15)) * 0x735A2D97) & _MASK
    return value ^ (value >> 15)


def _bits(shape: Sequence[int], seed: Tensor, salt: int) -> Tensor:
    """32 uniform bits per element, as int64."""
    low, high = seed & _MASK, (seed >> 32) & _MASK
    key = _mix(_mix(low + salt & _MASK) ^ high)
    count = math.prod(shape)
    index = torch.arange(count, device=seed.device)
    mixed = _mix(_mix((index & _MASK) ^ key) ^ (index >> 32) ^ _mix(key + 1 & _MASK))
    return mixed.reshape(tuple(shape))


def seeded_uniform(shape: Sequence[int], seed: Tensor, salt: int) -> Tensor:
    """Uniform float32 in [0, 1) of the given shape; `seed` is a 0-d int64 tensor."""
    # 24 bits: the most a float32 in [0, 1) can hold without rounding up to 1
    return (_bits(shape, seed, salt) >> 8).to(torch.float32) * 2.0**-24


def seeded_dropout(value: Tensor, p: float, seed: Tensor, salt: int) -> Tensor:
    """Inverted dropout: keeps with probability 1 - p and scales what is kept by 1 / (1 - p)."""
    if p <= 0.0:
        return value
    if p >= 1.0:
        return torch.zeros_like(value)
    keep = _bits(value.shape, seed, salt) >= round(p * 2**32)
    return torch.where(keep, value / (1.0 - p), torch.zeros_like(value))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None,
    gqa: bool, seed: Tensor, salt: int,
) -> Tensor:  # fmt: skip
    """Scaled dot-product attention with seeded dropout on the weights (Vaswani et al. 2017, eq. 1)."""
    if gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if causal:
        rows, columns = scores.shape[-2:]
        below = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~below, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return seeded_dropout(scores.softmax(-1), p, seed, salt) @ value


def _native_dropout(args: tuple[Any, ...], _: dict[str, Any], seed: Tensor, salt: int) -> tuple[Tensor, None]:
    value, p, train = args[0], args[1], args[2] if len(args) > 2 else True
    return (seeded_dropout(value, p, seed, salt) if train is None or train else value), None


def _dropout(args: tuple[Any, ...], _: dict[str, Any], seed: Tensor, salt: int) -> Tensor:
    return seeded_dropout(args[0], args[1], seed, salt) if args[2] else args[0]


def _feature_dropout(args: tuple[Any, ...], _: dict[str, Any], seed: Tensor, salt: int) -> Tensor:
    value, p, train = args
    if not train:
        return value
    channels = torch.ones(*value.shape[:2], *(1,) * (value.dim() - 2), dtype=value.dtype, device=value.device)
    return value * seeded_dropout(channels, p, seed, salt)


def _sdpa(args: tuple[Any, ...], kwargs: dict[str, Any], seed: Tensor, salt: int) -> Tensor:
    query, key, value, mask, p, causal = (*args, *(None, 0.0, False)[len(args) - 3 :])[:6]
    return _attention(
        query, key, value, mask, p, causal, kwargs.get("scale"), kwargs.get("enable_gqa", False), seed, salt
    )


def _recurrent(op: Callable[..., Any]) -> Callable[..., Any]:
    """A stacked RNN with dropout between layers, as one call per layer with seeded dropout between."""

    def run(args: tuple[Any, ...], _: dict[str, Any], seed: Tensor, salt: int) -> tuple[Tensor, ...]:
        value, hidden, weights, biases, layers, p, train, both, batch_first = args[:9]
        pair = isinstance(hidden, (list, tuple))
        states: tuple[Tensor, ...] = tuple(hidden) if pair else (hidden,)
        directions = 2 if both else 1
        per_layer = len(weights) // layers
        finals: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            part = slice(layer * directions, (layer + 1) * directions)
            start = [state[part] for state in states]
            own = weights[layer * per_layer : (layer + 1) * per_layer]
            value, *final = op(
                value, start if pair else start[0], own, biases, 1, 0.0, train, both, batch_first
            )
            finals.append(tuple(final))
            if train and layer < layers - 1:
                value = seeded_dropout(value, p, seed, salt + layer)
        return (value, *(torch.cat(parts) for parts in zip(*finals, strict=True)))

    return run


def _rand_like(args: tuple[Any, ...], kwargs: dict[str, Any], seed: Tensor, salt: int) -> Tensor:
    return seeded_uniform(args[0].shape, seed, salt).to(kwargs.get("dtype") or args[0].dtype)


def _rand(args: tuple[Any, ...], kwargs: dict[str, Any], seed: Tensor, salt: int) -> Tensor:
    return seeded_uniform(args[0], seed, salt).to(kwargs.get("dtype") or torch.float32)


def _normal(shape: Sequence[int], seed: Tensor, salt: int) -> Tensor:
    """Standard normal by Box and Muller (1958)."""
    radius = torch.sqrt(-2.0 * torch.log1p(-seeded_uniform(shape, seed, salt)))
    return radius * torch.cos(2.0 * math.pi * seeded_uniform(shape, seed, salt + 1))


def _randn_like(args: tuple[Any, ...], kwargs: dict[str, Any], seed: Tensor, salt: int) -> Tensor:
    return _normal(args[0].shape, seed, salt).to(kwargs.get("dtype") or args[0].dtype)


def _randn(args: tuple[Any, ...], kwargs: dict[str, Any], seed: Tensor, salt: int) -> Tensor:
    return _normal(args[0], seed, salt).to(kwargs.get("dtype") or torch.float32)


def _bernoulli(args: tuple[Any, ...], _: dict[str, Any], seed: Tensor, salt: int) -> Tensor:
    return (seeded_uniform(args[0].shape, seed, salt) < args[0]).to(args[0].dtype)


def _bernoulli_p(args: tuple[Any, ...], _: dict[str, Any], seed: Tensor, salt: int) -> Tensor:
    return (seeded_uniform(args[0].shape, seed, salt) < args[1]).to(args[0].dtype)


_SEEDED: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _native_dropout,
    aten.dropout.default: _dropout,
    aten.feature_dropout.default: _feature_dropout,
    aten.scaled_dot_product_attention.default: _sdpa,
    aten.lstm.input: _recurrent(aten.lstm.input),
    aten.gru.input: _recurrent(aten.gru.input),
    aten.rnn_tanh.input: _recurrent(aten.rnn_tanh.input),
    aten.rnn_relu.input: _recurrent(aten.rnn_relu.input),
    aten.rand_like.default: _rand_like,
    aten.rand.default: _rand,
    aten.randn_like.default: _randn_like,
    aten.randn.default: _randn,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
}

# a recurrent node is random only when it trains several layers with dropout; layers, p and train stand here
_RECURRENT = {
    getattr(getattr(aten, name), form): at
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for form, at in (("input", 4), ("data", 5))
}


def _is_random(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is aten.scaled_dot_product_attention.default:
        return len(node.args) > 4 and node.args[4] != 0.0
    if node.target in _RECURRENT:
        at = _RECURRENT[node.target]
        layers, p, train = node.args[at : at + 3]
        return bool(train) and p != 0.0 and layers != 1
    return torch.Tag.nondeterministic_seeded in node.target.tags


def drive_by_seed(graph: fx.Graph, seed: fx.Node) -> int:
    """Rewrite every random node of `graph` to draw from `seed`; returns how many there were.

    Raises:
        CaptureError: a random operator without a seeded form, with its source line.
    """
    random = [node for node in graph.nodes if _is_random(node)]
    for number, node in enumerate(random):
        seeded = _SEEDED.get(node.target)
        if seeded is None:
            raise CaptureError(
                f"operator {node.target} draws random numbers",
                rule="randomness inside a Program is driven by its seed; this operator has no seeded form",
                fix="draw outside the model, use dropout, rand, randn or bernoulli, or backend='eager'",
                who=source_line(node),
            )
        with graph.inserting_before(node):
            # each node owns a block of salts: recurrent layers and Box-Muller need more than one
            new = graph.call_function(seeded, (node.args, dict(node.kwargs), seed, 1009 * (number + 1)))
            new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return len(random)


def source_line(node: fx.Node) -> str:
    """Where a node comes from: module path and the last line of user code on record."""
    stack = node.meta.get("nn_module_stack") or {}
    module = next((str(path) for path, _ in reversed(list(stack.values())) if path), "")
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    place = f"{lines[-2]} {lines[-1]}" if len(lines) > 1 else ""
    return " ".join(part for part in (module.removeprefix("model."), place) if part) or node.name


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes one element of a tuple."""
    return node.op == "call_function" and node.target is operator.getitem
