// Softmax of one query row within one partition, and how partitions merge.
//
// Only for *_isa.cpp files. Scores are kept in powers of two (scaled by log2 e).
#pragma once

#include "attention_kernel.h"
#include "attention_product.h"

namespace legato::LEGATO_ISA {

// 2^x for x <= 0; exactly 1 at 0, exactly 0 from -126 down (and for -inf).
inline Vec exp2_nonpositive(Vec x) {
  const Vec floored = max(x, Vec::set(-126.0f));
  const Vec n = round(floored);
  const Vec f = floored - n;
  Vec p = Vec::set(1.535336188319500e-4f);  // Cephes exp2f
  p = fma(p, f, Vec::set(1.339887440266574e-3f));
  p = fma(p, f, Vec::set(9.618437357674640e-3f));
  p = fma(p, f, Vec::set(5.550332471162809e-2f));
  p = fma(p, f, Vec::set(2.402264791363012e-1f));
  p = fma(p, f, Vec::set(6.931472028550421e-1f));
  p = fma(p, f, Vec::set(1.0f));
  p = scale_by_power(p, n);
#if defined(__AVX512F__)
  const __mmask16 alive = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_GT_OQ);
  return {_mm512_maskz_mov_ps(alive, p.v)};
#else
  return {_mm256_and_ps(p.v, _mm256_cmp_ps(x.v, _mm256_set1_ps(-126.0f), _CMP_GT_OQ))};
#endif
}

constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLog2E = 1.44269504088896341f;

// Running softmax of a block of rows: maximum, sum, and the factors of the partition in hand.
struct RowStates {
  alignas(64) float maximum[kRowsPerBlock];
  alignas(64) float sum[kRowsPerBlock];
  alignas(64) float part_maximum[kRowsPerBlock];
  alignas(64) float part_sum[kRowsPerBlock];
  alignas(64) float keep[kRowsPerBlock];  // factor of what was accumulated
  alignas(64) float take[kRowsPerBlock];  // factor of the partition

  void reset() {
    for (int r = 0; r < kRowsPerBlock; ++r) {
      maximum[r] = kMinusInfinity;
      sum[r] = 0.0f;
    }
    reset_part();
  }
  void reset_part() {
    for (int r = 0; r < kRowsPerBlock; ++r) {
      part_maximum[r] = kMinusInfinity;
      part_sum[r] = 0.0f;
    }
  }
  // A partition that a row does not see (maximum -inf) changes no bit of that row.
  void merge_part() {
    static_assert(kRowsPerBlock % Vec::kLanes == 0);
    for (int r = 0; r < kRowsPerBlock; r += Vec::kLanes) {
      const Vec old = Vec::load(maximum + r), part = Vec::load(part_maximum + r);
      const Vec merged = max(old, part);
      const Vec finite = max(merged, Vec::set(-3.0e38f));
      const Vec k = exp2_nonpositive(old - finite), t = exp2_nonpositive(part - finite);
      k.store(keep + r);
      t.store(take + r);
      merged.store(maximum + r);
      fma(Vec::load(part_sum + r), t, Vec::load(sum + r) * k).store(sum + r);
    }
  }
};

struct ScoreScaling {
  float factor;              // scale * log2 e, or that of the softcap
  float inner;               // scale / softcap, 0 without a softcap
  const float* key_scales;   // per position of the partition, null unless int8
  const float* value_scales;

  ScoreScaling(const ShapeView& shape, const float* key_scales, const float* value_scales)
      : factor((shape.softcap > 0.0f ? shape.softcap : shape.scale) * kLog2E),
        inner(shape.softcap > 0.0f ? shape.scale / shape.softcap : 0.0f),
        key_scales(key_scales),
        value_scales(value_scales) {}
};

// Turns row `scores` (positions [first, end) of the partition visible; tiles that hold them
// computed) into weights of the product's format in place, zero in the rest of [begin, stop),
// which are whole tiles. Returns the maximum; adds nothing to memory but the weights.
template <class Format>
inline float weigh(float* scores, int begin, int stop, int first, int end,
                   const ScoreScaling& scaling, float& sum) {
  const int tiles_begin = first / kTile * kTile;
  const int tiles_end = round_up(end, kTile);
  for (int i = tiles_begin; i < first; ++i) scores[i] = kMinusInfinity;
  for (int i = end; i < tiles_end; ++i) scores[i] = kMinusInfinity;
  if (scaling.key_scales != nullptr || scaling.inner > 0.0f) {
    for (int i = tiles_begin; i < tiles_end; i += Vec::kLanes) {
      Vec s = Vec::load(scores + i);
      if (scaling.key_scales != nullptr) s = s * Vec::load(scaling.key_scales + i);
      if (scaling.inner > 0.0f) {
        const Vec e = exp(s * Vec::set(2.0f * scaling.inner));
        s = Vec::set(1.0f) - Vec::set(2.0f) / (e + Vec::set(1.0f));
      }
      s.store(scores + i);
    }
    // The transforms have moved the masked lanes off -inf.
    for (int i = tiles_begin; i < first; ++i) scores[i] = kMinusInfinity;
    for (int i = end; i < tiles_end; ++i) scores[i] = kMinusInfinity;
  }
  Vec most = Vec::set(kMinusInfinity);
  for (int i = tiles_begin; i < tiles_end; i += Vec::kLanes) most = max(most, Vec::load(scores + i));
  const float maximum = most.max() * scaling.factor;

  const Vec factor = Vec::set(scaling.factor), shift = Vec::set(-maximum);
  Lanes sums = Lanes::zero();
  // Weights overwrite scores from below: those of position i lie at or before score i.
  uint32_t* words = reinterpret_cast<uint32_t*>(scores);
  auto put = [words](int i, Vec weight) {
    if constexpr (Format::kPair == 2) {
      weight.store(reinterpret_cast<bf16*>(words) + i);
    } else {
      weight.store(reinterpret_cast<float*>(words) + i);
    }
  };
  for (int i = begin; i < tiles_begin; i += Vec::kLanes) put(i, Vec::zero());
  for (int i = tiles_begin; i < tiles_end; i += kTile) {
    for (int part = 0; part < kParts; ++part) {
      const int at = i + part * Vec::kLanes;
      Vec p = exp2_nonpositive(fma(Vec::load(scores + at), factor, shift));
      sums.part[part] = sums.part[part] + p;
      if (scaling.value_scales != nullptr) p = p * Vec::load(scaling.value_scales + at);
      put(at, p);
    }
  }
  for (int i = tiles_end; i < stop; i += Vec::kLanes) put(i, Vec::zero());
  Vec total = sums.part[0];
  for (int part = 1; part < kParts; ++part) total = total + sums.part[part];
  sum = total.sum();
  return maximum;
}

}  // namespace legato::LEGATO_ISA
