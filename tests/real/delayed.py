"""What happens while the device has not answered: its answers are withheld on purpose.

Every check's result travels in a ``HostCopy``. Here one that arrives only when it is told to (or is
waited for) takes its place, so that a CPU behaves as a busy GPU does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from hicache_guard.adapters import host_copies, retraction
from hicache_guard.adapters.hooks import running_version
from hicache_guard.core import backlog, compiled, guard, translation, verdict
from hicache_guard.repro import pools
from real.driver import Pair, raw_free, sub_allocators


class Withheld(verdict.HostCopy):
    """A copy that arrives when ``released`` is set, or when somebody waits for it."""

    released: ClassVar[bool] = False
    waits: ClassVar[int] = 0

    def __init__(self, source: torch.Tensor) -> None:
        super().__init__(source.as_subclass(torch.Tensor))  # of no other kind, see ``host_waits``
        self._waited_for = False

    def arrived(self) -> bool:
        return self._waited_for or Withheld.released

    def wait(self) -> None:
        if not self.arrived():
            Withheld.waits += 1
        self._waited_for = True

    def numbers(self) -> Any:
        assert self.arrived(), "a result was read before it had arrived"
        return super().numbers()


def withhold() -> None:
    """From now on nothing arrives by itself, and nothing is compiled: as on a device."""
    os.environ[compiled.SWITCH] = "0"
    for module in (verdict, backlog, translation, guard, host_copies, retraction):
        module.HostCopy = Withheld  # type: ignore[attr-defined]
    Withheld.released, Withheld.waits = False, 0


def as_on_a_device(pair: Pair) -> Pair:
    """Let the guard do what it does on a GPU: in observe it puts no check off there."""
    guard = link_of(pair).guard
    guard.lazy = guard.mode.value == "enforce"
    return pair


def guarded(mode: str, page_size: int, full_pages: int = 24, window_pages: int = 20) -> Pair:
    withhold()
    pair = Pair(
        mode, page_size=page_size, full_pages=full_pages, window_pages=window_pages,
        need_sort=False, twin=False,
    )  # fmt: skip
    return as_on_a_device(pair)


def link_of(pair: Pair) -> Any:
    return vars(pair.guarded)["_hicache_guard_link"]


def free_fixed(allocator: Any, slots: torch.Tensor) -> None:
    """The free that needs no device: by segment, or of one-slot pages."""
    if hasattr(allocator, "free_segment"):
        allocator.free_segment(slots, start_pos=0)
    else:
        allocator.free(slots)


def page_sizes() -> tuple[int, ...]:
    """Sizes at which this release has a free of fixed shape."""
    segments = hasattr(pools.allocator_classes()[0], "free_swa_segment")
    return (1, 4) if segments else (1,)


def never_waits() -> dict[str, int]:
    """Observe and enforce: allocation and fixed frees while no answer ever comes."""
    waits = {}
    for mode in ("observe", "enforce"):
        for size in page_sizes():
            pair = guarded(mode, size, 400, 300)
            for _ in range(20):
                held = pools.extend_surely(pair.guarded, 5 * size)
                more = pools.decode(pair.guarded, 5 * size + 1, int(held[-1]))
                assert more is not None
                free_fixed(pair.guarded, torch.cat((held, more)))
            waits[f"{mode} {size}"] = Withheld.waits + link_of(pair).guard.tally.waits
    return waits


def holds_back() -> list[dict[str, Any]]:
    """Enforce: what a free would release is out of the list until the answer, and counts."""
    rows = []
    for size in page_sizes():
        pair = guarded("enforce", size)
        allocator = pair.guarded
        full, window = sub_allocators(allocator)
        held = pools.extend_surely(allocator, 4 * size)
        before = len(raw_free(full))
        free_fixed(allocator, held.clone())
        row: dict[str, Any] = {
            "page_size": size,
            "listed before the answer": len(raw_free(full)) - before,
            "available before the answer": full.available_size() // size,
            "window available before the answer": window.available_size() // size,
        }
        free_fixed(allocator, held.clone())  # again: nothing of it may ever reach the list
        Withheld.released = True
        assert pair.guard is not None
        row["listed after it"] = sorted(raw_free(full))
        row["window listed after it"] = sorted(raw_free(window))
        row["kinds"] = sorted({report.fault.value for report in pair.reports})
        rows.append(row)
    return rows


def waits_when_short() -> list[dict[str, Any]]:
    """Enforce: an allocation waits for held pages only where the vetted ones would not do."""
    rows = []
    for size in page_sizes():
        pair = guarded("enforce", size, 24, 20)
        allocator = pair.guarded
        first = pools.extend_surely(allocator, 8 * size)
        free_fixed(allocator, first.clone())
        row: dict[str, Any] = {"page_size": size}
        enough = pools.extend_surely(allocator, 8 * size)
        row["waits with enough"] = Withheld.waits
        row["got"] = enough is not None
        more = pools.extend_surely(
            allocator, 8 * size
        )  # 4 window pages are vetted, 8 are held back
        row["waits when short"] = Withheld.waits
        row["got more"] = more is not None
        rows.append(row)
    return rows


def reports_late() -> list[str]:
    """Observe: a fault is reported once its answer is there, though nobody waits for it."""
    said = []
    for size in page_sizes():
        pair = guarded("observe", size)
        allocator = pair.guarded
        pools.extend_surely(allocator, 8 * size)
        held = pools.extend_surely(allocator, 2 * size)
        free_fixed(allocator, held.clone())
        free_fixed(allocator, held.clone())
        pools.extend_surely(allocator, size)
        assert not pair.reports, "reported before the answer was there"
        Withheld.released = True
        for _ in range(3):
            pools.extend_surely(allocator, size)
        said.append(",".join(sorted({report.fault.value for report in pair.reports})))
        assert not Withheld.waits
    return said


def never_reads_too_early() -> bool:
    """Enforce: faults of many kinds, answers that always come late: all is well in the end."""
    from real.machine import PoolMachine  # the same invariants, driven by hand

    kind = {"mode": "enforce", "version": running_version(), "seen": Counter()}
    machine: Any = type("Late", (PoolMachine,), kind)()
    withhold()
    machine.build(page_size=1, need_sort=False, full=8, less=2, look_always=False, narrow=False)
    for turn in range(12):
        machine.start([3 + turn % 5])
        machine.evict_window(turn, 1, False)
        machine.finish(turn, False, 0)
        machine.free_again(turn, False, False)
    Withheld.released = True
    machine.look()
    return True


SCENES: dict[str, Callable[[], Any]] = {
    "never waits": never_waits,
    "holds back": holds_back,
    "waits when short": waits_when_short,
    "reports late": reports_late,
    "late answers to many faults": never_reads_too_early,
}
