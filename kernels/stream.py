"""Proves a stream of full slots that somebody else gathered: SGLang's own window indices.

SGLang's backends gather the full slots of each request's window into one stream and translate it
by a lookup in the mapping. This is that lookup, with each entry checked by the rule in ``books``.
What is not proved becomes slot 0, the padding slot, and is counted, for each request as well: who
serves the batch has to know whose output is not to be emitted.

``translate`` does the same for windows that it finds itself. Nothing here reads the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hicache_guard.kernels import record
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.stream_torch import translate as translate_with_torch
from hicache_guard.kernels.translate import chosen


@dataclass(frozen=True, eq=False)
class Stream:
    """Full slots that were gathered for a batch of ``B`` requests.

    ``slots``: int32 or int64 [n], contiguous. Request ``r`` has those from ``indptr[r]`` to
    ``indptr[r + 1]`` (int32 [B + 1]), for the positions from ``starts[r]`` on (int32 or int64 [B]).
    What lies beyond ``indptr[B]`` means nothing. Only the first ``counted`` requests are counted
    and recorded: a batch that is padded to the size of a CUDA graph has rows that are nobody's.
    """

    slots: torch.Tensor
    indptr: torch.Tensor
    starts: torch.Tensor
    counted: int


Implementation = Callable[[Stream, DeviceBooks, torch.Tensor, torch.Tensor, torch.Tensor], None]


class StreamTranslation:
    """Translates streams on one device; made by ``plan``.

    ``how`` is "triton" or "torch": which implementation it uses.
    """

    def __init__(self, scratch: torch.Tensor, how: str, translate: Implementation) -> None:
        self.how = how
        self._scratch = scratch
        self._translate = translate

    @classmethod
    def plan(
        cls, max_requests: int, device: torch.device, how: str | None = None
    ) -> StreamTranslation:
        """For batches of up to ``max_requests``, one at a time: what is planned is one stream's.

        ``how`` is chosen where it is None, as in ``WindowTranslation.plan``. Raises ``ValueError``
        for less than one request, ``ImportError`` where "triton" is asked for and not installed.
        """
        if not 1 <= max_requests < 2**31:
            raise ValueError("requests are counted in int32, from 1")
        how = chosen(how, device)
        scratch = torch.zeros(record.LENGTH + max_requests, dtype=torch.int64, device=device)
        scratch[record.AT_FIRST] = record.NOBODY
        return cls(scratch, how, _implementation(how))

    @property
    def max_requests(self) -> int:
        """The most requests of a batch."""
        return self._scratch.shape[0] - record.LENGTH

    def run(self, stream: Stream, books: DeviceBooks, out: torch.Tensor) -> torch.Tensor:
        """Write the window slots of ``stream`` to ``out``, which is not ``stream.slots``.

        ``out``: int32 or int64, at least as long as ``stream.slots``; what lies beyond the entries
        of the batch is left as it is. Returns the report, int64 [``record.LENGTH`` + B]: a record
        (see ``record``; nothing is dropped, and nothing is late), and of each request how many
        entries lead nowhere.

        Raises ``ValueError`` for other shapes or places, ``TypeError`` for other dtypes.
        """
        self._check(stream, books, out)
        count = stream.starts.shape[0]
        report = torch.empty(record.LENGTH + count, dtype=torch.int64, device=self._scratch.device)
        self._translate(stream, books, out, report, self._scratch)
        return report

    def _check(self, stream: Stream, books: DeviceBooks, out: torch.Tensor) -> None:
        given = (stream.slots, stream.starts, out)
        if any(each.dtype not in (torch.int32, torch.int64) for each in given):
            raise TypeError("slots and starts are int32 or int64")
        if stream.indptr.dtype is not torch.int32:
            raise TypeError("the first entries of requests are int32")
        tensors = (*given, stream.indptr)
        if any(each.dim() != 1 or not each.is_contiguous() for each in tensors):
            raise ValueError("slots, starts and first entries are contiguous rows")
        count = stream.starts.shape[0]
        if stream.indptr.shape[0] != count + 1 or out.shape[0] < stream.slots.shape[0]:
            raise ValueError("each request has a first entry and a start, and each slot a place")
        if not 1 <= count <= self.max_requests or not 0 <= stream.counted <= count:
            raise ValueError("more requests than were planned, or none, or more counted than given")
        if any(each.device != self._scratch.device for each in (*tensors, books.mapping)):
            raise ValueError("all tensors are on the device that was planned for")


def _implementation(how: str) -> Implementation:
    if how == "torch":
        return translate_with_torch
    # Only where it is used, as in ``translate``.
    from hicache_guard.kernels.stream_triton import translate as translate_with_triton

    return translate_with_triton
