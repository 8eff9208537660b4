"""Two processes train as one: one draw, one sum, one noise, one ledger."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, multiprocessing, nn

from mycelia.engine.errors import ConfigError
from mycelia.privacy.attach import DPSGD, DPAdam, PrivateTraining
from mycelia.privacy.budget import Budget
from mycelia.privacy.clip import Abadi, QuantileClip
from mycelia.privacy.factorisation import Banded
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import MinSep, Poisson

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)

RANKS = 2
STEPS = 6


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(60, 6, generator=draw)
    return inputs, (inputs[:, 0] > 0).long()


class Tied(nn.Module):
    """One matrix that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6) + 0.1 * torch.arange(36.0).view(6, 6).cos())

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(inputs, self.weight)), self.weight)


def model_of() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(6, 4)


def settings(**changes: Any) -> Any:
    return {
        "lr": 0.3, "sampler": Poisson(0.2), "clip": Abadi(0.5), "noise": 1.5, "expected_batch": 12.0,
        "source": NoiseSource.seeded(7),
    } | changes  # fmt: skip


RUNS: dict[str, Callable[[], PrivateTraining]] = {
    "mostly empty": lambda: DPAdam(model_of(), loss_fn, **settings(lr=0.05, sampler=Poisson(0.005))),
    "tied, in parts": lambda: DPSGD(Tied(), loss_fn, **settings(sampler=Poisson(0.3, physical=5))),
    "adaptive, with a budget": lambda: DPSGD(
        model_of(), loss_fn, **settings(clip=QuantileClip(bound=0.2), noise=0.9, budget=Budget(9.0, 1e-5))
    ),
    "correlated": lambda: DPSGD(
        model_of(), loss_fn, **settings(sampler=MinSep(2, 3), factorisation=Banded(3))
    ),
}


def loop(train: PrivateTraining, steps: int = STEPS, folder: Path | None = None) -> dict[str, Tensor]:
    for batch in train.batches(data()):
        train.loss(batch).backward()
        if batch.part.last:
            train.optimizer.step()
            train.optimizer.zero_grad()
            if folder is not None and train.steps == 3:
                train.save(folder)
            if train.steps == steps:
                break
    return {name: parameter.detach() for name, parameter in train.model.named_parameters()}


def work(rank: int, folder: str) -> None:
    """All that one process does; what it finds is compared by the test."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    found: dict[str, Any] = {}
    for name, begin in RUNS.items():
        train = begin()
        save_file(loop(train), f"{folder}/{name} {rank}")
        found[name] = [train.steps, train.stopped_by, train.ledger.statement(1e-5).epsilon]

    # Everybody comes with a secret of its own, and the first one's is taken.
    save_file(loop(DPSGD(model_of(), loss_fn, **settings(source=None))), f"{folder}/secret {rank}")

    # Saved by the first, read by both.
    train = DPSGD(model_of(), loss_fn, **settings())
    loop(train, 4, Path(folder, "run"))
    train = DPSGD(model_of(), loss_fn, **settings())
    train.load(Path(folder, "run"))
    save_file(loop(train), f"{folder}/resumed {rank}")
    found["resumed"] = [train.steps, train.stopped_by, train.ledger.statement(1e-5).epsilon]

    try:
        DPSGD(model_of(), loss_fn, **settings(noise=1.5 + rank))
    except ConfigError as error:
        found["differ"] = str(error)
    distributed.destroy_process_group()
    Path(folder, f"found {rank}").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote."""
    path = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, str(path))) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * RANKS
    return path


def found(folder: Path, rank: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / f"found {rank}").read_text())
    return result


@pytest.mark.e2e
def test_ranks_step_together(folder: Path) -> None:
    """Whatever a process was dealt, it steps as often as the others and as one process alone would."""
    for name in RUNS:
        assert found(folder, 0)[name] == found(folder, 1)[name]
    assert found(folder, 0)["mostly empty"][0] == STEPS
    assert found(folder, 0)["correlated"][0] == STEPS


@pytest.mark.e2e
@pytest.mark.parametrize("name", RUNS)
def test_the_model_is_that_of_one_process(folder: Path, name: str) -> None:
    """The sum is clipped example by example and noised once: neither q, nor B, nor z changes with ranks."""
    one, two = (load_file(folder / f"{name} {rank}") for rank in range(RANKS))
    assert all(torch.equal(one[key], two[key]) for key in one)
    alone = RUNS[name]()
    torch.testing.assert_close(one, loop(alone), rtol=1e-5, atol=1e-6)
    steps, stopped, spent = found(folder, 0)[name]
    assert (steps, stopped) == (alone.steps, alone.stopped_by)
    assert spent == pytest.approx(alone.ledger.statement(1e-5).epsilon, rel=1e-12)


@pytest.mark.e2e
def test_one_secret_for_all(folder: Path) -> None:
    one, two = (load_file(folder / f"secret {rank}") for rank in range(RANKS))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.e2e
def test_ranks_resume_together(folder: Path) -> None:
    one, two = (load_file(folder / f"resumed {rank}") for rank in range(RANKS))
    assert all(torch.equal(one[key], two[key]) for key in one)
    torch.testing.assert_close(one, loop(DPSGD(model_of(), loss_fn, **settings())), rtol=1e-5, atol=1e-6)
    assert found(folder, 0)["resumed"] == found(folder, 1)["resumed"]
    assert found(folder, 0)["resumed"][0] == STEPS


@pytest.mark.e2e
def test_ranks_that_differ_are_refused(folder: Path) -> None:
    assert all("the 2 processes differ" in found(folder, rank)["differ"] for rank in range(RANKS))
