"""The page-pool seam: what leaves and enters the free list of a sub-allocator.

``PagedTokenToKVPoolAllocator`` and ``TokenToKVPoolAllocator`` are the only places at which a page
changes hands, whoever asked for it: the hybrid allocator, a tree component or HiCache's load-back,
which call a sub-allocator directly. Every function here stands around the method of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hicache_guard.adapters.link import (
    ATTRIBUTE,
    AllocatorLink,
    Factory,
    PoolLink,
    StandIn,
    count_free,
    free_list,
    in_free_group,
    outside_group,
)
from hicache_guard.core.backlog import Freed, HandedOut, Held
from hicache_guard.core.compiled import FREES_FULL, PEERS_FOLLOW
from hicache_guard.core.modes import Mode
from hicache_guard.core.verdict import Vetted

Method = Callable[..., Any]


def _link_of(pool: Any) -> PoolLink | None:
    """The link of a guarded sub-allocator; the base class's methods serve other allocators too."""
    link = vars(pool).get(ATTRIBUTE)
    return link if type(link) is PoolLink else None


class FreePages(StandIn):
    """Answers for the attribute ``free_pages`` while pages are held back; see ``PoolLink.hide``.

    Outside an operation a look settles the backlog, so that schedulers, leak checks and audits find
    the free list in order; inside one, SGLang's own code reads and replaces the list as it is.
    """

    def __get__(self, pool: Any, owner: type | None = None) -> Any:
        if pool is None:
            return self
        link = _link_of(pool)
        if link is None or link.hidden is None:
            raise AttributeError("free_pages")
        if link.guard.operation is not None:
            return link.reveal()
        with link.owner.operation("a look at the free list", settle=False):
            link.guard.backlog.settle(wait=link.guard.device.type == "cpu")
        return link.listed


free_pages = FreePages()


class Lists:
    """The free lists of both sides as they were before an allocation.

    SGLang replaces these tensors and never writes into them, so references are enough.
    """

    __slots__ = ("_before", "_pools")
    _NAMES = ("free_pages", "release_pages", "staged_pages", "num_staged_pages")

    def __init__(self, owner: AllocatorLink) -> None:
        self._pools = owner.pools
        for link in self._pools:
            if link.hidden is not None:
                link.reveal()
        self._before = [link.state.copy() for link in self._pools]

    def taken(self) -> list[int]:
        """Pages that each side has fewer now."""
        return [
            count_free(before) - link.count_free()
            for link, before in zip(self._pools, self._before, strict=True)
        ]

    def put_back(self) -> None:
        for link, before in zip(self._pools, self._before, strict=True):
            link.state.update({name: before[name] for name in self._NAMES if name in before})


def taken_pages(link: PoolLink, count: int) -> torch.Tensor:
    """The ``count`` page ids (int64) that were just cut from the head of the free list.

    They lie before the rest in the storage that both were cut from; copied, since one-slot pages
    are handed to the caller as they lay there, to write over at will.
    """
    rest: torch.Tensor = link.state["free_pages"]
    return rest.as_strided((count,), (1,), rest.storage_offset() - count).clone()


def _take(link: PoolLink, call: Callable[[], Any]) -> Any:
    """Run an allocation and see which pages left the free list."""
    guard = link.guard
    link.reveal()
    before = link.count_free()
    result = call()
    taken = before - link.count_free()
    if taken > 0:
        pages = taken_pages(link, taken)
        if guard.lazy and not guard.mapping_suspect:
            guard.backlog.note_handed_out(HandedOut(guard.current, link.ledger, pages))
        else:
            guard.hand_out(link.ledger, pages)
    if link.is_window and result is not None:
        link.owner.captured_window = result
    return result


def settle_overdue(owner: AllocatorLink, most_pages: int) -> None:
    """Before an allocation of up to ``most_pages``: settle what earlier operations left.

    Waits for the device only where the pages that are vetted would not do.
    """
    guard = owner.guard
    under_way = guard.backlog.has_frees and not guard.backlog.settle(wait=False)
    if under_way and min(link.count_free() for link in owner.pools) < most_pages:
        guard.backlog.settle()
    if guard.mapping_suspect and not guard.backlog.empty:
        guard.backlog.settle()  # from here on allocations are recorded at once
    if not guard.has_overdue:
        return
    guard.has_overdue = False
    guard.overdue_aliases()
    rows = guard.overdue_peers()
    if rows is not None and rows.numel():
        allocator: Any = owner.allocator()
        with outside_group(allocator):
            allocator.free_swa(rows)
        guard.backlog.settle()


def _allocation(original: Method, most_pages: Callable[..., int]) -> Callable[..., Any]:
    """The hook of one allocating method; ``most_pages`` bounds what its arguments can take."""
    name = original.__name__

    def hooked(pool: Any, *args: Any, **kwargs: Any) -> Any:
        link = pool.__dict__.get(ATTRIBUTE)
        if type(link) is not PoolLink:
            return original(pool, *args, **kwargs)
        owner = link.owner
        if owner.taking:
            result = original(pool, *args, **kwargs)
            if link.is_window:
                owner.captured_window = result
            return result
        if link.guard.operation is not None:
            return _take(link, lambda: original(pool, *args, **kwargs))
        with owner.operation(f"{link.ledger.name}_pool.{name}", settle=False):
            settle_overdue(owner, most_pages(pool, *args, **kwargs))
            return _take(link, lambda: original(pool, *args, **kwargs))

    return hooked


def _most_extended(
    pool: Any, prefix_lens: Any, *args: Any, extend_num_tokens: int | None = None, **kwargs: Any
) -> int:
    tokens: int = args[4] if extend_num_tokens is None else extend_num_tokens
    return tokens // int(pool.page_size) + len(prefix_lens) + 1


alloc = Factory(
    lambda original: _allocation(original, lambda pool, need_size: need_size // pool.page_size)
)
alloc_extend = Factory(lambda original: _allocation(original, _most_extended))
alloc_decode = Factory(
    lambda original: _allocation(original, lambda pool, seq_lens, *args, **kwargs: len(seq_lens))
)


def _free(original: Method) -> Callable[..., None]:
    def hooked(pool: Any, free_index: torch.Tensor) -> None:
        link = pool.__dict__.get(ATTRIBUTE)
        if type(link) is not PoolLink or not free_index.shape[0]:
            original(pool, free_index)
            return
        if in_free_group(pool):
            _note_queued(link, free_index, segment=False)
            original(pool, free_index)
            return
        if hasattr(pool, "_release_page_ids"):
            original(pool, free_index)  # goes on to page ids, each once
            return
        distinct = link.ledger.page_size == 1
        if link.owner.vetting and distinct and _passes(link, free_index, are_pages=False):
            original(pool, free_index)
            return

        def admit(items: torch.Tensor) -> None:
            with outside_group(pool):
                original(pool, items)

        with link.owner.operation(f"{link.ledger.name}_pool.free", settle=not distinct):
            _release(link, free_index, admit, False, distinct)

    return hooked


#: Slots enter the free list here: whole pages after removing duplicates, or slot by slot.
free = Factory(_free)


def free_segment(original: Method, pool: Any, free_index: torch.Tensor, *, start_pos: int) -> None:
    """A segment freed on a sub-allocator whose group is open; else it goes on to page ids."""
    link = _link_of(pool)
    if link is not None and free_index.numel() and in_free_group(pool):
        _note_queued(link, free_index, segment=True)
    original(pool, free_index, start_pos=start_pos)


def _note_queued(link: PoolLink, free_index: torch.Tensor, *, segment: bool) -> None:
    """A direct free joins the sub-allocator's group; check now what nobody else will check."""
    owner, guard = link.owner, link.guard
    if owner.vetting or link.is_window:
        return
    fixed = segment or guard.page_size == 1
    lazy = guard.lazy and fixed
    with owner.operation(f"{link.ledger.name}_pool.free", settle=not lazy):
        slots = free_index.to(torch.int64, copy=True)
        guard.note_full_only(slots)
        if fixed and guard.passes_free(slots, FREES_FULL | PEERS_FOLLOW):
            return
        if lazy:
            heads = slots[:: guard.page_size]
            guard.backlog.note_free(
                Freed(guard.current, heads, slots.shape[0], full=True, queued=True)
            )
            return
        vetted = guard.vet_slots(slots, segment=segment)
        guard.vouch(guard.full, guard.full.pages_of(torch.where(vetted.bad, 0, slots)))


def _entering(original: Method) -> Callable[..., None]:
    """The hook of ``_release_page_ids``."""

    def hooked(pool: Any, *page_ids: torch.Tensor) -> None:
        link = pool.__dict__.get(ATTRIBUTE)
        if type(link) is not PoolLink:
            original(pool, *page_ids)
            return
        items = page_ids[0] if len(page_ids) == 1 else torch.cat(page_ids)
        if not items.shape[0] or (link.owner.vetting and _passes(link, items, are_pages=True)):
            original(pool, *page_ids)
            return

        def admit(kept: torch.Tensor) -> None:
            original(pool, kept)

        if link.guard.operation is not None:
            _release(link, items, admit, True, True)
            return
        with link.owner.operation(f"{link.ledger.name}_pool.free", settle=False):
            _release(link, items, admit, True, True)

    return hooked


#: Page ids enter the free list here (releases that have this method), none twice.
_release_page_ids = Factory(_entering)


def _passes(link: PoolLink, items: torch.Tensor, *, are_pages: bool) -> bool:
    """Whether what is about to enter the free list is plainly in order, and written down."""
    owner, ledger = link.owner, link.ledger
    guard = owner.guard
    direct = not (owner.vetting or owner.ending)
    if not guard.passes_release(ledger, items, pages=are_pages, direct=direct):
        return False
    if direct and not link.is_window:
        guard.note_full_only((items * ledger.page_size if are_pages else items).clone())
    return True


def _release(
    link: PoolLink,
    items: torch.Tensor,
    invoke: Callable[[torch.Tensor], None],
    are_pages: bool,
    distinct: bool,
) -> None:
    owner, ledger = link.owner, link.ledger
    guard = owner.guard
    direct = not (owner.vetting or owner.ending)
    if distinct and not owner.vetting and _passes(link, items, are_pages=are_pages):
        invoke(items)
        return
    if guard.lazy and distinct and not owner.eager:
        if are_pages:
            kept = items
        elif owner.given is not None and owner.given[0] is items:
            kept = owner.given[1]
        else:
            kept = items.clone()  # the caller's own tensor
        guard.backlog.hold(
            Held(guard.current, ledger, kept, are_pages, direct, invoke, owner.ending)
        )
        if guard.mode is not Mode.ENFORCE:
            invoke(items)
        return
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
            queued=guard.compiled is not None and not (direct or owner.eager),
        )
    slots = (items * ledger.page_size if are_pages else items).to(torch.int64, copy=True)
    if ledger is guard.full and not owner.vetting:
        guard.note_full_only(slots)
    if guard.mode is not Mode.ENFORCE:
        invoke(items)
        guard.released(ledger, slots)
        return
    guard.released(ledger, torch.where(vetted.bad, 0, slots))
    if not distinct and not vetted.arrived():
        _ride(link, items, vetted, invoke)
        return
    guard.wait_for(vetted)  # page ids came out of an operator that the host waited for
    kept = vetted.keep(items)
    if kept.numel():
        invoke(kept)


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
    state = link.state
    before = (link.listed, state.get("release_pages"))
    good = (~vetted.bad).to(torch.uint8).argmax().reshape(1)
    invoke(torch.where(vetted.bad, items.index_select(0, good), items))
    link.owner.guard.wait_for(vetted)
    if vetted.count == items.numel():
        state["free_pages"] = before[0]
        if before[1] is not None:
            state["release_pages"] = before[1]


def merge_and_sort_free(original: Method, pool: Any) -> None:
    original(pool)
    link = _link_of(pool)
    if link is not None:
        link.accept_list()


def clear(original: Method, pool: Any) -> None:
    """A sub-allocator alone is emptied; the pair's own clear does this for both."""
    link = _link_of(pool)
    if link is None:
        original(pool)
        return
    guard = link.guard
    if guard.operation is not None:
        original(pool)
        link.accept_list()
        return
    with link.owner.operation(f"{link.ledger.name}_pool.clear"):
        original(pool)
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
