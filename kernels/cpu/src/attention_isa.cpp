// The tasks of attention; see attention_kernel.h.

#include "attention_block.h"
#include "attention_kernel.h"
#include "tiles.h"

namespace legato::LEGATO_ISA {
namespace {

// accumulated / sum, in the output's type.
void finish(const AttentionArgs& args, const AttentionTask& task, const float* accumulated,
            const OnlineSoftmax& states) {
  const ShapeView& shape = args.shape;
  const int group = shape.group(), dim = shape.head_dim, value_dim = round_up(dim, 16);
  const int64_t width = int64_t{shape.num_heads} * dim;
  for (int r = 0; r < task.num_rows; ++r) {
    const int row = task.first_row + r;
    const int64_t token = args.batch->query_starts[task.slice] + row / group;
    const int64_t head = task.kv_head * group + row % group;
    const RowPieces pieces =
        row_pieces(token, args.tiled_output ? kTiled : width, args.batch->num_tokens, width);
    const Vec scale = Vec::set(1.0f / states.sum[r]);
    const float* from = accumulated + int64_t{r} * value_dim;
    for (int d = 0; d < dim; d += Vec::kLanes) {
      const Vec value = Vec::load(from + d) * scale;
      const int n = dim - d;
      const int64_t at = pieces.at(head * dim + d);
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
void run_task_in(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next,
               const AttentionScratch& scratch) {
  QueryBlock<Format> block(args, task, next, scratch);
  block.run();
  if (task.partials == nullptr) finish(args, task, scratch.accumulated, block.states());
}

}  // namespace

void run_attention_task(const AttentionArgs& args, const AttentionTask& task,
                        const AttentionTask* next, AttentionScratch scratch) {
  const bool pairs = args.shape.dtype == Dtype::bfloat16 &&
                     (args.shape.kv_dtype == Dtype::bfloat16 || args.shape.kv_dtype == Dtype::int8);
#if defined(__AMX_BF16__)
  return run_task_in<PairFormat>(args, task, next, scratch);
#elif defined(__AVX512BF16__)
  // With more rows it is cheaper to widen a tile once, beforehand.
  if (pairs && args.shape.kv_dtype == Dtype::int8 && task.num_rows <= kBlockRows &&
      args.shape.layout().has_whole_tiles()) {
    return run_task_in<BytePairFormat>(args, task, next, scratch);
  }
#endif
  pairs ? run_task_in<PairFormat>(args, task, next, scratch)
        : run_task_in<FloatFormat>(args, task, next, scratch);
}

void merge_splits(const AttentionArgs& args, const AttentionTask& task, const float* partials,
                  AttentionScratch scratch) {
  const int value_dim = round_up(args.shape.head_dim, 16);
  OnlineSoftmax states;
  states.reset(args.shape, task);
  std::memset(scratch.accumulated, 0, sizeof(float) * task.num_rows * value_dim);
  for (int p = task.first_partition; p < task.end_partition; ++p) {
    std::memcpy(states.part_max, partials, sizeof states.part_max);
    std::memcpy(states.part_sum, partials + kRowsPerBlock, sizeof states.part_sum);
    states.merge_part();
    const float* part = partials + 2 * kRowsPerBlock;
    for (int r = 0; r < task.num_rows; ++r) {
      const Vec old_scale = Vec::set(states.old_scale[r]);
      const Vec part_scale = Vec::set(states.part_scale[r]);
      for (int d = 0; d < value_dim; d += Vec::kLanes) {
        float* at = scratch.accumulated + int64_t{r} * value_dim + d;
        const Vec fresh = Vec::load(part + int64_t{r} * value_dim + d);
        fma(fresh, part_scale, Vec::load(at) * old_scale).store(at);
      }
    }
    partials += partial_floats(task.num_rows, value_dim);
  }
  finish(args, task, scratch.accumulated, states);
}

}  // namespace legato::LEGATO_ISA
