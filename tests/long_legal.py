"""Many random legal operations on the release on the path: no alarm, and in observe no difference.

The driver keeps what a scheduler keeps and does only what SGLang's callers do: prefill, tail
preallocation, decode, out-of-window eviction, release whole, in part, in groups and by segment,
load-back, clear. In observe an unguarded allocator does the same beside the guarded one, and free
lists and mapping are compared after every operation; in the others, off among them, the independent
audit looks every 50. Prints one JSON line a mode.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from typing import Any

import torch

from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import install, running_version, uninstall
from hicache_guard.repro import pools
from hicache_guard.repro.audit import audit
from hicache_guard.repro.churn_25805 import compute_slots_without_triton

PAGE_SIZES = (1, 4, 16, 64)


@dataclass
class Request:
    """A row as SGLang keeps it (int32), and the position from which it has window KV."""

    row: torch.Tensor
    evicted: int


class Traffic:
    """The same random legal operations on one allocator or on two side by side."""

    def __init__(self, allocators: list[Any], seed: int) -> None:
        self.pools = allocators
        self.size = int(allocators[0].page_size)
        self.segments = hasattr(allocators[0], "free_swa_segment")
        # On 0.5.12 itself a page freed in part and a preallocated tail together are fault C1.
        self.parts = running_version() != "0.5.12"
        self.requests: list[Request] = []
        self.random = random.Random(seed)
        self.done = 0

    def step(self) -> None:
        """One operation, or none where the draw does not fit the state."""
        choice = self.random.choices(
            (self.admit, self.admit_tail, self.decode, self.evict, self.finish, self.group,
             self.load_back, self.clear),
            (10, 4, 30, 12, 8, 3, 2, 0.05),
        )[0]  # fmt: skip
        choice()

    def _each(self, call: Any) -> Any:
        """Do it on every allocator; all must answer alike."""
        answers = [call(pool) for pool in self.pools]
        self.done += 1
        first = answers[0]
        for other in answers[1:]:
            same = other is None if first is None else torch.equal(first, other)
            assert same, "the guarded allocator answered otherwise"
        return first

    def _room(self, tokens: int, window: int) -> bool:
        pages = tokens // self.size + 1
        pool = self.pools[0]
        return bool(
            pool.full_available_size() >= pages * self.size
            and pool.swa_available_size() >= (window // self.size + 1) * self.size
        )

    def admit(self) -> None:
        count = self.random.randint(1, 6 * self.size + 8)
        if len(self.requests) < 8 and self._room(count, count):
            row = self._each(lambda pool: pools.extend(pool, count))
            self.requests.append(Request(row.to(torch.int32), 0))

    def admit_tail(self) -> None:
        if self.size == 1 or len(self.requests) >= 8:
            return
        count = self.random.randint(1, 8 * self.size)
        start = self.random.randint(0, count - 1) // self.size * self.size
        if self._room(count, count - start):
            row = self._each(lambda pool: pools.extend_tail(pool, count, count - start))
            self.requests.append(Request(row.to(torch.int32), start))

    def decode(self) -> None:
        if not self.requests or not self._room(1, 1):
            return
        request = self.random.choice(self.requests)
        length = len(request.row)
        if request.evicted >= length and length % self.size:
            return
        last = int(request.row[-1])
        if self.size == 1 or self.segments:
            new = self._each(lambda pool: pools.decode(pool, length + 1, last))
        else:  # interpreted, the decode kernel of these releases takes ten milliseconds
            new = self._each(lambda pool: pools.extend(pool, 1, prefix=length, last=last))
        request.row = torch.cat((request.row, new.to(torch.int32)))

    def evict(self) -> None:
        if not self.requests:
            return
        request = self.random.choice(self.requests)
        whole = len(request.row) // self.size * self.size
        until = self.random.randint(0, whole) // self.size * self.size
        if until <= request.evicted:
            return
        dead = request.row[request.evicted : until]
        start = request.evicted
        if self.segments:
            self._each(lambda pool: pool.free_swa_segment(dead, start_pos=start))
        else:
            self._each(lambda pool: pool.free_swa(dead))
        request.evicted = until

    def _release(self, request: Request) -> None:
        row, evicted = request.row, request.evicted
        if self.segments:
            if evicted:
                self._each(lambda pool: pool.free_full_segment(row[:evicted], start_pos=0))
            if evicted < len(row):
                self._each(lambda pool: pool.free_segment(row[evicted:], start_pos=evicted))
            return
        if self.parts and len(row) % self.size > 1 and self.random.random() < 0.3:
            # An unaligned end that nobody names again: its page goes all the same.
            row = row[: -self.random.randint(1, len(row) % self.size - 1)]
        self._each(lambda pool: pool.free(row))

    def finish(self) -> None:
        if self.requests:
            index = self.random.randrange(len(self.requests))
            self._release(self.requests.pop(index))

    def group(self) -> None:
        if len(self.requests) < 3:
            return
        self._each(lambda pool: pool.free_group_begin())
        for _ in range(self.random.randint(1, 3)):
            self.finish()
        self._each(lambda pool: pool.free_group_end())

    def load_back(self) -> None:
        """HiCache: both sides are allocated on their own, and mapped."""
        pages = self.random.randint(2, 4)
        if not self._room((pages + 1) * self.size, (pages + 1) * self.size):
            return
        count = pages * self.size
        full = self._each(lambda pool: pool.full_attn_allocator.alloc(count))
        window = self._each(lambda pool: pool.swa_attn_allocator.alloc(count))
        assert full is not None
        assert window is not None
        self._each(lambda pool: pool.set_full_to_swa_mapping(full, window))
        self.requests.append(Request(full.to(torch.int32), 0))

    def clear(self) -> None:
        self._each(lambda pool: pool.clear())
        self.requests.clear()

    def compare(self) -> None:
        """Both allocators are in the same state, bit for bit."""
        plain, guarded = self.pools
        assert torch.equal(plain.full_to_swa_index_mapping, guarded.full_to_swa_index_mapping)
        for side in ("full_attn_allocator", "swa_attn_allocator"):
            ours, theirs = getattr(guarded, side), getattr(plain, side)
            assert torch.equal(ours.free_pages, theirs.free_pages)
            if theirs.release_pages is not None:
                assert torch.equal(ours.release_pages, theirs.release_pages)


def run(mode: str, operations: int, seed: int) -> dict[str, Any]:
    """``operations`` legal operations in ``mode``, spread over the page sizes."""
    counted: dict[str, int] = {}
    done = 0
    for turn, page_size in enumerate(PAGE_SIZES):
        slots = 48 * page_size
        uninstall()
        plain = guarded = pools.build(slots, slots * 2 // 3, page_size, need_sort=turn % 2 == 1)
        if mode != "off":
            install(mode)
            guarded = pools.build(slots, slots * 2 // 3, page_size, need_sort=turn % 2 == 1)
        observe = mode == "observe"
        traffic = Traffic([plain, guarded] if observe else [guarded], seed + turn)
        while traffic.done < operations // len(PAGE_SIZES):
            before = traffic.done
            traffic.step()
            if observe:
                traffic.compare()
            elif traffic.done // 50 != before // 50:
                books = {str(i): r.row for i, r in enumerate(traffic.requests)}
                faults = audit(guarded, books)
                assert not faults, faults
        done += traffic.done
        found = guard_of(guarded).tally.violations if mode != "off" else {}
        for fault, count in found.items():
            counted[fault.value] = counted.get(fault.value, 0) + count
    return {"mode": mode, "operations": done, "counted": counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000, help="over all modes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="*", default=["observe", "enforce", "strict"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    pools.quiet()
    compute_slots_without_triton()
    shares = {"off": 0.5, "observe": 0.5, "enforce": 0.3, "strict": 0.2}
    whole = sum(shares[mode] for mode in options.modes)
    for mode in options.modes:
        operations = int(options.operations * shares[mode] / whole)
        print(json.dumps(run(mode, operations, options.seed)), flush=True)


if __name__ == "__main__":
    main()
