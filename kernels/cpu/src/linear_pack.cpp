// Packs weights from the checkpoint's layout into panels (linear_layout.h), once, at load.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "api.h"
#include "linear_layout.h"
#include "linear_memory.h"
#include "pool.h"

namespace legato {
namespace {

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Bytes of 8 k of one output row.
int64_t unit_row_bytes(Weights weights) {
  switch (weights) {
    case Weights::f32:
      return 32;
    case Weights::bf16:
    case Weights::f16:
      return 16;
    case Weights::i8:
      return 8;
    case Weights::i4:
      return 4;
  }
  return 0;
}

// Where weights have one scale per row, x has one per this many k: as few scales as possible,
// without padding where one of them divides K. AMX tiles take bytes of 64 k, in whole lines.
int64_t operand_group(int64_t K, bool rounds) {
  for (const int64_t group : {2 * kMaxGroup, kMaxByteGroup, kMaxGroup * 3 / 2}) {
    if (rounds && K % group == 0) return group;
  }
  for (const int64_t group : {kMaxGroup, kMaxGroup * 3 / 4, kMaxGroup / 2}) {
    if (K % group == 0) return group;
  }
  return kMaxGroup / 4;
}

void choose_isa(PackedLinear& linear) {
  const Isa isa = active_isa();
  linear.lanes = isa == Isa::avx2 ? 8 : 16;
  const bool is_integer = linear.weights == Weights::i8 || linear.weights == Weights::i4;
  const bool rounds = linear.rounding != InputRounding::to_16_bits;
  if (isa >= Isa::avx512_bf16 && linear.type == Type::bf16 && !rounds) {
    linear.operand = Operand::bf16;
  } else if (is_integer && (linear.type != Type::f32 || rounds)) {
    linear.operand = rounds && isa >= Isa::avx512_vnni ? Operand::i8 : Operand::i16;
    linear.operand_group = linear.group > 0 ? linear.group : operand_group(linear.K, rounds);
  }
  linear.is_tiled =
      isa == Isa::amx && linear.operand == Operand::bf16 && linear.group % kTileK == 0;
  linear.run_task =
      linear.is_tiled ? LEGATO_IF_BUILT(amx, run_linear_task) : LEGATO_PICK(run_linear_task);
  if (isa == Isa::avx512_vnni && linear.operand_group > 0) {
    linear.run_task = LEGATO_IF_BUILT(vnni, run_linear_task);
  }
  linear.tiles_bytes = isa == Isa::amx && linear.operand == Operand::i8;
  if (linear.tiles_bytes) {
    linear.run_task = LEGATO_IF_BUILT(amx, run_bytes_task);
  }
  linear.prepare_rows = LEGATO_PICK(prepare_linear_rows);
}

void lay_out(PackedLinear& linear) {
  const int64_t group = std::max(linear.group, linear.operand_group);
  const int64_t multiple = group > 0 ? group : linear.is_tiled ? kTileK : kUnit;
  linear.padded_K = round_up(std::max<int64_t>(linear.K, 1), multiple);
  linear.interleaves_halves = linear.O % 2 == 0 && linear.O / 2 % linear.lanes == 0;
  linear.num_panels = (linear.O + linear.panel_rows() - 1) / linear.panel_rows();
  linear.unit_bytes = unit_row_bytes(linear.weights) * linear.panel_rows();
  linear.header_bytes = linear.group > 0 ? linear.panel_rows() * (linear.has_zeros ? 4 : 2) : 0;
  linear.panel_bytes = linear.padded_K / kUnit * linear.unit_bytes +
                       (linear.group > 0 ? linear.num_groups() * linear.header_bytes : 0);
  const WeightMemory memory = allocate_weight(linear.num_panels * linear.panel_bytes);
  linear.memory = memory.region;
  linear.data = memory.data;
}

// Calls place(packed_row, output_row) for every output.
template <class Place>
void for_each_row(const PackedLinear& linear, int64_t panel, Place&& place) {
  for (int vec = 0; vec < kPanelVecs; ++vec) {
    for (int64_t lane = 0; lane < linear.width(panel, vec); ++lane) {
      place(vec * linear.lanes + lane, linear.column(panel, vec) + lane);
    }
  }
}

std::unique_ptr<float[]> in_packed_order(const PackedLinear& linear, const float* values) {
  if (values == nullptr) return nullptr;
  auto packed = std::make_unique<float[]>(linear.num_panels * linear.panel_rows());
  for (int64_t panel = 0; panel < linear.num_panels; ++panel) {
    for_each_row(linear, panel, [&](int64_t row, int64_t output) {
      packed[panel * linear.panel_rows() + row] = values[output];
    });
  }
  return packed;
}

// One unit (8 k) of one row into a panel. `values` are its k values, of which `count` exist.
template <class T>
void put_single(char* unit, int64_t rows, int64_t row, const T* values, int64_t count) {
  T* to = reinterpret_cast<T*>(unit) + row;
  for (int64_t k = 0; k < count; ++k) to[k * rows] = values[k];
}

template <class T>
void put_pairs(char* unit, int64_t rows, int64_t row, const T* values, int64_t count) {
  T* to = reinterpret_cast<T*>(unit) + row * 2;
  for (int64_t k = 0; k < count; ++k) to[k / 2 * rows * 2 + k % 2] = values[k];
}

void put_nibbles(char* unit, int64_t, int64_t row, const int8_t* values, int64_t count) {
  uint16_t words[2] = {0x8888, 0x8888};  // all zero
  for (int64_t k = 0; k < count; ++k) {
    const int shift = static_cast<int>(k / 2 * 4);
    uint16_t& word = words[k % 2];
    word = static_cast<uint16_t>((word & ~(15 << shift)) | ((values[k] + 8) & 15) << shift);
  }
  std::memcpy(unit + row * 4, words, 4);
}

// For bytes of x.
void put_bytes(char* unit, int64_t rows, int64_t row, const int8_t* values, int64_t count) {
  for (int64_t k = 0; k < kUnit; ++k) {
    const int value = k < count ? values[k] : 0;
    unit[(k / 4 * rows + row) * 4 + k % 4] = static_cast<char>(value + 128);
  }
}

void put_byte_nibbles(char* unit, int64_t, int64_t row, const int8_t* values, int64_t count) {
  for (int64_t k = 0; k < 4; ++k) {
    const int low = k < count ? values[k] + 8 : 8, high = k + 4 < count ? values[k + 4] + 8 : 8;
    unit[row * 4 + k] = static_cast<char>((low & 15) | (high & 15) << 4);
  }
}

template <class T, class Put>
void pack_values(PackedLinear& linear, const T* weight, int64_t ldw, Put put) {
  const int64_t rows = linear.panel_rows();
  const int64_t group_units = linear.group / kUnit;
  Pool::get().run(linear.num_panels, [&](int64_t panel, int) {
    const auto pack_row = [&](int64_t row, const T* values, int64_t limit) {
      char* to = linear.data + panel * linear.panel_bytes;
      for (int64_t unit = 0; unit * kUnit < linear.padded_K; ++unit) {
        if (group_units > 0 && unit % group_units == 0) to += linear.header_bytes;
        const int64_t count = std::clamp<int64_t>(limit - unit * kUnit, 0, kUnit);
        put(to, rows, row, values + std::min(unit * kUnit, limit), count);
        to += linear.unit_bytes;
      }
    };
    // Padding rows have no values; for int4 even zeros must be written.
    for (int64_t row = 0; row < rows; ++row) pack_row(row, weight, 0);
    for_each_row(linear, panel, [&](int64_t row, int64_t output) {
      pack_row(row, weight + output * ldw, linear.K);
    });
  });
}

// scales and zeros: fp16, [O][num_groups].
void pack_headers(PackedLinear& linear, const uint16_t* scales, const uint16_t* zeros) {
  const int64_t group_bytes = linear.header_bytes + linear.group / kUnit * linear.unit_bytes;
  Pool::get().run(linear.num_panels, [&](int64_t panel, int) {
    for (int64_t group = 0; group < linear.num_groups(); ++group) {
      auto* header = reinterpret_cast<uint16_t*>(linear.data + panel * linear.panel_bytes +
                                                 group * group_bytes);
      for_each_row(linear, panel, [&](int64_t row, int64_t output) {
        header[row] = scales[output * linear.num_groups() + group];
        if (zeros != nullptr) {
          header[linear.panel_rows() + row] = zeros[output * linear.num_groups() + group];
        }
      });
    }
  });
}

template <class Fill>
PackedLinear* packed(PackedLinear&& described, const float* bias, Fill&& fill) {
  try {
    auto linear = std::make_unique<PackedLinear>(std::move(described));
    choose_isa(*linear);
    lay_out(*linear);
    linear->bias = in_packed_order(*linear, bias);
    fill(*linear);
    return linear.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

// weight: [O][K] of `type`, row stride ldw; bias: [O] float or null. Null when out of memory.
LEGATO_API PackedLinear* legato_linear_pack(int type, int64_t O, int64_t K, const void* weight,
                                            int64_t ldw, const float* bias) {
  PackedLinear described;
  described.O = O;
  described.K = K;
  described.type = static_cast<Type>(type);
  described.weights = static_cast<Weights>(type);
  return packed(std::move(described), bias, [&](PackedLinear& linear) {
    if (linear.type == Type::f32) {
      pack_values(linear, static_cast<const uint32_t*>(weight), ldw, put_single<uint32_t>);
    } else if (linear.type == Type::f16) {
      pack_values(linear, static_cast<const uint16_t*>(weight), ldw, put_single<uint16_t>);
    } else {
      pack_values(linear, static_cast<const uint16_t*>(weight), ldw, put_pairs<uint16_t>);
    }
  });
}

// values: [O][K] integers of `bits` (8 or 4); the weight is scale * (value - zero). group 0:
// row_scales [O] float. Otherwise scales and zeros (or null) are fp16 [O][ceil(K / group)], with
// group a multiple of 8 up to 256. permutation: [K] columns of x in the order of values, or null.
// rounding: an InputRounding, of x. Null when out of memory.
LEGATO_API PackedLinear* legato_linear_pack_quantized(int type, int bits, int rounding, int64_t O,
                                                      int64_t K, int64_t group,
                                                      const int8_t* values,
                                                      const float* row_scales,
                                                      const uint16_t* scales,
                                                      const uint16_t* zeros,
                                                      const int32_t* permutation,
                                                      const float* bias) {
  PackedLinear described;
  described.O = O;
  described.K = K;
  described.type = static_cast<Type>(type);
  described.weights = bits == 4 ? Weights::i4 : Weights::i8;
  described.rounding = static_cast<InputRounding>(rounding);
  described.group = group;
  described.has_zeros = zeros != nullptr;
  return packed(std::move(described), bias, [&](PackedLinear& linear) {
    if (linear.operand == Operand::i8) {
      pack_values(linear, values, K, bits == 4 ? put_byte_nibbles : put_bytes);
    } else if (bits == 4) {
      pack_values(linear, values, K, put_nibbles);
    } else {
      pack_values(linear, values, K, put_pairs<int8_t>);
    }
    if (group == 0) {
      linear.row_scales = in_packed_order(linear, row_scales);
    } else {
      pack_headers(linear, scales, zeros);
    }
    if (permutation != nullptr) {
      linear.permutation = std::make_unique<int32_t[]>(K);
      std::copy(permutation, permutation + K, linear.permutation.get());
    }
  });
}

LEGATO_API void legato_linear_free(PackedLinear* linear) { delete linear; }

// Bytes that a forward pass streams: values with their scales.
LEGATO_API int64_t legato_linear_bytes(const PackedLinear* linear) {
  return linear->num_panels * linear->panel_bytes;
}

}  // namespace legato
