"""What a prefix tree holds to prove its KV: when it last vouched for each full page.

A tree remembers tokens and slot numbers. That a slot still holds what was computed for those tokens
is proved by one serial a page, that of the operation after which the tree took the page over:

    generation of the full page <= since      the page was not freed or recycled since
    stamp of its mapping entry   <= since      nor was its window side given another slot

A free raises the generation above every serial (see ``ledger``), so "live" is part of the first
line. Where the tree renews the window side on purpose (a tombstone is recovered, KV is loaded back)
it vouches again. Splitting, merging and moving nodes changes nothing here: pages are not nodes.
"""

from __future__ import annotations

import torch

from hicache_guard.core.gathered import Gathered
from hicache_guard.core.ledger import PageLedger
from hicache_guard.core.undo import UndoLogs
from hicache_guard.core.windowmap import WindowMap


class Witness:
    """The serial (int32) at which a tree last vouched for each page of ``ledger``; 0 for never.

    Costs 4 bytes a page.
    """

    def __init__(self, ledger: PageLedger, device: torch.device, undo: UndoLogs) -> None:
        self._ledger = ledger
        self._undo = undo
        self._device = device
        self.reset()

    def reset(self) -> None:
        """No tree holds anything; the pool may have another size now."""
        self.since = torch.zeros(self._ledger.pages + 2, dtype=torch.int32, device=self._device)

    def forget(self) -> None:
        """A tree was emptied: it holds nothing."""
        self.since.zero_()

    def vouch(self, slots: torch.Tensor, serial: int) -> None:
        """A tree takes the pages of ``slots`` (int64) over, as they are after this operation."""
        pages = self._ledger.pages_of(slots)
        self._undo.save(self.since, pages)
        self.since.index_fill_(0, pages, serial)
        # By fills, which know no index of a host: neither stands for a page.
        self.since[:1].zero_()
        self.since[-1:].zero_()

    def renew(self, slots: torch.Tensor, serial: int) -> None:
        """The window side of ``slots`` (int64) was renewed; only what was held is held on."""
        pages = self._ledger.pages_of(slots)
        self._undo.save(self.since, pages)
        since = self.since.index_select(0, pages)
        holds = self._ledger.generations(pages) <= since
        self.since.scatter_(0, pages, torch.where(holds, serial, since).to(torch.int32))

    def resident(self, slots: torch.Tensor) -> torch.Tensor:
        """Mask (bool) of the ``slots`` (int64) whose page is the one that the tree took over."""
        pages = self._ledger.pages_of(slots)
        return self._ledger.generations(pages) <= self.since.index_select(0, pages)

    def any_resident(self, named: Gathered) -> torch.Tensor:
        """Whether (0-dim bool) a tree holds a page that is named."""
        pages = named.pages_in(self._ledger)
        return (self._ledger.generations(pages) <= self.since.index_select(0, pages)).any()

    def live(self, slots: torch.Tensor, book: WindowMap, entries: torch.Tensor) -> torch.Tensor:
        """Mask (bool) of the ``slots`` whose window side, too, is what the tree took over.

        ``entries`` (int64) are the slots' mapping entries as they were read.
        """
        since = self.since.index_select(0, self._ledger.pages_of(slots))
        rows = slots.clamp(0, book.mapping.shape[0] - 2)
        held = book.stamp.index_select(0, rows) <= since
        return held & self.resident(slots) & book.leads(slots, entries)

    def rebase(self, shift: int, book: WindowMap) -> None:
        """Subtract ``shift`` from every serial of what is still held, and forget the rest.

        To be called before the ledger and the mapping's book are rebased.
        """
        pages = torch.arange(self.since.shape[0], device=self.since.device)
        holds = self._ledger.generations(pages) <= self.since
        rows = torch.arange(book.mapping.shape[0] - 1, device=self.since.device)
        newer = book.stamp[:-1] > self.since.index_select(0, self._ledger.pages_of(rows))
        holds.index_put_((self._ledger.pages_of(rows[newer]),), torch.zeros((), dtype=torch.bool))
        self.since.copy_(torch.where(holds, (self.since - shift).clamp_(min=1), 0))

    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.since.nbytes
