"""Window attention with FlashInfer, over translated window slots that are checked as they are used.

The idea: FlashInfer's wrappers take page tables, and SGLang's window wrapper gives them tables of
page size 1 whose entries are window slots. Ours takes a translation's ``WindowTable`` in their
place, compiles the variant of ``flashinfer_variant`` instead of FlashInfer's own, and hands it the
guard's books. ``plan`` is called once a step and ``run`` once a layer, as with the wrappers.

What FlashInfer cannot do is refused with ``Unsupported``; ``why_not`` tells without trying.
FlashInfer is imported when an object is made, and not before.

With ``graph``, the wrapper uses the table's own memory: a translation that is captured in the same
CUDA graph writes the slots and the generations that the captured attention reads. Lengths are
FlashInfer's plan, made outside of the graph.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hicache_guard.core.errors import ConfigError
from hicache_guard.kernels import record
from hicache_guard.kernels.flashinfer_variant import Variant

if TYPE_CHECKING:
    from hicache_guard.kernels.books import DeviceBooks
    from hicache_guard.kernels.translate import WindowTable

#: Bytes of FlashInfer's float workspace where none is given; what SGLang's default is, too.
WORKSPACE = 128 << 20

_HALVES = (torch.float16, torch.bfloat16)
_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Query heads for one of the cache that the decode kernel of every version from 0.6.11 on has.
_GROUPS = (1, 2, 3, 4, 8)
_DIMS = (64, 128, 256)
_PAIRS = ((192, 128),)


class Unsupported(ConfigError):
    """FlashInfer cannot do what is asked; the message is one line and says what can."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one model's window layers.

    ``window`` counts the query itself. ``scale`` is 1 over the root of ``head_dim_qk`` where it is
    None. ``soft_cap`` of 0 is none. ``sinks``: whether each query head has one. ``dtype``: of
    queries and output; ``dtype_kv``: of the cache, the same where it is None.
    """

    query_heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    window: int
    dtype: torch.dtype = torch.bfloat16
    dtype_kv: torch.dtype | None = None
    scale: float | None = None
    soft_cap: float = 0.0
    sinks: bool = False

    def __post_init__(self) -> None:
        if min(self.query_heads, self.kv_heads, self.head_dim_qk, self.head_dim_vo) < 1:
            raise ValueError("heads and their dimensions are counted from 1")
        if self.query_heads % self.kv_heads:
            raise ValueError("each head of the cache serves as many query heads as any other")
        if not 1 <= self.window < 1 << 30:
            raise ValueError("a window has at least the query itself")
        if not self.softmax_scale > 0.0 or not self.soft_cap >= 0.0:
            raise ValueError("the scale is above 0, and the soft cap not below")

    @property
    def softmax_scale(self) -> float:
        """What logits are multiplied by."""
        return 1.0 / math.sqrt(self.head_dim_qk) if self.scale is None else self.scale

    @property
    def cached(self) -> torch.dtype:
        """Type of the cache."""
        return self.dtype if self.dtype_kv is None else self.dtype_kv

    def variant(self, *, tensor_cores: bool) -> Variant:
        """What has to be compiled for it."""
        return Variant(
            tensor_cores=tensor_cores,
            dtype_q=self.dtype,
            dtype_kv=self.cached,
            dtype_o=self.dtype,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
            sinks=self.sinks,
            soft_cap=self.soft_cap > 0.0,
        )


def why_not(
    attention: Attention,
    page_size: int,
    *,
    decode: bool,
    tensor_cores: bool = True,
    backend: str = "fa2",
    custom_mask: bool = False,
) -> str | None:
    """Why FlashInfer cannot do this, in one line; None where it can.

    ``page_size``: the guard's, of the pools. ``decode``: with the decode wrapper, which serves one
    query a request; ``tensor_cores`` matters to that one only. Whether FlashInfer is installed is
    asked last.
    """
    return (
        _cannot(attention, page_size, decode, tensor_cores, backend, custom_mask)
        or _not_installed()
    )


def _cannot(
    attention: Attention,
    page_size: int,
    decode: bool,
    tensor_cores: bool,
    backend: str,
    custom_mask: bool,
) -> str | None:
    dims = (attention.head_dim_qk, attention.head_dim_vo)
    group = attention.query_heads // attention.kv_heads
    if backend != "fa2":
        return f"FlashInfer's {backend} kernels do not tell which request a key is of: use fa2"
    if custom_mask:
        return "the FlashInfer variant knows causal windows, no custom mask: use the Triton kernel"
    if page_size < 1 or page_size & (page_size - 1):
        return f"the FlashInfer variant shifts by the page size, and {page_size} is no power of two"
    if attention.dtype not in _HALVES or attention.cached not in (attention.dtype, *_BYTES):
        return f"no FlashInfer kernel for {attention.dtype} over a cache of {attention.cached}"
    if dims not in _PAIRS and (dims[0] != dims[1] or dims[0] not in _DIMS):
        return f"no FlashInfer kernel for head dimensions {dims[0]} and {dims[1]}"
    if decode and dims[0] != dims[1]:
        return (
            f"FlashInfer's decode wrapper has one head dimension, not {dims[0]} and {dims[1]}: "
            "use the prefill wrapper with one query a request"
        )
    if decode and not tensor_cores and group not in _GROUPS:
        return f"FlashInfer's decode kernel does not group {group} query heads: use tensor cores"
    return None


def _not_installed() -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return (
            "FlashInfer is not installed: pip install flashinfer-python, or use the Triton kernel"
        )
    return None


class _Window:
    """What both wrappers of ours share: the books, the table in force, and what ``run`` passes."""

    def __init__(self, attention: Attention, books: DeviceBooks, graph: WindowTable | None) -> None:
        self.attention = attention
        self.books = books
        self._graph = graph
        self._table = graph
        self._wrapper: Any = None
        device = books.window_born.device
        if graph is not None:
            _check_table(graph, device)
        requests = 0 if graph is None else graph.starts.shape[0]
        self._graph_ones = torch.ones(requests, dtype=torch.int32, device=device)
        # How full a request's last page of one token is. On the host, where ``plan`` reads it: from
        # the device it would be copied, and waited for.
        self._ones = torch.ones(requests, dtype=torch.int32)

    def _take(self, table: WindowTable, indptr_host: torch.Tensor | None) -> torch.Tensor:
        """Make ``table`` the one in force; returns its ``indptr`` for FlashInfer's plan."""
        device = self.books.window_born.device
        _check_table(table, device)
        requests = table.starts.shape[0]
        if self._graph is not None and not _same_memory(table, self._graph):
            raise ValueError("a captured attention reads the table it was made with, and no other")
        if indptr_host is not None and (
            indptr_host.device.type != "cpu"
            or indptr_host.dtype is not torch.int32
            or indptr_host.shape != (requests + 1,)
        ):
            raise ValueError("indptr_host is int32 [requests + 1] on the host")
        if self._ones.shape[0] != requests:
            self._ones = torch.ones(requests, dtype=torch.int32)
        self._table = table
        return table.indptr if indptr_host is None else indptr_host

    def _terms(self) -> dict[str, Any]:
        """What FlashInfer's plans of both kinds are told of the attention, by name."""
        attention = self.attention
        return {
            "window_left": attention.window - 1,
            "logits_soft_cap": attention.soft_cap,
            "q_data_type": attention.dtype,
            "kv_data_type": attention.cached,
            "sm_scale": attention.softmax_scale,
        }

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        k_scale: float,
        v_scale: float,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        attention = self.attention
        if self._table is None or self._wrapper is None:
            raise ValueError("plan comes before run")
        self._check(q, k, v, sinks)
        tensors = [
            self.books.window_born,
            self._table.expected,
            self._table.starts,
            self._table.record[record.AT_LATE : record.AT_LATE + 1],
            *([] if sinks is None else [sinks]),
        ]
        numbers: list[float | int] = [
            attention.softmax_scale * k_scale,
            attention.soft_cap,
            self.books.window_born.shape[0],
            self.books.page_size.bit_length() - 1,
        ]
        # A pool's slots are FlashInfer's pages of one token each (layout "NHD").
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self._wrapper.run(
            q,
            (k.unsqueeze(1), v.unsqueeze(1)),
            *tensors,
            *numbers,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=lse is not None,
        )
        return found[0] if isinstance(found, tuple) else found

    def _check(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        attention, slots = self.attention, self.books.window_slots
        if q.dim() != 3 or q.shape[1:] != (attention.query_heads, attention.head_dim_qk):
            raise ValueError("q is [queries, query heads, head_dim_qk]")
        # A table's slots are below ``slots``, so a pool that is shorter would be read beyond its
        # end. The pages that stand for what is beyond the pool are no part of the pool itself.
        usable = slots - self.books.page_size
        for name, pool, dim in (("k", k, attention.head_dim_qk), ("v", v, attention.head_dim_vo)):
            if pool.dim() != 3 or pool.shape[1:] != (attention.kv_heads, dim):
                raise ValueError(f"{name} is [window slots, kv heads, {dim}]")
            if pool.shape[0] < usable:
                raise ValueError(f"{name} has fewer slots than the books tell of")
            if pool.stride(2) != 1:
                raise ValueError(f"the elements of a head of {name} are contiguous")
        if q.dtype is not attention.dtype or {k.dtype, v.dtype} != {attention.cached}:
            raise TypeError(f"q is {attention.dtype}, and the cache {attention.cached}")
        if attention.sinks is (sinks is None):
            raise ValueError("sinks are given where the attention has them, and only there")
        if sinks is not None and (
            sinks.dtype is not torch.float32
            or sinks.shape != (attention.query_heads,)
            or not sinks.is_contiguous()
        ):
            raise ValueError("sinks are float32 [query heads], contiguous")
        if any(given.device != self.books.window_born.device for given in (q, k, v)):
            raise ValueError("all tensors are on the device of the books")


class FlashInferDecode(_Window):
    """One query a request, through ``BatchDecodeWithPagedKVCacheWrapper``.

    ``tensor_cores`` is what SGLang decides by the query heads that a head of the cache serves:
    FlashInfer then runs its FA2 prefill kernels. ``workspace``: uint8 on the device of the books,
    shared by wrappers that do not run at one time. ``graph``: the table to be used in a CUDA graph;
    its number of requests is the graph's.

    Raises ``Unsupported`` for what ``why_not`` tells of. Compiles at the first use of a variant,
    which takes minutes for tensor cores; FlashInfer keeps the result on disk.
    """

    def __init__(
        self,
        attention: Attention,
        books: DeviceBooks,
        *,
        tensor_cores: bool,
        workspace: torch.Tensor | None = None,
        graph: WindowTable | None = None,
        backend: str = "fa2",
    ) -> None:
        reason = why_not(
            attention, books.page_size, decode=True, tensor_cores=tensor_cores, backend=backend
        )
        _refuse(reason, books)
        super().__init__(attention, books, graph)
        flashinfer = importlib.import_module("flashinfer")
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(workspace, books),
            "NHD",
            use_cuda_graph=graph is not None,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=None if graph is None else graph.indptr,
            paged_kv_indices_buffer=None if graph is None else graph.slots,
            paged_kv_last_page_len_buffer=None if graph is None else self._graph_ones,
            # Newer releases let "auto" choose other kernels, which know no variant.
            backend="fa2",
            jit_args=attention.variant(tensor_cores=tensor_cores).jit_args(),
        )

    def plan(self, table: WindowTable, indptr_host: torch.Tensor | None = None) -> None:
        """Prepare for the lengths of ``table``, whose slots are int32.

        ``indptr_host``: int32 [requests + 1] on the host, the same as ``table.indptr``; without it
        FlashInfer copies that from the device, which waits. Raises ``ValueError`` and ``TypeError``
        for a table that does not fit.
        """
        indptr = self._take(table, indptr_host)
        self._wrapper.plan(
            indptr,
            table.slots,
            self._ones,
            self.attention.query_heads,
            self.attention.kv_heads,
            self.attention.head_dim_qk,
            1,
            **self._terms(),
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output [requests, query heads, head_dim_vo], of the type of ``q``.

        ``q``: [requests, query heads, head_dim_qk]. ``k`` and ``v``: the window pool, [slots, kv
        heads, dim], slot 0 zeroed, of the same strides. ``sinks``: float32 [query heads] in units
        of logits. ``k_scale`` and ``v_scale``: what the cache was divided by. ``lse``: float32
        [requests, query heads], is given the sum of each row's weights as a logarithm to base 2.

        A key whose window page is not the one that was translated counts for nothing, and
        ``table.record`` tells of it (``late``). Where no key is left the output is 0. Raises
        ``ValueError`` and ``TypeError`` for what does not fit.
        """
        if k.stride() != v.stride():
            raise Unsupported("FlashInfer's decode kernels need k and v of the same strides")
        return self._run(q, k, v, sinks, k_scale, v_scale, out, lse)


class FlashInferPrefill(_Window):
    """Several queries a request, through ``BatchPrefillWithPagedKVCacheWrapper``.

    Also for one query a request where the head dimensions differ. ``workspace`` and ``graph`` as
    for ``FlashInferDecode``; in a graph, ``qo_indptr`` (int32 [requests + 1], device) is the memory
    that holds the queries' offsets.

    Raises ``Unsupported`` for what ``why_not`` tells of.
    """

    def __init__(
        self,
        attention: Attention,
        books: DeviceBooks,
        *,
        workspace: torch.Tensor | None = None,
        graph: WindowTable | None = None,
        qo_indptr: torch.Tensor | None = None,
        backend: str = "fa2",
    ) -> None:
        _refuse(why_not(attention, books.page_size, decode=False, backend=backend), books)
        super().__init__(attention, books, graph)
        if (graph is None) is not (qo_indptr is None):
            raise ValueError("qo_indptr is given in a graph, and only there")
        flashinfer = importlib.import_module("flashinfer")
        self._independent = _release(flashinfer.__version__) >= (0, 6, 18)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            _workspace(workspace, books),
            "NHD",
            use_cuda_graph=graph is not None,
            qo_indptr_buf=qo_indptr,
            paged_kv_indptr_buf=None if graph is None else graph.indptr,
            paged_kv_indices_buf=None if graph is None else graph.slots,
            paged_kv_last_page_len_buf=None if graph is None else self._graph_ones,
            backend="fa2",
            jit_args=attention.variant(tensor_cores=True).jit_args(),
        )

    def plan(
        self,
        table: WindowTable,
        qo_indptr: torch.Tensor,
        indptr_host: torch.Tensor | None = None,
        *,
        custom_mask: torch.Tensor | None = None,
    ) -> None:
        """Prepare for ``table`` and its queries.

        ``qo_indptr``: int32 [requests + 1], where each request's queries begin; its last keys are
        those of its queries, and each query sees its own window of them. On the host, as
        ``indptr_host``, it costs no wait. Raises ``Unsupported`` for a ``custom_mask``,
        ``ValueError`` and ``TypeError`` for what does not fit.
        """
        page_size = self.books.page_size
        masked = custom_mask is not None
        reason = _cannot(self.attention, page_size, False, True, "fa2", masked)
        if reason is not None:
            raise Unsupported(reason)
        if qo_indptr.dtype is not torch.int32 or qo_indptr.shape != table.indptr.shape:
            raise ValueError("qo_indptr is int32 [requests + 1]")
        indptr = self._take(table, indptr_host)
        self._wrapper.plan(
            qo_indptr,
            indptr,
            table.slots,
            self._ones,
            self.attention.query_heads,
            self.attention.kv_heads,
            self.attention.head_dim_qk,
            1,
            head_dim_vo=self.attention.head_dim_vo,
            causal=True,
            **self._terms(),
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output [queries, query heads, head_dim_vo]; all as for ``FlashInferDecode.run``.

        Before FlashInfer 0.6.18 ``k`` and ``v`` need the same strides: else raises ``Unsupported``.
        """
        if k.stride() != v.stride() and not self._independent:
            raise Unsupported("FlashInfer before 0.6.18 needs k and v of the same strides")
        return self._run(q, k, v, sinks, k_scale, v_scale, out, lse)


def _refuse(reason: str | None, books: DeviceBooks) -> None:
    if reason is None and books.window_born.device.type != "cuda":
        reason = f"FlashInfer runs on a GPU, and the books are on {books.window_born.device.type}"
    if reason is not None:
        raise Unsupported(reason)


def _workspace(given: torch.Tensor | None, books: DeviceBooks) -> torch.Tensor:
    if given is None:
        return torch.empty(WORKSPACE, dtype=torch.uint8, device=books.window_born.device)
    if given.dtype is not torch.uint8 or given.device != books.window_born.device:
        raise ValueError("a workspace is uint8, on the device of the books")
    return given


def _check_table(table: WindowTable, device: torch.device) -> None:
    if table.slots.dtype is not torch.int32:
        raise TypeError(f"FlashInfer's page tables are int32, and the table's {table.slots.dtype}")
    if table.slots.device != device:
        raise ValueError("the table is on the device of the books")
    if table.expected.shape != table.slots.shape:
        raise ValueError("each entry of the table has one expected generation")


def _same_memory(one: WindowTable, other: WindowTable) -> bool:
    """Whether two tables are the same tensors, however they were sliced."""
    names = ("indptr", "starts", "slots", "expected", "record")
    return all(
        getattr(one, name).data_ptr() == getattr(other, name).data_ptr()
        and getattr(one, name).shape == getattr(other, name).shape
        for name in names
    )


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: 0.6.11.post1 is (0, 6, 11)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
