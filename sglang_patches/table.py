"""The fingerprints of every release, as data, and what can be read off them.

``fingerprints.json`` holds, for each method of the classes in ``HOMES``, its fingerprints and the
releases that have each. ``python -m hicache_guard.patches.table FOLDER...`` adds the releases
unpacked in the folders; that is all it takes to make a new release known.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from hicache_guard.core.errors import ConfigError
from hicache_guard.patches import layout
from hicache_guard.patches.fingerprint import fingerprint, symbols
from hicache_guard.patches.layout import Layout

_MEM = "sglang.srt.mem_cache"
_ATTENTION = "sglang.srt.layers.attention"

#: Class, or function, to the modules that it has lived in, newest first.
HOMES: dict[str, tuple[str, ...]] = {
    "SWATokenToKVPoolAllocator": (f"{_MEM}.allocator.swa", f"{_MEM}.swa_memory_pool"),
    "PureSWATokenToKVPoolAllocator": (f"{_MEM}.allocator.swa",),
    "BaseTokenToKVPoolAllocator": (f"{_MEM}.allocator.base", f"{_MEM}.allocator"),
    "PagedTokenToKVPoolAllocator": (f"{_MEM}.allocator.paged", f"{_MEM}.allocator"),
    "TokenToKVPoolAllocator": (f"{_MEM}.allocator.token", f"{_MEM}.allocator"),
    "SWAKVPool": (f"{_MEM}.swa_memory_pool",),
    "DeepSeekV4TokenToKVPool": (f"{_MEM}.deepseek_v4_memory_pool",),
    "RadixCache": (f"{_MEM}.radix_cache",),
    "SWARadixCache": (f"{_MEM}.swa_radix_cache",),
    "HiRadixCache": (f"{_MEM}.hiradix_cache",),
    "UnifiedRadixCache": (f"{_MEM}.unified_radix_cache",),
    "SchedulePolicy": ("sglang.srt.managers.schedule_policy",),
    "SWAComponent": (
        f"{_MEM}.unified_cache.components.swa",
        f"{_MEM}.unified_cache.components.swa_component",
        f"{_MEM}.unified_cache_components.swa_component",
    ),
    "HiCacheController": ("sglang.srt.managers.cache_controller",),
    "PureSWARadixCache": (f"{_MEM}.pure_swa_radix_cache",),
    "CacheInitParams": (f"{_MEM}.cache_init_params",),
    "StreamingSession": ("sglang.srt.session.streaming_session",),
    "FlashInferIndicesUpdaterDecode": (f"{_ATTENTION}.flashinfer_backend",),
    "FlashInferIndicesUpdaterPrefill": (f"{_ATTENTION}.flashinfer_backend",),
    "update_sliding_window_buffer": (f"{_ATTENTION}.triton_backend",),
    "update_sliding_window_buffer_cuda_graph": (f"{_ATTENTION}.triton_backend",),
    "TorchNativeAttnBackend": (f"{_ATTENTION}.torch_native_backend",),
    "KVIndexTranslator": (f"{_MEM}.kv_index_translator",),
    "Scheduler": ("sglang.srt.managers.scheduler",),
}

#: Of classes that do much else, the methods that are looked at; forks change the rest freely.
ONLY: dict[str, frozenset[str]] = {
    "Scheduler": frozenset({"run_batch", "process_batch_result", "get_next_batch_to_run"}),
    "FlashInferIndicesUpdaterDecode": frozenset({"call_begin_forward"}),
    "FlashInferIndicesUpdaterPrefill": frozenset({"call_begin_forward"}),
    "TorchNativeAttnBackend": frozenset({"forward_extend", "forward_decode"}),
}

MODULES = tuple(dict.fromkeys(module for homes in HOMES.values() for module in homes))

_TABLE = Path(__file__).with_name("fingerprints.json")


def modules_of(symbol: str) -> tuple[str, ...]:
    """Where to look for a symbol."""
    return HOMES[_class_of(symbol)]


def _class_of(symbol: str) -> str:
    return symbol.removeprefix("class ").split(".")[0]


def _is_looked_at(symbol: str) -> bool:
    only = ONLY.get(_class_of(symbol))
    return only is None or symbol.startswith("class ") or symbol.partition(".")[2] in only


@functools.cache
def _by_symbol() -> dict[str, dict[str, list[str]]]:
    table: dict[str, dict[str, list[str]]] = json.loads(_TABLE.read_text())
    return table


@functools.cache
def releases() -> Mapping[str, Mapping[str, str]]:
    """Release to symbol to fingerprint, oldest release first."""
    found: dict[str, dict[str, str]] = {}
    for symbol, prints in _by_symbol().items():
        for mark, versions in prints.items():
            for version in versions:
                found.setdefault(version, {})[symbol] = mark
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(version: str) -> tuple[tuple[int, int], ...]:
    return tuple(
        (1, int(part.removeprefix("post"))) if part.startswith("post") else (0, int(part))
        for part in version.split(".")
    )


def measure(modules: Mapping[str, Iterable[tuple[str, ast.AST]]]) -> dict[str, str]:
    """Symbol to fingerprint, from the symbols of each of ``MODULES`` that there is."""
    found: dict[str, str] = {}
    for module, pairs in modules.items():
        ours = [
            (name, node)
            for name, node in pairs
            # Of a whole class nothing is kept: its header and its methods say more.
            if not isinstance(node, ast.ClassDef) or name.startswith("class ")
            if module in HOMES.get(_class_of(name), ()) and _is_looked_at(name)
        ]
        count = Counter(name for name, _ in ours)
        # A property and its setter share a name: nothing can be said about it.
        found |= {name: fingerprint(node) for name, node in ours if count[name] == 1}
    return found


def nearest(found: Mapping[str, str], says: str | None) -> tuple[str, list[str]]:
    """The release that a tree differs least from, and the symbols that differ.

    Of releases with the same code it is the one that the tree ``says`` it is, else the newest.
    """
    differing = {
        version: sorted(
            name for name in known.keys() | found.keys() if known.get(name) != found.get(name)
        )
        for version, known in releases().items()
    }
    version = min(reversed(differing), key=lambda each: (len(differing[each]), each != says))
    return version, differing[version]


def main() -> int:
    """Add the releases unpacked in the folders named to the table."""
    table = dict(_by_symbol()) if _TABLE.is_file() else {}
    for folder in sys.argv[1:]:
        tree = layout.find(Path(folder))
        version = version_of(tree)
        if version is None:
            raise ConfigError(f"{folder} does not say which release it is")
        for prints in table.values():
            for versions in prints.values():
                if version in versions:
                    versions.remove(version)
        files = {module: tree.file_of(module) for module in MODULES}
        found = measure(
            {
                module: symbols(ast.parse(file.read_bytes()))
                for module, file in files.items()
                if file.is_file()
            }
        )
        for symbol, mark in found.items():
            table.setdefault(symbol, {}).setdefault(mark, []).append(version)
        print(f"{version}: {len(found)} symbols")
    rows = [
        f"{json.dumps(symbol)}: {json.dumps(kept)}"
        for symbol, prints in sorted(table.items())
        if (kept := {mark: sorted(on, key=_order) for mark, on in prints.items() if on})
    ]
    _TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    return 0


def version_of(tree: Layout) -> str | None:
    """What a tree says of itself: the version that its build wrote down, if any."""
    for name in ("_version", "version"):
        file = tree.file_of(f"sglang.{name}")
        try:
            parsed = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in parsed.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                if "__version__" in names and isinstance(node.value.value, str):
                    return node.value.value
    return None


if __name__ == "__main__":
    sys.exit(main())
