"""The translation, with torch and with Triton (interpreted), says what the oracle says.

Proved by mutation: ``translate_agreement`` names changes of one text of each kernel, and with each
the same comparison must fail.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import kernel_oracle as oracle
import pytest
import torch
import translate_agreement as agreement
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import rows_of

from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.ledger import FREED
from hicache_guard.core.modes import Mode
from hicache_guard.core.syncs import SyncCounter
from hicache_guard.kernels import record
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.record import Cause, ViolationRecord
from hicache_guard.kernels.translate import WindowTable, WindowTranslation
from hicache_guard.kernels.translate_torch import translate as with_torch

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", agreement.CASES, ids=lambda case: case.name)
def test_torch_agrees_with_the_oracle(case: agreement.Case) -> None:
    assert agreement.disagreement(case, with_torch) is None


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    requests=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 9)), max_size=6),
    window=st.integers(1, 80),
    page=st.sampled_from((1, 2, 3, 16, 64)),
    rate=st.sampled_from((0.0, 0.05, 1.0)),
    room=st.sampled_from((None, 1, 33)),
)
def test_torch_agrees_whatever_is_asked(
    seed: int,
    requests: list[tuple[int, int]],
    window: int,
    page: int,
    rate: float,
    room: int | None,
) -> None:
    lengths, queries = zip(*requests, strict=True) if requests else ((), ())
    case = agreement.Case("any", page, window, lengths, queries, rate=rate, room=room, seed=seed)
    assert agreement.disagreement(case, with_torch) is None


def test_triton_agrees_with_the_oracle() -> None:
    rows = rows_of("translate_agreement.py")
    assert len(rows) == len(agreement.CASES)
    assert [row for row in rows if row[1] is not None] == []


def test_agreement_notices_each_change() -> None:
    rows = dict(rows_of("translate_agreement.py", "--changes"))
    assert rows.pop("translate_triton: unchanged") is True
    assert rows.pop("translate_torch: unchanged") is True
    assert len(rows) == len(agreement.TRITON_CHANGES) + len(agreement.TORCH_CHANGES)
    assert [name for name, agrees in rows.items() if agrees] == [], "changes that nothing notices"


def _planned(**terms: Any) -> WindowTranslation:
    given = {
        "max_requests": 4, "max_entries": 64, "window": 8, "index_dtype": torch.int64,
        "device": CPU, **terms,
    }  # fmt: skip
    return WindowTranslation.plan(**given)


def _run(plan: WindowTranslation, batch: Sequence[torch.Tensor], books: DeviceBooks) -> WindowTable:
    tokens, rows, lengths, queries = batch
    return plan.run(tokens, rows, lengths, queries, books)


def _world(wrongs: tuple[str, ...] = ()) -> tuple[oracle.World, DeviceBooks]:
    world = oracle.world_of(random.Random(0), 4, 16, wrongs)
    return world, agreement.books_of(world, CPU)


def _batch(world: oracle.World) -> list[torch.Tensor]:
    table = torch.tensor([world.good[:20], world.good[20:40]])
    return [table, torch.tensor([1, 0]), torch.tensor([20, 9]), torch.tensor([1, 3])]


def test_torch_waits_for_nothing() -> None:
    world, books = _world(oracle.WRONGS)
    plan = _planned()
    for arguments in (_batch(world), [column[:0] for column in _batch(world)]):
        with SyncCounter() as syncs:
            _run(plan, arguments, books)
        assert syncs.total == 0, syncs.counts


def test_addresses_stay_and_the_mapping_is_read_anew() -> None:
    """What a replayed graph relies on: PR #25889's kind."""
    world, books = _world()
    plan, batch = _planned(), _batch(world)
    before = _run(plan, batch, books)
    addresses = [tensor.data_ptr() for tensor in vars(before).values()]
    slots = before.slots.clone()
    full = world.good[39]
    books.mapping[full] = 0
    first = [column[:1] if column.dim() == 1 else column for column in batch]
    after = _run(plan, first, books)
    assert [tensor.data_ptr() for tensor in vars(after).values()] == addresses
    found = ViolationRecord.decode(after.record.tolist())
    assert found.counts[Cause.UNMAPPED] == 1
    assert found.first is not None
    assert (found.first.full_slot, found.first.position) == (full, 19)
    assert after.slots[:8].tolist() == [*slots[:7].tolist(), 0]


def test_books_are_the_guards_own() -> None:
    mapping = torch.zeros(9 * 4 + 1, dtype=torch.int64)
    mapping[-1] = -1
    guard = PoolGuard(Mode.ENFORCE, full_slots=32, window_slots=16, page_size=4, mapping=mapping)
    books = DeviceBooks.of(guard)
    for kept, own in (
        (books.mapping, guard.map.mapping),
        (books.stamp, guard.map.stamp),
        (books.owner, guard.map.owner),
        (books.full_born, guard.full.born),
        (books.window_born, guard.window.born),
    ):
        assert kept is own
    assert (books.full_rows, books.window_slots) == (36, 24)


def test_a_translation_and_the_guard_agree() -> None:
    """The rule is ``WindowMap.leads``, and that the full page is live."""
    for seed in range(20):
        world = oracle.world_of(random.Random(seed), 4, 16, oracle.WRONGS)
        mapping = torch.tensor(world.mapping)
        guard = PoolGuard(
            Mode.ENFORCE, full_slots=64, window_slots=64, page_size=4, mapping=mapping
        )
        for own, values in (
            (guard.map.stamp, world.stamp),
            (guard.map.owner, world.owner),
            (guard.full.born, world.full_born),
            (guard.window.born, world.window_born),
        ):
            own.copy_(torch.tensor(values, dtype=torch.int32))
        full = torch.tensor([slot for slot in [*world.good, *world.wrong] if abs(slot) < 2**40])
        entries = mapping[full.clamp(0, 67)]
        live = guard.full.generations(guard.full.pages_of(full)) < FREED
        wanted = guard.map.leads(full, entries) & live
        plan = _planned(max_requests=1, max_entries=len(full), window=4096)
        count = torch.tensor([len(full)])
        table = plan.run(full[None], torch.tensor([0]), count, count, DeviceBooks.of(guard))
        assert (table.slots > 0).tolist() == wanted.tolist()


def test_arguments_that_cannot_be_are_refused() -> None:
    world, books = _world()
    batch = _batch(world)
    for terms, error in (
        ({"max_requests": 0}, ValueError),
        ({"window": 2**31}, ValueError),
        ({"index_dtype": torch.int16}, TypeError),
        ({"how": "magic"}, ValueError),
    ):
        with pytest.raises(error):
            _planned(**terms)
    plan = _planned()
    for place, wrong, error in (
        (0, batch[0].float(), TypeError),
        (0, batch[0].t(), ValueError),
        (0, batch[0][0], ValueError),
        (1, batch[1][:1], ValueError),
        (2, batch[2].float(), TypeError),
        (3, torch.stack([batch[3], batch[3]], 1)[:, 0], ValueError),
    ):
        with pytest.raises(error):
            _run(plan, [*batch[:place], wrong, *batch[place + 1 :]], books)
    many = [batch[0], *(column.repeat(3) for column in batch[1:])]
    with pytest.raises(ValueError, match="more requests"):
        _run(plan, many, books)


def test_books_that_do_not_fit_are_refused() -> None:
    _, books = _world()
    parts = vars(books)
    for name, wrong, error in (
        ("mapping", books.mapping.int(), TypeError),
        ("stamp", books.stamp.long(), TypeError),
        ("stamp", books.stamp[1:], ValueError),
        ("owner", books.owner[1:], ValueError),
        ("full_born", books.full_born[:3], ValueError),
        ("window_born", books.window_born[1:], ValueError),
        ("owner", books.owner.repeat(2)[::2], ValueError),
        ("page_size", 0, ValueError),
        ("mapping", books.mapping[:1], ValueError),
    ):
        with pytest.raises(error):
            DeviceBooks(**{**parts, name: wrong})


def test_a_record_reads_like_a_report() -> None:
    numbers = [0] * record.LENGTH
    numbers[Cause.RECYCLED] = 3
    numbers[Cause.FOREIGN] = 1
    numbers[record.AT_FIRST : record.AT_LATE] = [(5 << 32) | 1027, 88, 41, 3, 17, 23, 12, 88]
    numbers[record.AT_LATE] = record.NOBODY
    assert str(ViolationRecord.decode(numbers)) == (
        "recycled: window page was recycled: full slot 88 -> window slot 41\n"
        "  in request 5 of the batch, position 1027\n"
        "  stamped 17, full page of generation 12, window page of generation 23\n"
        "  entries of this batch: 3 recycled, 1 foreign"
    )
    numbers[record.AT_FIRST] = record.NOBODY
    numbers[record.AT_DROPPED], numbers[record.AT_LATE] = 2, (1 << 32) | 7
    assert str(ViolationRecord.decode(numbers)) == (
        "no room: 2 entries beyond what was planned\n"
        "late: request 1, position 7: window page changed between translation and attention"
    )
    with pytest.raises(ValueError, match="16 numbers"):
        ViolationRecord.decode(numbers[1:])


def test_offenders_say_what_their_cause_is_about() -> None:
    foreign = record.Offender(0, 3, 9, 8, Cause.FOREIGN, 5, 4, FREED, 12)
    assert str(foreign).splitlines()[1:] == [
        "  in request 0 of the batch, position 3",
        "  stamped 5, full page never handed out, window page of generation 4",
        "  owned by full slot 12",
    ]
    freed = record.Offender(0, 3, 9, 8, Cause.FREED, 5, FREED | 6, 4, 9)
    assert "window page freed at 6" in str(freed)
    nowhere = record.Offender(0, 3, -1, -1, Cause.OUT_OF_RANGE, -1, -1, -1, -1)
    assert len(str(nowhere).splitlines()) == 2
