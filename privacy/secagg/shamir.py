"""Shares of secrets: any t of k rebuild, and t − 1 are uniform whatever the secret is.

A 32-byte secret, read as a little-endian integer, is nine limbs of 30 bits. Every limb is the value at 0 of
a polynomial of degree t − 1 over the integers modulo 2³¹ − 1 whose other coefficients are uniform, and the
share of holder x is the nine values at x (Shamir, "How to share a secret", CACM 22, 1979).

Rebuilding is interpolation at 0. With K the largest of the holders H and M those of 1 … K that are missing
from H, the weight of holder i is ± C(K, i) · ∏ |m − i| / m over m in M, with the sign of its rank in H. That
takes t · (K − t) products where the usual form takes t², and spare holders are few.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from mycelia.engine.errors import ConfigError
from mycelia.privacy.secagg.canonical import Reason, SecureSumError
from mycelia.privacy.secagg.round_config import MAX_COHORT

__all__ = ["LIMBS", "PRIME", "SECRET_BYTES", "combine", "decode_shares", "encode_shares", "split"]

PRIME: Final = 2**31 - 1
"""The modulus, the same for all and never a message's to say."""

LIMBS: Final = 9
SECRET_BYTES: Final = 32

_SHARE_BYTES: Final = 4 * LIMBS
_LIMB_BITS = 30
_LIMB_MASK: Final = np.uint64(2**_LIMB_BITS - 1)
_SHIFT: Final = np.uint64(31)
_PRIME: Final = np.uint64(PRIME)
_ROWS: Final = 1 << 15  # numbers worked on at a time, so that they stay in the cache

Residues = npt.NDArray[np.uint64]


def split(
    secrets: npt.NDArray[np.uint8], k: int, t: int, random: Callable[[int], bytes] = os.urandom
) -> npt.NDArray[np.uint32]:
    """Share secrets among holders 1 … k.

    Args:
        secrets: uint8 [s, 32].
        k: holders, below 2¹⁵.
        t: how many of them rebuild; 2 ≤ t ≤ k < 2t.
        random: gives so many random bytes, from the operating system by default. Read as little-endian words
            of which 31 bits count, they are the coefficients of x, then those of x², …, each for all limbs of
            the first secret, then of the second, …; the word that is no residue is skipped.

    Returns:
        uint32 [s, k, 9], below `PRIME`: the share of holder j at [:, j − 1].

    Raises:
        SecureSumError: `WEAK_PARAMETERS`: another k or t.
        ConfigError: secrets of another shape.
    """
    if not 2 <= t <= k < 2 * t or k >= MAX_COHORT:
        raise SecureSumError(
            Reason.WEAK_PARAMETERS,
            f"t is {t} of k = {k} holders",
            rule=f"2 ≤ t ≤ k < 2t and k < {MAX_COHORT}",
            who="shares",
        )
    if secrets.dtype != np.uint8 or secrets.ndim != 2 or secrets.shape[1] != SECRET_BYTES:
        raise ConfigError(
            f"secrets of {secrets.dtype} {secrets.shape}", rule=f"uint8 [s, {SECRET_BYTES}]", who="shares"
        )
    limbs = _to_limbs(secrets).reshape(-1, 1)
    coefficients = _uniform((t - 1) * limbs.size, random).reshape(t - 1, limbs.size, 1)
    holders = np.arange(1, k + 1, dtype=np.uint64)
    # Horner. Holders have at most 15 bits and a folded number 32, so that no product reaches 2⁶².
    values = np.broadcast_to(coefficients[-1], (limbs.size, k)).copy()
    folded = np.empty_like(values)
    for coefficient in (*coefficients[-2::-1], limbs):
        values *= holders
        values += coefficient
        _fold(values, folded)
    values %= _PRIME
    shares = values.reshape(len(secrets), LIMBS, k).transpose(0, 2, 1)
    return np.ascontiguousarray(shares, np.uint32)


def combine(
    shares: npt.NDArray[np.uint32], holders: npt.ArrayLike, owners: Sequence[int] | None = None
) -> npt.NDArray[np.uint8]:
    """Rebuild secrets, each from exactly its threshold of shares.

    Wrong shares may give another secret, without an error: whoever calls this checks what comes out against
    a commitment or a public key.

    Args:
        shares: uint32 [s, t, 9], below `PRIME`.
        holders: whose shares they are, from 1, below 2¹⁵ and distinct in a row, [s, t].
        owners: whose secrets they are, for the error, [s].

    Returns:
        uint8 [s, 32].

    Raises:
        SecureSumError: `SHARE_MISMATCH` with the owner: the shares rebuild a limb or a number that no secret
            has. `BAD_SHARE`: a share that is no residue.
        ConfigError: other shapes, or holders out of range or repeated.
    """
    who = np.asarray(holders)
    count, t = who.shape if who.ndim == 2 else (-1, -1)
    if shares.dtype != np.uint32 or shares.shape != (count, t, LIMBS) or t < 1 or who.dtype.kind not in "iu":
        raise ConfigError(
            f"shares of {shares.dtype} {shares.shape} by holders of {who.dtype} {who.shape}",
            rule=f"uint32 [s, t, {LIMBS}] by integers [s, t]",
            who="shares",
        )
    if who.size and not 1 <= who.min() <= who.max() < MAX_COHORT:
        raise ConfigError(
            f"holders {who.min()} to {who.max()}", rule=f"from 1 and below {MAX_COHORT}", who="shares"
        )
    if (shares >= PRIME).any():
        row = int(np.argwhere(shares >= PRIME)[0, 0])
        raise SecureSumError(
            Reason.BAD_SHARE, "a number of 2³¹ − 1 or more", rule="shares are residues", who="shares",
            owner=None if owners is None else owners[row],
        )  # fmt: skip
    limbs = np.empty((count, LIMBS), np.uint64)
    rows = max(1, _ROWS // t)
    for first in range(0, count, rows):
        weights = _weights(who[first : first + rows])
        limbs[first : first + rows] = _weighted_sums(weights, shares[first : first + rows])
    wrong = (limbs > _LIMB_MASK).any(axis=1) | (limbs[:, -1] >> np.uint64(256 - 8 * _LIMB_BITS) > 0)
    if wrong.any():
        raise SecureSumError(
            Reason.SHARE_MISMATCH,
            "the shares rebuild no secret",
            rule="a secret has nine limbs of 30 bits and 256 bits in all",
            owner=None if owners is None else owners[int(np.flatnonzero(wrong)[0])],
        )
    return _to_bytes(limbs)


def encode_shares(shares: npt.NDArray[np.uint32]) -> bytes:
    """Shares as they travel, 36 bytes each: big-endian limbs, the lowest limb first.

    Args:
        shares: uint32 [..., 9].
    """
    return shares.astype(">u4").tobytes()


def decode_shares(data: bytes) -> npt.NDArray[np.uint32]:
    """What `encode_shares` wrote, uint32 [n, 9] for any number of shares one after the other.

    Raises:
        SecureSumError: `BAD_SHARE`: a broken length, or a number that is no residue.
    """
    if len(data) % _SHARE_BYTES:
        raise SecureSumError(
            Reason.BAD_SHARE, f"{len(data)} bytes", rule=f"{_SHARE_BYTES} bytes a share", who="shares"
        )
    shares = np.frombuffer(data, ">u4").reshape(-1, LIMBS).astype(np.uint32)
    if (shares >= PRIME).any():
        raise SecureSumError(
            Reason.BAD_SHARE, "a number of 2³¹ − 1 or more", rule="shares are residues", who="shares"
        )
    return shares


def _fold(values: Residues, scratch: Residues) -> None:
    """Take numbers below 2⁶² in place to equal ones below 2³², modulo 2³¹ − 1."""
    np.right_shift(values, _SHIFT, out=scratch)
    values &= _PRIME
    values += scratch


def _uniform(count: int, random: Callable[[int], bytes]) -> Residues:
    """Uniform residues, uint64 [count]."""
    out = np.empty(count, np.uint64)
    filled = 0
    while filled < count:
        words = np.frombuffer(random(4 * (count - filled)), "<u4") & np.uint32(PRIME)
        words = words[words < PRIME]
        out[filled : filled + words.size] = words
        filled += words.size
    return out


@lru_cache(maxsize=16)
def _binomials(last: int) -> Residues:
    """C(last, i) modulo 2³¹ − 1 for i = 0 … last."""
    factorials = [1]
    for number in range(1, last + 1):
        factorials.append(factorials[-1] * number % PRIME)
    inverses = [pow(factorials[-1], -1, PRIME)]
    for number in range(last, 0, -1):
        inverses.append(inverses[-1] * number % PRIME)
    inverses.reverse()
    return np.array(
        [factorials[last] * one * other % PRIME for one, other in zip(inverses, inverses[::-1], strict=True)],
        np.uint64,
    )


def _weights(holders: npt.NDArray[np.integer]) -> Residues:
    """Weights of the holders' values in the value at 0, uint64 [s, t], below 2³¹ − 1."""
    count, t = holders.shape
    last = int(holders.max())
    present = np.zeros((count, last + 1), bool)
    np.put_along_axis(present, holders, values=True, axis=1)
    if (present.sum(axis=1) != t).any():
        raise ConfigError("a holder twice", rule="the holders of a secret are distinct", who="shares")
    negative = np.take_along_axis(np.cumsum(present, axis=1), holders, axis=1) % 2 == 0
    present[:, 0] = True
    missing = np.nonzero(~present)[1].reshape(count, -1)
    # Place 0 is at holder "0": its product is that of the missing holders themselves, the denominator.
    places = np.concatenate([np.zeros((count, 1), np.int64), holders.astype(np.int64)], axis=1)
    products = np.concatenate([np.ones((count, 1), np.uint64), _binomials(last)[holders]], axis=1)
    scratch = np.empty_like(products)
    for column in missing.T:
        products *= np.abs(column[:, np.newaxis] - places).view(np.uint64)
        _fold(products, scratch)
    inverses = np.array([pow(int(product), -1, PRIME) for product in products[:, 0]], np.uint64)
    weights = products[:, 1:]
    weights %= _PRIME
    weights *= inverses[:, np.newaxis]
    weights %= _PRIME
    np.subtract(_PRIME, weights, out=weights, where=negative)
    return weights


def _weighted_sums(weights: Residues, shares: npt.NDArray[np.uint32]) -> Residues:
    """Sums of weight times share over the holders, modulo 2³¹ − 1, uint64 [s, 9]."""
    wide = shares.astype(np.uint64)
    # In two halves, so that sums over 2¹⁵ holders stay below 2⁶².
    high = np.einsum("st,stl->sl", weights >> np.uint64(16), wide) % _PRIME
    low = np.einsum("st,stl->sl", weights & np.uint64(0xFFFF), wide) % _PRIME
    sums: Residues = (high * np.uint64(2**16) + low) % _PRIME
    return sums


def _to_limbs(secrets: npt.NDArray[np.uint8]) -> Residues:
    """Nine limbs of 30 bits, lowest first, uint64 [s, 9]."""
    words = np.zeros((len(secrets), 10), np.uint64)
    words[:, :8] = np.ascontiguousarray(secrets).view("<u4")
    limbs = np.empty((len(secrets), LIMBS), np.uint64)
    for limb in range(LIMBS):
        word, shift = divmod(limb * _LIMB_BITS, 32)
        pair = words[:, word] | words[:, word + 1] << np.uint64(32)
        limbs[:, limb] = pair >> np.uint64(shift) & _LIMB_MASK
    return limbs


def _to_bytes(limbs: Residues) -> npt.NDArray[np.uint8]:
    """The bytes of nine limbs that make a number below 2²⁵⁶, uint8 [s, 32]."""
    return np.frombuffer(
        b"".join(
            sum(limb << _LIMB_BITS * place for place, limb in enumerate(row)).to_bytes(SECRET_BYTES, "little")
            for row in limbs.tolist()
        ),
        np.uint8,
    ).reshape(-1, SECRET_BYTES)
