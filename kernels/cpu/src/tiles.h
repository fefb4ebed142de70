// Rows of bf16 as AMX reads them: sixteen at a time (the last ones may be fewer) in pieces of 32
// values, [width / 32][rows][32]. As many bytes as row by row, and the same ones for a single row.
#pragma once

#include <cstdint>

namespace legato {

constexpr int64_t kTiled = -1;  // in the place of a row stride
constexpr int64_t kTiledRowsAtOnce = 16;
constexpr int64_t kPieceValues = 32;

// Where the values of one row lie, in elements from the first row's first.
struct RowPieces {
  int64_t first;
  int64_t stride;  // from piece to piece

  int64_t at(int64_t i) const { return first + i / kPieceValues * stride + i % kPieceValues; }
};

// stride: of rows, or kTiled; then width is a multiple of 32.
inline RowPieces row_pieces(int64_t row, int64_t stride, int64_t num_rows, int64_t width) {
  if (stride != kTiled) return {row * stride, kPieceValues};
  const int64_t in_tile = row % kTiledRowsAtOnce, first = row - in_tile;
  const int64_t left = num_rows - first;
  const int64_t rows = left < kTiledRowsAtOnce ? left : kTiledRowsAtOnce;
  return {first * width + in_tile * kPieceValues, rows * kPieceValues};
}

}  // namespace legato
