"""Evaluations: worst cases, flags on planted faults, none on ordinary models, and the keys of the report."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional

from mycelia.attacks import BIM, FGSM, PGD, AutoAttack, Status
from mycelia.attacks.base import Attack
from mycelia.attacks.evaluate import SUITES, Adaptive, evaluate
from mycelia.attacks.evasion.fmn import FMN
from mycelia.attacks.evasion.noise import RandomNoise
from mycelia.attacks.evasion.square import Square
from mycelia.attacks.flags import FLAGS
from mycelia.attacks.robustness_report import Report
from mycelia.attacks.search import Search
from mycelia.attacks.threat import Threat
from mycelia.engine.errors import ConfigError, DataError

ROWS = 150
EPS = 13 / 255  # on the grid of 8-bit data: rounding takes nothing from the ball
THREAT = Threat("linf", EPS)
SUITE = (FGSM(), PGD(steps=20, restarts=2), RandomNoise(draws=30))


def _lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


ARCHITECTURES = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10)),
    "lenet": _lenet,
    "norm": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(288, 10)
    ),
}


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """8-bit images in [0, 1], and labels."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return (x * 255).round() / 255, torch.tensor(data.target)


@pytest.fixture(scope="module")
def models(digits: tuple[Tensor, Tensor]) -> dict[str, nn.Module]:
    x, y = digits
    found = {}
    with torch.random.fork_rng():
        for name, build in ARCHITECTURES.items():
            torch.manual_seed(3)
            model = build()
            optimiser = torch.optim.Adam(model.parameters(), 5e-3)
            for _ in range(8):
                for rows in torch.randperm(1400).split(64):
                    optimiser.zero_grad()
                    functional.cross_entropy(model(x[rows]), y[rows]).backward()
                    optimiser.step()
            found[name] = model.eval()
    return found


@pytest.fixture(scope="module")
def held_out(digits: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return digits[0][1400 : 1400 + ROWS], digits[1][1400 : 1400 + ROWS]


class Around(nn.Module):
    """A model with something done before and after it."""

    def __init__(self, inner: nn.Module, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x if self.before is None else self.before(x))
        return found if self.after is None else self.after(found)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


def warned(report: Report) -> set[str]:
    return {flag.key for flag in report.warned}


FAULTS: dict[str, tuple[Any, str]] = {
    "softmax outputs": (lambda model: Around(model, after=lambda z: z.softmax(1)), "probabilities"),
    "quantised input": (lambda model: Around(model, before=lambda x: (x * 4).round() / 4), "zero_gradient"),
    "random layer": (
        lambda model: Around(model, before=lambda x: x + 0.1 * torch.randn_like(x)),
        "randomised",
    ),
    "zeroed gradient": (lambda model: Around(model, before=NoGradient.apply), "zero_gradient"),
    "logits × 1e4": (lambda model: Around(model, after=lambda z: z * 1e4), "zero_gradient"),
    "detached": (lambda model: Around(model, before=lambda x: x.detach()), "zero_gradient"),
}


@pytest.mark.parametrize("fault", [*FAULTS, "too few steps", "wrong normalisation", "train mode"])
def test_flags_on_planted_faults(
    fault: str, models: dict[str, nn.Module], held_out: tuple[Tensor, Tensor]
) -> None:
    x, y = held_out
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if fault == "too few steps":
            assert "not_converged" in warned(
                evaluate(models["mlp"], x, y, THREAT, (BIM(steps=1, step_size=EPS / 8),))
            )
        elif fault == "wrong normalisation":
            report = evaluate(models["mlp"], (x - 0.3) / 0.37, y, THREAT, SUITE)
            assert "out_of_bounds" in warned(report)
            assert report.flag("out_of_bounds").value == ROWS
            assert report.to_json()["ledger"]["robust_accuracy"] is None
            assert report.ledger.held == 0
        elif fault == "train mode":
            model = models["norm"].train()
            state = {name: value.clone() for name, value in model.state_dict().items()}
            report = evaluate(model, x, y, THREAT, SUITE)
            assert model.training
            assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
            model.eval()
            assert "randomised" in warned(report)
        else:
            spoil, key = FAULTS[fault]
            assert key in warned(evaluate(spoil(models["mlp"]), x, y, THREAT, SUITE))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_flags_on_ordinary_models(
    name: str, models: dict[str, nn.Module], held_out: tuple[Tensor, Tensor]
) -> None:
    x, y = held_out
    report = evaluate(models[name], x, y, THREAT, (*SUITE, AutoAttack(steps=10, queries=50, targets=3)))
    assert report.warned == ()
    assert {flag.key for flag in report.flags if flag.state == "not_run"} == {"transfer_wins"} | (
        {"black_box_wins"} if report.ledger.held == 0 else set()
    )
    for test in report.unit_tests:
        assert test.constant_found == 0
        if test.attack in ("PGD", "AutoAttack"):
            assert test.planted_found == test.planted_total > 0
    assert 0 < report.ledger.held < report.ledger.clean_correct


def test_flags_are_those_of_the_list() -> None:
    keys = [
        "randomised", "probabilities", "zero_gradient", "nonfinite_gradient", "black_box_wins", "noise_wins",
        "single_step_wins", "transfer_wins", "success_falls", "huge_eps_survives", "not_converged",
        "loss_not_raised", "path_success_lost", "restarts_matter", "gradient_mismatch",
        "inference_optimisation", "few_classes", "eps_zero_differs", "verification_mismatch", "eight_bit",
        "out_of_bounds",
    ]  # fmt: skip
    assert [(rule.id, rule.key) for rule in FLAGS] == list(zip("abcdefghijklmnopqrstu", keys, strict=True))


class Marks(Attack):
    """Breaks the rows of some classes only, by going to a corner in which `Corner` says another class."""

    needs = "label"

    def __init__(self, *classes: int) -> None:
        super().__init__()
        object.__setattr__(self, "classes", classes)

    def search(self, search: Search) -> None:
        rows = search.active
        mine = torch.isin(search.goal.labels[rows], torch.tensor(vars(self)["classes"]))
        points = search.inside(search.x[rows] + mine.view(-1, 1) * search.eps, rows)
        search.look(points, rows, 1)


class Corner(nn.Module):
    """The class is in the first coordinate; where all others are above 0.55 it is the next one."""

    def forward(self, x: Tensor) -> Tensor:
        label = (x[:, 0] * 4).floor().long().clamp(0, 3)
        label = torch.where((x[:, 1:] > 0.55).all(1), (label + 1) % 4, label)
        return functional.one_hot(label, 4).to(x.dtype) + 0 * x.sum(1, keepdim=True)


def test_pointwise_worst_case() -> None:
    """Attacks that break half of the rows each, and not the same half: nothing holds."""
    y = torch.arange(12) % 4
    x = torch.full((12, 5), 0.5)
    x[:, 0] = (y + 0.4) / 4
    y[11] = 1  # clean-wrong
    report = evaluate(
        Corner(), x, y, Threat("linf", 0.1), (Marks(0, 1), Marks(1, 2), Marks(0, 1, 2, 3), Marks(0))
    )
    json_ = report.to_json()
    assert report.ledger.clean_correct == 11
    assert [line.alone for line in report.attacks] == [5, 5, 0, None]
    assert [line.held_after for line in report.attacks] == [5, 2, 0, None]
    assert report.attacks[3].reason == "no row was left"  # it ended early
    assert json_["ledger"]["robust_accuracy"] == 0.0
    assert json_["worst_case"]["broken_by"] == {"Marks": 6, "Marks#2": 3, "Marks#3": 2}
    first = {0: "Marks", 1: "Marks", 2: "Marks#2", 3: "Marks#3"}
    assert report.first == (*(first[int(label)] for label in y[:11]), None)
    assert int(report.status[11]) == Status.CLEAN_WRONG
    assert torch.equal(report.x_adv[11], x[11])
    half = evaluate(Corner(), x, y, Threat("linf", 0.1), (Marks(0, 1), Marks(1, 2)))
    assert (half.ledger.broken, half.ledger.held) == (9, 2)  # not 6 and 5


def test_no_verification_mismatch(models: dict[str, nn.Module], held_out: tuple[Tensor, Tensor]) -> None:
    """What is returned is what breaks: a second look by ourselves says the same of every row."""
    x, y = held_out
    for suite in ("quick", (PGD(steps=5), Square(steps=30))):
        report = evaluate(models["lenet"], x, y, Threat("linf", 26 / 255), suite)
        assert report.flag("verification_mismatch").value == 0
        broken = report.status == int(Status.BROKEN)
        assert int(broken.sum()) == report.ledger.broken > 0
        with torch.no_grad():
            right = models["lenet"](report.x_adv).argmax(1) == y
        assert not bool(right[broken].any())
        assert bool(right[report.status == int(Status.HELD)].all())
        assert float((report.x_adv - x).abs().max()) <= 26 / 255 * (1 + 1e-6)
        assert sum(report.broken_by.values()) == report.ledger.broken


# What a report has, from the specification, and which attack its curve is of; "*" stands for a share with its
# interval.
KEYS = {
    "": "schema threat versions run_dir requirements caveats ledger attacks curve curve_attack worst_case "
        "flags unit_tests adaptive broader detectors certified privacy federated",
    "threat": "norm eps eps_unit data_range goal knowledge bounds queries defence_known",
    "ledger": "n clean_correct broken held failed clean_accuracy* robust_accuracy* success_rate* worst_norm "
              "forward backward seconds seed",
    "attacks": "name settings robust_accuracy_alone* held_after broken failed",
    "curve": "eps robust_accuracy* raw_success*",
    "worst_case": "broken_by",
    "flags": "id key state value limit advice",
    "unit_tests": "attack planted_found planted_total constant_found",
    "adaptive": "note loss surrogate eot best_known*",
    "broader": "corruptions spatial gaussian",
    "requirements": "text met",
}  # fmt: skip


def check_keys(where: str, value: dict[str, Any]) -> None:
    wanted = {key.rstrip("*") for key in KEYS[where].split()}
    wanted |= {f"{key[:-1]}_ci95" for key in KEYS[where].split() if key.endswith("*")}
    reasons = {f"{key}_reason" for key, each in value.items() if each is None}
    assert set(value) == wanted | reasons, where
    for name in reasons:
        assert isinstance(value[name], str)
        assert value[name]
    for key in KEYS[where].split():
        if key.endswith("*") and value[key[:-1]] is not None:
            low, high = value[f"{key[:-1]}_ci95"]
            assert 0 <= low <= value[key[:-1]] <= high <= 1


def check(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(report.to_json(), allow_nan=False))
    check_keys("", found)
    for where in KEYS:
        block = found.get(where)
        for each in block if isinstance(block, list) else [block] if where and block is not None else []:
            check_keys(where, each)
    assert len(found["flags"]) == 21
    assert report.text().startswith("1. Threat model")
    return found


def test_json_keys(models: dict[str, nn.Module], held_out: tuple[Tensor, Tensor]) -> None:
    x, y = held_out
    model = models["mlp"]
    found = check(
        evaluate(model, x[:40], y[:40], THREAT, "quick", adaptive=Adaptive("by hand", PGD(steps=5), eot=1))
    )
    assert found["adaptive"]["best_known"] <= found["ledger"]["robust_accuracy"]
    assert found["schema"] == 1
    assert found["ledger"]["worst_norm"] <= EPS * (1 + 1e-6)
    assert found["curve"][0]["robust_accuracy"] == found["ledger"]["clean_accuracy"]
    assert found["curve"][-1]["raw_success"] == 1.0
    check(
        evaluate(
            model,
            x[:20],
            y[:20],
            THREAT,
            (AutoAttack(steps=5, queries=10, targets=2), FMN(norm="linf", steps=5)),
        )
    )
    check(evaluate(model, x[:0], y[:0], THREAT, "quick"))
    check(evaluate(model, x[:20] + 2, y[:20], THREAT, "quick"))
    wrong = check(evaluate(model, x[:20], (model(x[:20]).argmax(1) + 1) % 10, THREAT, "quick"))
    assert wrong["ledger"]["robust_accuracy"] == 0.0
    assert wrong["ledger"]["success_rate"] is None
    check(evaluate(model, x[:20], y[:20], Threat("linf", 0.0), "quick"))
    check(evaluate(model, x[:20], y[:20], Threat("l0", 3), "quick"))
    check(evaluate(model, x[:20], y[:20], Threat("l2", 0.5, bounds=(-np.inf, np.inf)), "quick"))


def test_a_model_without_gradients(models: dict[str, nn.Module], held_out: tuple[Tensor, Tensor]) -> None:
    """Gradient attacks say why they did not run, the others go on, and the report says that it is weaker."""
    x, y = held_out[0][:30], held_out[1][:30]
    with torch.no_grad():
        estimator = LogisticRegression(max_iter=50).fit(
            x.flatten(1).numpy(), models["mlp"](x).argmax(1).numpy()
        )
    suite = (PGD(steps=3), AutoAttack(steps=3, queries=10, targets=2), RandomNoise(draws=5))
    report = evaluate(estimator, x, y, THREAT, suite)
    found = check(report)
    ran = {line["name"]: line["broken"] is not None for line in found["attacks"]}
    assert ran == {
        "PGD": False, "AutoAttack/apgd-ce": False, "AutoAttack/apgd-t": False, "AutoAttack/fab-t": False,
        "AutoAttack/square": True, "RandomNoise": True,
    }  # fmt: skip
    assert "needs a gradient" in found["attacks"][0]["broken_reason"]
    assert any("weaker evidence" in text for text in found["caveats"])
    score = evaluate(models["mlp"], x, y, Threat("linf", EPS, knowledge="score", queries=20), suite)
    assert [line.broken is None for line in score.attacks] == [True, True, True, True, False, False]
    assert "score knowledge" in score.attacks[0].reason


def test_rows_that_are_no_numbers_fail_and_others_do_not(
    models: dict[str, nn.Module], held_out: tuple[Tensor, Tensor]
) -> None:
    x, y = held_out[0][:20].clone(), held_out[1][:20]
    whole = evaluate(models["mlp"], x, y, THREAT, SUITE)
    x[3] = torch.nan
    report = evaluate(models["mlp"], x, y, THREAT, SUITE)
    assert int(report.status[3]) == Status.FAILED
    others = [row for row in range(20) if row != 3]
    assert torch.equal(report.status[others], whole.status[others])


def test_targets(models: dict[str, nn.Module], held_out: tuple[Tensor, Tensor]) -> None:
    x, y = held_out
    found = {
        goal: evaluate(
            models["mlp"], x[y != 3][:40], y[y != 3][:40], Threat("linf", EPS, goal), (PGD(steps=10),)
        )
        for goal in ("untargeted", "target:3", "least-likely")
    }
    broken = [report.ledger.broken for report in found.values()]
    assert broken[0] >= broken[1] >= broken[2]
    target = found["target:3"]
    with torch.no_grad():
        reached = models["mlp"](target.x_adv).argmax(1) == 3
    assert bool(reached[target.status == int(Status.BROKEN)].all())
    with pytest.raises(DataError, match="target equals label in rows"):
        evaluate(models["mlp"], x, y, Threat("linf", EPS, "target:3"), (PGD(steps=2),))


def test_the_same_seed_gives_the_same_report(
    models: dict[str, nn.Module], held_out: tuple[Tensor, Tensor]
) -> None:
    x, y = held_out
    first, again, other = (
        evaluate(models["mlp"], x[:60], y[:60], THREAT, (PGD(steps=5),), rng=seed) for seed in (4, 4, 5)
    )
    assert torch.equal(first.x_adv, again.x_adv)
    assert not torch.equal(first.x_adv, other.x_adv)
    assert first.flags == again.flags


def test_what_is_refused(models: dict[str, nn.Module], held_out: tuple[Tensor, Tensor]) -> None:
    x, y = held_out
    model = models["mlp"]
    with pytest.raises(ConfigError, match=", ".join(SUITES)):
        evaluate(model, x, y, THREAT, "fast")
    with pytest.raises(ConfigError, match="norm l2, a threat of norm linf"):
        evaluate(model, x, y, THREAT, (PGD(norm="l2"),))
    with pytest.raises(ConfigError, match="no attack"):
        evaluate(model, x, y, THREAT, ())
    with pytest.raises(DataError, match="150 inputs, 149 labels"):
        evaluate(model, x, y[:-1], THREAT, SUITE)
    with pytest.raises(DataError, match="a label 10, 10 outputs"):
        evaluate(model, x, y.clamp(min=0) * 0 + 10, THREAT, SUITE)
    with pytest.raises(DataError, match="floating point"):
        evaluate(model, (x * 255).long(), y, THREAT, SUITE)
    settings: tuple[dict[str, Any], ...] = (
        {"norm": "l3"}, {"eps": -1}, {"eps": float("inf")}, {"goal": "most"}, {"knowledge": "all"},
        {"queries": 0},
    )  # fmt: skip
    for setting in settings:
        with pytest.raises(ConfigError):
            Threat(**({"norm": "linf", "eps": 0.1} | setting))


def test_every_suite_names_attacks_that_exist() -> None:
    """But for transfer, which needs models that a suite does not have."""
    x, y = torch.full((2, 1, 8, 8), 0.5), torch.tensor([1, 2])  # clean-wrong: nothing runs
    for name in SUITES:
        report = evaluate(nn.Sequential(nn.Flatten(), Zero()), x, y, THREAT, name)
        reasons = {line.name: line.reason for line in report.attacks}
        reasons.pop("Transfer", None)
        assert set(reasons.values()) == {"no row was left"}, name


class Zero(nn.Module):
    """Always class 0."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            functional.one_hot(torch.zeros(len(x), dtype=torch.int64), 10).to(x.dtype) + 0 * x.sum(1)[:, None]
        )


class Optimises(nn.Module):
    """Moves its input before it answers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.inner(leaf).amax(1).sum(), leaf)
        found: Tensor = self.inner(x + 0.01 * grad.sign())
        return found


class Pretends(torch.autograd.Function):
    """A gradient that has nothing to do with what is computed."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return torch.sin(1e3 * torch.arange(grad.numel(), dtype=grad.dtype)).view_as(grad)


class Broken(torch.autograd.Function):
    """A gradient that is not finite."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad * torch.nan


@pytest.mark.parametrize(
    ("spoil", "suite", "keys"),
    [
        (Optimises, (PGD(steps=2),), {"inference_optimisation"}),
        (
            lambda model: Around(model, before=Pretends.apply),
            (FGSM(), PGD(steps=5), RandomNoise(draws=300), Square(steps=200)),
            {"gradient_mismatch", "black_box_wins", "noise_wins"},
        ),
        (
            lambda model: Around(model, before=NoGradient.apply),
            (BIM(steps=3),),
            {"zero_gradient", "huge_eps_survives", "loss_not_raised"},
        ),
        (lambda model: Around(model, before=Broken.apply), (PGD(steps=2),), {"nonfinite_gradient"}),
        (lambda model: Around(model, after=lambda z: z[:, :3]), (PGD(steps=2),), {"few_classes"}),
        (lambda model: Around(model, after=lambda z: z.log_softmax(1)), (PGD(steps=20, restarts=2),), set()),
    ],
)
def test_other_flags(
    spoil: Any, suite: Any, keys: set[str], models: dict[str, nn.Module], held_out: tuple[Tensor, Tensor]
) -> None:
    x, y = held_out
    if "few_classes" in keys:
        x, y = x[y < 3], y[y < 3]
    found = warned(evaluate(spoil(models["mlp"]), x, y, THREAT, suite))
    assert keys <= found
    if not keys:  # log-probabilities are logits
        assert not found


def test_the_smallest_changes_survive_rounding_where_the_ball_has_room(
    models: dict[str, nn.Module], held_out: tuple[Tensor, Tensor]
) -> None:
    """They end at the boundary, where rounding would undo half of them; an attacker would go on."""
    x, y = held_out[0][:60], held_out[1][:60]
    report = evaluate(models["mlp"], x, y, Threat("linf", 26 / 255), (FMN(norm="linf", steps=30),))
    assert report.ledger.broken > 20
    assert report.flag("eight_bit").value <= 2 / 60
