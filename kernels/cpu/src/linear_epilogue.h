// Epilogue of a linear layer: row scales, bias, rounding, and the fused residual add or SiLU
// multiply.
//
// Only for *_isa.cpp and *_vnni.cpp files.
#pragma once

#include "elementwise_vec.h"
#include "linear_kernel.h"

namespace legato::LEGATO_ISA {

// sums: [num_rows][kPanelRows].
template <class T, Epilogue kEpilogue>
void store_panel(const Task& task, const float* sums, int64_t panel) {
  const PackedLinear& linear = *task.linear;
  const int64_t lane = panel * kPanelRows;
  const bool scaled = linear.row_scales != nullptr;
  const bool biased = linear.bias != nullptr;
  Vec scales[kPanelVecs];
  Vec biases[kPanelVecs];
  int64_t columns[kPanelVecs];
  int widths[kPanelVecs];
  for (int vec = 0; vec < kPanelVecs; ++vec) {
    if (scaled) scales[vec] = Vec::load(linear.row_scales.get() + lane + vec * kLanes);
    if (biased) biases[vec] = Vec::load(linear.bias.get() + lane + vec * kLanes);
    columns[vec] = linear.column(panel, vec);
    widths[vec] = static_cast<int>(linear.width(panel, vec));
  }
  for (int64_t row = 0; row < task.num_rows; ++row, sums += kPanelRows) {
    Vec values[kPanelVecs];
#pragma GCC unroll 2
    for (int vec = 0; vec < kPanelVecs; ++vec) {
      values[vec] = Vec::load(sums + vec * kLanes);
      if (scaled) values[vec] = values[vec] * scales[vec];
      if (biased) values[vec] = values[vec] + biases[vec];
    }
    // Rounded where separate operations would write to memory.
    if constexpr (kEpilogue == Epilogue::silu_mul) {
      const RowPieces pieces =
          row_pieces(task.row_begin + row, task.ldo, task.out_rows, linear.O / 2);
      (silu(rounded<T>(values[0])) * rounded<T>(values[1]))
          .store(static_cast<T*>(task.out) + pieces.at(panel * kLanes));
      continue;
    }
    const int64_t out_row = (task.row_begin + row) * task.ldo;
    T* out = static_cast<T*>(task.out) + out_row;
#pragma GCC unroll 2
    for (int vec = 0; vec < kPanelVecs; ++vec) {
      if (widths[vec] == 0) continue;
      T* to = out + columns[vec];
      if constexpr (kEpilogue == Epilogue::store) {
        store_lanes(values[vec], to, widths[vec]);
      } else if constexpr (kEpilogue == Epilogue::add) {
        store_lanes(load_lanes(to, widths[vec]) + rounded<T>(values[vec]), to, widths[vec]);
      } else {
        float* floats = static_cast<float*>(task.out) + out_row + columns[vec];
        store_lanes(values[vec], floats, widths[vec]);
      }
    }
  }
}

template <class T>
inline void store_panel(const Task& task, const float* sums, int64_t panel) {
  switch (task.epilogue) {
    case Epilogue::store:
      return store_panel<T, Epilogue::store>(task, sums, panel);
    case Epilogue::store_f32:
      return store_panel<T, Epilogue::store_f32>(task, sums, panel);
    case Epilogue::add:
      return store_panel<T, Epilogue::add>(task, sums, panel);
    case Epilogue::silu_mul:
      return store_panel<T, Epilogue::silu_mul>(task, sums, panel);
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
