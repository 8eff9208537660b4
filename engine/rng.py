"""Named random streams: a draw depends on its name, never on the order of arrival.

A stream is named by (seed, purpose, round, client). The name is hashed to the key of a counter-based
generator (Philox 4x64; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), so any
process can make any stream again without having made the others.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from mycelia.engine.errors import ConfigError

__all__ = ["derive", "generator"]


def _digest(seed: int, purpose: str, round: int, client: int | str) -> bytes:
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed is {seed}", rule="a seed is an integer in [0, 2**63)", who="seed")
    name = f"{seed}\x00{purpose}\x00{round}\x00{type(client).__name__}\x00{client}"
    return blake2b(name.encode(), digest_size=16).digest()


def derive(seed: int, purpose: str, *, round: int = 0, client: int | str = 0) -> int:
    """A 63-bit integer seed for the named stream.

    >>> derive(0, "dropout", round=1, client=7) == derive(0, "dropout", round=1, client=7)
    True
    """
    return int.from_bytes(_digest(seed, purpose, round, client)[:8], "little") >> 1


def generator(seed: int, purpose: str, *, round: int = 0, client: int | str = 0) -> np.random.Generator:
    """A NumPy generator positioned at the start of the named stream."""
    key = np.frombuffer(_digest(seed, purpose, round, client), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
