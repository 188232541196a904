"""The kernels on a GPU: the comparisons that a CPU interprets, and what only a GPU has."""

from __future__ import annotations

import random
from collections.abc import Callable

import kernel_oracle as oracle
import pytest
import stream_agreement
import torch
import translate_agreement
import window_agreement

from hicache_guard.core.syncs import SyncCounter
from hicache_guard.kernels.record import LENGTH, Cause, ViolationRecord
from hicache_guard.kernels.stream import Stream, StreamTranslation
from hicache_guard.kernels.stream_torch import translate as stream_with_torch
from hicache_guard.kernels.translate import WindowTable, WindowTranslation
from hicache_guard.kernels.translate_torch import translate as with_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture
def cuda() -> torch.device:
    pytest.importorskip("triton", reason="Triton is not installed")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("case", translate_agreement.CASES, ids=lambda case: case.name)
def test_translation_agrees_with_the_oracle(
    case: translate_agreement.Case, cuda: torch.device
) -> None:
    from hicache_guard.kernels import translate_triton

    kernel = translate_agreement.with_blocks(translate_triton, case.blocks)
    assert translate_agreement.disagreement(case, kernel, cuda) is None
    assert translate_agreement.disagreement(case, with_torch, cuda) is None


def test_many_programs_race_for_the_record(cuda: torch.device) -> None:
    """Thousands of programs add to one record; again and again, from one plan."""
    from hicache_guard.kernels import translate_triton

    case = translate_agreement.Case(
        "race", 1, 4096, (4100,) * 64, (4,) * 64, rate=0.3, blocks=(64, 16, 4096)
    )
    kernel = translate_agreement.with_blocks(translate_triton, case.blocks)
    assert translate_agreement.disagreement(case, kernel, cuda) is None


@pytest.mark.parametrize("case", stream_agreement.CASES, ids=lambda case: case.name)
def test_streams_agree_with_the_oracle(case: stream_agreement.Case, cuda: torch.device) -> None:
    from hicache_guard.kernels import stream_triton

    kernel = translate_agreement.with_blocks(stream_triton, case.blocks)
    assert stream_agreement.disagreement(case, kernel, cuda) is None
    assert stream_agreement.disagreement(case, stream_with_torch, cuda) is None


def test_many_programs_race_for_the_report(cuda: torch.device) -> None:
    """As for the record; the counts of requests are raced for as well."""
    from hicache_guard.kernels import stream_triton

    case = stream_agreement.Case(
        "race", 1, (4096,) * 64, counted=60, rate=0.3, blocks=(64, 16, 4096)
    )
    kernel = translate_agreement.with_blocks(stream_triton, case.blocks)
    assert stream_agreement.disagreement(case, kernel, cuda) is None


@pytest.mark.parametrize("case", window_agreement.CASES, ids=str)
def test_attention_agrees_with_float64(case: window_agreement.Case, cuda: torch.device) -> None:
    from hicache_guard.kernels.window_triton import attend

    assert window_agreement.disagreement(case, attend, cuda) is None


def test_attention_agrees_in_every_triple_of_values(cuda: torch.device) -> None:
    from hicache_guard.kernels.window_triton import attend

    for case in window_agreement.covering(3, seed=2):
        assert window_agreement.disagreement(case, attend, cuda) is None, str(case)


def _captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of ``step``, which has run before so that everything is compiled."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _assert_does_not_wait(step: Callable[[], object]) -> None:
    """Counted by torch's own watch as well, which raises at a synchronisation."""
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with SyncCounter() as syncs:
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert syncs.total == 0, syncs.counts


@pytest.mark.parametrize("how", ["triton", "torch"])
def test_a_replay_sees_the_mapping_of_the_replay(how: str, cuda: torch.device) -> None:
    """PR #25889's kind: the graph is captured once, and the mapping changes between replays."""
    world = oracle.world_of(random.Random(0), 4, 16, ())
    books = translate_agreement.books_of(world, cuda)
    full = world.good[:40]
    table = torch.tensor([full[:20], full[20:]], device=cuda)
    rows, lengths, queries = torch.tensor([[0, 1], [20, 20], [1, 3]], device=cuda)
    plan = WindowTranslation.plan(2, 40, 8, torch.int64, cuda, how=how)
    made: list[WindowTable] = []
    graph = _captured(lambda: made.append(plan.run(table, rows, lengths, queries, books)))
    windows = made[-1]

    def replayed() -> ViolationRecord:
        graph.replay()
        total = int(windows.indptr[-1])
        query = oracle.Query(table.tolist(), [0, 1], [20, 20], [1, 3])
        world.mapping[:] = books.mapping.tolist()
        world.owner[:], world.stamp[:] = books.owner.tolist(), books.stamp.tolist()
        wanted = oracle.translate(world, query, 8, 40)
        assert windows.slots[:total].tolist() == wanted.slots
        assert windows.expected[:total].tolist() == wanted.expected
        found = ViolationRecord.decode(windows.record.tolist())
        assert found == wanted.record
        return found

    assert replayed().clean
    one, other = full[19], full[39]
    slot = int(books.mapping[other])
    books.mapping[one] = 0
    assert replayed().counts[Cause.UNMAPPED] == 1
    books.mapping[one] = slot  # which is the other's
    assert replayed().counts[Cause.FOREIGN] == 1
    books.owner[slot] = one  # as the guard writes it down: now it is the other that has none
    books.stamp[one] = 1000
    books.mapping[other] = 0
    found = replayed()
    assert sum(found.counts.values()) == found.counts[Cause.UNMAPPED] == 1
    assert found.first is not None
    assert found.first.full_slot == other


@pytest.mark.parametrize("how", ["triton", "torch"])
def test_a_replayed_stream_sees_the_mapping_of_the_replay(how: str, cuda: torch.device) -> None:
    """PR #25889's kind; one stream in place of another is seen as well."""
    world = oracle.world_of(random.Random(0), 4, 16, ())
    books = translate_agreement.books_of(world, cuda)
    asked = oracle.Gathered(world.good[:40], [0, 20, 30, 40], [100, 0, 0], 2)
    slots = torch.tensor(asked.slots, device=cuda)
    indptr = torch.tensor(asked.indptr, dtype=torch.int32, device=cuda)
    stream = Stream(slots, indptr, torch.tensor(asked.starts, device=cuda), asked.counted)
    out = torch.empty_like(slots)
    plan = StreamTranslation.plan(4, cuda, how=how)
    reports: list[torch.Tensor] = []
    graph = _captured(lambda: reports.append(plan.run(stream, books, out)))

    def replayed() -> list[int]:
        graph.replay()
        world.mapping[:] = books.mapping.tolist()
        asked.slots, asked.indptr = slots.tolist(), indptr.tolist()
        wanted = oracle.translate_stream(world, asked)
        numbers = reports[-1].tolist()
        total = asked.indptr[-1]
        assert out[:total].tolist() == wanted.out[:total]
        assert ViolationRecord.decode(numbers[:LENGTH]) == wanted.record
        assert numbers[LENGTH:] == wanted.nowhere
        return wanted.nowhere

    assert replayed() == [0, 0, 0]
    # The last of these is of a padded row: redirected, and not counted.
    changed = slots[[3, 4, 25, 39]]
    before = books.mapping[changed].clone()
    books.mapping[changed] = 0
    assert replayed() == [2, 1, 0]
    books.mapping[changed] = before.roll(1)
    assert replayed() == [2, 1, 0]
    indptr.copy_(torch.tensor([0, 4, 24, 30], dtype=torch.int32))
    assert replayed() == [1, 1, 0]
    slots.fill_(-(2**31))
    assert replayed() == [4, 20, 0]
    slots.copy_(torch.tensor(world.good[40:60]).repeat(2))
    assert replayed() == [0, 0, 0]


@pytest.mark.parametrize("how", ["triton", "torch"])
def test_streams_do_not_wait(how: str, cuda: torch.device) -> None:
    """One in which all is wrong, and an empty one."""
    world = oracle.world_of(random.Random(0), 4, 16, oracle.WRONGS)
    books = translate_agreement.books_of(world, cuda)
    slots = torch.tensor(world.wrong, device=cuda)
    starts = torch.zeros(2, dtype=torch.int64, device=cuda)
    indptr = torch.tensor([0, 3, len(slots)], dtype=torch.int32, device=cuda)
    streams = [
        Stream(slots, indptr, starts, 2),
        Stream(slots[:0], torch.zeros_like(indptr), starts, 0),
    ]
    plan = StreamTranslation.plan(2, cuda, how=how)
    out = torch.empty_like(slots)

    def step() -> None:
        for stream in streams:
            plan.run(stream, books, out)

    _assert_does_not_wait(step)


def test_translation_and_attention_do_not_wait(cuda: torch.device) -> None:
    from hicache_guard.kernels.window_triton import attend

    world = oracle.world_of(random.Random(0), 4, 16, oracle.WRONGS)
    books = translate_agreement.books_of(world, cuda)
    table = torch.tensor([world.good[:20]], device=cuda)
    rows, lengths, queries = torch.tensor([[0], [20], [1]], device=cuda)
    plan = WindowTranslation.plan(1, 20, 8, torch.int64, cuda)
    assert plan.how == "triton"
    q = torch.randn(1, 8, 64, device=cuda)
    kv = torch.randn(books.window_slots, 2, 64, device=cuda)
    q_indptr = torch.tensor([0, 1], dtype=torch.int32, device=cuda)

    def step() -> None:
        windows = plan.run(table, rows, lengths, queries, books)
        attend(q, kv, kv, windows, lengths, q_indptr, books, max_queries=1, window=8, scale=0.125)

    _assert_does_not_wait(step)


def test_a_replay_refuses_what_died_between_translation_and_attention(cuda: torch.device) -> None:
    """A page that is recycled after the translation is not loaded, and is recorded as late."""
    from hicache_guard.kernels.window_triton import attend

    case = window_agreement.Case(stale=0.0, page=1, poison=0.0)
    these = window_agreement.asked(case).to(cuda)
    answers: list[tuple[torch.Tensor, torch.Tensor]] = []
    graph = _captured(lambda: answers.append(window_agreement.called(attend, these)))
    graph.replay()
    assert window_agreement.difference(case, these, *answers[-1]) is None
    slot = these.table.slots[-1]
    these.books.window_born[slot] += 1
    these.k[slot] = these.v[slot] = float("nan")
    these.late = ((len(these.lengths) - 1) << 32) | (int(these.lengths[-1]) - 1)
    graph.replay()
    assert window_agreement.difference(case, these, *answers[-1]) is None
