"""A plain-Python model of two pools and the mapping between them: who owns what, what is legal.

Sets and dictionaries only: no torch, nothing of the guard, nothing of SGLang. Given an operation in
slot numbers it says whether the operation is legal, which kinds of fault may be reported where it is
not, and which pages must be live and free once its rightful part has been done. The facts behind it
are the fault catalogue's; kinds are the words that the guard's reports use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NEGATIVE = "negative-index"
PADDING = "padding-page"
OUTSIDE = "out-of-range"
DOUBLE = "double-free"
DUPLICATE = "duplicate-in-call"
PARTS = "freed-in-parts"
STALE = "stale-mapping"
SHARED = "shared-window-slot"
UNMAPPED = "unmapped-release"
UNPROVED = "unproved-window"
PEER = "live-peer"
DEAD_MAPPED = "dead-slot-mapped"
ROLLBACK = "lost-rollback"

Kinds = frozenset[str]


@dataclass(frozen=True)
class Rules:
    """What differs between releases, as the catalogue and the releases' own sources have it.

    ``whole_pages``: a window free reads and clears the entries of every page that it touches.
    ``segments``: window frees follow an entry even where it holds nothing (segments, and slots of
    one-slot pages). ``deferred``: frees that an open group only queues. ``waits``: what an open group
    does not queue is judged at once, and its window side reaches the pool when it ends.
    ``full_waits``: so does the full side, the full pool having a group of its own. ``alone``: the
    full side has a free of its own. ``tail_cleared``: a preallocation with a window tail clears the
    entries of the rest.
    """

    page_size: int
    whole_pages: bool
    segments: bool
    deferred: frozenset[str]
    waits: bool
    full_waits: bool
    alone: bool
    tail_cleared: bool

    @classmethod
    def of(cls, version: str, page_size: int) -> Rules:
        """The rules of one release."""
        order = (
            "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1",
            "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
        )  # fmt: skip

        def since(first: str) -> bool:
            return order.index(version) >= order.index(first)

        queued = {"0.5.18": ("free", "free_swa"), "0.5.19": ("free", "free_full")}
        return cls(
            page_size,
            whole_pages=since("0.5.14"),
            segments=since("0.5.20"),
            deferred=frozenset(queued.get(version, () if since("0.5.20") else ("free",))),
            waits=since("0.5.19"),
            full_waits=since("0.5.20"),
            alone=since("0.5.19"),
            tail_cleared=since("0.5.12.post1"),
        )


@dataclass(frozen=True)
class Judgement:
    """What may be reported about one operation.

    One kind of each group of ``must`` has to be reported; kinds of ``may`` can be. ``soft`` is as
    ``must`` unless the guard removed the cause earlier, as enforce mode may. With ``later`` the
    report may come with a later operation of the same matter (the end of a group).
    """

    must: tuple[Kinds, ...] = ()
    soft: tuple[Kinds, ...] = ()
    may: Kinds = frozenset()
    later: bool = False

    @property
    def legal(self) -> bool:
        return not (self.must or self.soft or self.may)

    @property
    def acceptable(self) -> Kinds:
        return self.may.union(*self.must, *self.soft)


LEGAL = Judgement()


class Pool:
    """The pages of one pool: who owns each, and its incarnation (how often it was handed out)."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.owner: dict[int, str] = {}
        self.incarnation = dict.fromkeys(range(pages + 1), 0)
        self.reach: dict[int, int] = {}

    def is_live(self, page: int) -> bool:
        return page in self.owner

    def free_pages(self) -> set[int]:
        return set(range(1, self.pages + 1)) - set(self.owner)

    def hand_out(self, pages: Iterable[int], owner: str) -> None:
        """These pages left the free list. Fails where one was not free, or is no page."""
        for page in pages:
            assert 1 <= page <= self.pages, f"page {page} was handed out and is none"
            assert page not in self.owner, f"page {page} of {self.owner[page]} went to {owner} too"
            self.owner[page] = owner
            self.incarnation[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.owner.pop(page, None)


@dataclass(frozen=True)
class Entry:
    """One mapping entry: a window slot, and the two incarnations that it was written for."""

    window: int
    full_born: int
    window_born: int


@dataclass
class Plan:
    """What one free does, to be committed once it is known to have been carried out."""

    judgement: Judgement
    full: set[int] = field(default_factory=set)
    window: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    reach: dict[int, int] = field(default_factory=dict)
    alone: bool = False
    exactly: bool = False


class Oracle:
    """Two pools and the mapping. Slots are plain integers; a page is ``page_size`` of them."""

    def __init__(self, full_pages: int, window_pages: int, rules: Rules) -> None:
        self.rules = rules
        self.page_size = rules.page_size
        self.rows = (full_pages + 1) * rules.page_size
        self._empty(full_pages, window_pages)

    def _empty(self, full_pages: int, window_pages: int) -> None:
        self.full = Pool(full_pages)
        self.window = Pool(window_pages)
        self.entries: dict[int, Entry] = {}
        self.holder: dict[int, int] = {}
        self.soft_rows: set[int] = set()
        self.group = False
        self.queue: list[tuple[str, list[int]]] = []
        self.transit: dict[str, set[int]] = {"full": set(), "window": set()}
        self.queued_exactly: set[int] = set()
        self.alone: set[int] = set()
        self.repointed: list[tuple[int, int]] = []

    # -- reading -------------------------------------------------------------------------------

    def page_of(self, slot: int) -> int:
        return slot // self.page_size

    def rows_of(self, pages: Iterable[int]) -> list[int]:
        size = self.page_size
        return [row for page in pages for row in range(page * size, (page + 1) * size)]

    def proved(self, row: int) -> bool:
        """Whether the entry of a full slot is empty or still leads where it was written to lead.

        The window page must be live and in the incarnation that the entry was written for, the full
        page in that incarnation too (even if freed since), and no other full slot may have been
        given the window slot later.
        """
        entry = self.entries.get(row)
        if entry is None:
            return True
        page = self.page_of(entry.window)
        return (
            self.window.is_live(page)
            and self.window.incarnation[page] == entry.window_born
            and self.full.incarnation[self.page_of(row)] == entry.full_born
            and self.holder.get(entry.window) == row
        )

    def window_of(self, row: int) -> int:
        """The window slot that a full slot leads to; 0 for none or an entry that is not proved."""
        entry = self.entries.get(row)
        return entry.window if entry is not None and self.proved(row) else 0

    def must_be_free(self, side: str) -> set[int]:
        pool = self.full if side == "full" else self.window
        return pool.free_pages()

    def may_be_free(self, side: str) -> set[int]:
        """Pages that are released but may still be on their way: the guard decides when."""
        if side == "full":
            return set()
        return {self.page_of(slot) for slot in map(self.window_of, self.alone) if slot}

    # -- allocation ----------------------------------------------------------------------------

    def judge_continuing(self, lasts: Sequence[int], lengths: Sequence[int]) -> Judgement:
        """An extension after the slots ``lasts`` of requests that hold ``lengths`` tokens."""
        must = []
        for last, length in zip(lasts, lengths, strict=True):
            if length % self.page_size == 0:
                continue
            if last not in self.entries:
                must.append(frozenset({UNPROVED}))
            elif not self.proved(last):
                gone = {UNPROVED} if last in self.soft_rows else set()
                must.append(frozenset({STALE, SHARED, *gone}))
        return Judgement(tuple(must))

    def judge_tail(self, unmapped: Iterable[int]) -> Judgement:
        """A preallocation that gave no window slot to the rows ``unmapped``: none may lead on."""
        left = [row for row in unmapped if row in self.entries]
        return Judgement(soft=(frozenset({STALE}),) if left else ())

    def stale_on_free_pages(self) -> bool:
        """Whether an entry outlived a full page that is free now."""
        return any(not self.full.is_live(self.page_of(row)) for row in self.entries)

    def hand_out(self, side: str, slots: Iterable[int], owner: str) -> None:
        """The pages that ``slots`` begin were handed out (those that start at a page boundary)."""
        pool = self.full if side == "full" else self.window
        starts = {self.page_of(slot) for slot in slots if slot % self.page_size == 0}
        pool.hand_out(sorted(starts), owner)

    def map(self, row: int, window: int) -> None:
        """The entry of ``row`` was written for the present incarnations."""
        self.entries[row] = Entry(
            window,
            self.full.incarnation[self.page_of(row)],
            self.window.incarnation[self.page_of(window)],
        )
        self.holder[window] = row
        self.soft_rows.discard(row)

    def unmap(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.entries.pop(row, None)
            self.soft_rows.discard(row)

    def take_overdue(self) -> tuple[Kinds, ...]:
        """Before an allocation: what earlier operations left behind must be reported by now.

        Full slots freed alone whose window peer is live, and window slots that two full slots are
        mapped to. The guard releases the peers and drops the older entry.
        """
        groups = []
        left = [row for row in self.alone if self._left_behind(row)]
        if left:
            groups.append(frozenset({PEER}))
            self.window.release({self.page_of(self.entries[row].window) for row in left})
            self.unmap(left)
        self.alone.clear()
        still = [
            (old, window)
            for old, window in self.repointed
            if old in self.entries
            and self.entries[old].window == window
            and self.holder.get(window) != old
        ]
        if still:
            groups.append(frozenset({SHARED}))
            self.unmap(old for old, _ in still)
        self.repointed.clear()
        return tuple(groups)

    def _left_behind(self, row: int) -> bool:
        return row in self.entries and self.proved(row) and not self.full.is_live(self.page_of(row))

    # -- frees ---------------------------------------------------------------------------------

    def plan_free(
        self, slots: Sequence[int], *, full: bool, window: bool, segment: bool = False
    ) -> Plan:
        """A free of ``slots``: both sides, or one of them; ``segment`` names pages by their first.

        Rightful slots are freed, whatever the others are.
        """
        size = self.page_size
        heads = slots[::size] if segment else slots
        exactly = size == 1 or segment
        must: list[Kinds] = []
        may: set[str] = set()
        later = False
        first = _first_offsets(heads, size)
        seen: set[int] = set()
        rightly: list[int] = []
        for slot in heads:
            page = slot // size
            kind = self._bad_row(slot, full=full)
            if kind is None and full:
                if page in self.transit["full"]:
                    # Queued in this group already. A set forgets it; a list of pages does not.
                    later = True
                    twice = frozenset({DOUBLE, DUPLICATE, PARTS, UNMAPPED})
                    if exactly or page in self.queued_exactly:
                        must.append(twice)
                    else:
                        may |= twice
                    continue
                if not self.full.is_live(page):
                    kind = DOUBLE
                elif exactly and page in seen:
                    kind = DUPLICATE
                elif not exactly and 0 < self.full.reach.get(page, 0) <= first[page]:
                    kind = PARTS
            if kind is not None:
                must.append(frozenset({kind}))
                continue
            seen.add(page)
            rightly.append(slot)
        plan = Plan(LEGAL, alone=full and not window, exactly=exactly)
        if full:
            plan.full = {slot // size for slot in rightly}
            plan.reach = self._reached(slots, plan.full, segment=segment)
        soft: list[Kinds] = []
        if window:
            soft = self._follow(plan, rightly, must, exactly=exactly, segment=segment)
        plan.judgement = Judgement(_distinct(must), _distinct(soft), frozenset(may), later)
        return plan

    def _bad_row(self, slot: int, *, full: bool) -> str | None:
        if slot < 0:
            return NEGATIVE
        if slot >= ((self.full.pages + 1) * self.page_size if full else self.rows):
            return OUTSIDE
        if full and slot < self.page_size:
            return PADDING
        return None

    def _reached(self, slots: Sequence[int], pages: set[int], *, segment: bool) -> dict[int, int]:
        size, reach = self.page_size, dict.fromkeys(pages, 0)
        for position, slot in enumerate(slots):
            offset = position % size if segment else slot % size
            page = slots[position - offset] // size if segment else slot // size
            if page in reach:
                reach[page] = max(reach[page], offset + 1)
        return reach

    def _follow(
        self, plan: Plan, rightly: list[int], must: list[Kinds], *, exactly: bool, segment: bool
    ) -> list[Kinds]:
        """The window side of a free: through which entries it goes, and which it clears."""
        rules, size = self.rules, self.page_size
        pages = {slot // size for slot in rightly}
        if segment or size == 1:
            rows = list(rightly)
            plan.cleared = set(self.rows_of(pages))
        elif rules.whole_pages:
            rows = self.rows_of(sorted(pages))
            plan.cleared = set(rows)
        else:
            rows = list(rightly)
            plan.cleared = set(rows)
        soft: list[Kinds] = []
        as_it_reads = segment or (rules.segments and size == 1)
        for row in dict.fromkeys(rows):
            entry = self.entries.get(row)
            if entry is None:
                if as_it_reads:
                    must.append(frozenset({UNMAPPED, PADDING} if row < size else {UNMAPPED}))
            elif self.proved(row):
                plan.window.add(self.page_of(entry.window))
            elif row in self.soft_rows:  # erased, perhaps: then it leads to nothing
                soft.append(frozenset({STALE, SHARED, *([UNMAPPED] if as_it_reads else [])}))
            else:
                must.append(frozenset({STALE, SHARED}))
        if exactly and as_it_reads and len(set(rows)) < len(rows):
            must.append(frozenset({DUPLICATE, DOUBLE, UNMAPPED}))
        return soft

    def commit(self, plan: Plan) -> None:
        """The rightful part of a free was done."""
        if not self.rules.whole_pages and self.page_size > 1:
            # Entries of the rest of a page stay, and lead nowhere from now on.
            gone = plan.window
            self.soft_rows |= {
                row
                for row, entry in self.entries.items()
                if row not in plan.cleared and self.page_of(entry.window) in gone
            }
        self.full.reach.update(plan.reach)
        if plan.alone:
            self.alone |= set(self.rows_of(plan.full))
        self.unmap(plan.cleared)
        rules = self.rules
        if self.group and rules.full_waits:
            self.transit["full"] |= plan.full
            if plan.exactly:
                self.queued_exactly |= plan.full
        else:
            self.full.release(plan.full)
        if self.group and rules.waits:
            self.transit["window"] |= plan.window
        else:
            self.window.release(plan.window)

    def release_window(self, slots: Sequence[int]) -> Plan:
        """Window slots are freed on the window pool itself, behind the mapping."""
        size, must, seen = self.page_size, [], set()
        plan = Plan(LEGAL)
        for slot in slots:
            page = slot // size
            if slot < 0:
                must.append(frozenset({NEGATIVE}))
            elif page == 0:
                must.append(frozenset({PADDING}))
            elif page > self.window.pages:
                must.append(frozenset({OUTSIDE}))
            elif not self.window.is_live(page):
                must.append(frozenset({DOUBLE}))
            elif size == 1 and page in seen:
                must.append(frozenset({DUPLICATE}))
            else:
                plan.window.add(page)
            seen.add(page)
        plan.judgement = Judgement(_distinct(must))
        return plan

    # -- groups --------------------------------------------------------------------------------

    def begin_group(self) -> None:
        self.group = True

    def defer(self, name: str, slots: Sequence[int]) -> bool:
        """Whether this free only joins the open group; if so it is queued."""
        if not (self.group and name in self.rules.deferred):
            return False
        self.queue.append((name, list(slots)))
        return True

    def end_group(self) -> list[tuple[str, list[int]]]:
        """The group ends: pages under way are free, and the frees that it queued are due in order.

        The caller plans and commits each of them: one may depend on the one before.
        """
        self.group = False
        queue, self.queue = self.queue, []
        self.full.release(self.transit["full"])
        self.window.release(self.transit["window"])
        self.transit = {"full": set(), "window": set()}
        self.queued_exactly.clear()
        due = []
        for name in ("free", "free_swa", "free_full"):
            joined = [slot for kind, slots in queue if kind == name for slot in slots]
            if joined:
                due.append((name, joined))
        return due

    # -- the mapping and whole pools -----------------------------------------------------------

    def judge_mapping(self, rows: Sequence[int], windows: Sequence[int]) -> Judgement:
        """Entries are written outside an allocation."""
        dead = any(
            window and not (self.full.is_live(self.page_of(row)) and self._window_live(window))
            for row, window in zip(rows, windows, strict=True)
        )
        return Judgement((frozenset({DEAD_MAPPED}),) if dead else ())

    def _window_live(self, window: int) -> bool:
        return window >= 0 and self.window.is_live(self.page_of(window))

    def write_mapping(self, rows: Sequence[int], windows: Sequence[int]) -> None:
        """The rightful part of such a write; a slot that changes hands is looked at again later."""
        for row, window in zip(rows, windows, strict=True):
            if window and self._window_live(window) and self.full.is_live(self.page_of(row)):
                before = self.holder.get(window)
                if before is not None and before != row and self.window_of(before) == window:
                    self.repointed.append((before, window))
                self.map(row, window)
            else:
                self.unmap([row])

    def clear(self, full_pages: int | None = None, window_pages: int | None = None) -> None:
        """Both pools are emptied, and given new sizes where the caller names them."""
        self._empty(full_pages or self.full.pages, window_pages or self.window.pages)


def _first_offsets(slots: Iterable[int], size: int) -> dict[int, int]:
    """The smallest offset that is named in each page."""
    first: dict[int, int] = {}
    for slot in slots:
        page, offset = divmod(slot, size)
        first[page] = min(first.get(page, size), offset)
    return first


def _distinct(groups: Iterable[Kinds]) -> tuple[Kinds, ...]:
    return tuple(dict.fromkeys(groups))
