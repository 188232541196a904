"""The proof of prefixes in a model that has one pool only: all layers are window layers.

Its tree keeps whole prefixes and no tombstones, and full and window slots are the same. So a prefix
is proved where every page of it is the one that the tree took over (``match.Full``).
"""

from __future__ import annotations

import torch

from hicache_guard.core.faults import Fault
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.ledger import FREED
from hicache_guard.core.match import Full, Paths
from hicache_guard.core.modes import Mode
from hicache_guard.core.proof import Proved
from hicache_guard.core.verdict import Suspicion, Verdict
from hicache_guard.core.witness import Witness


class SinglePool:
    """What a tree holds of the window pool of ``guard``. The verbs are as those of the guard."""

    def __init__(self, guard: PoolGuard) -> None:
        self._guard = guard
        self._pages = guard.window
        self.witness = Witness(guard.window, guard.device, guard.undo)

    def adopt(self, slots: torch.Tensor, start: int) -> int:
        """A request is about to give ``slots[start:]`` (int64); returns up to where it may."""
        given = slots[start:]
        born = self._pages.generations(self._pages.pages_of(given))
        dead = born >= FREED
        verdict = Verdict(
            dead, given, [Suspicion(Fault.DEAD_TOKENS_CACHED, lambda: dead)], found=born
        )
        count = self._guard.judge(verdict, self._pages)
        end = slots.shape[0]
        if self._guard.mode is Mode.ENFORCE and count:
            size = self._guard.page_size
            end = max(start, (start + int(dead.to(torch.uint8).argmax())) // size * size)
        live = torch.where(dead, 0, given)[: max(0, end - start)]
        self.witness.vouch(live, self._guard.serial)
        return end

    def prove(self, path: torch.Tensor) -> Proved:
        """Which resume points of a matched path (int64 slots, oldest first) can be proved."""
        resident = self.witness.resident(path)
        foreign = ~resident
        verdict = Verdict(
            foreign,
            path,
            [Suspicion(Fault.FOREIGN_PREFIX, lambda: foreign)],
            expected=self.witness.since.index_select(0, self._pages.pages_of(path)),
            found=self._pages.generations(self._pages.pages_of(path)),
        )
        if not self._guard.judge_now(verdict, self._pages):
            return Proved.whole(path.shape[0])
        paths = Paths.plan([path.shape[0]], self._guard.page_size, path.device)
        return Proved.of(paths, {"window": (Full(), resident)})[0]
