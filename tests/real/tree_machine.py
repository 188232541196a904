"""A real prefix tree on a real allocator, driven at random, against what each physical slot holds.

The reference knows neither trees nor generations. It stores for every slot of both pools which token
prefix was last computed into it, and K and V of one layer a side, bytes that are an exact function
of that prefix and the layer; what lies in a free list is poisoned with NaN. So a hit is right where
every slot of the path holds the tokens that were asked for, and every window slot of its last
``min(W, n)`` tokens does (W is the tree's own window); and the longest hit that may be had is, by
definition, the longest page-aligned r for which the release's own match of ``key[:r]`` returns r and
all of that is right.

Guarded in enforce, with faults made behind the tree, a match must be exactly that hit: none is wrong,
none is lost. In strict nothing wrong is returned, and nothing right is refused. In observe all is, bit
for bit, as without the guard. Without faults nothing is reported in any mode. And without the guard
the same drive comes upon pseudo-hits.

Two things are told apart from lost hits and counted instead. *Lucky*: content is right only because a
page was recycled for the very same tokens; by then it is somebody else's, who may let go of it.
*Rows*: what a release does to the row of a request after an insertion (slots freed as duplicates, the
row pointed to the tree's) may turn a right row into a wrong one; see ``World.repoint``.

Operations take plain integers as choices, so that the fast seeded driver (``drive``) and Hypothesis
(``shrinking``) call the same ones. Some lives have a host tier, as ``--hosted`` says; what is done to
it and what must hold then is ``host_world``.

Run: ``python -P tree_machine.py --mode enforce --steps 20000`` with a release on the path.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import os
import random
import sys
import time
import traceback
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from hicache_guard.adapters import host_copies, host_pool
from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import _MARK, install, running_version, uninstall
from hicache_guard.adapters.link import _links as _known
from hicache_guard.adapters.recorder import length_of
from hicache_guard.adapters.tree_link import TreeLink
from hicache_guard.core import compiled
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.faults import Fault
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.proof import Adopted
from hicache_guard.core.report import Violation
from hicache_guard.core.witness import Witness
from hicache_guard.repro import pools, scheduling
from hicache_guard.repro.host_tier import POLICIES
from real import driver

Slots = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

WINDOW_PART = scheduling._first(
    "mem_cache.unified_cache.component_type:ComponentType",
    "mem_cache.unified_cache.components:ComponentType",
    "mem_cache.unified_cache_components:ComponentType",
)

NONE: Slots = np.empty(0, dtype=np.int64)

MODES = ("off", "observe", "enforce", "strict")
PAGE_SIZES = (1, 4, 16, 64)
#: Window sizes by page size; most are no multiple of the page.
WINDOWS = {1: (3, 5, 8), 4: (3, 4, 7, 10), 16: (16, 23, 40), 64: (63, 64, 100, 150)}
#: Host slots for one of the device. Up to 0.5.14 a host pool must be the larger one.
RATIOS = (1.1, 1.5, 2.5)
#: Operations before the pools and the tree are built anew.
LIFE = 300
#: The same where there are few steps, and all page sizes are to be seen.
SHORT_LIFE = 100
#: Requests that run at once, and prefixes that are locked by nobody who runs.
RUNNING, HELD = 4, 3
#: #29352: a newcomer's insertion frees the full slots of a locked tombstone; its reader's row is wrong.
REPLACES_LOCKED_PREFIXES = ("0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14")


#: A pseudo-hit of a kind of its own: full pages of it were recycled, and cached again for others.
TWICE = "page cached twice"
#: Where ``asked_twice`` keeps its own look at a tree.
A_LOOK = "asked twice"
#: What a running request owns was freed by somebody else.
ROBBED = "robbed"


class Finding(AssertionError):
    """Something that must not be; ``kind`` in a word or two."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


class Over(Exception):
    """The release died of itself, in a way that is known; this world ends."""


# --- what physical slots hold --------------------------------------------------------------------


class Side:
    """One pool: the prefix that each slot holds, its K and V, and whose turn each page is at."""

    def __init__(self, pool: Any, page_size: int, layer: float) -> None:
        self._pool, self._page, self._layer = pool, page_size, layer
        self.pages = pool.size // page_size
        slots = (self.pages + 2) * page_size
        self.holds = np.zeros(slots, dtype=np.int64)
        self.keys = np.full(slots, np.nan, dtype=np.float32)
        self.values = np.full(slots, np.nan, dtype=np.float32)
        self.free = np.ones(self.pages + 2, dtype=np.bool_)
        self.turn = np.zeros(self.pages + 2, dtype=np.int64)
        self._seen: list[Any] = []

    def write(self, slots: Slots, prefixes: Slots) -> None:
        self.holds[slots] = prefixes
        self.keys[slots] = prefixes + self._layer
        self.values[slots] = -(prefixes + self._layer)

    def hold(self, slots: Slots, prefixes: Slots) -> Mask:
        """Mask of the ``slots`` (in range) that hold the KV of ``prefixes``."""
        wanted = prefixes + self._layer
        right: Mask = (
            (self.holds[slots] == prefixes)
            & (self.keys[slots] == wanted)
            & (self.values[slots] == -wanted)
        )
        return right

    def page_of(self, slots: Slots) -> Slots:
        return slots // self._page

    def follow(self) -> None:
        """See which pages entered the free list, and poison them, and which left it."""
        held = vars(self._pool)
        parts = [held.get("free_pages"), held.get("release_pages"), *held.get("staged_pages", ())]
        if parts[0] is None:  # taken out of sight while pages are held back
            parts[0] = getattr(held.get("_hicache_guard_link"), "hidden", None)
        if len(parts) == len(self._seen) and all(map(_is, parts, self._seen)):
            return
        self._seen = parts  # SGLang replaces these tensors and never writes into them
        free = np.zeros(self.pages + 2, dtype=np.bool_)
        for part in parts:
            if part is not None and part.shape[0]:
                free[_within(part.numpy(), self.pages + 1)] = True
        free[0] = free[-1] = True
        self.turn[self.free & ~free] += 1
        ended = free & ~self.free
        self.free = free
        if ended.any():
            self.poison(ended)

    def poison(self, pages: Mask) -> None:
        self.holds.reshape(-1, self._page)[pages] = 0
        self.keys.reshape(-1, self._page)[pages] = np.nan
        self.values.reshape(-1, self._page)[pages] = np.nan


def _within(numbers: Slots, most: int) -> Slots:
    """As numpy's ``clip``, which takes longer to find out what it was given."""
    found: Slots = np.minimum(np.maximum(numbers, 0), most)
    return found


def _is(one: Any, other: Any) -> bool:
    return one is other


class Reference:
    """Both pools, and for what each pair of slots and each cached page was meant when it was made."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self.page = int(allocator.page_size)
        self.full, self.window = self.sides()
        self.window.follow()
        self.full.follow()
        rows = self.mapping.shape[0]
        self._paired = np.zeros(rows, dtype=np.int64)
        self._paired_turn = np.full(rows, -1, dtype=np.int64)
        self._last = self.mapping.copy()
        self._cached = np.zeros(self.full.pages + 2, dtype=np.int64)
        self._cached_turn = np.full(self.full.pages + 2, -1, dtype=np.int64)

    def sides(self) -> tuple[Side, Side]:
        """(full, window)."""
        allocator = self._allocator
        return (
            Side(allocator.full_attn_allocator, self.page, 0.0),
            Side(allocator.swa_attn_allocator, self.page, 0.5),
        )

    @property
    def mapping(self) -> Slots:
        found: Slots = self._allocator.full_to_swa_index_mapping.numpy()
        return found

    def follow(self) -> None:
        """After any operation: what is free now holds nothing any more."""
        self.full.follow()
        self.window.follow()

    def compute(self, slots: Slots, prefixes: Slots) -> None:
        """A forward pass writes the KV of new tokens, on both sides where there are both."""
        self.follow()
        window = self.mapping[slots]
        self.full.write(slots, prefixes)
        mapped = window > 0
        self.window.write(window[mapped], prefixes[mapped])
        self._pair(slots)

    def _pair(self, slots: Slots) -> None:
        window = self.mapping[slots]
        self._paired[slots] = window
        self._paired_turn[slots] = self.window.turn[self.window.page_of(self._inside(window))]

    def _inside(self, window: Slots) -> Slots:
        return _within(window, self.window.holds.shape[0] - 1)

    def before_insert(self) -> None:
        np.copyto(self._last, self.mapping)

    def inserted(self, slots: Slots, turns: Slots, prefixes: Slots, start: int) -> None:
        """A row was inserted; its pages that were its own are the tree's, or free, from now on."""
        changed = (self.mapping != self._last)[:-1].nonzero()[0]
        self._pair(changed)  # the tree moved window slots on purpose
        pages = self.full.page_of(slots[start :: self.page])
        own = turns[start : len(slots) : self.page] == self.full.turn[pages]
        pages = pages[own]
        self._cached[pages] = prefixes[start + self.page - 1 : len(slots) : self.page][own]
        self._cached_turn[pages] = self.full.turn[pages]
        self.follow()

    def give_away(self, slots: Slots) -> None:
        """A fault wrote the entries of ``slots``, or gave their window slots to somebody as well."""
        self._paired[slots] = -1

    def judge(self, slots: Slots, prefixes: Slots) -> tuple[Mask, Mask]:
        """Masks of the full slots of a path that are right, and of those whose window side is."""
        window = self.mapping[slots]
        inside = self._inside(window)
        return (
            self.full.hold(slots, prefixes),
            (window > 0) & (window == inside) & self.window.hold(inside, prefixes),
        )

    def cached_again(self, slots: Slots, prefixes: Slots, full: Mask) -> bool:
        """Whether what is wrong on the full side of a path was cached again, for other tokens."""
        pages = self.full.page_of(slots)
        again = self._cached_turn[pages] == self.full.turn[pages]
        last = prefixes[np.arange(len(slots)) // self.page * self.page + self.page - 1]
        return not full.all() and bool((again & (self._cached[pages] != last))[~full].all())

    def meant(self, slots: Slots, prefixes: Slots) -> tuple[Mask, Mask]:
        """As ``judge``: what is still the very page, or pair, that was cached or made."""
        pages = self.full.page_of(slots[:: self.page])
        same = self._cached[pages] == prefixes[self.page - 1 :: self.page]
        same &= self._cached_turn[pages] == self.full.turn[pages]
        return np.repeat(same, self.page), self.paired(slots)

    def paired(self, slots: Slots) -> Mask:
        """Mask of the full slots whose entry is the one that was made for them, to a live page."""
        window = self.mapping[slots]
        pages = self.window.page_of(self._inside(window))
        pairs: Mask = self._paired[slots] == window
        pairs &= (self._paired_turn[slots] == self.window.turn[pages]) & ~self.window.free[pages]
        return pairs


def usable(full: Mask, window: Mask, length: int, need: int) -> bool:
    """The match rule, for one resume point."""
    return bool(full[:length].all()) and bool(window[max(0, length - need) : length].all())


# --- what one run is about --------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One pair of pools and one tree; drawn from a seed."""

    tree: str
    page_size: int
    window: int
    full_pages: int
    window_pages: int
    options: tuple[tuple[str, Any], ...]
    #: The write policy of its host tier, and how many host slots there are for one of the device.
    host: str = ""
    ratio: float = 0.0

    @classmethod
    def draw(
        cls,
        seed: int,
        trees: Sequence[str],
        sizes: Sequence[int],
        options: dict[str, Any],
        hosted: float = 0.0,
    ) -> Setting:
        """``hosted``: the share of lives that have a host tier, of trees that can have one."""
        dice = random.Random(f"tree machine {seed}")
        page = sizes[seed % len(sizes)]
        full = dice.randint(60, 110) if page == 1 else dice.randint(20, 40)
        tree = trees[seed // len(sizes) % len(trees)]
        other = random.Random(f"host tier {seed}")  # so that all else is as without
        has_host = tree != "legacy" and other.random() < hosted
        return cls(
            tree,
            page,
            dice.choice(WINDOWS[page]),
            full,
            full * dice.randint(60, 95) // 100,
            tuple((name, dice.choice(values)) for name, values in options.items()),
            other.choice(POLICIES) if has_host else "",
            other.choice(RATIOS) if has_host else 0.0,
        )


class Tokens:
    """Sequences and, for each token, a number that stands for all tokens up to there."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}

    def extend(self, start: Text | None, cut: int, tail: Sequence[int]) -> Text:
        known, last = self._known, int(start.prefixes[cut - 1]) if start and cut else 0
        more = []
        for token in tail:
            last = known.setdefault((last, token), len(known) + 1)
            more.append(last)
        new = np.array(more, dtype=np.int64)
        if start is None or not cut:
            return Text(array("q", tail), new)
        return Text(
            start.tokens[:cut] + array("q", tail), np.concatenate((start.prefixes[:cut], new))
        )


@dataclass(frozen=True)
class Text:
    tokens: array[int]
    prefixes: Slots

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(eq=False)
class Request:
    """A running request: its row, how much of that is the tree's, how much window KV is gone."""

    sequence: Text
    row: Slots
    turns: Slots
    protected: int
    lock: Any
    evicted: int = 0
    #: Its row is known to be wrong; nobody looks at its reads any more.
    spoiled: bool = False

    @property
    def prefixes(self) -> Slots:
        return self.sequence.prefixes[: len(self.row)]


class Lent:
    """What a release wants to know of a request that caches what it has: a ``Req`` and its KV record.

    All is in one place; what belongs where changed from release to release.
    """

    session = extra_key = cache_salt = kv_rotation_base = session_id = None
    swa_branching_seqlen = finished_reason = mamba_last_track_seqlen = None
    swa_prefix_lock_released = False
    holds_kv = True
    cache_inserted_len = priority = swa_evict_floor = req_pool_idx = 0
    rid = "lent"

    def __init__(self, request: Request, row: torch.Tensor, *, as_list: bool) -> None:
        self.kv = self
        self._row = row
        self._count = len(request.row)
        tokens: Any = request.sequence.tokens[: self._count]
        if as_list:
            tokens = tokens.tolist()
        self.full_untruncated_fill_ids = self.fill_ids = tokens
        self.origin_input_ids = tokens
        self.fill_len = self.extend_end = self.kv_allocated_len = self._count
        self.extend_range = SimpleNamespace(start=0, end=self._count)
        self.prefix_indices = row[:0]
        self.cache_protected_len = request.protected
        self.swa_evicted_seqlen = request.evicted
        self.skip_lock_node_ids: Any = {}
        self.lock = self.lock_receipt = self.last_node = self.swa_uuid_for_lock = None
        if isinstance(request.lock, tuple):
            self.last_node, receipt = request.lock
            self.lock_receipt = receipt
            self.swa_uuid_for_lock = getattr(receipt, "swa_uuid_for_lock", None)
            self.skip_lock_node_ids = getattr(receipt, "skip_lock_node_ids", {})
        else:
            self.lock, self.last_node = request.lock, request.lock.node

    def get_fill_ids(self) -> Any:
        return self.fill_ids

    def finished(self) -> bool:
        return False

    def swa_dead_lo(self, page_size: int) -> int:
        return self.cache_protected_len

    def get_evicted_seqlen(self, component: Any) -> int:
        return self.swa_evicted_seqlen

    def set_evicted_seqlen(self, component: Any, length: int) -> None:
        self.swa_evicted_seqlen = length

    def end(self, request: Request, by_result: bool, receipt: Any) -> None:
        """Let the request go on with what became of it."""
        request.row = self._row[: self._count].numpy().astype(np.int64)
        request.protected = self.cache_protected_len
        request.evicted = self.swa_evicted_seqlen
        if by_result:
            request.lock = self.lock
        elif (
            request.lock[1] is not self.lock_receipt
            or "swa_uuid_for_lock" not in receipt.__dataclass_fields__
        ):
            request.lock = self.last_node, self.lock_receipt
        else:
            request.lock = self.last_node, receipt(swa_uuid_for_lock=self.swa_uuid_for_lock)


class World:
    """One tree over one allocator, the requests that use them, and the reference."""

    def __init__(
        self,
        release: scheduling.Release,
        setting: Setting,
        mode: str,
        *,
        faults: bool,
        rows: bool,
        seen: Counter[str],
        reports: list[Violation],
        trace: list[Any] | None = None,
        tolerated: Sequence[str] = (),
    ) -> None:
        self.tolerated, self.setting = tolerated, setting
        self.mode, self.faults, self.rows = mode, faults, rows
        self.seen, self.reports, self.trace = seen, reports, trace
        self.release = release
        release.choose(dict(setting.options))
        self.server = scheduling.Server(
            release, setting.tree, page_size=setting.page_size, window=setting.window,
            full_pages=setting.full_pages, window_pages=setting.window_pages,
            longest=(setting.full_pages + 1) * setting.page_size, rows=1,
        )  # fmt: skip
        self.allocator, self.tree = self.server.allocator, self.server.tree
        self.page = setting.page_size
        self.need = int(self.tree.sliding_window_size)
        self.longest = setting.full_pages * self.page // 3
        kind: Any = type(self.tree)
        self._original = getattr(kind.match_prefix, _MARK, kind.match_prefix)
        self._core = getattr(self.tree, "tree_core", None)
        self._by_result = hasattr(self.tree, "lock")  # 0.5.22 on: no match after an insertion
        self._segments = hasattr(self.allocator, "free_full_segment")
        self._as_list = self.server._ids is list
        # Since 0.5.21 each component has its own.
        self._evicted_field = "swa_evicted_seqlen" in release.base.InsertParams.__dataclass_fields__
        self._unsound = running_version() in REPLACES_LOCKED_PREFIXES
        self.words = Tokens()
        self.past: list[Text] = []
        self.running: list[Request] = []
        self.held: list[Any] = []
        self.uniques = 10
        self.reference = self.new_reference()
        #: A fault was made: from now on rows may be wrong through no fault of the tree's.
        self.tainted = False
        #: The tree had pages of a running request that nobody locked; see ``repoint``.
        self.had_unlocked = False

    def new_reference(self) -> Reference:
        """Of pools that are empty."""
        return Reference(self.allocator)

    # --- speaking to the release -------------------------------------------------------------

    def key(self, sequence: Text, length: int) -> Any:
        tokens = sequence.tokens[:length]
        return self.release.key(tokens.tolist() if self._as_list else tokens, None)

    def _read(self, result: Any) -> tuple[Slots, Any]:
        found = getattr(result, "device_indices", None)
        if found is None:
            core: Any = self._core
            root = core.empty_match_result.last_device_node  # another after a reset
            path = core.collect_full_device_indices(result.last_device_node, root)
            found = path[: result.device_prefix_len]
        slots: Slots = found.numpy()
        return slots, result.last_device_node

    def unguarded(self, sequence: Text, length: int) -> Slots:
        """The full slots of the release's own match."""
        params = self.release.base.MatchPrefixParams(key=self.key(sequence, length))
        return self._read(self._original(self.tree, params))[0]

    def match(self, sequence: Text, length: int) -> tuple[Slots, Any]:
        """``match_prefix``, and all that must hold of it. In strict a refusal is no hit."""
        params = self.release.base.MatchPrefixParams(key=self.key(sequence, length))
        return self.matched(sequence, length, lambda: self._read(self.tree.match_prefix(params)))

    def matched(
        self, sequence: Text, length: int, match: Callable[[], tuple[Slots, Any]]
    ) -> tuple[Slots, Any]:
        """As ``match``, of a match by others."""
        self.reference.follow()  # what was freed until now is nobody's
        try:
            slots, node = match()
        except GuardViolation as error:
            if error.violation.fault in (Fault.FOREIGN_PREFIX, Fault.UNPROVED_WINDOW):
                self._refused(sequence, length)
            raise
        self.note("match", slots)
        self.seen["hit tokens"] += len(slots)
        self._check(sequence, length, slots)
        return slots, node

    def _check(self, sequence: Text, length: int, slots: Slots) -> None:
        hit, reference = len(slots), self.reference
        assert hit % self.page == 0
        # What is collected reaches the free lists with the match that settles it.
        pools.settle(self.allocator)
        reference.follow()
        full, window = reference.judge(slots, sequence.prefixes[:hit])
        if not usable(full, window, hit, self.need):
            self.seen["pseudo-hits"] += 1
            if self.mode in ("enforce", "strict"):
                kind = "pseudo-hit"
                if reference.cached_again(slots, sequence.prefixes[:hit], full):
                    kind = TWICE
                self.finding(kind, self._tell(slots, full, window))
            return
        if hit and self.faults and not usable(*reference.meant(slots, sequence.prefixes[:hit]),
                                              hit, self.need):  # fmt: skip
            self.seen["lucky hits"] += 1
        if self.mode not in ("enforce", "strict") or hit == length // self.page * self.page:
            return
        if not self.faults:
            return  # equal to the unguarded run, which is compared
        self._check_longest(sequence, length, hit)

    def _check_longest(self, sequence: Text, length: int, hit: int) -> None:
        """No hit is lost: by the definition, which asks the release about each resume point."""
        slots = self.unguarded(sequence, length)
        if len(slots) <= hit:
            return
        if self.mode == "strict":
            raise Finding("lost hit", f"{hit} tokens of {len(slots)}, and nothing raised")
        self.seen["clipped"] += 1
        prefixes = sequence.prefixes[: len(slots)]
        full, window = self.reference.judge(slots, prefixes)
        for point in range(len(slots), hit, -self.page):
            if not usable(full, window, point, self.need):
                continue
            found = slots if point == len(slots) else self.unguarded(sequence, point)
            if len(found) != point:
                continue
            if not usable(*self.reference.judge(found, prefixes[:point]), point, self.need):
                continue
            if usable(*self.reference.meant(found, prefixes[:point]), point, self.need):
                raise Finding(
                    "lost hit", f"{hit} tokens where {point} are right, of {len(slots)} matched"
                )
            self.seen["lucky clips"] += 1
            return

    def _refused(self, sequence: Text, length: int) -> None:
        """Strict refused a match: it must have been wrong."""
        slots = self.unguarded(sequence, length)
        prefixes = sequence.prefixes[: len(slots)]
        judged, meant = self.reference.judge(slots, prefixes), self.reference.meant(slots, prefixes)
        if usable(*judged, len(slots), self.need) and usable(*meant, len(slots), self.need):
            raise Finding("false alarm", f"a right match of {len(slots)} tokens was refused")
        self.seen["refused"] += 1

    def finding(self, kind: str, what: str) -> None:
        # Once pages of a running request were the tree's without a lock (#27770) they may have been
        # recycled under it, and it may cache them a second time. By indices that is in order.
        of_release = self.had_unlocked and kind in (ROBBED, TWICE)
        if kind not in self.tolerated and not of_release:
            raise Finding(kind, what)
        self.seen["#27770" if of_release else kind] += 1

    def _tell(self, slots: Slots, full: Mask, window: Mask) -> str:
        wanted = max(0, len(slots) - self.need)
        return (
            f"{len(slots)} tokens, window {self.need}, page {self.page}: full slots wrong at "
            f"{(~full).nonzero()[0].tolist()[:6]}, window slots wrong at "
            f"{(wanted + (~window[wanted:]).nonzero()[0]).tolist()[:6]}"
        )

    def note(self, what: str, slots: Slots | None = None) -> None:
        """One line of the trace, by which runs are compared."""
        if self.trace is not None:
            digest = 0 if slots is None else zlib.crc32(slots.tobytes())
            self.trace.append((what, 0 if slots is None else len(slots), digest))

    def fingerprint(self) -> None:
        if self.trace is not None:
            pools.settle(self.allocator)
            digest = zlib.crc32(self.reference.mapping.tobytes())
            for pool in driver.sub_allocators(self.allocator):
                digest = zlib.crc32(np.array(driver.raw_free(pool)).tobytes(), digest)
            self.trace.append(("state", len(self.running), digest))

    def lock(self, node: Any) -> Any:
        if self._by_result:
            return self.tree.lock(node)
        return node, self.tree.inc_lock_ref(node).to_dec_params()

    def unlock(self, lock: Any) -> None:
        if self._by_result:
            self.tree.unlock(lock)
        else:
            self.tree.dec_lock_ref(*lock)

    def room(self, tokens: int) -> bool:
        """Make room for so many tokens in both pools; up to 0.5.21 nobody may try without."""
        allocator = self.allocator
        full = tokens - int(allocator.full_available_size())
        window = tokens - int(allocator.swa_available_size())
        if full <= 0 and window <= 0:
            return True
        self.evict(max(full, 0), max(window, 0))
        sizes = allocator.full_available_size(), allocator.swa_available_size()
        return int(min(sizes)) >= tokens

    def evict(self, full: int, window: int) -> None:
        self.tree.evict(self.release.base.EvictParams(num_tokens=full, swa_num_tokens=window))
        self.reference.follow()

    def allocate(self, row: Slots, count: int) -> Slots | None:
        """``count`` tokens more after ``row``."""
        start, page = len(row), self.page
        if not self.room((-(-(start + count) // page) - -(-start // page)) * page):
            return None
        last = int(row[-1]) if start else -1
        if count == 1 and start and page > 1:
            got = pools.decode(self.allocator, start + 1, last)
        else:
            got = pools.extend(self.allocator, count, prefix=start, last=last)
        assert got is not None, "no room, though there is"
        slots: Slots = got.to(torch.int64).numpy()
        self.note("allocate", slots)
        return slots

    def insert(self, request: Request, length: int, *, evicted: int | None = None) -> Any:
        """The first ``length`` (whole pages) of a row go into the tree."""
        gone = request.evicted if evicted is None else evicted
        value = torch.from_numpy(request.row[:length].copy())
        params = self.release.base.InsertParams(
            key=self.key(request.sequence, length), value=value, prev_prefix_len=request.protected
        )
        if self._evicted_field:
            params.swa_evicted_seqlen = gone
        else:
            params.set_evicted_seqlen(WINDOW_PART.SWA, gone)
        self.reference.follow()
        self.reference.before_insert()
        result = self.tree.insert(params)
        # The guard may let an insertion end earlier.
        taken = request.row[: params.value.shape[0]]
        self.reference.inserted(taken, request.turns, request.sequence.prefixes, request.protected)
        return result

    def free(self, slots: Slots, start: int, evicted: int) -> None:
        """A request gives ``slots`` back, tokens ``start`` on, of which some lost their window KV."""
        if len(slots):
            given = torch.from_numpy(slots.copy())
            if not self._segments:
                self.allocator.free(given)
            else:
                dead = min(max(evicted - start, 0), len(slots))
                self.allocator.free_full_segment(given[:dead], start_pos=start)
                if dead < len(slots):
                    self.allocator.free_segment(given[dead:], start_pos=start + dead)
        self.reference.follow()

    # --- choosing ------------------------------------------------------------------------------

    def sequence(self, one: int, two: int, three: int) -> Text:
        """A fresh sequence, or one that branches off an earlier one, inside a page or not."""
        unit = max(self.page, 3)
        tail = [three // 64 % 3] * (1 + three % (2 * unit + self.need // 2))
        start, cut = None, 0
        if self.past and one % 6:
            start = self.past[one // 6 % len(self.past)]
            cut = len(start) if two % 3 == 0 else two // 3 % (len(start) + 1)
            cut = max(0, min(cut, self.longest - len(tail)))
        made = self.words.extend(start, cut, tail[: self.longest])
        self.remember(made)
        return made

    def remember(self, sequence: Text) -> None:
        self.past = [*self.past[-11:], sequence]

    def cached(self, one: int, two: int, three: int) -> tuple[Text, Slots, int, int] | None:
        """A path of the tree and whole pages in it, mostly near its end; found without the guard."""
        if not self.past:
            return None
        sequence = self.past[one % len(self.past)]
        path = self.unguarded(sequence, len(sequence))
        pages = len(path) // self.page
        if not pages:
            return None
        last = pages - (two % min(pages, 3) if two % 4 else two // 4 % pages)
        first = max(0, last - 1 - three % 3)
        there, _ = self.reference.meant(path, sequence.prefixes[: len(path)])
        if not there[first * self.page : last * self.page].all():
            return None  # by now these are somebody else's
        return sequence, path, first * self.page, last * self.page

    # --- operations: plain integers choose -----------------------------------------------------

    def admit(self, one: int, two: int, three: int) -> None:
        """A request is matched, locks its prefix and computes the rest, or a first chunk of it."""
        if len(self.running) >= RUNNING:
            self.finish(one, two, three)
            return
        request = self.start(self.sequence(one, two, three), chunk=two % 4 == 0)
        if request is not None:
            self.running.append(request)

    def start(self, sequence: Text, *, chunk: bool = False) -> Request | None:
        prefix, lock = self.take(sequence)
        return self.begin(sequence, prefix, lock, chunk=chunk)

    def take(self, sequence: Text) -> tuple[Slots, Any]:
        """Match a request and lock what was found: (its slots, the lock)."""
        prefix, node = self.match(sequence, len(sequence) - 1)
        prefix = prefix.copy()
        return prefix, self.lock(node)

    def begin(
        self, sequence: Text, prefix: Slots, lock: Any, *, chunk: bool = False
    ) -> Request | None:
        """The first forward pass of a request."""
        count = len(sequence) - len(prefix)
        if chunk and count > self.page:
            count = self.page
        slots = self.allocate(prefix, count)
        if slots is None:
            self.unlock(lock)
            self.seen["no room"] += 1
            return None
        request = Request(
            sequence, prefix, np.zeros(len(prefix), dtype=np.int64), len(prefix), lock
        )
        self.compute(request, slots)
        self.look_at_row(request, len(prefix))
        return request

    def compute(self, request: Request, slots: Slots) -> None:
        """The next tokens of a request are computed into ``slots``."""
        start = len(request.row)
        request.row = np.concatenate((request.row, slots))
        self.reference.compute(slots, request.sequence.prefixes[start : len(request.row)])
        turns = self.reference.full.turn[slots // self.page]
        request.turns = np.concatenate((request.turns, turns))

    def look_at_row(self, request: Request, start: int) -> None:
        """What a forward pass of the tokens from ``start`` on reads."""
        if self.tainted or request.spoiled:
            return  # a fault may have hit its own slots, which is nothing that a match can prove
        full, window = self.reference.judge(request.row, request.prefixes)
        if full.all() and window[max(0, start - self.need) :].all():
            return
        if self._unsound and not full[: request.protected].all():
            self.seen["#29352"] += 1
            request.spoiled = True
            return
        raise Finding("row", self._tell(request.row, full, window))

    def grow(self, one: int, two: int, three: int) -> None:
        """A running request computes its next chunk, or decodes."""
        if not self.running:
            return
        request = self.running[one % len(self.running)]
        start, left = len(request.row), len(request.sequence) - len(request.row)
        if not left:
            left = 1 if two % 2 else 1 + three % (self.page + self.need)
            if start + left > self.longest + self.page:
                self.finish(one, two, three)
                return
            more = self.words.extend(request.sequence, start, [two // 2 % 2] * left)
            request.sequence = more
            self.remember(more)
        slots = self.allocate(request.row, min(left, 2 * self.page + three % 7))
        if slots is None:
            self.running.remove(request)
            self.drop(request)
            return
        self.compute(request, slots)
        self.look_at_row(request, start)

    def slide(self, one: int, two: int, three: int) -> None:
        """Window KV of a running request leaves the window: ``_evict_swa``."""
        if not self.running:
            return
        request = self.running[one % len(self.running)]
        start = max(request.evicted, request.protected)
        keep = len(request.row) - self.need - self.page
        if (end := max(start, keep) // self.page * self.page) > start:
            gone = torch.from_numpy(request.row[start:end].copy())
            if self._segments:
                self.allocator.free_swa_segment(gone, start_pos=start)
            else:
                self.allocator.free_swa(gone)
            request.evicted = end
            self.reference.follow()
            self.seen["slid"] += 1

    def checkpoint(self, one: int, two: int, three: int) -> None:
        """What is computed goes into the tree, and the request goes on: ``cache_unfinished_req``."""
        if not self.running:
            return
        request = self.running[one % len(self.running)]
        length = len(request.row) // self.page * self.page
        if length <= request.protected:
            return
        if request.evicted > request.protected and not self._by_result:
            # By then no scheduler does that, and some releases do not pass on what is gone: #23259.
            if not self.faults:
                return
            self.fault("cached after the window slid")
        self.repoint(request, length)

    def repoint(self, request: Request, length: int) -> None:
        """Insert, and let the row follow the tree as the release does.

        A right row must not become a wrong one by that. It does where the tree still holds what it
        cannot prove: the request's fresh slots are freed as duplicates of stale ones.
        """
        prefixes = request.sequence.prefixes[:length]
        count = len(request.row)  # where it goes on
        before = self.reference.judge(request.row, request.prefixes)
        was_right = not request.spoiled and usable(*before, count, self.need)
        lent = Lent(request, self.lent_row(request), as_list=self._as_list)
        old = request.row[:length]
        self.reference.follow()
        self.reference.before_insert()
        try:
            if self._by_result:
                self.tree.checkpoint_into_tree(lent, up_to=len(request.row))
            else:
                self.tree.cache_unfinished_req(lent)
        except GuardViolation:
            raise
        except AssertionError as error:
            # The scheduler is dead; here only this request is, and its tail comes back.
            self.reference.follow()
            self.note("dies")
            self.row_finding(f"the scheduler dies: {error}")
            self.running.remove(request)
            return
        taken = old[: max(lent.cache_protected_len, request.protected)]
        self.reference.inserted(taken, request.turns, prefixes, request.protected)
        lent.end(request, self._by_result, self.release.base.DecLockRefParams)
        rest = torch.from_numpy(request.row[request.protected : length])
        # The match after an insertion may stop short of it (#27770): then the tree has pages of a
        # running request that nobody locked, and may let go of them.
        self.had_unlocked |= bool(torch.isin(rest, self.server.tree_slots()).any())
        self.note("cached", request.row)
        after = self.reference.judge(request.row, request.prefixes)
        if was_right and not usable(*after, count, self.need):
            request.spoiled = True
            if self._unsound and not self.tainted:
                self.seen["#29352"] += 1
            else:
                self.row_finding(self._tell(request.row, *after))

    def lent_row(self, request: Request) -> torch.Tensor:
        """The row of a request where the release keeps it."""
        row: torch.Tensor = self.server.rows.req_to_token[0]
        row[: len(request.row)] = torch.from_numpy(request.row)
        return row

    def look(self) -> None:
        """What a running request computed is its own until it gives it away."""
        self.reference.follow()
        for request in list(self.running):
            own = request.row[request.protected :]
            turns = self.reference.full.turn[own // self.page]
            mapped = request.row[max(request.protected, request.evicted) :]
            if (
                self.reference.full.free[own // self.page].any()
                or (turns != request.turns[request.protected :]).any()
            ):
                what = "full pages"
            elif not self.reference.paired(mapped).all():
                what = "window pages"
            else:
                continue
            self.running.remove(request)
            self.unlock(request.lock)  # it gives nothing back, and caches nothing
            self.finding(ROBBED, f"{what} of {own.tolist()[:: self.page]}")

    def row_finding(self, what: str) -> None:
        self.seen["row findings"] += 1
        if self.mode == "enforce" and (self.rows or not self.faults):
            raise Finding("row", what)

    def finish(self, one: int, two: int, three: int) -> None:
        """A request ends, and the tree keeps what it computed."""
        if self.running:
            request = self.running[one % len(self.running)]
            length = len(request.row) // self.page * self.page
            if self._by_result:  # since 0.5.22 the same way as what goes on
                if length > request.protected:
                    self.repoint(request, length)
                self.abort(one, two, three)
                return
            self.running.remove(request)
            if length > request.protected:
                self.insert(request, length)
            self.free(request.row[length:], length, request.evicted)
            self.unlock(request.lock)

    def abort(self, one: int, two: int, three: int) -> None:
        """A request gives everything back: aborted, or retracted, which is started again."""
        if self.running:
            request = self.running.pop(one % len(self.running))
            self.drop(request)

    def drop(self, request: Request) -> None:
        own = request.row[request.protected :]
        self.free(own, request.protected, request.evicted)
        self.unlock(request.lock)

    def once(self, one: int, two: int, three: int) -> None:
        """A request comes, is computed and finished at once."""
        request = self.start(self.sequence(one, two, three))
        if request is not None:
            self.running.append(request)
            self.finish(len(self.running) - 1, two, three)

    def probe(self, one: int, two: int, three: int) -> None:
        """Only a match, which may split a node."""
        if self.past:
            sequence = self.past[one % len(self.past)]
            length = len(sequence) if two % 2 else two // 2 % (len(sequence) + 1)
            self.match(sequence, length)

    def hold(self, one: int, two: int, three: int) -> None:
        """A prefix is locked by a request that does not run yet."""
        if self.past and len(self.held) < HELD:
            sequence = self.past[one % len(self.past)]
            _, node = self.match(sequence, len(sequence))
            self.held.append(self.lock(node))

    def let_go(self, one: int, two: int, three: int) -> None:
        if self.held:
            self.unlock(self.held.pop(one % len(self.held)))

    def evict_full(self, one: int, two: int, three: int) -> None:
        self.evict((1 + one % 4) * self.page, 0)

    def evict_window(self, one: int, two: int, three: int) -> None:
        """Tombstones, where the node is an inner one."""
        self.evict(0, (1 + one % 5) * self.page)

    def warm_up(self, seed: int) -> None:
        """Nothing that a short example needs is left to chance; here nothing is."""

    def flush(self, one: int, two: int, three: int) -> None:
        """``flush_cache``: the tree and the pools are emptied."""
        if one % 8:
            return
        for request in self.running:
            self.drop(request)
        for lock in self.held:
            self.unlock(lock)
        self.running, self.held, self.past = [], [], []
        self.tree.reset()
        self.allocator.clear()
        self.reference = self.new_reference()
        self.tainted = False

    # --- faults: what is done behind the tree ----------------------------------------------------

    def fault(self, what: str) -> None:
        self.tainted = True
        self.seen[what] += 1

    def free_window_behind(self, one: int, two: int, three: int) -> None:
        """C14: window slots of cached tokens are freed, by the public free or on the pool itself."""
        found = self.cached(one, two, three // 4)
        if found is None:
            return
        _, path, start, end = found
        slots = path[start:end]
        window = self.reference.mapping[slots]
        if not (window > 0).all() or not self.reference.paired(slots).all():
            return  # gone, or by now somebody else's
        self.fault("window freed behind")
        if three % 2:
            self.allocator.free_swa(torch.from_numpy(slots.copy()))
        else:  # the entries stay
            self.allocator.swa_attn_allocator.free(torch.from_numpy(window.copy()))
        self.reference.follow()
        self._newcomer(three)

    def free_full_behind(self, one: int, two: int, three: int) -> None:
        """Full pages of the tree are freed, with their window side where they have one."""
        found = self.cached(one, two, three // 4)
        if found is None:
            return
        _, path, start, end = found
        slots = path[start:end]
        if self.reference.full.free[slots // self.page].any():
            return
        window = self.reference.mapping[slots]
        if (window > 0).all() and self.reference.paired(slots).all():
            self.fault("full freed behind")
            self.allocator.free(torch.from_numpy(slots.copy()))
        elif not (window > 0).any():
            self.fault("full freed behind")
            self.allocator.full_attn_allocator.free(torch.from_numpy(slots.copy()))
        self.reference.follow()
        self._newcomer(three)

    def _newcomer(self, choice: int) -> None:
        """Somebody else computes, mostly into what was just freed; its tokens are its own."""
        if choice % 3 == 0:
            return
        self.uniques += 1
        sequence = self.words.extend(None, 0, [self.uniques] * (self.page * (1 + choice % 3)))
        request = self.start(sequence)
        if request is None:
            return
        self.running.append(request)
        if choice % 3 == 1 or len(self.running) > RUNNING:
            self.finish(len(self.running) - 1, 0, 0)

    def repoint_behind(self, one: int, two: int, three: int) -> None:
        """A mapping entry of cached tokens is written: zeroed, or led to somebody else's slots."""
        found, other = self.cached(one, two, 0), self.cached(two, one, 0)
        if found is None or other is None:
            return
        slots, others = found[1][found[2] : found[3]], other[1][other[2] : other[3]]
        mapping = self.allocator.full_to_swa_index_mapping
        window = self.reference.mapping[others].copy()
        if not self.reference.paired(others).all():
            return
        if three % 3 == 0:
            self.fault("entry zeroed behind")
            mapping[torch.from_numpy(slots.copy())] = 0
        elif len(slots) == len(others) and (window > 0).all() and slots[0] != others[0]:
            if three % 3 == 1:
                self.fault("entry re-pointed behind")
                mapping[torch.from_numpy(slots.copy())] = torch.from_numpy(window)
            else:
                self.fault("entry re-pointed through the seam")
                self.allocator.set_full_to_swa_mapping(
                    torch.from_numpy(slots.copy()), torch.from_numpy(window)
                )
                self.reference.give_away(np.concatenate((slots, others)))
        self.reference.follow()

    def insert_without_window(self, one: int, two: int, three: int) -> None:
        """C15: window KV was never allocated, or is gone, and the row is inserted as live."""
        self.uniques += 1
        pages = 2 + three % 4
        count = pages * self.page
        sequence = self.words.extend(None, 0, [self.uniques] * count)
        self.remember(sequence)
        gone = (1 + one % (pages - 1)) * self.page
        if two % 2 and self.page > 1:
            if not self.room(count):
                return
            got = pools.extend_tail(self.allocator, count, count - gone)
            assert got is not None
            slots = got.to(torch.int64).numpy()
        else:
            found = self.allocate(NONE, count)
            if found is None:
                return
            slots = found
        request = self._outsider(sequence)
        self.compute(request, slots)
        if not (two % 2 and self.page > 1):
            self.allocator.free_swa(torch.from_numpy(slots[:gone].copy()))
            self.reference.follow()
        self.fault("inserted without window")
        self._insert_wrong(request, count, Fault.EVICTED_TOKENS_CACHED)

    def _outsider(self, sequence: Text) -> Request:
        """A request with nothing from the tree and no lock."""
        return Request(sequence, NONE, NONE, 0, None)

    def insert_freed(self, one: int, two: int, three: int) -> None:
        """A row is inserted whose slots were freed meanwhile.

        Not by which somebody else lives now: by indices that is his, and in order.
        """
        self.uniques += 1
        count = (1 + three % 3) * self.page
        sequence = self.words.extend(None, 0, [self.uniques] * count)
        self.remember(sequence)
        slots = self.allocate(NONE, count)
        if slots is None:
            return
        request = self._outsider(sequence)
        self.compute(request, slots)
        self.allocator.free(torch.from_numpy(slots.copy()))
        self.reference.follow()
        self.fault("inserted freed slots")
        self._insert_wrong(request, count, Fault.DEAD_TOKENS_CACHED)

    def _insert_wrong(self, request: Request, count: int, wanted: Fault | None) -> None:
        """An insertion that is a fault: it must be reported, and in strict refused."""
        before = len(self.reports)
        self.insert(request, count, evicted=0)
        if self.mode == "off" or wanted is None:
            return
        pools.settle(self.allocator)
        if not any(report.fault is wanted for report in self.reports[before:]):
            raise Finding("not reported", f"{wanted.value} of {count} tokens")
        if self.mode == "strict":
            raise Finding("not refused", f"{wanted.value} of {count} tokens")
        if self.mode == "enforce" and wanted is Fault.EVICTED_TOKENS_CACHED:
            slots = self.unguarded(request.sequence, count)
            full, window = self.reference.judge(slots, request.sequence.prefixes[: len(slots)])
            if not usable(full, window, len(slots), self.need):
                raise Finding("cached as live", self._tell(slots, full, window))


#: Operations by name and how often they come, of those without and those with faults.
LEGAL = {
    "admit": 20, "grow": 18, "slide": 9, "checkpoint": 14, "finish": 9, "abort": 3, "once": 14,
    "probe": 14, "hold": 4, "let_go": 4, "evict_full": 3, "evict_window": 6, "flush": 1,
}  # fmt: skip
FAULTS = {
    "free_window_behind": 5, "free_full_behind": 3, "repoint_behind": 3,
    "insert_without_window": 2, "insert_freed": 2,
}  # fmt: skip


def world_of(release: scheduling.Release, setting: Setting, mode: str, **choices: Any) -> World:
    """The world of a setting, with a host tier or without."""
    if not setting.host:
        return World(release, setting, mode, **choices)
    from real.host_world import HostWorld  # it is built on this module

    return HostWorld(release, setting, mode, **choices)


def operations(setting: Setting, *, faults: bool, without: Sequence[str] = ()) -> dict[str, int]:
    """What is done in such a world, and how often it comes."""
    weights = {**LEGAL, **(FAULTS if faults else {})}
    if setting.host:
        from real import host_world

        weights |= {**host_world.LEGAL, **(host_world.FAULTS if faults else {})}
    return {name: weight for name, weight in weights.items() if name not in without}


# --- the fast driver --------------------------------------------------------------------------------


#: One operation and its choices.
Step = tuple[str, tuple[int, int, int]]


@dataclass
class Outcome:
    """How a drive went. ``first`` and ``first_foreign``: the step of the first pseudo-hit, and of
    the first load-back that brought foreign KV."""

    steps: int = 0
    first: int = 0
    first_foreign: int = 0
    seconds: float = 0.0
    failure: str = ""
    kind: str = ""
    seen: Counter[str] = field(default_factory=Counter)
    trace: list[Any] = field(default_factory=list)
    #: The world that failed, and what was done in it.
    setting: Setting | None = None
    script: list[Step] = field(default_factory=list)


@contextmanager
def guarded(mode: str, *, collected: bool = False) -> Iterator[list[Violation]]:
    """The hooks of ``mode`` (none for off) for what is built inside."""
    _known.clear()
    uninstall()
    before = os.environ.get("HICACHE_GUARD_COMPILED")
    if collected:
        os.environ["HICACHE_GUARD_COMPILED"] = "0"
    reports: list[Violation] = []
    try:
        if mode != "off":
            install(mode, on_report=reports.append)
        yield reports
    finally:
        if collected:
            os.environ.pop("HICACHE_GUARD_COMPILED")
            if before is not None:
                os.environ["HICACHE_GUARD_COMPILED"] = before


@contextmanager
def asked_twice() -> Iterator[None]:
    """The compiled books are asked about every match, and the torch ones about its window tail.

    Once something was wrong a guard judges slot by slot, and the answer at once is hardly asked for;
    here it is, as if nothing had been.
    """
    real, real_look = TreeLink.proved_at_once, compiled.look

    def found(link: TreeLink, result: Any) -> bool:
        """Whether a look of its own finds the match."""
        if A_LOOK not in vars(link):
            with replaced((compiled, "look", real_look)):
                vars(link)[A_LOOK] = link._look()
        look = vars(link)[A_LOOK]
        return look is not None and bool(look.found(result, SimpleNamespace(key=())))

    def both(self: TreeLink, result: Any) -> int:
        guard, length = self.guard, length_of(result)
        suspect, guard.trees_suspect = guard.trees_suspect, False
        try:
            at_once = real(self, result)
            if found(self, result) is not (at_once >= 0):
                raise Finding("pseudo-hit", f"of a match {at_once} tokens are proved, or not found")
            said = at_once >= 0 or self.proved_later(result)
        finally:
            guard.trees_suspect = suspect
        if length and not isinstance(result.last_device_node, self.virtual):
            need = min(self.need, length)
            tail = self.slots_of(result).to(torch.int64)[length - need :]
            live = bool(guard.witness.live(tail, guard.map, guard._entries(tail)).all())
            if at_once not in (-1, length) or said != live:
                kind = "pseudo-hit" if said else "lost hit"
                raise Finding(kind, f"compiled: {at_once} of {length} tokens, the tail is {live}")
        return real(self, result)

    with replaced((TreeLink, "proved_at_once", both), (compiled, "look", _no_look)):
        yield


def drive(
    release: scheduling.Release,
    mode: str,
    *,
    steps: int,
    seed: int = 0,
    faults: bool = True,
    rows: bool = False,
    trees: Sequence[str] = (),
    sizes: Sequence[int] = PAGE_SIZES,
    collected: bool = False,
    traced: bool = False,
    until_found: bool = False,
    life: int = LIFE,
    without: Sequence[str] = (),
    tolerated: Sequence[str] = (),
    hosted: float = 0.0,
    twice: bool = False,
) -> Outcome:
    """``steps`` seeded operations, over many worlds; ends at the first finding.

    ``twice``: of each match it is asked twice what can be proved, see ``asked_twice``.
    """
    names: list[str] = []
    sums: list[int] = []
    known = list(trees) or scheduling.trees()
    options = release.options()
    outcome = Outcome()
    began = time.perf_counter()
    trace = outcome.trace if traced else None
    asking = asked_twice() if twice else nullcontext()
    with guarded(mode, collected=collected) as reports, asking:
        world: World | None = None
        step = number = age = 0
        dice = random.Random(seed)
        draw, bits = dice.random, dice.getrandbits
        while step < steps:
            if world is None or age >= life:
                if world is not None:
                    _close(world, outcome)
                    if outcome.failure:
                        break
                reports.clear()
                setting = Setting.draw(seed + number, known, sizes, options, hosted)
                weights = operations(setting, faults=faults, without=without)
                names, sums = list(weights), list(itertools.accumulate(weights.values()))
                dice = random.Random(f"{seed} {number}")
                draw, bits = dice.random, dice.getrandbits
                world = world_of(
                    release, setting, mode, faults=faults, rows=rows, seen=outcome.seen,
                    reports=reports, trace=trace, tolerated=tolerated,
                )  # fmt: skip
                number, age = number + 1, 0
                outcome.setting = setting
                script = outcome.script = []
            name = names[bisect.bisect(sums, draw() * sums[-1])]
            choices = bits(16), bits(16), bits(16)
            script.append((name, choices))
            step, age = step + 1, age + 1
            try:
                getattr(world, name)(*choices)
                if mode in ("enforce", "strict"):
                    world.look()
                if not faults and reports and not (setting.host and world.had_unlocked):
                    raise Finding("report", str(reports[0]))
            except GuardViolation as error:
                if mode != "strict" or not faults:
                    outcome.kind = "violation"
                    outcome.failure = _failure(error, world, step, name)
                    break
                outcome.seen["raised"] += 1
                world = None  # the call was undone; what the operation did before it was not
            except Finding as error:
                outcome.kind, outcome.failure = error.kind, _failure(error, world, step, name)
                break
            except Over as over:
                outcome.seen[str(over)] += 1
                world = None
            except Exception as error:
                outcome.seen["release died"] += 1
                if trace is not None:
                    trace.append((name, type(error).__name__))
                if mode in ("enforce", "strict") or not faults:
                    outcome.kind, outcome.failure = "died", _failure(error, world, step, name)
                    break
                world = None
            if world is not None and setting.host and world.had_unlocked:
                # With a host tier that is no rarity, and what follows from it is the release's.
                outcome.seen["ended by #27770"] += 1
                world = None
            if outcome.seen["foreign loads"] and not outcome.first_foreign:
                outcome.first_foreign = step
            if outcome.seen["pseudo-hits"] and not outcome.first:
                outcome.first = step
                if until_found:
                    break
            if world is not None and traced and age % 16 == 0:
                world.fingerprint()
        outcome.steps = step
    outcome.seconds = time.perf_counter() - began
    outcome.seen["worlds"] = number
    return outcome


def _close(world: World, outcome: Outcome) -> None:
    if world.mode == "off":
        return
    guard = guard_of(world.allocator)
    outcome.seen["guarded operations"] += guard.tally.operations
    outcome.seen["reports"] += guard.tally.total
    if not world.faults and (guard.tally.total or world.reports):
        outcome.kind, outcome.failure = "report", str(guard.tally.violations)


def _failure(error: BaseException, world: World, step: int, name: str) -> str:
    where = "".join(traceback.format_exception(error))[-3500:]
    setting = f"{world.server.tree.__class__.__name__}, page {world.page}, window {world.need}"
    if world.setting.host:
        setting += f", {world.setting.host}"
    return f"step {step}, {name}, {setting}\n{where}"


def fails(
    release: scheduling.Release, mode: str, setting: Setting, script: Sequence[Step], **choices: Any
) -> str:
    """The kind of finding that a script ends in, or nothing."""
    with guarded(mode) as reports:
        world = world_of(release, setting, mode, seen=Counter(), reports=reports, **choices)
        for name, numbers in script:
            try:
                getattr(world, name)(*numbers)
                world.look()
            except Finding as error:
                return error.kind
            except Over:
                return ""
            except Exception as error:
                return type(error).__name__
    return ""


def minimal(
    release: scheduling.Release, mode: str, setting: Setting, script: Sequence[Step], **choices: Any
) -> list[Step]:
    """Leave out of a script, part by part, whatever its finding does without."""
    kept = list(script)
    kind = fails(release, mode, setting, kept, **choices)
    size = len(kept) // 2
    while kind and size:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if fails(release, mode, setting, fewer, **choices) == kind:
                kept = fewer
            else:
                start += size
        size //= 2
    return kept


# --- Hypothesis, for short examples -----------------------------------------------------------------


def shrinking(
    release: scheduling.Release,
    mode: str,
    *,
    examples: int,
    steps: int,
    faults: bool = True,
    rows: bool = False,
    trees: Sequence[str] = (),
    shrink: bool = True,
    derandomize: bool = True,
    tolerated: Sequence[str] = (),
    hosted: float = 0.0,
) -> Outcome:
    """The same operations as a state machine, whose failures are shrunk."""
    import hypothesis.strategies as st
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import (
        RuleBasedStateMachine,
        initialize,
        rule,
        run_state_machine_as_test,
    )

    outcome = Outcome()
    known = list(trees) or scheduling.trees()
    options = release.options()

    class Machine(RuleBasedStateMachine):
        reports: ClassVar[list[Violation]] = []

        @initialize(seed=st.integers(0, 47))
        def build(self, seed: int) -> None:
            self.reports.clear()
            self.over = False
            setting = Setting.draw(seed, known, PAGE_SIZES, options, hosted)
            self.known = operations(setting, faults=faults)
            self.world = world_of(
                release, setting, mode, faults=faults, rows=rows, seen=outcome.seen,
                reports=self.reports, tolerated=tolerated,
            )  # fmt: skip
            outcome.seen["worlds"] += 1
            if setting.host:
                self.world.warm_up(seed)

        def perform(self, name: str, *choices: int) -> None:
            if self.over or name not in self.known:
                return
            outcome.steps += 1
            try:
                getattr(self.world, name)(*choices)
                self.world.look()
            except GuardViolation:
                if mode != "strict" or not faults:
                    raise
                outcome.seen["raised"] += 1
                self.over = True
            except Over as over:
                outcome.seen[str(over)] += 1
                self.over = True
            if self.world.setting.host and self.world.had_unlocked:  # as in ``drive``
                self.over = True
                return
            if not faults and self.reports:
                raise Finding("report", str(self.reports[0]))

    def rule_of(name: str) -> Any:
        number = st.integers(0, (1 << 16) - 1)

        def run(self: Any, one: int, two: int, three: int) -> None:
            self.perform(name, one, two, three)

        run.__name__ = name
        return rule(one=number, two=number, three=number)(run)

    any_setting = Setting.draw(0, ["unified"], PAGE_SIZES, options, hosted=float(hosted > 0))
    rules = {name: rule_of(name) for name in operations(any_setting, faults=faults)}
    machine = type("TreeMachine", (Machine,), rules)
    began = time.perf_counter()
    with guarded(mode) as reports:
        Machine.reports = reports
        try:
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=examples, stateful_step_count=steps, deadline=None,
                    derandomize=derandomize, database=None, report_multiple_bugs=False,
                    phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
                    suppress_health_check=list(HealthCheck),
                ),
            )  # fmt: skip
        except BaseException as error:
            outcome.kind = getattr(error, "kind", type(error).__name__)
            outcome.failure = "".join(traceback.format_exception(error))[-6000:]
    outcome.seconds = time.perf_counter() - began
    return outcome


# --- proof by mutation --------------------------------------------------------------------------------


def _always(self: Any, result: Any) -> int:
    return length_of(result)


def _not_at_once(self: Any, result: Any) -> int:
    return -1


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _live_unstamped(self: Any, slots: Any, book: Any, entries: Any) -> Any:
    rows = slots.clamp(0, book.mapping.shape[0] - 2)
    inside = entries.clamp(0, book.owner.shape[0] - 1)
    held = (rows == slots) & (inside == entries) & (entries > 0)
    return held & self.resident(slots) & book.proved(rows, inside)


def _all_resident(self: Any, slots: Any) -> Any:
    return torch.ones_like(slots, dtype=torch.bool)


def _adopts_all(self: Any, slots: Any, start: int, evicted: int) -> Any:
    self.guard.serial += 1
    self.guard.witness.vouch(slots[start:].to(torch.int64), self.guard.serial)
    return Adopted(slots.shape[0], evicted)


def _proves_too_little(self: Any, paths: Any, need: int) -> Any:
    return _PROVE(self, paths, need - 1)


_PROVE = PoolGuard.prove_prefixes


def _adopts_unvouched(self: Any, slots: Any, start: int, evicted: int) -> Any:
    row = slots.to(torch.int64)
    return self.judged("insert", None, lambda: self.guard.adopt(row, start, evicted))


def _vouches_for_all(self: Any, slots: Any, since: int, full: Any, window: Any) -> None:
    self.witness.vouch(slots, self.serial)


def _no_parts(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def _none_wrong(*args: Any, **kwargs: Any) -> int:
    return 0


def _all_loaded(self: Any, path: Any) -> Any:
    yes = torch.ones_like(path, dtype=torch.bool)
    return yes, yes


def _at_once_too_little(self: Any, result: Any) -> int:
    self.need -= 1
    try:
        return _AT_ONCE(self, result)
    finally:
        self.need += 1


_AT_ONCE, _LOOK = TreeLink.proved_at_once, compiled.look


def _no_look(*terms: Any) -> None:
    """Each match is proved by more than one call."""


def _look_at_too_little(*terms: Any) -> Any:
    guard, state, mapping, virtual, window, *others = terms
    return _LOOK(guard, state, mapping, virtual, window - 1, *others)


AT_ONCE = "one token too few at once"
FOUND = "one token too few found"
NO_LOOK = (compiled, "look", _no_look)
RENEWALS = "renewals not seen"
#: Releases whose trees never move window slots to full slots that they keep.
NEVER_RENEW = ("0.5.12", "0.5.12.post1")

#: What is broken, as (class, attribute, replacement). ``Books.held`` only ever says yes to what the
#: torch code would prove as well, so that is asked where its own parts are broken.
MUTANTS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "proof skipped": ((TreeLink, "proved_at_once", _always), NO_LOOK),
    "stamps not compared": (
        (TreeLink, "proved_at_once", _not_at_once), (TreeLink, "proved_later", _never), (Witness, "live", _live_unstamped), NO_LOOK,
    ),
    "full pages not compared": (
        (TreeLink, "proved_at_once", _not_at_once), (TreeLink, "proved_later", _never), (Witness, "resident", _all_resident), NO_LOOK,
    ),
    "one token too few": (
        (TreeLink, "proved_at_once", _not_at_once), (TreeLink, "proved_later", _never),
        (PoolGuard, "prove_prefixes", _proves_too_little), NO_LOOK,
    ),
    AT_ONCE: ((TreeLink, "proved_at_once", _at_once_too_little),),
    FOUND: ((compiled, "look", _look_at_too_little),),
    "insertions not checked": ((TreeLink, "adopt", _adopts_all),),
    "nothing vouched for": (
        (Witness, "vouch", _nothing), (TreeLink, "adopt", _adopts_unvouched),
    ),
    RENEWALS: ((Witness, "renew", _nothing),),
}  # fmt: skip

#: Takes thousands of steps at least: in enforce little comes as far as to what this is the last line.
RARE = "all on a loaded path vouched for"
#: The same, to be found where there is a host tier.
HOST_MUTANTS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "prints not asked": (
        (host_copies, "wrong_pages", _none_wrong), (host_copies.HostTier, "loaded", _all_loaded),
    ),
    "host pages handed out unseen": ((host_pool, "_watch_alloc", _nothing),),
    RARE: ((PoolGuard, "adopt_loaded", _vouches_for_all),),
    "loads not vouched for": ((PoolGuard, "adopt_loaded", _nothing),),
    "window copies not followed": ((host_copies, "_window_parts", _no_parts),),
}  # fmt: skip


@contextmanager
def broken(name: str) -> Iterator[None]:
    """The guard with one mutation."""
    with replaced(*{**MUTANTS, **HOST_MUTANTS}[name]):
        yield


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes of ours with others in their places: (owner, attribute, replacement)."""
    kept = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in changes]
    try:
        for owner, attribute, replacement in changes:
            setattr(owner, attribute, replacement)
        yield
    finally:
        for owner, attribute, value in kept:
            setattr(owner, attribute, value)


# --- jobs of a test ---------------------------------------------------------------------------------


def compare(release: scheduling.Release, mode: str, **choices: Any) -> Outcome:
    """The drive without the guard and in ``mode``; a difference is a failure."""
    bare = drive(release, "off", traced=True, **choices)
    mine = drive(release, mode, traced=True, **choices)
    mine.seconds += bare.seconds
    if not mine.failure and bare.failure:
        mine.kind, mine.failure = "unguarded", bare.failure
    if not mine.failure and mine.trace != bare.trace:
        pairs = itertools.zip_longest(bare.trace, mine.trace)
        where = next(i for i, (one, other) in enumerate(pairs) if one != other)
        mine.kind = "difference"
        mine.failure = (
            f"entry {where}: {bare.trace[where : where + 2]} became {mine.trace[where : where + 2]}"
        )
    return mine


def row_of(job: str, outcome: Outcome, **more: Any) -> dict[str, Any]:
    return {
        "job": job,
        "version": running_version(),
        "steps": outcome.steps,
        "steps a second": round(outcome.steps / max(outcome.seconds, 1e-9)),
        "seconds": round(outcome.seconds, 1),
        "first pseudo-hit": outcome.first,
        "first foreign load": outcome.first_foreign,
        "kind": outcome.kind,
        "failure": outcome.failure,
        "seen": dict(outcome.seen),
        **more,
    }


def host_jobs(release: scheduling.Release, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """As ``jobs``, of lives that all have a host tier."""
    trees = [tree for tree in options.tree or scheduling.trees() if tree != "legacy"]
    usual: dict[str, Any] = {"seed": options.seed, "sizes": options.page_size, "hosted": 1.0}
    steps = options.host_steps
    for mode, share in (("enforce", 1), ("strict", 5), ("off", 5)):
        for tree in trees:
            outcome = drive(
                release, mode, steps=steps // share // len(trees), trees=[tree],
                tolerated=options.tolerate, life=LIFE if mode == "enforce" else SHORT_LIFE,
                twice=mode == "enforce", **usual,
            )  # fmt: skip
            yield row_of("host drive", outcome, mode=mode, tree=tree)
    for mode, faults in (*((mode, False) for mode in MODES[1:]), ("observe", True)):
        outcome = compare(
            release, mode, steps=steps // 12, faults=faults, trees=trees, life=SHORT_LIFE, **usual
        )
        yield row_of("host compare", outcome, mode=mode, faults=faults)
    outcome = shrinking(
        release, "enforce", examples=options.host_examples, steps=40, trees=trees, hosted=1.0,
        tolerated=options.tolerate,
    )  # fmt: skip
    yield row_of("host shrink", outcome, mode="enforce")
    for name in HOST_MUTANTS:
        if name == RARE:
            continue
        with broken(name):
            outcome = drive(
                release, "enforce", steps=options.mutant_steps, trees=trees,
                tolerated=options.tolerate, **usual,
            )  # fmt: skip
        yield row_of("host mutant", outcome, mutant=name)


def jobs(release: scheduling.Release, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What the command line asks for, one row each."""
    trees = options.tree or scheduling.trees()
    usual: dict[str, Any] = {
        "seed": options.seed, "sizes": options.page_size, "rows": options.rows,
        "without": options.without, "tolerated": options.tolerate, "hosted": options.hosted,
    }  # fmt: skip

    def drives(mode: str, steps: int, *, faults: bool, collected: bool) -> Iterator[dict[str, Any]]:
        for tree in trees:
            outcome = drive(
                release, mode, steps=steps // len(trees), trees=[tree], faults=faults,
                collected=collected, twice=options.suite and mode == "enforce" and not collected, **usual,
            )  # fmt: skip
            if options.minimize and outcome.failure and outcome.setting is not None:
                script = minimal(
                    release, mode, outcome.setting, outcome.script, faults=faults,
                    rows=options.rows, tolerated=options.tolerate,
                )  # fmt: skip
                outcome.failure += f"{outcome.setting}\n" + "\n".join(map(str, script))
            yield row_of("drive", outcome, mode=mode, tree=tree, collected=collected)

    def compares(mode: str, steps: int, *, faults: bool) -> dict[str, Any]:
        outcome = compare(release, mode, steps=steps, faults=faults, trees=trees,
                          seed=options.seed, sizes=options.page_size, hosted=options.hosted)  # fmt: skip
        return row_of("compare", outcome, mode=mode, faults=faults)

    if options.suite:
        yield from drives("enforce", options.steps, faults=True, collected=False)
        yield from drives("enforce", options.steps // 25, faults=True, collected=True)
        yield from drives("strict", options.steps // 12, faults=True, collected=False)
        yield from drives("off", options.steps // 25, faults=True, collected=False)
        for mode in MODES[1:]:
            yield compares(mode, options.steps // 40, faults=False)
        yield compares("observe", options.steps // 40, faults=True)
    for mode in options.mode:
        yield from drives(
            mode, options.steps, faults=not options.no_faults, collected=options.collected
        )
    for mode in options.compare:
        yield compares(mode, options.steps, faults=not options.no_faults)
    for mode in options.shrink or (["enforce"] if options.suite else []):
        outcome = shrinking(
            release, mode, examples=options.examples, steps=40, trees=trees, rows=options.rows,
            derandomize=not options.random, faults=not options.no_faults,
            tolerated=options.tolerate, hosted=options.hosted,
        )  # fmt: skip
        yield row_of("shrink", outcome, mode=mode)
    chosen = [name for name in MUTANTS if name != RENEWALS or running_version() not in NEVER_RENEW]
    for name in chosen if options.suite else options.mutant:
        with broken(name):
            outcome = drive(
                release,
                "enforce",
                steps=options.mutant_steps,
                trees=trees,
                twice=name in (AT_ONCE, FOUND),
                **usual,
            )
        yield row_of("mutant", outcome, mutant=name)
    if options.host_steps:
        yield from host_jobs(release, options)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", action="store_true", help="all that a test wants to know")
    parser.add_argument("--mode", nargs="*", default=[], choices=MODES, help="of drives")
    parser.add_argument("--steps", type=int, default=50_000, help="of a mode, over all trees")
    parser.add_argument(
        "--host-steps", type=int, default=0, help="all about lives with a host tier"
    )
    parser.add_argument("--host-examples", type=int, default=20)
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--rows", action="store_true", help="a wrong row is a failure, too")
    parser.add_argument("--collected", action="store_true", help="without the compiled books")
    parser.add_argument("--hosted", type=float, default=0.0, help="share of lives with a host tier")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", nargs="*", help="of legacy, unified, unified-rust")
    parser.add_argument("--page-size", nargs="*", type=int, default=list(PAGE_SIZES))
    parser.add_argument("--without", nargs="*", default=[], help="operations that do not come")
    parser.add_argument("--tolerate", nargs="*", default=[], help="findings that are only counted")
    parser.add_argument("--minimize", action="store_true", help="of a failed drive, its script")
    parser.add_argument("--compare", nargs="*", default=[], choices=MODES[1:])
    parser.add_argument("--shrink", nargs="*", default=[], choices=MODES[1:], help="by Hypothesis")
    parser.add_argument("--examples", type=int, default=30)
    parser.add_argument("--random", action="store_true", help="new examples each time")
    parser.add_argument("--mutant", nargs="*", default=[], choices=[*MUTANTS, *HOST_MUTANTS])
    parser.add_argument("--mutant-steps", type=int, default=8_000)
    options = parser.parse_args(arguments)
    driver.prepare()
    release = scheduling.Release()
    wrong = 0
    for row in jobs(release, options):
        print(json.dumps(row), flush=True)
        wrong += bool(row["failure"]) and "mutant" not in row["job"]
    return 1 if wrong else 0


if __name__ == "__main__":
    from real import tree_machine  # the one that ``host_world`` is built on

    sys.exit(tree_machine.main())
