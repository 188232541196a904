"""Whose dead reads are counted, and how a request ends that is not computed again.

The scheduler is a stand-in; the real ones are in ``test_real_engine``. Proved by mutation of
``steps``: all that are computed again counted; log-probabilities counted past a request that the
pass before had retracted (0.5.12: another's are returned); tokens taken of who had taken over what
was wrong, before a batch is chosen (``waiting`` not looked at); a request that its client aborted
queued again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_guard.adapters import steps
from hicache_guard.core.modes import Mode


def _request(name: str) -> Any:
    return SimpleNamespace(
        rid=name, session=None, to_finish=None, finished_reason=None, finished=lambda: False,
        is_retracted=False, return_logprob=True, req_pool_idx=0, cache_protected_len=0,
    )  # fmt: skip


class _Scheduler(SimpleNamespace):
    def __init__(self) -> None:
        rows = SimpleNamespace(req_to_token=torch.zeros(1, 8, dtype=torch.int32))
        super().__init__(req_to_token_pool=rows, enable_overlap=True, queued=[], streamed=[])

    def _add_request_to_queue(self, req: Any, *, is_retracted: bool) -> None:
        self.queued.append(req)

    def stream_output(self, reqs: list[Any], return_logprob: bool) -> None:
        self.streamed += reqs


def _taken(scheduler: Any, reqs: list[Any], named: list[Any], *, counts: bool = True) -> list[Any]:
    """The requests that are computed again; ``counts``: of what returns log-probabilities."""
    guard = SimpleNamespace(mode=Mode.ENFORCE, tally=SimpleNamespace(recomputed=0))
    step: Any = steps.Step(None, reqs, [0] * len(reqs), counts=counts)
    step.reads.append(SimpleNamespace(link=SimpleNamespace(guard=guard)))
    step.judged = lambda: named
    result = SimpleNamespace(**{steps._STEP: step})
    steps.process_batch_result(lambda *_: None, scheduler, None, result)
    return [each.req for each in vars(scheduler).get(steps._AGAIN, [])]


def test_who_shares_a_batch_with_a_dead_read_is_not_blamed() -> None:
    wrong, beside = _request("wrong"), _request("beside")
    scheduler = _Scheduler()
    for _ in range(steps.MAX_AGAIN + 1):
        assert _taken(scheduler, [wrong, beside], [wrong]) == [wrong, beside]
        wrong.is_retracted = beside.is_retracted = False
        vars(scheduler).pop(steps._AGAIN)
    assert (vars(wrong)[steps._TIMES], vars(beside)[steps._TIMES]) == (steps.MAX_AGAIN + 1, 0)


def test_nor_counted_through_a_batch_that_has_one_from_the_pass_before() -> None:
    wrong, beside = _request("wrong"), _request("beside")
    scheduler = _Scheduler()
    assert _taken(scheduler, [wrong], [wrong]) == [wrong]
    assert _taken(scheduler, [_request("other")], []) == [wrong]
    assert _taken(scheduler, [wrong, beside], []) == [wrong, beside]


def test_who_took_over_what_was_wrong_loses_a_token_that_comes_first() -> None:
    wrong, sharing, apart = _request("wrong"), _request("sharing"), _request("apart")
    scheduler = _Scheduler()
    scheduler.req_to_token_pool.req_to_token = torch.tensor([[4, 5, 6], [4, 5, 9], [7, 8, 0]])
    for row, req in enumerate((wrong, sharing, apart)):
        req.req_pool_idx, req.cache_protected_len = row, 2
    assert _taken(scheduler, [wrong], [wrong], counts=False) == [wrong]
    assert _taken(scheduler, [sharing, apart], [], counts=False) == [wrong, sharing]


@pytest.mark.parametrize("field", ["to_finish", "_pending_chunked_abort_req"])
def test_who_was_aborted_is_not_computed_again(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_abort", lambda *told: told)
    req, scheduler = _request("gone"), _Scheduler()
    if field == "to_finish":
        req.to_finish = ("Aborted",)
    else:
        vars(scheduler)[field] = req
    steps._queue(scheduler, req)
    assert scheduler.streamed == [req]
    assert not scheduler.queued
    assert req.finished_reason == ("Aborted",)
    other = _request("other")
    steps._queue(scheduler, other)
    assert scheduler.queued == [other]
