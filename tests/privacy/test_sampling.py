"""Samplers: what they draw, and that the same numbers are accounted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chisquare
from torch.utils import data

from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import generator
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.sampling import (
    Batch,
    CyclicPoisson,
    FixedSize,
    FullBatch,
    MinSep,
    Poisson,
    Sampler,
    ShuffledEpochs,
    TruncatedPoisson,
    Uniform,
    from_loader,
)
from mycelia.privacy.schedules import StepDecay

ALL: list[Sampler] = [
    Poisson(0.1),
    TruncatedPoisson(0.1, 100, 12),
    FixedSize(9, 100),
    ShuffledEpochs(9, 100),
    CyclicPoisson(0.05, 4),
    MinSep(3, 7),
    FullBatch(),
]


class Source:
    """NumPy's generators by name."""

    def generator(self, purpose: str, step: int, tensor: str = "") -> Uniform:
        return generator(3, purpose + tensor, round=step)


def real(batch: Batch) -> list[int]:
    return batch.indices[batch.mask].tolist()


def drawn(sampler: Sampler, ids: int, steps: int, first: int = 0) -> list[list[int]]:
    """The examples of each update."""
    found: list[list[int]] = []
    for batch in sampler.draw(ids, Source(), first):
        if batch.part == 0:
            if len(found) == steps:
                break
            found.append([])
        found[-1] += real(batch)
    return found


@pytest.mark.parametrize("sampler", ALL, ids=lambda each: each.name)
def test_laws_of_a_draw(sampler: Sampler) -> None:
    batches = list(islice(sampler.draw(100, Source()), 40))
    assert len({batch.indices.shape for batch in batches}) == 1
    steps = [batch.step for batch in batches if batch.last]
    assert steps == list(range(len(steps)))
    for examples in drawn(sampler, 100, 20):
        assert len(set(examples)) == len(examples)
        assert all(0 <= each < 100 for each in examples)
    # A step's draw depends on its number alone, so a run can go on anywhere.
    assert drawn(sampler, 100, 5, first=6) == drawn(sampler, 100, 11)[6:]


@pytest.mark.parametrize("sampler", ALL, ids=lambda each: each.name)
def test_parts_are_the_batch(sampler: Sampler) -> None:
    from dataclasses import replace

    split = replace(sampler, physical=4)  # type: ignore[type-var]
    assert drawn(split, 100, 12) == drawn(sampler, 100, 12)
    for batch in islice(split.draw(100, Source()), 60):
        assert len(batch.mask) == 4


@pytest.mark.parametrize("sampler", ALL, ids=lambda each: each.name)
def test_events_do_not_count_parts(sampler: Sampler) -> None:
    """Events count updates, however many parts they come in."""
    from dataclasses import replace

    split = replace(sampler, physical=2)  # type: ignore[type-var]
    parts = list(islice(split.draw(100, Source()), 30))
    updates = sum(part.last for part in parts)
    assert sum(event.count for event in split.events(1.0, updates)) == updates
    assert split.events(1.0, 5) == sampler.events(1.0, 5)


def test_rate_exact() -> None:
    for rate in (0.1, 1 / 3, 7e-7, 0.0, 1.0):
        assert Poisson(rate).events(1.0, 3)[0].sampling_rate == rate
    sizes = [len(examples) for examples in drawn(Poisson(0.013), 10_000, 300)]
    assert binomtest(sum(sizes), 300 * 10_000, 0.013).pvalue > 1e-4
    assert np.var(sizes) == pytest.approx(10_000 * 0.013 * 0.987, rel=0.4)  # not a fixed size


def test_poisson_coins_are_independent() -> None:
    rounds = drawn(Poisson(0.3), 4, 4000)
    counts = np.zeros(16)
    for examples in rounds:
        counts[sum(1 << each for each in examples)] += 1
    expected = np.array([0.3 ** bin(i).count("1") * 0.7 ** (4 - bin(i).count("1")) for i in range(16)])
    assert chisquare(counts, expected * 4000).pvalue > 1e-4


def test_empty_batches_are_steps() -> None:
    batches = list(islice(Poisson(0.0).draw(50, Source()), 5))
    assert [batch.last for batch in batches] == [True] * 5
    assert not any(batch.mask.any() for batch in batches)
    assert len(list(islice(Poisson(0.5).draw(0, Source()), 3))) == 3
    assert [real(batch) for batch in islice(FullBatch().draw(0, Source()), 2)] == [[], []]


def test_truncation_is_fair() -> None:
    sampler = TruncatedPoisson(0.5, 20, 5)
    counts = np.zeros(20)
    for examples in drawn(sampler, 20, 2000):
        assert len(examples) <= 5
        counts[examples] += 1
    assert chisquare(counts).pvalue > 1e-4


def test_fixed_size_is_uniform() -> None:
    counts = np.zeros(10)
    for examples in drawn(FixedSize(3, 10), 10, 2000):
        assert len(examples) == 3
        counts[examples] += 1
    assert chisquare(counts).pvalue > 1e-4


def test_shuffled_epochs_pass_once() -> None:
    sampler = ShuffledEpochs(9, 100)
    rounds = drawn(sampler, 100, 22)
    assert sampler.epoch == 11
    epochs = [list(chain(*rounds[:11])), list(chain(*rounds[11:]))]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 99
    assert epochs[0] != epochs[1]


def test_cyclic_groups_do_not_depend_on_others() -> None:
    sampler = CyclicPoisson(0.25, 4)
    rounds = drawn(sampler, 400, 8)
    assert [sorted(each) for each in rounds[:4]] == [sorted(each) for each in rounds[4:]]  # rate 1 in a group
    assert sorted(chain(*rounds[:4])) == list(range(400))
    fewer = [set(real(batch)) for batch in islice(sampler.draw(np.arange(1, 400), Source()), 4)]
    assert [set(each) - {0} for each in rounds[:4]] == fewer
    assert all(60 < len(each) < 140 for each in rounds[:4])
    with pytest.raises(ConfigError, match="at most 4 bands"):
        CyclicPoisson(0.25, 5)


def test_min_sep_is_enforced() -> None:
    sampler = MinSep(3, 7)
    rounds = [real(batch) for batch in sampler.draw(100, Source())]
    assert len(rounds) == 21
    where = {each: [i for i, examples in enumerate(rounds) if each in examples] for each in range(100)}
    assert all(len(steps) == 3 and min(np.diff(steps)) == 7 for steps in where.values())
    seen = sampler.participation()
    assert seen.admit([1, 2, 2], 0) == [1, 2]
    assert seen.admit([1, 3], 6) == [3]
    assert seen.admit([1], 7) == [1]
    assert seen.admit([1], 14) == [1]
    assert seen.admit([1], 21) == []


def test_disagreement_is_refused() -> None:
    for sampler in (TruncatedPoisson(0.1, 100, 12), FixedSize(9, 100), ShuffledEpochs(9, 100)):
        with pytest.raises(ConfigError, match="99 examples for a sampler of 100"):
            next(iter(sampler.draw(99, Source())))
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="sampling rate"):
            Poisson(bad)
    with pytest.raises(ConfigError, match="no larger than the data"):
        ShuffledEpochs(11, 10)


def test_events_of_a_schedule() -> None:
    events = Poisson(0.1).events(StepDecay(2.0, 0.5, 10), 25, first_step=5, clip=1.5)
    assert [(event.step, event.count, event.noise_multiplier) for event in events] == [
        (5, 5, 2.0), (10, 10, 1.0), (20, 10, 0.5),
    ]  # fmt: skip
    assert {event.clip for event in events} == {1.5}
    assert Poisson(0.1).events(1.0, 0) == []


def test_parallel_rate() -> None:
    """Data-parallel processes share one draw: the rate is that of the whole, and nobody is drawn twice."""
    whole = drawn(Poisson(0.1), 100, 30)
    for ranks in (2, 3):
        shares = [
            [real(batch.share(rank, ranks)) for batch in islice(Poisson(0.1).draw(100, Source()), 30)]
            for rank in range(ranks)
        ]
        assert [sorted(chain(*parts)) for parts in zip(*shares, strict=True)] == whole


def test_shares_are_steps_of_one_size() -> None:
    draws = list(islice(Poisson(0.002).draw(100, Source()), 50))
    for rank in range(4):
        mine = [batch.share(rank, 4) for batch in draws]
        assert [batch.last for batch in mine] == [batch.last for batch in draws]
        assert len({batch.mask.shape for batch in mine}) == 1
    assert any(not batch.share(3, 4).mask.any() for batch in draws)
    with pytest.raises(ConfigError, match="rank 4 of 4"):
        draws[0].share(4, 4)


def test_draws_come_from_a_noise_source() -> None:
    source = NoiseSource.seeded(1)
    first = [real(batch) for batch in islice(Poisson(0.2).draw(50, source), 5)]
    assert first == [real(batch) for batch in islice(Poisson(0.2).draw(50, NoiseSource.seeded(1)), 5)]
    assert first != [real(batch) for batch in islice(Poisson(0.2).draw(50, NoiseSource.os()), 5)]


class Renamed(data.RandomSampler):
    """Draws as what it inherits from."""


class Other(data.RandomSampler):
    """Draws in its own way."""

    def __iter__(self) -> Iterator[int]:
        return iter([0, 0, 0])


class Endless(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


NUMBERS = torch.arange(100)


def test_loaders_are_shuffled_epochs() -> None:
    for loader in (
        data.DataLoader(NUMBERS, batch_size=10, shuffle=True),
        data.DataLoader(NUMBERS, batch_size=10),
        data.DataLoader(NUMBERS, batch_size=10, drop_last=True, sampler=Renamed(NUMBERS)),
    ):
        assert from_loader(loader) == ShuffledEpochs(10, 100)
    subset = data.SubsetRandomSampler(range(30))
    assert from_loader(data.DataLoader(NUMBERS, batch_size=10, sampler=subset)) == ShuffledEpochs(10, 30)
    assert from_loader(data.DataLoader(NUMBERS, batch_size=300)) == ShuffledEpochs(100, 100)


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (
            data.DataLoader(NUMBERS, sampler=data.WeightedRandomSampler(torch.ones(100).tolist(), 100)),
            "WeightedRandomSampler",
        ),
        (data.DataLoader(NUMBERS, sampler=data.RandomSampler(NUMBERS, replacement=True)), "with replacement"),
        (data.DataLoader(NUMBERS, sampler=data.RandomSampler(NUMBERS, num_samples=150)), "150 of 100"),
        (data.DataLoader(NUMBERS, sampler=data.SubsetRandomSampler([1, 1])), "more than once"),
        (data.DataLoader(NUMBERS, sampler=Other(NUMBERS)), "Other"),
        (data.DataLoader(NUMBERS, batch_sampler=[[1, 2], [3]]), "list"),
        (data.DataLoader(NUMBERS, batch_size=None), "NoneType"),
        (data.DataLoader(Endless(), batch_size=2), "Endless"),
        ([1, 2, 3], "list"),
    ],
)
def test_unknown_sampler_refused(loader: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_loader(loader)
