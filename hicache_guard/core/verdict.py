"""The result of a check on its way from the device to the host.

A check leaves one number on the device: how many slots are bad. It travels by a non-blocking copy
into pinned memory; the host looks whether it has arrived, and waits only where a mode must. The
facts of a violation are fetched in a second copy, launched only once the number came back nonzero.
On a CPU the "copy" has arrived at once, so the same code runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from hicache_guard.core.faults import Fault


class HostCopy:
    """A tensor being copied to the host without blocking."""

    def __init__(self, source: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if source.device.type == "cpu":
            self._host = source
        else:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def numbers(self) -> npt.NDArray[Any]:
        """The values, flat. Call after the copy has arrived."""
        # numpy reads host memory without going through torch's synchronising operators.
        return self._host.numpy().reshape(-1)

    def values(self) -> list[int]:
        """As ``numbers``, in a list."""
        return [int(value) for value in self.numbers()]


@dataclass(frozen=True)
class Suspicion:
    """One kind of fault that a check looks for.

    ``mask`` (bool, one per slot checked) is computed only where the check found something bad.
    """

    fault: Fault
    mask: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Finding:
    """What a check found of one kind: how many slots, and the facts of the first.

    ``found`` is the generation of the slot's page (raw, see ``ledger.FREED``), ``expected`` the
    stamp that was compared with it, ``other`` the slot on the far side of the mapping; -1 for none.
    """

    fault: Fault
    count: int
    slot: int
    found: int
    expected: int
    other: int


class Verdict:
    """How many of the slots of one check are bad, and why.

    ``bad`` is a bool mask over ``slots`` (int64). The optional tensors have the same length and are
    kept only until the verdict is read.
    """

    def __init__(
        self,
        bad: torch.Tensor,
        slots: torch.Tensor,
        suspicions: Sequence[Suspicion],
        *,
        found: torch.Tensor | None = None,
        expected: torch.Tensor | None = None,
        other: torch.Tensor | None = None,
    ) -> None:
        self.bad = bad
        self.slots = slots
        self._suspicions = suspicions
        self._columns = (slots, found, expected, other)
        self.count_copy = HostCopy(bad.sum())
        self._facts: HostCopy | None = None

    def arrived(self) -> bool:
        """Whether the count is on the host. Never blocks."""
        return self.count_copy.arrived()

    def wait(self) -> None:
        """Block until the count is on the host."""
        self.count_copy.wait()

    @property
    def count(self) -> int:
        """Bad slots. Call after the count has arrived."""
        return self.count_copy.values()[0]

    def request_facts(self) -> HostCopy:
        """Start (once) the copy of the facts; the copy may be waited for or polled."""
        if self._facts is None:
            rows = []
            for suspicion in self._suspicions:
                mask = suspicion.mask()
                first = mask.to(torch.uint8).argmax().reshape(1)
                none = torch.full_like(first, -1)
                rows.append(mask.sum().reshape(1))
                for column in self._columns:
                    rows.append(none if column is None else column.index_select(0, first).long())
            self._facts = HostCopy(torch.cat(rows))
        return self._facts

    def findings(self) -> list[Finding]:
        """What was found, kind by kind. Call after ``request_facts`` has arrived."""
        values = self.request_facts().values()
        width = 1 + len(self._columns)
        findings = []
        for position, suspicion in enumerate(self._suspicions):
            count, slot, found, expected, other = values[position * width : (position + 1) * width]
            if count:
                findings.append(Finding(suspicion.fault, count, slot, found, expected, other))
        return findings


class Vetted:
    """Which of the slots (or page ids) that a free names may be freed.

    ``bad`` is a bool mask over them; its count is on its way to the host.
    """

    def __init__(self, bad: torch.Tensor, count: HostCopy | None = None) -> None:
        self.bad = bad
        self._count = count or HostCopy(bad.sum())

    def spread(self, page_size: int, slots: int) -> Vetted:
        """From one entry a page to one a slot, for ``slots`` consecutive slots."""
        return Vetted(self.bad.repeat_interleave(page_size)[:slots], self._count)

    def arrived(self) -> bool:
        return self._count.arrived()

    def wait(self) -> None:
        self._count.wait()

    @property
    def count(self) -> int:
        """Bad ones (of a segment: bad pages). Call after the count has arrived."""
        return self._count.values()[0]

    def keep(self, items: torch.Tensor) -> torch.Tensor:
        """``items`` without the bad ones. Reads the device: only where something is bad."""
        return items if self.count == 0 else items[~self.bad]
