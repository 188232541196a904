"""Patches on the real sources of every fetched release: states, identities, mutated trees, git."""

from __future__ import annotations

import ast
import gc
import re
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patch_trees import checkout, git, make_repository, small_tree, snapshot
from programs import in_ci

from hicache_guard import checkouts
from hicache_guard.core.errors import ConfigError
from hicache_guard.patches import catalogue, layout, plan, table, work
from hicache_guard.patches.edits import AddImport, Decorate, Insert
from hicache_guard.patches.guards import GUARDS
from hicache_guard.patches.layout import Layout
from hicache_guard.patches.patch import Patch, Target
from hicache_guard.patches.plan import State, Tree

pytestmark = pytest.mark.sglang

NAMES = [patch.name for patch in catalogue.PATCHES]

#: What the reports and the fault catalogue say, not what the engine finds.
_ALL = {
    "tail-of-zero",
    "padding-not-freed",
    "decode-needs-both-sides",
    "native-window-layers",
}
_TO_14 = {
    *_ALL,
    "backup-holds-mapping",
    "locked-prefix-kept",
    "locked-prefix-kept-unified",
}
_TO_13 = {*_TO_14, "partial-free-clears-page"}
_FROM_15 = {*_ALL, "session-last-token"}
_FROM_20 = {*_FROM_15, "segment-free-of-nothing"}
NEEDED = {
    "0.5.12": {
        *_TO_13,
        "tail-clears-mapping",
        "translation-memo-register",
        "translation-memo-write",
        "window-slots-register",
    },
    "0.5.12.post1": {*_TO_13, "translation-memo-write", "window-slots-register"},
    "0.5.13": _TO_13,
    "0.5.13.post1": _TO_13,
    "0.5.14": _TO_14,
    "0.5.15": {*_FROM_15, "backup-holds-mapping"},
    "0.5.15.post1": {*_FROM_15, "backup-holds-mapping"},
    "0.5.16": {*_FROM_15, "backup-holds-mapping"},
    "0.5.17": _FROM_15,
    "0.5.18": {*_FROM_15, "queued-window-free"},
    "0.5.19": _FROM_15,
    "0.5.20": _FROM_20,
    "0.5.21": _FROM_20,
    "0.5.22": _FROM_20,
    "0.5.23": _FROM_20,
}
NEEDED = {
    version: names | {patch.name for patch in GUARDS if version in patch.affects}
    for version, names in NEEDED.items()
}
HOME = {
    version: "srt/mem_cache/swa_memory_pool.py"
    if version.startswith("0.5.12")
    else "srt/mem_cache/allocator/swa.py"
    for version in NEEDED
}
#: What the patches change, of every release.
EVERYWHERE = {
    "srt/layers/attention/flashinfer_backend.py",
    "srt/layers/attention/torch_native_backend.py",
    "srt/layers/attention/triton_backend.py",
    "srt/managers/schedule_policy.py",
    "srt/managers/scheduler.py",
    "srt/session/streaming_session.py",
}
FILES = {
    "0.5.12": EVERYWHERE
    | {
        f"srt/mem_cache/{name}.py"
        for name in (
            "allocator",
            "cache_init_params",
            "deepseek_v4_memory_pool",
            "swa_memory_pool",
            "swa_radix_cache",
            "unified_cache_components/swa_component",
            "unified_radix_cache",
        )
    },
    "0.5.23": EVERYWHERE
    | {
        f"srt/mem_cache/{name}.py"
        for name in (
            "allocator/base",
            "allocator/paged",
            "allocator/swa",
            "allocator/token",
            "cache_init_params",
            "deepseek_v4_memory_pool",
            "kv_index_translator",
            "pure_swa_radix_cache",
            "radix_cache",
            "swa_memory_pool",
            "unified_radix_cache",
        )
    },
}


def at(root: Path) -> Tree:
    return Tree(layout.find(root))


def states(root: Path) -> dict[str, State]:
    return {verdict.patch.name: verdict.state for verdict in at(root).survey()}


def apply(root: Path, *names: str, commit: bool = False) -> None:
    with work.opened(root) as (tree, _):
        chosen = plan.choose(tree, names, [], force_unknown=False)
        work.apply(tree, chosen, commit=commit)


def reverse(root: Path, *names: str) -> None:
    with work.opened(root) as (tree, _):
        work.reverse(tree, catalogue.named(list(names)))


@pytest.mark.parametrize("version", NEEDED)
def test_apply_then_reverse_is_the_identity(version: str, tmp_path: Path) -> None:
    root = small_tree(version, tmp_path / "tree")
    before = snapshot(root)
    found = states(root)
    assert {name for name, state in found.items() if state is State.APPLIES} == NEEDED[version]
    assert set(found.values()) <= {State.APPLIES, State.NOT_NEEDED}
    apply(root)
    after = snapshot(root)
    changed = {name for name in after if after[name] != before.get(name)}
    assert f"sglang/{HOME[version]}" in changed
    for name in changed:
        ast.parse((root / name).read_bytes())
    found = states(root)
    assert {name for name, state in found.items() if state is State.APPLIED} == NEEDED[version]
    apply(root)
    assert snapshot(root) == after, "applying twice changed something"
    reverse(root, *NAMES)
    assert snapshot(root) == before


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_apply_on_the_whole_release_touches_nothing_else(version: str, tmp_path: Path) -> None:
    """The whole tree, compared by git; and in the time that the contract allows."""
    # resolved: a copy of a link is a link, and what is patched would be the release itself
    source = checkouts.require(version).resolve() if checkouts.is_fetched(version) else None
    if source is None:
        pytest.skip(f"SGLang {version} is not fetched; run hicache-guard releases fetch {version}")
    subprocess.run(["cp", "-rL", str(source), str(tmp_path / "tree")], check=True)
    command = [sys.executable, "-P", "-m", "hicache_guard.cli.main", "patch"]
    for action in ("apply", "reverse"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run([*command, action, str(tmp_path / "tree")], check=True)
        # Work, not luck with cores: other tests run beside this one.
        assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 10
        listed = subprocess.run(
            ["git", "diff", "--no-index", "--numstat", str(source), str(tmp_path / "tree")],
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        names = {line.split("\t")[2].rpartition("sglang/")[2].rstrip("}") for line in listed}
        gone = sum(int(line.split("\t")[1]) for line in listed)
        assert gone == _lines_kept_in_comments(tmp_path / "tree"), "lines of theirs were lost"
        if action == "reverse":
            assert not listed
        else:
            assert names == FILES[version]


def _lines_kept_in_comments(root: Path) -> int:
    """How many lines of theirs stand in comments of ours, which put them back."""
    found = 0
    for module in table.MODULES:
        file = layout.find(root).file_of(module)
        kept = re.findall(
            r"# hicache-guard: \S+ was (.+)", file.read_text() if file.is_file() else ""
        )
        found += sum(str(ast.literal_eval(each)).count("\n") + 1 for each in kept)
    return found


@pytest.mark.parametrize("version", in_ci("0.5.23", of=("0.5.12", "0.5.23")))
@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_subsets_in_any_order(
    version: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The files depend on which patches are in, not on how they came there."""
    root = small_tree(version, tmp_path_factory.mktemp("trees") / "tree")
    before = snapshot(root)
    needed = sorted(NEEDED[version])
    carried: set[str] = set()
    seen = {frozenset(carried): before}
    for _ in range(data.draw(st.integers(1, 6))):
        some = data.draw(st.sets(st.sampled_from(needed), min_size=1))
        if data.draw(st.booleans()):
            apply(root, *some)
            carried |= some
        else:
            reverse(root, *some)
            carried -= some
        assert seen.setdefault(frozenset(carried), snapshot(root)) == snapshot(root)
        found = states(root)
        assert {name for name, state in found.items() if state is State.APPLIED} == carried
    reverse(root, *needed)
    assert snapshot(root) == before


def _reformatted(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--line-length", "60", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def _changed(old: str, new: str, count: int = -1) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, count)


_TEST = "if swa_tail_len == 0:"

#: What is done to the file, and whether the patch must still apply.
MUTATIONS: dict[str, tuple[Callable[[str], str], bool]] = {
    "reformatted": (_reformatted, True),
    "crlf": (_changed("\n", "\r\n"), True),
    "no final newline": (lambda text: text.rstrip("\n"), True),
    "trailing blanks": (_changed(")\n", ")  \t\n"), True),
    "other methods changed": (_changed("def available_size", "def more_size"), True),
    "lines above": (_changed("\nclass ", "\nMORE = 1\n\n\nclass ", 1), True),
    "comment in it": (_changed(_TEST, f"{_TEST}  # x"), True),
    "renamed variable": (_changed("swa_tail_len", "tail_len"), False),
    "test turned round": (_changed(_TEST, "if 0 == swa_tail_len:"), False),
    "statement in it": (_changed(_TEST, f"x = 1\n        {_TEST}"), False),
    "method renamed": (_changed("def alloc_extend_swa_tail", "def alloc_tail"), False),
    "class renamed": (_changed("class SWATokenToKV", "class WindowTokenToKV"), False),
    "syntax error": (lambda text: text + "\ndef (:\n", False),
}


@pytest.mark.parametrize("version", in_ci("0.5.23", of=("0.5.12", "0.5.23")))
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutated_source_is_patched_rightly_or_refused(
    version: str, mutation: str, tmp_path: Path
) -> None:
    """Mutation seen: an anchor that always holds lets "statement in it" through and fails this."""
    root = small_tree(version, tmp_path / "tree")
    file = root / "sglang" / HOME[version]
    mutate, fits = MUTATIONS[mutation]
    file.write_bytes(mutate(file.read_bytes().decode()).encode())
    before = snapshot(root)
    text = file.read_bytes()
    if not fits:
        with pytest.raises(ConfigError, match="tail-of-zero does not fit"):
            apply(root, "tail-of-zero")
        assert snapshot(root) == before
        return
    apply(root, "tail-of-zero")
    patched = file.read_bytes()
    kept = [line for line in patched.split(b"\n") if line not in text.split(b"\n")]
    assert 1 <= len(kept) <= 3
    assert patched.endswith(b"\n") == text.endswith(b"\n")
    (method,) = (
        node
        for node in ast.walk(ast.parse(patched))
        if isinstance(node, ast.FunctionDef)
        and node.name == "alloc_extend_swa_tail"
        and any("index_fill_" in ast.unparse(inner) for inner in ast.walk(node))
    )
    (branch,) = (
        node
        for node in ast.walk(method)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "swa_tail_len == 0"
    )
    assert "index_fill_" in ast.unparse(branch.body[0])
    assert isinstance(branch.body[1], ast.Return)
    reverse(root, "tail-of-zero")
    assert snapshot(root) == before


def test_what_is_known_of_a_tree_goes_with_it(tmp_path: Path) -> None:
    """Syntax trees of a release are hundreds of MB. Mutation: ``functools.cache`` on a method."""
    with work.opened(small_tree("0.5.23", tmp_path / "tree")) as (tree, _):
        tree.survey()
        known = weakref.ref(tree)
    del tree
    gc.collect()
    assert known() is None


def test_byte_order_mark_stays(tmp_path: Path) -> None:
    """Valid Python, and no fault of the tree's."""
    root = checkout("0.5.23", tmp_path / "tree")
    file = root / "python/sglang" / HOME["0.5.23"]
    mark = b"\xef\xbb\xbf"
    file.write_bytes(mark + file.read_bytes())
    git(root, "commit", "--quiet", "--all", "--message", "a mark")
    before, base = snapshot(root), git(root, "rev-parse", "HEAD").strip()
    assert not at(root).recognition.differs
    with work.opened(root) as (tree, _):
        work.export(tree, catalogue.named(["tail-of-zero"]), tmp_path / "out")
    apply(root)
    patched = file.read_bytes()
    assert patched.startswith(mark)
    assert patched.count(mark) == 1
    ast.parse(patched)
    reverse(root, *NAMES)
    assert snapshot(root) == before
    apply(root, "tail-of-zero", commit=True)
    assert git(root, "status", "--porcelain") == ""
    committed = snapshot(root)
    git(root, "checkout", "--quiet", base)
    git(root, "am", "--quiet", *map(str, (tmp_path / "out").iterdir()))
    assert snapshot(root) == committed


def test_moved_to_another_file_is_found_or_refused(tmp_path: Path) -> None:
    """A class in the place where a later release has it applies; in both places it is refused."""
    root = small_tree("0.5.12", tmp_path / "tree")
    old = root / "sglang/srt/mem_cache/swa_memory_pool.py"
    new = root / "sglang/srt/mem_cache/allocator/swa.py"
    new.parent.mkdir()
    new.write_bytes(old.read_bytes())
    assert states(root)["tail-of-zero"] is State.MISFIT
    old.unlink()
    apply(root, "tail-of-zero")
    assert b"# hicache-guard: tail-of-zero" in new.read_bytes()


def test_what_could_not_be_restored_exactly_is_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each apply proves its reverse. Mutation seen: without that comparison this fails."""
    root = small_tree("0.5.12", tmp_path / "tree")
    before = snapshot(root)
    real = Insert.undo
    monkeypatch.setattr(Insert, "undo", lambda *arguments: real(*arguments) + "\n")
    monkeypatch.setattr(plan, "_edited", plan._edited.__wrapped__)  # which remembers others' edits
    with pytest.raises(ConfigError, match="could not be restored exactly"):
        apply(root)
    assert snapshot(root) == before


def test_difference_is_shown_where_a_reference_is_here(tmp_path: Path) -> None:
    root = small_tree("0.5.23", tmp_path / "tree")
    file = root / "sglang" / HOME["0.5.23"]
    file.write_text(file.read_text().replace("if swa_tail_len == 0:", "if swa_tail_len == 1:"))
    (verdict,) = (v for v in at(root).survey() if v.patch.name == "tail-of-zero")
    assert verdict.state is State.MISFIT
    assert "SWATokenToKVPoolAllocator.alloc_extend_swa_tail" in verdict.why
    changed = [line for line in verdict.difference.splitlines() if line[:1] in "+-"]
    tests = [line.strip("+- :") for line in changed[2:]]
    assert tests == ["if swa_tail_len == 0", "if swa_tail_len == 1"]


def test_name_that_the_patch_uses_and_the_file_lost_is_refused(tmp_path: Path) -> None:
    """It would be a NameError at the first decode step. Mutation seen: no look at names."""
    root = small_tree("0.5.23", tmp_path / "tree")
    file = root / "sglang/srt/mem_cache/allocator/swa.py"
    file.write_text(
        file.read_text()
        .replace("h2d, get_num_new_pages", "h2d, get_num_new_pages as new")
        .replace("get_num_new_pages(", "new(")
    )
    tree = Tree(layout.find(root))
    with pytest.raises(ConfigError, match="has no get_num_new_pages"):
        plan.choose(tree, ["decode-needs-both-sides"], [], force_unknown=False)


def test_half_applied_is_named(tmp_path: Path) -> None:
    root = small_tree("0.5.12", tmp_path / "tree")
    two = Patch(
        name="two-files",
        kind="guard",
        reports=(),
        summary="Decorate two classes",
        reason="",
        targets=tuple(
            Target(
                f"class {name}", (AddImport("from ours import guarded"), Decorate("guarded"))
            )
            for name in ("SWATokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
        ),
        affects=("0.5.12",),
    )  # fmt: skip
    before = snapshot(root)
    with work.opened(root) as (opened, _):
        tree = Tree(opened.layout, (*catalogue.PATCHES, two))
        assert tree.verdict(two).state is State.APPLIES
        work.apply(tree, [two])
    tree = Tree(layout.find(root), (*catalogue.PATCHES, two))
    assert tree.verdict(two).state is State.APPLIED
    file = root / "sglang/srt/mem_cache/allocator.py"
    patched = file.read_text()
    assert "# hicache-guard: two-files\n@guarded\nclass PagedTokenToKVPoolAllocator" in patched
    one_file = (root / "sglang" / HOME["0.5.12"]).read_bytes()
    work.reverse(tree, [two])
    assert snapshot(root) == before
    (root / "sglang" / HOME["0.5.12"]).write_bytes(one_file)
    verdict = Tree(layout.find(root), (*catalogue.PATCHES, two)).verdict(two)
    assert verdict.state is State.MISFIT


@pytest.mark.parametrize("version", NEEDED)
def test_release_is_recognised_without_its_version(version: str, tmp_path: Path) -> None:
    """Releases whose code in question is the same cannot be told apart: 0.5.13 and its post.

    Mutation seen: recognising the tree with our patches in it fails this.
    """
    root = small_tree(version, tmp_path / "tree")
    (root / "sglang" / "_version.py").unlink()
    recognition = at(root).recognition
    assert recognition.says is None
    assert recognition.nearest in (version, f"{version}.post1")
    assert not recognition.differs
    apply(root)
    assert at(root).recognition == recognition


def test_unknown_release_needs_force_and_still_refuses_what_differs(tmp_path: Path) -> None:
    """Mutation seen: ``is_unknown_release`` always False fails this."""
    root = small_tree("0.5.23", tmp_path / "tree")
    (root / "sglang" / "_version.py").write_text("__version__ = version = '0.9.1'\n")
    before = snapshot(root)
    with pytest.raises(ConfigError, match=r"0\.9\.1 is not a release.*--force-unknown"):
        apply(root)
    assert snapshot(root) == before
    with work.opened(root) as (tree, _):
        chosen = plan.choose(tree, [], [], force_unknown=True)
        assert {patch.name for patch in chosen} == NEEDED["0.5.23"]
    file = root / "sglang" / HOME["0.5.23"]
    file.write_text(file.read_text().replace("swa_tail_len == 0", "swa_tail_len <= 0"))
    with work.opened(root) as (tree, _), pytest.raises(ConfigError, match="does not fit"):
        plan.choose(tree, [], [], force_unknown=True)


@pytest.mark.parametrize("version", NEEDED)
def test_table_lists_the_methods_that_a_release_has(version: str, tmp_path: Path) -> None:
    """The data in the repository against the source, as the ast module reads it."""
    root = small_tree(version, tmp_path / "tree")
    (allocator,) = (
        node
        for node in ast.parse((root / "sglang" / HOME[version]).read_bytes()).body
        if isinstance(node, ast.ClassDef) and node.name == "SWATokenToKVPoolAllocator"
    )
    methods = [node.name for node in allocator.body if isinstance(node, ast.FunctionDef)]
    listed = [symbol.split(".") for symbol in table.releases()[version] if "." in symbol]
    assert {method for owner, method in listed if owner == allocator.name} == {
        name for name in methods if methods.count(name) == 1
    }


def test_every_patch_says_something_about_every_release() -> None:
    for patch in catalogue.PATCHES:
        told = [*patch.affects, *patch.clear]
        assert sorted(told) == sorted(table.releases()), patch.name
        for version in patch.affects:
            for symbol in patch.anchors:
                assert symbol in table.releases()[version], (patch.name, version, symbol)


# ---------------------------------------------------------------- git


def test_export_is_taken_by_git_am(tmp_path: Path) -> None:
    """Exported from a wheel, taken by a clean checkout; the same as applying there."""
    wheel = small_tree("0.5.12", tmp_path / "wheel")
    clean = checkout("0.5.12", tmp_path / "clean")
    base = git(clean, "rev-parse", "HEAD").strip()
    out = tmp_path / "out"
    with work.opened(wheel) as (tree, _):
        chosen = work.exportable(tree, [], [])
        assert len(work.export(tree, chosen, out)) == len(NEEDED["0.5.12"])
    git(clean, "am", "--quiet", *sorted(map(str, out.iterdir())))
    assert git(clean, "status", "--porcelain") == ""
    by_mail = snapshot(clean)
    found = states(clean)
    assert {name for name, state in found.items() if state is State.APPLIED} == NEEDED["0.5.12"]
    git(clean, "checkout", "--quiet", "-b", "other", base)
    apply(clean)
    assert snapshot(clean) == by_mail
    git(clean, "checkout", "--quiet", "main", "--force")
    reverse(clean, *NAMES)
    assert git(clean, "diff", base) == "", "what git am applied is reversed too"


def test_export_leaves_out_what_is_applied_but_not_asked_for(tmp_path: Path) -> None:
    """Mutation seen: steps on top of what the tree carries fail this."""
    root = checkout("0.5.12", tmp_path / "tree")
    base = git(root, "rev-parse", "HEAD").strip()
    apply(root, "tail-clears-mapping", commit=True)
    with work.opened(root) as (tree, _):
        work.export(tree, catalogue.named(["tail-of-zero"]), tmp_path / "out")
    git(root, "checkout", "--quiet", base)
    git(root, "am", "--quiet", *map(str, (tmp_path / "out").iterdir()))
    assert states(root)["tail-clears-mapping"] is State.APPLIES


def test_one_commit_a_patch_that_names_its_report(tmp_path: Path) -> None:
    root = checkout("0.5.12", tmp_path / "tree")
    apply(root, commit=True)
    assert git(root, "status", "--porcelain") == ""
    made = [patch for patch in catalogue.PATCHES if patch.name in NEEDED["0.5.12"]]
    titles = git(root, "log", "--format=%s").splitlines()
    assert titles.pop() == "base"
    for number, (patch, title) in enumerate(zip(reversed(made), titles, strict=True)):
        assert title.startswith(patch.summary)
        assert all(f"#{report}" in title for report in patch.reports)
        files = git(root, "show", "--numstat", "--format=", f"HEAD~{number}").split()
        assert len(files) == 3 * len({at(root).home(target.symbol) for target in patch.targets})
    git(root, "checkout", "--quiet", "HEAD~1")
    found = states(root)
    assert {name for name, state in found.items() if state is State.APPLIES} == {made[-1].name}
    assert {name for name, state in found.items() if state is State.APPLIED} == {
        patch.name for patch in made[:-1]
    }


def test_dirty_trees(tmp_path: Path) -> None:
    """Mutation seen: each of the two refusals taken out fails this."""
    root = checkout("0.5.12", tmp_path / "tree")
    edited = root / "python/sglang" / HOME["0.5.12"]
    other = root / "python/sglang/srt/mem_cache/radix_cache.py"
    clean = snapshot(root)

    other.write_text(other.read_text() + "\n# mine\n")
    with pytest.raises(ConfigError, match=r"radix_cache\.py has uncommitted changes; commit or"):
        apply(root, commit=True)
    assert git(root, "log", "--format=%s").split() == ["base"]
    apply(root)  # not a file that is edited
    reverse(root, *NAMES)
    git(root, "checkout", "--quiet", ".")
    assert snapshot(root) == clean

    edited.write_text(edited.read_text() + "\n# mine\n")
    with pytest.raises(ConfigError, match=r"swa_memory_pool\.py has uncommitted changes"):
        apply(root)
    git(root, "commit", "--quiet", "--all", "--message", "mine")
    apply(root)  # the user's own commit; the anchors hold
    assert set(git(root, "status", "--porcelain").split()) == {
        "M", *(f"python/sglang/{name}" for name in FILES["0.5.12"])
    }  # fmt: skip
    edited.write_text(edited.read_text() + "\n# more of mine\n")
    reverse(root, "tail-of-zero")
    apply(root, "tail-of-zero")  # dirty, but it carries our patch
    assert edited.read_text().endswith("\n# more of mine\n")
    reverse(root, *NAMES)
    numbers = git(root, "diff", "--numstat").split()
    assert numbers == ["2", "0", f"python/sglang/{HOME['0.5.12']}"], "only what is the user's"


def _inside(top: Path, below: str, ignored: str = "") -> Path:
    """SGLang in a folder of somebody's repository, tracked unless ``ignored``."""
    root = small_tree("0.5.12", top / below, "python/sglang")
    (top / "README").write_text("a project\n")
    (top / ".gitignore").write_text(f"{ignored}\n")
    make_repository(top)
    return root


def test_checkout_in_a_folder_of_a_bigger_repository(tmp_path: Path) -> None:
    """Mutation seen: a look at ``.git`` in the root only."""
    top = tmp_path / "project"
    root = _inside(top, "third party/sglang")
    file = root / "python/sglang" / HOME["0.5.12"]
    clean = snapshot(top)
    file.write_text(file.read_text() + "\n# mine\n")
    before = snapshot(top)
    with pytest.raises(ConfigError, match=r"swa_memory_pool\.py has uncommitted changes"):
        apply(root)
    assert snapshot(top) == before
    git(top, "checkout", "--quiet", ".")

    (top / "README").write_text("changed\n")
    with pytest.raises(ConfigError, match="README has uncommitted changes"):
        apply(root, commit=True)
    git(top, "checkout", "--quiet", ".")

    apply(root, commit=True)
    assert git(top, "status", "--porcelain") == ""
    assert len(git(top, "log", "--format=%h").split()) == 1 + len(NEEDED["0.5.12"])
    assert set(git(top, "diff", "--name-only", "-z", "HEAD", "main~1").split("\0")) <= {
        "", *(f"third party/sglang/python/sglang/{name}" for name in FILES["0.5.12"])
    }  # fmt: skip
    reverse(root, *NAMES)
    assert snapshot(top) == clean


@pytest.mark.parametrize("ignored", ["", "venv/"])
def test_tree_that_the_repository_around_it_does_not_track(ignored: str, tmp_path: Path) -> None:
    top = tmp_path / "project"
    _inside(top, "elsewhere")
    (top / ".gitignore").write_text(f"{ignored}\n")
    git(top, "commit", "--quiet", "--all", "--allow-empty", "--message", "ignore")
    root = small_tree("0.5.12", top / "venv/lib/site-packages")
    before = snapshot(top)
    with pytest.raises(ConfigError, match=r"is not in git .*; apply without --commit"):
        apply(root, commit=True)
    assert snapshot(top) == before
    apply(root)
    reverse(root, *NAMES)
    assert snapshot(top) == before


def test_repository_that_git_refuses_to_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _inside(tmp_path / "project", "sglang")
    (tmp_path / "project/.git/config").write_text("[broken\n")
    before = snapshot(root)
    with pytest.raises(ConfigError, match=r"git rev-parse failed in .*: .*bad config"):
        apply(root)
    assert snapshot(root) == before


def test_commit_without_an_identity_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = checkout("0.5.12", tmp_path / "tree")
    git(root, "config", "user.useConfigOnly", "true")
    git(root, "config", "--unset", "user.email")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    before = snapshot(root)
    with pytest.raises(ConfigError, match="git commit-tree failed"):
        apply(root, commit=True)
    assert snapshot(root) == before
    assert git(root, "status", "--porcelain") == ""


# ---------------------------------------------------------------- layouts


def test_every_way_to_name_a_tree(tmp_path: Path) -> None:
    root = checkout("0.5.12", tmp_path / "sgl")
    site = small_tree("0.5.12", tmp_path / "lib" / "site-packages")
    for path in (root, root / "python", root / "python" / "sglang"):
        assert layout.find(path) == Layout("checkout", root, root / "python" / "sglang")
    for path in (site, site / "sglang"):
        assert layout.find(path) == Layout("site-packages", site, site / "sglang")


@pytest.mark.parametrize(
    "name",
    ["srt", "srt/mem_cache", "srt/mem_cache/swa_memory_pool.py", "srt/mem_cache/allocator.py"],
)
def test_links_inside_are_refused(name: str, tmp_path: Path) -> None:
    """Also to a place inside the tree. Mutation seen: without ``refuse_links`` this fails."""
    root = small_tree("0.5.12", tmp_path / "tree")
    real = root / "sglang" / name
    real.rename(tmp_path / "outside")
    real.symlink_to(tmp_path / "outside")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="is a link"):
        apply(root)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("what", ["missing", "empty", "file", "loop"])
def test_what_is_no_tree_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    elif what == "file":
        path.write_text("x")
    elif what == "loop":
        path.symlink_to(path)
    with pytest.raises(ConfigError, match=r"cannot read|holds no SGLang"):
        layout.find(path)
