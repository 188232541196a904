"""Which window attention is chosen, and that it says so; without a GPU that is the reference."""

from __future__ import annotations

import pytest
import torch

from hicache_guard.core.errors import ConfigError
from hicache_guard.kernels.flashinfer_window import Attention
from hicache_guard.kernels.window import How, WindowAttention, window_attention
from hicache_guard.repro.bench_kernels import Batch

MODEL = Attention(8, 2, 64, 64, 128, dtype=torch.float32)


def _planned(chosen: WindowAttention, batch: Batch) -> None:
    table = batch.translation()[1]()
    ends = torch.arange(batch.rows.shape[0] + 1, dtype=torch.int32)
    chosen.plan(table, batch.lengths, ends, 1)


def _attended(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of what is chosen; and the same by torch's own attention, in float64."""
    torch.manual_seed(0)
    slots = batch.books.window_slots
    k, v = torch.randn(2, slots, 2, 64)
    k[0] = v[0] = 0
    q = torch.randn(batch.rows.shape[0], 8, 64)
    chosen = window_attention(MODEL, batch.books, decode=True)
    _planned(chosen, batch)
    window = batch.books.mapping[batch.req_to_token.long()]
    keys, values = (
        pool[window].double().transpose(1, 2).repeat_interleave(4, dim=1) for pool in (k, v)
    )
    known = torch.nn.functional.scaled_dot_product_attention(q.double()[:, :, None], keys, values)
    return chosen.run(q, k, v), known[:, :, 0]


def test_without_a_gpu_it_is_the_reference() -> None:
    """Compared with torch's own attention over the same tokens."""
    batch = Batch.of(3, 16, torch.device("cpu"))
    chosen = window_attention(MODEL, batch.books, decode=True)
    assert (chosen.how, chosen.because) == (How.REFERENCE, "the books are not on a GPU")
    found, known = _attended(batch)
    assert found.dtype is torch.float32
    assert torch.allclose(found.double(), known, atol=1e-6)


def test_what_is_asked_for_and_cannot_be_is_refused_in_a_line() -> None:
    batch = Batch.of(1, 16, torch.device("cpu"))
    with pytest.raises(ConfigError, match="not on a GPU") as told:
        window_attention(MODEL, batch.books, decode=True, how=How.FLASHINFER)
    assert "\n" not in str(told.value)


def test_plan_comes_before_run_and_decoding_has_one_query() -> None:
    batch = Batch.of(1, 16, torch.device("cpu"))
    chosen = window_attention(MODEL, batch.books, decode=True)
    nothing = torch.zeros(0)
    with pytest.raises(ValueError, match="plan comes before run"):
        chosen.run(nothing, nothing, nothing)
    table = batch.translation()[1]()
    with pytest.raises(ValueError, match="decode=False"):
        chosen.plan(table, batch.lengths, torch.tensor([0, 2], dtype=torch.int32), 2)
