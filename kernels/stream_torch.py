"""The translation of a stream as vectorised torch; the cross-check of the Triton kernel.

Every tensor is as long as the stream, whatever the batch, so nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.record import AT_FIRST, AT_LATE, LENGTH, NOBODY
from hicache_guard.kernels.translate_torch import add_up, look_up

if TYPE_CHECKING:
    from hicache_guard.kernels.stream import Stream


def translate(
    stream: Stream,
    books: DeviceBooks,
    out: torch.Tensor,
    report: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Fill ``out`` and ``report``; see ``StreamTranslation.run``, which checked the arguments."""
    report.zero_()
    report[AT_FIRST].fill_(NOBODY)
    report[AT_LATE].fill_(NOBODY)
    if stream.slots.shape[0] == 0:
        return
    begins, ends = stream.indptr[:-1].long(), stream.indptr[1:].long()
    entry = torch.arange(stream.slots.shape[0], device=ends.device)
    there = (entry >= begins[0]) & (entry < ends[-1])
    request = torch.searchsorted(ends, entry, right=True).clamp_(max=ends.shape[0] - 1)
    start = (stream.starts.long() - begins).index_select(0, request)

    looked = look_up(stream.slots.long(), books)
    held = out[: entry.shape[0]]
    held.copy_(torch.where(there, torch.where(looked.leads, looked.slot, 0), held))
    bad = there & ~looked.leads & (request < stream.counted)
    add_up(report[:LENGTH], looked, bad, request << 32 | (start + entry))
    report[LENGTH:].index_add_(0, request, bad.long())
