"""`mycelia evaluate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mycelia.cli.attack_options import (
    EPS,
    NORM,
    BatchOption,
    BoundsOption,
    DataOption,
    GoalOption,
    LimitOption,
    ModelOption,
    Norm,
    QueriesOption,
    SaveOption,
    Split,
    SplitOption,
    StepsOption,
    WeightsOption,
    target_settings,
)
from mycelia.cli.options import OutOption, ResumeOption, SeedOption, refuse_with_resume
from mycelia.cli.output import INTERRUPTED, THRESHOLD_NOT_MET, Format, FormatOption, note, print_json

__all__ = ["command"]


def command(
    model: ModelOption = "",
    norm: Annotated[Norm | None, NORM] = None,
    eps: Annotated[list[str] | None, EPS] = None,
    weights: WeightsOption = None,
    data: DataOption = "",
    split: SplitOption = Split.test,
    limit: LimitOption = 1000,
    goal: GoalOption = "untargeted",
    suite: Annotated[
        str,
        typer.Option("--suite", help="quick, standard, full, blackbox, minimum, rand; or a FILE.toml."),
    ] = "standard",
    defence: Annotated[
        list[str] | None,
        typer.Option(
            "--defence",
            metavar="NAME[:KEY=VALUE,…]",
            help="Around the model, such as jpeg:quality=50 or rounded; repeatable.",
        ),
    ] = None,
    steps: StepsOption = 0,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            metavar="RUN|FILE.onnx",
            help="Of the transfer attack of suite full: a model to craft on; repeatable.",
        ),
    ] = None,
    adaptive: Annotated[
        str,
        typer.Option(
            "--adaptive", metavar="package.module:function", help="Gives an attack made for this model."
        ),
    ] = "",
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require", metavar="KEY>=NUMBER", help="Exit with 3 where it does not hold; repeatable."
        ),
    ] = None,
    queries: QueriesOption = 0,
    batch: BatchOption = 256,
    bounds: BoundsOption = "0,1",
    save: SaveOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    format: FormatOption = Format.text,
) -> int:
    """Run a suite of attacks, count the worst case of every example, and look for weak attacks.

    Needs --model, --norm and --eps. Writes a run folder with evaluation.json and report.html; mycelia report
    shows it again. Results of attacks are kept as they come, and --resume goes on with a run that stopped.

    Example: mycelia evaluate --model RUN --norm linf --eps 0.1 --require "ledger.robust_accuracy>=0.4"
    """
    import torch

    from mycelia.attacks.config import EvaluateConfig
    from mycelia.attacks.from_config import evaluated, resumed
    from mycelia.engine.config import load_config
    from mycelia.engine.errors import ConfigError
    from mycelia.engine.heap import keep_heap

    torch.set_num_threads(1)
    keep_heap()
    if resume is not None:
        refuse_with_resume(
            model=model, norm=norm, eps=eps, weights=weights, data=data, defence=defence, steps=steps,
            source=source, suite=suite if suite != "standard" else "", split=split if split != "test" else "",
            limit=limit if limit != 1000 else "", goal=goal if goal != "untargeted" else "",
            queries=queries, batch=batch if batch != 256 else "", bounds=bounds if bounds != "0,1" else "",
            adaptive=adaptive, require=require, seed=seed, out=out,
        )  # fmt: skip
        go = partial(resumed, resume, save=save)
    else:
        if not model or norm is None or not eps:
            missing = [
                name for name, given in (("--model", model), ("--norm", norm), ("--eps", eps)) if not given
            ]
            raise ConfigError(
                f"{', '.join(missing)} is missing",
                rule="no number means anything without a model, a norm and a radius",
                fix="mycelia evaluate --model RUN --norm linf --eps 8/255",
                who="evaluate",
            )
        table = target_settings(
            model, weights, data, split, limit, norm, eps, goal, queries, batch, bounds, seed
        )  # fmt: skip
        more = {
            "suite": suite, "steps": steps, "defence": defence or [], "source": source or [],
            "adaptive": adaptive, "require": require or [],
        }  # fmt: skip
        go = partial(evaluated, load_config(EvaluateConfig, table | more), out=out, save=save)
    try:
        found = go()
    except KeyboardInterrupt as stop:
        hint = f"go on with: mycelia evaluate --resume {stop}" if str(stop) else "nothing had run yet"
        note(f"interrupted; {hint}")
        return INTERRUPTED
    if format is Format.json:
        print_json(found.facts)
    else:
        print(found.report.text())
        print(f"report  {Path(found.run_dir, 'report.html')}")
    for each in found.facts["requirements"]:
        if not each["met"]:
            note(f"not met: {each['text']}")
    return 0 if found.met else THRESHOLD_NOT_MET
