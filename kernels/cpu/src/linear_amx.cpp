// One task of a linear layer on AMX tiles: some rows of x times some panels of the weight.
//
// A panel's layout (pairs of k, 32 outputs) is that of two right-hand tiles side by side. Up to 32
// rows pass over a k-block of a panel with their accumulators in four tiles; the k-block stays in
// the L1 cache while more rows follow, and the next one is prefetched meanwhile.
#include "amx.h"
#include "linear_epilogue.h"
#include "linear_unpack.h"

namespace legato::amx {
namespace {

constexpr int64_t kPassRows = 2 * kTileRows;
constexpr int64_t kStepUnits = kTileK / kUnit;
constexpr int64_t kStepBytes = kStepUnits * PairsFromBf16::kUnitBytes;
constexpr int64_t kRightStride = kPanelVecs * 64;
constexpr int64_t kSumsStride = kPanelRows * 4;
// Steps of a k-block, measured: it shares the L1 cache with the rows that pass over it, and where
// these are few and memory is the limit, with the block that is fetched meanwhile.
constexpr int64_t kBlockSteps = 10;
constexpr int64_t kFewPasses = 3;
constexpr int64_t kFewPassesSteps = 5;
constexpr int64_t kUnpackedSteps = 8;      // groups of up to 256 k
constexpr int64_t kPrefetchBytes = 8192;  // ahead of a stream

static_assert(kLanes == kTileRows && kPanelVecs == 2);

// The tiles of up to 32 rows.
struct Left {
  const char* first;
  const char* second;
  int64_t first_bytes, second_bytes;  // from one step to the next
};

// Accumulates num_steps steps of k; prefetches `lines` cache lines a step.
template <bool kTwo>
inline void multiply(const Left& left, const char* right, int64_t num_steps, const char* prefetch,
                     int64_t lines) {
  const char* a = left.first;
  const char* b = left.second;
  finish_stores();
  for (int64_t step = 0; step < num_steps; ++step) {
    for (int64_t i = 0; i < lines; ++i) _mm_prefetch(prefetch + i * 64, _MM_HINT_T0);
    _tile_loadd(6, right, kRightStride);
    _tile_loadd(4, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + 64, kRightStride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_loadd(5, b, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      b += left.second_bytes;
    }
    a += left.first_bytes;
    right += kStepBytes;
    prefetch += lines * 64;
  }
}

template <bool kTwo>
inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool kTwo>
inline void load_tiles(const float* sums) {
  finish_stores();
  _tile_loadd(0, sums, kSumsStride);
  _tile_loadd(1, sums + kLanes, kSumsStride);
  if constexpr (kTwo) {
    _tile_loadd(2, sums + kTileRows * kPanelRows, kSumsStride);
    _tile_loadd(3, sums + kTileRows * kPanelRows + kLanes, kSumsStride);
  }
}

template <bool kTwo>
inline void store_tiles(float* sums) {
  _tile_stored(0, sums, kSumsStride);
  _tile_stored(1, sums + kLanes, kSumsStride);
  if constexpr (kTwo) {
    _tile_stored(2, sums + kTileRows * kPanelRows, kSumsStride);
    _tile_stored(3, sums + kTileRows * kPanelRows + kLanes, kSumsStride);
  }
}

// A k-block of a panel, as bf16.
struct Block {
  const char* right;
  int64_t num_steps, group_steps;  // group_steps 0: no group scales
  const char* scales;              // of the first group
  int64_t scales_stride;
  const float* group_sums;  // of the pass's first row and the block's first group, or null
  int64_t group_sums_stride;
  const char* prefetch;
  int64_t prefetch_lines;  // a step
};

// total += scale * (sums - zero * sum of x), over a group.
inline void add_scaled(const Block& block, int64_t group, const float* sums, int64_t num_rows,
                       bool fresh, float* total) {
  const fp16* halves = reinterpret_cast<const fp16*>(block.scales + group * block.scales_stride);
  for (int v = 0; v < kPanelVecs; ++v) {
    const Vec scale = Vec::load(halves + v * kLanes);
    const bool has_zeros = block.group_sums != nullptr;
    const Vec zero = has_zeros ? Vec::load(halves + kPanelRows + v * kLanes) : Vec::zero();
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t at = row * kPanelRows + v * kLanes;
      Vec sum = Vec::load(sums + at);
      if (has_zeros) {
        sum = fma(zero, Vec::set(-block.group_sums[row * block.group_sums_stride + group]), sum);
      }
      fma(sum, scale, fresh ? Vec::zero() : Vec::load(total + at)).store(total + at);
    }
  }
}

// One pass of up to 32 rows over a block; `sums` are the pass's, continued unless `fresh`.
template <bool kTwo>
void pass(const Left& left, const Block& block, int64_t num_rows, bool fresh, float* sums) {
  if (block.group_steps == 0) {
    if (fresh) {
      zero_tiles<kTwo>();
    } else {
      load_tiles<kTwo>(sums);
    }
    multiply<kTwo>(left, block.right, block.num_steps, block.prefetch, block.prefetch_lines);
    store_tiles<kTwo>(sums);
    return;
  }
  alignas(64) float of_group[kPassRows * kPanelRows];
  for (int64_t step = 0; step < block.num_steps; step += block.group_steps) {
    const Left at{left.first + step * left.first_bytes, left.second + step * left.second_bytes,
                  left.first_bytes, left.second_bytes};
    zero_tiles<kTwo>();
    multiply<kTwo>(at, block.right + step * kStepBytes, block.group_steps,
                   block.prefetch + step * block.prefetch_lines * 64, block.prefetch_lines);
    store_tiles<kTwo>(of_group);
    add_scaled(block, step / block.group_steps, of_group, num_rows, fresh && step == 0, sums);
  }
}

void unpack_block(const PackedLinear& linear, const char* from, const Block& block, char* to) {
  const Unpack unpack = linear.weights == Weights::i8 ? unpack_pairs<PairsFromI8>
                                                      : unpack_pairs<PairsFromI4>;
  const int64_t steps = block.group_steps > 0 ? block.group_steps : block.num_steps;
  for (int64_t step = 0; step < block.num_steps; step += steps) {
    unpack(from, steps * kStepUnits, to + step * kStepBytes);
    from += steps * kStepUnits * linear.unit_bytes + linear.header_bytes;
  }
}

Left left_of(const Task& task, int64_t row, int64_t step) {
  const PreparedInput& x = task.x;
  const auto tile = [&](int64_t first, int64_t& step_bytes) {
    const int64_t rows = x.num_rows - first;
    step_bytes = (rows < kTileRows ? rows : kTileRows) * 64;
    return x.data + first * x.row_bytes + step * step_bytes;
  };
  Left left;
  left.first = tile(row, left.first_bytes);
  left.second = tile(row + kTileRows, left.second_bytes);
  return left;
}

}  // namespace

void run_linear_task(const Task& task) {
  const PackedLinear& linear = *task.linear;
  const bool unpacks = linear.weights != Weights::bf16;
  const int64_t num_steps = linear.padded_K / kTileK;
  const int64_t num_passes = (task.num_rows + kPassRows - 1) / kPassRows;
  const bool streams = num_passes == 1 && !unpacks;
  Block block;
  block.group_steps = linear.group / kTileK;
  block.scales_stride = linear.header_bytes + block.group_steps * kStepUnits * linear.unit_bytes;
  block.group_sums_stride = linear.num_groups();

  const int64_t most_steps = streams                     ? num_steps
                             : unpacks                   ? kUnpackedSteps
                             : num_passes <= kFewPasses ? kFewPassesSteps
                                                         : kBlockSteps;
  const int64_t num_blocks = (num_steps + most_steps - 1) / most_steps;
  int64_t block_steps = (num_steps + num_blocks - 1) / num_blocks;
  if (block.group_steps > 0) {
    block_steps = most_steps / block.group_steps * block.group_steps;
  }

  // With one block, the sums of a pass are finished before the next pass begins.
  const bool once = block_steps >= num_steps;
  alignas(64) float all_sums[kMaxTiledRows * kPanelRows];
  alignas(64) char unpacked[kUnpackedSteps * kStepBytes];
  TileScope tiles;
  for (int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
    const char* data = linear.data + panel * linear.panel_bytes;
    for (int64_t step = 0; step < num_steps; step += block_steps) {
      block.num_steps = num_steps - step < block_steps ? num_steps - step : block_steps;
      const int64_t groups = block.group_steps > 0 ? block.num_steps / block.group_steps : 0;
      const int64_t block_bytes =
          block.num_steps * kStepUnits * linear.unit_bytes + groups * linear.header_bytes;
      block.scales = data;
      block.right = data + linear.header_bytes;
      if (unpacks) {
        unpack_block(linear, block.right, block, unpacked);
        block.right = unpacked;
      }
      const int64_t total_steps = num_passes * block.num_steps;
      block.prefetch_lines = (block_bytes / 64 + total_steps - 1) / total_steps;
      for (int64_t i = 0; i < num_passes; ++i) {
        const int64_t row = task.row_begin + i * kPassRows;
        const int64_t left_rows = task.num_rows - i * kPassRows;
        const int64_t rows = left_rows < kPassRows ? left_rows : kPassRows;
        // Panels are contiguous in memory, so the next block always follows this one.
        const int64_t prefetched = i * block.num_steps * block.prefetch_lines * 64;
        block.prefetch = data + (streams ? kPrefetchBytes : block_bytes + prefetched);
        block.group_sums = linear.has_zeros ? task.x.group_sums + row * linear.num_groups() +
                                                  step / block.group_steps
                                            : nullptr;
        float* sums = all_sums + (once ? 0 : i * kPassRows * kPanelRows);
        tiles.set_rows(static_cast<int>(rows));
        (rows > kTileRows ? pass<true> : pass<false>)(left_of(task, row, step), block, rows,
                                                      step == 0, sums);
        if (step + block.num_steps == num_steps) {
          Task part = task;
          part.row_begin = row;
          part.num_rows = rows;
          apply_epilogue(part, sums, panel);
        }
      }
      data += block_bytes;
    }
  }
}

}  // namespace legato::amx
