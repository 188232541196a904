"""The fault catalogue as runnable cases: each drives real SGLang code into one known fault.

A case takes a ``Bench`` and performs operations on it; it judges nothing. Where a release lacks the
call, it raises ``NotInThisRelease``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hicache_guard.repro.fused_store import Rows, remembering_pool
from hicache_guard.repro.outcomes import NotInThisRelease, WrongSlot
from hicache_guard.repro.pools import Bench, Slots, build, decode, extend, slots
from hicache_guard.repro.prefix_tree import PrefixTree

Run = Callable[[], Bench]


def _c1() -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    old = bench.take("A", 6)
    bench.drop("A")
    bench.do(
        "A frees its first 5 slots: both pages go, the entry of the 6th stays",
        lambda: pool.free(old[:5]),
        request="A",
    )
    bench.look()
    tail = bench.take("B", 16, tail=4)
    other = bench.take("C", 8)
    bench.drop("B")
    bench.do("B frees its slots", lambda: pool.free(tail), request="B")
    bench.look()
    bench.drop("C")
    bench.do("C frees its slots", lambda: pool.free(other), request="C")
    bench.look()
    return bench


def _mapping(size: int, targets: Slots, rows: Slots) -> torch.Tensor:
    mapping = torch.zeros(size, dtype=torch.int64)
    mapping[rows] = targets
    return mapping


def _write(pool: Any, layer: int, full: Slots, value: float, expected: Slots) -> None:
    pool.set_swa_key_buffer_radix_fused(layer, full, torch.full((len(full), 1), value))
    got = (pool.swa_kv_pool.kv == value).nonzero()[:, 0]
    if got.tolist() != expected.tolist():
        raise WrongSlot(f"layer {layer} wrote window rows {got.tolist()}, not {expected.tolist()}")


def _c2_replaced() -> Bench:
    full = slots(4, 5, 6, 7)
    pool = remembering_pool(32)
    pool.register_mapping(_mapping(33, slots(8, 9, 10, 11), full))
    _write(pool, 0, full, 1.0, slots(8, 9, 10, 11))
    pool.register_mapping(_mapping(33, slots(20, 21, 22, 23), full))
    _write(pool, 1, full, 2.0, slots(20, 21, 22, 23))
    return Bench(None)


def _c2_shrunk() -> Bench:
    full = slots(4, 5, 6, 7)
    pool = remembering_pool(32)
    pool.register_mapping(_mapping(33, slots(28, 29, 30, 31), full))
    _write(pool, 0, full, 1.0, slots(28, 29, 30, 31))
    pool.swa_kv_pool = Rows(16)
    pool.register_mapping(_mapping(17, slots(8, 9, 10, 11), full))
    _write(pool, 1, full, 2.0, slots(8, 9, 10, 11))
    return Bench(None)


def _c3_in_place() -> Bench:
    full = slots(4, 5, 6, 7)
    pool = remembering_pool(32)
    mapping = _mapping(33, slots(8, 9, 10, 11), full)
    pool.register_mapping(mapping)
    _write(pool, 0, full, 1.0, slots(8, 9, 10, 11))
    mapping[full] = slots(20, 21, 22, 23)
    _write(pool, 1, full, 2.0, slots(20, 21, 22, 23))
    return Bench(None)


def _c3_other_batch() -> Bench:
    pool = remembering_pool(32)
    pool.register_mapping(torch.arange(33))
    _write(pool, 0, slots(4, 5, 6, 7), 1.0, slots(4, 5, 6, 7))
    _write(pool, 1, slots(12, 13, 14, 15), 3.0, slots(12, 13, 14, 15))
    return Bench(None)


def _c4() -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    bench.take("other", 8)
    old = bench.take("A", 8)
    bench.drop("A")
    free_full = getattr(pool, "free_full", None) or pool.full_attn_allocator.free
    bench.do("A's full side is freed alone", lambda: free_full(old), request="A")
    bench.do(
        "A's window side is freed by its own slots",
        lambda: pool.swa_attn_allocator.free(slots(12, 16)),
        request="A",
    )
    reused = bench.take("B", 8, tail=0)
    bench.take("C", 4)
    bench.drop("B")
    bench.do("B frees its slots", lambda: pool.free(reused), request="B")
    bench.look()
    return bench


def _c5() -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    mine = bench.take("A", 7)
    bench.take("other", 8)
    bench.drop("A")
    bench.do(
        "A frees its first 5 slots; the page of the 6th and 7th goes too",
        lambda: pool.free(mine[:5]),
        request="A",
    )
    bench.take("B", 8)
    bench.do("A frees its last 2 slots", lambda: pool.free(mine[5:]), request="A")
    bench.look()
    return bench


def _c6(other: int) -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    if not hasattr(pool, "free_segment") or not hasattr(pool, "free_swa_segment"):
        raise NotInThisRelease("no segment frees")
    bench.take("other", other)
    mine = bench.take("B", 16, tail=4)
    bench.drop("B")
    bench.do(
        "B frees its row as a segment, 3 pages of it without window KV",
        lambda: pool.free_segment(mine, start_pos=0),
        request="B",
    )
    bench.look()
    bench.take("C", 16)
    return bench


def _c7() -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    mine = bench.take("A", 12)
    bench.take("other", 12)

    def free_window() -> None:
        if hasattr(pool, "free_swa_segment"):
            pool.free_swa_segment(mine[:8], start_pos=0)
        else:
            pool.free_swa(mine[:8])

    bench.do("A's first 8 tokens leave the window", free_window, request="A")
    bench.look()
    bench.do("they leave it again", free_window, request="A")
    bench.look()
    bench.take("C", 16)
    return bench


def _c8() -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    bench.take("other", 16)
    mine = bench.take("A", 8)
    bench.drop("A")
    bench.do("A frees its slots", lambda: pool.free(mine), request="A")
    bench.do("A frees them again", lambda: pool.free(mine), request="A")
    bench.look()
    bench.take("B", 8)
    bench.take("C", 8)
    return bench


def _c9() -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    bench.take("other", 8)
    mine = bench.take("A", 6)
    bench.drop("A")
    bench.do(
        "A frees its row with a zero-filled end",
        lambda: pool.free(torch.cat((mine, slots(0, 0)))),
        request="A",
    )
    bench.look()
    bench.take("B", 4)
    return bench


def _c10() -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    bench.take("other", 8)
    mine = bench.take("A", 6)
    bench.drop("A")
    bench.do(
        "A frees its row and a -1", lambda: pool.free(torch.cat((mine, slots(-1)))), request="A"
    )
    bench.look()
    bench.take("B", 6)
    return bench


def _c11() -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    bench.take("other", 8)
    mine = bench.take("A", 8)
    bench.drop("A")
    free_full = getattr(pool, "free_full", None) or pool.full_attn_allocator.free
    bench.do(
        "A's full side is freed alone and its window side never",
        lambda: free_full(mine),
        request="A",
    )
    bench.take("B", 8)
    return bench


def _c12() -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    if not hasattr(pool, "backup_state"):
        raise NotInThisRelease("no backup_state")
    bench.take("other", 8)
    state = bench.do("state is backed up", pool.backup_state)
    bench.take("draft", 8)
    bench.drop("draft")
    bench.do("and restored", lambda: pool.restore_state(state))
    bench.look()
    bench.take("B", 12, tail=4)
    bench.take("C", 4)
    state = bench.do("state is backed up", pool.backup_state)
    other = bench.holds["other"]
    bench.do("other is freed meanwhile", lambda: pool.free(other), request="other")
    bench.do("and restored", lambda: pool.restore_state(state))
    bench.look()
    return bench


def _c13() -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    mine = bench.take("A", 8)
    bench.drop("A")
    bench.do("a free group opens", pool.free_group_begin)
    bench.do("A's free joins it", lambda: pool.free(mine), request="A")
    bench.do("everything is cleared", pool.clear)
    bench.take("B", 8)
    if getattr(pool, "free_group", None) is not None:
        bench.do("the group ends", pool.free_group_end)
    bench.look()
    return bench


def _wrong_read(bench: Bench, path: Slots, window: int) -> str | None:
    """What the window layers, which read the last W - 1 tokens next, get wrong; None if nothing."""
    read = bench.allocator.translate_loc_from_full_to_swa(path[max(0, len(path) - (window - 1)) :])
    if not bool((read <= 0).any()):
        return None
    return f"the window layers read slots {read.tolist()} of a prefix called a hit"


def _c14(*, unified: bool, core: str = "python") -> Bench:
    bench = Bench(build())
    pool = bench.allocator
    tree = PrefixTree(bench, unified=unified, core=core)
    mine = bench.take("tree", 16)
    bench.do("16 tokens are inserted", lambda: tree.insert(range(16), mine))
    bench.do(
        "their last 8 lose their window slots behind the tree", lambda: pool.free_swa(mine[8:])
    )
    bench.look()
    bench.take("B", 8)
    path = bench.do("they are asked for", lambda: tree.match(range(16)))
    wrong = bench.do("and read", lambda: _wrong_read(bench, path, tree.WINDOW))
    if wrong:
        raise WrongSlot(wrong)
    return bench


def _c15(*, core: str = "python") -> Bench:
    bench = Bench(build())
    tree = PrefixTree(bench, unified=True, core=core)
    bench.take("other", 16)
    mine = bench.take("tree", 16, tail=4)
    bench.do(
        "a row with window KV for 4 of its 16 tokens is inserted as live",
        lambda: tree.insert(range(16), mine),
    )
    bench.drop("tree")
    path = bench.do("it is asked for", lambda: tree.match(range(16)))
    wrong = bench.do("and read", lambda: _wrong_read(bench, path, tree.WINDOW))
    bench.do("and evicted", lambda: tree.evict(16))
    bench.look()
    bench.take("B", 16)
    if wrong:
        raise WrongSlot(wrong)
    return bench


def _last_page_lost() -> Bench:
    """Sibling of C14: decode continues after a token whose window slot is gone."""
    bench = Bench(build())
    pool = bench.allocator
    mine = bench.take("A", 6)
    bench.do("A's window slots are freed behind it", lambda: pool.free_swa(mine), request="A")
    bench.take("B", 8)
    more = bench.do("A decodes on", lambda: decode(pool, 7, int(mine[-1])), request="A")
    bench.holds["A"] = torch.cat((mine, more))
    bench.look()
    return bench


def _repointed() -> Bench:
    """Sibling of C1, reports 36081 and 36135: a queued window free is translated too late."""
    bench = Bench(build())
    pool = bench.allocator
    kept = bench.take("node", 8)
    bench.do("a free group opens", pool.free_group_begin)
    bench.do("the node's window side is freed: queued", lambda: pool.free_swa(kept))
    # No audit while the group is open: what is queued belongs to nobody for that long.
    incoming = bench.do("a newcomer brings the same tokens", lambda: extend(pool, 8))

    def recover() -> None:
        window = pool.translate_loc_from_full_to_swa(incoming).to(torch.int64)
        pool.set_full_to_swa_mapping(kept, window)
        pool.full_to_swa_index_mapping[incoming] = 0
        pool.full_attn_allocator.free(incoming)

    bench.do("the node is recovered with the window slots of a newcomer", recover)
    bench.do("the group ends", pool.free_group_end)
    bench.look()
    bench.take("B", 8)
    return bench


def _half_failed() -> Bench:
    """Sibling of C11: decode finds a full page and no window page, and keeps the full page."""
    bench = Bench(build(64, 16))
    pool = bench.allocator
    if not hasattr(pool.full_attn_allocator, "use_triton_kernels"):
        raise NotInThisRelease("reads past the end of an empty free list and dies (to 0.5.21)")
    mine = bench.take("A", 16)
    got = bench.do("A decodes on", lambda: decode(pool, 17, int(mine[-1])), request="A")
    if got is not None:
        bench.holds["A"] = torch.cat((mine, got))
    bench.look()
    return bench


#: The catalogue's rows; their titles are in ``titles``.
CASES: dict[str, Run] = {
    "C1": _c1,
    "C2": _c2_replaced,
    "C2b": _c2_shrunk,
    "C3": _c3_in_place,
    "C3b": _c3_other_batch,
    "C4": _c4,
    "C5": _c5,
    "C6": lambda: _c6(16),
    "C6b": lambda: _c6(8),
    "C7": _c7,
    "C8": _c8,
    "C9": _c9,
    "C10": _c10,
    "C11": _c11,
    "C12": _c12,
    "C13": _c13,
    "C14": lambda: _c14(unified=False),
    "C14b": lambda: _c14(unified=True),
    "C14c": lambda: _c14(unified=True, core="rust"),
    "C15": _c15,
    "C15b": lambda: _c15(core="rust"),
    "S1": _last_page_lost,
    "S2": _repointed,
    "S3": _half_failed,
}
