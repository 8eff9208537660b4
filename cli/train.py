"""`mycelia train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycelia.cli.options import (
    DryRunOption,
    OutOption,
    PrintConfigOption,
    ResumeOption,
    SeedOption,
    SettingsOption,
    overrides_of,
    refuse_with_resume,
)
from mycelia.cli.output import INTERRUPTED, Format, FormatOption, note, print_json, print_pairs

if TYPE_CHECKING:
    from mycelia.attacks.defences.train_config import DefendedTrainConfig

__all__ = ["command"]


def command(
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file with settings.")] = None,
    settings: SettingsOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    print_config: PrintConfigOption = False,
    dry_run: DryRunOption = False,
    form: FormatOption = Format.text,
) -> int:
    """Train a model centrally.

    Every setting has a default: `mycelia train` alone trains an MLP on the digits.
    A [privacy] block makes training private, a [defence] block adversarial.

    Ctrl-C saves a checkpoint. --resume goes on from it, or from that of a run that was
    killed, and ends with the same model as a run that was never stopped.

    Example: mycelia train -s model=lenet -s data=fashion-mnist -s epochs=5
    """
    if resume is not None:
        refuse_with_resume(
            config=config, settings=settings, seed=seed, out=out, print_config=print_config, dry_run=dry_run
        )
        return _run(None, None, resume, form)
    from mycelia.attacks.defences.train_config import DefendedTrainConfig
    from mycelia.engine.config import load_config, to_toml

    chosen = load_config(DefendedTrainConfig, config or {}, overrides_of(settings, seed))
    if print_config:
        print(to_toml(chosen), end="")
        return 0
    return _dry_run(chosen, form) if dry_run else _run(chosen, out, None, form)


def _run(config: DefendedTrainConfig | None, out: Path | None, run: Path | None, form: Format) -> int:
    """Start or go on with progress on stderr, and print the result."""
    import torch

    from mycelia.attacks.defences.from_config import resume, train
    from mycelia.cli.progress import show_progress

    torch.set_num_threads(1)  # small models run slower on several, and the number decides the last bits
    with show_progress() as progress:
        if run is not None:
            result = resume(run, listeners=[progress], on_signal=note)
        elif config is not None:
            result = train(config, out=out, listeners=[progress], on_signal=note)
    if result.interrupted:
        note(f"interrupted after step {result.steps}; go on with: mycelia train --resume {result.run_dir}")
        return INTERRUPTED
    summary = result.summary()
    if form is Format.json:
        print_json(summary)
        return 0
    shown = {
        name: value for name, value in summary.items() if value not in (None, "") and name not in _RENAMED
    }
    shown |= {new: summary[name] for name, new in _RENAMED.items()}
    shown["report"] = Path(result.run_dir, "report.html")
    print_pairs([(name.replace("_", " "), _show(name, value)) for name, value in shown.items()])
    return 0


_RENAMED = {"seconds_total": "seconds", "model_sha256": "model", "run_dir": "run"}


def _dry_run(config: DefendedTrainConfig, form: Format) -> int:
    """Say what would be trained; everything it needs is found, checked and built."""
    from mycelia.attacks.defences.from_config import defence_of, prepare
    from mycelia.engine.training import steps_per_epoch
    from mycelia.engine.transforms.compile import choose_plan
    from mycelia.privacy.central import plan_of

    prepared = prepare(config)
    trainer, dataset = prepared.trainer, prepared.dataset
    steps = trainer.total_steps(len(dataset.train))
    facts: dict[str, Any] = {
        "model": config.model.name,
        "parameters": trainer.program.dimension,
        "data": dataset.name,
        "train_examples": len(dataset.train),
        "test_examples": len(dataset.test),
        "classes": dataset.classes,
        "steps": steps,
        "steps_per_epoch": steps_per_epoch(len(dataset.train), trainer.batch_size),
        "plan": choose_plan(config.plan, steps).name,
    }
    private = plan_of(prepared)
    if private is not None:
        facts |= {
            "plan": config.plan,
            "sampling_rate": private.settings.sampler.rate,
            "noise_multiplier": private.noise_multiplier,
            "epsilon": private.epsilon,
            "delta": private.config.delta,
        }
    defence = defence_of(prepared)
    if defence is not None:
        facts["defence"] = defence.describe()
    if form is Format.json:
        print_json(facts)
    else:
        print_pairs([(name.replace("_", " "), str(value)) for name, value in facts.items()])
    return 0


def _show(name: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}"
