"""The hooks of the adapters as visible edits of a checkout, so that no plugin need be loaded."""

from __future__ import annotations

from hicache_guard.patches.patch import Patch

GUARDS: tuple[Patch, ...] = ()
