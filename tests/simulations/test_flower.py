"""Scenarios as Flower apps and Flower clients in scenarios, with Flower itself."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity

from mycelia.engine.checkpoint import Checkpoint
from mycelia.engine.errors import ConfigError, MyceliaError, RoundAborted
from mycelia.engine.events import Event, Outcomes
from mycelia.engine.run import Run
from mycelia.simulations import Scenario, SimulationResult, flower, resume, simulate
from mycelia.simulations.flower import flower_apps, numpy_client, run_in_flower
from mycelia.simulations.preparation import prepare
from tests.simulations.plugins import normed

HERE = "tests.simulations.test_flower"
PLUGINS = "tests.simulations.plugins"
TIER_1 = [
    "fedavg", "fedsgd", "fedavgm", "fedprox", "fedadam", "fedyogi", "fedadagrad", "scaffold", "fednova",
    "fedbn", "local-only", "centralised",
]  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"fedprox": {"mu": 0.1}}
SAME = ("model_sha256", "test_accuracy", "test_loss", "worst_decile_accuracy", "bytes_up", "bytes_down",
        "simulated_seconds", "failed_rounds", "rounds", "epsilon", "plan", "partition_sha256")  # fmt: skip


def scenario(**changes: Any) -> Scenario:
    """Three rounds of five clients of twelve on digits."""
    settings: dict[str, Any] = {
        "model": f"{HERE}:linear",
        "data": "digits",
        "rounds": 3,
        "cohort": 5,
        "population": {"clients": 12},
        "partition": {"name": "dirichlet", "alpha": 0.5, "min_size": 3},
        "local": {"epochs": 1, "batch_size": 10, "lr": 0.1},
        "backend": "inline",
    }
    return Scenario.model_validate(settings | changes)


def algorithm(name: str) -> dict[str, Any]:
    """Settings for an algorithm, with a model that has something for it to do."""
    model = f"{PLUGINS}:normed" if name == "fedbn" else f"{HERE}:linear"
    return {"algorithm": {"name": name, **OPTIONS.get(name, {})}, "model": {"name": model}}


def same(found: SimulationResult, reference: SimulationResult) -> None:
    for name in SAME:
        assert getattr(found, name) == getattr(reference, name), name


def outcomes(path: Path) -> list[tuple[int, Any]]:
    events = Run.open(path).events({"outcomes"})
    return [(e.round, each) for e in events if isinstance(e, Outcomes) for each in e.clients]


# Flower's own simulation, on Ray

ACTORS: dict[str, Any] = {
    "init_args": {"num_cpus": 2, "object_store_memory": 100 * 2**20},
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
}


@pytest.fixture
def in_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SimulationResult]]:
    """`run_in_flower` on two small actors, without telemetry, that leaves neither processes nor settings."""
    import ray

    monkeypatch.setattr("flwr.supercore.telemetry.FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "")  # Flower adds sys.path to it
    yield lambda settings, out: run_in_flower(settings, out=out, backend_config=ACTORS)
    gc.collect()  # what Ray leaves open warns here and not in another test
    assert not ray.is_initialized()
    ends = time.monotonic() + 60
    while children() and time.monotonic() < ends:
        time.sleep(0.1)
    assert not children()


def children() -> list[str]:
    """Command lines of Ray's processes below this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except OSError:  # it has gone meanwhile
            continue
        if parent == os.getpid() and "ray" in command:
            found.append(command)
    return found


# Ray 2.55 opens /dev/null for each process it starts and never closes it, and waits for none that it kills
RAY_WARNINGS = [
    pytest.mark.filterwarnings("ignore:unclosed file <_io.*name='/dev/null':ResourceWarning"),
    pytest.mark.filterwarnings("ignore:subprocess [0-9]+ is still running:ResourceWarning"),
]


class TestInRay:
    pytestmark = RAY_WARNINGS

    def test_model_of_the_inline_backend(self, tmp_path: Path, in_ray: Callable[..., Any]) -> None:
        settings = scenario(
            model=f"{PLUGINS}:normed",
            algorithm={"name": f"{PLUGINS}:OddCounting", "every": 7},
            cohort=8,
            round={"quorum": 0.3},
            behaviour={"dropout": 0.2},
            evaluation={"clients": 4},
        )
        reference = simulate(settings, out=tmp_path / "inline")
        found = in_ray(settings, tmp_path / "flower")
        same(found, reference)
        assert (found.backend, found.workers) == ("flower", 12)
        ours, theirs = outcomes(tmp_path / "flower"), outcomes(tmp_path / "inline")
        assert [(n, o.client, o.status) for n, o in ours] == [(n, o.client, o.status) for n, o in theirs]
        failed = [outcome for _, outcome in ours if outcome.status == "failed"]
        assert failed
        assert all(f"no battery left on device {outcome.client}" in outcome.cause for outcome in failed)
        taken = [outcome.client for _, outcome in ours if outcome.status == "accepted"]
        assert len(taken) > len(set(taken))  # some came again, and found the state that they had left

    @pytest.mark.slow
    def test_clients_keep_their_state_between_rounds(
        self, tmp_path: Path, in_ray: Callable[..., Any]
    ) -> None:
        settings = scenario(algorithm="scaffold", cohort=9, evaluation={"clients": 4})
        same(in_ray(settings, tmp_path / "flower"), simulate(settings, out=tmp_path / "inline"))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", TIER_1)
    def test_every_algorithm(self, tmp_path: Path, in_ray: Callable[..., Any], name: str) -> None:
        settings = scenario(**algorithm(name))
        same(in_ray(settings, tmp_path / "flower"), simulate(settings, out=tmp_path / "inline"))

    @pytest.mark.slow
    def test_compiled_plan(self, tmp_path: Path, in_ray: Callable[..., Any]) -> None:
        settings = scenario(plan="inductor")
        same(in_ray(settings, tmp_path / "flower"), simulate(settings, out=tmp_path / "inline"))


@pytest.fixture(autouse=True)
def _in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's messages name the task that sends them."""
    for name in ("run_id", "task_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


# The apps on a grid without Ray: each message and answer in Flower's own protobuf and back


class OneProcess(Grid):
    """A Flower Grid whose nodes live here, under numbers that say nothing of the clients."""

    def __init__(
        self, app: ClientApp, clients: int, partitions: Callable[[int], dict[str, Any]] | None = None
    ) -> None:
        configs = [{"partition-id": i, "num-partitions": clients} for i in range(clients)]
        if partitions is not None:
            configs = [partitions(i) for i in range(clients)]
        self.app = app
        self.contexts = {
            100 - i: Context(run_id=1, node_id=100 - i, node_config=config, state=RecordDict(), run_config={})
            for i, config in enumerate(configs)
        }
        self.lost: set[int] = set()

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_nodes(self) -> Any:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        answers = []
        for number, message in enumerate(messages):
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = str(number)
            message.metadata.__dict__["_run_id"] = 1
            arrived = message_from_proto(message_to_proto(message))
            answer = self.app(arrived, self.contexts[node])
            if self.contexts[node].node_config.get("partition-id") not in self.lost:
                answers.append(message_from_proto(message_to_proto(answer)))
        return reversed(answers)


def in_process(settings: Scenario, out: Path, app: ClientApp | None = None, **grid: Any) -> SimulationResult:
    """Run both apps here."""
    server, client = flower_apps(settings, out=out)
    clients = 1 if settings.algorithm.name == "centralised" else settings.population.clients
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    server(OneProcess(app or client, clients, **grid), context)
    return SimulationResult(**json.loads(str(context.state.config_records["mycelia-result"]["json"])))


@pytest.mark.parametrize("name", ["fedadam", "fednova", "fedbn", "local-only", "centralised"])
def test_an_algorithm_ends_with_the_model_of_the_inline_backend(tmp_path: Path, name: str) -> None:
    settings = scenario(**algorithm(name))
    same(in_process(settings, tmp_path / "flower"), simulate(settings, out=tmp_path / "inline"))


def test_failed_rounds_leave_nothing_at_the_clients(tmp_path: Path) -> None:
    settings = scenario(
        algorithm=f"{PLUGINS}:Counting",
        rounds=6,
        cohort=9,
        round={"quorum": 0.7},
        behaviour={"dropout": {"upload": 0.25}},
    )
    reference = simulate(settings, out=tmp_path / "inline")
    assert 0 < reference.failed_rounds < reference.rounds
    same(in_process(settings, tmp_path / "flower"), reference)


def test_stragglers_train_on_the_model_they_were_sent(tmp_path: Path) -> None:
    settings = scenario(
        algorithm=f"{PLUGINS}:Counting",
        cohort=8,
        behaviour={"dropout": 0.2, "speed": {"steps_per_s": 5.0, "sigma": 0.5}},
        round={"stragglers": "next_round", "over_select": 1.2, "quorum": 0.3},
    )
    same(in_process(settings, tmp_path / "flower"), simulate(settings, out=tmp_path / "inline"))


def test_half_precision_loses_no_bit_on_the_way(tmp_path: Path) -> None:
    settings = scenario(model=f"{HERE}:halved", algorithm="scaffold")
    same(in_process(settings, tmp_path / "flower"), simulate(settings, out=tmp_path / "inline"))


def halved(input_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """A model whose last layer is bfloat16."""

    class Halved(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(input_shape[0] if len(input_shape) == 1 else 64, 16)
            self.last = torch.nn.Linear(16, classes, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(self.first(x.flatten(1)))
            return self.last(hidden.to(torch.bfloat16)).float()

    return Halved()


def test_server_adds_the_noise_of_a_private_run(tmp_path: Path) -> None:
    clip = {"name": "quantile", "bound": 1.0}  # its bound is sent with the model, and clients vote on it
    settings = scenario(
        algorithm={"name": "fedavg", "weighting": "uniform"},
        selector="poisson",
        privacy={"unit": "client", "epsilon": 20.0, "delta": 1e-2, "clip": clip, "noise_source": "seeded"},
    )
    reference = simulate(settings, out=tmp_path / "inline")
    assert reference.epsilon is not None
    found = in_process(settings, tmp_path / "flower")
    same(found, reference)
    assert found.privacy == reference.privacy


def test_client_that_does_not_answer_fails_and_keeps_no_state(tmp_path: Path) -> None:
    settings = scenario(
        algorithm="scaffold", cohort=12, round={"quorum": 0.5, "budget_s": 60}, evaluation={"clients": 0}
    )
    server, client = flower_apps(settings, out=tmp_path / "flower")
    grid = OneProcess(client, 12)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    held: list[set[str]] = []
    exchange = grid.send_and_receive

    def lossy(messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        asked = list(messages)
        first = asked[0].content.config_records["task"]["round"] == 0 and "vector" in asked[0].content
        grid.lost = {4} if first else set()
        answers = exchange(asked, timeout=timeout)
        held.append(set(grid.contexts[96].state))
        return answers

    grid.send_and_receive = lossy  # type: ignore[method-assign]
    server(grid, context)
    lost = [(n, o.cause) for n, o in outcomes(tmp_path / "flower") if o.status == "failed"]
    assert lost == [(1, "no answer within 60 s")]
    assert held[1:] == [{"mycelia-state/0"}, {"mycelia-state/1"}, {"mycelia-state/1", "mycelia-state/2"}]


def test_an_app_of_another_scenario_is_refused(tmp_path: Path) -> None:
    other = flower_apps(scenario(seed=1))[1]
    with pytest.raises(ConfigError, match=r"ClientApp's scenario has the hash(.|\n)*with one scenario"):
        in_process(scenario(), tmp_path / "flower", other)
    assert not (tmp_path / "flower").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "partition-id = None"),
        ({"partition-id": 3, "num-partitions": 12}, "is partition 3, as node"),
        ({"partition-id": 3, "num-partitions": 20}, "is partition 3 of 20"),
    ],
)
def test_nodes_that_are_not_the_clients_are_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        in_process(scenario(), tmp_path / "flower", partitions=lambda node: dict(config))


def test_nodes_that_do_not_come_are_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mycelia.simulations.flower.backend._NODES_WITHIN_S", 0.2)
    server, client = flower_apps(scenario(), out=tmp_path / "flower")
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(MyceliaError, match=r"5 nodes within 0.2 s(.|\n)*a node for each of the 12 clients"):
        server(OneProcess(client, 5), context)


def test_more_nodes_than_clients_are_refused(tmp_path: Path) -> None:
    server, client = flower_apps(scenario(), out=tmp_path / "flower")
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(ConfigError, match=r"13 nodes(.|\n)*set num-supernodes = 12"):
        server(OneProcess(client, 13), context)


def test_an_error_in_the_client_half_ends_the_run(tmp_path: Path) -> None:
    settings = scenario(algorithm={"name": f"{PLUGINS}:Odd", "how": "write"})
    with pytest.raises(MyceliaError, match="the client half wrote into the server's model"):
        in_process(settings, tmp_path / "flower")


def test_all_clients_failing_ends_the_run_with_each_cause(tmp_path: Path) -> None:
    settings = scenario(algorithm={"name": f"{PLUGINS}:Odd", "how": "nan"})
    with pytest.raises(RoundAborted, match=r"all were refused|value 3 is nan"):
        in_process(settings, tmp_path / "flower")


def test_a_run_in_flower_is_not_resumed(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(event: Event) -> None:
        if event.kind == "checkpoint" and getattr(event, "step", 0) == 1:
            raise Stop

    settings = scenario(algorithm="scaffold")
    server, client = flower_apps(settings, out=tmp_path / "flower", listeners=[stop])
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(Stop):
        server(OneProcess(client, 12), context)
    with pytest.raises(ConfigError, match="flower"):
        resume(tmp_path / "flower")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"secure_sum": {}}, "in the clear"),
        (
            {
                "algorithm": {"name": "fedavg", "weighting": "uniform"},
                "privacy": {"unit": "client", "model": "local", "epsilon": 50.0, "delta": 1e-2,
                            "clip": {"name": "abadi", "bound": 1.0}},
            },
            "the clients' own ledgers",
        ),
    ],
)  # fmt: skip
def test_what_has_no_place_in_flower_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flower_apps(scenario(**changes))


def test_a_missing_flower_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(flower, "flower_apps")
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(ConfigError, match=r"pip install 'mycelia\[flower\]'"):
        _ = flower.flower_apps


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'mycelia\[flower\]'"):
        run_in_flower(scenario())


# An existing NumPyClient in a scenario


class Softmax(NumPyClient):
    """Full-batch gradient steps on a softmax regression in NumPy, on data of the client's own."""

    def __init__(self, client: int) -> None:
        draw = np.random.default_rng(client)
        self.inputs = draw.normal(size=(10 + client, 64)).astype(np.float32)
        self.targets = draw.integers(0, 10, size=10 + client)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        weight, bias = parameters
        n = len(self.inputs)
        for _ in range(int(config["steps"])):
            scores = self.inputs @ weight.T + bias
            chances = np.exp(scores - scores.max(1, keepdims=True))
            chances /= chances.sum(1, keepdims=True)
            chances[np.arange(n), self.targets] -= 1
            weight = weight - 0.1 * chances.T @ self.inputs / n
            bias = bias - 0.1 * chances.mean(0)
        return [weight.astype(np.float32), bias.astype(np.float32)], n, {"train_loss": 1.5}


def softmax(context: Context) -> Any:
    """Flower's usual form."""
    assert context.node_config["num-partitions"] == 6
    return Softmax(int(context.node_config["partition-id"])).to_client()


def linear(input_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """The model of `Softmax`."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))


class Trained(NumPyClient):
    """An ordinary PyTorch client: strict about the order and the shapes of what it is sent."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.model = normed((64,), 10)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        names = self.model.state_dict()
        state = {n: torch.from_numpy(a) for n, a in zip(names, parameters, strict=True)}
        self.model.load_state_dict(state, strict=True)
        draw = torch.Generator().manual_seed(int(self.context.node_config["partition-id"]))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model.train()
        torch.manual_seed(int(config["server-round"]))
        for _ in range(3):
            optimizer.zero_grad()
            x, y = torch.randn(8, 64, generator=draw), torch.randint(10, (8,), generator=draw)
            torch.nn.functional.cross_entropy(self.model(x), y).backward()
            optimizer.step()
        return [tensor.numpy() for tensor in self.model.state_dict().values()], 8, {}


def trained(context: Context) -> Any:
    return Trained(context).to_client()


class Difficult(Softmax):
    """A client that goes wrong, each in its own way."""

    def __init__(self, context: Context) -> None:
        self.client = int(context.node_config["partition-id"])
        self.wrong = str(context.run_config["wrong"])
        super().__init__(self.client)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        weight, bias = parameters
        if self.client == 0:
            raise RuntimeError(self.wrong)
        if self.client == 1:
            return weight  # type: ignore[return-value]
        if self.client == 2:
            return [bias, weight], 5, {}
        if self.client == 3:
            return [weight], 5, {}
        if self.client == 4:
            return [weight, bias], 0, {}
        return super().fit(parameters, config)


def difficult(context: Context) -> Any:
    return Difficult(context).to_client()


def unfinished(context: Context) -> Any:
    """Forgets `to_client`, which Flower's own runtime would not take either."""
    return Softmax(int(context.node_config["partition-id"]))


def not_a_client(context: Context) -> Any:
    return 7


def counting(context: Context) -> Any:
    """A client that counts its rounds in Flower's context and adds the count to each parameter."""

    class Counting(NumPyClient):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
            held = context.state.config_records.get("rounds", ConfigRecord({"seen": 0}))
            seen = int(str(held["seen"])) + 1
            context.state["rounds"] = ConfigRecord({"seen": seen})
            return [array + np.float32(seen) for array in parameters], 1, {}

    return Counting().to_client()


def old_fashioned(cid: str) -> Any:
    return Softmax(int(cid))


def with_clients(client_fn: Any, **changes: Any) -> Scenario:
    options = changes.pop("options", {"config": {"steps": 5}})
    settings: dict[str, Any] = {
        "model": f"{HERE}:linear",
        "algorithm": numpy_client(client_fn, **options),
        "population": {"clients": 6},
        "partition": "iid",
        "cohort": 6,
        "plan": "eager",
        "update": {"max_weight": 100.0},
    }
    return scenario(**(settings | changes))


def first_model(settings: Scenario) -> torch.Tensor:
    program = prepare(settings).program
    return program.flatten(program.init()[0])


def last_model(result: SimulationResult) -> torch.Tensor:
    found: Checkpoint = Run.open(Path(result.run_dir)).load_checkpoint()
    return found.tensors["vector"]


def by_flower(
    client_fn: Callable[[Context], Any], model: torch.nn.Module, rounds: int, config: dict[str, Any]
) -> list[Any]:
    """Flower's own FedAvg strategy on the same clients, all of them in every round.

    Not in place: that way Flower multiplies whole numbers by fractions, and every count becomes 0.
    """
    from flwr.server.strategy import FedAvg

    strategy, arrays = FedAvg(inplace=False), [tensor.numpy() for tensor in model.state_dict().values()]
    for number in range(1, rounds + 1):
        results = []
        for client in range(6):
            node = {"partition-id": client, "num-partitions": 6}
            context = Context(run_id=1, node_id=client, node_config=node, state=RecordDict(), run_config={})
            asked = FitIns(ndarrays_to_parameters(arrays), {**config, "server-round": number})
            results.append((None, client_fn(context).fit(asked)))
        merged, _ = strategy.aggregate_fit(number, results, [])  # type: ignore[arg-type]
        assert merged is not None
        arrays = parameters_to_ndarrays(merged)
    return arrays


@pytest.mark.parametrize("backend", ["inline", pytest.param("workers", marks=pytest.mark.slow)])
def test_numpy_clients_end_where_flowers_fedavg_ends(tmp_path: Path, backend: str) -> None:
    settings = with_clients(softmax, backend=backend)
    found = simulate(settings, out=tmp_path / "run")
    start = first_model(settings)
    model = linear((64,), 10)
    torch.nn.utils.vector_to_parameters(start, model.parameters())
    expected = by_flower(softmax, model, 3, {"steps": 5})
    flat = torch.cat([torch.from_numpy(array).reshape(-1) for array in expected])
    assert (flat - start).abs().max() > 0.05
    torch.testing.assert_close(last_model(found), flat, rtol=1e-5, atol=1e-6)


def test_numpy_clients_with_buffers_end_where_flowers_fedavg_ends(tmp_path: Path) -> None:
    settings = with_clients(trained, model=f"{PLUGINS}:normed", options={})
    found = simulate(settings, out=tmp_path / "run")
    last = Run.open(tmp_path / "run").load_checkpoint().tensors
    model = normed((64,), 10)
    torch.nn.utils.vector_to_parameters(first_model(settings), model.parameters())
    expected = dict(zip(model.state_dict(), by_flower(trained, model, 3, {}), strict=True))
    flat = torch.cat([torch.from_numpy(expected[name]).reshape(-1) for name, _ in model.named_parameters()])
    torch.testing.assert_close(last["vector"], flat, rtol=1e-5, atol=1e-6)
    for name, _ in model.named_buffers():
        torch.testing.assert_close(
            last[f"buffer/{name}"].double(), torch.from_numpy(expected[name]).double(), rtol=1e-5, atol=1e-6
        )
    assert found.failed_rounds == 0


class TestFlowersStrategyInRay:
    """The same clients under Flower's own FedAvg, in Flower's own simulation."""

    pytestmark = RAY_WARNINGS

    @pytest.mark.slow
    def test_numpy_clients_end_where_it_ends(self, tmp_path: Path, in_ray: Callable[..., Any]) -> None:
        from flwr.server import ServerAppComponents, ServerConfig
        from flwr.server.strategy import FedAvg
        from flwr.simulation import run_simulation

        del in_ray  # its settings and what it looks for at the end
        settings = with_clients(softmax)
        found, start = simulate(settings, out=tmp_path / "run"), first_model(settings)
        seen: list[Any] = []

        class Kept(FedAvg):
            def aggregate_fit(self, *arguments: Any) -> Any:
                merged = super().aggregate_fit(*arguments)
                seen.append(merged[0])
                return merged

        def server_fn(context: Context) -> ServerAppComponents:
            del context
            strategy = Kept(
                fraction_evaluate=0.0,
                min_fit_clients=6,
                min_available_clients=6,
                initial_parameters=ndarrays_to_parameters(
                    [start[:640].view(10, 64).numpy(), start[640:].numpy()]
                ),
                on_fit_config_fn=lambda _: {"steps": 5},
            )
            return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))

        app = ClientApp(client_fn=softmax)
        run_simulation(ServerApp(server_fn=server_fn), app, 6, backend_config=dict(ACTORS))
        flat = torch.cat([torch.from_numpy(array).reshape(-1) for array in parameters_to_ndarrays(seen[-1])])
        torch.testing.assert_close(last_model(found), flat, rtol=1e-5, atol=1e-6)


def test_numpy_clients_train_in_a_flower_app_as_inline(tmp_path: Path) -> None:
    settings = with_clients(counting, options={})
    same(in_process(settings, tmp_path / "flower"), simulate(settings, out=tmp_path / "inline"))


def test_numpy_clients_find_their_context_state_again(tmp_path: Path) -> None:
    settings = with_clients(counting, options={})
    found, start = simulate(settings, out=tmp_path / "run"), first_model(settings)
    torch.testing.assert_close(last_model(found), start + 1 + 2 + 3)


def test_numpy_clients_under_a_server_optimiser(tmp_path: Path) -> None:
    server = {"name": "fedadam", "server_lr": 0.01, "tau": 1e-9}
    settings = with_clients(softmax, options={"config": {"steps": 5}, "server": server}, rounds=1)
    found = simulate(settings, out=tmp_path / "run")
    # Adam's first step, bias corrected, is the rate in the direction of the mean delta
    torch.testing.assert_close(
        (last_model(found) - first_model(settings)).abs(), torch.full((650,), 0.01), rtol=1e-3, atol=1e-6
    )


def test_clients_that_go_wrong_are_named(tmp_path: Path) -> None:
    options = {"config": {"steps": 1}, "run_config": {"wrong": "the camera is covered"}}
    settings = with_clients(difficult, options=options, rounds=1, round={"quorum": 0.1})
    found = simulate(settings, out=tmp_path / "run")
    assert found.failed_rounds == 0
    told = {outcome.client: outcome for _, outcome in outcomes(tmp_path / "run")}
    expected = {
        0: ("failed", r"client 0, NumPyClient.fit: it raised RuntimeError: the camera is covered"),
        1: ("failed", r"client 1, NumPyClient.fit: it raised"),
        2: ("rejected", r"client 2, NumPyClient.fit gave 1.weight as float32 \[10\]"),
        3: ("rejected", r"client 3, NumPyClient.fit gave 1 arrays"),
        4: ("rejected", r"the weight is 0"),
        5: ("accepted", ""),
    }
    assert {client: outcome.status for client, outcome in told.items()} == {
        client: status for client, (status, _) in expected.items()
    }
    for client, (_, cause) in expected.items():
        assert re.search(cause, told[client].cause), told[client].cause
    assert "in fit" in told[0].cause  # the traceback


def test_a_forgotten_to_client_is_done(tmp_path: Path) -> None:
    found = simulate(with_clients(unfinished, rounds=1), out=tmp_path / "a")
    assert found.model_sha256 == simulate(with_clients(softmax, rounds=1), out=tmp_path / "b").model_sha256


def test_what_is_no_client_is_named(tmp_path: Path) -> None:
    with pytest.raises(RoundAborted, match="it gave a int"):
        simulate(with_clients(not_a_client), out=tmp_path / "run")


def test_weights_beyond_the_bound_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RoundAborted, match="max_weight = 5"):
        simulate(with_clients(softmax, update={"max_weight": 5.0}), out=tmp_path / "run")


def nameless(input_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """A model with a module of buffers alone."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.BatchNorm1d(64, affine=False), torch.nn.Linear(64, classes)
    )


def test_an_order_that_is_not_known_has_to_be_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1.running_mean, .* belong to a module without parameters"):
        simulate(with_clients(counting, model=f"{HERE}:nameless", options={}), out=tmp_path / "run")
    names = ["2.weight", "2.bias"]
    settings = with_clients(counting, model=f"{HERE}:nameless", options={"names": names})
    found = simulate(settings, out=tmp_path / "run")
    tensors = Run.open(tmp_path / "run").load_checkpoint().tensors
    assert float(tensors["buffer/1.running_mean"].abs().max()) == 0
    assert found.failed_rounds == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client_fn": f"{HERE}:nobody"}, "has no 'nobody'"),
        ({"client_fn": f"{HERE}:old_fashioned"}, r"takes \(cid\)"),
        ({"client_fn": f"{HERE}:softmax", "server": "scaffold"}, "server is 'scaffold'"),
        ({"client_fn": f"{HERE}:softmax", "confg": {}}, "no option is called 'confg'"),
        ({"client_fn": lambda context: None}, "define it at the top of a module"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        numpy_client(**options)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["1.weight"], "'1.bias' is missing"),
        (["1.weight", "1.bias", "1.bais"], "no tensor is called '1.bais'"),
        (["1.weight", "1.bias", "1.bias"], "twice"),
    ],
)
def test_wrong_names_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(with_clients(softmax, options={"names": names}), out=tmp_path / "run")
