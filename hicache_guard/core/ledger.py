"""Which pages of one pool are live, and since when: the generation of every page.

A generation is the serial number of the operation that handed the page out. Serials only grow, so
a page that is freed and handed out again has a larger generation, and anything stamped earlier is
known to be stale by one comparison. A freed page holds ``FREED`` plus the serial of the operation
that freed it, which is larger than every stamp: "live" and "not older than" are the same test.

All methods are vectorised torch with shapes fixed by their inputs; none reads the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache_guard.core.gathered import Gathered
from hicache_guard.core.undo import UndoLogs

#: Added to the serial of a free.
FREED = 1 << 30
#: Added besides to a page that was freed rightly and is still on its way to the free list.
QUEUED = 1 << 29
#: The serial in a generation. Serials stay below; see ``rebase``.
SERIAL = QUEUED - 1
#: Elements of a count that is kept instead of being made anew for each check.
_ORDER = 1 << 16


@dataclass(slots=True)
class Releases:
    """What is about to be released to one pool, each a list of what several notes name.

    ``direct`` comes to the free list with no free behind it. ``backed`` and ``queued`` are what
    frees name, now and when their group ends; ``came`` is what they release. ``vouched``: pages
    checked before that may come as well.
    """

    direct: list[Gathered]
    backed: list[Gathered]
    queued: list[Gathered]
    came: list[Gathered]
    vouched: list[Gathered]


class PageLedger:
    """Generations of the pages of one pool.

    ``pages`` usable pages of ``page_size`` slots are numbered 1 to ``pages``; page 0 is padding and
    belongs to nobody. Costs 12 bytes a page (8 where a page is one slot).
    """

    def __init__(
        self, name: str, pages: int, page_size: int, device: torch.device, undo: UndoLogs
    ) -> None:
        self.name = name
        self.pages = pages
        self.page_size = page_size
        self.outside = pages + 1  # stands for every page beyond the pool; never live
        # A shift costs a tenth of a division; page sizes are powers of two in practice.
        self._shift = page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else None
        self._order = torch.arange(0, dtype=torch.int32, device=device)
        self._undo = undo
        self.born = torch.full((pages + 2,), FREED, dtype=torch.int32, device=device)
        self._claims = torch.zeros(pages + 2, dtype=torch.int32, device=device)
        # How many leading slots of a page its last free named; a page of one slot has no parts.
        parted = pages + 2 if page_size > 1 else 0
        self.named = torch.zeros(parted, dtype=torch.int32, device=device)

    def pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Page ids (int64) of slot indices; below the pool is page 0, beyond it ``outside``.

        SGLang keeps the rows of its request table in int32, so frees come in either type.
        """
        slots = slots.to(torch.int64)
        if self.page_size == 1:
            return slots.clamp(0, self.outside)
        if self._shift is not None:
            return (slots >> self._shift).clamp_(0, self.outside)
        return slots.div(self.page_size, rounding_mode="floor").clamp_(0, self.outside)

    def inside_page(self, slots: torch.Tensor) -> torch.Tensor:
        """Mask (bool) of the slots (int64) that are not the first of their page."""
        if self._shift is not None:
            return slots & (self.page_size - 1) != 0
        return slots % self.page_size != 0

    def rows_of(self, pages: torch.Tensor) -> torch.Tensor:
        """Every slot (int64) of ``pages`` (int64), page by page."""
        if self.page_size == 1:
            return pages
        offsets = torch.arange(self.page_size, device=pages.device)
        return (pages[:, None] * self.page_size + offsets).reshape(-1)

    def generations(self, pages: torch.Tensor) -> torch.Tensor:
        """Generations (int32) of page ids in 0..``outside``."""
        return self.born.index_select(0, pages)

    def hand_out(self, pages: torch.Tensor, serial: int | torch.Tensor) -> None:
        """Start a new generation of ``pages`` (int64 page ids in range).

        ``serial`` is that of the operation, or int32 with one for each page.
        """
        self._undo.save(self.born, pages)
        if isinstance(serial, int):
            self.born.index_fill_(0, pages, serial)
        else:
            self.born.scatter_(0, pages, serial)

    def hand_out_slots(self, slots: Gathered) -> torch.Tensor:
        """Start a new generation of the pages that begin in ``slots``.

        A page is handed out from its first slot on, so the slots that an allocation returns name
        each page that it took by that slot. Returns the page of each slot, ``outside`` for others.
        """
        pages = self.pages_of(slots.items)
        if self.page_size > 1:
            pages.masked_fill_(self.inside_page(slots.items), self.outside)
        self.hand_out(pages, slots.serials())
        self.born[self.outside :].fill_(FREED)
        return pages

    def release(self, pages: torch.Tensor, serial: int | torch.Tensor) -> None:
        """End the generation of ``pages`` (int64 page ids in 0..``outside``); as ``hand_out``."""
        self._undo.save(self.born, pages)
        if isinstance(serial, int):
            self.born.index_fill_(0, pages, FREED | serial)
        else:
            self.born.scatter_(0, pages, serial | FREED)

    def queue(self, pages: torch.Tensor, serial: int) -> None:
        """As ``release``, of pages that come to the free list later; only page 0 may not be one."""
        self.release(pages, QUEUED | serial)
        self.born[:1].fill_(FREED)

    def release_named(self, named: Gathered) -> torch.Tensor:
        """End the generation of the pages that are named; returns the page of each item."""
        pages = named.pages_in(self)
        self.release(pages, named.serials())
        return pages

    def repeated(self, pages: torch.Tensor) -> torch.Tensor:
        """Mask (bool) of all but one occurrence of each page id in ``pages``."""
        order, claimed = self._claim(pages)
        return claimed != order

    def _claim(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Let each position claim its page; returns the positions and who holds each page now."""
        count = pages.shape[0]
        if count > _ORDER:
            order = torch.arange(count, dtype=torch.int32, device=pages.device)
        else:
            if count > self._order.shape[0]:
                self._order = torch.arange(_ORDER, dtype=torch.int32, device=pages.device)
            order = self._order[:count]
        self._claims.scatter_(0, pages, order)
        return order, self._claims.index_select(0, pages)

    # Of many slots that are nearly always in order only "is any of them not?" is asked first. A
    # difference and its largest element cost a fourth of a comparison and a count of its mask.

    def any_dead(self, named: Gathered) -> torch.Tensor:
        """Whether a page that is named is not live."""
        return self.generations(named.pages_in(self)).max() >= FREED

    def any_repeated(self, named: list[Gathered], *, besides_padding: bool = False) -> torch.Tensor:
        """Whether a page is named twice by all of ``named``; page 0 may be ``besides_padding``."""
        parts = [part.pages_in(self) for part in named]
        pages = parts[0] if len(parts) == 1 else torch.cat(parts)
        if besides_padding:
            return (self.repeated(pages) & (pages > 0)).any()
        order, claimed = self._claim(pages)
        return any_differs(claimed, order)

    def any_not_among(self, named: Gathered, allowed: list[Gathered]) -> torch.Tensor:
        """Whether a page that is named is page 0, or not among those ``allowed``."""
        pages = named.pages_in(self)
        self._claims.index_fill_(0, pages, 0)
        for part in allowed:
            self._claims.index_fill_(0, part.pages_in(self), 1)
        self._claims[:1].zero_()
        return self._claims.index_select(0, pages).min() < 1

    def any_wrong_release(
        self, due: Releases, *, vet_freed: bool, some_empty: bool
    ) -> torch.Tensor:
        """Whether any page is freed twice, while it is free, or comes without a free.

        ``vet_freed`` where what frees name must be live, ``some_empty`` where page 0 stands for
        "none" among it.
        """
        wrong = [self.any_dead(named) for named in due.direct]
        freed = [*due.backed, *due.queued]
        if vet_freed:
            wrong += [self.any_dead(named) for named in freed]
        if due.came:
            wrong.append(self.any_repeated(due.came))
            allowed = [*due.backed, *due.vouched]
            wrong += [self.any_not_among(named, allowed) for named in due.came]
        if due.direct or freed:
            named = [*due.direct, *freed]
            wrong.append(self.any_repeated(named, besides_padding=some_empty))
        return any_of(wrong)

    def later_part(self, slots: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Mask (bool) of slots that look like the rest of a page freed in parts earlier.

        The earlier free named the first k slots of the page; this call names none of those. Where
        the page was handed out again in between, freeing it now would take it from its new owner.
        """
        if self.page_size == 1:
            return torch.zeros_like(pages, dtype=torch.bool)
        offsets = self._offsets(slots, pages)
        self._claims.index_fill_(0, pages, self.page_size)
        self._claims.scatter_reduce_(0, pages, offsets, "amin")
        first = self._claims.index_select(0, pages)
        named = self.named.index_select(0, pages)
        return (named > 0) & (first >= named)

    def note_named(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        """Remember how far into each page the slots of this free reach."""
        if self.page_size == 1:
            return
        self._undo.save(self.named, pages)
        self.named.index_fill_(0, pages, 0)
        self.named.scatter_reduce_(0, pages, self._offsets(slots, pages) + 1, "amax")

    def name_whole(self, pages: torch.Tensor) -> None:
        """Remember that a free named every slot of ``pages`` (int64 page ids in 0..``outside``)."""
        if self.page_size > 1:
            self._undo.save(self.named, pages)
            self.named.index_fill_(0, pages, self.page_size)

    def _offsets(self, slots: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        return (slots - pages * self.page_size).clamp_(0, self.page_size - 1).to(torch.int32)

    def reset(self, pages: int, serial: int) -> None:
        """Free every page at ``serial``; ``pages`` is the pool's size from now on."""
        if pages != self.pages:
            device = self.born.device
            self.pages, self.outside = pages, pages + 1
            self.born = torch.empty(pages + 2, dtype=torch.int32, device=device)
            self._claims = torch.zeros(pages + 2, dtype=torch.int32, device=device)
            if self.page_size > 1:
                self.named = torch.zeros(pages + 2, dtype=torch.int32, device=device)
        self.born.fill_(FREED | serial)
        if self.page_size > 1:
            self.named.zero_()

    def rebase(self, shift: int) -> None:
        """Subtract ``shift`` from every serial, once in 2**29 operations; none falls below 1."""
        state = self.born & (FREED | QUEUED)
        self.born.copy_(((self.born & SERIAL) - shift).clamp_(min=1) | state)

    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.born.nbytes + self._claims.nbytes + self.named.nbytes

    def among(self, pages: torch.Tensor, named: torch.Tensor) -> torch.Tensor:
        """Mask (bool) of ``pages`` that occur in ``named`` (int64 both); page 0 never does."""
        self._claims.index_fill_(0, pages, 0)
        self._claims.index_fill_(0, named, 1)
        self._claims[:1].zero_()
        return self._claims.index_select(0, pages) == 1


def any_differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether (0-dim bool) two integer tensors of one shape, not empty, differ anywhere."""
    return (one - other).abs_().max() > 0


def any_of(answers: list[torch.Tensor]) -> torch.Tensor:
    """Whether (0-dim bool) one of the answers is yes."""
    return torch.stack(answers).any()
