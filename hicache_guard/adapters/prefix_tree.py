"""The prefix-tree seam: what a tree takes over is checked, and what it calls a hit is proved.

Hooked are the methods through which everybody uses a tree, never its inside, so a tree core written
in Rust is served like one in Python. Every function here stands around the method of its name:

    insert        live tokens only, with live window KV where the tree will believe so; it vouches
    match_prefix  the path is proved by what the pools say now; what cannot be proved is clipped,
                  and the clip is the release's own match on a shorter key
    load_back     what was loaded from the host is vouched for, what was there before is not
    all of them   pages that a tree frees are its own; mapping entries that it writes are renewals

The policy is in ``core/guard``, the rules are in ``core/match``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from hicache_guard.adapters import hooks, tree_locks, tree_params
from hicache_guard.adapters.host_copies import HostTier
from hicache_guard.adapters.link import AllocatorLink, Factory, in_free_group, link_of
from hicache_guard.adapters.recorder import length_of, request_of
from hicache_guard.adapters.tree_link import ATTRIBUTE, TreeLink, clip, component
from hicache_guard.core.journal import acting_for
from hicache_guard.core.ledger import FREED

Method = Callable[..., Any]

# -- a tree's life -----------------------------------------------------------------------------


def __init__(original: Method, tree: Any, params: Any, *args: Any, **kwargs: Any) -> None:
    if hooks.is_hooked(type(tree), "match_prefix"):  # and not a subclass that has its own
        tree_params.admit(params)
    original(tree, params, *args, **kwargs)
    allocator = params.token_to_kv_pool_allocator
    link = None if allocator is None else link_of(allocator)
    if isinstance(link, AllocatorLink) and not params.disable:
        vars(tree)[ATTRIBUTE] = TreeLink(tree, link, params)


def reset(original: Method, tree: Any, *args: Any, **kwargs: Any) -> None:
    book = tree.__dict__.get(ATTRIBUTE)
    if book is None:
        original(tree, *args, **kwargs)
        return
    with book.guard.tree_working():
        original(tree, *args, **kwargs)
    book.guard.witness.forget()
    if book.tier is not None:
        book.tier.forget()
    book.tails.clear()
    tree_locks.flushed(tree)


def _working(original: Method) -> Method:
    """The hook of a method that frees what is the tree's."""

    def hooked(tree: Any, *args: Any, **kwargs: Any) -> Any:
        book = tree.__dict__.get(ATTRIBUTE)
        if book is None:
            return original(tree, *args, **kwargs)
        with book.guard.tree_working():
            return original(tree, *args, **kwargs)

    return hooked


check_hicache_events = Factory(_working)


def _evict(original: Method) -> Method:
    def hooked(tree: Any, *args: Any, **kwargs: Any) -> Any:
        book = tree.__dict__.get(ATTRIBUTE)
        if book is None:
            return original(tree, *args, **kwargs)
        # What was freed behind the tree's back does not come a second time.
        lacking = book.clips and book.guard.trees_suspect and len(args) == 1 and not kwargs
        before = book.room() if lacking else None
        with book.guard.tree_working():
            result = original(tree, *args, **kwargs)
        book.record.evicted(result)
        if before is not None:
            _evict_more(original, tree, book, args[0], before)
        return result

    return hooked


def _evict_more(
    original: Method, tree: Any, book: TreeLink, params: Any, before: tuple[int, int]
) -> None:
    """Evict on until as much has come as was asked for, or there is nothing left.

    A scheduler counts on it: what it is short of then ends a server.
    """
    while not in_free_group(book.link.allocator()):
        came = [now - then for now, then in zip(book.room(), before, strict=True)]
        full = max(0, params.num_tokens - came[0])
        window = max(0, params.swa_num_tokens - came[1])
        if not full and not window:
            return
        with book.guard.tree_working():
            result = original(
                tree, dataclasses.replace(params, num_tokens=full, swa_num_tokens=window)
            )
        book.record.evicted(result)
        if not result.num_tokens_evicted and not result.swa_num_tokens_evicted:
            return


evict = Factory(_evict)
evict_for_alloc = Factory(_evict)


# -- insertion ---------------------------------------------------------------------------------


class _NotCached(Exception):
    """A request may not give the tree all that its method is about to rely on."""


def insert(original: Method, tree: Any, params: Any) -> Any:
    book = tree.__dict__.get(ATTRIBUTE)
    if book is None or params.value is None or params.key is None:
        return original(tree, params)
    key, _ = params.key.maybe_to_bigram_view(_eagle(tree, book))
    length = min(len(key) // book.page_size * book.page_size, params.value.shape[0])
    evicted, start = _evicted(params), params.prev_prefix_len
    end, why = length, ""
    if book.allocated is not None and book.allocated < length:
        end = max(start, book.allocated // book.page_size * book.page_size)
        why = "tokens without KV"
        book.judged("insert", None, lambda: book.guard.uncomputed(params.value[end:length]))
    if book.clips and (book.guard.trees_suspect or book.guard.windows_betrayed):
        may = book.may_insert(tree, key[:length], min(start, length))
        if may < end:
            end, why = may, "the tree holds what it cannot prove there"
    if not book.clips:
        end = length
    if end < length:
        _refuse(book, length, end, why)
    with book.guard.tree_working():
        found = book.adopt(params.value[:end], start, evicted)
        if book.goes_on and (found.end < end or evicted < found.evicted > end - book.need):
            # The tree matches nothing behind a window that is dead: what it takes over there, the
            # request keeps as well.
            book.guard.distrust(params.value[start : found.end].to(torch.int64))
            _refuse(book, length, start, "tokens without KV, or cached already")
        if found.end < end:
            _refuse(book, length, found.end, "tokens without KV, or cached already")
        if book.tier is not None:
            book.tier.inserted(key, params.value[: found.end], start)
        if found.end < length:
            _stop_short(tree, params, key, found.end, length, book)
        if found.evicted != evicted or found.end < length:
            _set_evicted(params, min(found.evicted, found.end))
        return original(tree, params)


def _refuse(book: TreeLink, length: int, end: int, why: str) -> None:
    """An insertion of ``length`` tokens may only go up to ``end``."""
    book.record.cut(book.request, length, end, why)
    if book.goes_on:
        raise _NotCached


def _stop_short(tree: Any, params: Any, key: Any, end: int, length: int, book: TreeLink) -> None:
    """Let an insertion end at ``end`` tokens instead of ``length``."""
    rest = params.value[max(end, params.prev_prefix_len) : length].to(torch.int64)
    params.key, params.value = key[:end], params.value[:end]
    # Nobody else knows of what the tree does not take over. After a dead slot, or where the request
    # has none, a row says nothing about who owns what: better lost than freed under its owner.
    dead = book.guard.full.generations(book.guard.full.pages_of(rest)) >= FREED
    lost = dead | book.guard.witness.resident(rest)
    owned = lost.to(torch.uint8).cumsum(0) == 0
    if book.allocated is None or book.allocated >= length:
        tree.token_to_kv_pool_allocator.free(rest[owned])


def cache_finished_req(original: Method, tree: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    book = tree.__dict__.get(ATTRIBUTE)
    if book is None:
        return original(tree, req, *args, **kwargs)
    book.request, book.allocated = req.rid, _allocated(req)
    try:
        return original(tree, req, *args, **kwargs)
    finally:
        book.request = book.allocated = None


def _while_running(original: Method) -> Method:
    """The hook of a method that caches what a request has, and points its row at the tree's slots.

    Where not all of it may be cached none is: the request keeps its row, as it does where a tree is
    disabled.
    """

    def hooked(tree: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        book = tree.__dict__.get(ATTRIBUTE)
        if book is None:
            return original(tree, req, *args, **kwargs)
        book.request, book.allocated = req.rid, _allocated(req)
        book.goes_on, book.floor = True, protected(req)
        try:
            return original(tree, req, *args, **kwargs)
        except _NotCached:
            tree.disable = True
            try:
                done = original(tree, req, *args, **kwargs)
            finally:
                tree.disable = False
            _own_prefix(req)
            return done
        finally:
            book.request = book.allocated = None
            book.goes_on, book.floor = False, 0

    return hooked


cache_unfinished_req = Factory(_while_running)
checkpoint_into_tree = Factory(_while_running)


def _own_prefix(req: Any) -> None:
    """Give a request a copy of the prefix that it goes on after.

    A disabled tree hands out a view of its row, in the row's narrow numbers; whoever writes the row
    of the next chunk reads wide ones from its address.
    """
    prefix = getattr(req, "prefix_indices", None)
    if prefix is not None:
        req.prefix_indices = prefix.to(torch.int64, copy=True)


def field(req: Any, name: str) -> Any:
    """A field of a request: its own, or (since 0.5.18, more and more) of its KV record."""
    return getattr(req if hasattr(req, name) else req.kv, name)


def _allocated(req: Any) -> int:
    """How many tokens of a request's row have slots."""
    return int(field(req, "kv_allocated_len"))


def protected(req: Any) -> int:
    """How many tokens of a request's row are the tree's."""
    return int(field(req, "cache_protected_len"))


def _eagle(tree: Any, book: TreeLink) -> bool:
    """Whether the keys of a tree are bigrams."""
    return bool(getattr(book.core, "is_eagle", getattr(tree, "is_eagle", False)))


def _evicted(params: Any) -> int:
    """Up to where an insertion says that window KV is gone, in tokens."""
    if hasattr(params, "swa_evicted_seqlen"):
        return int(params.swa_evicted_seqlen)
    return int(params.get_evicted_seqlen(component("SWA")))


def _set_evicted(params: Any, length: int) -> None:
    if hasattr(params, "swa_evicted_seqlen"):
        params.swa_evicted_seqlen = length
    else:
        params.set_evicted_seqlen(component("SWA"), length)


# -- matches -----------------------------------------------------------------------------------


def _match_prefix(original: Method) -> Method:
    def hooked(tree: Any, params: Any) -> Any:
        book = tree.__dict__.get(ATTRIBUTE)
        if book is not None and book.cold is not None and book.is_cold(params):
            params = dataclasses.replace(params, key=params.key[:0])
        result = original(tree, params)
        if book is None or book.at_once(result, params):
            return result
        if isinstance(result.last_device_node, book.virtual):
            return result  # a session's row; see the module of that name
        length = length_of(result)
        if book.gathered is not None:
            book.gathered.append((params, result, length))
            return result
        if length and not (book.known(result, length) or book.proved_later(result)):
            proved = book.prove(book.slots_of(result), request_of(params))
            eagle, floor = _eagle(tree, book), book.floor
            return clip(
                original, tree, params, result, proved, book.record, eagle=eagle, floor=floor
            )
        book.record.proved(params, length)
        return result

    return hooked


match_prefix = Factory(_match_prefix)


# -- loading back ------------------------------------------------------------------------------


def init_hicache(original: Method, tree: Any, *args: Any, **kwargs: Any) -> None:
    original(tree, *args, **kwargs)
    book = tree.__dict__.get(ATTRIBUTE)
    if book is not None:
        book.tier = HostTier(book.link, tree)
        book.tier.watch()


def load_back(original: Method, tree: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
    book = tree.__dict__.get(ATTRIBUTE)
    if book is None or book.tier is None:
        return original(tree, node, *args, **kwargs)
    tier, guard, before = book.tier, book.guard, book.guard.moment
    req = kwargs.get("req", args[1] if len(args) > 1 else None)
    tier.expect(req)
    guard.trees_loading = True
    try:
        with book.guard.tree_working(), acting_for(None if req is None else req.rid):
            loaded = original(tree, node, *args, **kwargs)
        if loaded:
            path = book.path_to(node)
            full, window = tier.loaded(path)
            book.judged(
                "load_back",
                None if req is None else req.rid,
                lambda: guard.adopt_loaded(path, guard.serial_at(before), full, window),
            )
    finally:
        tier.done()
        guard.trees_loading = False
    return loaded


def init_load_back(original: Method, tree: Any, params: Any) -> Any:
    book = tree.__dict__.get(ATTRIBUTE)
    if book is None:
        return original(tree, params)
    before = params.req.last_node if params.req is not None else None
    loaded = original(tree, params)
    if loaded is None:
        return loaded
    slots, node = loaded
    tokens = slots if isinstance(slots, int) else slots.shape[0]
    if not tokens:
        return loaded
    path = book.path_to(node)
    length, request = path.shape[0], request_of(params)
    proved = book.holds(path, length) or book.prove(path, request).longest(length) == length
    if proved or not book.clips:
        book.record.loaded_back(request, tokens)
        return loaded
    # What was loaded stays in the tree, where the next match looks at it again.
    book.record.loaded_back(request, tokens, refused="the loaded prefix cannot be proved")
    return (0 if isinstance(slots, int) else slots[:0]), before
