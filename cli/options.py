"""The options that every command which starts a run shares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mycelia.engine.errors import ConfigError

__all__ = [
    "DryRunOption",
    "OutOption",
    "PrintConfigOption",
    "ResumeOption",
    "SeedOption",
    "SettingsOption",
    "overrides_of",
    "refuse_with_resume",
]


def _path(text: str) -> Path:
    if not text.strip():  # an unset shell variable; Path("") would be the current folder
        raise typer.BadParameter("the path is empty")
    return Path(text)


SettingsOption = Annotated[
    list[str] | None, typer.Option("-s", metavar="KEY=VALUE", help="Override a setting; repeatable.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Override the root seed.")]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", parser=_path, help="The run folder, new or empty."),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option("--resume", metavar="RUN", parser=_path, help="Go on with an interrupted run."),
]
PrintConfigOption = Annotated[
    bool, typer.Option("--print-config", help="Print the resolved settings and exit.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check the settings, the data and the model, and exit.")
]


def overrides_of(settings: list[str] | None, seed: int | None) -> list[str]:
    """All overrides in the form of `-s`; `--seed` wins."""
    return [*(settings or []), *([] if seed is None else [f"seed={seed}"])]


def refuse_with_resume(**given: object) -> None:
    """Refuse options beside `--resume`.

    Raises:
        ConfigError: one of them is given.
    """
    if names := [name for name, value in given.items() if value not in ("", None, [], False)]:
        raise ConfigError(
            f"--resume together with {', '.join(names)}",
            rule="a resumed run keeps its own settings and folder",
            fix="leave them out, or start a new run",
            who="--resume",
        )
