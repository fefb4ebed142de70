// Cuts the attention of a hybrid batch into tasks for the pool.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention_kernel.h"

namespace legato {

// A block of rows cut along its partitions; the thread that finishes its last piece merges them.
struct AttentionSplit {
  AttentionTask whole;
  int64_t partials;  // offset, in floats
  int32_t num_pieces;
};

// Depends on the batch and the model's shape, not on the layer: made once, run for every layer.
// The cut decides which thread computes what, never a result.
class AttentionPlan {
 public:
  AttentionPlan(const BatchView& batch, const ShapeView& shape, int num_threads);
  void run(const AttentionArgs& args);

 private:
  void add(const AttentionTask& whole, int num_pieces, int value_dim);

  std::vector<AttentionTask> tasks_;
  std::vector<int64_t> offsets_;  // of each task's partials
  std::vector<AttentionSplit> splits_;
  std::unique_ptr<std::atomic<int>[]> unfinished_;  // pieces, by split
  std::unique_ptr<float[]> partials_;
  int64_t partials_size_ = 0;
};

}  // namespace legato
