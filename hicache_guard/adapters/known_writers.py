"""SGLang code that writes the bare mapping instead of calling an allocator method.

0.5.15 to 0.5.18 move a window slot to another full slot by ``set_full_to_swa_mapping`` and then
zero the old entry directly. While such code runs, a write that no seam saw needs no taking stock:
it writes zeros, and "no window slot" is always true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hicache_guard.adapters.link import link_of

Method = Callable[..., Any]


def _trusted(original: Method, holder: Any, args: Any, kwargs: Any) -> Any:
    cache = getattr(holder, "cache", holder)
    link = link_of(cache.token_to_kv_pool_allocator)
    if link is None:
        return original(holder, *args, **kwargs)
    before, link.trusted_writer = link.trusted_writer, True
    try:
        return original(holder, *args, **kwargs)
    finally:
        link.trusted_writer = before


def _recover_tombstone_keeping_locked_full(
    original: Method, tree: Any, *args: Any, **kwargs: Any
) -> Any:
    return _trusted(original, tree, args, kwargs)


def _restore_device_value_with_locked_full(
    original: Method, component: Any, *args: Any, **kwargs: Any
) -> Any:
    return _trusted(original, component, args, kwargs)


def apply_component_action(original: Method, component: Any, *args: Any, **kwargs: Any) -> Any:
    return _trusted(original, component, args, kwargs)
