"""Calls by names instead of numbers, so that some of them can be left out.

A recorded call names slots by their numbers. Leave out one allocation, and every later one returns
other slots. So what an allocation returned is named, request by request, and an argument becomes
parts of such rows: "the first five slots of what call 3 returned". ``Namer`` watches a play and
makes the names; ``perform`` makes a named call on any allocator, with the slots that the names mean
there. What names nothing that was made falls away, and a call of which nothing is left is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from hicache_guard.adapters.link import in_free_group
from hicache_guard.adapters.recording import SIZES
from hicache_guard.core.journal import acting_for
from hicache_guard.core.record import Allocator, Call, Write, decode, unpack
from hicache_guard.replay.play import Played
from hicache_guard.repro.pools import slots as tensor_of

#: Methods that return slots, and those that take slots.
ALLOCATIONS = ("alloc", "alloc_extend", "alloc_extend_swa_tail", "alloc_decode")
GROUP = ("free_group_begin", "free_group_end")
BY_PAGES = "_release_page_ids"
#: A write to the mapping itself, which is no method.
WRITE = "write"


@dataclass(frozen=True, slots=True)
class Part:
    """Slots ``first`` to ``last`` (half open) of a row, or their window slots.

    ``row`` is (step, request in it); without one the numbers themselves are meant.
    """

    row: tuple[int, int] | None
    first: int
    last: int
    window: bool = False

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Row:
    """What one request gets in an allocation: tokens ``prefix`` to ``length``, after ``after``."""

    number: int
    prefix: int
    length: int
    after: Part | None = None

    @property
    def new(self) -> int:
        return self.length - self.prefix


@dataclass(frozen=True, slots=True)
class Step:
    """One call by names. ``rows`` of an allocation, ``slots`` of whatever is told slots.

    ``targets``: where slots are to be mapped to, one each. ``tail``: tokens that get window KV.
    """

    key: int
    on: str
    do: str
    at: str = ""
    request: str | None = None
    rows: tuple[Row, ...] = ()
    tail: int | None = None
    slots: tuple[Part, ...] = ()
    targets: tuple[Part, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    refers: int | None = None
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """Steps on one new allocator, and what they come to: a violation's kind, or an exception."""

    steps: tuple[Step, ...]
    full: int
    window: int
    page: int
    sort: bool
    target: str
    recorded: int = 0

    def with_steps(self, steps: Sequence[Step]) -> Plan:
        return replace(self, steps=tuple(steps))

    def facts(self) -> dict[str, Any]:
        return {
            "operations": len(self.steps),
            "of": self.recorded,
            "full": self.full,
            "window": self.window,
            "page": self.page,
            "target": self.target,
        }


# -- from numbers to names -------------------------------------------------------------------------


class Namer:
    """Makes a step of each call that a play makes.

    ``whole``: the record begins with a new allocator. If not, slots that nobody was given since get
    a step of their own.
    """

    def __init__(self, allocator: Allocator, *, whole: bool) -> None:
        facts = allocator.facts
        self._page = int(facts["page"])
        self._plan = Plan(
            (),
            int(facts["full"]),
            int(facts["window"]),
            self._page,
            bool(facts["sort"]),
            "",
        )
        self._whole = whole
        self._steps: list[Step] = []
        self._made: dict[int, int] = {}
        self._full: dict[int, tuple[tuple[int, int], int, bool]] = {}
        self._window: dict[int, tuple[tuple[int, int], int, bool]] = {}
        self._grouped = False
        self._allocator: Any = None
        self._before_all: list[Step] = []

    def plan(self, played: Played) -> Plan:
        """The steps until what the play was about: its first violation, or how it ended."""
        if played.found:
            target, until = played.found[0].fault, played.found[0].call
        elif played.raised is not None:
            target, until = raised_words(played.raised), max(self._made)
        else:
            return self._plan
        count = self._made[until] + 1
        steps = (*self._before_all, *self._steps[:count])
        return replace(self._plan, steps=steps, target=target, recorded=count)

    def __call__(self, event: Call | Write, allocator: Any, result: Any) -> None:
        """Before a call and after it (then ``result`` is not None), or before a write."""
        self._allocator = allocator
        if isinstance(event, Write):
            self._written(event, allocator)
        elif result is None:
            self._before(event)
        else:
            self._after(event, allocator, result)

    def _written(self, write: Write, allocator: Any) -> None:
        if write.facts["what"] != "mapping":
            return
        mapping = allocator.full_to_swa_index_mapping
        to = unpack(write.facts["to"])
        rows = (mapping != to).nonzero().reshape(-1)
        self._append(
            Step(
                len(self._steps),
                "pair",
                WRITE,
                slots=self._parts(rows.tolist(), self._full),
                targets=self._parts(to[rows].tolist(), self._window),
            )
        )

    def _append(self, step: Step) -> None:
        self._steps.append(step)

    def _before(self, call: Call) -> None:
        if call.group and not self._grouped:
            self._append(Step(len(self._steps), "pair", "free_group_begin", request=call.request))
        self._grouped = call.group and call.do != "free_group_end"
        self._made[call.number] = len(self._steps)
        step = Step(len(self._steps), call.on, call.do, at=call.at, request=call.request)
        self._append(
            self._allocation(step, call) if call.do in ALLOCATIONS else self._other(step, call)
        )

    def _allocation(self, step: Step, call: Call) -> Step:
        args = [decode(value) for value in call.args]
        if call.do == "alloc":
            return replace(step, rows=(Row(0, 0, int(args[0])),))
        if call.do == "alloc_decode":
            lengths, last = args[0].tolist(), args[2].tolist()
            prefixes = [length - 1 for length in lengths]
        else:
            prefixes, lengths, last = args[0].tolist(), args[2].tolist(), args[4].tolist()
        home = self._window if call.on == "window" else self._full
        rows = []
        for number, (prefix, length, after) in enumerate(zip(prefixes, lengths, last, strict=True)):
            part = self._parts([after], home)[0] if after >= 0 else None
            rows.append(Row(number, prefix, length, part))
        tail = int(args[6]) if call.do == "alloc_extend_swa_tail" else None
        return replace(step, rows=tuple(rows), tail=tail)

    def _other(self, step: Step, call: Call) -> Step:
        home = self._window if call.on == "window" else self._full
        named = tuple(sorted(call.named.items()))
        step = replace(step, named=named)
        if not call.args:
            return step
        first = call.args[0]
        if isinstance(first, dict) and "state of" in first:
            return replace(step, refers=self._made.get(first["state of"]))
        if isinstance(first, dict) and "sizes" in first:
            return replace(step, sizes=tuple(first["sizes"]))
        values = decode(first).tolist()
        if call.do == BY_PAGES:
            pages = [page for each in call.args for page in decode(each).tolist()]
            values = [page * self._page for page in pages]
        step = replace(step, slots=self._parts(values, home))
        if call.do == "set_full_to_swa_mapping":
            targets = self._parts(decode(call.args[1]).tolist(), self._window)
            step = replace(step, targets=targets)
        return step

    def _after(self, call: Call, allocator: Any, result: Any) -> None:
        if call.do not in ALLOCATIONS or not isinstance(result, torch.Tensor):
            return
        key = self._made[call.number]
        place = 0
        for row in self._steps[key].rows:
            given = result[place : place + row.new]
            place += row.new
            name = (key, row.number)
            if call.on == "window":
                self._window |= {s: (name, i, True) for i, s in enumerate(given.tolist())}
                continue
            self._full |= {s: (name, i, False) for i, s in enumerate(given.tolist())}
            if call.on == "pair":
                tail = self._steps[key].tail
                mapped = 0 if tail is None else row.new - tail  # those before may be stale
                entries = window_of(allocator, given)
                self._window |= {
                    s: (name, i, True) for i, s in enumerate(entries) if s > 0 and i >= mapped
                }

    def _parts(
        self, values: Sequence[int], home: dict[int, tuple[tuple[int, int], int, bool]]
    ) -> tuple[Part, ...]:
        """Values by name; those that follow one another in a row are one part."""
        parts: list[Part] = []
        for value in values:
            name = home.get(value)
            if name is None and not self._whole and home is self._full:
                name = self._from_before(value)
            if name is None:
                new = Part(None, value, value + 1)
            else:
                row, place, window = name
                new = Part(row, place, place + 1, window)
            last = parts[-1] if parts else None
            joins = last is not None and (last.row, last.window) == (new.row, new.window)
            if last is not None and joins and last.last == new.first:
                parts[-1] = replace(last, last=new.last)
            else:
                parts.append(new)
        return tuple(parts)

    def _from_before(self, slot: int) -> tuple[tuple[int, int], int, bool] | None:
        """The name of a slot that somebody was given before the record begins.

        A step of its own stands for that: its page is handed out whole, with a window page where it
        has one now. Who had it, and what became of it, is not known.
        """
        page = slot // self._page
        if not 0 < page <= self._plan.full // self._page:
            return None
        key = -1 - len(self._before_all)
        rows = (Row(0, 0, self._page),)
        if self._page == 1:
            step = Step(key, "pair", "alloc", "before the record", rows=rows)
        else:
            do = "alloc_extend_swa_tail"
            first = page * self._page
            slots = torch.arange(first, first + self._page)
            tail = self._page if any(window_of(self._allocator, slots)) else 0
            step = Step(key, "pair", do, "before the record", rows=rows, tail=tail)
        self._before_all.append(step)
        named = {page * self._page + i: ((key, 0), i, False) for i in range(self._page)}
        self._full |= {s: name for s, name in named.items() if s not in self._full}
        return self._full[slot]


def window_of(allocator: Any, full: torch.Tensor) -> list[int]:
    """What the mapping says of full slots, now."""
    entries: list[int] = allocator.full_to_swa_index_mapping[full.long()].tolist()
    return entries


def raised_words(raised: Any) -> str:
    """An exception as a target."""
    return f"{raised['type']} at {raised['at']}"


# -- from names to calls ---------------------------------------------------------------------------


@dataclass
class Slots:
    """What the rows of a run are: full slots, and the window slots that they had at first."""

    full: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    window: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    states: dict[int, Any] = field(default_factory=dict)

    def of(self, parts: Sequence[Part]) -> Iterator[int | None]:
        """The slots of some parts, one by one; None for what was not made."""
        for part in parts:
            if part.row is None:
                yield from range(part.first, part.last)
                continue
            row = (self.window if part.window else self.full).get(part.row, [])
            for place in range(part.first, part.last):
                yield row[place] if place < len(row) else None


def perform(step: Step, allocator: Any, known: Slots) -> bool:
    """Make one call by names; whether anything of it was left. What it raises comes through."""
    holder = {
        "pair": allocator,
        "full": allocator.full_attn_allocator,
        "window": allocator.swa_attn_allocator,
    }[step.on]
    with acting_for(step.request):
        if step.do in ALLOCATIONS:
            return _allocate(step, holder, allocator, known)
        if step.do in GROUP:
            if in_free_group(allocator) != (step.do == GROUP[1]):
                return False
            getattr(allocator, step.do)()
        elif step.do == WRITE or step.targets:
            return _map(step, allocator, known)
        elif step.slots:
            values = [slot for slot in known.of(step.slots) if slot is not None]
            if not values:
                return False
            if step.do == BY_PAGES:
                values = [slot // allocator.page_size for slot in values]
            getattr(holder, step.do)(tensor_of(*values), **dict(step.named))
        elif step.refers is not None:
            if step.refers not in known.states:
                return False
            holder.restore_state(known.states[step.refers])
        elif step.sizes is not None:
            holder.resize(SimpleNamespace(**dict(zip(SIZES, step.sizes, strict=True))))
        else:
            known.states[step.key] = getattr(holder, step.do)()
    return True


def live_rows(step: Step, known: Slots) -> list[tuple[Row, int]]:
    """The rows of an allocation that go on after what was made, and the slot each goes on after."""
    rows = []
    for row in step.rows:
        after: int | None = -1
        if row.after is not None:
            after = next(known.of([row.after]), None)
        if after is not None:
            rows.append((row, after))
    return rows


def _allocate(step: Step, holder: Any, allocator: Any, known: Slots) -> bool:
    rows = live_rows(step, known)
    if not rows:
        return False
    count = sum(row.new for row, _ in rows)
    lengths = tensor_of(*(row.length for row, _ in rows))
    last = tensor_of(*(after for _, after in rows))
    if step.do == "alloc":
        result = holder.alloc(count)
    elif step.do == "alloc_decode":
        result = holder.alloc_decode(lengths, lengths, last)
    else:
        before = tensor_of(*(row.prefix for row, _ in rows))
        tail = () if step.tail is None else (step.tail,)
        result = getattr(holder, step.do)(before, before, lengths, lengths, last, count, *tail)
    if result is None:
        return False
    place = 0
    for row, _ in rows:
        given = result[place : place + row.new]
        place += row.new
        name = (step.key, row.number)
        if step.on == "window":
            known.window[name] = given.tolist()
            continue
        known.full[name] = given.tolist()
        if step.on == "pair":
            known.window[name] = window_of(allocator, given)
    return True


def _map(step: Step, allocator: Any, known: Slots) -> bool:
    pairs = zip(known.of(step.slots), known.of(step.targets), strict=False)
    kept = [(slot, target) for slot, target in pairs if slot is not None and target is not None]
    if not kept:
        return False
    rows, targets = (tensor_of(*values) for values in zip(*kept, strict=True))
    if step.do == WRITE:
        allocator.full_to_swa_index_mapping[rows] = targets
    else:
        getattr(allocator, step.do)(rows, targets)
    return True
