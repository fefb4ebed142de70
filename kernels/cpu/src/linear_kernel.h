// The innermost loops: some rows of x times one panel (or two), over a stretch of k.
//
// Every output has one accumulator that takes its k in rising order, in each of these kernels: that
// is what makes results independent of the batch. Only for *_isa.cpp files.
#pragma once

#include <utility>

#include "linear_layout.h"
#include "vec.h"

namespace legato::LEGATO_ISA {

constexpr int kLanes = Vec::kLanes;
constexpr int kPanelRows = kPanelVecs * kLanes;
// Rows of x at once: with a panel's two registers each they take 24 of 32 (12 of 16) registers, and
// so many multiplications are under way that none waits for the one before it.
constexpr int kRows = kLanes == 16 ? 12 : 6;
// Up to so many rows, two panels at once keep enough of them under way where whole numbers are
// unpacked: each byte of those is worth several multiplications.
constexpr int kWideRows = kLanes == 16 ? 4 : 1;
constexpr int64_t kSumsOfPanel = kMaxBlockRows * kPanelRows;  // floats between two panels' sums

// One call of a kernel: whole groups of k where weights have group scales, else any stretch of k.
struct Stretch {
  const char* x;  // first row, first k
  int64_t row_bytes;
  const char* w;
  int64_t num_units;     // of each group
  int64_t num_groups;
  int64_t panel_stride;  // bytes from one panel's w, scales and ahead to the next's
  int64_t w_stride;      // bytes from one group's w to the next's
  const char* scales;    // fp16, of the first group; null: sums are plain
  int64_t scales_stride;
  bool has_zeros;        // fp16, behind the scales
  const float* group_sums;  // of the first group and row
  int64_t group_sums_stride;
  float* sums;  // [rows][kPanelRows]
  bool first;   // start from zero instead of from `sums`
  const char* ahead;  // what to ask the memory for meanwhile, and how many lines of it per unit
  int lines_ahead;
};

using Kernel = void (*)(const Stretch&);

// bf16, f32 and f16 weights as floats, one k at a time: dot products without bf16 instructions.
struct FloatOfF32 {
  static Vec load(const char* unit, int k, int vec) {
    return Vec::load(reinterpret_cast<const float*>(unit) + (k * kPanelVecs + vec) * kLanes);
  }
  static constexpr int64_t kUnitBytes = kUnit * kPanelVecs * kLanes * 4;
};

struct FloatOfF16 {
  static Vec load(const char* unit, int k, int vec) {
    return Vec::load(reinterpret_cast<const fp16*>(unit) + (k * kPanelVecs + vec) * kLanes);
  }
  static constexpr int64_t kUnitBytes = kUnit * kPanelVecs * kLanes * 2;
};

struct FloatOfBf16 {
  static Vec load(const char* unit, int k, int vec) {
    const float* pairs = reinterpret_cast<const float*>(unit) + (k / 2 * kPanelVecs + vec) * kLanes;
#ifdef __AVX512F__
    const __m512i bits = _mm512_loadu_si512(pairs);
    return {_mm512_castsi512_ps(k % 2 == 0 ? _mm512_slli_epi32(bits, 16)
                                           : _mm512_and_si512(bits, _mm512_set1_epi32(-65536)))};
#else
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    return {_mm256_castsi256_ps(k % 2 == 0 ? _mm256_slli_epi32(bits, 16)
                                           : _mm256_and_si256(bits, _mm256_set1_epi32(-65536)))};
#endif
  }
  static constexpr int64_t kUnitBytes = kUnit * kPanelVecs * kLanes * 2;
};

template <int kPanels>
inline void ask_ahead(const char*& ahead, int num_lines, int64_t panel_stride) {
  for (int i = 0; i < num_lines; ++i) {
    _mm_prefetch(ahead, _MM_HINT_T0);
    if (kPanels == 2) _mm_prefetch(ahead + panel_stride, _MM_HINT_T0);
    ahead += 64;
  }
}

// Three rows to a pointer, so that addresses need few registers.
template <int kNumRows>
struct RowPointers {
  const char* at[(kNumRows + 2) / 3];
  int64_t row_bytes;

  explicit RowPointers(const Stretch& s) : row_bytes(s.row_bytes) {
    for (int i = 0; i < (kNumRows + 2) / 3; ++i) at[i] = s.x + i * 3 * row_bytes;
  }
  const char* row(int row) const { return at[row / 3] + row % 3 * row_bytes; }
  void advance(int64_t num_bytes) {
    for (const char*& p : at) p += num_bytes;
  }
};

template <class W, int kNumRows, int kPanels>
inline void multiply_floats(const Stretch& s, const char* w, const char*& ahead,
                            RowPointers<kNumRows>& x, Vec (&sums)[kNumRows][kPanels * kPanelVecs]) {
  for (int64_t unit = 0; unit < s.num_units; ++unit) {
    ask_ahead<kPanels>(ahead, s.lines_ahead, s.panel_stride);
#pragma GCC unroll 8
    for (int k = 0; k < kUnit; ++k) {
      Vec weights[kPanels * kPanelVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kPanels * kPanelVecs; ++v) {
        weights[v] = W::load(w + v / kPanelVecs * s.panel_stride, k, v % kPanelVecs);
      }
#pragma GCC unroll 12
      for (int row = 0; row < kNumRows; ++row) {
        const Vec value = Vec::set(reinterpret_cast<const float*>(x.row(row))[k]);
#pragma GCC unroll 4
        for (int v = 0; v < kPanels * kPanelVecs; ++v) {
          sums[row][v] = fma(weights[v], value, sums[row][v]);
        }
      }
    }
    w += W::kUnitBytes;
    x.advance(kUnit * 4);
  }
}

#ifdef __AVX512BF16__

// Pairs of k as bf16, 16 rows to a register, from the stored form. `Held` is what one unit of one
// register's rows is loaded as; whole numbers up to 256 are exact in bf16, so i8 and i4 lose nothing.
struct PairsOfBf16 {
  using Held = const char*;
  static Held hold(const char* unit, int vec) { return unit + vec * 64; }
  static __m512bh pair(Held held, int j) {
    return (__m512bh)_mm512_loadu_si512(held + j * kPanelVecs * 64);
  }
  static constexpr int64_t kUnitBytes = 4 * kPanelVecs * 64;
};

struct PairsOfI8 {
  using Held = const char*;
  static Held hold(const char* unit, int vec) { return unit + vec * 32; }
  static __m512bh pair(Held held, int j) {
    const __m128i* bytes = reinterpret_cast<const __m128i*>(held + j * kPanelVecs * 32);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
    return _mm512_cvtne2ps_pbh(high, low);
  }
  static constexpr int64_t kUnitBytes = 4 * kPanelVecs * 32;
};

struct PairsOfI4 {
  using Held = __m512i;
  static Held hold(const char* unit, int vec) { return _mm512_loadu_si512(unit + vec * 64); }
  static __m512bh pair(Held held, int j) {
    // bf16 of -8 .. 7, twice over: the permute looks at five bits of a word, of which the fifth
    // belongs to the next value.
    const __m256i values =
        _mm256_setr_epi16(-16128, -16160, -16192, -16224, -16256, -16320, -16384, -16512, 0, 16256,
                          16384, 16448, 16512, 16544, 16576, 16608);
    const __m512i table = _mm512_broadcast_i64x4(values);
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(held, 4 * j), table);
  }
  static constexpr int64_t kUnitBytes = kPanelVecs * 64;
};

template <class W, int kNumRows, int kPanels>
inline void multiply_pairs(const Stretch& s, const char* w, const char*& ahead,
                           RowPointers<kNumRows>& x, Vec (&sums)[kNumRows][kPanels * kPanelVecs]) {
  constexpr int kVecs = kPanels * kPanelVecs;
  for (int64_t unit = 0; unit < s.num_units; ++unit) {
    ask_ahead<kPanels>(ahead, s.lines_ahead, s.panel_stride);
    typename W::Held held[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      held[v] = W::hold(w + v / kPanelVecs * s.panel_stride, v % kPanelVecs);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512bh weights[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) weights[v] = W::pair(held[v], j);
#pragma GCC unroll 12
      for (int row = 0; row < kNumRows; ++row) {
        int32_t two;
        __builtin_memcpy(&two, x.row(row) + j * 4, 4);
        const __m512bh values = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          sums[row][v].v = _mm512_dpbf16_ps(sums[row][v].v, weights[v], values);
        }
      }
    }
    w += W::kUnitBytes;
    x.advance(kUnit * 2);
  }
}

#endif

template <class W, bool kNative, int kNumRows, int kPanels>
void kernel(const Stretch& s) {
  constexpr int kVecs = kPanels * kPanelVecs;
  const auto total = [&](int row, int v) {
    return s.sums + v / kPanelVecs * kSumsOfPanel + row * kPanelRows + v % kPanelVecs * kLanes;
  };
  const bool scaled = s.scales != nullptr;
  const char* w = s.w;
  const char* ahead = s.ahead;
  const char* scales = s.scales;
  RowPointers<kNumRows> x(s);
  for (int64_t group = 0; group < s.num_groups; ++group) {
    const bool fresh = s.first && group == 0;
    Vec sums[kNumRows][kVecs];
#pragma GCC unroll 12
    for (int row = 0; row < kNumRows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        sums[row][v] = fresh || scaled ? Vec::zero() : Vec::load(total(row, v));
      }
    }
#ifdef __AVX512BF16__
    if constexpr (kNative) multiply_pairs<W, kNumRows, kPanels>(s, w, ahead, x, sums);
#endif
    if constexpr (!kNative) multiply_floats<W, kNumRows, kPanels>(s, w, ahead, x, sums);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      Vec scale = Vec::zero();
      Vec zero = Vec::zero();
      if (scaled) {
        const fp16* halves = reinterpret_cast<const fp16*>(scales + v / kPanelVecs * s.panel_stride);
        scale = Vec::load(halves + v % kPanelVecs * kLanes);
        if (s.has_zeros) zero = Vec::load(halves + kPanelRows + v % kPanelVecs * kLanes);
      }
#pragma GCC unroll 12
      for (int row = 0; row < kNumRows; ++row) {
        if (scaled) {
          Vec sum = sums[row][v];
          if (s.has_zeros) {
            sum = fma(zero, Vec::set(-s.group_sums[row * s.group_sums_stride + group]), sum);
          }
          sums[row][v] = fma(sum, scale, fresh ? Vec::zero() : Vec::load(total(row, v)));
        }
        sums[row][v].store(total(row, v));
      }
    }
    w += s.w_stride;
    scales += s.scales_stride;
  }
}

struct KernelTable {
  Kernel kernels[kRows];   // [rows - 1]
  Kernel wide[kWideRows];  // [rows - 1], two panels
};

template <class W, bool kNative, int... kRow, int... kWideRow>
constexpr KernelTable make_table(std::integer_sequence<int, kRow...>,
                                 std::integer_sequence<int, kWideRow...>) {
  return {{kernel<W, kNative, kRow + 1, 1>...}, {kernel<W, kNative, kWideRow + 1, 2>...}};
}

template <class W, bool kNative>
constexpr KernelTable kKernels = make_table<W, kNative>(
    std::make_integer_sequence<int, kRows>(), std::make_integer_sequence<int, kWideRows>());

}  // namespace legato::LEGATO_ISA
