// One tile of an adapter: A x for its rows, then B of that; see adapters.h.

#include "adapters.h"
#include "elementwise_vec.h"

namespace legato::LEGATO_ISA {
namespace {

constexpr int kLanes = Vec::kLanes;
constexpr int kColumnsAhead = 2;  // groups of columns between the use of B and its prefetch

// Registers of weights that one cache line fills.
template <class T>
constexpr int kRegistersInLine = 64 / (kLanes * sizeof(T));

// Stride between the A x of two rows.
inline int64_t shrunk_row(const AdapterModule& m) { return int64_t{m.parts} * m.max_rank; }

// Memory that is read next: its cache lines are prefetched a few at a time beside other work, as
// an adapter's rows are too short, and too many at once, for the processor to foresee.
class Ahead {
 public:
  // num_rows of num_bytes each, whose starts lie stride_bytes apart.
  Ahead(const void* first, int64_t num_bytes, int64_t num_rows, int64_t stride_bytes)
      : row_(static_cast<const char*>(first)), num_bytes_(num_bytes), stride_(stride_bytes),
        left_(first == nullptr ? 0 : num_rows) {}

  void prefetch(int num_lines) {
    for (; num_lines > 0 && left_ > 0; --num_lines) {
      _mm_prefetch(row_ + at_, _MM_HINT_T1);
      at_ += 64;
      if (at_ < num_bytes_) continue;
      at_ = 0;
      row_ += stride_;
      --left_;
    }
  }

 private:
  const char* row_;
  int64_t num_bytes_, stride_, left_, at_ = 0;
};

// R rows of A against M rows of x, each pair summed by itself.
template <class T, int M, int R>
void shrink(const T* const* x, const T* a, int64_t width, float* out, int64_t out_stride,
            Ahead ahead) {
  constexpr int kLines = R * kLanes * sizeof(T) / 64;  // that a step reads
  Vec sums[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) sums[m][r] = Vec::zero();
  }
  int64_t k = 0;
  for (; k + kLanes <= width; k += kLanes) {
    ahead.prefetch(kLines);
    Vec in[M];
    for (int m = 0; m < M; ++m) in[m] = Vec::load(x[m] + k);
    for (int r = 0; r < R; ++r) {
      const Vec weight = Vec::load(a + r * width + k);
      for (int m = 0; m < M; ++m) sums[m][r] = fma(in[m], weight, sums[m][r]);
    }
  }
  if (k < width) {
    const int n = static_cast<int>(width - k);
    for (int r = 0; r < R; ++r) {
      const Vec weight = Vec::load(a + r * width + k, n);
      for (int m = 0; m < M; ++m) sums[m][r] = fma(Vec::load(x[m] + k, n), weight, sums[m][r]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) out[m * out_stride + r] = sums[m][r].sum();
  }
}

// y[m] += sum over r of shrunk[m][r] b[r], C registers of columns from `column` on, n lanes each.
template <class T, int M, int C>
inline void expand(T* const* y, const T* b, const float* shrunk, int64_t stride, int64_t ldb,
                   int64_t column, int rank, int n) {
  Vec sums[M][C];
  for (int m = 0; m < M; ++m) {
    for (int c = 0; c < C; ++c) sums[m][c] = Vec::zero();
  }
  for (int r = 0; r < rank; ++r) {
    Vec factor[M];
    for (int m = 0; m < M; ++m) factor[m] = Vec::set(shrunk[m * stride + r]);
    const T* row = b + r * ldb + column;
    for (int c = 0; c < C; ++c) {
      const T* place = row + c * kLanes;
      if (c % kRegistersInLine<T> == 0) {
        _mm_prefetch(reinterpret_cast<const char*>(place + kColumnsAhead * C * kLanes), _MM_HINT_T1);
      }
      const Vec weight = n == kLanes ? Vec::load(place) : Vec::load(place, n);
      for (int m = 0; m < M; ++m) sums[m][c] = fma(factor[m], weight, sums[m][c]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int c = 0; c < C; ++c) {
      T* place = y[m] + column + c * kLanes;
      if (n == kLanes) {
        (Vec::load(place) + sums[m][c]).store(place);
      } else {
        (Vec::load(place, n) + sums[m][c]).store(place, n);
      }
    }
  }
}

// Where one adapter's weights for one part of a module lie.
template <class T>
struct Part {
  const T* a;
  const T* b;
  int64_t first, end;  // output features
  int32_t rank;

  Part(const AdapterModule& m, int64_t slot, int32_t part)
      : a(static_cast<const T*>(m.a) + (slot * m.parts + part) * m.max_rank * m.in_features),
        b(static_cast<const T*>(m.b) + slot * m.max_rank * m.out_features),
        first(part == 0 ? 0 : m.ends[part - 1]), end(m.ends[part]),
        rank(m.ranks[slot * m.parts + part]) {}
};

template <class T, int M>
void tile_rows(const AdapterArgs& args, const AdapterTile& tile, int32_t next_slot,
               float* shrunk) {
  const AdapterModule& m = *args.module;
  const T* x[M];
  T* y[M];
  for (int i = 0; i < M; ++i) {
    x[i] = static_cast<const T*>(args.x) + tile.rows[i] * m.in_features;
    y[i] = static_cast<T*>(args.y) + tile.rows[i] * m.out_features;
  }
  const int64_t stride = shrunk_row(m);
  constexpr int kRows = M == 1 ? kRanksAtOnce : kRanksAtOnce / 2;
  constexpr int kColumns = M == 1 ? 4 : 2;
  const int64_t in_bytes = m.in_features * int64_t{sizeof(T)};
  for (int32_t i = 0; i < m.parts; ++i) {
    const Part<T> part(m, tile.slot, i);
    if (part.rank == 0) continue;
    for (int32_t r = 0; r < part.rank; r += kRows) {
      const T* a = part.a + r * m.in_features;
      const Ahead ahead =
          r + kRows < part.rank
              ? Ahead(a + kRows * m.in_features, kRows * in_bytes, 1, 0)
              : Ahead(part.b + part.first, kColumnsAhead * kColumns * kLanes * sizeof(T), part.rank,
                      m.out_features * sizeof(T));
      shrink<T, M, kRows>(x, a, m.in_features, shrunk + r, stride, ahead);
    }
    const bool last = i + 1 == m.parts;
    Ahead ahead(last ? next_slot < 0 ? nullptr : Part<T>(m, next_slot, 0).a
                     : Part<T>(m, tile.slot, i + 1).a,
                kRows * in_bytes, 1, 0);
    const int64_t groups = (part.end - part.first) / (kColumns * kLanes);
    const int lines = static_cast<int>(kRows * in_bytes / 64 / (groups + 1) + 1);
    int64_t o = part.first;
    for (; o + kColumns * kLanes <= part.end; o += kColumns * kLanes) {
      ahead.prefetch(lines);
      expand<T, M, kColumns>(y, part.b, shrunk, stride, m.out_features, o, part.rank, kLanes);
    }
    for (; o < part.end; o += kLanes) {
      const int n = static_cast<int>(part.end - o < kLanes ? part.end - o : kLanes);
      expand<T, M, 1>(y, part.b, shrunk, stride, m.out_features, o, part.rank, n);
    }
  }
}

template <class T>
void tile_in(const AdapterArgs& args, const AdapterTile& tile, int32_t next_slot, float* shrunk) {
  switch (tile.num_rows) {
    case 1: return tile_rows<T, 1>(args, tile, next_slot, shrunk);
    case 2: return tile_rows<T, 2>(args, tile, next_slot, shrunk);
    case 3: return tile_rows<T, 3>(args, tile, next_slot, shrunk);
    default: return tile_rows<T, 4>(args, tile, next_slot, shrunk);
  }
}

}  // namespace

void adapt_tile(const AdapterArgs& args, const AdapterTile& tile, int32_t next_slot,
                float* shrunk) {
  const Dtype dtype = args.module->dtype;
  if (dtype == Dtype::bfloat16) return tile_in<bf16>(args, tile, next_slot, shrunk);
  if (dtype == Dtype::float16) return tile_in<fp16>(args, tile, next_slot, shrunk);
  tile_in<float>(args, tile, next_slot, shrunk);
}

}  // namespace legato::LEGATO_ISA
