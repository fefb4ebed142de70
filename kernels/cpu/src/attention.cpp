#include <algorithm>
#include <cstring>

#include "api.h"
#include "attention_plan.h"
#include "pool.h"
#include "scratch.h"

namespace legato {
namespace {

// Cost of a task in rows times partitions; reading K and V costs as much as a few rows.
constexpr int64_t kReadCost = 8;

int64_t cost_of(int rows, int partitions) { return (rows + kReadCost) * int64_t{partitions}; }

}  // namespace

AttentionPlan::AttentionPlan(const BatchView& batch, const ShapeView& shape, int num_threads) {
  std::vector<AttentionTask> whole;
  int64_t total = 0;
  // Last slices first: prefill chunks are the long tasks, decodes fill the gaps at the end.
  for (int s = batch.num_slices - 1; s >= 0; --s) {
    const int rows = batch.lengths[s] * shape.group();
    for (int end = rows; end > 0; end -= kRowsPerBlock) {
      AttentionTask task{};
      task.slice = s;
      task.first_row = std::max(0, end - kRowsPerBlock);
      task.num_rows = end - task.first_row;
      task.split_task = -1;
      const int first = batch.starts[s] + task.first_row / shape.group();
      const int last = batch.starts[s] + (end - 1) / shape.group();
      task.first_partition = first_visible(first, shape.sliding_window) / kPartition;
      task.end_partition = last / kPartition + 1;
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        task.kv_head = head;
        whole.push_back(task);
        total += cost_of(task.num_rows, task.end_partition - task.first_partition);
      }
    }
  }
  // Enough tasks to keep every thread busy to the end; a split holds at least one partition.
  const int64_t largest = num_threads > 1 ? std::max<int64_t>(1, total / (4 * num_threads)) : total;
  const int value_dim = round_up(shape.head_dim, 16);
  for (const AttentionTask& task : whole) {
    const int partitions = task.end_partition - task.first_partition;
    const int64_t cost = cost_of(task.num_rows, partitions);
    const int64_t splits = std::min<int64_t>(partitions, (cost + largest - 1) / largest);
    add(task, std::max(1, static_cast<int>(splits)), value_dim);
  }
  unfinished_.reset(new std::atomic<int>[split_tasks_.size() + 1]);
  if (partials_size_ > 0) partials_.reset(new float[partials_size_]);
}

void AttentionPlan::add(const AttentionTask& whole, int num_splits, int value_dim) {
  if (num_splits == 1) {
    tasks_.push_back(whole);
    offsets_.push_back(0);
    return;
  }
  const int partitions = whole.end_partition - whole.first_partition;
  const int64_t floats = partial_floats(whole.num_rows, value_dim);
  for (int i = 0; i < num_splits; ++i) {
    AttentionTask part = whole;
    const int begin = partitions * i / num_splits;
    part.split_task = static_cast<int32_t>(split_tasks_.size());
    part.first_partition = whole.first_partition + begin;
    part.end_partition = whole.first_partition + partitions * (i + 1) / num_splits;
    tasks_.push_back(part);
    offsets_.push_back(partials_size_ + begin * floats);
  }
  split_tasks_.push_back({whole, partials_size_, num_splits});
  partials_size_ += partitions * floats;
}

void AttentionPlan::run(const AttentionArgs& args) {
  for (size_t i = 0; i < split_tasks_.size(); ++i) {
    unfinished_[i].store(split_tasks_[i].num_splits, std::memory_order_relaxed);
  }
  const KvLayout layout = args.shape.layout();
  const int64_t scratch_floats = AttentionScratch::num_floats(layout);
  const auto run_attention_task = can_attend_in_tiles(args.shape)
                                      ? LEGATO_IF_BUILT(amx, run_attention_task)
                                      : LEGATO_PICK(run_attention_task);
  const auto merge = LEGATO_PICK(merge_splits);
  const auto num_tasks = static_cast<int64_t>(tasks_.size());
  const int num_threads = Pool::get().size();
  Pool::get().run(num_tasks, [&](int64_t i, int) {
    auto* memory = reinterpret_cast<float*>(thread_scratch<AttentionPlan>(scratch_floats * 4));
    const AttentionScratch scratch(memory, layout);
    AttentionTask task = tasks_[i];
    if (task.split_task >= 0) task.partials = partials_.get() + offsets_[i];
    // Tasks are claimed in order, so this guess is right as long as the threads keep pace.
    const AttentionTask* next = i + num_threads < num_tasks ? &tasks_[i + num_threads] : nullptr;
    run_attention_task(args, task, next, scratch);
    if (task.split_task < 0) return;
    if (unfinished_[task.split_task].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      const SplitTask& split = split_tasks_[task.split_task];
      merge(args, split.whole, partials_.get() + split.partials, scratch);
    }
  });
}

}  // namespace legato

LEGATO_API void legato_attention(const legato::BatchView* batch, const legato::ShapeView* shape,
                                 const void* query, const void* cache, void* output) {
  legato::AttentionPlan plan(*batch, *shape, legato::Pool::get().size());
  plan.run({query, cache, output, batch, *shape});
}

LEGATO_API int64_t legato_kv_block_bytes(int32_t dtype, int32_t block_size, int32_t num_kv_heads,
                                         int32_t head_dim) {
  const auto type = static_cast<legato::Dtype>(dtype);
  return legato::KvLayout(type, block_size, num_kv_heads, head_dim).block_bytes;
}

// pairs: (source, destination), copied one after another in every layer.
LEGATO_API void legato_copy_blocks(char* const* layers, int64_t num_layers, int64_t block_bytes,
                                   const int64_t* pairs, int64_t num_pairs) {
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    for (int64_t i = 0; i < num_pairs; ++i) {
      std::memmove(layers[layer] + pairs[2 * i + 1] * block_bytes,
                   layers[layer] + pairs[2 * i] * block_bytes, block_bytes);
    }
  }
}
