"""What was done to a page lately: a bounded record of operations, read only when a report is due.

After AddressSanitizer: a report names who freed, who allocated before, who uses now. One record is
kept for each allocator operation, not for each page; it refers to the page tensors that the
operation touched, so that keeping the journal costs no device work at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType

import torch

#: Operations kept, and the number of page ids that they may hold alive together (8 MiB of int64).
MAX_OPERATIONS = 4096
MAX_HELD_PAGES = 1 << 20

_acting_for: ContextVar[str | None] = ContextVar("hicache_guard_acting_for", default=None)


@contextmanager
def acting_for(request: str) -> Iterator[None]:
    """Name the request on whose behalf the enclosed allocator calls are made, for reports."""
    token = _acting_for.set(request)
    try:
        yield
    finally:
        _acting_for.reset(token)


class Operation:
    """One allocator operation.

    ``serial`` orders operations; ``file`` and ``line`` are the place in the caller's code;
    ``touched`` holds (verb, pool, page ids) with page ids an int64 tensor on the pool's device.
    """

    __slots__ = ("caller", "line", "name", "request", "serial", "touched")

    def __init__(
        self, serial: int, name: str, request: str | None, caller: CodeType, line: int
    ) -> None:
        self.serial = serial
        self.name = name
        self.request = request
        self.caller = caller
        self.line = line
        self.touched: list[tuple[str, str, torch.Tensor]] = []

    @property
    def file(self) -> str:
        return self.caller.co_filename

    def __str__(self) -> str:
        who = f" for {self.request}" if self.request else ""
        return f"#{self.serial} {self.name}{who} at {self.file}:{self.line}"


class Journal:
    """The last operations, newest last; bounded in operations and in the page ids held."""

    def __init__(
        self, max_operations: int = MAX_OPERATIONS, max_held_pages: int = MAX_HELD_PAGES
    ) -> None:
        self._operations: deque[Operation] = deque()
        self._max_operations = max_operations
        self._max_held = max_held_pages
        self._held = 0

    def open(self, serial: int, name: str, caller: FrameType) -> Operation:
        """Start the record of one operation; ``caller`` is the frame that called the allocator."""
        operation = Operation(serial, name, _acting_for.get(), caller.f_code, caller.f_lineno)
        operations = self._operations
        operations.append(operation)
        if len(operations) > self._max_operations:
            self._drop_oldest()
        return operation

    def touch(self, operation: Operation, verb: str, pool: str, pages: torch.Tensor) -> None:
        """Note that ``operation`` did ``verb`` to ``pages`` (int64 page ids) of ``pool``."""
        operation.touched.append((verb, pool, pages))
        self._held += pages.numel()
        while self._held > self._max_held and len(self._operations) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        for _, _, pages in self._operations.popleft().touched:
            self._held -= pages.numel()

    def history(self, pool: str, page: int, limit: int = 6) -> list[str]:
        """The last operations on one page, newest first. Reads the device: for reports only."""
        lines: list[str] = []
        for operation in reversed(self._operations):
            for verb, pool_name, pages in reversed(operation.touched):
                if pool_name == pool and bool((pages == page).any()):
                    lines.append(f"{verb} by {operation}")
                    if len(lines) == limit:
                        return lines
        return lines

    def find(self, serial: int) -> Operation | None:
        """The operation with this serial, or None where it has left the journal."""
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
