// The C++ form of quantize_reference() in kernels/cpu/quantize.py, bit for bit: float
// arithmetic per value, and errors summed in double, so that the order does not matter.
#include "quant.h"

#include "vec.h"

namespace legato::LEGATO_ISA {
namespace {

constexpr int kLanes = Vec::kLanes;

template <class T>
void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Vec::load(from + i).store(to + i);
  if (i < count) {
    const int left = static_cast<int>(count - i);
    Vec::load(from + i, left).store(to + i, left);
  }
}

inline Vec some(const float* from, int64_t left) {
  return left >= kLanes ? Vec::load(from) : Vec::load(from, static_cast<int>(left));
}

// Floats summed as doubles, lane by lane.
struct DoubleSum {
#ifdef __AVX512F__
  __m512d low = _mm512_setzero_pd();
  __m512d high = _mm512_setzero_pd();
  void add(Vec x) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
  }
  double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
#else
  __m256d low = _mm256_setzero_pd();
  __m256d high = _mm256_setzero_pd();
  void add(Vec x) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x.v)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1)));
  }
  double total() const {
    alignas(32) double lanes[4];
    _mm256_store_pd(lanes, _mm256_add_pd(low, high));
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }
#endif
};

struct Range {
  Vec low, high;
};

inline Vec to_grid(Vec weight, Vec inverse, const Range& range) {
  return min(max(round(weight * inverse), range.low), range.high);
}

double squared_error(const float* weights, int64_t count, float scale, float inverse,
                     const Range& range) {
  DoubleSum sums;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec weight = some(weights + i, count - i);
    const Vec error = to_grid(weight, Vec::set(inverse), range) * Vec::set(scale) - weight;
    sums.add(error * error);
  }
  return sums.total();
}

}  // namespace

void widen_row(int type, const void* from, int64_t count, float* to) {
  if (type == 0) {
    widen(static_cast<const float*>(from), count, to);
  } else if (type == 1) {
    widen(static_cast<const bf16*>(from), count, to);
  } else {
    widen(static_cast<const fp16*>(from), count, to);
  }
}

float quantize_group(const QuantizeArgs& args, const float* weights, int64_t count,
                     int8_t* values) {
  const float lowest = static_cast<float>(-(1 << (args.bits - 1)));
  const float highest = -lowest - 1.0f;
  const Range range = {Vec::set(lowest), Vec::set(highest)};

  Vec greatest = Vec::zero();
  Vec least = Vec::zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec weight = some(weights + i, count - i);
    greatest = max(greatest, weight);
    least = min(least, weight);
  }
  const float above = greatest.max();
  const float below = (Vec::zero() - least).max();
  const float largest = above > below ? above : below;
  const float extreme = above >= below ? above : -below;
  const float full_scales[2] = {extreme / lowest, largest / highest};

  float best_scale = 0.0f;
  double best_error = __builtin_inf();
  for (int clip = 0; clip < args.num_clips; ++clip) {
    for (const float full_scale : full_scales) {
      float scale = full_scale * args.clips[clip];
      if (args.scales_in_half) scale = _cvtsh_ss(_cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT));
      const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
      const double error = squared_error(weights, count, scale, inverse, range);
      if (error < best_error) {
        best_error = error;
        best_scale = scale;
      }
    }
  }
  const Vec inverse = Vec::set(best_scale == 0.0f ? 0.0f : 1.0f / best_scale);
  for (int64_t i = 0; i < count; i += kLanes) {
    alignas(64) float rounded[kLanes];
    to_grid(some(weights + i, count - i), inverse, range).store(rounded);
    const int64_t left = count - i;
    for (int lane = 0; lane < kLanes && lane < left; ++lane) {
      values[i + lane] = static_cast<int8_t>(rounded[lane]);
    }
  }
  return best_scale;
}

}  // namespace legato::LEGATO_ISA
