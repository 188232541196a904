"""Fresh allocators of the release on the path, and what a guard says of each.

Hooks are put in place once a process; every allocator that is built afterwards has a guard of its
own. Page allocation runs without Triton's interpreter, which takes ten milliseconds a call.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from hicache_guard.adapters import hooks
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.report import Violation
from hicache_guard.repro import pools
from hicache_guard.repro.churn_25805 import _home_of_page_allocator, compute_slots_without_triton


class Stage:
    """Builds allocators under one mode of the guard and hears their reports."""

    def __init__(self, mode: str) -> None:
        """Import the release and hook it. Raises UnguardedError where a seam is missing."""
        pools.quiet()
        hooks.install(mode, on_report=self._hear)
        compute_slots_without_triton()
        _decode_without_triton()
        self.heard: list[Violation] = []

    def build(self, full: int, window: int, page: int, *, sort: bool) -> Any:
        """A new allocator of so many slots; what was heard of others is forgotten."""
        gc.collect(0)
        self.heard = []
        try:
            return pools.build(full, window, page, need_sort=sort)
        except (RuntimeError, MemoryError, ValueError) as error:
            why = str(error).split("\n")[0] or type(error).__name__
            raise ConfigError(
                f"pools of {full:,} and {window:,} slots cannot be built here: {why[:200]}"
            ) from None

    def _hear(self, violation: Violation) -> None:
        self.heard.append(violation)


def _decode_without_triton() -> None:
    """As ``compute_slots_without_triton``, for the kernel of single-token decoding."""
    module: Any = _home_of_page_allocator()

    class Launcher:
        def __getitem__(self, grid: Any) -> Any:
            return _slots_of_a_step

    module.alloc_decode_kernel = Launcher()


def _slots_of_a_step(
    lengths: torch.Tensor,
    last: torch.Tensor,
    free: torch.Tensor,
    out: torch.Tensor,
    _batch: int,
    page_size: int,
) -> None:
    """The slot of each request's new token: after its last, or the first of the next free page."""
    out.copy_(last + 1)
    begins = ((lengths - 1) % page_size == 0).nonzero().reshape(-1)
    pages = free[: begins.shape[0]]  # fewer where there is no room; the release sees that itself
    out[begins[: pages.shape[0]]] = pages * page_size
