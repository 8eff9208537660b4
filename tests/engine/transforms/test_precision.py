"""bfloat16 where it is safe."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mycelia.engine import structure
from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.transforms.layout import layout
from mycelia.engine.transforms.precision import precision
from mycelia.engine.transforms.value_and_grad import value_and_grad
from mycelia.engine.verify import verify
from tests.engine.transforms.programs import models, program_of
from tests.engine.zoo import ZOO

aten = torch.ops.aten
RECURRENT = ("lstm", "gru", "lstm-deep", "gru-deep")
FLOW = ("cond", "while", "scan")


def targets_and_types(name: str) -> list[tuple[str, torch.dtype]]:
    graph = precision(program_of(name), "bf16").graph("test").graph
    return [
        (str(node.target), node.meta["val"].dtype)
        for node in graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
    ]


def test_fp32_is_the_program_itself() -> None:
    assert precision(program_of("mlp"), "fp32") is program_of("mlp")


@pytest.mark.parametrize("name", ["fp16", "BF16", ""])
def test_another_name_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="fp32, bf16"):
        precision(program_of("mlp"), name)


def test_a_program_without_a_graph_is_refused() -> None:
    program = capture(
        nn.Linear(2, 2), lambda o, t: o.sum(1), (torch.ones(2, 2), torch.zeros(2)), backend="eager"
    )
    with pytest.raises(CaptureError, match="backend='export'"):
        precision(program, "bf16")


def test_layout_comes_after() -> None:
    with pytest.raises(CaptureError, match="apply precision first"):
        precision(layout(program_of("lenet")), "bf16")
    assert layout(precision(program_of("lenet"), "bf16")).note == ("bf16", "layout")


@models()
def test_close_to_the_plain_form_with_the_same_types(name: str) -> None:
    """bfloat16 rounds to one part in 256.

    A few layers add up to some hundredths of the gradient's norm, ten or twenty to some tenths.
    """
    case, program = ZOO[name], program_of(name)
    mixed = precision(program, "bf16")
    verify(mixed.graph("test"), mixed.schema)
    batch = case.batch(8)
    plain = value_and_grad(program)(*program.init(), *batch, seed=3)
    found = value_and_grad(mixed)(*mixed.init(), *batch, seed=3)
    assert {n: g.dtype for n, g in found.grads.items()} == {n: g.dtype for n, g in plain.grads.items()}
    assert {n: b.dtype for n, b in found.buffers.items()} == {n: b.dtype for n, b in plain.buffers.items()}
    assert found.losses.dtype == plain.losses.dtype
    outputs = [structure.flatten(result.outputs)[0] for result in (found, plain)]
    assert [leaf.dtype for leaf in outputs[0]] == [leaf.dtype for leaf in outputs[1]]
    one, two = (torch.cat([g.flatten() for g in result.grads.values()]) for result in (found, plain))
    share = 0.3 if name.startswith("resnet") else 0.1
    assert float((one - two).norm()) <= share * float(two.norm())
    assert abs(float(found.loss - plain.loss)) <= 0.03 * (1 + abs(float(plain.loss)))
    changes = name not in FLOW
    assert not changes or not torch.equal(one, two)


@pytest.mark.parametrize("name", ["mlp", "lenet", "attention-weights"])
def test_products_are_in_bf16_and_the_rest_is_not(name: str) -> None:
    narrow = {"aten.linear.default", "aten.conv2d.default", "aten.matmul.default"}
    narrow |= {"aten.scaled_dot_product_attention.default"}
    wide = {
        "aten.softmax.int",
        "aten.cross_entropy_loss.default",
        "aten.log_softmax.int",
        "aten.tanh.default",
    }
    wide |= {"aten.layer_norm.default", "aten.group_norm.default", "aten.mean.dim"}
    found = targets_and_types(name)
    assert any(target in narrow for target, _ in found)
    for target, dtype in found:
        if target in narrow:
            assert dtype is torch.bfloat16, target
        if target in wide:
            assert dtype is not torch.bfloat16, target


def test_exact_operators_between_products_stay_in_bf16() -> None:
    """ReLU and pooling give the same in bfloat16, and what is not widened need not be narrowed again."""
    found = targets_and_types("lenet")
    assert {
        dtype for target, dtype in found if target in ("aten.relu.default", "aten.max_pool2d.default")
    } == {torch.bfloat16}


def test_a_product_of_the_loss_keeps_its_precision() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs @ targets.t()).diagonal()

    program = precision(capture(nn.Linear(3, 2), loss, (torch.ones(2, 3), torch.ones(2, 2))), "bf16")
    types = {
        str(node.target): node.meta["val"].dtype
        for node in program.graph("test").graph.nodes
        if node.op == "call_function"
    }
    assert types["aten.linear.default"] is torch.bfloat16
    assert types["aten.matmul.default"] is torch.float32


def test_a_product_is_that_of_rounded_operands() -> None:
    """x.w with x, w rounded to bfloat16, the sum in float32, the result rounded: Kalamkar et al. (2019)."""
    draw = torch.Generator().manual_seed(2)
    model = nn.Linear(16, 4, bias=False)
    inputs = torch.randn(3, 16, generator=draw)
    program = precision(capture(model, lambda o, t: o.sum(1), (inputs, torch.zeros(3))), "bf16")
    params, buffers = program.init()
    rounded = [t.bfloat16().double() for t in (inputs, params["weight"])]
    expected = rounded[0] @ rounded[1].t()
    found = program.predict(params, buffers, inputs)
    assert found.dtype is torch.float32
    assert torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)
