// Unpacks stored weights to what the micro-kernels multiply fastest, one k-block of a panel at a
// time; scales are applied to the accumulators. (Where the first rows' micro-kernels unpack, see
// linear_kernel.h, this is not needed: 16-bit floats as floats, int8 and int4 as bf16.)
//
// Pays from some number of micro-kernel calls on the same weights (`Method::min_chunks`); below it
// the micro-kernels unpack in registers. The values are the same either way. Only for *_isa.cpp,
// *_vnni.cpp and *_amx.cpp files.
#pragma once

#include "linear_kernel.h"

namespace legato::LEGATO_ISA {

#ifdef __AVX512BF16__
template <class W>
inline void unpack_pairs(const char* from, int64_t num_units, char* to) {
  for (int64_t unit = 0; unit < num_units; ++unit) {
    for (int vec = 0; vec < kPanelVecs; ++vec) {
      const typename W::Raw raw = W::load_raw(from, vec);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        _mm512_store_si512(to + (j * kPanelVecs + vec) * 64, (__m512i)W::pair(raw, j));
      }
    }
    from += W::kUnitBytes;
    to += PairsFromBf16::kUnitBytes;
  }
}
#endif

inline void unpack_floats_i8(const char* from, int64_t num_units, char* to) {
  const int8_t* values = reinterpret_cast<const int8_t*>(from);
  float* floats = reinterpret_cast<float*>(to);
  for (int64_t k = 0; k < num_units * kUnit; ++k) {
    for (int row = 0; row < kPanelRows; ++row) {
      floats[k * kPanelRows + row] = values[(k / 2 * kPanelRows + row) * 2 + k % 2];
    }
  }
}

inline void unpack_floats_i4(const char* from, int64_t num_units, char* to) {
  const uint16_t* words = reinterpret_cast<const uint16_t*>(from);
  float* floats = reinterpret_cast<float*>(to);
  for (int64_t k = 0; k < num_units * kUnit; ++k) {
    const int shift = static_cast<int>(k % kUnit / 2 * 4);
    const uint16_t* of_unit = words + k / kUnit * kPanelRows * 2 + k % 2;
    for (int row = 0; row < kPanelRows; ++row) {
      floats[k * kPanelRows + row] = static_cast<float>((of_unit[row * 2] >> shift & 15) - 8);
    }
  }
}

using Unpack = void (*)(const char* from, int64_t num_units, char* to);

}  // namespace legato::LEGATO_ISA
