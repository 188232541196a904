"""The versioned full-to-window mapping: who wrote an entry, when, and whether it still holds.

The mapping tensor itself belongs to SGLang and is only referred to. Beside it stand a *stamp* for
each full slot (the serial of the operation that wrote the entry) and an *owner* for each window
slot (the one full slot that may release it). An entry is proved by

    stamp >= generation of its window page        (the window page was not recycled since)
    stamp >= generation of its full page          (nor the full page)
    owner[window slot] == full slot               (nobody else was given the window slot since)

The *epoch* is the mapping's version: the tensor's identity and its in-place write counter, both
known to the host. A translation that was read at one epoch proves nothing at another; and while
every write came through the seams, the entries need not be read again to be trusted.
"""

from __future__ import annotations

import torch

from hicache_guard.core.gathered import Gathered
from hicache_guard.core.ledger import FREED, PageLedger, any_differs
from hicache_guard.core.undo import UndoLogs


class WindowMap:
    """Stamps and owners beside a mapping.

    ``mapping`` is int64 of ``full slots + page_size + 1`` entries whose last is -1, as SGLang lays
    it out; 0 means "no window slot". Costs 4 bytes a full slot and 4 a window slot.
    """

    def __init__(
        self, mapping: torch.Tensor, full: PageLedger, window: PageLedger, undo: UndoLogs
    ) -> None:
        self.mapping = mapping
        self._full = full
        self._window = window
        self._undo = undo
        #: The version of the mapping after the last write that came through a seam.
        self.seen = mapping._version
        self._allocate()

    def _allocate(self) -> None:
        device = self.mapping.device
        self.stamp = torch.zeros(self.mapping.numel(), dtype=torch.int32, device=device)
        window_slots = (self._window.pages + 2) * self._window.page_size
        self.owner = torch.zeros(window_slots, dtype=torch.int32, device=device)

    # -- epoch ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of in-place writes to the mapping so far. Host only."""
        return self.mapping._version

    def unseen_writes(self, mapping: torch.Tensor) -> bool:
        """Whether ``mapping`` was replaced or written since ``acknowledge``. Host only."""
        return mapping is not self.mapping or mapping._version != self.seen

    def acknowledge(self) -> None:
        """Declare every write so far as having come through the seams."""
        self.seen = self.mapping._version

    def adopt(self, mapping: torch.Tensor) -> None:
        """Refer to another mapping tensor from now on; its entries are unproved until written."""
        if mapping.numel() != self.mapping.numel():
            self.mapping = mapping
            self._allocate()
        self.mapping = mapping

    # -- writes --------------------------------------------------------------------------------

    def record(self, full: torch.Tensor, window: torch.Tensor, serial: int | torch.Tensor) -> None:
        """Entries ``full[i] -> window[i]`` were written; the window slots change hands.

        Both int64; ``serial`` as for ``PageLedger.hand_out``. What is out of range (a release in
        observe mode hands out what was freed wrongly) is recorded where it proves nothing.
        """
        full = full.clamp(0, self.stamp.shape[0] - 1)
        window = window.clamp(0, self.owner.shape[0] - 1)
        if self._undo:
            self._undo.save(self.stamp, full)
            self._undo.save(self.owner, window)
        if isinstance(serial, int):
            self.stamp.index_fill_(0, full, serial)
        else:
            self.stamp.scatter_(0, full, serial)
        self.owner.scatter_(0, window, full.to(torch.int32))

    def record_named(self, full: Gathered, window: Gathered) -> None:
        """As ``record``, for entries of several notes; ``full`` has their operations."""
        self.record(full.items, window.items, full.serials())

    def give_back(self, window: torch.Tensor) -> None:
        """Window slots (int64) changed hands by mistake: make those their owners who are mapped.

        Reads the device and the whole mapping: only after a fault.
        """
        rows = torch.isin(self.mapping[:-1], window[window > 0]).nonzero().reshape(-1)
        slots = self.mapping.index_select(0, rows)
        stamp = self.stamp.index_select(0, rows)
        born = self._full.generations(self._full.pages_of(rows))
        holds = (stamp >= born) & (born < FREED)
        holds &= stamp >= self._window.generations(self._window.pages_of(slots))
        order = stamp[holds].argsort()  # the newest entry last, so that it stays
        for row, slot in zip(rows[holds][order], slots[holds][order], strict=True):
            self.owner[slot] = row

    def held_by(self, full: torch.Tensor) -> torch.Tensor:
        """The live window slots (int64) that rows ``full`` were given and nobody else since.

        0 where there is none, or more than one. Costs the size of the window pool.
        """
        slots = torch.arange(self.owner.shape[0], device=self.owner.device)
        owner = self.owner.to(torch.int64)
        born = self._window.generations(self._window.pages_of(slots))
        holds = (owner > 0) & (born < FREED) & (self.stamp.index_select(0, owner) >= born)
        # And not in an earlier life of the row's own page.
        holds &= born >= self._full.generations(self._full.pages_of(owner))
        owner = torch.where(holds, owner, 0)
        nothing = torch.zeros(self.mapping.shape, dtype=torch.int64, device=slots.device)
        count = nothing.scatter_add(0, owner, torch.ones_like(slots))
        held = nothing.scatter_(0, owner, slots)
        return torch.where(count == 1, held, 0).index_select(0, full)

    def erase(self, full: torch.Tensor, keep: torch.Tensor) -> None:
        """Set the entries of ``full`` to 0 where ``keep`` is False (fixed shape)."""
        self._undo.save(self.mapping, full)
        entries = self.mapping.index_select(0, full)
        self.mapping.index_copy_(0, full, torch.where(keep, entries, 0))

    # -- proof ---------------------------------------------------------------------------------

    def proved(self, full: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """Mask (bool): each entry ``full[i] -> window[i]`` is empty or proved.

        A full page that is free already does not disprove an entry that was written while it was
        live: SGLang's trees free the full page first and its window peer right after.
        """
        stamp = self.stamp.index_select(0, full)
        window_live = stamp >= self._window.generations(self._window.pages_of(window))
        born = self._full.generations(self._full.pages_of(full))
        same_full = (stamp >= born) | (born >= FREED)
        owned = self.owner.index_select(0, window.clamp(0, self.owner.numel() - 1)) == full
        return (window == 0) | (window_live & same_full & owned)

    def leads(self, full: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """Mask (bool): ``full[i] -> window[i]`` leads to a window slot, and is proved.

        As ``proved``, of any numbers (int64): what is out of range leads nowhere.
        """
        rows = full.clamp(0, self.mapping.shape[0] - 2)
        inside = window.clamp(0, self.owner.shape[0] - 1)
        there = (rows == full) & (inside == window) & (window > 0)
        return there & self.proved(rows, inside)

    # Of many entries that nearly always hold only "does any of them not?" is asked first.

    def any_wrong_entry(
        self, rows: Gathered, entries: Gathered, *, some_empty: bool
    ) -> torch.Tensor:
        """Whether one of ``rows[i] -> entries[i]`` is out of range or not proved.

        An empty entry is no fault where ``some_empty``.
        """
        known = rows.items.clamp(0, self.mapping.shape[0] - 2)
        inside = entries.items.clamp(0, self.owner.shape[0] - 1)
        beyond = _any_beyond(rows.items, self.mapping.shape[0] - 2)
        beyond |= _any_beyond(entries.items, self.owner.shape[0] - 1)
        if some_empty:
            return beyond | (~self.proved(known, inside)).any()
        return beyond | self.any_unproved(known, inside) | (entries.items.min() < 1)

    def any_unproved(self, full: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """Whether (0-dim bool) one of the entries ``full[i] -> window[i]`` is empty or not proved.

        As ``proved``, for many entries (not empty, within range) that nearly always are.
        """
        stamp = self.stamp.index_select(0, full)
        window_age = stamp - self._window.generations(self._window.pages_of(window))
        born = self._full.generations(self._full.pages_of(full))
        born &= (born >> 30) - 1  # 0 where the full page is free already: that disproves nothing
        age = torch.minimum(window_age, stamp - born).min()
        owner = self.owner.index_select(0, window)
        return (age < 0) | any_differs(owner, full.to(torch.int32))

    def any_not_continued(
        self, slots: Gathered, window: Gathered, lengths: Gathered, *, back: int = 0
    ) -> torch.Tensor:
        """Whether a request continues after an entry that is empty or not proved.

        It continues after the entry ``back`` before ``slots[i] -> window[i]``, unless its page is
        full at ``lengths[i]`` or that slot is below 0.
        """
        last = slots.items - back
        continues = self._full.inside_page(lengths.items) & (last >= 0)
        rows = torch.where(continues, last, 0).clamp_(max=self.mapping.shape[0] - 2)
        entries = torch.where(continues, window.items - back, 0)
        return (~self.proved(rows, entries) | (continues & (entries == 0))).any()

    def any_mapped(self, slots: Gathered) -> torch.Tensor:
        """Whether a row of one of the full pages of ``slots`` has a window slot."""
        rows = self._full.rows_of(slots.pages_in(self._full))
        rows = rows.clamp(max=self.mapping.shape[0] - 2)
        return self.mapping.index_select(0, rows).max() > 0

    def aliases(self, full: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """The full slots (int64) that own ``window`` now and are not ``full``; 0 where none."""
        owner = self.owner.index_select(0, window).to(torch.int64)
        held = (owner != full) & (window > 0)
        held &= self.mapping.index_select(0, owner) == window
        held &= self.proved(owner, window)
        held &= self._full.generations(self._full.pages_of(owner)) < FREED
        return torch.where(held, owner, 0)

    def reset(self) -> None:
        """Forget every entry; the mapping was cleared as a whole."""
        if self.owner.numel() != (self._window.pages + 2) * self._window.page_size:
            self._allocate()
        self.stamp.zero_()
        self.owner.zero_()

    def rebase(self, shift: int) -> None:
        """Subtract ``shift`` from every stamp whose entry is proved; forget the others."""
        full = torch.arange(self.stamp.numel() - 1, device=self.stamp.device)
        holds = self.proved(full, self.mapping[:-1])
        shifted = (self.stamp[:-1] - shift).clamp_(min=1)
        self.stamp[:-1] = torch.where(holds, shifted, 0)

    def nbytes(self) -> int:
        """Bytes of device memory held, the mapping itself not counted."""
        return self.stamp.nbytes + self.owner.nbytes


def _any_beyond(items: torch.Tensor, most: int) -> torch.Tensor:
    """Whether (0-dim bool) an index lies outside 0..``most``, however far."""
    return (items.min() < 0) | (items.max() > most)
