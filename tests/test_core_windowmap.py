"""``WindowMap`` against the oracle's definition of a proved entry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_guard.core.ledger import PageLedger
from hicache_guard.core.undo import UndoLogs
from hicache_guard.core.windowmap import WindowMap
from oracle import Oracle, Rules

FULL, WINDOW = 6, 4
QUICK = settings(deadline=None, derandomize=True, max_examples=150)


@dataclass
class Both:
    """The map and the oracle, told the same things."""

    page_size: int

    def __post_init__(self) -> None:
        size, cpu = self.page_size, torch.device("cpu")
        self.undo = UndoLogs()
        self.full = PageLedger("full", FULL, size, cpu, self.undo)
        self.window = PageLedger("window", WINDOW, size, cpu, self.undo)
        self.mapping = torch.zeros((FULL + 1) * size + 1, dtype=torch.int64)
        self.mapping[-1] = -1
        self.map = WindowMap(self.mapping, self.full, self.window, self.undo)
        self.oracle = Oracle(FULL, WINDOW, Rules.of("0.5.23", size))
        self.serial = 0

    def hand_out(self, side: str, page: int) -> None:
        self.serial += 1
        ledger = self.full if side == "full" else self.window
        pool = self.oracle.full if side == "full" else self.oracle.window
        if not pool.is_live(page):
            pool.hand_out([page], "somebody")
            ledger.hand_out(torch.tensor([page]), self.serial)

    def release(self, side: str, page: int) -> None:
        self.serial += 1
        ledger = self.full if side == "full" else self.window
        pool = self.oracle.full if side == "full" else self.oracle.window
        if pool.is_live(page):
            pool.release([page])
            ledger.release(torch.tensor([page]), self.serial)

    def write(self, row: int, slot: int) -> None:
        """An entry is written; only for live pages, as an allocation or a load-back does."""
        self.serial += 1
        if self.oracle.full.is_live(row // self.page_size) and self.oracle.window.is_live(
            slot // self.page_size
        ):
            self.mapping[row] = slot
            self.map.record(torch.tensor([row]), torch.tensor([slot]), self.serial)
            self.oracle.map(row, slot)

    def verdicts(self) -> tuple[list[bool], list[bool]]:
        rows = torch.arange(self.mapping.numel() - 1)
        got = self.map.proved(rows, self.mapping[:-1]).tolist()
        return got, [self.oracle.proved(row) for row in rows.tolist()]


full_pages, window_pages = st.integers(1, FULL), st.integers(1, WINDOW)
offsets = st.integers(0, 3)
sides = st.sampled_from(["full", "window"])
actions = st.one_of(
    st.tuples(st.sampled_from(["hand_out", "release"]), sides, window_pages),
    st.tuples(st.just("write"), full_pages, window_pages, offsets, offsets),
)


def _play(both: Both, action: tuple[object, ...]) -> None:
    verb, *what = action
    if verb == "write":
        row_page, slot_page, row_offset, slot_offset = (int(str(each)) for each in what)
        size = both.page_size
        both.write(row_page * size + row_offset % size, slot_page * size + slot_offset % size)
    else:
        getattr(both, str(verb))(*what)


@QUICK
@given(st.lists(actions, max_size=40), st.sampled_from([1, 4]))
def test_proved_is_what_the_oracle_calls_proved(
    history: list[tuple[object, ...]], page_size: int
) -> None:
    both = Both(page_size)
    for page in range(1, WINDOW + 1):  # most pages are live, so that entries can be written
        both.hand_out("full", page)
        both.hand_out("window", page)
    for action in history:
        _play(both, action)
        got, expected = both.verdicts()
        assert got == expected


@QUICK
@given(st.lists(actions, max_size=40), st.integers(0, 60))
def test_rebase_changes_no_verdict(history: list[tuple[object, ...]], shift: int) -> None:
    both = Both(4)
    for page in range(1, WINDOW + 1):
        both.hand_out("full", page)
        both.hand_out("window", page)
    for action in history:
        _play(both, action)
    before, _ = both.verdicts()
    shift = min(shift, both.serial)
    both.map.rebase(shift)
    both.full.rebase(shift)
    both.window.rebase(shift)
    both.serial -= shift
    after, expected = both.verdicts()
    assert after == before == expected


@QUICK
@given(st.lists(actions, max_size=40), st.lists(st.integers(4, 27), min_size=1, max_size=6))
def test_aliases_are_the_live_owners_of_a_window_slot(
    history: list[tuple[object, ...]], rows: list[int]
) -> None:
    both = Both(4)
    for page in range(1, WINDOW + 1):
        both.hand_out("full", page)
        both.hand_out("window", page)
    for action in history:
        _play(both, action)
    oracle = both.oracle
    slots = [oracle.entries[row].window if row in oracle.entries else 0 for row in rows]
    expected = []
    for row, slot in zip(rows, slots, strict=True):
        holder = oracle.holder.get(slot, 0)
        live = oracle.full.is_live(holder // 4) and oracle.window_of(holder) == slot
        expected.append(holder if slot and live and holder != row else 0)
    assert both.map.aliases(torch.tensor(rows), torch.tensor(slots)).tolist() == expected


def test_erase_spares_what_is_kept() -> None:
    both = Both(4)
    for page in (1, 2):
        both.hand_out("full", page)
        both.hand_out("window", page)
    both.write(4, 8)
    both.write(5, 9)
    both.map.erase(torch.tensor([4, 5]), torch.tensor([False, True]))
    assert both.mapping[[4, 5]].tolist() == [0, 9]


def test_epoch_sees_every_write_and_every_other_tensor() -> None:
    both = Both(4)
    both.map.acknowledge()
    assert not both.map.unseen_writes(both.mapping)
    both.mapping[3] = 0  # in place, even of the same value
    assert both.map.unseen_writes(both.mapping)
    both.map.acknowledge()
    assert both.map.unseen_writes(both.mapping.clone())


def test_adopt_takes_a_larger_mapping_with_nothing_proved() -> None:
    both = Both(4)
    both.hand_out("full", 1)
    both.hand_out("window", 1)
    both.write(4, 4)
    larger = torch.cat((both.mapping[:-1], torch.zeros(8, dtype=torch.int64), both.mapping[-1:]))
    both.map.adopt(larger)
    assert both.map.mapping is larger
    assert not both.map.proved(torch.tensor([4]), torch.tensor([4])).any()
