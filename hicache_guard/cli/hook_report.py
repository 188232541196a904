"""Run by ``doctor`` in a fresh process: install the guard and print, as JSON, what came of it."""

from __future__ import annotations

import json
import os
import sys

from hicache_guard.adapters import hooks
from hicache_guard.core.errors import GuardError
from hicache_guard.core.modes import ENV_VAR


def main() -> int:
    """Print one JSON object; exit 2 with one line where there is no SGLang that we know."""
    try:
        release = hooks.running_release()
    except GuardError as error:
        print(error, file=sys.stderr)
        return 2
    failure = ""
    try:
        hooks.install()
    except GuardError as error:
        failure = str(error)
    report = {
        "version": release.version,
        "mode": os.environ[ENV_VAR],
        "error": failure,
        "hooks": [
            {
                "seam": f"{hook.seam.module}.{hook.seam.cls}",
                "method": hook.method,
                "status": hook.status.value,
                "detail": hook.detail,
            }
            for hook in hooks.hooks(release)
        ],
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
