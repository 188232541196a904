"""A plan as a program of its own, on the real allocator: what a violation comes down to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from hicache_guard.core.faults import FACTS, Fault
from hicache_guard.core.record import Record
from hicache_guard.replay.names import ALLOCATIONS, BY_PAGES, GROUP, WRITE, Part, Plan, Row, Step

#: Methods after which nobody owns the full side of what they are told.
GIVES_UP = ("free", "free_segment", "free_full", "free_full_segment", BY_PAGES)

_PROGRAM = '''\
"""{title}

Shrunk by `hicache-guard replay --shrink` from {of} operations of a record of SGLang {release}. Run
it with that release: PYTHONPATH=<its checkout> TRITON_INTERPRET=1 python {name} [MODE], where MODE
is off, observe (the default), enforce or strict. It prints what the guard reports, and what an
audit that shares no code with the guard finds. Exit status 1 where there is any of that.
"""

import logging
import sys

import torch

import hicache_guard
from hicache_guard import acting_for
from hicache_guard.core.errors import GuardViolation
from hicache_guard.repro import pools
from hicache_guard.repro.audit import audit
from hicache_guard.repro.pools import slots

PAGE = {page}


def play(pool, books):
    """The operations. `books`: who believes to own which full slots."""

    def own(name, given):
        books[name] = torch.cat((books.get(name, slots()), given))

    def give_up(given):
        for name, held in books.items():
            books[name] = held[~torch.isin(held // PAGE, given // PAGE)]

{body}

def main():
    mode = sys.argv[1] if len(sys.argv) > 1 else "observe"
    pools.quiet()
    logging.getLogger("hicache_guard").addHandler(logging.NullHandler())  # reports are printed here
    reports, books, faults = [], {{}}, []
    if mode != "off":
        hicache_guard.install(mode, on_report=reports.append)
    pool = pools.build({full}, {window}, PAGE, need_sort={sort})
    try:
        play(pool, books)
        pools.settle(pool)
        faults = [f"audit: {{fault}}" for fault in audit(pool, books)]
    except (AssertionError, GuardViolation) as error:
        faults = [f"ended by {{type(error).__name__}}"]
    for line in [*reports, *faults]:
        print(line)
    return int(bool(reports or faults))


if __name__ == "__main__":
    sys.exit(main())
'''


def program(plan: Plan, record: Record, name: str) -> str:
    """The text of a Python program that performs ``plan`` and says what comes of it."""
    try:
        says = f"{plan.target}: {FACTS[Fault(plan.target)].says}."
    except ValueError:
        says = f"{plan.target}."
    names = _Names(plan)
    body = "\n".join(f"    {line}" if line else "" for line in names.lines())
    return _PROGRAM.format(
        title=says[0].upper() + says[1:],
        of=plan.recorded,
        release=record.release,
        name=name or "PROGRAM",
        page=plan.page,
        body=body,
        full=plan.full,
        window=plan.window,
        sort=plan.sort,
    )


class _Names:
    """Writes the lines of a plan; its rows become variables."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        rows = [(step, row) for step in plan.steps if step.do in ALLOCATIONS for row in step.rows]
        self._variables = {(s.key, r.number): f"row{i}" for i, (s, r) in enumerate(rows, 1)}
        self._windows = {
            part.row
            for step in plan.steps
            for part in (*step.slots, *step.targets, *(r.after for r in step.rows if r.after))
            if part.window
        }
        self._owners: dict[tuple[int, int], str] = {}
        for step, row in rows:
            begun = row.after and row.after.row
            variable = self._variables[step.key, row.number]
            mine = step.request if step.request and len(step.rows) == 1 else None
            name = f"{mine or 'request'} ({variable})"
            self._owners[step.key, row.number] = self._owners.get(begun, name) if begun else name

    def lines(self) -> Iterator[str]:
        for number, step in enumerate(self._plan.steps, 1):
            yield f"# {number}. {step.at}" if step.at else f"# {number}."
            yield f"with acting_for({_quoted(step.request)}):"
            for line in self._call(step):
                yield f"    {line}"
            yield from self._after(step)
            yield ""

    def _call(self, step: Step) -> Iterator[str]:
        holder = {"pair": "pool", "full": "pool.full_attn_allocator"}.get(
            step.on, "pool.swa_attn_allocator"
        )
        if step.do in ALLOCATIONS:
            alone = len(step.rows) == 1
            variable = self._variables[step.key, step.rows[0].number] if alone else "got"
            yield f"{variable} = {holder}.{step.do}({', '.join(self._given(step))})"
        elif step.do in GROUP:
            yield f"pool.{step.do}()"
        elif step.do == WRITE:
            into = self._text(step.slots)
            yield f"pool.full_to_swa_index_mapping[{into}] = {self._text(step.targets)}"
        elif step.targets:
            yield f"pool.{step.do}({self._text(step.slots)}, {self._text(step.targets)})"
        elif step.slots:
            given = self._text(step.slots)
            if step.do == BY_PAGES:
                given += " // PAGE"
            more = "".join(f", {name}={value!r}" for name, value in step.named)
            yield f"{holder}.{step.do}({given}{more})"
        elif step.refers is not None:
            yield f"{holder}.{step.do}(state{step.refers})"
        elif step.sizes is not None:
            full, window = step.sizes
            yield "from types import SimpleNamespace"
            yield (
                f"pool.resize(SimpleNamespace(full_max_total_num_tokens={full}, "
                f"swa_max_total_num_tokens={window}))"
            )
        else:
            yield f"state{step.key} = {holder}.{step.do}()"

    def _given(self, step: Step) -> list[str]:
        """The arguments of an allocation."""
        if step.do == "alloc":
            return [str(sum(row.new for row in step.rows))]
        lengths = _slots(row.length for row in step.rows)
        last = self._last(step.rows)
        if step.do == "alloc_decode":
            return [lengths, lengths, last]
        before = _slots(row.prefix for row in step.rows)
        count = str(sum(row.new for row in step.rows))
        tail = [] if step.tail is None else [str(step.tail)]
        return [before, before, lengths, lengths, last, count, *tail]

    def _last(self, rows: Sequence[Row]) -> str:
        if all(row.after is None for row in rows):
            return _slots(-1 for _ in rows)
        return self._text([row.after or Part(None, -1, 0) for row in rows])

    def _after(self, step: Step) -> Iterator[str]:
        if step.do in ALLOCATIONS:
            place = 0
            for row in step.rows:
                key = (step.key, row.number)
                variable = self._variables[key]
                if len(step.rows) > 1:
                    yield f"{variable} = got[{place}:{place + row.new}]"
                place += row.new
                if key in self._windows:
                    entries = (
                        variable
                        if step.on == "window"
                        else (f"pool.full_to_swa_index_mapping[{variable}]")
                    )
                    yield f"window_of_{variable} = {entries}"
                if step.on != "window":
                    yield f"own({_quoted(self._owners[key])}, {variable})"
        elif step.slots and step.on != "window" and step.do in GIVES_UP:
            yield f"give_up({self._text(step.slots)})"

    def _text(self, parts: Sequence[Part]) -> str:
        """Some slots, as an expression."""
        texts = [self._part(part) for part in parts]
        return texts[0] if len(texts) == 1 else f"torch.cat(({', '.join(texts)}))"

    def _part(self, part: Part) -> str:
        if part.row is None:
            return _slots(range(part.first, part.last))
        variable = self._variables[part.row]
        if part.window:
            variable = f"window_of_{variable}"
        return f"{variable}[{part.first}:{part.last}]"


def _slots(values: Iterable[int]) -> str:
    return f"slots({', '.join(map(str, values))})"


def _quoted(text: str | None) -> str:
    return "None" if text is None else json.dumps(text)
