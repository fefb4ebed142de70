// Rounding a register of floats to a narrower type and back, and loads of any model type.
//
// Only for *_isa.cpp files.
#pragma once

#include "tiles.h"
#include "vec.h"

namespace legato::LEGATO_ISA {

template <class T>
inline Vec rounded(Vec x);

template <>
inline Vec rounded<float>(Vec x) {
  return x;
}

template <>
inline Vec rounded<bf16>(Vec x) {
#if defined(__AVX512BF16__)
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x.to_bf16()), 16))};
#elif defined(__AVX512F__)
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i cut = _mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return {_mm512_mask_mov_ps(_mm512_castsi512_ps(cut), nan, x.v)};
#else
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i cut = _mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  const __m256 nan = _mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q);
  return {_mm256_blendv_ps(_mm256_castsi256_ps(cut), x.v, nan)};
#endif
}

template <>
inline Vec rounded<fp16>(Vec x) {
#if defined(__AVX512F__)
  return {_mm512_cvtph_ps(x.to_fp16())};
#else
  return {_mm256_cvtph_ps(x.to_fp16())};
#endif
}

// Calls f(i, n) for i = 0, L, 2 L ... with n = min(L, width - i) lanes.
template <class F>
inline void for_lanes(int64_t width, F&& f) {
  int64_t i = 0;
  for (; i + Vec::kLanes <= width; i += Vec::kLanes) f(i, Vec::kLanes);
  if (i < width) f(i, static_cast<int>(width - i));
}

template <class T>
inline Vec load_lanes(const T* p, int n) {
  return n == Vec::kLanes ? Vec::load(p) : Vec::load(p, n);
}

template <class T>
inline void store_lanes(Vec v, T* p, int n) {
  n == Vec::kLanes ? v.store(p) : v.store(p, n);
}

// 1 / sqrt(mean of squares + eps) of a row; a fixed order of summation.
template <class T>
inline float inverse_rms(const T* x, int64_t width, float eps) {
  Vec sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  int64_t i = 0;
  for (; i + 4 * Vec::kLanes <= width; i += 4 * Vec::kLanes) {
    for (int k = 0; k < 4; ++k) {
      const Vec v = Vec::load(x + i + k * Vec::kLanes);
      sums[k] = fma(v, v, sums[k]);
    }
  }
  for (; i < width; i += Vec::kLanes) {
    const int64_t left = width - i;
    const Vec v = load_lanes(x + i, left < Vec::kLanes ? static_cast<int>(left) : Vec::kLanes);
    sums[0] = fma(v, v, sums[0]);
  }
  const float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + eps);
}

// y = round(weight * (x - mean) / sqrt(variance + eps) + bias), in `pieces` of y; bias may
// be null.
template <class T>
inline void center_row(const T* x, const T* weight, const T* bias, T* y, const RowPieces& pieces,
                       int64_t width, float eps) {
  Vec sum = Vec::zero(), squares = Vec::zero();
  for_lanes(width, [&](int64_t i, int n) { sum = sum + load_lanes(x + i, n); });
  const float mean = sum.sum() / static_cast<float>(width);
  const Vec center = Vec::set(mean);
  float rest = 0.0f;  // of the lanes behind the last whole register
  for_lanes(width, [&](int64_t i, int n) {
    const Vec d = load_lanes(x + i, n) - center;
    if (n == Vec::kLanes) {
      squares = fma(d, d, squares);
    } else {
      float lanes[Vec::kLanes];
      d.store(lanes);
      for (int k = 0; k < n; ++k) rest += lanes[k] * lanes[k];
    }
  });
  const float variance = (squares.sum() + rest) / static_cast<float>(width);
  const Vec scale = Vec::set(1.0f / __builtin_sqrtf(variance + eps));
  for_lanes(width, [&](int64_t i, int n) {
    Vec normed = (load_lanes(x + i, n) - center) * scale * load_lanes(weight + i, n);
    if (bias != nullptr) normed = normed + load_lanes(bias + i, n);
    store_lanes(normed, y + pieces.at(i), n);
  });
}

// y = weight * round(x * scale); with weights wider than x, y = round(weight * x * scale), in
// `pieces` of y.
template <class T, class W>
inline void scale_row(const T* x, const W* weight, T* y, const RowPieces& pieces, int64_t width,
                      float scale) {
  const Vec factor = Vec::set(scale);
  for_lanes(width, [&](int64_t i, int n) {
    Vec normed = load_lanes(x + i, n) * factor;
    if constexpr (sizeof(W) == sizeof(T)) normed = rounded<T>(normed);
    store_lanes(load_lanes(weight + i, n) * normed, y + pieces.at(i), n);
  });
}

}  // namespace legato::LEGATO_ISA
