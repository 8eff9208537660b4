"""The models every engine feature is held against: a table, one row a model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.program import Program

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One model with a loss and a source of batches.

    Attributes:
        build: makes the module (float32; tests turn it to float64 where `double`).
        shape: of one input; integers below `vocabulary` when that is set.
        classes: targets are integers below it; 0 means float targets of shape `target_shape`.
        double: the model runs in float64.
        random: the training pass draws random numbers.
        coupled: the training pass mixes the examples of a batch, as BatchNorm does.
        flow: uses torch's control-flow operators; `plain` on the module turns them to Python's.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int = 4
    target_shape: tuple[int, ...] = ()
    vocabulary: int = 0
    loss: Loss = lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")
    double: bool = True
    random: bool = False
    coupled: bool = False
    flow: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    def module(self, *, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().to(self.dtype)

    def reference(self) -> nn.Module:
        """The same module, without torch's control-flow operators."""
        module = self.module()
        for part in module.modules():
            part.plain = True  # type: ignore[assignment]
        return module

    def batch(self, size: int, *, seed: int = 1) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        if self.vocabulary:
            inputs = torch.randint(self.vocabulary, (size, *self.shape), generator=draw)
        else:
            inputs = torch.randn(size, *self.shape, generator=draw, dtype=torch.float64).to(self.dtype)
        if self.classes:
            return inputs, torch.randint(self.classes, (size, *self.target_shape), generator=draw)
        return inputs, torch.randn(size, *self.target_shape, generator=draw, dtype=torch.float64).to(
            self.dtype
        )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)
    )


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4),
    )  # fmt: skip


def norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(2, channels)


class Block(nn.Module):
    """The basic residual block of He et al. (2016)."""

    def __init__(self, kind: str, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = norm(kind, after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = norm(kind, after)
        self.skip = nn.Sequential()
        if stride != 1 or before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(kind, after))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


def resnet(kind: str, blocks: tuple[int, ...], width: int = 4) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(kind, width), nn.ReLU()]
    before = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            after = width * 2 ** min(stage, 2)
            layers.append(Block(kind, before, after, 2 if stage in (1, 2) and number == 0 else 1))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 4))


def depthwise() -> nn.Module:
    """The inverted residual's three convolutions (Sandler et al. 2018)."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True),
        nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True),
        nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cell = cell(5, 6, **options)
        self.first = options.get("batch_first", False)
        self.head = nn.Linear(6 * (2 if options.get("bidirectional") else 1), 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(x if self.first else x.transpose(0, 1))
        return self.head(states[:, -1] if self.first else states[-1])


class Attention(nn.Module):
    def __init__(self, first: bool, dropout: float = 0.0, weights: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=first, dropout=dropout)
        self.head = nn.Linear(8, 4)
        self.first, self.weights = first, weights

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(0, 1)
        y, _ = self.attention(x, x, x, need_weights=self.weights)
        return self.head(y.mean(1 if self.first else 0))


class Transformer(nn.Module):
    def __init__(self, first: bool, dropout: float = 0.0, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return self.head(self.encoder(x).mean(1))
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


class TiedLanguageModel(nn.Module):
    """A causal language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.zeros(6, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.triu(torch.full((6, 6), -math.inf), 1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        return self.head(self.layer(x, src_mask=self.mask, is_causal=True))


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


class LoRA(nn.Module):
    """A frozen linear map and a trained one of low rank beside it (Hu et al. 2022)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 3)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def lora() -> nn.Module:
    return nn.Sequential(LoRA(nn.Linear(12, 8), 2), nn.GELU(), LoRA(nn.Linear(8, 4), 2))


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU(), nn.AvgPool1d(2),
        nn.Conv1d(6, 4, 3, dilation=2), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
    )  # fmt: skip


class UNet(nn.Module):
    """One level down, one up, and the skip between (Ronneberger et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.leave = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.enter(x))
        low = F.relu(self.down(F.max_pool2d(high, 2)))
        return self.leave(torch.cat([high, self.up(low)], 1))


def pixel_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none").mean((1, 2))


def frozen_trunk() -> nn.Module:
    trunk = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU()).requires_grad_(False)
    return nn.Sequential(trunk, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(12, 4)
        self.spare = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.mul_(2.0).add_(0.5)
        x[:, 0] = x[:, 1]
        x = F.relu_(x)
        return F.leaky_relu(self.second(x), 0.1, inplace=True)


@torch.library.custom_op("mycelia_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
cube.register_vmap(lambda info, dims, x: (cube(x), dims[0]))


class CustomOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(cube(torch.tanh(self.first(x))))


class Cond(nn.Module):
    """Two branches chosen by the batch's mean."""

    plain = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            return self.first(x).sin() if x.sum() > 0 else self.second(x).cos()
        return torch.cond(x.sum() > 0, lambda x: self.first(x).sin(), lambda x: self.second(x).cos(), (x,))


class While(nn.Module):
    """Halves a value until it is small, then reads it out."""

    plain = False

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops import while_loop

        def more(step: Tensor, value: Tensor) -> Tensor:
            return (step < 5) & (value.abs().max() > 0.25)

        def once(step: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return step + 1, value * 0.5

        state = torch.zeros((), dtype=torch.int64), self.enter(x)
        if self.plain:
            while more(*state):
                state = once(*state)
        else:
            state = while_loop(more, once, state)
        return self.leave(state[1])


class Scan(nn.Module):
    """An Elman network as a scan over time."""

    plain = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops import scan

        def once(state: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.tanh(value + F.linear(state, self.state.weight, self.state.bias))
            return new, new.clone()

        values = self.inner(x).transpose(0, 1)
        state = torch.zeros_like(values[0])
        if self.plain:
            for value in values:
                state, _ = once(state, value)
        else:
            state, _ = scan(once, state, values)
        return self.head(state)


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))


def channel_dropout() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4))


class TwoOutputs(nn.Module):
    """Returns a dictionary; only one of its tensors has the batch in front."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = torch.relu(self.body(x))
        return {"logits": self.head(features), "more": (features, features.t())}


IMAGE, SERIES = (3, 8, 8), (5, 5)

ZOO: dict[str, Case] = {
    case.name: case
    for case in (
        Case("mlp", mlp, (3, 4)),
        Case("lenet", lenet, (1, 12, 12)),
        Case("resnet8-group", lambda: resnet("group", (1, 1, 1)), IMAGE),
        Case("resnet8-batch", lambda: resnet("batch", (1, 1, 1)), IMAGE, coupled=True),
        Case("resnet18-group", lambda: resnet("group", (2, 2, 2, 2)), IMAGE),
        Case("resnet18-batch", lambda: resnet("batch", (2, 2, 2, 2)), IMAGE, coupled=True),
        Case("depthwise", depthwise, IMAGE, coupled=True),
        Case("lstm", lambda: Recurrent(nn.LSTM, batch_first=True), SERIES),
        Case("gru", lambda: Recurrent(nn.GRU), SERIES),
        Case(
            "lstm-deep",
            lambda: Recurrent(nn.LSTM, batch_first=True, num_layers=2, dropout=0.3, bidirectional=True),
            SERIES,
            random=True,
        ),
        Case(
            "gru-deep",
            lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.3, bidirectional=True),
            SERIES,
            random=True,
        ),
        Case("attention", lambda: Attention(True), (5, 8)),
        Case("attention-sequence-first", lambda: Attention(False), (5, 8)),
        Case("attention-dropout", lambda: Attention(True, 0.2), (5, 8), random=True),
        Case("attention-weights", lambda: Attention(False, 0.2, weights=True), (5, 8), random=True),
        Case("transformer", lambda: Transformer(True), (5, 8)),
        Case("transformer-sequence-first", lambda: Transformer(False, norm_first=True), (5, 8)),
        Case("transformer-dropout", lambda: Transformer(False, 0.1), (5, 8), random=True),
        Case("tied-head", TiedLanguageModel, (6,), 11, (6,), vocabulary=11, loss=token_loss),
        Case("lora", lora, (12,)),
        Case("conv1d", conv1d, (3, 12)),
        Case("unet", UNet, (1, 8, 8), 3, (8, 8), loss=pixel_loss),
        Case("frozen-trunk", frozen_trunk, (3, 12), coupled=True),
        Case("unused", Unused, (12,)),
        Case("in-place", InPlace, (12,)),
        Case("custom-operator", CustomOperator, (12,)),
        Case("dropout", dropout, (12,), random=True),
        Case("channel-dropout", channel_dropout, (1, 4, 4), random=True),
        Case(
            "regression", lambda: nn.Linear(12, 2), (12,), 0, (2,), loss=lambda o, t: ((o - t) ** 2).mean(1)
        ),
        Case(
            "dictionary",
            TwoOutputs,
            (12,),
            loss=lambda o, t: F.cross_entropy(o["logits"], t, reduction="none") + o["more"][0].mean(1),
        ),
        Case("cond", Cond, (12,), flow=True, coupled=True),
        Case("while", While, (12,), flow=True, coupled=True),
        Case("scan", Scan, SERIES, flow=True),
    )
}


@functools.cache
def captured(name: str) -> Program:
    """The Program of a model, captured once a session: export takes a second or two."""
    case = ZOO[name]
    return capture(case.module(), case.loss, case.batch(2))
