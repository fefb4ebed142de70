// From float sums to the output: scale, bias, rounding, and what is fused behind a linear layer.
//
// Only for *_isa.cpp files.
#pragma once

#include "linear_kernel.h"

namespace legato::LEGATO_ISA {

// To the precision of T and back: what a separate operation would have read from memory.
inline Vec rounded(Vec x, const float*) { return x; }
inline Vec rounded(Vec x, const bf16*) {
  alignas(64) bf16 stored[kLanes];
  x.store(stored);
  return Vec::load(stored);
}
inline Vec rounded(Vec x, const fp16*) {
  alignas(64) fp16 stored[kLanes];
  x.store(stored);
  return Vec::load(stored);
}

template <class T>
inline Vec load_some(const T* from, int64_t n) {
  return n == kLanes ? Vec::load(from) : Vec::load(from, static_cast<int>(n));
}

template <class T>
inline void store_some(Vec x, T* to, int64_t n) {
  if (n == kLanes) {
    x.store(to);
  } else {
    x.store(to, static_cast<int>(n));
  }
}

// sums: [num_rows][kSumsStride], registers of panels [panel, panel + num_panels) side by side.
template <class T>
void finish_rows(const Task& task, const float* sums, int64_t panel, int num_panels) {
  const PackedLinear& linear = *task.linear;
  for (int64_t row = 0; row < task.num_rows; ++row) {
    const int64_t out_row = (task.row_begin + row) * task.ldo;
    T* out = static_cast<T*>(task.out) + out_row;
    for (int i = 0; i < num_panels; ++i, sums += kPanelVecs * kLanes) {
      const int64_t packed_row = (panel + i) * kPanelVecs * kLanes;
      Vec values[kPanelVecs];
      for (int vec = 0; vec < kPanelVecs; ++vec) {
        const int64_t lane = packed_row + vec * kLanes;
        values[vec] = Vec::load(sums + vec * kLanes);
        if (linear.row_scales != nullptr) {
          values[vec] = values[vec] * Vec::load(linear.row_scales.get() + lane);
        }
        if (linear.bias != nullptr) values[vec] = values[vec] + Vec::load(linear.bias.get() + lane);
      }
      if (task.finish == Finish::silu_mul) {
        const Vec gate = rounded(values[0], out);
        const Vec up = rounded(values[1], out);
        (silu(gate) * up).store(out + (panel + i) * kLanes);
        continue;
      }
      for (int vec = 0; vec < kPanelVecs; ++vec) {
        const int64_t column = linear.column(panel + i, vec);
        const int64_t width = linear.width(panel + i, vec);
        if (width == 0) continue;
        if (task.finish == Finish::store_f32) {
          store_some(values[vec], static_cast<float*>(task.out) + out_row + column, width);
        } else if (task.finish == Finish::add) {
          const Vec before = load_some(out + column, width);
          store_some(before + rounded(values[vec], out), out + column, width);
        } else {
          store_some(values[vec], out + column, width);
        }
      }
    }
    sums += kSumsStride - num_panels * kPanelVecs * kLanes;
  }
}

}  // namespace legato::LEGATO_ISA
