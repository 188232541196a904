"""What the kernels read: the guard's books of one pair of pools, as tensors on one device.

The guard keeps generations by page, stamps by full slot and owners by window slot (see
``core/ledger.py`` and ``core/windowmap.py``). The kernels read the same memory, so what the guard
writes is what the next kernel sees, in a replayed CUDA graph as well.

The rule that the kernels check, once for all (they implement it; none of them defines it). An entry
of a request's window is a full slot; it *leads* to a window slot when all of this holds:

1. the full slot is an index of the mapping, its trailing -1 not counted;
2. ``mapping[full]`` is not 0, which stands for "no window slot";
3. it is an index of the window pool: above 0, below the number of owners;
4. the window slot's page is live: its generation is below ``FREED``;
5. ``stamp[full]`` is not older than that generation: the page was not recycled since;
6. the full slot's page is live, and ``stamp[full]`` is not older than its generation;
7. ``owner[window]`` is the full slot: nobody else was given the window slot since.

That is ``WindowMap.leads``, and that the full page is live: a request that reads a window holds its
full pages too. The first line that does not hold is the cause; see ``record.Cause``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hicache_guard.core.guard import PoolGuard


@dataclass(frozen=True, eq=False)
class DeviceBooks:
    """The books of one pair of pools; all tensors contiguous and on one device.

    ``mapping``: int64, one window slot for each full slot, 0 for none, and a trailing -1.
    ``stamp``: int32, as long as ``mapping``. ``owner``: int32, one full slot for each window slot.
    ``full_born`` and ``window_born``: int32, the generation of each page, the padding page 0 and
    the one that stands for what is beyond the pool included; of a freed page ``FREED`` and more.

    Raises ``TypeError`` for another dtype, ``ValueError`` for sizes that do not fit together (the
    kernels check slots against them and nothing else) or tensors that lie elsewhere.
    """

    mapping: torch.Tensor
    stamp: torch.Tensor
    owner: torch.Tensor
    full_born: torch.Tensor
    window_born: torch.Tensor
    page_size: int

    @classmethod
    def of(cls, guard: PoolGuard) -> DeviceBooks:
        """The books of ``guard``, which are referred to and not copied.

        They are what the guard knows only while nothing is noted: where ``guard.lazy``, its
        ``backlog`` has to be settled before a kernel reads them. A pool that is resized, and a
        mapping that is replaced, need new ones.
        """
        return cls(
            mapping=guard.map.mapping,
            stamp=guard.map.stamp,
            owner=guard.map.owner,
            full_born=guard.full.born,
            window_born=guard.window.born,
            page_size=guard.page_size,
        )

    def are_of(self, guard: PoolGuard) -> bool:
        """Whether these are still the tensors that ``guard`` keeps its books in."""
        book = guard.map
        return (
            self.mapping is book.mapping
            and self.stamp is book.stamp
            and self.owner is book.owner
            and self.full_born is guard.full.born
            and self.window_born is guard.window.born
        )

    def __post_init__(self) -> None:
        narrow = (self.stamp, self.owner, self.full_born, self.window_born)
        if self.mapping.dtype is not torch.int64 or any(
            kept.dtype is not torch.int32 for kept in narrow
        ):
            raise TypeError("the mapping is int64, and every other book int32")
        for kept in (self.mapping, *narrow):
            if kept.device != self.mapping.device or not kept.is_contiguous():
                raise ValueError("books are contiguous, and on the mapping's device")
        if self.page_size < 1 or self.full_rows < 1:
            raise ValueError("there is at least one full slot, and one slot in a page")
        if self.stamp.shape != self.mapping.shape:
            raise ValueError("each full slot has one stamp")
        if (self.full_rows - 1) // self.page_size >= self.full_born.shape[0]:
            raise ValueError("each full slot's page has a generation")
        if self.owner.shape[0] != self.window_born.shape[0] * self.page_size:
            raise ValueError("each window slot's page has a generation")

    @property
    def full_rows(self) -> int:
        """Full slots that the mapping has an entry for; its trailing -1 is none."""
        return self.mapping.shape[0] - 1

    @property
    def window_slots(self) -> int:
        """Window slots that have an owner, those of the padding page included."""
        return self.owner.shape[0]
