"""Collects every secret that a secure sum makes, and finds what is left of one in files and messages."""

import base64
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from mycelia.privacy.noise.source import NoiseSource
from mycelia.privacy.secagg import keys, masks, shamir
from mycelia.privacy.secagg.encoding import Encoding
from mycelia.privacy.secagg.keys import AgreementKey, Identity
from mycelia.privacy.secagg.noise import NoiseShare

WINDOW = 12
"""Bytes in a row that nobody writes by chance."""


class Secrets:
    """What must not be found anywhere.

    Attributes:
        bytes_: keys, seeds, shares and the beginnings of mask streams, by what they are.
        arrays: vectors before masks, and noise.
    """

    def __init__(self) -> None:
        self.bytes_: dict[str, set[bytes]] = {}
        self.arrays: dict[str, list[npt.NDArray[np.int64]]] = {}

    def add(self, name: str, secret: bytes) -> None:
        self.bytes_.setdefault(name, set()).add(secret)

    def add_array(self, name: str, values: npt.NDArray[np.int64]) -> None:
        self.arrays.setdefault(name, []).append(np.array(values))

    def find(self, hay: bytes) -> set[str]:
        """The kinds of secrets of which a part is in it: raw, in hex, base64, escapes or as numbers."""
        names: dict[bytes, str] = {}
        for name, secrets in self.bytes_.items():
            for secret in secrets:
                for start in range(len(secret) - WINDOW + 1):
                    names[secret[start : start + WINDOW]] = name
        whole = [(name, needle) for name, arrays in self.arrays.items() for needle in forms_of(arrays)]
        found = set()
        for view in views(hay):
            windows = (view[start : start + WINDOW] for start in range(len(view) - WINDOW + 1))
            found |= {names[window] for window in windows if window in names}
            found |= {name for name, needle in whole if needle in view}
        return found


def forms_of(arrays: list[npt.NDArray[np.int64]]) -> Iterator[bytes]:
    """Eight numbers in a row as a program may write them."""
    for array in arrays:
        for part in (array[:8], array[-8:]):
            for dtype in ("<i8", ">i8", "<i4", ">i4", "<f8", "<f4"):
                yield part.astype(dtype).tobytes()
            for gap in (", ", ",", " "):
                yield gap.join(map(str, part.tolist())).encode()


def views(hay: bytes) -> Iterator[bytes]:
    """The bytes, and what they mean where they are text."""
    yield hay
    for run in re.findall(rb"[0-9a-fA-F]{24,}", hay):
        for start in (0, 1):
            even = run[start : start + (len(run) - start) // 2 * 2]
            yield bytes.fromhex(even.decode())
    for run in re.findall(rb"[A-Za-z0-9+/_-]{16,}", hay):
        plain = run.replace(b"-", b"+").replace(b"_", b"/")
        for start in range(4):
            quads = plain[start : start + (len(plain) - start) // 4 * 4]
            yield base64.b64decode(quads)
    for run in re.findall(rb"\d{1,3}(?:, ?\d{1,3}){11,}", hay):
        numbers = [int(number) for number in re.findall(rb"\d+", run)]
        yield bytes(number for number in numbers if number < 256)
    if b"\\" in hay:
        named = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"\\": b"\\", b"'": b"'", b'"': b'"'}
        yield re.sub(
            rb"\\(?:x([0-9a-fA-F]{2})|([ntr\\'\"]))",
            lambda match: bytes.fromhex(match[1].decode()) if match[1] else named[match[2]],
            hay,
        )


@contextmanager
def collected() -> Iterator[Secrets]:
    """Secrets of all that happens inside."""
    secrets = Secrets()
    kdf, split, combine, add = keys.kdf, shamir.split, shamir.combine, masks.add_streams
    encode, draw, agree = Encoding.encode, NoiseShare.draw, AgreementKey.agree
    made = {kind: kind.__init__ for kind in (AgreementKey, Identity)}

    def seen_kdf(ikm: bytes, session_id: bytes, label: keys.Label, i: int, j: int) -> bytes:
        key = kdf(ikm, session_id, label, i, j)
        if label not in ("sa1/graph", "sa1/rot"):
            secrets.add(f"input of {label}", ikm)
            secrets.add(f"key {label}", key)
        return key

    def seen_split(*args: object) -> npt.NDArray[np.uint32]:
        shares = split(*args)  # type: ignore[arg-type]
        for share in shares.reshape(-1, shamir.LIMBS):
            secrets.add("share", share.astype(">u4").tobytes())
        return shares

    def seen_combine(*args: object) -> npt.NDArray[np.uint8]:
        rebuilt = combine(*args)  # type: ignore[arg-type]
        for secret in rebuilt:
            secrets.add("rebuilt secret", secret.tobytes())
        return rebuilt

    def seen_add(total: masks.Words, names: list[bytes], *rest: object) -> None:
        for key in names:
            secrets.add("mask key", key)
            cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
            secrets.add("mask stream", cipher.update(bytes(64)))
        add(total, names, *rest)  # type: ignore[arg-type]

    def seen_encode(encoding: Encoding, *args: object, **named: object) -> masks.Words:
        words = encode(encoding, *args, **named)  # type: ignore[arg-type]
        bits = encoding.config.bits
        secrets.add("unmasked vector", masks.pack(words, bits))
        secrets.add_array("unmasked vector", encoding.integers(words)[len(encoding.config.slots) :])
        return words

    def seen_draw(share: NoiseShare, size: int, source: NoiseSource, *rest: object) -> npt.NDArray[np.int64]:
        drawn = draw(share, size, source, *rest)  # type: ignore[arg-type]
        secrets.add("key of noise", source.key)
        secrets.add_array("noise", drawn)
        return drawn

    def seen_agree(key: AgreementKey, *args: object) -> bytes:
        agreed = agree(key, *args)  # type: ignore[arg-type]
        secrets.add("agreement", agreed)
        return agreed

    def seen_made(kind: type, name: str) -> Callable[..., None]:
        def init(self: object, private: bytes) -> None:
            made[kind](self, private)
            secrets.add(name, private)

        return init

    with (
        mock.patch.object(keys, "kdf", seen_kdf),
        mock.patch.object(shamir, "split", seen_split),
        mock.patch.object(shamir, "combine", seen_combine),
        mock.patch.object(masks, "add_streams", seen_add),
        mock.patch.object(Encoding, "encode", seen_encode),
        mock.patch.object(NoiseShare, "draw", seen_draw),
        mock.patch.object(AgreementKey, "agree", seen_agree),
        mock.patch.object(AgreementKey, "__init__", seen_made(AgreementKey, "agreement key")),
        mock.patch.object(Identity, "__init__", seen_made(Identity, "identity")),
    ):
        yield secrets
