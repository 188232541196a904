"""The tree seam of models whose every layer is a window layer: ``PureSWARadixCache``.

It is a ``RadixCache`` over one pool, so the hooks stand around that class's methods, and do nothing
for its other users. The rule is ``core/single``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from hicache_guard.adapters.link import Factory, PoolLink, link_of
from hicache_guard.adapters.recorder import Recorder, length_of, request_of
from hicache_guard.adapters.tree_link import clip
from hicache_guard.core.single import SinglePool

Method = Callable[..., Any]

#: The attribute under which a tree holds what is known of it.
ATTRIBUTE = "_hicache_guard_pure_tree"


class PureTree:
    """What the hooks know about one tree over a single pool."""

    def __init__(self, tree: Any, link: PoolLink) -> None:
        self.owner = link.owner
        self.pool = SinglePool(link.guard)
        self.record = Recorder(tree, link.guard)
        self.page_size = int(tree.page_size)


def __init__(original: Method, tree: Any, params: Any, *args: Any, **kwargs: Any) -> None:
    original(tree, params, *args, **kwargs)
    pool = getattr(params.token_to_kv_pool_allocator, "swa_attn_allocator", None)
    link = None if pool is None else link_of(pool)
    if isinstance(link, PoolLink) and not params.disable:
        vars(tree)[ATTRIBUTE] = PureTree(tree, link)


def reset(original: Method, tree: Any) -> None:
    original(tree)
    book = tree.__dict__.get(ATTRIBUTE)
    if book is not None:
        book.pool.witness.forget()


def insert(original: Method, tree: Any, params: Any) -> Any:
    book = tree.__dict__.get(ATTRIBUTE)
    if book is None or params.value is None or params.key is None:
        return original(tree, params)
    key, _ = params.key.maybe_to_bigram_view(tree.is_eagle)
    length = min(len(key) // book.page_size * book.page_size, params.value.shape[0])
    row = params.value[:length].to(torch.int64)
    start = min(getattr(params, "prev_prefix_len", 0), length)
    end = book.owner.judged("insert", None, lambda: book.pool.adopt(row, start))
    if end < length:
        book.record.cut(None, length, end, "tokens without KV")
        params = dataclasses.replace(params, key=key[:end], value=params.value[:end])
    return original(tree, params)


def _match_prefix(original: Method) -> Method:
    def hooked(tree: Any, params: Any) -> Any:
        result = original(tree, params)
        book = tree.__dict__.get(ATTRIBUTE)
        length = 0 if book is None else length_of(result)
        if not length:
            return result
        path = getattr(result, "device_indices", None)
        if path is None:
            path = tree.path_device_indices(result.last_device_node)[:length]
        proved = book.owner.judged(
            "match_prefix", request_of(params), lambda: book.pool.prove(path)
        )
        eagle = bool(tree.is_eagle)
        return clip(original, tree, params, result, proved, book.record, eagle=eagle)

    return hooked


match_prefix = Factory(_match_prefix)
