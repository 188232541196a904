"""What is replaced in the processes of an embedded server, and why: all of it, as one table.

``install()``, which ``shim`` calls in every process, has each replacement made when a module that
it changes is imported, and says so on stderr. Importing this module imports neither torch nor
SGLang.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import itertools
import math
import os
import pkgutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import wrapt

from hicache_guard.embedded import speculation, transfer

#: Say in the environment which of ``ATTENTION``, and which module of models, is asked for.
ATTENTION_VAR, MODELS_VAR = "HICACHE_EMBEDDED_ATTENTION", "HICACHE_EMBEDDED_MODELS"

#: Ways to compute attention, and the backend of the release that each asks for.
ATTENTION = {
    "triton": "triton",
    "triton-uneven": "triton",
    "torch_native": "torch_native",
    "torch_native-stock": "torch_native",
}


@dataclass(frozen=True)
class Replacement:
    """``make(module)`` replaces something once one of ``modules`` has been imported.

    ``attention`` are those of ``ATTENTION`` for which it is made, ``environment`` is what the
    server is started with.
    """

    name: str
    what: str
    why: str
    when: str = "always"
    modules: tuple[str, ...] = ()
    make: Callable[[Any], None] = lambda module: None
    attention: tuple[str, ...] = tuple(ATTENTION)
    environment: dict[str, str] = field(default_factory=dict)


# -- processes and imports -----------------------------------------------------------------------

KERNELS = ("sgl_kernel", "sgl_kernel.kvcacheio", "sgl_kernel.speculative")
MOONCAKE = ("mooncake", "mooncake.engine")


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module with nothing in it under each name of ``KERNELS`` and ``MOONCAKE``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in KERNELS + MOONCAKE:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def absent_operations(module: Any) -> None:
    def absent(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def operation(*_args: Any, **_kwargs: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name} is not there on this machine")

        return operation

    module.__getattr__ = absent


def _forked(multiprocessing: Any) -> None:
    start = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_args, **_kwargs: start("fork", force=True)


def _one_model(sglang: Any) -> None:
    wanted = os.environ.get(MODELS_VAR)
    if wanted:
        there = pkgutil.iter_modules([os.path.join(*sglang.__path__, "srt", "models")])
        others = sorted(module.name for module in there if module.name != wanted)
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)


def _no_cuda(torch: Any) -> None:
    if torch.cuda.is_available():
        print(
            "hicache-guard: the embedded server is for machines without CUDA, and this one has it: "
            "run SGLang itself here",
            file=sys.stderr,
        )
        sys.exit(2)


# -- attention -----------------------------------------------------------------------------------


def _attended(
    q: Any,
    keys: Any,
    values: Any,
    scale: float,
    *,
    window: int,
    sinks: Any,
    cap: float,
    drafts: Any = None,
    depths: bool = False,
) -> Any:
    """What the last ``len(q)`` of ``len(keys)`` tokens see: those up to ``window`` before each.

    ``drafts``, where they are a tree, says which of themselves these see; bool (len(q), len(q)).
    The window of one is counted from its index among them or, as it is in a text, its ``depths``.
    """
    import torch

    known, place = len(keys) - len(q), torch.arange(len(keys))
    if depths and drafts is not None:
        place[known:] = known + drafts.sum(dim=1) - 1
    own, other = place[known:, None], place[None, :]
    seen = (other <= own) & (own - other <= (window if window >= 0 else len(keys)))
    if drafts is not None:
        seen[:, known:] &= drafts
    grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[2])
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys.to(q.dtype)) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sunk = sinks.to(q.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sunk], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(keys)]
    found = torch.einsum("hgqk,khd->qhgd", weights, values.to(q.dtype))
    return found.reshape(len(q), q.shape[1], values.shape[2])


def _rows(indptr: Any, indices: Any) -> list[Any]:
    return [indices[start:end].long() for start, end in itertools.pairwise(indptr.tolist())]


#: Options of the two kernels that are not done in torch.
_OTHERS = ("score_mod", "enable_lean", "xai_temperature_len")


def _refuse_others(options: dict[str, Any]) -> None:
    asked = [name for name in _OTHERS if options.get(name) not in (None, False, -1)]
    assert not asked, asked


def decode_attention(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    indptr: Any,
    indices: Any,
    _logits: Any,
    _lse: Any,
    _splits: Any,
    _max: Any,
    scale: float,
    *_: Any,
    sinks: Any = None,
    logit_cap: float = 0.0,
    **options: Any,
) -> None:
    _refuse_others(options)
    for row, slots in enumerate(_rows(indptr, indices)):
        one = slice(row, row + 1)
        out[one] = _attended(
            q[one], k[slots], v[slots], scale, window=-1, sinks=sinks, cap=logit_cap
        )


def extend_attention(
    q: Any,
    new_k: Any,
    new_v: Any,
    out: Any,
    k: Any,
    v: Any,
    starts: Any,
    indptr: Any,
    indices: Any,
    mask: Any,
    causal: bool,
    mask_at: Any,
    _longest: Any,
    _k_scale: Any,
    _v_scale: Any,
    scale: float | None = None,
    sliding_window_size: int = -1,
    sinks: Any = None,
    logit_cap: float = 0.0,
    depths: bool = False,
    **options: Any,
) -> None:
    import torch

    _refuse_others(options)
    assert causal, "no encoder"
    bounds = starts.tolist()
    masks = None if mask is None else _rows(mask_at, mask)
    scaled = scale or 1 / math.sqrt(q.shape[-1])
    for row, slots in enumerate(_rows(indptr, indices)):
        new = slice(bounds[row], bounds[row + 1])
        count = bounds[row + 1] - bounds[row]
        keys, values = torch.cat([k[slots], new_k[new]]), torch.cat([v[slots], new_v[new]])
        # Of a mask the kernel reads what is about the new tokens: the end of each line.
        drafts = None if masks is None else masks[row].view(count, -1)[:, -count:].bool()
        out[new] = _attended(
            q[new], keys, values, scaled,
            window=sliding_window_size, sinks=sinks, cap=logit_cap, drafts=drafts, depths=depths,
        )  # fmt: skip


def around(cls: Any, name: str, by: Callable[..., Any]) -> None:
    """Have ``by`` called instead of a method, with the original first; the guard goes around it."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return by(original, self, *args, **kwargs)

    setattr(cls, name, method)


def _of_each_backend(module: Any, change: Callable[[Any], None]) -> None:
    """Have ``change`` called with each Triton backend that is made."""

    def made(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> None:
        original(backend, *args, **kwargs)
        change(backend)

    around(module.TritonAttnBackend, "__init__", made)


def _triton_kernels(module: Any) -> None:
    def replaced(backend: Any) -> None:
        backend.decode_attention_fwd = decode_attention
        backend.extend_attention_fwd = extend_attention

    _of_each_backend(module, replaced)


def _draft_windows(module: Any) -> None:
    def by_depth(backend: Any) -> None:
        backend.extend_attention_fwd = functools.partial(backend.extend_attention_fwd, depths=True)

    _of_each_backend(module, by_depth)


def _even_windows(module: Any) -> None:
    def evened(backend: Any) -> None:
        extend, gathered = backend.extend_attention_fwd, backend.sliding_window_size

        def even(*args: Any, sliding_window_size: int, **kwargs: Any) -> None:
            before = min(sliding_window_size, gathered - 1)
            extend(*args, sliding_window_size=before, **kwargs)

        if gathered is not None:
            backend.extend_attention_fwd = even

    _of_each_backend(module, evened)


def _torch_native(module: Any) -> None:
    """Read where the window layers write, which is at translated slots; and mask the window."""
    cls = module.TorchNativeAttnBackend
    under_way: list[Any] = [None, None]

    def noted(
        original: Callable[..., Any],
        backend: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        pool = getattr(backend, "token_to_kv_pool", None) or forward_batch.token_to_kv_pool
        under_way[:] = layer, pool
        return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)

    def attend(
        q: Any, out: Any, k: Any, v: Any, table: Any, rows: Any, ends: Any, starts: Any, scale: Any
    ) -> None:
        layer, pool = under_way
        hybrid = getattr(pool, "layers_mapping", None)
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        at = 0
        for row, end, start in zip(rows.tolist(), ends.tolist(), starts.tolist(), strict=True):
            slots = table[row, :end].long()
            if hybrid is not None and hybrid[layer.layer_id][1]:
                slots = pool.translate_loc_from_full_to_swa(slots).long()
            new = slice(at, at := at + end - start)
            out[new] = _attended(
                q[new], k[slots], v[slots], scale, window=window, sinks=None, cap=0.0
            )

    def extend(_original: Any, _backend: Any, *asked: Any, scaling: float, **_: Any) -> None:
        q, out, k, v, table, rows, ends, starts, *_rest = asked
        attend(q, out, k, v, table, rows, ends, starts, scaling)

    def decode(_original: Any, _backend: Any, *asked: Any, scaling: float, **_: Any) -> None:
        q, out, k, v, table, rows, ends, *_rest = asked
        attend(q, out, k, v, table, rows, ends, ends - 1, scaling)

    for name in ("forward_extend", "forward_decode"):
        around(cls, name, noted)
    around(cls, "_run_sdpa_forward_extend", extend)
    around(cls, "_run_sdpa_forward_decode", decode)


# -- speculative decoding ------------------------------------------------------------------------


def _draft_operations(module: Any) -> None:
    vars(module).update(speculation.OPERATIONS)


def _whole_masks(module: Any) -> None:
    module._is_cpu = False


# -- HiCache -------------------------------------------------------------------------------------


def _copied(
    src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, to in zip(src_layers, dst_layers, strict=True):
        to[dst_indices.long()] = source[src_indices.long()]


def _copied_to_pages(
    src_ptrs: list[Any], dst_ptrs: list[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Layers of keys, then of values, to pages that hold all layers of either."""
    layers, there = len(src_ptrs) // len(dst_ptrs), dst_indices.long()
    for number, source in enumerate(src_ptrs):
        pages = dst_ptrs[number // layers]
        pages[there // page_size, number % layers, there % page_size] = source[src_indices.long()]


def _copied_from_pages(
    src_ptrs: list[Any],
    dst_ptrs: list[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    here = src_indices.long()
    for pages, to in zip(src_ptrs, dst_ptrs, strict=True):
        to[dst_indices.long()] = pages[here // page_size, layer_id, here % page_size]


_COPIES = {
    "transfer_kv_direct": _copied,
    "transfer_kv_all_layer_direct_lf_pf": _copied_to_pages,
    "transfer_kv_per_layer_direct_pf_lf": _copied_from_pages,
}


#: Modules of host pools: up to 0.5.13 all is in the last, from 0.5.16 on in the others.
_HOST_POOLS = (
    "sglang.srt.mem_cache.pool_host.common",
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.mem_cache.memory_pool_host",
)


def _streams(torch: Any) -> None:
    torch.cpu.Stream.synchronize = lambda stream: None
    torch.cpu.Stream.query = lambda stream: True


def _host_copies(module: Any) -> None:
    vars(module).update(_COPIES)


#: Where what is kept free of host pools is written down.
_HOST_RESERVE = ("sglang.srt.mem_cache.pool_host.base", "sglang.srt.mem_cache.memory_pool_host")


def _host_reserve(module: Any) -> None:
    if hasattr(module, "HICACHE_HOST_MEMORY_RESERVE_BYTES"):
        module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _host_memory(module: Any) -> None:
    if not hasattr(module, "alloc_with_host_register"):
        return
    allocate = module.alloc_with_host_register

    def unpinned(*args: Any, pin_memory: bool, **kwargs: Any) -> Any:
        return allocate(*args, pin_memory=False, **kwargs)

    module.ALLOC_MEMORY_FUNCS["cpu"] = unpinned


class _Unpinned(wrapt.ObjectProxy[Any]):
    """``torch`` for a module that pins memory without asking whether there is a device."""

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return self.__wrapped__.tensor(*args, **kwargs)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return self.__wrapped__.zeros(*args, **kwargs)


def unpinned(module: Any) -> None:
    module.torch = _Unpinned(module.torch)


# -- prefill/decode disaggregation ---------------------------------------------------------------


def _transfer_engine(module: Any) -> None:
    module.TransferEngine = transfer.TransferEngine


class _DoneEvent:
    """An event of a stream on which all was done when it was asked for."""

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _NoStreams(wrapt.ObjectProxy[Any]):
    """``torch`` for a module that pins memory, and waits for streams, without asking."""

    cuda = types.SimpleNamespace(Event=_DoneEvent, current_stream=lambda: None)

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return self.__wrapped__.empty(*args, **kwargs)


def _no_streams(module: Any) -> None:
    module.torch = _NoStreams(module.torch)


TABLE = (
    Replacement(
        "CPU engine",
        "environment variable SGLANG_USE_CPU_ENGINE",
        "without AMX in the processor a release takes the machine for no device at all",
        environment={"SGLANG_USE_CPU_ENGINE": "1"},
    ),
    Replacement(
        "Triton interpreted",
        "environment variable TRITON_INTERPRET",
        "Triton compiles for no CPU: kernels that gather slots and allocate pages are interpreted",
        environment={"TRITON_INTERPRET": "1"},
    ),
    Replacement(
        "no CUDA",
        "nothing: a process that sees CUDA ends with status 2",
        "what is replaced here would hide the kernels that such a machine has",
        modules=("torch",),
        make=_no_cuda,
    ),
    Replacement(
        "processes forked",
        "multiprocessing.set_start_method",
        "SGLang is imported once, and not by each of three processes",
        modules=("multiprocessing",),
        make=_forked,
    ),
    Replacement(
        "one model",
        "environment variable SGLANG_DISABLED_MODEL_ARCHS",
        "importing two hundred models takes longer than all else",
        when="a model of ours",
        modules=("sglang",),
        make=_one_model,
    ),
    Replacement(
        "sgl_kernel",
        "the package: it can be imported, its operations raise when they are called",
        "no wheel of it runs on a CPU, and 0.5.12 and 0.5.13 name it in imports of every process",
        when="where a release imports it",
        modules=KERNELS,
        make=absent_operations,
    ),
    Replacement(
        "drafts",
        "sgl_kernel's operations on trees of drafts, in torch",
        "they are compiled for a CPU nowhere but in its own wheels",
        when="speculative decoding",
        modules=KERNELS,
        make=_draft_operations,
    ),
    Replacement(
        "whole masks",
        "_is_cpu, of the n-gram worker: masks of drafts are made as for a GPU",
        "those that it makes on a CPU are for AMX's attention, and Triton's would misread them",
        when="speculative decoding",
        modules=("sglang.srt.speculative.ngram_worker",),
        make=_whole_masks,
    ),
    Replacement(
        "streams",
        "torch.cpu.Stream.synchronize, and query",
        "HiCache waits for its streams, and those of torch.cpu lack the two",
        when="HiCache; they do nothing, as copies are done when they are asked for",
        modules=("torch",),
        make=_streams,
    ),
    Replacement(
        "host memory",
        "ALLOC_MEMORY_FUNCS, of host pools",
        "memory is pinned by CUDA's runtime, which is not there",
        when="HiCache",
        modules=_HOST_POOLS,
        make=_host_memory,
    ),
    Replacement(
        "host reserve",
        "HICACHE_HOST_MEMORY_RESERVE_BYTES, of host pools: 0",
        "a pool of a few MB is refused where less than 10 GB of memory are free",
        when="HiCache",
        modules=_HOST_RESERVE,
        make=_host_reserve,
    ),
    Replacement(
        "host copies",
        "transfer_kv_…, of host pools, in torch",
        "they are sgl_kernel's; those of hicache_io_backend=direct are done",
        when="HiCache",
        modules=_HOST_POOLS,
        make=_host_copies,
    ),
    Replacement(
        "pages unpinned",
        "torch.zeros, of host pools",
        "what a page is read from storage into is pinned without asking whether there is a device",
        when="HiCache with a third tier",
        modules=_HOST_POOLS,
        make=unpinned,
    ),
    Replacement(
        "log-probabilities unpinned",
        "torch.tensor, of the logits processor",
        "it pins memory without asking whether there is a device",
        when="0.5.12 and its post-release, where log-probabilities of a prompt are asked for",
        modules=("sglang.srt.layers.logits_processor",),
        make=unpinned,
    ),
    Replacement(
        "transfer engine",
        "mooncake.engine.TransferEngine: bytes go to a peer on this machine over TCP",
        "Mooncake's wheels need RDMA's libraries, and what is sent should be at hand in a test",
        when="prefill/decode disaggregation",
        modules=("mooncake.engine",),
        make=_transfer_engine,
        environment={"SGLANG_HOST_IP": "127.0.0.1"},
    ),
    Replacement(
        "prefill unpinned",
        "torch.empty, torch.cuda.Event and current_stream, of the scheduler of prefill",
        "it pins memory, and has transfers wait for CUDA, without asking whether there is a device",
        when="prefill/decode disaggregation; an event has happened, as all is done at once",
        modules=("sglang.srt.disaggregation.prefill",),
        make=_no_streams,
    ),
    Replacement(
        "Triton attention",
        "decode_attention_fwd and extend_attention_fwd, of the Triton backend, in torch",
        "interpreted they take 0.7 s a pass; what slots they read the backend's own code gathers",
        when="attention triton, triton-uneven",
        modules=("sglang.srt.layers.attention.triton_backend",),
        make=_triton_kernels,
        attention=("triton", "triton-uneven"),
    ),
    Replacement(
        "windows of drafts",
        "extend_attention_fwd: the window of a draft is counted from its depth in the tree",
        "the kernel counts it from the draft's index, in 0.5.23, so that a draft beside others "
        "sees too few tokens, and what it was accepted with is not what a prefill computes",
        when="speculative decoding, attention triton; triton-uneven leaves it as it is",
        modules=("sglang.srt.layers.attention.triton_backend",),
        make=_draft_windows,
        attention=("triton",),
    ),
    Replacement(
        "even windows",
        "sliding_window_size of extend_attention_fwd: at most what a decode step gathers",
        "a decode step of Gemma 4 and MiMo-V2 sees one token less than a prefill, in every release "
        "to 0.5.23, so that an answer depends on which of them computed a token's KV",
        when="attention triton; triton-uneven leaves it as it is",
        modules=("sglang.srt.layers.attention.triton_backend",),
        make=_even_windows,
        attention=("triton",),
    ),
    Replacement(
        "torch_native attention",
        "_run_sdpa_forward_extend and …decode_attention, of the torch_native backend",
        "it writes window layers at translated slots and reads them at slots of the full pool "
        "(C16), and up to 0.5.12 knows no window",
        when="attention torch_native; torch_native-stock leaves it as it is",
        modules=("sglang.srt.layers.attention.torch_native_backend",),
        make=_torch_native,
        attention=("torch_native",),
    ),
)


def environment(attention: str, models: str) -> dict[str, str]:
    """What a server is started with, so that its processes make what is asked for."""
    found = {ATTENTION_VAR: attention, MODELS_VAR: models}
    for replacement in TABLE:
        found |= replacement.environment
    return found


def install() -> None:
    """Have everything made that the environment asks for."""
    sys.meta_path.append(Empty())
    attention = os.environ.get(ATTENTION_VAR, "triton")
    for replacement in TABLE:
        if attention in replacement.attention:
            for module in replacement.modules:
                wrapt.register_post_import_hook(functools.partial(_make, replacement), module)


def _make(replacement: Replacement, module: Any) -> None:
    replacement.make(module)
    print(f"embedded: {replacement.name} ({module.__name__})", file=sys.stderr, flush=True)
