// One task of a linear layer: some rows of x times some panels of the weight.
//
// The k of one or two panels is walked in blocks that stay in the first-level cache while all rows
// of the task pass over them, six at a time. While one block is computed the next one is asked from
// memory in equal portions, so that reading and computing overlap however many rows there are.
#include "linear_expand.h"
#include "linear_finish.h"
#include "linear_kernel.h"

namespace legato::LEGATO_ISA {
namespace {

constexpr int64_t kMaxGroupUnits = 32;  // groups of up to 256 k
constexpr int64_t kNativeBlock = 48;    // measured: 24 loses 5 % to sums going to memory and back
constexpr int64_t kFloatBlock = 24;
constexpr int64_t kAheadBytes = 2048;   // of prefetch in one stream; measured

// How a stored form is computed: which kernels read it directly, and how it is expanded for them.
struct Method {
  const KernelTable* direct;    // null: only after expanding
  const KernelTable* expanded;  // null: nothing to expand
  Expand expand;
  int64_t expanded_unit_bytes;
  int64_t block_units;
};

Method method_of(const PackedLinear& linear) {
#ifdef __AVX512BF16__
  if (linear.native_bf16) {
    const KernelTable* plain = &kKernels<PairsOfBf16, true>;
    constexpr int64_t bytes = PairsOfBf16::kUnitBytes;
    switch (linear.weights) {
      case Weights::i8:
        return {&kKernels<PairsOfI8, true>, plain, expand_pairs<PairsOfI8>, bytes, kNativeBlock};
      case Weights::i4:
        return {&kKernels<PairsOfI4, true>, plain, expand_pairs<PairsOfI4>, bytes, kNativeBlock};
      default:
        return {plain, nullptr, nullptr, bytes, kNativeBlock};
    }
  }
#endif
  const KernelTable* plain = &kKernels<FloatOfF32, false>;
  constexpr int64_t bytes = FloatOfF32::kUnitBytes;
  switch (linear.weights) {
    case Weights::i8:
      return {nullptr, plain, expand_floats_i8, bytes, kFloatBlock};
    case Weights::i4:
      return {nullptr, plain, expand_floats_i4, bytes, kFloatBlock};
    case Weights::bf16:
      return {&kKernels<FloatOfBf16, false>, nullptr, nullptr, bytes, kFloatBlock};
    case Weights::f16:
      return {&kKernels<FloatOfF16, false>, nullptr, nullptr, bytes, kFloatBlock};
    default:
      return {plain, nullptr, nullptr, bytes, kFloatBlock};
  }
}

void finish(const Task& task, const float* sums, int64_t panel) {
  switch (task.linear->type) {
    case Type::f32:
      return finish_panel<float>(task, sums, panel);
    case Type::bf16:
      return finish_panel<bf16>(task, sums, panel);
    case Type::f16:
      return finish_panel<fp16>(task, sums, panel);
  }
}

}  // namespace

void run_linear_task(const Task& task) {
  const PackedLinear& linear = *task.linear;
  const Method method = method_of(linear);
  const int64_t num_chunks = (task.num_rows + kRows - 1) / kRows;
  const bool expand = method.direct == nullptr || (num_chunks > 1 && method.expanded != nullptr);
  const KernelTable& table = expand ? *method.expanded : *method.direct;
  const int64_t stretch_unit_bytes = expand ? method.expanded_unit_bytes : linear.unit_bytes;
  const int64_t k_bytes = linear.native_bf16 ? 2 : 4;

  const int64_t num_units = linear.padded_K / kUnit;
  const int64_t group_units = linear.group / kUnit;
  const int64_t group_bytes = linear.header_bytes + group_units * linear.unit_bytes;
  int64_t block_units = num_chunks == 1 && !expand ? num_units : method.block_units;
  if (group_units > 0) block_units = block_units < group_units ? group_units
                                     : block_units / group_units * group_units;

  alignas(64) float sums[kMaxBlockRows * kSumsStride];
  constexpr int64_t kExpandedBytes = kMaxGroupUnits * FloatOfF32::kUnitBytes;
#ifdef __AVX512BF16__
  static_assert(kNativeBlock * PairsOfBf16::kUnitBytes <= kExpandedBytes);
#endif
  static_assert(kFloatBlock <= kMaxGroupUnits);
  alignas(64) char expanded[2][kExpandedBytes];

  for (int64_t panel = task.panel_begin; panel < task.panel_end;) {
    // A single row is bound by memory: one stream at a time reads it best.
    const int num_panels = task.num_rows > 1 && panel + 1 < task.panel_end ? 2 : 1;
    const char* block_data = linear.data + panel * linear.panel_bytes;
    for (int64_t unit = 0; unit < num_units; unit += block_units) {
      const int64_t units = num_units - unit < block_units ? num_units - unit : block_units;
      const int64_t groups = group_units > 0 ? units / group_units : 1;
      const int64_t units_per_call = group_units > 0 ? group_units : units;
      const int64_t block_bytes =
          group_units > 0 ? groups * group_bytes : units * linear.unit_bytes;
      const bool last = unit + units == num_units;
      // At a panel's end the stream goes on behind the panels at hand.
      const char* next_data =
          block_data + block_bytes + (last ? (num_panels - 1) * linear.panel_bytes : 0);
      if (expand) {
        for (int p = 0; p < num_panels; ++p) {
          for (int64_t g = 0; g < groups; ++g) {
            method.expand(
                block_data + p * linear.panel_bytes + g * group_bytes + linear.header_bytes,
                units_per_call, expanded[p] + g * units_per_call * stretch_unit_bytes);
          }
        }
      }
      const int64_t calls = num_chunks * units;
      const int lines_ahead = static_cast<int>((block_bytes / 64 + calls - 1) / calls);
      int64_t chunk_row = 0;
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const int64_t rows = (task.num_rows - chunk_row + num_chunks - chunk - 1) /
                             (num_chunks - chunk);
        const Kernel kernel = table.kernels[rows - 1][num_panels - 1];
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t first_unit = unit + g * units_per_call;
          const int64_t x_row = task.row_begin + chunk_row;
          Stretch s;
          s.x = task.x.data + x_row * task.x.row_bytes + first_unit * kUnit * k_bytes;
          s.row_bytes = task.x.row_bytes;
          s.num_units = units_per_call;
          s.sums = sums + chunk_row * kSumsStride;
          s.first = first_unit == 0;
          s.group_sums = nullptr;
          s.group_sums_stride = linear.num_groups();
          if (task.x.group_sums != nullptr) {
            s.group_sums = task.x.group_sums + x_row * linear.num_groups() + first_unit / group_units;
          }
          s.lines_ahead = lines_ahead;
          for (int p = 0; p < 2; ++p) {
            const int64_t q = p < num_panels ? p : 0;
            const char* group_data = block_data + q * linear.panel_bytes + g * group_bytes;
            s.scales[p] = s.zeros[p] = nullptr;
            if (group_units > 0) s.scales[p] = reinterpret_cast<const fp16*>(group_data);
            if (linear.has_zeros) s.zeros[p] = s.scales[p] + kPanelRows;
            s.w[p] = expand ? expanded[q] + g * units_per_call * stretch_unit_bytes
                            : group_data + linear.header_bytes;
            s.ahead[p] = num_chunks == 1 && !expand
                             ? s.w[p] + kAheadBytes
                             : next_data + q * linear.panel_bytes +
                                   (chunk * units + g * units_per_call) * lines_ahead * 64;
          }
          kernel(s);
        }
        chunk_row += rows;
      }
      block_data += block_bytes;
    }
    for (int p = 0; p < num_panels; ++p) finish(task, sums + p * kPanelRows, panel + p);
    panel += num_panels;
  }
}

}  // namespace legato::LEGATO_ISA
