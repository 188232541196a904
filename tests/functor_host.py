"""The variant's text on the host: compiled by g++ behind a shim of ours, against plain Python.

The shim declares what the text needs of FlashInfer and CUDA, and nothing of theirs is copied: so
the very text that nvcc compiles can be run here, under the address and the undefined-behaviour
sanitizers.
A case is one batch; the program asks the functor for every lane, also for those beyond the keys and
the queries as the kernels do, and prints the bits of each answer. ``LogitCase.answers`` says what
they have to be.
"""

from __future__ import annotations

import math
import random
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache_guard.core.ledger import FREED
from hicache_guard.kernels.flashinfer_variant import NAME
from hicache_guard.kernels.record import NOBODY

#: Lanes that are asked for beyond the queries and the keys of each request.
BEYOND = 3
REFUSED = -math.inf

SHIM = """
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline

static long long atomicMin(long long* at, long long value) {
  const long long before = *at;
  if (value < before) *at = value;
  return before;
}

namespace math {
static const float log2e = 1.44269504088896340736f;
static const float inf = FLASHINFER_INF;
static float tanh(float x) { return std::tanh(x); }
static float ptx_exp2(float x) { return std::exp2(x); }
static float ptx_rcp(float x) { return 1.0f / x; }
}

struct AttentionVariantBase {};

#define REGISTER_LOGITS_TRANSFORM(p, x, b, q, k, qh, kh, ...)                                   \\
  template <typename Params, typename X>                                                        \\
  X LogitsTransform(const Params& p, X x, uint32_t b, uint32_t q, uint32_t k, uint32_t qh,      \\
                    uint32_t kh)                                                                \\
  __VA_ARGS__
#define REGISTER_M_D_UPDATE(p, t, qh, m, d, s, ...)                                             \\
  template <typename Params, typename M>                                                        \\
  void update_m_d(const Params& p, uint32_t t, uint32_t qh, M& m, float& d, float& s)           \\
  __VA_ARGS__
#define REGISTER_OUTPUT_TRANSFORM(p, o, b, q, qh, m, d, s, ...)                                 \\
  template <typename Params, typename X, typename M>                                            \\
  X OutputTransform(const Params& p, X o, uint32_t b, uint32_t q, uint32_t qh, M& m, float& d,  \\
                    float s)                                                                    \\
  __VA_ARGS__

struct Pages {
  const int32_t* indptr;
  const int32_t* indices;
};

// Both kinds of FlashInfer's parameters, as far as the text reads them.
struct Common {
  const int32_t* window_born;
  const int32_t* window_expected;
  const int32_t* window_starts;
  int64_t* window_late;
  const float* window_sinks;
  double sm_scale, soft_cap;
  int64_t window_pages, window_page_shift;
  int32_t window_left;
  uint32_t num_qo_heads;
  const int32_t* queries;
  const int32_t* keys;
  uint32_t get_qo_len(uint32_t request) const { return queries[request]; }
  uint32_t get_kv_len(uint32_t request) const { return keys[request]; }
};
struct Decode : Common {
  Pages paged_kv;
  const int32_t* kv_tile_indices;
};
struct Prefill : Common {
  Pages paged_kv;
  const int32_t* q_indptr;
};
struct Ragged : Common {
  const int32_t* q_indptr;
};
"""

DRIVER = """
static std::vector<int32_t> list() {
  int count = 0;
  if (std::scanf("%d", &count) != 1) std::abort();
  std::vector<int32_t> numbers(count);
  for (int32_t& number : numbers)
    if (std::scanf("%d", &number) != 1) std::abort();
  numbers.shrink_to_fit();
  return numbers;
}

static float from_bits(int32_t bits) {
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

static void print(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  std::printf("%08x\\n", bits);
}

template <typename Variant, typename Params>
static void ask_lanes(const Params& params, uint32_t requests, const std::vector<int32_t>& logits,
                      uint32_t heads, uint32_t group, uint32_t beyond) {
  for (uint32_t r = 0; r < requests; ++r)
    for (uint32_t q = 0; q < params.get_qo_len(r) + beyond; ++q)
      for (uint32_t k = 0; k < params.get_kv_len(r) + beyond; ++k)
        for (uint32_t h = 0; h < heads; ++h) {
          Variant variant(params, r, nullptr);
          const float logit = from_bits(logits[k]);
          print(variant.LogitsTransform(params, logit, r, q, k, h, h / group));
        }
}

template <typename Variant>
static void drive() {
  std::vector<int32_t> what;
  while (what = list(), what[0] != 0) {
    std::vector<int32_t> born = list(), expected = list();
    std::vector<int32_t> starts = list(), indptr = list();
    std::vector<int32_t> slots = list(), queries = list(), keys = list();
    std::vector<int32_t> numbers = list(), sinks = list(), parts = list();
    std::vector<float> sink;
    for (int32_t bits : sinks) sink.push_back(from_bits(bits));
    int64_t late = INT64_MAX;
    Common common{};
    common.window_born = born.data();
    common.window_expected = expected.data();
    common.window_starts = starts.data();
    common.window_late = &late;
    common.window_sinks = sink.data();
    common.sm_scale = from_bits(what[1]);
    common.soft_cap = from_bits(what[2]);
    common.window_pages = born.size();
    common.window_page_shift = what[3];
    common.window_left = what[4];
    common.num_qo_heads = what[5];
    common.queries = queries.data();
    common.keys = keys.data();
    Decode decode{common};
    decode.paged_kv = {indptr.data(), slots.data()};
    decode.kv_tile_indices = parts.data();
    Prefill prefill{common};
    prefill.paged_kv = decode.paged_kv;
    Ragged ragged{common};
    const uint32_t requests = starts.size(), heads = what[5], group = what[6], beyond = what[7];
    if (what[0] == 1) ask_lanes<Variant>(decode, requests, numbers, heads, group, beyond);
    if (what[0] == 2) ask_lanes<Variant>(prefill, requests, numbers, heads, group, beyond);
    if (what[0] == 3) ask_lanes<Variant>(ragged, requests, numbers, heads, group, beyond);
    if (what[0] == 4 || what[0] == 5) {
      // Rows of four output elements each: m, d, then the elements.
      for (uint32_t row = 0; row < parts.size(); ++row)
        for (uint32_t h = 0; h < heads + beyond; ++h) {
          Variant variant(decode, 0, nullptr);
          float m = from_bits(numbers[6 * row]), d = from_bits(numbers[6 * row + 1]), scale = 1;
          // Only the prefill kernels call this, and they have rows for heads that do not exist.
          if (what[0] == 5) variant.update_m_d(prefill, parts[row], h, m, d, scale);
          else if (h >= heads) continue;
          for (int element = 0; element < 4; ++element) {
            const float o = from_bits(numbers[6 * row + 2 + element]);
            print(what[0] == 5 ? variant.OutputTransform(prefill, o, row, 0, h, m, d, scale)
                               : variant.OutputTransform(decode, o, row, 0, h, m, d, scale));
          }
          print(m);
          print(d);
        }
    }
    print(Variant(decode, 0, nullptr).sm_scale_log2);
    std::printf("%lld\\n", static_cast<long long>(late));
  }
}
"""


def build(texts: Sequence[str], into: Path, *, inf: str = "INFINITY") -> Path:
    """Compile ``texts`` (variants) with the shim; ``inf`` is FlashInfer's ``math::inf``."""
    into.mkdir(parents=True, exist_ok=True)
    source, program = into / "functor.cpp", into / "functor"
    variants = [f"namespace v{at} {{\n{text}\n}}\n" for at, text in enumerate(texts)]
    drives = ", ".join(f"drive<v{at}::{NAME}>" for at in range(len(texts)))
    main = f"int main(int, char** given) {{\n  static void (*const drives[])() = {{{drives}}};\n"
    main += "  drives[std::atoi(given[1])]();\n}\n"
    source.write_text("".join([SHIM, *variants, DRIVER, main]))
    flags = ["-std=c++17", "-O0", "-fsanitize=undefined,address", "-fno-sanitize-recover=all"]
    command = ["g++", *flags, f"-DFLASHINFER_INF=({inf})", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    return program


def run(program: Path, at: int, cases: str) -> list[str]:
    """What variant ``at`` of ``program`` prints for ``cases``; raises where it was stopped."""
    done = subprocess.run(
        [str(program), str(at)], input=cases + "1 0\n", text=True, capture_output=True, check=True
    )
    return done.stdout.split()


def bits(number: float) -> int:
    """The bits of a float32, as int32."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def number(word: str) -> float:
    """The float32 whose bits the program printed."""
    return float(struct.unpack(">f", bytes.fromhex(word))[0])


def _line(numbers: list[int]) -> str:
    return " ".join(map(str, [len(numbers), *numbers])) + "\n"


@dataclass(slots=True)
class LogitCase:
    """One batch whose logits are asked for. ``kind``: 1 decode, 2 paged prefill, 3 ragged."""

    kind: int
    page_size: int
    window_left: int
    heads: int
    group: int
    born: list[int]
    slots: list[list[int]]
    expected: list[list[int]]
    starts: list[int]
    queries: list[int]
    logits: list[float]
    scale: float = 0.125
    soft_cap: float = 0.0

    def written(self) -> str:
        """As the program reads it."""
        indptr = [0]
        for entries in self.slots:
            indptr.append(indptr[-1] + len(entries))
        shift = self.page_size.bit_length() - 1
        what = [self.kind, bits(self.scale), bits(self.soft_cap), shift, self.window_left]
        what += [self.heads, self.group, BEYOND]
        parts = [
            what,
            self.born,
            [number for entries in self.expected for number in entries],
            self.starts,
            indptr,
            [slot for entries in self.slots for slot in entries],
            self.queries,
            [len(entries) for entries in self.slots],
            [bits(logit) for logit in self.logits],
            [],
            [],
        ]
        return "".join(map(_line, parts))

    def _fate(self, request: int, key: int) -> str:
        """What is to become of a key: "live", "known" (to translation) or "late"."""
        slot, expected = self.slots[request][key], self.expected[request][key]
        page = slot // self.page_size
        if expected == 0:
            return "known"
        inside = 0 <= page < len(self.born)
        return "live" if inside and expected < FREED and self.born[page] == expected else "late"

    def answers(self) -> tuple[list[float], int]:
        """The answer for each lane of the first head, and the record."""
        lanes, late = [], NOBODY
        for request, entries in enumerate(self.slots):
            keys, queries = len(entries), self.queries[request]
            for query in range(queries + BEYOND):
                own = keys - queries + query
                for key in range(keys + BEYOND):
                    answer = REFUSED
                    near = self.window_left < 0 or own - key <= self.window_left
                    if self.kind != 3 and query < queries and key < keys and near:
                        fate = self._fate(request, key)
                        if fate == "live":
                            answer = self._transformed(self.logits[key])
                        elif fate == "late":
                            late = min(late, request << 32 | self.starts[request] + key)
                    lanes.append(answer)
        return lanes, late

    def _transformed(self, logit: float) -> float:
        if self.soft_cap == 0.0:
            return logit
        return math.tanh(logit * self.scale / self.soft_cap)

    def mismatches(self, words: list[str]) -> tuple[int, int]:
        """Takes the case's lines from ``words``; how many lanes, and how many are wrong."""
        lanes, late = self.answers()
        printed = words[: len(lanes) * self.heads]
        found_scale, found_late = words[len(printed) : len(printed) + 2]
        del words[: len(printed) + 2]
        wrong = int(int(found_late) != late)
        scaled = (self.soft_cap or self.scale) * math.log2(math.e)
        wrong += not math.isclose(number(found_scale), scaled, rel_tol=1e-6)
        for lane, answer in enumerate(lanes):
            for word in printed[lane * self.heads : (lane + 1) * self.heads]:
                wrong += not _same(number(word), answer, exact=self.soft_cap == 0.0)
        return len(printed), wrong


def _same(found: float, answer: float, *, exact: bool) -> bool:
    if math.isnan(answer):
        return math.isnan(found)
    if exact or math.isinf(answer):
        return found == answer
    return math.isclose(found, answer, rel_tol=1e-5, abs_tol=1e-7)


@dataclass(slots=True)
class RowCase:
    """Rows that are finished: m, d and four output elements each. ``kind``: 4 decode, 5 prefill.

    ``parts``: which part of a split each row is. ``sinks``: one for each head; None without.
    """

    kind: int
    inf: float
    heads: int
    rows: list[list[float]]
    parts: list[int]
    sinks: list[float] | None

    def written(self) -> str:
        """As the program reads it."""
        what = [self.kind, bits(0.125), bits(0.0), 0, -1, self.heads, 1, BEYOND]
        numbers = [bits(number) for row in self.rows for number in row]
        sinks = [bits(sink) for sink in self.sinks or []]
        parts = [what, [1], [], [0], [0, 0], [], [1], [0], numbers, sinks, self.parts]
        return "".join(map(_line, parts))

    def mismatches(self, words: list[str]) -> tuple[int, int]:
        """Takes the case's lines from ``words``; how many numbers, and how many are wrong."""
        answers: list[float] = []
        heads = self.heads + (BEYOND if self.kind == 5 else 0)
        for row, part in zip(self.rows, self.parts, strict=True):
            for head in range(heads):
                answers += self._finished(row, part, head)
        printed = words[: len(answers)]
        del words[: len(answers) + 2]
        pairs = zip(printed, answers, strict=True)
        return len(answers), sum(not _same(number(word), a, exact=False) for word, a in pairs)

    def _finished(self, row: list[float], part: int, head: int) -> list[float]:
        """The row's softmax taken apart and put together in float64, the sink as one more term."""
        m, d, *outputs = row
        if self.sinks is None or part != 0 or head >= self.heads:
            empty = m == -self.inf
            return [*(0.0 if empty else o / d for o in outputs), m, d]
        sink = self.sinks[head] * math.log2(math.e)
        top = max(m, sink)
        kept = 2.0 ** (m - top)
        total = d * kept + 2.0 ** (sink - top)
        return [*(o * kept / total for o in outputs), top, total]


def batch(
    seed: int,
    kind: int,
    page_size: int,
    window: int,
    heads: int,
    group: int,
    stale: float,
    soft_cap: float = 0.0,
) -> LogitCase:
    """A random batch of three requests, whose windows are full, shorter, and empty."""
    rng = random.Random(seed)
    lengths = [window, rng.randint(1, window), 0]
    rng.shuffle(lengths)
    pages = 2 + sum(-(-length // page_size) + 1 for length in lengths)
    # The last is the one that stands for what is beyond the pool: never live.
    born = [FREED, *(rng.randint(1, FREED // 2) for _ in range(pages - 2)), FREED]
    slots, expected = [], []
    free = list(range(page_size, (pages - 1) * page_size))
    for length in lengths:
        begin = rng.randrange(0, len(free) - length + 1)
        own = free[begin : begin + length]
        slots.append(own)
        expected.append([_expectation(rng, born[slot // page_size], stale) for slot in own])
        for key, value in enumerate(expected[-1]):
            if value == 0:
                own[key] = 0
            elif value < 0:  # a slot that no table of ours has
                own[key], expected[-1][key] = rng.choice((-1, pages * page_size)), 7
    # Ended since: what translation expected is what stands there, and a freed page is never live.
    if stale and seed % 2 and any(slots):
        request = next(number for number, entries in enumerate(slots) if entries)
        expected[request][0], slots[request][0] = FREED, (pages - 1) * page_size
    queries = [1 if kind == 1 else min(length, rng.randint(1, 4)) for length in lengths]
    logits = [rng.uniform(-9, 9) for _ in range(window + BEYOND)]
    if window > 2:
        logits[1] = math.nan  # as KV that somebody else wrote may hold
    logits = [struct.unpack("<f", struct.pack("<f", logit))[0] for logit in logits]
    return LogitCase(
        kind=kind,
        page_size=page_size,
        window_left=rng.choice((-1, 0, max(0, window - rng.randint(1, 3)))),
        heads=heads,
        group=group,
        born=born,
        slots=slots,
        expected=expected,
        starts=[rng.randint(0, 5000) for _ in lengths],
        queries=queries,
        logits=logits,
        soft_cap=soft_cap,
    )


def _expectation(rng: random.Random, born: int, stale: float) -> int:
    """The generation that translation saw: as it is, or one of the ways in which it is not."""
    if rng.random() >= stale:
        return born
    return rng.choice((0, born - 1 or 3, born + 1, FREED | 9, -1))


def batches(*, small: bool = False, soft_cap: float = 0.0) -> list[LogitCase]:
    """Every page size, window, grouping and stale fraction; ``small`` keeps a part of them."""
    cases = []
    for number, (page_size, window, group, stale) in enumerate(
        (page_size, window, group, stale)
        for page_size in (1, 16, 64)
        for window in ((1, 9, 17) if small else (1, 127, 128, 129))
        for group in ((4,) if small else (1, 4, 8))
        for stale in (0.0, 0.1, 1.0)
    ):
        for kind in (1, 2):
            made = batch(number, kind, page_size, window, group, group, stale, soft_cap)
            cases.append(made)
    cases.append(batch(9000, 3, 16, 33, 4, 4, 0.1, soft_cap))
    return cases


def finished(inf: float, *, sinks: bool) -> list[RowCase]:
    """Rows to finish, in both kinds of kernel, rows of nothing but refused keys among them."""
    rng = random.Random(5)
    cases = []
    for kind in (4, 5):
        rows = [[rng.uniform(-9, 9), rng.uniform(1, 40), *_outputs(rng)] for _ in range(12)]
        rows += [[-inf, 1.0, 0.0, 0.0, 0.0, 0.0]] * 2
        rows.append([-inf, 17.0, *_outputs(rng)])  # as a kernel that knows no infinity leaves it
        parts = [rng.choice((0, 1, 2)) for _ in rows]
        parts[-1] = 0
        weights = [-4.0, 0.0, 6.5] if sinks else None
        cases.append(RowCase(kind, inf, 3, rows, parts, weights))
    return cases


def _outputs(rng: random.Random) -> list[float]:
    return [rng.uniform(-3, 3) for _ in range(4)]
