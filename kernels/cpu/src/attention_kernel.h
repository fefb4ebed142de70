// One task of attention: some query rows of one slice and one KV head, over some partitions.
//
// Query rows of one KV head are numbered token by token, then head by head within the group, so K
// and V are read once for the whole group. Every row is computed the same way in any batch:
// softmax over fixed partitions of 256 positions counted from 0, merged first to last.
#pragma once

#include <cstdint>

#include "attention_layout.h"
#include "isa.h"

namespace legato {

constexpr int kRowsPerBlock = 48;
// Not a power of two: rows below each other would share a few sets of the L1 cache.
constexpr int kScoreStride = kPartition + 16;

struct AttentionTask {
  int32_t slice;
  int32_t kv_head;
  int32_t first_row;  // within the slice
  int32_t num_rows;   // at most kRowsPerBlock
  int32_t first_partition;
  int32_t end_partition;
  int32_t split_task;  // index into the plan's splits, or -1 for a whole task
  float* partials;     // where a split writes its partitions, one after another; null if whole
};

struct AttentionArgs {
  const void* query;  // (T, N, D)
  const void* cache;
  void* output;  // (T, N * D)
  const BatchView* batch;
  ShapeView shape;
  bool tiled_output = false;  // written as tiles (tiles.h); D is a multiple of 16 then
};

// Scratch of one thread, in floats, 64-byte aligned.
struct AttentionScratch {
  float* scores;       // [kRowsPerBlock][kScoreStride], of which kPartition are used
  float* query;        // [kRowsPerBlock][head_dim]
  float* accumulated;  // [kRowsPerBlock][value_dim]
  float* keys;         // [kPartition][head_dim], only where tiles are gathered
  float* values;       // [kPartition][value_dim]
  float* raw;          // [kTile][head_dim + value_dim], likewise

  static int64_t num_floats(const KvLayout& layout) {
    return int64_t{kRowsPerBlock} * (kScoreStride + layout.head_dim + layout.value_dim) +
           int64_t{kPartition + kTile} * (layout.head_dim + layout.value_dim);
  }
  AttentionScratch(float* base, const KvLayout& layout)
      : scores(base),
        query(scores + int64_t{kRowsPerBlock} * kScoreStride),
        accumulated(query + int64_t{kRowsPerBlock} * layout.head_dim),
        keys(accumulated + int64_t{kRowsPerBlock} * layout.value_dim),
        values(keys + int64_t{kPartition} * layout.head_dim),
        raw(values + int64_t{kPartition} * layout.value_dim) {}
};

// Floats of one partition of a split: row maxima, row sums, then partial outputs row by row.
inline int64_t partial_floats(int num_rows, int value_dim) {
  return int64_t{2} * kRowsPerBlock + int64_t{num_rows} * value_dim;
}

// Rows see positions [position - window + 1, position], or with a window below 0 those from its last
// multiple on; partitions without any are skipped.
inline int first_visible(int position, int window) {
  if (window < 0) return position - position % -window;
  return window > 0 && position >= window ? position - window + 1 : 0;
}

LEGATO_FOR_EACH_ISA(
    // Computes a whole task into the output, or a split into its partials. `next` (or null) is the
    // task that this thread probably runs next: its first K tiles are prefetched at the end.
    void run_attention_task(const AttentionArgs& args, const AttentionTask& task,
                            const AttentionTask* next, AttentionScratch scratch);
    // Combines the partials of all partitions of a split task, in order (split-KV, as in
    // flash-decoding).
    void merge_splits(const AttentionArgs& args, const AttentionTask& task, const float* partials,
                      AttentionScratch scratch))

namespace amx {
// Only where can_attend_in_tiles() says so.
void run_attention_task(const AttentionArgs& args, const AttentionTask& task,
                        const AttentionTask* next, AttentionScratch scratch);
}

// K and V of bf16 or int8 beside bf16 queries, whose head fills whole tiles.
inline bool can_attend_in_tiles(const ShapeView& shape) {
  return active_isa() == Isa::amx && shape.dtype == Dtype::bfloat16 && shape.head_dim % 32 == 0 &&
         (shape.kv_dtype == Dtype::bfloat16 || shape.kv_dtype == Dtype::int8);
}

}  // namespace legato
