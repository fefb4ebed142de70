#include "recurrence.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "api.h"
#include "pool.h"
#include "scratch.h"

namespace legato {
namespace {

// Below this many elements a task is not worth handing to another thread (about a microsecond).
constexpr int64_t kTaskElements = 8192;
// Of a task of a convolution: memory is read fastest in long pieces of rows, and the tokens before
// the first one are read once more.
constexpr int64_t kTaskTokens = 8, kTaskChannels = 2048;
// Of scaled queries and keys. More tokens take the key heads by turns.
constexpr int64_t kScaledBytes = int64_t{32} << 20;

int64_t num_tokens_of(const StateRows& rows) { return rows.query_starts[rows.num_slices]; }

void convolve_all(const ConvArgs& args, const StateRows& rows) {
  const auto part = LEGATO_PICK(convolve);
  const int64_t num_tokens = num_tokens_of(rows), num_channels = args.num_channels;
  const int64_t tokens = std::min(num_tokens, kTaskTokens);
  if (num_tokens * num_channels <= kTaskElements) {
    return part(args, rows, 0, num_tokens, 0, num_channels);
  }
  const int64_t channels = std::max(kTaskChannels, kTaskElements / tokens / 64 * 64);
  const int64_t num_blocks = (num_channels + channels - 1) / channels;
  Pool::get().run((num_tokens + tokens - 1) / tokens * num_blocks, [&](int64_t i, int) {
    const int64_t token = i / num_blocks * tokens, channel = i % num_blocks * channels;
    part(args, rows, token, std::min(num_tokens, token + tokens), channel,
         std::min(num_channels, channel + channels));
  });
}

void scale_all(const RecurrenceArgs& args, const ScaledKeys& keys) {
  const auto part = LEGATO_PICK(scale_keys);
  const int64_t width = int64_t{2} * keys.num_heads * args.key_dim;
  const int64_t tokens = std::max<int64_t>(1, kTaskElements / width);
  if (keys.num_tokens <= tokens) return part(args, keys, 0, keys.num_tokens);
  Pool::get().run((keys.num_tokens + tokens - 1) / tokens, [&](int64_t i, int) {
    part(args, keys, i * tokens, std::min(keys.num_tokens, (i + 1) * tokens));
  });
}

// Wide blocks take fewer reads of the keys; a quarter of the cache is left to what passes by.
int32_t block_columns(int32_t key_dim) {
  static const int64_t cache_bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  const int64_t bytes = int64_t{kBlockColumns} * key_dim * int64_t{sizeof(float)};
  return bytes * 4 <= cache_bytes * 3 ? kBlockColumns : kBlockColumns / 2;
}

// The tasks of these heads. A matrix that only one token needs is one task. Last slices first:
// prefill chunks are the long tasks.
std::vector<RecurrenceTask> tasks_of(const StateRows& rows, int32_t first_head, int32_t end_head,
                                     const RecurrenceArgs& args) {
  const int32_t value_dim = args.value_dim, block = block_columns(args.key_dim);
  std::vector<RecurrenceTask> tasks;
  for (int32_t s = rows.num_slices - 1; s >= 0; --s) {
    const int32_t length = rows.query_starts[s + 1] - rows.query_starts[s];
    if (length == 0) continue;
    const int32_t columns = length == 1 ? value_dim : block;
    for (int32_t head = first_head; head < end_head; ++head) {
      for (int32_t column = 0; column < value_dim; column += columns) {
        tasks.push_back({s, head, column, std::min(value_dim, column + columns)});
      }
    }
  }
  return tasks;
}

void recur(const RecurrenceArgs& args, const StateRows& rows) {
  const auto run_task = LEGATO_PICK(run_recurrence_task);
  const int64_t num_tokens = num_tokens_of(rows);
  const int64_t head_bytes = num_tokens * 2 * args.key_dim * int64_t{sizeof(float)};
  const int64_t block_bytes = int64_t{args.key_dim} * kBlockColumns * int64_t{sizeof(float)};
  if (num_tokens == 0) return;
  const auto at_once = static_cast<int32_t>(
      std::clamp<int64_t>(kScaledBytes / head_bytes, 1, args.num_key_heads));
  auto* data = reinterpret_cast<float*>(thread_scratch<ScaledKeys>(at_once * head_bytes));
  const int32_t group = args.num_heads / args.num_key_heads;
  for (int32_t first = 0; first < args.num_key_heads; first += at_once) {
    const int32_t num_heads = std::min(at_once, args.num_key_heads - first);
    const ScaledKeys keys{data, num_tokens, first, num_heads};
    scale_all(args, keys);
    const std::vector<RecurrenceTask> tasks =
        tasks_of(rows, first * group, (first + num_heads) * group, args);
    Pool::get().run_in_shares(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
      auto* block = reinterpret_cast<float*>(thread_scratch<RecurrenceTask>(block_bytes));
      run_task(args, rows, keys, tasks[i], block);
    });
  }
}

}  // namespace
}  // namespace legato

LEGATO_API void legato_causal_conv(const legato::ConvArgs* args, const legato::StateRows* rows) {
  legato::convolve_all(*args, *rows);
}

LEGATO_API void legato_recurrence(const legato::RecurrenceArgs* args,
                                  const legato::StateRows* rows) {
  legato::recur(*args, *rows);
}
