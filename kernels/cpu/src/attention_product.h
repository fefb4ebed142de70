// Register-blocked micro-kernels of attention: rows of words times 16 lanes.
//
// Only for *_isa.cpp files. Q K^T and P V are the same product in the
// layout of attention_layout.h: a 32-bit word of the left row (two bf16 or one float) is
// broadcast against 64 bytes of the right (16 lanes of the same). One accumulator per row and 16
// lanes, steps in order: the result of a row does not depend on the blocking.
//
// A format: kPair, the values of a lane in a step of the right side; kHalves, the words of a left
// row in a step, each multiplied by a part of the right side.
#pragma once

#include <cstring>

#include "vec.h"

namespace legato::LEGATO_ISA {

constexpr int kParts = 16 / Vec::kLanes;

// 16 floats in as many registers as that takes.
struct Lanes {
  Vec part[kParts];

  static Lanes zero() {
    Lanes lanes;
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) lanes.part[i] = Vec::zero();
    return lanes;
  }
  static Lanes load(const float* p) {
    Lanes lanes;
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) lanes.part[i] = Vec::load(p + i * Vec::kLanes);
    return lanes;
  }
  void store(float* p) const {
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) part[i].store(p + i * Vec::kLanes);
  }
};

// Floats: one feature, or one token, a step.
struct FloatFormat {
  static constexpr int kPair = 1, kHalves = 1;
  static constexpr int kLaneBytes = 64;  // of the right side, for 16 lanes
  struct Left {
    Vec value;
  };
  using Right = Lanes;

  static Left broadcast(const uint32_t* word) {
    float value;
    std::memcpy(&value, word, sizeof value);
    return {Vec::set(value)};
  }
  static Right load(const uint8_t* p, int) {
    return Lanes::load(reinterpret_cast<const float*>(p));
  }
  static void multiply_add(Lanes& sum, const Left& a, const Right& b) {
    for (int i = 0; i < kParts; ++i) sum.part[i] = fma(a.value, b.part[i], sum.part[i]);
  }
};

#if defined(__AVX512BF16__)

// Pairs of bf16: two features, or two tokens, a step.
struct PairFormat {
  static constexpr int kPair = 2, kHalves = 1;
  static constexpr int kLaneBytes = 64;
  struct Left {
    __m512bh pairs;
  };
  using Right = Left;

  static Left broadcast(const uint32_t* word) {
    return {reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*word)))};
  }
  static Right load(const uint8_t* p, int) {
    return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))};
  }
  static void multiply_add(Lanes& sum, const Left& a, const Right& b) {
    sum.part[0].v = _mm512_dpbf16_ps(sum.part[0].v, a.pairs, b.pairs);
  }
};

// The same with int8 on the right, widened as it is read: the same bits as widening it beforehand,
// and cheaper where few rows share the tile.
struct BytePairFormat : PairFormat {
  static constexpr int kLaneBytes = 32;

  static Right load(const uint8_t* p, int) {
    const __m128i* bytes = reinterpret_cast<const __m128i*>(p);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
    return {_mm512_cvtne2ps_pbh(high, low)};
  }
};

#else

// The same without such instructions: the left row as floats, of which a broadcast costs nothing,
// the right side widened as it is read, the first values of all pairs and then the second ones.
struct PairFormat : FloatFormat {
  static constexpr int kPair = 2, kHalves = 2;

  static Right load(const uint8_t* p, int half) {
    Right right;
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) {
#if defined(__AVX512F__)
      const __m512i pairs = _mm512_loadu_si512(p);
      right.part[i].v = _mm512_castsi512_ps(
          half == 0 ? _mm512_slli_epi32(pairs, 16)
                    : _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))));
#else
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
      right.part[i].v = _mm256_castsi256_ps(
          half == 0 ? _mm256_slli_epi32(pairs, 16)
                    : _mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000u))));
#endif
    }
    return right;
  }
};

#endif

// The largest block whose accumulators and operands fit the registers, or AMX's tiles.
#if defined(__AMX_BF16__)
constexpr int kBlockRows = 16;
constexpr int kBlockLanes = 4;  // groups of 16 lanes
#elif defined(__AVX512F__)
constexpr int kBlockRows = 6;
constexpr int kBlockLanes = 4;
#else
constexpr int kBlockRows = 4;
constexpr int kBlockLanes = 1;
#endif

// sum[i][j] += row i of `a` times column group j of `b`, over `steps` steps. Prefetches as much as
// it reads of b: `prefetch`, if given, holds kLanes addresses; each step prefetches one cache line
// of each and advances them by `prefetch_step` bytes.
template <class Format, bool kPrefetch, int kRows, int kLanes>
inline __attribute__((always_inline)) void multiply(const uint32_t* a, int64_t a_stride,
                                                    const uint8_t* const* b, int64_t b_step,
                                                    int steps, const uint8_t* const* prefetch,
                                                    int64_t prefetch_step,
                                                    Lanes (&sum)[kRows][kLanes]) {
  for (int step = 0; step < steps; ++step) {
#pragma GCC unroll 2
    for (int half = 0; half < Format::kHalves; ++half) {
      typename Format::Right right[kLanes];
#pragma GCC unroll 8
      for (int j = 0; j < kLanes; ++j) {
        right[j] = Format::load(b[j] + step * b_step, half);
        if (kPrefetch && half == 0) _mm_prefetch(prefetch[j] + step * prefetch_step, _MM_HINT_T1);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const uint32_t* word = a + i * a_stride + step * Format::kHalves + half;
        const typename Format::Left left = Format::broadcast(word);
#pragma GCC unroll 8
        for (int j = 0; j < kLanes; ++j) Format::multiply_add(sum[i][j], left, right[j]);
      }
    }
  }
}

}  // namespace legato::LEGATO_ISA
