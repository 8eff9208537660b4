"""What one attack did to a model, as plain values and as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.facts import known, settings_of, share, share_text
from mycelia.attacks.result import AttackResult, Status
from mycelia.attacks.search import SLACK
from mycelia.attacks.threat import Threat
from mycelia.engine.environment import describe

__all__ = ["SCHEMA", "attack_facts", "attack_text"]

SCHEMA: Final = 1


def attack_facts(
    result: AttackResult,
    threat: Threat,
    *,
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    run_dir: str = "",
) -> dict[str, Any]:
    """All that is said of an attack: every share with its interval, everything missing with a reason.

    Args:
        result: of the attack.
        threat: under which it ran; its eps that of the result.
        model: name and sha256.
        data: name, split, n, sha256.
        run_dir: where results are kept; "": nowhere.
    """
    counts, attack = result.counts, result.attack
    attacked = counts.broken + counts.held + counts.failed
    targeted = threat.goal != "untargeted"
    right = counts.n - counts.clean_wrong
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "attack": {
            "name": type(attack).__name__,
            "settings": settings_of(attack) if isinstance(attack, Attack) else {},
        },
        "model": dict(model),
        "data": dict(data),
        "threat": threat.to_json(),
        "counts": {
            "clean_wrong": counts.clean_wrong, "already_target": counts.already_target,
            "broken": counts.broken, "held": counts.held, "failed": counts.failed,
        },
        **share("clean_accuracy", None if targeted else right, counts.n, "targeted: not asked for"),
        **share(
            "robust_accuracy", None if targeted else counts.held, counts.n,
            "targeted: rows that were wrong before may hold" if targeted else "no rows",
        ),
        **share("success_rate", counts.broken, attacked, "no row was attacked"),
        "distance": _distances(result),
        **known("worst_norm", _worst(result), "no row was changed"),
        "outside_ball": _outside(result),
        "verification_mismatches": result.unreproduced,
        "votes": result.votes,
        **known("survive_8bit", result.survive_8bit, "not asked for: --quantise 8"),
        "forward": int(result.queries.sum()),
        "backward": int(result.gradients.sum()),
        "seconds": result.seconds,
        "seed": result.seed,
        "device": str(result.x_adv.device),
        "dtype": str(result.x_adv.dtype).removeprefix("torch."),
        "versions": describe()["versions"],
        **known("run_dir", run_dir or None, "results were not kept"),
    }  # fmt: skip
    return facts


def attack_text(facts: Mapping[str, Any]) -> str:
    """The same for a terminal."""
    threat, counts = facts["threat"], facts["counts"]
    n = sum(counts.values())
    lines = [
        f"{facts['attack']['name']} on {facts['model']['name']}, {n} rows of {facts['data']['name']} "
        f"({facts['data']['split']})",
        f"threat           {threat['goal']}, {threat['norm']} at most {threat['eps']:g} {threat['eps_unit']}",
        *(f"{name.replace('_', ' '):<16} {share_text(facts, name)}"
          for name in ("clean_accuracy", "robust_accuracy", "success_rate")),
        f"rows             {counts['broken']} broken, {counts['held']} held, {counts['failed']} failed, "
        f"{counts['clean_wrong']} wrong before, {counts['already_target']} at the target before",
    ]  # fmt: skip
    distance = facts["distance"]
    if distance["median"] is not None:
        lines.append(
            f"change, {distance['norm']:<8} median {distance['median']:.4g}, quartiles {distance['q25']:.4g} "
            f"and {distance['q75']:.4g}, largest {distance['max']:.4g} (broken rows)"
        )
    if facts["verification_mismatches"]:
        lines.append(f"not reproduced   {facts['verification_mismatches']} rows, which count as held")
    lines.append(
        f"cost             {facts['forward']:,} forward and {facts['backward']:,} backward passes of rows, "
        f"{facts['seconds']:.1f} s, seed {facts['seed']}"
    )
    lines.append("No more than this attack is said to have failed on the rows that held.")
    return "\n".join(lines) + "\n"


def _distances(result: AttackResult) -> dict[str, Any]:
    """Of the broken rows, in the norm of the attack."""
    found: dict[str, Any] = {"norm": result.norm}
    values = _broken(result)
    if not len(values):
        reason = "no row was broken"
        for name in ("q25", "median", "q75", "max"):
            found |= {name: None, f"{name}_reason": reason}
        return found
    low, middle, high = torch.quantile(values, values.new_tensor([0.25, 0.5, 0.75])).tolist()
    return found | {"q25": low, "median": middle, "q75": high, "max": float(values.max())}


def _broken(result: AttackResult) -> Tensor:
    return result.distance[result.norm][result.is_(Status.BROKEN)]


def _worst(result: AttackResult) -> float | None:
    changed = result.is_(Status.BROKEN) | result.is_(Status.HELD)
    values = result.distance[result.norm][changed]
    return float(values.max()) if len(values) else None


def _outside(result: AttackResult) -> int:
    if result.eps is None:
        return 0
    return int((_broken(result) > result.eps * (1 + SLACK)).sum())
