"""What SGLang's scheduler does with one prefix tree and two KV pools, on the release on the path.

Requests, batches, trees and pools are the release's own, and so is every function that touches KV:
``Req.init_next_round_input`` (match), ``alloc_for_extend`` and ``alloc_for_decode`` (evict from the
tree, window eviction by ``ScheduleBatch.maybe_evict_swa``, allocation, the rows of
``ReqToTokenPool``), ``cache_unfinished_req`` or ``checkpoint_kv_cache``, ``release_kv_cache`` and
``release_req`` (retraction). Only what decides *when* they are called, and the forward pass between
them, is left to the caller. Nothing here knows of the guard.
"""

from __future__ import annotations

import importlib
import inspect
from array import array
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hicache_guard.repro import pools


def _first(*places: str) -> Any:
    """The first of ``module:name`` that this release has; things moved between releases."""
    for place in places:
        module, name = place.split(":")
        try:
            return getattr(importlib.import_module(f"sglang.srt.{module}"), name)
        except (ImportError, AttributeError):
            continue
    return None


def trees() -> list[str]:
    """The trees of this release: legacy, and unified with each core that can be had."""
    names = []
    if _first("mem_cache.swa_radix_cache:SWARadixCache"):
        names.append("legacy")
    if _first("mem_cache.unified_radix_cache:UnifiedRadixCache"):
        names.append("unified")
        registry = _first(
            "mem_cache.unified_cache.tree_core_registry:registered_tree_core_backends"
        )
        if registry is not None and "rust" in registry():
            names.append("unified-rust")
    return names


class Release:
    """The functions of this release by what they do, whatever they are called in it."""

    def __init__(self) -> None:
        from sglang.srt.managers import schedule_batch
        from sglang.srt.mem_cache import base_prefix_cache as base
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.batches, self.base = schedule_batch, base
        self.key, self.modes, self.sampling = RadixKey, ForwardMode, SamplingParams
        self.speculation = SpeculativeAlgorithm
        self._server_args, self._publish = ServerArgs, set_global_server_args_for_scheduler
        self.extend = _first(
            "mem_cache.allocation:alloc_for_extend", "mem_cache.common:alloc_for_extend"
        )
        self.decode = _first(
            "mem_cache.allocation:alloc_for_decode", "mem_cache.common:alloc_for_decode"
        )
        self.make_room = _first(
            "mem_cache.common:evict_from_tree_cache", "mem_cache.allocation:evict_from_tree_cache"
        )
        self.release = _first("mem_cache.common:release_kv_cache")
        self.checkpoint = _first("mem_cache.common:checkpoint_kv_cache")
        self.keep = _first("mem_cache.common:maybe_cache_unfinished_req")
        self.retract = getattr(schedule_batch, "release_req", None)  # a method up to 0.5.13

    def publish(self, page_size: int) -> Any:
        """Tell the release its settings. A row is written in Python by this attention backend."""
        arguments = self._server_args(
            model_path="dummy", page_size=page_size, attention_backend="torch_native"
        )
        self._publish(arguments)
        return arguments

    def options(self) -> dict[str, tuple[Any, ...]]:
        """Settings of this release that change when window KV is let go, and values to try."""
        from sglang.srt.environ import envs

        wanted: dict[str, tuple[Any, ...]] = {
            "SGLANG_SWA_EVICTION_INTERVAL": (1, 3),
            "SGLANG_SWA_EVICTION_INTERVAL_MULTIPLIER": (1.0, 0.1),
            "SGLANG_OPT_SWA_SPLIT_LEAF_ON_INSERT": (False, True),
            "SGLANG_OPT_SWA_RELEASE_LEAF_LOCK_AFTER_WINDOW": (False, True),
            "SGLANG_OPT_RELEASE_PREFILL_SWA": (False, True),
            "SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS": (False, True),
        }
        return {name: values for name, values in wanted.items() if hasattr(envs, name)}

    @staticmethod
    def choose(options: dict[str, Any]) -> None:
        from sglang.srt.environ import envs

        for name, value in options.items():
            getattr(envs, name).set(value)


def field(req: Any, name: str) -> Any:
    """A field of a request: its own, or (since 0.5.18, more and more) of its KV record."""
    return getattr(req, name) if hasattr(req, name) else getattr(req.kv, name)


class Server:
    """One tree over one allocator, and what a scheduler does with them."""

    def __init__(
        self,
        release: Release,
        tree: str,
        *,
        page_size: int,
        window: int,
        full_pages: int,
        window_pages: int,
        longest: int,
        rows: int = 8,
    ) -> None:
        """``rows`` requests may run at once, each of up to ``longest`` tokens."""
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        self.release, self.page_size, self.window = release, page_size, window
        self.arguments = release.publish(page_size)
        self.allocator = pools.build(full_pages * page_size, window_pages * page_size, page_size)
        self.rows = ReqToTokenPool(rows, longest, "cpu", enable_memory_saver=False)
        self.tree = self._tree(tree)
        self._ids = self._kind_of_ids()
        self._steps = 0

    def _tree(self, name: str) -> Any:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams

        parameters: dict[str, Any] = {
            "disable": False,
            "req_to_token_pool": self.rows,
            "token_to_kv_pool_allocator": self.allocator,
            "page_size": self.page_size,
            "sliding_window_size": self.window,
        }
        if name == "legacy":
            from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache

            return SWARadixCache(CacheInitParams(**parameters))
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        kinds = _first(
            "mem_cache.unified_cache.components:ComponentType",
            "mem_cache.unified_cache_components:ComponentType",
        )
        parameters["tree_components"] = (kinds.FULL, kinds.SWA)
        core = "rust" if name == "unified-rust" else "python"
        if "tree_core_backend" in CacheInitParams.__dataclass_fields__:
            parameters["tree_core_backend"] = core
        else:
            from sglang.srt.environ import envs

            setting = getattr(envs, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", None)
            if setting is not None:
                setting.set(core)
        return UnifiedRadixCache(CacheInitParams(**parameters))

    def _kind_of_ids(self) -> Any:
        """Token ids are lists up to some release and arrays since."""
        probe = self.release.batches.Req("probe", "", [1], self.release.sampling())
        return list if isinstance(probe.output_ids, list) else lambda ids: array("q", ids)

    # --- looking -------------------------------------------------------------------------------

    def row(self, req: Any) -> torch.Tensor:
        """The full slots of a request, as far as KV is allocated."""
        slots: torch.Tensor = self.rows.req_to_token[field(req, "req_pool_idx")]
        return slots[: self.allocated(req)].to(torch.int64)

    def allocated(self, req: Any) -> int:
        return int(field(req, "kv_allocated_len"))

    def protected(self, req: Any) -> int:
        """How much of a request's row belongs to the tree."""
        return int(field(req, "cache_protected_len"))

    def prefix_length(self, req: Any) -> int:
        return int(req.prefix_len if hasattr(req, "prefix_len") else len(req.prefix_indices))

    def prefix(self, req: Any) -> torch.Tensor:
        """The full slots that the match found for a request that has no row yet."""
        if hasattr(req, "prefix_len"):
            return self.tree.prefix_device_indices(req)  # type: ignore[no-any-return]
        return req.prefix_indices  # type: ignore[no-any-return]

    def tree_slots(self) -> torch.Tensor:
        """Every full slot that the tree holds."""
        if self.tree.full_evictable_size() + self.tree.full_protected_size() == 0:
            return torch.empty(0, dtype=torch.int64)  # the legacy tree cannot list nothing
        return self.tree.all_values_flatten().to(torch.int64)  # type: ignore[no-any-return]

    def room(self) -> int:
        """Tokens that both pools could take now, with nothing evicted."""
        allocator = self.allocator
        return int(min(allocator.full_available_size(), allocator.swa_available_size()))

    # --- requests ------------------------------------------------------------------------------

    def request(self, name: str, tokens: Sequence[int]) -> Any:
        ids = self._ids(tokens)
        sampling = self.release.sampling(max_new_tokens=1 << 20)
        return self.release.batches.Req(name, "", ids, sampling)

    def match(self, req: Any) -> None:
        """``init_next_round_input``: the prefix of a request that waits."""
        req.init_next_round_input(self.tree)

    def lock(self, req: Any) -> None:
        """``PrefillAdder._req_inc_lock_ref``, since 0.5.23 ``_commit_prefill_admission``."""
        if hasattr(self.tree, "lock"):
            req.lock = self.tree.lock(req.last_node)
            return
        result = self.tree.inc_lock_ref(req.last_node)
        if hasattr(req, "lock_receipt"):  # 0.5.21
            req.lock_receipt = result.to_dec_params()
            return
        req.swa_uuid_for_lock = result.swa_uuid_for_lock
        if hasattr(req, "skip_lock_node_ids"):
            req.skip_lock_node_ids = {}

    def hold(self, req: Any) -> Any:
        """``PrefillAdder._lock_node``: a lock for as long as an admission is thought over."""
        if hasattr(self.tree, "lock"):
            return self.tree.lock(req.last_node)
        return req.last_node, self.tree.inc_lock_ref(req.last_node).to_dec_params()

    def let_go(self, held: Any) -> None:
        if hasattr(self.tree, "lock"):
            self.tree.unlock(held)
        else:
            self.tree.dec_lock_ref(*held)

    def next_chunk(self, req: Any) -> None:
        """A chunked request is continued: its fill ids are whole again, nothing is matched."""
        req.init_next_round_input()

    def plan(self, req: Any, count: int) -> int:
        """Extend by at most ``count`` tokens in the next batch; returns by how many."""
        start = self.prefix_length(req)
        whole = req.fill_ids if hasattr(req, "fill_ids") else req.full_untruncated_fill_ids
        count = min(count, len(whole) - start)
        if hasattr(req, "set_extend_range"):
            req.set_extend_range(start, start + count)
        elif hasattr(req, "extend_end"):
            req.extend_end = start + count
        elif hasattr(req, "fill_len"):  # 0.5.13 and 0.5.14
            req.fill_len = start + count
            req.set_extend_input_len(count)
        else:
            req.fill_ids = req.fill_ids[: start + count]
            req.set_extend_input_len(count)
        return count

    def _batch(self, reqs: Iterable[Any], mode: str) -> Any:
        batch = self.release.batches.ScheduleBatch.init_new(
            list(reqs),
            self.rows,
            self.allocator,
            self.tree,
            SimpleNamespace(is_encoder_decoder=False, vocab_size=8, is_matryoshka=False),
            False,
            self.release.speculation.NONE,
        )
        batch.forward_mode = getattr(self.release.modes, mode)
        self._steps += 1
        batch.forward_iter = self._steps
        return batch

    def extend(self, reqs: Sequence[Any], counts: Sequence[int]) -> None:
        """One prefill batch, up to the forward pass: ``prepare_for_extend`` without its tensors."""
        batch = self._batch(reqs, "EXTEND")
        starts = [self.prefix_length(req) for req in reqs]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        batch.prefix_lens, batch.extend_lens = starts, list(counts)
        batch.seq_lens_cpu = torch.tensor(ends, dtype=torch.int64)
        batch.seq_lens = batch.seq_lens_cpu.clone()
        batch.extend_num_tokens = sum(counts)
        self.release.extend(batch)
        for req, end in zip(reqs, ends, strict=True):
            req.extend_batch_idx += 1
            self._advance(req, end)

    def decode(self, reqs: Sequence[Any]) -> None:
        """One decode step, up to the forward pass: ``prepare_for_decode`` without its tensors."""
        batch = self._batch(reqs, "DECODE")
        lengths = [self.allocated(req) for req in reqs]
        batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
        batch.seq_lens = batch.seq_lens_cpu.clone()
        indices = [field(req, "req_pool_idx") for req in reqs]
        batch.req_pool_indices = torch.tensor(indices, dtype=torch.int64)
        batch.req_pool_indices_cpu = batch.req_pool_indices
        self.release.decode(batch, 1)
        for req, length in zip(reqs, lengths, strict=True):
            req.decode_batch_idx += 1
            self._advance(req, length + 1)

    @staticmethod
    def _advance(req: Any, length: int) -> None:
        """Note how much KV a request has, where the release leaves that to ``prepare_for_…``."""
        for name in ("kv_committed_len", "kv_allocated_len"):
            if hasattr(req, name):
                setattr(req, name, length)

    def cache_unfinished(self, req: Any, *, chunked: bool) -> None:
        """After a prefill, whole or a chunk: what is computed goes into the tree."""
        if self.release.checkpoint is not None:
            self.release.checkpoint(req, self.tree)
        else:
            self.release.keep(req, self.tree, **({"chunked": True} if chunked else {}))

    def finish(self, req: Any) -> None:
        req.finished_reason = self.release.batches.FINISH_LENGTH(length=len(req.output_ids))
        self._release(req, keep=True)

    def abort(self, req: Any) -> None:
        """A chunked request is aborted: ``process_pending_chunked_abort``."""
        self._release(req, keep=False)

    def _release(self, req: Any, *, keep: bool) -> None:
        name = "checkpoint" if self.release.checkpoint is not None else "is_insert"
        self.release.release(req, self.tree, **{name: keep})

    def retract(self, reqs: Sequence[Any], index: int) -> None:
        """``release_req``: a decoding request gives everything back and starts again later."""
        known: dict[str, Any] = {
            "req": reqs[index],
            "remaing_req_count": len(reqs) - 1,
            "server_args": self.arguments,
            "req_to_token_pool": self.rows,
            "token_to_kv_pool_allocator": self.allocator,
            "tree_cache": self.tree,
            "hisparse_coordinator": None,
        }
        if self.release.retract is None:
            batch = self._batch(reqs, "DECODE")
            batch.release_req(index, len(reqs) - 1, self.arguments)
            return
        wanted = inspect.signature(self.release.retract).parameters
        self.release.retract(**{name: known[name] for name in known if name in wanted})

    def evict(self, full: int, window: int) -> None:
        self.tree.evict(self.release.base.EvictParams(num_tokens=full, swa_num_tokens=window))

    def flush(self) -> None:
        """``flush_cache`` of an idle scheduler."""
        self.tree.reset()
        self.rows.clear()
        self.allocator.clear()
