"""Which version of the protocol the two sides of a stream speak."""

from __future__ import annotations

from typing import Final

from mycelia.aggregator.wire.frames import Problem, Reason

__all__ = ["VERSIONS", "common_version"]

VERSIONS: Final = (1, 1)
"""The lowest and the highest version of the protocol that this release speaks."""


def common_version(theirs: tuple[int, int], ours: tuple[int, int] = VERSIONS) -> int:
    """The highest version that both sides speak.

    Args:
        theirs: lowest and highest of the other side.
        ours: lowest and highest of this one.

    Raises:
        Problem: `VERSION`: there is none; the message names both ranges.
    """
    version = min(theirs[1], ours[1])
    if version < max(theirs[0], ours[0]):
        raise Problem(
            Reason.VERSION,
            f"the other side speaks versions {theirs[0]} to {theirs[1]}, this one {ours[0]} to {ours[1]}",
            rule="both sides speak a common version",
            fix="install the newer release on both",
            who="hello",
        )
    return version
