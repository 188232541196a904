"""Run by ``doctor`` in a fresh process: load SGLang's plugins as its scheduler does, look at hooks.

Prints one JSON object. Where a patched source ends the process before there is anything to look at,
it holds only what was ``refused``.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata

from hicache_guard.adapters import hooks, patched, plugin
from hicache_guard.adapters.hooks import HookStatus
from hicache_guard.core.errors import GuardError
from hicache_guard.core.modes import ENV_VAR

_ENTRY_POINT = "hicache_guard"
_GROUP = "sglang.srt.plugins"

_WORDS = {
    HookStatus.APPLIED: "applied",
    HookStatus.ABSENT: "missing",
    HookStatus.MISSING: "missing",
    HookStatus.WAITING: "when imported",
    HookStatus.NOT_NEEDED: "not needed",
}


def main() -> int:
    """Exit 2 with one line where there is no SGLang that we know."""
    failure = ""
    try:
        release = hooks.running_release()
        from sglang.srt.plugins import load_plugins

        try:
            load_plugins()
        except SystemExit as refusal:
            if patched.decorations:
                raise  # out of an import, which cannot be done a second time in this process
            failure = str(refusal).removeprefix("hicache-guard: ")
        needed = hooks.hooks(release)
    except GuardError as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit as refusal:  # a patched source cannot be guarded as it is
        print(json.dumps({"refused": str(refusal).removeprefix("hicache-guard: ")}))
        return 0
    there = (HookStatus.APPLIED, HookStatus.WAITING)
    complete = all(hook.status in there for hook in needed)
    report = {
        "version": release.version,
        "mode": os.environ[ENV_VAR],
        "error": failure,
        "plugin": "" if plugin.loaded or complete else _why_not_loaded(),
        "hooks": [
            {
                "seam": ".".join(filter(None, (hook.seam.module, hook.seam.cls))),
                "method": hook.method,
                "status": _WORDS[hook.status],
                "route": hook.route,
                "detail": hook.detail,
            }
            for hook in (*needed, *hooks.unneeded(release))
        ],
    }
    print(json.dumps(report))
    return 0


def _why_not_loaded() -> str:
    if not any(entry.name == _ENTRY_POINT for entry in metadata.entry_points(group=_GROUP)):
        return "its entry point is not installed here (pip install hicache-guard beside SGLang)"
    named = os.environ.get("SGLANG_PLUGINS", "")
    if named:
        return f"SGLANG_PLUGINS={named} leaves it out; add {_ENTRY_POINT}, or patch the source"
    return "SGLang passed it over; its log says why"


if __name__ == "__main__":
    sys.exit(main())
