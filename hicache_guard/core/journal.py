"""What was done to a page lately: a bounded record of operations, read only when a report is due.

After AddressSanitizer: a report names who freed, who allocated before, who uses now. One record is
kept for each allocator operation, not for each page; beside them stand the page tensors that
operations touched, as they came, so that keeping the journal costs no device work at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import NamedTuple, Protocol

import torch

#: Operations kept, and the number of page ids that they may hold alive together (8 MiB of int64).
MAX_OPERATIONS = 4096
MAX_HELD_PAGES = 1 << 20

#: The request on whose behalf operations are made, if anybody said so.
ACTING_FOR: ContextVar[str | None] = ContextVar("hicache_guardACTING_FOR", default=None)


@contextmanager
def acting_for(request: str | None) -> Iterator[None]:
    """Name the request on whose behalf the enclosed allocator calls are made, for reports."""
    token = ACTING_FOR.set(request)
    try:
        yield
    finally:
        ACTING_FOR.reset(token)


class Operation(NamedTuple):
    """One allocator operation, called from the ``instruction`` (an offset) of ``caller``.

    ``serial`` orders operations; ``file`` and ``line`` are the place in the caller's code.
    """

    serial: int
    name: str
    request: str | None
    caller: CodeType
    instruction: int

    @property
    def line(self) -> int:
        # Only for reports: finding the line costs more than all the rest of the record.
        lines = self.caller.co_lines()
        found = (line for start, end, line in lines if start <= self.instruction < end)
        return next(found, None) or self.caller.co_firstlineno

    @property
    def file(self) -> str:
        return self.caller.co_filename

    def __str__(self) -> str:
        who = f" for {self.request}" if self.request else ""
        return f"#{self.serial} {self.name}{who} at {self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Touch:
    """What some operations did to ``pages`` (int64 page ids) of one pool, in their order.

    ``operations[i]`` touched the pages up to position ``ends[i]``, from where the one before it
    stopped.
    """

    verb: str
    pool: str
    pages: torch.Tensor
    operations: Sequence[Operation]
    ends: Sequence[int]

    @property
    def weight(self) -> int:
        """What it keeps alive, in page ids; an operation counts as much as a few of them."""
        return int(self.pages.shape[0]) + 32 * len(self.operations)


class Steps(Protocol):
    """Opens and closes short operations, and sees whether anybody wrote behind the seams."""

    def enter(self, serial: int, name: str, caller: FrameType, /) -> bool:
        """Record an operation; whether everything that is watched is as it was left."""

    def leave(self) -> None:
        """Everything that is watched is as it should be."""

    def accept(self, number: int, /) -> None:
        """One of the attributes that are watched is as it should be."""

    def changed(self) -> int:
        """A bit for each that is watched and is not as it was left."""

    def find(self, serial: int, /) -> tuple[int, str, str | None, CodeType, int] | None:
        """The fields of an ``Operation``, while it is remembered."""

    def forget(self) -> None:
        """Forget all operations: serials begin anew."""


class Journal:
    """The last operations, newest last; bounded in operations and in the page ids held."""

    #: Operations that are recorded there and not here.
    steps: Steps | None = None

    def __init__(
        self, max_operations: int = MAX_OPERATIONS, max_held_pages: int = MAX_HELD_PAGES
    ) -> None:
        self._operations: deque[Operation] = deque(maxlen=max_operations)
        self._touches: deque[Touch] = deque()
        self._max_held = max_held_pages
        self._held = 0

    def open(self, serial: int, name: str, caller: FrameType) -> Operation:
        """Start the record of one operation; ``caller`` is the frame that called the allocator."""
        fields = (serial, name, ACTING_FOR.get(), caller.f_code, caller.f_lasti)
        operation = tuple.__new__(Operation, fields)  # every step makes some: no frame for it
        self._operations.append(operation)
        return operation

    def touch(
        self,
        verb: str,
        pool: str,
        pages: torch.Tensor,
        operations: Sequence[Operation],
        ends: Sequence[int],
    ) -> None:
        """Note that ``operations`` did ``verb`` to their parts of ``pages``; see ``Touch``."""
        touch = Touch(verb, pool, pages, operations, ends)
        self._touches.append(touch)
        self._held += touch.weight
        while self._held > self._max_held and len(self._touches) > 1:
            self._held -= self._touches.popleft().weight

    def history(
        self,
        pool: str,
        page: int,
        written: Sequence[tuple[int, int]] = (),
        limit: int = 6,
    ) -> list[str]:
        """The last operations on one page, newest first. Reads the device: for reports only.

        ``written`` is what the compiled books remember of the page: serials, newest first, and 1
        for a free.
        """
        found: dict[tuple[int, str], str] = {}
        for touch in reversed(self._touches):
            if touch.pool != pool:
                continue
            if len(found) >= limit:
                break
            for position in (touch.pages == page).nonzero().reshape(-1).tolist():
                operation = touch.operations[bisect_right(touch.ends, position)]
                found[operation.serial, touch.verb] = f"{touch.verb} by {operation}"
        for serial, freed in written[:limit]:
            verb, known = "freed" if freed else "allocated", self.find(serial)
            if known is not None:
                found[serial, verb] = f"{verb} by {known}"
        # Of one operation the free comes after the allocation.
        return [found[key] for key in sorted(found, reverse=True)[:limit]]

    def find(self, serial: int) -> Operation | None:
        """The operation with this serial, or None where it has left the journal."""
        fields = self.steps.find(serial) if self.steps is not None else None
        if fields is not None:
            return Operation(*fields)
        if not self._operations:
            return None
        offset = serial - self._operations[0].serial
        if 0 <= offset < len(self._operations):
            found = self._operations[offset]
            if found.serial == serial:
                return found
        return next((op for op in self._operations if op.serial == serial), None)

    def __len__(self) -> int:
        return len(self._operations)
