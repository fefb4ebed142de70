// The innermost loops: up to 6 rows of x times one or two panels, over a stretch of k.
//
// Every output has one accumulator that takes its k in rising order, in each of these kernels: that
// is what makes results independent of the batch. Only for *_isa.cpp files.
#pragma once

#include "linear_layout.h"
#include "vec.h"

namespace legato::LEGATO_ISA {

constexpr int kRows = 6;  // 6 x 4 accumulators fill the 32 registers of AVX-512 with what feeds them
constexpr int kLanes = Vec::kLanes;
constexpr int64_t kSumsStride = 2 * kPanelVecs * kLanes;  // floats between rows of `sums`

// One call of a kernel. Index 0 and 1 are the panels.
struct Stretch {
  const char* x;  // first row, first k
  int64_t row_bytes;
  const char* w[2];
  int64_t num_units;
  float* sums;  // [rows][kSumsStride]
  bool first;   // start from zero instead of from `sums`
  const fp16* scales[2];  // of this group; null: sums are plain
  const fp16* zeros[2];
  const float* group_sums;  // of this group, first row
  int64_t group_sums_stride;
  const char* ahead[2];  // what to ask the memory for meanwhile, and how many lines of it per unit
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

template <class W, int kNumRows, int kPanels>
inline void multiply_floats(const Stretch& s, Vec (&sums)[kNumRows][kPanels * kPanelVecs]) {
  const char* w[2] = {s.w[0], s.w[1]};
  const char* ahead[2] = {s.ahead[0], s.ahead[1]};
  const float* x = reinterpret_cast<const float*>(s.x);
  const int64_t ldx = s.row_bytes / 4;
  for (int64_t unit = 0; unit < s.num_units; ++unit) {
    for (int panel = 0; panel < kPanels; ++panel) {
      for (int i = 0; i < s.lines_ahead; ++i) _mm_prefetch(ahead[panel] + i * 64, _MM_HINT_T0);
      ahead[panel] += s.lines_ahead * 64;
    }
#pragma GCC unroll 8
    for (int k = 0; k < kUnit; ++k) {
      Vec weights[kPanels * kPanelVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kPanels * kPanelVecs; ++v) {
        weights[v] = W::load(w[v / kPanelVecs], k, v % kPanelVecs);
      }
#pragma GCC unroll 6
      for (int row = 0; row < kNumRows; ++row) {
        const Vec value = Vec::set(x[row * ldx + k]);
#pragma GCC unroll 4
        for (int v = 0; v < kPanels * kPanelVecs; ++v) {
          sums[row][v] = fma(weights[v], value, sums[row][v]);
        }
      }
    }
    for (int panel = 0; panel < kPanels; ++panel) w[panel] += W::kUnitBytes;
    x += kUnit;
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
inline void multiply_pairs(const Stretch& s, Vec (&sums)[kNumRows][kPanels * kPanelVecs]) {
  const char* w[2] = {s.w[0], s.w[1]};
  const char* ahead[2] = {s.ahead[0], s.ahead[1]};
  const char* x = s.x;
  for (int64_t unit = 0; unit < s.num_units; ++unit) {
    for (int panel = 0; panel < kPanels; ++panel) {
      for (int i = 0; i < s.lines_ahead; ++i) _mm_prefetch(ahead[panel] + i * 64, _MM_HINT_T0);
      ahead[panel] += s.lines_ahead * 64;
    }
    typename W::Held held[kPanels * kPanelVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kPanels * kPanelVecs; ++v) {
      held[v] = W::hold(w[v / kPanelVecs], v % kPanelVecs);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512bh weights[kPanels * kPanelVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kPanels * kPanelVecs; ++v) weights[v] = W::pair(held[v], j);
#pragma GCC unroll 6
      for (int row = 0; row < kNumRows; ++row) {
        int32_t two;
        __builtin_memcpy(&two, x + row * s.row_bytes + j * 4, 4);
        const __m512bh values = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
        for (int v = 0; v < kPanels * kPanelVecs; ++v) {
          sums[row][v].v = _mm512_dpbf16_ps(sums[row][v].v, weights[v], values);
        }
      }
    }
    for (int panel = 0; panel < kPanels; ++panel) w[panel] += W::kUnitBytes;
    x += kUnit * 2;
  }
}

#endif

template <class W, bool kNative, int kNumRows, int kPanels>
void kernel(const Stretch& s) {
  constexpr int kVecs = kPanels * kPanelVecs;
  const bool scaled = s.scales[0] != nullptr;
  Vec sums[kNumRows][kVecs];
#pragma GCC unroll 6
  for (int row = 0; row < kNumRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      sums[row][v] = s.first || scaled ? Vec::zero()
                                       : Vec::load(s.sums + row * kSumsStride + v * kLanes);
    }
  }
#ifdef __AVX512BF16__
  if constexpr (kNative) multiply_pairs<W, kNumRows, kPanels>(s, sums);
#endif
  if constexpr (!kNative) multiply_floats<W, kNumRows, kPanels>(s, sums);
#pragma GCC unroll 6
  for (int row = 0; row < kNumRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      float* total = s.sums + row * kSumsStride + v * kLanes;
      if (scaled) {
        const int64_t lane = v % kPanelVecs * kLanes;
        Vec sum = sums[row][v];
        if (s.zeros[0] != nullptr) {
          const Vec x_sum = Vec::set(-s.group_sums[row * s.group_sums_stride]);
          sum = fma(Vec::load(s.zeros[v / kPanelVecs] + lane), x_sum, sum);
        }
        const Vec before = s.first ? Vec::zero() : Vec::load(total);
        sums[row][v] = fma(sum, Vec::load(s.scales[v / kPanelVecs] + lane), before);
      }
      sums[row][v].store(total);
    }
  }
}

// kernels[rows - 1][panels - 1]
struct KernelTable {
  Kernel kernels[kRows][2];
};

template <class W, bool kNative>
constexpr KernelTable kKernels = {{
    {kernel<W, kNative, 1, 1>, kernel<W, kNative, 1, 2>},
    {kernel<W, kNative, 2, 1>, kernel<W, kNative, 2, 2>},
    {kernel<W, kNative, 3, 1>, kernel<W, kNative, 3, 2>},
    {kernel<W, kNative, 4, 1>, kernel<W, kNative, 4, 2>},
    {kernel<W, kNative, 5, 1>, kernel<W, kNative, 5, 2>},
    {kernel<W, kNative, 6, 1>, kernel<W, kNative, 6, 2>},
}};

}  // namespace legato::LEGATO_ISA
