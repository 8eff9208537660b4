"""Plans against torch.optim.SGD on the module itself, and what compiling leaves behind."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycelia.engine import _torch
from mycelia.engine.capture import capture
from mycelia.engine.errors import ConfigError
from mycelia.engine.program import Program
from mycelia.engine.transforms.compile import (
    PLANS,
    WORTH_COMPILING,
    choose_plan,
    compile_step,
    example_batch,
    package_of,
    tune,
)
from mycelia.engine.types import Tensors
from tests.engine.transforms.programs import close, models
from tests.engine.zoo import ZOO, Case

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning"
)

needs_compiler = pytest.mark.skipif(_torch.compiler() is None, reason="no C++ compiler")
QUICK = ("mlp", "lenet", "resnet8-batch", "transformer", "dropout", "unused")
TRACED = tuple(name for name, case in ZOO.items() if not case.flow)
Example = tuple[Tensors, Tensors, Tensor, Tensor, Tensors]


DOUBLE = {"resnet18-batch"}
"""Deep batch norm on four examples amplifies float32 rounding a thousandfold within five steps."""


def single(name: str) -> Case:
    return dataclasses.replace(ZOO[name], double=name in DOUBLE)


@functools.cache
def program_of(name: str) -> Program:
    case = single(name)
    return capture(case.module(), case.loss, case.batch(3))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def example_of(name: str, size: int = 4) -> Example:
    params, buffers = program_of(name).init()
    return params, buffers, *single(name).batch(size), {"lr": torch.tensor(0.05, dtype=single(name).dtype)}


def batches_of(name: str) -> list[tuple[Tensor, Tensor]]:
    """Five, the third smaller than the others."""
    return [single(name).batch(2 if number == 2 else 4, seed=number) for number in range(5)]


def trained(name: str, plan: str, cache: Path) -> tuple[Tensors, Tensors, list[Tensor]]:
    example = example_of(name)
    step = compile_step(program_of(name), None, plan, example, cache=cache)
    params, buffers = program_of(name).init()
    losses = [
        step(params, buffers, *batch, torch.tensor(number), example[-1])
        for number, batch in enumerate(batches_of(name))
    ]
    return params, buffers, [loss.clone() for loss in losses]


def reference(name: str) -> tuple[Tensors, Tensors, list[Tensor]]:
    """torch.optim.SGD; with dropout, on the captured losses, whose randomness is the seed's."""
    case, program = single(name), program_of(name)
    params, buffers = program.init()
    losses = []
    module = case.module().train()
    leaves = {n: t.requires_grad_() for n, t in params.items()}
    own = dict(module.named_parameters())
    optimizer = torch.optim.SGD(list(leaves.values()) if case.random else [own[n] for n in params], lr=0.05)
    for number, (inputs, targets) in enumerate(batches_of(name)):
        optimizer.zero_grad()
        if case.random:
            forward = program.forward(leaves, buffers, inputs, targets, seed=number)
            found, buffers = forward.losses, forward.buffers
        else:
            found = case.loss(module(inputs.clone()), targets)
        found.mean().backward()
        optimizer.step()
        losses.append(found.detach().mean())
    if not case.random:
        leaves = {n: own[n] for n in params}
        buffers = {n: dict(module.named_buffers())[n] for n in buffers}
    return {n: t.detach() for n, t in leaves.items()}, {n: t.detach() for n, t in buffers.items()}, losses


def same_training(name: str, plan: str, cache: Path) -> None:
    params, buffers, losses = trained(name, plan, cache)
    expected = reference(name)
    close(params, expected[0], 1e-5)
    close(buffers, expected[1], 1e-5)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected[2]), rtol=1e-5, atol=1e-5)


@models(tuple(ZOO), quick=QUICK)
def test_eager_is_sgd(name: str, cache: Path) -> None:
    same_training(name, "eager", cache)


@models(TRACED, quick=QUICK)
def test_the_interpreter_is_sgd(name: str, cache: Path) -> None:
    same_training(name, "interpreter", cache)


@needs_compiler
@models(TRACED, quick=("mlp",))
def test_inductor_is_sgd(name: str, cache: Path) -> None:
    same_training(name, "inductor", cache)


def proximal(grads: Tensors, params: Tensors, extra: Tensors) -> Tensors:
    """As FedProx adds it: a scaled sum right behind the matrix product of a gradient."""
    return {n: torch.add(g, params[n] - extra[f"anchor.{n}"], alpha=1e-3) for n, g in grads.items()}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("mlp", "interpreter"),
        ("lenet", "interpreter"),
        pytest.param("mlp", "inductor", marks=needs_compiler),
        pytest.param("lenet", "inductor", marks=[needs_compiler, pytest.mark.slow]),
    ],
)
def test_an_adjusted_step_is_the_eager_one(name: str, plan: str, cache: Path) -> None:
    program = program_of(name)
    found = []
    for chosen in ("eager", plan):
        params, buffers, inputs, targets, extra = example_of(name)
        extra |= {f"anchor.{n}": tensor + 1.0 for n, tensor in params.items()}
        example = (params, buffers, inputs, targets, extra)
        step = compile_step(program, proximal, chosen, example, cache=cache)
        for number in range(5):
            step(params, buffers, *single(name).batch(4, seed=number), torch.tensor(number), extra)
        found.append(params)
    close(found[1], found[0], 1e-5)


@needs_compiler
def test_a_second_call_compiles_nothing(cache: Path) -> None:
    program, example = program_of("mlp"), example_of("mlp")
    first = package_of(program, None, example, cache)
    before = first.stat().st_mtime_ns, sorted(cache.iterdir())
    assert package_of(program, None, example, cache) == first
    assert (first.stat().st_mtime_ns, sorted(cache.iterdir())) == before


@needs_compiler
@pytest.mark.parametrize("keep", [0, 1000])
def test_a_damaged_package_is_made_again(
    keep: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is replaced by a copy of what it made before."""
    good = package_of(program_of("mlp"), None, example_of("mlp"), cache)
    made: list[Path] = []

    def copied(graph: object, args: object, path: Path, note: str) -> None:
        path.write_bytes(good.read_bytes())
        made.append(path)

    monkeypatch.setattr(_torch, "package", copied)
    (tmp_path / good.name).write_bytes(good.read_bytes()[:keep])
    params, *_ = trained("mlp", "inductor", tmp_path)
    assert len(made) == 1
    close(params, reference("mlp")[0], 1e-5)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


def test_what_makes_a_package_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another batch shape, another model, another adjustment; compiling and loading are left out."""
    monkeypatch.setattr(_torch, "load_package", lambda path: None)
    monkeypatch.setattr(_torch, "package", lambda graph, args, path, note: path.write_bytes(b""))

    def decayed(grads: Tensors, params: Tensors, extra: Tensors) -> Tensors:
        return {n: g + 0.1 * params[n] for n, g in grads.items()}

    program = program_of("mlp")
    paths = [
        package_of(program, None, example_of("mlp"), tmp_path),
        package_of(program, None, example_of("mlp", 5), tmp_path),
        package_of(program, decayed, example_of("mlp"), tmp_path),
        package_of(program_of("dropout"), None, example_of("dropout"), tmp_path),
    ]
    assert len(set(paths)) == 4
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert package_of(program, None, example_of("mlp"), tmp_path) == paths[0]


def test_a_failed_compilation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(graph: object, args: object, path: Path, note: str) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("disk full")

    monkeypatch.setattr(_torch, "package", failing)
    with pytest.raises(RuntimeError, match="disk full"):
        package_of(program_of("mlp"), None, example_of("mlp"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unresolved_plan_is_refused() -> None:
    for plan in ("default", "tune", "fast"):
        with pytest.raises(ConfigError, match="eager, interpreter or inductor"):
            compile_step(program_of("mlp"), None, plan, example_of("mlp"))


@pytest.mark.parametrize(
    ("requested", "steps", "compiler", "name", "reason"),
    [
        ("default", WORTH_COMPILING, "/usr/bin/g++", "inductor", "g++ found"),
        ("default", WORTH_COMPILING - 1, "/usr/bin/g++", "interpreter", "fewer than"),
        ("default", WORTH_COMPILING, None, "interpreter", "no C++ compiler"),
        ("default", 0, None, "interpreter", "no C++ compiler"),
        ("eager", WORTH_COMPILING, None, "eager", "asked for"),
        ("interpreter", WORTH_COMPILING, "/usr/bin/g++", "interpreter", "asked for"),
        ("inductor", 1, "/usr/bin/g++", "inductor", "asked for"),
        ("tune", 1, "/usr/bin/g++", "tune", "asked for"),
        ("tune", 1, None, "tune", "asked for"),
    ],
)
def test_the_rule(
    requested: str, steps: int, compiler: str | None, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "compiler", lambda: compiler)
    plan = choose_plan(requested, steps)
    assert plan.name == name
    assert reason in plan.reason


def test_inductor_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "compiler", lambda: None)
    with pytest.raises(ConfigError, match="install g"):
        choose_plan("inductor", WORTH_COMPILING)


def test_an_unknown_plan_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=", ".join(PLANS)):
        choose_plan("fast", 1)


def test_tune_without_a_compiler_has_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "compiler", lambda: None)
    example = example_of("mlp")
    before = {n: t.clone() for n, t in example[0].items()}
    plan, seconds = tune(program_of("mlp"), None, example, 100, repeats=3)
    assert plan.name == "interpreter"
    assert list(seconds) == ["interpreter"]
    assert seconds["interpreter"] > 0
    assert all(torch.equal(t, before[n]) for n, t in example[0].items())


@needs_compiler
def test_tune_times_both(cache: Path) -> None:
    plan, seconds = tune(program_of("mlp"), None, example_of("mlp"), 100, cache=cache, repeats=3)
    assert set(seconds) == {"interpreter", "inductor"}
    assert plan.name in seconds
    assert all(value > 0 for value in seconds.values())
    assert "100 steps" in plan.reason


def test_example_batch() -> None:
    inputs, targets = (part.numpy() for part in single("lenet").batch(3))
    found = example_batch(inputs, targets, 8)
    assert found is not None
    assert found[0].shape == (8, 1, 12, 12)
    assert (found[1].shape, found[1].dtype) == ((8,), torch.int64)
    assert example_batch(inputs, targets, 0) is None
