"""Checks that need no answer yet, collected and run together.

Asking the device about one free costs some dozens of small operators, whatever its size; asking
about a hundred frees at once costs the same. So outside strict mode an operation only *notes* what
is to be checked, and what it would release is held back (enforce). The backlog is settled in bulk
when somebody needs the answer: before an allocation takes pages, when the free list is looked at,
before an operation of another kind, or when it grows long. Where the books are compiled none of
this is needed, and the backlog stays empty.

Bulk only asks "is all of this in order?". Where it is not, the notes are gone through again one by
one, in order, by the same checks that strict mode uses; that path may read the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hicache_guard.core.gathered import Gathered
from hicache_guard.core.journal import Operation
from hicache_guard.core.ledger import PageLedger, Releases, any_of
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
    settled. ``by_tree``: a prefix tree's own method freed them.
    """

    operation: Operation
    heads: torch.Tensor
    slots: int
    full: bool
    window: torch.Tensor | None = None
    mapped: bool = False
    queued: bool = False
    by_tree: bool = False

    def last(self, page_size: int) -> torch.Tensor:
        """The last slot that it names, where that is not the last of its page; else empty."""
        inside = self.slots % page_size
        return self.heads[-1:] + (inside - 1) if inside else self.heads[:0]


@dataclass(slots=True)
class Held:
    """What a free list is about to receive: slots, or page ids (``pages``).

    ``admit`` puts what it is given into the free list; in observe mode that has happened already.
    ``direct`` where no public free stands behind it, so that nothing else checks it; ``queued``
    where a group that ended had queued it, and it was vouched for.
    """

    operation: Operation
    ledger: PageLedger
    items: torch.Tensor
    pages: bool
    direct: bool
    admit: Callable[[torch.Tensor], None]
    queued: bool = False


def slots_of(held: Held) -> torch.Tensor:
    """The slots of what a free list is about to receive, each page's first where it is page ids."""
    return held.items * held.ledger.page_size if held.pages else held.items


#: The full and the window slots of decode steps.
Decoded = tuple[Gathered, Gathered]


@dataclass(slots=True)
class Batch:
    """Notes that are being checked together. ``wrong``: whether any is not plainly in order."""

    continued: list[Continued]
    decoded: list[Decoded]
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
        self._decoded: list[Decoded] = []
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
        due = self._handed_out or self._taken or self._decoded or self._continued
        return not (self.has_frees or due)

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
        return max(len(self._frees), len(self._taken), len(self._decoded)) > MAX_NOTES

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
        entry.by_tree = self._guard.trees_working
        if entry.by_tree and entry.full:
            self._guard.withdraw(entry.heads)
        self._frees.append(entry)

    def hold(self, entry: Held) -> None:
        """Add what a free list is about to receive (enforce), or has just received (observe)."""
        self.has_frees = True
        if entry.direct and entry.ledger is self._guard.full and self._guard.trees_working:
            self._guard.withdraw(slots_of(entry))
        self._held.append(entry)
        if self._guard.mode is Mode.ENFORCE:
            slots = entry.items.shape[0] * (entry.ledger.page_size if entry.pages else 1)
            self._held_slots[entry.ledger.name] += slots

    def clear(self) -> None:
        """Forget everything: the pools were emptied."""
        self._handed_out, self._taken, self._decoded, self._continued = [], [], [], []
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
            self._apply_allocations()
            if not (self._continued or self._decoded or self.has_frees):
                return True
            vouched: list[tuple[PageLedger, torch.Tensor]] = []
            if any(held.queued for held in self._held):
                # What was vouched for waits until what was queued with it comes.
                vouched, self._vouched = self._vouched, []
            taken = (self._continued, self._decoded, self._frees, self._held, vouched)
            self._continued, self._decoded, self._frees, self._held = [], [], [], []
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

    def hand_out(self) -> bool:
        """Record what was handed out and mapped, for kernels that read the books; never waits.

        Returns whether all of it is recorded. What a batch under way frees may have been handed out
        again in observe mode, where nothing is held back: then later notes wait behind it.
        """
        observes = self._guard.mode is Mode.OBSERVE
        if self._batch is not None and observes:
            self.settle(wait=False)
        if self._batch is None or not observes:
            self._apply_allocations()
        return not (self._handed_out or self._taken)

    def _apply_allocations(self) -> None:
        """Record what was handed out and mapped; decode steps are left to be checked."""
        guard = self._guard
        for ledger in (guard.full, guard.window):
            notes = [note for note in self._handed_out if note.ledger is ledger]
            if notes:
                pages = Gathered([n.pages for n in notes], [n.operation for n in notes])
                pages.touch(guard.journal, "allocated", ledger.name, pages.items)
                ledger.hand_out(pages.items, pages.serials())
        self._handed_out.clear()
        taken, self._taken = self._taken, []
        if not taken:
            return
        operations = [note.operation for note in taken]
        full = Gathered([note.full for note in taken], operations)
        window = Gathered([note.window for note in taken], operations)
        partly = full.counts() != window.counts()
        rows = Gathered([note.mapped() for note in taken], operations) if partly else full
        guard.map.record_named(rows, window)
        for ledger, slots in ((guard.full, full), (guard.window, window)):
            pages_begun = ledger.hand_out_slots(slots)
            slots.touch(guard.journal, "allocated", ledger.name, pages_begun)
        steps = [note for note in taken if note.each_continues]
        if not steps:
            return
        if len(steps) < len(taken):
            operations = [note.operation for note in steps]
            full = Gathered([note.full for note in steps], operations)
            window = Gathered([note.window for note in steps], operations)
        self._decoded.append((full, window))

    # -- bulk ----------------------------------------------------------------------------------

    def _suspicious(
        self,
        continued: list[Continued],
        decoded: list[Decoded],
        noted: list[Freed],
        held: list[Held],
        vouched: list[tuple[PageLedger, torch.Tensor]],
    ) -> torch.Tensor:
        """Whether (0-dim bool) any of the notes' slots is not plainly in order."""
        guard = self._guard
        full, window = guard.full, guard.window
        book = guard.map
        wrong: list[torch.Tensor] = []
        if continued:
            last = Gathered([note.last for note in continued])
            slots = Gathered([note.window for note in continued])
            lengths = Gathered([note.lengths for note in continued])
            wrong.append(book.any_not_continued(last, slots, lengths))
        if guard.page_size > 1:
            for rows, slots in decoded:
                wrong.append(book.any_not_continued(rows, slots, rows, back=1))
        frees = [note for note in noted if note.full]
        followed = [note for note in noted if note.window is not None]
        # Whatever a tree's own method freed it has withdrawn by then.
        named = [note.heads for note in frees]
        named += [slots_of(note) for note in held if note.direct and note.ledger is full]
        named += [note.heads for note in followed if not (note.full or note.by_tree)]
        if named:
            wrong.append(guard.witness.any_resident(Gathered(named)))
        alone = [note.heads for note in frees if note.window is None]
        if alone:
            wrong.append(book.any_mapped(Gathered(alone)))
        some_empty = not all(note.mapped for note in followed)
        entries = _named(followed, full=False)
        for rows, slots in zip(_named(followed, full=True), entries, strict=True):
            wrong.append(book.any_wrong_entry(rows, slots, some_empty=some_empty))
        for ledger, notes in ((full, frees), (window, followed)):
            queued = [note for note in notes if note.queued]
            if not queued and notes and ledger is window:
                backed = entries
            else:
                backed = _named([note for note in notes if not note.queued], full=ledger is full)
            mine = [note for note in held if note.ledger is ledger]
            vouch = [pages for side, pages in vouched if side is ledger]
            if not (notes or mine):
                continue
            due = Releases(
                direct=_held([note for note in mine if note.direct]),
                backed=backed,
                queued=_named(queued, full=ledger is full),
                came=_held([note for note in mine if not note.direct]),
                vouched=[Gathered(vouch, are_pages=True)] if vouch else [],
            )
            # An entry that is proved leads to a live page; an empty one leads nowhere.
            wrong.append(
                ledger.any_wrong_release(
                    due, vet_freed=ledger is full, some_empty=some_empty and ledger is window
                )
            )
        return any_of(wrong)

    def _accept(self, batch: Batch) -> None:
        """Everything is in order: end the generations and admit what was held."""
        guard = self._guard
        for ledger in (guard.full, guard.window):
            for are_pages in (True, False):
                same = [n for n in batch.held if n.ledger is ledger and n.pages is are_pages]
                if not same:
                    continue
                operations = [note.operation for note in same]
                held = Gathered([note.items for note in same], operations, are_pages=are_pages)
                pages = ledger.release_named(held)
                held.touch(guard.journal, "freed", ledger.name, pages)
                if guard.mode is Mode.ENFORCE:
                    same[0].admit(held.items)
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
        for ledger, notes in (
            (guard.full, [note for note in queued if note.full]),
            (guard.window, [note for note in queued if note.window is not None]),
        ):
            for named in _named(notes, full=ledger is guard.full):
                self.vouch(ledger, ledger.release_named(named))

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
        here, working = guard.operation, guard.trees_working
        guard.trees_working = False
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
        for all_rows, all_slots in batch.decoded:
            for (guard.operation, rows), (_, slots) in zip(
                all_rows.parts(), all_slots.parts(), strict=True
            ):
                guard.recheck_continued(rows - 1, slots - 1, rows, rows, slots)
        direct = [held for held in batch.held if held.direct]
        notes: list[Freed | Held] = [*batch.frees, *direct]
        for note in sorted(notes, key=_serial):
            guard.operation = note.operation
            if isinstance(note, Held):
                self._judge_direct(note)
                continue
            guard.trees_working = note.by_tree
            full, window = guard.recheck_free(note)
            guard.trees_working = False
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
        guard.operation, guard.trees_working = here, working
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
    return _joined([named.pages_in(ledger) for named in _held(notes)])


def _held(notes: list[Held]) -> list[Gathered]:
    """What is held by notes of one pool: page ids, slots, both or nothing."""
    pages = [note.items for note in notes if note.pages]
    slots = [note.items for note in notes if not note.pages]
    found = [Gathered(pages, are_pages=True)] if pages else []
    return [*found, Gathered(slots)] if slots else found


def _named(notes: list[Freed], *, full: bool) -> list[Gathered]:
    """The slots that frees name in the full pool, or lead to in the window pool, if any."""
    operations = [note.operation for note in notes]
    if full:
        slots = [note.heads for note in notes]
    else:
        slots = [note.window for note in notes if note.window is not None]
    return [Gathered(slots, operations)] if slots else []


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
