"""The seam of window indices: what a backend's window layers are going to read is proved.

SGLang's FlashInfer and Triton backends gather, once a forward pass, the full slots of each
request's window, and translate them to window slots, which all window layers then read. The methods
hooked here know which entries are whose; the translation, made inside them by the pool (see
``kv_pool``) or together with the gather, is ours (``kernels/stream``). Observe leaves the release's
own translation in its place and looks beside it.

Nothing here waits for the device. What is found belongs to the step that runs (``steps``). Without
one, as while a CUDA graph is captured, nothing is counted; entries are redirected all the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hicache_guard.adapters import steps
from hicache_guard.adapters.link import AllocatorLink, Factory, link_of
from hicache_guard.core.modes import Mode
from hicache_guard.core.transfer import to_device
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.stream import Stream, StreamTranslation

Method = Callable[..., Any]


@dataclass(eq=False)
class Reading:
    """The window indices that a backend is gathering.

    ``requests``: rows of the batch, those that pad it included. ``indptr``: int32, at least
    [requests + 1], filled by the time that the translation is made; None until the backend says it.
    ``starts`` gives int32 or int64 [requests], the position of each row's first entry. ``pool``:
    the KV pool, where the backend names it. ``by_drafts``: they are read by a draft model, whose
    proposals are verified.
    """

    requests: int
    indptr: torch.Tensor | None
    starts: Callable[[], torch.Tensor | None]
    pool: Any = None
    by_drafts: bool = False


_reading: Reading | None = None


def _while_reading(reading: Reading, original: Method, *args: Any, **kwargs: Any) -> Any:
    global _reading
    outer, _reading = _reading, reading
    try:
        return original(*args, **kwargs)
    finally:
        _reading = outer


def _nothing() -> None:
    return None


# -- FlashInfer ----------------------------------------------------------------------------------


def _call_begin_forward(original: Method) -> Method:
    names = tuple(inspect.signature(original).parameters)[1:]
    decodes = "qo_indptr" not in names

    def hooked(updater: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if not given.get("use_sliding_window_kv_pool"):
            return original(updater, *args, **kwargs)
        speculation, lengths = given["spec_info"], given["paged_kernel_lens"]
        reading = Reading(lengths.shape[0], None, _nothing)
        if speculation is None or (decodes and getattr(speculation, "kv_indptr", None) is None):
            reading.indptr = given["kv_indptr"]
            reading.starts = lambda: given["kv_start_idx"]
        elif decodes:  # a draft model's steps, a row for each of its branches
            reading.indptr, reading.by_drafts = speculation.kv_indptr, True
            reading.requests = speculation.kv_indptr.shape[0] - 1
        else:
            _overhear(speculation, reading)
            try:
                return _while_reading(reading, original, updater, *args, **kwargs)
            finally:
                vars(speculation).pop(_ASKED, None)
        return _while_reading(reading, original, updater, *args, **kwargs)

    return hooked


call_begin_forward = Factory(_call_begin_forward)

#: The method of what verifies drafts that says which entries are whose.
_ASKED = "generate_attn_arg_prefill"


def _overhear(speculation: Any, reading: Reading) -> None:
    """Learn from ``speculation`` which entries are whose, when the backend asks it."""
    asked = getattr(speculation, _ASKED)

    def told(*args: Any, **kwargs: Any) -> Any:
        answer = asked(*args, **kwargs)
        reading.indptr = answer[1]
        reading.requests = answer[1].shape[0] - 1
        return answer

    vars(speculation)[_ASKED] = told


# -- Triton --------------------------------------------------------------------------------------


def _update_sliding_window_buffer(original: Method) -> Method:
    names = tuple(inspect.signature(original).parameters)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        lengths, window = given["seq_lens"], given["sliding_window_size"]
        reading = Reading(
            given["bs"],
            given["window_kv_indptr"],
            lambda: (lengths - window).clamp(min=0),
            given.get("token_to_kv_pool"),
        )
        return _while_reading(reading, original, *args, **kwargs)

    return hooked


update_sliding_window_buffer = Factory(_update_sliding_window_buffer)
update_sliding_window_buffer_cuda_graph = update_sliding_window_buffer


def pack_read_stream(original: Method, translator: Any, plan: Any, **given: Any) -> Any:
    """The gather that translates as it goes, where it is told a mapping (since 0.5.22)."""
    reading, mapping = _reading, given.get("token_mapping")
    link = None if reading is None or mapping is None else link_of(reading.pool)
    if reading is None or link is None or mapping is not link.guard.map.mapping:
        return original(translator, plan, **given)
    _take_stock(link, mapping)
    out = given["out"]
    if link.guard.mode is Mode.OBSERVE:
        answer = original(translator, plan, **given)
    gathered = torch.empty_like(out)
    original(translator, plan, **{**given, "out": gathered, "token_mapping": None})
    if link.guard.mode is Mode.OBSERVE:
        _prove(link, gathered, reading, torch.empty_like(out))
        return answer
    _prove(link, gathered, reading, out)
    return True


# -- the translation -------------------------------------------------------------------------------


def translated(original: Method, pool: Any, slots: torch.Tensor) -> torch.Tensor | None:
    """What ``pool`` answers for the full ``slots`` of a reading; None where nobody is reading."""
    link: AllocatorLink | None = link_of(pool)
    if _reading is None or link is None:
        return None
    mapping = pool.full_to_swa_index_mapping
    if mapping is not link.guard.map.mapping:
        return None
    _take_stock(link, mapping)
    slots = slots.contiguous()
    out = torch.empty(slots.shape, dtype=torch.int32, device=slots.device)
    _prove(link, slots, _reading, out)
    if link.guard.mode is Mode.OBSERVE:
        found: torch.Tensor = original(pool, slots)
        return found
    return out


def _take_stock(link: AllocatorLink, mapping: torch.Tensor) -> None:
    """Know of entries that were written behind the seams."""
    if link.guard.map.unseen_writes(mapping):
        with link.operation("translate_loc_from_full_to_swa", settle=False):
            pass


def _prove(link: AllocatorLink, slots: torch.Tensor, reading: Reading, out: torch.Tensor) -> None:
    """Translate full ``slots`` into ``out``, and leave what is found with the step that runs."""
    current = link.guard.backlog.hand_out()  # else observe says nothing of this batch
    if slots.numel() == 0 or reading.requests == 0 or not current:
        return
    step, requests = steps.running(), reading.requests
    indptr, starts = reading.indptr, reading.starts()
    if indptr is None:
        ends = torch.tensor([0, slots.shape[0]], dtype=torch.int32)
        indptr, requests = to_device(ends, slots.device), 1
    if starts is None:
        starts = torch.zeros(requests, dtype=torch.int32, device=slots.device)
    stream = Stream(
        slots,
        indptr[: requests + 1].to(torch.int32),
        starts[:requests],
        0 if step is None else min(requests, len(step.reqs)),
    )
    report = _reader(link, slots.device, requests).run(stream, _books(link), out)
    if step is not None:
        step.reads.append(steps.Read(link, report, by_drafts=reading.by_drafts))


def _books(link: AllocatorLink) -> DeviceBooks:
    """The books of a pair of pools; they change when it is resized, or its mapping is replaced."""
    if link.books is None or not link.books.are_of(link.guard):
        link.books = DeviceBooks.of(link.guard)
    return link.books


def _reader(link: AllocatorLink, device: torch.device, requests: int) -> StreamTranslation:
    """What translates on the stream that runs; it gathers its counts in a place of its own."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    known = link.readers.get(stream)
    if known is None or known.max_requests < requests:
        known = StreamTranslation.plan(max(256, 2 * requests), device)
        link.readers[stream] = known
    return known
