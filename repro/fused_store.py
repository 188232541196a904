"""DeepSeek-V4's window pool where it remembers a translation: its real class, without buffers.

Only the memo of ``set_swa_key_buffer_radix_fused`` is at stake (#25889), so the fused GPU store is
replaced by rows that notice a write out of range.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from hicache_guard.repro.outcomes import NotInThisRelease, OutOfRange


class Rows:
    """The rows of a window pool, in place of the fused GPU store: write, or say out of range."""

    def __init__(self, count: int) -> None:
        self.kv = torch.full((count, 1), -1.0)

    def set_key_buffer_fused(self, layer: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        if bool(((rows < 0) | (rows >= len(self.kv))).any()):
            raise OutOfRange(f"window rows {rows.tolist()} in a pool of {len(self.kv)}")
        self.kv[rows.long()] = values


def remembering_pool(rows: int) -> Any:
    """DeepSeek-V4's real pool class without buffers: only its translation memo is at stake."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool as Pool

    if not hasattr(Pool, "set_swa_key_buffer_radix_fused"):
        raise NotInThisRelease("no fused window write")
    write = inspect.unwrap(Pool.set_swa_key_buffer_radix_fused)
    if "cached_loc" not in write.__code__.co_names:
        raise NotInThisRelease("translations are not remembered")
    pool = Pool.__new__(Pool)
    pool.start_layer = pool._stage_start = 0
    pool._should_cache_swa = True
    pool.cached_loc = None
    pool.swa_kv_pool = Rows(rows)
    return pool
