"""Whose the pages of both pools are, over time: samples for a trace, never waited for.

Read off the books that the proofs stand on: a free page's generation is above every serial, and a
tree holds what it vouched for after it was handed out (``ledger``, ``witness``). A window page is
whose the full slot is that it was last given to. Of a large pool every so-many-th page is looked
at: each row of the picture is a page that is there, not an average.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from hicache_guard.core.ledger import FREED
from hicache_guard.core.verdict import HostCopy

if TYPE_CHECKING:
    from hicache_guard.core.guard import PoolGuard

#: Pages looked at in each pool, at most, and seconds between two looks.
MOST, EVERY = 256, 0.05
#: A page is free, a request's (or on its way to somebody), or a tree's.
STATES = "flt"
_RUN = re.compile(rf"([0-9]{{1,4}})([{STATES}])")


class Occupancy:
    """Looks at the pages of one guard's pools every ``EVERY`` seconds at most."""

    def __init__(self, guard: PoolGuard) -> None:
        self.guard = guard
        self._under_way: tuple[float, dict[str, int], HostCopy] | None = None
        self._looked = 0.0
        self._told: dict[str, str] = {}

    def look(self, now: float) -> tuple[float, dict[str, Any]] | None:
        """When a look was taken, and what it found; None where there is nothing new.

        The answer of a device comes with a later call. For each pool ``step`` says that it is of
        the pages 1, 1 + step, ..., ``pages`` is their states, each with how often it comes.
        """
        found = None
        if self._under_way is not None and self._under_way[2].arrived():
            found = self._read(*self._under_way)
            self._under_way = None
        if self._under_way is None and now - self._looked >= EVERY:
            self._looked = now
            self._under_way = (now, *self._asked())
            if found is None and self._under_way[2].arrived():
                found = self._read(*self._under_way)
                self._under_way = None
        return found

    def _asked(self) -> tuple[dict[str, int], HostCopy]:
        guard = self.guard
        steps = {side.name: max(1, -(-side.pages // MOST)) for side in (guard.full, guard.window)}
        since = guard.witness.since
        full = guard.full.born[1 : -1 : steps["full"]]
        # A page of the window is of the page that its first slot was given to.
        pages = slice(1, guard.window.pages + 1, steps["window"])
        firsts = guard.map.owner[:: guard.page_size][: guard.window.pages + 1][pages]
        owners = guard.full.pages_of(firsts)
        held = guard.full.generations(owners) <= since.index_select(0, owners)
        window = guard.window.born[pages]
        states = [_states(full, full <= since[1 : -1 : steps["full"]]), _states(window, held)]
        return steps, HostCopy(torch.cat(states))

    def _read(
        self, when: float, steps: dict[str, int], copy: HostCopy
    ) -> tuple[float, dict[str, Any]] | None:
        codes = copy.values()
        count = -(-self.guard.full.pages // steps["full"])
        told = {
            side: _runs(part) for side, part in (("full", codes[:count]), ("window", codes[count:]))
        }
        if told == self._told:
            return None
        self._told = told
        return when, {side: {"step": steps[side], "pages": told[side]} for side in steps}


def _states(born: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Places in ``STATES`` (int32)."""
    return torch.where(born >= FREED, 0, torch.where(held, 2, 1)).to(torch.int32)


def _runs(codes: list[int]) -> str:
    """As 12f3t: twelve free ones, then three of the tree."""
    return "".join(f"{len([*same])}{STATES[code]}" for code, same in groupby(codes))


def states_of(runs: str) -> str:
    """What ``_runs`` wrote, a letter for each page. Raises ValueError for anything else."""
    found = _RUN.findall(runs)
    states = "".join(letter * int(count) for count, letter in found)
    if len(states) > MOST or runs != "".join(map("".join, found)):
        raise ValueError(f"no states of pages: {runs[:40]!r}")
    return states
