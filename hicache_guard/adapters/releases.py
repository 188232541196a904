"""What differs between SGLang releases, as data: where the seams are and how they behave.

Read from each release's wheel; every fact here is exercised by the catalogue and the property tests
on that release.
"""

from __future__ import annotations

from dataclasses import dataclass

_MEM = "sglang.srt.mem_cache"


@dataclass(frozen=True)
class Seam:
    """A class of SGLang and the methods of it that are hooked.

    ``handlers`` names the module of ``hicache_guard.adapters`` whose functions, named like the
    methods, stand around them.
    """

    module: str
    cls: str
    handlers: str
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Release:
    """One SGLang release.

    ``deferred_frees``: the public frees that an open free group only queues; they reach the pools
    when the group ends. ``frees_whole_pages``: ``free_swa`` clears the entries of every page that
    it touches, not only those it was told of. ``segment_frees``: window frees by segment exist, and
    like every window free of one-slot pages they release whatever an entry holds.
    """

    version: str
    seams: tuple[Seam, ...]
    deferred_frees: frozenset[str]
    frees_whole_pages: bool
    segment_frees: bool = False


_ALLOCATIONS = ("alloc", "alloc_extend", "alloc_decode")
_STATE = ("backup_state", "restore_state")
_SEGMENTS = ("free_segment", "free_swa_segment", "free_full", "free_full_segment")


_DSV4 = f"{_MEM}.deepseek_v4_memory_pool"
_TRANSLATIONS = tuple(
    Seam(module, cls, "kv_pool", ("translate_loc_from_full_to_swa",))
    for module, cls in (
        (f"{_MEM}.swa_memory_pool", "SWAKVPool"),
        (_DSV4, "DeepSeekV4TokenToKVPool"),
    )
)
_REMEMBERED_TRANSLATIONS = (
    Seam(
        f"{_MEM}.swa_memory_pool",
        "SWAKVPool",
        "cached_translation",
        ("set_swa_loc", "set_kv_buffer"),
    ),
    Seam(
        _DSV4,
        "DeepSeekV4TokenToKVPool",
        "cached_translation",
        ("set_swa_key_buffer_radix_fused", "set_swa_key_buffer_radix_fused_norm_rope"),
    ),
)


def _seams(
    homes: tuple[str, str, str, str],
    *,
    allocator: tuple[str, ...],
    base: tuple[str, ...],
    paged: tuple[str, ...],
    group: str,
) -> tuple[Seam, ...]:
    """The seams that every release has. ``homes`` are the modules of the four allocator classes.

    ``group`` is the class that defines ``free_group_end`` for the hybrid allocator.
    """
    swa, base_home, paged_home, token_home = homes
    hybrid = ("__init__", *_ALLOCATIONS, "alloc_extend_swa_tail", "free", "free_swa", "clear")
    grouped = {"SWATokenToKVPoolAllocator": swa, "BaseTokenToKVPoolAllocator": base_home}
    return (
        Seam(swa, "SWATokenToKVPoolAllocator", "allocator", (*hybrid, *allocator)),
        Seam(grouped[group], group, "allocator", ("free_group_end",)),
        Seam(base_home, "BaseTokenToKVPoolAllocator", "page_pool", base),
        Seam(
            paged_home, "PagedTokenToKVPoolAllocator", "page_pool", (*_ALLOCATIONS, "clear", *paged)
        ),
        Seam(
            token_home,
            "TokenToKVPoolAllocator",
            "page_pool",
            ("alloc", "free", "clear"),
        ),
        *_TRANSLATIONS,
    )


_BEFORE_13 = (f"{_MEM}.swa_memory_pool", *(f"{_MEM}.allocator",) * 3)
_SINCE_13 = (
    f"{_MEM}.allocator.swa",
    f"{_MEM}.allocator.base",
    f"{_MEM}.allocator.paged",
    f"{_MEM}.allocator.token",
)
_PURE_WINDOW = (Seam(_SINCE_13[0], "PureSWATokenToKVPoolAllocator", "pure_window", ("__init__",)),)


def _until_15(homes: tuple[str, str, str, str]) -> tuple[Seam, ...]:
    return _seams(
        homes,
        allocator=("set_full_to_swa_mapping", *_STATE),
        base=("free_pages", "merge_and_sort_free", "restore_state"),
        paged=("free",),
        group="BaseTokenToKVPoolAllocator",
    )


RELEASES: dict[str, Release] = {
    release.version: release
    for release in (
        Release(
            "0.5.12",
            (*_until_15(_BEFORE_13), *_REMEMBERED_TRANSLATIONS),
            deferred_frees=frozenset({"free"}),
            frees_whole_pages=False,
        ),
        Release(
            "0.5.12.post1",
            (*_until_15(_BEFORE_13), *_REMEMBERED_TRANSLATIONS),
            deferred_frees=frozenset({"free"}),
            frees_whole_pages=False,
        ),
        Release(
            "0.5.13",
            _until_15(_SINCE_13),
            deferred_frees=frozenset({"free"}),
            frees_whole_pages=False,
        ),
        Release(
            "0.5.15",
            (
                *_until_15(_SINCE_13),
                *_PURE_WINDOW,
                Seam(
                    f"{_MEM}.swa_radix_cache",
                    "SWARadixCache",
                    "known_writers",
                    ("_recover_tombstone_keeping_locked_full",),
                ),
                Seam(
                    f"{_MEM}.unified_cache_components.swa_component",
                    "SWAComponent",
                    "known_writers",
                    ("_restore_device_value_with_locked_full",),
                ),
            ),
            deferred_frees=frozenset({"free"}),
            frees_whole_pages=True,
        ),
        Release(
            "0.5.18",
            (
                *_seams(
                    _SINCE_13,
                    allocator=("set_full_to_swa_mapping", "resize"),
                    base=("free_pages", "merge_and_sort_free"),
                    paged=("_release_page_ids", "free", "free_segment"),
                    group="SWATokenToKVPoolAllocator",
                ),
                *_PURE_WINDOW,
                Seam(
                    f"{_MEM}.swa_radix_cache",
                    "SWARadixCache",
                    "known_writers",
                    ("_recover_tombstone_keeping_locked_full",),
                ),
                Seam(
                    f"{_MEM}.unified_cache.components.swa_component",
                    "SWAComponent",
                    "known_writers",
                    ("apply_component_action",),
                ),
            ),
            deferred_frees=frozenset({"free", "free_swa"}),
            frees_whole_pages=True,
        ),
        Release(
            "0.5.23",
            (
                *_seams(
                    _SINCE_13,
                    allocator=(
                        "set_full_to_swa_mapping",
                        "clear_full_to_swa_mapping",
                        "resize",
                        *_SEGMENTS,
                    ),
                    base=("free_pages", "merge_and_sort_free"),
                    paged=(
                        "_release_page_ids",
                        "free",
                        "free_segment",
                        "merge_and_sort_free",
                    ),
                    group="SWATokenToKVPoolAllocator",
                ),
                *_PURE_WINDOW,
            ),
            deferred_frees=frozenset(),
            frees_whole_pages=True,
            segment_frees=True,
        ),
    )
}
