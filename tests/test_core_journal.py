"""Journal, undo and modes: bounds that hold, and nothing kept alive that is not meant to be."""

from __future__ import annotations

import inspect
from itertools import accumulate
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_guard.core.journal import Journal, Operation, acting_for
from hicache_guard.core.modes import Mode
from hicache_guard.core.undo import UndoLogs

QUICK = settings(deadline=None, derandomize=True, max_examples=80)


def _frame() -> FrameType:
    frame = inspect.currentframe()
    assert frame is not None
    return frame


@QUICK
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 12), min_size=1), st.booleans()), max_size=40),
    st.integers(1, 7),
)
def test_history_is_the_newest_touches_of_a_page(
    touches: list[tuple[list[int], bool]], at_once: int
) -> None:
    """However many operations are told of together, each page has its own newest, newest first."""
    journal = Journal()
    told: list[tuple[set[int], str]] = []
    together: list[tuple[str, Operation, list[int]]] = []

    def tell() -> None:
        for verb in ("allocated", "freed"):
            parts = [(operation, pages) for said, operation, pages in together if said == verb]
            if parts:
                ends = list(accumulate(len(pages) for _, pages in parts))
                joined = torch.tensor([page for _, pages in parts for page in pages])
                journal.touch(verb, "full", joined, [operation for operation, _ in parts], ends)
        together.clear()

    for serial, (pages, freed) in enumerate(touches, start=1):
        verb = "freed" if freed else "allocated"
        if together and (together[-1][0], verb) == ("freed", "allocated"):
            tell()  # an allocation after frees starts the next batch
        together.append((verb, journal.open(serial, "op", _frame()), pages))
        told.append((set(pages), f"{verb} by #{serial} op"))
        if serial % at_once == 0:
            tell()
    tell()
    for page in range(1, 13):
        expected = [text for pages, text in told if page in pages][::-1][:6]
        got = journal.history("full", page)
        assert [line.split(" at ")[0] for line in got] == expected
        assert journal.history("window", page) == []


def test_a_touch_of_an_operation_that_left_counts_in_the_bound() -> None:
    """Work that was put off touches old operations; what is kept for them is bounded as well."""
    journal = Journal(max_operations=3, max_held_pages=200)
    old = journal.open(1, "old", _frame())
    for serial in range(2, 6):
        journal.open(serial, "new", _frame())
    for _ in range(100):
        journal.touch("freed", "full", torch.arange(20), [old], [20])
    assert sum(touch.pages.numel() for touch in journal._touches) <= 200
    assert journal.history("full", 7)
    for serial in range(6, 9):
        journal.open(serial, "newest", _frame())
        assert journal.find(serial) is not None
    assert len(journal) == 3


def test_names_are_those_of_the_innermost_request() -> None:
    journal = Journal()
    with acting_for("outer"):
        with acting_for("inner"):
            inner = journal.open(1, "free", _frame())
        outer = journal.open(2, "free", _frame())
    nobody = journal.open(3, "free", _frame())
    assert [operation.request for operation in (inner, outer, nobody)] == ["inner", "outer", None]
    assert str(inner).startswith("#1 free for inner at ")
    assert __file__ in str(inner)


@QUICK
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(0, 9), min_size=1, max_size=5)),
        max_size=20,
    ),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_each_log_puts_back_what_was_there_when_it_was_opened(
    writes: list[tuple[int, list[int]]], first: int, second: int
) -> None:
    logs, tensors = UndoLogs(), [torch.arange(10), torch.arange(100, 110)]
    states, opened = {}, {}
    for step, (which, index) in enumerate([*writes, (0, [0])]):
        for name, at in (("first", first), ("second", second)):
            if step == min(at, len(writes)):
                opened[name] = logs.open()
                states[name] = [tensor.tolist() for tensor in tensors]
        rows = torch.tensor(sorted(set(index)))
        logs.save(tensors[which], rows)
        tensors[which].index_fill_(0, rows, -step - 1)
    for name in sorted(opened, key=lambda name: -(first if name == "first" else second)):
        opened[name].roll_back()
        assert [tensor.tolist() for tensor in tensors] == states[name]
        logs.close(opened[name])
    assert not logs


@QUICK
@given(st.sampled_from(list(Mode)), st.booleans(), st.sampled_from(["", " ", "\t", "\n"]))
def test_a_mode_is_read_in_any_case_and_with_space_around(
    mode: Mode, shout: bool, space: str
) -> None:
    text = mode.value.upper() if shout else mode.value
    assert Mode.parse(space + text + space) is mode


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_can_be_chosen_by_the_environment(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_GUARD", mode.value)
    assert Mode.from_environment() is mode
