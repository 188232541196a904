"""``PageLedger`` against the same thing in plain Python, for every sequence of operations."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_guard.core.ledger import FREED, PageLedger
from hicache_guard.core.undo import UndoLogs

PAGES = 9
QUICK = settings(deadline=None, derandomize=True, max_examples=80)


def _ledger(page_size: int) -> PageLedger:
    return PageLedger("full", PAGES, page_size, torch.device("cpu"), UndoLogs())


def _pages(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


page_lists = st.lists(st.integers(0, PAGES + 1), min_size=1, max_size=12)
sizes = st.sampled_from([1, 4, 16])


@QUICK
@given(st.lists(st.tuples(st.booleans(), page_lists), max_size=20), sizes)
def test_a_generation_is_the_serial_of_the_last_change(
    changes: list[tuple[bool, list[int]]], page_size: int
) -> None:
    ledger = _ledger(page_size)
    expected = dict.fromkeys(range(PAGES + 2), FREED)
    for serial, (out, pages) in enumerate(changes, start=1):
        if out:
            ledger.hand_out(_pages(pages), serial)
        else:
            ledger.release(_pages(pages), serial)
        expected.update(dict.fromkeys(pages, serial if out else FREED + serial))
    assert ledger.generations(_pages(list(expected))).tolist() == list(expected.values())


@QUICK
@given(page_lists)
def test_hand_out_with_a_serial_for_each_page(pages: list[int]) -> None:
    ledger, distinct = _ledger(4), list(dict.fromkeys(pages))
    serials = torch.arange(7, 7 + len(distinct), dtype=torch.int32)
    ledger.hand_out(_pages(distinct), serials)
    assert ledger.generations(_pages(distinct)).tolist() == serials.tolist()


@QUICK
@given(st.lists(st.integers(-40, 400), min_size=1, max_size=30), sizes, st.booleans())
def test_pages_of_any_index_is_a_page_of_the_ledger(
    slots: list[int], page_size: int, narrow: bool
) -> None:
    dtype = torch.int32 if narrow else torch.int64
    got = _ledger(page_size).pages_of(torch.tensor(slots, dtype=dtype))
    assert got.dtype == torch.int64
    assert got.tolist() == [min(max(slot // page_size, 0), PAGES + 1) for slot in slots]


@QUICK
@given(page_lists, page_lists)
def test_repeated_leaves_one_of_each_page(before: list[int], pages: list[int]) -> None:
    ledger = _ledger(4)
    ledger.repeated(_pages(before))  # what an earlier call left behind must not matter
    mask = ledger.repeated(_pages(pages)).tolist()
    kept = [page for page, again in zip(pages, mask, strict=True) if not again]
    assert sorted(kept) == sorted(set(pages))


frees = st.lists(st.integers(4, 4 * (PAGES + 1) - 1), min_size=1, max_size=10)


@QUICK
@given(st.lists(frees, min_size=1, max_size=6), frees)
def test_later_part_is_what_starts_where_the_last_free_ended(
    earlier: list[list[int]], now: list[int]
) -> None:
    ledger, reach = _ledger(4), dict.fromkeys(range(PAGES + 2), 0)
    for slots in earlier:
        ledger.note_named(_pages(slots), ledger.pages_of(_pages(slots)))
        touched = {slot // 4 for slot in slots}
        reach.update({p: max(s % 4 for s in slots if s // 4 == p) + 1 for p in touched})
    mask = ledger.later_part(_pages(now), ledger.pages_of(_pages(now))).tolist()
    first = {slot // 4: min(s % 4 for s in now if s // 4 == slot // 4) for slot in now}
    assert mask == [0 < reach[slot // 4] <= first[slot // 4] for slot in now]


def test_a_page_named_whole_has_no_later_part() -> None:
    ledger = _ledger(4)
    ledger.note_named(_pages([8]), _pages([2]))
    assert ledger.later_part(_pages([9]), _pages([2])).tolist() == [True]
    ledger.name_whole(_pages([2]))
    assert ledger.later_part(_pages([9]), _pages([2])).tolist() == [False]


def test_one_slot_pages_have_no_parts() -> None:
    ledger = _ledger(1)
    ledger.note_named(_pages([2]), _pages([2]))
    assert ledger.later_part(_pages([2]), _pages([2])).tolist() == [False]


@QUICK
@given(page_lists, st.integers(1, PAGES + 4))
def test_reset_frees_every_page_at_a_new_size(pages: list[int], size: int) -> None:
    ledger = _ledger(4)
    ledger.hand_out(_pages(pages), 3)
    ledger.note_named(_pages([8]), _pages([2]))
    ledger.reset(size, 5)
    assert ledger.outside == size + 1
    everything = torch.arange(size + 2)
    assert ledger.generations(everything).tolist() == [FREED + 5] * (size + 2)
    slots = (everything * 4 + 3)[1:-1]
    assert not ledger.later_part(slots, ledger.pages_of(slots)).any()
    assert not ledger.repeated(everything).any()


@QUICK
@given(st.lists(st.tuples(st.booleans(), page_lists), max_size=30), st.integers(0, 25))
def test_rebase_keeps_order_and_liveness(changes: list[tuple[bool, list[int]]], shift: int) -> None:
    ledger = _ledger(4)
    for serial, (out, pages) in enumerate(changes, start=1):
        (ledger.hand_out if out else ledger.release)(_pages(pages), serial)
    before = ledger.born.tolist()
    ledger.rebase(shift)
    after = ledger.born.tolist()
    for old, new in zip(before, after, strict=True):
        assert (old >= FREED) == (new >= FREED)
        assert new % FREED == max(old % FREED - shift, 1)
