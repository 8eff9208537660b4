"""What would be refused: a device connects, hears what the runs there ask for, and trains nothing."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any, Final

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.frames import Problem, Reason
from mycelia.aggregator.wire.offers import Manifest
from mycelia.aggregator.wire.settings import TaskSettings
from mycelia.client.config import ClientConfig
from mycelia.client.device_journal import DeviceJournal
from mycelia.client.identity import DeviceIdentity
from mycelia.client.rules import Refused, Rules
from mycelia.client.transport import Came, Connected, Lost, Place, Transport
from mycelia.engine.data import Dataset, load
from mycelia.engine.errors import MyceliaError
from mycelia.engine.plugins import user_code
from mycelia.engine.recipe import Recipe
from mycelia.privacy.secagg.messages import Envelope, envelope_limit, parse_config
from mycelia.privacy.secagg.roster import Roster

__all__ = ["check_device"]

_PATIENCE_S: Final = 30.0  # for an answer; building a model does not count


def check_device(config: ClientConfig, *, insecure: bool = False) -> dict[str, Any]:
    """Connect as the device, and compare what is asked there with its policy, model and data.

    Args:
        config: what its owner says.
        insecure: without TLS.

    Returns:
        client, server, tls, certificate_until, roster_epoch, examples; `runs`, each with its name, purpose,
        algorithm and what would be refused; `refused`, the names of runs it would not take part in;
        `problem`, why it could not find out, "" if it could.

    Raises:
        ConfigError: the configuration does not fit.
        DataError: identity, journal or data cannot be used.
    """
    return asyncio.run(_check(config, insecure))


async def _check(config: ClientConfig, insecure: bool) -> dict[str, Any]:
    with user_code(f"data {config.data.name}"):
        dataset = await asyncio.to_thread(load, config.data.name, **config.data.options)
    with DeviceIdentity.open(config.identity) as identity:
        keys = identity.check(int(time.time()))
        journal = DeviceJournal.open(config.state, identity.folder)
        found: dict[str, Any] = {
            "client": identity.client,
            "server": "",
            "tls": not insecure,
            "certificate_until": keys.certificate.not_after,
            "roster_epoch": 0,
            "examples": len(dataset.train),
            "runs": [],
            "refused": [],
            "problem": "",
        }
        try:
            rules = Rules(config, journal, len(dataset.train), insecure, datetime.now)
            await _ask(config, identity, rules, dataset, found, insecure)
        finally:
            journal.close()
    return found


async def _ask(
    config: ClientConfig,
    identity: DeviceIdentity,
    rules: Rules,
    dataset: Dataset,
    found: dict[str, Any],
    insecure: bool,
) -> None:
    wanted = config.policy.secure_sum == "required"
    transport = Transport(config.server, identity, _no_place, insecure=insecure, secure_sum=wanted)
    roster: Roster | None = None
    schemas: dict[str, str] = {}
    now = asyncio.get_running_loop().time
    async with transport:
        try:
            async with asyncio.timeout(_PATIENCE_S) as limit:
                async for event in transport:
                    match event:
                        case Connected(server, _, known):
                            found["server"], found["roster_epoch"], roster = server, known.epoch, known
                            transport.send(pb.ClientFrame(ask=pb.Ask()))
                        case Lost(error):
                            found["problem"] = str(error)
                            return
                        case Came(frame) if frame.HasField("task") and frame.task.work == pb.DESCRIBE:
                            limit.reschedule(None)
                            row = await asyncio.to_thread(
                                _compared, frame.task, config, rules, dataset, roster, schemas
                            )
                            found["runs"].append(row)
                            if row["refused"]:
                                found["refused"].append(row["run"])
                            limit.reschedule(now() + _PATIENCE_S)
                        case Came(frame) if frame.HasField("retry_at"):
                            return
                        case _:
                            pass
        except TimeoutError:
            found["problem"] = f"no answer within {_PATIENCE_S:g} s"


def _compared(
    task: pb.Task,
    config: ClientConfig,
    rules: Rules,
    dataset: Dataset,
    roster: Roster | None,
    schemas: dict[str, str],
) -> dict[str, Any]:
    """One run, and the first thing in it that would be refused."""
    row: dict[str, Any] = {
        "run": task.at.run, "purpose": task.purpose, "algorithm": task.algorithm,
        "secure_sum": bool(task.secure_sum), "refused": "",
    }  # fmt: skip
    try:
        settings = TaskSettings.decode(task.settings)
        session = None
        if task.secure_sum:
            session = parse_config(Envelope.decode(task.secure_sum, envelope_limit(None)))
        rules.check(task, settings, roster=roster, config=session)
        own = schemas.get(settings.loss) or _schema(config, dataset, settings)
        schemas[settings.loss] = own
        if own != task.schema_sha256.hex():
            raise Refused("model", f"schema {task.schema_sha256.hex()[:12]}", f"schema {own[:12]}")
    except Refused as refused:
        row["refused"] = f"{refused.field}: asked {refused.asked}, allowed {refused.allowed}"
    except MyceliaError as error:
        row["refused"] = error.found
    return row


def _schema(config: ClientConfig, dataset: Dataset, settings: TaskSettings) -> str:
    """The schema of this device's own model."""
    model = config.model
    recipe = Recipe.of(dataset, model.name, model.options, settings.loss, settings.seed)
    with user_code(f"model {model.name}"):
        return recipe().schema.sha256


def _no_place(offer: pb.Offer, manifest: Manifest) -> Place:
    raise Problem(Reason.BUSY, "this device only looks", rule="nothing is sent to it", who="check")
