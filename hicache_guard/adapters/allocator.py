"""The allocator seam: the public methods of ``SWATokenToKVPoolAllocator``.

A public method is one operation: it is named and placed in the journal, its arguments are checked
before anything happens, and in strict mode it happens wholly or not at all. What leaves and enters
the free lists inside is seen at the page-pool seam. Every function here stands around the method of
its name.
"""

from __future__ import annotations

from collections.abc import Callable
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
from hicache_guard.core.backlog import Continued, Freed, Mapped
from hicache_guard.core.errors import UnguardedError
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.modes import Mode
from hicache_guard.core.verdict import Vetted

Method = Callable[..., Any]


def guard_of(allocator: Any) -> PoolGuard:
    """The guard of a hybrid allocator. Raises UnguardedError where it has none."""
    link = link_of(allocator)
    if link is None:
        raise UnguardedError(
            f"{type(allocator).__name__} is not guarded; call hicache_guard.install() before it is "
            "constructed, or set HICACHE_GUARD and load the plugin"
        )
    link.drain()  # whoever asks wants to know what was found, all of it
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
    with link.operation("alloc", settle=False):
        page_pool.settle_overdue(link, need_size)
        full = _allocate(link, lambda: original(allocator, need_size))
        _map_fresh(link, full)
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
    with link.operation("alloc_extend", settle=False):
        most = extend_num_tokens // allocator.page_size + len(prefix_lens) + 1
        page_pool.settle_overdue(link, most)
        suspect = _before_continuing(link, last_loc, prefix_lens)
        full = _allocate(link, lambda: original(allocator, *args))
        # The batch keeps its lengths, and overwrites them as it goes on.
        _after_continuing(link, last_loc, prefix_lens.clone())
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
    with link.operation("alloc_extend_swa_tail", settle=False):
        page_pool.settle_overdue(link, extend_num_tokens // allocator.page_size + 2)
        link.guard.keep_rows(last_loc.to(torch.int64))
        full = original(allocator, *args, swa_tail_len)
        if full is not None:
            mapped = _map_fresh(link, full)
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
    with link.operation("alloc_decode", settle=False):
        page_pool.settle_overdue(link, len(seq_lens))
        before = seq_lens - 1
        suspect = _before_continuing(link, last_loc, before)
        full = _allocate(link, lambda: original(allocator, seq_lens, seq_lens_cpu, last_loc))
        _after_continuing(link, last_loc, before)
        _map_fresh(link, full, suspect=suspect)
        return full


def _allocate(link: AllocatorLink, call: Callable[[], Any]) -> Any:
    """Run the release's allocation; strict mode looks at each side before the next is touched."""
    if not link.guard.lazy:
        before = [page_pool.count_free(pool.state) for pool in link.pools]
        full = call()
        if full is None:
            after = [page_pool.count_free(pool.state) for pool in link.pools]
            link.guard.check_nothing_kept([b - a for b, a in zip(before, after, strict=True)])
        return full
    taking = page_pool.Taking(link)
    full = call()
    taking.done(failed=full is None)
    return full


def _before_continuing(link: AllocatorLink, last: torch.Tensor, lengths: torch.Tensor) -> bool:
    """Strict: check that the window side of what is continued is there; True if it may not be."""
    guard = link.guard
    if guard.lazy:
        return False
    continues = (lengths % guard.page_size != 0) & (last >= 0)
    return guard.check_continued(last.to(torch.int64), continues) != 0


def _after_continuing(link: AllocatorLink, last: torch.Tensor, lengths: torch.Tensor) -> None:
    """Note what was continued, with the entries as the release itself just read them."""
    guard, window = link.guard, link.captured_last
    if guard.lazy and window is not None:
        # The caller may overwrite what it passed as soon as the call returns.
        guard.backlog.note_allocation(Continued(guard.current, last.clone(), window, lengths))


def _map_fresh(link: AllocatorLink, full: Any, *, suspect: bool = False) -> int:
    """Record what an allocation mapped: the last full slots, one for each window slot it took."""
    window = link.captured_window
    if full is None or window is None or window.numel() == 0:
        return 0
    guard = link.guard
    count = int(window.numel())
    rows = full if count == full.numel() else full[full.numel() - count :]
    if guard.lazy and not guard.mapping_suspect:
        # Of one-slot pages both are cut from the free lists: a view would keep those alive.
        slots = window.clone() if guard.page_size == 1 else window
        guard.backlog.note_allocation(Mapped(guard.current, rows.clone(), slots))
        return count
    rows, slots = rows.to(torch.int64), window.to(torch.int64)
    if suspect:
        slots = guard.reject_dead_targets(slots)
        guard.map.mapping.index_copy_(0, rows, slots)
    guard.mapped(rows, slots)
    return count


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
    if guard.lazy and (segment or guard.page_size == 1):
        _note_free(original, link, name, free_index, full=True, window=True, where=where)
        return
    with link.operation(name):
        slots = free_index.to(torch.int64)
        vetted = guard.vet_slots(slots, segment=segment)
        safe = _without_bad(link, free_index, vetted)
        guard.note_named(slots, vetted.bad, segment=segment)
        if safe.numel():
            _follow_entries(link, torch.where(vetted.bad, 0, slots), segment=segment)
            if in_free_group(allocator):
                named = torch.where(vetted.bad, 0, slots)
                guard.backlog.vouch(guard.full, guard.full.pages_of(named))
            link.vetted = (safe, vetted) if safe is free_index else None
            link.eager = True
            _run_vetted(link, original, safe, where)


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
    if link is None or link.vetting or free_index.numel() == 0:
        original(allocator, free_index, **where)
        return
    guard = link.guard
    if _queued(link, allocator, name):
        rows = free_index.to(torch.int64, copy=True)
        known = rows.clamp(0, guard.map.mapping.numel() - 2)
        link.queued.append((rows, guard.map.mapping.index_select(0, known)))
        original(allocator, free_index, **where)
        return
    if link.queued:
        free_index = _as_queued(link, free_index)
        if free_index.numel() == 0:
            return
    if guard.lazy and (segment or guard.page_size == 1):
        _note_free(original, link, name, free_index, full=False, window=True, where=where)
        return
    with link.operation(name):
        slots = free_index.to(torch.int64)
        vetted = guard.vet_rows(slots, must_be_mapped=_as_it_reads(link, segment))
        safe = _without_bad(link, free_index, vetted)
        if safe.numel():
            rows = torch.where(vetted.bad, 0, slots)
            _follow_entries(link, rows, segment=segment)
            link.eager = True
            _run_vetted(link, original, safe, where)
            if guard.mode is Mode.ENFORCE and not link.release.frees_whole_pages:
                guard.forget_window(guard.rows_of_slots(rows))


def _as_queued(link: AllocatorLink, free_index: torch.Tensor) -> torch.Tensor:
    """The part of a queued window free that still means what it meant when it was queued.

    The release translates it only now. Where an entry was re-pointed meanwhile, it would free the
    slot that the entry leads to today; the slot that was meant is freed instead (enforce).
    """
    guard = link.guard
    rows = torch.cat([rows for rows, _ in link.queued])
    then = torch.cat([entries for _, entries in link.queued])
    link.queued = []
    if rows.numel() != free_index.numel():
        return free_index  # not the queue that was noted: something else flushed it
    moved = guard.check_repointed(rows, then)
    if moved is None:
        return free_index
    guard.backlog.settle()
    link.state["swa_attn_allocator"].free(then[moved])
    guard.backlog.settle()
    return free_index[~moved]


def _note_free(
    original: Method,
    link: AllocatorLink,
    name: str,
    free_index: torch.Tensor,
    *,
    full: bool,
    window: bool,
    where: dict[str, int],
) -> None:
    """Note a free whose shape is fixed, to be checked with others, and let it run.

    What it releases is held back by the page pools until then (enforce).
    """
    guard, size = link.guard, link.guard.page_size
    with link.operation(name, settle=False):
        slots = free_index if free_index.dtype == torch.int64 else free_index.to(torch.int64)
        heads = slots[::size] if size > 1 else slots
        count = slots.shape[0]
        last_row = guard.map.mapping.numel() - 2
        entries = peers = None
        if window:
            entries = guard.map.mapping.index_select(0, heads.clamp(0, last_row))
        elif full:
            peers = guard.map.mapping.index_select(0, slots.clamp(0, last_row))
        guard.backlog.note_free(
            Freed(
                guard.current,
                # The caller may reuse the memory of its row before this is looked at.
                heads.clone(),
                slots[-1:].clone() if count % size else heads[:0],
                count,
                full=full,
                window=entries,
                mapped=window and link.release.segment_frees,
                peers=peers,
                queued=in_free_group(link.allocator()),
            )
        )
        safe = free_index
        if guard.mode is Mode.ENFORCE:
            # The release follows an index before anybody has checked it: keep it inside.
            if size == 1:
                safe = free_index.clamp(0, last_row + 1)  # at worst the sentinel; it is put back
            else:
                safe = free_index.clamp(min=0)
                safe.masked_fill_(safe > last_row, 0)
        if guard.undo:
            guard.keep_rows(slots)
        _run_vetted(link, original, safe, where)


def _without_bad(link: AllocatorLink, free_index: torch.Tensor, vetted: Vetted) -> torch.Tensor:
    """What of ``free_index`` the release may be told to free."""
    if link.guard.mode is not Mode.ENFORCE:
        return free_index
    if vetted.arrived():
        return vetted.keep(free_index)
    link.padding_expected = True
    return torch.where(vetted.bad, 0, free_index)


def _run_vetted(
    link: AllocatorLink, original: Method, free_index: torch.Tensor, where: dict[str, int]
) -> None:
    link.vetting = True
    try:
        original(link.allocator(), free_index, **where)
    finally:
        link.vetting = False


def _as_it_reads(link: AllocatorLink, segment: bool) -> bool:
    """Whether a window free releases whatever an entry holds, even "nothing"."""
    return segment or (link.release.segment_frees and link.guard.page_size == 1)


def _follow_entries(link: AllocatorLink, slots: torch.Tensor, *, segment: bool) -> None:
    """Check the mapping entries through which this free reaches the window pool."""
    guard, release = link.guard, link.release
    if segment:
        rows = slots[:: guard.page_size]
    elif release.frees_whole_pages and guard.page_size > 1:
        rows = guard.rows_of_slots(slots)
    else:
        rows = slots
    as_it_reads = _as_it_reads(link, segment)
    guard.check_entries(rows, must_be_mapped=as_it_reads)
    guard.keep_rows(slots)
    link.padding_expected = link.padding_expected or as_it_reads
    if in_free_group(link.allocator()):
        entries = guard.map.mapping.index_select(0, rows)
        guard.backlog.vouch(guard.window, guard.window.pages_of(entries))


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
    if link is None or link.vetting or free_index.numel() == 0 or _queued(link, allocator, name):
        original(allocator, free_index, **where)
        return
    guard = link.guard
    if guard.lazy and (segment or guard.page_size == 1):
        _note_free(original, link, name, free_index, full=True, window=False, where=where)
        return
    with link.operation(name):
        slots = free_index.to(torch.int64)
        vetted = guard.vet_slots(slots, segment=segment)
        live, count = guard.check_peers_released(torch.where(vetted.bad, 0, slots))
        safe = _without_bad(link, free_index, vetted)
        if guard.mode is Mode.ENFORCE:
            if count:
                allocator.free_swa(slots[live])
            elif count is None:
                guard.note_full_only(slots)  # the next allocation releases what was left behind
        guard.note_named(slots, vetted.bad, segment=segment)
        if safe.numel():
            if in_free_group(allocator):
                named = torch.where(vetted.bad, 0, slots)
                guard.backlog.vouch(guard.full, guard.full.pages_of(named))
            link.vetted = (safe, vetted) if safe is free_index else None
            link.eager = True
            _run_vetted(link, original, safe, where)


def _queued(link: AllocatorLink, allocator: Any, name: str) -> bool:
    """Whether this free only joins the open group; it is checked when the group ends."""
    return name in link.release.deferred_frees and in_free_group(allocator)


def free_group_end(original: Method, allocator: Any) -> None:
    link = link_of(allocator)
    if not isinstance(link, AllocatorLink):
        original(allocator)
        return
    with link.operation("free_group_end", settle=False):
        link.guard.backlog.group_ends()
        link.ending = True
        if link.release.deferred_frees:
            original(allocator)  # the frees that were queued are made, and checked, now
            return
        # What was queued was checked, or noted, when it was queued.
        link.padding_expected = True
        link.vetting = True
        original(allocator)


# -- the mapping -------------------------------------------------------------------------------


def set_full_to_swa_mapping(
    original: Method, allocator: Any, full_indices: torch.Tensor, swa_indices: torch.Tensor
) -> None:
    link = link_of(allocator)
    if link is None or link.taking or link.guard.operation is not None or not full_indices.numel():
        original(allocator, full_indices, swa_indices)
        return
    with link.operation("set_full_to_swa_mapping"):
        written = link.guard.check_mapping_write(
            full_indices.to(torch.int64), swa_indices.to(torch.int64)
        )
        original(allocator, full_indices, written.to(swa_indices.dtype))


def clear_full_to_swa_mapping(original: Method, allocator: Any, full_indices: torch.Tensor) -> None:
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
        link.guard.backlog.clear()
        link.queued = []
        link.guard.cleared(allocator.full_attn_allocator.size, allocator.swa_attn_allocator.size)


def resize(original: Method, allocator: Any, config: Any) -> None:
    link = link_of(allocator)
    if link is None:
        original(allocator, config)
        return
    with link.operation("resize"):
        original(allocator, config)  # ends in clear(), which takes the new sizes over
