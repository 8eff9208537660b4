"""`mycelia simulate`: a scenario by name or file, run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from collections.abc import Callable

    from mycelia.engine.events import Listener
    from mycelia.simulations import Scenario, SimulationResult

__all__ = ["command"]


def command(
    scenario: Annotated[
        str, typer.Argument(help="A built-in scenario's name, or a TOML file.", show_default=False)
    ] = "",
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file, in the place of SCENARIO.")
    ] = None,
    settings: SettingsOption = None,
    seed: SeedOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    print_config: PrintConfigOption = False,
    dry_run: DryRunOption = False,
    form: FormatOption = Format.text,
) -> int:
    """Simulate a federation on this machine.

    Built-in scenarios: quickstart (digits, one minute), fashion (a CNN on Fashion-MNIST),
    personalised (batch norm that stays with the client), dp (clients whose data is protected),
    dp-ftrl (the same for clients that come when they like), secure (a server that sees sums
    alone), demo (what mycelia serve --demo runs). Ctrl-C saves a checkpoint; --resume goes on
    from it and ends with the same model as a run that was never stopped.

    Example: mycelia simulate quickstart -s rounds=20 -s algorithm=fedadam --out runs/adam
    """
    from mycelia.engine.config import to_toml
    from mycelia.engine.errors import ConfigError
    from mycelia.simulations import load_scenario, scenario_names, simulate
    from mycelia.simulations import resume as resume_run

    if resume is not None:
        refuse_with_resume(
            SCENARIO=scenario, config=config, settings=settings, seed=seed, out=out,
            print_config=print_config, dry_run=dry_run,
        )  # fmt: skip
        return _run(lambda listener: resume_run(resume, listeners=[listener]), form)
    if bool(scenario) == (config is not None):
        raise ConfigError(
            "SCENARIO and --config are both given" if scenario else "no scenario is given",
            rule="one scenario",
            fix=f"name one of {', '.join(scenario_names())}, or a TOML file",
            who="simulate",
        )
    chosen = load_scenario(scenario or str((config or Path()).resolve()), overrides_of(settings, seed))
    if print_config:
        print(to_toml(chosen), end="")
        return 0
    if dry_run:
        return _dry_run(chosen, form)
    return _run(lambda listener: simulate(chosen, out=out, listeners=[listener]), form)


def _run(go: Callable[[Listener], SimulationResult], form: Format) -> int:
    """Run with progress on stderr, make the report, and print the result."""
    from mycelia.cli.progress import show_progress
    from mycelia.engine.report import build_report
    from mycelia.engine.run import Run

    try:
        with show_progress() as progress:
            result = go(progress)
    except KeyboardInterrupt as stop:
        hint = f"go on with: mycelia simulate --resume {stop}" if str(stop) else "nothing had run yet"
        note(f"interrupted; {hint}")
        return INTERRUPTED
    report = build_report(Run.open(Path(result.run_dir)))
    if form is Format.json:
        print_json(result.to_json())
        return 0
    print_pairs(
        [
            (
                "test accuracy",
                "none: regression" if result.test_accuracy is None else f"{result.test_accuracy:.2%}",
            ),
            ("test loss", f"{result.test_loss:.4f}"),
            *(
                [("worst decile of clients", f"{result.worst_decile_accuracy:.2%}")]
                if result.worst_decile_accuracy is not None
                else []
            ),
            (
                "rounds",
                f"{result.rounds}" + (f", {result.failed_rounds} failed" if result.failed_rounds else ""),
            ),
            *([("privacy", _privacy(result))] if result.privacy is not None else []),
            ("seconds", f"{result.seconds_total:.1f} in all, {result.seconds_per_round:.3f} a round"),
            ("sent", f"{result.bytes_up / 1e6:.1f} MB up, {result.bytes_down / 1e6:.1f} MB down"),
            ("model", result.model_sha256),
            ("run", result.run_dir),
            ("report", str(report.html)),
        ]
    )
    return 0


def _privacy(result: SimulationResult) -> str:
    """ε with its δ and unit; where every client has its own, the largest and the median."""
    from mycelia.engine.report.text import at_most

    facts, epsilon, delta = result.privacy or {}, result.epsilon or 0.0, result.delta or 0.0
    clients = facts["clients"]
    local = "local " if facts["model"] == "local" else ""
    said = f"{local}epsilon {at_most(epsilon)}, delta {delta:g}, per {facts['unit']}"
    if clients is None:
        return said
    return f"{said}: the largest of {clients['clients']} clients, median {at_most(clients['median'])}"


def _dry_run(scenario: Scenario, form: Format) -> int:
    """Say what would run."""
    from mycelia.engine.data import load

    dataset = load(scenario.data.name, **scenario.data.options)
    partition = scenario.populate(dataset.train).partition
    facts = {
        "model": scenario.model.name,
        "data": dataset.name,
        "train_examples": len(dataset.train),
        "test_examples": len(dataset.test),
        "algorithm": scenario.algorithm.name,
        "rounds": scenario.rounds,
        "cohort": scenario.cohort,
    } | {f"partition_{name}": value for name, value in partition.summary().items() if name != "labels"}
    if form is Format.json:
        print_json(facts)
    else:
        print_pairs([(name.replace("_", " "), str(value)) for name, value in facts.items()])
    return 0
