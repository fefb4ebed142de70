// Tiles of Intel AMX: 16 rows of 64 bytes, and the product of tiles of bf16.
//
// Only for *_amx.cpp files. Registers 0 to 3 accumulate (two tiles of rows by two of columns), 4
// and 5 hold rows of the left, 6 and 7 pairs of k of the right. The instruction adds its products
// in an order that depends on k alone: a row has the same bits whatever rows lie beside it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace legato::LEGATO_ISA {

constexpr int kTileRows = 16;

// To be called between stores and the tile loads that read them: GCC's intrinsics do not tell the
// compiler what memory they read.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// Configures the tiles of this thread for some rows, and releases them at the end: tiles in use
// make every switch of threads dearer.
class TileScope {
 public:
  TileScope() = default;
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
  ~TileScope() {
    if (num_rows_ >= 0) _tile_release();
  }

  // num_rows: of both left tiles, at most 32. pairs: of k, in a step, at most 16.
  void set_rows(int num_rows, int pairs = 16) {
    if (num_rows == num_rows_ && pairs == pairs_) return;
    const auto first = static_cast<uint8_t>(num_rows < kTileRows ? num_rows : kTileRows);
    const auto second = static_cast<uint8_t>(num_rows > kTileRows ? num_rows - kTileRows : 1);
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config{};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_left = tile == 4 || tile == 5, is_right = tile >= 6;
      config.row_bytes[tile] = static_cast<uint16_t>(is_left ? 4 * pairs : 64);
      const bool is_second = tile == 2 || tile == 3 || tile == 5;
      config.rows[tile] = is_right ? static_cast<uint8_t>(pairs) : is_second ? second : first;
    }
    __asm__ volatile("" : : "r"(&config) : "memory");  // see finish_stores
    _tile_loadconfig(&config);
    num_rows_ = num_rows;
    pairs_ = pairs;
  }

 private:
  int num_rows_ = -1;
  int pairs_ = 0;
};

}  // namespace legato::LEGATO_ISA
