"""What ``install`` was told: mode and release, for hooks to find when an object is built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from hicache_guard.adapters.releases import Release
from hicache_guard.core.errors import UnguardedError
from hicache_guard.core.modes import Mode
from hicache_guard.core.report import Violation
from hicache_guard.core.tally import Tally

logger = logging.getLogger("hicache_guard")


@dataclass(frozen=True)
class Settings:
    """The choices of one installation. ``page_pools`` names the sub-allocators that are hooked."""

    mode: Mode
    release: Release
    on_report: Callable[[Violation], None] | None
    tally: Tally = field(default_factory=Tally)  # of faults that belong to no single allocator

    @property
    def page_pools(self) -> frozenset[str]:
        return frozenset(seam.cls for seam in self.release.seams if seam.handlers == "page_pool")

    def log_unguarded(self, message: str) -> None:
        logger.error("%s; it runs without a guard", message)


_settings: Settings | None = None


def settings() -> Settings:
    """The current installation. Raises UnguardedError where there is none."""
    if _settings is None:
        raise UnguardedError("the guard is not installed")
    return _settings


def choose(new: Settings | None) -> None:
    """Make ``new`` the current installation, or none."""
    global _settings
    _settings = new
