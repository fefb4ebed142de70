// LoRA adapters of linear layers: y += B (A x) for the rows of a batch that use one (the shrink and
// expand steps of Punica's SGMV, arXiv 2310.18547).
//
// A row's sum is computed in one fixed order, whatever rows are batched with it; A x stays float.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_layout.h"
#include "isa.h"

namespace legato {

// Field by field in kernels/cpu/adapters.py; the layout is that of kernels/adapters.py.
struct AdapterModule {
  const void* a;         // (slots, parts, max_rank, in_features)
  const void* b;         // (slots, max_rank, out_features), scaled
  const int32_t* ranks;  // (slots, parts)
  const int32_t* ends;   // (parts): where each part's output features end
  int64_t in_features;
  int64_t out_features;
  int32_t parts;
  int32_t max_rank;  // a multiple of kRanksAtOnce
  Dtype dtype;
};

// rows[starts[i]] to rows[starts[i + 1]] use slots[i].
struct AdapterRuns {
  const int32_t* rows;
  const int32_t* starts;
  const int32_t* slots;
  int32_t num_runs;
};

constexpr int kRanksAtOnce = 8;
constexpr int kAdapterRows = 4;  // of one slot that share a pass over A and B

// Some rows of one run: a task.
struct AdapterTile {
  const int32_t* rows;
  int32_t num_rows;
  int32_t slot;
};

using AdapterTiles = std::vector<AdapterTile>;

AdapterTiles tiles_of(const AdapterRuns& runs);

struct AdapterArgs {
  const AdapterModule* module;
  const void* x;  // rows of in_features
  void* y;        // rows of out_features
};

// next_slot: of the tile that this thread probably runs next, or -1; its first weights are prefetched
// at the end. shrunk: memory for kAdapterRows x parts x max_rank floats.
LEGATO_FOR_EACH_ISA(void adapt_tile(const AdapterArgs& args, const AdapterTile& tile,
                                    int32_t next_slot, float* shrunk))

// The whole operation on the pool.
void adapt(const AdapterModule& module, const AdapterTiles& tiles, const void* x, void* y);

}  // namespace legato
