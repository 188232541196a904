"""What the real backends gather for their window layers, guarded and not, on the release on the path.

Both backends are asked for the window indices of the same batch: ``update_sliding_window_buffer``
of the Triton backend, run by Triton's interpreter, and ``call_begin_forward`` of FlashInfer's, which
plans with a wrapper that only keeps what it is given (FlashInfer's own class needs a GPU). What must
come out is looked up here, position by position, in the request's row and in the mapping.

Scenes: requests that run for long, with the window sliding behind them; then window KV freed under
one of them, or its page handed to somebody else while the old entry of the mapping is written back
(#25805, #25889); a padded batch, as a CUDA graph has it. What the step says is read as the scheduler
would read it.

Prints one JSON line a scene, tree, page size and mode. Run: ``python -P window_reads.py``.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from hicache_guard.adapters import steps
from hicache_guard.adapters.allocator import guard_of
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.syncs import SyncCounter
from hicache_guard.repro import pools, scheduling
from real import tales
from real.driver import sub_allocators

WINDOW = 12
PROMPTS, STEPS = (5, 30, 61), 40


class Wrapper:
    """Stands in for FlashInfer's wrapper while it records a plan; a graph's buffer is its own."""

    is_cuda_graph_enabled = True
    _custom_mask_buf = None

    def __init__(self) -> None:
        self._paged_kv_indices_buf = torch.full((4096,), -7, dtype=torch.int32)
        self.planned: list[torch.Tensor] = []

    def begin_forward(self, *args: Any, **_: Any) -> None:
        self.planned = [each for each in args if isinstance(each, torch.Tensor)]


class Batch:
    """Requests of a server as a backend is asked about them."""

    def __init__(self, server: scheduling.Server, reqs: list[Any], padding: int) -> None:
        self.server, self.reqs, self.padding = server, reqs, padding
        index = [scheduling.field(req, "req_pool_idx") for req in reqs]
        self.rows = torch.tensor([*index, *[0] * padding], dtype=torch.int64)
        self.lengths = torch.tensor(
            [*map(server.allocated, reqs), *[1] * padding], dtype=torch.int64
        )
        self.pool = server.allocator.get_kvcache()
        self.table = server.rows.req_to_token
        self._translator()

    def _translator(self) -> None:
        """What gathers since 0.5.19, made as a model runner makes it."""
        self.translator = self.plan = self.index_table = None
        try:
            from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
        except ImportError:
            return
        self.translator = KVIndexTranslator(
            req_to_token=self.table,
            token_to_kv_pool_allocator=self.server.allocator,
            token_to_kv_pool=self.pool,
            page_size=self.server.page_size,
            device="cpu",
        )
        if hasattr(self.translator, "plan"):
            self.plan = self.translator.plan(
                req_pool_indices=self.rows,
                seq_lens=self.lengths,
                seq_lens_cpu=self.lengths,
                write_virtual=None,
            )
        elif hasattr(self.translator, "build_index_table"):  # what 0.5.19 gathers from
            known = {"req_pool_indices": self.rows, "seq_lens": self.lengths, "max_pages": 1}
            self.index_table = _call(self.translator.build_index_table, known)

    def known(self) -> dict[str, Any]:
        """What the functions of all releases want, by the names they have for it."""
        return {
            "req_to_token": self.table,
            "index_table": self.index_table,
            "kv_view": self.index_table,
            "translator": self.translator,
            "plan": self.plan,
            "req_pool_indices": self.rows,
            "seq_lens": self.lengths,
            "seq_lens_cpu": self.lengths,
            "bs": len(self.rows),
            "device": "cpu",
            "token_to_kv_pool": self.pool,
            "token_to_kv_pool_allocator": self.server.allocator,
            "sliding_window_size": WINDOW,
        }

    def expected(self) -> list[list[int]]:
        """The mapping's entry of each window position, looked up one by one."""
        mapping = self.server.allocator.full_to_swa_index_mapping.tolist()
        found = []
        for row, length in zip(self.rows.tolist(), self.lengths.tolist(), strict=True):
            slots = self.table[row, max(0, length - WINDOW) : length].tolist()
            found.append([mapping[slot] for slot in slots])
        return found


def _call(function: Callable[..., Any], known: dict[str, Any]) -> Any:
    wanted = inspect.signature(function).parameters
    return function(**{name: known[name] for name in known if name in wanted})


def triton(batch: Batch) -> list[list[int]]:
    """The window indices of each row, as the Triton backend gathers them."""
    from sglang.srt.layers.attention import triton_backend

    known = batch.known() | {
        "window_kv_indptr": torch.zeros(len(batch.rows) + 9, dtype=torch.int32),
        "window_kv_indices": None,
    }
    indptr, indices, *_ = _call(triton_backend.update_sliding_window_buffer, known)
    return _cut(indptr, indices)


def triton_of_a_graph(batch: Batch) -> list[list[int]]:
    """As ``triton``, into the buffer of a CUDA graph."""
    from sglang.srt.layers.attention import triton_backend as home

    function = getattr(home, "update_sliding_window_buffer_cuda_graph", None)
    known = batch.known() | {
        "window_kv_indptr": torch.zeros(len(batch.rows) + 9, dtype=torch.int32),
        "window_kv_indices": torch.full((4096,), -7, dtype=torch.int64),
    }
    indptr, indices, *_ = _call(function or home.update_sliding_window_buffer, known)
    return _cut(indptr, indices)


def flashinfer(batch: Batch) -> list[list[int]]:
    """The window indices of each row, as FlashInfer's backend gathers them to decode."""
    from sglang.srt.layers.attention import flashinfer_backend as home

    lengths = batch.lengths.clamp(max=WINDOW)
    wrapper = Wrapper()
    known = batch.known() | {
        "wrapper": wrapper,
        "paged_kernel_lens": lengths,
        "paged_kernel_lens_sum": int(lengths.sum()),
        "kv_indptr": torch.zeros(len(batch.rows) + 9, dtype=torch.int32),
        "kv_start_idx": batch.lengths - lengths,
        "spec_info": None,
        "seq_lens_cpu": None,
        "use_sliding_window_kv_pool": True,
    }
    _call(_updater(home.FlashInferIndicesUpdaterDecode, batch).call_begin_forward, known)
    return _cut(*wrapper.planned[:2])


def flashinfer_prefill(batch: Batch) -> list[list[int]]:
    """As ``flashinfer``, of the prefix that a ragged prefill goes on after."""
    from sglang.srt.layers.attention import flashinfer_backend as home

    lengths = batch.lengths.clamp(max=WINDOW)
    wrapper = Wrapper()
    known = batch.known() | {
        "wrapper_ragged": Wrapper(),
        "wrapper_paged": wrapper,
        "paged_kernel_lens": lengths,
        "paged_kernel_lens_sum": int(lengths.sum()),
        "seq_lens": batch.lengths + 3,
        "prefix_lens": batch.lengths,
        "kv_start_idx": batch.lengths - lengths,
        "kv_indptr": torch.zeros(len(batch.rows) + 9, dtype=torch.int32),
        "qo_indptr": torch.zeros(len(batch.rows) + 9, dtype=torch.int32),
        "use_ragged": True,
        "spec_info": None,
        "use_sliding_window_kv_pool": True,
    }
    _call(_updater(home.FlashInferIndicesUpdaterPrefill, batch).call_begin_forward, known)
    return _cut(*wrapper.planned[1:3])


def _updater(cls: Any, batch: Batch) -> Any:
    """An updater with the attributes that gathering needs; its constructor asks a model."""
    updater = cls.__new__(cls)
    updater.req_to_token = batch.table
    updater.token_to_kv_pool_allocator = batch.server.allocator
    updater._swa_kv_pool = batch.pool
    updater.kv_last_page_len = torch.ones(64, dtype=torch.int32)
    updater.num_qo_heads = updater.num_kv_heads = 1
    updater.head_dim, updater.data_type = 8, torch.float16
    updater.q_data_type = torch.float16
    updater.attn_backend = SimpleNamespace(
        kv_index_translator=batch.translator, dq_paged_kernel_lens=None
    )
    return updater


def _cut(indptr: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    ends, entries = indptr.tolist(), indices.tolist()
    return [entries[begin:end] for begin, end in itertools.pairwise(ends)]


BACKENDS = {
    "triton": triton,
    "triton, graph": triton_of_a_graph,
    "flashinfer": flashinfer,
    "flashinfer, prefill": flashinfer_prefill,
}


class Story:
    """Requests that have run for a while, and what was read for them at each step."""

    def __init__(self, release: scheduling.Release, tree: str, page: int) -> None:
        pages, window_pages = 640 // page, 320 // page
        self.server = scheduling.Server(
            release, tree, page_size=page, window=WINDOW,
            full_pages=pages, window_pages=window_pages, longest=256,
        )  # fmt: skip
        self.reqs: list[Any] = []
        self.padding = 0
        #: Positions of the window that are dead.
        self.dead: list[int] = []
        for number, length in enumerate(PROMPTS):
            req = self.server.request(f"R{number}", range(1000 * number, 1000 * number + length))
            self.server.match(req)
            self.server.lock(req)
            self.server.extend([req], [self.server.plan(req, length)])
            self.server.cache_unfinished(req, chunked=False)
            self.reqs.append(req)
        for _ in range(STEPS):
            self.step()

    def step(self) -> None:
        for req in self.reqs:
            req.output_ids.append(7)
        self.server.decode(self.reqs)

    def read(self, backend: str) -> dict[str, Any]:
        """One batch, gathered by ``backend`` in a step of a scheduler, and what that is told."""
        batch = Batch(self.server, self.reqs, self.padding)
        expected = batch.expected()
        step = steps.Step(None, self.reqs, None, counts=False)
        steps._running = step
        try:
            with SyncCounter() as syncs:
                found = BACKENDS[backend](batch)
        except GuardViolation as error:
            return {"raised": str(error)}
        finally:
            steps._running = None
        told: dict[str, Any] = {"reads": len(step.reads), "syncs": dict(syncs.counts)}
        wrong = [
            (request, entry)
            for request, (right, here) in enumerate(zip(expected, found, strict=True))
            for entry, (there, got) in enumerate(zip(right, here, strict=True))
            if there != got
        ]
        redirected = all(found[request][entry] == 0 for request, entry in wrong)
        try:
            again = [req.rid for req in step.judged()]
        except GuardViolation as error:
            return {**told, "differs": wrong, "redirected": redirected, "raised": str(error)}
        return {**told, "differs": wrong, "redirected": redirected, "again": again}

    def lose(self, request: int, back: int) -> list[int]:
        """The page ``back`` pages from the end of a request's row loses its window side.

        Returns the positions of that page that are in the window.
        """
        page, row = self.server.page_size, self.server.row(self.reqs[request])
        at = (row.shape[0] - 1) // page - back
        slots = row[at * page : (at + 1) * page]
        self.server.allocator.free_swa(slots)
        pools.settle(self.server.allocator)
        start = max(at * page, row.shape[0] - WINDOW)
        return [*range(start, at * page + slots.shape[0])]

    def hand_on(self, request: int, back: int) -> list[int]:
        """As ``lose``; somebody else is given the window page, and the old entries written back."""
        allocator = self.server.allocator
        page, row = self.server.page_size, self.server.row(self.reqs[request])
        at = (row.shape[0] - 1) // page - back
        slots = row[at * page : (at + 1) * page]
        before = allocator.full_to_swa_index_mapping[slots].clone()
        found = self.lose(request, back)
        window = sub_allocators(allocator)[1]
        while True:  # until the page that was freed is taken
            taken = pools.extend_surely(allocator, page)
            entries = allocator.full_to_swa_index_mapping[taken]
            if before[0] in entries:
                break
            assert window.available_size() >= page, "it was freed"
        allocator.full_to_swa_index_mapping[slots] = before
        return found


def _runs(story: Story) -> Iterator[None]:
    """Nothing is wrong, at any step."""
    for _ in range(12):
        yield
        story.step()


def _padded(story: Story) -> Iterator[None]:
    story.padding = 5
    yield


def _lost(story: Story) -> Iterator[None]:
    story.padding = 5
    story.dead = story.lose(1, 1)
    yield


def _handed_on(story: Story) -> Iterator[None]:
    story.padding = 5
    story.dead = story.hand_on(2, 1)
    yield


SCENES = {"runs": _runs, "padded": _padded, "lost": _lost, "handed on": _handed_on}


def main() -> int:
    return tales.print_all(__doc__, play, dict.fromkeys(SCENES, ()))


def play(
    release: scheduling.Release, tree: str, page: int, scene: str, mode: str | None
) -> dict[str, Any]:
    reports = tales.guarded(mode)
    told: dict[str, list[dict[str, Any]]] = {backend: [] for backend in BACKENDS}
    # What was found dead the guard takes out of the mapping: each backend finds it itself.
    together = [[*BACKENDS]] if scene in ("runs", "padded") else [[each] for each in BACKENDS]
    for backends in together:
        story = Story(release, tree, page)
        for _ in SCENES[scene](story):
            for backend in backends:
                told[backend].append(story.read(backend))
    if mode is not None:
        guard_of(story.server.allocator).drain()
    return {"told": told, "dead": story.dead, "faults": tales.faults(reports)}


if __name__ == "__main__":
    sys.exit(main())
