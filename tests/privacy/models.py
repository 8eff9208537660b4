"""Small models, one for each way a parameter can be used, with what a batch for them looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CASES", "Case", "batch_of", "loss", "module_of"]


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


def _attention(self: Any, x: Tensor) -> Tensor:
    return self.attention(x, x, x, need_weights=False)[0]


CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(6, 4), (6,)),
    "linear-no-bias": Case(lambda: nn.Linear(6, 4, bias=False), (6,)),
    "linear-ghost": Case(lambda: nn.Linear(12, 10), (2, 12)),
    "linear-formed": Case(lambda: nn.Linear(3, 2), (9, 3)),
    "linear-two-axes": Case(lambda: nn.Linear(3, 2), (2, 4, 3)),
    "matmul": Case(lambda: Function(lambda s, x: x @ s.w, w=_parameter(6, 4)), (6,)),
    "matmul-transposed": Case(lambda: Function(lambda s, x: x @ s.w.t(), w=_parameter(4, 6)), (3, 6)),
    "conv1d": Case(lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 9)),
    "conv1d-stride-dilation": Case(lambda: nn.Conv1d(3, 4, 3, stride=2, dilation=2), (3, 13)),
    "conv2d": Case(lambda: nn.Conv2d(2, 3, 3), (2, 7, 6)),
    "conv2d-ghost": Case(lambda: nn.Conv2d(6, 8, 3), (6, 4, 4)),
    "conv2d-stride": Case(lambda: nn.Conv2d(2, 3, 3, stride=(2, 1)), (2, 8, 7)),
    "conv2d-dilation": Case(lambda: nn.Conv2d(2, 3, 3, dilation=(1, 2)), (2, 7, 8)),
    "conv2d-groups": Case(lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 6, 6)),
    "conv2d-depthwise": Case(lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (4, 5, 5)),
    "conv2d-same": Case(lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 5, 6)),
    "conv2d-same-dilated": Case(lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=2), (2, 7, 8)),
    "conv2d-valid": Case(lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 5, 6)),
    "conv2d-reflect": Case(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 6)),
    "conv2d-circular": Case(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 6)),
    "conv2d-replicate": Case(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), (2, 5, 6)),
    "conv2d-kernel-1": Case(lambda: nn.Conv2d(4, 3, 1), (4, 5, 5)),
    "conv3d": Case(lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 3, 4, 3)),
    "conv-transpose1d": Case(lambda: nn.ConvTranspose1d(3, 2, 3, stride=2), (3, 5)),
    "conv-transpose2d": Case(
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (4, 4, 4)
    ),
    "conv-transpose2d-dilation": Case(lambda: nn.ConvTranspose2d(3, 2, 3, dilation=2), (3, 4, 4)),
    "conv-transpose3d": Case(lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 2)),
    "embedding": Case(lambda: nn.Embedding(7, 3), (5,), tokens=7),
    "embedding-padding": Case(lambda: nn.Embedding(7, 3, padding_idx=2), (5,), tokens=7),
    "embedding-bag": Case(lambda: nn.EmbeddingBag(7, 3, mode="mean"), (5,), tokens=7, fallback=True),
    "layer-norm": Case(lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), (4, 6)),
    "layer-norm-two-axes": Case(lambda: nn.LayerNorm((4, 6)), (3, 4, 6)),
    "rms-norm": Case(lambda: nn.RMSNorm(6), (4, 6)),
    "group-norm": Case(lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6)), (2, 5, 5)),
    "instance-norm": Case(lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4), fallback=True),
    "shared-twice": Case(lambda: Function(lambda s, x: s.a(torch.tanh(s.a(x))), a=nn.Linear(5, 5)), (5,)),
    "shared-thrice": Case(
        lambda: Function(lambda s, x: s.a(torch.tanh(s.a(torch.sin(s.a(x))))), a=nn.Linear(5, 5)), (3, 5)
    ),
    "shared-convolution": Case(
        lambda: Function(lambda s, x: s.a(torch.tanh(s.a(x))), a=nn.Conv2d(2, 2, 3, padding=1)), (2, 5, 5)
    ),
    "shared-norm": Case(lambda: Function(lambda s, x: s.n(s.n(x) + x), n=nn.LayerNorm(5)), (3, 5)),
    "tied-head": Case(lambda: Function(_tied_head, table=nn.Embedding(6, 4)), (5,), tokens=6),
    "tied-transposed": Case(
        lambda: Function(lambda s, x: F.linear(torch.tanh(F.linear(x, s.w)), s.w.t()), w=_parameter(4, 6)),
        (6,),
    ),
    "chunked-disjoint": Case(
        lambda: Function(
            lambda s, x: F.linear(torch.tanh(F.linear(x, s.w[:4])), s.w[4:, :4]), w=_parameter(7, 6)
        ),
        (6,),
    ),
    "chunked-overlapping": Case(
        lambda: Function(lambda s, x: F.linear(x, s.w[:4]) * F.linear(x, s.w[2:6]), w=_parameter(7, 6)),
        (3, 6),
    ),
    "frozen-weight": Case(lambda: _frozen(nn.Linear(6, 4), "weight"), (6,)),
    "frozen-bias": Case(lambda: nn.Sequential(_frozen(nn.Conv2d(2, 3, 3), "bias"), nn.Flatten()), (2, 5, 5)),
    "scale": Case(lambda: Function(lambda s, x: torch.tanh(x) * s.w, w=_parameter(6)), (3, 6)),
    "scalar": Case(lambda: Function(lambda s, x: s.w * torch.tanh(x) - s.w, w=_parameter(1)), (3, 6)),
    "position-table": Case(
        lambda: Function(lambda s, x: s.a(x + s.p), p=_parameter(4, 6), a=nn.Linear(6, 3)), (4, 6)
    ),
    "class-token": Case(
        lambda: Function(
            lambda s, x: s.a(torch.cat([s.c.expand(x.shape[0], -1, -1), x], 1)), c=_parameter(1, 1, 6),
            a=nn.Linear(6, 3),
        ),
        (4, 6),
    ),
    "prelu": Case(lambda: nn.PReLU(3), (3, 4), fallback=True),
    "bilinear": Case(
        lambda: Function(lambda s, x: s.b(x[:, :3], x[:, 3:]), b=nn.Bilinear(3, 3, 2)), (6,), fallback=True
    ),
    "weight-norm": Case(
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), (6,), fallback=True
    ),
    "subclass": Case(lambda: _Subclass(6, 4), (6,)),
    "in-place": Case(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 2), nn.ELU(inplace=True)),
        (6,),
    ),
    "checkpoint": Case(lambda: _checkpointed(False), (6,)),
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
    "lstm": Case(lambda: Function(lambda s, x: s.r(x)[0], r=nn.LSTM(4, 3, batch_first=True)), (5, 4)),
    "lstm-both-ways": Case(
        lambda: Function(lambda s, x: s.r(x)[0], r=nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)),
        (4, 4),
    ),
    "gru": Case(lambda: Function(lambda s, x: s.r(x)[0][:, -1], r=nn.GRU(4, 3, batch_first=True)), (5, 4)),
    "rnn": Case(lambda: Function(lambda s, x: s.r(x)[0], r=nn.RNN(4, 3, batch_first=True)), (5, 4)),
    "unused": Case(lambda: Function(lambda s, x: s.a(x), a=nn.Linear(6, 3), b=nn.Linear(2, 2)), (6,)),
}  # fmt: skip


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
