"""The translation of a stream as one Triton kernel: one launch, of a shape that the host knows.

Each program handles blocks of one request's entries. As in ``translate_triton`` counts gather in
``scratch``, and the program that finishes last moves them to the report and leaves ``scratch`` as
it was found.
"""

# ruff: noqa: N803 - what is known when a kernel is compiled is in capitals, as Triton has it.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from hicache_guard.kernels import record as layout
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.translate_triton import (
    BLOCK,
    CAUSES,
    FIRST,
    NOBODY,
    PROGRAMS,
    TICKET,
    add_up,
    judge,
    move,
)

if TYPE_CHECKING:
    from hicache_guard.kernels.stream import Stream

#: Requests whose counts are moved at a time.
BLOCK_REQUESTS = 256
LENGTH = tl.constexpr(layout.LENGTH)


@triton.jit(do_not_specialize=["counted", "room"])  # type: ignore[untyped-decorator]
def stream_kernel(
    stream: tl.tensor,
    indptr: tl.tensor,
    starts: tl.tensor,
    mapping: tl.tensor,
    stamps: tl.tensor,
    owners: tl.tensor,
    full_borns: tl.tensor,
    window_borns: tl.tensor,
    out: tl.tensor,
    report: tl.tensor,
    scratch: tl.tensor,
    room: tl.tensor,
    counted: tl.tensor,
    full_rows: tl.tensor,
    window_slots: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
) -> None:
    """Translate a batch; program (r, part) handles every so many blocks of request r's entries.

    The stream is a table of one row, with an entry's number as its place.
    """
    r = tl.program_id(0)
    part = tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(1)
    begin = tl.load(indptr + r).to(tl.int64)
    end = tl.minimum(tl.load(indptr + r + 1).to(tl.int64), room)
    start = tl.load(starts + r).to(tl.int64)
    row = tl.zeros([], tl.int64)

    for at in range(begin + part * BLOCK, end, parts * BLOCK):
        entry = at + tl.arange(0, BLOCK)
        there = entry < end
        cause, _, slot, _, _, _, _ = judge(
            stream, row, entry, there, 1, room, 0,
            mapping, stamps, owners, full_borns, window_borns, full_rows, window_slots, PAGE,
        )  # fmt: skip
        leads = cause == CAUSES
        tl.store(out + entry, tl.where(leads, slot, 0).to(out.dtype.element_ty), mask=there)
        bad = there & (cause < CAUSES) & (r < counted)
        # Where all is well, as nearly always, nothing is added to memory that programs share.
        wrong = tl.sum(bad.to(tl.int64))
        if wrong > 0:
            # First, and in 64 bits: else ptxas needs a stack for what follows on sm_80.
            tl.atomic_add(scratch + LENGTH + r, wrong, sem="relaxed")
            add_up(scratch, bad, cause, r, start + entry - begin)

    # As in ``translate_kernel``: release before the ticket, acquire after the last.
    requests = tl.num_programs(0)
    ticket = tl.atomic_add(scratch + TICKET, 1, sem="acq_rel")
    if ticket == requests.to(tl.int64) * parts - 1:
        for before in range(0, requests, BLOCK_REQUESTS):
            request = before + tl.arange(0, BLOCK_REQUESTS)
            theirs = request < requests
            wrongs = tl.atomic_xchg(
                scratch + LENGTH + request,
                tl.zeros([BLOCK_REQUESTS], tl.int64),
                mask=theirs,
                sem="acquire",
            )
            tl.store(report + LENGTH + request, wrongs, mask=theirs)
        key = move(report, scratch)
        if key < NOBODY:
            request = key >> 32
            position = key & 0xFFFFFFFF
            place = tl.load(indptr + request).to(tl.int64) + position
            place -= tl.load(starts + request).to(tl.int64)
            cause, full, slot, stamp, born, full_born, owner = judge(
                stream, row, place, key < NOBODY, 1, room, 0,
                mapping, stamps, owners, full_borns, window_borns, full_rows, window_slots, PAGE,
            )  # fmt: skip
            tl.store(report + FIRST + 1, full)
            tl.store(report + FIRST + 2, slot)
            tl.store(report + FIRST + 3, cause)
            tl.store(report + FIRST + 4, stamp)
            tl.store(report + FIRST + 5, born)
            tl.store(report + FIRST + 6, full_born)
            tl.store(report + FIRST + 7, owner)


def translate(
    stream: Stream,
    books: DeviceBooks,
    out: torch.Tensor,
    report: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Fill ``out`` and ``report``; see ``StreamTranslation.run``, which checked the arguments."""
    count, room = stream.starts.shape[0], stream.slots.shape[0]
    parts = max(1, min(triton.cdiv(room, BLOCK), PROGRAMS // count))
    stream_kernel[(count, parts)](
        stream.slots, stream.indptr, stream.starts,
        books.mapping, books.stamp, books.owner, books.full_born, books.window_born,
        out, report, scratch, room, stream.counted, books.full_rows, books.window_slots,
        PAGE=books.page_size, BLOCK=BLOCK, BLOCK_REQUESTS=BLOCK_REQUESTS,
    )  # fmt: skip
