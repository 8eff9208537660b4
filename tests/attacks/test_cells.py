"""What was found before is not looked for again, and what differs is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import PGD, Attack, AutoAttack, DeepFool, SaltAndPepper, Untargeted
from mycelia.attacks.cells import Cells
from mycelia.attacks.suite_file import load_suite
from mycelia.engine.errors import ConfigError
from tests.attacks.worlds import EPS, images, small


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = small(torch.float64), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.inner(x)
        return found


ATTACKS: tuple[Attack, ...] = (PGD(steps=3), DeepFool(), AutoAttack(steps=3, queries=20), SaltAndPepper())


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)
def test_what_was_found_is_read(tmp_path: Path, attack: Attack) -> None:
    model, x = Counted(), images()
    goal, cells = Untargeted(model.inner(x).argmax(1)), Cells(tmp_path / "cells", "m")
    given: dict[str, Any] = {"eps": EPS[attack.norm], "rng": 3, "bounds": (0.0, 1.0), "batch": 4}
    first = cells.run(attack, model, x, goal, **given)
    calls = model.calls
    again = cells.run(attack, model, x, goal, **given)
    assert model.calls == calls > 0
    assert type(again) is type(first)
    assert vars(again).keys() == vars(first).keys()
    for name, value in vars(first).items():
        other = getattr(again, name)
        if isinstance(value, Tensor):
            assert torch.equal(torch.nan_to_num(other.double()), torch.nan_to_num(value.double()))
        elif name == "distance":
            assert all(torch.equal(other[p], values) for p, values in value.items())
        else:
            assert other == value


def test_whatever_differs_is_run(tmp_path: Path) -> None:
    model, x = Counted(), images()
    goal, attack = Untargeted(model.inner(x).argmax(1)), PGD(steps=2)
    given: dict[str, Any] = {"eps": 0.1, "rng": 3, "batch": 4}
    Cells(tmp_path, "m").run(attack, model, x, goal, **given)
    others = [
        (Cells(tmp_path, "another"), attack, x, goal, given),
        (Cells(tmp_path, "m"), PGD(steps=3), x, goal, given),
        (Cells(tmp_path, "m"), attack, x + 1e-6, goal, given | {"bounds": (-1.0, 2.0)}),
        (Cells(tmp_path, "m"), attack, x.clamp(max=0.99), goal, given),
        (Cells(tmp_path, "m"), attack, x, Untargeted((goal.y + 1) % 4), given),
        (Cells(tmp_path, "m"), attack, x, goal, given | {"eps": 0.2}),
        (Cells(tmp_path, "m"), attack, x, goal, given | {"rng": 4}),
        (Cells(tmp_path, "m"), attack, x, goal, given | {"queries": 1}),
    ]
    for cells, each, inputs, wanted, more in others:
        before = model.calls
        cells.run(each, model, inputs, wanted, **more)
        assert model.calls > before


def test_a_damaged_file_is_no_result(tmp_path: Path) -> None:
    model, x, cells = Counted(), images(), Cells(tmp_path, "m")
    goal, attack = Untargeted(model.inner(x).argmax(1)), PGD(steps=2)
    first = cells.run(attack, model, x, goal, eps=0.1, rng=0)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], whole.replace(b'"rest"', b'"west"')):
        path.write_bytes(damaged)
        before = model.calls
        again = cells.run(attack, model, x, goal, eps=0.1, rng=0)
        assert model.calls > before
        assert torch.equal(again.x_adv, first.x_adv)
        assert path.read_bytes() != damaged


def test_a_suite_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text('[[attack]]\nname = "pgd"\nsteps = 7\n\n[[attack]]\nname = "square"\n')
    first, second = load_suite(path, "l2")
    assert first == PGD(norm="l2", steps=7)
    assert (type(second).__name__, second.norm) == ("Square", "l2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no attack"),
        ("attack = 3", "no attack"),
        ("[[attack]]", "without a name"),
        ('[[attack]]\nname = "pdg"', "pgd"),
        ('[[attack]]\nname = "pgd"\nstep = 3', "steps"),
        ('[[attack]]\nname = "pgd"\nsteps = "many"', "steps|pgd"),
        ('[[attack]]\nname = "carliniwagner"', "l2"),
        ('[[attack]]\nname = "pgd"\nnorm = "l2"', "l2"),
        ('more = 1\n[[attack]]\nname = "pgd"', "more"),
        ("[", "cannot be read"),
    ],
)
def test_suites_that_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "suite.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_suite(path, "linf")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_suite(tmp_path / "missing.toml", "linf")
