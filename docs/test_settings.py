"""The tables of settings, failures and metrics say what the code says, no more and no less."""

import json
import re
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from mycelia.aggregator.server_config import ServerConfig, load_server_config
from mycelia.aggregator.wire.problems import ENDS_STREAM, Reason
from mycelia.client.backoff import Then, then
from mycelia.client.config import ClientConfig, load_client_config
from mycelia.engine.config import Named, Strict, load_config

HERE = Path(__file__).parent
REQUIRED = "required"


def tables(page: str, heading: str) -> list[list[str]]:
    """The cells of all tables under a heading of the second level, without the rows that name columns."""
    text = (HERE / page).read_text()
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"{page} has no heading {heading!r}"
    rows = [line.strip().strip("|") for line in section[1].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]
    heads = {place - 1 for place, row in enumerate(cells) if set(row[0]) <= {"-", ":"}}
    return [row for place, row in enumerate(cells) if place not in heads and place - 1 not in heads]


def table_of(annotation: Any) -> type[Strict] | None:
    """The table of settings that a field holds, if it holds one."""
    if get_origin(annotation) in {typing.Union, types.UnionType, typing.Annotated}:
        found = (table_of(each) for each in get_args(annotation))
        return next((each for each in found if each is not None), None)
    is_table = isinstance(annotation, type) and issubclass(annotation, Strict)
    return annotation if is_table and not issubclass(annotation, Named) else None


def settings(model: type[Strict], before: str = "", own: Strict | None = None) -> Iterator[tuple[str, str]]:
    """Every key with its default; of a table that is left out, those that it has when it is there."""
    for name, field in model.model_fields.items():
        key, default = f"{before}{name}", REQUIRED
        if not field.is_required():
            default = getattr(own, name) if own is not None else field.get_default(call_default_factory=True)
        table = table_of(field.annotation)
        if table is None:
            yield key, shown(default)
            continue
        if before == "" and field.is_required():
            default = None
        yield from settings(table, f"{key}.", default if isinstance(default, Strict) else None)


def shown(default: Any) -> str:
    """A default as the tables have it."""
    match default:
        case str() if default == REQUIRED:
            return REQUIRED
        case None:
            return "–"
        case bool():
            return f"`{str(default).lower()}`"
        case Named():
            return f"`{json.dumps(default.name)}`"
        case int() | float():
            return f"`{default:,}`".replace(",", "_") if float(default).is_integer() else f"`{default}`"
        case tuple():
            return f"`{json.dumps(list(default))}`"
        case _:
            return f"`{json.dumps(default)}`"


@pytest.mark.parametrize(("heading", "model"), [("server.toml", ServerConfig), ("client.toml", ClientConfig)])
def test_every_setting_is_in_the_table(heading: str, model: type[Strict]) -> None:
    found = {row[0].strip("`"): row[1] for row in tables("settings.md", heading)}
    assert found == dict(settings(model))


def test_the_files_that_pages_show_are_good() -> None:
    page = (HERE / "deploy.md").read_text()
    load_config(ServerConfig, tomllib.loads(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0]))
    example = HERE.parent / "examples" / "localhost"
    config = load_server_config(example / "server.toml")
    owners = [load_client_config(example / f"client-{number}.toml") for number in (1, 2, 3)]
    assert {owner.server for owner in owners} == {(config.server.listen,)}


def test_every_reason_is_in_the_table() -> None:
    found = {row[0].strip("`"): row for row in tables("operations.md", "When something goes wrong")}
    assert set(found) == {reason.value for reason in Reason}
    for reason in Reason:
        assert (found[reason.value][1] == "ends") == (reason in ENDS_STREAM), reason
    waits = {name for name, row in found.items() if "waits for the operator" in row[3]}
    stops = {name for name, row in found.items() if row[3].startswith("stops")}
    ending = {reason: then(0, reason) for reason in ENDS_STREAM}
    assert waits == {reason.value for reason, what in ending.items() if what is Then.OPERATOR}
    assert stops == {reason.value for reason, what in ending.items() if what is Then.STOP}


def test_every_metric_is_in_the_table() -> None:
    pytest.importorskip("prometheus_client")
    from mycelia.aggregator.status import Board
    from mycelia.aggregator.status.metrics import exposition, registry

    text, _ = exposition(registry(Board()), "text/plain")
    exposed = set(re.findall(r"^# TYPE (\S+) ", text.decode(), re.MULTILINE))
    assert {row[0].strip("`").partition("{")[0] for row in tables("operations.md", "Metrics")} == exposed
