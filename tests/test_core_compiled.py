"""The compiled books answer and write as the torch code does, on notes legal and illegal.

Proved by mutation: ``compiled_agreement.CHANGES`` names changes of one line of ``_bulk.c``, and
with each the same agreement must break.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compiled_agreement
from hicache_guard.core import compiled
from hicache_guard.core.backlog import Freed, HandedOut, Held
from hicache_guard.core.compiled import CompiledLedger
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.ledger import PageLedger
from hicache_guard.core.modes import Mode

SCRIPT = Path(__file__).with_name("compiled_agreement.py")

needs_extension = pytest.mark.skipif(compiled._bulk is None, reason="the extension is not built")


@needs_extension
@settings(max_examples=400, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_both_agree(seed: int) -> None:
    """Each question has the same answer, each write the same effect, whatever the notes name."""
    assert compiled_agreement.disagreement(seed) is None


@needs_extension
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_agreement_notices_each_change() -> None:
    done = subprocess.run([sys.executable, "-P", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = dict(json.loads(line) for line in done.stdout.splitlines())
    assert rows.pop("unchanged") is True
    assert len(rows) == len(compiled_agreement.CHANGES)
    assert [name for name, agrees in rows.items() if agrees] == [], "changes that nothing notices"


# -- whole backlogs ----------------------------------------------------------------------------


class Settled:
    """A guard with notes of one random history; ``run`` settles them and says what came of it."""

    def __init__(self, seed: int, mode: Mode) -> None:
        self.dice = dice = random.Random(seed)
        self.size = size = dice.choice(compiled_agreement.SIZES)
        slots = 40 * size
        self.mapping = torch.zeros(slots + size + 1, dtype=torch.int64)
        self.mapping[-1] = -1
        self.reports: list[str] = []
        self.admitted: list[list[int]] = []
        self.guard = PoolGuard(
            mode, full_slots=slots, window_slots=slots, page_size=size, mapping=self.mapping,
            on_report=lambda report: self.reports.append(str(report)),
        )  # fmt: skip
        self.fresh = list(range(1, 41))
        self.rows: list[torch.Tensor] = []

    def run(self) -> list[Any]:
        frame = sys._getframe()
        for _ in range(self.dice.randint(1, 6)):
            for step in self.dice.choices(("take", "free", "direct"), (6, 5, 1), k=4):
                # A caller allocates only when what was freed is settled.
                self.guard.begin(step, frame)
                if step == "take":
                    self.guard.backlog.settle()
                getattr(self, f"_{step}")()
                self.guard.end()
            self.guard.begin("settle", frame)
            self.guard.backlog.settle()
            self.guard.end()
        guard, book = self.guard, self.guard.map
        books = (guard.full.born, guard.window.born, book.stamp, book.owner, self.mapping)
        return [self.reports, self.admitted, *(kept.tolist() for kept in books)]

    def _take(self) -> None:
        dice, size = self.dice, self.size
        count = dice.randint(1, 3)
        if len(self.fresh) < count:
            return
        pages = torch.tensor([self.fresh.pop() for _ in range(count)])
        rows = (pages[:, None] * size + torch.arange(size)).reshape(-1)
        window = rows if dice.random() < 0.9 else rows.flip(0)
        self.mapping[rows] = window
        self.guard.backlog.note_taken(rows, window, each_continues=dice.random() < 0.3)
        self.rows.append(rows)
        if dice.random() < 0.1:
            taken = HandedOut(self.guard.current, self.guard.full, pages)
            self.guard.backlog.note_handed_out(taken)

    def _free(self) -> None:
        dice, size, guard = self.dice, self.size, self.guard
        if not self.rows:
            return
        row = dice.choice(self.rows) if dice.random() < 0.2 else self.rows.pop()
        heads = row[::size].clone()
        if dice.random() < 0.1:
            heads[dice.randrange(len(heads))] = dice.choice((-7, 0, 1 << 40))
        if dice.random() < 0.3:
            heads = heads.clamp(-(2**31), 2**31 - 1).int()
        full, window = dice.choice(((True, True), (False, True), (True, False)))
        entries = self.mapping[heads.long().clamp(0, len(self.mapping) - 2)] if window else None
        named = len(row) - dice.randrange(size)
        mapped = dice.random() < 0.7
        guard.backlog.note_free(
            Freed(guard.current, heads.long(), named, full, entries, window and mapped)
        )
        if full:
            self._hold(guard.full, heads, direct=False)
        if entries is not None:
            self._hold(guard.window, entries, direct=False)
            self.mapping[row] = 0

    def _direct(self) -> None:
        page = self.dice.randint(0, 41)
        self._hold(self.guard.full, torch.tensor([page * self.size]), direct=True)

    def _hold(self, ledger: PageLedger, slots: torch.Tensor, *, direct: bool) -> None:
        pages = self.size > 1
        items = slots.div(self.size, rounding_mode="floor") if pages else slots
        admit = self.admitted.append
        note = Held(
            self.guard.current, ledger, items, pages, direct, lambda kept: admit(kept.tolist())
        )
        self.guard.backlog.hold(note)


@needs_extension
@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.ENFORCE])
@settings(max_examples=150, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_whole_backlogs_agree(mode: Mode, seed: int) -> None:
    """The same reports, pages admitted and books, whichever code settles the notes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiled.SWITCH, "1")
        ours = Settled(seed, mode)
        assert type(ours.guard.full) is CompiledLedger
        patch.setenv(compiled.SWITCH, "0")
        torchs = Settled(seed, mode)
        assert type(torchs.guard.full) is PageLedger
    assert ours.run() == torchs.run()
