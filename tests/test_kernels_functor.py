"""The FlashInfer variant's text on the host: against plain Python, and without each check."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import functor_host as host
import pytest

from hicache_guard.kernels.flashinfer_variant import text

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

Case = host.LogitCase | host.RowCase

#: Each check in the text, and what stands there without it. Every one must be noticed.
MUTATED = [
    ("qo_idx >= qo_len || kv_idx", "kv_idx"),
    ("qo_idx >= qo_len || kv_idx >= kv_len", "qo_idx >= qo_len"),
    ("kv_idx >= kv_len", "kv_idx > kv_len"),
    ("kv_idx + qo_len + window_left < kv_len + qo_idx", "false"),
    ("kv_idx + qo_len + window_left < ", "kv_idx + qo_len + window_left <= "),
    ("kv_idx + qo_len + window_left < ", "kv_idx + window_left + 1 < "),
    ("params.window_left >= 0", "params.window_left > 0"),
    ("params.window_left >= 0 ?", "true ?"),
    ("if (!live(params, kv_idx))", "if (false)"),
    ("} else {\n      return refused();\n    }", "}"),
    ("first_entry = params.paged_kv.indptr[batch_idx]", "first_entry = 0"),
    ("first_entry + kv_idx", "first_entry"),
    ("expected == 0u", "false"),
    ("slot >> static_cast<uint32_t>(params.window_page_shift)", "slot"),
    ("page < static_cast<uint32_t>(params.window_pages)", "true"),
    ("page < static_cast<uint32_t>", "page <= static_cast<uint32_t>"),
    ("born == expected && ", ""),
    ("born == expected", "born <= expected"),
    ("born == expected", "born >= expected"),
    (" && born < freed", ""),
    ("born < freed", "born <= freed"),
    ("    record(params, kv_idx);\n", ""),
    ("params.window_starts[request]) + kv_idx", "params.window_starts[request])"),
    ("static_cast<uint32_t>(params.window_starts[request]) + ", ""),
    ("static_cast<uint64_t>(request) << 32 | ", ""),
    ("request = batch_idx", "request = 0"),
    ("static_cast<long long>(key) < ", "static_cast<long long>(key) > "),
    ("atomicMin(late, static_cast<long long>(key))", "*late = 0"),
    ("return -HUGE_VALF", "return -math::inf"),
    ("part != 0u || ", ""),
    (" || qo_head_idx >= params.num_qo_heads", ""),
    ("params.window_sinks[qo_head_idx] * math::log2e", "params.window_sinks[qo_head_idx]"),
    ("params.window_sinks[qo_head_idx]", "params.window_sinks[0]"),
    ("sink > m ? sink : m", "m"),
    ("d = d * shrink + ", "d = d + "),
    ("+ math::ptx_exp2(sink - top)", ""),
    ("    m = top;\n", ""),
    ("return shrink", "return 1.0f"),
    ("sink_added = true", "sink_added = false"),
    ("scale = add_sink(params, kv_tile_idx, ", "scale = add_sink(params, 1, "),
    ("add_sink(params, params.kv_tile_indices[batch_idx], ", "add_sink(params, 0, "),
    ("share = scale", "share = 1.0f"),
    ("share = sink_scale", "share = 1.0f"),
    ("output * share * math::ptx_rcp(d)", "output * share"),
    ("before_tanh = scale / cap", "before_tanh = scale"),
    ("sm_scale_log2 = cap * math::log2e", "sm_scale_log2 = cap"),
    ("math::tanh(static_cast<float>(logits) * before_tanh)", "logits * before_tanh"),
]
#: These only matter without sinks and without a cap.
MUTATED_PLAIN = [
    ("sm_scale_log2 = scale * math::log2e", "sm_scale_log2 = scale"),
    ("return logits", "return logits * before_tanh * 2.0f"),
    ("m != -math::inf ? output", "true ? output"),
]


def mismatches(program: Path, at: int, cases: Sequence[Case]) -> tuple[int, int]:
    """Answers compared and answers wrong, over ``cases``."""
    words = host.run(program, at, "".join(case.written() for case in cases))
    counts = [case.mismatches(words) for case in cases]
    assert not words
    return sum(count for count, _ in counts), sum(wrong for _, wrong in counts)


def test_refuses_exactly_the_keys_that_do_not_hold(tmp_path: Path) -> None:
    program = host.build([text(sinks=False, soft_cap=False)], tmp_path)
    compared, wrong = mismatches(program, 0, host.batches())
    print(f"{compared:,} logits compared")
    assert compared > 500_000
    assert wrong == 0


@pytest.mark.parametrize("inf", [math.inf, 5e4], ids=["since 0.7.1", "up to 0.6.18"])
def test_caps_logits_and_adds_sinks(tmp_path: Path, inf: float) -> None:
    capped = [host.batch(seed, 1 + seed % 2, 16, 40, 4, 4, 0.1, 30.0) for seed in range(6)]
    texts = [text(sinks=False, soft_cap=True), text(sinks=True, soft_cap=True)]
    program = host.build(texts, tmp_path, inf=_written(inf))
    for at, sinks in enumerate((False, True)):
        finished = host.finished(inf, sinks=sinks)
        assert mismatches(program, at, [*capped, *finished])[1] == 0


def test_every_check_that_is_taken_out_is_noticed(tmp_path: Path) -> None:
    # Infinity is that of the older versions, which differs from the one that the text answers with.
    full: list[Case] = [
        *host.batches(small=True, soft_cap=30.0),
        *host.finished(5e4, sinks=True),
    ]
    plain: list[Case] = [*host.batches(small=True), *host.finished(5e4, sinks=False)]
    originals = [text(sinks=True, soft_cap=True), text(sinks=False, soft_cap=False)]
    asked = [full, plain]
    mutations = [(0, *pair) for pair in MUTATED] + [(1, *pair) for pair in MUTATED_PLAIN]
    assert all(originals[kind].count(removed) == 1 for kind, removed, _ in mutations)
    mutated = [originals[kind].replace(removed, put) for kind, removed, put in mutations]
    program = host.build([*originals, *mutated], tmp_path, inf=_written(5e4))
    assert [mismatches(program, kind, asked[kind])[1] for kind in (0, 1)] == [0, 0]
    survivors = [
        (removed, put)
        for at, (kind, removed, put) in enumerate(mutations)
        if not _notices(program, 2 + at, asked[kind])
    ]
    assert survivors == []


def _notices(program: Path, at: int, cases: Sequence[Case]) -> bool:
    try:
        return mismatches(program, at, cases)[1] > 0
    except subprocess.CalledProcessError:
        return True  # a sanitizer stopped it


def _written(inf: float) -> str:
    return "INFINITY" if math.isinf(inf) else f"{inf:e}f"
