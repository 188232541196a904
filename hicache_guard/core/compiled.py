"""The books on a CPU: an operation that is plainly in order is checked and written down in C.

There a chain of torch operators costs more than what SGLang does, and keeping copies of what an
operation named, to check many together (see ``backlog``), costs as much. One loop over the
caller's own tensors costs less than either, so on a CPU nothing is put off. The extension
(``kernels/_books.c``) only ever says yes; whatever it does not pass is judged by the torch code,
slot by slot, as in strict mode. It is optional: where it was not built, on a device, and with
``HICACHE_GUARD_COMPILED=0``, checks are collected instead.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hicache_guard.core.journal import ACTING_FOR, Steps
from hicache_guard.core.ledger import PageLedger
from hicache_guard.core.windowmap import WindowMap
from hicache_guard.core.witness import Witness

if TYPE_CHECKING:
    from hicache_guard.core.guard import PoolGuard

try:
    _books: Any = importlib.import_module("hicache_guard.kernels._books")
    _steps: Any = importlib.import_module("hicache_guard.kernels._steps")
except ImportError:
    _books = _steps = None
else:

    def _fitted(items: torch.Tensor) -> torch.Tensor:
        return items.to("cpu", torch.int64).contiguous()

    #: How it knows a tensor that it can read as it lies, and makes one of any other; and DLPack's
    #: table, by which it knows a plain one in a single call.
    PREPARED = (
        torch.int32,
        torch.int64,
        _fitted,
        torch.Tensor,
        getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
    )
    _books.prepare(*PREPARED)

#: Set to 0 to run the torch code although the extension is there.
SWITCH = "HICACHE_GUARD_COMPILED"


#: What a free releases, and what must hold for it; plain numbers, since flags cost microseconds.
FREES_FULL, FREES_WINDOW = 1, 2
#: Every entry through which the window side is freed must lead somewhere.
ALL_MAPPED = 4
#: The full side alone is freed; its window peers may still be there.
PEERS_FOLLOW = 8


class Books(Protocol):
    """Both ledgers and the mapping's book of one pair of pools, as the extension keeps them.

    Slots, page ids and lengths are int64 or int32 tensors. A question answered with True has been
    written down; after False nothing has changed. ``side``: 0 for the full pool, 1 for the window.
    """

    def took(self, full: torch.Tensor, window: torch.Tensor, serial: int, /) -> bool:
        """An allocation returned ``full`` and mapped the last of them to ``window``; True."""

    def continued(
        self, last: torch.Tensor, lengths: torch.Tensor, mapping: torch.Tensor, less: int, /
    ) -> bool:
        """Whether each request that goes on inside a page has a proved entry at its last slot.

        Its length is ``lengths[i] - less``; a last slot below 0 continues nothing.
        """

    def freed(self, slots: torch.Tensor, mapping: torch.Tensor, what: int, serial: int, /) -> bool:
        """Whether a free may be let run; its pages are on their way from now on.

        ``what`` adds ``FREES_FULL``, ``FREES_WINDOW``, ``ALL_MAPPED`` and ``PEERS_FOLLOW``.

        ``slots`` are consecutive from a page boundary, or of one-slot pages.
        """

    def take_back(self, serial: int, /) -> None:
        """The last free that was let run, of this serial, did not happen after all.

        Its pages live on, but those that came to the free list meanwhile.
        """

    def came(self, items: torch.Tensor, side: int, pages: bool, /) -> bool:
        """Whether all that enters a free list is on its way there, each page once."""

    def came_alone(self, items: torch.Tensor, side_and_pages: int, serial: int, /) -> bool:
        """Whether what enters a free list with no free behind it is live, each page once.

        ``side_and_pages`` is the side, and 2 more for page ids.
        """

    def left_behind(self, slots: torch.Tensor, mapping: torch.Tensor, /) -> bool:
        """Whether a full page of ``slots`` is free and still has a proved entry."""

    def in_tree(self, yes: bool, /) -> None:
        """Whether a prefix tree's own method runs from now on: what it holds is its to free."""

    def betrayed(self) -> bool:
        """Whether somebody but the trees freed the window side of what a tree holds, ever."""

    def adopted(
        self,
        slots: torch.Tensor,
        mapping: torch.Tensor,
        start: int,
        end: int,
        evicted: int,
        serial: int,
        /,
    ) -> bool:
        """Whether a tree may take ``slots[start:end]`` over; it vouches for them after a yes.

        Those at ``evicted`` and beyond with their window side.
        """

    def held(
        self,
        slots: torch.Tensor,
        mapping: torch.Tensor,
        need: int,
        /,
    ) -> int:
        """1 where a tree holds the last ``need`` of ``slots`` as it took them over, 0 where not.

        Below 0 where there are fewer slots: a number by which they are known again for as long as
        a tree holds the first of them.
        """

    def proves(
        self,
        match: Any,
        mapping: torch.Tensor,
        window: int,
        value_of: Callable[[Any, Any], torch.Tensor | None] | None,
        full: Any,
        tails: dict[int, tuple[tuple[Any, ...], int]],
        /,
    ) -> int:
        """The length of a ``match`` whose last ``window`` tokens are ``held``; -1 if unsaid.

        A match names its slots (``device_indices``), or with ``value_of`` its last node, of which
        ``value_of(node, full)`` tells the slots. ``tails`` tells, by what ``held`` knows the slots
        of a shorter node by, which nodes come before it, the last first, and how many slots these
        have.
        """

    def touched(self, side: int, page: int, /) -> list[tuple[int, int]]:
        """The serials of the last operations on a page, newest first, and 1 for a free."""


class Look(Protocol):
    """The matches of one tree, proved and counted by one call each; see ``look``.

    Counts those that were proved whole: ``hits`` that used any token, ``misses`` that used none,
    the tokens of all keys, and of all hits.
    """

    hits: int
    misses: int
    asked_tokens: int
    hit_tokens: int

    def found(self, match: Any, params: Any, /) -> bool:
        """Whether the compiled books prove a match at once; it is counted then.

        Its key is ``params.key``. Where nothing is compiled, or anything may be wrong, the answer
        is no.
        """


def steps(watched: list[tuple[dict[str, Any], str]]) -> Steps:
    """Steps that watch attributes, by dictionary and name, the last of them a tensor.

    For a guard whose books are compiled.
    """
    made: Steps = _steps.Steps(ACTING_FOR, watched)
    return made


def books(full: PageLedger, window: PageLedger, book: WindowMap, witness: Witness) -> Books | None:
    """The compiled books of a pair of pools, over the memory of the torch ones; None without."""
    if why_not() is not None or book.mapping.device.type != "cpu":
        return None
    kept = (full.born, window.born, full.named, book.stamp, book.owner, witness.since)
    arrays = [tensor.numpy() for tensor in kept]
    made: Books = _books.Books(full.page_size, *arrays)
    return made


def look(
    guard: PoolGuard,
    state: dict[str, Any],
    mapping: str,
    virtual: type | None,
    window: int,
    value_of: Callable[[Any, Any], torch.Tensor | None] | None,
    full: Any,
    tails: dict[int, tuple[tuple[Any, ...], int]],
) -> Look | None:
    """How the matches of a tree are proved by a guard's books; None without any.

    ``state[mapping]`` is the mapping, and what ends in a node of the class ``virtual`` is never
    proved here. The rest is as in ``Books.proves``; ``tails`` is emptied where the names in it are
    no longer valid.
    """
    if guard.compiled is None:
        return None
    made: Look = _books.Look(guard, state, mapping, virtual, window, value_of, full, tails)
    return made


def why_not() -> str | None:
    """Why the compiled code is not used on a CPU, or None where it is."""
    if _books is None:
        return "the extension was not built: no C compiler when hicache-guard was installed"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    return None
