"""Algorithms by name: helpful errors, and a user's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from mycelia.engine.algorithms import ALGORITHMS, Algorithm, FedAvg, FedProx, Message, ServerState, build
from mycelia.engine.errors import ConfigError
from mycelia.engine.local import ClientData, LocalTrainer
from mycelia.engine.program import Program
from mycelia.engine.sums import TermSpec, Total, Update
from mycelia.engine.types import Tensors

HERE = "tests.engine.algorithms.test_registry"


@dataclass(frozen=True)
class Own(Algorithm):
    """What a user writes."""

    name: ClassVar[str] = "own"
    rate: float = 1.0

    def terms(self, program: Program) -> Mapping[str, TermSpec]:
        return {"rate": TermSpec(1, self.rate)}

    def local(
        self, trainer: LocalTrainer, message: Message, data: ClientData, state: Tensors | None
    ) -> tuple[Update, Tensors | None]:
        return Update({}), state

    def merge(self, program: Program, state: ServerState, total: Total) -> ServerState:
        return state


def own(rate: float) -> Algorithm:
    return Own(rate)


def not_an_algorithm() -> int:
    return 3


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_by_name(name: str) -> None:
    algorithm = build(name)
    assert algorithm.name == name
    assert algorithm.linear  # all of tier one needs a weighted sum and nothing else
    assert type(algorithm)() == algorithm  # every option has a default


def test_options_arrive() -> None:
    assert build("fedprox", mu=0.5, adaptive=True) == FedProx(mu=0.5, adaptive=True)


@pytest.mark.parametrize("reference", [f"{HERE}:Own", f"{HERE}:own"])
def test_a_users_own(reference: str) -> None:
    assert build(reference, rate=2.0) == Own(2.0)


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("fedavgg", {}, "did you mean 'fedavg'"),
        ("FedProx", {}, "no algorithm is called 'FedProx'"),
        ("", {}, "no algorithm is called ''"),
        ("fedprox", {"muu": 0.1}, "did you mean 'mu'"),
        ("fedavg", {"mu": 0.1}, "its options are weighting, server_lr"),
        ("local-only", {"lr": 1}, "it has no options"),
        ("nosuchmodule:Thing", {}, "no module named nosuchmodule"),
        (f"{HERE}:Missing", {}, "has no 'Missing'"),
        (f"{HERE}:not_an_algorithm", {}, "gave a int"),
        (f"{HERE}:own", {}, "missing a required argument: 'rate'"),
        ("mycelia.engine.algorithms:FedOpt", {}, "it has to define optimizer"),
    ],
)
def test_errors_name_the_fix(name: str, options: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        build(name, **options)


@pytest.mark.parametrize(
    ("option", "value"), [("weighting", "size"), ("weighting", 1), ("server_lr", 0), ("server_lr", "1")]
)
def test_fedavg_options_out_of_range(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        FedAvg(**{option: value})  # type: ignore[arg-type]
