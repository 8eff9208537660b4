"""Training defences: degenerate settings are plain training, and each step is what its paper says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mycelia.attacks import FGSM, PGD, DeepFool, as_model
from mycelia.attacks.defences import (
    NAD,
    OVERFITTING,
    PAD,
    PGDAT,
    TRADES,
    AdversarialTraining,
    FastAT,
    FreeAT,
    GivenAdversarials,
    TrainingDefence,
    build,
)
from mycelia.attacks.defences.fast_at import OverfittingGuard
from mycelia.attacks.defences.training import Batch
from mycelia.engine.capture import capture
from mycelia.engine.data import Examples
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.events import Event, Scalars
from mycelia.engine.losses import cross_entropy
from mycelia.engine.optimizers import adam, sgd
from mycelia.engine.program import Program
from mycelia.engine.run import Run
from mycelia.engine.training import FitResult, Trainer
from mycelia.engine.training.plain import PlainUpdates
from tests.attacks.training_worlds import CLASSES, FEATURES, examples, linear, normalised

torch.set_num_threads(1)

EPS = 0.1


def fit(program: Program, updates: Any, count: int = 23, **options: Any) -> FitResult:
    options = dict[str, Any](epochs=2, batch_size=5, plan="eager", seed=4) | options
    run = options.pop("run", None)
    more = {name: options.pop(name) for name in ("callbacks", "should_stop") if name in options}
    trainer = Trainer(program, options.pop("optimizer", None) or sgd(0.1), updates=updates, **options)
    return trainer.fit(examples(count), run=run, **more)


def same(found: FitResult, expected: FitResult) -> bool:
    tensors = {**found.params, **found.buffers}, {**expected.params, **expected.buffers}
    return all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


def batch(program: Program | None = None, seed: int = 0, count: int = 12) -> Batch:
    data, given = examples(count, 1), program or linear()
    params, buffers = given.init()
    model = as_model(given, params=params, buffers=buffers)
    return Batch(model, torch.from_numpy(data.inputs), torch.from_numpy(data.targets), np.arange(count), seed)


def held_out() -> Any:
    return examples(100, 9)


# --- degenerate settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "defence",
    [
        AdversarialTraining([(FGSM(), EPS)], replace_ratio=0.0),
        GivenAdversarials(np.zeros_like(examples(23).inputs), replace_ratio=0.0),
        GivenAdversarials(examples(23).inputs, replace_ratio=1.0),
        PGDAT(eps=0.0),
        FastAT(held_out(), eps=0.0),
        FreeAT(times=1, eps=0.0),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("program", [linear, normalised])
def test_no_change_is_plain_training(program: Callable[[], Program], defence: TrainingDefence) -> None:
    options: dict[str, Any] = {"optimizer": adam(0.05), "clip_norm": 0.5}
    found = fit(program(), defence, **options)
    assert same(found, fit(program(), PlainUpdates, **options))
    assert found.steps == 10


def test_pairs_without_a_change_are_plain_training() -> None:
    """KL(p ‖ p) and its gradient are 0."""
    found, plain = fit(linear(), TRADES(eps=0.0)), fit(linear(), PlainUpdates)
    for name, tensor in found.params.items():
        torch.testing.assert_close(tensor, plain.params[name], atol=1e-6, rtol=1e-5)
    assert found.train_loss == pytest.approx(plain.train_loss, rel=1e-5)


@pytest.mark.parametrize("defence", [PGDAT(eps=EPS, steps=2), TRADES(eps=EPS, steps=2), FreeAT(3, eps=EPS)],
                         ids=lambda each: type(each).__name__)  # fmt: skip
def test_plans_agree_and_seeds_decide(defence: TrainingDefence) -> None:
    module = torch.nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        module.weight.copy_(torch.arange(12.0).view(3, 4).sin())
        module.bias.zero_()
    program = capture(module, cross_entropy, (torch.zeros(2, FEATURES), torch.zeros(2, dtype=torch.int64)))
    before = torch.get_rng_state()
    eager = fit(program, defence)
    traced = fit(program, defence, plan="interpreter")
    assert torch.equal(torch.get_rng_state(), before)
    assert traced.plan == "interpreter"
    for name, tensor in eager.params.items():
        torch.testing.assert_close(tensor, traced.params[name], atol=1e-4, rtol=1e-3)
    assert same(eager, fit(program, defence))
    assert not same(eager, fit(program, defence, seed=5))


# --- what is trained on -----------------------------------------------------------------------------


def test_pgd_moves_every_row_to_the_best_corner() -> None:
    """Two classes and an affine model: the highest loss in the ball is at x + eps · sign(w_other − w_y)."""
    given = batch()
    weight = linear().init()[0]["weight"]
    y = given.targets % 2
    given = given._replace(targets=y)
    program = linear()
    params, buffers = program.init()
    params["weight"][2], params["bias"][2] = 0.0, -1e4  # the third class is out of the game
    model = as_model(program, params=params, buffers=buffers)
    given = given._replace(model=model)
    wrong = model(given.inputs).argmax(1) != y
    assert bool(wrong.any())
    assert not bool(wrong.all())
    expected = (given.inputs + EPS * (weight[1 - y] - weight[y]).sign()).clamp(0, 1)
    inputs, targets = PGDAT(eps=EPS, steps=10).craft(given)
    torch.testing.assert_close(inputs, expected)  # misclassified rows as well
    assert torch.equal(targets, y)
    inputs, _ = AdversarialTraining([(FGSM(), EPS)], replace_ratio=1.0).craft(given)
    torch.testing.assert_close(inputs, expected)
    inputs, _ = FastAT(held_out(), eps=EPS, step=2.0).craft(given)  # twice the radius ends at a corner
    torch.testing.assert_close(inputs, expected)


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.25, 3), (0.3, 4), (0.5, 6), (1.0, 12)])
def test_a_share_of_the_rows_is_replaced(ratio: float, count: int) -> None:
    given = batch()
    kept = given.inputs.clone()
    places = set()
    for seed in range(12):
        inputs, _ = AdversarialTraining([(FGSM(), EPS)], ratio).craft(given._replace(seed=seed))
        moved = (inputs != given.inputs).any(1)
        assert int(moved.sum()) == count
        places |= set(moved.nonzero()[:, 0].tolist())
    assert len(places) == (12 if count else 0)  # chance that a row is never drawn: below 0.75^12 · 12
    assert torch.equal(given.inputs, kept)


def test_an_ensemble_draws_one_attack_for_a_batch() -> None:
    """Radii tell the attacks apart; smallest changes are taken as they come."""
    defence = AdversarialTraining([(FGSM(), 0.05), (PGD(steps=2, step_size=0.2), 0.15)], replace_ratio=1.0)
    sizes = []
    for seed in range(40):
        given = batch()._replace(seed=seed)
        change = (defence.craft(given)[0] - given.inputs).abs().amax(1)
        sizes.append(round(float(change.max()), 4))
        assert bool((change <= sizes[-1] + 1e-5).all())
    assert set(sizes) == {0.05, 0.15}
    assert 8 <= sizes.count(0.05) <= 32
    given = batch()
    inputs, _ = AdversarialTraining([(DeepFool(), None)], replace_ratio=1.0).craft(given)
    right = given.model(given.inputs).argmax(1) == given.targets
    fooled = given.model(inputs).argmax(1) != given.targets
    assert bool(fooled[right].any())
    assert torch.equal(inputs[~right], given.inputs[~right])


def test_given_adversarials_are_taken_row_for_row() -> None:
    first, second = np.full((12, FEATURES), 0.25, np.float32), np.full((12, FEATURES), 0.75, np.float32)
    first[:, 0] = second[:, 0] = np.arange(12) / 12
    for array in (first, second):
        array.setflags(write=False)
    defence = GivenAdversarials([first, second], replace_ratio=0.5)
    seen = set()
    for seed in range(20):
        rows = np.array([7, 2, 9, 4])
        given = batch(seed=seed)
        given = given._replace(inputs=given.inputs[rows], targets=given.targets[rows], rows=rows)
        inputs, _ = defence.craft(given)
        moved = (inputs != given.inputs).any(1)
        assert int(moved.sum()) == 2
        assert inputs[moved, 0].tolist() == pytest.approx((rows[moved.numpy()] / 12).tolist())
        seen |= set(inputs[moved, 1].tolist())
        assert len(set(inputs[moved, 1].tolist())) == 1
    assert seen == {0.25, 0.75}
    with pytest.raises(DataError, match="row for row"):
        fit(linear(), defence, 23)
    other = GivenAdversarials(first)
    assert other != GivenAdversarials(second)
    assert other == GivenAdversarials(first.copy())
    assert hash(other) == hash(GivenAdversarials(first.copy()))


def test_fast_training_starts_at_random_and_stays_in_its_ball() -> None:
    given = batch(count=200)
    short, _ = FastAT(held_out(), eps=EPS, step=1e-6).craft(given)  # hardly a step: the start is seen
    change = short - given.inputs
    inside = (given.inputs > EPS) & (given.inputs < 1 - EPS)
    assert float(change.abs().max()) <= EPS + 1e-6
    values = np.sort((change[inside] / EPS).numpy())
    assert np.abs(values - np.linspace(-1, 1, len(values))).max() < 0.15  # uniform
    whole, _ = FastAT(held_out(), eps=EPS).craft(given)
    assert float((whole - given.inputs).abs().max()) <= EPS + 1e-6
    assert bool(((whole >= 0) & (whole <= 1)).all())


# --- steps ------------------------------------------------------------------------------------------


def logits(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x @ params["weight"].T + params["bias"]


def test_trades_step() -> None:
    """Against torch.optim on the loss of algorithm 1, with the same changed rows."""
    defence, program = TRADES(beta=3.0, eps=EPS, steps=3), linear()
    seen: list[tuple[Tensor, Tensor]] = []

    class Watched(TRADES):
        def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
            seen.append(super().craft(batch))
            return seen[-1]

    result = fit(program, Watched(beta=3.0, eps=EPS, steps=3), 10, epochs=1, batch_size=10)
    ((inputs, targets),) = seen
    clean, changed, y = inputs[:10], inputs[10:], targets[:10]
    assert torch.equal(targets[10:], y)
    assert float((changed - clean).abs().max()) <= EPS * (1 + 1e-5)
    params = {name: tensor.requires_grad_() for name, tensor in program.init()[0].items()}
    z, moved = logits(params, clean), logits(params, changed)
    divergence = functional.kl_div(moved.log_softmax(1), z.softmax(1), reduction="batchmean")
    loss = functional.cross_entropy(z, y) + defence.beta * divergence
    assert float(divergence.detach()) > 1e-4
    assert result.train_loss == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.optim.SGD(params.values(), 0.1).zero_grad()
    loss.backward()
    for name, tensor in params.items():
        assert tensor.grad is not None
        torch.testing.assert_close(result.params[name], tensor.detach() - 0.1 * tensor.grad)


def test_trades_raises_the_divergence() -> None:
    """Against the best corner of the ball, found by trying all of them."""
    given = batch(count=6)
    found = TRADES(eps=EPS, steps=20, step_size=0.03).craft(given)[0][6:]
    corners = torch.tensor(np.array(np.meshgrid(*[[-EPS, EPS]] * FEATURES)).reshape(FEATURES, -1).T)
    clean = given.model(given.inputs).log_softmax(1)

    def divergence(x: Tensor) -> Tensor:
        return functional.kl_div(given.model(x).log_softmax(1), clean.exp(), reduction="none").sum(1)

    best = torch.stack([divergence((given.inputs + corner.float()).clamp(0, 1)) for corner in corners]).amax(
        0
    )
    reached = divergence(found)
    assert bool((reached <= best * (1 + 1e-4)).all())
    assert int((reached >= 0.99 * best).sum()) >= 4  # a local best of the other sign is possible


def test_free_training_is_algorithm_1() -> None:
    """Against a plain loop: one backward pass for parameters and a change that lives on."""
    program, data = linear(), examples(8)
    replays, eps, lr = 3, 0.07, 0.2
    rows: list[np.ndarray[Any, Any]] = []

    class Watched(FreeAT):
        def craft(self, batch: Batch) -> tuple[Tensor, Tensor]:
            rows.append(batch.rows)
            return super().craft(batch)

    result = fit(program, Watched(replays, eps), 8, epochs=0, steps=9, batch_size=3, optimizer=sgd(lr))
    assert [each.tolist() for each in rows[::3]] == [each.tolist() for each in rows[1::3]]
    assert [each.tolist() for each in rows[::3]] == [each.tolist() for each in rows[2::3]]
    assert sorted(np.concatenate(rows[::3]).tolist()) == list(range(8))
    params = {name: tensor.requires_grad_() for name, tensor in program.init()[0].items()}
    change = torch.zeros(3, FEATURES)
    losses = []
    for each in rows:
        x, y = torch.from_numpy(data.inputs[each]), torch.from_numpy(data.targets[each])
        delta = change[: len(x)].clone().requires_grad_()
        loss = functional.cross_entropy(logits(params, (x + delta).clamp(0, 1)), y)
        grads = torch.autograd.grad(loss, [*params.values(), delta])
        with torch.no_grad():
            for tensor, grad in zip(params.values(), grads, strict=False):
                tensor.sub_(lr * grad)
            change[: len(x)] = (delta + eps * grads[-1].sign()).clamp(-eps, eps)
        losses.append(float(loss.detach()))
    for name, tensor in params.items():
        torch.testing.assert_close(result.params[name], tensor.detach())


@pytest.mark.parametrize(
    "defence",
    [PGDAT(eps=0.2, steps=3), TRADES(eps=0.2, steps=3), FastAT(held_out(), eps=0.2, check_each=10_000),
     FreeAT(4, eps=0.2), AdversarialTraining([(FGSM(), 0.2)], 1.0)],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_training_turns_to_the_feature_that_cannot_be_flipped(defence: TrainingDefence) -> None:
    """One strong feature and many weak ones, as in Tsipras et al. (ICLR 2019).

    Together the weak ones say more, and eps turns each of them round. The strong one is right in 90 of 100
    rows, and its two values are 0.6 apart: eps does not turn it. So a plain model is decided by what eps
    does to the weak ones, and a robust one by the strong one.
    """
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=600)
    weak = 0.5 + 0.1 * (2 * y[:, None] - 1) + 0.1 * rng.normal(size=(600, 12))
    strong = np.where(rng.random(600) < 0.9, y, 1 - y)[:, None] * 0.6 + 0.2
    data = Examples(np.clip(np.hstack([strong, weak]), 0, 1).astype(np.float32), y)
    module = torch.nn.Linear(13, 2)
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    example = (torch.zeros(2, 13), torch.zeros(2, dtype=torch.int64))
    program = capture(module, cross_entropy, example, backend="eager")
    sways = []
    for updates in (PlainUpdates, defence):
        trainer = Trainer(
            program, adam(0.05), epochs=0, steps=120, batch_size=100, plan="eager", updates=updates
        )
        weight = trainer.fit(data).params["weight"]
        slope = weight[1] - weight[0]
        sways.append(float(0.2 * slope[1:].abs().sum() / (0.3 * slope[0])))  # weak under attack / strong
    plain, trained = sways
    assert plain > 1
    assert 0 <= trained < 0.6


# --- the end of fast training -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "stops"),
    [
        ([(40, 60), (45, 62), (2, 90)], True),
        ([(40, 60), (45, 62), (0, 60)], True),
        ([(40, 60), (3, 5)], False),  # both fell: the model is bad, not overfitted
        ([(40, 60), (30, 60)], False),
        ([(40, 60), (18, 60)], False),  # below half, within its interval
        ([(1, 1), (0, 1)], False),  # nothing to lose
        ([(0, 0), (50, 60), (60, 70)], False),
    ],
)
def test_catastrophic_overfitting_is_told_from_other_falls(
    counts: list[tuple[int, int]], stops: bool
) -> None:
    guard = OverfittingGuard(FastAT(held_out()), 0)
    for number, (pgd, fgsm) in enumerate(counts):
        assert not guard.stopped, number
        guard.judge({"pgd": pgd, "fgsm": fgsm})
    assert guard.stopped == (OVERFITTING if stops else "")
    other = OverfittingGuard(FastAT(held_out()), 0)
    other.restore(guard.state())
    assert (other.stopped, other.best) == (guard.stopped, guard.best)


def test_fast_training_measures_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    free = fit(linear(), FastAT(held_out(), eps=EPS, check_each=4), log_steps=1, callbacks=[told.append])
    assert (free.steps, free.stopped_by) == (10, "")
    measured = [e for e in told if isinstance(e, Scalars) and "held_out/pgd_accuracy" in e.values]
    assert [event.step for event in measured] == [4, 8]
    for event in measured:  # many steps are at least as strong as one, up to a row or two
        assert 0 <= event.values["held_out/pgd_accuracy"] <= event.values["held_out/fgsm_accuracy"] + 0.02
    script = {2: (80, 80), 4: (85, 85), 6: (1, 90)}

    def right(self: object, model: object, attack: object, step: int, device: object) -> int:
        return script[step][isinstance(attack, FGSM)]

    monkeypatch.setattr(OverfittingGuard, "_right", right)
    stopped = fit(linear(), FastAT(held_out(), eps=EPS, check_each=2))
    assert (stopped.steps, stopped.stopped_by) == (6, OVERFITTING)


# --- runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "defence",
    [FreeAT(3, eps=EPS), TRADES(eps=EPS, steps=2), AdversarialTraining([(PGD(steps=2), EPS), (FGSM(), EPS)]),
     FastAT(held_out(), eps=EPS, check_each=3)],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_interrupted_and_resumed_is_never_stopped(defence: TrainingDefence, tmp_path: Path) -> None:
    whole = fit(normalised(), defence, optimizer=adam(0.05))
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps == 4

    with Run.create(tmp_path / "run", "train", "") as run:
        part = fit(normalised(), defence, optimizer=adam(0.05), run=run, should_stop=stop)
    assert part.steps == 4
    with Run.resume(tmp_path / "run") as run:
        result = fit(normalised(), defence, optimizer=adam(0.05), run=run)
    assert result.summary()["model_sha256"] == whole.summary()["model_sha256"]
    refusal = pytest.raises((ConfigError, DataError), match=r"defence was|tensor 'adversary")
    with Run.resume(tmp_path / "run") as run, refusal:
        fit(normalised(), PGDAT(eps=0.03), optimizer=adam(0.05), run=run)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdversarialTraining([]), lambda: AdversarialTraining([(FGSM(), None)]),
        lambda: AdversarialTraining([("fgsm", 0.1)]),  # type: ignore[list-item]
        lambda: AdversarialTraining([(FGSM(), 0.1)], 1.5), lambda: GivenAdversarials([]),
        lambda: PGDAT(eps=-1.0), lambda: PGDAT(steps=0), lambda: PGDAT(norm="l0"), lambda: TRADES(beta=-1.0),
        lambda: FastAT(held_out(), step=0.0), lambda: FastAT(held_out(), collapse=1.0),
        lambda: FreeAT(0), lambda: FreeAT(bounds=(1.0, 0.0)),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_defences_by_name() -> None:
    assert build("pgdat", eps=0.1, norm="l2", steps=3) == PGDAT(eps=0.1, norm="l2", steps=3)
    assert build("trades", bounds=[-1.0, 1.0]) == TRADES(bounds=(-1.0, 1.0))
    assert build("nad") == NAD
    assert build("pad", replace_ratio=1.0) == replace(PAD, replace_ratio=1.0)
    with pytest.raises(ConfigError, match="trades"):
        build("trade")
    with pytest.raises(ConfigError, match="did you mean 'eps'"):
        build("pgdat", epps=0.1)


def test_inputs_beyond_their_bounds_are_refused() -> None:
    """Normalised inputs under the default bounds would otherwise be clipped in silence."""
    given = batch()
    given = given._replace(inputs=given.inputs * 3 - 1)
    whole = AdversarialTraining([(FGSM(), 0.1)], 1.0)
    for defence in (PGDAT(), TRADES(), FastAT(held_out()), FreeAT(), whole):
        with pytest.raises(DataError, match="bounds"):
            defence.craft(given)
    wide = PGDAT(bounds=(-1.0, 2.0)).craft(given)[0]
    assert bool(((wide >= -1) & (wide <= 2)).all())
