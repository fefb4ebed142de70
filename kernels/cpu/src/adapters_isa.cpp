// One tile of an adapter: A x for its rows, then B of that; see adapters.h.

#include "adapters.h"
#include "elementwise_vec.h"

namespace legato::LEGATO_ISA {
namespace {

constexpr int kLanes = Vec::kLanes;

// Stride between the A x of two rows.
inline int64_t shrunk_row(const AdapterModule& m) { return int64_t{m.parts} * m.max_rank; }

// R rows of A against M rows of x, each pair summed by itself.
template <class T, int M, int R>
void shrink(const T* const* x, const T* a, int64_t width, float* out, int64_t out_stride) {
  Vec sums[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) sums[m][r] = Vec::zero();
  }
  int64_t k = 0;
  for (; k + kLanes <= width; k += kLanes) {
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
    for (int c = 0; c < C; ++c) {
      const T* place = b + r * ldb + column + c * kLanes;
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

template <class T, int M>
void tile_rows(const AdapterArgs& args, const AdapterTile& tile, const int32_t* rows,
               float* shrunk) {
  const AdapterModule& m = *args.module;
  const T* x[M];
  T* y[M];
  for (int i = 0; i < M; ++i) {
    x[i] = static_cast<const T*>(args.x) + rows[i] * m.in_features;
    y[i] = static_cast<T*>(args.y) + rows[i] * m.out_features;
  }
  const int64_t stride = shrunk_row(m), slot = tile.slot;
  constexpr int kRows = M == 1 ? kRanksAtOnce : kRanksAtOnce / 2;
  int64_t begin = 0;
  for (int32_t part = 0; part < m.parts; ++part) {
    const int64_t end = m.ends[part];
    const int32_t rank = m.ranks[slot * m.parts + part];
    const int64_t first = begin;
    begin = end;
    if (rank == 0) continue;
    const T* a = static_cast<const T*>(m.a) + (slot * m.parts + part) * m.max_rank * m.in_features;
    for (int32_t r = 0; r < rank; r += kRows) {
      shrink<T, M, kRows>(x, a + r * m.in_features, m.in_features, shrunk + r, stride);
    }
    const T* b = static_cast<const T*>(m.b) + slot * m.max_rank * m.out_features;
    constexpr int kColumns = M == 1 ? 4 : 2;
    int64_t o = first;
    for (; o + kColumns * kLanes <= end; o += kColumns * kLanes) {
      expand<T, M, kColumns>(y, b, shrunk, stride, m.out_features, o, rank, kLanes);
    }
    for (; o < end; o += kLanes) {
      const int n = static_cast<int>(end - o < kLanes ? end - o : kLanes);
      expand<T, M, 1>(y, b, shrunk, stride, m.out_features, o, rank, n);
    }
  }
}

template <class T>
void tile_in(const AdapterArgs& args, const AdapterTile& tile, float* shrunk) {
  switch (tile.num_rows) {
    case 1: return tile_rows<T, 1>(args, tile, tile.rows, shrunk);
    case 2: return tile_rows<T, 2>(args, tile, tile.rows, shrunk);
    case 3: return tile_rows<T, 3>(args, tile, tile.rows, shrunk);
    default: return tile_rows<T, 4>(args, tile, tile.rows, shrunk);
  }
}

}  // namespace

void adapt_tile(const AdapterArgs& args, const AdapterTile& tile, float* shrunk) {
  const Dtype dtype = args.module->dtype;
  if (dtype == Dtype::bfloat16) return tile_in<bf16>(args, tile, shrunk);
  if (dtype == Dtype::float16) return tile_in<fp16>(args, tile, shrunk);
  tile_in<float>(args, tile, shrunk);
}

}  // namespace legato::LEGATO_ISA
