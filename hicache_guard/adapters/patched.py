"""The decorator that a patched SGLang carries on each seam class: the hooks without a plugin.

``guarded`` names a row of the table of releases by the first release that has it. The patch knows
which it is by the fingerprints of the methods that are hooked; a running git checkout has no
version to look at. In mode off a class is returned as it is, and nothing else is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from hicache_guard.core.errors import ConfigError
from hicache_guard.core.modes import Mode

_Class = TypeVar("_Class", bound=type)

#: What the source of this process says: (module, class) to release.
decorations: dict[tuple[str, str], str] = {}


def guarded(release: str) -> Callable[[_Class], _Class]:
    """Hook the methods of the class below as the table says for ``release``."""

    def decorate(cls: _Class) -> _Class:
        decorations[cls.__module__, cls.__qualname__] = release
        mode = _mode()
        if mode is not Mode.OFF:
            from hicache_guard.adapters import hooks

            hooks.decorated(cls, release, mode)
        return cls

    return decorate


@functools.cache
def _mode() -> Mode:
    """What the environment says, read once."""
    try:
        mode = Mode.from_environment()
        if mode is not Mode.OFF:
            from hicache_guard.core.matches import TraceOptions

            TraceOptions.from_environment()  # one that cannot be written is said now
        return mode
    except ConfigError as error:
        raise SystemExit(f"hicache-guard: {error}") from None
