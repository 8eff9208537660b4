"""Named random numbers for many clients at once.

As in `engine/rng.py` a number depends on (seed, purpose, round, client) and on nothing else; here one array
operation gives those of a whole cohort. SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014) turns the key and the client's id into 64 bits. Good for how devices behave;
privacy noise never comes from here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import ndtri

from mycelia.engine.rng import derive

__all__ = ["normals", "uniforms"]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(
    seed: int, purpose: str, clients: np.ndarray[Any, Any], *, round: int = 0
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One number in (0, 1) for each client of `clients` [n]."""
    key = np.uint64(derive(seed, purpose, round=round))
    bits = key + (np.asarray(clients, dtype=np.int64).astype(np.uint64) + np.uint64(1)) * _GAMMA
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    bits ^= bits >> np.uint64(31)
    # 52 bits and a half: never 0 and never 1, both of which would make an infinite normal.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def normals(
    seed: int, purpose: str, clients: np.ndarray[Any, Any], *, round: int = 0
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One standard normal number for each client of `clients` [n]."""
    drawn: np.ndarray[Any, np.dtype[np.float64]] = ndtri(uniforms(seed, purpose, clients, round=round))
    return drawn
