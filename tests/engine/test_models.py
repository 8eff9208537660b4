"""Models by name: sizes from the papers, export, seeds, shapes that do not fit."""

import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from mycelia.engine.errors import ConfigError
from mycelia.engine.models import MODELS, build

torch.set_num_threads(1)

# name, options, shape of an example, classes, shape of one output
CASES: list[tuple[str, dict[str, Any], tuple[int, ...], int | None, tuple[int, ...]]] = [
    ("mlp", {}, (1, 28, 28), 10, (10,)),
    ("mlp", {"hidden": [8]}, (30,), None, (1,)),
    ("lenet", {}, (1, 28, 28), 10, (10,)),
    ("lenet", {}, (3, 12, 17), 4, (4,)),
    ("cnn", {}, (1, 8, 8), 10, (10,)),
    ("cnn", {}, (3, 9, 4), None, (1,)),
    ("tanh-cnn", {}, (1, 28, 28), 10, (10,)),
    ("tanh-cnn", {"width": 5}, (3, 9, 4), None, (1,)),
    ("resnet8", {}, (3, 32, 32), 10, (10,)),
    ("resnet8", {}, (1, 4, 4), 10, (10,)),
    ("resnet8", {"norm": "batch"}, (1, 8, 8), 10, (10,)),
    ("lstm", {"vocabulary": 20}, (7,), 3, (3,)),
    ("lstm", {"hidden": 16, "layers": 2}, (7, 5), 3, (3,)),
    ("lstm", {"per_token": True}, (7,), 20, (7, 20)),
    ("transformer-tiny", {"vocabulary": 20}, (7,), 3, (3,)),
    ("transformer-tiny", {}, (7, 5), None, (1,)),
    ("transformer-tiny", {"per_token": True}, (7,), 20, (7, 20)),
]
IDS = [f"{name}-{'x'.join(map(str, shape))}-{i}" for i, (name, _, shape, _, _) in enumerate(CASES)]


def inputs(batch: int, shape: tuple[int, ...], model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        return torch.randint(0, 20, (batch, *shape), generator=generator)
    return torch.randn(batch, *shape, generator=generator)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_sizes_are_those_of_the_papers() -> None:
    # McMahan et al. 2017 for mlp ("2NN") and cnn; LeCun et al. 1998 with dense second convolution for lenet.
    assert parameters(build("mlp", (1, 28, 28), 10)) == 199_210
    assert parameters(build("cnn", (1, 28, 28), 10)) == 1_663_370
    assert parameters(build("lenet", (1, 28, 28), 10)) == 61_706
    # Papernot et al. 2021: kernels of 8×8 and 4×4, here with one width; 28×28 is 7×7 after two strides of 2.
    tanh_cnn = (64 * 32 + 32) + (16 * 32 * 32 + 32) + (49 * 32 * 10 + 10)
    assert parameters(build("tanh-cnn", (1, 28, 28), 10)) == tanh_cnn
    # 3×3 convolutions 3→16→16→16→32→32→64→64, projections 16→32→64, nine norms, 64→10.
    convolutions = 9 * (3 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 16 * 32 + 32 * 64
    norms = 2 * (3 * 16 + 3 * 32 + 3 * 64)
    assert parameters(build("resnet8", (3, 32, 32), 10)) == convolutions + norms + 650
    # Hochreiter's gates with torch's two biases, and a linear layer.
    assert parameters(build("lstm", (7, 5), 3, hidden=16)) == 4 * 16 * (5 + 16 + 2) + 16 * 3 + 3


@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning")  # torch's LSTM export
@pytest.mark.parametrize(("name", "options", "shape", "classes", "output"), CASES, ids=IDS)
def test_exports_with_a_symbolic_batch(
    name: str, options: dict[str, Any], shape: tuple[int, ...], classes: int | None, output: tuple[int, ...]
) -> None:
    model = build(name, shape, classes, **options)
    program = export(model, (inputs(4, shape, model),), dynamic_shapes=({0: Dim("batch", min=1)},)).module()
    for batch in (1, 257):
        x = inputs(batch, shape, model)
        expected = model(x)
        assert expected.shape == (batch, *output)
        torch.testing.assert_close(program(x), expected)


@pytest.mark.parametrize(("name", "options", "shape", "classes", "output"), CASES, ids=IDS)
def test_every_parameter_gets_a_gradient(
    name: str, options: dict[str, Any], shape: tuple[int, ...], classes: int | None, output: tuple[int, ...]
) -> None:
    model = build(name, shape, classes, **options)
    model(inputs(8, shape, model)).square().sum().backward()
    assert [key for key, value in model.named_parameters() if value.grad is None] == []
    assert all(torch.isfinite(value.grad).all() for value in model.parameters() if value.grad is not None)


@pytest.mark.parametrize("name", ["lstm", "transformer-tiny"])
def test_the_prediction_of_a_token_does_not_see_later_ones(name: str) -> None:
    model = build(name, (6,), 20, per_token=True)
    x = inputs(3, (6,), model)
    changed = x.clone()
    changed[:, 4:] = (x[:, 4:] + 1) % 20
    torch.testing.assert_close(model(x)[:, :4], model(changed)[:, :4])
    assert not torch.equal(model(x)[:, 4:], model(changed)[:, 4:])


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_alone_decides_the_initial_values(name: str) -> None:
    shape = (7, 5) if name in {"lstm", "transformer-tiny"} else (1, 12, 12)
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    first = build(name, shape, 10, seed=1).state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(456)
    again, other = build(name, shape, 10, seed=1).state_dict(), build(name, shape, 10, seed=2).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_the_resnet_has_the_norm_asked_for() -> None:
    def norms(model: nn.Module) -> set[type]:
        return {type(module) for module in model.modules() if "Norm" in type(module).__name__}

    assert norms(build("resnet8", (3, 32, 32), 10)) == {nn.GroupNorm}
    assert norms(build("resnet8", (3, 32, 32), 10, norm="batch")) == {nn.BatchNorm2d}


@pytest.mark.parametrize(("name", "smallest"), [("lenet", 12), ("cnn", 4), ("tanh-cnn", 4), ("resnet8", 4)])
def test_a_small_image_is_refused_with_the_smallest_size(name: str, smallest: int) -> None:
    build(name, (1, smallest, smallest), 10)(torch.zeros(1, 1, smallest, smallest))
    with pytest.raises(
        ConfigError, match=f"{smallest}×{smallest - 1}.*\n.*smallest it takes is {smallest}×{smallest}"
    ):
        build(name, (1, smallest, smallest - 1), 10)


@pytest.mark.parametrize("name", ["lenet", "cnn", "tanh-cnn", "resnet8"])
@pytest.mark.parametrize("shape", [(), (30,), (28, 28), (1, 2, 28, 28)])
def test_what_is_no_image_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="C×H×W"):
        build(name, shape, 10)


@pytest.mark.parametrize("name", ["lstm", "transformer-tiny"])
def test_what_is_no_sequence_is_refused(name: str) -> None:
    for shape in [(), (1, 28, 28)]:
        with pytest.raises(ConfigError, match="token ids"):
            build(name, shape, 10)
    with pytest.raises(ConfigError, match="vocabulary"):
        build(name, (7,), 10)
    with pytest.raises(ConfigError, match="vocabulary"):
        build(name, (7, 5), 10, vocabulary=20)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "message"),
    [
        ("lenett", (1, 28, 28), 10, {}, "did you mean 'lenet'"),
        ("mlp", (4,), 0, {}, "classes is 0"),
        ("mlp", (0, 4), 2, {}, "at least 1"),
        ("mlp", (4,), 2, {"hiden": [3]}, "did you mean 'hidden'"),
        ("mlp", (4,), 2, {"hidden": []}, "widths"),
        ("mlp", (4,), 2, {"hidden": 200}, "widths"),
        ("mlp", (4,), 2, {"hidden": [10, 0]}, "widths"),
        ("cnn", (1, 28, 28), 10, {"norm": "batch"}, "it has no options"),
        ("tanh-cnn", (1, 28, 28), 10, {"width": 0}, "width is 0"),
        ("resnet8", (1, 28, 28), 10, {"norm": "layer"}, "group or batch"),
        ("lstm", (7, 5), 10, {"hidden": 0}, "hidden is 0"),
        ("transformer-tiny", (7, 5), 10, {"heads": 5}, "heads divide"),
    ],
)
def test_settings_that_make_no_sense(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, shape, classes, **options)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("own_models")
    monkeypatch.setitem(sys.modules, "own_models", module)
    return module


def test_a_model_of_the_user(own: types.ModuleType) -> None:
    def shaped(input_shape: tuple[int, ...], classes: int, *, width: int = 3) -> nn.Module:
        return nn.Sequential(nn.Linear(math.prod(input_shape), width), nn.Linear(width, classes))

    own.shaped, own.plain, own.anything = (
        shaped,
        lambda: nn.Linear(2, 2),
        lambda **given: nn.Linear(len(given), 1),
    )  # type: ignore[attr-defined]
    assert parameters(build("own_models:shaped", (4,), 2, width=5)) == 4 * 5 + 5 + 5 * 2 + 2
    assert parameters(build("own_models:plain", (4,), 2)) == 6
    assert parameters(build("own_models:anything", (4,), 2)) == 3
    first, again = (build("own_models:plain", (4,), 2, seed=3).state_dict()["weight"] for _ in range(2))
    assert torch.equal(first, again)
    with pytest.raises(ConfigError, match="no option is called 'depth'"):
        build("own_models:shaped", (4,), 2, depth=5)


def test_a_users_function_that_gives_no_module(own: types.ModuleType) -> None:
    own.wrong, own.needs = lambda: "text", lambda size: nn.Linear(size, size)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="returned a str"):
        build("own_models:wrong", (4,), 2)
    with pytest.raises(ConfigError, match="missing a required argument: 'size'"):
        build("own_models:needs", (4,), 2)
    with pytest.raises(ConfigError, match="no module named"):
        build("absent_models:make", (4,), 2)
