"""What the hooks know about one prefix tree: its paths, what it may take over, what is proved.

Two kinds of trees look alike from here. Where a match returns slots, they are taken from it; where
it returns a node, they are asked of the tree core, in Python or in Rust, by the core's interface.
"""

from __future__ import annotations

import dataclasses
import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hicache_guard.adapters.host_copies import HostTier
from hicache_guard.adapters.link import AllocatorLink
from hicache_guard.adapters.recorder import Recorder, length_of
from hicache_guard.core import compiled
from hicache_guard.core.compiled import Books, Look
from hicache_guard.core.modes import Mode
from hicache_guard.core.proof import Adopted, Proved

#: The attribute under which a tree holds its link.
ATTRIBUTE = "_hicache_guard_tree"
#: The attribute of an allocator that is the mapping.
MAPPING = "full_to_swa_index_mapping"
#: Nodes before which it is remembered what comes, and how many nodes that may be.
MAX_REMEMBERED, MAX_TAIL = 16_384, 16


class TreeLink:
    """What the hooks know about one prefix tree over a guarded hybrid allocator.

    ``need`` is how many tokens before a resume point must have window KV: the tree's own window.
    While a method inserts on behalf of a request, ``request`` names it, ``allocated`` is how many
    tokens of its row have slots, and ``goes_on`` says that the request runs on. Then it is pointed
    at what the tree has of it, which is no hit: at no less than the ``floor`` tokens of its row
    that are the tree's already.
    """

    def __init__(self, tree: Any, link: AllocatorLink, params: Any) -> None:
        self.link = link
        self.state = link.state
        self.record = Recorder(tree, link.guard)
        self.guard = link.guard
        gates = getattr(params, "swa_gates_prefix_match", True)
        self.need = int(tree.sliding_window_size or 0) if gates else 0
        self.page_size = int(tree.page_size)
        self.core: Any = getattr(tree, "tree_core", None)
        #: Whether a match says which slots it found, and not only the node.
        self.gives_slots = _gives_slots()
        #: The slots of a node, by the node and the part of the tree; None where matches give them.
        value_of = getattr(self.core, "get_component_device_value", None)
        self.value_of: Any = None if self.gives_slots else value_of
        self.tier: HostTier | None = None
        self.request: str | None = None
        self.allocated: int | None = None
        self.goes_on = False
        self.floor = 0
        #: Requests that are computed from nothing, whatever the tree holds; None while there never
        #: was one.
        self.cold: weakref.WeakSet[Any] | None = None
        #: Whether what cannot be proved is taken back; observe only says so.
        self.clips = self.guard.mode is not Mode.OBSERVE
        self.virtual: Any = _virtual_node()
        self.full, self.window = component("FULL"), component("SWA")
        #: While a scheduling round is gathered: the parameters, result and length of each match.
        self.gathered: list[tuple[Any, Any, int]] | None = None
        self.found: list[tuple[Any, Any, int]] = []
        #: What was found whole in the last round, and the operation and mapping of then.
        self.whole: set[tuple[Any, int]] = set()
        self._marked = (-1, -1, 0)
        #: What comes before nodes that are shorter than the window; see ``proved_later``.
        self.tails: dict[int, tuple[tuple[Any, ...], int]] = {}
        self._named_by: Books | None = None
        #: Whether a match (a result, and the parameters) is proved at once; it is counted then.
        self.at_once: Callable[[Any, Any], bool] = self._found_at_once
        look = self._look()
        if look is not None:
            self.record.tally.wholes.append(look)
            self.at_once = look.found

    def _look(self) -> Look | None:
        """How matches are proved and counted in one call; None where that takes more."""
        if self.record.told:
            return None
        virtual = self.virtual if self.gives_slots else None
        return compiled.look(
            self.guard, self.state, MAPPING, virtual or None,
            self.need, self.value_of, self.full, self.tails,
        )  # fmt: skip

    def room(self) -> tuple[int, int]:
        """Slots that are free in the full and in the window pool."""
        allocator: Any = self.link.allocator()
        pools = allocator.full_attn_allocator, allocator.swa_attn_allocator
        return int(pools[0].available_size()), int(pools[1].available_size())

    def judged(self, name: str, request: str | None, check: Callable[[], Any]) -> Any:
        """As ``AllocatorLink.judged``; else on behalf of the request whose method runs."""
        return self.link.judged(name, request or self.request, check)

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

    def slots_of(self, result: Any) -> torch.Tensor:
        """The full slots of a match."""
        found: torch.Tensor | None = getattr(result, "device_indices", None)
        if found is not None:
            return found
        return self.path_to(result.last_device_node)[: result.device_prefix_len]

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
        need = self.need if self.need < length else length
        return books.held(slots, self.state[MAPPING], need) > 0

    def _found_at_once(self, result: Any, params: Any) -> bool:
        length = self.proved_at_once(result)
        if length < 0:
            return False
        self.record.proved(params, length)
        return True

    def proved_at_once(self, result: Any) -> int:
        """The length of a match that can be proved by a look at the end of its path, else -1."""
        guard = self.guard
        books = guard.compiled
        if books is None or guard.trees_suspect:
            return -1
        if self.gives_slots and isinstance(result.last_device_node, self.virtual):
            return -1
        if books is not self._named_by:  # serials were shifted, and names bear them
            self._named_by = books
            self.tails.clear()
        return books.proves(
            result, self.state[MAPPING], self.need, self.value_of, self.full, self.tails
        )

    def proved_later(self, result: Any) -> bool:
        """As ``proved_at_once``, of a match whose last node is shorter than the window.

        By its path; what comes before the node is remembered by the name of its slots, so that the
        next match ends at once: what a match splits off a node has the same before it. A split
        leaves the lower part its id, so nodes are whole for as long as they have as many slots.
        """
        books = self.guard.compiled
        if books is None or self.guard.trees_suspect or self.gives_slots:
            return False
        node = result.last_device_node
        last = self.value_of(node, self.full)
        if last is not None:
            if len(self.tails) >= MAX_REMEMBERED:
                self.tails.clear()
            mapping = self.state[MAPPING]
            self.tails[books.held(last, mapping, last.shape[0] + 1)] = self._find_tail(node)
            if books.proves(result, mapping, self.need, self.value_of, self.full, self.tails) >= 0:
                return True
        length = result.device_prefix_len
        return self.holds(self.path_to(node)[:length], length)

    def _find_tail(self, node: Any) -> tuple[tuple[Any, ...], int]:
        """The nodes before the last of a path, the last first, for a window; and their slots.

        None where a core does not tell of its paths, or they are many.
        """
        nodes: list[Any] = []
        total = 0
        if hasattr(self.core, "collect_path_info"):
            for span in self.core.collect_path_info([node])[0][-2::-1]:
                nodes.append(span.node_id)
                total += span.path_end - span.path_start
                if total >= self.need or len(nodes) > MAX_TAIL:
                    break
        return (tuple(nodes), total) if len(nodes) <= MAX_TAIL else ((), 0)

    def never_hits(self, req: Any) -> None:
        """From now on a request's matches end at the root."""
        if self.cold is None:
            self.cold = weakref.WeakSet()
        self.cold.add(req)

    def is_cold(self, params: Any) -> bool:
        """Whether a match is for a request that is to hit nothing.

        What it has computed itself since it is pointed at like any other, once that is cached.
        """
        req = getattr(params, "req", None)
        return not self.goes_on and req is not None and self.cold is not None and req in self.cold

    # -- scheduling rounds -------------------------------------------------------------------

    def waits(self) -> bool:
        """Whether the proof of a match may have to wait for a device."""
        at_once = self.guard.compiled is not None and not self.guard.trees_suspect
        return self.clips and not at_once

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Matches are taken as the release finds them, to be proved by ``settle``."""
        self.gathered = []
        try:
            yield
        finally:
            self.found, self.gathered = self.gathered, None

    def settle(self) -> bool:
        """Whether all gathered matches are whole; each that is is ``known`` until KV changes."""
        found, self.found = self.found, []
        paths = {self._key(result, length): result for _, result, length in found if length}
        whole: list[bool] = []
        if paths:
            slots = [self.slots_of(result) for result in paths.values()]
            check = partial(self.guard.whole_prefixes, slots, self.need)
            whole = self.judged("match_prefix", None, check)
        self.whole = {key for key, right in zip(paths, whole, strict=True) if right}
        self._marked = self._now()
        if not all(whole):
            return False
        for params, _, length in found:
            self.record.proved(params, length)
        return True

    def known(self, result: Any, length: int) -> bool:
        """Whether a match was found whole in this round, and no KV has changed since."""
        return self._marked == self._now() and self._key(result, length) in self.whole

    def _now(self) -> tuple[int, int, int]:
        """The last operation; and the mapping, which may be written or replaced behind us."""
        mapping: torch.Tensor = self.state[MAPPING]
        return self.guard.moment, mapping._version, id(mapping)

    @staticmethod
    def _key(result: Any, length: int) -> tuple[Any, int]:
        # A split leaves the lower part of a node its identity, and its path.
        return result.last_device_node, length

    def overlap(self, tree: Any, key: Any) -> list[tuple[torch.Tensor, bool]] | None:
        """The nodes that ``key`` would be inserted over: full slots, and whether with window KV.

        Where a tree core does not say which of its nodes have window KV, all are taken to; None
        where it cannot be asked.
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
        try:
            root = tree.root_node if core is None else core.root_node
        except NotImplementedError:  # 0.5.19's core in Rust shows nobody its nodes
            return None
        return self._walk(root, key)

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
        points the request at that; once anything may be wrong it must not do so blindly.
        """
        nodes = self.overlap(tree, key)
        if nodes is None:
            return start
        if not nodes:
            return len(key)
        slots = torch.cat([slots for slots, _ in nodes])
        windowed = torch.cat([torch.full(slots.shape, has) for slots, has in nodes])
        if slots.shape[0] <= start:
            return len(key)
        over, windows = slots[start:], windowed[start:].to(slots.device)
        proved: int = self.judged("insert", None, lambda: self.guard.check_overlap(over, windows))
        if start + proved == slots.shape[0]:
            return len(key)
        return max(start, (start + proved) // self.page_size * self.page_size)

    def prove(self, path: torch.Tensor, request: str | None) -> Proved:
        """Which resume points of a path can be proved; slot by slot."""
        paths, before = [path], self._now()
        found: list[Proved] = self.judged(
            "match_prefix", request, lambda: self.guard.prove_prefixes(paths, self.need)
        )
        after = self._now()
        if self._marked == before and after == (before[0] + 1, *before[1:]):
            self._marked = after  # a look changes nothing
        return found[0]


def _gives_slots() -> bool:
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult

    return hasattr(MatchResult, "device_indices")


def clip(
    original: Callable[..., Any],
    tree: Any,
    params: Any,
    result: Any,
    proved: Proved,
    record: Recorder,
    *,
    eagle: bool,
    floor: int = 0,
) -> Any:
    """The longest match that the release finds and the pools prove; the first one in observe mode.

    ``eagle``: the tree's keys are bigrams. No match may become shorter than ``floor`` tokens.
    """
    length = claimed = length_of(result)
    if proved.longest(length) == length:
        record.proved(params, length)
        return result
    key, asked = params.key, params
    # A bigram spans two tokens; not every core marks the key as one of bigrams.
    more = int(eagle and not getattr(key, "is_bigram", False))
    clips = record.guard.mode is not Mode.OBSERVE
    while clips and (usable := proved.longest(length)) < length:
        if usable < floor:
            return result
        params = dataclasses.replace(params, key=key[: usable + more if usable else 0])
        result = original(tree, params)
        length = length_of(result)
    record.clipped(asked, claimed, proved, length)
    return result


def _virtual_node() -> Any:
    """The class that stands for the tree node of a streaming session."""
    try:
        from sglang.srt.session import streaming_session
    except ImportError:
        return ()
    return getattr(streaming_session, "_VirtualNode", ())


def component(name: str) -> Any:
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


def book_of(tree: Any) -> TreeLink | None:
    """What is known of a tree, or of the one that a session cache stands in front of."""
    holders = (tree, getattr(tree, "inner", None))
    books = (getattr(holder, ATTRIBUTE, None) for holder in holders)
    return next((book for book in books if isinstance(book, TreeLink)), None)
