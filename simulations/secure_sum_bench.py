"""What a secure sum costs on this machine, the limits it could reach, and Flower's beside it."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from mycelia.engine.environment import describe, memory
from mycelia.engine.errors import ConfigError, MyceliaError
from mycelia.privacy.secagg import shamir
from mycelia.privacy.secagg.config import SecureSumConfig
from mycelia.privacy.secagg.graph import calculate
from mycelia.privacy.secagg.keys import AgreementKey, Identity, verify_bytes
from mycelia.privacy.secagg.round_config import Threat
from mycelia.simulations import secure_sum_flower
from mycelia.simulations.secure_sums import secure_sum

__all__ = ["Kernel", "PeerFailed", "SecureSumBench", "flower", "measure"]

_BLOCK: Final = 1 << 18  # bytes that stay in the cache
_VECTOR: Final = 1 << 22  # words that do not
_MILLION: Final = 10**6
_LEAST_SECONDS: Final = 0.1
"""A rate is measured for at least so long."""


@dataclass(frozen=True)
class SecureSumBench:
    """A secure sum to be measured.

    Attributes:
        clients: n.
        dim: entries of a vector, d.
        neighbours: k of each client.
        threshold: shares that rebuild a secret, t.
        dropout: share of the clients that vanish before their masked upload, 0 to below 1.
        bits: of an element of the sum.
        threat: "passive" or "active".
        corrupt: share of the clients assumed corrupt where (k, t) are checked.
        repeat: sums, of which the median is taken.
        seed: of vectors and dropouts; keys and masks are the operating system's.

    Raises:
        ConfigError: a number out of range.
    """

    clients: int
    dim: int
    neighbours: int
    threshold: int
    dropout: float = 0.0
    bits: int = 32
    threat: str = "passive"
    corrupt: float = 0.1
    repeat: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"clients": 3, "dim": 1, "neighbours": 2, "threshold": 2, "repeat": 1, "seed": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", rule=f"at least {low}", who="secure sum"
                )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}", rule="from 0 to below 1", who="secure sum")

    @cached_property
    def dropped(self) -> tuple[int, ...]:
        """Who vanishes: round(dropout x n) of the ids 1 … n."""
        count = round(self.dropout * self.clients)
        draw = np.random.default_rng([self.seed, 1])
        return tuple(sorted(int(client) + 1 for client in draw.choice(self.clients, count, replace=False)))

    @property
    def config(self) -> SecureSumConfig:
        """The settings of the sum.

        Raises:
            SettingsRefused: (k, t) are not safe, or the bits too few.
        """
        return SecureSumConfig(
            neighbours=self.neighbours,
            threshold=self.threshold,
            bits=self.bits,
            threat=self.threat,  # type: ignore[arg-type]
            corrupt=self.corrupt,
            dropout=self._assumed_dropout,
        )

    @property
    def security(self) -> dict[str, bool]:
        """Which calculation (k, t) pass, for the largest and the smallest cohort."""
        least = max(3, math.ceil((1 - self._assumed_dropout) * self.clients))
        return {
            threat.name.lower(): all(
                calculate(
                    n, self.neighbours, self.threshold, threat=threat,
                    corrupt_ppm=round(self.corrupt * _MILLION),
                    dropout_ppm=round(self._assumed_dropout * _MILLION),
                ).safe
                for n in (least, self.clients)
            )
            for threat in Threat
        }  # fmt: skip

    @property
    def _assumed_dropout(self) -> float:
        # by default a tenth is assumed to vanish; n_min has to leave room for all who do
        return max(0.1, len(self.dropped) / self.clients)


@dataclass(frozen=True)
class Kernel:
    """Rates of this machine on one core, which no secure sum can beat.

    Attributes:
        words_per_second: mask words made by AES-256-CTR and added, R; 32-bit for up to 32 bits, else 64-bit.
        adds_per_second: words from memory added to words in memory, R_add.
        agree_us: one X25519 agreement, in microseconds.
        verify_us: one Ed25519 verification, in microseconds.
        shamir_ms: rebuilding the secrets of a round, in milliseconds.
    """

    words_per_second: float
    adds_per_second: float
    agree_us: float
    verify_us: float
    shamir_ms: float

    @classmethod
    def of(cls, bench: SecureSumBench) -> Kernel:
        """Measured now."""
        dtype = np.dtype("<u4" if bench.bits <= 32 else "<u8")
        total = np.zeros(_BLOCK // dtype.itemsize, dtype)
        words, zeros = np.empty_like(total), bytes(_BLOCK)
        raw, cipher = words.view(np.uint8).data, Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(16)))
        update = cipher.encryptor().update_into

        def mask() -> None:
            update(zeros, raw)
            np.add(total, words, out=total)

        vector, upload = (np.zeros(_VECTOR, dtype) for _ in range(2))
        one, other = AgreementKey.generate(), AgreementKey.generate()
        identity = Identity.generate()
        signature = identity.sign(b"kernel")
        rebuilt, t = bench.clients, bench.threshold
        shares = np.zeros((rebuilt, t, shamir.LIMBS), np.uint32)
        holders = np.tile(np.arange(1, t + 1), (rebuilt, 1))
        return cls(
            words_per_second=total.size / _seconds(mask),
            adds_per_second=_VECTOR / _seconds(lambda: np.add(vector, upload, out=vector)),
            agree_us=1e6 * _seconds(lambda: one.agree(other.public)),
            verify_us=1e6 * _seconds(lambda: verify_bytes(identity.public, signature, b"kernel")),
            shamir_ms=1e3 * _seconds(lambda: shamir.combine(shares, holders)),
        )

    def client_ms(self, bench: SecureSumBench) -> float:
        """The least that a client can take: its masks, agreements and verifications."""
        k, t = min(bench.neighbours, bench.clients - 1), bench.threshold
        masks = (k + 1) * bench.dim / self.words_per_second
        return 1e3 * masks + (2 * k * self.agree_us + (k + t) * self.verify_us) / 1e3

    def server_ms(self, bench: SecureSumBench) -> float:
        """The least that the server can take: adding, masks of both kinds, agreements and verifications."""
        n, k, dropped = bench.clients, min(bench.neighbours, bench.clients - 1), len(bench.dropped)
        alive = k * (1 - dropped / n)
        masks = (n - dropped + dropped * alive) * bench.dim / self.words_per_second
        adding = (n - dropped) * bench.dim / self.adds_per_second
        asymmetric = (dropped * k * self.agree_us + 4 * n * self.verify_us) / 1e3
        return 1e3 * (masks + adding) + asymmetric + self.shamir_ms


def measure(bench: SecureSumBench) -> dict[str, Any]:
    """Run it; times are medians over the repeats.

    Returns:
        client_ms, server_ms (CPU time inside the machines), upload_bytes, share_bytes, peak_bytes (the most
        that the process took for all clients and the server together, beyond their vectors), exact, clients,
        dim, neighbours, threshold, dropped, ring_bits, threat, security, kernel, client_over_limit,
        server_over_limit, phase_ms, machine.

    Raises:
        SettingsRefused: settings that no round can have.
        SecureSumAborted: no sum came about.
    """
    config, draw = bench.config, np.random.default_rng([bench.seed, 0])
    largest = 2.0**-config.frac_bits * config.value_bound
    vectors = draw.uniform(-largest, largest, (bench.clients, bench.dim)).astype(np.float32)
    drops = dict.fromkeys(bench.dropped, "masked")
    before = memory().now
    found = [secure_sum(vectors, config=config, drops=drops) for _ in range(bench.repeat)]
    peak = max(0, memory().peak - before)
    kernel = Kernel.of(bench)
    client = statistics.median(result.client_ms for result in found)
    server = statistics.median(result.server_ms for result in found)
    last = found[-1]
    return {
        "client_ms": client,
        "server_ms": server,
        "upload_bytes": last.upload_bytes,
        "share_bytes": last.share_bytes,
        "peak_bytes": peak,
        "exact": all(result.exact for result in found),
        "clients": bench.clients,
        "dim": bench.dim,
        "neighbours": min(bench.neighbours, bench.clients - 1),
        "threshold": bench.threshold,
        "dropped": len(bench.dropped),
        "ring_bits": bench.bits,
        "threat": bench.threat,
        "security": bench.security,
        "kernel": asdict(kernel),
        "client_over_limit": client / kernel.client_ms(bench),
        "server_over_limit": server / kernel.server_ms(bench),
        "phase_ms": dict(last.phase_ms),
        "repeat": bench.repeat,
        "machine": describe()["machine"],
    }


def flower(bench: SecureSumBench, python: Path | None = None) -> dict[str, Any]:
    """The same sum by Flower's SecAgg+ workflow, as `secure_sum_flower.measure` gives it.

    Args:
        bench: n, k, t, d and who vanishes.
        python: an interpreter that has Flower; this one when left out.

    Raises:
        ConfigError: Flower is not installed there.
        PeerFailed: its workflow gave no sum.
    """
    if python is None and find_spec("flwr") is None:
        raise ConfigError(
            "Flower is not installed beside Mycelia",
            rule="its sum is measured by its own code",
            fix="pip install 'flwr==1.42.*' into an environment, and name its interpreter with --peer-python",
            who="--against flwr",
        )
    asked = {
        "clients": bench.clients, "dim": bench.dim, "neighbours": bench.neighbours,
        "threshold": bench.threshold, "dropped": bench.dropped, "seed": bench.seed,
    }  # fmt: skip
    script = str(Path(secure_sum_flower.__file__).resolve())
    line = [str(python or sys.executable), script, json.dumps(asked)]
    settings = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False, env=settings)
    except OSError as error:
        raise ConfigError(
            f"{python} cannot be run: {error.strerror}", rule="a Python interpreter", who="--peer-python"
        ) from error
    if done.returncode != 0:
        if "No module named 'flwr'" in done.stderr:
            raise ConfigError(
                f"{python} has no Flower", rule="its sum is measured by its own code", who="--peer-python"
            )
        raise PeerFailed(
            f"Flower's workflow ended with: {done.stderr.strip().splitlines()[-1:] or ['nothing']}",
            who="flwr",
        )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


class PeerFailed(MyceliaError):
    """The other library's sum did not come about."""


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call: the fastest of a few runs, each of many calls."""
    work()
    calls, best = 1, math.inf
    while True:
        begin = time.process_time()
        for _ in range(calls):
            work()
        spent = time.process_time() - begin
        best = min(best, spent / calls)
        if spent >= _LEAST_SECONDS:
            return best
        calls *= 2
