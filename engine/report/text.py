"""Numbers as a reader wants them."""

from __future__ import annotations

import math
import re
from hashlib import sha256

__all__ = [
    "amount",
    "at_most",
    "duration",
    "number",
    "percent",
    "plural",
    "scale_bytes",
    "size",
    "slug",
    "title",
]

_WORDS = {"lr": "learning rate", "f1": "F1", "auroc": "AUROC", "sha256": "SHA-256"}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def number(value: float) -> str:
    """Four significant digits, thousands set apart: 0.0123, 12,345, 1.2e−7, NaN."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "−")
    magnitude = math.floor(math.log10(abs(value)))
    if -5 < magnitude < 6:
        text = f"{value:,.{max(0, 3 - magnitude)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        mantissa, exponent = f"{value:.3e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return text.replace("-", "−")


def at_most(value: float) -> str:
    """A bound of at least 0 as `number` has it, never below: rounded up to four significant digits."""
    if value <= 0 or not math.isfinite(value):
        return number(value)
    step = 10.0 ** (math.floor(math.log10(value)) - 3)
    return number(math.ceil(value / step - 1e-9) * step)


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else number(share)


def duration(seconds: float) -> str:
    """Seconds as 12.3 ms, 4.56 s, 3 min 20 s, 2 h 05 min."""
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 1:
        return f"{number(1000 * seconds)} ms" if seconds > 0 else "0 s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float) -> str:
    """Bytes in decimal units: 1.23 MB."""
    unit, name = scale_bytes(count)
    return f"{count / unit:.3g} {name}" if unit > 1 else f"{count:.0f} B"


def scale_bytes(count: float) -> tuple[float, str]:
    """The unit to show `count` bytes in: its size and its name."""
    power = min(len(_UNITS) - 1, int(math.log10(count) + 1e-9) // 3) if count >= 1 else 0
    return 1000.0**power, _UNITS[power]


def amount(count: int, noun: str, nouns: str = "") -> str:
    """A count with its noun: "1 round", "1,200 rounds"."""
    return f"{count:,} {plural(count, noun, nouns)}"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """The noun as the count wants it."""
    return noun if count == 1 else nouns or f"{noun}s"


def slug(name: str) -> str:
    """A name that can stand in an id; names that differ give ids that differ."""
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    return f"{re.sub('[^A-Za-z0-9_-]+', '-', name).strip('-')}-{sha256(name.encode()).hexdigest()[:8]}"


def title(name: str) -> str:
    """A metric's name as words: "update_norm" → "Update norm", "lr" → "Learning rate"."""
    words = name.replace("_", " ").replace("/", " ").split()
    text = " ".join(_WORDS.get(word, word) for word in words)
    return text[:1].upper() + text[1:]
