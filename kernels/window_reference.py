"""Window attention by its definition, in float64: what the kernels are compared with."""

from __future__ import annotations

import math

import torch

from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.translate import WindowTable


def attend(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    table: WindowTable,
    lengths: torch.Tensor,
    q_indptr: torch.Tensor,
    books: DeviceBooks,
    *,
    window: int,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the logarithm of the denominator; as ``window_triton.attend``, in float64.

    Reads the device. For each query and head: scores of the entries that are live and among the
    last ``window`` positions up to the query's own; a softmax over them and the head's sink, which
    has no value; the mean of the values by these weights. Nothing to attend to gives 0.
    """
    queries, heads, _ = q.shape
    group = heads // k_buffer.shape[1]
    out = torch.zeros(queries, heads, v_buffer.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.full((queries, heads), -math.inf, dtype=torch.float64, device=q.device)
    for request in range(lengths.shape[0]):
        begin, end = int(table.indptr[request]), int(table.indptr[request + 1])
        first, last = int(q_indptr[request]), int(q_indptr[request + 1])
        for query in range(first, last):
            position = int(lengths[request]) - (last - query)
            at = int(table.starts[request]) + torch.arange(end - begin, device=q.device)
            slots = table.slots[begin:end].long()
            keep = books.window_born[slots // books.page_size] == table.expected[begin:end]
            keep &= (at <= position) & (at > position - window)
            keys, values = k_buffer[slots[keep]].double(), v_buffer[slots[keep]].double()
            for head in range(heads):
                scores = scale * (keys[:, head // group] @ q[query, head].double())
                if soft_cap > 0:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double()[None]])
                if (scores == -math.inf).all():
                    continue
                lse[query, head] = scores.logsumexp(0)
                weights = scores.softmax(0)[: values.shape[0]]
                out[query, head] = weights @ values[:, head // group]
    return out, lse
