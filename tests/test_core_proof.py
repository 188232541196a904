"""The proof of matched paths on books in random states, against its definition in plain Python.

Mutations seen to fail ``test_by_definition``: ``Witness.live`` without the comparison of the stamp
with the witness; ``Witness.resident`` that says yes to all; one token too few in ``_tails``.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator

import pytest
import torch

from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.ledger import FREED
from hicache_guard.core.modes import Mode

PAGES = 12


def _world(seed: int, size: int) -> tuple[PoolGuard, list[torch.Tensor]]:
    """Books in which most pages are held, each mapped to a window page; and some paths."""
    dice = random.Random(seed)
    slots = PAGES * size
    mapping = torch.zeros(slots + size + 1, dtype=torch.int64)
    mapping[-1] = -1
    guard = PoolGuard(
        Mode.ENFORCE, full_slots=slots, window_slots=slots, page_size=size, mapping=mapping
    )
    guard.begin("a match", sys._getframe())
    peers = dice.sample(range(1, PAGES + 1), PAGES)
    for page, peer in zip(range(1, PAGES + 1), peers, strict=True):
        rows = torch.arange(page * size, (page + 1) * size)
        born = dice.randint(1, 9)
        guard.full.born[page] = born | (FREED if dice.random() < 0.1 else 0)
        guard.window.born[peer] = born | (FREED if dice.random() < 0.1 else 0)
        guard.map.stamp[rows] = born + dice.choice((0, 0, 0, 3))
        guard.witness.since[page] = dice.choice((born, born + 1, born + 4, 0))
        mapping[rows] = torch.arange(peer * size, (peer + 1) * size)
        guard.map.owner[mapping[rows]] = rows.int()
        if dice.random() < 0.15:
            mapping[rows[dice.randrange(size)]] = dice.choice((0, int(mapping[rows[0]])))
    paths = []
    for _ in range(dice.randint(1, 5)):
        pages = dice.sample(range(1, PAGES + 1), dice.randint(0, PAGES // 2))
        path = [page * size + inside for page in pages for inside in range(size)]
        paths.append(torch.tensor(path, dtype=torch.int64))
    return guard, paths


def _longest(guard: PoolGuard, path: list[int], need: int, size: int) -> int:
    """By definition: try every page-aligned resume point, look at every token that it needs."""

    def resident(slot: int) -> bool:
        page = slot // size
        return int(guard.full.born[page]) <= int(guard.witness.since[page])

    def live(slot: int) -> bool:
        entry = int(guard.map.mapping[slot])
        stamp = int(guard.map.stamp[slot])
        return (
            resident(slot)
            and entry > 0
            and int(guard.map.owner[entry]) == slot
            and stamp >= int(guard.full.born[slot // size])
            and stamp >= int(guard.window.born[entry // size])
            and stamp <= int(guard.witness.since[slot // size])
        )

    points = [
        resume
        for resume in range(0, len(path) + 1, size)
        if all(map(resident, path[:resume]))
        and all(map(live, path[max(0, resume - need) : resume]))
    ]
    return max(points)


@pytest.fixture
def _unsaid() -> Iterator[None]:
    """Thousands of faults, all on purpose; and the tests that come next hear of theirs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_unsaid")
@pytest.mark.parametrize("size", [1, 3, 4])
def test_by_definition(size: int) -> None:
    """Many paths at once, each as alone and as its definition says."""
    clipped = 0
    for seed in range(400):
        guard, paths = _world(seed, size)
        need = random.Random(seed).choice((0, 1, size, size + 1, 3 * size))
        together = guard.prove_prefixes(paths, need)
        for path, proved in zip(paths, together, strict=True):
            length = len(path)
            expected = _longest(guard, path.tolist(), need, size)
            assert proved.longest(length) == expected
            assert guard.prove_prefixes([path], need)[0].longest(length) == expected
            clipped += expected < length
    assert clipped > 300, "not an empty run"
