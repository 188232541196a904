"""The translation's kernels and the oracle, asked the same; and changes of the kernels' text.

As a program, in a process of its own because Triton decides when it is imported whether it
interprets: prints one JSON line for each case, name and what disagrees (null for nothing), and with
``--changes`` one for each change, name and whether kernel and oracle still agree.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import kernel_oracle as oracle
import torch

from hicache_guard.kernels import translate
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.record import ViolationRecord
from hicache_guard.kernels.translate import Implementation, WindowTranslation

KERNELS = Path(translate.__file__).parent
CPU = torch.device("cpu")
#: Numbers around each tensor, so that reading beside it is seen and not only when it crashes.
MARGIN = 300


@dataclass(frozen=True)
class Case:
    """One plan and the batches it is asked for, one after the other."""

    name: str
    page: int
    window: int
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    wrongs: tuple[str, ...] = oracle.WRONGS
    rate: float = 0.1
    slots: torch.dtype = torch.int64
    table: torch.dtype = torch.int64
    columns: torch.dtype = torch.int64
    room: int | None = None
    #: The kernel's blocks: entries, requests, programs.
    blocks: tuple[int, int, int] = (256, 256, 2048)
    seed: int = 0


def _boundary_cases() -> Iterator[Case]:
    """Every value that was asked for, each in a case of its own beside other values."""
    ragged, ones = (0, 1, 5, 300, 127, 40), (1, 1, 1, 1, 1, 1)
    for number, window in enumerate((1, 127, 128, 129, 4096)):
        dtype = (torch.int32, torch.int64)[number % 2]
        yield Case(f"window {window}", 16, window, ragged, ones, slots=dtype)
    for number, page in enumerate((1, 2, 3, 16, 64, 256)):
        dtype = (torch.int64, torch.int32)[number % 2]
        yield Case(
            f"page {page}", page, 128, ragged, (1, 1, 2, 130, 127, 40), table=dtype, columns=dtype
        )
    yield Case("no requests", 16, 128, (), ())
    yield Case("one request", 1, 128, (257,), (1,))
    yield Case("one token", 1, 128, (1,), (1,))
    yield Case("only empty requests", 16, 128, (0, 0, 0), (0, 1, 1))
    yield Case("no queries", 16, 8, (20, 20, 9), (0, 1, 0))
    yield Case("more queries than tokens", 16, 8, (3, 4), (9, 9))
    yield Case("trees", 4, 32, (100, 33, 64, 20), (8, 8, 8, 8), columns=torch.int32)
    yield Case("prefill", 1, 128, (700, 513), (700, 200))
    yield Case("nothing wrong", 16, 128, ragged, ones, wrongs=())
    yield Case("everything wrong", 16, 128, ragged, ones, rate=1.0)
    yield Case("no room", 4, 32, (60, 60, 60, 60), (1, 1, 3, 1), room=70)
    yield Case("room for none after the first", 4, 32, (60, 60, 60), (1, 1, 1), room=32)
    yield Case("small blocks", 4, 64, (90,) * 7, (1, 4, 1, 60, 90, 1, 1), blocks=(16, 2, 14))
    yield Case("one program each", 4, 64, (90,) * 5, (30,) * 5, blocks=(16, 4, 1))
    for wrong in oracle.WRONGS:
        yield Case(f"only {wrong}", 4, 32, (50, 33, 8), (1, 1, 3), wrongs=(wrong,), rate=0.3)


def _random_cases(count: int) -> Iterator[Case]:
    for seed in range(count):
        dice = random.Random(seed)
        requests = dice.randrange(1, 7)
        lengths = tuple(dice.choice((0, 1, 3, 17, 64, 150)) for _ in range(requests))
        queries = tuple(dice.choice((0, 1, 1, 1, 4, length)) for length in lengths)
        yield Case(
            f"random {seed}",
            page=dice.choice((1, 1, 3, 4, 16)),
            window=dice.choice((1, 2, 31, 32, 100)),
            lengths=lengths,
            queries=queries,
            wrongs=tuple(dice.sample(oracle.WRONGS, dice.randrange(5))),
            rate=dice.choice((0.02, 0.3, 1.0)),
            slots=dice.choice((torch.int32, torch.int64)),
            table=dice.choice((torch.int32, torch.int64)),
            columns=dice.choice((torch.int32, torch.int64)),
            room=dice.choice((None, None, 50)),
            blocks=dice.choice(((32, 2, 8), (256, 256, 2048), (16, 1, 1))),
            seed=seed,
        )


CASES = [*_boundary_cases(), *_random_cases(24)]


def framed(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of ``values`` in the middle of a larger one, which is filled with 0."""
    whole = torch.zeros(len(values) + 2 * MARGIN, dtype=dtype, device=device)
    inner = whole[MARGIN : MARGIN + len(values)]
    inner.copy_(torch.tensor(values, dtype=dtype))
    return inner


def held(slots: list[int], dtype: torch.dtype) -> list[int]:
    """``slots``; what ``dtype`` cannot hold becomes its least or largest."""
    range_of = torch.iinfo(dtype)
    return [max(range_of.min, min(range_of.max, slot)) for slot in slots]


def books_of(world: oracle.World, device: torch.device) -> DeviceBooks:
    """The books of ``world`` as tensors."""
    kept = (world.stamp, world.owner, world.full_born, world.window_born)
    stamp, owner, full_born, window_born = (framed(part, torch.int32, device) for part in kept)
    mapping = framed(world.mapping, torch.int64, device)
    return DeviceBooks(mapping, stamp, owner, full_born, window_born, world.page_size)


def arguments(query: oracle.Query, case: Case, device: torch.device) -> list[torch.Tensor]:
    """The batch as tensors."""
    width = max((len(row) for row in query.table), default=1)
    # A column more than the table has: its rows are not contiguous to each other.
    whole = torch.zeros(len(query.table), width + 1, dtype=case.table)
    if query.table:
        whole[:, :width] = torch.tensor(query.table)
    columns = (query.rows, query.lengths, query.queries)
    return [
        whole.to(device)[:, :width],
        *(torch.tensor(column, dtype=case.columns, device=device) for column in columns),
    ]


def disagreement(
    case: Case, implementation: Implementation, device: torch.device = CPU
) -> str | None:
    """What an implementation says otherwise than the oracle, or None."""
    dice = random.Random(case.seed)
    world = oracle.world_of(dice, case.page, max(3, 64 // case.page), case.wrongs)
    books = books_of(world, device)
    # The same plan again: what a run leaves must not show in the next. The last batch asks for a
    # row and for places that the table does not have.
    batches = [
        oracle.query_of(dice, world, list(case.lengths), list(case.queries), rate)
        for rate in (case.rate, 0.0, case.rate)
    ]
    if batches[-1].rows:
        batches[-1].rows[-1] = dice.choice((-1, len(batches[-1].table)))
        batches[-1].table = [row[: max(1, len(row) - 3)] for row in batches[-1].table]
    for query in batches:
        query.table = [held(row, case.table) for row in query.table]
    most = sum(max(0, length) for length in case.lengths) or 1
    room = case.room or most
    plan = WindowTranslation.plan(
        max(1, len(case.lengths)), room, case.window, case.slots, device, how="torch"
    )
    plan._translate = implementation
    for number, query in enumerate(batches):
        wanted = oracle.translate(world, query, case.window, room)
        tokens, rows, lengths, queries = arguments(query, case, device)
        table = plan.run(tokens, rows, lengths, queries, books)
        total = wanted.indptr[-1]
        found = {
            "indptr": table.indptr.tolist(),
            "starts": table.starts.tolist(),
            "slots": table.slots[:total].tolist(),
            "expected": table.expected[:total].tolist(),
            "record": ViolationRecord.decode(table.record.tolist()),
        }
        for what, value in found.items():
            if value != getattr(wanted, what):
                return f"batch {number}: {what}: {value} is not {getattr(wanted, what)}"[:600]
    return None


def with_blocks(module: ModuleType, blocks: tuple[int, int, int]) -> Any:
    """The implementation in ``module`` with these ``blocks``, which torch has no use for."""
    chosen: Any = module
    chosen.BLOCK, chosen.BLOCK_REQUESTS, chosen.PROGRAMS = blocks
    return chosen.translate


# -- changes -----------------------------------------------------------------------------------

#: Of ``translate_triton.py``.
TRITON_CHANGES: dict[str, tuple[str, str]] = {
    "mapped": ("tl.where(slot == 0, UNMAPPED, cause)", "cause"),
    "full: range low": ("known = (full >= 0) & ", "known = (full >= -2) & "),
    "full: range high": ("(full < full_rows)", "(full <= full_rows)"),
    "window: range low": ("inside = (slot > 0)", "inside = (slot >= 0)"),
    "window: range high": ("(slot < window_slots)", "(slot <= window_slots)"),
    "window: in range": ("tl.where(inside, cause, OUT_OF_RANGE)", "cause"),
    "table: row low": ("(row >= 0)", "(row >= -1)"),
    "table: row high": ("(row < table_rows)", "(row <= table_rows)"),
    "table: place": ("(position < table_places)", "(position <= table_places)"),
    "window page live": ("tl.where(born >= NO_LONGER_LIVE, FREED, cause)", "cause"),
    "window page live, on the edge": (
        "(born >= NO_LONGER_LIVE, FREED",
        "(born > NO_LONGER_LIVE, FREED",
    ),
    "full page live": (
        "(full_born >= NO_LONGER_LIVE) | (stamp < full_born)",
        "(stamp < full_born) & (full_born < NO_LONGER_LIVE)",
    ),
    "stamp: window side": ("tl.where(stamp < born, RECYCLED, cause)", "cause"),
    "stamp: window side, equal": ("tl.where(stamp < born,", "tl.where(stamp <= born,"),
    "stamp: full side": (" | (stamp < full_born)", ""),
    "stamp: full side, equal": ("(stamp < full_born)", "(stamp <= full_born)"),
    "owner": ("tl.where(owner != full, FOREIGN, CAUSES)", "tl.where(owner < 0, FOREIGN, CAUSES)"),
    "page of the full slot": (
        "full_borns + full.to(tl.int32)",
        "full_borns + (full + 1).to(tl.int32)",
    ),
    "page of the window slot": (
        "window_borns + slot.to(tl.int32)",
        "window_borns + (slot + 1).to(tl.int32)",
    ),
    "window clamp": ("- (window - 1), 0)", "- window, 0)"),
    "window clamp at 0": (
        "tl.maximum(length - query - (window - 1), 0)",
        "length - query - (window - 1)",
    ),
    "union of the queries' windows": ("length - query - (window - 1)", "length - 1 - (window - 1)"),
    "no queries": ("(query > 0) & ", ""),
    "last position": ("length - start, 0)", "length - start - 1, 0)"),
    "redirect": ("slot = tl.where(leads, slot, 0)", "slot = tl.maximum(slot, 0)"),
    "expected generation": ("tl.where(leads, born, 0)", "born"),
    "room": ("fits = tl.minimum(count, room - begin)", "fits = count"),
    "dropped": ("count - fits, sem", "count, sem"),
    "sum before": ("other, other < r, window", "other, other <= r, window"),
    "sum before, later blocks": ("before += counts", "before = counts"),
    "later blocks": (
        "range(part * BLOCK, fits, parts * BLOCK)",
        "range(part * BLOCK, tl.minimum(fits, parts * BLOCK), parts * BLOCK)",
    ),
    "only entries that are there count": ("bad = there & (cause < CAUSES)", "bad = cause < CAUSES"),
    "count": (
        "tl.sum((bad & (cause == each)).to(tl.int64))",
        "tl.max((bad & (cause == each)).to(tl.int64))",
    ),
    "count by cause": ("(bad & (cause == each))", "(bad & (cause <= each))"),
    "first offender": ("tl.atomic_min(scratch + FIRST", "tl.atomic_max(scratch + FIRST"),
    "first offender of a block": (
        "tl.min(tl.where(bad, key, NOBODY))",
        "tl.max(tl.where(bad, key, 0))",
    ),
    "first offender's request": (
        "(request.to(tl.int64) << 32) | position",
        "(request.to(tl.int64) * 0) | position",
    ),
    "last program": ("* parts - 1:", "* parts - 2:"),
    "counts are left empty": (
        "scratch + lane, tl.zeros([8], tl.int64), mask=lane <= DROPPED",
        "scratch + lane, tl.full([8], 1, tl.int64), mask=lane <= DROPPED",
    ),
    "dropped are left empty": (
        "tl.zeros([8], tl.int64), mask=lane <= DROPPED",
        "tl.zeros([8], tl.int64), mask=lane < DROPPED",
    ),
    "first is left empty": (
        "tl.atomic_xchg(scratch + FIRST, tl.full([], NOBODY, tl.int64)",
        "tl.atomic_xchg(scratch + FIRST, tl.full([], 5, tl.int64)",
    ),
    "ticket is left empty": ("tl.store(scratch + TICKET, 0)", "pass"),
    "late is left empty": (
        "tl.store(record + LATE, tl.full([], NOBODY, tl.int64))",
        "tl.store(record + LATE, 5)",
    ),
}

#: Of ``translate_torch.py``.
TORCH_CHANGES: dict[str, tuple[str, str]] = {
    "mapped": ("    cause.masked_fill_(slot == 0, Cause.UNMAPPED)\n", ""),
    "full: range low": ("known = (full >= 0)", "known = (full >= -2)"),
    "full: range high": ("(full < books.full_rows)", "(full <= books.full_rows)"),
    "full: in range": ("    cause.masked_fill_(~known, Cause.OUT_OF_RANGE)\n", ""),
    "window: range high": ("(slot < books.window_slots)", "(slot <= books.window_slots)"),
    "window: in range": ("    cause.masked_fill_(~inside, Cause.OUT_OF_RANGE)\n", ""),
    "table: row": ("(row >= 0) & ", ""),
    "table: place": (" & (position < table.shape[1])", ""),
    "window page live": ("    cause.masked_fill_(born >= FREED, Cause.FREED)\n", ""),
    "full page live": (
        "(full_born >= FREED) | (stamp < full_born)",
        "(stamp < full_born) & (full_born < FREED)",
    ),
    "stamp: window side": ("    cause.masked_fill_(stamp < born, Cause.RECYCLED)\n", ""),
    "stamp: window side, equal": ("masked_fill_(stamp < born,", "masked_fill_(stamp <= born,"),
    "stamp: full side": (" | (stamp < full_born)", ""),
    "stamp: full side, equal": ("(stamp < full_born)", "(stamp <= full_born)"),
    "owner": ("    cause.masked_fill_(owner != row, Cause.FOREIGN)\n", ""),
    "window clamp": ("- (window - 1)", "- window"),
    "window clamp at 0": (
        "(lengths - queries - (window - 1)).clamp(min=0)",
        "(lengths - queries - (window - 1))",
    ),
    "redirect": ("torch.where(leads, looked.slot, 0)", "torch.where(there, looked.slot, 0)"),
    "expected generation": (
        "torch.where(leads, looked.born, 0)",
        "torch.where(there, looked.born, 0)",
    ),
    "only entries that are there count": ("there & ~looked.leads", "~looked.leads"),
    "dropped": ("(ends[-1] - room).clamp(min=0)", "0"),
    "room": ("ends = ends.clamp(max=room)", "ends = ends"),
    "first offender": ("key.argmin()", "torch.where(bad, key, -1).argmax()"),
    "first is left empty": ("    out.record[AT_FIRST].fill_(NOBODY)\n", ""),
}


def _dense_cases() -> Iterator[Case]:
    """Small batches in which much is wrong at once."""
    for seed, page in enumerate((4, 3, 1)):
        yield Case(
            f"dense {seed}", page, 8, (20, 9, 0, 13), (1, 1, 1, 6), rate=0.4, blocks=(16, 2, 4),
            seed=seed, room=(None, 20, None)[seed],
        )  # fmt: skip


#: Enough to notice each change, the quickest first.
TELLING = [
    *_dense_cases(),
    *(
        case
        for case in CASES
        if case.name.startswith(("only ", "no ", "room", "trees", "everything", "random"))
        or case.name in ("page 3", "more queries than tokens", "window 1")
    ),
]


def changed(name: str, source: str, folder: Path) -> ModuleType:
    """A module of ours with another text, which Triton reads from its file."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"hicache_guard.kernels.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def agrees(check: Callable[[], bool], limit: int = 60) -> bool:
    """Whether ``check``, run in a process of its own, says yes; a crash and a hang say no."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.alarm(limit)
            status = int(not check())
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def survivors(
    name: str, changes: dict[str, tuple[str, str]], agree: Callable[[ModuleType], bool]
) -> Iterator[tuple[str, bool]]:
    """Each change of kernels/``name``.py, and whether what it makes of the module can ``agree``."""
    source = (KERNELS / f"{name}.py").read_text()
    for change, (whole, instead) in {"unchanged": ("", ""), **changes}.items():
        assert not whole or source.count(whole) == 1, f"{change}: the text is not there once"
        with tempfile.TemporaryDirectory() as folder:
            text = source.replace(whole, instead) if whole else source

            def check(text: str = text, folder: str = folder) -> bool:
                return agree(changed(name, text, Path(folder)))

            yield f"{name}: {change}", agrees(check, limit=120)


def _telling(module: ModuleType) -> bool:
    """Whether ``module`` agrees with the oracle in all that is telling."""
    return not any(
        disagreement(case, with_blocks(module, case.blocks)) is not None for case in TELLING
    )


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    from hicache_guard.kernels import translate_triton

    torch.set_num_threads(1)
    if "--changes" in sys.argv:
        changes = [("translate_triton", TRITON_CHANGES), ("translate_torch", TORCH_CHANGES)]
        for name, these in changes:
            for change, still in survivors(name, these, _telling):
                print(json.dumps([change, still]), flush=True)
        return
    for case in CASES:
        found = disagreement(case, with_blocks(translate_triton, case.blocks))
        print(json.dumps([case.name, found]), flush=True)


if __name__ == "__main__":
    main()
