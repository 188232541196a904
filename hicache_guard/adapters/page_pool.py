"""The page-pool seam: what leaves and enters the free list of a sub-allocator.

``PagedTokenToKVPoolAllocator`` and ``TokenToKVPoolAllocator`` are the only places at which a page
changes hands, whoever asked for it: the hybrid allocator, a tree component or HiCache's load-back,
which call a sub-allocator directly. Every function here stands around the method of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hicache_guard.adapters.link import PoolLink, StagedRelease, free_list, in_free_group, link_of
from hicache_guard.core.modes import Mode
from hicache_guard.core.verdict import Vetted

Method = Callable[..., Any]


def _link_of(pool: Any) -> PoolLink | None:
    """The link of a guarded sub-allocator; the base class's methods serve other allocators too."""
    link = link_of(pool)
    return link if isinstance(link, PoolLink) else None


def _count_free(pool: Any) -> int:
    """Pages in the free list, by the host's own count."""
    staged = getattr(pool, "num_staged_pages", None)
    waiting = staged if staged is not None else len(pool.release_pages)
    return len(pool.free_pages) + int(waiting)


def _allocate(link: PoolLink, name: str, most_pages: int, call: Callable[[], Any]) -> Any:
    pool, guard = link.pool(), link.owner.guard
    with link.owner.operation(f"{link.ledger.name}_pool.{name}", depth=3) as outermost:
        if outermost:
            settle_overdue(link.owner)
        if link.staged:
            _admit_staged(link, most_pages)
        before = _count_free(pool)
        result = call()
        taken = before - _count_free(pool)
        if taken > 0:
            # The pages that left are those just before what is left, in the storage of the list
            # they were sliced from: no copy of the old list has to be kept.
            rest = pool.free_pages
            pages = rest.as_strided((taken,), (1,), rest.storage_offset() - taken).clone()
            guard.hand_out(link.ledger, pages)
        if result is not None and link.ledger is guard.window:
            link.owner.captured_window = result
        return result


def settle_overdue(owner: Any) -> None:
    """Before an allocation: what earlier operations left to be done must have been done."""
    guard = owner.guard
    guard.overdue_aliases()
    rows = guard.overdue_peers()
    if rows is not None and rows.numel():
        allocator = owner.allocator()
        allocator.free_swa(rows)


def alloc(original: Method, pool: Any, need_size: int) -> Any:
    link = _link_of(pool)
    if link is None:
        return original(pool, need_size)
    pages = need_size // pool.page_size
    return _allocate(link, "alloc", pages, lambda: original(pool, need_size))


def alloc_extend(original: Method, pool: Any, *args: Any, **kwargs: Any) -> Any:
    link = _link_of(pool)
    if link is None:
        return original(pool, *args, **kwargs)
    tokens = kwargs["extend_num_tokens"] if "extend_num_tokens" in kwargs else args[5]
    requests = len(kwargs["prefix_lens"] if "prefix_lens" in kwargs else args[0])
    most = tokens // pool.page_size + requests + 1
    return _allocate(link, "alloc_extend", most, lambda: original(pool, *args, **kwargs))


def alloc_decode(original: Method, pool: Any, seq_lens: Any, *args: Any, **kwargs: Any) -> Any:
    link = _link_of(pool)
    if link is None:
        return original(pool, seq_lens, *args, **kwargs)
    return _allocate(
        link, "alloc_decode", len(seq_lens), lambda: original(pool, seq_lens, *args, **kwargs)
    )


def free(original: Method, pool: Any, free_index: torch.Tensor) -> None:
    """Slots enter the free list here: whole pages after removing duplicates, or slot by slot."""
    link = _link_of(pool)
    if link is None or free_index.numel() == 0 or in_free_group(pool):
        original(pool, free_index)
        return
    distinct = pool.page_size == 1
    with link.owner.operation(f"{link.ledger.name}_pool.free", depth=2):
        _release(link, free_index, lambda items: original(pool, items), False, distinct)


def _release_page_ids(original: Method, pool: Any, *page_ids: torch.Tensor) -> None:
    """Page ids enter the free list here (releases that have this method), none twice."""
    link = _link_of(pool)
    if link is None:
        original(pool, *page_ids)
        return
    items = page_ids[0] if len(page_ids) == 1 else torch.cat(page_ids)
    if items.numel() == 0:
        original(pool, *page_ids)
        return
    with link.owner.operation(f"{link.ledger.name}_pool.free", depth=2):
        _release(link, items, lambda kept: original(pool, kept), True, True)


def _release(
    link: PoolLink,
    items: torch.Tensor,
    invoke: Callable[[torch.Tensor], None],
    are_pages: bool,
    distinct: bool,
) -> None:
    owner, ledger = link.owner, link.ledger
    guard = owner.guard
    known = owner.vetted
    if known is not None and known[0] is items and ledger is guard.full:
        vetted = known[1]
    else:
        vetted = guard.vet_release(
            ledger,
            items,
            pages=are_pages,
            distinct=distinct,
            padding_expected=owner.padding_expected,
        )
    slots = items * ledger.page_size if are_pages else items
    if ledger is guard.full and not owner.vetting:
        guard.note_full_only(slots)
    if guard.mode is not Mode.ENFORCE:
        invoke(items)
        guard.released(ledger, slots)
        return
    guard.released(ledger, torch.where(vetted.bad, 0, slots))
    if vetted.arrived():
        kept = vetted.keep(items)
        if kept.numel():
            invoke(kept)
    elif not distinct:
        _ride(link, items, vetted, invoke)
    else:
        link.staged.append(StagedRelease(items, vetted, invoke))


def _ride(
    link: PoolLink,
    items: torch.Tensor,
    vetted: Vetted,
    invoke: Callable[[torch.Tensor], None],
) -> None:
    """Release on a path that removes duplicates, and therefore waits for the device anyway.

    Bad entries are redirected to a good one of the same call, so that they vanish as duplicates.
    Where there is no good one the release is taken back: the count has arrived by then.
    """
    pool = link.pool()
    before = (pool.free_pages, getattr(pool, "release_pages", None))
    good = (~vetted.bad).to(torch.uint8).argmax().reshape(1)
    invoke(torch.where(vetted.bad, items.index_select(0, good), items))
    link.owner.guard.wait_for(vetted)
    if vetted.count == items.numel():
        pool.free_pages = before[0]
        if before[1] is not None:
            pool.release_pages = before[1]


def _admit_staged(link: PoolLink, most_pages: int) -> None:
    """Let staged releases whose verdict has arrived into the free list; wait only when short."""
    guard, pool = link.owner.guard, link.pool()
    while link.staged:
        staged = link.staged[0]
        if not staged.vetted.arrived():
            if _count_free(pool) >= most_pages:
                return
            guard.wait_for(staged.vetted)
        link.staged.pop(0)
        kept = staged.vetted.keep(staged.items)
        if kept.numel():
            staged.invoke(kept)


def available_size(original: Method, pool: Any) -> int:
    size = int(original(pool))
    link = _link_of(pool)
    if link is None or not link.staged:
        return size
    held = sum(staged.items.numel() for staged in link.staged)
    return size + held * pool.page_size


def merge_and_sort_free(original: Method, pool: Any) -> None:
    original(pool)
    link = _link_of(pool)
    if link is not None:
        link.remember()


def clear(original: Method, pool: Any) -> None:
    original(pool)
    link = _link_of(pool)
    if link is None:
        return
    link.staged.clear()
    link.remember()
    guard = link.owner.guard
    if guard.operation is None:
        with link.owner.operation(f"{link.ledger.name}_pool.clear"):
            guard.resync(link.ledger, free_list(pool))


def restore_state(original: Method, pool: Any, state: Any) -> None:
    """A sub-allocator alone is rolled back; the pair's own restore does this for both."""
    link = _link_of(pool)
    if link is None or link.owner.guard.operation is not None:
        original(pool, state)
        return
    with link.owner.operation(f"{link.ledger.name}_pool.restore_state"):
        original(pool, state)
        link.owner.guard.resync(link.ledger, free_list(pool))
        link.remember()
