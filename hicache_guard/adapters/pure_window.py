"""The seam of models whose every layer is a window layer: one pool, no mapping worth the name.

``PureSWATokenToKVPoolAllocator`` uses one sub-allocator for both sides and an identity mapping, so
its pages are guarded where they enter and leave the free list and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hicache_guard.adapters.allocator import refuse
from hicache_guard.adapters.hooks import require_complete
from hicache_guard.adapters.link import ATTRIBUTE, AllocatorLink, PoolLink
from hicache_guard.adapters.rank_report import announce
from hicache_guard.adapters.state import settings
from hicache_guard.core.guard import PoolGuard


def __init__(original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> None:
    original(allocator, *args, **kwargs)
    require_complete()
    current = settings()
    pool = allocator.swa_attn_allocator
    if type(pool).__name__ not in current.page_pools:
        refuse(allocator, f"its sub-allocator {type(pool).__name__} is of an unknown layout")
        return
    guard = PoolGuard(
        current.mode,
        full_slots=0,
        window_slots=pool.size,
        page_size=allocator.page_size,
        mapping=allocator.full_to_swa_index_mapping,
        on_report=current.listener(),
    )
    link = AllocatorLink(allocator, guard, current.release)
    link.pools.append(PoolLink(link, pool, guard.window))
    vars(pool)[ATTRIBUTE] = link.pools[0]
    announce(link)
