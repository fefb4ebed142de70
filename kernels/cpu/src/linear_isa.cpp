// One task of a linear layer: some rows of x times some panels of the weight.
//
// Few rows: one pass over each panel, at the speed of the memory. More rows: the k of a panel is
// walked in blocks that stay in the first-level cache while all rows pass over them, kRows at a
// time, and meanwhile the next block is asked from memory in equal portions.
#include "linear_expand.h"
#include "linear_finish.h"
#include "linear_kernel.h"

namespace legato::LEGATO_ISA {
namespace {

constexpr int64_t kMaxGroupUnits = 32;  // groups of up to 256 k
constexpr int64_t kAheadBytes = 8192;   // of prefetch in a stream; measured, 4 KiB costs 5-20 %
// Units of k in a block, measured. Less costs time for sums going to memory and back; with few rows
// more leaves no room in the first-level cache for the block that is fetched meanwhile.
constexpr int64_t kBlock = 24;
constexpr int64_t kManyRowsBlock = 48;
constexpr int64_t kManyRows = 4 * kRows;

// How a stored form is computed: which kernels read it directly, and how it is expanded for them.
struct Method {
  const KernelTable* direct;    // null: only after expanding
  const KernelTable* expanded;  // null: nothing to expand
  Expand expand;
  int64_t expanded_unit_bytes;
};

Method method_of(const PackedLinear& linear) {
#ifdef __AVX512BF16__
  if (linear.native_bf16) {
    const KernelTable* plain = &kKernels<PairsOfBf16, true>;
    constexpr int64_t bytes = PairsOfBf16::kUnitBytes;
    switch (linear.weights) {
      case Weights::i8:
        return {&kKernels<PairsOfI8, true>, plain, expand_pairs<PairsOfI8>, bytes};
      case Weights::i4:
        return {&kKernels<PairsOfI4, true>, plain, expand_pairs<PairsOfI4>, bytes};
      default:
        return {plain, nullptr, nullptr, bytes};
    }
  }
#endif
  const KernelTable* plain = &kKernels<FloatOfF32, false>;
  constexpr int64_t bytes = FloatOfF32::kUnitBytes;
  switch (linear.weights) {
    case Weights::i8:
      return {nullptr, plain, expand_floats_i8, bytes};
    case Weights::i4:
      return {nullptr, plain, expand_floats_i4, bytes};
    case Weights::bf16:
      return {&kKernels<FloatOfBf16, false>, nullptr, nullptr, bytes};
    case Weights::f16:
      return {&kKernels<FloatOfF16, false>, nullptr, nullptr, bytes};
    default:
      return {plain, nullptr, nullptr, bytes};
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
  const bool streams = num_chunks == 1 && !expand;
  const bool fits_many = !expand || linear.native_bf16;
  int64_t block_units = task.num_rows > kManyRows && fits_many ? kManyRowsBlock : kBlock;
  if (streams) block_units = num_units;
  if (group_units > 0) {
    block_units = block_units < group_units ? group_units : block_units / group_units * group_units;
  }

  // Two panels of sums: a stream of whole numbers is read two panels at a time.
  alignas(64) float sums[2 * kSumsOfPanel];
  constexpr int64_t kExpandedBytes = kMaxGroupUnits * FloatOfF32::kUnitBytes;
#ifdef __AVX512BF16__
  static_assert(kManyRowsBlock * PairsOfBf16::kUnitBytes <= kExpandedBytes);
#endif
  static_assert(kBlock <= kMaxGroupUnits);
  alignas(64) char expanded[kExpandedBytes];
  const bool wide = streams && method.expanded != nullptr && task.num_rows <= kWideRows;

  Stretch s;
  s.row_bytes = task.x.row_bytes;
  s.panel_stride = linear.panel_bytes;
  s.scales = nullptr;
  s.scales_stride = group_bytes;
  s.has_zeros = linear.has_zeros;
  s.group_sums = nullptr;
  s.group_sums_stride = linear.num_groups();
  int64_t panels_at_once = 1;
  for (int64_t panel = task.panel_begin; panel < task.panel_end; panel += panels_at_once) {
    panels_at_once = wide && panel + 1 < task.panel_end ? 2 : 1;
    const char* block_data = linear.data + panel * linear.panel_bytes;
    for (int64_t unit = 0; unit < num_units; unit += block_units) {
      const int64_t units = num_units - unit < block_units ? num_units - unit : block_units;
      s.num_groups = group_units > 0 ? units / group_units : 1;
      s.num_units = group_units > 0 ? group_units : units;
      const int64_t block_bytes =
          group_units > 0 ? s.num_groups * group_bytes : units * linear.unit_bytes;
      // Panels follow one another in memory, so what comes after a block is always what is next.
      const char* next_data = block_data + block_bytes;
      const char* w = block_data + linear.header_bytes;
      s.w_stride = group_bytes;
      if (expand) {
        s.w_stride = s.num_units * stretch_unit_bytes;
        for (int64_t g = 0; g < s.num_groups; ++g) {
          method.expand(w + g * group_bytes, s.num_units, expanded + g * s.w_stride);
        }
        w = expanded;
      }
      s.w = w;
      if (group_units > 0) s.scales = block_data;
      s.first = unit == 0;
      s.lines_ahead =
          static_cast<int>((block_bytes / 64 + num_chunks * units - 1) / (num_chunks * units));
      int64_t chunk_row = 0;
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const int64_t chunks_left = num_chunks - chunk;
        const int64_t rows = (task.num_rows - chunk_row + chunks_left - 1) / chunks_left;
        const int64_t x_row = task.row_begin + chunk_row;
        s.x = task.x.data + x_row * task.x.row_bytes + unit * kUnit * k_bytes;
        s.sums = sums + chunk_row * kPanelRows;
        if (linear.has_zeros) {
          s.group_sums = task.x.group_sums + x_row * linear.num_groups() + unit / group_units;
        }
        s.ahead = streams ? w + kAheadBytes : next_data + chunk * units * s.lines_ahead * 64;
        (panels_at_once == 2 ? table.wide : table.kernels)[rows - 1](s);
        chunk_row += rows;
      }
      block_data = next_data;
    }
    for (int64_t p = 0; p < panels_at_once; ++p) finish(task, sums + p * kSumsOfPanel, panel + p);
  }
}

}  // namespace legato::LEGATO_ISA
