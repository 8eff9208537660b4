"""Many runs: found, filtered, sorted, compared, and their results explained."""

from __future__ import annotations

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from mycelia.engine import events as e
from mycelia.engine.errors import ConfigError
from mycelia.engine.importance import explain
from mycelia.engine.lineage import (
    RunSummary,
    differing,
    filter_runs,
    find_runs,
    read_runs,
    sort_runs,
    summarize,
)
from mycelia.engine.report.parallel import parallel_coordinates
from tests.engine.run_factory import START, result, simulated_run, started, trained_run, write_run

RUNS = [
    RunSummary(
        Path(name),
        name,
        command="simulate",
        status=status,
        started=START + index,
        settings={"algorithm": algorithm, "local.lr": lr, "cached": index == 0},
        results=results,
        origin={"seed": seed},
    )
    for index, (name, status, algorithm, lr, seed, results) in enumerate(
        [
            ("alpha", "finished", "fedavg", 0.1, 0, {"test_accuracy": 0.91, "epsilon": None}),
            ("beta", "finished", "fedprox", 1, 1, {"test_accuracy": 0.87, "epsilon": 2.0}),
            ("gamma", "failed", "fedavg", 0.01, 0, {}),
            ("delta", "finished", "scaffold", 0.1, 2, {"test_accuracy": math.nan, "note": "diverged"}),
        ]
    )
]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([], "alpha beta gamma delta"),
        (["algorithm=fedavg"], "alpha gamma"),
        (["algorithm==fedavg"], "alpha gamma"),
        (["algorithm = 'fedavg'"], "alpha gamma"),
        (["algorithm!=fedavg"], "beta delta"),
        (["algorithm~FED"], "alpha beta gamma"),
        (["local.lr=0.10"], "alpha delta"),
        (["local.lr=1.0"], "beta"),
        (["local.lr>=0.1"], "alpha beta delta"),
        (["local.lr<0.1"], "gamma"),
        (["test_accuracy>0.9"], "alpha"),
        (["test_accuracy<=1"], "alpha beta"),  # not NaN, not missing
        (["test_accuracy!=0.91"], "beta"),
        (["epsilon=2"], "beta"),
        (["cached=true"], "alpha"),
        (["status=finished", "seed>0"], "beta delta"),
        (["name~a", "algorithm=fedprox", "local.lr>0"], "beta"),
        (["note=diverged"], "delta"),
        (["local.lr=fast"], ""),
    ],
)
def test_runs_are_filtered(conditions: list[str], expected: str) -> None:
    assert [run.name for run in filter_runs(RUNS, conditions)] == expected.split()


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("algorithm", "NAME OPERATOR VALUE"),
        ("=fedavg", "NAME OPERATOR VALUE"),
        ("algoritm=fedavg", "did you mean algorithm"),
        ("accuracy>0.5", "did you mean test_accuracy"),
        ("zzz=1", "the names are name, command"),
        ("local.lr>fast", "'fast' is no number"),
    ],
)
def test_a_condition_that_cannot_be_met_by_mistake_is_an_error(condition: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        filter_runs(RUNS, [condition])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("column", "reverse", "expected"),
    [
        ("test_accuracy", False, "alpha beta gamma delta"),
        ("test_accuracy", True, "beta alpha gamma delta"),
        ("local.lr", False, "beta alpha delta gamma"),
        ("name", False, "alpha beta delta gamma"),
        ("name", True, "gamma delta beta alpha"),
        ("started", False, "delta gamma beta alpha"),
        ("epsilon", True, "beta alpha gamma delta"),
    ],
)
def test_runs_are_sorted_and_those_without_the_value_come_last(
    column: str, reverse: bool, expected: str
) -> None:
    assert [run.name for run in sort_runs(RUNS, column, reverse=reverse)] == expected.split()


def test_sorting_by_a_name_that_no_run_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean test_accuracy"):
        sort_runs(RUNS, "test_acuracy")
    assert sort_runs([], "anything") == []


def test_settings_that_differ_are_told_apart_from_those_that_do_not() -> None:
    assert differing(RUNS) == ["algorithm", "local.lr", "cached", "seed"]
    assert differing(RUNS[:1]) == []
    same = [RunSummary(Path("x"), "x", settings={"lr": value, "k": None}) for value in (1, 1.0)]
    assert differing(same) == []


# Reading run folders


def test_runs_are_found_below_a_folder_and_not_inside_each_other(tmp_path: Path) -> None:
    for name in ("b", "a", "sweep/one", "sweep/two"):
        write_run(tmp_path / name, [])
    write_run(tmp_path / "a" / "inner", [])
    (tmp_path / "notes").mkdir()
    found = [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)]
    assert found == ["a", "b", "sweep/one", "sweep/two"]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
    assert find_runs(tmp_path / "notes") == []
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_runs(tmp_path / "gone")


def test_a_summary_has_settings_results_and_origin(tmp_path: Path) -> None:
    config = {
        "model": "mlp",
        "algorithm": {"name": "fedprox", "mu": 0.1},
        "local": {"lr": 0.1, "optimizer": {"name": "sgd"}},
        "rounds": 20,
    }
    events = [started(config=config, parent="runs/before"), e.RunFinished(result(20), t=START + 42)]
    run = summarize(write_run(tmp_path / "run", events))
    assert (run.name, run.command, run.status, run.seconds) == ("run", "simulate", "finished", 42.0)
    assert run.settings == {
        "model": "mlp",
        "algorithm": "fedprox",
        "algorithm.mu": 0.1,
        "local.lr": 0.1,
        "local.optimizer": "sgd",
        "rounds": 20,
    }
    assert run.results == result(20)
    assert run.get("parent") == "runs/before"
    assert run.get("data_sha256") == "d" * 64
    assert run.get("nothing of the kind") is None


def test_an_unfinished_run_has_what_it_measured_last(tmp_path: Path) -> None:
    simulated = summarize(write_run(tmp_path / "simulated", simulated_run(6, 20, end=False)))
    assert simulated.status == "unfinished"
    assert simulated.results["test_accuracy"] == pytest.approx(0.95 - 0.85 * math.exp(-6 / 4))
    assert simulated.results["rounds"] == 6
    trained = summarize(write_run(tmp_path / "trained", trained_run(2, 10, end=False)))
    assert trained.results["steps"] == 20
    assert summarize(write_run(tmp_path / "empty", [])).status == "unfinished"


def test_the_end_before_a_resume_does_not_count(tmp_path: Path) -> None:
    events = [started(), e.RunFinished({"test_accuracy": 0.1}, "interrupted"), e.Resumed(1)]
    path = write_run(tmp_path / "run", events)
    assert (summarize(path).status, summarize(path).results) == ("unfinished", {})
    write_run(tmp_path / "again", [*events, e.RunFinished({"test_accuracy": 0.9})])
    assert summarize(tmp_path / "again").results == {"test_accuracy": 0.9}


def test_runs_that_cannot_be_read_are_named_and_do_not_hide_the_others(tmp_path: Path) -> None:
    for name in ("good", "corrupt", "other"):
        write_run(tmp_path / name, trained_run(1, 2))
    log = tmp_path / "corrupt" / "events.jsonl"
    log.write_text("".join(["{]\n", *log.read_text().splitlines(keepends=True)]))
    log = tmp_path / "other" / "events.jsonl"
    log.write_text(log.read_text().replace('{"v":1', '{"v":3'))
    runs, errors = read_runs(find_runs(tmp_path))
    assert [run.name for run in runs] == ["good"]
    assert [re.sub(r"^.*/(\w+)/events.jsonl, ", r"\1 ", str(error).splitlines()[0]) for error in errors] == [
        "corrupt line 1: the line is not JSON (Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1))",
        "other line 1: the run has schema version 3",
    ]


# What explains a metric


def sweep() -> list[RunSummary]:
    """The metric rises with `lr`, a little with one algorithm, and has nothing to do with `seed`."""
    runs = []
    for index, (lr, algorithm, seed) in enumerate(
        itertools.product([0.01, 0.03, 0.1, 0.3], ["fedavg", "fedprox", "scaffold"], [0, 1])
    ):
        accuracy = 0.6 + 0.1 * math.log10(lr / 0.01) + 0.01 * (algorithm == "scaffold")
        settings = {"lr": lr, "algorithm": algorithm, "model": "mlp"}
        runs.append(
            RunSummary(
                Path(str(index)),
                str(index),
                settings=settings,
                results={"test_accuracy": accuracy},
                origin={"seed": seed},
            )
        )
    return runs


def test_the_setting_that_decides_comes_first() -> None:
    found = {item.setting: item for item in explain(sweep(), "test_accuracy")}
    assert list(found) == ["lr", "algorithm", "seed"]  # the model is the same everywhere
    assert found["lr"].values == 4
    assert found["lr"].importance > 10 * found["algorithm"].importance > 10 * abs(found["seed"].importance)
    assert found["algorithm"].rank_correlation is None  # three names have no order
    assert found["seed"].rank_correlation == pytest.approx(
        0.0, abs=1e-12
    )  # each accuracy comes with both seeds


def test_the_rank_correlation_is_spearmans() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [10.0, 30.0, 20.0, 60.0, 50.0, 40.0]
    runs = [
        RunSummary(Path(str(i)), str(i), settings={"x": a}, results={"y": b})
        for i, (a, b) in enumerate(zip(x, y, strict=True))
    ]
    squares = 0 + 1 + 1 + 4 + 0 + 4  # of the differences of the ranks
    (found,) = explain(runs, "y")
    assert found.rank_correlation == pytest.approx(1 - 6 * squares / (6 * 35))


def test_a_yes_or_no_setting_and_a_missing_one_can_be_ranked() -> None:
    runs = [
        RunSummary(
            Path(str(i)),
            str(i),
            settings={"masks": i % 2 == 0} | ({"mu": 0.1} if i < 3 else {}),
            results={"y": float(i % 2)},
        )
        for i in range(6)
    ]
    found = {item.setting: item for item in explain(runs, "y")}
    assert found["masks"].rank_correlation == pytest.approx(-1.0)
    assert found["mu"].values == 2


def test_a_metric_that_never_changes_has_no_explanation() -> None:
    runs = [RunSummary(Path(str(i)), str(i), settings={"lr": i}, results={"y": 1.0}) for i in range(6)]
    (found,) = explain(runs, "y")
    assert found.rank_correlation is None
    assert found.importance == 0.0


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (sweep()[:4], "4 of 4 runs have 'test_accuracy'"),
        (RUNS * 2, "4 of 8 runs have 'test_accuracy'"),  # NaN and missing ones do not count
        ([sweep()[0]] * 6, "no setting differs"),
    ],
)
def test_too_little_to_explain_with_is_an_error(runs: list[RunSummary], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        explain(runs, "test_accuracy")


# The plot


def lines_of(
    runs: list[tuple[str, dict[str, object]]], axes: list[str]
) -> dict[str, list[tuple[float, float]]]:
    """The points of each run's line, by the run's name."""
    (figure,) = parallel_coordinates(runs, axes, "y").figures
    found = {}
    for line in ET.fromstring(figure.markup).iter("polyline"):
        name = str(line.findtext("title")).splitlines()[0]
        found[name] = [(float(x), float(y)) for x, y in (p.split(",") for p in line.attrib["points"].split())]
    return found


def test_each_run_is_a_line_through_its_values() -> None:
    runs: list[tuple[str, dict[str, object]]] = [
        ("low", {"lr": 0.001, "algorithm": "a", "y": 1.0}),
        ("middle", {"lr": 0.01, "algorithm": "b", "y": 2.0}),
        ("high", {"lr": 0.1, "algorithm": "a", "y": 3}),
        ("none", {"lr": None, "algorithm": "b", "y": math.nan}),
    ]
    lines = lines_of(runs, ["lr", "algorithm"])
    assert list(lines) == ["low", "middle", "high", "none"]
    x = [point[0] for point in lines["low"]]
    assert x == sorted(x)
    assert all([point[0] for point in line] == x for line in lines.values())
    bottom, middle, top = (lines[name][0][1] for name in ("low", "middle", "high"))
    assert bottom > middle > top  # SVG counts from above
    assert middle == pytest.approx((bottom + top) / 2)  # two decades: the axis is logarithmic
    assert lines["none"][0][1] == bottom
    assert lines["middle"][2][1] == pytest.approx((lines["low"][2][1] + lines["high"][2][1]) / 2)
    assert lines["low"][1][1] == lines["high"][1][1] != lines["middle"][1][1]


def test_names_of_runs_and_settings_are_text_in_the_plot() -> None:
    evil = "</title><script>"
    (figure,) = parallel_coordinates([(evil, {evil: evil, "y": 1.0})], [evil], "y").figures
    assert "<script" not in figure.markup
    assert json.dumps(evil) in json.dumps([line.text for line in ET.fromstring(figure.markup).iter("text")])
