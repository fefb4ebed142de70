// The query rows of a task: where they lie, and which positions they see.
//
// Only for *_isa.cpp files.
#pragma once

#include <cstring>

#include "attention_kernel.h"
#include "attention_softmax.h"
#include "vec.h"

namespace legato::LEGATO_ISA {

template <class Format>
class QueryRows {
 protected:
  QueryRows(const AttentionArgs& args, const AttentionTask& task)
      : args_(args), task_(task), words_(args.shape.head_dim / Format::kPair * Format::kHalves) {
    const int group = args.shape.group();
    const int start = args.batch->starts[task.slice];
    for (int r = 0; r < task.num_rows; ++r) {
      const int position = start + (task.first_row + r) / group;
      end_[r] = position + 1;
      begin_[r] = first_visible(position, args.shape.sliding_window);
    }
  }

  const uint8_t* query_row(int row) const {
    const ShapeView& shape = args_.shape;
    const int group = shape.group();
    const int64_t token = args_.batch->query_starts[task_.slice] + row / group;
    const int64_t head = token * shape.num_heads + task_.kv_head * group + row % group;
    return static_cast<const uint8_t*>(args_.query) +
           head * shape.head_dim * bytes_of(shape.dtype);
  }

  // Rows of words, as the products read them.
  void load_query(float* query) const {
    const int dim = args_.shape.head_dim;
    for (int r = 0; r < task_.num_rows; ++r) {
      const uint8_t* source = query_row(task_.first_row + r);
      float* target = query + int64_t{r} * words_;
      if (Format::kPair != Format::kHalves || args_.shape.dtype == Dtype::float32) {
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

  RowBias bias(int partition, int row) const {
    const ShapeView& shape = args_.shape;
    if (shape.alibi == nullptr) return {nullptr, 0.0f};
    const int group = shape.group();
    const int64_t head = task_.kv_head * group + (task_.first_row + row) % group;
    const float* biases = shape.alibi + head * shape.alibi_stride;
    return {biases + partition * kPartition, biases[end_[row] - 1]};
  }

  const AttentionArgs& args_;
  const AttentionTask& task_;
  const int words_;  // of a query row

 private:
  int begin_[kRowsPerBlock];  // visible positions of each row
  int end_[kRowsPerBlock];
};

}  // namespace legato::LEGATO_ISA
