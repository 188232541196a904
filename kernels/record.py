"""What a translation found wrong, as the device writes it and as a person reads it.

A record is one int64 tensor on the device: counts by cause, and the first offender in batch order,
which is the order of requests and, within one, of positions. It is written by every run and read
when somebody copies it, along with the next tokens, so that it costs no wait of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from hicache_guard.core.ledger import FREED, SERIAL


class Cause(IntEnum):
    """Why an entry leads nowhere; where several apply, the smallest (see ``books``).

    ``OUT_OF_RANGE`` comes first of a full slot, and cannot be together with ``UNMAPPED`` of a
    window slot.
    """

    OUT_OF_RANGE = 0
    UNMAPPED = 1
    FREED = 2
    RECYCLED = 3
    FULL_RECYCLED = 4
    FOREIGN = 5


#: Where in the record what stands; the first ``len(Cause)`` numbers are the counts by cause.
AT_DROPPED = 6
AT_FIRST = 7
AT_LATE = 15
LENGTH = 16
#: Stands for "nobody" in a key, which is ``request << 32 | position`` and so never as large.
NOBODY = (1 << 63) - 1
_POSITION = (1 << 32) - 1

_SAYS = {
    Cause.OUT_OF_RANGE: "out of range",
    Cause.UNMAPPED: "no window slot",
    Cause.FREED: "window page was freed",
    Cause.RECYCLED: "window page was recycled",
    Cause.FULL_RECYCLED: "full page was freed or recycled",
    Cause.FOREIGN: "window slot belongs to another full slot",
}


@dataclass(frozen=True)
class Offender:
    """One entry that leads nowhere, and what the books said of it.

    ``request``: row in the batch. ``full_slot``: -1 as well where the request table has no such
    place. ``window_slot``: as it stood in the mapping; -1 where that could not be asked. ``stamp``
    and ``full_generation`` are -1 where the full slot is out of range, ``window_generation`` and
    ``owner`` also where the window slot is (0 included).
    """

    request: int
    position: int
    full_slot: int
    window_slot: int
    cause: Cause
    stamp: int
    window_generation: int
    full_generation: int
    owner: int

    def __str__(self) -> str:
        what = f"{self.cause.name.lower()}: {_SAYS[self.cause]}: "
        what += f"full slot {self.full_slot} -> window slot {self.window_slot}"
        lines = [what, f"  in request {self.request} of the batch, position {self.position}"]
        if self.stamp >= 0:
            found = f"  stamped {self.stamp}, full page {_generation(self.full_generation)}"
            if self.window_generation >= 0:
                found += f", window page {_generation(self.window_generation)}"
            lines.append(found)
        if self.cause is Cause.FOREIGN:
            lines.append(f"  owned by full slot {self.owner}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ViolationRecord:
    """What one translation, and the attention that used it, found wrong.

    ``counts``: entries by cause. ``first``: the first of them in batch order. ``dropped``: entries
    that had no room in the plan; none of them was looked at. ``late``: request and position of the
    first entry that was proved by the translation and whose page had changed when attention came to
    load it; attention does not count these.
    """

    counts: dict[Cause, int]
    first: Offender | None
    dropped: int
    late: tuple[int, int] | None

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> ViolationRecord:
        """Read a record (``LENGTH`` numbers) that has been copied to the host."""
        if len(numbers) != LENGTH:
            raise ValueError(f"a record has {LENGTH} numbers, not {len(numbers)}")
        key, full, window, cause, *found = numbers[AT_FIRST:AT_LATE]
        first = None
        if key != NOBODY:
            # One that leads to its slot again by the time that its facts are looked up: the books
            # are somebody else's, and may change.
            why = Cause(cause) if cause < len(Cause) else Cause.RECYCLED
            first = Offender(key >> 32, key & _POSITION, full, window, why, *found)
        late = numbers[AT_LATE]
        return cls(
            counts={cause: numbers[cause] for cause in Cause},
            first=first,
            dropped=numbers[AT_DROPPED],
            late=None if late == NOBODY else (late >> 32, late & _POSITION),
        )

    @property
    def clean(self) -> bool:
        """Whether every entry was proved, had room, and still held when it was loaded."""
        return self.first is None and self.dropped == 0 and self.late is None

    def __str__(self) -> str:
        if self.clean:
            return "every entry leads to a live window slot"
        lines = []
        if self.first is not None:
            lines.append(str(self.first))
            counted = [f"{n} {cause.name.lower()}" for cause, n in self.counts.items() if n]
            lines.append("  entries of this batch: " + ", ".join(counted))
        if self.dropped:
            lines.append(f"no room: {self.dropped} entries beyond what was planned")
        if self.late is not None:
            lines.append(
                f"late: request {self.late[0]}, position {self.late[1]}: "
                "window page changed between translation and attention"
            )
        return "\n".join(lines)


def _generation(born: int) -> str:
    if born < FREED:
        return f"of generation {born}"
    serial = born & SERIAL
    return f"freed at {serial}" if serial else "never handed out"
