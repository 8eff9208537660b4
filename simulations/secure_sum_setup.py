"""What all attempts of a simulated secure sum have in common: inputs, people, keys and chance."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from mycelia.client.policy import ClientPolicy
from mycelia.client.secagg import Task
from mycelia.engine.errors import ConfigError
from mycelia.engine.rng import generator
from mycelia.privacy.secagg import messages
from mycelia.privacy.secagg.config import DeadlinesConfig, SecureSumConfig
from mycelia.privacy.secagg.events import Effect, Event, LocalUpdate, Release
from mycelia.privacy.secagg.keys import Identity
from mycelia.privacy.secagg.messages import KEY_BYTES, PHASES, SERVER, RoundConfig, Threat
from mycelia.privacy.secagg.roster import ClientEntry, Issuer, Roster, ServerEntry
from mycelia.simulations.secure_sum_wire import SERVER_NAME, Wire

if TYPE_CHECKING:
    from mycelia.privacy.noise.source import NoiseSource

__all__ = ["LATE", "PARTIAL", "UNIX_TIME", "Chance", "Context", "Inputs", "Machine", "Setup"]

UNIX_TIME: Final = 1  # the entries of the roster are valid at any time
PARTIAL, LATE = "masked:partial", "masked:late"
_LAST: Final = 253_402_300_799
_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})


class Machine(Protocol):
    """Either side of the secure sum."""

    def handle(self, event: Event) -> list[Effect]:
        """Take an event and say what to do about it."""


class Chance:
    """Randomness by name: of the operating system, or from a seed."""

    def __init__(self, seed: int | None) -> None:
        self.seeded = seed is not None
        self.root = int.from_bytes(os.urandom(7), "big") if seed is None else seed

    def bytes(self, name: str) -> Callable[[int], bytes]:
        """A source of random bytes."""
        if not self.seeded:
            return os.urandom
        drawn = 0

        def draw(count: int) -> bytes:
            nonlocal drawn
            drawn += 1
            return hashlib.shake_256(f"{self.root}\x00{drawn}\x00{name}".encode()).digest(count)

        return draw

    def rounding(self, client: int) -> np.random.Generator:
        """The stream that a client's rounding is drawn from."""
        return generator(self.root, "secure sum rounding", client=client)


@dataclass(frozen=True)
class Inputs:
    """What every client contributes."""

    ids: tuple[int, ...]
    vectors: npt.NDArray[Any]
    weights: tuple[int, ...]
    bounds: Mapping[str, int]
    slots: Mapping[str, Sequence[int]]

    @classmethod
    def of(
        cls,
        vectors: npt.ArrayLike,
        weights: Sequence[int] | None,
        ids: Sequence[int] | None,
        slots: Mapping[str, tuple[int, Sequence[int]]] | None,
    ) -> Inputs:
        """From the arguments of `secure_sum`.

        Raises:
            ConfigError: arguments that do not fit together.
        """
        table = np.asarray(vectors)
        if table.ndim != 2 or table.dtype.kind not in "fiu" or 0 in table.shape:
            raise _refused(f"vectors of {table.dtype} {table.shape}", "numbers [n, d]")
        if table.dtype == np.float16:
            table = table.astype(np.float32)
        n = len(table)
        named = tuple(map(index, ids)) if ids is not None else tuple(range(1, n + 1))
        weighed = tuple(weights) if weights is not None else (1,) * n
        given = dict(slots or {})
        lengths = {"ids": len(named), "weights": len(weighed)} | {
            name: len(v[1]) for name, v in given.items()
        }
        for name, length in lengths.items():
            if length != n:
                raise _refused(f"{length} {name} for {n} vectors", "one for each")
        if len(set(named)) != n or not all(0 < client < 2**64 for client in named):
            raise _refused("ids that repeat or are no ids", "whole numbers from 1, each once")
        return cls(
            named,
            table,
            weighed,
            {name: bound for name, (bound, _) in given.items()},
            {name: values for name, (_, values) in given.items()},
        )

    def update(self, client: int) -> LocalUpdate:
        """What a client hands in."""
        place = self.ids.index(client)
        slots = {name: int(values[place]) for name, values in self.slots.items()}
        return LocalUpdate(self.vectors[place], self.weights[place], slots)


@dataclass(frozen=True)
class Context:
    """What a sum is part of, where it is more than itself: a round of a run.

    Attributes:
        job: the run's name.
        round: its number.
        task: what clients received; None stands for one that is nothing but its size.
        noise: the secret of the noise; None: it comes with the sum's own seed.
        charge: called with what is about to be opened, before anything of it is; what it raises goes on.
    """

    job: str = "simulation"
    round: int = 0
    task: Task | None = None
    noise: NoiseSource | None = None
    charge: Callable[[Release], None] | None = None


@dataclass(frozen=True)
class Setup:
    """A secure sum as it was asked for.

    Attributes:
        inputs: what every client contributes.
        settings: of the sum, with n_min and n_max as numbers.
        task: what all received.
        identities: long-term keys of all, the server's under 0.
        roster: of all.
        chance: for keys, rounding and noise.
        policies: what a client takes part in.
        drops: client to the phase from which it is silent.
        corrupt: whose signatures `wire` may make.
        wire: sees every message.
        actors: machines in the place of the real ones.
        crash: who stops when.
        order: in which clients answer.
        clock: gives the seconds of every tick; virtual time if it is None.
        context: the round that it is the sum of.
    """

    inputs: Inputs
    settings: SecureSumConfig
    task: Task
    identities: Mapping[int, Identity]
    roster: Roster
    chance: Chance
    policies: Callable[[int], ClientPolicy]
    drops: Mapping[int, str]
    corrupt: frozenset[int]
    wire: Wire | None
    actors: Mapping[int | str, Callable[..., Machine]]
    crash: Mapping[int | str, int | str]
    order: str | int
    clock: Callable[[], float] | None
    context: Context = Context()

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        config: SecureSumConfig | None = None,
        *,
        policies: Mapping[int, ClientPolicy | Mapping[str, Any]] = _NONE,
        drops: Mapping[int, str] = _NONE,
        corrupt: Iterable[int] = (),
        wire: Wire | None = None,
        actors: Mapping[int | str, Callable[..., Machine]] = _NONE,
        crash: Mapping[int | str, int | str] = _NONE,
        order: str | int = "sorted",
        seed: int | None = None,
        clock: Callable[[], float] | None = None,
        context: Context = Context(),
    ) -> Setup:
        """From the arguments of `secure_sum`, and the round that it is the sum of.

        Raises:
            ConfigError: arguments that do not fit together, or settings that no round can have.
        """
        settings = config or SecureSumConfig()
        _check(inputs, drops, crash, actors, order)
        chance = Chance(seed)
        identities = {
            client: Identity(chance.bytes(f"identity {client}")(KEY_BYTES)) for client in inputs.ids
        }
        identities[SERVER] = Identity(chance.bytes("identity server")(KEY_BYTES))
        made = cls(
            inputs,
            settings,
            context.task or _task(inputs),
            identities,
            _roster(identities),
            chance,
            _policies(policies, settings),
            drops,
            frozenset(corrupt),
            wire,
            actors,
            crash,
            order,
            clock,
            context,
        )
        first = made.round_config(0, len(inputs.ids))
        numbers = {"n_min": first.n_min, "n_max": first.n_max}
        return replace(made, settings=settings.model_copy(update=numbers))

    def round_config(self, attempt: int, clients: int, seconds: Sequence[float] = ()) -> RoundConfig:
        """The configuration of an attempt.

        Args:
            attempt: its number.
            clients: how many are asked.
            seconds: that each phase may take; as the settings say when left out.
        """
        settings = self.settings
        if seconds:
            deadlines = DeadlinesConfig(**dict(zip(PHASES, seconds, strict=True)))
            settings = settings.model_copy(update={"deadlines": deadlines})
        task = self.task
        return settings.round_config(
            job=self.context.job,
            round=self.context.round,
            attempt=attempt,
            nonce=self.chance.bytes(f"nonce {attempt}")(32),
            model_sha256=task.model_sha256,
            schema_sha256=task.schema_sha256,
            task_sha256=task.task_sha256,
            roster_sha256=self.roster.sha256,
            size=task.size,
            clients=clients,
            slots=self.inputs.bounds,
        )


def _check(
    inputs: Inputs,
    drops: Mapping[int, str],
    crash: Mapping[int | str, int | str],
    actors: Mapping[int | str, Any],
    order: str | int,
) -> None:
    known = set(inputs.ids)
    for name, named in (("drops", set(drops)), ("crash", {*crash}), ("actors", {*actors})):
        unknown = named - known - ({SERVER_NAME} if name != "drops" else set())
        if unknown:
            raise _refused(f"{name} of {sorted(map(str, unknown))}", "clients of this sum, or 'server'")
    for phase in (*drops.values(), *(when for who, when in crash.items() if who != SERVER_NAME)):
        if phase not in (*PHASES, PARTIAL, LATE):
            raise _refused(f"phase {phase!r}", f"one of {', '.join((*PHASES, PARTIAL, LATE))}")
    if order not in ("sorted", "reversed") and type(order) is not int:
        raise _refused(f"order {order!r}", "'sorted', 'reversed' or a seed")


def _policies(
    given: Mapping[int, ClientPolicy | Mapping[str, Any]], settings: SecureSumConfig
) -> Callable[[int], ClientPolicy]:
    default = ClientPolicy(threat=Threat[settings.threat.upper()])
    made = {}
    for client, policy in given.items():
        if isinstance(policy, ClientPolicy):
            made[client] = policy
            continue
        try:
            made[client] = replace(default, **policy)
        except TypeError as error:
            raise _refused(f"a policy of {sorted(policy)}", "fields of ClientPolicy") from error
    return lambda client: made.get(client, default)


def _refused(found: str, rule: str) -> ConfigError:
    return ConfigError(found, rule=rule, who="secure_sum")


def _roster(identities: Mapping[int, Identity]) -> Roster:
    clients = tuple(
        ClientEntry(client, identity.public, Issuer.OFFLINE, 0, _LAST)
        for client, identity in sorted(identities.items())
        if client != SERVER
    )
    return Roster(1, _LAST, clients, (ServerEntry(SERVER_NAME, identities[SERVER].public, 0, _LAST),))


def _task(inputs: Inputs) -> Task:
    model, schema, task = (
        messages.digest(f"simulation/{name}", inputs.vectors.shape[1]) for name in ("model", "schema", "task")
    )
    return Task(model, schema, task, inputs.vectors.shape[1])
