// Layout of the paged KV cache, and the batch geometry that the kernels receive.
//
// A block holds, per KV head, K then V then (int8 only) the scales:
//   K  [tile][D / pair][tile width][pair]   tokens along the lanes, features in pairs
//   V  [ceil(block / pair)][Dv][pair]       features along the lanes, tokens in pairs
//   K scales [block], V scales [block]      float
// pair is 2 (the operand of the bf16 dot product: two products per lane) and 1 for float; a tile is
// 16 tokens, or the whole block where 16 does not divide it; Dv is D rounded up to 16. So with the
// usual block of 16 tokens both Q K^T and P V are plain register-blocked products over rows of 64
// bytes, without shuffles.
#pragma once

#include <cstdint>

namespace legato {

enum class Dtype : int32_t { float32 = 0, bfloat16 = 1, float16 = 2, int8 = 3 };

inline int bytes_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : dtype == Dtype::int8 ? 1 : 2;
}

constexpr int kTile = 16;        // tokens per tile
constexpr int kPartition = 256;  // tokens per partition, the unit of the online softmax
constexpr int kTilesPerPartition = kPartition / kTile;

inline int round_up(int n, int step) { return (n + step - 1) / step * step; }

struct KvLayout {
  Dtype dtype;
  int block_size;
  int num_kv_heads;
  int head_dim;
  int pair;
  int tile_width;
  int value_dim;  // Dv
  int element_bytes;
  int64_t value_offset;  // of V in a head's part
  int64_t scale_offset;  // of the scales in a head's part
  int64_t head_bytes;
  int64_t block_bytes;

  KvLayout(Dtype dtype, int block_size, int num_kv_heads, int head_dim)
      : dtype(dtype),
        block_size(block_size),
        num_kv_heads(num_kv_heads),
        head_dim(head_dim),
        pair(dtype == Dtype::float32 ? 1 : 2),
        tile_width(block_size % kTile == 0 ? kTile : block_size),
        value_dim(round_up(head_dim, 16)),
        element_bytes(bytes_of(dtype)) {
    value_offset = int64_t{block_size} * head_dim * element_bytes;
    scale_offset = value_offset + int64_t{round_up(block_size, pair)} * value_dim * element_bytes;
    scale_offset = (scale_offset + 3) / 4 * 4;
    head_bytes = scale_offset + (dtype == Dtype::int8 ? int64_t{block_size} * 2 * 4 : 0);
    block_bytes = head_bytes * num_kv_heads;
  }

  // Kernels read tiles in place; otherwise they first gather them into scratch.
  bool has_whole_tiles() const { return tile_width == kTile; }

  uint8_t* head(void* cache, int64_t block, int kv_head) const {
    return static_cast<uint8_t*>(cache) + block * block_bytes + kv_head * head_bytes;
  }
  const uint8_t* head(const void* cache, int64_t block, int kv_head) const {
    return static_cast<const uint8_t*>(cache) + block * block_bytes + kv_head * head_bytes;
  }
  // Byte offset, within a head's part, of the first feature pair of the token at `offset`; the
  // next pair lies tile_width * pair elements further.
  int64_t key_offset(int offset) const {
    const int tile = offset / tile_width;
    const int64_t elements =
        int64_t{tile} * tile_width * head_dim + int64_t{offset % tile_width} * pair;
    return elements * element_bytes;
  }
  // Byte offset of the row of V that holds the token at `offset`.
  int64_t value_row_offset(int offset) const {
    return value_offset + int64_t{offset / pair} * value_dim * pair * element_bytes;
  }
};

// One hybrid batch: kernels.interface.Batch, field by field in kernels/cpu/stack.py.
struct BatchView {
  const int32_t* positions;
  const int32_t* query_starts;
  const int32_t* starts;
  const int32_t* lengths;
  const int32_t* block_tables;
  const int32_t* slot_mapping;
  int32_t num_tokens;
  int32_t num_slices;
  int32_t table_width;
};

// The model's dimensions: kernels.interface.AttentionShape, field by field in kernels/cpu/kv.py.
struct ShapeView {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  Dtype dtype;
  Dtype kv_dtype;
  int32_t sliding_window;  // 0: none; negative: chunked
  float scale;
  float softcap;       // 0: none
  const float* sinks;  // of each head, or null
  const float* alibi;  // ALiBi of each head and position, or null
  int64_t alibi_stride;  // from head to head
  bool norms_last;  // of q and k: after the rotation

  int group() const { return num_heads / num_kv_heads; }
  KvLayout layout() const { return {kv_dtype, block_size, num_kv_heads, head_dim}; }
};

}  // namespace legato
