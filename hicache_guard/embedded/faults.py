"""Faults that befall an embedded server while it runs, so that one can see what finds them.

Each mirrors a class of reported ones (``../shared/SURVEY.md``, section 1). They are put into the
release's own classes before the guard's hooks go around these, as if the release had them:
``HICACHE_EMBEDDED_FAULT`` names one. Where a fault strikes is counted, so that it does again in the
same place.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt

from hicache_guard.core.errors import ConfigError

VARIABLE = "HICACHE_EMBEDDED_FAULT"

_ALLOCATORS = ("sglang.srt.mem_cache.allocator.swa", "sglang.srt.mem_cache.swa_memory_pool")
_HOST_POOLS = (
    "sglang.srt.mem_cache.pool_host.base",
    "sglang.srt.mem_cache.pool_host.common",
    "sglang.srt.mem_cache.memory_pool_host",
)
_SCHEDULER = ("sglang.srt.managers.scheduler",), ("Scheduler",)
_BATCHES = *_SCHEDULER, ("run_batch",)
_RESULTS = *_SCHEDULER, ("run_batch", "process_batch_result")

Original = Callable[..., Any]
#: Called as the method with the original before it.
Faulty = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """``strikes`` makes what replaces the ``methods`` of ``classes``, each time a server starts.

    ``release`` is one that has these, ``needs`` what an audit must be told for a server that can
    be befallen, and ``scenario`` one that is about what is befallen.
    """

    name: str
    what: str
    like: str
    modules: tuple[str, ...]
    classes: tuple[str, ...]
    methods: tuple[str, ...]
    strikes: Callable[[], Faulty]
    needs: tuple[str, ...] = ()
    scenario: str = ""
    release: str = "0.5.23"


class Every:
    """Says yes to each ``count``-th, beginning with the first."""

    def __init__(self, count: int) -> None:
        self.count, self._asked = count, -1

    def __call__(self) -> bool:
        self._asked += 1
        return self._asked % self.count == 0


def _entries(allocator: Any, slots: Any) -> Any:
    return allocator.full_to_swa_index_mapping[slots]


def _page_before(end: int, allocator: Any) -> slice:
    """Some page of the last window before ``end`` tokens."""
    size = max(1, allocator.page_size)
    start = max(0, end - size - 5) // size * size
    return slice(start, start + size)


def _kept_entry() -> Faulty:
    def free_swa(original: Original, allocator: Any, slots: Any, **more: Any) -> Any:
        mapping = allocator.full_to_swa_index_mapping
        before = mapping[slots].clone()
        found = original(allocator, slots, **more)
        mapping[slots] = before
        return found

    return free_swa


def _handed_twice() -> Faulty:
    strikes, busy = Every(3), False

    def free_swa(original: Original, allocator: Any, slots: Any, **more: Any) -> Any:
        nonlocal busy
        entries = _entries(allocator, slots)
        entries = entries[entries > 0].clone()
        found = original(allocator, slots, **more)
        pool = allocator.swa_attn_allocator
        # Where all is free already, the release counts, and ends.
        room = pool.size - pool.available_size() > pool.size // 4
        if not busy and len(entries) and room and strikes():
            busy = True
            pool.free(entries)
            busy = False
        return found

    return free_swa


def _row(scheduler: Any, batch: Any, place: int) -> Any:
    """The full slots of a request that runs."""
    return scheduler.req_to_token_pool.req_to_token[batch.req_pool_indices[place]].long()


def _in_batch(extend: bool, count: int) -> Callable[[], Faulty]:
    """A page of the window of a request goes to nobody, right before it is read."""

    def strikes() -> Faulty:
        due, struck = Every(count), set()

        def run_batch(original: Original, scheduler: Any, batch: Any, *a: Any, **k: Any) -> Any:
            allocator, mode = scheduler.token_to_kv_pool_allocator, batch.forward_mode
            ends: Any = ()
            if extend and mode.is_extend():
                ends = batch.prefix_lens
            elif not extend and mode.is_decode():
                ends = batch.seq_lens.tolist()
            for place, end in enumerate(ends):
                req = batch.reqs[place]
                old = extend or len(req.output_ids) >= 4
                if end > 2 * allocator.page_size and old and req.rid not in struck and due():
                    struck.add(req.rid)
                    row = _row(scheduler, batch, place)
                    allocator.free_swa(row[_page_before(end, allocator)])
                    break
            return original(scheduler, batch, *a, **k)

        return run_batch

    return strikes


def _on_finish(act: Callable[[Any, Any, int], None], count: int) -> Callable[[], Faulty]:
    """``act`` on the allocator, the row, and the length of the prompt of a finished request.

    Right when it has finished: later its pages may be another request's, and to free those cannot
    be told from what their owner does.
    """

    def strikes() -> Faulty:
        due = Every(count)
        rows: dict[str, tuple[Any, Any]] = {}

        def served(original: Original, scheduler: Any, batch: Any, *a: Any, **k: Any) -> Any:
            found = original(scheduler, batch, *a, **k)
            allocator = scheduler.token_to_kv_pool_allocator
            if original.__name__ == "run_batch":
                for place, req in enumerate(batch.reqs):
                    rows[req.rid] = req, _row(scheduler, batch, place).clone()
                return found
            for rid, (req, row) in list(rows.items()):
                if req.finished():
                    del rows[rid]
                    length = len(req.origin_input_ids)
                    if length > 2 * allocator.page_size and due():
                        act(allocator, row, length)
            return found

        return served

    return strikes


def _free_tail(allocator: Any, row: Any, length: int) -> None:
    allocator.free_swa(row[_page_before(length, allocator)])


def _free_prefix(allocator: Any, row: Any, length: int) -> None:
    allocator.free(row[: max(1, allocator.page_size)])


def _shift(allocator: Any, row: Any, length: int) -> None:
    slots = row[_page_before(length, allocator)]
    mapping = allocator.full_to_swa_index_mapping
    moved = mapping[slots] + max(1, allocator.page_size)
    mapping[slots] = moved.clamp(max=int(mapping.max())) * (mapping[slots] > 0)


def _clear(allocator: Any, row: Any, length: int) -> None:
    allocator.full_to_swa_index_mapping[row[_page_before(length, allocator)]] = 0


def _crossing() -> Faulty:
    before: list[Any] = []

    def cross(allocator: Any, row: Any, length: int) -> None:
        slots = row[_page_before(length, allocator)]
        mapping = allocator.full_to_swa_index_mapping
        if before and (mapping[before[-1]] > 0).all():
            mapping[slots] = mapping[before[-1]]
        before.append(slots)

    return _on_finish(cross, 5)()


def _shared_page() -> Faulty:
    strikes, before = Every(4), [None]

    def alloc_extend(original: Original, allocator: Any, *args: Any, **more: Any) -> Any:
        found = original(allocator, *args, **more)
        size = max(1, allocator.page_size)
        if found is None or len(found) < 2 * size:
            return found
        other, before[0] = before[0], found[-2 * size :].clone()
        aligned = found[(found % size == 0).nonzero()[-1:, 0]] if size > 1 else found[-1:]
        slots = aligned[:1, None] + _range(size, found)
        slots = slots.reshape(-1)
        if other is not None and strikes():
            entries = _entries(allocator, other)
            entries = entries[entries > 0]
            if len(entries) >= size:
                start = entries[:1] // size * size
                allocator.full_to_swa_index_mapping[slots] = (start[:, None] + _range(size, found))[
                    0
                ].to(allocator.full_to_swa_index_mapping.dtype)
        return found

    return alloc_extend


def _range(size: int, like: Any) -> Any:
    import torch

    return torch.arange(size, device=like.device)


def _stale_translation() -> Faulty:
    strikes = Every(3)

    def set_swa_loc(original: Original, pool: Any, slots: Any) -> Any:
        before = getattr(pool, "swa_loc", None)
        if before is not None and before.shape == slots.shape and strikes():
            return None
        return original(pool, slots)

    return set_swa_loc


def _lying_translation() -> Faulty:
    known: dict[int, Any] = {}

    def translate(original: Original, pool: Any, slots: Any, *a: Any, **k: Any) -> Any:
        found = original(pool, slots, *a, **k)
        memory = known.get(id(pool))
        if memory is None:
            memory = known[id(pool)] = {}
        flat, told = slots.reshape(-1).tolist(), found.reshape(-1).tolist()
        kept = [memory.setdefault(slot, entry) if entry > 0 else entry
                for slot, entry in zip(flat, told, strict=True)]  # fmt: skip
        return found.new_tensor(kept).reshape(found.shape)

    return translate


def _host_page_twice() -> Faulty:
    strikes = Every(3)
    last: dict[int, Any] = {}

    def alloc(original: Original, pool: Any, count: int, *a: Any, **k: Any) -> Any:
        found = original(pool, count, *a, **k)
        before = last.get(id(pool))
        if found is None:
            return found
        last[id(pool)] = found
        if before is not None and len(before) >= len(found) and strikes():
            return before[: len(found)].clone()
        return found

    return alloc


def _tail_not_loaded() -> Faulty:
    def load(original: Original, pool: Any, device_pool: Any, host: Any, device: Any,
             *a: Any, **k: Any) -> Any:  # fmt: skip
        size = max(1, pool.page_size)
        if len(host) > size:
            host, device = host[:-size], device[:-size]
        return original(pool, device_pool, host, device, *a, **k)

    return load


def _drafts_freed() -> Faulty:
    due = Every(5)

    def process_batch_result(
        original: Original, scheduler: Any, batch: Any, *a: Any, **k: Any
    ) -> Any:
        rows = [_row(scheduler, batch, place).clone() for place in range(len(batch.reqs))]
        found = original(scheduler, batch, *a, **k)
        allocator = scheduler.token_to_kv_pool_allocator
        size = max(1, allocator.page_size)
        for req, row in zip(batch.reqs, rows, strict=True):
            if batch.forward_mode.is_decode() and not req.finished():
                start = -(-req.kv.kv_committed_len // size) * size
                drafts = row[start : req.kv.kv_allocated_len]
                if len(drafts) and due():
                    allocator.free_swa(drafts)
        return found

    return process_batch_result


def _drafts_left() -> Faulty:
    def move_kv_cache(_original: Original, pool: Any, to: Any, source: Any) -> None:
        pool.full_kv_pool.move_kv_cache(to, source)

    return move_kv_cache


def _storage_swapped() -> Faulty:
    due, before = Every(3), dict[str, str]()

    def read_page(original: Original, storage: Any, pool: str, key: str, *place: Any) -> Any:
        read = before.get(pool, key) if due() else key
        before[pool] = key
        return original(storage, pool, read, *place)

    return read_page


_ALLOCATOR = ("SWATokenToKVPoolAllocator",)
_HOST = ("--hicache", "write_through")
_DRAFTS = ("--speculative", "ngram")

FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "kept-entry", "freed window slots stay in the mapping", "#25805, recycled pages",
            _ALLOCATORS, _ALLOCATOR,
            ("free_swa",), _kept_entry, release="0.5.12",
        ),
        Fault(
            "handed-twice", "a window page comes to the free list twice", "double free",
            _ALLOCATORS, _ALLOCATOR, ("free_swa", "free_swa_segment"), _handed_twice,
        ),
        Fault(
            "slid-too-far", "a page inside the window of a decoding request is freed",
            "window eviction off by a page", *_BATCHES,
            _in_batch(extend=False, count=4),
        ),
        Fault(
            "prefix-freed-early", "a page of the window of a prefix is freed before it is read",
            "a page reused while a prefill reads it", *_BATCHES,
            _in_batch(extend=True, count=3),
        ),
        Fault(
            "tail-freed", "window KV of what the tree holds is freed behind its back",
            "pseudo-hit: the tree remembers tokens", *_RESULTS,
            _on_finish(_free_tail, 2),
        ),
        Fault(
            "shifted", "entries of the mapping point one page on", "off by one in a remapping",
            *_RESULTS, _on_finish(_shift, 2),
        ),
        Fault(
            "prefix-freed", "a full page that the tree holds is freed by a finished request",
            "abort and retraction that free what is shared",
            *_RESULTS,
            _on_finish(_free_prefix, 3),
        ),
        Fault(
            "cleared", "entries of the mapping are emptied while the tree holds their slots",
            "a reset of the mapping", *_RESULTS,
            _on_finish(_clear, 8),
        ),
        Fault(
            "crossed", "a prefix's entries lead to the window page of another prefix",
            "a remapping to a page that is taken", *_RESULTS,
            _crossing,
        ),
        Fault(
            "shared-page", "two requests' full pages lead to one window page",
            "a window page with two owners", _ALLOCATORS, _ALLOCATOR, ("alloc_extend",),
            _shared_page,
        ),
        Fault(
            "stale-translation", "where a batch writes is what the one before was told", "#25889",
            ("sglang.srt.mem_cache.swa_memory_pool",), ("SWAKVPool",), ("set_swa_loc",),
            _stale_translation, release="0.5.12",
        ),
        Fault(
            "lying-translation", "slots are told the window slots that they had first",
            "a cache of translations that nobody empties",
            ("sglang.srt.mem_cache.swa_memory_pool",), ("SWAKVPool",),
            ("translate_loc_from_full_to_swa",), _lying_translation,
        ),
        Fault(
            "host-page-twice", "a host page is handed out while another prefix lies in it",
            "host page recycled under a copy", _HOST_POOLS, ("HostKVCache",), ("alloc",),
            _host_page_twice, _HOST, "load-back",
        ),
        Fault(
            "tail-not-loaded", "the last page of a load-back is not copied",
            "partial load-back", ("sglang.srt.mem_cache.pool_host.mha",
                                  "sglang.srt.mem_cache.memory_pool_host"),
            ("MHATokenToKVPoolHost",), ("load_to_device_per_layer",), _tail_not_loaded,
            _HOST, "load-back",
        ),
        Fault(
            "drafts-freed", "window slots of drafts are freed while their request goes on",
            "slots of rejected drafts freed too early", *_SCHEDULER, ("process_batch_result",),
            _drafts_freed, _DRAFTS, "speculation",
        ),
        Fault(
            "drafts-left", "window KV of accepted drafts stays where rejected ones lay before it",
            "accepted drafts not moved", ("sglang.srt.mem_cache.swa_memory_pool",),
            ("SWAKVPool",), ("move_kv_cache",), _drafts_left, _DRAFTS, "speculation",
        ),
        Fault(
            "storage-swapped", "a page of the third tier is read from another page's file",
            "a key of storage that two prefixes share",
            ("sglang.srt.mem_cache.hicache_storage",), ("HiCacheFile",), ("_read_page",),
            _storage_swapped, (*_HOST, "--storage"), "storage",
        ),
    )
}  # fmt: skip


def environment(fault: str) -> dict[str, str]:
    """What a server is started with to be befallen; its own check of leaks would only end it."""
    return {VARIABLE: fault, "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false"}


def install() -> None:
    """Have the fault that the environment names put in, as soon as its classes are imported."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    if name not in FAULTS:
        raise ConfigError(f"no fault {name!r}; choose one of {', '.join(FAULTS)}")
    fault = FAULTS[name]
    faulty = fault.strikes()
    for module in fault.modules:
        wrapt.when_imported(module)(functools.partial(_put_in, fault, faulty))


def _put_in(fault: Fault, faulty: Faulty, module: Any) -> None:
    for name in fault.classes:
        cls = vars(module).get(name)
        for method in fault.methods if cls is not None else ():
            original = vars(cls).get(method)
            if original is None or hasattr(original, "faulty"):
                continue

            @functools.wraps(original)
            def replaced(self: Any, *args: Any, _original: Any = original, **more: Any) -> Any:
                return faulty(_original, self, *args, **more)

            vars(replaced)["faulty"] = fault.name
            setattr(cls, method, replaced)
