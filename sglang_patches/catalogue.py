"""Every patch there is, in the order in which they are applied."""

from __future__ import annotations

from hicache_guard.core.errors import ConfigError
from hicache_guard.patches.backports import BACKPORTS
from hicache_guard.patches.guards import GUARDS
from hicache_guard.patches.patch import Patch

PATCHES: tuple[Patch, ...] = (*GUARDS, *BACKPORTS)


def named(names: list[str]) -> list[Patch]:
    """The patches of these names or families, in order. Raises ConfigError for an unknown one."""
    known = {name for patch in PATCHES for name in (patch.name, patch.family) if name}
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no patch {name!r}; `hicache-guard patch list` names them")
    return [patch for patch in PATCHES if patch.is_named(names)]
