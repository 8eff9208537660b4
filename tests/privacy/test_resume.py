"""Checkpoints of a private loop: killed and resumed it ends alike, and nothing is refunded."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mycelia.engine.errors import ConfigError, DataError
from mycelia.privacy.attach import DPSGD, DPAdam, DPAdamBC, PrivateTraining, attach, schedules
from mycelia.privacy.budget import Budget
from mycelia.privacy.clip import Abadi, AutoS, QuantileClip
from mycelia.privacy.factorisation import BLT, Banded
from mycelia.privacy.ledger import FILE, Ledger
from mycelia.privacy.noise.discrete_gaussian import DiscreteGaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import FixedSize, MinSep, Poisson

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

torch.set_num_threads(1)

STEPS = 12


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(60, 6, generator=draw)
    return inputs, (inputs[:, 0] > 0).long()


def model_of(dropout: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 4)) if dropout else nn.Linear(6, 4)


COMMON: Any = {"sampler": Poisson(0.2), "clip": Abadi(0.5), "noise": 1.5, "expected_batch": 12.0}
LOOPS: dict[str, Callable[[NoiseSource | None], PrivateTraining]] = {
    "adam": lambda source: DPAdam(
        model_of(), loss_fn, lr=0.01, source=source, **(COMMON | {"budget": Budget(40.0, 1e-5)})
    ),
    "everything moves": lambda source: DPAdamBC(
        model_of(dropout=True), loss_fn, lr=0.01, source=source,
        **(COMMON | {"clip": QuantileClip(bound=0.5), "noise": schedules.ExpDecay(0.9, 0.01)}),
    ),
    "correlated": lambda source: DPSGD(
        model_of(), loss_fn, lr=0.3, momentum=0.9, source=source,
        **(COMMON | {"sampler": MinSep(4, 3), "factorisation": BLT(2, (0.3, 0.2), (0.9, 0.5))}),
    ),
    "on a grid": lambda source: DPSGD(
        model_of(), loss_fn, lr=0.3, momentum=0.9, source=source,
        **(COMMON | {
            "sampler": MinSep(4, 3), "factorisation": BLT(2, (0.3, 0.2), (0.9, 0.5)),
            "mechanism": DiscreteGaussian(sampler="rounded"),
        }),
    ),
}  # fmt: skip


def loop(
    train: PrivateTraining, folder: Path | None, steps: int = STEPS, every: int = 5, stop: Any = None
) -> list[Tensor]:
    """An ordinary loop with a scheduler, that goes on from the folder where there is a checkpoint."""
    scheduler = torch.optim.lr_scheduler.StepLR(train.optimizer, 4, 0.5)
    if folder is not None and folder.exists():
        scheduler.load_state_dict(train.load(folder)["scheduler"])
    if train.steps < steps:
        for batch in train.batches(data()):
            train.loss(batch).backward()
            train.optimizer.step()
            train.optimizer.zero_grad()
            scheduler.step()
            if stop is not None:
                stop(train.steps)
            if folder is not None and train.steps % every == 0:
                train.save(folder, {"scheduler": scheduler.state_dict()})
            if train.steps == steps:
                break
    return [parameter.detach().clone() for parameter in train.model.parameters()]


CHILD = """
import os, signal, sys
from pathlib import Path
from mycelia.privacy.noise.source import NoiseSource
from tests.privacy import test_resume as t

def die(step):
    if step == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

t.loop(t.LOOPS[sys.argv[1]](NoiseSource.seeded(7)), Path(sys.argv[2]), stop=die)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("name", [
    "everything moves", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adam", "correlated")),
])  # fmt: skip
def test_resume_bit_identical(name: str, tmp_path: Path) -> None:
    """SIGKILL after update 8, with a checkpoint of update 5."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, name, str(tmp_path / "run"), "8"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert child.returncode == -9, child.stderr
    assert Ledger.load(tmp_path / "run" / FILE).steps == 8
    resumed = LOOPS[name](NoiseSource.seeded(99))  # the run's own secret is in the folder
    found = loop(resumed, tmp_path / "run")
    whole = LOOPS[name](NoiseSource.seeded(7))
    expected = loop(whole, None)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert resumed.ledger.steps == whole.ledger.steps == STEPS
    again = Ledger.load(tmp_path / "run" / FILE)
    for ledger in (resumed.ledger, again):
        assert ledger.statement(1e-5).epsilon == pytest.approx(
            whole.ledger.statement(1e-5).epsilon, rel=1e-12
        )


@pytest.mark.parametrize("name", ["adam", "correlated"])
def test_a_stopped_loop_goes_on(name: str, tmp_path: Path) -> None:
    """The same in one process, with the system's randomness, and twice."""
    folder = tmp_path / "run"
    first = LOOPS[name](None)
    loop(first, folder, steps=7)
    source = NoiseSource.load(folder / "secret" / "noise.key")
    found = loop(LOOPS[name](None), folder, steps=11)  # from 5; it stops again, with a checkpoint of 10
    found = loop(LOOPS[name](None), folder)
    expected = loop(LOOPS[name](source), None)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert Ledger.load(folder / FILE).steps == STEPS


def test_rewind_keeps_ledger(tmp_path: Path) -> None:
    """An old checkpoint refunds nothing: what was released has been released."""
    folder = tmp_path / "run"
    budget = Budget(40.0, 1e-5)
    train = DPSGD(model_of(), loss_fn, lr=0.3, **(COMMON | {"budget": budget}))
    loop(train, folder)
    spent = budget.spent
    shutil.rmtree(folder / "step-00000010")  # back to update 5
    old = Budget(40.0, 1e-5)
    rewound = DPSGD(model_of(), loss_fn, lr=0.3, **(COMMON | {"budget": old}))
    rewound.load(folder)
    assert rewound.steps == 5
    assert old.spent == pytest.approx(spent, rel=1e-12)
    loop(rewound, folder, steps=8)  # the same releases as before
    assert old.spent == pytest.approx(spent, rel=1e-12)
    assert Ledger.load(folder / FILE).steps == STEPS
    # With other hyperparameters it is another run from there: not with the noise of the first one, which
    # would tell the difference, but with a new secret, and then it counts again.
    other = Budget(40.0, 1e-5)
    changed = DPSGD(model_of(), loss_fn, lr=0.3, **(COMMON | {"budget": other}))
    changed.load(folder)
    with torch.no_grad():
        next(iter(changed.model.parameters())).mul_(1.1)
    batch = next(changed.batches(data()))
    changed.loss(batch).backward()
    with pytest.raises(DataError, match="tell their difference"):
        changed.optimizer.step()
    changed.load(folder, source=NoiseSource.os())
    batch = next(changed.batches(data(2)))
    changed.loss(batch).backward()
    changed.optimizer.step()
    assert other.spent > spent
    assert Ledger.load(folder / FILE).steps == STEPS + 1


def test_a_spent_budget_still_ends_alike(tmp_path: Path) -> None:
    """Killed after the last affordable update, the run makes up to it again, and none more."""
    folder = tmp_path / "run"

    def begin() -> PrivateTraining:
        return DPSGD(
            model_of(), loss_fn, lr=0.3, source=NoiseSource.seeded(7),
            **(COMMON | {"budget": Budget(3.0, 1e-5)}),
        )  # fmt: skip

    whole = begin()
    expected = loop(whole, None, steps=10**9)
    assert whole.stopped_by == "budget"
    loop(begin(), folder, steps=10**9, every=whole.steps - 3)
    resumed = begin()
    found = loop(resumed, folder, steps=10**9, every=10**9)
    assert (resumed.steps, resumed.stopped_by) == (whole.steps, "budget")
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert Ledger.load(folder / FILE).steps == whole.steps


def test_what_is_in_the_folder(tmp_path: Path) -> None:
    """No pickle, and secrets for their owner alone, away from what may be published."""
    folder = tmp_path / "deep" / "run"
    train = LOOPS["correlated"](None)
    loop(train, folder, steps=11)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {
        FILE, "secret/noise.key", "secret/noise-00000005.safetensors", "secret/noise-00000010.safetensors",
        *(f"step-000000{step}/{name}" for step in ("05", "10") for name in (
            "tensors.safetensors", "checkpoint.json")),
    }  # fmt: skip
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o700
    for path in (folder / "secret").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = json.loads((folder / "secret" / "noise.key").read_text())["key"]
    public = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "secret"]
    assert all(key.encode() not in path.read_bytes() for path in public)
    assert all(bytes.fromhex(key) not in path.read_bytes() for path in public)


@pytest.mark.parametrize("name", ["correlated", "on a grid"])
def test_factorised_noise_is_made_again(tmp_path: Path, name: str) -> None:
    """Where its memory is gone or damaged, the names of the draws give the same."""
    loop(LOOPS[name](NoiseSource.seeded(7)), tmp_path / "none", steps=10)
    ends = []
    for harm in ("gone", "damaged", "none"):
        folder = tmp_path / harm
        if harm != "none":
            shutil.copytree(tmp_path / "none", folder)
        path = folder / "secret" / "noise-00000010.safetensors"
        if harm == "gone":
            path.unlink()
        elif harm == "damaged":
            path.write_bytes(path.read_bytes()[:-4] + b"\x00\x00\x80\x3f")
        ends.append(loop(LOOPS[name](NoiseSource.seeded(9)), folder))
    assert all(torch.equal(a, b) for end in ends[1:] for a, b in zip(ends[0], end, strict=True))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampler": Poisson(0.25)}, "sampler, noise"),
        ({"sampler": FixedSize(12, 60)}, "sampler, noise"),
        ({"noise": 1.4}, "sampler, noise"),
        ({"clip": Abadi(0.6)}, "clip"),
        ({"clip": AutoS(0.5)}, "clip"),
        ({"expected_batch": 13.0}, "expected_batch"),
        ({"clip_schedule": schedules.ExpDecay(0.5, 0.1)}, "clip_schedule"),
        ({"model": nn.Linear(6, 3)}, "model"),
        ({"optimizer": torch.optim.Adagrad}, "optimizer"),
        ({"source": NoiseSource.seeded(7)}, "mechanism"),
    ],
)
def test_another_run_is_refused(
    changes: dict[str, Any], named: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "begun"
    if not folder.exists():
        loop(DPAdam(model_of(), loss_fn, **COMMON), folder, steps=5)
    given = COMMON | changes
    model, kind = given.pop("model", None) or model_of(), given.pop("optimizer", torch.optim.Adam)
    train = attach(model, loss_fn, kind(model.parameters()), **given)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises((DataError, ConfigError), match=named):
        train.load(folder)
    assert train.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_folders_and_ledgers_are_not_mixed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    loop(DPAdam(model_of(), loss_fn, **COMMON), folder, steps=5)
    (tmp_path / "half").mkdir()
    shutil.copy(folder / FILE, tmp_path / "half")
    for taken in (folder, tmp_path / "half"):
        with pytest.raises(ConfigError, match="has a run already"):
            DPAdam(model_of(), loss_fn, **COMMON).save(taken)
    assert not (tmp_path / "half" / "secret").exists()
    with pytest.raises(DataError, match="no intact checkpoint"):
        DPAdam(model_of(), loss_fn, **COMMON).load(tmp_path / "nowhere")
    used = DPAdam(model_of(), loss_fn, **COMMON)
    loop(used, None, steps=1)
    with pytest.raises(ConfigError, match="never replaced"):
        used.load(folder)
    # A ledger with a file of its own stays where it is.
    own = Ledger.create(tmp_path / "own.jsonl")
    loop(DPAdam(model_of(), loss_fn, **(COMMON | {"ledger": own})), tmp_path / "second", steps=6)
    assert not (tmp_path / "second" / FILE).exists()
    own.close()
    resumed = DPAdam(model_of(), loss_fn, **(COMMON | {"ledger": Ledger.load(own.path, write=True)}))
    loop(resumed, tmp_path / "second", steps=7)
    assert Ledger.load(tmp_path / "own.jsonl").steps == 7
    with pytest.raises(DataError, match="does not pass through"):
        DPAdam(model_of(), loss_fn, **(COMMON | {"ledger": Ledger.create(tmp_path / "new")})).load(
            tmp_path / "second"
        )
    # A ledger that was cut off stops the resume.
    lines = (folder / FILE).read_text().splitlines(keepends=True)
    (folder / FILE).write_text("".join(lines[:-2]))
    with pytest.raises(DataError, match="does not pass through"):
        DPAdam(model_of(), loss_fn, **COMMON).load(folder)


def test_only_data_is_kept(tmp_path: Path) -> None:
    train = DPAdam(model_of(), loss_fn, **COMMON)
    with pytest.raises(DataError, match=r"extra/what is a function"):
        train.save(tmp_path / "run", {"what": lambda: 0})
    extra = {"epoch": 3, "best": (0.5, None), "kept": {1: torch.arange(3)}, "names": ["a", "b"]}
    train.save(tmp_path / "run", extra)
    found = DPAdam(model_of(), loss_fn, **COMMON).load(tmp_path / "run")
    assert torch.equal(found["kept"].pop(1), torch.arange(3))
    assert found == extra | {"kept": {}}


def test_one_secret_for_correlated_noise(tmp_path: Path) -> None:
    def begin() -> PrivateTraining:
        return DPSGD(
            model_of(), loss_fn, lr=0.1,
            **(COMMON | {"sampler": MinSep(4, 3), "factorisation": Banded(3)}),
        )  # fmt: skip

    loop(begin(), tmp_path / "run", steps=5)
    with pytest.raises(ConfigError, match="one secret"):
        begin().load(tmp_path / "run", source=NoiseSource.os())
