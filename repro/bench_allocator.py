"""Paired timing of a release's allocator with the guard and without, in one process.

One cycle is what a scheduler does to a batch of requests with 512 tokens of prompt and 128 of
output: prefill (``alloc``), 128 decode steps (``decode``), a translation of each request's window
(``translate``), and the frees, row by row: of all that left the window and of every request
(``free``). Checks that the guard put off are run after prefill, after the decode steps and after
the frees, and counted there.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.syncs import SyncCounter
from hicache_guard.repro import paired, pools

PROMPT, STEPS, WINDOW = 512, 128, 128


class Cycle:
    """One allocator and the calls of one cycle on it, each timed."""

    def __init__(self, page_size: int, batch: int) -> None:
        self.batch = batch
        need = batch * (PROMPT + STEPS + 2 * page_size)
        self.allocator = pools.build(
            2 * need // page_size * page_size, 2 * need // page_size * page_size, page_size
        )
        self.by_segment = hasattr(self.allocator, "free_swa_segment")

    def timed(self) -> dict[str, float]:
        """Run the cycle; returns the seconds of each part."""
        spent: dict[str, float] = defaultdict(float)

        def clock(name: str, call: Callable[[], Any]) -> Any:
            start = time.perf_counter()
            result = call()
            spent[name] += time.perf_counter() - start
            return result

        self.run(clock)
        return spent

    def run(self, clock: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Run the cycle; ``clock(name, call)`` performs each call."""
        rows = clock("alloc", self._prefill)
        clock("alloc", lambda: pools.settle(self.allocator))
        columns = [rows.view(self.batch, PROMPT)]
        last = columns[0][:, -1]
        for step in range(1, STEPS + 1):
            length = torch.full((self.batch,), PROMPT + step, dtype=torch.int64)
            last = clock("decode", partial(self._decode, length, last))
            columns.append(last.view(self.batch, 1))
        clock("decode", lambda: pools.settle(self.allocator))
        held = torch.cat(columns, dim=1)
        tail = held[:, -WINDOW:].reshape(-1)
        clock("translate", lambda: self.allocator.translate_loc_from_full_to_swa(tail))
        keep = (PROMPT + STEPS - WINDOW) // self.allocator.page_size * self.allocator.page_size
        clock("free", lambda: self._free_window(held, keep))
        clock("free", lambda: self._free(held, keep))
        clock("free", lambda: pools.settle(self.allocator))

    def _prefill(self) -> torch.Tensor:
        if self.allocator.page_size == 1:
            return self.allocator.alloc(self.batch * PROMPT)  # type: ignore[no-any-return]
        none = torch.zeros(self.batch, dtype=torch.int64)
        ends = torch.full((self.batch,), PROMPT, dtype=torch.int64)
        return self.allocator.alloc_extend(  # type: ignore[no-any-return]
            none, none, ends, ends, none - 1, self.batch * PROMPT
        )

    def _decode(self, length: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        if self.allocator.page_size == 1:
            return self.allocator.alloc(self.batch)  # type: ignore[no-any-return]
        return self.allocator.alloc_decode(length, length, last)  # type: ignore[no-any-return]

    def _free_window(self, held: torch.Tensor, keep: int) -> None:
        if self.by_segment:
            for row in held:
                self.allocator.free_swa_segment(row[:keep], start_pos=0)
        else:
            self.allocator.free_swa(held[:, :keep].reshape(-1))

    def _free(self, held: torch.Tensor, keep: int) -> None:
        if not self.by_segment:
            self.allocator.free(held.reshape(-1))
            return
        self.allocator.free_group_begin()
        for row in held:
            self.allocator.free_full_segment(row[:keep], start_pos=0)
            self.allocator.free_segment(row[keep:], start_pos=keep)
        self.allocator.free_group_end()


def _memory() -> list[dict[str, Any]]:
    rows = []
    for page_size in (1, 4, 16, 64, 256):
        for full_slots, window_slots in ((10_000_128, 1_000_192), (1_000_192, 1_000_192)):
            full = full_slots // page_size * page_size
            window = window_slots // page_size * page_size
            from hicache_guard.core.modes import Mode

            mapping = torch.zeros(full + page_size + 1, dtype=torch.int64)
            guard = PoolGuard(
                Mode.OBSERVE,
                full_slots=full,
                window_slots=window,
                page_size=page_size,
                mapping=mapping,
            )
            rows.append(
                {
                    "page_size": page_size,
                    "full_slots": full,
                    "window_slots": window,
                    "bytes_per_slot": guard.nbytes() / (full + window),
                }
            )
    return rows


def _syncs() -> list[dict[str, Any]]:
    rows = []
    for page_size in (1, 64):
        counted: dict[str, dict[str, int]] = {}
        for mode in ("off", *paired.MODES):
            paired.hooks(mode)
            cycle = Cycle(page_size, 4)
            counts: dict[str, int] = defaultdict(int)

            def clock(name: str, call: Callable[[], Any], counts: Any = counts) -> Any:
                with SyncCounter() as counter:
                    result = call()
                counts[name] += counter.total
                return result

            cycle.run(clock)
            counted[mode] = counts
        for mode in paired.MODES:
            for name, count in counted[mode].items():
                bare = counted["off"][name]
                rows.append(
                    {
                        "mode": mode,
                        "what": f"{name}, page {page_size}",
                        "added": f"{count - bare} (release: {bare})",
                    }
                )
    return rows


def main() -> None:
    report = paired.report(__doc__, Cycle, "cycle", rounds=15)
    print(json.dumps({**report, "memory": _memory(), "syncs": _syncs()}))


if __name__ == "__main__":
    main()
