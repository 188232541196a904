"""FlashInfer with our variant on a GPU, against float64.

Needs a CUDA device and FlashInfer; the first run compiles, which takes minutes for tensor cores.
"""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass

import pytest
import torch

from hicache_guard.core.ledger import FREED
from hicache_guard.kernels import record
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.flashinfer_window import Attention, FlashInferDecode, FlashInferPrefill
from hicache_guard.kernels.translate import WindowTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no FlashInfer"),
]

CUDA = torch.device("cuda")
HALF = torch.bfloat16
#: bf16 has 8 bits of mantissa; the probabilities are rounded to it before they meet V.
CLOSE = 2e-2


@dataclass(slots=True)
class World:
    """A pool, its books, and one batch's table; host copies are what the reference reads."""

    attention: Attention
    books: DeviceBooks
    table: WindowTable
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    queries: list[int]
    keys: list[int]
    sinks: torch.Tensor | None

    def bump(self, entry: int) -> None:
        """The page of an entry is recycled after translation."""
        page = int(self.table.slots[entry]) // self.books.page_size
        self.books.window_born[page] += 1

    def clear(self) -> None:
        """As the next translation does."""
        self.table.record[record.AT_LATE] = record.NOBODY

    @property
    def host_indptr(self) -> torch.Tensor:
        """Offsets of the entries, on the host."""
        return self.table.indptr.cpu()

    @property
    def host_qo_indptr(self) -> torch.Tensor:
        """Offsets of the queries, on the host."""
        offsets = torch.tensor([0, *self.queries], dtype=torch.int32).cumsum(0)
        return offsets.to(torch.int32)

    def late(self) -> tuple[int, int] | None:
        """The record's late offender."""
        return record.ViolationRecord.decode(self.table.record.tolist()).late

    def expected_late(self) -> tuple[int, int] | None:
        """What the record has to say: no key of a table is out of every query's window."""
        born, starts = self.books.window_born.tolist(), self.table.starts.tolist()
        for request, entry, key in self._entries():
            expected, slot = int(self.table.expected[entry]), int(self.table.slots[entry])
            if expected and born[slot // self.books.page_size] != expected:
                return request, starts[request] + key
        return None

    def reference(self) -> torch.Tensor:
        """Every query's attention over the keys that hold, in float64."""
        attention = self.attention
        group = attention.query_heads // attention.kv_heads
        indptr, born = self.table.indptr.tolist(), self.books.window_born.cpu()
        slots, expected = self.table.slots.cpu().long(), self.table.expected.cpu()
        holds = (born[slots // self.books.page_size] == expected) & (expected > 0)
        rows, at = [], 0
        for request, count in enumerate(self.queries):
            part = slice(indptr[request], indptr[request + 1])
            kept = slots[part]
            k = self.k.cpu().double()[kept].nan_to_num().repeat_interleave(group, 1)
            v = self.v.cpu().double()[kept].nan_to_num().repeat_interleave(group, 1)
            for query in range(count):
                own = len(kept) - count + query
                near = torch.arange(len(kept))
                near = (near <= own) & (near > own - attention.window) & holds[part]
                q = self.q[at].cpu().double()
                logits = torch.einsum("hd,khd->hk", q, k) * attention.softmax_scale
                if attention.soft_cap:
                    logits = attention.soft_cap * torch.tanh(logits / attention.soft_cap)
                logits = logits.masked_fill(~near, -torch.inf)
                if self.sinks is not None:
                    logits = torch.cat([logits, self.sinks.cpu().double()[:, None]], 1)
                weights = torch.softmax(logits, 1).nan_to_num()[:, : len(kept)]
                rows.append(torch.einsum("hk,khd->hd", weights, v))
                at += 1
        return torch.stack(rows)

    def _entries(self) -> list[tuple[int, int, int]]:
        indptr = self.table.indptr.tolist()
        return [
            (request, entry, entry - indptr[request])
            for request in range(len(self.queries))
            for entry in range(indptr[request], indptr[request + 1])
        ]


def world(
    attention: Attention,
    page_size: int,
    keys: list[int],
    queries: list[int] | None = None,
    known: float = 0.0,
    late: float = 0.0,
    seed: int = 1,
) -> World:
    """Requests of ``keys`` keys, of which translation refused the fraction ``known``.

    ``late``: for each key, how likely its whole page is to have ended since.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    pages = sum(-(-count // page_size) for count in keys)
    usable = (pages + 1) * page_size
    born = torch.full((pages + 2,), FREED, dtype=torch.int32)
    born[1:-1] = torch.randint(1, FREED // 2, (pages,), dtype=torch.int32)
    order = list(range(1, pages + 1))
    rng.shuffle(order)
    slots: list[int] = []
    for count in keys:
        own = [order.pop() for _ in range(-(-count // page_size))]
        slots += [page * page_size + at for page in own for at in range(page_size)][:count]
    expected = [int(born[slot // page_size]) for slot in slots]
    k = torch.randn(usable, attention.kv_heads, attention.head_dim_qk, dtype=HALF)
    v = torch.randn(usable, attention.kv_heads, attention.head_dim_vo, dtype=HALF)
    k[:page_size], v[:page_size] = 0, 0
    for entry in range(len(slots)):
        if rng.random() < known:
            # What somebody else wrote there since; redirected, so that it is not even loaded.
            k[slots[entry]], v[slots[entry]] = torch.nan, torch.nan
            slots[entry], expected[entry] = 0, 0
    ended = {slot // page_size for slot in slots if slot and rng.random() < late}
    for page in ended:
        born[page] = FREED | 5
    queries = [1] * len(keys) if queries is None else queries
    total = torch.tensor([0, *keys], dtype=torch.int32).cumsum(0).to(torch.int32)
    numbers = torch.zeros(record.LENGTH, dtype=torch.int64)
    numbers[record.AT_FIRST] = numbers[record.AT_LATE] = record.NOBODY
    table = WindowTable(
        indptr=total.to(CUDA),
        starts=torch.randint(0, 9999, (len(keys),), dtype=torch.int32).to(CUDA),
        slots=torch.tensor(slots, dtype=torch.int32).to(CUDA),
        expected=torch.tensor(expected, dtype=torch.int32).to(CUDA),
        record=numbers.to(CUDA),
    )
    full = torch.zeros(8, dtype=torch.int32, device=CUDA)
    books = DeviceBooks(
        mapping=full.long(),
        stamp=full,
        owner=torch.zeros((pages + 2) * page_size, dtype=torch.int32, device=CUDA),
        full_born=full,
        window_born=born.to(CUDA),
        page_size=page_size,
    )
    sinks = torch.randn(attention.query_heads).to(CUDA) if attention.sinks else None
    q = torch.randn(sum(queries), attention.query_heads, attention.head_dim_qk, dtype=HALF)
    return World(attention, books, table, k.to(CUDA), v.to(CUDA), q.to(CUDA), queries, keys, sinks)


def agrees(w: World, found: torch.Tensor) -> None:
    torch.testing.assert_close(found.double().cpu(), w.reference(), rtol=CLOSE, atol=CLOSE)
    assert w.late() == w.expected_late()


def decode(w: World, *, tensor_cores: bool) -> torch.Tensor:
    attend = FlashInferDecode(w.attention, w.books, tensor_cores=tensor_cores)
    attend.plan(w.table, w.host_indptr)
    return attend.run(w.q, w.k, w.v, sinks=w.sinks)


def form(group: int, *, sinks: bool, window: int = 128, soft_cap: float = 0.0) -> Attention:
    return Attention(8 * group, 8, 64, 64, window, sinks=sinks, soft_cap=soft_cap)


BOTH = pytest.mark.parametrize("tensor_cores", [False, True], ids=["decode", "tensor cores"])
SINKS = pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])


@BOTH
@SINKS
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("known", "late"), [(0.0, 0.0), (0.1, 0.1), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_decode(
    page_size: int, known: float, late: float, group: int, sinks: bool, tensor_cores: bool
) -> None:
    # Of pages of many slots, few that end take most keys along.
    likely = late if late == 1.0 else late / page_size
    w = world(form(group, sinks=sinks), page_size, [128, 1, 127, 77, 128], None, known, likely)
    agrees(w, decode(w, tensor_cores=tensor_cores))


@BOTH
def test_soft_cap(tensor_cores: bool) -> None:
    w = world(form(4, sinks=False, soft_cap=20.0), 16, [128, 65], None, 0.1, 0.01)
    agrees(w, decode(w, tensor_cores=tensor_cores))


@BOTH
@SINKS
def test_split_over_several_blocks(sinks: bool, tensor_cores: bool) -> None:
    w = world(form(8, sinks=sinks, window=32768), 16, [32768], None, 0.1, 0.001)
    agrees(w, decode(w, tensor_cores=tensor_cores))


@BOTH
@SINKS
def test_nothing_but_stale_keys_is_zero(sinks: bool, tensor_cores: bool) -> None:
    for known, late in ((1.0, 0.0), (0.0, 1.0)):
        w = world(form(8, sinks=sinks, window=4096), 1, [4096, 3], None, known, late)
        found = decode(w, tensor_cores=tensor_cores)
        assert found.count_nonzero() == 0
        assert not found.isnan().any()
        assert w.late() == w.expected_late()


@BOTH
def test_nan_in_k_of_a_page_that_ended_since_does_not_come_out(tensor_cores: bool) -> None:
    w = world(form(8, sinks=True), 16, [128, 100], None, 0.0, 0.01)
    ended = w.table.slots[
        w.books.window_born[w.table.slots.long() // 16] != w.table.expected
    ].long()
    w.k[ended] = torch.nan
    agrees(w, decode(w, tensor_cores=tensor_cores))


@BOTH
def test_a_replayed_graph_reads_the_books_of_the_replay(tensor_cores: bool) -> None:
    w = world(form(8, sinks=True), 16, [128, 90, 1])
    attend = FlashInferDecode(w.attention, w.books, tensor_cores=tensor_cores, graph=w.table)
    attend.plan(w.table, w.host_indptr)
    out = torch.empty_like(w.q)
    attend.run(w.q, w.k, w.v, sinks=w.sinks, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend.run(w.q, w.k, w.v, sinks=w.sinks, out=out)
    # As captured; a page recycled; another; and all translated anew, to other slots.
    for change in (None, 130, 5, "slots"):
        if isinstance(change, int):
            w.bump(change)
        elif change == "slots":
            w.table.slots.copy_(w.table.slots.flip(0))
            pages = w.table.slots.long() // w.books.page_size
            w.table.expected.copy_(w.books.window_born[pages])
        w.clear()
        graph.replay()
        torch.cuda.synchronize()
        agrees(w, out)


@SINKS
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
def test_prefill(dims: tuple[int, int], sinks: bool) -> None:
    attention = Attention(16, 4, *dims, 128, sinks=sinks)
    queries = [1, 40, 300, 7]
    keys = [128, 127 + 40, 300, 7]
    w = world(attention, 16, keys, queries, 0.1, 0.005)
    attend = FlashInferPrefill(attention, w.books)
    attend.plan(w.table, w.host_qo_indptr, w.host_indptr)
    agrees(w, attend.run(w.q, w.k, w.v, sinks=w.sinks))


def test_prefill_of_one_query_is_decode_where_dimensions_differ() -> None:
    attention = Attention(32, 4, 192, 128, 128, sinks=True)
    w = world(attention, 64, [128, 1, 60], None, 0.1, 0.002)
    attend = FlashInferPrefill(attention, w.books)
    attend.plan(w.table, w.host_qo_indptr, w.host_indptr)
    agrees(w, attend.run(w.q, w.k, w.v, sinks=w.sinks))
