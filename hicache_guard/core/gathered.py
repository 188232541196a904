"""What several notes name, to be asked about and written down together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_guard.core.journal import Journal, Operation
from hicache_guard.core.transfer import to_device

if TYPE_CHECKING:
    from hicache_guard.core.ledger import PageLedger


class Gathered:
    """Slots, or page ids (``are_pages``), of several notes: a tensor (int64 or int32) each.

    ``operations`` are those of the notes, where what is written bears their serials. The tensors
    are joined only for whoever needs them as one.
    """

    __slots__ = ("_items", "_pages", "are_pages", "operations", "tensors")

    def __init__(
        self,
        tensors: list[torch.Tensor],
        operations: Sequence[Operation] = (),
        *,
        are_pages: bool = False,
    ) -> None:
        self.tensors = tensors
        self.operations = operations
        self.are_pages = are_pages
        self._items: torch.Tensor | None = None
        self._pages: torch.Tensor | None = None

    @property
    def items(self) -> torch.Tensor:
        """All as one tensor (int64)."""
        if self._items is None:
            joined = self.tensors[0] if len(self.tensors) == 1 else torch.cat(self.tensors)
            self._items = joined.to(torch.int64)
        return self._items

    def pages_in(self, ledger: PageLedger) -> torch.Tensor:
        """Their pages (int64, within the ledger), in the one ledger that they belong to."""
        if self._pages is None:
            if self.are_pages:
                self._pages = self.items.clamp(0, ledger.outside)
            else:
                self._pages = ledger.pages_of(self.items)
        return self._pages

    def counts(self) -> list[int]:
        """How many each note names."""
        return [tensor.shape[0] for tensor in self.tensors]

    def serials(self) -> int | torch.Tensor:
        """One serial for all, or int32 with one for each element."""
        if len(self.operations) == 1:
            return self.operations[0].serial
        serials = np.array([operation.serial for operation in self.operations], dtype=np.int32)
        spread = torch.from_numpy(serials.repeat(self.counts()))
        return to_device(spread, self.tensors[0].device)

    def parts(self) -> list[tuple[Operation, torch.Tensor]]:
        """Each operation with its elements (int64)."""
        longs = [tensor.to(torch.int64) for tensor in self.tensors]
        return list(zip(self.operations, longs, strict=True))

    def touch(self, journal: Journal, verb: str, pool: str, pages: torch.Tensor) -> None:
        """Tell the journal that each operation did ``verb`` to its part of ``pages``."""
        journal.touch(verb, pool, pages, self.operations, list(accumulate(self.counts())))
