"""The ledgers and the mapping's book on a CPU, with the bulk questions and writes compiled.

A chain of torch operators reads and writes a temporary tensor at each link, and needs what the
notes name joined into one; a loop in C reads each note's tensor where it lies. Which of the methods
of ``PageLedger`` and ``WindowMap`` are compiled is to be read off the two classes here; they answer
as those do, and the policy above them is the same. The extension (``kernels/_bulk.c``) is optional:
where it was not built, on a device, and with ``HICACHE_GUARD_COMPILED=0``, the torch code runs.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from hicache_guard.core.gathered import Gathered
from hicache_guard.core.ledger import Answer, PageLedger, Releases
from hicache_guard.core.windowmap import WindowMap

try:
    _bulk: Any = importlib.import_module("hicache_guard.kernels._bulk")
except ImportError:
    _bulk = None
else:
    # How it knows a tensor that it can read as it lies, and makes one of any other.
    _bulk.prepare(torch.int32, torch.int64, lambda items: items.to("cpu", torch.int64).contiguous())

#: Set to 0 to run the torch code although the extension is there.
SWITCH = "HICACHE_GUARD_COMPILED"


def books(device: torch.device) -> tuple[type[PageLedger], type[WindowMap]]:
    """The classes that keep the books of pools on ``device``."""
    if device.type == "cpu" and why_not() is None:
        return CompiledLedger, CompiledMap
    return PageLedger, WindowMap


def why_not() -> str | None:
    """Why the compiled code is not used on a CPU, or None where it is."""
    if _bulk is None:
        return "the extension was not built: no C compiler when hicache-guard was installed"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    return None


def _parts(named: Gathered, page_size: int) -> Any:
    """The tensors of ``named`` as the extension reads them."""
    if named.compiled is None:
        serials = [operation.serial for operation in named.operations]
        per = 1 if named.are_pages else page_size
        named.compiled = _bulk.Parts(named.tensors, serials, per)
    return named.compiled


#: Bits of a claim on a page: a free names it, it may come to the free list, it came.
_NAMED, _ALLOWED, _CAME = 1, 2, 4
#: Claims bear the round in which they were made, and are negative: no other use of them is.
_ROUNDS = (1 << 28) - 2


class CompiledLedger(PageLedger):
    """``PageLedger`` on a CPU."""

    _round = 0

    def hand_out_slots(self, slots: Gathered) -> torch.Tensor:
        if self._undo:
            return super().hand_out_slots(slots)
        parts = _parts(slots, self.page_size)
        pages = torch.empty(parts.total, dtype=torch.int32)
        _bulk.hand_out(self.born.numpy(), parts, pages.numpy())
        return pages

    def release_named(self, named: Gathered) -> torch.Tensor:
        if self._undo:
            return super().release_named(named)
        parts = _parts(named, self.page_size)
        pages = torch.empty(parts.total, dtype=torch.int32)
        _bulk.release(self.born.numpy(), parts, pages.numpy())
        return pages

    def any_wrong_release(self, due: Releases, *, vet_freed: bool, some_empty: bool) -> Answer:
        wrong = False
        self._round = self._round % _ROUNDS + 1
        if self._round == 1:
            self._claims.zero_()
        base = 8 * self._round - (1 << 31)
        books = (self._claims.numpy(), self.born.numpy())

        def claim(named: Gathered, *rules: int) -> bool:
            found: bool = _bulk.claim(*books, _parts(named, self.page_size), base, *rules)
            return found

        for named in due.direct:
            wrong |= claim(named, _NAMED, 0, _NAMED, 1, 0)
        for frees, bits in ((due.backed, _NAMED | _ALLOWED), (due.queued, _NAMED)):
            for named in frees:
                wrong |= claim(named, _NAMED, 0, bits, vet_freed, some_empty)
        for named in due.vouched:
            wrong |= claim(named, 0, 0, _ALLOWED, 0, 1)
        for named in due.came:
            wrong |= claim(named, _CAME, _ALLOWED, _CAME, 0, -1)
        return wrong


class CompiledMap(WindowMap):
    """``WindowMap`` on a CPU."""

    def record_named(self, full: Gathered, window: Gathered) -> None:
        if self._undo:
            super().record_named(full, window)
            return
        size = self._full.page_size
        stamp, owner = self.stamp.numpy(), self.owner.numpy()
        _bulk.record(stamp, owner, _parts(full, size), _parts(window, size))

    def any_wrong_entry(self, rows: Gathered, entries: Gathered, *, some_empty: bool) -> Answer:
        return self._ask(_bulk.any_wrong_entry, [rows, entries], some_empty)

    def any_not_continued(
        self, slots: Gathered, window: Gathered, lengths: Gathered, *, back: int = 0
    ) -> Answer:
        return self._ask(_bulk.any_not_continued, [slots, window, lengths], back)

    def _ask(self, question: Any, named: list[Gathered], detail: int) -> bool:
        full, window = self._full, self._window
        books = (self.stamp.numpy(), self.owner.numpy(), full.born.numpy(), window.born.numpy())
        found: bool = question(*books, *(_parts(each, full.page_size) for each in named), detail)
        return found

    def any_mapped(self, slots: Gathered) -> Answer:
        if self.mapping.dtype is not torch.int64 or not self.mapping.is_contiguous():
            return super().any_mapped(slots)
        parts = _parts(slots, self._full.page_size)
        found: bool = _bulk.any_mapped(self.mapping.numpy(), self._full.outside, parts)
        return found
