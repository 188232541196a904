"""What programs share that tell one scene in every mode, and print one JSON line for each.

A scene is told to a ``host_tier.Story``; it ends *right*, *raised* by the guard, or in what was found
wrong, which begins with "bytes: " where foreign KV was read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hicache_guard.adapters.hooks import install, running_version, uninstall
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.report import Violation
from hicache_guard.repro import pools, scheduling
from real.host_tier import Finding

PAGES = (1, 16)
#: Unguarded, and guarded.
MODES = (None, "observe", "enforce", "strict")

Row = dict[str, Any]
Play = Callable[[scheduling.Release, str, int, str, str | None], Row]


def guarded(mode: str | None) -> list[Violation]:
    """Install the guard, in enforce for a mutation; what will be reported."""
    uninstall()
    reports: list[Violation] = []
    if mode is not None:
        install(mode if mode in MODES else "enforce", on_report=reports.append)
    return reports


def outcome(tell: Callable[[], Any]) -> Row:
    """How a scene ends, and what it says of itself if it ends right."""
    found: Row = {}
    try:
        found = tell() or {}
        ended = "right"
    except Finding as finding:
        ended = f"bytes: {finding}" if "not what was written" in str(finding) else str(finding)
    except GuardViolation:
        ended = "raised"
    return {"ended": ended[:120], **found}


def faults(reports: Iterable[Violation]) -> list[str]:
    return sorted({report.fault.value for report in reports})


def print_all(doc: str | None, play: Play, mutations: Mapping[str, Iterable[str]]) -> int:
    """Each scene on each tree with a host tier, in each mode and under its ``mutations``."""
    options = argparse.ArgumentParser(description=doc)
    options.add_argument("--page-sizes", type=int, nargs="*", default=PAGES)
    options.add_argument("--trees", nargs="*", default=("unified", "unified-rust"))
    chosen = options.parse_args()
    pools.quiet()
    release = scheduling.Release()
    for tree in scheduling.trees():
        if tree not in chosen.trees:
            continue
        for page in chosen.page_sizes:
            for scene, broken in mutations.items():
                for mode in (*MODES, *broken):
                    row = {"version": running_version(), "tree": tree, "page_size": page}
                    found = play(release, tree, page, scene, mode)
                    print(json.dumps({**row, "scene": scene, "mode": mode, **found}), flush=True)
    return 0
