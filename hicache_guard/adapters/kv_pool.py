"""The pool seam: translations of full slots to window slots, validated where they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hicache_guard.adapters import window_reads
from hicache_guard.adapters.hooks import require_complete
from hicache_guard.adapters.link import Factory, link_of


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    def hooked(pool: Any, kv_indices: torch.Tensor) -> Any:
        proved = window_reads.translated(original, pool, kv_indices)
        if proved is not None:
            return proved
        window = original(pool, kv_indices)
        link = link_of(pool)
        if link is None:
            # Its allocator may be one that nobody hooked.
            require_complete()
            return window
        guard = link.guard
        if guard.operation is not None:
            # An allocation translates the slots that it continues after.
            link.captured_last = window
            return window
        mapping = pool.full_to_swa_index_mapping
        ours = mapping is guard.map.mapping
        unseen = ours and guard.map.unseen_writes(mapping)
        if ours and not unseen and not guard.validates_translations:
            return window
        with link.operation("translate_loc_from_full_to_swa"):
            if unseen:
                window = original(pool, kv_indices)  # taking stock may have erased entries
            return guard.translate(kv_indices, window)

    return hooked


translate_loc_from_full_to_swa = Factory(_reading)
