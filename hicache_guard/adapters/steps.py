"""The seam of a scheduler's steps: what a forward pass read amiss is known with its tokens.

A forward pass leaves what it found of its windows (``window_reads``) with the step in which it
runs. That is copied to the host behind it, and looked at when the scheduler takes the step's
tokens, for which it waits anyway. If a request's window was not proved, then

    observe   it is reported, once the release has taken the tokens
    enforce   the request's token is dropped as the release drops those of a retracted request; it
              is retracted before the next batch is chosen, and computed again from nothing
    strict    the report is raised before the release takes any token

A request is retracted where the release itself would do it, and joins the queue once the next batch
is chosen: the forward pass that is under way by then may have it in its batch, and takes its token
only if the request was not taken up again.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import torch

from hicache_guard.adapters.link import AllocatorLink, Factory
from hicache_guard.adapters.prefix_tree import field, protected
from hicache_guard.adapters.tree_link import book_of
from hicache_guard.core.faults import Fault
from hicache_guard.core.journal import acting_for
from hicache_guard.core.modes import Mode
from hicache_guard.core.verdict import Finding, HostCopy
from hicache_guard.kernels.record import LENGTH, Offender, ViolationRecord

logger = logging.getLogger("hicache_guard")
Method = Callable[..., Any]

#: The attribute of a result that is the step it came from.
_STEP = "_hicache_guard_step"
#: The attribute of a scheduler that lists the requests to be computed again.
_AGAIN = "_hicache_guard_again"
#: The attribute of a request to be computed again: how often it read amiss itself.
_TIMES = "_hicache_guard_times"
_REQUESTS = "sglang.srt.managers.schedule_batch"
#: How often a request is computed again before it is given up.
MAX_AGAIN = 3


class Read:
    """What was found of one gathered batch of windows, on its way to the host."""

    def __init__(self, link: AllocatorLink, report: torch.Tensor, *, by_drafts: bool) -> None:
        self.link = link
        self.by_drafts = by_drafts
        self.report = HostCopy(report)


@dataclass(eq=False)
class Step:
    """One batch on its way through a scheduler: its requests, and what was read for them.

    ``computed``: how many tokens of each request had KV before; None of a decode step. ``counts``:
    the release finds what it returns of one request by counting what is there of those before.
    """

    batch: Any
    reqs: list[Any]
    computed: list[int] | None
    counts: bool
    reads: list[Read] = dataclasses.field(default_factory=list)

    def judged(self) -> list[Any]:
        """Report what was read amiss, and give the requests that read it. Waits for the copies."""
        wrong: set[int] = set()
        for read in self.reads:
            read.report.wait()
            numbers = read.report.values()
            record = ViolationRecord.decode(numbers[:LENGTH])
            if record.first is None:
                continue
            rows = [row for row, count in enumerate(numbers[LENGTH:]) if count]
            # A batch that was split, or rows that nobody explained: it may be any of them.
            known = len(numbers) - LENGTH >= len(self.reqs) and not read.by_drafts
            request = self.reqs[record.first.request].rid if known else None
            with acting_for(request), read.link.operation("a read of windows", settle=False):
                read.link.guard.dead_read(_finding(record.first, sum(numbers[LENGTH:])))
            if not read.by_drafts:
                wrong.update(rows if known else range(len(self.reqs)))
        return [self.reqs[row] for row in sorted(wrong) if row < len(self.reqs)]


def _finding(first: Offender, count: int) -> Finding:
    return Finding(
        Fault.DEAD_WINDOW_READ,
        count,
        slot=first.full_slot,
        found=first.window_generation,
        expected=first.stamp,
        other=first.window_slot,
    )


_running: Step | None = None


def running() -> Step | None:
    """The step whose forward pass runs now."""
    return _running


def run_batch(original: Method, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    global _running
    outer, reqs = _running, list(batch.reqs)
    computed = list(batch.prefix_lens or ()) if batch.forward_mode.is_extend() else None
    if computed is not None:
        _unsent(reqs)
    returns = batch.return_logprob or any(req.return_hidden_states for req in reqs)
    _running = step = Step(batch, reqs, computed, computed is not None and returns)
    try:
        result = original(scheduler, batch, *args, **kwargs)
    finally:
        _running = outer
    if step.reads:
        result.__dict__[_STEP] = step
    return result


def process_batch_result(original: Method, scheduler: Any, batch: Any, result: Any) -> Any:
    step = getattr(result, "__dict__", {}).pop(_STEP, None)
    if step is None:
        return original(scheduler, batch, result)
    if step.reads[0].link.guard.mode is Mode.OBSERVE:
        answer = original(scheduler, batch, result)
        step.judged()
        return answer
    if getattr(result, "copy_done", None) is not None:
        result.copy_done.synchronize()  # as the release does first of all
    named = [req for req in step.judged() if _goes_on(req)]
    waiting: list[Again] = vars(scheduler).get(_AGAIN, [])
    for req in named:
        vars(req)[_TIMES] = vars(req).get(_TIMES, 0) + 1
    others = [req for req in step.reqs if req not in named]
    # A scheduler that pauses takes two results, and chooses no batch between them.
    again = named + _taken_over(scheduler, others, [each.wrong for each in waiting])
    if step.counts and (again or any(req.is_retracted for req in step.reqs)):
        again = [req for req in step.reqs if _goes_on(req)]  # it does not count what it skips
    if not again:
        return original(scheduler, batch, result)
    for req in again:
        vars(req).setdefault(_TIMES, 0)
        waiting.append(Again(req, step.batch, _cached_since(scheduler, step, req), _session(req)))
        req.is_retracted = True
    vars(scheduler)[_AGAIN] = waiting
    step.reads[0].link.guard.tally.recomputed += len(again)
    with _Skipping(scheduler):
        return original(scheduler, batch, result)


def _goes_on(req: Any) -> bool:
    """Whether the release would take a request's token.

    Of the pass that was under way when the request was retracted it would not.
    """
    return not (req.finished() or req.is_retracted)


def _unsent(reqs: list[Any]) -> None:
    """Take back that the first token's log-probability was sent of requests that have none.

    Up to 0.5.18 it counts as sent when a request is streamed, as those that are skipped are.
    """
    for req in reqs:
        if _TIMES in vars(req):
            sent = min(req.send_output_token_logprobs_offset, len(req.output_ids))
            req.send_output_token_logprobs_offset = sent


@dataclass(frozen=True, eq=False)
class Again:
    """A request that is to be computed again. ``batch`` is one it was in.

    ``wrong``: the slots (int64) of what the tree holds of its KV since the wrong step. They are
    noted when it is found: until the next batch is chosen anybody may retract the request.
    ``session``: the streaming session that lends it its row.
    """

    req: Any
    batch: Any
    wrong: torch.Tensor
    session: str | None = None


def _cached_since(scheduler: Any, step: Step, req: Any) -> torch.Tensor:
    """The slots that the tree holds of what a request computed in or after a step."""
    row = _row(scheduler, req)
    if step.computed is None:
        return row[:0]  # what is decoded is cached when a request is over
    return row[step.computed[step.reqs.index(req)] : protected(req)]


def _session(req: Any) -> str | None:
    session = req.session
    return session.session_id if session is not None and session.streaming else None


class _Skipping:
    """Let the release skip requests that are retracted, which it does where steps overlap."""

    def __init__(self, scheduler: Any) -> None:
        self._home = getattr(scheduler, "batch_result_processor", scheduler)
        self._overlaps = self._home.enable_overlap

    def __enter__(self) -> None:
        object.__setattr__(self._home, "enable_overlap", True)  # it may be frozen

    def __exit__(self, *_: object) -> None:
        object.__setattr__(self._home, "enable_overlap", self._overlaps)


def _get_next_batch_to_run(original: Method) -> Method:
    def hooked(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = vars(scheduler).pop(_AGAIN, None)
        if waiting is None:
            return original(scheduler, *args, **kwargs)
        # Since 0.5.16 they are arguments.
        batches = [*args, *kwargs.values()] or [scheduler.running_batch, scheduler.last_batch]
        reqs = _retract(scheduler, waiting, [b for b in batches if b is not None])
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            for req in reqs:
                _queue(scheduler, req)

    return hooked


get_next_batch_to_run = Factory(_get_next_batch_to_run)


def _retract(scheduler: Any, doomed: list[Again], batches: list[Any]) -> list[Any]:
    """Take requests out of ``batches`` and give back what they hold; returns them.

    What was cached of their wrong KV meanwhile is not believed any more, and who took it over is
    retracted with them. Whom somebody else retracted since has no row, and is in the queue.
    """
    book = book_of(scheduler.tree_cache)  # None of a cache that holds no prefixes
    wrong = [each.wrong for each in doomed]
    if book is not None:
        book.guard.distrust(torch.cat(wrong))
    held = [each for each in doomed if field(each.req, "req_pool_idx") is not None]
    for batch in batches:
        for req in _taken_over(scheduler, batch.reqs, wrong):
            req.is_retracted = True
            held.append(Again(req, batch, wrong[0][:0], _session(req)))
    reqs = [each.req for each in held]
    for batch in batches:
        kept = [row for row, req in enumerate(batch.reqs) if all(req is not each for each in reqs)]
        if len(kept) < len(batch.reqs):
            batch.filter_batch(keep_indices=kept)
            batch.batch_is_full = False
    for each in held:
        if scheduler.chunked_req is each.req:
            scheduler.chunked_req = None
        alone = copy.copy(each.batch)
        alone.reqs = [each.req]
        arguments = inspect.signature(alone.release_req).parameters
        told = {"server_args": scheduler.server_args} if "server_args" in arguments else {}
        alone.release_req(0, 0, **told)
    for each in [*doomed, *held]:
        if each.session is not None:  # it put the row by
            scheduler.tree_cache.release_session(each.session)
        if book is not None:
            book.never_hits(each.req)
    return reqs


def _taken_over(scheduler: Any, reqs: list[Any], wrong: list[torch.Tensor]) -> list[Any]:
    """Those of ``reqs`` that go on after what the tree holds of ``wrong`` slots."""
    slots = [each for each in wrong if each.numel()]
    if not slots:
        return []
    rows = [(req, _row(scheduler, req)[: protected(req)]) for req in reqs if _goes_on(req)]
    return [req for req, row in rows if bool(torch.isin(row, torch.cat(slots)).any())]


def _row(scheduler: Any, req: Any) -> torch.Tensor:
    """The full slots (int64) of a request's tokens, as far as its row says."""
    row: torch.Tensor = scheduler.req_to_token_pool.req_to_token[field(req, "req_pool_idx")]
    return row.to(torch.int64)


def _queue(scheduler: Any, req: Any) -> None:
    """Let a request wait to be computed again; or end it, where that is not wanted or no help."""
    times, reason = vars(req).get(_TIMES, 0), _aborted(scheduler, req)
    if reason is None and times <= MAX_AGAIN:
        logger.warning("request %s is computed again from nothing", req.rid)
        scheduler._add_request_to_queue(req, is_retracted=True)
        return
    if reason is None:
        message = f"hicache-guard: the request read dead window KV {times} times and is given up"
        reason = _abort(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
        logger.error("request %s: %s", req.rid, message)
    # Not by abort_request: that ends all whose name begins alike, and gives no reason.
    req.finished_reason, req.to_finish = reason, None
    if hasattr(scheduler, "_release_aborted_request"):
        scheduler._release_aborted_request(req)
    getattr(scheduler, "output_streamer", scheduler).stream_output([req], req.return_logprob)


def _aborted(scheduler: Any, req: Any) -> Any:
    """Why somebody wants a request to end; None where nobody does."""
    if req.to_finish is None and getattr(scheduler, "_pending_chunked_abort_req", None) is req:
        return _abort("Aborted")  # since 0.5.14 a prompt is ended between its chunks
    return req.to_finish


def _abort(*told: Any) -> Any:
    return importlib.import_module(_REQUESTS).FINISH_ABORT(*told)
