"""The checks of the Makefile, each in an environment of its own: `nox -s lint type test docs bench`."""

import shutil
import tomllib
from pathlib import Path

import nox

nox.options.sessions = ["lint", "type", "test", "docs"]
nox.options.reuse_existing_virtualenvs = True

ROOMS = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]


def _install(session: nox.Session, *what: str) -> None:
    shutil.rmtree("build/lib", ignore_errors=True)  # else a plain install brings back deleted modules
    session.install("-c", "constraints.txt", *what)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and import directions."""
    _install(session, "ruff", "import-linter")
    _install(session, "--no-deps", ".")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-logo", "--cache-dir", "build/imports")


@nox.session(name="type")
def type_(session: nox.Session) -> None:
    """Types, on a plain install: mypy cannot see an editable one."""
    _install(session, ".[dev]")
    session.run("mypy", "--strict", *(arg for room in ROOMS for arg in ("-p", room)))


@nox.session
def test(session: nox.Session) -> None:
    """Tests; arguments after `--` go to pytest."""
    _install(session, "-e", ".[dev]")
    session.run("pytest", *(session.posargs or ["-m", "not slow"]))


@nox.session
def docs(session: nox.Session) -> None:
    """Links and examples of the pages and docstrings."""
    _install(session, "-e", ".[dev]")
    session.run("pytest", "docs", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Every benchmark, one JSON object each."""
    _install(session, "-e", ".[dev]")
    for script in sorted(Path("benchmarks").glob("[a-z]*.py")):
        session.run("python", str(script), *session.posargs)
