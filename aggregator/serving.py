"""From server.toml to a server that runs: plans, streams, enrolment, the status page, and the end of it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch

from mycelia.aggregator.enrolment import EnrolmentPort
from mycelia.aggregator.file_watch import FileWatch
from mycelia.aggregator.identity import ServerKeys
from mycelia.aggregator.identity_online import OnlineAuthority
from mycelia.aggregator.logs import log
from mycelia.aggregator.runs.gathering import Stopped
from mycelia.aggregator.runs.plans import Population, RunPlan, plan_run
from mycelia.aggregator.runs.run import RunResult
from mycelia.aggregator.runs.server import Places, Server, Work
from mycelia.aggregator.server_config import ServerConfig, StatusTable, check_together
from mycelia.aggregator.status import Board, StatusServer, available
from mycelia.aggregator.wire.channel import split_address
from mycelia.engine.data import Dataset, Examples, load
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.events import Listener
from mycelia.engine.heap import share_heap
from mycelia.engine.plugins import user_code
from mycelia.engine.recipe import Recipe
from mycelia.privacy.secagg.canonical import SecureSumError
from mycelia.privacy.secagg.roster import Roster

__all__ = ["Serving", "Started", "plans_of", "recipe_of", "serve"]


@dataclass(frozen=True)
class Started:
    """A server is up.

    Attributes:
        listen: its address for devices.
        enrol: its address for devices without a certificate; "" without one.
        status: address of the status page; "" without one.
        status_off: why there is none, for people; "" where there is one.
        board: what it says about itself.
    """

    listen: str
    enrol: str
    status: str
    status_off: str
    board: Board


@dataclass
class Serving:
    """How a server is run.

    Attributes:
        insecure: without TLS.
        listeners: called with every event of every run.
        started: called when it is up.
        signals: whether SIGTERM and SIGINT end it in good order.
        interrupted: set when it was SIGINT.
    """

    insecure: bool = False
    listeners: Sequence[Listener] = ()
    started: Callable[[Started], None] = lambda started: None
    signals: bool = True
    interrupted: bool = field(default=False, init=False)


async def serve(configs: Sequence[ServerConfig], how: Serving | None = None) -> Mapping[str, RunResult]:
    """Run a server until its runs are over.

    Args:
        configs: one for each run, from `load_server_config`.
        how: see `Serving`.

    Returns:
        results by the runs' names; of a server that was told to end, of those that were over.

    Raises:
        ConfigError: settings that do not fit together, or something is in use.
        DataError: keys, roster or data are missing or damaged.
        RoundAborted: a run in which too many rounds failed.
        Problem: `STORE_CORRUPT`, `STORE`, `NOT_LEADER`.
    """
    how = how or Serving()
    check_together(configs)
    share_heap()
    first = configs[0]
    server_table = first.server
    keys = ServerKeys.open(Path(server_table.keys), int(time.time()))
    document = _read(Path(server_table.roster))
    roster = _verified(keys, document)
    plans = await asyncio.to_thread(plans_of, configs, roster)
    works = [Work(plan, Path(str(config.run.out))) for plan, config in zip(plans, configs, strict=True)]
    board = Board()
    async with AsyncExitStack() as stack:
        server = Server(
            keys, document, works, _places(first), board, limits=first.limits.limits(), insecure=how.insecure,
            listeners=how.listeners,
        )  # fmt: skip
        authority = _authority(server_table.operator, server)
        if authority is not None:
            stack.push_async_callback(authority.close)
            server.renew = authority.renew
        stack.push_async_callback(server.stop)
        port = await server.start(server_table.listen)
        listen = _address(server_table.listen, port)
        board.server(keys.name, listen, version("mycelia"), how.insecure)
        enrol = ""
        if server_table.enrol_listen is not None and authority is not None:
            enrolment = EnrolmentPort(keys, authority)
            enrol = _address(server_table.enrol_listen, await enrolment.start(server_table.enrol_listen))
            stack.push_async_callback(enrolment.stop)
        status, off = await _status(stack, first.status, board)
        watch = FileWatch([Path(server_table.roster)], lambda: _new_roster(server, server_table.roster))
        watch.start()
        stack.callback(watch.stop)
        if how.signals:
            _handle_signals(server, how)
        log("serving", hint=listen)
        how.started(Started(listen, enrol, status, off, board))
        with suppress(Stopped):
            return await server.run()
        log("stopped", hint="rounds go on where they were when this server is started again")
        return server.results


def plans_of(configs: Sequence[ServerConfig], roster: Roster) -> list[RunPlan]:
    """What the runs come to; loads the server's own data, and builds the models.

    Args:
        configs: one for each run.
        roster: verified.

    Raises:
        ConfigError: settings that contradict each other.
        DataError: data that is missing or malformed.
    """
    # Those that were revoked count, or a run would be another one after a revocation.
    enrolled = {entry.client for entry in roster.clients} | set(roster.revoked)
    plans = []
    for config in configs:
        recipe, test = recipe_of(config)
        population = Population(
            config.run.population or len(enrolled), config.run.max_examples, config.run.examples
        )
        run = config.run
        plans.append(
            plan_run(config, recipe, name=run.name, purpose=run.purpose, population=population, test=test)
        )
    return plans


def recipe_of(config: ServerConfig) -> tuple[Recipe, Examples | None]:
    """How the model is built, and what it is measured on: from data, or from the shape of an example."""
    if config.data is not None:
        with user_code(f"data {config.data.name}"):
            dataset: Dataset = load(config.data.name, **config.data.options)
        loss = config.loss_for(dataset.classes)
        recipe = Recipe.of(dataset, config.model.name, config.model.options, loss, config.seed)
        return recipe, dataset.test
    if config.example is None:  # the configuration has refused it
        raise ConfigError("neither data nor example", rule="one of them", who="example")
    inputs, targets = (torch.from_numpy(array) for array in config.example.batch(2))
    loss = config.loss_for(config.example.classes)
    recipe = Recipe(
        config.model.name, config.model.options, loss, tuple(inputs.shape[1:]), config.example.classes,
        (inputs, targets), config.seed,
    )  # fmt: skip
    return recipe, None


def _places(config: ServerConfig) -> Places:
    """Where things are kept; what is one server's alone lies with its keys, since blobs may be shared."""
    rows, own = config.store.blobs == "rows", Path(config.server.keys) / "server-state"
    return Places(
        config.store.url, None if rows else Path(config.store.blobs), own, config.payload.spool_max,
        config.payload.max,
    )  # fmt: skip


def _authority(folder: str | None, server: Server) -> OnlineAuthority | None:
    if folder is None:
        return None

    async def known(document: bytes) -> None:
        server.take_roster(document)

    return OnlineAuthority(Path(folder), known)


async def _status(stack: AsyncExitStack, table: StatusTable | None, board: Board) -> tuple[str, str]:
    """The status page's address, or why there is none."""
    if table is None and not available():
        return "", "off: pip install 'mycelia[status]'"
    wanted = table or StatusTable()
    token = None if wanted.token_file is None else Path(wanted.token_file)
    page = StatusServer(board, wanted.listen, token)
    try:
        port = await page.start()
    except ConfigError as error:
        if table is not None:
            raise
        return "", f"off: {error.found}"
    stack.push_async_callback(page.stop)
    return f"http://{_address(wanted.listen, port)}", ""


def _handle_signals(server: Server, how: Serving) -> None:
    loop = asyncio.get_running_loop()

    def end(interrupted: bool) -> None:
        how.interrupted = how.interrupted or interrupted
        server.halt()

    for number, interrupted in ((signal.SIGTERM, False), (signal.SIGINT, True)):
        with suppress(NotImplementedError, RuntimeError):  # not in this thread, or not on this system
            loop.add_signal_handler(number, end, interrupted)


def _new_roster(server: Server, path: str) -> None:
    """The file has changed; one that is no good changes nothing."""
    try:
        server.take_roster(_read(Path(path)))
    except (SecureSumError, MyceliaError) as error:
        log("roster_refused", level="error", hint=str(error))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"the roster cannot be read: {error.strerror}",
            rule="the server has the operator's newest roster",
            fix="copy roster.bin from the operator's folder",
            who=str(path),
        ) from error


def _verified(keys: ServerKeys, document: bytes) -> Roster:
    return Roster.load(document, keys.operator.key, now=int(time.time()), least_epoch=1)


def _address(listen: str, port: int) -> str:
    host, _ = split_address(listen)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
