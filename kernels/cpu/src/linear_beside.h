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

// The products of one group of k. add(): total += scale * (sums - zero * sum of x).
struct GroupOfFloats {
  const float* sums;
  const char* scales;   // fp16, then zero points if there are x_sums
  const float* x_sums;  // or null
  int64_t x_stride;     // of what belongs to x, from row to row

  void add(int64_t first_row, int64_t num_rows, bool fresh, float* total) const {
    const fp16* halves = reinterpret_cast<const fp16*>(scales);
    const Vec scale[kPanelVecs] = {Vec::load(halves), Vec::load(halves + kLanes)};
    Vec zeros[kPanelVecs] = {Vec::zero(), Vec::zero()};
    if (x_sums != nullptr) {
      for (int v = 0; v < kPanelVecs; ++v) zeros[v] = Vec::load(halves + kPanelRows + v * kLanes);
    }
    // Stores may alias members, which would be read anew after each.
    const int64_t stride = x_stride;
    const float* from = sums + first_row * kPanelRows;
    const float* of_x = x_sums == nullptr ? nullptr : x_sums + first_row * stride;
    total += first_row * kPanelRows;
    for (int64_t row = 0; row < num_rows; ++row) {
      const Vec x_sum = of_x != nullptr ? Vec::set(-of_x[row * stride]) : Vec::zero();
      for (int v = 0; v < kPanelVecs; ++v) {
        const int64_t at = row * kPanelRows + v * kLanes;
        Vec sum = Vec::load(from + at);
        if (of_x != nullptr) sum = fma(zeros[v], x_sum, sum);
        fma(sum, scale[v], fresh ? Vec::zero() : Vec::load(total + at)).store(total + at);
      }
    }
  }
};

// The same of whole numbers, with the operations of linear_integer_kernel.h.
struct GroupOfBytes {
  const int32_t* sums;
  const char* scales;   // as above, or null: one scale per output, in the epilogue
  const float* x_sums;  // or null
  const float* x_scales;
  const int32_t* x_offsets;  // added to the sums
  int64_t x_stride;

  void add(int64_t first_row, int64_t num_rows, bool fresh, float* total) const {
    Vec scale[kPanelVecs] = {Vec::zero(), Vec::zero()}, zeros[kPanelVecs] = {scale[0], scale[1]};
    for (int v = 0; v < kPanelVecs && scales != nullptr; ++v) {
      const fp16* halves = reinterpret_cast<const fp16*>(scales) + v * kLanes;
      scale[v] = Vec::load(halves);
      if (x_sums != nullptr) zeros[v] = Vec::load(halves + kPanelRows);
    }
    const int64_t stride = x_stride;
    const int32_t* from = sums + first_row * kPanelRows;
    const int32_t* offsets = x_offsets + first_row * stride;
    const float* factors = x_scales + first_row * stride;
    const float* of_x = x_sums == nullptr ? nullptr : x_sums + first_row * stride;
    const bool scaled = scales != nullptr;
    total += first_row * kPanelRows;
    for (int64_t row = 0; row < num_rows; ++row) {
      const __m512i offset = _mm512_set1_epi32(offsets[row * stride]);
      const Vec factor = Vec::set(factors[row * stride]);
      for (int v = 0; v < kPanelVecs; ++v) {
        const int64_t at = row * kPanelRows + v * kLanes;
        const __m512i whole = _mm512_add_epi32(_mm512_load_si512(from + at), offset);
        Vec sum{_mm512_cvtepi32_ps(whole)};
        const Vec before = fresh ? Vec::zero() : Vec::load(total + at);
        if (!scaled) {
          fma(sum, factor, before).store(total + at);
          continue;
        }
        sum = sum * factor;
        if (of_x != nullptr) sum = fma(zeros[v], Vec::set(-of_x[row * stride]), sum);
        fma(sum, scale[v], before).store(total + at);
      }
    }
  }
};

// Sums of up to 32 rows whose products are done.
template <class Group>
class Finished {
 public:
  // Adds the group's sums to total, which they begin where `fresh`.
  void scale(const Group& group, int64_t num_rows, bool fresh, float* total) {
    group_ = group;
    scales_ = true;
    fresh_ = fresh;
    begin(num_rows, total);
  }
  // The epilogue of part's rows, after they were scaled if that was asked for last.
  void store(const Task& part, int64_t panel, float* total) {
    if (row_ == num_rows_) {
      scales_ = false;
      begin(part.num_rows, total);
    }
    part_ = part;
    panel_ = panel;
    stores_ = true;
  }
  int64_t num_left() const { return num_rows_ - row_; }
  void some(int64_t num_rows) {
    num_rows = num_rows < num_left() ? num_rows : num_left();
    if (scales_) group_.add(row_, num_rows, fresh_, total_);
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

  int64_t row_ = 0, num_rows_ = 0;
  Group group_{};
  bool scales_ = false, fresh_ = false, stores_ = false;
  float* total_ = nullptr;
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
