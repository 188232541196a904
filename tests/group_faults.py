"""Faults inside and around a free group, on the release on the path, in each mode.

Prints one line a fault: name, page size, mode, what was counted, what the audit found in the end,
and whether strict raised.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import install
from hicache_guard.core import compiled
from hicache_guard.core.errors import GuardViolation
from hicache_guard.repro import pools
from hicache_guard.repro.audit import audit

Books = dict[str, torch.Tensor]


def _free_row(pool: Any, row: torch.Tensor) -> None:
    """As the release's own callers free a row: by segment where it can."""
    if hasattr(pool, "free_swa_segment"):
        pool.free_segment(row, start_pos=0)
    else:
        pool.free(row)


def freed_again_after_its_group(pool: Any, books: Books) -> None:
    """Somebody looks at the free list in between, so that the group is settled by then."""
    mine, books["other"] = pools.extend_surely(pool, 8), pools.extend_surely(pool, 8)
    pool.free_group_begin()
    _free_row(pool, mine)
    pool.free_group_end()
    assert len(pool.full_attn_allocator.free_pages) > 0
    _free_row(pool, mine)


def full_side_left_in_a_group(pool: Any, books: Books) -> None:
    """C11 where the free of the full side is queued."""
    mine, books["other"] = pools.extend_surely(pool, 8), pools.extend_surely(pool, 8)
    pool.free_group_begin()
    getattr(pool, "free_full", pool.full_attn_allocator.free)(mine)
    pool.free_group_end()
    books["next"] = pools.extend_surely(pool, 4)


def full_side_left_and_allocated_in_a_group(pool: Any, books: Books) -> None:
    """The guard releases the peers while the group is open; what the group holds comes later.

    Mutation seen: vouched pages that whatever settles next uses up lose the group's pages.
    """
    mine, books["other"] = pools.extend_surely(pool, 8), pools.extend_surely(pool, 8)
    pool.free_group_begin()
    getattr(pool, "free_full", pool.full_attn_allocator.free)(mine)
    books["next"] = pools.extend_surely(pool, 4)
    pool.free_group_end()
    books["last"] = pools.extend_surely(pool, 4)


def freed_again_in_a_group_and_handed_out(pool: Any, books: Books) -> None:
    """A page that is free already is freed again in a group, and handed out before that ends.

    Seen to fail on releases that make a queued free only then, and for direct frees on the full
    pool: the page was taken from its new owner, in silence.
    """
    mine, books["other"] = pools.extend_surely(pool, 8), pools.extend_surely(pool, 8)
    _free_row(pool, mine)
    assert len(pool.full_attn_allocator.free_pages) > 0
    pool.free_group_begin()
    pool.free(mine)
    while pool.available_size() >= 8:
        books[f"next {len(books)}"] = pools.extend_surely(pool, 8)
    pool.free_group_end()


def freed_again_directly_in_a_group_and_handed_out(pool: Any, books: Books) -> None:
    """The same on the full sub-allocator alone."""
    mine, books["other"] = pools.extend_surely(pool, 8), pools.extend_surely(pool, 8)
    _free_row(pool, mine)
    assert len(pool.full_attn_allocator.free_pages) > 0
    pool.free_group_begin()
    pool.full_attn_allocator.free(mine)
    while pool.available_size() >= 8:
        books[f"next {len(books)}"] = pools.extend_surely(pool, 8)
    pool.free_group_end()


def freed_again_in_a_group_among_others(pool: Any, books: Books) -> None:
    """The same while rightful frees of both kinds wait in the group.

    Seen to fail on 0.5.19: what waited was mistaken for the queue of another free.
    """
    mine, books["other"] = pools.extend_surely(pool, 8), pools.extend_surely(pool, 8)
    both, sides = pools.extend_surely(pool, 4), pools.extend_surely(pool, 4)
    _free_row(pool, mine)
    assert len(pool.full_attn_allocator.free_pages) > 0
    pool.free_group_begin()
    pool.free(mine)
    pool.free(both)
    pool.free_swa(sides)
    getattr(pool, "free_full", pool.free)(sides)
    while pool.available_size() >= 8:
        books[f"next {len(books)}"] = pools.extend_surely(pool, 8)
    pool.free_group_end()


FAULTS: tuple[Callable[[Any, Books], None], ...] = (
    freed_again_after_its_group,
    full_side_left_in_a_group,
    full_side_left_and_allocated_in_a_group,
    freed_again_in_a_group_and_handed_out,
    freed_again_directly_in_a_group_and_handed_out,
    freed_again_in_a_group_among_others,
)


def main() -> None:
    pools.quiet()
    for fault in FAULTS:
        for page_size in (1, 4):
            for mode, switch in product(("observe", "enforce", "strict"), ("1", "0")):
                os.environ[compiled.SWITCH] = switch
                install(mode)
                pool, books = pools.build(64, 48, page_size), Books()
                raised = False
                try:
                    fault(pool, books)
                except GuardViolation:
                    raised = True
                except AssertionError:
                    assert mode == "observe"  # the release's own check of its sizes
                counted = {k.value: n for k, n in guard_of(pool).tally.violations.items()}
                found = [] if raised else audit(pool, books)
                print(json.dumps([fault.__name__, page_size, mode, switch, counted, found, raised]))


if __name__ == "__main__":
    main()
