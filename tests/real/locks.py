"""Locks of real prefix trees, paired by the lock ledger: legal drives, and one fault of each kind.

Prints one JSON line a drive and one a fault. Run with a release on the path.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hicache_guard.adapters import hooks, tree_locks
from hicache_guard.adapters.hooks import install, uninstall
from hicache_guard.adapters.link import _links as _known
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.faults import Fault
from hicache_guard.core.journal import acting_for
from hicache_guard.core.report import Violation
from hicache_guard.repro import scheduling
from real import driver, trees

MODES = ("observe", "enforce", "strict")
_MEM = "sglang.srt.mem_cache"

#: Numbers of releases whose unified tree cannot release the window part alone.
_NO_EARLY = ("0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1")
_BASE = ("inc_lock_ref", "dec_lock_ref", "sanity_check")
_WITH_EARLY = (*_BASE, "dec_swa_lock_only")


def seams(version: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """The methods to hook, by module and class."""
    number = int(version.split(".")[2])
    unified = (f"{_MEM}.unified_radix_cache", "UnifiedRadixCache")
    legacy = (f"{_MEM}.swa_radix_cache", "SWARadixCache")
    if number >= 22:
        return {unified: (*_BASE, "release_swa")}
    found: dict[tuple[str, str], tuple[str, ...]] = {
        unified: _BASE if version in _NO_EARLY else _WITH_EARLY
    }
    if number <= 20:
        found[legacy] = _WITH_EARLY
    return found


def hook(version: str) -> None:
    """Put the hooks in place that no installation brought."""
    for (module, name), methods in seams(version).items():
        cls = getattr(__import__(module, fromlist=[name]), name)
        for method in methods:
            if not hooks.is_hooked(cls, method):
                setattr(cls, method, hooks._hooked(vars(cls)[method], getattr(tree_locks, method)))
        if not hasattr(cls.reset, "tells_ledger"):
            _tell_of_flushes(cls)


def _tell_of_flushes(cls: Any) -> None:
    # What stood there before, original or hook, is wrapped with all its marks.
    before = cls.reset

    @functools.wraps(before)
    def reset(tree: Any, *args: Any, **kwargs: Any) -> Any:
        result = before(tree, *args, **kwargs)
        tree_locks.flushed(tree)
        return result

    reset.tells_ledger = True  # type: ignore[attr-defined]
    cls.reset = reset


# --- one of each kind of fault ----------------------------------------------------------------------


class Scene:
    """A tree with a prompt in it that nobody has locked, and what may be done to its locks."""

    def __init__(self, release: scheduling.Release, tree: str, mode: str | None) -> None:
        _known.clear()
        uninstall()
        self.reports: list[Violation] = []
        if mode is not None:
            install(mode, on_report=self.reports.append)
            hook(hooks.running_version())
        self.release = release
        self.server = scheduling.Server(
            release, tree, page_size=4, window=8, full_pages=40, window_pages=24, longest=200
        )
        self.tree = self.server.tree
        self.base = release.base
        self.req = self.request(24)
        self.server.match(self.req)
        self.server.lock(self.req)
        self.server.extend([self.req], [self.server.plan(self.req, 24)])
        self.server.finish(self.req)
        # A branch: the node of the common part is locked through nodes below it only.
        other = self.request(16, tail=4)
        self.server.match(other)
        self.server.lock(other)
        self.server.extend([other], [self.server.plan(other, 20)])
        self.server.finish(other)

    def request(self, count: int, *, tail: int = 0) -> Any:
        return self.server.request("R", [1] * count + [2] * tail)

    def node(self, count: int = 24, *, tail: int = 0) -> Any:
        """The node of a prompt that is in the tree."""
        req = self.request(count, tail=tail + 1)  # a match leaves at least one token to compute
        self.server.match(req)
        return req.last_node

    def hold(self, name: str, count: int = 24, *, tail: int = 0) -> Any:
        req = self.request(count, tail=tail + 1)
        self.server.match(req)
        with acting_for(name):
            return self.server.hold(req)

    def let_go(self, held: Any, name: str) -> None:
        with acting_for(name):
            self.server.let_go(held)

    def let_go_early(self, held: Any, name: str) -> None:
        """Release the window part of a lock."""
        with acting_for(name):
            if hasattr(self.tree, "release_swa"):
                held.swa_released = False  # or the tree would leave it out
                self.tree.release_swa(held)
                return
            node, receipt = held
            by_receipt = "params" in _parameters(self.tree.dec_swa_lock_only)
            self.tree.dec_swa_lock_only(node, receipt if by_receipt else receipt.swa_uuid_for_lock)

    def let_go_after_early(self, held: Any, name: str, *, forget: bool = False) -> None:
        """Release a lock whose window part was released, or ``forget`` that it was."""
        with acting_for(name):
            if hasattr(self.tree, "unlock"):
                held.swa_released = not forget
                self.tree.unlock(held)
            else:
                self.tree.dec_lock_ref(*held, **({} if forget else {"skip_swa": True}))

    @property
    def has_early(self) -> bool:
        return hasattr(self.tree, "release_swa") or hasattr(self.tree, "dec_swa_lock_only")

    def sizes(self) -> tuple[int, ...] | None:
        """What is protected and evictable on each side; None of a core that has died."""
        tree = self.tree
        try:
            return (
                int(tree.full_protected_size()),
                int(tree.full_evictable_size()),
                int(tree.swa_protected_size()),
                int(tree.swa_evictable_size()),
            )
        except BaseException:  # the rust core says so by a panic, or by an error
            return None

    def parts(self, held: Any) -> tuple[Any, Any]:
        """The node and the receipt of a lock."""
        return (held.node, held.receipt) if hasattr(held, "receipt") else held

    def release_by(self, node: Any, receipt: Any, name: str) -> None:
        with acting_for(name):
            self.tree.dec_lock_ref(node, receipt)


def _parameters(method: Any) -> Any:
    return inspect.signature(method).parameters


Step = Callable[[], None]
#: The offence, and what the rightful holders do afterwards.
Acts = tuple[Step, Step]


def _never(scene: Scene) -> Acts | None:
    """A lock is released on a node that nobody has locked; the receipt is of nowhere."""
    node, empty = scene.node(), scene.base.DecLockRefParams()
    return lambda: scene.release_by(node, empty, "thief"), lambda: None


def _again(scene: Scene) -> Acts | None:
    """A lock is released twice."""
    held = scene.hold("A")
    scene.let_go(held, "A")
    return lambda: scene.let_go(held, "A again"), lambda: None


def _again_shared(scene: Scene) -> Acts | None:
    """A lock is released twice while somebody else holds an equal one."""
    mine, others = scene.hold("A"), scene.hold("B")
    scene.let_go(mine, "A")
    return lambda: scene.let_go(mine, "A again"), lambda: scene.let_go(others, "B")


def _lost_receipt(scene: Scene) -> Acts | None:
    """A lock is released as if it reached the root (27038); another request's lock lies above."""
    above = scene.hold("B", 16)
    held = scene.hold("A")
    node, _ = scene.parts(held)
    empty = scene.base.DecLockRefParams()
    return lambda: scene.release_by(node, empty, "A"), lambda: scene.let_go(above, "B")


def _other_node(scene: Scene) -> Acts | None:
    """The receipt of one node's lock is used on another, which somebody else has locked."""
    mine, others = scene.hold("A"), scene.hold("B", 16, tail=4)
    node, _ = scene.parts(others)
    _, receipt = scene.parts(mine)

    def go_on() -> None:
        scene.let_go(others, "B")
        scene.let_go(mine, "A")

    return lambda: scene.release_by(node, receipt, "A"), go_on


def _window_again(scene: Scene) -> Acts | None:
    """The window part of a lock is released twice; somebody else holds an equal lock."""
    if not scene.has_early:
        return None
    mine, others = scene.hold("A"), scene.hold("B")
    if not _is_told_apart(scene, mine):
        # Two equal locks may each be released early once; the third time is one too many.
        scene.let_go_early(others, "B")
        scene.let_go_early(mine, "A")
        let_go_others: Callable[[Any, str], None] = scene.let_go_after_early
    else:
        scene.let_go_early(mine, "A")
        let_go_others = scene.let_go

    def go_on() -> None:
        scene.let_go_after_early(mine, "A")
        let_go_others(others, "B")

    return lambda: scene.let_go_early(mine, "A again"), go_on


def _is_told_apart(scene: Scene, held: Any) -> bool:
    """Whether an early release hands the receipt itself over (since 0.5.20)."""
    return hasattr(scene.tree, "release_swa") or "params" in _parameters(
        scene.tree.dec_swa_lock_only
    )


def _window_in_whole(scene: Scene) -> Acts | None:
    """The window part of a lock is released early, and with the rest again (28161)."""
    if not scene.has_early:
        return None
    held = scene.hold("A")
    scene.let_go_early(held, "A")
    others = scene.hold("B", 16, tail=4)  # its window is above the branch
    return (
        lambda: scene.let_go_after_early(held, "A", forget=True),
        lambda: scene.let_go(others, "B"),
    )


def _window_forgotten(scene: Scene) -> Acts | None:
    """A lock is released without its window part, which nobody released early."""
    if not scene.has_early:
        return None
    held, others = scene.hold("A"), scene.hold("B", 16, tail=4)
    return lambda: scene.let_go_after_early(held, "A"), lambda: scene.let_go(others, "B")


def _skipped(scene: Scene) -> Acts | None:
    """An acquire skips a node without window KV, which is given some; its release skips nothing.

    Somebody else has locked that node by then (36350). Up to 0.5.13 the request forgets what was
    skipped; up to 0.5.19 the early release pays no heed to it.
    """
    tree, empty = scene.tree, scene.base.DecLockRefParams()
    node = scene.node(16, tail=4)
    if not hasattr(empty, "skip_lock_node_ids") or not hasattr(tree, "session"):
        return None
    if isinstance(node, int):
        try:
            above = tree.tree_core.node_by_id(node).parent
        except NotImplementedError:
            return None  # the rust core shows nobody its nodes
    else:
        above = node.parent
    while above.component_data[1].value is not None:
        scene.server.evict(0, 4)
    with acting_for("A"):
        receipt = tree.inc_lock_ref(node).to_dec_params()
    assert receipt.skip_lock_node_ids, "the node above has no window KV"
    req = scene.request(24)
    scene.server.match(req)
    scene.server.lock(req)
    scene.server.extend([req], [scene.server.plan(req, 24)])
    scene.server.finish(req)
    assert above.component_data[1].value is not None, "it has some again"
    others = scene.hold("B", 16)
    held = (node, receipt)

    def go_on() -> None:
        if scene.has_early:
            scene.let_go_after_early(held, "A")
        scene.let_go(others, "B")

    if scene.has_early:
        return lambda: scene.let_go_early(held, "A"), go_on
    lost = scene.base.DecLockRefParams(swa_uuid_for_lock=receipt.swa_uuid_for_lock)
    return lambda: scene.release_by(node, lost, "A"), go_on


def _held(scene: Scene) -> Acts | None:
    """The tree is idle, and a lock is held."""
    held = scene.hold("A")
    return scene.tree.sanity_check, lambda: scene.let_go(held, "A")


def _before_flush(scene: Scene) -> Acts | None:
    """A lock is released after the tree was emptied."""
    held = scene.hold("A")
    scene.server.flush()
    return lambda: scene.let_go(held, "A"), lambda: None


FAULTS: dict[str, Callable[[Scene], Acts | None]] = {
    "never taken": _never,
    "again": _again,
    "again, shared": _again_shared,
    "lost receipt": _lost_receipt,
    "other node": _other_node,
    "window again": _window_again,
    "window in whole": _window_in_whole,
    "window forgotten": _window_forgotten,
    "skipped": _skipped,
    "held": _held,
    "before flush": _before_flush,
}


def commit(name: str, release: scheduling.Release, tree: str, mode: str | None) -> dict[str, Any]:
    """Commit one fault; what came of it."""
    scene = Scene(release, tree, mode)
    row: dict[str, Any] = {"fault": name, "tree": tree, "mode": mode or "off"}
    acts = FAULTS[name](scene)
    if acts is None:
        return {**row, "left out": True}
    offend, go_on = acts
    early, before = len(scene.reports), scene.sizes()
    row["before"], row["raised"] = before, ""
    try:
        offend()
    except GuardViolation as error:
        row["raised"] = "guard"
        row["kept"] = error.violation is scene.reports[-1]
    except BaseException as error:  # the rust core panics
        row["raised"] = "".join(traceback.format_exception_only(error))[-200:]
    row["after"] = scene.sizes()
    row["quiet before"] = early == 0
    row["reports"] = [str(report) for report in scene.reports]
    row["faults"] = sorted({report.fault.value for report in scene.reports})
    # Whatever the offence left, the rightful holders let go, and nothing may be locked then.
    row["end"] = ""
    row["finally"] = None
    try:
        go_on()
        row["finally"] = scene.sizes()
        scene.tree.sanity_check()
    except BaseException as error:
        row["end"] = "".join(traceback.format_exception_only(error))[-300:]
    row["total"] = len(scene.reports)
    return row


# --- legal drives -----------------------------------------------------------------------------------


def drive(
    release: scheduling.Release, tree: str, page_size: int, seeds: Sequence[int], steps: int
) -> dict[str, Any]:
    """Random legal drives in each mode, the ledger watching; see ``real/trees.py``."""
    seen: Counter[str] = Counter()
    failure = ""
    for seed in seeds:
        setting = trees.Setting.draw(seed, tree, page_size, release.options())
        for mode in MODES:
            _known.clear()
            uninstall()
            reports: list[Violation] = []
            install(mode, on_report=reports.append)
            hook(hooks.running_version())
            one = trees.Drive(release, setting, seed, seen)
            one.reports = reports
            try:
                one.run(steps)
            except Exception as error:
                failure = failure or "".join(traceback.format_exception(error))[-3000:]
            ledger = tree_locks.locks_of(one.server.tree)
            assert ledger is not None, "the allocator is guarded"
            seen["lock calls"] += ledger._serial
            seen["lossy"] += ledger.lossy
            held = [
                lock
                for lock in ledger.locks()
                if not tree_locks._is_root_by_number(one.server.tree, lock.node)
            ]
            if held and not failure:
                failure = f"{mode}: held at the end: {held[0].acquired}"
            drift = ledger.guard.tally.violations[Fault.LOCK_DRIFT]
            if drift and not failure:
                failure = f"{mode}: {drift} drifts"
    return {
        "drive": tree,
        "page_size": page_size,
        "failure": failure,
        "seen": {name: seen[name] for name in ("lock calls", "lossy", "finish", "flush", "idle")},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--page-size", nargs="*", type=int, default=[1, 4, 64])
    options = parser.parse_args(arguments)
    driver.prepare()
    release = scheduling.Release()
    for tree in scheduling.trees():
        for name in FAULTS:
            for mode in (None, *MODES):
                print(json.dumps(commit(name, release, tree, mode)), flush=True)
        for size in options.page_size:
            row = drive(release, tree, size, range(options.examples), options.steps)
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
