"""Where randomness comes from: one secret key, expanded into streams that have names.

A stream is named by (purpose, step, tensor). The name and the key are hashed to the key of a ChaCha20 cipher
(RFC 8439), whose key stream is the random bits: whoever does not hold the key cannot tell them from coins,
and whoever does can make any draw again, for resuming and for factorised noise.
"""

from __future__ import annotations

import json
import operator
import os
import stat
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from mycelia.engine.durable import write_whole
from mycelia.engine.errors import ConfigError, DataError

__all__ = ["NoiseSource", "Stream"]

_KEY_BYTES = 32
_ZEROS: Final = bytes(1 << 16)
_NOTES: Final = {
    "os": "256-bit key from the operating system, expanded by ChaCha20",
    "seeded": "seeded and reproducible: not for release",
}


class Stream:
    """The bits of one named stream, in order; every read goes on where the last one ended.

    Made by `NoiseSource.generator`. The integers and permutations are exactly uniform. Where one is rejected
    and drawn again, the number of rejections does not depend on the values given out, so time tells nothing.

    Args:
        key: 32 bytes, used for this stream alone.
    """

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def fill(self, out: npt.NDArray[Any]) -> None:
        """Overwrite a contiguous array of any integer dtype with random bits, little-endian."""
        view = out.reshape(-1).view(np.uint8).data
        for start in range(0, len(view), len(_ZEROS)):
            part = view[start : start + len(_ZEROS)]
            self._encryptor.update_into(_ZEROS if len(part) == len(_ZEROS) else _ZEROS[: len(part)], part)

    def bytes(self, count: int) -> bytes:
        """`count` random bytes."""
        out = np.empty(count, np.uint8)
        self.fill(out)
        return out.tobytes()

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """Uniform 64-bit words, uint64 [count]."""
        out = np.empty(count, "<u8")
        self.fill(out)
        return out.astype(np.uint64, copy=False)

    def random(self, size: int) -> npt.NDArray[np.float64]:
        """Uniform multiples of 2**-53 in [0, 1), float64 [size].

        `random(n) < q` is therefore a coin of probability q rounded up to a multiple of 2**-53.
        """
        return (self.words(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, low: int, high: int, size: int) -> npt.NDArray[np.int64]:
        """Uniform integers in [low, high), int64 [size].

        Raises:
            ConfigError: `high` is not above `low`, or either does not fit in 64 bits.
        """
        if not -(2**63) <= low < high <= 2**63:
            raise ConfigError(
                f"integers from {low} to {high}", rule="-2**63 <= low < high <= 2**63", who="noise source"
            )
        span = high - low
        last = np.uint64(2**64 - 1 - 2**64 % span)  # the words up to here hold every remainder equally often
        out = np.empty(size, np.uint64)
        filled = 0
        while filled < size:
            words = self.words(size - filled)
            words = words[words <= last]
            out[filled : filled + len(words)] = words
            filled += len(words)
        if span < 2**64:
            out %= np.uint64(span)
        return out.view(np.int64) + np.int64(low)  # wraps to the right value

    def permutation(self, count: int) -> npt.NDArray[np.int64]:
        """A uniform order of 0 … count-1, int64 [count]: that of random 64-bit keys, drawn again on a tie."""
        while True:
            keys = self.words(count)
            order = np.argsort(keys)
            keys = keys[order]
            if not np.any(keys[1:] == keys[:-1]):
                return order.astype(np.int64, copy=False)


@dataclass(frozen=True)
class NoiseSource:
    """A secret key and where it came from; make one with `os`, `seeded` or `load`.

    Two draws with one name are the same draw: whoever adds noise to two things gives them two names.

    >>> source = NoiseSource.seeded(7)
    >>> source.bytes("noise", 3, "weight", 4) == source.bytes("noise", 3, "weight", 4)
    True
    >>> source.note
    'seeded and reproducible: not for release'

    Attributes:
        kind: "os" for a key from the operating system, "seeded" for one derived from a number.
        key: 32 bytes; a secret, so it is not printed.

    Raises:
        ConfigError: another kind, or a key of another length.
    """

    kind: Literal["os", "seeded"]
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.kind not in _NOTES:
            raise ConfigError(
                f"the kind is {self.kind!r}", rule=f"one of {', '.join(_NOTES)}", who="noise source"
            )
        if len(self.key) != _KEY_BYTES:
            raise ConfigError(
                f"a key of {len(self.key)} bytes", rule=f"a key has {_KEY_BYTES} bytes", who="noise source"
            )

    @classmethod
    def os(cls) -> NoiseSource:
        """A fresh key from the operating system: the source of every release."""
        return cls("os", os.urandom(_KEY_BYTES))

    @classmethod
    def seeded(cls, root: int) -> NoiseSource:
        """A key derived from a seed, for simulation; who knows or guesses the seed can subtract the noise.

        Args:
            root: in [0, 2**63).

        Raises:
            ConfigError: out of range.
        """
        if not 0 <= root < 2**63:
            raise ConfigError(f"seed is {root}", rule="a seed is an integer in [0, 2**63)", who="seed")
        return cls("seeded", blake2b(f"seed {root}".encode(), digest_size=_KEY_BYTES).digest())

    @property
    def note(self) -> str:
        """One phrase for runs, statements and reports."""
        return _NOTES[self.kind]

    def generator(self, purpose: str, step: int, tensor: str = "") -> Stream:
        """The named stream, from its start.

        Args:
            purpose: what the draw is for ("noise", "sampling", …).
            step: the step or round, at least 0.
            tensor: the tensor or client the draw is for.

        Raises:
            ConfigError: a negative step.
        """
        step = operator.index(step)
        if step < 0:
            raise ConfigError(f"step is {step}", rule="steps count from 0", who="noise source")
        name = json.dumps([purpose, step, tensor]).encode()
        return Stream(blake2b(name, key=self.key, digest_size=_KEY_BYTES, person=b"noise stream").digest())

    def bytes(self, purpose: str, step: int, tensor: str, count: int) -> bytes:
        """The first `count` bytes of the named stream."""
        return self.generator(purpose, step, tensor).bytes(count)

    def save(self, path: Path) -> None:
        """Write the key to a file that only its owner may read (mode 0600), whole or not at all."""
        content = json.dumps({"kind": self.kind, "key": self.key.hex()})
        write_whole(path, content.encode())

    @classmethod
    def load(cls, path: Path) -> NoiseSource:
        """Read what `save` wrote.

        Raises:
            ConfigError: others than the owner may read or write the file.
            DataError: the file is missing or holds something else.
        """
        who = f"noise key {path}"
        try:
            with path.open(encoding="utf-8") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot be read: {error}", who=who) from error
        if mode & 0o077:
            raise ConfigError(
                f"the file has mode {mode:04o}",
                rule="only the owner may read a key",
                fix=f"if nobody has read it: chmod 600 {path}",
                who=who,
            )
        try:
            found = json.loads(text)
            return cls(found["kind"], bytes.fromhex(found["key"]))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError("is not a noise key", rule="written by NoiseSource.save", who=who) from error
