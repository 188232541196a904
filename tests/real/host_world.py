"""The tree machine's world with a host tier: backups, demotion, host eviction, load-backs.

HiCache is the release's own (``repro.host_tier``), and here KV is bytes in the release's own pools,
device and host, so that whatever moves is moved by the release. Of each byte it is known which
prefix it must belong to; free pages of all four pools are poisoned with NaN. By definition,

* when a prefill is about to run, the prefix of its request must hold, slot by slot, its tokens: the
  full side everywhere, the window side in the last ``min(W, n)`` (*foreign load* if not);
* a load-back is legal where every host slot that it would read holds what the prefix is made of, and
  is the very copy that was made for it; then it must not be refused (*lost load*) or reported (*false
  alarm*), and what is not legal must be (*not reported*);
* between an admission and the copy, a loaded slot is judged by the host slot that it comes from.

Faults are made behind the host tier as well: a host page that the tree names is handed on to another
and filled by him; what a device match does not reach, but a load-back does, is freed or re-pointed.
Which host slots the tree names for a prefix is not asked of the tree; ``Attempt`` is what its
controller was asked for.

Right by luck only, as on the device, and counted: a copy of a window slot whose entry a fault had
led elsewhere by then. Since 0.5.21 a backup is ordered first and copied later; with ``overtakes``
faults come in between, too, so that the bytes are no longer what the order was for. Host pages that
a copy is under way to or from are not handed on here.

The match after an insertion may stop short of it (#27770), with a host tier more often than without,
and then the tree lets go of pages that a running request reads; a life ends when it comes to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hicache_guard.adapters.tree_link import ATTRIBUTE
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.faults import Fault
from hicache_guard.repro import host_tier
from real.tree_machine import (
    RUNNING,
    Finding,
    Mask,
    Over,
    Reference,
    Side,
    Slots,
    Text,
    World,
    usable,
)

#: A word of four NaNs of half precision.
NAN = 0x7E007E007E007E00
#: Steps of host eviction, in pages.
HOST_PAGES = 6


class Bytes:
    """K and V of one layer in a pool's own buffers; each row tells its prefix, layer and side."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, layer: int, page: int) -> None:
        """As whole numbers, ``[slot, word]``."""
        self.keys, self.values = keys.numpy(), values.numpy()
        self._layer, self._page = layer, page
        self.last = self.keys.shape[0] - 1

    def write(self, slots: Slots, prefixes: Slots) -> None:
        for side, rows in enumerate((self.keys, self.values)):
            rows[slots, 0] = prefixes
            rows[slots, 1] = 2 * self._layer + side + 1

    def hold(self, slots: Slots, prefixes: Slots) -> Mask:
        inside = np.minimum(slots, self.last)
        right: Mask = inside == slots
        for side, rows in enumerate((self.keys, self.values)):
            found = rows[inside]
            right &= (found[:, 0] == prefixes) & (found[:, 1] == 2 * self._layer + side + 1)
        return right

    def poison(self, pages: Mask) -> None:
        """``pages`` of all that there may be; those of the buffers are."""
        for rows in (self.keys, self.values):
            whole = rows.reshape(-1, self._page, rows.shape[1])
            whole[pages[: whole.shape[0]]] = NAN


class HostSide:
    """A host pool: what it holds, whose turn each page is at, and which prefix it was filled for."""

    def __init__(self, pool: Any, page: int, layer: int) -> None:
        whole = pool.kv_buffer.view(torch.int64)
        self.bytes = Bytes(whole[0, 0].flatten(1), whole[1, 0].flatten(1), layer, page)
        self.pool, self._page = pool, page
        pages = int(pool.size) // page
        self.used = np.zeros(pages, dtype=np.bool_)
        self.turn = np.zeros(pages, dtype=np.int64)
        self.meant = np.zeros(pages, dtype=np.int64)
        self._meant_turn = np.full(pages, -1, dtype=np.int64)
        #: The turn in which a page was filled with what its backup was not ordered for.
        self.overtaken = np.full(pages, -1, dtype=np.int64)
        self._watch("alloc", self._taken)
        self._watch("free", self._freed)
        self._watch("clear", self._cleared)
        self._cleared()

    def _watch(self, name: str, then: Any) -> None:
        original = getattr(self.pool, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            then(result if name == "alloc" else args[0] if args else None)
            return result

        setattr(self.pool, name, watched)

    def pages_of(self, slots: Any) -> Slots:
        """The page of every ``page``-th slot."""
        found: Slots = np.asarray(slots, dtype=np.int64)[:: self._page] // self._page
        return found

    def _taken(self, slots: Any) -> None:
        if slots is not None and len(slots):
            pages = self.pages_of(slots)
            self.turn[pages] += 1
            self.used[pages] = True

    def _freed(self, slots: Any) -> None:
        if slots is not None and len(slots):
            gone = np.zeros(self.used.shape[0], dtype=np.bool_)
            gone[self.pages_of(slots)] = True
            self.used &= ~gone
            self.bytes.poison(gone)

    def _cleared(self, _: Any = None) -> None:
        self.used[:] = False
        self.bytes.poison(~self.used)
        self._meant_turn[:] = -1

    def fill(self, pages: Slots, turns: Slots, prefixes: Slots) -> None:
        """A backup for ``prefixes`` (each page's last) goes to ``pages``, if they are still its."""
        same = self.turn[pages] == turns
        self.meant[pages[same]] = prefixes[same]
        self._meant_turn[pages[same]] = turns[same]

    def forget(self, pages: Slots, turns: Slots) -> None:
        """These copies, if they are still its, are not what they were meant to be."""
        self._meant_turn[pages[self.turn[pages] == turns]] = -1

    def means(self, pages: Slots, prefixes: Slots) -> Mask:
        """Mask of the pages that are the very copies that were made of ``prefixes``."""
        same: Mask = (self.meant[pages] == prefixes) & (self._meant_turn[pages] == self.turn[pages])
        return same

    def is_overtaken(self, slots: Slots) -> bool:
        pages = self.pages_of(slots)
        return bool((self.overtaken[pages] == self.turn[pages]).any())

    def copies(self) -> Slots:
        """Pages that hold a copy made for a tree that may still name it."""
        found: Slots = np.flatnonzero(self.used & (self._meant_turn == self.turn))
        return found


class TierSide(Side):
    """A device pool whose KV are its own bytes, and where what waits to be loaded comes from."""

    def __init__(self, pool: Any, page: int, kv: Bytes, host: HostSide) -> None:
        super().__init__(pool, page, 0.0)
        self.bytes, self.host = kv, host
        self.coming = np.full(self.holds.shape[0], -1, dtype=np.int64)
        self.awaits = False
        self.poison(self.free)

    def write(self, slots: Slots, prefixes: Slots) -> None:
        self.bytes.write(slots, prefixes)

    def hold(self, slots: Slots, prefixes: Slots) -> Mask:
        right = self.bytes.hold(slots, prefixes)
        if self.awaits:
            source = self.coming[slots]
            waits = source >= 0
            right[waits] = self.host.bytes.hold(source[waits], prefixes[waits])
        return right

    def poison(self, pages: Mask) -> None:
        self.bytes.poison(pages)
        self.coming.reshape(-1, self._page)[pages] = -1

    def expect(self, slots: Slots, source: Slots) -> None:
        self.coming[slots] = source
        self.awaits = True

    def arrived(self) -> None:
        if self.awaits:
            self.coming[:] = -1
            self.awaits = False


@dataclass(frozen=True)
class Backup:
    """A copy that is under way to the host, page by page; ``window``: of the window side."""

    window: bool
    slots: Slots
    turns: Slots
    pages: Slots
    host_turns: Slots


class TierReference(Reference):
    """As ``Reference``, of four pools."""

    def __init__(self, server: Any, hosts: tuple[HostSide, HostSide]) -> None:
        self._server, self.hosts = server, hosts
        self._backups: list[Backup] = []
        self._ordered: list[Backup] = []
        super().__init__(server.allocator)

    def sides(self) -> tuple[Side, Side]:
        allocator = self._allocator
        pools = allocator.full_attn_allocator, allocator.swa_attn_allocator
        layers = {window: layer for layer, window in host_tier.layers(self._server).items()}
        made = []
        for window, pool in enumerate(pools):
            layer, size = layers[bool(window)], int(allocator.page_size)
            keys, values = host_tier.words(self._server, layer)
            kv = Bytes(keys, values, layer, size)
            made.append(TierSide(pool, size, kv, self.hosts[window]))
        return made[0], made[1]

    def inserted(self, slots: Slots, turns: Slots, prefixes: Slots, start: int) -> None:
        super().inserted(slots, turns, prefixes, start)
        self.settle()

    # --- to the host -----------------------------------------------------------------------------

    def backed_up(self, slots: Slots, host: Slots, *, window: bool, waits: bool) -> None:
        """Device ``slots`` are copied to ``host`` slots, or will be when that is submitted."""
        side, tier = (self.window, self.hosts[1]) if window else (self.full, self.hosts[0])
        ends, pages = slots[self.page - 1 :: self.page], tier.pages_of(host)
        turns = side.turn[side.page_of(self._inside(ends) if window else ends)]
        if window:
            # What no entry leads to now is nobody's to prove, though a fault be undone afterwards.
            led = self.rows_of(ends) > 0
            ends, turns, pages = ends[led], turns[led], pages[led]
        self._backups.append(Backup(window, ends, turns, pages, tier.turn[pages]))
        if waits:
            self._ordered.append(self._backups[-1])
        self.settle(last=False)

    def ordered(self, *, window: bool) -> list[Slots]:
        """Host pages that queued backups will fill."""
        return [backup.pages for backup in self._ordered if backup.window is window]

    def submitted(self) -> None:
        """Ordered backups are about to read the device: as it is now."""
        self.follow()
        for backup in self._ordered:
            side = self.window if backup.window else self.full
            tier, pages = self.hosts[backup.window], side.page_of(backup.slots)
            late = (side.turn[pages] != backup.turns) | side.free[pages]
            tier.overtaken[backup.pages[late]] = backup.host_turns[late]
            known, _ = self._stands_for(backup)
            tier.forget(backup.pages[~known], backup.host_turns[~known])
        self._ordered = []

    def settle(self, *, last: bool = True) -> None:
        """Say what the copies are meant to be, as far as the tree has said of what.

        ``last``: whatever is not known by now is none that the tree may rely on.
        """
        left = []
        for backup in self._backups:
            known, prefixes = self._stands_for(backup)
            tier = self.hosts[backup.window]
            tier.fill(backup.pages[known], backup.host_turns[known], prefixes[known])
            if not known.all() and not last:
                rest = ~known
                left.append(
                    Backup(
                        backup.window, backup.slots[rest], backup.turns[rest],
                        backup.pages[rest], backup.host_turns[rest],
                    )
                )  # fmt: skip
        self._backups = left

    def _stands_for(self, backup: Backup) -> tuple[Mask, Slots]:
        """Which pages of a backup are what a tree took over, and for which prefix that was."""
        rows = backup.slots
        if backup.window:
            rows = self.rows_of(rows)
            side, slots = self.window, self._inside(backup.slots)
            same = (side.turn[side.page_of(slots)] == backup.turns) & self.paired(rows) & (rows > 0)
        else:
            same = self.full.turn[self.full.page_of(rows)] == backup.turns
        pages = self.full.page_of(rows)
        known: Mask = same & (self._cached_turn[pages] == self.full.turn[pages])
        return known, self._cached[pages]

    def rows_of(self, window: Slots) -> Slots:
        """The full slots whose entries lead to ``window`` slots; 0 where there is none."""
        mapping = self.mapping[:-1]
        back = np.zeros(self.window.holds.shape[0], dtype=np.int64)
        rows = np.flatnonzero(mapping > 0)
        back[self._inside(mapping[rows])] = rows
        found: Slots = back[self._inside(window)]
        return found

    # --- from the host ---------------------------------------------------------------------------

    def loading(self, slots: Slots, host: Slots, *, window: bool) -> None:
        """Device ``slots`` were taken for what ``host`` slots hold."""
        side: Any = self.window if window else self.full
        side.follow()
        side.expect(slots, host)
        if not window:
            tier, pages = self.hosts[0], self.hosts[0].pages_of(host)
            mine = self.full.page_of(slots[:: self.page])
            good = tier.means(pages, tier.meant[pages])
            self._cached[mine[good]] = tier.meant[pages[good]]
            self._cached_turn[mine[good]] = self.full.turn[mine[good]]

    def loaded_windows(self, window: Slots, host: Slots) -> None:
        """The mapping was rebuilt for ``window`` slots that are loaded from ``host`` slots."""
        tier, pages = self.hosts[1], self.hosts[1].pages_of(host)
        good = np.repeat(tier.means(pages, tier.meant[pages]), self.page)
        rows = self.rows_of(window[good])
        self._pair(rows[rows > 0])

    def arrived(self) -> None:
        """What was queued has been copied."""
        for side in (self.full, self.window):
            assert isinstance(side, TierSide)
            side.arrived()


@dataclass
class Attempt:
    """A load-back that the controller was asked for, judged before it.

    ``right``: the host holds what the prefix is made of; ``meant``: and that by intention.
    """

    right: bool
    meant: bool
    #: A copy among them was made of what came to a device page after the backup was ordered.
    overtaken: bool
    reports: int
    loaded: bool = False
    windows: tuple[Slots, Slots] | None = None

    @property
    def legal(self) -> bool:
        return self.right and self.meant


class HostWorld(World):
    """A world whose tree has a host tier."""

    #: Whether faults may come between the order of a backup and the copy, so that what it is about to
    #: read is another's by then.
    overtakes = True
    tier: host_tier.HostTier | None = None
    hosts: tuple[HostSide, HostSide]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: Admitted, and not yet computed: (tokens, prefix, faults made until then, whether loaded).
        self.admitted: list[tuple[Text, Slots, int, bool]] = []
        self.faults_made = self.names = 0
        self.attempt: Attempt | None = None
        #: What is being loaded back for: tokens, and how many of them.
        self.asked: tuple[Text, int] | None = None
        #: Full and window slots whose backup waits to be submitted, which it does since 0.5.21.
        self.queued: list[Slots] = []
        self.queued_windows: list[Slots] = []
        self.submissions = 0
        super().__init__(*args, **kwargs)
        self.seen[f"with {self.setting.host}"] += 1

    def new_reference(self) -> Reference:
        if self.tier is None:
            for pool in (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator):
                self._watch_device(pool)
            self.tier = host_tier.HostTier(self.server, self.setting.host, ratio=self.setting.ratio)
            layers = {window: layer for layer, window in host_tier.layers(self.server).items()}
            full, window = self.tier.host_pools()
            page = self.setting.page_size
            self.hosts = HostSide(full, page, layers[False]), HostSide(window, page, layers[True])
            self._watch_controller()
        return TierReference(self.server, self.hosts)

    @property
    def book(self) -> TierReference:
        assert isinstance(self.reference, TierReference)
        return self.reference

    # --- looking on ------------------------------------------------------------------------------

    def _watch_device(self, pool: Any) -> None:
        """A load-back may evict and allocate in one go; what was free in between is poisoned."""
        original = pool.alloc

        def alloc(*args: Any, **kwargs: Any) -> Any:
            self.reference.follow()
            return original(*args, **kwargs)

        pool.alloc = alloc

    def _watch_controller(self) -> None:
        controller = self.tree.cache_controller
        original_write, original_load = controller.write, controller.load
        original_start = controller.start_writing

        def start_writing(*args: Any, **kwargs: Any) -> Any:
            self.book.submitted()
            self.queued, self.queued_windows = [], []
            self.submissions += 1
            return original_start(*args, **kwargs)

        def write(device_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            before = self.submissions
            host = original_write(device_indices, *args, **kwargs)
            if host is not None:
                waits = before == self.submissions
                if waits:
                    self.queued.append(_numbers(device_indices))
                self.seen["backed up"] += 1
                self.book.follow()
                if device_indices.numel():
                    slots, copies = _numbers(device_indices), _numbers(host)
                    self.book.backed_up(slots, copies, window=False, waits=waits)
                for part in _window_parts(args, kwargs):
                    if part.device_indices is not None and part.host_indices is not None:
                        slots, copies = _numbers(part.device_indices), _numbers(part.host_indices)
                        self.book.backed_up(slots, copies, window=True, waits=waits)
                        if waits:
                            self.queued_windows.append(slots)
            return host

        def load(host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            parts = _window_parts(args, kwargs)
            windows = [_numbers(part.host_indices) for part in parts]
            attempt = self.attempt = self._judge(_numbers(host_indices), windows)
            self.seen["load-backs asked"] += 1
            self.seen["load-backs asked that are illegal"] += not attempt.right
            self.seen["load-backs asked that are lucky"] += attempt.right and not attempt.meant
            try:
                found = original_load(host_indices, *args, **kwargs)
            except GuardViolation as error:
                if error.violation.fault is Fault.STALE_HOST_COPY:
                    if attempt.legal:
                        raise Finding("false alarm", "a legal load-back raised") from None
                    self.seen["refused load-backs"] += 1
                raise
            self._reported(attempt)
            if found is None:
                self._not_loaded(attempt, len(host_indices), sum(map(len, windows)))
                return found
            attempt.loaded = True
            if host_indices.numel():
                self.book.loading(_numbers(found), _numbers(host_indices), window=False)
            for part in parts:
                slots, copies = _numbers(part.device_indices), _numbers(part.host_indices)
                self.book.loading(slots, copies, window=True)
                attempt.windows = slots, copies
            return found

        controller.write, controller.load = write, load
        controller.start_writing = start_writing

    def _judge(self, full: Slots, windows: Sequence[Slots]) -> Attempt:
        """What the host would give for the prefix that is asked for."""
        if self.asked is None:  # nothing is said of it but what ``submit`` finds
            return Attempt(True, False, False, len(self.reports))
        text, length = self.asked
        size, (host, other) = self.page, self.hosts
        prefixes = text.prefixes[:length]
        ends = prefixes[size - 1 :: size]
        due = prefixes[length - len(full) :]
        right = bool(host.bytes.hold(full, due).all())
        meant = bool(host.means(host.pages_of(full), due[size - 1 :: size]).all())
        for slots in windows:
            # By their bytes: which pages of the window the tree lacks is the tree's business.
            said = other.bytes.keys[slots[size - 1 :: size], 0]
            places = ends[None, :] == said[:, None]
            if not places.any(1).all():
                right = False
                continue
            wanted = prefixes.reshape(-1, size)[places.argmax(1)].reshape(-1)
            right &= bool(other.bytes.hold(slots, wanted).all())
            meant &= bool(other.means(other.pages_of(slots), said).all())
        overtaken = host.is_overtaken(full) or any(map(other.is_overtaken, windows))
        return Attempt(right, meant, overtaken, len(self.reports))

    def _reported(self, attempt: Attempt) -> None:
        """What the guard said of a load-back, against what it was."""
        if self.mode == "off":
            return
        stale = any(
            report.fault is Fault.STALE_HOST_COPY for report in self.reports[attempt.reports :]
        )
        if stale and attempt.legal:
            raise Finding("false alarm", "a legal load-back was reported")
        if not stale and attempt.overtaken and not self.overtakes:
            self.seen["overtaken copies loaded"] += not attempt.right
        elif not stale and not attempt.right:
            raise Finding("not reported", "a load-back of foreign KV")

    def _not_loaded(self, attempt: Attempt, full: int, window: int) -> None:
        """The controller refused; that is the guard, or there is no room."""
        if self.mode in ("enforce", "strict") and len(self.reports) > attempt.reports:
            self.seen["refused load-backs"] += 1
            self.seen["lucky refusals"] += attempt.right
            return
        allocator = self.allocator
        room = allocator.full_available_size(), allocator.swa_available_size()
        if room[0] >= full and room[1] >= window:
            raise Finding("lost load", f"{full} and {window} slots asked, {room} are free")
        self.seen["no room to load"] += 1

    # --- admission -------------------------------------------------------------------------------

    def take(self, sequence: Text) -> tuple[Slots, Any]:
        """As ``PrefillAdder``: match, lock, and queue what the host has of the prefix."""
        assert self.tier is not None
        self.names += 1
        req = self.server.request(f"r{self.names}", sequence.tokens.tolist())
        self.matched(sequence, len(sequence) - 1, lambda: self._asked(req))
        length = self._length_of(req)
        if length is not None and self.mode == "enforce" and self.faults:
            self._count_clipped(sequence, length)
        self.asked = None if length is None else (sequence, length)
        self.attempt, before = None, self._withheld()
        wants = self.tier.wants_load(req)
        try:
            count = self.tier.admit(req)
        except AssertionError as error:
            if "pinned by load-back" in str(error):
                # A longer prefix is being loaded, and a shorter one lacks window KV of its own.
                raise Over("dies of two loads through a node") from None
            raise
        self.asked = None
        if self.setting.host == "write_back":
            self.tier.flush_writes()  # an eviction may have begun backups; see ``evict``
        self.book.follow()
        prefix = _numbers(self.server.prefix(req)).copy()
        lock = self._lock_of(req)
        self.seen["host hits"] += wants
        self.note("load", prefix)
        attempt = self.attempt
        if attempt is not None and attempt.loaded:
            if attempt.windows is not None:
                self.book.loaded_windows(*attempt.windows)
            self.seen["loaded tokens"] += count
            if length is not None:
                self._check_loaded(sequence, length, len(prefix), self._withheld() > before)
        self.admitted.append((sequence, prefix, self.faults_made, bool(count)))
        return prefix, lock

    def _asked(self, req: Any) -> tuple[Slots, Any]:
        self.server.match(req)
        return _numbers(self.server.prefix(req)), None

    def _length_of(self, req: Any) -> int | None:
        """Tokens up to the node that a load-back is for; None where the core in Rust tells nobody."""
        node, core = req.best_match_node, self._core
        if core is not None and hasattr(core, "collect_path_info"):
            path = core.collect_path_info([node])[0]
            return int(path[-1].path_end) if path else 0
        if core is not None and isinstance(node, int):  # 0.5.17 to 0.5.21
            try:
                node = core.node_by_id(node)
            except NotImplementedError:
                return None
        length = 0
        while node.parent is not None:
            length += len(node.key)
            node = node.parent
        return length

    def _count_clipped(self, text: Text, length: int) -> None:
        """A match that was clipped loses what the host has beyond; count where that looks right.

        Only counted: that a right copy of each page exists does not say that the tree names it.
        """
        params = self.release.base.MatchPrefixParams(key=self.key(text, len(text) - 1))
        result = self._original(self.tree, params)
        longest = self._length_of(result)
        if longest is None or longest <= length:
            return
        self.seen["host hits clipped"] += 1
        ends = text.prefixes[:longest][self.page - 1 :: self.page]
        (host, other), book, rows = self.hosts, self.book, np.arange(self.page)
        there = np.isin(ends, host.meant[host.copies()])
        device = np.flatnonzero(~book.full.free & (book._cached_turn == book.full.turn))
        there |= np.isin(ends, book._cached[device])
        slots = (device[:, None] * self.page + rows).reshape(-1)
        paired = book.paired(slots).reshape(-1, self.page).all(1)
        window = np.isin(ends, other.meant[other.copies()])
        window |= np.isin(ends, book._cached[device[paired]])
        first = max(0, longest - self.need) // self.page
        fine = bool(there.all() and window[first:].all())
        self.seen["host hits clipped that look right"] += fine

    def _lock_of(self, req: Any) -> Any:
        if self._by_result:
            return req.lock
        if hasattr(req, "lock_receipt"):
            return req.last_node, req.lock_receipt
        params = self.release.base.DecLockRefParams
        return req.last_node, params(swa_uuid_for_lock=req.swa_uuid_for_lock)

    def _withheld(self) -> int:
        """Load-backs after which the guard did not find the prefix proved."""
        book = vars(self.tree).get(ATTRIBUTE)
        return 0 if book is None else int(book.record.tally.load_backs_refused)

    def _check_loaded(self, text: Text, length: int, given: int, withheld: bool) -> None:
        """A load-back was queued: its prefix is given, but for what is wrong on the device."""
        if given == length:
            return
        slots = self.unguarded(text, length)
        prefixes = text.prefixes[: len(slots)]
        judged, meant = self.book.judge(slots, prefixes), self.book.meant(slots, prefixes)
        fine = [usable(*masks, len(slots), self.need) for masks in (judged, meant)]
        if not withheld or (all(fine) and len(slots) == length):
            raise Finding("lost load", f"{given} tokens of {length} that were loaded")
        self.seen["withheld load-backs"] += 1
        self.seen["lucky refusals"] += fine[0]

    def submit(self) -> None:
        """Copy what is queued, and look at every byte that was admitted to: a prefill begins."""
        assert self.tier is not None
        self.tier.start_loads()
        self.book.arrived()
        admitted, self.admitted = self.admitted, []
        for text, prefix, faults, loaded in admitted:
            count = len(prefix)
            masks = self.book.judge(prefix, text.prefixes[:count])
            if usable(*masks, count, self.need):
                self.seen["load-backs compared"] += loaded
                continue
            self.seen["foreign loads"] += loaded
            if self.mode in ("enforce", "strict") and faults == self.faults_made:
                raise Finding("foreign load" if loaded else "foreign prefix",
                              self._tell(prefix, *masks))  # fmt: skip

    # --- what the base world does, with a host tier ----------------------------------------------

    def allocate(self, row: Slots, count: int) -> Slots | None:
        """Before each forward pass what was queued is loaded, if it was given up since, too."""
        self.submit()
        return super().allocate(row, count)

    def room(self, tokens: int) -> bool:
        """What is being copied is locked: wait for it where that is in the way."""
        if super().room(tokens):
            return True
        self.poll(0, 0, 0)
        return super().room(tokens)

    def evict(self, full: int, window: int) -> None:
        super().evict(full, window)
        if self.setting.host == "write_back":
            # On 0.5.12 such a backup must be waited for before anybody polls.
            assert self.tier is not None
            self.tier.flush_writes()
            self.reference.follow()

    def fault(self, what: str) -> None:
        super().fault(what)
        self.faults_made += 1

    def look(self) -> None:
        super().look()
        self.book.settle()

    def fingerprint(self) -> None:
        super().fingerprint()
        if self.trace is not None:
            used = tuple(int(host.used.sum()) for host in self.hosts)
            self.note(
                f"host {used}", np.concatenate([host.bytes.keys[:, 0] for host in self.hosts])
            )

    def warm_up(self, seed: int) -> None:
        """So that short examples, too, have something to load."""
        for number in range(2):
            self.once(6 * number, seed, 64 * number + self.page + self.need)
        self.poll(0, 0, 0)
        self.demote(self.reference.full.pages - 1, 0, 1)

    def flush(self, one: int, two: int, three: int) -> None:
        """As the base world's; with backups in flight, and loads that were given up."""
        assert self.tier is not None
        if one % 8 == 0:
            under_way = self.tier.in_flight()
            self.seen["flushed with backups in flight"] += under_way[0] > 0
            self.seen["flushed with loads in flight"] += under_way[1] > 0
        super().flush(one, two, three)

    # --- operations ------------------------------------------------------------------------------

    def poll(self, one: int, two: int, three: int) -> None:
        """``check_hicache_events``: submit backups, take in what is done."""
        assert self.tier is not None
        if self.setting.host == "write_back":
            self.tier.flush_writes()
        else:
            self.tier.poll()
        self.book.follow()

    def take_in_loads(self, one: int, two: int, three: int) -> None:
        assert self.tier is not None
        self.tier.finish_loads()
        self.book.follow()

    def demote(self, one: int, two: int, three: int) -> None:
        """Much of the device goes; what is backed up stays in the tree."""
        if three % 2:
            self.poll(one, two, three)  # or the backups hold it
        pages = self.reference.full.pages
        self.evict((1 + one % pages) * self.page, (1 + two % pages) * self.page * (three // 2 % 2))

    def evict_host(self, one: int, two: int, three: int) -> None:
        assert self.tier is not None
        full, window = 1 + one % HOST_PAGES, two % HOST_PAGES
        self.tier.evict_host(full * self.page, window * self.page)
        self.book.follow()

    def recall(self, one: int, two: int, three: int) -> None:
        """A request that goes on from an earlier one, whole, or a first chunk of it."""
        if not self.past or len(self.running) >= RUNNING:
            return
        request = self.start(self._again(one, two), chunk=three % 2 == 0)
        if request is not None:
            self.running.append(request)

    def _again(self, one: int, two: int) -> Text:
        start = self.past[one % len(self.past)]
        cut = len(start) if two % 3 else two // 3 % (len(start) + 1)
        return self.words.extend(start, min(cut, self.longest), [two % 3] * (1 + two % self.page))

    def batch(self, one: int, two: int, three: int) -> None:
        """Two are admitted before either is computed; the first may be aborted in between."""
        if not self.past or len(self.running) + 2 > RUNNING:
            return
        texts = self._again(one, two), self._again(two, one)
        (first, lock), (second, other) = self.take(texts[0]), self.take(texts[1])
        begun = []
        if three % 3:
            begun.append(self.begin(texts[0], first, lock, chunk=three % 2 == 0))
        else:
            self.unlock(lock)
            self.seen["aborted before the load"] += 1
        begun.append(self.begin(texts[1], second, other))
        self.running += [request for request in begun if request is not None]

    def give_up(self, one: int, two: int, three: int) -> None:
        """An admission is undone; what it queued is loaded all the same, with the next prefill."""
        if not self.past:
            return
        _, lock = self.take(self._again(one, two))
        self.admitted.pop()
        self.unlock(lock)
        self.seen["given up before the load"] += self.attempt is not None

    def retract(self, one: int, two: int, three: int) -> None:
        """A running request gives everything back and is started again."""
        if self.running:
            request = self.running.pop(one % len(self.running))
            self.drop(request)
            if three % 2:
                self.demote(two, one, 1)
            self.seen["retracted"] += 1
            again = self.start(request.sequence, chunk=three // 2 % 2 == 0)
            if again is not None:
                self.running.append(again)

    # --- faults ----------------------------------------------------------------------------------

    def cached(self, one: int, two: int, three: int) -> tuple[Text, Slots, int, int] | None:
        """As the base world's; not what a queued backup is about to read, see ``overtakes``."""
        found = super().cached(one, two, three)
        if found is None or self.overtakes:
            return found
        _, path, start, end = found
        return None if self._is_queued(path[start:end]) else found

    def _is_queued(self, slots: Slots) -> bool:
        """Whether a queued backup will read full ``slots``, or their window side."""
        parts = zip(
            (slots, self.book.mapping[slots]), (self.queued, self.queued_windows), strict=True
        )
        return any(np.isin(found, queued).any() for found, queue in parts for queued in queue)

    def hand_on(self, one: int, two: int, three: int) -> None:
        """A host page that the tree names is taken from it, and filled by its new owner."""
        host = self.hosts[one % 2]
        copies = host.copies()
        if not len(copies):
            return
        start = two % len(copies)
        pages = copies[start : start + 1 + three % 3]
        if self._in_flight(pages, window=bool(one % 2)):
            return  # what a page is that is freed while it is copied is another story
        slots = (pages[:, None] * self.page + np.arange(self.page)).reshape(-1)
        host.pool.free(torch.from_numpy(slots.copy()))
        everything = _numbers(host.pool.alloc(host.pool.available_size()))
        rest = everything[~np.isin(everything, slots)]
        if len(rest):
            host.pool.free(torch.from_numpy(rest.copy()))
        self.uniques += 1
        foreign = self.words.extend(None, 0, [self.uniques] * len(slots))
        host.bytes.write(slots, foreign.prefixes)
        self.fault(f"host page handed on, {('full', 'window')[one % 2]}")

    def free_tombstone_behind(self, one: int, two: int, three: int) -> None:
        """Full pages of cached tokens whose window KV is gone are freed.

        No match on the device reaches them; a load-back of their window KV does.
        """
        book, pages = self.book, self._pages_of_trees()
        pages = pages[book.mapping[pages * self.page] == 0]
        if not len(pages):
            return
        page = pages[one % len(pages)]
        slots = page * self.page + np.arange(self.page)
        if self._is_queued(slots):
            return
        if (book.full.coming[slots] >= 0).any():  # type: ignore[attr-defined]
            return
        self.fault("tombstone freed behind")
        self.allocator.full_attn_allocator.free(torch.from_numpy(slots.copy()))
        self.reference.follow()
        self._newcomer(three)

    def repoint_any_behind(self, one: int, two: int, three: int) -> None:
        """As ``repoint_behind``, of any two pages that the tree holds, a match reaches them or not."""
        book, pages = self.book, self._pages_of_trees()
        slots = (pages[:, None] * self.page + np.arange(self.page)).reshape(-1, self.page)
        paired = book.paired(slots.reshape(-1)).reshape(-1, self.page)
        slots = slots[((book.mapping[slots] > 0) & paired).all(1)]
        if len(slots) < 2:
            return
        mine = slots[one % len(slots)]
        theirs = slots[(one + 1 + two % (len(slots) - 1)) % len(slots)]
        if self._is_queued(mine):
            return
        self.fault("entry of any page re-pointed behind")
        window = torch.from_numpy(book.mapping[theirs].copy())
        self.allocator.full_to_swa_index_mapping[torch.from_numpy(mine.copy())] = window
        self.reference.follow()

    def _pages_of_trees(self) -> Slots:
        """Full pages that were cached and are nobody's else since."""
        held = ~self.book.full.free & (self.book._cached_turn == self.book.full.turn)
        for request in self.running:
            held[self.book.full.page_of(request.row[request.protected :])] = False
        found: Slots = np.flatnonzero(held)
        return found

    def _in_flight(self, pages: Slots, *, window: bool) -> bool:
        """Whether a queued load will read these host pages, or a queued backup will fill them."""
        side: Any = self.reference.window if window else self.reference.full
        waits = [side.coming[side.coming >= 0] // self.page, *self.book.ordered(window=window)]
        return any(np.isin(found, pages).any() for found in waits)


def _numbers(slots: Any) -> Slots:
    found: Slots = torch.as_tensor(slots).to(torch.int64).numpy()
    return found


def _window_parts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The transfers of window KV among the arguments of a controller's call."""
    given = kwargs.get("extra_pools", args[2] if len(args) > 2 else None)
    return [part for part in given or () if part.name.name == "SWA"]


#: More operations by name, and how often they come.
LEGAL = {
    "poll": 10, "take_in_loads": 3, "demote": 10, "evict_host": 2, "recall": 22, "batch": 5,
    "give_up": 4, "retract": 3,
}  # fmt: skip
FAULTS = {"hand_on": 5, "free_tombstone_behind": 3, "repoint_any_behind": 3}
