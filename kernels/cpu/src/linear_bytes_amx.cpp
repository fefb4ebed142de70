// One task of a linear layer whose x is rounded to bytes, on AMX tiles; for more rows than a
// micro-kernel of linear_integer_kernel.h takes, of which it gives the bits: integers.
//
// A panel's layout (fours of k, 32 outputs) is that of two right-hand tiles side by side. Up to 32
// rows of x, read in place, pass over one group of k of a panel at a time; scaling, rounding,
// storing and the unpacking of the next group are done beside the products of the passes that follow.
#include "amx.h"
#include "linear_beside.h"
#include "linear_integer_kernel.h"
#include "scratch.h"

namespace legato {
namespace avx512_bf16 {
void run_linear_task(const Task& task);
}

namespace amx {
namespace {

constexpr int64_t kPassRows = 2 * kTileRows;
constexpr int64_t kPassSums = kPassRows * kPanelRows;
constexpr int64_t kQuadBytes = 4 * kPanelRows;  // of four k of a panel
constexpr int64_t kSumsStride = kPanelRows * 4;
constexpr int64_t kMaxStep = 64;  // bytes of a row of a tile
constexpr int64_t kPrefetchBytes = 8192;

// Groups are cut into steps of equal length.
int64_t step_of(int64_t group) {
  int64_t step = kMaxStep;
  while (group % step != 0) step -= kUnit;
  return step;
}

class BytesRun {
 public:
  explicit BytesRun(const Task& task)
      : task_(task),
        linear_(*task.linear),
        group_(linear_.operand_group),
        step_(step_of(group_)),
        num_groups_(linear_.num_operand_groups()),
        num_passes_((task.num_rows + kPassRows - 1) / kPassRows),
        group_bytes_(linear_.header_bytes + group_ / kUnit * linear_.unit_bytes),
        unpacks_(linear_.weights == Weights::i4),
        once_(num_groups_ == 1),
        unpacking_(linear_, step_, group_) {
    sums_ = reinterpret_cast<float*>(
        thread_scratch<BytesRun>((once_ ? 1 : num_passes_) * kPassSums * 4));
    finished_rows_ = (kPassRows * step_ + group_ - 1) / group_;
  }

  void all() {
    const int64_t num_blocks = (task_.panel_end - task_.panel_begin) * num_groups_;
    const char* data = linear_.data + task_.panel_begin * linear_.panel_bytes;
    int64_t panel = task_.panel_begin, group = 0;
    if (unpacks_) {
      unpacking_.begin(data, unpacked_[0]);
      unpacking_.all();
    }
    for (int64_t i = 0; i < num_blocks; ++i, data += group_bytes_) {
      if (unpacks_ && i + 1 < num_blocks) unpacking_.begin(data + group_bytes_, unpacked_[~i & 1]);
      passes(panel, group, data, unpacks_ ? unpacked_[i & 1] : data + linear_.header_bytes);
      unpacking_.all();
      if (++group == num_groups_) {
        group = 0;
        ++panel;
      }
    }
    finished_.all();
  }

 private:
  // A group of the next bytes, from nibbles; nothing to do for weights that are bytes.
  class Nibbles {
   public:
    Nibbles(const PackedLinear& linear, int64_t step, int64_t group)
        : units_(step / kUnit), num_steps_(group / step), header_bytes_(linear.header_bytes) {}
    void begin(const char* from, char* to) {
      from_ = from + header_bytes_;
      to_ = to;
      left_ = num_steps_;
    }
    bool is_done() const { return left_ == 0; }
    void one() {
      unpack_integers<BytesFromI4>(from_, units_, to_);
      from_ += units_ * BytesFromI4::kUnitBytes;
      to_ += units_ * BytesFromI8::kUnitBytes;
      --left_;
    }
    void all() {
      while (!is_done()) one();
    }

   private:
    const int64_t units_, num_steps_, header_bytes_;
    const char* from_ = nullptr;
    char* to_ = nullptr;
    int64_t left_ = 0;
  };

  void passes(int64_t panel, int64_t group, const char* data, const char* right) {
    const int64_t total_steps = num_passes_ * (group_ / step_);
    prefetch_lines_ = (group_bytes_ / 64 + total_steps - 1) / total_steps;
    prefetch_ = num_passes_ == 1 ? data + kPrefetchBytes : data + (unpacks_ ? 2 : 1) * group_bytes_;
    const PreparedInput& x = task_.x;
    for (int64_t i = 0; i < num_passes_; ++i) {
      Task part = task_;
      part.row_begin += i * kPassRows;
      part.num_rows = task_.num_rows - i * kPassRows;
      part.num_rows = part.num_rows < kPassRows ? part.num_rows : kPassRows;
      const char* left = x.data + part.row_begin * x.row_bytes + group * group_;
      tiles_.set_rows(static_cast<int>(part.num_rows), static_cast<int>(step_ / 4));
      if (part.num_rows > kTileRows) {
        multiply<true>(left, right);
      } else {
        multiply<false>(left, right);
      }
      const int64_t at = part.row_begin * num_groups_ + group;
      float* sums = sums_ + (once_ ? 0 : i * kPassSums);
      finished_.scale({of_group_, linear_.group > 0 ? data : nullptr,
                       linear_.has_zeros ? x.group_sums + at : nullptr, x.scales + at,
                       x.offsets + at, num_groups_},
                      part.num_rows, group == 0, sums);
      if (group + 1 == num_groups_) finished_.store(part, panel, sums);
    }
  }

  // A group's sums, while what the products before left is finished.
  template <bool kTwo>
  void multiply(const char* left, const char* right) {
    const int64_t stride = task_.x.row_bytes, lines = prefetch_lines_;
    const int64_t right_bytes = step_ / 4 * kQuadBytes;
    const char* second = left + kTileRows * stride;
    const char* const end = left + group_;
    const char* prefetch = prefetch_;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    finish_stores();
    for (; left < end; left += step_, second += step_, right += right_bytes) {
      for (int64_t i = 0; i < lines; ++i) _mm_prefetch(prefetch + i * 64, _MM_HINT_T0);
      prefetch += lines * 64;
      _tile_loadd(6, right, kQuadBytes);
      _tile_stream_loadd(4, left, stride);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(7, right + 64, kQuadBytes);
      _tile_dpbsud(1, 4, 7);
      if constexpr (kTwo) {
        _tile_stream_loadd(5, second, stride);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
      if (finished_.num_left() > 0) finished_.some(finished_rows_);
      if (!unpacking_.is_done()) unpacking_.one();
    }
    prefetch_ = prefetch;
    finished_.all();
    _tile_stored(0, of_group_, kSumsStride);
    _tile_stored(1, of_group_ + kLanes, kSumsStride);
    if constexpr (kTwo) {
      _tile_stored(2, of_group_ + kTileRows * kPanelRows, kSumsStride);
      _tile_stored(3, of_group_ + kTileRows * kPanelRows + kLanes, kSumsStride);
    }
  }

  const Task& task_;
  const PackedLinear& linear_;
  const int64_t group_, step_;
  const int64_t num_groups_, num_passes_, group_bytes_;
  const bool unpacks_;
  const bool once_;  // one group: a pass's sums are finished before the next one's are stored
  int64_t finished_rows_;  // a step
  const char* prefetch_ = nullptr;
  int64_t prefetch_lines_ = 0;  // a step
  float* sums_;  // of the task's passes
  Finished<GroupOfBytes> finished_;
  Nibbles unpacking_;
  TileScope tiles_;
  alignas(64) int32_t of_group_[kPassSums];
  alignas(64) char unpacked_[2][kMaxByteGroup * kPanelRows];
};

}  // namespace

void run_bytes_task(const Task& task) {
  if (task.num_rows <= kKernelRows) {
    avx512_bf16::run_linear_task(task);
  } else {
    BytesRun(task).all();
  }
}

}  // namespace amx
}  // namespace legato
