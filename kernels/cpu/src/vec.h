// A register of floats, as wide as the instruction set of this compilation: 8 or 16 lanes.
//
// Only for files that are compiled for an instruction set (isa.h). Values of bf16 and fp16 are widened on load and rounded to nearest even
// on store; arithmetic is always float.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace legato::LEGATO_ISA {

using bf16 = struct bf16_tag { uint16_t bits; };
using fp16 = struct fp16_tag { uint16_t bits; };

#ifdef __AVX512F__

struct Vec {
  static constexpr int kLanes = 16;
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  static Vec load(const fp16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  // The first n lanes, the others zero.
  static Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(mask(n), p)}; }
  static Vec load(const bf16* p, int n) {
    const __m256i bits = _mm256_maskz_loadu_epi16(mask(n), p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  static Vec load(const fp16* p, int n) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n), p))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void stream(float* p) const { _mm512_stream_ps(p, v); }  // aligned, past the caches
  void store(bf16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16()); }
  void store(fp16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_fp16()); }
  void store(float* p, int n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
  void store(bf16* p, int n) const { _mm256_mask_storeu_epi16(p, mask(n), to_bf16()); }
  void store(fp16* p, int n) const { _mm256_mask_storeu_epi16(p, mask(n), to_fp16()); }

  static __mmask16 mask(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1); }

  __m256i to_bf16() const {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(v);  // what is below 2^-126 becomes zero
#endif
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
  }
  __m256i to_fp16() const {
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float max() const { return _mm512_reduce_max_ps(v); }
};

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a b + c
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a 2^n for whole n in [-126, 127]
inline Vec scale_by_power(Vec a, Vec n) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), exponent))};
}

#else

struct Vec {
  static constexpr int kLanes = 8;
  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec set(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  static Vec load(const fp16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  // The first n lanes, the others zero.
  static Vec load(const float* p, int n) { return {_mm256_maskload_ps(p, mask(n))}; }
  static Vec load(const bf16* p, int n) { return load_part(p, n); }
  static Vec load(const fp16* p, int n) { return load_part(p, n); }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void stream(float* p) const { _mm256_stream_ps(p, v); }  // aligned, past the caches
  void store(bf16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16()); }
  void store(fp16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_fp16()); }
  void store(float* p, int n) const { _mm256_maskstore_ps(p, mask(n), v); }
  void store(bf16* p, int n) const { store_part(p, to_bf16(), n); }
  void store(fp16* p, int n) const { store_part(p, to_fp16(), n); }

  static __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  template <class T>
  static Vec load_part(const T* p, int n) {
    T whole[8] = {};
    for (int i = 0; i < n && i < 8; ++i) whole[i] = p[i];
    return load(whole);
  }
  template <class T>
  static void store_part(T* p, __m128i bits, int n) {
    T whole[8];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(whole), bits);
    for (int i = 0; i < n && i < 8; ++i) p[i] = whole[i];
  }

  __m128i to_bf16() const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  __m128i to_fp16() const {
    return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  float sum() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  float max() const {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
};

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }  // a b + c
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a 2^n for whole n in [-126, 127]
inline Vec scale_by_power(Vec a, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), exponent))};
}

#endif

// e^x to about 1 unit in the last place; arguments are clamped to [-87.3, 88.3].
inline Vec exp(Vec x) {
  x = min(max(x, Vec::set(-87.3f)), Vec::set(88.3f));
  const Vec n = round(x * Vec::set(1.44269504088896341f));
  // x - n ln 2 in two steps, so that the remainder keeps its low bits.
  Vec r = fma(n, Vec::set(-0.693359375f), x);
  r = fma(n, Vec::set(2.12194440e-4f), r);
  Vec p = Vec::set(1.9875691500e-4f);
  p = fma(p, r, Vec::set(1.3981999507e-3f));
  p = fma(p, r, Vec::set(8.3334519073e-3f));
  p = fma(p, r, Vec::set(4.1665795894e-2f));
  p = fma(p, r, Vec::set(1.6666665459e-1f));
  p = fma(p, r, Vec::set(5.0000001201e-1f));
  p = fma(p, r * r, r + Vec::set(1.0f));
  return scale_by_power(p, n);
}

// Bits of the largest magnitude: as whole numbers their order is that of the magnitudes, with NaN
// above infinity.
inline uint32_t largest_bits(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    uint32_t bits;
    __builtin_memcpy(&bits, values + k, 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

inline Vec silu(Vec x) { return x / (Vec::set(1.0f) + exp(Vec::zero() - x)); }

}  // namespace legato::LEGATO_ISA
