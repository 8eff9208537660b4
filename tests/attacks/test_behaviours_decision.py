"""What attacks by labels and scores are to get right, a named test for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import (
    NES,
    PSO,
    Attack,
    Boundary,
    Genetic,
    HopSkipJump,
    Pointwise,
    SaltAndPepper,
    Status,
    Targeted,
    Untargeted,
    as_model,
)
from mycelia.attacks.norms import Norm, norm
from tests.attacks.worlds import EPS, images, small

torch.set_num_threads(1)

LABEL: tuple[Attack, ...] = (
    HopSkipJump(norm="l2"),
    HopSkipJump(norm="linf"),
    Boundary(),
    NES(mode="label", steps=500),
    Pointwise(passes=50),
    SaltAndPepper(),
)
SCORE: tuple[Attack, ...] = (
    NES(steps=500),
    NES(mode="partial", top=2, steps=500),
    Genetic(steps=500),
    PSO(steps=500, reduce=500),
)


def name(attack: Attack) -> str:
    return f"{type(attack).__name__}-{attack.norm}-{getattr(attack, 'mode', '')}"


class Counting:
    """A function that gives labels or scores, and knows which inputs it has seen."""

    def __init__(self, inner: nn.Module, *, labels: bool, fails_at: int | None = None) -> None:
        self.inner, self.labels, self.left = inner, labels, fails_at
        self.seen: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("half way")
        self.seen.append(x.clone())
        found = self.inner(x).detach()
        return found.argmax(1) if self.labels else found

    @property
    def rows(self) -> int:
        return sum(map(len, self.seen))


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_tensor([0.0, 1.0, 0.0, 0.0]).expand(len(x), 4)


@pytest.mark.parametrize("attack", [*LABEL, *SCORE], ids=name)
@pytest.mark.parametrize("limit", [1, 2, 7, 150])
def test_query_budget_is_exact(attack: Attack, limit: int) -> None:
    """Never a query more, all of them where the row holds, and what is reported is what the model saw."""
    x = images(6)
    y = small()(x).argmax(1)
    model = Counting(small(), labels=attack in LABEL)
    given = as_model(model, "labels" if model.labels else "logits")
    result = attack.run(given, x, Untargeted(y), eps=0.02, rng=2, queries=limit)
    clean, check = len(x), len(x)  # the clean look and the second one; the first is a row's own query
    assert model.rows == int(result.queries.sum()) + check
    spent = result.queries - 1
    assert int(spent.max()) <= limit
    assert model.rows <= clean + check + limit * len(x)
    if not isinstance(attack, (NES, Genetic, Pointwise)) and not result.counts.broken:
        assert bool((spent == limit).all())
    if isinstance(attack, (NES, Genetic)):
        held = result.is_(Status.HELD)
        assert bool((spent[held] == limit).all())


@pytest.mark.parametrize("attack", [*LABEL, *SCORE], ids=name)
def test_probes_lie_in_the_box(attack: Attack) -> None:
    """A model behind an interface may refuse anything else."""
    low, high = torch.zeros(1, 6, 6, dtype=torch.float64), torch.ones(1, 6, 6, dtype=torch.float64)
    low[0, 0], high[0, 1] = 0.2, 0.7
    x = torch.minimum(torch.maximum(images(5), low), high)
    y = small()(x).argmax(1)
    model = Counting(small(), labels=attack in LABEL)
    given = as_model(model, "labels" if model.labels else "logits")
    attack.run(given, x, Untargeted(y), eps=0.1, rng=2, bounds=(low, high), queries=300)
    for seen in model.seen:
        assert bool(((seen >= low) & (seen <= high)).all())


def test_hsj_degenerate_rows() -> None:
    """Rows that are wrong already, rows without a start point, flat models: all end, none is NaN."""
    x = images(9)
    y = small()(x).argmax(1)
    y[0] = (y[0] + 1) % 4
    norms: tuple[Norm, ...] = ("l2", "linf")
    for p in norms:
        result = HopSkipJump(norm=p, steps=3, probes=10).run(small(), x, Untargeted(y), rng=0)
        assert result.status[0] == Status.CLEAN_WRONG
        assert int(result.queries[0]) == 1
        assert bool(torch.isfinite(result.x_adv).all())
        assert result.counts.broken == 8

        ones = Untargeted(torch.ones(9, dtype=torch.int64))
        flat = HopSkipJump(norm=p, steps=3, tries=12).run(Constant(), x, ones)
        assert flat.counts.failed == 9
        assert flat.reason == ("no start point in 12 draws",) * 9
        assert torch.equal(flat.x_adv, x)
        assert bool((flat.queries == 13).all())

    class OneRow(nn.Module):
        """Class 1 everywhere, but for inputs whose first coordinate is near that of the first row."""

        def forward(self, v: Tensor) -> Tensor:
            near = (v.flatten(1)[:, 0] - 0.3).abs() < 1e-9
            return torch.stack([near.to(v.dtype), 0.5 + 0 * v.flatten(1)[:, 0]], 1)

    x = images(4)
    x[0, 0, 0, 0] = 0.3
    z = OneRow()(x).argmax(1)
    needle = HopSkipJump(steps=4, probes=20).run(OneRow(), x, Untargeted(z), rng=3)
    assert needle.status[0] == Status.BROKEN  # the boundary is next to it
    assert bool(needle.is_(Status.FAILED)[1:].all())  # a single failure does not stop the others
    assert bool(torch.isfinite(needle.x_adv).all())


def test_hsj_in_other_units() -> None:
    """Bounds are the data's: the same problem in units of 255, or off centre, has the same answer."""

    class Scaled(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = small()((v + 40) / 255)
            return found

    x = images(6)
    y = small()(x).argmax(1)
    attack = HopSkipJump(steps=5, probes=50)
    ids = torch.arange(6)
    one = attack.run(small(), x, Untargeted(y), rng=1, ids=ids)
    other = attack.run(Scaled(), x * 255 - 40, Untargeted(y), rng=1, ids=ids, bounds=(-40.0, 215.0))
    assert torch.allclose(other.distance["l2"] / 255, one.distance["l2"], rtol=0.05)


@pytest.mark.parametrize("attack", LABEL, ids=name)
def test_labels_as_numpy_arrays(attack: Attack) -> None:
    kinds: list[Any] = []

    def predict(v: Any) -> Any:
        kinds.append((type(v), v.dtype))
        return small(torch.float32)(torch.from_numpy(v)).argmax(1).numpy()

    x = images(5, dtype=torch.float32)
    y = small(torch.float32)(x).argmax(1)
    given = as_model(predict, "labels", numpy=True)
    result = attack.run(given, x.numpy(), Untargeted(y), eps=0.8, rng=2, queries=400)
    assert set(kinds) == {(np.ndarray, np.dtype("float32"))}
    assert result.counts.failed == 0
    assert result.counts.broken > 0
    reached = small(torch.float32)(torch.as_tensor(result.x_adv)).argmax(1) != y
    assert bool(reached[result.is_(Status.BROKEN)].all())


@pytest.mark.parametrize("attack", [*LABEL, *SCORE], ids=name)
def test_a_model_that_raises_half_way(attack: Attack) -> None:
    """The exception comes through as it is, and the attack can be used again."""
    x = images(5)
    y = small()(x).argmax(1)
    labels = attack in LABEL
    kind = "labels" if labels else "logits"
    for fails_at in (1, 3):
        with pytest.raises(RuntimeError, match="half way"):
            attack.run(
                as_model(Counting(small(), labels=labels, fails_at=fails_at), kind),
                x,
                Untargeted(y),
                eps=1e-3,
            )
    first, again = (
        attack.run(as_model(Counting(small(), labels=labels), kind), x, Untargeted(y), eps=0.05, queries=60)
        for _ in range(2)
    )
    assert torch.equal(first.x_adv, again.x_adv)


def test_pso_reduction_is_local() -> None:
    """After success each query takes one coordinate back, from a point that is broken; the image stays."""
    x = images(1)
    y = small()(x).argmax(1)
    whole = PSO(reduce=0).run(small(), x, Untargeted(y), eps=0.2, rng=4)
    assert whole.counts.broken == 1
    model = Counting(small(), labels=False)
    result = PSO(reduce=36).run(as_model(model), x, Untargeted(y), eps=0.2, rng=4)
    assert result.counts.broken == 1
    after = int(result.queries[0]) - int(whole.queries[0])
    asked = torch.cat(model.seen)[-1 - after : -1]  # the last one is the second look
    current = whole.x_adv[0]
    tried = 0
    for point in asked:
        differs = (point != current).nonzero()
        assert len(differs) == 1
        assert point[tuple(differs[0])] == x[0][tuple(differs[0])]
        tried += 1
        if int(small()(point[None]).argmax(1)) != int(y[0]):
            current = point
    assert 0 < tried <= 36
    assert torch.equal(result.x_adv[0], current)
    assert float(result.distance["l0"][0]) < float(whole.distance["l0"][0])
    assert float(result.distance["linf"][0]) <= 0.2


def test_genetic_mutates_single_coordinates() -> None:
    """With a share of 1/36 and no other variety, children differ from all parents in about one place."""
    x = images(3)
    y = small()(x).argmax(1)
    model = Counting(small(), labels=False)
    attack = Genetic(population=20, steps=1, share=1 / 36, least_share=0.0)
    result = attack.run(as_model(model), x, Untargeted(y), eps=1e-4, rng=1)
    assert result.counts.held == 3
    first, children = model.seen[1].view(3, 20, 36), model.seen[2].view(3, 19, 36)
    new = torch.stack(
        [(children[row][:, None] != first[row][None]).all(1).sum(1) for row in range(3)]
    )  # coordinates that no member had
    assert 0.5 < float(new.double().mean()) < 1.5


def test_nes_needs_what_its_mode_needs() -> None:
    from mycelia.attacks import attacks_that_need
    from mycelia.engine.errors import ConfigError

    assert "nes" in attacks_that_need("label")
    assert "nes" in attacks_that_need("score")
    x = images(2)
    y = small()(x).argmax(1)
    labels = as_model(lambda v: small()(v).argmax(1), "labels")
    with pytest.raises(ConfigError, match="needs a score"):
        NES().run(labels, x, Untargeted(y), eps=0.1)
    NES(mode="label", steps=1).run(labels, x, Untargeted(y), eps=0.1)


@pytest.mark.parametrize(
    "attack", [HopSkipJump(steps=4, probes=30), Boundary(steps=50), Pointwise()], ids=name
)
def test_a_pool_gives_start_points(attack: Attack) -> None:
    """Without noise, the points of a pool are tried, the nearest first; only those of a target count."""
    x = images(10)
    y = small()(x).argmax(1)
    pool = images(40, seed=9)
    classes = small()(pool).argmax(1)
    t = classes[(classes[None] != y[:, None]).to(torch.uint8).argmax(1)]
    kind = type(attack)
    settings = {"pool": pool, "tries": 0, "norm": attack.norm}
    result = kind(**settings).run(small(), x, Targeted(t, y), rng=0, queries=200)  # type: ignore[arg-type]
    assert result.counts.broken == 10
    near = torch.stack([norm((pool[classes == t[row]] - x[row]), "l2").min() for row in range(10)])
    assert bool((result.distance["l2"] <= near + 1e-9).all())
    assert kind(**settings) == kind(tries=0, norm=attack.norm)  # type: ignore[arg-type]
    none = kind(tries=0).run(small(), x, Untargeted(y))  # type: ignore[call-arg]
    assert none.counts.failed == 10


@pytest.mark.parametrize("attack", [*LABEL, *SCORE], ids=name)
def test_settings_that_are_refused(attack: Attack) -> None:
    from dataclasses import replace

    from mycelia.engine.errors import ConfigError

    for setting in ("steps", "population", "particles", "passes", "probes", "pairs", "ladder", "groups"):
        if hasattr(attack, setting):
            with pytest.raises(ConfigError):
                replace(attack, **{setting: 0})  # type: ignore[arg-type]


def test_eps_of_the_worlds_is_enough_for_labels() -> None:
    """A minimum attack without a radius breaks every row that has a start point, and says how far it is."""
    x = images()
    y = small()(x).argmax(1)
    for attack in (HopSkipJump(steps=5), Boundary(steps=300), Pointwise(), SaltAndPepper()):
        result = attack.run(small(), x, Untargeted(y), rng=0)
        assert result.counts.broken == len(x)
        assert result.eps is None
        assert float(result.distance["l2"].median()) < 8 * EPS["l2"]
