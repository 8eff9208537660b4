"""Models by name, small enough for devices, and seeded without touching the global generator.

Each exports with a symbolic batch size. They take what the data gives: images `[B, C, H, W]`, sequences
`[B, T, D]`, token ids `[B, T]` or plain features `[B, D]`.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mycelia.engine.errors import ConfigError
from mycelia.engine.plugins import check_options, chosen, is_reference, resolve
from mycelia.engine.rng import derive

__all__ = ["MODELS", "build"]

Shape = tuple[int, ...]


def build(
    name: str, input_shape: Sequence[int], classes: int | None, *, seed: int = 0, **options: object
) -> nn.Module:
    """The model of that name for inputs of one example's shape, initialised from the seed.

    `mlp(hidden=(200, 200))`, `lenet`, `cnn`, `tanh-cnn(width=32)`, `resnet8(norm="group"|"batch")`,
    `lstm(hidden=128, layers=1, vocabulary=0, per_token=False)`,
    `transformer-tiny(width=64, heads=4, layers=2, vocabulary=0, per_token=False)`, or a
    `package.module:function`, which is given `input_shape` and `classes` where it has such parameters.

    Args:
        name: the name or reference.
        input_shape: shape of one example, without the batch axis.
        classes: number of outputs; None: regression, one output.
        seed: names the stream the initial values come from.
        options: the model's own, as above.

    Raises:
        ConfigError: unknown name or option, or an input shape the architecture does not take.

    >>> sum(p.numel() for p in build("cnn", (1, 28, 28), 10).parameters())
    1663370
    """
    who = f"model {name!r}"
    factory: Callable[..., Any]
    if is_reference(name):
        factory = resolve(name, kind="model")
    else:
        factory = chosen(MODELS, name, kind="model", who="model", also="package.module:function")
    shape = tuple(int(size) for size in input_shape)
    if any(size < 1 for size in shape):
        raise ConfigError(f"an example has shape {shape}", rule="sizes are at least 1", who=who)
    if classes is not None and classes < 1:
        raise ConfigError(f"classes is {classes}", rule="at least 1, or None for regression", who=who)
    given: dict[str, object] = {"input_shape": shape, "classes": classes}
    if name not in MODELS:
        given = _accepted(factory, given)
    check_options(factory, options, who, given=given)
    # The modules draw their initial values from torch's CPU generator, which is put back afterwards.
    # Seeding through torch.manual_seed would reseed CUDA too, which fork_rng(devices=[]) does not put back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, "model"))
        model = factory(**given, **options)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"returned a {type(model).__name__}", rule="a torch.nn.Module", who=who)
    return model


def _accepted(factory: Callable[..., Any], given: dict[str, object]) -> dict[str, object]:
    """Those of `given` that a user's factory has a parameter for."""
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {key: value for key, value in given.items() if key in parameters}


def _mlp(input_shape: Shape, classes: int | None, *, hidden: Sequence[int] = (200, 200)) -> nn.Module:
    widths = hidden if isinstance(hidden, list | tuple) else []
    if not widths or any(not isinstance(width, int) or width < 1 for width in widths):
        raise ConfigError(
            f"hidden is {hidden!r}", rule="a list of widths, each at least 1", who="model 'mlp'"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = math.prod(input_shape)
    for i, following in enumerate(hidden, start=1):
        layers[f"fc{i}"] = nn.Linear(width, following)
        layers[f"relu{i}"] = nn.ReLU()
        width = following
    layers["out"] = nn.Linear(width, classes or 1)
    return nn.Sequential(layers)


def _lenet(input_shape: Shape, classes: int | None) -> nn.Module:
    channels, height, width = _image("lenet", input_shape, smallest=12)
    # 5×5 without padding takes 4 off, between two poolings by 2.
    features = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(features, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            out=nn.Linear(84, classes or 1),
        )
    )


def _cnn(input_shape: Shape, classes: int | None) -> nn.Module:
    """McMahan et al., "Communication-efficient learning of deep networks", AISTATS 2017, section 3."""
    channels, height, width = _image("cnn", input_shape, smallest=4)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * (height // 4) * (width // 4), 512),
            relu3=nn.ReLU(),
            out=nn.Linear(512, classes or 1),
        )
    )


class _Standardised(nn.Module):
    """Each image for itself to mean 0 and variance 1: no statistic over examples, so nothing for ε to pay."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean((1, 2, 3), keepdim=True)
        variance = centred.square().mean((1, 2, 3), keepdim=True)
        return centred * (variance + 1e-3).rsqrt()


def _tanh_cnn(input_shape: Shape, classes: int | None, *, width: int = 32) -> nn.Module:
    """For private training: two strided convolutions with tanh, and a linear layer.

    Kernels, strides and tanh are those of Papernot et al., "Tempered sigmoid activations for deep learning
    with differential privacy", AAAI 2021, section 5; without its pools and hidden layer, which cost time and
    accuracy here, and with images standardised one by one.
    """
    channels, height, side = _image("tanh-cnn", input_shape, smallest=4)
    _positive("tanh-cnn", width=width)
    return nn.Sequential(
        OrderedDict(
            standardised=_Standardised(),
            conv1=nn.Conv2d(channels, width, 8, stride=2, padding=3),
            tanh1=nn.Tanh(),
            conv2=nn.Conv2d(width, width, 4, stride=2, padding=1),
            tanh2=nn.Tanh(),
            flatten=nn.Flatten(),
            out=nn.Linear(width * (height // 4) * (side // 4), classes or 1),
        )
    )


class _ResidualBlock(nn.Module):
    """Two 3×3 convolutions, each normed, beside a 1×1 projection where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = norm(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            projection = nn.Conv2d(channels, out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=projection, norm=norm(out)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class _MeanPool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _resnet8(input_shape: Shape, classes: int | None, *, norm: str = "group") -> nn.Module:
    """He et al., "Deep residual learning", CVPR 2016, section 4.2 with n = 1: 16, 32 and 64 channels."""
    channels, _, _ = _image("resnet8", input_shape, smallest=4)
    if norm not in {"group", "batch"}:
        raise ConfigError(f"norm is {norm!r}", rule="group or batch", who="model 'resnet8'")

    def make_norm(width: int) -> nn.Module:
        return nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(8, width)

    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(channels, 16, 3, padding=1, bias=False),
            norm=make_norm(16),
            relu=nn.ReLU(),
            block1=_ResidualBlock(16, 16, 1, make_norm),
            block2=_ResidualBlock(16, 32, 2, make_norm),
            block3=_ResidualBlock(32, 64, 2, make_norm),
            pool=_MeanPool(),
            out=nn.Linear(64, classes or 1),
        )
    )


class _LSTM(nn.Module):
    def __init__(self, inputs: nn.Module, width: int, hidden: int, layers: int, out: int, each: bool) -> None:
        super().__init__()
        self.inputs = inputs
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, out)
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.inputs(x))
        return self.out(states if self.each else states[:, -1])  # type: ignore[no-any-return]


def _lstm(
    input_shape: Shape,
    classes: int | None,
    *,
    hidden: int = 128,
    layers: int = 1,
    vocabulary: int = 0,
    per_token: bool = False,
) -> nn.Module:
    """Outputs `[B, classes]` from the last state, or `[B, T, classes]` with `per_token`."""
    _positive("lstm", hidden=hidden, layers=layers)
    inputs, width = _sequence("lstm", input_shape, classes, vocabulary, per_token, width=hidden)
    return _LSTM(inputs, width, hidden, layers, classes or 1, per_token)


class _Attention(nn.Module):
    """Multi-head self-attention, softmax(QKᵀ/√d)V for each head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _TransformerBlock(nn.Module):
    """Layer norm before attention and before a GELU feed-forward of twice the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        x = x + self.attention(self.norm1(x), causal)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class _Transformer(nn.Module):
    def __init__(
        self, inputs: nn.Module, length: int, width: int, heads: int, layers: int, out: int, each: bool
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.position = nn.Parameter(torch.empty(length, width).normal_(std=0.02))
        self.blocks = nn.ModuleList(_TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, out)
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x) + self.position
        for block in self.blocks:
            x = block(x, self.each)
        x = self.norm(x)
        return self.out(x if self.each else x.mean(1))  # type: ignore[no-any-return]


def _transformer_tiny(
    input_shape: Shape,
    classes: int | None,
    *,
    width: int = 64,
    heads: int = 4,
    layers: int = 2,
    vocabulary: int = 0,
    per_token: bool = False,
) -> nn.Module:
    """Outputs `[B, classes]` from the mean over T; with `per_token` `[B, T, classes]`, looking back only."""
    _positive("transformer-tiny", width=width, heads=heads, layers=layers)
    if width % heads:
        raise ConfigError(
            f"width {width} and heads {heads}", rule="heads divide the width", who="model 'transformer-tiny'"
        )
    inputs, features = _sequence("transformer-tiny", input_shape, classes, vocabulary, per_token, width=width)
    if not isinstance(inputs, nn.Embedding):
        inputs = nn.Linear(features, width)
    return _Transformer(inputs, input_shape[0], width, heads, layers, classes or 1, per_token)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": _mlp,
    "lenet": _lenet,
    "cnn": _cnn,
    "tanh-cnn": _tanh_cnn,
    "resnet8": _resnet8,
    "lstm": _lstm,
    "transformer-tiny": _transformer_tiny,
}


def _image(name: str, input_shape: Shape, smallest: int) -> tuple[int, int, int]:
    who = f"model {name!r}"
    if len(input_shape) != 3:
        raise ConfigError(
            f"an example has shape {input_shape}", rule="it takes images C×H×W", fix="use mlp", who=who
        )
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise ConfigError(
            f"images are {height}×{width}",
            rule=f"the smallest it takes is {smallest}×{smallest}",
            fix="use mlp" if min(height, width) < 4 else "use mlp, cnn or resnet8",
            who=who,
        )
    return channels, height, width


def _sequence(
    name: str, input_shape: Shape, classes: int | None, vocabulary: int, per_token: bool, *, width: int
) -> tuple[nn.Module, int]:
    """The module that makes `[B, T, width]` of token ids, or nothing for sequences, and the width."""
    who = f"model {name!r}"
    if len(input_shape) == 2:
        if vocabulary:
            raise ConfigError(
                f"an example has shape {input_shape}, vocabulary is {vocabulary}",
                rule="token ids have shape (T,)",
                who=who,
            )
        return nn.Identity(), input_shape[1]
    if len(input_shape) != 1:
        raise ConfigError(
            f"an example has shape {input_shape}",
            rule="it takes token ids (T,) or sequences (T, D)",
            fix="use cnn or resnet8 for images" if len(input_shape) == 3 else "",
            who=who,
        )
    vocabulary = vocabulary or (classes or 0 if per_token else 0)
    if vocabulary < 1:
        raise ConfigError(
            "token ids without a vocabulary",
            rule="ids lie in 0..vocabulary-1",
            fix=f'model = {{ name = "{name}", vocabulary = N }}',
            who=who,
        )
    return nn.Embedding(vocabulary, width), width


def _positive(name: str, **sizes: int) -> None:
    for key, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"{key} is {size!r}", rule="an integer, at least 1", who=f"model {name!r}")
