// Prepares x where the micro-kernels cannot read it in place: widens, pads, applies the
// permutation.
#include "linear_layout.h"
#include "vec.h"

namespace legato::LEGATO_ISA {
namespace {

inline float from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline float widen(float value) { return value; }
inline float widen(bf16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }
inline float widen(fp16 value) { return _cvtsh_ss(value.bits); }


// to: pieces of a row, `stride` elements apart.
template <class T, class To>
void copy_row(const PackedLinear& linear, const T* x, To* to, int64_t stride) {
  for (int64_t begin = 0; begin < linear.padded_K; begin += kPieceValues, to += stride) {
    const int64_t padded = linear.padded_K - begin, given = linear.K - begin;
    const int64_t end = padded < kPieceValues ? padded : kPieceValues;
    const int64_t n = given < kPieceValues ? given : kPieceValues;
    int64_t k = 0;
    if (linear.permutation != nullptr) {
      for (; k < n; ++k) {
        if constexpr (sizeof(T) == sizeof(To)) {
          to[k] = x[linear.permutation[begin + k]];
        } else {
          to[k] = widen(x[linear.permutation[begin + k]]);
        }
      }
    } else if constexpr (sizeof(T) == sizeof(To)) {
      if (n == kPieceValues) {
        __builtin_memcpy(to, x + begin, kPieceValues * sizeof(T));
        k = n;
      }
      for (; k < n; ++k) to[k] = x[begin + k];
    } else {
      for (; k + Vec::kLanes <= n; k += Vec::kLanes) Vec::load(x + begin + k).store(to + k);
      for (; k < n; ++k) to[k] = widen(x[begin + k]);
    }
    for (; k < end; ++k) to[k] = To{};
  }
}

template <class T>
void sum_groups(const PackedLinear& linear, const T* x, int64_t stride, float* sums) {
  constexpr int kChains = 8;
  for (int64_t group = 0; group < linear.num_groups(); ++group) {
    float chains[kChains] = {};
    for (int64_t i = 0; i < linear.group; ++i) {
      const int64_t k = group * linear.group + i;
      chains[i % kChains] += widen(x[k / kPieceValues * stride + k % kPieceValues]);
    }
    float sum = 0.0f;
    for (const float chain : chains) sum += chain;
    sums[group] = sum;
  }
}

// Copies where there is a `to`, and sums what the micro-kernels will read.
template <class T, class To>
void prepare_row(const PackedLinear& linear, const void* x, void* to, int64_t stride, float* sums) {
  if (to != nullptr) copy_row(linear, static_cast<const T*>(x), static_cast<To*>(to), stride);
  if (sums == nullptr) return;
  sum_groups(linear, static_cast<const To*>(to == nullptr ? x : to), stride, sums);
}

template <class T>
void widen_group(const PackedLinear& linear, const T* x, int64_t begin, float* values) {
  const int64_t group = linear.operand_group;
  const int64_t given = linear.K - begin < group ? linear.K - begin : group;
  int64_t k = 0;
  if (linear.permutation != nullptr) {
    for (; k < given; ++k) values[k] = widen(x[linear.permutation[begin + k]]);
  } else {
    for (; k + Vec::kLanes <= given; k += Vec::kLanes) Vec::load(x + begin + k).store(values + k);
    for (; k < given; ++k) values[k] = widen(x[begin + k]);
  }
  for (; k < group; ++k) values[k] = 0.0f;
}

// The scale of whole numbers, and its inverse.
struct Scaling {
  float scale;
  float inverse;
};

// Of 16 bits. A power of two: exact for bf16 within a factor of 128 of the largest (f16: of 16).
// What is not finite makes the scale, and with it all products, not finite either. A group below
// 2^-100 counts as zero.
Scaling to_16_bits(uint32_t largest) {
  constexpr uint32_t kSmallest = 127 - 100, kNotFinite = 255;  // exponents
  const uint32_t exponent = largest >> 23;
  if (exponent < kSmallest) return {0.0f, 0.0f};
  const float scale =
      exponent == kNotFinite ? from_bits(largest) : from_bits((exponent - 14) << 23);
  return {scale, from_bits((254 + 14 - exponent) << 23)};
}

// Of 8 bits.
Scaling to_8_bits(uint32_t largest) {
  const float scale = from_bits(largest) / 127.5f;
  return scale < 1e-30f ? Scaling{0.0f, 0.0f} : Scaling{scale, 1.0f / scale};
}

// kUnit values to the nearest whole numbers, of at most `most`.
inline __m128i whole_numbers(const float* values, const Scaling& scaling, float most) {
  const __m256 scaled = _mm256_mul_ps(_mm256_load_ps(values), _mm256_set1_ps(scaling.inverse));
  // Of infinity the conversion would be negative. Packing bounds them below.
  const __m256i eight = _mm256_cvtps_epi32(_mm256_min_ps(scaled, _mm256_set1_ps(most)));
  return _mm_packs_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
}

inline void store_numbers(__m128i eight, int16_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), eight);
}

inline void store_numbers(__m128i eight, int8_t* to) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(eight, eight));
}

// Whole numbers, with a scale for each group. kRounds: to 8 bits, whatever the size of To.
template <bool kRounds, class T, class To>
void integer_row(const PackedLinear& linear, const T* x, To* to, float* scales, float* sums,
                 int32_t* offsets) {
  const int64_t group = linear.operand_group;
  alignas(64) float values[kMaxByteGroup];
  uint32_t of_row = 0;
  if (linear.rounding == InputRounding::to_8_bits_by_token) {
    for (int64_t begin = 0; begin < linear.padded_K; begin += group) {
      widen_group(linear, x, begin, values);
      const uint32_t largest = largest_bits(values, group);
      of_row = largest > of_row ? largest : of_row;
    }
  }
  for (int64_t begin = 0; begin < linear.padded_K; begin += group, to += group) {
    widen_group(linear, x, begin, values);
    const uint32_t largest = of_row > 0 ? of_row : largest_bits(values, group);
    const Scaling scaling = kRounds ? to_8_bits(largest) : to_16_bits(largest);
    for (int64_t k = 0; k < group; k += kUnit) {
      store_numbers(whole_numbers(values + k, scaling, kRounds ? 127.0f : 32767.0f), to + k);
    }
    *scales++ = scaling.scale;
    if (sums == nullptr && offsets == nullptr) continue;
    int32_t sum = 0;
    for (int64_t k = 0; k < group; ++k) sum += to[k];
    if (sums != nullptr) *sums++ = static_cast<float>(sum) * scaling.scale;
    if (offsets != nullptr) *offsets++ = -sum * linear.stored_offset();
  }
}

template <class T>
void integer_row(const PackedLinear& linear, const void* x, void* to, float* scales, float* sums,
                 int32_t* offsets) {
  const T* from = static_cast<const T*>(x);
  if (linear.operand == Operand::i8) {
    integer_row<true>(linear, from, static_cast<int8_t*>(to), scales, sums, offsets);
  } else if (linear.rounding != InputRounding::to_16_bits) {
    integer_row<true>(linear, from, static_cast<int16_t*>(to), scales, sums, offsets);
  } else {
    integer_row<false>(linear, from, static_cast<int16_t*>(to), scales, sums, offsets);
  }
}

}  // namespace

void prepare_linear_rows(const PackedLinear& linear, const RawRows& x, const PreparedRows& to) {
  const int64_t stride = linear.is_tiled ? x.num_rows * kPieceValues : kPieceValues;
  const int64_t k_bytes = bytes_of(linear.operand);
  const int64_t to_bytes = (linear.is_tiled ? kPieceValues : linear.padded_K) * k_bytes;
  for (int64_t row = 0; row < x.num_rows; ++row) {
    const void* from = static_cast<const char*>(x.first) + row * x.row_bytes;
    void* target = to.data == nullptr ? nullptr : static_cast<char*>(to.data) + row * to_bytes;
    float* sums = to.group_sums == nullptr ? nullptr : to.group_sums + row * linear.num_groups();
    if (linear.operand_group > 0) {
      const int64_t first = row * linear.num_operand_groups();
      float* scales = to.scales + first;
      int32_t* offsets = to.offsets == nullptr ? nullptr : to.offsets + first;
      if (linear.type == Type::bf16) {
        integer_row<bf16>(linear, from, target, scales, sums, offsets);
      } else if (linear.type == Type::f16) {
        integer_row<fp16>(linear, from, target, scales, sums, offsets);
      } else {
        integer_row<float>(linear, from, target, scales, sums, offsets);
      }
    } else if (linear.operand == Operand::bf16) {
      prepare_row<bf16, bf16>(linear, from, target, stride, sums);
    } else if (linear.type == Type::bf16) {
      prepare_row<bf16, float>(linear, from, target, stride, sums);
    } else if (linear.type == Type::f16) {
      prepare_row<fp16, float>(linear, from, target, stride, sums);
    } else {
      prepare_row<float, float>(linear, from, target, stride, sums);
    }
  }
}

}  // namespace legato::LEGATO_ISA
