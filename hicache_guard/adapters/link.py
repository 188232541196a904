"""How hooked SGLang objects find their guard, and how an operation on them begins and ends."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from hicache_guard.adapters.releases import Release
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.ledger import PageLedger
from hicache_guard.core.modes import Mode
from hicache_guard.core.verdict import Vetted

#: The attribute under which an SGLang object holds its link.
ATTRIBUTE = "_hicache_guard_link"

_OUR_PACKAGE = __name__.partition(".")[0] + "."


def in_free_group(allocator: Any) -> bool:
    """Whether frees on this SGLang allocator are being queued (two spellings across releases)."""
    direct = getattr(allocator, "is_not_in_free_group", None)
    return not direct if direct is not None else allocator.free_group is not None


class AllocatorLink:
    """What the hooks know about one hybrid allocator.

    ``vetting`` is True while a public free whose arguments were checked runs, ``padding_expected``
    while page 0 may reach a free list through a fault that was counted already, ``trusted_writer``
    while a known writer of the bare mapping runs.
    """

    def __init__(self, allocator: Any, guard: PoolGuard, release: Release) -> None:
        self.allocator = weakref.ref(allocator)
        self.guard = guard
        self.release = release
        self.pools: list[PoolLink] = []
        self.vetting = False
        self.vetted: tuple[torch.Tensor, Vetted] | None = None
        self.padding_expected = False
        self.captured_window: torch.Tensor | None = None
        self.trusted_writer = False

    @contextmanager
    def operation(self, name: str, depth: int = 2) -> Iterator[bool]:
        """Run one outermost operation; yields False where one is open already.

        In strict mode an operation that raises leaves the allocator, the mapping and the ledgers as
        they were. ``depth`` counts the frames between this call and the hooked call's caller.
        """
        guard = self.guard
        if guard.operation is not None:
            yield False
            return
        guard.begin(name, _caller(depth + 1))
        mapping = self._notice_unseen()
        before = Snapshot(self) if guard.mode is Mode.STRICT else None
        log = guard.undo.open() if before is not None else None
        try:
            if mapping is not None:
                guard.reconcile(mapping)
            yield True
        except GuardViolation:
            if before is not None and log is not None:
                before.put_back()
                guard.undo.close(log)
                log.roll_back()
            raise
        finally:
            if log is not None:
                guard.undo.close(log)
            self.vetting = self.padding_expected = False
            self.vetted = self.captured_window = None
            guard.end()
            for pool in self.pools:
                pool.remember()

    def _notice_unseen(self) -> torch.Tensor | None:
        """The mapping, where it was written behind the seams; free lists likewise are taken over."""
        allocator = self.allocator()
        for pool in self.pools:
            pool.notice_unseen()
        mapping = allocator.full_to_swa_index_mapping
        if not self.guard.unseen_writes(mapping):
            return None
        if self.trusted_writer and mapping is self.guard.map.mapping:
            return None  # it only writes zeros, and "no window slot" is always true
        return mapping


class PoolLink:
    """What the hooks know about one sub-allocator.

    ``staged`` holds releases whose verdict is still travelling (enforce mode on a device): they
    count as available and enter the free list once the verdict is there.
    """

    def __init__(self, owner: AllocatorLink, pool: Any, ledger: PageLedger) -> None:
        self.owner = owner
        self.pool = weakref.ref(pool)
        self.ledger = ledger
        self.staged: list[StagedRelease] = []
        self._expected: torch.Tensor | None = None
        self.remember()

    def remember(self) -> None:
        """Take the free list as it is now for what the next operation must find."""
        self._expected = self.pool().free_pages

    def notice_unseen(self) -> None:
        """Take stock where the free list was replaced without a hook."""
        pool = self.pool()
        if pool.free_pages is not self._expected:
            self.owner.guard.resync(self.ledger, free_list(pool))
            self.remember()


class StagedRelease:
    """A release held back until its verdict arrives."""

    def __init__(
        self, items: torch.Tensor, vetted: Vetted, invoke: Callable[[torch.Tensor], None]
    ) -> None:
        self.items = items
        self.vetted = vetted
        self.invoke = invoke


def free_list(pool: Any) -> torch.Tensor:
    """Every free page id of a sub-allocator (int64), in any of its containers."""
    parts = [pool.free_pages]
    if getattr(pool, "release_pages", None) is not None:
        parts.append(pool.release_pages)
    parts += getattr(pool, "staged_pages", [])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


class Snapshot:
    """The host-side attributes of an allocator and its sub-allocators, by reference.

    SGLang replaces these tensors and never writes into them, so references are enough.
    """

    _ATTRIBUTES = (
        "free_pages",
        "release_pages",
        "staged_pages",
        "num_staged_pages",
        "is_not_in_free_group",
        "free_group",
        "free_page_ids_group",
        "free_page_reps_group",
        "swa_free_group",
        "swa_page_ids_group",
    )

    def __init__(self, link: AllocatorLink) -> None:
        self._saved: list[tuple[Any, str, Any]] = []
        for holder in (link.allocator(), *(pool.pool() for pool in link.pools)):
            for name in self._ATTRIBUTES:
                if name in vars(holder):
                    value = getattr(holder, name)
                    kept = list(value) if isinstance(value, list) else value
                    self._saved.append((holder, name, kept))

    def put_back(self) -> None:
        for holder, name, value in self._saved:
            setattr(holder, name, value)


def link_of(holder: Any) -> Any:
    """The link of an SGLang object, or None where it is not guarded."""
    return holder.__dict__.get(ATTRIBUTE)


def _caller(depth: int) -> FrameType:
    """The frame ``depth`` levels up, skipping our own and contextlib's."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith((_OUR_PACKAGE + "adapters", "contextlib")):
            return frame
        frame = frame.f_back
    return sys._getframe(depth)
