"""Images as [n, channels, height, width], and what lies around each of their pixels."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mycelia.engine.errors import ConfigError, DataError

__all__ = ["Layout", "around", "as_nchw", "bordered", "check_layout", "from_nchw"]

Layout = Literal["nchw", "nhwc"]
_IMAGE = 4  # axes, rows included


def check_layout(layout: str | None, who: str) -> None:
    """Refuse another order of axes than "nchw" and "nhwc"; nothing is guessed from a shape.

    Raises:
        ConfigError: naming `who`.
    """
    if layout not in get_args(Layout):
        raise ConfigError(
            f"layout {layout!r}", rule="where the image axes are has to be said",
            fix='layout="nchw" or layout="nhwc"', who=who,
        )  # fmt: skip


def as_nchw(x: Tensor, layout: Layout | None, who: str) -> Tensor:
    """Images with channels second.

    Args:
        x: [n, c, h, w] or [n, h, w, c].
        layout: which of these.
        who: for messages.

    Raises:
        ConfigError: another layout.
        DataError: not four axes.
    """
    check_layout(layout, who)
    if x.dim() != _IMAGE:
        raise DataError(f"x of shape {list(x.shape)}", rule=f"images of four axes, {layout}", who=who)
    return x.permute(0, 3, 1, 2) if layout == "nhwc" else x


def from_nchw(x: Tensor, layout: Layout | None) -> Tensor:
    """Images in the order that they had."""
    return x.permute(0, 2, 3, 1) if layout == "nhwc" else x


def bordered(x: Tensor, before: int, after: int, *, twice: bool) -> Tensor:
    """Images with a mirrored border on all sides.

    Args:
        x: [n, c, h, w], h and w at least 1.
        before: pixels above and to the left, at least 0.
        after: pixels below and to the right, at least 0; both may be larger than the image.
        twice: whether the outermost pixel is mirrored, too: b a | a b c, and not b | a b c.

    Returns:
        [n, c, h + before + after, w + before + after].
    """
    for axis in (2, 3):
        size = x.shape[axis]
        period = 2 * size if twice else max(1, 2 * (size - 1))
        places = torch.arange(-before, size + after, device=x.device) % period
        places = torch.where(places < size, places, period - int(twice) - places)
        x = x.index_select(axis, places)
    return x


def around(x: Tensor, k: int, *, twice: bool) -> Tensor:
    """The k × k pixels around each pixel of each channel, mirrored at the border.

    Args:
        x: [n, c, h, w]
        k: at least 1; the pixel is at place k // 2 of its window.
        twice: see `bordered`.

    Returns:
        [n, c, h, w, k · k].
    """
    wide = bordered(x, k // 2, k - 1 - k // 2, twice=twice)
    return wide.unfold(2, k, 1).unfold(3, k, 1).flatten(4)
