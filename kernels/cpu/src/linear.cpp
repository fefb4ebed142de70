// Partition of a linear layer into tasks for the thread pool.
#include "linear.h"

#include <algorithm>

#include "linear_layout.h"
#include "pool.h"
#include "scratch.h"

namespace legato {
namespace {

// Large enough to stream, small enough to balance the load.
constexpr int64_t kTaskBytes = 128 << 10;
// Below this many multiplications waking another thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 15;
constexpr int64_t kMaxShare = 8;  // tasks per thread, enough to balance the load
constexpr int64_t kFewTasks = 4;  // the same with AMX, where rows would be split for more

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

PreparedInput prepare(const PackedLinear& linear, const void* x, int64_t ldx, int64_t M) {
  const int64_t x_bytes = size_of(linear.type);
  if (ldx == kTiled) {
    return {static_cast<const char*>(x), linear.K * x_bytes, nullptr, nullptr, nullptr, M};
  }
  const int64_t k_bytes = bytes_of(linear.operand);
  const bool copy = x_bytes != k_bytes || linear.operand_group > 0 ||
                    linear.K != linear.padded_K || linear.permutation || linear.is_tiled;
  if (!copy && !linear.has_zeros) {
    return {static_cast<const char*>(x), ldx * x_bytes, nullptr, nullptr, nullptr, M};
  }
  const int64_t row_bytes = copy ? linear.padded_K * k_bytes : ldx * x_bytes;
  const int64_t num_scales = linear.num_operand_groups();
  const int64_t num_sums = linear.has_zeros ? linear.num_groups() : 0;
  const int64_t num_offsets = linear.operand == Operand::i8 ? num_scales : 0;
  const int64_t copied_bytes = copy ? M * row_bytes : 0;
  char* rows = thread_scratch<PreparedInput>(copied_bytes +
                                             M * (num_scales + num_sums + num_offsets) * 4);
  float* scales = num_scales > 0 ? reinterpret_cast<float*>(rows + copied_bytes) : nullptr;
  float* sums = num_sums > 0
                    ? reinterpret_cast<float*>(rows + copied_bytes) + M * num_scales
                    : nullptr;
  int32_t* offsets = num_offsets > 0 ? reinterpret_cast<int32_t*>(rows + copied_bytes) +
                                           M * (num_scales + num_sums)
                                     : nullptr;
  const auto prepare_some = [&](int64_t index, int) {
    const int64_t first = index * kTiledRowsAtOnce;
    const RawRows raw{static_cast<const char*>(x) + first * ldx * x_bytes, ldx * x_bytes,
                      std::min(kTiledRowsAtOnce, M - first)};
    linear.prepare_rows(linear, raw, {copy ? rows + first * row_bytes : nullptr,
                                      scales == nullptr ? nullptr : scales + first * num_scales,
                                      sums == nullptr ? nullptr : sums + first * num_sums,
                                      offsets == nullptr ? nullptr : offsets + first * num_offsets});
  };
  const int64_t num_tasks = ceil_div(M, kTiledRowsAtOnce);
  if (M * linear.padded_K <= kSerialWork) {
    for (int64_t i = 0; i < num_tasks; ++i) prepare_some(i, 0);
  } else {
    Pool::get().run(num_tasks, prepare_some);
  }
  return {copy ? rows : static_cast<const char*>(x), row_bytes, scales, sums, offsets, M};
}

// Panels per task: about kTaskBytes of weight, minimizing the share of the busiest thread.
int64_t panels_per_task(const PackedLinear& linear, int64_t rows, int64_t num_row_blocks,
                        int threads) {
  if (num_row_blocks > 1 && !linear.has_tiled_tasks()) return 1;
  const int64_t x_bytes = rows * linear.padded_K * bytes_of(linear.operand);
  if (linear.has_tiled_tasks() && (num_row_blocks > 1 || x_bytes > kTiledInputBytes)) {
    return std::clamp<int64_t>(num_row_blocks * linear.num_panels / (threads * kMaxShare), 1,
                               kTiledPanels);
  }
  const int64_t most = std::max<int64_t>(1, kTaskBytes / linear.panel_bytes);
  const int64_t enough = ceil_div(linear.num_panels, threads * kMaxShare);
  int64_t best = 1;
  int64_t best_share = linear.num_panels + 1;
  for (int64_t panels = 1; panels <= std::max(most, enough); ++panels) {
    const int64_t tasks = ceil_div(linear.num_panels, panels);
    const int64_t share = ceil_div(tasks, threads) * panels;
    if (share <= best_share) {
      best = panels;
      best_share = share;
    }
  }
  return best;
}

// Rows per task.
int64_t rows_per_task(const PackedLinear& linear, int64_t M, int threads) {
  int64_t most = linear.is_widened() ? kMaxWidenedRows : kMaxBlockRows;
  int64_t multiple = 1;
  if (linear.has_tiled_tasks()) {
    multiple = 2 * kTiledRowsAtOnce;
    if (linear.is_tiled) {
      most = kMaxTiledRows;
    } else if (linear.group == 0) {  // else sums are read anew for every short group
      most = std::clamp(kTiledInputBytes / linear.padded_K / multiple * multiple, kMaxBlockRows,
                        kMaxTiledRows);
    }
    // Enough tasks, as long as their rows are many.
    while (ceil_div(M, most) * linear.num_panels < kFewTasks * threads &&
           most / 2 >= kMaxBlockRows) {
      most /= 2;
    }
  }
  return ceil_div(ceil_div(M, ceil_div(M, most)), multiple) * multiple;
}

void run(const PackedLinear& linear, const void* x, int64_t ldx, int64_t M, void* out, int64_t ldo,
         Epilogue epilogue) {
  if (M <= 0 || linear.O == 0) return;
  Pool& pool = Pool::get();
  Task whole;
  whole.linear = &linear;
  whole.x = prepare(linear, x, ldx, M);
  whole.epilogue = epilogue;
  whole.out = out;
  whole.ldo = ldo;
  whole.out_rows = M;

  const int64_t rows = rows_per_task(linear, M, pool.size());
  const int64_t num_row_blocks = ceil_div(M, rows);
  const bool serial = M * linear.O * linear.K <= kSerialWork;
  const int64_t panels = serial ? linear.num_panels
                                : panels_per_task(linear, rows, num_row_blocks, pool.size());
  const auto run_one = [&](int64_t index, int) {
    // The rows of one panel follow each other, so a weight is read from memory once.
    const int64_t panel = index / num_row_blocks * panels;
    Task task = whole;
    task.row_begin = index % num_row_blocks * rows;
    task.num_rows = std::min(rows, M - task.row_begin);
    task.panel_begin = panel;
    task.panel_end = std::min(panel + panels, linear.num_panels);
    linear.run_task(task);
  };
  const int64_t num_tasks = num_row_blocks * ceil_div(linear.num_panels, panels);
  // One stream of the weight per thread, where no thread would wait for another's rows.
  num_row_blocks == 1 ? pool.run_in_shares(num_tasks, run_one) : pool.run(num_tasks, run_one);
}

}  // namespace

int64_t in_features(const PackedLinear& linear) { return linear.K; }
int64_t out_features(const PackedLinear& linear) { return linear.O; }
Type activation_type(const PackedLinear& linear) { return linear.type; }
bool linear_can_gate(const PackedLinear& linear) { return linear.interleaves_halves; }
bool linear_takes_tiles(const PackedLinear& linear) {
  return linear.is_tiled && linear.K == linear.padded_K && linear.permutation == nullptr &&
         !linear.has_zeros;
}

void linear_forward(const PackedLinear& linear, const void* x, int64_t ldx, int64_t M, void* out,
                    int64_t ldo) {
  run(linear, x, ldx, M, out, ldo, Epilogue::store);
}

void linear_forward_f32(const PackedLinear& linear, const void* x, int64_t ldx, int64_t M,
                        float* out, int64_t ldo) {
  run(linear, x, ldx, M, out, ldo, Epilogue::store_f32);
}

void linear_add(const PackedLinear& linear, const void* x, int64_t ldx, int64_t M, void* residual,
                int64_t ldr) {
  run(linear, x, ldx, M, residual, ldr, Epilogue::add);
}

void linear_silu_mul(const PackedLinear& linear, const void* x, int64_t ldx, int64_t M, void* out,
                     int64_t ldo) {
  run(linear, x, ldx, M, out, ldo, Epilogue::silu_mul);
}

}  // namespace legato
