"""Fuzzers: rules of queue, lineage and validity, and what a result says."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import DI, FGSM, FMN, MDI, MIM, PGD
from mycelia.attacks.arguments import Bounds
from mycelia.attacks.fuzzing import (
    CAVEAT,
    Adversarial,
    Fuzzer,
    FuzzResult,
    KMultisection,
    Mutator,
    NeuronCoverage,
    SensitivityConvergence,
    SensitivityFuzzer,
    Validity,
    activations,
    standard_mutators,
)
from mycelia.attacks.fuzzing.queue import Item, Queue
from mycelia.attacks.model import Model, as_model
from mycelia.attacks.transforms import TRANSFORMS, Contrast, GaussianNoise, Rotate, Translate, UniformNoise
from mycelia.attacks.windows import Layout
from mycelia.engine.errors import ConfigError, DataError
from tests.attacks.worlds import images, small

EIGHTEEN = standard_mutators("nchw", 0.1)
ALL = Validity(share=1.0)  # nothing is refused


def world(n: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    model, x = small(), images(n)
    return model, x, model(x).argmax(1)


def covered() -> KMultisection:
    coverage = KMultisection(20)
    coverage.fit(activations(small(), images(60, seed=9)))
    return coverage


def run(**more: object) -> FuzzResult:
    model, x, y = world()
    return Fuzzer(model, EIGHTEEN, covered()).run(x, y, 3, 200, layout="nchw", **more)  # type: ignore[arg-type]


def test_there_are_eighteen() -> None:
    assert [each.name for each in EIGHTEEN] == [*(kind.__name__ for kind in TRANSFORMS), "FGSM", "PGD", "MDI"]


def test_defects_are_defects() -> None:
    """Each is a mutant of its seed that the model has wrong, inside the bounds, and by the rules."""
    model, _, y = world()
    result = run(validity=ALL)
    assert 0 < len(result.defects) < result.mutants <= result.tried == 200
    assert result.inputs.shape == (len(result.defects), 1, 6, 6)
    assert float(result.inputs.min()) >= 0
    assert float(result.inputs.max()) <= 1
    labels = model(result.inputs).argmax(1).tolist()
    geometric = {kind.__name__ for kind in TRANSFORMS if kind.geometric}
    for defect, label in zip(result.defects, labels, strict=True):
        assert defect.predicted == label != defect.true == int(y[defect.seed])
        assert len(defect.trail) >= 1
        assert sum(each.split("(")[0] in geometric for each in defect.trail) <= 1
    assert max(len(each.trail) for each in result.defects) > 1
    keys = [(each.true, each.predicted, each.seed) for each in result.defects]
    assert keys == sorted(keys)
    assert result.success_share == len(result.defects) / result.mutants
    assert 0 < result.before < result.after <= 1
    assert result.gain == result.after - result.before
    assert result.stopped == "mutants"
    assert result.entered > 0


def test_a_run_is_its_seed_and_changes_nothing() -> None:
    model, x, y = world()
    model.train()
    coverage, kept = covered(), x.clone()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generators = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 - it must not move
    fuzzer = Fuzzer(model, EIGHTEEN, coverage)
    first = fuzzer.run(x, y, 3, 100, layout="nchw")
    again = fuzzer.run(x, y, 3, 100, layout="nchw")
    assert first.defects == again.defects
    assert torch.equal(first.inputs, again.inputs)
    assert (first.before, first.after, first.entered) == (again.before, again.after, again.entered)
    other = fuzzer.run(x, y, 4, 100, layout="nchw")
    assert other.defects != first.defects
    assert coverage.covered == 0
    assert torch.equal(x, kept)
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(each.requires_grad and each.grad is None for each in model.parameters())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert np.array_equal(np.random.get_state()[1], generators[1])  # noqa: NPY002


def test_di_fires_as_a_mutator() -> None:
    """At p = 1 the gradient is that of a resized image; at p = 0 the mutant is that of MIM, bit for bit."""
    model, x, y = world()
    target = as_model(model)

    def mutants(attack: object) -> Tensor:
        found, made = Adversarial(attack, 0.1).mutate(target, x, y, 5, (0.0, 1.0), "nchw")  # type: ignore[arg-type]
        assert type(attack).__name__ in made
        return found

    still = mutants(MDI(layout="nchw", steps=4, p=0.0))
    assert torch.equal(still, mutants(MIM(steps=4)))
    moved = mutants(MDI(layout="nchw", steps=4, p=1.0))
    assert bool((moved != still).flatten(1).any(1).all())
    assert not torch.equal(mutants(DI(layout="nchw", steps=4, p=1.0)), moved)
    assert isinstance(EIGHTEEN[-1], Adversarial)
    assert EIGHTEEN[-1].attack.p > 0  # type: ignore[attr-defined]


def test_attack_mutators_stay_in_their_ball_and_fool() -> None:
    model, x, y = world()
    for attack in (FGSM(), PGD(steps=10)):
        found, _ = Adversarial(attack, 0.2).mutate(as_model(model), x, y, 0, (0.0, 1.0), "nchw")
        assert float((found - x).abs().max()) <= 0.2 * (1 + 1e-6)
        assert float((model(found).argmax(1) != y).double().mean()) > 0.5


@dataclass(frozen=True)
class Marked(Mutator):
    """Adds a number; notes what it was given."""

    by: float = 0.01
    moves: bool = False
    right: bool = False

    @property
    def name(self) -> str:
        return f"Marked{int(self.moves)}"

    @property
    def geometric(self) -> bool:
        return self.moves

    @property
    def needs_right(self) -> bool:
        return self.right

    def mutate(
        self, model: Model, x: Tensor, y: Tensor, rng: int, bounds: Bounds, layout: Layout | None
    ) -> tuple[Tensor, str]:
        if self.right:
            assert torch.equal(model(x).argmax(1), y)
        return (x + self.by).clamp(0, 1), self.name


class Sum(nn.Module):
    """One neuron, the mean of an input, which is also what decides: class 1 above `edge`."""

    def __init__(self, edge: float = 0.5) -> None:
        super().__init__()
        self.neuron = nn.Identity()
        self.edge = edge

    def forward(self, x: Tensor) -> Tensor:
        mean = self.neuron(x.flatten(1).mean(1, keepdim=True))
        return torch.cat([torch.full_like(mean, self.edge), mean], 1)


def sections(k: int) -> KMultisection:
    coverage = KMultisection(k)
    coverage.fit({"neuron": torch.tensor([[0.0], [1.0]])})
    return coverage


def flat(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None].expand(-1, 10).contiguous()


def test_a_mutant_enters_when_it_covers_a_unit() -> None:
    """From 0.005 in steps of 0.01 through sections of 0.01: the newest one enters, all others are known."""
    x, y = flat(0.005), torch.tensor([0])
    fuzzer = Fuzzer(Sum(2.0), [Marked()], sections(100))
    result = fuzzer.run(x, y, 0, 300, validity=ALL, layers=["neuron"])
    assert result.before == 1 / 100
    assert result.entered == round(100 * result.gain) > 10
    assert result.defects == ()
    assert result.success_share == 0.0
    wide = Fuzzer(Sum(2.0), [Marked(by=1e-6)], sections(10)).run(x, y, 0, 50, validity=ALL, layers=["neuron"])
    assert (wide.entered, wide.gain) == (0, 0.0)


def test_one_geometric_mutator_in_a_lineage() -> None:
    """So from 0 nothing gets beyond one geometric step and the others."""
    x, y = flat(0.0), torch.tensor([0])
    result = Fuzzer(Sum(0.2), [Marked(0.3, moves=True)], sections(100)).run(
        x, y, 0, 60, validity=ALL, layers=["neuron"]
    )
    assert {each.trail for each in result.defects} == {("Marked1",)}
    both = Fuzzer(Sum(0.2), [Marked(0.3, moves=True), Marked(0.05)], sections(100)).run(
        x, y, 0, 200, validity=ALL, layers=["neuron"]
    )
    assert {each.trail.count("Marked1") for each in both.defects} == {0, 1}
    assert max(len(each.trail) for each in both.defects) > 2


def test_mutators_that_need_right_inputs_get_them() -> None:
    x, y = flat(0.0, 0.1), torch.tensor([0, 0])
    result = Fuzzer(Sum(0.2), [Marked(0.05, right=True), Marked(0.06)], sections(100)).run(
        x, y, 0, 150, validity=ALL, layers=["neuron"]
    )
    assert len(result.defects) > 0


def test_validity_is_few_pixels_or_small_changes() -> None:
    reference = torch.zeros(4, 2, 5, 5)
    mutants = reference.clone()
    mutants[0, :, 0, 0] = 1.0  # one pixel of 25, by much
    mutants[1] += 0.1  # all, by little
    mutants[2, 0, :2, 0] = 1.0  # two pixels, by much
    mutants[3] += 0.21
    rule = Validity(share=0.04, size=0.2)
    assert rule(mutants, reference, "nchw").tolist() == [True, True, False, False]
    last, other = mutants.movedim(1, -1), reference.movedim(1, -1)
    assert rule(last, other, "nhwc").tolist() == [True, True, False, False]
    assert rule(mutants, reference).tolist() == [True, True, True, False]  # 2 of 50 values
    for wrong in ({"share": 1.1}, {"share": -0.1}, {"size": -1.0}):
        with pytest.raises(ConfigError):
            Validity(**wrong)


def test_validity_counts_from_the_seed_and_from_a_geometric_mutant() -> None:
    """Steps of 0.1 get no further than 0.2 from their seed; after a geometric mutator they count anew."""
    x, y = flat(0.0), torch.tensor([0])
    rule = Validity(share=0.0, size=0.2 + 1e-9)
    plain = Fuzzer(Sum(0.05), [Marked(0.1)], sections(100)).run(
        x, y, 0, 100, validity=rule, layers=["neuron"]
    )
    assert max(len(each.trail) for each in plain.defects) == 2
    assert plain.mutants < plain.tried
    moved = SensitivityFuzzer(Sum(0.05), [Marked(0.1), Marked(0.5, moves=True)]).run(
        x, y, 0, 300, validity=rule, layers=["neuron"]
    )
    assert float(moved.inputs.max()) == pytest.approx(0.9)  # two, the move, two


def test_mutants_that_equal_their_parents_are_dropped() -> None:
    x = torch.full((2, 1, 6, 6), 0.5, dtype=torch.float64)
    result = Fuzzer(small(), [Contrast], NeuronCoverage()).run(
        x, small()(x).argmax(1), 0, 20, layout="nchw", validity=ALL
    )
    assert (result.tried, result.mutants, result.success_share) == (20, 0, None)
    assert result.to_json()["success_share_reason"]
    assert "no valid mutant" in result.text()


def test_seeds_that_are_wrong_are_left_out() -> None:
    model, x, y = world()
    wrong = y.clone()
    wrong[:4] = (y[:4] + 1) % 4
    result = Fuzzer(model, EIGHTEEN, covered()).run(x, wrong, 0, 100, layout="nchw")
    assert result.clean_wrong == 4
    assert min(each.seed for each in result.defects) >= 4
    none = Fuzzer(model, EIGHTEEN, covered()).run(x, (y + 1) % 4, 0, 100, layout="nchw")
    assert (none.clean_wrong, none.mutants, none.defects) == (12, 0, ())
    assert none.stopped == "no seed that the model has right"
    assert none.inputs.shape == (0, 1, 6, 6)


def test_energy_falls_with_use_and_never_to_nothing() -> None:
    queue = Queue((Item(torch.zeros(1), torch.zeros(1), k) for k in range(3)), decay=4, least=0.25)
    draws = np.random.default_rng(0)
    queue.items[0].taken = 2
    queue.items[1].taken = 9
    assert queue.energies().tolist() == [0.5, 0.25, 1.0]
    counts = [0, 0, 0]
    for _ in range(3000):
        (item,) = queue.take(draws, 1, geometric=False, needs_right=False)
        item.taken -= 1
        counts[item.seed] += 1
    assert np.allclose(np.array(counts) / 3000, np.array([0.5, 0.25, 1.0]) / 1.75, atol=0.04)
    for item, score in zip(queue.items, (0.0, 2.0, 4.0), strict=True):
        item.score = score
    assert queue.energies().tolist() == [0.5 * 0.25, 0.25 * 0.5, 1.0]
    queue.items[2].moved, queue.items[1].right = True, False
    assert [each.seed for each in queue.take(draws, 5, geometric=True, needs_right=True)] == [0]
    assert len(queue.take(draws, 5, geometric=False, needs_right=False)) == 3


def test_time_is_a_limit() -> None:
    model, x, y = world()
    began = time.perf_counter()
    result = Fuzzer(model, [UniformNoise], NeuronCoverage()).run(x, y, 0, 10**9, 0.3, layout="nchw")
    assert result.stopped == "seconds"
    assert 0.3 <= time.perf_counter() - began < 5
    assert result.mutants > 0


def test_sensitivity_is_raised() -> None:
    """A mutant enters when neurons answer more than to its parent: from 0 in steps of 0.01, each does."""
    x, y = flat(0.0), torch.tensor([0])
    result = SensitivityFuzzer(Sum(2.0), [Marked(0.01)]).run(x, y, 0, 50, validity=ALL, layers=["neuron"])
    assert result.entered == result.mutants == 50
    assert result.measure == "neuron sensitivity"
    assert result.before == 0.0
    assert result.after > 0.01
    model, images_, labels = world()
    real = SensitivityFuzzer(model, EIGHTEEN).run(images_, labels, 0, 100, layout="nchw")
    assert 0 < real.entered <= real.mutants
    assert real.after > 0
    down = SensitivityFuzzer(Sum(2.0), [Marked(0.3), Marked(-0.1)]).run(
        flat(0.5), y, 0, 60, validity=ALL, layers=["neuron"]
    )
    assert down.entered < down.mutants  # back towards the seed answers less


def test_convergence_guides_a_fuzzer() -> None:
    model, x, y = world()
    coverage = SensitivityConvergence()
    noise = GaussianNoise(0.1).apply(x, 0, layout="nchw")
    coverage.fit(activations(model, noise), activations(model, x))
    result = Fuzzer(model, [GaussianNoise(0.1), Rotate], coverage).run(
        x, y, 0, 100, layout="nchw", validity=ALL
    )
    assert result.gain > 0
    assert result.entered > 0


def test_the_result_says_defects_first() -> None:
    result = run()
    text = result.text()
    assert text.splitlines()[0].startswith(f"{len(result.defects)} defects")
    assert text.index("taken for") < text.index("KMultisection")
    assert CAVEAT in text
    found = result.to_json()
    assert next(iter(found)) == "defects"
    assert sum(itertools.chain.from_iterable(each.values() for each in found["defects"].values())) == len(
        result.defects
    )
    for true, counts in result.per_class.items():
        for label, count in counts.items():
            assert true != label
            assert count == sum((each.true, each.predicted) == (true, label) for each in result.defects)
    low, high = found["success_share_ci95"]
    assert low <= found["success_share"] <= high
    assert found["coverage"]["caveat"] == CAVEAT


def test_defects_become_a_training_set(tmp_path: Path) -> None:
    model, _, y = world()
    result = run()
    x_new, y_new = result.training_set()
    assert torch.equal(x_new, result.inputs)
    assert y_new.tolist() == [int(y[each.seed]) for each in result.defects]
    assert bool((model(x_new).argmax(1) != y_new).all())
    few, labels = result.training_set(per_class=2)
    assert len(few) == len(labels) == sum(min(2, sum(each.values())) for each in result.per_class.values())
    result.export(tmp_path / "defects.npz")
    with np.load(tmp_path / "defects.npz") as file:
        assert np.array_equal(file["x"], result.inputs.numpy())
        assert file["y"].tolist() == y_new.tolist()
        assert file["predicted"].tolist() == [each.predicted for each in result.defects]
        assert file["seed"].tolist() == [each.seed for each in result.defects]


def test_an_output_that_is_no_number_is_a_defect() -> None:
    class Breaks(Sum):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            return torch.where(found[:, 1:] > 0.3, torch.nan, found)

    result = Fuzzer(Breaks(), [Marked(0.4)], NeuronCoverage()).run(
        flat(0.0), torch.tensor([0]), 0, 3, validity=ALL, layers=["neuron"]
    )
    assert {each.predicted for each in result.defects} == {-1}


def test_what_is_refused() -> None:
    model, x, y = world()
    fuzzer = Fuzzer(model, [UniformNoise], NeuronCoverage())
    for wrong in (
        {"max_mutants": 0}, {"seconds": 0.0}, {"batch": 0}, {"decay": 0.0}, {"least": 0.0}, {"least": 1.1},
        {"layers": ["none"]},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            fuzzer.run(x, y, layout="nchw", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="layout None"):
        fuzzer.run(x, y)
    with pytest.raises(DataError, match="labels"):
        fuzzer.run(x, y[:3], layout="nchw")
    with pytest.raises(DataError, match="beyond bounds"):
        fuzzer.run(x + 1, y, layout="nchw")
    with pytest.raises(DataError, match="not finite"):
        fuzzer.run(x * torch.nan, y, layout="nchw")
    with pytest.raises(ConfigError, match="no mutators"):
        Fuzzer(model, [], NeuronCoverage()).run(x, y, layout="nchw")
    with pytest.raises(ConfigError, match="Adversarial"):
        Fuzzer(model, [FGSM()], NeuronCoverage()).run(x, y, layout="nchw")
    with pytest.raises(ConfigError, match="no neurons"):
        Fuzzer(lambda v: v.flatten(1), [UniformNoise], NeuronCoverage()).run(x, y)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="training"):
        Fuzzer(model, [UniformNoise], KMultisection()).run(x, y, layout="nchw")
    for attack, eps in ((FMN(), 0.1), (FGSM(), 0.0)):
        with pytest.raises(ConfigError, match="fixed"):
            Adversarial(attack, eps)


def test_other_bounds_and_layouts() -> None:
    """A model of channels-last images from 0 to 255."""
    model, x, y = world()

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, v: Tensor) -> Tensor:
            found: Tensor = self.inner(v.movedim(-1, 1) / 255)
            return found

    given = (x * 255).movedim(1, -1).contiguous()
    result = Fuzzer(Last().eval(), standard_mutators("nhwc", 25.0), NeuronCoverage()).run(
        given, y, 0, 150, layout="nhwc", bounds=(0.0, 255.0), validity=Validity(0.02, 60.0)
    )
    assert len(result.defects) > 0
    assert float(result.inputs.max()) > 1
    assert float(result.inputs.max()) <= 255
    assert Translate in {
        each.transform for each in standard_mutators("nhwc", 25.0) if hasattr(each, "transform")
    }
