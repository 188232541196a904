"""A scheduling round on the release on the path: all that wait are matched, with one wait for a device.

Nothing is compiled here, and no answer arrives before somebody waits for it (``delayed``), as on a
busy GPU. ``SchedulePolicy.calc_priority`` is the release's own. Of each scene it is told how often was
waited for the device, how long every match was, in which order the queue was left, and for which
request something was reported.

Prints one JSON line a scene, tree and mode, and the same of each mutation. Run: ``python -P rounds.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from hicache_guard.adapters import tree_link
from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import install, uninstall
from hicache_guard.core import guard as guarding
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.report import Violation
from hicache_guard.repro import pools, scheduling
from real import delayed, trees
from real.pseudo_hits import PAGE, WINDOW, Play

#: Requests that wait, each of a conversation of its own, and the tokens of these.
WAITING, CACHED = 5, 16
#: The one whose window goes to somebody else.
VICTIM = 2


class Round(Play):
    """A server in front of which as many requests wait as there are conversations."""

    def __init__(self, release: scheduling.Release, tree: str) -> None:
        from sglang.srt.managers.schedule_policy import SchedulePolicy

        kept = dict.fromkeys(("SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS",), False)
        options = {name: kept[name] for name in release.options() if name in kept}
        setting = trees.Setting(tree, PAGE, WINDOW, 60, 50, options, look_always=True)
        self.drive = trees.Drive(release, setting, 0, Counter())
        self.server = self.drive.server
        self.allocator = self.server.allocator
        self.lengths, self.count = [], 0
        self.conversations = [[100 * n + i for i in range(CACHED)] for n in range(1, WAITING + 1)]
        for tokens in self.conversations:
            self.ask(tokens, output=1)
        self.waiting = [
            self.server.request(f"W{number}", [*tokens, *[7] * (1 + number)])
            for number, tokens in enumerate(self.conversations)
        ]
        self.policy = SchedulePolicy("lpm", self.server.tree, False, False, False)

    def spoil(self) -> None:
        """The last window of one conversation goes to somebody else."""
        tail = self.cached(self.conversations[VICTIM])[CACHED - WINDOW :]
        self.allocator.free_swa(tail.clone())
        self.newcomer(WINDOW)

    def prioritise(self) -> None:
        self.policy.calc_priority(self.waiting)

    def admit(self) -> None:
        """Each is matched once more, as when it is admitted."""
        for req in self.waiting:
            self.server.match(req)

    def found(self) -> dict[str, int]:
        return {req.rid: self.server.prefix_length(req) for req in self.waiting}


def _whole(round_: Round) -> None:
    round_.prioritise()
    round_.admit()


def _one_recycled(round_: Round) -> None:
    round_.spoil()
    round_.prioritise()
    round_.admit()


def _recycled_meanwhile(round_: Round) -> None:
    round_.prioritise()
    round_.spoil()
    round_.admit()


SCENES: dict[str, Callable[[Round], None]] = {
    "whole": _whole,
    "one recycled": _one_recycled,
    "recycled meanwhile": _recycled_meanwhile,
}


def play(release: scheduling.Release, tree: str, scene: str, mode: str) -> dict[str, Any]:
    uninstall()
    delayed.withhold()
    reports: list[Violation] = []
    delayed.Withheld.released = True  # until the queue is there
    install(mode, on_report=reports.append)
    round_ = Round(release, tree)
    guard = guard_of(round_.allocator)
    guard.lazy = mode == "enforce"
    guard.drain()
    delayed.Withheld.released, delayed.Withheld.waits = False, 0

    ended = "right"
    try:
        SCENES[scene](round_)
    except GuardViolation:
        ended = "raised"
    row = {
        "ended": ended,
        "waits": delayed.Withheld.waits,
        "order": [req.rid for req in round_.waiting],
        "lengths": round_.found() if ended == "right" else {},
    }
    delayed.Withheld.released = True
    guard.drain()
    row["reported for"] = sorted({str(report.request) for report in reports})

    return row


# --- proof by mutation -----------------------------------------------------------------------------

_WAITS, _KNOWN = tree_link.TreeLink.waits, tree_link.TreeLink.known
_WHOLE = guarding.PoolGuard.whole_prefixes


def _alone() -> None:
    tree_link.TreeLink.waits = lambda self: False  # type: ignore[method-assign]


def _for_ever() -> None:
    tree_link.TreeLink.known = (  # type: ignore[method-assign]
        lambda self, result, length: self._key(result, length) in self.whole
    )


def _unseen() -> None:
    guarding.PoolGuard.whole_prefixes = (  # type: ignore[method-assign]
        lambda self, paths, need: [True] * len(paths)
    )


def _restore() -> None:
    tree_link.TreeLink.waits = _WAITS  # type: ignore[method-assign]
    tree_link.TreeLink.known = _KNOWN  # type: ignore[method-assign]
    guarding.PoolGuard.whole_prefixes = _WHOLE  # type: ignore[method-assign]


#: What is taken away, and the scene that notices.
MUTATIONS: dict[str, tuple[Callable[[], None], str]] = {
    "matches proved together": (_alone, "whole"),
    "forgotten when KV changes": (_for_ever, "recycled meanwhile"),
    "looked at": (_unseen, "one recycled"),
}


def main() -> None:
    pools.quiet()
    release = scheduling.Release()
    for tree in scheduling.trees():
        for scene in SCENES:
            for mode in ("observe", "enforce", "strict"):
                row = {"scene": scene, "tree": tree, "mode": mode}
                print(json.dumps(row | play(release, tree, scene, mode)), flush=True)
        for name, (mutate, scene) in MUTATIONS.items():
            mutate()
            try:
                row = {"without": name, "tree": tree}
                print(json.dumps(row | play(release, tree, scene, "enforce")), flush=True)
            finally:
                _restore()


if __name__ == "__main__":
    main()
