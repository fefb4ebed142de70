// One block of query rows against its K and V, partition by partition (online softmax).
//
// Only for *_isa.cpp files.
#pragma once

#include <cstring>

#include "attention_gather.h"
#include "attention_kernel.h"
#include "attention_product.h"
#include "attention_query.h"
#include "attention_softmax.h"
#if defined(__AMX_BF16__)
#include "attention_tiles.h"
#endif

namespace legato::LEGATO_ISA {

template <class Format>
class QueryBlock : private QueryRows<Format> {
  using Rows = QueryRows<Format>;
  using Rows::args_, Rows::task_, Rows::words_;
  using Rows::visible;
  using typename Rows::Range;

 public:
  QueryBlock(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next,
        const AttentionScratch& scratch)
      : Rows(args, task),
        next_(next),
        scratch_(scratch),
        tiles_(args, task, scratch),
        scaling_(args.shape, tiles_.is_int8() ? tiles_.key_scales : nullptr,
                 tiles_.is_int8() ? tiles_.value_scales : nullptr),
        value_dim_(round_up(args.shape.head_dim, 16)) {
    states_.reset(args.shape, task);
  }

  void run() {
    this->load_query(scratch_.query);
    const bool whole = task_.partials == nullptr;
    if (whole) {
      std::memset(scratch_.accumulated, 0, sizeof(float) * task_.num_rows * value_dim_);
    }
    float* partial = task_.partials;
    for (int p = task_.first_partition; p < task_.end_partition; ++p) {
      float* target = whole ? scratch_.accumulated : partial + 2 * kRowsPerBlock;
      compute(p, target, whole);
      if (whole) continue;
      std::memcpy(partial, states_.part_max, sizeof states_.part_max);
      std::memcpy(partial + kRowsPerBlock, states_.part_sum, sizeof states_.part_sum);
      partial += partial_floats(task_.num_rows, value_dim_);
    }
  }

  const OnlineSoftmax& states() const { return states_; }

 private:
  // Folds one partition into the rows' outputs, or leaves its partial output in `target`.
  void compute(int partition, float* target, bool merges) {
    states_.reset_part();
    const Range all = visible(partition, 0, task_.num_rows);
    if (all.end == 0) {
      if (!merges) std::memset(target, 0, sizeof(float) * task_.num_rows * value_dim_);
      return;
    }
    const int begin = all.begin / kTile, stop = round_up(all.end, kTile) / kTile;
    tiles_.prepare(partition, begin, stop, all.end + partition * kPartition);
    const int num_groups = (task_.num_rows + kBlockRows - 1) / kBlockRows;
    for (int g = 0; g < num_groups; ++g) {
      ranges_[g] = visible(partition, g * kBlockRows, rows_of(g));
    }
    // A few tiles of K stay in the L1 cache while all rows are multiplied by them.
    for (int t = begin; t < stop; t += kBlockLanes) {
      for (int g = 0; g < num_groups; ++g) qk(g, t, min_of(t + kBlockLanes, stop));
    }
    find_next_keys(partition);
    for (int g = 0; g < num_groups; ++g) softmax_rows(g, partition);
    if (merges) states_.merge_part();
    for (int g = 0; g < num_groups; ++g) {
      if (ranges_[g].end > 0) {
        pv(g, target, merges);
      } else if (!merges) {
        std::memset(target + int64_t{g} * kBlockRows * value_dim_, 0,
                    sizeof(float) * rows_of(g) * value_dim_);
      }
    }
  }

  static int min_of(int a, int b) { return a < b ? a : b; }

  int rows_of(int g) const { return min_of(kBlockRows, task_.num_rows - g * kBlockRows); }

  // Finds the K tiles that are read next, in this task or the next one: they are prefetched while V
  // is read.
  void find_next_keys(int partition) {
    prefetches_ = false;
    if (!tiles_.in_place()) return;
    const bool last = partition + 1 == task_.end_partition;
    if (last && next_ == nullptr) return;
    const uint8_t* unused[kTilesPerPartition];
    const AttentionTask& task = last ? *next_ : task_;
    const int first = last ? next_->first_partition : partition + 1;
    const int rows = (task.first_row + task.num_rows - 1) / args_.shape.group();
    const int length = args_.batch->starts[task.slice] + rows + 1 - first * kPartition;
    const int stop = round_up(length < kPartition ? length : kPartition, kTile) / kTile;
    tiles_.find(args_, task, first, stop, prefetch_, unused);
    for (int t = stop; t < kTilesPerPartition; ++t) prefetch_[t] = prefetch_[0];
    prefetches_ = stop > 0;
  }

  void qk(int g, int begin, int stop) {
    const int first = ranges_[g].begin / kTile, end = round_up(ranges_[g].end, kTile) / kTile;
    begin = begin > first ? begin : first;
    stop = stop < end ? stop : end;
    if (begin >= stop) return;
#if defined(__AMX_BF16__)
    return tiled_qk(g, begin, stop - begin);
#endif
    if (g == 0 && tiles_.in_place()) {
      with_rows<kBlockRows, true>(g, begin, stop - begin, nullptr, false);
    } else {
      with_rows<kBlockRows, false>(g, begin, stop - begin, nullptr, false);
    }
  }

  void pv(int g, float* target, bool merges) {
    const int columns = value_dim_ / 16;
    for (int c = 0; c < columns; c += kBlockLanes) {
      const int lanes = min_of(kBlockLanes, columns - c);
#if defined(__AMX_BF16__)
      tiled_pv(g, c, lanes, target, merges);
      continue;
#endif
      if (g == 0 && prefetches_) {
        with_rows<kBlockRows, true>(g, c, lanes, target, merges);
      } else {
        with_rows<kBlockRows, false>(g, c, lanes, target, merges);
      }
    }
  }

  // Dispatches to the instance for a group's number of rows and lanes: Q K^T (no target) from tile
  // `first`, or P V from column `first`.
  template <int kRows, bool kPrefetch>
  void with_rows(int g, int first, int lanes, float* target, bool merges) {
    if (rows_of(g) == kRows) {
      with_lanes<kRows, kBlockLanes, kPrefetch>(g, first, lanes, target, merges);
    } else if constexpr (kRows > 1) {
      with_rows<kRows - 1, kPrefetch>(g, first, lanes, target, merges);
    }
  }

  template <int kRows, int kLanes, bool kPrefetch>
  void with_lanes(int g, int first, int lanes, float* target, bool merges) {
    if (lanes < kLanes) {
      if constexpr (kLanes > 1) {
        with_lanes<kRows, kLanes - 1, kPrefetch>(g, first, lanes, target, merges);
      }
    } else if (target == nullptr) {
      qk_block<kRows, kLanes, kPrefetch>(g * kBlockRows, first);
    } else {
      pv_block<kRows, kLanes, kPrefetch>(g, first, target, merges);
    }
  }

  template <int kRows, int kLanes, bool kPrefetch>
  void qk_block(int row, int tile) {
    Lanes sum[kRows][kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kLanes; ++j) sum[i][j] = Lanes::zero();
    }
    multiply<Format, kPrefetch>(
        reinterpret_cast<const uint32_t*>(scratch_.query) + int64_t{row} * words_, words_,
        tiles_.keys + tile, Format::kLaneBytes, words_ / Format::kHalves, tiles_.values + tile,
        Format::kLaneBytes, sum);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kLanes; ++j) {
        sum[i][j].store(scratch_.scores + int64_t{row + i} * kScoreStride + (tile + j) * kTile);
      }
    }
  }

  void prefetch_tile(const uint8_t* tile) const {
    const int64_t bytes = int64_t{kTile / Format::kPair} * value_dim_ / 16 * Format::kLaneBytes;
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(tile + i, _MM_HINT_T1);
  }

  float* scores_of(int row) const { return scratch_.scores + int64_t{row} * kScoreStride; }

  void softmax_rows(int g, int partition) {
    const Range range = ranges_[g];
    if (range.end == 0) return;
    const int first = g * kBlockRows, end = first + rows_of(g);
    // All maxima first: the horizontal reductions then overlap.
    for (int r = first; r < end; ++r) {
      const Range own = visible(partition, r, 1);
      if (own.end == 0) continue;
      states_.part_max[r] =
          row_maximum(scores_of(r), own.begin, own.end, scaling_, this->bias(partition, r));
    }
    for (int r = first; r < end; ++r) {
      // The memory bus would be idle during the exponentials.
      if (g == 0 && prefetches_) prefetch_tile(prefetch_[r]);
      const Range own = visible(partition, r, 1);
      if (own.end > 0) {
        states_.part_sum[r] =
            softmax_row<Format>(scores_of(r), range.begin / kTile * kTile,
                                round_up(range.end, kTile), own.begin, own.end,
                                states_.part_max[r], scaling_);
      } else {
        std::memset(scores_of(r), 0, sizeof(float) * kPartition * Format::kHalves / Format::kPair);
      }
    }
  }

  template <int kRows, int kLanes, bool kPrefetch>
  void pv_block(int g, int column, float* target, bool merges) {
    const Range range = ranges_[g];
    const int row = g * kBlockRows;
    Lanes sum[kRows][kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kLanes; ++j) sum[i][j] = Lanes::zero();
    }
    const int begin = range.begin / kTile, stop = round_up(range.end, kTile) / kTile;
    const int64_t row_bytes = int64_t{value_dim_ / 16} * Format::kLaneBytes;  // of V
    const uint32_t* weights =
        reinterpret_cast<const uint32_t*>(scratch_.scores) + int64_t{row} * kScoreStride;
    for (int t = begin; t < stop; ++t) {
      const uint8_t* right[kLanes];
      const uint8_t* prefetch[kLanes];
#pragma GCC unroll 8
      for (int j = 0; j < kLanes; ++j) {
        right[j] = tiles_.values[t] + (column + j) * Format::kLaneBytes;
        prefetch[j] = kPrefetch ? prefetch_[t] + (column + j) * Format::kLaneBytes : nullptr;
      }
      // Slots past the last token hold stale data of an earlier owner: never multiply them.
      const int tokens = min_of(kTile, range.end - t * kTile);
      multiply<Format, kPrefetch>(weights + t * kTile * Format::kHalves / Format::kPair,
                                  kScoreStride, right, row_bytes,
                                  (tokens + Format::kPair - 1) / Format::kPair, prefetch,
                                  row_bytes, sum);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kLanes; ++j) put(sum[i][j], row + i, column + j, target, merges);
    }
  }

  // One row of P V, 16 features: added to what the row has, or written as a partition's own.
  void put(const Lanes& fresh, int row, int column, float* target, bool merges) const {
    float* out = target + int64_t{row} * value_dim_ + column * 16;
    const Vec old_scale = Vec::set(states_.old_scale[row]);
    const Vec part_scale = Vec::set(states_.part_scale[row]);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      float* at = out + part * Vec::kLanes;
      const Vec sum = fresh.part[part];
      (merges ? fma(sum, part_scale, Vec::load(at) * old_scale) : sum).store(at);
    }
  }

#if defined(__AMX_BF16__)
  // All 16 rows of a group, of which those past the task's last are computed in vain.
  void tiled_qk(int g, int first, int num_tiles) {
    registers_.set_rows(2 * kTileRows);
    const auto* query =
        reinterpret_cast<const uint32_t*>(scratch_.query) + int64_t{g} * kBlockRows * words_;
    float* scores = scores_of(g * kBlockRows) + first * kTile;
    const uint8_t* const* values = g == 0 && tiles_.in_place() ? tiles_.values + first : nullptr;
    constexpr decltype(&multiply_keys<1>) kMultiply[] = {multiply_keys<1>, multiply_keys<2>,
                                                         multiply_keys<3>, multiply_keys<4>};
    kMultiply[num_tiles - 1](query, words_, tiles_.keys + first, values, scores);
  }

  void tiled_pv(int g, int column, int num_columns, float* target, bool merges) {
    registers_.set_rows(2 * kTileRows, kValuePairs);
    const Range range = ranges_[g];
    const int row = g * kBlockRows, columns = value_dim_ / 16;
    constexpr decltype(&sum_values<1>) kSum[] = {sum_values<1>, sum_values<2>, sum_values<3>,
                                                 sum_values<4>};
    alignas(64) float sums[kBlockLanes][kTileRows][16];
    kSum[num_columns - 1](reinterpret_cast<const uint32_t*>(scores_of(row)), tiles_.values,
                          int64_t{columns} * 64, column * 64, range.begin / kTile, range.end,
                          g == 0 && prefetches_ ? prefetch_ : nullptr, words_ / columns,
                          sums[0][0]);
    for (int i = 0; i < rows_of(g); ++i) {
      for (int j = 0; j < num_columns; ++j) {
        put(Lanes::load(sums[j][i]), row + i, column + j, target, merges);
      }
    }
  }

  TileScope registers_;
#endif

  const AttentionTask* next_;
  const AttentionScratch scratch_;
  Tiles<Format> tiles_;
  const ScoreScaling scaling_;
  const int value_dim_;
  OnlineSoftmax states_;
  Range ranges_[kRowsPerBlock / kBlockRows];  // visible to each group of rows, in the partition
  const uint8_t* prefetch_[kTilesPerPartition];
  bool prefetches_ = false;
};

}  // namespace legato::LEGATO_ISA
