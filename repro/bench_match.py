"""Paired timing of prefix matches, with the guard and without, on the trees of a release.

A tree holds ``cached`` tokens in conversations that share their first half. Requests wait that
continue them, each of another conversation as far as there are so many; each finds ``hit`` tokens.
They are matched one after the other, as SGLang's schedule policy does with its queue:

    match      ``tree.match_prefix`` alone, with the parameters that the scheduler passes
    schedule   ``Req.init_next_round_input``, and where a release reads the slots of the prefix
               separately (since 0.5.22), that too
    insert     ``tree.insert`` of a conversation of its own, for comparison

How a path lies in the tree decides what has to be looked at, so there are several (``PATHS``).
Slots are not in the order of the tokens, but in blocks of ``BLOCK``, as in a server that has run
for a while. Trees are built, and requests made, outside the timing.

Rounds alternate between the modes, as in ``paired``. Since a match takes microseconds, and other
work on the machine only ever adds to that, a cell is the least of the medians of its rounds'
thirds; a case with a ratio above ``--suspect`` is measured again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from hicache_guard.adapters.allocator import guard_of
from hicache_guard.repro import paired, pools, scheduling

#: Those that are bounded; strict looks at every slot, and says so.
MODES = ("observe", "enforce")
PAGE_SIZES = (1, 64)
CACHED = (1 << 10, 1 << 13, 1 << 16, 1 << 20)
HITS = (1 << 10, 1 << 13, 1 << 15, 1 << 17)
BATCHES, USUAL_BATCH = (1, 16, 256), 16
WINDOW = 128
BLOCK = 64
#: Tokens by which a conversation of turns grows, and how many turns it has at most.
TURN, TURNS = 64, 64
#: Fewest matches in a sample, so that a batch of one is no single call.
CALLS = 8
#: Seconds after which a cell has seen enough, once it has ``FEWEST`` rounds.
SECONDS, FEWEST = 4.0, 6
#: How often a suspicious case is measured again.
AGAIN = 4
#: Rounds at the start that are not counted.
_WARMING = 2
#: Paths that are split in every round, and how far from their end at first: a tree keeps the last
#: window of what it takes over in a node of its own.
_FROM_END = {"inside": 2 * WINDOW, "edge": 0}
#: The least hit that has enough to split, and for how many rounds.
LEAST_SPLIT, MOST_SPLITS = 1 << 13, 25
#: Bytes of the largest block by which glibc still learns; see ``_as_a_server_allocates``.
LARGE = (32 << 20) - (1 << 16)
#: Hits of a quick run.
QUICK = (1 << 10, 1 << 13)

#: What a hit ends in.
PATHS = {
    "node": "the end of a node that holds the window",
    "inside": "the inside of a long node, which the match has to split: each time anew",
    "edge": "as inside, of the last node: the window is what is left of it and the node before",
    "turns": "a chain of nodes shorter than the window: a conversation that grew turn by turn",
    "gap": "a long node after one whose window KV is gone: a conversation whose window slid",
}

Seconds = dict[str, float]


@dataclass(frozen=True)
class Case:
    """One tree, and what is matched in it."""

    tree: str
    page_size: int
    path: str
    cached: int
    hit: int


class _Caught(Exception):
    """A match was about to be made with these parameters."""


class Forest:
    """One server whose tree is as a case says, and the requests that wait in front of it."""

    def __init__(self, release: scheduling.Release, case: Case) -> None:
        self.case = case
        page = case.page_size
        pages = case.cached // page + 8
        self.server = scheduling.Server(
            release, case.tree, page_size=page, window=WINDOW,
            full_pages=pages, window_pages=pages, longest=page, rows=1,
        )  # fmt: skip
        # Where the next match splits a conversation, in tokens before its end.
        self._splits: dict[int, int] = defaultdict(lambda: _FROM_END.get(case.path, 0))
        self.slots = _scattered(pools.extend_surely(self.server.allocator, case.cached), page)
        self.conversations = _conversations(case)
        shared = case.hit // 2
        prefix = self.slots[:shared]
        own = self.slots[shared:].view(-1, case.hit - shared)
        for tokens, slots in zip(self.conversations, own, strict=True):
            self._grow(tokens, torch.cat((prefix, slots)), shared)

    def _grow(self, tokens: list[int], row: torch.Tensor, shared: int) -> None:
        """Bring a conversation into the tree, whose first ``shared`` tokens all have in common."""
        hit, path = self.case.hit, self.case.path
        if tokens is self.conversations[0]:
            self._insert(tokens[:shared], row[:shared], start=0)
        if path == "gap":
            evicted = shared + (hit - shared) // 2
            _slide(self.server.allocator, row, shared, evicted)
            self._insert(tokens, row, start=shared, evicted=evicted)
            return
        ends = [hit]
        if path == "turns":
            ends = list(range(max(shared, hit - TURN * TURNS) + TURN, hit + 1, TURN))
        for before, end in zip([shared, *ends], ends, strict=False):
            self._insert(tokens[:end], row[:end], start=before)

    def _insert(
        self, tokens: Sequence[int], row: torch.Tensor, *, start: int, evicted: int = 0
    ) -> None:
        params = insertion(self.server, tokens, row, start=start, evicted=evicted)
        self.server.tree.insert(params)

    def waiting(self, batch: int) -> list[Any]:
        """Requests that were not matched yet; the next ones split other nodes than these."""
        lengths = []
        for index in range(batch):
            length = self.case.hit
            if self.case.path in _FROM_END:
                # Who comes second to a conversation finds the node split; so did a release.
                if index < len(self.conversations):
                    self._splits[index] += self.case.page_size
                length -= self._splits[index % len(self.conversations)]
            lengths.append(length)
        return [
            self.server.request(str(index), [*tokens[:length], *[-1] * (self.case.page_size + 1)])
            for index, (tokens, length) in enumerate(zip(self._turn(), lengths, strict=False))
        ]

    def _turn(self) -> Iterator[list[int]]:
        while True:
            yield from self.conversations

    def parameters(self, req: Any) -> Any:
        """What the scheduler would pass to ``match_prefix`` for a request."""

        def catch(params: Any) -> None:
            raise _Caught(params)

        vars(self.server.tree)["match_prefix"] = catch
        try:
            self.server.match(req)
        except _Caught as caught:
            return caught.args[0]
        finally:
            del vars(self.server.tree)["match_prefix"]
        raise AssertionError("the scheduler made no match")

    def check(self) -> None:
        """Make sure that what is measured is a hit as the case says."""
        for req in self.waiting(2):
            self.server.match(req)
            found, case = self.server.prefix_length(req), self.case
            wanted = case.hit - max(self._splits.values(), default=0)
            assert found == wanted, f"{case}: a hit of {found} tokens"

    def sampler(self, batch: int) -> Callable[[], Seconds]:
        """What takes one sample: the seconds of a match, bare and as the scheduler makes it."""
        server = self.server
        separate = hasattr(server.request("probe", [1]), "prefix_len")

        def bare(match: Callable[[Any], Any], queue: Iterable[Any]) -> float:
            start = time.perf_counter()
            for params in queue:
                match(params)
            return time.perf_counter() - start

        def scheduled(queue: Iterable[Any]) -> float:
            start = time.perf_counter()
            for req in queue:
                server.match(req)
                if separate:
                    server.prefix(req)
            return time.perf_counter() - start

        # Hooks were put in or taken out just before; what that costs is no part of a match.
        shared = self.conversations[0][: self.case.hit // 2]
        first = self.parameters(server.request("first", [*shared, *[-1] * server.page_size]))
        once = self.case.path in _FROM_END
        times = 1 if once else -(-CALLS // batch)
        waiting = self.waiting(batch) * times
        queue = [] if once else [self.parameters(req) for req in waiting]

        def sample() -> Seconds:
            reqs, params = waiting, queue
            if once:
                params = [self.parameters(req) for req in self.waiting(batch)]
                reqs = self.waiting(batch)
            bare(server.tree.match_prefix, [first])
            return {
                "match": bare(server.tree.match_prefix, params) / len(params),
                "schedule": scheduled(reqs) / len(reqs),
            }

        return sample


class Nursery:
    """A server whose tree is empty before each sample: insertion of one conversation."""

    def __init__(self, release: scheduling.Release, case: Case) -> None:
        self.case = case
        pages = case.hit // case.page_size + 8
        self.server = scheduling.Server(
            release, case.tree, page_size=case.page_size, window=WINDOW,
            full_pages=pages, window_pages=pages, longest=case.page_size, rows=1,
        )  # fmt: skip
        self.tokens = [*range(case.hit)]

    def sample(self) -> Seconds:
        """The seconds of one insertion."""
        self.server.flush()
        row = pools.extend_surely(self.server.allocator, self.case.hit)
        params = insertion(self.server, self.tokens, row, start=0, evicted=0)
        tree = self.server.tree
        start = time.perf_counter()
        tree.insert(params)
        return {"insert": time.perf_counter() - start}


def _conversations(case: Case) -> list[list[int]]:
    """The tokens of each conversation: half of them shared, as many as make up the tree."""
    dice = random.Random(case.hit)
    shared = [dice.randrange(100_000) for _ in range(case.hit // 2)]
    own = case.hit - len(shared)
    count = (case.cached - len(shared)) // own
    assert len(shared) + count * own == case.cached, f"{case}: sizes do not fit"
    body = [dice.randrange(100_000) for _ in range(own)]
    # Told apart by their first token; the rest may be the same, and costs no time to make.
    return [[*shared, 100_000 + number, *body[1:]] for number in range(count)]


def _scattered(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """The slots of whole blocks, the blocks in random order."""
    blocks = slots.view(-1, max(BLOCK, page_size))
    order = torch.randperm(blocks.shape[0], generator=torch.Generator().manual_seed(7))
    return blocks[order].reshape(-1)


def _slide(allocator: Any, row: torch.Tensor, start: int, end: int) -> None:
    """The window of a request slid over ``row[start:end]``."""
    if hasattr(allocator, "free_swa_segment"):
        allocator.free_swa_segment(row[start:end], start_pos=start)
    else:
        allocator.free_swa(row[start:end])
    pools.settle(allocator)


def insertion(
    server: scheduling.Server, tokens: Sequence[int], row: torch.Tensor, *, start: int, evicted: int
) -> Any:
    """What ``tree.insert`` takes for a row whose first ``start`` tokens are the tree's already."""
    ids = server.request("insertion", tokens).origin_input_ids
    params = server.release.base.InsertParams(
        key=server.release.key(ids, None), value=row, prev_prefix_len=start
    )
    if hasattr(params, "swa_evicted_seqlen"):
        params.swa_evicted_seqlen = evicted
    else:
        params.set_evicted_seqlen(server.release.base.ComponentType.SWA, evicted)
    return params


def cases(trees: Sequence[str], *, quick: bool) -> list[Case]:
    """What is measured: every size of tree with the plainest path, one size with the others."""
    found = []
    for tree in trees:
        for page_size in PAGE_SIZES:
            for hit in QUICK if quick else HITS:
                sizes = [cached for cached in CACHED if cached >= hit]
                # The least with several conversations.
                usual = next((cached for cached in sizes if cached > hit), sizes[-1])
                for path in PATHS:
                    if path in _FROM_END and hit < LEAST_SPLIT:
                        continue  # it would be used up
                    if path == "edge" and page_size > 1:
                        continue  # there is hardly a place inside the last node
                    for cached in sizes if path == "node" and not quick else [usual]:
                        found.append(Case(tree, page_size, path, cached, hit))
    return found


def insertions(trees: Sequence[str], *, quick: bool) -> list[Case]:
    """The insertions that are measured: of a conversation as long as each hit, in one piece."""
    return [
        Case(tree, page_size, "insert", 0, hit)
        for tree in trees
        for page_size in PAGE_SIZES
        for hit in (QUICK if quick else HITS)
    ]


#: Seconds by mode and by what was timed, and that by batch.
Times = dict[tuple[str, str], float]
Cells = dict[int, Times]


def _measured(samplers: dict[str, Callable[[], Seconds]], rounds: int) -> Times:
    """The seconds of one cell, by mode and by what was timed."""
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    begun = time.perf_counter()
    gc.collect()
    gc.disable()
    for round_ in range(rounds + _WARMING):
        if round_ >= FEWEST + _WARMING and time.perf_counter() - begun > SECONDS:
            break
        for mode, sample in samplers.items():
            paired.hooks(mode)
            spent = sample()
            if round_ >= _WARMING:
                for what, seconds in spent.items():
                    taken[mode, what].append(seconds)
    gc.enable()
    return {key: _least(seconds) for key, seconds in taken.items()}


def _least(seconds: list[float]) -> float:
    """The least of the medians of thirds."""
    third = -(-len(seconds) // 3)
    return min(statistics.median(seconds[at : at + third]) for at in range(0, len(seconds), third))


def _guarded(servers: Iterable[scheduling.Server]) -> None:
    """Make sure that the guard looked, and found nothing."""
    for server in servers:
        tally = guard_of(server.allocator).tally
        assert not tally.total, f"false alarm while measuring: {tally.violations}"


def _matches(release: scheduling.Release, case: Case, rounds: int, batches: Sequence[int]) -> Cells:
    forests = {}
    for mode in ("off", *MODES):
        paired.hooks(mode)
        forests[mode] = Forest(release, case)
        forests[mode].check()
    if case.path in _FROM_END:
        rounds = min(rounds, MOST_SPLITS)
    cells = {}
    for batch in batches:
        samplers = {}
        for mode, forest in forests.items():
            paired.hooks(mode)
            samplers[mode] = forest.sampler(batch)
        cells[batch] = _measured(samplers, rounds)
    _guarded(forests[mode].server for mode in MODES)
    return cells


def _insertions(release: scheduling.Release, case: Case, rounds: int) -> Cells:
    nurseries = {}
    for mode in ("off", *MODES):
        paired.hooks(mode)
        nurseries[mode] = Nursery(release, case)
    found = _measured({mode: each.sample for mode, each in nurseries.items()}, rounds)
    _guarded(nurseries[mode].server for mode in MODES)
    return {1: found}


def _settled(measure: Callable[[], Cells], suspect: float) -> Cells:
    """Measure once, and where a ratio exceeds ``suspect`` anew on trees built anew.

    Of each time the least counts, guarded or not: where in memory a tree happens to lie can make
    one mode slow for as long as it lives.
    """
    least = measure()
    for _ in range(AGAIN):
        if all(row["ratio"] <= suspect for cell in least.values() for row in _rows(cell)):
            break
        for batch, cell in measure().items():
            least[batch] = {key: min(least[batch][key], cell[key]) for key in cell}
    return least


def _rows(cell: Times) -> list[dict[str, Any]]:
    """For each mode and what was timed, both times and their ratio."""
    return [
        {
            "what": what,
            "mode": mode,
            "unguarded_us": cell["off", what] * 1e6,
            "guarded_us": seconds * 1e6,
            "ratio": seconds / cell["off", what],
        }
        for (mode, what), seconds in cell.items()
        if mode != "off"
    ]


def _as_a_server_allocates() -> None:
    """Free a large block, after which glibc keeps the memory of smaller ones.

    Before that, whether lists and tensors of a match go back to the system each time depends on
    where the heap happens to end: a match takes 90 or 500 microseconds, in any mode.
    """
    torch.ones(LARGE, dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one size of tree, one batch")
    parser.add_argument("--suspect", type=float, default=math.inf, help="ratios measured again")
    options = parser.parse_args()
    pools.quiet()
    torch.set_num_threads(1)
    _as_a_server_allocates()
    release = scheduling.Release()
    trees, times = scheduling.trees(), []
    for case in cases(trees, quick=options.quick):
        print(case, file=sys.stderr)
        batches = BATCHES if case.path == "node" and not options.quick else (USUAL_BATCH,)
        measure = partial(_matches, release, case, options.rounds, batches)
        for batch, cell in _settled(measure, options.suspect).items():
            times += [{**asdict(case), "batch": batch, **row} for row in _rows(cell)]
    for case in insertions(trees, quick=options.quick):
        for cell in _insertions(release, case, options.rounds).values():
            times += [{**asdict(case), "batch": 1, **row} for row in _rows(cell)]
    device = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    print(json.dumps({"device": device, "times": times}))


if __name__ == "__main__":
    main()
