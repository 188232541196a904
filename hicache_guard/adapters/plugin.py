"""The entry point that SGLang loads (group ``sglang.srt.plugins``) in every scheduler process.

SGLang logs and forgets any exception of a plugin, which would leave a server unguarded that was
told to be guarded. So a failure ends the process instead. It forgets a plugin that cannot be
imported, too: everything that could fail is imported inside.
"""

from __future__ import annotations

from hicache_guard.core.errors import GuardError, UnguardedError

#: Whether SGLang came by; it leaves out plugins that ``SGLANG_PLUGINS`` does not name.
loaded = False


def load() -> None:
    """Install the guard in the mode that ``HICACHE_GUARD`` names; nothing where it names none."""
    global loaded
    loaded = True
    try:
        from hicache_guard.core.modes import Mode

        mode = Mode.from_environment()
        if mode is Mode.OFF:
            return
        from hicache_guard.core.matches import TraceOptions
        from hicache_guard.core.record import RecordOptions

        TraceOptions.from_environment()  # a trace that cannot be written is said now
        RecordOptions.from_environment()
        from hicache_guard.adapters.hooks import install, logger

        try:
            install(mode, route="plugin")
        except UnguardedError as error:
            if mode is not Mode.OBSERVE:
                raise
            logger.error("%s; it runs without a guard", error)
    except GuardError as error:
        raise SystemExit(f"hicache-guard: {error}") from None
    except Exception as error:
        raise SystemExit(
            f"hicache-guard: cannot install the guard: {type(error).__name__}: {error}"
        ) from None
