"""Which window attention is used: the one place that chooses, and says what and why.

There are three, of one meaning (``window_reference`` is the definition): FlashInfer with our
variant, Triton with masked loads, and float64 in torch. FlashInfer is taken where it can do what a
model needs; Triton on any other GPU; the reference where there is no GPU, since on a CPU nobody
serves through these kernels, and what is slow and plain is easiest to trust.
"""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from hicache_guard.core.errors import ConfigError
from hicache_guard.kernels import window_reference
from hicache_guard.kernels.flashinfer_window import (
    Attention,
    FlashInferDecode,
    FlashInferPrefill,
    why_not,
)

if TYPE_CHECKING:
    from hicache_guard.kernels.books import DeviceBooks
    from hicache_guard.kernels.translate import WindowTable


class How(StrEnum):
    """A way to attend."""

    FLASHINFER = "flashinfer"
    TRITON = "triton"
    REFERENCE = "reference"


class WindowAttention:
    """Attention to the windows of a batch, planned once a step and run once a layer.

    ``how`` is what was chosen, and ``because`` why not what comes before it in ``How``, in a line;
    empty for the first. Made by ``window_attention``.
    """

    def __init__(
        self, attention: Attention, books: DeviceBooks, how: How, because: str, *, decode: bool
    ) -> None:
        self.attention = attention
        self.books = books
        self.how = how
        self.because = because
        self._decode = decode
        self._flashinfer: FlashInferDecode | FlashInferPrefill | None = None
        if how is How.FLASHINFER:
            self._flashinfer = _flashinfer(attention, books, decode=decode)
        self._batch: tuple[WindowTable, torch.Tensor, torch.Tensor, int] | None = None

    def plan(
        self,
        table: WindowTable,
        lengths: torch.Tensor,
        q_indptr: torch.Tensor,
        max_queries: int,
        indptr_host: torch.Tensor | None = None,
    ) -> None:
        """Prepare for a translation's ``table``.

        ``lengths`` [B]: each request's tokens, as the translation was given them. ``q_indptr``:
        int32 [B + 1], where each request's queries begin, which are its last tokens.
        ``max_queries``: at least what a request has. ``indptr_host``: ``table.indptr`` on the host,
        which the caller can tell from lengths that it has there; without it FlashInfer copies it
        from the device, and waits. Raises ``ValueError`` for more than one query a request where
        only decoding was asked for.
        """
        if self._decode and max_queries != 1:
            raise ValueError("decoding has one query a request; ask for decode=False")
        if isinstance(self._flashinfer, FlashInferDecode):
            self._flashinfer.plan(table, indptr_host)
        elif self._flashinfer is not None:
            self._flashinfer.plan(table, q_indptr, indptr_host)
        self._batch = table, lengths, q_indptr, max_queries

    def run(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output [queries, query heads, head_dim_vo], of the type of ``q``.

        ``q``: [queries, query heads, head_dim_qk]. ``k_buffer`` and ``v_buffer``: one layer's
        window pool, [slots, KV heads, dim], slot 0 zeroed. ``sinks``: float32 [query heads]. What
        no longer holds when it is loaded counts for nothing and is left in ``table.record``. Raises
        ``ValueError`` before ``plan``, and for what does not fit.
        """
        if self._batch is None:
            raise ValueError("plan comes before run")
        table, lengths, q_indptr, max_queries = self._batch
        attention, books = self.attention, self.books
        if self._flashinfer is not None:
            return self._flashinfer.run(q, k_buffer, v_buffer, sinks=sinks)
        if self.how is How.TRITON:
            from hicache_guard.kernels import window_triton  # only where there is Triton

            found, _ = window_triton.attend(
                q, k_buffer, v_buffer, table, lengths, q_indptr, books,
                max_queries=max_queries, window=attention.window, scale=attention.softmax_scale,
                soft_cap=attention.soft_cap, sinks=sinks,
            )  # fmt: skip
            return found
        found, _ = window_reference.attend(
            q, k_buffer, v_buffer, table, lengths, q_indptr, books, window=attention.window,
            scale=attention.softmax_scale, soft_cap=attention.soft_cap, sinks=sinks,
        )  # fmt: skip
        return found.to(q.dtype)


def window_attention(
    attention: Attention, books: DeviceBooks, *, decode: bool, how: How | None = None
) -> WindowAttention:
    """The attention for a model's window layers, on the device of its books.

    ``decode``: for one query a request. ``how`` insists on one; raises ``ConfigError`` where that
    cannot be.
    """
    reasons = {How.FLASHINFER: _no_flashinfer(attention, books, decode), How.TRITON: _no_triton()}
    if how is not None:
        reason = reasons.get(how)
        if reason is not None:
            raise ConfigError(f"window attention by {how} is not possible: {reason}")
        return WindowAttention(attention, books, how, "it was asked for", decode=decode)
    on_device = books.mapping.is_cuda
    because = "" if on_device else "the books are not on a GPU"
    for candidate, reason in reasons.items():
        if on_device and reason is None:
            return WindowAttention(attention, books, candidate, because, decode=decode)
        because = because or f"not {candidate}: {reason}"
    return WindowAttention(attention, books, How.REFERENCE, because, decode=decode)


def _no_flashinfer(attention: Attention, books: DeviceBooks, decode: bool) -> str | None:
    if not books.mapping.is_cuda:
        return "the books are not on a GPU"
    # Decode kernels have one dimension for all heads; the prefill kernels serve both.
    decode = decode and attention.head_dim_qk == attention.head_dim_vo
    return why_not(attention, books.page_size, decode=decode)


def _no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def _flashinfer(
    attention: Attention, books: DeviceBooks, *, decode: bool
) -> FlashInferDecode | FlashInferPrefill:
    if not decode or attention.head_dim_qk != attention.head_dim_vo:
        return FlashInferPrefill(attention, books)
    # What SGLang decides for FlashInfer's own: tensor cores from four query heads a KV head on.
    tensor_cores = attention.query_heads // attention.kv_heads >= 4
    return FlashInferDecode(attention, books, tensor_cores=tensor_cores)
