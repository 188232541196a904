"""What proving each window slot costs on a GPU: translation, and attention that checks as it reads.

    translate   ours, against a gather that checks nothing (``plain``, the same reads and writes
                otherwise), and against SGLang's own (its gather kernel, then an index by the
                mapping), where a release can be imported
    decode      FlashInfer with our variant against FlashInfer's own kernel on the same indices

Each is captured in a CUDA graph and replayed, so that launches cost what they cost in a server.
Between replays the cache is flushed: a server's books are not in it. Bytes are those that must move
at least; the share of bandwidth is that of a copy measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.modes import Mode
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.flashinfer_window import (
    WORKSPACE,
    Attention,
    FlashInferDecode,
    why_not,
)
from hicache_guard.kernels.translate import WindowTable, WindowTranslation

ENTRIES = (1 << 10, 1 << 12, 1 << 15, 1 << 18, 1 << 20)
PAGE_SIZES = (1, 64)
WINDOW = 128
BATCHES = (1, 32, 256)
#: Query heads, KV heads and the dimension of a head, of models that have windows.
MODELS = {"gpt-oss-like": (64, 8, 64), "MiMo-like": (64, 8, 128)}
#: Bytes that are written between replays; more than any cache holds.
FLUSH = 256 << 20

Run = Callable[[], Any]


@dataclass
class Batch:
    """Requests whose windows lie in pages of one pair of pools, all of them live."""

    req_to_token: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    queries: torch.Tensor
    books: DeviceBooks

    @classmethod
    def of(cls, requests: int, page_size: int, device: torch.device) -> Batch:
        """``requests`` that each hold a window of tokens, in pages that are scattered."""
        pages_each = -(-WINDOW // page_size)
        pages = requests * pages_each
        slots = pages * page_size
        mapping = torch.zeros(slots + page_size + 1, dtype=torch.int64, device=device)
        mapping[-1] = -1
        guard = PoolGuard(
            Mode.OBSERVE, full_slots=slots, window_slots=slots, page_size=page_size, mapping=mapping
        )
        dice = torch.Generator(device=device).manual_seed(0)
        order = [torch.randperm(pages, generator=dice, device=device) + 1 for _ in range(2)]
        inside = torch.arange(page_size, device=device)
        full, window = ((page[:, None] * page_size + inside).reshape(-1) for page in order)
        mapping[full] = window
        guard.full.hand_out(order[0], 1)
        guard.window.hand_out(order[1], 1)
        guard.map.record(full, window, 1)
        table = full.view(requests, -1)[:, :WINDOW].to(torch.int32).contiguous()
        rows = torch.arange(requests, dtype=torch.int32, device=device)
        lengths = torch.full_like(rows, WINDOW)
        return cls(table, rows, lengths, torch.ones_like(rows), DeviceBooks.of(guard))

    def translation(self) -> tuple[WindowTranslation, Run]:
        """Ours, and one run of it."""
        count = self.rows.shape[0]
        device = self.books.mapping.device
        made = WindowTranslation.plan(count, count * WINDOW, WINDOW, torch.int32, device)
        return made, lambda: made.run(
            self.req_to_token, self.rows, self.lengths, self.queries, self.books
        )


def _gather_kernel() -> Any:
    """A translation that believes the mapping; made here, since Triton is needed on a GPU alone."""
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]

    @triton.jit  # type: ignore[untyped-decorator]
    def gather(table: Any, mapping: Any, out: Any, stride: Any, BLOCK: tl.constexpr) -> None:  # noqa: N803
        r = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        full = tl.load(table + r * stride + at).to(tl.int64)
        tl.store(out + r * BLOCK + at, tl.load(mapping + full).to(tl.int32))

    return gather


def plain(batch: Batch) -> Run:
    """As many reads and writes as a translation without a check needs."""
    kernel, count = _gather_kernel(), batch.rows.shape[0]
    out = torch.empty(count * WINDOW, dtype=torch.int32, device=batch.books.mapping.device)
    table, mapping = batch.req_to_token, batch.books.mapping
    return lambda: kernel[(count,)](table, mapping, out, table.stride(0), BLOCK=WINDOW)


def upstream(batch: Batch) -> Run | None:
    """SGLang's own: its gather of full slots, then an index by the mapping."""
    try:
        from sglang.srt.layers.attention.utils import create_flashinfer_kv_indices_triton
    except ImportError:
        return None
    count, device = batch.rows.shape[0], batch.books.mapping.device
    indptr = torch.arange(count + 1, dtype=torch.int32, device=device) * WINDOW
    starts = torch.zeros(count, dtype=torch.int32, device=device)
    out = torch.empty(count * WINDOW, dtype=torch.int32, device=device)
    table = batch.req_to_token

    def run() -> None:
        create_flashinfer_kv_indices_triton[(count,)](
            table, batch.rows, batch.lengths, indptr, starts, out, table.stride(0)
        )
        out.copy_(batch.books.mapping[out.long()])

    return run


def measure(run: Run, rounds: int, flush: torch.Tensor) -> float:
    """Microseconds of one replay: the median of ``rounds``, each after the cache was flushed."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(rounds):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def copy_bandwidth(rounds: int, flush: torch.Tensor) -> float:
    """Bytes a second, read and written, of a copy of a quarter of ``flush``."""
    source = flush[: flush.numel() // 4].clone()
    target = torch.empty_like(source)
    return 2e6 * source.nbytes / measure(lambda: target.copy_(source), rounds, flush)


def translate_bytes(entries: int) -> int:
    """Read at least: slot, mapping, stamp, owner, two generations; written: slot, expectation."""
    return entries * (4 + 8 + 4 + 4 + 4 + 4 + 4 + 4)


def translations(rounds: int, flush: torch.Tensor) -> list[dict[str, Any]]:
    bandwidth, rows = copy_bandwidth(rounds, flush), []
    for page_size in PAGE_SIZES:
        for entries in ENTRIES:
            batch = Batch.of(entries // WINDOW, page_size, flush.device)
            ours = measure(batch.translation()[1], rounds, flush)
            bare = measure(plain(batch), rounds, flush)
            theirs = upstream(batch)
            rows.append({
                "what": "translate", "page_size": page_size, "entries": entries,
                "ours_us": ours, "plain_us": bare, "ratio": ours / bare,
                "sglang_us": measure(theirs, rounds, flush) if theirs else None,
                "bytes": translate_bytes(entries),
                "bandwidth": translate_bytes(entries) / ours * 1e6 / bandwidth,
            })  # fmt: skip
    return rows


def decodes(rounds: int, flush: torch.Tensor) -> list[dict[str, Any]]:
    rows = []
    for model, (heads, kv_heads, dim) in MODELS.items():
        attention = Attention(heads, kv_heads, dim, dim, WINDOW)
        for requests in BATCHES:
            for tensor_cores in (False, True):
                if why_not(attention, 64, decode=True, tensor_cores=tensor_cores) is None:
                    timed = decode(attention, requests, tensor_cores, rounds, flush)
                    rows.append({"what": "decode", "model": model, "batch": requests, **timed})
    return rows


def decode(
    attention: Attention, requests: int, tensor_cores: bool, rounds: int, flush: torch.Tensor
) -> dict[str, Any]:
    """Ours and FlashInfer's own, on the same indices of the same pool."""
    import flashinfer  # type: ignore[import-not-found]

    device, dtype = flush.device, attention.dtype
    batch = Batch.of(requests, 64, device)
    table: WindowTable = batch.translation()[1]()
    kv_heads, dim = attention.kv_heads, attention.head_dim_qk
    shape = (batch.books.window_slots, kv_heads, dim)
    k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    q = torch.randn(requests, attention.query_heads, dim, dtype=dtype, device=device)
    ones, pages = torch.ones_like(table.starts), (k.unsqueeze(1), v.unsqueeze(1))

    ours = FlashInferDecode(attention, batch.books, tensor_cores=tensor_cores, graph=table)
    ours.plan(table)
    bare = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=device), "NHD",
        use_cuda_graph=True, use_tensor_cores=tensor_cores, paged_kv_indptr_buffer=table.indptr,
        paged_kv_indices_buffer=table.slots, paged_kv_last_page_len_buffer=ones,
    )  # fmt: skip
    bare.plan(
        table.indptr, table.slots, ones, attention.query_heads, kv_heads, dim, 1,
        window_left=WINDOW - 1, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    ours_us = measure(lambda: ours.run(q, k, v), rounds, flush)
    bare_us = measure(lambda: bare.run(q, pages), rounds, flush)
    return {
        "tensor_cores": tensor_cores,
        "ours_us": ours_us,
        "plain_us": bare_us,
        "ratio": ours_us / bare_us,
        "bytes": requests * WINDOW * kv_heads * 2 * dim * dtype.itemsize,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    flush = torch.zeros(FLUSH // 4, dtype=torch.int32, device="cuda")
    rows = translations(options.rounds, flush)
    try:
        rows += decodes(options.rounds, flush)
        missing = None
    except ImportError as error:
        missing = str(error)
    report = {"device": torch.cuda.get_device_name(), "times": rows, "no decode": missing}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
