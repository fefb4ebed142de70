// The micro-kernels for x as whole numbers of 16 or 8 bits: exact 32-bit sums of each group of k,
// which the scales of x (and of the weights' group) then turn into floats.
//
// Integer sums have no order, and groups are added in ascending order of k: results are
// batch-invariant, and the same with VNNI as without. x of 8 bits is multiplied as bytes where there
// is VNNI, twice as many at once, and in 16 bits elsewhere. Only for *_isa.cpp and *_vnni.cpp files.
#pragma once

#include "linear_kernel.h"
#include "linear_task.h"

namespace legato::LEGATO_ISA {

// As wide as Vec.
struct IntegerVec {
#ifdef __AVX512F__
  __m512i v;

  static IntegerVec zero() { return {_mm512_setzero_si512()}; }
  static IntegerVec set(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static IntegerVec load(const char* p) { return {_mm512_loadu_si512(p)}; }
  static IntegerVec widen_i8(const char* p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  // The signed 4 bits at `shift` of every 16 bits.
  IntegerVec nibbles(int shift) const {
    return {_mm512_srai_epi16(_mm512_slli_epi16(v, 12 - shift), 12)};
  }
  IntegerVec flip(int bits) const { return {_mm512_xor_si512(v, _mm512_set1_epi16(bits))}; }
  void store(char* p) const { _mm512_storeu_si512(p, v); }
  Vec to_float() const { return {_mm512_cvtepi32_ps(v)}; }
#else
  __m256i v;

  static IntegerVec zero() { return {_mm256_setzero_si256()}; }
  static IntegerVec set(int32_t x) { return {_mm256_set1_epi32(x)}; }
  static IntegerVec load(const char* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
  }
  static IntegerVec widen_i8(const char* p) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  IntegerVec nibbles(int shift) const {
    return {_mm256_srai_epi16(_mm256_slli_epi16(v, 12 - shift), 12)};
  }
  IntegerVec flip(int bits) const { return {_mm256_xor_si256(v, _mm256_set1_epi16(bits))}; }
  void store(char* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  Vec to_float() const { return {_mm256_cvtepi32_ps(v)}; }
#endif
};

// The products of both pairs of 16 bits in every 32.
inline void add_products(IntegerVec& sum, IntegerVec a, IntegerVec b) {
#if defined(__AVX512VNNI__)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
#elif defined(__AVX512F__)
  sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v));
#else
  sum.v = _mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v));
#endif
}

// Pairs of k as 16-bit whole numbers, kLanes rows to a register. `Raw` is one unit of one
// register's rows as loaded.
// One step takes four bytes of each row of x. Sums are changed in place, by assembly: of intrinsics
// compilers make copies that spill.
struct IntegersFromI16 {
  static constexpr int kSteps = 4;
  static void add(IntegerVec& sum, IntegerVec weights, IntegerVec x) {
    add_products(sum, weights, x);
  }
  using Raw = const char*;
  static Raw load_raw(const char* unit, int vec) { return unit + vec * kLanes * 4; }
  static IntegerVec pair(Raw raw, int j) {
    return IntegerVec::load(raw + j * kPanelVecs * kLanes * 4);
  }
  static constexpr int64_t kUnitBytes = 4 * kPanelVecs * kLanes * 4;
};

struct IntegersFromI8 : IntegersFromI16 {
  using Raw = const char*;
  static Raw load_raw(const char* unit, int vec) { return unit + vec * kLanes * 2; }
  static IntegerVec pair(Raw raw, int j) {
    return IntegerVec::widen_i8(raw + j * kPanelVecs * kLanes * 2);
  }
  static constexpr int64_t kUnitBytes = 4 * kPanelVecs * kLanes * 2;
};

struct IntegersFromI4 : IntegersFromI16 {
  using Raw = IntegerVec;
  static Raw load_raw(const char* unit, int vec) {
    // Stored as value + 8: without the highest bit, two's complement.
    return IntegerVec::load(unit + vec * kLanes * 4).flip(0x8888);
  }
  static IntegerVec pair(Raw raw, int j) { return raw.nibbles(4 * j); }
  static constexpr int64_t kUnitBytes = kPanelVecs * kLanes * 4;
};

#ifdef __AVX512VNNI__
// Four k as bytes, the weights' without sign.
struct BytesFromI8 {
  static constexpr int kSteps = 2;
  static void add(IntegerVec& sum, IntegerVec weights, IntegerVec x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(weights.v), "v"(x.v));
  }
  using Raw = const char*;
  static Raw load_raw(const char* unit, int vec) { return unit + vec * 64; }
  static IntegerVec pair(Raw raw, int j) { return IntegerVec::load(raw + j * kPanelVecs * 64); }
  static constexpr int64_t kUnitBytes = 2 * kPanelVecs * 64;
};

struct BytesFromI4 : BytesFromI8 {
  using Raw = IntegerVec;
  static Raw load_raw(const char* unit, int vec) { return IntegerVec::load(unit + vec * 64); }
  static IntegerVec pair(Raw raw, int j) {
    const __m512i low = _mm512_set1_epi8(15);
    return {_mm512_and_si512(j == 0 ? raw.v : _mm512_srli_epi16(raw.v, 4), low)};
  }
  static constexpr int64_t kUnitBytes = kPanelVecs * 64;
};
#endif

template <class W>
inline void unpack_integers(const char* from, int64_t num_units, char* to) {
  for (int64_t unit = 0; unit < num_units; ++unit) {
    for (int vec = 0; vec < kPanelVecs; ++vec) {
      const typename W::Raw raw = W::load_raw(from, vec);
#pragma GCC unroll 4
      for (int j = 0; j < W::kSteps; ++j) {
        W::pair(raw, j).store(to + (j * kPanelVecs + vec) * kLanes * 4);
      }
    }
    from += W::kUnitBytes;
    to += W::kSteps * kPanelVecs * kLanes * 4;
  }
}

template <class W, int kNumRows, int kPanels>
inline void multiply_integers(const KernelArgs& s, const char* w, const char*& prefetch,
                              RowPointers<kNumRows>& x,
                              IntegerVec (&sums)[kNumRows][kPanels * kPanelVecs]) {
  constexpr int kVecs = kPanels * kPanelVecs;
  for (int64_t unit = 0; unit < s.num_units; ++unit) {
    typename W::Raw raw[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      raw[v] = W::load_raw(w + v / kPanelVecs * s.panel_stride, v % kPanelVecs);
    }
#pragma GCC unroll 4
    for (int j = 0; j < W::kSteps; ++j) {
      prefetch_lines<kPanels, W::kSteps>(prefetch, j, s);
      IntegerVec weights[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) weights[v] = W::pair(raw[v], j);
#pragma GCC unroll 12
      for (int row = 0; row < kNumRows; ++row) {
        int32_t some;
        __builtin_memcpy(&some, x.row(row) + j * 4, 4);
        const IntegerVec values = IntegerVec::set(some);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) W::add(sums[row][v], weights[v], values);
      }
    }
    w += W::kUnitBytes;
    x.advance(W::kSteps * 4);
  }
}

template <class W, int kNumRows, int kPanels>
void integer_kernel(const KernelArgs& s) {
  constexpr int kVecs = kPanels * kPanelVecs;
  const char* w = s.w;
  const char* prefetch = s.prefetch;
  const char* scales = s.scales;
  RowPointers<kNumRows> x(s);
  for (int64_t group = 0; group < s.num_groups; ++group) {
    IntegerVec sums[kNumRows][kVecs];
#pragma GCC unroll 12
    for (int row = 0; row < kNumRows; ++row) {
      IntegerVec begin = IntegerVec::zero();
      if (s.x_offsets != nullptr) {
        begin = IntegerVec::set(s.x_offsets[row * s.x_scales_stride + group]);
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[row][v] = begin;
    }
    multiply_integers<W, kNumRows, kPanels>(s, w, prefetch, x, sums);
    const bool fresh = s.first && group == 0;
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      Vec scale = Vec::zero();
      Vec zero = Vec::zero();
      if (scales != nullptr) {
        const fp16* halves =
            reinterpret_cast<const fp16*>(scales + v / kPanelVecs * s.panel_stride);
        scale = Vec::load(halves + v % kPanelVecs * kLanes);
        if (s.has_zeros) zero = Vec::load(halves + kPanelRows + v % kPanelVecs * kLanes);
      }
#pragma GCC unroll 12
      for (int row = 0; row < kNumRows; ++row) {
        float* total =
            s.sums + v / kPanelVecs * kPanelSums + row * kPanelRows + v % kPanelVecs * kLanes;
        const Vec before = fresh ? Vec::zero() : Vec::load(total);
        const Vec x_scale = Vec::set(s.x_scales[row * s.x_scales_stride + group]);
        Vec sum = sums[row][v].to_float();
        if (scales == nullptr) {
          fma(sum, x_scale, before).store(total);
          continue;
        }
        sum = sum * x_scale;
        if (s.has_zeros) {
          sum = fma(zero, Vec::set(-s.group_sums[row * s.group_sums_stride + group]), sum);
        }
        fma(sum, scale, before).store(total);
      }
    }
    w += s.w_stride;
    if (scales != nullptr) scales += s.scales_stride;
  }
}

template <class W, int... kRow, int... kWideRow>
constexpr MicroKernelTable make_integer_table(std::integer_sequence<int, kRow...>,
                                              std::integer_sequence<int, kWideRow...>) {
  return {{integer_kernel<W, kRow + 1, 1>...}, {integer_kernel<W, kWideRow + 1, 2>...}};
}

template <class W>
constexpr MicroKernelTable kIntegerKernels = make_integer_table<W>(
    std::make_integer_sequence<int, kKernelRows>(), std::make_integer_sequence<int, kWideRows>());

inline Method integer_method(const PackedLinear& linear) {
#ifdef __AVX512VNNI__
  if (linear.operand == Operand::i8) {
    constexpr int64_t bytes = BytesFromI8::kUnitBytes;
    const MicroKernelTable* plain = &kIntegerKernels<BytesFromI8>;
    if (linear.weights == Weights::i8) return {plain, nullptr, nullptr, bytes, 0};
    return {&kIntegerKernels<BytesFromI4>, plain, unpack_integers<BytesFromI4>, bytes, 2};
  }
#endif
  const MicroKernelTable* plain = &kIntegerKernels<IntegersFromI16>;
  constexpr int64_t bytes = IntegersFromI16::kUnitBytes;
  if (linear.weights == Weights::i8) {
    return {&kIntegerKernels<IntegersFromI8>, plain, unpack_integers<IntegersFromI8>, bytes, 2};
  }
  return {&kIntegerKernels<IntegersFromI4>, plain, unpack_integers<IntegersFromI4>, bytes, 2};
}

}  // namespace legato::LEGATO_ISA
