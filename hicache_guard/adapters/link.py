"""How hooked SGLang objects find their guard, and how an operation on them begins and ends."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from hicache_guard.adapters.releases import Release
from hicache_guard.core import compiled
from hicache_guard.core.compiled import ALL_MAPPED
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.journal import ACTING_FOR, Steps, acting_for
from hicache_guard.core.ledger import PageLedger
from hicache_guard.core.modes import Mode
from hicache_guard.core.verdict import Vetted
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.stream import StreamTranslation

if TYPE_CHECKING:
    from hicache_guard.adapters.recording import Tape

#: The attribute under which an SGLang object holds its link.
ATTRIBUTE = "_hicache_guard_link"

_ADAPTERS = __name__.rpartition(".")[0]


def in_free_group(allocator: Any) -> bool:
    """Whether frees on this SGLang allocator are being queued (two spellings across releases)."""
    state = allocator.__dict__
    direct = state.get("is_not_in_free_group")
    return not direct if direct is not None else state["free_group"] is not None


@contextmanager
def outside_group(allocator: Any) -> Iterator[None]:
    """Let frees on this SGLang allocator take effect at once, whatever group is open.

    For what does not belong to the group: freed before it was opened, or released by the guard.
    """
    state = vars(allocator)
    name, closed = "free_group", None
    if "is_not_in_free_group" in state:
        name, closed = "is_not_in_free_group", True
    group, state[name] = state[name], closed
    try:
        yield
    finally:
        state[name] = group


class StandIn:
    """Base of descriptors that take the place of an attribute of SGLang's objects."""


class Factory:
    """Marks a function that builds a hook from the original method: for methods called very often.

    Other hooks are plain functions that receive the original as their first argument.
    """

    def __init__(self, build: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.build = build


class AllocatorLink:
    """What the hooks know about one hybrid allocator, and what is going on in it.

    ``vetting``: a public free whose arguments were checked or noted runs. ``eager``: all parts of
    that free were checked at once. ``padding_expected``: page 0 may reach a free list through a
    fault that was counted already. ``trusted_writer``: a known writer of the bare mapping runs.
    ``ending``: a group ends, and the pools receive what it queued after it was checked. ``taking``:
    a hybrid allocation runs whose outcome is noted at its end. ``captured_window``: the window
    slots that the running allocation took. ``captured_last``: the translation of the slots
    that it continues after. ``queued``: window frees that wait for their group to end, as (full
    slots, what their entries held when queued); ``joined``: frees of the full side that do, by
    name, as (full slots, the moment). ``given``: the slots that the
    running free hands to the release, and a tensor of the same that nobody else writes into.
    """

    def __init__(self, allocator: Any, guard: PoolGuard, release: Release) -> None:
        self.allocator = weakref.ref(allocator)
        self.state = vars(allocator)
        self.guard = guard
        self.release = release
        #: Frees that only join an open group, to be made when it ends.
        self.deferred = release.deferred_frees
        self.strict = guard.mode is Mode.STRICT
        #: Whether frees whose shape is fixed follow every entry, wherever it leads.
        self.must_be_mapped = ALL_MAPPED if release.segment_frees else 0
        self.pools: list[PoolLink] = []
        self.vetting = False
        self.vetted: tuple[torch.Tensor, Vetted] | None = None
        self.padding_expected = False
        self.captured_window: torch.Tensor | None = None
        self.captured_last: torch.Tensor | None = None
        self.trusted_writer = False
        self.eager = False
        self.ending = False
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.joined: dict[str, list[tuple[torch.Tensor, int]]] = {}
        self.taking = False
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None
        #: The books as kernels read them, and what translates on each stream of a device.
        self.books: DeviceBooks | None = None
        self.readers: dict[int, StreamTranslation] = {}
        #: What opens and closes short operations, where the books are compiled.
        self.steps: Steps | None = None
        #: Writes down the calls that are made, where that was asked for.
        self.tape: Tape | None = None
        _links.add(self)

    # Calls that are made at every step open and close their operation by themselves, outside strict
    # mode: ``start``, then ``stop`` or ``give_up``.

    def start(self, name: str) -> None:
        """Open an outermost operation; a hook calls it through one function of its module."""
        frame = sys._getframe(3) if self.tape is None else caller()
        if self.guard.begin_step(name, frame):
            return
        mapping = self.notice_unseen()
        if mapping is not None:
            try:
                self.guard.backlog.settle()
                self.guard.reconcile(mapping)
            except BaseException:
                self.close()
                raise

    def watch(self) -> None:
        """Know the pools' free lists and the mapping; to be called when the pools are known."""
        if self.guard.compiled is not None:
            lists = [(pool.state, "free_pages") for pool in self.pools]
            self.steps = compiled.steps([*lists, (self.state, "full_to_swa_index_mapping")])
            self.steps.leave()
            self.guard.journal.steps = self.steps

    def stop(self) -> None:
        """Close what ``start`` opened."""
        guard = self.guard
        if guard.lazy and guard.backlog.long:
            guard.backlog.settle(wait=False)
        self.close()

    def give_up(self, error: BaseException) -> None:
        """Close what ``start`` opened, after an error."""
        try:
            if not isinstance(error, GuardViolation):
                # The release gave up, perhaps over what is noted here: report it before it dies.
                self.guard.backlog.settle()
        finally:
            self.close()

    def close(self) -> None:
        """Forget what the operation left to its inner calls, and take its outcome as seen."""
        self.vetting = self.padding_expected = self.eager = self.taking = self.ending = False
        self.vetted = self.captured_window = self.captured_last = self.given = None
        self.guard.end()
        if self.steps is not None:
            self.steps.leave()
        else:
            self._see_lists()

    def _see_lists(self) -> None:
        """Remember the free lists as they are now; hide those whose pages are held back."""
        backlog = self.guard.backlog
        withholds = backlog.withholds
        for pool in self.pools:
            if withholds and backlog.held_slots(pool.ledger):
                pool.hide()
            elif pool.hidden is None:
                pool.expected = pool.state["free_pages"]
            else:
                pool.expected = pool.reveal()

    def operation(self, name: str, *, settle: bool = True) -> Running:
        """Run one outermost operation in a ``with`` block, whose value is False where one is open.

        In strict mode an operation that raises leaves the allocator, the mapping and the ledgers as
        they were. With ``settle``, what the backlog holds is settled first.
        """
        return Running(self, name, settle)

    def judged(self, name: str, request: str | None, check: Callable[[], Any]) -> Any:
        """Run a check slot by slot, as one operation, on behalf of ``request`` if one is known."""
        with acting_for(request or ACTING_FOR.get()), self.operation(name):
            return check()

    def drain(self) -> None:
        """Settle all that is due and report all that is known; waits for the device."""
        if self.guard.operation is None and self.allocator() is not None:
            with self.operation("settling"):
                pass
            self.guard.drain()

    def notice_unseen(self) -> torch.Tensor | None:
        """The mapping, where it was written behind the seams; free lists are taken over at once."""
        guard = self.guard
        changed = self.steps.changed() if self.steps is not None else None
        for number, pool in enumerate(self.pools):
            # By none of the list's methods: those leave it as expected.
            if changed is not None:
                unseen = changed >> number & 1 == 1
            else:
                unseen = pool.state.get("free_pages", pool.hidden) is not pool.expected
            if unseen:
                guard.backlog.settle()
                guard.resync(pool.ledger, free_list(pool.pool()))
        mapping: torch.Tensor = self.state["full_to_swa_index_mapping"]
        if not guard.map.unseen_writes(mapping):
            return None
        if self.trusted_writer and mapping is guard.map.mapping:
            return None  # it only writes zeros, and "no window slot" is always true
        return mapping


class Running:
    """One operation while it runs; see ``AllocatorLink.operation``."""

    __slots__ = ("_before", "_link", "_log", "_name", "_outermost", "_settle")

    def __init__(self, link: AllocatorLink, name: str, settle: bool) -> None:
        self._link = link
        self._name = name
        self._settle = settle

    def __enter__(self) -> bool:
        link = self._link
        guard = link.guard
        self._outermost = guard.operation is None
        if not self._outermost:
            if self._settle and not guard.backlog.empty:
                guard.backlog.settle()
            return False
        guard.begin(self._name, caller())
        try:
            mapping = link.notice_unseen()
            if link.strict:
                self._before = Snapshot(link)
                self._log = guard.undo.open()
            elif self._settle and not guard.backlog.empty:
                guard.backlog.settle()
            if mapping is not None:
                guard.backlog.settle()
                guard.reconcile(mapping)
        except BaseException as error:
            self._finish(raised=isinstance(error, GuardViolation))
            raise
        return True

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if not self._outermost:
            return
        ours = kind is not None and issubclass(kind, GuardViolation)
        if kind is not None and not ours:
            # The release itself gave up, perhaps over what is noted here: report it before it dies.
            self._link.guard.backlog.settle()
        elif self._link.guard.backlog.long:
            self._link.guard.backlog.settle(wait=False)
        self._finish(raised=ours)

    def _finish(self, *, raised: bool) -> None:
        guard = self._link.guard
        if hasattr(self, "_log"):
            guard.undo.close(self._log)
            if raised:
                self._before.put_back()
                self._log.roll_back()
        self._link.close()


class PoolLink:
    """What the hooks know about one sub-allocator.

    ``state`` is the sub-allocator's own attribute dictionary. ``expected`` is the free list that
    the next operation must find there. While pages are held back the list is taken out of the
    dictionary and kept here, so that whoever asks for it comes to ``page_pool.FreePages``; at all
    other times the attribute is an ordinary one and costs nothing.
    """

    def __init__(self, owner: AllocatorLink, pool: Any, ledger: PageLedger) -> None:
        self.owner = owner
        self.guard = owner.guard
        self.pool = weakref.ref(pool)
        self.ledger = ledger
        self.is_window = ledger is owner.guard.window
        self.state = vars(pool)
        self.expected = self.state["free_pages"]
        self.hidden: torch.Tensor | None = None

    def accept_list(self) -> None:
        """The free list was replaced, and is as it should be."""
        if self.owner.steps is not None:
            self.owner.steps.accept(int(self.is_window))
        else:
            self.expected = self.listed

    def hide(self) -> None:
        """Take the free list out of sight, and the count of free pages with it."""
        listed = self.state.pop("free_pages", None)
        if listed is not None:
            self.hidden = self.expected = listed
            self.state["available_size"] = self._count_with_held

    def reveal(self) -> torch.Tensor:
        """Put the free list back in its place, and return it."""
        if self.hidden is not None:
            # What somebody assigned meanwhile is newer.
            self.state.setdefault("free_pages", self.hidden)
            self.state.pop("available_size", None)
            self.hidden = None
        listed: torch.Tensor = self.state["free_pages"]
        return listed

    @property
    def listed(self) -> torch.Tensor:
        """The free list as it is, wherever it is kept."""
        found: torch.Tensor = self.state.get("free_pages", self.hidden)
        return found

    def count_free(self) -> int:
        """Pages in the free list, by the host's own count."""
        if self.hidden is not None:
            return count_free({"free_pages": self.hidden, **self.state})
        return count_free(self.state)

    def _count_with_held(self) -> int:
        """Stands in for ``available_size``: slots on their way through the backlog count as free.

        Outside an operation a CPU answers after settling them.
        """
        guard = self.guard
        if guard.operation is None and guard.device.type == "cpu":
            with self.owner.operation("a count of free pages"):
                pass
        size = self.count_free() * self.ledger.page_size + guard.backlog.held_slots(self.ledger)
        # More than there is can only be held by a free that is wrong; it is found when it settles.
        return min(size, int(self.state["size"]))


def count_free(state: Mapping[str, Any]) -> int:
    """Free pages in the attributes of a sub-allocator, by the host's own count."""
    waiting: int | None = state.get("num_staged_pages")
    if waiting is None:
        waiting = state["release_pages"].shape[0]
    return int(state["free_pages"].shape[0]) + waiting


def free_list(pool: Any) -> torch.Tensor:
    """Every free page id of a sub-allocator (int64), in any of its containers."""
    parts = [vars(pool)[ATTRIBUTE].listed]
    if getattr(pool, "release_pages", None) is not None:
        parts.append(pool.release_pages)
    parts += getattr(pool, "staged_pages", [])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


class Snapshot:
    """The host-side attributes of an allocator and its sub-allocators, by reference.

    SGLang replaces these tensors and never writes into them, so references are enough.
    """

    _ATTRIBUTES = (
        "free_pages",
        "release_pages",
        "staged_pages",
        "num_staged_pages",
        "is_not_in_free_group",
        "free_group",
        "free_page_ids_group",
        "free_page_reps_group",
        "swa_free_group",
        "swa_page_ids_group",
        "full_free_group",
    )

    def __init__(self, link: AllocatorLink) -> None:
        self._saved: list[tuple[Any, str, Any]] = []
        for holder in (link.allocator(), *(pool.pool() for pool in link.pools)):
            for name in self._ATTRIBUTES:
                if name in vars(holder):
                    value = getattr(holder, name)
                    kept = list(value) if isinstance(value, list) else value
                    self._saved.append((holder, name, kept))

    def put_back(self) -> None:
        for holder, name, value in self._saved:
            setattr(holder, name, value)


_links: weakref.WeakSet[AllocatorLink] = weakref.WeakSet()


def all_links() -> list[AllocatorLink]:
    """The links of every guarded allocator that is alive."""
    return list(_links)


def link_of(holder: Any) -> Any:
    """The link of an SGLang object, or None where it is not guarded."""
    return holder.__dict__.get(ATTRIBUTE)


def caller() -> FrameType:
    """The nearest frame outside the adapters: the place in the caller's code."""
    frame: FrameType = sys._getframe(2)
    while frame.f_globals["__name__"].startswith(_ADAPTERS) and frame.f_back is not None:
        frame = frame.f_back
    return frame
