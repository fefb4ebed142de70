// Prepares x where the micro-kernels cannot read it in place: widens, pads, applies the
// permutation.
#include "linear_layout.h"
#include "vec.h"

namespace legato::LEGATO_ISA {
namespace {

inline float widen(float value) { return value; }
inline float widen(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}
inline float widen(fp16 value) { return _cvtsh_ss(value.bits); }

constexpr int64_t kPiece = 32;  // of a row: contiguous in any layout

// to: pieces of a row, `stride` elements apart.
template <class T, class To>
void copy_row(const PackedLinear& linear, const T* x, To* to, int64_t stride) {
  for (int64_t begin = 0; begin < linear.padded_K; begin += kPiece, to += stride) {
    const int64_t padded = linear.padded_K - begin, given = linear.K - begin;
    const int64_t end = padded < kPiece ? padded : kPiece, n = given < kPiece ? given : kPiece;
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
      if (n == kPiece) {
        __builtin_memcpy(to, x + begin, kPiece * sizeof(T));
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
      chains[i % kChains] += widen(x[k / kPiece * stride + k % kPiece]);
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

}  // namespace

void prepare_linear_rows(const PackedLinear& linear, const RawRows& x, void* to,
                         float* group_sums) {
  const int64_t stride = linear.is_tiled ? x.num_rows * kPiece : kPiece;
  const int64_t k_bytes = linear.native_bf16 ? 2 : 4;
  const int64_t to_bytes = (linear.is_tiled ? kPiece : linear.padded_K) * k_bytes;
  for (int64_t row = 0; row < x.num_rows; ++row) {
    const void* from = static_cast<const char*>(x.first) + row * x.row_bytes;
    void* target = to == nullptr ? nullptr : static_cast<char*>(to) + row * to_bytes;
    float* sums = group_sums == nullptr ? nullptr : group_sums + row * linear.num_groups();
    if (linear.native_bf16) {
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
