"""The second tier of SGLang's prefix cache, HiCache, run on a CPU: host pools, controller, copies.

``HostTier`` gives the unified tree of a ``scheduling.Server`` what ``--enable-hierarchical-cache``
gives the one of a server, by the release's own ``init_hicache``; so the host pools, the cache
controller, every decision of the tree and every byte that moves are the release's. Only what needs
CUDA is replaced, see ``_shim``:

* ``sgl_kernel.transfer_kv_direct``, the copy of ``--hicache-io-backend direct``, of which there is
  no build for a CPU, by an indexed copy of torch;
* host memory that is registered with CUDA, by ordinary memory;
* up to 0.5.13 the import of ``sgl_kernel.kvcacheio``, which nobody asks for there but the module;
* the 10 GiB of RAM that a host pool must leave free: ours are kilobytes;
* with a storage, since 0.5.15, the C++ in which a page's key is computed, which would be compiled
  first: by the same SHA-256 in Python.

Streams and events are those of ``torch.cpu``, which do nothing. So a copy is over when it was
submitted, but not before: loads wait in the controller's queue until ``start_loads``, as on a
server for the next prefill batch, and since 0.5.21 backups wait for ``poll`` or ``flush_writes``;
before, they are submitted at once. ``poll``, ``flush_writes`` and ``finish_loads`` take in what is
done; until then it stays locked.

KV is real: ``write`` is what a forward pass stores, ``read`` what an attention layer gets. Nothing
here knows of the guard.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from hicache_guard.repro import scheduling

POLICIES = ("write_through", "write_through_selective", "write_back")


def copy_rows(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """``transfer_kv_direct``: row by row, whatever the page size; that only makes it faster."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _ordinary_memory(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, allocator: Any, **_: Any
) -> torch.Tensor:
    return allocator.allocate(dims, dtype=dtype, device=device)  # type: ignore[no-any-return]


@contextmanager
def _kernels_importable() -> Iterator[None]:
    """Names of ``sgl_kernel.kvcacheio`` can be imported, to no use, until this ends.

    Only meanwhile, so that nothing else takes the stand-in for the real package.
    """

    class Empty(ModuleType):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    names = ("sgl_kernel", "sgl_kernel.kvcacheio")
    missing = [name for name in names if name not in sys.modules]
    sys.modules.update({name: Empty(name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def host_pool_module() -> ModuleType:
    """The module of this release that holds the host pool of a plain KV pool."""
    try:
        return importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
    except ModuleNotFoundError:  # up to 0.5.15
        with _kernels_importable():
            return importlib.import_module("sglang.srt.mem_cache.memory_pool_host")


def _shim() -> None:
    """Replace what needs CUDA, see above. Doing it twice does no harm."""
    module: Any = host_pool_module()
    module.transfer_kv_direct = copy_rows
    module.ALLOC_MEMORY_FUNCS["cpu"] = _ordinary_memory
    base: Any = inspect.getmodule(module.HostKVCache)
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def layers(server: scheduling.Server) -> dict[int, bool]:
    """The model's layers, and which of them keep only a window."""
    mapping = server.allocator.get_kvcache().layers_mapping
    return {layer: window for layer, (_, window) in sorted(mapping.items())}


def words(server: scheduling.Server, layer: int) -> list[torch.Tensor]:
    """K and V of a layer as whole numbers, ``[slot, word]``; waits for a load as attention does."""
    pool = server.allocator.get_kvcache()
    buffers = [pool.get_key_buffer(layer), pool.get_value_buffer(layer)]
    return [buffer.view(torch.int64).flatten(1) for buffer in buffers]


def _slots(server: scheduling.Server, layer: int, slots: torch.Tensor) -> torch.Tensor:
    """Where a layer keeps the KV of these full slots."""
    if not layers(server)[layer]:
        return slots
    return server.allocator.translate_loc_from_full_to_swa(slots).to(torch.int64)  # type: ignore[no-any-return]


def pattern(tokens: Sequence[int], start: int, layer: int, words: int) -> torch.Tensor:
    """KV of tokens at positions from ``start``: ``[token, K or V, word]``, no two rows alike.

    The bits of a row are whole numbers, so that nothing is rounded: the token, then its position,
    layer and side.
    """
    token = torch.tensor(tokens, dtype=torch.int64)
    position = torch.arange(start, start + len(tokens), dtype=torch.int64)
    rows = torch.empty(len(tokens), 2, words, dtype=torch.int64)
    rows[:, :, 0::2] = token[:, None, None]
    for side in range(2):
        rows[:, side, 1::2] = ((position << 16) + (layer << 1) + side)[:, None]
    return rows


def write(
    server: scheduling.Server, slots: torch.Tensor, tokens: Sequence[int], start: int
) -> None:
    """What a forward pass stores in these full slots, for tokens at positions from ``start``.

    A window layer stores nothing for a slot that has no window slot.
    """
    for layer in layers(server):
        target = _slots(server, layer, slots)
        there = target > 0
        for side, buffer in enumerate(words(server, layer)):
            known = pattern(tokens, start, layer, buffer.shape[1])
            buffer[target[there]] = known[there, side]


class ForwardPass:
    """A forward pass that stores KV as the release's attention backends do.

    The window slots of its full slots are read once, when it begins, and every layer stores by
    them. Up to 0.5.12.post1 the pool keeps them; since 0.5.13 each write passes them along.
    """

    def __init__(
        self, server: scheduling.Server, slots: torch.Tensor, tokens: Sequence[int], start: int
    ) -> None:
        self.server, self.slots, self.tokens, self.start = server, slots, tokens, start
        self.pool = server.allocator.get_kvcache()
        self.translation: torch.Tensor = self.pool.translate_loc_from_full_to_swa(slots)
        if hasattr(self.pool, "set_swa_loc"):
            self.pool.set_swa_loc(self.translation)

    def store(self, layer: int) -> None:
        """One layer stores the KV of the pass, by the pool's own ``set_kv_buffer``."""
        known = pattern(self.tokens, self.start, layer, words(self.server, layer)[0].shape[1])
        rows = self.pool.get_key_buffer(layer)
        key, value = (
            known[:, side].contiguous().view(rows.dtype).view(len(self.tokens), *rows.shape[1:])
            for side in range(2)
        )
        where: Any = self.slots
        named: dict[str, Any] = {}
        expected = inspect.signature(self.pool.set_kv_buffer).parameters
        if "loc_info" in expected:  # since 0.5.14
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc

            where = KVWriteLoc(self.slots, self.translation)
        elif "swa_loc" in expected:  # 0.5.13
            named["swa_loc"] = self.translation
        self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), where, key, value, **named)


def read(server: scheduling.Server, layer: int, slots: torch.Tensor) -> torch.Tensor:
    """What attention in this layer reads for these full slots, to be compared with ``pattern``."""
    source = _slots(server, layer, slots)
    return torch.stack([buffer[source] for buffer in words(server, layer)], dim=1)


def scrub(server: scheduling.Server) -> None:
    """Overwrite the device's KV wholly, so that what is right afterwards has been loaded."""
    for layer in layers(server):
        for buffer in words(server, layer):
            buffer.fill_(-1)


class PageKeys:
    """A storage's keys of pages: SHA-256 of the page's tokens, four bytes each, after the last."""

    @staticmethod
    def get_hash(
        tokens: Sequence[int],
        length: int,
        width: int,
        bigrams: bool,
        before: bytes | None,
        page_size: int | None,
    ) -> str | list[str]:
        assert not bigrams, "no model here has bigrams"
        keys: list[str] = []
        key = before or b""
        for start in range(0, length, page_size or max(length, 1)):
            page = tokens[start : min(start + (page_size or length), length)]
            key = hashlib.sha256(key + b"".join(t.to_bytes(4, "little") for t in page)).digest()
            keys.append(key.hex())
        return keys if page_size else keys[0]


def _storing(folder: str) -> dict[str, Any]:
    """The settings of a file backend that keeps every page, and waits for what it fetches."""
    from sglang.srt.environ import envs

    envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.set(folder)
    with suppress(ImportError):
        native: Any = importlib.import_module("sglang.srt.mem_cache.cpp_utils.native_hash")
        native._load_native_hash_module = lambda: PageKeys
    return {
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": '{"prefetch_threshold": 1}',
    }


def _group_of_one() -> None:
    """This process stands alone: a storage backend names its rank in each key."""
    from sglang.srt.distributed import parallel_state

    if not torch.distributed.is_initialized():
        with tempfile.TemporaryDirectory() as folder:
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/meet", 0, "gloo")
            parallel_state.initialize_model_parallel()
    with suppress(ImportError):
        from sglang.srt.runtime_context import get_parallel

        if hasattr(get_parallel(), "override_permanently"):  # since 0.5.21 a launcher says it
            ranks = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank")
            get_parallel().override_permanently(**dict.fromkeys(ranks, 0))


class HostTier:
    """HiCache on the unified tree of a server, and when its background work is done."""

    def __init__(
        self,
        server: scheduling.Server,
        policy: str,
        *,
        ratio: float = 2.0,
        storage: str | None = None,
    ) -> None:
        """Each host pool has ``ratio`` times the slots of its device pool, and a page.

        ``storage`` is a folder for the release's own file backend (since 0.5.13), the third tier.

        Up to 0.5.14 a host pool must be larger than its device pool. The tree must be empty. What
        is too little to be worth a load for a server is loaded here: the threshold is one token.
        """
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        _shim()
        self.server, self.tree, self.policy = server, server.tree, policy
        server.arguments = ServerArgs(
            model_path="dummy",
            page_size=server.page_size,
            attention_backend="torch_native",
            hicache_ratio=ratio,
            hicache_write_policy=policy,
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
            **({} if storage is None else _storing(storage)),
        )
        set_global_server_args_for_scheduler(server.arguments)
        if storage is not None:
            _group_of_one()
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=server.rows,
            token_to_kv_pool_allocator=server.allocator,
            page_size=server.page_size,
            sliding_window_size=server.window,
        )
        self.tree.init_hicache(server.arguments, parameters)
        self.tree.load_back_threshold = 1
        for pool in self.host_pools():
            pool.pin_memory = False

    def close(self) -> None:
        """Stop the threads of a storage backend."""
        self.tree.cache_controller.storage_stop_event.set()

    def host_pools(self) -> tuple[Any, Any]:
        """(full, window)."""
        entries = {entry.name.value: entry.host_pool for entry in self.tree.host_pool_group.entries}
        return entries["kv"], entries["swa"]

    def host_used(self) -> tuple[int, int]:
        """Host slots that are not free, (full, window)."""
        full, window = (pool.size - pool.available_size() for pool in self.host_pools())
        return full, window

    def in_flight(self) -> tuple[int, int]:
        """Nodes that are being (backed up, loaded)."""
        return len(self.tree.ongoing_write_through), len(self.tree.ongoing_load_back)

    # --- device to host ------------------------------------------------------------------------

    def poll(self) -> None:
        """``check_hicache_events``, once a scheduler step: submit backups, take in what is done."""
        self.tree.check_hicache_events()

    def flush_writes(self) -> None:
        """Submit the backups that wait, and take them in.

        With ``write_back`` a backup is part of an eviction, which waits for it; not so on 0.5.12:
        there the next poll would unlock what the backup has not locked, and so nobody may use
        ``write_back`` on it without this wait.
        """
        if self.policy == "write_back":
            self.tree.writing_check(write_back=True)
        self.poll()

    # --- host to device ------------------------------------------------------------------------

    def wants_load(self, req: Any) -> bool:
        """Whether the host has something of a matched request's prefix that the device has not."""
        if hasattr(req, "needs_host_load_back"):
            return bool(req.needs_host_load_back())
        return bool(req.host_hit_length > 0)

    def admit(self, req: Any) -> int:
        """Lock a matched request's prefix; what the host has of it is allocated and queued.

        The part of ``PrefillAdder.add_one_req`` that is about the cache; ``Server.lock`` is the
        same without a host. Returns how many full tokens are loaded. From now on the request's
        prefix names slots whose KV is not there before ``start_loads``.
        """
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        held = self.server.hold(req)
        count = 0
        if self.wants_load(req):
            parameters = InitLoadBackParams(
                best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
            )
            loaded, req.last_node = self.tree.init_load_back(parameters)
            if isinstance(loaded, torch.Tensor):
                req.prefix_indices = torch.cat([req.prefix_indices, loaded])
                count = len(loaded)
            else:
                req.prefix_len += loaded
                count = loaded
            owner = req if hasattr(req, "cache_protected_len") else req.kv
            owner.cache_protected_len = self.server.prefix_length(req)
        self.server.lock(req)
        self.server.let_go(held)
        return count

    def start_loads(self) -> int:
        """Submit the queued loads, right before a prefill batch is allocated; -1 for none.

        The batch's attention layers wait for the load that this returns.
        """
        producer: int = self.tree.ready_to_load_host_cache()
        self.tree.cache_controller.layer_done_counter.set_consumer(producer)
        return producer

    def finish_loads(self) -> None:
        """Take in the loads that are done: what they brought can be evicted from now on."""
        self.tree.loading_check()

    # --- storage -------------------------------------------------------------------------------

    def settle_storage(self) -> None:
        """Wait until all that is backed up on the host is in the storage, too."""
        self.until(lambda: not self.tree.ongoing_backup)

    def prefetch(self, req: Any) -> Any:
        """Ask the storage for what a matched request has neither on the device nor on the host.

        As the scheduler does when a request comes in; returns what the progress is asked by.
        """
        tree, whole = self.tree, list(req.origin_input_ids)
        matched = self.server.prefix_length(req) + int(req.host_hit_length)
        node = req.last_host_node
        told = inspect.signature(tree.prefetch_from_storage).parameters
        last_hash = (
            tree.get_last_hash_value(node)
            if hasattr(tree, "get_last_hash_value")
            else node.get_last_hash_value()
        )
        name = req.rid if "req_id" in told else req.cache_request_handle
        known = {
            "matched_prefix_tokens": whole[:matched],
            "extra_key": req.extra_key,
            "cache_salt": getattr(req, "cache_salt", None),
        }
        tokens = self.server._ids(whole[matched : len(whole) - 1])
        more = {key: value for key, value in known.items() if key in told}
        tree.prefetch_from_storage(name, node, tokens, last_hash, None, **more)
        return name

    def finish_prefetch(self, name: Any) -> None:
        """Wait until what was asked for is on the host, or is known not to be there."""
        self.until(lambda: bool(self.tree.check_prefetch_progress(name)))

    def until(self, done: Callable[[], bool]) -> None:
        """Poll as the scheduler does, while the controller's threads work."""
        for _ in range(2000):
            self.poll()
            if done():
                return
            time.sleep(0.005)
        raise TimeoutError("the storage backend does not end")

    # --- the host alone ------------------------------------------------------------------------

    def evict_host(self, full: int, window: int) -> None:
        """Make room in the host pools, as a backup does that finds none."""
        for component, count in zip(self.tree.tree_components, (full, window), strict=True):
            self.tree.evict_host(count, component)
