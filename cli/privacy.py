"""`mycelia privacy epsilon | calibrate | ledger`."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycelia.cli.output import Format, FormatOption, print_json, print_pairs, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from mycelia.privacy.accounting import Statement
    from mycelia.privacy.events import Event
    from mycelia.privacy.sampling import Sampler

__all__ = ["app"]

app = typer.Typer(
    help="Compute, calibrate and show what is spent of privacy.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,
)


class Accountant(StrEnum):
    """Which arithmetic bounds ε."""

    auto = "auto"
    pld = "pld"
    rdp = "rdp"


class Sampling(StrEnum):
    """How examples are drawn."""

    poisson = "poisson"
    shuffle = "shuffle"
    fixed = "fixed"


class Relation(StrEnum):
    """Which data sets are neighbours."""

    add_remove = "add-remove"
    replace_one = "replace-one"
    zero_out = "zero-out"


DeltaOption = Annotated[float, typer.Option("--delta", help="δ, above 0 and below 1.")]
AccountantOption = Annotated[
    Accountant,
    typer.Option("--accountant", help="Exact where it can be, else pld, else rdp; or one of them."),
]
SamplingOption = Annotated[Sampling, typer.Option("--sampling", help="How examples are drawn.")]
RelationOption = Annotated[
    Relation | None,
    typer.Option("--relation", help="The neighbours; by default those that the sampling is accounted for."),
]
UserOption = Annotated[
    int | None,
    typer.Option(
        "--max-examples-per-user", metavar="K", help="Protect users who have at most so many examples."
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--noise-schedule",
        metavar="time:R|step:R:EVERY|exp:R",
        help="How the noise multiplier decays from its first value.",
    ),
]
_Q = "Probability that an example takes part in an update; shuffle: one over the steps of an epoch."
_Z = "Noise over clip bound; the total one when a clip quantile is released too."


@app.command("epsilon")
def epsilon(
    sampling_rate: Annotated[float, typer.Option("--sampling-rate", help=_Q)],
    noise_multiplier: Annotated[float, typer.Option("--noise-multiplier", help=_Z)],
    steps: Annotated[int, typer.Option("--steps", help="Released updates.")],
    delta: DeltaOption,
    accountant: AccountantOption = Accountant.auto,
    sampling: SamplingOption = Sampling.poisson,
    relation: RelationOption = None,
    max_examples_per_user: UserOption = None,
    noise_schedule: ScheduleOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Say what ε a run has.

    Example: mycelia privacy epsilon --sampling-rate 0.04 --noise-multiplier 1.5 --steps 2250 --delta 1e-5
    """
    from mycelia.privacy.accounting import epsilon as account

    statement = account(
        _maker(sampling)(sampling_rate),
        noise_multiplier,
        steps,
        delta,
        accountant=accountant.value,
        schedule=noise_schedule,
        relation=relation.value if relation else None,
        **_user(max_examples_per_user),
    )
    _print(statement, {}, format)


@app.command("calibrate")
def calibrate(
    delta: DeltaOption,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="The ε to stay within.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option("--noise-multiplier", help=_Z)] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Released updates.")] = None,
    sampling_rate: Annotated[float | None, typer.Option("--sampling-rate", help=_Q)] = None,
    accountant: AccountantOption = Accountant.auto,
    sampling: SamplingOption = Sampling.poisson,
    relation: RelationOption = None,
    max_examples_per_user: UserOption = None,
    noise_schedule: ScheduleOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Solve for the one of ε, noise, steps and sampling rate that is left out.

    Example: mycelia privacy calibrate --epsilon 8 --steps 2250 --sampling-rate 0.04 --delta 1e-5
    """
    from mycelia.engine.errors import ConfigError
    from mycelia.privacy.calibrate import calibrate as solve

    if sampling is not Sampling.poisson and sampling_rate is None:
        raise ConfigError(
            f"the sampling rate is left out with --sampling {sampling.value}",
            rule="the rate of such a sampler goes in whole examples",
            fix="give --sampling-rate, or use --sampling poisson",
            who="--sampling",
        )
    found = solve(
        _maker(sampling),
        delta=delta,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        steps=steps,
        sampling_rate=sampling_rate,
        accountant=accountant.value,
        schedule=noise_schedule,
        relation=relation.value if relation else None,
        **_user(max_examples_per_user),
    )
    extra = {"solved_for": found.solved_for, "value": found.value, "target_epsilon": found.target_epsilon}
    _print(found.statement, extra, format)


@app.command("ledger")
def ledger(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a ledger file.", show_default=False)],
    delta: Annotated[
        float | None, typer.Option("--delta", help="δ; by default that of the run's budget.")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Show what a run has released, and check that nobody edited it.

    Exits with 1 where its chain is broken.
    """
    from mycelia.engine.errors import ConfigError, DataError
    from mycelia.privacy.client_ledgers import FOLDER
    from mycelia.privacy.ledger import FILE, Ledger

    path = run / FILE if run.is_dir() else run
    settings = _privacy_settings(run)
    whose: list[tuple[str, str]] = []
    try:
        if run.is_dir() and (run / FOLDER).is_dir() and not path.exists():
            path, whose = _fullest(run / FOLDER)
        found = Ledger.load(path)
    except DataError:
        if format is Format.json and path.exists():
            print_json(_ledger_facts(run, [], None, "", False, [], []))
        raise
    at = delta if delta is not None else settings.get("delta")
    if at is None and len(found):
        raise ConfigError(
            "no δ is given, and the run has no budget",
            rule="an ε holds at a δ",
            fix="add --delta 1e-5",
            who=str(run),
        )
    statements = [] if at is None else found.statements(float(at))
    budget = _budget_facts(settings, found, statements)
    heuristics = list(found.heuristics)
    facts = _ledger_facts(run, statements, budget, found.noise_source, True, heuristics, list(found))
    if format is Format.json:
        print_json(_finite(facts))
        return
    for statement in statements:
        print(statement)
    if not statements:
        print("nothing was released with an ε")
    for heuristic in found.heuristics:
        print(heuristic)
    pairs = [*whose, ("noise source", found.noise_source), ("chain", "unbroken")]
    pairs.append(("updates", str(found.steps)))
    if budget is not None:
        pairs.append(("budget", f"ε {budget['epsilon']:g} at δ = {budget['delta']:g}"))
        left = budget["remaining_steps"]
        pairs.append(("remaining updates", "" if left is None else str(left)))
    print_pairs(pairs)
    if len(found):
        print()
        rows = [[_cell(value) for value in _event_facts(i, e).values()] for i, e in enumerate(found)]
        print_table(list(_event_facts(0, found.events[0])), rows)


def _maker(sampling: Sampling) -> Callable[[float], Sampler]:
    """What makes the sampler of a rate."""
    from fractions import Fraction

    from mycelia.engine.errors import ConfigError
    from mycelia.privacy.sampling import FixedSize, Poisson, ShuffledEpochs

    def refuse(rate: float) -> None:
        if not 0 < rate <= 1:
            raise ConfigError(
                f"the sampling rate is {rate}",
                rule=f"above 0 and at most 1 with --sampling {sampling.value}",
                fix="give the share of the examples that are in an update",
                who="--sampling-rate",
            )

    def shuffled(rate: float) -> Sampler:
        refuse(rate)
        nearest = round(1 / rate)
        return ShuffledEpochs(1, nearest if math.isclose(nearest * rate, 1, rel_tol=1e-9) else int(1 / rate))

    def fixed(rate: float) -> Sampler:
        refuse(rate)
        share = Fraction(rate).limit_denominator(10**9)
        if share < Fraction(rate):  # never below what is asked for
            share = Fraction(math.ceil(Fraction(rate) * 10**9), 10**9)
        return FixedSize(share.numerator, share.denominator)

    return {Sampling.poisson: Poisson, Sampling.shuffle: shuffled, Sampling.fixed: fixed}[sampling]


def _user(max_examples: int | None) -> dict[str, Any]:
    return {} if max_examples is None else {"unit": "user", "max_examples": max_examples}


def _print(statement: Statement, extra: dict[str, Any], format: Format) -> None:
    if format is Format.json:
        print_json(_finite(statement.as_dict() | extra))
        return
    if extra:
        print(f"{extra['solved_for']} = {extra['value']:.10g}")
    print(statement)
    for sentence in statement.assumptions:
        print(f"- {sentence}")


def _finite(value: Any) -> Any:
    """Infinities as the string that the schema has for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "inf"
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _fullest(folder: Path) -> tuple[Path, list[tuple[str, str]]]:
    """Of the ledgers of a run's clients the one that has released most, all of them checked."""
    from mycelia.privacy.client_ledgers import ClientLedgers

    ledgers = ClientLedgers(folder)
    steps = {client: found.steps for client in ledgers.clients() if (found := ledgers.read(client))}
    most = max(steps, key=lambda client: steps[client], default="0")
    return ledgers.path(most), [("ledger", f"client {most}, the fullest of {len(steps)} in {folder}")]


def _privacy_settings(run: Path) -> dict[str, Any]:
    """The table [privacy] of a run's configuration; empty where there is none."""
    import tomllib

    from mycelia.engine.errors import DataError

    path = run / "config.toml"
    if not path.is_file():
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("privacy", {})
    except (OSError, ValueError) as error:
        raise DataError(f"the configuration cannot be read ({error})", who=str(path)) from error
    return found if isinstance(found, dict) else {}


def _budget_facts(
    settings: dict[str, Any], ledger: Any, statements: list[Statement]
) -> dict[str, Any] | None:
    """The budget as the configuration has it, and what is left of it by the last event."""
    if not {"epsilon", "delta"} <= settings.keys():
        return None
    from dataclasses import replace

    from mycelia.privacy.budget import Budget

    limit, delta = float(settings["epsilon"]), float(settings["delta"])
    facts: dict[str, Any] = {
        "epsilon": limit, "delta": delta, "spent": 0.0, "remaining_steps": None, "stopped_by": "",
    }  # fmt: skip
    last = ledger.last
    if last is None:
        return facts
    if len(statements) == 1:
        budget = Budget(limit, delta, last.unit, last.relation, ledger=ledger)
        facts["spent"] = budget.spent
        following = replace(last, step=last.step + last.count, count=1)
        if not last.sensitivity:  # correlated noise ends as planned, whatever the budget has left
            facts["remaining_steps"] = 0 if last.mechanism == "curve" else budget.remaining(following)
    else:
        facts["spent"] = max(statement.epsilon for statement in ledger.statements(delta))
    if facts["remaining_steps"] == 0:
        facts["stopped_by"] = "budget"
    return facts


def _ledger_facts(
    run: Path,
    statements: list[Statement],
    budget: dict[str, Any] | None,
    noise_source: str,
    chain_ok: bool,
    heuristics: list[str],
    events: list[Event],
) -> dict[str, Any]:
    return {
        "run": str(run),
        "statements": [statement.as_dict() for statement in statements],
        "budget": budget,
        "noise_source": noise_source,
        "chain_ok": chain_ok,
        "heuristics": heuristics,
        "events": [_event_facts(index, event) for index, event in enumerate(events)],
    }


def _event_facts(index: int, event: Event) -> dict[str, Any]:
    return {
        "index": index,
        "step": event.step,
        "kind": event.kind,
        "count": event.count,
        "sampling": event.sampling,
        "sampling_rate": event.sampling_rate,
        "noise_multiplier": event.noise_multiplier,
        "clip": event.clip,
        "mechanism": event.mechanism,
        "relation": event.relation,
        "unit": event.unit,
    }


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
