"""Churn at scale: a release's own pools and tree under generated traffic, judged as it goes.

One server as ``scheduling`` makes it serves ``traffic``: prefill in chunks, decoding in batches,
caching, eviction under pressure, aborts, retractions; on the same pools a decode side of PD
disaggregation (``decode_server``) pre-allocates window tails for the remote requests. No server
does both at once; here they share pools so that pages go from one to the other. ``churn_oracle``
judges every hit, every request's row when it ends, rows of the decode side in turn, and the places
of all pages after every slice. A server that dies is noted and started anew, as on a node.

This module is the program that runs inside a release, one process a mode. It reads a number of
requests a line from stdin, serves that many, and answers with one JSON line; whoever started two of
them lets them take turns, so that both see the same machine. Seconds are CPU seconds of the
release's functions that touch KV, with the guard's in them; making requests and judging is left
out. The decode side's seconds include its own small Python.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import resource
import signal
import sys
import time
import traceback
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import install
from hicache_guard.adapters.tree_link import ATTRIBUTE
from hicache_guard.repro import churn_25805, decode_server, paired, pools, scheduling
from hicache_guard.repro.churn_oracle import Contents, Holder, Numbers, Prefixes, misplaced
from hicache_guard.repro.host_tier import HostTier
from hicache_guard.repro.traffic import MOST_OUTPUT, Arrival, Traffic

#: Requests that decode at once on each side, where the pools are large enough.
BATCH, REMOTE = 128, 64
#: Tokens of a prefill batch, where the window pool is large enough.
CHUNK = 8192
#: Window slots for one full slot: what releases take by default.
WINDOW_SHARE = 0.8
DRAFTS = 4
#: Seconds after which a slice is taken to hang.
LIMIT = 900


@dataclass(frozen=True)
class Scale:
    """One server: its tree, its pools in slots, and the longest request in tokens."""

    tree: str
    slots: int
    page_size: int
    window: int
    longest: int
    #: Host slots for one slot of the device, 0 without a host tier.
    host: float = 0.0

    @property
    def window_slots(self) -> int:
        return int(self.slots * WINDOW_SHARE) // self.page_size * self.page_size

    @property
    def least(self) -> int:
        """The fewest slots that can serve such requests."""
        return int(8 * (self.longest + 4 * self.page_size) / WINDOW_SHARE)


class OutOfPages(Exception):
    """What the pools must have by their books is not there: pages were lost."""


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way, and for each of its tokens the number of the prefix that ends there."""

    arrival: Arrival
    numbers: Numbers
    req: Any = None
    produced: int = 0
    #: How many tokens of it have KV.
    length: int = 0
    #: Slots of either pool that it may take; a tree locks window KV by whole nodes.
    need: int = 0


@dataclass
class Found:
    """What was counted since the start; seconds by part."""

    finished: int = 0
    hits: int = 0
    hit_tokens: int = 0
    asked_tokens: int = 0
    wrong_hits: int = 0
    wrong_hit_tokens: int = 0
    wrong_rows: int = 0
    replaced_prefixes: int = 0
    dirty_audits: int = 0
    audits: int = 0
    misplaced: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    lost_with_server: int = 0
    aborted: int = 0
    retracted: int = 0
    lost_transfers: int = 0
    loaded_back: int = 0
    computed_tokens: int = 0
    decode_steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Node:
    """One server and its traffic."""

    def __init__(self, release: scheduling.Release, scale: Scale, found: Found) -> None:
        self.scale, self.found, self.release = scale, found, release
        pages = scale.slots // scale.page_size
        window_pages = scale.window_slots // scale.page_size
        self.chunk = min(CHUNK, scale.window_slots // 4 // scale.page_size * scale.page_size)
        self.server = scheduling.Server(
            release,
            scale.tree,
            page_size=scale.page_size,
            window=scale.window,
            full_pages=pages,
            window_pages=window_pages,
            longest=scale.longest + 2 * scale.page_size,
            rows=BATCH + 2,
        )
        self.allocator, self.tree = self.server.allocator, self.server.tree
        self.tier = HostTier(self.server, "write_through", ratio=scale.host) if scale.host else None
        self.need = int(self.tree.sliding_window_size)
        self.contents = Contents(self.server)
        self.prefixes = Prefixes(scale.longest + 2 * scale.page_size)
        self.table = self.server.rows.req_to_token.numpy()
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.chunked: Job | None = None
        self.full_used = self.window_used = 0
        self.remote = Remote(self)

    # --- a scheduler's step ----------------------------------------------------------------------

    def step(self, arrivals: Iterator[Arrival]) -> None:
        """A prefill batch of whoever fits, one decode step of all that run, the decode side's."""
        if self.tier is not None:
            self.clocked("tier", self.tier.poll)
        self._prefill(arrivals)
        if self.running:
            self._decode()
        self.remote.step()

    def clocked(self, part: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call what ``Run`` does not clock by itself."""
        start = time.thread_time()
        result = call(*args)
        self.found.seconds[part] += time.thread_time() - start
        return result

    def _prefill(self, arrivals: Iterator[Arrival]) -> None:
        server, budget, partial = self.server, self.chunk, False
        batch: list[tuple[Job, int]] = []
        newcomers: list[Job] = []
        if self.chunked is not None:
            job = self.chunked
            self.chunked = None
            if job.arrival.gone_after == 0:
                server.abort(job.req)
                self._ended(job)
                self.found.aborted += 1
            else:
                server.next_chunk(job.req)
                count = server.plan(job.req, budget)
                batch.append((job, count))
                budget -= count
                partial = job.length + count < self._total(job)
        while len(self.running) + len(batch) < BATCH and budget >= server.page_size:
            if partial and self.tier is not None:
                break  # what is to be computed is known after the load-back only
            next_ = self._next(arrivals)
            if next_ is None:
                break
            count = self._admit(next_, budget, partial)
            if not count:
                self.waiting.appendleft(next_)
                break
            batch.append((next_, count))
            newcomers.append(next_)
            budget -= count
            partial = partial or next_.length + count < self._total(next_)
        if not batch:
            return
        if self.tier is not None:
            self.clocked("tier", self.tier.start_loads)
            self.clocked("tier", self.tier.finish_loads)
        for job in newcomers:
            if job.length:
                self._judge_hit(job)
        self._room(sum(count for _, count in batch) + len(batch) * server.page_size)
        server.extend([job.req for job, _ in batch], [count for _, count in batch])
        for job, count in batch:
            self._computed(job, count)

    def _next(self, arrivals: Iterator[Arrival]) -> Job | None:
        """The next request that fits beside those that run, with its need counted."""
        if not self.waiting:
            arrival = next(arrivals)
            while arrival.kind == "remote":
                self.remote.waiting.append(arrival)
                arrival = next(arrivals)
            tokens = np.concatenate((arrival.prompt, arrival.output))
            job = Job(arrival, self.prefixes.of(tokens))
            ids = array("q", arrival.prompt.astype(np.int64).tobytes())
            job.req = self.server.request(str(arrival.number), ids)
            spare = 2 * self.scale.page_size
            job.need = len(tokens) + spare
            self.waiting.append(job)
        job = self.waiting[0]
        if not self.fits(job.need, job.need):
            return None
        return self.waiting.popleft()

    def fits(self, full: int, window: int) -> bool:
        """Whether one more may run: as if nothing were shared, beside a chunk and a decode step."""
        spare = self.chunk + (BATCH + REMOTE) * self.scale.page_size
        spare = min(spare, self.scale.window_slots // 2)
        return (
            self.full_used + full <= self.scale.slots - spare
            and self.window_used + window <= self.scale.window_slots - spare
        )

    def _admit(self, job: Job, budget: int, partial: bool) -> int:
        """Match, look whether the hit is right, and lock; how many tokens to compute now.

        ``partial`` is whether a request of this batch is a chunk already; there may be one.
        """
        server, req, found = self.server, job.req, self.found
        page = server.page_size
        self.clocked("admit", server.match, req)
        hit = server.prefix_length(req)
        total = self._total(job)
        if self.tier is None or not self.tier.wants_load(req):
            count = server.plan(req, total)
            if count > budget:
                if partial:
                    return 0
                count = budget // page * page
        else:
            count = 0  # known once the load-back is allocated
        if self.tier is None:
            self.clocked("admit", server.lock, req)
        else:
            found.loaded_back += self.clocked("admit", self.tier.admit, req)
            hit = server.prefix_length(req)
            count = min(total - hit, budget)
            if count < total - hit:
                count = count // page * page
        if job.arrival.gone_after == 0 and not partial and total - hit > 2 * page:
            count = min(count, (total - hit) // 2 // page * page)
        job.length = hit
        server.plan(req, count)
        found.asked_tokens += total
        if hit:
            found.hits += 1
            found.hit_tokens += hit
        self.full_used += job.need
        self.window_used += job.need
        return count

    @staticmethod
    def _total(job: Job) -> int:
        """Tokens of a request that must have KV before its next token can be sampled."""
        return len(job.arrival.prompt) + job.produced

    def _judge_hit(self, job: Job) -> None:
        """Whether a newcomer's prefix is the KV of its tokens, what was loaded back included."""
        hit = job.length
        slots = self.server.prefix(job.req)[:hit].numpy()
        if not self.contents.right(slots, job.numbers[:hit], self.need):
            self.found.wrong_hits += 1
            self.found.wrong_hit_tokens += hit

    def _room(self, tokens: int) -> None:
        """Have the tree give what it can; up to 0.5.21 an allocation that does not fit is lost."""
        if self.server.room() < tokens:
            self.clocked("evict", self.release.make_room, self.tree, tokens)
            if self.server.room() < tokens:
                raise OutOfPages("the pools have fewer pages than they must have")

    def _computed(self, job: Job, count: int) -> None:
        """After a prefill batch: KV is written, and goes into the tree."""
        start, job.length = job.length, job.length + count
        self.found.computed_tokens += count
        self.contents.write(self._row(job)[start:], job.numbers[start : job.length])
        if job.length < self._total(job):
            self.server.cache_unfinished(job.req, chunked=True)
            self.chunked = job
            return
        if self._sampled(job):
            self.server.cache_unfinished(job.req, chunked=False)
            self.running.append(job)

    def _row(self, job: Job) -> Numbers:
        """A copy of the row of a request, as far as it has KV."""
        row: Numbers = self.table[scheduling.field(job.req, "req_pool_idx"), : job.length]
        return row.astype(np.int64)

    def _decode(self) -> None:
        server, running = self.server, self.running
        self._room(len(running) * server.page_size)
        server.decode([job.req for job in running])
        self.found.decode_steps += 1
        slots = np.empty(len(running), dtype=np.int64)
        numbers = np.empty(len(running), dtype=np.int64)
        for at, job in enumerate(running):
            job.length += 1
            slots[at] = self.table[scheduling.field(job.req, "req_pool_idx"), job.length - 1]
            numbers[at] = job.numbers[job.length - 1]
        self.contents.write(slots, numbers)
        self.running = [job for job in running if self._sampled(job)]
        for job in [job for job in self.running if job.arrival.retracted_after == job.produced]:
            self._retract(job)

    def _sampled(self, job: Job) -> bool:
        """One more token of a request; whether it goes on."""
        arrival = job.arrival
        job.req.output_ids.append(int(arrival.output[job.produced]))
        job.produced += 1
        gone = arrival.gone_after is not None and job.produced >= max(arrival.gone_after, 1)
        if job.produced < len(arrival.output) and not gone:
            return True
        self.found.aborted += gone
        self._judge_row(job)
        self.server.finish(job.req)
        self._ended(job)
        return False

    def _judge_row(self, job: Job) -> None:
        """Whether a request still has the KV of all its tokens.

        Up to 0.5.14 a prefix that it shares may have been replaced, and its slots given away, while
        it ran (#29352); that is counted apart.
        """
        slots, numbers = self._row(job), job.numbers[: job.length]
        if self.contents.right(slots, numbers, self.need):
            return
        shared = self.server.protected(job.req)
        own = slots[shared:], numbers[shared:], min(self.need, job.length - shared)
        if shared and self.contents.right(*own):
            self.found.replaced_prefixes += 1
        else:
            self.found.wrong_rows += 1

    def _retract(self, job: Job) -> None:
        job.arrival.retracted_after = None
        index = self.running.index(job)
        reqs = [each.req for each in self.running]
        self.clocked("retract", self.server.retract, reqs, index)
        self.running.pop(index)
        self.waiting.append(job)
        self.full_used -= job.need
        self.window_used -= job.need
        self.found.retracted += 1

    def _ended(self, job: Job) -> None:
        self.found.finished += 1
        self.full_used -= job.need
        self.window_used -= job.need

    # --- looking -------------------------------------------------------------------------------

    def holders(self) -> list[Holder]:
        """Who owns which full slots, by the tree's word and the requests' rows."""
        held = [Holder("the tree", self.server.tree_slots().numpy())]
        jobs = self.running if self.chunked is None else [*self.running, self.chunked]
        for job in jobs:
            own = self._row(job)[self.server.protected(job.req) :]
            held.append(Holder(str(job.arrival.number), own))
        return held + self.remote.holders()

    def audit(self) -> None:
        """Look at the places of all pages."""
        self.clocked("settle", pools.settle, self.allocator)
        wrong = misplaced(self.allocator, self.holders())
        self.found.audits += 1
        self.found.dirty_audits += bool(wrong)
        for what, count in wrong.items():
            self.found.misplaced[what] = max(self.found.misplaced[what], count)

    def state(self) -> dict[str, int]:
        """Tokens that the tree holds, by side, and those that run."""
        return {
            "tree": int(self.tree.full_evictable_size() + self.tree.full_protected_size()),
            "tree_window": int(self.tree.swa_evictable_size() + self.tree.swa_protected_size()),
            "running": len(self.running) + len(self.remote.decoding.holding),
        }

    def aboard(self) -> int:
        """Requests that go with this server if it dies."""
        chunked = self.chunked is not None
        return len(self.running) + chunked + len(self.remote.decoding.holding)


class Remote:
    """The decode side on the same pools: window tails pre-allocated, drafts, failed transfers."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.waiting: deque[Arrival] = deque()
        scale = node.scale
        context = scale.longest + MOST_OUTPUT + 16 * DRAFTS + 2 * scale.page_size
        self._prefixes = Prefixes(context)
        self.decoding = decode_server.DecodeServer(
            node.allocator,
            window=scale.window,
            drafts=DRAFTS,
            rows=REMOTE,
            context=context,
            accept=lambda request: request.accepts[request.launched % len(request.accepts)],
            after=self._after,
        )
        self._aside = 0.0
        self._numbers: dict[str, Numbers] = {}
        self._needs: dict[str, tuple[int, int]] = {}
        self._arrivals: dict[str, Arrival] = {}
        self._turn = 0

    def step(self) -> None:
        """One turn of its event loop, if there is anything to do."""
        decoding, node = self.decoding, self.node
        if decoding.idle and not self.waiting:
            return
        for request in [each for each in decoding.running if not each.ended]:
            gone = self._arrivals[request.name].gone_after
            if gone is not None and request.launched >= gone and not request.aborted:
                request.aborted = True
                node.found.aborted += 1
        page = node.scale.page_size
        growth = (len(decoding.running) + len(self.waiting)) * (2 * DRAFTS + page)
        arrivals = []
        for arrival in self._fitting():
            tokens = len(arrival.prompt) + 2 * page
            node._room(tokens)
            request = self._request(arrival)
            if arrival.lost:
                self._clocked(self._lose, request)
            else:
                # One at a time: each makes its own room, as a queue of transfers does.
                self._clocked(self._preallocate, request)
                arrivals.append(request)
        node._room(growth)
        before = decoding.finished
        self._clocked(decoding.iterate, ())
        node.found.finished += decoding.finished - before
        self._forget()
        self._look()

    def _fitting(self) -> Iterator[Arrival]:
        node, scale = self.node, self.node.scale
        while self.waiting and len(self.decoding.holding) < REMOTE:
            arrival = self.waiting[0]
            most = len(arrival.prompt) + MOST_OUTPUT + 8 * DRAFTS + 2 * scale.page_size
            window = min(most, node.need + MOST_OUTPUT + 8 * DRAFTS + 2 * scale.page_size)
            if not node.fits(most, window):
                return
            node.full_used += most
            node.window_used += window
            self._needs[str(arrival.number)] = most, window
            yield self.waiting.popleft()

    def _request(self, arrival: Arrival) -> decode_server.Request:
        name = str(arrival.number)
        accepts = tuple(1 + int(token) % DRAFTS for token in arrival.output)
        request = decode_server.Request(
            name, prompt=len(arrival.prompt), wanted=len(arrival.output) + 1, accepts=accepts
        )
        # One number for all: nobody else's prefix has it, and rejected drafts are as good as any.
        most = self._needs[name][0] + 8 * DRAFTS
        self._numbers[name] = self._prefixes.of(np.full(most, arrival.number, dtype=np.int32))
        self._arrivals[name] = arrival
        return request

    def _preallocate(self, request: decode_server.Request) -> None:
        self.decoding.preallocate(request)
        self.decoding.running.append(request)

    def _lose(self, request: decode_server.Request) -> None:
        self.decoding.preallocate(request)
        self.decoding.give_up(request)
        self.node.found.lost_transfers += 1
        self.node.found.finished += 1

    def _clocked(self, call: Callable[..., Any], *args: Any) -> None:
        """As ``Node.clocked``, without what is done on the side to judge."""
        self._aside = 0.0
        start = time.thread_time()
        try:
            call(*args)
        finally:
            spent = time.thread_time() - start - self._aside
            self.node.found.seconds["remote"] += spent

    def _after(self, operation: decode_server.Operation) -> None:
        """KV is written for what was allocated: it arrived, or a step computed it."""
        if operation.verb not in ("preallocate", "grow"):
            return
        start = time.thread_time()
        for request in operation.requests:
            first = 0 if operation.verb == "preallocate" else max(request.committed - 1, 0)
            row = self.decoding.table[request.row, first : request.allocated].numpy()
            numbers = self._numbers[request.name][first : request.allocated]
            self.node.contents.write(row.astype(np.int64), numbers)
        self._aside += time.thread_time() - start

    def _forget(self) -> None:
        """Let go of who is no longer held."""
        held = {request.name for request in self.decoding.holding}
        for name in [name for name in self._needs if name not in held]:
            full, window = self._needs.pop(name)
            self.node.full_used -= full
            self.node.window_used -= window
            del self._numbers[name], self._arrivals[name]

    def _look(self) -> None:
        """Whether two of those that run, each time others, still have their KV."""
        running = self.decoding.running
        for _ in range(min(2, len(running))):
            self._turn += 1
            request = running[self._turn % len(running)]
            if request.ended:
                continue
            row = self.decoding.held(request).numpy().astype(np.int64)
            need = min(self.node.need, request.allocated - max(request.tail_start, request.evicted))
            if not self.node.contents.right(row, self._numbers[request.name][: len(row)], need):
                self.node.found.wrong_rows += 1

    def holders(self) -> list[Holder]:
        return [
            Holder(request.name, self.decoding.held(request).numpy().astype(np.int64))
            for request in self.decoding.holding
        ]


class Run:
    """One mode: a server, another when it dies, and what was counted over all of them."""

    def __init__(self, mode: str, scale: Scale, seed: int, kinds: Counter[str]) -> None:
        """``kinds`` is where the guard counts its violations; it must be installed already."""
        self.mode, self.scale, self.kinds = mode, scale, kinds
        self.found = Found()
        self.matches: Counter[str] = Counter()
        self.release = scheduling.Release()
        for part, names in (
            ("extend", ["extend"]), ("decode", ["decode"]), ("finish", ["release"]),
            ("cache", ["checkpoint", "keep"]),
        ):  # fmt: skip
            for name in names:
                if getattr(self.release, name) is not None:
                    setattr(self.release, name, self._clocked(part, getattr(self.release, name)))
        self.arrivals = iter(Traffic(seed, scale.longest))
        self.guard_bytes = 0
        self.node = Node(self.release, scale, self.found)

    def _clocked(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        seconds = self.found.seconds

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                seconds[part] += time.thread_time() - start

        return timed

    def slice(self, count: int) -> dict[str, Any]:
        """Serve until ``count`` more have ended; everything that was counted so far."""
        until = self.found.finished + count
        while self.found.finished < until:
            self._surviving(lambda: self.node.step(self.arrivals))
        self._surviving(self.node.audit)
        return self.report()

    def _surviving(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            theirs = [frame for frame in frames if "/sglang/" in frame.filename]
            if not theirs and not isinstance(error, OutOfPages):
                raise  # a fault of this program's own
            where = f"{Path(theirs[-1].filename).name}: {theirs[-1].line}" if theirs else str(error)
            self.found.deaths[f"{type(error).__name__} in {where}"[:160]] += 1
            self._restart()

    def _restart(self) -> None:
        """The server died; its requests are gone, and those that wait stay with the client."""
        self.matches = Counter(self._matches())
        aboard = self.node.aboard()
        self.found.lost_with_server += aboard
        self.found.finished += max(aboard, 1)  # so that a server that cannot start ends the run too
        waiting = self.node.remote.waiting
        del self.node
        gc.collect()
        self.node = Node(self.release, self.scale, self.found)
        self.node.remote.waiting = waiting

    def _matches(self) -> dict[str, int]:
        """What the guard counted of matches, over all servers so far."""
        if self.mode == "off":
            return {}
        self.guard_bytes = guard_of(self.node.allocator).nbytes()
        tally = vars(self.node.tree)[ATTRIBUTE].record.tally
        return dict(Counter(tally.snapshot()) + self.matches)

    def report(self) -> dict[str, Any]:
        """As data; counts since the start."""
        found = self.found
        return {
            "mode": self.mode,
            **{name: value for name, value in vars(found).items() if name != "seconds"},
            "seconds": dict(found.seconds),
            "violations": dict(self.kinds),
            "matches": self._matches(),
            "guard_bytes": self.guard_bytes,
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            **self.node.state(),
        }


def decode_without_triton() -> None:
    """As ``churn_25805.compute_slots_without_triton``, for single-token decoding.

    Replaced: the launch of ``alloc_decode_kernel``. A request whose last page is full gets the
    first slot of the next free page, in the order of the batch; any other the slot after its last.
    A test compares the two.
    """
    module: Any = churn_25805._home_of_page_allocator()

    class Launcher:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return slots_of_a_step

    module.alloc_decode_kernel = Launcher()


def slots_of_a_step(
    lengths: torch.Tensor,
    last: torch.Tensor,
    free: torch.Tensor,
    out: torch.Tensor,
    _batch: int,
    page_size: int,
) -> None:
    """Fill ``out`` (int64, [batch]) for requests that have ``lengths`` tokens with the new one."""
    torch.add(last, 1, out=out)
    (starting,) = torch.nonzero((lengths - 1) % page_size == 0, as_tuple=True)
    pages = free[: len(starting)]  # fewer, where the pool is too small: the caller sees that itself
    out[starting[: len(pages)]] = pages * page_size


def prepare() -> None:
    """Import the release, and make it fit for many small calls on a CPU."""
    pools.quiet()
    torch.set_num_threads(1)
    logger = logging.getLogger("hicache_guard")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False  # violations are counted here
    churn_25805.import_release()
    churn_25805.compute_slots_without_triton()
    decode_without_triton()


def guarded(mode: str) -> Counter[str]:
    """Put the hooks of a mode in place, or none; where the guard counts its violations by kind."""
    kinds: Counter[str] = Counter()
    paired.hooks("off")
    if mode != "off":
        install(mode, on_report=lambda violation: kinds.update([violation.fault.value]))
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mode", required=True)
    parser.add_argument("--tree", default="")
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--page-size", type=int, required=True)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--longest", type=int, required=True)
    parser.add_argument("--host", type=float, default=0.0)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    prepare()
    kinds = guarded(options.mode)
    trees = scheduling.trees()
    tree = options.tree or trees[-1]
    if tree not in trees:
        sys.exit(f"it has no {tree} tree; it has {', '.join(trees)}")
    scale = Scale(
        tree, options.slots, options.page_size, options.window, options.longest, options.host
    )
    run = Run(options.mode, scale, options.seed, kinds)
    print(json.dumps({"ready": options.mode, "tree": tree}), flush=True)
    for line in sys.stdin:
        signal.alarm(LIMIT)
        print(json.dumps(run.slice(int(line))), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
