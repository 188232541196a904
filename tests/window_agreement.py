"""The window kernel and float64, asked the same; memory it must not touch; changes of its text.

As a program, in a process of its own because Triton decides when it is imported whether it
interprets: prints one JSON line for each case, name and what disagrees (null for nothing). With
``--slow`` for more cases, with ``--changes`` one line for each change of the kernel's text, name
and whether it still agrees.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import mmap
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from translate_agreement import KERNELS, agrees, changed

from hicache_guard.core.ledger import FREED
from hicache_guard.kernels import record, window_reference
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.translate import WindowTable

CPU = torch.device("cpu")
#: The unit roundoff: what a weight, and the output, is rounded by. Triton's interpreter does not
#: round to bfloat16, it cuts off, which is twice as far.
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
CUT_OFF = {**ROUNDOFF, torch.bfloat16: 2.0**-7}
#: Stands where nobody may write.
CANARY = 7.0
#: Scores and sums are float32 whatever the inputs are. A score of some 10 is off by 1e-6 or so, its
#: weight by that fraction; a sum over thousands adds a few more.
SINGLE = 1e-5

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One batch; what the fields are called in ``VALUES``."""

    dtype: torch.dtype = torch.float32
    dims: tuple[int, int] = (64, 64)
    group: int = 4
    page: int = 16
    window: int = 128
    batch: str = "ragged"
    queries: str = "one"
    stale: float = 0.1
    poison: float = math.nan
    sinks: bool = False
    soft_cap: float = 0.0
    slots: torch.dtype = torch.int64

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items())

    def requests(self) -> tuple[list[int], list[int]]:
        """Lengths and counts of queries."""
        lengths = {
            "empty": [],
            "single": [self.window + 9],
            "ragged": [0, 1, 40, min(self.window, 300), min(self.window, 300) + 33],
        }[self.batch]
        # A long window costs the interpreter seconds for each tile of queries.
        many = 20 if self.window < 4096 else 6
        most = {"one": 1, "tree": 5, "prefill": many}[self.queries]
        return lengths, [min(most, length) for length in lengths]


VALUES: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "dims": ((64, 64), (128, 128), (192, 128)),
    "group": (1, 4, 8),
    "page": (1, 16, 64),
    "window": (1, 127, 128, 129, 4096),
    "batch": ("ragged", "single", "empty"),
    "queries": ("one", "tree", "prefill"),
    "stale": (0.0, 0.1, 1.0),
    "poison": (math.nan, math.inf),
    "sinks": (False, True),
    "soft_cap": (0.0, 5.0),
    "slots": (torch.int32, torch.int64),
}


def covering(strength: int, seed: int) -> list[Case]:
    """Cases in which every ``strength`` values of different fields meet, but of empty batches."""
    dice = random.Random(seed)
    names = [name for name in VALUES if name != "batch"]
    batches = itertools.cycle(("ragged", "single"))

    def meetings(row: dict[str, Any]) -> set[tuple[Any, ...]]:
        items = [(name, str(row[name])) for name in names]
        return set(itertools.combinations(items, strength))

    left: set[tuple[Any, ...]] = set()
    for chosen in itertools.combinations(names, strength):
        for values in itertools.product(*(VALUES[name] for name in chosen)):
            left.add(tuple(zip(chosen, map(str, values), strict=True)))
    cases = [Case(batch="empty"), Case(batch="empty", queries="prefill", sinks=True)]
    while left:
        tried = [{name: dice.choice(VALUES[name]) for name in names} for _ in range(60)]
        row = max(tried, key=lambda row: len(meetings(row) & left))
        if meetings(row) & left:
            left -= meetings(row)
            cases.append(Case(**row, batch=next(batches)))
    return cases


#: Head counts and sizes that fill no tile.
ODD = [
    Case(group=3, dims=(96, 80), queries="prefill", sinks=True, window=31),
    Case(group=12, dims=(80, 48), queries="tree", stale=0.4, window=31, page=3),
    Case(group=20, dims=(16, 16), queries="one", window=31),
]
CASES = [*covering(2, seed=1), *ODD]


@dataclass
class Asked:
    """The arguments of one case, for the kernel and for the reference."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: WindowTable
    lengths: torch.Tensor
    q_indptr: torch.Tensor
    books: DeviceBooks
    terms: dict[str, Any]
    max_queries: int
    #: The first entry that changed after the translation, as a key.
    late: int
    #: Which window slots hold KV that may be loaded.
    live: torch.Tensor

    def to(self, device: torch.device) -> Asked:
        """The same on another device."""

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(device)
            if isinstance(value, WindowTable | DeviceBooks):
                return type(value)(**{name: move(part) for name, part in vars(value).items()})
            return value

        moved = {name: move(value) for name, value in vars(self).items()}
        moved["terms"] = {name: move(value) for name, value in self.terms.items()}
        return Asked(**moved)


def asked(case: Case, *, whole_pages: bool = False) -> Asked:
    """The arguments of ``case``; what is stale is so page by page where ``whole_pages``.

    Half of what is stale was redirected by the translation, the other half changed after it.
    """
    dice = random.Random(str(case))
    torch.manual_seed(dice.randrange(2**31))
    lengths, queries = case.requests()
    starts = [
        max(0, length - count - (case.window - 1))
        for length, count in zip(lengths, queries, strict=True)
    ]
    counts = [
        length - start if count else 0
        for length, start, count in zip(lengths, starts, queries, strict=True)
    ]
    total = sum(counts)
    pages = total // case.page + 3
    born = torch.randint(1, 50, (pages + 2,), dtype=torch.int32)
    born[0] = born[-1] = FREED
    rows = list(range(case.page, (pages + 1) * case.page))
    dice.shuffle(rows)
    slots = torch.tensor(rows[:total], dtype=torch.int64)
    place = slots // case.page if whole_pages else slots
    draw = torch.rand((pages + 2) * case.page)[place]
    bad = draw < case.stale
    expected = born[slots // case.page].clone()
    redirected = draw < case.stale / 2
    slots[redirected] = 0
    expected[redirected] = 0
    expected[bad & ~redirected] += 1
    live = torch.zeros((pages + 2) * case.page, dtype=torch.bool)
    live[slots[~bad]] = True

    key = record.NOBODY
    places = [
        (request << 32) | (start + entry)
        for request, (start, count) in enumerate(zip(starts, counts, strict=True))
        for entry in range(count)
    ]
    for at, late in zip(places, (bad & ~redirected).tolist(), strict=True):
        key = min(key, at) if late else key

    kv_heads = 2 if case.window < 4096 else 1
    d, dv = case.dims
    total_queries = sum(queries)
    k = torch.randn(live.shape[0], kv_heads, d).to(case.dtype)
    v = torch.randn(live.shape[0], kv_heads, dv).to(case.dtype)
    k[~live] = case.poison
    v[~live] = -case.poison
    # Views of a larger projection, as they are in a server: heads are not adjacent to rows.
    q = torch.randn(total_queries, kv_heads * case.group + 2, d).to(case.dtype)
    sinks = torch.randn(kv_heads * case.group) * 2
    sinks[-1] = -math.inf  # a head without one
    numbers = torch.zeros(record.LENGTH, dtype=torch.int64)
    numbers[record.AT_LATE] = record.NOBODY
    nothing = torch.zeros(1, dtype=torch.int32)
    slots_of_owner = live.shape[0]
    return Asked(
        q=q[:, 1:-1],
        k=k,
        v=v,
        table=WindowTable(
            indptr=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
            starts=torch.tensor(starts, dtype=torch.int32),
            slots=slots.to(case.slots),
            expected=expected,
            record=numbers,
        ),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        q_indptr=torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32),
        books=DeviceBooks(
            mapping=torch.tensor([0, -1]),
            stamp=nothing.repeat(2),
            owner=nothing.repeat(slots_of_owner),
            full_born=nothing.repeat(2),
            window_born=born,
            page_size=case.page,
        ),
        terms={
            "window": case.window,
            "scale": d**-0.5,
            "soft_cap": case.soft_cap,
            "sinks": sinks if case.sinks else None,
        },
        max_queries=max([*queries, 1]),
        late=key,
        live=live,
    )


def reference(these: Asked, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What float64 says, of the values ``v``."""
    return window_reference.attend(
        these.q, these.k, v, these.table, these.lengths, these.q_indptr, these.books, **these.terms
    )  # fmt: skip


def called(
    attend: Attend, these: Asked, **outputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel says, as it says it."""
    return attend(
        these.q, these.k, these.v, these.table, these.lengths, these.q_indptr, these.books,
        max_queries=these.max_queries, **these.terms, **outputs,
    )  # fmt: skip


def attended(attend: Attend, these: Asked) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel says. It must write where it is told to, and not beyond."""
    count, heads = these.q.shape[:2]
    out = these.q.new_full((count + 1, heads, these.v.shape[2]), CANARY)
    lse = torch.full((count + 1, heads), CANARY, device=these.q.device)
    called(attend, these, out=out[:-1], lse=lse[:-1])
    assert (out[-1] == CANARY).all(), "written beyond the output"
    assert (lse[-1] == CANARY).all(), "written beyond the denominators"
    return out[:-1], lse[:-1]


def difference(case: Case, these: Asked, out: torch.Tensor, lse: torch.Tensor) -> str | None:
    """How a kernel's answer differs from float64 by more than its dtype allows, or None.

    A weight and the output are each rounded once, so an output is off by at most a roundoff of the
    mean of the values' sizes and one of itself.
    """
    exact, exact_lse = reference(these, these.v)
    size, _ = reference(these, these.v.abs())
    roundoff = (CUT_OFF if out.device.type == "cpu" else ROUNDOFF)[case.dtype]
    allowed = (roundoff + SINGLE) * size + roundoff * exact.abs() + 1e-7
    if out.dtype is not case.dtype or out.shape != exact.shape:
        return f"output: {out.dtype} {tuple(out.shape)}"
    excess = ((out.double() - exact).abs() / allowed).nan_to_num(math.inf).cpu()
    if excess.numel() and excess.max() > 1:
        return f"output: {float(excess.max())} times what is allowed"
    same = (lse == exact_lse) | ((lse.double() - exact_lse).abs() < 2 * SINGLE)
    if not same.all():
        return f"denominator: {lse[~same][0]} is not {exact_lse[~same][0]}"
    late = int(these.table.record[record.AT_LATE])
    if late != these.late:
        return f"late: {late} is not {these.late}"
    return None


def disagreement(case: Case, attend: Attend, device: torch.device = CPU) -> str | None:
    """What a kernel says otherwise than float64, or None."""
    these = asked(case).to(device)
    return difference(case, these, *attended(attend, these))


# -- memory that must not be touched -----------------------------------------------------------

#: What ``mprotect`` knows it by.
NO_ACCESS = 0
#: Eight slots of two heads of 64 numbers of 4 bytes are a page of memory.
GUARDED = [
    Case(page=8, stale=0.4, queries=queries, sinks=True, window=127)
    for queries in ("one", "prefill")
] + [
    Case(page=8, stale=1.0, window=128),
    Case(page=8, stale=0.4, dims=(192, 128), window=127),
    Case(page=16, stale=0.4, dims=(64, 96), window=127),
]


def _unreadable(kept: torch.Tensor, live: torch.Tensor, page: int) -> torch.Tensor:
    """A copy of ``kept`` in which a KV page that holds nothing live cannot be read."""
    memory = mmap.mmap(-1, kept.nbytes)
    copy = torch.frombuffer(memory, dtype=kept.dtype).view(kept.shape)
    copy.copy_(kept)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = page * kept.stride(0) * kept.element_size()
    assert size % mmap.PAGESIZE == 0, "a KV page is one or more pages of memory"
    dead = [
        first for first in range(0, kept.shape[0], page) if not live[first : first + page].any()
    ]
    assert len(dead) > 3, "some pages are live to nobody besides those that no pool hands out"
    for first in dead:
        assert protect(copy.data_ptr() + first // page * size, size, NO_ACCESS) == 0
    return copy


def touches_nothing_stale(case: Case, attend: Attend) -> bool:
    """Whether a kernel agrees where reading a stale slot ends the process; to run in a child."""
    these = asked(case, whole_pages=True)
    plain = these.k, these.v
    these.k, these.v = (_unreadable(kept, these.live, case.page) for kept in plain)
    out, lse = attended(attend, these)
    these.k, these.v = plain
    return difference(case, these, out, lse) is None


# -- changes -----------------------------------------------------------------------------------

CHANGES: dict[str, tuple[str, str]] = {
    "load mask on K": ("d[:, None], mask=live[None, :]", "d[:, None], mask=there[None, :]"),
    "load mask on the rest of K": (
        "rest[:, None], mask=live[None, :]",
        "rest[:, None], mask=there[None, :]",
    ),
    "load mask on V": ("v_mask = live[:, None]", "v_mask = there[:, None]"),
    "load mask on V's columns": (
        "v_mask = live[:, None] & (dv < DV)[None, :]",
        "v_mask = live[:, None] & (dv < DV_TILE)[None, :]",
    ),
    "generation": ("live = there & (born == wanted)", "live = there & (wanted != 0)"),
    "redirected": (
        "live = there & (born == wanted)",
        "live = there & ((born == wanted) | (wanted == 0))",
    ),
    "generation's page": ("borns + slot.to(tl.int32)", "borns + (slot + 1).to(tl.int32)"),
    "stale is never scored": (
        "position[:, None]) & live[None, :]",
        "position[:, None]) & there[None, :]",
    ),
    "late": ("(born != wanted) & (wanted != 0)", "(born != wanted)"),
    "late: the first": ("tl.atomic_min(record", "tl.atomic_max(record"),
    "late: the first of a block": (
        "tl.min(tl.where(late, key, NOBODY))",
        "tl.max(tl.where(late, key, 0))",
    ),
    "late: position": ("(start + entry).to(tl.int64)", "entry.to(tl.int64)"),
    "late: request": ("(r.to(tl.int64) << 32)", "(r.to(tl.int64) << 31)"),
    "causal limit": ("seen[None, :] <= position", "seen[None, :] < position"),
    "causal limit, loose": (
        "seen[None, :] <= position[:, None]",
        "seen[None, :] <= position[:, None] + 1",
    ),
    "window limit": ("> position[:, None] - window", "> position[:, None] - window + 1"),
    "window limit, loose": ("> position[:, None] - window", ">= position[:, None] - window"),
    "where queries stand": ("position = length - queries + query", "position = length - queries"),
    "blocks that no query sees": ("- (window - 1) - start, 0)", "- start, 0)"),
    "blocks that queries see": ("+ BLOCK_M // GROUP - start", "- start"),
    "entries of this request": ("there = entry < entries", "there = entry < entries + 1"),
    "queries of this request": ("(query < queries)", "(query <= queries)"),
    "blocks of queries": (
        "query_block = tl.program_id(2) * (BLOCK_M // GROUP)",
        "query_block = tl.program_id(2) * BLOCK_M",
    ),
    "sink": ("tl.full([BLOCK_M], 1.0, tl.float32)", "tl.zeros([BLOCK_M], tl.float32)"),
    "sink of its head": ("sinks + head", "sinks + kv_head * GROUP + m * 0"),
    "cap": ("            if CAP:", "            if CAP and BLOCK_M == 0:"),
    "cap: outside": ("soft_cap * (1.0 - 2.0", "(1.0 - 2.0"),
    "scale": ("score *= scale", "score *= 1.0"),
    "a row that saw nothing": (
        'base = tl.where(top_now > float("-inf"), top_now, 0.0)',
        "base = top_now",
    ),
    "nothing at all": ("total = tl.where(total > 0.0, total, 1.0)", "total = total"),
    "rescaled denominator": ("total = total * fade", "total = total"),
    "rescaled output": ("acc *= fade[:, None]", "acc *= 1.0"),
    "head of the group": ("head = kv_head * GROUP + m % GROUP", "head = kv_head * GROUP + m * 0"),
    "KV head of K": ("k_row + kv_head * k_head", "k_row"),
    "KV head of V": ("v_row + kv_head * v_head", "v_row"),
    "the rest of D": ("tl.dot(q_rest, k_rest, score, ", "tl.dot(q_rest, k_rest, "),
    "columns of the output": (
        "asked[:, None] & (dv < DV)[None, :]",
        "asked[:, None] & (dv < DV_TILE)[None, :]",
    ),
    "denominator": ("(top + tl.log2(total)) * LN2", "top * LN2"),
}

#: Enough to notice each change, the quickest first.
TELLING = [
    Case(sinks=True, group=1, window=40, batch="single", stale=0.4, dims=(96, 80), soft_cap=5.0),
    Case(sinks=True, window=31, queries="tree", stale=0.4),
    *ODD,
    Case(window=127, stale=1.0),
    Case(window=31, queries="prefill", group=8, stale=0.0),
    Case(window=64, queries="prefill", group=8, sinks=True, stale=0.02),
]


def survivors() -> Iterator[tuple[str, bool]]:
    """Each change of the kernel, and whether it still agrees."""
    source = (KERNELS / "window_triton.py").read_text()
    for change, (whole, instead) in {"unchanged": ("", ""), **CHANGES}.items():
        assert not whole or source.count(whole) == 1, f"{change}: the text is not there once"
        with tempfile.TemporaryDirectory() as folder:
            text = source.replace(whole, instead) if whole else source

            def check(text: str = text, folder: str = folder) -> bool:
                attend = changed("window_triton", text, Path(folder)).attend
                return not any(disagreement(case, attend) for case in TELLING) and all(
                    touches_nothing_stale(case, attend) for case in GUARDED
                )

            yield change, agrees(check, limit=120)


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    from hicache_guard.kernels import window_triton

    torch.set_num_threads(1)
    if "--changes" in sys.argv:
        for change, still in survivors():
            print(json.dumps([change, still]), flush=True)
        return
    for case in covering(3, seed=2) if "--slow" in sys.argv else CASES:
        print(json.dumps([str(case), disagreement(case, window_triton.attend)]), flush=True)
    for case in GUARDED:
        quiet = agrees(partial(touches_nothing_stale, case, window_triton.attend))
        print(json.dumps([f"guarded {case}", None if quiet else "touched or wrong"]), flush=True)


if __name__ == "__main__":
    main()
