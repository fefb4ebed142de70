// Finds the threshold of top_k or top_p in a row of weights, by narrowing a bracket of values.
//
// Only for *_isa.cpp files. Weights are at least 0, so they order like their bits. A round counts
// and sums the weights at or above seven values that divide the bracket, keeps the eighth that
// contains the threshold, and copies its weights for the next, much shorter, round.
#pragma once

#include <cstring>

#include "vec.h"

namespace legato::LEGATO_ISA {

constexpr int kSplits = 7;
constexpr int kFewCandidates = 32;

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Weights above `value` are kept, and `ties` of the `equals` weights that are `value`.
struct Cut {
  float value = 0.0f;
  int64_t ties = 0;
  int64_t equals = 0;
};

// Measure of the weights at or above each split: their number, or their sum.
enum class Measure { count, mass };

#if defined(__AVX512F__)

// n is a multiple of 16.
template <Measure kMeasure>
inline void tally(const float* values, int64_t n, const float* splits, double* found) {
  __m512d mass[kSplits];
  __m512i count[kSplits];
#pragma GCC unroll 7
  for (int s = 0; s < kSplits; ++s) {
    mass[s] = _mm512_setzero_pd();
    count[s] = _mm512_setzero_si512();
  }
  constexpr int64_t kRun = 256;  // floats are summed this far before they go into doubles
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t end = begin + kRun < n ? begin + kRun : n;
    __m512 sums[kSplits];
#pragma GCC unroll 7
    for (int s = 0; s < kSplits; ++s) sums[s] = _mm512_setzero_ps();
    for (int64_t i = begin; i < end; i += 16) {
      const __m512 v = _mm512_loadu_ps(values + i);
#pragma GCC unroll 7
      for (int s = 0; s < kSplits; ++s) {
        const __mmask16 in = _mm512_cmp_ps_mask(v, _mm512_set1_ps(splits[s]), _CMP_GE_OQ);
        if constexpr (kMeasure == Measure::mass) {
          sums[s] = _mm512_mask_add_ps(sums[s], in, sums[s], v);
        } else {
          count[s] = _mm512_mask_sub_epi32(count[s], in, count[s], _mm512_set1_epi32(-1));
        }
      }
    }
    if constexpr (kMeasure == Measure::mass) {
#pragma GCC unroll 7
      for (int s = 0; s < kSplits; ++s) {
        const __m256 high = _mm512_extractf32x8_ps(sums[s], 1);
        mass[s] = _mm512_add_pd(mass[s], _mm512_cvtps_pd(_mm512_castps512_ps256(sums[s])));
        mass[s] = _mm512_add_pd(mass[s], _mm512_cvtps_pd(high));
      }
    }
  }
#pragma GCC unroll 7
  for (int s = 0; s < kSplits; ++s) {
    found[s] = kMeasure == Measure::mass ? _mm512_reduce_add_pd(mass[s])
                                         : static_cast<double>(_mm512_reduce_add_epi32(count[s]));
  }
}

// Copies the values in [low, high) to the front of `out` (which may be `values`); returns how many.
inline int64_t select(const float* values, int64_t n, float low, float high, float* out) {
  const __m512 lo = _mm512_set1_ps(low), hi = _mm512_set1_ps(high);
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = _mm512_loadu_ps(values + i);
    const __mmask16 in = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(v, lo, _CMP_GE_OQ), v, hi,
                                                 _CMP_LT_OQ);
    // Compressing in a register and storing all of it: a compressing store is microcode on Zen 4.
    _mm512_storeu_ps(out + kept, _mm512_maskz_compress_ps(in, v));
    kept += __builtin_popcount(in);
  }
  return kept;
}

#else

template <Measure kMeasure>
inline void tally(const float* values, int64_t n, const float* splits, double* found) {
  for (int s = 0; s < kSplits; ++s) {
    __m256d mass = _mm256_setzero_pd();
    __m256i count = _mm256_setzero_si256();
    const __m256 split = _mm256_set1_ps(splits[s]);
    for (int64_t i = 0; i < n; i += 8) {
      const __m256 v = _mm256_loadu_ps(values + i);
      const __m256 in = _mm256_cmp_ps(v, split, _CMP_GE_OQ);
      const __m256 kept = _mm256_and_ps(in, v);
      mass = _mm256_add_pd(mass, _mm256_cvtps_pd(_mm256_castps256_ps128(kept)));
      mass = _mm256_add_pd(mass, _mm256_cvtps_pd(_mm256_extractf128_ps(kept, 1)));
      count = _mm256_sub_epi32(count, _mm256_castps_si256(in));
    }
    alignas(32) double masses[4];
    alignas(32) int32_t counts[8];
    _mm256_store_pd(masses, mass);
    _mm256_store_si256(reinterpret_cast<__m256i*>(counts), count);
    found[s] = 0.0;
    if constexpr (kMeasure == Measure::mass) {
      for (double m : masses) found[s] += m;
    } else {
      for (int32_t c : counts) found[s] += c;
    }
  }
}

inline int64_t select(const float* values, int64_t n, float low, float high, float* out) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float v = values[i];
    out[kept] = v;
    kept += v >= low && v < high ? 1 : 0;
  }
  return kept;
}

#endif

inline void sort_falling(float* values, int64_t n) {
  for (int64_t i = 1; i < n; ++i) {
    const float v = values[i];
    int64_t j = i;
    for (; j > 0 && values[j - 1] < v; --j) values[j] = values[j - 1];
    values[j] = v;
  }
}

// The shortest prefix, in falling order, that measures at least `goal` (and is not empty).
// `weights` has n values, is padded with zeros to a multiple of 16 and has no value above 1; values
// below `lowest` are ignored. `candidates` is scratch of n + 16 floats.
template <Measure kMeasure>
inline Cut find_cut(const float* weights, int64_t n, float lowest, double goal,
                    float* candidates) {
  uint32_t low = bits_of(lowest), high = bits_of(1.0f) + 1;  // the cut lies in [low, high)
  double above = 0.0;  // measure of the weights from `high` on
  const float* values = weights;
  while (n > kFewCandidates) {
    float splits[kSplits];
    uint32_t bounds[kSplits + 2];
    bounds[0] = low;
    bounds[kSplits + 1] = high;
    for (int s = 0; s < kSplits; ++s) {
      // Even steps of the exponent; closer to the top where the bracket goes down to 0.
      constexpr float kFromZero[kSplits] = {1e-8f, 1e-6f, 1e-4f, 2e-3f, 2e-2f, 0.1f, 0.3f};
      const auto even = static_cast<uint32_t>(uint64_t{high - low} * (s + 1) / (kSplits + 1));
      bounds[s + 1] = low == 0 && high > bits_of(1.0f) ? bits_of(kFromZero[s]) : low + even;
      splits[s] = float_of(bounds[s + 1]);
    }
    const int64_t padded = (n + 15) / 16 * 16;
    double found[kSplits];
    tally<kMeasure>(values, padded, splits, found);
    int s = kSplits;  // the highest bound from which on there is enough
    while (s > 0 && above + found[s - 1] < goal) --s;
    if (s < kSplits) above += found[s];
    low = bounds[s];
    high = bounds[s + 1];
    n = select(values, padded, float_of(low), float_of(high), candidates);
    for (int64_t i = n; i < (n + 15) / 16 * 16; ++i) candidates[i] = 0.0f;
    values = candidates;
    if (high - low <= 1) break;  // all that are left are equal
  }
  if (values != candidates) std::memcpy(candidates, values, sizeof(float) * n);
  if (n <= kFewCandidates) sort_falling(candidates, n);
  int64_t kept = 0;
  while (kept < n && (above == 0.0 || above < goal)) {
    above += kMeasure == Measure::mass ? candidates[kept] : 1.0f;
    ++kept;
  }
  Cut cut;
  if (kept == 0) {  // the weights above suffice after all
    cut.value = float_of(high);
    return cut;
  }
  cut.value = candidates[kept - 1];
  for (int64_t i = 0; i < n; ++i) {
    if (candidates[i] != cut.value) continue;
    ++cut.equals;
    if (i < kept) ++cut.ties;
  }
  return cut;
}

// Sum of n (a multiple of 64) values, those below `floor` left out, in doubles and a fixed order.
inline double sum_from(const float* values, int64_t n, float floor) {
#if defined(__AVX512F__)
  const __m512 least = _mm512_set1_ps(floor);
  __m512d sums[8];
#pragma GCC unroll 8
  for (auto& sum : sums) sum = _mm512_setzero_pd();
  for (int64_t i = 0; i < n; i += 64) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      __m512 v = _mm512_loadu_ps(values + i + 16 * k);
      v = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, least, _CMP_GE_OQ), v);
      const __m256 high = _mm512_extractf32x8_ps(v, 1);
      sums[2 * k] = _mm512_add_pd(sums[2 * k], _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
      sums[2 * k + 1] = _mm512_add_pd(sums[2 * k + 1], _mm512_cvtps_pd(high));
    }
  }
#pragma GCC unroll 8
  for (int k = 1; k < 8; ++k) sums[0] = _mm512_add_pd(sums[0], sums[k]);
  return _mm512_reduce_add_pd(sums[0]);
#else
  const __m256 least = _mm256_set1_ps(floor);
  __m256d sums[4];
  for (auto& sum : sums) sum = _mm256_setzero_pd();
  for (int64_t i = 0; i < n; i += 16) {
    for (int k = 0; k < 2; ++k) {
      __m256 v = _mm256_loadu_ps(values + i + 8 * k);
      v = _mm256_and_ps(_mm256_cmp_ps(v, least, _CMP_GE_OQ), v);
      const __m128 high = _mm256_extractf128_ps(v, 1);
      sums[2 * k] = _mm256_add_pd(sums[2 * k], _mm256_cvtps_pd(_mm256_castps256_ps128(v)));
      sums[2 * k + 1] = _mm256_add_pd(sums[2 * k + 1], _mm256_cvtps_pd(high));
    }
  }
  alignas(32) double lanes[4];
  _mm256_store_pd(lanes, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
#endif
}

}  // namespace legato::LEGATO_ISA
