// Online softmax: one query row within one partition, and how partitions are combined.
//
// Only for *_isa.cpp files. Scores are kept in powers of two (scaled by log2 e).
#pragma once

#include "attention_kernel.h"
#include "attention_product.h"
#include "elementwise_vec.h"

namespace legato::LEGATO_ISA {

// 2^x for x <= 0; exactly 1 at 0, exactly 0 at -inf, NaN of NaN. kDegree 6: to about one unit in the last place
// of a float; 4: to 4e-6, a hundredth of what rounding to bf16 takes.
template <int kDegree>
inline Vec exp2_nonpositive(Vec x) {
  static_assert(kDegree == 4 || kDegree == 6);
#if defined(__AVX512F__)
  // The fraction x - floor(x); 0 for -inf, which the scaling below turns into 0.
  const Vec f{_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
#else
  const Vec floored = max(Vec::set(-126.0f), x);  // the second operand where one is NaN
  const Vec n{_mm256_floor_ps(floored.v)};
  const Vec f = floored - n;
#endif
  Vec p;
  if constexpr (kDegree == 6) {
    p = Vec::set(2.161293534e-04f);
    p = fma(p, f, Vec::set(1.246784110e-03f));
    p = fma(p, f, Vec::set(9.675452082e-03f));
    p = fma(p, f, Vec::set(5.548528040e-02f));
    p = fma(p, f, Vec::set(2.402293056e-01f));
    p = fma(p, f, Vec::set(6.931470444e-01f));
  } else {
    p = Vec::set(1.342670971e-02f);
    p = fma(p, f, Vec::set(5.224243338e-02f));
    p = fma(p, f, Vec::set(2.412802239e-01f));
    p = fma(p, f, Vec::set(6.930448425e-01f));
  }
  p = fma(p, f, Vec::set(1.0f));
#if defined(__AVX512F__)
  return {_mm512_scalef_ps(p.v, x.v)};
#else
  const Vec scaled = scale_by_power(p, n);
  return {_mm256_and_ps(scaled.v, _mm256_cmp_ps(x.v, _mm256_set1_ps(-126.0f), _CMP_NLE_UQ))};
#endif
}

constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLog2E = 1.44269504088896341f;

// Running maximum and sum of a block of rows, and the rescaling factors of the current partition.
struct OnlineSoftmax {
  alignas(64) float row_max[kRowsPerBlock];
  alignas(64) float sum[kRowsPerBlock];
  alignas(64) float part_max[kRowsPerBlock];
  alignas(64) float part_sum[kRowsPerBlock];
  alignas(64) float old_scale[kRowsPerBlock];  // factor of the accumulated output
  alignas(64) float part_scale[kRowsPerBlock];  // factor of the partition

  // An attention sink is an additional score per row without a value.
  void reset(const ShapeView& shape, const AttentionTask& task) {
    const int group = shape.group();
    for (int r = 0; r < kRowsPerBlock; ++r) {
      const int head = task.kv_head * group + (task.first_row + r) % group;
      row_max[r] = shape.sinks == nullptr ? kMinusInfinity : shape.sinks[head] * kLog2E;
      sum[r] = shape.sinks == nullptr ? 0.0f : 1.0f;
    }
    reset_part();
  }
  void reset_part() {
    for (int r = 0; r < kRowsPerBlock; ++r) {
      part_max[r] = kMinusInfinity;
      part_sum[r] = 0.0f;
    }
  }
  // A partition that is masked for a row (maximum -inf) changes no bit of that row.
  void merge_part() {
    static_assert(kRowsPerBlock % Vec::kLanes == 0);
    for (int r = 0; r < kRowsPerBlock; r += Vec::kLanes) {
      const Vec old = Vec::load(row_max + r), part = Vec::load(part_max + r);
      const Vec merged = max(old, part);
      const Vec finite = max(merged, Vec::set(-3.0e38f));
      const Vec k = exp2_nonpositive<6>(old - finite), t = exp2_nonpositive<6>(part - finite);
      k.store(old_scale + r);
      t.store(part_scale + r);
      merged.store(row_max + r);
      fma(Vec::load(part_sum + r), t, Vec::load(sum + r) * k).store(sum + r);
    }
  }
};

struct ScoreScaling {
  float factor;              // scale * log2 e, or that of the softcap
  float inner;               // scale / softcap, 0 without a softcap
  float per_score;           // log2 e / factor: of what is added to a score
  const float* key_scales;   // per position of the partition, null unless int8
  const float* value_scales;

  ScoreScaling(const ShapeView& shape, const float* key_scales, const float* value_scales)
      : factor((shape.softcap > 0.0f ? shape.softcap : shape.scale) * kLog2E),
        inner(shape.softcap > 0.0f ? shape.scale / shape.softcap : 0.0f),
        per_score(1.0f / (shape.softcap > 0.0f ? shape.softcap : shape.scale)),
        key_scales(key_scales),
        value_scales(value_scales) {}
};

// ALiBi of one row: the biases of the partition's positions, or null, and that of its own position.
// Their difference, rather than the first alone, keeps a score as exact far from position 0.
struct RowBias {
  const float* keys;
  float own;
};

// Masks the positions around the visible ones [first, end) within their tiles, applies the scales
// of K, the softcap and ALiBi. Returns the row's maximum, in powers of two.
inline float row_maximum(float* scores, int first, int end, const ScoreScaling& scaling,
                         const RowBias& bias) {
  const int begin = first / kTile * kTile, stop = round_up(end, kTile);
  if (scaling.key_scales != nullptr || scaling.inner > 0.0f || bias.keys != nullptr) {
    const Vec own = Vec::set(bias.own), per_score = Vec::set(scaling.per_score);
    for (int i = begin; i < stop; i += Vec::kLanes) {
      Vec s = Vec::load(scores + i);
      if (scaling.key_scales != nullptr) s = s * Vec::load(scaling.key_scales + i);
      if (scaling.inner > 0.0f) {  // tanh
        const Vec twice = s * Vec::set(2.0f * scaling.inner);
        const Vec e = max(exp(twice), min(Vec::zero(), twice));  // NaN, which exp takes for less
        s = Vec::set(1.0f) - Vec::set(2.0f) / (e + Vec::set(1.0f));
      }
      if (bias.keys != nullptr) {  // a row of biases may end with the last token
        s = fma(Vec::load(bias.keys + i, end - i) - own, per_score, s);
      }
      s.store(scores + i);
    }
  }
  for (int i = begin; i < first; ++i) scores[i] = kMinusInfinity;
  for (int i = end; i < stop; ++i) scores[i] = kMinusInfinity;
  Vec most[2] = {Vec::set(kMinusInfinity), Vec::set(kMinusInfinity)};
  for (int i = begin; i < stop; i += kTile) {
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      most[part] = max(most[part], Vec::load(scores + i + part * Vec::kLanes));
    }
  }
  return max(most[0], most[1]).max() * scaling.factor;
}

// Turns a row of scores, prepared by row_maximum, into weights of the product's format in place;
// the rest of [begin, stop), whole tiles, is set to zero. Returns the sum of the weights.
template <class Format>
inline float softmax_row(float* scores, int begin, int stop, int first, int end, float row_max,
                   const ScoreScaling& scaling) {
  const int tiles_begin = first / kTile * kTile, tiles_end = round_up(end, kTile);
  const Vec factor = Vec::set(scaling.factor), shift = Vec::set(-row_max);
  // Weights overwrite scores in place: those of position i lie at or before score i.
  auto put = [scores](int i, Vec weight) {
    if constexpr (Format::kPair == 1) {
      weight.store(scores + i);
    } else if constexpr (Format::kHalves == 2) {
      rounded<bf16>(weight).store(scores + i);
    } else {
      weight.store(reinterpret_cast<bf16*>(scores) + i);
    }
  };
  for (int i = begin; i < tiles_begin; i += Vec::kLanes) put(i, Vec::zero());
  Lanes sums = Lanes::zero();
  for (int i = tiles_begin; i < tiles_end; i += kTile) {
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const int at = i + part * Vec::kLanes;
      const Vec power = fma(Vec::load(scores + at), factor, shift);
      Vec p = exp2_nonpositive<Format::kPair == 2 ? 4 : 6>(power);
      sums.part[part] = sums.part[part] + p;
      if (scaling.value_scales != nullptr) p = p * Vec::load(scaling.value_scales + at);
      put(at, p);
    }
  }
  for (int i = tiles_end; i < stop; i += Vec::kLanes) put(i, Vec::zero());
  Vec total = sums.part[0];
  for (int part = 1; part < kParts; ++part) total = total + sums.part[part];
  return total.sum();
}

}  // namespace legato::LEGATO_ISA
