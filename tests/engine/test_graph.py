"""Graph passes leave the old graph alone, can be read, and are verified."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError
from mycelia.engine.graph import Pass, Writer, fake_mode, nested, show, source_line, value_of
from mycelia.engine.program import Program
from mycelia.engine.schema import Entry, Role, Schema
from mycelia.engine.verify import verify
from tests.engine.zoo import ZOO, captured

aten = torch.ops.aten
torch.set_num_threads(1)


def only(graph: fx.Graph, target: Any) -> fx.Node:
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


def relu_to_tanh(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        node.target = aten.tanh.default


TANH = Pass("tanh", relu_to_tanh)


def test_a_pass_gives_a_new_program_and_a_note() -> None:
    program = captured("mlp")
    before = show(program.graph("test"))
    changed = program.rewrite(TANH)
    assert changed.note == ("tanh",)
    assert changed.rewrite(TANH).note == ("tanh", "tanh")
    assert show(program.graph("test")) == before, "the old graph stays"
    assert program.note == ()
    for graph in changed.graphs or ():
        verify(graph, changed.schema, values=True)
    params, buffers = program.init()
    inputs, targets = ZOO["mlp"].batch(4)
    flat = torch.tanh(inputs.flatten(1) @ params["1.weight"].T + params["1.bias"])
    hidden = torch.tanh(flat @ params["3.weight"].T + params["3.bias"])
    expected = hidden @ params["5.weight"].T + params["5.bias"]
    for training in (True, False):
        found = changed.forward(params, buffers, inputs, targets, training=training)
        torch.testing.assert_close(found.outputs, expected)
    torch.testing.assert_close(changed.predict(params, buffers, inputs), expected)


def test_a_pass_shows_what_it_changes() -> None:
    lines = TANH.diff(captured("mlp").graph("test")).splitlines()
    assert [line for line in lines if line.startswith("-") and "relu" in line]
    assert [line for line in lines if line.startswith("+") and "aten.tanh.default(linear,)" in line]
    assert Pass("nothing", lambda graph: None).diff(captured("mlp").graph("test")) == ""


def test_a_graph_reads_as_types_operators_and_modules() -> None:
    text = show(captured("lenet").graph("test"))
    assert "t0_0_weight: float64[4, 1, 5, 5]" in text
    (line,) = (line for line in text.splitlines() if line.startswith("conv2d:"))
    assert "aten.conv2d.default(inputs, t0_0_weight, t1_0_bias" in line
    assert line.endswith("# model.0")
    assert text.splitlines()[-1].startswith("return (cross_entropy_loss, linear_1")


def test_a_pass_that_needs_a_graph_says_so() -> None:
    case = ZOO["mlp"]
    eager = capture(case.module(), case.loss, case.batch(2), backend="eager")
    with pytest.raises(CaptureError, match="tanh needs a graph"):
        eager.rewrite(TANH)


def test_a_writer_gives_values_and_source_lines() -> None:
    module = Pass("copy", lambda graph: None)(captured("lenet").graph("test"))
    node = module.graph.find_nodes(op="call_function", target=aten.max_pool2d.default)[0]
    with module.graph.inserting_after(node):
        write = Writer(module.graph, node)
        half = write(aten.mul.Scalar, node, 0.5)
        again = write(aten._to_copy.default, half, dtype=torch.float32)
    assert again.meta["val"].dtype == torch.float32
    assert [str(n) for n in again.meta["val"].shape] == [str(n) for n in node.meta["val"].shape]
    assert source_line(again) == source_line(node)
    assert value_of(half, fake_mode(module.graph)).dtype == torch.float64


def test_source_lines_name_module_and_user_code() -> None:
    class Branchy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y.sin()

    model = nn.Sequential(nn.Linear(3, 3), Branchy())
    program = capture(model, lambda o, t: o.sum(1), (torch.zeros(2, 3), torch.zeros(2)))
    line = source_line(only(program.graph("test").graph, aten.sin.default))
    assert line.startswith("1 File")
    assert "test_graph.py" in line
    assert line.endswith("return y.sin()")


def test_branches_are_found() -> None:
    assert len(nested(captured("cond").graph("test").graph)) == 2
    assert nested(captured("mlp").graph("test").graph) == []


# --- the verifier


def broken(change: Callable[[fx.Graph], None], name: str = "lenet") -> CaptureError:
    program = captured(name)
    module = Pass("break", lambda graph: None)(program.graph("test"))
    change(module.graph)
    with pytest.raises(CaptureError) as caught:
        verify(module, program.schema, values=True)
    return caught.value


def first_relu(graph: fx.Graph) -> fx.Node:
    return graph.find_nodes(op="call_function", target=aten.relu.default)[0]


def test_the_verifier_refuses_python() -> None:
    error = broken(lambda graph: setattr(first_relu(graph), "target", torch.relu))
    assert "calls <built-in method relu" in error.found
    assert error.who.startswith("1 ")


def test_the_verifier_refuses_changes_in_place() -> None:
    assert (
        "changes its argument"
        in broken(lambda graph: setattr(first_relu(graph), "target", aten.relu_.default)).found
    )


def test_the_verifier_refuses_random_operators() -> None:
    error = broken(lambda graph: setattr(first_relu(graph), "target", aten.bernoulli.default))
    assert "aten.bernoulli.default draws random numbers" in error.found


def test_the_verifier_refuses_a_missing_value_and_a_wrong_one() -> None:
    assert "carries no value" in broken(lambda graph: first_relu(graph).meta.pop("val")).found

    def wrong(graph: fx.Graph) -> None:
        node = first_relu(graph)
        with fake_mode(graph):
            node.meta["val"] = torch.zeros(2, 3)

    assert "its value is torch.float32 (2, 3)" in broken(wrong).found


def test_the_verifier_refuses_lost_buffers_and_arguments() -> None:
    def lose(graph: fx.Graph) -> None:
        node = graph.output_node()
        results: Any = node.args[0]
        node.args = ((*results[:-1], results[0]),)

    assert "buffer" in broken(lose, "depthwise").rule

    def more(graph: fx.Graph) -> None:
        with graph.inserting_before(next(iter(graph.nodes))):
            graph.placeholder("more")

    assert "arguments" in broken(more).found


def test_the_verifier_refuses_the_schema_of_another_model() -> None:
    program = captured("mlp")
    entries = list(program.schema)
    entries[0] = Entry(entries[0].name, Role.PARAMETER, (3, 3), torch.float64)
    with pytest.raises(CaptureError, match="the schema's"):
        verify(program.graph("test"), Schema(tuple(entries)))


def test_arithmetic_on_sizes_is_allowed() -> None:
    program: Program = captured("attention")
    assert program.graph("test").graph.find_nodes(op="call_function", target=operator.mul)
    verify(program.graph("test"), program.schema)
