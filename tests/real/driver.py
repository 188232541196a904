"""A real allocator of the release on the path, guarded, and one without a guard beside it.

``Pair`` performs each operation on both and compares everything that decides what an allocator does
next. Reads go around the guard's stand-in for the free list, so that looking changes nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import install, running_version, uninstall
from hicache_guard.adapters.link import _links as _known
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.journal import acting_for
from hicache_guard.core.report import Violation
from hicache_guard.repro import pools

Call = Callable[[Any], Any]

_LISTS = ("free_pages", "release_pages")
_GROUPS = (
    "staged_pages",
    "free_group",
    "free_page_ids_group",
    "swa_free_group",
    "swa_page_ids_group",
    "full_free_group",
)


def prepare() -> str:
    """Import the release and everything else that a child needs; returns the version."""
    torch.set_num_threads(1)
    logging.getLogger("hicache_guard").setLevel(logging.CRITICAL)  # reports are taken by callback
    pools.quiet()
    pools.allocator_classes()
    allocate_without_triton()
    return running_version()


def allocate_without_triton() -> None:
    """Let the release's own ``alloc_extend_naive`` stand for its interpreted Triton kernels.

    Up to 0.5.21 a page allocation is a Triton kernel, which takes 10 ms where it is interpreted.
    Decode is an extension by one token. Later releases go without Triton on a CPU by themselves.
    """
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    home = sys.modules[PagedTokenToKVPoolAllocator.__module__]
    if getattr(home, "alloc_extend_kernel", None) is None:
        return
    naive = home.alloc_extend_naive

    class Launch:
        def __init__(self, run: Callable[..., None]) -> None:
            self._run = run

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return self._run

    def extend(prefix: Any, ends: Any, last: Any, free: Any, out: Any, _: int, size: int) -> None:
        naive(prefix, ends, last, free, out, size, out.device)

    def decode(ends: Any, last: Any, free: Any, out: Any, _: int, size: int) -> None:
        naive(ends - 1, ends, last, free, out, size, out.device)

    home.alloc_extend_kernel = Launch(extend)  # type: ignore[attr-defined]
    home.alloc_decode_kernel = Launch(decode)  # type: ignore[attr-defined]


def tensor(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def sub_allocators(allocator: Any) -> tuple[Any, Any]:
    return allocator.full_attn_allocator, allocator.swa_attn_allocator


def has_open_group(allocator: Any) -> bool:
    flag = getattr(allocator, "is_not_in_free_group", None)
    return not flag if flag is not None else allocator.free_group is not None


def raw_free(pool: Any) -> list[int]:
    """Page ids in every container of a free list, as they lie there now."""
    held = dict(vars(pool))
    hidden = getattr(held.get("_hicache_guard_link"), "hidden", None)
    if hidden is not None:  # taken out of sight while pages are held back
        held.setdefault("free_pages", hidden)
    pages: list[int] = []
    for name in _LISTS:
        if held.get(name) is not None:
            pages += held[name].tolist()
    for part in held.get("staged_pages", []):
        pages += part.tolist()
    return pages


def difference(one: Any, other: Any) -> str | None:
    """The first thing in which two allocators' states differ, bit for bit, or None."""
    if not torch.equal(one.full_to_swa_index_mapping, other.full_to_swa_index_mapping):
        return "mapping"
    if has_open_group(one) != has_open_group(other):
        return "open group"
    pairs = zip((one, *sub_allocators(one)), (other, *sub_allocators(other)), strict=True)
    for side, (left, right) in zip(("pair", "full", "window"), pairs, strict=True):
        mine, theirs = vars(left), vars(right)
        for name in _LISTS if side != "pair" else ():
            a, b = mine.get(name), theirs.get(name)
            if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
                return f"{side}.{name}"
        for name in _GROUPS:
            a, b = mine.get(name) or [], theirs.get(name) or []
            if len(a) != len(b) or not all(map(torch.equal, a, b)):
                return f"{side}.{name}"
    return None


@dataclass
class Outcome:
    """What one call came to: a value, or the exception that ended it."""

    value: Any = None
    error: BaseException | None = None


def attempt(call: Call, allocator: Any) -> Outcome:
    """Run ``call``; an exception of the release is an outcome, a violation is raised."""
    try:
        return Outcome(call(allocator))
    except GuardViolation:
        raise
    except Exception as error:
        return Outcome(error=error)


class Pair:
    """A guarded allocator, and in observe mode its unguarded twin.

    Every violation that the guard reports is appended to ``reports``.
    """

    def __init__(
        self,
        mode: str,
        *,
        page_size: int,
        full_pages: int,
        window_pages: int,
        need_sort: bool,
        twin: bool | None = None,
    ) -> None:
        sizes = (full_pages * page_size, window_pages * page_size, page_size)
        self.mode = mode
        self.reports: list[Violation] = []
        _known.clear()  # what earlier pairs left unchecked is no concern of this one
        uninstall()
        wanted = mode == "observe" if twin is None else twin
        self.plain = pools.build(*sizes, need_sort=need_sort) if wanted else None
        install(mode, on_report=self.reports.append)
        self.guarded = pools.build(*sizes, need_sort=need_sort)

    @property
    def guard(self) -> Any:
        """The guard, with every check done that was due."""
        return guard_of(self.guarded)

    def run(self, call: Call, request: str) -> Outcome:
        """Perform ``call`` for ``request``. In observe mode the twin must come to the same."""
        with acting_for(request):
            mine = attempt(call, self.guarded)
        if self.plain is None:
            return mine
        theirs = attempt(call, self.plain)
        assert type(mine.error) is type(theirs.error), (
            f"guarded {mine.error!r}, unguarded {theirs.error!r}"
        )
        if mine.error is None:
            same = (
                torch.equal(mine.value, theirs.value)
                if isinstance(theirs.value, torch.Tensor)
                else (mine.value is None) == (theirs.value is None)
            )
            assert same, f"guarded returns {mine.value}, unguarded {theirs.value}"
            where = difference(self.guarded, self.plain)
            assert where is None, f"observe changed the release's behaviour: {where} differs"
        return mine


def give(
    slots: Iterable[int],
    use: Callable[[torch.Tensor], Any],
    *,
    reuse: bool = True,
    dtype: torch.dtype = torch.int64,
) -> Any:
    """Call ``use`` with a tensor of ``slots`` that must not be changed, then reuse its memory.

    A scheduler passes views of the row of a request, int32, which the next request overwrites.
    """
    wanted = list(slots)
    given = tensor(wanted).to(dtype)
    result = use(given)
    assert given.tolist() == wanted, "a caller's tensor was changed"
    if reuse:
        given.fill_(1)
    return result
