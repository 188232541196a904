"""The fewest steps that still come to the same violation, by delta debugging.

Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002), over steps by name
(see ``names``). Smaller pools come first: what does not fit falls away, and pages that must be
handed out again are so sooner. Then steps, the requests of a batch, the parts that a call names,
tokens; and all of it again until nothing is left to take away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from hicache_guard.adapters.recording import place_of
from hicache_guard.replay.names import ALLOCATIONS, Part, Plan, Slots, Step, perform, raised_words
from hicache_guard.replay.stage import Stage

#: Seconds that all tries together may take.
BUDGET = 90.0


class _SpentError(Exception):
    """No more tries."""


def shrink(plan: Plan, stage: Stage, *, seconds: float = BUDGET) -> Plan | None:
    """``plan``, as small as the time allows; None where even the whole plan does not show it."""
    tries = _Tries(stage, time.monotonic() + seconds)
    found = tries.run(plan)
    if not plan.target or found is None:
        return None
    plan = found
    try:
        while True:
            before = plan
            for smaller in (_pools, _later, _steps, _together, _rows, _parts, _tails, _tokens):
                for candidate in smaller(plan, tries.run):
                    plan = candidate
            if plan == before:
                return plan
    except _SpentError:
        return tries.best or plan


Run = Callable[[Plan], Plan | None]


class _Tries:
    """Plays plans, until the time is over."""

    def __init__(self, stage: Stage, until: float) -> None:
        self._stage = stage
        self._until = until
        self.best: Plan | None = None

    def run(self, plan: Plan) -> Plan | None:
        """The plan without what was skipped or came after; None where it shows something else."""
        if time.monotonic() > self._until:
            raise _SpentError
        allocator = self._stage.build(plan.full, plan.window, plan.page, sort=plan.sort)
        known = Slots()
        made: list[Step] = []
        for step in plan.steps:
            raised = None
            try:
                done = perform(step, allocator, known)
            except Exception as error:
                done, raised = True, raised_words(place_of(error))
            heard = self._stage.heard
            if done or heard:
                made.append(step)
            if heard or raised is not None:
                shown = heard[0].fault.value if heard else raised
                if shown != plan.target:
                    return None
                self.best = plan.with_steps(made)
                return self.best
        return None


def _pools(plan: Plan, run: Run) -> Iterator[Plan]:
    for side in ("full", "window"):
        size = getattr(plan, side) // plan.page
        cut = size // 2
        while cut:
            size = getattr(plan, side) // plan.page
            if size - cut >= 1:
                smaller = run(replace(plan, **{side: (size - cut) * plan.page}))
                if smaller is not None:
                    plan = smaller
                    yield plan
                    continue
            cut //= 2


def _later(plan: Plan, run: Run) -> Iterator[Plan]:
    """The last few steps alone are often enough, of a long record."""
    count = 32
    while count < len(plan.steps):
        before = [step for step in plan.steps[:-count] if step.key < 0]
        smaller = run(plan.with_steps([*before, *plan.steps[-count:]]))
        if smaller is not None:
            yield smaller
            return
        count *= 2


def _steps(plan: Plan, run: Run) -> Iterator[Plan]:
    parts = 2
    while len(plan.steps) > 1 and parts <= 2 * len(plan.steps):
        size = max(1, len(plan.steps) // parts)
        for start in range(0, len(plan.steps), size):
            kept = plan.steps[:start] + plan.steps[start + size :]
            smaller = run(plan.with_steps(kept))
            if smaller is not None:
                plan, parts = smaller, max(2, parts - 1)
                yield plan
                break
        else:
            if size == 1:
                return
            parts *= 2


def _with(plan: Plan, step: Step) -> Plan:
    """The plan with another step of the same key."""
    return plan.with_steps([step if each.key == step.key else each for each in plan.steps])


def _rows(plan: Plan, run: Run) -> Iterator[Plan]:
    """Leave requests out of batches."""
    for key in [step.key for step in plan.steps if len(step.rows) > 1]:
        for number in [row.number for step in plan.steps if step.key == key for row in step.rows]:
            step = _step(plan, key)
            rows = () if step is None else tuple(r for r in step.rows if r.number != number)
            if step is None or not rows:
                break
            smaller = run(_with(plan, replace(step, rows=rows)))
            if smaller is not None:
                plan = smaller
                yield plan


def _parts(plan: Plan, run: Run) -> Iterator[Plan]:
    """Leave parts out of what calls name."""
    for key in [s.key for s in plan.steps if len(s.slots) > 1 and not s.targets]:
        for part in [part for step in plan.steps if step.key == key for part in step.slots]:
            step = _step(plan, key)
            slots = () if step is None else tuple(each for each in step.slots if each != part)
            if step is None or not slots:
                break
            smaller = run(_with(plan, replace(step, slots=slots)))
            if smaller is not None:
                plan = smaller
                yield plan


def _step(plan: Plan, key: int) -> Step | None:
    return next((step for step in plan.steps if step.key == key), None)


def _tokens(plan: Plan, run: Run) -> Iterator[Plan]:
    """Take tokens out of what requests get, whole pages first."""
    names = [(s.key, row.number) for s in plan.steps if s.do in ALLOCATIONS for row in s.rows]
    for name in names:
        most = _new(plan, name) // plan.page
        sizes = [plan.page << n for n in reversed(range(most.bit_length()))]
        for size in [*sizes, max(1, plan.page // 4), 1]:
            start, step = 0, size if size >= plan.page else _new(plan, name)
            while size < _new(plan, name) and start + size <= _new(plan, name):
                smaller = run(without(plan, name, start, size))
                if smaller is not None:
                    plan = smaller
                    yield plan
                else:
                    start += step  # of less than a page only the first are tried, and the last
            while size < plan.page and size < (count := _new(plan, name)):
                smaller = run(without(plan, name, count - size, size))
                if smaller is None:
                    break
                plan = smaller
                yield plan


def _together(plan: Plan, run: Run) -> Iterator[Plan]:
    """Take pages out of a request and out of the pools at once: the rest is handed out as before.

    What only uses pages up, until others are handed out again, falls away with them.
    """
    names = [(s.key, row.number) for s in plan.steps if s.do in ALLOCATIONS for row in s.rows]
    for name in names:
        most = -(-_new(plan, name) // plan.page)
        for pages in range(most, 0, -1):
            smaller = _try_together(plan, run, name, pages)
            if smaller is not None:
                plan = smaller
                yield plan
                break


def _try_together(plan: Plan, run: Run, name: tuple[int, int], pages: int) -> Plan | None:
    size = pages * plan.page
    if size < _new(plan, name):
        fewer = without(plan, name, 0, size)
    else:
        fewer = plan.with_steps([step for step in plan.steps if step.key != name[0]])
    step = _step(plan, name[0])
    mapped = pages if step is None or step.tail is None else -(-step.tail // plan.page)
    for window in sorted({0, mapped, pages}, reverse=True):
        if plan.full > size and plan.window > window * plan.page:
            candidate = replace(
                fewer, full=plan.full - size, window=plan.window - window * plan.page
            )
            smaller = run(candidate)
            if smaller is not None:
                return smaller
    return None


def _tails(plan: Plan, run: Run) -> Iterator[Plan]:
    """Shorter window tails of decode-side preallocations."""
    for key in [step.key for step in plan.steps if step.tail]:
        for cut in (plan.page, plan.page // 2, 1):
            while (step := _step(plan, key)) and step.tail and step.tail > cut > 0:
                smaller = run(_with(plan, replace(step, tail=step.tail - cut)))
                if smaller is None:
                    break
                plan = smaller
                yield plan


def _new(plan: Plan, name: tuple[int, int]) -> int:
    """Tokens that a row gets; 0 where it is gone."""
    return next(
        (
            row.new
            for s in plan.steps
            if s.key == name[0]
            for row in s.rows
            if row.number == name[1]
        ),
        0,
    )


def without(plan: Plan, name: tuple[int, int], start: int, count: int) -> Plan:
    """The plan with ``count`` tokens from ``start`` taken out of a row, and of what goes on after.

    A row keeps at least one token. Parts that name it mean the same tokens as before.
    """
    shorter = {name}
    steps: list[Step] = []
    for step in plan.steps:
        rows = []
        tail = step.tail
        for row in step.rows:
            own = (step.key, row.number)
            if own == name:
                if tail is not None:
                    tail -= max(0, start + count - max(start, row.new - tail))
                row = replace(row, length=row.length - count)
            elif row.after is not None and row.after.row in shorter:
                shorter.add(own)
                after = _cut(row.after, name, start, count)
                if not len(after):  # it went on after what is gone: now after what was before
                    place = max(0, start - 1)
                    after = replace(row.after, first=place, last=place + 1)
                row = replace(
                    row, prefix=row.prefix - count, length=row.length - count, after=after
                )
            rows.append(row)
        slots = tuple(p for p in (_cut(p, name, start, count) for p in step.slots) if len(p))
        changed = replace(step, rows=tuple(rows), tail=tail)
        if not step.targets:  # those are one for one
            changed = replace(changed, slots=slots)
        steps.append(changed)
    return plan.with_steps(steps)


def _cut(part: Part, name: tuple[int, int], start: int, count: int) -> Part:
    if part.row != name:
        return part

    def moved(place: int) -> int:
        return place if place <= start else max(start, place - count)

    return replace(part, first=moved(part.first), last=moved(part.last))
