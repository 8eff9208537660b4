"""Secure sums: time and bytes of both sides, beside Flower's SecAgg+ and beside the limits of the machine.

    python benchmarks/secure_sum.py [--cases small-dense,many-small,...] [--repeat 3] [--env FOLDER]

Prints one JSON object. `cases` has what `mycelia bench secagg` prints for each, with `peer` and `ratio`
(Flower / ours) where Flower is measured too; `upload` the bytes sent for a vector by bits of an element;
`masks` the speed and the memory of one mask of 25 million elements. One thread, all in one call; Flower goes
into the environment that the benchmark of simulations makes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# name: (clients, dim, neighbours, threshold, dropout, whether Flower is measured)
CASES: dict[str, tuple[int, int, int, int, float, bool]] = {
    "a": (20, 1 << 20, 10, 6, 0.0, True),
    "a-dropout": (20, 1 << 20, 10, 6, 0.1, True),
    "b": (100, 100_000, 50, 26, 0.0, True),
    "b-dropout": (100, 100_000, 50, 26, 0.1, True),
    "ring-1000": (1000, 100_000, 98, 54, 0.1, False),
    "complete-1000": (1000, 100_000, 999, 667, 0.1, False),
    "complete-100": (100, 1_000_000, 99, 67, 0.1, False),
}
MASK = 25_000_000
UPLOADS = (24, 27, 32)


def case(name: str, repeat: int, python: Path) -> dict[str, Any]:
    """What the command prints."""
    clients, dim, neighbours, threshold, dropout, peer = CASES[name]
    given = {
        "clients": clients,
        "dim": dim,
        "neighbours": neighbours,
        "threshold": threshold,
        "dropout": dropout,
        "repeat": repeat if clients < 1000 else 1,
    }
    line = [sys.executable, "-m", "mycelia.cli", "bench", "secagg", "--format", "json"]
    line += [part for key, value in given.items() for part in (f"--{key}", str(value))]
    if peer:
        line += ["--against", "flwr", "--peer-python", str(python)]
    done = subprocess.run(
        line, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode} of {' '.join(line)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def uploads() -> dict[str, Any]:
    """Bytes of a vector of 2**20 elements, and how many times its 16-bit values they are."""
    from mycelia.privacy.secagg.masks import packed_size

    sizes = {bits: packed_size(1 << 20, bits) for bits in UPLOADS}
    return {
        str(bits): {"bytes_per_element": size / (1 << 20), "over_16_bit": size / (2 << 20)}
        for bits, size in sizes.items()
    }


def masks() -> dict[str, float]:
    """One mask of 25 million elements added to a vector."""
    import numpy as np

    from mycelia.privacy.secagg.masks import add_streams

    total = np.ones(MASK, np.uint32)
    before, best = _peak(), float("inf")
    for _ in range(5):
        begin = time.process_time()
        add_streams(total, [os.urandom(32)], [1], 32)
        best = min(best, time.process_time() - begin)
    return {"elements_per_second": MASK / best, "megabytes_beyond_the_vector": _peak() - before}


def _peak() -> float:
    """The most this process has had, in megabytes; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", default=",".join(CASES), help="which, with commas")
    parser.add_argument("--repeat", type=int, default=3, help="sums of a case, of which the median counts")
    parser.add_argument("--env", type=Path, help="folder of the peers' environment")
    asked = parser.parse_args()
    names = asked.cases.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    sys.path.insert(0, str(HERE / "peers"))
    import environment

    python = environment.ensure(asked.env)
    found = {}
    for name in names:
        print(f"case {name}", file=sys.stderr, flush=True)
        found[name] = case(name, asked.repeat, python)
    report = {
        "workload": "one secure sum, times in CPU milliseconds on one thread",
        "cases": found,
        "upload": uploads(),
        "masks": masks(),
        "versions": {
            "mycelia": metadata.version("mycelia"),
            "cryptography": metadata.version("cryptography"),
        },
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
