"""A virtual environment of their own for the peers: PyTorch pinned first, then Flower and pfl beside it.

Made once and kept, in `~/.cache/mycelia/peers` or the folder given by `--env`; a change of the requirements
or of the Python version makes it anew. Prints one JSON object: the peers' interpreter and their versions.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

# A bare torch, or an open range that a peer may raise, could bring gigabytes of CUDA packages.
TORCH = "torch==2.13.0"
PEERS = ("flwr[simulation]==1.42.*", "pfl==0.6.*")
_PACKAGES = ("torch", "numpy", "flwr", "ray", "pfl")
_STAMP = "peers.json"


def default_folder() -> Path:
    """Where the environment is kept between calls."""
    return Path.home() / ".cache" / "mycelia" / "peers"


def interpreter(folder: Path) -> Path:
    """The environment's Python."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _wanted() -> dict[str, Any]:
    return {"python": platform.python_version(), "requirements": [TORCH, *PEERS]}


def is_ready(folder: Path) -> bool:
    """Whether a finished environment with the present requirements lies in the folder."""
    stamp = folder / _STAMP
    return stamp.is_file() and interpreter(folder).exists() and json.loads(stamp.read_text()) == _wanted()


def _install(folder: Path, *requirements: str) -> None:
    """pip's own settings (index, proxies) hold; what it says goes to standard error."""
    constraints = folder / "constraints.txt"
    constraints.write_text(TORCH + "\n")
    pip = [str(interpreter(folder)), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*pip, *requirements], check=True, stdout=sys.stderr)


def ensure(folder: Path | None = None) -> Path:
    """Returns the interpreter of the peers' environment, which is made first where it is missing or old.

    Making it takes about a minute and 1.6 GB. A folder that is neither empty nor an environment made by this
    function is refused. Two calls at once on one folder are not supported.
    """
    folder = (folder or default_folder()).expanduser().absolute()
    if is_ready(folder):
        return interpreter(folder)
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _STAMP).is_file():
            msg = f"{folder} is neither empty nor an environment of the peers; name another folder with --env"
            raise FileExistsError(msg)
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _STAMP).write_text("{}")
    venv.create(folder, with_pip=True)
    _install(folder, TORCH)
    _install(folder, *PEERS)
    (folder / _STAMP).write_text(json.dumps(_wanted()))
    return interpreter(folder)


def versions(python: Path) -> dict[str, str]:
    """Versions of the peers' packages as that interpreter sees them."""
    ask = f"{{name: metadata.version(name) for name in {_PACKAGES!r}}}"
    code = f"import json; from importlib import metadata; print(json.dumps({ask}))"
    shown = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    found: dict[str, str] = json.loads(shown)
    return found


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Make the peers' environment, or find it already made.")
    parser.add_argument("--env", type=Path, help=f"folder of the environment, {default_folder()} by default")
    python = ensure(parser.parse_args().env)
    print(json.dumps({"python": str(python), "versions": versions(python)}))


if __name__ == "__main__":
    main()
