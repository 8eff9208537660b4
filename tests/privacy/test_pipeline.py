"""Which stages fit together, and what the stages of user-level privacy do to an update and to a sum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.sums import ExactSum, SumFormat, Term, TermSpec, Total, Update
from mycelia.engine.types import Tensors
from mycelia.privacy.clip import PSAC, Abadi, AutoS, Indicator, Sensitivity
from mycelia.privacy.federated import ClipUpdate, ServerNoise, rounding_slack
from mycelia.privacy.noise.gaussian import Gaussian
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import ORDER, Pipeline, Sent, Stage

SENT = Sent(7, 3, {})


def noise(z: float = 1.0, bound: float = 1.0, expected: float = 10.0) -> ServerNoise:
    return ServerNoise(Gaussian(), NoiseSource.seeded(1), z, Sensitivity(bound), expected)


def update(scale: float = 1.0, weight: float = 1.0) -> Update:
    draw = torch.Generator().manual_seed(0)
    new, old = torch.randn(2, 30, generator=draw) * scale
    return Update(
        {"params": Term(new, weight, old), "more": Term(torch.ones(4) * scale, weight)}, {"steps": 2.0}
    )


def vector(of: Update) -> torch.Tensor:
    """What the update adds to the sum."""
    parts = [
        term.weight * (term.values - (0 if term.minus is None else term.minus)) for term in of.terms.values()
    ]
    return torch.cat([part.double() for part in parts])


@dataclass(frozen=True)
class _At(Stage):
    place: ClassVar[str] = "compress"


@dataclass(frozen=True)
class _Unknown(Stage):
    place: ClassVar[str] = "polish"


def test_an_order_is_refused_that_is_not_the_order() -> None:
    clip = ClipUpdate(Abadi(1.0))
    Pipeline((clip, _At(), noise()))
    with pytest.raises(ConfigError, match=", ".join(ORDER[:3])):
        Pipeline((_At(), clip, noise()))
    with pytest.raises(ConfigError, match="each once"):
        Pipeline((clip, clip))
    with pytest.raises(ConfigError, match="polish"):
        Pipeline((_Unknown(),))


def test_noise_needs_clip() -> None:
    with pytest.raises(ConfigError, match="noise without clip"):
        Pipeline((noise(),))


def test_an_empty_pipeline_changes_nothing() -> None:
    one, total = update(), Total({"params": torch.ones(3).double()}, {"params": 2.0}, 2)
    assert Pipeline().device(one, SENT) is one
    assert Pipeline().server(total, {}, 0) == (total, {})
    assert not Pipeline().serves


def test_devices_do_not_get_the_secret() -> None:
    whole = Pipeline((ClipUpdate(Abadi(1.0)), noise()))
    assert [type(stage) for stage in whole.devices().stages] == [ClipUpdate]
    assert whole.serves
    assert not whole.devices().serves


@dataclass(frozen=True)
class _Counts(Stage):
    """Counts its rounds, in public."""

    place: ClassVar[str] = "merge"

    def begin(self) -> Tensors:
        return {"privacy.rounds": torch.zeros(())}

    def server(self, total: Total, public: Mapping[str, Tensor], round: int) -> tuple[Total, Tensors]:
        return total, {"privacy.rounds": public["privacy.rounds"] + 1}


def test_what_is_public_goes_from_round_to_round() -> None:
    pipeline = Pipeline((ClipUpdate(Abadi(1.0)), noise(), _Counts()))
    public = pipeline.begin()
    for round in range(3):
        before = dict(public)
        total = Total({"params": torch.zeros(2).double()}, {"params": 0.0}, 0)
        _, public = pipeline.server(total, public, round)
        assert float(before["privacy.rounds"]) == round  # what devices hold is not written to
    assert float(public["privacy.rounds"]) == 3


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 100.0])
def test_a_client_is_clipped_as_a_whole(scale: float) -> None:
    before = vector(update(scale))
    after = vector(ClipUpdate(Abadi(0.5)).device(update(scale), SENT))
    assert after.norm() <= 0.5 * (1 + 1e-9)
    torch.testing.assert_close(after, before * min(1.0, 0.5 / float(before.norm())), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("clip", [AutoS(0.5), PSAC(0.5)], ids=repr)
@pytest.mark.parametrize("scale", [1e-4, 0.01, 10.0])
def test_a_short_update_may_grow_up_to_the_bound(clip: AutoS | PSAC, scale: float) -> None:
    """The factors of these are above 1 there, which no weight may be."""
    before, found = vector(update(scale)), ClipUpdate(clip).device(update(scale), SENT)
    factor = float(clip(before.norm()[None]))
    torch.testing.assert_close(vector(found), before * factor, rtol=1e-6, atol=1e-9)
    ExactSum(SumFormat.plan({"params": TermSpec(30, 99.0), "more": TermSpec(4, 99.0)}, 1.0, 10)).add(found)
    assert vector(found).norm() <= 0.5 * (1 + 1e-9)


def test_one_left_out_counts_and_moves_nothing() -> None:
    found = ClipUpdate(Indicator(0.5)).device(update(10.0), SENT)
    assert not vector(found).any()
    assert all(term.weight == 1 for term in found.terms.values())
    assert found.metrics == {"steps": 2.0}


def test_weights_and_bad_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="weight 3"):
        ClipUpdate(Abadi(1.0)).device(update(weight=3.0), SENT)
    with pytest.raises(DataError, match="NaN or infinity"):
        ClipUpdate(Abadi(1.0)).device(update(math.nan), SENT)
    with pytest.raises(DataError, match="NaN or infinity"):
        ClipUpdate(Abadi(1.0)).device(update(math.inf), SENT)


def test_server_noise_does_not_depend_on_who_came() -> None:
    """Same noise and same denominator for any number of survivors, nobody included."""
    stage = noise(2.0, 0.5, expected=7.0)
    zero = {"params": torch.zeros(50_000).double()}
    found = [
        stage.server(Total(zero, {"params": weight}, count), {}, 3)[0]
        for count, weight in ((0, 0.0), (9, 4.2))
    ]
    assert torch.equal(found[0].sums["params"], found[1].sums["params"])
    assert found[0].weights == found[1].weights == {"params": 7.0}
    assert found[0].count == found[1].count == 7
    assert abs(float(found[0].sums["params"].std()) / (2.0 * 0.5) - 1) < 0.02
    other, _ = stage.server(Total(zero, {"params": 0.0}, 0), {}, 4)
    assert (
        abs(float(torch.corrcoef(torch.stack([found[0].sums["params"], other.sums["params"]]))[0, 1])) < 0.03
    )


def test_rounding_of_the_exact_sum_is_in_the_sensitivity() -> None:
    """The sum of rounded updates is as far from the sum without one of them as the slack allows."""
    form = SumFormat.plan({"params": TermSpec(30, 8.0), "more": TermSpec(4, 8.0)}, 1.0, 1000)
    clipped = ClipUpdate(Abadi(0.5)).device(update(1.0), SENT)
    own = ExactSum(form)
    own.add(clipped)
    total = ExactSum.total(form, [own.accumulator], 1)
    moved = torch.cat(list(total.sums.values())).norm()
    bound = rounding_slack(Abadi(0.5).sensitivity(), form)
    assert float(moved) <= bound.total
    assert 0 < bound.slack < 1e-9
