"""Small models, one for each way a parameter can be used, with what a batch for them looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

__all__ = [
    "CASES",
    "COMBINED",
    "CONVOLUTION",
    "EMBEDDING",
    "LINEAR",
    "NORMALISATION",
    "OTHER",
    "SEQUENCE",
    "Case",
    "Function",
    "batch_of",
    "lengths",
    "loss",
    "module_of",
]


@dataclass(frozen=True)
class Case:
    """A model [B, *shape] -> [B, ...]; `tokens` > 0: integer inputs below it. `fallback`: needs vmap."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0
    fallback: bool = False


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Depends on every output, differently for each."""
    flat = outputs.flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
    return ((flat - targets[:, None]) ** 2 * weights).mean(1)


class Function(nn.Module):
    """A module from layers and a function of them and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **layers: Any) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _frozen(layer: nn.Module, *names: str) -> nn.Module:
    for name in names:
        getattr(layer, name).requires_grad_(False)
    return layer


class _Subclass(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 + 1


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def _checkpointed(reentrant: bool) -> nn.Module:
    from torch.utils.checkpoint import checkpoint

    return Function(
        lambda self, x: checkpoint(self.body, self.enter(x), use_reentrant=reentrant),
        enter=nn.Linear(6, 5), body=nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)),
    )  # fmt: skip


def _tied_head(self: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(self.table(x)), self.table.weight)


class _LowRank(nn.Module):
    """Hu et al. (2021): a frozen layer and two thin trained matrices beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = _frozen(nn.Linear(6, 4), "weight", "bias")
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


def _merged(self: Any, x: Tensor) -> Tensor:
    """The same with one weight computed from the three."""
    return F.linear(x, self.base.weight + 0.5 * self.b.weight @ self.a.weight, self.base.bias)


def _standardised(self: Any, x: Tensor) -> Tensor:
    """Qiao et al. (2019): each filter with mean 0 and variance 1."""
    weight = self.a.weight
    variance, mean = torch.var_mean(weight, (1, 2, 3), keepdim=True)
    return F.conv2d(x, (weight - mean) * (variance + 1e-5).rsqrt(), self.a.bias)


def _evaluated(self: Any, x: Tensor) -> Tensor:
    self.norm.eval()
    return self.norm(self.a(x))


def _ids(x: Tensor, count: int) -> Tensor:
    """Integers below `count` that follow from real values."""
    return (x.detach().abs() * 10).long() % count


def lengths(x: Tensor) -> Tensor:
    """Lengths from 1 to T of the sequences [B, T, ...], from their first value."""
    return (x.detach().flatten(1)[:, 0].abs() * 10).long() % x.shape[1] + 1


def _weighted_bag(self: Any, x: Tensor) -> Tensor:
    return F.embedding_bag(_ids(x, 7), self.table, mode="sum", per_sample_weights=x * self.scale)


def _attention(self: Any, x: Tensor) -> Tensor:
    return self.attention(x, x, x, need_weights=False)[0]


def _masked(self: Any, x: Tensor) -> Tensor:
    """A causal mask, and keys behind the end of each sequence left out."""
    steps = x.shape[1]
    causal = torch.ones(steps, steps, dtype=torch.bool).triu(1)
    behind = torch.arange(steps) >= lengths(x)[:, None]
    y = x.transpose(0, 1)
    return self.attention(y, y, y, key_padding_mask=behind, attn_mask=causal)[0].transpose(0, 1)


def _packed(self: Any, x: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths(x), batch_first=True, enforce_sorted=False)
    outputs, states = self.r(packed)
    padded = pad_packed_sequence(outputs, batch_first=True, padding_value=0.5, total_length=x.shape[1])[0]
    last = states if isinstance(states, tuple) else (states,)
    return torch.cat([padded.flatten(1), *(state.transpose(0, 1).flatten(1) for state in last)], 1)


def _packed_tokens(self: Any, x: Tensor) -> Tensor:
    packed = pack_padded_sequence(x.t(), (x > 0).sum(1).clamp(min=1), enforce_sorted=False)
    order = packed.sorted_indices, packed.unsorted_indices
    return self.r(PackedSequence(self.table(packed.data), packed.batch_sizes, *order))[1].transpose(0, 1)


def _cells(self: Any, x: Tensor) -> Tensor:
    state = None
    for step in x.unbind(1):
        state = self.r(step, state)
    return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


def _rows(layer: nn.Module, count: int) -> nn.Module:
    """Several views of an example through a layer, and their mean: more rows than examples."""
    return Function(lambda s, x: s.a(x.flatten(0, 1)).unflatten(0, (-1, count)).mean(1), a=layer)


LINEAR: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(6, 4), (6,)),
    "linear-no-bias": Case(lambda: nn.Linear(6, 4, bias=False), (6,)),
    "linear-ghost": Case(lambda: nn.Linear(12, 10), (2, 12)),
    "linear-formed": Case(lambda: nn.Linear(3, 2), (9, 3)),
    "linear-two-axes": Case(lambda: nn.Linear(3, 2), (2, 4, 3)),
    "linear-time-first": Case(
        lambda: Function(lambda s, x: s.a(x.transpose(0, 1)).transpose(0, 1), a=nn.Linear(3, 2)), (4, 3)
    ),
    "linear-rows": Case(lambda: _rows(nn.Linear(4, 3), 2), (2, 4)),
    "matmul": Case(lambda: Function(lambda s, x: x @ s.w, w=_parameter(6, 4)), (6,)),
    "matmul-transposed": Case(lambda: Function(lambda s, x: x @ s.w.t(), w=_parameter(4, 6)), (3, 6)),
    "matmul-vector": Case(lambda: Function(lambda s, x: x @ s.w, w=_parameter(6)), (3, 6)),
    "matmul-vector-alone": Case(lambda: Function(lambda s, x: (x @ s.w)[:, None], w=_parameter(6)), (6,)),
    "matmul-heads": Case(
        lambda: Function(lambda s, x: x.unflatten(1, (2, 3))[:, :, None] @ s.w, w=_parameter(2, 3, 4)), (6,)
    ),
    "matmul-heads-shared": Case(
        lambda: Function(lambda s, x: x[:, None] @ s.w, w=_parameter(2, 6, 3)), (3, 6)
    ),
    "matmul-left": Case(lambda: Function(lambda s, x: s.w @ x, w=_parameter(4, 3)), (3, 6)),
    "matmul-left-vector": Case(lambda: Function(lambda s, x: s.w @ x, w=_parameter(3)), (3, 6)),
    "matmul-left-heads": Case(
        lambda: Function(lambda s, x: s.w @ x[:, None], w=_parameter(2, 4, 3)), (3, 6)
    ),
    "addmm": Case(
        lambda: Function(lambda s, x: torch.addmm(s.b, x, s.w), w=_parameter(6, 3), b=_parameter(1, 3)), (6,)
    ),
    "addmm-scaled": Case(
        lambda: Function(
            lambda s, x: torch.addmm(s.b, x, s.w, beta=2, alpha=0.5), w=_parameter(6, 3), b=_parameter(3)
        ),
        (6,), fallback=True,
    ),
    "addmm-to-data": Case(
        lambda: Function(lambda s, x: torch.addmm(x[:, :3], x, s.w), w=_parameter(6, 3)), (6,)
    ),
    "einsum": Case(
        lambda: Function(lambda s, x: torch.einsum("btd,hdk->bhtk", x, s.w), w=_parameter(2, 6, 3)), (3, 6)
    ),
    "einsum-heads": Case(
        lambda: Function(
            lambda s, x: torch.einsum("bthd,hdk->bthk", x, s.w), w=_parameter(2, 6, 3)
        ),
        (3, 2, 6)
    ),
    "bilinear": Case(
        lambda: Function(lambda s, x: s.b(x[:, :3], x[:, 3:]), b=nn.Bilinear(3, 3, 2)), (6,), fallback=True
    ),
}  # fmt: skip

CONVOLUTION: dict[str, Case] = {
    "conv1d": Case(lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 9)),
    "conv1d-stride-dilation": Case(lambda: nn.Conv1d(3, 4, 3, stride=2, dilation=2), (3, 13)),
    "conv1d-reflect": Case(lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="reflect"), (2, 6)),
    "conv2d": Case(lambda: nn.Conv2d(2, 3, 3), (2, 7, 6)),
    "conv2d-ghost": Case(lambda: nn.Conv2d(6, 8, 3), (6, 4, 4)),
    "conv2d-stride": Case(lambda: nn.Conv2d(2, 3, 3, stride=(2, 1)), (2, 8, 7)),
    "conv2d-dilation": Case(lambda: nn.Conv2d(2, 3, 3, dilation=(1, 2)), (2, 7, 8)),
    "conv2d-groups": Case(lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 6, 6)),
    "conv2d-depthwise": Case(lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (4, 5, 5)),
    "conv2d-rows": Case(lambda: _rows(nn.Conv2d(2, 3, 3), 2), (2, 2, 5, 5)),
    "conv2d-same": Case(lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 5, 6)),
    "conv2d-same-dilated": Case(lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=2), (2, 7, 8)),
    "conv2d-valid": Case(lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 5, 6)),
    "conv2d-reflect": Case(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 6)),
    "conv2d-circular": Case(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 6)),
    "conv2d-replicate": Case(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), (2, 5, 6)),
    "conv2d-kernel-1": Case(lambda: nn.Conv2d(4, 3, 1), (4, 5, 5)),
    "conv3d": Case(lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 3, 4, 3)),
    "conv3d-circular": Case(lambda: nn.Conv3d(1, 2, 2, padding=1, padding_mode="circular"), (1, 3, 3, 2)),
    "conv-transpose1d": Case(lambda: nn.ConvTranspose1d(3, 2, 3, stride=2), (3, 5)),
    "conv-transpose2d": Case(
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (4, 4, 4)
    ),
    "conv-transpose2d-dilation": Case(lambda: nn.ConvTranspose2d(3, 2, 3, dilation=2), (3, 4, 4)),
    "conv-transpose3d": Case(lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 2)),
}  # fmt: skip

EMBEDDING: dict[str, Case] = {
    "embedding": Case(lambda: nn.Embedding(7, 3), (5,), tokens=7),
    "embedding-padding": Case(lambda: nn.Embedding(7, 3, padding_idx=2), (5,), tokens=7),
    "embedding-twice": Case(
        lambda: Function(lambda s, x: torch.tanh(s.table(x)) + s.table(x.flip(1)), table=nn.Embedding(7, 3)),
        (5,), tokens=7,
    ),
    "embedding-one-hot": Case(
        lambda: Function(lambda s, x: F.one_hot(x, 7).to(s.w.dtype) @ s.w, w=_parameter(7, 3)), (5,), tokens=7
    ),
    "embedding-bag": Case(lambda: nn.EmbeddingBag(7, 3, mode="mean"), (5,), tokens=7),
    "embedding-bag-sum": Case(lambda: nn.EmbeddingBag(4, 3, mode="sum"), (5,), tokens=4),
    "embedding-bag-max": Case(lambda: nn.EmbeddingBag(7, 3, mode="max"), (5,), tokens=7),
    "embedding-bag-padding": Case(lambda: nn.EmbeddingBag(4, 3, mode="mean", padding_idx=1), (5,), tokens=4),
    "embedding-bag-max-padding": Case(
        lambda: nn.EmbeddingBag(3, 3, mode="max", padding_idx=2), (3,), tokens=3
    ),
    "embedding-bag-weights": Case(
        lambda: Function(_weighted_bag, table=_parameter(7, 3), scale=_parameter(5)), (5,)
    ),
    "embedding-bag-rows": Case(
        lambda: Function(
            lambda s, x: s.a(x.reshape(-1, 3)).unflatten(0, (-1, 2)), a=nn.EmbeddingBag(7, 3)
        ),
        (6,),
        tokens=7,
    ),
    "embedding-bag-offsets": Case(
        lambda: Function(
            lambda s, x: s.a(x.flatten(), torch.arange(x.shape[0] + 1) * 5),
            a=nn.EmbeddingBag(7, 3, include_last_offset=True),
        ),
        (5,), tokens=7,
    ),
    "embedding-bag-tied": Case(
        lambda: Function(lambda s, x: F.linear(s.a(x), s.a.weight), a=nn.EmbeddingBag(7, 3)), (5,), tokens=7
    ),
}  # fmt: skip

NORMALISATION: dict[str, Case] = {
    "layer-norm": Case(lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), (4, 6)),
    "layer-norm-two-axes": Case(lambda: nn.LayerNorm((4, 6)), (3, 4, 6)),
    "layer-norm-no-bias": Case(lambda: nn.LayerNorm(6, bias=False), (6,)),
    "layer-norm-plain": Case(
        lambda: nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3)), (4, 6)
    ),
    "rms-norm": Case(lambda: nn.RMSNorm(6), (4, 6)),
    "rms-norm-two-axes": Case(lambda: nn.RMSNorm((4, 6), eps=0.1), (2, 4, 6)),
    "rms-norm-plain": Case(
        lambda: nn.Sequential(nn.RMSNorm(6, elementwise_affine=False), nn.Linear(6, 3)), (4, 6)
    ),
    "group-norm": Case(lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6)), (2, 5, 5)),
    "group-norm-no-space": Case(lambda: nn.GroupNorm(2, 6), (6,)),
    "group-norm-1d": Case(lambda: nn.GroupNorm(2, 4), (4, 5)),
    "group-norm-3d": Case(lambda: nn.GroupNorm(2, 4), (4, 2, 3, 2)),
    "group-norm-plain": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4, affine=False)), (2, 4, 4)
    ),
    "group-norm-rows": Case(lambda: _rows(nn.GroupNorm(2, 4), 3), (3, 4, 2)),
    "group-norm-rows-between": Case(
        lambda: Function(
            lambda s, x: s.a(x.movedim(1, 0).flatten(0, 2)).unflatten(0, (2, -1, 3)).movedim(1, 0),
            a=nn.GroupNorm(2, 4),
        ),
        (2, 3, 4, 2),
    ),
    "instance-norm": Case(lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
    "instance-norm-1d": Case(lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
    "instance-norm-3d": Case(lambda: nn.InstanceNorm3d(2, affine=True), (2, 3, 2, 2)),
    "batch-norm-evaluated": Case(lambda: Function(_evaluated, a=nn.Conv2d(2, 3, 2), norm=nn.BatchNorm2d(3)),
                                 (2, 4, 4)),
}  # fmt: skip

COMBINED: dict[str, Case] = {
    "shared-twice": Case(lambda: Function(lambda s, x: s.a(torch.tanh(s.a(x))), a=nn.Linear(5, 5)), (5,)),
    "shared-thrice": Case(
        lambda: Function(lambda s, x: s.a(torch.tanh(s.a(torch.sin(s.a(x))))), a=nn.Linear(5, 5)), (3, 5)
    ),
    "shared-convolution": Case(
        lambda: Function(lambda s, x: s.a(torch.tanh(s.a(x))), a=nn.Conv2d(2, 2, 3, padding=1)), (2, 5, 5)
    ),
    "shared-norm": Case(lambda: Function(lambda s, x: s.n(s.n(x) + x), n=nn.LayerNorm(5)), (3, 5)),
    "tied-head": Case(lambda: Function(_tied_head, table=nn.Embedding(6, 4)), (5,), tokens=6),
    "tied-head-padding": Case(
        lambda: Function(_tied_head, table=nn.Embedding(6, 4, padding_idx=1)), (5,), tokens=6
    ),
    "tied-head-three": Case(
        lambda: Function(
            lambda s, x: F.linear(torch.tanh(s.table(x) + s.table(x.flip(1))), s.table.weight),
            table=nn.Embedding(6, 4),
        ),
        (4,), tokens=6,
    ),
    "tied-transposed": Case(
        lambda: Function(lambda s, x: F.linear(torch.tanh(F.linear(x, s.w)), s.w.t()), w=_parameter(4, 6)),
        (6,),
    ),
    "tied-both-sides": Case(
        lambda: Function(lambda s, x: torch.tanh(x @ s.w) + F.linear(x, s.w), w=_parameter(4, 4)), (3, 4)
    ),
    "chunked-disjoint": Case(
        lambda: Function(
            lambda s, x: F.linear(torch.tanh(F.linear(x, s.w[:4])), s.w[4:, :4]), w=_parameter(7, 6)
        ),
        (6,),
    ),
    "chunked-equal": Case(
        lambda: Function(lambda s, x: F.linear(x, s.w[:4]) * F.linear(x.sin(), s.w[:4]), w=_parameter(7, 6)),
        (3, 6),
    ),
    "chunked-overlapping": Case(
        lambda: Function(lambda s, x: F.linear(x, s.w[:4]) * F.linear(x, s.w[2:6]), w=_parameter(7, 6)),
        (3, 6),
    ),
    "chunked-qkv": Case(
        lambda: Function(
            lambda s, x: sum(F.linear(x, w).tanh() for w in s.w.reshape(3, 2, 6).unbind(0)),
            w=_parameter(6, 6)
        ),
        (3, 6),
    ),
    "frozen-weight": Case(lambda: _frozen(nn.Linear(6, 4), "weight"), (6,)),
    "frozen-bias": Case(lambda: nn.Sequential(_frozen(nn.Conv2d(2, 3, 3), "bias"), nn.Flatten()), (2, 5, 5)),
    "low-rank": Case(_LowRank, (3, 6)),
    "low-rank-merged": Case(
        lambda: Function(
            _merged, base=_frozen(nn.Linear(6, 4), "weight"), a=nn.Linear(6, 2, False),
            b=nn.Linear(2, 4, False)
        ),
        (3, 6),
    ),
    "weight-norm": Case(lambda: weight_norm(nn.Linear(6, 4)), (6,)),
    "weight-norm-convolution": Case(lambda: weight_norm(nn.Conv1d(2, 3, 2)), (2, 5)),
    "weight-norm-shared": Case(
        lambda: Function(lambda s, x: s.a(torch.tanh(s.a(x))), a=weight_norm(nn.Linear(5, 5))), (5,)
    ),
    "weight-standardised": Case(lambda: Function(_standardised, a=nn.Conv2d(2, 3, 3)), (2, 5, 5)),
    "weight-scaled": Case(lambda: Function(lambda s, x: F.linear(x, s.w * 0.3), w=_parameter(4, 6)), (6,)),
    "weight-joined": Case(
        lambda: Function(lambda s, x: F.linear(x, torch.cat([s.v, s.w])), v=_parameter(2, 6),
        w=_parameter(3, 6)),
        (6,),
    ),
    "weight-computed-and-tied": Case(
        lambda: Function(
            lambda s, x: F.linear(F.linear(x, s.w.exp()).tanh(), s.w.t()), w=_parameter(4, 6)
        ),
        (6,)
    ),
    "weight-orthogonal": Case(lambda: orthogonal(nn.Linear(6, 4)), (6,), fallback=True),
    "detached": Case(
        lambda: Function(lambda s, x: s.a(x) + F.linear(x, s.a.weight.detach()), a=nn.Linear(6, 4)), (6,)
    ),
    "scale": Case(lambda: Function(lambda s, x: torch.tanh(x) * s.w, w=_parameter(6)), (3, 6)),
    "scale-computed": Case(
        lambda: Function(lambda s, x: torch.tanh(x) * F.softplus(s.w[:6]) + s.w[6:], w=_parameter(12)), (3, 6)
    ),
    "scalar": Case(lambda: Function(lambda s, x: s.w * torch.tanh(x) - s.w, w=_parameter(1)), (3, 6)),
    "selected": Case(lambda: Function(lambda s, x: torch.where(x > 0, x, s.w), w=_parameter(6)), (3, 6)),
    "position-table": Case(
        lambda: Function(lambda s, x: s.a(x + s.p), p=_parameter(4, 6), a=nn.Linear(6, 3)), (4, 6)
    ),
    "position-lookup": Case(
        lambda: Function(
            lambda s, x: s.a(s.words(x) + s.places(torch.arange(x.shape[1]))), words=nn.Embedding(5, 4),
            places=nn.Embedding(6, 4), a=nn.Linear(4, 2),
        ),
        (4,), tokens=5,
    ),
    "repeated": Case(
        lambda: Function(lambda s, x: x * s.w.repeat(x.shape[0], 2, 1), w=_parameter(2, 3)), (4, 3)
    ),
    "class-token": Case(
        lambda: Function(
            lambda s, x: s.a(torch.cat([s.c.expand(x.shape[0], -1, -1), x], 1)), c=_parameter(1, 1, 6),
            a=nn.Linear(6, 3),
        ),
        (4, 6),
    ),
}  # fmt: skip

SEQUENCE: dict[str, Case] = {
    "attention": Case(
        lambda: Function(_attention, attention=nn.MultiheadAttention(8, 2, batch_first=True)), (5, 8)
    ),
    "attention-separate": Case(
        lambda: Function(
            lambda s, x: s.attention(x, x[..., :6], x[..., 2:], need_weights=False)[0],
            attention=nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True),
        ),
        (5, 8),
    ),
    "attention-cross": Case(
        lambda: Function(
            lambda s, x: s.attention(x, x.flip(1), x.flip(1), need_weights=False)[0],
            attention=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        (5, 8),
    ),
    "attention-bias": Case(
        lambda: Function(
            _attention, attention=nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)
        ),
        (5, 8),
    ),
    "attention-masks": Case(lambda: Function(_masked, attention=nn.MultiheadAttention(8, 2)), (5, 8)),
    "transformer": Case(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (3, 8)),
    "lstm": Case(lambda: Function(lambda s, x: s.r(x)[0], r=nn.LSTM(4, 3, batch_first=True)), (5, 4)),
    "lstm-both-ways": Case(
        lambda: Function(lambda s, x: s.r(x)[0], r=nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)),
        (4, 4),
    ),
    "lstm-projected": Case(
        lambda: Function(lambda s, x: s.r(x)[0], r=nn.LSTM(4, 5, proj_size=3, batch_first=True)), (3, 4)
    ),
    "lstm-packed": Case(
        lambda: Function(_packed, r=nn.LSTM(3, 2, batch_first=True, bidirectional=True)), (3, 3)
    ),
    "lstm-packed-layers": Case(
        lambda: Function(_packed, r=nn.LSTM(3, 2, 2, batch_first=True, bidirectional=True)), (4, 3)
    ),
    "lstm-packed-projected": Case(
        lambda: Function(_packed, r=nn.LSTM(3, 4, bias=False, proj_size=2, batch_first=True)), (4, 3)
    ),
    "lstm-cell": Case(lambda: Function(_cells, r=nn.LSTMCell(4, 3)), (3, 4)),
    "gru": Case(lambda: Function(lambda s, x: s.r(x)[0][:, -1], r=nn.GRU(4, 3, batch_first=True)), (5, 4)),
    "gru-packed": Case(
        lambda: Function(_packed, r=nn.GRU(3, 2, batch_first=True, bidirectional=True)), (4, 3)
    ),
    "gru-packed-tokens": Case(
        lambda: Function(_packed_tokens, table=nn.Embedding(5, 3), r=nn.GRU(3, 2)), (3,), tokens=5
    ),
    "gru-cell": Case(lambda: Function(_cells, r=nn.GRUCell(4, 3)), (3, 4)),
    "rnn": Case(lambda: Function(lambda s, x: s.r(x)[0], r=nn.RNN(4, 3, batch_first=True)), (3, 4)),
    "rnn-packed": Case(
        lambda: Function(_packed, r=nn.RNN(3, 2, nonlinearity="relu", batch_first=True)), (3, 3)
    ),
    "rnn-cell": Case(lambda: Function(_cells, r=nn.RNNCell(4, 3)), (3, 4)),
}  # fmt: skip

OTHER: dict[str, Case] = {
    "prelu": Case(lambda: nn.PReLU(3), (3, 4), fallback=True),
    "subclass": Case(lambda: _Subclass(6, 4), (6,)),
    "in-place": Case(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 2), nn.ELU(inplace=True)),
        (6,),
    ),
    "checkpoint": Case(lambda: _checkpointed(False), (6,)),
    "unused": Case(lambda: Function(lambda s, x: s.a(x), a=nn.Linear(6, 3), b=nn.Linear(2, 2)), (6,)),
}  # fmt: skip

CASES: dict[str, Case] = LINEAR | CONVOLUTION | EMBEDDING | NORMALISATION | COMBINED | SEQUENCE | OTHER


def module_of(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with random parameters, so that nothing is zero."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = CASES[name].build()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)
    return module.to(dtype)


def batch_of(
    name: str, size: int, dtype: torch.dtype = torch.float64, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Inputs and targets for the model; examples differ in scale, so that some are clipped and some not."""
    case = CASES[name]
    draw = torch.Generator().manual_seed(seed)
    if case.tokens:
        inputs = torch.randint(case.tokens, (size, *case.shape), generator=draw)
    else:
        scale = torch.linspace(0.2, 2.0, max(size, 1))[:size].reshape(-1, *[1] * len(case.shape))
        inputs = (torch.randn(size, *case.shape, generator=draw) * scale).to(dtype)
    return inputs, torch.randn(size, generator=draw).to(dtype)
