"""Each check, removed: run on the release on the path, one forked child a mutant.

A mutant takes one check away and runs the sequence that this check is for; it is *caught* if the
sequence then ends otherwise than it must. Prints one JSON line a mutant: name, caught without the
mutation (must be False), caught with it (must be True).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hicache_guard.adapters import allocator, link, page_pool
from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import install, running_version
from hicache_guard.core import compiled
from hicache_guard.core.backlog import Backlog, Freed, Taken
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.ledger import FREED, PageLedger
from hicache_guard.core.translation import Remembered
from hicache_guard.core.undo import UndoLog
from hicache_guard.core.windowmap import WindowMap
from hicache_guard.repro import pools
from hicache_guard.repro.audit import audit
from hicache_guard.repro.cases import CASES
from hicache_guard.repro.matrix import Cell
from hicache_guard.repro.worker import _run

Take = Callable[[], None]
Wrong = Callable[[], bool]


@dataclass(frozen=True)
class Mutant:
    """``remove`` takes the check away; ``wrong`` runs its sequence and says if it went wrong.

    ``collected`` for what only runs where checks are collected: on a device, and without the
    compiled books, whose own mutations are in ``compiled_agreement.py``.
    """

    name: str
    releases: tuple[str, ...]
    remove: Take
    wrong: Wrong
    collected: bool = False


def case(key: str, mode: str) -> Wrong:
    """A case of the catalogue, judged by the rule of the matrix."""

    def wrong() -> bool:
        cell = Cell(key, running_version(), results={mode: _run(CASES[key], mode, "install")})
        return bool(cell.wrong())

    return wrong


def scene(play: Callable[[Any], bool], *, page_size: int = 4, mode: str = "enforce") -> Wrong:
    """A sequence on a fresh pool; ``play`` says whether it went wrong."""

    def wrong() -> bool:
        install(mode)
        return play(pools.build(64, 32, page_size))

    return wrong


def put(owner: Any, name: str, value: Any) -> Take:
    """Replace a method."""

    def take() -> None:
        setattr(owner, name, value)

    return take


def _counted(pool: Any) -> int:
    return int(guard_of(pool).tally.total)


def twice_in_one_call(pool: Any) -> bool:
    row, other = pools.extend_surely(pool, 4), pools.extend_surely(pool, 4)
    pool.free(torch.cat((row, row)))
    return bool(audit(pool, {"other": other})) or not _counted(pool)


def window_recycled_behind_an_entry(pool: Any) -> bool:
    """The window side is freed by its own slots and given away; then the full slots are freed."""
    row = pools.extend_surely(pool, 8)
    window = pool.full_to_swa_index_mapping[row].clone()
    pool.swa_attn_allocator.free(window)
    newcomer = pools.extend_surely(pool, 8)
    pool.free(row)
    return bool(audit(pool, {"newcomer": newcomer})) or not _counted(pool)


def alias_freed_by_its_old_owner(pool: Any) -> bool:
    old, new = pools.extend_surely(pool, 4), pools.extend_surely(pool, 4)
    before = pool.full_to_swa_index_mapping[new].clone()
    pool.free_swa(new)
    pool.set_full_to_swa_mapping(new, pool.full_to_swa_index_mapping[old].clone())
    del before
    pool.free(old)
    return bool(audit(pool, {"new": new})) or not _counted(pool)


def alias_left_until_the_next_allocation(pool: Any) -> bool:
    old, new = pools.extend_surely(pool, 4), pools.extend_surely(pool, 4)
    pool.free_swa(new)
    pool.set_full_to_swa_mapping(new, pool.full_to_swa_index_mapping[old].clone())
    other = pools.extend_surely(pool, 4)
    held = {"old": old, "new": new, "other": other}
    return bool(audit(pool, held)) or not _counted(pool)


def entry_older_than_its_full_page(pool: Any) -> bool:
    """Observe: the full side is recycled under entries whose window side is still live."""
    reports: list[str] = []
    install("observe", on_report=lambda violation: reports.append(violation.operation))
    pool = pools.build(64, 32, 4)
    row = pools.extend_surely(pool, 8)
    pool.full_attn_allocator.free(row)
    reused = pools.extend_tail(pool, 8, 0)
    pool.free(reused)
    _counted(pool)
    return not any(" free " in operation for operation in reports)


def dead_window_slot_mapped(pool: Any) -> bool:
    row = pools.extend_surely(pool, 4)
    window = pool.full_to_swa_index_mapping[row].clone()
    pool.free_swa(row)
    pool.set_full_to_swa_mapping(row, window)
    return bool(audit(pool, {"row": row})) or not _counted(pool)


def bare_write_of_anothers_slot(pool: Any) -> bool:
    mine, others = pools.extend_surely(pool, 4), pools.extend_surely(pool, 4)
    theirs = set(pool.full_to_swa_index_mapping[others].tolist())
    pool.full_to_swa_index_mapping[mine] = pool.full_to_swa_index_mapping[others].clone()
    reads = [pool.translate_loc_from_full_to_swa(mine).tolist() for _ in range(2)]
    pool.free(mine)
    # The entries of "mine" are again what they were, so that nothing is lost with the write.
    harm = audit(pool, {"others": others})
    return bool(harm) or not _counted(pool) or any(theirs & set(read) for read in reads)


def free_list_replaced(pool: Any) -> bool:
    row = pools.extend_surely(pool, 8)
    side = pool.full_attn_allocator
    pages = torch.unique(row // pool.page_size)
    side.free_pages = torch.cat((side.free_pages, pages))  # a fork frees behind our back
    try:
        pool.free(row)
    except AssertionError:
        return True  # the release found more free pages than there are
    listed = side.free_pages.tolist()
    return len(listed) != len(set(listed))


def read_after_part_of_a_window_page_went(pool: Any) -> bool:
    row = pools.extend_surely(pool, 7)
    pool.free_swa(row[:5])
    newcomer = pools.extend_surely(pool, 8)
    read = set(pool.translate_loc_from_full_to_swa(row[5:]).tolist()) - {0}
    return bool(read & set(pool.full_to_swa_index_mapping[newcomer].tolist()))


def window_only_recycled(pool: Any) -> bool:
    """A window slot is freed by itself and not given away; then its full slot is freed."""
    row = pools.extend_surely(pool, 4)
    pool.swa_attn_allocator.free(pool.full_to_swa_index_mapping[row].clone())
    len(pool.swa_attn_allocator.free_pages)
    pool.free(row)
    one, two = pools.extend_surely(pool, 4), pools.extend_surely(pool, 4)
    return bool(audit(pool, {"one": one, "two": two})) or not _counted(pool)


def freed_twice(pool: Any) -> bool:
    """The full side is freed again once the first free was settled."""
    row = pools.extend_surely(pool, 4)
    pool.free(row)
    pools.settle(pool)
    free_full = getattr(pool, "free_full", pool.free)
    free_full(row)
    one, two = pools.extend_surely(pool, 4), pools.extend_surely(pool, 4)
    return bool(audit(pool, {"one": one, "two": two})) or not _counted(pool)


def freed_twice_between_two_sides(pool: Any) -> bool:
    """A window slot is freed by its full slot, and on the window pool, with no look between."""
    row = pools.extend_surely(pool, 4)
    window = pool.full_to_swa_index_mapping[row].clone()
    pool.free_swa(row)
    pool.swa_attn_allocator.free(window)
    one, two = pools.extend_surely(pool, 4), pools.extend_surely(pool, 4)
    pool.free_full(row) if hasattr(pool, "free_full") else pool.full_attn_allocator.free(row)
    return bool(audit(pool, {"one": one, "two": two})) or not _counted(pool)


def freed_again_in_a_group_and_handed_out(pool: Any) -> bool:
    row, other = pools.extend_surely(pool, 8), pools.extend_surely(pool, 8)
    pool.free(row)
    pools.settle(pool)
    pool.free_group_begin()
    pool.free(row)
    held = {"other": other}
    while pool.available_size() >= 8:
        held[str(len(held))] = pools.extend_surely(pool, 8)
    pool.free_group_end()
    return bool(audit(pool, held)) or not _counted(pool)


def the_release_gives_up_in_a_free(pool: Any) -> bool:
    """Its caller corrects the call, and makes it again."""
    row = pools.extend_surely(pool, 8)
    try:
        pool.free_segment(row, start_pos=1)
    except AssertionError:
        pool.free_segment(row, start_pos=0)
    return bool(audit(pool, {})) or bool(_counted(pool))


def caller_writes_into_what_it_was_given(pool: Any) -> bool:
    row, other = pools.extend_surely(pool, 4), pools.extend_surely(pool, 4)
    kept = row.clone()
    row.fill_(int(other[0]))
    pool.free(kept)
    new = pools.extend_surely(pool, 4)
    return bool(audit(pool, {"other": other, "new": new})) or bool(_counted(pool))


def _no_mask(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros_like(args[-1], dtype=torch.bool)


def _proved_without(*left_out: str) -> Callable[..., torch.Tensor]:
    """``WindowMap.proved`` with some of its terms taken away."""

    def proved(self: WindowMap, full: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        stamp = self.stamp.index_select(0, full)
        terms = {
            "window": stamp >= self._window.generations(self._window.pages_of(window)),
            "owner": self.owner.index_select(0, window.clamp(0, self.owner.numel() - 1)) == full,
        }
        born = self._full.generations(self._full.pages_of(full))
        terms["full"] = (stamp >= born) | (born >= FREED)
        kept = torch.ones_like(window, dtype=torch.bool)
        for name, term in terms.items():
            if name not in left_out:
                kept &= term
        return (window == 0) | kept

    return proved


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    return None


def _entries_may_be_empty() -> None:
    judged = PoolGuard._judge_entries

    def judge(self: Any, rows: Any, window: Any, must_be_mapped: bool) -> Any:
        return judged(self, rows, window, False)

    PoolGuard._judge_entries = judge  # type: ignore[method-assign]
    noted = Freed

    def unmapped(
        operation: Any, heads: Any, slots: int, full: bool, window: Any, *rest: Any
    ) -> Any:
        return noted(operation, heads, slots, full, window, False, rest[-1])

    allocator.Freed = unmapped  # type: ignore[assignment, attr-defined]


def _never(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros((), dtype=torch.bool)


def _notes_are_not_copied() -> None:
    def note(self: Any, full: Any, window: Any, *, each_continues: bool = False) -> Taken:
        self._taken.append(Taken(self._guard.current, full, window, each_continues))
        return self._taken[-1]  # type: ignore[no-any-return]

    Backlog.note_taken = note  # type: ignore[method-assign]


def _any_wrong_entry_without(left_out: str) -> Callable[..., torch.Tensor]:
    """``WindowMap.any_wrong_entry`` by ``proved`` with one term taken away."""
    proved = _proved_without(left_out)

    def any_wrong_entry(self: WindowMap, rows: Any, entries: Any, **how: bool) -> torch.Tensor:
        return (~proved(self, rows.items, entries.items)).any()

    return any_wrong_entry


def _acknowledge_only(self: PoolGuard, mapping: torch.Tensor) -> None:
    self.map.acknowledge()


ALL = ("0.5.12", "0.5.18", "0.5.23")
MUTANTS = (
    Mutant(
        "ledger.generations: every page counts as live",
        ALL,
        put(PageLedger, "generations", lambda self, pages: torch.zeros_like(pages).int()),
        case("C8", "enforce"),
    ),
    Mutant(
        "ledger.repeated: no page is named twice",
        ALL,
        put(PageLedger, "repeated", _no_mask),
        scene(twice_in_one_call, page_size=1),
    ),
    Mutant(
        "ledger.any_repeated: of many pages none is named twice", ("0.5.23",),
        put(PageLedger, "any_repeated", _never), scene(twice_in_one_call, page_size=1),
        collected=True,
    ),
    Mutant(
        "ledger.any_dead: of many pages none is dead", ("0.5.12", "0.5.23"),
        put(PageLedger, "any_dead", _never), scene(freed_twice, page_size=1), collected=True,
    ),
    Mutant(
        "backlog: what was freed both ways is not compared", ("0.5.23",),
        put(PageLedger, "any_repeated", _never),
        scene(freed_twice_between_two_sides, page_size=1), collected=True,
    ),
    Mutant(
        "map.any_wrong_entry: window generation not compared", ("0.5.23",),
        put(WindowMap, "any_wrong_entry", _any_wrong_entry_without("window")),
        scene(window_only_recycled, page_size=1),
        collected=True,
    ),
    Mutant(
        "map.any_wrong_entry: owner not compared", ("0.5.23",),
        put(WindowMap, "any_wrong_entry", _any_wrong_entry_without("owner")),
        scene(alias_freed_by_its_old_owner, page_size=1),
        collected=True,
    ),
    Mutant(
        "backlog: a decode step continues after anything", ALL,
        put(WindowMap, "any_not_continued", _never), case("S1", "enforce"),
        collected=True,
    ),
    Mutant(
        "ledger.any_wrong_release: whatever comes may enter the free list", ("0.5.23",),
        put(PageLedger, "any_wrong_release", _never), scene(twice_in_one_call, page_size=1),
        collected=True,
    ),
    Mutant(
        "backlog: notes are not copied", ("0.5.12", "0.5.23"), _notes_are_not_copied,
        scene(caller_writes_into_what_it_was_given, page_size=1),
        collected=True,
    ),
    Mutant(
        "ledger.later_part: no page was freed in parts",
        ALL,
        put(PageLedger, "later_part", _no_mask),
        case("C5", "enforce"),
    ),
    Mutant(
        "map.proved: window generation and owner not compared",
        ALL,
        put(WindowMap, "proved", _proved_without("window", "owner")),
        scene(window_recycled_behind_an_entry),
    ),
    Mutant(
        "map.proved: owner not compared",
        ALL,
        put(WindowMap, "proved", _proved_without("owner")),
        scene(alias_freed_by_its_old_owner),
    ),
    Mutant(
        "map.proved: full generation not compared",
        ("0.5.12",),
        put(WindowMap, "proved", _proved_without("full")),
        scene(entry_older_than_its_full_page),
    ),
    Mutant(
        "guard.check_unmapped", ("0.5.12",), put(PoolGuard, "check_unmapped", _nothing),
        case("C1", "enforce"),
    ),
    Mutant(
        "guard: entries may be empty",
        ("0.5.23",),
        _entries_may_be_empty,
        case("C6", "enforce"),
    ),
    Mutant(
        "guard.overdue_peers", ("0.5.12", "0.5.18"), put(PoolGuard, "overdue_peers", _nothing),
        case("C11", "enforce"),
    ),
    Mutant(
        "guard.overdue_aliases", ALL, put(PoolGuard, "overdue_aliases", _nothing),
        scene(alias_left_until_the_next_allocation),
    ),
    Mutant(
        "guard.restored", ("0.5.12",), put(PoolGuard, "restored", _nothing), case("C12", "enforce")
    ),
    Mutant(
        "guard.check_mapping_write", ALL,
        put(PoolGuard, "check_mapping_write", lambda self, full, window: window),
        scene(dead_window_slot_mapped),
    ),
    Mutant(
        "guard.reconcile", ALL, put(PoolGuard, "reconcile", _acknowledge_only),
        scene(bare_write_of_anothers_slot),
    ),
    Mutant(
        "map.held_by: what an entry was before is forgotten", ALL,
        put(WindowMap, "held_by", lambda self, full: torch.zeros_like(full)),
        scene(bare_write_of_anothers_slot, page_size=1),
    ),
    Mutant(
        "guard.resync", ALL, put(PoolGuard, "resync", _nothing), scene(free_list_replaced)
    ),
    Mutant(
        "guard.forget_window", ("0.5.12",), put(PoolGuard, "forget_window", _nothing),
        scene(read_after_part_of_a_window_page_went),
    ),
    Mutant(
        "guard.check_repointed", ("0.5.18",), put(PoolGuard, "check_repointed", _nothing),
        case("S2", "enforce"),
    ),
    Mutant(
        "guard.check_handed_out_since", ("0.5.12", "0.5.18"),
        put(PoolGuard, "check_handed_out_since", _nothing),
        scene(freed_again_in_a_group_and_handed_out),
    ),
    Mutant(
        "guard.take_back_free: what the release did not do was done", ("0.5.23",),
        put(PoolGuard, "take_back_free", _nothing), scene(the_release_gives_up_in_a_free),
    ),
    Mutant(
        "guard.recheck_continued", ALL, put(PoolGuard, "recheck_continued", _nothing),
        case("S1", "enforce"), collected=True,
    ),
    Mutant(
        "page_pool.Lists: a half-failed allocation keeps its pages", ("0.5.23",),
        put(page_pool.Lists, "put_back", _nothing), case("S3", "enforce"),
    ),
    Mutant(
        "Remembered.holds: a memo is always good", ("0.5.12",),
        put(Remembered, "holds", lambda self, *args: True), case("C3", "enforce"),
    ),
    Mutant(
        "strict: free lists are not put back",
        ("0.5.12",),
        put(link.Snapshot, "put_back", _nothing),
        case("C1", "strict"),
    ),
    Mutant(
        "strict: entries are not put back", ("0.5.12",), put(UndoLog, "roll_back", _nothing),
        case("C1", "strict"),
    ),
)  # fmt: skip


def _in_child(mutant: Mutant, *, whole: bool) -> bool | str:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        os.environ[compiled.SWITCH] = "0" if mutant.collected else "1"
        try:
            if not whole:
                mutant.remove()
            answer: bool | str = mutant.wrong()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        with os.fdopen(writer, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.wait()
    answer = json.loads(text) if text else "died"
    return answer if isinstance(answer, (bool, str)) else str(answer)


def main() -> None:
    torch.set_num_threads(1)
    pools.quiet()
    pools.allocator_classes()
    for mutant in MUTANTS:
        if running_version() not in mutant.releases:
            continue
        whole = _in_child(mutant, whole=True)
        mutated = _in_child(mutant, whole=False)
        print(json.dumps([mutant.name, whole, mutated]), flush=True)


if __name__ == "__main__":
    main()
