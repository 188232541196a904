"""What the FlashInfer path refuses and checks, without a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch

from hicache_guard.core.ledger import FREED
from hicache_guard.kernels import flashinfer_window as fi
from hicache_guard.kernels import record
from hicache_guard.kernels.books import DeviceBooks
from hicache_guard.kernels.flashinfer_window import Attention, Unsupported, why_not
from hicache_guard.kernels.translate import WindowTable

GPT_OSS = Attention(64, 8, 64, 64, 128, sinks=True)
MIMO = Attention(64, 4, 192, 128, 128, sinks=True)
INT32 = torch.int32


def books(page_size: int = 16, pages: int = 4) -> DeviceBooks:
    slots = (pages + 2) * page_size
    return DeviceBooks(
        mapping=torch.zeros(100, dtype=torch.int64),
        stamp=torch.zeros(100, dtype=INT32),
        owner=torch.zeros(slots, dtype=INT32),
        full_born=torch.full((100,), FREED, dtype=INT32),
        window_born=torch.full((pages + 2,), FREED, dtype=INT32),
        page_size=page_size,
    )


def table(requests: int = 2, entries: int = 8, dtype: torch.dtype = INT32) -> WindowTable:
    return WindowTable(
        indptr=torch.arange(requests + 1, dtype=INT32),
        starts=torch.zeros(requests, dtype=INT32),
        slots=torch.zeros(entries, dtype=dtype),
        expected=torch.zeros(entries, dtype=INT32),
        record=torch.zeros(record.LENGTH, dtype=torch.int64),
    )


def reason(attention: Attention = GPT_OSS, page_size: int = 16, **asked: Any) -> str:
    told = why_not(attention, page_size, **{"decode": False, **asked})
    assert told is not None
    assert "\n" not in told
    return told


def test_flashinfer_is_not_imported_before_it_is_used() -> None:
    program = "import sys, hicache_guard.kernels.flashinfer_window; "
    program += "sys.exit('flashinfer' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 0


def test_says_what_flashinfer_cannot_do() -> None:
    changed = dataclasses.replace
    assert "use fa2" in reason(backend="fa3")
    assert "custom mask" in reason(custom_mask=True)
    assert "48 is no power of two" in reason(page_size=48)
    assert "torch.float32" in reason(changed(GPT_OSS, dtype=torch.float32))
    assert "cache of torch.float16" in reason(changed(GPT_OSS, dtype_kv=torch.float16))
    assert "dimensions 80 and 80" in reason(changed(GPT_OSS, head_dim_qk=80, head_dim_vo=80))
    assert "dimensions 128 and 192" in reason(changed(MIMO, head_dim_qk=128, head_dim_vo=192))
    assert "use the prefill wrapper" in reason(MIMO, decode=True)
    seven = changed(GPT_OSS, query_heads=56)
    assert "use tensor cores" in reason(seven, decode=True, tensor_cores=False)


@pytest.mark.parametrize("attention", [GPT_OSS, MIMO])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_only_flashinfer_itself_can_be_missing_for_the_models_that_matter(
    attention: Attention, page_size: int
) -> None:
    told = why_not(attention, page_size, decode=False)
    installed = importlib.util.find_spec("flashinfer") is not None
    assert told is None if installed else told is not None and "not installed" in told


def test_objects_refuse_books_on_a_cpu_or_a_missing_flashinfer() -> None:
    with pytest.raises(Unsupported, match=r"GPU|not installed"):
        fi.FlashInferDecode(GPT_OSS, books(), tensor_cores=True)
    with pytest.raises(Unsupported, match=r"GPU|not installed"):
        fi.FlashInferPrefill(GPT_OSS, books())
    with pytest.raises(Unsupported, match="use the prefill wrapper"):
        fi.FlashInferDecode(MIMO, books(), tensor_cores=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"query_heads": 0},
        {"kv_heads": 7},
        {"window": 0},
        {"scale": 0.0},
        {"scale": float("nan")},
        {"soft_cap": -1.0},
    ],
    ids=str,
)
def test_an_attention_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        dataclasses.replace(GPT_OSS, **wrong)  # type: ignore[arg-type]


def test_scale_is_that_of_the_query_dimension() -> None:
    assert Attention(8, 8, 64, 64, 4).softmax_scale == 0.125
    assert Attention(8, 8, 64, 64, 4, scale=0.5).softmax_scale == 0.5


def test_a_table_has_to_fit() -> None:
    window = fi._Window(GPT_OSS, books(), None)
    good = table()
    assert window._take(good, None) is good.indptr
    host = torch.tensor([0, 1, 2], dtype=INT32)
    assert window._take(good, host) is host
    assert window._ones.tolist() == [1, 1]
    assert window._take(table(3), None).shape == (4,)
    assert window._ones.tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="int32"):
        window._take(table(dtype=torch.int64), None)
    with pytest.raises(ValueError, match="indptr_host"):
        window._take(good, host[:2])
    with pytest.raises(ValueError, match="expected generation"):
        window._take(dataclasses.replace(good, expected=good.expected[:3]), None)


def test_a_captured_attention_reads_one_table() -> None:
    captured = table()
    window = fi._Window(GPT_OSS, books(), captured)
    again = dataclasses.replace(captured, starts=captured.starts[:])
    window._take(again, None)
    with pytest.raises(ValueError, match="and no other"):
        window._take(table(), None)


def test_run_checks_what_it_is_given() -> None:
    window = fi._Window(GPT_OSS, books(), None)
    half = torch.bfloat16
    q = torch.zeros(2, 64, 64, dtype=half)
    k = torch.zeros(80, 8, 64, dtype=half)
    sinks = torch.zeros(64)
    window._check(q, k, k, sinks)
    with pytest.raises(ValueError, match="plan comes before run"):
        window._run(q, k, k, sinks, 1.0, 1.0, None, None)
    wrong: list[tuple[Any, ...]] = [
        (q[:, :8], k, k, sinks),
        (q, k[:79], k, sinks),
        (q, k, k[:, :4], sinks),
        (q, k, k.transpose(1, 2).contiguous().transpose(1, 2), sinks),
        (q, k, k, None),
        (q, k, k, sinks[:8]),
        (q, k, k, sinks.to(half)),
    ]
    for given in wrong:
        with pytest.raises(ValueError):  # noqa: PT011
            window._check(*given)
    with pytest.raises(TypeError, match="bfloat16"):
        window._check(q.to(torch.float16), k, k, sinks)


def test_versions_are_compared_by_number() -> None:
    assert fi._release("0.6.11.post1") == (0, 6, 11)
    assert fi._release("0.6.9") < fi._release("0.6.18") < fi._release("0.7.1rc1")
