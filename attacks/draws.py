"""Random numbers by name: what a row gets depends on its key, never on its neighbours or its place.

A number is a hash of (seed, attack, row key, restart, step, use, coordinate): the finaliser of SplitMix64
(Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) over a counter. All rows
are made at once, on the device that they are on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycelia.engine.rng import derive

__all__ = ["Draws", "row_keys"]

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed word
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB
_BLOCK = 2**14  # numbers that are made at a time


def _shifted(words: Tensor, by: int) -> Tensor:
    """A logical shift to the right: the sign does not come along."""
    return (words >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mixed(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 30)).mul_(_FIRST)
    words.bitwise_xor_(_shifted(words, 27)).mul_(_SECOND)
    return words.bitwise_xor_(_shifted(words, 31))


def _word(value: int) -> int:
    """An integer as a signed word."""
    return (value + 2**63) % 2**64 - 2**63


def row_keys(x: Tensor, *labels: Tensor) -> Tensor:
    """A key for each row: a hash of its bytes and of what is wanted of it.

    Args:
        x: [n, …], any dtype.
        labels: [n] each.

    Returns:
        int64 [n]; equal rows have equal keys.
    """
    n = len(x)
    data = x.detach().flatten(1).contiguous()
    if data.shape[1] == 0:
        words = torch.zeros(n, 1, dtype=torch.int64, device=x.device)
    else:
        item = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()]
        words = data.view(item).to(torch.int64)
    places = torch.arange(1, words.shape[1] + 1, device=x.device)
    keys = _mixed(words ^ _mixed(places * _GOLDEN)).sum(1)  # sums wrap
    for label in labels:
        keys = _mixed(keys ^ _mixed(label.to(torch.int64) * _GOLDEN + 1))
    return _mixed(keys)


@dataclass(frozen=True)
class Draws:
    """The random numbers of some rows.

    Attributes:
        seed: of the call.
        attack: its name.
        keys: int64 [n], see `row_keys`.
    """

    seed: int
    attack: str
    keys: Tensor

    def of(self, rows: Tensor) -> Draws:
        """Those of some of the rows."""
        return Draws(self.seed, self.attack, self.keys[rows])

    def words(self, use: str, count: int, *, step: int = 0, restart: int = 0) -> Tensor:
        """int64 [n, count], every bit of them random."""
        found = torch.empty(len(self.keys), count, dtype=torch.int64, device=self.keys.device)
        for columns, words in self._blocks(use, count, step, restart):
            found[:, columns] = words
        return found

    def uniform(
        self,
        use: str,
        shape: Sequence[int] = (),
        *,
        step: int = 0,
        restart: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """[n, *shape], uniform in the open interval (0, 1)."""
        exact, bits = (torch.float32, 23) if dtype == torch.float32 else (torch.float64, 52)
        count = math.prod(shape)
        found = torch.empty(len(self.keys), count, dtype=exact, device=self.keys.device)
        for columns, words in self._blocks(use, count, step, restart):
            # Odd multiples of half a step: neither 0 nor 1 is one of them, also after rounding.
            found[:, columns] = _shifted(words, 64 - bits)
            found[:, columns].add_(0.5).mul_(2.0**-bits)
        return found.view(len(self.keys), *shape).to(dtype)

    def normal(
        self,
        use: str,
        shape: Sequence[int] = (),
        *,
        step: int = 0,
        restart: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """[n, *shape], standard normal: two of each word (Box, Muller 1958), none beyond 6.8."""
        exact = torch.float32 if dtype == torch.float32 else torch.float64
        count = math.prod(shape)
        half = -(-count // 2)
        found = torch.empty(len(self.keys), 2 * half, dtype=exact, device=self.keys.device)
        for columns, words in self._blocks(use, half, step, restart):
            length = _shifted(words, 32).to(exact).add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
            angle = (words & (2**32 - 1)).to(exact).mul_(2 * math.pi / 2**32)
            found[:, columns] = angle.cos() * length
            found[:, half + columns.start : half + columns.stop] = angle.sin_().mul_(length)
        return found[:, :count].reshape(len(self.keys), *shape).to(dtype)

    def _blocks(self, use: str, count: int, step: int, restart: int) -> Iterator[tuple[slice, Tensor]]:
        """The words of some columns at a time, so that they stay in a cache."""
        name = _word(derive(self.seed, f"{self.attack}/{use}/{restart}", round=step))
        start = _mixed(self.keys ^ name)[:, None]
        together = max(1, _BLOCK // max(1, len(self.keys)))
        places = torch.arange(1, count + 1, device=self.keys.device) * _GOLDEN
        for first in range(0, count, together):
            some = places[first : first + together]
            yield slice(first, first + len(some)), _mixed(start + some)

    def signs(
        self,
        use: str,
        shape: Sequence[int] = (),
        *,
        step: int = 0,
        restart: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """[n, *shape], −1 or 1."""
        count = math.prod(shape)
        found = torch.empty(len(self.keys), count, dtype=dtype, device=self.keys.device)
        for columns, words in self._blocks(use, count, step, restart):
            found[:, columns] = words.bitwise_right_shift_(63).mul_(2).add_(1)  # of the sign bit
        return found.view(len(self.keys), *shape)

    def integers(
        self, use: str, high: int | Tensor, shape: Sequence[int] = (), *, step: int = 0, restart: int = 0
    ) -> Tensor:
        """int64 [n, *shape] in [0, high); `high` is a number or broadcasts to the result."""
        values = self.uniform(use, shape, step=step, restart=restart)
        return (values * high).floor().to(torch.int64)

    def exponential(
        self,
        use: str,
        shape: Sequence[int] = (),
        *,
        step: int = 0,
        restart: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """[n, *shape], exponential with mean 1."""
        return -self.uniform(use, shape, step=step, restart=restart).log().to(dtype)

    def in_ball(self, use: str, p: str, like: Tensor, *, step: int = 0, restart: int = 0) -> Tensor:
        """[n, …] as `like`: uniform in the unit ball of a norm (l1, l2 or linf), box aside."""
        shape = like.shape[1:]
        size = math.prod(shape)
        if p == "linf":
            found = 2 * self.uniform(use, shape, step=step, restart=restart) - 1
        elif p == "l2":
            direction = self.normal(use, (size,), step=step, restart=restart)
            length = self.uniform(f"{use}/length", (1,), step=step, restart=restart) ** (1 / max(1, size))
            found = direction / torch.linalg.vector_norm(direction, dim=1, keepdim=True) * length
        else:  # l1: exponentials, one more than there are coordinates, share the unit
            sizes = self.exponential(use, (size + 1,), step=step, restart=restart)
            found = (
                self.signs(f"{use}/sign", (size,), step=step, restart=restart)
                * sizes[:, :size]
                / sizes.sum(1, keepdim=True)
            )
        return found.reshape(len(self.keys), *shape).to(like.dtype)
