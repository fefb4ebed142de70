// Epilogue of a linear layer: row scales, bias, rounding, and the fused residual add or SiLU
// multiply.
//
// Only for *_isa.cpp files.
#pragma once

#include "linear_kernel.h"

namespace legato::LEGATO_ISA {

// Rounded to T and widened again: what a separate operation would have read from memory.
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

// sums: [num_rows][kPanelRows].
template <class T>
void store_panel(const Task& task, const float* sums, int64_t panel) {
  const PackedLinear& linear = *task.linear;
  const int64_t lane = panel * kPanelRows;
  Vec scales[kPanelVecs];
  Vec biases[kPanelVecs];
  int64_t columns[kPanelVecs];
  int64_t widths[kPanelVecs];
  for (int vec = 0; vec < kPanelVecs; ++vec) {
    if (linear.row_scales) scales[vec] = Vec::load(linear.row_scales.get() + lane + vec * kLanes);
    if (linear.bias) biases[vec] = Vec::load(linear.bias.get() + lane + vec * kLanes);
    columns[vec] = linear.column(panel, vec);
    widths[vec] = linear.width(panel, vec);
  }
  const bool scaled = linear.row_scales != nullptr;
  const bool biased = linear.bias != nullptr;
  const Epilogue epilogue = task.epilogue;
  for (int64_t row = 0; row < task.num_rows; ++row, sums += kPanelRows) {
    const int64_t out_row = (task.row_begin + row) * task.ldo;
    T* out = static_cast<T*>(task.out) + out_row;
    Vec values[kPanelVecs];
    for (int vec = 0; vec < kPanelVecs; ++vec) {
      values[vec] = Vec::load(sums + vec * kLanes);
      if (scaled) values[vec] = values[vec] * scales[vec];
      if (biased) values[vec] = values[vec] + biases[vec];
    }
    if (epilogue == Epilogue::silu_mul) {
      const Vec gate = rounded(values[0], out);
      const Vec up = rounded(values[1], out);
      (silu(gate) * up).store(out + panel * kLanes);
      continue;
    }
    for (int vec = 0; vec < kPanelVecs; ++vec) {
      if (widths[vec] == 0) continue;
      T* to = out + columns[vec];
      if (epilogue == Epilogue::store) {
        store_some(values[vec], to, widths[vec]);
      } else if (epilogue == Epilogue::add) {
        store_some(load_some(to, widths[vec]) + rounded(values[vec], out), to, widths[vec]);
      } else {
        float* floats = static_cast<float*>(task.out) + out_row + columns[vec];
        store_some(values[vec], floats, widths[vec]);
      }
    }
  }
}

// Of whatever type the task writes.
inline void apply_epilogue(const Task& task, const float* sums, int64_t panel) {
  switch (task.linear->type) {
    case Type::f32:
      return store_panel<float>(task, sums, panel);
    case Type::bf16:
      return store_panel<bf16>(task, sums, panel);
    case Type::f16:
      return store_panel<fp16>(task, sums, panel);
  }
}

}  // namespace legato::LEGATO_ISA
