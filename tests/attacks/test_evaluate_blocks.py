"""What stands in a report beside the ball: source models, natural changes, detectors, certificates."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mycelia.attacks import FGSM, as_model
from mycelia.attacks.defences import CertifiedShare
from mycelia.attacks.detectors import NOT_ADAPTIVE, DetectorReport, roc
from mycelia.attacks.evaluate import SUITES, evaluate
from mycelia.attacks.report_parts import parts_of
from mycelia.attacks.robustness_report import Report
from mycelia.attacks.threat import Threat
from mycelia.engine.errors import ConfigError
from mycelia.engine.report.part import Section

THREAT = Threat("linf", 0.01)


class Corner(nn.Module):
    """Class 1 where the first pixel of the first row is above half of the largest value."""

    def __init__(self, top: float = 1.0) -> None:
        super().__init__()
        self.top = top

    def forward(self, x: Tensor) -> Tensor:
        side = x.flatten(1)[:, :1] / self.top - 0.5
        return torch.cat([-side, side], 1) + 0 * x.flatten(1).sum(1, keepdim=True)


@pytest.fixture
def small_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite "full" with two cheap attacks."""
    monkeypatch.setitem(SUITES, "full", (("FGM", {}), ("Transfer", {})))  # type: ignore[arg-type]


def bright(n: int = 20, top: float = 1.0) -> tuple[Tensor, Tensor]:
    x = torch.full((n, 1, 8, 8), top)
    x[:, 0, 7, 7] *= torch.linspace(0.9, 1, n)  # equal rows would get equal noise
    return x, torch.ones(n, dtype=torch.int64)


def sections(report: Report) -> dict[str, Section | None]:
    facts = json.loads(json.dumps(report.to_json(), allow_nan=False))
    return {part.name: part.section() for part in parts_of(facts)}


def cells(section: Section | None) -> str:
    assert section is not None
    return "\n".join(" | ".join(row) for table in section.tables for row in table.rows)


def test_transfer_needs_source_models() -> None:
    x, y = bright(2)
    report = evaluate(Corner(), x, 1 - y, THREAT, "full")  # all wrong from the start: nothing runs
    assert {line.name: line.reason for line in report.attacks}["Transfer"].startswith("no source models")
    for suite in ("quick", (FGSM(),)):
        with pytest.raises(ConfigError, match="source models for"):
            evaluate(Corner(), x, y, THREAT, suite, sources=[Corner()])


@pytest.mark.usefixtures("small_full")
def test_transfer_runs_from_source_models() -> None:
    x, y = bright(2)
    one = evaluate(Corner(), x, y, THREAT, "full", sources=nn.Sequential(nn.Identity(), Corner()))
    assert one.attacks[1].settings["source_models"] == ["Sequential"]
    report = evaluate(Corner(), x, y, THREAT, "full", sources=[Corner(), Corner(2.0)])
    assert report.attacks[1].broken == 0
    assert report.attacks[1].settings["source_models"] == ["Corner", "Corner"]
    assert report.flag("transfer_wins").state == "pass"


@pytest.mark.usefixtures("small_full")
@pytest.mark.parametrize("top", [1.0, 4.0])
def test_the_full_suite_measures_what_lies_beside_the_ball(top: float) -> None:
    """A turn brings black into the corner of a white image; noise has to be half of the range to do that."""
    x, y = bright(top=top)
    report = evaluate(Corner(top), x, y, Threat("linf", 0.01, bounds=(0.0, top)), "full")
    found = report.to_json()["broader"]
    assert found["spatial"]["accuracy"] == 0.0
    assert found["spatial"]["accuracy_ci95"][1] < 0.2
    assert (found["spatial"]["grid"], found["spatial"]["n"]) == (31 * 5 * 5, 20)
    assert [at["sigma"] for at in found["gaussian"]] == pytest.approx(
        [top * s for s in (0.05, 0.1, 0.2, 0.3, 0.5)]
    )
    assert found["gaussian"][0]["accuracy"] == 1.0  # ten standard deviations
    assert 0.5 < found["gaussian"][-1]["accuracy"] <= 1.0  # one: 0.84
    assert len(found["corruptions"]["each"]) == 13 * 5
    assert found["corruptions"]["clean_accuracy"] == 1.0
    text = report.text()
    assert "worst of 775 rotations to 30° with shifts to 3 pixels: 0.00 %" in text
    assert "mean over corruptions" in text
    shown = cells(sections(report)["broader"])
    assert "Worst rotation to 30° and shift to 3 pixels | 0.00 %" in shown
    assert "Mean over corruptions" in shown


@pytest.mark.usefixtures("small_full")
def test_what_is_not_measured_has_its_reason() -> None:
    x, y = bright(3)
    channels_last = x.movedim(1, -1)

    def broader(model: Any, inputs: Tensor, suite: Any = "full", **more: Any) -> dict[str, Any]:
        report = evaluate(model, inputs, y, more.pop("threat", THREAT), suite, **more)
        assert "Beside the ball" in [section.title for section in sections(report).values() if section]
        found: dict[str, Any] = report.to_json()["broader"]
        return found

    flat = broader(Corner(), x.flatten(1))
    assert [flat[key] for key in ("corruptions", "spatial", "gaussian")] == [None] * 3
    assert "images of four axes" in flat["gaussian_reason"]
    assert "images of four axes" in broader(Corner(), x, layout=None)["spatial_reason"]
    assert "full" in broader(Corner(), x, (FGSM(),))["corruptions_reason"]
    assert broader(Corner(), channels_last, layout="nhwc")["spatial"]["accuracy"] == 0.0
    endless = broader(Corner(), x, threat=Threat("linf", 0.01, bounds=(-torch.inf, torch.inf)))
    assert "infinite bounds" in endless["corruptions_reason"]
    assert endless["gaussian"][0]["sigma"] == 0.05
    labels = broader(as_model(lambda given: Corner()(given).argmax(1), "labels"), x)
    assert "label" in labels["spatial_reason"]
    assert labels["gaussian"][0]["accuracy"] == 1.0
    with pytest.raises(ConfigError, match="layout 'chw'"):
        evaluate(Corner(), x, y, THREAT, "quick", layout="chw")  # type: ignore[arg-type]


def test_detectors_and_certificates_are_part_of_a_report() -> None:
    x, y = bright(3)
    curve = roc(torch.tensor([0.0, 0.1, 0.4]), torch.tensor([0.3, 0.8]))
    known = DetectorReport("Vote", 0.1, 0.35, 3, 1, 2, 1, curve)
    both = DetectorReport("Similar", 0.1, 0.35, 3, 1, 2, 1, curve, 8, 6, 0.1, "PGD")
    shares = (CertifiedShare(0.25, 3, 0, 4, 400, 0.001), CertifiedShare(0.5, 1, 2, 4, 400, 0.001))
    report = evaluate(Corner(), x, y, THREAT, (FGSM(),), detectors=[known, both], certified=shares)
    found = report.to_json()
    assert found["detectors"] == [known.to_json(), both.to_json()]
    assert found["certified"] == [share.to_json() for share in shares]
    text = report.text()
    assert NOT_ADAPTIVE in text
    assert "PGD on model and detector together at eps 0.1: 6 of 8" in text
    assert "radius 0.25     75.00 %" in text
    assert "2 of 4 abstained, 400 draws, alpha 0.001" in text
    shown = sections(report)
    assert NOT_ADAPTIVE in cells(shown["detectors"])
    assert "75.00 % [40.93, 92.85]" in cells(shown["detectors"])
    assert "0.5 | 25.00 %" in cells(shown["certified"])
    without = evaluate(Corner(), x, y, THREAT, (FGSM(),))
    assert without.to_json()["detectors_reason"] == "no detector was evaluated"
    assert without.to_json()["certified_reason"] == "no certificate was asked for"
    assert sections(without)["detectors"] is None
    assert sections(without)["certified"] is None
