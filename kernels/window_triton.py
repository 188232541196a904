"""Window attention that does not load what is not live: decode, prefill and trees in one kernel.

Masking a score does not help against a dead slot: its value may be NaN, and 0 times NaN is NaN. So
here the *loads* are masked. An entry is loaded when the generation of its window page is still the
one that the translation expects. A redirected entry expects generation 0, which no page has; a page
that was recycled between translation and attention has another, and is recorded as ``late``.

A program attends for one request and one KV head, with a tile of rows that are the group's heads of
some queries. Windows are short, so the KV of one request is not split over programs.
"""

# ruff: noqa: N803 - what is known when a kernel is compiled is in capitals, as Triton has it.

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.runtime.interpreter import InterpretedFunction  # type: ignore[import-untyped]

from hicache_guard.kernels import record as layout
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.translate import WindowTable

LATE = tl.constexpr(layout.AT_LATE)
NOBODY = tl.constexpr(layout.NOBODY)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: What a matrix unit takes at least.
_LEAST = 16


@triton.jit  # type: ignore[untyped-decorator]
def window_kernel(
    q: tl.tensor,
    k_buffer: tl.tensor,
    v_buffer: tl.tensor,
    sinks: tl.tensor,
    indptr: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    expected: tl.tensor,
    borns: tl.tensor,
    lengths: tl.tensor,
    q_indptr: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    record: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_REST: tl.constexpr,
    DV: tl.constexpr,
    DV_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINKS: tl.constexpr,
    CAP: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Attend; program (request, KV head, block of queries). A head has D + D_REST numbers."""
    r = tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(q_indptr + r)
    queries = tl.load(q_indptr + r + 1) - first
    query_block = tl.program_id(2) * (BLOCK_M // GROUP)
    if query_block < queries:
        m = tl.arange(0, BLOCK_M)
        query = query_block + m // GROUP
        asked = (m < BLOCK_M // GROUP * GROUP) & (query < queries)
        head = kv_head * GROUP + m % GROUP
        length = tl.load(lengths + r).to(tl.int32)
        position = length - queries + query

        d = tl.arange(0, D)
        row = (first + query).to(tl.int64)
        q_at = q + row * q_row + head * q_head
        q_tile = tl.load(q_at[:, None] + d[None, :], mask=asked[:, None], other=0.0)
        if D_REST:
            rest = D + tl.arange(0, D_REST)
            q_rest = tl.load(q_at[:, None] + rest[None, :], mask=asked[:, None], other=0.0)
            if WIDEN:
                q_rest = q_rest.to(tl.float32)
        if WIDEN:
            q_tile = q_tile.to(tl.float32)
        dv = tl.arange(0, DV_TILE)

        # A sink is a score with no value: what the sums begin with.
        if SINKS:
            top = tl.load(sinks + head, mask=asked, other=0.0).to(tl.float32) * LOG2E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
        else:
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DV_TILE], tl.float32)

        begin = tl.load(indptr + r)
        entries = tl.load(indptr + r + 1) - begin
        start = tl.load(starts + r)
        # Only entries that some query of this block can see.
        oldest = tl.maximum(length - queries + query_block - (window - 1) - start, 0)
        newest = length - queries + query_block + BLOCK_M // GROUP - start
        for at in range(oldest, tl.minimum(entries, newest), BLOCK_N):
            entry = at + tl.arange(0, BLOCK_N)
            there = entry < entries
            slot = tl.load(slots + begin + entry, mask=there, other=0).to(tl.int64)
            wanted = tl.load(expected + begin + entry, mask=there, other=0)
            born = tl.load(borns + slot.to(tl.int32) // PAGE, mask=there, other=-1)
            live = there & (born == wanted)
            late = there & (born != wanted) & (wanted != 0)
            if tl.sum(late.to(tl.int32)) > 0:
                # A minimum, not a count: several heads, blocks and layers meet the same entry.
                key = (r.to(tl.int64) << 32) | (start + entry).to(tl.int64)
                key = tl.min(tl.where(late, key, NOBODY))
                tl.atomic_min(record + LATE, key, sem="relaxed")

            k_at = k_buffer + slot * k_row + kv_head * k_head
            k_tile = tl.load(k_at[None, :] + d[:, None], mask=live[None, :], other=0.0)
            if WIDEN:
                k_tile = k_tile.to(tl.float32)
            score = tl.dot(q_tile, k_tile, input_precision="ieee")
            if D_REST:
                k_rest = tl.load(k_at[None, :] + rest[:, None], mask=live[None, :], other=0.0)
                if WIDEN:
                    k_rest = k_rest.to(tl.float32)
                score = tl.dot(q_rest, k_rest, score, input_precision="ieee")
            score *= scale
            if CAP:
                # tanh; where the exponential overflows this is 1, as it should be.
                score = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 / soft_cap * score) + 1.0))
            seen = start + entry
            visible = (seen[None, :] <= position[:, None]) & live[None, :]
            visible &= seen[None, :] > position[:, None] - window
            score = tl.where(visible, score * LOG2E, float("-inf"))

            top_now = tl.maximum(top, tl.max(score, 1))
            # A row that has seen nothing yet: -inf minus -inf would be NaN.
            base = tl.where(top_now > float("-inf"), top_now, 0.0)
            weight = tl.exp2(score - base[:, None])
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(weight, 1)
            v_at = v_buffer + slot * v_row + kv_head * v_head
            v_mask = live[:, None] & (dv < DV)[None, :]
            v_tile = tl.load(v_at[:, None] + dv[None, :], mask=v_mask, other=0.0)
            acc *= fade[:, None]
            weight = weight.to(v_tile.dtype)
            if WIDEN:
                weight, v_tile = weight.to(tl.float32), v_tile.to(tl.float32)
            acc = tl.dot(weight, v_tile, acc, input_precision="ieee")
            top = top_now

        # Where nothing was seen the sums are 0 and the top is -inf.
        total = tl.where(total > 0.0, total, 1.0)
        flat = row * HEADS + head
        out_at = out + flat[:, None] * DV + dv[None, :]
        out_mask = asked[:, None] & (dv < DV)[None, :]
        acc = acc / total[:, None]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=out_mask)
        tl.store(lse + flat, (top + tl.log2(total)) * LN2, mask=asked)


def attend(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    table: WindowTable,
    lengths: torch.Tensor,
    q_indptr: torch.Tensor,
    books: DeviceBooks,
    *,
    max_queries: int,
    window: int,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the windows of a translation's ``table``; returns the output and the denominators.

    ``q``: [total queries, heads, D], float32, bfloat16 or float16, as the buffers.
    ``k_buffer``: [window slots, KV heads, D], ``v_buffer``: [window slots, KV heads, Dv]; heads are
    a multiple of KV heads, D is a power of two from 16 or the sum of two (192 is 128 and 64).
    ``lengths`` [B]: as for the translation. ``q_indptr``: int32 [B + 1], where each request's
    queries begin; they are its last tokens, and each sees the ``window`` positions that end in its
    own, which must have been the translation's window. ``max_queries`` is at least what a request
    has: it fixes the launch. ``scale`` multiplies the scores; ``soft_cap`` above 0 bounds them by
    cap * tanh(score / cap); ``sinks`` [heads] join the denominator.

    The output, as ``q`` with Dv, and the natural logarithm of the denominators, float32 [total
    queries, heads], the sink included, go to ``out`` and ``lse`` where given. A query with nothing
    to attend to gets 0, and -inf or its sink. The first entry that no longer holds is left in
    ``table.record``. A tree's drafts see all drafts before them: a tree mask is not applied.

    Raises ``ValueError`` for shapes that do not fit, ``TypeError`` for dtypes that do not.
    """
    heads, kv_heads, width = q.shape[1], k_buffer.shape[1], v_buffer.shape[2]
    if not q.dtype == k_buffer.dtype == v_buffer.dtype:
        raise TypeError("queries, keys and values have one dtype")
    if (
        heads % kv_heads
        or v_buffer.shape[:2] != k_buffer.shape[:2]
        or q.shape[2] != (k_buffer.shape[2])
    ):
        raise ValueError("heads are a multiple of KV heads; keys are as long as queries")
    if any(tensor.stride(2) != 1 for tensor in (q, k_buffer, v_buffer)):
        raise ValueError("the numbers of a head are contiguous")
    if k_buffer.shape[0] > books.window_slots:
        raise ValueError("each slot of the buffers has a generation")
    most = 1 << (q.shape[2].bit_length() - 1)
    rest = q.shape[2] - most
    if most < _LEAST or (rest and (rest & (rest - 1) or rest < _LEAST)):
        raise ValueError(f"a head of {q.shape[2]} is not one or two powers of two from {_LEAST}")
    if out is None:
        out = q.new_empty(q.shape[0], heads, width)
    if lse is None:
        lse = torch.empty(q.shape[0], heads, dtype=torch.float32, device=q.device)
    group, count = heads // kv_heads, lengths.shape[0]
    if not count or not q.shape[0]:
        return out, lse
    # Triton's interpreter takes the bits of bfloat16 for integers in a product of tiles.
    widen = isinstance(window_kernel, InterpretedFunction) and q.dtype is torch.bfloat16
    tile = tile_of(q.dtype, group, max_queries, max(q.shape[2], width))
    grid = (count, kv_heads, triton.cdiv(max_queries, tile["BLOCK_M"] // group))
    window_kernel[grid](
        q, k_buffer, v_buffer, q if sinks is None else sinks,
        table.indptr, table.starts, table.slots, table.expected, books.window_born,
        lengths, q_indptr, out, lse, table.record,
        q.stride(0), q.stride(1), k_buffer.stride(0), k_buffer.stride(1),
        v_buffer.stride(0), v_buffer.stride(1), window, scale, soft_cap,
        HEADS=heads, GROUP=group, PAGE=books.page_size,
        D=most, D_REST=rest, DV=width, DV_TILE=triton.next_power_of_2(width),
        SINKS=sinks is not None, CAP=soft_cap > 0,
        WIDEN=widen, **tile,
    )  # fmt: skip
    return out, lse


def tile_of(dtype: torch.dtype, group: int, max_queries: int, widest: int) -> dict[str, int]:
    """The tile of a launch: rows, entries at a time, and warps; ``widest`` of D and Dv.

    Chosen so that nothing spills on sm_80, sm_90 and sm_100 (tests/test_kernels_compile.py says of
    what), not yet by time.
    """
    least = max(_LEAST, triton.next_power_of_2(group))
    # float32 has no matrix unit: a product of tiles is unrolled, and a large one spills.
    single = dtype is torch.float32
    rows = least if single or max_queries == 1 else max(least, 64)
    return {
        "BLOCK_M": rows,
        "BLOCK_N": 16 if single else 32,
        "num_warps": 8 if rows >= 64 and widest > 128 else 4,
    }
