"""The decorator that a patched SGLang carries on each seam: the hooks without a plugin.

``guarded`` names a row of the table of releases by the first release that has it. The patch knows
which it is by the fingerprints of the methods that are hooked; a running git checkout has no
version to look at. In mode off a class is returned as it is, and nothing else is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from hicache_guard.core.errors import ConfigError
from hicache_guard.core.modes import Mode

_Seam = TypeVar("_Seam", bound=Callable[..., Any])

#: What the source of this process says: (module, class or function) to release.
decorations: dict[tuple[str, str], str] = {}


def guarded(release: str) -> Callable[[_Seam], _Seam]:
    """Hook the function below, or the methods of the class, as the table says for ``release``."""

    def decorate(seam: _Seam) -> _Seam:
        decorations[seam.__module__, seam.__qualname__] = release
        mode = _mode()
        if mode is Mode.OFF:
            return seam
        from hicache_guard.adapters import hooks

        if isinstance(seam, FunctionType):
            return cast(_Seam, hooks.decorated_function(seam, release, mode))
        hooks.decorated(cast(type, seam), release, mode)
        return seam

    return decorate


@functools.cache
def _mode() -> Mode:
    """What the environment says, read once."""
    try:
        mode = Mode.from_environment()
        if mode is not Mode.OFF:
            from hicache_guard.core.matches import TraceOptions
            from hicache_guard.core.record import RecordOptions

            TraceOptions.from_environment()  # one that cannot be written is said now
            RecordOptions.from_environment()
        return mode
    except ConfigError as error:
        raise SystemExit(f"hicache-guard: {error}") from None
