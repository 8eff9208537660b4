"""The owner's word about each piece of work: the policy, asked with what the device has done so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from mycelia.aggregator.wire import federation_pb2 as pb
from mycelia.aggregator.wire.channel import is_loopback, split_address
from mycelia.aggregator.wire.position import Position
from mycelia.aggregator.wire.settings import TaskSettings
from mycelia.client.config import Asked, ClientConfig, History
from mycelia.client.device_journal import DeviceJournal, Spent
from mycelia.client.policy import ClientPolicy
from mycelia.engine.algorithms import build as build_algorithm
from mycelia.engine.errors import BudgetExceeded, PolicyRefused
from mycelia.engine.local import LocalWork
from mycelia.engine.plugins import is_reference
from mycelia.privacy.secagg.roster import Issuer, Roster
from mycelia.privacy.secagg.round_config import RoundConfig, Threat

__all__ = ["Refused", "Rules"]


class Refused(PolicyRefused):
    """The owner's policy, or a rule of the protocol, does not allow the work.

    Args:
        field: what of it.
        asked: by the server.
        allowed: by the owner.
    """

    def __init__(self, field: str, asked: str, allowed: str) -> None:
        self.field, self.asked, self.allowed = field, asked, allowed
        super().__init__(f"{field}: asked {asked}, allowed {allowed}", who="policy")


@dataclass(frozen=True)
class Rules:
    """What this device does, and what it does not.

    Attributes:
        config: the owner's.
        journal: what was done before.
        examples: of the device.
        insecure: whether it was started without TLS.
        now: local time.
    """

    config: ClientConfig
    journal: DeviceJournal
    examples: int
    insecure: bool
    now: Callable[[], datetime]

    def check(
        self,
        task: pb.Task,
        settings: TaskSettings,
        *,
        roster: Roster | None,
        config: RoundConfig | None = None,
        upload_bytes: int = 0,
    ) -> None:
        """Refuse what the owner does not allow; before anything is trained.

        Args:
            task: as it came.
            settings: those in it.
            roster: of the federation.
            config: of its secure sum; None: there is none.
            upload_bytes: of the update, where they are known.

        Raises:
            Refused: with the field of the policy.
        """
        self._check_code(settings)
        if config is not None and self.insecure and not self._near():
            raise Refused("secure_sum", "without TLS over a network", "with TLS, or on this machine")
        if task.work == pb.EVALUATE and self.config.policy.secure_sum == "required":
            raise Refused("secure_sum", "the metrics of this device by themselves", "required")
        at = Position.of(task.at)
        steps, epochs = self._work(settings)
        privacy = settings.privacy
        if privacy is not None and privacy.noise_source == "seeded":
            privacy = None  # whoever knows the seed can take the noise out: that is no promise
        asked = Asked(
            run=at.run,
            purpose=task.purpose,
            algorithm=settings.algorithm.name,
            dataset=self.config.data.name,
            model=self.config.model.name,
            schema_sha256=task.schema_sha256.hex(),
            secure_sum=config is not None,
            threat="" if config is None else Threat(config.threat).name.lower(),
            cohort=settings.cohort if config is None else config.n_min,
            threshold=0.0 if config is None else config.t / config.k,
            corrupt=0.0 if config is None else config.corrupt_ppm / 10**6,
            issuers=_issuers(roster),
            epsilon=None if privacy is None else privacy.epsilon,
            delta=None if privacy is None else privacy.delta,
            local_epochs=epochs,
            local_steps=steps,
            upload_bytes=upload_bytes if config is None else config.upload_bytes,
            trains=task.work in (pb.TRAIN, pb.DESCRIBE),
        )
        refusal = self.config.policy.refusal(asked, self.now(), self._history(at))
        if refusal is not None:
            raise Refused(*refusal)

    def allow_spending(self, spent: Spent) -> None:
        """Look at the owner's budget again, right before a release.

        Args:
            spent: of a data set by a run, this release included.

        Raises:
            BudgetExceeded: the owner does not allow it.
        """
        limits = self.config.policy.limits
        others = [each for each in self.journal.spent(spent.data) if each.run != spent.run]
        for name in ("epsilon", "delta"):
            most, after = getattr(limits, name), math.fsum(getattr(each, name) for each in (spent, *others))
            if most != "any" and after > most:
                raise BudgetExceeded(
                    f"{name} of {spent.data} would come to {after:.4g}",
                    rule=f"at most {most:g}, over all runs",
                    fix="raise limits in the policy of this device, or leave the run",
                    who="policy",
                )

    def secure_policy(self) -> ClientPolicy:
        """What the machine of a secure sum looks at again."""
        return self.config.policy.secure_policy()

    def _check_code(self, settings: TaskSettings) -> None:
        """No code runs here because a server names it."""
        loss, algorithm, own = settings.loss, settings.algorithm.name, self.config.loss
        if loss != own and (own is not None or is_reference(loss)):
            raise Refused("loss", loss, own or "a loss that Mycelia has")
        allowed = self.config.policy.algorithms
        if allowed == "any" and is_reference(algorithm):
            raise Refused("algorithms", algorithm, "own code only where its name is in the list")
        if allowed != "any" and algorithm not in allowed:
            raise Refused("algorithms", algorithm, ", ".join(allowed) or "none")

    def _near(self) -> bool:
        return all(is_loopback(split_address(server)[0]) for server in self.config.server)

    def _work(self, settings: TaskSettings) -> tuple[int, float]:
        """Local steps of a round, and passes over this device's examples."""
        given, privacy = settings.local, settings.privacy
        algorithm = build_algorithm(settings.algorithm.name, **settings.algorithm.options)
        work = algorithm.bind(population=settings.population).work(
            LocalWork(given.epochs, given.steps, given.batch_size, given.lr)
        )
        if privacy is not None and privacy.unit == "example" and settings.examples:
            mean = settings.examples / settings.population
            rate = privacy.sampling_rate or min(1.0, (work.batch_size or mean) / mean)
            steps = work.steps or math.ceil(work.epochs / rate - 1e-9)
            return steps, steps * rate
        steps = work.step_count(self.examples)
        if not work.steps:
            return steps, float(work.epochs)
        return steps, steps * min(1.0, (work.batch_size or self.examples) / self.examples)

    def _history(self, at: Position) -> History:
        """What was done before this round; an earlier attempt at it is the same round."""
        done = self.journal.done(self.now().date())
        again = int(self.journal.counted(at))
        others = [each for each in self.journal.spent(self.config.data.name) if each.run != at.run]
        return History(
            rounds_today=max(0, done.day_rounds - again),
            rounds_total=max(0, done.rounds - again),
            upload_today=done.day_bytes,
            epsilon_spent=math.fsum(each.epsilon for each in others),
            delta_spent=math.fsum(each.delta for each in others),
        )


def _issuers(roster: Roster | None) -> frozenset[str]:
    if roster is None:
        return frozenset()
    clients = [entry for entry in roster.clients if not roster.is_revoked(entry.client)]
    return frozenset(Issuer(entry.issuer).name.lower() for entry in clients)
