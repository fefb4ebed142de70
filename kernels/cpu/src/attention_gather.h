// Converts tiles of the KV cache to the format that the micro-kernels read, where they differ.
//
// Only for *_isa.cpp files. Two steps, each skipped where it would change nothing: gather a tile
// whose block size is not a multiple of 16; convert its elements.
#pragma once

#include <cstring>

#include "attention_kernel.h"
#include "attention_product.h"

namespace legato::LEGATO_ISA {

// 16 interleaved pairs as two float registers' worth: firsts and seconds.
template <class Element>
inline void split_pairs(const uint8_t* p, float* firsts, float* seconds);

template <>
inline void split_pairs<bf16>(const uint8_t* p, float* firsts, float* seconds) {
  for (int i = 0; i < 16; ++i) {
    uint32_t word;
    std::memcpy(&word, p + 4 * i, 4);
    const uint32_t first = word << 16, second = word & 0xffff0000u;
    std::memcpy(firsts + i, &first, 4);
    std::memcpy(seconds + i, &second, 4);
  }
}

template <>
inline void split_pairs<fp16>(const uint8_t* p, float* firsts, float* seconds) {
  fp16 halves[2][16];
  for (int i = 0; i < 16; ++i) {
    std::memcpy(&halves[0][i], p + 4 * i, 2);
    std::memcpy(&halves[1][i], p + 4 * i + 2, 2);
  }
  for (int i = 0; i < 16; i += Vec::kLanes) {
    Vec::load(halves[0] + i).store(firsts + i);
    Vec::load(halves[1] + i).store(seconds + i);
  }
}

template <>
inline void split_pairs<int8_t>(const uint8_t* p, float* firsts, float* seconds) {
  const int8_t* values = reinterpret_cast<const int8_t*>(p);
  for (int i = 0; i < 16; ++i) {
    firsts[i] = values[2 * i];
    seconds[i] = values[2 * i + 1];
  }
}

// int8 pairs to bf16 pairs, order kept; exact. n is a multiple of 32.
inline void widen(const uint8_t* source, uint8_t* target, int64_t n) {
#if defined(__AVX512BF16__)
  for (int64_t i = 0; i < n; i += 32) {
    const __m128i* bytes = reinterpret_cast<const __m128i*>(source + i);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
    const __m512bh pairs = _mm512_cvtne2ps_pbh(high, low);
    _mm512_storeu_si512(target + 2 * i, reinterpret_cast<__m512i>(pairs));
  }
#else
  for (int64_t i = 0; i < n; i += Vec::kLanes) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    const Vec values{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
#else
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source + i));
    const Vec values{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
#endif
    values.store(reinterpret_cast<bf16*>(target + 2 * i));
  }
#endif
}

// Tiles of K and V of one head, one partition at a time.
template <class Format>
class Tiles {
 public:
  const uint8_t* keys[kTilesPerPartition];
  const uint8_t* values[kTilesPerPartition];
  alignas(64) float key_scales[kPartition];    // int8 only
  alignas(64) float value_scales[kPartition];  // int8 only

  Tiles(const AttentionArgs& args, const AttentionTask& task, const AttentionScratch& scratch)
      : layout_(args.shape.layout()),
        cache_(args.cache),
        table_(args.batch->block_tables + int64_t{task.slice} * args.batch->table_width),
        kv_head_(task.kv_head),
        converts_(layout_.pair != Format::kPair ||
                  layout_.pair * layout_.element_bytes * 16 != Format::kLaneBytes),
        in_place_(layout_.has_whole_tiles() && !converts_),
        scratch_(scratch) {}

  bool is_int8() const { return layout_.dtype == Dtype::int8; }

  // Makes tiles [begin, stop) of `partition` ready; positions from `length` on hold no token.
  void prepare(int partition, int begin, int stop, int length) {
    if (in_place_) {
      find(partition, begin, stop, keys, values);
      for (int t = begin; is_int8() && t < stop; ++t) {
        const int position = partition * kPartition + t * kTile;
        load_scales(t, position, length - position);
      }
      return;
    }
    const uint8_t* unused[kTilesPerPartition];
    const uint8_t* blocks[kTilesPerPartition];
    const int64_t tile_bytes = layout_.head_bytes * kTile / layout_.block_size;
    if (layout_.has_whole_tiles()) find(partition, begin, stop, blocks, unused);
    for (int t = begin; t < stop; ++t) {
      if (layout_.has_whole_tiles() && t + kPrefetchedTiles < stop) {
        for (int64_t i = 0; i < tile_bytes; i += 64) {
          _mm_prefetch(blocks[t + kPrefetchedTiles] + i, _MM_HINT_T1);
        }
      }
      const int position = partition * kPartition + t * kTile;
      gather(t, position, length - position < kTile ? length - position : kTile);
    }
  }

  // Where K and V of whole tiles [begin, stop) lie in the cache.
  void find(int partition, int begin, int stop, const uint8_t** key_tiles,
            const uint8_t** value_tiles) const {
    find(layout_, cache_, table_, kv_head_, partition, begin, stop, key_tiles, value_tiles);
  }
  static void find(const KvLayout& layout, const void* cache, const int32_t* table, int kv_head,
                   int partition, int begin, int stop, const uint8_t** key_tiles,
                   const uint8_t** value_tiles) {
    const int position = partition * kPartition + begin * kTile;
    int block = position / layout.block_size, offset = position % layout.block_size;
    for (int t = begin; t < stop; ++t) {
      const uint8_t* head = layout.head(cache, table[block], kv_head);
      // Whole tiles: what key_offset and value_row_offset come to, without their divisions.
      key_tiles[t] = head + int64_t{offset} * layout.head_dim * layout.element_bytes;
      value_tiles[t] = head + layout.value_offset +
                       int64_t{offset} * layout.value_dim * layout.element_bytes;
      offset += kTile;
      if (offset == layout.block_size) {
        offset = 0;
        ++block;
      }
    }
  }
  // The same for another task of the same layer.
  void find(const AttentionArgs& args, const AttentionTask& task, int partition, int stop,
            const uint8_t** key_tiles, const uint8_t** value_tiles) const {
    const int32_t* table =
        args.batch->block_tables + int64_t{task.slice} * args.batch->table_width;
    find(layout_, cache_, table, task.kv_head, partition, 0, stop, key_tiles, value_tiles);
  }

  bool in_place() const { return in_place_; }

 private:
  static constexpr int kPrefetchedTiles = 3;  // being fetched while one is converted

  // Of a whole tile. Scales past the last token are set to zero: stale data of an earlier owner
  // would be multiplied by a weight of zero, but zero times infinity is NaN.
  void load_scales(int t, int position, int num_tokens) {
    const int offset = position % layout_.block_size;
    const uint8_t* head = layout_.head(cache_, table_[position / layout_.block_size], kv_head_);
    const uint8_t* scales = head + layout_.scale_offset;
    std::memcpy(key_scales + t * kTile, scales + 4 * offset, 4 * kTile);
    std::memcpy(value_scales + t * kTile, scales + 4 * (layout_.block_size + offset), 4 * kTile);
    for (int i = num_tokens < 0 ? 0 : num_tokens; i < kTile; ++i) {
      key_scales[t * kTile + i] = value_scales[t * kTile + i] = 0.0f;
    }
  }

  void gather(int t, int position, int num_tokens) {
    const int dim = layout_.head_dim, value_dim = layout_.value_dim;
    uint8_t* key_target = reinterpret_cast<uint8_t*>(scratch_.keys) +
                          int64_t{t} * kTile * dim * 4 / Format::kPair;
    uint8_t* value_target = reinterpret_cast<uint8_t*>(scratch_.values) +
                            int64_t{t} * kTile * value_dim * 4 / Format::kPair;
    keys[t] = key_target;
    values[t] = value_target;
    const uint8_t* key_source;
    const uint8_t* value_source;
    if (layout_.has_whole_tiles()) {
      const int offset = position % layout_.block_size;
      const uint8_t* head = layout_.head(cache_, table_[position / layout_.block_size], kv_head_);
      key_source = head + layout_.key_offset(offset);
      value_source = head + layout_.value_row_offset(offset);
      if (is_int8()) load_scales(t, position, num_tokens);
    } else {
      uint8_t* raw = converts_ ? reinterpret_cast<uint8_t*>(scratch_.raw) : key_target;
      uint8_t* raw_values = converts_ ? raw + kTile * dim * 4 : value_target;
      collect(t, position, num_tokens, raw, raw_values);
      key_source = raw;
      value_source = raw_values;
    }
    if (converts_) {
      convert(key_source, key_target, dim / layout_.pair, kTile);
      convert(value_source, value_target, kTile / layout_.pair, value_dim);
    }
  }

  // Gathers one tile token by token, without converting elements.
  void collect(int t, int position, int num_tokens, uint8_t* key_target, uint8_t* value_target) {
    const int size = layout_.element_bytes, pair = layout_.pair, width = layout_.tile_width;
    const int word = size * pair;
    std::memset(key_target, 0, int64_t{kTile} * layout_.head_dim * size);
    std::memset(value_target, 0, int64_t{kTile} * layout_.value_dim * size);
    for (int i = 0; i < kTile; ++i) {
      key_scales[t * kTile + i] = value_scales[t * kTile + i] = 0.0f;
    }
    for (int i = 0; i < num_tokens; ++i) {
      const int block = (position + i) / layout_.block_size;
      const int offset = (position + i) % layout_.block_size;
      const uint8_t* head = layout_.head(cache_, table_[block], kv_head_);
      const uint8_t* key = head + layout_.key_offset(offset);
      for (int w = 0; w < layout_.head_dim / pair; ++w) {
        std::memcpy(key_target + (int64_t{w} * kTile + i) * word, key + int64_t{w} * width * word,
                    word);
      }
      const uint8_t* value = head + layout_.value_row_offset(offset) + offset % pair * size;
      uint8_t* row = value_target + int64_t{i / pair} * layout_.value_dim * word + i % pair * size;
      for (int d = 0; d < layout_.value_dim; ++d) {
        std::memcpy(row + int64_t{d} * word, value + int64_t{d} * word, size);
      }
      if (is_int8()) {
        const uint8_t* scales = head + layout_.scale_offset;
        std::memcpy(key_scales + t * kTile + i, scales + 4 * offset, 4);
        std::memcpy(value_scales + t * kTile + i, scales + 4 * (layout_.block_size + offset), 4);
      }
    }
  }

  // `rows` rows of `columns` pairs (or floats) to the product's format.
  void convert(const uint8_t* source, uint8_t* target, int rows, int columns) {
    if constexpr (Format::kPair == 2) {
      widen(source, target, int64_t{rows} * columns * 2);  // only int8 is not bf16 already
    } else {
      float* out = reinterpret_cast<float*>(target);
      const int word = layout_.element_bytes * 2;
      for (int row = 0; row < rows; ++row) {
        for (int c = 0; c < columns; c += 16) {
          float* firsts = out + int64_t{2} * row * columns + c;
          const uint8_t* from = source + (int64_t{row} * columns + c) * word;
          if (layout_.dtype == Dtype::bfloat16) {
            split_pairs<bf16>(from, firsts, firsts + columns);
          } else if (layout_.dtype == Dtype::float16) {
            split_pairs<fp16>(from, firsts, firsts + columns);
          } else {
            split_pairs<int8_t>(from, firsts, firsts + columns);
          }
        }
      }
    }
  }

  const KvLayout layout_;
  const void* cache_;
  const int32_t* table_;
  const int kv_head_;
  const bool converts_;
  const bool in_place_;
  const AttentionScratch scratch_;
};

}  // namespace legato::LEGATO_ISA
