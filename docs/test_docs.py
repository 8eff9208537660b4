"""The pages and docstrings say what is true: links lead somewhere, examples run, commands exist."""

import doctest
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = {package: ROOT / folder for package, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()}
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "benchmarks/**/*.md",
        "examples/**/*.md",
        *(f"{room.name}/**/*.md" for room in ROOMS.values()),
    )
    for path in ROOT.glob(pattern)
)
MODULES = sorted(
    ".".join((package, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
    for package, folder in ROOMS.items()
    for file in folder.rglob("*.py")
    if ">>> " in file.read_text()
)
TIMEOUT_S = 240


class Block(NamedTuple):
    """A fenced block: its language, its text and the line of the page it starts at."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield Block(match[1], match[2], text.count("\n", 0, match.start(2)))


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names GitHub gives a page's headings."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        goal = (ROOT / page.parent / name).resolve() if name else ROOT / page
        assert goal.exists(), f"{page}: {target} is not there"
        assert goal.is_relative_to(ROOT), f"{page}: {target} leads out of the repository"
        if anchor:
            assert anchor in anchors(goal), f"{page}: {target} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = re.findall(r"`([^`\n]+)`", prose(page)) + [block.text for block in blocks(page)]
    named = {name for text in code for name in re.findall(r"(?:^|[\s;&])make ([a-z]+)", text)}
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_toml_parses(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            tomllib.loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    """A page's Python blocks are one script, run as a reader would; one with `>>>` is a doctest."""
    script: list[str] = []
    for block in blocks(page):
        if block.language != "python":
            continue
        if ">>> " in block.text:
            run_doctest(block, page)
        else:
            script += [""] * (
                block.line - len(script)
            ) + block.text.splitlines()  # lines numbered as in the page
    if script:
        file = tmp_path / f"{page.stem}.py"
        file.write_text("\n".join(script) + "\n")
        rules = PROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"]
        command = [sys.executable, *(f"-W{rule}" for rule in rules), str(file)]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr


def run_doctest(block: Block, page: Path) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, {}, str(page), str(page), block.line)
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert result.failed == 0, "".join(report)


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0, "see the captured output"
