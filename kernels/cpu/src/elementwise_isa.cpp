// Norms and activation; see elementwise_kernel.h.

#include "elementwise_kernel.h"
#include "elementwise_vec.h"

namespace legato::LEGATO_ISA {
namespace {

template <class T>
void norm_in(const NormArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * width;
    if (args.residual != nullptr) {
      T* residual = static_cast<T*>(args.residual) + row * width;
      for_lanes(width, [&](int64_t i, int n) {
        store_lanes(load_lanes(residual + i, n) + load_lanes(x + i, n), residual + i, n);
      });
      x = residual;
    }
    scale_row(x, static_cast<const T*>(args.weight), static_cast<T*>(args.y) + row * width, width,
              inverse_rms(x, width, args.eps));
  }
}

template <class T>
void silu_in(const SiluArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * args.width;
    const T* up = gate + args.width;
    T* y = static_cast<T*>(args.y) + row * args.width;
    for_lanes(args.width, [&](int64_t i, int n) {
      store_lanes(silu(load_lanes(gate + i, n)) * load_lanes(up + i, n), y + i, n);
    });
  }
}

}  // namespace

void norm_rows(const NormArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == Dtype::bfloat16) return norm_in<bf16>(args, begin, end);
  if (args.dtype == Dtype::float16) return norm_in<fp16>(args, begin, end);
  norm_in<float>(args, begin, end);
}

void silu_rows(const SiluArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == Dtype::bfloat16) return silu_in<bf16>(args, begin, end);
  if (args.dtype == Dtype::float16) return silu_in<fp16>(args, begin, end);
  silu_in<float>(args, begin, end);
}

}  // namespace legato::LEGATO_ISA
