"""The seam of translations that are kept across calls (fault C2, C3; PR #25889).

Up to 0.5.12.post1 a pool remembers where the window KV of a batch goes and reuses that for later
layers: ``cached_loc`` of the DeepSeek-V4 pool, ``swa_loc`` of the hybrid pool. A remembered
translation proves nothing once the mapping was replaced or written, or another batch came first. It
is compared with a fresh one whenever the mapping's epoch or the slots differ from those it was read
at; equal values are no fault, since another request's entries may change at any time.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from hicache_guard.adapters.link import link_of
from hicache_guard.adapters.state import settings
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.faults import Fault
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.modes import Mode
from hicache_guard.core.report import Violation, tell
from hicache_guard.core.translation import Difference, Remembered

logger = logging.getLogger("hicache_guard")
Method = Callable[..., Any]

_WITNESS = "_hicache_guard_witness"
_ADAPTERS = __name__.rpartition(".")[0]


def set_swa_key_buffer_radix_fused(
    original: Method, pool: Any, layer_id: int, raw_loc: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    return _store(original, pool, layer_id, raw_loc, args, kwargs)


def set_swa_key_buffer_radix_fused_norm_rope(
    original: Method, pool: Any, layer_id: int, raw_loc: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    return _store(original, pool, layer_id, raw_loc, args, kwargs)


def _store(
    original: Method, pool: Any, layer_id: int, raw_loc: torch.Tensor, args: Any, kwargs: Any
) -> Any:
    remembered = pool.cached_loc if pool._should_cache_swa else None
    if remembered is not None and layer_id != pool.start_layer:
        pool.cached_loc = _checked(pool, remembered, raw_loc)
    result = original(pool, layer_id, raw_loc, *args, **kwargs)
    if pool._should_cache_swa and pool.cached_loc is not remembered:
        _remember(pool, pool.cached_loc, raw_loc)
    return result


def set_swa_loc(original: Method, pool: Any, loc: torch.Tensor | None) -> None:
    original(pool, loc)
    # The slots that ``loc`` was translated from are not told; the first write shows them. It is
    # worth something only if the mapping is then as it is now.
    vars(pool).pop(_WITNESS, None)
    if loc is not None and pool.full_to_swa_index_mapping is not None:
        vars(pool)[_WITNESS] = Remembered(loc, None, pool.full_to_swa_index_mapping)


def set_kv_buffer(
    original: Method, pool: Any, layer: Any, loc: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    remembered = pool.swa_loc
    if remembered is not None and pool.layers_mapping[layer.layer_id][1]:
        witness, mapping = vars(pool).get(_WITNESS), pool.full_to_swa_index_mapping
        if witness is not None and witness.for_nobody and witness.in_epoch(remembered, mapping):
            _remember(pool, remembered, loc)
        pool.swa_loc = _checked(pool, remembered, loc)
    return original(pool, layer, loc, *args, **kwargs)


def _remember(pool: Any, translation: torch.Tensor, slots: torch.Tensor) -> None:
    vars(pool)[_WITNESS] = Remembered(translation, slots, pool.full_to_swa_index_mapping)


def _checked(pool: Any, remembered: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The translation to use for ``slots``: the remembered one, or (enforce) a fresh one."""
    mapping = pool.full_to_swa_index_mapping
    witness = vars(pool).get(_WITNESS)
    if witness is not None and witness.holds(remembered, slots, mapping):
        return remembered
    used = compared(pool, remembered, slots)
    if used is not remembered:
        _remember(pool, used, slots)
    return used


def compared(pool: Any, remembered: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The translation to use for ``slots``, after a comparison with a fresh one; see above."""
    fresh: torch.Tensor = pool.translate_loc_from_full_to_swa(slots)
    link, current = link_of(pool), settings()
    difference = Difference(slots, remembered, fresh)
    if current.mode is Mode.STRICT:
        difference.wait()
    watch(Watched(difference, sys._getframe(2), link.guard if link is not None else None))
    return fresh if current.mode is Mode.ENFORCE else remembered


class Watched:
    """A comparison under way, and where it was asked for."""

    def __init__(self, difference: Difference, caller: FrameType, guard: PoolGuard | None) -> None:
        self.difference = difference
        self.guard = guard
        while caller.f_back and caller.f_globals.get("__name__", "").startswith(_ADAPTERS):
            caller = caller.f_back
        self.place = f"{caller.f_code.co_filename}:{caller.f_lineno}"


_under_way: deque[Watched] = deque(maxlen=4096)


def watch(watched: Watched) -> None:
    """Report this comparison and those before it, as far as they have arrived."""
    _under_way.append(watched)
    while _under_way and _under_way[0].difference.arrived():
        done = _under_way.popleft()
        if done.difference.count:
            _report(done)


def _report(watched: Watched) -> None:
    full, old, new = watched.difference.first()
    current = settings()
    page_size = watched.guard.page_size if watched.guard is not None else 1
    violation = Violation(
        fault=Fault.STALE_TRANSLATION,
        pool="full",
        slot=full,
        page=full // page_size,
        slots=watched.difference.count,
        operation=f"a window write at {watched.place}",
        request=None,
        expected=f"window slot {new} (the mapping now)",
        found=f"window slot {old} (remembered)",
    )
    current.tally.violations[violation.fault] += 1
    current.tally.slots[violation.fault] += violation.slots
    if current.mode is not Mode.STRICT:
        logger.warning("%s", violation)
    tell(current.on_report, violation)
    if current.mode is Mode.STRICT:
        raise GuardViolation(violation)
