"""A private step beside plain SGD and beside Opacus: time and memory, noise apart.

    python benchmarks/privacy_step.py [--models mlp,lenet,...] [--blocks 7] [--format json|text]

Prints one JSON object. `results.<model>` holds, for batches of 256 on one thread,

- `ratio_plain`: our step / an eager loop with `torch.optim.SGD`;
- `ratio_best_opacus`: the fastest mode of Opacus / our step;
- `ratio_same_plan`: our step / plain SGD under the same plan, so that a faster plan is not sold as cheaper
  privacy;
- `ratio_memory`: the most that our steps take / the most that those of plain SGD take, both above the
  process size after import and data load;

for `plan`, our fastest; `plans` has the first and third for each, `spread` the quartiles of each ratio,
`milliseconds` and `megabytes` the absolute figures by side, `setup_megabytes` the most that is taken before
the first step (to capture the model, or to wrap it), `unavailable` why a mode of Opacus has no figures.

All sides of a model run in one process, in turn, block by block, and a ratio is the median over the blocks of
the ratio within a block. Memory is measured in a fresh process for each side. Every private side has to
change the weights as ours does, or there is no result. Opacus goes into an environment of its own, which is
made on the first call and uses everything else of this interpreter.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mycelia.engine.capture import capture
from mycelia.engine.models import build
from mycelia.engine.transforms.compile import compile_step
from mycelia.privacy.clip import Abadi
from mycelia.privacy.clipped_grad import clipped_grad

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BATCH = 256
RATE = 0.05
BOUND = 1.0
BLOCK_SECONDS = 0.3
MEMORY_STEPS = 5
MEMORY_RUNS = 3

Batch = tuple[Tensor, Tensor]
Step = Callable[[], None]
"""Changes the weights of the model it was made for."""


# ---- models and data


class Transformer(nn.Module):
    """Two blocks of width 64 over 32 tokens; positions are a layer, since Opacus hooks layers."""

    def __init__(self, vocabulary: int = 1000, length: int = 32, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "mix": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 2 * width),
                    "down": nn.Linear(2 * width, width),
                }
            )
            for _ in range(2)
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 10)
        self.heads = heads

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0], 1)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            parts = block["qkv"](block["norm1"](x)).chunk(3, -1)  # type: ignore[index]
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            x = x + block["mix"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[index]
            x = x + block["down"](F.gelu(block["up"](block["norm2"](x))))  # type: ignore[index]
        logits: Tensor = self.out(self.norm(x).mean(1))
        return logits


def _transformer() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Transformer()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: build("mlp", (1, 28, 28), 10),
    "lenet": lambda: build("lenet", (1, 28, 28), 10),
    "cnn": lambda: build("cnn", (1, 28, 28), 10),
    "transformer": _transformer,
    "lstm": lambda: build("lstm", (32,), 10, vocabulary=1000),
}


def data_for(model: str, size: int = BATCH) -> Batch:
    """Random inputs and labels."""
    draw = torch.Generator().manual_seed(0)
    if model in ("transformer", "lstm"):
        inputs = torch.randint(1000, (size, 32), generator=draw)
    else:
        inputs = torch.rand(size, 1, 28, 28, generator=draw)
    return inputs, torch.randint(10, (size,), generator=draw)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


# ---- sides: each takes a model and a batch, and gives the step that trains that very model


def plain(model: nn.Module, batch: Batch) -> Step:
    """What anybody writes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def planned(plan: str, model: nn.Module, batch: Batch) -> Step:
    """Plain SGD under a plan of Mycelia."""
    program = capture(model, loss, (batch[0][:2], batch[1][:2]))
    params, (_, buffers) = _own(model), program.init()
    seed, extra = torch.zeros((), dtype=torch.int64), {"lr": torch.tensor(RATE)}
    update = compile_step(program, None, plan, (params, buffers, *batch, extra))
    return lambda: [update(params, buffers, *batch, seed, extra), None][1]


def ours(plan: str, model: nn.Module, batch: Batch) -> Step:
    """Ours: clipped gradients by taps, and an update in place."""
    program = capture(model, loss, (batch[0][:2], batch[1][:2]))
    params, (_, buffers) = _own(model), program.init()
    clipped = clipped_grad(program, Abadi(BOUND)).planned(plan, params, buffers, batch)

    def step() -> None:
        total = clipped(params, buffers, batch).total
        for name, value in params.items():
            value.add_(total[name], alpha=-RATE / BATCH)

    return step


PLANS: dict[str, tuple[Callable[[nn.Module, Batch], Step], str]] = {
    "eager": (partial(ours, "eager"), "plain"),
    "interpreter": (partial(ours, "interpreter"), "plain interpreter"),
    "inductor": (partial(ours, "inductor"), "plain inductor"),
}
"""Our step by plan, and the side that is plain SGD under that plan."""


def _own(model: nn.Module) -> dict[str, Tensor]:
    return {name: part.detach() for name, part in model.named_parameters()}


def _hookable(model: nn.Module) -> nn.Module:
    """With the recurrent layers that Opacus can hook, around the same parameters."""
    from opacus.layers import DPLSTM

    for name, layer in list(model.named_children()):
        if isinstance(layer, nn.LSTM):
            other = DPLSTM(layer.input_size, layer.hidden_size, layer.num_layers, batch_first=True)
            for key, value in layer.named_parameters():
                getattr(other, key).data = value.detach()
            setattr(model, name, other)
    return model


def hooks(model: nn.Module, batch: Batch, functorch: bool = False) -> Step:
    """Opacus: per-example gradients of each layer, kept."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(_hookable(model), force_functorch=functorch)
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=RATE),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        expected_batch_size=BATCH,
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def functorch(model: nn.Module, batch: Batch) -> Step:
    """Opacus: each layer through vmap."""
    return hooks(model, batch, functorch=True)


def ghost(model: nn.Module, batch: Batch) -> Step:
    """Opacus: norms first, then a second backward pass of the weighted loss."""
    from opacus import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(_hookable(model), max_grad_norm=BOUND)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=RATE),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        expected_batch_size=BATCH,
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def step() -> None:
        optimizer.zero_grad()
        criterion(wrapped(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


OPACUS = {"hooks": hooks, "functorch": functorch, "ghost": ghost}
SIDES: dict[str, Callable[[nn.Module, Batch], Step]] = {
    "plain": plain,
    "plain interpreter": partial(planned, "interpreter"),
    "plain inductor": partial(planned, "inductor"),
    **{f"ours {plan}": make for plan, (make, _) in PLANS.items()},
    **OPACUS,
}


# ---- time


@dataclass(frozen=True)
class Ratio:
    """Over the blocks."""

    median: float
    quartiles: tuple[float, float]

    @classmethod
    def of(cls, above: list[float], below: list[float]) -> Ratio:
        found = [one / two for one, two in zip(above, below, strict=True)]
        if len(found) == 1:
            return cls(found[0], (found[0], found[0]))
        low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
        return cls(middle, (low, high))


def milliseconds(step: Step, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats * 1e3


def measure_time(name: str, blocks: int) -> dict[str, Any]:
    """Milliseconds of each block by side, and why a side is missing."""
    batch, first = data_for(name), MODELS[name]()
    steps: dict[str, Step] = {}
    changed: dict[str, Tensor] = {}
    missing: dict[str, str] = {}
    for side, make in SIDES.items():
        model = copy.deepcopy(first)
        try:
            steps[side] = make(model, batch)
            steps[side]()
        except Exception as error:
            if side not in OPACUS:
                raise
            steps.pop(side, None)
            missing[side] = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        changed[side] = torch.cat([part.detach().flatten() for part in _sorted(model)])
    check(changed, torch.cat([part.detach().flatten() for part in _sorted(first)]))
    repeats = {
        side: max(1, math.ceil(BLOCK_SECONDS * 1e3 / milliseconds(step, 2))) for side, step in steps.items()
    }
    times: dict[str, list[float]] = {side: [] for side in steps}
    order = list(steps)
    for block in range(blocks):
        for side in order[block % len(order) :] + order[: block % len(order)]:
            times[side].append(milliseconds(steps[side], repeats[side]))
        print(f"{name}: block {block + 1} of {blocks}", file=sys.stderr, flush=True)
    return {"times": times, "unavailable": missing}


def _sorted(model: nn.Module) -> list[nn.Parameter]:
    """Parameters in an order that a layer put in the place of another does not change."""
    found = {name.removeprefix("_module."): part for name, part in model.named_parameters()}
    return [found[name] for name in sorted(found)]


def check(changed: dict[str, Tensor], before: Tensor) -> None:
    """All private sides have to make the same update."""
    mine = next(value for side, value in changed.items() if side.startswith("ours")) - before
    for side, value in changed.items():
        if not side.startswith("plain"):
            apart = float((value - before - mine).norm() / mine.norm())
            if not apart < 1e-3:
                raise SystemExit(f"the update of {side} is {apart:.2g} of its length away from ours")


# ---- memory


def _status(key: str) -> float:
    """A line of this process's status, in megabytes; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) / 1024


def measure_memory(name: str, side: str) -> dict[str, float]:
    """Megabytes above the size after import and data load: the largest in steps, and while setting up."""
    tiny = build("mlp", (1, 28, 28), 10, hidden=(4,))
    warm = SIDES[side](tiny, data_for("mlp", BATCH))  # what is imported on first use belongs to the import
    warm()
    batch = data_for(name)
    del tiny, warm
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free already would hide what a step takes
    before = _status("VmRSS")
    reset = Path("/proc/self/clear_refs")
    reset.write_text("5")
    step = SIDES[side](MODELS[name](), batch)
    setup = _status("VmHWM") - before
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset.write_text("5")
    for _ in range(MEMORY_STEPS):
        step()
    return {"peak": _status("VmHWM") - before, "setup": setup}


# ---- both, from outside


def ensure(folder: Path | None = None) -> Path:
    """The interpreter of an environment with Opacus, and with all that this interpreter has.

    Raises:
        FileExistsError: the folder is neither empty nor an environment made by this function.
    """
    sys.path.insert(0, str(HERE / "peers"))
    import environment

    folder = (folder or Path.home() / ".cache" / "mycelia" / "opacus").expanduser().absolute()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        "parent": sysconfig.get_path("purelib"),
        "python": platform.python_version(),
        "requirements": project["optional-dependencies"]["opacus"],
    }
    stamp, python = folder / "opacus.json", environment.interpreter(folder)
    if stamp.is_file() and python.exists() and json.loads(stamp.read_text()) == wanted:
        return python
    if folder.exists() and any(folder.iterdir()) and not stamp.is_file():
        raise FileExistsError(f"{folder} is neither empty nor an environment of this benchmark; see --env")
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text("{}")
    venv.create(folder, with_pip=True, clear=False)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    # a line that starts with import is run; the folder's own .pth files, editable installs, are read too
    line = f"import site; site.addsitedir({wanted['parent']!r})\n"
    (Path(packages) / "parent.pth").write_text(line)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *wanted["requirements"]], check=True, stdout=sys.stderr)
    stamp.write_text(json.dumps(wanted))
    return python


def inside(python: Path, *arguments: str) -> Any:
    """What this file prints when the environment's interpreter measures."""
    line = [str(python), "-W", "ignore", str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(
        line, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode} of {' '.join(line)}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(python: Path, name: str, blocks: int) -> dict[str, Any]:
    """All figures of one model."""
    found = inside(python, "--measure", "time", "--models", name, "--blocks", str(blocks))
    times: dict[str, list[float]] = found["times"]
    middle = {side: statistics.median(values) for side, values in times.items()}
    plan = min(PLANS, key=lambda plan: middle[f"ours {plan}"])
    looked_at = [side for side in ("plain", f"ours {plan}", *OPACUS) if side in times]
    memory: dict[str, list[float]] = {side: [] for side in looked_at}
    setup: dict[str, float] = {}
    for side in looked_at:
        for _ in range(1 if side in OPACUS else MEMORY_RUNS):
            print(f"{name}: memory of {side}", file=sys.stderr, flush=True)
            one = inside(python, "--measure", "memory", "--models", name, "--side", side)
            memory[side].append(one["peak"])
            setup[side] = one["setup"]
    ours, modes = times[f"ours {plan}"], [mode for mode in OPACUS if mode in times]
    plans = {
        each: {
            "ratio_plain": Ratio.of(times[f"ours {each}"], times["plain"]),
            "ratio_same_plan": Ratio.of(times[f"ours {each}"], times[same]),
        }
        for each, (_, same) in PLANS.items()
    }
    ratios = dict(plans[plan])
    ratios["ratio_memory"] = Ratio.of(memory[f"ours {plan}"], memory["plain"])
    best = min(modes, key=middle.__getitem__, default=None)
    if best is not None:
        ratios["ratio_best_opacus"] = Ratio.of(times[best], ours)
    return {
        **{key: ratio.median for key, ratio in ratios.items()},
        "spread": {key: ratio.quartiles for key, ratio in ratios.items()},
        "plan": plan,
        "best_opacus": best,
        "plans": {each: {key: r.median for key, r in part.items()} for each, part in plans.items()},
        "milliseconds": middle,
        "megabytes": {side: statistics.median(values) for side, values in memory.items()},
        "setup_megabytes": setup,
        "unavailable": found["unavailable"],
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(MODELS), help="which, with commas")
    parser.add_argument("--blocks", type=int, default=7, help="timed blocks of each side")
    parser.add_argument("--env", type=Path, help="folder of the environment with Opacus")
    parser.add_argument("--format", choices=("json", "text"), default="json")
    parser.add_argument("--measure", choices=("time", "memory"), help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    models = asked.models.split(",")
    if unknown := set(models) - set(MODELS):
        parser.error(f"unknown models {', '.join(sorted(unknown))}; known: {', '.join(MODELS)}")
    if asked.blocks < 1:
        parser.error("--blocks has to be at least 1")
    torch.set_num_threads(1)
    if asked.measure == "time":
        print(json.dumps(measure_time(models[0], asked.blocks)))
        return
    if asked.measure == "memory":
        print(json.dumps(measure_memory(models[0], asked.side)))
        return
    python = ensure(asked.env)
    ask = "from importlib.metadata import version; print(version('opacus'))"
    opacus = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    report = {
        "workload": f"SGD step, batch {BATCH}, one thread, clip bound {BOUND}, no noise",
        "blocks": asked.blocks,
        "results": {name: compare(python, name, asked.blocks) for name in models},
        "machine": {"system": platform.platform(), "cpu": torch.backends.cpu.get_cpu_capability()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "opacus": opacus,
            "mycelia": metadata.version("mycelia"),
        },
    }
    if asked.format == "json":
        print(json.dumps(report, indent=1))
        return
    for name, found in report["results"].items():  # type: ignore[attr-defined]
        print(f"{name} (plan {found['plan']}, best of Opacus: {found['best_opacus']})")
        for key, (low, high) in found["spread"].items():
            print(f"  {key:18} {found[key]:6.2f}  ({low:.2f} to {high:.2f})")
        for side, value in found["milliseconds"].items():
            print(f"  {side:18} {value:8.2f} ms  {found['megabytes'][side]:8.1f} MB")


if __name__ == "__main__":
    main()
