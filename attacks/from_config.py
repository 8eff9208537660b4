"""`mycelia attack` and `mycelia evaluate` as functions: from settings to a run folder with what was found."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from mycelia.attacks.attack_report import attack_facts
from mycelia.attacks.base import Attack
from mycelia.attacks.cells import Cells
from mycelia.attacks.config import AttackConfig, EvaluateConfig, TargetConfig
from mycelia.attacks.defences.around import around_model, model_defences
from mycelia.attacks.evaluate import SUITES, Adaptive, evaluate
from mycelia.attacks.model import Model, as_model
from mycelia.attacks.model_files import model_of
from mycelia.attacks.onnx_model import onnx_model
from mycelia.attacks.report_parts import EVALUATION, parts_of
from mycelia.attacks.result import AttackResult
from mycelia.attacks.robustness_report import Report
from mycelia.attacks.suite_file import attack_from, load_suite
from mycelia.attacks.threat import Threat
from mycelia.engine import plain_json
from mycelia.engine.config import Named, load_config, to_toml
from mycelia.engine.data import Dataset, load
from mycelia.engine.environment import describe
from mycelia.engine.errors import ConfigError, DataError
from mycelia.engine.events import Resumed, RunFinished, RunStarted
from mycelia.engine.plugins import chosen, resolve, user_code
from mycelia.engine.report import build_report
from mycelia.engine.report.build import default_parts
from mycelia.engine.run import CONFIG, Run, check_free, is_run
from mycelia.engine.trained import Trained, of_run, of_weights

__all__ = ["Attacked", "Evaluated", "Subject", "attack", "evaluated", "met", "resumed", "subject"]

_COMPARE: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Subject:
    """What is attacked.

    Attributes:
        model: as attacks see it.
        x: inputs [n, …].
        y: classes [n].
        said: name and sha256 of the model.
        data: name, split, n and sha256 of the inputs and classes.
    """

    model: Model
    x: Tensor
    y: Tensor
    said: Mapping[str, Any]
    data: Mapping[str, Any]


def subject(config: TargetConfig) -> Subject:
    """Find the model and the data, and put them together.

    Raises:
        ConfigError: an unknown model or data set, weights missing or not wanted, data without classes.
        DataError: data or weights that are damaged, or of another model.
    """
    path = Path(config.model)
    from_run = path.is_dir()
    if not path.exists() and ("/" in config.model or path.suffix == ".onnx"):
        raise ConfigError(
            f"there is no {config.model}", rule="a run folder, an ONNX file, or a model's name", who="--model"
        )
    if from_run and not is_run(path):
        Run.open(path)  # says what is wrong with it
    if config.weights and (from_run or path.suffix == ".onnx"):
        raise ConfigError(
            f"weights for {config.model}",
            rule="a run folder and an ONNX file bring their own",
            fix="leave out --weights",
            who="--weights",
        )
    if not config.data and not from_run:
        raise ConfigError(
            f"no data for {config.model}",
            rule="only a run knows its data",
            fix="add --data NAME",
            who="--data",
        )
    dataset = _with_classes(load(config.data)) if config.data else None
    if dataset is not None and path.suffix == ".onnx":
        model: Model = onnx_model(path)
        said = {"name": path.name, "sha256": sha256(path.read_bytes()).hexdigest()}
    else:
        trained = _trained(config, path, dataset)
        model, said = as_model(trained.module), {"name": trained.name, "sha256": trained.sha256}
        dataset = _with_classes(trained.dataset)
    part = dataset.test if config.split == "test" else dataset.train
    stop = config.limit or len(part)
    inputs, targets = part.inputs[:stop], part.targets[:stop]
    if targets.ndim != 1:
        raise ConfigError("several targets an example", rule="one class for each", who=dataset.name)
    if config.goal.startswith("target:") and config.goal[7:].isdecimal():
        others = targets != int(config.goal[7:])  # those of the target's class are there already
        inputs, targets = inputs[others], targets[others]
    digest = sha256(inputs.tobytes() + targets.tobytes()).hexdigest()
    return Subject(
        model,
        torch.from_numpy(inputs.copy()),
        torch.from_numpy(targets.astype("int64")),
        said,
        {"name": dataset.name, "split": config.split, "n": len(inputs), "sha256": digest},
    )


def _with_classes(dataset: Dataset) -> Dataset:
    if dataset.classes is None:
        raise ConfigError(
            f"{dataset.name} has no classes", rule="an attack changes which class a model gives", who="--data"
        )
    return dataset


def _trained(config: TargetConfig, path: Path, dataset: Dataset | None) -> Trained:
    if path.is_dir():
        return of_run(path, dataset)
    if dataset is None:
        raise ConfigError("no data", rule="a model by name is built for its data", who="--data")
    if not config.weights:
        raise ConfigError(
            f"no weights for {config.model}",
            rule="a model by name has none",
            fix="add --weights FILE.safetensors, or name a run folder",
            who="--weights",
        )
    return of_weights(Named(name=config.model), Path(config.weights), dataset)


def threat_of(config: TargetConfig, eps: float) -> Threat:
    """The threat model at one radius."""
    low, high = config.bounds
    return Threat(
        config.norm, eps, goal=config.goal, bounds=config.bounds, data_range=f"{low:g}..{high:g}",
        queries=config.queries or None,
    )  # fmt: skip


def attack_of(config: AttackConfig) -> Attack:
    """The attack with the settings that it has.

    Raises:
        ConfigError: an unknown attack, another norm than it has, or steps for one without.
    """
    steps = {"steps": config.steps} if config.steps else {}
    return attack_from({"name": config.attack, **steps}, config.norm, "attack")


@dataclass(frozen=True)
class Attacked:
    """What `attack` gives: facts for each radius, and where they are kept."""

    facts: tuple[dict[str, Any], ...]
    run_dir: Path


def attack(config: AttackConfig, *, out: Path | None = None, save: Path | None = None) -> Attacked:
    """Run one attack at every radius, in a new run folder with `attack.json`.

    Args:
        config: the settings.
        out: the run folder; None: a new one under `runs/`.
        save: where the changed inputs of the last radius go, as safetensors.

    Raises:
        MyceliaError: as `subject` and the attack do.
    """
    made = attack_of(config)
    check_free(out)
    check_save(save)
    found = subject(config)
    with found.model.quiet():
        clean = _outputs(found, config.batch)
    results: list[tuple[Threat, AttackResult]] = []
    for eps in sorted(config.eps):
        threat = threat_of(config, eps)
        goal = threat.goal_for(found.y, clean)
        results.append(
            (
                threat,
                made.run(
                    found.model, found.x, goal, eps=eps, rng=config.seed, bounds=config.bounds,
                    batch=config.batch, queries=config.queries or None, quantise=config.quantise or None,
                ),
            )
        )  # fmt: skip
    with Run.create(out, "attack", to_toml(config)) as run:
        run.log(_started("attack", config))
        facts = tuple(
            attack_facts(result, threat, model=found.said, data=found.data, run_dir=str(run.path))
            for threat, result in results
        )
        _write(run.path / "attack.json", plain_json.dumps(list(facts), indent=1))
        _save(results[-1][1], save)
        run.log(
            RunFinished(result={"robust_accuracy": facts[-1]["robust_accuracy"], "run_dir": str(run.path)})
        )
        return Attacked(facts, run.path)


@dataclass(frozen=True)
class Evaluated:
    """What `evaluated` gives: the report, its facts with requirements, and where they are kept."""

    report: Report
    facts: dict[str, Any]
    run_dir: Path

    @property
    def met(self) -> bool:
        """Whether all requirements are."""
        return all(each["met"] for each in self.facts["requirements"])


def evaluated(config: EvaluateConfig, *, out: Path | None = None, save: Path | None = None) -> Evaluated:
    """Evaluate in a new run folder with `evaluation.json` and a report.

    Args:
        config: the settings.
        out: the run folder; None: a new one under `runs/`.
        save: where the changed inputs go, as safetensors.

    Raises:
        MyceliaError: as `subject` and `evaluate` do.
    """
    check_free(out)
    check_save(save)
    prepared = _prepared(config)
    with Run.create(out, "evaluate", to_toml(config)) as run:
        run.log(_started("evaluate", config))
        return _evaluated(run, config, prepared, save)


def resumed(path: Path, *, save: Path | None = None) -> Evaluated:
    """Go on with an evaluation that was stopped: attacks that were over are not run again.

    Args:
        path: the run folder.
        save: where the changed inputs go, as safetensors.

    Raises:
        ConfigError: no run, one of another command, or one that is over.
        MyceliaError: as `evaluated` does.
    """
    check_save(save)
    opened = Run.open(path)
    begun = next((event for event in opened.events({RunStarted.kind}) if isinstance(event, RunStarted)), None)
    if begun is None or begun.command != "evaluate" or (path / EVALUATION).exists():
        raise ConfigError(
            "there is nothing to go on with",
            rule="an evaluation that was stopped",
            fix="mycelia report shows one that is over",
            who=str(path),
        )
    config = load_config(EvaluateConfig, path / CONFIG)
    prepared = _prepared(config)
    with Run.resume(path) as run:
        run.log(Resumed(step=0, environment=describe()))
        return _evaluated(run, config, prepared, save)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """All that an evaluation needs, found and checked."""

    subject: Subject
    threat: Threat
    suite: str | tuple[Attack, ...]
    adaptive: Adaptive | Attack | None
    sources: tuple[Model, ...] | None


def _prepared(config: EvaluateConfig) -> _Prepared:
    if len(config.eps) > 1:
        raise ConfigError(
            f"{len(config.eps)} radii",
            rule="an evaluation is for one; its curve has others",
            fix="give one --eps, or use mycelia attack",
            who="--eps",
        )
    suite: str | tuple[Attack, ...] = config.suite
    if config.suite.endswith(".toml"):
        suite = load_suite(Path(config.suite), config.norm)
    elif config.suite not in SUITES:
        chosen(SUITES, config.suite, kind="suite", who="--suite", also="FILE.toml")
    for text in config.require:
        _parsed(text)
    if config.steps and config.suite.endswith(".toml"):
        raise ConfigError(
            f"steps {config.steps} for {config.suite}", rule="a suite file has its own", who="--steps"
        )
    adaptive = _adaptive(config.adaptive)
    around = model_defences(config.defence, config.bounds)
    if config.source and config.suite != "full":
        raise ConfigError(
            f"source models for suite {config.suite}",
            rule="they are for the transfer attack of suite full",
            fix="--suite full",
            who="--source",
        )
    found = subject(config)
    return _Prepared(
        replace(found, model=around_model(found.model, around)), threat_of(config, config.eps[0]), suite,
        adaptive, tuple(model_of(path) for path in config.source) or None,
    )  # fmt: skip


def _evaluated(run: Run, config: EvaluateConfig, prepared: _Prepared, save: Path | None) -> Evaluated:
    found = prepared.subject
    cells = Cells(run.path / "cells", str(found.said["sha256"]))
    try:
        report = evaluate(
            found.model, found.x, found.y, prepared.threat, prepared.suite, config.seed, prepared.adaptive,
            batch=config.batch, cells=cells, steps=config.steps or None, sources=prepared.sources,
        )  # fmt: skip
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(str(run.path)) from stop
    facts = replace(report, run_dir=str(run.path)).to_json()
    facts |= {"model": dict(found.said), "data": dict(found.data), "suite": config.suite}
    facts["defence"] = list(config.defence)
    facts["requirements"] = [{"text": text, "met": met(text, facts)} for text in config.require]
    _write(run.path / "evaluation.txt", report.text())
    _write(run.path / EVALUATION, plain_json.dumps(facts, indent=1))
    _save(report, save)
    ledger = facts["ledger"]
    shown = {name: ledger[name] for name in ("clean_accuracy", "robust_accuracy", "success_rate")}
    shown |= {"seconds_total": ledger["seconds"], "run_dir": str(run.path)}
    run.log(RunFinished(result=shown))
    build_report(run, parts=[*parts_of(facts), *default_parts(run)])
    return Evaluated(report, facts, run.path)


def met(text: str, facts: Mapping[str, Any]) -> bool:
    """Whether a requirement holds; what was not measured meets none.

    >>> met("ledger.held>=3", {"ledger": {"held": 3}})
    True

    Raises:
        ConfigError: it cannot be read, or names nothing that a report has.
    """
    path, compare, limit = _parsed(text)
    value: Any = facts
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            raise ConfigError(
                f"requirement {text!r}: there is no {'.'.join(path)}",
                rule="a key of the report",
                fix="ledger.robust_accuracy",
                who="--require",
            )
        value = value[key]
    return isinstance(value, int | float) and not isinstance(value, bool) and compare(value, limit)


def _parsed(text: str) -> tuple[list[str], Callable[[float, float], bool], float]:
    found = re.fullmatch(r"\s*([a-z0-9_.]+)\s*(>=|<=|==|>|<)\s*([0-9.eE+-]+)\s*", text)
    with suppress(ValueError):
        if found is not None:
            return found[1].split("."), _COMPARE[found[2]], float(found[3])
    raise ConfigError(
        f"requirement {text!r}", rule="key>=number, also with <=, ==, > or <",
        fix='--require "ledger.robust_accuracy>=0.4"', who="--require",
    )  # fmt: skip


def _adaptive(reference: str) -> Adaptive | Attack | None:
    if not reference:
        return None
    function = resolve(reference, kind="adaptive attack")
    with user_code(f"adaptive attack {reference}"):
        found = function() if not isinstance(function, Adaptive | Attack) else function
    if not isinstance(found, Adaptive | Attack):
        raise ConfigError(
            f"{reference} gives a {type(found).__name__}", rule="an attack or an Adaptive", who="--adaptive"
        )
    return found


def _outputs(found: Subject, batch: int) -> Tensor:
    return torch.cat([found.model(part) for part in found.x.split(batch)])


def check_save(path: Path | None) -> None:
    """Refuse a file that could not be written, before work that would then be lost.

    Raises:
        ConfigError: its folder is missing, or what is there is no ordinary file.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(
            f"there is no folder {path.parent}", rule="a file in a folder that exists", who="--save"
        )
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no ordinary file", rule="a file of its own", who="--save")


def _save(found: AttackResult | Report, path: Path | None) -> None:
    if path is not None:
        save_file({"x_adv": found.x_adv.contiguous(), "status": found.status.contiguous()}, path)


def _started(command: str, config: TargetConfig) -> RunStarted:
    return RunStarted(
        command=command, config=config.model_dump(mode="json"), seed=config.seed, environment=describe()
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + ("" if text.endswith("\n") else "\n"), encoding="utf-8")
    except OSError as error:
        raise DataError(f"it cannot be written: {error.strerror or error}", who=str(path)) from error
