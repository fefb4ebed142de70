#include "linear_probe.h"

#include <algorithm>
#include <vector>

#include "api.h"
#include "pool.h"

namespace legato {
namespace {
constexpr int64_t kTaskFloats = 1 << 16;  // 256 KiB
}

// The sum of `data`, read by all threads: what it costs is the time to stream the bytes.
LEGATO_API float legato_stream_read(const float* data, int64_t num_floats) {
  const auto read = LEGATO_PICK(stream_read);
  const int64_t num_tasks = (num_floats + kTaskFloats - 1) / kTaskFloats;
  std::vector<float> sums(num_tasks);
  Pool::get().run(num_tasks, [&](int64_t task, int) {
    const int64_t begin = task * kTaskFloats;
    sums[task] = read(data + begin, std::min(kTaskFloats, num_floats - begin));
  });
  float total = 0.0f;
  for (const float sum : sums) total += sum;
  return total;
}

// Multiplies in all threads; returns the floating-point operations done.
LEGATO_API int64_t legato_multiply_in_registers(int64_t count_per_task, int64_t num_tasks) {
  const auto multiply = LEGATO_PICK(multiply_in_registers);
  std::vector<int64_t> flops(num_tasks);
  Pool::get().run(num_tasks, [&](int64_t task, int) {
    float sink[16] = {};
    flops[task] = multiply(count_per_task, sink);
  });
  int64_t total = 0;
  for (const int64_t f : flops) total += f;
  return total;
}

}  // namespace legato
