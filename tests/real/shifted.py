"""Serials come to their end while KV is loaded back: they are shifted later, and nothing is lost.

The story is that of ``host_tier.py``, in which the window side of a prefix is loaded back alone. The
operations of a load-back are compared with what was before it, so its parts must not be renumbered.

"in the middle" is the proof by mutation: no serials are left for the load-back, and they are shifted
in the middle of it. Prints one JSON line a tree, page size and mode. Run: ``python -P shifted.py``.
"""

from __future__ import annotations

import sys
from typing import Any

from hicache_guard.adapters.allocator import guard_of
from hicache_guard.core import guard as guarding
from hicache_guard.core import ledger
from hicache_guard.repro import scheduling
from real import tales
from real.host_tier import Story

_LEFT, _SERIAL, _REBASE = guarding.LEFT, ledger.SERIAL, guarding.PoolGuard._rebase
#: Serials that are left in the mutation, as everywhere else.
FEW = 4


def _ends_with_loads(story: Story, guard: Any) -> list[bool]:
    """From now on serials end with each load; of each shift, whether a load-back ran."""
    controller, shifts = story.server.tree.cache_controller, list[bool]()
    load = controller.load

    def loading(*args: Any, **kwargs: Any) -> Any:
        setattr(guarding, "SERIAL", guard.serial + guarding.LEFT)  # noqa: B010
        return load(*args, **kwargs)

    def rebase(self: Any, caller: Any) -> None:
        shifts.append(self.trees_loading)
        setattr(guarding, "SERIAL", _SERIAL)  # noqa: B010
        _REBASE(self, caller)

    controller.load = loading
    setattr(guarding.PoolGuard, "_rebase", rebase)  # noqa: B010
    return shifts


def play(
    release: scheduling.Release, tree: str, page: int, scene: str, mode: str | None
) -> dict[str, Any]:
    setattr(guarding, "LEFT", FEW if mode == "in the middle" else _LEFT)  # noqa: B010
    reports = tales.guarded(mode)
    story = Story(release, tree, page, "write_through")
    shifts = [] if mode is None else _ends_with_loads(story, guard_of(story.server.allocator))
    told = tales.outcome(story.tell)
    setattr(guarding.PoolGuard, "_rebase", _REBASE)  # noqa: B010
    setattr(guarding, "SERIAL", _SERIAL)  # noqa: B010
    return {**told, "faults": tales.faults(reports), "shifts": shifts}


def main() -> int:
    return tales.print_all(__doc__, play, {"the window alone": ("in the middle",)})


if __name__ == "__main__":
    sys.exit(main())
