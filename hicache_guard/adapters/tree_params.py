"""Fail closed: a prefix tree that nobody hooked reuses nothing.

Every tree of SGLang is made from ``CacheInitParams`` and takes over its ``disable``. So over a
guarded allocator that says "disabled" until a tree takes the parameters whose methods are hooked;
any other tree, a third party's or a subclass that matches in its own way, computes every prefix.
That is said once, with the way out: ``HICACHE_GUARD_UNPROVED_TREES=allow``. In observe mode it is
only said.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from hicache_guard.adapters import state
from hicache_guard.adapters.link import AllocatorLink, link_of
from hicache_guard.core.modes import Mode

#: Set to "allow" to have prefixes reused that nobody proves.
SWITCH = "HICACHE_GUARD_UNPROVED_TREES"


class Unproved:
    """The ``disable`` of a tree that is not hooked: true, but in observe mode, and not silent."""

    def __init__(self, mode: Mode) -> None:
        self._off = mode is not Mode.OBSERVE
        self._said = False

    def __bool__(self) -> bool:
        if not self._said:
            self._said = True
            # Whoever asks is a method of the tree, or has it at hand.
            at_hand = sys._getframe(1).f_locals.values()
            trees = [it for it in at_hand if getattr(it, "__dict__", {}).get("disable") is self]
            name = type(trees[0]).__name__ if trees else "a prefix tree"
            if self._off:
                what = f"prefix reuse is off; {SWITCH}=allow turns it on, unproved"
            else:
                what = "its hits are not looked at"
            state.logger.error("%s cannot be guarded here: %s", name, what)
        return self._off


def __init__(original: Callable[..., None], params: Any, *args: Any, **kwargs: Any) -> None:
    original(params, *args, **kwargs)
    allocator = params.token_to_kv_pool_allocator
    link = None if allocator is None or not hasattr(allocator, "__dict__") else link_of(allocator)
    if params.disable or os.environ.get(SWITCH) == "allow":
        return
    if isinstance(link, AllocatorLink):
        params.disable = Unproved(link.guard.mode)


def admit(params: Any) -> None:
    """A tree whose methods are hooked takes ``params``: what was asked for holds."""
    if isinstance(params.disable, Unproved):
        params.disable = False
