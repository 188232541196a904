"""All or nothing: kills, refusals by the system, other processes, changes by others."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from patch_trees import checkout, git, small_tree, snapshot

from hicache_guard.core.errors import ConfigError
from hicache_guard.patches import catalogue, plan, transaction, work
from hicache_guard.patches.git import MoveHead
from hicache_guard.patches.transaction import Change

FILES = ("a.py", "sub/b.py", "sub/c.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    for name in FILES:
        (root / name).write_bytes(b"old " + name.encode() * 3000)
    (root / "a.py").chmod(0o750)
    return root


def changes(root: Path) -> dict[Path, Change]:
    return {
        root / name: Change((root / name).read_bytes(), b"new " + name.encode() * 4000)
        for name in FILES
    }


def in_child(work: Callable[[], None]) -> int:
    """Start ``work`` in a forked process; its exit status is 0, or 3 where it was refused."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except ConfigError:
        os._exit(3)
    finally:
        os._exit(4)


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def settle(root: Path) -> str:
    with transaction.locked(root):
        return transaction.recover(root)


def test_write_replaces_all_and_leaves_nothing_behind(tree: Path) -> None:
    """Mutation seen: a staged file that does not get the old one's mode fails this."""
    planned = changes(tree)
    started = time.time() - 1
    transaction.write(tree, planned)
    assert {file.read_bytes() for file in planned} == {c.after for c in planned.values()}
    assert (tree / "a.py").stat().st_mode & 0o777 == 0o750
    assert (tree / "a.py").stat().st_mtime > started, "a stale .pyc would be taken for current"
    assert not (tree / transaction.STATE).exists()


def _die_at(step: int) -> None:
    """Kill this process at the given one of its next calls that touch the file system."""
    counted = iter(range(step + 1))
    touching = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.chown"}

    def hook(event: str, _: object) -> None:
        if event in touching and next(counted) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_kill_at_every_step(tree: Path) -> None:
    """Not at random: at each call that touches the file system, one after the other.

    Mutations seen: renaming before the manifest is there, and recovery that only deletes the state
    folder, each fail this.
    """
    before, planned = snapshot(tree), changes(tree)
    seen = set()
    for step in range(200):

        def run(step: int = step) -> None:
            _die_at(step)
            transaction.write(tree, planned)

        finished = status_of(in_child(run)) == 0
        for file, change in planned.items():
            assert file.read_bytes() in (change.before, change.after), "a torn file"
        settle(tree)
        after = {file: file.read_bytes() for file in planned}
        seen.add(after == {file: change.after for file, change in planned.items()})
        if not finished and snapshot(tree) == before:
            continue
        assert after == {file: change.after for file, change in planned.items()}
        assert len(snapshot(tree)) == len(before)
        transaction.write(tree, {f: Change(c.after, c.before) for f, c in planned.items()})
        assert snapshot(tree) == before
        if finished:
            break
    else:
        pytest.fail("it never finished")
    assert seen == {True, False}


def test_kill_while_recovering(tree: Path) -> None:
    """Recovery may be killed too, at each of its steps; the next one ends it."""
    before, planned = snapshot(tree), changes(tree)
    for step in range(60):

        def half(_: int = step) -> None:
            renamed = iter(range(9))
            real = os.replace

            def replace(source: Path, target: Path) -> None:
                if next(renamed) == 3:  # the manifest, a.py, sub/b.py; then
                    os.kill(os.getpid(), signal.SIGKILL)
                real(source, target)

            os.replace = replace  # type: ignore[assignment]
            transaction.write(tree, planned)

        def recovery(step: int = step) -> None:
            _die_at(step)
            settle(tree)

        assert status_of(in_child(half)) == -signal.SIGKILL
        assert snapshot(tree) != before
        finished = status_of(in_child(recovery)) == 0
        settle(tree)
        assert snapshot(tree) == before
        if finished:
            return
    pytest.fail("recovery never finished")


def _kills(root: Path, goals: Sequence[Callable[[], None]]) -> None:
    """Kill what leads to each of two states in turn, 200 times; one of the two is what is left.

    ``goals`` go from the present state to the other one and back. How long a child may live is
    drawn at random from a range that follows the outcomes, so that a busy machine sees both.
    """
    states = [snapshot(root)]
    started = time.perf_counter()
    goals[0]()
    longest = 2 * (time.perf_counter() - started)
    states.append(snapshot(root))
    assert states[0] != states[1]
    at, outcomes = 1, {"before": 0, "after": 0}
    dice = random.Random(0)
    for _ in range(200):
        child = in_child(goals[at])
        time.sleep(dice.random() * longest)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        start, goal = states[at], states[1 - at]
        for name, content in snapshot(root).items():
            if not name.startswith(transaction.STATE):
                assert content in (start[name], goal[name]), "a torn file"
        settle(root)
        assert snapshot(root) in (start, goal)
        if snapshot(root) == goal:
            outcomes["after"] += 1
            longest /= 1.1
            at = 1 - at
        else:
            outcomes["before"] += 1
            longest *= 1.1
    assert min(outcomes.values()) > 5, outcomes


@pytest.mark.sglang
def test_two_hundred_kills_of_writing(tmp_path: Path) -> None:
    """SIGKILL at random moments of the part of ``apply`` and ``reverse`` that writes."""
    root = small_tree("0.5.12", tmp_path / "tree")
    with work.opened(root) as (opened, _):
        patches = plan.choose(opened, (), (), force_unknown=False)
        there = opened.changes({patch.name for patch in patches})
    back = {file: Change(change.after, change.before) for file, change in there.items()}

    def write(planned: dict[Path, Change]) -> None:
        with transaction.locked(root):
            transaction.recover(root)
            transaction.write(root, planned)

    _kills(root, (lambda: write(there), lambda: write(back)))


@pytest.mark.sglang
@pytest.mark.slow
def test_two_hundred_kills_of_apply(tmp_path: Path) -> None:
    """The same for all that ``apply`` and ``reverse`` do, planning included."""
    root = small_tree("0.5.12", tmp_path / "tree")

    def apply() -> None:
        with work.opened(root) as (opened, _):
            work.apply(opened, plan.choose(opened, (), (), force_unknown=False))

    def reverse() -> None:
        with work.opened(root) as (opened, _):
            work.reverse(opened, catalogue.PATCHES)

    _kills(root, (apply, reverse))


@pytest.mark.sglang
def test_kill_at_every_step_of_a_commit(tmp_path: Path) -> None:
    """HEAD, index and files agree after recovery, whenever the kill came; git is the oracle.

    Mutation seen: recovery that does not ask whether HEAD has moved fails this.
    """
    root = checkout("0.5.12", tmp_path / "tree")
    base = git(root, "rev-parse", "HEAD").strip()
    with work.opened(root) as (opened, _):
        patches = plan.choose(opened, (), (), force_unknown=False)
        work.steps(opened, patches)  # planned once, and not again in every child
        opened.changes({patch.name for patch in patches})
    seen = set()
    for step in range(0, 4000, 11):

        def run(step: int = step) -> None:
            with transaction.locked(root):
                transaction.recover(root)
                _die_at(step)
                work.apply(opened, patches, commit=True)

        finished = status_of(in_child(run)) == 0
        settle(root)
        assert git(root, "status", "--porcelain") == "", step
        count = int(git(root, "rev-list", "--count", f"{base}..HEAD"))
        assert count in (0, len(patches))
        seen.add(count)
        git(root, "reset", "--quiet", "--hard", base)
        if finished:
            break
    else:
        pytest.fail("it never finished")
    assert seen == {0, len(patches)}


@pytest.mark.sglang
def test_kill_of_a_commit_in_a_folder_of_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEAD has moved and the index has not: recovery names files from the tree's own root."""
    top = tmp_path / "project"
    root = small_tree("0.5.12", top / "sub" / "sglang", "python/sglang")
    git(top, "init", "--quiet")
    git(top, "add", "--all")
    git(top, "-c", "user.name=U", "-c", "user.email=u@x", "commit", "--quiet", "-m", "base")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "A User")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "user@example.org")

    def run() -> None:
        MoveHead.finish = (  # type: ignore[method-assign]
            lambda self: os.kill(os.getpid(), signal.SIGKILL)
        )
        with work.opened(root) as (opened, _):
            work.apply(opened, catalogue.named(["tail-of-zero"]), commit=True)

    assert status_of(in_child(run)) == -signal.SIGKILL
    assert git(top, "rev-list", "--count", "HEAD").strip() == "2"
    assert git(top, "status", "--porcelain") != ""
    assert settle(root) == "an interrupted run was completed"
    assert git(top, "status", "--porcelain") == ""


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_rename_that_fails_puts_back_the_others(
    tree: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Mutation seen: without the roll-back in ``write`` this fails."""
    before, planned = snapshot(tree), changes(tree)
    real, calls = os.replace, iter(range(9))

    def replace(source: Path, target: Path) -> None:
        if next(calls) == fails_at:
            raise PermissionError(errno.EACCES, "Permission denied", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(ConfigError, match="Permission denied; nothing was changed"):
        transaction.write(tree, planned)
    assert snapshot(tree) == before


def test_interrupt_puts_back_the_others(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, planned = snapshot(tree), changes(tree)
    real, calls = os.replace, iter(range(9))

    def replace(source: Path, target: Path) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        transaction.write(tree, planned)
    assert snapshot(tree) == before


@pytest.mark.parametrize("room", [0, 1, 9_000, 13_000, 17_000])
def test_full_disk_changes_nothing(tree: Path, room: int) -> None:
    """The system itself refuses: files may not grow past ``room`` bytes."""
    before, planned = snapshot(tree), changes(tree)

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        transaction.write(tree, planned)

    assert status_of(in_child(run)) == 3
    assert snapshot(tree) == before


def test_second_process_is_refused_and_a_dead_one_is_not_in_the_way(tree: Path) -> None:
    """Mutation seen: ``locked`` without its flock fails this."""
    ready_in, ready_out = os.pipe()

    def hold() -> None:
        with transaction.locked(tree):
            os.write(ready_out, b"x")
            time.sleep(60)

    child = in_child(hold)
    os.read(ready_in, 1)
    with pytest.raises(ConfigError, match="another process is patching"), transaction.locked(tree):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with transaction.locked(tree):
        pass


def test_read_only_file_is_refused(tree: Path) -> None:
    """Mutation seen: without the mode check this fails: a rename does not ask for it."""
    (tree / "sub" / "c.py").chmod(0o444)
    before, planned = snapshot(tree), changes(tree)
    with pytest.raises(ConfigError, match=r"c\.py is read-only; nothing was changed"):
        transaction.write(tree, planned)
    assert snapshot(tree) == before


def test_file_changed_between_plan_and_write_is_refused(tree: Path) -> None:
    """Mutation seen: without the comparison in ``_check`` this fails."""
    planned = changes(tree)
    (tree / "sub" / "b.py").write_bytes(b"the user's")
    before = snapshot(tree)
    with pytest.raises(ConfigError, match=r"b\.py was changed while"):
        transaction.write(tree, planned)
    assert snapshot(tree) == before


@pytest.mark.parametrize("what", ["folder", "link", "folder link"])
def test_no_link_and_no_folder_is_written_through(tree: Path, tmp_path: Path, what: str) -> None:
    """Mutation seen: without ``refuse_links`` in ``_check`` the links fail this."""
    planned = changes(tree)
    outside = tmp_path / "outside"
    if what == "folder link":
        (tree / "sub").rename(outside)
        (tree / "sub").symlink_to(outside)
    else:
        (tree / "a.py").rename(outside)
        if what == "link":
            (tree / "a.py").symlink_to(outside)
        else:
            (tree / "a.py").mkdir()
    before, theirs = snapshot(tree), snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"is a link|is not a file"):
        transaction.write(tree, planned)
    assert (snapshot(tree), snapshot(tmp_path)) == (before, theirs)


def test_file_changed_after_a_kill_is_not_overwritten(tree: Path) -> None:
    """Mutation seen: recovery that does not compare with both hashes fails this."""
    planned = changes(tree)

    def run() -> None:
        real, calls = os.replace, iter(range(9))

        def replace(source: Path, target: Path) -> None:
            if next(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            real(source, target)

        os.replace = replace  # type: ignore[assignment]
        transaction.write(tree, planned)

    assert status_of(in_child(run)) == -signal.SIGKILL
    (tree / "a.py").write_bytes(b"the user's")
    with pytest.raises(ConfigError, match=r"a\.py was changed since"):
        settle(tree)
    assert (tree / "a.py").read_bytes() == b"the user's"


def test_what_is_not_ours_in_the_state_folder_stays(tree: Path) -> None:
    (tree / transaction.STATE).mkdir()
    (tree / transaction.STATE / "notes").write_text("mine")
    assert settle(tree) == ""
    transaction.write(tree, changes(tree))
    assert (tree / transaction.STATE / "notes").read_text() == "mine"


def test_state_folder_that_is_a_link_is_refused(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tree / transaction.STATE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        settle(tree)


@pytest.mark.parametrize("name", ["../outside", "/OUTSIDE", "sub/../../outside", "link/x"])
def test_manifest_that_leads_out_is_refused(tree: Path, tmp_path: Path, name: str) -> None:
    """It may have come with the tree. Mutation seen: ``recover`` without its check fails this."""
    name = name.replace("/OUTSIDE", str(tmp_path / "outside"))
    (tmp_path / "outside").write_text("theirs")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("theirs")
    (tree / "link").symlink_to(tmp_path / "folder")
    state = tree / transaction.STATE
    state.mkdir()
    (state / "0.old").write_text("evil")
    theirs = hashlib.sha256(b"theirs").hexdigest()
    entry = {"old": "0.old", "new": "0.new", "before": "0" * 64, "after": theirs}
    other = {**entry, "old": "1.old", "after": "1" * 64, "before": hashlib.sha256(b"z").hexdigest()}
    (tree / "z").write_text("z")
    (state / "manifest").write_text(
        json.dumps({"files": {name: entry, "z": other}, "commit": None})
    )
    with pytest.raises(ConfigError, match=r"leads out of|is a link"):
        settle(tree)
    assert (tmp_path / "outside").read_text() == "theirs"
    assert (tmp_path / "folder" / "x").read_text() == "theirs"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"files": {"a": {}}}', '{"files": {"a.py": {"old": "../x"}}}']
)
def test_damaged_manifest_is_one_line(tree: Path, text: str) -> None:
    (tree / transaction.STATE).mkdir()
    (tree / transaction.STATE / "manifest").write_text(text)
    before = snapshot(tree)
    with pytest.raises(ConfigError, match="is damaged"):
        settle(tree)
    assert snapshot(tree) == before
