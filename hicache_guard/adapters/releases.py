"""What differs between SGLang releases, as data: where the seams are and how they behave.

Read from each release's wheel; every fact here is exercised by the catalogue and the property tests
on that release.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

_MEM = "sglang.srt.mem_cache"
_HYBRID = "SWATokenToKVPoolAllocator"
_BASE = "BaseTokenToKVPoolAllocator"


@dataclass(frozen=True)
class Seam:
    """A class of SGLang and the methods of it that are hooked; functions, where ``cls`` is empty.

    ``handlers`` names the module of ``hicache_guard.adapters`` whose functions, named like the
    methods, stand around them. ``late`` for modules that only a server imports, and that may not be
    imported for the sake of hooks: these wait until it does.
    """

    module: str
    cls: str
    handlers: str
    methods: tuple[str, ...]
    late: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """What a patched source decorates: the class, or each function."""
        return (self.cls,) if self.cls else self.methods

    def symbol(self, method: str) -> str:
        """How a method is spelled within its module."""
        return f"{self.cls}.{method}" if self.cls else method


@dataclass(frozen=True)
class Release:
    """One SGLang release.

    ``deferred_frees``: the public frees that an open free group only queues; they are made when
    the group ends. ``resolves_in_group``: of the others the pages are found at once and reach the
    pools when the group ends; else they do so at once as well. ``frees_whole_pages``: ``free_swa``
    clears the entries of every page that it touches, not only those it was told of.
    ``segment_frees``: window frees by segment exist, and like every window free of one-slot pages
    they release whatever an entry holds.
    """

    version: str
    seams: tuple[Seam, ...]
    deferred_frees: frozenset[str]
    frees_whole_pages: bool
    resolves_in_group: bool = False
    segment_frees: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that may be imported for the sake of hooks: of all seams but late ones."""
        return tuple(dict.fromkeys(seam.module for seam in self.seams if not seam.late))


#: Attributes that we stand in for: no class of SGLang has them, its objects do.
STAND_INS = frozenset({"free_pages"})

#: Methods that no source shows: a dataclass has them made.
MADE = frozenset({"CacheInitParams.__init__"})

_ALLOCATIONS = ("alloc", "alloc_extend", "alloc_decode")
_STATE = ("backup_state", "restore_state")
_SEGMENTS = ("free_segment", "free_swa_segment", "free_full", "free_full_segment")


#: What every prefix tree has, and what some have besides.
_TREE = ("__init__", "reset", "match_prefix", "insert", "evict")


#: How a request gives a tree what it has computed.
_BY_REQUEST = ("cache_unfinished_req", "cache_finished_req")


#: What every tree is made from.
_TREE_PARAMETERS = Seam(
    f"{_MEM}.cache_init_params", "CacheInitParams", "tree_params", ("__init__",)
)
#: A scheduler matches all requests that wait before it chooses.
_ROUNDS = Seam(
    "sglang.srt.managers.schedule_policy", "SchedulePolicy", "scheduling_round", ("calc_priority",)
)
_FLASHINFER = "sglang.srt.layers.attention.flashinfer_backend"
_TRITON = "sglang.srt.layers.attention.triton_backend"


def _window_reads(*triton: str) -> tuple[Seam, ...]:
    """Where backends gather what window layers read; ``triton``: functions of that backend."""
    call = ("call_begin_forward",)
    return (
        Seam(_FLASHINFER, "FlashInferIndicesUpdaterDecode", "window_reads", call, late=True),
        Seam(_FLASHINFER, "FlashInferIndicesUpdaterPrefill", "window_reads", call, late=True),
        Seam(_TRITON, "", "window_reads", triton, late=True),
        _STEPS,
    )


#: A forward pass is launched, its tokens are taken, the next batch is chosen.
_STEPS = Seam(
    "sglang.srt.managers.scheduler",
    "Scheduler",
    "steps",
    ("run_batch", "process_batch_result", "get_next_batch_to_run"),
    late=True,
)
_BUFFER = "update_sliding_window_buffer"
_READS_UNTIL_12 = _window_reads(_BUFFER, f"{_BUFFER}_cuda_graph")
_READS_13_21 = _window_reads(_BUFFER)
_READS_SINCE_22 = (
    *_READS_13_21,
    Seam(
        f"{_MEM}.kv_index_translator",
        "KVIndexTranslator",
        "window_reads",
        ("pack_read_stream",),
        late=True,
    ),
)
#: A session lends its row again from turn to turn.
_SESSIONS = Seam(
    "sglang.srt.session.streaming_session",
    "StreamingSession",
    "session",
    ("try_cache_finished_req", "release_session", "find_active_slot"),
)


#: What takes and gives back the locks of a tree; ``early`` releases the window part alone.
_LOCKS = ("inc_lock_ref", "dec_lock_ref", "sanity_check")


def _locks(*early: str, legacy: bool) -> tuple[Seam, ...]:
    unified = Seam(
        f"{_MEM}.unified_radix_cache", "UnifiedRadixCache", "tree_locks", (*_LOCKS, *early)
    )
    old = Seam(
        f"{_MEM}.swa_radix_cache", "SWARadixCache", "tree_locks", (*_LOCKS, "dec_swa_lock_only")
    )
    return (old, unified) if legacy else (unified,)


def _trees(*more: str, legacy: bool) -> tuple[Seam, ...]:
    """The trees of hybrid models. ``more``: methods of the unified tree."""
    unified = Seam(
        f"{_MEM}.unified_radix_cache",
        "UnifiedRadixCache",
        "prefix_tree",
        (*_TREE, "init_hicache", "load_back", "init_load_back", "check_hicache_events", *more),
    )
    old = Seam(f"{_MEM}.swa_radix_cache", "SWARadixCache", "prefix_tree", (*_TREE, *_BY_REQUEST))
    both = (old, unified) if legacy else (unified,)
    return (*both, _SESSIONS, _TREE_PARAMETERS, _ROUNDS)


_EARLY = "dec_swa_lock_only"
_TREES_UNTIL_13 = (*_trees(*_BY_REQUEST, legacy=True), *_locks(legacy=True))
_TREES_14_18 = (*_trees(*_BY_REQUEST, legacy=True), *_locks(_EARLY, legacy=True))
_TREES_19_20 = (
    *_trees(*_BY_REQUEST, "evict_for_alloc", legacy=True),
    *_locks(_EARLY, legacy=True),
)
_TREES_21 = (
    *_trees("cache_unfinished_req", "evict_for_alloc", legacy=False),
    *_locks(_EARLY, legacy=False),
)
_TREES_SINCE_22 = (
    *_trees("checkpoint_into_tree", "evict_for_alloc", legacy=False),
    *_locks("release_swa", legacy=False),
)

_DSV4 = f"{_MEM}.deepseek_v4_memory_pool"
_TRANSLATIONS = tuple(
    Seam(module, cls, "kv_pool", ("translate_loc_from_full_to_swa",))
    for module, cls in (
        (f"{_MEM}.swa_memory_pool", "SWAKVPool"),
        (_DSV4, "DeepSeekV4TokenToKVPool"),
    )
)


def _passed(*more: str) -> Seam:
    """The pool is passed slots and their translation together."""
    return Seam(
        f"{_MEM}.swa_memory_pool", "SWAKVPool", "passed_translation", ("set_kv_buffer", *more)
    )


_PASSED_13_18 = _passed()
_PASSED_SINCE_19 = _passed("set_mla_kv_buffer")
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
    grouped = {_HYBRID: swa, _BASE: base_home}
    return (
        Seam(swa, _HYBRID, "allocator", (*hybrid, *allocator)),
        Seam(grouped[group], group, "allocator", ("free_group_end",)),
        Seam(base_home, _BASE, "page_pool", base),
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
_PURE_WINDOW = (
    Seam(_SINCE_13[0], "PureSWATokenToKVPoolAllocator", "pure_window", ("__init__",)),
    Seam(
        f"{_MEM}.radix_cache", "RadixCache", "pure_window_tree", ("reset", "match_prefix", "insert")
    ),
    Seam(f"{_MEM}.pure_swa_radix_cache", "PureSWARadixCache", "pure_window_tree", ("__init__",)),
)


def _until_16(homes: tuple[str, str, str, str], *more: str) -> tuple[Seam, ...]:
    return _seams(
        homes,
        allocator=("set_full_to_swa_mapping", *_STATE, *more),
        base=("free_pages", "merge_and_sort_free", "restore_state"),
        paged=("free",),
        group=_BASE,
    )


def _17_to_19(group: str, *more: str) -> tuple[Seam, ...]:
    """Page ids enter the free list at one method; state is no longer backed up."""
    return _seams(
        _SINCE_13,
        allocator=("set_full_to_swa_mapping", "resize", *more),
        base=("free_pages", "merge_and_sort_free"),
        paged=("_release_page_ids", "free", "free_segment"),
        group=group,
    )


#: Row segments are freed without asking which pages they touch; freed pages wait in stages.
_SINCE_20 = (
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
        group=_HYBRID,
    ),
    *_PURE_WINDOW,
)


def _writers(component_module: str, component_method: str) -> tuple[Seam, ...]:
    """The legacy and the unified tree's recovery of a tombstone, where they write the mapping."""
    return (
        Seam(
            f"{_MEM}.swa_radix_cache",
            "SWARadixCache",
            "known_writers",
            ("_recover_tombstone_keeping_locked_full",),
        ),
        Seam(f"{_MEM}.{component_module}", "SWAComponent", "known_writers", (component_method,)),
    )


_WRITERS_15_16 = _writers(
    "unified_cache_components.swa_component", "_restore_device_value_with_locked_full"
)
_WRITERS_17_18 = _writers("unified_cache.components.swa_component", "apply_component_action")

_FREE = frozenset({"free"})


def _alike(
    versions: tuple[str, ...],
    seams: tuple[Seam, ...],
    *,
    deferred_frees: frozenset[str] = _FREE,
    frees_whole_pages: bool = True,
    resolves_in_group: bool = False,
    segment_frees: bool = False,
) -> tuple[Release, ...]:
    """Releases whose seams are the same and behave the same."""
    return tuple(
        Release(version, seams, deferred_frees, frees_whole_pages, resolves_in_group, segment_frees)
        for version in versions
    )


RELEASES: dict[str, Release] = {
    release.version: release
    for release in (
        *_alike(
            ("0.5.12", "0.5.12.post1"),
            (
                *_until_16(_BEFORE_13),
                *_REMEMBERED_TRANSLATIONS,
                *_TREES_UNTIL_13,
                *_READS_UNTIL_12,
            ),
            frees_whole_pages=False,
        ),
        *_alike(
            ("0.5.13", "0.5.13.post1"),
            (*_until_16(_SINCE_13), _PASSED_13_18, *_TREES_UNTIL_13, *_READS_13_21),
            frees_whole_pages=False,
        ),
        *_alike(("0.5.14",), (*_until_16(_SINCE_13), _PASSED_13_18, *_TREES_14_18, *_READS_13_21)),
        *_alike(
            ("0.5.15", "0.5.15.post1"),
            (
                *_until_16(_SINCE_13),
                _PASSED_13_18,
                *_PURE_WINDOW,
                *_WRITERS_15_16,
                *_TREES_14_18,
                *_READS_13_21,
            ),
        ),
        *_alike(
            ("0.5.16",),
            (
                *_until_16(_SINCE_13, "resize"),
                _PASSED_13_18,
                *_PURE_WINDOW,
                *_WRITERS_15_16,
                *_TREES_14_18,
                *_READS_13_21,
            ),
        ),
        *_alike(
            ("0.5.17",),
            (
                *_17_to_19(_BASE),
                _PASSED_13_18,
                *_PURE_WINDOW,
                *_WRITERS_17_18,
                *_TREES_14_18,
                *_READS_13_21,
            ),
        ),
        *_alike(
            ("0.5.18",),
            (
                *_17_to_19(_HYBRID),
                _PASSED_13_18,
                *_PURE_WINDOW,
                *_WRITERS_17_18,
                *_TREES_14_18,
                *_READS_13_21,
            ),
            deferred_frees=frozenset({"free", "free_swa"}),
        ),
        *_alike(
            ("0.5.19",),
            (
                *_17_to_19(_HYBRID, "clear_full_to_swa_mapping", "free_full"),
                _PASSED_SINCE_19,
                *_PURE_WINDOW,
                *_TREES_19_20,
                *_READS_13_21,
            ),
            deferred_frees=frozenset({"free", "free_full"}),
            resolves_in_group=True,
        ),
        *(
            release
            for versions, trees in (
                (("0.5.20",), (*_TREES_19_20, *_READS_13_21)),
                (("0.5.21",), (*_TREES_21, *_READS_13_21)),
                (("0.5.22", "0.5.23"), (*_TREES_SINCE_22, *_READS_SINCE_22)),
            )
            for release in _alike(
                versions,
                (*_SINCE_20, _PASSED_SINCE_19, *trees),
                deferred_frees=frozenset(),
                resolves_in_group=True,
                segment_frees=True,
            )
        ),
    )
}


def rows() -> list[tuple[Release, ...]]:
    """Releases whose row is the same but for the version, oldest first."""
    found: dict[Release, list[Release]] = {}
    for release in RELEASES.values():
        found.setdefault(dataclasses.replace(release, version=""), []).append(release)
    return [tuple(alike) for alike in found.values()]


#: 0.5.18 with our backport of #36081: its window frees are resolved when they are queued. It is
#: known by a name in the code of ``free_swa`` that the release itself does not use there.
QUEUES_RESOLVED = dataclasses.replace(
    RELEASES["0.5.18"], deferred_frees=_FREE, resolves_in_group=True
)
RESOLVING_NAME = "index_fill_"
