// The micro-kernels of each weight type, for each instruction set.
#include "linear_integer_kernel.h"
#include "linear_task.h"

namespace legato::LEGATO_ISA {
namespace {

// From how many chunks of rows 16-bit floats are widened once instead of in every micro-kernel.
constexpr int64_t kWideningChunks = 2;

Method method_of(const PackedLinear& linear) {
  if (linear.operand_group > 0) return integer_method(linear);
#ifdef __AVX512BF16__
  if (linear.operand == Operand::bf16) {
    const MicroKernelTable* plain = &kMicroKernels<PairsFromBf16, true>;
    constexpr int64_t bytes = PairsFromBf16::kUnitBytes;
    switch (linear.weights) {
      case Weights::i8:
        return {&kMicroKernels<PairsFromI8, true>, plain, nullptr, bytes, 2,
                &kMicroKernels<Keeping<PairsFromI8>, true>};
      case Weights::i4:
        return {&kMicroKernels<PairsFromI4, true>, plain, nullptr, bytes, 2,
                &kMicroKernels<Keeping<PairsFromI4>, true>};
      default:
        return {plain, nullptr, nullptr, bytes, 0};
    }
  }
#endif
  const MicroKernelTable* plain = &kMicroKernels<FloatFromF32, false>;
  constexpr int64_t bytes = FloatFromF32::kUnitBytes;
  switch (linear.weights) {
    case Weights::i8:
      return {nullptr, plain, unpack_floats_i8, bytes, 0};
    case Weights::i4:
      return {nullptr, plain, unpack_floats_i4, bytes, 0};
    case Weights::bf16:
      return {&kMicroKernels<FloatFromBf16, false>, plain, nullptr, bytes, kWideningChunks,
              &kMicroKernels<Keeping<FloatFromBf16>, false>};
    case Weights::f16:
      return {&kMicroKernels<FloatFromF16, false>, plain, nullptr, bytes, kWideningChunks,
              &kMicroKernels<Keeping<FloatFromF16>, false>};
    default:
      return {plain, nullptr, nullptr, bytes, 0};
  }
}

}  // namespace

void run_linear_task(const Task& task) { run_linear_task(task, method_of(*task.linear)); }

}  // namespace legato::LEGATO_ISA
