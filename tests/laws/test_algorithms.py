"""Laws of every federated algorithm. A new one joins by a row in ROWS.

Where a closed form exists the expected values come from it: a client whose loss is a quadratic of curvature h
and optimum t goes the share a = 1 - (1 - lr h)^K of the way to t in K steps, so the fixed point of FedAvg is
Σ p a t / Σ p a, while the optimum is Σ p h t / Σ p h.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycelia.engine.algorithms import ALGORITHMS, Algorithm, build
from mycelia.engine.errors import DataError
from mycelia.engine.local import ClientData, LocalWork
from mycelia.engine.rng import generator
from mycelia.engine.schema import Role
from mycelia.engine.sums import ExactSum, Term, Update
from tests.engine.algorithms.harness import (
    BOWLS,
    Array,
    Bowl,
    Federation,
    bowls,
    copied,
    cross_entropy,
    net,
    net_clients,
    net_module,
    optimum,
    quadratic,
    same,
    tensors_of,
    weighted,
)

STEPS, LR = 3, 0.15


def fedavg_point(clients: Sequence[Bowl]) -> Array:
    return weighted([b.optimum for b in clients], [b.pull(STEPS, LR) for b in clients])


def fedprox_point(clients: Sequence[Bowl]) -> Array:
    return weighted([b.optimum for b in clients], [b.pull(STEPS, LR, mu=2.0) for b in clients])


@dataclass(frozen=True)
class Row:
    """What holds of an algorithm.

    Attributes:
        name: the algorithm.
        options: its options.
        central: one client with all data is central SGD (after `personal`).
        fedavg: the same model as FedAvg on unlike clients with equal steps.
        point: where it ends on `BOWLS`, None where there is no common model.
        rounds: enough to get there within 1e-6.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    central: bool = False
    fedavg: bool = False
    point: Callable[[Sequence[Bowl]], Array] | None = fedavg_point
    rounds: int = 60

    def build(self, **more: Any) -> Algorithm:
        return build(self.name, **{**self.options, **more})

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


KEEP = {"keep": ["norm*"]}
SMOOTH = {"server_lr": 0.2, "beta1": 0.3, "tau": 0.2}  # with a small tau Adam circles the optimum
ROWS = [
    Row("fedavg", central=True, fedavg=True, rounds=25),
    Row("fedavg", {"weighting": "uniform", "server_lr": 0.5}, rounds=55),
    Row("fedsgd", point=optimum, rounds=45),
    Row("fedavgm", {"momentum": 0.0}, central=True, fedavg=True, rounds=25),
    Row("fedavgm", {"momentum": 0.5}, rounds=45),
    Row("fedavgm", {"momentum": 0.5, "nesterov": True}, rounds=25),
    Row("fedprox", {"mu": 0.0}, central=True, fedavg=True, rounds=25),
    Row("fedprox", {"mu": 2.0}, point=fedprox_point, rounds=40),
    Row("fedprox", {"mu": 0.0, "adaptive": True}, central=True, point=None),
    Row("fedadam", SMOOTH, rounds=30),
    Row("fedadam", {**SMOOTH, "bias_correction": False}, rounds=40),
    Row("fedyogi", SMOOTH, rounds=30),
    Row("fedyogi", {**SMOOTH, "bias_correction": False}, rounds=45),
    Row("fedadagrad", {"server_lr": 1.0}, rounds=25),
    Row("fedadagrad", {"server_lr": 2.0, "beta1": 0.3}, rounds=40),
    Row("scaffold", central=True, point=optimum, rounds=30),
    Row("scaffold", {"option": "I"}, point=optimum, rounds=25),
    Row("scaffold", {"weighting": "examples"}, central=True, point=optimum, rounds=30),
    Row("fednova", central=True, fedavg=True, rounds=25),
    Row("fedbn", KEEP, central=True, point=None),
    Row("local-only", central=True, point=None),
    Row("centralised", central=True, point=None),
]
rows = pytest.mark.parametrize("row", ROWS, ids=str)


def where(chosen: Callable[[Row], bool]) -> pytest.MarkDecorator:
    """The rows of which a law holds."""
    return pytest.mark.parametrize("row", [row for row in ROWS if chosen(row)], ids=str)


WORK = LocalWork(epochs=1, batch_size=4, lr=0.1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def nets(row: Row, sizes: Sequence[int] = (8, 4, 6), *, work: LocalWork = WORK, seed: int = 0) -> Federation:
    clients = net_clients([sum(sizes)] if row.build().pooled else sizes)
    return Federation(row.build(), net(), work, clients, seed=seed, plan="eager")


def central_sgd(data: ClientData, epochs: int, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain PyTorch loop over the batches that the named stream gives; one epoch per round."""
    model = copy.deepcopy(net_module()).train()
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=WORK.lr)
    for number in range(epochs):
        inputs, targets = data.tensors(
            generator(seed, "batches", round=number, client=data.client).permutation(len(data))
        )
        for first in range(0, len(data), WORK.batch_size):
            part = slice(first, first + WORK.batch_size)
            sgd.zero_grad()
            cross_entropy(model(inputs[part]), targets[part]).mean().backward()
            sgd.step()
    vector = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
    return vector, dict(model.named_buffers())


def test_every_algorithm_has_a_row() -> None:
    assert {row.name for row in ROWS} == set(ALGORITHMS)


@where(lambda row: row.central)
def test_one_client_with_all_data_is_central_sgd(row: Row) -> None:
    federation = nets(row, (18,))
    federation.run(3)
    vector, buffers = federation.personal(0)
    expected, expected_buffers = central_sgd(federation.clients[0], 3)
    torch.testing.assert_close(vector, expected, rtol=0, atol=1e-9)
    for name, value in expected_buffers.items():
        torch.testing.assert_close(buffers[name], value, rtol=0, atol=1e-6)  # the dtype is compared too


@where(lambda row: row.fedavg)
def test_degenerate_options_give_fedavg(row: Row) -> None:
    work = LocalWork(steps=4, batch_size=2, lr=0.1)
    federation = nets(row, work=work)
    plain = nets(Row("fedavg"), work=work)
    for _ in range(3):
        federation.round()
        plain.round()
    np.testing.assert_allclose(federation.vector, plain.vector, rtol=0, atol=1e-9)


@where(lambda row: row.point is not None)
def test_ends_where_the_closed_form_says(row: Row) -> None:
    found = bowls(row.build(), steps=STEPS, lr=LR).run(row.rounds)
    np.testing.assert_allclose(found, row.point(BOWLS), rtol=0, atol=1e-6)  # type: ignore[misc]


def test_the_bias_of_fedavg_is_not_small() -> None:
    """Otherwise the laws above would not tell the optimum from FedAvg's fixed point."""
    assert np.abs(fedavg_point(BOWLS) - optimum(BOWLS)).max() > 0.1


@rows
def test_terms_are_what_was_announced(row: Row) -> None:
    federation = nets(row)
    for number in range(2):
        for client in federation.clients:
            update, state = federation.update(client)
            assert list(update.terms) == list(federation.form.specs)
            for name, term in update.terms.items():
                assert term.values.shape == (federation.form.specs[name].size,)
                assert np.isfinite(term.weight)
                assert 0 < term.weight <= len(client)
            assert (state is not None) == federation.algorithm.stateful
            steps = federation.trainer.work.step_count(len(client))
            assert update.metrics["steps"] == steps, number
            assert update.metrics["examples"] == len(client)
            assert update.metrics["loss_sum"] > 0
        federation.round()


@rows
def test_inputs_are_not_written_to(row: Row) -> None:
    federation = nets(row)
    federation.round()
    message, client = federation.message(), federation.clients[0]
    own = federation.own[client.client]
    sent = {"vector": message.vector, **message.buffers, **message.extra}
    before, own_before, data = copied(sent), copied(own or {}), client.inputs.copy()
    update, _ = federation.algorithm.local(federation.trainer, message, client, own)
    assert same(sent, before)
    assert same(own or {}, own_before)
    assert np.array_equal(client.inputs, data)
    exact = ExactSum(federation.form)
    exact.add(update)
    total = ExactSum.total(federation.form, [exact.accumulator], 1)
    sums, state = copied(total.sums), copied(tensors_of(federation.state))
    first = federation.algorithm.merge(federation.program, federation.state, total)
    assert same(tensors_of(federation.state), state)
    assert same(total.sums, sums)
    second = federation.algorithm.merge(federation.program, federation.state, total)
    assert same(tensors_of(first), tensors_of(second))


@rows
def test_order_and_number_of_workers_do_not_matter(row: Row) -> None:
    ends = []
    for order, workers in (((0, 1, 2), 1), ((2, 0, 1), 1), ((1, 2, 0), 2), ((2, 1, 0), 3)):
        federation = nets(row)
        for _ in range(2):
            federation.round([c for c in order if c < len(federation.clients)], workers=workers)
        ends.append(tensors_of(federation.state))
    assert all(same(ends[0], end) for end in ends[1:])


@rows
def test_no_survivors_leave_everything_as_it_was(row: Row) -> None:
    federation = nets(row)
    federation.round()
    before = copied(tensors_of(federation.state))
    federation.round([])
    assert same(tensors_of(federation.state), before)


@rows
def test_shapes_dtypes_and_names_never_change(row: Row) -> None:
    """The message's extra tensors lie in memory of a fixed layout; a checkpoint expects what it saved."""
    federation = nets(row)

    def shapes(tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    start, extra = shapes(tensors_of(federation.state)), shapes(dict(federation.message().extra))
    federation.run(2)
    assert shapes(tensors_of(federation.state)) == start
    assert shapes(dict(federation.message().extra)) == extra
    program, state = federation.program, federation.state
    program.schema.check(program.unflatten(state.vector), Role.PARAMETER)
    program.schema.check(state.buffers, Role.BUFFER, Role.COUNTER)


@where(lambda row: row.name != "fedbn")  # a quadratic has nothing to keep
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_other_precisions(row: Row, dtype: torch.dtype) -> None:
    """The model keeps its dtype, and ends near the float64 one: updates are summed exactly, not in halves."""
    ends = {}
    for kind in (dtype, torch.float64):
        data = [bowl.data(number, np.float32) for number, bowl in enumerate(BOWLS)]
        program, work = quadratic(2, kind, "eager"), LocalWork(steps=2, batch_size=0, lr=0.1)
        federation = Federation(
            row.build(), program, work, data[: 1 if row.build().pooled else 3], plan="eager"
        )
        federation.run(3)
        vector, _ = federation.personal(0)
        assert vector.dtype is kind
        ends[kind] = vector.double()
    close = {torch.float16: 5e-3, torch.bfloat16: 5e-2, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(ends[dtype], ends[torch.float64], rtol=close, atol=close)


@rows
def test_client_state_survives_a_file(row: Row, tmp_path: Path) -> None:
    """Tensors own their memory, which safetensors demands, and come back with the same bits."""
    federation, plain = nets(row), nets(row)
    for number in range(2):
        federation.round()
        plain.round()
        for client, state in federation.own.items():
            if state is None:
                continue
            path = tmp_path / f"{number}-{client}.safetensors"
            save_file(state, path)
            federation.own[client] = load_file(path)
    federation.round()
    plain.round()
    assert same(tensors_of(federation.state), tensors_of(plain.state))


@rows
def test_travels_to_a_spawned_process(row: Row) -> None:
    algorithm = row.build().bind(population=3)
    assert ForkingPickler.loads(ForkingPickler.dumps(algorithm)) == algorithm


@where(lambda row: row.name in ("fedprox", "scaffold"))
def test_traced_step_is_the_eager_step(row: Row) -> None:
    """What `adjust` adds is the same in the graph of a plan."""
    ends = [bowls(row.build(), steps=STEPS, lr=LR, plan=plan).run(4) for plan in ("eager", "interpreter")]
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-12)


@rows
def test_a_bad_client_leaves_no_trace(row: Row) -> None:
    """All terms of an update are added, or none."""
    federation = nets(row)
    exact = ExactSum(federation.form)
    update, _ = federation.update(federation.clients[0])
    exact.add(update)
    before = exact.accumulator.clone()
    for name in update.terms:
        for bad in (float("nan"), float("inf"), 1e300):
            values = update.terms[name].values.double().clone()
            values[-1] = bad
            broken = {**update.terms, name: Term(values, 1.0)}
            with pytest.raises(DataError):
                exact.add(Update(broken))
            assert torch.equal(exact.accumulator, before)
    assert exact.count == 1
