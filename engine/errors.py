"""The errors Mycelia raises: each says what was found, the rule, the fix, and who."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BudgetExceeded",
    "CaptureError",
    "ConfigError",
    "DataError",
    "MyceliaError",
    "PolicyRefused",
    "ProtocolError",
    "RoundAborted",
]


class MyceliaError(Exception):
    """Base of all errors raised on purpose.

    Args:
        found: what was found, as a sentence.
        rule: the rule it breaks.
        fix: what the reader can do about it.
        who: the client, phase, parameter or file it concerns.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, found: str, *, rule: str = "", fix: str = "", who: str = "") -> None:
        self.found, self.rule, self.fix, self.who = found, rule, fix, who
        parts = [f"{who}: {found}" if who else found]
        if rule:
            parts.append(f"Rule: {rule}")
        if fix:
            parts.append(f"Fix: {fix}")
        super().__init__("\n  ".join(parts))

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild across process boundaries with the same four parts."""
        return (_rebuild, (type(self), self.found, self.rule, self.fix, self.who))


def _rebuild(cls: type[MyceliaError], found: str, rule: str, fix: str, who: str) -> MyceliaError:
    return cls(found, rule=rule, fix=fix, who=who)


class ConfigError(MyceliaError, ValueError):
    """A setting is unknown, contradictory or out of range."""

    exit_code = 2


class CaptureError(MyceliaError):
    """A model or loss cannot become a Program."""


class DataError(MyceliaError, ValueError):
    """Data is missing, malformed or out of range."""


class BudgetExceeded(MyceliaError):
    """A privacy budget refuses a release."""


class RoundAborted(MyceliaError):
    """A round ended without a new model; the old one stands."""


class ProtocolError(MyceliaError):
    """A message breaks the protocol."""


class PolicyRefused(MyceliaError):
    """A device's own policy refuses the task."""
