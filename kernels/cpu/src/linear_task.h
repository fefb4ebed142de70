// One task of a linear layer: some rows of x times some panels of the weight.
//
// Few rows (GEMV-like): one pass over each panel, at memory bandwidth. More rows: k-blocks of a
// panel stay in the caches while all rows pass over them, kKernelRows at a time, and the next
// block is prefetched in equal portions meanwhile. Only for *_isa.cpp and *_vnni.cpp files.
#pragma once

#include "linear_epilogue.h"
#include "linear_kernel.h"
#include "linear_unpack.h"

namespace legato::LEGATO_ISA {

constexpr int64_t kMaxGroupUnits = kMaxByteGroup / kUnit;
// Prefetch distances of a stream, into the first and the second level: misses that go all the way
// into the first would wait for its few buffers.
constexpr int64_t kPrefetchBytes = 2048;
constexpr int64_t kFarPrefetchBytes = 16384;
// Units of k in a k-block, measured. Smaller blocks spill and reload accumulators more often; with
// few rows larger ones leave no room in the L1 cache for the block being prefetched.
constexpr int64_t kBlock = 24;
constexpr int64_t kManyRowsBlock = 48;
constexpr int64_t kManyRows = 4 * kKernelRows;

// Floats of many rows stream from the L2 cache, which costs less than reloading accumulators.
constexpr int64_t kManyFloatsBlock = 72;

constexpr int64_t kUnpackedBytes = kManyFloatsBlock * FloatFromF32::kUnitBytes;
static_assert(kMaxGroupUnits <= kManyFloatsBlock);
static_assert(kManyRowsBlock * FloatFromBf16::kUnitBytes <= kUnpackedBytes);

// Micro-kernels of a stored weight type: those that read it directly, and those behind unpacking.
// Unpacking is a pass of its own, or the work of the first rows' micro-kernels.
struct Method {
  const MicroKernelTable* direct;    // null: only after unpacking
  const MicroKernelTable* unpacked;  // null: nothing to unpack
  Unpack unpack;                     // null: `keeping` unpacks
  int64_t unpacked_unit_bytes;
  int64_t min_chunks;  // of rows, from which unpacking pays
  const MicroKernelTable* keeping = nullptr;
};

inline void run_linear_task(const Task& task, const Method& method) {
  const PackedLinear& linear = *task.linear;
  const int64_t num_chunks = (task.num_rows + kKernelRows - 1) / kKernelRows;
  const bool unpack = method.direct == nullptr ||
                      (method.unpacked != nullptr && num_chunks >= method.min_chunks);
  const bool keeps = unpack && method.keeping != nullptr;
  const MicroKernelTable* const table = unpack ? method.unpacked : method.direct;
  const int64_t kernel_unit_bytes = unpack ? method.unpacked_unit_bytes : linear.unit_bytes;
  const int64_t k_bytes = bytes_of(linear.operand);

  const int64_t num_units = linear.padded_K / kUnit;
  // Of one scale, be it the weights' or x's.
  const int64_t group = linear.group > 0 ? linear.group : linear.operand_group;
  const int64_t group_units = group / kUnit;
  const int64_t group_bytes = linear.header_bytes + group_units * linear.unit_bytes;
  const bool streams = num_chunks == 1 && !unpack;
  int64_t block_units = kBlock;
  if (streams) {
    block_units = num_units;
  } else if (task.num_rows > kManyRows && unpack && k_bytes == 4) {
    const int64_t num_blocks = (num_units + kManyFloatsBlock - 1) / kManyFloatsBlock;
    block_units = (num_units + num_blocks - 1) / num_blocks;
  } else if (task.num_rows > kManyRows) {
    block_units = kManyRowsBlock;
  }
  if (group_units > 0) {
    block_units = block_units < group_units ? group_units : block_units / group_units * group_units;
  }

  // Accumulators of two panels: int8 and int4 streams are read two panels at a time.
  alignas(64) float sums[2 * kPanelSums];
  alignas(64) char unpacked[kUnpackedBytes];
  const bool wide = streams && linear.weights >= Weights::i8 && task.num_rows <= kWideRows;

  KernelArgs s;
  s.row_bytes = task.x.row_bytes;
  s.panel_stride = linear.panel_bytes;
  s.far_bytes = streams ? kFarPrefetchBytes - kPrefetchBytes : 0;
  s.scales = nullptr;
  s.scales_stride = group_bytes;
  s.has_zeros = linear.has_zeros;
  s.kept = unpacked;
  s.x_scales = nullptr;
  s.x_scales_stride = linear.num_operand_groups();
  s.x_offsets = nullptr;
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
      // Panels are contiguous in memory, so the next block always follows this one.
      const char* next_data = block_data + block_bytes;
      const char* w = block_data + linear.header_bytes;
      s.w_stride = group_bytes;
      if (unpack && !keeps) {
        s.w_stride = s.num_units * kernel_unit_bytes;
        for (int64_t g = 0; g < s.num_groups; ++g) {
          method.unpack(w + g * group_bytes, s.num_units, unpacked + g * s.w_stride);
        }
        w = unpacked;
      }
      s.w = w;
      if (linear.group > 0) s.scales = block_data;
      s.first = unit == 0;
      s.prefetch_lines_per_unit =
          static_cast<int>((block_bytes / 64 + num_chunks * units - 1) / (num_chunks * units));
      int64_t chunk_row = 0;
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const int64_t chunks_left = num_chunks - chunk;
        const int64_t rows = (task.num_rows - chunk_row + chunks_left - 1) / chunks_left;
        const int64_t x_row = task.row_begin + chunk_row;
        s.x = task.x.data + x_row * task.x.row_bytes + unit * kUnit * k_bytes;
        s.sums = sums + chunk_row * kPanelRows;
        if (task.x.scales != nullptr) {
          const int64_t at = x_row * s.x_scales_stride + unit / group_units;
          s.x_scales = task.x.scales + at;
          if (task.x.offsets != nullptr) s.x_offsets = task.x.offsets + at;
        }
        if (linear.has_zeros) {
          s.group_sums = task.x.group_sums + x_row * linear.num_groups() + unit / group_units;
        }
        s.prefetch = streams ? w + kPrefetchBytes
                             : next_data + chunk * units * s.prefetch_lines_per_unit * 64;
        const MicroKernelTable& kernels = keeps && chunk == 0 ? *method.keeping : *table;
        (panels_at_once == 2 ? kernels.wide : kernels.kernels)[rows - 1](s);
        if (keeps) {
          s.w = unpacked;
          s.w_stride = s.num_units * kernel_unit_bytes;
        }
        chunk_row += rows;
      }
      block_data = next_data;
    }
    for (int64_t p = 0; p < panels_at_once; ++p) {
      apply_epilogue(task, sums + p * kPanelSums, panel + p);
    }
  }
}

}  // namespace legato::LEGATO_ISA
