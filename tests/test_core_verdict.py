"""Verdicts on their way from a device: when they are read, in which order, and what they say."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_guard.core import guard as guard_module
from hicache_guard.core import verdict as verdict_module
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.faults import Fault
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.modes import Mode
from hicache_guard.core.report import Violation
from hicache_guard.core.verdict import HostCopy, Suspicion, Verdict, Vetted

QUICK = settings(deadline=None, derandomize=True, max_examples=60)


class Late(HostCopy):
    """A copy that arrives when it is told to, or when somebody waits for it."""

    made: ClassVar[list[Late]] = []

    def __init__(self, source: torch.Tensor) -> None:
        super().__init__(source)
        self.here = False
        self.waited_for = 0
        Late.made.append(self)

    def arrived(self) -> bool:
        return self.here

    def wait(self) -> None:
        self.waited_for += not self.here
        self.here = True

    def values(self) -> list[int]:
        assert self.here, "read before it had arrived"
        return super().values()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Late]]:
    """Copies arrive late in this test; the list of those that were made."""
    monkeypatch.setattr(verdict_module, "HostCopy", Late)
    Late.made.clear()
    yield Late.made
    Late.made.clear()


def _guard(mode: Mode, reports: list[Violation] | None = None) -> PoolGuard:
    mapping = torch.zeros(64 + 4 + 1, dtype=torch.int64)
    guard = PoolGuard(
        mode,
        full_slots=64,
        window_slots=32,
        page_size=4,
        mapping=mapping,
        on_report=None if reports is None else reports.append,
    )
    guard.lazy = False
    return guard


def _judge(guard: PoolGuard, slot: int, fault: Fault = Fault.DOUBLE_FREE) -> int | None:
    """One operation with one check that finds ``slot`` bad (or nothing, for slot 0)."""
    guard.begin("free", inspect.currentframe())  # type: ignore[arg-type]
    bad = torch.tensor([slot > 0])
    verdict = Verdict(bad, torch.tensor([slot]), [Suspicion(fault, lambda: bad)])
    try:
        return guard.judge(verdict, guard.full)
    finally:
        guard.end()


@QUICK
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_findings_count_each_kind_and_name_its_first(masks: list[tuple[bool, bool]]) -> None:
    slots = torch.arange(100, 100 + len(masks))
    kinds = (Fault.DOUBLE_FREE, Fault.STALE_MAPPING)
    columns = [torch.tensor([mask[kind] for mask in masks]) for kind in (0, 1)]
    verdict = Verdict(
        columns[0] | columns[1],
        slots,
        [
            Suspicion(kind, partial(torch.clone, mask))
            for kind, mask in zip(kinds, columns, strict=True)
        ],
        found=slots + 1000,
        other=slots + 2000,
    )
    assert verdict.arrived()
    assert verdict.count == sum(a or b for a, b in masks)
    found = {finding.fault: finding for finding in verdict.findings()}
    for position, kind in enumerate(kinds):
        bad = [100 + index for index, mask in enumerate(masks) if mask[position]]
        assert (kind in found) == bool(bad)
        if bad:
            facts = found[kind]
            assert (facts.count, facts.slot) == (len(bad), bad[0])
            assert (facts.found, facts.expected, facts.other) == (bad[0] + 1000, -1, bad[0] + 2000)


@QUICK
@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_keep_leaves_out_what_is_bad(bad: list[bool]) -> None:
    vetted = Vetted(torch.tensor(bad))
    assert vetted.count == sum(bad)
    kept = vetted.keep(torch.arange(len(bad))).tolist()
    assert kept == [index for index, wrong in enumerate(bad) if not wrong]


def test_a_mask_is_computed_only_where_something_is_bad() -> None:
    asked: list[int] = []

    def mask() -> torch.Tensor:
        asked.append(1)
        return torch.tensor([True])

    guard = _guard(Mode.OBSERVE)
    for bad in (False, True):
        guard.begin("free", inspect.currentframe())  # type: ignore[arg-type]
        suspicion = Suspicion(Fault.DOUBLE_FREE, mask)
        guard.judge(Verdict(torch.tensor([bad]), torch.tensor([8]), [suspicion]), guard.full)
        guard.end()
        assert len(asked) == bad


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.ENFORCE])
def test_nothing_is_waited_for_while_nothing_arrives(late: list[Late], mode: Mode) -> None:
    guard = _guard(mode)
    assert [_judge(guard, 8) for _ in range(50)] == [None] * 50
    assert sum(copy.waited_for for copy in late) == 0
    assert guard.tally.waits == 0
    assert guard.tally.total == 0


def test_reports_come_in_the_order_of_the_checks(late: list[Late]) -> None:
    reports: list[Violation] = []
    guard = _guard(Mode.OBSERVE, reports)
    for slot in (8, 12, 0, 16):
        _judge(guard, slot)
    late[1].here = late[3].here = True  # the second and the last answer are the first to come
    guard.poll()
    assert reports == []
    late[0].here = True
    guard.poll()  # starts the copy of the first one's facts, and does not wait for it
    assert reports == []
    for copy in late:
        copy.here = copy.here or copy not in late[:4]
    for _ in range(4):
        guard.poll()
        for copy in late[4:]:
            copy.here = True
    assert [report.slot for report in reports] == [8, 12]  # the third has not come
    late[2].here = True
    for _ in range(3):
        guard.poll()
        for copy in late[4:]:
            copy.here = True
    assert [report.slot for report in reports] == [8, 12, 16]
    assert sum(copy.waited_for for copy in late) == 0


def test_a_late_report_names_the_operation_that_was_checked(late: list[Late]) -> None:
    reports: list[Violation] = []
    guard = _guard(Mode.OBSERVE, reports)
    _judge(guard, 8)
    for _ in range(3):
        _judge(guard, 0)
    guard.drain()
    assert [report.operation.split()[0] for report in reports] == ["#1"]


def test_drain_reports_everything(late: list[Late]) -> None:
    reports: list[Violation] = []
    guard = _guard(Mode.ENFORCE, reports)
    for slot in (8, 0, 12):
        _judge(guard, slot)
    guard.drain()
    assert [report.slot for report in reports] == [8, 12]
    guard.drain()
    assert len(reports) == 2


def test_verdicts_under_way_are_bounded(late: list[Late], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "MAX_VERDICTS_UNDER_WAY", 5)
    guard = _guard(Mode.OBSERVE)
    for _ in range(40):
        _judge(guard, 0)
    outstanding = sum(not copy.here for copy in late)
    assert outstanding <= 6
    assert guard.tally.waits >= 30


def test_strict_waits_and_raises_in_the_operation_itself(late: list[Late]) -> None:
    guard = _guard(Mode.STRICT)
    assert _judge(guard, 0) == 0
    with pytest.raises(GuardViolation) as raised:
        _judge(guard, 8)
    assert raised.value.violation.slot == 8
    assert guard.tally.waits >= 2
