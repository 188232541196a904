"""The smallest contracts: modes, errors, reports, journal, undo. No SGLang needed."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from hicache_guard.core.errors import ConfigError, GuardViolation
from hicache_guard.core.faults import FACTS, Fault
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.journal import Journal, acting_for
from hicache_guard.core.ledger import FREED
from hicache_guard.core.modes import Mode
from hicache_guard.core.report import Violation
from hicache_guard.core.undo import UndoLogs


def _guard(mode: Mode, reports: list[Violation] | None = None, page_size: int = 4) -> PoolGuard:
    mapping = torch.cat([torch.zeros(64 + page_size), torch.tensor([-1.0])]).to(torch.int64)
    return PoolGuard(
        mode,
        full_slots=64,
        window_slots=32,
        page_size=page_size,
        mapping=mapping,
        on_report=None if reports is None else reports.append,
    )


def _allocate(guard: PoolGuard, request: str, pages: list[int]) -> None:
    with acting_for(request):
        guard.begin("alloc", inspect.currentframe())  # type: ignore[arg-type]
        guard.hand_out(guard.full, torch.tensor(pages))
        guard.hand_out(guard.window, torch.tensor(pages))
        slots = torch.cat([torch.arange(page * 4, page * 4 + 4) for page in pages])
        guard.mapped(slots, slots)
        guard.map.mapping[slots] = slots
        guard.end()


@pytest.mark.parametrize("text", ["", "on", "STRICT!", "0"])
def test_unknown_mode_names_the_choices(text: str) -> None:
    with pytest.raises(ConfigError, match="off, observe, enforce, strict"):
        Mode.parse(text)


def test_mode_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HICACHE_GUARD", raising=False)
    assert Mode.from_environment() is Mode.OFF
    monkeypatch.setenv("HICACHE_GUARD", " Enforce ")
    assert Mode.from_environment() is Mode.ENFORCE


def test_every_fault_has_its_facts() -> None:
    assert set(FACTS) == set(Fault)


def test_error_carries_slot_page_generations_request_and_history() -> None:
    guard = _guard(Mode.STRICT)
    _allocate(guard, "request 1", [2, 3])
    with acting_for("request 1"):
        guard.begin("free", inspect.currentframe())  # type: ignore[arg-type]
        guard.released(guard.full, torch.tensor([8, 12]))
        guard.end()
    with acting_for("request 2"):
        guard.begin("free", inspect.currentframe())  # type: ignore[arg-type]
    with pytest.raises(GuardViolation) as raised:
        guard.vet_slots(torch.tensor([8, 9, 12]), segment=False)
    violation = raised.value.violation
    assert violation.fault is Fault.DOUBLE_FREE
    assert (violation.pool, violation.slot, violation.page, violation.slots) == ("full", 8, 2, 3)
    assert violation.request == "request 2"
    assert violation.found is not None
    assert "freed in" in violation.found
    assert "request 1" in violation.found
    text = str(raised.value)
    assert "freed by #2 free for request 1" in text
    assert "allocated by #1 alloc for request 1" in text
    assert "test_guard_basics.py" in text
    assert "#40305" in text


def test_a_violation_is_counted_once_an_operation() -> None:
    reports: list[Violation] = []
    guard = _guard(Mode.OBSERVE, reports)
    guard.begin("free", inspect.currentframe())  # type: ignore[arg-type]
    guard.vet_slots(torch.tensor([8]), segment=False)
    guard.vet_slots(torch.tensor([12]), segment=False)
    guard.end()
    assert [report.fault for report in reports] == [Fault.DOUBLE_FREE]
    assert guard.tally.total == 1


def test_journal_is_bounded_in_operations_and_in_pages_held() -> None:
    journal = Journal(max_operations=8, max_held_pages=200)
    frame = inspect.currentframe()
    assert frame is not None
    for serial in range(1, 51):
        operation = journal.open(serial, "alloc", frame)
        journal.touch("allocated", "full", torch.arange(30), [operation], [30])
    assert len(journal) == 8
    held = sum(touch.pages.numel() for touch in journal._touches)
    assert 30 <= held <= 200
    assert journal.find(50) is not None
    assert journal.find(1) is None


def test_undo_puts_back_repeated_writes_in_reverse() -> None:
    logs = UndoLogs()
    values = torch.arange(5)
    log = logs.open()
    for new in (10, 20):
        index = torch.tensor([1, 3])
        logs.save(values, index)
        values.index_fill_(0, index, new)
    logs.close(log)
    logs.save(values, torch.tensor([0]))  # closed: keeps nothing
    log.roll_back()
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_rebase_keeps_what_is_proved_and_only_that() -> None:
    """After 2**30 operations. Mutation: clamp every stamp instead of forgetting the stale ones."""
    guard = _guard(Mode.OBSERVE)
    guard.serial = FREED - 6
    _allocate(guard, "kept", [1])
    _allocate(guard, "stale", [2])
    guard.begin("free", inspect.currentframe())  # type: ignore[arg-type]
    guard.released(guard.window, torch.tensor([8]))
    guard.hand_out(guard.window, torch.tensor([2]))  # recycled: the entries of "stale" are stale
    guard.end()
    rows = torch.arange(4, 12)
    before = guard.map.proved(rows, guard.map.mapping[rows]).tolist()
    assert before == [True] * 4 + [False] * 4
    guard.serial = FREED - 2
    guard.begin("anything", inspect.currentframe())  # type: ignore[arg-type]
    guard.end()
    assert guard.serial < FREED // 2 + 16
    assert guard.map.proved(rows, guard.map.mapping[rows]).tolist() == before
    assert int((guard.full.born < FREED).sum()) == 2


@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 256])
def test_memory_stays_within_16_bytes_a_slot_at_10_million(page_size: int) -> None:
    full = 10_000_000 // page_size * page_size
    window = 1_000_000 // page_size * page_size
    guard = PoolGuard(
        Mode.OBSERVE,
        full_slots=full,
        window_slots=window,
        page_size=page_size,
        mapping=torch.zeros(full + page_size + 1, dtype=torch.int64),
    )
    assert guard.nbytes() <= 16 * (full + window)


def test_a_padding_page_that_was_handed_out_stays_nobodys() -> None:
    """Observe lets page -1 be handed out; what is freed of it must not be followed as a row."""
    mapping = torch.zeros(16 + 4 + 1, dtype=torch.int64)
    mapping[-1] = -1
    guard = PoolGuard(Mode.OBSERVE, full_slots=16, window_slots=16, page_size=4, mapping=mapping)
    guard.begin("alloc", sys._getframe())
    guard.full.hand_out(guard.full.pages_of(torch.tensor([-4])), guard.serial)
    vetted = guard.vet_slots(torch.tensor([-4, -3, -2, -1]), segment=False)
    assert bool(vetted.bad.all())
