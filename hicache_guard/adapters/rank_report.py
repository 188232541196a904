"""What a rank says of itself once its allocator is guarded, for a doctor that looks at all ranks.

``HICACHE_GUARD_RANKS`` names a file for each process, as a trace does. A rank that runs unguarded
writes none: that is how it is found out.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from hicache_guard import __version__
from hicache_guard.adapters import hooks
from hicache_guard.adapters.hooks import HookStatus
from hicache_guard.adapters.link import AllocatorLink
from hicache_guard.adapters.state import settings
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.ranks import FORMAT, RANKS_VAR, rank_of


def announce(link: AllocatorLink) -> None:
    """Write the report of this process, wholly or not at all; nothing where none is asked for.

    Raises ConfigError where it cannot be written: whoever asks for it would take us for unguarded.
    """
    wanted = os.environ.get(RANKS_VAR, "").strip()
    if not wanted:
        return
    place = Path(wanted.replace("{pid}", str(os.getpid())))
    part = place.with_name(place.name + ".part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(_report(link)) + "\n")
        part.replace(place)
    except OSError as error:
        raise ConfigError(f"{RANKS_VAR}={wanted!r} cannot be written: {error.strerror}") from None


def _report(link: AllocatorLink) -> dict[str, Any]:
    current, guard = settings(), link.guard
    needed = hooks.hooks(current.release, load=False)
    absent = (HookStatus.MISSING, HookStatus.ABSENT)
    return {
        "v": FORMAT,
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": rank_of(_title()),
        "sglang": hooks.running_version(),
        "hicache_guard": __version__,
        "mode": current.mode.value,
        "route": current.route,
        "hooks": len(needed),
        "missing": [hook.target for hook in needed if hook.status in absent],
        "page_size": guard.page_size,
        "slots": {side.name: side.pages * side.page_size for side in (guard.full, guard.window)},
    }


def _title() -> str:
    """What this process is called in a list of processes."""
    return Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
