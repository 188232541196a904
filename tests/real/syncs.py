"""How often each public operation makes the host wait, with the guard and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from hicache_guard.adapters.hooks import install, uninstall
from hicache_guard.core.syncs import SyncCounter
from hicache_guard.repro import pools
from real.delayed import Withheld, as_on_a_device, withhold
from real.driver import Pair

Step = tuple[str, Callable[[], Any]]


def steps(allocator: Any, size: int) -> Iterator[Step]:
    """Every public operation once or more, each with what it needs; named for the report."""
    held: dict[str, torch.Tensor] = {}

    def take(name: str, pages: int) -> Callable[[], Any]:
        def call() -> None:
            held[name] = pools.extend_surely(allocator, pages * size)

        return call

    for name in "abcdefgh":
        yield "alloc" if size == 1 else "alloc_extend", take(name, 4)
    length, last = 4 * size, int(held["a"][-1])
    yield "decode", lambda: pools.decode(allocator, length + 1, last)
    if size > 1:
        yield "alloc_extend_swa_tail", lambda: pools.extend_tail(allocator, 4 * size, size)
    yield "translate", lambda: allocator.translate_loc_from_full_to_swa(held["a"])
    yield "free_swa", lambda: allocator.free_swa(held["b"][: 2 * size])
    yield "free", lambda: allocator.free(held["c"])
    yield "free_group_begin", allocator.free_group_begin
    yield "free in a group", lambda: allocator.free(held["d"])
    yield "free_group_end", allocator.free_group_end
    if hasattr(allocator, "free_segment"):
        yield (
            "free_swa_segment",
            lambda: allocator.free_swa_segment(held["e"][: 2 * size], start_pos=0),
        )
        yield (
            "free_full_segment",
            lambda: allocator.free_full_segment(held["e"][: 2 * size], start_pos=0),
        )
        yield (
            "free_segment",
            lambda: allocator.free_segment(held["e"][2 * size :], start_pos=2 * size),
        )
        yield "free_full", lambda: allocator.free_full(held["b"][: 2 * size])
    full, window = allocator.full_attn_allocator, allocator.swa_attn_allocator

    def direct(name: str, pool: Any) -> Callable[[], Any]:
        def call() -> None:
            held[name] = pool.alloc(2 * size)

        return call

    yield "full pool alloc", direct("full", full)
    yield "window pool alloc", direct("window", window)
    yield (
        "set_full_to_swa_mapping",
        lambda: allocator.set_full_to_swa_mapping(held["full"], held["window"]),
    )
    yield "full pool free", lambda: full.free(held["full"])
    yield "free_swa after it", lambda: allocator.free_swa(held["full"])
    yield "available_size", allocator.available_size
    if hasattr(allocator, "backup_state"):
        state: list[Any] = []
        yield "backup_state", lambda: state.append(allocator.backup_state())
        yield "alloc between", take("i", 2)
        yield "restore_state", lambda: allocator.restore_state(state[0])
    yield "alloc after all", take("j", 4)
    yield "clear", allocator.clear
    if hasattr(allocator, "resize"):
        sizes = SimpleNamespace(
            full_max_total_num_tokens=40 * size, swa_max_total_num_tokens=32 * size
        )
        yield "resize", lambda: allocator.resize(sizes)


def _counted(allocator: Any, size: int) -> list[tuple[str, int, int]]:
    """Operation, synchronising operators, and results of checks that it waited for."""
    counts = []
    for name, call in steps(allocator, size):
        waits = Withheld.waits
        with SyncCounter() as counter:
            call()
        counts.append((name, counter.total, Withheld.waits - waits))
    return counts


def count() -> list[dict[str, Any]]:
    """For each mode, page size and operation: waits of the release itself, and those added.

    No result of a check arrives before somebody waits for it, as on the busiest of devices.
    """
    withhold()
    rows = []
    for size in (1, 64):
        for mode in ("observe", "enforce", "strict"):
            pair = Pair(
                mode, page_size=size, full_pages=60, window_pages=50, need_sort=False, twin=True
            )
            as_on_a_device(pair)
            uninstall()
            bare = _counted(pair.plain, size)
            install(mode, on_report=pair.reports.append)
            guarded = _counted(pair.guarded, size)
            assert not pair.reports, str(pair.reports[0])
            for (name, own, _), (_, both, waits) in zip(bare, guarded, strict=True):
                rows.append(
                    {
                        "mode": mode,
                        "page_size": size,
                        "what": name,
                        "own": own,
                        "added": both - own,
                        "waits": waits,
                    }
                )
    return rows
