"""Evaluations of models that are defended, random, or say less than they know."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import FGSM, PGD, AutoAttack, HopSkipJump, Transfer, as_model
from mycelia.attacks.defences import BitDepth, Defended, GaussianNoise, Obfuscated, Rounded
from mycelia.attacks.evaluate import Adaptive, evaluate
from mycelia.attacks.evasion.noise import RandomNoise
from mycelia.attacks.evasion.square import Square
from mycelia.attacks.threat import Threat
from mycelia.engine.errors import ConfigError
from tests.attacks.test_search import Flickers, Goes
from tests.attacks.worlds import small

THREAT = Threat("linf", 0.05)


class Sides(nn.Module):
    """Class 1 where the first coordinate is above a half."""

    def forward(self, x: Tensor) -> Tensor:
        side = 100 * (x.flatten(1)[:, :1] - 0.5)
        return torch.cat([-side, side], 1) + 0 * x.flatten(1).sum(1, keepdim=True)


def near_and_far() -> tuple[Tensor, Tensor]:
    """Half of the rows lie within 0.05 of the boundary of `Sides`, half do not."""
    x = torch.full((4, 3), 0.7)
    x[:, 0] = torch.tensor([0.49, 0.1, 0.51, 0.9])
    return x, (x[:, 0] > 0.5).long()


def labels(x: Tensor) -> Tensor:
    return (x[:, 0] > 0.5).long()


def test_the_quick_suite_evaluates_a_model_that_gives_labels_only() -> None:
    x, y = near_and_far()
    report = evaluate(as_model(labels, "labels"), x, y, THREAT, "quick")
    assert (report.ledger.broken, report.ledger.held) == (2, 2)
    assert report.broken_by == {"RandomNoise": 2}
    assert any("weaker evidence" in text for text in report.caveats)


def test_surrogates_and_averages_come_by_themselves() -> None:
    x, y = near_and_far()
    model = Defended(Sides(), BitDepth(8), GaussianNoise(0.001))
    report = evaluate(model, x, y, THREAT, (PGD(steps=3), AutoAttack(steps=1), RandomNoise(draws=3)))
    found = report.to_json()
    settings = {line["name"]: line["settings"] for line in found["attacks"]}
    assert settings["PGD"]["eot"] == 20
    assert settings["AutoAttack"]["version"] == "rand"
    adaptive = found["adaptive"]
    assert adaptive["note"] == "BPDA through BitDepth; EOT over GaussianNoise"
    assert adaptive["surrogate"] == "BPDA through BitDepth"
    assert adaptive["eot"] == 20
    assert report.ledger.broken == 2
    by_hand = evaluate(model, x, y, THREAT, (FGSM(),), adaptive=Adaptive("by hand", surrogate="a line"))
    assert by_hand.adaptive.note == "by hand; BPDA through BitDepth; EOT over GaussianNoise"
    assert by_hand.adaptive.surrogate == "a line"
    plain = evaluate(Sides(), x, y, THREAT, (PGD(steps=3),)).to_json()["adaptive"]
    assert (plain["note"], plain["surrogate"], plain["eot"]) == (None, None, None)


def test_a_gradient_that_a_surrogate_gives_is_said_to_be_one() -> None:
    x, y = near_and_far()
    flags = {
        bits: evaluate(
            Defended(Sides(), *([BitDepth(bits)] if bits else [])), x, y, THREAT, (PGD(steps=3),)
        ).flag("gradient_mismatch")
        for bits in (0, 1)
    }
    assert (flags[0].state, flags[1].state) == ("pass", "warn")
    assert "a surrogate gives the gradient of BitDepth" in flags[1].advice
    assert "surrogate" not in flags[0].advice


def test_an_attacker_who_knows_nothing_does_not_go_through_the_defence() -> None:
    x, y = torch.rand(4, 1, 6, 6), torch.zeros(4, dtype=torch.int64)
    threat = Threat("linf", 0.1, defence_known=False)
    for model in (Defended(small(torch.float32), BitDepth(4)), Obfuscated(small(torch.float32), Rounded(1))):
        with pytest.raises(ConfigError, match="does not know"):
            evaluate(model, x, y, threat, "quick")
    assert evaluate(small(torch.float32), x, y, threat, "quick").ledger.n == 4


def test_behind_an_output_transform_only_label_attacks_count() -> None:
    x, y = near_and_far()
    model = Obfuscated(Sides(), Rounded(1))
    report = evaluate(model, x, y, THREAT, (PGD(steps=3), Square(steps=5), HopSkipJump(norm="linf", steps=5)))
    assert [line.broken for line in report.attacks] == [None, None, 2]
    assert (report.ledger.broken, report.ledger.held) == (2, 2)
    why = [text for text in report.caveats if "only from attacks that need labels" in text]
    assert len(why) == 1
    assert "Rounded(decimals=1)" in why[0]
    assert "obfuscation: Rounded(decimals=1)" in report.adaptive.note
    score = evaluate(model, x, y, THREAT, (Square(steps=5),))
    assert score.to_json()["ledger"]["robust_accuracy"] is None
    # An attack made for it may use whatever there is.
    known = evaluate(model, x, y, THREAT, (RandomNoise(draws=1),), adaptive=Square(steps=50))
    assert known.adaptive.held is not None


def test_random_models_get_a_second_look_of_many_passes() -> None:
    x, y = torch.full((2, 3), 0.5), torch.zeros(2, dtype=torch.int64)
    report = evaluate(Flickers(), x, y, Threat("linf", 0.1), (Goes(),))
    assert report.flag("randomised").state == "warn"
    assert report.ledger.broken == 2
    assert report.flag("verification_mismatch").value == 0
    assert any("up to 11 passes" in text for text in report.caveats)
    steady = evaluate(Sides(), *near_and_far(), THREAT, (RandomNoise(draws=20),))
    assert not any("passes" in text for text in steady.caveats)


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


class Hides(nn.Module):
    """`Sides` without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Sides()(Masked.apply(x))
        return found


def test_transfer_has_a_flag_of_its_own_and_no_unit_test() -> None:
    x, y = near_and_far()
    report = evaluate(Hides(), x, y, THREAT, (PGD(steps=3, random_start=False), Transfer([Sides()])))
    assert report.flag("transfer_wins").state == "warn"
    assert report.flag("transfer_wins").value == pytest.approx(0.5)
    assert report.flag("black_box_wins").state == "not_run"
    assert [test.attack for test in report.unit_tests] == ["PGD"]
    left_out = report.to_json()["unit_tests"][1]
    assert left_out["attack"] == "Transfer"
    assert left_out["planted_found"] is None
    assert "source models" in left_out["planted_found_reason"]
    assert "Transfer                 left out: " in report.text()
