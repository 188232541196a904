"""The policy of one pair of pools: what is checked at each kind of operation, and what follows.

Adapters translate SGLang's calls into the verbs below and hold no policy of their own. A verb
returns what the caller should do instead of what it was asked to do, or raises in strict mode.

Nothing here reads the device unless a violation has already been seen or the mode is strict.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache_guard.core import compiled
from hicache_guard.core.backlog import Backlog, Freed
from hicache_guard.core.compiled import Books
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.faults import Fault
from hicache_guard.core.journal import Journal, Operation
from hicache_guard.core.ledger import FREED, QUEUED, SERIAL, PageLedger
from hicache_guard.core.match import Full, Paths, Rule, Window
from hicache_guard.core.modes import Mode
from hicache_guard.core.proof import Adopted, Proved
from hicache_guard.core.report import Report, Violation, describe_operation, generation_text, tell
from hicache_guard.core.tally import Tally
from hicache_guard.core.undo import UndoLog, UndoLogs
from hicache_guard.core.verdict import Finding, HostCopy, Suspicion, Verdict, Vetted
from hicache_guard.core.windowmap import WindowMap
from hicache_guard.core.witness import Witness

logger = logging.getLogger("hicache_guard")

#: Is told the values of an answer, and the operation that it was asked for in.
Told = Callable[[npt.NDArray[Any], Operation], Any]

#: Reports of one kind that are logged in full; later ones are only counted.
MAX_REPORTS_PER_KIND = 50
#: Verdicts under way before the oldest is waited for, so that a stalled device cannot pile them up.
MAX_VERDICTS_UNDER_WAY = 4096
#: Operations remembered as reported; an operation's reports come close together.
MAX_REPORTED = 65_536
#: Slots of matched paths that are looked at in one go; each costs some 80 bytes meanwhile.
MAX_AT_ONCE = 262_144
#: Serials that are left when they are shifted: while a load-back runs, whose parts are proved by
#: what was before, that is put off for so many operations.
LEFT = 64
#: Backups that can be restored with their mapping; SGLang keeps one at a time.
MAX_BACKUPS = 8

#: Stands for the operation that is open while nobody has asked for its record.
_IN_STEP = Operation(0, "", None, (lambda: None).__code__, 0)


class PoolGuard:
    """Proof-keeping for a full pool and a window pool joined by a mapping.

    ``full_slots`` and ``window_slots`` are capacities in slots without the padding page,
    ``mapping`` is SGLang's tensor (see ``WindowMap``). ``on_report`` receives every violation that
    is counted.
    """

    def __init__(
        self,
        mode: Mode,
        *,
        full_slots: int,
        window_slots: int,
        page_size: int,
        mapping: torch.Tensor,
        on_report: Report | None = None,
    ) -> None:
        device = mapping.device
        self.mode = mode
        self.page_size = page_size
        self.device = device
        self.undo = UndoLogs()
        self.full = PageLedger("full", full_slots // page_size, page_size, device, self.undo)
        self.window = PageLedger("window", window_slots // page_size, page_size, device, self.undo)
        self.map = WindowMap(mapping, self.full, self.window, self.undo)
        self.witness = Witness(self.full, device, self.undo)
        self.compiled: Books | None = None
        self._compile()
        self.journal = Journal()
        self.tally = Tally()
        self.serial = 0
        self._shifted = 0
        self.operation: Operation | None = None
        #: Set once an entry of the mapping may be wrong: from then on translations are validated.
        self.mapping_suspect = False
        #: Set once anything was wrong: from then on the whole path of every match is judged, not
        #: only its window, and what an insertion runs over is looked at.
        self.trees_suspect = False
        self._windows_betrayed = False
        self._betrayals: list[HostCopy] = []
        self.trees_working = False
        #: A load-back runs: what it writes to the mapping is proved when it is done.
        self.trees_loading = False
        self._on_report = on_report
        self._reported: set[tuple[int, Fault]] = set()
        self._under_way: deque[tuple[Verdict, PageLedger, Operation]] = deque()
        self._answers: deque[tuple[HostCopy, Told, Operation]] = deque()
        self._full_only: list[torch.Tensor] = []
        #: Whether an earlier operation left something that the next allocation must find done.
        self.has_overdue = False
        self._aliases: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._backups: deque[tuple[object, UndoLog]] = deque()
        self.backlog = Backlog(self)
        #: Whether checks are collected and run together. Strict needs each answer at once; observe
        #: may never wait for a device, and settling in order can.
        self.lazy = self.compiled is None and (
            mode is Mode.ENFORCE or (mode is Mode.OBSERVE and device.type == "cpu")
        )

    def _compile(self) -> None:
        """Take the memory of the books over; to be called where they were allocated anew."""
        if self.mode is not Mode.STRICT:  # which must be able to take back what it wrote
            self.compiled = compiled.books(self.full, self.window, self.map, self.witness)

    # -- operations ----------------------------------------------------------------------------

    def begin(self, name: str, caller: FrameType) -> Operation:
        """Open the record of an outermost operation. ``caller`` is the frame that asked for it."""
        if self.serial >= SERIAL - LEFT and (not self.trees_loading or self.serial >= SERIAL - 4):
            self._rebase(caller)
        self.serial += 1
        self.tally.operations += 1
        operation = self.journal.open(self.serial, name, caller)
        self.operation = operation
        if self._under_way or self._answers:
            self.poll()
        return operation

    @property
    def moment(self) -> int:
        """The last operation, by a number that stays its own when serials are shifted."""
        return self.serial + self._shifted

    def serial_at(self, moment: int) -> int:
        """The serial of what was the last operation at a moment; the first one's for what is old.

        To be asked inside the operation that compares it.
        """
        return max(1 if self._shifted else 0, moment - self._shifted)

    def begin_step(self, name: str, caller: FrameType) -> bool:
        """As ``begin``, by the journal's ``Steps``; whether what they watch is as it was left."""
        steps = self.journal.steps
        if steps is None or self.serial >= SERIAL - LEFT:
            self.begin(name, caller)
            return steps is not None and not steps.changed()
        self.serial = serial = self.serial + 1
        self.tally.operations += 1
        self.operation = _IN_STEP
        return steps.enter(serial, name, caller)

    def end(self) -> None:
        """Close the outermost operation: every mapping write until now came through a seam."""
        self.operation = None
        book = self.map
        book.seen = book.mapping._version  # as acknowledge()

    def _rebase(self, caller: FrameType) -> None:
        # What is noted carries serials of before.
        self.serial += 1
        self.operation = self.journal.open(self.serial, "settling", caller)
        self.backlog.settle()
        self.operation = None
        shift = self.serial // 2
        self._windows_betrayed = self.windows_betrayed
        self.witness.rebase(shift, self.map)
        self.map.rebase(shift)
        self.full.rebase(shift)
        self.window.rebase(shift)
        self.serial -= shift
        self._shifted += shift
        steps = self.journal.steps
        self.journal = Journal()
        if steps is not None:
            steps.forget()
            self.journal.steps = steps
        self._compile()  # what it remembers bears the serials of before
        self._reported.clear()

    # -- verdicts ------------------------------------------------------------------------------

    def judge(self, verdict: Verdict, ledger: PageLedger) -> int | None:
        """Act on a verdict: raise (strict), report it where it has arrived, or let it travel.

        Returns the number of bad slots where known now, else None.
        """
        operation = self.current
        if self.mode is Mode.STRICT:
            self.wait_for(verdict)
        if not verdict.arrived():
            self._under_way.append((verdict, ledger, operation))
            if len(self._under_way) > MAX_VERDICTS_UNDER_WAY:
                self.wait_for(self._under_way[0][0])
                self.poll()
            return None
        if verdict.count:
            self._report(verdict, ledger, operation)
        return verdict.count

    def judge_now(self, verdict: Verdict, ledger: PageLedger) -> int | None:
        """As ``judge``, for an answer that is needed: only observe mode does not wait for it."""
        count = self.judge(verdict, ledger)
        if count is None and self.mode is not Mode.OBSERVE:
            self.wait_for(verdict)
            self.poll()
            count = verdict.count
        return count

    def wait_for(self, verdict: Verdict | Vetted | HostCopy) -> None:
        """Block until the verdict is on the host; counted where it really had to wait."""
        if not verdict.arrived():
            self.tally.waits += 1
            verdict.wait()

    def when_known(self, answer: HostCopy, then: Told) -> Any:
        """Tell ``then`` the values of an answer, and the operation that runs now; what it says.

        Waits for the answer; in observe mode it is told later where it has not arrived, and this
        returns None.
        """
        operation = self.current
        if self.mode is not Mode.OBSERVE:
            self.wait_for(answer)
        if answer.arrived():
            return then(answer.numbers(), operation)
        self._answers.append((answer, then, operation))
        if len(self._answers) > MAX_VERDICTS_UNDER_WAY:
            self.wait_for(self._answers[0][0])
            self.poll()
        return None

    def poll(self) -> None:
        """Report the verdicts that have arrived meanwhile, oldest first. Never blocks."""
        while self._answers and self._answers[0][0].arrived():
            answer, then, asked_in = self._answers.popleft()
            then(answer.numbers(), asked_in)
        while self._under_way and self._under_way[0][0].arrived():
            verdict, ledger, operation = self._under_way[0]
            if verdict.count and not verdict.request_facts().arrived():
                return
            self._under_way.popleft()
            if verdict.count:
                self._report(verdict, ledger, operation)

    def drain(self) -> None:
        """Wait for every verdict under way and report it; for tests, audits and shutdown."""
        while self._answers:
            self.wait_for(self._answers[0][0])
            self.poll()
        while self._under_way:
            verdict, _, _ = self._under_way[0]
            self.wait_for(verdict)
            if verdict.count:
                verdict.request_facts().wait()
            self.poll()

    @property
    def current(self) -> Operation:
        """The operation that is open."""
        assert self.operation is not None, "a check runs inside an operation"
        if self.operation is _IN_STEP:
            found = self.journal.find(self.serial)
            assert found is not None, "the running step is remembered"
            self.operation = found
        return self.operation

    def _report(self, verdict: Verdict, ledger: PageLedger, operation: Operation) -> None:
        facts = verdict.request_facts()
        if not facts.arrived():
            facts.wait()
        for finding in verdict.findings():
            violation = self._violation(finding, ledger, operation)
            if self.mode is Mode.STRICT:
                self._count(violation, operation)
                raise GuardViolation(violation)
            self._count(violation, operation)
        self.mapping_suspect = self.mapping_suspect or self.mode is Mode.OBSERVE

    def dead_read(self, finding: Finding) -> None:
        """Attention came to read a window slot that is not what its full slot owns.

        ``finding`` is about full slots. To be called in an operation; raises in strict mode.
        """
        self.mapping_suspect = True
        self.count(self._violation(finding, self.full, self.current), self.current)

    def distrust(self, slots: torch.Tensor) -> None:
        """Nothing of the pages of ``slots`` (int64) is vouched for by a prefix tree any more."""
        self.witness.vouch(slots, 0)

    def count(self, violation: Violation, operation: Operation) -> None:
        """A violation of an operation that no verdict found; raises in strict mode."""
        self._count(violation, operation)
        if self.mode is Mode.STRICT:
            raise GuardViolation(violation)

    def _count(self, violation: Violation, operation: Operation) -> None:
        key = (operation.serial, violation.fault)
        if key in self._reported:
            return
        if len(self._reported) >= MAX_REPORTED:
            self._reported.clear()
        self._reported.add(key)
        self.trees_suspect = True
        self.tally.violations[violation.fault] += 1
        self.tally.slots[violation.fault] += violation.slots
        seen = self.tally.violations[violation.fault]
        if seen <= MAX_REPORTS_PER_KIND:
            logger.warning("%s", violation)
            if seen == MAX_REPORTS_PER_KIND:
                logger.warning("further %s are only counted", violation.fault.value)
        tell(self._on_report, violation)

    def _violation(self, finding: Finding, ledger: PageLedger, operation: Operation) -> Violation:
        page = finding.slot // self.page_size
        found = expected = other = None
        if finding.found >= 0:
            freed = finding.found >= FREED
            serial = finding.found & SERIAL
            if freed and serial == 0:
                found = "a page that was never handed out"
            elif freed:
                found = "freed in " + generation_text(serial, self.journal)
            else:
                found = generation_text(serial, self.journal)
            expected = (
                f"an entry stamped {finding.expected} or a page not newer than it"
                if finding.expected >= 0
                else "a live page of the caller's"
            )
        subject = ledger
        history_page = page
        if finding.other >= 0:
            side, peer = ("window", self.window) if ledger is self.full else ("full", self.full)
            peer_page = finding.other // self.page_size
            other = f"{side} slot {finding.other}, page {peer_page}" + self._owner_text(
                side, finding.other
            )
            if side == "window":
                subject, history_page = peer, peer_page
        # Reading the history costs a device read: never in observe mode on a device.
        readable = self.mode is not Mode.OBSERVE or self.device.type == "cpu"
        written: list[tuple[int, int]] = []
        if self.compiled is not None:
            written = self.compiled.touched(int(subject is self.window), history_page)
        lines = self.journal.history(subject.name, history_page, written) if readable else []
        return Violation(
            fault=finding.fault,
            pool=ledger.name,
            slot=finding.slot,
            page=page,
            slots=finding.count,
            operation=describe_operation(operation),
            request=operation.request,
            expected=expected,
            found=found,
            other=other,
            history=tuple(lines),
        )

    def _owner_text(self, side: str, slot: int) -> str:
        if side != "window" or self.device.type != "cpu" or slot >= self.map.owner.numel():
            return ""
        if int(self.window.born.numpy()[slot // self.page_size]) >= FREED:
            return ", which is free"
        owner = int(self.map.owner.numpy()[slot])
        born = int(self.full.born.numpy()[min(owner // self.page_size, self.full.outside)])
        if owner == 0 or born >= FREED:
            return ", owned by nobody live"
        holder = self.journal.find(born)
        who = f" ({holder})" if holder else ""
        return f", owned by full slot {owner} of generation {born}{who}"

    # -- handing out ---------------------------------------------------------------------------

    def hand_out(self, ledger: PageLedger, pages: torch.Tensor) -> None:
        """``pages`` (int64) just left the free list of ``ledger``'s pool."""
        if self.mapping_suspect or self.mode is Mode.STRICT:
            # With every free vetted, a free list cannot hold a live page; check where one was not.
            known = ledger.pages_of(pages * ledger.page_size)
            found = ledger.generations(known)
            bad = (found < FREED) | (known == 0) | (known == ledger.outside)
            verdict = Verdict(
                bad,
                pages * ledger.page_size,
                [Suspicion(Fault.HANDED_OUT_LIVE, lambda: bad)],
                found=found,
            )
            self.judge(verdict, ledger)
            pages = known
        if ledger is self.full and self.mode is Mode.STRICT:
            # What the mapping held for these rows, so that a later check of this operation can
            # raise and leave even a stale entry as it was.
            self.undo.save(self.map.mapping, self.full.rows_of(pages))
        ledger.hand_out(pages, self.serial)
        self._touch("allocated", ledger, pages)

    def _touch(self, verb: str, ledger: PageLedger, pages: torch.Tensor) -> None:
        self.journal.touch(verb, ledger.name, pages, (self.current,), (pages.shape[0],))

    def check_nothing_kept(self, kept: list[int]) -> None:
        """A hybrid allocation returned nothing; ``kept`` pages left the full and window free lists.

        They belong to nobody now: the caller was told that there was no memory.
        """
        for ledger, count in zip((self.full, self.window), kept, strict=True):
            if count:
                slots = torch.zeros(count, dtype=torch.int64, device=self.device)
                bad = torch.ones(count, dtype=torch.bool, device=self.device)
                suspicion = Suspicion(Fault.KEPT_PAGES, lambda bad=bad: bad)  # type: ignore[misc]
                self.judge(Verdict(bad, slots, [suspicion]), ledger)

    def rows_of_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Every row of the full pages of ``slots`` (int64), each page once.

        On a device the shape is fixed: a page that is out of range or named before gives the
        padding page. On a CPU it is left out, or a free of whole pages would cost their slots times
        the page size.
        """
        pages = self.full.pages_of(slots)
        if pages.device.type == "cpu":
            distinct = np.unique(
                pages.numpy()
            )  # no operator of torch's that a device would wait for
            return self.full.rows_of(torch.from_numpy(distinct[distinct < self.full.outside]))
        spare = self.full.repeated(pages) | (pages == self.full.outside)
        return self.full.rows_of(torch.where(spare, 0, pages))

    def keep_rows(self, slots: torch.Tensor) -> None:
        """Keep the mapping entries around ``slots`` (int64) for whoever may have to take back."""
        if self.undo:
            self.undo.save(self.map.mapping, self.rows_of_slots(slots))

    def mapped(self, full: torch.Tensor, window: torch.Tensor) -> None:
        """An allocation mapped ``full[i] -> window[i]`` (int64), fresh or continuing a page."""
        self.map.record(full, window, self.serial)

    def check_continued(self, last: torch.Tensor, continues: torch.Tensor) -> torch.Tensor | None:
        """Before an extension that continues a page after the slot ``last`` (int64; -1 for none).

        ``continues`` masks the requests whose last page is not full. The window side continues from
        the translation of ``last``, so that entry must be proved and present. Returns (enforce) the
        slots after which nothing may be mapped, 0 for the others, or None where there are none.
        """
        slots = torch.where(continues, last, 0).clamp_(0, self.map.mapping.numel() - 2)
        window = self.map.mapping.index_select(0, slots)
        if self.mode is Mode.STRICT:
            self.keep_rows(slots)  # the extension will write these; see hand_out
        bad, count = self._judge_continued(slots, window, continues)
        return torch.where(bad, slots, 0) if self.mode is Mode.ENFORCE and count != 0 else None

    def _judge_continued(
        self, slots: torch.Tensor, window: torch.Tensor, continues: torch.Tensor
    ) -> tuple[torch.Tensor, int | None]:
        stale = continues & ~self.map.proved(slots, window)
        missing = continues & (window == 0)
        bad = stale | missing
        verdict = Verdict(
            bad,
            slots,
            [
                Suspicion(Fault.STALE_MAPPING, lambda: stale),
                Suspicion(Fault.UNPROVED_WINDOW, lambda: missing & ~stale),
            ],
            expected=self.map.stamp.index_select(0, slots),
            found=self.window.generations(self.window.pages_of(window)),
            other=window,
        )
        return bad, self.judge(verdict, self.full)

    def recheck_continued(
        self,
        last: torch.Tensor,
        window: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """As ``check_continued``, later: ``window`` is what the entries of ``last`` were then.

        ``rows`` were mapped to ``targets`` (int64 both). Reads the device: only after a bulk check
        found something out of order.
        """
        continues = self.full.inside_page(lengths) & (last >= 0)
        slots = torch.where(continues, last.long(), 0).clamp_(max=self.map.mapping.numel() - 2)
        entries = torch.where(continues, window.long(), 0)
        bad, count = self._judge_continued(slots, entries, continues)
        if self.mode is not Mode.ENFORCE or not count:
            return
        dead = torch.where(bad, slots, 0)
        after = self._mapped_after(dead, rows)
        self.map.erase(rows, ~after)
        self.map.give_back(targets[after])
        page = self.rows_of_slots(dead)
        self.map.erase(page, self.map.proved(page, self.map.mapping.index_select(0, page)))

    def _mapped_after(self, dead: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Mask (bool) of the full slots ``rows`` that continue a page after a slot of ``dead``."""
        return self.full.among(self.full.pages_of(rows), self.full.pages_of(dead))

    def unmap_after(
        self, dead: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """The window slots that an allocation may map ``rows`` to, 0 for what continues ``dead``.

        All int64. Whatever the window side made of a dead entry is some page of somebody else's.
        """
        targets = torch.where(self._mapped_after(dead, rows), 0, targets)
        self.map.mapping.index_copy_(0, rows, targets)
        return targets

    def check_unmapped(self, full: torch.Tensor) -> None:
        """After an allocation that mapped none of ``full`` (int64): no old entry may remain."""
        if full.numel() == 0:
            return
        full = full.clamp(0, self.map.mapping.shape[0] - 2)
        window = self.map.mapping.index_select(0, full)
        bad = window != 0
        verdict = Verdict(
            bad,
            full,
            [Suspicion(Fault.STALE_MAPPING, lambda: bad)],
            expected=self.map.stamp.index_select(0, full),
            found=self.full.generations(self.full.pages_of(full)),
            other=window,
        )
        count = self.judge(verdict, self.full)
        if self.mode is Mode.ENFORCE and count != 0:
            self.map.mapping.index_fill_(0, full, 0)

    # -- what is plainly in order --------------------------------------------------------------

    # Asked first where the books are compiled; what was answered with yes has been written down.

    @property
    def at_once(self) -> bool:
        """Whether allocations are judged slot by slot as they happen."""
        if self.mapping_suspect:
            return True
        return not self.lazy and (self.compiled is None or bool(self.undo.open_now))

    def passes_extension(self, last: torch.Tensor, lengths: torch.Tensor, less: int) -> bool:
        """Whether an allocation may go on after the slots ``last``; see ``Books.continued``.

        With collected checks the answer comes later, and it may.
        """
        books = self.compiled
        return (
            books is None
            or self.page_size == 1
            or books.continued(last, lengths, self.map.mapping, less)
        )

    def took(self, full: torch.Tensor, window: torch.Tensor) -> bool:
        """An allocation mapped the end of ``full`` to ``window``; whether that is written down."""
        books = self.compiled
        return books is not None and books.took(full, window, self.serial)

    def passes_free(self, slots: torch.Tensor, what: int) -> bool:
        """Whether a free of ``slots``, consecutive from a page boundary, may run as it is."""
        books = self.compiled
        if books is None or self.undo.open_now:
            return False
        return books.freed(slots, self.map.mapping, what, self.serial)

    def take_back_free(self) -> None:
        """The release gave up in a free that was passed: pages that did not come yet live on."""
        if self.compiled is not None:
            self.compiled.take_back(self.serial)

    def passes_release(
        self, ledger: PageLedger, items: torch.Tensor, *, pages: bool, direct: bool
    ) -> bool:
        """Whether ``items``, slots or page ids (``pages``), may enter ``ledger``'s free list.

        ``direct`` where no public free stands behind it.
        """
        books = self.compiled
        if books is None or self.undo.open_now:
            return False
        side = int(ledger is self.window)
        if not direct:
            return books.came(items, side, pages)
        return books.came_alone(items, side + 2 * pages, self.serial)

    # -- frees ---------------------------------------------------------------------------------

    def vet_slots(self, slots: torch.Tensor, *, segment: bool) -> Vetted:
        """Check the full slots (int64) that a public free names, before anything is freed.

        ``segment`` says that the slots are consecutive from a page boundary, so that each page is
        named by every ``page_size``-th of them. The answer has one entry for each slot.
        """
        ledger = self.full
        heads = slots[:: self.page_size] if segment else slots
        pages = ledger.pages_of(heads)
        vetted = self._vet(ledger, heads, pages, distinct=self.page_size == 1 or segment)
        if self.page_size == 1:
            return vetted
        if segment:
            return vetted.spread(self.page_size, slots.numel())
        later = ledger.later_part(heads, pages) & ~vetted.bad
        parts = Verdict(
            later,
            heads,
            [Suspicion(Fault.FREED_IN_PARTS, lambda: later)],
            found=ledger.generations(pages),
        )
        self.judge(parts, ledger)
        return Vetted(vetted.bad | later)

    def vouch(self, ledger: PageLedger, pages: torch.Tensor) -> None:
        """``pages`` (int64) were checked, and an open group queues them: they are free from now on.

        Strict checks each release when it comes.
        """
        if self.lazy:
            ledger.release(pages, self.serial)
            self.backlog.vouch(ledger, pages)
        elif self.compiled is not None:
            ledger.queue(pages, self.serial)

    def vet_release(
        self,
        ledger: PageLedger,
        items: torch.Tensor,
        *,
        pages: bool,
        distinct: bool,
        padding_expected: bool,
        queued: bool = False,
    ) -> Vetted:
        """Check what is about to enter ``ledger``'s free list: slots, or page ids (``pages``).

        ``distinct`` for a release that does not remove duplicates itself. With ``padding_expected``
        page 0 is bad but not counted: the fault that brought it here was counted already. With
        ``queued`` only a page that is on its way may come.
        """
        slots = (items * ledger.page_size if pages else items).to(torch.int64, copy=True)
        return self._vet(
            ledger,
            slots,
            ledger.pages_of(slots),
            distinct=distinct,
            silent=padding_expected,
            queued=queued,
        )

    def _vet(
        self,
        ledger: PageLedger,
        slots: torch.Tensor,
        pages: torch.Tensor,
        *,
        distinct: bool,
        silent: bool = False,
        queued: bool = False,
    ) -> Vetted:
        found = ledger.generations(pages)
        # Observe lets a release hand out what is no page: it is nobody's all the same.
        dead = (found >= FREED) | (pages == 0) | (pages == ledger.outside)
        if queued:
            dead = found < FREED | QUEUED
        bad = dead
        if ledger is self.full and not queued:
            if self.trees_working:
                self.withdraw(slots)
            held = self.witness.resident(slots)
            bad = dead | held
        suspicions = [
            Suspicion(Fault.NEGATIVE_INDEX, lambda: slots < 0),
            Suspicion(Fault.OUT_OF_RANGE, lambda: pages == ledger.outside),
            Suspicion(Fault.DOUBLE_FREE, lambda: dead & (pages > 0) & (pages < ledger.outside)),
        ]
        if ledger is self.full and not queued:
            suspicions.append(Suspicion(Fault.FREED_UNDER_TREE, lambda: held))
        if distinct:
            repeated = ledger.repeated(pages) & ~bad
            bad = bad | repeated
            suspicions.append(Suspicion(Fault.DUPLICATE_IN_CALL, lambda: repeated))
        if silent:
            self.judge(Verdict(bad & (pages > 0), slots, suspicions, found=found), ledger)
            return Vetted(bad)
        suspicions.append(Suspicion(Fault.PADDING_PAGE, lambda: (pages == 0) & (slots >= 0)))
        verdict = Verdict(bad, slots, suspicions, found=found)
        self.judge(verdict, ledger)
        return Vetted(bad, verdict.count_copy)

    def vet_rows(self, slots: torch.Tensor, *, must_be_mapped: bool) -> Vetted:
        """Check that full slots (int64) which a window free names are rows of the mapping.

        ``must_be_mapped`` as for ``check_entries``: the padding page then is no harmless row.
        """
        beyond = slots > self.map.mapping.numel() - 2
        padding = (slots >= 0) & (slots < self.page_size) & must_be_mapped
        bad = (slots < 0) | beyond | padding
        self.see_windows_betrayed(slots)
        verdict = Verdict(
            bad,
            slots,
            [
                Suspicion(Fault.NEGATIVE_INDEX, lambda: slots < 0),
                Suspicion(Fault.OUT_OF_RANGE, lambda: beyond),
                Suspicion(Fault.PADDING_PAGE, lambda: padding),
            ],
        )
        self.judge(verdict, self.full)
        return Vetted(bad, verdict.count_copy)

    def note_named(self, slots: torch.Tensor, bad: torch.Tensor, *, segment: bool) -> None:
        """Remember how far a public free reached into each of its pages."""
        if self.page_size == 1:
            return
        if segment:
            heads, bad_heads = slots[:: self.page_size], bad[:: self.page_size]
            self.full.name_whole(self.full.pages_of(torch.where(bad_heads, 0, heads)))
            # Only the last page can be named in part.
            start = (slots.numel() - 1) // self.page_size * self.page_size
            slots, bad = slots[start:], bad[-1:].expand(slots.numel() - start)
        pages = self.full.pages_of(torch.where(bad, 0, slots))
        self.full.note_named(torch.where(bad, 0, slots), pages)

    def check_entries(self, rows: torch.Tensor, *, must_be_mapped: bool) -> None:
        """Check the mapping entries of full slots ``rows`` (int64) that a free is about to follow.

        ``must_be_mapped`` for a free that releases whatever an entry holds, even "nothing". In
        enforce mode the entries that cannot be proved are erased, so that the free skips them.
        """
        window = self.map.mapping.index_select(0, rows)
        proved, count = self._judge_entries(rows, window, must_be_mapped)
        if self.mode is Mode.ENFORCE and count != 0:
            self.map.erase(rows, proved)

    def _judge_entries(
        self, rows: torch.Tensor, window: torch.Tensor, must_be_mapped: bool
    ) -> tuple[torch.Tensor, int | None]:
        proved = self.map.proved(rows, window) | (rows == 0)
        stale = ~proved
        bad = stale

        def shared() -> torch.Tensor:
            slots = window.clamp(0, self.map.owner.numel() - 1)
            return stale & (self.map.aliases(rows, slots) > 0)

        suspicions = [
            Suspicion(Fault.SHARED_WINDOW_SLOT, shared),
            Suspicion(Fault.STALE_MAPPING, lambda: stale & ~shared()),
        ]
        if must_be_mapped:
            unmapped = (window == 0) & (rows > 0)
            bad = stale | unmapped
            suspicions.append(Suspicion(Fault.UNMAPPED_RELEASE, lambda: unmapped))
        verdict = Verdict(
            bad,
            rows,
            suspicions,
            expected=self.map.stamp.index_select(0, rows),
            found=self.window.generations(self.window.pages_of(window)),
            other=window,
        )
        return proved, self.judge(verdict, self.full)

    def check_repointed(self, rows: torch.Tensor, then: torch.Tensor) -> torch.Tensor | None:
        """Check that the entries of full slots ``rows`` (int64) still hold what they did ``then``.

        For a release that translates a queued free only when its group ends. Returns (enforce) the
        mask of those that were re-pointed, or None where there are none.
        """
        known = rows.clamp(0, self.map.mapping.numel() - 2)
        now = self.map.mapping.index_select(0, known)
        bad = (now != then) & (now > 0) & (then > 0)
        verdict = Verdict(
            bad,
            rows,
            [Suspicion(Fault.REPOINTED_IN_GROUP, lambda: bad)],
            expected=self.map.stamp.index_select(0, known),
            found=self.window.generations(self.window.pages_of(now)),
            other=now,
        )
        count = self.judge(verdict, self.full)
        return bad if self.mode is Mode.ENFORCE and count else None

    def check_handed_out_since(
        self, slots: torch.Tensor, since: torch.Tensor
    ) -> torch.Tensor | None:
        """Check that the pages of full ``slots`` were not handed out after operation ``since``.

        Both int64. For a free that a group queued as it came, and that is made only when the group
        ends. Returns (enforce) the mask of those that were, or None where there are none; waits for
        the device there.
        """
        found = self.full.generations(self.full.pages_of(slots))
        bad = (found > since) & (found < FREED)
        verdict = Verdict(bad, slots, [Suspicion(Fault.DOUBLE_FREE, lambda: bad)], found=found)
        if self.mode is Mode.ENFORCE:
            self.wait_for(verdict)
        count = self.judge(verdict, self.full)
        return bad if self.mode is Mode.ENFORCE and count else None

    def recheck_free(self, note: Freed) -> tuple[set[int], set[int]]:
        """Judge a noted free on its own; returns the full and the window pages it may release.

        Reads the device: only after a bulk check found something out of order.
        """
        heads, ledger = note.heads, self.full
        freed_full: set[int] = set()
        freed_window: set[int] = set()
        rows_bad = self.vet_rows(heads, must_be_mapped=note.mapped).bad if not note.full else None
        if note.full:
            pages = ledger.pages_of(heads)
            vetted = self._vet(ledger, heads, pages, distinct=True)
            rows_bad = vetted.bad
            right = pages[~vetted.bad]
            ledger.release(right, self.serial)
            freed_full.update(right.tolist())
        if note.window is None:
            self.note_full_only(heads)  # judged, and released, before the next allocation
            return freed_full, freed_window
        assert rows_bad is not None
        rows, entries = heads[~rows_bad], note.window[~rows_bad]
        proved, _ = self._judge_entries(rows, entries, note.mapped)
        slots = entries[proved & (entries > 0)]
        pages = self.window.pages_of(slots)
        vetted = self._vet(self.window, slots, pages, distinct=True)
        right = pages[~vetted.bad]
        self.window.release(right, self.serial)
        freed_window.update(right.tolist())
        if self.mode is Mode.ENFORCE:
            self.map.mapping[-1:].fill_(-1)
        return freed_full, freed_window

    def check_peers_released(self, slots: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Check that no full slot (int64) about to be freed alone still has a live window peer.

        Returns the mask of those that have one, and their number where known now.
        """
        window = self.map.mapping.index_select(0, slots)
        bad = (window > 0) & self.map.proved(slots, window)
        verdict = Verdict(
            bad,
            slots,
            [Suspicion(Fault.LIVE_PEER, lambda: bad)],
            found=self.window.generations(self.window.pages_of(window)),
            other=window,
        )
        return bad, self.judge(verdict, self.full)

    def note_full_only(self, slots: torch.Tensor) -> None:
        """The full pool alone was told to free ``slots``; their window peers are due soon."""
        self._full_only.append(slots)
        self.has_overdue = True

    def overdue_peers(self) -> torch.Tensor | None:
        """Before an allocation: full slots freed alone whose window peers were left, or None.

        SGLang's trees free the full side first and the window side right after, so an allocation is
        the first moment at which a live peer can be called lost. Returns (enforce) the full slots
        whose peers are to be released now.
        """
        if not self._full_only:
            return None
        if self.compiled is not None:
            freed = self._full_only
            left_any = [self.compiled.left_behind(slots, self.map.mapping) for slots in freed]
            if not any(left_any):
                self._full_only = []
                return None
        rows = self.rows_of_slots(torch.cat(self._full_only))
        self._full_only = []
        window = self.map.mapping.index_select(0, rows)
        left = (window > 0) & self.map.proved(rows, window)
        left &= self.full.generations(self.full.pages_of(rows)) >= FREED
        verdict = Verdict(
            left,
            rows,
            [Suspicion(Fault.LIVE_PEER, lambda: left)],
            found=self.window.generations(self.window.pages_of(window)),
            other=window,
        )
        count = self.judge(verdict, self.full)
        if self.mode is not Mode.ENFORCE or not count:
            return None
        return rows[left]

    def released(self, ledger: PageLedger, slots: torch.Tensor) -> None:
        """Slots (int64, in range) entered ``ledger``'s free list with their pages."""
        pages = ledger.pages_of(slots)
        ledger.release(pages, self.serial)
        self._touch("freed", ledger, pages)

    # -- mapping writes ------------------------------------------------------------------------

    def check_mapping_write(self, full: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """Before ``mapping[full] = window`` (int64) outside an allocation, e.g. at load-back.

        Returns the window slots to write: 0 for a dead one in enforce mode. A slot that another
        live full slot is mapped to changes hands; see ``overdue_aliases``.
        """
        rows = full.clamp(0, self.map.mapping.numel() - 2)
        full_born = self.full.generations(self.full.pages_of(full))
        window_born = self.window.generations(self.window.pages_of(window))
        bad = (window != 0) & ((full_born >= FREED) | (window_born >= FREED) | (window < 0))
        verdict = Verdict(
            bad,
            full,
            [Suspicion(Fault.DEAD_SLOT_MAPPED, lambda: bad)],
            found=window_born,
            other=window.clamp(min=0),
        )
        self.judge(verdict, self.full)
        aliases = self.map.aliases(rows, window.clamp(0, self.map.owner.numel() - 1))
        self._aliases.append((aliases, window))
        self.has_overdue = True
        self.undo.save(self.map.mapping, rows)
        written = torch.where(bad, 0, window) if self.mode is Mode.ENFORCE else window
        held = torch.where(bad, 0, window).clamp(0, self.map.owner.numel() - 1)
        self.map.record(rows, held, self.serial)
        if self.trees_working and not self.trees_loading:
            self.witness.renew(rows, self.serial)
        self.see_windows_betrayed(rows)
        return written

    def overdue_aliases(self) -> None:
        """Before an allocation: a slot that changed hands must not be mapped by its old owner.

        SGLang transfers a window slot by writing the new entry first and clearing the old one next,
        so the overlap is only a fault once something else happens.
        """
        if not self._aliases:
            return
        old = torch.cat([full for full, _ in self._aliases])
        window = torch.cat([slots for _, slots in self._aliases])
        self._aliases = []
        still = (old > 0) & (self.map.mapping.index_select(0, old) == window)
        still &= self.map.owner.index_select(0, window.clamp(0, self.map.owner.numel() - 1)) != old
        verdict = Verdict(
            still,
            old,
            [Suspicion(Fault.SHARED_WINDOW_SLOT, lambda: still)],
            found=self.window.generations(self.window.pages_of(window)),
            other=window,
        )
        self.judge(verdict, self.full)
        if self.mode is Mode.ENFORCE:
            # The newer entry was written on purpose; the older one is what may free it by mistake.
            rows = torch.where(still, old, 0)
            self.map.erase(rows, rows == 0)

    def forget_window(self, rows: torch.Tensor) -> None:
        """Enforce: drop entries of full slots ``rows`` (int64) whose window page is free already.

        For releases whose ``free_swa`` clears only the entries it was told of, while the whole
        window page goes.
        """
        window = self.map.mapping.index_select(0, rows)
        alive = self.window.generations(self.window.pages_of(window)) < FREED
        self.map.erase(rows, alive | (window == 0))

    def unseen_writes(self, mapping: torch.Tensor) -> bool:
        """Whether ``mapping`` was written or replaced without a seam since the last operation."""
        return self.map.unseen_writes(mapping)

    def reconcile(self, mapping: torch.Tensor) -> None:
        """Take stock after a write behind the seams: one pass over the whole mapping.

        Entries for live, unshared window slots are adopted; others are reported, and in enforce
        mode become what they were before, where that is still known, and else empty. Costs the size
        of the pool, so it only runs where such a write was noticed.
        """
        self.tally.unhooked_writes += 1
        self._windows_betrayed = True
        if mapping is not self.map.mapping:
            self.map.adopt(mapping)
            self._compile()
        rows = torch.arange(mapping.numel() - 1, device=mapping.device)
        window = mapping[:-1].clone()
        proved = self.map.proved(rows, window)
        stale_before = self.full.generations(self.full.pages_of(rows)) >= FREED
        live = (
            (window > 0)
            & ~stale_before
            & (self.window.generations(self.window.pages_of(window)) < FREED)
        )
        free_to_take = self.map.aliases(rows, window.clamp(0, self.map.owner.numel() - 1)) == 0
        claims = torch.zeros_like(self.map.owner)
        target = window.clamp(0, claims.numel() - 1)
        claims.scatter_(0, torch.where(live & ~proved, target, 0), rows.to(torch.int32))
        sole = claims.index_select(0, target) == rows
        adopt = live & ~proved & free_to_take & sole
        # Entries left behind on pages that are free already prove nothing and harm nobody yet.
        bad = ~proved & ~adopt & ~stale_before
        bad |= (window < 0) | (window >= self.map.owner.numel())
        verdict = Verdict(
            bad,
            rows,
            [Suspicion(Fault.BYPASS, lambda: bad)],
            expected=self.map.stamp.index_select(0, rows),
            found=self.window.generations(self.window.pages_of(window)),
            other=window.clamp(min=0),
        )
        self.judge(verdict, self.full)
        self.map.stamp[:-1] = torch.where(adopt, self.serial, self.map.stamp[:-1])
        taken = torch.where(adopt, target, 0)
        self.map.owner.scatter_(0, taken, torch.where(adopt, rows, 0).to(torch.int32))
        if self.mode is Mode.ENFORCE:
            mapping[:-1] = torch.where(bad, self.map.held_by(rows), window)
            mapping[-1:].fill_(-1)
        self.mapping_suspect = self.mapping_suspect or self.mode is not Mode.ENFORCE
        self.map.acknowledge()

    # -- translation ---------------------------------------------------------------------------

    @property
    def validates_translations(self) -> bool:
        """Whether reads of the mapping are checked, or vouched for by the checks of its writes."""
        return self.mapping_suspect or self.mode is Mode.STRICT

    def translate(self, full: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """Validate a translation ``window`` that was just read for ``full`` (both same shape).

        Empty entries (0) and the sentinel (-1) are legal; a stale one is reported and becomes 0 in
        enforce mode.
        """
        rows = full.reshape(-1).to(torch.int64).clamp(0, self.map.mapping.numel() - 2)
        slots = window.reshape(-1).to(torch.int64)
        known = slots.clamp(0, self.map.owner.numel() - 1)
        bad = (slots > 0) & ~self.map.proved(rows, known)
        verdict = Verdict(
            bad,
            rows,
            [Suspicion(Fault.STALE_MAPPING, lambda: bad)],
            expected=self.map.stamp.index_select(0, rows),
            found=self.window.generations(self.window.pages_of(known)),
            other=known,
        )
        self.judge(verdict, self.full)
        if self.mode is not Mode.ENFORCE:
            return window
        return torch.where(bad.reshape(window.shape), torch.zeros_like(window), window)

    # -- prefix trees --------------------------------------------------------------------------

    @contextmanager
    def tree_working(self) -> Iterator[None]:
        """A prefix tree's own method runs: what the tree holds is its to free."""
        if self.trees_working:
            yield
            return
        self._tree_works(True)
        try:
            yield
        finally:
            self._tree_works(False)

    def _tree_works(self, yes: bool) -> None:
        self.trees_working = yes
        if self.compiled is not None:
            self.compiled.in_tree(yes)

    def adopt(self, slots: torch.Tensor, start: int, evicted: int) -> Adopted:
        """A request is about to give ``slots[start:]`` (int64, a row) to a prefix tree.

        Those at ``evicted`` and beyond are said to have their window side. Tokens whose KV was
        never computed, or is gone, must not be cached as live, and no page for two prefixes.
        Returns (enforce, where known now) what may be taken over; the tree vouches for what is
        live of it from now on.
        """
        end = slots.shape[0]
        given = slots[start:]
        pages = self.full.pages_of(given)
        born = self.full.generations(pages)
        dead = (born >= FREED) | (pages == 0)
        again = self.witness.resident(given)
        no = dead | again
        entries = self._entries(given)
        place = torch.arange(start, end, device=given.device)
        gone = (place >= evicted) & ~self.map.leads(given, entries) & ~no
        verdict = Verdict(
            no | gone,
            given,
            [
                Suspicion(Fault.DEAD_TOKENS_CACHED, lambda: dead),
                Suspicion(Fault.CACHED_TWICE, lambda: again),
                Suspicion(Fault.EVICTED_TOKENS_CACHED, lambda: gone),
            ],
            found=born,
            other=entries.clamp(0, self.map.owner.shape[0] - 1),
        )
        count = self.judge(verdict, self.full)
        found = Adopted(end, evicted)
        if self.mode is Mode.ENFORCE and count:
            found = self._adoptable(no, gone, start, evicted)
        # What could not be looked at yet is vouched for all the same where it is live: a match
        # reads what the pools say then, and not what was said here.
        self.witness.vouch(torch.where(dead, 0, given)[: max(0, found.end - start)], self.serial)
        return found

    def uncomputed(self, slots: torch.Tensor) -> None:
        """``slots`` of a row, beyond what its request was given, are about to go to a tree."""
        row = slots.to(torch.int64)
        bad = torch.ones_like(row, dtype=torch.bool)
        suspicion = Suspicion(Fault.DEAD_TOKENS_CACHED, lambda: bad)
        self.judge(Verdict(bad, row, [suspicion]), self.full)

    def _adoptable(self, no: torch.Tensor, gone: torch.Tensor, start: int, evicted: int) -> Adopted:
        """What may be taken over of a row with ``no`` full slots and ``gone`` window slots."""
        size, end = self.page_size, start + no.shape[0]
        if bool(no.any()):
            end = (start + int(no.to(torch.uint8).argmax())) // size * size
        gone = gone[: max(0, end - start)]
        if bool(gone.any()):
            last = start + int(gone.nonzero()[-1])
            evicted = min(-(-(last + 1) // size) * size, end)
        return Adopted(end, evicted)

    def _entries(self, slots: torch.Tensor) -> torch.Tensor:
        """The mapping entries of full slots (int64); some slot's for what lies outside."""
        return self.map.mapping.index_select(0, slots.clamp(0, self.map.mapping.shape[0] - 2))

    def check_row(self, slots: torch.Tensor, need: int, since: int) -> bool:
        """Whether a row (int64 full slots) that was put by after operation ``since`` still holds.

        All of its full side, and the window side of its last ``need`` tokens. In observe mode the
        answer is yes, while the verdict travels.
        """
        pages = self.full.pages_of(slots)
        born = self.full.generations(pages)
        entries = self._entries(slots)
        stamp = self.map.stamp.index_select(0, slots.clamp(0, self.map.stamp.shape[0] - 1))
        foreign = born > since
        tail = torch.arange(slots.shape[0], device=slots.device) >= slots.shape[0] - need
        unproved = tail & ~foreign & ~(self.map.leads(slots, entries) & (stamp <= since))
        verdict = Verdict(
            foreign | unproved,
            slots,
            [
                Suspicion(Fault.FOREIGN_PREFIX, lambda: foreign),
                Suspicion(Fault.UNPROVED_WINDOW, lambda: unproved),
            ],
            found=born,
            other=entries.clamp(min=0),
        )
        self.judge_now(verdict, self.full)
        return self.mode is Mode.OBSERVE or not verdict.count

    def adopt_loaded(
        self, slots: torch.Tensor, since: int, full: torch.Tensor, window: torch.Tensor
    ) -> None:
        """A tree loaded KV back to a path (int64 full slots), by operations after ``since``.

        ``full`` and ``window`` (bool) mask what came back as it went. Pages that the tree was given
        are vouched for, and window slots renewed, where that is so; what it held before is not
        vouched for anew.
        """
        fresh = self.full.generations(self.full.pages_of(slots)) > since
        entries = self._entries(slots)
        mapped = self.map.leads(slots, entries)
        newer = mapped & (self.map.stamp.index_select(0, slots) > since)
        right = ~newer | window
        self.witness.vouch(torch.where(fresh & full & right, slots, 0), self.serial)
        self.witness.renew(torch.where(newer & window & ~fresh, slots, 0), self.serial)

    def withdraw(self, slots: torch.Tensor) -> None:
        """A tree's own method queues a free of full ``slots`` (int64); it holds them no more."""
        self.witness.vouch(slots, 0)

    @property
    def windows_betrayed(self) -> bool:
        """Whether others than the trees freed the window side of what a tree holds. Never waits."""
        arrived = [answer for answer in self._betrayals if answer.arrived()]
        if any(answer.values()[0] for answer in arrived):
            self._windows_betrayed = True
        if arrived:
            self._betrayals = [answer for answer in self._betrayals if answer not in arrived]
        return self._windows_betrayed or (self.compiled is not None and self.compiled.betrayed())

    def see_windows_betrayed(self, slots: torch.Tensor) -> None:
        """The window side of full ``slots`` (int64) is let go, or given to others."""
        if self.trees_working or self._windows_betrayed:
            return
        self._betrayals.append(HostCopy(self.witness.resident(slots).any().reshape(1)))
        if len(self._betrayals) > MAX_VERDICTS_UNDER_WAY:
            self._betrayals[0].wait()
            self._windows_betrayed = self.windows_betrayed

    def check_overlap(self, slots: torch.Tensor, windowed: torch.Tensor) -> int:
        """How many leading ``slots`` (int64) a tree holds still as it took them over.

        Of those under ``windowed`` (bool) the window side, too. An insertion is about to run over
        them: the release frees what a request has computed in their favour. Reads the device.
        """
        resident = self.witness.resident(slots)
        entries = self._entries(slots)
        foreign = ~resident
        unproved = windowed & resident & ~self.witness.live(slots, self.map, entries)
        verdict = Verdict(
            foreign | unproved,
            slots,
            [
                Suspicion(Fault.FOREIGN_PREFIX, lambda: foreign),
                Suspicion(Fault.UNPROVED_WINDOW, lambda: unproved),
            ],
            found=self.full.generations(self.full.pages_of(slots)),
            other=entries.clamp(min=0),
        )
        self.judge(verdict, self.full)
        return int((~verdict.bad).to(torch.uint8).cumprod(0).sum())

    def prove_prefixes(self, paths: Sequence[torch.Tensor], need: int) -> list[Proved]:
        """How much of each matched path (int64 full slots, oldest first) can be proved.

        All of a path must be what the tree took over, its last ``min(need, n)`` tokens with their
        window side; a page-aligned point before may be proved where the end is not. One gather for
        all paths, and one host read where the mode may wait. In observe mode a device is not waited
        for: every path counts as proved, while the verdict travels.
        """
        lengths = [path.shape[0] for path in paths]
        slots = paths[0] if len(paths) == 1 else torch.cat(list(paths))
        entries = self._entries(slots)
        resident = self.witness.resident(slots)
        live = self.witness.live(slots, self.map, entries)
        tail = _tails(lengths, need, slots.device)
        foreign, unproved = ~resident, tail & resident & ~live
        verdict = Verdict(
            foreign | unproved,
            slots,
            [
                Suspicion(Fault.FOREIGN_PREFIX, lambda: foreign),
                Suspicion(Fault.UNPROVED_WINDOW, lambda: unproved),
            ],
            expected=self.witness.since.index_select(0, self.full.pages_of(slots)),
            found=torch.where(
                foreign,
                self.full.generations(self.full.pages_of(slots)),
                self.window.generations(self.window.pages_of(entries)),
            ),
            other=entries.clamp(min=0),
        )
        if not self.judge_now(verdict, self.full):
            return [Proved.whole(length) for length in lengths]
        candidates = Paths.plan(lengths, self.page_size, slots.device)
        groups: dict[str, tuple[Rule, torch.Tensor]] = {
            "full": (Full(), resident),
            "window": (Window(need), live),
        }
        return Proved.of(candidates, groups)

    def whole_prefixes(self, paths: Sequence[torch.Tensor], need: int) -> list[bool]:
        """Which matched paths are proved whole, by the rules of ``prove_prefixes``.

        For all waiting requests of a scheduling round: one gather and one host read for all of
        them. Nothing is reported; what is not whole is to be judged for the request that it is of.
        """
        counts: list[torch.Tensor] = []
        for some in _portions(paths, MAX_AT_ONCE):
            lengths = [path.shape[0] for path in some]
            slots = torch.cat(some)
            live = self.witness.live(slots, self.map, self._entries(slots))
            tail = _tails(lengths, need, slots.device)
            bad = torch.where(tail, ~live, ~self.witness.resident(slots))
            which = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            count = torch.zeros(len(lengths), dtype=torch.int64, device=slots.device)
            counts.append(count.index_add_(0, which.to(slots.device), bad.long()))
        answer = HostCopy(torch.cat(counts))
        self.wait_for(answer)
        return [not wrong for wrong in answer.values()]

    # -- whole-pool events ---------------------------------------------------------------------

    def backed_up(self, state: object) -> None:
        """``state`` was handed out by a release's ``backup_state``; start a log that can undo."""
        while len(self._backups) >= MAX_BACKUPS:
            self.undo.close(self._backups.popleft()[1])
        self._backups.append((state, self.undo.open()))

    def restored(self, state: object) -> bool:
        """Free lists went back to ``state``; take ledgers (and in enforce the mapping) along.

        The entries of slots that were live at the backup and are live again must be what they were.
        Returns False where what was written since is not known: then the pools must be looked at.
        """
        log = next((log for kept, log in self._backups if kept is state), None)
        if log is None or log.full:
            return False
        self.trees_suspect = True
        entries = log.entries(self.map.mapping)
        touched = [log.entries(tensor) for tensor in (self.full.born, self.window.born)]
        for ledger, saved in zip((self.full, self.window), touched, strict=True):
            for index, old in reversed(saved):
                self.undo.save(ledger.born, index)
                ledger.born.index_copy_(0, index, old)
        if entries:
            rows = torch.cat([index for index, _ in entries])
            old = torch.cat([values for _, values in entries])
            now = self.map.mapping.index_select(0, rows)
            live = self.full.generations(self.full.pages_of(rows)) < FREED
            bad = live & (now != old)
            verdict = Verdict(
                bad, rows, [Suspicion(Fault.LOST_ROLLBACK, lambda: bad)], other=old.clamp(min=0)
            )
            self.judge(verdict, self.full)
            if self.mode is Mode.ENFORCE:
                for index, values in reversed(entries):
                    alive = self.full.generations(self.full.pages_of(index)) < FREED
                    current = self.map.mapping.index_select(0, index)
                    self.map.mapping.index_copy_(0, index, torch.where(alive, values, current))
                for tensor in (self.map.stamp, self.map.owner):
                    for index, values in reversed(log.entries(tensor)):
                        tensor.index_copy_(0, index, values)
        self.undo.close(log)
        self._backups = deque(pair for pair in self._backups if pair[1] is not log)
        return True

    def cleared(self, full_slots: int, window_slots: int) -> None:
        """Both pools were emptied and the mapping cleared; sizes may have changed."""
        for _, log in self._backups:
            self.undo.close(log)
        self._backups.clear()
        self._full_only.clear()
        self._aliases.clear()
        self.has_overdue = False
        self.full.reset(full_slots // self.page_size, self.serial)
        self.window.reset(window_slots // self.page_size, self.serial)
        self.map.reset()
        self.witness.reset()
        self._compile()
        self.mapping_suspect = self.trees_suspect = self._windows_betrayed = False
        self._betrayals = []

    def resync(self, ledger: PageLedger, free_pages: torch.Tensor) -> None:
        """A free list was replaced behind the seams: take its word for what is free.

        Costs the size of the pool. Generations of pages that changed state start or end now.
        """
        self.tally.unhooked_writes += 1
        self.trees_suspect = True
        free = torch.zeros_like(ledger.born, dtype=torch.bool)
        free.index_fill_(0, free_pages.clamp(0, ledger.outside), True)
        free[0] = True
        free[ledger.outside] = True
        was_free = ledger.born >= FREED
        now = torch.where(free, FREED | self.serial, self.serial)
        ledger.born.copy_(torch.where(free == was_free, ledger.born, now.to(torch.int32)))

    def nbytes(self) -> int:
        """Bytes of device memory that the guard holds beside the pools."""
        books = (self.full, self.window, self.map, self.witness)
        return sum(book.nbytes() for book in books)


def _portions(paths: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Consecutive ``paths`` of ``most`` slots together, or one that is longer."""
    portion: list[torch.Tensor] = []
    total = 0
    for path in paths:
        if portion and total + path.shape[0] > most:
            yield portion
            portion, total = [], 0
        portion.append(path)
        total += path.shape[0]
    if portion:
        yield portion


def _tails(lengths: Sequence[int], need: int, device: torch.device) -> torch.Tensor:
    """Mask (bool) of the last ``need`` tokens of each of some paths that lie end to end."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    ends = counts.cumsum(0).repeat_interleave(counts)
    return (torch.arange(int(counts.sum())) >= ends - need).to(device)
