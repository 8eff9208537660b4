"""`mycelia serve`: an aggregation server, from its configuration or as a demo."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycelia.cli.options import DryRunOption, PrintConfigOption, SeedOption, SettingsOption, overrides_of
from mycelia.cli.output import INTERRUPTED, Format, FormatOption, note, print_json, print_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mycelia.aggregator.runs.run import RunResult
    from mycelia.aggregator.server_config import ServerConfig
    from mycelia.aggregator.serving import Serving, Started
    from mycelia.cli.server_lines import Lines

__all__ = ["command"]

_DEMO = Path("mycelia-demo")


def command(
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", help="A server.toml; several for several runs on one server."),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Digits on three devices, with throw-away keys in ./mycelia-demo.")
    ] = False,
    clients: Annotated[
        int, typer.Option("--clients", help="With --demo: how many devices.", min=3, max=20)
    ] = 3,
    port: Annotated[
        int, typer.Option("--port", help="With --demo: of the server on this machine.", min=1, max=65535)
    ] = 8443,
    settings: SettingsOption = None,
    seed: SeedOption = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS; devices have to say the same.")
    ] = False,
    print_config: PrintConfigOption = False,
    dry_run: DryRunOption = False,
    form: FormatOption = Format.text,
) -> int:
    """Run rounds for devices that connect with `mycelia client`.

    The server ends by itself after the last round. SIGTERM and Ctrl-C end it earlier: started again, it goes
    on where it was. --demo makes an operator, a server and devices in ./mycelia-demo; `mycelia client --demo`
    in the same folder is the other half.

    Example: mycelia serve --config server.toml
    """
    from mycelia.aggregator.server_config import load_server_config
    from mycelia.engine.config import to_toml
    from mycelia.engine.errors import ConfigError

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is told in our own words

    if demo == bool(config):
        raise ConfigError(
            "--config and --demo" if demo else "neither --config nor --demo",
            rule="one of them",
            fix="mycelia serve --demo, or mycelia serve --config server.toml",
            who="serve",
        )
    overrides = overrides_of(settings, None if demo else seed)
    if demo:
        path = _demo(clients, seed or 0, port)
        configs = [_unfinished(load_server_config(path, overrides))]
    else:
        configs = [load_server_config(path, overrides) for path in config or []]
    if print_config:
        print("\n".join(to_toml(each) for each in configs), end="")
        return 0
    if dry_run:
        return _dry_run(configs, form)
    return _serve(configs, insecure=insecure, demo=demo, form=form)


def _demo(clients: int, seed: int, port: int) -> Path:
    from mycelia.cli.demo_folder import find_demo, make_demo

    before = find_demo(_DEMO)
    made = make_demo(_DEMO, clients=clients, seed=seed, port=port)
    if before is None:
        note(f"demo operator and {clients} identities written to {_DEMO}/")
    return made.server


def _unfinished(config: ServerConfig) -> ServerConfig:
    """The demo's run, or the next one, if that is over: a demo can be seen twice."""
    from mycelia.engine.events import RunFinished
    from mycelia.engine.run import Run, is_run

    number, first = 1, config.run
    folder = Path(str(first.out))
    while is_run(folder) and any(True for _ in Run.open(folder).events({RunFinished.kind})):
        number += 1
        folder = Path(f"{first.out}-{number}")
    if number == 1:
        return config
    run = first.model_copy(update={"name": f"{first.name}-{number}", "out": str(folder)})
    return config.model_copy(update={"run": run})


def _serve(configs: Sequence[ServerConfig], *, insecure: bool, demo: bool, form: Format) -> int:
    from mycelia.aggregator import logs
    from mycelia.aggregator.serving import Serving
    from mycelia.cli.server_lines import Lines

    lines = Lines(configs)
    logs.configure(level="warning" if demo or lines.live else "info")
    if insecure:
        note("INSECURE: no TLS; whoever is on the network reads and changes what is sent", "warning")
    how = Serving(insecure=insecure, listeners=[lines.event])
    results = asyncio.run(_go(configs, how, lines))
    if how.interrupted:
        note("interrupted; start it again, and it goes on where it was")
        return INTERRUPTED
    if len(results) < len(configs):
        note("stopped; start it again, and it goes on where it was")
        return 0
    _print(results, form)
    return 0


async def _go(configs: Sequence[ServerConfig], how: Serving, lines: Lines) -> Mapping[str, RunResult]:
    from mycelia.aggregator.serving import serve

    watching: asyncio.Task[None] | None = None

    def started(facts: Started) -> None:
        nonlocal watching
        lines.started(facts)
        watching = asyncio.create_task(lines.watch(facts.board))

    how.started = started
    try:
        return await serve(configs, how)
    finally:
        if watching is not None:
            watching.cancel()


def _print(results: Mapping[str, RunResult], form: Format) -> None:
    rows = list(results.values())
    if form is Format.json:
        print_json(
            rows[0].to_json() if len(rows) == 1 else {name: r.to_json() for name, r in results.items()}
        )
        return
    for name, result in results.items():
        accuracy = "none" if result.test_accuracy is None else f"{result.test_accuracy:.2%}"
        print_pairs(
            [
                ("run", name),
                ("rounds", f"{result.rounds}, {result.failed_rounds} attempts failed"),
                ("updates", f"{result.accepted} in the model, {result.dropped} dropped"),
                ("test accuracy", accuracy),
                ("secure sum", "yes" if result.secure_sum else "no"),
                ("sent", f"{result.bytes_up / 1e6:.1f} MB up, {result.bytes_down / 1e6:.1f} MB down"),
                ("seconds", f"{result.seconds_total:.1f}"),
                ("model", result.model_sha256),
                ("run folder", result.run_dir),
            ]
        )


def _dry_run(configs: Sequence[ServerConfig], form: Format) -> int:
    """Check everything that can be checked without devices."""
    import time

    from mycelia.aggregator.identity import ServerKeys
    from mycelia.aggregator.server_config import check_together
    from mycelia.aggregator.serving import plans_of
    from mycelia.privacy.secagg.roster import Roster

    check_together(configs)
    server = configs[0].server
    now = int(time.time())
    keys = ServerKeys.open(Path(server.keys), now)
    roster = Roster.load(Path(server.roster).read_bytes(), keys.operator.key, now=now, least_epoch=1)
    keys.check(roster, now)
    facts = {}
    for plan in plans_of(configs, roster):
        facts[plan.name] = {
            "purpose": plan.purpose,
            "model": plan.config.model.name,
            "parameters": plan.program.dimension,
            "algorithm": plan.algorithm.name,
            "rounds": plan.config.rounds,
            "cohort": plan.config.cohort,
            "devices": plan.population.clients,
            "secure_sum": None if plan.secure is None else plan.secure.facts(),
            "privacy": "" if plan.config.privacy is None else plan.config.privacy.unit,
        }
    if form is Format.json:
        print_json(facts)
        return 0
    for name, row in facts.items():
        print_pairs([("run", name), *((key.replace("_", " "), str(value)) for key, value in row.items())])
    return 0
