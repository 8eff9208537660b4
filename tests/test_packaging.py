"""What is installed is what is in the folders, from a wheel and as an editable install."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
ROOMS = {package: ROOT / folder for package, folder in SETUPTOOLS["package-dir"].items()}
NOT_SHIPPED = {".md", ".pyc"}
# Folders with Python files that are no rooms.
NO_ROOMS = {"tests", "benchmarks", "docs", "examples"}


def room_files() -> list[Path]:
    return [
        path
        for folder in ROOMS.values()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in NOT_SHIPPED
    ]


def installed_name(path: Path) -> str:
    return f"mycelia/{path.relative_to(ROOT).as_posix()}"


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip_install(python: Path, *what: str | Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
    ]
    run(*command, *what, cwd=python.parent)


def import_all(python: Path) -> list[str]:
    """Import every listed package with `python`; the files they came from."""
    code = "import sys, importlib as i; [print(i.import_module(name).__file__) for name in sys.argv[1:]]"
    return run(python, "-c", code, *SETUPTOOLS["packages"], cwd=python.parent).splitlines()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what a build reads, so that a build leaves nothing in the working tree."""
    target = tmp_path / "source"
    target.mkdir()
    for name in ("pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]):
        shutil.copy(ROOT / name, target)
    for folder in ROOMS.values():
        shutil.copytree(folder, target / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that has this environment's libraries, but not its Mycelia."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    paths = sysconfig.get_paths(vars={"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")})
    # A folder named in a .pth file joins the path; the .pth files inside it (editable installs) are not read.
    Path(paths["purelib"], "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return Path(paths["scripts"], "python")


def test_every_package_is_listed() -> None:
    found = {
        installed_name(init.parent).replace("/", ".")
        for folder in ROOMS.values()
        for init in folder.rglob("__init__.py")
    }
    assert sorted(found) == sorted(SETUPTOOLS["packages"]), (
        "list it under [tool.setuptools] in pyproject.toml"
    )


def test_every_python_file_is_in_a_package() -> None:
    lost = [
        path for path in room_files() if path.suffix == ".py" and not (path.parent / "__init__.py").exists()
    ]
    assert lost == [], "the folder needs an __init__.py"


def test_every_room_is_mapped_typed_and_under_the_import_rules() -> None:
    folders = {init.parent.name for init in ROOT.glob("[a-z]*/__init__.py")} - NO_ROOMS
    rules = PROJECT["tool"]["importlinter"]
    layers = {room.strip() for layer in rules["contracts"][0]["layers"] for room in layer.split("|")}
    assert {f"mycelia.{name}" for name in folders} == set(ROOMS) == set(rules["root_packages"]) == layers
    assert [folder.name for folder in ROOMS.values() if not (folder / "py.typed").exists()] == []


def test_every_install_admits_the_constraints() -> None:
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    extras = PROJECT["project"]["optional-dependencies"].values()
    for text in [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]:
        requirement = Requirement(text)
        if requirement.name != "mycelia":
            assert pins[requirement.name.lower()] in requirement.specifier, text


def test_a_wheel_holds_every_file_and_works(source: Path, python: Path, tmp_path: Path) -> None:
    run(
        sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", source, cwd=tmp_path
    )
    (wheel,) = tmp_path.glob("mycelia-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        missing = {installed_name(path) for path in room_files()} - set(archive.namelist())
        assert not missing, "add their suffix to [tool.setuptools.package-data] in pyproject.toml"

    pip_install(python, wheel)

    assert all(Path(file).is_relative_to(tmp_path / "venv") for file in import_all(python))
    assert "simulate" in run(python.with_name("mycelia"), "--help", cwd=tmp_path)


def test_an_editable_install_reads_the_folders(source: Path, python: Path, tmp_path: Path) -> None:
    pip_install(python, "-e", source)

    assert all(Path(file).is_relative_to(source) for file in import_all(python))
    (source / "engine" / "new.py").write_text("x = 1")
    run(python, "-c", "import mycelia.engine.new", cwd=tmp_path)
    assert "simulate" in run(python.with_name("mycelia"), "--help", cwd=tmp_path)
