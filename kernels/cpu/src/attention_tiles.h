// The products of attention on AMX tiles: 16 query rows at a time.
//
// Only for *_amx.cpp files. The cache holds K as [feature pair][token] and V as
// [token pair][feature], which is how a right-hand tile is laid out: both are read in place.
#pragma once

#include <cstring>

#include "amx.h"
#include "attention_kernel.h"
#include "attention_product.h"

namespace legato::LEGATO_ISA {

constexpr int kTilePairs = 16;               // feature pairs of K in a tile
constexpr int kValuePairs = kTile / 2;       // token pairs of V in a tile
constexpr int kTileBytes = kTileRows * 64;

inline void prefetch_lines(const uint8_t* from, int num_lines) {
  for (int i = 0; i < num_lines; ++i) _mm_prefetch(from + i * 64, _MM_HINT_T0);
}

// scores[row][token] of up to 16 rows and kNumTiles tiles of K. `words`: of a query row, a multiple
// of 16. Prefetches as many bytes of `values`, unless null, as it reads of `keys`.
template <int kNumTiles>
inline void multiply_keys(const uint32_t* query, int words, const uint8_t* const* keys,
                          const uint8_t* const* values, float* scores) {
  finish_stores();
  _tile_zero(0);
  if constexpr (kNumTiles > 1) _tile_zero(1);
  if constexpr (kNumTiles > 2) _tile_zero(2);
  if constexpr (kNumTiles > 3) _tile_zero(3);
  for (int word = 0; word < words; word += kTilePairs) {
    const int at = word * 64;
    _tile_loadd(4, query + word, words * 4);
    _tile_loadd(6, keys[0] + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kNumTiles > 1) {
      _tile_loadd(7, keys[1] + at, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kNumTiles > 2) {
      _tile_loadd(6, keys[2] + at, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kNumTiles > 3) {
      _tile_loadd(7, keys[3] + at, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
    for (int i = 0; values != nullptr && i < kNumTiles; ++i) prefetch_lines(values[i] + at, 16);
  }
  _tile_stored(0, scores, kScoreStride * 4);
  if constexpr (kNumTiles > 1) _tile_stored(1, scores + kTile, kScoreStride * 4);
  if constexpr (kNumTiles > 2) _tile_stored(2, scores + 2 * kTile, kScoreStride * 4);
  if constexpr (kNumTiles > 3) _tile_stored(3, scores + 3 * kTile, kScoreStride * 4);
}

// Adds the weights of one tile of V times kNumColumns groups of 16 features.
template <int kNumColumns>
inline void multiply_values(const uint32_t* weights, const uint8_t* values, int64_t row_bytes) {
  finish_stores();
  _tile_loadd(4, weights, kScoreStride * 4);
  _tile_loadd(6, values, row_bytes);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kNumColumns > 1) {
    _tile_loadd(7, values + 64, row_bytes);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (kNumColumns > 2) {
    _tile_loadd(6, values + 128, row_bytes);
    _tile_dpbf16ps(2, 4, 6);
  }
  if constexpr (kNumColumns > 3) {
    _tile_loadd(7, values + 192, row_bytes);
    _tile_dpbf16ps(3, 4, 7);
  }
}

// out[column][row][16]: weights times tiles of V from `begin` to the last token, kNumColumns groups
// of 16 features from `column_bytes` on in its rows. Unless `next` is null, prefetches next_lines
// cache lines of it a tile and group.
template <int kNumColumns>
inline void sum_values(const uint32_t* weights, const uint8_t* const* values, int64_t row_bytes,
                       int64_t column_bytes, int begin, int num_tokens, const uint8_t* const* next,
                       int next_lines, float* out) {
  _tile_zero(0);
  if constexpr (kNumColumns > 1) _tile_zero(1);
  if constexpr (kNumColumns > 2) _tile_zero(2);
  if constexpr (kNumColumns > 3) _tile_zero(3);
  const int whole = num_tokens / kTile;
  for (int t = begin; t < whole; ++t) {
    multiply_values<kNumColumns>(weights + t * kValuePairs, values[t] + column_bytes, row_bytes);
    if (next != nullptr) {
      prefetch_lines(next[t] + column_bytes * next_lines, next_lines * kNumColumns);
    }
  }
  if (num_tokens % kTile != 0) {
    // Slots past the last token hold stale data of the block's previous owner: never multiply them.
    alignas(64) uint8_t padded[kValuePairs * kNumColumns * 64];
    const int pairs = (num_tokens % kTile + 1) / 2;
    std::memset(padded, 0, sizeof padded);
    for (int pair = 0; pair < pairs; ++pair) {
      std::memcpy(padded + pair * kNumColumns * 64, values[whole] + column_bytes + pair * row_bytes,
                  kNumColumns * 64);
    }
    multiply_values<kNumColumns>(weights + whole * kValuePairs, padded, kNumColumns * 64);
  }
  constexpr int kFloats = kTileRows * 16;
  _tile_stored(0, out, 64);
  if constexpr (kNumColumns > 1) _tile_stored(1, out + kFloats, 64);
  if constexpr (kNumColumns > 2) _tile_stored(2, out + 2 * kFloats, 64);
  if constexpr (kNumColumns > 3) _tile_stored(3, out + 3 * kFloats, 64);
}

}  // namespace legato::LEGATO_ISA
