"""What speculative decoding on a CPU asks of ``sgl_kernel``, in torch.

Semantics: what SGLang 0.5.23 says and does in its own Triton kernels for the same (its tests hold
ours against these, interpreted). A tree of ``n`` drafts a request is told by who is whose ancestor,
or by first child and next sibling, ``-1`` where there is none; node 0 is the last token known.
All lengths are in tokens; tensors named ``…out`` or by what they become are written in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def tree_of_mask(
    mask: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    child: torch.Tensor,
    sibling: torch.Tensor,
    batch: int,
    n: int,
) -> None:
    """Positions and links of the trees of ``mask``, bool (batch * n * n): row ``i`` sees ``j``."""
    import torch

    earlier = torch.ones(n, n, dtype=torch.bool).tril(-1)
    for row, seen in enumerate(mask.view(batch, n, n).bool() & earlier):
        positions[row * n : (row + 1) * n] = lengths[row] + seen.sum(dim=1)
        index[row] = torch.arange(row * n, (row + 1) * n)
        parents = [max(above.nonzero().flatten().tolist(), default=-1) for above in seen]
        for node, parent in enumerate(parents):
            later = range(node + 1, n)
            child[row, node] = next((one for one in later if parents[one] == node), -1)
            sibling[row, node] = next(
                (one for one in later if parent >= 0 and parents[one] == parent), -1
            )


def verify_greedily(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Go down each tree by what the model says: a child that is this token is accepted.

    ``predicts`` (all nodes) gets the model's token at each accepted node, ``accept_index`` (batch,
    depth) the accepted nodes with node 0 first, ``accept_token_num`` (batch) how many drafts.
    """
    depth = accept_index.shape[1]
    for row, told in enumerate(target_predict.tolist()):
        node, accepted = 0, [0]
        while len(accepted) < depth:
            below = int(retrive_next_token[row, node])
            while below >= 0 and int(candidates[row, below]) != told[node]:
                below = int(retrive_next_sibling[row, below])
            if below < 0:
                break
            node = below
            accepted.append(node)
        for place, one in enumerate(accepted):
            at = int(retrive_index[row, one])
            accept_index[row, place] = at
            predicts[at] = told[one]
        accept_token_num[row] = len(accepted) - 1


def _parts(
    rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> Iterator[tuple[int, slice, slice]]:
    """Of each row its number, what it has from its start to its end, and where that lies packed."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, slice(start, end), slice(at, at := at + end - start)


def slots_of_rows(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    _width: int,
) -> None:
    """One after another into ``out``: what ``table`` has of each row from its start to its end."""
    for row, part, packed in _parts(rows, starts, ends):
        out[packed] = table[row, part]


def slots_to_rows(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    _width: int,
) -> None:
    """The other way: ``table`` gets them, and ``slots`` are read one after another."""
    for row, part, packed in _parts(rows, starts, ends):
        table[row, part] = slots[packed]


def slots_of_accepted(index: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """One after another into ``out``: the slots of all nodes that ``index`` names."""
    flat = index.reshape(-1)
    accepted = flat[flat >= 0].long()
    out[: len(accepted)] = slots[accepted]


def rows_moved(
    addresses: torch.Tensor, widths: torch.Tensor, to: torch.Tensor, source: torch.Tensor
) -> None:
    """In each pool, which lies at an address: rows of so many bytes, all read before any write."""
    import torch

    if not len(to):
        return
    count = 1 + int(torch.maximum(to.max(), source.max()))
    for address, width in zip(addresses.tolist(), widths.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (count * width)).from_address(address)
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(count, width)
        rows[to.long()] = rows[source.long()]


#: By the name that a release imports from ``sgl_kernel``, or from its ``speculative``.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "reconstruct_indices_from_tree_mask": tree_of_mask,
    "verify_tree_greedy_cpu": verify_greedily,
    "assign_extend_cache_locs_cpu": slots_of_rows,
    "assign_req_to_token_pool_cpu": slots_to_rows,
    "fill_accept_out_cache_loc_cpu": slots_of_accepted,
    "copy_all_layer_kv_cache_cpu": rows_moved,
}
