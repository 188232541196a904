"""The lock seam of the prefix trees: ``SWARadixCache`` and ``UnifiedRadixCache``.

Only the innermost methods are hooked, through which all others go, so that each lock is seen once:
``lock`` calls ``inc_lock_ref``, ``unlock`` and ``_dec_req_lock`` call ``dec_lock_ref``, and
``release_swa_prefix_lock`` calls ``release_swa``. Every function here stands around the method of
its name.

In enforce mode a release that has no acquire is not made. Where it is certain which lock was meant,
that one is released, by the receipt of its own acquire. An early release of the window part only
makes room sooner, so one that is wrong is left out, and made up for when the lock is released.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from hicache_guard.adapters import state
from hicache_guard.adapters.link import Factory, link_of
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.locks import (
    ABSENT,
    NOTHING,
    Drift,
    Kind,
    Lock,
    LockLedger,
    LockViolation,
    Part,
    drift_violation,
    held_violation,
    report,
)
from hicache_guard.core.modes import Mode
from hicache_guard.core.report import Report

Method = Callable[..., Any]

#: The attribute under which a tree holds its lock ledger.
ATTRIBUTE = "_hicache_guard_locks"
#: The entry under which a receipt holds the lock that it was used for.
_LOCK = "_hicache_guard_lock"

#: ``ComponentType.SWA``, an int as well as an enum member.
_SWA = 1
#: What an acquire skips that leaves the window out: no node has this number.
_ALL = frozenset({-1})

#: Methods that only hand a lock on; whoever calls them is the place that a report names.
_HANDING_ON = frozenset(
    {
        "lock",
        "unlock",
        "_dec_req_lock",
        "release_swa_prefix_lock",
        "inc_lock_ref",
        "dec_lock_ref",
        "dec_swa_lock_only",
        "reset",
    }
)
#: What a tree does by itself and holds locks for while no request runs.
_BACKGROUND = (
    "ongoing_write_through",
    "ongoing_load_back",
    "ongoing_prefetch",
    "ongoing_backup",
    "buffer_pipeline",
    "linker",
)
_TREES = frozenset({"SWARadixCache", "UnifiedRadixCache"})

_WHOLE, _WINDOW, _WITHOUT_WINDOW = Part


class TreeLocks(LockLedger):
    """The lock ledger of one tree, and where its findings go."""

    def __init__(self, guard: PoolGuard, listener: Report | None) -> None:
        super().__init__()
        self.guard = guard
        self.listener = listener
        #: Locks that were reported as still held.
        self.reported: set[Lock] = set()

    def tell(self, violation: LockViolation) -> None:
        """Report a violation, and in strict mode raise it."""
        report(violation, self.guard.tally, self.listener)
        if self.guard.mode is Mode.STRICT:
            raise GuardViolation(violation)


def locks_of(tree: Any) -> TreeLocks | None:
    """The lock ledger of a tree; None where the tree's allocator is not guarded."""
    ledger: TreeLocks | None = tree.__dict__.get(ATTRIBUTE)
    if ledger is None:
        link = link_of(tree.token_to_kv_pool_allocator)
        if link is not None:
            listener = state.settings().listener() if state.is_chosen() else None
            ledger = tree.__dict__[ATTRIBUTE] = TreeLocks(link.guard, listener)
    return ledger


# -- acquires ----------------------------------------------------------------------------------


def _inc_lock_ref(original: Method) -> Method:
    def hooked(tree: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tree, node, *args, **kwargs)
        number = node if node.__class__ is int else getattr(node, "id", None)
        ledger = tree.__dict__.get(ATTRIBUTE) or locks_of(tree)
        if ledger is not None and number is not None:  # a session's stand-in has no number
            frame = sys._getframe(1)
            if frame.f_code.co_name in _HANDING_ON:
                frame = _beyond(frame)
            boundary, skipped = _terms(result.__dict__)
            call = ledger.call("inc_lock_ref", frame)
            ledger.acquire(number, boundary, call, skipped, result)
        return result

    return hooked


inc_lock_ref = Factory(_inc_lock_ref)


# -- releases ----------------------------------------------------------------------------------


def _dec_lock_ref(original: Method) -> Method:
    takes_skip = "skip_swa" in original.__code__.co_varnames
    done: Callable[[], Any] = lambda: original.__globals__["DecLockRefResult"]()  # noqa: E731

    def hooked(tree: Any, node: Any, params: Any = None, *more: Any, **named: Any) -> Any:
        number = node if node.__class__ is int else getattr(node, "id", None)
        ledger = tree.__dict__.get(ATTRIBUTE) or locks_of(tree)
        if ledger is None or number is None:
            return original(tree, node, params, *more, **named)
        frame = sys._getframe(1)
        if frame.f_code.co_name in _HANDING_ON:
            frame = _beyond(frame)
        call = ledger.call("dec_lock_ref", frame)
        part = _WHOLE
        if (more and more[0]) or (named and named.get("skip_swa")):
            part = _WITHOUT_WINDOW
        fields = {} if params is None else params.__dict__
        boundary, skipped = _terms(fields)
        found = ledger.release(
            number,
            boundary,
            call,
            part,
            skipped,
            fields.get(_LOCK),
            fields.get("node_id"),
        )
        if isinstance(found, Lock):
            fields[_LOCK] = found
            return original(tree, node, params, *more, **named)
        if _goes_on(tree, ledger, node, found):
            fields[_LOCK] = found.lock
            return original(tree, node, params, *more, **named)
        lock = found.lock
        if lock is None or (lock.node != number and node.__class__ is not int):
            return done()
        right = {"skip_swa": lock.window_released is not None} if takes_skip else {}
        ledger.end(lock, _WHOLE, call)
        fields[_LOCK] = lock
        where = node if lock.node == number else lock.node
        return original(tree, where, lock.receipt.to_dec_params(), **right)

    return hooked


dec_lock_ref = Factory(_dec_lock_ref)


def dec_swa_lock_only(original: Method, tree: Any, node: Any, *args: Any, **named: Any) -> Any:
    receipt = args[0] if args else named.get("swa_uuid_for_lock", named.get("params"))
    # Up to 0.5.19 the boundary comes alone, and the receipt since.
    fields = getattr(receipt, "__dict__", None)
    terms = {"swa_uuid_for_lock": receipt} if fields is None else fields
    if _may_release_window(tree, node, terms, "dec_swa_lock_only"):
        with _working(tree):
            return original(tree, node, *args, **named)
    return None


def release_swa(original: Method, tree: Any, lock: Any) -> None:
    if lock is None or lock.swa_released:
        original(tree, lock)  # returns at once
    elif _may_release_window(tree, lock.node, lock.receipt.__dict__, "release_swa"):
        with _working(tree):
            original(tree, lock)


def _working(tree: Any) -> AbstractContextManager[None]:
    """A tree may let go of window KV together with its lock: it is the tree's to free."""
    ledger = locks_of(tree)
    return nullcontext() if ledger is None else ledger.guard.tree_working()


def _may_release_window(tree: Any, node: Any, fields: dict[str, Any], name: str) -> bool:
    """Whether the window part of a lock is to be released early, by a receipt with ``fields``."""
    number = node if isinstance(node, int) else getattr(node, "id", None)
    ledger = locks_of(tree)
    if ledger is None or number is None:
        return True
    call = ledger.call(name, _beyond(sys._getframe(2)))
    found = ledger.release(
        number,
        _terms(fields)[0],
        call,
        _WINDOW,
        bound=fields.get(_LOCK),
        anchor=fields.get("node_id"),
    )
    if isinstance(found, Lock):
        fields[_LOCK] = found
        return True
    if _goes_on(tree, ledger, node, found):
        return True
    ledger.keep_window(found)
    return False


def _goes_on(tree: Any, ledger: TreeLocks, node: Any, drift: Drift) -> bool:
    """Report a drift unless it does no harm; whether the release is made as it was asked for."""
    if drift.kind is Kind.WITHHELD:
        return False
    if not _is_harmless(tree, ledger, node, drift):
        ledger.tell(drift_violation(drift))
        if ledger.guard.mode is not Mode.OBSERVE:
            return False
    ledger.settle(drift)
    return True


def _is_harmless(tree: Any, ledger: TreeLocks, node: Any, drift: Drift) -> bool:
    if ledger.lossy or tree.disable:
        return True
    if drift.kind is Kind.SKIPPED:
        assert drift.lock is not None, "what was skipped is known of a lock"
        return not _is_restored(tree, node, drift.lock.skipped)
    return drift.kind is not Kind.OTHER_NODE and _is_root(tree, node)


def _is_root(tree: Any, node: Any) -> bool:
    """Whether ``node`` is the root, which no lock is ever counted on."""
    core = tree.__dict__.get("tree_core")
    if core is None:
        return node is tree.root_node
    try:
        return bool(core.is_root(node))
    except KeyError:  # a node that is no more
        return False


def _is_restored(tree: Any, node: Any, skipped: frozenset[int]) -> bool:
    """Whether a node that an acquire skipped holds window KV now, so that others can lock it."""
    if skipped == _ALL:
        return True
    if isinstance(node, int):
        try:
            node = tree.tree_core.node_by_id(node)
        except NotImplementedError:
            return False  # the rust core shows nobody its nodes
    while node is not None:
        if node.id in skipped and node.component_data[_SWA].value is not None:
            return True
        node = node.parent
    return False


def _terms(fields: dict[str, Any]) -> tuple[object, frozenset[int]]:
    """The window boundary and what is skipped, of a receipt by its ``fields``."""
    boundaries = fields.get("component_lock_uuids")  # since 0.5.21
    if boundaries is None:
        boundary = fields.get("swa_uuid_for_lock")
        by_kind = fields.get("skip_lock_node_ids")  # up to 0.5.19
        if by_kind:
            return boundary, frozenset(by_kind.get(_SWA, ()))
    else:
        boundary = boundaries.get(_SWA, ABSENT)
    if _SWA in fields.get("skipped_lock_components", ()):  # since 0.5.20
        return boundary, _ALL
    return boundary, NOTHING


def _beyond(frame: FrameType) -> FrameType:
    """The nearest frame from here that does more than hand a lock on, or run a hook."""
    while frame.f_back is not None and (
        frame.f_code.co_name in _HANDING_ON
        or frame.f_globals["__name__"].startswith("hicache_guard.adapters.")
    ):
        frame = frame.f_back
    return frame


# -- the tree as a whole -----------------------------------------------------------------------


def flushed(tree: Any) -> None:
    """All locks ended with a flush of the tree; to be called by whoever stands around ``reset``.

    Locks that are still held are no fault: upstream drops those of sessions and of moves to the
    host so. One that is released afterwards is.
    """
    ledger: TreeLocks | None = tree.__dict__.get(ATTRIBUTE)
    if ledger is not None:
        ledger.flush(ledger.call("reset", _beyond(sys._getframe(1))))
        ledger.reported.clear()


def sanity_check(original: Method, tree: Any) -> None:
    """The idle check. Upstream demands that nothing is locked then, but by sessions."""
    ledger: TreeLocks | None = tree.__dict__.get(ATTRIBUTE)
    if ledger is not None and ledger.held and not _may_hold_when_idle(tree):
        # A root cannot be locked, and by its number nobody can tell it from a node.
        held = [lock for lock in ledger.locks() if not _is_root_by_number(tree, lock.node)]
        fresh = [lock for lock in held if lock not in ledger.reported]
        if fresh:
            fresh.sort(key=lambda lock: lock.acquired.serial)
            ledger.reported = set(held)
            call = ledger.call("sanity_check", _beyond(sys._getframe(1)))
            ledger.tell(held_violation(fresh, call))
    original(tree)


def _is_root_by_number(tree: Any, number: int) -> bool:
    if "tree_core" in tree.__dict__:
        return _is_root(tree, number)
    return bool(tree.root_node.id == number)


def _may_hold_when_idle(tree: Any) -> bool:
    """Whether locks are held rightly while no request runs: by sessions, or moves to the host."""
    if type(tree).__name__ not in _TREES:
        return True  # a subclass may keep locks of its own
    session = tree.__dict__.get("session")
    if session is not None and session.any_holding_kv():
        return True
    return any(tree.__dict__.get(name) for name in _BACKGROUND)
