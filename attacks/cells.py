"""Results of attacks, kept as they come: an evaluation that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mycelia.attacks.base import Attack
from mycelia.attacks.goals import Goal
from mycelia.attacks.result import AttackResult
from mycelia.attacks.suite import AutoAttack, MemberFacts, SuiteResult

__all__ = ["Cells"]

_TENSORS: Final = ("x_adv", "status", "loss", "queries", "gradients", "best_step", "verified")
_SUFFIX: Final = ".safetensors"


@dataclass(frozen=True)
class Cells:
    """A folder with a file for each attack on each model, data, goal and radius.

    Attributes:
        folder: of the files; made when the first one is written.
        model: what names the model, such as its hash: a file of another model is never used.
    """

    folder: Path
    model: str

    def run(
        self,
        attack: Attack,
        model: object,
        x: Tensor,
        goal: Goal,
        *,
        eps: float | None,
        rng: int,
        **more: Any,
    ) -> AttackResult:
        """As `Attack.run`; what was found before is read and not run again."""
        path = self.folder / (self._name(attack, x, goal, eps, rng, more) + _SUFFIX)
        found = _read(path, attack)
        if found is None:
            found = attack.run(model, x, goal, eps=eps, rng=rng, **more)
            _write(path, found)
        return found

    def _name(
        self, attack: Attack, x: Tensor, goal: Goal, eps: float | None, rng: int, more: Mapping[str, Any]
    ) -> str:
        digest = sha256(f"{self.model}\n{attack!r}\n{type(goal).__name__}\n{eps!r}\n{rng}\n".encode())
        digest.update(repr(sorted((key, _plain(value)) for key, value in more.items())).encode())
        for tensor in (x, goal.labels):
            digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return f"{type(attack).__name__.lower()}-{digest.hexdigest()[:24]}"


def _plain(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)}{value.flatten().tolist()}"
    return f"{[_plain(each) for each in value]}" if isinstance(value, tuple | list) else repr(value)


def _write(path: Path, found: AttackResult) -> None:
    tensors = {name: getattr(found, name).contiguous() for name in _TENSORS}
    tensors |= {f"distance/{p}": values.contiguous() for p, values in found.distance.items()}
    rest: dict[str, Any] = {
        "reason": found.reason, "unreproduced": found.unreproduced, "eps": found.eps, "norm": found.norm,
        "seed": found.seed, "seconds": found.seconds, "survive_8bit": found.survive_8bit,
    }  # fmt: skip
    if isinstance(found, SuiteResult):
        tensors["broken_by"] = found.broken_by.contiguous()
        rest["members"] = [
            {key: value for key, value in vars(each).items() if key != "attack"} for each in found.members
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(save(tensors, {"rest": json.dumps(rest)}))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, attack: Attack) -> AttackResult | None:
    """None: it was not run, or what was written is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            rest = json.loads((file.metadata() or {})["rest"])
        distance = {
            name.removeprefix("distance/"): tensors.pop(name) for name in list(tensors) if "/" in name
        }
        rest["reason"] = tuple(rest["reason"])
        if not isinstance(attack, AutoAttack):
            return AttackResult(**tensors, **rest, distance=distance, attack=attack)
        known = dict(attack.members)
        members = tuple(MemberFacts(**each, attack=known[each["name"]]) for each in rest.pop("members"))
        return SuiteResult(**tensors, **rest, distance=distance, attack=attack, members=members)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
