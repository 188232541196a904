"""A random drive of real prefix trees on a real guarded allocator, which must never trip the guard.

The idea is a shadow model of what the KV *means*: each slot remembers the token prefix that it was
written for, and each forward pass checks that what it reads is what was written. So a page with two
owners is seen where it hurts, in the row of a request, by nothing that the guard or the audit know.
``repro.scheduling.Server`` does what SGLang's scheduler does; this drives it by seeded choices, over small
pools, with prompts that grow out of earlier ones.

Each example runs once without the guard and once in each mode. After each operation:

* the guard has reported nothing;
* each page of each pool is free, or of the tree, or of one request (``repro.audit``), and the tree's
  sizes are those of the slots that it holds and of those that are mapped;
* in observe, free lists, mapping, rows and tree are bit for bit those of the run without the guard;
  in enforce and strict, all lengths and sizes are equal to it;

and whenever nothing runs, the tree's own ``sanity_check`` passes. Every second example looks only now
and then, so that the checks that the guard puts off gather as they do on a server.

Proof by mutation: ``--break PAGE_SIZE …`` has one illegal thing done in the middle, see ``BREAKS``;
that each such drive ends in a finding is tested. Run: ``python -P trees.py --mode enforce --examples 9 --steps 60``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import install, running_version, uninstall
from hicache_guard.adapters.link import _links as _known
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.journal import acting_for
from hicache_guard.core.report import Violation
from hicache_guard.repro import pools, scheduling
from hicache_guard.repro.audit import Books, audit, fingerprint
from real import driver

MODES = ("observe", "enforce", "strict")
PAGE_SIZES = (1, 4, 64)
#: Requests that decode at once.
BATCH = 4
#: Releases with #29352: a newcomer that brings a prefix whose window side is gone has the tree free
#: the full slots which a running request reads. By indices alone that free is in order.
REPLACES_LOCKED_PREFIXES = ("0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14")


class Finding(AssertionError):
    """Something that must not be. ``by`` says who saw it: guard, audit, kv or tree."""

    def __init__(self, by: str, what: str) -> None:
        super().__init__(f"{by}: {what}")
        self.by = by


class NothingBroken(Exception):
    """A mutation found no moment to be done in; nobody can have found it."""


@dataclass
class Setting:
    """What one example is about; drawn from its seed."""

    tree: str
    page_size: int
    window: int
    full_pages: int
    window_pages: int
    options: dict[str, Any]
    look_always: bool

    @classmethod
    def draw(cls, seed: int, tree: str, page_size: int, options: dict[str, Any]) -> Setting:
        dice = random.Random(f"setting {seed} {tree} {page_size}")
        # Some models count the token itself in (128), some do not (127).
        window = {1: [3, 4, 8], 4: [4, 7, 8, 12], 64: [63, 64, 127]}[page_size]
        full = {1: (48, 96), 4: (24, 40), 64: (18, 26)}[page_size]
        least = {1: (30, 44), 4: (16, 22), 64: (12, 16)}[page_size]
        return cls(
            tree,
            page_size,
            dice.choice(window),
            dice.randint(*full),
            dice.randint(*least),
            {name: dice.choice(values) for name, values in options.items()},
            seed % 2 == 0,
        )


class Entries(list[int]):
    """A mapping as plain numbers; the audit asks for one entry at a time."""

    def numel(self) -> int:
        return len(self)


def _for_audit(allocator: Any) -> Any:
    return SimpleNamespace(
        page_size=allocator.page_size,
        full_attn_allocator=allocator.full_attn_allocator,
        swa_attn_allocator=allocator.swa_attn_allocator,
        full_to_swa_index_mapping=Entries(allocator.full_to_swa_index_mapping.tolist()),
    )


@dataclass
class Job:
    """A request, its tokens so far, and for each the prefix that ends there, as a number."""

    name: str
    tokens: list[int]
    output: int
    req: Any = None
    prefixes: list[int] = field(default_factory=list)
    #: The release took the tree's part of its row away; see REPLACES_LOCKED_PREFIXES.
    bereft: bool = False

    def grow(self) -> torch.Tensor:
        """The prefix numbers of all tokens, those of new ones computed now."""
        for token in self.tokens[len(self.prefixes) :]:
            last = self.prefixes[-1] if self.prefixes else 7
            self.prefixes.append((last * 1_000_003 + token + 1) % (2**61 - 1))
        return torch.tensor(self.prefixes, dtype=torch.int64)


@dataclass
class Step:
    """What a state was after an operation: all of it, and what may not depend on the mode."""

    what: str
    exact: str
    sizes: tuple[int, ...]


class Drive:
    """One example: a server, what runs on it, and the shadow of its KV."""

    def __init__(
        self, release: scheduling.Release, setting: Setting, seed: int, seen: Counter[str]
    ) -> None:
        self.setting, self.seen = setting, seen
        self.dice = random.Random(f"drive {seed} {setting.tree} {setting.page_size}")
        self.page = setting.page_size
        release.choose(setting.options)
        self.server = scheduling.Server(
            release,
            setting.tree,
            page_size=self.page,
            window=setting.window,
            full_pages=setting.full_pages,
            window_pages=setting.window_pages,
            longest=(setting.full_pages + 1) * self.page,
        )
        self.allocator = self.server.allocator
        self.reports: list[Violation] = []
        self.steps: list[Step] = []
        self.jobs: dict[str, Job] = {}
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.chunked: Job | None = None
        self.held: list[Any] = []
        self.past: list[list[int]] = []
        self.count = 0
        self.only_guard = False
        size = self.allocator.full_to_swa_index_mapping.numel()
        self.full_kv = torch.zeros(size, dtype=torch.int64)
        self.window_kv = torch.zeros(size, dtype=torch.int64)

    # --- choices -------------------------------------------------------------------------------

    def run(self, steps: int, breaking: Callable[[Drive], bool] | None = None) -> None:
        operations: list[tuple[int, Callable[[], None]]] = [
            (30, self.prefill),
            (40, self.decode),
            (6, self.retract),
            (4, self.abort_chunked),
            (8, self.evict),
            (6, self.think),
            (6, self.stop_thinking),
            (2, self.drain),
        ]
        weights, choices = zip(*operations, strict=True)
        for number in range(steps):
            if breaking is not None and number >= steps // 4 and breaking(self):
                breaking = None
            self.dice.choices(choices, weights)[0]()
        if breaking is not None:
            raise NothingBroken
        self.drain()

    def newcomer(self) -> Job:
        """A request whose prompt begins as an earlier sequence does, most of the time."""
        unit = max(self.page, 4)
        start: list[int] = []
        if self.past and self.dice.random() < 0.8:
            old = self.dice.choice(self.past)
            start = old[: self.dice.choice([len(old), self.dice.randint(0, len(old))])]
        start = start[: 5 * unit]
        tail = self.dice.randint(1, 2 * unit) if self.dice.random() < 0.8 else 1
        letter = self.dice.randrange(2)  # one letter, so that tails are shared too
        self.count += 1
        output = self.dice.choice([1, 2, unit, 3 * unit + self.setting.window])
        return Job(f"R{self.count}", start + [letter] * tail, self.dice.randint(1, output))

    # --- what a scheduler does -----------------------------------------------------------------

    def prefill(self) -> None:
        """A prefill batch: the chunked request first, then whoever waits and fits."""
        limit = self.page * self.dice.choice([1, 2, 4, 100])
        batch: list[tuple[Job, int]] = []
        if self.chunked is not None:
            self.server.next_chunk(self.chunked.req)
            count = self.server.plan(self.chunked.req, limit)
            if not self.fits([count]):
                return
            batch.append((self.chunked, count))
            limit -= count
        for _ in range(self.dice.randint(0 if batch else 1, 3)):
            if len(self.running) + len(batch) >= BATCH or limit < self.page:
                break
            job = self.waiting.pop(0) if self.waiting else self.newcomer()
            if not self.admit(job, batch, limit):
                self.waiting.insert(0, job)
                break
            limit -= batch[-1][1]
            if limit <= 0:
                break
        if not batch:
            return
        self.act(
            "prefill", lambda: self.server.extend([j.req for j, _ in batch], [c for _, c in batch])
        )
        self.forward([(job, count) for job, count in batch])
        for job, _ in batch:
            self.after_prefill(job)

    def admit(self, job: Job, batch: list[tuple[Job, int]], limit: int) -> bool:
        """Match, and join the batch if there is room; the last to join may be cut to a chunk."""
        server = self.server
        if job.req is None:
            job.req = server.request(job.name, job.tokens)
            self.jobs[job.name] = job
        self.act("match", lambda: server.match(job.req))
        self.check_match(job)
        count = server.plan(job.req, len(job.tokens))
        if count > limit:
            if self.chunked is not None:
                return False  # one chunked request at a time
            count = server.plan(job.req, limit // self.page * self.page)
        lock = server.hold(job.req)
        room = self.fits([c for _, c in batch] + [count])
        server.let_go(lock)
        if not room or count <= 0:
            return False
        server.lock(job.req)
        batch.append((job, count))
        return True

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether a batch can be allocated, once the tree has given what it can.

        Up to 0.5.21 an allocation that does not fit reads past the free list, so nobody may try.
        """
        need = sum(counts) + self.page * len(counts)
        self.act("make room", lambda: self.server.release.make_room(self.server.tree, need))
        return self.server.room() >= need

    def after_prefill(self, job: Job) -> None:
        whole = self.server.allocated(job.req) == len(job.tokens)
        if not whole:
            self.chunked = job
            self.act("cache chunk", lambda: self.server.cache_unfinished(job.req, chunked=True))
            self.seen["chunks"] += 1
            return
        if self.chunked is job:
            self.chunked = None
        self.running.append(job)
        self.sample(job)
        if job in self.running:
            self.act("cache prompt", lambda: self.server.cache_unfinished(job.req, chunked=False))

    def decode(self) -> None:
        """Some decode steps of all that runs; whoever finds no room is retracted."""
        most = {1: 8, 4: 12, 64: 40}[self.page]
        for _ in range(self.dice.randint(1, most)):
            while self.running and not self.fits([0] * len(self.running)):
                self.retract()
            if not self.running:
                return
            batch = list(self.running)
            self.act("decode", lambda: self.server.decode([job.req for job in batch]))  # noqa: B023
            self.forward([(job, 1) for job in batch])
            for job in batch:
                self.sample(job)

    def sample(self, job: Job) -> None:
        """The next token, mostly a function of the prefix: equal requests go on equally."""
        last = int(job.grow()[-1])
        token = last % 2 if self.dice.random() < 0.97 else self.dice.randrange(2)
        job.tokens.append(token)
        job.req.output_ids.append(token)
        job.output -= 1
        if job.output <= 0:
            self.running.remove(job)
            self.remember(job)
            self.act("finish", lambda: self.server.finish(job.req))

    def remember(self, job: Job) -> None:
        self.past = [*self.past[-11:], list(job.tokens)]

    def retract(self) -> None:
        if not self.running:
            return
        index = self.dice.randrange(len(self.running))
        reqs = [job.req for job in self.running]
        job = self.running.pop(index)
        self.act("retract", lambda: self.server.retract(reqs, index))
        if len(job.tokens) < 6 * max(self.page, 4):
            self.waiting.append(job)

    def abort_chunked(self) -> None:
        if self.chunked is not None:
            job, self.chunked = self.chunked, None
            self.act("abort", lambda: self.server.abort(job.req))

    def evict(self) -> None:
        full, window = (self.dice.randrange(6) * self.page for _ in range(2))
        self.act("evict", lambda: self.server.evict(full, window))

    def think(self) -> None:
        """A waiting request is matched and its prefix locked for a while; it does not run."""
        if len(self.held) >= 2:
            return
        job = self.newcomer()
        job.req = self.server.request(job.name, job.tokens)
        self.act("match", lambda: self.server.match(job.req))
        self.check_match(job)
        self.act("lock", lambda: self.held.append(self.server.hold(job.req)))

    def stop_thinking(self) -> None:
        if self.held:
            held = self.held.pop(self.dice.randrange(len(self.held)))
            self.act("unlock", lambda: self.server.let_go(held))

    def drain(self) -> None:
        """Everything ends; the idle tree is looked at, and perhaps flushed."""
        self.abort_chunked()
        while self.held:
            self.stop_thinking()
        for job in list(self.running):
            job.output = 1
            self.running.remove(job)
            self.remember(job)
            self.act("finish", lambda: self.server.finish(job.req))  # noqa: B023
        try:
            self.server.tree.sanity_check()
        except Exception as error:
            self.found("tree", str(error))
        self.look()
        self.seen["idle"] += 1
        if self.dice.random() < 0.3:
            self.act("flush", self.server.flush)
            self.past.clear()

    # --- what must hold ------------------------------------------------------------------------

    def found(self, by: str, what: str) -> None:
        """Raise a finding; in a mutation that only the guard may see, hold our tongue."""
        if by == "guard" or not self.only_guard:
            raise Finding(by, what)

    def act(self, what: str, operation: Callable[[], Any]) -> None:
        """One operation, and what must hold after it."""
        self.seen[what] += 1
        with acting_for(f"{what} {len(self.steps)}"):
            operation()
        if self.reports:
            self.found("guard", f"in {what}: {self.reports[0]}")
        self.look_at_prefixes(what)
        if self.setting.look_always or self.dice.random() < 0.1:
            self.look(what)

    def look_at_prefixes(self, what: str) -> None:
        """What a request with a row has from the tree is the tree's still."""
        tree = self.server.tree_slots()
        for job in self.jobs.values():
            if scheduling.field(job.req, "req_pool_idx") is None:
                job.bereft = False
                continue
            own = self.server.row(job.req)[: self.server.protected(job.req)]
            if job.bereft or bool(torch.isin(own, tree).all()):
                continue
            if running_version() not in REPLACES_LOCKED_PREFIXES:
                self.found("audit", f"after {what}: {job.name} reads a prefix that was let go")
            # An upstream fault, not ours to judge here: this row's reads do not count any more.
            job.bereft = True
            self.seen["#29352"] += 1

    def look(self, what: str = "idle") -> None:
        server, allocator = self.server, self.allocator
        pools.settle(allocator)
        if self.reports:
            self.found("guard", f"after {what}: {self.reports[0]}")
        tree = server.tree_slots()
        books: Books = {"the tree": tree}
        rows = []
        for job in self.jobs.values():
            if scheduling.field(job.req, "req_pool_idx") is not None:
                row = server.row(job.req)
                rows.append(row)
                own = books[job.name] = row[server.protected(job.req) :]
                self.seen["slid"] += int((allocator.full_to_swa_index_mapping[own] == 0).sum())
        faults = audit(_for_audit(allocator), books)
        mapped = int((allocator.full_to_swa_index_mapping[tree] > 0).sum())
        kept, cache = len(tree), server.tree
        for side, count, size in (
            ("full", kept, cache.full_evictable_size() + cache.full_protected_size()),
            ("window", mapped, cache.swa_evictable_size() + cache.swa_protected_size()),
        ):
            if count != size:
                faults.append(f"{side}: the tree counts {size} slots and holds {count}")
        if faults:
            self.found("audit", f"after {what}: {'; '.join(faults)}")
        self.seen["tombstones"] += kept - mapped
        self.seen["looks"] += 1
        digest = hashlib.sha256(fingerprint(allocator).encode())
        # The rust tree lists its nodes in no particular order.
        for slots in (tree.sort().values, *rows):
            digest.update(slots.numpy().tobytes() + b"|")
        sizes = (kept, mapped, server.room(), *map(len, rows))
        self.steps.append(Step(what, digest.hexdigest(), sizes))

    def check_match(self, job: Job) -> None:
        """The match rule: all of a hit is what this request would have computed."""
        slots = self.server.prefix(job.req).to(torch.int64)
        self.seen["hit tokens"] += len(slots)
        self.read(job, slots, len(slots), "hit")
        self.steps.append(Step("match", str(slots.tolist()), (len(slots),)))

    def forward(self, batch: list[tuple[Job, int]]) -> None:
        """What a model does: writes the KV of the new tokens of all, then reads."""
        translate = self.allocator.translate_loc_from_full_to_swa
        for job, count in batch:
            row = self.server.row(job.req)
            new, meaning = row[-count:], job.grow()[len(row) - count : len(row)]
            window = translate(new).to(torch.int64)
            if bool((window < self.page).any()):
                self.found("kv", f"{job.name} has new tokens without a window slot")
            self.full_kv[new] = meaning
            self.window_kv[window] = meaning
        for job, count in batch:
            row = self.server.row(job.req)
            self.read(job, row, len(row) - count, "row")

    def read(self, job: Job, row: torch.Tensor, start: int, what: str) -> None:
        """Full attention reads all of ``row``, window attention W tokens before ``start``, and on."""
        meaning = job.grow()[: len(row)]
        known = self.server.protected(job.req) if job.bereft else 0
        if not torch.equal(self.full_kv[row[known:]], meaning[known:]):
            self.found("kv", f"full KV in the {what} of {job.name} is of something else")
        first = max(0, start - self.setting.window)
        # Some attention backends translate the window, some a request's whole row.
        skipped = first if self.dice.random() < 0.5 else 0
        window = self.allocator.translate_loc_from_full_to_swa(row[skipped:])
        window = window[first - skipped :].to(torch.int64)
        if bool((window < self.page).any()):
            self.found("kv", f"the window of the {what} of {job.name} has tokens without slot")
        if not torch.equal(self.window_kv[window], meaning[first:]):
            self.found("kv", f"window KV in the {what} of {job.name} is of something else")


# --- one illegal thing each; True once it was done --------------------------------------------------


def _free_twice(drive: Drive) -> bool:
    """The own slots of a running request are freed behind it, which will free them again.

    By then they may be somebody else's, and what the request does is nothing but a free by its owner
    to whoever sees only indices; so the guard alone need not find it.
    """
    for job in drive.running:
        own = drive.server.row(job.req)[drive.server.protected(job.req) :]
        if len(own):
            drive.allocator.free(own.clone())
            return True
    return False


def _free_again(drive: Drive) -> bool:
    """A request is retracted, and what it gave back is given back once more."""
    for index, job in enumerate(drive.running):
        own = drive.server.row(job.req)[drive.server.protected(job.req) :].clone()
        if len(own) >= drive.page:
            reqs = [job.req for job in drive.running]
            drive.running.pop(index)
            drive.act("retract", lambda: drive.server.retract(reqs, index))  # noqa: B023
            drive.allocator.free(own)
            return True
    return False


def _free_locked(drive: Drive) -> bool:
    """Slots of the tree that a running request reads are freed."""
    for job in drive.running:
        protected = drive.server.protected(job.req)
        if protected:
            drive.allocator.free(drive.server.row(job.req)[:protected].clone())
            return True
    return False


def _free_window_of_hit(drive: Drive) -> bool:
    """The window slots of a tree node are freed behind the tree: a pseudo-hit (C14)."""
    for job in drive.running:
        protected = drive.server.protected(job.req)
        row = drive.server.row(job.req)[:protected]
        if protected and bool(drive.allocator.full_to_swa_index_mapping[row[-1]] > 0):
            drive.allocator.free_swa(row[-drive.page :].clone())
            return True
    return False


def _lose(drive: Drive) -> bool:
    """Pages are allocated and forgotten."""
    if drive.server.room() < 2 * drive.page:
        return False
    return pools.extend(drive.allocator, drive.page) is not None


def _unlock(drive: Drive) -> bool:
    """A lock is given back twice, and the tree lets go of what a request reads."""
    for job in drive.running:
        if drive.server.protected(job.req):
            tree = drive.server.tree
            if hasattr(tree, "unlock"):
                tree.unlock(job.req.lock)
            else:
                parameters = drive.server.release.base.DecLockRefParams
                lock = parameters(swa_uuid_for_lock=job.req.swa_uuid_for_lock)
                tree.dec_lock_ref(job.req.last_node, lock)
            drive.server.evict(1 << 20, 1 << 20)
            return True
    return False


BREAKS: dict[str, Callable[[Drive], bool]] = {
    "free again": _free_again,
    "free twice": _free_twice,
    "free locked": _free_locked,
    "free window": _free_window_of_hit,
    "lose": _lose,
    "unlock": _unlock,
}


# --- examples ---------------------------------------------------------------------------------------


@dataclass
class Result:
    """How one example went in one mode."""

    steps: list[Step]
    failure: str = ""
    by: str = ""


def example(
    release: scheduling.Release,
    mode: str | None,
    setting: Setting,
    seed: int,
    steps: int,
    seen: Counter[str],
    breaking: Callable[[Drive], bool] | None = None,
    *,
    only_guard: bool = False,
) -> Result:
    """Run one example, in a mode or (None) without the guard."""
    _known.clear()  # what earlier examples left unchecked is no concern of this one
    uninstall()
    reports: list[Violation] = []
    if mode is not None:
        install(mode, on_report=reports.append)
    drive = Drive(release, setting, seed, seen)
    drive.reports, drive.only_guard = reports, only_guard
    try:
        drive.run(steps, breaking)
        if mode is not None:
            guard = guard_of(drive.allocator)
            seen["guarded operations"] += guard.tally.operations
            seen["not seen as the tree's"] += guard.windows_betrayed
            if guard.tally.total or reports:
                raise Finding("guard", f"at the end: {guard.tally.violations}")
        return Result(drive.steps)
    except (Finding, GuardViolation) as error:
        by = error.by if isinstance(error, Finding) else "guard"
        return Result(drive.steps, "".join(traceback.format_exception(error))[-6000:], by)
    except NothingBroken:
        return Result(drive.steps, "nothing was broken")
    except Exception as error:  # an assertion of the release, or its out-of-memory error
        return Result(drive.steps, "".join(traceback.format_exception(error))[-6000:], "release")


def differs(bare: Result, guarded: Result, mode: str) -> str:
    """Where a guarded run left the course of the bare one; empty if nowhere."""
    for number, (one, other) in enumerate(zip(bare.steps, guarded.steps, strict=False)):
        if one.what != other.what or one.sizes != other.sizes:
            return f"{mode}: look {number} after {one.what}: {one.sizes} became {other.sizes}"
        if mode == "observe" and one.exact != other.exact:
            return f"observe: look {number} after {one.what}: the state is another"
    if len(bare.steps) != len(guarded.steps):
        return f"{mode}: {len(bare.steps)} looks became {len(guarded.steps)}"
    return ""


def series(
    release: scheduling.Release,
    tree: str,
    page_size: int,
    modes: Sequence[str],
    seeds: Sequence[int],
    steps: int,
) -> list[dict[str, Any]]:
    """Examples of one tree and page size; one row a mode, with the first failure in full."""
    seen: dict[str, Counter[str]] = {mode: Counter() for mode in modes}
    failures: dict[str, str] = dict.fromkeys(modes, "")
    spent: Counter[str] = Counter()
    for seed in seeds:
        setting = Setting.draw(seed, tree, page_size, release.options())
        where = f"seed {seed}, {setting}"
        bare = example(release, None, setting, seed, steps, Counter())
        for mode in modes:
            started = time.perf_counter()
            result = example(release, mode, setting, seed, steps, seen[mode])
            spent[mode] += time.perf_counter() - started  # type: ignore[assignment]
            if bare.failure and result.by != "guard":
                # Not the guard's doing: the release alone fails too, and so must the guarded one.
                failure = f"unguarded, {bare.failure}"
            else:
                failure = result.failure or differs(bare, result, mode)
            if failure:
                failures[mode] = failures[mode] or f"{where}\n{failure}"
                seen[mode]["failed"] += 1
            seen[mode]["examples"] += 1
    return [
        {
            "version": running_version(),
            "tree": tree,
            "page_size": page_size,
            "mode": mode,
            "failure": failures[mode],
            "seconds": round(spent[mode], 1),
            "seen": dict(seen[mode]),
        }
        for mode in modes
    ]


def broken(
    release: scheduling.Release, tree: str, page_size: int, steps: int
) -> list[dict[str, Any]]:
    """What becomes of a drive in which one illegal thing is done: who finds it, in each mode.

    ``alone`` is who does when audit, shadow and sanity check are not asked.
    """
    rows = []
    setting = Setting.draw(0, tree, page_size, release.options())
    for name, breaking in BREAKS.items():
        for mode in (None, *MODES):
            result, alone = (
                example(release, mode, setting, 0, steps, Counter(), breaking, only_guard=only)
                for only in (False, True)
            )
            rows.append(
                {
                    "version": running_version(),
                    "tree": tree,
                    "page_size": page_size,
                    "broken": name,
                    "mode": mode or "off",
                    "by": result.by,
                    "alone": alone.by,
                    "failure": result.failure[-300:],
                    "alone said": alone.failure[-600:],
                }
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--tree", nargs="*", help="of legacy, unified, unified-rust")
    parser.add_argument("--page-size", nargs="*", type=int, default=list(PAGE_SIZES))
    parser.add_argument("--examples", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first example")
    parser.add_argument("--seconds", type=float, help="go on with new seeds for so long")
    parser.add_argument(
        "--break", dest="breaks", nargs="*", type=int, default=[], help="page sizes for mutations"
    )
    options = parser.parse_args(arguments)
    driver.prepare()
    release = scheduling.Release()
    wrong = 0
    started, first = time.perf_counter(), options.seed
    while True:
        for tree in options.tree or scheduling.trees():
            for size in options.page_size:
                seeds = range(first, first + options.examples)
                for row in series(release, tree, size, options.mode, seeds, options.steps):
                    print(json.dumps(row), flush=True)
                    wrong += bool(row["failure"])
        first += options.examples
        if options.seconds is None or time.perf_counter() - started > options.seconds:
            break
    for tree in options.tree or scheduling.trees():
        for size in options.breaks:
            for row in broken(release, tree, size, 2 * options.steps):
                print(json.dumps(row), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
