#include "elementwise_kernel.h"

#include <algorithm>

#include "api.h"
#include "pool.h"

namespace legato {
namespace {

// Below this many elements a task is not worth handing to another thread (about a microsecond).
constexpr int64_t kTaskElements = 8192;

// Calls f(begin, end) over [0, num_rows) in tasks of about kTaskElements; `align` moves a boundary
// forward where rows must stay together.
template <class F, class Align>
void for_rows(int64_t num_rows, int64_t row_elements, F&& f, Align&& align) {
  const int64_t rows = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, row_elements));
  const int64_t num_tasks = (num_rows + rows - 1) / rows;
  if (num_tasks <= 1) {
    if (num_rows > 0) f(0, num_rows);
    return;
  }
  Pool::get().run(num_tasks, [&](int64_t i, int) {
    const int64_t begin = align(i * rows);
    const int64_t end = align(std::min(num_rows, (i + 1) * rows));
    if (begin < end) f(begin, end);
  });
}

int64_t as_is(int64_t row) { return row; }

}  // namespace

void norm(const NormArgs& args, int64_t num_rows) {
  const auto rows = LEGATO_PICK(norm_rows);
  for_rows(num_rows, args.width, [&](int64_t b, int64_t e) { rows(args, b, e); }, as_is);
}

void activate(const ActivateArgs& args, int64_t num_rows) {
  const auto rows = LEGATO_PICK(activate_rows);
  const int64_t width = args.gated ? 2 * args.width : args.width;
  for_rows(num_rows, width, [&](int64_t b, int64_t e) { rows(args, b, e); }, as_is);
}

void moe_combine(const CombineArgs& args, int64_t num_rows) {
  const auto rows = LEGATO_PICK(combine_rows);
  for_rows(num_rows, args.width, [&](int64_t b, int64_t e) { rows(args, b, e); }, as_is);
}

void rope_and_cache(const RopeArgs& args) {
  const auto rows = LEGATO_PICK(rope_rows);
  const ShapeView& shape = args.shape;
  const int32_t* slot_mapping = args.batch->slot_mapping;
  const int64_t num_tokens = args.batch->num_tokens;
  // The two tokens of a pair share the words of V, so one thread writes both.
  auto keep_pairs = [&](int64_t t) {
    const bool second = t > 0 && t < num_tokens && slot_mapping[t] % shape.block_size % 2 == 1 &&
                        slot_mapping[t - 1] + 1 == slot_mapping[t];
    return second ? t + 1 : t;
  };
  const int64_t width = int64_t{shape.num_heads + 2 * shape.num_kv_heads} * shape.head_dim;
  for_rows(num_tokens, width, [&](int64_t b, int64_t e) { rows(args, b, e); }, keep_pairs);
}

}  // namespace legato

LEGATO_API void legato_norm(const void* x, void* residual, const void* weight, void* y,
                            int64_t num_rows, int64_t width, float eps, int32_t dtype,
                            int32_t wide) {
  const auto type = static_cast<legato::Dtype>(dtype);
  legato::norm({x, residual, weight, y, width, eps, type, nullptr, false, wide != 0}, num_rows);
}

LEGATO_API void legato_layer_norm(const void* x, const void* weight, const void* bias, void* y,
                                  int64_t num_rows, int64_t width, float eps, int32_t dtype) {
  const auto type = static_cast<legato::Dtype>(dtype);
  legato::norm({x, nullptr, weight, y, width, eps, type, bias, true}, num_rows);
}

LEGATO_API void legato_activate(const void* x, void* y, int64_t num_rows, int64_t width,
                                int32_t dtype, int32_t activation, int32_t gated) {
  legato::activate({x, y, width, static_cast<legato::Dtype>(dtype),
                    static_cast<legato::Activation>(activation), gated != 0},
                   num_rows);
}

LEGATO_API void legato_rope_and_cache(const legato::BatchView* batch,
                                      const legato::ShapeView* shape, const void* qkv,
                                      const float* cos_sin, void* query, void* cache,
                                      const void* q_norm, const void* k_norm, int32_t wide_norms,
                                      float eps) {
  legato::rope_and_cache(
      {qkv, cos_sin, query, cache, q_norm, k_norm, wide_norms != 0, eps, batch, *shape});
}
