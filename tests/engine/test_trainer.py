from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mycelia.engine import events as e
from mycelia.engine.capture import capture
from mycelia.engine.checkpoint import load_checkpoint
from mycelia.engine.data import Examples
from mycelia.engine.errors import CaptureError, ConfigError, DataError, MyceliaError
from mycelia.engine.losses import cross_entropy
from mycelia.engine.metrics import Metrics
from mycelia.engine.optimizers import Optimizer, State, adam, adamw, build, sgd
from mycelia.engine.program import Program
from mycelia.engine.run import Run
from mycelia.engine.schedules import cosine
from mycelia.engine.train_config import Every
from mycelia.engine.training import (
    Trainer,
    batches,
    clip_by_global_norm,
    evaluate,
    steps_per_epoch,
    stop_on_signal,
)
from mycelia.engine.types import Tensors

torch.set_num_threads(1)

FEATURES, CLASSES = 6, 3


def examples(count: int = 47, seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    targets = rng.integers(CLASSES, size=count)
    inputs = rng.normal(size=(count, FEATURES)) + 2 * np.eye(CLASSES, FEATURES)[targets]
    return Examples(inputs.astype(np.float32), targets)


def network(*, dropout: float = 0.0) -> nn.Module:
    """Linear layers with batch statistics, so that there are buffers, and dropout if wanted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Linear(FEATURES, 16, bias=False),  # the next layer takes its mean off
            nn.BatchNorm1d(16),
            nn.ReLU(),
            *([nn.Dropout(dropout)] if dropout else []),
            nn.Linear(16, CLASSES),
        )


def program_of(module: nn.Module, backend: str = "export") -> Program:
    example = (torch.zeros(2, FEATURES), torch.zeros(2, dtype=torch.int64))
    return capture(module, cross_entropy, example, backend=backend)


@pytest.fixture(scope="module")
def plain() -> Program:
    return program_of(network())


@pytest.fixture(scope="module")
def random() -> Program:
    return program_of(network(dropout=0.3))


METRICS = Metrics(classes=CLASSES)


def trainer(program: Program, optimizer: Optimizer | None = None, **options: Any) -> Trainer:
    # eager is what starts fastest
    options = {"epochs": 2, "batch_size": 10, "metrics": METRICS, "log_steps": 1, "plan": "eager"} | options
    return Trainer(program, optimizer or adam(0.01), **options)


# The step and the order of the examples


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 2**63 - 1))
def test_every_epoch_is_a_permutation(count: int, size: int, seed: int) -> None:
    per_epoch = steps_per_epoch(count, size)
    drawn = [rows for _, rows in batches(count, size, seed, start=0, stop=2 * per_epoch)]
    for epoch in (drawn[:per_epoch], drawn[per_epoch:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(count))
        assert all(len(rows) == size for rows in epoch[:-1])


@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_batches_from_any_step_are_those_of_the_whole(count: int, size: int, data: st.DataObject) -> None:
    stop = 3 * steps_per_epoch(count, size)
    start = data.draw(st.integers(0, stop))
    whole = [(step, rows.tolist()) for step, rows in batches(count, size, 3, start=0, stop=stop)]
    assert [(s, rows.tolist()) for s, rows in batches(count, size, 3, start=start, stop=stop)] == whole[
        start:
    ]


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_clipping_as_torch_does(scale: float, max_norm: float) -> None:
    generator = torch.Generator().manual_seed(1)
    grads = {
        name: scale * torch.randn(shape, generator=generator) for name, shape in (("a", (3, 2)), ("b", 4))
    }
    tensors = [nn.Parameter(torch.zeros_like(grad)) for grad in grads.values()]
    for tensor, grad in zip(tensors, grads.values(), strict=True):
        tensor.grad = grad.clone()
    norm = nn.utils.clip_grad_norm_(tensors, max_norm)
    clipped, found = clip_by_global_norm(grads, max_norm)
    torch.testing.assert_close(found, norm)
    for tensor, grad in zip(tensors, clipped.values(), strict=True):
        # torch divides by the norm plus 1e-6
        torch.testing.assert_close(grad, tensor.grad, rtol=2e-6 / min(1.0, norm.item()) + 1e-5, atol=0.0)
    assert torch.cat([grad.flatten() for grad in clipped.values()]).norm() <= max_norm * (1 + 1e-5)


def test_a_zero_gradient_is_not_clipped_to_nan() -> None:
    clipped, norm = clip_by_global_norm({"a": torch.zeros(3)}, 1.0)
    assert norm.item() == 0.0
    assert clipped["a"].tolist() == [0.0, 0.0, 0.0]


CASES: dict[str, tuple[Callable[[], Optimizer], Callable[[Any], torch.optim.Optimizer], float]] = {
    "adamw, clipped": (
        lambda: adamw(0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
        0.5,
    ),
    "momentum": (
        lambda: sgd(0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
        0.0,
    ),
}


@pytest.mark.parametrize("plan", ["eager", "interpreter"])
@pytest.mark.parametrize("case", CASES)
def test_fit_is_a_plain_torch_loop(plain: Program, case: str, plan: str) -> None:
    ours, theirs, clip_norm = CASES[case]
    data = examples()
    result = trainer(plain, ours(), epochs=3, clip_norm=clip_norm, plan=plan, seed=4).fit(data)

    module = network()
    optimizer = theirs(module.parameters())
    sums = [0.0, 0.0]
    for step, rows in batches(len(data), 10, 4, start=0, stop=3 * 5):
        loss = nn.functional.cross_entropy(
            module(torch.from_numpy(data.inputs[rows])), torch.from_numpy(data.targets[rows])
        )
        optimizer.zero_grad()
        loss.backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
        if step >= 2 * 5:
            sums = [sums[0] + loss.item() * len(rows), sums[1] + len(rows)]
    state = {**result.params, **result.buffers}
    assert state.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(
            state[name], tensor, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert result.train_loss == pytest.approx(sums[0] / sums[1], rel=1e-5)
    assert (result.steps, result.epochs, result.plan) == (15, 3, plan)


@pytest.mark.slow
def test_inductor_agrees_with_the_interpreter(random: Program) -> None:
    results = [
        trainer(random, adamw(0.01), clip_norm=1.0, plan=plan).fit(examples(), examples(20, 1))
        for plan in ("interpreter", "inductor")
    ]
    for name, tensor in results[0].params.items():
        torch.testing.assert_close(results[1].params[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_tune_records_its_choice(plain: Program, tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", "train", "") as run:
        result = trainer(plain, plan="tune").fit(examples(), run=run)
        started = next(run.events({"run_started"}))
    assert isinstance(started, e.RunStarted)
    assert started.plan == result.plan
    assert result.plan in ("interpreter", "inductor")
    assert "tuned for 10 steps" in started.environment["plan"]["reason"]


def test_a_model_without_a_graph_runs_eagerly() -> None:
    program = program_of(network(dropout=0.3), backend="eager")
    first, second = (trainer(program, plan="default").fit(examples()).summary() for _ in range(2))
    assert first["plan"] == "eager"
    assert first["model_sha256"] == second["model_sha256"]
    with pytest.raises(CaptureError, match="needs a graph"):
        trainer(program, plan="interpreter").fit(examples())


def test_fits_do_not_touch_each_other_or_the_global_generators(random: Program) -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    same = [trainer(random).fit(examples()).summary()["model_sha256"] for _ in range(2)]
    assert same[0] == same[1]
    assert torch.equal(torch.get_rng_state(), before)
    assert trainer(random, seed=1).fit(examples()).summary()["model_sha256"] != same[0]


def test_steps_replace_epochs(plain: Program) -> None:
    result = trainer(plain, epochs=9, steps=7).fit(examples())
    assert (result.steps, result.epochs) == (7, 1.4)
    assert result.metrics == {}
    assert result.summary()["test_accuracy"] is None


# Evaluation


@given(st.integers(1, 60))
@settings(max_examples=5, deadline=None)
def test_evaluation_does_not_depend_on_the_batches(plain: Program, size: int) -> None:
    from sklearn.metrics import accuracy_score, f1_score, log_loss, roc_auc_score

    data = examples(50, seed=3)
    params, buffers = plain.init()
    with torch.no_grad():
        scores = network().eval()(torch.from_numpy(data.inputs)).double().softmax(1).numpy()
    metrics = Metrics(classes=CLASSES, top_k=(2,), keep_scores=True)
    found = evaluate(plain, params, buffers, data, metrics, batch_size=size).result()
    ranked = scores.argsort(1)[:, -2:]
    expected = {
        "loss": log_loss(data.targets, scores),
        "accuracy": accuracy_score(data.targets, scores.argmax(1)),
        "top_2_accuracy": np.mean([t in r for t, r in zip(data.targets, ranked, strict=True)]),
        "macro_f1": f1_score(data.targets, scores.argmax(1), average="macro"),
        "auroc": np.mean([roc_auc_score(data.targets == c, scores[:, c]) for c in range(CLASSES)]),
    }
    assert found == pytest.approx(expected, rel=1e-5)


# The run folder


def of_kind(run: Run, kind: type[e.Event]) -> list[Any]:
    return list(run.events({kind.kind}))


def test_what_a_run_records(plain: Program, tmp_path: Path) -> None:
    told: list[e.Event] = []
    train_data, test_data = examples(), examples(20, 1)
    with Run.create(tmp_path / "run", "train", "seed = 3\n") as run:
        result = trainer(
            plain,
            adam(cosine(0.01, 12)),
            rate=cosine(0.01, 12),
            steps=12,
            seed=3,
            clip_norm=1.0,
            log_steps=5,
            evaluation=Every(steps=4),
            checkpoint=Every(steps=5),
        ).fit(train_data, test_data, [told.append], run=run)
        (started,) = of_kind(run, e.RunStarted)
        (finished,) = of_kind(run, e.RunFinished)
        scalars = of_kind(run, e.Scalars)
        written = [event.kind for event in run.events()]
    assert (started.command, started.total, started.unit, started.seed) == ("train", 12, "step", 3)
    assert started.config == {"seed": 3}
    assert started.environment["versions"]["torch"] == torch.__version__
    assert [event.step for event in scalars] == [5, 10, 12]
    assert [event.values["lr"] for event in scalars] == pytest.approx(
        [0.005 * (1 + math.cos(math.pi * step / 12)) for step in (4, 9, 11)]
    )
    assert all(event.values["gradient_norm"] > 0 for event in scalars)
    assert [event.step for event in told if isinstance(event, e.Evaluation)] == [4, 8, 12]
    assert [kind for kind in written if kind != "checkpoint"] == [event.kind for event in told]
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "step-00000010",
        "step-00000012",
    ]
    assert finished.status == "finished"
    assert finished.result == result.summary()
    assert result.metrics == pytest.approx(
        evaluate(plain, result.params, result.buffers, test_data, METRICS).result()
    )


def stop_after(step: int) -> tuple[Callable[[e.Event], None], Callable[[], bool]]:
    """A callback and a `should_stop` that ask for an end after a step."""
    seen = [0]

    def hear(event: e.Event) -> None:
        if isinstance(event, e.Scalars):
            seen[0] = event.step

    return hear, lambda: seen[0] >= step


@pytest.mark.parametrize(
    ("step", "plan"),
    [
        (1, "eager"),
        (4, "eager"),
        (5, "eager"),
        (9, "eager"),
        (4, "interpreter"),
        pytest.param(4, "inductor", marks=pytest.mark.slow),
    ],
)
def test_interrupted_and_resumed_is_never_stopped(
    random: Program, tmp_path: Path, step: int, plan: str
) -> None:
    data, test = examples(), examples(20, 1)
    fitted = trainer(random, adam(cosine(0.01, 10)), clip_norm=1.0, plan=plan)
    with Run.create(tmp_path / "whole", "train", "") as run:
        whole = fitted.fit(data, test, run=run)
        expected = [(event.step, event.values) for event in of_kind(run, e.Scalars)]
    hear, stop = stop_after(step)
    with Run.create(tmp_path / "run", "train", "") as run:
        stopped = fitted.fit(data, test, [hear], run=run, should_stop=stop)
        assert stopped.interrupted
        assert stopped.steps == step
        assert of_kind(run, e.RunFinished)[-1].status == "interrupted"
    with Run.resume(tmp_path / "run") as run:
        # the recorded plan counts, not the one asked for now
        asked = "eager" if plan == "inductor" else "inductor"
        other = trainer(random, adam(cosine(0.01, 10)), clip_norm=1.0, plan=asked)
        result = other.fit(data, test, run=run)
        history = list(run.history())
    assert not result.interrupted
    changing = {"seconds_total", "run_dir"}
    assert {k: v for k, v in result.summary().items() if k not in changing} == {
        k: v for k, v in whole.summary().items() if k not in changing
    }
    assert [(event.step, event.values) for event in history if isinstance(event, e.Scalars)] == expected
    assert result.seconds > stopped.seconds


def test_a_finished_run_gives_its_result_again(plain: Program, tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", "train", "") as run:
        first = trainer(plain).fit(examples(), examples(20, 1), run=run)
    with Run.resume(tmp_path / "run") as run:
        again = trainer(plain).fit(examples(), examples(20, 1), run=run)
        assert len(of_kind(run, e.Scalars)) == 10
    assert again.summary() | {"seconds_total": 0} == first.summary() | {"seconds_total": 0}


def test_a_broken_checkpoint_is_skipped(random: Program, tmp_path: Path) -> None:
    fitted = trainer(random, checkpoint=Every(steps=3))
    whole = fitted.fit(examples()).summary()["model_sha256"]
    hear, stop = stop_after(7)
    with Run.create(tmp_path / "run", "train", "") as run:
        fitted.fit(examples(), callbacks=[hear], run=run, should_stop=stop)
    tensors = tmp_path / "run/checkpoints/step-00000007/tensors.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    with Run.resume(tmp_path / "run") as run:
        result = fitted.fit(examples(), run=run)
        assert [event.step for event in of_kind(run, e.Resumed)] == [6]
        assert "SHA-256" in of_kind(run, e.WarningRaised)[0].message
    assert result.summary()["model_sha256"] == whole


def test_the_second_signal_does_not_wait() -> None:
    told: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signal(told.append) as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()
        assert "checkpoint" in told[0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert len(told) == 1


def test_an_interrupt_that_does_not_wait_is_recorded(plain: Program, tmp_path: Path) -> None:
    def interrupt(event: e.Event) -> None:
        if isinstance(event, e.Scalars) and event.step == 7:
            raise KeyboardInterrupt

    fitted = trainer(plain)
    with Run.create(tmp_path / "run", "train", "") as run, pytest.raises(KeyboardInterrupt):
        fitted.fit(examples(), callbacks=[interrupt], run=run)
    with Run.resume(tmp_path / "run") as run:
        assert of_kind(run, e.RunFinished)[-1].status == "interrupted"
        result = fitted.fit(examples(), run=run)
        assert [event.step for event in of_kind(run, e.Resumed)] == [5]
    assert result.summary()["model_sha256"] == fitted.fit(examples()).summary()["model_sha256"]


# A process that is killed

CHILD = """
import os, signal, sys
from pathlib import Path
from tests.engine import test_trainer as t

moment, count, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
seen = 0

def die(*arguments):
    global seen
    seen += 1
    if seen == count:
        os.kill(os.getpid(), signal.SIGKILL)

if moment == "step":
    t.killed_run(path, die)
else:
    original = getattr(os, moment)
    def patched(*arguments, **options):
        die()
        return original(*arguments, **options)
    setattr(os, moment, patched)
    t.killed_run(path, lambda event: None)
"""


def killed_trainer() -> Trainer:
    optimizer = adamw(cosine(0.01, 15))
    program = program_of(network(dropout=0.3), backend="eager")  # spares the child the export
    return trainer(program, optimizer, epochs=3, checkpoint=Every(steps=2))


def killed_run(path: Path, callback: Callable[[e.Event], None]) -> None:
    with Run.create(path, "train", "") as run:
        killed_trainer().fit(examples(), examples(20, 1), [callback], run=run)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("moment", "count"),
    [
        ("step", 1),  # the run has only begun: no checkpoint yet
        ("fsync", 10),  # within the saving of a checkpoint, before its file is whole
        ("step", 11),
        *(pytest.param("fsync", n, marks=pytest.mark.slow) for n in (*range(1, 10), *range(11, 30))),
        *(pytest.param("step", n, marks=pytest.mark.slow) for n in (2, 3, 4, 5, 6, 7, 8, 9, 10, 14, 17, 20)),
    ],
)
def test_sigkill_and_resume(tmp_path: Path, moment: str, count: int) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, moment, str(count), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert child.returncode == -9, child.stderr
    fitted = killed_trainer()
    with Run.resume(tmp_path / "run") as run:
        result = fitted.fit(examples(), examples(20, 1), run=run)
        assert [event.step for event in run.history() if isinstance(event, e.Scalars)] == list(range(1, 16))
    whole = fitted.fit(examples(), examples(20, 1))
    assert result.summary()["model_sha256"] == whole.summary()["model_sha256"]
    assert result.train_loss == whole.train_loss
    assert result.metrics == whole.metrics


# What goes wrong


def exploding(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, but infinite for examples of class 2."""
    return cross_entropy(outputs, targets) + torch.where(targets == 2, math.inf, 0.0)


@contextmanager
def no_big_files(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size`: what a write to a full disk meets."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_loss_that_is_not_finite_stops_with_step_and_examples(tmp_path: Path) -> None:
    data = examples()
    last_batch = next(rows for step, rows in batches(47, 10, 0, start=3, stop=4))
    targets = data.targets % 2
    targets[last_batch[4]] = 2
    program = capture(network(), exploding, (torch.zeros(2, FEATURES), torch.zeros(2, dtype=torch.int64)))
    fitted = trainer(program, checkpoint=Every(steps=2))
    with Run.create(tmp_path / "run", "train", "") as run:
        with pytest.raises(MyceliaError, match=r"the loss is inf at step 4") as caught:
            fitted.fit(Examples(data.inputs, targets), run=run)
        assert str(last_batch[4]) in caught.value.found.split("examples ")[1].split(", ")
        assert of_kind(run, e.RunFinished)[-1].status == "failed"
        (text,) = of_kind(run, e.Text)
        assert [int(row) for row in text.text.split(", ")] == last_batch.tolist()
    kept = load_checkpoint(tmp_path / "run/checkpoints")
    assert kept.step == 2
    assert all(bool(torch.isfinite(tensor).all()) for tensor in kept.tensors.values())


def test_a_gradient_norm_that_is_not_finite_stops() -> None:
    def cliff(outputs: Tensor, targets: Tensor) -> Tensor:
        # sqrt at 0: a finite loss with an infinite slope
        return torch.sqrt((outputs[:, 0] * 0.0).abs())

    program = capture(network(), cliff, (torch.zeros(2, FEATURES), torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(MyceliaError, match="gradient's norm is nan at step 1"):
        trainer(program, clip_norm=1.0).fit(examples())


def test_a_model_that_is_not_finite_is_never_saved(plain: Program, tmp_path: Path) -> None:
    calm = sgd(0.1)

    def update_(grads: Tensors, state: State, params: Tensors) -> tuple[Tensors, State]:
        moved, state = calm.update(grads, state, params)
        return {name: tensor / 0 for name, tensor in moved.items()}, state

    fitted = trainer(plain, replace(calm, update_=update_), steps=1)
    with (
        Run.create(tmp_path / "run", "train", "") as run,
        pytest.raises(MyceliaError, match=r"holds NaN or infinity after step 1"),
    ):
        fitted.fit(examples(), run=run)
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_full_disk_leaves_the_checkpoint_before(plain: Program, tmp_path: Path) -> None:
    fitted = trainer(plain, checkpoint=Every(steps=3))
    whole = fitted.fit(examples()).summary()["model_sha256"]
    with Run.create(tmp_path / "run", "train", "") as run:
        log = tmp_path / "run/events.jsonl"

        def fill(event: e.Event) -> None:
            if isinstance(event, e.Scalars) and event.step == 5:
                # room for events, not for a checkpoint
                (soft,) = {log.stat().st_size + 1500}
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))

        with (
            no_big_files(resource.RLIM_INFINITY),
            pytest.raises(MyceliaError, match="checkpoint of step 6 cannot be written: File too large"),
        ):
            fitted.fit(examples(), callbacks=[fill], run=run)
        assert of_kind(run, e.RunFinished)[-1].status == "failed"
    assert load_checkpoint(tmp_path / "run/checkpoints").step == 3
    with Run.resume(tmp_path / "run") as run:
        assert fitted.fit(examples(), run=run).summary()["model_sha256"] == whole


def test_a_run_of_another_command_is_refused_and_untouched(plain: Program, tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", "simulate", "") as run:
        run.log(e.RunStarted(command="simulate"))
    before = (tmp_path / "run/events.jsonl").read_bytes()
    with (
        Run.resume(tmp_path / "run") as run,
        pytest.raises(ConfigError, match=r"made by `mycelia simulate`[\s\S]*mycelia simulate --resume"),
    ):
        trainer(plain).fit(examples(), run=run)
    assert (tmp_path / "run/events.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 5}, "batch_size was 10, is 5"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"optimizer": build("yogi")}, "optimizer was 'adam', is 'yogi'"),
    ],
)
def test_a_run_does_not_go_on_with_other_settings(
    plain: Program, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    hear, stop = stop_after(3)
    with Run.create(tmp_path / "run", "train", "") as run:
        trainer(plain).fit(examples(), callbacks=[hear], run=run, should_stop=stop)
    changed = trainer(plain, **change)
    with Run.resume(tmp_path / "run") as run, pytest.raises(ConfigError, match=message):
        changed.fit(examples(), run=run)
    with Run.resume(tmp_path / "run") as run, pytest.raises(ConfigError, match="data was"):
        trainer(plain).fit(examples(seed=1), run=run)
    with Run.resume(tmp_path / "run") as run, pytest.raises(DataError, match="tensor 'optimizer/m/"):
        trainer(plain, sgd(0.1)).fit(examples(), run=run)


def shifted(**changes: Any) -> Examples:
    data = examples()
    return Examples(changes.get("inputs", data.inputs), changes.get("targets", data.targets))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (shifted(targets=np.full(47, 3)), r"row 0 has label 3[\s\S]*0\.\.2"),
        (shifted(targets=np.full(47, -1)), "row 0 has label -1"),
        (shifted(inputs=np.full((47, FEATURES), np.nan, np.float32)), "row 0 has input nan"),
        (shifted(inputs=np.zeros((47, 5), np.float32)), r"inputs are .* of shape \[5\] each"),
        (shifted(inputs=np.zeros((47, FEATURES))), "inputs are torch.float64"),
        (Examples(np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int64)), "has no examples"),
    ],
)
def test_examples_that_do_not_fit(plain: Program, data: Examples, message: str) -> None:
    with pytest.raises(DataError, match=message):
        trainer(plain).fit(data)
    with pytest.raises(DataError):
        trainer(plain).fit(examples(), data)


def test_a_model_with_too_few_outputs(plain: Program) -> None:
    with pytest.raises(ConfigError, match="5 classes"):
        trainer(plain, metrics=Metrics(classes=5)).fit(examples())


@pytest.mark.parametrize(
    "options", [{"epochs": 0}, {"batch_size": 0}, {"clip_norm": -1.0}, {"clip_norm": math.nan}, {"steps": -1}]
)
def test_settings_out_of_range(plain: Program, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        trainer(plain, **options)
