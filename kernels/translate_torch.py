"""The translation as vectorised torch: what runs where there is no Triton, and its cross-check.

Every tensor is as long as the plan, whatever the batch, so nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hicache_guard.core.ledger import FREED
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.record import AT_DROPPED, AT_FIRST, AT_LATE, NOBODY, Cause

if TYPE_CHECKING:
    from hicache_guard.kernels.translate import Batch, Outputs


def translate(batch: Batch, books: DeviceBooks, window: int, out: Outputs) -> None:
    """Fill ``out``; see ``WindowTranslation.run``, which has checked the arguments."""
    count, room = batch.rows.shape[0], out.slots.shape[0]
    out.record.zero_()
    out.record[AT_FIRST].fill_(NOBODY)
    out.record[AT_LATE].fill_(NOBODY)
    out.indptr[:1].zero_()
    lengths, queries = batch.lengths.long(), batch.queries.long()
    starts = (lengths - queries - (window - 1)).clamp(min=0)
    asked = torch.where((queries > 0) & (lengths > 0), lengths - starts, 0)
    ends = asked.cumsum(0)
    out.record[AT_DROPPED] = (ends[-1] - room).clamp(min=0)
    ends = ends.clamp(max=room)
    begins = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    out.starts[:count] = starts
    out.indptr[1 : count + 1] = ends

    entry = torch.arange(room, device=ends.device)
    there = entry < ends[-1]
    request = torch.searchsorted(ends, entry, right=True).clamp_(max=count - 1)
    position = starts.index_select(0, request) + entry - begins.index_select(0, request)
    full = _full_slots(batch, request, position)

    looked = look_up(full, books)
    leads = there & looked.leads
    out.slots.copy_(torch.where(leads, looked.slot, 0))
    out.expected.copy_(torch.where(leads, looked.born, 0))
    add_up(out.record, looked, there & ~looked.leads, request << 32 | position)


@dataclass(frozen=True, eq=False)
class Looked:
    """What the books say of full slots (int64 [n] each), by the names of ``record.Offender``."""

    full: torch.Tensor
    slot: torch.Tensor
    stamp: torch.Tensor
    born: torch.Tensor
    full_born: torch.Tensor
    owner: torch.Tensor
    known: torch.Tensor
    inside: torch.Tensor
    cause: torch.Tensor

    @property
    def leads(self) -> torch.Tensor:
        """Mask (bool) of those that lead to their window slot."""
        return self.cause == len(Cause)


def look_up(full: torch.Tensor, books: DeviceBooks) -> Looked:
    """The rule of ``books``, for full slots (int64 [n])."""
    known = (full >= 0) & (full < books.full_rows)
    row = full.clamp(0, books.full_rows - 1)
    slot = books.mapping.index_select(0, row)
    inside = (slot > 0) & (slot < books.window_slots)
    place = slot.clamp(0, books.window_slots - 1)
    stamp = books.stamp.index_select(0, row)
    full_born = books.full_born.index_select(0, row // books.page_size)
    born = books.window_born.index_select(0, place // books.page_size)
    owner = books.owner.index_select(0, place)

    # From the last line of the rule to the first, so that the first that fails stays.
    cause = torch.full_like(full, len(Cause))
    cause.masked_fill_(owner != row, Cause.FOREIGN)
    cause.masked_fill_((full_born >= FREED) | (stamp < full_born), Cause.FULL_RECYCLED)
    cause.masked_fill_(stamp < born, Cause.RECYCLED)
    cause.masked_fill_(born >= FREED, Cause.FREED)
    cause.masked_fill_(~inside, Cause.OUT_OF_RANGE)
    cause.masked_fill_(slot == 0, Cause.UNMAPPED)
    cause.masked_fill_(~known, Cause.OUT_OF_RANGE)
    return Looked(full, slot, stamp, born, full_born, owner, known, inside, cause)


def add_up(out: torch.Tensor, looked: Looked, bad: torch.Tensor, keys: torch.Tensor) -> None:
    """Add what is ``bad`` (bool [n]) to a cleared record; ``keys`` (int64 [n]) grow with the batch.

    A key is ``request << 32 | position``, so the first offender has the smallest.
    """
    out[: len(Cause)].index_add_(0, looked.cause.clamp(max=len(Cause) - 1), bad.long())
    key = torch.where(bad, keys, NOBODY)
    first = key.argmin().reshape(1)
    found = looked.known & looked.inside
    details = [
        key,
        looked.full,
        torch.where(looked.known, looked.slot, -1),
        looked.cause,
        torch.where(looked.known, looked.stamp, -1),
        torch.where(found, looked.born, -1),
        torch.where(looked.known, looked.full_born, -1),
        torch.where(found, looked.owner, -1),
    ]
    values = torch.cat([detail.index_select(0, first).long() for detail in details])
    nothing = out[AT_FIRST:AT_LATE].clone()
    some = bad.index_select(0, first)
    out[AT_FIRST:AT_LATE] = torch.where(some, values, nothing)


def _full_slots(batch: Batch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The full slots (int64) at positions of requests; -1 where the table has no such place."""
    table = batch.req_to_token
    if table.numel() == 0:
        return torch.full_like(position, -1)
    row = batch.rows.long().index_select(0, request)
    there = (row >= 0) & (row < table.shape[0]) & (position < table.shape[1])
    row = row.clamp(0, table.shape[0] - 1)
    full = table[row, position.clamp(max=table.shape[1] - 1)].long()
    return torch.where(there, full, -1)
