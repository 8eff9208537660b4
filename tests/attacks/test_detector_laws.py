"""Laws that every detector goes through."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mycelia.attacks import PGD, Attack, Square, Status, Untargeted, detectors
from mycelia.attacks.detectors import Detector, attack_guarded
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.detector_members import members, parts, row_members
from tests.attacks.worlds import images, small

ALL = pytest.mark.parametrize("name", sorted(members()))
ROWS = pytest.mark.parametrize("name", sorted(row_members()))
FPR = 0.2


def fitted(name: str, dtype: torch.dtype = torch.float64, fpr: float = FPR) -> Detector:
    return members(dtype)[name].fit(images(20, dtype, seed=7), fpr, rng=3)


def test_every_detector_is_under_these_laws() -> None:
    public = {getattr(detectors, name) for name in detectors.__all__}
    kinds = {each for each in public if isinstance(each, type) and issubclass(each, Detector)}
    assert kinds - {Detector} == {type(each) for each in members().values()}


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_and_verdicts_have_one_shape(name: str, dtype: torch.dtype) -> None:
    detector = fitted(name, dtype)
    x = images(6, dtype, seed=8)
    scores = detector.score(x)
    assert (scores.dtype, scores.shape) == (torch.float64, (6,))
    assert torch.equal(scores, detector.score(x.numpy()))
    assert torch.equal(detector.flag(x), scores > detector.limit)
    assert detector.score(x[:0]).shape == detector.flag(x[:0]).shape == (0,)
    if not detector.stateful:
        assert torch.allclose(detector.score(x[:1]), scores[:1], rtol=1e-4, atol=1e-6)


@ROWS
def test_a_score_is_the_rows_own(name: str) -> None:
    detector = fitted(name)
    x = images(9, seed=8)
    whole = detector.score(x)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    again = torch.cat([order, order[:3]])
    assert torch.allclose(detector.score(x[again]), whole[again], atol=1e-12)
    assert torch.allclose(torch.cat([detector.score(row[None]) for row in x]), whole, atol=1e-12)
    loud = x.clone()
    loud[3] *= 1e6
    others = torch.arange(9) != 3
    assert torch.allclose(detector.score(loud)[others], whole[others], atol=1e-12)


@ALL
@pytest.mark.parametrize("fpr", [0.05, 0.2, 0.29, 0.5, 0.9])
def test_calibration_rows_are_flagged_no_more_often_than_the_rate(name: str, fpr: float) -> None:
    benign = images(20, seed=7)
    detector = members()[name].fit(benign, fpr, rng=3)
    assert detector.fpr == fpr
    assert detector.unit > 0
    if not detector.stateful:
        assert int(detector.flag(benign).sum()) <= math.floor(fpr * 20 + 1e-9)


@ALL
def test_too_few_rows_for_the_rate_are_named(name: str) -> None:
    benign = images(20, seed=7)
    with pytest.warns(RuntimeWarning, match=r"smallest rate that they resolve is 0\.05"):
        detector = members()[name].fit(benign, 0.04, rng=3)
    if not detector.stateful:
        assert not bool(detector.flag(benign).any())


@ALL
def test_the_same_seed_gives_the_same_detector(name: str) -> None:
    x = images(6, seed=8)
    raw, others = members()[name], members()[name]
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, again = (each.fit(images(20, seed=7), FPR, rng=3) for each in (raw, others))
    assert first.threshold == again.threshold
    assert torch.equal(first.score(x), again.score(x))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002


@ALL
def test_fitting_gives_another_value(name: str) -> None:
    raw = members()[name]
    detector = raw.fit(images(20, seed=7), FPR)
    assert (raw.threshold, raw.fpr) == (None, None)
    assert detector.threshold is not None
    with pytest.raises(ConfigError, match="fitted before it flags"):
        raw.flag(images(2))


@ALL
def test_its_parts_are_as_they_were(name: str) -> None:
    detector = members()[name]
    modules = parts(detector)
    for module in modules:
        module.train()
        next(module.parameters()).grad = torch.ones_like(next(module.parameters()))
    states = [copy.deepcopy(module.state_dict()) for module in modules]
    evaluated = fitted(name).score(images(6, seed=8))
    detector = detector.fit(images(20, seed=7), FPR, rng=3)
    assert torch.equal(detector.score(images(6, seed=8)), evaluated)
    detector.flag(images(6, seed=8))
    for module, state in zip(modules, states, strict=True):
        assert all(each.training for each in module.modules())
        assert all(each.requires_grad for each in module.parameters())
        assert torch.equal(next(module.parameters()).grad, torch.ones_like(next(module.parameters())))  # type: ignore[arg-type]
        assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())


@ALL
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_flagged(name: str, value: float) -> None:
    detector = fitted(name)
    x = images(4, seed=8)
    whole = detector.score(x)
    x[2, 0, 3, 3] = value
    scores = detector.score(x)
    assert float(scores[2]) == math.inf
    assert torch.allclose(scores[:2], whole[:2], atol=1e-12)
    assert bool(detector.flag(x)[2])
    with pytest.raises(DataError, match="not finite"):
        members()[name].fit(torch.cat([images(20, seed=7), x]), FPR)


@ROWS
@pytest.mark.parametrize("attack", [PGD(steps=8), Square(steps=20)], ids=["pgd", "square"])
def test_an_attack_on_both_is_wrong_and_unseen(name: str, attack: Attack) -> None:
    """Every success is one of the bare model and passes the detector; the rows are the attack's own."""
    model, detector = small(), fitted(name)
    x = images(10, seed=8)
    y = model(x).argmax(1)
    result = attack_guarded(attack, model, detector, x, Untargeted(y), eps=0.3, rng=1, weights=(1.0, 0.1))
    assert (result.counts.failed, result.unreproduced) == (0, 0)
    broken = result.is_(Status.BROKEN)
    assert bool((model(result.x_adv).argmax(1) != y)[broken].all())
    assert not bool(detector.flag(result.x_adv)[broken].any())
    assert float((result.x_adv - x).abs().max()) <= 0.3 * (1 + 1e-6)
    some = torch.tensor([7, 2, 2])
    again = attack_guarded(
        attack, model, detector, x[some], Untargeted(y[some]), eps=0.3, rng=1, weights=(1.0, 0.1)
    )
    assert torch.equal(again.status, result.status[some])
    assert torch.allclose(again.x_adv, result.x_adv[some], atol=1e-5)


@ALL
def test_what_makes_no_sense_is_refused(name: str) -> None:
    raw = members()[name]
    for fpr in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ConfigError, match="share of benign data"):
            raw.fit(images(20), fpr)
    with pytest.raises(DataError, match=r"at least one|each has k neighbours"):
        raw.fit(images(0), FPR)
    with pytest.raises(DataError, match="floating point"):
        raw.score(torch.zeros(3, 1, 6, 6, dtype=torch.int64))


@ROWS
def test_a_gradient_is_that_of_the_score(name: str) -> None:
    """Where the score is a share of labels, another gradient stands in for it, and the value stays."""
    detector = fitted(name)
    assert detector.differentiable
    x = images(3, seed=8)
    with detector.quiet():
        leaf = x.clone().requires_grad_()
        traced = detector.traced(leaf)
        (grad,) = torch.autograd.grad(traced.sum(), leaf)
    assert torch.allclose(traced.detach(), detector.score(x), atol=1e-12)
    assert bool(torch.isfinite(grad).all())
    if name.startswith("region"):
        return
    way = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    step = 1e-6
    slope = (detector.score(x + step * way) - detector.score(x - step * way)) / (2 * step)
    wanted: Tensor = (grad * way).flatten(1).sum(1)
    assert torch.allclose(slope, wanted, rtol=1e-4, atol=1e-6)
