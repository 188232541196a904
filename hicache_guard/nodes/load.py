"""The client of a run on nodes: many requests at once, no more than the servers can take.

Threads and ``requests``, as the audit's ``Wire`` is: some hundred requests under way are mostly
waiting, and one way to talk to a server is enough. How many are under way follows the answers,
additive increase and multiplicative decrease (Chiu and Jain, 1989): a request that is refused, lost
or slow halves it, at most once for those that were under way together.

A request that was never accepted is sent again under a new id. One that was lost is not: nobody
knows what of it was done.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hicache_guard.audit.plan import Answer, Ask
from hicache_guard.audit.play import OURS
from hicache_guard.audit.wire import LostError, RefusedError, Wire, WireError, request_id
from hicache_guard.nodes.ledger import JournalError, Ledger

#: Seconds before a refused request is sent again: at first, and at most.
PAUSE, LONGEST_PAUSE = 0.1, 5.0
#: An answer is slow that took this part of the time-out.
SLOW = 0.5
#: Seconds that requests under way are given when a run ends before its time.
GRACE = 2.0


class Gate:
    """How many requests may be under way: at most ``most``, and fewer after trouble."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = float(most)
        self.lowest = float(most)
        self.under_way = 0
        self._cut = 0.0
        self._closed = False
        self._free = threading.Condition()

    def enter(self) -> bool:
        """Wait for room; whether there is a run to take part in still."""
        with self._free:
            self._free.wait_for(lambda: self._closed or self.under_way < int(self.limit))
            if self._closed:
                return False
            self.under_way += 1
            return True

    def leave(self, *, begun: float, trouble: bool) -> None:
        """A request is over that began at ``begun`` (monotonic)."""
        with self._free:
            self.under_way -= 1
            if not trouble:
                self.limit = min(float(self.most), self.limit + 1 / self.limit)
            elif begun >= self._cut:
                self.limit = max(1.0, self.limit / 2)
                self.lowest = min(self.lowest, self.limit)
                self._cut = time.monotonic()
            self._free.notify_all()

    def close(self) -> None:
        with self._free:
            self._closed = True
            self._free.notify_all()


class Client:
    """Asks what ``make`` makes of each number, and writes to the ledger what became of it.

    After ``in_a_row`` lost requests of one server without an answer of it, or ``patience`` seconds
    in which all were refused, the run is ``broken``: that says why. ``told`` hears of each request
    that is over, with its ``Answer`` where there is one.
    """

    def __init__(
        self,
        wires: Sequence[Wire],
        ledger: Ledger,
        make: Callable[[int], Ask],
        *,
        concurrency: int,
        in_a_row: int,
        patience: float,
        told: Callable[[int, Answer | None], None] = lambda _number, _answer: None,
    ) -> None:
        self.wires, self.ledger, self.make = wires, ledger, make
        self.concurrency, self.in_a_row, self.patience = concurrency, in_a_row, patience
        self.told = told
        self.gate = Gate(concurrency)
        self.space = f"{OURS}{ledger.run}"
        self.broken = ""
        #: Whether it was a server that broke it, not we.
        self.failed = False
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._lost: Counter[str] = Counter()
        self._refused_since: dict[str, float] = {}

    def ask(self, numbers: Iterable[int]) -> None:
        """Ask all of these, those of them that have no outcome yet, and wait for them."""
        due = iter([number for number in numbers if number not in self.ledger.outcomes])
        workers = [
            threading.Thread(target=self._work, args=(due,), daemon=True, name=f"asks-{index}")
            for index in range(self.concurrency)
        ]
        try:
            for worker in workers:
                worker.start()
            while any(worker.is_alive() for worker in workers) and not self._stopped.is_set():
                self._stopped.wait(0.02)
        except KeyboardInterrupt:
            self.stop("interrupted")
        if self._stopped.is_set():
            self._leave(workers)

    def stop(self, why: str, *, failed: bool = False) -> None:
        """End the run before its time; the first reason counts."""
        with self._lock:
            if not self.broken:
                self.broken, self.failed = why, failed
        self._stopped.set()
        self.gate.close()

    def _leave(self, workers: Sequence[threading.Thread]) -> None:
        """Let go of what is under way, on the servers too; it is asked again when we go on."""
        left = self.ledger.under_way()
        wires = {wire.url: wire for wire in self.wires}
        for rid, url in left.items():
            threading.Thread(target=wires[url].abort, args=(rid,), daemon=True).start()
        limit = time.monotonic() + GRACE
        for worker in workers:
            if worker.ident is not None:  # interrupted before it was started
                worker.join(max(0.0, limit - time.monotonic()))
        try:
            for rid in self.ledger.under_way():
                self.ledger.close(rid, "lost", error=f"left: {self.broken}", again=True)
        except JournalError:
            pass  # said already, and what is not closed is lost when we go on

    def _work(self, due: Iterator[int]) -> None:
        try:
            while not self._stopped.is_set():
                with self._lock:
                    number = next(due, None)
                if number is None:
                    return
                self._one(number)
        except JournalError as error:
            self.stop(str(error))
        except Exception as error:  # a worker that dies unseen would hang the run
            self.stop(f"the client failed: {error!r}")
            raise

    def _one(self, number: int) -> None:
        """One request, as often as it is refused."""
        ask = self.make(number)
        pause = PAUSE
        while self.gate.enter():
            tried = self.ledger.tries[number] + 1
            wire = self.wires[(number + tried) % len(self.wires)]
            begun, trouble, became = time.monotonic(), True, ""
            try:
                became = self._try(replace(ask, name=f"{number}.{tried}"), number, wire)
                slow = time.monotonic() - begun > SLOW * wire.timeout
                trouble = slow or became != "ended"
            finally:
                self.gate.leave(begun=begun, trouble=trouble)
            if became != "refused":
                return
            self._stopped.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _try(self, ask: Ask, number: int, wire: Wire) -> str:
        """Send it once; how the ledger closed it."""
        rid = request_id(ask.name, self.space)
        self.ledger.begin(number, rid, wire.url)
        begun = time.monotonic()
        try:
            answer = wire.attempt(ask, space=self.space)
        except RefusedError as error:
            self.ledger.close(rid, "refused", error=str(error))
            self._was_refused(wire, str(error))
            return "refused"
        except LostError as error:
            seconds = round(time.monotonic() - begun, 4)
            again = self._stopped.is_set()
            self.ledger.close(rid, "lost", error=str(error), seconds=seconds, again=again)
            if not again:
                self.told(number, None)
                self._was_lost(wire, str(error))
            return "lost"
        except WireError as error:
            answer = replace(Answer(ask, error=str(error)), seconds=time.monotonic() - begun)
        if self._stopped.is_set() and answer.finish == "abort" and ask.leave is None:
            self.ledger.close(rid, "lost", error=f"left: {self.broken}", again=True)
            return "lost"
        if ask.leave is None or ask.leaves:  # else nobody waited to hear whether it lives
            with self._lock:
                self._lost[wire.url] = 0
                self._refused_since.pop(wire.url, None)
        if self.ledger.close(rid, "ended", **as_data(answer)):
            self.told(number, answer)
        return "ended"

    def _was_refused(self, wire: Wire, why: str) -> None:
        with self._lock:
            since = self._refused_since.setdefault(wire.url, time.monotonic())
        if time.monotonic() - since >= self.patience:
            self.stop(f"nothing was accepted for {self.patience:g} s: {why}", failed=True)

    def _was_lost(self, wire: Wire, why: str) -> None:
        with self._lock:
            self._lost[wire.url] += 1
            lost = self._lost[wire.url]
        if lost >= self.in_a_row:
            self.stop(f"{lost} requests in a row were lost: {why}", failed=True)


def as_data(answer: Answer) -> dict[str, Any]:
    """An answer for the ledger; its prompt is made anew from the plan."""
    outcome = "failed" if answer.error else "answered" if answer.whole else "left"
    data: dict[str, Any] = {
        "outcome": outcome,
        "finish": answer.finish,
        "seconds": round(answer.seconds, 4),
        "prompt": len(answer.ask.prompt),
        "cached": answer.cached,
        "cached_from": answer.cached_from,
        "due": answer.ask.due,
    }
    if answer.error:
        data["error"] = answer.error
    if answer.output:
        data |= {"output": answer.output}
        if answer.ask.logprobs:
            data |= {"logprobs": answer.logprobs, "top": [[*top.items()] for top in answer.top]}
    return data


def answer_of(ask: Ask, data: Mapping[str, Any]) -> Answer:
    """What ``as_data`` kept of the answer to ``ask``."""
    return Answer(
        replace(ask, due=data.get("due", 0)),
        tuple(data.get("output", ())),
        tuple(data.get("logprobs", ())),
        tuple({int(token): logprob for token, logprob in top} for top in data.get("top", ())),
        int(data.get("cached", 0)),
        data.get("cached_from", {}),
        finish=data.get("finish", "failed"),
        error=data.get("error", ""),
        seconds=data.get("seconds", 0.0),
    )


class Probe:
    """Asks servers for their health beside the run, and notes when that changes."""

    def __init__(self, wires: Sequence[Wire], ledger: Ledger, every: float) -> None:
        self.wires, self.ledger, self.every = wires, ledger, every
        self.up: dict[str, bool] = {}
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(wire,), daemon=True) for wire in wires
        ]

    def __enter__(self) -> Probe:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """A last look, so that a server that died at the end is seen."""
        self._done.set()
        for thread in self._threads:
            thread.join(GRACE)

    def _watch(self, wire: Wire) -> None:
        try:
            while True:
                last = self._done.is_set()
                up = wire.healthy()
                if self.up.get(wire.url, True) != up:
                    self.ledger.note("health", url=wire.url, up=up)
                self.up[wire.url] = up
                if last:
                    return
                self._done.wait(self.every)
        except JournalError:
            return
