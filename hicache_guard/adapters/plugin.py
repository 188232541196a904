"""The entry point that SGLang loads (group ``sglang.srt.plugins``) in every scheduler process."""

from __future__ import annotations

from hicache_guard.adapters.hooks import install
from hicache_guard.core.errors import GuardError


def load() -> None:
    """Install the guard in the mode that ``HICACHE_GUARD`` names; nothing where it names none.

    SGLang logs and forgets any exception of a plugin, which would leave a server unguarded that was
    told to be guarded. So a failure ends the process instead.
    """
    try:
        install()
    except GuardError as error:
        raise SystemExit(f"hicache-guard: {error}") from None
