"""The compiled books and the torch code, asked the same in random states; and changes of the C.

The torch code is that of strict mode: it judges slot by slot and raises. The compiled books must
say yes exactly where it finds nothing, write what it writes, and after a no have changed nothing.

As a program: compiles ``_books.c`` with one line changed, a child process for each change, and
prints one JSON line for each: name, whether the two still agree.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from hicache_guard.core import compiled
from hicache_guard.core.compiled import ALL_MAPPED, FREES_FULL, FREES_WINDOW, PEERS_FOLLOW
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.gathered import Gathered
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.ledger import FREED, QUEUED, PageLedger
from hicache_guard.core.modes import Mode

SOURCE = Path(__file__).resolve().parent.parent / "kernels" / "_books.c"
PAGES = 10
SIZES = (1, 3, 4, 64)
#: A slot that no pool has; as int32 and as int64.
HOSTILE = {torch.int32: (-(2**31), -5, -1, 2**31 - 1), torch.int64: (-(2**62), -1, 2**33, 2**62)}
SERIAL = 33


class Odd(torch.Tensor):
    """As good as any other, but no plain one."""


class Pair:
    """One pair of pools in the books of both, in one random state."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.in_tree = dice.random() < 0.5
        self.size = size = dice.choice(SIZES)
        self.slots = PAGES * size
        self.mapping = torch.zeros(self.slots + size + 1, dtype=torch.int64)
        self.mapping[-1] = -1
        self.compiled, self.torch = (
            PoolGuard(
                mode, full_slots=self.slots, window_slots=self.slots, page_size=size,
                mapping=self.mapping,
            )
            for mode in (Mode.ENFORCE, Mode.STRICT)
        )  # fmt: skip
        assert self.compiled.compiled is not None
        self.books = self.compiled.compiled
        for guard in (self.compiled, self.torch):
            guard.begin("the operation", sys._getframe())
            guard.serial = SERIAL
        self._fill()

    def each(self, ledger: str) -> list[PageLedger]:
        return [getattr(guard, ledger) for guard in (self.compiled, self.torch)]

    def _fill(self) -> None:
        """Most full pages are live and mapped, page by page; some things are not as they should."""
        dice = self.dice
        window = list(range(1, PAGES + 1))  # one after the other, as in a server that begins
        if dice.random() < 0.5:
            dice.shuffle(window)
        for full, peer in zip(range(1, PAGES + 1), window, strict=True):
            serial = dice.randint(1, 9)
            live = dice.random() < 0.85
            state = serial if live else FREED | serial | dice.choice((0, QUEUED))
            for own, other in zip(self.each("full"), self.each("window"), strict=True):
                own.born[full] = state
                other.born[peer] = state
            if not live:
                continue
            rows = torch.arange(full * self.size, (full + 1) * self.size)
            self.mapping[rows] = torch.arange(peer * self.size, (peer + 1) * self.size)
            for guard in (self.compiled, self.torch):
                guard.map.stamp[rows] = serial
                guard.map.owner[self.mapping[rows]] = rows.int()
        for page in range(1, PAGES + 1):
            since = dice.choice((0, 12, 12, dice.randint(1, 12)))
            for guard in (self.compiled, self.torch):
                guard.witness.since[page] = since
        for _ in range(dice.choice((0, 0, 1, 3))):
            self._spoil()
        for guard in (self.compiled, self.torch):
            guard._tree_works(self.in_tree)

    def _spoil(self) -> None:
        dice = self.dice
        page, value = dice.randint(1, PAGES), dice.randint(0, 12)
        slot = dice.randrange(self.size, self.slots)
        what = dice.randrange(9)
        for guard in (self.compiled, self.torch):
            if what == 0:
                guard.full.born[page] = max(1, value)  # no operation has the serial 0
            elif what == 1:
                guard.window.born[page] = FREED | value
            elif what == 2:
                guard.window.born[page] = value
            elif what == 3:
                guard.map.stamp[slot] = value
            elif what == 4:
                guard.map.owner[slot] = value % self.slots
            elif what == 5:
                guard.full.born[page] = FREED | value
            elif what == 6:
                self.mapping[slot] = 0
            elif what == 7:
                self.mapping[slot] = -3
            elif slot + self.size < self.slots:
                self.mapping[slot] = self.mapping[slot + self.size]

    def some(self, rows: list[int], *, wild: float = 0.04) -> torch.Tensor:
        """``rows`` as a caller may hold them: of either type, perhaps strided, perhaps hostile.

        A tensor of a class of its own is asked what it is in the way of Python.
        """
        dice = self.dice
        dtype = dice.choice((torch.int32, torch.int64))
        rows = [dice.choice(HOSTILE[dtype]) if dice.random() < wild else row for row in rows]
        found = torch.tensor(rows, dtype=dtype)
        if dice.random() < 0.2:
            found = found.repeat_interleave(2)[::2]
        return found.as_subclass(Odd) if dice.random() < 0.3 else found

    def pages(self) -> list[int]:
        """A few different full pages, now and then one of them again, or page 0."""
        dice = self.dice
        pages = dice.sample(range(1, PAGES + 1), dice.randint(1, PAGES // 2))
        if dice.random() < 0.15:
            pages.append(dice.choice([0, *pages, PAGES + 1]))
        return pages

    def segment(self, pages: list[int]) -> torch.Tensor:
        """A segment over ``pages``, whose last page may be named in part."""
        rows = [page * self.size + inside for page in pages for inside in range(self.size)]
        if self.dice.random() < 0.1:
            head = self.dice.randrange(len(pages)) * self.size
            rows[head] = self.dice.choice(HOSTILE[torch.int32])
        return self.some(rows, wild=0)[: len(rows) - self.dice.randrange(self.size)]

    def state(self, guard: PoolGuard) -> list[Any]:
        kept = (guard.full.born, guard.window.born, guard.map.stamp, guard.map.owner)
        named = guard.full.named[1 : PAGES + 1]
        held = guard.full.born <= guard.witness.since
        return [tensor.tolist() for tensor in (*kept, named, held, self.mapping)]


def raises(*checks: Callable[[], object]) -> bool:
    """Whether one of the checks finds something."""
    try:
        for check in checks:
            check()
    except GuardViolation:
        return True
    return False


def disagreement(seed: int) -> str | None:
    """What the two do not agree on in one random state, or None."""
    pair = Pair(random.Random(seed))
    checks = (
        _extension, _peers_left, _match, _runs, _adoption, _match, _whole_match, _release, _free,
        _free, _release, _adoption, _allocation,
    )  # fmt: skip
    for check in checks:
        answers = check(pair)
        if answers is not None:
            return f"{check.__name__}, page size {pair.size}: {answers}"
    return None


def _judged(pair: Pair, yes: bool, wrong: bool, before: list[Any]) -> Any:
    """What to say of an answer, by whether the torch code found something wrong."""
    if not yes:  # what the torch code wrote before it raised
        pair.torch.witness.since.copy_(pair.compiled.witness.since)
    if yes == wrong:
        return "compiled says yes" if yes else "compiled says no"
    return None if yes or pair.state(pair.compiled) == before else "a no has changed the books"


def _extension(pair: Pair) -> Any:
    dice, size, torchs = pair.dice, pair.size, pair.torch
    last = pair.some([page * size + dice.randrange(size) for page in pair.pages()])
    lengths = pair.some([dice.randint(1, 2 * size) for _ in last], wild=0)
    less = dice.randint(0, 1)
    yes = pair.books.continued(last, lengths, pair.mapping, less)
    slots, before = last.long(), lengths.long() - less
    continues = (before % size != 0) & (slots >= 0)
    wrong = raises(lambda: torchs.check_continued(slots, continues))
    return _judged(pair, yes, wrong, pair.state(pair.compiled))


def _peers_left(pair: Pair) -> Any:
    named = pair.some([page * pair.size for page in pair.pages()])
    left = pair.books.left_behind(named, pair.mapping)
    pair.torch.note_full_only(named)
    return None if left == raises(pair.torch.overdue_peers) else f"left behind: {left}"


def _free(pair: Pair) -> Any:
    dice, torchs = pair.dice, pair.torch
    what = dice.choice((1, 2, 2, 3, 3, 1 | PEERS_FOLLOW))
    mapped = what & FREES_WINDOW and dice.random() < 0.5
    pages = pair.pages()
    if what == FREES_FULL and dice.random() < 0.8:
        for page in pages[dice.randint(0, 1) :]:  # its window side is gone already, perhaps
            pair.mapping[page * pair.size : (page + 1) * pair.size] = 0
        if dice.random() < 0.3:
            last = min(pages[-1], PAGES) * pair.size + dice.randrange(pair.size)
            pair.mapping[last] = 5
        pair.mapping[-1] = -1
    named = pair.segment(pages)
    before = pair.state(pair.compiled)
    torchs._betrayals, torchs._windows_betrayed = [], (betrayed := pair.books.betrayed())
    asked = what | (ALL_MAPPED if mapped else 0)
    yes = pair.books.freed(named, pair.mapping, asked, SERIAL)
    slots = named.long()
    heads = slots[:: pair.size]
    checks: list[Callable[[], object]] = []
    if what & FREES_FULL:
        checks.append(lambda: torchs.vet_slots(slots, segment=True))
    if what & FREES_WINDOW:
        checks.append(lambda: torchs.vet_rows(heads, must_be_mapped=bool(mapped)))
        checks.append(lambda: torchs.check_entries(heads, must_be_mapped=bool(mapped)))
        checks.append(lambda: _window_pages_once(pair, heads))
    elif not what & PEERS_FOLLOW:
        checks.append(lambda: _peers_unmapped(pair, heads))
    found = _judged(pair, yes, raises(*checks), before)
    if found is None and torchs.windows_betrayed != pair.books.betrayed() and yes:
        return f"betrayed: {pair.books.betrayed()}, before {betrayed}"
    if found is None and yes:
        if what & FREES_FULL:
            torchs.full.queue(torchs.full.pages_of(heads), SERIAL)
            torchs.note_named(slots, torch.zeros_like(slots, dtype=torch.bool), segment=True)
        if what & FREES_WINDOW:
            torchs.window.queue(torchs.window.pages_of(pair.mapping[heads]), SERIAL)
        if dice.random() < 0.3:
            _take_back(pair, before)
    return found if found is not None else _same(pair)


def _row(pair: Pair) -> torch.Tensor:
    """A row of a request, or the path of a match."""
    pages = [page for page in pair.pages() if 0 < page <= PAGES]
    if pair.dice.random() < 0.5:
        pages = list(range(min(pages), max(pages) + 1))
    rows = [page * pair.size + inside for page in pages for inside in range(pair.size)]
    return pair.some(rows, wild=pair.dice.choice((0, 0, 0.03)))


def _adoption(pair: Pair) -> Any:
    dice, row = pair.dice, _row(pair)
    start, end = sorted(dice.choice((0, len(row), dice.randint(0, len(row)))) for _ in range(2))
    evicted = dice.choice((0, dice.randint(0, len(row))))
    serial = dice.randint(5, 15)
    before = pair.state(pair.compiled)
    yes = pair.books.adopted(row, pair.mapping, start, end, evicted, serial)
    pair.torch.serial, here = serial, pair.torch.serial
    wrong = raises(lambda: pair.torch.adopt(row[:end].long(), start, evicted))
    pair.torch.serial = here
    found = _judged(pair, yes, wrong, before)
    return found if found is not None or not yes else _same(pair)


def _match(pair: Pair) -> Any:
    """The tail of a path; and one that is not enough."""
    dice, row = pair.dice, _row(pair)
    if not len(row):
        return None
    need = dice.choice((0, 1, len(row), dice.randint(0, len(row))))
    before = pair.state(pair.compiled)
    tail = row[len(row) - need :].long()
    wrong = need > 0 and raises(lambda: pair.torch.prove_prefixes([tail], need))
    answer = pair.books.held(row, pair.mapping, need)
    name = pair.books.held(row, pair.mapping, len(row) + 1)
    since = int(pair.torch.witness.since[pair.torch.full.pages_of(row[:1].long())])
    if name != -1 - (min(max(int(row[0]), 0), 2**31 - 1) << 31 | since):
        return "more is held than there is, or by another name"
    return _judged(pair, answer == 1, wrong, before)


def _runs(pair: Pair) -> Any:
    """Ends of consecutive slots, which lie together in the books."""
    every = torch.arange(pair.size, pair.slots + pair.size)
    entries = pair.torch._entries(every)
    right = pair.torch.witness.live(every, pair.torch.map, entries)
    for _ in range(8):
        first = pair.dice.randrange(len(every))
        last = min(len(every), first + 1 + pair.dice.randrange(min(2 * pair.size + 3, len(every))))
        answer = pair.books.held(every[first:last], pair.mapping, last - first)
        if bool(answer == 1) is not bool(right[first:last].all()):
            return f"slots {first} to {last} are {right[first:last].tolist()}, and held: {answer}"
    return None


def _whole_match(pair: Pair) -> Any:
    """What a tree answers: slots, or a node; and nodes that are shorter than the window."""
    dice, row = pair.dice, _row(pair)
    if not len(row):
        return None
    window = dice.choice((1, len(row), len(row) + 3, dice.randint(1, len(row))))
    tail = row[max(0, len(row) - window) :].long()
    before = pair.state(pair.compiled)
    wrong = raises(lambda: pair.torch.prove_prefixes([tail], len(tail)))
    # Nodes 1, 2, 3 … of a path; or what is not one of these.
    cuts = sorted({0, len(row), *(dice.randint(0, len(row)) for _ in range(dice.randrange(4)))})
    nodes = {node: row[a:b] for node, (a, b) in enumerate(itertools.pairwise(cuts), start=1)}
    count, kind = len(nodes), dice.choice(("slots", "node", "node", "odd node", "no slots"))
    last = nodes.pop(count)
    match = SimpleNamespace(device_indices=row, device_prefix_len=len(row))
    match.last_device_node = True if kind == "odd node" else 0
    tails: dict[int, tuple[tuple[Any, ...], int]] = {}
    told = dice.choice(("all", "all", "few", "off", "gone", "none"))
    before_last = range(count - 1, told == "few", -1)
    earlier = sum(len(nodes[node]) for node in before_last)
    enough = told == "all" or (told == "few" and len(last) + earlier >= len(tail))
    if kind in ("node", "odd node") and told != "none":
        name = pair.books.held(last, pair.mapping, len(last) + 1)
        tails[name] = tuple(before_last), earlier + (told == "off")

    def value_of(node: int, part: str) -> torch.Tensor | None:
        assert part == "full"
        if node:
            return None if told == "gone" else nodes[node]
        return None if kind == "no slots" else last

    # Of slots, nobody is asked.
    asked = None if kind == "slots" else value_of
    answer = pair.books.proves(match, pair.mapping, window, asked, "full", tails)
    if pair.books.proves(match, pair.mapping, window, asked, "full", tails) != answer:
        return "another answer when asked again"
    if (found := _look(pair, match, window, asked, tails, answer)) is not None:
        return found
    short = kind == "node" and len(last) < len(tail)
    if kind in ("odd node", "no slots") or (short and not enough):
        return None if answer == -1 else f"{kind}, {told}: {answer}"
    if answer not in (-1, len(row)):
        return f"a match of {len(row)} tokens is said to have {answer}"
    empty = SimpleNamespace(device_prefix_len=0, last_device_node=0)
    if pair.books.proves(empty, pair.mapping, window, value_of, "full", {}) != 0:
        return "no match is not proved"
    return _judged(pair, answer == len(row), wrong, before)


def _look(
    pair: Pair, match: Any, window: int, value_of: Any, tails: dict[int, Any], answer: int
) -> str | None:
    """What is found by ``proves`` is found and counted by a ``Look``, if the books are enough."""
    guard = SimpleNamespace(trees_suspect=False, compiled=pair.books)
    params = SimpleNamespace(key=range(len(_row(pair)) + 1000))
    kind, asked = (type(match.last_device_node), None)[pair.dice.randrange(2)], dict(tails)
    look = compiled._books.Look(
        guard, {"there": pair.mapping}, "there", kind, window, value_of, "full", asked
    )
    nothing = torch.zeros(0, dtype=torch.int64)
    miss = SimpleNamespace(device_indices=nothing, device_prefix_len=0, last_device_node=None)
    look.found(miss, params)  # and it knows the books
    before = look.misses
    asked.update(tails)
    found = look.found(match, params)
    if found is not (answer >= 0 and kind is None):
        return f"{answer} tokens are proved, and found: {found}"
    counted = [look.hits, look.misses - before, look.asked_tokens, look.hit_tokens]
    due = [found, 0, (found + before) * len(params.key), answer if found else 0]
    if counted != due:
        return f"counted {counted} for {due}"
    guard.trees_suspect = True
    if look.found(match, params) or look.hits != due[0]:
        return "found by books that are not enough"
    guard.trees_suspect, guard.compiled = False, None
    if look.found(match, params):
        return "found without books"
    if pair.dice.random() < 0.8:  # it takes long
        return None
    guard.compiled = _other_books(pair)
    asked.update(tails)
    look.found(match, params)
    return "tails that other books have named" if asked else None


def _other_books(pair: Pair) -> Any:
    """Books of the same pools, as after their serials were shifted."""
    guard = pair.compiled
    made = compiled.books(guard.full, guard.window, guard.map, guard.witness)
    assert made is not None
    return made


def _take_back(pair: Pair, before: list[Any]) -> None:
    """The release gave up; of what was freed a part had come to the free list by then."""
    mark = FREED | QUEUED | SERIAL
    for side, ledger in enumerate((pair.torch.full, pair.torch.window)):
        ended = (ledger.born == mark).nonzero().reshape(-1).tolist()
        ended = [page for page in ended if before[side][page] != mark]
        came = pair.dice.sample(ended, pair.dice.randint(0, len(ended)))
        assert pair.books.came(torch.tensor(came, dtype=torch.int64), side, True)
        for page in ended:
            ledger.born[page] = mark & ~QUEUED if page in came else before[side][page]
    pair.books.take_back(SERIAL)
    pair.torch.witness.since.copy_(pair.compiled.witness.since)


class _NotOnceError(GuardViolation):
    """The torch code finds this when the pages come to the free list."""

    def __init__(self) -> None:
        Exception.__init__(self, "not each page once")


def _window_pages_once(pair: Pair, heads: torch.Tensor) -> None:
    pages = pair.torch.window.pages_of(pair.mapping[heads])
    pages = pages[pages > 0]
    if len(set(pages.tolist())) != pages.numel():
        raise _NotOnceError


def _peers_unmapped(pair: Pair, heads: torch.Tensor) -> None:
    if (pair.mapping[pair.torch.full.rows_of(pair.torch.full.pages_of(heads))] > 0).any():
        raise _NotOnceError


def _release(pair: Pair) -> Any:
    dice = pair.dice
    side, are_pages, alone = dice.randint(0, 1), dice.random() < 0.5, dice.random() < 0.4
    ledger, torchs = (pair.each(name)[1] for name in ("full", "window")), pair.torch
    mine = list(ledger)[side]
    queued = ((mine.born >= FREED | QUEUED).nonzero().reshape(-1)).tolist()
    pages = dice.sample(queued, len(queued)) if queued and not alone else pair.pages()
    if dice.random() < 0.1:
        pages.append(dice.choice([*pages, 0, PAGES + 1, 3]))
    per = 1 if are_pages else pair.size
    items = pair.some([page * per for page in pages], wild=0.02)
    before = pair.state(pair.compiled)
    if alone:
        yes = pair.books.came_alone(items, side + 2 * are_pages, SERIAL)
    else:
        yes = pair.books.came(items, side, are_pages)
    wrong = not items.numel() or raises(
        lambda: torchs.vet_release(
            mine, items, pages=are_pages, distinct=True, padding_expected=False, queued=not alone
        )
    )
    if not items.numel():
        return None
    if not alone:  # what is live may come as well there: it was judged when it was freed
        ids = mine.pages_of(items.long() * (pair.size if are_pages else 1))
        wrong = wrong or bool((mine.generations(ids) < FREED).any())
    found = _judged(pair, yes, wrong, before)
    if found is None and yes:
        ids = mine.pages_of(items.long() * (pair.size if are_pages else 1))
        if alone:
            mine.release(ids, SERIAL)
        else:
            mine.born[ids] &= ~QUEUED
    return found if found is not None else _same(pair)


def _allocation(pair: Pair) -> Any:
    dice, size = pair.dice, pair.size
    first = dice.randint(0, PAGES * size)
    rows = [
        row % (pair.slots + size) for row in range(first, first + dice.randint(1, 2 * size + 2))
    ]
    full = pair.some(rows)
    window = pair.some([dice.randrange(pair.slots) for _ in rows[dice.randrange(len(rows)) :]])
    pair.books.took(full, window, SERIAL)
    torchs = pair.torch
    torchs.map.record(full[len(full) - len(window) :].long(), window.long(), SERIAL)
    operation = torchs.current._replace(serial=SERIAL)
    begun = {}
    for side, ledger, slots in ((0, torchs.full, full), (1, torchs.window, window)):
        pages = ledger.hand_out_slots(Gathered([slots], [operation])).tolist()
        ledger.born[0] = FREED
        begun[side] = {page for page in pages if 0 < page <= PAGES}
    for side, expected in begun.items():
        told = {p for p in range(1, PAGES + 1) if (SERIAL, 0) in pair.books.touched(side, p)}
        if told != expected:
            return f"touched: {told}, not {expected}"
    return _same(pair)


def _same(pair: Pair) -> Any:
    ours, theirs = pair.state(pair.compiled), pair.state(pair.torch)
    return None if ours == theirs else [ours, theirs]


#: A line of the extension, and what takes one of its checks away.
CHANGES = {
    "window generation": ("(stamp >= far) & ", ""),
    "full generation": ("((stamp >= born) | (born >= FREED))", "1"),
    "freed full page": ("(stamp >= born) | (born >= FREED)", "stamp >= born"),
    "owner": ("(view->owner[slot] == (int32_t)row)", "1"),
    "page is full": (" || !inside_page(&view, (int64_t)((uint64_t)item(lengths, k) - less))", ""),
    "length less one": ("(uint64_t)item(lengths, k) - less", "(uint64_t)item(lengths, k)"),
    "nothing continued": ("row < 0 || !inside", "!inside"),
    "proof of what is continued": ("right = entry > 0 && entry < view.owners && proves(&view, row, "
                                   "entry)", "right = entry > 0 && entry < view.owners"),
    "live": ("page == outside || view->born[FULL][page] >= FREED", "page == outside"),
    "peers": ("if (!(what & (FREES_WINDOW | PEERS_FOLLOW)) && ", "if (0 && "),
    "peers of the whole page": ("row < (page + 1) * view->size; row++)\n        if",
                                "row < page * view->size + 1; row++)\n        if"),
    "row within": ("if (slot < 0 || slot > mapping->count - 2", "if (slot > mapping->count - 2"),
    "must be mapped": ("return what & ALL_MAPPED ? -1 : 0;", "return 0;"),
    "entry proved": (" || !proves(view, slot, entry))\n", ")\n"),
    "freed mark": ("mark = FREED | QUEUED | serial", "mark = FREED | serial"),
    "revived": ("        revive(self, FREED | QUEUED | serial);\n", ""),
    "oldest last": ("ended[--self->ends];", "ended[0]; self->ends--;"),
    "reach": ("view.named[page_of(&view, slot, view.outside[FULL])] =", "(void)"),
    "comes queued": ("born[page] < (FREED | QUEUED)", "born[page] < FREED"),
    "comes once": ("born[page] &= ~QUEUED;\n    }", "\n    }"),
    "queued again": (" |= QUEUED;\n    return", " |= 0;\n    return"),
    "alone live": ("page == outside || born[page] >= FREED ||\n", "page == outside ||\n"),
    "alone revived": ("revive(self, FREED | serial);", ";"),
    "left behind": ("left |= entry > 0 && entry < view.owners && proves(&view, row, entry)",
                    "left |= entry > 0"),
    "left behind free": (" || view.born[FULL][page] < FREED)\n            continue", ")\n"
                         "            continue"),
    "begun": ("first += first == 0 || inside_page(&view, slot);", "first += first == 0;"),
    "padding begun": ("first += first == 0 || inside_page", "first += inside_page"),
    "gaps": ("        if (gaps)\n            break;\n", ""),
    "last of a run": ("run < count && item(items, k + run) - first == run", "run < count"),
    "run beyond the books": ("row < 0 || row > view.stamps - run || ", ""),
    "taken back": ("        revive(self, FREED | QUEUED | self->ended_serial);", "        ;"),
    "what came stays free": ("if (*born == mark)", "if (1)"),
    "owner written": ("= (int32_t)(row + j);", "= 0;"),
    "stamp written": ("view.stamp[row + j] = serial;", ";"),
    "runs": ("first == (int64_t)now->run.last + 1", "first >= (int64_t)now->run.last + 1"),
    "int32": ("items->wide ? ((const int64_t *)items->at)[k] : ((const int32_t *)items->at)[k]",
              "((const int32_t *)items->at)[k]"),
    "strided": ("fits = is_true(PyObject_CallMethodNoArgs(tensor, name_is_contiguous));", ";"),
    "shift": ("view->shift >= 0 ? slot >> view->shift : slot / view->size", "slot >> view->shift"),
}  # fmt: skip

CHANGES |= {
    "held by a tree": ("return self->in_tree || !is_held(view, page);", "return 1;"),
    "freed by the tree": ("return self->in_tree || !is_held", "return !is_held"),
    "windows betrayed": ("self->betrayed |= betrayed && right && !self->in_tree;", ""),
    "windows of the tree's": ("betrayed && right && !self->in_tree;", "betrayed && right;"),
    "adopts live": ("if (!page || is_held(&view, page))", "if (is_held(&view, page))"),
    "adopts once": ("if (!page || is_held(&view, page))", "if (!page)"),
    "adopts dead": ("return view->born[FULL][page] >= FREED ? 0 : page;", "return page;"),
    "adopts evicted": ("if (k >= evicted && !has_window(&view, &mapping, slot))", "if (0)"),
    "adopts below": ("if (k >= evicted && !has_window", "if (!has_window"),
    "adopts from": ("for (int64_t k = start; k < end; k++) {\n        int64_t slot",
                    "for (int64_t k = 0; k < end; k++) {\n        int64_t slot"),
    "vouched": ("= (int32_t)read.number[3];", "= 0;"),
    "window proved": ("entry > 0 && entry < view->owners && proves(view, slot, entry);",
                      "entry > 0 && entry < view->owners;"),
    "page of a path": ("if (!page || slot >= rows)\n            return 0;",
                       "if (slot >= rows)\n            return 0;"),
    "tail": ("for (int64_t k = slots->count - need; k < slots->count;) {",
             "for (int64_t k = 0; k < slots->count;) {"),
    "window recycled": ("if ((stamp < far) | (stamp < view", "if ((stamp < view"),
    "full recycled": (" | (stamp < view->born[FULL][page])", ""),
    "window renewed since": (" | (stamp > view->since[page]) |", " |"),
    "window owner": (" |\n            (view->owner[entry] != (int32_t)slot))", ")"),
    "together: gaps": ("return !(bad || gaps);", "return !bad;"),
    "together: pages": ("        room = room < near ? room : near;\n    } else", "    } else"),
    "together: window recycled": ("least = least > far ? least : far;", ""),
    "together: full recycled": ("least = least > far ? least : far;", "least = far;"),
    "together: renewed since": (" | (stamp[j] > most)", ""),
    "together: owner": (" | (owner[j] != (int32_t)slot + j);\n    } else", ";\n    } else"),
    "alone: window recycled": (" | (stamp[j] < far[j])", ""),
    "alone: full recycled": ("bad |= (stamp[j] < born[j]) |", "bad |="),
    "alone: renewed since": (" | (stamp[j] > since[j]) |\n", " |\n"),
    "alone: owner": (" |\n                   (owner[j] != (int32_t)slot + j);", ";"),
    "books that are not enough": ("    if (suspect)\n        return suspect < 0 ? -1 : 0;", ""),
    "other books": ("PyDict_Clear(self->way.tails);", ""),
    "virtual nodes": ("if (!able || odd)", "if (!able)"),
    "hits": ("self->hits += length > 0;", "self->hits += 1;"),
    "misses": ("self->misses += length == 0;", ""),
    "tokens asked for": ("self->asked_tokens += asked;", "self->asked_tokens += length;"),
    "tokens used": ("self->hit_tokens += length;", "self->hit_tokens += asked;"),
    "parts count": ("return right == 1 && (need || total) ? -1 : right;",
                    "return right == 1 && need ? -1 : right;"),
    "parts that are not enough": ("return right == 1 && (need || total) ? -1 : right;",
                                  "return right == 1 && total ? -1 : right;"),
    "window of a match": ("need = way->window < length ? way->window : length;",
                          "need = way->window;"),
    "nothing known of what comes before": ("return PyErr_Occurred() ? 2 : -1;\n    int64_t total;",
                                           "return PyErr_Occurred() ? 2 : 1;\n    int64_t total;"),
    "last part": ("int64_t right = holds(view, last, mapping, last->count);",
                  "int64_t right = 1;"),
    "parts before": ("            right = holds(view, &slots, mapping, need < slots.count ? need : "
                     "slots.count);", "            right = 1;"),
    "answer": ("right == 1 ? length : -1;", "right ? length : -1;"),
    "node before": ("else if (node)\n            right =", "else if (0)\n            right ="),
    "another kind of node": ("if (node && PyLong_CheckExact(node))", "if (node)"),
    "slots that are gone": ("if (slots == Py_None)\n            Py_CLEAR(slots);", ""),
    "no match": ("? -2 : length ? -1 : 0;", "? -2 : -1;"),
    "name of a slot": ("-1 - (clamp(first, INT32_MAX) << 31 | since)", "-1 - since"),
    "name of a generation": ("-1 - (clamp(first, INT32_MAX) << 31 | since)",
                             "-1 - (clamp(first, INT32_MAX) << 31)"),
    "part that is gone": ("if (!part || part == Py_None)\n            right = part ? -1 : 2;",
                          "if (!part)\n            right = 2;"),
    "need goes down": ("need -= need < slots.count ? need : slots.count;", ";"),
    "need of the last goes down": ("need -= last->count;", ";"),
    "fewer": ("right = need > slots->count ? name_of(&view, slots) :", "right ="),
    "strides told": (" || (told.strides && told.strides[0] != 1))", ")"),
    "widths told": ("told.shape[0], told.bits == 64,", "told.shape[0], 1,"),
}  # fmt: skip

SEEDS = range(1200)


def _build(source: str, folder: Path) -> ModuleType:
    file = folder / "_books.c"
    file.write_text(source)
    library = folder / "_books.so"
    include = sysconfig.get_paths()["include"]
    # Few slots together, as there are in pools of ten pages.
    command = [
        "cc",
        "-std=c11",
        "-O0",
        "-DTOGETHER=2",
        "-fPIC",
        "-shared",
        f"-I{include}",
    ]
    command += [f"-I{include}", str(file), "-o"]
    subprocess.run([*command, str(library)], check=True, capture_output=True, text=True)
    spec = importlib.util.spec_from_file_location("_books", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.prepare(*compiled.PREPARED)
    return module


def agrees(source: str) -> bool:
    """Whether an extension built from ``source`` agrees; one that crashes or hangs does not."""
    with tempfile.TemporaryDirectory() as folder:
        module = _build(source, Path(folder))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(120)
                compiled._books = module
                status = int(any(disagreement(seed) for seed in SEEDS))
            finally:
                os._exit(status)
        return os.waitpid(child, 0)[1] == 0


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # thousands of faults, all on purpose
    source = SOURCE.read_text()
    print(json.dumps(["unchanged", agrees(source)]), flush=True)
    for name, (whole, changed) in CHANGES.items():
        assert source.count(whole) == 1, f"{name}: the line is not there once"
        print(json.dumps([name, agrees(source.replace(whole, changed))]), flush=True)


if __name__ == "__main__":
    main()
