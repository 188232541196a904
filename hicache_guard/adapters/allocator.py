"""The allocator seam: the public methods of ``SWATokenToKVPoolAllocator``.

A public method is one operation: it is named and placed in the journal, its arguments are checked
before anything happens, and in strict mode it happens wholly or not at all. What leaves and enters
the free lists inside is seen at the page-pool seam. Every function here stands around the method of
its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hicache_guard.adapters import hooks, page_pool, rank_report, recording
from hicache_guard.adapters.link import (
    ATTRIBUTE,
    AllocatorLink,
    Factory,
    PoolLink,
    free_list,
    in_free_group,
    link_of,
)
from hicache_guard.adapters.state import settings, stop
from hicache_guard.core.backlog import Continued, Freed
from hicache_guard.core.compiled import FREES_FULL, FREES_WINDOW
from hicache_guard.core.errors import UnguardedError
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.modes import Mode
from hicache_guard.core.transfer import to_device
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
    hooks.require_complete()
    current = settings()
    full, window = allocator.full_attn_allocator, allocator.swa_attn_allocator
    for pool in (full, window):
        if type(pool).__name__ not in current.page_pools:
            refuse(allocator, f"its sub-allocator {type(pool).__name__} is of an unknown layout")
            return
    tape = recording.Tape() if recording.wanted() else None
    listener = current.listener()
    guard = PoolGuard(
        current.mode,
        full_slots=full.size,
        window_slots=window.size,
        page_size=allocator.page_size,
        mapping=allocator.full_to_swa_index_mapping,
        on_report=listener if tape is None else tape.listening(listener),
    )
    link = AllocatorLink(allocator, guard, hooks.as_patched(current.release))
    vars(allocator)[ATTRIBUTE] = link
    vars(allocator.get_kvcache())[ATTRIBUTE] = link
    for pool, ledger in ((full, guard.full), (window, guard.window)):
        pool_link = PoolLink(link, pool, ledger)
        vars(pool)[ATTRIBUTE] = pool_link
        link.pools.append(pool_link)
    link.watch()
    if tape is not None:
        tape.begin(link)
    rank_report.announce(link)


def refuse(allocator: Any, why: str) -> None:
    """An allocator cannot be guarded: only observe mode lets it run."""
    message = f"{type(allocator).__name__} cannot be guarded: {why}"
    if settings().mode is Mode.OBSERVE:
        settings().log_unguarded(message)
        return
    stop(f"{message}; use HICACHE_GUARD=observe to run without a guard for it", settings().route)


# -- allocation --------------------------------------------------------------------------------


def _alloc(original: Method) -> Method:
    def hooked(allocator: Any, need_size: int) -> Any:
        link = allocator.__dict__.get(ATTRIBUTE)
        if link is None:
            return original(allocator, need_size)
        pages = need_size // allocator.page_size
        return _allocate(link, "alloc", pages, lambda: original(allocator, need_size))

    return hooked


alloc = Factory(_alloc)


def _alloc_extend(original: Method) -> Method:
    def hooked(
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
        most = extend_num_tokens // allocator.page_size + len(prefix_lens) + 1
        after = Last(last_loc, prefix_lens)
        return _allocate(link, "alloc_extend", most, lambda: original(allocator, *args), after)

    return hooked


alloc_extend = Factory(_alloc_extend)


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
        guard = link.guard
        guard.keep_rows(last_loc.to(torch.int64))
        allocate = _allocate_at_once if guard.at_once else _allocate_briefly
        full = allocate(link, lambda: original(allocator, *args, swa_tail_len), None)
        if full is not None:
            mapped = 0 if link.captured_window is None else link.captured_window.shape[0]
            guard.check_unmapped(full[: full.shape[0] - mapped].to(torch.int64, copy=True))
        return full


def _alloc_decode(original: Method) -> Method:
    def hooked(
        allocator: Any, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> Any:
        link = link_of(allocator)
        if link is None:
            return original(allocator, seq_lens, seq_lens_cpu, last_loc)
        return _allocate(
            link,
            "alloc_decode",
            len(seq_lens),
            lambda: original(allocator, seq_lens, seq_lens_cpu, last_loc),
            Last(last_loc, seq_lens, less=1),
        )

    return hooked


alloc_decode = Factory(_alloc_decode)


class Last:
    """What an allocation continues after: the last slot of each request, and its tokens so far.

    ``lengths`` count ``less`` tokens too many: in a decode step the one to come, where each
    returned slot tells by itself what it continues after.
    """

    __slots__ = ("lengths", "less", "slots")

    def __init__(self, slots: torch.Tensor, lengths: torch.Tensor, *, less: int = 0) -> None:
        self.slots = slots
        self.lengths = lengths
        self.less = less


def _allocate(
    link: AllocatorLink,
    name: str,
    most_pages: int,
    call: Callable[[], Any],
    after: Last | None = None,
) -> Any:
    """Run a hybrid allocation of up to ``most_pages`` as one operation."""
    guard = link.guard
    if link.strict or guard.operation is not None:
        with link.operation(name, settle=False):
            page_pool.settle_overdue(link, most_pages)
            return _allocate_at_once(link, call, after)
    link.start(name)
    try:
        if guard.backlog.has_frees or guard.has_overdue:
            page_pool.settle_overdue(link, most_pages)
        allocate = _allocate_at_once if guard.at_once else _allocate_briefly
        full = allocate(link, call, after)
    except BaseException as error:
        link.give_up(error)
        raise
    link.stop()
    return full


def _allocate_briefly(link: AllocatorLink, call: Callable[[], Any], after: Last | None) -> Any:
    """The two sides are seen from outside, once, when the release is done with both."""
    guard = link.guard
    if after is not None and not guard.passes_extension(after.slots, after.lengths, after.less):
        return _allocate_at_once(link, call, after)
    lists = page_pool.Lists(link)
    link.captured_window = link.captured_last = None
    link.taking = True
    full = call()
    link.taking = False
    window = link.captured_window
    if full is None:
        kept = lists.taken()
        if any(kept):
            guard.check_nothing_kept(kept)
            if guard.mode is Mode.ENFORCE:
                lists.put_back()
    else:
        window = full[:0] if window is None else window
        if not guard.took(full, window):
            _note_taken(link, full, window, after)
    return full


def _note_taken(
    link: AllocatorLink, full: torch.Tensor, window: torch.Tensor, after: Last | None
) -> None:
    backlog = link.guard.backlog
    decode = after is not None and after.less == 1
    taken = backlog.note_taken(full, window, each_continues=decode)
    last = link.captured_last
    if after is not None and not decode and last is not None:
        # The batch keeps its lengths and last slots, and overwrites them as it goes on.
        slots, lengths = after.slots.clone(), after.lengths.clone()
        backlog.note_continued(Continued(taken, slots, last, lengths))


def _allocate_at_once(link: AllocatorLink, call: Callable[[], Any], after: Last | None) -> Any:
    """Each side is looked at before the next is touched, and what is mapped is checked."""
    guard = link.guard
    dead = None
    if after is not None:
        before = after.lengths - after.less
        continues = (before % guard.page_size != 0) & (after.slots >= 0)
        dead = guard.check_continued(after.slots.to(torch.int64, copy=True), continues)
    counted = [pool.count_free() for pool in link.pools]
    full = call()
    if full is None:
        gone = [had - pool.count_free() for had, pool in zip(counted, link.pools, strict=True)]
        guard.check_nothing_kept(gone)
        return None
    _map_fresh(link, full, dead)
    return full


def _map_fresh(link: AllocatorLink, full: torch.Tensor, dead: torch.Tensor | None) -> None:
    """Record what an allocation mapped: the last full slots, one for each window slot it took.

    What continues after a slot of ``dead`` is unmapped.
    """
    window = link.captured_window
    if window is None or window.numel() == 0:
        return
    rows = full[full.shape[0] - window.shape[0] :].to(torch.int64, copy=True)
    slots = window.to(torch.int64, copy=True)
    if dead is not None:
        slots = link.guard.unmap_after(dead, rows, slots)
    link.guard.mapped(rows, slots)


# -- frees -------------------------------------------------------------------------------------


class Sides:
    """What a kind of public free releases, and how it is judged slot by slot.

    ``what`` as the compiled books are asked. (No enum: its attributes cost as much as a check.)
    """

    __slots__ = ("at_once", "full", "what", "window")

    def __init__(self, at_once: Callable[[Free], None], *, full: bool, window: bool) -> None:
        self.at_once = at_once
        self.full = full
        self.window = window
        self.what = full * FREES_FULL | window * FREES_WINDOW


class Free:
    """One call of a public free: ``original`` with the slots ``index`` and ``where`` they begin.

    ``segment`` says that they are consecutive from a page boundary.
    """

    __slots__ = ("index", "link", "original", "segment", "sides", "where")

    def __init__(
        self,
        original: Method,
        link: AllocatorLink,
        index: torch.Tensor,
        where: dict[str, int],
        sides: Sides,
        segment: bool,
    ) -> None:
        self.original = original
        self.link = link
        self.index = index
        self.where = where
        self.sides = sides
        self.segment = segment

    def run(self, index: torch.Tensor) -> None:
        """Let the release free ``index``; what it releases inside was checked, or noted."""
        self.link.vetting = True
        try:
            self.original(self.link.allocator(), index, **self.where)
        finally:
            self.link.vetting = False


def _free(
    original: Method,
    link: AllocatorLink,
    index: torch.Tensor,
    where: dict[str, int],
    sides: Sides,
    segment: bool,
    name: str,
) -> None:
    """Run a public free as one operation, or as a part of the one that is open; see ``Free``."""
    guard = link.guard
    if link.strict or not (segment or guard.page_size == 1):
        with link.operation(name):
            sides.at_once(Free(original, link, index, where, sides, segment))
        return
    outermost = guard.operation is None
    if outermost:
        link.start(name)
    try:
        if guard.passes_free(index, sides.what | link.must_be_mapped):
            link.vetting = True
            try:
                original(link.allocator(), index, **where)
            except BaseException:
                guard.take_back_free()
                raise
            link.vetting = False
        elif guard.lazy:
            _note_and_free(Free(original, link, index, where, sides, segment))
        else:
            sides.at_once(Free(original, link, index, where, sides, segment))
    except BaseException as error:
        link.vetting = False
        if outermost:
            link.give_up(error)
        raise
    if outermost:
        link.stop()


def _free_full_side(original: Method, name: str, sides: Sides, *, segment: bool) -> Method:
    """The hook of a free of the full side, or of both."""

    def hooked(allocator: Any, free_index: torch.Tensor, **where: int) -> None:
        link = allocator.__dict__.get(ATTRIBUTE)
        if link is None or link.vetting or not free_index.shape[0]:
            original(allocator, free_index, **where)
            return
        if name in link.deferred and in_free_group(allocator):
            # It only joins the open group, and is checked when that ends.
            joined = (free_index.to(torch.int64, copy=True), link.guard.moment)
            if link.guard.trees_working:
                link.guard.withdraw(joined[0])
            link.joined.setdefault(name, []).append(joined)
            original(allocator, free_index, **where)
            return
        if link.ending and name in link.joined:
            free_index = _as_joined(link, name, free_index)
            if not free_index.shape[0]:
                return
        _free(original, link, free_index, where, sides, segment, name)

    return hooked


def _both_at_once(free: Free) -> None:
    link, guard, segment = free.link, free.link.guard, free.segment
    slots = free.index.to(torch.int64, copy=True)
    vetted = guard.vet_slots(slots, segment=segment)
    safe = _without_bad(link, free.index, vetted)
    guard.note_named(slots, vetted.bad, segment=segment)
    if safe.numel():
        named = torch.where(vetted.bad, 0, slots)
        _follow_entries(link, named, segment=segment)
        _run_vetted_full(free, safe, named, vetted)


def _run_vetted_full(free: Free, safe: torch.Tensor, named: torch.Tensor, vetted: Vetted) -> None:
    """As ``_run_vetted``, of a free that names the full slots ``named`` (0 for the bad ones)."""
    link, guard = free.link, free.link.guard
    if _waits_for_group(link):
        guard.vouch(guard.full, guard.full.pages_of(named))
    link.vetted = (safe, vetted) if safe is free.index else None
    _run_vetted(free, safe)


_BOTH = Sides(_both_at_once, full=True, window=True)


free = Factory(lambda original: _free_full_side(original, "free", _BOTH, segment=False))
free_segment = Factory(
    lambda original: _free_full_side(original, "free_segment", _BOTH, segment=True)
)


def _free_window(original: Method, name: str, *, segment: bool) -> Method:
    """The hook of a free of the window side alone."""

    def hooked(allocator: Any, free_index: torch.Tensor, **where: int) -> None:
        link = allocator.__dict__.get(ATTRIBUTE)
        if link is None or link.vetting:
            original(allocator, free_index, **where)
            return
        if not free_index.shape[0]:
            # Up to 0.5.13.post1 this still writes into the mapping, though no entry of it.
            with link.operation(name, settle=False):
                original(allocator, free_index, **where)
            return
        guard = link.guard
        if name in link.deferred and in_free_group(allocator):
            # It only joins the open group, and is checked when that ends.
            rows = free_index.to(torch.int64, copy=True)
            known = rows.clamp(0, guard.map.mapping.numel() - 2)
            link.queued.append((rows, guard.map.mapping.index_select(0, known)))
            guard.see_windows_betrayed(rows)
            original(allocator, free_index, **where)
            return
        if link.ending and link.queued:
            free_index = _as_queued(link, free_index)
            if free_index.shape[0]:
                with guard.tree_working():  # whose they were was seen when they were queued
                    _free(original, link, free_index, where, _WINDOW, segment, name)
            return
        _free(original, link, free_index, where, _WINDOW, segment, name)

    return hooked


def _window_at_once(free: Free) -> None:
    link, guard, segment = free.link, free.link.guard, free.segment
    slots = free.index.to(torch.int64, copy=True)
    vetted = guard.vet_rows(slots, must_be_mapped=_as_it_reads(link, segment))
    safe = _without_bad(link, free.index, vetted)
    if safe.numel():
        rows = torch.where(vetted.bad, 0, slots)
        _follow_entries(link, rows, segment=segment)
        _run_vetted(free, safe)
        if guard.mode is Mode.ENFORCE and not link.release.frees_whole_pages:
            guard.forget_window(guard.rows_of_slots(rows))


_WINDOW = Sides(_window_at_once, full=False, window=True)


free_swa = Factory(lambda original: _free_window(original, "free_swa", segment=False))
free_swa_segment = Factory(
    lambda original: _free_window(original, "free_swa_segment", segment=True)
)


def _as_joined(link: AllocatorLink, name: str, free_index: torch.Tensor) -> torch.Tensor:
    """The part of a queued free whose pages are still those that were meant when it was queued.

    Where a page was handed out since, it belongs to somebody else by now; it is left out (enforce).
    """
    joined = link.joined.pop(name)
    slots = torch.cat([slots for slots, _ in joined])
    serials = [link.guard.serial_at(moment) for _, moment in joined]
    counts = [slots.shape[0] for slots, _ in joined]
    if slots.shape[0] != free_index.shape[0]:
        return free_index  # not the queue that was noted: something else flushed it
    # By numpy: torch's operator would look at the counts on the device.
    since = to_device(torch.from_numpy(np.repeat(np.array(serials), counts)), slots.device)
    link.guard.backlog.settle()  # what was handed out since may only be noted
    bad = link.guard.check_handed_out_since(slots, since)
    return free_index if bad is None else free_index[~bad]


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
    ending, link.ending = link.ending, False  # nobody checked these yet
    link.state["swa_attn_allocator"].free(then[moved])
    link.ending = ending
    guard.backlog.settle()
    return free_index[~moved]


def _note_and_free(free: Free) -> None:
    """Note a free whose shape is fixed, to be checked with others, and let it run.

    What it releases is held back by the page pools until then (enforce).
    """
    link, free_index = free.link, free.index
    guard = link.guard
    window = free.sides.window
    size, mapping = guard.page_size, guard.map.mapping
    beyond = mapping.shape[0] - 1
    # The caller may reuse the memory of its row before this is looked at.
    heads = (free_index[::size] if size > 1 else free_index).to(torch.int64, copy=True)
    if guard.mode is not Mode.ENFORCE:
        safe = free_index
        rows = heads.clamp(0, beyond - 1) if window else heads
    elif size == 1:
        # The release follows an index before anybody has checked it: keep it inside.
        rows = safe = free_index.clamp(0, beyond)  # at worst the sentinel; it is put back
    else:
        # Not to the sentinel: only heads are checked, so nobody would put it back.
        safe = free_index.clamp(min=0)
        safe.masked_fill_(safe >= beyond, 0)
        rows = safe[::size]
    guard.backlog.note_free(
        Freed(
            guard.current,
            heads,
            free_index.shape[0],
            free.sides.full,
            mapping.index_select(0, rows) if window else None,
            window and bool(link.must_be_mapped),
            _waits_for_group(link),
        )
    )
    if guard.undo:
        guard.keep_rows(free_index.to(torch.int64))
    if size == 1:
        link.given = (safe, heads if safe is free_index else safe)
    free.run(safe)


def _without_bad(link: AllocatorLink, free_index: torch.Tensor, vetted: Vetted) -> torch.Tensor:
    """What of ``free_index`` the release may be told to free."""
    if link.guard.mode is not Mode.ENFORCE:
        return free_index
    if vetted.arrived():
        return vetted.keep(free_index)
    link.padding_expected = True
    return torch.where(vetted.bad, 0, free_index)


def _run_vetted(free: Free, safe: torch.Tensor) -> None:
    """Run a free of ``safe`` whose every part was checked."""
    free.link.eager = True
    try:
        free.run(safe)
    finally:
        free.link.eager = False


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
    if _waits_for_group(link):
        entries = guard.map.mapping.index_select(0, rows)
        guard.vouch(guard.window, guard.window.pages_of(entries))


def _full_at_once(free: Free) -> None:
    link, guard, segment = free.link, free.link.guard, free.segment
    slots = free.index.to(torch.int64, copy=True)
    vetted = guard.vet_slots(slots, segment=segment)
    named = torch.where(vetted.bad, 0, slots)
    live, count = guard.check_peers_released(named)
    safe = _without_bad(link, free.index, vetted)
    if guard.mode is Mode.ENFORCE:
        if count:
            allocator: Any = link.allocator()
            allocator.free_swa(slots[live])
        elif count is None:
            guard.note_full_only(slots)  # the next allocation releases what was left
    guard.note_named(slots, vetted.bad, segment=segment)
    if safe.numel():
        _run_vetted_full(free, safe, named, vetted)


_FULL = Sides(_full_at_once, full=True, window=False)


free_full = Factory(lambda original: _free_full_side(original, "free_full", _FULL, segment=False))
free_full_segment = Factory(
    lambda original: _free_full_side(original, "free_full_segment", _FULL, segment=True)
)


def _waits_for_group(link: AllocatorLink) -> bool:
    """Whether pages that a free finds now reach the pools only when the open group ends."""
    return link.release.resolves_in_group and in_free_group(link.allocator())


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


def _set_mapping(original: Method) -> Method:
    def hooked(allocator: Any, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
        link = allocator.__dict__.get(ATTRIBUTE)
        if link is None or link.guard.operation is not None or not full_indices.shape[0]:
            original(allocator, full_indices, swa_indices)
            return
        with link.operation("set_full_to_swa_mapping"):
            written = link.guard.check_mapping_write(
                full_indices.to(torch.int64, copy=True), swa_indices.to(torch.int64, copy=True)
            )
            original(allocator, full_indices, written.to(swa_indices.dtype))

    return hooked


set_full_to_swa_mapping = Factory(_set_mapping)


def _clear_mapping(original: Method) -> Method:
    def hooked(allocator: Any, full_indices: torch.Tensor) -> None:
        link = allocator.__dict__.get(ATTRIBUTE)
        if link is None or link.guard.operation is not None:
            original(allocator, full_indices)
            return
        with link.operation("clear_full_to_swa_mapping"):
            link.guard.keep_rows(full_indices.to(torch.int64))
            original(allocator, full_indices)

    return hooked


clear_full_to_swa_mapping = Factory(_clear_mapping)


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
        if not link.guard.restored(state):
            for pool in link.pools:
                link.guard.resync(pool.ledger, free_list(pool.pool()))
            link.guard.reconcile(link.guard.map.mapping)


def clear(original: Method, allocator: Any) -> None:
    link = link_of(allocator)
    if link is None:
        original(allocator)
        return
    with link.operation("clear"):
        original(allocator)
        link.guard.backlog.clear()
        link.queued, link.joined = [], {}
        link.guard.cleared(allocator.full_attn_allocator.size, allocator.swa_attn_allocator.size)


def resize(original: Method, allocator: Any, config: Any) -> None:
    link = link_of(allocator)
    if link is None:
        original(allocator, config)
        return
    with link.operation("resize"):
        original(allocator, config)  # ends in clear(), which takes the new sizes over
