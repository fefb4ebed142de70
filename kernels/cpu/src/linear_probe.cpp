#include "linear_probe.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "api.h"
#include "linear.h"
#include "pool.h"

namespace legato {
namespace {
constexpr int64_t kTaskFloats = 1 << 16;  // 256 KiB
}

// The sum of `data`, read by all threads: times memory bandwidth.
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

// Multiply-adds in registers on all threads; returns the number of floating-point operations.
LEGATO_API int64_t legato_multiply_in_registers(int64_t count_per_task, int64_t num_tasks) {
  const auto multiply = active_isa() == Isa::amx ? LEGATO_IF_BUILT(amx, multiply_in_registers)
                                                 : LEGATO_PICK(multiply_in_registers);
  std::vector<int64_t> flops(num_tasks);
  Pool::get().run(num_tasks, [&](int64_t task, int) {
    float sink[16] = {};
    flops[task] = multiply(count_per_task, sink);
  });
  int64_t total = 0;
  for (const int64_t f : flops) total += f;
  return total;
}

// Runs a sequence of layers on the same x and writes the seconds of each: benchmarks without the
// cost of calling from Python. out must hold M rows of the widest layer.
LEGATO_API void legato_linear_time(const PackedLinear* const* linears, int64_t num_linears,
                                   const void* x, int64_t M, void* out, double* seconds) {
  using Clock = std::chrono::steady_clock;
  for (int64_t i = 0; i < num_linears; ++i) {
    const PackedLinear& linear = *linears[i];
    const auto begin = Clock::now();
    linear_forward(linear, x, in_features(linear), M, out, out_features(linear));
    seconds[i] = std::chrono::duration<double>(Clock::now() - begin).count();
  }
}

}  // namespace legato
