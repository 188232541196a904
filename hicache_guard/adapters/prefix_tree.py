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
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hicache_guard.adapters.link import AllocatorLink, Factory, link_of
from hicache_guard.core.journal import ACTING_FOR, acting_for
from hicache_guard.core.ledger import FREED
from hicache_guard.core.proof import Adopted, Proved

Method = Callable[..., Any]

#: The attribute under which a tree holds its link.
ATTRIBUTE = "_hicache_guard_tree"


class TreeLink:
    """What the hooks know about one prefix tree over a guarded hybrid allocator.

    ``need`` is how many tokens before a resume point must have window KV: the tree's own window.
    While a method inserts on behalf of a request, ``request`` names it, ``inserting`` says which
    method, and ``protected`` is what the tree holds of its row; ``cut`` is where the insertion had
    to end, None where it need not.
    """

    def __init__(self, tree: Any, link: AllocatorLink, params: Any) -> None:
        self.link = link
        self.guard = link.guard
        gates = getattr(params, "swa_gates_prefix_match", True)
        self.need = int(tree.sliding_window_size or 0) if gates else 0
        self.page_size = int(tree.page_size)
        self.core: Any = getattr(tree, "tree_core", None)
        self.request: str | None = None
        self.inserting: str | None = None
        self.protected = 0
        self.cut: int | None = None
        #: A pseudo-hit was seen: the tree may hold more of what it cannot prove.
        self.stale_seen = False
        self.virtual: Any = _virtual_node()
        self.full, self.window = _component("FULL"), _component("SWA")

    @contextmanager
    def working(self) -> Iterator[None]:
        """A method of the tree runs: what it frees is its own."""
        guard = self.guard
        if guard.trees_working:
            yield
            return
        guard.tree_works(True)
        try:
            yield
        finally:
            guard.tree_works(False)

    def judged(self, name: str, request: str | None, check: Callable[[], Any]) -> Any:
        """Judge slot by slot, as one operation, on behalf of ``request``."""
        with acting_for(request or self.request or ACTING_FOR.get()), self.link.operation(name):
            return check()

    # -- insertion ---------------------------------------------------------------------------

    def adopt(self, slots: torch.Tensor, start: int, evicted: int) -> Adopted:
        """As ``PoolGuard.adopt``; at once where all is in order."""
        guard = self.guard
        books, end = guard.compiled, slots.shape[0]
        start = min(start, end)
        if (
            books is not None
            and not guard.undo.open_now
            and books.adopted(slots, guard.map.mapping, start, end, evicted, guard.serial)
        ):
            return Adopted(end, evicted)
        row = slots.to(torch.int64)
        found: Adopted = self.judged("insert", None, lambda: guard.adopt(row, start, evicted))
        return found

    # -- matches -----------------------------------------------------------------------------

    def slots_of(self, result: Any, *, whole: bool) -> torch.Tensor:
        """The full slots of a match; only the last of them, window and all, unless ``whole``."""
        found: torch.Tensor | None = getattr(result, "device_indices", None)
        if found is not None:
            return found
        length, node = result.device_prefix_len, result.last_device_node
        if not whole:
            last: torch.Tensor | None = self.core.get_component_device_value(node, self.full)
            if last is not None and last.shape[0] >= min(self.need, length):
                return last
        return self.path_to(node)[:length]

    def path_to(self, node: Any) -> torch.Tensor:
        """The full slots (int64) on the path from the root to a node."""
        if self.core is not None and hasattr(self.core, "collect_full_device_indices"):
            root = self.core.empty_match_result.last_device_node
            found: torch.Tensor = self.core.collect_full_device_indices(node, root)
            return found
        parts = []
        while node.parent is not None:
            parts.append(node.component_data[self.full].value)
            node = node.parent
        parts = [part for part in reversed(parts) if part is not None]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def holds(self, slots: torch.Tensor, length: int) -> bool:
        """Whether a match of ``length`` tokens that ends in ``slots`` is proved at once."""
        guard = self.guard
        books = guard.compiled
        if books is None or guard.trees_suspect:
            return False
        mapping = self.link.state["full_to_swa_index_mapping"]
        return books.held(slots, mapping, min(self.need, length))

    def overlap(self, tree: Any, key: Any) -> list[tuple[torch.Tensor, bool]]:
        """The nodes that ``key`` would be inserted over: full slots, and whether with window KV.

        Where a tree core does not say which of its nodes have window KV, all are taken to.
        """
        core = self.core
        if core is not None and hasattr(core, "match_full_device_prefix"):
            length, node, _ = core.match_full_device_prefix(key)
            if not hasattr(core, "collect_path_info"):
                return [(self.path_to(node)[:length], True)]
            found = []
            for span in core.collect_path_info([node])[0]:
                slots = core.get_component_device_value(span.node_id, self.full)
                window = core.get_component_device_value(span.node_id, self.window)
                if slots is None:
                    break
                found.append((slots[: max(0, length - span.path_start)], window is not None))
            return found
        root = getattr(core, "root_node", None) or getattr(tree, "root_node", None)
        return [] if root is None else self._walk(root, key)

    def _walk(self, node: Any, key: Any) -> list[tuple[torch.Tensor, bool]]:
        found = []
        while len(key):
            node = node.children.get(key.child_key(self.page_size))
            if node is None:
                break
            length = node.key.match(key, page_size=self.page_size)
            data = getattr(node, "component_data", None)
            slots = node.value if data is None else data[self.full].value
            if slots is None or not length:
                break
            tombstone = node.swa_tombstone if data is None else data[self.window].value is None
            found.append((slots[:length], not tombstone))
            if length < len(node.key):
                break
            key = key[length:]
        return found

    def may_insert(self, tree: Any, key: Any, start: int) -> int:
        """Up to where an insertion beyond ``start`` runs over nothing that the tree cannot prove.

        The release frees what the request computed in favour of what the tree holds already, and
        points the request at that; after a pseudo-hit it must not do so blindly.
        """
        nodes = self.overlap(tree, key)
        if not nodes:
            return len(key)
        slots = torch.cat([slots for slots, _ in nodes])
        windowed = torch.cat([torch.full(slots.shape, has) for slots, has in nodes])
        if slots.shape[0] <= start:
            return len(key)
        proved = self.guard.first_unproved(slots[start:], windowed[start:].to(slots.device))
        if start + proved == slots.shape[0]:
            return len(key)
        return max(start, (start + proved) // self.page_size * self.page_size)

    def prove(self, path: torch.Tensor, request: str | None) -> Proved:
        """Which resume points of a path can be proved; slot by slot."""
        paths = [path]
        found: list[Proved] = self.judged(
            "match_prefix", request, lambda: self.guard.prove_prefixes(paths, self.need)
        )
        return found[0]


def _length(result: Any) -> int:
    """Tokens of a match that are on the device."""
    found = getattr(result, "device_indices", None)
    return int(result.device_prefix_len if found is None else found.shape[0])


def _virtual_node() -> Any:
    """The class that stands for the tree node of a streaming session."""
    try:
        from sglang.srt.session import streaming_session
    except ImportError:
        return ()
    return getattr(streaming_session, "_VirtualNode", ())


def _component(name: str) -> Any:
    """How a unified tree calls one of its parts; None in a release without such a tree."""
    for home in (
        "unified_cache.component_type",
        "unified_cache.components",
        "unified_cache_components",
        "unified_cache_components.tree_component",
    ):
        try:
            module = importlib.import_module(f"sglang.srt.mem_cache.{home}")
            return module.ComponentType[name]
        except (ImportError, AttributeError):
            continue
    return None


# -- a tree's life -----------------------------------------------------------------------------


def __init__(original: Method, tree: Any, params: Any, *args: Any, **kwargs: Any) -> None:
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
    with book.working():
        original(tree, *args, **kwargs)
    book.guard.forget_trees()
    book.stale_seen = False


def _working(original: Method) -> Method:
    """The hook of a method that frees what is the tree's."""

    def hooked(tree: Any, *args: Any, **kwargs: Any) -> Any:
        book = tree.__dict__.get(ATTRIBUTE)
        if book is None or book.guard.trees_working:
            return original(tree, *args, **kwargs)
        book.guard.tree_works(True)
        try:
            return original(tree, *args, **kwargs)
        finally:
            book.guard.tree_works(False)

    return hooked


evict = Factory(_working)
evict_for_alloc = Factory(_working)
check_hicache_events = Factory(_working)


# -- insertion ---------------------------------------------------------------------------------


class _StopShort(Exception):
    """An insertion may not go as far as its caller is about to rely on."""

    def __init__(self, end: int) -> None:
        self.end = end


def insert(original: Method, tree: Any, params: Any) -> Any:
    book = tree.__dict__.get(ATTRIBUTE)
    if book is None or params.value is None or params.key is None:
        return original(tree, params)
    key, _ = params.key.maybe_to_bigram_view(_eagle(tree, book))
    length = min(len(key) // book.page_size * book.page_size, params.value.shape[0])
    evicted, start = _evicted(params), params.prev_prefix_len
    end = length
    if book.stale_seen:
        end = min(end, book.may_insert(tree, key[:length], min(start, length)))
    with book.working():
        found = book.adopt(params.value[:end], start, evicted)
        if found.evicted != evicted:
            _set_evicted(params, found.evicted)
        if found.end < length:
            _stop_short(tree, params, key, found.end, length, book)
        return original(tree, params)


def _stop_short(tree: Any, params: Any, key: Any, end: int, length: int, book: TreeLink) -> None:
    """Let an insertion end at ``end`` tokens instead of ``length``."""
    if book.inserting == "checkpoint":
        raise _StopShort(end)
    rest = params.value[max(end, params.prev_prefix_len) : length]
    params.key, params.value = key[:end], params.value[:end]
    if book.inserting == "unfinished":
        book.cut = end  # the request keeps the rest of its row
        return
    # Nobody else knows of what the tree does not take over.
    pages = book.guard.full.pages_of(rest.to(torch.int64))
    live = book.guard.full.generations(pages) < FREED
    tree.token_to_kv_pool_allocator.free(rest[live])


def _as(kind: str) -> Factory:
    """The hook of a method that inserts on behalf of a request."""

    def build(original: Method) -> Method:
        def hooked(tree: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
            book = tree.__dict__.get(ATTRIBUTE)
            if book is None:
                return original(tree, req, *args, **kwargs)
            book.request, book.inserting, book.protected = req.rid, kind, _protected(req)
            try:
                return original(tree, req, *args, **kwargs)
            finally:
                book.request = book.inserting = book.cut = None

        return hooked

    return Factory(build)


cache_finished_req = _as("finished")
cache_unfinished_req = _as("unfinished")


def checkpoint_into_tree(
    original: Method, tree: Any, req: Any, *, up_to: int, **kwargs: Any
) -> None:
    book = tree.__dict__.get(ATTRIBUTE)
    if book is None:
        original(tree, req, up_to=up_to, **kwargs)
        return
    book.request, book.inserting = req.rid, "checkpoint"
    try:
        original(tree, req, up_to=up_to, **kwargs)
    except _StopShort as stop:
        # A bigram spans two tokens.
        up_to = stop.end + (1 if stop.end and _eagle(tree, book) else 0)
        original(tree, req, up_to=up_to, **kwargs)
    finally:
        book.request = book.inserting = None


def _protected(req: Any) -> int:
    """How many tokens of a request's row are the tree's."""
    holder = req if hasattr(req, "cache_protected_len") else req.kv
    return int(holder.cache_protected_len)


def _eagle(tree: Any, book: TreeLink) -> bool:
    """Whether the keys of a tree are bigrams."""
    return bool(getattr(book.core, "is_eagle", getattr(tree, "is_eagle", False)))


def _evicted(params: Any) -> int:
    """Up to where an insertion says that window KV is gone, in tokens."""
    if hasattr(params, "swa_evicted_seqlen"):
        return int(params.swa_evicted_seqlen)
    return int(params.get_evicted_seqlen(_component("SWA")))


def _set_evicted(params: Any, length: int) -> None:
    if hasattr(params, "swa_evicted_seqlen"):
        params.swa_evicted_seqlen = length
    else:
        params.set_evicted_seqlen(_component("SWA"), length)


# -- matches -----------------------------------------------------------------------------------


def _match_prefix(original: Method) -> Method:
    def hooked(tree: Any, params: Any) -> Any:
        book = tree.__dict__.get(ATTRIBUTE)
        if book is None:
            return original(tree, params)
        if book.cut is not None:
            # The request is about to be pointed at what the tree has of it: at no more than that.
            params = dataclasses.replace(params, key=params.key[: book.cut])
        result = original(tree, params)
        length = _length(result)
        if not length or isinstance(result.last_device_node, book.virtual):
            return result
        if book.holds(book.slots_of(result, whole=False), length):
            return result
        return _clipped(original, tree, params, result, book)

    return hooked


match_prefix = Factory(_match_prefix)


def _clipped(original: Method, tree: Any, params: Any, result: Any, book: TreeLink) -> Any:
    """The longest match that the release finds and the pools prove."""
    request = getattr(params.req, "rid", None) if getattr(params, "req", None) else None
    path = book.slots_of(result, whole=True)
    proved = book.prove(path, request)
    length = _length(result)
    while (usable := proved.longest(length)) < length:
        book.stale_seen = True
        if book.inserting == "unfinished" and usable < book.protected:
            return result  # no hit: a request is pointed at what it reads already
        params = dataclasses.replace(params, key=params.key[:usable])
        result = original(tree, params)
        length = _length(result)
    return result


# -- loading back ------------------------------------------------------------------------------


def load_back(original: Method, tree: Any, *args: Any, **kwargs: Any) -> Any:
    book = tree.__dict__.get(ATTRIBUTE)
    if book is None:
        return original(tree, *args, **kwargs)
    before = book.guard.serial
    with book.working():
        loaded = original(tree, *args, **kwargs)
    node = args[0] if args else kwargs.get("node_id", kwargs.get("node"))
    if loaded is not None and loaded is not False:
        path = book.path_to(node)
        book.judged("load_back", None, lambda: book.guard.adopt_new(path, before))
    return loaded


def init_load_back(original: Method, tree: Any, params: Any) -> Any:
    book = tree.__dict__.get(ATTRIBUTE)
    if book is None:
        return original(tree, params)
    before = params.req.last_node if params.req is not None else None
    loaded = original(tree, params)
    if loaded is None or not (loaded[0] if isinstance(loaded[0], int) else loaded[0].shape[0]):
        return loaded
    path = book.path_to(loaded[1])
    length = path.shape[0]
    if book.holds(path, length):
        return loaded
    request = getattr(params.req, "rid", None)
    if book.prove(path, request).longest(length) == length:
        return loaded
    # What was loaded stays in the tree, where the next match looks at it again.
    book.stale_seen = True
    return (0 if isinstance(loaded[0], int) else loaded[0][:0]), before
