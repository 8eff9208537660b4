"""`mycelia attack` and `mycelia evaluate` on a model that `mycelia train` made."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from mycelia.cli.main import app
from mycelia.cli.output import THRESHOLD_NOT_MET, run_command
from mycelia.engine.data import load
from mycelia.engine.models import build

pytestmark = pytest.mark.filterwarnings("default::UserWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MLP on the digits."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = ["model.hidden=[32]", "epochs=15", "plan=eager"]
    assert (
        mycelia("train", *(part for each in settings for part in ("-s", each)), "--out", str(folder))[0] == 0
    )
    return folder


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def mycelia(*arguments: str) -> tuple[int, str]:
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = run_command(typer.main.get_command(app()), arguments)
    return code, printed.getvalue()


def as_json(*arguments: str) -> Any:
    code, printed = mycelia(*arguments, "--format", "json")
    assert code == 0
    return json.loads(printed)


BALL = ("--norm", "linf", "--eps", "0.1", "--limit", "40")


def test_an_attack_says_what_became_of_every_example(run: Path, tmp_path: Path) -> None:
    found = as_json(
        "attack", "pgd", "--model", str(run), *BALL, "--save", "adv.safetensors", "--quantise", "8"
    )
    assert set(found) >= {
        "schema", "attack", "model", "data", "threat", "counts", "clean_accuracy", "robust_accuracy",
        "success_rate", "distance", "worst_norm", "outside_ball", "verification_mismatches", "survive_8bit",
        "forward", "backward", "seconds", "seed", "device", "dtype", "versions", "run_dir",
    }  # fmt: skip
    counts = found["counts"]
    assert sum(counts.values()) == found["data"]["n"] == 40
    assert counts["broken"] > 0
    assert found["outside_ball"] == 0
    assert found["robust_accuracy"] == counts["held"] / 40
    low, high = found["robust_accuracy_ci95"]
    assert low <= found["robust_accuracy"] <= high
    summary = json.loads((run / "report.json").read_text())
    assert found["model"]["sha256"] == summary["run"]["result"]["model_sha256"]
    saved, clean = load_file("adv.safetensors"), torch.from_numpy(load("digits").test.inputs[:40])
    assert float((saved["x_adv"] - clean).abs().max()) <= 0.1 * (1 + 1e-6)
    assert int((saved["status"] == 2).sum()) == counts["broken"]
    assert (Path(found["run_dir"]) / "attack.json").exists()


def test_several_radii_and_a_fraction(run: Path) -> None:
    first, second = as_json(
        "attack",
        "fgsm",
        "--model",
        str(run),
        "--norm",
        "linf",
        "--limit",
        "30",
        "--eps",
        "16/255",
        "--eps",
        "0",
    )
    assert (first["threat"]["eps"], second["threat"]["eps"]) == (0, 16 / 255)
    assert first["counts"]["broken"] == 0  # nothing can change


def test_an_evaluation_its_report_and_what_is_required_of_it(run: Path, tmp_path: Path) -> None:
    given = ("evaluate", "--model", str(run), *BALL, "--suite", "quick", "--out", "checked")
    require = ("--require", "ledger.robust_accuracy>=0", "--require", "ledger.held>=41")
    code, printed = mycelia(*given, *require, "--format", "json")
    assert code == THRESHOLD_NOT_MET
    facts = json.loads(printed)
    assert [each["met"] for each in facts["requirements"]] == [True, False]
    assert facts["ledger"]["n"] == 40
    assert {flag["id"] for flag in facts["flags"]} == set("abcdefghijklmnopqrstu")
    assert facts["run_dir"] == "checked"
    again = as_json("report", "checked")
    assert again["ledger"] == facts["ledger"]
    code, page = mycelia("report", "checked", "--format", "html")
    html = Path(page.strip()).read_text()
    for heading in ("Threat model", "Ledger", "Flags", "Robust accuracy against eps", "caveats"):
        assert heading in html
    code, text = mycelia("report", "checked")
    assert "1. Threat model" in text
    assert f"{facts['ledger']['held']} held" in text


def test_examples_of_the_target_class_are_left_out(run: Path) -> None:
    found = as_json("attack", "bim", "--model", str(run), *BALL, "--goal", "target:3", "--steps", "2")
    classes = load("digits").test.targets[:40]
    assert found["data"]["n"] == sum(found["counts"].values()) == int((classes != 3).sum()) < 40
    assert found["robust_accuracy"] is None
    assert found["counts"]["clean_wrong"] == 0


def test_defences_around_a_model_are_attacked_through(run: Path) -> None:
    """Stages get surrogates and averages; behind a transform of outputs labels alone count."""
    model = ("--model", str(run), "--norm", "linf", "--eps", "0.1", "--limit", "20")
    bare = as_json("evaluate", *model, "--suite", "quick", "--steps", "5")
    pgd = next(each for each in bare["attacks"] if each["name"] == "PGD")
    assert (bare["defence"], pgd["settings"]["steps"]) == ([], 5)
    around = ("--defence", "bitdepth:bits=2", "--defence", "gaussiannoise:sigma=0.01")
    found = as_json("evaluate", *model, "--suite", "quick", "--steps", "5", *around)
    assert found["defence"] == ["bitdepth:bits=2", "gaussiannoise:sigma=0.01"]
    assert found["adaptive"]["surrogate"] == "BPDA through BitDepth"
    assert found["adaptive"]["eot"] == 20
    assert found["ledger"]["broken"] > 0
    hidden = as_json("evaluate", *model, "--suite", "quick", "--defence", "rounded:decimals=1")
    assert next(each for each in hidden["attacks"] if each["name"] == "PGD")["broken"] is None
    assert any("label" in caveat for caveat in hidden["caveats"])


@pytest.mark.slow
def test_a_transfer_attack_has_the_source_models_that_are_named(run: Path) -> None:
    arguments = ("evaluate", "--model", str(run), "--norm", "linf", "--eps", "0.1", "--limit", "6")
    found = as_json(*arguments, "--suite", "full", "--source", str(run), "--steps", "3")
    transfer = next(each for each in found["attacks"] if each["name"] == "Transfer")
    assert transfer["broken"] > 0


def test_an_evaluation_that_was_stopped_goes_on(run: Path, tmp_path: Path) -> None:
    Path("suite.toml").write_text('[[attack]]\nname = "pgd"\nsteps = 5\n[[attack]]\nname = "fgsm"\n')
    whole = as_json("evaluate", "--model", str(run), *BALL, "--suite", "suite.toml", "--out", "kept")
    assert [line["name"] for line in whole["attacks"]] == ["PGD", "FGSM"]
    assert mycelia("evaluate", "--resume", "kept")[0] != 0  # it is over
    cells = {path: path.stat().st_mtime_ns for path in Path("kept", "cells").iterdir()}
    assert len(cells) >= 2
    Path("kept", "evaluation.json").unlink()  # it is written last
    first = next(iter(cells))
    first.unlink()
    again = as_json("evaluate", "--resume", "kept")
    for facts in (whole, again):
        facts["ledger"].pop("seconds")
    assert again["ledger"] == whole["ledger"]
    found = {path: path.stat().st_mtime_ns for path in Path("kept", "cells").iterdir()}
    assert found.keys() == cells.keys()
    assert [path for path in cells if found[path] != cells[path]] == [first], "only what was missing is run"


def test_a_model_by_name_with_weights(tmp_path: Path) -> None:
    save_file(build("mlp", (1, 8, 8), 10, seed=1).state_dict(), tmp_path / "w.safetensors")
    found = as_json(
        "attack", "fgsm", "--model", "mlp", "--weights", "w.safetensors", "--data", "digits", *BALL
    )
    assert found["model"]["name"] == "mlp"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("attack", "nonsense", "--model", "RUN", *BALL), "nonsense"),
        (("attack", "pgd", "--model", "nowhere", *BALL), "--data"),
        (("attack", "pgd", "--model", "mlp", "--data", "digits", *BALL), "--weights"),
        (("attack", "pgd", "--model", "RUN", "--norm", "linf", "--eps", "much"), "no number"),
        (("attack", "pgd", "--model", "RUN", "--norm", "linf", "--eps", "-1"), "eps"),
        (("attack", "pgd", "--model", "RUN", "--norm", "linf", "--eps", "0.1", "--bounds", "1"), "bounds"),
        (("attack", "pgd", "--model", "RUN", *BALL, "--bounds", "0,0.5"), "bounds"),
        (("attack", "carliniwagner", "--model", "RUN", *BALL), "norm"),
        (("attack", "pgd", "--model", "RUN", *BALL, "--data", "diabetes"), "classes"),
        (("evaluate", "--model", "RUN", *BALL, "--suite", "all"), "all"),
        (("evaluate", "--model", "RUN", "--eps", "0.1"), "--norm"),
        (("evaluate", "--resume", "RUN"), "nothing to go on with"),
        (("evaluate", "--resume", "RUN", "--norm", "l2"), "--resume"),
        (("evaluate", "--model", "RUN", *BALL, "--suite", "missing.toml"), "cannot be read"),
        (("evaluate", "--model", "RUN", *BALL, "--require", "robust"), "requirement"),
        (("evaluate", "--model", "RUN", *BALL, "--adaptive", "os:getcwd"), "str"),
        (("evaluate", "--model", "RUN", *BALL, "--weights", "w.safetensors"), "--weights"),
        (("evaluate", "--model", "RUN", *BALL, "--source", "RUN"), "--suite full"),
        (("attack", "pgd", "--model", "RUN", *BALL, "--save", "none/x.safetensors"), "no folder none"),
        (("attack", "pgd", "--model", "RUN", *BALL, "--save", "/dev/null"), "no ordinary file"),
        (("attack", "pgd", "--model", "RUN", *BALL, "--goal", "target:99"), "class 99"),
        (("attack", "pgd", "--model", "no/where", *BALL), "there is no no/where"),
        (("evaluate", "--resume", "RUN", "--limit", "5", "--suite", "quick"), "suite, limit"),
        (("evaluate", "--model", "RUN", *BALL, "--defence", "magic"), "magic"),
        (("evaluate", "--model", "RUN", *BALL, "--defence", "jpeg:quality"), "KEY=VALUE"),
        (("evaluate", "--model", "RUN", *BALL, "--defence", "jpeg:quality=200"), "quality"),
        (("evaluate", "--model", "RUN", *BALL, "--defence", "jpeg:quality=high"), "quality"),
        (("evaluate", "--model", "RUN", *BALL, "--defence", "jpeg:bits=3"), "bits"),
        (
            ("evaluate", "--model", "RUN", *BALL, "--defence", "rounded", "--defence", "jpeg"),
            "stages come first",
        ),
    ],
)
def test_what_does_not_fit_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, _ = mycelia(*(str(run) if each == "RUN" else each for each in arguments))
    assert code not in (0, None)
    assert said in capsys.readouterr().err
    assert not Path("runs").exists() or not any(Path("runs").iterdir()), "nothing is left behind"
