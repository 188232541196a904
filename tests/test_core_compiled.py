"""The compiled books say yes, and write, exactly where and what the torch code would.

Proved by mutation: ``compiled_agreement.CHANGES`` names changes of one line of ``_books.c``, and
with each the same agreement must break.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compiled_agreement
from hicache_guard.core import compiled
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.journal import ACTING_FOR, acting_for
from hicache_guard.core.modes import Mode

SCRIPT = Path(__file__).with_name("compiled_agreement.py")

pytestmark = pytest.mark.skipif(compiled._books is None, reason="the extension is not built")


@settings(max_examples=600, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_both_agree(seed: int) -> None:
    """Each question has the same answer, each write the same effect, whatever is named."""
    assert compiled_agreement.disagreement(seed) is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_agreement_notices_each_change() -> None:
    done = subprocess.run([sys.executable, "-P", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert rows.pop("unchanged") is True
    assert len(rows) == len(compiled_agreement.CHANGES)
    assert [name for name, agrees in rows.items() if agrees] == [], "changes that nothing notices"


def _books(size: int = 4, pages: int = 8) -> tuple[Any, torch.Tensor]:
    mapping = torch.zeros((pages + 1) * size + 1, dtype=torch.int64)
    mapping[-1] = -1
    guard = PoolGuard(
        Mode.ENFORCE, full_slots=pages * size, window_slots=pages * size, page_size=size,
        mapping=mapping,
    )  # fmt: skip
    assert guard.compiled is not None
    return guard.compiled, mapping


def test_bad_arguments_are_refused() -> None:
    books, mapping = _books()
    row = torch.arange(4, 8)
    floats, narrow = torch.zeros(8), torch.zeros(8, dtype=torch.int32)
    calls = [
        (books.took, (row, row)),
        (books.took, (row[:1], row, 3)),  # more window slots than full slots
        (books.took, (row, None, 3)),
        (books.freed, (row, mapping, "3", 5)),
        (books.continued, (row, row[:2], mapping, 0)),
        (books.came, ([1, 2], 0, True)),
        (books.touched, (0,)),
        (compiled._books.Books, (4, narrow.numpy())),
        (compiled._books.Books, (0, *[narrow.numpy()] * 6)),
        (compiled._books.Books, (4, *[floats.numpy()] * 6)),
        (compiled._books.Books, (4, *[narrow.numpy()[::2]] * 6)),
    ]
    for call, arguments in calls:
        with pytest.raises((TypeError, ValueError, AttributeError, BufferError)):
            call(*arguments)
    assert books.took(row, row, 3), "still of use"
    # What is no mapping as SGLang has it is for the torch code to judge.
    for other in (narrow, torch.zeros(1, dtype=torch.int64)):
        assert not books.freed(row, other, 3, 5)
        assert not books.continued(row, row, other, 0)
        assert books.left_behind(row, other)


def test_odd_tensors_are_read_right() -> None:
    """Other types are converted for one call; an empty one names nothing."""
    books, mapping = _books()
    row = torch.arange(4, 8)
    mapping[row] = row
    assert books.took(row.short(), row.to(torch.uint8), 3)
    assert books.freed(row[:0], mapping, 7, 4)
    assert books.freed(torch.stack((row, row))[0], mapping, 7, 4)
    assert not books.freed(row, mapping, 7, 5), "it is free already"


def test_history_is_bounded_and_newest_first() -> None:
    books, mapping = _books(size=1, pages=64)
    mapping[1:65] = torch.arange(1, 65)
    scattered = torch.arange(1, 65)[torch.arange(64) * 7 % 64]  # no two follow each other
    for serial in range(1, 20_000, 2):
        books.took(scattered, scattered, serial)
        assert books.freed(scattered, mapping, 7, serial + 1)
    told = books.touched(0, 5)
    assert told[:3] == [(20_000, 1), (19_999, 0), (19_998, 1)]
    assert told == sorted(told, reverse=True)
    assert len(told) <= 8192, "as many touches as are kept"
    # 131,072 runs are kept; each touch of either side took 64 of them.
    assert len(told) == 131_072 // 64 // 2


class Attributes:
    pass


def _steps(*names: str) -> tuple[Any, Any]:
    watched = Attributes()
    for name in names:
        setattr(watched, name, torch.zeros(3))
    made = compiled.steps([(vars(watched), name) for name in names])
    made.leave()
    return made, watched


def test_steps_see_what_was_replaced_or_written() -> None:
    steps, watched = _steps("one", "two", "last")
    frame = sys._getframe()
    assert steps.enter(1, "alloc", frame)
    watched.one = watched.one.clone()
    assert steps.changed() == 1
    assert not steps.enter(2, "alloc", frame)
    steps.accept(0)
    assert steps.changed() == 0
    watched.last[0] = 1  # its own writes count; those of the others do not
    watched.two[0] = 1
    assert steps.changed() == 4
    steps.leave()
    watched.last = watched.last.clone()
    del watched.two
    assert steps.changed() == 6
    with pytest.raises(IndexError):
        steps.accept(3)


def test_steps_remember_the_last_operations() -> None:
    steps, _ = _steps("last")
    frame = sys._getframe()
    with acting_for("r-7"):
        steps.enter(5000, "free", frame)
    serial, name, request, code, instruction = steps.find(5000)
    assert (serial, name, request, code) == (5000, "free", "r-7", frame.f_code)
    assert 0 <= instruction <= frame.f_lasti
    for serial in range(6000, 6000 + 4096):
        steps.enter(serial, "alloc", frame)
    assert steps.find(5000) is None
    assert steps.find(6000)[2] is None
    steps.forget()
    assert steps.find(6000) is None


def test_steps_hold_nothing_back() -> None:
    """A ring of references through the attributes that are watched is collected."""
    steps, watched = _steps("last")
    watched.steps = steps
    gone = weakref.ref(watched)
    del steps, watched
    gc.collect()
    assert gone() is None


def test_steps_refuse_bad_arguments() -> None:
    made = compiled._steps.Steps
    wrong: list[tuple[Any, ...]] = [
        (), (ACTING_FOR, []), ("request", [({}, "x")]), (ContextVar("x"), [({}, 1)]),
        (ACTING_FOR, [({}, "x")] * 5), (ACTING_FOR, [None]),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises((TypeError, ValueError)):
            made(*arguments)
    with pytest.raises(KeyError):
        made(ACTING_FOR, [({}, "x")]).leave()
    steps, _ = _steps("last")
    for bad in ((), (1, 2, 3), (1, "free", None), ("1", "free", sys._getframe())):
        with pytest.raises(TypeError):
            steps.enter(*bad)
