"""The report: its facts are those of the events, and its page is one whole file."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycelia.engine import events as e
from mycelia.engine.errors import ConfigError, DataError, MyceliaError
from mycelia.engine.report import Figure, Report, Section, build_report, default_parts
from mycelia.engine.report.curves import split_metric
from mycelia.engine.report.page import tiles
from mycelia.engine.report.series import Series
from mycelia.engine.report.spread import worst_decile
from mycelia.engine.report.text import duration, number, percent, size
from mycelia.engine.run import Run
from tests.engine.run_factory import CONFIG, START, result, simulated_run, started, trained_run, write_run

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000a49444154789c6360000000020001e221bc330000000049454e44ae426082"
)


def report(path: Path, events: Sequence[e.Event], **options: Any) -> Report:
    return build_report(Run.open(write_run(path, events)), **options)


class Page(HTMLParser):
    """What a browser would load and show."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.sections: list[str] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attributes)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "section":
            self.sections.append(str(values["id"]))
        self.links += [str(values[name]) for name in ("href", "src", "xlink:href") if values.get(name)]

    def handle_data(self, data: str) -> None:
        self.text += data


def page(made: Report) -> Page:
    return Page(made.html.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report(tmp_path_factory.mktemp("simulated") / "run", simulated_run(20, 100))


def test_a_federation_has_every_section_in_order(simulated: Report) -> None:
    assert page(simulated).sections == [
        "curves", "spread", "privacy", "partition", "outcomes", "cost", "warnings", "setting",
    ]  # fmt: skip


def test_the_page_is_one_file_that_loads_nothing(simulated: Report) -> None:
    html = simulated.html.read_text(encoding="utf-8")
    shown = page(simulated)
    assert not shown.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert all(link.startswith(("#", "data:image/")) for link in shown.links)
    assert not re.findall(r"url\((?!#)", html)
    assert "@import" not in html
    assert set(re.findall(r"https?://[^\"' )]+", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_ids_are_unique_and_links_lead_somewhere(simulated: Report) -> None:
    shown = page(simulated)
    assert len(shown.ids) == len(set(shown.ids))
    assert {link[1:] for link in shown.links if link.startswith("#")} <= set(shown.ids)


def test_plots_take_their_colours_from_the_page(simulated: Report) -> None:
    html = simulated.html.read_text(encoding="utf-8")
    plots = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert not re.findall(r"#[0-9a-f]{6}\b", plots.replace("#0d8a84", ""))
    assert set(re.findall(r"var\((--[\w-]+)\)", plots)) <= set(re.findall(r"(--[\w-]+):", html))
    assert "prefers-color-scheme: dark" in html


def test_the_facts_of_a_federation(simulated: Report) -> None:
    facts = json.loads(simulated.json.read_text(encoding="utf-8"))
    assert facts["name"] == "run"
    assert facts["run"] | {"result": None} == {
        "command": "simulate",
        "status": "finished",
        "error": "",
        "started": "2023-11-14T22:13:20Z",
        "seconds": 42.0,
        "resumes": 0,
        "unit": "round",
        "done": 20,
        "total": 20,
        "seed": 7,
        "plan": "eager",
        "data_sha256": "d" * 64,
        "partition_sha256": "a" * 64,
        "parent": "",
        "result": None,
    }
    assert facts["run"]["result"] == result(20)
    cost = facts["cost"]
    rounds = [event for event in simulated_run(20, 100) if isinstance(event, e.Round)]
    assert cost["bytes_up"] == sum(event.bytes_up for event in rounds)
    assert cost["bytes_down"] == 20 * 2_520_000
    apart = [sum(s for phase, s in event.seconds.items() if phase != "evaluate") for event in rounds]
    assert cost["seconds_per_round"] == pytest.approx(statistics.fmean(apart[1:]))
    assert list(cost["seconds"]) == ["select", "configure", "train", "merge", "evaluate"]
    assert cost["peak_memory_bytes"] == 330_000_000
    outcomes = facts["outcomes"]
    assert outcomes["total"] == {"accepted": 240 - 6 - 4 - 10, "dropped": 6, "rejected": 4, "unused": 10}
    assert [(cause["cause"], cause["count"]) for cause in outcomes["causes"]] == [
        ("the device went offline", 6),
        ("the update is not finite", 4),
    ]
    assert facts["privacy"]["epsilon"] == pytest.approx(0.8 * math.sqrt(20))
    assert facts["warnings"]["warnings"] == [
        {"message": "client 17 has one example and no test set", "who": "partition", "count": 1}
    ]
    assert facts["setting"]["config_toml"] == CONFIG
    assert facts["setting"]["environment"]["machine"] == {"cores": 2}


def test_curves_are_the_evaluations(simulated: Report) -> None:
    curves = {(c["metric"], c["split"]): c for c in simulated.facts["curves"]["curves"]}
    log = simulated_run(20, 100)
    test = curves["accuracy", "test"]
    evaluations = [event for event in log if isinstance(event, e.Evaluation)]
    assert test["x"] == list(range(21))
    assert test["y"] == [event.metrics["accuracy"] for event in evaluations]
    assert test["seconds"] == pytest.approx([event.t - START for event in evaluations])
    assert test["last"] == test["max"] == test["y"][-1]
    simulated_seconds = [event.simulated_seconds for event in log if isinstance(event, e.Round)]
    ends = [sum(s for s in simulated_seconds[:n] if s is not None) for n in range(1, 21)]
    assert test["simulated_seconds"][0] is None
    assert test["simulated_seconds"][1:] == pytest.approx(ends)
    assert curves["loss", "training cohort"]["x"] == list(range(1, 21))
    assert ("update_norm", "training cohort") in curves


def test_the_spread_names_the_worst_clients(simulated: Report) -> None:
    spread = [event for event in simulated_run(20, 100) if isinstance(event, e.Spread)]
    values = list(spread[-1].metrics["accuracy"])
    measure = simulated.facts["spread"]["metrics"]["accuracy"]
    assert measure["worst_decile"] == pytest.approx(statistics.fmean(sorted(values)[:10]))
    assert measure["worst_clients"] == sorted(range(100), key=values.__getitem__)[:10]
    assert measure["median"] == statistics.median(values)
    assert measure["ordered"] == sorted(values)
    assert [point[0] for point in measure["course"]] == [5, 10, 15, 20]


def test_the_partition_is_drawn_as_it_is(simulated: Report) -> None:
    partition = simulated.facts["partition"]
    assert partition["size"]["max"] == max(partition["sizes"])
    assert [sum(column) for column in zip(*partition["matrix"], strict=True)] == partition["sizes"]
    assert "100 clients, dealt out by “dirichlet”" in page(simulated).text


def test_a_central_training_shows_what_it_has(tmp_path: Path) -> None:
    made = report(
        tmp_path / "run",
        trained_run(5, 40),
    )
    assert page(made).sections == ["curves", "notes", "setting"]
    curves = {(c["metric"], c["split"]): c for c in made.facts["curves"]["curves"]}
    assert curves["accuracy", "test"]["x"] == [40, 80, 120, 160, 200]
    assert curves["loss", "train"]["unit"] == "step"
    assert len(curves["lr", "train"]["y"]) == 200
    assert made.facts["run"]["done"] == made.facts["run"]["total"] == 200
    assert made.facts["notes"]["histograms"][0]["counts"] == [5, 40, 12, 3]


def test_a_crashed_run_still_reports(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", simulated_run(7, 40, end=False))
    with (path / "events.jsonl").open("ab") as file:
        file.write(b'{"v":1,"t":17000')
    made = build_report(Run.open(path))
    assert made.facts["run"]["status"] == "unfinished"
    assert "This run is unfinished" in page(made).text
    assert "It reached round 7 of 7." in page(made).text
    assert made.facts["run"]["result"]["test_accuracy"] == pytest.approx(0.95 - 0.85 * math.exp(-7 / 4))


@pytest.mark.parametrize("events", [[], [started()]], ids=["nothing", "a start"])
def test_a_run_that_died_at_once_still_reports(tmp_path: Path, events: list[e.Event]) -> None:
    made = report(tmp_path / "run", events)
    assert made.facts["run"]["status"] == "unfinished"
    assert "unfinished" in page(made).text


@pytest.mark.parametrize(
    ("status", "words"), [("failed", "This run failed."), ("interrupted", "with --resume")]
)
def test_how_a_run_ended_is_said_first(tmp_path: Path, status: str, words: str) -> None:
    made = report(tmp_path / "run", [started(), e.RunFinished(status=status, error="all clients failed")])
    assert words in page(made).text
    assert ("all clients failed" in page(made).text) == (status == "failed")


def test_a_resume_leaves_no_double_points_and_no_pause(tmp_path: Path) -> None:
    made = report(
        tmp_path / "run",
        [
            started(t=1000.0),
            *(e.Evaluation({"loss": 9.0 - r}, round=r, t=1000.0 + r) for r in (1, 2, 3)),
            e.RunFinished(status="interrupted", t=1003.5),
            e.Resumed(2, t=5000.0),
            *(e.Evaluation({"loss": 5.0 - r}, round=r, t=5000.0 + r) for r in (3, 4)),
            e.RunFinished({}, t=5005.0),
        ],
    )
    (curve,) = made.facts["curves"]["curves"]
    assert (curve["x"], curve["y"]) == ([1, 2, 3, 4], [8.0, 7.0, 2.0, 1.0])
    # Two seconds before the checkpoint, then three and four after the resume.
    assert curve["seconds"] == [1.0, 2.0, 5.0, 6.0]
    assert made.facts["run"]["seconds"] == 7.0
    assert made.facts["run"]["status"] == "finished"
    assert "resumed 1 time" in page(made).text


def test_text_from_the_run_is_text_in_the_page(tmp_path: Path) -> None:
    evil = '"><script>alert("x")</script>'
    made = report(
        tmp_path / "run",
        [
            started(command=evil),
            e.Outcomes(1, [e.Outcome(evil, 1, evil, evil, evil, evil)]),
            e.Evaluation({evil: 1.0, "accuracy": 0.5}, split=evil, round=1),
            e.Scalars(1, {evil: 2.0}),
            e.Round(1, seconds={evil: 1.0}, metrics={evil: 1.0}),
            e.Spread({evil: [0.1, 0.2]}, [evil, evil]),
            e.Partition(evil, 2, [1, 2], [evil, "<b>"], [[1, 0], [0, 2]], {evil: 1.0}),
            e.Histogram(evil, 1, [0, 1], [3]),
            e.Image(evil, 1, evil, evil),
            e.Text(evil, 1, evil),
            e.WarningRaised(evil, evil),
            e.RunFinished({evil: evil, "test_loss": 1.0}),
        ],
        out=tmp_path / "out",
    )
    shown = page(made)
    assert not shown.tags & {"script", "b"}
    assert len(shown.ids) == len(set(shown.ids))


def test_numbers_that_are_not_finite_are_shown(tmp_path: Path) -> None:
    events: list[e.Event] = [started(total=3)]
    for r, loss in enumerate([2.0, math.inf, math.nan], 1):
        events += [
            e.Evaluation({"loss": loss, "accuracy": math.nan}, round=r),
            e.Round(r, {"train": 1.0}, metrics={"loss": loss}),
            e.Spread({"accuracy": [math.nan, math.nan], "loss": [1.0, math.nan]}, [0, 1], round=r),
            e.Privacy(math.inf, 1e-5, round=r),
        ]
    made = report(tmp_path / "run", [*events, e.RunFinished({"test_loss": math.nan})])
    written = json.loads(made.json.read_text(), parse_constant=pytest.fail)
    assert written["run"]["result"]["test_loss"] == "NaN"
    assert written["spread"]["metrics"].keys() == {"loss"}
    assert "NaN" in page(made).text


@pytest.mark.parametrize("value", [1e-300, -5.0, 0.0, 1e300])
def test_extreme_values_can_be_drawn(tmp_path: Path, value: float) -> None:
    events = [e.Evaluation({"accuracy": value, "loss": value}, round=r, t=START) for r in range(3)]
    made = report(tmp_path / "run", [started(), *events, e.Histogram("h", 1, [value, value + 1], [0])])
    assert "curve-loss-x" in page(made).ids


def test_the_curves_of_a_long_run_stay_small(tmp_path: Path) -> None:
    parts = default_parts(Run.open(write_run(tmp_path / "run", [])))
    for step in range(1, 100_001):
        for part in parts:
            part.add(e.Scalars(step, {"loss": 1 / step}), step / 10)
    facts = next(part.facts() for part in parts if part.name == "curves")
    assert facts is not None
    (curve,) = facts["curves"]
    assert len(curve["y"]) <= 1001
    assert (curve["x"][-1], curve["last"], curve["max"]) == (100_000, 1e-5, 1.0)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(2, 20))
def test_thinning_a_curve_keeps_its_mean_and_its_ends(values: list[float], limit: int) -> None:
    series = Series(limit)
    for x, value in enumerate(values):
        series.add(x, x / 2, value)
    facts = series.facts()
    assert len(facts["y"]) <= limit + 1
    assert facts["x"][-1] == len(values) - 1
    assert (facts["last"], facts["min"], facts["max"]) == (values[-1], min(values), max(values))
    stride = facts["mean_of"]
    # Every kept point is the mean of `stride` values, the last of what is left over.
    for index, y in enumerate(facts["y"]):
        chunk = values[index * stride : (index + 1) * stride]
        assert y == pytest.approx(statistics.fmean(chunk), abs=1e-6)
        assert facts["seconds"][index] == facts["x"][index] / 2


def test_pictures_of_the_run_are_put_inside_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    path = write_run(
        tmp_path / "run",
        [
            e.Image(name, 1, where)
            for name, where in (("a", "a.png"), ("b", "../secret.png"), ("c", "config.toml"))
        ],
    )
    (path / "a.png").write_bytes(PNG)
    shown = page(build_report(Run.open(path)))
    assert len([link for link in shown.links if link.startswith("data:image/png;base64,")]) == 1
    assert shown.text.count("Not shown.") == 2


def test_another_room_adds_a_part_of_its_own(tmp_path: Path) -> None:
    class Counter:
        name = "attacks"

        def __init__(self) -> None:
            self.count = 0

        def add(self, event: e.Event, seconds: float) -> None:
            self.count += 1

        def facts(self) -> dict[str, int]:
            return {"count": self.count}

        def section(self) -> Section:
            return Section("attacks", "Attacks", figures=(Figure("f", "<p>markup</p>", "a caption"),))

    run = Run.open(write_run(tmp_path / "run", trained_run(1, 5)))
    made = build_report(run, parts=[*default_parts(run), Counter()])
    assert made.facts["attacks"] == {"count": 9}
    assert page(made).sections[-1] == "attacks"


def test_a_report_is_made_again_in_place(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", trained_run(1, 5))
    first = build_report(Run.open(path)).html.read_text()
    assert build_report(Run.open(path)).html.read_text() == first
    assert sorted(child.name for child in path.iterdir()) == [
        "config.toml",
        "events.jsonl",
        "report.html",
        "report.json",
    ]


def test_a_corrupt_line_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", trained_run(1, 5))
    log = path / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[3] = b"\x00" * 20 + b"\n"
    log.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=r"events\.jsonl, line 4: the line is not JSON"):
        build_report(Run.open(path))
    assert not (path / "report.html").exists()


def test_a_later_event_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", trained_run(1, 5))
    with (path / "events.jsonl").open("a") as file:
        file.write('{"v":2,"t":1.0,"kind":"scalars"}\n')
    with pytest.raises(ConfigError, match="schema version 2"):
        build_report(Run.open(path))


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MyceliaError, match="the report cannot be written"):
        report(tmp_path / "run", trained_run(1, 5), out=tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_accuracy", ("accuracy", "test")),
        ("val/loss", ("loss", "val")),
        ("train_loss", ("loss", "train")),
        ("loss", ("loss", "train")),
        ("testing", ("testing", "train")),
        ("test_", ("test_", "train")),
    ],
)
def test_the_split_of_a_metric_is_read_from_its_name(name: str, expected: tuple[str, str]) -> None:
    assert split_metric(name) == expected


@pytest.mark.parametrize(
    ("values", "lower_is_better", "expected"),
    [
        ([3.0], False, 3.0),
        (list(range(20)), False, 0.5),
        (list(range(20)), True, 18.5),
        (list(range(11)), False, 0.5),
    ],
)
def test_the_worst_decile_is_the_mean_of_the_worst_tenth(
    values: list[float], lower_is_better: bool, expected: float
) -> None:
    assert worst_decile(values, lower_is_better) == expected


def test_numbers_are_readable() -> None:
    values = (0, 12345, 0.01234567, 1.5, 1e-7, 123456.78, 1.25e9, -2.5, math.nan, -math.inf)
    assert [number(x) for x in values] == [
        "0", "12,345", "0.01235", "1.5", "1e−7", "123,457", "1,250,000,000", "−2.5", "NaN", "−∞",
    ]  # fmt: skip
    assert [percent(x) for x in (0.5, 1.0, math.nan)] == ["50.0 %", "100.0 %", "NaN"]
    assert [duration(x) for x in (0, 0.0123, 4.56, 200, 59.999, 3600 * 2 + 300)] == [
        "0 s", "12.3 ms", "4.56 s", "3 min 20 s", "60 s", "2 h 05 min",
    ]  # fmt: skip
    assert [size(x) for x in (0, 999, 1000, 1_234_567, 5e12)] == ["0 B", "999 B", "1 kB", "1.23 MB", "5 TB"]


def test_the_figures_of_the_head_put_accuracy_first_and_skip_what_is_empty() -> None:
    shown = tiles(
        {"workers": 2, "epsilon": None, "run_dir": "x", "test_accuracy": 0.5, "model_sha256": "ab" * 32}
    )
    assert [tile.label for tile in shown] == ["Test accuracy", "Model SHA-256", "Workers"]
    assert shown[1] == ("Model SHA-256", "ababababab…", "ab" * 32)


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [500, 1280])
def test_the_page_fits_its_window(simulated: Report, tmp_path: Path, width: int) -> None:
    """Nothing reaches beyond the window, and no label of a plot beyond its picture."""
    script = """<script>addEventListener("load", () => {
      const out = [];
      const width = document.documentElement.scrollWidth;
      if (width > innerWidth) out.push("page " + width);
      for (const svg of document.querySelectorAll("figure svg")) {
        const box = svg.getBoundingClientRect();
        for (const text of svg.querySelectorAll("text")) {
          const own = text.getBoundingClientRect();
          if (own.left < box.left - 1 || own.right > box.right + 1 || own.bottom > box.bottom + 1)
            out.push(svg.parentElement.parentElement.id + " " + text.textContent);
        }
      }
      document.title = "overflow: " + (out.join(", ") || "none");
    })</script>"""
    html = simulated.html.read_text(encoding="utf-8").replace("</head>", f"{script}</head>")
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},900", "--dump-dom", (tmp_path / "page.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    assert title[1] == "overflow: none"
