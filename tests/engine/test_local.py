"""Local training on one resident replica: batches, plans, purity and bad input."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.local import ClientData, LocalTrainer, LocalWork, named_views, parameter_slices, uses_seed
from mycelia.engine.program import Program
from mycelia.engine.rng import generator
from mycelia.engine.types import Tensors
from tests.engine.algorithms.harness import Quadratic, half_square, net, net_clients, quadratic


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, 0.5, self.training))


class Mixed(nn.Module):
    """Parameters of two precisions, as after casting all but a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
        self.head = nn.Parameter(torch.tensor([0.5, 0.25]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.body + self.head


@pytest.fixture(scope="module")
def mixed() -> Program:
    return capture(Mixed(), half_square, (torch.zeros(2, 2), torch.ones(2, 2)), backend="eager")


@pytest.fixture(scope="module")
def dropping() -> Program:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    example = (torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    return capture(Dropping().double(), loss, example)


def batches(work: LocalWork, examples: int, *, client: int | str = 3, round: int = 2) -> list[list[int]]:
    """The examples of each step, read off the loss: example i is i away from the optimum, in coordinate 0."""
    inputs = np.ones((examples, 1))
    targets = np.arange(examples, dtype=np.float64)[:, None]
    trainer = LocalTrainer(quadratic(1), work, seed=5, plan="eager")
    seen: list[list[int]] = []
    step = trainer._step

    def spy(params: Tensors, buffers: Tensors, x: Tensor, y: Tensor, seed: Tensor, extra: Tensors) -> Tensor:
        seen.append(y[:, 0].long().tolist())
        return step(params, buffers, x, y, seed, extra)

    trainer._step = spy  # type: ignore[assignment]
    data = ClientData(inputs, targets, np.arange(examples), client)
    result = trainer.run(trainer.start, {}, data, round)
    assert result.steps == len(seen) == work.step_count(examples)
    assert result.examples == sum(map(len, seen))
    return seen


@pytest.mark.parametrize(
    ("work", "examples", "sizes"),
    [
        (LocalWork(epochs=2, batch_size=4), 10, [4, 4, 2, 4, 4, 2]),
        (LocalWork(epochs=2, batch_size=0), 10, [10, 10]),
        (LocalWork(epochs=1, batch_size=16), 10, [10]),
        (LocalWork(steps=4, batch_size=4), 10, [4, 4, 2, 4]),
        (LocalWork(steps=2, batch_size=4, epochs=9), 10, [4, 4]),
        (LocalWork(steps=1, batch_size=0), 7, [7]),
        (LocalWork(epochs=3, batch_size=1), 1, [1, 1, 1]),
    ],
)
def test_sizes_of_batches(work: LocalWork, examples: int, sizes: list[int]) -> None:
    assert [len(batch) for batch in batches(work, examples)] == sizes


def test_every_pass_has_each_example_once_in_a_new_order() -> None:
    seen = batches(LocalWork(epochs=2, batch_size=4), 10)
    passes = [list(chain(*seen[:3])), list(chain(*seen[3:]))]
    assert [sorted(one) for one in passes] == [list(range(10))] * 2
    assert passes[0] != passes[1]


def test_order_is_that_of_the_named_stream() -> None:
    draw = generator(5, "batches", round=2, client=3)
    expected = [*draw.permutation(10), *draw.permutation(10)]
    assert list(chain(*batches(LocalWork(epochs=2, batch_size=3), 10))) == expected


def test_order_depends_on_client_and_round() -> None:
    work = LocalWork(batch_size=20)
    named: list[dict[str, Any]] = [{}, {"client": 4}, {"round": 3}, {"client": "3"}]
    orders = [batches(work, 20, **name) for name in named]
    assert len({tuple(order[0]) for order in orders}) == 4
    assert batches(work, 20) == orders[0]


def test_large_clients_are_gathered_in_parts() -> None:
    """More examples than are copied at once, in batches that do not divide that number."""
    draw = generator(5, "batches", round=2, client=3)
    seen = batches(LocalWork(batch_size=1000), 9500)
    assert [len(batch) for batch in seen] == [1000] * 9 + [500]
    assert list(chain(*seen)) == draw.permutation(9500).tolist()
    assert [len(b) for b in batches(LocalWork(steps=1, batch_size=5000), 9500)] == [5000]


def test_only_needed_rows_are_read() -> None:
    class Counted(np.ndarray[Any, Any]):
        rows = 0

        def __getitem__(self, key: Any) -> Any:
            Counted.rows += np.size(key)
            return np.asarray(self)[key]

    inputs = np.ones((5000, 1)).view(Counted)
    data = ClientData(inputs, np.zeros((5000, 1)), np.arange(5000), 0)
    trainer = LocalTrainer(quadratic(1), LocalWork(steps=2, batch_size=10), plan="eager")
    trainer.run(trainer.start, {}, data, 0)
    assert Counted.rows == 20


@pytest.mark.parametrize(
    ("work", "examples", "steps"),
    [(LocalWork(epochs=3, batch_size=4), 9, 9), (LocalWork(steps=5), 1, 5), (LocalWork(batch_size=0), 0, 0),
     (LocalWork(epochs=2, batch_size=0), 7, 2), (LocalWork(batch_size=4), 0, 0)],
)  # fmt: skip
def test_step_count(work: LocalWork, examples: int, steps: int) -> None:
    assert work.step_count(examples) == steps


@pytest.mark.parametrize(
    ("options", "who"),
    [({"epochs": 0}, "local"), ({"epochs": -1, "steps": 3}, "local"), ({"steps": -1}, "local"),
     ({"batch_size": -1}, "batch_size"), ({"lr": 0.0}, "lr"), ({"lr": float("nan")}, "lr"),
     ({"lr": float("inf")}, "lr")],
)  # fmt: skip
def test_work_out_of_range(options: dict[str, Any], who: str) -> None:
    with pytest.raises(ConfigError, match=who):
        LocalWork(**options)


def test_the_rate_has_the_precision_of_the_parameters() -> None:
    work = LocalWork(lr=0.1)
    assert work.rate(torch.float64).item() == 0.1
    assert work.rate(torch.float32).dtype is work.rate(torch.bfloat16).dtype is torch.float32


def test_loss_sum_weighs_batches_by_their_size() -> None:
    program = quadratic(1)
    trainer = LocalTrainer(program, LocalWork(batch_size=2, lr=1e-12), plan="eager")
    targets = np.array([[1.0], [2.0], [4.0]])
    data = ClientData(np.ones((3, 1)), targets, np.arange(3), 0)
    result = trainer.run(torch.zeros(1, dtype=torch.float64), {}, data, 0)
    assert result.loss_sum == pytest.approx((1 + 4 + 16) / 2)


@pytest.mark.parametrize("plan", ["eager", "interpreter"])
def test_starts_anew_for_each_client(plan: str) -> None:
    """One client's run leaves nothing behind, and inputs stay as they were."""
    clients = net_clients([8, 6])
    trainer = LocalTrainer(net(), LocalWork(epochs=2, batch_size=2), plan=plan)
    params, buffers = net().init()
    vector = net().flatten(params).clone()
    before = vector.clone(), {name: tensor.clone() for name, tensor in buffers.items()}
    first = trainer.run(vector, buffers, clients[0], 0)
    kept = first.vector.clone(), {name: tensor.clone() for name, tensor in first.buffers.items()}
    trainer.run(vector, buffers, clients[1], 0)
    again = trainer.run(vector, buffers, clients[0], 0)
    assert torch.equal(again.vector, kept[0])
    assert all(torch.equal(again.buffers[name], kept[1][name]) for name in kept[1])
    assert torch.equal(vector, before[0])
    assert all(torch.equal(buffers[name], before[1][name]) for name in buffers)


def test_plans_agree() -> None:
    client = net_clients([8])[0]
    params, buffers = net().init()
    vector = net().flatten(params).clone()
    ends = [
        LocalTrainer(net(), LocalWork(epochs=2, batch_size=3), plan=plan).run(vector, buffers, client, 0)
        for plan in ("eager", "interpreter")
    ]
    torch.testing.assert_close(ends[0].vector, ends[1].vector, rtol=0, atol=1e-12)
    for name, tensor in ends[0].buffers.items():
        torch.testing.assert_close(ends[1].buffers[name], tensor, rtol=0, atol=1e-12)


def test_dropout_is_a_function_of_seed_round_and_client(dropping: Program) -> None:
    assert uses_seed(dropping)
    assert not uses_seed(net())
    clients = net_clients([8, 8])
    alike = ClientData(clients[0].inputs, clients[0].targets, clients[0].indices, 7)
    params, _ = dropping.init()
    vector = dropping.flatten(params).clone()

    def end(seed: int, data: ClientData, round: int) -> Tensor:
        trainer = LocalTrainer(dropping, LocalWork(batch_size=0), seed=seed, plan="eager")
        return trainer.run(vector, {}, data, round).vector.clone()

    first = end(0, clients[0], 0)
    assert torch.equal(first, end(0, clients[0], 0))
    for other in (end(1, clients[0], 0), end(0, alike, 0), end(0, clients[0], 1)):
        assert not torch.equal(first, other)


def test_parameters_of_several_precisions(mixed: Program) -> None:
    """The flat vector is float32; the bfloat16 part is rounded, the other is plain SGD."""
    trainer = LocalTrainer(mixed, LocalWork(steps=1, batch_size=0, lr=0.5), plan="eager")
    data = ClientData(np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32), np.arange(1), 0)
    for _ in range(2):  # the second time from the server's model again
        result = trainer.run(trainer.start, {}, data, 0)
        output = torch.tensor([1.5, -1.75])
        expected = torch.cat(
            [torch.tensor([1.0, -2.0]) - 0.5 * output, torch.tensor([0.5, 0.25]) - 0.5 * output]
        )
        assert result.vector.dtype is torch.float32
        torch.testing.assert_close(result.vector, expected, rtol=2**-7, atol=0)
        assert torch.equal(result.vector[2:], expected[2:])


def test_a_client_without_examples_is_named() -> None:
    trainer = LocalTrainer(quadratic(1), LocalWork(), plan="eager")
    data = ClientData(np.ones((3, 1)), np.ones((3, 1)), np.arange(0), "phone-7")
    with pytest.raises(DataError, match="client phone-7: the client has no examples"):
        trainer.run(trainer.start, {}, data, 0)


def test_extra_tensors_must_have_been_announced() -> None:
    """A stray tensor would shift the inputs of the compiled step."""
    trainer = LocalTrainer(quadratic(1), LocalWork(), extra={"mu": torch.tensor(0.0)}, plan="eager")
    data = ClientData(np.ones((3, 1)), np.ones((3, 1)), np.arange(3), 0)
    with pytest.raises(ConfigError, match="nu"):
        trainer.run(trainer.start, {}, data, 0, {"nu": torch.tensor(0.0)})
    trainer.run(trainer.start, {}, data, 0, {"mu": torch.tensor(0.0)})


@pytest.mark.parametrize("plan", ["eager", "interpreter"])
def test_extra_tensors_change_from_client_to_client(plan: str) -> None:
    def push(grads: Tensors, params: Tensors, extra: Tensors) -> Tensors:
        return {name: grad + extra["push"] for name, grad in grads.items()}

    push_of = {"push": torch.zeros((), dtype=torch.float64)}
    work = LocalWork(steps=1, lr=0.5)
    trainer = LocalTrainer(quadratic(1), work, adjust=push, extra=push_of, plan=plan)
    data = ClientData(np.zeros((2, 1)), np.zeros((2, 1)), np.arange(2), 0)
    for value in (1.0, -3.0):
        start = torch.zeros(1, dtype=torch.float64)
        end = trainer.run(start, {}, data, 0, {"push": torch.tensor(value, dtype=torch.float64)})
        assert end.vector.item() == -0.5 * value


def test_views_by_name(mixed: Program) -> None:
    vector = torch.arange(4.0)
    views = named_views(mixed, "anchor", vector)
    assert {name: view.tolist() for name, view in views.items()} == {
        "anchor.body": [0.0, 1.0],
        "anchor.head": [2.0, 3.0],
    }
    assert all(view.data_ptr() >= vector.data_ptr() for view in views.values())
    vector[0] = 9.0
    assert views["anchor.body"][0] == 9.0  # also where the dtypes differ: never a copy that grows stale
    assert parameter_slices(mixed) == {"body": slice(0, 2), "head": slice(2, 4)}


def test_views_and_scratch_are_remembered() -> None:
    trainer = LocalTrainer(quadratic(2), LocalWork(), plan="eager")
    first, second = torch.zeros(2), torch.ones(2)
    assert trainer.named_views("a", first) is trainer.named_views("a", first)
    assert trainer.named_views("a", second)["a.weight"].tolist() == [1.0, 1.0]
    assert trainer.scratch("x", torch.float32) is trainer.scratch("x", torch.float32)
    assert trainer.scratch("x", torch.float32).shape == (2,)


def test_a_program_that_runs_the_module_itself() -> None:
    program = capture(
        Quadratic(1, torch.float64), half_square, (torch.zeros(2, 1), torch.ones(2, 1)), backend="eager"
    )
    trainer = LocalTrainer(program, LocalWork(steps=3, batch_size=0, lr=0.5), plan="eager")
    data = ClientData(np.ones((2, 1)), np.full((2, 1), 3.0), np.arange(2), 0)
    end = trainer.run(torch.zeros(1, dtype=torch.float64), {}, data, 0)
    assert end.vector.item() == pytest.approx(3 * (1 - 0.5**3))
