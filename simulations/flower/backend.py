"""The backend whose clients are the nodes of a Flower Grid."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from flwr.app import Message as FlowerMessage
from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid

from mycelia.engine.algorithms import Message
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.metrics import Metrics
from mycelia.engine.sums import ExactSum, Total
from mycelia.simulations.backends import Backend, Failure, Outcomes
from mycelia.simulations.backends.base import COLUMNS, Progress, quiet
from mycelia.simulations.flower.device import replica_of
from mycelia.simulations.flower.records import (
    Work,
    model_records,
    raise_error,
    read_failure,
    read_update,
    work_records,
)
from mycelia.simulations.preparation import Prepared

__all__ = ["FlowerNodes"]

_NODES_WITHIN_S = 120.0
_READY_WITHIN_S = 600.0  # a process may have to compile the model
_LOOK_S = 0.05


class FlowerNodes(Backend):
    """Trains and measures clients by messages to Flower nodes; the sum is made here.

    Args:
        prepared: the scenario's parts.
        grid: of the ServerApp.
        scenario_sha256: hash of the settings, which the ClientApp has to share.
        deadline_s: most seconds that answers are waited for.

    Attributes:
        workers: number of nodes; how many processes act for them is Flower's business.

    Raises:
        ConfigError: the nodes are not one for each client, or their app is another.
        MyceliaError: too few nodes in time.
    """

    name = "flower"

    def __init__(self, prepared: Prepared, grid: Grid, scenario_sha256: str, deadline_s: float) -> None:
        self._grid, self._deadline_s = grid, deadline_s
        self._replica = replica_of(prepared)
        self._sum = self._replica.sum
        self._fresh = True
        self._work = Work(
            plan=prepared.plan.name,
            scenario_sha256=scenario_sha256,
            partition_sha256=prepared.partition.sha256,
            schema_sha256=prepared.program.schema.sha256,
        )
        self._void: set[int] = set()
        self._void_for: dict[int, set[int]] = {}
        self._nodes = self._find_nodes(prepared.partition.clients)
        self.workers = len(self._nodes)

    def forget(self, round: int) -> None:
        """A round failed: clients drop the states that it left."""
        self._void.add(round)

    def train(self, message: Message, clients: Sequence[int], progress: Progress = quiet) -> Outcomes:
        """Ask these clients' nodes, and add their updates as they come."""
        if self._fresh:
            self._sum.reset()
            self._fresh = False
        answers = self._ask(MessageType.TRAIN, message, clients, self._work)
        table = np.zeros((len(clients), len(COLUMNS)))
        failures = []
        for position, client in enumerate(clients):
            failure = self._take(answers.get(int(client)), position, table[position])
            if failure is not None:
                failures.append(failure)
                self._void_for.setdefault(int(client), set()).add(message.round)
            progress(position + 1, len(clients))
        return Outcomes(table, tuple(failures))

    def total(self) -> Total:
        """The running sum; the next `train` starts a new one."""
        if self._fresh:  # nobody was trained: it still holds the sum before
            self._sum.reset()
        self._fresh = True
        return ExactSum.total(self._sum.form, [self._sum.accumulator], self._sum.count)

    def test(self, message: Message) -> Metrics:
        """Metrics on the test set, measured by the server."""
        metrics = Metrics(classes=self._replica.task.classes)
        for chunk in range(self._replica.chunks()):
            metrics = metrics + self._replica.test(message, chunk)
        return metrics

    def spread(self, message: Message, clients: Sequence[int], limit: int) -> dict[int, dict[str, float]]:
        """Metrics of each client's own model, measured by its node.

        Raises:
            MyceliaError: a node did not answer, or failed.
        """
        answers = self._ask(MessageType.EVALUATE, message, clients, replace(self._work, limit=limit))
        found = {}
        for client in map(int, clients):
            content = _content(answers.get(client), self._deadline_s)
            if isinstance(content, str):
                raise MyceliaError(content, rule="every client asked is measured", who=f"client {client}")
            metrics: Mapping[str, object] = content.metric_records["metrics"]
            found[client] = {name: float(str(value)) for name, value in metrics.items()}
        return found

    def close(self) -> None:
        """Nothing to free: the nodes are Flower's."""

    def _take(
        self, answer: FlowerMessage | None, position: int, row: np.ndarray[tuple[int], np.dtype[np.float64]]
    ) -> Failure | None:
        """Add one client's update and fill its row; or what went wrong."""
        content = _content(answer, self._deadline_s)
        if isinstance(content, str):
            return Failure(position, False, content, "look at the node's log")
        raise_error(content)
        failure = read_failure(content, position)
        if failure is not None:
            return failure
        try:
            update = read_update(content)
            seconds = float(str(content.metric_records["seconds"]["seconds"]))
            self._sum.add(update)
        except DataError as error:
            return Failure(position, True, error.found, error.fix or error.rule)
        except (KeyError, TypeError, ValueError) as error:
            return Failure(
                position, True, f"the answer is no update: {error}", "the records are those of update_records"
            )
        metrics = update.metrics
        weight = next(iter(update.terms.values())).weight
        row[:] = (
            1.0,
            weight,
            *(metrics.get(name, 0.0) for name in ("loss_sum", "examples", "steps")),
            seconds,
        )
        return None

    def _ask(
        self, kind: str, message: Message, clients: Sequence[int], work: Work
    ) -> dict[int, FlowerMessage]:
        """The answers to one message for each client, by client."""
        model, work = model_records(message), replace(work, round=message.round)
        asked = []
        for client in map(int, clients):
            void = tuple(sorted(self._void | self._void_for.get(client, set())))
            content = work_records(replace(work, void=void), model)
            asked.append(FlowerMessage(content, self._nodes[client], kind))
        of_node = {node: client for client, node in enumerate(self._nodes)}
        return {of_node[node]: answer for node, answer in self._exchange(asked, self._deadline_s).items()}

    def _exchange(self, messages: Iterable[FlowerMessage], seconds: float) -> dict[int, FlowerMessage]:
        """Answers by node; those that do not come in time are missing."""
        answers = self._grid.send_and_receive(list(messages), timeout=seconds)
        return {answer.metadata.src_node_id: answer for answer in answers}

    def _find_nodes(self, clients: int) -> list[int]:
        """The node of each client, once all have registered."""
        nodes = self._await_nodes(clients)
        asked = [FlowerMessage(work_records(self._work), node, MessageType.QUERY) for node in nodes]
        answers = self._exchange(asked, max(self._deadline_s, _READY_WITHIN_S))
        found: dict[int, int] = {}
        for node in nodes:
            content = _content(answers.get(node), self._deadline_s)
            if isinstance(content, str):
                raise MyceliaError(
                    content, rule="every node says which client it is", who=f"Flower node {node}"
                )
            raise_error(content)
            said = content.config_records["node"]
            partition, of = int(str(said["partition-id"])), int(str(said["num-partitions"]))
            if of != clients or not 0 <= partition < clients:
                raise _other_population(f"is partition {partition} of {of}", clients, node)
            if partition in found:
                raise _other_population(
                    f"is partition {partition}, as node {found[partition]} is", clients, node
                )
            found[partition] = node
        return [found[client] for client in range(clients)]

    def _await_nodes(self, clients: int) -> list[int]:
        """All nodes, as soon as there are as many as clients; Flower has no event to wait for."""
        ends = time.monotonic() + _NODES_WITHIN_S
        while len(nodes := sorted(self._grid.get_node_ids())) < clients:
            if time.monotonic() > ends:
                raise MyceliaError(
                    f"{len(nodes)} nodes within {_NODES_WITHIN_S:g} s",
                    rule=f"a node for each of the {clients} clients",
                    fix=f"start as many SuperNodes, or set num-supernodes = {clients}",
                    who="Flower",
                )
            time.sleep(_LOOK_S)
        if len(nodes) > clients:
            raise ConfigError(
                f"{len(nodes)} nodes",
                rule=f"a node for each of the {clients} clients",
                fix=f"set num-supernodes = {clients}, or population.clients",
                who="Flower",
            )
        return nodes


def _content(answer: FlowerMessage | None, waited_s: float) -> RecordDict | str:
    """What a node answered, or why there is nothing."""
    if answer is None:
        return f"no answer within {waited_s:g} s"
    if answer.has_error():
        return f"Flower reports: {answer.error.reason or answer.error.code}"
    return answer.content


def _other_population(found: str, clients: int, node: int) -> ConfigError:
    return ConfigError(
        found,
        rule=f"the partition-ids are those of the {clients} clients, 0 to {clients - 1}, each once",
        fix="start the SuperNodes with --node-config 'partition-id=… num-partitions=…' accordingly",
        who=f"Flower node {node}",
    )
