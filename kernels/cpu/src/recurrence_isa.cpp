// A task of a recurrence; see recurrence.h.

#include "elementwise_vec.h"
#include "recurrence.h"

namespace legato::LEGATO_ISA {
namespace {

constexpr int kLanes = Vec::kLanes;
constexpr int64_t kAhead = 2;  // tokens between a prefetch and its use
constexpr float kEps = 1e-6f;  // of the lengths of queries and keys

// As floats, times scale.
template <class T>
inline void widen(const T* x, float* y, int64_t width, float scale) {
  const Vec factor = Vec::set(scale);
  for_lanes(width, [&](int64_t i, int n) { store_lanes(load_lanes(x + i, n) * factor, y + i, n); });
}

template <class T>
void scale_in(const RecurrenceArgs& args, const ScaledKeys& keys, int64_t first_token,
              int64_t end_token) {
  const int64_t dim = args.key_dim;
  const float root = __builtin_sqrtf(static_cast<float>(dim));
  // 1 / length = 1 / (root of the mean square) / root of dim
  const auto inverse_length = [&](const T* x) {
    return inverse_rms(x, dim, kEps / static_cast<float>(dim)) / root;
  };
  for (int64_t t = first_token; t < end_token; ++t) {
    const T* row = static_cast<const T*>(args.qkv) + t * args.qkv_stride;
    for (int32_t i = 0; i < keys.num_heads; ++i) {
      const int32_t head = keys.first_head + i;
      const T* query = row + head * dim;
      const T* key = query + args.num_key_heads * dim;
      float* scaled = keys.at(head, t, args.key_dim);
      widen(query, scaled, dim, args.delta ? inverse_length(query) / root : 1.0f);
      widen(key, scaled + dim, dim, args.delta ? inverse_length(key) : 1.0f);
    }
  }
}

// Where columns of a matrix lie.
struct Place {
  float* first;
  int64_t stride;  // from row to row
};

struct Token {
  const float* query;
  const float* key;
  const float* next_key;  // of the token after it
  float decay;
};

// V registers of neighbouring columns of a matrix; kPart: one register of n lanes. The even and the
// odd rows have a sum each, in registers.
template <int V, bool kPart>
struct Columns {
  int64_t num_rows;
  int n;

  Vec load(const float* p) const { return kPart ? Vec::load(p, n) : Vec::load(p); }
  template <bool kStream>
  void store(Vec x, float* p) const {
    if (kStream) {
      x.stream(p);
    } else if (kPart) {
      x.store(p, n);
    } else {
      x.store(p);
    }
  }

  void copy(Place in, Place out) const {
    for (int64_t f = 0; f < num_rows; ++f) {
      for (int v = 0; v < V * kLanes; v += kLanes) {
        store<false>(load(in.first + f * in.stride + v), out.first + f * out.stride + v);
      }
    }
  }

  // key M
  void multiply(const float* key, Place in, Vec* out) const {
    Vec sums[2][V];
    for (int v = 0; v < V; ++v) sums[0][v] = sums[1][v] = Vec::zero();
    const auto row = [&](int64_t f, Vec* sum) {
      const Vec k = Vec::set(key[f]);
      const float* m = in.first + f * in.stride;
      for (int v = 0; v < V; ++v) sum[v] = fma(k, load(m + v * kLanes), sum[v]);
    };
    int64_t f = 0;
    for (; f + 2 <= num_rows; f += 2) {
      row(f, sums[0]);
      row(f + 1, sums[1]);
    }
    if (f < num_rows) row(f, sums[0]);
    for (int v = 0; v < V; ++v) out[v] = sums[0][v] + sums[1][v];
  }

  // M = decay M + key (x) u, from one place to another, and query M. kNext: also what `multiply`
  // would give for the next key, without another pass over M. kStream: past the caches, with a
  // prefetch of what is read next.
  template <bool kNext, bool kStream>
  void update(const Token& token, Place in, Place out, const float* read_next, const Vec* u,
              Vec* result, Vec* next) const {
    const Vec decay = Vec::set(token.decay);
    Vec given[V], results[2][V], sums[2][V];
    for (int v = 0; v < V; ++v) {
      given[v] = u[v];
      results[0][v] = results[1][v] = sums[0][v] = sums[1][v] = Vec::zero();
    }
    const auto row = [&](int64_t f, Vec* of_query, Vec* of_next) {
      const Vec k = Vec::set(token.key[f]), q = Vec::set(token.query[f]);
      const Vec next_k = kNext ? Vec::set(token.next_key[f]) : Vec::zero();
      for (int v = 0; v < V; ++v) {
        if (kStream) _mm_prefetch(read_next + f * out.stride + v * kLanes, _MM_HINT_T1);
        const Vec m = fma(k, given[v], load(in.first + f * in.stride + v * kLanes) * decay);
        store<kStream>(m, out.first + f * out.stride + v * kLanes);
        of_query[v] = fma(q, m, of_query[v]);
        if (kNext) of_next[v] = fma(next_k, m, of_next[v]);
      }
    };
    int64_t f = 0;
    for (; f + 2 <= num_rows; f += 2) {
      row(f, results[0], sums[0]);
      row(f + 1, results[1], sums[1]);
    }
    if (f < num_rows) row(f, results[0], sums[0]);
    for (int v = 0; v < V; ++v) {
      result[v] = results[0][v] + results[1][v];
      if (kNext) next[v] = sums[0][v] + sums[1][v];
    }
  }
};

// Columns from `column` on, over the tokens of a slice; between the first token and the last, they
// are in `block`, and after one whose state is saved.
template <class T, int V, bool kPart>
void run_columns(const RecurrenceArgs& args, const StateRows& rows, const ScaledKeys& keys,
                 const RecurrenceTask& task, int64_t column, int n, float* block) {
  const Columns<V, kPart> columns{args.key_dim, n};
  constexpr int64_t kWidth = V * kLanes;
  const int64_t num_rows = args.key_dim, dim = args.value_dim, heads = args.num_heads;
  const int64_t begin = rows.query_starts[task.slice], end = rows.query_starts[task.slice + 1];
  const int64_t read = rows.reads[task.slice], write = rows.writes[task.slice];
  const auto matrix = [&](int64_t row, int64_t head) {
    return args.states + (row * heads + head) * num_rows * dim;
  };
  const Place within{block, kWidth}, target{matrix(write, task.head) + column, dim};
  Place in = within;
  if (read < 0) {
    for (int64_t i = 0; i < num_rows * kWidth; i += kLanes) Vec::zero().store(block + i);
  } else {
    in = {matrix(read, task.head) + column, dim};
  }
  // The next columns or, where a thread takes all of a head, the next head.
  const float* read_next = in.first;
  if (column + kWidth < task.end_column) {
    read_next += read < 0 ? 0 : kWidth;
  } else if (read >= 0 && task.head + 1 < heads) {
    read_next = matrix(read, task.head + 1) + task.first_column;
  }
  const bool streams =
      !kPart && dim % 16 == 0 && reinterpret_cast<uintptr_t>(target.first) % 64 == 0;
  const int32_t key_head = task.head / (args.num_heads / args.num_key_heads);
  const float* query = keys.at(key_head, begin, args.key_dim);
  const T* value = static_cast<const T*>(args.qkv) + begin * args.qkv_stride +
                   int64_t{2} * args.num_key_heads * num_rows + task.head * dim + column;
  T* out = static_cast<T*>(args.out) + (begin * heads + task.head) * dim + column;
  Vec sums[V];
  if (args.delta) columns.multiply(query + num_rows, in, sums);
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t i = 0; t + kAhead < end && i < kWidth; i += 64 / sizeof(T)) {
      _mm_prefetch(value + kAhead * args.qkv_stride + i, _MM_HINT_T0);
      _mm_prefetch(out + kAhead * heads * dim + i, _MM_HINT_T0);
    }
    const float* key = query + num_rows;
    const float decay = args.decays[t * args.decays_stride + task.head];
    const float rate = args.rates[t * args.rates_stride + task.head];
    const Token token{query, key, key + 2 * num_rows, decay};
    Vec u[V], result[V];
    for (int v = 0; v < V; ++v) {
      u[v] = load_lanes(value + v * kLanes, n);
      if (args.delta) u[v] = u[v] - Vec::set(decay) * sums[v];
      u[v] = u[v] * Vec::set(rate);
    }
    const bool last = t + 1 == end;
    const int32_t save = rows.save_after(task.slice, t + 1 - begin);
    const Place to = last && save < 0 ? target : within;
    if (last && streams && save < 0) {
      columns.template update<false, !kPart>(token, in, to, read_next, u, result, sums);
    } else if (last || !args.delta) {
      columns.template update<false, false>(token, in, to, read_next, u, result, sums);
    } else {
      columns.template update<true, false>(token, in, to, read_next, u, result, sums);
    }
    for (int v = 0; v < V; ++v) store_lanes(result[v], out + v * kLanes, n);
    if (save >= 0) {
      columns.copy(within, {matrix(save, task.head) + column, dim});
      if (last) columns.copy(within, target);
    }
    in = within;
    query += 2 * num_rows;
    value += args.qkv_stride;
    out += heads * dim;
  }
}

template <class T>
void task_in(const RecurrenceArgs& args, const StateRows& rows, const ScaledKeys& keys,
             const RecurrenceTask& task, float* block) {
  int64_t c = task.first_column;
  const int64_t end = task.end_column;
  if constexpr (kLanes == 16) {  // which has the registers for it
    for (; c + 4 * kLanes <= end; c += 4 * kLanes) {
      run_columns<T, 4, false>(args, rows, keys, task, c, kLanes, block);
    }
  }
  for (; c + 2 * kLanes <= end; c += 2 * kLanes) {
    run_columns<T, 2, false>(args, rows, keys, task, c, kLanes, block);
  }
  for (; c + kLanes <= end; c += kLanes) {
    run_columns<T, 1, false>(args, rows, keys, task, c, kLanes, block);
  }
  if (c < end) run_columns<T, 1, true>(args, rows, keys, task, c, static_cast<int>(end - c), block);
  _mm_sfence();  // what went past the caches is visible to whoever sees this task done
}

}  // namespace

void scale_keys(const RecurrenceArgs& args, const ScaledKeys& keys, int64_t first_token,
                int64_t end_token) {
  if (args.dtype == Dtype::bfloat16) return scale_in<bf16>(args, keys, first_token, end_token);
  if (args.dtype == Dtype::float16) return scale_in<fp16>(args, keys, first_token, end_token);
  scale_in<float>(args, keys, first_token, end_token);
}

void run_recurrence_task(const RecurrenceArgs& args, const StateRows& rows, const ScaledKeys& keys,
                         const RecurrenceTask& task, float* block) {
  if (args.dtype == Dtype::bfloat16) return task_in<bf16>(args, rows, keys, task, block);
  if (args.dtype == Dtype::float16) return task_in<fp16>(args, rows, keys, task, block);
  task_in<float>(args, rows, keys, task, block);
}

}  // namespace legato::LEGATO_ISA
