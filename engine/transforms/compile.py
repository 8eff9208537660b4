"""Plans: how a step is run. It is part of a run's configuration, because two plans never give the same bits.

| plan | what runs |
|---|---|
| `eager` | the step as Python, operator by operator with PyTorch's autograd; for debugging |
| `interpreter` | full batches: the step traced into a graph without autograd, run node by node |
| `inductor` | full batches: the traced step with `layout`, compiled ahead of time |

Batches of another shape, such as a client's last one, run as `eager` under every plan: what runs depends on
the plan and the shape alone, never on what a process has traced or compiled before.

`default` is a static rule: `inductor` when a C++ compiler exists and at least `WORTH_COMPILING` steps are
planned, else `interpreter`. `tune` times the candidates for the shapes at hand and counts compile time
against the steps still to run.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mycelia.engine import _torch
from mycelia.engine.errors import ConfigError
from mycelia.engine.program import Program
from mycelia.engine.schema import model_sha256
from mycelia.engine.step import Adjust, Step, sgd_step
from mycelia.engine.transforms.layout import layout
from mycelia.engine.transforms.outer_products import apply_products, defer_products
from mycelia.engine.types import Tensors

__all__ = [
    "PLANS",
    "WORTH_COMPILING",
    "Adder",
    "Plan",
    "PlannedStep",
    "choose_plan",
    "compile_step",
    "example_batch",
    "package_adder",
    "package_graph",
    "package_of",
    "package_step",
    "tidy",
    "trace_step",
    "tune",
]

aten = torch.ops.aten

PLANS = ("default", "tune", "eager", "interpreter", "inductor")
WORTH_COMPILING = 20_000
"""Steps in a run from which compiling for some fifteen seconds pays for the usual small models."""


@dataclass(frozen=True)
class Plan:
    """A resolved plan and why it was chosen."""

    name: str
    reason: str


def choose_plan(requested: str, steps: int) -> Plan:
    """Resolve `default` by the static rule; `tune` is resolved by `tune`, which needs the step.

    Args:
        requested: one of `PLANS`.
        steps: local steps planned for the whole run.

    Raises:
        ConfigError: an unknown plan, or `inductor` without a C++ compiler.
    """
    if requested not in PLANS:
        raise ConfigError(f"plan {requested!r}", rule=f"one of {', '.join(PLANS)}", who="plan")
    if requested in ("eager", "interpreter"):
        return Plan(requested, "asked for")
    found = _torch.compiler()
    if requested == "inductor":
        if found is None:
            raise ConfigError(
                "plan 'inductor' needs a C++ compiler and none was found",
                fix="install g++, or use plan = 'default', which falls back to the interpreter",
                who="plan",
            )
        return Plan("inductor", "asked for")
    if requested == "tune":
        return Plan("tune", "asked for")
    if found is None:
        return Plan("interpreter", "no C++ compiler found")
    if steps < WORTH_COMPILING:
        return Plan("interpreter", f"{steps} steps planned, fewer than {WORTH_COMPILING}")
    return Plan("inductor", f"{steps} steps planned and {Path(found).name} found")


class PlannedStep:
    """A step that updates parameters and buffers in place, in the form a plan gives it.

    Args:
        step: the step; its `buffers` may be any tensors that it changes beside the parameters.
        plan: `eager`, `interpreter` or `inductor`.
        batch_shape: shape of the inputs of a full batch; None: there is none, and all batches run as `eager`.
        package: the compiled step of a full batch, for `inductor`; see `package_step`.
    """

    def __init__(
        self,
        step: Step,
        plan: str,
        batch_shape: tuple[int, ...] | None = None,
        package: Path | None = None,
    ) -> None:
        self.plan = plan
        self._step = step
        self._shape = None if plan == "eager" else batch_shape
        self._run: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
        self._deferred: tuple[int, ...] = ()
        if package is not None and self._shape is not None:
            self._run, note = _torch.load_package(package)
            self._deferred = tuple(int(position) for position in note.split())

    def __call__(
        self, params: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor, seed: Tensor, extra: Tensors
    ) -> Tensor:
        """Run one step in place; returns the batch's mean loss (0-d)."""
        if self._shape is None or tuple(inputs.shape) != self._shape:
            result = self._step(params, buffers, inputs, targets, seed, extra)
            for own, new in ((params, result.params), (buffers, result.buffers)):
                for name, tensor in own.items():
                    tensor.copy_(new[name])
            return result.loss
        args = [*params.values(), *buffers.values(), inputs, targets, seed, *extra.values()]
        if self._run is None:
            traced = trace_step(self._step, params, buffers, inputs, targets, seed, extra)
            self._deferred = traced.deferred
            self._run = lambda args: traced.graph(*args)
        with torch.no_grad():
            outputs = self._run(args)
            if not self._deferred:
                return outputs[-1]
            first = len(outputs) - 2 * len(self._deferred)
            apply_products([args[position] for position in self._deferred], outputs[first:])
            return outputs[first - 1]


class TracedStep(NamedTuple):
    """A step as one graph, and the arguments whose update it leaves to `apply_products`."""

    graph: fx.GraphModule
    deferred: tuple[int, ...]


def trace_step(
    step: Step,
    params: Tensors,
    buffers: Tensors,
    inputs: Tensor,
    targets: Tensor,
    seed: Tensor,
    extra: Tensors,
) -> TracedStep:
    """One graph for forward, backward and update that writes parameters and buffers in place.

    Its arguments are the flat list params, buffers, inputs, targets, seed, extra; it returns the loss and the
    factors that `defer_products` left.
    """
    names, own, more = list(params), list(buffers), list(extra)

    def flat(*args: Tensor) -> tuple[Tensor]:
        values = list(args)
        head, tail = len(names), len(names) + len(own)
        result = step(
            dict(zip(names, values[:head], strict=True)),
            dict(zip(own, values[head:tail], strict=True)),
            values[tail],
            values[tail + 1],
            values[tail + 2],
            dict(zip(more, values[tail + 3 :], strict=True)),
        )
        for name, value in zip(names, values[:head], strict=True):
            value.copy_(result.params[name])
        for name, value in zip(own, values[head:tail], strict=True):
            value.copy_(result.buffers[name])
        return (result.loss,)

    args = [t.clone() for t in (*params.values(), *buffers.values(), inputs, targets, seed, *extra.values())]
    # oneDNN's recurrent layers cannot be traced through their backward; without it they trace to their cells
    with _torch.without_onednn():
        graph: fx.GraphModule = make_fx(flat)(*args)
    tidy(graph)
    deferred: tuple[int, ...] = ()
    if "lr" in extra:
        arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
        deferred = defer_products(graph.graph, arguments[len(names) + len(own) + 3 + more.index("lr")])
    graph.recompile()
    return TracedStep(graph, deferred)


def tidy(graph: fx.GraphModule) -> None:
    """Make what was traced fit to be run or compiled without autograd."""
    for node in list(graph.graph.nodes):
        if node.target is aten.detach.default:  # residue of autograd
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    _spell_out_alpha(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _spell_out_alpha(graph: fx.Graph) -> None:
    """Pass: x + alpha y as a product and a sum.

    Inductor of PyTorch 2.13 fuses a matrix product with the sum behind it, and drops the sum's alpha.
    """
    for node in list(graph.nodes):
        alpha = node.kwargs.get("alpha", 1)
        if node.target not in (aten.add.Tensor, aten.sub.Tensor) or alpha == 1:
            continue
        with graph.inserting_before(node):
            scaled = graph.call_function(aten.mul.Tensor, (node.args[1], alpha))
        scaled.meta = {key: value for key, value in node.args[1].meta.items() if key == "val"}
        node.args = (node.args[0], scaled)
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "alpha"}


def compile_step(
    program: Program,
    adjust: Adjust | None,
    plan: str,
    example: tuple[Tensors, Tensors, Tensor, Tensor, Tensors],
    *,
    cache: Path | None = None,
) -> PlannedStep:
    """The step in the form of a resolved plan.

    Args:
        program: the Program to train.
        adjust: see `sgd_step`.
        plan: `eager`, `interpreter` or `inductor`.
        example: (params, buffers, inputs, targets, extra) with the shapes of a full batch.
        cache: folder of compiled packages; the default is `~/.cache/mycelia/plans`.

    Raises:
        ConfigError: an unresolved or unknown plan.
    """
    if plan not in ("eager", "interpreter", "inductor"):
        raise ConfigError(f"plan {plan!r} is not resolved", rule="eager, interpreter or inductor", who="plan")
    path = package_of(program, adjust, example, cache) if plan == "inductor" else None
    return PlannedStep(sgd_step(program, adjust), plan, tuple(example[2].shape), path)


def package_of(
    program: Program,
    adjust: Adjust | None,
    example: tuple[Tensors, Tensors, Tensor, Tensor, Tensors],
    cache: Path | None = None,
) -> Path:
    """The compiled package of a federated step, from the cache or made now."""
    return package_step(sgd_step(layout(program), adjust), example, cache)


def package_step(
    step: Step, example: tuple[Tensors, Tensors, Tensor, Tensor, Tensors], cache: Path | None = None
) -> Path:
    """The compiled package of any step, from the cache or made now; make the step of `layout(program)`."""
    params, buffers, inputs, targets, extra = example
    seed = torch.zeros((), dtype=torch.int64)
    traced = trace_step(step, params, buffers, inputs, targets, seed, extra)
    args = [t.clone() for t in (*params.values(), *buffers.values(), inputs, targets, seed, *extra.values())]
    return package_graph(traced.graph, args, cache, " ".join(map(str, traced.deferred)))


def package_adder(dimension: int, cache: Path | None = None) -> Path:
    """The compiled package of `Adder` for float32 vectors of one dimension, from the cache or made now."""

    def add(total: Tensor, new: Tensor, old: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        difference = new - old
        total.copy_(total + torch.round(difference.double() * scale).to(torch.int64))
        return difference.amin(), difference.amax()

    vector = torch.zeros(dimension)
    args = [
        torch.zeros(dimension, dtype=torch.int64),
        vector,
        vector.clone(),
        torch.ones((), dtype=torch.float64),
    ]
    graph: fx.GraphModule = make_fx(add)(*args)
    return package_graph(graph, args, cache)


class Adder:
    """Adds round((new - old) * scale), half to even, to int64 totals in one pass over memory.

    The same bits as the block-wise form of `FixedPoint`, which checks what this returns: the smallest and the
    largest difference, NaN where there is one.
    """

    def __init__(self, package: Path) -> None:
        self._run, _ = _torch.load_package(package)

    def __call__(self, total: Tensor, new: Tensor, old: Tensor, scale: float) -> tuple[float, float]:
        """Add in place; the smallest and the largest difference."""
        low, high = self._run([total, new, old, torch.tensor(scale, dtype=torch.float64)])[-2:]
        return low.item(), high.item()


def package_graph(graph: fx.GraphModule, args: list[Tensor], cache: Path | None, note: str = "") -> Path:
    """The compiled package of a traced graph, from the cache or made now; it travels with the note."""
    folder = cache if cache is not None else _default_cache()
    path = folder / f"{_key(graph, args, note)}.pt2"
    if not _loads(path):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "step.pt2"
            _torch.package(graph, args, made, note)
            made.replace(path)  # atomic: another process sees the whole package or none
    return path


def _loads(path: Path) -> bool:
    """Whether there is a package that can be loaded; one damaged on disk is made again."""
    if not path.exists():
        return False
    try:
        _torch.load_package(path)
    except (RuntimeError, OSError):
        return False
    return True


def tune(
    program: Program,
    adjust: Adjust | None,
    example: tuple[Tensors, Tensors, Tensor, Tensor, Tensors],
    steps: int,
    *,
    cache: Path | None = None,
    repeats: int = 20,
) -> tuple[Plan, Mapping[str, float]]:
    """Time the candidates on `example` and choose the one with the least total time for `steps` steps.

    Returns the plan and the measured seconds per step by candidate.
    """
    seconds: dict[str, float] = {}
    total: dict[str, float] = {}
    candidates = ["interpreter", *(["inductor"] if _torch.compiler() else [])]
    params, buffers, inputs, targets, extra = example
    for name in candidates:
        started = time.perf_counter()
        planned = compile_step(program, adjust, name, example, cache=cache)
        own = ({n: t.clone() for n, t in params.items()}, {n: t.clone() for n, t in buffers.items()})
        seed = torch.zeros((), dtype=torch.int64)
        planned(*own, inputs, targets, seed, extra)
        setup = time.perf_counter() - started
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            planned(*own, inputs, targets, seed, extra)
            times.append(time.perf_counter() - started)
        seconds[name] = sorted(times)[len(times) // 2]
        total[name] = setup + steps * seconds[name]
    best = min(total, key=lambda name: total[name])
    measured = ", ".join(f"{name} {seconds[name] * 1e3:.3f} ms" for name in candidates)
    return Plan(best, f"tuned for {steps} steps: {measured} a step"), seconds


def example_batch(inputs: Any, targets: Any, size: int) -> tuple[Tensor, Tensor] | None:
    """A full batch of zeros with the shapes and dtypes of array rows; None for size 0 (no fixed shape)."""
    if size <= 0:
        return None
    kinds = (torch.from_numpy(inputs[:1]), torch.from_numpy(targets[:1]))
    first, second = (torch.zeros((size, *kind.shape[1:]), dtype=kind.dtype) for kind in kinds)
    return first, second


def _default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "mycelia" / "plans"


def _key(graph: fx.GraphModule, args: Sequence[Tensor], note: str) -> str:
    """Hash of the graph and its constants, the note, the argument shapes, the versions and the CPU."""
    digest = hashlib.sha256(note.encode())
    for node in graph.graph.nodes:
        digest.update(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}\n".encode())
        if node.op == "get_attr":  # a frozen tensor: the package has its values
            held = getattr(graph, node.target)
            known = model_sha256({"": held}) if isinstance(held, Tensor) else str(getattr(held, "code", held))
            digest.update(known.encode())
    for tensor in args:
        digest.update(f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}\n".encode())
    digest.update(f"{torch.__version__} {platform.machine()} {_cpu()}".encode())
    return digest.hexdigest()[:32]


def _cpu() -> str:
    """What the compiled code may rely on: the CPU's name and capability."""
    capability: Any = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{capability} {name} {platform.processor()}"
