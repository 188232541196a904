"""The double free of SGLang PR #25805, step by step on the release's own allocator.

A decode server of a disaggregated deployment with speculative decoding (EAGLE, spec v2) allocates
ahead of what is accepted. When a request ends it frees what was committed, which may end inside a
page, and its spare slots from the next page on. The slots between the two are never named: their
page is freed on both sides, but their entries of the mapping stay. SGLang 0.5.12 hands such a page
to the next prompt without clearing them, and whoever frees that prompt's slots frees a window page
of somebody else.

Source: the fault catalogue, row C1, and experiments with the real callers of 0.5.12, whose calls
``decode_server`` makes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.report import Violation
from hicache_guard.repro import picture, pools
from hicache_guard.repro.audit import audit, fingerprint, free_pages
from hicache_guard.repro.decode_server import DecodeServer, Operation, Request
from hicache_guard.repro.matrix import MODES

#: The only release that the fault can be seen on; later ones clear what B would inherit.
FAULTY = "0.5.12"


# -- the story -------------------------------------------------------------------------------------

PAGE, WINDOW, DRAFTS = 4, 8, 4
FULL_PAGES, WINDOW_PAGES = 22, 12


def cast() -> dict[int, Request]:
    """Who arrives in which turn of the event loop."""
    return {
        1: Request("A", prompt=21, wanted=4, accepts=(3,)),
        4: Request("E", prompt=21, wanted=3, accepts=(2,)),
        7: Request("C", prompt=8, wanted=12, accepts=(3,)),
        8: Request("B", prompt=40, wanted=4, accepts=(3,)),
        11: Request("D", prompt=12, wanted=4, accepts=(3,)),
    }


#: Headings, by the operation that they stand before: (verb, request).
CHAPTERS = {
    ("preallocate", "A"): "1. A ends inside a page",
    ("preallocate", "E"): "2. Other traffic moves the free lists on",
    ("preallocate", "C"): "3. The window page is handed out again, to C",
    ("preallocate", "B"): "4. The full page is handed out again, to B, whose prompt is long",
    ("evict", "B"): "5. B's prompt leaves the window",
    ("preallocate", "D"): "6. The next request",
    ("free committed", "C"): "7. Everything is given back",
}

#: Operations after which the pools are drawn, once each, besides those that bring a new fault.
DRAWN = (("close", "A"), ("grow", "C"), ("preallocate", "B"))


@dataclass
class View:
    """What a picture of the pools needs. Entries are (full slot, window slot)."""

    full_owners: dict[int, list[str]]
    window_owners: dict[int, list[str]]
    free: tuple[list[int], list[int]]
    #: Entries of full pages in the free list, and those below what their request ever mapped.
    left: dict[int, list[tuple[int, int]]]
    #: Window page to the requests that reach it through such entries.
    claims: dict[int, list[str]]


@dataclass
class Step:
    """One operation after it returned: in words, what the audit says, and the pools then."""

    number: int
    key: tuple[str, str]
    caller: str
    words: str
    faults: list[str]
    state: str
    view: View


@dataclass
class Telling:
    """The story in one mode. ``ended`` is completed, asserted or raised."""

    mode: str
    steps: list[Step] = field(default_factory=list)
    reports: list[tuple[int, Violation]] = field(default_factory=list)
    ended: str = "completed"
    end: str = ""
    where: str = ""
    whole: bool = True
    window_pages_free: int = 0

    @property
    def first_fault(self) -> Step | None:
        return next((step for step in self.steps if step.faults), None)


def tell(mode: str) -> Telling:
    """Play the story once, on fresh pools, with the hooks of ``mode``."""
    from hicache_guard.adapters import hooks

    telling = Telling(mode)
    hooks.uninstall()
    if mode != "off":
        hooks.install(
            mode, on_report=lambda report: telling.reports.append((len(telling.steps) + 1, report))
        )
    allocator = pools.build(FULL_PAGES * PAGE, WINDOW_PAGES * PAGE, PAGE, need_sort=True)

    def after(operation: Operation) -> None:
        who = operation.requests[0].name
        # What is only queued is neither held nor free: the audit waits until the group ends.
        waits = server.in_group
        faults = telling.steps[-1].faults if waits else audit(allocator, server.books())
        telling.steps.append(
            Step(
                len(telling.steps) + 1,
                (operation.verb, who),
                operation.caller,
                _words(operation, server),
                faults,
                fingerprint(allocator),
                _view(allocator, server),
            )
        )

    server = DecodeServer(
        allocator,
        window=WINDOW,
        drafts=DRAFTS,
        rows=len(cast()),
        context=80,
        accept=lambda request: request.accepts[0],
        after=after,
    )
    arrivals = cast()
    turn = 0
    try:
        while turn < max(arrivals) or not server.idle:
            turn += 1
            server.iterate([arrivals[turn]] if turn in arrivals else [])
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        telling.ended, telling.end = "asserted", frame.line or "assert"
        telling.where = f"{os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name}"
        telling.window_pages_free = len(free_pages(allocator.swa_attn_allocator))
    except GuardViolation as violation:
        telling.ended, telling.end = "raised", str(violation)
        telling.whole = fingerprint(allocator) == telling.steps[-1].state
    finally:
        hooks.uninstall()
    return telling


def _words(operation: Operation, server: DecodeServer) -> str:
    """One sentence about one operation."""
    first, last = operation.first, operation.last
    one = operation.requests[0]
    if operation.verb == "preallocate":
        got = (
            f"full slots for all of them and window slots for the last {last - first}"
            if first
            else "full and window slots for all of them"
        )
        return f"{one.name} arrives from the prefill server with {last} tokens. It gets {got}."
    if operation.verb == "evict":
        below = (
            f"though it never had any before {one.tail_start}"
            if one.tail_start
            else "as it leaves the window"
        )
        return f"{one.name} frees the window KV of its positions {first} to {last - 1}, {below}."
    if operation.verb == "grow":
        grown = ", ".join(f"{r.name} to {r.allocated}" for r in operation.requests)
        return f"A step of decoding, with slots for drafts that may be rejected: {grown}."
    if operation.verb == "free committed":
        page = "at the end of a page" if last % server.page == 0 else "inside a page"
        return (
            f"{one.name} has all its tokens. It frees its committed positions 0 to {last - 1}, "
            f"which end {page} (queued: a free group is open)."
        )
    if operation.verb == "free spare":
        gap = ""
        if one.committed < first:
            gap = f" Positions {one.committed} to {first - 1} are named by neither free."
        return f"{one.name} frees its spare positions {first} to {last - 1} (queued).{gap}"
    names = " and ".join(r.name for r in operation.requests)
    return f"The group ends, and what {names} freed reaches the free lists."


def _view(allocator: Any, server: DecodeServer) -> View:
    mapping, page = allocator.full_to_swa_index_mapping, server.page
    free_full = free_pages(allocator.full_attn_allocator)
    full: dict[int, list[str]] = {}
    window: dict[int, list[str]] = {}
    left: dict[int, list[tuple[int, int]]] = {}
    claims: dict[int, list[str]] = {}

    def note(where: dict[int, list[str]], number: int, name: str) -> None:
        names = where.setdefault(number, [])
        if name not in names:
            names.append(name)

    for request in server.holding:
        held = server.held(request).tolist()
        begin = max(request.tail_start, request.evicted) - request.freed_to
        for position, slot in enumerate(held):
            note(full, slot // page, request.name)
            entry = int(mapping[slot])
            if not entry:
                continue
            if position >= begin:
                note(window, entry // page, request.name)
            else:
                left.setdefault(slot // page, []).append((slot, entry))
                note(claims, entry // page, request.name)
    for number in sorted(set(free_full)):
        rows = range(number * page, (number + 1) * page)
        found = [(row, int(mapping[row])) for row in rows if int(mapping[row]) > 0]
        if found and number:
            left[number] = found
    return View(full, window, (free_full, free_pages(allocator.swa_attn_allocator)), left, claims)


# -- showing it ------------------------------------------------------------------------------------

LEGEND = (
    "A to E: owner of the page    .: free    ~: old entries left behind\n"
    "C+B: two requests reach it    C/.: in use and in the free list    ..: twice in the free list"
)


def draw(view: View) -> Text:
    """Both pools, and captions about what is out of order."""
    window = []
    for number in range(1, WINDOW_PAGES + 1):
        owners = view.window_owners.get(number, [])
        claims = [name for name in view.claims.get(number, []) if name not in owners]
        window.append(_cell(number, owners + claims, view.free[1].count(number)))
    full = []
    for number in range(1, FULL_PAGES + 1):
        owners = view.full_owners.get(number, [])
        full.append(_cell(number, owners, view.free[0].count(number), left=number in view.left))
    strips = (picture.strip("window page", window), picture.strip("full page", full, 11))
    return picture.framed(strips, _captions(view))


def _cell(number: int, owners: list[str], times_free: int, *, left: bool = False) -> picture.Cell:
    text = "+".join(owners) + ("/" if owners and times_free else "") + "." * times_free
    wrong = len(owners) > 1 or times_free > 1 or bool(owners and times_free)
    style = picture.BAD if wrong else picture.GOOD if owners else picture.DIM
    if left:
        text, style = text + "~", picture.ODD
    return picture.Cell(number, text or "?", style, wrong)


def _captions(view: View) -> Iterator[tuple[str, str]]:
    for number, entries in sorted(view.left.items()):
        owner = view.full_owners.get(number)
        holder = f"of {owner[0]}" if owner else "free"
        pairs = ", ".join(f"{slot}->{entry}" for slot, entry in entries)
        page = entries[0][1] // PAGE
        yield f"~ full page {number} ({holder}) still maps {pairs}: window page {page}", picture.ODD
    for number in range(1, WINDOW_PAGES + 1):
        owners = view.window_owners.get(number, [])
        claims = [name for name in view.claims.get(number, []) if name not in owners]
        which = f"^ window page {number}"
        if claims and owners:
            yield (
                f"{which}: {owners[0]} decodes into it, {claims[0]} reaches it through old entries",
                picture.BAD,
            )
        if len(owners) > 1:
            yield (
                f"{which}: TWO OWNERS, {' and '.join(owners)} both write their KV to it",
                picture.BAD,
            )
        if owners and view.free[1].count(number):
            yield (
                f"{which}: {' and '.join(owners)} uses it, and it is in the free list",
                picture.BAD,
            )


def show_story(out: Console, telling: Telling, release: str) -> None:
    """The whole timeline, with pictures; for the mode off."""
    before: list[str] = []
    due = set(DRAWN)
    for step in telling.steps:
        if step.key in CHAPTERS:
            out.print(picture.chapter(CHAPTERS[step.key]))
        line = Text(step.words)
        line.append(f" [{step.caller}]", picture.DIM)
        out.print(picture.hanging(out, f"{step.number:>3}", line))
        new = [fault for fault in step.faults if fault not in before]
        before = step.faults
        for fault in new:
            out.print(Text(f"     audit: {fault}", picture.BAD))
        if new or step.key in due:
            due.discard(step.key)
            out.print(draw(step.view))
    if telling.ended == "asserted":
        _show_crash(out, telling)
    else:
        text = f"Nothing was out of order: SGLang {release} clears what B would have inherited."
        out.print(Text(f"     {text}", picture.GOOD))


def _show_crash(out: Console, telling: Telling) -> None:
    number = len(telling.steps) + 1
    silent = number - telling.first_fault.number if telling.first_fault else 0
    out.print(f"{number:>3}  The group ends, and SGLang dies ({telling.where}):")
    out.print(Text(f"     {telling.end}", picture.BAD))
    out.print(
        picture.hanging(
            out,
            "",
            Text(
                f"{silent} operations after the first fault. The assertion counts: the window "
                f"free list holds {telling.window_pages_free} pages of {WINDOW_PAGES}. It cannot "
                "tell which page is there twice, who freed it wrongly, or whose KV was "
                "overwritten meanwhile."
            ),
        )
    )


def show_guarded(out: Console, telling: Telling, off: Telling) -> None:
    """What one mode of the guard makes of the same operations."""
    total = len(telling.steps)
    first = telling.reports[0] if telling.reports else None
    out.print(picture.chapter(f"The same under {telling.mode}"))
    if telling.mode == "observe":
        same = _states(telling) == _states(off) and telling.ended == off.ended
        end = ", and it dies of the same assertion" if telling.ended == "asserted" else ""
        out.print(
            f"The pools are {'' if same else 'NOT '}bit for bit those of the unguarded release "
            f"after each of {total} operations{end}."
        )
    elif telling.mode == "enforce":
        faulty = sum(1 for step in telling.steps if step.faults)
        end = "and it completes" if telling.ended == "completed" else f"but it {telling.ended}"
        out.print(f"The audit finds a fault after {faulty} of {total} operations, {end}.")
    elif telling.ended == "raised":
        out.print(
            f"Operation {total + 1} raises GuardViolation instead of handing out the page; the "
            f"pools are {'' if telling.whole else 'NOT '}as they were before it."
        )
    else:
        out.print(f"{total} operations, and nothing to raise.")
    if first is None:
        out.print("Nothing is reported.")
        return
    count = len(telling.reports)
    rest = f", the first of {count}" if count > 1 else ""
    out.print(f"The report at operation {first[0]}{rest}:")
    out.print(picture.report(out, str(first[1])))
    if telling.mode == "enforce":
        step = telling.steps[first[0] - 1]
        out.print("The pools after that operation; no old entry is left, B reaches nobody's page:")
        out.print(draw(step.view))


def _states(telling: Telling) -> list[str]:
    return [step.state for step in telling.steps]


def problems(telling: Telling, off: Telling, release: str) -> list[str]:
    """Why a mode did not do what it must; empty where it did."""
    wrong = []
    mode, count = telling.mode, len(telling.reports)
    fault = telling.first_fault
    if release != FAULTY:
        if telling.ended != "completed" or fault:
            wrong.append(f"not clean: {telling.ended}, {fault.faults if fault else 'no fault'}")
        if count:
            wrong.append(f"false alarm: {telling.reports[0][1].fault.value}")
    elif mode in ("off", "observe"):
        if telling.ended != "asserted":
            wrong.append(f"no assertion: {telling.ended}")
        if not any("two owners" in text for step in telling.steps for text in step.faults):
            wrong.append("no double ownership before the end")
        if mode == "observe" and not count:
            wrong.append("nothing reported")
    elif mode == "enforce":
        if telling.ended != "completed" or fault:
            wrong.append(f"not contained: {telling.ended}, {fault.faults if fault else 'no fault'}")
        if not count:
            wrong.append("nothing reported")
    else:
        if telling.ended != "raised":
            wrong.append(f"did not raise: {telling.ended}")
        elif "alloc_extend_swa_tail" not in telling.reports[0][1].operation:
            wrong.append(f"raised elsewhere: {telling.reports[0][1].operation}")
        if not telling.whole or fault:
            wrong.append("state changed")
    if mode == "observe" and (_states(telling) != _states(off) or telling.ended != off.ended):
        wrong.append("behaviour differs from the unguarded release")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Tell the story in each mode. Returns 0 if every mode did as it must, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)

    from hicache_guard.adapters.hooks import running_version

    pools.quiet()
    torch.set_num_threads(1)
    logging.getLogger("hicache_guard").addHandler(logging.NullHandler())  # reports are shown here
    release = running_version()
    off = tell("off")
    told = [off if mode == "off" else tell(mode) for mode in options.modes]
    wrong = {telling.mode: problems(telling, off, release) for telling in told}
    if options.json:
        print(json.dumps(_as_json(told, wrong, release)))
    else:
        _show(picture.console(), told, off, wrong, release)
    return 1 if any(wrong.values()) else 0


def _show(
    out: Console, told: list[Telling], off: Telling, wrong: dict[str, list[str]], release: str
) -> None:
    out.print(Text(f"PR #25805 on SGLang {release}\n", picture.HEAD))
    out.print(
        f"A decode server: pages of {PAGE} slots, {FULL_PAGES} full pages, {WINDOW_PAGES} window "
        f"pages, a window of {WINDOW} tokens, {DRAFTS} draft tokens a step. Each operation names "
        "its caller in 0.5.12 (file:function under sglang/srt).\n"
    )
    out.print(Text(LEGEND, picture.DIM))
    for telling in told:
        if telling.mode == "off":
            show_story(out, telling, release)
        else:
            show_guarded(out, telling, off)
    rows = []
    for telling in told:
        fault = telling.first_fault
        rows.append(
            (
                (
                    telling.mode,
                    f"after operation {fault.number}" if fault else "none",
                    str(len(telling.reports)),
                    _ending(telling),
                ),
                not wrong[telling.mode],
            )
        )
    columns = ("mode", "first audit fault", "violations counted", "ended")
    out.print()
    out.print(picture.verdicts(f"SGLang {release}", columns, rows))
    for mode, reasons in wrong.items():
        for reason in reasons:
            out.print(Text(f"{mode}: {reason}", picture.BAD))


def _ending(telling: Telling) -> str:
    if telling.ended == "completed":
        return f"completed {len(telling.steps)} operations"
    word = "crashed" if telling.ended == "asserted" else telling.ended
    return f"{word} in operation {len(telling.steps) + 1}"


def _as_json(told: list[Telling], wrong: dict[str, list[str]], release: str) -> dict[str, Any]:
    modes = {}
    for telling in told:
        fault = telling.first_fault
        modes[telling.mode] = {
            "operations": len(telling.steps),
            "first_fault_after": fault.number if fault else None,
            "faults": sorted({text for step in telling.steps for text in step.faults}),
            "violations": len(telling.reports),
            "kinds": sorted({report.fault.value for _, report in telling.reports}),
            "ended": telling.ended,
            "end": telling.end,
            "state_unchanged": telling.whole,
            "wrong": wrong[telling.mode],
        }
    return {"report": 25805, "release": release, "modes": modes, "right": not any(wrong.values())}


if __name__ == "__main__":
    sys.exit(main())
