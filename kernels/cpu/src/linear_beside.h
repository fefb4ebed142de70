// What a pass of AMX products leaves to be done, and what the next k-block needs: done a little at
// a time beside other products, which leave the core's other units idle.
//
// Only for *_amx.cpp files.
#pragma once

#include "linear_epilogue.h"
#include "linear_unpack.h"

namespace legato::LEGATO_ISA {

constexpr int64_t kStepUnits = kTileK / kUnit;
constexpr int64_t kStepBytes = kStepUnits * PairsFromBf16::kUnitBytes;

// Sums of up to 32 rows whose products are done.
class Finished {
 public:
  // total += scale * (sums - zero * sum of x), of a group. scales: fp16, then zero points if there
  // are x_sums, which has `stride` floats from row to row.
  void scale(const float* sums, const char* scales, const float* x_sums, int64_t stride,
             int64_t num_rows, bool fresh, float* total) {
    sums_ = sums;
    scales_ = reinterpret_cast<const fp16*>(scales);
    x_sums_ = x_sums;
    x_sums_stride_ = stride;
    fresh_ = fresh;
    begin(num_rows, total);
  }
  // The epilogue of part's rows, after they were scaled if that was asked for last.
  void store(const Task& part, int64_t panel, float* total) {
    if (row_ == num_rows_) {
      sums_ = nullptr;
      begin(part.num_rows, total);
    }
    part_ = part;
    panel_ = panel;
    stores_ = true;
  }
  int64_t num_left() const { return num_rows_ - row_; }
  void some(int64_t num_rows) {
    num_rows = num_rows < num_left() ? num_rows : num_left();
    if (sums_ != nullptr) add_scaled(num_rows);
    if (stores_) {
      part_.num_rows = num_rows;
      apply_epilogue(part_, total_ + row_ * kPanelRows, panel_);
      part_.row_begin += num_rows;
    }
    row_ += num_rows;
  }
  void all() {
    if (num_left() > 0) some(num_left());
  }

 private:
  void begin(int64_t num_rows, float* total) {
    row_ = 0;
    num_rows_ = num_rows;
    total_ = total;
    stores_ = false;
  }
  void add_scaled(int64_t num_rows) const {
    // Stores may alias members, which would be read anew after each.
    const float* sums = sums_ + row_ * kPanelRows;
    float* total = total_ + row_ * kPanelRows;
    const int64_t stride = x_sums_stride_;
    const float* x_sums = x_sums_ == nullptr ? nullptr : x_sums_ + row_ * stride;
    const bool fresh = fresh_;
    const Vec scales[kPanelVecs] = {Vec::load(scales_), Vec::load(scales_ + kLanes)};
    Vec zeros[kPanelVecs] = {Vec::zero(), Vec::zero()};
    if (x_sums != nullptr) {
      for (int v = 0; v < kPanelVecs; ++v) zeros[v] = Vec::load(scales_ + kPanelRows + v * kLanes);
    }
    for (int64_t row = 0; row < num_rows; ++row) {
      const Vec of_x = x_sums != nullptr ? Vec::set(-x_sums[row * stride]) : Vec::zero();
      for (int v = 0; v < kPanelVecs; ++v) {
        const int64_t at = row * kPanelRows + v * kLanes;
        Vec sum = Vec::load(sums + at);
        if (x_sums != nullptr) sum = fma(zeros[v], of_x, sum);
        fma(sum, scales[v], fresh ? Vec::zero() : Vec::load(total + at)).store(total + at);
      }
    }
  }

  int64_t row_ = 0, num_rows_ = 0;
  const float* sums_ = nullptr;  // null: nothing to scale
  const fp16* scales_ = nullptr;
  const float* x_sums_ = nullptr;
  int64_t x_sums_stride_ = 0;
  bool fresh_ = false;
  float* total_ = nullptr;
  bool stores_ = false;
  Task part_;
  int64_t panel_ = 0;
};

// The next k-block's weights, on their way to bf16.
class Unpacking {
 public:
  explicit Unpacking(const PackedLinear& linear)
      : unpack_(linear.weights == Weights::i8 ? unpack_pairs<PairsFromI8>
                                              : unpack_pairs<PairsFromI4>),
        step_bytes_(kStepUnits * linear.unit_bytes),
        header_bytes_(linear.header_bytes),
        group_steps_(linear.group / kTileK) {}

  void begin(const char* from, int64_t num_steps, char* to) {
    from_ = from;
    to_ = to;
    step_ = 0;
    next_group_ = 0;
    num_steps_ = num_steps;
  }
  bool is_done() const { return step_ == num_steps_; }
  void one() {
    if (step_ == next_group_) {
      from_ += header_bytes_;
      next_group_ += group_steps_;
    }
    unpack_(from_, kStepUnits, to_ + step_ * kStepBytes);
    from_ += step_bytes_;
    ++step_;
  }
  void all() {
    while (!is_done()) one();
  }

 private:
  const Unpack unpack_;
  const int64_t step_bytes_, header_bytes_, group_steps_;
  const char* from_ = nullptr;
  char* to_ = nullptr;
  int64_t step_ = 0, num_steps_ = 0, next_group_ = 0;
};

}  // namespace legato::LEGATO_ISA
