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

}  // namespace legato
