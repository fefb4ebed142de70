#include "linear_probe.h"

#include "vec.h"

namespace legato::LEGATO_ISA {

float stream_read(const float* data, int64_t num_floats) {
  constexpr int kStep = 4 * Vec::kLanes;
  constexpr int kAhead = 1024;  // floats of prefetch distance: 4 KiB, measured
  Vec sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  int64_t i = 0;
  for (; i + kStep <= num_floats; i += kStep) {
    for (int line = 0; line < kStep; line += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(data + i + kAhead + line), _MM_HINT_T0);
    }
    for (int j = 0; j < 4; ++j) sums[j] = sums[j] + Vec::load(data + i + j * Vec::kLanes);
  }
  float rest = 0.0f;
  for (; i < num_floats; ++i) rest += data[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum() + rest;
}

}  // namespace legato::LEGATO_ISA
