"""Every exception that this project raises on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_guard.core.report import Violation


def printable(said: str) -> str:
    """What somebody else said, in one line that does nothing to a terminal."""
    line = " ".join(said.split())
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in line)


class GuardError(Exception):
    """Base of all our exceptions."""


class ConfigError(GuardError):
    """A person asked for something that cannot be; the message is one line and says what to do."""


class UnguardedError(GuardError):
    """A seam that must be guarded is not: a hook is missing, or the pool layout is unknown."""


class GuardViolation(GuardError):
    """Physical evidence contradicts what an operation claims (raised in strict mode only).

    ``violation`` carries the facts: kind, slot, page, generations, operation and history.
    """

    def __init__(self, violation: Violation) -> None:
        self.violation = violation
        super().__init__(str(violation))
