"""Pseudo-hits on the release on the path, step by step: matched, clipped, and computed again.

Each scene makes KV of a cached prefix somebody else's, and asks for the prefix again. A shadow of
what every slot holds (``trees.Drive``) says whether what is read is what was written for these
tokens; the length that a clip must have is known in closed form. Unguarded, the scene must end in a
read of foreign KV; in enforce the request must come to its right end, by the right length, and so
must the same request once more; in strict the match must raise; in observe all is as unguarded.

Prints one JSON line a scene, tree and mode. Run: ``python -P pseudo_hits.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from hicache_guard.adapters import recorder, tree_link
from hicache_guard.adapters.hooks import install, running_version, uninstall
from hicache_guard.core import compiled
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.report import Violation
from hicache_guard.repro import pools, scheduling
from real import driver, trees

PAGE, WINDOW = 4, 8


class Play:
    """A server and a shadow of its KV, driven one request at a time."""

    def __init__(self, release: scheduling.Release, tree: str) -> None:
        # Window KV is kept for all that is cached, so that there is something to clip to.
        kept = dict.fromkeys(("SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS",), False)
        options = {name: kept[name] for name in release.options() if name in kept}
        setting = trees.Setting(tree, PAGE, WINDOW, 40, 24, options, look_always=True)
        self.drive = trees.Drive(release, setting, 0, Counter())
        self.server = self.drive.server
        self.allocator = self.server.allocator
        self.lengths: list[int] = []
        self.count = 0

    def ask(
        self, tokens: list[int], output: int = 3, *, chunk: int = 1 << 20, session: Any = None
    ) -> trees.Job:
        """A request from its match to its end; its reads are compared with what was written."""
        self.count += 1
        job = trees.Job(f"R{self.count}", list(tokens), output)
        server = self.server
        job.req = server.request(job.name, job.tokens)
        self.drive.jobs[job.name] = job
        if session is not None:
            job.req.session = session
        server.match(job.req)
        has_row = scheduling.field(job.req, "req_pool_idx") is not None
        length = server.prefix_length(job.req)
        held = server.row(job.req)[:length] if has_row else server.prefix(job.req)
        self.lengths.append(length)
        self.drive.read(job, held.to(torch.int64), length, "hit")
        server.lock(job.req)
        while True:
            count = min(server.plan(job.req, chunk), chunk)
            server.extend([job.req], [count])
            self.drive.forward([(job, count)])
            chunked = server.allocated(job.req) < len(tokens)
            server.cache_unfinished(job.req, chunked=chunked)
            if not chunked:
                break
            server.next_chunk(job.req)
        for number in range(output):
            job.tokens.append(100 + number)
            job.req.output_ids.append(100 + number)
            if number < output - 1:
                server.decode([job.req])
                self.drive.forward([(job, 1)])
        server.finish(job.req)
        del self.drive.jobs[job.name]
        return job

    def cached(self, tokens: list[int]) -> torch.Tensor:
        """The full slots that the tree has for ``tokens``, found without the guard's hooks."""
        slots = self.server.tree_slots()
        wanted = trees.Job("", list(tokens), 0).grow()
        found = [slots[self.drive.full_kv[slots] == prefix][0] for prefix in wanted]
        return torch.stack(found)

    def newcomer(self, count: int) -> torch.Tensor:
        """Somebody takes ``count`` slots, and fills them with KV of its own."""
        slots = pools.extend(self.allocator, count)
        assert slots is not None
        self.drive.full_kv[slots] = -5
        self.drive.window_kv[self.allocator.translate_loc_from_full_to_swa(slots)] = -5
        return slots


PROMPT = list(range(1, 33))


@dataclass(frozen=True)
class Scene:
    """``spoil`` takes KV away; the match that follows may then be ``clip`` tokens long."""

    spoil: Callable[[Play], None]
    clip: int
    tell: Callable[[Play, Scene], None]


def _window_tail(play: Play) -> None:
    """The window slots of the last 8 of 32 cached tokens go to somebody else."""
    play.allocator.free_swa(play.cached(PROMPT)[24:].clone())
    play.newcomer(8)


def _window_middle(play: Play) -> None:
    """Those of tokens 16 to 19: the tail after them is whole."""
    play.allocator.free_swa(play.cached(PROMPT)[16:20].clone())
    play.newcomer(4)


def _full_page(play: Play) -> None:
    """A page in the middle is freed on both sides, and recycled. (The guard does not free it.)"""
    play.allocator.free(play.cached(PROMPT)[8:12].clone())
    play.newcomer(4)


def _full_page_unseen(play: Play) -> None:
    """As before, by a hand in the free list that no hook sees."""
    pool = play.allocator.full_attn_allocator
    page = play.cached(PROMPT)[8:9] // PAGE
    pool.free_pages = torch.cat([page.to(pool.free_pages.dtype), pool.free_pages])
    play.newcomer(4)


def _matches(play: Play, scene: Scene) -> None:
    play.ask(PROMPT)
    scene.spoil(play)
    play.ask(PROMPT)
    play.ask(PROMPT)
    play.ask(PROMPT + [7] * 5, chunk=2 * PAGE)


def _session(play: Play, scene: Scene) -> None:
    """The turns of a streaming session, whose row is lent again: 34 tokens, 32 of them the tree's."""
    session = SimpleNamespace(
        session_id="s", streaming=True, finish_req=lambda req: None, abort_req=lambda: None
    )
    first = play.ask(PROMPT, session=session)
    slot = play.server.tree.session.slots["s"]
    record = slot if hasattr(slot, "kv_committed_len") else slot.kv
    row = play.server.rows.req_to_token[record.req_pool_idx][: record.kv_committed_len]
    play.allocator.free_swa(row[32:].to(torch.int64))
    play.newcomer(4)
    play.ask([*first.tokens, 5, 6, 7], session=session)


#: A match leaves the last token to be computed, so of 32 cached tokens 28 are asked for.
SCENES = {
    # 28 need window KV for 20 to 27, of which 24 to 27 are gone; so do 20 to 26.
    "window tail recycled": Scene(_window_tail, 24, _matches),
    # Nothing that the last 8 tokens before 28 need is gone.
    "window middle recycled": Scene(_window_middle, 28, _matches),
    "full page recycled": Scene(_full_page, 28, _matches),
    "full page recycled unseen": Scene(_full_page_unseen, 8, _matches),
    # The row cannot be lent; the tree has 32 tokens of it.
    "session row recycled": Scene(lambda play: None, 32, _session),
}


def play(release: scheduling.Release, tree: str, scene: Scene, mode: str | None) -> dict[str, Any]:
    """What a scene comes to: by whom it ended, how long matches were, what was reported."""
    uninstall()
    reports: list[Violation] = []
    if mode is not None:
        install(mode, on_report=reports.append)
    play = Play(release, tree)
    ended = "right"
    try:
        scene.tell(play, scene)
    except trees.Finding as finding:
        ended = f"{finding.by}: {finding}"
    except GuardViolation:
        ended = "raised"
    except AssertionError as error:  # the release's own
        ended = f"release: {error}"
    return {
        "ended": ended,
        "lengths": play.lengths,
        "faults": sorted({report.fault.value for report in reports}),
    }


# --- proof by mutation -----------------------------------------------------------------------------


def _no_look(*terms: Any) -> None:
    """Each match is proved by more than one call."""


def _no_proof() -> None:
    compiled.look = _no_look  # type: ignore[assignment]
    tree_link.TreeLink.proved_at_once = lambda self, result: recorder.length_of(result)  # type: ignore[method-assign]


def _insert_over_anything() -> None:
    tree_link.TreeLink.may_insert = lambda self, tree, key, start: len(key)  # type: ignore[method-assign]


def _rows_lent_unseen() -> None:
    PoolGuard.check_row = lambda self, slots, need, since: True  # type: ignore[method-assign]


#: What takes a check away, and the scene in which requests then read what is not theirs.
MUTATIONS: dict[str, tuple[Callable[[], None], str]] = {
    "no proof": (_no_proof, "window tail recycled"),
    "no proof of the full side": (_no_proof, "full page recycled unseen"),
    "insertions over what is not proved": (_insert_over_anything, "window tail recycled"),
    "rows lent unseen": (_rows_lent_unseen, "session row recycled"),
}


def mutated(release: scheduling.Release, tree: str) -> None:
    """Each mutation in a process of its own, that of a child."""
    for name, (remove, scene) in MUTATIONS.items():
        if SCENES[scene].tell is _session and tree == "legacy":
            continue
        sys.stdout.flush()
        child = os.fork()
        if not child:
            remove()
            found = play(release, tree, SCENES[scene], "enforce")
            row = {"version": running_version(), "tree": tree, "without": name}
            print(json.dumps({**row, **found}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def main() -> int:
    driver.prepare()
    release = scheduling.Release()
    for tree in scheduling.trees():
        mutated(release, tree)
        for name, scene in SCENES.items():
            if scene.tell is _session and tree == "legacy":
                continue  # sessions stand around that tree, and its server has none
            for mode in (None, "observe", "enforce", "strict"):
                row = {"version": running_version(), "tree": tree, "scene": name, "mode": mode}
                found = play(release, tree, scene, mode)
                print(json.dumps({**row, **found, "clip": scene.clip}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
