"""The translation as one Triton kernel: one launch a step, of a shape that the batch fixes.

Each program handles blocks of one request's window. What it needs of the requests before its own,
the sum of their entries, it adds up itself: a batch has some hundred requests, whose lengths are in
the cache, and one more launch would cost more than the sum.

Counts and the first offender gather in ``scratch``. The program that finishes last moves them to
the record and leaves ``scratch`` as it was found, so that neither needs a launch that clears it.
"""

# ruff: noqa: N803 - what is known when a kernel is compiled is in capitals, as Triton has it.

from __future__ import annotations

from typing import TYPE_CHECKING

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from hicache_guard.core import ledger
from hicache_guard.kernels import record as layout
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.record import Cause

if TYPE_CHECKING:
    from hicache_guard.kernels.translate import Batch, Outputs

#: Entries that a program handles at a time.
BLOCK = 256
#: Requests that are added up at a time.
BLOCK_REQUESTS = 256
#: Programs of a launch, unless there are more requests; some 16 for each multiprocessor.
PROGRAMS = 2048

# What a kernel reads from its module has to be a constexpr.
OUT_OF_RANGE = tl.constexpr(int(Cause.OUT_OF_RANGE))
UNMAPPED = tl.constexpr(int(Cause.UNMAPPED))
FREED = tl.constexpr(int(Cause.FREED))
RECYCLED = tl.constexpr(int(Cause.RECYCLED))
FULL_RECYCLED = tl.constexpr(int(Cause.FULL_RECYCLED))
FOREIGN = tl.constexpr(int(Cause.FOREIGN))
CAUSES = tl.constexpr(len(Cause))
NO_LONGER_LIVE = tl.constexpr(ledger.FREED)
DROPPED = tl.constexpr(layout.AT_DROPPED)
FIRST = tl.constexpr(layout.AT_FIRST)
LATE = tl.constexpr(layout.AT_LATE)
NOBODY = tl.constexpr(layout.NOBODY)
#: In ``scratch``: how many programs have finished.
TICKET = tl.constexpr(layout.AT_LATE)


@triton.jit  # type: ignore[untyped-decorator]
def _asked(
    lengths: tl.tensor, queries: tl.tensor, request: tl.tensor, there: tl.tensor, window: tl.tensor
) -> tl.tensor:
    """Where the windows of requests start, and how many entries they have (int64 both)."""
    length = tl.load(lengths + request, mask=there, other=0).to(tl.int64)
    query = tl.load(queries + request, mask=there, other=0).to(tl.int64)
    start = tl.maximum(length - query - (window - 1), 0)
    return start, tl.where((query > 0) & (length > 0), length - start, 0)


@triton.jit  # type: ignore[untyped-decorator]
def judge(
    table: tl.tensor,
    row: tl.tensor,
    position: tl.tensor,
    there: tl.tensor,
    table_rows: tl.tensor,
    table_places: tl.tensor,
    stride: tl.tensor,
    mapping: tl.tensor,
    stamps: tl.tensor,
    owners: tl.tensor,
    full_borns: tl.tensor,
    window_borns: tl.tensor,
    full_rows: tl.tensor,
    window_slots: tl.tensor,
    PAGE: tl.constexpr,
) -> tl.tensor:
    """The cause (``CAUSES`` where an entry leads to its slot), and all that the books say.

    Pages are counted in 32 bits, where every slot within range has room: dividing 64 is a call.
    """
    placed = there & (row >= 0) & (row < table_rows) & (position < table_places)
    full = tl.load(table + row * stride + position, mask=placed, other=-1).to(tl.int64)
    known = (full >= 0) & (full < full_rows)
    slot = tl.load(mapping + full, mask=known, other=-1)
    stamp = tl.load(stamps + full, mask=known, other=-1)
    full_born = tl.load(full_borns + full.to(tl.int32) // PAGE, mask=known, other=-1)
    inside = (slot > 0) & (slot < window_slots)
    born = tl.load(window_borns + slot.to(tl.int32) // PAGE, mask=inside, other=-1)
    owner = tl.load(owners + slot, mask=inside, other=-1)

    # From the last line of the rule to the first, so that the first that fails stays. Of a full
    # slot that is out of range the mapping's entry is -1, and so is that.
    cause = tl.where(owner != full, FOREIGN, CAUSES)
    cause = tl.where((full_born >= NO_LONGER_LIVE) | (stamp < full_born), FULL_RECYCLED, cause)
    cause = tl.where(stamp < born, RECYCLED, cause)
    cause = tl.where(born >= NO_LONGER_LIVE, FREED, cause)
    cause = tl.where(inside, cause, OUT_OF_RANGE)
    cause = tl.where(slot == 0, UNMAPPED, cause)
    return cause, full, slot, stamp, born, full_born, owner


@triton.jit  # type: ignore[untyped-decorator]
def add_up(
    scratch: tl.tensor, bad: tl.tensor, cause: tl.tensor, request: tl.tensor, position: tl.tensor
) -> None:
    """Add the ``bad`` entries of a block, all of one request, to what gathers in ``scratch``."""
    for each in tl.static_range(CAUSES):
        found = tl.sum((bad & (cause == each)).to(tl.int64))
        tl.atomic_add(scratch + each, found, sem="relaxed")
    key = (request.to(tl.int64) << 32) | position
    tl.atomic_min(scratch + FIRST, tl.min(tl.where(bad, key, NOBODY)), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def move(record: tl.tensor, scratch: tl.tensor) -> tl.tensor:
    """Move what gathered to the record, all but the first offender's facts; returns its key.

    For the program that finishes last; it leaves ``scratch`` as the next run needs it.
    """
    lane = tl.arange(0, 8)
    gathered = tl.atomic_xchg(
        scratch + lane, tl.zeros([8], tl.int64), mask=lane <= DROPPED, sem="acquire"
    )
    tl.store(record + lane, gathered, mask=lane <= DROPPED)
    key = tl.atomic_xchg(scratch + FIRST, tl.full([], NOBODY, tl.int64), sem="acquire")
    tl.store(scratch + TICKET, 0)
    tl.store(record + FIRST, key)
    tl.store(record + LATE, tl.full([], NOBODY, tl.int64))
    return key


@triton.jit  # type: ignore[untyped-decorator]
def translate_kernel(
    table: tl.tensor,
    rows: tl.tensor,
    lengths: tl.tensor,
    queries: tl.tensor,
    mapping: tl.tensor,
    stamps: tl.tensor,
    owners: tl.tensor,
    full_borns: tl.tensor,
    window_borns: tl.tensor,
    indptr: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    expected: tl.tensor,
    record: tl.tensor,
    scratch: tl.tensor,
    table_rows: tl.tensor,
    table_places: tl.tensor,
    stride: tl.tensor,
    full_rows: tl.tensor,
    window_slots: tl.tensor,
    room: tl.tensor,
    window: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
) -> None:
    """Translate one batch; program (r, part) handles every so many blocks of request r's window."""
    r = tl.program_id(0)
    part = tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(1)

    before = tl.zeros([BLOCK_REQUESTS], tl.int64)
    for at in range(0, r, BLOCK_REQUESTS):
        other = at + tl.arange(0, BLOCK_REQUESTS)
        _, counts = _asked(lengths, queries, other, other < r, window)
        before += counts
    begin = tl.minimum(tl.sum(before), room)
    start, count = _asked(lengths, queries, r, True, window)
    fits = tl.minimum(count, room - begin)
    if part == 0:
        if r == 0:
            tl.store(indptr, 0)
        tl.store(starts + r, start.to(tl.int32))
        tl.store(indptr + r + 1, (begin + fits).to(tl.int32))
        if count > fits:
            tl.atomic_add(scratch + DROPPED, count - fits, sem="relaxed")

    row = tl.load(rows + r).to(tl.int64)
    for at in range(part * BLOCK, fits, parts * BLOCK):
        entry = at + tl.arange(0, BLOCK)
        there = entry < fits
        position = start + entry
        cause, _, slot, _, born, _, _ = judge(
            table, row, position, there, table_rows, table_places, stride,
            mapping, stamps, owners, full_borns, window_borns, full_rows, window_slots, PAGE,
        )  # fmt: skip
        leads = cause == CAUSES
        slot = tl.where(leads, slot, 0)
        tl.store(slots + begin + entry, slot.to(slots.dtype.element_ty), mask=there)
        tl.store(expected + begin + entry, tl.where(leads, born, 0), mask=there)
        bad = there & (cause < CAUSES)
        # Where all is well, as nearly always, nothing is added to memory that programs share.
        if tl.sum(bad.to(tl.int32)) > 0:
            add_up(scratch, bad, cause, r, position)

    # Release: what this program added is there before its ticket. Acquire: whoever draws the last
    # ticket sees what every other added. The details of the first offender are not left by the
    # program that met it, since a smaller key may come later: they are looked up again, by the key.
    ticket = tl.atomic_add(scratch + TICKET, 1, sem="acq_rel")
    if ticket == tl.num_programs(0).to(tl.int64) * parts - 1:
        key = move(record, scratch)
        if key < NOBODY:
            cause, full, slot, stamp, born, full_born, owner = judge(
                table, tl.load(rows + (key >> 32)).to(tl.int64), key & 0xFFFFFFFF, key < NOBODY,
                table_rows, table_places, stride,
                mapping, stamps, owners, full_borns, window_borns, full_rows, window_slots, PAGE,
            )  # fmt: skip
            tl.store(record + FIRST + 1, full)
            tl.store(record + FIRST + 2, slot)
            tl.store(record + FIRST + 3, cause)
            tl.store(record + FIRST + 4, stamp)
            tl.store(record + FIRST + 5, born)
            tl.store(record + FIRST + 6, full_born)
            tl.store(record + FIRST + 7, owner)


def translate(batch: Batch, books: DeviceBooks, window: int, out: Outputs) -> None:
    """Fill ``out``; see ``WindowTranslation.run``, which has checked the arguments."""
    table, count, room = batch.req_to_token, batch.rows.shape[0], out.slots.shape[0]
    parts = min(triton.cdiv(room, BLOCK), max(1, PROGRAMS // count))
    translate_kernel[(count, parts)](
        table, batch.rows, batch.lengths, batch.queries,
        books.mapping, books.stamp, books.owner, books.full_born, books.window_born,
        out.indptr, out.starts, out.slots, out.expected, out.record, out.scratch,
        table.shape[0], table.shape[1], table.stride(0), books.full_rows, books.window_slots,
        room, window,
        PAGE=books.page_size, BLOCK=BLOCK, BLOCK_REQUESTS=BLOCK_REQUESTS,
    )  # fmt: skip
