"""The allocator seam: the public methods of ``SWATokenToKVPoolAllocator``.

A public method is one operation: it is named and placed in the journal, its arguments are checked
before anything happens, and in strict mode it happens wholly or not at all. What leaves and enters
the free lists inside is seen at the page-pool seam. Every function here stands around the method of
its name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hicache_guard.adapters import page_pool
from hicache_guard.adapters.link import (
    ATTRIBUTE,
    AllocatorLink,
    PoolLink,
    in_free_group,
    link_of,
)
from hicache_guard.adapters.state import settings
from hicache_guard.core.errors import UnguardedError
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.modes import Mode

Method = Callable[..., Any]

_known: weakref.WeakSet[Any] = weakref.WeakSet()


def guarded_allocators() -> Iterator[Any]:
    """Every live allocator that is guarded, with its guard reachable by ``guard_of``."""
    yield from _known


def guard_of(allocator: Any) -> PoolGuard:
    """The guard of a hybrid allocator. Raises UnguardedError where it has none."""
    link = link_of(allocator)
    if link is None:
        raise UnguardedError(
            f"{type(allocator).__name__} is not guarded; call hicache_guard.install() before it is "
            "constructed, or set HICACHE_GUARD and load the plugin"
        )
    guard: PoolGuard = link.guard
    return guard


def __init__(original: Method, allocator: Any, *args: Any, **kwargs: Any) -> None:
    original(allocator, *args, **kwargs)
    attach(allocator)


def attach(allocator: Any) -> None:
    """Give a freshly built hybrid allocator its guard."""
    current = settings()
    full, window = allocator.full_attn_allocator, allocator.swa_attn_allocator
    for pool in (full, window):
        if type(pool).__name__ not in current.page_pools:
            refuse(allocator, f"its sub-allocator {type(pool).__name__} is of an unknown layout")
            return
    guard = PoolGuard(
        current.mode,
        full_slots=full.size,
        window_slots=window.size,
        page_size=allocator.page_size,
        mapping=allocator.full_to_swa_index_mapping,
        on_report=current.on_report,
    )
    link = AllocatorLink(allocator, guard, current.release)
    vars(allocator)[ATTRIBUTE] = link
    vars(allocator.get_kvcache())[ATTRIBUTE] = link
    for pool, ledger in ((full, guard.full), (window, guard.window)):
        pool_link = PoolLink(link, pool, ledger)
        vars(pool)[ATTRIBUTE] = pool_link
        link.pools.append(pool_link)
    _known.add(allocator)


def refuse(allocator: Any, why: str) -> None:
    """An allocator cannot be guarded: only observe mode lets it run."""
    message = f"{type(allocator).__name__} cannot be guarded: {why}"
    if settings().mode is Mode.OBSERVE:
        settings().log_unguarded(message)
        return
    raise UnguardedError(message + "; use HICACHE_GUARD=observe to run without a guard for it")


# -- allocation --------------------------------------------------------------------------------


def alloc(original: Method, allocator: Any, need_size: int) -> Any:
    link = link_of(allocator)
    if link is None:
        return original(allocator, need_size)
    with link.operation("alloc"):
        page_pool.settle_overdue(link)
        full = original(allocator, need_size)
        _map_fresh(link, full, suspect=False)
        return full


def alloc_extend(
    original: Method,
    allocator: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
) -> Any:
    args = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens)
    link = link_of(allocator)
    if link is None:
        return original(allocator, *args)
    with link.operation("alloc_extend"):
        page_pool.settle_overdue(link)
        continues = (prefix_lens % allocator.page_size != 0) & (last_loc >= 0)
        suspect = link.guard.check_continued(last_loc.to(torch.int64), continues) != 0
        full = original(allocator, *args)
        _map_fresh(link, full, suspect=suspect)
        return full


def alloc_extend_swa_tail(
    original: Method,
    allocator: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    swa_tail_len: int,
) -> Any:
    args = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens)
    link = link_of(allocator)
    if link is None:
        return original(allocator, *args, swa_tail_len)
    with link.operation("alloc_extend_swa_tail"):
        page_pool.settle_overdue(link)
        if link.guard.mode is Mode.STRICT:
            link.guard.keep_rows(last_loc.to(torch.int64))
        full = original(allocator, *args, swa_tail_len)
        if full is not None:
            mapped = _map_fresh(link, full, suspect=False)
            link.guard.check_unmapped(full[: full.numel() - mapped].to(torch.int64))
        return full


def alloc_decode(
    original: Method,
    allocator: Any,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
) -> Any:
    link = link_of(allocator)
    if link is None:
        return original(allocator, seq_lens, seq_lens_cpu, last_loc)
    with link.operation("alloc_decode"):
        page_pool.settle_overdue(link)
        continues = (seq_lens - 1) % allocator.page_size != 0
        suspect = link.guard.check_continued(last_loc.to(torch.int64), continues) != 0
        full = original(allocator, seq_lens, seq_lens_cpu, last_loc)
        _map_fresh(link, full, suspect=suspect)
        return full


def _map_fresh(link: AllocatorLink, full: Any, *, suspect: bool) -> int:
    """Record what an allocation mapped: the last full slots, one for each window slot it took."""
    window = link.captured_window
    if full is None or window is None or window.numel() == 0:
        return 0
    guard = link.guard
    rows = full[full.numel() - window.numel() :].to(torch.int64)
    slots = window.to(torch.int64)
    if suspect:
        allowed = guard.reject_dead_targets(slots)
        if allowed is not slots:
            guard.map.mapping.index_copy_(0, rows, allowed)
            slots = allowed
    guard.mapped(rows, slots)
    return int(rows.numel())


# -- frees -------------------------------------------------------------------------------------


def free(original: Method, allocator: Any, free_index: torch.Tensor) -> None:
    _free_both(original, allocator, "free", free_index, segment=False)


def free_segment(
    original: Method, allocator: Any, free_index: torch.Tensor, *, start_pos: int
) -> None:
    _free_both(original, allocator, "free_segment", free_index, segment=True, start_pos=start_pos)


def _free_both(
    original: Method,
    allocator: Any,
    name: str,
    free_index: torch.Tensor,
    *,
    segment: bool,
    **where: int,
) -> None:
    link = link_of(allocator)
    if link is None or link.vetting or free_index.numel() == 0 or _queued(link, allocator, name):
        original(allocator, free_index, **where)
        return
    guard = link.guard
    with link.operation(name, depth=3):
        slots = free_index.to(torch.int64)
        vetted = guard.vet_slots(slots, segment=segment)
        safe = free_index
        if guard.mode is Mode.ENFORCE:
            if vetted.arrived():
                safe = vetted.keep(free_index)
            else:
                safe = torch.where(vetted.bad, 0, free_index)
                link.padding_expected = True
        guard.note_named(slots, vetted.bad, segment=segment)
        if safe.numel():
            _follow_entries(link, torch.where(vetted.bad, 0, slots), segment=segment)
            link.vetted = (safe, vetted) if safe is free_index else None
            link.vetting = True
            original(allocator, safe, **where)


def free_swa(original: Method, allocator: Any, free_index: torch.Tensor) -> None:
    _free_window(original, allocator, "free_swa", free_index, segment=False)


def free_swa_segment(
    original: Method, allocator: Any, free_index: torch.Tensor, *, start_pos: int
) -> None:
    _free_window(
        original, allocator, "free_swa_segment", free_index, segment=True, start_pos=start_pos
    )


def _free_window(
    original: Method,
    allocator: Any,
    name: str,
    free_index: torch.Tensor,
    *,
    segment: bool,
    **where: int,
) -> None:
    link = link_of(allocator)
    if link is None or link.vetting or free_index.numel() == 0 or _queued(link, allocator, name):
        original(allocator, free_index, **where)
        return
    guard = link.guard
    with link.operation(name, depth=3):
        slots = free_index.to(torch.int64)
        vetted = guard.vet_rows(slots)
        safe = free_index
        if guard.mode is Mode.ENFORCE:
            safe = (
                vetted.keep(free_index)
                if vetted.arrived()
                else torch.where(vetted.bad, 0, free_index)
            )
        if safe.numel():
            rows = torch.where(vetted.bad, 0, slots)
            _follow_entries(link, rows, segment=segment)
            link.vetting = True
            original(allocator, safe, **where)
            link.vetting = False
            if guard.mode is Mode.ENFORCE and not link.release.frees_whole_pages:
                guard.forget_window(guard.rows_of_slots(rows))


def _follow_entries(link: AllocatorLink, slots: torch.Tensor, *, segment: bool) -> None:
    """Check the mapping entries through which this free reaches the window pool."""
    guard, release = link.guard, link.release
    if segment:
        rows = slots[:: guard.page_size]
    elif release.frees_whole_pages and guard.page_size > 1:
        rows = guard.rows_of_slots(slots)
    else:
        rows = slots
    as_it_reads = segment or (release.segment_frees and guard.page_size == 1)
    guard.check_entries(rows, must_be_mapped=as_it_reads)
    guard.keep_rows(slots)
    link.padding_expected = link.padding_expected or as_it_reads


def free_full(original: Method, allocator: Any, free_index: torch.Tensor) -> None:
    _free_full_only(original, allocator, "free_full", free_index, segment=False)


def free_full_segment(
    original: Method, allocator: Any, free_index: torch.Tensor, *, start_pos: int
) -> None:
    _free_full_only(
        original, allocator, "free_full_segment", free_index, segment=True, start_pos=start_pos
    )


def _free_full_only(
    original: Method,
    allocator: Any,
    name: str,
    free_index: torch.Tensor,
    *,
    segment: bool,
    **where: int,
) -> None:
    link = link_of(allocator)
    if link is None or link.vetting or free_index.numel() == 0:
        original(allocator, free_index, **where)
        return
    guard = link.guard
    with link.operation(name, depth=3):
        slots = free_index.to(torch.int64)
        vetted = guard.vet_slots(slots, segment=segment)
        live, count = guard.check_peers_released(torch.where(vetted.bad, 0, slots))
        safe = free_index
        if guard.mode is Mode.ENFORCE:
            safe = (
                vetted.keep(free_index)
                if vetted.arrived()
                else torch.where(vetted.bad, 0, free_index)
            )
            if count:
                allocator.free_swa(slots[live])
            elif count is None:
                guard.note_full_only(slots)  # the next allocation releases what was left behind
        guard.note_named(slots, vetted.bad, segment=segment)
        if safe.numel():
            link.vetted = (safe, vetted) if safe is free_index else None
            link.vetting = True
            original(allocator, safe, **where)


def _queued(link: AllocatorLink, allocator: Any, name: str) -> bool:
    """Whether this free only joins the open group; it is checked when the group ends."""
    return name in link.release.deferred_frees and in_free_group(allocator)


def free_group_end(original: Method, allocator: Any) -> None:
    link = link_of(allocator)
    if not isinstance(link, AllocatorLink):
        original(allocator)
        return
    with link.operation("free_group_end"):
        # What was queued by its window side was checked when it was queued.
        link.padding_expected = link.release.segment_frees
        original(allocator)


# -- the mapping -------------------------------------------------------------------------------


def set_full_to_swa_mapping(
    original: Method, allocator: Any, full_indices: torch.Tensor, swa_indices: torch.Tensor
) -> None:
    link = link_of(allocator)
    if link is None or link.guard.operation is not None or full_indices.numel() == 0:
        original(allocator, full_indices, swa_indices)
        return
    with link.operation("set_full_to_swa_mapping"):
        written = link.guard.check_mapping_write(
            full_indices.to(torch.int64), swa_indices.to(torch.int64)
        )
        original(allocator, full_indices, written.to(swa_indices.dtype))


def clear_full_to_swa_mapping(
    original: Method, allocator: Any, full_indices: torch.Tensor
) -> None:
    link = link_of(allocator)
    if link is None or link.guard.operation is not None:
        original(allocator, full_indices)
        return
    with link.operation("clear_full_to_swa_mapping"):
        link.guard.keep_rows(full_indices.to(torch.int64))
        original(allocator, full_indices)


# -- whole-pool events -------------------------------------------------------------------------


def backup_state(original: Method, allocator: Any) -> Any:
    link = link_of(allocator)
    if link is None:
        return original(allocator)
    with link.operation("backup_state"):
        state = original(allocator)
        link.guard.backed_up(state)
        return state


def restore_state(original: Method, allocator: Any, state: Any) -> None:
    link = link_of(allocator)
    if link is None:
        original(allocator, state)
        return
    with link.operation("restore_state"):
        original(allocator, state)
        link.guard.restored(state)


def clear(original: Method, allocator: Any) -> None:
    link = link_of(allocator)
    if link is None:
        original(allocator)
        return
    with link.operation("clear"):
        original(allocator)
        link.guard.cleared(allocator.full_attn_allocator.size, allocator.swa_attn_allocator.size)


def resize(original: Method, allocator: Any, config: Any) -> None:
    link = link_of(allocator)
    if link is None:
        original(allocator, config)
        return
    with link.operation("resize"):
        original(allocator, config)  # ends in clear(), which takes the new sizes over
