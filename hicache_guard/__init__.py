"""hicache-guard: make SGLang prove each prefix-cache hit on hybrid sliding-window models.

``install()`` guards every hybrid allocator built from then on; ``guard_of(allocator)`` returns its
guard, with counters and journal. Importing this package imports neither torch nor SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["__version__", "acting_for", "guard_of", "install", "uninstall"]

_HOME = {
    "acting_for": "hicache_guard.core.journal",
    "guard_of": "hicache_guard.adapters.allocator",
    "install": "hicache_guard.adapters.hooks",
    "uninstall": "hicache_guard.adapters.hooks",
}

if TYPE_CHECKING:
    from hicache_guard.adapters.allocator import guard_of
    from hicache_guard.adapters.hooks import install, uninstall
    from hicache_guard.core.journal import acting_for


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
