"""One translation a step: the full slots of each request's window become checked window slots.

Source: PR #25889, where a batch's translation outlived the mapping it was read from. Here a step's
translation is one pass over the mapping as it is, in a launch whose shape and addresses are fixed,
so that a replayed CUDA graph reads the mapping of the replay; and each entry is checked against the
guard's books by the rule in ``books`` before anybody loads KV through it. What is not proved is
redirected to slot 0, the padding slot, which belongs to nobody.

Nothing here reads the device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hicache_guard.kernels import record
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.translate_torch import translate as translate_with_torch


@dataclass(frozen=True, eq=False)
class WindowTable:
    """The windows of one batch, at addresses that stay; a later run overwrites them.

    Request ``r`` has the entries ``indptr[r]`` to ``indptr[r + 1]`` of ``slots`` and ``expected``,
    for the positions from ``starts[r]`` on, without gaps.

    ``indptr``: int32 [B + 1]. ``starts``: int32 [B]. ``slots``: int32 or int64 as planned
    [entries planned]; 0 where the entry leads nowhere. ``expected``: int32 [entries planned], the
    generation of the window slot's page; 0, which no page has, where the entry leads nowhere.
    ``record``: int64, see ``record``. What lies beyond ``indptr[B]`` means nothing.
    """

    indptr: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    expected: torch.Tensor
    record: torch.Tensor


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a plan allocates; see ``WindowTable``. ``scratch`` is the Triton kernel's own."""

    indptr: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    expected: torch.Tensor
    record: torch.Tensor
    scratch: torch.Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """What one run is asked for; see ``WindowTranslation.run``."""

    req_to_token: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    queries: torch.Tensor


Implementation = Callable[[Batch, DeviceBooks, int, Outputs], None]


class WindowTranslation:
    """Translates the windows of batches up to a planned size; made by ``plan``.

    ``how`` is "triton" or "torch": which implementation it uses.
    """

    def __init__(self, window: int, outputs: Outputs, how: str, translate: Implementation) -> None:
        self.window = window
        self.how = how
        self._outputs = outputs
        self._translate = translate

    @classmethod
    def plan(
        cls,
        max_requests: int,
        max_entries: int,
        window: int,
        index_dtype: torch.dtype,
        device: torch.device,
        how: str | None = None,
    ) -> WindowTranslation:
        """Allocate the outputs, once.

        ``max_entries`` is the most entries of a batch: for each request ``window`` - 1 and its
        queries. ``window`` counts the query itself. ``how`` as in ``chosen``. Raises ``ValueError``
        for sizes below 1 or over 2**31 - 1, ``TypeError`` for an ``index_dtype`` other than int32
        and int64, and ``ImportError`` where "triton" is asked for and not installed.
        """
        if not all(1 <= size < 2**31 for size in (max_requests, max_entries, window)):
            raise ValueError("requests, entries and the window are counted in int32, from 1")
        if index_dtype not in (torch.int32, torch.int64):
            raise TypeError(f"window slots are int32 or int64, not {index_dtype}")
        how = chosen(how, device)
        outputs = Outputs(
            indptr=torch.zeros(max_requests + 1, dtype=torch.int32, device=device),
            starts=torch.zeros(max_requests, dtype=torch.int32, device=device),
            slots=torch.zeros(max_entries, dtype=index_dtype, device=device),
            expected=torch.zeros(max_entries, dtype=torch.int32, device=device),
            record=torch.zeros(record.LENGTH, dtype=torch.int64, device=device),
            scratch=torch.zeros(record.LENGTH, dtype=torch.int64, device=device),
        )
        outputs.scratch[record.AT_FIRST] = record.NOBODY
        return cls(window, outputs, how, _implementation(how))

    def run(
        self,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        queries: torch.Tensor,
        books: DeviceBooks,
    ) -> WindowTable:
        """Translate one batch of ``B`` requests, ``B`` at most what was planned.

        ``req_to_token``: int32 or int64 [rows, places], the full slot of each position of each
        request, rows contiguous. ``rows``: int32 or int64 [B], the request's row there.
        ``lengths``: int32 or int64 [B], its tokens, queries included. ``queries``: int32 or int64
        [B], how many of its last tokens are queries: 1 when decoding, more in a prefill or for a
        tree of drafts. The window of a request is that of its queries together, from ``window`` - 1
        before the first to the last. A request without queries or tokens has no entries. A place
        that the table does not have counts as slot -1.

        Raises ``ValueError`` for other shapes or places, ``TypeError`` for other dtypes.
        """
        batch = Batch(req_to_token, rows, lengths, queries)
        out = self._outputs
        self._check(batch, books)
        count = rows.shape[0]
        if count:
            self._translate(batch, books, self.window, out)
        else:
            _clear(out)
        return WindowTable(
            out.indptr[: count + 1], out.starts[:count], out.slots, out.expected, out.record
        )

    def _check(self, batch: Batch, books: DeviceBooks) -> None:
        columns = (batch.rows, batch.lengths, batch.queries)
        tensors = (batch.req_to_token, *columns)
        if any(given.dtype not in (torch.int32, torch.int64) for given in tensors):
            raise TypeError("slots, rows, lengths and counts are int32 or int64")
        if any(column.shape != (batch.rows.shape[0],) for column in columns):
            raise ValueError("each request has one row, one length and one count of queries")
        if any(not column.is_contiguous() for column in columns):
            raise ValueError("rows, lengths and counts are contiguous")
        if batch.rows.shape[0] > self._outputs.starts.shape[0]:
            raise ValueError("more requests than were planned")
        if batch.req_to_token.dim() != 2 or batch.req_to_token.stride(1) != 1:
            raise ValueError("the request table has two dimensions, and contiguous rows")
        if any(given.device != self._outputs.slots.device for given in (*tensors, books.mapping)):
            raise ValueError("all tensors are on the device that was planned for")


def chosen(how: str | None, device: torch.device) -> str:
    """``how``; where it is None, Triton on a GPU where it is installed, else torch.

    Raises ``ValueError`` for another way than these two.
    """
    if how is None:
        usable = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        return "triton" if usable else "torch"
    if how not in ("triton", "torch"):
        raise ValueError(f"a translation runs with torch or triton, not {how}")
    return how


def _clear(out: Outputs) -> None:
    """Say that there is nothing: a kernel cannot be launched for no request."""
    out.indptr[:1].zero_()
    out.record.zero_()
    out.record[record.AT_FIRST].fill_(record.NOBODY)
    out.record[record.AT_LATE].fill_(record.NOBODY)


def _implementation(how: str) -> Implementation:
    if how == "torch":
        return translate_with_torch
    # Only where it is used: importing Triton takes a second, and a CPU install has none.
    from hicache_guard.kernels.translate_triton import translate as translate_with_triton

    return translate_with_triton
