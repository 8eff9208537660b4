"""A secure sum in one process: the real machines, with dropouts, crashes and liars where they are asked for.

Messages travel as the bytes they are. What a network does to them is a function (`wire`), and whoever lies is
a machine of its own (`actors`) or a message signed anew; everything else is what a deployment runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy.typing as npt

from mycelia.aggregator.attempts import RoundAttempts, Suspects
from mycelia.aggregator.secagg import ServerResult
from mycelia.client.policy import ClientPolicy
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.messages import Reason, SecureSumError
from mycelia.simulations.secure_sum_journals import Journals, MemoryJournals
from mycelia.simulations.secure_sum_results import Fault, SecureSumAborted, SecureSumResult
from mycelia.simulations.secure_sum_run import Run
from mycelia.simulations.secure_sum_setup import Inputs, Machine, Setup
from mycelia.simulations.secure_sum_wire import InFlight, Keys, Wire

__all__ = [
    "Fault",
    "InFlight",
    "Keys",
    "SecureSumAborted",
    "SecureSumResult",
    "Wire",
    "run_attempts",
    "secure_sum",
]

_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})


def secure_sum(
    vectors: npt.ArrayLike,
    weights: Sequence[int] | None = None,
    *,
    ids: Sequence[int] | None = None,
    slots: Mapping[str, tuple[int, Sequence[int]]] | None = None,
    config: SecureSumConfig | None = None,
    policies: Mapping[int, ClientPolicy | Mapping[str, Any]] = _NONE,
    drops: Mapping[int, str] = _NONE,
    corrupt: Iterable[int] = (),
    wire: Wire | None = None,
    actors: Mapping[int | str, Callable[..., Machine]] = _NONE,
    crash: Mapping[int | str, int | str] = _NONE,
    attempts: int = 1,
    order: str | int = "sorted",
    masks: bool = True,
    seed: int | None = None,
    clock: Callable[[], float] | None = None,
) -> SecureSumResult:
    """Sum vectors as a federation would, with the machines of client and server in one process.

    >>> secure_sum([[1, 2], [3, 4], [5, 6]], config=SecureSumConfig(corrupt=0, dropout=0)).total
    array([ 9, 12])

    Args:
        vectors: [n, d] floats, which are encoded, or whole numbers, which are codes already.
        weights: of each client; 1 when left out.
        ids: of the clients, from 1, each once; 1 … n when left out.
        slots: name to (bound, one whole number for each client).
        config: the settings; the defaults when left out.
        policies: what a client takes part in, or those fields of `ClientPolicy` in which it is stricter than
            the default, which takes whatever `config` asks for.
        drops: client to the phase from which it is silent, or "masked:partial" (half of the upload comes) or
            "masked:late" (the upload comes after the freeze).
        corrupt: clients whose signatures `wire` may make.
        wire: see `Wire`.
        actors: machines in the place of the real ones, by client or "server"; called with the arguments of
            `SecureSumClient` or `SecureSumServer`.
        crash: "server" to the number, from 1, of the journal record after which it stops, or to a kind ("U2")
            for the first of these; a client to the phase before whose message it stops. Both are built anew
            from their journals.
        attempts: how often a round that fails for its clients is tried.
        order: in which clients answer: "sorted", "reversed", or the seed of a shuffle.
        masks: whether to mask; without, the sum has the same integers and is no secret.
        seed: for keys, rounding and noise, which then protect nothing; the operating system when left out.
        clock: gives the seconds of every tick; virtual time when left out.

    Raises:
        SecureSumAborted: no sum, and why.
        ConfigError: arguments that do not fit together, or settings that no round can have.
    """
    setup = Setup.of(
        Inputs.of(vectors, weights, ids, slots),
        config,
        policies=policies,
        drops=drops,
        corrupt=corrupt,
        wire=wire,
        actors=actors,
        crash=crash,
        order=order,
        seed=seed,
        clock=clock,
    )
    return run_attempts(setup, MemoryJournals(), attempts, masks=masks)


def run_attempts(
    setup: Setup,
    journals: Journals,
    attempts: int = 1,
    *,
    masks: bool = True,
    suspects: Suspects | None = None,
) -> SecureSumResult:
    """A secure sum whose machines keep their journals where they are told to.

    Args:
        setup: the sum.
        journals: of the server and all clients.
        attempts: how often a round that fails for its clients is tried, at most 3.
        masks: whether to mask.
        suspects: of the job, if this is one of its rounds; whoever it excludes is not asked.

    Raises:
        SecureSumAborted: no sum, and why.
        ConfigError: more attempts than there may be.
    """
    present = setup.round_config(0, len(setup.inputs.ids))
    seconds = [milliseconds / 1000 for milliseconds in present.deadlines_ms]
    began = 0.0 if setup.clock is None else setup.clock()
    rounds = RoundAttempts(
        setup.inputs.ids, present.n_min, sum(seconds), suspects or Suspects(), began=began, limit=attempts
    )
    if len(rounds.clients) < present.n_min:
        raise SecureSumAborted(_too_few(len(rounds.clients), present.n_min))
    faults = list[Fault]()
    now = began
    while True:
        run = Run(setup, present, rounds.clients, journals, rounds.number, now)
        if not masks:
            return run.plain()
        outcome = run.go()
        now = run.now
        faults += run.faults
        if isinstance(outcome, ServerResult):
            return run.result(outcome, tuple(faults))
        if not rounds.go_on(outcome, run.silent, now):
            blamed = {client for client in (outcome.owner, outcome.client) if client is not None} | run.silent
            raise SecureSumAborted(outcome, blamed, tuple(faults), run.released(), rounds.number + 1)
        present = setup.round_config(rounds.number, len(rounds.clients), rounds.deadlines(seconds, now))


def _too_few(have: int, need: int) -> SecureSumError:
    return SecureSumError(
        Reason.COHORT_TOO_SMALL,
        f"{have} clients are left to ask",
        rule=f"at least n_min = {need}",
        phase="advertise",
        have=have,
        need=need,
    )
