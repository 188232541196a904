"""What ``install`` was told: mode and release, for hooks to find when an object is built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from hicache_guard.adapters.releases import Release
from hicache_guard.core.errors import UnguardedError
from hicache_guard.core.matches import process_trace
from hicache_guard.core.modes import Mode
from hicache_guard.core.report import Report, Violation
from hicache_guard.core.tally import Tally

logger = logging.getLogger("hicache_guard")

#: How hooks come in: a call of ``install``, SGLang's plugin door, or a patched source.
Route = Literal["install", "plugin", "patch"]


@dataclass(frozen=True)
class Settings:
    """The choices of one installation. ``page_pools`` names the sub-allocators that are hooked."""

    mode: Mode
    release: Release
    on_report: Callable[[Violation], None] | None
    route: Route = "install"
    tally: Tally = field(default_factory=Tally)  # of faults that belong to no single allocator

    @property
    def page_pools(self) -> frozenset[str]:
        return frozenset(seam.cls for seam in self.release.seams if seam.handlers == "page_pool")

    def listener(self) -> Report | None:
        """Who hears of violations: whoever ``install`` was told, and the trace where there is one.

        Raises ConfigError where the environment asks for a trace that cannot be written.
        """
        trace = process_trace()
        if trace is None or self.on_report is None:
            return self.on_report if trace is None else trace.violation
        told = self.on_report

        def both(violation: Violation) -> None:
            trace.violation(violation)
            told(violation)

        return both

    def log_unguarded(self, message: str) -> None:
        logger.error("%s; it runs without a guard", message)


_settings: Settings | None = None


def settings() -> Settings:
    """The current installation. Raises UnguardedError where there is none."""
    if _settings is None:
        raise UnguardedError("the guard is not installed")
    return _settings


def is_chosen() -> bool:
    """Whether there is an installation."""
    return _settings is not None


def stop(message: str, route: Route) -> NoReturn:
    """What must be guarded cannot be. Whoever called ``install`` gets an UnguardedError.

    A server did not: SGLang would swallow the error, or bury it in a traceback. Its process ends
    with the message and nothing else.
    """
    if route == "install":
        raise UnguardedError(message)
    raise SystemExit(f"hicache-guard: {message}")


def choose(new: Settings | None) -> None:
    """Make ``new`` the current installation, or none."""
    global _settings
    _settings = new
