"""Real pools of any supported SGLang release on a CPU, driven one request at a time.

Nothing of the allocator is imitated: the classes are those of the release on the path. ``Bench``
also keeps what a scheduler would know, who holds which slots, and has the audit look after each
step. Runs inside a process that imports the release; see ``worker``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hicache_guard.adapters.link import link_of
from hicache_guard.core.journal import acting_for
from hicache_guard.repro.audit import Books, audit, fingerprint

Slots = torch.Tensor


def quiet() -> None:
    """Keep the release's own import chatter off the terminal; ours is the output that counts."""
    import logging

    warnings.filterwarnings("ignore")
    logging.getLogger("sglang").setLevel(logging.CRITICAL)


def allocator_classes() -> tuple[type, type]:
    """(hybrid allocator, hybrid pool) of the release on the path."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    try:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    except ImportError:
        from sglang.srt.mem_cache.swa_memory_pool import SWATokenToKVPoolAllocator
    return SWATokenToKVPoolAllocator, SWAKVPool


def build(
    full_slots: int = 64,
    window_slots: int = 32,
    page_size: int = 4,
    *,
    need_sort: bool = False,
    device: str = "cpu",
) -> Any:
    """A real hybrid allocator over tiny KV buffers (one head of 8, one layer a side)."""
    allocator_class, pool_class = allocator_classes()
    choices: dict[str, Any] = {
        "size": full_slots,
        "size_swa": window_slots,
        "page_size": page_size,
        "dtype": torch.float16,
        "head_num": 1,
        "head_dim": 8,
        "swa_attention_layer_ids": [0],
        "full_attention_layer_ids": [1],
        "device": device,
    }
    if "enable_kvcache_transpose" in inspect.signature(pool_class).parameters:
        choices["enable_kvcache_transpose"] = False
    pool = pool_class(**choices)
    return allocator_class(
        full_slots, window_slots, page_size, torch.float16, device, pool, need_sort
    )


def slots(*values: int) -> Slots:
    return torch.tensor(values, dtype=torch.int64)


def extend(allocator: Any, count: int, *, prefix: int = 0, last: int = -1) -> Slots | None:
    """Prefill of one request: ``count`` new tokens after ``prefix`` tokens that end at ``last``."""
    if allocator.page_size == 1:
        return allocator.alloc(count)  # type: ignore[no-any-return]
    return allocator.alloc_extend(  # type: ignore[no-any-return]
        slots(prefix),
        slots(prefix),
        slots(prefix + count),
        slots(prefix + count),
        slots(last),
        count,
    )


def extend_surely(allocator: Any, count: int) -> Slots:
    """``extend`` by what is known to fit."""
    slots = extend(allocator, count)
    assert slots is not None, "out of pages"
    return slots


def extend_tail(
    allocator: Any, count: int, tail: int, *, prefix: int = 0, last: int = -1
) -> Slots | None:
    """Decode-side preallocation: full KV for ``count`` tokens, window KV for the last ``tail``."""
    return allocator.alloc_extend_swa_tail(  # type: ignore[no-any-return]
        slots(prefix),
        slots(prefix),
        slots(prefix + count),
        slots(prefix + count),
        slots(last),
        count,
        tail,
    )


def decode(allocator: Any, length: int, last: int) -> Slots | None:
    """One decode step of one request: the slot of token ``length``, after the slot ``last``."""
    if allocator.page_size == 1:
        return allocator.alloc(1)  # type: ignore[no-any-return]
    return allocator.alloc_decode(  # type: ignore[no-any-return]
        slots(length), slots(length), slots(last)
    )


def settle(allocator: Any) -> None:
    """Let the guard of an allocator, where it has one, run what it put off.

    It does so by itself before anything could be handed out; whoever audits after every operation
    looks earlier than that.
    """
    link = link_of(allocator)
    if link is not None:
        link.drain()


@dataclass
class Step:
    """One step of a case: what was done, what the audit found after it, the state then."""

    what: str
    faults: list[str]
    state: str


@dataclass
class Bench:
    """An allocator, its books, and the steps taken on it.

    ``holds`` maps a request to the full slots that it believes to own. ``do`` runs one operation;
    what it allocates is entered into the books by ``take`` and leaves them by ``drop``. ``built``
    lists every bench of this process, for whoever judges a case after it ended.
    """

    allocator: Any
    holds: Books = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    before_raise: str = ""
    built: ClassVar[list[Bench]] = []

    def __post_init__(self) -> None:
        self.built.append(self)

    def do(self, what: str, action: Callable[[], Any], *, request: str | None = None) -> Any:
        """Run one operation; its name goes to the journal as acting for ``request``."""
        self.before_raise = fingerprint(self.allocator)
        if request is None:
            result = action()
        else:
            with acting_for(request):
                result = action()
        settle(self.allocator)
        self.steps.append(Step(what, [], fingerprint(self.allocator)))
        return result

    def take(self, request: str, count: int, *, tail: int | None = None) -> Slots:
        """Allocate for a request; its slots are in the books from now on."""
        if tail is None:
            what = f"{request} allocates {count} tokens"
            action = lambda: extend(self.allocator, count)  # noqa: E731
        else:
            what = f"{request} preallocates {count} tokens, window for the last {tail}"
            action = lambda: extend_tail(self.allocator, count, tail)  # noqa: E731
        got = self.do(what, action, request=request)
        if got is None:
            raise RuntimeError(f"{what}: the pool of this case is too small")
        self.holds[request] = got
        self.look()
        return got  # type: ignore[no-any-return]

    def drop(self, *requests: str) -> None:
        """These requests hold nothing any more, whatever the pool thinks."""
        for request in requests:
            self.holds.pop(request, None)

    def look(self) -> list[str]:
        """Audit the pools against the books; what it finds is noted on the last step."""
        found = audit(self.allocator, self.holds)
        if self.steps:
            self.steps[-1].faults += [
                fault for fault in found if fault not in self.steps[-1].faults
            ]
        return found
