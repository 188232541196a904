"""How often the guard makes the host wait for a device over a whole story with a host tier.

On a CPU nothing waits, so here the tensors that would lie on a device are marked, and what is made
of them is marked too: the mapping, the free lists, the rows of requests, the guard's books. A read
of a marked tensor by the host (``numpy``, ``item``, ``cpu``, a mask as an index, ...) is counted
where a function of ours is the one that reads. What travels in a ``HostCopy`` may be read when it
has arrived, and arrives when it is waited for (``delayed``), or, ``late``, soon after.

The stories are those of ``host_tier.py`` (in order) and ``stale_copies.py`` (a host copy handed on).
Proof by mutation: "prints on the host", with the books of the host tier as they were once.

Prints one JSON line a scene, tree, page size and mode. Run: ``python -P host_waits.py``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from hicache_guard.adapters import host_pool, tree_link
from hicache_guard.adapters.allocator import guard_of
from hicache_guard.core import contents, guard
from hicache_guard.core.syncs import SyncCounter
from hicache_guard.repro import scheduling
from real import delayed, stale_copies, tales
from real.driver import raw_free, sub_allocators
from real.host_tier import Story

_READS = {
    torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu,
    torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.__float__,
    torch.Tensor.__array__,
}  # fmt: skip
#: Functions of ours that look at a CPU's memory, and go another way on a device.
_NEVER_ON_A_DEVICE = {guard.PoolGuard.rows_of_slots.__code__, guard.PoolGuard._owner_text.__code__}


def _ours(frame: FrameType | None) -> str:
    """Where, if the innermost function that is not torch's is the guard's; else nothing."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(("torch", __name__, "hicache_guard.core.syncs")):
            inside = name.startswith("hicache_guard") and ".repro" not in name
            inside = inside and frame.f_code not in _NEVER_ON_A_DEVICE
            return f"{name}:{frame.f_lineno}" if inside else ""
        frame = frame.f_back
    return ""


class OnDevice(torch.Tensor):
    """A tensor that stands for one on a device."""

    reads: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        terms = kwargs or {}
        # To the host goes what is told so by name; a ``torch.device`` may be any.
        to_host = func is torch.Tensor.to and "cpu" in [
            term for term in (*args[1:], *terms.values()) if isinstance(term, str)
        ]
        if (func in _READS or to_host) and isinstance(args[0], cls):
            cls.count(func.__name__)
        return super().__torch_function__(func, types, args, terms)  # type: ignore[no-untyped-call]

    @classmethod
    def count(cls, name: str) -> None:
        place = _ours(sys._getframe(2))
        if place:
            cls.reads[f"{name} {place}"] += 1


class OwnSyncs(SyncCounter):  # type: ignore[no-untyped-call]
    """Counts the synchronising operators, too, that a function of ours runs on a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.total
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.total > before and any(isinstance(arg, OnDevice) for arg in tree_leaves(args)):
            OnDevice.count(func._schema.name)
        return result


def mark(tensors: Iterable[Any]) -> None:
    """Let tensors stand for some on a device; they stay the objects that they are."""
    for tensor in tensors:
        if type(tensor) is torch.Tensor:
            tensor.__class__ = OnDevice


def mark_all(story: Story) -> None:
    """Everything that a server has on its device but KV."""
    allocator, tier = story.server.allocator, vars(story.server.tree)[tree_link.ATTRIBUTE].tier
    pools = guard_of(allocator)
    books = [pools.map, pools.full, pools.window, pools.witness, tier.full, tier.window]
    books += [host_pool.contents_of(pool) for pool in story.tier.host_pools()]
    for book in books:
        mark(vars(book).values())
    mark(raw_free(pool) for pool in sub_allocators(allocator))
    mark([allocator.full_to_swa_index_mapping, story.server.rows.req_to_token])


def _handed_on(side: int) -> Callable[[Story], None]:
    def scene(story: Story) -> None:
        stale_copies.tell(story, stale_copies.hand_on(side))

    return scene


SCENES: dict[str, Callable[[Story], None]] = {
    "in order": Story.tell,
    "full copy handed on": _handed_on(0),
    "window copy handed on": _handed_on(1),
}

# -- proof by mutation ------------------------------------------------------------------------------

_READ: Any = contents.Contents.read


def _read_on_the_host(books: Any, slots: torch.Tensor) -> torch.Tensor:
    numbers = slots[:: books.page_size].to("cpu").numpy() // books.page_size
    return torch.from_numpy(books._prints.numpy()[numbers])


def play(
    release: scheduling.Release, tree: str, page: int, scene: str, mode: str | None
) -> dict[str, Any]:
    mutated = mode == "prints on the host"
    setattr(contents.Contents, "read", _read_on_the_host if mutated else _READ)  # noqa: B010
    delayed.withhold()
    reports = tales.guarded("observe" if mutated else mode)
    story = Story(release, tree, page, "write_through")
    if mode is None:
        return tales.outcome(lambda: SCENES[scene](story))
    pools = guard_of(story.server.allocator)
    pools.lazy = pools.mode.value == "enforce"  # on a device observe puts no check off
    mark_all(story)
    OnDevice.reads.clear()
    with OwnSyncs():
        told = tales.outcome(lambda: SCENES[scene](story))
    early = tales.faults(reports)
    waits, reads = delayed.Withheld.waits, dict(OnDevice.reads)
    delayed.Withheld.released = True
    pools.drain()
    return {**told, "waits": waits, "reads": reads, "early": early, "faults": tales.faults(reports)}


def main() -> int:
    return tales.print_all(__doc__, play, dict.fromkeys(SCENES, ("prints on the host",)))


if __name__ == "__main__":
    sys.exit(main())
