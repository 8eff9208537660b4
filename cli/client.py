"""`mycelia client`: devices, one or several in this process, from their configuration or as a demo."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycelia.cli.options import PrintConfigOption, SettingsOption, overrides_of
from mycelia.cli.output import FAILED, INTERRUPTED, Format, FormatOption, note, print_json, print_pairs
from mycelia.client.notices import ConnectedTo, Disconnected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mycelia.client.config import ClientConfig
    from mycelia.client.notices import Listener, Notice
    from mycelia.client.runner import Device

__all__ = ["command"]

_DEMO = Path("mycelia-demo")
_WAIT_S = 60.0


def command(
    config: Annotated[Path | None, typer.Option("--config", help="A client.toml.")] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="The devices of `mycelia serve --demo`, from ./mycelia-demo.")
    ] = False,
    count: Annotated[int, typer.Option("--count", help="With --demo: how many devices.", min=1, max=20)] = 3,
    first: Annotated[int, typer.Option("--first", help="With --demo: the first of them.", min=1)] = 1,
    once: Annotated[bool, typer.Option("--once", help="End when a run it took part in is over.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Connect, say what would be refused, and train nothing.")
    ] = False,
    new_journal: Annotated[
        bool,
        typer.Option("--new-journal", help="Begin new journals: only for a device that was enrolled anew."),
    ] = False,
    settings: SettingsOption = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS; the server has to say the same.")
    ] = False,
    print_config: PrintConfigOption = False,
    form: FormatOption = Format.text,
) -> int:
    """Take part in federations, within the policy in client.toml.

    The device trains on its own data with its own model; no code comes from a server. It waits for work
    until it is told to end (SIGTERM, Ctrl-C), through lost connections and restarts of either side.

    Example: mycelia client --config client.toml
    """
    from mycelia.engine.config import to_toml
    from mycelia.engine.errors import ConfigError

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is told in our own words

    if demo == (config is not None):
        raise ConfigError(
            "--config and --demo" if demo else "neither --config nor --demo",
            rule="one of them",
            fix="mycelia client --demo --count 3, or mycelia client --config client.toml",
            who="client",
        )
    from mycelia.client.config import load_client_config

    overrides = overrides_of(settings, None)
    paths = [config] if config is not None else _demo(first, count)
    configs = [load_client_config(path, overrides) for path in paths]
    if print_config:
        print("\n".join(to_toml(each) for each in configs), end="")
        return 0
    if check:
        return _check(configs, insecure=insecure, form=form)
    return _run(configs, once=once or demo, insecure=insecure, new_journal=new_journal, demo=demo, form=form)


def _demo(first: int, count: int) -> list[Path]:
    """The files of the demo's devices, once the server has written them."""
    from mycelia.cli.demo_folder import find_demo
    from mycelia.engine.errors import ConfigError

    until, told = time.monotonic() + _WAIT_S, False
    while (found := find_demo(_DEMO)) is None:
        if time.monotonic() >= until:
            raise ConfigError(
                f"there is no {_DEMO}/ after {_WAIT_S:g} s",
                rule="the server makes the demo's keys",
                fix="run `mycelia serve --demo` in the same folder",
                who="--demo",
            )
        if not told:
            note(f"waiting for {_DEMO}/ : run `mycelia serve --demo` in this folder")
            told = True
        time.sleep(0.2)
    if first + count - 1 > len(found.clients):
        raise ConfigError(
            f"devices {first} to {first + count - 1}",
            rule=f"this demo has {len(found.clients)}",
            fix=f"--count {len(found.clients)}, or mycelia serve --demo --clients {first + count - 1}",
            who="--count",
        )
    return list(found.clients[first - 1 : first - 1 + count])


def _run(
    configs: Sequence[ClientConfig],
    *,
    once: bool,
    insecure: bool,
    new_journal: bool,
    demo: bool,
    form: Format,
) -> int:
    import torch

    from mycelia.cli.client_lines import Lines
    from mycelia.client.runner import Device

    torch.set_num_threads(1)
    several = len(configs) > 1
    here = _Here()
    devices = [
        Device(
            each,
            listeners=[Lines(place if several else 0).notice, here.of(place)],
            insecure=insecure,
            once=once,
            new_journal=new_journal,
        )
        for place, each in enumerate(configs, 1)
    ]  # fmt: skip
    if insecure:
        note("INSECURE: no TLS; whoever is on the network reads and changes what is sent", "warning")
    ended = _until_over(devices, here, give_up_s=_WAIT_S if demo else None)
    reports = [device.report for device in devices]
    if form is Format.json:
        found = [_facts(report) for report in reports]
        print_json(found if several else found[0])
    else:
        print_pairs(
            [
                ("accepted", str(sum(report.accepted for report in reports))),
                ("declined", str(sum(report.declined for report in reports))),
                ("failed", str(sum(report.failed for report in reports))),
                ("sent", f"{sum(report.bytes_up for report in reports) / 1e6:.2f} MB"),
            ]
        )
    if ended == "interrupted":
        return INTERRUPTED
    if ended == "given up":
        note(f"no server for {_WAIT_S:g} s: is `mycelia serve --demo` running?", "error")
        return FAILED
    return 0


class _Here:
    """Which of some devices have a connection."""

    def __init__(self) -> None:
        self._here: set[int] = set()

    @property
    def any(self) -> bool:
        """Whether one of them has."""
        return bool(self._here)

    def of(self, place: int) -> Listener:
        """A listener for one of them."""

        def notice(notice: Notice) -> None:
            match notice:
                case ConnectedTo():
                    self._here.add(place)
                case Disconnected():
                    self._here.discard(place)
                case _:
                    pass

        return notice


def _facts(report: Any) -> dict[str, Any]:
    return {
        "client": report.client,
        "accepted": report.accepted,
        "declined": report.declined,
        "failed": report.failed,
        "bytes_up": report.bytes_up,
        "delivered": {run: str(each.model) for run, each in report.delivered.items()},
    }


def _until_over(devices: Sequence[Device], here: _Here, give_up_s: float | None) -> str:
    """Each device in a thread of its own, until all have ended or one has failed; how it came about."""
    ended, lock = "", threading.Lock()
    errors: list[BaseException] = []
    threads: list[threading.Thread] = []

    def go(device: Device) -> None:
        try:
            device.run()
        except BaseException as error:
            with lock:
                errors.append(error)
            for other in devices:
                other.close()

    def end(number: int, _: object) -> None:
        nonlocal ended
        ended = ended or ("interrupted" if number == signal.SIGINT else "stopped")
        for device in devices:
            device.close()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        threads = [threading.Thread(target=go, args=(device,), daemon=True) for device in devices]
        for thread in threads:
            thread.start()
        apart = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.2)
            if here.any:
                apart = time.monotonic()
            elif give_up_s is not None and time.monotonic() - apart > give_up_s:
                ended = ended or "given up"
                for device in devices:
                    device.close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if errors:
        raise errors[0]
    return ended


def _check(configs: Sequence[ClientConfig], *, insecure: bool, form: Format) -> int:
    """Connect, and say what would be refused."""
    from mycelia.client.checking import check_device

    facts = [check_device(each, insecure=insecure) for each in configs]
    if form is Format.json:
        print_json(facts if len(facts) > 1 else facts[0])
    else:
        for row in facts:
            print_pairs([(name.replace("_", " "), str(value)) for name, value in row.items()])
    return FAILED if any(row["refused"] or row["problem"] for row in facts) else 0
