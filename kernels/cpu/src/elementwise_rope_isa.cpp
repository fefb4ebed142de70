// Query and key norm, rotation and the cache write, in one pass over the rows of qkv.

#include <cstring>

#include "elementwise_kernel.h"
#include "elementwise_vec.h"

namespace legato::LEGATO_ISA {
namespace {

constexpr int kMaxHeadDim = 1024;

// Rotates feature pairs (i, i + D/2). Hugging Face rounds the table, each product and the sum; the
// table is rounded already.
template <class T>
void rotate(const T* x, const float* cos_sin, T* y, int dim) {
  const int half = dim / 2;
  for_lanes(half, [&](int64_t i, int n) {
    const Vec cos = load_lanes(cos_sin + i, n), sin = load_lanes(cos_sin + half + i, n);
    const Vec a = load_lanes(x + i, n), b = load_lanes(x + half + i, n);
    store_lanes(rounded<T>(a * cos) - rounded<T>(b * sin), y + i, n);
    store_lanes(rounded<T>(b * cos) + rounded<T>(a * sin), y + half + i, n);
  });
}

template <class T>
void norm_and_rotate(const T* x, const void* norm, const RopeArgs& args, const float* cos_sin,
                     T* y) {
  const int dim = args.shape.head_dim;
  T between[kMaxHeadDim];
  const auto normed = [&](const T* from, T* to) {
    const float scale = inverse_rms(from, dim, args.eps);
    if (args.wide_norms) {
      scale_row(from, static_cast<const float*>(norm), to, RowPieces{0, kPieceValues}, dim, scale);
    } else {
      scale_row(from, static_cast<const T*>(norm), to, RowPieces{0, kPieceValues}, dim, scale);
    }
  };
  if (norm == nullptr) return rotate(x, cos_sin, y, dim);
  if (args.shape.norms_last) {
    rotate(x, cos_sin, between, dim);
    normed(between, y);
  } else {
    normed(x, between);
    rotate(between, cos_sin, y, dim);
  }
}

// A head as the KV cache stores it: values of type C, or int8 with a scale.
template <class T, class C>
struct Stored {
  using Bits = C;
  static void make(const T* x, int dim, Bits* bits, float*) {
    for_lanes(dim, [&](int64_t i, int n) { store_lanes(load_lanes(x + i, n), bits + i, n); });
  }
};

// Symmetric int8 with one scale per token and head, which is NaN where a value is.
template <class T>
struct Quantized {
  using Bits = uint8_t;
  static void make(const T* x, int dim, Bits* bits, float* scale) {
    float values[kMaxHeadDim];
    for_lanes(dim, [&](int64_t i, int n) { store_lanes(load_lanes(x + i, n), values + i, n); });
    const uint32_t bits_of_most = largest_bits(values, dim);
    float most;
    __builtin_memcpy(&most, &bits_of_most, 4);
    *scale = most / 127.0f;
    const float inverse = *scale > 0.0f ? 1.0f / *scale : 0.0f;
    for (int i = 0; i < dim; ++i) {
      bits[i] = static_cast<uint8_t>(static_cast<int8_t>(__builtin_rintf(values[i] * inverse)));
    }
  }
};

// Elements as plain integers, and two of them side by side.
template <int kBytes>
struct Integers;
template <>
struct Integers<1> {
  using One = uint8_t;
  using Two = uint16_t;
};
template <>
struct Integers<2> {
  using One = uint16_t;
  using Two = uint32_t;
};

template <class Bits>
void store_key(const KvLayout& layout, uint8_t* head, int offset, const Bits* key) {
  uint8_t* target = head + layout.key_offset(offset);
  const int64_t step = int64_t{layout.tile_width} * layout.pair * sizeof(Bits);
  for (int i = 0; i < layout.head_dim; i += layout.pair) {
    if constexpr (sizeof(Bits) == 1) {
      std::memcpy(target, key + i, 2);
    } else {
      std::memcpy(target, key + i, 4);
    }
    target += step;
  }
}

// The first token of a pair also clears the second's slot: stale data of an earlier owner of the
// block would be multiplied by a weight of zero, but zero times infinity is NaN.
template <class Bits>
void store_value(const KvLayout& layout, uint8_t* head, int offset, const Bits* value) {
  uint8_t* row = head + layout.value_row_offset(offset);
  if constexpr (sizeof(Bits) == 4) {
    std::memcpy(row, value, sizeof(Bits) * layout.head_dim);
  } else {
    using One = typename Integers<sizeof(Bits)>::One;
    using Two = typename Integers<sizeof(Bits)>::Two;
    constexpr int kShift = 8 * sizeof(Bits);
    constexpr Two kFirst = static_cast<Two>((Two{1} << kShift) - 1);
    for (int i = 0; i < layout.head_dim; ++i) {
      One one;
      Two two;
      std::memcpy(&one, value + i, sizeof one);
      std::memcpy(&two, row + i * sizeof two, sizeof two);
      two = offset % 2 == 0 ? Two{one} : static_cast<Two>((two & kFirst) | (Two{one} << kShift));
      std::memcpy(row + i * sizeof two, &two, sizeof two);
    }
  }
}

template <class T, class Form>
void rope_in(const RopeArgs& args, int64_t begin, int64_t end) {
  const ShapeView& shape = args.shape;
  const KvLayout layout = shape.layout();
  const int dim = shape.head_dim, heads = shape.num_heads, kv_heads = shape.num_kv_heads;
  using Bits = typename Form::Bits;
  Bits bits[kMaxHeadDim];
  T key[kMaxHeadDim];
  float cos_sin[kMaxHeadDim];
  for (int64_t t = begin; t < end; ++t) {
    const float* table = args.cos_sin + int64_t{args.batch->positions[t]} * dim;
    for_lanes(dim, [&](int64_t i, int n) {
      store_lanes(rounded<T>(load_lanes(table + i, n)), cos_sin + i, n);
    });
    const T* row = static_cast<const T*>(args.qkv) + t * (heads + 2 * kv_heads) * dim;
    T* query = static_cast<T*>(args.query) + t * heads * dim;
    for (int h = 0; h < heads; ++h) {
      norm_and_rotate(row + h * dim, args.q_norm, args, cos_sin, query + h * dim);
    }
    if (args.query_scales != nullptr) {
      const Vec scale = Vec::set(args.query_scales[args.batch->positions[t]]);
      for_lanes(int64_t{heads} * dim, [&](int64_t i, int n) {
        store_lanes(load_lanes(query + i, n) * scale, query + i, n);
      });
    }
    const int block = args.batch->slot_mapping[t] / shape.block_size;
    const int offset = args.batch->slot_mapping[t] % shape.block_size;
    for (int g = 0; g < kv_heads; ++g) {
      uint8_t* head = layout.head(args.cache, block, g);
      float* scales = reinterpret_cast<float*>(head + layout.scale_offset);
      norm_and_rotate(row + (heads + g) * dim, args.k_norm, args, cos_sin, key);
      Form::make(key, dim, bits, scales + offset);
      store_key(layout, head, offset, bits);
      Form::make(row + (heads + kv_heads + g) * dim, dim, bits,
                 scales + shape.block_size + offset);
      store_value(layout, head, offset, bits);
    }
  }
}

template <class T>
void rope_of(const RopeArgs& args, int64_t begin, int64_t end) {
  switch (args.shape.kv_dtype) {
    case Dtype::float32: return rope_in<T, Stored<T, float>>(args, begin, end);
    case Dtype::bfloat16: return rope_in<T, Stored<T, bf16>>(args, begin, end);
    case Dtype::float16: return rope_in<T, Stored<T, fp16>>(args, begin, end);
    case Dtype::int8: return rope_in<T, Quantized<T>>(args, begin, end);
  }
}

}  // namespace

void rope_rows(const RopeArgs& args, int64_t begin, int64_t end) {
  if (args.shape.dtype == Dtype::bfloat16) return rope_of<bf16>(args, begin, end);
  if (args.shape.dtype == Dtype::float16) return rope_of<fp16>(args, begin, end);
  rope_of<float>(args, begin, end);
}

}  // namespace legato::LEGATO_ISA
