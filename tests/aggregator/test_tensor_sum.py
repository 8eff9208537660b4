"""The sum of plain updates: exact, whole or not at all, and that of the simulator to the bit."""

import math
import tracemalloc
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from mycelia.aggregator.tensor_sum import TensorSum
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.payload import BLOCK_BYTES, Layout, check_tensors, write_tensors
from mycelia.engine.algorithms.base import Message
from mycelia.engine.algorithms.model import model_specs, model_terms
from mycelia.engine.capture import capture
from mycelia.engine.errors import ConfigError
from mycelia.engine.local import LocalResult
from mycelia.engine.program import Program
from mycelia.engine.schema import Entry, Role, Schema
from mycelia.engine.sums import ExactSum, SumFormat, Term, TermSpec, Update

SENT = (Role.PARAMETER, Role.BUFFER, Role.COUNTER)


class Net(nn.Module):
    """Parameters, float buffers and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 700)
        self.norm = nn.BatchNorm1d(700)
        self.b = nn.Linear(700, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


@pytest.fixture(scope="module")
def program() -> Program:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean(1)

    torch.manual_seed(0)
    return capture(Net(), loss, (torch.zeros(2, 3), torch.zeros(2, 500)), backend="eager")


def pack(
    tensors: dict[str, torch.Tensor], schema: Schema, more: Iterable[Entry] = ()
) -> tuple[bytes, Layout]:
    more = tuple(more)
    data = b"".join(write_tensors(tensors, schema, SENT, more))
    return data, check_tensors(data, len(data), schema, SENT, more)


def trained(start: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        name: tensor + (torch.randn(tensor.shape) / 100).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor + seed
        for name, tensor in start.items()
    }


def test_the_sum_is_that_of_the_simulator(program: Program) -> None:
    """The same integers, whether terms are added in one process or payloads come over the wire."""
    params, buffers = program.init()
    start = {entry.name: (params | buffers)[entry.name] for entry in program.schema.of(*SENT)}
    control = Entry("control", Role.PARAMETER, (10,), torch.float32)
    specs = {**model_specs(program), "control": TermSpec(10, 4.0, own_weight=True)}
    form = SumFormat.plan(specs, 100.0, 10)
    simulated, deployed = ExactSum(form), ExactSum(form)
    base, layout = pack(start, program.schema)
    total = TensorSum(deployed, program.schema, SENT, [control], base=base, layout=layout, max_norm=1e3)
    message = Message(program.flatten(params), buffers, {}, 0)
    clients = range(1, 5)
    payloads = {}
    for client in clients:
        new = trained(start, client)
        extra = torch.randn(10)
        vector = program.flatten({name: new[name] for name in params})
        result = LocalResult(vector, {name: new[name] for name in buffers}, 1, 0.0, 1)
        terms = model_terms(program, message, result, client + 0.1)
        terms["control"] = Term(extra, 2.5)
        simulated.add(Update(terms))
        payloads[client] = pack(new | {"control": extra}, program.schema, [control])
    for client in reversed(clients):
        weights = dict.fromkeys(form.specs, client + 0.1) | {"control": 2.5}
        blocks = math.ceil(layout.size / BLOCK_BYTES)
        assert len(list(total.fold(*payloads[client], weights))) >= 2 * blocks
    assert torch.equal(simulated.accumulator, deployed.accumulator)
    assert deployed.count == simulated.count == 4


MIXED = Schema((
    Entry("half", Role.PARAMETER, (9,), torch.float16),
    Entry("brain", Role.PARAMETER, (4,), torch.bfloat16),
    Entry("single", Role.PARAMETER, (300_000,), torch.float32),
    Entry("mean", Role.BUFFER, (3,), torch.float32),
    Entry("seen", Role.COUNTER, (), torch.int64),
))  # fmt: skip
FORM = SumFormat.plan(
    {"params": TermSpec(300_013, 8.0), "buffers": TermSpec(3, 8.0), "counters": TermSpec(1, 100.0)}, 10.0, 10
)
WEIGHTS = dict.fromkeys(FORM.specs, 3.0)


def zeros() -> dict[str, torch.Tensor]:
    return {entry.name: torch.zeros(entry.shape, dtype=entry.dtype) for entry in MIXED}


def mixed(**limits: float) -> TensorSum:
    base, layout = pack(zeros(), MIXED)
    return TensorSum(ExactSum(FORM), MIXED, SENT, base=base, layout=layout, **limits)


def test_half_precision_is_summed_exactly() -> None:
    total = mixed()
    values = zeros()
    values["half"] = torch.arange(9).half() / 3
    values["single"][-1] = 1 / 3
    values["seen"] += 5
    for weight in (3.0, 0.1):
        list(total.fold(*pack(values, MIXED), dict.fromkeys(FORM.specs, weight)))
    sums = ExactSum.total(FORM, [total.exact.accumulator], 2)
    weight = Fraction(3.0) + Fraction(0.1)
    for index, value in enumerate(values["half"].tolist()):
        assert float(sums.sums["params"][index]) == pytest.approx(float(Fraction(value) * weight), rel=1e-12)
    assert float(sums.mean("params")[-1]) == pytest.approx(float(values["single"][-1]), rel=1e-12)
    assert float(sums.mean("counters")[0]) == pytest.approx(5)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("half", float("nan"), Reason.NONFINITE),
        ("brain", float("inf"), Reason.NONFINITE),
        ("single", -float("inf"), Reason.NONFINITE),
        ("mean", float("nan"), Reason.NONFINITE),
        ("single", 8.001, Reason.BAD_PAYLOAD),
        ("mean", -3e38, Reason.BAD_PAYLOAD),
        ("seen", 101, Reason.BAD_PAYLOAD),
    ],
)
def test_a_bad_value_leaves_the_sum_as_it_was(name: str, value: float, reason: Reason) -> None:
    total = mixed()
    good = zeros()
    good["single"] += 1
    list(total.fold(*pack(good, MIXED), WEIGHTS))
    before = total.exact.accumulator.clone()
    bad = zeros()
    bad[name].reshape(-1)[-1] = value
    with pytest.raises(Problem, match=name) as caught:
        list(total.fold(*pack(bad, MIXED), WEIGHTS))
    assert caught.value.reason is reason
    assert torch.equal(total.exact.accumulator, before)
    assert total.exact.count == 1


def test_the_largest_change_is_taken() -> None:
    total = mixed()
    values = zeros()
    values["single"][0] = -8.0
    list(total.fold(*pack(values, MIXED), WEIGHTS))
    assert total.exact.count == 1


@pytest.mark.parametrize("weight", [0.0, -1.0, 10.001, float("nan"), float("inf")])
def test_weights_out_of_range(weight: float) -> None:
    total = mixed()
    for weights in (WEIGHTS | {"buffers": weight}, {"params": 3.0}):
        with pytest.raises(Problem, match="WEIGHT"):
            list(total.fold(*pack(zeros(), MIXED), weights))
    assert not total.exact.accumulator.any()


def test_a_norm_beyond_the_limit_is_refused() -> None:
    values = zeros()
    values["half"][0], values["single"][-1], values["mean"][0] = 3.0, 4.0, 7.0  # buffers do not count
    payload = pack(values, MIXED)
    list(mixed(max_norm=5.0).fold(*payload, WEIGHTS))
    total = mixed(max_norm=4.999)
    with pytest.raises(Problem, match="norm 5"):
        list(total.fold(*payload, WEIGHTS))
    assert not total.exact.accumulator.any()
    with pytest.raises(ConfigError, match="max_norm"):
        mixed(max_norm=0.0)


def test_tensors_that_are_not_those_of_the_sum() -> None:
    base, layout = pack(zeros(), MIXED)
    for specs in (
        {"params": TermSpec(300_013, 8.0)},
        {"params": TermSpec(300_012, 8.0), "buffers": TermSpec(3, 8.0), "counters": TermSpec(1, 100.0)},
    ):
        form = SumFormat.plan(specs, 10.0, 10)
        with pytest.raises(ConfigError, match="sum"):
            TensorSum(ExactSum(form), MIXED, SENT, base=base, layout=layout)


def test_columns_of_every_update() -> None:
    total = mixed()
    updates = [trained(zeros(), client) for client in range(1, 8)]
    payloads = [pack(update, MIXED) for update in updates]
    found = {
        "params": np.full((7, 300_013), np.nan),
        "buffers": np.full((7, 3), np.nan),
        "counters": np.zeros((7, 1)),
    }
    for block in total.columns(payloads):
        assert block.values.nbytes <= 2**20
        found[block.term][:, block.start : block.start + block.values.shape[1]] = block.values.numpy()
    for row, update in enumerate(updates):
        vector = torch.cat([update[name].float() for name in ("half", "brain", "single")])
        assert (found["params"][row] == vector.numpy()).all()
        assert (found["buffers"][row] == update["mean"].numpy()).all()
        assert found["counters"][row] == row + 1
    assert list(total.columns([])) == []


def test_memory_does_not_depend_on_the_size() -> None:
    """Beside the sum and the payloads, which lie elsewhere, folding takes a few blocks."""
    peaks = []
    for size in (2**20, 2**22):
        schema = Schema((Entry("w", Role.PARAMETER, (size,), torch.float32),))
        exact = ExactSum(SumFormat.plan({"params": TermSpec(size, 8.0)}, 10.0, 10))
        base, layout = pack({"w": torch.zeros(size)}, schema)
        data, _ = pack({"w": torch.ones(size)}, schema)
        total = TensorSum(exact, schema, SENT, base=base, layout=layout, max_norm=1e6)
        tracemalloc.start()
        list(total.fold(data, layout, {"params": 1.0}))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert int(exact.accumulator[0]) == int(exact.accumulator[size - 1]) != 0
    assert max(peaks) < 5 * 2**20
    assert peaks[1] - peaks[0] < 2**16
