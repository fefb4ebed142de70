// Gumbel-max sampling: the token of the highest logit / temperature + Gumbel noise, the lowest id
// among equals. kernels/torch/sampling.py defines it bit for bit.
//
// Only for *_isa.cpp files. Scores are float64 with two logarithms each, but hardly any token needs
// one: with v = (2 h + 1) / 2^33 of the hash h, the noise -log(-log(1 - v)) is at most -log v, and
// the bits of a float, read as an integer, bound its logarithm. So a few cheap operations rule out
// most tokens against the best score so far, and only the others are scored exactly.
#pragma once

#include "sampling_kernel.h"
#include "vec.h"

namespace legato::LEGATO_ISA {

struct GumbelArgs {
  const float* logits;
  int64_t vocabulary;
  float inverse_temperature;
  uint64_t key;
  int64_t first_id;
};

// exp, but 0 where it would be smaller than any normal float (and for -inf).
inline Vec weight_of(Vec x) {
  const Vec e = exp(x);
#if defined(__AVX512F__)
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-87.0f), _CMP_GT_OQ), e.v)};
#else
  return {_mm256_and_ps(e.v, _mm256_cmp_ps(x.v, _mm256_set1_ps(-87.0f), _CMP_GT_OQ))};
#endif
}

#if defined(__AVX512F__)

struct Ints {
  __m512i v;
  static Ints set(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
  static Ints counting() {
    return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
  }
  template <int kBits>
  Ints shifted() const { return {_mm512_srli_epi32(v, kBits)}; }
  Vec to_float() const { return {_mm512_cvtepi32_ps(v)}; }
};
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator*(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Ints rounded(Vec x) { return {_mm512_cvtps_epi32(x.v)}; }
inline Ints bits_of(Vec x) { return {_mm512_castps_si512(x.v)}; }
// Bit i: whether lane i of a is greater, as a signed number.
inline uint32_t greater(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a.v, b.v); }
inline uint32_t at_least(Vec a, float b) {
  return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(b), _CMP_GE_OQ);
}

#else

struct Ints {
  __m256i v;
  static Ints set(uint32_t x) { return {_mm256_set1_epi32(static_cast<int>(x))}; }
  static Ints counting() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
  template <int kBits>
  Ints shifted() const { return {_mm256_srli_epi32(v, kBits)}; }
  Vec to_float() const { return {_mm256_cvtepi32_ps(v)}; }
};
inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Ints operator*(Ints a, Ints b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline Ints rounded(Vec x) { return {_mm256_cvtps_epi32(x.v)}; }
inline Ints bits_of(Vec x) { return {_mm256_castps_si256(x.v)}; }
inline uint32_t greater(Ints a, Ints b) {
  return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a.v, b.v)));
}
inline uint32_t at_least(Vec a, float b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a.v, _mm256_set1_ps(b), _CMP_GE_OQ));
}

#endif

// A token may win if the float bits of the upper 31 bits of its hash are at most
// round(logit * slope + level).
struct Bound {
  float slope, level;
};

inline Bound bound_of(double best, double inverse, double tolerance) {
  // log2(v) >= bits / 2^23 - 127 - 31, and a token may win if s - log(v) >= best, for s its logit
  // times `inverse`. The tolerance exceeds the error of rounding to float.
  constexpr double kUnit = 0x1.0p23, kLog2E = 1.4426950408889634;
  return {static_cast<float>(kUnit * kLog2E * inverse),
          static_cast<float>(kUnit * (158.0 + kLog2E * (tolerance - best)))};
}

// best: the lowest id of those with the highest logit, which is finite. Only tokens take part whose
// weight is at least `floor` and more than zero; best does. kHasWeights: weights are in `weights`,
// padded to whole registers; else exp((logit - highest) / temperature), computed for candidates
// only.
template <bool kHasWeights>
inline Drawn gumbel_argmax(const GumbelArgs& args, int64_t best, const float* weights,
                           float floor) {
  const auto first = static_cast<uint32_t>(args.first_id);
  const double inverse = args.inverse_temperature;
  const float highest = args.logits[best];
  const auto score_of = [&](int64_t i) {
    return args.logits[i] * inverse + gumbel_noise(args.key, first + static_cast<uint32_t>(i));
  };
  double score = score_of(best);
  const double tolerance = 1e-3 + 1e-6 * __builtin_fabs(highest * inverse);
  Bound bound = bound_of(score, inverse, tolerance);
  const float lowest = floor > 1e-38f ? floor : 1e-38f;

  const Ints low = Ints::set(static_cast<uint32_t>(args.key) + first) + Ints::counting();
  const Ints high = Ints::set(static_cast<uint32_t>(args.key >> 32));
  const Ints a = Ints::set(kHashFactors[0]), b = Ints::set(kHashFactors[1]);
  const Ints c = Ints::set(kHashFactors[2]);
  // The lanes from i on that may win. An overflow to NaN lets all of them pass.
  const auto candidates = [&](Vec logits, int64_t i) {
    Ints x = low + Ints::set(static_cast<uint32_t>(i));
    x = ((x ^ x.shifted<17>()) * a) ^ high;
    x = (x ^ x.shifted<11>()) * b;
    x = (x ^ x.shifted<15>()) * c;
    x = x ^ x.shifted<14>();
    const Vec most = fma(logits, Vec::set(bound.slope), Vec::set(bound.level));
    const Ints limit = rounded(min(most, Vec::set(2e9f)));
    return greater(limit + Ints::set(1), bits_of(x.shifted<1>().to_float()));
  };
  const auto look = [&](uint32_t lanes, int64_t i) {
    for (; lanes != 0; lanes &= lanes - 1) {
      const int64_t at = i + __builtin_ctz(lanes);
      const double found = score_of(at);
      if (found > score || (found == score && at < best)) {
        if constexpr (!kHasWeights) {
          const Vec below = Vec::set(args.logits[at]) - Vec::set(highest);
          const Vec weight = weight_of(below * Vec::set(args.inverse_temperature));
          if (floor > 0.0f && weight.max() < lowest) continue;
        }
        score = found;
        best = at;
        bound = bound_of(score, inverse, tolerance);
      }
    }
  };
  constexpr int kLanes = Vec::kLanes;
  int64_t i = 0;
  for (; i + 2 * kLanes <= args.vocabulary; i += 2 * kLanes) {
    uint32_t keep_one = ~0u, keep_two = ~0u;
    if constexpr (kHasWeights) {
      keep_one = at_least(Vec::load(weights + i), lowest);
      keep_two = at_least(Vec::load(weights + i + kLanes), lowest);
      if ((keep_one | keep_two) == 0) continue;
    }
    const uint32_t one = keep_one & candidates(Vec::load(args.logits + i), i);
    const uint32_t two =
        keep_two & candidates(Vec::load(args.logits + i + kLanes), i + kLanes);
    if (__builtin_expect((one | two) != 0, 0)) {
      look(one, i);
      look(two, i + kLanes);
    }
  }
  for (; i < args.vocabulary; i += kLanes) {
    const auto left = static_cast<int>(args.vocabulary - i);
    uint32_t lanes = candidates(Vec::load(args.logits + i, left), i);
    if (left < kLanes) lanes &= (1u << left) - 1;
    if constexpr (kHasWeights) lanes &= at_least(Vec::load(weights + i), lowest);
    look(lanes, i);
  }
  return {args.first_id + best, score};
}

}  // namespace legato::LEGATO_ISA
