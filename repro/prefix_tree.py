"""Real prefix trees over a bench's allocator: legacy or unified, with either core."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from hicache_guard.repro.outcomes import NotInThisRelease
from hicache_guard.repro.pools import Bench, Slots


class PrefixTree:
    """A real prefix tree over a bench's allocator, legacy or unified, with one way to ask it."""

    PAGE, WINDOW = 4, 8

    def __init__(self, bench: Bench, *, unified: bool, core: str = "python") -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self._insert, self._match, self._key = InsertParams, MatchPrefixParams, RadixKey
        params: dict[str, Any] = {
            "disable": False,
            "req_to_token_pool": None,
            "token_to_kv_pool_allocator": bench.allocator,
            "page_size": self.PAGE,
            "sliding_window_size": self.WINDOW,
        }
        if unified:
            cache = self._unified(params, core)
        else:
            try:
                from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache
            except ImportError:
                raise NotInThisRelease("no SWARadixCache") from None
            cache = SWARadixCache(CacheInitParams(**params))
        self.cache = cache

    def _unified(self, params: dict[str, Any], core: str) -> Any:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        try:
            from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        except ImportError:
            raise NotInThisRelease("no UnifiedRadixCache") from None
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=self.PAGE))
        kinds = _component_type()
        params["tree_components"] = (kinds.FULL, kinds.SWA)
        if "tree_core_backend" in CacheInitParams.__dataclass_fields__:
            params["tree_core_backend"] = core
        elif core != "python":
            _choose_core(core)
        return UnifiedRadixCache(CacheInitParams(**params))

    def key(self, tokens: Sequence[int]) -> Any:
        try:
            return self._key(array("q", tokens), None)
        except (AssertionError, TypeError):
            return self._key(list(tokens), None)

    def insert(self, tokens: range, held: Slots) -> None:
        self.cache.insert(self._insert(key=self.key(tokens), value=held.clone()))

    def match(self, tokens: range) -> Slots:
        """The full slots of the longest prefix that the tree calls a hit."""
        result = self.cache.match_prefix(self._match(key=self.key(tokens)))
        if hasattr(result, "device_indices"):
            return result.device_indices  # type: ignore[no-any-return]
        core = self.cache.tree_core
        path = core.collect_full_device_indices(
            result.last_device_node, core.empty_match_result.last_device_node
        )
        return path[: result.device_prefix_len]  # type: ignore[no-any-return]

    def evict(self, count: int, window: int | None = None) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        window = count if window is None else window
        self.cache.evict(EvictParams(num_tokens=count, swa_num_tokens=window))


def _choose_core(core: str) -> None:
    """Make trees of this process use a tree core where only the environment tells which."""
    try:
        from sglang.srt.mem_cache.unified_cache import tree_core_registry as registry
    except ImportError:
        raise NotInThisRelease(f"no {core} tree core") from None
    known = getattr(registry, "registered_tree_core_backends", list)
    if core not in known():
        raise NotInThisRelease(f"no {core} tree core")
    from sglang.srt.environ import envs

    envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.set(core)


def _component_type() -> Any:
    import importlib

    for home in (
        "unified_cache.components",
        "unified_cache_components",
        "unified_cache.components.base",
        "unified_cache_components.tree_component",
    ):
        try:
            return importlib.import_module(f"sglang.srt.mem_cache.{home}").ComponentType
        except (ImportError, AttributeError):
            continue
    raise NotInThisRelease("no tree components")
