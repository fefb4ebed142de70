// One task of a linear layer on AMX tiles: some rows of x times some panels of the weight.
//
// A panel's layout (pairs of k, 32 outputs) is that of two right-hand tiles side by side. Up to 32
// rows pass over a k-block of a panel with their accumulators in four tiles; the k-block stays in
// the caches while more rows follow. Products of tiles leave the core's other units idle, so what
// else there is to do is done between them, a little at each step of k: the scaling, rounding and
// storing of finished sums, and the unpacking and prefetching of the next k-block.
#include "amx.h"
#include "linear_beside.h"
#include "scratch.h"

namespace legato::amx {
namespace {

constexpr int64_t kPassRows = 2 * kTileRows;
constexpr int64_t kPassSums = kPassRows * kPanelRows;
constexpr int64_t kRightStride = kPanelVecs * 64;
constexpr int64_t kSumsStride = kPanelRows * 4;
// Most steps of a k-block, measured. It stays in the L1 cache, through which the left tiles of many
// passes only stream; of one pass, it leaves room there for the block that is unpacked meanwhile.
constexpr int64_t kBlockSteps = 18;
constexpr int64_t kOnePassUnpackedSteps = 8;
constexpr int64_t kScaledSteps = 4;       // where smaller groups have scales of their own
constexpr int64_t kPrefetchBytes = 8192;  // ahead of a stream

static_assert(kLanes == kTileRows && kPanelVecs == 2);

// The tiles of up to 32 rows.
struct Left {
  const char* first;
  const char* second;
  int64_t first_bytes, second_bytes;  // from one step to the next
};

// A k-block of a panel. As many blocks make a slab as x of all rows stays in the L2 cache for, while
// one panel after the other passes over it.
struct Block {
  int64_t panel, first_step, num_steps;
  const char* data;   // as it is packed, with a header before each group
  const char* right;  // as bf16
};

// A task under way.
class Run {
 public:
  explicit Run(const Task& task)
      : task_(task),
        linear_(*task.linear),
        unpacks_(linear_.weights != Weights::bf16),
        num_steps_(linear_.padded_K / kTileK),
        num_passes_((task.num_rows + kPassRows - 1) / kPassRows),
        streams_(num_passes_ == 1 && !unpacks_),
        group_steps_(linear_.group / kTileK),
        unpacking_(linear_) {
    const int64_t most = streams_            ? num_steps_
                         : num_passes_ == 1 ? kOnePassUnpackedSteps
                                            : kBlockSteps;
    const auto even = [&](int64_t at_most) {
      const int64_t num = (num_steps_ + at_most - 1) / at_most;
      return (num_steps_ + num - 1) / num;
    };
    block_steps_ = even(most);
    if (group_steps_ > 0) {
      block_steps_ = group_steps_ < kScaledSteps ? kScaledSteps / group_steps_ * group_steps_
                                                 : group_steps_;
    }
    const int64_t fitting = kTiledInputBytes / (task.num_rows * kTileK * 2);
    slab_steps_ = fitting >= num_steps_ || streams_ ? num_steps_
                  : fitting <= block_steps_         ? block_steps_
                                                    : fitting / block_steps_ * block_steps_;
    const int64_t panels = slab_steps_ < num_steps_ ? task.panel_end - task.panel_begin : 1;
    sums_ = reinterpret_cast<float*>(thread_scratch<Run>(panels * num_passes_ * kPassSums * 4));
    const int64_t steps = group_steps_ > 0 ? group_steps_ : block_steps_;
    finished_rows_ = (kPassRows + steps - 1) / steps;
    once_ = block_steps_ >= num_steps_;
  }

  void all() {
    Block block = block_at(task_.panel_begin, 0);
    if (unpacks_) {
      unpacking_.begin(block.data, block.num_steps, unpacked_[0]);
      unpacking_.all();
    }
    for (int parity = 0; block.num_steps > 0; parity ^= 1) {
      const Block next = after(block);
      block.right = unpacks_ ? unpacked_[parity] : block.data;
      if (unpacks_) {
        unpacking_.begin(next.data, next.num_steps, unpacked_[parity ^ 1]);
      }
      passes(block, next);
      unpacking_.all();
      block = next;
    }
    finished_.all();
  }

 private:
  int64_t bytes_of(int64_t num_steps) const {
    const int64_t groups = group_steps_ > 0 ? num_steps / group_steps_ : 0;
    return num_steps * kStepUnits * linear_.unit_bytes + groups * linear_.header_bytes;
  }
  // Without steps behind the last slab.
  Block block_at(int64_t panel, int64_t step) const {
    const int64_t left = num_steps_ - step;
    return {panel, step, left < block_steps_ ? left : block_steps_,
            linear_.data + panel * linear_.panel_bytes + bytes_of(step), nullptr};
  }
  Block after(const Block& block) const {
    const int64_t slab = block.first_step / slab_steps_ * slab_steps_;
    const int64_t step = block.first_step + block.num_steps;
    if (step < num_steps_ && step < slab + slab_steps_) return block_at(block.panel, step);
    if (block.panel + 1 < task_.panel_end) return block_at(block.panel + 1, slab);
    return block_at(task_.panel_begin, step);
  }

  void passes(const Block& block, const Block& next) {
    const int64_t total_steps = num_passes_ * block.num_steps;
    // What is unpacked beside this block has been fetched beside the last one.
    const Block fetched = unpacks_ ? after(next) : next;
    const int64_t num_bytes = bytes_of(streams_ ? block.num_steps : fetched.num_steps);
    prefetch_lines_ = (num_bytes / 64 + total_steps - 1) / total_steps;
    prefetch_ = streams_ ? block.data + kPrefetchBytes : fetched.data;
    float* of_panel = sums_;
    if (slab_steps_ < num_steps_) {
      of_panel += (block.panel - task_.panel_begin) * num_passes_ * kPassSums;
    }
    for (int64_t i = 0; i < num_passes_; ++i) {
      Task part = task_;
      part.row_begin += i * kPassRows;
      part.num_rows = task_.num_rows - i * kPassRows;
      part.num_rows = part.num_rows < kPassRows ? part.num_rows : kPassRows;
      float* sums = of_panel + (once_ ? 0 : i * kPassSums);
      tiles_.set_rows(static_cast<int>(part.num_rows));
      const auto pass = num_passes_ == 1
                            ? (part.num_rows > kTileRows ? &Run::pass<true, false>
                                                         : &Run::pass<false, false>)
                            : (part.num_rows > kTileRows ? &Run::pass<true, true>
                                                         : &Run::pass<false, true>);
      (this->*pass)(part, block, sums);
      if (block.first_step + block.num_steps == num_steps_) {
        finished_.store(part, block.panel, sums);
      }
    }
  }

  // One pass of up to 32 rows over a block; `sums` are the pass's. kStreams: the left tiles are not
  // read again soon.
  template <bool kTwo, bool kStreams>
  void pass(const Task& part, const Block& block, float* sums) {
    const bool fresh = block.first_step == 0;
    Left left = left_of(part.row_begin, block.first_step);
    if (group_steps_ == 0) {
      fresh ? zero_tiles<kTwo>() : load_tiles<kTwo>(sums);
      multiply<kTwo, kStreams>(left, block.right, block.num_steps);
      store_tiles<kTwo>(sums);
      return;
    }
    const int64_t group_bytes =
        linear_.header_bytes + group_steps_ * kStepUnits * linear_.unit_bytes;
    int64_t group = block.first_step / group_steps_;
    const char* scales = block.data;
    for (int64_t step = 0; step < block.num_steps; step += group_steps_) {
      zero_tiles<kTwo>();
      multiply<kTwo, kStreams>(left, block.right + step * kStepBytes, group_steps_);
      store_tiles<kTwo>(of_group_);
      const float* x_sums = linear_.has_zeros
                                ? task_.x.group_sums + part.row_begin * linear_.num_groups() + group
                                : nullptr;
      finished_.scale({of_group_, scales, x_sums, linear_.num_groups()}, part.num_rows,
                      fresh && step == 0, sums);
      left.first += group_steps_ * left.first_bytes;
      left.second += group_steps_ * left.second_bytes;
      scales += group_bytes;
      ++group;
    }
  }

  // Accumulates num_steps steps of k, and finishes the sums of the products before.
  template <bool kTwo, bool kStreams>
  void multiply(const Left& left, const char* right, int64_t num_steps) {
    const char* a = left.first;
    const char* b = left.second;
    const int64_t lines = prefetch_lines_;
    const char* prefetch = prefetch_;
    prefetch_ += num_steps * lines * 64;
    finish_stores();
    for (int64_t step = 0; step < num_steps; ++step) {
      for (int64_t i = 0; i < lines; ++i) {
        if constexpr (kStreams) {
          _mm_prefetch(prefetch + i * 64, _MM_HINT_T1);
        } else {
          _mm_prefetch(prefetch + i * 64, _MM_HINT_T0);
        }
      }
      prefetch += lines * 64;
      _tile_loadd(6, right, kRightStride);
      if constexpr (kStreams) {
        _tile_stream_loadd(4, a, 64);
      } else {
        _tile_loadd(4, a, 64);
      }
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, right + 64, kRightStride);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTwo) {
        if constexpr (kStreams) {
          _tile_stream_loadd(5, b, 64);
        } else {
          _tile_loadd(5, b, 64);
        }
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        b += left.second_bytes;
      }
      a += left.first_bytes;
      right += kStepBytes;
      if (finished_.num_left() > 0) finished_.some(finished_rows_);
      if (!unpacking_.is_done()) unpacking_.one();
    }
    finished_.all();
  }

  template <bool kTwo>
  static void zero_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }

  template <bool kTwo>
  static void load_tiles(const float* sums) {
    finish_stores();
    _tile_loadd(0, sums, kSumsStride);
    _tile_loadd(1, sums + kLanes, kSumsStride);
    if constexpr (kTwo) {
      _tile_loadd(2, sums + kTileRows * kPanelRows, kSumsStride);
      _tile_loadd(3, sums + kTileRows * kPanelRows + kLanes, kSumsStride);
    }
  }

  template <bool kTwo>
  static void store_tiles(float* sums) {
    _tile_stored(0, sums, kSumsStride);
    _tile_stored(1, sums + kLanes, kSumsStride);
    if constexpr (kTwo) {
      _tile_stored(2, sums + kTileRows * kPanelRows, kSumsStride);
      _tile_stored(3, sums + kTileRows * kPanelRows + kLanes, kSumsStride);
    }
  }

  Left left_of(int64_t row, int64_t step) const {
    const PreparedInput& x = task_.x;
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

  const Task& task_;
  const PackedLinear& linear_;
  const bool unpacks_;
  const int64_t num_steps_, num_passes_;
  const bool streams_;
  const int64_t group_steps_;  // 0: no group scales
  int64_t block_steps_, slab_steps_;
  int64_t finished_rows_;  // a step
  bool once_;  // one block: a pass's sums are finished before the next one's are stored
  const char* prefetch_ = nullptr;
  int64_t prefetch_lines_ = 0;  // a step
  float* sums_;  // of the task's passes, where there are several slabs of each panel
  Finished<GroupOfFloats> finished_;
  Unpacking unpacking_;
  TileScope tiles_;
  alignas(64) float of_group_[kPassSums];
  alignas(64) char unpacked_[2][kBlockSteps * kStepBytes];
  static_assert(kMaxGroup <= kBlockSteps * kTileK);
};

}  // namespace

void run_linear_task(const Task& task) { Run(task).all(); }

}  // namespace legato::amx
