// The micro-kernels: up to kKernelRows rows of x times one panel (or two), over a range of k.
//
// Every output has one accumulator that adds its products in ascending order of k, in each
// micro-kernel: that makes results batch-invariant. Only for *_isa.cpp and
// *_vnni.cpp files.
#pragma once

#include <utility>

#include "linear_layout.h"
#include "vec.h"

namespace legato::LEGATO_ISA {

constexpr int kLanes = Vec::kLanes;
constexpr int kPanelRows = kPanelVecs * kLanes;
// Register blocking: with a panel's two registers each, the accumulators take 24 of 32 (12 of 16)
// registers, enough independent chains to hide the latency of a multiply-add.
constexpr int kKernelRows = kLanes == 16 ? 12 : 6;
// Up to this many rows, int8 and int4 weights are read two panels at a time, for enough independent
// chains.
constexpr int kWideRows = kLanes == 16 ? 4 : 1;
// Floats between the accumulators of two panels.
constexpr int64_t kPanelSums = kMaxWidenedRows * kPanelRows;

// One call of a micro-kernel: whole groups of k where weights have group scales, else any range of
// k.
struct KernelArgs {
  const char* x;  // first row, first k
  int64_t row_bytes;
  const char* w;
  int64_t num_units;     // of each group
  int64_t num_groups;
  int64_t panel_stride;  // bytes from one panel's w, scales and prefetch address to the next's
  int64_t w_stride;      // bytes from one group's w to the next's
  const char* scales;    // fp16, of the first group; null: no group scales
  int64_t scales_stride;
  bool has_zeros;        // fp16 zero points after the scales
  const float* x_scales;  // of the first group and row; null unless x is i16 or i8
  int64_t x_scales_stride;
  const int32_t* x_offsets;  // what sums begin with, likewise; null unless x is i8
  const float* group_sums;  // of the first group and row
  int64_t group_sums_stride;
  float* sums;  // [rows][kPanelRows]
  bool first;   // start from zero instead of accumulating into `sums`
  const char* prefetch;  // address prefetched meanwhile, and cache lines per unit
  int prefetch_lines_per_unit;
  int64_t far_bytes;  // so much further on, the L2 cache is filled
  char* kept;  // where unpacked weights go, of kernels that keep them
};

using MicroKernel = void (*)(const KernelArgs&);

// bf16, f32 and f16 weights as floats, one k at a time: dot products without bf16 instructions.
struct FloatFromF32 {
  static Vec load(const char* unit, int k, int vec) {
    return Vec::load(reinterpret_cast<const float*>(unit) + (k * kPanelVecs + vec) * kLanes);
  }
  static constexpr int64_t kUnitBytes = kUnit * kPanelVecs * kLanes * 4;
};

struct FloatFromF16 {
  static Vec load(const char* unit, int k, int vec) {
    return Vec::load(reinterpret_cast<const fp16*>(unit) + (k * kPanelVecs + vec) * kLanes);
  }
  static constexpr int64_t kUnitBytes = kUnit * kPanelVecs * kLanes * 2;
};

struct FloatFromBf16 {
  static Vec load(const char* unit, int k, int vec) {
    const float* pairs = reinterpret_cast<const float*>(unit) + (k / 2 * kPanelVecs + vec) * kLanes;
#ifdef __AVX512F__
    const __m512i bits = _mm512_loadu_si512(pairs);
    return {_mm512_castsi512_ps(k % 2 == 0 ? _mm512_slli_epi32(bits, 16)
                                           : _mm512_and_si512(bits, _mm512_set1_epi32(-65536)))};
#else
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    return {_mm256_castsi256_ps(k % 2 == 0 ? _mm256_slli_epi32(bits, 16)
                                           : _mm256_and_si256(bits, _mm256_set1_epi32(-65536)))};
#endif
  }
  static constexpr int64_t kUnitBytes = kUnit * kPanelVecs * kLanes * 2;
};

// Weights that are left unpacked for the rows that follow: beside products, unpacking and stores
// cost little, as they take other units of the core.
template <class W>
struct Keeping : W {};
template <class W>
constexpr bool kKeeps = false;
template <class W>
constexpr bool kKeeps<Keeping<W>> = true;

// The lines of step `step` of a unit's kUnit / kSteps: all at once would fill the line buffers.
template <int kPanels, int kSteps>
inline void prefetch_lines(const char*& prefetch, int step, const KernelArgs& s) {
  for (int i = step; i < s.prefetch_lines_per_unit; i += kSteps) {
    _mm_prefetch(prefetch, _MM_HINT_T0);
    _mm_prefetch(prefetch + s.far_bytes, _MM_HINT_T1);
    if (kPanels == 2) {
      _mm_prefetch(prefetch + s.panel_stride, _MM_HINT_T0);
      _mm_prefetch(prefetch + s.panel_stride + s.far_bytes, _MM_HINT_T1);
    }
    prefetch += 64;
  }
}

// One pointer per three rows: addresses then take few registers.
template <int kNumRows>
struct RowPointers {
  const char* at[(kNumRows + 2) / 3];
  int64_t row_bytes;

  explicit RowPointers(const KernelArgs& s) : row_bytes(s.row_bytes) {
    for (int i = 0; i < (kNumRows + 2) / 3; ++i) at[i] = s.x + i * 3 * row_bytes;
  }
  const char* row(int row) const { return at[row / 3] + row % 3 * row_bytes; }
  void advance(int64_t num_bytes) {
    for (const char*& p : at) p += num_bytes;
  }
};

template <class W, int kNumRows, int kPanels>
inline void multiply_floats(const KernelArgs& s, const char* w, const char*& prefetch,
                            RowPointers<kNumRows>& x, Vec (&sums)[kNumRows][kPanels * kPanelVecs]) {
  [[maybe_unused]] float* kept = reinterpret_cast<float*>(s.kept);
  for (int64_t unit = 0; unit < s.num_units; ++unit) {
#pragma GCC unroll 8
    for (int k = 0; k < kUnit; ++k) {
      prefetch_lines<kPanels, kUnit>(prefetch, k, s);
      Vec weights[kPanels * kPanelVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kPanels * kPanelVecs; ++v) {
        weights[v] = W::load(w + v / kPanelVecs * s.panel_stride, k, v % kPanelVecs);
        if constexpr (kKeeps<W>) weights[v].store(kept + (k * kPanelVecs + v) * kLanes);
      }
#pragma GCC unroll 12
      for (int row = 0; row < kNumRows; ++row) {
        const Vec value = Vec::set(reinterpret_cast<const float*>(x.row(row))[k]);
#pragma GCC unroll 4
        for (int v = 0; v < kPanels * kPanelVecs; ++v) {
          sums[row][v] = fma(weights[v], value, sums[row][v]);
        }
      }
    }
    w += W::kUnitBytes;
    if constexpr (kKeeps<W>) kept += kUnit * kPanelRows;
    x.advance(kUnit * 4);
  }
}

#ifdef __AVX512BF16__

// Pairs of k as bf16, 16 rows to a register, from the stored type. `Raw` is one unit of one
// register's rows as loaded; integers up to 256 are exact in bf16, so int8 and int4 lose nothing.
struct PairsFromBf16 {
  using Raw = const char*;
  static Raw load_raw(const char* unit, int vec) { return unit + vec * 64; }
  static __m512bh pair(Raw raw, int j) {
    return (__m512bh)_mm512_loadu_si512(raw + j * kPanelVecs * 64);
  }
  static constexpr int64_t kUnitBytes = 4 * kPanelVecs * 64;
};

struct PairsFromI8 {
  using Raw = const char*;
  static Raw load_raw(const char* unit, int vec) { return unit + vec * 32; }
  static __m512bh pair(Raw raw, int j) {
    const __m128i* bytes = reinterpret_cast<const __m128i*>(raw + j * kPanelVecs * 32);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
    return _mm512_cvtne2ps_pbh(high, low);
  }
  static constexpr int64_t kUnitBytes = 4 * kPanelVecs * 32;
};

struct PairsFromI4 {
  using Raw = __m512i;
  static Raw load_raw(const char* unit, int vec) { return _mm512_loadu_si512(unit + vec * 64); }
  static __m512bh pair(Raw raw, int j) {
    // bf16 of -8 .. 7, twice: the permute indexes by five bits of a word, of which the fifth
    // belongs to the next value.
    const __m256i values =
        _mm256_setr_epi16(-16128, -16160, -16192, -16224, -16256, -16320, -16384, -16512, 0, 16256,
                          16384, 16448, 16512, 16544, 16576, 16608);
    const __m512i table = _mm512_broadcast_i64x4(values);
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 4 * j), table);
  }
  static constexpr int64_t kUnitBytes = kPanelVecs * 64;
};

template <class W, int kNumRows, int kPanels>
inline void multiply_pairs(const KernelArgs& s, const char* w, const char*& prefetch,
                           RowPointers<kNumRows>& x, Vec (&sums)[kNumRows][kPanels * kPanelVecs],
                           [[maybe_unused]] char*& kept) {
  constexpr int kVecs = kPanels * kPanelVecs;
  for (int64_t unit = 0; unit < s.num_units; ++unit) {
    typename W::Raw raw[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      raw[v] = W::load_raw(w + v / kPanelVecs * s.panel_stride, v % kPanelVecs);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      prefetch_lines<kPanels, 4>(prefetch, j, s);
      __m512bh weights[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        weights[v] = W::pair(raw[v], j);
        if constexpr (kKeeps<W>) {
          _mm512_store_si512(kept + (j * kPanelVecs + v) * 64, (__m512i)weights[v]);
        }
      }
#pragma GCC unroll 12
      for (int row = 0; row < kNumRows; ++row) {
        int32_t two;
        __builtin_memcpy(&two, x.row(row) + j * 4, 4);
        const __m512bh values = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          sums[row][v].v = _mm512_dpbf16_ps(sums[row][v].v, weights[v], values);
        }
      }
    }
    w += W::kUnitBytes;
    if constexpr (kKeeps<W>) kept += PairsFromBf16::kUnitBytes;
    x.advance(kUnit * 2);
  }
}

#endif

template <class W, bool kNative, int kNumRows, int kPanels>
void micro_kernel(const KernelArgs& s) {
  constexpr int kVecs = kPanels * kPanelVecs;
  const auto total = [&](int row, int v) {
    return s.sums + v / kPanelVecs * kPanelSums + row * kPanelRows + v % kPanelVecs * kLanes;
  };
  const bool scaled = s.scales != nullptr;
  const char* w = s.w;
  const char* prefetch = s.prefetch;
  const char* scales = s.scales;
  [[maybe_unused]] char* kept = s.kept;
  RowPointers<kNumRows> x(s);
  for (int64_t group = 0; group < s.num_groups; ++group) {
    const bool fresh = s.first && group == 0;
    Vec sums[kNumRows][kVecs];
#pragma GCC unroll 12
    for (int row = 0; row < kNumRows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        sums[row][v] = fresh || scaled ? Vec::zero() : Vec::load(total(row, v));
      }
    }
#ifdef __AVX512BF16__
    if constexpr (kNative) multiply_pairs<W, kNumRows, kPanels>(s, w, prefetch, x, sums, kept);
#endif
    if constexpr (!kNative) multiply_floats<W, kNumRows, kPanels>(s, w, prefetch, x, sums);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      Vec scale = Vec::zero();
      Vec zero = Vec::zero();
      if (scaled) {
        const fp16* halves =
            reinterpret_cast<const fp16*>(scales + v / kPanelVecs * s.panel_stride);
        scale = Vec::load(halves + v % kPanelVecs * kLanes);
        if (s.has_zeros) zero = Vec::load(halves + kPanelRows + v % kPanelVecs * kLanes);
      }
#pragma GCC unroll 12
      for (int row = 0; row < kNumRows; ++row) {
        if (scaled) {
          Vec sum = sums[row][v];
          if (s.has_zeros) {
            sum = fma(zero, Vec::set(-s.group_sums[row * s.group_sums_stride + group]), sum);
          }
          sums[row][v] = fma(sum, scale, fresh ? Vec::zero() : Vec::load(total(row, v)));
        }
        sums[row][v].store(total(row, v));
      }
    }
    w += s.w_stride;
    scales += s.scales_stride;
  }
}

struct MicroKernelTable {
  MicroKernel kernels[kKernelRows];   // [rows - 1]
  MicroKernel wide[kWideRows];  // [rows - 1], two panels
};

template <class W, bool kNative, int... kRow, int... kWideRow>
constexpr MicroKernelTable make_table(std::integer_sequence<int, kRow...>,
                                 std::integer_sequence<int, kWideRow...>) {
  return {{micro_kernel<W, kNative, kRow + 1, 1>...},
          {micro_kernel<W, kNative, kWideRow + 1, 2>...}};
}

template <class W, bool kNative>
constexpr MicroKernelTable kMicroKernels = make_table<W, kNative>(
    std::make_integer_sequence<int, kKernelRows>(), std::make_integer_sequence<int, kWideRows>());

}  // namespace legato::LEGATO_ISA
