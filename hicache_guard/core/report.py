"""The text of a violation, in the manner of AddressSanitizer: what, where, who before, who now."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from hicache_guard.core.faults import FACTS, Fault
from hicache_guard.core.journal import Journal, Operation

logger = logging.getLogger("hicache_guard")


@dataclass(frozen=True)
class Violation:
    """The facts of one violation.

    ``slots`` counts the slots of the call that share the fault; ``slot`` is the first of them, an
    index into ``pool``, and ``page`` its page. ``expected`` and ``found`` are generations, in
    operation serials, where the fault is about one; ``other`` is the slot on the far side (a window
    slot for a full slot and the reverse). ``history`` lists the last operations on the page.
    """

    fault: Fault
    pool: str
    slot: int
    page: int
    slots: int
    operation: str
    request: str | None
    expected: str | None = None
    found: str | None = None
    other: str | None = None
    history: tuple[str, ...] = ()

    def __str__(self) -> str:
        facts = FACTS[self.fault]
        what = f"{self.fault.value}: {facts.says}: {self.pool} slot {self.slot}, page {self.page}"
        if self.slots > 1:
            what += f" (and {self.slots - 1} more slots of this call)"
        lines = [what, f"  in {self.operation}"]
        if self.expected is not None:
            lines.append(f"  expected {self.expected}, found {self.found}")
        if self.other is not None:
            lines.append(f"  {self.other}")
        lines += [f"  {line}" for line in self.history]
        reports = ", ".join(f"#{number}" for number in facts.reports)
        if reports:
            lines.append(f"  the kind of {reports}")
        return "\n".join(lines)


Report = Callable[[Violation], None]


def tell(listener: Report | None, violation: Violation) -> None:
    """Let whoever listens know; it must not be able to stop an operation half-way."""
    if listener is None:
        return
    try:
        listener(violation)
    except Exception:
        logger.exception("on_report failed")


def generation_text(serial: int, journal: Journal) -> str:
    """A generation in words: its serial and the operation that started it, where still known."""
    operation = journal.find(serial)
    return f"generation {serial}" + (f" ({operation})" if operation else "")


def describe_operation(operation: Operation) -> str:
    """The operation in which a violation came up, in words."""
    return str(operation)
