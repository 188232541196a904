"""Legal sequences that look wrong: run on the release on the path, in each mode, without an alarm.

Each was taken from how a release's own code uses its allocator; docs/design.md lists them. Prints
one line a sequence: name, page size, mode, what the audit found, what was counted, whether observe
left the release's own state, and what the journal keeps alive that it does not name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import install, uninstall
from hicache_guard.adapters.link import link_of
from hicache_guard.core import compiled
from hicache_guard.repro import pools
from hicache_guard.repro.audit import audit, fingerprint


def _rows(pool: Any, *counts: int) -> Iterator[torch.Tensor]:
    """Rows of fresh requests as SGLang's request table keeps them: int32."""
    for count in counts:
        yield pools.extend_surely(pool, count).to(torch.int32)


def group_of_whole_and_partial_frees(pool: Any) -> None:
    first, second, third = _rows(pool, 8, 8, 7)
    pool.free_group_begin()
    pool.free(first)
    pool.free(second[:5] if pool.page_size > 1 else second)
    pool.free(third)
    pool.free_group_end()


def group_of_window_and_full_frees(pool: Any) -> None:
    """Both sides leave in one group by themselves, beside rows that leave whole."""
    first, second, third = _rows(pool, 8, 8, 4)
    pool.free_group_begin()
    pool.free_swa(first[:4])
    getattr(pool, "free_full", pool.free)(first[:4])
    pool.free(second)
    pool.free(first[4:])
    (fourth,) = _rows(pool, 4)
    pool.free_group_end()
    pool.free(fourth)
    pool.free(third)


def tombstone_recovered_in_a_group(pool: Any) -> None:
    """A group that window slots leave is still open when their row is mapped again."""
    if not hasattr(pool, "clear_full_to_swa_mapping"):
        return  # the release frees what the entry leads to when the group ends: fault S2
    (kept,) = _rows(pool, 8)
    pool.free_group_begin()
    pool.free_swa(kept)
    (incoming,) = _rows(pool, 8)
    window = pool.translate_loc_from_full_to_swa(incoming).to(torch.int64)
    pool.set_full_to_swa_mapping(kept, window)
    pool.clear_full_to_swa_mapping(incoming)
    pool.free_full(incoming)
    pool.free_group_end()
    (other,) = _rows(pool, 8)
    pool.free(other)
    pool.free(kept)


def unaligned_tail_never_named_again(pool: Any) -> None:
    for _ in range(6):
        (row,) = _rows(pool, 7)
        pool.free(row[: 5 if pool.page_size > 1 else 7])


def full_side_first_window_side_next(pool: Any) -> None:
    """The unified tree's order, on the sub-allocator and then on the allocator."""
    (row,) = _rows(pool, 8)
    pool.full_attn_allocator.free(row)
    pool.free_swa(row)


def window_leaves_before_the_request_ends(pool: Any) -> None:
    (row,) = _rows(pool, 12)
    if hasattr(pool, "free_swa_segment"):
        pool.free_swa_segment(row[:8], start_pos=0)
        pool.free_full_segment(row[:8], start_pos=0)
        pool.free_segment(row[8:], start_pos=8)
    else:
        pool.free_swa(row[:8])
        pool.free(row)


def load_back(pool: Any) -> None:
    """HiCache: both sides allocated on their own, the window's part mapped, all freed later."""
    full = pool.full_attn_allocator.alloc(16)
    window = pool.swa_attn_allocator.alloc(8)
    pool.set_full_to_swa_mapping(full[8:], window)
    if hasattr(pool, "free_full"):
        pool.free_full(full[:8])
        pool.free(full[8:])
    else:
        pool.free(full)


def window_slots_change_hands(pool: Any) -> None:
    """A tombstone is recovered with a newcomer's window slots: new entry first, old one next."""
    kept, incoming = _rows(pool, 8, 8)
    pool.free_swa(kept)
    window = pool.translate_loc_from_full_to_swa(incoming).to(torch.int64)
    pool.set_full_to_swa_mapping(kept.long(), window)
    if hasattr(pool, "clear_full_to_swa_mapping"):
        pool.clear_full_to_swa_mapping(incoming.long())
    else:
        pool.full_to_swa_index_mapping[incoming.long()] = 0
    pool.full_attn_allocator.free(incoming)
    (other,) = _rows(pool, 8)
    pool.free(other)
    pool.free(kept)


def tensors_reused_by_the_caller(pool: Any) -> None:
    """SGLang overwrites lengths and rows in place once a call has returned."""
    size = pool.page_size
    lengths = torch.tensor([6])
    row = torch.zeros(16, dtype=torch.int32)
    row[:6] = pools.extend_surely(pool, 6)
    for length in range(7, 13):
        last = row[length - 2 : length - 1].to(torch.int64)
        lengths.fill_(length)
        new = pool.alloc(1) if size == 1 else pool.alloc_decode(lengths, lengths, last)
        row[length - 1] = new[0]
        lengths.fill_(999)
        last.fill_(3)
        new.fill_(5) if size > 1 else None
    held = row[:12].clone()
    pool.free(held)
    held.fill_(1)


def window_free_of_nothing(pool: Any) -> None:
    """While entries of a page freed in part are left behind in a page of somebody new."""
    (row,) = _rows(pool, 8)
    pool.free(row[: 5 if pool.page_size > 1 else 8])
    (other,) = _rows(pool, 5)
    before = guard_of(pool).tally.unhooked_writes if link_of(pool) else 0
    pool.free_swa(row[:0])
    if link_of(pool):
        assert guard_of(pool).tally.unhooked_writes == before, "taken for a write behind the seams"
    pool.free(other)


def clear_and_start_again(pool: Any) -> None:
    tuple(_rows(pool, 8, 7))
    pool.clear()
    (row,) = _rows(pool, 8)
    pool.free(row)


SEQUENCES: tuple[Callable[[Any], None], ...] = (
    group_of_whole_and_partial_frees,
    group_of_window_and_full_frees,
    tombstone_recovered_in_a_group,
    unaligned_tail_never_named_again,
    full_side_first_window_side_next,
    window_leaves_before_the_request_ends,
    load_back,
    window_slots_change_hands,
    tensors_reused_by_the_caller,
    window_free_of_nothing,
    clear_and_start_again,
)


def main() -> None:
    pools.quiet()
    for sequence in SEQUENCES:
        for page_size in (1, 4):
            uninstall()
            plain = pools.build(64, 32, page_size)
            _repeat(sequence, plain)
            for mode, switch in product(("observe", "enforce", "strict"), ("1", "0")):
                os.environ[compiled.SWITCH] = switch
                install(mode)
                pool = pools.build(64, 32, page_size)
                _repeat(sequence, pool)
                same = fingerprint(pool) == fingerprint(plain) if mode == "observe" else True
                counted = {k.value: n for k, n in guard_of(pool).tally.violations.items()}
                found = audit(pool, {})
                row = [sequence.__name__, page_size, mode, switch, found, counted, same]
                row.append(_pinned(guard_of(pool)))
                print(json.dumps(row), flush=True)


def _pinned(guard: Any) -> int:
    """Bytes of storage that the journal keeps alive beyond the page ids that it names."""
    excess = 0
    for touch in guard.journal._touches:
        for pages in (touch.pages,):
            excess += pages.untyped_storage().nbytes() - pages.numel() * pages.element_size()
    return excess


def _repeat(sequence: Callable[[Any], None], pool: Any) -> None:
    """Three times over, so that what one run leaves behind meets the next."""
    for _ in range(3):
        sequence(pool)


if __name__ == "__main__":
    main()
