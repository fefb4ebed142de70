// Cuts the attention of a hybrid batch into tasks for the pool.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention_kernel.h"

namespace legato {

// A block of query rows whose KV range is split; the thread that finishes the last split combines
// them.
struct SplitTask {
  AttentionTask whole;
  int64_t partials;  // offset, in floats
  int32_t num_splits;
};

// Depends on the batch and the model's shape, not on the layer: built once, run for every layer.
// Splitting decides which thread computes what, never a result.
class AttentionPlan {
 public:
  AttentionPlan(const BatchView& batch, const ShapeView& shape, int num_threads);
  void run(const AttentionArgs& args);

 private:
  void add(const AttentionTask& whole, int num_splits, int value_dim);

  std::vector<AttentionTask> tasks_;
  std::vector<int64_t> offsets_;  // of each task's partials
  std::vector<SplitTask> split_tasks_;
  std::unique_ptr<std::atomic<int>[]> unfinished_;  // splits left, by split task
  std::unique_ptr<float[]> partials_;
  int64_t partials_size_ = 0;
};

}  // namespace legato
