"""`mycelia attack NAME`."""

from __future__ import annotations

from typing import Annotated

import typer

from mycelia.cli.attack_options import (
    BatchOption,
    BoundsOption,
    DataOption,
    EpsOption,
    GoalOption,
    LimitOption,
    ModelOption,
    NormOption,
    QueriesOption,
    SaveOption,
    Split,
    SplitOption,
    StepsOption,
    WeightsOption,
    target_settings,
)
from mycelia.cli.options import OutOption, SeedOption
from mycelia.cli.output import Format, FormatOption, print_json

__all__ = ["command"]


def command(
    name: Annotated[str, typer.Argument(help="The attack, such as pgd.", show_default=False)],
    model: ModelOption,
    norm: NormOption,
    eps: EpsOption,
    weights: WeightsOption = None,
    data: DataOption = "",
    split: SplitOption = Split.test,
    limit: LimitOption = 1000,
    goal: GoalOption = "untargeted",
    steps: StepsOption = 0,
    queries: QueriesOption = 0,
    batch: BatchOption = 256,
    bounds: BoundsOption = "0,1",
    quantise: Annotated[
        int, typer.Option("--quantise", help="8: round successes to 8 bits and look again.")
    ] = 0,
    save: SaveOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Run one attack on a model, and say what became of every example.

    --eps may be given several times. One attack says little: mycelia evaluate runs a suite, and
    looks for signs that its attacks are weak.

    Example: mycelia attack pgd --model runs/train-… --norm linf --eps 8/255
    """
    import torch

    from mycelia.attacks.attack_report import attack_text
    from mycelia.attacks.config import AttackConfig
    from mycelia.attacks.from_config import attack
    from mycelia.engine.config import load_config
    from mycelia.engine.heap import keep_heap

    torch.set_num_threads(1)
    keep_heap()
    table = target_settings(
        model, weights, data, split, limit, norm, eps, goal, queries, batch, bounds, seed
    )  # fmt: skip
    config = load_config(AttackConfig, table | {"attack": name, "steps": steps, "quantise": quantise})
    found = attack(config, out=out, save=save)
    if format is Format.json:
        print_json(found.facts[0] if len(found.facts) == 1 else list(found.facts))
        return
    for facts in found.facts:
        print(attack_text(facts))
    print(f"kept in {found.run_dir}")
