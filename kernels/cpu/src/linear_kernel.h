// The innermost loops: some rows of x times one panel, over a stretch of k.
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

// One call of a kernel.
struct Stretch {
  const char* x;  // first row, first k
  int64_t row_bytes;
  const char* w;
  int64_t num_units;
  float* sums;  // [rows][kPanelRows]
  bool first;   // start from zero instead of from `sums`
  const fp16* scales;  // of this group; null: sums are plain
  const fp16* zeros;   // of this group, or null
  const float* group_sums;  // of this group, first row
  int64_t group_sums_stride;
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

inline void ask_ahead(const char*& ahead, int num_lines) {
  for (int i = 0; i < num_lines; ++i) _mm_prefetch(ahead + i * 64, _MM_HINT_T0);
  ahead += num_lines * 64;
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

template <class W, int kNumRows>
inline void multiply_floats(const Stretch& s, Vec (&sums)[kNumRows][kPanelVecs]) {
  const char* w = s.w;
  const char* ahead = s.ahead;
  RowPointers<kNumRows> x(s);
  for (int64_t unit = 0; unit < s.num_units; ++unit) {
    ask_ahead(ahead, s.lines_ahead);
#pragma GCC unroll 8
    for (int k = 0; k < kUnit; ++k) {
      const Vec low = W::load(w, k, 0);
      const Vec high = W::load(w, k, 1);
#pragma GCC unroll 12
      for (int row = 0; row < kNumRows; ++row) {
        const Vec value = Vec::set(reinterpret_cast<const float*>(x.row(row))[k]);
        sums[row][0] = fma(low, value, sums[row][0]);
        sums[row][1] = fma(high, value, sums[row][1]);
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

template <class W, int kNumRows>
inline void multiply_pairs(const Stretch& s, Vec (&sums)[kNumRows][kPanelVecs]) {
  const char* w = s.w;
  const char* ahead = s.ahead;
  RowPointers<kNumRows> x(s);
  for (int64_t unit = 0; unit < s.num_units; ++unit) {
    ask_ahead(ahead, s.lines_ahead);
    const typename W::Held held[kPanelVecs] = {W::hold(w, 0), W::hold(w, 1)};
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512bh low = W::pair(held[0], j);
      const __m512bh high = W::pair(held[1], j);
#pragma GCC unroll 12
      for (int row = 0; row < kNumRows; ++row) {
        int32_t two;
        __builtin_memcpy(&two, x.row(row) + j * 4, 4);
        const __m512bh values = (__m512bh)_mm512_set1_epi32(two);
        sums[row][0].v = _mm512_dpbf16_ps(sums[row][0].v, low, values);
        sums[row][1].v = _mm512_dpbf16_ps(sums[row][1].v, high, values);
      }
    }
    w += W::kUnitBytes;
    x.advance(kUnit * 2);
  }
}

#endif

template <class W, bool kNative, int kNumRows>
void kernel(const Stretch& s) {
  const bool scaled = s.scales != nullptr;
  Vec sums[kNumRows][kPanelVecs];
#pragma GCC unroll 12
  for (int row = 0; row < kNumRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVecs; ++v) {
      sums[row][v] = s.first || scaled ? Vec::zero()
                                       : Vec::load(s.sums + row * kPanelRows + v * kLanes);
    }
  }
#ifdef __AVX512BF16__
  if constexpr (kNative) multiply_pairs<W, kNumRows>(s, sums);
#endif
  if constexpr (!kNative) multiply_floats<W, kNumRows>(s, sums);
#pragma GCC unroll 12
  for (int row = 0; row < kNumRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVecs; ++v) {
      float* total = s.sums + row * kPanelRows + v * kLanes;
      if (scaled) {
        Vec sum = sums[row][v];
        if (s.zeros != nullptr) {
          const Vec x_sum = Vec::set(-s.group_sums[row * s.group_sums_stride]);
          sum = fma(Vec::load(s.zeros + v * kLanes), x_sum, sum);
        }
        const Vec before = s.first ? Vec::zero() : Vec::load(total);
        sums[row][v] = fma(sum, Vec::load(s.scales + v * kLanes), before);
      }
      sums[row][v].store(total);
    }
  }
}

// kernels[rows - 1]
struct KernelTable {
  Kernel kernels[kRows];
};

template <class W, bool kNative, int... kRowsLessOne>
constexpr KernelTable make_table(std::integer_sequence<int, kRowsLessOne...>) {
  return {{kernel<W, kNative, kRowsLessOne + 1>...}};
}

template <class W, bool kNative>
constexpr KernelTable kKernels =
    make_table<W, kNative>(std::make_integer_sequence<int, kRows>());

}  // namespace legato::LEGATO_ISA
