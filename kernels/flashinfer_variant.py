"""The FlashInfer attention variant that refuses keys of dead window slots, and its compilation.

The idea: an attention kernel of FlashInfer asks its *variant* for each logit. Ours looks up, for
the key in hand, the generation that the guard's book has *now* for the page of the window slot, and
compares it with the one that translation saw. Where they differ the logit is minus infinity.
The public API of FlashInfer (``jit_args``, the ``REGISTER_*`` macros) is all that is used; the text
is ours. Why it is written as it is:

- The check is in ``LogitsTransform``: FlashInfer calls that for every key of every tile, and
  ``LogitsMask`` for the tiles at the border only (its prefill kernels, which also serve decode with
  tensor cores).
- It answers with IEEE minus infinity, not ``math::inf``: up to 0.6.18 that is 5e4, which a softmax
  scale turns into a logit like others, and a row of nothing else into an average over what was
  refused.
- Kernels ask for lanes beyond the keys and the queries as well; those are left before any load.
- Its record is a minimum, which is idempotent: one key is asked for once per query head, thread and
  part of a split, so a count would mean nothing. Counts are translation's.
- An entry that translation refused already has ``expected`` 0. It is masked and not recorded: the
  translation told, and rows that pad a CUDA graph look the same. What is recorded came later.
- The decode kernel without tensor cores never calls ``update_m_d``, where FlashInfer's own variants
  add a sink, so there the sink is folded in when the first output element is asked for.
- Ragged kernels have no page table. They are compiled along and never called; asked, they refuse.

Masking does not keep a NaN in V out: 0 times NaN is NaN. Translation redirects what it finds stale
to the zeroed slot 0; of a page that is recycled after it and refilled with NaN, the output can be
NaN, and the record says so.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "HicacheGuardWindow"

#: Tensors that the variant reads besides FlashInfer's own, in the order of ``run``'s arguments:
#: the guard's generation of each window page; what translation expected for each entry; the
#: position of each request's first entry; and one number, the smallest ``request << 32 | position``
#: of a key that translation proved and that did not hold any more.
TENSORS: Mapping[str, str] = {
    "window_born": "int32_t",
    "window_expected": "int32_t",
    "window_starts": "int32_t",
    "window_late": "int64_t",
}
#: One more where there are sinks: float32, one for each query head.
SINKS: Mapping[str, str] = {"window_sinks": "float"}
#: Numbers, after the tensors.
SCALARS: Mapping[str, str] = {
    "sm_scale": "double",
    "soft_cap": "double",
    "window_pages": "int64_t",
    "window_page_shift": "int64_t",
}

TEXT = """
template <typename P, typename = void>
struct HicacheGuardPaged : std::false_type {};
template <typename P>
struct HicacheGuardPaged<P, std::void_t<decltype(std::declval<const P&>().paged_kv)>>
    : std::true_type {};

template <typename P, typename = void>
struct HicacheGuardPrefill : std::false_type {};
template <typename P>
struct HicacheGuardPrefill<P, std::void_t<decltype(std::declval<const P&>().q_indptr)>>
    : std::true_type {};

struct HicacheGuardWindow : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  static constexpr bool with_soft_cap = @SOFT_CAP@;
  static constexpr bool with_sinks = @SINKS@;
  static constexpr uint32_t freed = 1u << 30;

  uint32_t qo_len, kv_len, window_left, request, first_entry;
  float sm_scale_log2, before_tanh, sink_scale;
  bool sink_added;

  // May run before the previous kernel has ended: reads what FlashInfer itself reads here, no more.
  template <typename Params>
  __device__ __host__ HicacheGuardWindow(const Params& params, uint32_t batch_idx, uint8_t* smem) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = params.window_left >= 0 ? params.window_left : kv_len;
    request = batch_idx;
    first_entry = 0;
    if constexpr (HicacheGuardPaged<Params>::value) {
      first_entry = params.paged_kv.indptr[batch_idx];
    }
    const float scale = static_cast<float>(params.sm_scale);
    before_tanh = 1.0f;
    sm_scale_log2 = scale * math::log2e;
    if constexpr (with_soft_cap) {
      const float cap = static_cast<float>(params.soft_cap);
      before_tanh = scale / cap;
      sm_scale_log2 = cap * math::log2e;
    }
    sink_scale = 1.0f;
    sink_added = false;
  }

  static __device__ __forceinline__ float refused() { return -HUGE_VALF; }

  template <typename Params>
  __device__ __forceinline__ bool live(const Params& params, uint32_t kv_idx) const {
    const uint32_t entry = first_entry + kv_idx;
    const uint32_t slot = static_cast<uint32_t>(params.paged_kv.indices[entry]);
    const uint32_t expected = static_cast<uint32_t>(params.window_expected[entry]);
    if (expected == 0u) {
      return false;
    }
    const uint32_t page = slot >> static_cast<uint32_t>(params.window_page_shift);
    if (page < static_cast<uint32_t>(params.window_pages)) {
      const uint32_t born = static_cast<uint32_t>(params.window_born[page]);
      if (born == expected && born < freed) {
        return true;
      }
    }
    record(params, kv_idx);
    return false;
  }

  template <typename Params>
  __device__ __forceinline__ void record(const Params& params, uint32_t kv_idx) const {
    const uint32_t position = static_cast<uint32_t>(params.window_starts[request]) + kv_idx;
    const uint64_t key = static_cast<uint64_t>(request) << 32 | position;
    long long* late = reinterpret_cast<long long*>(params.window_late);
    // Thousands of threads may find the same key; most of them only read.
    if (static_cast<long long>(key) < *static_cast<volatile long long*>(late)) {
      atomicMin(late, static_cast<long long>(key));
    }
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if (qo_idx >= qo_len || kv_idx >= kv_len) {
      return refused();
    }
    if (kv_idx + qo_len + window_left < kv_len + qo_idx) {
      return refused();
    }
    if constexpr (HicacheGuardPaged<Params>::value) {
      if (!live(params, kv_idx)) {
        return refused();
      }
    } else {
      return refused();
    }
    if constexpr (with_soft_cap) {
      return math::tanh(static_cast<float>(logits) * before_tanh);
    }
    return logits;
  })

  // Adds the sink to the sum of a row. The part of a split that has the first keys does so.
  template <typename Params>
  __device__ __forceinline__ float add_sink(const Params& params, uint32_t part,
                                            uint32_t qo_head_idx, float& m, float& d) const {
    if (part != 0u || qo_head_idx >= params.num_qo_heads) {
      return 1.0f;
    }
    const float sink = params.window_sinks[qo_head_idx] * math::log2e;
    const float top = sink > m ? sink : m;
    const float shrink = math::ptx_exp2(m - top);
    d = d * shrink + math::ptx_exp2(sink - top);
    m = top;
    return shrink;
  }

  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    if constexpr (with_sinks) {
      scale = add_sink(params, kv_tile_idx, qo_head_idx, m, d);
    }
  })

  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    float share = 1.0f;
    if constexpr (with_sinks && HicacheGuardPrefill<Params>::value) {
      share = scale;
    } else if constexpr (with_sinks) {
      // Here batch_idx is the number of the part, and every element of the row comes by.
      if (!sink_added) {
        sink_scale = add_sink(params, params.kv_tile_indices[batch_idx], qo_head_idx, m, d);
        sink_added = true;
      }
      share = sink_scale;
    }
    return m != -math::inf ? output * share * math::ptx_rcp(d) : 0.0f;
  })
};
"""


def text(*, sinks: bool, soft_cap: bool) -> str:
    """The variant in CUDA C++, one ``struct`` named ``NAME``.

    It needs these members of FlashInfer's parameters: ``paged_kv`` with page tables of page size 1
    (an entry of ``indices`` is a window slot), what ``TENSORS``, ``SINKS`` and ``SCALARS`` name,
    and ``window_left``: query ``i`` of ``n`` uses the keys at most that far before its own, which
    is key ``kv_len - n + i``; below 0 there is no such limit.
    """
    written = TEXT.replace("@SINKS@", str(sinks).lower())
    return written.replace("@SOFT_CAP@", str(soft_cap).lower())


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form of the variant: types, head dimensions, and what is added to the logits.

    ``tensor_cores``: of FlashInfer's FA2 prefill kernels, which also serve decode with tensor
    cores; else of its decode kernel. Types are those of queries, cache and output.
    """

    tensor_cores: bool
    dtype_q: torch.dtype
    dtype_kv: torch.dtype
    dtype_o: torch.dtype
    head_dim_qk: int
    head_dim_vo: int
    sinks: bool = False
    soft_cap: bool = False

    @property
    def text(self) -> str:
        """The variant's CUDA C++."""
        return text(sinks=self.sinks, soft_cap=self.soft_cap)

    @property
    def tensors(self) -> dict[str, str]:
        """Names and C types of the additional tensors, in order."""
        return {**TENSORS, **(SINKS if self.sinks else {})}

    @property
    def uri(self) -> str:
        """FlashInfer's name of the compiled module; another text has another name."""
        described = (self.text, tuple(self.tensors.items()), tuple(SCALARS.items()))
        digest = hashlib.sha256(repr(described).encode()).hexdigest()[:12]
        kind = "prefill" if self.tensor_cores else "decode"
        types = "_".join(
            str(dtype).removeprefix("torch.")
            for dtype in (self.dtype_q, self.dtype_kv, self.dtype_o)
        )
        added = ("_sinks" if self.sinks else "") + ("_cap" if self.soft_cap else "")
        dims = f"{self.head_dim_qk}_{self.head_dim_vo}"
        return f"hicache_guard_window_{kind}_{types}_{dims}{added}_{digest}"

    def jit_args(self) -> list[Any]:
        """What FlashInfer's wrappers take as ``jit_args``; indices are int32."""
        return [
            self.uri,
            self.dtype_q,
            self.dtype_kv,
            self.dtype_o,
            torch.int32,
            self.head_dim_qk,
            self.head_dim_vo,
            list(self.tensors),
            list(self.tensors.values()),
            list(SCALARS),
            list(SCALARS.values()),
            NAME,
            self.text,
        ]

    def spec(self) -> Any:
        """FlashInfer's ``JitSpec``: writes the sources; ``.build_and_load()`` compiles them.

        Imports FlashInfer; raises ImportError without it.
        """
        attention = importlib.import_module("flashinfer.jit.attention")
        if self.tensor_cores:
            return attention.gen_customize_batch_prefill_module("fa2", *self.jit_args())
        return attention.gen_customize_batch_decode_module(*self.jit_args())
