"""Copies that are queued or under way: their host pages are not to be handed on meanwhile.

A print is looked at when a copy is queued. The bytes move later: when the controller submits its
queue, on a stream of their own, or in a thread that writes to a storage backend. A host page that
is freed before is another's by then, and so are the bytes (#28468, #40712). So ``free`` of the host
pools is watched: in enforce such a page is let go of when the copy is over, in strict the free
raises. Nothing waits for a copy; that it is over is asked of the controller's own event.

And what a backup takes from the device is looked at once more when it is submitted: a device page
that was lost in the queue gives its copy no print.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache_guard.adapters.host_pool import numbers
from hicache_guard.core.contents import UNKNOWN, Contents, Numbers

#: Copies that are looked at for each one that is added.
LOOKED_AT = 16
#: What a look at device pages finds there now.
Look = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Flight:
    """A copy: its host slots by pool, and whether it is over; None while it is queued.

    ``owned``: whoever made it frees its pages when it is over, and nobody else may at all. The free
    of any other is put off, since it may be its owner's.
    """

    slots: list[tuple[Any, Numbers]]
    backup: bool = False
    owned: bool = False
    over: Callable[[], bool] | None = None
    #: Of a backup: the host's books, its slots there, the device's, how to look at those, and what
    #: was seen when the backup was queued.
    taken: list[tuple[Contents, torch.Tensor, torch.Tensor, Look, torch.Tensor]] = field(
        default_factory=list
    )


def _dropped() -> bool:
    """A copy that will never be made is over."""
    return True


class Flights:
    """The copies of one controller. ``reports`` tells of pages; False where that is all."""

    def __init__(self, controller: Any, page_size: int, reports: Callable[[int], bool]) -> None:
        self.controller = controller
        self.page_size = page_size
        self.reports = reports
        self.flying: list[Flight] = []
        # By host pool: how many copies are to read or to write each slot, and how many owned ones.
        self._counts: dict[int, tuple[Numbers, Numbers]] = {}
        self._held: list[tuple[Callable[[torch.Tensor], Any], Any, Numbers]] = []

    def queued(self, flight: Flight, queue: list[Any], acks: list[Any]) -> None:
        """A copy was queued, or (up to 0.5.20, a backup) submitted at once."""
        if not queue and acks:
            flight.over = acks[-1].finish_event.query
        self.add(flight)

    def add(self, flight: Flight) -> None:
        """A copy is to be made, or runs. The oldest are looked at, to be forgotten if over."""
        oldest, self.flying = self.flying[:LOOKED_AT], self.flying[LOOKED_AT:]
        self._forget_over(oldest)
        self.flying.append(flight)
        self._count(flight, 1)

    def watch(self) -> None:
        """Follow what the controller submits, and what its host pools get back."""
        controller = self.controller
        writes, loads = controller.start_writing, controller.start_loading

        def start_writing() -> Any:
            self._look_again()
            return self._submit(True, writes, controller.write_queue, "ack_write_queue")

        def start_loading() -> Any:
            return self._submit(False, loads, controller.load_queue, "ack_load_queue")

        controller.start_writing, controller.start_loading = start_writing, start_loading
        for entry in controller.mem_pool_host.entries:
            self._watch_pool(entry.host_pool)

    def _submit(self, backup: bool, submit: Callable[[], Any], queue: list[Any], acks: str) -> Any:
        waiting = [f for f in self.flying if f.over is None and f.backup is backup]
        dropped = not queue  # by a reset of the controller
        result = submit()
        for flight in waiting:
            done = _dropped if dropped else getattr(self.controller, acks)[-1].finish_event.query
            flight.over = done
        return result

    def _look_again(self) -> None:
        """A device page that is no more what it was when its backup was queued gives no print."""
        for flight in self.flying:
            if flight.over is not None:
                continue
            for books, host, device, look, found in flight.taken:
                now = torch.where(look(device) == found, found, UNKNOWN)
                books.exchange(host, found, now)

    def _watch_pool(self, pool: Any) -> None:
        original_free, original_alloc = pool.free, pool.alloc

        def free(slots: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.flying or not len(slots):
                return original_free(slots, *args, **kwargs)
            busy = self._busy(pool, slots)
            if busy.any():
                self.settle()
                busy = self._busy(pool, slots)
            if not busy.any() or not self.reports(int(busy.sum()) // self.page_size):
                return original_free(slots, *args, **kwargs)
            late = busy & ~self._busy(pool, slots, owned=True)
            if late.any():
                kept = numbers(slots[torch.from_numpy(late)])
                self._held.append((original_free, pool, kept))
            if not busy.all():
                original_free(slots[~torch.from_numpy(busy)], *args, **kwargs)
            return len(slots)

        def alloc(*args: Any, **kwargs: Any) -> Any:
            if self._held:
                self.settle()
            return original_alloc(*args, **kwargs)

        pool.free, pool.alloc = free, alloc

    def _busy(
        self, pool: Any, slots: torch.Tensor, *, owned: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Mask (bool) of host slots that a copy is to read or to write; of owned ones only."""
        asked = numbers(slots)
        if id(pool) not in self._counts:
            return np.zeros(asked.shape[0], dtype=bool)
        counts = self._counts[id(pool)][owned]
        return counts[np.clip(asked, 0, counts.shape[0] - 1)] > 0

    def _count(self, flight: Flight, more: int) -> None:
        for pool, used in flight.slots:
            if id(pool) not in self._counts:
                size = int(pool.size) + self.page_size
                self._counts[id(pool)] = np.zeros(size, np.int32), np.zeros(size, np.int32)
            for counts in self._counts[id(pool)][: 1 + flight.owned]:
                np.add.at(counts, used, more)

    def settle(self) -> None:
        """Forget the copies that are over, and let go of what was held for them."""
        known, self.flying = self.flying, []
        self._forget_over(known)
        if not self._held:
            return
        held, self._held = self._held, []
        for free, pool, kept in held:
            slots = torch.from_numpy(kept)
            busy = self._busy(pool, slots)
            if busy.any():
                self._held.append((free, pool, kept[busy]))
            if not busy.all():
                free(slots[~torch.from_numpy(busy)])

    def _forget_over(self, some: list[Flight]) -> None:
        for flight in some:
            if flight.over is None or not flight.over():
                self.flying.append(flight)
            else:
                self._count(flight, -1)

    def forget(self) -> None:
        """The host pools were emptied, and the queues with them."""
        self.flying.clear()
        self._counts.clear()
        self._held.clear()
