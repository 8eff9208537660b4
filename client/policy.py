"""What a client takes part in, whatever the server asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.messages import Mechanism, Reason, RoundConfig, SecureSumError, Threat

__all__ = ["ClientPolicy"]


@dataclass(frozen=True)
class ClientPolicy:
    """The limits of one client; a round beyond any of them is refused, and the client says which.

    Attributes:
        n_min: the fewest clients in a sum, at least 3.
        threat: the weakest guard against the server that it accepts.
        corrupt: the share of corrupt clients it reckons with at least, [0, 1).
        threshold: the least t/k, in [0, 1].
        clip: the largest L2 norm a round may ask for; None for any, and for none at all.
        noise: the least standard deviation of the noise in the sum over the L2 bound; None for any.
        tasks: hashes of the algorithms and settings it works on; None for any.

    Raises:
        ConfigError: a limit out of range.
    """

    n_min: int = 3
    threat: Threat = Threat.ACTIVE
    corrupt: float = 0.0
    threshold: float = 0.5
    clip: float | None = None
    noise: float | None = None
    tasks: frozenset[bytes] | None = None

    def __post_init__(self) -> None:
        rules = {
            "n_min": (self.n_min >= 3, "at least 3"),
            "threat": (self.threat in set(Threat), "passive or active"),
            "corrupt": (0 <= self.corrupt < 1, "in [0, 1)"),
            "threshold": (0 <= self.threshold <= 1, "in [0, 1]"),
            "clip": (self.clip is None or 0 < self.clip < math.inf, "above 0, or None"),
            "noise": (self.noise is None or 0 < self.noise < math.inf, "above 0, or None"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", rule=rule, who="client policy")

    @property
    def corrupt_ppm(self) -> int:
        """`corrupt` in parts per million, rounded up."""
        return min(math.ceil(self.corrupt * 10**6), 10**6 - 1)

    def check(self, config: RoundConfig, client: int) -> None:
        """Refuse a round beyond the limits.

        Args:
            config: of the round.
            client: whose policy this is, for the error.

        Raises:
            SecureSumError: `POLICY` with the field, what is asked and what is allowed.
        """
        clip = math.ldexp(config.l2_steps, -config.frac_bits)
        noised = config.noise.mechanism != Mechanism.NONE
        noise = math.sqrt(config.noise.variance) / config.l2_steps if noised and config.l2_steps else 0.0
        refused: dict[str, tuple[bool, object, object]] = {
            "n_min": (config.n_min < self.n_min, config.n_min, f"at least {self.n_min}"),
            "threat": (
                config.threat < self.threat,
                Threat(config.threat).name.lower(),
                self.threat.name.lower(),
            ),
            "threshold": (
                config.t < self.threshold * config.k,
                f"{config.t} of {config.k}",
                f"at least {self.threshold} of the neighbours",
            ),
            "clip": (
                self.clip is not None and not 0 < clip <= self.clip,
                clip or "none",
                f"at most {self.clip}",
            ),
            "noise": (self.noise is not None and noise < self.noise, noise, f"at least {self.noise}"),
            "algorithm": (
                self.tasks is not None and config.task_sha256 not in self.tasks,
                config.task_sha256.hex(),
                "one that was allowed",
            ),
        }
        for name, (beyond, asked, allowed) in refused.items():
            if beyond:
                raise SecureSumError(
                    Reason.POLICY,
                    f"{name} of the round",
                    rule="a client takes part within its own limits",
                    client=client,
                    phase="advertise",
                    field=name,
                    asked=asked,
                    allowed=allowed,
                )
