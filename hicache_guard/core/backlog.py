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
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_guard.core.journal import Journal, Operation
from hicache_guard.core.ledger import PageLedger, any_differs
from hicache_guard.core.modes import Mode
from hicache_guard.core.verdict import HostCopy

if TYPE_CHECKING:
    from hicache_guard.core.guard import PoolGuard

#: Notes after which the backlog is settled even if nobody asks.
MAX_NOTES = 512


@dataclass(slots=True)
class HandedOut:
    """``pages`` (int64) that an allocation on a sub-allocator alone took from its free list."""

    operation: Operation
    ledger: PageLedger
    pages: torch.Tensor


@dataclass(slots=True)
class Taken:
    """The full slots that an allocation returned, and the window slots of the last of them.

    Both int64 or int32. A new page is taken from its first slot on, so the slots tell which pages
    left the free lists. ``each_continues`` for a decode step, where a slot inside a page continues
    after the slot before it.
    """

    operation: Operation
    full: torch.Tensor
    window: torch.Tensor
    each_continues: bool

    def mapped(self) -> torch.Tensor:
        """The full slots that were mapped to ``window``."""
        count, slots = self.full.shape[0], self.window.shape[0]
        return self.full if count == slots else self.full[count - slots :]


@dataclass(slots=True)
class Continued:
    """What an extension took after the slots ``last``, whose entries read ``window`` then.

    ``lengths`` are the tokens that each request had before it.
    """

    taken: Taken
    last: torch.Tensor
    window: torch.Tensor
    lengths: torch.Tensor


@dataclass(slots=True)
class Freed:
    """A free of consecutive slots from a page boundary, or of slots of one-slot pages.

    ``heads`` (int64) are its full slots, one a page, of ``slots`` that it names. ``full`` says that
    the full side is freed, ``window`` holds the entries that lead to the window side (None where
    that is not freed), which must all lead somewhere if ``mapped``. ``queued`` for a free in an
    open group: its pages reach the free list when the group ends, perhaps after this note was
    settled.
    """

    operation: Operation
    heads: torch.Tensor
    slots: int
    full: bool
    window: torch.Tensor | None = None
    mapped: bool = False
    queued: bool = False

    def last(self, page_size: int) -> torch.Tensor:
        """The last slot that it names, where that is not the last of its page; else empty."""
        inside = self.slots % page_size
        return self.heads[-1:] + (inside - 1) if inside else self.heads[:0]


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


class Joined:
    """Tensors of several notes as one, with the serial of its note at each element."""

    def __init__(
        self, operations: list[Operation], parts: list[torch.Tensor], *, shared: bool = False
    ) -> None:
        """``shared`` where a part alone must be copied: it is a view of something larger."""
        self.operations = operations
        self.counts = [part.shape[0] for part in parts]
        if len(parts) > 1:
            self.items = torch.cat(parts)
        else:
            self.items = parts[0].clone() if shared else parts[0]
        if self.items.dtype != torch.int64:
            self.items = self.items.to(torch.int64)

    def serials(self) -> int | torch.Tensor:
        """One serial for all, or int32 with one for each element."""
        if len(self.operations) == 1:
            return self.operations[0].serial
        serials = np.array([operation.serial for operation in self.operations], dtype=np.int32)
        spread = torch.from_numpy(serials.repeat(self.counts))
        return spread.to(self.items.device, non_blocking=True)

    def parts(self) -> list[tuple[Operation, torch.Tensor]]:
        """Each operation with its elements."""
        parts = torch.split(self.items, self.counts)
        return list(zip(self.operations, parts, strict=True))

    def touch(self, journal: Journal, verb: str, pool: str, pages: torch.Tensor) -> None:
        """Tell the journal that each operation did ``verb`` to its part of ``pages``."""
        journal.touch(verb, pool, pages, self.operations, list(accumulate(self.counts)))


#: The full and the window slots of decode steps.
Decoded = tuple[Joined, Joined]


@dataclass(slots=True)
class Batch:
    """Notes that are being checked together. ``wrong``: whether any is not plainly in order."""

    continued: list[Continued]
    decoded: Decoded | None
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
        self._taken: list[Taken] = []
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
        return not (self.has_frees or self._handed_out or self._taken or self._continued)

    @property
    def withholds(self) -> bool:
        """Whether pages may be held back from a free list."""
        return self.has_frees and self._guard.mode is Mode.ENFORCE

    def held_slots(self, ledger: PageLedger) -> int:
        """Slots that are on their way into the free list of ``ledger``'s pool."""
        return 0 if self._settling else self._held_slots[ledger.name]

    @property
    def long(self) -> bool:
        """Whether so much has gathered that it should be settled at the end of this operation.

        Not before: a free and what it releases are noted one after the other.
        """
        return len(self._frees) > MAX_NOTES or len(self._taken) > MAX_NOTES

    def note_taken(
        self, full: torch.Tensor, window: torch.Tensor, *, each_continues: bool = False
    ) -> Taken:
        """Add what a hybrid allocation took and mapped; see ``Taken``."""
        # The caller may write into the full slots that it is given; the window's it never sees.
        taken = Taken(self._guard.current, full.clone(), window, each_continues)
        self._taken.append(taken)
        return taken

    def note_handed_out(self, entry: HandedOut) -> None:
        """Add what an allocation on one sub-allocator took."""
        self._handed_out.append(entry)

    def note_continued(self, entry: Continued) -> None:
        """Add what an extension went on after."""
        self._continued.append(entry)

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
        self._handed_out, self._taken, self._continued = [], [], []
        self._frees, self._held, self._vouched, self._batch = [], [], [], None
        self._forget_frees()

    def _forget_frees(self) -> None:
        self.has_frees = False
        self._held_slots = dict.fromkeys(self._held_slots, 0)

    def vouch(self, ledger: PageLedger, pages: torch.Tensor) -> None:
        """``pages`` (int64) were checked already and are queued for release with what is noted."""
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
            decoded = self._apply_allocations()
            if not (self._continued or decoded or self.has_frees):
                return True
            vouched: list[tuple[PageLedger, torch.Tensor]] = []
            if any(not held.direct for held in self._held):
                # What was vouched for waits until what was queued with it comes.
                vouched, self._vouched = self._vouched, []
            taken = (self._continued, decoded, self._frees, self._held, vouched)
            self._continued, self._frees, self._held = [], [], []
            self._batch = Batch(*taken, HostCopy(self._suspicious(*taken)))
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

    def _apply_allocations(self) -> Decoded | None:
        """Record what was handed out and mapped; returns the decode steps, to be checked."""
        guard = self._guard
        for ledger in (guard.full, guard.window):
            notes = [note for note in self._handed_out if note.ledger is ledger]
            if notes:
                pages = Joined([n.operation for n in notes], [n.pages for n in notes])
                pages.touch(guard.journal, "allocated", ledger.name, pages.items)
                ledger.hand_out(pages.items, pages.serials())
        self._handed_out.clear()
        taken, self._taken = self._taken, []
        if not taken:
            return None
        operations = [note.operation for note in taken]
        full = Joined(operations, [note.full for note in taken])
        # Window slots of one-slot pages are a piece of a free list, which must not stay alive.
        window = Joined(operations, [note.window for note in taken], shared=True)
        serials = full.serials()
        self._hand_out(guard.full, full, serials)
        if window.counts == full.counts:
            guard.map.record(full.items, window.items, serials)
            self._hand_out(guard.window, window, serials)
        else:
            rows = Joined(operations, [note.mapped() for note in taken])
            serials = window.serials()
            guard.map.record(rows.items, window.items, serials)
            self._hand_out(guard.window, window, serials)
        steps = [note for note in taken if note.each_continues]
        if len(steps) == len(taken) or not steps:
            return (full, window) if steps else None
        operations = [note.operation for note in steps]
        return (
            Joined(operations, [note.full for note in steps]),
            Joined(operations, [note.window for note in steps]),
        )

    def _hand_out(self, ledger: PageLedger, slots: Joined, serials: int | torch.Tensor) -> None:
        pages = ledger.hand_out_slots(slots.items, serials)
        slots.touch(self._guard.journal, "allocated", ledger.name, pages)

    # -- bulk ----------------------------------------------------------------------------------

    def _suspicious(
        self,
        continued: list[Continued],
        decoded: Decoded | None,
        noted: list[Freed],
        held: list[Held],
        vouched: list[tuple[PageLedger, torch.Tensor]],
    ) -> torch.Tensor:
        """Whether (0-dim bool) any of the notes' slots is not plainly in order."""
        guard = self._guard
        full, window = guard.full, guard.window
        wrong = []
        if continued:
            last = _joined([note.last for note in continued]).long()
            slots = _joined([note.window for note in continued]).long()
            lengths = _joined([note.lengths for note in continued])
            wrong.append(
                self._any_not_continued(last, slots, full.inside_page(lengths) & (last >= 0))
            )
        if decoded:
            rows, slots = decoded[0].items, decoded[1].items
            wrong.append(self._any_not_continued(rows - 1, slots - 1, full.inside_page(rows)))
        frees = [note for note in noted if note.full]
        followed = [note for note in noted if note.window is not None]
        alone = [note.heads for note in frees if note.window is None]
        if alone:
            peers = guard.page_rows(_joined(alone)).clamp_(max=guard.map.mapping.shape[0] - 2)
            wrong.append(guard.map.mapping.index_select(0, peers).max() > 0)
        some_empty = not all(note.mapped for note in followed)
        if followed:
            entries = _joined([note.window for note in followed if note.window is not None])
            rows = _joined([note.heads for note in followed])
            wrong += self._wrong_entries(rows, entries, some_empty=some_empty)
        for ledger, notes in ((full, frees), (window, followed)):
            freed = [ledger.pages_of(_joined(_named(notes, ledger is full)))] if notes else []
            direct = [note for note in held if note.ledger is ledger and note.direct]
            released = [note for note in held if note.ledger is ledger and not note.direct]
            pages = [_held_pages(ledger, direct)] if direct else []
            if pages:
                wrong.append(ledger.any_dead(pages[0]))
            if freed and ledger is full:  # an entry that is proved leads to a live page
                wrong.append(ledger.any_dead(freed[0]))
            if released:
                came = _held_pages(ledger, released)
                backed = [note for note in notes if not note.queued]
                allowed = [vouch for side, vouch in vouched if side is ledger]
                if len(backed) == len(notes):
                    allowed += freed
                elif backed:
                    allowed.append(ledger.pages_of(_joined(_named(backed, ledger is full))))
                wrong += [ledger.any_repeated(came), ledger.any_not_among(came, allowed)]
            pages += freed
            if pages and some_empty and ledger is window:  # an empty entry leads nowhere
                named = _joined(pages)
                wrong.append((ledger.repeated(named) & (named > 0)).any())
            elif pages:
                wrong.append(ledger.any_repeated(_joined(pages)))
        return torch.stack(wrong).any()

    def _wrong_entries(
        self, rows: torch.Tensor, entries: torch.Tensor, *, some_empty: bool
    ) -> list[torch.Tensor]:
        """What is wrong with the ``entries`` of ``rows`` that frees followed into the window pool.

        Each a 0-dim bool. ``some_empty`` where an empty entry is no fault.
        """
        book = self._guard.map
        known = rows.clamp(0, book.mapping.shape[0] - 2)
        inside = entries.clamp(0, book.owner.shape[0] - 1)
        wrong = [any_differs(known, rows), any_differs(inside, entries)]
        if some_empty:
            return [*wrong, (~book.proved(known, inside)).any()]
        return [*wrong, book.any_unproved(known, inside), entries.min() < 1]

    def _any_not_continued(
        self, last: torch.Tensor, window: torch.Tensor, continues: torch.Tensor
    ) -> torch.Tensor:
        """Whether any slot continues after one that is not proved to lead to a window slot."""
        guard = self._guard
        rows = torch.where(continues, last, 0).clamp_(max=guard.map.mapping.shape[0] - 2)
        entries = torch.where(continues, window, 0)
        return (~guard.map.proved(rows, entries) | (continues & (entries == 0))).any()

    def _accept(self, batch: Batch) -> None:
        """Everything is in order: end the generations and admit what was held."""
        guard = self._guard
        for ledger in (guard.full, guard.window):
            for are_pages in (True, False):
                same = [n for n in batch.held if n.ledger is ledger and n.pages is are_pages]
                if not same:
                    continue
                items = Joined([note.operation for note in same], [note.items for note in same])
                if are_pages:
                    pages = items.items.clamp(0, ledger.outside)
                else:
                    pages = ledger.pages_of(items.items)
                items.touch(guard.journal, "freed", ledger.name, pages)
                ledger.release(pages, items.serials())
                if guard.mode is Mode.ENFORCE:
                    same[0].admit(items.items)
        self._pass_on([note for note in batch.frees if note.queued])
        self._note_named(batch)
        direct = [note for note in batch.held if note.direct and note.ledger is guard.full]
        if direct:
            guard.note_full_only(_held_pages(guard.full, direct) * guard.page_size)

    def _pass_on(self, queued: list[Freed]) -> None:
        """Queued frees are in order: end their generations now, and vouch for them when they come.

        The pages are released a second time then, which changes nothing.
        """
        guard = self._guard
        full = [note for note in queued if note.full]
        window = [note for note in queued if note.window is not None]
        for ledger, notes, slots in (
            (guard.full, full, [note.heads for note in full]),
            (guard.window, window, [note.window for note in window if note.window is not None]),
        ):
            if notes:
                joined = Joined([note.operation for note in notes], slots)
                pages = ledger.pages_of(joined.items)
                ledger.release(pages, joined.serials())
                self.vouch(ledger, pages)

    def _note_named(self, batch: Batch) -> None:
        """Remember how far into its pages each free reached: all of each but its last."""
        guard = self._guard
        notes = [note for note in batch.frees if note.full]
        if guard.page_size == 1 or not notes:
            return
        guard.full.name_whole(guard.full.pages_of(_joined([note.heads for note in notes])))
        parts = [note.last(guard.page_size) for note in notes if note.slots % guard.page_size]
        if parts:
            last = _joined(parts)
            guard.full.note_named(last, guard.full.pages_of(last))

    # -- one by one ----------------------------------------------------------------------------

    def _go_through(self, batch: Batch) -> None:
        """Something is not in order: judge note by note, and admit only what was freed rightly."""
        guard = self._guard
        here = guard.operation
        rightly: dict[str, set[int]] = {guard.full.name: set(), guard.window.name: set()}
        for ledger, pages in batch.vouched:
            rightly[ledger.name].update(page for page in pages.tolist() if page)
        for extension in batch.continued:
            taken = extension.taken
            guard.operation = taken.operation
            rows, slots = taken.mapped().long(), taken.window.long()
            guard.recheck_continued(
                extension.last, extension.window, extension.lengths, rows, slots
            )
        if batch.decoded:
            for (guard.operation, rows), (_, slots) in zip(
                batch.decoded[0].parts(), batch.decoded[1].parts(), strict=True
            ):
                guard.recheck_continued(rows - 1, slots - 1, rows, rows, slots)
        direct = [held for held in batch.held if held.direct]
        notes: list[Freed | Held] = [*batch.frees, *direct]
        for note in sorted(notes, key=_serial):
            guard.operation = note.operation
            if isinstance(note, Held):
                self._judge_direct(note)
                continue
            full, window = guard.recheck_free(note)
            rightly[guard.full.name] |= full
            rightly[guard.window.name] |= window
        came = {name: set[int]() for name in rightly}
        self._note_named(batch)
        for held in batch.held:
            if not held.direct:
                guard.operation = held.operation
                came[held.ledger.name].update(page_ids(held).tolist())
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
        pages = page_ids(held)
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
        pages = page_ids(held)
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


def _serial(note: Freed | Held) -> int:
    return note.operation.serial


def page_ids(held: Held) -> torch.Tensor:
    """The page ids (int64, within the ledger) of what is held."""
    ledger = held.ledger
    return ledger.pages_of(held.items * ledger.page_size if held.pages else held.items)


def _held_pages(ledger: PageLedger, notes: list[Held]) -> torch.Tensor:
    """The page ids (int64, within the ledger) of several notes of one pool."""
    parts = [note.items for note in notes if note.pages]
    slots = [note.items for note in notes if not note.pages]
    if slots:
        parts.append(ledger.pages_of(_joined(slots)))
    return _joined(parts).to(torch.int64).clamp(0, ledger.outside)


def _named(notes: list[Freed], full: bool) -> list[torch.Tensor]:
    """The slots that frees name in the full pool, or lead to in the window pool."""
    if full:
        return [note.heads for note in notes]
    return [note.window for note in notes if note.window is not None]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
