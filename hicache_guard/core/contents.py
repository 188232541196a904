"""Which tokens the KV of a page was computed for: the witness that travels with a copy.

A generation proves that a page was not recycled; it cannot prove a copy, which lies elsewhere. What
a copy must agree with is the prefix it stands for, so each page of a tree bears a *print*: a 64-bit
number made of all tokens up to the page's end, and of the namespace they belong to. It goes to the
host with the page and comes back with it, and what comes back must be the print of the prefix that
it is loaded for. Only kept where there is a host tier.

The prints of a prefix are made on the host, from its tokens. Those of pages, of the host's too, lie
on the device, 8 bytes a page: so they go along with a copy, and nobody waits for the device before
somebody must know whether they are right.

A page that comes from a storage backend gets a *ticket* when it is taken, for nobody else's. If the
page still bears it when the fetch is over, the ticket is changed for a print; so what was handed on
meanwhile bears neither.

A print is a polynomial in the tokens, modulo 2**64. Its base is odd, so two prefixes that differ in
one token never have the same; others do by chance, once in 2**64 pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hicache_guard.core.transfer import to_device

Numbers = npt.NDArray[np.int64]

#: Stands for a page of which nothing is known.
UNKNOWN = 0
#: Stands for a page that was fetched from a storage backend, nobody here knows for which tokens.
VOUCHED = -1
_BASE = np.uint64(0x9E3779B97F4A7C15)


class _Powers:
    """Powers of the base, as many as were ever asked for."""

    def __init__(self) -> None:
        self._kept = np.ones(1, dtype=np.uint64)

    def first(self, count: int) -> npt.NDArray[np.uint64]:
        if self._kept.shape[0] < count:
            grown = np.full(max(count, 2 * self._kept.shape[0]), _BASE, dtype=np.uint64)
            self._kept = np.cumprod(grown, dtype=np.uint64)
        return self._kept[:count]


_powers = _Powers()


def prints(tokens: Sequence[int], page_size: int, *namespace: object) -> Numbers:
    """The print of each whole page of a prefix (int64, one a page), in its order.

    ``tokens`` as SGLang keeps them, a list or an array; ``namespace`` is what separates equal
    tokens (adapter, cache salt).
    """
    ids = np.asarray(tokens, dtype=np.int64).view(np.uint64)
    ids = ids[: ids.shape[0] // page_size * page_size] + np.uint64(1)
    sums = np.cumsum(ids * _powers.first(ids.shape[0]), dtype=np.uint64)
    seed = hashlib.blake2b(repr(namespace).encode(), digest_size=8).digest()
    found = sums[page_size - 1 :: page_size] + np.uint64(int.from_bytes(seed, "little"))
    return np.where(found == UNKNOWN, 1, found.view(np.int64))


class Contents:
    """The prints (int64, on ``device``) of the pages of one pool; ``UNKNOWN`` for untold ones.

    Slots come as whole pages, slot by slot, integers on any device. Never waits for a device.
    """

    def __init__(self, pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self._prints = torch.full((pages,), UNKNOWN, dtype=torch.int64, device=device)

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        """The page (int64) of every ``page_size``-th slot; the first or last of all outside."""
        return self._page_of(slots[:: self.page_size])

    def _page_of(self, slots: torch.Tensor) -> torch.Tensor:
        known = to_device(slots, self._prints.device).to(torch.int64)
        within = known.clamp(0, self._prints.shape[0] * self.page_size - 1)
        return within.div(self.page_size, rounding_mode="floor")

    def write(self, slots: torch.Tensor, found: torch.Tensor | int) -> None:
        """The pages of ``slots`` hold what ``found`` says, a print a page or one for all."""
        pages = self._pages(slots)
        if isinstance(found, torch.Tensor):
            self._prints.index_copy_(0, pages, to_device(found, self._prints.device))
        else:
            self._prints.index_fill_(0, pages, found)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """What the pages of ``slots`` hold."""
        return self.read_each(slots[:: self.page_size])

    def read_each(self, slots: torch.Tensor) -> torch.Tensor:
        """What the page of each of some slots, from anywhere, holds."""
        return self._prints.index_select(0, self._page_of(slots))

    def exchange(
        self, slots: torch.Tensor, was: torch.Tensor | int, found: torch.Tensor | int
    ) -> None:
        """Those pages of ``slots`` that hold what ``was`` says hold what ``found`` says."""
        pages, now = self._pages(slots), self.read(slots)
        if isinstance(found, torch.Tensor):
            found = to_device(found, now.device)
        self._prints.index_copy_(0, pages, torch.where(now == was, found, now))

    def forget(self) -> None:
        """Nothing is known any more."""
        self._prints.fill_(UNKNOWN)


def ticket(number: int) -> int:
    """The ticket of the fetch of that number; no more likely to be a print than any other."""
    return VOUCHED - 1 - number


def wrong_pages(full: Numbers, windows: Sequence[Numbers], known: Numbers | None) -> int:
    """How many pages that a host would give are not what the prefix is made of.

    ``full`` is a run of its pages, ``windows`` are some from here and there; ``known`` are the
    prints of the prefix, None where nobody can tell. What a storage backend vouches for may be of
    any.
    """
    if known is None:
        return sum(int((found == UNKNOWN).sum()) for found in (full, *windows))
    due = aligned(full, known)
    wrong = [(full != due) & (full != VOUCHED) | (full == UNKNOWN)]
    wrong += [~np.isin(found, known) & (found != VOUCHED) for found in windows]
    return sum(int(bad.sum()) for bad in wrong)


def aligned(run: Numbers, known: Numbers) -> Numbers:
    """The prints that a run of pages of a prefix must bear; a print tells its place in it, too."""
    told = np.flatnonzero((run != UNKNOWN) & (run != VOUCHED))
    if not told.shape[0]:
        return run
    places = np.flatnonzero(known == run[told[0]])
    if not places.shape[0] or places[0] < told[0]:
        return np.full(run.shape, UNKNOWN, dtype=np.int64)
    return fitted(known[places[0] - told[0] :], run.shape[0])


def fitted(found: Numbers, pages: int) -> Numbers:
    """``found``, cut or filled up to ``pages``."""
    found = found[:pages]
    return np.pad(found, (0, pages - found.shape[0]), constant_values=UNKNOWN)
