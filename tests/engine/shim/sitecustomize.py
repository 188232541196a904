"""What a real SGLang engine lacks on a CPU, for ``attention_backend="triton"``.

First on PYTHONPATH, it is loaded by every process of the engine. No file of SGLang is changed:

* ``sgl_kernel`` has no wheel that runs here: it can be imported, and its names raise when called;
* the Triton backend is the release's own. Only the two attention kernels at its end, for which
  Triton's interpreter takes 0.7 s a decode pass, are done in torch, on the slots that the backend
  hands them (``ENGINE_KERNELS=interpreted`` leaves the kernels);
* ``get_server_info()`` tells what was read, and what the guard counted;
* ``ENGINE_FAULT`` is a fault, of those at the end, that befalls one forward pass.

Needs ``TRITON_INTERPRET=1`` and ``SGLANG_USE_CPU_ENGINE=1``.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import wrapt

from hicache_guard.embedded import replacements

#: Calls of attention kernels and the slots that these read, by kind of pass and of layer.
reads: Counter[str] = Counter()


# -- sgl_kernel ----------------------------------------------------------------------------------

sys.meta_path.append(replacements.Empty())
for _kernels in replacements.KERNELS:
    wrapt.when_imported(_kernels)(replacements.absent_operations)


# -- the kernels at the end of the Triton backend ------------------------------------------------


def _counted_reads(backend: Any, kind: str, kernel: Callable[..., None], at: int) -> Any:
    """``kernel``, whose arguments ``at`` and after are what the backend gathered for the layer."""

    def counted(*args: Any, **options: Any) -> None:
        indptr, indices = args[at : at + 2]
        gathered = backend.forward_metadata
        layer = "window" if indices is gathered.window_kv_indices else "full"
        assert layer == "window" or indices is gathered.kv_indices, "nothing else is read"
        reads[f"{kind}, {layer} layers"] += 1
        reads[f"{kind}, {layer} slots"] += int(indptr[-1])
        _plain(options)
        kernel(*args, **options)

    return counted


def _plain(options: dict[str, Any]) -> None:
    """That nothing is asked of a kernel which the model has no use for."""
    asked = {name: options.get(name) for name in ("sinks", "score_mod", "logit_cap", "enable_lean")}
    assert not any(asked.values()), asked


@wrapt.when_imported("sglang.srt.layers.attention.triton_backend")
def _in_torch(module: Any) -> None:
    def made(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> None:
        original(backend, *args, **kwargs)
        for kind, kernel, at in (
            ("decode", replacements.decode_attention, 4),
            ("extend", replacements.extend_attention, 7),
        ):
            counted = _counted_reads(backend, kind, kernel, at)
            setattr(backend, f"{kind}_attention_fwd", counted)

    if os.environ.get("ENGINE_KERNELS") != "interpreted":
        replacements.around(module.TritonAttnBackend, "__init__", made)


# 0.5.12: a prompt whose logarithms are asked again.
wrapt.when_imported("sglang.srt.layers.logits_processor")(replacements.unpinned)


# -- the scheduler -------------------------------------------------------------------------------


@wrapt.when_imported("sglang.srt.managers.scheduler")
def _watched(module: Any) -> None:
    def told(original: Callable[..., Any], scheduler: Any, asked: Any) -> Any:
        answer = original(scheduler, asked)
        answer.internal_state["engine"] = {
            "reads": dict(reads),
            "overlap": scheduler.enable_overlap,
            "tree": type(scheduler.tree_cache).__name__,
            "guard": _counted(scheduler.token_to_kv_pool_allocator),
        }
        return answer

    replacements.around(module.Scheduler, "get_internal_state", told)
    replacements.around(module.Scheduler, "run_batch", _befallen())
    replacements.around(module.Scheduler, "process_input_requests", _interrupted())


def _counted(allocator: Any) -> dict[str, Any] | None:
    """What the guard found, by kind; None where there is none."""
    from hicache_guard import guard_of
    from hicache_guard.core.errors import UnguardedError

    try:
        tally = guard_of(allocator).tally
    except UnguardedError:
        return None
    kinds = {kind.value: count for kind, count in tally.violations.items()}
    return {"recomputed": tally.recomputed, "violations": kinds}


# -- faults ----------------------------------------------------------------------------------------


#: Whether the fault said that it did something.
_done = False


def _befallen() -> Callable[..., Any]:
    """Let the fault try each forward pass until it says that it did something."""

    def run_batch(
        original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        global _done
        # Asked for late: an engine is forked from a process that has imported this.
        fault = FAULTS.get(os.environ.get("ENGINE_FAULT", ""))
        _done = _done or (fault is not None and fault(scheduler, batch))
        return original(scheduler, batch, *args, **kwargs)

    return run_batch


def _interrupted() -> Callable[..., Any]:
    """Pause and retract all, some rounds after what the fault did was found."""
    rounds = itertools.count()

    def process_input_requests(original: Callable[..., Any], scheduler: Any, asked: Any) -> Any:
        answer = original(scheduler, asked)
        after = PAUSES.get(os.environ.get("ENGINE_FAULT", ""))
        if after is not None and _done:
            from sglang.srt.managers import io_struct

            if next(rounds) == after + scheduler.enable_overlap:
                scheduler.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
                scheduler.continue_generation(io_struct.ContinueGenerationReqInput())
        return answer

    return process_input_requests


def _free(scheduler: Any, batch: Any, place: int, end: int) -> bool:
    """Four window slots shortly before ``end`` tokens of a request go to nobody."""
    row = scheduler.req_to_token_pool.req_to_token[batch.req_pool_indices[place]]
    scheduler.token_to_kv_pool_allocator.free_swa(row[end - 6 : end - 2].long())
    return True


def _freed(scheduler: Any, batch: Any) -> bool:
    """Of what a decoding request has generated, which is its own alone."""
    if not batch.forward_mode.is_decode() or len(batch.reqs[0].output_ids) < 8:
        return False
    return _free(scheduler, batch, 0, int(batch.seq_lens[0]) - 1)


def _of_third_chunk(shortest: int, longest: int) -> Callable[[Any, Any], bool]:
    """Of a prompt's second chunk, which is the tree's by then, before the third is computed."""
    chunks: Counter[str] = Counter()

    def fault(scheduler: Any, batch: Any) -> bool:
        if not batch.forward_mode.is_extend():
            return False
        for place, req in enumerate(batch.reqs):
            chunks[req.rid] += 1
            if chunks[req.rid] == 3 and shortest <= len(req.origin_input_ids) <= longest:
                return _free(scheduler, batch, place, batch.prefix_lens[place])
        return False

    return fault


def _whenever(scheduler: Any, batch: Any) -> bool:
    """Of what the first request has generated, in each pass that it has a window in."""
    for place, req in enumerate(batch.reqs):
        if req.rid == "1" and batch.forward_mode.is_decode() and len(req.output_ids) >= 8:
            end = int(batch.seq_lens[place]) - 1
            row = scheduler.req_to_token_pool.req_to_token[batch.req_pool_indices[place]]
            mapping = scheduler.token_to_kv_pool_allocator.full_to_swa_index_mapping
            if bool((mapping[row[end - 6 : end - 2].long()] > 0).all()):
                _free(scheduler, batch, place, end)
    return False


#: ``shared``: the next chunk is the last, and leaves room for a request that begins as this one.
#: ``session``: its second turn, which begins after what the first left.
FAULTS = {
    "freed": _freed,
    "chunk": _of_third_chunk(300, 400),
    "shared": _of_third_chunk(193, 230),
    "retracted": _of_third_chunk(193, 230),
    "session": _of_third_chunk(350, 400),
    "whenever": _whenever,
}

#: After which faults all is retracted, and how many rounds later: at once, so that nobody else has
#: retracted what was wrong; or when it was computed again, and generates.
PAUSES = {"retracted": 0, "session": 12}
