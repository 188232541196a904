"""The hooks as source edits: what is decorated, what that does in each mode, and what is refused.

Whatever runs here is a real release, patched by the tool; the scripts that it runs import SGLang
and nothing of ours unless they look at the hooks.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patch_trees import small_tree, snapshot

from hicache_guard import checkouts
from hicache_guard.adapters import releases
from hicache_guard.adapters.link import StandIn
from hicache_guard.patches import layout, plan, table, work
from hicache_guard.patches.guards import GUARDS
from hicache_guard.patches.plan import State, Tree
from hicache_guard.repro import trees

VERSIONS = ("0.5.12", "0.5.23")
SWA = {
    "0.5.12": "srt/mem_cache/swa_memory_pool.py",
    "0.5.23": "srt/mem_cache/allocator/swa.py",
}
PAGED = {
    "0.5.12": "srt/mem_cache/allocator.py",
    "0.5.23": "srt/mem_cache/allocator/paged.py",
}
BASE = {
    "0.5.12": "srt/mem_cache/allocator.py",
    "0.5.23": "srt/mem_cache/allocator/base.py",
}


@pytest.fixture(scope="module", params=VERSIONS)
def patched(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """A release and a whole copy of it that carries the guard patches."""
    version = request.param
    if not checkouts.is_fetched(version):
        pytest.skip(f"SGLang {version} is not fetched; run hicache-guard releases fetch {version}")
    with trees.tree(version, "patch") as root:
        yield version, root


def run(tree: Path, code: str, mode: str | None, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**checkouts.environment(tree), "SGLANG_PLUGINS": "none-of-ours", **more}
    if mode is not None:
        environment["HICACHE_GUARD"] = mode
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True
    )


def with_changed(tree: Path, place: Path, name: str, old: str, new: str) -> Path:
    """The same tree by links, with one file that was edited by hand."""
    subprocess.run(["cp", "-rs", str(tree.resolve()), str(place)], check=True)
    file = place / "sglang" / name
    text = file.read_text()
    assert text.count(old) == 1, (name, old)
    file.unlink()
    file.write_text(text.replace(old, new))
    return place


def apply_guards(root: Path) -> None:
    with work.opened(root) as (tree, _):
        work.apply(tree, plan.choose(tree, ["guards"], [], force_unknown=False))


# ---------------------------------------------------------------- the patches, as data


def test_every_release_has_one_guard_patch_with_all_its_seams() -> None:
    """Mutation seen: a seam, or an anchor, left out of ``_guard`` fails this."""
    for version, release in releases.RELEASES.items():
        (patch,) = (patch for patch in GUARDS if version in patch.affects)
        functions = {name for seam in release.seams if not seam.cls for name in seam.methods}
        classes = {f"class {seam.cls}" for seam in release.seams if seam.cls}
        assert {target.symbol for target in patch.targets} == classes | functions
        hooked = {
            f"{seam.cls}.{name}" for seam in release.seams if seam.cls for name in seam.methods
        }
        hooked -= releases.MADE
        anchors = {name for name in patch.anchors if not name.startswith("class ")}
        assert functions <= anchors
        assert {name.split(".")[1] for name in hooked - anchors} <= releases.STAND_INS
        assert anchors <= table.releases()[version].keys()


def test_stand_ins_are_those_of_the_handlers() -> None:
    handlers = {
        (seam.handlers, method)
        for release in releases.RELEASES.values()
        for seam in release.seams
        for method in seam.methods
    }
    assert {
        method
        for module, method in handlers
        if isinstance(
            getattr(importlib.import_module(f"hicache_guard.adapters.{module}"), method), StandIn
        )
    } == releases.STAND_INS


@pytest.mark.sglang
@pytest.mark.parametrize("version", checkouts.SUPPORTED)
def test_each_seam_class_is_decorated_and_nothing_else(version: str, tmp_path: Path) -> None:
    root = small_tree(version, tmp_path / "tree")
    before = snapshot(root)
    apply_guards(root)
    (patch,) = (patch for patch in GUARDS if version in patch.affects)
    expected = {
        (seam.module, name): f"guarded('{patch.affects[0]}')"
        for seam in releases.RELEASES[version].seams
        for name in seam.names
    }
    found = {}
    for module in table.MODULES:
        file = root.joinpath(*module.split(".")).with_suffix(".py")
        if not file.is_file():
            continue
        for node in ast.parse(file.read_bytes()).body:
            for decorator in getattr(node, "decorator_list", ()):
                if "guarded" in ast.unparse(decorator):
                    found[module, node.name] = ast.unparse(decorator)  # type: ignore[attr-defined]
    assert found == expected
    assert Tree(layout.find(root)).recognition.differs == ()
    with work.opened(root) as (tree, _):
        work.reverse(tree, [patch])
    assert snapshot(root) == before


@pytest.mark.sglang
@pytest.mark.parametrize("version", VERSIONS)
def test_hooked_method_that_differs_is_refused(version: str, tmp_path: Path) -> None:
    """Before the patch and after it. Mutations seen: no ``needs`` in ``_guard``, and applied
    guards not judged by their anchors, each fail this."""
    root = small_tree(version, tmp_path / "tree")
    file = root / "sglang" / SWA[version]
    clean = file.read_bytes()
    apply_guards(root)
    for text in (clean, file.read_bytes()):
        changed = text.replace(b"def free_swa(self, free_index", b"def free_swa(self, free_indices")
        assert changed != text
        file.write_bytes(changed)
        (verdict,) = (
            verdict
            for verdict in Tree(layout.find(root)).survey()
            if verdict.patch.family == "guards"
        )
        assert verdict.state is State.MISFIT
        if text == clean:
            assert "half applied" in verdict.why
        else:
            assert "SWATokenToKVPoolAllocator.free_swa is not what it was made for" in verdict.why
    other = small_tree(version, tmp_path / "other")
    (other / "sglang" / SWA[version]).write_bytes(
        clean.replace(b"def free_swa(self, free_index", b"def free_swa(self, free_indices")
    )
    (verdict,) = (
        verdict for verdict in Tree(layout.find(other)).survey() if verdict.patch.family == "guards"
    )
    assert verdict.state is State.MISFIT
    assert "SWATokenToKVPoolAllocator.free_swa" in verdict.why
    assert version in verdict.patch.affects


# ---------------------------------------------------------------- mode off

OFF = """
import sys
from hicache_guard.adapters import patched
class Anything:
    def method(self): ...
before = dict(vars(Anything))
assert patched.guarded("0.5.23")(Anything) is Anything
assert dict(vars(Anything)) == before
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"torch", "sglang", "libcst"}, loaded
print(sorted(name for name in sys.modules if name.startswith("hicache_guard")))
"""


@pytest.mark.parametrize("mode", [None, "", "off", " OFF "])
def test_decorator_in_mode_off_does_and_imports_nothing(mode: str | None, tmp_path: Path) -> None:
    """Mutation seen: hooks imported at the top of ``patched`` fails this."""
    done = run(tmp_path, OFF, mode)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "['hicache_guard',", "'hicache_guard.adapters',", "'hicache_guard.adapters.patched',",
        "'hicache_guard.core',", "'hicache_guard.core.errors',", "'hicache_guard.core.modes']",
    ]  # fmt: skip


CLASSES = """
import importlib, sys
from hicache_guard.adapters import patched
from hicache_guard.adapters.releases import RELEASES
seams = RELEASES[VERSION].seams
for seam in seams:
    if seam.module == "sglang.srt.managers.scheduler":
        continue  # it needs all that a server needs
    module = importlib.import_module(seam.module)
    cls = getattr(module, seam.cls) if seam.cls else module
    ours = [name for name, value in vars(cls).items()
            if "hicache_guard." in repr(value) or hasattr(value, "__hicache_guard_original__")]
    assert not ours or ours == ["guarded"], (cls, ours)
assert {(seam.module, name) for seam in seams if "scheduler" not in seam.module
        for name in seam.names} == set(patched.decorations)
assert "hicache_guard.adapters.hooks" not in sys.modules
print("untouched")
"""


@pytest.mark.sglang
def test_patched_release_in_mode_off_has_the_classes_of_the_release(
    patched: tuple[str, Path],
) -> None:
    version, tree = patched
    done = run(tree, CLASSES.replace("VERSION", repr(version)), "off")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "untouched"


def test_mode_that_is_none_ends_the_process_in_one_line(tmp_path: Path) -> None:
    """Mutation seen: the ConfigError let through fails this."""
    done = run(tmp_path, OFF, "shout")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "hicache-guard: unknown guard mode 'shout'; choose one of off, observe, enforce, strict"
    ]


# ---------------------------------------------------------------- guarded without a line of ours

#: Builds a pool as a script of somebody else's would, and frees the same slots twice.
PLAIN = """
import inspect, sys
import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
try:
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
except ImportError:
    from sglang.srt.mem_cache.swa_memory_pool import SWATokenToKVPoolAllocator
choices = dict(size=64, size_swa=32, page_size=4, dtype=torch.float16, head_num=1, head_dim=8,
               swa_attention_layer_ids=[0], full_attention_layer_ids=[1], device="cpu")
if "enable_kvcache_transpose" in inspect.signature(SWAKVPool).parameters:
    choices["enable_kvcache_transpose"] = False
kv = SWAKVPool(**choices)
pool = SWATokenToKVPoolAllocator(64, 32, 4, torch.float16, "cpu", kv, False)
one = lambda *values: torch.tensor(values)
slots = pool.alloc_extend(one(0), one(0), one(8), one(8), one(-1), 8)
print("before", pool.available_size())
pool.free(slots)
try:
    pool.free(slots)
except Exception as error:
    print(type(error).__name__, str(error).partition(":")[0])
pool.translate = pool.get_kvcache().translate_loc_from_full_to_swa(one(0))
print("after", pool.full_available_size())
"""


@pytest.mark.sglang
@pytest.mark.parametrize("mode", ["off", "enforce", "strict"])
def test_script_that_only_imports_sglang_is_guarded(mode: str, patched: tuple[str, Path]) -> None:
    """72: what the unguarded release then believes to have free, of 64 slots."""
    _, tree = patched
    done = run(tree, PLAIN, mode)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert ("GuardViolation double-free" in lines) == (mode == "strict")
    assert lines[-1] == ("after 72" if mode == "off" else "after 64")
    assert ("double-free" in done.stderr) == (mode != "off")


TWICE = """
import sys
from hicache_guard.repro.pools import allocator_classes
allocator, _ = allocator_classes()
import hicache_guard
from hicache_guard.adapters import hooks, state
from hicache_guard.adapters.hooks import HookStatus

def depth(method):
    count = 0
    while hasattr(method, hooks._MARK):
        method, count = getattr(method, hooks._MARK), count + 1
    return count

def seen():
    return {hook.route for hook in hooks.hooks(hooks.running_release(), load=False)}

assert depth(allocator.free) == 1
assert state.settings().mode.value == "strict"
reports = []
hicache_guard.install("enforce", on_report=reports.append)
assert depth(allocator.free) == 1
assert seen() == {"patch"}, seen()
hicache_guard.install("enforce", on_report=reports.append)
assert depth(allocator.free) == 1

from hicache_guard.repro.pools import build, extend
pool = build()
slots = extend(pool, 8)
pool.free(slots)
pool.free(slots)
hicache_guard.uninstall()
assert len(reports) == 1, reports
assert depth(allocator.free) == 0
assert "free_pages" not in dir(allocator)
for name in [name for name in sys.modules if "deepseek_v4_memory_pool" in name]:
    del sys.modules[name]
assert seen() == {None}, seen()
hicache_guard.install("observe")
assert depth(allocator.free) == 1
assert seen() == {"install", "patch"} or seen() == {"install"}, seen()
print("once")
"""


@pytest.mark.sglang
def test_install_on_a_patched_release_does_not_hook_twice(patched: tuple[str, Path]) -> None:
    """And uninstall takes out what a patch put in, for good.

    Mutations seen: hooking without a look at what is there; ``uninstall`` that does not withdraw.
    """
    _, tree = patched
    done = run(tree, TWICE, "strict")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "once"


# ---------------------------------------------------------------- incomplete


@pytest.mark.sglang
@pytest.mark.parametrize("lost", ["a sub-allocator", "the allocator", "a method"])
def test_missing_hook_is_refused_or_in_observe_said(
    lost: str, patched: tuple[str, Path], tmp_path: Path
) -> None:
    """In one line. Mutations seen: no ``require_complete`` in ``attach`` (a sub-allocator), none in
    the translation (the allocator), ``decorated`` that does not complain (a method)."""
    version, tree = patched
    (decorator,) = {
        f'@guarded("{patch.affects[0]}")\n' for patch in GUARDS if version in patch.affects
    }
    name, old, new, says = {
        "a sub-allocator": (
            PAGED[version],
            f"{decorator}class PagedTokenToKVPoolAllocator(",
            "class PagedTokenToKVPoolAllocator(",
            "PagedTokenToKVPoolAllocator.alloc_extend",
        ),
        "the allocator": (
            SWA[version],
            f"{decorator}class SWATokenToKVPoolAllocator(",
            "class SWATokenToKVPoolAllocator(",
            "SWATokenToKVPoolAllocator.free_swa",
        ),
        "a method": (
            BASE[version],
            "    def merge_and_sort_free(",
            "    def sort_free(",
            "1 hook is not in place: sglang.srt.mem_cache",
        ),
    }[lost]
    broken = with_changed(tree, tmp_path / "tree", name, old, new)
    # What its own class lacks, a decorator sees before anything is built.
    code = PLAIN if lost != "a method" else PLAIN.partition("choices =")[0]
    for mode in ("enforce", "strict") if lost == "a method" else ("enforce",):
        done = run(broken, code, mode)
        assert done.returncode == 1
        assert "after" not in done.stdout
        assert "Traceback" not in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("hicache-guard: ")
        assert says in last
        assert "HICACHE_GUARD=observe" in last
    done = run(broken, PLAIN, "observe")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("not in place") == 1
    assert says in done.stderr


@pytest.mark.sglang
def test_decorations_of_two_releases_are_refused(patched: tuple[str, Path], tmp_path: Path) -> None:
    version, tree = patched
    (first,) = {patch.affects[0] for patch in GUARDS if version in patch.affects}
    other = with_changed(
        tree,
        tmp_path / "tree",
        PAGED[version],
        f'@guarded("{first}")\nclass PagedTokenToKVPoolAllocator(',
        '@guarded("0.5.14")\nclass PagedTokenToKVPoolAllocator(',
    )
    done = run(other, PLAIN, "enforce")
    assert done.returncode == 1
    assert "patched for different releases" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
