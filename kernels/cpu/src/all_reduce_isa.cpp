// The sum of several parts, rounded once; see all_reduce.h.

#include "all_reduce.h"
#include "elementwise_vec.h"

namespace legato::LEGATO_ISA {
namespace {

template <class T>
void sum_in(const SumArgs& args, int64_t begin, int64_t end) {
  const char* parts = args.parts + begin * static_cast<int64_t>(sizeof(T));
  T* y = static_cast<T*>(args.y) + begin;
  for_lanes(end - begin, [&](int64_t i, int n) {
    Vec sum = load_lanes(reinterpret_cast<const T*>(parts) + i, n);
    for (int rank = 1; rank < args.num_ranks; ++rank) {
      sum = sum + load_lanes(reinterpret_cast<const T*>(parts + rank * args.part_bytes) + i, n);
    }
    store_lanes(sum, y + i, n);
  });
}

}  // namespace

void sum_parts(const SumArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == Dtype::bfloat16) return sum_in<bf16>(args, begin, end);
  if (args.dtype == Dtype::float16) return sum_in<fp16>(args, begin, end);
  sum_in<float>(args, begin, end);
}

}  // namespace legato::LEGATO_ISA
