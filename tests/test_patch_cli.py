"""``hicache-guard patch``: tables and lines, exit statuses, and bad input that changes nothing."""

from __future__ import annotations

import gc
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from patch_trees import checkout, git, small_tree, snapshot

from hicache_guard.cli import main
from hicache_guard.patches import catalogue, layout, transaction

pytestmark = pytest.mark.sglang


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A command in this process: to import it anew takes longer than most do."""
    told, said, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["hicache-guard", "patch", *map(str, arguments)]
    try:
        with redirect_stdout(told), redirect_stderr(said), pytest.raises(SystemExit) as ended:
            main.run()
    finally:
        sys.argv = argv
        gc.enable()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess([], ended.value.code, told.getvalue(), said.getvalue())


def _started(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "hicache_guard.cli.main", "patch", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_session(tmp_path: Path) -> None:
    root = checkout("0.5.12", tmp_path / "tree")
    before = snapshot(root)
    listed = _run("list")
    assert all(patch.name in listed.stdout for patch in catalogue.PATCHES)

    checked = _run("check", root)
    assert checked.returncode == 0, checked.stderr
    assert "nearest to SGLang 0.5.12, no symbol differs" in checked.stdout
    needed = [patch for patch in catalogue.PATCHES if "0.5.12" in patch.affects]
    assert checked.stdout.count("applies") == len(needed)

    shown = _run("diff", root / "python", "--only", "tail-of-zero,tail-clears-mapping")
    assert snapshot(root) == before
    git_reads = subprocess.run(
        ["git", "-C", str(root), "apply", "--numstat"],
        input=shown.stdout,
        capture_output=True,
        text=True,
    )
    assert git_reads.stdout.split() == ["4", "0", "python/sglang/srt/mem_cache/swa_memory_pool.py"]

    applied = _run("apply", root, "--without", "tail-of-zero", "--commit")
    assert applied.returncode == 0, applied.stderr
    assert "applied tail-clears-mapping" in applied.stdout
    assert len(git(root, "log", "--format=%h").split()) == len(needed)  # the base, and all but one
    told = _run("status", root).stdout
    assert "tail-clears-mapping" in told
    assert "tail-of-zero" not in told
    assert "nothing to do" in _run("apply", root, "--only", "tail-clears-mapping").stdout

    assert _run("reverse", root).returncode == 0
    assert snapshot(root) == before
    assert "no patch is applied" in _run("status", root).stdout


def test_check_names_what_differs_and_exits_1(tmp_path: Path) -> None:
    root = small_tree("0.5.23", tmp_path / "tree")
    file = root / "sglang/srt/mem_cache/allocator/swa.py"
    file.write_text(file.read_text().replace("if swa_tail_len == 0:", "if swa_tail_len == 1:"))
    before = snapshot(root)
    checked = _run("check", root)
    assert checked.returncode == 1
    assert "does not fit" in checked.stdout
    assert "✗ SWATokenToKVPoolAllocator.alloc_extend_swa_tail" in checked.stdout
    assert "+        if swa_tail_len == 1:" in checked.stdout.replace("+    if", "+        if")
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["apply", "TREE/nowhere"], "cannot read"),
        (["apply", "~nobody-of-that-name/sglang"], "home"),
        (["apply", "TREE/sglang/srt/mem_cache"], "holds no SGLang"),
        (["apply", "TREE", "--only", "nonsense"], "nonsense"),
        (["apply", "TREE", "--only", ""], "empty"),
        (["apply", "TREE", "--without", "../x"], "../x"),
        (["apply", "TREE", "--commit"], "not a git checkout"),
        (["reverse", "TREE", "--only", "nonsense"], "nonsense"),
        (["export", "TREE"], "--output"),
        (["export", "TREE", "-o", "TREE"], "new or empty"),
        (["export", "TREE", "-o", "TREE/sglang/version.py"], "new or empty"),
        (["export", "TREE", "-o", "TREE/sglang/version.py/x"], "cannot write"),
        (["status"], "PATH"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], says: str, tmp_path: Path) -> None:
    root = small_tree("0.5.12", tmp_path / "tree")
    before = snapshot(tmp_path)
    done = _run(*(argument.replace("TREE", str(root)) for argument in arguments))
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert says in done.stderr
    assert snapshot(tmp_path) == before


def test_second_process_is_told(tmp_path: Path) -> None:
    root = small_tree("0.5.12", tmp_path / "tree")
    with transaction.locked(layout.find(root).root):
        done = _run("apply", root)
    assert done.returncode == 2
    assert "another process" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("spoil", ["read-only", "folder", "latin-1", "pipe"])
def test_a_file_that_cannot_be_patched(spoil: str, tmp_path: Path) -> None:
    root = small_tree("0.5.12", tmp_path / "tree")
    file = root / "sglang/srt/mem_cache/deepseek_v4_memory_pool.py"
    if spoil == "read-only":
        file.chmod(0o444)
    elif spoil == "folder":
        file.unlink()
        file.mkdir()
    elif spoil == "pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        file.write_bytes(file.read_bytes() + b"# \xe9\n")
    before = None if spoil == "pipe" else snapshot(root)
    done = _run("apply", root)
    assert done.returncode == 2
    assert "deepseek_v4_memory_pool.py" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert before is None or snapshot(root) == before


@pytest.mark.parametrize("command", ["check", "status"])
def test_names_of_folders_are_not_taken_for_markup(command: str, tmp_path: Path) -> None:
    root = small_tree("0.5.23", tmp_path / "[bold]x[" / "nope]")
    done = _run(command, root)
    assert done.returncode == 0, done.stderr[-500:]
    assert str(root) in done.stdout


def test_terminal_without_unicode(tmp_path: Path) -> None:
    root = small_tree("0.5.23", tmp_path / "tree")
    done = _started("list", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr[-500:]
    done = _started("check", root, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr[-500:]


def test_import_that_was_taken_out_by_hand_is_seen(tmp_path: Path) -> None:
    """The file then ends in a NameError. Mutation seen: no look at imports fails this."""
    root = small_tree("0.5.23", tmp_path / "tree")
    assert _run("apply", root, "--only", "guards").returncode == 0
    file = root / "sglang/srt/mem_cache/allocator/swa.py"
    ours = "# hicache-guard: guards-0.5.22\nfrom hicache_guard.adapters.patched import guarded\n"
    assert ours in file.read_text()
    file.write_text(file.read_text().replace(ours, ""))
    assert "half applied" in _run("status", root).stdout
    done = _run("apply", root)
    assert done.returncode == 2
    assert "half applied" in done.stderr
    assert _run("reverse", root).returncode == 0
    assert _run("apply", root).returncode == 0


@pytest.mark.parametrize("lost", ["all", "one file's", "the import's"])
def test_comments_that_were_taken_out_by_hand_are_missed(lost: str, tmp_path: Path) -> None:
    """Reverse would leave decorators and import. Mutation seen: no look for what is unmarked."""
    root = small_tree("0.5.23", tmp_path / "tree")
    assert _run("apply", root, "--only", "guards").returncode == 0
    ours = "# hicache-guard: guards-0.5.22\n"
    if lost == "all":
        files = [file for file in root.rglob("*.py") if ours in file.read_text()]
    else:
        files = [root / "sglang/srt/mem_cache/allocator/swa.py"]
    for file in files:
        text = file.read_text()
        gone = f"{ours}from" if lost == "the import's" else ours
        assert gone in text
        file.write_text(text.replace(gone, gone.removeprefix(ours)))
    before = snapshot(root)
    told = _run("status", root).stdout
    assert "half applied" in told
    assert "does not fit" in told
    for command in ("reverse", "apply"):
        done = _run(command, root)
        assert done.returncode == 2, done.stdout
        assert len(done.stderr.splitlines()) == 1
        assert "without the comments `# hicache-guard: guards-0.5.22`" in done.stderr
        assert "git checkout" in done.stderr
    assert snapshot(root) == before


def test_member_of_a_family_that_is_for_another_release(tmp_path: Path) -> None:
    root = small_tree("0.5.23", tmp_path / "tree")
    for _ in range(2):  # before and after the right one is in
        for command in ("apply", "diff"):
            done = _run(command, root, "--only", "guards-0.5.12")
            assert done.returncode == 2
            assert "guards-0.5.12 is not for this release, guards-0.5.22 is" in done.stderr
            assert "--only guards`" in done.stderr
            assert len(done.stderr.splitlines()) == 1
        assert _run("apply", root, "--only", "guards").returncode == 0
    done = _run("apply", root, "--only", "tail-clears-mapping")
    assert done.returncode == 0
    assert "nothing to do\n  tail-clears-mapping: not needed here (as in 0.5.23)" in done.stdout


def test_hint_is_one_that_helps(tmp_path: Path) -> None:
    """``--without`` for one patch helps only where the others fit."""
    root = small_tree("0.5.23", tmp_path / "tree")
    file = root / "sglang/srt/mem_cache/allocator/swa.py"
    clean = file.read_text()
    file.write_text(clean + "\ndef (:\n")
    done = _run("apply", root)
    assert done.returncode == 2
    assert "allocator/swa.py is not Python that can be read; repair it first" in done.stderr
    (names,) = re.findall(r"--without (\S+) leaves the \d+ that do not fit out", done.stderr)
    assert "native-window-layers" not in names, "the one patch of another file fits"
    assert _run("diff", root, "--without", names).returncode == 0

    file.write_text(clean.replace("if swa_tail_len == 0:", "if swa_tail_len <= 0:"))
    done = _run("apply", root)
    assert done.returncode == 2
    (names,) = re.findall(r"--without (\S+) leaves the \d that do not fit out", done.stderr)
    assert {"guards-0.5.22", "tail-of-zero"} <= {*names.split(",")}
    assert _run("diff", root, "--without", names).returncode == 0

    file.write_text(clean)
    assert _run("apply", root).returncode == 0
    file.write_text(file.read_text().replace("swa_pages[swa_pages > 0]", "swa_pages[:0]"))
    for command in ("apply", "reverse"):
        done = _run(command, root)
        assert done.returncode == 2
        assert "was changed by hand; undo that edit, or put the file back" in done.stderr
        assert "--without" not in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_locked_index_is_said_before_anything_is_committed(tmp_path: Path) -> None:
    root = checkout("0.5.23", tmp_path / "tree")
    (root / ".git" / "index.lock").touch()
    before, head = snapshot(root), git(root, "rev-parse", "HEAD")
    done = _run("apply", root, "--commit")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "index.lock" in done.stderr
    assert snapshot(root) == before
    assert git(root, "rev-parse", "HEAD") == head
