"""The translation of streams and the oracle, asked the same; and changes of the kernels' text.

As a program, in a process of its own because Triton decides when it is imported whether it
interprets: prints one JSON line for each case, name and what disagrees (null for nothing), and with
``--changes`` one for each change, name and whether kernel and oracle still agree.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import ModuleType

import kernel_oracle as oracle
import torch
from translate_agreement import CPU, MARGIN, books_of, framed, held, survivors, with_blocks

from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.record import LENGTH, ViolationRecord
from hicache_guard.kernels.stream import Implementation, Stream, StreamTranslation

#: Stands where nobody may write, and where a report has not been written yet.
CANARY = -77
#: Places of ``out`` that have no slot.
SPARE = 3


@dataclass(frozen=True)
class Case:
    """One plan and the streams that it translates, one after the other."""

    name: str
    page: int
    #: Entries of each request.
    counts: tuple[int, ...]
    #: Requests that are counted, where not all are: the others pad the batch.
    counted: int | None = None
    wrongs: tuple[str, ...] = oracle.WRONGS
    rate: float = 0.1
    slots: torch.dtype = torch.int64
    starts: torch.dtype = torch.int64
    out: torch.dtype = torch.int64
    #: Slots that are no request's, as in ``kernel_oracle.gathered_of``.
    outside: tuple[int, int] = (0, 40)
    #: The kernel's blocks: entries, requests, programs.
    blocks: tuple[int, int, int] = (256, 256, 2048)
    seed: int = 0


RAGGED = (0, 1, 5, 300, 0, 127, 40, 0)


def _boundary_cases() -> Iterator[Case]:
    """Every value that was asked for, each in a case of its own beside other values."""
    narrow, wide = dtypes = (torch.int32, torch.int64)
    for page, slots, out in product((1, 16, 64, 256), dtypes, dtypes):
        starts = narrow if slots is out else wide
        name = f"page {page}, {slots} to {out}"
        yield Case(name, page, RAGGED, slots=slots, out=out, starts=starts)
    for rate in (0.0, 0.1, 1.0):
        yield Case(f"stale {rate}", 16, RAGGED, rate=rate, slots=narrow, out=narrow)
    for wrong in oracle.WRONGS:
        dtype = narrow if "window" in wrong else wide
        yield Case(f"only {wrong}", 4, (50, 33, 8), wrongs=(wrong,), rate=0.3, slots=dtype)
    for counted in (0, 1, 4, 7):
        yield Case(f"{counted} of 8 counted", 16, RAGGED, counted=counted, rate=0.4)
    yield Case("all that is wrong is padding", 4, (0, 0, 30, 30), counted=2, rate=1.0)
    yield Case("one request", 1, (257,), rate=0.3)
    yield Case("one entry", 1, (1,), rate=1.0)
    yield Case("one entry, alone", 1, (1,), rate=0.0, outside=(0, 0))
    yield Case("only empty requests", 16, (0, 0, 0))
    yield Case("an empty stream", 16, (0, 0, 0), outside=(0, 0))
    yield Case("an empty stream, nobody counted", 16, (0,), counted=0, outside=(0, 0))
    yield Case("nothing beyond", 16, RAGGED, outside=(0, 0))
    yield Case("slots before the first request", 16, RAGGED, outside=(50, 40), rate=0.4)
    yield Case("fewer slots than are said", 16, (60, 60, 30), outside=(0, -50), rate=0.4)
    yield Case("longer than a block", 16, (700, 0, 513), rate=0.02)
    yield Case("small blocks", 4, (90,) * 7, blocks=(16, 2, 14))
    yield Case("one program each", 4, (90,) * 5, blocks=(16, 4, 1), counted=3)
    dice = random.Random(0)
    many = tuple(dice.choice((0, 1, 2, 9)) for _ in range(310))
    yield Case("many requests", 16, many, counted=290, slots=narrow, out=narrow, rate=0.3)


def _random_cases(count: int) -> Iterator[Case]:
    for seed in range(count):
        dice = random.Random(seed)
        requests = dice.randrange(1, 7)
        yield Case(
            f"random {seed}",
            page=dice.choice((1, 1, 3, 4, 16)),
            counts=tuple(dice.choice((0, 1, 3, 17, 64, 150)) for _ in range(requests)),
            counted=dice.choice((None, None, dice.randrange(requests + 1))),
            wrongs=tuple(dice.sample(oracle.WRONGS, dice.randrange(5))),
            rate=dice.choice((0.02, 0.3, 1.0)),
            slots=dice.choice((torch.int32, torch.int64)),
            starts=dice.choice((torch.int32, torch.int64)),
            out=dice.choice((torch.int32, torch.int64)),
            outside=(dice.choice((0, 0, 20)), dice.choice((0, 20))),
            blocks=dice.choice(((32, 2, 8), (256, 256, 2048), (16, 1, 1))),
            seed=seed,
        )


CASES = [*_boundary_cases(), *_random_cases(24)]


def streams_of(case: Case) -> tuple[oracle.World, list[oracle.Gathered]]:
    """What ``case`` asks: a stream, another for fewer requests, and one in which all is well.

    What a run leaves in the plan would show in the next.
    """
    dice = random.Random(case.seed)
    world = oracle.world_of(dice, case.page, max(3, 64 // case.page), case.wrongs)
    counted = len(case.counts) if case.counted is None else case.counted
    fewer = case.counts[1::2] or case.counts
    streams = [
        oracle.gathered_of(dice, world, list(counts), min(counted, len(counts)), rate, case.outside)
        for counts, rate in ((case.counts, case.rate), (fewer, case.rate), (case.counts[::-1], 0.0))
    ]
    for gathered in streams:
        gathered.slots = held(gathered.slots, case.slots)
    return world, streams


def asked(gathered: oracle.Gathered, case: Case, device: torch.device) -> Stream:
    """The stream as tensors."""
    return Stream(
        framed(gathered.slots, case.slots, device),
        framed(gathered.indptr, torch.int32, device),
        framed(gathered.starts, case.starts, device),
        gathered.counted,
    )


class Canaries:
    """A tensor between canaries, and full of them until it is written."""

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._whole = torch.full((length + 2 * MARGIN,), CANARY, dtype=dtype, device=device)
        self.inner = self._whole[MARGIN : MARGIN + length]

    def check(self) -> None:
        """Raise ``AssertionError`` where somebody wrote beside the tensor."""
        beside = torch.cat([self._whole[:MARGIN], self._whole[-MARGIN:]])
        assert (beside == CANARY).all(), "written beside a tensor"


class Watched:
    """A plan for ``implementation``, whose every output lies between canaries."""

    def __init__(self, requests: int, implementation: Implementation, device: torch.device) -> None:
        self._plan = StreamTranslation.plan(requests, device, how="torch")
        self.planned = self._plan._scratch.tolist()
        self._scratch = Canaries(len(self.planned), torch.int64, device)
        self._scratch.inner.copy_(self._plan._scratch)
        self._plan._scratch = self._scratch.inner
        self._implementation = implementation
        self._plan._translate = self._translate

    def _translate(
        self,
        stream: Stream,
        books: DeviceBooks,
        out: torch.Tensor,
        report: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        written = Canaries(report.shape[0], report.dtype, report.device)
        self._implementation(stream, books, out, written.inner, scratch)
        written.check()
        report.copy_(written.inner)

    def found(self, stream: Stream, books: DeviceBooks, dtype: torch.dtype) -> dict[str, object]:
        """What it says of ``stream``, by the names of ``kernel_oracle.StreamAnswer``."""
        out = Canaries(len(stream.slots) + SPARE, dtype, stream.slots.device)
        numbers = self._plan.run(stream, books, out.inner).tolist()
        out.check()
        self._scratch.check()
        return {
            "out": [None if slot == CANARY else slot for slot in out.inner.tolist()],
            "nowhere": numbers[LENGTH:],
            "record": ViolationRecord.decode(numbers[:LENGTH]),
            "scratch": self._scratch.inner.tolist(),
        }


def disagreement(
    case: Case, implementation: Implementation, device: torch.device = CPU
) -> str | None:
    """What an implementation says otherwise than the oracle, or None."""
    world, streams = streams_of(case)
    books = books_of(world, device)
    plan = Watched(len(case.counts) + case.seed % 2, implementation, device)
    for number, gathered in enumerate(streams):
        answer = oracle.translate_stream(world, gathered)
        wanted = {**vars(answer), "out": answer.out + [None] * SPARE, "scratch": plan.planned}
        found = plan.found(asked(gathered, case, device), books, case.out)
        for what, value in found.items():
            if value != wanted[what]:
                return f"stream {number}: {what}: {value} is not {wanted[what]}"[:600]
    return None


# -- changes -----------------------------------------------------------------------------------

#: Of ``stream_triton.py``; what it has from ``translate_triton.py`` is changed there.
TRITON_CHANGES: dict[str, tuple[str, str]] = {
    "counted": (" & (r < counted)", ""),
    "counted, on the edge": ("(r < counted)", "(r <= counted)"),
    "only entries that are there count": ("bad = there & (cause", "bad = (cause"),
    "only entries that are there are written": ("element_ty), mask=there)", "element_ty))"),
    "entries of this request": ("there = entry < end", "there = entry <= end"),
    "room": (
        "end = tl.minimum(tl.load(indptr + r + 1).to(tl.int64), room)",
        "end = tl.load(indptr + r + 1).to(tl.int64)",
    ),
    "redirect": ("tl.where(leads, slot, 0)", "tl.maximum(slot, 0)"),
    "position: start": ("r, start + entry - begin)", "r, entry - begin)"),
    "position: first entry": ("r, start + entry - begin)", "r, start + entry)"),
    "position: entry": ("r, start + entry - begin)", "r, start)"),
    "first offender's request": ("bad, cause, r, start", "bad, cause, r * 0, start"),
    "start of this request": ("tl.load(starts + r)", "tl.load(starts)"),
    "first block": ("range(begin + part * BLOCK,", "range(begin,"),
    "later blocks": (
        "part * BLOCK, end, parts * BLOCK)",
        "part * BLOCK, tl.minimum(end, begin + parts * BLOCK), parts * BLOCK)",
    ),
    "one that is wrong": ("if wrong > 0:", "if wrong > 1:"),
    "counts by cause": ("add_up(scratch, bad, cause, r, start + entry - begin)", "pass"),
    "count of a request": ('tl.atomic_add(scratch + LENGTH + r, wrong, sem="relaxed")', "pass"),
    "count of a request, all": ("LENGTH + r, wrong, sem", "LENGTH + r, 1, sem"),
    "count of a request, each block": (
        'tl.atomic_add(scratch + LENGTH + r, wrong, sem="relaxed")',
        "tl.store(scratch + LENGTH + r, wrong)",
    ),
    "count of its request": ("scratch + LENGTH + r, wrong", "scratch + LENGTH, wrong"),
    "last program": ("* parts - 1:", "* parts - 2:"),
    "ticket": ("tl.atomic_add(scratch + TICKET, 1,", "tl.atomic_add(scratch + TICKET, 2,"),
    "a program for each request": (
        "max(1, min(triton.cdiv(room, BLOCK), PROGRAMS // count))",
        "min(triton.cdiv(room, BLOCK), PROGRAMS // count)",
    ),
    "later blocks of requests": (
        "range(0, requests, BLOCK_REQUESTS)",
        "range(0, 1, BLOCK_REQUESTS)",
    ),
    "requests of this batch": ("theirs = request < requests", "theirs = request <= requests"),
    "counts of requests are left empty": (
        "tl.zeros([BLOCK_REQUESTS], tl.int64)",
        "tl.full([BLOCK_REQUESTS], 1, tl.int64)",
    ),
    "counts of requests are moved": (
        "tl.store(report + LENGTH + request, wrongs, mask=theirs)",
        "pass",
    ),
    "record is moved and left empty": ("key = move(report, scratch)", "key = NOBODY"),
    "no first offender": ("if key < NOBODY:", "if key <= NOBODY:"),
    "place: first entry": (
        "tl.load(indptr + request).to(tl.int64) + position",
        "position",
    ),
    "place: start": ("place -= tl.load(starts + request).to(tl.int64)", "place -= 0"),
    "place: of its request": (
        "place -= tl.load(starts + request).to(tl.int64)",
        "place -= tl.load(starts).to(tl.int64)",
    ),
    **{
        f"first offender's facts: {fact}": (f"tl.store(report + FIRST + {at}, {fact})", "pass")
        for at, fact in enumerate(
            ("full", "slot", "cause", "stamp", "born", "full_born", "owner"), start=1
        )
    },
}

#: Of ``stream_torch.py``; what it has from ``translate_torch.py`` is changed there.
TORCH_CHANGES: dict[str, tuple[str, str]] = {
    "counted": (" & (request < stream.counted)", ""),
    "counted, on the edge": ("(request < stream.counted)", "(request <= stream.counted)"),
    "only entries that are there count": ("bad = there & ~", "bad = ~"),
    "only entries that are there are written": (
        "torch.where(there, torch.where(looked.leads, looked.slot, 0), held)",
        "torch.where(looked.leads, looked.slot, 0)",
    ),
    "entries before the first request": ("(entry >= begins[0]) & ", ""),
    "entries beyond the last request": (" & (entry < ends[-1])", ""),
    "redirect": ("torch.where(looked.leads, looked.slot, 0)", "looked.slot"),
    "position: start": ("(stream.starts.long() - begins)", "-begins"),
    "position: first entry": ("(stream.starts.long() - begins)", "stream.starts.long()"),
    "position: entry": ("(start + entry)", "start"),
    "first offender's request": ("request << 32 |", "request * 0 |"),
    "empty requests": ("right=True", "right=False"),
    "entries beyond have a request": (".clamp_(max=ends.shape[0] - 1)", ""),
    "counts by cause": ("    add_up(report[:LENGTH], looked, bad,", "    (report[:LENGTH], bad,"),
    "count of a request": ("    report[LENGTH:].index_add_(0, request, bad.long())\n", ""),
    "count of a request, each entry": (
        "report[LENGTH:].index_add_(0, request, bad.long())",
        "report[LENGTH:].index_copy_(0, request, bad.long())",
    ),
    "report is cleared": ("    report.zero_()\n", ""),
    "first is cleared": ("    report[AT_FIRST].fill_(NOBODY)\n", ""),
    "late is cleared": ("    report[AT_LATE].fill_(NOBODY)\n", ""),
    "an empty stream": ("if stream.slots.shape[0] == 0:", "if stream.slots.shape[0] < 0:"),
}

#: Enough to notice each change, the quickest first.
TELLING = [
    Case("small", 4, (20, 9, 0, 13), rate=0.4, blocks=(16, 2, 4)),
    Case("small, padded", 3, (20, 0, 30, 9), counted=3, rate=0.4, blocks=(8, 2, 4), seed=1),
    *(
        case
        for case in CASES
        if "page" not in case.name and not case.name.startswith(("many", "longer"))
    ),
]


def _telling(module: ModuleType) -> bool:
    """Whether ``module`` agrees with the oracle in all that is telling."""
    return not any(
        disagreement(case, with_blocks(module, case.blocks)) is not None for case in TELLING
    )


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    from hicache_guard.kernels import stream_triton

    torch.set_num_threads(1)
    if "--changes" in sys.argv:
        for name, changes in (("stream_triton", TRITON_CHANGES), ("stream_torch", TORCH_CHANGES)):
            for change, still in survivors(name, changes, _telling):
                print(json.dumps([change, still]), flush=True)
        return
    for case in CASES:
        found = disagreement(case, with_blocks(stream_triton, case.blocks))
        print(json.dumps([case.name, found]), flush=True)


if __name__ == "__main__":
    main()
