"""What is right under churn, by two witnesses that share no code with the guard, fast at any scale.

*Content*: the KV of a token is a number that stands for all tokens up to it, and lies in the
release's own KV buffers, so it goes wherever the release copies it, to the host and back as well.
A hit is right where each full slot of the path holds the number of its token, and each window slot
of the last ``need`` tokens does; a request's row likewise, at any time while it is its own.

*Places*: each page of both pools is free once, or owned by one holder, as ``audit`` says it; here
counted over whole pools in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_guard.repro import host_tier, scheduling
from hicache_guard.repro.audit import free_pages

Numbers = npt.NDArray[np.int64]

PLACES = ("two owners", "owned and free", "twice free", "lost", "no such page")


class Prefixes:
    """A number for each prefix of a sequence: the sum of its tokens, each times its position's own.

    Modulo 2^64, with random odd multipliers: two prefixes that are not equal have the same number
    by a chance of one in 2^63 or so.
    """

    def __init__(self, longest: int) -> None:
        dice = np.random.default_rng(0x25889)
        self._by_position = dice.integers(1, 1 << 62, longest, dtype=np.uint64) * 2 + 1

    def of(self, tokens: npt.NDArray[np.int32]) -> Numbers:
        """int64 of the same length as ``tokens``."""
        numbers = (tokens.astype(np.uint64) + 1) * self._by_position[: len(tokens)]
        return np.cumsum(numbers, dtype=np.uint64).view(np.int64)


class Contents:
    """What every slot of both pools holds, and where the mapping leads; views, never copies."""

    def __init__(self, server: scheduling.Server) -> None:
        sides = {window: layer for layer, window in host_tier.layers(server).items()}
        self._full, self._window = (
            host_tier.words(server, sides[window])[0].numpy()[:, 0] for window in (False, True)
        )
        self._mapping = server.allocator.full_to_swa_index_mapping.numpy()

    def write(self, slots: Numbers, numbers: Numbers) -> None:
        """A forward pass stores the KV of these tokens, on both sides where there are both."""
        self._full[slots] = numbers
        window = self._mapping[slots]
        there = self._inside(window)
        if there.all():
            self._window[window] = numbers
        else:
            self._window[window[there]] = numbers[there]

    def right(self, slots: Numbers, numbers: Numbers, need: int) -> bool:
        """Whether all full slots hold these numbers, and the window slots of the last ``need``."""
        if not np.array_equal(self._full[slots], numbers):
            return False
        tail = slots[-need:] if need else slots[:0]
        window = self._mapping[tail]
        if not self._inside(window).all():
            return False
        return np.array_equal(self._window[window], numbers[len(numbers) - len(tail) :])

    def _inside(self, window: Numbers) -> npt.NDArray[np.bool_]:
        return (window > 0) & (window < len(self._window))


@dataclass(frozen=True)
class Holder:
    """Who owns these full slots (int64), and the window slots that they are mapped to."""

    name: str
    slots: Numbers


def misplaced(allocator: Any, holders: Sequence[Holder]) -> dict[str, int]:
    """Pages of both pools that are not in exactly one place, by what is wrong; empty where none is.

    A page can be wrong in more ways than one.
    """
    page = int(allocator.page_size)
    mapping = allocator.full_to_swa_index_mapping.numpy()
    found = dict.fromkeys(PLACES, 0)
    slots = [holder.slots for holder in holders]
    entries = [mapping[held] for held in slots]
    for pool, owned in (
        (allocator.full_attn_allocator, slots),
        (allocator.swa_attn_allocator, [each[each > 0] for each in entries]),
    ):
        count = int(pool.size) // page
        free, outside = _counted(np.array(free_pages(pool), dtype=np.int64), count)
        owners = np.zeros(count + 1, dtype=np.int64)
        for held in owned:
            pages, wrong = _counted(held // page, count)
            owners += pages > 0
            outside += wrong
        found["two owners"] += int((owners > 1).sum())
        found["owned and free"] += int(((owners > 0) & (free > 0)).sum())
        found["twice free"] += int((free > 1).sum())
        found["lost"] += int(((owners == 0) & (free == 0))[1:].sum())
        found["no such page"] += outside + int(free[0] + owners[0])
    if mapping[-1] != -1:
        found["no such page"] += 1
    return {what: pages for what, pages in found.items() if pages}


def _counted(pages: Numbers, count: int) -> tuple[Numbers, int]:
    """How often each page from 0 to ``count`` is named, and how many names are beyond."""
    inside = (pages >= 0) & (pages <= count)
    wrong = int((~inside).sum())
    return np.bincount(pages[inside] if wrong else pages, minlength=count + 1), wrong
