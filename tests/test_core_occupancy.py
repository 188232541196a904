"""Whose each page is, in samples of a trace: read off real allocations, and by definition.

Mutations seen to fail: a freed page taken for the tree's; the window's owner not looked up; every
page looked at where only every so-many-th is said to be; a look more often than ``EVERY``.
"""

from __future__ import annotations

import random

import pytest
import torch

from hicache_guard.core import occupancy
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.ledger import FREED
from hicache_guard.core.modes import Mode
from hicache_guard.core.occupancy import Occupancy, states_of


def _guard(pages: int, size: int, seed: int) -> PoolGuard:
    """Books in a random state; the window pool has half the pages."""
    dice = random.Random(seed)
    windows = pages // 2
    mapping = torch.zeros((pages + 1) * size + 1, dtype=torch.int64)
    mapping[-1] = -1
    guard = PoolGuard(
        Mode.ENFORCE, full_slots=pages * size, window_slots=windows * size, page_size=size,
        mapping=mapping,
    )  # fmt: skip
    for page in range(1, pages + 1):
        born = dice.randint(2, 9)
        guard.full.born[page] = born | (FREED if dice.random() < 0.3 else 0)
        guard.witness.since[page] = dice.choice((0, born - 1, born, born + 3))
    for page in range(1, windows + 1):
        guard.window.born[page] = 5 | (FREED if dice.random() < 0.3 else 0)
        owner = dice.randint(1, pages)
        rows = torch.arange(owner * size, (owner + 1) * size).int()
        guard.map.owner[page * size : (page + 1) * size] = rows
    return guard


def _by_definition(guard: PoolGuard, side: str, page: int) -> str:
    def held(full: int) -> bool:
        return int(guard.full.born[full]) <= int(guard.witness.since[full])

    if side == "full":
        free, tree = int(guard.full.born[page]) >= FREED, held(page)
    else:
        free = int(guard.window.born[page]) >= FREED
        tree = held(int(guard.map.owner[page * guard.page_size]) // guard.page_size)
    return "f" if free else "t" if tree else "l"


@pytest.mark.parametrize(("pages", "size"), [(2, 1), (40, 1), (40, 4), (40, 3), (1000, 1)])
def test_by_definition(pages: int, size: int) -> None:
    guard = _guard(pages, size, pages + size)
    look = Occupancy(guard).look(100.0)
    assert look is not None
    when, found = look
    assert when == 100.0
    for side, count in (("full", pages), ("window", pages // 2)):
        step = found[side]["step"]
        states = states_of(found[side]["pages"])
        assert len(states) <= occupancy.MOST
        expected = [_by_definition(guard, side, page) for page in range(1, count + 1, step)]
        assert [*states] == expected
    if pages == 40:
        assert set(states_of(found["full"]["pages"])) == {*occupancy.STATES}, "a rich state"


def test_only_what_is_new_and_not_too_often() -> None:
    guard = _guard(40, 1, 1)
    watch = Occupancy(guard)
    assert watch.look(100.0) is not None
    assert watch.look(200.0) is None, "nothing changed"
    guard.full.born[3] ^= FREED
    assert watch.look(200.0 + occupancy.EVERY / 2) is None, "too soon"
    assert watch.look(200.0 + occupancy.EVERY * 2) is not None


@pytest.mark.parametrize("text", ["f", "3", "3x", "3f4", "-1f", "9999999999999f", "3f 4t"])
def test_what_is_no_picture_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no states"):
        states_of(text)
