"""The translation of streams, with torch and with Triton (interpreted), says what the oracle says.

Proved by mutation: ``stream_agreement`` names changes of one text of each kernel, and with each the
same comparison must fail.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import kernel_oracle as oracle
import pytest
import stream_agreement as agreement
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import rows_of
from translate_agreement import CPU, books_of

from hicache_guard.core.syncs import SyncCounter
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.record import LENGTH, Cause, ViolationRecord
from hicache_guard.kernels.stream import Stream, StreamTranslation
from hicache_guard.kernels.stream_torch import translate as with_torch


@pytest.mark.parametrize("case", agreement.CASES, ids=lambda case: case.name)
def test_torch_agrees_with_the_oracle(case: agreement.Case) -> None:
    assert agreement.disagreement(case, with_torch) is None


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    counted=st.integers(0, 6),
    page=st.sampled_from((1, 2, 3, 16, 64)),
    rate=st.sampled_from((0.0, 0.05, 1.0)),
    outside=st.tuples(st.integers(0, 9), st.integers(-9, 9)),
)
def test_torch_agrees_whatever_is_asked(
    seed: int,
    counts: list[int],
    counted: int,
    page: int,
    rate: float,
    outside: tuple[int, int],
) -> None:
    case = agreement.Case(
        "any", page, tuple(counts), min(counted, len(counts)),
        rate=rate, outside=outside, seed=seed,
    )  # fmt: skip
    assert agreement.disagreement(case, with_torch) is None


def test_triton_agrees_with_the_oracle() -> None:
    rows = rows_of("stream_agreement.py")
    assert len(rows) == len(agreement.CASES)
    assert [row for row in rows if row[1] is not None] == []


def test_agreement_notices_each_change() -> None:
    rows = dict(rows_of("stream_agreement.py", "--changes"))
    assert rows.pop("stream_triton: unchanged") is True
    assert rows.pop("stream_torch: unchanged") is True
    assert len(rows) == len(agreement.TRITON_CHANGES) + len(agreement.TORCH_CHANGES)
    assert [name for name, agrees in rows.items() if agrees] == [], "changes that nothing notices"


def test_the_cases_meet_what_they_are_for() -> None:
    """Each cause comes first somewhere, and first is more than a request's first entry."""
    firsts, later, padded = set[Cause](), 0, 0
    for case in agreement.CASES:
        world, streams = agreement.streams_of(case)
        for gathered in streams:
            first = oracle.translate_stream(world, gathered).record.first
            if first is not None:
                firsts.add(first.cause)
                later += first.request > 0 and first.position > gathered.starts[first.request]
            everybody = oracle.Gathered(
                gathered.slots, gathered.indptr, gathered.starts, len(gathered.starts)
            )
            padded += first != oracle.translate_stream(world, everybody).record.first
    assert firsts == set(Cause)
    assert later > 10
    assert padded >= 2, "where a padded row would be the first offender"


def _asked(wrongs: tuple[str, ...] = oracle.WRONGS) -> tuple[Stream, DeviceBooks, torch.Tensor]:
    """What a run is given: a stream of two requests, books, and where to write."""
    world = oracle.world_of(random.Random(0), 4, 16, wrongs)
    slots = torch.tensor(world.good[:20])
    indptr = torch.tensor([0, 8, 20], dtype=torch.int32)
    stream = Stream(slots, indptr, torch.tensor([100, 0]), 2)
    return stream, books_of(world, CPU), torch.empty_like(slots)


def test_torch_waits_for_nothing() -> None:
    stream, books, out = _asked()
    plan = StreamTranslation.plan(4, CPU)
    empty = Stream(stream.slots[:0], torch.zeros_like(stream.indptr), stream.starts, 0)
    for given_stream in (stream, empty):
        with SyncCounter() as syncs:
            plan.run(given_stream, books, out)
        assert syncs.total == 0, syncs.counts


def test_the_mapping_is_read_anew() -> None:
    """PR #25889's kind: the same stream again, and the mapping has changed."""
    stream, books, out = _asked(())
    plan = StreamTranslation.plan(2, CPU)
    before = plan.run(stream, books, out)
    assert ViolationRecord.decode(before[:LENGTH].tolist()).clean
    slots = out.clone()
    books.mapping[stream.slots[10]] = 0
    report = plan.run(stream, books, out)
    assert out.tolist() == [*slots[:10].tolist(), 0, *slots[11:].tolist()]
    assert report[LENGTH:].tolist() == [0, 1]
    found = ViolationRecord.decode(report[:LENGTH].tolist())
    assert str(found).startswith("unmapped: no window slot: full slot")
    assert found.first is not None
    assert (found.first.request, found.first.position) == (1, 2)
    assert ViolationRecord.decode(before[:LENGTH].tolist()).clean, "a report is nobody else's"


def test_a_plan_says_how_it_runs_and_for_how_many() -> None:
    plan = StreamTranslation.plan(7, CPU)
    assert (plan.how, plan.max_requests) == ("torch", 7)


def test_plans_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for requests in (-1, 0, 2**31):
        with pytest.raises(ValueError, match="counted in int32, from 1"):
            StreamTranslation.plan(requests, CPU)
    with pytest.raises(ValueError, match="torch or triton, not magic"):
        StreamTranslation.plan(1, CPU, how="magic")
    monkeypatch.delitem(sys.modules, "hicache_guard.kernels.stream_triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError):
        StreamTranslation.plan(1, CPU, how="triton")


_WIDTHS, _ROWS = "int32 or int64", "contiguous rows"
_PLACES, _REQUESTS = "each slot a place", "than were planned"


@pytest.mark.parametrize(
    ("what", "wrong", "error", "says"),
    [
        ("slots", lambda slots: slots.float(), TypeError, _WIDTHS),
        ("starts", lambda starts: starts.short(), TypeError, _WIDTHS),
        ("out", lambda out: out.float(), TypeError, _WIDTHS),
        ("indptr", lambda indptr: indptr.long(), TypeError, "first entries .* are int32"),
        ("slots", lambda slots: slots[None], ValueError, _ROWS),
        ("slots", lambda slots: slots.repeat(2)[::2], ValueError, _ROWS),
        ("starts", lambda starts: starts[:, None], ValueError, _ROWS),
        ("starts", lambda starts: starts.repeat(2)[::2], ValueError, _ROWS),
        ("indptr", lambda indptr: indptr[None], ValueError, _ROWS),
        ("indptr", lambda indptr: indptr.repeat(2)[::2], ValueError, _ROWS),
        ("out", lambda out: out[None], ValueError, _ROWS),
        ("out", lambda out: out.repeat(2)[::2], ValueError, _ROWS),
        ("out", lambda out: out[1:], ValueError, _PLACES),
        ("indptr", lambda indptr: indptr[1:], ValueError, _PLACES),
        ("indptr", lambda indptr: indptr.repeat(2), ValueError, _PLACES),
        ("starts", lambda starts: starts[1:], ValueError, _PLACES),
        ("counted", lambda _: -1, ValueError, _REQUESTS),
        ("counted", lambda _: 3, ValueError, _REQUESTS),
        ("slots", lambda slots: slots.to("meta"), ValueError, "on the device"),
        ("starts", lambda starts: starts.to("meta"), ValueError, "on the device"),
        ("indptr", lambda indptr: indptr.to("meta"), ValueError, "on the device"),
        ("out", lambda out: out.to("meta"), ValueError, "on the device"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    what: str, wrong: Any, error: type[Exception], says: str
) -> None:
    stream, books, out = _asked()
    arguments = {**vars(stream), "out": out}
    arguments[what] = wrong(arguments[what])
    out = arguments.pop("out")
    with pytest.raises(error, match=says):
        StreamTranslation.plan(4, CPU).run(Stream(**arguments), books, out)


def test_batches_that_were_not_planned_are_refused() -> None:
    stream, books, out = _asked()
    with pytest.raises(ValueError, match=_REQUESTS):
        StreamTranslation.plan(1, CPU).run(stream, books, out)
    nobody = Stream(stream.slots, stream.indptr[:1], stream.starts[:0], 0)
    with pytest.raises(ValueError, match="or none"):
        StreamTranslation.plan(1, CPU).run(nobody, books, out)


def test_books_elsewhere_are_refused() -> None:
    stream, books, out = _asked()
    kept: dict[str, Any] = {
        name: part.to("meta") if isinstance(part, torch.Tensor) else part
        for name, part in vars(books).items()
    }
    with pytest.raises(ValueError, match="on the device"):
        StreamTranslation.plan(4, CPU).run(stream, DeviceBooks(**kept), out)
