"""How a sitting of a run keeps to its privacy plan: ledgers, budgets that stop, and what is said of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mycelia.aggregator.noise_shares import SharePlan
from mycelia.aggregator.private_plans import ServerPlan, describe
from mycelia.engine.checkpoint import Checkpoint
from mycelia.engine.errors import BudgetExceeded
from mycelia.engine.events import Privacy
from mycelia.engine.sums import SumFormat, Total
from mycelia.engine.types import Tensors
from mycelia.privacy.accounting import Statement, state
from mycelia.privacy.budget import Budget
from mycelia.privacy.client_plans import ClientPlan
from mycelia.privacy.client_steps import PrivateSteps
from mycelia.privacy.events import Event
from mycelia.privacy.federated import CLIP_BOUND
from mycelia.privacy.ledger import FILE, Head, Ledger
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import Pipeline
from mycelia.privacy.sampling import CyclicPoisson, MinSep, Participation
from mycelia.privacy.secagg.events import Release

__all__ = ["ClientGuard", "Guard", "ServerGuard", "ShareGuard", "open_guard"]

_KEY = "noise.key"
_STREAM = "server"
_FAILED = "a failed round"
_TABLE = "participation"

# What holds beside a statement's own assumptions.
_SERVER = (
    "whether a client answers, and how fast, does not depend on its data",
    "whether a round failed for want of clients is public",
)
_WEIGHTED = (
    "how many examples each client has is public; a client counts by that number up to {most:g}, and the "
    "noise is z times the clip bound times {most:g}",
)
_SHARES = (
    "the noise is the sum of the shares of the survivors, less those assumed to add none, and z is relative "
    "to the clip bound as it is after rounding",
    "towards the server, which knows the cohorts, nothing is amplified",
    "whether a client answers, and how fast, does not depend on its data",
)
_LOCAL = ("each client clips and noises what it sends, before anybody else sees it",)
_EXAMPLES = (
    "the sampling rate and the number of steps are public, and the same for every client",
    "it is about one client's examples; clients that took part less often have spent less",
)


class Guard(ABC):
    """What all guards have: a source of noise, and who took part where that is limited.

    Args:
        folder: the run folder.
        seed: root seed, for a seeded source.
        kind: "seeded" or "os".
        limits: how often a client may take part; None: a secret draw decides.
        checkpoint: where a run goes on from; None for a new one.

    Attributes:
        source: of noise and of secret draws.
        participation: who took part when, where that is limited.
        pipeline: what clients and the server do.
        steps_of: makes the local steps where they are private.
        delta: δ of the budget.
    """

    delta: float
    pipeline: Pipeline
    steps_of: PrivateSteps | None = None

    def __init__(
        self, folder: Path, seed: int, kind: str, limits: MinSep | None, checkpoint: Checkpoint | None
    ) -> None:
        if kind == "seeded":
            self.source = NoiseSource.seeded(seed)
        elif checkpoint is None:
            self.source = NoiseSource.os()
            self.source.save(folder / _KEY)
        else:
            self.source = NoiseSource.load(folder / _KEY)
        self.participation = None if limits is None else Participation(limits)
        if self.participation is not None and checkpoint is not None:
            for who, last, used in checkpoint.tensors[_TABLE].tolist():
                self.participation.last[who], self.participation.used[who] = last, used

    @property
    def selection_seed(self) -> int:
        """Seed of the cohorts' draws, as secret as the noise."""
        return int.from_bytes(self.source.bytes("selection", 0, "", 8), "little") >> 1

    @property
    @abstractmethod
    def epsilon(self) -> float:
        """Spent so far: the most of any client."""

    @abstractmethod
    def stop(self, round: int, clients: int, needed: int) -> str:
        """Why the run ends before this round: "budget" or "participation", or "" where it goes on.

        Args:
            round: the round that comes next.
            clients: size of the population.
            needed: fewest clients that make a round.
        """

    @abstractmethod
    def release(self, round: int, total: Total, public: Mapping[str, Tensor]) -> None:
        """The server's sum is about to be noised and published.

        Args:
            round: its number.
            total: the sum, not yet noised.
            public: what came with the model, such as the clip bound in force.
        """

    def charge(self, release: Release) -> None:
        """A secure sum is about to be opened; only noise in shares is charged for that."""
        del release

    @abstractmethod
    def failed(self, round: int) -> None:
        """The round has ended without a new model."""

    @abstractmethod
    def reading(self, round: int, public: Mapping[str, Tensor]) -> Privacy:
        """The event that says what is spent after so many rounds."""

    @abstractmethod
    def facts(self, clients: int, public: Mapping[str, Tensor]) -> dict[str, Any]:
        """All that ε depends on, for the result and the report."""

    def tensors(self) -> Tensors:
        """What a checkpoint keeps in tensors."""
        if self.participation is None:
            return {}
        last, used = self.participation.last, self.participation.used
        rows = [(who, last[who], used[who]) for who in sorted(last)]
        return {_TABLE: torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)}

    def meta(self) -> dict[str, Any]:
        """What a checkpoint keeps beside."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Let go of files."""


class _OneLedger(Guard):
    """Guards with one ledger and one budget for all clients together.

    Attributes:
        ledger: of the run.
        budget: of the run.
    """

    def _open(
        self, plan: ServerPlan | SharePlan, folder: Path, note: str, checkpoint: Checkpoint | None
    ) -> None:
        config = plan.config
        self.delta = config.delta
        if checkpoint is None:
            self.ledger = Ledger.create(folder / FILE, note)
        else:
            self.ledger = Ledger.load(folder / FILE, Head(*checkpoint.meta["ledger"]), write=True)
        self.budget = Budget(
            config.epsilon, config.delta, "client", plan.sampler.relation, ledger=self.ledger
        )

    @abstractmethod
    def _least(self, round: int) -> Event:
        """The release of a round that is still to come, with the least noise that it may have."""

    @property
    def epsilon(self) -> float:
        """Spent so far."""
        return self.budget.spent

    def stop(self, round: int, clients: int, needed: int) -> str:
        """See `Guard.stop`; a round that was released before costs nothing when it is done again."""
        del clients, needed
        if self.ledger.released(_STREAM, round):
            return ""
        try:
            self.budget.allow(self._least(round))
        except BudgetExceeded:
            return "budget"
        return ""

    def meta(self) -> dict[str, Any]:
        """Where the ledger stands."""
        self.ledger.sync()
        return {"ledger": [self.ledger.head.lines, self.ledger.head.hash]}

    def close(self) -> None:
        """Let go of the ledger's file."""
        self.ledger.close()


class ServerGuard(_OneLedger):
    """One ledger and one budget: the server adds the noise.

    Args:
        plan: what is released a round.
        form: format of the exact sum.
        folder: the run folder.
        seed: root seed.
        checkpoint: where a run goes on from.

    Raises:
        DataError: the ledger or the key of a run that goes on is missing or was changed.
    """

    def __init__(
        self, plan: ServerPlan, form: SumFormat, folder: Path, seed: int, checkpoint: Checkpoint | None
    ) -> None:
        super().__init__(folder, seed, plan.config.noise_source, plan.limits, checkpoint)
        self.plan = plan
        self.pipeline = plan.pipeline(form, self.source)
        self._open(plan, folder, self.source.note, checkpoint)

    def _least(self, round: int) -> Event:
        return self.plan.event(round, self.plan.clip.bound)

    def release(self, round: int, total: Total, public: Mapping[str, Tensor]) -> None:
        """Write the round down, before its sum is noised and published.

        Done again after a stop, it is the same release and counts once: the noise is the same, and so the
        sum has to be. What the ledger keeps of the sum can only be told by whoever has the secret.

        Raises:
            BudgetExceeded: the budget cannot pay for it.
            DataError: the round was released before, with another sum.
        """
        digest = blake2b(digest_size=16)
        for name, tensor in sorted(total.sums.items()):
            digest.update(name.encode())
            digest.update(tensor.numpy().data)
        sealed = self.source.bytes("release", round, digest.hexdigest(), 16).hex()
        self.budget.release(self.plan.event(round, self._bound(public)), sealed, _STREAM)

    def failed(self, round: int) -> None:
        """A failed round stays in the ledger where rounds are counted together; it costs nothing more there.

        With correlated noise a round has its row whether or not it succeeds, and where groups take turns a
        gap would begin another pass over them.
        """
        if isinstance(self.plan.sampler, MinSep | CyclicPoisson) and not self.ledger.released(_STREAM, round):
            self.ledger.record(self.plan.event(round, self.plan.clip.bound), _FAILED, _STREAM)

    def reading(self, round: int, public: Mapping[str, Tensor]) -> Privacy:
        """The event that says what is spent after so many rounds."""
        found = self.budget.gauge(self.plan.event(round, self._bound(public)))
        last = self.ledger.last
        values = {
            **found.values,
            "remaining": float(min(found.values["remaining"], self.plan.rounds - round)),
            "clip": last.clip if last is not None and last.clip else self.plan.clip.bound,
        }
        return replace(found, round=round, values=values)

    def facts(self, clients: int, public: Mapping[str, Tensor]) -> dict[str, Any]:
        """All that ε depends on."""
        found = [self.ledger.statement(self.delta)] if self.ledger.steps else []
        return {
            **describe(self.plan),
            "bound": self._bound(public),
            "noise_source": self.source.note,
            "statements": [_stated(statement, self._said) for statement in found],
            "clients": None,
        }

    @property
    def _said(self) -> tuple[str, ...]:
        """What to say beside a statement."""
        most = self.plan.config.weight_max
        return _SERVER if most is None else (*_SERVER, *(each.format(most=most) for each in _WEIGHTED))

    def _bound(self, public: Mapping[str, Tensor]) -> float:
        """The clip bound in force."""
        return float(public[CLIP_BOUND]) if CLIP_BOUND in public else self.plan.clip.bound


class ClientGuard(Guard):
    """A ledger and a budget for each client: the clients add the noise.

    Args:
        plan: what a client releases a round.
        folder: the run folder.
        seed: root seed.
        checkpoint: where a run goes on from.

    Raises:
        DataError: a ledger or the key of a run that goes on is missing or was changed.
    """

    participation: Participation

    def __init__(self, plan: ClientPlan, folder: Path, seed: int, checkpoint: Checkpoint | None) -> None:
        super().__init__(folder, seed, plan.config.noise_source, plan.limits, checkpoint)
        self.plan, self.delta = plan, plan.config.delta
        self.ledgers = plan.ledgers(folder, self.source)
        self.pipeline = plan.pipeline(self.source, self.ledgers)
        self.steps_of = plan.steps(self.source)
        if checkpoint is not None:
            self.ledgers.check(self.participation.used.items(), plan.event)
        self._after = cache(self._statement)

    @property
    def epsilon(self) -> float:
        """Spent by the client that took part most often."""
        return self._after(self._most).epsilon

    def stop(self, round: int, clients: int, needed: int) -> str:
        """See `Guard.stop`; clients whose budget is spent are not asked."""
        del round
        limits = self.plan.limits
        spent = sum(count >= limits.uses for count in self.participation.used.values())
        if clients - spent >= needed:
            return ""
        return "budget" if limits.uses == self.plan.affordable else "participation"

    def release(self, round: int, total: Total, public: Mapping[str, Tensor]) -> None:
        """Nothing is released any more: what the clients sent is noised and written down."""

    def failed(self, round: int) -> None:
        """What clients have sent, they have sent."""

    def close(self) -> None:
        """A ledger is open only while its client writes."""

    def reading(self, round: int, public: Mapping[str, Tensor]) -> Privacy:
        """The event that says what the client has spent that took part most often."""
        del public
        config, limits, most = self.plan.config, self.plan.limits, self._most
        values = {
            "remaining": float(limits.uses - most),
            "next": self._after(most + 1).epsilon,
            "budget": config.epsilon,
            "clip": self.plan.clip.sensitivity().bound,
        }
        level = "client, local" if config.unit == "client" else config.unit
        return Privacy(epsilon=self.epsilon, delta=self.delta, level=level, round=round, values=values)

    def facts(self, clients: int, public: Mapping[str, Tensor]) -> dict[str, Any]:
        """All that ε depends on, and how it is distributed over the clients."""
        del public
        rounds = Counter({0: clients})
        for client in self.ledgers.clients():
            ledger = self.ledgers.read(client)
            rounds[0 if ledger is None else ledger.steps // self.plan.updates] += 1
            rounds[0] -= 1
        each = sorted((count, number) for count, number in rounds.items() if number)
        most = each[-1][0]
        spent = {count: self._after(count).epsilon for count, _ in each}
        return {
            **describe(self.plan),
            "bound": self.plan.clip.sensitivity().bound,
            "noise_source": self.ledgers.noise_source,
            "statements": [_stated(self._after(most), *self._said)] if most else [],
            "clients": {
                "clients": clients,
                "took_part": clients - rounds[0],
                "spent": sum(number for count, number in each if count >= self.plan.affordable),
                "largest": spent[most],
                "median": median(spent[count] for count, number in each for _ in range(number)),
                "least": spent[each[0][0]],
                "distribution": [[spent[count], number] for count, number in each],
            },
        }

    @property
    def _said(self) -> tuple[tuple[str, ...], str]:
        """What to say beside a statement, and in front of it."""
        return (_LOCAL, "local, ") if self.plan.config.unit == "client" else (_EXAMPLES, "")

    @property
    def _most(self) -> int:
        return max(self.participation.used.values(), default=0)

    def _statement(self, rounds: int) -> Statement:
        """What a client's ledger says after so many rounds: the releases are alike, whenever they were."""
        coming: list[Event] = []
        if rounds:
            coming = [replace(self.plan.event, step=0, count=rounds * self.plan.updates)]
        return state(coming, self.delta, noise_source=self.ledgers.noise_source)


class ShareGuard(_OneLedger):
    """One ledger and one budget: clients add the noise in shares, and the sum that is opened holds all of it.

    Args:
        plan: what is released a round.
        folder: the run folder.
        seed: root seed.
        checkpoint: where a run goes on from.

    Raises:
        DataError: the ledger or the key of a run that goes on is missing or was changed.
    """

    def __init__(self, plan: SharePlan, folder: Path, seed: int, checkpoint: Checkpoint | None) -> None:
        super().__init__(folder, seed, plan.config.noise_source, None, checkpoint)
        self.plan = plan
        self.pipeline = plan.pipeline()
        note = f"{plan.mechanism} shares of the clients under a secure sum, {self.source.note}"
        self._open(plan, folder, note, checkpoint)

    def _least(self, round: int) -> Event:
        return self.plan.event(round, self.plan.least)

    def charge(self, release: Release) -> None:
        """Write the round down with the noise that survived, before anything of its sum is opened.

        Done again after a stop it is the same session, with the same noise, and counts once.

        Raises:
            BudgetExceeded: the budget cannot pay for it.
            DataError: the round was released before, in another session.
        """
        session = f"{release.session_id.hex()} {release.survivors}"
        sealed = self.source.bytes("release", release.round, session, 16).hex()
        self.budget.release(self.plan.event(release.round, release.survivors), sealed, _STREAM)

    def release(self, round: int, total: Total, public: Mapping[str, Tensor]) -> None:
        """It was charged before it was opened."""

    def failed(self, round: int) -> None:
        """What was charged stays charged; without a charge nothing was opened."""

    def reading(self, round: int, public: Mapping[str, Tensor]) -> Privacy:
        """The event that says what is spent after so many rounds."""
        del public
        found = self.budget.gauge(self.plan.event(round, self.plan.least))
        last = self.ledger.last
        values = {
            **found.values,
            "remaining": float(min(found.values["remaining"], self.plan.rounds - round)),
            "clip": self.plan.clip.bound,
            "noise_multiplier": self.plan.noise_multiplier if last is None else last.noise_multiplier,
        }
        return replace(found, round=round, values=values)

    def facts(self, clients: int, public: Mapping[str, Tensor]) -> dict[str, Any]:
        """All that ε depends on."""
        del clients, public
        found = [self.ledger.statement(self.delta)] if self.ledger.steps else []
        return {
            **self.plan.facts(),
            "noise_source": self.ledger.noise_source,
            "statements": [_stated(statement, _SHARES) for statement in found],
            "clients": None,
        }


def open_guard(
    plan: ServerPlan | ClientPlan | SharePlan,
    form: SumFormat,
    folder: Path,
    seed: int,
    checkpoint: Checkpoint | None,
) -> Guard:
    """The guard of a plan; see the classes for arguments and errors."""
    if isinstance(plan, SharePlan):
        return ShareGuard(plan, folder, seed, checkpoint)
    if isinstance(plan, ServerPlan):
        return ServerGuard(plan, form, folder, seed, checkpoint)
    return ClientGuard(plan, folder, seed, checkpoint)


def _stated(statement: Statement, beside: tuple[str, ...], label: str = "") -> dict[str, Any]:
    """A statement for the result: its numbers, its one line, and what else it assumes."""
    facts = statement.as_dict()
    own = [each for each in facts["assumptions"] if not (label and "added to the sum" in each)]
    return facts | {"assumptions": [*own, *beside], "statement": f"{label}{statement}"}
