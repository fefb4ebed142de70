#include "quant.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "api.h"
#include "linear.h"
#include "pool.h"

namespace legato {

// weight: [O][K] of `type`, row stride ldw; values: [O][K]; scales: [O][ceil(K / group)]. Returns
// 0, or 1 when out of memory.
LEGATO_API int legato_quantize(int type, int64_t O, int64_t K, const void* weight, int64_t ldw,
                               int bits, int64_t group, int scales_in_half, const float* clips,
                               int num_clips, int8_t* values, float* scales) {
  const QuantizeArgs args = {bits, group, scales_in_half != 0, clips, num_clips};
  const auto widen = LEGATO_PICK(widen_row);
  const auto quantize = LEGATO_PICK(quantize_group);
  const int64_t num_groups = (K + group - 1) / group;
  const int64_t row_bytes = ldw * size_of(static_cast<Type>(type));
  std::atomic<bool> out_of_memory{false};
  Pool::get().run(O, [&](int64_t row, int) {
    const std::unique_ptr<float[]> floats(new (std::nothrow) float[K]);
    if (floats == nullptr) {
      out_of_memory = true;
      return;
    }
    widen(type, static_cast<const char*>(weight) + row * row_bytes, K, floats.get());
    for (int64_t g = 0; g < num_groups; ++g) {
      const int64_t begin = g * group;
      scales[row * num_groups + g] = quantize(args, floats.get() + begin, std::min(group, K - begin),
                                              values + row * K + begin);
    }
  });
  return out_of_memory ? 1 : 0;
}

}  // namespace legato
