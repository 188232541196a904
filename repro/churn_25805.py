"""The double free of SGLang PR #25805 under traffic: thousands of requests, audited throughout.

The decode server of ``repro_25805`` serves random requests from a seed, several at a time, on the
allocator of the release on the path: drafts are accepted or not, clients go away, transfers fail,
and requests are retracted when the pools are short. After every operation an audit that shares
nothing with the guard looks at all pages. Each mode runs in a fork of its own, on equal requests.

Source: the fault catalogue, row C1, and the known distance from the first silent fault to the
assertion under such traffic (tens to thousands of requests).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.text import Text

from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.report import Violation
from hicache_guard.repro import picture, pools
from hicache_guard.repro.audit import audit, fingerprint
from hicache_guard.repro.decode_server import DecodeServer, Operation, Request
from hicache_guard.repro.matrix import MODES
from hicache_guard.repro.repro_25805 import FAULTY

#: Slots or page ids: int64, or int32 where they come out of a request's row.
Slots = npt.NDArray[np.integer[Any]]

DRAFTS = 4
#: Requests on the server at the same time.
TOGETHER = 8
#: One request in so many loses its client while it decodes, or its KV on the way to this server.
ABORTED, LOST = 16, 32


@dataclass(frozen=True)
class Scale:
    """Pools and prompts for one page size: small, so that pages are soon handed out again."""

    full_slots: int
    window_slots: int
    window: int
    prompt: tuple[int, int]
    output: tuple[int, int]


SCALES = {
    16: Scale(1280, 640, window=32, prompt=(16, 240), output=(4, 48)),
    64: Scale(4480, 2048, window=64, prompt=(64, 900), output=(4, 90)),
}


def compute_slots_without_triton() -> None:
    """Have the page allocator compute new slots in torch instead of in Triton's interpreter.

    Replaced: the launch of ``alloc_extend_kernel`` in the module of the page allocator, by the
    torch function of the same release that does the same, ``alloc_extend_naive``. Why: interpreted
    on a CPU the kernel takes some ten milliseconds a call, and there are tens of thousands of
    calls; a test compares the two. The kernel for single-token decoding stays: speculative decoding
    does not use it.
    """
    module: Any = _home_of_page_allocator()

    class Launcher:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return _launch

    def _launch(
        prefix: torch.Tensor,
        lengths: torch.Tensor,
        last: torch.Tensor,
        free: torch.Tensor,
        out: torch.Tensor,
        _batch: int,
        page_size: int,
    ) -> None:
        module.alloc_extend_naive(prefix, lengths, last, free, out, page_size, str(out.device))

    module.alloc_extend_kernel = Launcher()


def _home_of_page_allocator() -> Any:
    """The module that defines the page allocator of the release on the path."""
    allocator_class, _ = pools.allocator_classes()
    for name in (
        "sglang.srt.mem_cache.allocator.paged",
        "sglang.srt.mem_cache.allocator",
        allocator_class.__module__,
    ):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "alloc_extend_naive"):
            return module
    raise RuntimeError("this release has no page allocator that is known here")


def import_release() -> None:
    """Import everything that a run needs, once, before the runs are forked."""
    from hicache_guard.adapters.hooks import running_release

    pools.allocator_classes()
    for module in running_release().modules:
        importlib.import_module(module)


class WholePoolAudit:
    """Answers "does every page have exactly one place?" for all pages at once, in numpy.

    It agrees with ``audit.audit``, which says what is wrong and takes a hundred times as long.
    """

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._page = int(allocator.page_size)
        self._sides = (allocator.full_attn_allocator, allocator.swa_attn_allocator)

    def clean(self, held: Sequence[Slots]) -> bool:
        """Whether the pools are in order; ``held`` has the full slots of each request."""
        mapping = self._allocator.full_to_swa_index_mapping.numpy()
        if mapping[-1] != -1:
            return False
        full, window = (self._free(pool) for pool in self._sides)
        if held:
            slots = np.concatenate(held)
            holder = np.repeat(np.arange(len(held)), [len(part) for part in held])
            entries = mapping[slots]
            mapped = entries > 0
            full += self._holders(slots, holder, len(held), len(full))
            window += self._holders(entries[mapped], holder[mapped], len(held), len(window))
        # A page that is free once or held by one request has one place; the padding page, which is
        # the first, and what lies beyond the pool, which is last, have none.
        return all(
            bool((places[1:-1] == 1).all()) and places[0] == 0 and places[-1] == 0
            for places in (full, window)
        )

    def _holders(self, slots: Slots, holder: Slots, holders: int, pages: int) -> Slots:
        """How many different holders each page has."""
        seen = np.zeros(holders * pages, dtype=np.bool_)
        seen[holder * pages + slots // self._page] = True
        count: Slots = seen.reshape(holders, pages).sum(axis=0)
        return count

    def _free(self, pool: Any) -> Slots:
        """How often each page is in the free list; the last element counts pages out of range."""
        parts = [pool.free_pages]
        if getattr(pool, "release_pages", None) is not None:
            parts.append(pool.release_pages)
        parts += getattr(pool, "staged_pages", [])
        pages = np.concatenate([part.numpy() for part in parts])
        last = int(pool.size) // self._page + 1
        pages = np.where((pages < 0) | (pages > last), last, pages)
        return np.bincount(pages, minlength=last + 1)


def traffic(seed: int, count: int, scale: Scale) -> Iterator[tuple[Request, int | None, bool]]:
    """Requests, each with the step at which its client goes away, and whether its KV is lost."""
    draw = random.Random(seed)
    for number in range(count):
        request = Request(
            f"r{number}",
            prompt=draw.randint(*scale.prompt),
            wanted=draw.randint(*scale.output),
            accepts=tuple(draw.randint(1, DRAFTS) for _ in range(11)),
        )
        aborted = draw.randint(1, 8) if draw.randrange(ABORTED) == 0 else None
        yield request, aborted, draw.randrange(LOST) == 0


@dataclass
class Moment:
    """When something was first seen: after how many finished requests, in which operation."""

    finished: int
    operation: int
    what: str


@dataclass
class Outcome:
    """What one mode did with the traffic. ``ended`` is completed, asserted or raised."""

    mode: str
    finished: int = 0
    operations: int = 0
    retracted: int = 0
    aborted: int = 0
    lost: int = 0
    fault: Moment | None = None
    owners: Moment | None = None
    violations: dict[str, int] = field(default_factory=dict)
    report: str = ""
    ended: str = "completed"
    end: str = ""
    whole: bool = True
    states: str = ""
    seconds: float = 0.0

    @property
    def counted(self) -> int:
        return sum(self.violations.values())


class Churn:
    """One run: the server, its traffic, and the audit after every operation."""

    def __init__(
        self,
        mode: str,
        page: int,
        count: int,
        seed: int,
        *,
        keep_states: bool,
        tell: Callable[[Outcome, float, float], None],
    ) -> None:
        self.outcome = Outcome(mode)
        self._scale = SCALES[page]
        self._traffic = traffic(seed, count, self._scale)
        self._waiting: tuple[Request, int | None, bool] | None = next(self._traffic, None)
        self._leaving: dict[Request, int] = {}
        self._tell = tell
        self._told = 0.0
        self._states = hashlib.sha256() if keep_states else None
        self._last_state = ""
        self.kinds: Counter[str] = Counter()
        self.allocator = pools.build(
            self._scale.full_slots, self._scale.window_slots, page, need_sort=True
        )
        self._audit = WholePoolAudit(self.allocator)
        self.server = DecodeServer(
            self.allocator,
            window=self._scale.window,
            drafts=DRAFTS,
            rows=TOGETHER,
            context=self._scale.prompt[1] + self._scale.output[1] + 8 * DRAFTS + page,
            accept=lambda request: request.accepts[request.launched % len(request.accepts)],
            after=self._after,
        )

    def report(self, violation: Violation) -> None:
        """Take one report of the guard."""
        self.kinds[violation.fault.value] += 1
        self.outcome.report = self.outcome.report or str(violation)

    def run(self) -> Outcome:
        """Serve until all requests are finished, or the release or the guard puts an end to it."""
        began = time.monotonic()
        outcome, server = self.outcome, self.server
        try:
            while self._waiting or not server.idle:
                for request in [r for r in self._leaving if r.launched >= self._leaving[r]]:
                    del self._leaving[request]
                    if not request.ended:
                        request.aborted = True
                        outcome.aborted += 1
                server.iterate(self._admit())
        except AssertionError as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            outcome.ended, outcome.end = "asserted", frame.line or "assert"
        except GuardViolation as violation:
            outcome.ended, outcome.end = "raised", str(violation)
            if self._last_state:
                outcome.whole = fingerprint(self.allocator) == self._last_state
        outcome.finished = server.finished
        outcome.retracted = server.retractions
        outcome.violations = dict(self.kinds)
        outcome.states = self._states.hexdigest() if self._states else ""
        outcome.seconds = time.monotonic() - began
        return outcome

    def _admit(self) -> Iterator[Request]:
        """Requests that are let in now: those that were retracted first, then new ones."""
        server = self.server
        while server.retracted and self._fits(server.retracted[0]):
            yield server.retracted.pop(0)
        while self._waiting and not server.retracted and self._fits(self._waiting[0]):
            request, aborted, lost = self._waiting
            self._waiting = next(self._traffic, None)
            if lost:
                server.preallocate(request)
                server.give_up(request)
                self.outcome.lost += 1
                continue
            if aborted is not None:
                self._leaving[request] = aborted
            yield request

    def _fits(self, request: Request) -> bool:
        """Whether there is room for the prompt and the next step; what others need comes later."""
        server, page = self.server, self.server.page
        if len(server.holding) >= TOGETHER:
            return False
        tokens = request.prompt + request.produced
        spare = 2 * page
        window = min(tokens, self._scale.window + page)
        return bool(
            self.allocator.full_available_size() >= tokens + spare
            and self.allocator.swa_available_size() >= window + spare
        )

    def _after(self, operation: Operation) -> None:
        outcome, server = self.outcome, self.server
        outcome.operations += 1
        outcome.finished = server.finished
        if outcome.owners is None and not server.in_group:
            self._look(operation)
        if self._states is not None:
            self._last_state = fingerprint(self.allocator)
            self._states.update(self._last_state.encode())
        now = time.monotonic()
        if now - self._told > 0.2:
            self._told = now
            full, window = self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator
            self._tell(
                outcome,
                1 - full.available_size() / full.size,
                1 - window.available_size() / window.size,
            )

    def _look(self, operation: Operation) -> None:
        outcome, server = self.outcome, self.server
        if self._audit.clean([server.held(request).numpy() for request in server.holding]):
            return
        here = (outcome.finished, outcome.operations)
        if outcome.fault is None:
            outcome.fault = Moment(*here, "; ".join(audit(self.allocator, server.books())[:3]))
        shared = self._shared_window_page()
        if shared is not None:
            outcome.owners = Moment(*here, shared)

    def _shared_window_page(self) -> str | None:
        """Two requests that both decode into one window page, not merely reach it; or None."""
        mapping = self.allocator.full_to_swa_index_mapping
        owner: dict[int, str] = {}
        for request in self.server.holding:
            begin = max(request.tail_start, request.evicted, request.freed_to)
            row = self.server.table[request.row, begin : request.allocated]
            for page in (mapping[row.long()] // self.server.page).unique().tolist():
                if page and owner.setdefault(page, request.name) != request.name:
                    return f"window page {page} of {owner[page]} and {request.name}"
        return None


# -- one mode, one process -------------------------------------------------------------------------


def run_mode(
    mode: str,
    page: int,
    count: int,
    seed: int,
    release: str,
    tell: Callable[[Outcome, float, float], None],
) -> Outcome:
    """Serve the traffic once in this process with the hooks of ``mode``."""
    from hicache_guard.adapters import hooks

    compute_slots_without_triton()
    reports: list[Callable[[Violation], None]] = []
    if mode != "off":
        hooks.install(mode, on_report=lambda violation: reports[0](violation))
    compared = mode in ("off", "observe") or (mode == "strict" and release == FAULTY)
    churn = Churn(mode, page, count, seed, keep_states=compared, tell=tell)
    reports.append(churn.report)
    try:
        return churn.run()
    finally:
        hooks.uninstall()


def _in_child(
    run: Callable[[Callable[[Outcome, float, float], None]], Outcome],
    advance: Callable[[int, float, float], None],
) -> Outcome:
    """Run in a fork, so that no mode sees another's hooks; ``advance`` hears of progress."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status = 1
        with os.fdopen(writer, "w") as pipe:

            def tell(outcome: Outcome, full: float, window: float) -> None:
                print(json.dumps([outcome.finished, full, window]), file=pipe, flush=True)

            try:
                print(json.dumps(asdict(run(tell))), file=pipe, flush=True)
                status = 0
            except Exception:
                traceback.print_exc()
        os._exit(status)
    os.close(writer)
    last: Any = None
    with os.fdopen(reader) as pipe:
        for line in pipe:
            last = json.loads(line)
            if isinstance(last, list):
                advance(*last)
    _, status = os.waitpid(child, 0)
    if not isinstance(last, dict):
        raise RuntimeError(f"the run ended with status {status} and no result")
    for name in ("fault", "owners"):
        last[name] = last[name] and Moment(**last[name])
    return Outcome(**last)


# -- judging and showing ---------------------------------------------------------------------------


def problems(outcome: Outcome, off: Outcome | None, count: int, release: str) -> list[str]:
    """Why a mode did not do what it must; empty where it did."""
    wrong = []
    mode = outcome.mode
    clean = outcome.ended == "completed" and outcome.fault is None and outcome.finished == count
    if release != FAULTY:
        if not clean:
            wrong.append(f"not clean: {outcome.ended}, {outcome.fault or 'no fault'}")
        if outcome.counted:
            wrong.append(f"false alarm: {outcome.violations}")
    elif mode in ("off", "observe"):
        if outcome.ended != "asserted":
            wrong.append(f"no assertion: {outcome.ended}")
        if outcome.fault is None or outcome.owners is None:
            wrong.append("no silent fault before the end")
        if mode == "observe" and not outcome.counted:
            wrong.append("nothing counted")
    elif mode == "enforce":
        if not clean:
            wrong.append(f"not contained: {outcome.ended}, {outcome.fault or 'no fault'}")
        if not outcome.counted:
            wrong.append("nothing counted")
    else:
        if outcome.ended != "raised":
            wrong.append(f"did not raise: {outcome.ended}")
        if not outcome.whole or outcome.fault is not None:
            wrong.append("state changed")
    if mode == "observe" and off is not None:
        same = (outcome.finished, outcome.operations, outcome.states) == (
            off.finished,
            off.operations,
            off.states,
        )
        if not same:
            wrong.append("behaviour differs from the unguarded release")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the traffic in each mode. Returns 0 if every mode did as it must, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--requests", type=int, default=10_240)
    parser.add_argument("--page", type=int, choices=sorted(SCALES), default=16)
    parser.add_argument("--seed", type=int, default=25805)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)
    count = options.requests

    from hicache_guard.adapters.hooks import running_version

    pools.quiet()
    import_release()
    torch.set_num_threads(1)  # a forked child cannot use threads that its parent started
    logging.getLogger("hicache_guard").addHandler(logging.NullHandler())  # reports are shown here
    release = running_version()
    outcomes = []
    with picture.progress() as bar:
        for mode in options.modes:
            task = bar.add_task(mode, total=count, pools="")

            def advance(finished: int, full: float, window: float, task: Any = task) -> None:
                used = f"full {full:4.0%} window {window:4.0%}"
                bar.update(task, completed=finished, pools=used)
                bar.refresh()

            def run(tell: Callable[[Outcome, float, float], None], mode: str = mode) -> Outcome:
                return run_mode(mode, options.page, count, options.seed, release, tell)

            outcome = _in_child(run, advance)
            bar.update(task, completed=outcome.finished, pools=outcome.ended)
            bar.refresh()
            outcomes.append(outcome)
    off = next((outcome for outcome in outcomes if outcome.mode == "off"), None)
    wrong = {outcome.mode: problems(outcome, off, count, release) for outcome in outcomes}
    if options.json:
        print(
            json.dumps(
                {
                    "report": 25805,
                    "release": release,
                    "requests": count,
                    "page": options.page,
                    "modes": {o.mode: {**asdict(o), "wrong": wrong[o.mode]} for o in outcomes},
                    "right": not any(wrong.values()),
                }
            )
        )
    else:
        _show(picture.console(), outcomes, wrong, release, count, options.page)
    return 1 if any(wrong.values()) else 0


def _show(
    out: Console,
    outcomes: list[Outcome],
    wrong: dict[str, list[str]],
    release: str,
    count: int,
    page: int,
) -> None:
    scale = SCALES[page]
    out.print(Text(f"PR #25805 on SGLang {release}: {count} requests\n", picture.HEAD))
    out.print(
        f"At most {TOGETHER} at a time, pages of {page} slots, {scale.full_slots // page} full and "
        f"{scale.window_slots // page} window pages, a window of {scale.window} tokens, {DRAFTS} "
        "drafts a step. The audit looks at every page after every operation.\n"
    )
    rows = []
    for outcome in outcomes:
        cells = (
            outcome.mode,
            str(outcome.finished),
            _when(outcome.fault),
            _when(outcome.owners),
            str(outcome.counted),
            _ending(outcome),
            f"{outcome.seconds:.0f} s",
        )
        rows.append((cells, not wrong[outcome.mode]))
    columns = ("mode", "finished", "first fault", "two owners", "counted", "ended", "time")
    out.print(picture.verdicts(f"SGLang {release}", columns, rows))
    out.print(Text("first fault, two owners: after how many finished requests\n", picture.DIM))
    for outcome in outcomes:
        _tell_more(out, outcome)
    for mode, reasons in wrong.items():
        for reason in reasons:
            out.print(Text(f"{mode}: {reason}", picture.BAD))


def _when(moment: Moment | None) -> str:
    return "none" if moment is None else str(moment.finished)


def _ending(outcome: Outcome) -> str:
    words = {"asserted": "crashed", "completed": "completed", "raised": "raised"}
    return words[outcome.ended]


def _tell_more(out: Console, outcome: Outcome) -> None:
    lines = [
        f"{outcome.operations} operations; {outcome.aborted} clients went away, {outcome.lost} "
        f"transfers failed, {outcome.retracted} retractions."
    ]
    if outcome.fault is not None:
        lines.append(f"First fault, in operation {outcome.fault.operation}: {outcome.fault.what}")
    if outcome.owners is not None:
        lines.append(
            f"First double ownership, in operation {outcome.owners.operation}: "
            f"{outcome.owners.what} both decode into it"
        )
    if outcome.ended == "asserted":
        lines.append(f"Then: {outcome.end}")
    if outcome.violations:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.violations.items()))
        lines.append(f"Counted: {kinds}")
    out.print(Text(outcome.mode, picture.HEAD))
    for line in lines:
        out.print(picture.hanging(out, "", Text(line)))
    if outcome.ended == "raised":
        out.print(picture.report(out, outcome.report or outcome.end))


if __name__ == "__main__":
    sys.exit(main())
