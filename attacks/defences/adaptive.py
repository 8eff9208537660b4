"""What an attack has to do against stages before a model, and whether a model has any."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from torch import nn

from mycelia.attacks.base import Attack
from mycelia.attacks.defences.outputs import Obfuscated
from mycelia.attacks.defences.stages import Defended
from mycelia.attacks.suite import AutoAttack
from mycelia.engine.errors import ConfigError

__all__ = ["adapted", "defences_of", "with_eot"]

A = TypeVar("A", bound=Attack)


def defences_of(model: object) -> tuple[Defended, ...]:
    """The stages in front of a model or of parts of it.

    Args:
        model: a module, or what `as_model` made of one.
    """
    module = getattr(model, "module", model)
    return (
        tuple(each for each in module.modules() if isinstance(each, Defended))
        if isinstance(module, nn.Module)
        else ()
    )


def with_eot(attack: A, passes: int = 20) -> A:
    """The same attack with gradients averaged over passes, where it takes gradients and has a way to.

    `AutoAttack` becomes its version "rand", which averages over 20.

    Args:
        attack: any.
        passes: at least 1; an attack that averages over more keeps its number.

    Raises:
        ConfigError: no pass.
    """
    if passes < 1:
        raise ConfigError(f"passes {passes}", rule="at least 1", who="with_eot")
    if isinstance(attack, AutoAttack):
        return replace(attack, version="rand")
    own = getattr(attack, "eot", None)
    return attack if own is None else replace(attack, eot=max(own, passes))  # type: ignore[call-arg]


def adapted(attack: A, model: object, passes: int = 20) -> tuple[A, str]:
    """The attack as it should be against this model, and what was done, for the report.

    Surrogates of stages without gradients are part of the model already (see `Defended`); here gradients are
    averaged where a stage is random.

    >>> from torch import nn
    >>> from mycelia.attacks.defences.inputs import BitDepth, GaussianNoise
    >>> from mycelia.attacks.evasion.pgd import PGD
    >>> attack, said = adapted(PGD(), Defended(nn.Linear(2, 3), BitDepth(4), GaussianNoise(0.1)))
    >>> attack.eot, said
    (20, 'BPDA through BitDepth; EOT over GaussianNoise')

    Args:
        attack: any.
        model: see `defences_of`.
        passes: see `with_eot`.
    """
    if isinstance(model, Obfuscated):
        return attack, f"obfuscation: {model.obfuscation}; only attacks that need labels count"
    found = defences_of(model)
    said = "; ".join(each.note for each in found if each.note)
    return (with_eot(attack, passes) if any(each.random for each in found) else attack), said
