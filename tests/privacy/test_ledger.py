"""The ledger: nothing is lost, nothing can be edited, and a release counts once."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest

from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.privacy.events import Event
from mycelia.privacy.ledger import Head, Ledger, from_opacus
from mycelia.privacy.sampling import FullBatch, Poisson, ShuffledEpochs


def one(step: int, z: float = 1.0, q: float = 0.01) -> Event:
    return Poisson(q).events(z, 1, first_step=step)[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "privacy.jsonl"


def written(path: Path, steps: int = 6) -> Ledger:
    ledger = Ledger.create(path, "seeded: not for release")
    for step in range(steps):
        ledger.record(one(step, 1.0 if step < 4 else 2.0))
    return ledger


def test_neighbours_are_one_event(path: Path) -> None:
    ledger = written(path)
    assert [(event.step, event.count) for event in ledger] == [(0, 4), (4, 2)]
    assert (ledger.steps, len(ledger)) == (6, 2)
    ledger.record(one(9))  # steps that do not follow are another event
    assert len(ledger) == 3


def test_loading_gives_the_same(path: Path, tmp_path: Path) -> None:
    ledger = written(path)
    ledger.record(Event("full", 1.0, 0.0, "add-remove", mechanism="curve", orders=(2.0,), values=(0.5,)))
    ledger.close()
    loaded = Ledger.load(path)
    assert loaded.events == ledger.events
    assert loaded.head == ledger.head
    assert loaded.noise_source == "seeded: not for release"
    assert loaded.statement(1e-5).epsilon == pytest.approx(ledger.statement(1e-5).epsilon, rel=1e-12)
    loaded.save(tmp_path / "copy.jsonl")
    assert Ledger.load(tmp_path / "copy.jsonl").head == ledger.head
    with pytest.raises(ConfigError, match="never replaced"):
        loaded.save(path)


def test_on_disk_before_the_release(path: Path) -> None:
    ledger = Ledger.create(path)
    for step in range(3):
        ledger.record(one(step))
        assert Ledger.load(path).steps == step + 1  # another process would see it


def test_failed_write_is_no_event(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = written(path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(MyceliaError, match="No space"):
            ledger.record(one(6))
    assert ledger.steps == 6
    ledger.record(one(6, 2.0))
    assert Ledger.load(path, ledger.head).steps == 7


def test_going_on(path: Path) -> None:
    ledger = written(path)
    head = ledger.head
    ledger.close()
    with path.open("ab") as file:
        file.write(b'{"again":1')  # a crash before the release
    resumed = Ledger.load(path, head, write=True)
    resumed.record(one(6, 2.0))
    assert Ledger.load(path, head).events == resumed.events
    assert [(event.step, event.count) for event in resumed] == [(0, 4), (4, 3)]


@pytest.mark.parametrize("harm", ["edit", "drop", "swap", "cut", "reorder_header", "gone", "empty", "other"])
def test_broken_ledger_stops_the_resume(path: Path, tmp_path: Path, harm: str) -> None:
    ledger = written(path)
    ledger.close()
    lines = path.read_text().splitlines(keepends=True)
    if harm == "edit":
        lines[1] = lines[1].replace('"noise_multiplier":1.0', '"noise_multiplier":9.0')
    elif harm == "drop":
        del lines[2]
    elif harm == "swap":
        lines[1], lines[5] = lines[5], lines[1]
    elif harm == "cut":
        del lines[-1]
    elif harm == "reorder_header":
        del lines[0]
    elif harm == "empty":
        lines = []
    elif harm == "other":
        other = written(tmp_path / "other.jsonl")
        lines = other.path.read_text().splitlines(keepends=True) if other.path else []
    path.unlink()
    if harm != "gone":
        path.write_text("".join(lines))
    with pytest.raises(DataError, match="whole ledger"):
        Ledger.load(path, ledger.head)


def test_malformed_lines_are_named(path: Path) -> None:
    written(path).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"nonsense\n")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        Ledger.load(path)
    path.write_bytes(lines[0])
    with pytest.raises(DataError, match="pass through line 3"):
        Ledger.load(path, Head(3, "x"))


def test_steps_that_are_done_again(path: Path) -> None:
    ledger = Ledger.create(path)
    for step in range(3):
        ledger.record(one(step), release=f"params-{step}")
    checkpoint = ledger.head
    for step in range(3, 6):
        ledger.record(one(step), release=f"params-{step}")
    before = ledger.statement(1e-5).epsilon
    ledger.close()
    resumed = Ledger.load(path, checkpoint, write=True)
    assert resumed.steps == 6
    # The same streams and inputs: the same numbers are released again.
    assert not resumed.record(one(3), release="params-3")
    assert resumed.statement(1e-5).epsilon == pytest.approx(before, rel=1e-12)
    # Other inputs, or nothing said about them: another release.
    assert resumed.record(one(4), release="other params")
    assert resumed.record(one(5))
    assert resumed.steps == 8
    assert resumed.statement(1e-5).epsilon > before
    assert Ledger.load(path, checkpoint).steps == 8


def test_one_noise_is_for_one_sum(path: Path) -> None:
    """From the same secret a step is released again with the same inputs alone, also after loading."""
    ledger = Ledger.create(path)
    for step in range(3):
        assert ledger.record(one(step), f"sum {step}", "first secret")
    ledger.close()
    loaded = Ledger.load(path, ledger.head, write=True)
    assert loaded.holds(one(1), "sum 1", "first secret")
    assert loaded.released("first secret", 2)
    assert not loaded.released("first secret", 3)
    assert not loaded.record(one(1), "sum 1", "first secret")
    with pytest.raises(DataError, match="tell their difference"):
        loaded.record(one(1), "another sum", "first secret")
    with pytest.raises(DataError, match="step 2"):
        loaded.record(one(2, z=5.0), "sum 2", "first secret")
    assert loaded.steps == 3
    # With another secret it is another release.
    assert loaded.record(one(1), "another sum", "second secret")
    assert loaded.steps == 4


def test_chains_pass_through_their_heads(path: Path) -> None:
    ledger = Ledger.create(path)
    heads = [ledger.head]
    for step in range(3):
        ledger.record(one(step))
        heads.append(ledger.head)
    assert all(ledger.follows(head) for head in heads)
    assert not ledger.follows(Head(5, heads[-1].hash))
    assert not ledger.follows(Head(2, heads[2].hash))
    assert not Ledger().follows(heads[0])


def test_an_empty_ledger_can_be_read_into(path: Path, tmp_path: Path) -> None:
    """So that budgets and monitors over it go on as well."""
    written(path).close()
    ledger = Ledger()
    ledger.resume(path, write=True)
    ledger.record(one(6, 2.0))
    assert ledger.steps == Ledger.load(path).steps == 7
    for used in (ledger, written(tmp_path / "other.jsonl")):
        with pytest.raises(ConfigError, match="never replaced"):
            used.resume(path)
        with pytest.raises(ConfigError, match="never replaced"):
            used.name_source("elsewhere")
    kept = Ledger("here")
    kept.record(one(0))
    kept.keep(tmp_path / "kept.jsonl")
    kept.record(one(1))
    assert Ledger.load(tmp_path / "kept.jsonl").events == kept.events
    with pytest.raises(ConfigError, match="one file"):
        kept.keep(tmp_path / "twice.jsonl")


def test_heuristics_have_no_epsilon(path: Path) -> None:
    ledger = Ledger.create(path)
    ledger.note("pruning")
    ledger.note("pruning")
    assert Ledger.load(path, ledger.head).heuristics == ("pruning",)
    assert ledger.statements(1e-5) == []
    with pytest.raises(ConfigError, match="a heuristic has no ε"):
        ledger.statement(1e-5)
    ledger.record(one(0))
    assert "pruning adds nothing to it" in ledger.statement(1e-5).assumptions
    other = Ledger()
    other.merge(ledger)
    assert other.heuristics == ("pruning",)


def test_merge() -> None:
    first, second = Ledger(), Ledger()
    sampler = ShuffledEpochs(1, 10)
    for event in sampler.events(2.0, 15):
        first.record(event)
    for event in sampler.events(2.0, 5, first_step=15):
        second.record(event)
    first.merge(second)
    assert first.steps == 20
    assert first.statement(1e-5).participations == 3  # two runs share no permutation
    with pytest.raises(ConfigError, match="in it already"):
        first.merge(second)
    with pytest.raises(ConfigError, match="in it already"):
        first.merge(first)


def test_relations_and_units_make_two_statements() -> None:
    ledger = Ledger()
    ledger.record(one(0))
    ledger.record(Poisson(0.01).events(1.0, 5, first_step=1, unit="client")[0])
    with pytest.raises(ConfigError, match="two statements"):
        ledger.statement(1e-5)
    found = ledger.statements(1e-5)
    assert [(each.unit, each.steps) for each in found] == [("example", 1), ("client", 5)]


def test_selection() -> None:
    run = FullBatch().events(5.0, 1)
    ledger = Ledger()
    ledger.select(run, mean=10, shape=1.0)
    orders = [1.5, 1.75, *range(2, 65), 128, 256]
    event = dp.dp_event.RepeatAndSelectDpEvent(dp.GaussianDpEvent(5.0), 10, 1.0)
    expected = dp.rdp.RdpAccountant(orders).compose(event).get_epsilon(1e-5)
    found = ledger.statement(1e-5)
    assert found.epsilon == pytest.approx(expected, rel=0.02)
    assert found.epsilon > Ledger.statement(_ledger(run), 1e-5).epsilon
    assert ledger.last is not None
    assert ledger.last.kind == "selection"
    with pytest.raises(ConfigError, match="mean"):
        ledger.select(run, mean=0.5)
    with pytest.raises(ConfigError, match="curve"):
        ledger.select(ledger.events, mean=2)


def _ledger(events: list[Event]) -> Ledger:
    ledger = Ledger()
    for event in events:
        ledger.record(event)
    return ledger


def test_opacus_histories() -> None:
    class Accountant:
        history = ((1.5, 0.04, 1000), (1.5, 0.04, 1250), (1.0, 0.01, 5))

    ledger = from_opacus(Accountant())
    assert [(e.noise_multiplier, e.sampling_rate, e.count) for e in ledger] == [
        (1.5, 0.04, 2250), (1.0, 0.01, 5),
    ]  # fmt: skip
    assert from_opacus({"history": Accountant.history, "mechanism": "prv"}).events == ledger.events
    assert from_opacus([(1.5, 0.04, 2250)]).statement(1e-5).epsilon == pytest.approx(6.7688, rel=5e-3)
    for bad in (object(), "history", [(1, 2)], {"mechanism": "rdp"}):
        with pytest.raises(ConfigError, match="history"):
            from_opacus(bad)


def test_numbers_survive_json(path: Path) -> None:
    rng = np.random.default_rng(0)
    ledger = Ledger.create(path)
    for step, (z, q) in enumerate(rng.random((50, 2))):
        ledger.record(one(step, float(z) * math.pi, float(q)))
    assert Ledger.load(path).events == ledger.events
    assert all("hash" in json.loads(line) for line in path.read_text().splitlines())
