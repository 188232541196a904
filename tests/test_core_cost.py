"""What a check touches does not grow with the pool.

A dispatch mode adds up the elements that each torch operator makes or writes. The same operations
must add up to the same number on a pool of ten thousand slots and on one of a million.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.modes import Mode

SMALL, LARGE = 10_240, 1_024_000

#: Operators that write only where an index says; their cost is that of the index.
_BY_INDEX = ("index_fill_", "index_copy_", "scatter_", "scatter_reduce_", "index_put_")


class Touched(TorchDispatchMode):
    """Adds up the elements that operators make or write while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        if name in _BY_INDEX:
            given = [a for a in args[1:] if isinstance(a, torch.Tensor)]
            for indices in args[1:]:
                if isinstance(indices, (list, tuple)):
                    given += [index for index in indices if index is not None]
            size = max((tensor.numel() for tensor in given), default=0)
        elif any(output.is_view_of_given for output in _seen(outputs, args)):
            size = 0
        else:
            size = sum(o.numel() for o in outputs if isinstance(o, torch.Tensor))
        self.elements += size
        self.by_name[name] = self.by_name.get(name, 0) + size
        return result


class _Seen:
    def __init__(self, output: torch.Tensor, given: list[torch.Tensor]) -> None:
        same = [t for t in given if t.untyped_storage()._cdata == output.untyped_storage()._cdata]
        self.is_view_of_given = bool(same) and all(tensor is not output for tensor in same)


def _seen(outputs: Any, args: tuple[Any, ...]) -> list[_Seen]:
    given = [argument for argument in args if isinstance(argument, torch.Tensor)]
    return [_Seen(output, given) for output in outputs if isinstance(output, torch.Tensor)]


class Pools:
    """A guard on a pool of some size, with 64 pages live and mapped, and operations on it."""

    def __init__(self, slots: int, page_size: int, mode: Mode) -> None:
        self.size = page_size
        mapping = torch.zeros(slots + page_size + 1, dtype=torch.int64)
        mapping[-1] = -1
        self.guard = PoolGuard(
            mode, full_slots=slots, window_slots=slots, page_size=page_size, mapping=mapping
        )
        self.row = torch.arange(page_size, 65 * page_size)
        self.window = self.row.clone()
        with self.operation():
            self.allocate(torch.arange(1, 65), self.row)

    def operation(self) -> Any:
        pools = self

        class Open:
            def __enter__(self) -> None:
                pools.guard.begin("op", inspect.currentframe())  # type: ignore[arg-type]

            def __exit__(self, *error: object) -> None:
                pools.guard.end()

        return Open()

    def allocate(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        self.guard.hand_out(self.guard.full, pages)
        self.guard.hand_out(self.guard.window, pages)
        self.guard.mapped(rows, rows)
        self.guard.map.mapping[rows] = rows

    def new_pages(self) -> None:
        pages = torch.arange(65, 70)
        self.allocate(pages, torch.arange(65 * self.size, 70 * self.size))

    def free(self) -> None:
        guard, row = self.guard, self.row[: 4 * self.size]
        vetted = guard.vet_slots(row, segment=False)
        guard.note_named(row, vetted.bad, segment=False)
        guard.check_entries(row, must_be_mapped=False)
        guard.released(guard.full, row)
        guard.vet_release(guard.window, row, pages=False, distinct=False, padding_expected=False)
        guard.released(guard.window, row)

    def free_segment(self) -> None:
        guard, row = self.guard, self.row[: 4 * self.size]
        guard.vet_slots(row, segment=True)
        guard.check_entries(row[:: self.size], must_be_mapped=True)
        guard.released(guard.full, row[:: self.size])

    def go_on(self) -> None:
        guard = self.guard
        guard.check_continued(self.row[-3:], torch.tensor([True, False, True]))

    def tail(self) -> None:
        self.guard.check_unmapped(torch.arange(80 * self.size, 84 * self.size))

    def write(self) -> None:
        rows = self.row[: 2 * self.size]
        self.guard.check_mapping_write(rows, self.window[: 2 * self.size])
        self.guard.overdue_aliases()

    def leave_peers(self) -> None:
        guard, rows = self.guard, self.row[: 2 * self.size]
        guard.check_peers_released(rows)
        guard.note_full_only(rows)
        guard.overdue_peers()

    def read(self) -> None:
        self.guard.translate(self.row, self.window)

    def match(self) -> None:
        self.guard.adopt(self.row, self.size, 2 * self.size)
        self.guard.prove_prefixes([self.row, self.row[: 2 * self.size]], 3 * self.size)
        self.guard.check_row(self.row, self.size, self.guard.serial)


OPERATIONS: dict[str, Callable[[Pools], None]] = {
    "allocation": Pools.new_pages,
    "free": Pools.free,
    "segment free": Pools.free_segment,
    "continuation": Pools.go_on,
    "window tail": Pools.tail,
    "mapping write": Pools.write,
    "full side alone": Pools.leave_peers,
    "read": Pools.read,
    "match": Pools.match,
}


def _touched(slots: int, page_size: int, mode: Mode, run: Callable[[Pools], None]) -> Touched:
    pools = Pools(slots, page_size, mode)
    touched = Touched()
    with touched, pools.operation():
        run(pools)
    return touched


def test_the_counter_sees_what_is_made_and_what_is_written_by_index() -> None:
    big, index = torch.zeros(1000), torch.tensor([1, 2, 3])
    with Touched() as touched:
        big.index_fill_(0, index, 1.0)
        big[10:20].view(2, 5)
        big.index_select(0, index)
    assert touched.elements == 3 + 3
    with Touched() as touched:
        big.clone()
        big.fill_(2.0)
    assert touched.elements == 2000


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_what_an_operation_touches_does_not_grow_with_the_pool(name: str, page_size: int) -> None:
    for mode in (Mode.OBSERVE, Mode.ENFORCE):
        small = _touched(SMALL, page_size, mode, OPERATIONS[name])
        large = _touched(LARGE, page_size, mode, OPERATIONS[name])
        assert small.elements > 0
        assert large.by_name == small.by_name


@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 256])
def test_memory_is_twelve_bytes_a_page_and_four_a_slot_and_a_witness(page_size: int) -> None:
    """The closed form of what is kept: see ``PageLedger``, ``WindowMap``, ``Witness``."""
    full, window = 40_960, 8_192
    guard = PoolGuard(
        Mode.ENFORCE,
        full_slots=full,
        window_slots=window,
        page_size=page_size,
        mapping=torch.zeros(full + page_size + 1, dtype=torch.int64),
    )
    pages = full // page_size + 2 + window // page_size + 2
    per_page = 8 if page_size == 1 else 12
    entries = 4 * (full + page_size + 1) + 4 * (window + 2 * page_size)
    witness = 4 * (full // page_size + 2)
    assert guard.nbytes() == per_page * pages + entries + witness
    assert guard.nbytes() <= 16 * (full + window)


@pytest.mark.parametrize("page_size", [1, 4, 64, 256])
def test_a_free_of_whole_pages_is_looked_at_once_a_slot(page_size: int) -> None:
    """Releases up to 0.5.18 free whole pages by all their slots.

    Mutation seen: each slot made into its page's rows costs the page size times as much.
    """
    pools = Pools(LARGE, page_size, Mode.OBSERVE)
    slots = torch.arange(page_size, 9 * page_size)
    assert pools.guard.rows_of_slots(slots).tolist() == slots.tolist()
    assert pools.guard.rows_of_slots(slots[::page_size]).tolist() == slots.tolist()
