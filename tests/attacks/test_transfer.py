"""Transfer: closed forms of affine models, white-box attacks as the limit, and what the target is asked."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import (
    DDN,
    FGM,
    MIM,
    NES,
    PGD,
    AutoAttack,
    Square,
    Status,
    Targeted,
    Threat,
    Transfer,
    Untargeted,
    as_model,
    evaluate,
)
from mycelia.engine.errors import ConfigError
from tests.attacks.worlds import EPS, Affine, Small, affine, images, small


def other(seed: int) -> Small:
    return Small(seed).double().eval()


def two_classes(w: Tensor) -> Affine:
    """Class 1 where w · (x − 1/2) > 0."""
    weight = torch.stack([-w / 2, w / 2])
    return Affine(weight, -weight.sum(1) / 2)


def test_from_the_target_itself_it_is_the_white_box_attack() -> None:
    x = images(30)
    y = small()(x).argmax(1)
    for p in ("linf", "l2", "l1"):
        white = MIM(norm=p).run(small(), x, Untargeted(y), eps=EPS[p], keep="loss")
        black = Transfer([small()], MIM(norm=p)).run(small(), x, Untargeted(y), eps=EPS[p])
        assert torch.equal(black.status, white.status)
        assert torch.equal(black.x_adv, white.x_adv)
        assert 0 < black.counts.broken < 30
        assert bool((black.gradients == 0).all())


def test_between_affine_models_it_is_the_closed_form() -> None:
    """The source moves each coordinate by eps against its weights; the target's margin falls by w · that."""
    draw = torch.Generator().manual_seed(4)
    w, v = (torch.randn(8, dtype=torch.float64, generator=draw) for _ in range(2))
    x = 0.3 + 0.4 * torch.rand(60, 8, dtype=torch.float64, generator=draw)
    target, source = two_classes(w), two_classes(w + v)
    y = target(x).argmax(1)
    eps = 0.03
    found = Transfer(source, FGM(loss="margin")).run(target, x, Untargeted(y), eps=eps)
    side = torch.where(y == 1, 1.0, -1.0)
    margin = side * ((x - 0.5) @ w)
    fall = eps * (w * (w + v).sign()).sum()  # the box is out of reach
    assert 0 < found.counts.broken < 60
    assert torch.equal(found.is_(Status.BROKEN), margin < fall)
    assert torch.allclose(found.x_adv, x - side[:, None] * eps * (w + v).sign())


def test_the_target_is_asked_for_labels_and_once_for_each_example() -> None:
    x = images(24)
    y = small()(x).argmax(1)
    asked = 0

    def target(v: Tensor) -> Tensor:
        nonlocal asked
        assert not v.requires_grad
        asked += len(v)
        return small()(v).argmax(1)

    model = as_model(target, outputs="labels")
    for sources, looks in (([other(1)], 1), ([other(1), other(2)], 3), ([other(k) for k in range(1, 4)], 4)):
        asked = 0
        found = Transfer(sources).run(model, x, Untargeted(y), eps=0.05)
        held = found.is_(Status.HELD)
        assert bool(held.any())
        assert bool((found.queries[held] == 1 + looks).all())
        assert bool((found.queries <= 1 + looks).all())
        assert asked == int(found.queries.sum()) + len(x)  # the last look is the verification
    short = Transfer([other(1), other(2)]).run(model, x, Untargeted(y), eps=0.05, queries=2)
    assert int(short.queries.max()) == 3


def test_several_sources_break_what_any_of_them_breaks() -> None:
    x = images(40)
    y = small()(x).argmax(1)
    alone = [Transfer([other(k)], PGD(steps=5)).run(small(), x, Untargeted(y), eps=0.12) for k in (1, 2, 3)]
    # The first one has the same draws alone and in company.
    together = Transfer([other(1), other(2), other(3)], PGD(steps=5)).run(small(), x, Untargeted(y), eps=0.12)
    assert bool((together.is_(Status.BROKEN) | ~alone[0].is_(Status.BROKEN)).all())
    assert together.counts.broken > max(each.counts.broken for each in alone)


def test_the_mean_of_logits_is_attacked_as_well() -> None:
    """Two sources that see one coordinate each; the target falls only if both move."""
    eye = 4 * torch.eye(2, dtype=torch.float64)
    x = torch.full((1, 2), 0.6, dtype=torch.float64)
    target = two_classes(torch.tensor([1.0, 1.0], dtype=torch.float64))
    goal, eps = Untargeted(target(x).argmax(1)), 0.15
    attack = FGM(loss="margin")
    for k in range(2):
        assert Transfer([two_classes(eye[k])], attack).run(target, x, goal, eps=eps).counts.held == 1
    both = Transfer([two_classes(eye[0]), two_classes(eye[1])], attack).run(target, x, goal, eps=eps)
    assert both.counts.broken == 1
    assert torch.allclose(both.x_adv, x - eps)
    assert int(both.best_step) == 3  # after the two alone


def test_sources_that_are_wrong_from_the_start_are_attacked_all_the_same() -> None:
    """A source that calls everything another class still has a gradient."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: Tensor) -> Tensor:
            z = self.inner(x)
            shift: Tensor = 100.0 * nn.functional.one_hot((z.argmax(1) + 1) % 4, 4)
            return z + shift

    x = images(30)
    y = small()(x).argmax(1)
    attack = PGD(loss=lambda z, labels: -z.gather(1, labels[:, None])[:, 0], steps=10)
    assert Transfer([Turned()], attack).run(small(), x, Untargeted(y), eps=0.2).counts.broken > 10


def test_targets_and_other_needs() -> None:
    x = images(20)
    z = small()(x).detach()
    t = z.topk(2, 1).indices[:, 1]
    found = Transfer([small()]).run(small(), x, Targeted(t, z.argmax(1)), eps=0.1)
    assert torch.equal(found.is_(Status.BROKEN), small()(found.x_adv).argmax(1) == t)
    assert found.counts.broken > 0
    # A source may give scores only, where the attack asks for no more.
    source = as_model(lambda v: small()(v).detach())
    square = Transfer([source], Square(steps=50)).run(small(), x, Untargeted(z.argmax(1)), eps=0.15)
    assert square.counts.broken > 0
    # Or labels only; these have no mean.
    labels = as_model(lambda v: small()(v).argmax(1), outputs="labels")
    nes = Transfer([labels, labels], NES(mode="label", steps=3, pairs=5, copies=3))
    found = nes.run(small(), x, Targeted(t, z.argmax(1)), eps=0.2)
    assert int(found.queries.max()) <= 3
    assert found.counts.n == 20


def test_sources_stay_as_they_are() -> None:
    source = Small(1).double().train()
    state = copy.deepcopy(source.state_dict())
    x = images(6)
    Transfer([source, source]).run(small(), x, Untargeted(small()(x).argmax(1)), eps=0.1)
    assert source.training
    assert source.layers[3].training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in source.parameters())
    assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())


def test_a_source_that_gives_no_numbers_fails_by_name() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :4] * torch.nan

    x = images(5)
    goal = Untargeted(small()(x).argmax(1))
    found = Transfer([Broken()]).run(small(), x, goal, eps=0.1)
    assert found.counts.failed == 5
    assert found.reason == ("no source model gave an example",) * 5
    assert torch.equal(found.x_adv, x)
    mixed = Transfer([Broken(), small()]).run(small(), x, goal, eps=EPS["linf"])
    assert mixed.counts.failed == 0
    assert mixed.counts.broken > 0


def test_settings() -> None:
    model = small()
    assert Transfer(model) == Transfer([model]) == Transfer((model,))
    assert hash(Transfer(model)) == hash(Transfer([model]))
    assert Transfer(model, PGD(norm="l2")).norm == "l2"
    assert Transfer(model).norm == "linf"
    assert Transfer(nn.Sequential(model)).source_models[0](images(2)).shape == (2, 4)
    for sources in ((), []):
        with pytest.raises(ConfigError, match="no source models"):
            Transfer(sources)
    with pytest.raises(ConfigError, match="fixed"):
        Transfer(model, DDN(norm="l2"))
    with pytest.raises(ConfigError, match="for examples in l1"):
        Transfer(model, PGD(norm="l2"), norm="l1")
    x = images(3)
    goal = Untargeted(small()(x).argmax(1))
    labels = as_model(lambda v: small()(v).argmax(1), outputs="labels")
    with pytest.raises(ConfigError, match="needs a gradient"):
        Transfer(labels).run(model, x, goal, eps=0.1)
    few, many = (nn.Sequential(nn.Flatten(), nn.Linear(36, classes).double()) for classes in (2, 9))
    with pytest.raises(ConfigError, match="has 2 classes"):
        Transfer(few).run(model, x, Targeted((goal.y + 1) % 2 + 2), eps=0.1)  # 2 or 3
    with pytest.raises(ConfigError, match="with 4, 9 classes"):
        Transfer([model, many]).run(model, x, goal, eps=0.1)
    assert Transfer(many).run(model, x, goal, eps=0.1).counts.n == 3  # more classes than the target's
    with pytest.raises(ConfigError, match="suite"):
        Transfer(model, AutoAttack()).run(model, x, goal, eps=0.1)


def test_reports_compare_it_with_white_boxes() -> None:
    x = images(20)
    y = small()(x).argmax(1)
    suite = (PGD(steps=5), Transfer([other(1)]))
    report = evaluate(small(), x, y, Threat("linf", 0.05), suite=suite)
    (flag,) = [each for each in report.flags if each.key == "transfer_wins"]
    assert flag.state == "pass"
    by_transfer = Threat("linf", 0.05, knowledge="transfer")
    report = evaluate(small(), x, y, by_transfer, suite=(Transfer([small()]),))
    assert report.ledger.broken > 0


def test_reports_of_other_numbers_of_classes_than_their_unit_tests_have() -> None:
    model = affine(7, 10)
    x = torch.rand(12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    report = evaluate(
        model, x, model(x).argmax(1), Threat("linf", 0.05), suite=(FGM(), Transfer([affine(7, 10, seed=3)]))
    )
    assert report.ledger.n == 12
