"""What the kernels must say, in plain Python, written from the rule in ``kernels/books.py``.

Also the worlds they are asked about: books with entries that hold, and entries that are wrong in
each way there is.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

from hicache_guard.core.ledger import FREED
from hicache_guard.kernels.record import Cause, Offender, ViolationRecord

#: Slots that no pool has.
HOSTILE_WIDE = (-(2**62), -(2**33), 2**33, 2**40)
HOSTILE = (-(2**31), -7, -1, 2**31 - 1)
#: The ways in which an entry is made wrong.
WRONGS = (
    "hostile full", "past the last row", "unmapped", "hostile window", "past the last slot",
    "padding page", "outside page", "freed", "recycled", "full freed", "full recycled", "foreign",
)  # fmt: skip


@dataclass
class World:
    """The books as lists; page 0 and the last page of each side are live to nobody."""

    page_size: int
    mapping: list[int]
    stamp: list[int]
    owner: list[int]
    full_born: list[int]
    window_born: list[int]
    #: Full slots of live pages whose entry holds, and those that are wrong on purpose.
    good: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self.mapping) - 1


@dataclass
class Query:
    """What a translation is asked: the table of requests, and a batch of them."""

    table: list[list[int]]
    rows: list[int]
    lengths: list[int]
    queries: list[int]


@dataclass
class Answer:
    """What it must say; ``slots`` and ``expected`` as long as what fits."""

    indptr: list[int]
    starts: list[int]
    slots: list[int]
    expected: list[int]
    record: ViolationRecord


@dataclass
class Gathered:
    """What a stream's translation is asked: full slots that somebody else gathered."""

    slots: list[int]
    indptr: list[int]
    starts: list[int]
    counted: int


@dataclass
class StreamAnswer:
    """What it must say: of each slot, None where ``out`` is left as it is; of each request."""

    out: list[int | None]
    nowhere: list[int]
    record: ViolationRecord


@dataclass
class Found:
    """What leads nowhere, in batch order."""

    counts: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    first: Offender | None = None

    def add(self, offender: Offender, request: int, position: int) -> None:
        """One more of them."""
        self.counts[offender.cause] += 1
        if self.first is None:
            self.first = replace(offender, request=request, position=position)


def judge(world: World, full: int) -> tuple[Offender | None, int, int]:
    """One full slot: the offender (its request and position are 0) or None; slot, generation."""
    slot = stamp = born = full_born = owner = -1
    cause: Cause | None = None
    if not 0 <= full < world.rows:
        cause = Cause.OUT_OF_RANGE
    else:
        slot, stamp = world.mapping[full], world.stamp[full]
        full_born = world.full_born[full // world.page_size]
        if slot == 0:
            cause = Cause.UNMAPPED
        elif not 0 < slot < len(world.owner):
            cause = Cause.OUT_OF_RANGE
        else:
            born = world.window_born[slot // world.page_size]
            owner = world.owner[slot]
            if born >= FREED:
                cause = Cause.FREED
            elif stamp < born:
                cause = Cause.RECYCLED
            elif full_born >= FREED or stamp < full_born:
                cause = Cause.FULL_RECYCLED
            elif owner != full:
                cause = Cause.FOREIGN
    if cause is None:
        return None, slot, born
    return Offender(0, 0, full, slot, cause, stamp, born, full_born, owner), 0, 0


def translate(world: World, query: Query, window: int, room: int) -> Answer:
    """The windows of a batch, entry by entry."""
    indptr, starts = [0], list[int]()
    slots, expected = list[int](), list[int]()
    found, dropped = Found(), 0
    for request, row in enumerate(query.rows):
        length, asked = query.lengths[request], query.queries[request]
        start = max(0, max(0, length - asked) - (window - 1))
        starts.append(start)
        positions = range(start, length) if asked > 0 and length > 0 else range(0)
        for position in positions:
            if len(slots) == room:
                dropped += 1
                continue
            there = 0 <= row < len(query.table) and position < len(query.table[row])
            full = query.table[row][position] if there else -1
            offender, slot, born = judge(world, full)
            slots.append(slot)
            expected.append(born)
            if offender is not None:
                found.add(offender, request, position)
        indptr.append(len(slots))
    record = ViolationRecord(found.counts, found.first, dropped, None)
    return Answer(indptr, starts, slots, expected, record)


def translate_stream(world: World, gathered: Gathered) -> StreamAnswer:
    """A stream that was gathered for a batch, entry by entry."""
    out: list[int | None] = [None] * len(gathered.slots)
    nowhere = [0] * len(gathered.starts)
    found = Found()
    for request, start in enumerate(gathered.starts):
        begin, end = gathered.indptr[request], gathered.indptr[request + 1]
        for entry in range(begin, min(end, len(out))):
            offender, out[entry], _ = judge(world, gathered.slots[entry])
            if offender is not None and request < gathered.counted:
                found.add(offender, request, start + entry - begin)
                nowhere[request] += 1
    return StreamAnswer(out, nowhere, ViolationRecord(found.counts, found.first, 0, None))


def world_of(dice: random.Random, page_size: int, pages: int, wrongs: tuple[str, ...]) -> World:
    """Books of two pools with ``pages`` pages each, in which each of ``wrongs`` occurs."""
    full_born = [FREED, *(dice.randrange(1, 60) for _ in range(pages)), FREED]
    window_born = [FREED, *(dice.randrange(1, 60) for _ in range(pages)), FREED]
    rows, slots = (pages + 1) * page_size, (pages + 2) * page_size
    world = World(
        page_size,
        mapping=[0] * rows + [-1],
        stamp=[0] * rows + [77],
        owner=[0] * slots,
        full_born=full_born,
        window_born=window_born,
    )
    live_slots = list(range(page_size, (pages + 1) * page_size))
    dice.shuffle(live_slots)
    for full, slot in zip(range(page_size, rows), live_slots, strict=True):
        newest = max(full_born[full // page_size], window_born[slot // page_size])
        world.mapping[full] = slot
        # Often exactly as old as the page: written by the operation that handed it out.
        world.stamp[full] = newest + dice.choice((0, 0, 1, 30))
        world.owner[slot] = full
    # One page in eight, so that most entries of the others hold.
    for wrong in wrongs:
        for full in dice.sample(range(page_size, rows), max(1, rows // 40)):
            _spoil(dice, world, full, wrong)
    for full in range(page_size, rows):
        (world.good if judge(world, full)[0] is None else world.wrong).append(full)
    if "hostile full" in wrongs:
        world.wrong += [*HOSTILE, *HOSTILE_WIDE]
    if "past the last row" in wrongs:
        world.wrong += [rows, rows + 1, 0]
    return world


def _spoil(dice: random.Random, world: World, full: int, wrong: str) -> None:
    size, slot = world.page_size, world.mapping[full]
    inside = 0 < slot < len(world.owner)
    if wrong == "unmapped":
        world.mapping[full] = 0
    elif wrong == "hostile window":
        world.mapping[full] = dice.choice((*HOSTILE, *HOSTILE_WIDE))
    elif wrong == "past the last slot":
        world.mapping[full] = len(world.owner) + dice.randrange(2)
    elif wrong in ("padding page", "outside page") and size > 1:
        world.mapping[full] = dice.randrange(1, size) + (wrong[0] == "o") * (
            len(world.owner) - size
        )
        world.owner[world.mapping[full]] = full
    elif wrong == "freed" and inside:
        world.window_born[slot // size] = FREED | dice.randrange(90)
    elif wrong == "recycled" and inside:
        world.stamp[full] = world.window_born[slot // size] - 1
        world.full_born[full // size] = 1
    elif wrong == "full freed":
        world.full_born[full // size] = FREED | dice.randrange(90)
    elif wrong == "full recycled" and inside:
        if world.window_born[slot // size] < FREED:
            world.window_born[slot // size] = 1
        world.full_born[full // size] = world.stamp[full] + 1
    elif wrong == "foreign" and inside:
        world.owner[slot] = full + 1


def slots_of(dice: random.Random, world: World, count: int, wrong_rate: float) -> list[int]:
    """Full slots of ``world``, some of which are wrong."""

    def slot() -> int:
        if world.wrong and dice.random() < wrong_rate:
            return dice.choice(world.wrong)
        return dice.choice(world.good or [0])

    return [slot() for _ in range(count)]


def query_of(
    dice: random.Random, world: World, lengths: list[int], queries: list[int], wrong_rate: float
) -> Query:
    """A batch over ``world``; requests sit in the table in another order, one of them nowhere."""
    places = max([*lengths, 1])
    table = [slots_of(dice, world, places, wrong_rate) for _ in range(len(lengths) + 2)]
    rows = [dice.randrange(len(table)) for _ in lengths]
    return Query(table, rows, lengths, queries)


def gathered_of(
    dice: random.Random,
    world: World,
    counts: list[int],
    counted: int,
    wrong_rate: float,
    outside: tuple[int, int] = (0, 0),
) -> Gathered:
    """A stream over ``world`` of ``counts`` entries a request.

    ``outside``: how many slots lie before the first request's and beyond the last's. Where that is
    negative, the last request is said to have so many entries more than there are slots.
    """
    before, beyond = outside
    indptr = list(itertools.accumulate(counts, initial=before))
    slots = slots_of(dice, world, max(0, indptr[-1] + beyond), wrong_rate)
    starts = [dice.choice((0, 1, 130, 2**31 - 5000)) for _ in counts]
    return Gathered(slots, indptr, starts, counted)
