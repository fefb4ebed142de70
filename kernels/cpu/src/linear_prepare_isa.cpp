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

template <class T, class To>
void copy_row(const PackedLinear& linear, const T* x, To* to) {
  int64_t k = 0;
  if (linear.permutation != nullptr) {
    for (; k < linear.K; ++k) {
      if constexpr (sizeof(T) == sizeof(To)) {
        to[k] = x[linear.permutation[k]];
      } else {
        to[k] = widen(x[linear.permutation[k]]);
      }
    }
  } else if constexpr (sizeof(T) == sizeof(To)) {
    __builtin_memcpy(to, x, linear.K * sizeof(T));
    k = linear.K;
  } else {
    for (; k + Vec::kLanes <= linear.K; k += Vec::kLanes) Vec::load(x + k).store(to + k);
    for (; k < linear.K; ++k) to[k] = widen(x[k]);
  }
  for (; k < linear.padded_K; ++k) to[k] = To{};
}

template <class T>
void sum_groups(const PackedLinear& linear, const T* x, float* sums) {
  constexpr int kChains = 8;
  for (int64_t group = 0; group < linear.num_groups(); ++group, x += linear.group) {
    float chains[kChains] = {};
    for (int64_t k = 0; k < linear.group; ++k) chains[k % kChains] += widen(x[k]);
    float sum = 0.0f;
    for (const float chain : chains) sum += chain;
    sums[group] = sum;
  }
}

}  // namespace

void prepare_linear_row(const PackedLinear& linear, const void* x, void* to, float* group_sums) {
  const void* ready = x;
  if (to != nullptr) {
    ready = to;
    if (linear.native_bf16) {
      copy_row(linear, static_cast<const bf16*>(x), static_cast<bf16*>(to));
    } else if (linear.type == Type::bf16) {
      copy_row(linear, static_cast<const bf16*>(x), static_cast<float*>(to));
    } else if (linear.type == Type::f16) {
      copy_row(linear, static_cast<const fp16*>(x), static_cast<float*>(to));
    } else {
      copy_row(linear, static_cast<const float*>(x), static_cast<float*>(to));
    }
  }
  if (group_sums == nullptr) return;
  if (linear.native_bf16) {
    sum_groups(linear, static_cast<const bf16*>(ready), group_sums);
  } else {
    sum_groups(linear, static_cast<const float*>(ready), group_sums);
  }
}

}  // namespace legato::LEGATO_ISA
