"""Random operators of a captured graph become functions of an explicit seed.

The draw is counter-based: a number is a 32-bit hash of (seed, operator, example, position in the example),
in plain integer arithmetic, so that the interpreter, Inductor and `vmap` give the same bits and a step can
be replayed. Because an example's number in the batch is hashed on its own, a batch cut in parts, or padded,
draws what the whole would. The mixer is the two-multiply xorshift hash with the constants of the
"hash prospector" search (16 21f0aaad 15 735a2d97 15, bias 0.107), keyed before and inside the rounds; both
constants stay below 2**31, so that their product with a 32-bit value never leaves int64.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import optimization_hint, statically_known_true

from mycelia.engine.errors import CaptureError
from mycelia.engine.graph import Writer, is_getitem, nested, size, source_line

__all__ = ["drive_by_seed", "is_random", "seeded_bits", "seeded_uniform"]

aten = torch.ops.aten
_MASK = 0xFFFFFFFF
_SALTS_PER_NODE = 1024  # recurrent layers and normal draws need more than one

Op = Callable[..., Any]
"""Runs an operator (`_run`) or writes it into a graph (`Writer`): one formula serves both."""


def _run(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


def _round(op: Op, value: Any, shift: int, factor: int) -> Any:
    mixed = op(aten.bitwise_xor.Tensor, value, op(aten.bitwise_right_shift.Tensor_Scalar, value, shift))
    return op(aten.bitwise_and.Scalar, op(aten.mul.Scalar, mixed, factor), _MASK)


def _mix(op: Op, value: Any, key: Any, inner: Any) -> Any:
    """The mixer with `key` added (xor) before the first round and `inner` before the second."""
    value = _round(op, op(aten.bitwise_xor.Tensor, value, key), 16, 0x21F0AAAD)
    value = _round(op, op(aten.bitwise_xor.Tensor, value, inner), 15, 0x735A2D97)
    return op(aten.bitwise_xor.Tensor, value, op(aten.bitwise_right_shift.Tensor_Scalar, value, 15))


def _keys(op: Op, seed: Any) -> tuple[Any, Any]:
    """Two 32-bit keys of a 64-bit seed."""
    low = op(aten.bitwise_and.Scalar, seed, _MASK)
    high = op(aten.bitwise_and.Scalar, op(aten.bitwise_right_shift.Tensor_Scalar, seed, 32), _MASK)
    one = _mix(op, low, high, low)
    return one, _mix(op, high, one, low)


def _bits(
    op: Op,
    shape: Sequence[Any],
    rows: tuple[int, int] | None,
    keys: tuple[Any, Any],
    first: Any,
    salt: int,
    device: Any,
) -> Any:
    """32 uniform bits per element as int64, see `seeded_bits`."""
    outer = op(aten.bitwise_xor.Scalar, keys[0], salt * 0x9E3779B1 & _MASK)
    inner = op(aten.bitwise_xor.Scalar, keys[1], salt * 0x85EBCA6B & _MASK)
    rest: Any = 1
    for axis, length in enumerate(shape):
        if rows is None or axis != rows[0]:
            plain = isinstance(rest, int) and isinstance(length, int)
            rest = rest * length if plain else op(operator.mul, rest, length)
    place = op(aten.arange.default, rest, device=device)
    if rows is None:
        return _mix(op, op(aten.reshape.default, place, list(shape)), outer, inner)
    axis, per_example = rows
    start = first if per_example == 1 else op(operator.mul, first, per_example)
    row = op(aten.add.Tensor, op(aten.arange.default, shape[axis], device=device), start)
    row = op(aten.reshape.default, row, [shape[axis] if n == axis else 1 for n in range(len(shape))])
    place = op(aten.reshape.default, place, [1 if n == axis else length for n, length in enumerate(shape)])
    outer = _mix(op, row, outer, inner)
    inner = op(aten.bitwise_and.Scalar, op(aten.add.Tensor, outer, inner), _MASK)
    return _mix(op, place, outer, inner)


def _uniform(op: Op, bits: Any) -> Any:
    # 24 bits: the most a float32 in [0, 1) can hold without rounding up to 1
    whole = op(aten.bitwise_right_shift.Tensor_Scalar, bits, 8)
    return op(aten.mul.Scalar, op(aten._to_copy.default, whole, dtype=torch.float32), 2.0**-24)


def seeded_bits(
    shape: Sequence[int],
    seed: Tensor,
    salt: int,
    *,
    rows: tuple[int, int] | None = None,
    first: int | Tensor = 0,
) -> Tensor:
    """32 uniform bits per element, as int64 in [0, 2**32).

    Args:
        shape: of the result.
        seed: 0-d int64.
        salt: tells draws under one seed apart.
        rows: (axis of the examples, entries on it per example); None hashes the flat position alone.
        first: number of the first example; what a batch's second half is drawn with.
    """
    bits: Tensor = _bits(_run, shape, rows, _keys(_run, seed), first, salt, seed.device)
    return bits


def seeded_uniform(
    shape: Sequence[int],
    seed: Tensor,
    salt: int,
    *,
    rows: tuple[int, int] | None = None,
    first: int | Tensor = 0,
) -> Tensor:
    """Uniform float32 in [0, 1) with 24 random bits, see `seeded_bits`."""
    uniform: Tensor = _uniform(_run, seeded_bits(shape, seed, salt, rows=rows, first=first))
    return uniform


@dataclass(frozen=True)
class _Draws:
    """Draws for one node: writes into the graph what gives its random numbers.

    Attributes:
        op: the writer.
        value: the node's own value on fake tensors; gives dtype and device.
        batch: the symbolic batch size, or an int when the batch is fixed.
        keys: the seed's two keys.
    """

    op: Writer
    node: fx.Node
    value: Tensor
    batch: Any
    keys: tuple[fx.Node, fx.Node]
    first: fx.Node | int
    salt: int

    def bits(self, like: fx.Node | None = None, sizes: Sequence[Any] | None = None, salt: int = 0) -> Any:
        """Bits of the shape of the node `like`, or of `sizes` (integers or nodes)."""
        shape = like.meta["val"].shape if like is not None else self.value.shape
        if sizes is None:
            sizes = [
                self.op(size, like, axis) if isinstance(length, torch.SymInt) else length
                for axis, length in enumerate(shape)
            ]
        symbolic = [(axis, length) for axis, length in enumerate(shape) if isinstance(length, torch.SymInt)]
        rows = None
        if len(symbolic) == 1 and statically_known_true(symbolic[0][1] % self.batch == 0):
            # the examples are on this axis, possibly with heads or steps inside
            axis, length = symbolic[0]
            rows = (axis, optimization_hint(length, 1) // optimization_hint(self.batch, 1))
        return _bits(self.op, sizes, rows, self.keys, self.first, self.salt + salt, self.value.device)

    def uniform(self, like: fx.Node | None = None, sizes: Sequence[Any] | None = None, salt: int = 0) -> Any:
        return _uniform(self.op, self.bits(like, sizes, salt))

    def normal(self, like: fx.Node | None = None, sizes: Sequence[Any] | None = None) -> Any:
        """Standard normal by Box and Muller (1958)."""
        op = self.op
        logs = op(aten.log1p.default, op(aten.neg.default, self.uniform(like, sizes)))
        radius = op(aten.sqrt.default, op(aten.mul.Scalar, logs, -2.0))
        angle = op(aten.mul.Scalar, self.uniform(like, sizes, 1), 2.0 * math.pi)
        return self.cast(op(aten.mul.Tensor, radius, op(aten.cos.default, angle)))

    def cast(self, drawn: Any) -> Any:
        """To the dtype the operator gives."""
        return self.op(aten._to_copy.default, drawn, dtype=self.value.dtype)

    def drop(self, value: fx.Node, p: float, salt: int = 0) -> tuple[Any, Any]:
        """Inverted dropout: keeps with probability 1 - p, scales what is kept by 1 / (1 - p)."""
        op = self.op
        keep = op(aten.ge.Scalar, self.bits(value, salt=salt), round(p * 2**32))
        scaled = op(aten.mul.Scalar, value, 0.0 if p >= 1.0 else 1.0 / (1.0 - p))
        return op(aten.where.ScalarOther, keep, scaled, 0.0), keep


def _native_dropout(draw: _Draws, value: fx.Node, p: float, train: bool | None = True) -> tuple[Any, Any]:
    return draw.drop(value, p if train or train is None else 0.0)


def _attention(
    draw: _Draws, query: fx.Node, key: Any, value: Any, mask: fx.Node | None = None, p: float = 0.0,
    causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1) with dropout on the weights."""
    op = draw.op
    if enable_gqa:
        repeats = query.meta["val"].shape[-3] // key.meta["val"].shape[-3]
        key, value = (op(aten.repeat_interleave.self_int, part, repeats, -3) for part in (key, value))
    scale = 1.0 / math.sqrt(query.meta["val"].shape[-1]) if scale is None else scale
    scores = op(aten.matmul.default, op(aten.mul.Scalar, query, scale), op(aten.transpose.int, key, -2, -1))
    if causal:
        last = scores.meta["val"].shape[-2:]
        above = op(aten.ones.default, list(last), dtype=torch.bool, device=draw.value.device)
        above = op(aten.triu.default, above, 1)
        scores = op(aten.masked_fill.Scalar, scores, above, -math.inf)
    if mask is not None:
        if mask.meta["val"].dtype == torch.bool:
            scores = op(aten.masked_fill.Scalar, scores, op(aten.logical_not.default, mask), -math.inf)
        else:
            scores = op(aten.add.Tensor, scores, mask)
    kept, _ = draw.drop(op(aten.softmax.int, scores, -1), p)
    return op(aten.matmul.default, kept, value)


def _recurrent(
    draw: _Draws, value: Any, hidden: Any, weights: Sequence[fx.Node], biases: bool, layers: int, p: float,
    train: bool, both: bool, batch_first: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """A stacked RNN as one call per layer, with dropout between."""
    op = draw.op
    target: Any = draw.node.target
    states = list(hidden) if isinstance(hidden, (list, tuple)) else [hidden]
    directions, per_layer = (2 if both else 1), len(weights) // layers
    finals: list[list[Any]] = [[] for _ in states]
    for layer in range(layers):
        part = (layer * directions, (layer + 1) * directions)
        start = [op(aten.slice.Tensor, state, 0, *part) for state in states]
        own = list(weights[layer * per_layer : (layer + 1) * per_layer])
        begin = start if isinstance(hidden, (list, tuple)) else start[0]
        like = _recurrent_values(draw.node, directions, len(states))
        out = op.known(like, target, value, begin, own, biases, 1, 0.0, train, both, batch_first)
        value = op(operator.getitem, out, 0)
        for number, final in enumerate(finals):
            final.append(op(operator.getitem, out, number + 1))
        if layer < layers - 1:
            value, _ = draw.drop(value, p, salt=layer)
    return (value, *(op(aten.cat.default, final) for final in finals))


def _recurrent_values(node: fx.Node, directions: int, states: int) -> tuple[Tensor, ...]:
    """Values like those of one layer: running one on fake tensors would fix the batch size."""
    out, final = node.meta["val"][0], node.meta["val"][1]
    with out.fake_mode:
        return (torch.empty_like(out), *(torch.empty_like(final[:directions]) for _ in range(states)))


def _rand(draw: _Draws, sizes: Sequence[Any], **_: Any) -> Any:
    return draw.cast(draw.uniform(sizes=sizes))


def _rand_like(draw: _Draws, like: fx.Node, **_: Any) -> Any:
    return draw.cast(draw.uniform(like))


def _randn(draw: _Draws, sizes: Sequence[Any], **_: Any) -> Any:
    return draw.normal(sizes=sizes)


def _randn_like(draw: _Draws, like: fx.Node, **_: Any) -> Any:
    return draw.normal(like)


def _integers(draw: _Draws, low: int, high: int, bits: Any) -> Any:
    """floor(bits * (high - low) / 2**32) + low."""
    if not 0 < high - low < 2**31:
        raise CaptureError(
            f"random integers from {low} to {high}", rule="a range below 2**31", who=source_line(draw.node)
        )
    scaled = draw.op(aten.mul.Scalar, bits, high - low)
    whole = draw.op(aten.bitwise_right_shift.Tensor_Scalar, scaled, 32)
    return draw.cast(draw.op(aten.add.Scalar, whole, low))


def _randint(draw: _Draws, high: int, sizes: Sequence[Any], **_: Any) -> Any:
    return _integers(draw, 0, high, draw.bits(sizes=sizes))


def _randint_low(draw: _Draws, low: int, high: int, sizes: Sequence[Any], **_: Any) -> Any:
    return _integers(draw, low, high, draw.bits(sizes=sizes))


def _randint_like(draw: _Draws, like: fx.Node, high: int, **_: Any) -> Any:
    return _integers(draw, 0, high, draw.bits(like))


def _randint_like_low(draw: _Draws, like: fx.Node, low: int, high: int, **_: Any) -> Any:
    return _integers(draw, low, high, draw.bits(like))


def _bernoulli(draw: _Draws, p: fx.Node, **_: Any) -> Any:
    return draw.cast(draw.op(aten.lt.Tensor, draw.uniform(p), p))


def _bernoulli_p(draw: _Draws, like: fx.Node, p: float = 0.5, **_: Any) -> Any:
    return draw.cast(draw.op(aten.lt.Scalar, draw.bits(like), round(p * 2**32)))


def _uniform_between(draw: _Draws, like: fx.Node, low: float = 0.0, high: float = 1.0, **_: Any) -> Any:
    unit = draw.cast(draw.uniform(like))
    return draw.op(aten.add.Scalar, draw.op(aten.mul.Scalar, unit, high - low), low)


def _normal_like(draw: _Draws, like: fx.Node, mean: float = 0.0, std: float = 1.0, **_: Any) -> Any:
    return draw.op(aten.add.Scalar, draw.op(aten.mul.Scalar, draw.normal(like), std), mean)


def _normal_of(draw: _Draws, mean: Any, std: Any = 1.0, sizes: Sequence[Any] | None = None, **_: Any) -> Any:
    """`torch.normal` in its four forms: mean and std are numbers or tensors."""
    like = None
    if sizes is None:  # the shape is that of the tensor argument, or of both broadcast
        parts = [part for part in (mean, std) if isinstance(part, fx.Node)]
        like = parts[0] if len(parts) == 1 else draw.op(aten.add.Tensor, *parts)
    noise = draw.normal(like, sizes)
    scale, shift = (
        aten.mul.Tensor if isinstance(std, fx.Node) else aten.mul.Scalar,
        aten.add.Tensor if isinstance(mean, fx.Node) else aten.add.Scalar,
    )
    return draw.op(shift, draw.op(scale, noise, std), mean)


def _exponential(draw: _Draws, like: fx.Node, rate: float = 1.0, **_: Any) -> Any:
    logs = draw.op(aten.log1p.default, draw.op(aten.neg.default, draw.uniform(like)))
    return draw.cast(draw.op(aten.mul.Scalar, logs, -1.0 / rate))


def _rrelu(draw: _Draws, value: fx.Node, low: float, high: float, train: bool = False, *_: Any) -> Any:
    slope = _uniform_between(draw, value, low, high)
    below = draw.op(aten.mul.Tensor, value, slope)
    return draw.op(aten.where.self, draw.op(aten.ge.Scalar, value, 0), value, below)


_SEEDED: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _native_dropout,
    aten.scaled_dot_product_attention.default: _attention,
    aten.lstm.input: _recurrent,
    aten.gru.input: _recurrent,
    aten.rnn_tanh.input: _recurrent,
    aten.rnn_relu.input: _recurrent,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand_like,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn_like,
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
    aten.uniform.default: _uniform_between,
    aten.normal_functional.default: _normal_like,
    aten.normal.float_float: _normal_of,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.exponential.default: _exponential,
    aten.rrelu.default: _rrelu,
}

# a recurrent node is random only when it trains several layers with dropout; layers, p and train stand here
_RECURRENT = {
    getattr(getattr(aten, name), form): at
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for form, at in (("input", 4), ("data", 5))
}


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from PyTorch's own generator."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    args: Any = node.args
    if node.target is aten.scaled_dot_product_attention.default:
        return len(args) > 4 and bool(args[4] != 0.0)
    if node.target is aten.rrelu.default:
        return len(args) > 3 and bool(args[3])
    if node.target in _RECURRENT:
        at = _RECURRENT[node.target]
        layers, p, train = args[at : at + 3]
        return bool(train and p != 0.0 and layers != 1)
    return torch.Tag.nondeterministic_seeded in node.target.tags


def drive_by_seed(graph: fx.Graph, seed: fx.Node, first: fx.Node | int = 0, batch: Any = 1) -> int:
    """Rewrite every random node of `graph` to draw from `seed`; returns how many there were.

    Args:
        graph: with values on fake tensors, as export gives them.
        seed: the node that holds the seed (0-d int64).
        first: the node that holds the number of the batch's first example, or that number.
        batch: the batch size, symbolic unless it is fixed.

    Raises:
        CaptureError: a random operator without a seeded form, or one inside a branch or loop, with its
            source line.
    """
    for inner in nested(graph):
        for node in inner.nodes:
            if is_random(node):
                raise _refused(node, "inside a branch or loop", "draw before it and pass the numbers in")
    random = [node for node in graph.nodes if is_random(node)]
    if not random:
        return 0
    with graph.inserting_before(random[0]):
        keys = _keys(Writer(graph, random[0]), seed)
    for number, node in enumerate(random):
        seeded = _SEEDED.get(node.target)
        if seeded is None:
            fix = "draw outside the model, or use dropout, rand, randn, randint, normal or bernoulli"
            raise _refused(node, "without a seeded form", fix)
        value = node.meta["val"]
        sample = value[0] if isinstance(value, (tuple, list)) else value
        with graph.inserting_before(node):
            draws = _Draws(
                Writer(graph, node), node, sample, batch, keys, first, _SALTS_PER_NODE * (number + 1)
            )
            new = seeded(draws, *node.args, **node.kwargs)
        _replace(graph, node, new)
    return len(random)


def _refused(node: fx.Node, why: str, fix: str) -> CaptureError:
    return CaptureError(
        f"operator {node.target} draws random numbers {why}",
        rule="randomness inside a Program is driven by its seed",
        fix=f"{fix}; or capture with backend='eager'",
        who=source_line(node),
    )


def _replace(graph: fx.Graph, node: fx.Node, new: Any) -> None:
    if isinstance(new, tuple):
        for user in list(node.users):
            if is_getitem(user):
                index: Any = user.args[1]
                user.replace_all_uses_with(new[index])
                graph.erase_node(user)
    else:
        node.replace_all_uses_with(new)
    graph.erase_node(node)
