"""A script for an interpreter that has Flower: its SecAgg+ workflow with all clients in one process.

    python secure_sum_flower.py '{"clients": 20, "dim": 1000, "neighbours": 10, ...}'

Prints one JSON object. Needs nothing but Flower and NumPy, so that it runs where Mycelia is not installed:
Flower's own workflow, client modifier, messages and defaults, on a grid that hands each message to its client
at once. A client's time is that inside the modifier, the server's is the rest.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """One secure sum.

    Args:
        asked: clients, dim, neighbours, threshold, dropped (ids from 1 that send no masked upload), seed.

    Returns:
        client_ms (median over survivors), server_ms, upload_bytes and share_bytes of one client, peak_bytes
        (the most that the process took beyond the clients' vectors), error (the largest deviation of the
        mean) and version.

    Raises:
        RuntimeError: Flower gave up.
    """
    from importlib.metadata import version

    import flwr.compat.common.recorddict_compat as compat
    import numpy as np
    from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
    from flwr.client.mod import secaggplus_mod
    from flwr.common import (
        Code,
        FitIns,
        FitRes,
        Status,
        ndarrays_to_parameters,
        parameters_to_ndarrays,
    )
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
    from flwr.server.compat.legacy_context import LegacyContext
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
    from flwr.server.workflow.constant import Key as WorkflowKey
    from flwr.supercore.task_identity import TaskIdentity

    clients, size = int(asked["clients"]), int(asked["dim"])
    dropped = set(asked["dropped"])
    draw = np.random.default_rng(int(asked["seed"]))
    vectors = {node: draw.uniform(-1, 1, size).astype(np.float32) for node in range(1, clients + 1)}
    model = ndarrays_to_parameters([np.zeros(size, np.float32)])

    class Node:
        def __init__(self, node: int) -> None:
            self.node_id, self.cid = node, str(node)

    class Strategy:
        found: Any = None

        def configure_fit(self, round_: int, parameters: Any, manager: Any) -> list[Any]:
            return [(Node(node), FitIns(parameters, {})) for node in vectors]

        def aggregate_fit(
            self, round_: int, results: list[Any], failures: list[Any]
        ) -> tuple[Any, dict[str, Any]]:
            self.found = parameters_to_ndarrays(results[0][1].parameters)[0]
            return results[0][1].parameters, {}

    class Manager:
        def num_available(self) -> int:
            return clients

    def train(message: Any, context: Any) -> Any:
        vector = vectors[message.metadata.dst_node_id]
        answer = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector]), 1, {})
        return Message(compat.fitres_to_recorddict(answer, False), reply_to=message)

    class Grid:
        """What Flower's workflow asks of one."""

        def __init__(self) -> None:
            self.contexts = {
                node: Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
                for node in vectors
            }
            self.spent = dict.fromkeys(vectors, 0.0)
            self.total = 0.0
            self.upload = self.shares = 0

        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
            del timeout
            begin = time.process_time()
            answers = [self.answer(message) for message in messages]
            self.total += time.process_time() - begin
            return answers

        def own(self, message: Any) -> Any:
            """A message whose settings nobody shares, as it is once it came over a network."""
            records = dict(message.content.items())
            records[RECORD_KEY_CONFIGS] = ConfigRecord(dict(records[RECORD_KEY_CONFIGS]))
            return Message(RecordDict(records), metadata=message.metadata)

        def answer(self, message: Any) -> Any:
            node = message.metadata.dst_node_id
            message = self.own(message)
            stage = str(message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE])
            if stage == Stage.COLLECT_MASKED_VECTORS and node in dropped:
                return Message(Error(0, "gone"), reply_to=message)
            begin = time.process_time()
            reply = secaggplus_mod(message, self.contexts[node], train)
            self.spent[node] += time.process_time() - begin
            found = reply.content.config_records[RECORD_KEY_CONFIGS]
            if stage == Stage.COLLECT_MASKED_VECTORS:
                self.upload = sum(len(part) for part in found[Key.MASKED_PARAMETERS])
            elif stage == Stage.SHARE_KEYS:
                self.shares = sum(len(part) + 8 for part in found[Key.CIPHERTEXT_LIST])
            return reply

    context: Any = LegacyContext(
        Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={}),
        strategy=Strategy(),
        client_manager=Manager(),
    )
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(model, True)
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    grid = Grid()
    workflow = SecAggPlusWorkflow(
        num_shares=int(asked["neighbours"]) + 1, reconstruction_threshold=int(asked["threshold"])
    )
    before = _resident()
    begin = time.process_time()
    workflow(grid, context)
    whole = time.process_time() - begin
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if context.strategy.found is None:
        raise RuntimeError("Flower gave no sum")
    survivors = [node for node in vectors if node not in dropped]
    mean = np.mean([vectors[node] for node in survivors], axis=0)
    return {
        "client_ms": 1e3 * statistics.median(grid.spent[node] for node in survivors),
        "server_ms": 1e3 * (whole - grid.total),
        "upload_bytes": grid.upload,
        "share_bytes": grid.shares,
        "peak_bytes": max(0, peak - before),
        "error": float(np.abs(context.strategy.found - mean).max()),
        "version": version("flwr"),
    }


def _resident() -> int:
    """Bytes of this process in memory; Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    import logging

    logging.disable(logging.WARNING)
    print(json.dumps(measure(json.loads(sys.argv[1]))))
