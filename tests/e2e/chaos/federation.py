"""A small federation on this machine as files: keys, data, what both commands read; and its oracle."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from mycelia.aggregator.identity import IDENTITY_KEY, OPERATOR, TLS_CERTIFICATE, TLS_KEY
from mycelia.aggregator.merging import merge
from mycelia.aggregator.runs.plans import RunPlan
from mycelia.aggregator.server_config import load_server_config
from mycelia.aggregator.serving import plans_of
from mycelia.aggregator.wire.settings import TaskSettings, rounding_stream
from mycelia.client.training import Job, Local, Workplace
from mycelia.engine.algorithms import Message
from mycelia.engine.data import Dataset, load
from mycelia.engine.schema import model_sha256
from mycelia.engine.sums import ExactSum, Total
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import Pipeline
from mycelia.privacy.secagg.encoding import Encoding
from mycelia.privacy.secagg.private_keys import identity_pem
from mycelia.privacy.secagg.roster import Roster
from tests.aggregator.connections import NOW, World

RUN: Final = "study"
EXAMPLES: Final = 30
FEATURES: Final = 6
CLASSES: Final = 3
MASKS: Final = {"secure_sum": '{ threat = "passive", corrupt = 0.0, dropout = 0.3 }'}

_SERVER: Final = """\
server = {{ listen = "127.0.0.1:{port}", keys = "keys/", roster = "keys/roster.bin" }}
run = {{ name = "study", purpose = "study", population = {devices}, max_examples = 100, out = "run/" }}
status = {{ listen = "127.0.0.1:0" }}
limits = {{ address_handshakes = 1000.0, address_failures = 10000.0 }}
example = {{ inputs = [6], classes = 3 }}
algorithm = "fedavg"
cohort = {devices}
update = {{ max_weight = 100.0 }}
evaluation = {{ every = 0, clients = 0 }}
"""
_CLIENT: Final = """\
[client]
server = ["127.0.0.1:{port}"]
identity = "identity-{client}/"
state = "state-{client}/"
model = {model}
data = {{ name = "npz:data-{client}.npz", classes = 3 }}
out = "out-{client}/"

[policy]
purposes = ["study"]
algorithms = "any"
secure_sum = "any"
threat = "passive"
"""
_USUAL: Final = {
    "model": '{ name = "mlp", hidden = [5] }',
    "local": "{ epochs = 2, batch_size = 10, lr = 0.2 }",
    "round": "{ budget_s = 30, over_select = 1.0, quorum = 0.5, max_failed_rounds = 50 }",
    "seed": "7",
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@dataclass
class Federation:
    """Files in a folder.

    Attributes:
        folder: exists, and is empty.
        devices: how many.
        rounds: of the run.
        settings: of the run, as TOML says them, in the place of the usual ones.
    """

    folder: Path
    devices: int = 4
    rounds: int = 3
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World()
        self.port = free_port()
        for client in self.clients:
            self.world.enrol_folder(client, self.folder / f"identity-{client}").close()
            self._write_data(client)
        self._write_keys()
        given = {**_USUAL, **self.settings}
        self.model = given["model"]
        lines = [f"{name} = {value}" for name, value in given.items()]
        text = _SERVER.format(port=self.port, devices=self.devices)
        self.server_toml.write_text("\n".join([text, f"rounds = {self.rounds}", *lines]) + "\n")
        self.point_at(self.port)

    @property
    def clients(self) -> range:
        return range(1, self.devices + 1)

    @property
    def server_toml(self) -> Path:
        return self.folder / "server.toml"

    def client_toml(self, client: int) -> Path:
        return self.folder / f"client-{client}.toml"

    def point_at(self, port: int, clients: Iterable[int] = ()) -> None:
        """Devices find their server at this port from their next start on."""
        for client in clients or self.clients:
            text = _CLIENT.format(port=port, client=client, model=self.model)
            self.client_toml(client).write_text(text)

    def _write_data(self, client: int) -> None:
        draw = np.random.default_rng(client)
        inputs = draw.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
        labels = (np.abs(inputs).argmax(axis=1) + client) % CLASSES
        np.savez(
            self.folder / f"data-{client}.npz",
            x_train=inputs, y_train=labels, x_test=inputs[:10], y_test=labels[:10],
        )  # fmt: skip

    def _write_keys(self) -> None:
        """What `mycelia enrol server` writes, and the roster."""
        folder, keys = self.folder / "keys", self.world.keys
        folder.mkdir(mode=0o700)
        files = {
            OPERATOR: (keys.operator.pem, 0o644),
            TLS_KEY: (keys.tls_key_pem, 0o600),
            IDENTITY_KEY: (identity_pem(keys.identity), 0o600),
            TLS_CERTIFICATE: (keys.certificate_pem, 0o644),
            "roster.bin": (self.world.document(), 0o644),
        }
        for name, (content, mode) in files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(mode)

    # --- the oracle -------------------------------------------------------------------------------

    @cached_property
    def plan(self) -> RunPlan:
        """The run, as the server makes it of the file."""
        roster = Roster.load(self.world.document(), self.world.operator.public, now=NOW, least_epoch=1)
        (plan,) = plans_of([load_server_config(self.server_toml)], roster)
        return plan

    @cached_property
    def _jobs(self) -> dict[int, Job]:
        settings = TaskSettings.decode(self.plan.task_settings)
        jobs = {}
        for client in self.clients:
            data: Dataset = load(f"npz:{self.folder}/data-{client}.npz", classes=CLASSES)
            local = Local(self.folder / "oracle", NoiseSource.seeded(settings.seed), _no_release)
            jobs[client] = Job(settings, Workplace(data, self.plan.config.model, client), local)
        return jobs

    def expected(self, survivors: Sequence[Iterable[int]]) -> str:
        """Hash of the model after rounds whose sums are those of these devices; one process, no network.

        Args:
            survivors: of every published round, with its number as its place; nobody: the round failed.
        """
        plan = self.plan
        state = plan.algorithm.start(plan.program)
        pipeline = Pipeline() if plan.secure is None else plan.secure.pipeline(Pipeline())
        for number, clients in enumerate(survivors):
            ids = sorted(clients)
            if not ids:
                continue
            message = Message(state.vector, state.buffers, plan.message(state, {}), number)
            total = self._plain(message, ids) if plan.secure is None else self._secure(message, ids)
            state, _ = merge(
                plan.program, plan.algorithm, state, total, pipeline=pipeline, public={}, round=number
            )
        return model_sha256(plan.program.unflatten(state.vector) | state.buffers)

    @property
    def undisturbed(self) -> str:
        """Hash of the model when every device is in every sum."""
        return self.expected([self.clients] * self.rounds)

    def _plain(self, message: Message, ids: Sequence[int]) -> Total:
        exact = ExactSum(self.plan.form)
        for client in ids:
            exact.add(self._jobs[client].train(message).update)
        return ExactSum.total(self.plan.form, [exact.accumulator], exact.count)

    def _secure(self, message: Message, ids: Sequence[int]) -> Total:
        secure = self.plan.secure
        if secure is None:
            raise ValueError("no secure sum")
        nothing, size = bytes(32), secure.quantise.size
        config = secure.settings.round_config(
            job=RUN, round=message.round, nonce=nothing, model_sha256=nothing, schema_sha256=nothing,
            task_sha256=nothing, roster_sha256=nothing, size=size, clients=self.devices,
            slots=secure.quantise.bounds,
        )  # fmt: skip
        encoding = Encoding(config, size)
        words: Any = None
        for client in ids:
            job = self._jobs[client]
            vector, weight, slots = job.packed(job.train(message))
            rounding = rounding_stream(job.settings.seed, message.round, client)
            mine = encoding.encode(vector, weight, slots, client=client, rounding=rounding)
            words = mine.copy() if words is None else words + mine
        words &= words.dtype.type(2**config.bits - 1)
        decoded = encoding.decode(words, len(ids))
        return secure.quantise.opened(decoded.values, decoded.weight, decoded.slots, len(ids))


def _no_release(*_: object) -> Any:
    raise AssertionError("no device adds noise here")


def one_thread() -> None:
    torch.set_num_threads(1)
