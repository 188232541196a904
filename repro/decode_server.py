"""What the decode side of a disaggregated deployment does with the hybrid allocator.

Which calls SGLang 0.5.12 makes, and in which order: speculative decoding (EAGLE, spec v2) allocates
ahead of what is accepted, and gives back what is committed and what is spare by separate frees. The
callers' index arithmetic is written here in our words; every allocation and free is carried out by
the allocator of the release on the path. Used by the story and by the churn of #25805. Not
modelled: the forward pass, the KV transfer, and the copy of KV to the host at a retraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache_guard.core.journal import acting_for
from hicache_guard.repro import pools
from hicache_guard.repro.audit import Books

#: Where each operation comes from, in 0.5.12 under sglang/srt.
PREALLOCATE = "disaggregation/decode.py:_pre_alloc"
EVICT = "managers/schedule_batch.py:_evict_swa"
GROW = "speculative/eagle_info_v2.py:prepare_for_decode"
RESULTS = "managers/scheduler_output_processor_mixin.py:process_batch_result_decode"
FREE_COMMITTED = "mem_cache/chunk_cache.py:cache_finished_req"
FREE_SPARE = "mem_cache/common.py:release_kv_cache"


@dataclass(eq=False)
class Request:
    """One request on the decode server, with the counters that SGLang keeps for it.

    ``committed`` tokens have KV for good, ``allocated`` slots are its own, window KV before
    ``evicted`` was given back and before ``tail_start`` never existed. ``produced`` counts output
    tokens, the first of which the prefill server sent.
    """

    name: str
    prompt: int
    wanted: int
    accepts: tuple[int, ...] = ()
    row: int = -1
    produced: int = 1
    committed: int = 0
    allocated: int = 0
    evicted: int = 0
    tail_start: int = 0
    launched: int = 0
    aborted: bool = False
    ended: bool = False
    retracted: bool = False
    freed_to: int = 0


@dataclass(frozen=True)
class Operation:
    """One call into the allocator: what for, by whom, and the positions [first, last) it named."""

    verb: str
    caller: str
    requests: tuple[Request, ...]
    first: int = 0
    last: int = 0


class DecodeServer:
    """What the decode side does with a hybrid allocator, in the order of its overlapped event loop.

    ``after`` is told of every operation once it returned. ``accept`` says how many of the
    ``drafts`` tokens a step yields. ``in_group`` while frees are only queued: what they release is
    then neither held nor free.
    """

    def __init__(
        self,
        allocator: Any,
        *,
        window: int,
        drafts: int,
        rows: int,
        context: int,
        accept: Callable[[Request], int],
        after: Callable[[Operation], None],
    ) -> None:
        self.allocator = allocator
        self.page = int(allocator.page_size)
        self.window = window
        self.drafts = drafts
        self.interval = max(self.page, window) // self.page * self.page
        self.table = torch.zeros((rows, context), dtype=torch.int32)
        self.running: list[Request] = []
        self.retracted: list[Request] = []
        self.finished = 0
        self.retractions = 0
        self.in_group = False
        self._accept = accept
        self._after = after
        self._free_rows = list(range(rows - 1, -1, -1))
        self._holding: list[Request] = []
        self._unread: list[tuple[Request, int]] = []

    # -- what is where ---------------------------------------------------------------------------

    @property
    def holding(self) -> Sequence[Request]:
        """Requests that own slots."""
        return self._holding

    @property
    def idle(self) -> bool:
        return not (self._holding or self._unread or self.retracted)

    def held(self, request: Request) -> torch.Tensor:
        """The full slots that a request owns (int32)."""
        return self.table[request.row, request.freed_to : request.allocated]

    def books(self) -> Books:
        return {request.name: self.held(request).long() for request in self._holding}

    # -- the event loop --------------------------------------------------------------------------

    def iterate(self, arrivals: Iterable[Request]) -> None:
        """One turn: admit, launch the next step, then read the results of the step before."""
        for request in arrivals:
            self.preallocate(request)
            self.running.append(request)
        unread = self._unread
        self._unread = self._launch()
        if unread:
            self._read(unread)

    def preallocate(self, request: Request) -> None:
        """Make room for a prompt whose KV the prefill server will send: of the window, a tail."""
        length = request.prompt + max(request.produced - 1, 0)
        start = max(0, length - self.window) // self.page * self.page
        with acting_for(request.name):
            got = pools.extend_tail(self.allocator, length, length - start)
        if got is None:
            raise RuntimeError(f"the pools are too small for {request.name}")
        request.row = self._free_rows.pop()
        self.table[request.row, :length] = got
        request.committed = request.allocated = length
        request.tail_start = start
        request.retracted = False
        self._holding.append(request)
        self._after(Operation("preallocate", PREALLOCATE, (request,), start, length))

    def _launch(self) -> list[tuple[Request, int]]:
        batch = self.running = [r for r in self.running if not r.ended]
        if not batch:
            return []
        self._make_room()
        batch = self.running
        for request in batch:
            if request.launched % self.interval == 1:
                self._evict(request)
        self._grow(batch)
        return [(request, self._accept(request)) for request in batch]

    def _wants(self, request: Request) -> int:
        """Slots that a request has after the next step: room for two steps of drafts."""
        return max(request.allocated, request.committed + 2 * self.drafts)

    def _pages(self, slots: int) -> int:
        return -(-slots // self.page)

    def _make_room(self) -> None:
        """Retract the youngest requests while the next step would not fit."""
        while len(self.running) > 1:
            need = sum(self._pages(self._wants(r)) - self._pages(r.allocated) for r in self.running)
            if need * self.page <= self.allocator.available_size():
                return
            self._retract(self.running.pop())

    def _evict(self, request: Request) -> None:
        """Give back the window KV that has left the window; none of it is known to be there."""
        seen = request.prompt + request.produced - 1
        until = max(request.evicted, seen - self.window - self.page) // self.page * self.page
        first, request.evicted = request.evicted, max(request.evicted, until)
        if until > first:
            with acting_for(request.name):
                self.allocator.free_swa(self.table[request.row, first:until])
            self._after(Operation("evict", EVICT, (request,), first, until))

    def _grow(self, batch: list[Request]) -> None:
        now = [request.allocated for request in batch]
        then = [self._wants(request) for request in batch]
        count = sum(then) - sum(now)
        before = torch.tensor(now, dtype=torch.int32)
        after = torch.tensor(then, dtype=torch.int32)
        last = torch.stack([self.table[r.row, r.allocated - 1] for r in batch])
        with acting_for(", ".join(request.name for request in batch)):
            got = self.allocator.alloc_extend(before, before, after, after, last, count)
        if got is None:
            raise RuntimeError("the pools are too small for one step of decoding")
        start = 0
        for request, old, new in zip(batch, now, then, strict=True):
            self.table[request.row, old:new] = got[start : start + new - old]
            start += new - old
            request.allocated = new
            request.committed += 1  # the token that a step yields at least; settled when it is read
            request.launched += 1
        self._after(Operation("grow", GROW, tuple(batch), sum(now), sum(then)))

    def _read(self, results: list[tuple[Request, int]]) -> None:
        """Commit what was accepted and release requests that have ended, in one free group."""
        self.allocator.free_group_begin()
        self.in_group = True
        gone: list[Request] = []
        for request, accepted in results:
            if request.retracted:
                continue
            if request.ended:
                request.committed -= 1
                continue
            request.committed += accepted - 1
            request.produced += accepted
            if request.produced >= request.wanted or request.aborted:
                request.ended = True
                self._release(request)
                gone.append(request)
        with acting_for(", ".join(request.name for request in gone) or "nobody"):
            self.allocator.free_group_end()
        self.in_group = False
        for request in gone:
            self._forget(request)
            self.finished += 1
        if gone:
            self._after(Operation("close", RESULTS, tuple(gone)))

    # -- the end of a request --------------------------------------------------------------------

    def _release(self, request: Request) -> None:
        """Free [0, committed) and the spare slots from the next page on. What lies between those
        two, in the last committed page, is named by neither."""
        row, committed = self.table[request.row], request.committed
        spare = self._pages(committed) * self.page
        with acting_for(request.name):
            self.allocator.free(row[:committed])
        if not self.in_group:
            request.freed_to = min(spare, request.allocated)
        self._after(Operation("free committed", FREE_COMMITTED, (request,), 0, committed))
        if spare < request.allocated:
            with acting_for(request.name):
                self.allocator.free(row[spare : request.allocated])
            if not self.in_group:
                request.freed_to = request.allocated
            self._after(Operation("free spare", FREE_SPARE, (request,), spare, request.allocated))

    def _forget(self, request: Request) -> None:
        self._holding.remove(request)
        self._free_rows.append(request.row)
        request.row = -1
        request.freed_to = 0

    def _retract(self, request: Request) -> None:
        self._release(request)
        self._forget(request)
        request.committed = request.allocated = request.evicted = request.launched = 0
        request.retracted = True
        self.retracted.append(request)
        self.retractions += 1

    def give_up(self, request: Request) -> None:
        """The KV of a preallocated request did not arrive: release it before it ever ran."""
        self._release(request)
        self._forget(request)
        request.ended = True
        self.finished += 1
