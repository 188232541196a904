"""The seam of translations that are passed along with the slots they were read for.

Since 0.5.13 no pool remembers a translation: the attention backend reads one for each forward pass,
and every layer passes it to the pool with the full slots. The mapping may have been rebuilt between
(a load-back), so what is passed is compared with a fresh one: once a pass, by identity, and again
whenever the mapping was written since. Nothing waits for the device.

Captured and compiled code passes buffers that are filled later; that is not looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from hicache_guard.adapters.cached_translation import compared
from hicache_guard.adapters.link import link_of
from hicache_guard.core.translation import Remembered

Method = Callable[..., Any]

_WITNESS = "_hicache_guard_passed"


def set_kv_buffer(
    original: Method, pool: Any, layer: Any, where: Any, *args: Any, **kwargs: Any
) -> Any:
    if not pool.layers_mapping[layer.layer_id][1] or _unseen():
        return original(pool, layer, where, *args, **kwargs)
    if "swa_loc" in kwargs:  # 0.5.13
        kwargs["swa_loc"] = _checked(pool, where, kwargs["swa_loc"])
    elif getattr(where, "swa_loc", None) is not None:
        given = where.swa_loc
        used = _checked(pool, where.loc, given)
        if used is not given:
            where = dataclasses.replace(where, swa_loc=used)
    return original(pool, layer, where, *args, **kwargs)


set_mla_kv_buffer = set_kv_buffer


def _unseen() -> bool:
    """Whether what runs now is recorded, to be run later on other values."""
    return torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


def _checked(pool: Any, slots: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor | None:
    """The translation to use: what was given, or (enforce) a fresh one."""
    link, mapping = link_of(pool), pool.full_to_swa_index_mapping
    # Of a pool that nobody guards, and of other slots than those that are written, nothing is said.
    if link is None or given is None or given.numel() != slots.numel():
        return given
    witness = vars(pool).get(_WITNESS)
    if witness is not None:
        known, answer = witness
        if known.holds(given, slots, mapping):
            return answer  # type: ignore[no-any-return]
    used = compared(pool, given, slots)
    used = given if used is given else used.to(given.dtype)
    # The answer is kept with the tensors that it was given for, not instead of them: the caller
    # passes its own again in the next layer.
    vars(pool)[_WITNESS] = Remembered(given, slots, mapping), used
    return used
