"""Attacks beside torchattacks, Foolbox and ART: strength and time, one thread, all in one call.

    python benchmarks/attacks.py [--cases pgd,cw,cw-one,hsj,autoattack,quick,memory] [--repeat 3] [--env DIR]

Prints one JSON object. LeNet is trained here on Fashion-MNIST, plainly and adversarially. The peers run in
an environment of their own, which is made once; they get the same model and images. `bare` is 40 passes
forward and backward through the model without any attack; `every_step` is PGD with as many, for each row
that is classified correctly. `torchattacks` has the settings of the paper in its AutoAttack,
`torchattacks_shipped` those that it comes with: a tenth of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
PEERS = ("torchattacks", "torchattacks_shipped", "foolbox", "art")
REQUIREMENTS = (
    "foolbox==3.3.4",
    "adversarial-robustness-toolbox==1.20.1",
    "scikit-learn",
    "packaging",  # of which it does not say that it needs it
    "setuptools",
    "tqdm",
)
EPS = 8 / 255
BATCH = 256
ROWS = {"pgd": 256, "cw": 32, "cw-one": 32, "hsj": 32, "autoattack": 1000}


def environment(folder: Path | None) -> Path:
    """The peers' interpreter, which is made where it is missing."""
    folder = (folder or Path.home() / ".cache" / "mycelia" / "attacks").expanduser().absolute()
    python, stamp = folder / "bin" / "python", folder / "attacks.json"
    if stamp.is_file() and python.exists() and json.loads(stamp.read_text()) == list(REQUIREMENTS):
        return python
    if folder.exists() and any(folder.iterdir()) and not stamp.is_file():
        raise SystemExit(f"{folder} is neither empty nor an environment of this benchmark; see --env")
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text("{}")
    venv.create(folder, with_pip=True, clear=False)
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(HERE.parent / "constraints.txt"),
    ]
    subprocess.run([*pip, "torch", *REQUIREMENTS], check=True, stdout=sys.stderr)
    # its pins ask for an old requests and for torchvision, which it does not use
    subprocess.run([*pip, "--no-deps", "torchattacks"], check=True, stdout=sys.stderr)
    stamp.write_text(json.dumps(list(REQUIREMENTS)))
    return python


def trained(*, robust: bool) -> nn.Module:
    """LeNet, three epochs; adversarially with five steps of PGD."""
    from mycelia.attacks.defences import PGDAT
    from mycelia.engine.capture import capture
    from mycelia.engine.data import load
    from mycelia.engine.losses import cross_entropy
    from mycelia.engine.models import build
    from mycelia.engine.optimizers import adam
    from mycelia.engine.training import Trainer

    data = load("fashion-mnist")
    model = build("lenet", data.input_shape, data.classes, seed=1)
    example = (
        torch.from_numpy(data.train.inputs[:2].copy()),
        torch.from_numpy(data.train.targets[:2].copy()),
    )
    program = capture(model, cross_entropy, example)
    more: dict[str, Any] = {"updates": PGDAT(norm="linf", eps=EPS, steps=5)} if robust else {}
    found = Trainer(program, adam(), epochs=3, batch_size=128, seed=1, **more).fit(data)
    model.load_state_dict(found.params | found.buffers)
    return model.eval()


def ours(case: str, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    from mycelia.attacks import PGD, AutoAttack, CarliniWagner, HopSkipJump, Status, Untargeted

    attacks: dict[str, Any] = {
        "pgd": PGD(norm="linf", steps=40),
        "cw": CarliniWagner(steps=200, searches=6),
        "cw-one": CarliniWagner(steps=200, searches=1, constant=1.0, learning_rate=0.01),
        "hsj": HopSkipJump(norm="l2", steps=20),
        "autoattack": AutoAttack(norm="linf"),
    }
    eps = EPS if case in ("pgd", "autoattack") else None
    began = time.perf_counter()
    found = attacks[case].run(model, x, Untargeted(y), eps=eps, rng=0, batch=BATCH)
    seconds = time.perf_counter() - began
    broken = found.is_(Status.BROKEN)
    clean = ~found.is_(Status.CLEAN_WRONG)
    return {
        "seconds": seconds,
        "queries_per_row": float(found.queries.double().mean()),
        "clean": int(clean.sum()),
        "broken": broken.tolist(),
        "robust": int(found.is_(Status.HELD).sum()),
        "outside_ball": None
        if eps is None
        else int((found.distance["linf"][broken] > eps * (1 + 1e-6)).sum()),
        "l2": found.distance["l2"].tolist(),
    }


def bare(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Seconds of 40 passes forward and backward, with respect to the inputs alone."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        began = time.perf_counter()
        for _ in range(40):
            leaf = x.clone().requires_grad_()
            loss = nn.functional.cross_entropy(model(leaf), y, reduction="sum")
            torch.autograd.grad(loss, leaf)
        return time.perf_counter() - began
    finally:
        for parameter in model.parameters():
            parameter.requires_grad_(True)


def every_step(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Seconds of PGD-40 of which no row leaves early: all 40 gradients of every row that is right."""
    from mycelia.attacks import PGD, Untargeted

    began = time.perf_counter()
    PGD(norm="linf", steps=40).run(model, x, Untargeted(y), eps=EPS, rng=0, batch=BATCH, keep="loss")
    return time.perf_counter() - began


def peer(python: Path, name: str, case: str, folder: Path) -> dict[str, Any] | None:
    line = [str(python), str(HERE / "peers" / "attacks.py"), name, case, str(folder), str(EPS), str(BATCH)]
    done = subprocess.run(
        line, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode} of {' '.join(line)}")
    found: dict[str, Any] | None = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compared(
    case: str, model: nn.Module, data: tuple[Tensor, Tensor], python: Path, repeat: int
) -> dict[str, Any]:
    """The same attack by all who have it, in turn; distances of two are compared where both succeeded."""
    rows = ROWS[case]
    x, y = data[0][:rows], data[1][:rows]
    found: dict[str, Any] = {"rows": rows}
    folder = Path(tempfile.mkdtemp(prefix="mycelia-attacks-"))
    runs: dict[str, list[dict[str, Any]]] = {}
    seconds: dict[str, list[float]] = {"bare": [], "every_step": []}
    try:
        torch.save(model, folder / "model.pt")
        torch.save({"x": x, "y": y}, folder / "data.pt")
        for _ in range(repeat):
            if case == "pgd":
                seconds["bare"].append(bare(model, x, y))
                right = model(x).argmax(1) == y
                seconds["every_step"].append(every_step(model, x[right], y[right]) * rows / int(right.sum()))
            for name in ("ours", *PEERS):
                result = ours(case, model, x, y) if name == "ours" else peer(python, name, case, folder)
                if result is not None:
                    runs.setdefault(name, []).append(result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if case == "pgd":
        found |= {f"{name}_seconds": statistics.median(each) for name, each in seconds.items()}
        found["every_step_over_bare"] = found["every_step_seconds"] / found["bare_seconds"]
    first = {name: each[0] | {"seconds": _middle(each)} for name, each in runs.items()}
    mine = first["ours"]
    for name, theirs in first.items():
        if name != "ours":
            found[f"ours_over_{name}"] = mine["seconds"] / theirs["seconds"]
            found[f"against_{name}"] = _against(mine, theirs, rows)
    for each in first.values():
        mean = [d for d, broken in zip(each.pop("l2"), each["broken"], strict=True) if broken]
        each["mean_l2"] = statistics.fmean(mean) if mean else None
        each["median_l2"] = statistics.median(mean) if mean else None
        each["broken"] = sum(each["broken"])
    return found | first


def _middle(runs: list[dict[str, Any]]) -> float:
    return statistics.median(each["seconds"] for each in runs)


def _against(mine: dict[str, Any], theirs: dict[str, Any], rows: int) -> dict[str, Any]:
    pairs = list(zip(mine["broken"], theirs["broken"], strict=True))
    both = [i for i, pair in enumerate(pairs) if all(pair)]
    return {
        "points_more_robust": 100 * (mine["robust"] - theirs["robust"]) / rows,
        "rows_only_ours_broke": [i for i, (a, b) in enumerate(pairs) if a and not b],
        "rows_only_theirs_broke": [i for i, (a, b) in enumerate(pairs) if b and not a],
        "rows_both_broke": len(both),
        "mean_l2_there": [statistics.fmean(each["l2"][i] for i in both) for each in (mine, theirs)]
        if both
        else None,
        "median_l2_there": [statistics.median(each["l2"][i] for i in both) for each in (mine, theirs)]
        if both
        else None,
    }


def quick() -> dict[str, Any]:
    """`evaluate(..., suite="quick")` on 256 digits."""
    from mycelia.attacks import Threat, evaluate
    from mycelia.engine.data import load
    from mycelia.engine.models import build

    test = load("digits").test
    began = time.perf_counter()
    report = evaluate(
        build("mlp", (1, 8, 8), 10), test.inputs[:256], test.targets[:256], Threat("linf", 0.1), "quick"
    )
    return {"seconds": time.perf_counter() - began, "n": report.ledger.n}


def memory(model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Peak memory of this process in the course of 20 evaluations after the first."""
    from mycelia.attacks import AutoAttack, Untargeted

    x, y = data[0][:64], data[1][:64]
    attack = AutoAttack(norm="linf", steps=10, queries=100)
    peaks = []
    for run in range(21):
        attack.run(model, x, Untargeted(y), eps=EPS, rng=run)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return {"first_mib": peaks[0], "last_mib": peaks[-1], "growth": peaks[-1] / peaks[0] - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="pgd,cw,cw-one,hsj,autoattack,quick,memory")
    parser.add_argument("--repeat", type=int, default=3, help="of the short cases")
    parser.add_argument("--env", type=Path, help="folder of the peers' environment")
    asked = parser.parse_args()
    cases = asked.cases.split(",")
    if unknown := set(cases) - {*ROWS, "quick", "memory"}:
        raise SystemExit(
            f"unknown cases {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}, quick, memory"
        )
    torch.set_num_threads(1)
    python = environment(asked.env)
    from mycelia.engine.data import load

    test = load("fashion-mnist").test
    data = torch.from_numpy(test.inputs[:1000].copy()), torch.from_numpy(test.targets[:1000].astype("int64"))
    plain = trained(robust=False)
    found: dict[str, Any] = {"machine": {"cores": os.cpu_count(), "torch": torch.__version__}}
    for case in cases:
        print(case, file=sys.stderr)
        if case == "quick":
            found[case] = quick()
        elif case == "memory":
            found[case] = memory(plain, data)
        elif case == "autoattack":
            found[case] = compared(case, plain, data, python, 1)
            found["autoattack_robust_model"] = compared(case, trained(robust=True), data, python, 1)
        else:
            found[case] = compared(case, plain, data, python, 1 if case in ("hsj", "cw") else asked.repeat)
        print(json.dumps(found[case]), file=sys.stderr)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
