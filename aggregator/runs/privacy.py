"""How a deployed run keeps to its privacy plan: what the server noises, what it charges, when it stops."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from mycelia.aggregator.charges import charge, ledger_of
from mycelia.aggregator.leases import Lease
from mycelia.aggregator.noise_shares import SharePlan
from mycelia.aggregator.private_plans import ServerPlan
from mycelia.aggregator.runs.plans import RunPlan
from mycelia.engine.errors import BudgetExceeded, ConfigError
from mycelia.engine.events import Privacy
from mycelia.engine.sums import Total
from mycelia.engine.types import Tensors
from mycelia.privacy.budget import Budget
from mycelia.privacy.events import Event
from mycelia.privacy.federated import CLIP_BOUND
from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.pipeline import Pipeline
from mycelia.privacy.sampling import CyclicPoisson, MinSep
from mycelia.privacy.secagg.events import Release

__all__ = ["ServerPrivacy"]

_KEY: Final = "noise.key"
_STREAM: Final = "server"


class ServerPrivacy:
    """The server's side of a `[privacy]` block, with its ledger in the store.

    Args:
        plan: of the run.
        lease: that the ledger is written with.
        folder: where the key of the noise is kept, for its owner only.

    Attributes:
        pipeline: what is done to a sum before it is merged.

    Raises:
        ConfigError: noise that a deployed server does not make.
        Problem: `STORE_CORRUPT`, `STORE`.
    """

    def __init__(self, plan: RunPlan, lease: Lease, folder: Path) -> None:
        self._run, self._lease, self._plan = plan, lease, plan.privacy
        self.pipeline, self._budget, self._source = Pipeline(), None, None
        if isinstance(self._plan, ServerPlan):
            if isinstance(self._plan.sampler, MinSep | CyclicPoisson):
                raise ConfigError(
                    f"the selector {plan.config.selector.name} with noise that is correlated over the rounds",
                    rule="a deployed server draws noise afresh each round",
                    fix="use the selector uniform or poisson, and leave factorisation out",
                    who="privacy",
                )
            self._source = self._noise(folder)
            self.pipeline = self._plan.pipeline(plan.form, self._source)
        elif isinstance(self._plan, SharePlan):
            self.pipeline = self._plan.pipeline()
            self._source = self._noise(folder)
        if plan.secure is not None:
            self.pipeline = plan.secure.pipeline(self.pipeline)
        if isinstance(self._plan, ServerPlan | SharePlan):
            config = self._plan.config
            note = self._source.note if self._source is not None else ""
            if isinstance(self._plan, SharePlan):
                note = f"{self._plan.mechanism} shares of the devices under a secure sum"
            ledger = ledger_of(lease.store, lease.run, note)
            relation = self._plan.sampler.relation
            self._budget = Budget(config.epsilon, config.delta, "client", relation, ledger=ledger)

    @property
    def charges(self) -> bool:
        """Whether a release of the server is charged before it happens."""
        return self._budget is not None

    @property
    def selection_seed(self) -> int:
        """Seed of the draws; secret where ε rests on that."""
        if not self._run.config.secret_draw or self._source is None:
            return self._run.config.seed
        return int.from_bytes(self._source.bytes("selection", 0, "", 8), "little") >> 1

    def stop(self, round: int) -> str:
        """Why the run ends before this round: "budget", or "" where it goes on."""
        if self._budget is None or self._budget.ledger.released(_STREAM, round):
            return ""
        try:
            self._budget.allow(self._least(round))
        except BudgetExceeded:
            return "budget"
        return ""

    def charge_sum(self, round: int, attempt: int, total: Total, public: Tensors) -> bytes:
        """Write a round down, before its sum is noised; done again it is the same release.

        Returns:
            hash of the entry, for the log.

        Raises:
            BudgetExceeded: the budget cannot pay for it.
            DataError: the round was released before, with another sum.
        """
        if not isinstance(self._plan, ServerPlan) or self._source is None or self._budget is None:
            raise ConfigError("a charge without a plan", rule="noise of the server is charged", who="privacy")
        digest = blake2b(digest_size=16)
        for name, tensor in sorted(total.sums.items()):
            digest.update(name.encode())
            digest.update(tensor.numpy().data)
        sealed = self._source.bytes("release", round, digest.hexdigest(), 16).hex()
        event = self._plan.event(round, self._bound(public))
        return self._charge(round, attempt, event, sealed)

    def charge_shares(self, release: Release) -> None:
        """Write a round down with the noise that survived, before anything of its sum is opened.

        Raises:
            BudgetExceeded: the budget cannot pay for it.
        """
        if not isinstance(self._plan, SharePlan) or self._source is None:
            return
        session = f"{release.session_id.hex()} {release.survivors}"
        sealed = self._source.bytes("release", release.round, session, 16).hex()
        event = self._plan.event(release.round, release.survivors)
        self._charge(release.round, release.attempt, event, sealed)

    def reading(self, round: int, public: Tensors) -> Privacy | None:
        """What is spent after so many rounds; None where devices keep their own ledgers."""
        if self._budget is None or not isinstance(self._plan, ServerPlan | SharePlan):
            return None
        found = self._budget.gauge(self._least(round))
        remaining = float(min(found.values["remaining"], self._run.config.rounds - round))
        clip = self._bound(public)
        values = {**found.values, "remaining": remaining, "clip": clip}
        return Privacy(
            epsilon=found.epsilon, delta=found.delta, level=found.level, round=round, values=values
        )

    def facts(self) -> dict[str, Any]:
        """What the result of a run says."""
        if self._plan is None:
            return {}
        config = self._plan.config
        said: dict[str, Any] = {"unit": config.unit, "epsilon": config.epsilon, "delta": config.delta}
        if self._budget is None:
            return said | {"ledgers": "each device keeps its own"}
        ledger = self._budget.ledger
        statement = str(ledger.statement(config.delta)) if ledger.steps else ""
        return said | {"spent": self._budget.spent, "statement": statement}

    @property
    def budget_epsilon(self) -> float | None:
        """The most that may be spent."""
        return None if self._plan is None else self._plan.config.epsilon

    @property
    def unit(self) -> str:
        """Whom it protects; "" without a plan."""
        return "" if self._plan is None else self._plan.config.unit

    def _charge(self, round: int, attempt: int, event: Event, sealed: str) -> bytes:
        if self._budget is None:
            raise ConfigError("no budget", rule="a release is paid for", who="privacy")
        if not self._budget.ledger.released(_STREAM, round):
            self._budget.allow(event)
        entry = charge(self._lease, round, attempt, event, release=sealed, stream=_STREAM)
        if entry.new:
            self._budget.ledger.record(event, sealed, _STREAM)
        return entry.hash

    def _least(self, round: int) -> Event:
        """The release of a round that is still to come, with the least noise that it may have."""
        if isinstance(self._plan, SharePlan):
            return self._plan.event(round, self._plan.least)
        if isinstance(self._plan, ServerPlan):
            return self._plan.event(round, self._plan.clip.bound)
        raise ConfigError("no noise of the server", rule="there is a plan of it", who="privacy")

    def _bound(self, public: Tensors) -> float:
        if isinstance(self._plan, ServerPlan | SharePlan):
            return float(public[CLIP_BOUND]) if CLIP_BOUND in public else self._plan.clip.bound
        return 0.0

    def _noise(self, folder: Path) -> NoiseSource:
        config = self._run.config
        if config.privacy is not None and config.privacy.noise_source == "seeded":
            return NoiseSource.seeded(config.seed)
        path = folder / _KEY
        if path.exists():
            return NoiseSource.load(path)
        source = NoiseSource.os()
        source.save(path)
        return source
