"""The lock ledger by itself: legal sequences are quiet, and each drift is told from the others.

Mutations that these tests find: a release that ends no lock, or any lock of the node; an early
release that keeps the lock where it was; ``AGAIN`` not asked before another's lock is taken; a
receipt of one node that ends a lock on another; a lost receipt that ends one of several different
locks; a bound that never forgets, or forgets without saying so.
"""

from __future__ import annotations

import inspect
import random
from types import FrameType

import pytest

from hicache_guard.core import locks
from hicache_guard.core.faults import FACTS, Fault
from hicache_guard.core.journal import acting_for
from hicache_guard.core.locks import (
    ABSENT,
    Call,
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
from hicache_guard.core.report import Violation
from hicache_guard.core.tally import Tally

SOME = frozenset({7, 8})


def _frame(up: int = 1) -> FrameType:
    """The frame that called this one, or the one that called that."""
    frame = inspect.currentframe()
    for _ in range(up):
        assert frame is not None
        frame = frame.f_back
    assert frame is not None
    return frame


def acquire(
    ledger: LockLedger, node: int, boundary: object = 5, skipped: frozenset[int] = locks.NOTHING
) -> Lock:
    return ledger.acquire(node, boundary, ledger.call("acquire", _frame(2)), skipped)


def release(
    ledger: LockLedger,
    node: int,
    boundary: object = 5,
    part: Part = Part.WHOLE,
    *,
    skipped: frozenset[int] = locks.NOTHING,
    bound: Lock | None = None,
    anchor: int | None = None,
) -> Lock | Drift:
    call = ledger.call("release", _frame(2))
    return ledger.release(node, boundary, call, part, skipped, bound, anchor)


def drift(found: Lock | Drift) -> Drift:
    assert isinstance(found, Drift), "a release without its acquire was let through"
    return found


def test_random_legal_locks_are_quiet() -> None:
    dice = random.Random(1)
    ledger = LockLedger()
    held: list[tuple[Lock, bool]] = []
    for _ in range(5000):
        choice = dice.random()
        if choice < 0.5 or not held:
            boundary = dice.choice([None, 1, 2, ABSENT])
            held.append((acquire(ledger, dice.randrange(4), boundary), False))
            continue
        index = dice.randrange(len(held))
        lock, early = held[index]
        if choice < 0.65 and not early:
            assert isinstance(release(ledger, lock.node, lock.boundary, Part.WINDOW), Lock)
            # Of equal locks the ledger may have taken another one.
            held[index] = (lock, True)
            continue
        held.pop(index)
        part = Part.WITHOUT_WINDOW if early else Part.WHOLE
        found = release(ledger, lock.node, lock.boundary, part)
        assert isinstance(found, Lock)
        assert found.released is not None
        assert ledger.held == len(held) == sum(1 for _ in ledger.locks())


def test_a_release_without_an_acquire() -> None:
    ledger = LockLedger()
    acquire(ledger, 1)
    assert drift(release(ledger, 2)).kind is Kind.NEVER_TAKEN
    assert ledger.held == 1


def test_released_again_with_all_three_places() -> None:
    ledger = LockLedger()
    with acting_for("A"):
        acquire(ledger, 1)
        release(ledger, 1)
    with acting_for("B"):
        found = drift(release(ledger, 1))
    assert found.kind is Kind.AGAIN
    text = str(drift_violation(found))
    lines = [line for line in text.splitlines() if __file__ in line]
    assert "release for B" in lines[0]
    assert "last released by release for A" in lines[1]
    assert "acquired by acquire for A" in lines[2]
    assert len({line.rpartition(":")[2] for line in lines}) == 3
    assert all(f"#{number}" in text for number in FACTS[Fault.LOCK_DRIFT].reports)


def test_a_receipt_that_was_used_before_leaves_an_equal_lock_alone() -> None:
    ledger = LockLedger()
    mine, others = acquire(ledger, 1), acquire(ledger, 1)
    used = release(ledger, 1)
    assert isinstance(used, Lock)
    found = drift(release(ledger, 1, bound=used))
    assert found.kind is Kind.AGAIN
    assert found.lock is None
    assert ledger.held == 1
    assert found.holders == (mine if used is others else others,)


def test_of_equal_locks_the_one_of_the_same_request_ends() -> None:
    ledger = LockLedger()
    for name in "ABC":
        with acting_for(name):
            acquire(ledger, 1)
    for name in "BAC":
        with acting_for(name):
            found = release(ledger, 1)
        assert isinstance(found, Lock)
        assert found.acquired.request == name


@pytest.mark.parametrize("lost", [None, ABSENT])
def test_a_lost_receipt_means_the_only_lock(lost: object) -> None:
    ledger = LockLedger()
    lock = acquire(ledger, 1, 5)
    found = drift(release(ledger, 1, lost))
    assert found.kind is Kind.OTHER_BOUNDARY
    assert found.lock is lock
    ledger.settle(found)
    assert ledger.held == 0
    assert lock.released is found.call


def test_a_lost_receipt_means_none_of_different_locks() -> None:
    ledger = LockLedger()
    acquire(ledger, 1, 5)
    acquire(ledger, 1, 6)
    found = drift(release(ledger, 1, None))
    assert found.kind is Kind.OTHER_BOUNDARY
    assert found.lock is None
    assert found.held == 2


def test_another_boundary_means_nobody_s_lock() -> None:
    ledger = LockLedger()
    acquire(ledger, 1, 5)
    found = drift(release(ledger, 1, 6))
    assert found.kind is Kind.OTHER_BOUNDARY
    assert found.lock is None


def test_a_receipt_of_another_node() -> None:
    ledger = LockLedger()
    mine, _ = acquire(ledger, 1), acquire(ledger, 2)
    for bound, anchor in ((None, 1), (mine, 1), (mine, None)):
        found = drift(release(ledger, 2, bound=bound, anchor=anchor))
        assert found.kind is Kind.OTHER_NODE
        assert found.lock is mine
    assert drift(release(ledger, 2, anchor=3)).lock is None
    assert ledger.held == 2


def test_the_window_part_is_released_once() -> None:
    ledger = LockLedger()
    lock = acquire(ledger, 1)
    assert release(ledger, 1, part=Part.WINDOW) is lock
    again = drift(release(ledger, 1, part=Part.WINDOW))
    assert again.kind is Kind.WINDOW_AGAIN
    ledger.settle(again)
    ledger.keep_window(again)
    whole = drift(release(ledger, 1))
    assert whole.kind is Kind.WINDOW_AGAIN
    assert whole.lock is lock
    assert "window part released by release" in str(drift_violation(whole))
    assert release(ledger, 1, part=Part.WITHOUT_WINDOW) is lock
    assert ledger.held == 0
    assert drift(release(ledger, 1, part=Part.WINDOW)).kind is Kind.AGAIN


def test_a_window_part_that_was_never_released() -> None:
    ledger = LockLedger()
    lock = acquire(ledger, 1)
    found = drift(release(ledger, 1, part=Part.WITHOUT_WINDOW))
    assert found.kind is Kind.WINDOW_FORGOTTEN
    assert found.lock is lock


def test_a_window_part_that_the_guard_kept_is_no_fault_of_the_caller() -> None:
    ledger = LockLedger()
    lock = acquire(ledger, 1, skipped=SOME)
    early = drift(release(ledger, 1, part=Part.WINDOW))
    assert early.kind is Kind.SKIPPED
    ledger.keep_window(early)
    found = drift(release(ledger, 1, part=Part.WITHOUT_WINDOW, skipped=SOME))
    assert found.kind is Kind.WITHHELD
    assert found.lock is lock


def test_an_early_release_that_is_made_all_the_same_ends_the_window_part() -> None:
    ledger = LockLedger()
    lock = acquire(ledger, 1, skipped=SOME)
    early = drift(release(ledger, 1, part=Part.WINDOW))
    ledger.settle(early)
    assert lock.window_released is early.call
    assert release(ledger, 1, part=Part.WITHOUT_WINDOW, skipped=SOME) is lock


def test_what_an_acquire_skipped_its_release_skips() -> None:
    ledger = LockLedger()
    acquire(ledger, 1, skipped=SOME)
    found = drift(release(ledger, 1))
    assert found.kind is Kind.SKIPPED
    assert "skipped nodes 7, 8" in str(drift_violation(found))
    assert isinstance(release(ledger, 1, skipped=SOME), Lock)


def test_a_flush_ends_all_locks_and_is_remembered() -> None:
    ledger = LockLedger()
    lock = acquire(ledger, 1)
    acquire(ledger, 2)
    release(ledger, 2, part=Part.WINDOW)
    ledger.flush(ledger.call("reset", _frame()))
    assert ledger.held == 0
    for found in (release(ledger, 1), release(ledger, 1, bound=lock)):
        assert drift(found).kind is Kind.AGAIN
        assert "last released by reset" in str(drift_violation(drift(found)))
    assert isinstance(acquire(ledger, 1), Lock)
    assert isinstance(release(ledger, 1), Lock)


def test_memory_is_bounded_and_what_is_forgotten_is_said() -> None:
    ledger = LockLedger(max_held=10, max_released=10)
    for node in range(10):
        acquire(ledger, node)
    assert not ledger.lossy
    for node in range(100):
        acquire(ledger, node + 10)
        assert ledger.held == sum(1 for _ in ledger.locks()) == 10
    assert ledger.lossy
    for node in range(100, 110):
        assert isinstance(release(ledger, node), Lock)
    assert len(ledger._ended) == 10
    assert not ledger._whole
    assert not ledger._early
    ledger.flush(ledger.call("reset", _frame()))
    assert not ledger.lossy


def test_locks_that_nobody_released_are_listed() -> None:
    ledger = LockLedger()
    held = [acquire(ledger, node) for node in range(7)]
    violation = held_violation(held, ledger.call("sanity_check", _frame()))
    text = str(violation)
    assert text.count("acquired by acquire") == 4
    assert "and 3 more" in text
    assert violation.node == 0


def test_reports_are_counted_beyond_those_logged(caplog: pytest.LogCaptureFixture) -> None:
    ledger, tally = LockLedger(), Tally()
    told: list[Violation] = []
    for _ in range(locks.MAX_REPORTS + 5):
        report(drift_violation(drift(release(ledger, 1))), tally, told.append)
    assert tally.violations[Fault.LOCK_DRIFT] == len(told) == locks.MAX_REPORTS + 5
    assert len(caplog.records) == locks.MAX_REPORTS + 1
    assert all(isinstance(violation, LockViolation) for violation in told)


def test_a_call_names_its_place() -> None:
    ledger = LockLedger()
    first = ledger.call("acquire", _frame())
    second = ledger.call("acquire", _frame())
    assert isinstance(first, Call)
    assert first.serial < second.serial
    assert str(first).startswith("acquire at ")
