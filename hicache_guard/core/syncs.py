"""Counts the torch operators that would make the host wait for a device.

The list holds the operators whose result's shape or value the host must know: on a GPU each of them
stalls the stream. On a CPU they cost nothing, but they are dispatched all the same, so that a
machine without a GPU can count them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SYNCHRONISING = frozenset(
    {
        "aten::_local_scalar_dense",  # item, tolist, int(), bool()
        "aten::is_nonzero",
        "aten::equal",
        "aten::nonzero",
        "aten::nonzero_numpy",
        "aten::masked_select",
        "aten::_unique",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::bincount",
        "aten::repeat_interleave",  # of a tensor of counts
    }
)
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})


class SyncCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts synchronising operators by name in ``counts``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in _SYNCHRONISING:
            counts_given = name != "aten::repeat_interleave" or func._overloadname == "Tensor"
            if counts_given:
                self.counts[name] += 1
        elif name in _INDEXING and _has_mask(args):
            self.counts["masked " + name] += 1
        elif name == "aten::_to_copy" and _to_host(args, kwargs or {}):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def _has_mask(args: tuple[Any, ...]) -> bool:
    return any(
        isinstance(index, torch.Tensor) and index.dtype is torch.bool for index in args[1] or ()
    )


def _to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return (
        device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"
    )
