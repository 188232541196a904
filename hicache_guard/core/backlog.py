"""Checks that need no answer yet, collected and run together.

Asking the device about one free costs some dozens of small operators, whatever its size; asking
about a hundred frees at once costs the same. So outside strict mode an operation only *notes* what
is to be checked, and what it would release is held back (enforce). The backlog is settled in bulk
when somebody needs the answer: before an allocation takes pages, when the free list is looked at,
before an operation of another kind, or when it grows long.

Bulk only asks "is all of this in order?". Where it is not, the notes are gone through again one by
one, in order, by the same checks that strict mode uses; that path may read the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_guard.core.journal import Operation
from hicache_guard.core.ledger import FREED, PageLedger
from hicache_guard.core.modes import Mode
from hicache_guard.core.verdict import HostCopy

if TYPE_CHECKING:
    from hicache_guard.core.guard import PoolGuard

#: Notes after which the backlog is settled even if nobody asks.
MAX_NOTES = 512


@dataclass(slots=True)
class HandedOut:
    """``count`` pages that just left a free list, of which ``rest`` is what remained.

    Or, with a count of 0, the pages themselves.
    """

    operation: Operation
    ledger: PageLedger
    rest: torch.Tensor
    count: int

    def pages(self) -> torch.Tensor:
        """The page ids (int64); they lie before the rest in the storage both were cut from."""
        if self.count == 0:
            return self.rest
        start = self.rest.storage_offset() - self.count
        return self.rest.as_strided((self.count,), (1,), start).clone()


@dataclass(slots=True)
class Mapped:
    """Entries ``full[i] -> window[i]`` (int64 or int32) that an allocation wrote.

    Of one-slot pages they are also the pages that it took.
    """

    operation: Operation
    full: torch.Tensor
    window: torch.Tensor


@dataclass(slots=True)
class Continued:
    """An extension after the slots ``last``, whose entries read ``window`` then.

    ``lengths`` are the tokens that each request had before it.
    """

    operation: Operation
    last: torch.Tensor
    window: torch.Tensor
    lengths: torch.Tensor


@dataclass(slots=True)
class Freed:
    """A free of consecutive slots from a page boundary, or of slots of one-slot pages.

    ``heads`` (int64) are its full slots, one a page, and ``last`` the last slot that it names of
    ``slots``. ``full`` says that the full side is freed, ``window`` holds the entries that lead to
    the window side (None where that is not freed), which must all lead somewhere if ``mapped``.
    ``peers`` are the entries of all slots where the full side is freed alone; they should be empty.
    ``queued`` for a free in an open group: its pages reach the free list when the group ends,
    perhaps after this note was settled.
    """

    operation: Operation
    heads: torch.Tensor
    last: torch.Tensor
    slots: int
    full: bool
    window: torch.Tensor | None = None
    mapped: bool = False
    peers: torch.Tensor | None = None
    queued: bool = False


@dataclass(slots=True)
class Held:
    """What a free list is about to receive: slots, or page ids (``pages``).

    ``admit`` puts what it is given into the free list; in observe mode that has happened already.
    ``direct`` where no public free stands behind it, so that nothing else checks it.
    """

    operation: Operation
    ledger: PageLedger
    items: torch.Tensor
    pages: bool
    direct: bool
    admit: Callable[[torch.Tensor], None]

    def page_ids(self) -> torch.Tensor:
        slots = self.items * self.ledger.page_size if self.pages else self.items
        return self.ledger.pages_of(slots)


@dataclass(slots=True)
class Batch:
    """Notes that are being checked together. ``wrong`` counts what is not plainly in order."""

    continued: list[Continued]
    frees: list[Freed]
    held: list[Held]
    vouched: list[tuple[PageLedger, torch.Tensor]]
    wrong: HostCopy


class Backlog:
    """Notes in the order of their operations: allocations first, then frees; then the next batch.

    An allocation that follows noted frees starts by settling them, so order is never lost; where
    the device has not answered by then, later notes wait their turn behind the batch under way.
    """

    def __init__(self, guard: PoolGuard) -> None:
        self._guard = guard
        self._handed_out: list[HandedOut] = []
        self._mapped: list[Mapped] = []
        self._continued: list[Continued] = []
        self._frees: list[Freed] = []
        self._held: list[Held] = []
        self._vouched: list[tuple[PageLedger, torch.Tensor]] = []
        self._batch: Batch | None = None
        self._settling = False
        self._held_slots = {guard.full.name: 0, guard.window.name: 0}
        #: Whether a free waits to be checked.
        self.has_frees = False

    @property
    def empty(self) -> bool:
        return not (self.has_frees or self._handed_out or self._mapped or self._continued)

    def held_slots(self, ledger: PageLedger) -> int:
        """Slots that are on their way into the free list of ``ledger``'s pool."""
        return 0 if self._settling else self._held_slots[ledger.name]

    @property
    def long(self) -> bool:
        """Whether so much has gathered that it should be settled at the end of this operation.

        Not before: a free and what it releases are noted one after the other.
        """
        return len(self._frees) > MAX_NOTES or len(self._mapped) > MAX_NOTES

    def note_allocation(self, entry: HandedOut | Mapped | Continued) -> None:
        """Add what an allocation did."""
        if type(entry) is Mapped:
            self._mapped.append(entry)
        elif type(entry) is HandedOut:
            self._handed_out.append(entry)
        else:
            self._continued.append(entry)  # type: ignore[arg-type]

    def note_free(self, entry: Freed) -> None:
        """Add a free that is to be checked."""
        self.has_frees = True
        self._frees.append(entry)

    def hold(self, entry: Held) -> None:
        """Add what a free list is about to receive (enforce), or has just received (observe)."""
        self.has_frees = True
        self._held.append(entry)
        if self._guard.mode is Mode.ENFORCE:
            slots = entry.items.shape[0] * (entry.ledger.page_size if entry.pages else 1)
            self._held_slots[entry.ledger.name] += slots

    def clear(self) -> None:
        """Forget everything: the pools were emptied."""
        self._handed_out, self._mapped, self._continued = [], [], []
        self._frees, self._held, self._vouched, self._batch = [], [], [], None
        self._forget_frees()

    def _forget_frees(self) -> None:
        self.has_frees = False
        self._held_slots = dict.fromkeys(self._held_slots, 0)

    def vouch(self, ledger: PageLedger, pages: torch.Tensor) -> None:
        """``pages`` (int64) were checked already and are queued for release with what is noted."""
        if self._guard.lazy:  # else each release is checked when it comes
            self._vouched.append((ledger, pages))

    def group_ends(self) -> None:
        """What an open group queued comes now: frees still noted are checked together with it."""
        for note in self._frees:
            note.queued = False

    def settle(self, *, wait: bool = True) -> bool:
        """Run the checks that are due; returns whether nothing is left to do.

        With ``wait`` False, a check whose result has not arrived stays under way.
        """
        if self._settling:
            return False
        self._settling = True
        try:
            while not self.empty:
                if not self._settle_one(wait):
                    return False
            return True
        finally:
            self._settling = False

    def _settle_one(self, wait: bool) -> bool:
        if self._batch is None:
            self._apply_allocations()
            if not (self._continued or self.has_frees):
                return True
            taken = (self._continued, self._frees, self._held)
            self._continued, self._frees, self._held = [], [], []
            vouched: list[tuple[PageLedger, torch.Tensor]] = []
            if any(not held.direct for held in taken[2]):
                # What was vouched for waits until what was queued with it comes.
                vouched, self._vouched = self._vouched, []
            self._batch = Batch(*taken, vouched, HostCopy(self._suspicious(*taken)))
        batch = self._batch
        if not batch.wrong.arrived():
            if not wait:
                return False
            self._guard.tally.waits += 1
            batch.wrong.wait()
        self._batch = None
        if not (self._frees or self._held):
            self._forget_frees()
        if batch.wrong.values()[0] == 0:
            self._accept(batch)
        else:
            self._go_through(batch)
        return True

    # -- allocations ---------------------------------------------------------------------------

    def _apply_allocations(self) -> None:
        guard = self._guard
        for ledger in (guard.full, guard.window):
            notes = [note for note in self._handed_out if note.ledger is ledger]
            if not notes:
                continue
            pages = [note.pages() for note in notes]
            for note, gone in zip(notes, pages, strict=True):
                guard.journal.touch(note.operation, "allocated", ledger.name, gone)
            serials = [note.operation.serial for note in notes]
            ledger.hand_out(_joined(pages), _spread(serials, pages))
        if self._mapped:
            full = [note.full for note in self._mapped]
            serials = [note.operation.serial for note in self._mapped]
            window = [note.window for note in self._mapped]
            rows, targets = _joined(full).long(), _joined(window).long()
            spread = _spread(serials, full)
            if guard.page_size == 1:
                guard.full.hand_out(rows, spread)
                guard.window.hand_out(targets, spread)
                for fresh in self._mapped:
                    for ledger, taken in ((guard.full, fresh.full), (guard.window, fresh.window)):
                        guard.journal.touch(fresh.operation, "allocated", ledger.name, taken)
            guard.map.record(rows, targets, spread)
        self._handed_out.clear()
        self._mapped.clear()

    # -- bulk ----------------------------------------------------------------------------------

    def _suspicious(
        self, continued: list[Continued], noted: list[Freed], held: list[Held]
    ) -> torch.Tensor:
        """How many of the notes' slots are not plainly in order (0-dim int64)."""
        guard = self._guard
        counts = []
        if continued:
            last = _joined([note.last for note in continued]).long()
            window = _joined([note.window for note in continued]).long()
            lengths = _joined([note.lengths for note in continued])
            continues = (lengths % guard.page_size != 0) & (last >= 0)
            rows = torch.where(continues, last, 0).clamp_(max=guard.map.mapping.numel() - 2)
            entries = torch.where(continues, window, 0)
            wrong = ~guard.map.proved(rows, entries) | (continues & (entries == 0))
            counts.append(wrong.sum())
        frees = [note for note in noted if note.full]
        direct = [note for note in held if note.direct]
        full_pages = [note.page_ids() for note in direct if note.ledger is guard.full]
        if frees:
            full_pages.append(guard.full.pages_of(_joined([note.heads for note in frees])))
        window_pages = [note.page_ids() for note in direct if note.ledger is guard.window]
        followed = [note for note in noted if note.window is not None]
        if followed:
            rows = _joined([note.heads for note in followed])
            entries = _joined([note.window for note in followed if note.window is not None])
            known = rows.clamp(0, guard.map.mapping.numel() - 2)
            wrong = ~guard.map.proved(known, entries) | (known != rows) | (entries < 0)
            if any(note.mapped for note in followed):
                wrong |= entries == 0
            counts.append(wrong.sum())
            window_pages.append(guard.window.pages_of(entries))
        peers = [note.peers for note in noted if note.peers is not None]
        if peers:
            counts.append((_joined(peers) != 0).sum())
        for ledger in (guard.full, guard.window):
            queued = [n.page_ids() for n in held if n.ledger is ledger and not n.direct]
            if queued:
                counts.append(ledger.repeated(_joined(queued)).sum())
        for ledger, parts in ((guard.full, full_pages), (guard.window, window_pages)):
            if not parts:
                continue
            pages = _joined(parts)
            wrong = ledger.generations(pages) >= FREED
            wrong |= ledger.repeated(pages)
            if ledger is guard.window:
                wrong &= pages > 0  # an empty entry leads nowhere; judged above where it matters
            counts.append(wrong.sum())
        none = torch.zeros((), dtype=torch.int64, device=guard.device)
        return torch.stack([none, *counts]).sum()

    def _accept(self, batch: Batch) -> None:
        """Everything is in order: end the generations and admit what was held."""
        guard = self._guard
        serial = guard.serial
        for ledger in (guard.full, guard.window):
            notes = [note for note in batch.held if note.ledger is ledger]
            if not notes:
                continue
            pages = [note.page_ids() for note in notes]
            for note, gone in zip(notes, pages, strict=True):
                guard.journal.touch(note.operation, "freed", ledger.name, gone)
            ledger.release(_joined(pages), serial)
            if guard.mode is Mode.ENFORCE:
                for same in _runs(notes):
                    same[0].admit(_joined([note.items for note in same]))
        for freed in batch.frees:
            if freed.queued:
                self._pass_on(freed)
        self._note_named(batch)
        for note in batch.held:
            if note.direct and note.ledger is guard.full:
                guard.note_full_only(note.page_ids() * guard.page_size)

    def _pass_on(self, freed: Freed) -> None:
        """A queued free is in order: end its generations now, and vouch for it when it comes."""
        guard = self._guard
        pages = guard.full.pages_of(freed.heads)
        if freed.full:
            guard.full.release(pages, freed.operation.serial)
            self.vouch(guard.full, pages)
        if freed.window is not None:
            pages = guard.window.pages_of(freed.window)
            guard.window.release(pages, freed.operation.serial)
            self.vouch(guard.window, pages)

    def _note_named(self, batch: Batch) -> None:
        """Remember how far into its pages each free reached: all of each but its last."""
        guard = self._guard
        notes = [note for note in batch.frees if note.full]
        if guard.page_size == 1 or not notes:
            return
        guard.full.name_whole(guard.full.pages_of(_joined([note.heads for note in notes])))
        parts = [note for note in notes if note.slots % guard.page_size]
        if parts:
            last = _joined([note.last for note in parts])
            guard.full.note_named(last, guard.full.pages_of(last))

    # -- one by one ----------------------------------------------------------------------------

    def _go_through(self, batch: Batch) -> None:
        """Something is not in order: judge note by note, and admit only what was freed rightly."""
        guard = self._guard
        here = guard.operation
        rightly: dict[str, set[int]] = {guard.full.name: set(), guard.window.name: set()}
        for ledger, pages in batch.vouched:
            rightly[ledger.name].update(page for page in pages.tolist() if page)
        for note in batch.continued:
            guard.operation = note.operation
            guard.recheck_continued(note.last, note.window, note.lengths)
        for freed in batch.frees:
            guard.operation = freed.operation
            full, window = guard.recheck_free(freed)
            rightly[guard.full.name] |= full
            rightly[guard.window.name] |= window
        came = {name: set[int]() for name in rightly}
        self._note_named(batch)
        for held in batch.held:
            guard.operation = held.operation
            if held.direct:
                self._judge_direct(held)
            else:
                came[held.ledger.name].update(held.page_ids().tolist())
                self._admit_right(held, rightly[held.ledger.name])
        if any(freed.queued for freed in batch.frees):
            for ledger in (guard.full, guard.window):
                due = sorted(rightly[ledger.name] - came[ledger.name])
                self.vouch(ledger, torch.tensor(due, dtype=torch.int64, device=guard.device))
        guard.operation = here
        guard.mapping_suspect = guard.mapping_suspect or guard.mode is Mode.OBSERVE

    def _judge_direct(self, held: Held) -> None:
        guard = self._guard
        vetted = guard.vet_release(
            held.ledger, held.items, pages=held.pages, distinct=True, padding_expected=False
        )
        pages = held.page_ids()
        if held.ledger is guard.full:
            guard.note_full_only(pages * guard.page_size)
        if guard.mode is Mode.ENFORCE:
            kept = held.items[~vetted.bad]
            guard.released(held.ledger, pages[~vetted.bad] * guard.page_size)
            if kept.numel():
                held.admit(kept)
        else:
            guard.released(held.ledger, pages * guard.page_size)

    def _admit_right(self, held: Held, rightly: set[int]) -> None:
        guard = self._guard
        pages = held.page_ids()
        if guard.mode is not Mode.ENFORCE:
            guard.released(held.ledger, pages * guard.page_size)
            return
        keep = []
        for page in pages.tolist():
            keep.append(page in rightly)
            rightly.discard(page)
        kept = torch.tensor(keep, dtype=torch.bool, device=pages.device)
        guard.released(held.ledger, pages[kept] * guard.page_size)
        if any(keep):
            held.admit(held.items[kept])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _spread(serials: list[int], parts: list[torch.Tensor]) -> int | torch.Tensor:
    """One serial for all parts, or an int32 tensor with each part's serial at its elements."""
    if len(parts) == 1:
        return serials[0]
    spread = np.repeat(np.array(serials, dtype=np.int32), [part.numel() for part in parts])
    return torch.from_numpy(spread).to(parts[0].device, non_blocking=True)


def _runs(notes: list[Held]) -> list[list[Held]]:
    """Notes of one pool by what they hold: slots together, page ids together."""
    groups: dict[bool, list[Held]] = {}
    for note in notes:
        groups.setdefault(note.pages, []).append(note)
    return list(groups.values())
