"""Several uses of one parameter, parts of it, and what is computed from it."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.privacy.attach import attach
from mycelia.privacy.clip import Abadi
from mycelia.privacy.clipped_grad import Clipped, clipped_grad, explain
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import Poisson
from tests.privacy.models import COMBINED, Function, batch_of, loss, module_of
from tests.privacy.oracle import abadi, agrees, clipped_of, close, compare, one_by_one

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)


@pytest.mark.parametrize("name", COMBINED)
def test_equals_one_by_one(name: str) -> None:
    agrees(name)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("shared-thrice", "stacked"), ("shared-convolution", "formed"), ("tied-head", "tied"),
        ("tied-both-sides", "stacked"), ("tied-transposed", "formed"), ("chunked-disjoint", "disjoint"),
        ("chunked-equal", "stacked"), ("chunked-overlapping", "formed"), ("chunked-qkv", "disjoint"),
        ("weight-scaled", "formed"), ("weight-standardised", "formed"), ("low-rank", "alone"),
    ],
)  # fmt: skip
def test_ways(name: str, way: str) -> None:
    assert f"weight: {way}" in explain(clipped_of(name)) or f"w: {way}" in explain(clipped_of(name))


@settings(max_examples=5, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.data(), st.integers(2, 6), st.integers(1, 3))
def test_drawn_parts(data: st.DataObject, rows: int, positions: int) -> None:
    """Two parts of one weight, disjoint, equal or overlapping."""
    starts = data.draw(st.lists(st.integers(0, rows - 1), min_size=2, max_size=2))
    ends = [data.draw(st.integers(start + 1, rows)) for start in starts]
    one, two = (slice(*pair) for pair in zip(starts, ends, strict=True))
    module = Function(
        lambda s, x: F.linear(x, s.w[one]).sum(-1) * F.linear(x.sin(), s.w[two]).sum(-1),
        w=nn.Parameter(torch.randn(rows, 3).double()),
    )
    compare(module, torch.randn(4, positions, 3).double())


class Tied(nn.Module):
    """Two layers that hold one tensor, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)))


def test_tied_exact() -> None:
    """With the cross term; and the parts that two processes take add up to the whole."""
    module = Tied().double()
    inputs = batch_of("tied-head", 6)[0]
    clipped = compare(module, inputs)
    targets = torch.linspace(-1, 1, 6).double()
    program = clipped.program
    assert list(program.init()[0]) == ["table.weight", "head.bias"]
    assert "table.weight: tied" in explain(clipped)
    parts = [clipped(*program.init(), (inputs[rows], targets[rows])) for rows in (slice(0, 2), slice(2, 6))]
    total = {name: parts[0].total[name] + parts[1].total[name] for name in parts[0].total}
    rows = (torch.cat(pair) for pair in zip(parts[0][1:], parts[1][1:], strict=True))
    close(Clipped(total, *rows), one_by_one(module, (inputs, targets), abadi), 1e-10)


@pytest.mark.parametrize("backend", ["auto", "vmap"])
def test_unused_parameter(backend: str) -> None:
    """A trainable parameter that the loss does not reach, or not with a gradient, has gradient zero."""
    module = Function(
        lambda s, x: s.a(x) + s.c.detach(),
        a=nn.Linear(6, 3),
        b=nn.Linear(2, 2),
        c=nn.Parameter(torch.ones(3)),
    ).double()
    batch = batch_of("linear", 5)
    program = capture(module, loss, batch)
    clipped = clipped_grad(program, abadi, backend=backend)
    found = clipped(*program.init(), batch)
    close(found, one_by_one(module, batch, abadi), 1e-10)
    for name in ("b.weight", "b.bias", "c"):
        assert found.total[name].shape == module.get_parameter(name).shape
        assert not found.total[name].any()
    if backend == "auto":
        assert not clipped.reasons
        assert "c: not used" in explain(clipped)


class LowRank(nn.Module):
    """A frozen layer with a trained bias, and thin matrices beside it or merged into it."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(6, 4), merged
        self.base.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)
        return self.base(x) + x @ self.down.t() @ self.up.t()


@pytest.mark.parametrize("merged", [False, True])
def test_partial_freeze_and_lora(merged: bool) -> None:
    """What is trained counts in the norm, what is frozen in the same layer does not."""
    torch.manual_seed(1)
    module, inputs = LowRank(merged).double(), torch.randn(5, 3, 6).double()
    clipped = compare(module, inputs)
    assert set(clipped.program.init()[0]) == {"base.bias", "down", "up"}
    targets = torch.linspace(-1, 1, 5).double()
    before = one_by_one(module, (inputs, targets), abadi)
    module.up.requires_grad_(False)  # between two steps
    assert set(compare(module, inputs).program.init()[0]) == {"base.bias", "down"}
    assert bool((one_by_one(module, (inputs, targets), abadi).norms < before.norms).all())
    module.base.weight.requires_grad_(True)
    compare(module, inputs)


def test_saved_adapter() -> None:
    """The tensors that are saved are those that were trained, and nobody else's."""
    torch.manual_seed(1)
    model = LowRank(merged=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen, before = model.base.weight.clone(), model.down.detach().clone()
    train = attach(
        model, loss, torch.optim.SGD(trained, lr=0.1), sampler=Poisson(0.5), clip=Abadi(1.0), noise=0.5,
        expected_batch=4, source=NoiseSource.seeded(3),
    )  # fmt: skip
    data = torch.randn(8, 3, 6), torch.randn(8)
    for number, batch in enumerate(train.batches(data)):
        train.loss(batch).backward()
        train.optimizer.step()
        train.optimizer.zero_grad()
        if number == 2:
            break
    adapter = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    stream = io.BytesIO()
    torch.save(adapter, stream)
    stream.seek(0)
    other = LowRank(merged=False)
    missing, unexpected = other.load_state_dict(torch.load(stream, weights_only=True), strict=False)
    other.base.weight.data = frozen
    assert (missing, unexpected) == (["base.weight"], [])
    assert not torch.equal(other.down, before)
    assert torch.equal(model.base.weight, frozen)
    assert torch.equal(other(data[0]), model(data[0]))


def test_a_computed_weight_without_room() -> None:
    """A few examples at a time, then the sum pulled back once."""
    module = module_of("weight-norm-shared")
    small, batch = clipped_of("weight-norm-shared", workspace_mb=0), batch_of("weight-norm-shared", 5)
    close(small(*small.program.init(), batch), one_by_one(module, batch, abadi), 1e-10)


def test_a_computed_weight_that_is_not_finite() -> None:
    clipped, (inputs, targets) = clipped_of("weight-norm"), batch_of("weight-norm", 4)
    spoilt = inputs.clone()
    spoilt[1] = float("nan")
    others = torch.tensor([0, 2, 3])
    found = clipped(*clipped.program.init(), (spoilt, targets))
    plain = clipped(*clipped.program.init(), (inputs[others], targets[others]))
    close(Clipped(found.total, *(part[others] for part in found[1:])), plain, 1e-12)
