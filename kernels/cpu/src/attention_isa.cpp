// The tasks of attention; see attention_kernel.h.

#include "attention_gather.h"
#include "attention_kernel.h"
#include "attention_product.h"
#include "attention_softmax.h"

namespace legato::LEGATO_ISA {
namespace {

template <class Format>
class Block {
 public:
  Block(const AttentionArgs& args, const AttentionTask& task, const AttentionScratch& scratch)
      : args_(args),
        task_(task),
        scratch_(scratch),
        tiles_(args, task, scratch),
        scaling_(args.shape, tiles_.is_int8() ? tiles_.key_scales : nullptr,
                 tiles_.is_int8() ? tiles_.value_scales : nullptr),
        value_dim_(round_up(args.shape.head_dim, 16)),
        words_(args.shape.head_dim / Format::kPair) {
    const int group = args.shape.group();
    const int start = args.batch->starts[task.slice];
    for (int r = 0; r < task.num_rows; ++r) {
      const int position = start + (task.first_row + r) / group;
      end_[r] = position + 1;
      begin_[r] = first_visible(position, args.shape.sliding_window);
    }
    states_.reset();
  }

  void run() {
    load_query();
    const bool whole = task_.partials == nullptr;
    if (whole) {
      std::memset(scratch_.accumulated, 0, sizeof(float) * task_.num_rows * value_dim_);
    }
    float* partial = task_.partials;
    for (int p = task_.first_partition; p < task_.end_partition; ++p) {
      float* target = whole ? scratch_.accumulated : partial + 2 * kRowsPerBlock;
      compute(p, target, whole);
      if (whole) continue;
      std::memcpy(partial, states_.part_maximum, sizeof states_.part_maximum);
      std::memcpy(partial + kRowsPerBlock, states_.part_sum, sizeof states_.part_sum);
      partial += partial_floats(task_.num_rows, value_dim_);
    }
  }

  const RowStates& states() const { return states_; }

 private:
  const uint8_t* query_row(int row) const {
    const ShapeView& shape = args_.shape;
    const int group = shape.group();
    const int64_t token = args_.batch->query_starts[task_.slice] + row / group;
    const int64_t head = token * shape.num_heads + task_.kv_head * group + row % group;
    return static_cast<const uint8_t*>(args_.query) +
           head * shape.head_dim * bytes_of(shape.dtype);
  }

  void load_query() {
    const int dim = args_.shape.head_dim;
    for (int r = 0; r < task_.num_rows; ++r) {
      const uint8_t* source = query_row(task_.first_row + r);
      float* target = scratch_.query + int64_t{r} * words_;
      if (Format::kPair == 2 || args_.shape.dtype == Dtype::float32) {
        std::memcpy(target, source, int64_t{words_} * 4);
        continue;
      }
      for (int d = 0; d < dim; d += 8) {
        const Vec row = args_.shape.dtype == Dtype::bfloat16
                            ? Vec::load(reinterpret_cast<const bf16*>(source) + d, 8)
                            : Vec::load(reinterpret_cast<const fp16*>(source) + d, 8);
        row.store(target + d, 8);
      }
    }
  }

  // Visible positions of rows [row, row + count) within the partition; end 0 if there are none.
  struct Range {
    int begin, end;
  };
  Range visible(int partition, int row, int count) const {
    const int base = partition * kPartition;
    Range all{kPartition, 0};
    for (int r = row; r < row + count; ++r) {
      const int begin = begin_[r] > base ? begin_[r] - base : 0;
      const int end = end_[r] - base < kPartition ? end_[r] - base : kPartition;
      if (begin >= end) continue;
      if (begin < all.begin) all.begin = begin;
      if (end > all.end) all.end = end;
    }
    return all;
  }

  // Adds one partition to the rows' outputs, or leaves it alone in `target`.
  void compute(int partition, float* target, bool merges) {
    states_.reset_part();
    const Range all = visible(partition, 0, task_.num_rows);
    if (all.end == 0) {
      if (!merges) std::memset(target, 0, sizeof(float) * task_.num_rows * value_dim_);
      return;
    }
    tiles_.prepare(partition, all.begin / kTile, round_up(all.end, kTile) / kTile,
                   all.end + partition * kPartition);
    for (int row = 0; row < task_.num_rows; row += kBlockRows) {
      const int count = min_of(kBlockRows, task_.num_rows - row);
      const Range range = visible(partition, row, count);
      if (range.end == 0) continue;
      score(row, count, range.begin / kTile, round_up(range.end, kTile) / kTile);
      for (int r = row; r < row + count; ++r) {
        float* scores = scratch_.scores + int64_t{r} * kPartition;
        const int begin = range.begin / kTile * kTile, stop = round_up(range.end, kTile);
        const Range own = visible(partition, r, 1);
        if (own.end == 0) {
          std::memset(scores, 0, sizeof(float) * kPartition / Format::kPair);
        } else {
          states_.part_maximum[r] = weigh<Format>(scores, begin, stop, own.begin, own.end, scaling_,
                                                  states_.part_sum[r]);
        }
      }
    }
    if (merges) states_.merge_part();
    for (int row = 0; row < task_.num_rows; row += kBlockRows) {
      const int count = min_of(kBlockRows, task_.num_rows - row);
      const Range range = visible(partition, row, count);
      if (range.end > 0) {
        gather_values(row, count, range, target, merges);
      } else if (!merges) {
        std::memset(target + int64_t{row} * value_dim_, 0, sizeof(float) * count * value_dim_);
      }
    }
  }

  static int min_of(int a, int b) { return a < b ? a : b; }

  void score(int row, int count, int begin, int stop) {
    for (int t = begin; t < stop; t += kBlockLanes) {
      score_rows<kBlockRows>(row, count, t, min_of(kBlockLanes, stop - t));
    }
  }

  // The two recursions below find the instance for `count` rows and `lanes` lane groups.
  template <int kRows>
  void score_rows(int row, int count, int tile, int lanes) {
    if (count == kRows) {
      score_lanes<kRows, kBlockLanes>(row, tile, lanes);
    } else if constexpr (kRows > 1) {
      score_rows<kRows - 1>(row, count, tile, lanes);
    }
  }

  template <int kRows, int kLanes>
  void score_lanes(int row, int tile, int lanes) {
    if (lanes < kLanes) {
      if constexpr (kLanes > 1) score_lanes<kRows, kLanes - 1>(row, tile, lanes);
      return;
    }
    Lanes sum[kRows][kLanes];
    for (auto& of_row : sum) {
      for (Lanes& s : of_row) s = Lanes::zero();
    }
    multiply<Format>(reinterpret_cast<const uint32_t*>(scratch_.query) + int64_t{row} * words_,
                     words_, tiles_.keys + tile, 64, words_, sum);
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kLanes; ++j) {
        sum[i][j].store(scratch_.scores + int64_t{row + i} * kPartition + (tile + j) * kTile);
      }
    }
  }

  void gather_values(int row, int count, Range range, float* target, bool merges) {
    const int columns = value_dim_ / 16;
    for (int c = 0; c < columns; c += kBlockLanes) {
      value_rows<kBlockRows>(row, count, c, min_of(kBlockLanes, columns - c), range, target,
                             merges);
    }
  }

  template <int kRows>
  void value_rows(int row, int count, int column, int lanes, Range range, float* target,
                  bool merges) {
    if (count == kRows) {
      value_lanes<kRows, kBlockLanes>(row, column, lanes, range, target, merges);
    } else if constexpr (kRows > 1) {
      value_rows<kRows - 1>(row, count, column, lanes, range, target, merges);
    }
  }

  template <int kRows, int kLanes>
  void value_lanes(int row, int column, int lanes, Range range, float* target, bool merges) {
    if (lanes < kLanes) {
      if constexpr (kLanes > 1) {
        value_lanes<kRows, kLanes - 1>(row, column, lanes, range, target, merges);
      }
      return;
    }
    Lanes sum[kRows][kLanes];
    for (auto& of_row : sum) {
      for (Lanes& s : of_row) s = Lanes::zero();
    }
    const int begin = range.begin / kTile, stop = round_up(range.end, kTile) / kTile;
    const uint32_t* weights =
        reinterpret_cast<const uint32_t*>(scratch_.scores) + int64_t{row} * kPartition;
    for (int t = begin; t < stop; ++t) {
      const uint8_t* right[kLanes];
      for (int j = 0; j < kLanes; ++j) right[j] = tiles_.values[t] + (column + j) * 64;
      // Behind the last token lies whatever the block's last owner left: never multiply it.
      const int tokens = min_of(kTile, range.end - t * kTile);
      multiply<Format>(weights + t * kTile / Format::kPair, kPartition, right, value_dim_ * 4,
                       (tokens + Format::kPair - 1) / Format::kPair, sum);
    }
    for (int i = 0; i < kRows; ++i) {
      float* out = target + int64_t{row + i} * value_dim_ + column * 16;
      const Vec keep = Vec::set(states_.keep[row + i]), take = Vec::set(states_.take[row + i]);
      for (int j = 0; j < kLanes; ++j) {
        for (int part = 0; part < kParts; ++part) {
          float* at = out + j * 16 + part * Vec::kLanes;
          const Vec fresh = sum[i][j].part[part];
          (merges ? fma(fresh, take, Vec::load(at) * keep) : fresh).store(at);
        }
      }
    }
  }

  const AttentionArgs& args_;
  const AttentionTask& task_;
  const AttentionScratch scratch_;
  Tiles<Format> tiles_;
  const ScoreScaling scaling_;
  const int value_dim_;
  const int words_;  // of a query row
  RowStates states_;
  int begin_[kRowsPerBlock];  // visible positions of each row
  int end_[kRowsPerBlock];
};

// accumulated / sum, in the output's type.
void finish(const AttentionArgs& args, const AttentionTask& task, const float* accumulated,
            const RowStates& states) {
  const ShapeView& shape = args.shape;
  const int group = shape.group(), dim = shape.head_dim, value_dim = round_up(dim, 16);
  for (int r = 0; r < task.num_rows; ++r) {
    const int row = task.first_row + r;
    const int64_t token = args.batch->query_starts[task.slice] + row / group;
    const int64_t head = token * shape.num_heads + task.kv_head * group + row % group;
    const Vec scale = Vec::set(1.0f / states.sum[r]);
    const float* from = accumulated + int64_t{r} * value_dim;
    for (int d = 0; d < dim; d += Vec::kLanes) {
      const Vec value = Vec::load(from + d) * scale;
      const int n = dim - d;
      const int64_t at = head * dim + d;
      if (shape.dtype == Dtype::bfloat16) {
        value.store(static_cast<bf16*>(args.output) + at, n);
      } else if (shape.dtype == Dtype::float16) {
        value.store(static_cast<fp16*>(args.output) + at, n);
      } else {
        value.store(static_cast<float*>(args.output) + at, n);
      }
    }
  }
}

template <class Format>
void attend_in(const AttentionArgs& args, const AttentionTask& task,
               const AttentionScratch& scratch) {
  Block<Format> block(args, task, scratch);
  block.run();
  if (task.partials == nullptr) finish(args, task, scratch.accumulated, block.states());
}

}  // namespace

void attend(const AttentionArgs& args, const AttentionTask& task, AttentionScratch scratch) {
  const bool pairs = args.shape.dtype == Dtype::bfloat16 &&
                     (args.shape.kv_dtype == Dtype::bfloat16 || args.shape.kv_dtype == Dtype::int8);
  pairs ? attend_in<PairFormat>(args, task, scratch) : attend_in<FloatFormat>(args, task, scratch);
}

void merge_pieces(const AttentionArgs& args, const AttentionTask& task, const float* partials,
                  AttentionScratch scratch) {
  const int value_dim = round_up(args.shape.head_dim, 16);
  RowStates states;
  states.reset();
  std::memset(scratch.accumulated, 0, sizeof(float) * task.num_rows * value_dim);
  for (int p = task.first_partition; p < task.end_partition; ++p) {
    std::memcpy(states.part_maximum, partials, sizeof states.part_maximum);
    std::memcpy(states.part_sum, partials + kRowsPerBlock, sizeof states.part_sum);
    states.merge_part();
    const float* part = partials + 2 * kRowsPerBlock;
    for (int r = 0; r < task.num_rows; ++r) {
      const Vec keep = Vec::set(states.keep[r]), take = Vec::set(states.take[r]);
      for (int d = 0; d < value_dim; d += Vec::kLanes) {
        float* at = scratch.accumulated + int64_t{r} * value_dim + d;
        fma(Vec::load(part + int64_t{r} * value_dim + d), take, Vec::load(at) * keep).store(at);
      }
    }
    partials += partial_floats(task.num_rows, value_dim);
  }
  finish(args, task, scratch.accumulated, states);
}

}  // namespace legato::LEGATO_ISA
