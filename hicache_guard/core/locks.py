"""The lock ledger: which locks on nodes of a prefix tree are held, by whom, and since which call.

A request locks the path from a node to the root, so that nothing on it is evicted, and of the
window KV on it the part up to a *boundary*: a number that the tree gives to the node where the
window is full, and None where it reaches the root first. The tree counts locks node by node and
cannot say whose they are. A release without its acquire therefore takes away another request's
lock, and that one's KV is evicted while it is read, or the process ends by an assertion much later.
The ledger pairs each release with an acquire by node and boundary, and where the caller hands the
very object over that it was given at the acquire, by that object; of locks that are equal it takes
one that was acquired on behalf of the same request, if that is known.

A node is known by its number. Splitting a node gives the number to its lower part, and a lock stays
at the node that it was taken on.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from types import FrameType
from typing import Any

from hicache_guard.core.faults import FACTS, Fault
from hicache_guard.core.journal import ACTING_FOR, Operation
from hicache_guard.core.report import Report, Violation, tell
from hicache_guard.core.tally import Tally

logger = logging.getLogger("hicache_guard")

#: Locks held at once before old ones are forgotten; nothing is blamed until the next flush then.
MAX_HELD = 65_536
#: Nodes whose last release is remembered.
MAX_RELEASED = 16_384
#: Reports that are logged in full; later ones are only counted.
MAX_REPORTS = 50
#: Equal locks among which one of the same request is looked for.
_EQUALS_SEARCHED = 64
#: Holders of a node that a report names.
_HOLDERS_NAMED = 4

#: What an acquire skips: nothing.
NOTHING: frozenset[int] = frozenset()
#: The boundary of a receipt that says nothing of the window part.
ABSENT = "absent"


class Call(Operation):
    """One call that acquires or releases a lock; ``serial`` orders the calls of one ledger."""

    __slots__ = ()

    def __str__(self) -> str:
        who = f" for {self.request}" if self.request else ""
        return f"{self.name}{who} at {self.file}:{self.line}"


class Lock:
    """One lock. ``receipt`` is what the tree returned for it.

    ``skipped`` are the nodes whose window KV it does not lock, though they are in its range.
    ``window_released`` is the call that released the window part early; ``window_kept`` says that
    such a call was not let through. ``released`` is the call that ended the lock.
    """

    __slots__ = (
        "acquired",
        "boundary",
        "node",
        "receipt",
        "released",
        "skipped",
        "window_kept",
        "window_released",
    )

    def __init__(
        self, node: int, boundary: object, skipped: frozenset[int], receipt: Any, acquired: Call
    ) -> None:
        self.node = node
        self.boundary = boundary
        self.skipped = skipped
        self.receipt = receipt
        self.acquired = acquired
        self.window_released: Call | None = None
        self.window_kept = False
        self.released: Call | None = None


class Part(enum.Enum):
    """What a release ends: the lock, its window part alone, or the lock without that part."""

    WHOLE = enum.auto()
    WINDOW = enum.auto()
    WITHOUT_WINDOW = enum.auto()


# As globals: an attribute of an enum costs as much as the rest of a look-up.
_WHOLE, _WINDOW, _WITHOUT_WINDOW = Part


class Kind(enum.Enum):
    """How a release fails to match an acquire; the values are fragments for reports."""

    NEVER_TAKEN = "no lock on this node is known"
    AGAIN = "the lock was released before"
    OTHER_NODE = "the lock was taken on another node"
    OTHER_BOUNDARY = "the lock was taken with another window boundary"
    SKIPPED = "the lock skipped nodes that hold window KV now, and the release would not"
    WINDOW_AGAIN = "the window part of the lock was released before"
    WINDOW_FORGOTTEN = "the window part of the lock was never released"
    WITHHELD = "the window part is still locked since its early release was not let through"
    HELD = "the tree is idle and the lock is still held"


@dataclass(frozen=True)
class Drift:
    """A release that has no acquire as it stands.

    ``lock`` is the one that must be meant, where that is certain; ``ended`` the last lock on the
    node that was released. ``holders`` are locks on the node, ``held`` is their number.
    """

    kind: Kind
    node: int
    boundary: object
    part: Part
    call: Call
    lock: Lock | None
    ended: Lock | None
    holders: tuple[Lock, ...]
    held: int


@dataclass(frozen=True)
class LockViolation(Violation):
    """A fault of a tree lock: ``node`` and ``why`` stand for slot and page, which it has not."""

    node: int = -1
    why: str = ""

    def __str__(self) -> str:
        facts = FACTS[self.fault]
        lines = [f"{self.fault.value}: {facts.says}: node {self.node}: {self.why}"]
        lines.append(f"  in {self.operation}")
        lines += [f"  {line}" for line in self.history]
        lines.append("  the kind of " + ", ".join(f"#{number}" for number in facts.reports))
        return "\n".join(lines)


_Equals = dict[tuple[int, object], dict[Lock, None]]


class LockLedger:
    """The locks of one tree that are held. ``lossy``: some were forgotten for want of room."""

    def __init__(self, max_held: int = MAX_HELD, max_released: int = MAX_RELEASED) -> None:
        #: By node and boundary: locks with all that they took, and those whose window part ended.
        self._whole: _Equals = {}
        self._early: _Equals = {}
        self._ended: dict[int, Lock] = {}
        self._max_held = max_held
        self._max_released = max_released
        self._serial = 0
        self.held = 0
        self.lossy = False

    def call(self, name: str, caller: FrameType) -> Call:
        """The record of a call that ``caller`` is making."""
        self._serial = serial = self._serial + 1
        fields = (serial, name, ACTING_FOR.get(), caller.f_code, caller.f_lasti)
        return tuple.__new__(Call, fields)

    def acquire(
        self,
        node: int,
        boundary: object,
        call: Call,
        skipped: frozenset[int] = NOTHING,
        receipt: Any = None,
    ) -> Lock:
        """A lock was taken on ``node``."""
        lock = Lock(node, boundary, skipped, receipt, call)
        key = (node, boundary)
        equals = self._whole.get(key)
        if equals is None:
            self._whole[key] = {lock: None}
        else:
            equals[lock] = None
        self.held += 1
        if self.held > self._max_held:
            self._forget_one()
        return lock

    def release(
        self,
        node: int,
        boundary: object,
        call: Call,
        part: Part = Part.WHOLE,
        skipped: frozenset[int] = NOTHING,
        bound: Lock | None = None,
        anchor: int | None = None,
    ) -> Lock | Drift:
        """A lock is about to be released: the one, or what is wrong, and nothing has changed then.

        ``bound`` is the lock that the caller's receipt was used for before, ``anchor`` the node
        that the receipt names. A drift that goes on all the same is to be ``settle``d.
        """
        if bound is None and (anchor is None or anchor == node):
            key = (node, boundary)
            equals = (self._early if part is _WITHOUT_WINDOW else self._whole).get(key)
            if equals:
                lock = next(reversed(equals))
                if call.request is not None and lock.acquired.request != call.request:
                    lock = _of_request(equals, call.request)
                # A window part is released by walking, with no regard to what was skipped.
                if lock.skipped == (NOTHING if part is _WINDOW else skipped):
                    self._end(lock, part, call, key, equals)
                    return lock
        return self._judge(node, boundary, call, part, skipped, bound, anchor)

    def _judge(
        self,
        node: int,
        boundary: object,
        call: Call,
        part: Part,
        skipped: frozenset[int],
        bound: Lock | None,
        anchor: int | None,
    ) -> Lock | Drift:
        kind, lock = self._find(node, boundary, call, part, skipped, bound, anchor)
        if kind is None:
            assert lock is not None, "what matches is a lock"
            self.end(lock, part, call)
            return lock
        holders = [other for other in self.locks() if other.node == node]
        ended = bound if bound is not None and bound.released else self._ended.get(node)
        named = tuple(holders[:_HOLDERS_NAMED])
        return Drift(kind, node, boundary, part, call, lock, ended, named, len(holders))

    def _find(
        self,
        node: int,
        boundary: object,
        call: Call,
        part: Part,
        skipped: frozenset[int],
        bound: Lock | None,
        anchor: int | None,
    ) -> tuple[Kind | None, Lock | None]:
        """What is wrong with a release (None: nothing), and the lock that is meant."""
        if bound is not None and bound.released is not None:
            return Kind.AGAIN, None
        where = node if anchor is None else anchor
        lock = bound if bound is not None else self._candidate(where, boundary, call, part)
        if where != node or (lock is not None and lock.node != node):
            return Kind.OTHER_NODE, lock
        if lock is not None:
            return _fault_of(lock, part, skipped), lock
        ended = self._ended.get(node)
        if ended is not None and ended.boundary == boundary:
            return Kind.AGAIN, None
        others = [other for other in self.locks() if other.node == node]
        if not others:
            return Kind.NEVER_TAKEN, None
        lost = anchor is None and boundary in (None, ABSENT)
        if not lost or len({other.boundary for other in others}) > 1:
            return Kind.OTHER_BOUNDARY, None  # a receipt of something else, or of any of them
        return Kind.OTHER_BOUNDARY, _of_request(dict.fromkeys(others), call.request)

    def _candidate(self, node: int, boundary: object, call: Call, part: Part) -> Lock | None:
        """A lock with this boundary on ``node``, rather one as the release says it is."""
        key = (node, boundary)
        books = [self._whole, self._early]
        if part is _WITHOUT_WINDOW:
            books.reverse()
        for book in books:
            if book.get(key):
                return _of_request(book[key], call.request)
        return None

    def end(self, lock: Lock, part: Part, call: Call) -> None:
        """``call`` releases a part of ``lock``, or the lock."""
        key = (lock.node, lock.boundary)
        book = self._whole if lock.window_released is None else self._early
        self._end(lock, part, call, key, book[key])

    def _end(
        self,
        lock: Lock,
        part: Part,
        call: Call,
        key: tuple[int, object],
        equals: dict[Lock, None],
    ) -> None:
        if len(equals) > 1:
            del equals[lock]
        else:
            del (self._whole if lock.window_released is None else self._early)[key]
        if part is _WINDOW:
            lock.window_released = call
            self._early.setdefault(key, {})[lock] = None
            return
        self.held -= 1
        lock.released = call
        ended = self._ended
        ended[lock.node] = lock
        if len(ended) > self._max_released:
            del ended[next(iter(ended))]

    def settle(self, drift: Drift) -> None:
        """A release that drifts is made all the same; where its lock is known, that one ends."""
        lock = drift.lock
        if drift.kind is Kind.OTHER_NODE:
            return  # what ends is some lock on the other node, and nobody knows whose
        if lock is not None and not (drift.part is _WINDOW and lock.window_released):
            self.end(lock, drift.part, drift.call)

    def keep_window(self, drift: Drift) -> None:
        """An early release that drifts is not let through; the lock keeps its window part."""
        if drift.lock is not None and drift.lock.window_released is None:
            drift.lock.window_kept = True

    def flush(self, call: Call) -> None:
        """The tree was emptied, and with it all locks ended."""
        for lock in list(self.locks()):
            self.end(lock, Part.WHOLE, call)
        self.lossy = False

    def locks(self) -> Iterator[Lock]:
        """All locks that are held."""
        books = chain(self._whole.values(), self._early.values())
        return (lock for equals in books for lock in equals)

    def _forget_one(self) -> None:
        old = next(self.locks())
        self.end(old, Part.WHOLE, old.acquired)
        self.lossy = True


def _of_request(equals: dict[Lock, None], request: str | None) -> Lock:
    """Of equal locks the newest of ``request``, else the newest."""
    newest = next(reversed(equals))
    if request is None:
        return newest
    searched = islice(reversed(equals), _EQUALS_SEARCHED)
    return next((lock for lock in searched if lock.acquired.request == request), newest)


def _fault_of(lock: Lock, part: Part, skipped: frozenset[int]) -> Kind | None:
    """What is wrong where ``lock`` is released so; None: nothing."""
    if part is _WITHOUT_WINDOW and lock.window_released is None:
        return Kind.WITHHELD if lock.window_kept else Kind.WINDOW_FORGOTTEN
    if part is not _WITHOUT_WINDOW and lock.window_released is not None:
        return Kind.WINDOW_AGAIN
    if lock.skipped != (NOTHING if part is _WINDOW else skipped):
        return Kind.SKIPPED
    return None


# -- reports -----------------------------------------------------------------------------------


def drift_violation(drift: Drift) -> LockViolation:
    """A drift in words: this call, the acquire that it may mean, and the last release."""
    lock, ended = drift.lock, drift.ended
    lines = []
    if lock is not None:
        if lock.node != drift.node:
            lines.append(f"of node {lock.node}")
        if lock.boundary != drift.boundary:
            lines.append(f"expected boundary {lock.boundary}, found {drift.boundary}")
        if lock.skipped:
            lines.append(f"its acquire skipped {_listed(lock.skipped)}")
        if lock.window_released is not None:
            lines.append(f"window part released by {lock.window_released}")
    if ended is not None:
        lines.append(f"last released by {ended.released}")
    taken = lock or ended
    if taken is not None:
        whose = "" if taken is lock else " (the one released last)"
        lines.append(f"acquired by {taken.acquired}{whose}")
    others = [holder for holder in drift.holders if holder is not lock]
    lines += [f"also held since {holder.acquired}" for holder in others]
    unnamed = drift.held - len(drift.holders)
    if unnamed:
        lines.append(f"and by {unnamed} more")
    return _violation(drift.node, drift.kind, drift.call, lines)


def held_violation(held: list[Lock], call: Call) -> LockViolation:
    """Locks that nobody released, oldest first, although the tree is idle, as ``call`` says."""
    first, lines = held[0], []
    for lock in held[:_HOLDERS_NAMED]:
        lines.append(f"node {lock.node} acquired by {lock.acquired}")
        if lock.window_released is not None:
            lines.append(f"  window part released by {lock.window_released}")
    if len(held) > _HOLDERS_NAMED:
        lines.append(f"and {len(held) - _HOLDERS_NAMED} more")
    return _violation(first.node, Kind.HELD, call, lines)


def _violation(node: int, kind: Kind, call: Call, history: list[str]) -> LockViolation:
    return LockViolation(
        fault=Fault.LOCK_DRIFT,
        pool="tree",
        slot=-1,
        page=-1,
        slots=0,
        operation=str(call),
        request=call.request,
        history=tuple(history),
        node=node,
        why=kind.value,
    )


def _listed(nodes: frozenset[int]) -> str:
    shown = ", ".join(str(node) for node in sorted(nodes)[:_HOLDERS_NAMED])
    return f"{'node' if len(nodes) == 1 else 'nodes'} {shown}" + (
        ", …" if len(nodes) > _HOLDERS_NAMED else ""
    )


def report(violation: LockViolation, tally: Tally, listener: Report | None) -> None:
    """Count a violation, log it unless there were many, and let whoever listens know."""
    tally.violations[violation.fault] += 1
    seen = tally.violations[violation.fault]
    if seen <= MAX_REPORTS:
        logger.warning("%s", violation)
        if seen == MAX_REPORTS:
            logger.warning("further %s are only counted", violation.fault.value)
    tell(listener, violation)
