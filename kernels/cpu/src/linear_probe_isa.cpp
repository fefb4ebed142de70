#include "linear_probe.h"

#include "vec.h"

namespace legato::LEGATO_ISA {

float stream_read(const float* data, int64_t num_floats) {
  constexpr int kStep = 4 * Vec::kLanes;
  constexpr int kPrefetch = 1024;  // prefetch distance in floats: 4 KiB, measured
  Vec sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  int64_t i = 0;
  for (; i + kStep <= num_floats; i += kStep) {
    for (int line = 0; line < kStep; line += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(data + i + kPrefetch + line), _MM_HINT_T0);
    }
    for (int j = 0; j < 4; ++j) sums[j] = sums[j] + Vec::load(data + i + j * Vec::kLanes);
  }
  float rest = 0.0f;
  for (; i < num_floats; ++i) rest += data[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum() + rest;
}

int64_t multiply_in_registers(int64_t count, float* sink) {
  constexpr int kChains = Vec::kLanes == 16 ? 24 : 12;  // of 32 or 16 registers
  Vec sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = Vec::set(static_cast<float>(i));
  const Vec one = Vec::load(sink);  // unknown to the compiler
  const int64_t rounds = (count + kChains - 1) / kChains;
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) {
#ifdef __AVX512BF16__
      sums[i].v = _mm512_dpbf16_ps(sums[i].v, (__m512bh)one.v, (__m512bh)one.v);
#else
      sums[i] = fma(one, one, sums[i]);
#endif
    }
  }
  for (int i = 1; i < kChains; ++i) sums[0] = sums[0] + sums[i];
  sums[0].store(sink);
#ifdef __AVX512BF16__
  constexpr int64_t kFlops = 4 * Vec::kLanes;
#else
  constexpr int64_t kFlops = 2 * Vec::kLanes;
#endif
  return rounds * kChains * kFlops;
}

}  // namespace legato::LEGATO_ISA
