"""What the pages of a host pool hold: their prints, beside the pool.

A page that is handed out holds nothing that is known. The pool is watched, not its class: its
module cannot be imported everywhere.
"""

from __future__ import annotations

from typing import Any

import torch

from hicache_guard.core.contents import UNKNOWN, Contents, Numbers

#: The attribute under which a host pool holds what its pages hold.
ATTRIBUTE = "_hicache_guard_contents"


def watch(pool: Any, device: torch.device) -> None:
    """Keep what the pages of a pool hold, on the device that its KV comes from."""
    size = int(pool.page_size)
    books = vars(pool)[ATTRIBUTE] = Contents(int(pool.size) // size + 2, size, device)
    _watch_alloc(pool, books)


def _watch_alloc(pool: Any, books: Contents) -> None:
    original = pool.alloc

    def alloc(*args: Any, **kwargs: Any) -> Any:
        slots = original(*args, **kwargs)
        if slots is not None and len(slots):
            books.write(slots, UNKNOWN)
        return slots

    pool.alloc = alloc


def contents_of(pool: Any) -> Contents:
    """What the pages of a watched host pool hold."""
    found: Contents = vars(pool)[ATTRIBUTE]
    return found


def numbers(slots: torch.Tensor) -> Numbers:
    """Host slots as numbers (int64). Every release keeps them on the host: elsewhere this waits."""
    return slots.detach().to("cpu", torch.int64).numpy()
