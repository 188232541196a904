"""Random operations, legal and illegal, on a release's real allocator with the guard installed.

A Hypothesis state machine drives the allocator and the oracle together. In enforce and strict the
pools must be what the oracle says after every look; in observe they must be bit for bit those of an
unguarded allocator. Run: ``python machine.py --mode enforce --examples 30 --steps 40``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache_guard.core.errors import GuardViolation
from hicache_guard.repro import pools
from hicache_guard.repro.audit import audit, fingerprint, free_pages
from oracle import DOUBLE, DUPLICATE, LEGAL, PEER, STALE, Judgement, Oracle, Rules
from real import driver
from real.driver import Call, Pair, give, tensor

#: What a machine counted over all of its examples.
Statistics = Counter[str]


@dataclass
class Request:
    """What a scheduler knows of one request: its full slots in order, and its evicted tokens."""

    name: str
    slots: list[int]
    evicted: int = 0


@dataclass
class Expected:
    """What must, and what may, have been reported for the operation ``op``."""

    op: int
    judgement: Judgement


@dataclass
class Overdue:
    """A group of kinds that an operation between ``since`` and ``until`` must have reported."""

    kinds: frozenset[str]
    since: int
    until: int


@dataclass
class Ghosts:
    """Slots that were freed once and that a careless caller may name again."""

    wholes: list[list[int]] = field(default_factory=list)
    rests: list[list[int]] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """The state machine; ``main`` sets the mode and the release."""

    mode: ClassVar[str] = "enforce"
    version: ClassVar[str] = "0.5.23"
    seen: ClassVar[Statistics] = Counter()

    # -- setting up ----------------------------------------------------------------------------

    @initialize(
        page_size=st.sampled_from([1, 4, 16, 64, 256]),
        need_sort=st.booleans(),
        full=st.integers(5, 14),
        less=st.integers(1, 4),
        look_always=st.booleans(),
        narrow=st.booleans(),
    )
    def build(
        self,
        page_size: int,
        need_sort: bool,
        full: int,
        less: int,
        look_always: bool,
        narrow: bool,
    ) -> None:
        pages = full * 4 if page_size == 1 else full
        window = max(3, pages - less * (4 if page_size == 1 else 1))
        self.pair = Pair(
            self.mode, page_size=page_size, full_pages=pages, window_pages=window,
            need_sort=need_sort,
        )  # fmt: skip
        self.law = Rules.of(self.version, page_size)
        self.oracle = Oracle(pages, window, self.law)
        self.page_size = page_size
        self.look_always = look_always
        self.row_dtype = torch.int32 if narrow else torch.int64
        self.requests: list[Request] = []
        self.ghosts = Ghosts()
        self.names = 0
        self.op = 0
        self.expected: list[Expected] = []
        self.overdue: list[Overdue] = []
        self.alone_since = self.shared_since = 0
        self.raised = 0
        self.corrupt = False  # observe: an illegal operation was carried out
        self.over = self.unsettled = False
        self.clones_in_groups = hasattr(type(self.pair.guarded), "_copy_for_free_group")
        self.seen["examples"] += 1

    running = precondition(lambda self: not self.over)
    ruled = precondition(lambda self: not self.over and not self.corrupt)

    # -- performing ----------------------------------------------------------------------------

    def perform(
        self, what: str, call: Call, judgement: Judgement = LEGAL, *, allocates: bool = False
    ) -> tuple[bool, Any]:
        """Run one operation in this mode. Returns (carried out, value)."""
        self.op += 1
        self.seen["operations"] += 1
        self.seen[what] += 1
        late: tuple[frozenset[str], ...] = ()
        if allocates and not self.corrupt:
            late = self.oracle.take_overdue()
            self.overdue += [
                Overdue(kinds, self.alone_since if PEER in kinds else self.shared_since, self.op)
                for kinds in late
            ]
        guilty = bool(judgement.must or judgement.soft or late)
        self.seen["illegal"] += guilty
        self.unsettled = self.unsettled or guilty or not judgement.legal
        if self.mode == "strict":
            return self._strictly(call, judgement, late)
        outcome = self.pair.run(call, f"op{self.op}")
        if not self.corrupt:
            self.expected.append(Expected(self.op, judgement))
        if self.mode == "observe":
            if outcome.error is not None:
                assert guilty or self.corrupt, f"{what} failed: {outcome.error!r}"
                self.seen["release crashed"] += 1
                self.over = True
            self.corrupt = self.corrupt or guilty or bool(judgement.may)
            return outcome.error is None, outcome.value
        assert outcome.error is None, f"{what} did not return: {outcome.error!r}"
        return True, outcome.value

    def _strictly(
        self, call: Call, judgement: Judgement, late: tuple[frozenset[str], ...]
    ) -> tuple[bool, Any]:
        before = fingerprint(self.pair.guarded)
        try:
            outcome = self.pair.run(call, f"op{self.op}")
        except GuardViolation as violation:
            kind = violation.violation.fault.value
            kinds = judgement.acceptable.union(*late)
            assert kind in kinds, f"raised {kind} where {sorted(kinds)} may be: {violation}"
            assert fingerprint(self.pair.guarded) == before, f"{kind} raised and state changed"
            self.raised += 1
            self.seen["raised"] += 1
            self.over = bool(late)
            return False, None
        assert outcome.error is None, f"did not return: {outcome.error!r}"
        assert not late, f"not raised: {late}"
        if judgement.later and judgement.must:
            self.over = True  # what is queued can neither be carried out nor be taken back
        else:
            assert not (judgement.must or judgement.soft), f"not raised: {judgement}"
        return True, outcome.value

    def look(self) -> None:
        """Everything that must hold whenever somebody looks."""
        pools.settle(self.pair.guarded)
        self._check_reports()
        self.unsettled = False
        if self.mode == "observe":
            assert self.pair.plain is not None
            assert fingerprint(self.pair.guarded) == fingerprint(self.pair.plain)
        elif not self.over:
            self._check_pools()
            self._check_requests()
            self._audit()

    def _check_reports(self) -> None:
        tally = self.pair.guard.tally  # asking for the guard lets it finish its checks
        reports = self.pair.reports
        if self.mode == "strict":
            assert len(reports) == self.raised, f"counted without raising: {reports[-1]}"
            return
        assert tally.total == len(reports)
        found: dict[int, set[str]] = {}
        for report in reports:
            assert report.request, f"nobody's operation: {report}"
            found.setdefault(int(report.request[2:]), set()).add(report.fault.value)
        late_kinds = {kind for group in self.overdue for kind in group.kinds}
        for group in self.overdue:
            hits = [
                op
                for op in range(group.since, group.until + 1)
                if group.kinds & found.get(op, set())
            ]
            assert hits, f"not reported between op{group.since} and op{group.until}: {group.kinds}"
        for expected in self.expected:
            got, judgement = found.get(expected.op, set()), expected.judgement
            extra = got - judgement.acceptable - late_kinds - self._pending()
            if self.mode == "observe" and any(STALE in kinds for kinds in judgement.must):
                # Nothing stops the release: it goes on and frees what the entry leads to.
                extra -= {DOUBLE, DUPLICATE}
            if self.mode == "observe" and any(late.until == expected.op for late in self.overdue):
                extra -= {STALE}  # nor releases what was left behind before its page is given away
            assert not extra, f"op{expected.op}: false alarm {extra}: {_text(reports, expected.op)}"
            missing = [kinds for kinds in judgement.must if not kinds & got]
            if self.mode == "observe":
                missing += [kinds for kinds in judgement.soft if not kinds & got]
            if judgement.later and missing:
                ends = {kind for op, kinds in found.items() if op > expected.op for kind in kinds}
                missing = [kinds for kinds in missing if not kinds & ends and not self.oracle.group]
            assert not missing, f"op{expected.op}: not counted: {missing}; counted: {got}"

    def _pending(self) -> set[str]:
        return {PEER} if self.oracle.alone else set()

    def _check_pools(self) -> None:
        for side, pool in zip(
            ("full", "window"), driver.sub_allocators(self.pair.guarded), strict=True
        ):
            listed = free_pages(pool)
            free = set(listed)
            assert len(free) == len(listed), f"{side}: twice in the free list: {sorted(listed)}"
            must, may = self.oracle.must_be_free(side), self.oracle.may_be_free(side)
            assert must <= free, f"{side}: lost {sorted(must - free)}"
            assert free <= must | may, f"{side}: freed while live {sorted(free - must - may)}"
            count = pool.available_size()
            assert count == len(listed) * self.page_size, f"{side}: {count} slots available"

    def _check_requests(self) -> None:
        mapping = self.pair.guarded.full_to_swa_index_mapping.tolist()
        assert mapping[-1] == -1, "the sentinel was overwritten"
        for request in self.requests:
            for row in request.slots:
                if row not in self.oracle.entries:
                    assert mapping[row] == 0, f"{request.name}: {row} leads to {mapping[row]}"
                elif self.oracle.proved(row):
                    wanted = self.oracle.entries[row].window
                    assert mapping[row] == wanted, f"{request.name}: {row} lost {wanted}"

    def _audit(self) -> None:
        """The project's independent audit, where nothing is on its way between two owners."""
        on_its_way = self.oracle.group or self.oracle.may_be_free("window")
        broken = any(not self.oracle.proved(row) for held in self.requests for row in held.slots)
        if on_its_way or broken:
            return
        books = {request.name: tensor(request.slots) for request in self.requests}
        faults = audit(self.pair.guarded, books)
        assert not faults, faults

    def teardown(self) -> None:
        if hasattr(self, "pair") and sys.exc_info()[0] is None:
            self.look()

    def settle(self) -> None:
        """After a rule: look now, where this run looks always."""
        if self.look_always:
            self.look()

    # -- allocating ----------------------------------------------------------------------------

    def room(self, full_pages: int, window_pages: int) -> bool:
        """Whether the pools have that many free pages."""
        if not self.corrupt:
            full = len(self.oracle.must_be_free("full"))
            listed = self.oracle.must_be_free("window")
            if self.mode == "enforce":  # what was left behind is released by this allocation
                listed |= self.oracle.may_be_free("window")
            window = len(listed)
        else:
            full, window = (len(driver.raw_free(p)) for p in driver.sub_allocators(self.pair.plain))
        return full >= full_pages and window >= window_pages

    def pages_for(self, start: int, count: int) -> int:
        """Pages that a request of ``start`` tokens needs for ``count`` more."""
        size = self.page_size
        return -(-(start + count) // size) - -(-start // size)

    def new_request(self) -> Request:
        self.names += 1
        return Request(f"r{self.names}", [])

    def extend(self, batch: Sequence[tuple[Request, int]], *, decodes: bool = False) -> None:
        """``count`` more tokens for each request of ``batch``, in one call."""
        total = sum(count for _, count in batch)
        lengths = [len(request.slots) for request, _ in batch]
        lasts = [request.slots[-1] if request.slots else -1 for request, _ in batch]
        pages = sum(self.pages_for(start, n) for start, (_, n) in zip(lengths, batch, strict=True))
        fits = self.room(pages, pages)
        if decodes and not fits:
            return  # a release that runs short here loses pages; schedulers ask first
        ends = [start + count for start, (_, count) in zip(lengths, batch, strict=True)]
        judgement = LEGAL
        if self.page_size > 1 and not self.corrupt:
            judgement = self.oracle.judge_continuing(lasts, lengths)
            if not fits:  # it may be looked at before it is known that there is no room
                judgement = Judgement(may=judgement.acceptable)

        def call(allocator: Any) -> Any:
            if self.page_size == 1:
                return allocator.alloc(total)
            if decodes:
                return allocator.alloc_decode(tensor(ends), tensor(ends), tensor(lasts))
            return allocator.alloc_extend(
                tensor(lengths), tensor(lengths), tensor(ends), tensor(ends), tensor(lasts), total
            )

        name = "decode" if decodes else "extend"
        done, value = self.perform(name, call, judgement, allocates=True)
        if not done:
            return
        if value is None:
            assert self.corrupt or not fits, f"{name}: no room, though there is"
            return
        assert self.corrupt or fits, f"{name} of {pages} pages came out of nothing"
        if judgement.must:
            self.look_at_reports_only()
        got = value.tolist()
        for request, count in batch:
            self._grown(request, got[:count], mapped=count)
            got = got[count:]

    def look_at_reports_only(self) -> None:
        """Let the guard finish: what it contains is in order from now on."""
        if self.mode == "enforce":
            assert self.pair.guard is not None

    def _grown(self, request: Request, got: list[int], mapped: int) -> None:
        """``request`` was given the full slots ``got``; the last ``mapped`` have window slots."""
        size, start = self.page_size, len(request.slots)
        held = request.slots + got
        if self.corrupt or self.over:
            request.slots = held
            return
        for position in range(start, len(held)):
            slot = held[position]
            assert slot % size == position % size, f"{request.name}: token {position} at {slot}"
            if position % size:
                assert slot == held[position - 1] + 1, f"{request.name}: a page is not contiguous"
        last_proved = start % size == 0 or bool(self.oracle.window_of(held[start - 1]))
        self.oracle.hand_out("full", got, request.name)
        mapping = self.pair.guarded.full_to_swa_index_mapping
        rows = got[len(got) - mapped :] if mapped else []
        if not last_proved:  # continues a page without a window side: nothing is mapped there
            page = held[start - 1] // size
            rows = [row for row in rows if row // size != page]
            if self.mode == "enforce":  # and what was not proved there is gone by now
                left = self.oracle.entries.keys() & set(self.oracle.rows_of({page}))
                self.oracle.soft_rows |= {row for row in left if not self.oracle.proved(row)}
        windows = [int(mapping[row]) for row in rows]
        begins = [window for row, window in zip(rows, windows, strict=True) if row % size == 0]
        self.oracle.hand_out("window", begins, request.name)
        for row, window in zip(rows, windows, strict=True):
            assert window % size == row % size, f"{row} leads to {window}"
            if row % size:
                before = self.oracle.window_of(row - 1)
                assert window == before + 1, f"{row} leads to {window}, {row - 1} to {before}"
            self.oracle.map(row, window)
        self.oracle.unmap(got[: len(got) - mapped])
        request.slots = held
        if request.evicted % size:  # the rest of a page without window KV has none either
            request.evicted = min(-(-request.evicted // size) * size, len(held))

    def pick(self, which: int) -> Request | None:
        """One of the requests; where there is none a new one, unless there is no room for it."""
        if not self.requests:
            request = self.new_request()
            self.extend([(request, self.scaled(which * 7 + 1))])
            if request.slots:
                self.requests.append(request)
        return self.requests[which % len(self.requests)] if self.requests else None

    @running
    @rule(counts=st.lists(st.integers(1, 40), min_size=1, max_size=3))
    def start(self, counts: list[int]) -> None:
        batch = [(self.new_request(), self.scaled(count)) for count in counts]
        self.extend(batch)
        self.requests += [request for request, _ in batch if request.slots]
        self.settle()

    def scaled(self, tokens: int) -> int:
        """A number of tokens, as large for this page size as ``tokens`` is for 16."""
        return max(1, tokens * self.page_size // 16) if self.page_size > 1 else tokens % 9 + 1

    @running
    @rule(which=st.integers(0, 7), tokens=st.integers(1, 30))
    def grow(self, which: int, tokens: int) -> None:
        request = self.pick(which)
        if request and not self.over:
            self.extend([(request, self.scaled(tokens))])
            self.settle()

    @running
    @rule(which=st.lists(st.integers(0, 7), min_size=1, max_size=3))
    def decode(self, which: list[int]) -> None:
        self.pick(which[0])
        chosen = {number % len(self.requests) for number in which} if self.requests else set()
        if chosen and not self.over:
            self.extend([(self.requests[number], 1) for number in sorted(chosen)], decodes=True)
            self.settle()

    @precondition(lambda self: not self.over and self.page_size > 1)
    @rule(tokens=st.integers(1, 60), tail_pages=st.integers(0, 2))
    def start_with_tail(self, tokens: int, tail_pages: int) -> None:
        size, request = self.page_size, self.new_request()
        count = self.scaled(tokens)
        start = max(0, (count - 1) // size - tail_pages + 1) * size if tail_pages else count
        tail = count - start
        fits = self.room(self.pages_for(0, count), -(-tail // size))

        def call(allocator: Any) -> Any:
            none, ends = tensor([0]), tensor([count])
            return allocator.alloc_extend_swa_tail(
                none, none, ends, ends, tensor([-1]), count, tail
            )

        # Entries that a release leaves behind are its own fault, and must be found.
        stale = self.oracle.stale_on_free_pages() and not self.corrupt and fits
        stale = stale and tail < count and (tail == 0 or not self.law.tail_cleared)
        likely = Judgement(may=frozenset({STALE})) if stale else LEGAL
        was_corrupt = self.corrupt
        done, value = self.perform("tail", call, likely, allocates=True)
        if not done:
            return
        if value is None:
            assert was_corrupt or not fits
            return
        got = value.tolist()
        if not was_corrupt and stale:
            left = self.oracle.judge_tail(got[: count - tail])
            self.expected[-1:] = [Expected(self.op, left)] if self.mode != "strict" else []
            assert self.mode != "strict" or left.legal, "a stale entry was left and not raised"
            self.corrupt = self.mode == "observe" and not left.legal
            self.look_at_reports_only()
        self._grown(request, got, mapped=tail)
        self.requests.append(request)
        self.settle()

    # -- freeing -------------------------------------------------------------------------------

    def free(
        self, what: str, name: str, slots: Sequence[int], *, full: bool = True,
        window: bool = True, segment: bool = False, pool: str | None = None,
        may: frozenset[str] = frozenset(),
    ) -> bool:  # fmt: skip
        """Call the free ``name`` with ``slots``; returns whether it was carried out."""
        if not slots:
            return True
        deferred = not self.corrupt and pool is None and self.oracle.defer(name, slots)
        plan = None
        judgement = LEGAL
        if not deferred and not self.corrupt:
            plan = self.oracle.plan_free(slots, full=full, window=window, segment=segment)
            peers = full and not window and any(map(self.oracle.window_of, slots))
            extra = may | (frozenset({PEER}) if peers else frozenset())
            judgement = Judgement(
                plan.judgement.must, plan.judgement.soft, plan.judgement.may | extra,
                plan.judgement.later,
            )  # fmt: skip
            if name == "free_full" and peers and self.mode == "strict":
                judgement = Judgement((*judgement.must, frozenset({PEER})), judgement.soft)
        in_group = self.oracle.group and not self.clones_in_groups

        def call(allocator: Any) -> None:
            owner = getattr(allocator, pool) if pool else allocator
            method = getattr(owner, name + "_segment" if segment else name)
            where = {"start_pos": 0} if segment else {}
            give(
                slots,
                lambda given: method(given, **where),
                reuse=not in_group,
                dtype=self.row_dtype,
            )

        corrupt_before = self.corrupt
        done, _ = self.perform(what, call, judgement)
        if self.mode == "observe" and not corrupt_before and judgement.may == {PEER}:
            self.corrupt = self.corrupt and bool(judgement.must or judgement.soft)
        if done and plan is not None and not self.corrupt:
            if plan.alone and not self.oracle.alone:
                self.alone_since = self.op
            self.oracle.commit(plan)
        return done

    def legally(self, request: Request, count: int, *, segment: bool) -> bool:
        """Free the first ``count`` slots of ``request``, each side as this release wants it."""
        dead, alive = (
            request.slots[: min(request.evicted, count)],
            request.slots[request.evicted : count],
        )
        separately = segment if self.law.alone else False
        segment = segment and self.law.segments
        if separately or (self.law.segments and self.page_size == 1):
            done = self.free("finish", "free_full", dead, window=False, segment=segment)
            return done and self.free("finish", "free", alive, segment=segment)
        return self.free("finish", "free", dead + alive)

    def unmapped(self, request: Request) -> list[int]:
        """Slots past the evicted ones whose window KV is gone or not where it was written."""
        return [s for s in request.slots[request.evicted :] if not self.oracle.window_of(s)]

    @running
    @rule(which=st.integers(0, 7), segment=st.booleans(), trim=st.integers(0, 20))
    def finish(self, which: int, segment: bool, trim: int) -> None:
        """A request ends: all of it, or all but the last slots of its last page, is freed."""
        request = self.pick(which)
        if not request or self.over:
            return
        held = request.slots
        in_last = len(held) % self.page_size or self.page_size
        keep = trim % in_last if trim > 10 else 0
        count = max(len(held) - keep, 1)
        if self.corrupt or self.legally(request, count, segment=segment):
            if self.corrupt:
                self.free("finish", "free", held[:count])
            self.requests.remove(request)
            self.ghosts.wholes.append(held[:count])
            if held[count:]:
                self.ghosts.rests.append(held[count:])
        self.settle()

    @running
    @rule(which=st.integers(0, 7), pages=st.integers(1, 3), segment=st.booleans())
    def evict_window(self, which: int, pages: int, segment: bool) -> None:
        """The next pages of a request leave the window, never its last one."""
        request, size = self.pick(which), self.page_size
        if not request or self.over:
            return
        most = (len(request.slots) - 1) // size - request.evicted // size
        count = min(pages, most) * size
        gone = request.slots[request.evicted : request.evicted + count]
        if count <= 0 or (not self.corrupt and not all(map(self.oracle.window_of, gone))):
            return
        segment = segment and self.law.segments
        if self.free("evict", "free_swa", gone, full=False, segment=segment):
            request.evicted += count
        self.settle()

    @running
    @rule(which=st.integers(0, 7))
    def free_as_trees_do(self, which: int) -> None:
        """The full side on its own pool first, the window side right after."""
        request = self.pick(which)
        if not request or self.over or self.oracle.group:
            return
        live = request.slots[request.evicted :]
        dead = request.slots[: request.evicted]
        if not self.corrupt and self.unmapped(request):
            return
        self.requests.remove(request)
        done = self.free("tree", "free", dead + live, window=False, pool="full_attn_allocator")
        if done and not self.over:
            self.free("tree", "free_swa", live, full=False)
        self.ghosts.wholes.append(request.slots)
        self.settle()

    @ruled
    @rule()
    def begin_group(self) -> None:
        if not self.oracle.group:
            self.perform("group", lambda allocator: allocator.free_group_begin())
            self.oracle.begin_group()

    @running
    @rule()
    def end_group(self) -> None:
        if not self.oracle.group:
            return
        if self.corrupt:
            self.perform("group", lambda allocator: allocator.free_group_end())
            self.oracle.group = False
            return
        before = self._remember()
        plans, judgement = [], Judgement()
        for name, slots in self.oracle.end_group():
            alone = name == "free_full"
            peers = alone and any(map(self.oracle.window_of, slots))
            plan = self.oracle.plan_free(slots, full=name != "free_swa", window=not alone)
            found = plan.judgement
            if peers and self.mode == "strict":
                found = Judgement((*found.must, frozenset({PEER})), found.soft)
            elif peers:
                found = Judgement(found.must, found.soft, found.may | {PEER})
            if alone and not self.oracle.alone:
                self.alone_since = self.op + 1
            judgement = Judgement(
                judgement.must + found.must, judgement.soft + found.soft, judgement.may | found.may
            )
            self.oracle.commit(plan)
            plans.append(plan)
        done, _ = self.perform("group", lambda allocator: allocator.free_group_end(), judgement)
        if not done:
            before()
            self.over = True  # in strict mode the group stays open with what cannot be freed
        self.settle()

    def _remember(self) -> Callable[[], None]:
        import copy

        kept = copy.deepcopy(self.oracle)

        def put_back() -> None:
            self.oracle = kept

        return put_back

    # -- load-back, transfers, reads -------------------------------------------------------------

    @ruled
    @rule(pages=st.integers(1, 3), abort=st.booleans())
    def load_back(self, pages: int, abort: bool) -> None:
        """HiCache takes pages of both pools itself, then writes the mapping or gives up."""
        if not self.room(pages, pages):
            return
        count, taken = pages * self.page_size, []
        request = self.new_request()
        for side, pool in (("full", "full_attn_allocator"), ("window", "swa_attn_allocator")):
            done, value = self.perform("load", partial(_alone, pool, count), allocates=True)
            if not done:
                return
            assert value is not None
            taken.append(value.tolist())
            self.oracle.hand_out(side, taken[-1], request.name)
        full, window = taken
        if abort:
            self.free("abort", "free", full, window=False, pool="full_attn_allocator")
            self._free_window_directly("abort", window)
        else:
            self._write_mapping("map", full, window)
            request.slots = full
            self.requests.append(request)
        self.settle()

    def _free_window_directly(self, what: str, slots: list[int]) -> bool:
        plan = self.oracle.release_window(slots)

        def call(allocator: Any) -> None:
            give(slots, allocator.swa_attn_allocator.free)

        done, _ = self.perform(what, call, plan.judgement)
        if done and not self.corrupt:
            self.oracle.window.release(plan.window)
        return done

    def _write_mapping(self, what: str, rows: list[int], windows: list[int]) -> bool:
        judgement = self.oracle.judge_mapping(rows, windows)

        def call(allocator: Any) -> None:
            allocator.set_full_to_swa_mapping(tensor(rows), tensor(windows))

        done, _ = self.perform(what, call, judgement)
        if done and not self.corrupt:
            if not self.oracle.repointed:
                self.shared_since = self.op
            self.oracle.write_mapping(rows, windows)
        return done

    @ruled
    @rule(kept=st.integers(0, 7), pages=st.integers(1, 2))
    def recover_with_locked_full(self, kept: int, pages: int) -> None:
        """A tree keeps a locked row that was evicted, and gives it a newer row's window pages."""
        size = self.page_size
        rows = [r for r in self.requests if r.evicted >= pages * size and not r.evicted % size]
        if not self.law.segments and not self.law.whole_pages:
            return  # no release before 0.5.15 does this
        if any(not self.oracle.proved(row) for row in self.oracle.entries):
            return  # it writes the mapping directly, which makes the guard look at all of it
        if not rows or not self.room(pages, pages) or self.oracle.group:
            return
        old, new = rows[kept % len(rows)], self.new_request()
        self.extend([(new, pages * size)])
        if self.over or not new.slots:
            return
        target = old.slots[old.evicted - pages * size : old.evicted]
        if any(row in self.oracle.entries for row in target + []):
            self.requests.append(new)
            return
        windows = [self.oracle.window_of(row) for row in new.slots]
        if self.law.segments:

            def clear(allocator: Any) -> None:
                allocator.clear_full_to_swa_mapping(tensor(new.slots))

            self.perform("recover", clear)
            self.oracle.unmap(new.slots)
        if not self._write_mapping("recover", target, windows):
            return
        if not self.law.segments:

            def forget(allocator: Any) -> None:
                allocator.full_to_swa_index_mapping[tensor(new.slots)] = 0

            self.perform("recover", forget)
            self.oracle.unmap(new.slots)
        self.free("recover", "free", new.slots, window=False, pool="full_attn_allocator")
        old.evicted -= pages * size
        self.settle()

    @running
    @rule(which=st.integers(0, 7))
    def read(self, which: int) -> None:
        """The window layers translate a request's slots."""
        request = self.pick(which)
        if not request or self.over:
            return
        rows = [row for row in request.slots if self.corrupt or self.oracle.proved(row)]
        if not rows:
            return
        wanted = tensor(rows)
        done, got = self.perform("read", lambda a: a.translate_loc_from_full_to_swa(wanted))
        if done and not self.corrupt:
            assert got.tolist() == [self.oracle.window_of(row) for row in rows]

    @running
    @rule()
    def count(self) -> None:
        """A scheduler asks how much is available, before anybody looks at the free lists."""
        if self.corrupt or self.mode == "observe":
            return
        for side, pool in zip(
            ("full", "window"), driver.sub_allocators(self.pair.guarded), strict=True
        ):
            least = len(self.oracle.must_be_free(side)) * self.page_size
            most = least + len(self.oracle.may_be_free(side)) * self.page_size
            if self.unsettled:
                most = pool.size  # what a wrong free holds back counts until it is looked at
            assert least <= pool.available_size() <= most, (
                f"{side}: {pool.available_size()} of {least}"
            )

    @precondition(lambda self: self.over)
    @rule()
    def done(self) -> None:
        """Nothing more happens in this run; a machine needs a rule all the same."""

    @running
    @rule()
    def look_now(self) -> None:
        self.look()

    @running
    @rule(shrink=st.integers(0, 2), sure=st.integers(0, 3))
    def start_over(self, shrink: int, sure: int) -> None:
        """Everything is cleared; since 0.5.18 the pools may be given another size then."""
        if sure or (self.mode == "observe" and self.corrupt):
            return
        resizes = hasattr(self.pair.guarded, "resize") and shrink
        full, window = self.oracle.full.pages, self.oracle.window.pages
        if resizes:
            full, window = max(3, full - shrink), max(3, window - shrink)
            sizes = SimpleNamespace(
                full_max_total_num_tokens=full * self.page_size,
                swa_max_total_num_tokens=window * self.page_size,
            )
            self.perform("resize", lambda allocator: allocator.resize(sizes))
        else:
            self.perform("clear", lambda allocator: allocator.clear())
        self.oracle.clear(full, window)
        self.requests.clear()
        self.ghosts = Ghosts()
        self.settle()

    @precondition(lambda self: not self.over and not self.corrupt)
    @rule(tokens=st.integers(1, 30), lose=st.booleans(), which=st.integers(0, 7))
    def draft(self, tokens: int, lose: bool, which: int) -> None:
        """State is backed up, drafts are allocated, and everything is restored (until 0.5.15)."""
        if not hasattr(self.pair.guarded, "backup_state") or self.oracle.group:
            return
        count = self.scaled(tokens)
        pages = self.pages_for(0, count)
        if not self.room(pages, pages) or self.oracle.alone or self.oracle.repointed:
            return
        states: dict[int, Any] = {}

        def back_up(allocator: Any) -> None:
            states[id(allocator)] = allocator.backup_state()

        self.perform("backup", back_up)
        back = self._remember()
        drafted = self.new_request()
        self.extend([(drafted, count)])
        restored = Judgement()
        if lose and self.requests and not self.over:
            victim = self.requests[which % len(self.requests)]
            mapped = any(map(self.oracle.window_of, victim.slots))
            if (
                mapped
                and not self.unmapped(victim)
                and self.legally(victim, len(victim.slots), segment=False)
            ):
                restored = Judgement((frozenset({"lost-rollback"}),))
        entries = dict(self.oracle.entries)
        born = [dict(pool.incarnation) for pool in (self.oracle.full, self.oracle.window)]
        after = self._remember()
        done, _ = self.perform(
            "restore", lambda allocator: allocator.restore_state(states[id(allocator)]), restored
        )
        if not done:
            after()
            self.over = True
            return
        back()
        # A page that drafts had is in a later incarnation, whatever the free list says.
        self.oracle.full.incarnation, self.oracle.window.incarnation = born
        for row in drafted.slots:  # what was written for drafts stays behind on free pages
            if row in entries and row not in self.oracle.entries:
                self.oracle.entries[row] = entries[row]
                self.oracle.soft_rows.add(row)
        self.settle()

    # -- what a careless caller does ------------------------------------------------------------

    def _dead(self, slots: Sequence[int]) -> bool:
        size = self.page_size
        return not any(self.oracle.full.is_live(slot // size) for slot in slots)

    @ruled
    @rule(which=st.integers(0, 9), segment=st.booleans(), beside=st.booleans())
    def free_again(self, which: int, segment: bool, beside: bool) -> None:
        """What was freed already is freed again, alone or beside a request that ends now."""
        if not self.ghosts.wholes:
            self.finish(which, segment, 0)
        ghosts = [s for s in self.ghosts.wholes if self._dead(s)]
        if not ghosts or self.over or (self.oracle.group and self.law.deferred):
            return
        if self.oracle.alone:
            return  # a window side left behind: this free would be right for that
        slots = ghosts[which % len(ghosts)]
        segment = segment and self.law.segments
        others = [request for request in self.requests if not request.evicted]
        if beside and others and not segment and not self.unmapped(others[which % len(others)]):
            request = others[which % len(others)]
            if self.free("again", "free", slots + request.slots) and not self.corrupt:
                self.requests.remove(request)
                self.ghosts.wholes.append(request.slots)
        else:
            self.free("again", "free", slots, segment=segment)
        self.settle()

    @ruled
    @rule(which=st.integers(0, 9))
    def free_the_rest(self, which: int) -> None:
        """The rest of a page whose first part was freed earlier, recycled since or not."""
        if not self.ghosts.rests:
            self.finish(which, False, 11 + which)
        rests = [
            slots
            for slots in self.ghosts.rests
            if self._dead(slots)
            or self.oracle.plan_free(slots, full=True, window=True).judgement.must
        ]
        if not rests or self.over or (self.oracle.group and self.law.deferred):
            return
        slots = rests[which % len(rests)]
        page = slots[0] // self.page_size
        recycled = self.oracle.full.is_live(page)
        if self.free("rest recycled" if recycled else "rest", "free", slots):
            self.ghosts.rests.remove(slots)
        self.settle()

    @ruled
    @rule(
        odd=st.sampled_from(["padding", "negative", "outside", "twice"]),
        which=st.integers(0, 7), side=st.sampled_from(["both", "window"]),
    )  # fmt: skip
    def free_nonsense(self, odd: str, which: int, side: str) -> None:
        """A row with something in it that nobody can own."""
        if self.oracle.group and self.law.deferred:
            return
        whole = [r for r in self.requests if not r.evicted and not self.unmapped(r)]
        request = whole[which % len(whole)] if whole else None
        held = list(request.slots) if request else []
        extra = {
            "padding": [0],
            "negative": [-1],
            "outside": [self.oracle.rows + 3 + self.page_size],
            "twice": held[:1],
        }[odd]
        if not extra or (odd == "twice" and self.page_size > 1):
            return
        both = side == "both"
        if both:
            done = self.free(f"nonsense {odd}", "free", held + extra)
            if done and request and not self.corrupt:
                self.requests.remove(request)
                self.ghosts.wholes.append(held)
        elif odd != "twice":
            self.free(f"nonsense {odd} (window)", "free_swa", extra, full=False)
        self.settle()

    @ruled
    @rule(which=st.integers(0, 7), segment=st.booleans())
    def evict_again(self, which: int, segment: bool) -> None:
        """The same range leaves the window a second time."""
        if not any(request.evicted for request in self.requests):
            self.evict_window(which, 1, segment)
        gone = [request for request in self.requests if request.evicted]
        if not gone or self.over or (self.oracle.group and self.law.deferred):
            return
        request = gone[which % len(gone)]
        rows = request.slots[: request.evicted]
        if any(row in self.oracle.entries for row in rows):
            return
        segment = segment and self.law.segments
        self.free("evict again", "free_swa", rows, full=False, segment=segment)
        self.settle()

    @precondition(lambda self: not self.over and not self.corrupt and self.law.alone)
    @rule(which=st.integers(0, 7), api=st.booleans(), segment=st.booleans())
    def free_full_alone(self, which: int, api: bool, segment: bool) -> None:
        """The full side is freed and the window side left behind."""
        self.pick(which)
        whole = [r for r in self.requests if not r.evicted and not self.unmapped(r)]
        queued = api and "free_full" in self.law.deferred
        if not whole or self.over or (self.oracle.group and not queued):
            return
        segment = segment and self.law.segments
        request = whole[which % len(whole)]
        name, pool = ("free_full", None) if api else ("free", "full_attn_allocator")
        if self.free("alone", name, request.slots, window=False, segment=segment, pool=pool):
            self.requests.remove(request)
            self.ghosts.wholes.append(request.slots)
        self.settle()

    @precondition(lambda self: not self.over and not self.corrupt and self.law.segments)
    @rule(which=st.integers(0, 7))
    def free_unmapped_segment(self, which: int) -> None:
        """A row without window KV for all of it is freed as a segment."""
        rows = [request for request in self.requests if request.evicted or self.unmapped(request)]
        if not rows:
            return
        request = rows[which % len(rows)]
        if any(row in self.oracle.entries and not self.oracle.proved(row) for row in request.slots):
            return
        if self.free("unmapped segment", "free", request.slots, segment=True) and not self.corrupt:
            self.requests.remove(request)
            self.ghosts.wholes.append(request.slots)
        self.settle()

    @ruled
    @rule(which=st.integers(0, 9), live=st.integers(0, 7), full_dead=st.booleans())
    def map_dead(self, which: int, live: int, full_dead: bool) -> None:
        """The mapping is written for a slot that nobody owns."""
        free_full = sorted(self.oracle.must_be_free("full"))
        free_window = sorted(self.oracle.must_be_free("window"))
        size = self.page_size
        donors = [r for r in self.requests if r.evicted >= size]
        if full_dead and free_full and self.requests:
            row = free_full[which % len(free_full)] * size
            owner = self.requests[live % len(self.requests)]
            window = self.oracle.window_of(owner.slots[-1])
            if window and row not in self.oracle.entries:
                self._write_mapping("map dead", [row], [window])
        elif not full_dead and free_window and donors:
            window = free_window[which % len(free_window)] * size
            self._write_mapping("map dead", [donors[live % len(donors)].slots[0]], [window])
        self.settle()

    @ruled
    @rule(which=st.integers(0, 7), other=st.integers(0, 7))
    def share_window(self, which: int, other: int) -> None:
        """Another request's window page is mapped as well, and the old entries are left."""
        size = self.page_size
        takers = [r for r in self.requests if r.evicted >= size and not r.evicted % size]
        givers = [r for r in self.requests if len(r.slots) - r.evicted >= 2 * size]
        if not takers or not givers or self.oracle.group:
            return
        taker, giver = takers[which % len(takers)], givers[other % len(givers)]
        rows = taker.slots[taker.evicted - size : taker.evicted]
        old = giver.slots[giver.evicted : giver.evicted + size]
        windows = [self.oracle.window_of(row) for row in old]
        if taker is giver or not all(windows) or any(row in self.oracle.entries for row in rows):
            return
        if self._write_mapping("share", rows, windows) and not self.corrupt:
            taker.evicted -= size
            giver.evicted += size
            one = self.new_request()
            self.extend([(one, 1)])  # the next allocation is where it must come out
            if one.slots:
                self.requests.append(one)
        self.settle()

    @ruled
    @rule(which=st.integers(0, 7), more=st.integers(1, 30))
    def go_on_without_window(self, which: int, more: int) -> None:
        """All of a request's window KV is freed behind it, and it goes on."""
        self.pick(which)
        whole = [r for r in self.requests if not self.unmapped(r)]
        if not whole or self.over or self.page_size == 1 or self.oracle.group:
            return
        request = whole[which % len(whole)]
        if self.free("lose window", "free_swa", request.slots[request.evicted :], full=False):
            request.evicted = len(request.slots)
            self.extend([(request, self.scaled(more))])
        if not self.over and not self.corrupt:
            request.evicted = self._leading_unmapped(request)
        self.settle()

    @ruled
    @rule(which=st.integers(0, 7), more=st.integers(1, 30), recycle=st.booleans())
    def go_on_after_window_was_taken(self, which: int, more: int, recycle: bool) -> None:
        """A request's window pages are freed on the pool itself; it goes on through old entries."""
        self.pick(which)
        whole = [r for r in self.requests if not self.unmapped(r)]
        if not whole or self.over or self.oracle.group:
            return
        request = whole[which % len(whole)]
        windows = [self.oracle.window_of(row) for row in request.slots[request.evicted :]]
        if not windows or not self._free_window_directly("take window", windows):
            return
        if recycle:
            other = self.new_request()
            self.extend([(other, self.page_size)])
            self.requests += [other] if other.slots else []
        if not self.over and not self.corrupt:
            if more > 15:
                self.extend([(request, self.scaled(more))])
            elif self.legally(request, len(request.slots), segment=False):
                self.requests.remove(request)
        self.settle()

    def _leading_unmapped(self, request: Request) -> int:
        size, pages = self.page_size, 0
        for start in range(0, len(request.slots), size):
            if any(row in self.oracle.entries for row in request.slots[start : start + size]):
                break
            pages += 1
        return min(pages * size, len(request.slots))

    @precondition(lambda self: not self.over and not self.corrupt and self.oracle.group)
    @rule(which=st.integers(0, 7), first=st.booleans(), second=st.booleans())
    def free_twice_in_group(self, which: int, first: bool, second: bool) -> None:
        """A group that is open now is given the same row twice."""
        self.pick(which)
        whole = [r for r in self.requests if not r.evicted and not self.unmapped(r)]
        if not whole or self.over:
            return
        request = whole[which % len(whole)]
        self.requests.remove(request)
        self.ghosts.wholes.append(request.slots)
        segments = self.law.segments
        if self.free("group", "free", request.slots, segment=first and segments) and not self.over:
            self.free("group twice", "free", request.slots, segment=second and segments)


def _alone(pool: str, count: int, allocator: Any) -> Any:
    """Allocate on one sub-allocator of ``allocator`` only, as load-back does."""
    return getattr(allocator, pool).alloc(count)


def _text(reports: list[Any], op: int) -> str:
    return "\n".join(str(report) for report in reports if report.request == f"op{op}")


def run(
    mode: str, examples: int, steps: int, *, derandomize: bool, shrink: bool, version: str
) -> dict[str, Any]:
    """Run the machine in one mode; ``failure`` is empty where everything held."""
    seen: Statistics = Counter()
    machine = type("Machine", (PoolMachine,), {"mode": mode, "version": version, "seen": seen})
    started = time.perf_counter()
    failure = ""
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                derandomize=derandomize,
                database=None,
                phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except BaseException as error:
        failure = "".join(traceback.format_exception(error))[-6000:]
    return {
        "mode": mode,
        "version": version,
        "failure": failure,
        "seconds": round(time.perf_counter() - started, 1),
        "seen": dict(seen),
    }


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="*", default=["observe", "enforce", "strict"])
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--random", action="store_true", help="new examples each time")
    parser.add_argument("--no-shrink", action="store_true", help="show a failure as it was found")
    options = parser.parse_args(arguments)
    version = driver.prepare()
    return [
        run(
            mode,
            options.examples,
            options.steps,
            derandomize=not options.random,
            shrink=not options.no_shrink,
            version=version,
        )
        for mode in options.modes
    ]


if __name__ == "__main__":
    for outcome in main():
        print(outcome.pop("failure") or "all held")
        print(json.dumps(outcome))
