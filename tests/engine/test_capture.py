"""Every model of the zoo becomes a Program that computes what the module computes."""

import copy
import linecache
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mycelia.engine import structure
from mycelia.engine.capture import capture
from mycelia.engine.errors import CaptureError, ConfigError
from mycelia.engine.program import Program
from mycelia.engine.schema import Role, model_sha256
from mycelia.engine.verify import verify
from tests.engine.zoo import ZOO, Case, captured

torch.set_num_threads(1)

EXACT = {"rtol": 1e-10, "atol": 1e-10}
EXAMPLE = (torch.randn(3, 4), torch.tensor([0, 1, 0]))
RANDOM = [name for name, case in ZOO.items() if case.random]


def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean(1)


def with_dropout(module: nn.Module, p: float) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = p
        elif isinstance(part, (nn.MultiheadAttention, nn.RNNBase)):
            part.dropout = p
    return module


def assert_equal_to_module(
    program: Program, case: Case, module: nn.Module, size: int, training: bool
) -> None:
    """Losses, outputs, buffers and the gradient of the mean loss, against the module and its own autograd."""
    inputs, targets = case.batch(size, seed=size)
    module.train(training)
    outputs = module(inputs.clone())
    losses = case.loss(outputs, targets)
    params, buffers = program.init()
    leaves = {name: tensor.requires_grad_() for name, tensor in params.items()}
    found = program.forward(leaves, buffers, inputs, targets, training=training)
    torch.testing.assert_close(found.losses, losses, **EXACT)
    mine, template = structure.flatten(found.outputs)
    theirs, expected = structure.flatten(outputs)
    assert template == expected
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two, **EXACT)

    losses.mean().backward()
    grads = torch.autograd.grad(found.losses.mean(), list(leaves.values()), allow_unused=True)
    own = dict(module.named_parameters())
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        mine_, theirs_ = (torch.zeros_like(leaf) if g is None else g for g in (grad, own[name].grad))
        torch.testing.assert_close(mine_, theirs_, **EXACT, msg=lambda text, name=name: f"{name}: {text}")

    after = dict(module.named_buffers())
    fresh = program.init()[1]
    for name, buffer in found.buffers.items():
        torch.testing.assert_close(buffer, after[name], **EXACT)  # dtype and shape too
        assert torch.equal(buffers[name], fresh[name]), "the caller's buffers are never written"


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if not case.random])
def test_equals_the_module(name: str, training: bool) -> None:
    for size in (1, 257):
        assert_equal_to_module(captured(name), ZOO[name], ZOO[name].reference(), size, training)


@pytest.mark.parametrize("name", RANDOM)
def test_random_models_equal_the_module_in_evaluation(name: str) -> None:
    for size in (1, 257):
        assert_equal_to_module(captured(name), ZOO[name], ZOO[name].module(), size, training=False)


@pytest.mark.parametrize("name", RANDOM)
def test_seeded_forms_equal_the_module_when_nothing_is_dropped(name: str) -> None:
    """A rate too small to drop anything takes the seeded path all the same."""
    case = ZOO[name]
    program = capture(with_dropout(case.module(), 1e-30), case.loss, case.batch(2))
    nothing = with_dropout(case.module(), 0.0)
    for size in (1, 257):
        assert_equal_to_module(program, case, copy.deepcopy(nothing), size, training=True)


@pytest.mark.parametrize("name", ZOO)
def test_prediction_needs_no_targets_and_equals_the_module(name: str) -> None:
    case, program = ZOO[name], captured(name)
    module = case.reference().eval()
    for size in (1, 257):
        inputs, _ = case.batch(size)
        with torch.no_grad():
            mine, _ = structure.flatten(program.predict(*program.init(), inputs))
            theirs, _ = structure.flatten(module(inputs.clone()))
        for one, two in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, two, **EXACT)


@pytest.mark.parametrize("name", ZOO)
def test_graphs_pass_the_verifier(name: str) -> None:
    program = captured(name)
    for graph in program.graphs or ():
        verify(graph, program.schema, values=True)


# --- randomness


@pytest.mark.parametrize("name", RANDOM)
def test_the_seed_alone_drives_the_training_pass(name: str) -> None:
    case, program = ZOO[name], captured(name)
    params, buffers = program.init()
    batch = case.batch(5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        one = program.losses(params, buffers, batch, seed=7)
        torch.manual_seed(2)
        before = torch.get_rng_state()
        two = program.losses(params, buffers, batch, seed=7)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, two)
    assert not torch.equal(one, program.losses(params, buffers, batch, seed=8))
    assert not torch.equal(one, program.losses(params, buffers, batch, seed=7 + 2**40))
    still = [program.forward(params, buffers, *batch, seed=s, training=False).losses for s in (1, 2)]
    assert torch.equal(*still)


@pytest.mark.parametrize("name", RANDOM)
def test_a_batch_in_parts_draws_what_the_whole_does(name: str) -> None:
    case, program = ZOO[name], captured(name)
    params, buffers = program.init()
    inputs, targets = case.batch(7)
    whole = program.forward(params, buffers, inputs, targets, seed=3).losses
    parts = [
        program.forward(params, buffers, inputs[rows], targets[rows], seed=3, first=rows.start).losses
        for rows in (slice(0, 1), slice(1, 5), slice(5, 7))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, **EXACT)


# PyTorch has no batching rule for its recurrent operators
@pytest.mark.parametrize("name", [name for name in RANDOM if not name.endswith("-deep")])
def test_vmap_over_seeds_is_one_pass_per_seed(name: str) -> None:
    case, program = ZOO[name], captured(name)
    params, buffers = program.init()
    batch = case.batch(3)
    seeds = torch.tensor([0, 1, 2**62])
    found = torch.func.vmap(lambda seed: program.losses(params, buffers, batch, seed=seed))(seeds)
    for row, seed in zip(found, seeds, strict=True):
        torch.testing.assert_close(row, program.losses(params, buffers, batch, seed=int(seed)), **EXACT)


def drop(p: float, size: int = 400) -> tuple[Tensor, float]:
    """What dropout makes of ones, through the whole of capture."""
    program = capture(nn.Dropout(p), lambda o, t: o.sum(1), (torch.ones(2, size), torch.zeros(2)))
    return program.forward(
        *program.init(), torch.ones(500, size), torch.zeros(500), seed=11
    ).outputs, 500.0 * size


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share_and_scales_what_it_keeps(p: float) -> None:
    values, count = drop(p)
    kept = int((values != 0).sum())
    # five standard deviations of a binomial
    assert abs(kept - (1 - p) * count) < 5 * math.sqrt(count * p * (1 - p))
    torch.testing.assert_close(values[values != 0].unique(), torch.tensor([1 / (1 - p)]))


def test_dropout_of_nothing_and_of_everything() -> None:
    assert torch.equal(drop(0.0)[0], torch.ones(500, 400))
    assert torch.equal(drop(1.0)[0], torch.zeros(500, 400))


def test_channel_dropout_drops_whole_channels() -> None:
    program = capture(
        nn.Dropout2d(0.5), lambda o, t: o.sum((1, 2, 3)), (torch.ones(2, 8, 3, 3), torch.zeros(2))
    )
    values = program.forward(*program.init(), torch.ones(50, 8, 3, 3), torch.zeros(50), seed=1).outputs
    assert set(values.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(values.amin((2, 3)), values.amax((2, 3)))


# --- what is told apart


def roles(program: Program) -> dict[str, str]:
    return {entry.name: entry.role.value for entry in program.schema}


def test_batch_norm_has_parameters_float_buffers_and_a_counter() -> None:
    program = captured("depthwise")
    found = roles(program)
    assert found["1.weight"] == "parameter"
    assert found["1.running_mean"] == "buffer"
    assert found["1.num_batches_tracked"] == "counter"
    params, buffers = program.init()
    after = program.forward(params, buffers, *ZOO["depthwise"].batch(3)).buffers
    assert after["1.num_batches_tracked"].dtype == torch.int64
    assert after["1.num_batches_tracked"].shape == ()
    assert int(after["1.num_batches_tracked"]) == 1


def test_tied_tensors_are_one_entry_and_frozen_ones_are_not_trained() -> None:
    tied = roles(captured("tied-head"))
    assert "embedding.weight" in tied
    assert "head.weight" not in tied
    assert {name for name, role in roles(captured("lora")).items() if role == "frozen"} == {
        *("0.base.weight", "0.base.bias", "2.base.weight", "2.base.bias")
    }
    trunk = roles(captured("frozen-trunk"))
    assert [name for name, role in trunk.items() if role == "parameter"] == ["3.weight", "3.bias"]
    assert trunk["0.1.running_mean"] == "buffer", "frozen weights, but the statistics still move"


def test_the_head_may_be_tied_in_either_direction() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 6, bias=False)
            self.embedding = nn.Embedding(6, 4)
            self.embedding.weight = self.head.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embedding(x))

    module = Tied()
    tokens = torch.tensor([1, 5])
    program = capture(module, per_example, (tokens, tokens))
    assert [entry.name for entry in program.schema] == ["head.weight"]
    module(tokens)
    torch.testing.assert_close(program.predict(*program.init(), tokens), module(tokens))


def test_a_mask_is_frozen_and_a_constant_is_no_part_of_the_model() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("mask", torch.tensor([True, False, True, True]))
            self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.mask) * self.scale * (2.0 if self.training else torch.tensor(3.0))

    weights = torch.tensor([1.0, 2.0, 1.0, 0.5])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, weight=weights, reduction="none")

    module = Masked()
    inputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    exported, eager = (capture(module, loss, (inputs, targets), backend=b) for b in ("export", "eager"))
    assert roles(exported)["mask"] == "frozen"
    assert list(roles(exported)) == ["inner.weight", "inner.bias", "mask"]
    assert exported.schema.sha256 == eager.schema.sha256
    for training in (True, False):
        module.train(training)
        found = exported.forward(*exported.init(), inputs, targets, training=training)
        torch.testing.assert_close(found.losses, loss(module(inputs), targets))


def test_the_schema_hash_covers_names_roles_shapes_dtypes_and_order() -> None:
    def sha(model: nn.Module) -> str:
        return capture(
            model, lambda o, t: o.sum(1), (torch.zeros(2, 3), torch.zeros(2)), backend="eager"
        ).schema.sha256

    class Two(nn.Module):
        def __init__(self, names: tuple[str, str], sizes: tuple[int, int] = (2, 2)) -> None:
            super().__init__()
            for name, size in zip(names, sizes, strict=True):
                self.register_parameter(name, nn.Parameter(torch.zeros(size)))

        def forward(self, x: Tensor) -> Tensor:
            return x.float() * sum(p.float().sum() for p in self.parameters())

    frozen = Two(("a", "b"))
    frozen.a.requires_grad_(False)
    base = sha(Two(("a", "b")))
    assert base == sha(Two(("a", "b")))
    assert len({base, sha(Two(("b", "a"))), sha(Two(("a", "c"))), sha(Two(("a", "b"), (2, 3))), sha(frozen),
                sha(Two(("a", "b")).half())}) == 6  # fmt: skip


# --- purity


@pytest.mark.parametrize("name", ["resnet8-batch", "dropout", "in-place", "lora"])
def test_capture_changes_neither_the_model_nor_the_generator(name: str) -> None:
    case = ZOO[name]
    module = case.module()
    first = next(module.children())
    first.eval()
    before = model_sha256(dict(module.state_dict()))
    modes = [part.training for part in module.modules()]
    state = torch.get_rng_state()
    example = case.batch(2)
    kept = [part.clone() for part in example]
    capture(module, case.loss, example)
    assert model_sha256(dict(module.state_dict())) == before
    assert [part.training for part in module.modules()] == modes
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, two) for one, two in zip(example, kept, strict=True))


def test_init_gives_fresh_copies() -> None:
    program = captured("resnet8-batch")
    params, buffers = program.init()
    for tensor in (*params.values(), *buffers.values()):
        tensor.fill_(3)
    assert not any(
        torch.equal(a, b) for a, b in zip(program.init()[0].values(), params.values(), strict=True)
    )


def test_a_model_that_writes_into_its_input_leaves_the_callers_alone() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.mul_(2.0))

    inputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    module = Writes()
    program = capture(module, per_example, (inputs, targets))
    kept = inputs.clone()
    found = program.predict(*program.init(), inputs)
    assert torch.equal(inputs, kept)
    torch.testing.assert_close(found, module(kept.clone()))


def test_inputs_may_have_other_strides_than_the_example() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    program = capture(model, per_example, (torch.randn(2, 3, 4), torch.tensor([0, 1])))
    inputs = torch.randn(5, 4, 3).transpose(1, 2)
    torch.testing.assert_close(program.predict(*program.init(), inputs), model(inputs))


# --- gradients that a model stops


class Stops(nn.Module):
    """A product of a linear map and of a second one that a function of the test's computes."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.function(self, x)


def under_no_grad(module: Stops, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = module.linear(x)
        return y * y


@torch.no_grad()
def decorated(module: Stops, x: Tensor) -> Tensor:
    return module.linear(x).exp()


def enabled_inside(module: Stops, x: Tensor) -> Tensor:
    with torch.no_grad():
        stopped = module.linear(x)
        with torch.enable_grad():
            kept = module.linear(x).sin()
    return stopped * kept


def straight_through(module: Stops, x: Tensor) -> Tensor:
    y = module.linear(x)
    return y + (y.sign() - y).detach()


@pytest.mark.parametrize(
    "function",
    [lambda module, x: module.linear(x).detach(), under_no_grad, decorated, enabled_inside, straight_through],
    ids=["detach", "no_grad", "decorated", "enable_grad", "straight-through"],
)
def test_stopped_gradients_stay_stopped(function: Any) -> None:
    module, inputs = Stops(function).double(), torch.randn(5, 4, dtype=torch.float64)
    program = capture(module, lambda o, t: o.sum(1), (inputs, torch.zeros(5)))
    module(inputs).sum().backward()
    params, buffers = program.init()
    leaves = {name: tensor.requires_grad_() for name, tensor in params.items()}
    losses = program.losses(leaves, buffers, (inputs, torch.zeros(5)))
    grads = torch.autograd.grad(losses.sum(), list(leaves.values()))
    for grad, parameter in zip(grads, module.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


@pytest.mark.parametrize(
    "make", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_parametrised_layers_equal_the_module(make: Any) -> None:
    """Spectral normalisation stops gradients and updates its buffers (Miyato et al. 2018)."""
    case = Case(
        "parametrised", lambda: nn.Sequential(make(nn.Linear(12, 6)), nn.Tanh(), nn.Linear(6, 4)), (12,)
    )
    program = capture(case.module(), case.loss, case.batch(2))
    for training in (True, False):
        assert_equal_to_module(program, case, case.module(), 5, training)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def inference(module: Stops, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = module.linear(x)
    return y.clone()


@pytest.mark.parametrize(
    "function",
    [
        lambda module, x: Sign.apply(module.linear(x)),
        lambda module, x: Sign.apply(module.linear(x)) if module.training else module.linear(x),
        inference,
    ],
    ids=["autograd.Function", "in training only", "inference_mode"],
)
def test_gradients_that_export_loses_are_refused(function: Any) -> None:
    with pytest.raises(CaptureError, match=r"another gradient than the module itself") as caught:
        capture(Stops(function), per_example, EXAMPLE)
    assert caught.value.who == "linear.weight"
    assert "torch.library" in caught.value.fix


def test_a_change_in_place_under_no_grad_is_refused() -> None:
    def function(module: Stops, x: Tensor) -> Tensor:
        y = module.linear(x)
        with torch.no_grad():
            y.mul_(2)
        return y

    with pytest.raises(CaptureError, match=r"aten\.mul_\.Tensor changes a tensor in place under") as caught:
        capture(Stops(function), per_example, EXAMPLE)
    assert "test_capture.py" in caught.value.who


# --- shapes of outputs and batches


class Pair(NamedTuple):
    one: Tensor
    rest: dict[str, Any]


def test_outputs_keep_their_structure() -> None:
    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Pair:
            y = self.inner(x)
            return Pair(y, {"list": [y + 1, (y * 2,)], "nothing": None, "number": 3})

    module, inputs = Structured(), torch.randn(4, 3)
    program = capture(module, lambda o, t: o.one.sum(1), (inputs, torch.zeros(4)))
    y = module(inputs).one
    one, rest = program.predict(*program.init(), inputs)
    torch.testing.assert_close((one, rest["list"][0], rest["list"][1][0]), (y, y + 1, y * 2))
    assert isinstance(rest["list"][1], tuple)
    assert (rest["nothing"], rest["number"]) == (None, 3)


def test_a_fixed_batch_may_be_one() -> None:
    model = nn.Linear(3, 2)
    program = capture(model, per_example, (torch.randn(1, 3), torch.tensor([1])), dynamic_batch=False)
    inputs = torch.randn(1, 3)
    torch.testing.assert_close(program.predict(*program.init(), inputs), model(inputs))


def test_inputs_may_be_the_targets() -> None:
    """An autoencoder: the example's two tensors are the same object."""
    model, inputs = nn.Linear(3, 3), torch.randn(2, 3)
    program = capture(model, mean_square, (inputs, inputs))
    found = program.losses(*program.init(), (inputs, inputs + 1))
    torch.testing.assert_close(found, mean_square(model(inputs), inputs + 1))


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_flatten_and_unflatten_are_inverse(data: st.DataObject) -> None:
    program = captured(data.draw(st.sampled_from(["mlp", "tied-head", "lora", "unused"])))
    vector = torch.arange(program.dimension, dtype=torch.float64) + data.draw(st.integers(0, 9))
    params = program.unflatten(vector)
    assert list(params) == [entry.name for entry in program.schema.of(Role.PARAMETER)]
    assert torch.equal(program.flatten(params), vector)
    assert program.flatten(params).data_ptr() == vector.data_ptr(), "views come back without a copy"
    apart = {name: tensor.clone() for name, tensor in params.items()}
    assert torch.equal(program.flatten(apart), vector)


def test_unflatten_refuses_another_length() -> None:
    with pytest.raises(ConfigError, match="shape"):
        captured("mlp").unflatten(torch.zeros(3))


# --- the eager backend


@pytest.mark.parametrize("name", ["mlp", "resnet8-batch", "tied-head", "dictionary", "lora"])
def test_the_eager_backend_computes_the_same(name: str) -> None:
    case = ZOO[name]
    program = capture(case.module(), case.loss, case.batch(2), backend="eager")
    assert program.schema.sha256 == captured(name).schema.sha256
    for training in (True, False):
        for size in (1, 9):
            assert_equal_to_module(program, case, case.module(), size, training)


def test_the_eager_backend_is_seeded_too() -> None:
    case = ZOO["dropout"]
    program = capture(case.module(), case.loss, case.batch(2), backend="eager")
    params, buffers = program.init()
    batch = case.batch(6)
    state = torch.get_rng_state()
    one, two, other = (program.losses(params, buffers, batch, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)
    shifted = program.forward(params, buffers, *batch, seed=1, first=6).losses
    assert not torch.equal(one, shifted), "the next part of a batch draws other numbers"


class Replaces(nn.Module):
    """Assigns a new tensor to its buffers in place of changing them."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.step = step
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.calls = self.calls + self.step
        self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
        return y


@pytest.mark.parametrize("backend", ["eager", "export"])
def test_a_buffer_that_the_module_replaces_is_updated(backend: str) -> None:
    program = capture(Replaces(1), per_example, EXAMPLE, backend=backend)
    params, buffers = program.init()
    for number in (1, 2):
        found = program.forward(params, buffers, *EXAMPLE)
        torch.testing.assert_close(found.buffers["mean"], 0.9 * buffers["mean"] + 0.1 * found.outputs.mean(0))
        buffers = found.buffers
        assert int(buffers["calls"]) == number
        assert buffers["calls"].dtype == torch.int64


@pytest.mark.parametrize("backend", ["eager", "export"])
def test_a_buffer_replaced_by_another_dtype_is_refused(backend: str) -> None:
    def run() -> None:
        program = capture(Replaces(0.5), per_example, EXAMPLE, backend=backend)
        program.forward(*program.init(), *EXAMPLE)

    with pytest.raises(CaptureError, match=r"'calls' .*float32") as caught:
        run()
    assert "int64" in caught.value.rule


def test_a_program_without_a_graph_says_so() -> None:
    case = ZOO["mlp"]
    program = capture(case.module(), case.loss, case.batch(2), backend="eager")
    with pytest.raises(CaptureError, match=r"taps needs a graph.*[\s\S]*backend='export'"):
        program.graph("taps")


# --- what is refused, and how


class Inner(nn.Module):
    """A linear map and then some function of the test's."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def refused(function: Any, loss: Any = per_example) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        capture(nn.Sequential(nn.Linear(4, 4), Inner(function)), loss, EXAMPLE)
    return caught.value


def line_of(function: Any, offset: int) -> str:
    code = function.__code__
    number = code.co_firstlineno + offset
    return f"{code.co_filename}:{number}: {linecache.getline(code.co_filename, number).strip()}"


def item_branch(x: Tensor) -> Tensor:
    if x.sum().item() > 0:
        return x
    return -x


def tensor_branch(x: Tensor) -> Tensor:
    return x if x.mean() > 0 else -x


def to_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy())


def row_loop(x: Tensor) -> Tensor:
    return torch.stack([row * 2 for row in x])


@pytest.mark.parametrize(
    ("function", "says"), [(item_branch, "aten.item"), (tensor_branch, "aten.item"), (to_numpy, ".numpy()")]
)
def test_a_model_that_cannot_be_exported_names_module_line_and_operator(function: Any, says: str) -> None:
    error = refused(function)
    assert error.who == "1 (Inner)"
    assert line_of(function, 1) in error.found
    assert says in error.found
    assert "backend='eager'" in error.fix
    eager = capture(nn.Sequential(nn.Linear(4, 4), Inner(function)), per_example, EXAMPLE, backend="eager")
    assert eager.losses(*eager.init(), EXAMPLE).shape == (3,)


def test_a_loop_over_the_batch_is_named() -> None:
    assert "the batch" in refused(row_loop).found
    assert "fixes that to 3" in refused(row_loop).found


@pytest.mark.parametrize(
    ("loss", "says", "fix"),
    [
        (nn.CrossEntropyLoss(), "a single number for 3 examples", 'reduction="none"'),
        (lambda o, t: o, r"shape (3, 2)", "average over all axes but the first"),
        (lambda o, t: (o,), "a tuple", 'reduction="none"'),
        (lambda o, t: per_example(o, t)[:2], "shape (2,)", ""),
    ],
)
def test_a_loss_that_is_not_one_per_example_is_refused_with_the_fix(loss: Any, says: str, fix: str) -> None:
    error = refused(lambda x: x, loss)
    assert error.who == "loss"
    assert says in error.found
    assert fix in error.fix


def test_a_loss_of_a_fixed_length_is_refused() -> None:
    assert "whatever the batch" in refused(lambda x: x, lambda o, t: o.sum() + torch.zeros(3)).found


def test_a_loss_that_fails_names_its_line() -> None:
    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs @ targets

    assert line_of(broken, 1) in refused(lambda x: x, broken).found


@pytest.mark.parametrize(
    "example",
    [
        (torch.zeros(3, 4), torch.zeros(2)),
        (torch.tensor(1.0), torch.tensor(1.0)),
        (torch.zeros(0, 4), torch.zeros(0)),
        3,
        ("a", "b"),
        (torch.zeros(3, 4),),
    ],
)
def test_a_bad_example_is_refused(example: Any) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(nn.Linear(4, 2), per_example, example)
    assert caught.value.who == "example"


def test_an_example_of_another_size_names_the_module() -> None:
    with pytest.raises(CaptureError, match="fails on the example") as caught:
        capture(nn.Sequential(nn.ReLU(), nn.Linear(5, 2)), per_example, EXAMPLE)
    assert caught.value.who == "1 (Linear)"


def test_unknown_backends_and_lazy_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match="'export', 'eager'"):
        capture(nn.Linear(4, 2), per_example, EXAMPLE, backend="jit")
    with pytest.raises(CaptureError, match="no shape yet"):
        capture(nn.LazyLinear(2), per_example, EXAMPLE)


def test_a_trained_tensor_outside_the_model_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return per_example(outputs * self.scale, targets)

    assert "trainable" in refused(lambda x: x, Scaled()).found
    scale = torch.ones((), requires_grad=True)
    assert "trainable" in refused(lambda x: x, lambda o, t: per_example(o * scale, t)).found


class Changes(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.what == "seen":
                self.seen[0] = True
            else:
                self.linear.weight.mul_(0.9)
        return self.linear(x)


@pytest.mark.parametrize("what", ["seen", "linear.weight"])
def test_a_pass_that_changes_a_mask_or_a_parameter_is_refused(what: str) -> None:
    with pytest.raises(CaptureError, match=f"changes {what!r}"):
        capture(Changes(what), per_example, EXAMPLE)


def test_the_eager_backend_refuses_a_changed_mask_when_it_runs() -> None:
    program = capture(Changes("seen"), per_example, EXAMPLE, backend="eager")
    with pytest.raises(CaptureError, match="changes 'seen'"):
        program.losses(*program.init(), EXAMPLE)
    assert not program.frozen["seen"].any(), "and the Program stays as it was"


def test_hidden_running_statistics_are_refused() -> None:
    """aten.instance_norm writes into its arguments although its schema denies it."""
    model = nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    )
    with pytest.raises(CaptureError, match="track_running_stats=False"):
        capture(model, per_example, EXAMPLE)


def test_a_model_that_returns_something_else_is_refused() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {3: x}

    with pytest.raises(CaptureError, match="returns a dict"):
        capture(Odd(), lambda o, t: o[3].sum(1), EXAMPLE)
